//! The only file that writes to stdout: at some stages stdout is data.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;

use crate::log::Log;

/// Prints and succeeds, or fails when nobody reads.
pub(crate) fn print(text: &str) -> ExitCode {
    write(text.as_bytes())
}

pub(crate) fn write(bytes: &[u8]) -> ExitCode {
    let mut stdout = std::io::stdout().lock();
    // Stdout is buffered by lines, and what it could not write at the end of the program nobody would hear of.
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Prints it, or says why there is nothing to print.
pub(crate) fn print_or_fail(text: Result<String>, log: &mut Log) -> ExitCode {
    match text {
        Ok(text) => print(&text),
        Err(error) => {
            log.error(&error);
            ExitCode::FAILURE
        }
    }
}
