//! conmon, the parent of a container's runtime in Podman and CRI-O. Its arguments contain the name of the container, which config.json
//! does not.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use base::sys::proc_file;

/// The processes between a container's init process and conmon: the runtime, and for crun a second process of it.
const BETWEEN: usize = 2;

/// Returns the name of the container `id` whose init process is `init`. It is the engine's, so its user has chosen it. Returns `None`
/// without conmon.
pub(crate) fn name_of(id: &str, init: i32) -> Option<String> {
    argument_of(id, init, name_argument)
}

/// Returns the bundle of the container `id` whose init process is `init`.
pub(crate) fn bundle_of(id: &str, init: i32) -> Option<PathBuf> {
    argument_of(id, init, bundle_argument)
}

/// Returns what `read` returns for the arguments of a parent of the process.
fn argument_of<T>(id: &str, init: i32, read: fn(&[u8], &str) -> Option<T>) -> Option<T> {
    let mut pid = init;
    for _ in 0..=BETWEEN {
        pid = proc_file::parent(&pid.to_string())?;
        let arguments = proc_file::read(format!("/proc/{pid}/cmdline")).ok()?;
        if let Some(found) = read(&arguments, id) {
            return Some(found);
        }
    }
    None
}

/// Returns the ids of the running containers with this name, from the arguments of all processes that are called conmon. Any user can start
/// such a process. So if root has processes with this name, only their ids are returned, and otherwise those of other users. `proc` is
/// /proc.
pub(crate) fn ids_of(proc: &Path, name: &str) -> BTreeSet<String> {
    let (mut of_root, mut of_others) = (BTreeSet::new(), BTreeSet::new());
    for entry in std::fs::read_dir(proc).into_iter().flatten().flatten() {
        if !entry.file_name().as_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        // Processes that have ended are skipped.
        let Ok(arguments) = proc_file::read(entry.path().join("cmdline")) else {
            continue;
        };
        let Some(id) = id_argument(&arguments, name) else {
            continue;
        };
        let is_root = entry.metadata().is_ok_and(|process| process.uid() == 0);
        if is_root {
            of_root.insert(id)
        } else {
            of_others.insert(id)
        };
    }
    if of_root.is_empty() {
        of_others
    } else {
        of_root
    }
}

/// Returns the id in the arguments of the conmon of the container with this name.
fn id_argument(arguments: &[u8], name: &str) -> Option<String> {
    let options = Options::parse(arguments)?;
    let id = options
        .value(b"-c", b"--cid")
        .filter(|_| options.value(b"-n", b"--name") == Some(name.as_bytes()))?;
    Some(String::from_utf8_lossy(id).into_owned())
}

/// The arguments of conmon.
struct Options<'a>(Vec<&'a [u8]>);

impl<'a> Options<'a> {
    /// Parses the arguments of a process, which proc_pid_cmdline(5) separates with NUL. Returns `None` for another program.
    fn parse(arguments: &'a [u8]) -> Option<Self> {
        let mut words = arguments.split(|byte| *byte == 0);
        let program = Path::new(OsStr::from_bytes(words.next()?));
        (program.file_name() == Some(OsStr::new("conmon"))).then(|| Self(words.collect()))
    }

    /// Parses the arguments of the conmon of the container `id`.
    fn of_container(arguments: &'a [u8], id: &str) -> Option<Self> {
        Self::parse(arguments)
            .filter(|options| options.value(b"-c", b"--cid") == Some(id.as_bytes()))
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
    let name = Options::of_container(arguments, id)?.value(b"-n", b"--name")?;
    Some(String::from_utf8_lossy(name).into_owned())
}

/// Returns the bundle in the arguments of the conmon of the container `id`.
fn bundle_argument(arguments: &[u8], id: &str) -> Option<PathBuf> {
    Some(OsStr::from_bytes(Options::of_container(arguments, id)?.value(b"-b", b"--bundle")?).into())
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn ids() {
        let proc = tempfile::tempdir().unwrap();
        for (pid, arguments) in [
            ("10", "/usr/bin/conmon -c aa1 -u aa1 -n web -s"),
            ("11", "/usr/bin/conmon -c bb2 -u bb2 -n db -s"),
            ("12", "/usr/bin/conmon -c cc3 --name twice"),
            ("13", "conmon --cid dd4 -n twice"),
            ("14", "/usr/bin/runc -c ee5 -n web"),
            ("self", "conmon -c ff6 -n web"),
        ] {
            std::fs::create_dir(proc.path().join(pid)).unwrap();
            std::fs::write(
                proc.path().join(pid).join("cmdline"),
                arguments.replace(' ', "\0"),
            )
            .unwrap();
        }
        std::fs::create_dir(proc.path().join("15")).unwrap();
        for (name, ids) in [
            ("web", &["aa1"][..]),
            ("db", &["bb2"]),
            ("twice", &["cc3", "dd4"]),
            ("x", &[]),
            ("", &[]),
        ] {
            assert_eq!(Vec::from_iter(ids_of(proc.path(), name)), ids, "{name}");
        }
        // Another user's process cannot claim the name of root's container.
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(proc.path().join("12"), Some(1000), None).unwrap();
            assert_eq!(Vec::from_iter(ids_of(proc.path(), "twice")), ["dd4"]);
        }
    }
}
