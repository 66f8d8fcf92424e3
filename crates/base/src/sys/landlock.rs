//! Restricts this process with Landlock, which needs no privilege and also applies to root.
//! <https://docs.kernel.org/userspace-api/landlock.html>
#![allow(unsafe_code, reason = "neither nix nor rustix has the calls")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::libc;
use rustix::fs::{CWD, Mode, OFlags};

const CREATE_RULESET_VERSION: u32 = 1;
const RULE_PATH_BENEATH: libc::c_int = 1;

/// Bits of `LANDLOCK_ACCESS_FS_*`. The rule set does not handle the bits for reading, so reading stays permitted.
const EXECUTE: u64 = 1;
const WRITE_FILE: u64 = 1 << 1;
/// Removing directories and files, and creating character devices, directories, files, sockets, fifos, block devices and links
const REMOVE_AND_MAKE: u64 = 0b1_1111_1111 << 4;
/// Version 2: linking or renaming a file to another directory. Version 1 always denies it.
const REFER: u64 = 1 << 13;
/// Version 3: truncate(2)
const TRUNCATE: u64 = 1 << 14;
/// Version 6: signals to processes outside of the rule set
const SCOPE_SIGNAL: u64 = 1 << 1;

#[derive(Default)]
#[repr(C)]
struct RulesetAttr {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

#[repr(C, packed)]
struct PathBeneathAttr {
    allowed_access: u64,
    parent_fd: i32,
}

/// Returns the version of Landlock that the kernel supports, or 0 if it has none.
#[must_use]
pub fn version() -> i64 {
    // SAFETY: with this flag landlock_create_ruleset(2) takes NULL and 0, and returns a number.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<RulesetAttr>(),
            0_usize,
            CREATE_RULESET_VERSION,
        )
    };
    version.max(0)
}

/// Restricts this process and its children: they cannot open files for writing outside of /dev, create, rename or remove files,
/// execute programs, or signal other processes.
///
/// The driver's library works under these restrictions. It opens device nodes for reading and writing, reads `/proc` and `/sys`, and
/// connects to the socket of nvidia-persistenced, which Landlock does not restrict. The only program that it starts is
/// nvidia-modprobe, whose set-uid bit has no effect in a process with no_new_privs.
///
/// # Errors
/// If a call of Landlock fails. Without Landlock, or if a seccomp filter denies it, the process is not restricted, and that is not an
/// error.
pub fn restrict() -> io::Result<()> {
    let version = version();
    let mut attr = RulesetAttr { handled_access_fs: EXECUTE | WRITE_FILE | REMOVE_AND_MAKE, ..RulesetAttr::default() };
    for (since, bit) in [(2, REFER), (3, TRUNCATE)] {
        attr.handled_access_fs |= if version >= since { bit } else { 0 };
    }
    let mut size = size_of::<u64>();
    if version >= 6 {
        attr.scoped = SCOPE_SIGNAL;
        size = size_of::<RulesetAttr>();
    }
    if version == 0 {
        return Ok(());
    }
    // SAFETY: `attr` is a landlock_ruleset_attr of at least `size` bytes: older kernels know its first field only.
    let fd = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attr, size, 0_u32) };
    let fd = i32::try_from(Errno::result(fd)?).map_err(|_| Errno::EBADF)?;
    // SAFETY: the kernel has just made this descriptor (close-on-exec) for this call; nothing else owns it.
    let rules = unsafe { OwnedFd::from_raw_fd(fd) };
    for path in writable() {
        allow_writing_below(&rules, &path)?;
    }
    // SAFETY: landlock_restrict_self(2) takes a descriptor and flags, and touches no memory.
    let done = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0_u32) };
    match Errno::result(done) {
        // E2BIG means that 16 rule sets are in force already, which is the limit of the kernel.
        Ok(_) | Err(Errno::E2BIG) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Returns /dev and the driver's links in it. A rule for /dev does not cover the target of a link outside of it.
fn writable() -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let links = entries.filter(|entry| {
        let is_drivers = entry.file_name().to_str().is_some_and(|name| name.starts_with("nvidia"));
        is_drivers && entry.file_type().is_ok_and(|kind| kind.is_symlink())
    });
    std::iter::once("/dev".into()).chain(links.map(|entry| entry.path())).collect()
}

/// Adds a rule that permits writing below `path`. A missing path needs no rule.
fn allow_writing_below(rules: &OwnedFd, path: &Path) -> io::Result<()> {
    let Ok(place) = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else { return Ok(()) };
    let attr = PathBeneathAttr { allowed_access: WRITE_FILE, parent_fd: place.as_raw_fd() };
    // SAFETY: `attr` is a landlock_path_beneath_attr, which the kernel reads; `place` is open for as long as the call.
    let added = unsafe {
        libc::syscall(libc::SYS_landlock_add_rule, rules.as_raw_fd(), RULE_PATH_BENEATH, &raw const attr, 0_u32)
    };
    Errno::result(added)?;
    Ok(())
}
