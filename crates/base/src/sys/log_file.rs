//! Opens a log file that no other user can write or replace.
//!
//! In a directory in which another user can create names, that user could create the log first, and own what root writes to it, or
//! link it to a file of root's. So the path is walked with [`guarded`], and the opened file is checked.

use std::ffi::OsStr;
use std::fs::File;
use std::io::IsTerminal;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Result, bail, ensure};
use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::guarded::{self, Chooser, Refused, is_trusted};
use super::in_root::Root;
use super::ns;

/// The terminal of a process, see tty(4)
pub const TERMINAL: &str = "/dev/tty";

/// The owner that a user namespace shows for files of users that are not mapped, such as the host's root.
const OVERFLOW_ID: u32 = 65534;

/// Opens the log at `path` below `root` for appending, and creates it if it is missing.
///
/// # Errors
/// If its directory is missing, if another user can write to a directory on the path or to the file, or if the file is not a
/// regular file with one name.
pub fn open(root: &Root, path: &Path) -> Result<File> {
    let (dir, name) = open_dir(root, path)?;
    exists(&dir, name)?;
    // O_NONBLOCK: a FIFO must not block.
    let flags = OFlags::WRONLY
        | OFlags::APPEND
        | OFlags::CREATE
        | OFlags::NOFOLLOW
        | OFlags::NONBLOCK
        | OFlags::NOCTTY;
    let file = rustix::fs::openat(
        &dir,
        name,
        flags | OFlags::CLOEXEC,
        Mode::from_raw_mode(0o640),
    )?;
    judge(&rustix::fs::fstat(&file)?)?;
    Ok(file.into())
}

/// Opens the terminal of this process. No other user can replace `/dev/tty`, which root creates.
///
/// # Errors
/// If the process has no terminal.
pub fn open_terminal() -> Result<File> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::from(rustix::fs::openat(
        rustix::fs::CWD,
        TERMINAL,
        flags | OFlags::CLOEXEC,
        Mode::empty(),
    )?);
    ensure!(file.is_terminal(), "it is not a terminal");
    Ok(file)
}

/// Checks whether [`open`] would succeed, without creating the file.
///
/// # Errors
/// The errors of [`open`].
pub fn check(root: &Root, path: &Path) -> Result<()> {
    let (dir, name) = open_dir(root, path)?;
    let (name, access) = match exists(&dir, name)? {
        true => (name, Access::WRITE_OK),
        false => (OsStr::new("."), Access::WRITE_OK | Access::EXEC_OK),
    };
    Ok(rustix::fs::accessat(&dir, name, access, AtFlags::empty())?)
}

/// Returns whether the log exists.
fn exists(dir: &OwnedFd, name: &OsStr) -> Result<bool> {
    match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => judge(&stat).map(|()| true),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Opens the directory of the log, and returns it with the name of the log.
fn open_dir<'p>(root: &Root, path: &'p Path) -> Result<(OwnedFd, &'p OsStr)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        bail!("the path does not name a file")
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // The directory `root` itself is trusted. In a user namespace, directories of the host's root seem to belong to another user, so
    // only the last directory can be checked there.
    if parent.parent().is_none() || ns::in_user_namespace()? {
        let dir = root.open_at(parent, flags)?;
        judge_dir(&rustix::fs::fstat(&dir)?, parent, true)?;
        return Ok((dir, name));
    }
    let found = guarded::open(root, parent).map_err(|refused| match refused {
        Refused::Io(error) => error.into(),
        Refused::Link(link) => {
            anyhow::anyhow!("{link:?} is a symbolic link that another user may have created")
        }
        Refused::Mount(point) => {
            anyhow::anyhow!("{point:?} is a mount point in a directory of other users")
        }
    })?;
    match &found.chooser {
        Chooser::NoOther => {}
        Chooser::Owner(dir, uid) => bail!("the directory {dir:?} belongs to user {uid}"),
        Chooser::Others(dir) => bail!("other users can write to the directory {dir:?}"),
    }
    judge_dir(&found.stat, &found.path, false)?;
    Ok((found.fd, name))
}

fn judge_dir(stat: &Stat, path: &Path, may_be_unmapped: bool) -> Result<()> {
    ensure!(
        FileType::from_raw_mode(stat.st_mode) == FileType::Directory,
        Errno::NOTDIR
    );
    let is_unmapped = may_be_unmapped && stat.st_uid == OVERFLOW_ID;
    ensure!(
        is_trusted(stat.st_uid) || is_unmapped,
        "the directory {path:?} belongs to user {}",
        stat.st_uid
    );
    ensure!(
        stat.st_mode & 0o022 == 0,
        "other users can write to the directory {path:?}"
    );
    Ok(())
}

fn judge(stat: &Stat) -> Result<()> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {}
        FileType::Symlink => bail!("it is a symbolic link"),
        _ => bail!("it is not a regular file"),
    }
    ensure!(
        is_trusted(stat.st_uid),
        "it belongs to user {}",
        stat.st_uid
    );
    ensure!(stat.st_mode & 0o022 == 0, "other users can write to it");
    ensure!(stat.st_nlink == 1, "it has other hard links");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    /// What both functions report, which must be the same. The second one creates the file.
    fn outcome(root: &Root, path: &str) -> String {
        let checked = check(root, Path::new(path)).map_err(|error| crate::report::line(&error));
        let opened = open(root, Path::new(path))
            .map_err(|error| crate::report::line(&error))
            .map(drop);
        assert_eq!(checked, opened, "{path}");
        opened.err().unwrap_or_default()
    }

    #[test]
    fn only_in_directories_of_trusted_users() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        for (path, mode) in [
            ("log", 0o755),
            ("group", 0o775),
            ("tmp", 0o1777),
            ("tmp/mine", 0o755),
            ("group/in", 0o755),
        ] {
            std::fs::create_dir_all(at(path)).unwrap();
            chmod(&at(path), mode);
        }
        for (link, to) in [("link", "log"), ("tmp/link", "../log")] {
            symlink(to, at(link)).unwrap();
        }
        let root = Root::open(dir.path()).unwrap();
        for path in [
            "/log/onh.log",
            "log/other",
            "/onh.log",
            "/link/onh.log",
            "/tmp/mine/onh.log",
        ] {
            assert_eq!(outcome(&root, path), "", "{path}");
            assert_eq!(outcome(&root, path), "", "{path} exists");
        }
        assert_eq!(
            at("log/onh.log").metadata().unwrap().permissions().mode() & 0o137,
            0
        );
        for (path, says) in [
            (
                "/group/onh.log",
                "other users can write to the directory \"/group\"",
            ),
            (
                "/group/in/onh.log",
                "other users can write to the directory \"/group\"",
            ),
            (
                "/tmp/onh.log",
                "other users can write to the directory \"/tmp\"",
            ),
            (
                "/tmp/link/onh.log",
                "\"/tmp/link\" is a symbolic link that another user may have created",
            ),
            ("/gone/onh.log", "no such file or directory (ENOENT)"),
            ("/log/onh.log/x", "not a directory (ENOTDIR)"),
            ("/", "the path does not name a file"),
        ] {
            assert_eq!(outcome(&root, path), says, "{path}");
        }
        assert!(
            at("tmp/onh.log").metadata().is_err() && at("group/in/onh.log").metadata().is_err()
        );
    }

    #[test]
    fn only_a_file_that_no_other_user_has_written() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        let root = Root::open(dir.path()).unwrap();
        std::fs::write(at("secret"), "secret").unwrap();
        chmod(&at("secret"), 0o600);
        symlink("secret", at("link")).unwrap();
        std::fs::hard_link(at("secret"), at("hard")).unwrap();
        std::fs::create_dir(at("dir")).unwrap();
        nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::fs::write(at("open"), "").unwrap();
        chmod(&at("open"), 0o666);
        std::fs::write(at("ours"), "").unwrap();
        chmod(&at("ours"), 0o644);
        for (path, says) in [
            ("/link", "it is a symbolic link"),
            ("/hard", "it has other hard links"),
            ("/open", "other users can write to it"),
            ("/dir", "it is not a regular file"),
            ("/fifo", "it is not a regular file"),
            ("/ours", ""),
        ] {
            assert_eq!(outcome(&root, path), says, "{path}");
        }
        open(&root, Path::new("/ours"))
            .unwrap()
            .write_all(b"a")
            .unwrap();
        open(&root, Path::new("/ours"))
            .unwrap()
            .write_all(b"b")
            .unwrap();
        assert_eq!(std::fs::read_to_string(at("ours")).unwrap(), "ab");
        assert_eq!(std::fs::read_to_string(at("secret")).unwrap(), "secret");
        if rustix::process::geteuid().is_root() {
            std::fs::write(at("theirs"), "").unwrap();
            chmod(&at("theirs"), 0o644);
            std::os::unix::fs::chown(at("theirs"), Some(7777), None).unwrap();
            assert_eq!(outcome(&root, "/theirs"), "it belongs to user 7777");
            std::fs::create_dir(at("user")).unwrap();
            std::os::unix::fs::chown(at("user"), Some(7777), None).unwrap();
            assert_eq!(
                outcome(&root, "/user/log"),
                "the directory \"/user\" belongs to user 7777"
            );
        }
    }
}
