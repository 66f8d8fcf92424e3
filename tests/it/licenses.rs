//! The licenses of the code from other projects in each program: the License tags, the bills of materials and the notices of the packages
//! name the crates that cargo links into it.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

use crate::support::{Need, read, run, source};

tests! {
    &[Need::Cargo] => license_tags_cover_the_crates, bills_of_materials_are_complete, notices_are_complete;
}

/// The package with a static program
const STATIC: &str = "oci-nvidia-hook";
/// The packages with a program, and where their License tag is in the RPM spec
const PROGRAMS: [(&str, &str); 2] = [
    (STATIC, ""),
    ("oci-nvidia-kubelet-plugin", "%package -n %{plugin}\n"),
];

fn script(name: &str, package: &str) -> String {
    let mut script = Command::new(source("packaging").join(name));
    run(script.arg(package).env("CARGO", env!("CARGO"))).ok()
}

/// Returns the crates that `packaging/linked-crates` lists, as name and version, with their licenses.
fn listed(package: &str) -> BTreeMap<String, String> {
    let mut crates = BTreeMap::new();
    for line in script("linked-crates", package).lines() {
        let columns: Vec<_> = line.split('\t').collect();
        let [name, version, license] = columns[..] else {
            panic!("{line}")
        };
        crates.insert(format!("{name} {version}"), license.to_owned());
    }
    assert!(crates.len() > 20, "{crates:?}");
    crates
}

/// Returns the terms of an expression, each with its alternatives in order. Alternatives need parentheses among other terms.
fn terms(expression: &str) -> BTreeSet<String> {
    let mut terms = BTreeSet::new();
    for term in expression.split(" AND ") {
        let inner = term
            .strip_prefix('(')
            .and_then(|term| term.strip_suffix(')'));
        let mut alternatives: Vec<_> = inner.unwrap_or(term).split(" OR ").collect();
        let is_whole = term == expression;
        assert_eq!(
            inner.is_some() || is_whole,
            alternatives.len() > 1 || is_whole,
            "{expression}"
        );
        alternatives.sort_unstable();
        terms.insert(alternatives.join(" OR "));
    }
    terms
}

fn license_tags_cover_the_crates() {
    let spec = read(source("packaging/rpm.spec"));
    for (package, start) in PROGRAMS {
        let (_, part) = spec.split_once(start).unwrap();
        let mut tags = part
            .lines()
            .filter_map(|line| line.strip_prefix("License:"));
        let mut expected = terms("Apache-2.0");
        for license in listed(package).values() {
            expected.extend(terms(license));
        }
        if package == STATIC {
            expected.extend(terms("LGPL-2.1-or-later"));
        }
        assert_eq!(terms(tags.next().unwrap().trim()), expected, "{package}");
    }
}

/// A bill of materials has the crates with their checksums, and the C library of a static program.
fn bills_of_materials_are_complete() {
    for (package, _) in PROGRAMS {
        let bill: Value = serde_json::from_str(&script("sbom", package)).unwrap();
        let mut found = BTreeMap::new();
        let mut others = Vec::new();
        for component in bill["components"].as_array().unwrap() {
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            let name = text(&component["name"]);
            if component["purl"].is_null() {
                others.push(name);
                continue;
            }
            let hash = &component["hashes"][0]["content"];
            assert_eq!(text(hash).len(), 64, "{component}");
            let of = format!("{name} {}", text(&component["version"]));
            found.insert(of, text(&component["licenses"][0]["expression"]));
        }
        assert_eq!(found, listed(package));
        let expected = if package == STATIC {
            &["rust-std", "glibc"][..]
        } else {
            &["rust-std"]
        };
        assert_eq!(others, expected, "{package}");
    }
}

/// Each crate has an entry, and owns a text unless LICENSE has it.
fn notices_are_complete() {
    for (package, _) in PROGRAMS {
        let notices = script("notices", package);
        let mut owners = BTreeSet::new();
        for text in notices.split(&format!("\n{}\n", "-".repeat(70))).skip(1) {
            owners.extend(text.lines().map_while(|line| line.strip_prefix("* ")));
        }
        for (name, license) in listed(package) {
            assert!(
                notices.contains(&format!("\n{name}: {license}\n")),
                "{name}"
            );
            let has_text = owners.remove(name.as_str());
            assert!(has_text || license.contains("Apache-2.0"), "{name}");
        }
        owners.retain(|owner| !owner.starts_with("GNU C Library"));
        assert_eq!(owners, ["Rust's standard library"].into(), "{package}");
        let has_lgpl = notices.contains("GNU LESSER GENERAL PUBLIC LICENSE");
        assert_eq!(has_lgpl, package == STATIC);
    }
}
