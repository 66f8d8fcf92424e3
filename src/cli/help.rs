//! `help`: prints the help of the program, or of a command.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::CommandFactory;

use super::args::Cli;
use super::output;
use super::parse::{self, Parsed};
use super::usage::usage_error;

/// Prints the help of the program, or of the command with these words.
pub(super) fn run(words: &[String]) -> ExitCode {
    match text(words) {
        Ok(text) => output::print(&text),
        Err(error) => usage_error(&error),
    }
}

/// Returns the help of the program, or of the command with these words.
///
/// # Errors
/// If there is no such command.
pub(super) fn text(words: &[String]) -> Result<String> {
    let args: Vec<_> = words
        .iter()
        .map(OsString::from)
        .chain(["--help".into()])
        .collect();
    Ok(match parse::parse::<Cli>(&args)? {
        Parsed::Help(text) => text,
        Parsed::Run(_) | Parsed::Version => Cli::command().render_long_help().to_string(),
    })
}
