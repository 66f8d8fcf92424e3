//! Prints the result of a command to stdout.

use std::process::ExitCode;

use anyhow::Error;

use base::sys::stdio;

use crate::record::call::Call;

/// Prints text. Fails if stdout cannot be written.
pub(crate) fn print(text: &str) -> ExitCode {
    write(text.as_bytes())
}

pub(crate) fn write(bytes: &[u8]) -> ExitCode {
    match stdio::print(bytes) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            Call::default().error(&Error::new(error).context("cannot write to stdout"));
            ExitCode::FAILURE
        }
    }
}
