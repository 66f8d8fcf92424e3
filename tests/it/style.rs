//! Counts the patterns of STYLE.md that a program can find, in the documents and in the string literals of the program.

use std::path::Path;

use crate::docs::{BEGIN, END, pages, texts};
use crate::support::source;

tests! {
    &[] => patterns_are_found, of_the_documents, of_the_program, sentences_are_short;
}

/// Words to avoid, and how often they may occur.
struct Pattern {
    /// Phrases. A word has alternatives (`is|are`), `*` is any word, and `.` is a punctuation mark.
    phrases: &'static [&'static str],
    /// The phrase does not count after this word.
    unless_after: &'static str,
    /// The number in documents: 0, except for words that are sometimes right.
    documents: usize,
    /// The number in messages, help and the catalog of findings.
    program: usize,
}

const PATTERNS: &[Pattern] = &[
    Pattern {
        phrases: &["is|are|was|were no|none"],
        unless_after: "there",
        documents: 0,
        program: 0,
    },
    Pattern {
        phrases: &["tell|tells|telling|told|say|says|saying|said"],
        unless_after: "",
        documents: 0,
        program: 0,
    },
    Pattern {
        phrases: &["mend|mends|mended|mending"],
        unless_after: "",
        documents: 0,
        program: 0,
    },
    Pattern {
        phrases: &[
            "of ours|theirs|yours",
            "of nvidia's|root's .|and|or|is|are|in|on|at|that|which|to",
            "of the host's|image's|driver's|engine's|container's|user's|kernel's .|and|or|is|are|in|on|at|that|which|to",
        ],
        unless_after: "",
        documents: 0,
        program: 0,
    },
    Pattern {
        phrases: &["somebody|nobody|everybody|anybody|whoever"],
        unless_after: "",
        documents: 1,
        program: 1,
    },
    Pattern {
        phrases: &["not there", "there is|are none", "that|which is|are there"],
        unless_after: "",
        documents: 0,
        program: 0,
    },
    Pattern {
        phrases: &["beside|behind"],
        unless_after: "",
        documents: 1,
        program: 0,
    },
    Pattern {
        phrases: &["as good as", "no more than", "ever so"],
        unless_after: "",
        documents: 0,
        program: 0,
    },
    Pattern {
        phrases: &[
            "take|takes|taken|took away",
            "take|takes|taken|took * away",
            "take|takes|taken|took * * away",
            "lay|lays|laid out",
            "make|makes|made up",
            "find|finds|found out",
        ],
        unless_after: "",
        documents: 0,
        program: 0,
    },
    Pattern {
        phrases: &["look|looks|looked|looking at|for"],
        unless_after: "",
        documents: 0,
        program: 0,
    },
    // Without a noun, for example in a cell of a table
    Pattern {
        phrases: &["the same .", "do|does the same"],
        unless_after: "",
        documents: 18,
        program: 0,
    },
    Pattern {
        phrases: &["that|those of"],
        unless_after: "",
        documents: 0,
        program: 0,
    },
    Pattern {
        phrases: &["of its|their own"],
        unless_after: "",
        documents: 0,
        program: 0,
    },
    Pattern {
        phrases: &[
            "carry|carries|carried|carrying out",
            "leave|leaves|leaving root",
            "stand|stands in",
            "is|are away",
            "the other one|ones",
            "nevertheless",
            "exactly if",
        ],
        unless_after: "",
        documents: 0,
        program: 0,
    },
    // For a purpose, not for a result
    Pattern {
        phrases: &["so that"],
        unless_after: "",
        documents: 17,
        program: 3,
    },
];

/// The most words of a sentence in README.md and docs.
const LONGEST: usize = 30;

/// Lower-case words; punctuation marks become `.`.
fn words(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let mut part = String::new();
        for letter in word.to_lowercase().chars() {
            if letter.is_alphanumeric() || "'-_/".contains(letter) {
                part.push(letter);
                continue;
            }
            found.extend([std::mem::take(&mut part), ".".to_owned()]);
        }
        found.push(part);
    }
    found.retain(|word| !word.is_empty());
    found
}

fn is_phrase(phrase: &str, words: &[String]) -> bool {
    let mut at = words.iter();
    phrase.split(' ').all(|wanted| {
        at.next().is_some_and(|word| {
            (wanted == "*" && word != ".") || wanted.split('|').any(|one| one == word)
        })
    })
}

/// Returns the places that match the pattern, with some words around them.
fn occurrences(pattern: &Pattern, text: &str) -> Vec<String> {
    let words = words(text);
    let found = (0..words.len()).filter(|at| {
        let before = at.checked_sub(1).map_or("", |before| &words[before]);
        (pattern.unless_after.is_empty() || before != pattern.unless_after)
            && pattern
                .phrases
                .iter()
                .any(|phrase| is_phrase(phrase, &words[*at..]))
    });
    found
        .map(|at| words[at.saturating_sub(4)..(at + 6).min(words.len())].join(" "))
        .collect()
}

/// Removes code: text in backticks, and the blocks between ```.
fn without_code(text: &str) -> String {
    let prose: String = text.split("```").step_by(2).collect();
    prose
        .replace("``", "\"")
        .split('`')
        .step_by(2)
        .collect::<Vec<_>>()
        .join(" x ")
}

/// Removes macros, and the words that they set in bold or italics.
fn of_a_man_page(text: &str) -> String {
    let lines = text
        .lines()
        .filter(|line| ![".B", ".I", ".T"].iter().any(|font| line.starts_with(font)));
    lines.collect::<Vec<_>>().join("\n")
}

fn documents() -> Vec<(String, String)> {
    let name = |path: &Path| {
        path.strip_prefix(source(""))
            .unwrap_or(path)
            .display()
            .to_string()
    };
    // The table of findings is part of the program.
    let written = |text: &str| {
        text.split(BEGIN)
            .flat_map(|part| part.rsplit(END).next())
            .collect::<String>()
    };
    let mut found: Vec<_> = pages()
        .into_iter()
        .map(|(path, text)| (name(&path), without_code(&written(&text))))
        .collect();
    for page in std::fs::read_dir(source("docs/man")).unwrap().flatten() {
        found.push((
            name(&page.path()),
            of_a_man_page(&std::fs::read_to_string(page.path()).unwrap()),
        ));
    }
    let templates = texts(&source(".github"), "md").into_iter();
    found.extend(templates.map(|(path, text)| (name(&path), without_code(&text))));
    let mut others = vec![
        source("config/config.toml"),
        source("packaging/rpm.spec"),
        source("packaging/debian/control"),
    ];
    for (dir, kind) in [
        ("systemd", "service"),
        ("systemd", "path"),
        ("udev", "rules"),
        ("podman", "conf"),
    ] {
        let found = texts(&source("packaging").join(dir), kind);
        assert!(!found.is_empty(), "packaging/{dir} has no .{kind} files");
        others.extend(found.into_iter().map(|(path, _)| path));
    }
    // The copy of the tree for a plain user lacks some of these.
    let others = others
        .into_iter()
        .filter_map(|path| Some((name(&path), std::fs::read_to_string(path).ok()?)));
    found.extend(others);
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
            Some(help) if is_help => found += &format!("{help}\n"),
            _ if line.starts_with("//") => {}
            _ => code += &format!("{line}\n"),
        }
    }
    let code = code
        .replace("\\\\", "")
        .replace("\\\"", "'")
        .replace("'\"'", "");
    for literal in code
        .split('"')
        .skip(1)
        .step_by(2)
        .filter(|literal| literal.contains(' '))
    {
        found += &format!(". {}", literal.replace("\\n", " . "));
    }
    without_code(&found)
}

fn program() -> Vec<(String, String)> {
    let roots = [
        "src",
        "crates/base/src",
        "crates/cdi/src",
        "crates/command-line/src",
        "crates/compat/src",
        "crates/engines/src",
        "crates/findings/src",
        "crates/kubelet-plugin/src",
        "crates/nvidia/src",
        "crates/plugin-api/src",
        "crates/records/src",
    ];
    let files = roots.iter().flat_map(|root| texts(&source(root), "rs"));
    let files = files.filter(|(path, _)| !path.ends_with("tests.rs"));
    files
        .map(|(path, text)| (path.display().to_string(), literals(&path, &text)))
        .collect()
}

fn count(texts: &[(String, String)], most: fn(&Pattern) -> usize) {
    let mut wrong = Vec::new();
    for pattern in PATTERNS {
        let found: Vec<_> = texts
            .iter()
            .flat_map(|(name, text)| {
                occurrences(pattern, text)
                    .into_iter()
                    .map(move |near| format!("{name}: {near}"))
            })
            .collect();
        if found.len() > most(pattern) {
            wrong.push(format!(
                "{:?}: {}, at most {}\n  {}",
                pattern.phrases,
                found.len(),
                most(pattern),
                found.join("\n  ")
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "STYLE.md names better words:\n{}",
        wrong.join("\n")
    );
}

fn of_the_documents() {
    let texts = documents();
    assert!(texts.len() > 20, "{}", texts.len());
    count(&texts, |pattern| pattern.documents);
}

fn of_the_program() {
    let texts = program();
    assert!(
        texts
            .iter()
            .any(|(_, text)| text.contains("the requested GPU does not exist")),
        "literals are found"
    );
    count(&texts, |pattern| pattern.program);
}

/// Returns the sentences of a page, each as its words. An item of a list, a cell of a table and a heading are paragraphs.
fn sentences(page: &str) -> Vec<Vec<String>> {
    let prose = page
        .split("```")
        .step_by(2)
        .collect::<Vec<_>>()
        .join("\n\n");
    let mut found = vec![Vec::new()];
    for line in prose.lines().map(str::trim) {
        let is_start = ["#", "|", "- "].iter().any(|start| line.starts_with(start));
        let is_item = line
            .split_once(". ")
            .is_some_and(|(number, _)| number.parse::<u8>().is_ok());
        if line.is_empty() || is_start || is_item {
            found.push(Vec::new());
        }
        for word in without_targets(&without_code(line)).split_whitespace() {
            if word == "|" {
                found.push(Vec::new());
            } else if word.chars().any(char::is_alphanumeric) {
                found.last_mut().unwrap().push(word.to_owned());
            }
            if word
                .trim_end_matches(['*', ')', '"'])
                .ends_with(['.', '?', '!'])
            {
                found.push(Vec::new());
            }
        }
        if line.starts_with('#') {
            found.push(Vec::new());
        }
    }
    found
}

/// Removes the targets of links.
fn without_targets(text: &str) -> String {
    let mut parts = text.split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        text + part.split_once(')').map_or(part, |(_, rest)| rest)
    })
}

fn sentences_are_short() {
    let mut wrong = Vec::new();
    for (path, text) in pages() {
        let long = sentences(&text)
            .into_iter()
            .filter(|words| words.len() > LONGEST);
        wrong.extend(long.map(|words| {
            format!(
                "{}: {} words: {}",
                path.display(),
                words.len(),
                words.join(" ")
            )
        }));
    }
    assert!(
        wrong.is_empty(),
        "at most {LONGEST} words in a sentence:\n{}",
        wrong.join("\n")
    );
    let page = "# A heading\nOne `a. b` two,\n[three](x.md) four. Five\n\n- six\n| seven | eight. |\n```sh\nnine\n```\n1. ten";
    let lengths: Vec<_> = sentences(page)
        .iter()
        .map(Vec::len)
        .filter(|length| *length > 0)
        .collect();
    assert_eq!(lengths, [2, 5, 1, 1, 1, 1, 1, 1]);
}

/// Each phrase is found in a sentence with it, and not in a better one.
fn patterns_are_found() {
    let bad = [
        "\"x\" is no stage",
        "it tells what is wrong",
        "the command that mends it",
        "a file of the host's, and more",
        "if nobody asks",
        "if the file is not there",
        "the file beside it",
        "as good as new",
        "take the file away",
        "it looks at the driver",
        "podman does the same",
        "that of root",
        "a cgroup of its own",
        "the program carries out the hook",
        "it is written so that it exists",
    ];
    for (pattern, bad) in PATTERNS.iter().zip(bad) {
        assert_eq!(occurrences(pattern, bad).len(), 1, "{bad}");
    }
    let good = "there is no GPU. The files of the host's driver are missing, and root can remove them: see \
                `nobody is not there` and ``x` beside y``. It is. No file is listed.";
    for pattern in PATTERNS {
        assert_eq!(
            occurrences(pattern, &without_code(good)),
            Vec::<String>::new()
        );
    }
    let code = "//! it tells\nlet x = f(\"tell me\", '\"', \"said\"); // say no\n#[cfg(test)]\n\"it says so\"";
    assert_eq!(literals(Path::new("x.rs"), code), ". tell me");
}
