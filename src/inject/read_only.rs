//! A rootfs that nothing can be created in: a layer of ours over those of its directories that need a new name.
//!
//! The layer is an overlay whose upper directory is a tmpfs, so the image is not touched. Nothing of it is writable
//! to the container either: [`seal`] makes it read-only, like what is below it.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result};
use rustix::fs::{Mode, OFlags};

use super::source::open_in;
use super::{StillMounted, mountinfo};
use crate::error::{Failure, failure};
use crate::finding::catalog;
use crate::sys::in_root::{Root, real_path};
use crate::sys::mount::{self, Label, MountAttrs, in_place};
use crate::sys::proc_file;

/// A directory of a rootfs, and a tmpfs of ours that is mounted on it.
struct Scratch {
    below: OwnedFd,
    tmpfs: OwnedFd,
    /// The directory that `below` lies in, and its name there
    place: (OwnedFd, OsString),
}

impl Scratch {
    fn mount(rootfs: &Root, path: &Path, options: &str, label: Option<&Label>) -> Result<Self> {
        let open = |path| rootfs.open_at(path, OFlags::PATH | OFlags::DIRECTORY);
        let below = open(path)?;
        let place = (open(path.parent().unwrap_or(path))?, path.file_name().unwrap_or_default().to_owned());
        in_place::mount_tmpfs(&below, options, label).context("mount a tmpfs")?;
        match open(path) {
            Ok(tmpfs) => Ok(Self { below, tmpfs, place }),
            Err(error) => Err(take_away(&place, error.into())),
        }
    }

    /// Unmounts it, with what is mounted on it.
    fn unmount(&self) -> Result<()> {
        mount::detach(self.tmpfs.as_fd())
            .or_else(|error| in_place::take_back(&self.place.0, Path::new(&self.place.1)).map_err(|_| error))?;
        Ok(())
    }
}

/// By its name, where there is no fd of it; the error says if that failed too.
fn take_away((dir, name): &(OwnedFd, OsString), error: anyhow::Error) -> anyhow::Error {
    match in_place::take_back(dir, Path::new(name)) {
        Ok(()) => error,
        Err(_) => error.context(StillMounted),
    }
}

/// Puts a layer over the directory `path` of a rootfs. The mounts are pushed to `done`; the last is the layer.
///
/// # Errors
/// If something else is mounted below it, which the layer would hide, or the kernel refuses.
pub(super) fn cover(rootfs: &Root, path: &Path, label: Option<&Label>, done: &mut Vec<Rc<OwnedFd>>) -> Result<()> {
    let open = || rootfs.open_at(path, OFlags::PATH | OFlags::DIRECTORY);
    // Compared with mount points only, and what it may lead to is a refusal.
    let place = real_path(open()?.as_fd())?;
    let mountinfo = proc_file::read("/proc/self/mountinfo").context("read \"/proc/self/mountinfo\"")?;
    if place == real_path(rootfs.as_fd())? || mountinfo::any_below(&mountinfo, &place) {
        return Err(failure(
            &catalog::READ_ONLY,
            format!("other files are mounted in the read-only directory {:?}", Path::new("/").join(path)),
            "start the container from an image that can be written, or mount them elsewhere",
        ));
    }
    let Scratch { below, tmpfs, .. } = Scratch::mount(rootfs, path, "mode=0755,size=1m", label)?;
    let tmpfs = Rc::new(tmpfs);
    done.push(Rc::clone(&tmpfs));
    for name in ["upper", "work"] {
        rustix::fs::mkdirat(&tmpfs, name, Mode::from_raw_mode(0o755))?;
    }
    in_place::mount_overlay(&tmpfs, &below, &tmpfs, label).with_context(|| {
        Failure::new(
            &catalog::READ_ONLY,
            format!("cannot mount an overlay over the read-only directory {:?}", Path::new("/").join(path)),
            "start the container from an image that can be written, or load the kernel module \"overlay\"",
        )
    })?;
    // What is on top goes first, by the fd of what is below it: the way to a mount ends at its top.
    let layer = open().inspect_err(|_| drop(mount::detach(tmpfs.as_fd())))?;
    done.push(layer.into());
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
pub(super) fn hide_file(
    rootfs: &Root,
    path: &Path,
    name: &OsStr,
    point: &OwnedFd,
    content: &[Cow<'_, [u8]>],
    label: Option<&Label>,
) -> Result<OwnedFd> {
    let scratch = Scratch::mount(rootfs, path, "mode=0755,size=32m", label)?;
    let bind = || -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&scratch.tmpfs, name, flags, Mode::from_raw_mode(0o644))?;
        let mut file = File::from(file);
        content.iter().try_for_each(|piece| file.write_all(piece))?;
        Ok(in_place::bind(open_in(&scratch.tmpfs, name)?, point)?)
    };
    let bound = bind();
    let unmounted = scratch.unmount().context(StillMounted);
    bound.context("mount a file of ours")?;
    let place = (scratch.below, name.to_owned());
    let restrict = || -> Result<OwnedFd> {
        unmounted?;
        let mounted = open_in(&place.0, name)?;
        in_place::restrict(&mounted, MountAttrs::PROC_FILE).context("remount it restricted")?;
        Ok(mounted)
    };
    restrict().map_err(|error| take_away(&place, error))
}
