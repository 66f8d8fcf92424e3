//! Parses command lines with clap, and gives its errors the form of all other messages.

use std::error::Error as _;
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
        ErrorKind::DisplayHelp => Ok(Parsed::Help(help_in_our_words(&error.render().to_string()))),
        ErrorKind::DisplayVersion => Ok(Parsed::Version),
        _ => {
            // Gives each command the global options.
            command.build();
            let (path, command) = called(&command, args);
            Err(invalid(&error, &path, command))
        }
    }
}

/// What clap writes about its own option and command, and what the other descriptions are like.
const WORDS_OF_HELP: [(&str, &str); 3] = [
    (
        "Print help (see a summary with '-h')",
        "Print help; -h prints a summary",
    ),
    (
        "Print help (see more with '--help')",
        "Print help; --help prints more",
    ),
    (
        "Print this message or the help of the given subcommand(s)",
        "Show this help, or the help of a command",
    ),
];

fn help_in_our_words(help: &str) -> String {
    let mut text = help.to_owned();
    for (of_clap, ours) in WORDS_OF_HELP {
        text = text.replace(of_clap, ours);
    }
    text
}

/// Returns the error for an invalid command line. `path` is the command whose help describes the valid ones.
fn invalid(error: &clap::Error, path: &str, command: &clap::Command) -> anyhow::Error {
    let help = format!("\"{path} --help\"");
    let hint = match suggestion(error, command) {
        Some(word) => format!("did you mean {word}? See {help}"),
        None => format!("run {help}"),
    };
    let what = format!("invalid command line: {}", problem(error));
    failure(&catalog::COMMAND_LINE, what, hint)
}

/// Describes the problem. clap's sentences contain its notation of arguments, such as `[NAME]...`, and messages of Rust's parsers.
fn problem(error: &clap::Error) -> String {
    let argument = context(error, ContextKind::InvalidArg);
    let value = context(error, ContextKind::InvalidValue);
    match error.kind() {
        // clap lists all commands, and the help does too.
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            "a command is missing".to_owned()
        }
        ErrorKind::MissingRequiredArgument => {
            let missing: Vec<_> = argument.split(", ").map(plain_name).collect();
            let verb = if missing.len() == 1 { "is" } else { "are" };
            format!("{} {verb} missing", missing.join(", "))
        }
        ErrorKind::InvalidValue if value.is_empty() => {
            format!("{} needs a value", plain_name(&argument))
        }
        ErrorKind::InvalidValue => {
            let accepted = context(error, ContextKind::ValidValue);
            let name = plain_name(&argument);
            if accepted.is_empty() {
                format!("invalid value {value:?} for {name}")
            } else {
                format!("invalid value {value:?} for {name}: must be one of {accepted}")
            }
        }
        ErrorKind::ValueValidation => {
            let why = error.source().map(ToString::to_string).unwrap_or_default();
            let name = plain_name(&argument);
            format!("invalid value {value:?} for {name}: {}", reason(&why))
        }
        ErrorKind::ArgumentConflict => {
            let others = context(error, ContextKind::PriorArg);
            let others: Vec<_> = others.split(", ").map(plain_name).collect();
            let name = plain_name(&argument);
            if others.contains(&name) {
                return format!("{name} is given twice");
            }
            format!("{name} cannot be used with {}", others.join(" and "))
        }
        ErrorKind::UnknownArgument if argument.starts_with('-') => {
            format!("unknown option {argument:?}")
        }
        ErrorKind::UnknownArgument => format!("unexpected argument {argument:?}"),
        ErrorKind::TooManyValues => format!("{} takes no value", plain_name(&argument)),
        _ => words_of_clap(error),
    }
}

/// Returns the name of an argument without clap's notation: `"--gpu"` for `--gpu <GPU>`, SECTION for `[SECTION]...`.
fn plain_name(argument: &str) -> String {
    let name = argument.split(' ').next().unwrap_or_default();
    if name.starts_with('-') {
        return format!("{name:?}");
    }
    let notation = ['<', '>', '[', ']', '.'];
    name.trim_matches(notation).replace('|', " or ")
}

/// Replaces the messages of Rust's parsers of numbers, and clap's message about a range.
fn reason(why: &str) -> String {
    if let Some((_, range)) = why.split_once(" is not in ")
        && let Some((least, most)) = range.split_once("..=")
    {
        return format!("it must be a number from {least} to {most}");
    }
    let reason = match why {
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            "it is not a number"
        }
        "number too large to fit in target type" => "the number is too large",
        "number too small to fit in target type" => "the number is too small",
        _ => why,
    };
    reason.to_owned()
}

fn words_of_clap(error: &clap::Error) -> String {
    let text = error.render().to_string();
    // clap adds tips and the usage, after empty lines.
    let first = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<_> = first.split_whitespace().collect();
    let what = double_quoted(&words.join(" "));
    let what = what.strip_prefix("error: ").unwrap_or(&what);
    what.replace("unrecognized subcommand", "unknown command")
}

/// Returns what clap knows about the problem, as one text.
fn context(error: &clap::Error, kind: ContextKind) -> String {
    match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::Strings(texts)) => texts.join(", "),
        _ => String::new(),
    }
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

/// Commands that people try first, and what they mean in the programs that have it.
const GUESSES: [(&str, &str); 9] = [
    ("list", "files"),
    ("gpus", "info"),
    ("logs", "why"),
    ("events", "why"),
    ("top", "ps --watch"),
    ("check", "doctor"),
    ("config", "doctor hook"),
    ("generate", "cdi generate"),
    ("inspect", "plan"),
];

/// Returns the valid word that differs in at most two letters. clap also suggests words that differ in more, and stages.
fn suggestion(error: &clap::Error, command: &clap::Command) -> Option<String> {
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
    let kind = match error.kind() {
        ErrorKind::InvalidSubcommand => ContextKind::InvalidSubcommand,
        ErrorKind::UnknownArgument => ContextKind::InvalidArg,
        _ => ContextKind::InvalidValue,
    };
    let word = context(error, kind);
    if error.kind() == ErrorKind::InvalidSubcommand
        && let Some((_, meant)) = GUESSES.iter().find(|(guess, _)| *guess == word)
        && let Some(first) = meant.split(' ').next()
        && known.iter().any(|name| name == first)
    {
        return Some((*meant).to_owned());
    }
    nearest(&word, known.iter().map(String::as_str)).map(str::to_owned)
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
        // The help of clap's command "help" is the help of the program.
        if found.get_name() == "help" {
            break;
        }
        command = found;
        path = format!("{path} {}", found.get_name());
    }
    (path, command)
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

    #[derive(Debug, clap::Parser)]
    struct Documented {
        /// A summary
        ///
        /// Details
        #[arg(long)]
        _option: bool,
    }

    #[derive(Debug, clap::Subcommand)]
    enum Commands {
        Files {
            #[arg(long, value_name = "GPU")]
            _gpu: Option<String>,
            #[arg(long, conflicts_with = "_gpu", value_parser = clap::value_parser!(u8).range(1..))]
            _count: Option<u8>,
            #[arg(value_parser = ["a", "b"])]
            _section: Vec<String>,
        },
        Explain {
            #[arg(value_name = "NUMBER|-", conflicts_with = "_list")]
            _number: String,
            #[arg(long)]
            _list: bool,
        },
    }

    #[test]
    fn problems_are_in_our_words() {
        for (line, message) in [
            (
                "",
                "a command is missing (ONH-002)\nhint: run \"tool --help\"",
            ),
            (
                "list",
                "unknown command \"list\" (ONH-002)\nhint: did you mean files? See \"tool --help\"",
            ),
            (
                "top",
                "unknown command \"top\" (ONH-002)\nhint: run \"tool --help\"",
            ),
            (
                "files --gpu",
                "\"--gpu\" needs a value (ONH-002)\nhint: run \"tool files --help\"",
            ),
            (
                "files --count x",
                "invalid value \"x\" for \"--count\": it is not a number (ONH-002)\nhint: run \"tool files --help\"",
            ),
            (
                "files --gpus 1",
                "unknown option \"--gpus\" (ONH-002)\nhint: did you mean --gpu? See \"tool files --help\"",
            ),
            (
                "explain 1 2",
                "unexpected argument \"2\" (ONH-002)\nhint: run \"tool explain --help\"",
            ),
            (
                "files x",
                "invalid value \"x\" for SECTION: must be one of a, b (ONH-002)\nhint: run \"tool files --help\"",
            ),
            (
                "files --count 0",
                "invalid value \"0\" for \"--count\": it must be a number from 1 to 255 (ONH-002)\nhint: run \"tool files --help\"",
            ),
            (
                "files --count 1 --gpu 1",
                "\"--count\" cannot be used with \"--gpu\" (ONH-002)\nhint: run \"tool files --help\"",
            ),
            (
                "files --gpu 1 --gpu 2",
                "\"--gpu\" is given twice (ONH-002)\nhint: run \"tool files --help\"",
            ),
            (
                "explain --list 3",
                "\"--list\" cannot be used with NUMBER or - (ONH-002)\nhint: run \"tool explain --help\"",
            ),
            (
                "explain",
                "NUMBER or - is missing (ONH-002)\nhint: run \"tool explain --help\"",
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
    fn the_help_is_in_our_words() {
        for (option, ours) in [
            ("--help", "Print help; -h prints a summary"),
            ("-h", "Print help; --help prints more"),
        ] {
            let Ok(Parsed::Help(text)) = parse::<Documented>(&[option.into()]) else {
                panic!("{option}");
            };
            assert!(text.contains(ours), "{text}");
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
