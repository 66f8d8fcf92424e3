//! Checks the order of the modules. Cargo checks the order of the crates. `cargo test --test it -- architecture:: --nocapture` prints the
//! rooms of the hook, and the arrows between them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use crate::built;
use crate::support::{Need, run, source};

tests! {
    &[] => modules_have_an_order, no_program_prints_with_a_panic, no_two_files_use_each_other,
        files_of_containers_are_opened_with_a_guard;
    &[Need::Cargo] => the_hook_has_no_grpc;
    STATIC => the_hook_loads_nothing;
}

const STATIC: &[Need] = &[Need::Release, Need::StaticLibc, Need::Program("readelf")];

/// The top-level modules that each top-level module of a crate uses.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// No two modules of a crate use each other, directly or through others.
fn modules_have_an_order() {
    for dir in CRATES {
        let uses = uses_of(&source(dir));
        assert!(uses.len() > 1, "{dir}: {uses:?}");
        assert_eq!(circle(&uses), None, "{dir}");
    }
    let uses = |pairs: &[(&str, &str)]| {
        let mut uses = Uses::new();
        for (a, b) in pairs {
            let used = uses.entry((*a).to_owned()).or_default();
            used.insert((*b).to_owned());
        }
        uses
    };
    assert_eq!(circle(&uses(&[("a", "b"), ("a", "c"), ("b", "c")])), None);
    let found = circle(&uses(&[("a", "b"), ("b", "c"), ("c", "b")]));
    assert_eq!(found, Some(vec!["b".to_owned(), "c".to_owned()]));
}

/// `println!` and `eprintln!` panic if the stream is full or closed, and a panic of the hook stops the container. clippy denies them,
/// and no source file of a program permits them. `forbid` would be an error in the code that clap derives.
fn no_program_prints_with_a_panic() {
    for root in CRATES {
        for (path, text) in super::docs::texts(&source(root), "rs") {
            for lint in ["print_std", "dbg_macro", "restriction"] {
                let permission = format!("clippy::{lint}");
                assert!(!text.contains(&permission), "{path:?}: {permission}");
            }
        }
    }
}

/// The crates with more than one module.
const CRATES: [&str; 12] = [
    "crates/base/src",
    "crates/cdi/src",
    "crates/command-line/src",
    "crates/compat/src",
    "crates/engines/src",
    "crates/mps/src",
    "crates/nvidia/src",
    "crates/nvml/src",
    "crates/plugin-api/src",
    "crates/records/src",
    "crates/kubelet-plugin/src",
    "src",
];

/// Two files that use each other are one subject in two places. A module and its submodules may: a type is defined where all of them
/// see it.
fn no_two_files_use_each_other() {
    for root in CRATES {
        let uses = uses_of_files(&source(root));
        for (file, used) in &uses {
            for other in used {
                let is_circle = uses.get(other).is_some_and(|used| used.contains(file));
                assert!(!is_circle, "{root}: {file:?} and {other:?}");
            }
        }
    }
}

/// A file by its path in the crate: `["cli", "why"]`.
type Module = Vec<String>;

/// The files that each file of a crate uses, by `crate::…` and `super::…`, without those above and below it.
fn uses_of_files(root: &Path) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut files = BTreeMap::new();
    for (path, text) in super::docs::texts(root, "rs") {
        if !path.ends_with("tests.rs") {
            let module = module_of(path.strip_prefix(root).unwrap());
            files.insert(module, code_of(&text));
        }
    }
    let mut uses = BTreeMap::new();
    for (file, code) in &files {
        let above = file.split_last().map_or(&[][..], |(_, above)| above);
        let mut used = BTreeSet::new();
        for (word, from) in [("crate::", &[][..]), ("super::", above)] {
            for path in code.split(word).skip(1).flat_map(expand) {
                used.insert(target(&files, from.to_vec(), &path));
            }
        }
        used.retain(|other| !other.starts_with(file) && !file.starts_with(other));
        uses.insert(file.clone(), used);
    }
    uses
}

fn module_of(path: &Path) -> Module {
    let names = path.with_extension("");
    let names = names.iter().map(|name| name.to_string_lossy().into_owned());
    names
        .filter(|name| !matches!(name.as_str(), "mod" | "lib" | "main"))
        .collect()
}

/// The longest beginning of a path below a module that is a file.
fn target(files: &BTreeMap<Module, String>, mut module: Module, path: &[String]) -> Module {
    for name in path {
        module.push(name.clone());
        if !files.contains_key(&module) {
            module.pop();
            break;
        }
    }
    module
}

/// The paths in `a::{b, c::d}`, as words.
fn expand(text: &str) -> Vec<Vec<String>> {
    let mut path = Vec::new();
    let mut rest = text;
    loop {
        if rest.starts_with('{') {
            let below = names_in_braces(rest)
                .into_iter()
                .flat_map(|part| expand(&part));
            return below.map(|below| [path.clone(), below].concat()).collect();
        }
        let end = rest
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(rest.len());
        path.push(rest[..end].to_owned());
        match rest[end..].strip_prefix("::") {
            Some(more) => rest = more,
            None => return vec![path],
        }
    }
}

/// The parts of `{a, b::{c, d}}…`.
fn names_in_braces(list: &str) -> Vec<String> {
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for c in list.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => parts.push(String::new()),
            _ => {}
        }
        if depth == 0 {
            break;
        }
        let is_bracket = matches!(c, '{' | ',') && depth == 1;
        if !is_bracket {
            parts.last_mut().unwrap().push(c);
        }
    }
    parts
        .iter()
        .map(|part| part.trim().to_owned())
        .filter(|part| !part.is_empty())
        .collect()
}

/// The code without tests and comments.
fn code_of(text: &str) -> String {
    let code = text.split("#[cfg(test)]").next().unwrap().lines();
    code.map(|line| line.split("//").next().unwrap())
        .collect::<Vec<_>>()
        .join("\n")
}

/// Returns the crates in the program of this package, one a line.
fn crates(package: &str) -> String {
    let mut tree = Command::new(env!("CARGO"));
    tree.args([
        "tree",
        "--locked",
        "--edges",
        "normal",
        "--prefix",
        "none",
        "--package",
        package,
    ]);
    run(tree.current_dir(source(""))).ok()
}

/// Variables of a hostile image reach the hook. It must have neither a dynamic linker, which interprets them, nor one of its own.
/// `packaging/check-programs` refuses the linker of the system.
fn the_hook_loads_nothing() {
    let (hook, nvml) = (crates("oci-nvidia-hook"), crates("oci-nvidia-nvml"));
    assert!(
        !hook.contains("libloading v") && nvml.contains("libloading v"),
        "{hook}"
    );
    let check = |program: &Path| run(Command::new(source("packaging/check-programs")).arg(program));
    check(built::release()).ok();
    let says = check(built::nvml_release()).failed(1);
    assert!(says.contains("is not static"), "{says}");
    // The functions that load libraries for the names of users and hosts, and for character sets. glibc 2.41 links setlocale into
    // each static program; only its callers read files, and hostile::environment has a program that would.
    let symbols = run(Command::new("readelf")
        .args(["--wide", "--symbols"])
        .arg(built::release()))
    .ok();
    // std contains getpwuid_r for a process without HOME, and completion, which alone asks for the directory, sets it.
    for name in ["getpwnam", "getgrnam", "getaddrinfo", "iconv_open"] {
        let is_there = symbols
            .lines()
            .any(|line| line.split_whitespace().any(|word| word == name));
        assert!(!is_there, "{name}");
    }
}

/// A container chooses where its paths lead: to a device, to a file of the kernel, to a FUSE file system. `Root` opens its paths with
/// `O_PATH`, and `Root::open_stored` for reading. The modules that handle containers open a file in no other way, except in /proc.
fn files_of_containers_are_opened_with_a_guard() {
    const READS: [&str; 8] = [
        "File::open(",
        "fs::read(",
        "read_to_string(",
        "read_dir(",
        "OFlags::RDONLY",
        "OpenOptions",
        "open_tree(",
        "fs::open(",
    ];
    const IN_PROC: [(&str, &str); 2] = [
        ("find.rs", "std::fs::read_dir(proc)"), // finds the processes of a container
        ("inspect.rs", "File::open(self.path(\"environ\"))"),
    ];
    for dir in ["src/inject", "src/doctor/container"] {
        for (path, text) in super::docs::texts(&source(dir), "rs") {
            let code = code_of(&text);
            let name = path.file_name().unwrap().to_str().unwrap();
            for line in code
                .lines()
                .filter(|line| READS.iter().any(|read| line.contains(read)))
            {
                assert!(
                    IN_PROC
                        .iter()
                        .any(|(file, known)| *file == name && line.contains(known)),
                    "{path:?}: {line}"
                );
            }
            for function in code
                .split("fn ")
                .filter(|function| function.contains("openat("))
            {
                let is_guarded =
                    function.contains("OFlags::PATH") || function.contains("OFlags::CREATE");
                assert!(is_guarded, "{path:?}: {function}");
            }
        }
    }
}

/// What the device plugin needs is in no build of the hook.
fn the_hook_has_no_grpc() {
    let (hook, plugin) = (
        crates("oci-nvidia-hook"),
        crates("oci-nvidia-kubelet-plugin"),
    );
    for name in ["tokio", "tonic", "prost", "h2", "hyper"] {
        let line = format!("{name} v");
        assert!(
            !hook.lines().any(|found| found.starts_with(&line)),
            "{hook}"
        );
        assert!(
            plugin.lines().any(|found| found.starts_with(&line)),
            "{plugin}"
        );
    }
}

/// The top-level modules that each top-level module of a crate uses.
fn uses_of(root: &Path) -> Uses {
    let mut uses = Uses::new();
    for (file, used) in uses_of_files(root) {
        let Some(module) = file.first() else { continue };
        let found = uses.entry(module.clone()).or_default();
        found.extend(used.iter().filter_map(|other| other.first()).cloned());
        found.remove(module);
    }
    uses
}

/// Returns the modules that remain after all modules that use no remaining one, or that no remaining one uses, have been removed.
fn circle(uses: &Uses) -> Option<Vec<String>> {
    let mut left = uses.clone();
    loop {
        let is_end = |name: &String| {
            let uses_one = left[name].iter().any(|used| left.contains_key(used));
            !uses_one || !left.values().any(|uses| uses.contains(name))
        };
        let Some(end) = left.keys().find(|name| is_end(name)).cloned() else {
            break;
        };
        left.remove(&end);
    }
    (!left.is_empty()).then(|| left.into_keys().collect())
}
