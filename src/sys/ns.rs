//! Namespaces: entering the container's mount namespace, leaving its cgroup namespace, and knowing our own user namespace.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

/// The mount namespace of a process, open.
#[derive(Debug)]
pub struct MountNs(OwnedFd);

impl MountNs {
    /// Of the process `pid`, which the runtime named: it waits for this hook, so the number is not reused.
    pub fn of(pid: i32) -> io::Result<Self> {
        Ok(Self(File::open(format!("/proc/{pid}/ns/mnt"))?.into()))
    }

    /// Enters it, for good: the hook never comes back, so no host path can be used by mistake afterwards.
    ///
    /// The kernel refuses (EINVAL) while a second thread shares our working directory and root; see setns(2).
    #[expect(clippy::disallowed_methods, reason = "this is the one place")]
    pub fn enter(self) -> io::Result<()> {
        Ok(nix::sched::setns(self.0, nix::sched::CloneFlags::CLONE_NEWNS)?)
    }
}

/// Enters the cgroup namespace of the process `pid`: paths of cgroups then mean what they mean there.
#[expect(clippy::disallowed_methods, reason = "this is the one place")]
pub fn enter_cgroup_ns(pid: i32) -> io::Result<()> {
    let namespace = File::open(format!("/proc/{pid}/ns/cgroup"))?;
    Ok(nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWCGROUP)?)
}

/// Whether this process lives in a user namespace other than the initial one (rootless Podman).
///
/// There device nodes cannot be made and device cgroups not be written, and host ids may be unmapped.
pub fn in_user_namespace() -> io::Result<bool> {
    Ok(!is_initial_uid_map(&std::fs::read_to_string("/proc/self/uid_map")?))
}

/// The initial namespace maps all ids to themselves; see user_namespaces(7).
fn is_initial_uid_map(map: &str) -> bool {
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_initial_map_is_known() {
        assert!(is_initial_uid_map("         0          0 4294967295\n"));
        assert!(!is_initial_uid_map("         0       1000          1\n         1     100000      65536\n"));
        assert!(!is_initial_uid_map(""));
    }
}
