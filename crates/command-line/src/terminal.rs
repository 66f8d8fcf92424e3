//! Formats output for people: aligns columns and colors words.
//!
//! Commands build [`Line`]s; only this module knows escape codes. Lines are as long as their text, and the terminal wraps them: paths and
//! commands can be copied, and a pipe gets the same lines.

use std::io::IsTerminal;

use clap::ValueEnum;

/// When to use colors: `--color`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal
    #[default]
    Auto,
    /// In a pipe too
    Always,
    /// Not at all
    Never,
}

/// The environment variables that control colors. They are read before the environment is cleared.
#[derive(Clone, Copy, Debug, Default)]
pub struct ColorVariables {
    no_color: bool,
    force: bool,
    is_dumb: bool,
}

impl ColorVariables {
    /// Reads `NO_COLOR` (<https://no-color.org>), `CLICOLOR_FORCE` (<https://bixense.com/clicolors>) and `TERM`.
    #[expect(clippy::disallowed_methods, reason = "this is where it is read")]
    pub fn read() -> Self {
        let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        Self {
            no_color: is_set("NO_COLOR"),
            force: std::env::var_os("CLICOLOR_FORCE")
                .is_some_and(|value| !value.is_empty() && value != "0"),
            is_dumb: std::env::var_os("TERM").is_none_or(|term| term == "dumb" || term.is_empty()),
        }
    }

    /// Returns the properties of stdout. `--color` has priority over `NO_COLOR`, which has priority over `CLICOLOR_FORCE`.
    pub fn stdout(self, color: Color) -> Terminal {
        let is_terminal = rustix::stdio::stdout().is_terminal();
        Terminal {
            has_color: self.has_color(color, is_terminal),
        }
    }

    const fn has_color(self, color: Color, is_terminal: bool) -> bool {
        match color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => !self.no_color && (self.force || (is_terminal && !self.is_dumb)),
        }
    }
}

/// The properties of stdout. The default is a pipe without colors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terminal {
    /// Whether words are colored
    pub has_color: bool,
}

/// The meaning of a word, which decides its color.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// Plain text
    #[default]
    Plain,
    /// A heading
    Heading,
    /// Works
    Good,
    /// Some containers lack something
    Warning,
    /// Containers do not start
    Bad,
}

impl Tone {
    /// Returns the tone of a finding with this severity.
    pub fn of_severity(name: &str) -> Self {
        match name {
            "error" => Self::Bad,
            "warning" => Self::Warning,
            _ => Self::Plain,
        }
    }

    const fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Heading => "\u{1b}[1m",
            Self::Good => "\u{1b}[32m",
            Self::Warning => "\u{1b}[33m",
            Self::Bad => "\u{1b}[31m",
        }
    }
}

/// A line of text whose parts have a tone.
#[derive(Clone, Debug, Default)]
pub struct Line(Vec<Cell>);

impl Line {
    /// Returns a line that begins with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(vec![cell(text)])
    }

    /// Appends text to the line.
    pub fn then(mut self, tone: Tone, text: impl Into<String>) -> Self {
        self.0.push((tone, text.into()));
        self
    }
}

/// A cell of a table.
pub type Cell = (Tone, String);

/// Returns a cell of plain text.
pub fn cell(text: impl Into<String>) -> Cell {
    (Tone::Plain, text.into())
}

/// Returns a cell of the first row of a table.
pub fn heading(text: &str) -> Cell {
    (Tone::Heading, text.to_owned())
}

/// Aligns the columns of a table, two spaces apart. Lines do not end with spaces.
pub fn table<const N: usize>(rows: Vec<[Cell; N]>) -> Vec<Line> {
    let mut widths = [0; N];
    for row in &rows {
        for ((_, text), width) in row.iter().zip(&mut widths) {
            *width = (*width).max(text.chars().count());
        }
    }
    let mut lines = Vec::new();
    for row in rows {
        let mut line = Line::default();
        // The spaces after a cell belong to the next one that is not empty.
        let mut gap = 0;
        for ((tone, text), width) in row.into_iter().zip(widths) {
            let length = text.chars().count();
            if length == 0 {
                gap += width + 2;
                continue;
            }
            line = line.then(tone, format!("{:gap$}{text}", ""));
            gap = width + 2 - length;
        }
        lines.push(line);
    }
    lines
}

impl Terminal {
    /// Returns the lines as text.
    pub fn render(self, lines: &[Line]) -> String {
        let mut out = String::new();
        for Line(parts) in lines {
            for (tone, text) in parts {
                let code = if self.has_color { tone.code() } else { "" };
                out.push_str(code);
                out.push_str(text);
                if !code.is_empty() {
                    out.push_str("\u{1b}[0m");
                }
            }
            out.push('\n');
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_decides_then_no_color_then_clicolor_force() {
        let of = |no_color, force, is_dumb| ColorVariables {
            no_color,
            force,
            is_dumb,
        };
        for (environment, color, on_terminal, in_pipe) in [
            (of(false, false, false), Color::Auto, true, false),
            (of(false, false, true), Color::Auto, false, false),
            (of(true, false, false), Color::Auto, false, false),
            (of(false, true, true), Color::Auto, true, true),
            (of(true, true, false), Color::Auto, false, false),
            (of(true, false, true), Color::Always, true, true),
            (of(false, true, false), Color::Never, false, false),
        ] {
            let found = [true, false].map(|is_terminal| environment.has_color(color, is_terminal));
            assert_eq!(found, [on_terminal, in_pipe], "{environment:?} {color:?}");
        }
    }

    #[test]
    fn only_colors_differ() {
        let line = Line::new("a: ")
            .then(Tone::Bad, "no")
            .then(Tone::Plain, ", b");
        let plain = Terminal::default().render(std::slice::from_ref(&line));
        assert_eq!(plain, "a: no, b\n");
        let colored = Terminal { has_color: true }.render(&[line]);
        assert_eq!(colored, "a: \u{1b}[31mno\u{1b}[0m, b\n");
    }

    #[test]
    fn columns_are_aligned() {
        let row = |a: &str, b: &str| [cell(a), (Tone::Good, "x".to_owned()), cell(b)];
        let mut rows = vec![row("a", "one two"), row("bbb", "three"), row("", "four")];
        rows.push([cell("c"), cell(""), cell("five")]);
        rows.push([cell("d"), cell(""), cell("")]);
        assert_eq!(
            Terminal::default().render(&table(rows)),
            "a    x  one two\nbbb  x  three\n     x  four\nc       five\nd\n"
        );
    }
}
