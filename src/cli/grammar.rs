//! What a command line can be: commands and options as data, and the parser that goes by them. Help texts, completions and
//! the man page are made from the same data, or held against it by tests.

use std::ffi::{OsStr, OsString};

use anyhow::Result;

use base::nearest::nearest;
use base::report::{catalog, failure};

use super::Verb;

/// A program, under one of the names that it is called by.
#[derive(Debug)]
pub struct Program {
    /// As it is called
    pub name: &'static str,
    /// What it is, in one line
    pub summary: &'static str,
    /// The same in a few, for `--help`
    pub about: &'static str,
    /// For all commands
    pub options: &'static [Opt],
    /// Whether these may stand behind the command too; where not, a command can have a short option of the same letter
    pub options_anywhere: bool,
    /// In the order of the help text
    pub commands: &'static [Command],
    /// What its exit status means
    pub exit_status: &'static str,
    /// For `--help`
    pub examples: &'static [Example],
}

/// Something that the program can do.
#[derive(Debug)]
pub struct Command {
    /// One word, or two
    pub name: &'static str,
    /// What is run
    pub verb: Verb,
    /// What stands behind it
    pub operand: Option<Operand>,
    /// What its stdin is, and its stdout, if they are data: ` < state.json`
    pub redirections: &'static str,
    /// What it does, in one line
    pub summary: &'static str,
    /// What else there is to know
    pub about: &'static str,
    /// Its own
    pub options: &'static [&'static Opt],
    /// Lines to paste
    pub examples: &'static [Example],
}

/// What it is for, and the line.
pub type Example = (&'static str, &'static str);

/// What a command works on.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// `NAME`; `[NAME...]` where it may be left out, and be more than one
    pub usage: &'static str,
    /// For completions
    pub completes: Completes,
}

/// An option.
#[derive(Debug)]
pub struct Opt {
    /// `-d, --device ID`, as help texts have it, and behind a tab what it does. A value in square brackets may be left out,
    /// and is part of the option's word.
    pub text: &'static str,
    /// What its value can be, for completions
    pub completes: Completes,
}

/// What a shell can offer for a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completes {
    /// Nothing
    Nothing,
    /// Files
    Files,
    /// Directories
    Directories,
    /// These words, with blanks between them
    Words(&'static str),
    /// The names of commands
    Commands,
    /// The names of CDI devices of this host
    CdiDevices,
}

/// A switch.
pub const fn switch(text: &'static str) -> Opt {
    option(text, Completes::Nothing)
}

/// An option with a value.
pub const fn option(text: &'static str, completes: Completes) -> Opt {
    Opt { text, completes }
}

/// `--help`
pub const HELP: &str = "help";
/// `--version`
pub const VERSION: &str = "version";

/// What was asked.
#[derive(Debug)]
pub enum Asked {
    /// To run a command
    Run(Line),
    /// For help: on this command, or a group of commands, or all
    Help(Option<&'static str>),
    /// For the version
    Version,
}

/// A command line that has a command.
#[derive(Debug)]
pub struct Line {
    /// What to do
    pub command: &'static Command,
    /// Options in their order; a switch has no value
    pub given: Vec<(&'static Opt, Option<OsString>)>,
    /// What stands behind
    pub operands: Vec<OsString>,
}

/// Parses the arguments, argv\[0\] left out.
///
/// # Errors
/// If they are none of this program.
pub fn parse(program: &'static Program, args: Vec<OsString>) -> Result<Asked> {
    use lexopt::Arg::{Long, Short, Value};
    let mut parser = lexopt::Parser::from_args(args);
    let mut command: Option<&'static Command> = None;
    let (mut given, mut operands) = (Vec::new(), Vec::new());
    while let Some(arg) = parser.next().map_err(|error| wrong(program, command, &error.to_string()))? {
        let found = match arg {
            Value(word) => {
                match command {
                    None => match find_command(program, &word, || parser.value().ok())? {
                        Ok(found) => command = Some(found),
                        Err(asked) => return Ok(asked),
                    },
                    Some(_) => operands.push(word),
                }
                continue;
            }
            Long(name) => find_option(program, command, |option| option.long() == name)
                .ok_or_else(|| unknown_option(program, command, name))?,
            Short(letter) => {
                find_option(program, command, |option| option.short() == Some(letter.encode_utf8(&mut [0; 4])))
                    .ok_or_else(|| wrong(program, command, &format!("unknown option \"-{letter}\"")))?
            }
        };
        match found.long() {
            HELP | "usage" => return Ok(Asked::Help(command.map(|command| command.name))),
            VERSION => return Ok(Asked::Version),
            _ => {}
        }
        let value = match found.value() {
            None => None,
            Some(value) if value.starts_with('[') => parser.optional_value(),
            Some(_) => Some(match parser.optional_value() {
                Some(joined) => joined,
                None => {
                    let next = parser.value().map_err(|error| wrong(program, command, &error.to_string()))?;
                    check_value(program, command, found, next)?
                }
            }),
        };
        given.push((found, value));
    }
    let Some(command) = command else { return Err(wrong(program, None, "no command is given")) };
    check_operands(program, command, &operands)?;
    Ok(Asked::Run(Line { command, given, operands }))
}

/// The command of this name; or what else a word alone asks for: the first word of two with `--help` behind it.
fn find_command(
    program: &'static Program,
    word: &OsStr,
    next: impl FnOnce() -> Option<OsString>,
) -> Result<Result<&'static Command, Asked>> {
    let text = word.to_str().unwrap_or_default();
    if let Some(found) = program.commands.iter().find(|command| command.name == text) {
        return Ok(Ok(found));
    }
    let group: Vec<_> = program.group(text).collect();
    let Some(first) = group.first() else {
        let names = program.commands.iter().map(|command| command.name.split(' ').next().unwrap_or_default());
        return Err(unknown(program, "", &format!("{word:?} is not a command"), nearest(text, names)));
    };
    let names = || group.iter().filter_map(|command| command.name.split(' ').nth(1));
    let Some(second) = next() else {
        let what = format!("{text} needs one of {}", names().collect::<Vec<_>>().join(", "));
        return Err(unknown(program, text, &what, None));
    };
    if second == "--help" || second == "-h" {
        return Ok(Err(Asked::Help(first.name.split(' ').next())));
    }
    let second = second.to_str().unwrap_or_default();
    let found = group.iter().find(|command| command.name.split(' ').nth(1) == Some(second));
    found.map(|found| Ok(*found)).ok_or_else(|| {
        let what = format!("{second:?} is not a command of {text} ({})", names().collect::<Vec<_>>().join(", "));
        unknown(program, text, &what, nearest(second, names()))
    })
}

fn find_option(
    program: &'static Program,
    command: Option<&'static Command>,
    is: impl Fn(&Opt) -> bool,
) -> Option<&'static Opt> {
    let own = command.into_iter().flat_map(|command| command.options.iter().copied());
    let of_program = program.options.iter().filter(|option| {
        command.is_none() || program.options_anywhere || matches!(option.long(), HELP | "usage" | VERSION)
    });
    own.chain(of_program).find(|option| is(option))
}

fn unknown_option(program: &'static Program, command: Option<&'static Command>, name: &str) -> anyhow::Error {
    let own = command.into_iter().flat_map(|command| command.options.iter().copied());
    let known = own.chain(program.options).map(Opt::long);
    let meant = nearest(name, known).map(|meant| format!("--{meant}"));
    let of = command.map_or_else(String::new, |command| format!(" of {}", command.name));
    let what = format!("unknown option \"--{name}\"{of}");
    unknown(program, command.map_or("", |command| command.name), &what, meant.as_deref())
}

/// The word behind an option that needs a value. An option there means that the value was forgotten: taken for a value it
/// would name a file, and nobody would see that the option is without effect. `-` alone is stdin or stdout.
fn check_value(program: &Program, command: Option<&Command>, option: &Opt, word: OsString) -> Result<OsString> {
    if word == "-" || !word.as_encoded_bytes().starts_with(b"-") {
        return Ok(word);
    }
    let what = format!("{} needs a value, and {word:?} looks like an option: \"=\" joins them", option.usage());
    Err(wrong(program, command, &what))
}

fn check_operands(program: &Program, command: &'static Command, operands: &[OsString]) -> Result<()> {
    let usage = command.operand.map(|operand| operand.usage);
    let most = match usage {
        None => 0,
        Some(usage) if usage.contains("...") => usize::MAX,
        Some(_) => 1,
    };
    if let Some(more) = operands.get(most) {
        return Err(wrong(program, Some(command), &format!("unexpected argument {more:?}")));
    }
    match usage {
        Some(usage) if operands.is_empty() && !usage.starts_with('[') => {
            Err(wrong(program, Some(command), &format!("{} needs {usage}", command.name)))
        }
        _ => Ok(()),
    }
}

/// An error of the command line.
pub fn wrong(program: &Program, command: Option<&Command>, what: &str) -> anyhow::Error {
    let command = command.map_or_else(String::new, |command| format!("{} ", command.name));
    failure(
        &catalog::COMMAND_LINE,
        format!("wrong command line: {what}"),
        format!("run \"{} {command}--help\"", program.name),
    )
}

/// The same, with the word that may have been meant. `of` is the command, or the group, whose help lists the words there are.
fn unknown(program: &Program, of: &str, what: &str, meant: Option<&str>) -> anyhow::Error {
    let blank = if of.is_empty() { "" } else { " " };
    let help = format!("\"{} {of}{blank}--help\"", program.name);
    let hint = meant.map_or_else(|| format!("run {help}"), |meant| format!("did you mean {meant}? See {help}"));
    failure(&catalog::COMMAND_LINE, format!("wrong command line: {what}"), hint)
}

impl Program {
    /// The commands of two words whose first is this.
    pub fn group<'a>(&'static self, word: &'a str) -> impl Iterator<Item = &'static Command> + use<'a> {
        self.commands.iter().filter(move |command| command.name.split_once(' ').is_some_and(|(first, _)| first == word))
    }
}

impl Opt {
    /// `-d, --device ID`
    #[must_use]
    pub fn usage(&self) -> &'static str {
        self.text.split('\t').next().unwrap_or_default()
    }

    /// What it does, in one line.
    #[must_use]
    pub fn help(&self) -> &'static str {
        self.text.split('\t').nth(1).unwrap_or_default()
    }

    /// Without its dashes.
    #[must_use]
    pub fn long(&self) -> &'static str {
        let (_, long) = self.usage().split_once("--").unwrap_or_default();
        long.split([' ', '[']).next().unwrap_or_default()
    }

    /// Without its dash.
    #[must_use]
    pub fn short(&self) -> Option<&'static str> {
        let (short, _) = self.usage().split_once(", ")?;
        short.strip_prefix('-')
    }

    /// `FILE`, or `[=FILE]` where it may be left out; none: it is a switch.
    #[must_use]
    pub fn value(&self) -> Option<&'static str> {
        let (_, long) = self.usage().split_once("--")?;
        let at = long.find([' ', '['])?;
        long.get(at..).map(str::trim_start)
    }
}
