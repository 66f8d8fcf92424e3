//! Mounts as file descriptors: cloned and restricted while detached, attached fd to fd.
//!
//! No path is given to any of these calls, so none can mean something else the second time. Shell equivalent of
//! [`clone_tree`] + [`restrict`] + [`attach`]: `mount --bind -o ro,… SOURCE TARGET`, but never visible half done.
//! See open_tree(2), mount_setattr(2), move_mount(2). Linux 5.12.
//!
//! For kernels before that, and seccomp profiles that refuse these calls, there is [`in_place`]: the same mounts by
//! mount(2), named by the magic links of fds instead of by paths.
#![allow(unsafe_code, reason = "mount_setattr and statmount have no safe wrapper in nix or rustix")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::libc;
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};

pub mod in_place;
mod label;
pub mod statmount;

pub use label::Label;

/// How this kernel lets us mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// By fds of detached mounts
    Detached,
    /// By mount(2) alone: [`in_place`]
    InPlace,
}

/// Asks the kernel with calls that cannot do anything: one is enough that it does not know, or that a filter refuses.
#[must_use]
pub fn api() -> Api {
    let nothing = rustix::stdio::stdin();
    let answers = [
        rustix::mount::open_tree(CWD, c"", OpenTreeFlags::OPEN_TREE_CLONE).map(drop),
        rustix::mount::move_mount(CWD, c"", CWD, c"", MoveMountFlags::empty()),
        rustix::mount::fsopen(c"", FsOpenFlags::empty()).map(drop),
        rustix::mount::fsconfig_create(nothing),
        rustix::mount::fsmount(nothing, FsMountFlags::empty(), MountAttrFlags::empty()).map(drop),
        set_attr(nothing, &MountAttr::default(), 0),
    ];
    // Without CAP_SYS_ADMIN it is EPERM as well, but then nothing mounts.
    let refused = |answer: &Result<(), Errno>| matches!(answer, Err(Errno::NOSYS | Errno::PERM));
    if answers.iter().any(refused) { Api::InPlace } else { Api::Detached }
}

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
    /// Device nodes. Read-only, which open(2) for writing does not mind for a device: its mode and the device cgroup decide
    /// that. It is the inode that must not be written to, for it is the host's: root of a container owns it there, too, and
    /// chmod(2), chown(2) and utimensat(2) need no capability then.
    pub const DEVICE_NODE: Self = Self(
        MountAttrFlags::MOUNT_ATTR_RDONLY
            .union(MountAttrFlags::MOUNT_ATTR_NOSUID)
            .union(MountAttrFlags::MOUNT_ATTR_NOEXEC),
    );
    /// Sockets: connect(2) works on a read-only mount.
    pub const SOCKET: Self = Self(Self::DEVICE_NODE.0.union(MountAttrFlags::MOUNT_ATTR_NODEV));
    /// A directory in which programs of the container may have to create a socket of their own.
    pub const SHARED_DIRECTORY: Self = Self(
        MountAttrFlags::MOUNT_ATTR_NOSUID
            .union(MountAttrFlags::MOUNT_ATTR_NODEV)
            .union(MountAttrFlags::MOUNT_ATTR_NOEXEC),
    );
    /// A layer over a directory of the image: programs run from it, nothing is written to it.
    pub const LAYER: Self = Self(MountAttrFlags::MOUNT_ATTR_RDONLY);
    /// Information only.
    pub const PROC_FILE: Self = Self(Self::DRIVER_FILE.0.union(MountAttrFlags::MOUNT_ATTR_NOEXEC));
}

/// A detached copy of the mount at `source`: a single file, or a directory without what is mounted below it.
pub fn clone_tree(source: impl AsFd) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(rustix::mount::open_tree(source, c"", flags)?)
}

/// The same of what is at `path`, a path chosen by us; of a link itself.
pub fn clone_tree_at(path: &Path) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
    Ok(rustix::mount::open_tree(CWD, path, flags)?)
}

#[derive(Default)]
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
    let attr = MountAttr { attr_set: attrs.0.bits().into(), propagation: libc::MS_PRIVATE, ..MountAttr::default() };
    Ok(set_attr(mount.as_fd(), &attr, size_of::<MountAttr>())?)
}

/// `size` is that of [`MountAttr`], or 0, which is answered with EINVAL.
fn set_attr(mount: BorrowedFd<'_>, attr: &MountAttr, size: usize) -> Result<(), Errno> {
    // SAFETY: mount_setattr(2) reads at most `size` bytes from `attr`, which is a live MountAttr of at least that size,
    // and a NUL-terminated path from `c""`; it keeps neither pointer, and writes to no memory of ours.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            std::ptr::from_ref(attr),
            size.min(size_of::<MountAttr>()),
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// Puts a detached mount on the file or directory `target`.
pub fn attach(mount: impl AsFd, target: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(mount, c"", target, c"", flags)?)
}

/// Puts a detached mount at `path` in the directory `dir`; a link there is not followed.
pub fn attach_at(mount: impl AsFd, dir: impl AsFd, path: &Path) -> io::Result<()> {
    Ok(rustix::mount::move_mount(mount, c"", dir, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// Takes an attached mount away again.
pub fn detach(mount: BorrowedFd<'_>) -> io::Result<()> {
    // umount2(2) has no fd form; the magic link of an fd means the mount that the fd was opened on, no other.
    Ok(rustix::mount::unmount(super::in_root::fd_path(mount), UnmountFlags::DETACH)?)
}

/// A new, detached tmpfs with these options and this label. Writable until [`restrict`]ed.
pub fn new_tmpfs(options: &[(&CStr, &CStr)], label: Option<&Label>) -> io::Result<OwnedFd> {
    let fs = rustix::mount::fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        rustix::mount::fsconfig_set_string(&fs, *key, *value)?;
    }
    if let Some(label) = label {
        rustix::mount::fsconfig_set_string(&fs, c"context", label.as_str())?;
    }
    rustix::mount::fsconfig_create(&fs)?;
    let attrs =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attrs)?)
}
