//! Enters and compares namespaces, and examines the user namespace of this process.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::OnceLock;

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

use super::proc_file::{self, Length};

/// An open mount namespace.
#[derive(Debug)]
pub struct MountNs(OwnedFd);

impl MountNs {
    /// Opens the mount namespace of a process. The runtime names the process, which waits for the hook, so its PID is not reused.
    ///
    /// # Errors
    /// If the process does not exist, or belongs to another user and this process may not examine it.
    #[expect(clippy::disallowed_methods, reason = "opens files of proc(5)")]
    pub fn of_process(pid: i32) -> io::Result<Self> {
        Ok(Self(File::open(format!("/proc/{pid}/ns/mnt"))?.into()))
    }

    /// Returns the device and inode number, which identify the namespace.
    ///
    /// # Errors
    /// The errors of fstat(2).
    pub fn id(&self) -> io::Result<(u64, u64)> {
        let stat = rustix::fs::fstat(&self.0)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// Enters the namespace. The hook never returns from it, so it cannot use a path of the host by mistake afterwards.
    ///
    /// # Errors
    /// EINVAL while another thread shares the working directory and the root directory, EPERM without CAP_SYS_ADMIN; see setns(2).
    #[expect(clippy::disallowed_methods, reason = "the only caller")]
    pub fn enter(self) -> io::Result<()> {
        Ok(nix::sched::setns(
            self.0,
            nix::sched::CloneFlags::CLONE_NEWNS,
        )?)
    }
}

/// Returns the mount namespace of a process. Returns `None` if it cannot be read, as for the processes of the host in a user
/// namespace.
pub fn mount_ns_of(pid: &str) -> Option<(u64, u64)> {
    namespace_of(&Path::new("/proc").join(pid))
}

/// Returns the mount namespace of the process or thread with this directory below /proc.
fn namespace_of(proc_dir: &Path) -> Option<(u64, u64)> {
    let stat = rustix::fs::stat(proc_dir.join("ns/mnt")).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// Whether a hook at the createContainer stage shares the mount namespace of the runtime, which is the parent of the
/// container's first process, or of the host's first process.
pub fn in_mount_ns_of_runtime() -> bool {
    let runtime = proc_file::parent("self").and_then(|init| proc_file::parent(&init.to_string()));
    let runtime = runtime.is_some_and(|pid| shares_mount_ns(&pid.to_string()));
    runtime || (mount_ns_of("self").is_some() && mount_ns_of("self") == mount_ns_of("1"))
}

/// Whether all threads of a process are in our mount namespace. runc 1.2 and newer have one thread that enters the
/// namespace of the container to open the sources of its mounts, and it may be the one that /proc shows as the process.
pub fn shares_mount_ns(pid: &str) -> bool {
    let Some(own) = mount_ns_of("self") else {
        return false;
    };
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return false;
    };
    let mut namespaces = threads
        .flatten()
        .filter_map(|thread| namespace_of(&thread.path()))
        .peekable();
    namespaces.peek().is_some() && namespaces.all(|namespace| namespace == own)
}

/// Limits for [`other_mount_tables`].
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The number of namespaces
    pub namespaces: usize,
    /// The size of all tables together
    pub bytes: usize,
}

/// Passes the mount table of each other mount namespace in which a process runs to `see`, until `see` returns false.
///
/// The kernel shows a process only the mounts below its root directory, so a process in chroot(2) hides mounts of its namespace.
/// Therefore this function enters the namespaces, from which the process cannot return: only for a child that then ends. It opens
/// no path in them. If a namespace may not be entered, because it belongs to another user, the table of each of its processes is passed.
///
/// # Errors
/// If /proc cannot be read, or a limit is exceeded.
pub fn other_mount_tables(limits: Limits, mut see: impl FnMut(&[u8]) -> bool) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let proc = rustix::fs::openat(CWD, c"/proc", flags, Mode::empty())?;
    // After setns(2), /proc may belong to another PID namespace.
    let own = rustix::fs::openat(CWD, c"/proc/self", flags, Mode::empty())?;
    let mut seen = BTreeSet::from_iter(mount_ns_of("self"));
    let mut left = limits.bytes;
    let mut pass = |dir: &OwnedFd, name: &Path, left: &mut usize| -> io::Result<bool> {
        let Ok(file) =
            rustix::fs::openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        else {
            return Ok(true); // the process has ended
        };
        let table = proc_file::read_whole(File::from(file).take(*left as u64 + 1), Length::Unknown)
            .unwrap_or_default();
        *left = left.checked_sub(table.len()).ok_or_else(too_many)?;
        Ok(see(&table))
    };
    for pid in numbers(&proc, Path::new("."))? {
        let mut is_unknown = false;
        for thread in numbers(&proc, &Path::new(&pid).join("task")).unwrap_or_default() {
            let path = Path::new(&pid).join("task").join(thread).join("ns/mnt");
            let namespace = match rustix::fs::statat(&proc, &path, AtFlags::empty()) {
                Ok(stat) => (stat.st_dev, stat.st_ino),
                // The thread has ended since its directory was read.
                Err(Errno::NOENT | Errno::SRCH) => continue,
                Err(_) => {
                    is_unknown = true;
                    break;
                }
            };
            if !seen.insert(namespace) {
                continue;
            }
            if seen.len() > limits.namespaces {
                return Err(too_many());
            }
            let opened = rustix::fs::openat(
                &proc,
                &path,
                OFlags::RDONLY | OFlags::CLOEXEC,
                Mode::empty(),
            );
            match opened.map(|fd| MountNs(fd).enter()) {
                Ok(Ok(())) if !pass(&own, Path::new("mountinfo"), &mut left)? => return Ok(()),
                Ok(Ok(())) => {}
                // Another process may be in the same namespace.
                Err(Errno::NOENT | Errno::SRCH) => drop(seen.remove(&namespace)),
                _ => {
                    seen.remove(&namespace);
                    is_unknown = true;
                    break;
                }
            }
        }
        if is_unknown && !pass(&proc, &Path::new(&pid).join("mountinfo"), &mut left)? {
            return Ok(());
        }
    }
    Ok(())
}

fn too_many() -> io::Error {
    io::Error::other("there are too many mounts")
}

/// Returns the names in a directory of /proc that are numbers: processes or threads.
fn numbers(proc: &OwnedFd, path: &Path) -> io::Result<Vec<String>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let entries = rustix::fs::Dir::new(rustix::fs::openat(proc, path, flags, Mode::empty())?)?;
    let names = entries
        .flatten()
        .filter_map(|entry| Some(entry.file_name().to_str().ok()?.to_owned()));
    Ok(names
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
        .collect())
}

/// Creates a PID namespace for the children of this process. The first child becomes its process 1.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN.
pub(crate) fn new_pid_ns_for_children() -> io::Result<()> {
    Ok(nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWPID)?)
}

/// Whether this process is in a user namespace other than the initial one, as with rootless Podman. It can then neither create
/// device nodes nor change device cgroups, and ids of the host may not be mapped.
///
/// The result is cached: it changes only if the process enters another namespace, which this program does not do.
///
/// # Errors
/// If /proc cannot be read.
pub fn in_user_namespace() -> io::Result<bool> {
    static IN_ONE: OnceLock<bool> = OnceLock::new();
    if let Some(known) = IN_ONE.get() {
        return Ok(*known);
    }
    let is = !is_initial_uid_map(&proc_file::read_text("/proc/self/uid_map")?);
    Ok(*IN_ONE.get_or_init(|| is))
}

/// Returns the id that a user of this namespace has outside of it, or `None` if it is not mapped.
///
/// # Errors
/// If /proc cannot be read.
pub fn uid_outside(uid: u32) -> io::Result<Option<u32>> {
    Ok(outside(&proc_file::read_text("/proc/self/uid_map")?, uid))
}

/// Looks an id up in a map.
fn outside(map: &str, id: u32) -> Option<u32> {
    parse_id_map(map).find_map(|(inside, outside, count)| {
        let offset = id.checked_sub(inside)?;
        if offset < count {
            outside.checked_add(offset)
        } else {
            None
        }
    })
}

/// Parses lines of three numbers: the first id inside, the first id outside, and the count. See user_namespaces(7).
pub(super) fn parse_id_map(map: &str) -> impl Iterator<Item = (u32, u32, u32)> {
    map.lines().filter_map(|line| {
        let mut numbers = line.split_ascii_whitespace().map(str::parse::<u32>);
        Some((
            numbers.next()?.ok()?,
            numbers.next()?.ok()?,
            numbers.next()?.ok()?,
        ))
    })
}

/// Whether a map belongs to the initial namespace, which maps all ids to themselves. See user_namespaces(7).
fn is_initial_uid_map(map: &str) -> bool {
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_mapped_to_those_outside() {
        let map = "         0       1000          1\n         1     100000      65536\n";
        for (here, there) in [
            (0, Some(1000)),
            (1, Some(100_000)),
            (65_536, Some(165_535)),
            (65_537, None),
        ] {
            assert_eq!(outside(map, here), there, "{here}");
        }
        assert_eq!(outside("nonsense", 0), None);
        assert_eq!(outside("0 0 4294967295", 7), Some(7));
    }

    #[test]
    fn the_initial_map_is_recognized() {
        assert!(is_initial_uid_map("         0          0 4294967295\n"));
        assert!(!is_initial_uid_map(
            "         0       1000          1\n         1     100000      65536\n"
        ));
        assert!(!is_initial_uid_map(""));
    }
}
