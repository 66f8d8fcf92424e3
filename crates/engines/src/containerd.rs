//! Determines where a containerd searches for CDI specs: from the configuration that it reads, and its version.
//!
//! Several containerds can run on a host, for example those of K3s and of Docker. The process that listens at the socket of the kubelet has
//! the path of its configuration file on its command line. Without such a process, the socket shows whose containerd it is.

use std::path::{Component, Path, PathBuf};

use base::search_path;
use base::sys::host_process::{self, Status};
use base::tree::{Tree, is_missing};
use toml::de::{DeTable, DeValue};

use super::Version;
use super::cdi::{CdiSpecs, DEFAULT_DIRS};
use super::inspect::Versions;

/// The socket of a containerd without another address.
const SOCKET: &str = "/run/containerd/containerd.sock";
/// The configuration file of a containerd without another one, which may be missing.
const CONFIG: &str = "/etc/containerd/config.toml";
/// The first version that can read CDI specs, if its configuration enables that.
const CDI: Version = Version(1, 7, 0);
/// The first version that reads CDI specs by default, and that merges the tables of several files instead of replacing them.
const CDI_BY_DEFAULT: Version = Version(2, 0, 0);
/// The most files that are read: containerd follows imports without a limit.
const MAX_FILES: usize = 64;

/// The containerds of distributions: the socket, the configuration file and the program.
const KNOWN: [(&str, &str, &str); 4] = [
    (
        "/run/k3s/containerd/containerd.sock",
        "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
        "/var/lib/rancher/k3s/data/current/bin/containerd",
    ),
    (
        "/run/k3s/containerd/containerd.sock",
        "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
        "/var/lib/rancher/rke2/bin/containerd",
    ),
    (
        "/run/k0s/containerd.sock",
        "/etc/k0s/containerd.toml",
        "/var/lib/k0s/bin/containerd",
    ),
    (
        "/var/snap/microk8s/common/run/containerd.sock",
        "/var/snap/microk8s/current/args/containerd.toml",
        "/snap/microk8s/current/bin/containerd",
    ),
];

/// A containerd.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Daemon {
    config: PathBuf,
    /// `None` if it is not known
    program: Option<PathBuf>,
}

/// The text of a configuration file.
struct ConfigFile {
    path: PathBuf,
    text: String,
}

/// What the files set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Settings {
    enable: Option<bool>,
    dirs: Option<Vec<PathBuf>>,
    /// More than one file has a list, and versions differ in what they do with it.
    has_several_lists: bool,
}

/// Returns where the containerd with this socket searches for CDI specs, and adds the files that decide it to `files`.
pub(super) fn cdi_specs(host: &Tree, socket: &str, files: &mut Vec<PathBuf>) -> CdiSpecs {
    let daemon = match daemon(host, socket) {
        Ok(daemon) => daemon,
        Err(why) => return CdiSpecs::Unknown(why),
    };
    let program = daemon.program;
    let version = program.and_then(|program| Versions::stored().ask(host, &program).ok());
    let read = read(host, &daemon.config, files);
    let decided = read.and_then(|read| decide(&read, version));
    decided.unwrap_or_else(CdiSpecs::Unknown)
}

/// Finds the containerd that listens at the socket.
fn daemon(host: &Tree, socket: &str) -> Result<Daemon, String> {
    if let Some(daemon) = running(host, socket) {
        return Ok(daemon);
    }
    if socket == SOCKET {
        return Ok(Daemon {
            config: CONFIG.into(),
            program: search_path::find(host, "containerd"),
        });
    }
    let mut found = KNOWN
        .iter()
        .filter(|(known, config, _)| *known == socket && host.locate(Path::new(config)).is_ok());
    match (found.next(), found.next()) {
        (Some((_, config, program)), None) => Ok(Daemon {
            config: config.into(),
            program: Some(program.into()),
        }),
        _ => Err(format!(
            "the configuration file of the containerd at {socket:?} is not known"
        )),
    }
}

/// Finds the process. Any user can start a program with this name, so only root's counts.
fn running(host: &Tree, socket: &str) -> Option<Daemon> {
    let proc = host.on_host(Path::new("/proc"));
    for name in host.names(Path::new("/proc")) {
        let dir = proc.join(&name);
        let is_pid = name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
        let is_root = |status: Status| status.uid == 0 && status.may_run("containerd");
        if !is_pid || !Status::read(&dir).is_ok_and(is_root) {
            continue;
        }
        let line = host_process::arguments(&dir).unwrap_or_default();
        let (address, config) = options(&String::from_utf8_lossy(&line));
        let config = config.map_or_else(|| CONFIG.into(), PathBuf::from);
        let address = address.or_else(|| address_in(&host.read_text(&config).unwrap_or_default()));
        if address.as_deref().unwrap_or(SOCKET) != socket {
            continue;
        }
        let program = std::fs::read_link(dir.join("exe")).ok();
        let in_path = || search_path::find(host, "containerd").filter(|_| socket == SOCKET);
        return Some(Daemon {
            config,
            program: program.or_else(in_path),
        });
    }
    None
}

/// Returns the address and the configuration file on a command line, whose words end with NUL.
fn options(line: &str) -> (Option<String>, Option<String>) {
    let (mut address, mut config) = (None, None);
    let mut words = line.split('\0').skip(1);
    while let Some(word) = words.next() {
        let name = word.trim_start_matches('-');
        if name == word {
            continue;
        }
        let (name, value) = match name.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (name, None),
        };
        let option = match name {
            "address" | "a" => &mut address,
            "config" | "c" => &mut config,
            _ => continue,
        };
        *option = value.or_else(|| words.next().map(str::to_owned));
    }
    (address, config)
}

fn address_in(text: &str) -> Option<String> {
    let table = DeTable::parse(text).ok()?;
    let DeValue::Table(grpc) = table.get_ref().get("grpc")?.get_ref() else {
        return None;
    };
    let address = grpc.get("address")?.get_ref().as_str()?;
    (!address.is_empty()).then(|| address.to_owned())
}

/// Reads a configuration file and its imports, in the order in which containerd does.
fn read(host: &Tree, main: &Path, seen: &mut Vec<PathBuf>) -> Result<Vec<ConfigFile>, String> {
    let mut files: Vec<ConfigFile> = Vec::new();
    let mut pending = vec![main.to_owned()];
    while !pending.is_empty() {
        let path = pending.remove(0);
        if files.iter().any(|file| file.path == path) {
            continue;
        }
        seen.push(path.clone());
        match host.locate(&path) {
            // Without the file, the defaults apply.
            Err(error) if is_missing(&error) && path == Path::new(CONFIG) => continue,
            _ => {}
        }
        let text = host
            .read_text(&path)
            .map_err(|error| format!("containerd cannot read {path:?}: {error:#}"))?;
        if files.len() == MAX_FILES {
            return Err(format!("{main:?} imports more than {MAX_FILES} files"));
        }
        for import in imports(&path, &text)? {
            pending.extend(expand(host, &import, seen)?);
        }
        files.push(ConfigFile { path, text });
    }
    Ok(files)
}

fn imports(path: &Path, text: &str) -> Result<Vec<PathBuf>, String> {
    let table = parse(path, text)?;
    let mut found = Vec::new();
    if let Some(imports) = table.get_ref().get("imports")
        && let DeValue::Array(imports) = imports.get_ref()
    {
        for import in imports.iter() {
            let import = import.get_ref().as_str().unwrap_or_default();
            found.push(clean(&path.with_file_name(import)));
        }
    }
    Ok(found)
}

/// Resolves `..` without the file system, as containerd does (filepath.Clean in Go).
fn clean(path: &Path) -> PathBuf {
    let mut cleaned = PathBuf::new();
    for part in path.components() {
        if part == Component::ParentDir {
            cleaned.pop();
        } else {
            cleaned.push(part);
        }
    }
    cleaned
}

fn parse<'t>(path: &Path, text: &'t str) -> Result<toml::Spanned<DeTable<'t>>, String> {
    DeTable::parse(text).map_err(|error| {
        let message = error.message().replace('\n', ", ");
        format!("containerd cannot read {path:?}: {message}")
    })
}

/// Returns the files of an import, which can be a pattern (filepath.Glob in Go).
fn expand(host: &Tree, import: &Path, seen: &mut Vec<PathBuf>) -> Result<Vec<PathBuf>, String> {
    let text = import.to_string_lossy();
    if !text.contains('*') {
        return Ok(vec![import.to_owned()]);
    }
    let (Some(dir), Some(pattern)) = (import.parent(), import.file_name()) else {
        return Ok(Vec::new());
    };
    let pattern = pattern.to_string_lossy();
    if dir.to_string_lossy().contains('*') || pattern.contains(['?', '[', '\\']) {
        return Err(format!(
            "the import {text:?} of containerd is not supported here"
        ));
    }
    seen.push(dir.to_owned());
    let mut found = Vec::new();
    for name in host.names(dir) {
        if matches(&pattern, &name.to_string_lossy()) {
            found.push(dir.join(name));
        }
    }
    found.sort();
    Ok(found)
}

/// Whether a name matches a pattern with `*`.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(rest) = name.strip_prefix(before) else {
        return false;
    };
    let mut rests = rest.char_indices().map(|(at, _)| &rest[at..]);
    matches(after, "") || rests.any(|rest| matches(after, rest))
}

/// Decides from the files of a containerd of this version.
fn decide(files: &[ConfigFile], version: Option<Version>) -> Result<CdiSpecs, String> {
    if let Some(version) = version {
        return decide_for(files, version);
    }
    let old = decide_for(files, CDI)?;
    let new = decide_for(files, CDI_BY_DEFAULT)?;
    if old != new {
        return Err("it depends on the version of containerd, which is not known".to_owned());
    }
    Ok(new)
}

fn decide_for(files: &[ConfigFile], version: Version) -> Result<CdiSpecs, String> {
    if version < CDI {
        return Ok(CdiSpecs::Off(format!(
            "containerd {version} cannot read CDI specs; the first version that can is {CDI}"
        )));
    }
    let mut format = 1;
    for file in files {
        format = self::format(file)?.unwrap_or(format);
    }
    let mut settings = Settings::default();
    for name in sections(format, version) {
        for file in files {
            settings.add(file, name, version)?;
        }
    }
    if !settings.enable.unwrap_or(version >= CDI_BY_DEFAULT) {
        let why = "containerd reads no CDI specs without enable_cdi = true in its configuration";
        return Ok(CdiSpecs::Off(why.to_owned()));
    }
    if settings.has_several_lists {
        return Err("several files of containerd set cdi_spec_dirs".to_owned());
    }
    let dirs = settings.dirs;
    Ok(CdiSpecs::Dirs(dirs.unwrap_or_else(|| {
        DEFAULT_DIRS.map(PathBuf::from).to_vec()
    })))
}

impl Settings {
    /// Adds the settings in a table of another file.
    fn add(&mut self, file: &ConfigFile, name: &str, version: Version) -> Result<(), String> {
        let table = parse(&file.path, &file.text)?;
        let Some(DeValue::Table(plugins)) = value_of(table.get_ref(), "plugins") else {
            return Ok(());
        };
        let Some(DeValue::Table(section)) = value_of(plugins, name) else {
            return Ok(());
        };
        if version < CDI_BY_DEFAULT {
            // The table of a later file replaces the whole table.
            *self = Self::default();
        }
        self.add_section(section, &file.path)
    }

    fn add_section(&mut self, section: &DeTable<'_>, path: &Path) -> Result<(), String> {
        let invalid = |key: &str| format!("{key} in {path:?} is invalid");
        if let Some(enable) = section.get("enable_cdi") {
            let DeValue::Boolean(enable) = enable.get_ref() else {
                return Err(invalid("enable_cdi"));
            };
            self.enable = Some(*enable);
        }
        if let Some(dirs) = section.get("cdi_spec_dirs") {
            let DeValue::Array(list) = dirs.get_ref() else {
                return Err(invalid("cdi_spec_dirs"));
            };
            let mut dirs = Vec::new();
            for dir in list.iter() {
                let dir = dir.get_ref().as_str();
                dirs.push(PathBuf::from(dir.ok_or_else(|| invalid("cdi_spec_dirs"))?));
            }
            self.has_several_lists |= self.dirs.as_ref().is_some_and(|known| *known != dirs);
            self.dirs = Some(dirs);
        }
        Ok(())
    }
}

fn value_of<'t>(table: &'t DeTable<'t>, key: &str) -> Option<&'t DeValue<'t>> {
    table.get(key).map(|value| value.get_ref())
}

/// Returns the format that a file has, according to its key `version`.
fn format(file: &ConfigFile) -> Result<Option<u32>, String> {
    let table = parse(&file.path, &file.text)?;
    let Some(DeValue::Integer(number)) = value_of(table.get_ref(), "version") else {
        return Ok(None);
    };
    Ok(number.as_str().parse().ok().filter(|format| *format > 0))
}

/// Returns the tables of the CRI plugin that a containerd of this version reads if its files have this format, which is that of the last file
/// that has one. containerd 2 reads the keys of the old table that the new one does not have, and only in the format 2.
fn sections(format: u32, version: Version) -> &'static [&'static str] {
    match (format, version >= CDI_BY_DEFAULT) {
        (1, false) => &["cri"],
        (_, false) => &["io.containerd.grpc.v1.cri"],
        (2, true) => &["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"],
        (_, true) => &["io.containerd.cri.v1.runtime"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines() {
        for (line, address, config) in [
            ("containerd", None, None),
            (
                "containerd\0-c\0/c\0-a\0/a\0--state\0/s",
                Some("/a"),
                Some("/c"),
            ),
            (
                "/bin/containerd\0--address=/a\0--config=/c\0",
                Some("/a"),
                Some("/c"),
            ),
            ("containerd\0config\0dump", None, None),
            ("containerd\0--config", None, None),
        ] {
            let found = options(line);
            let found = (found.0.as_deref(), found.1.as_deref());
            assert_eq!(found, (address, config), "{line:?}");
        }
        assert_eq!(
            address_in("[grpc]\naddress = \"/x\""),
            Some("/x".to_owned())
        );
        assert_eq!(address_in("[grpc]\naddress = \"\""), None);
    }

    #[test]
    fn patterns() {
        for (pattern, name, expected) in [
            ("*.toml", "99.toml", true),
            ("*.toml", "toml", false),
            ("*", "", true),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "aXbY", false),
            ("*.toml", "ä.toml", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}
