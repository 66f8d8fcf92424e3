//! The licenses of the code from other projects in each program: the License tags, the bills of materials and the notices of the packages
//! name the crates that are really linked into it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::built;
use crate::support::{Need, run, sh, source};

tests! {
    &[Need::Cargo] => lists_name_what_cargo_links, license_tags_cover_the_crates, bills_of_materials_are_complete, notices_are_complete;
    &[Need::Release, Need::Program("nm")] => programs_contain_only_listed_crates;
}

const HOOK: &str = "oci-nvidia-hook";
const COMPAT: &str = "oci-nvidia-hook-compat";
const PLUGIN: &str = "oci-nvidia-kubelet-plugin";
const PODMAN: &str = "oci-nvidia-hook-podman";
/// The packages with a program
const PROGRAMS: [&str; 3] = [HOOK, COMPAT, PLUGIN];

/// A crate of another project.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Crate {
    name: String,
    version: String,
}

fn script(name: &str, arguments: &[&str]) -> String {
    let mut script = Command::new(source("packaging").join(name));
    run(script.args(arguments).env("CARGO", env!("CARGO"))).ok()
}

/// Returns the crates that `packaging/linked-crates` lists for these targets, with their licenses.
fn listed(package: &str, targets: &[&str]) -> BTreeMap<Crate, String> {
    let mut crates = BTreeMap::new();
    for line in script("linked-crates", &[&[package], targets].concat()).lines() {
        let columns: Vec<_> = line.split('\t').collect();
        let [name, version, license] = columns[..] else {
            panic!("{line}")
        };
        let of = Crate {
            name: name.to_owned(),
            version: version.to_owned(),
        };
        crates.insert(of, license.to_owned());
    }
    crates
}

/// cargo's own plan of a release build names each unit that it compiles, and what it passes to the linker.
fn lists_name_what_cargo_links() {
    for target in ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"] {
        for package in PROGRAMS {
            let found: BTreeSet<_> = listed(package, &[target]).into_keys().collect();
            assert_eq!(found, linked_units(package, target), "{package} {target}");
        }
    }
}

fn linked_units(package: &str, target: &str) -> BTreeSet<Crate> {
    let mut build = Command::new(env!("CARGO"));
    build
        .args(["build", "--release", "--locked", "--target", target])
        .args(["--package", package, "-Z", "unstable-options"])
        .arg("--unit-graph")
        .current_dir(source(""))
        // The option is for nightly compilers.
        .env("RUSTC_BOOTSTRAP", "1")
        .env_remove("RUSTFLAGS");
    if package == HOOK {
        build.args(["--features", "lean"]);
    }
    let graph: Value = serde_json::from_str(&run(&mut build).ok()).unwrap();
    let units = graph["units"].as_array().unwrap();
    let index = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let mut open: Vec<usize> = graph["roots"]
        .as_array()
        .unwrap()
        .iter()
        .map(index)
        .collect();
    let (mut seen, mut crates) = (BTreeSet::new(), BTreeSet::new());
    while let Some(at) = open.pop() {
        let unit = &units[at];
        let kind = unit["target"]["kind"][0].as_str().unwrap();
        // These run in the compiler or before it.
        if kind == "proc-macro" || kind == "custom-build" || !seen.insert(at) {
            continue;
        }
        open.extend(
            unit["dependencies"]
                .as_array()
                .unwrap()
                .iter()
                .map(|unit| index(&unit["index"])),
        );
        let id = unit["pkg_id"].as_str().unwrap();
        if let Some((_, id)) = id
            .strip_prefix("registry+")
            .and_then(|id| id.split_once('#'))
        {
            let (name, version) = id.split_once('@').unwrap();
            crates.insert(Crate {
                name: name.to_owned(),
                version: version.to_owned(),
            });
        }
    }
    crates
}

/// A compiled program contains the paths of source files, in its debug information and in the messages of panics.
fn programs_contain_only_listed_crates() {
    let programs = [(HOOK, built::release()), (COMPAT, built::compat_release())];
    for (package, program) in programs {
        let listed: BTreeSet<_> = listed(package, &[])
            .into_keys()
            .map(|of| format!("{}-{}", of.name, of.version))
            .collect();
        let found = crates_in(program);
        assert!(found.len() > 20, "{package}: {found:?}");
        let missing: Vec<_> = found.difference(&listed).collect();
        assert!(missing.is_empty(), "{package} contains {missing:?}");
        // A static program contains the C library; in others, the name has a version.
        let symbols = run(Command::new("nm").arg(program)).ok();
        let is_static = symbols
            .lines()
            .any(|line| line.to_lowercase().ends_with(" t __libc_start_main"));
        assert_eq!(is_static, package == COMPAT);
        assert_eq!(
            is_static,
            script("sbom", &[package]).contains("\"glibc\""),
            "{package}"
        );
    }
}

/// Returns the directories of crates, such as `nix-0.31.3`, whose files the program names.
fn crates_in(program: &Path) -> BTreeSet<String> {
    const REGISTRY: &[u8] = b"/registry/src/";
    let bytes = std::fs::read(program).unwrap();
    let mut crates = BTreeSet::new();
    for (at, window) in bytes.windows(REGISTRY.len()).enumerate() {
        if window != REGISTRY {
            continue;
        }
        let rest = &bytes[at + REGISTRY.len()..];
        // The index, then the crate
        if let Some(name) = rest.split(|byte| *byte == b'/').nth(1) {
            let name: Vec<u8> = name
                .iter()
                .copied()
                .take_while(u8::is_ascii_graphic)
                .collect();
            crates.insert(String::from_utf8(name).unwrap());
        }
    }
    crates
}

/// Returns the terms of an expression, each with its alternatives in order.
fn terms(expression: &str) -> BTreeSet<String> {
    let mut terms = BTreeSet::new();
    for term in expression.split(" AND ") {
        let mut alternatives: Vec<_> = term.trim_matches(['(', ')']).split(" OR ").collect();
        alternatives.sort_unstable();
        terms.insert(alternatives.join(" OR "));
    }
    terms
}

fn license_tags_cover_the_crates() {
    let spec = std::fs::read_to_string(source("packaging/rpm.spec")).unwrap();
    for package in PROGRAMS.into_iter().chain([PODMAN]) {
        let part = match package {
            HOOK => spec.as_str(),
            PLUGIN => spec.split_once("%package -n %{plugin}\n").unwrap().1,
            _ => {
                let name = package.rsplit('-').next().unwrap();
                spec.split_once(&format!("%package {name}\n")).unwrap().1
            }
        };
        let tag = part
            .lines()
            .find_map(|line| line.strip_prefix("License:"))
            .unwrap()
            .trim();
        let mut expected = terms("Apache-2.0");
        for license in listed(package, &[]).values() {
            expected.extend(terms(license));
        }
        if package == COMPAT {
            expected.extend(terms("LGPL-2.1-or-later"));
        }
        assert_eq!(terms(tag), expected, "{package}: {tag}");
        // An alternative without parentheses would be another license.
        for term in tag.split(" AND ") {
            assert_eq!(
                term.contains(" OR "),
                term.starts_with('(') && term.ends_with(')'),
                "{term}"
            );
        }
    }
}

fn bills_of_materials_are_complete() {
    for package in PROGRAMS {
        let bill: Value = serde_json::from_str(&script("sbom", &[package])).unwrap();
        assert_eq!(bill["metadata"]["component"]["name"], package);
        let mut found = BTreeMap::new();
        let mut others = BTreeSet::new();
        for component in bill["components"].as_array().unwrap() {
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            let name = text(&component["name"]);
            let version = text(&component["version"]);
            if component["purl"].is_null() {
                others.insert(name);
                continue;
            }
            assert_eq!(component["purl"], format!("pkg:cargo/{name}@{version}"));
            assert_eq!(
                component["hashes"][0]["content"].as_str().unwrap().len(),
                64,
                "{component}"
            );
            found.insert(
                Crate { name, version },
                text(&component["licenses"][0]["expression"]),
            );
        }
        assert_eq!(found, listed(package, &[]));
        let c_library = ["glibc", "rust-std"];
        let expected = if package == COMPAT {
            &c_library[..]
        } else {
            &c_library[1..]
        };
        assert_eq!(
            others.iter().map(String::as_str).collect::<Vec<_>>(),
            expected,
            "{package}"
        );
    }
    let bill: Value = serde_json::from_str(&script("sbom", &[PODMAN])).unwrap();
    assert_eq!(
        bill["components"],
        Value::Array(Vec::new()),
        "{PODMAN} has no program"
    );
}

/// Each line with a copyright in the license files of a linked crate is in the notices, except for lines of the text of Apache-2.0.
fn notices_are_complete() {
    let sources = crate_sources();
    for package in PROGRAMS {
        let notices = script("notices", &[package]);
        let lines: BTreeSet<&str> = notices.lines().map(str::trim).collect();
        let mut compared = 0;
        for of in listed(package, &[]).keys() {
            assert!(
                lines
                    .iter()
                    .any(|line| line.starts_with(&format!("{} {}: ", of.name, of.version))),
                "{of:?}"
            );
            for line in copyright_lines(&sources[of]) {
                assert!(lines.contains(line.as_str()), "{package}, {of:?}: {line}");
                compared += 1;
            }
        }
        assert!(compared > 30, "{package}: {compared}");
        assert_eq!(
            notices.contains("GNU LESSER GENERAL PUBLIC LICENSE"),
            package == COMPAT
        );
        assert_eq!(
            notices.contains("* subtle "),
            package == PLUGIN,
            "a crate with the license BSD-3-Clause"
        );
    }
}

/// Returns the directories of all crates in Cargo.lock.
fn crate_sources() -> BTreeMap<Crate, PathBuf> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["metadata", "--locked", "--format-version", "1"])
        .current_dir(source(""));
    let metadata: Value = serde_json::from_str(&run(&mut cargo).ok()).unwrap();
    let mut sources = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let text = |key: &str| package[key].as_str().unwrap().to_owned();
        let of = Crate {
            name: text("name"),
            version: text("version"),
        };
        sources.insert(of, Path::new(&text("manifest_path")).with_file_name(""));
    }
    sources
}

fn copyright_lines(dir: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let files = sh(&format!(
        "find '{}' -maxdepth 1 -type f -iname '*licen[cs]e*'",
        dir.display()
    ))
    .ok();
    for file in files.lines() {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        if text.contains("TERMS AND CONDITIONS FOR USE") {
            continue;
        }
        for line in text.lines().map(str::trim) {
            if line.starts_with("Copyright ") {
                lines.push(line.to_owned());
            }
        }
    }
    lines
}
