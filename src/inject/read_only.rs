//! A rootfs that nothing can be created in: a layer of ours over those of its directories that need a new name.
//!
//! The layer is an overlay whose upper directory is a tmpfs, so the image is not touched. Nothing of it is writable
//! to the container either: [`seal`] makes it read-only, like what is below it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use rustix::fs::{Mode, OFlags};

use super::mountinfo;
use super::source::open_in;
use crate::error::Failure;
use crate::sys::in_root::{Root, real_path};
use crate::sys::mount::{self, MountAttrs, in_place};

/// Puts a layer over the directory `path` of a rootfs. The mounts are pushed to `done`; the last is the layer.
///
/// # Errors
/// If something else is mounted below it, which the layer would hide, or the kernel refuses.
pub(super) fn cover(rootfs: &Root, path: &Path, mountinfo: &[u8], done: &mut Vec<Rc<OwnedFd>>) -> Result<()> {
    let open = || rootfs.open_at(path, OFlags::PATH | OFlags::DIRECTORY);
    let lower = open()?;
    // Compared with mount points only, and what it may lead to is a refusal.
    let place = real_path(lower.as_fd())?;
    ensure!(
        place != real_path(rootfs.as_fd())? && !mountinfo::any_below(mountinfo, &place),
        "other files are mounted in the read-only directory {:?}",
        Path::new("/").join(path)
    );
    in_place::mount_tmpfs(&lower, c"mode=0755,size=1m").context("mount a tmpfs")?;
    let tmpfs = Rc::new(open()?);
    done.push(Rc::clone(&tmpfs));
    for name in ["upper", "work"] {
        rustix::fs::mkdirat(&tmpfs, name, Mode::from_raw_mode(0o755))?;
    }
    in_place::mount_overlay(&tmpfs, &lower, &tmpfs).with_context(|| {
        Failure::new(
            format!("cannot mount an overlay over the read-only directory {:?}", Path::new("/").join(path)),
            "start the container from an image that can be written, or load the kernel module \"overlay\"",
        )
    })?;
    done.push(open()?.into());
    Ok(())
}

/// Makes a layer read-only.
///
/// # Errors
/// If the kernel refuses.
pub(super) fn seal(layer: &OwnedFd) -> Result<()> {
    in_place::restrict(layer, MountAttrs::LAYER).context("remount a layer read-only")
}

/// Hides the file `name` in the directory `path` of a rootfs behind one of ours with this content; returns its mount.
///
/// A tmpfs is on that directory for as long as it takes to mount a file of it: what is mounted keeps it.
///
/// # Errors
/// If the kernel refuses.
pub(super) fn hide_file(rootfs: &Root, path: &Path, name: &OsStr, point: &OwnedFd, content: &[u8]) -> Result<OwnedFd> {
    let open = || rootfs.open_at(path, OFlags::PATH | OFlags::DIRECTORY);
    let dir = open()?;
    in_place::mount_tmpfs(&dir, c"mode=0755,size=32m").context("mount a tmpfs")?;
    let tmpfs = open()?;
    let write = || -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&tmpfs, name, flags, Mode::from_raw_mode(0o644))?;
        File::from(file).write_all(content)?;
        Ok(in_place::bind(open_in(&tmpfs, name)?, point)?)
    };
    let written = write();
    mount::detach(tmpfs.as_fd()).context("unmount a tmpfs")?;
    written.context("mount a file of ours")?;
    let restrict = || -> Result<OwnedFd> {
        let mounted = open_in(&dir, name)?;
        in_place::restrict(&mounted, MountAttrs::PROC_FILE).context("remount it restricted")?;
        Ok(mounted)
    };
    restrict().inspect_err(|_| in_place::take_back(&dir, Path::new(name)))
}
