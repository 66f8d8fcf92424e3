//! Writes the archive for a bug report. It contains no environment of a container, no configuration file of an engine (which can
//! contain passwords of proxies) and no serial number of a GPU.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::write::GzEncoder;
use rustix::fs::{CWD, FileType, Mode, OFlags};
use serde_json::json as value;

use base::json;
use base::report::{Failure, line, one_line};
use base::tree::Tree;
use findings::catalog;
use nvidia_host::inventory::procfs::DRIVER_PROC;
use nvidia_host::inventory::report::Report;

use super::check::Check;
use super::facts::Facts;
use super::inspect::CONFIG;
use engines::Engine;
use engines::status;
use records::store::Store;

/// The number of bytes to keep of each file. Of a longer file, the end is kept.
const MOST: usize = 256 << 10;
const MOST_RECORDS: usize = 20;

type Member = (String, Vec<u8>);

/// Collects the members of the archive. `config` is the file of `--config`.
///
/// # Errors
/// If the results cannot be encoded. Missing files of the host are left out.
pub(crate) fn collect(
    host: &Tree,
    facts: &Facts,
    outcomes: &[Check],
    status: &status::Report,
    config: Option<&Path>,
) -> Result<Vec<Member>> {
    let mut members = Vec::new();
    let mut add = |name: &str, bytes: Vec<u8>| members.push((name.to_owned(), bytes));
    add("doctor.json", super::document(outcomes)?.into_bytes());
    add("status.json", status.document()?.into_bytes());
    let engines: Vec<_> = facts.engines.iter().map(engine).collect();
    add("engines.json", bytes(&engines)?);
    if let Some(inventory) = facts.driver.inventory() {
        add("info.json", bytes(&Report::from(inventory))?);
    }
    // A driver root can have its own /proc.
    let root = Tree::open(&facts.settings().driver_root);
    let driver = match &root {
        Ok(root) if root.locate(Path::new(DRIVER_PROC)).is_ok() => root,
        _ => host,
    };
    for path in files_of_host(host, facts, config.unwrap_or_else(|| Path::new(CONFIG))) {
        if let Ok(bytes) = host.read(&path) {
            add(&member_name(&path), end_of(&bytes).to_vec());
        }
    }
    for path in files_of_driver(driver) {
        if let Ok(bytes) = driver.read(&path) {
            add(&member_name(&path), end_of(&bytes).to_vec());
        }
    }
    if let Some((log, _)) = &facts.log {
        match end_of_log(log) {
            Ok(bytes) => add(&member_name(log), bytes),
            Err(why) => {
                let text = one_line(&format!("{}: {}", log.display(), line(&why)));
                add("left-out.txt", text.into_bytes());
            }
        }
    }
    let devices = host.read(Path::new("/proc/devices")).unwrap_or_default();
    let devices = String::from_utf8_lossy(&devices);
    let lines = devices.lines().filter(|line| line.contains("nvidia"));
    let lines: Vec<_> = lines.collect();
    add("files/proc/devices", lines.join("\n").into_bytes());
    members.extend(records());
    Ok(members)
}

/// Returns the files of the host that belong into the archive. Some of them may be missing.
fn files_of_host(host: &Tree, facts: &Facts, config: &Path) -> BTreeSet<PathBuf> {
    let mut paths = BTreeSet::from([config.to_owned()]);
    paths.extend(below(host, Path::new(&format!("{}.d", config.display()))));
    paths.extend(facts.installed.iter().cloned());
    for engine in &facts.engines {
        for entry in &engine.hooks.entries {
            if entry.is_ours() || entry.is_nvidias() {
                paths.insert(entry.file.clone());
            }
        }
    }
    for view in &facts.cdi {
        for dir in &view.dirs {
            paths.extend(below(host, dir));
        }
    }
    paths.extend(["/etc/os-release", "/proc/version", "/proc/modules"].map(Into::into));
    paths
}

fn files_of_driver(driver: &Tree) -> Vec<PathBuf> {
    let proc = Path::new(DRIVER_PROC);
    let mut paths = vec![proc.join("version"), proc.join("params")];
    for gpu in below(driver, &proc.join("gpus")) {
        paths.push(gpu.join("information"));
    }
    paths
}

fn bytes(value: &(impl serde::Serialize + ?Sized)) -> serde_json::Result<Vec<u8>> {
    json::pretty(&value).map(String::into_bytes)
}

fn below(host: &Tree, dir: &Path) -> Vec<PathBuf> {
    let names = host.names(dir).into_iter();
    names.map(|name| dir.join(name)).collect()
}

/// Returns the end of the log. Other users may be able to write to its directory. The archive is meant to be published, so a file or
/// link that they created there must not be packed: it could be any file that root can read.
fn end_of_log(path: &Path) -> Result<Vec<u8>> {
    let flags =
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(CWD, path, flags, Mode::empty())?);
    let stat = rustix::fs::fstat(&file)?;
    let us = rustix::process::geteuid().as_raw();
    anyhow::ensure!(
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
        "not a regular file"
    );
    anyhow::ensure!(
        stat.st_uid == us || stat.st_uid == 0,
        "the file belongs to another user, {}",
        stat.st_uid
    );
    anyhow::ensure!(stat.st_nlink == 1, "the file has other hard links");
    let size = u64::try_from(stat.st_size).unwrap_or_default();
    let most = u64::try_from(MOST).unwrap_or(u64::MAX);
    file.seek(SeekFrom::Start(size.saturating_sub(most)))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the name of a host file in the archive. The crate tar rejects names with "..", which the path of `--config` can contain.
fn member_name(path: &Path) -> String {
    let mut member = PathBuf::from("files");
    for component in path.components() {
        if let Component::Normal(name) = component {
            member.push(name);
        }
    }
    member.to_string_lossy().into_owned()
}

fn end_of(bytes: &[u8]) -> &[u8] {
    let start = bytes.len().saturating_sub(MOST);
    bytes.get(start..).unwrap_or(bytes)
}

/// Returns the path as text. The macro would panic for a name that is not UTF-8.
fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn texts(paths: &[PathBuf]) -> Vec<String> {
    paths.iter().map(|path| shown(path)).collect()
}

fn engine(engine: &Engine) -> serde_json::Value {
    let mut refused = Vec::new();
    for (file, why) in &engine.hooks.refused {
        refused.push(value!({"file": shown(file), "why": why.to_string()}));
    }
    if let Some((file, why)) = &engine.settings.refused {
        refused.push(value!({"file": shown(file), "why": why}));
    }
    let mut hooks = Vec::new();
    for entry in &engine.hooks.entries {
        hooks.push(value!({
            "file": shown(&entry.file),
            "path": shown(&entry.hook.path),
            "program": shown(&entry.program),
            "stages": entry.hook.stages,
        }));
    }
    value!({
        "engine": engine.kind.to_string(),
        "program": engine.program.as_deref().map(shown),
        "version": engine.version.map(|version| version.to_string()),
        "files": texts(&engine.files),
        "hooks_dirs": texts(&engine.settings.hooks_dirs),
        "hooks": hooks,
        "refused": refused,
        "cdi_spec_dirs": texts(&engine.settings.cdi_dirs),
        "cgroup_manager": engine.settings.cgroup_manager,
        "runtime": engine.runtime.as_ref().map(|runtime| value!({
            "name": runtime.name,
            "program": runtime.program.as_deref().map(shown),
            "version": runtime.version.map(|version| version.to_string()),
        })),
    })
}

/// Returns the records of the latest containers.
fn records() -> Vec<Member> {
    let Ok(Some(store)) = Store::existing() else {
        return Vec::new();
    };
    let newest_first = store.all().unwrap_or_default().records;
    let mut members = Vec::new();
    for record in newest_first.iter().take(MOST_RECORDS) {
        if let Ok(bytes) = bytes(record) {
            members.push((format!("records/{}.json", record.container.id), bytes));
        }
    }
    members
}

/// Writes a new file that only its owner can read.
///
/// # Errors
/// If the file, or a link with its name, exists already or cannot be written.
#[expect(
    clippy::disallowed_methods,
    reason = "creates a new file, and follows no link"
)]
pub(crate) fn write(path: &Path, members: &[Member]) -> Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    file.and_then(|file| pack(members, file)?.sync_all())
        .with_context(|| {
            Failure::new(
                &catalog::BUNDLE,
                format!("cannot write {path:?}"),
                "give a new file with --bundle, in a directory that only you can write to",
            )
        })
}

/// Writes a gzipped tar archive, and returns the output.
fn pack<W: Write>(members: &[Member], output: W) -> io::Result<W> {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |time| time.as_secs());
    let mut archive = tar::Builder::new(GzEncoder::new(output, Compression::default()));
    for (name, content) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len().try_into().unwrap_or(u64::MAX));
        header.set_mode(0o600);
        header.set_mtime(now);
        archive.append_data(
            &mut header,
            Path::new("oci-nvidia-hook").join(name),
            content.as_slice(),
        )?;
    }
    archive.into_inner()?.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside_of_the_archive() {
        for (path, name) in [
            ("/etc/os-release", "files/etc/os-release"),
            ("config.toml", "files/config.toml"),
            ("../a/../../b.toml", "files/a/b.toml"),
        ] {
            assert_eq!(member_name(Path::new(path)), name);
        }
    }

    #[test]
    fn a_name_that_is_not_utf_8() {
        use std::os::unix::ffi::OsStringExt;
        let files = vec![std::ffi::OsString::from_vec(b"/\xff".to_vec()).into()];
        assert_eq!(
            engine(&Engine {
                files,
                ..Engine::default()
            })["files"][0],
            "/\u{fffd}"
        );
    }

    #[test]
    fn the_archive_can_be_unpacked() {
        let long = format!("files/{}/{}", "d".repeat(200), "n".repeat(200));
        let members = [
            ("a.json".to_owned(), b"{}".to_vec()),
            (long.clone(), vec![b'x'; 1 << 20]),
        ];
        let packed = pack(&members, Vec::new()).unwrap();
        assert!(packed.len() < 10_000, "{}", packed.len());
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(packed.as_slice()));
        let unpacked = archive.entries().unwrap().map(|entry| {
            let (mut entry, mut content) = (entry.unwrap(), Vec::new());
            entry.read_to_end(&mut content).unwrap();
            assert_eq!(entry.header().mode().unwrap(), 0o600);
            (entry.path().unwrap().to_str().unwrap().to_owned(), content)
        });
        let expected = members.map(|(name, content)| (format!("oci-nvidia-hook/{name}"), content));
        assert_eq!(unpacked.collect::<Vec<_>>(), expected);
    }
}
