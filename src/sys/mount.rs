//! Mounts as file descriptors: cloned and restricted while detached, attached fd to fd.
//!
//! No path is given to any of these calls, so none can mean something else the second time. Shell equivalent of
//! [`clone_tree`] + [`restrict`] + [`attach`]: `mount --bind -o ro,… SOURCE TARGET`, but never visible half done.
//! See open_tree(2), mount_setattr(2), move_mount(2). Linux 5.12.
#![allow(unsafe_code, reason = "mount_setattr has no safe wrapper in nix or rustix")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::libc;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};

/// What a process in the container may not do with the files below a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountAttrs(MountAttrFlags);

impl MountAttrs {
    /// Libraries, programs: cannot be changed, and a set-uid bit or device node among them is dead.
    pub const DRIVER_FILE: Self = Self(
        MountAttrFlags::MOUNT_ATTR_RDONLY
            .union(MountAttrFlags::MOUNT_ATTR_NOSUID)
            .union(MountAttrFlags::MOUNT_ATTR_NODEV),
    );
    /// Device nodes. Not read-only: open(2) for writing of a device is decided by its mode and the device cgroup.
    pub const DEVICE_NODE: Self = Self(MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NOEXEC));
    /// Sockets, and directories of them: used, not run.
    pub const IPC: Self = Self(Self::DEVICE_NODE.0.union(MountAttrFlags::MOUNT_ATTR_NODEV));
    /// Information only.
    pub const PROC_FILE: Self = Self(Self::DRIVER_FILE.0.union(MountAttrFlags::MOUNT_ATTR_NOEXEC));
}

/// A detached copy of the mount at `source`: a single file, or a directory without what is mounted below it.
pub fn clone_tree(source: impl AsFd) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(rustix::mount::open_tree(source, c"", flags)?)
}

#[repr(C)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

/// Adds `attrs` to a mount and makes it private, so that nothing mounted on it later reaches its source's peers.
///
/// Attributes are only ever added: in a user namespace those of the source's mount are locked, and clearing one
/// fails with EPERM.
pub fn restrict(mount: impl AsFd, attrs: MountAttrs) -> io::Result<()> {
    let attr =
        MountAttr { attr_set: u64::from(attrs.0.bits()), attr_clr: 0, propagation: libc::MS_PRIVATE, userns_fd: 0 };
    // SAFETY: mount_setattr(2) reads `size` bytes from `attr`, which is a live MountAttr of exactly that size, and a
    // NUL-terminated path from `c""`; it keeps neither pointer, and writes to no memory of ours.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of::<MountAttr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Puts a detached mount on the file or directory `target`.
pub fn attach(mount: impl AsFd, target: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(mount, c"", target, c"", flags)?)
}

/// Takes an attached mount away again.
pub fn detach(mount: BorrowedFd<'_>) -> io::Result<()> {
    // umount2(2) has no fd form; the magic link of an fd means the mount that the fd was opened on, no other.
    Ok(rustix::mount::unmount(super::in_root::fd_path(mount), UnmountFlags::DETACH)?)
}

/// A new, detached tmpfs whose top directory has this mode (octal digits). Writable until [`restrict`]ed.
pub fn new_tmpfs(mode: &CStr) -> io::Result<OwnedFd> {
    let fs = rustix::mount::fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&fs, c"mode", mode)?;
    rustix::mount::fsconfig_set_string(&fs, c"size", c"1m")?;
    rustix::mount::fsconfig_create(&fs)?;
    let attrs =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attrs)?)
}
