//! A directory that nothing can be created in, or where nothing is to be: a layer of ours over it, if it needs a new name.
//!
//! The layer is an overlay whose upper directory is a tmpfs, so the image or the volume is not touched. Nothing of it is
//! writable to the container either: [`seal`] makes it read-only.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use rustix::fs::{AtFlags, FileType, FsWord, Mode, OFlags};

use base::report::{Failure, Finding, catalog, failure};
use base::sys::in_root::{Root, real_path};
use base::sys::mount::{self, Label, MountAttrs, in_place};

use super::mounts::{TMPFS_MAGIC, read_table};
use super::source::open_in;
use super::{StillMounted, mountinfo};

const OVERLAYFS_MAGIC: FsWord = 0x794c_7630;

/// A directory of a rootfs on which the hook has mounted a tmpfs.
pub(super) struct Scratch {
    tmpfs: OwnedFd,
    place: Place,
    /// The mount table from before it was mounted
    table: Vec<u8>,
}

/// Where what is mounted on a directory can be opened: the directory that it lies in, and its name there.
///
/// The way to a mount ends at its top, so an open file of what is below does not lead to it. A path would, but its links belong
/// to the image, and can change meanwhile.
struct Place {
    dir: OwnedFd,
    name: OsString,
}

impl Place {
    fn find(below: &OwnedFd) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(below, c"..", flags, Mode::empty())?;
        // One name in an open directory: if it is another file's by now, `open_new` finds no new file system there.
        let name = real_path(below.as_fd())?.file_name().unwrap_or_default().to_owned();
        Ok(Self { dir, name })
    }

    /// Opens what was mounted on it last: a file system of this kind that was mounted nowhere before. Only such a one is ours
    /// to create names in.
    fn open_new(&self, kind: FsWord, table: &[u8]) -> Result<OwnedFd> {
        let new = open_in(&self.dir, &self.name)?;
        let device = rustix::fs::fstat(&new)?.st_dev;
        let is_new =
            rustix::fs::fstatfs(&new)?.f_type == kind && !mountinfo::devices(table, |_| true).contains(&device);
        ensure!(is_new, "the directory was replaced meanwhile");
        Ok(new)
    }

    /// Takes away what is mounted there, of which there is no fd; the error says if that failed too.
    fn take_away(&self, error: anyhow::Error) -> anyhow::Error {
        match in_place::take_back(&self.dir, Path::new(&self.name)) {
            Ok(()) => error,
            Err(_) => error.context(StillMounted),
        }
    }
}

impl Scratch {
    fn mount(below: &OwnedFd, table: Vec<u8>, options: &str, label: Option<&Label>) -> Result<Self> {
        Self::mount_by(below, table, || in_place::mount_tmpfs(below, options, label))
    }

    /// One on which device nodes work. The user that files are created as may not be the one that mounts it.
    pub(super) fn for_nodes(below: &OwnedFd, label: Option<&Label>) -> Result<Self> {
        Self::mount_by(below, read_table()?, || in_place::mount_tmpfs_for_nodes(below, "mode=0777,size=64k", label))
    }

    /// A node that everybody may open, as runtimes create them.
    pub(super) fn create_node(&self, (major, minor): (u32, u32)) -> rustix::io::Result<OwnedFd> {
        let (name, mode) = (OsStr::new("node"), Mode::from_raw_mode(0o666));
        rustix::fs::mknodat(&self.tmpfs, name, FileType::CharacterDevice, mode, rustix::fs::makedev(major, minor))?;
        // mknod(2) subtracts the umask from the mode, and chmod(2) does not.
        rustix::fs::chmodat(&self.tmpfs, name, mode, AtFlags::empty())?;
        open_in(&self.tmpfs, name)
    }

    fn mount_by(below: &OwnedFd, table: Vec<u8>, mount: impl FnOnce() -> std::io::Result<()>) -> Result<Self> {
        let place = Place::find(below)?;
        mount().context("mount a tmpfs")?;
        match place.open_new(TMPFS_MAGIC, &table) {
            Ok(tmpfs) => Ok(Self { tmpfs, place, table }),
            Err(error) => Err(place.take_away(error)),
        }
    }

    /// Unmounts it, with what is mounted on it.
    pub(super) fn unmount(&self) -> Result<()> {
        mount::detach(self.tmpfs.as_fd())
            .or_else(|error| in_place::take_back(&self.place.dir, Path::new(&self.place.name)).map_err(|_| error))?;
        Ok(())
    }
}

/// Why a directory gets a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// Nothing can be created in it
    ReadOnly,
    /// It lies on a volume, where nothing is created
    Volume,
    /// The container's user namespace does not know its owner
    Owner,
}

impl Why {
    /// A layer would hide what is mounted inside.
    fn has_others_inside(self, path: &Path) -> Failure {
        const ELSEWHERE: &str = "start the container from an image that can be written, or mount them elsewhere";
        let path = Path::new("/").join(path);
        match self {
            Self::ReadOnly => Failure::new(
                &catalog::READ_ONLY,
                format!("other files are mounted in the read-only directory {path:?}"),
                ELSEWHERE,
            ),
            Self::Owner => {
                Failure::new(&catalog::READ_ONLY, format!("other files are mounted in {path:?}, {OUTSIDE}"), ELSEWHERE)
            }
            Self::Volume => Failure::new(
                &catalog::VOLUME,
                format!("other files are mounted in {path:?}, which lies on a volume, where the hook creates nothing"),
                "mount the volume at another path, or have it contain an empty file for each file of the driver",
            ),
        }
    }

    fn without_overlay(self, path: &Path) -> Failure {
        const MODULE: &str =
            "start the container from an image that can be written, or load the kernel module \"overlay\"";
        let path = Path::new("/").join(path);
        match self {
            Self::ReadOnly => Failure::new(
                &catalog::READ_ONLY,
                format!("cannot mount an overlay over the read-only directory {path:?}"),
                MODULE,
            ),
            Self::Owner => {
                Failure::new(&catalog::READ_ONLY, format!("cannot mount an overlay over {path:?}, {OUTSIDE}"), MODULE)
            }
            Self::Volume => Failure::new(
                &catalog::VOLUME,
                format!(
                    "cannot mount an overlay over {path:?}, which lies on a volume, where the hook creates nothing"
                ),
                "mount the volume at another path, or load the kernel module \"overlay\"",
            ),
        }
    }
}

const OUTSIDE: &str = "whose owner the container's user namespace does not know";

/// Puts a layer over `below`, the directory `path` of a rootfs. The mounts are pushed to `done`; the last is the layer.
///
/// # Errors
/// If something else is mounted below it, which the layer would hide, or the kernel refuses.
pub(super) fn cover(
    rootfs: &Root,
    path: &Path,
    below: &OwnedFd,
    why: Why,
    label: Option<&Label>,
    done: &mut Vec<Rc<OwnedFd>>,
) -> Result<()> {
    // Compared with mount points only, and what it may lead to is a refusal.
    let place = real_path(below.as_fd())?;
    let table = read_table()?;
    if place == real_path(rootfs.as_fd())? || mountinfo::any_below(&table, &place) {
        return Err(why.has_others_inside(path).into());
    }
    let Scratch { tmpfs, place, table } = Scratch::mount(below, table, "mode=0755,size=1m", label)?;
    let tmpfs = Rc::new(tmpfs);
    done.push(Rc::clone(&tmpfs));
    // overlayfs requires both directories on one file system, and renames files from one to the other.
    for name in ["upper", "work"] {
        rustix::fs::mkdirat(&tmpfs, name, Mode::from_raw_mode(0o755))?;
    }
    in_place::mount_overlay(&tmpfs, below, &tmpfs, label).with_context(|| why.without_overlay(path))?;
    // What is on top goes first, by the fd of what is below it.
    let layer = place.open_new(OVERLAYFS_MAGIC, &table).inspect_err(|_| drop(mount::detach(tmpfs.as_fd())))?;
    done.push(layer.into());
    Ok(())
}

/// A volume that the container may write stays as it is.
pub(super) fn not_covered(path: &Path) -> anyhow::Error {
    failure(
        &catalog::VOLUME,
        format!("{:?} lies on a volume, where the hook creates nothing", Path::new("/").join(path)),
        "mount the volume at another path",
    )
}

/// A volume that the container may write, but for this directory.
pub(super) fn covered(path: &Path) -> Finding {
    Finding::of(
        &catalog::COVERED,
        format!(
            "{:?} lies on a volume: a read-only layer with the driver's files covers it",
            Path::new("/").join(path)
        ),
        "mount the volume at another path if the container has to write there",
    )
}

/// Makes a layer read-only.
///
/// # Errors
/// If the kernel refuses.
pub(super) fn seal(layer: &OwnedFd) -> Result<()> {
    in_place::restrict(layer, MountAttrs::LAYER).context("remount a layer read-only")
}

/// Hides the file `name` in the directory `dir` of a rootfs behind one of ours with this content; returns its mount.
///
/// A tmpfs is on that directory for as long as it takes to mount a file of it: what is mounted keeps it.
///
/// # Errors
/// If the kernel refuses.
pub(super) fn hide_file(
    dir: &OwnedFd,
    name: &OsStr,
    point: &OwnedFd,
    content: &[Cow<'_, [u8]>],
    label: Option<&Label>,
) -> Result<OwnedFd> {
    // The largest linker cache that the hook accepts has 16 MiB. Without a size, a tmpfs may take half of the memory.
    let scratch = Scratch::mount(dir, read_table()?, "mode=0755,size=32m", label)?;
    let bound = bind_new_file(&scratch.tmpfs, name, point, content);
    let unmounted = scratch.unmount().context(StillMounted);
    bound.context("mount a file of ours")?;
    unmounted.and_then(|()| restrict(dir, name)).map_err(|error| match in_place::take_back(dir, Path::new(name)) {
        Ok(()) => error,
        Err(_) => error.context(StillMounted),
    })
}

fn bind_new_file(tmpfs: &OwnedFd, name: &OsStr, point: &OwnedFd, content: &[Cow<'_, [u8]>]) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(tmpfs, name, flags, Mode::from_raw_mode(0o644))?);
    content.iter().try_for_each(|piece| file.write_all(piece))?;
    Ok(in_place::bind(open_in(tmpfs, name)?, point)?)
}

/// Restricts what was just mounted at `name`, and returns it.
fn restrict(dir: &OwnedFd, name: &OsStr) -> Result<OwnedFd> {
    let mounted = open_in(dir, name)?;
    in_place::restrict(&mounted, MountAttrs::PROC_FILE).context("remount it restricted")?;
    Ok(mounted)
}
