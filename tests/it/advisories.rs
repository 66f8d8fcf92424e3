//! The crates in Cargo.lock, and the vulnerable versions in deny.toml. `make advisories` asks the database, for which it needs a network.

use crate::support::{read, source};

tests! {
    &[] => no_vulnerable_version;
}

/// A version that was published before a fix, and the crate.
struct Vulnerable {
    name: String,
    before: Version,
    reason: String,
}

/// The numbers of a version without pre-release or build.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version([u64; 3]);

impl Version {
    fn parse(text: &str) -> Self {
        let numbers = text.split(['-', '+']).next().unwrap().split('.');
        let numbers: Vec<u64> = numbers.map(|number| number.parse().unwrap()).collect();
        Self(numbers.try_into().unwrap())
    }
}

/// Returns what is in quotes after `key = ` in a line.
fn value<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let (_, after) = line.split_once(&format!("{key} = \""))?;
    after.split_once('"').map(|(value, _)| value)
}

/// Reads `deny` of deny.toml: one entry for each line, whose crate has the form `name:<version`.
fn vulnerable() -> Vec<Vulnerable> {
    let text = read(source("deny.toml"));
    let mut found = Vec::new();
    for line in text.lines().filter(|line| line.contains("{ crate")) {
        let [package, reason] = ["crate", "reason"].map(|key| value(line, key).expect(line));
        let (name, version) = package.split_once(":<").expect(line);
        assert!(
            reason.contains("RUSTSEC-") || reason.contains("GHSA-"),
            "{line}"
        );
        found.push(Vulnerable {
            name: name.to_owned(),
            before: Version::parse(version),
            reason: reason.to_owned(),
        });
    }
    assert!(found.len() > 10, "{text}");
    found
}

/// Returns the vulnerable packages of a Cargo.lock.
fn vulnerable_in(lock: &str, known: &[Vulnerable]) -> Vec<String> {
    let mut found = Vec::new();
    let mut packages = 0;
    for package in lock.split("[[package]]").skip(1) {
        let [name, version] = ["name", "version"].map(|key| value(package, key).expect(package));
        packages += 1;
        for vulnerable in known {
            if vulnerable.name == name && Version::parse(version) < vulnerable.before {
                found.push(format!("{name} {version}: {}", vulnerable.reason));
            }
        }
    }
    assert!(packages > 0, "{lock}");
    found
}

fn no_vulnerable_version() {
    let known = vulnerable();
    for file in ["Cargo.lock", "tests/fuzz/Cargo.lock"] {
        let lock = read(source(file));
        assert_eq!(vulnerable_in(&lock, &known), [""; 0], "{file}");
    }
    // The comparison finds an older version.
    let old = "[[package]]\nname = \"rustls\"\nversion = \"0.23.9\"\n";
    assert_eq!(
        vulnerable_in(old, &known),
        ["rustls 0.23.9: RUSTSEC-2026-0285"]
    );
}
