//! The overview of all commands in two groups: commands for people, and commands that engines call.

use clap::{Command, Subcommand};

use super::args::{self, GROUPS};
use super::terminal::{Line, Terminal, cell, table};

/// The heading of the stages.
const CALLED_BY_ENGINES: &str = "Called by engines";

/// Returns a help text with the groups, if it is the help of the program.
pub(super) fn complete(text: String) -> String {
    if text.contains(GROUPS) {
        text.replacen(GROUPS, &groups(), 1)
    } else {
        text
    }
}

fn groups() -> String {
    let program = args::Command::augment_subcommands(Command::new(""));
    let (mut commands, mut stages) = (Vec::new(), Vec::new());
    for command in program.get_subcommands() {
        let name = command.get_name();
        let about = command.get_about().map(ToString::to_string);
        let row = [cell(format!("  {name}")), cell(about.unwrap_or_default())];
        if command.is_hide_set() {
            stages.push(row);
        } else {
            commands.push(row);
        }
    }
    let mut lines = vec![Line::new("Commands:")];
    lines.extend(table(commands));
    lines.push(Line::default());
    lines.push(Line::new(format!("{CALLED_BY_ENGINES}:")));
    lines.extend(table(stages));
    Terminal::default().render(&lines).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use args::TEMPLATE;

    #[test]
    fn the_template_has_a_place_for_the_groups() {
        assert_eq!(TEMPLATE.matches(GROUPS).count(), 1);
        assert_eq!(complete("x".to_owned()), "x");
        assert!(
            complete(TEMPLATE.to_owned())
                .contains(&format!("\n\n{CALLED_BY_ENGINES}:\n  prestart "))
        );
    }
}
