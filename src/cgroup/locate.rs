//! Determines the device cgroup of a process from the mount table and the text of `/proc/<pid>/cgroup`. Pure.
//!
//! The mounts decide the cgroup version. `/proc/<pid>/cgroup` lists v1 hierarchies even if only cgroup2 is mounted, where the
//! runtime cannot use them either. Format: cgroups(7) ("/proc files").

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use anyhow::{Result, anyhow, bail};

use base::mountinfo::{MountEntry, mounts, unescaped};
use base::paths::HostPath;
use base::report::failure;
use findings::catalog;

/// The cgroup whose device filter the runtime has set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceCgroup {
    /// A directory of the v1 hierarchy with the `devices` controller
    V1(HostPath),
    /// A cgroup2 directory, and where cgroup2 is mounted
    V2 { mount: HostPath, path: HostPath },
    /// No hierarchy that can filter devices is mounted
    None,
}

impl DeviceCgroup {
    /// Returns the mount point (for v1 `/`) and the path of the cgroup; `None` for [`Self::None`].
    pub(super) fn place(&self) -> Option<(&Path, &Path)> {
        match self {
            Self::None => None,
            Self::V1(path) => Some((path.as_path().ancestors().last()?, path.as_path())),
            Self::V2 { mount, path } => Some((mount.as_path(), path.as_path())),
        }
    }
}

/// A mounted hierarchy that can filter devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Whether it is cgroup2, and not the hierarchy of version 1 with the `devices` controller
    pub is_v2: bool,
    /// The directory of the file system that is at `point`
    pub root: PathBuf,
    pub point: PathBuf,
    pub is_read_only: bool,
}

/// Returns the hierarchies in a mount table that a path lookup reaches.
pub fn hierarchies(mountinfo: &[u8]) -> Vec<Hierarchy> {
    let mounts: Vec<_> = mounts(mountinfo).collect();
    let mut tree = MountTree::new(&mounts);
    let mut found = Vec::new();
    for mount in &mounts {
        if let Some(hierarchy) = hierarchy(mount)
            && tree.reaches(mount)
        {
            found.push(hierarchy);
        }
    }
    found
}

/// Returns `None` for a mount that cannot filter devices. The controller can share its hierarchy ("cpu,devices").
fn hierarchy(mount: &MountEntry<'_>) -> Option<Hierarchy> {
    let is_v2 = match mount.kind {
        b"cgroup2" => true,
        b"cgroup" => false,
        _ => return None,
    };
    let mut options = mount.super_options.split(|byte| *byte == b',');
    if !is_v2 && !options.any(|option| option == b"devices") {
        return None;
    }
    let (root, point) = (unescaped(mount.root), unescaped(mount.point));
    Some(Hierarchy {
        is_v2,
        root,
        point,
        is_read_only: mount.is_read_only,
    })
}

/// Returns the device cgroup of the process whose `/proc/<pid>/cgroup` is `cgroup`.
///
/// In hybrid layouts, a mounted v1 `devices` hierarchy has precedence over cgroup2, unless cgroup2 is at `/sys/fs/cgroup`. runc
/// (`IsCgroup2UnifiedMode`) and crun decide in the same way.
pub fn locate(hierarchies: &[Hierarchy], cgroup: &str) -> Result<DeviceCgroup> {
    let (unified, devices): (Vec<_>, Vec<_>) = hierarchies.iter().partition(|mount| mount.is_v2);
    let is_default = |mount: &&Hierarchy| mount.point == Path::new("/sys/fs/cgroup");
    if devices.is_empty() || unified.iter().any(is_default) {
        if unified.is_empty() {
            return Ok(DeviceCgroup::None);
        }
        let own = own_path(cgroup, str::is_empty)
            .ok_or_else(|| anyhow!("it is not in a cgroup of cgroup2"))?;
        let (mount, path) = below(&unified, own)?;
        return Ok(DeviceCgroup::V2 {
            mount: HostPath::new(mount),
            path: HostPath::new(path),
        });
    }
    let own = own_path(cgroup, |controllers| {
        controllers.split(',').any(|name| name == "devices")
    })
    .ok_or_else(|| anyhow!("it is not in a cgroup with the devices controller"))?;
    Ok(DeviceCgroup::V1(HostPath::new(below(&devices, own)?.1)))
}

/// Reports whether a mount hides the mount point of a sibling. Two siblings never have the same mount point: the second one is
/// mounted on the first.
fn covers(mount: &MountEntry<'_>, sibling: &MountEntry<'_>) -> bool {
    mount.id != sibling.id
        && mount.point != sibling.point
        && path(sibling.point).starts_with(path(mount.point))
}

fn path(escaped: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(escaped))
}

/// The mount table with indexes, because a host can have 100 000 mounts (`fs.mount-max`).
///
/// A path lookup enters every mount that it meets. So a mount is hidden if another one is mounted on it, or if a sibling covers its
/// mount point or the mount point of an ancestor.
struct MountTree<'a> {
    by_id: BTreeMap<u64, &'a MountEntry<'a>>,
    by_parent: BTreeMap<u64, Vec<&'a MountEntry<'a>>>,
    /// A cache, by id, of whether nothing covers the mount or one of its ancestors
    bare: BTreeMap<u64, bool>,
}

impl<'a> MountTree<'a> {
    fn new(mounts: &'a [MountEntry<'a>]) -> Self {
        let mut tree = Self {
            by_id: BTreeMap::new(),
            by_parent: BTreeMap::new(),
            bare: BTreeMap::new(),
        };
        for mount in mounts {
            tree.by_id.entry(mount.id).or_insert(mount);
            tree.by_parent.entry(mount.parent).or_default().push(mount);
        }
        tree
    }

    fn on(&self, id: u64) -> impl Iterator<Item = &&'a MountEntry<'a>> {
        self.by_parent.get(&id).into_iter().flatten()
    }

    fn reaches(&mut self, mount: &'a MountEntry<'a>) -> bool {
        let stacked = self.on(mount.id).any(|other| other.point == mount.point);
        !stacked && self.is_bare(mount)
    }

    fn is_bare(&mut self, mount: &'a MountEntry<'a>) -> bool {
        let mut line = Vec::new();
        let mut at = mount;
        let bare = loop {
            if let Some(known) = self.bare.get(&at.id) {
                break *known;
            }
            line.push(at.id);
            // also ends the loop at a cycle, which the kernel never reports
            self.bare.insert(at.id, false);
            if self.on(at.parent).any(|other| covers(other, at)) {
                break false;
            }
            match self.by_id.get(&at.parent).filter(|up| up.id != at.id) {
                Some(up) => at = up,
                None => break true,
            }
        };
        self.bare.extend(line.into_iter().map(|id| (id, bare)));
        bare
    }
}

/// Returns the path on the line of `/proc/<pid>/cgroup` (`HIERARCHY:CONTROLLERS:PATH`) whose controllers match.
fn own_path(cgroup: &str, matches: impl Fn(&str) -> bool) -> Option<&Path> {
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        if let (Some(controllers), Some(path)) = (fields.next(), fields.next())
            && matches(controllers)
        {
            return Some(Path::new(path));
        }
    }
    None
}

/// Reports whether a path is outside of the reader's cgroup namespace: the kernel then writes "/.." (cgroup_namespaces(7)).
fn is_outside(path: &Path) -> bool {
    path.components().any(|part| part == Component::ParentDir)
}

/// Returns the mount point and the directory of the cgroup `own`.
///
/// If several mounts contain it, prefers a writable one, then the one with the largest part of the hierarchy, then the last
/// one.
fn below(mounts: &[&Hierarchy], own: &Path) -> Result<(PathBuf, PathBuf)> {
    if is_outside(own) {
        return Err(failure(
            &catalog::CGROUP,
            format!("its cgroup {own:?} is outside of this cgroup namespace"),
            "start the hook in the cgroup namespace of the container runtime",
        ));
    }
    let mut best: Option<(_, &PathBuf, &Path)> = None;
    for mount in mounts {
        if !mount.root.is_absolute() || is_outside(&mount.root) {
            continue;
        }
        if let Ok(rest) = own.strip_prefix(&mount.root) {
            let rank = (!mount.is_read_only, rest.components().count());
            if best.is_none_or(|(known, ..)| rank >= known) {
                best = Some((rank, &mount.point, rest));
            }
        }
    }
    match best {
        // joining "" would leave a trailing slash
        Some((_, point, rest)) if rest.as_os_str().is_empty() => Ok((point.clone(), point.clone())),
        Some((_, point, rest)) => Ok((point.clone(), point.join(rest))),
        None => {
            let points: Vec<&PathBuf> = mounts.iter().map(|mount| &mount.point).collect();
            bail!("its cgroup {own:?} is not below any of the mounts {points:?}")
        }
    }
}

#[cfg(test)]
mod tests;
