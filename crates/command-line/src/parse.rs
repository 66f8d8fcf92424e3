//! Parses command lines with clap, and gives its errors the form of all other messages.

use std::ffi::OsString;

use anyhow::Result;
use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use base::nearest::nearest;
use base::report::failure;
use findings::catalog;

/// A valid command line.
#[derive(Debug)]
pub enum Parsed<T> {
    /// A command with its options
    Run(T),
    /// `--help`, with the text
    Help(String),
    /// `--version`
    Version,
}

/// Parses the arguments after argv\[0\].
///
/// # Errors
/// If the command line is invalid.
pub fn parse<T: Parser>(args: &[OsString]) -> Result<Parsed<T>> {
    let mut command = T::command();
    let error = match T::try_parse_from(
        std::iter::once(command.get_name().into()).chain(args.iter().cloned()),
    ) {
        Ok(options) => return Ok(Parsed::Run(options)),
        Err(error) => error,
    };
    match error.kind() {
        ErrorKind::DisplayHelp => Ok(Parsed::Help(error.render().to_string())),
        ErrorKind::DisplayVersion => Ok(Parsed::Version),
        _ => {
            // Gives each command the global options.
            command.build();
            let (path, command) = called(&command, args);
            Err(invalid(&error, &path, command))
        }
    }
}

/// Returns the error for an invalid command line. `path` is the command whose help describes the valid ones.
fn invalid(error: &clap::Error, path: &str, command: &clap::Command) -> anyhow::Error {
    let text = error.render().to_string();
    // clap adds tips and the usage, after empty lines.
    let what: Vec<_> = text
        .split("\n\n")
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    let what = match error.kind() {
        // clap lists all commands, and the help does too.
        ErrorKind::MissingSubcommand => "a command is missing".to_owned(),
        _ => double_quoted(&what.join(" ")).replace("unrecognized subcommand", "unknown command"),
    };
    let help = format!("\"{path} --help\"");
    let hint = match suggestion(error, command) {
        Some(word) => format!("did you mean {word}? See {help}"),
        None => format!("run {help}"),
    };
    failure(
        &catalog::COMMAND_LINE,
        format!(
            "invalid command line: {}",
            what.strip_prefix("error: ").unwrap_or(&what)
        ),
        hint,
    )
}

/// Replaces the quotes of clap, 'x', with the double quotes of all other messages. An apostrophe is between two letters.
fn double_quoted(text: &str) -> String {
    let mut quoted = String::new();
    let mut chars = text.chars().peekable();
    let mut before = ' ';
    while let Some(c) = chars.next() {
        let is_apostrophe =
            before.is_alphanumeric() && chars.peek().is_some_and(|next| next.is_alphanumeric());
        quoted.push(if c == '\'' && !is_apostrophe { '"' } else { c });
        before = c;
    }
    quoted
}

/// Returns the valid word that differs in at most two letters. clap also suggests words that differ in more, and stages.
fn suggestion(error: &clap::Error, command: &clap::Command) -> Option<String> {
    let text_of = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let known: Vec<String> = match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let visible = command.get_subcommands().filter(|one| !one.is_hide_set());
            visible.map(|one| one.get_name().to_owned()).collect()
        }
        ErrorKind::UnknownArgument => command
            .get_arguments()
            .filter_map(clap::Arg::get_long)
            .map(|long| format!("--{long}"))
            .collect(),
        ErrorKind::InvalidValue => match error.get(ContextKind::ValidValue) {
            Some(ContextValue::Strings(values)) => values.clone(),
            _ => Vec::new(),
        },
        _ => return None,
    };
    let word = match error.kind() {
        ErrorKind::InvalidSubcommand => text_of(ContextKind::InvalidSubcommand),
        ErrorKind::UnknownArgument => text_of(ContextKind::InvalidArg),
        _ => text_of(ContextKind::InvalidValue),
    };
    nearest(word?, known.iter().map(String::as_str)).map(str::to_owned)
}

/// Returns the command that the command line names, and its words.
fn called<'c>(program: &'c clap::Command, args: &[OsString]) -> (String, &'c clap::Command) {
    let mut path = program.get_name().to_owned();
    let mut command = program;
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if let Some(option) = arg.to_str().and_then(|word| word.strip_prefix("--")) {
            let found = command
                .get_arguments()
                .find(|one| one.get_long() == Some(option));
            if found.is_some_and(|one| one.get_action().takes_values()) {
                args.next();
            }
        }
        if arg.as_encoded_bytes().starts_with(b"-") {
            continue;
        }
        let Some(found) = command.find_subcommand(arg) else {
            break;
        };
        command = found;
        path = format!("{path} {}", found.get_name());
    }
    (path, command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_of_clap() {
        for (text, quoted) in [
            (
                "unexpected argument '--x' found",
                "unexpected argument \"--x\" found",
            ),
            (
                "invalid value 'a b' for '--color <WHEN>'",
                "invalid value \"a b\" for \"--color <WHEN>\"",
            ),
            ("the engine's log", "the engine's log"),
        ] {
            assert_eq!(double_quoted(text), quoted);
        }
    }
}
