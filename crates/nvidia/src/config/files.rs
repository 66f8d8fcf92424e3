//! Finds and reads config.toml and its drop-in files, and checks who can write them.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rustix::fs::Stat;
use rustix::io::Errno;

use base::debug;
use base::paths::HostPath;
use base::report::{Failure, Finding, failure, kind_of};
use base::sys::in_root::open_host_file;
use base::sys::ns;
use findings::catalog;

use super::{Config, Table, parse_into};

/// The default path.
pub const FILE: &str = "/etc/nvidia-container-runtime/config.toml";
/// The size limit in bytes. NVIDIA's file has 2 KiB.
const MAX_SIZE: usize = 1 << 20;
/// The owner that a user namespace shows for files of users that are not mapped. With a rootless engine, root is not mapped.
const OVERFLOW_ID: u32 = 65534;

/// Reads `path` (from `--config`) or the default file if it exists. Then it reads the drop-in files `config.toml.d/*.toml` in the
/// same directory, in the order of their names. A later value replaces an earlier one.
///
/// No environment variable selects another file: an image may control the environment of the hook.
///
/// # Errors
/// If `path` is given and missing, or a file cannot be read, is invalid, or is writable by users other than root.
pub fn read(path: Option<&Path>) -> Result<(Config, Vec<Finding>)> {
    read_with(Config::default(), &mut (), path)
}

/// Reads the files as [`read`] does, with other defaults, and with the table of the device plugin.
///
/// # Errors
/// As [`read`].
pub fn read_with(
    mut config: Config,
    plugin: &mut dyn Table,
    path: Option<&Path>,
) -> Result<(Config, Vec<Finding>)> {
    // Programs that this one starts run in another directory.
    config.file = path
        .map(|path| HostPath::new(std::path::absolute(path).unwrap_or_else(|_| path.to_owned())));
    let (path, text) = match path {
        Some(path) => (path, Some(read_file(path)?)),
        None => (Path::new(FILE), read_if_existing(Path::new(FILE))?),
    };
    read_all(config, plugin, path, text)
}

/// Reads the default file below this directory if it exists, and its drop-in files.
///
/// # Errors
/// As [`read`].
pub fn read_below(root: &Path) -> Result<(Config, Vec<Finding>)> {
    let path = root.join(FILE.trim_start_matches('/'));
    let text = read_if_existing(&path)?;
    read_all(Config::default(), &mut (), &path, text)
}

fn read_all(
    mut config: Config,
    plugin: &mut dyn Table,
    path: &Path,
    text: Option<String>,
) -> Result<(Config, Vec<Finding>)> {
    let mut findings = Vec::new();
    if text.is_none() {
        debug::log(|| format!("{path:?} does not exist, so the defaults apply"));
    }
    if let Some(text) = text {
        findings.extend(parse_into(&mut config, plugin, &text, path)?);
    }
    for path in drop_ins(path)? {
        findings.extend(parse_into(&mut config, plugin, &read_file(&path)?, &path)?);
    }
    Ok((config, findings))
}

/// Reads a file, or returns `None` if it is missing. A dangling link is an error: the administrator expects a file to be read.
fn read_if_existing(path: &Path) -> Result<Option<String>> {
    if rustix::fs::lstat(path).err() == Some(Errno::NOENT) {
        return Ok(None);
    }
    read_file(path).map(Some)
}

/// Returns the drop-in files in the order of their names.
///
/// # Errors
/// If the directory exists and cannot be read: its limits are then unknown.
pub fn drop_ins(path: &Path) -> Result<Vec<PathBuf>> {
    let dir = drop_in_dir(path);
    let names = match list(&dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        names => names.map_err(|error| unreadable(&dir, error.into()))?,
    };
    let mut files: Vec<PathBuf> = names.into_iter().filter(|path| is_drop_in(path)).collect();
    files.sort();
    Ok(files)
}

/// Returns the directory of the drop-in files.
pub(super) fn drop_in_dir(path: &Path) -> PathBuf {
    let mut dir = path.as_os_str().to_owned();
    dir.push(".d");
    dir.into()
}

fn list(dir: &Path) -> io::Result<Vec<PathBuf>> {
    std::fs::read_dir(dir)?
        .map(|entry| Ok(entry?.path()))
        .collect()
}

fn is_drop_in(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "toml")
}

fn read_file(path: &Path) -> Result<String> {
    let text = read_trusted(path).map_err(|error| unreadable(path, error))?;
    debug::log(|| format!("read {path:?}"));
    Ok(text)
}

fn unreadable(path: &Path, error: anyhow::Error) -> anyhow::Error {
    let what = format!("cannot read the configuration {path:?}");
    if kind_of(&error).is_some() {
        return error.context(what);
    }
    let is_missing = error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::NotFound);
    let hint = if is_missing {
        "--config selects another file; without the option, the default is used".to_owned()
    } else {
        format!(
            "\"ls -ld {}\" shows what it is; --config selects another file",
            path.display()
        )
    };
    error.context(Failure::new(&catalog::CONFIG_FILE, what, hint))
}

fn read_trusted(path: &Path) -> Result<String> {
    let (file, stat) = open_host_file(path)?;
    let us = rustix::process::geteuid().as_raw();
    if !is_trusted(&stat, us, ns::in_user_namespace()?) {
        return Err(failure(
            &catalog::CONFIG_FILE,
            format!(
                "it is writable by users other than root (owner {}:{}, mode {:04o})",
                stat.st_uid,
                stat.st_gid,
                stat.st_mode & 0o7777
            ),
            format!(
                "check the content of the file, then run \"chown root:root {0}; chmod go-w {0}\"",
                path.display()
            ),
        ));
    }
    let bytes = base::read::read_known(&file, &stat, MAX_SIZE)?;
    String::from_utf8(bytes)
        .map_err(|error| anyhow::anyhow!("not UTF-8 at byte {}", error.utf8_error().valid_up_to()))
}

/// Whether only root, or the user `us` of this process, can have written a file. The file decides which libraries the hook loads.
fn is_trusted(stat: &Stat, us: u32, in_user_namespace: bool) -> bool {
    let is_roots = |id: u32| id == 0 || in_user_namespace && id == OVERFLOW_ID;
    let by_group = stat.st_mode & 0o020 != 0 && !is_roots(stat.st_gid);
    (is_roots(stat.st_uid) || stat.st_uid == us) && !by_group && stat.st_mode & 0o002 == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn whose_it_must_be() {
        let stat = |uid, gid, mode: u32| {
            let mut stat = rustix::fs::stat("/").unwrap();
            (stat.st_uid, stat.st_gid, stat.st_mode) = (uid, gid, 0o100_000 | mode);
            stat
        };
        for (uid, gid, mode, us, in_user_namespace, trusted) in [
            (0, 0, 0o644, 0, false, true),
            (0, 0, 0o664, 0, false, true),
            (0, 5, 0o664, 0, false, false),
            (0, 5, 0o644, 0, false, true),
            (0, 0, 0o666, 0, false, false),
            (1000, 0, 0o644, 0, false, false),
            (1000, 1000, 0o644, 1000, false, true),
            (0, 0, 0o644, 1000, false, true),
            (65534, 65534, 0o644, 0, true, true),
            (65534, 65534, 0o644, 0, false, false),
            (65534, 65534, 0o666, 0, true, false),
        ] {
            let is = is_trusted(&stat(uid, gid, mode), us, in_user_namespace);
            assert_eq!(
                is, trusted,
                "{uid}:{gid} {mode:o} for {us}, {in_user_namespace}"
            );
        }
    }

    #[test]
    fn drop_ins_come_after_in_the_order_of_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(
            &file,
            "[oci-nvidia-hook]\nnvml-timeout = 5\n[driver]\nfiles = [\"/a\"]",
        )
        .unwrap();
        let drop_ins = dir.path().join("config.toml.d");
        std::fs::create_dir(&drop_ins).unwrap();
        std::fs::write(drop_ins.join("20.toml"), "[driver]\nfiles = [\"/c\"]").unwrap();
        std::fs::write(
            drop_ins.join("10.toml"),
            "[driver]\nfiles = [\"/b\"]\n[oci-nvidia-hook]\nnvml-timeout = 6",
        )
        .unwrap();
        std::fs::write(drop_ins.join("30.toml.rpmsave"), "nonsense").unwrap();
        let (config, _) = read(Some(&file)).unwrap();
        assert_eq!(config.nvml_timeout, std::time::Duration::from_secs(6));
        assert_eq!(
            config.driver_files,
            ["/a", "/b", "/c"].map(PathBuf::from),
            "lists grow"
        );
        std::fs::write(drop_ins.join("10.toml"), "[driver]\nfiles = [\"c\"]").unwrap();
        let text = base::report::render(&read(Some(&file)).unwrap_err());
        assert!(
            text.contains("10.toml\" line 2: driver.files has an invalid value; it must be a list of absolute paths"),
            "{text}"
        );
    }

    #[test]
    fn what_can_be_in_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let says = |name: &str, says: &str| {
            let text = base::report::render(&read(Some(&path(name))).unwrap_err());
            assert!(
                text.starts_with("cannot read the configuration ") && text.contains(says),
                "{text}"
            );
            assert!(text.contains("\nhint: "), "{text}");
        };
        symlink("nowhere", path("dangling")).unwrap();
        says("dangling", "no such file or directory");
        assert!(read_if_existing(&path("dangling")).is_err());
        assert!(read_if_existing(&path("nothing")).unwrap().is_none());
        says("nothing", "no such file or directory");
        nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        says("fifo", "not a regular file");
        says("", "not a regular file");
        std::fs::write(path("with"), "").unwrap();
        std::fs::write(path("with.d"), "").unwrap();
        says("with", "with.d\": not a directory");
        std::fs::write(path("open"), "").unwrap();
        std::fs::set_permissions(path("open"), std::fs::Permissions::from_mode(0o666)).unwrap();
        says("open", "it is writable by users other than root");
        std::fs::write(path("bytes"), b"a\xff").unwrap();
        std::fs::set_permissions(path("bytes"), std::fs::Permissions::from_mode(0o644)).unwrap();
        says("bytes", "not UTF-8 at byte 1");
    }
}
