//! Mounts with mount(2), for kernels without detached mounts (Linux before 5.12).
//!
//! Source and target are still file descriptors: their magic links in /proc/self/fd lead to the files that were opened and
//! checked, even if a name has been replaced since. Both must be in the mount namespace of this process. In contrast to detached
//! mounts, a mount is visible without its restrictions for a moment, but the container's process has not started by then.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::StatVfsMountFlags;
use rustix::mount::{MountAttrFlags, MountFlags, MountPropagationFlags, UnmountFlags};

use super::{Label, MountAttrs};
use crate::sys::in_root::fd_path;

/// Runs `mount --bind SOURCE TARGET`. The fd `target` still refers to the file below the new mount.
///
/// # Errors
/// The errors of mount(2): EPERM without CAP_SYS_ADMIN, EINVAL if one of the files is in another mount namespace.
pub fn bind(source: impl AsFd, target: impl AsFd) -> io::Result<()> {
    Ok(rustix::mount::mount_bind(
        fd_path(source.as_fd()),
        fd_path(target.as_fd()),
    )?)
}

/// Runs `mount -t tmpfs TARGET`; like [`super::new_tmpfs`].
///
/// # Errors
/// The errors of mount(2): EPERM without CAP_SYS_ADMIN, EINVAL for an unknown option.
pub fn mount_tmpfs(target: impl AsFd, options: &str, label: Option<&Label>) -> io::Result<()> {
    mount_tmpfs_with(target, MountFlags::NODEV, options, label)
}

/// Like [`mount_tmpfs`], but without `nodev`, which bind mounts of the device nodes in it would inherit.
///
/// # Errors
/// The errors of [`mount_tmpfs`].
pub fn mount_tmpfs_for_nodes(
    target: impl AsFd,
    options: &str,
    label: Option<&Label>,
) -> io::Result<()> {
    mount_tmpfs_with(target, MountFlags::empty(), options, label)
}

fn mount_tmpfs_with(
    target: impl AsFd,
    more: MountFlags,
    options: &str,
    label: Option<&Label>,
) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC | more;
    let options = std::ffi::CString::new(Label::after(label, options))?;
    Ok(rustix::mount::mount(
        "tmpfs",
        fd_path(target.as_fd()),
        "tmpfs",
        flags,
        options.as_c_str(),
    )?)
}

/// Runs `mount -t overlay TARGET` with `lower` and the directories `upper` and `work` of `layer`. The overlay gets the
/// restrictions of `lower`, such as `noexec`, except for `ro`: it is writable until [`restrict`] is called.
///
/// # Errors
/// The errors of mount(2): EINVAL if the file system of `layer` cannot be the upper layer, ENODEV without overlayfs.
pub fn mount_overlay(
    target: impl AsFd,
    lower: impl AsFd,
    layer: &OwnedFd,
    label: Option<&Label>,
) -> io::Result<()> {
    let kept = kept_flags(rustix::fs::fstatvfs(&lower)?.f_flag).difference(MountFlags::RDONLY);
    let flags = MountFlags::NOSUID | MountFlags::NODEV | kept;
    // A colon separates lower directories, and a comma ends the option. The path of a directory of an image can contain both, and a
    // magic link contains neither.
    let (lower, layer) = (fd_path(lower.as_fd()), fd_path(layer.as_fd()));
    let options = format!("lowerdir={lower},upperdir={layer}/upper,workdir={layer}/work");
    let options = std::ffi::CString::new(Label::after(label, &options))?;
    Ok(rustix::mount::mount(
        "overlay",
        fd_path(target.as_fd()),
        "overlay",
        flags,
        options.as_c_str(),
    )?)
}

/// Unmounts `name` in `dir`, for a mount that could not be opened after it was made.
///
/// # Errors
/// The errors of umount2(2): EINVAL if `name` is not a mount.
pub fn take_back(dir: impl AsFd, name: &Path) -> io::Result<()> {
    let path = Path::new(&fd_path(dir.as_fd())).join(name);
    // Without UMOUNT_NOFOLLOW, umount2(2) would follow a link that has taken the place of the name, to any other mount.
    Ok(rustix::mount::unmount(
        path,
        UnmountFlags::DETACH | UnmountFlags::NOFOLLOW,
    )?)
}

/// Like [`super::restrict`]. `mount` must be the root of a mount.
///
/// # Errors
/// The errors of mount(2): EINVAL if `mount` is not the root of a mount.
pub fn restrict(mount: impl AsFd, attrs: MountAttrs) -> io::Result<()> {
    let path = fd_path(mount.as_fd());
    // A remount replaces all flags. In a user namespace the flags of the source are locked, and omitting one fails with EPERM.
    let kept = rustix::fs::fstatvfs(&mount)?.f_flag;
    let flags = flags_of(attrs) | kept_flags(kept);
    rustix::mount::mount_remount(&path, MountFlags::BIND | flags, c"")?;
    // A call of mount(2) does one thing: with MS_REMOUNT, it ignores the propagation.
    Ok(rustix::mount::mount_change(
        &path,
        MountPropagationFlags::PRIVATE,
    )?)
}

fn flags_of(attrs: MountAttrs) -> MountFlags {
    [
        (MountAttrFlags::MOUNT_ATTR_RDONLY, MountFlags::RDONLY),
        (MountAttrFlags::MOUNT_ATTR_NOSUID, MountFlags::NOSUID),
        (MountAttrFlags::MOUNT_ATTR_NODEV, MountFlags::NODEV),
        (MountAttrFlags::MOUNT_ATTR_NOEXEC, MountFlags::NOEXEC),
    ]
    .into_iter()
    .filter(|(attr, _)| attrs.0.contains(*attr))
    .map(|(_, flag)| flag)
    .collect()
}

/// Converts flags of statvfs(3) to flags of mount(2). Only `relatime` has another value.
fn kept_flags(kept: StatVfsMountFlags) -> MountFlags {
    /// `ST_RELATIME`
    const RELATIME: u64 = 0x1000;
    [
        (StatVfsMountFlags::RDONLY.bits(), MountFlags::RDONLY),
        (StatVfsMountFlags::NOSUID.bits(), MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV.bits(), MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC.bits(), MountFlags::NOEXEC),
        (StatVfsMountFlags::NOATIME.bits(), MountFlags::NOATIME),
        (StatVfsMountFlags::NODIRATIME.bits(), MountFlags::NODIRATIME),
        (RELATIME, MountFlags::RELATIME),
    ]
    .into_iter()
    .filter(|(bit, _)| kept.bits() & *bit != 0)
    .map(|(_, flag)| flag)
    .collect()
}
