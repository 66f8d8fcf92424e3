//! Restricts this process with Landlock, which needs no privilege and also applies to root.
//! <https://docs.kernel.org/userspace-api/landlock.html>
#![allow(unsafe_code, reason = "neither nix nor rustix has the calls")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::libc;
use rustix::fs::FileType;
use rustix::io::Errno;

use super::answer;

const CREATE_RULESET_VERSION: u32 = 1;
const RULE_PATH_BENEATH: libc::c_int = 1;

/// Bits of `LANDLOCK_ACCESS_FS_*`.
const EXECUTE: u64 = 1;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
/// Removing directories and files, and creating character devices, directories, files, sockets, fifos, block devices and links
const REMOVE_AND_MAKE: u64 = 0b1_1111_1111 << 4;
/// Version 2: linking or renaming a file to another directory. Version 1 always denies it.
const REFER: u64 = 1 << 13;
/// Version 3: truncate(2)
const TRUNCATE: u64 = 1 << 14;
/// Version 5: ioctl(2) on devices that are opened from now on
const IOCTL_DEV: u64 = 1 << 15;

/// Version 4: `LANDLOCK_ACCESS_NET_*`, binding and connecting TCP sockets
const TCP: u64 = 0b11;

/// Version 6: `LANDLOCK_SCOPE_*`, abstract Unix sockets of processes outside of the rule set, and signals to them
const SCOPES: u64 = 0b11;

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

/// What a restricted process may do with a file, or with all files below a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// List the directory.
    List,
    /// Read.
    Read,
    /// Read and write, and use as a device.
    Use,
}

impl Access {
    const fn bits(self) -> u64 {
        match self {
            Self::List => READ_DIR,
            Self::Read => READ_DIR | READ_FILE,
            Self::Use => READ_DIR | READ_FILE | WRITE_FILE | IOCTL_DEV,
        }
    }
}

/// The files that a restricted process may open.
#[derive(Debug, Default)]
pub struct Files {
    /// Open files and directories (`O_PATH` suffices). The permission belongs to the file and not to its name: it does not apply to
    /// another file that gets the name later.
    pub allowed: Vec<(OwnedFd, Access)>,
    /// Whether only these files may be read. Otherwise the process may read any file that its user and groups can read.
    pub limits_reading: bool,
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

/// Restricts this process and its children to `files`: they cannot open other files for writing, create, rename or remove files,
/// execute programs, use TCP, or signal other processes. Files that are open already stay usable.
///
/// # Errors
/// If a call of Landlock fails. Without Landlock, or if a seccomp filter denies it, the process is not restricted, and that is not an
/// error.
pub fn restrict(files: Files) -> io::Result<()> {
    let version = version();
    if version == 0 {
        return Ok(());
    }
    let (attr, size) = attributes(version, files.limits_reading);
    // SAFETY: `attr` is a landlock_ruleset_attr of at least `size` bytes: older kernels know its first fields only.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            &raw const attr,
            size,
            0_u32,
        )
    };
    let fd = i32::try_from(answer::of(fd)?).map_err(|_| Errno::BADF)?;
    // SAFETY: the kernel has just made this descriptor (close-on-exec) for this call; nothing else owns it.
    let rules = unsafe { OwnedFd::from_raw_fd(fd) };
    for (place, access) in files.allowed {
        allow(&rules, &place, access.bits() & attr.handled_access_fs)?;
    }
    // SAFETY: landlock_restrict_self(2) takes a descriptor and flags, and touches no memory.
    let done = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0_u32) };
    match answer::of(done) {
        // E2BIG means that 16 rule sets are in force already, which is the limit of the kernel.
        Ok(_) | Err(Errno::TOOBIG) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Returns what the rules handle, which is denied without a rule, and the size of the structure in this version.
fn attributes(version: i64, limits_reading: bool) -> (RulesetAttr, usize) {
    let reading = if limits_reading {
        READ_FILE | READ_DIR
    } else {
        0
    };
    let since = |since: i64, bits: u64| if version >= since { bits } else { 0 };
    let attr = RulesetAttr {
        handled_access_fs: EXECUTE
            | WRITE_FILE
            | REMOVE_AND_MAKE
            | reading
            | since(2, REFER)
            | since(3, TRUNCATE)
            | since(5, IOCTL_DEV),
        handled_access_net: since(4, TCP),
        scoped: since(6, SCOPES),
    };
    let fields = match version {
        ..4 => 1,
        4 | 5 => 2,
        6.. => 3,
    };
    (attr, fields * size_of::<u64>())
}

/// Adds a rule that permits `bits` for a file, or below a directory.
fn allow(rules: &OwnedFd, place: &OwnedFd, bits: u64) -> io::Result<()> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(place)?.st_mode);
    // The kernel rejects a right for directories in the rule of a file (EINVAL).
    let bits = if kind == FileType::Directory {
        bits
    } else {
        bits & !READ_DIR
    };
    if bits == 0 {
        // The kernel rejects an empty rule (ENOMSG).
        return Ok(());
    }
    let attr = PathBeneathAttr {
        allowed_access: bits,
        parent_fd: place.as_raw_fd(),
    };
    // SAFETY: `attr` is a landlock_path_beneath_attr, which the kernel reads; `place` is open for as long as the call.
    let added = unsafe {
        libc::syscall(
            libc::SYS_landlock_add_rule,
            rules.as_raw_fd(),
            RULE_PATH_BENEATH,
            &raw const attr,
            0_u32,
        )
    };
    answer::of(added)?;
    Ok(())
}
