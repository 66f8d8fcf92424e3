//! Compares the documents with the code. `readme.rs` runs the commands of README.md.

use std::path::{Path, PathBuf};
use std::process::Command;

use base::report::without_markdown;
use findings::catalog;
use nvidia_host::config::schema::{self, Meaning};

use crate::support::{HOOK, run, source};

tests! {
    &[] => findings_are_those_of_the_catalog, each_finding_is_explained,
        tests_that_documents_name_exist, files_and_links_are_there, command_lines_are_understood,
        keys_of_config_toml_are_known, every_key_is_documented, manifests_are_yaml, pages_are_short_and_indexed, cells_are_short,
        lines_are_short;
}

/// Returns the files below a directory with this extension, and their texts.
pub fn texts(dir: &Path, extension: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(texts(&path, extension));
        } else if path.extension().is_some_and(|kind| kind == extension) {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push((path, text));
        }
    }
    found
}

/// Returns all pages for people except for the man pages.
pub fn pages() -> Vec<(PathBuf, String)> {
    let mut found = texts(&source("docs"), "md");
    for name in [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
    ] {
        // The copy of the tree for a plain user lacks some of these.
        if let Ok(text) = std::fs::read_to_string(source(name)) {
            found.push((source(name), text));
        }
    }
    found.sort();
    found
}

/// Returns the text of each block between ``` of this kind.
pub fn blocks<'a>(text: &'a str, kind: &str) -> Vec<&'a str> {
    let start = format!("\n```{kind}\n");
    text.split(&start)
        .skip(1)
        .map(|rest| rest.split("\n```").next().unwrap())
        .collect()
}

/// A comma or a colon without quotes gives a manifest another meaning, or makes it invalid.
fn manifests_are_yaml() {
    let parse = |text: &str| saphyr_parser::Parser::new_from_str(text).find_map(Result::err);
    assert!(parse("a: {b: x ? y : z: 1}").is_some() && parse("expression: a ? b : c").is_some());
    let mut seen = 0;
    for (path, text) in pages() {
        for block in blocks(&text, "yaml") {
            assert_eq!(parse(block), None, "{}: {block}", path.display());
            seen += 1;
        }
    }
    assert!(seen >= 2, "{seen} blocks");
    let manifests = texts(&source("deploy"), "yaml");
    for (path, text) in &manifests {
        assert_eq!(parse(text), None, "{}", path.display());
    }
    assert!(manifests.len() >= 6, "{} manifests", manifests.len());
}

/// The command lines of `sh` blocks, without comments.
pub fn command_lines(text: &str) -> Vec<&str> {
    let lines = blocks(text, "sh").into_iter().flat_map(str::lines);
    lines
        .map(|line| line.split(" #").next().unwrap().trim())
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect()
}

/// Returns the texts between single backticks outside of blocks.
fn quoted(text: &str) -> Vec<&str> {
    // Every second part is a block.
    text.split("```")
        .step_by(2)
        .flat_map(|part| part.split('`').skip(1).step_by(2))
        .collect()
}

pub const BEGIN: &str = "<!-- Generated from crates/findings/src/catalog.rs: UPDATE_GOLDEN=1 cargo test --test it -- docs::findings -->\n";
pub const END: &str = "<!-- End of the generated part -->\n";

/// The findings in docs/findings.md. Each has a heading, whose anchor `explain` prints.
fn entries_of_findings() -> String {
    let mut text = String::new();
    for kind in catalog::ALL {
        let texts = kind.texts();
        let see = match texts.see {
            "" => String::new(),
            page if page.ends_with(".md") => format!("- More: [{page}]({page})\n"),
            page => format!("- More: {page}\n"),
        };
        let (id, severity) = (kind.id(), kind.severity.name());
        text += &format!(
            "### {id}\n\n**{severity}: {}**\n\n- Why: {}\n- Fix: {}\n{see}\n",
            texts.title, texts.why, texts.fix
        );
    }
    text
}

/// A reader of a terminal or of a narrow window sees a cause and a fix as few lines. Details have a heading. Texts of engines, in the first
/// column, are complete.
fn cells_are_short() {
    let page = std::fs::read_to_string(source("docs/troubleshooting.md")).unwrap();
    let rows = page
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let mut seen = 0;
    for row in rows {
        for cell in row.split(" | ").skip(1) {
            assert!(cell.chars().count() <= 110, "{cell}");
            seen += 1;
        }
    }
    assert!(seen > 60, "{seen} cells");
}

/// The entries are generated. Only this test pins the words of the catalog.
fn findings_are_those_of_the_catalog() {
    let path = source("docs/findings.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (found, after) = rest.split_once(END).unwrap();
    let generated = entries_of_findings();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, [before, BEGIN, &generated, END, after].concat()).unwrap();
        return;
    }
    for (row, (found, expected)) in found.lines().zip(generated.lines()).enumerate() {
        assert_eq!(found, expected, "line {row} of the generated part");
    }
    assert_eq!(found.len(), generated.len());
    for kind in catalog::ALL {
        let see = kind.texts().see;
        assert!(
            !see.ends_with(".md") || source("docs").join(see).exists(),
            "{}: {see}",
            kind.id()
        );
    }
}

/// `explain` prints the page of each number, and has a hint for a number that does not exist.
fn each_finding_is_explained() {
    let explain = |words: &[&str]| run(Command::new(HOOK).arg("explain").args(words).env_clear());
    for kind in catalog::ALL {
        let text = explain(&[kind.id()]).ok();
        let texts = kind.texts();
        let parts = [
            kind.id(),
            kind.severity.name(),
            texts.title,
            texts.why,
            texts.fix,
            texts.see,
        ];
        assert!(
            parts
                .iter()
                .all(|part| text.contains(&without_markdown(part))),
            "{text}"
        );
        let anchor = text
            .lines()
            .find_map(|line| line.strip_prefix("see:"))
            .unwrap()
            .rsplit('/')
            .next()
            .unwrap()
            .trim();
        let (page, anchor) = anchor.split_once('#').unwrap();
        let page = std::fs::read_to_string(source("docs").join(page)).unwrap();
        assert!(
            page.contains(&format!("\n### {}\n", anchor.to_uppercase())),
            "{anchor}"
        );
    }
    let page = explain(&["ONH-030"]).ok();
    for number in ["30", "030", "ONH030", "onh-030", "Onh30", "ONH-30"] {
        assert_eq!(explain(&[number]).ok(), page, "{number}");
    }
    let json: serde_json::Value = serde_json::from_str(&explain(&["--json", "030"]).ok()).unwrap();
    let found = &json["findings"][0];
    assert_eq!(
        (&found["id"], &found["severity"]),
        (&"ONH-030".into(), &"error".into()),
        "{json}"
    );
    for (number, hint) in [
        (
            "ONH-999",
            "\"oci-nvidia-hook explain --list\" prints all numbers",
        ),
        (
            "39",
            "did you mean ONH-038? \"oci-nvidia-hook explain --list\" prints all numbers",
        ),
        (
            "onh-",
            "\"oci-nvidia-hook explain --list\" prints all numbers",
        ),
        (
            "web",
            "\"oci-nvidia-hook explain --list\" prints all numbers",
        ),
        ("", "\"oci-nvidia-hook explain --list\" prints all numbers"),
    ] {
        let stderr = explain(&[number]).failed(2);
        assert!(
            stderr.ends_with(&format!(
                "unknown number {number:?} (ONH-002)\nhint: {hint}\n"
            )),
            "{stderr}"
        );
    }
    let list = explain(&["--list"]).ok();
    assert_eq!(list.lines().count(), catalog::ALL.len());
    for (line, kind) in list.lines().zip(catalog::ALL) {
        assert!(
            line.starts_with(kind.id()) && line.ends_with(&without_markdown(kind.texts().title)),
            "{line}"
        );
    }
    for nothing in [&[][..], &["--list", "30"]] {
        assert!(
            explain(nothing).failed(2).contains("(ONH-002)\nhint: "),
            "{nothing:?}"
        );
    }
}

/// Whether the name of a test begins with this text.
pub fn is_test(start: &str) -> bool {
    crate::ALL
        .iter()
        .copied()
        .flatten()
        .any(|test| test.name().starts_with(start))
}

/// The directories that contain modules.
const SOURCES: [&str; 7] = [
    "src",
    "crates/base/src",
    "crates/cdi/src",
    "crates/engines/src",
    "crates/findings/src",
    "crates/kubelet-plugin/src",
    "crates/nvidia/src",
];

/// `module::name` is the start of a test's name, or a module of a library, which can follow the directory of its crate; in
/// docs/security.md, one with tests.
fn tests_that_documents_name_exist() {
    let mut count = 0;
    for (page, text) in pages() {
        let is_name = |word: &&str| {
            word.contains("::")
                && word
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c))
        };
        for word in quoted(&text).into_iter().filter(is_name) {
            let of_crate = word.replacen("::", "/src/", 1).replace("::", "/");
            let places = SOURCES
                .iter()
                .map(|dir| source(dir).join(word.replace("::", "/")));
            let module = places
                .chain([source("crates").join(of_crate)])
                .find_map(|path| {
                    [path.with_extension("rs"), path.join("mod.rs")]
                        .iter()
                        .find_map(|p| std::fs::read_to_string(p).ok())
                });
            let in_library = module.is_some_and(|text| {
                text.contains("#[cfg(test)]") || !page.ends_with("security.md")
            });
            assert!(
                in_library || is_test(word),
                "{}: there is no test {word:?}",
                page.display()
            );
            count += 1;
        }
    }
    assert!(count > 40, "{count}");
}

/// Returns the anchor that GitHub creates for a heading.
fn anchor(heading: &str) -> String {
    let kept = heading
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
        .collect::<String>();
    kept.replace(' ', "-")
}

/// Follows the links of a page to files and headings, and counts them.
fn links_of(page: &Path, text: &str) -> usize {
    let links = text
        .split("](")
        .skip(1)
        .map(|rest| rest.split(')').next().unwrap());
    let mut count = 0;
    for link in links.filter(|link| !link.starts_with("http")) {
        let (file, place) = link.split_once('#').unwrap_or((link, ""));
        let target = if file.is_empty() {
            page.to_owned()
        } else {
            page.parent().unwrap().join(file)
        };
        let there = std::fs::read_to_string(&target)
            .unwrap_or_else(|_| panic!("{}: {link}", page.display()));
        let headings = there.lines().filter(|line| line.starts_with('#'));
        let found = place.is_empty()
            || headings
                .map(|line| anchor(line.trim_start_matches('#')))
                .any(|at| at == place);
        assert!(found, "{}: {link}", page.display());
        count += 1;
    }
    count
}

/// The same for all pages of a package, in the directory where it installs them.
pub fn follow_links(dir: &Path) {
    let pages = texts(dir, "md");
    assert!(pages.len() > 10, "{}: {} pages", dir.display(), pages.len());
    let links: usize = pages.iter().map(|(page, text)| links_of(page, text)).sum();
    assert!(links > 30, "{links} links");
}

/// Links lead to existing files and headings, and quoted paths of this tree exist.
fn files_and_links_are_there() {
    let (mut links, mut paths) = (0, 0);
    for (page, text) in pages() {
        links += links_of(&page, &text);
        let tops = [
            "src/",
            "crates/",
            "tests/",
            "docs/",
            "packaging/",
            "config/",
            "hooks.d/",
            "benches/",
            ".ci/",
            ".github/",
        ];
        for path in quoted(&text)
            .into_iter()
            .filter(|word| tops.iter().any(|top| word.starts_with(top)))
        {
            let path = path.split(['*', ' ']).next().unwrap();
            let whole = source(path);
            let beginning = || {
                let (dir, name) = (
                    whole.parent().unwrap(),
                    whole.file_name().unwrap().to_string_lossy().into_owned(),
                );
                let mut entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
                entries.any(|entry| entry.file_name().to_string_lossy().starts_with(&name))
            };
            assert!(
                whole.exists() || beginning(),
                "{}: {path:?} is not there",
                page.display()
            );
            paths += 1;
        }
    }
    assert!(links > 40 && paths > 40, "{links} links, {paths} paths");
}

/// The program understands every command line in the documents, and rejects only an option that the test adds.
fn command_lines_are_understood() {
    let (dir, mut seen) = (crate::support::scratch(), std::collections::BTreeSet::new());
    for (page, text) in pages()
        .into_iter()
        .filter(|(page, _)| !page.ends_with("CHANGELOG.md"))
    {
        let lines = command_lines(&text).into_iter().chain(quoted(&text));
        for line in lines.filter(|line| line.starts_with("oci-nvidia-hook ")) {
            let words: Vec<_> = line
                .split([' ', '\n'])
                .take_while(|word| !matches!(*word, "<" | ">" | "|" | "2>"))
                .collect();
            if matches!(words[1..], ["--help" | "--version"]) {
                continue;
            }
            let ran = run(Command::new(HOOK)
                .args(&words[1..])
                .arg("--no-such-option")
                .current_dir(dir.path()));
            let found = format!("{}: {line:?}: {ran:?}", page.display());
            assert!(
                ran.code == Some(2) && ran.stderr.contains("--no-such-option"),
                "{found}"
            );
            seen.insert(words.join(" "));
        }
    }
    assert!(seen.len() > 15, "{seen:?}");
}

/// Every `toml` block is a valid config.toml.
fn keys_of_config_toml_are_known() {
    let mut seen = 0;
    for (page, text) in pages() {
        for block in blocks(&text, "toml") {
            let dir = crate::support::scratch();
            let config = dir.path().join("config.toml");
            std::fs::write(&config, block).unwrap();
            let spec = r#"{"root":{"path":"/"},"process":{"env":["NVIDIA_VISIBLE_DEVICES=all"]}}"#;
            let mut plan = Command::new(HOOK);
            plan.arg("--config").arg(&config).args([
                "plan",
                "-",
                "--request",
                "--stage",
                "precreate",
            ]);
            let ran = crate::support::run_with(&mut plan, spec.as_bytes());
            let said = format!("{}{}", ran.stdout, ran.stderr);
            assert!(
                !said.contains("ONH-005") && !said.contains("ONH-101"),
                "{}: {block}\n{said}",
                page.display()
            );
            assert_eq!(ran.code, Some(0), "{said}");
            seen += 1;
        }
    }
    assert!(seen >= 4, "{seen}");
}

/// Each key of the hook is in the table of docs/configuration.md, in config.toml and in its man page. The device plugin has such a test
/// for its own.
fn every_key_is_documented() {
    let read = |path: &str| std::fs::read_to_string(source(path)).unwrap();
    let (page, shipped, man) = (
        read("docs/configuration.md"),
        read("config/config.toml"),
        read("docs/man/oci-nvidia-hook.toml.5"),
    );
    let keys = page
        .split("\n## Keys\n")
        .nth(1)
        .unwrap()
        .split("\n## ")
        .next()
        .unwrap();
    let mut seen = 0;
    for key in schema::KEYS
        .iter()
        .filter(|key| !matches!(key.meaning, Meaning::Unused(_)))
    {
        let name = key.name.rsplit('.').next().unwrap();
        assert!(
            keys.contains(&format!("`{}`", key.name)),
            "docs/configuration.md: {}",
            key.name
        );
        assert!(
            shipped.contains(&format!("#{name} = ")),
            "config.toml: {}",
            key.name
        );
        // Without .TP, the key is in the paragraph of the key before it.
        assert!(
            man.contains(&format!("\n.TP\n.BR {name} ")),
            "man page: {}",
            key.name
        );
        seen += 1;
    }
    assert!(seen > 15, "{seen}");
}

/// There are at most twenty-seven pages of at most 205 lines, and an index of all of them. Only the entries of findings may make a page longer.
fn pages_are_short_and_indexed() {
    let lines = |name: &str| {
        std::fs::read_to_string(source(name))
            .unwrap()
            .lines()
            .count()
    };
    assert!(
        lines("README.md") <= 150,
        "README.md: {}",
        lines("README.md")
    );
    let index = std::fs::read_to_string(source("docs/README.md")).unwrap();
    let mut count = 0;
    for entry in std::fs::read_dir(source("docs")).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        if !name.ends_with(".md") || name == "README.md" {
            continue;
        }
        let more = match name.as_str() {
            "findings.md" => 8 * catalog::ALL.len(),
            // Its two tables are compared with the code.
            "architecture.md" => 45,
            _ => 0,
        };
        let length = lines(&format!("docs/{name}"));
        assert!(length <= 205 + more, "docs/{name}: {length} lines");
        assert!(
            index.contains(&format!("]({name})")),
            "docs/README.md does not list {name}"
        );
        count += 1;
    }
    assert!(count <= 27, "{count} pages");
}

/// Lines of text fit a terminal or a review next to another one. A row of a table cannot be wrapped, and findings.md is generated.
fn lines_are_short() {
    let mut seen = 0;
    for (path, text) in pages() {
        if path.ends_with("docs/findings.md") {
            continue;
        }
        for line in text.lines().filter(|line| !line.starts_with('|')) {
            assert!(line.chars().count() <= 140, "{path:?}: {line}");
            seen += 1;
        }
    }
    assert!(seen > 2000, "{seen}");
}

/// Returns the commands of install.md that remove the packages of this distribution, in their order.
pub fn removal_commands(distribution: &str) -> Vec<String> {
    let page = std::fs::read_to_string(source("docs/install.md")).unwrap();
    let start = format!("| {distribution} | ");
    let row = page
        .lines()
        .find_map(|line| line.strip_prefix(&start))
        .unwrap();
    let mut commands = Vec::new();
    for (at, part) in row.split('`').enumerate() {
        if at % 2 == 1 && part.contains(' ') {
            commands.push(part.to_owned());
        }
    }
    commands
}
