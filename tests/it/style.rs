//! Counts the patterns of STYLE.md that a program can find, in the documents and in the string literals of the program.

use std::path::{Path, PathBuf};

use crate::docs::{BEGIN, pages, texts};
use crate::support::source;

tests! {
    &[] => patterns_are_found, of_the_documents, of_the_program, sentences_are_short;
}

/// For each pattern, how often it may occur in documents and in the program: 0, except for words that are sometimes right. A word has
/// alternatives, `*` is any word, `!` begins a word that does not follow, and `.` is a punctuation mark.
const PATTERNS: &str = "\
    0  0  !there is|are|was|were no|none
    0  0  tell|tells|telling|told|say|says|saying|said
    0  0  mend|mends|mended|mending
    0  0  of ours|theirs|yours
    0  0  of nvidia's|root's|host's .|and|or|is|are|in|on|at|that|which|to
    0  0  of the host's|image's|driver's|engine's|container's|user's|kernel's .|and|or|is|are|in|on|at|that|which|to
    4  1  somebody|nobody|everybody|anybody|whoever
    0  0  not there
    0  0  there is|are none
    0  0  that|which is|are there
    1  0  beside|behind
    0  0  as good as
    0  0  no more than
    0  0  ever so
    0  0  take|takes|taken|took away
    0  0  take|takes|taken|took * away
    0  0  take|takes|taken|took * * away
    0  0  lay|lays|laid out
    0  0  make|makes|made up
    0  0  find|finds|found out
    0  0  look|looks|looked|looking at|for
    18 0  the same .
    0  0  do|does the same
    0  0  that|those of
    0  0  of its|their own
    0  0  carry|carries|carried|carrying out
    0  0  leave|leaves|leaving root
    0  0  stand|stands in
    0  0  is|are away
    0  0  the other one|ones
    0  0  nevertheless
    0  0  exactly if
    17 3  so that
    2  2  that|which|it|message|messages|hint|doctor|check|log names|named
    21 4  . also
    2  0  also .
    0  0  ask|asks|asked|asking nvml
    28 18 what the|a|an|it|they
    14 12 with|in|at|by|for|from|on|of|to which
    0  2  way|ways
    2  2  may not
    5  6  may have
    4  1  no other|others
    1  2  at once
    18 14 gets
    13 20 gives|given
    46 18 the same
    0  0  has|have the reason|reasons
    69 101 of the pod|pods|node|nodes|daemon|daemons|plugin|driver|gpu|gpus|kubelet
    31 13 not tested|run|tried|checked
    0  0  hook user
    0  0  multiprocessor|multiprocessors
    0  0  the driver for claims";

/// The most words of a sentence in README.md and docs.
const LONGEST: usize = 30;

/// A line of [`PATTERNS`].
struct Pattern {
    words: Vec<&'static str>,
    documents: usize,
    program: usize,
}

fn patterns() -> Vec<Pattern> {
    let mut found = Vec::new();
    for line in PATTERNS.lines() {
        let columns: Vec<_> = line.split_whitespace().collect();
        found.push(Pattern {
            documents: columns[0].parse().unwrap(),
            program: columns[1].parse().unwrap(),
            words: columns[2..].to_vec(),
        });
    }
    found
}

/// Lower-case words; punctuation marks become `.`.
fn words(text: &str) -> Vec<String> {
    let mut spaced = String::from(". ");
    for letter in text.to_lowercase().chars() {
        if letter.is_alphanumeric() || letter.is_whitespace() || "'-_/".contains(letter) {
            spaced.push(letter);
        } else {
            spaced.push_str(" . ");
        }
    }
    spaced.split_whitespace().map(str::to_owned).collect()
}

fn is_word(pattern: &str, word: &str) -> bool {
    match pattern.strip_prefix('!') {
        Some(other) => word != other,
        None if pattern == "*" => word != ".",
        None => pattern.split('|').any(|one| one == word),
    }
}

/// Returns the places that match the pattern, with some words around them.
fn occurrences(pattern: &Pattern, text: &str) -> Vec<String> {
    let words = words(text);
    let mut found = Vec::new();
    for (at, near) in words.windows(pattern.words.len()).enumerate() {
        let mut pairs = pattern.words.iter().zip(near);
        if pairs.all(|(pattern, word)| is_word(pattern, word)) {
            let end = words.len().min(at + 6);
            found.push(words[at.saturating_sub(4)..end].join(" "));
        }
    }
    found
}

/// Removes code: text in backticks, and the blocks between ```.
fn without_code(text: &str) -> String {
    let prose: String = text.split("```").step_by(2).collect();
    let prose = prose.replace("``", "\"");
    let parts: Vec<_> = prose.split('`').step_by(2).collect();
    parts.join(" x ")
}

/// Removes macros, and the words that they set in bold or italics.
fn of_a_man_page(text: &str) -> String {
    let mut prose = String::new();
    for line in text.lines() {
        if ![".B", ".I", ".T"].iter().any(|font| line.starts_with(font)) {
            prose = prose + line + "\n";
        }
    }
    prose
}

/// The text of all documents. The table of findings is part of the program.
fn documents() -> Vec<(PathBuf, String)> {
    let mut found = pages();
    found.extend(texts(&source(".github"), "md"));
    for (_, text) in &mut found {
        *text = without_code(text.split(BEGIN).next().unwrap());
    }
    for kind in ["5", "8"] {
        for (path, text) in texts(&source("docs/man"), kind) {
            found.push((path, of_a_man_page(&text)));
        }
    }
    found.extend(texts(&source("config"), "toml"));
    for kind in ["spec", "control", "service", "path", "rules", "conf"] {
        found.extend(texts(&source("packaging"), kind));
    }
    // It is generated from rpm.spec.
    found.retain(|(path, _)| !path.starts_with(source("packaging/obs")));
    found
}

/// The string literals of a source file with more than one word, without its tests and comments. The doc comments of
/// options are help texts.
fn literals(path: &Path, text: &str) -> String {
    let text = text.split("#[cfg(test)]").next().unwrap();
    let is_help = text.contains("use clap::") || path.ends_with("settings/table.rs");
    let (mut code, mut found) = (String::new(), String::new());
    for line in text.lines().map(str::trim_start) {
        match line.strip_prefix("///") {
            Some(help) if is_help => found = found + help + "\n",
            _ if line.starts_with("//") => {}
            _ => code = code + line + "\n",
        }
    }
    let code = code.replace("\\\\", "").replace("\\\"", "'");
    for literal in code.replace("'\"'", "").split('"').skip(1).step_by(2) {
        if literal.contains(' ') {
            found = found + ". " + &literal.replace("\\n", " . ");
        }
    }
    found
}

/// The string literals of the program, and the help texts.
pub fn literals_of_the_program() -> Vec<(PathBuf, String)> {
    let mut found = texts(&source("src"), "rs");
    for entry in std::fs::read_dir(source("crates")).unwrap().flatten() {
        found.extend(texts(&entry.path().join("src"), "rs"));
    }
    found.retain(|(path, _)| !path.ends_with("tests.rs"));
    for (path, text) in &mut found {
        *text = literals(path, text);
    }
    found
}

fn program() -> Vec<(PathBuf, String)> {
    let mut found = literals_of_the_program();
    for (_, text) in &mut found {
        *text = without_code(text);
    }
    found
}

fn count(texts: &[(PathBuf, String)], most: fn(&Pattern) -> usize) {
    let mut wrong = String::new();
    for pattern in patterns() {
        let mut found = Vec::new();
        for (path, text) in texts {
            let near = occurrences(&pattern, text);
            found.extend(near.iter().map(|near| format!("\n  {path:?}: {near}")));
        }
        if found.len() > most(&pattern) {
            let (words, most) = (pattern.words.join(" "), most(&pattern));
            wrong += &format!("\n{words:?}: at most {most}: {}", found.concat());
        }
    }
    assert!(wrong.is_empty(), "STYLE.md names better words:{wrong}");
}

fn of_the_documents() {
    let texts = documents();
    assert!(texts.len() > 30, "{}", texts.len());
    count(&texts, |pattern| pattern.documents);
}

fn of_the_program() {
    let texts = program();
    let known = "the requested GPU does not exist";
    assert!(texts.iter().any(|(_, text)| text.contains(known)));
    count(&texts, |pattern| pattern.program);
}

/// Returns the sentences of a page, each as its words. An item of a list, a cell of a table and a heading are paragraphs.
fn sentences(page: &str) -> Vec<Vec<String>> {
    let prose: Vec<_> = page.split("```").step_by(2).collect();
    let mut found = vec![Vec::new()];
    for line in prose.join("\n\n").lines().map(str::trim) {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        let is_item = first == "-" || first.ends_with('.') && first.len() < 4;
        if first.is_empty() || first.starts_with(['#', '|']) || is_item {
            found.push(Vec::new());
        }
        let text = if is_item { rest } else { line };
        for word in without_targets(&without_code(text)).split_whitespace() {
            if word.contains(char::is_alphanumeric) {
                found.last_mut().unwrap().push(word.to_owned());
            }
            let end = word.trim_end_matches(['*', ')', '"']);
            if word == "|" || end.ends_with(['.', '?', '!']) {
                found.push(Vec::new());
            }
        }
        if first.starts_with('#') {
            found.push(Vec::new());
        }
    }
    found.retain(|words| !words.is_empty());
    found
}

/// Removes the targets of links.
fn without_targets(text: &str) -> String {
    let mut parts = text.split("](");
    let mut found = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        found += part.split_once(')').map_or(part, |(_, rest)| rest);
    }
    found
}

fn sentences_are_short() {
    let mut wrong = String::new();
    for (path, text) in pages() {
        for words in sentences(&text) {
            if words.len() > LONGEST {
                wrong += &format!("\n{path:?}: {} words: {}", words.len(), words.join(" "));
            }
        }
    }
    assert!(wrong.is_empty(), "at most {LONGEST} words:{wrong}");
    let page = "# A heading\nOne `a. b` two,\n[three](x.md) four. Five\n\n- six\n| seven | eight. |\n```sh\nnine\n```\n1. ten";
    let lengths: Vec<_> = sentences(page).iter().map(Vec::len).collect();
    assert_eq!(lengths, [2, 5, 1, 1, 1, 1, 1]);
}

/// Each pattern is found in its own first words, and not in a good sentence.
fn patterns_are_found() {
    let good = "there is no GPU. The files of the host's driver are missing, and root can remove them: see \
                `nobody is not there` and ``x` beside y``. It is. No file is listed.";
    for pattern in patterns() {
        let first = |word: &&str| word.split('|').next().unwrap().replace('!', "x");
        let bad: Vec<_> = pattern.words.iter().map(first).collect();
        let bad = bad.join(" ").replace('*', "x");
        assert_eq!(occurrences(&pattern, &bad).len(), 1, "{bad}");
        assert_eq!(occurrences(&pattern, &without_code(good)), [""; 0]);
    }
    let code = "//! it tells\nlet x = f(\"tell me\", '\"', \"said\"); // say no\n#[cfg(test)]\n\"it says so\"";
    assert_eq!(literals(Path::new("x.rs"), code), ". tell me");
}
