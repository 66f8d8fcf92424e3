//! Decides what a step does, from what is at its path in the container. Pure.
//!
//! [`apply`](mod@super::super::apply) acts on these decisions.

use std::path::Path;

use anyhow::{Result, ensure};
use rustix::fs::{FileType, Stat};

use base::paths::ContainerPath;
use base::report::{Failure, Finding};
use findings::catalog;
use nvidia_host::edits::Need;

use crate::inject::container::{host_dev, mounts::refuse_shared};
use crate::inject::files::directory::{Seen, is_unchanged};
use crate::inject::files::source::same_file;
use crate::inject::layer::overlay::{self, CoverReason};

/// A file or device node to mount.
#[derive(Clone, Copy, Debug)]
pub(in crate::inject) struct Mounting<'a> {
    /// Its device and inode number
    pub source: (u64, u64),
    /// The number of the device node; `None` for another file
    pub device: Option<(u32, u32)>,
    /// The device and inode numbers of the files that earlier steps have mounted
    pub placed: &'a [(u64, u64)],
}

/// Where a file is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::inject) enum MountAt {
    /// On a new empty file
    Free,
    /// Nowhere: the file is already there
    Present,
    /// On the existing file
    Over { hides: bool },
    /// On a new empty file, which replaces a symlink
    InsteadOfLink { hides: bool },
}

/// Decides where a file is mounted. A symlink is replaced with a file and never followed: its target is the image's choice, and may
/// be any file of the host (CVE-2024-0133).
///
/// # Errors
/// If nothing can be mounted there.
pub(in crate::inject) fn mount_at(seen: Seen<'_>, file: Mounting<'_>) -> Result<MountAt> {
    let stat = match seen {
        Seen::Nothing => return Ok(MountAt::Free),
        Seen::Link(_) => {
            return Ok(MountAt::InsteadOfLink {
                hides: file.device.is_none(),
            });
        }
        Seen::Other(stat) => stat,
    };
    // The engine created the node, or an earlier run of the hook mounted the file.
    let id = (stat.st_dev, stat.st_ino);
    if is_device(stat, file.device) || file.source == id {
        return Ok(MountAt::Present);
    }
    ensure!(
        !is_directory(stat),
        "the image has a directory at this path"
    );
    // Two paths can lead to one directory, by links of the image or by a volume.
    ensure!(
        !file.placed.contains(&id),
        "another driver file is already there"
    );
    // An empty file is the mount point of an earlier start.
    let hides = file.device.is_none() && is_file(stat) && stat.st_size > 0;
    Ok(MountAt::Over { hides })
}

/// Where a link is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::inject) enum LinkAt {
    Free,
    /// The link is already there.
    Present,
    /// Another link is replaced.
    InsteadOfLink,
    /// The driver file is mounted on the image's file, which a link would replace.
    Over,
}

/// Decides where a link with this text is created.
///
/// # Errors
/// If no link can be created there.
pub(in crate::inject) fn link_at(seen: Seen<'_>, text: &Path) -> Result<LinkAt> {
    Ok(match seen {
        Seen::Nothing => LinkAt::Free,
        Seen::Link(old) if old == text => LinkAt::Present,
        Seen::Link(_) => LinkAt::InsteadOfLink,
        Seen::Other(stat) => {
            ensure!(
                is_file(stat),
                "the image has something other than a regular file at this path"
            );
            LinkAt::Over
        }
    })
}

/// Reports whether the file `mounted` is mounted on an image's file that has the name of a link to it.
pub(in crate::inject) fn hides_file(mounted: &Stat, file: &Stat) -> bool {
    is_file(mounted) && !same_file(mounted, file)
}

/// Where a copy is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::inject) enum CopyAt {
    Free,
    /// A copy of another driver, or the mount point of a container from which the image was made, is replaced.
    InsteadOfCopy,
    /// The image's file stays.
    Nowhere,
}

/// Decides where a copy is created.
pub(in crate::inject) fn copy_at(seen: Seen<'_>) -> CopyAt {
    match seen {
        Seen::Nothing => CopyAt::Free,
        Seen::Other(stat) if is_unchanged(stat) => CopyAt::InsteadOfCopy,
        Seen::Link(_) | Seen::Other(_) => CopyAt::Nowhere,
    }
}

/// Checks that a directory can be mounted at a path, where a missing directory is created first.
///
/// # Errors
/// If something else is there.
pub(in crate::inject) fn directory_at(seen: Seen<'_>) -> Result<()> {
    let is_usable = match seen {
        Seen::Nothing => true,
        Seen::Link(_) => false,
        Seen::Other(stat) => is_directory(stat),
    };
    ensure!(
        is_usable,
        "the image has something other than a directory at this path"
    );
    Ok(())
}

/// Reports whether there is a `/proc/driver/nvidia` to mask.
///
/// # Errors
/// If it is not a directory.
pub(in crate::inject) fn mask_at(seen: Seen<'_>) -> Result<bool> {
    match seen {
        Seen::Nothing => Ok(false),
        Seen::Other(stat) if is_directory(stat) => Ok(true),
        // In a proc file system it is a directory, so this /proc is not one.
        _ => Err(Failure::new(
            &catalog::NO_PROC,
            "\"/proc/driver/nvidia\" is not a directory in the container",
            "have the engine mount a proc file system at \"/proc\" in the container",
        )
        .into()),
    }
}

/// A directory in which names must be created and cannot be.
#[derive(Clone, Copy, Debug)]
pub(in crate::inject) struct Uncreatable<'a> {
    pub path: &'a Path,
    pub why: CoverReason,
    pub is_read_only: bool,
    /// Whether it is on a volume with shared propagation
    pub is_shared: bool,
    /// Whether it is in the host's /dev
    pub in_hosts_dev: bool,
    /// Whether the container requires the names
    pub need: Need,
}

/// Decides whether a layer covers the directory. Returns a finding if the container can then no longer write to it.
///
/// # Errors
/// If a layer must not cover it.
pub(in crate::inject) fn cover(dir: Uncreatable<'_>) -> Result<Option<Finding>> {
    let is_volume = dir.why == CoverReason::Volume;
    if is_volume && dir.in_hosts_dev {
        return Err(host_dev::refusal());
    }
    refuse_shared(dir.is_shared)?;
    if !is_volume || dir.is_read_only {
        return Ok(None);
    }
    // The container can no longer write to a covered directory, which an optional file does not justify.
    match dir.need {
        Need::Optional => Err(overlay::not_covered(dir.path)),
        Need::Required => Ok(Some(overlay::covered(dir.path))),
    }
}

/// Reports that the driver's file hides another file of the image.
pub(in crate::inject) fn hidden(path: &ContainerPath) -> Finding {
    let what = format!("the driver's file hides the image's own {path}");
    Finding::new(&catalog::HIDDEN, what, "")
}

const fn is_directory(stat: &Stat) -> bool {
    matches!(FileType::from_raw_mode(stat.st_mode), FileType::Directory)
}

pub(in crate::inject) const fn is_file(stat: &Stat) -> bool {
    matches!(FileType::from_raw_mode(stat.st_mode), FileType::RegularFile)
}

fn is_device(stat: &Stat, device: Option<(u32, u32)>) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
        && device
            == Some((
                rustix::fs::major(stat.st_rdev),
                rustix::fs::minor(stat.st_rdev),
            ))
}
