//! Formats output for people: aligns columns, colors words, and folds lines to the width of the terminal.
//!
//! Commands build [`Line`]s; only this module knows escape codes and widths. In a pipe, lines are plain and not folded.

use std::io::IsTerminal;

use clap::ValueEnum;
use rustix::termios::tcgetwinsize;

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
pub struct Environment {
    no_color: bool,
    force: bool,
    is_dumb: bool,
}

impl Environment {
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

    /// Returns the properties of stdout. `--color` has priority over `NO_COLOR`, and that over `CLICOLOR_FORCE`.
    pub fn stdout(self, color: Color) -> Terminal {
        let stdout = rustix::stdio::stdout();
        let is_terminal = stdout.is_terminal();
        // A serial console does not know its size and reports 0 columns.
        let columns = || {
            tcgetwinsize(stdout)
                .ok()
                .map(|size| usize::from(size.ws_col))
                .filter(|columns| *columns > 0)
        };
        Terminal::new(
            self.has_color(color, is_terminal),
            is_terminal.then(|| columns().unwrap_or(usize::MAX)),
        )
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
    has_color: bool,
    /// In columns; `None` if stdout is not a terminal
    width: Option<usize>,
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

/// The column in which text continues if the usual one leaves too little room.
const NARROW: usize = 4;

/// A line of text whose parts have a tone.
#[derive(Clone, Debug, Default)]
pub struct Line {
    parts: Vec<(Tone, String)>,
    /// The column in which the text continues after a fold
    hang: usize,
}

impl Line {
    /// Returns a line that begins with this text and, if it is folded, continues in column `hang`.
    pub fn new(hang: usize, text: impl Into<String>) -> Self {
        Self {
            parts: vec![(Tone::Plain, text.into())],
            hang,
        }
    }

    /// Appends text to the line.
    pub fn then(mut self, tone: Tone, text: impl Into<String>) -> Self {
        self.parts.push((tone, text.into()));
        self
    }
}

/// A cell of a table.
pub type Cell = (Tone, String);

/// Returns a cell of plain text.
pub fn cell(text: impl Into<String>) -> Cell {
    (Tone::Plain, text.into())
}

/// Aligns the columns of a table, two spaces apart. The last column is not padded, and long text in it is folded there.
pub fn table<const N: usize>(rows: Vec<[Cell; N]>) -> Vec<Line> {
    let mut widths = [0; N];
    for row in &rows {
        for ((_, text), width) in row.iter().zip(&mut widths) {
            *width = (*width).max(text.chars().count());
        }
    }
    let hang = widths
        .iter()
        .take(N.saturating_sub(1))
        .map(|width| width + 2)
        .sum();
    rows.into_iter()
        .map(|row| Line {
            parts: padded(row, widths),
            hang,
        })
        .collect()
}

/// Returns the cells of a row, each with the spaces that fill the column in front of it.
fn padded<const N: usize>(row: [Cell; N], widths: [usize; N]) -> Vec<Cell> {
    let mut gap = 0;
    let cells = row.into_iter().zip(widths).map(|((tone, text), width)| {
        // Spaces for an empty cell belong to the next one, so a line does not end with them.
        if text.is_empty() {
            gap += width + 2;
            return (tone, text);
        }
        let cell = (tone, format!("{:gap$}{text}", ""));
        gap = width + 2 - text.chars().count();
        cell
    });
    cells.collect()
}

impl Terminal {
    /// Returns the properties of a terminal with this number of columns, or of a pipe.
    pub const fn new(has_color: bool, width: Option<usize>) -> Self {
        Self { has_color, width }
    }

    /// Returns whether stdout is a terminal.
    pub const fn is_screen(self) -> bool {
        self.width.is_some()
    }

    /// Returns the lines as text.
    pub fn render(self, lines: &[Line]) -> String {
        let mut text = String::new();
        lines.iter().for_each(|line| self.add(line, &mut text));
        text
    }

    fn paint(self, tone: Tone, text: &str, out: &mut String) {
        let code = if self.has_color { tone.code() } else { "" };
        out.push_str(code);
        out.push_str(text);
        if !code.is_empty() {
            out.push_str("\u{1b}[0m");
        }
    }

    fn add(self, line: &Line, out: &mut String) {
        // In a pipe, nothing is folded.
        let Some(width) = self.width else {
            line.parts
                .iter()
                .for_each(|(tone, text)| self.paint(*tone, text, out));
            out.push('\n');
            return;
        };
        let hang = if line.hang <= width / 2 {
            line.hang
        } else {
            NARROW
        };
        let mut column = 0;
        for (tone, text) in &line.parts {
            let code = if self.has_color { tone.code() } else { "" };
            out.push_str(code);
            for piece in pieces(text) {
                let word = piece.trim_start_matches(' ');
                let needed = piece.chars().count();
                let length = word.chars().count();
                // A path that is longer than the last column of a table gets more room.
                let is_long = hang.saturating_add(length) > width;
                let is_fold = piece.len() > word.len()
                    && !word.is_empty()
                    && (column > hang || (column > 0 && is_long));
                if is_fold && column.saturating_add(needed) > width {
                    let hang = if is_long { hang.min(NARROW) } else { hang };
                    out.push('\n');
                    out.extend(std::iter::repeat_n(' ', hang));
                    out.push_str(word);
                    column = hang + length;
                } else if column == 0 && piece.len() > word.len() && needed > width {
                    // The first cells of the row are empty.
                    out.extend(std::iter::repeat_n(' ', hang.min(NARROW)));
                    out.push_str(word);
                    column = hang.min(NARROW) + length;
                } else {
                    out.push_str(piece);
                    column += needed;
                }
            }
            if !code.is_empty() {
                out.push_str("\u{1b}[0m");
            }
        }
        out.push('\n');
    }
}

/// Returns text that replaces the content of the screen. Each line is overwritten in place, because an empty screen would flicker.
pub fn redrawn(text: &str) -> String {
    format!("\u{1b}[H{}\u{1b}[J", text.replace('\n', "\u{1b}[K\n"))
}

/// Splits a text into words, each with the spaces in front of it.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let spaces = rest.len() - rest.trim_start_matches(' ').len();
        let word = rest.get(spaces..)?;
        let end = spaces + word.find(' ').unwrap_or(word.len());
        let (piece, others) = rest.split_at_checked(end)?;
        rest = others;
        (!piece.is_empty()).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIPE: Terminal = Terminal {
        has_color: false,
        width: None,
    };

    fn narrow(width: usize) -> Terminal {
        Terminal {
            has_color: false,
            width: Some(width),
        }
    }

    #[test]
    fn the_command_line_decides_then_no_color_then_clicolor_force() {
        let of = |no_color, force, is_dumb| Environment {
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
        let line = Line::new(0, "a: ")
            .then(Tone::Bad, "no")
            .then(Tone::Plain, ", b");
        assert_eq!(PIPE.render(std::slice::from_ref(&line)), "a: no, b\n");
        let colored = Terminal {
            has_color: true,
            width: None,
        };
        assert_eq!(colored.render(&[line]), "a: \u{1b}[31mno\u{1b}[0m, b\n");
    }

    #[test]
    fn long_lines_hang() {
        let line = Line::new(
            4,
            "hint: one two  three /a/path/that/is/longer/than/the/screen four",
        );
        let text =
            "hint: one two\n    three\n    /a/path/that/is/longer/than/the/screen\n    four\n";
        assert_eq!(narrow(14).render(std::slice::from_ref(&line)), text);
        assert!(!PIPE.render(&[line]).trim_end().contains('\n'));
        let exact = Line::new(2, "12345 789");
        assert_eq!(
            narrow(9).render(std::slice::from_ref(&exact)),
            "12345 789\n"
        );
        assert_eq!(narrow(8).render(&[exact]), "12345\n  789\n");
        // A comma stays with the preceding word, even if the word has another tone.
        let line = Line::new(2, "aaa ")
            .then(Tone::Good, "bbb")
            .then(Tone::Plain, ", c");
        assert_eq!(narrow(7).render(&[line]), "aaa bbb,\n  c\n");
    }

    #[test]
    fn a_table_folds_in_its_last_column() {
        let row = |a: &str, b: &str| [cell(a), (Tone::Good, "x".to_owned()), cell(b)];
        let lines = table(vec![row("a", "one two"), row("bbb", "three")]);
        assert_eq!(PIPE.render(&lines), "a    x  one two\nbbb  x  three\n");
        assert_eq!(
            narrow(16).render(&lines),
            "a    x  one two\nbbb  x  three\n"
        );
        assert_eq!(
            narrow(12).render(&lines),
            "a    x  one\n    two\nbbb  x\n    three\n"
        );
        assert_eq!(
            narrow(14).render(&lines),
            "a    x  one\n    two\nbbb  x  three\n"
        );
    }

    #[test]
    fn a_path_that_is_longer_than_its_column() {
        let lines = table(vec![
            [cell("a"), cell("bbbb"), cell("/a/long/path (x)")],
            [cell("a"), cell(""), cell("")],
        ]);
        assert_eq!(PIPE.render(&lines), "a  bbbb  /a/long/path (x)\na\n");
        assert_eq!(
            narrow(19).render(&lines),
            "a  bbbb\n    /a/long/path\n         (x)\na\n"
        );
        assert_eq!(
            narrow(22).render(&lines),
            "a  bbbb  /a/long/path\n         (x)\na\n"
        );
        let line = Line::new(6, "")
            .then(Tone::Good, "no")
            .then(Tone::Plain, "    /a/long/path");
        assert_eq!(narrow(17).render(&[line]), "no\n    /a/long/path\n");
        let lines = table(vec![
            [cell("a"), cell("bbbb")],
            [cell(""), cell("/a/longer/path")],
        ]);
        assert_eq!(narrow(16).render(&lines), "a  bbbb\n   /a/longer/path\n");
        assert_eq!(narrow(15).render(&lines), "a  bbbb\n   /a/longer/path\n");
    }

    #[test]
    fn nothing_is_lost_or_added() {
        for text in ["", " ", "a", "  a  b ", "\u{e9} \u{20ac}"] {
            assert_eq!(pieces(text).collect::<String>(), text);
        }
    }
}
