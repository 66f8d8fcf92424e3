//! What clap makes of a command line, with errors in the form of all other messages.

use std::ffi::OsString;

use anyhow::Result;
use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use base::report::{catalog, failure};

/// What a command line asks for.
#[derive(Debug)]
pub enum Asked<T> {
    Run(T),
    Help(String),
    Version,
}

/// Parses the arguments, argv\[0\] left out.
///
/// # Errors
/// If the command line is wrong.
pub fn parse<T: Parser>(args: &[OsString]) -> Result<Asked<T>> {
    let command = T::command();
    let error = match T::try_parse_from(std::iter::once(command.get_name().into()).chain(args.iter().cloned())) {
        Ok(options) => return Ok(Asked::Run(options)),
        Err(error) => error,
    };
    match error.kind() {
        ErrorKind::DisplayHelp => Ok(Asked::Help(error.render().to_string())),
        ErrorKind::DisplayVersion => Ok(Asked::Version),
        _ => Err(wrong(&error, &path(&command, args))),
    }
}

/// An error of the command line. `path` is the command whose help lists what there is.
fn wrong(error: &clap::Error, path: &str) -> anyhow::Error {
    let text = error.render().to_string();
    // Then come tips and the usage.
    let what: Vec<_> = text.split("\n\n").next().unwrap_or_default().split_whitespace().collect();
    let what = what.join(" ");
    let help = format!("\"{path} --help\"");
    let hint = match meant(error) {
        Some(meant) => format!("did you mean {meant}? See {help}"),
        None => format!("run {help}"),
    };
    failure(
        &catalog::COMMAND_LINE,
        format!("wrong command line: {}", what.strip_prefix("error: ").unwrap_or(&what)),
        hint,
    )
}

/// The most similar word that the command has.
fn meant(error: &clap::Error) -> Option<&String> {
    let suggested = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::SuggestedValue];
    match suggested.into_iter().find_map(|kind| error.get(kind))? {
        ContextValue::String(word) => Some(word),
        // The most similar one is the last.
        ContextValue::Strings(words) => words.last(),
        _ => None,
    }
}

/// The program with the commands that the line names.
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
