//! Handles mounts as file descriptors: a mount is cloned and restricted while it is detached, then attached to its target.
//!
//! These calls take no path of a container, so a path cannot change its meaning between two of them. [`clone_tree`]
//! and [`attach`] correspond to `mount --bind -o ro,… SOURCE TARGET`, but the mount is never visible without its
//! restrictions. See open_tree(2), mount_setattr(2) and move_mount(2); all of them exist since Linux 5.12.
//!
//! [`in_place`] makes the same mounts with mount(2), for earlier kernels and for seccomp profiles that deny these calls. It
//! names source and target with the magic links of their file descriptors.
#![allow(
    unsafe_code,
    reason = "mount_setattr, open_tree_attr and statmount have no safe wrapper in nix or rustix"
)]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};

use super::answer;

pub mod in_place;
mod label;
pub mod statmount;

pub use label::Label;

/// The mount calls that this kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// The calls for detached mounts
    Detached,
    /// Only mount(2), see [`in_place`]
    InPlace,
}

/// Tests which mount calls the kernel has, with arguments that have no effect. One call that is missing, or that a seccomp filter
/// denies, makes the answer [`Api::InPlace`]. The kernel has all of them if it has mount_setattr(2), but a filter can deny any of them, and
/// the first that was denied would end a setup that has begun. fsopen(2) and its like are not tested: see [`new_tmpfs`].
#[must_use]
pub fn api() -> Api {
    let answers = [
        rustix::mount::open_tree(CWD, c"", OpenTreeFlags::OPEN_TREE_CLONE).map(drop),
        rustix::mount::move_mount(CWD, c"", CWD, c"", MoveMountFlags::empty()),
        set_attr(rustix::stdio::stdin(), &MountAttr::default(), 0),
    ];
    if answers.into_iter().any(|answer| is_denied(answer.err())) {
        Api::InPlace
    } else {
        Api::Detached
    }
}

/// Whether the kernel lacks a call, or a seccomp filter denies it: filters answer with ENOSYS or EPERM. Without CAP_SYS_ADMIN the kernel
/// answers EPERM too, but then mount(2) fails as well.
const fn is_denied(errno: Option<Errno>) -> bool {
    matches!(errno, Some(Errno::NOSYS | Errno::PERM))
}

/// Restrictions for the files below a mount in a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountAttrs(MountAttrFlags);

impl MountAttrs {
    /// For libraries and programs: read-only, and set-uid bits and device nodes have no effect.
    pub const DRIVER_FILE: Self = Self(
        MountAttrFlags::MOUNT_ATTR_RDONLY
            .union(MountAttrFlags::MOUNT_ATTR_NOSUID)
            .union(MountAttrFlags::MOUNT_ATTR_NODEV),
    );
    /// For device nodes. A read-only mount does not prevent open(2) of a device for writing: the mode of the node and the device
    /// cgroup decide that. It protects the inode, which is the host's. Without a user namespace, root in the container owns the
    /// inode, so that chmod(2), chown(2) and utimensat(2) would succeed without any capability.
    pub const DEVICE_NODE: Self = Self(
        MountAttrFlags::MOUNT_ATTR_RDONLY
            .union(MountAttrFlags::MOUNT_ATTR_NOSUID)
            .union(MountAttrFlags::MOUNT_ATTR_NOEXEC),
    );
    /// For sockets, because connect(2) works on a read-only mount, and for directories that programs of the container only read.
    pub const READ_ONLY: Self = Self(Self::DEVICE_NODE.0.union(MountAttrFlags::MOUNT_ATTR_NODEV));
    /// For a directory in which programs of the container may create a socket.
    pub const SHARED_DIRECTORY: Self = Self(
        MountAttrFlags::MOUNT_ATTR_NOSUID
            .union(MountAttrFlags::MOUNT_ATTR_NODEV)
            .union(MountAttrFlags::MOUNT_ATTR_NOEXEC),
    );
    /// For an overlay over a directory of the image: programs in it can run, and nothing can be written to it.
    pub const LAYER: Self = Self(MountAttrFlags::MOUNT_ATTR_RDONLY);
    /// For files with information about the driver.
    pub const PROC_FILE: Self = Self(Self::DRIVER_FILE.0.union(MountAttrFlags::MOUNT_ATTR_NOEXEC));
}

/// Returns a detached bind mount of `source`, a file or a directory without the mounts below it, with `attrs`.
///
/// # Errors
/// The errors of [`restrict`] and of open_tree(2): ENOSYS before Linux 5.2, EPERM without CAP_SYS_ADMIN.
pub fn clone_tree(source: impl AsFd, attrs: MountAttrs) -> io::Result<OwnedFd> {
    // Without AT_RECURSIVE. In a user namespace, the kernel then fails with EINVAL if that would show files which a locked mount
    // below covers (`has_locked_children` in fs/namespace.c; mount_namespaces(7)).
    clone_with(source.as_fd(), c"", OpenTreeFlags::AT_EMPTY_PATH, attrs)
}

/// Returns a detached bind mount of `path`, which no container chose, with `attrs`. If `path` is a symbolic link, the link is mounted.
///
/// # Errors
/// The errors of [`clone_tree`], and NotFound if nothing exists at `path`.
pub fn clone_tree_at(path: &Path, attrs: MountAttrs) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    clone_with(CWD, &path, OpenTreeFlags::AT_SYMLINK_NOFOLLOW, attrs)
}

fn clone_with(
    dir: BorrowedFd<'_>,
    path: &CStr,
    flags: OpenTreeFlags,
    attrs: MountAttrs,
) -> io::Result<OwnedFd> {
    /// A start clones about forty mounts, and asks once.
    static IS_MISSING: AtomicBool = AtomicBool::new(false);
    let flags = flags | OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if !IS_MISSING.load(Ordering::Relaxed) {
        match open_tree_attr(dir, path, flags, &MountAttr::restricted(attrs)) {
            // A seccomp filter denies unknown calls with EPERM, too.
            Err(Errno::NOSYS | Errno::PERM) => IS_MISSING.store(true, Ordering::Relaxed),
            result => return Ok(result?),
        }
    }
    let tree = rustix::mount::open_tree(dir, path, flags)?;
    restrict(&tree, attrs)?;
    Ok(tree)
}

#[derive(Default)]
#[repr(C)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

impl MountAttr {
    /// With `attrs`, and private: a clone of a shared mount is a member of the same peer group (mount_namespaces(7)).
    fn restricted(attrs: MountAttrs) -> Self {
        Self {
            attr_set: attrs.0.bits().into(),
            propagation: libc::MS_PRIVATE,
            ..Self::default()
        }
    }
}

/// Adds `attrs` to a mount and makes it private, so that a later mount on it does not propagate to the peers of its source.
///
/// Attributes are only added. In a user namespace the attributes of the source are locked, and clearing one fails with EPERM.
///
/// # Errors
/// The errors of mount_setattr(2): ENOSYS before Linux 5.12, EINVAL if `mount` is not the root of a mount.
pub fn restrict(mount: impl AsFd, attrs: MountAttrs) -> io::Result<()> {
    Ok(set_attr(
        mount.as_fd(),
        &MountAttr::restricted(attrs),
        size_of::<MountAttr>(),
    )?)
}

/// Calls open_tree_attr(2), which does the work of open_tree(2) and mount_setattr(2) since Linux 6.15.
fn open_tree_attr(
    dir: BorrowedFd<'_>,
    path: &CStr,
    flags: OpenTreeFlags,
    attr: &MountAttr,
) -> Result<OwnedFd, Errno> {
    /// The number is the same on all architectures that the driver supports, and libc does not have it yet.
    const SYS_OPEN_TREE_ATTR: libc::c_long = 467;
    // SAFETY: open_tree_attr(2) reads a NUL-terminated path and at most the given size from `attr`, which is a live MountAttr of this
    // size; it keeps neither pointer, and writes to no memory of ours.
    let result = unsafe {
        libc::syscall(
            SYS_OPEN_TREE_ATTR,
            dir.as_raw_fd(),
            path.as_ptr(),
            flags.bits(),
            std::ptr::from_ref(attr),
            size_of::<MountAttr>(),
        )
    };
    let fd = RawFd::try_from(answer::of(result)?).map_err(|_| Errno::BADF)?;
    // SAFETY: the call succeeded, so that it returned a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Calls mount_setattr(2). `size` is the size of [`MountAttr`] in bytes, or 0, for which the kernel returns EINVAL.
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
    answer::of(result).map(drop)
}

/// Attaches a detached mount to the file or directory `target`.
///
/// # Errors
/// The errors of move_mount(2): ENOTDIR if only one of both is a directory, EINVAL if `target` is in another mount namespace.
pub fn attach(mount: impl AsFd, target: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(mount, c"", target, c"", flags)?)
}

/// Attaches a detached mount to `path` in the directory `dir`. A symbolic link at `path` is not followed.
///
/// # Errors
/// The errors of [`attach`], and NotFound if nothing exists at `path`.
pub fn attach_at(mount: impl AsFd, dir: impl AsFd, path: &Path) -> io::Result<()> {
    Ok(rustix::mount::move_mount(
        mount,
        c"",
        dir,
        path,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )?)
}

/// Unmounts an attached mount.
///
/// # Errors
/// The errors of umount2(2): EINVAL if the file is not the root of a mount.
pub fn detach(mount: BorrowedFd<'_>) -> io::Result<()> {
    // umount2(2) takes only a path. The magic link of an fd leads to the mount that the fd was opened on. The fd keeps the mount
    // busy, so that the call would fail with EBUSY without MNT_DETACH.
    Ok(rustix::mount::unmount(
        super::in_root::fd_path(mount),
        UnmountFlags::DETACH,
    )?)
}

/// Returns a new, detached tmpfs with these options and this SELinux label. It is writable until [`restrict`] is called. Returns `None` if
/// the kernel lacks the calls, or a seccomp filter denies one of them: then [`in_place::mount_tmpfs`] does the same.
///
/// # Errors
/// The errors of fsopen(2), fsconfig(2) and fsmount(2): EINVAL for an unknown option or label.
pub fn new_tmpfs(options: &[(&CStr, &CStr)], label: Option<&Label>) -> io::Result<Option<OwnedFd>> {
    match open_tmpfs(options, label) {
        Err(errno) if is_denied(Some(errno)) => Ok(None),
        created => Ok(Some(created?)),
    }
}

fn open_tmpfs(options: &[(&CStr, &CStr)], label: Option<&Label>) -> Result<OwnedFd, Errno> {
    let fs = rustix::mount::fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        rustix::mount::fsconfig_set_string(&fs, *key, *value)?;
    }
    // SELinux accepts a label only for a new superblock, and not in a remount. fsconfig(2) takes one value, so that the commas of the
    // label need no quotes here.
    if let Some(label) = label {
        rustix::mount::fsconfig_set_string(&fs, c"context", label.as_str())?;
    }
    rustix::mount::fsconfig_create(&fs)?;
    let attrs = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attrs)
}
