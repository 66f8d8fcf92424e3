//! Recognizes a process of another program by facts that the process cannot choose, before anything is read that it chooses.
//!
//! A process declares which of its memory are its arguments (prctl(2), `PR_SET_MM_MAP`). This needs no privilege, and terabytes of pages
//! that were never written cost the process nothing. Root would read them all. So the user and the program are checked first, and one
//! page is read. A process also chooses its name (`PR_SET_NAME`), and root of a container has uid 0 on the host.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::guarded::is_trusted;

/// The most bytes that are read of the arguments, and of a file whose first lines matter.
pub const PAGE: usize = 4 << 10;

/// The length in bytes to which the kernel cuts the name of a process (`TASK_COMM_LEN` without the final NUL).
const MAX_NAME: usize = 15;

/// What /proc/PID/status shows about a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The name, which the process can change
    pub name: String,
    /// The parent in the PID namespace of /proc; `None` if it is in another one
    pub parent: Option<i32>,
    /// The effective user
    pub uid: u32,
}

impl Status {
    /// Reads the status of the process with the directory `dir` in /proc.
    ///
    /// # Errors
    /// If the process has ended, or is hidden from this user.
    pub fn read(dir: &Path) -> io::Result<Self> {
        let text = page(&dir.join("status"))?;
        Self::parse(&text).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    /// Parses the first lines of proc_pid_status(5), up to `Uid`. The hook reads a few of these files at each start.
    fn parse(text: &[u8]) -> Option<Self> {
        let (mut name, mut parent) = (None, None);
        for line in text.split(|byte| *byte == b'\n') {
            if let Some(value) = line.strip_prefix(b"Name:\t") {
                name = Some(String::from_utf8_lossy(value).into_owned());
            } else if let Some(value) = line.strip_prefix(b"PPid:\t") {
                parent = Some(std::str::from_utf8(value).ok()?.trim().parse().ok()?);
            } else if let Some(value) = line.strip_prefix(b"Uid:\t") {
                // The real, the effective, the saved and the file system user
                let mut users = std::str::from_utf8(value).ok()?.split_whitespace();
                let parent: i32 = parent?;
                return Some(Self {
                    name: name?,
                    parent: (parent > 0).then_some(parent),
                    uid: users.nth(1)?.parse().ok()?,
                });
            }
        }
        None
    }

    /// Whether the process can be one of root, or of the user of this process, that runs this program.
    #[must_use]
    pub fn may_run(&self, program: &str) -> bool {
        let name = program.get(..MAX_NAME).unwrap_or(program);
        is_trusted(self.uid) && self.name == name
    }
}

/// Whether a process runs a program of the host: its PID namespace is the namespace of /proc, and its executable is the file at the same path
/// here. A program that was updated has no path any more, so its directory is compared. `dir` is the directory of the process in /proc.
#[must_use]
pub fn is_host_program(dir: &Path, program: &str) -> bool {
    let namespace = |dir: &Path| std::fs::read_link(dir.join("ns/pid")).ok();
    let own = dir.with_file_name("self");
    namespace(dir) == namespace(&own) && is_at_its_path(&dir.join("exe"), program)
}

fn is_at_its_path(exe: &Path, program: &str) -> bool {
    let (Ok(path), Ok(running)) = (std::fs::read_link(exe), std::fs::metadata(exe)) else {
        return false;
    };
    let (path, is_deleted) = match path.as_os_str().as_bytes().strip_suffix(b" (deleted)") {
        Some(before) => (PathBuf::from(OsStr::from_bytes(before)), true),
        None => (path.clone(), false),
    };
    if path.file_name() != Some(program.as_ref()) {
        return false;
    }
    let here = match path.parent() {
        Some(directory) if is_deleted => std::fs::metadata(directory),
        _ => std::fs::metadata(&path),
    };
    here.is_ok_and(|here| {
        here.dev() == running.dev() && (is_deleted || here.ino() == running.ino())
    })
}

/// Returns the arguments of a process, at most the first 4 KiB of them. proc_pid_cmdline(5) separates them with NUL.
///
/// # Errors
/// If the process has ended.
pub fn arguments(dir: &Path) -> io::Result<Vec<u8>> {
    page(&dir.join("cmdline"))
}

/// Reads the first 4 KiB of a file of proc(5), in one call.
#[expect(clippy::disallowed_methods, reason = "opens files of proc(5)")]
fn page(path: &Path) -> io::Result<Vec<u8>> {
    let mut room = [0; PAGE];
    let read = File::open(path)?.read(&mut room)?;
    Ok(room.get(..read).unwrap_or_default().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn first_lines_of_the_status() {
        let status =
            Status::parse(b"Name:\tconmon\nPid:\t7\nPPid:\t3\nUid:\t5\t0\t0\t0\n").unwrap();
        assert_eq!((status.parent, status.uid), (Some(3), 0));
        assert!(status.may_run("conmon") && !status.may_run("conmo"));
        let other = Status::parse(b"Name:\tconmon\nPPid:\t0\nUid:\t0\t4000000000\t0\t0\n").unwrap();
        assert_eq!(other.parent, None);
        assert!(!other.may_run("conmon"));
        let long = Status::parse(b"Name:\toci-nvidia-kube\nPPid:\t1\nUid:\t0\t0\t0\t0\n").unwrap();
        assert!(long.may_run("oci-nvidia-kubelet-plugin"));
        assert_eq!(Status::parse(b""), None);
    }

    #[test]
    fn programs_of_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for process in ["7/ns", "self/ns"] {
            std::fs::create_dir_all(path(process)).unwrap();
            symlink("pid:[1]", path(process).join("pid")).unwrap();
        }
        std::fs::write(path("conmon"), "x").unwrap();
        symlink(path("conmon"), path("7/exe")).unwrap();
        assert!(is_host_program(&path("7"), "conmon"));
        assert!(!is_host_program(&path("7"), "crun"));
        std::fs::remove_file(path("7/ns/pid")).unwrap();
        symlink("pid:[2]", path("7/ns/pid")).unwrap();
        assert!(!is_host_program(&path("7"), "conmon"), "of a container");
    }

    /// The executable of this process is the only link to a file that the test can rely on.
    #[test]
    fn this_process() {
        let own = PathBuf::from(format!("/proc/{}", std::process::id()));
        let exe = std::fs::read_link("/proc/self/exe").unwrap();
        let name = exe.file_name().unwrap().to_str().unwrap();
        assert!(is_host_program(&own, name));
        assert!(!is_host_program(&own, "conmon"));
        assert!(!arguments(&own).unwrap().is_empty());
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a process of the test")]
    fn one_page_of_the_arguments() {
        let mut process = std::process::Command::new("sleep");
        process.args(["60", &"0".repeat(100_000)]);
        let mut process = process.spawn().unwrap();
        let dir = PathBuf::from(format!("/proc/{}", process.id()));
        let mut found = arguments(&dir);
        // execve(2) lets the parent of a vfork go on before the new program has its arguments.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while found.as_ref().is_ok_and(Vec::is_empty) && std::time::Instant::now() < end {
            found = arguments(&dir);
        }
        process.kill().unwrap();
        process.wait().unwrap();
        let found = found.unwrap();
        assert_eq!(found.len(), PAGE);
        assert!(found.starts_with(b"sleep\x0060\x000"));
    }
}
