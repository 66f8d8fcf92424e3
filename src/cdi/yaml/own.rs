//! What [`super::print`] printed, read back in a tenth of the time that any YAML takes: most specs that are read here
//! are our own, at boot and whenever something may have changed.
//!
//! Nothing is taken on trust: what is read is printed again, and if that is not the same text, to the byte, somebody else wrote
//! it, and the parser has to say what it means.

use serde_json::{Map, Value};

use super::{DEEPEST, plain, print};

/// The value that is printed so; `None` if none is.
pub(super) fn read(text: &str) -> Option<Value> {
    let indented = |line: &'_ str| line.len() - line.trim_start_matches(' ').len();
    let lines = text.strip_prefix("---\n")?.lines().map(|line| (indented(line), line.trim_start_matches(' ')));
    let mut lines = Lines { lines: lines.collect(), at: 0 };
    let value = lines.block(0, 0)?;
    (print(&value) == text).then_some(value)
}

struct Lines<'a> {
    /// Each with its indentation
    lines: Vec<(usize, &'a str)>,
    at: usize,
}

impl<'a> Lines<'a> {
    /// The line that is due, if it belongs to the block.
    fn peek(&self, indent: usize) -> Option<&'a str> {
        self.lines.get(self.at).filter(|line| line.0 == indent).map(|line| line.1)
    }

    fn block(&mut self, indent: usize, depth: usize) -> Option<Value> {
        if depth > DEEPEST {
            return None;
        }
        if self.peek(indent)?.starts_with("- ") { self.list(indent, depth) } else { self.map(indent, depth) }
    }

    fn list(&mut self, indent: usize, depth: usize) -> Option<Value> {
        let mut list = Vec::new();
        while let Some(item) = self.peek(indent).and_then(|line| line.strip_prefix("- ")) {
            let (_, rest) = token(item)?;
            let is_scalar = rest.is_empty() && !item.starts_with("- ");
            list.push(if is_scalar {
                self.at += 1;
                scalar(item)?
            } else {
                // Its first line stands behind the dash.
                *self.lines.get_mut(self.at)? = (indent + 2, item);
                self.block(indent + 2, depth + 1)?
            });
        }
        Some(Value::Array(list))
    }

    fn map(&mut self, indent: usize, depth: usize) -> Option<Value> {
        let mut map = Map::new();
        while let Some(line) = self.peek(indent) {
            let (key, rest) = token(line)?;
            self.at += 1;
            let value = match rest.strip_prefix(": ") {
                Some(value) => scalar(value)?,
                None if rest == ":" => self.block(indent + 2, depth + 1)?,
                None => return None,
            };
            map.insert(text(key)?, value);
        }
        Some(Value::Object(map))
    }
}

/// A key or an item, and what stands behind it.
fn token(line: &str) -> Option<(&str, &str)> {
    if !line.starts_with('"') {
        return Some(line.split_at(line.find(':').unwrap_or(line.len())));
    }
    let mut escaped = false;
    let end = line.char_indices().skip(1).find_map(|(at, char)| {
        let is_end = char == '"' && !escaped;
        escaped = char == '\\' && !escaped;
        is_end.then_some(at + 1)
    });
    line.split_at_checked(end?)
}

fn text(token: &str) -> Option<String> {
    if token.starts_with('"') { serde_json::from_str(token).ok() } else { Some(token.to_owned()) }
}

fn scalar(token: &str) -> Option<Value> {
    Some(match token {
        "[]" => Value::Array(Vec::new()),
        "{}" => Value::Object(Map::new()),
        quoted if quoted.starts_with('"') => Value::String(text(quoted)?),
        other => plain(other),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{parse_any, tests::any_value};
    use super::*;

    #[test]
    fn what_somebody_else_wrote_is_not_judged_here() {
        for text in [
            "",
            "---\n",
            "a: b\n",
            "---\na:  b\n",
            "---\na: b",
            "---\na: b # c\n",
            "---\na: &x b\n",
            "---\n'a': b\n",
            "---\nb: 1\na: 1\n",
            "---\na: 1\na: 1\n",
            "---\na: yes\n",
            "---\n\"a: b\n",
            "---\na:\n- b\n",
            "---\na: \"\\u0061\"\n",
        ] {
            assert_eq!(read(text), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read(value in any_value()) {
            let text = print(&value);
            if let Some(read) = read(&text) {
                prop_assert_eq!(&read, &value);
            } else {
                // Only blocks are looked at.
                prop_assert!(!super::super::is_block(&value), "{text}");
            }
        }

        #[test]
        fn what_is_read_is_what_the_parser_reads(text in "(---\n)?[-a:\" \n\\[\\]{}0]{0,30}") {
            if let Some(value) = read(&text) {
                prop_assert_eq!(parse_any(&text), Ok(value));
            }
        }
    }
}
