//! Compares the documents with the code. `readme.rs` runs the commands of README.md.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use findings::catalog;
use nvidia_host::config::schema::{self, Meaning};

use crate::hints;
use crate::support::{HOOK, read, run_with, scratch, source, write_file};

tests! {
    &[] => findings_are_those_of_the_catalog, findings_link_to_their_subjects, tests_that_documents_name_exist, files_and_links_are_there, command_lines_are_understood,
        keys_of_config_toml_are_known, every_key_is_documented, the_man_page_has_the_texts_of_config_toml, manifests_are_yaml;
}

/// Returns the files below a directory with this extension or name, and their texts.
pub fn texts(dir: &Path, kind: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(texts(&path, kind));
        } else if path.extension().or_else(|| path.file_name()).unwrap() == kind {
            let text = read(&path);
            found.push((path, text));
        }
    }
    found
}

/// Returns all pages for people except for the man pages.
pub fn pages() -> Vec<(PathBuf, String)> {
    let mut found = texts(&source("docs"), "md");
    for name in ["README", "CONTRIBUTING", "SECURITY", "CHANGELOG"] {
        let path = source(name).with_extension("md");
        let text = read(&path);
        found.push((path, text));
    }
    found
}

/// Returns the text of each block between ``` of this kind.
pub fn blocks<'a>(text: &'a str, kind: &str) -> Vec<&'a str> {
    let start = format!("\n```{kind}\n");
    let blocks = text.split(&start).skip(1);
    blocks
        .map(|rest| rest.split("\n```").next().unwrap())
        .collect()
}

/// A comma or a colon without quotes gives a manifest another meaning, or makes it invalid.
fn manifests_are_yaml() {
    let parse = |text: &str| saphyr_parser::Parser::new_from_str(text).find_map(Result::err);
    assert!(parse("a: {b: x ? y : z: 1}").is_some());
    let mut manifests = texts(&source("deploy"), "yaml");
    for (path, text) in pages() {
        for block in blocks(&text, "yaml") {
            manifests.push((path.clone(), block.to_owned()));
        }
    }
    assert!(manifests.len() >= 8, "{} manifests", manifests.len());
    for (path, text) in manifests {
        assert_eq!(parse(&text), None, "{path:?}: {text}");
    }
}

/// The command lines of `sh` blocks, without comments.
pub fn command_lines(text: &str) -> Vec<&str> {
    let mut lines = Vec::new();
    for line in blocks(text, "sh").into_iter().flat_map(str::lines) {
        let line = line.split(" #").next().unwrap().trim();
        if !line.is_empty() && !line.starts_with('#') {
            lines.push(line);
        }
    }
    lines
}

/// Returns the texts between single backticks outside of blocks.
fn quoted(text: &str) -> Vec<&str> {
    // Every second part is a block.
    let prose = text.split("```").step_by(2);
    prose
        .flat_map(|part| part.split('`').skip(1).step_by(2))
        .collect()
}

pub const BEGIN: &str = "<!-- Generated from crates/findings/src/catalog.rs: UPDATE_GOLDEN=1 cargo test --test it -- docs::findings -->\n";
const END: &str = "<!-- End of the generated part -->\n";

/// The findings in docs/findings.md. Each has a heading, whose anchor `explain` prints.
fn entries_of_findings() -> String {
    let mut text = String::new();
    for kind in catalog::ALL {
        let texts = kind.texts();
        let see = match texts.see {
            "" => String::new(),
            page if page.ends_with(')') => format!("- More: {page}\n"),
            page => format!("- More: [{page}]({page})\n"),
        };
        let (id, severity) = (kind.id(), kind.severity.name());
        text += &format!(
            "### {id}\n\n**{severity}: {}**\n\n- Why: {}\n- Fix: {}\n{see}\n",
            texts.title, texts.why, texts.fix
        );
    }
    text
}

/// Words of the sections that do not contain the number of the finding that links to them.
const SUBJECTS: &str = "\
003,040 createRuntime
004 write permission
012,023 libcuda
014 driver root
020 nobody
026 does not start
035 NVIDIA_REQUIRE
042 shared propagation
043 overlay
045 /proc/driver/nvidia/params
050,051 cdi generate
071 UnexpectedAdmissionError
075 CONFIG_FILE
076 volume-mounts
077 host-path
081 credentials
082 Failed to prepare
105,110 the first one
106 unprivileged
112 no-gpu
115 NVIDIA_GDS
216,230 MIG mode
224 nvidia-gl
305 daemon-reload
307 read-only overlay
317 NVIDIA_VISIBLE_DEVICES
401 cdi refresh
505 runc
508 container_use_xserver_devices
514 device cgroup
602 mig-strategy
603,605 oci-nvidia-kubelet-plugin check
606 quiet-period";

/// A link leads to a section that contains the number of the finding, or its subject.
fn findings_link_to_their_subjects() {
    let mut subjects = BTreeMap::new();
    for line in SUBJECTS.lines() {
        let (numbers, subject) = line.split_once(' ').unwrap();
        for number in numbers.split(',') {
            subjects.insert(format!("ONH-{number}"), subject);
        }
    }
    for kind in catalog::ALL {
        let (id, see) = (kind.id(), kind.texts().see);
        assert!(!see.ends_with(".md"), "{id}: {see} has no anchor");
        let Some((page, place)) = see.split_once('#') else {
            continue;
        };
        let text = read(source("docs").join(page));
        let mut sections = text.split("\n#");
        let section = sections.find(|section| anchor(section.lines().next().unwrap()) == place);
        let subject = subjects.remove(id).unwrap_or(id);
        let is_there = section.is_some_and(|section| section.contains(subject));
        assert!(is_there, "{id}: {see} does not contain {subject:?}");
    }
    assert!(subjects.is_empty(), "these have no link: {subjects:?}");
}

/// The entries are generated. Only this test pins the words of the catalog.
fn findings_are_those_of_the_catalog() {
    let path = source("docs/findings.md");
    let text = read(&path);
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (found, after) = rest.split_once(END).unwrap();
    let generated = entries_of_findings();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        write_file(&path, [before, BEGIN, &generated, END, after].concat());
        return;
    }
    for (row, (found, expected)) in found.lines().zip(generated.lines()).enumerate() {
        assert_eq!(found, expected, "line {row} of the generated part");
    }
    assert_eq!(found.len(), generated.len());
}

/// Whether the name of a test begins with this text.
pub fn is_test(start: &str) -> bool {
    let mut tests = crate::ALL.iter().copied().flatten();
    tests.any(|test| test.name().starts_with(start))
}

/// Returns the text of a module below one of these directories. In documents, its name can follow the directory of its crate.
fn module(name: &str) -> Option<String> {
    let path = name.replace("::", "/");
    let of_crate = path.replacen('/', "/src/", 1);
    let mut places = vec![source("src").join(&path), source("crates").join(of_crate)];
    for entry in std::fs::read_dir(source("crates")).unwrap().flatten() {
        places.push(entry.path().join("src").join(&path));
    }
    let files = places
        .iter()
        .flat_map(|place| [place.with_extension("rs"), place.join("mod.rs")]);
    files
        .into_iter()
        .find_map(|file| std::fs::read_to_string(file).ok())
}

/// `module::name` is the start of a test's name, or a module of a library; in tests/guarantees.md, one with tests.
fn tests_that_documents_name_exist() {
    let mut count = 0;
    let guarantees = source("tests/guarantees.md");
    let text = std::fs::read_to_string(&guarantees).unwrap();
    let mut pages = pages();
    pages.push((guarantees, text));
    for (page, text) in pages {
        for word in quoted(&text) {
            let is_of_name =
                |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c);
            if !word.contains("::") || !word.chars().all(is_of_name) {
                continue;
            }
            let is_module = module(word).is_some_and(|text| {
                text.contains("#[cfg(test)]") || !page.ends_with("guarantees.md")
            });
            let is_known = is_module || is_test(word);
            assert!(is_known, "{page:?}: there is no test {word:?}");
            count += 1;
        }
    }
    assert!(count > 40, "{count}");
}

/// Returns the anchor that GitHub creates for a heading.
fn anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
    let kept: String = heading.chars().filter(kept).collect();
    kept.replace(' ', "-")
}

/// Follows the links of a page to files and headings, and counts them.
fn links_of(page: &Path, text: &str) -> usize {
    let mut count = 0;
    for rest in text.split("](").skip(1) {
        let link = rest.split(')').next().unwrap();
        if link.starts_with("http") {
            continue;
        }
        let (file, place) = link.split_once('#').unwrap_or((link, ""));
        let target = match file {
            "" => page.to_owned(),
            file => page.with_file_name(file),
        };
        let there = std::fs::read_to_string(&target);
        let there = there.unwrap_or_else(|_| panic!("{page:?}: {link}"));
        let mut headings = there.lines().filter(|line| line.starts_with('#'));
        let is_there = place.is_empty() || headings.any(|line| anchor(line) == place);
        assert!(is_there, "{page:?}: {link}");
        count += 1;
    }
    count
}

/// Follows all links of the pages of a package, in the directory where it installs them.
pub fn follow_links(dir: &Path) {
    let pages = texts(dir, "md");
    let links: usize = pages.iter().map(|(page, text)| links_of(page, text)).sum();
    assert!(links > 30, "{links} links");
}

/// Links lead to existing files and headings, quoted paths of this tree exist, and docs/README.md lists each page.
fn files_and_links_are_there() {
    let index = read(source("docs/README.md"));
    let (mut links, mut paths) = (0, 0);
    for (page, text) in pages() {
        links += links_of(&page, &text);
        for word in quoted(&text) {
            let path = source(word.split(['*', ' ']).next().unwrap());
            let is_of_tree = |top: &str| word.starts_with(top);
            let tops = ["src/", "crates/", "tests/", "docs/", "packaging/", ".ci/"];
            if tops.into_iter().any(is_of_tree) {
                assert!(exists(&path), "{page:?}: {word:?} is not there");
                paths += 1;
            }
        }
        let name = page.file_name().unwrap().to_str().unwrap();
        let is_listed = page.parent() != Some(&source("docs"))
            || name == "README.md"
            || index.contains(&format!("]({name})"));
        assert!(is_listed, "docs/README.md does not list {name}");
    }
    assert!(links > 40 && paths > 40, "{links} links, {paths} paths");
}

/// Whether there is a file of this name, or of one that begins like it.
fn exists(path: &Path) -> bool {
    let name = path.file_name().unwrap().to_str().unwrap();
    let entries = std::fs::read_dir(path.parent().unwrap());
    let mut entries = entries.into_iter().flatten().flatten();
    entries.any(|entry| entry.file_name().to_str().unwrap().starts_with(name))
}

/// The programs understand every command line in the documents.
fn command_lines_are_understood() {
    let mut count = 0;
    for (page, text) in pages() {
        if page.ends_with("CHANGELOG.md") {
            continue;
        }
        for line in command_lines(&text).into_iter().chain(quoted(&text)) {
            let programs = ["oci-nvidia-hook ", "oci-nvidia-kubelet-plugin "];
            if programs.iter().any(|program| line.starts_with(program)) {
                hints::assert_pasted(line);
                count += 1;
            }
        }
    }
    assert!(count > 100, "{count}");
}

/// Every `toml` block is a valid config.toml.
fn keys_of_config_toml_are_known() {
    let (dir, mut seen) = (scratch(), 0);
    let config = dir.path().join("config.toml");
    let spec = r#"{"root":{"path":"/"},"process":{"env":["NVIDIA_VISIBLE_DEVICES=all"]}}"#;
    for (page, text) in pages() {
        for block in blocks(&text, "toml") {
            write_file(&config, block);
            let mut plan = Command::new(HOOK);
            plan.arg("--config")
                .arg(&config)
                .args(["plan", "-", "--request"]);
            let ran = run_with(&mut plan, spec.as_bytes());
            let text = format!("{}{}", ran.stdout, ran.stderr);
            let is_valid = !text.contains("ONH-005") && !text.contains("ONH-101");
            assert!(is_valid && ran.code == Some(0), "{page:?}: {block}\n{text}");
            seen += 1;
        }
    }
    assert!(seen >= 4, "{seen}");
}

/// Each key of the hook is in config.toml. The kubelet plugin has such a test for its own.
fn every_key_is_documented() {
    let shipped = read(source("config/config.toml"));
    for key in schema::KEYS {
        if matches!(key.meaning, Meaning::Unused(_)) {
            continue;
        }
        let name = key.name.rsplit('.').next().unwrap();
        assert!(shipped.contains(&format!("\n#{name} = ")), "{}", key.name);
    }
}

/// Returns the text of a comment as lines of a man page: each sentence begins a new one, with at most 80 columns.
fn roff(comment: &str) -> String {
    let (mut page, mut line) = (String::new(), String::new());
    for word in comment.replace("--", "\\-\\-").split_whitespace() {
        let is_full = line.len() + 1 + word.len() > 80;
        if !line.is_empty() && (is_full || line.ends_with('.')) {
            page = page + &line + "\n";
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    page + &line + "\n"
}

/// Returns the sections of the man page for the tables of config.toml. The first block of the file describes the file.
fn entries_of_the_man_page(shipped: &str) -> String {
    let mut page = String::new();
    for block in shipped.split("\n\n").skip(1) {
        let (mut comment, mut setting) = (String::new(), None);
        for line in block.lines() {
            if line.starts_with('[') {
                page += &format!(".SH {line}\n");
            } else if let Some(text) = line.strip_prefix("# ") {
                comment = comment + text + " ";
            } else if setting.is_none() {
                setting = line.trim_start_matches('#').split_once(" = ");
            }
        }
        if let Some((key, value)) = setting {
            let default = match value.trim_matches('"') {
                _ if comment.contains("Default: ") => "see below",
                "" => "empty",
                value => value,
            };
            let default = default.replace('"', "\\(dq");
            page += &format!(".TP\n.BR {key} \" ({default})\"\n");
        }
        page += &roff(&comment);
    }
    page
}

/// config.toml is the source of the descriptions of its keys.
fn the_man_page_has_the_texts_of_config_toml() {
    let shipped = std::fs::read_to_string(source("config/config.toml")).unwrap();
    let path = source("docs/man/oci-nvidia-hook.toml.5");
    let page = std::fs::read_to_string(&path).unwrap();
    let begin = ".\\\" Generated from config/config.toml: UPDATE_GOLDEN=1 cargo test --test it -- docs::the_man_page\n";
    let end = ".\\\" End of the generated part\n";
    let (before, rest) = page.split_once(begin).unwrap();
    let (found, after) = rest.split_once(end).unwrap();
    let generated = entries_of_the_man_page(&shipped);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, [before, begin, &generated, end, after].concat()).unwrap();
        return;
    }
    assert_eq!(found, generated, "UPDATE_GOLDEN=1 writes the page");
}

/// Returns the commands of install.md that remove the packages of this distribution, in their order.
pub fn removal_commands(distribution: &str) -> Vec<String> {
    let page = read(source("docs/install.md"));
    let start = format!("| {distribution} | ");
    let mut rows = page.lines().filter_map(|line| line.strip_prefix(&start));
    let quoted = rows.next().unwrap().split('`').skip(1).step_by(2);
    let commands = quoted.filter(|command| command.contains(' '));
    commands.map(str::to_owned).collect()
}
