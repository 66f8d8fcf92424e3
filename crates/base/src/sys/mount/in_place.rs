//! Mounts by mount(2), for kernels without detached ones (Linux before 5.12).
//!
//! Source and target are fds still: their magic links in /proc/self/fd lead to what was opened and checked, whatever
//! has become of the name since. Both must be of our own mount namespace. What is different: for a moment a mount is
//! there without its restrictions. The container's own process has not started then.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::StatVfsMountFlags;
use rustix::mount::{MountAttrFlags, MountFlags, MountPropagationFlags, UnmountFlags};

use super::{Label, MountAttrs};
use crate::sys::in_root::fd_path;

/// `mount --bind SOURCE TARGET`. `target` stays what is below the new mount.
pub fn bind(source: impl AsFd, target: impl AsFd) -> io::Result<()> {
    Ok(rustix::mount::mount_bind(fd_path(source.as_fd()), fd_path(target.as_fd()))?)
}

/// `mount -t tmpfs TARGET`, as [`super::new_tmpfs`].
pub fn mount_tmpfs(target: impl AsFd, options: &str, label: Option<&Label>) -> io::Result<()> {
    mount_tmpfs_with(target, MountFlags::NODEV, options, label)
}

/// The same, for device nodes that are mounted elsewhere: a bind mount of one inherits `nodev`.
pub fn mount_tmpfs_for_nodes(target: impl AsFd, options: &str, label: Option<&Label>) -> io::Result<()> {
    mount_tmpfs_with(target, MountFlags::empty(), options, label)
}

fn mount_tmpfs_with(target: impl AsFd, more: MountFlags, options: &str, label: Option<&Label>) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC | more;
    let options = std::ffi::CString::new(Label::after(label, options))?;
    Ok(rustix::mount::mount("tmpfs", fd_path(target.as_fd()), "tmpfs", flags, options.as_c_str())?)
}

/// `mount -t overlay TARGET`: `lower` and, over it, the directories `upper` and `work` of `layer`. What may not be done with
/// files of `lower`, as to run them, may not be done with those of the overlay; it can be written until it is restricted.
pub fn mount_overlay(target: impl AsFd, lower: impl AsFd, layer: &OwnedFd, label: Option<&Label>) -> io::Result<()> {
    let kept = kept_flags(rustix::fs::fstatvfs(&lower)?.f_flag).difference(MountFlags::RDONLY);
    let flags = MountFlags::NOSUID | MountFlags::NODEV | kept;
    let (lower, layer) = (fd_path(lower.as_fd()), fd_path(layer.as_fd()));
    let options = format!("lowerdir={lower},upperdir={layer}/upper,workdir={layer}/work");
    let options = std::ffi::CString::new(Label::after(label, &options))?;
    Ok(rustix::mount::mount("overlay", fd_path(target.as_fd()), "overlay", flags, options.as_c_str())?)
}

/// Takes a mount away again that could not be opened after it was made: whatever is mounted on `name` in `dir`, in our
/// mount namespace.
pub fn take_back(dir: impl AsFd, name: &Path) -> io::Result<()> {
    let path = Path::new(&fd_path(dir.as_fd())).join(name);
    Ok(rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?)
}

/// As [`super::restrict`]; `mount` must be the root of a mount.
pub fn restrict(mount: impl AsFd, attrs: MountAttrs) -> io::Result<()> {
    let path = fd_path(mount.as_fd());
    // A remount sets all flags anew, and in a user namespace those of the source are locked: leaving one out is EPERM.
    let kept = rustix::fs::fstatvfs(&mount)?.f_flag;
    let flags = flags_of(attrs) | kept_flags(kept);
    rustix::mount::mount_remount(&path, MountFlags::BIND | flags, c"")?;
    Ok(rustix::mount::mount_change(&path, MountPropagationFlags::PRIVATE)?)
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

/// The flags that statvfs(3) tells of a mount have the same values as those of mount(2), but for the last.
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
