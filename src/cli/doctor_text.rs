//! Formats the results of `doctor` for people: the problems first, errors before warnings, and then what was checked.
//!
//! One cause can have many symptoms: a driver that is not mounted makes each library and each node missing. Problems with one fix are
//! therefore one paragraph, which names all checks that found it.

use base::report::{one_line, without_markdown};

use super::terminal::{Line, Terminal, Tone};
use crate::doctor::{Check, Section, Status, count};

/// Which results are printed.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Also the checks that passed or were skipped
    pub all: bool,
    /// Whether the caller is root, who can perform more checks
    pub is_root: bool,
}

/// The column in which the text of a result begins: after the longest status.
const TEXT: usize = "warning".len() + 2;

/// Returns the results as text.
pub fn text(checks: &[Check], view: View, terminal: Terminal) -> String {
    let mut problems = problems(checks);
    problems.sort_by_key(|problem| std::cmp::Reverse(problem.status()));
    let mut lines: Vec<_> = problems.iter().flat_map(Problem::lines).collect();
    if view.all {
        lines.extend(
            checks
                .iter()
                .filter(|check| !is_problem(check))
                .map(|check| first_line(check.status, &[check])),
        );
    }
    if !lines.is_empty() {
        lines.push(Line::default());
    }
    lines.push(Line::new(summary(&problems, checks, view)));
    terminal.render(&lines)
}

fn is_problem(check: &Check) -> bool {
    check.status > Status::Skipped
}

/// Results with one fix.
struct Problem<'a>(Vec<&'a Check>);

/// Groups the problems by their fix, in the order of the checks.
fn problems(checks: &[Check]) -> Vec<Problem<'_>> {
    let mut problems: Vec<Problem<'_>> = Vec::new();
    for check in checks.iter().filter(|check| is_problem(check)) {
        let is_same = |problem: &&mut Problem<'_>| {
            !check.fix.is_empty()
                && problem
                    .0
                    .first()
                    .is_some_and(|first| first.fix == check.fix)
        };
        match problems.iter_mut().find(is_same) {
            Some(problem) => problem.0.push(check),
            None => problems.push(Problem(vec![check])),
        }
    }
    problems
}

impl Problem<'_> {
    fn status(&self) -> Status {
        self.0
            .iter()
            .map(|check| check.status)
            .max()
            .unwrap_or(Status::Note)
    }

    fn lines(&self) -> Vec<Line> {
        let mut lines = vec![first_line(self.status(), &self.0)];
        let mut whys: Vec<String> = Vec::new();
        for why in self.0.iter().map(|check| without_markdown(check.why)) {
            if !why.is_empty() && !whys.contains(&why) {
                whys.push(why);
            }
        }
        let fix = self
            .0
            .first()
            .map(|check| one_line(&check.fix))
            .unwrap_or_default();
        for (label, content) in [("why: ", whys.join("; ")), ("fix: ", fix)] {
            if !content.is_empty() {
                lines.push(Line::new(format!("{:TEXT$}{label}{content}", "")));
            }
        }
        lines
    }
}

/// Returns the line with the status, the names of the checks, and what they found: `error    nodes (driver): … (ONH-021)`.
fn first_line(status: Status, checks: &[&Check]) -> Line {
    let tone = match status {
        Status::Ok => Tone::Good,
        Status::Skipped | Status::Note => Tone::Plain,
        Status::Warning => Tone::Warning,
        Status::Error => Tone::Bad,
    };
    let word = status.to_string();
    let gap = TEXT.saturating_sub(word.len());
    let rest = format!("{:gap$}{}: {}", "", names(checks), found(checks));
    Line::default().then(tone, word).then(Tone::Plain, rest)
}

/// Returns the names of the checks, with their section: `nodes, uvm (driver)`. All checks of a container have one section.
fn names(checks: &[&Check]) -> String {
    let mut sections: Vec<(Section, Vec<&str>)> = Vec::new();
    for check in checks {
        match sections
            .iter_mut()
            .find(|(section, _)| *section == check.section)
        {
            Some((_, names)) if names.contains(&check.check) => {}
            Some((_, names)) => names.push(check.check),
            None => sections.push((check.section, vec![check.check])),
        }
    }
    let named = sections.into_iter().map(|(section, names)| match section {
        Section::Container => names.join(", "),
        section => format!("{} ({section})", names.join(", ")),
    });
    named.collect::<Vec<_>>().join(", ")
}

/// Returns what the checks found, with a number after the last result that has it.
fn found(checks: &[&Check]) -> String {
    let mut found = String::new();
    for (position, check) in checks.iter().enumerate() {
        let next = checks.get(position + 1);
        let id = check
            .id
            .filter(|id| next.is_none_or(|next| next.id != Some(*id)));
        let separator = if next.is_some() { "; " } else { "" };
        found += &one_line(&check.what);
        found += &id.map(|id| format!(" ({id})")).unwrap_or_default();
        found += separator;
    }
    found
}

/// Counts the problems as they are printed, and the other checks.
fn summary(problems: &[Problem<'_>], checks: &[Check], view: View) -> String {
    let of = |status: Status| {
        problems
            .iter()
            .filter(|problem| problem.status() == status)
            .count()
    };
    let severities = [Status::Error, Status::Warning, Status::Note]
        .map(|status| (of(status), status.to_string()));
    let found: Vec<_> = severities
        .iter()
        .filter(|(number, _)| *number > 0)
        .map(|(number, name)| count(*number, name))
        .collect();
    let found = if found.is_empty() {
        "no problems".to_owned()
    } else {
        found.join(", ")
    };
    let with = |status: Status| checks.iter().filter(|check| check.status == status).count();
    let (passed, skipped) = (count(with(Status::Ok), "check"), with(Status::Skipped));
    let others = match skipped {
        0 => format!("{passed} passed"),
        skipped => format!("{passed} passed, {skipped} skipped"),
    };
    let root = if view.is_root || skipped == 0 {
        ""
    } else {
        "; root can perform more checks"
    };
    let hint = if view.all { "" } else { " (--all lists them)" };
    format!("{found}; {others}{hint}{root}")
}

#[cfg(test)]
mod tests {
    use base::report::{Kind, Severity};
    use findings::catalog;

    use super::*;

    const VIEW: View = View {
        all: false,
        is_root: true,
    };

    fn check(
        section: Section,
        check: &'static str,
        kind: &'static Kind,
        what: &str,
        fix: &str,
    ) -> Check {
        let status = if kind.severity == Severity::Error {
            Status::Error
        } else {
            Status::Warning
        };
        Check {
            section,
            check,
            status,
            id: Some(kind.id),
            what: what.into(),
            why: kind.why,
            fix: fix.into(),
        }
    }

    #[test]
    fn one_fix_is_printed_once_and_errors_come_first() {
        let checks = [
            check(
                Section::Driver,
                "uvm",
                &catalog::NO_UVM,
                "uvm is missing",
                "b",
            ),
            check(
                Section::Driver,
                "nodes",
                &catalog::NODE_MISSING,
                "one is missing",
                "a",
            ),
            check(
                Section::Hook,
                "hook",
                &catalog::NODE_MISSING,
                "two is missing",
                "a",
            ),
            check(Section::Hook, "groups", &catalog::GROUP_NODES, "three", "a"),
        ];
        let text = text(&checks, VIEW, Terminal::default());
        let lines: Vec<_> = text.lines().collect();
        let first = "error    nodes (driver), hook, groups (hook): one is missing; two is missing (ONH-021); three (ONH-212)";
        assert_eq!(lines[0], first, "{text}");
        assert_eq!(lines[2], "         fix: a", "{text}");
        assert!(
            lines[3].starts_with("warning  uvm (driver): uvm is missing (ONH-205)"),
            "{text}"
        );
        assert_eq!(
            lines[6..],
            ["", "1 error, 1 warning; 0 checks passed (--all lists them)"],
            "{text}"
        );
    }
}
