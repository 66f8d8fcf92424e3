//! Parses command lines with clap, and gives its errors the form of all other messages.

use std::ffi::OsString;

use anyhow::Result;
use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use base::report::failure;
use findings::catalog;

/// A valid command line.
#[derive(Debug)]
pub enum Parsed<T> {
    Run(T),
    Help(String),
    Version,
}

/// Parses the arguments after argv\[0\].
///
/// # Errors
/// If the command line is invalid.
pub fn parse<T: Parser>(args: &[OsString]) -> Result<Parsed<T>> {
    let command = T::command();
    let error = match T::try_parse_from(std::iter::once(command.get_name().into()).chain(args.iter().cloned())) {
        Ok(options) => return Ok(Parsed::Run(options)),
        Err(error) => error,
    };
    match error.kind() {
        ErrorKind::DisplayHelp => Ok(Parsed::Help(error.render().to_string())),
        ErrorKind::DisplayVersion => Ok(Parsed::Version),
        _ => Err(invalid(&error, &path(&command, args))),
    }
}

/// Returns the error for an invalid command line. `path` is the command whose help describes the valid ones.
fn invalid(error: &clap::Error, path: &str) -> anyhow::Error {
    let text = error.render().to_string();
    // clap adds tips and the usage, after empty lines.
    let what: Vec<_> = text.split("\n\n").next().unwrap_or_default().split_whitespace().collect();
    let what = what.join(" ");
    let help = format!("\"{path} --help\"");
    let hint = match suggestion(error) {
        Some(word) => format!("did you mean {word}? See {help}"),
        None => format!("run {help}"),
    };
    failure(
        &catalog::COMMAND_LINE,
        format!("invalid command line: {}", what.strip_prefix("error: ").unwrap_or(&what)),
        hint,
    )
}

/// Returns the most similar valid word.
fn suggestion(error: &clap::Error) -> Option<&String> {
    let suggested = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::SuggestedValue];
    match suggested.into_iter().find_map(|kind| error.get(kind))? {
        ContextValue::String(word) => Some(word),
        // clap puts the most similar word last.
        ContextValue::Strings(words) => words.last(),
        _ => None,
    }
}

/// Returns the name of the program, followed by the commands on the command line.
fn path(program: &clap::Command, args: &[OsString]) -> String {
    let mut path = program.get_name().to_owned();
    let mut command = program;
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if arg == "--config" {
            args.next();
        }
        if arg.as_encoded_bytes().starts_with(b"-") {
            continue;
        }
        let Some(found) = command.find_subcommand(arg) else { break };
        command = found;
        path = format!("{path} {}", found.get_name());
    }
    path
}
