//! Checks the order of the modules. Cargo checks that of the crates.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use crate::Test;
use crate::support::{Need, run, source};

pub const TESTS: &[Test] = &[
    ("architecture::modules_have_an_order", &[], modules_have_an_order),
    ("architecture::no_program_prints_with_a_panic", &[], no_program_prints_with_a_panic),
    ("architecture::the_hook_has_no_grpc", &[Need::Cargo], the_hook_has_no_grpc),
];

/// The top-level modules that each top-level module of a crate uses, by `crate::NAME`.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// No two modules of a crate use each other, directly or through others.
fn modules_have_an_order() {
    let crates = [
        ("crates/base/src", 5),
        ("crates/cdi/src", 5),
        ("crates/engines/src", 10),
        ("crates/nvidia/src", 10),
        ("crates/kubelet-plugin/src", 10),
        ("src", 8),
    ];
    for (dir, modules) in crates {
        let uses = uses_of(&source(dir));
        assert!(uses.len() >= modules, "{dir}: {uses:?}");
        assert_eq!(circle(&uses), None, "{dir}");
    }
    let knot = |text: &[(&str, &str)]| {
        let mut uses = Uses::new();
        for (a, b) in text {
            uses.entry((*a).to_owned()).or_default().insert((*b).to_owned());
        }
        circle(&uses)
    };
    assert_eq!(knot(&[("a", "b"), ("a", "c"), ("b", "c")]), None);
    assert_eq!(knot(&[("a", "b"), ("b", "c"), ("c", "b")]), Some(vec!["b".to_owned(), "c".to_owned()]));
}

/// `println!` and `eprintln!` panic if the stream is full or closed, and a panic of the hook stops the container. clippy denies them,
/// and no source file of a program permits them. `forbid` would be an error in the code that clap derives.
fn no_program_prints_with_a_panic() {
    let lints = std::fs::read_to_string(source("Cargo.toml")).unwrap();
    for lint in ["print_stdout", "print_stderr", "dbg_macro"] {
        assert!(lints.lines().any(|line| line.starts_with(&format!("{lint} = \"deny\""))), "{lint}");
    }
    let crates = std::fs::read_dir(source("crates")).unwrap().map(|entry| entry.unwrap().path());
    let crates: Vec<_> = crates.filter(|dir| dir.join("Cargo.toml").is_file()).collect();
    for dir in &crates {
        let manifest = std::fs::read_to_string(dir.join("Cargo.toml")).unwrap();
        assert!(manifest.contains("[lints]\nworkspace = true"), "{dir:?}");
    }
    let sources = crates.iter().map(|dir| dir.join("src")).chain([source("src")]);
    let files: Vec<_> = sources.flat_map(|dir| super::docs::texts(&dir, "rs")).collect();
    assert!(files.len() > 100);
    for (path, text) in files {
        for permission in ["clippy::print_std", "clippy::dbg_macro", "clippy::restriction"] {
            assert!(!text.contains(permission), "{path:?} permits {permission}");
        }
    }
}

/// What the device plugin needs is in no build of the hook.
fn the_hook_has_no_grpc() {
    let crates = |package: &str| {
        let mut tree = Command::new(env!("CARGO"));
        tree.args(["tree", "--locked", "--edges", "normal", "--prefix", "none", "--package", package]);
        run(tree.current_dir(source(""))).ok()
    };
    let (hook, plugin) = (crates("oci-nvidia-hook"), crates("oci-nvidia-kubelet-plugin"));
    for name in ["tokio", "tonic", "prost", "h2", "hyper"] {
        let line = format!("{name} v");
        assert!(!hook.lines().any(|found| found.starts_with(&line)), "{hook}");
        assert!(plugin.lines().any(|found| found.starts_with(&line)), "{plugin}");
    }
}

fn uses_of(root: &Path) -> Uses {
    let mut uses = Uses::new();
    for (path, text) in super::docs::texts(root, "rs") {
        let below = path.strip_prefix(root).unwrap();
        let module = below.iter().next().unwrap().to_string_lossy().trim_end_matches(".rs").to_owned();
        if matches!(module.as_str(), "lib" | "main") || path.ends_with("tests.rs") {
            continue;
        }
        let code = text.split("#[cfg(test)]").next().unwrap().lines();
        let code = code.map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n");
        let found = uses.entry(module.clone()).or_default();
        found.extend(code.split("crate::").skip(1).flat_map(names).filter(|name| *name != module));
    }
    uses
}

/// `name::…` and `{name, name::…}`.
fn names(rest: &str) -> Vec<String> {
    let word = |text: &str| text.trim().split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap().to_owned();
    let Some(list) = rest.strip_prefix('{') else { return vec![word(rest)] };
    let mut depth = 1;
    let mut top = String::new();
    for c in list.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ if depth == 1 => top.push(c),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    top.split(',').map(word).filter(|name| !name.is_empty()).collect()
}

/// Returns the modules that remain after all modules that use no remaining one have been removed, repeatedly.
fn circle(uses: &Uses) -> Option<Vec<String>> {
    let mut left = uses.clone();
    loop {
        let is_free = |name: &String, left: &Uses| !left[name].iter().any(|used| left.contains_key(used));
        let Some(free) = left.keys().find(|name| is_free(name, &left)).cloned() else { break };
        left.remove(&free);
    }
    // A module that only leads to a cycle is not part of it.
    while let Some(unused) = left.keys().find(|name| !left.values().any(|uses| uses.contains(*name))).cloned() {
        left.remove(&unused);
    }
    (!left.is_empty()).then(|| left.into_keys().collect())
}
