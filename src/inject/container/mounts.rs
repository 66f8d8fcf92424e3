//! Determines which mounts of a container are its own, and which have shared propagation.
//!
//! A file that the hook creates on a volume stays there after the container has ended, and the volume may be the host's /etc.
//! The links of the image decide which volume a path leads to. So the hook creates files only on these mounts:
//!
//! - the rootfs, identified by its mount id. The device number is not enough: a rootfs and a volume can be on the same disk.
//! - layers that the hook mounted.
//! - a tmpfs that the runtime mounted for this container: /dev, `--tmpfs`, and the ones that `--read-only` adds. It is mounted nowhere else.
//!   The source of a volume, however, is a path in the runtime's mount namespace. Before pivot_root(2), the container's namespace
//!   still contains a copy of that mount outside of the rootfs.

use std::cell::OnceCell;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result};
use rustix::fs::FsWord;

use base::report::Failure;
use base::sys::in_root::{Root, real_path};
use base::sys::mount::statmount::{self, Id, MountFacts};
use base::sys::proc_file;
use findings::catalog;

use crate::inject::container::mountinfo;
use crate::oci::spec_view::Mount;

pub(in crate::inject) const TMPFS_MAGIC: FsWord = 0x0102_1994;

/// Facts about mounts in the current mount namespace, cached by mount id.
#[derive(Debug)]
pub(in crate::inject) struct Mounts {
    /// config.json has a tmpfs at /dev
    has_own_dev: bool,
    rootfs: OnceCell<Id>,
    /// tmpfs mounts of this container
    own: Vec<Id>,
    /// Layers that the hook mounted
    layers: Vec<Id>,
    /// Volumes
    foreign: Vec<Id>,
    /// Whether the mount has shared propagation
    shared: Vec<(Id, bool)>,
    directories: Vec<(Rc<OwnedFd>, Id)>,
    /// /proc/self/mountinfo, if the kernel lacks statmount(2). It does not contain the mounts of the hook, which are never
    /// looked up.
    table: OnceCell<Vec<u8>>,
}

impl Mounts {
    pub(in crate::inject) const fn new(has_own_dev: bool) -> Self {
        Self {
            has_own_dev,
            rootfs: OnceCell::new(),
            own: Vec::new(),
            layers: Vec::new(),
            foreign: Vec::new(),
            shared: Vec::new(),
            directories: Vec::new(),
            table: OnceCell::new(),
        }
    }

    /// Reports whether the hook may create files in this directory, which `path` led to.
    pub(in crate::inject) fn is_own(
        &mut self,
        rootfs: &Root,
        dir: &Rc<OwnedFd>,
        path: &Path,
    ) -> Result<bool> {
        let mount = self.mount_of(dir)?;
        if mount == self.rootfs(rootfs)?
            || self.own.contains(&mount)
            || self.layers.contains(&mount)
        {
            return Ok(true);
        }
        if self.foreign.contains(&mount) {
            return Ok(false);
        }
        let is_own = self.is_own_tmpfs(rootfs, dir, mount, path)?;
        let known = if is_own {
            &mut self.own
        } else {
            &mut self.foreign
        };
        known.push(mount);
        Ok(is_own)
    }

    /// Adds a directory that the hook created below an examined one, on the same mount.
    pub(in crate::inject) fn add_created(&mut self, dir: &Rc<OwnedFd>, below: &Rc<OwnedFd>) {
        if let Some(mount) = self.known_mount_of(below) {
            self.directories.push((Rc::clone(dir), mount));
        }
    }

    /// Adds a layer that the hook mounted.
    pub(in crate::inject) fn add_layer(&mut self, layer: &OwnedFd) -> Result<()> {
        self.layers.push(statmount::id(layer)?);
        Ok(())
    }

    /// Forgets all but the first `count` layers, and what is cached: the kernel may reuse the ids of unmounted layers.
    pub(in crate::inject) fn forget_layers(&mut self, count: usize) {
        self.layers.truncate(count);
        self.shared.clear();
    }

    /// Refuses to mount on `point` if its mount has shared propagation.
    pub(in crate::inject) fn refuse_shared(&mut self, point: &OwnedFd) -> Result<()> {
        refuse_shared(self.is_shared(point)?)
    }

    /// Reports whether the mount of `point` has shared propagation.
    pub(in crate::inject) fn is_shared(&mut self, point: &OwnedFd) -> Result<bool> {
        let mount = statmount::id(point)?;
        self.is_shared_mount(mount, point)
    }

    /// Refuses to mount on a file in this directory if its mount has shared propagation.
    pub(in crate::inject) fn refuse_shared_dir(&mut self, dir: &Rc<OwnedFd>) -> Result<()> {
        let mount = self.mount_of(dir)?;
        refuse_shared(self.is_shared_mount(mount, dir)?)
    }

    pub(in crate::inject) fn forget_directories(&mut self) {
        self.directories.clear();
    }

    fn is_shared_mount(&mut self, mount: Id, point: &OwnedFd) -> Result<bool> {
        let known = self.shared.iter().find(|(known, _)| *known == mount);
        if let Some((_, is_shared)) = known {
            return Ok(*is_shared);
        }
        let is_shared = match statmount::facts_of(mount) {
            Some(facts) => facts.is_shared,
            None => self.is_listed_as_shared(point)?,
        };
        self.shared.push((mount, is_shared));
        Ok(is_shared)
    }

    fn mount_of(&mut self, dir: &Rc<OwnedFd>) -> Result<Id> {
        if let Some(mount) = self.known_mount_of(dir) {
            return Ok(mount);
        }
        let mount = statmount::id(&**dir)?;
        self.directories.push((Rc::clone(dir), mount));
        Ok(mount)
    }

    fn known_mount_of(&self, dir: &Rc<OwnedFd>) -> Option<Id> {
        let mut known = self.directories.iter();
        let (_, mount) = known.find(|(known, _)| Rc::ptr_eq(known, dir))?;
        Some(*mount)
    }

    fn rootfs(&self, rootfs: &Root) -> Result<Id> {
        if let Some(mount) = self.rootfs.get() {
            return Ok(*mount);
        }
        let mount = statmount::id(rootfs)?;
        Ok(*self.rootfs.get_or_init(|| mount))
    }

    fn is_own_tmpfs(
        &mut self,
        rootfs: &Root,
        dir: &OwnedFd,
        mount: Id,
        path: &Path,
    ) -> Result<bool> {
        // The mount table is long on a node with many containers. Almost every container has a tmpfs at /dev, so with
        // statmount(2) that mount is checked alone: it must be mounted directly on the rootfs, where config.json has the
        // runtime mount a tmpfs. A volume that a link of the image redirects to /dev is mounted on or below that tmpfs.
        if self.has_own_dev
            && path == Path::new("dev")
            && let (Some(facts), Id::Unique(below)) =
                (statmount::facts_of(mount), self.rootfs(rootfs)?)
            && is_first_on(&facts, below)
        {
            self.shared.push((mount, facts.is_shared));
            return Ok(true);
        }
        if rustix::fs::fstatfs(dir)?.f_type != TMPFS_MAGIC {
            return Ok(false);
        }
        let device = rustix::fs::fstat(dir)?.st_dev;
        let place = real_path(rootfs.as_fd())?;
        Ok(!mountinfo::has_device_outside(
            self.table()?,
            device,
            &place,
        ))
    }

    fn is_listed_as_shared(&self, point: &OwnedFd) -> Result<bool> {
        let id = statmount::reused_id(point)?;
        Ok(base::mountinfo::mounts(self.table()?).any(|mount| mount.is_shared && mount.id == id))
    }

    fn table(&self) -> Result<&[u8]> {
        if self.table.get().is_none() {
            let table = read_table()?;
            self.table.set(table).ok();
        }
        Ok(self.table.get().map(Vec::as_slice).unwrap_or_default())
    }
}

/// Reads the current mount table.
pub(in crate::inject) fn read_table() -> Result<Vec<u8>> {
    proc_file::read_table("/proc/self/mountinfo").context("read \"/proc/self/mountinfo\"")
}

/// Reports whether config.json has the runtime mount a tmpfs at /dev.
pub(in crate::inject) fn has_own_dev(mounts: &[Mount]) -> bool {
    let mut of_dev = mounts
        .iter()
        .filter(|mount| mount.destination == Path::new("/dev"));
    of_dev.any(|mount| mount.kind.as_deref() == Some("tmpfs") && !mount.is_bind())
}

/// Reports whether a mount is a whole tmpfs whose parent is the mount `below`.
fn is_first_on(facts: &MountFacts, below: u64) -> bool {
    facts.parent == below
        && facts.root == "/"
        && u64::try_from(TMPFS_MAGIC).is_ok_and(|tmpfs| facts.magic == tmpfs)
}

/// Refuses to mount on a volume with shared propagation.
///
/// # Errors
/// If it is one.
pub(in crate::inject) fn refuse_shared(is_shared: bool) -> Result<()> {
    if !is_shared {
        return Ok(());
    }
    Err(Failure::new(
        &catalog::SHARED,
        "it is in a volume with shared propagation: the mount would also appear on the host",
        "mount that volume with rslave or rprivate propagation",
    )
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tmpfs_at_dev_is_the_containers_own() {
        let mount = |destination: &str, kind: &str, options: &[&str]| Mount {
            destination: destination.into(),
            kind: Some(kind.to_owned()),
            options: Some(options.iter().map(|&option| option.to_owned()).collect()),
            ..Mount::default()
        };
        assert!(has_own_dev(&[
            mount("/proc", "proc", &[]),
            mount("/dev", "tmpfs", &["nosuid"])
        ]));
        assert!(!has_own_dev(&[
            mount("/dev", "bind", &["rbind"]),
            mount("/dev/shm", "tmpfs", &[])
        ]));
        assert!(!has_own_dev(&[mount("/dev", "tmpfs", &["bind"])]));
        assert!(!has_own_dev(&[]));

        let tmpfs = MountFacts {
            is_shared: false,
            is_read_only: false,
            magic: 0x0102_1994,
            root: "/".into(),
            parent: 7,
        };
        assert!(is_first_on(&tmpfs, 7));
        for other in [
            MountFacts {
                parent: 8,
                ..tmpfs.clone()
            },
            MountFacts {
                magic: 0xef53,
                ..tmpfs.clone()
            },
            MountFacts {
                root: "/sub".into(),
                ..tmpfs
            },
        ] {
            assert!(!is_first_on(&other, 7), "{other:?}");
        }
    }
}
