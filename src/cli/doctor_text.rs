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
    let mut lines = Vec::new();
    for problem in &problems {
        lines.extend(problem.lines());
    }
    for check in checks {
        if view.all && !is_problem(check) {
            lines.push(first_line(check.status, &[check]));
        }
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
struct Problem<'a> {
    fix: &'a str,
    checks: Vec<&'a Check>,
}

/// Groups the problems by their fix, in the order of the checks.
fn problems(checks: &[Check]) -> Vec<Problem<'_>> {
    let mut problems: Vec<Problem<'_>> = Vec::new();
    for check in checks.iter().filter(|check| is_problem(check)) {
        let fix = check.fix.as_str();
        let mut known = problems.iter_mut();
        match known.find(|problem| problem.fix == fix && !fix.is_empty()) {
            Some(problem) => problem.checks.push(check),
            None => problems.push(Problem {
                fix,
                checks: vec![check],
            }),
        }
    }
    problems
}

impl Problem<'_> {
    fn status(&self) -> Status {
        let statuses = self.checks.iter().map(|check| check.status);
        statuses.max().unwrap_or(Status::Note)
    }

    fn lines(&self) -> Vec<Line> {
        let mut lines = vec![first_line(self.status(), &self.checks)];
        let mut whys: Vec<String> = Vec::new();
        for check in &self.checks {
            let why = without_markdown(check.why);
            if !why.is_empty() && !whys.contains(&why) {
                whys.push(why);
            }
        }
        for (label, content) in [("why: ", whys.join("; ")), ("fix: ", one_line(self.fix))] {
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
        let mut known = sections.iter_mut();
        match known.find(|(section, _)| *section == check.section) {
            Some((_, names)) if names.contains(&check.check) => {}
            Some((_, names)) => names.push(check.check),
            None => sections.push((check.section, vec![check.check])),
        }
    }
    let mut named = Vec::new();
    for (section, names) in sections {
        let names = names.join(", ");
        named.push(match section {
            Section::Container => names,
            section => format!("{names} ({section})"),
        });
    }
    named.join(", ")
}

/// Returns what the checks found, with a number after the last result that has it.
fn found(checks: &[&Check]) -> String {
    let mut found = String::new();
    for (position, check) in checks.iter().enumerate() {
        let next = checks.get(position + 1);
        found += &one_line(&check.what);
        if let Some(id) = check.id
            && next.is_none_or(|next| next.id != Some(id))
        {
            found += &format!(" ({id})");
        }
        if next.is_some() {
            found += "; ";
        }
    }
    found
}

/// Counts the problems as they are printed, and the other checks.
fn summary(problems: &[Problem<'_>], checks: &[Check], view: View) -> String {
    let mut found = Vec::new();
    for status in [Status::Error, Status::Warning, Status::Note] {
        let of_status = problems.iter().filter(|problem| problem.status() == status);
        let number = of_status.count();
        if number > 0 {
            found.push(count(number, &status.to_string()));
        }
    }
    if found.is_empty() {
        found.push("no problems".to_owned());
    }
    let with = |status: Status| checks.iter().filter(|check| check.status == status).count();
    let mut text = format!(
        "{}; {} passed",
        found.join(", "),
        count(with(Status::Ok), "check")
    );
    let skipped = with(Status::Skipped);
    if skipped > 0 {
        text += &format!(", {skipped} skipped");
    }
    if !view.all {
        text += " (--all lists them)";
    }
    if skipped > 0 && !view.is_root {
        text += "; root can perform more checks";
    }
    text
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
            id: Some(kind.id()),
            what: what.into(),
            why: kind.texts().why,
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

    #[test]
    fn problems_without_a_fix_are_separate() {
        let problem = |name, what| check(Section::Driver, name, &catalog::NO_UVM, what, "");
        let checks = [problem("uvm", "one"), problem("nodes", "two")];
        let text = text(&checks, VIEW, Terminal::default());
        assert!(
            text.starts_with("warning  uvm (driver): one (ONH-205)\n")
                && text.contains("\nwarning  nodes (driver): two (ONH-205)\n"),
            "{text}"
        );
    }
}
