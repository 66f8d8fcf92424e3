//! `completion SHELL`: prints small scripts that ask this program for the words that can complete a command line, so that all
//! shells offer the same.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::builder::{StyledStr, ValueHint};
use clap::{Arg, Command, CommandFactory};

use base::report::one_line;

use super::args::{Cli, Shell};
use super::{cdi_check, output};

/// The command that the scripts call, with the words of the command line after the program's name.
pub(super) const VERB: &str = "__complete";

/// Prints the script for this shell.
pub(super) fn run(shell: Shell) -> ExitCode {
    output::print(match shell {
        Shell::Bash => include_str!("completion/oci-nvidia-hook.bash"),
        Shell::Zsh => include_str!("completion/oci-nvidia-hook.zsh"),
        Shell::Fish => include_str!("completion/oci-nvidia-hook.fish"),
    })
}

/// Prints the words that can replace the last one: one on each line, followed by a tab and its help. `:files` and `:directories`
/// ask the shell to complete a path.
pub(super) fn complete(words: &[OsString]) -> ExitCode {
    let words: Vec<String> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    output::print(&offer(&words).unwrap_or_default())
}

/// Returns the words to offer; `None` after an unknown command.
fn offer(words: &[String]) -> Option<String> {
    let mut program = Cli::command();
    program.build();
    let (last, before) = words.split_last()?;
    let mut command = &program;
    let mut wants: Option<&Arg> = None;
    let mut spec_dirs = Vec::new();
    for word in before {
        if let Some(option) = wants.take() {
            if option.get_id() == "spec_dirs" {
                spec_dirs.push(word.as_str());
            }
        } else if word.starts_with('-') {
            wants = option(command, word).filter(|_| !word.contains('='));
        } else if command.has_subcommands() {
            command = command.find_subcommand(word)?;
        }
    }
    let mut offers = Offers { text: String::new(), last };
    if let Some(option) = wants {
        offers.add_values(option, "", &spec_dirs);
    } else if let Some((name, _)) = last.split_once('=').filter(|_| last.starts_with('-')) {
        offers.add_values(option(command, name)?, last.get(..=name.len())?, &spec_dirs);
    } else {
        offers.add_words(command, &spec_dirs);
    }
    Some(offers.text)
}

/// Returns the option that this word (`--option` or `--option=value`) names, if it takes a value.
fn option<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    let name = word.split('=').next().unwrap_or(word);
    let option = command.get_arguments().find(|arg| match name.strip_prefix("--") {
        Some(long) => arg.get_long() == Some(long),
        None => arg.get_short().is_some_and(|letter| name.strip_prefix('-') == Some(letter.encode_utf8(&mut [0; 4]))),
    });
    option.filter(|arg| arg.get_action().takes_values())
}

struct Offers<'a> {
    text: String,
    /// The part of the word that was typed
    last: &'a str,
}

impl Offers<'_> {
    /// Offers commands, operands and options.
    fn add_words(&mut self, command: &Command, spec_dirs: &[&str]) {
        for command in command.get_subcommands() {
            self.add(command.get_name(), command.get_about());
        }
        if let Some(operand) = command.get_positionals().next() {
            self.add_values(operand, "", spec_dirs);
        }
        // Before a dash is typed, options would outnumber the commands.
        if !self.text.is_empty() && !self.last.starts_with('-') {
            return;
        }
        for arg in command.get_arguments() {
            if let Some(long) = arg.get_long() {
                self.add(&format!("--{long}"), arg.get_help());
            }
        }
    }

    fn add_values(&mut self, arg: &Arg, prefix: &str, spec_dirs: &[&str]) {
        match (arg.get_id().as_str(), arg.get_value_hint()) {
            ("names", _) => {
                cdi_check::names(spec_dirs).iter().for_each(|name| self.add(&one_line(name), None));
            }
            ("devices", _) => self.add(&format!("{prefix}all"), None),
            (_, ValueHint::FilePath) => self.text.push_str(":files\n"),
            (_, ValueHint::DirPath) => self.text.push_str(":directories\n"),
            _ => {
                for value in arg.get_possible_values().iter().filter(|value| !value.is_hide_set()) {
                    self.add(&format!("{prefix}{}", value.get_name()), None);
                }
            }
        }
    }

    fn add(&mut self, word: &str, help: Option<&StyledStr>) {
        if word.starts_with(self.last) {
            self.text.push_str(word);
            if let Some(help) = help {
                self.text.push('\t');
                self.text.push_str(&help.to_string().replace('\n', " "));
            }
            self.text.push('\n');
        }
    }
}
