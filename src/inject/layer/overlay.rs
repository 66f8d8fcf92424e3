//! Covers a directory in which the hook cannot or must not create files, with an overlay that can contain them.
//!
//! The overlay's upper directory is on a tmpfs, so the image or the volume does not change. [`seal`] makes the overlay
//! read-only before the container starts.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use rustix::fs::{AtFlags, FileType, FsWord, Mode, OFlags};

use base::report::{Failure, Finding, Kind, failure};
use base::sys::in_root::{Root, real_path};
use base::sys::mount::{self, Label, MountAttrs, in_place};
use findings::catalog;

use crate::inject::container::mountinfo;
use crate::inject::container::mounts::{TMPFS_MAGIC, read_table};
use crate::inject::files::source::open_in;
use crate::inject::layer::remounted::{self, Remounts};
use crate::inject::remove::undo::StillMounted;

const OVERLAYFS_MAGIC: FsWord = 0x794c_7630;

/// A directory of a rootfs on which the hook has mounted a tmpfs.
pub(in crate::inject) struct Scratch {
    tmpfs: OwnedFd,
    place: RootfsMount,
    /// The mount table from before the tmpfs was mounted
    table: Vec<u8>,
}

/// The parent directory of a mount point, and the name in it.
///
/// A descriptor that was opened before the mount refers to the directory below the mount. Only a lookup of the name reaches the
/// mount. The whole path is not resolved again, because the image can change the links in it.
struct RootfsMount {
    dir: OwnedFd,
    name: OsString,
}

impl RootfsMount {
    fn find(below: &OwnedFd) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(below, c"..", flags, Mode::empty())?;
        // If the name now belongs to another file, `open_new` finds no new file system there.
        let name = real_path(below.as_fd())?
            .file_name()
            .unwrap_or_default()
            .to_owned();
        Ok(Self { dir, name })
    }

    /// Opens the file system that was just mounted. It must be of this kind and must not be in the mount table from before: the
    /// hook creates files in no other file system.
    fn open_new(&self, kind: FsWord, table: &[u8]) -> Result<OwnedFd> {
        let new = open_in(&self.dir, &self.name)?;
        let device = rustix::fs::fstat(&new)?.st_dev;
        let is_new =
            rustix::fs::fstatfs(&new)?.f_type == kind && !mountinfo::has_device(table, device);
        ensure!(is_new, "the directory was replaced in the meantime");
        Ok(new)
    }

    /// Unmounts by name, without a descriptor of the mount. If that fails, adds [`StillMounted`] to the error.
    fn unmount_after(&self, error: anyhow::Error) -> anyhow::Error {
        match in_place::take_back(&self.dir, Path::new(&self.name)) {
            Ok(()) => error,
            Err(_) => error.context(StillMounted),
        }
    }
}

impl Scratch {
    /// Mounts a tmpfs for files.
    fn mount(
        below: &OwnedFd,
        table: Vec<u8>,
        options: &str,
        label: Option<&Label>,
    ) -> Result<Self> {
        Self::mount_by(below, table, || {
            in_place::mount_tmpfs(below, options, label)
        })
    }

    /// Mounts a tmpfs on which device nodes work. Mode 0777, because files may be created as another user than the one that
    /// mounts.
    pub(in crate::inject) fn for_nodes(below: &OwnedFd, label: Option<&Label>) -> Result<Self> {
        Self::mount_by(below, read_table()?, || {
            in_place::mount_tmpfs_for_nodes(below, "mode=0777,size=64k", label)
        })
    }

    /// Creates a node with mode 0666, like runtimes do.
    pub(in crate::inject) fn create_node(
        &self,
        (major, minor): (u32, u32),
    ) -> rustix::io::Result<OwnedFd> {
        let (name, mode) = (
            OsString::from(format!("{major}:{minor}")),
            Mode::from_raw_mode(0o666),
        );
        rustix::fs::mknodat(
            &self.tmpfs,
            &name,
            FileType::CharacterDevice,
            mode,
            rustix::fs::makedev(major, minor),
        )?;
        // mknod(2) subtracts the umask from the mode, and chmod(2) does not.
        rustix::fs::chmodat(&self.tmpfs, &name, mode, AtFlags::empty())?;
        open_in(&self.tmpfs, &name)
    }

    fn mount_by(
        below: &OwnedFd,
        table: Vec<u8>,
        mount: impl FnOnce() -> std::io::Result<()>,
    ) -> Result<Self> {
        let place = RootfsMount::find(below)?;
        mount().context("mount a tmpfs")?;
        match place.open_new(TMPFS_MAGIC, &table) {
            Ok(tmpfs) => Ok(Self {
                tmpfs,
                place,
                table,
            }),
            Err(error) => Err(place.unmount_after(error)),
        }
    }

    /// Unmounts the tmpfs and the mounts on it.
    pub(in crate::inject) fn unmount(&self) -> Result<()> {
        mount::detach(self.tmpfs.as_fd()).or_else(|error| {
            in_place::take_back(&self.place.dir, Path::new(&self.place.name)).map_err(|_| error)
        })?;
        Ok(())
    }
}

/// CoverReason a directory gets a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::inject) enum CoverReason {
    /// Its mount or file system is read-only
    ReadOnly,
    /// It is on a volume, where the hook creates no files
    Volume,
    /// Its owner is not mapped in the container's user namespace
    Owner,
}

impl CoverReason {
    /// The error if mounts below the directory would be hidden by a layer.
    pub(in crate::inject) fn has_others_inside(self, path: &Path) -> Failure {
        let hint = match self {
            Self::Volume => {
                "mount the volume at another path: \"oci-nvidia-hook plan NAME\" prints the directories of the driver files"
            }
            Self::ReadOnly | Self::Owner => {
                "start the container with a writable root file system, or mount them elsewhere"
            }
        };
        Failure::new(
            self.kind(),
            format!("other files are mounted in {}", self.place(path)),
            hint,
        )
    }

    /// The error if the kernel cannot mount an overlay there.
    fn without_overlay(self, path: &Path) -> Failure {
        let hint = match self {
            Self::Volume => {
                "mount the volume at another path, or load the kernel module \"overlay\""
            }
            Self::ReadOnly | Self::Owner => {
                "start the container with a writable root file system, or load the kernel module \"overlay\""
            }
        };
        Failure::new(
            self.kind(),
            format!("cannot mount an overlay over {}", self.place(path)),
            hint,
        )
    }

    const fn kind(self) -> &'static Kind {
        match self {
            Self::Volume => &catalog::VOLUME,
            Self::ReadOnly | Self::Owner => &catalog::READ_ONLY,
        }
    }

    fn place(self, path: &Path) -> String {
        let path = Path::new("/").join(path);
        match self {
            Self::ReadOnly => format!("the read-only directory {path:?}"),
            Self::Owner => {
                format!("{path:?}, whose owner is not mapped in the container's user namespace")
            }
            Self::Volume => {
                format!("{path:?}, which is on a volume, and the hook creates no files on volumes")
            }
        }
    }
}

/// Mounts a layer on `below`, the directory `path` of a rootfs, and returns it. Pushes the mounts to `done`. Files that are mounted
/// below the directory are mounted on the layer too.
///
/// # Errors
/// If the layer would hide other mounts below the directory, or the kernel refuses.
pub(in crate::inject) fn cover(
    rootfs: &Root,
    path: &Path,
    below: &OwnedFd,
    why: CoverReason,
    remounts: &Remounts,
    label: Option<&Label>,
    done: &mut Vec<Rc<OwnedFd>>,
) -> Result<Rc<OwnedFd>> {
    // The path is only compared with mount points, so a race can at most cause a refusal.
    let place = real_path(below.as_fd())?;
    let table = read_table()?;
    if place == real_path(rootfs.as_fd())? {
        return Err(why.has_others_inside(path).into());
    }
    let inside = remounts.open(rootfs, path, mountinfo::points_below(&table, &place))?;
    let inside = inside.ok_or_else(|| why.has_others_inside(path))?;
    let Scratch {
        tmpfs,
        place,
        table,
    } = Scratch::mount(below, table, "mode=0755,size=1m", label)?;
    let tmpfs = Rc::new(tmpfs);
    done.push(Rc::clone(&tmpfs));
    // overlayfs renames files from the work directory to the upper directory, so both must be on one file system.
    for name in ["upper", "work"] {
        rustix::fs::mkdirat(&tmpfs, name, Mode::from_raw_mode(0o755))?;
    }
    in_place::mount_overlay(&tmpfs, below, &tmpfs, label)
        .with_context(|| why.without_overlay(path))?;
    // The overlay is unmounted with the tmpfs that it is mounted on.
    let layer = place
        .open_new(OVERLAYFS_MAGIC, &table)
        .inspect_err(|_| drop(mount::detach(tmpfs.as_fd())))?;
    let layer = Rc::new(layer);
    done.push(Rc::clone(&layer));
    remounted::mount(rootfs, inside, done)?;
    Ok(layer)
}

/// The error for an optional file on a volume that the container can write to: the volume stays writable.
pub(in crate::inject) fn not_covered(path: &Path) -> anyhow::Error {
    failure(
        &catalog::VOLUME,
        format!(
            "{:?} is on a volume, and the hook creates no files on volumes",
            Path::new("/").join(path)
        ),
        "mount the volume at another path",
    )
}

/// The finding for a directory of a writable volume that a read-only layer now covers.
pub(in crate::inject) fn covered(path: &Path) -> Finding {
    Finding::new(
        &catalog::COVERED,
        format!(
            "{:?} is on a volume: a read-only layer with the driver files covers it",
            Path::new("/").join(path)
        ),
        "mount the volume at another path if the container writes to it",
    )
}

/// Makes a layer read-only.
///
/// # Errors
/// If the kernel refuses.
pub(in crate::inject) fn seal(layer: &OwnedFd) -> Result<()> {
    in_place::restrict(layer, MountAttrs::LAYER).context("remount a layer read-only")
}

/// Mounts a file with this content over the file `name` in the directory `dir` of a rootfs; returns the mount.
///
/// The file is created on a tmpfs that is mounted on `dir` and unmounted again. The bind mount of the file keeps the tmpfs
/// alive.
///
/// # Errors
/// If the kernel refuses.
pub(in crate::inject) fn hide_file(
    dir: &OwnedFd,
    name: &OsStr,
    point: &OwnedFd,
    content: &[u8],
    label: Option<&Label>,
) -> Result<OwnedFd> {
    // The hook accepts linker caches up to 16 MiB. Without `size`, a tmpfs may use half of the memory.
    let scratch = Scratch::mount(dir, read_table()?, "mode=0755,size=32m", label)?;
    let bound = bind_new_file(&scratch.tmpfs, name, point, content);
    let unmounted = scratch.unmount().context(StillMounted);
    bound.context("mount a replacement file")?;
    unmounted
        .and_then(|()| restrict(dir, name))
        .map_err(|error| match in_place::take_back(dir, Path::new(name)) {
            Ok(()) => error,
            Err(_) => error.context(StillMounted),
        })
}

fn bind_new_file(tmpfs: &OwnedFd, name: &OsStr, point: &OwnedFd, content: &[u8]) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(
        tmpfs,
        name,
        flags,
        Mode::from_raw_mode(0o644),
    )?);
    file.write_all(content)?;
    Ok(in_place::bind(open_in(tmpfs, name)?, point)?)
}

/// Restricts the mount that was just made at `name`, and returns it.
fn restrict(dir: &OwnedFd, name: &OsStr) -> Result<OwnedFd> {
    let mounted = open_in(dir, name)?;
    in_place::restrict(&mounted, MountAttrs::PROC_FILE).context("restrict the mount")?;
    Ok(mounted)
}
