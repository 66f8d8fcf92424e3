//! The overview of all commands in two groups: commands for people, and commands that engines call.

use clap::{Command, Subcommand};

use super::args::{self, GROUPS};
use super::stage::Stage;
use super::terminal::{Line, Terminal, cell, table};

/// The heading of the stages.
const CALLED_BY_ENGINES: &str = "Called by engines";

/// The width of help texts, in columns.
const PAGE: usize = 80;

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
    let rows = |is_stage: bool| {
        let of_group = program
            .get_subcommands()
            .filter(|one| Stage::named(one.get_name()).is_some() == is_stage);
        let row = |one: &Command| {
            let about = one.get_about().map(ToString::to_string).unwrap_or_default();
            [cell(format!("  {}", one.get_name())), cell(about)]
        };
        of_group.map(row).collect::<Vec<_>>()
    };
    let mut lines = vec![Line::new(0, "Commands:")];
    lines.extend(table(rows(false)));
    lines.extend([
        Line::default(),
        Line::new(0, format!("{CALLED_BY_ENGINES}:")),
    ]);
    lines.extend(table(rows(true)));
    Terminal::new(false, Some(PAGE))
        .render(&lines)
        .trim_end()
        .to_owned()
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
