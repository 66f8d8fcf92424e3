//! What the documents say, held against the code.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::Test;
use crate::support::source;

pub const TESTS: &[Test] = &[
    ("docs::every_finding_is_told_of", &[], every_finding_is_told_of),
    ("docs::tests_that_documents_name_exist", &[], tests_that_documents_name_exist),
];

/// The ids in a text: `ONH-` and three digits.
fn ids(text: &str) -> Vec<String> {
    let digits = |rest: &&str| rest.len() >= 3 && rest[..3].bytes().all(|byte| byte.is_ascii_digit());
    text.split("ONH-").skip(1).filter(digits).map(|rest| format!("ONH-{}", &rest[..3])).collect()
}

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

fn every_finding_is_told_of() {
    let documented = ids(&std::fs::read_to_string(source("docs/findings.md")).unwrap());
    let mut places = BTreeMap::new();
    for text in texts(&source("src"), "rs") {
        // What tests expect is no finding of its own.
        let code = text.split("#[cfg(test)]").next().unwrap();
        ids(code).into_iter().for_each(|id| *places.entry(id).or_insert(0) += 1);
    }
    let made: BTreeSet<_> = places.keys().cloned().collect();
    assert!(made.len() > 20, "{made:?}");
    assert_eq!(documented.iter().cloned().collect::<BTreeSet<_>>(), made);
    assert_eq!(documented.len(), made.len(), "each is told of once");
    let twice: Vec<_> = places.iter().filter(|(_, count)| **count != 1).collect();
    assert!(twice.is_empty(), "one number, one meaning: {twice:?}");
}

/// `module::name` in docs/security.md is the start of a test's name, or a module of the library with tests.
fn tests_that_documents_name_exist() {
    let text = std::fs::read_to_string(source("docs/security.md")).unwrap();
    let words = text.split('`').skip(1).step_by(2).filter(|word| word.contains("::"));
    let mut count = 0;
    for word in words {
        let module = source("src").join(word.replace("::", "/")).with_extension("rs");
        let in_library = std::fs::read_to_string(module).is_ok_and(|text| text.contains("#[cfg(test)]"));
        let is_test = crate::ALL.iter().copied().flatten().any(|(name, ..)| name.starts_with(word));
        assert!(in_library || is_test, "there is no test {word:?}");
        count += 1;
    }
    assert!(count > 20);
}
