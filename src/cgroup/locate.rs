//! Determines the device cgroup of a process from the texts of mountinfo and `/proc/<pid>/cgroup`. Pure.
//!
//! The mounts decide the cgroup version. `/proc/<pid>/cgroup` lists v1 hierarchies even if only cgroup2 is mounted, where the
//! runtime cannot use them either. Formats: proc_pid_mountinfo(5), cgroups(7) ("/proc files").

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

use anyhow::{Result, anyhow, bail};

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

/// Returns the device cgroup of the process whose `/proc/<pid>/cgroup` is `cgroup`.
///
/// In hybrid layouts, a mounted v1 `devices` hierarchy has precedence over cgroup2, unless cgroup2 is at `/sys/fs/cgroup`. runc
/// (`IsCgroup2UnifiedMode`) and crun decide in the same way.
pub fn locate(mountinfo: &str, cgroup: &str) -> Result<DeviceCgroup> {
    let mounts = visible(mountinfo.lines().filter_map(parse_mount).collect());
    let unified: Vec<&Mount> = mounts.iter().filter(|mount| mount.kind == "cgroup2").collect();
    let devices: Vec<&Mount> = mounts.iter().filter(|mount| mount.is_v1_devices()).collect();

    if devices.is_empty() || unified.iter().any(|mount| mount.point == Path::new("/sys/fs/cgroup")) {
        if unified.is_empty() {
            return Ok(DeviceCgroup::None);
        }
        let own = own_path(cgroup, str::is_empty).ok_or_else(|| anyhow!("it is not in a cgroup of cgroup2"))?;
        let (mount, path) = below(&unified, own)?;
        return Ok(DeviceCgroup::V2 { mount: HostPath::new(mount), path: HostPath::new(path) });
    }
    let own = own_path(cgroup, |controllers| controllers.split(',').any(|name| name == "devices"))
        .ok_or_else(|| anyhow!("it is not in a cgroup with the devices controller"))?;
    Ok(DeviceCgroup::V1(HostPath::new(below(&devices, own)?.1)))
}

#[derive(Debug)]
struct Mount {
    id: u32,
    parent: u32,
    /// The directory of the filesystem that is at `point`.
    root: PathBuf,
    point: PathBuf,
    read_only: bool,
    kind: String,
    super_options: String,
}

impl Mount {
    /// The controller can share its hierarchy ("cpu,devices").
    fn is_v1_devices(&self) -> bool {
        self.kind == "cgroup" && self.super_options.split(',').any(|option| option == "devices")
    }

    /// Reports whether this mount hides the mount point of a sibling. Two siblings never have the same mount point: the second
    /// one is mounted on the first.
    fn covers(&self, sibling: &Self) -> bool {
        self.id != sibling.id && self.point != sibling.point && sibling.point.starts_with(&self.point)
    }
}

/// `ID PARENT MAJ:MIN ROOT POINT OPTIONS [TAG]... - TYPE SOURCE SUPER_OPTIONS`; `None` for anything else.
fn parse_mount(line: &str) -> Option<Mount> {
    let (own, filesystem) = line.split_once(" - ")?;
    let mut own = own.split(' ');
    let id = own.next()?.parse().ok()?;
    let parent = own.next()?.parse().ok()?;
    let root = unescape(own.nth(1)?);
    let point = unescape(own.next()?);
    let read_only = own.next()?.split(',').any(|option| option == "ro");
    let mut filesystem = filesystem.split(' ');
    let kind = filesystem.next()?.to_owned();
    let super_options = filesystem.nth(1).unwrap_or_default().to_owned();
    Some(Mount { id, parent, root, point, read_only, kind, super_options })
}

/// Decodes octal escapes (`\040` for a space); other backslashes are unchanged.
fn unescape(text: &str) -> PathBuf {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let escaped = match tail {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] if *first == b'\\' => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        out.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { tail.get(3..).unwrap_or_default() } else { tail };
    }
    PathBuf::from(OsString::from_vec(out))
}

/// Returns the cgroup mounts that a path lookup reaches.
///
/// A lookup enters every mount that it meets. So a mount is hidden if another one is mounted on it, or if a sibling covers its
/// mount point or that of an ancestor.
fn visible(mounts: Vec<Mount>) -> Vec<Mount> {
    let mut tree = Tree::new(&mounts);
    let keep: Vec<bool> = mounts.iter().map(|mount| mount.kind.starts_with("cgroup") && tree.reaches(mount)).collect();
    mounts.into_iter().zip(keep).filter_map(|(mount, keep)| keep.then_some(mount)).collect()
}

/// The mount table with indexes, because a host can have 100 000 mounts (`fs.mount-max`).
struct Tree<'a> {
    by_id: BTreeMap<u32, &'a Mount>,
    by_parent: BTreeMap<u32, Vec<&'a Mount>>,
    /// A cache, by id, of whether nothing covers the mount or one of its ancestors
    bare: BTreeMap<u32, bool>,
}

impl<'a> Tree<'a> {
    fn new(mounts: &'a [Mount]) -> Self {
        let mut tree = Self { by_id: BTreeMap::new(), by_parent: BTreeMap::new(), bare: BTreeMap::new() };
        for mount in mounts {
            tree.by_id.entry(mount.id).or_insert(mount);
            tree.by_parent.entry(mount.parent).or_default().push(mount);
        }
        tree
    }

    fn on(&self, id: u32) -> impl Iterator<Item = &&'a Mount> {
        self.by_parent.get(&id).into_iter().flatten()
    }

    fn reaches(&mut self, mount: &'a Mount) -> bool {
        let stacked = self.on(mount.id).any(|other| other.point == mount.point);
        !stacked && self.is_bare(mount)
    }

    fn is_bare(&mut self, mount: &'a Mount) -> bool {
        let mut line = Vec::new();
        let mut at = mount;
        let bare = loop {
            if let Some(known) = self.bare.get(&at.id) {
                break *known;
            }
            line.push(at.id);
            // also ends the loop at a cycle, which the kernel never reports
            self.bare.insert(at.id, false);
            if self.on(at.parent).any(|other| other.covers(at)) {
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
    cgroup.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let _hierarchy = fields.next()?;
        let controllers = fields.next()?;
        let path = fields.next()?;
        matches(controllers).then(|| Path::new(path))
    })
}

/// Reports whether a path is outside of the reader's cgroup namespace: the kernel then writes "/.." (cgroup_namespaces(7)).
fn is_outside(path: &Path) -> bool {
    path.components().any(|part| part == Component::ParentDir)
}

/// Returns the mount point and the directory of the cgroup `own`.
///
/// If several mounts contain it, prefers a writable one, then the one with the largest part of the hierarchy, then the last
/// one.
fn below(mounts: &[&Mount], own: &Path) -> Result<(PathBuf, PathBuf)> {
    if is_outside(own) {
        return Err(failure(
            &catalog::CGROUP,
            format!("its cgroup {own:?} is outside of this cgroup namespace"),
            "start the hook in the cgroup namespace of the container runtime",
        ));
    }
    let best = mounts
        .iter()
        .filter(|mount| mount.root.is_absolute() && !is_outside(&mount.root))
        .filter_map(|mount| Some((mount, own.strip_prefix(&mount.root).ok()?)))
        .enumerate()
        .max_by_key(|(order, (mount, rest))| (!mount.read_only, rest.components().count(), *order));
    match best {
        // joining "" would leave a trailing slash
        Some((_, (mount, rest))) if rest.as_os_str().is_empty() => Ok((mount.point.clone(), mount.point.clone())),
        Some((_, (mount, rest))) => Ok((mount.point.clone(), mount.point.join(rest))),
        None => {
            let points: Vec<&PathBuf> = mounts.iter().map(|mount| &mount.point).collect();
            bail!("its cgroup {own:?} is not below any of the mounts {points:?}")
        }
    }
}

#[cfg(test)]
mod tests;
