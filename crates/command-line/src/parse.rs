//! Parses command lines with clap, and gives its errors the form of all other messages.

use std::ffi::OsString;

use anyhow::Result;
use clap::Parser;
use clap::error::ErrorKind;

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
    let command = T::command();
    let error = match T::try_parse_from(
        std::iter::once(command.get_name().into()).chain(args.iter().cloned()),
    ) {
        Ok(options) => return Ok(Parsed::Run(options)),
        Err(error) => error,
    };
    match error.kind() {
        ErrorKind::DisplayHelp => Ok(Parsed::Help(error.render().to_string())),
        ErrorKind::DisplayVersion => Ok(Parsed::Version),
        _ => Err(invalid(&error, &called(&command, args))),
    }
}

/// Returns clap's message on one line, with its tip as the hint. `path` is the command whose help describes the valid words.
fn invalid(error: &clap::Error, path: &str) -> anyhow::Error {
    let text = error.render().to_string();
    let mut paragraphs = text.split("\n\n");
    let problem = on_one_line(paragraphs.next().unwrap_or_default());
    let problem = match error.kind() {
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            "a command is missing"
        }
        _ => problem.strip_prefix("error: ").unwrap_or(&problem),
    };
    let tip = paragraphs.find_map(|paragraph| paragraph.trim().strip_prefix("tip: "));
    let hint = match tip {
        Some(tip) => format!("{}; see \"{path} --help\"", on_one_line(tip)),
        None => format!("run \"{path} --help\""),
    };
    let what = format!("invalid command line: {problem}");
    failure(&catalog::COMMAND_LINE, what, hint)
}

/// The quotes of clap, 'x', become the double quotes of all other messages. An apostrophe is between two letters.
fn on_one_line(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    double_quoted(&words.join(" "))
}

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

/// Returns the program and the names of the commands that `args` call.
fn called(program: &clap::Command, args: &[OsString]) -> String {
    let mut path = program.get_name().to_owned();
    let mut command = program;
    for arg in args {
        if let Some(found) = command.find_subcommand(arg) {
            command = found;
            path = format!("{path} {}", found.get_name());
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    #[command(name = "tool", disable_help_subcommand = true)]
    struct Tool {
        #[command(subcommand)]
        _command: Commands,
    }

    #[derive(Debug, clap::Subcommand)]
    enum Commands {
        Files {
            #[arg(long, value_name = "GPU")]
            _gpu: Option<String>,
            #[arg(value_parser = ["a", "b"])]
            _section: Vec<String>,
        },
    }

    #[test]
    fn problems_and_tips_of_clap() {
        for (line, message) in [
            (
                "flies",
                "unrecognized subcommand \"flies\" (ONH-002)\nhint: a similar subcommand exists: \"files\"; see \"tool --help\"",
            ),
            (
                "files --gpus 1",
                "unexpected argument \"--gpus\" found (ONH-002)\nhint: a similar argument exists: \"--gpu\"; see \"tool files --help\"",
            ),
            (
                "files x",
                "invalid value \"x\" for \"[SECTION]...\" [possible values: a, b] (ONH-002)\nhint: run \"tool files --help\"",
            ),
        ] {
            let args: Vec<_> = line.split_whitespace().map(OsString::from).collect();
            let Err(error) = parse::<Tool>(&args) else {
                panic!("{line}");
            };
            let text = base::report::render(&error);
            assert_eq!(text, format!("invalid command line: {message}"), "{line}");
        }
    }

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
