//! How to print: decided in main, before the environment is forgotten, and from no more of it than this.

use std::io::IsTerminal;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terminal {
    pub colour: bool,
}

/// The colours of a terminal, by meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    Good,
    Plain,
    Warning,
    /// To be mended first
    Bad,
}

impl Terminal {
    /// Looks at stdout, and at `NO_COLOR` (<https://no-color.org>) and `TERM`. Nothing of what they say is kept.
    #[expect(clippy::disallowed_methods, reason = "this is where it is read")]
    pub fn look() -> Self {
        let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb" || term.is_empty());
        Self { colour: std::io::stdout().is_terminal() && !is_set("NO_COLOR") && !is_dumb }
    }

    pub fn paint(self, colour: Colour, text: &str) -> String {
        let code = match colour {
            Colour::Good => "32",
            Colour::Warning => "33",
            Colour::Bad => "31",
            Colour::Plain => return text.to_owned(),
        };
        if self.colour { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_terminals() {
        assert_eq!(Terminal { colour: false }.paint(Colour::Bad, "x"), "x");
        assert_eq!(Terminal { colour: true }.paint(Colour::Bad, "x"), "\u{1b}[31mx\u{1b}[0m");
        assert_eq!(Terminal { colour: true }.paint(Colour::Plain, "x"), "x");
    }
}
