//! `--help`: texts made from the grammar.

use std::fmt::Write;

use super::Verb;
use super::grammar::{Command, Example, Opt, Program};

const WIDTH: usize = 80;

/// The whole program.
pub(super) fn of_program(program: &'static Program) -> String {
    let mut text = format!("{}: {}\n\nusage: {} [options] COMMAND\n", program.name, program.summary, program.name);
    if !program.about.is_empty() {
        text.push('\n');
        paragraph(&mut text, program.about);
    }
    let is_stage = |command: &&Command| command.verb.is_stage();
    let (stages, commands): (Vec<&Command>, Vec<&Command>) = program.commands.iter().partition(is_stage);
    for (title, list) in [("stages, for container engines", stages), ("commands", commands)] {
        let rows = list.iter().map(|command| (command.name.to_owned(), command.summary));
        rows_under(&mut text, title, rows.collect());
    }
    options(&mut text, program.options.iter());
    text.push('\n');
    paragraph(&mut text, &format!("exit status: {}", program.exit_status));
    writeln!(text, "\n\"{} COMMAND --help\" shows more about a command.", program.name).ok();
    examples(&mut text, program.examples);
    text
}

/// A command, or a group by its first word; `None` if there is none of this name.
pub(super) fn of_command(program: &'static Program, name: &str) -> Option<String> {
    if let Some(command) = program.commands.iter().find(|command| command.name == name) {
        return Some(command_text(program, command));
    }
    let group: Vec<_> = program.group(name).collect();
    (!group.is_empty()).then(|| group_text(program, name, &group))
}

/// A line for each command of a group: their options are many, and many are the same.
fn group_text(program: &Program, name: &str, group: &[&Command]) -> String {
    let mut text = format!("usage: {} {name} COMMAND [options]\n", program.name);
    let second = |command: &Command| command.name.split(' ').nth(1).unwrap_or_default().to_owned();
    rows_under(&mut text, "commands", group.iter().map(|command| (second(command), command.summary)).collect());
    writeln!(text, "\n\"{} {name} COMMAND --help\" shows the options of a command.", program.name).ok();
    text
}

fn command_text(program: &Program, command: &Command) -> String {
    let mut text =
        format!("{} {}: {}\n\nusage: {}\n", program.name, command.name, command.summary, usage(program, command));
    if !command.about.is_empty() {
        text.push('\n');
        paragraph(&mut text, command.about);
    }
    options(&mut text, command.options.iter().copied());
    examples(&mut text, command.examples);
    text
}

/// `oci-nvidia-hook explain [options] < state.json`
pub(super) fn usage(program: &Program, command: &Command) -> String {
    let options = if command.options.is_empty() { "" } else { " [options]" };
    let operand = command.operand.map_or_else(String::new, |operand| format!(" {}", operand.usage));
    format!("{} {}{options}{operand}{}", program.name, command.name, command.redirections)
}

fn options<'a>(text: &mut String, list: impl Iterator<Item = &'a Opt>) {
    rows_under(text, "options", list.map(|option| (option.usage().to_owned(), option.help())).collect());
}

fn rows_under(text: &mut String, title: &str, rows: Vec<(String, &str)>) {
    const WIDEST: usize = 24;
    if rows.is_empty() {
        return;
    }
    writeln!(text, "\n{title}:").ok();
    let column = rows.iter().map(|(left, _)| left.len()).filter(|length| *length <= WIDEST).max().unwrap_or_default();
    for (left, right) in rows {
        let mut lines = wrap(right, WIDTH.saturating_sub(column + 4)).into_iter();
        let first = if left.len() > column { String::new() } else { lines.next().unwrap_or_default() };
        writeln!(text, "{}", format!("  {left:<column$}  {first}").trim_end()).ok();
        for line in lines {
            writeln!(text, "  {:column$}  {line}", "").ok();
        }
    }
}

fn examples(text: &mut String, examples: &[Example]) {
    if !examples.is_empty() {
        text.push_str("\nexamples:\n");
    }
    for (what, lines) in examples {
        writeln!(text, "  {what}:").ok();
        lines.lines().for_each(|line| {
            writeln!(text, "    {line}").ok();
        });
    }
}

fn paragraph(text: &mut String, words: &str) {
    wrap(words, WIDTH).iter().for_each(|line| {
        writeln!(text, "{line}").ok();
    });
}

/// Lines of at most `width` characters, if words let them.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

impl Verb {
    /// Whether an engine calls it, not a person.
    pub const fn is_stage(self) -> bool {
        matches!(self, Self::Inject(_) | Self::Precreate | Self::Nothing | Self::Forget)
    }
}
