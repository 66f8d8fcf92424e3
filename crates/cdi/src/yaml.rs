//! Converts between YAML and JSON values, as far as CDI needs it. Like the engines, this module converts YAML to JSON before it is
//! decoded. YAML is printed in block style.

use std::collections::BTreeMap;

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Number, Value};

/// The limit for nested values. A spec has seven levels.
const DEEPEST: usize = 64;
/// The limit for the number of values. Values that aliases repeat count, because they make a small file a large document.
const MOST: usize = 1 << 20;

/// Parses the first document.
///
/// # Errors
/// If the text is not YAML, has a key twice, or is deeper or larger than any spec.
pub fn parse(text: &str) -> Result<Value, String> {
    Reader {
        parser: Parser::new_from_str(text),
        anchors: BTreeMap::new(),
        count: 0,
    }
    .document()
}

struct Reader<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
    /// The values that have an anchor, each with the number of values in it
    anchors: BTreeMap<usize, (Value, usize)>,
    count: usize,
}

impl<'a> Reader<'a> {
    fn document(mut self) -> Result<Value, String> {
        loop {
            match self.next()? {
                Event::StreamEnd => return Ok(Value::Null),
                Event::StreamStart | Event::DocumentStart(_) => {}
                event => return self.value(event, 0),
            }
        }
    }

    fn next(&mut self) -> Result<Event<'a>, String> {
        match self.parser.next_event() {
            Some(Ok((event, _))) => Ok(event),
            Some(Err(error)) => Err(format!("line {}: {}", error.marker().line(), error.info())),
            None => Ok(Event::StreamEnd),
        }
    }

    fn value(&mut self, event: Event<'a>, depth: usize) -> Result<Value, String> {
        let before = self.count;
        self.count += 1;
        if depth > DEEPEST || self.count > MOST {
            return Err("the document is deeper or larger than any CDI spec".to_owned());
        }
        let (anchor, value) = match event {
            Event::Alias(anchor) => {
                let (value, count) = self
                    .anchors
                    .get(&anchor)
                    .ok_or("an alias refers to an unknown anchor")?;
                self.count += count;
                return Ok(value.clone());
            }
            Event::Scalar(text, ScalarStyle::Plain, anchor, None) => (anchor, plain(&text)),
            Event::Scalar(text, _, anchor, _) => (anchor, Value::String(text.into_owned())),
            Event::SequenceStart(anchor, _) => (anchor, self.list(depth)?),
            Event::MappingStart(anchor, _) => (anchor, self.map(depth)?),
            _ => return Err("unexpected end of the document".to_owned()),
        };
        if anchor > 0 {
            self.anchors
                .insert(anchor, (value.clone(), self.count - before));
        }
        Ok(value)
    }

    fn list(&mut self, depth: usize) -> Result<Value, String> {
        let mut list = Vec::new();
        loop {
            match self.next()? {
                Event::SequenceEnd => return Ok(Value::Array(list)),
                event => list.push(self.value(event, depth + 1)?),
            }
        }
    }

    fn map(&mut self, depth: usize) -> Result<Value, String> {
        let mut map = Map::new();
        let mut merged = Map::new();
        loop {
            let (key, is_plain) = match self.next()? {
                Event::MappingEnd => {
                    merged.append(&mut map);
                    return Ok(Value::Object(merged));
                }
                Event::Scalar(text, style, ..) => (text.into_owned(), style == ScalarStyle::Plain),
                _ => return Err("a key is not a string".to_owned()),
            };
            let event = self.next()?;
            let value = self.value(event, depth + 1)?;
            if is_plain && key == "<<" {
                merge(&mut merged, value)?;
                continue;
            }
            if map.contains_key(&key) {
                return Err(format!("duplicate key {key:?}"));
            }
            map.insert(key, value);
        }
    }
}

/// Adds the keys of a merge key's value, a map or a list of maps, which the parsers of engines and of NVIDIA's plugin support too. The
/// first map that has a key counts.
fn merge(merged: &mut Map<String, Value>, value: Value) -> Result<(), String> {
    let maps = match value {
        Value::Array(list) => list,
        value => vec![value],
    };
    for map in maps {
        let Value::Object(map) = map else {
            return Err("the value of \"<<\" is not a map".to_owned());
        };
        for (key, value) in map {
            merged.entry(key).or_insert(value);
        }
    }
    Ok(())
}

/// Returns the line of a key or an entry of a list, starting at 1. `path` leads to it: keys, and the numbers of entries. Of a document
/// that [`parse`] rejects, it returns any line.
#[must_use]
pub fn line_of(text: &str, path: &[&str]) -> Option<usize> {
    let mut at: Vec<Level> = Vec::new();
    let mut parser = Parser::new_from_str(text);
    while let Some(Ok((event, span))) = parser.next_event() {
        match event {
            Event::SequenceEnd | Event::MappingEnd => {
                at.pop();
                end_value(&mut at);
            }
            Event::Scalar(..)
            | Event::Alias(_)
            | Event::SequenceStart(..)
            | Event::MappingStart(..) => {
                let is_key = start_node(&mut at, &event);
                if is_at(&at, path) {
                    return Some(span.start.line());
                }
                match event {
                    _ if is_key => {}
                    Event::SequenceStart(..) => at.push(Level::List(None)),
                    Event::MappingStart(..) => at.push(Level::Map(None)),
                    _ => end_value(&mut at),
                }
            }
            _ => {}
        }
    }
    None
}

/// A list or a map around the current node
enum Level {
    /// The number of the current entry
    List(Option<usize>),
    /// The current key
    Map(Option<String>),
}

/// Takes the start of a node into account, and returns whether it is a key.
fn start_node(at: &mut [Level], event: &Event<'_>) -> bool {
    match at.last_mut() {
        Some(Level::List(number)) => *number = Some(number.map_or(0, |number| number + 1)),
        Some(Level::Map(key @ None)) => {
            *key = Some(if let Event::Scalar(text, ..) = event {
                text.to_string()
            } else {
                String::new()
            });
            return true;
        }
        _ => {}
    }
    false
}

fn end_value(at: &mut [Level]) {
    if let Some(Level::Map(key)) = at.last_mut() {
        *key = None;
    }
}

fn is_at(at: &[Level], path: &[&str]) -> bool {
    at.len() == path.len()
        && at
            .iter()
            .zip(path)
            .all(|(level, step)| is_step(level, step))
}

fn is_step(level: &Level, step: &str) -> bool {
    match level {
        Level::List(number) => number.is_some_and(|number| number.to_string() == step),
        Level::Map(key) => key.as_deref() == Some(step),
    }
}

/// Returns the value of a scalar without quotes.
fn plain(text: &str) -> Value {
    word(text)
        .or_else(|| number(text).map(Value::Number))
        .unwrap_or_else(|| Value::String(text.to_owned()))
}

/// Returns the value of a word of YAML 1.1, which the parsers of the engines support.
fn word(text: &str) -> Option<Value> {
    let is = |word: &&str| text.eq_ignore_ascii_case(word);
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Some(Value::Null),
        _ if ["true", "yes", "on"].iter().any(is) => Some(Value::Bool(true)),
        _ if ["false", "no", "off"].iter().any(is) => Some(Value::Bool(false)),
        _ => None,
    }
}

fn number(text: &str) -> Option<Number> {
    if !text.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first)) {
        return None;
    }
    let radix = |prefix: &str, radix| i64::from_str_radix(text.strip_prefix(prefix)?, radix).ok();
    let integer = radix("0x", 16)
        .or_else(|| radix("0o", 8))
        .or_else(|| radix("0b", 2));
    let octal = || if text.len() > 1 { radix("0", 8) } else { None };
    match integer.or_else(octal).or_else(|| text.parse::<i64>().ok()) {
        Some(integer) => Some(integer.into()),
        // Other numbers, such as .inf, do not occur in specs and stay text.
        None => serde_json::from_str(text).ok(),
    }
}

/// Prints a value as a YAML document.
#[must_use]
pub fn print(value: &Value) -> String {
    let mut text = "---\n".to_owned();
    if is_block(value) {
        print_block(value, 0, &mut text);
    } else {
        print_line(value, &mut text);
    }
    text
}

/// Prints a block. The caller has already printed the indentation of the first line, or a dash in its place.
fn print_block(value: &Value, indent: usize, text: &mut String) {
    match value {
        Value::Object(map) => {
            for (at, (key, value)) in map.iter().enumerate() {
                if at > 0 {
                    print_indent(indent, text);
                }
                print_scalar(key, text);
                if is_block(value) {
                    text.push_str(":\n");
                    print_indent(indent + 2, text);
                    print_block(value, indent + 2, text);
                } else {
                    text.push_str(": ");
                    print_line(value, text);
                }
            }
        }
        Value::Array(list) => {
            for (at, item) in list.iter().enumerate() {
                if at > 0 {
                    print_indent(indent, text);
                }
                text.push_str("- ");
                if is_block(item) {
                    print_block(item, indent + 2, text);
                } else {
                    print_line(item, text);
                }
            }
        }
        _ => {}
    }
}

fn print_indent(indent: usize, text: &mut String) {
    text.extend(std::iter::repeat_n(' ', indent));
}

fn is_block(value: &Value) -> bool {
    match value {
        Value::Object(map) => !map.is_empty(),
        Value::Array(list) => !list.is_empty(),
        _ => false,
    }
}

fn print_line(value: &Value, text: &mut String) {
    match value {
        Value::String(string) => print_scalar(string, text),
        // JSON is a subset of YAML.
        other => text.push_str(&other.to_string()),
    }
    text.push('\n');
}

/// Prints a string. It stays without quotes only if it is a string for the parsers of all versions of YAML.
fn print_scalar(scalar: &str, text: &mut String) {
    let start = scalar.strip_prefix("--").unwrap_or(scalar);
    let is_plain = start.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/')
        && scalar
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"/._=,+-".contains(&byte))
        && word(scalar).is_none()
        && scalar.len() > 1; // y and n
    if is_plain {
        text.push_str(scalar);
    } else {
        text.push_str(&Value::String(scalar.to_owned()).to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn what_scalars_mean() {
        for (text, value) in [
            ("a: b", json!({"a": "b"})),
            ("cdiVersion: 0.5.0", json!({"cdiVersion": "0.5.0"})),
            (
                "[1, -1, 0x1f, 0o17, 017, 08, 1.5, 1:0, 0, +3]",
                json!([1, -1, 31, 15, 15, 8, 1.5, "1:0", 0, 3]),
            ),
            (
                "[yes, No, on, true, ~, null, '', '1', \"no\", .inf, nan]",
                {
                    json!([
                        true, false, true, true, null, null, "", "1", "no", ".inf", "nan"
                    ])
                },
            ),
            ("&x {a: [1]}", json!({"a": [1]})),
            ("[&x {a: 1}, *x]", json!([{"a": 1}, {"a": 1}])),
            ("# nothing", json!(null)),
            (r#"{"a": {"b": [1, "x"]}}"#, json!({"a": {"b": [1, "x"]}})),
            ("a: >\n  x\n  y\n", json!({"a": "x y\n"})),
        ] {
            assert_eq!(parse(text), Ok(value), "{text}");
        }
    }

    #[test]
    fn lines_of_keys_and_entries() {
        let text = "# head\nversion: v1\na:\n  b: [x, {c: 1}]\n  d:\n  - e: 1\n    f: 2\n  -\n    f: 3\nz: |\n  a:\n  b:\n\"q\": 1\n";
        for (path, line) in [
            (&["version"][..], Some(2)),
            (&["a"], Some(3)),
            (&["a", "b"], Some(4)),
            (&["a", "b", "1", "c"], Some(4)),
            (&["a", "d", "0", "f"], Some(7)),
            (&["a", "d", "1", "f"], Some(9)),
            (&["a", "d", "2"], None),
            (&["z"], Some(10)),
            (&["q"], Some(13)),
            (&["f"], None),
        ] {
            assert_eq!(line_of(text, path), line, "{path:?}");
        }
        assert_eq!(line_of("{\"a\":\n {\"b\": 1}}", &["a", "b"]), Some(2));
        assert_eq!(line_of("[a: b: c", &["a"]), None);
    }

    #[test]
    fn other_documents_are_rejected() {
        let deep = "[".repeat(100_000);
        let mut laughs = "- &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        (1..9).for_each(|n| {
            laughs += &format!("- &a{n} [{}]\n", vec![format!("*a{}", n - 1); 10].join(","))
        });
        for (text, says) in [
            ("a: b: c", "line 1: "),
            ("a: 1\na: 2", "duplicate key \"a\""),
            ("[*x]", ""),
            ("a: [", "line "),
            (deep.as_str(), ""),
            (&laughs, "larger than any"),
            ("? [a]\n: b", "a key is not a string"),
        ] {
            let why = parse(text).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
    }

    #[test]
    fn block_style() {
        let value = json!({"devices": [{"name": "0", "containerEdits": {"env": ["A=b", "--x", "y", "no"]}}],
                           "cdiVersion": "0.5.0", "empty": [], "n": 1});
        assert_eq!(
            print(&value),
            "---\ncdiVersion: \"0.5.0\"\ndevices:\n  - containerEdits:\n      env:\n        \
             - A=b\n        - --x\n        - \"y\"\n        - \"no\"\n    name: \"0\"\nempty: []\n\"n\": 1\n"
        );
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "\\PC{0,8}".prop_map(Value::from),
            "[a-z0-9:~ .\n-]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[a-z0-9: -]{0,5}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read(value in any_value()) {
            prop_assert_eq!(parse(&print(&value)), Ok(value));
        }

        #[test]
        fn never_panics(text in "[-\\[\\]{}&*!|>'\"%@`a0:~ \n,#?]{0,40}") {
            parse(&text).ok();
            prop_assert!(line_of(&text, &["a", "0"]).is_none_or(|line| line > 0));
        }
    }
}
