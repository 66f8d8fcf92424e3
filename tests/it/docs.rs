//! What the documents say, held against the code.

use std::path::Path;

use oci_nvidia_hook::finding::catalog;

use crate::Test;
use crate::support::source;

pub const TESTS: &[Test] = &[
    ("docs::every_finding_is_told_of", &[], every_finding_is_told_of),
    ("docs::every_finding_is_made", &[], every_finding_is_made),
    ("docs::every_trouble_is_answered", &[], every_trouble_is_answered),
    ("docs::tests_that_documents_name_exist", &[], tests_that_documents_name_exist),
];

/// The texts of all files below a directory.
fn texts(dir: &Path, extension: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(texts(&path, extension));
        } else if path.extension().is_some_and(|kind| kind == extension) {
            found.push(std::fs::read_to_string(path).unwrap());
        }
    }
    found
}

/// Each row of docs/findings.md is a kind of the catalogue, in the same order and with the same words.
fn every_finding_is_told_of() {
    let text = std::fs::read_to_string(source("docs/findings.md")).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| ONH-"));
    let told: Vec<Vec<_>> = rows.map(|row| row.split('|').map(str::trim).collect()).collect();
    let kinds = catalog::ALL.iter().map(|kind| [kind.id, kind.severity.name(), kind.title]);
    for (row, kind) in told.iter().zip(kinds) {
        assert_eq!(row.get(1..4).unwrap(), kind);
        assert!(row.len() == 6 && row[4].len() > 10, "{row:?}");
    }
    assert_eq!(told.len(), catalog::ALL.len());
}

/// One that nothing makes is none.
fn every_finding_is_made() {
    let text = std::fs::read_to_string(source("src/finding/catalog.rs")).unwrap();
    let list = text.split("kinds! {").nth(1).unwrap().split("\n}").next().unwrap();
    let names = list.lines().filter_map(|line| line.trim().split_once(" \"ONH-")).map(|(name, _)| name);
    let code: Vec<_> = texts(&source("src"), "rs")
        .into_iter()
        .map(|text| text.split("#[cfg(test)]").next().unwrap().to_owned())
        .collect();
    let mut count = 0;
    for name in names {
        assert!(code.iter().any(|text| text.contains(&format!("&catalog::{name}"))), "nothing makes {name}");
        count += 1;
    }
    assert_eq!(count, catalog::ALL.len());
}

/// Each trouble has numbers or a reason why it cannot arise, and tests that know these numbers.
fn every_trouble_is_answered() {
    let text = std::fs::read_to_string(source("docs/findings.md")).unwrap();
    let table = text.split("\n## What nodes suffer from\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let mut count = 0;
    for row in table.lines().filter(|line| line.starts_with('|') && line.contains("::")) {
        let cells: Vec<_> = row.split(" | ").collect();
        count += 1;
        assert_eq!(cells[0], format!("| {count}"));
        let ids: Vec<_> = cells[2].split("ONH-").skip(1).map(|rest| format!("ONH-{}", &rest[..3])).collect();
        assert!(
            !ids.is_empty() || ["cannot arise: ", "every id"].iter().any(|start| cells[2].starts_with(start)),
            "{row}"
        );
        assert!(ids.iter().all(|id| catalog::ALL.iter().any(|kind| kind.id == id)), "{row}");
        let tests: Vec<_> = cells[3].split('`').skip(1).step_by(2).collect();
        assert!(!tests.is_empty() && tests.iter().all(|name| is_test(name)), "{row}");
    }
    assert_eq!(count, 25);
}

fn is_test(start: &str) -> bool {
    crate::ALL.iter().copied().flatten().any(|(name, ..)| name.starts_with(start))
}

/// `module::name` in docs/security.md is the start of a test's name, or a module of the library with tests.
fn tests_that_documents_name_exist() {
    let text = std::fs::read_to_string(source("docs/security.md")).unwrap();
    let words = text.split('`').skip(1).step_by(2).filter(|word| word.contains("::"));
    let mut count = 0;
    for word in words {
        let module = source("src").join(word.replace("::", "/")).with_extension("rs");
        let in_library = std::fs::read_to_string(module).is_ok_and(|text| text.contains("#[cfg(test)]"));
        assert!(in_library || is_test(word), "there is no test {word:?}");
        count += 1;
    }
    assert!(count > 20);
}
