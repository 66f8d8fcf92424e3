//! Writes to stdout. No other file does, because stdout is data for the runtime at some stages.

use std::io::Write;
use std::process::ExitCode;

/// Prints text. Fails if stdout cannot be written, for example because the reader of a pipe has ended.
pub(crate) fn print(text: &str) -> ExitCode {
    write(text.as_bytes())
}

pub(crate) fn write(bytes: &[u8]) -> ExitCode {
    let mut stdout = std::io::stdout().lock();
    // Stdout is buffered by lines. Without the flush, an error at the end of the program would be lost.
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
