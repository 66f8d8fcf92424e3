//! Drops the privileges of a process before it loads the driver's library. The process cannot regain them.

use std::fs::File;
use std::io;
use std::path::Path;

use nix::unistd::{Gid, Uid};
use rustix::thread::CapabilitySets;
use serde::{Deserialize, Serialize};

use super::{child, landlock, process, seccomp};

pub use super::landlock::{Access, Files};
pub use rustix::thread::CapabilitySet;

/// The user and group of the child.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The real, effective and saved user id
    pub uid: u32,
    /// The real, effective and saved group id, which is also the only supplementary group
    pub gid: u32,
}

/// What a confined process keeps.
#[derive(Debug)]
pub struct Kept<'a> {
    /// Its root directory
    pub root: &'a Path,
    /// Its user and group. `None` means that they are not changed.
    pub identity: Option<Identity>,
    /// Its capabilities, which it must have already
    pub capabilities: CapabilitySet,
    /// The files that it may open. They are closed.
    pub files: Files,
}

/// Drops what a library does not need that uses devices: the environment, all other kernel capabilities including the bounding
/// set, and the ability to gain any by execve(2). [`landlock::restrict`] limits the files that it opens, and [`seccomp::restrict`] the
/// system calls. This process must have one thread. `pipe` is the pipe to the parent process.
///
/// # Errors
/// If a privilege cannot be dropped. A kernel without Landlock or without filters for system calls is not an error.
pub fn confine(kept: Kept<'_>, pipe: &File) -> io::Result<()> {
    process::clear_environment();
    if kept.root != Path::new("/") {
        nix::unistd::chroot(kept.root)?;
        nix::unistd::chdir("/")?;
    }
    drop_bounding_set();
    if let Some(Identity { uid, gid }) = kept.identity {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        nix::unistd::setgroups(&[gid])?;
        nix::unistd::setresgid(gid, gid, gid)?;
        nix::unistd::setresuid(uid, uid, uid)?;
    }
    rustix::thread::set_no_new_privs(true)?;
    keep_caps(kept.capabilities)?;
    landlock::restrict(kept.files)?;
    child::die_with_parent(pipe)?;
    seccomp::restrict()
}

/// Clears the bounding set. This requires CAP_SETPCAP, so it happens before the user is changed.
fn drop_bounding_set() {
    for cap in CapabilitySet::all() {
        // EPERM means that an unprivileged caller lacks CAP_SETPCAP, EINVAL that the kernel does not have the capability.
        rustix::thread::remove_capability_from_bounding_set(cap).ok();
    }
}

pub(super) fn keep_caps(kept: CapabilitySet) -> io::Result<()> {
    rustix::thread::clear_ambient_capability_set()?;
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: CapabilitySet::empty(),
        },
    )?;
    Ok(())
}

#[cfg(test)]
mod tests;
