//! conmon, the parent of a container's runtime in Podman and CRI-O. Its arguments contain the name of the container, which config.json
//! does not.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use base::sys::host_process::{self, Status};

const PROC: &str = "/proc";
/// The name of the program
const PROGRAM: &str = "conmon";
/// The processes between a container's init process and conmon: the runtime, and for crun a second process of it.
const BETWEEN: usize = 2;

/// Returns the name of the container `id` whose init process is `init`. It is the engine's, so its user has chosen it. Returns `None`
/// without conmon.
pub(crate) fn name_of(id: &str, init: i32) -> Option<String> {
    argument_of(Path::new(PROC), init, |found| name_argument(found, id))
}

/// Returns the bundle of the container `id` whose init process is `init`.
pub(crate) fn bundle_of(id: &str, init: i32) -> Option<PathBuf> {
    argument_of(Path::new(PROC), init, |found| bundle_argument(found, id))
}

/// Returns what `read` returns for the arguments of a parent of the process that is conmon. `proc` is /proc.
fn argument_of<T>(proc: &Path, pid: i32, read: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
    let mut status = Status::read(&in_proc(proc, pid)).ok()?;
    for _ in 0..=BETWEEN {
        let dir = in_proc(proc, status.parent?);
        status = Status::read(&dir).ok()?;
        if let Some(arguments) = arguments(&dir, &status)
            && let Some(found) = read(&arguments)
        {
            return Some(found);
        }
    }
    None
}

fn in_proc(proc: &Path, pid: i32) -> PathBuf {
    proc.join(pid.to_string())
}

/// Returns the arguments of a process that is conmon. Any process can declare other arguments, and call itself conmon; root of a
/// container also has uid 0. So the process must belong to root or to the user of this process, and run the host's conmon.
fn arguments(dir: &Path, status: &Status) -> Option<Vec<u8>> {
    if !status.may_run(PROGRAM) || !host_process::is_host_program(dir, PROGRAM) {
        return None;
    }
    host_process::arguments(dir).ok()
}

/// Whether a process of the container `id` is a child of its conmon, or of the runtime between them. Any user can create a cgroup with
/// the id of another user's container. `proc` is /proc.
pub(crate) fn is_parent_of(proc: &Path, id: &str, pid: i32) -> bool {
    let is_its_conmon = |found: &[u8]| ConmonOptions::of_container(found, id).map(drop);
    argument_of(proc, pid, is_its_conmon).is_some()
}

/// Returns the ids of the running containers with this name, of root and of the user of this process. `proc` is /proc.
pub(crate) fn ids_of(proc: &Path, name: &str) -> BTreeSet<String> {
    let mut ids = BTreeSet::new();
    for entry in std::fs::read_dir(proc).into_iter().flatten().flatten() {
        if !entry.file_name().as_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        // Processes that have ended are skipped.
        let dir = entry.path();
        if let Ok(status) = Status::read(&dir)
            && let Some(arguments) = arguments(&dir, &status)
        {
            ids.extend(id_argument(&arguments, name));
        }
    }
    ids
}

/// Returns the id in the arguments of the conmon of the container with this name.
fn id_argument(arguments: &[u8], name: &str) -> Option<String> {
    let options = ConmonOptions::parse(arguments)?;
    if options.value(b"-n", b"--name")? != name.as_bytes() {
        return None;
    }
    let id = options.value(b"-c", b"--cid")?;
    Some(String::from_utf8_lossy(id).into_owned())
}

/// The arguments of conmon.
struct ConmonOptions<'a>(Vec<&'a [u8]>);

impl<'a> ConmonOptions<'a> {
    /// Parses the arguments of a process, which proc_pid_cmdline(5) separates with NUL. Returns `None` for another program.
    fn parse(arguments: &'a [u8]) -> Option<Self> {
        let mut words = arguments.split(|byte| *byte == 0);
        let program = Path::new(OsStr::from_bytes(words.next()?));
        if program.file_name()? != PROGRAM {
            return None;
        }
        Some(Self(words.collect()))
    }

    /// Parses the arguments of the conmon of the container `id`.
    fn of_container(arguments: &'a [u8], id: &str) -> Option<Self> {
        let options = Self::parse(arguments)?;
        if options.value(b"-c", b"--cid")? != id.as_bytes() {
            return None;
        }
        Some(options)
    }

    fn value(&self, short: &[u8], long: &[u8]) -> Option<&'a [u8]> {
        let place = self
            .0
            .iter()
            .position(|word| *word == short || *word == long)?;
        self.0.get(place + 1).copied()
    }
}

/// Returns the name in the arguments of the conmon of the container `id`.
fn name_argument(arguments: &[u8], id: &str) -> Option<String> {
    let name = ConmonOptions::of_container(arguments, id)?.value(b"-n", b"--name")?;
    Some(String::from_utf8_lossy(name).into_owned())
}

/// Returns the bundle in the arguments of the conmon of the container `id`.
fn bundle_argument(arguments: &[u8], id: &str) -> Option<PathBuf> {
    Some(
        OsStr::from_bytes(ConmonOptions::of_container(arguments, id)?.value(b"-b", b"--bundle")?)
            .into(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn names() {
        let name = |text: &str| name_argument(text.replace(' ', "\0").as_bytes(), "aa1");
        assert_eq!(
            name("/usr/bin/conmon --api-version 1 -c aa1 -u aa1 -n web --exit-dir /e -s")
                .as_deref(),
            Some("web")
        );
        assert_eq!(
            name("conmon --cid aa1 --name k8s_main").as_deref(),
            Some("k8s_main")
        );
        assert_eq!(
            name("/usr/bin/conmon -c bb2 -n web"),
            None,
            "another container"
        );
        let bundle = bundle_argument(
            b"/usr/bin/conmon\0-c\0aa1\0-b\0/storage/aa1/userdata\0-n\0web",
            "aa1",
        );
        assert_eq!(bundle, Some("/storage/aa1/userdata".into()));
        assert_eq!(name("/usr/bin/conmon -c aa1 -n"), None);
        assert_eq!(name("/usr/bin/runc create -c aa1 -n web"), None);
        assert_eq!(name(""), None);
    }

    /// Creates a process in `proc`: the files that proc(5) has for it.
    fn process(proc: &Path, pid: &str, arguments: &str) {
        let dir = proc.join(pid);
        std::fs::create_dir_all(dir.join("ns")).unwrap();
        symlink("pid:[1]", dir.join("ns/pid")).unwrap();
        symlink(proc.join("conmon"), dir.join("exe")).unwrap();
        std::fs::write(dir.join("cmdline"), arguments.replace(' ', "\0")).unwrap();
        let uid = nix::unistd::geteuid();
        let status = format!("Name:\tconmon\nPPid:\t1\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n");
        std::fs::write(dir.join("status"), status).unwrap();
    }

    #[test]
    fn ids() {
        let proc = tempfile::tempdir().unwrap();
        let path = |name: &str| proc.path().join(name);
        std::fs::write(path("conmon"), "the program").unwrap();
        for (pid, arguments) in [
            ("10", "/usr/bin/conmon -c aa1 -u aa1 -n web -s"),
            ("11", "/usr/bin/conmon -c bb2 -u bb2 -n db -s"),
            ("12", "/usr/bin/conmon -c cc3 --name twice"),
            ("13", "conmon --cid dd4 -n twice"),
            ("14", "/usr/bin/runc -c ee5 -n web"),
            ("self", "conmon -c ff6 -n web"),
        ] {
            process(proc.path(), pid, arguments);
        }
        std::fs::create_dir(path("15")).unwrap();
        // What another user, or root of a container, can start: another user, another program, another PID namespace, another name.
        for pid in ["20", "21", "22", "23"] {
            process(proc.path(), pid, "conmon -c 0bad -n web");
        }
        let other = "Name:\tconmon\nPPid:\t1\nUid:\t7\t7\t7\t7\n";
        std::fs::write(path("20/status"), other).unwrap();
        std::fs::remove_file(path("21/exe")).unwrap();
        symlink(path("elsewhere/conmon"), path("21/exe")).unwrap();
        std::fs::remove_file(path("22/ns/pid")).unwrap();
        symlink("pid:[2]", path("22/ns/pid")).unwrap();
        std::fs::write(
            path("23/status"),
            "Name:\tpython3\nPPid:\t1\nUid:\t0\t0\t0\t0\n",
        )
        .unwrap();
        for (name, ids) in [
            ("web", &["aa1"][..]),
            ("db", &["bb2"]),
            ("twice", &["cc3", "dd4"]),
            ("x", &[]),
            ("", &[]),
        ] {
            assert_eq!(Vec::from_iter(ids_of(proc.path(), name)), ids, "{name}");
        }
    }
}
