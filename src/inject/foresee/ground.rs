//! The directories of a container whose start is foreseen, like [`Layout`](crate::inject::apply::layout::Layout).

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use base::paths::ContainerPath;

use super::Foresight;
use crate::inject::apply::decide::{self, Uncreatable};
use crate::inject::files::directory::Seen;
use crate::inject::files::tmpfs::is_read_only;
use crate::inject::foresee::view::{Found, Ground, link_text};
use crate::inject::layer::overlay::CoverReason;

/// What an earlier step would have created.
#[derive(Debug)]
pub(super) enum Made {
    Mounted(Box<Stat>),
    Link(PathBuf),
    Directory,
}

/// What is at a path at the time of a step.
#[derive(Debug)]
pub(super) enum Has {
    Nothing,
    Link(PathBuf),
    Other(Box<Stat>),
    /// A directory without a state, because it does not exist yet
    Directory,
}

impl Has {
    pub(super) fn seen(&self) -> Seen<'_> {
        match self {
            Self::Nothing | Self::Directory => Seen::Nothing,
            Self::Link(text) => Seen::Link(text),
            Self::Other(stat) => Seen::Other(stat),
        }
    }

    pub(super) fn stat(&self) -> Option<Stat> {
        match self {
            Self::Other(stat) => Some(**stat),
            _ => None,
        }
    }
}

/// A directory that a step would use.
#[derive(Debug)]
pub(super) struct Dir {
    pub found: Found,
    /// Whether it exists before the start
    exists: bool,
}

impl Foresight<'_> {
    /// Returns the parent directory of a path, and what is at the path. If that is nothing, its creation is foreseen.
    pub(super) fn make(&mut self, path: &ContainerPath) -> Result<(Dir, Has)> {
        let dir = self.directory(parent_path(path))?;
        let has = self.has(&dir, path.file_name())?;
        if matches!(has, Has::Nothing) {
            self.replace(&dir, path)?;
        }
        Ok((dir, has))
    }

    /// Foresees that a name in this directory is created or replaced.
    pub(super) fn replace(&mut self, dir: &Dir, path: &ContainerPath) -> Result<()> {
        match self.obstacle(dir) {
            Some(why) => self.cover(dir, parent_path(path), why),
            None => Ok(()),
        }
    }

    /// Notes what a step would have created.
    pub(super) fn note(&mut self, dir: &Dir, path: &ContainerPath, made: Made) {
        self.made
            .insert(dir.found.real.join(path.file_name()), made);
    }

    /// Returns what is at a path. A missing directory is not created.
    pub(super) fn at(&self, path: &ContainerPath) -> Result<Has> {
        let found = match self.view.find(parent_path(path), true) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Has::Nothing),
            Err(error) => return Err(error.into()),
        };
        let dir = Dir {
            found,
            exists: true,
        };
        self.has(&dir, path.file_name())
    }

    fn has(&self, dir: &Dir, name: &OsStr) -> Result<Has> {
        match self.made.get(&dir.found.real.join(name)) {
            Some(Made::Mounted(stat)) => return Ok(Has::Other(stat.clone())),
            Some(Made::Link(text)) => return Ok(Has::Link(text.clone())),
            Some(Made::Directory) => return Ok(Has::Directory),
            None => {}
        }
        if !dir.exists {
            return Ok(Has::Nothing);
        }
        let found = match self.view.in_directory(&dir.found, name) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Has::Nothing),
            Err(error) => return Err(error.into()),
        };
        if let Some(text) = link_text(&found)? {
            return Ok(Has::Link(text));
        }
        Ok(match &found.file {
            Some(file) => Has::Other(Box::new(rustix::fs::fstat(&**file)?)),
            None => Has::Directory,
        })
    }

    /// Returns the directory `path`. If it is missing, its creation is foreseen.
    pub(super) fn directory(&mut self, path: &Path) -> Result<Dir> {
        let (mut dir, existing) = self
            .existing_part(path)
            .with_context(|| cannot_open(path))?;
        let missing = path
            .strip_prefix(existing)
            .unwrap_or_else(|_| Path::new(""));
        let Some(first) = missing.components().next() else {
            return Ok(dir);
        };
        if let Some(why) = self.obstacle(&dir) {
            self.cover(&dir, existing, why)?;
        }
        // A dangling symlink is not replaced.
        if let Has::Link(_) = self.has(&dir, first.as_os_str())? {
            return Err(io::Error::from(Errno::NOTDIR)).with_context(|| cannot_open(path));
        }
        dir.found.real.push(missing);
        dir.exists = false;
        Ok(dir)
    }

    /// Returns the longest leading part of `path` that exists, and its path.
    fn existing_part<'p>(&self, path: &'p Path) -> io::Result<(Dir, &'p Path)> {
        let mut existing = path;
        let found = loop {
            match self.view.find(existing, true) {
                Ok(found) => break found,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    existing = existing.parent().unwrap_or_else(|| Path::new("/"));
                }
                Err(error) => return Err(error),
            }
        };
        if let Some(file) = &found.file
            && FileType::from_raw_mode(rustix::fs::fstat(&**file)?.st_mode) != FileType::Directory
        {
            return Err(Errno::NOTDIR.into());
        }
        let dir = Dir {
            found,
            exists: true,
        };
        Ok((dir, existing))
    }

    /// Returns why no name can be created in a directory; `None` if one can.
    fn obstacle(&self, dir: &Dir) -> Option<CoverReason> {
        if self.is_in_layer(&dir.found.real) {
            return None;
        }
        match dir.found.ground {
            Ground::Volume { .. } => Some(CoverReason::Volume),
            Ground::Own { .. } if is_fixed(&dir.found) => Some(CoverReason::ReadOnly),
            Ground::Own { .. } => None,
        }
    }

    /// Reports whether the directory belongs to the container and not to a volume.
    pub(super) fn is_own(&self, found: &Found) -> bool {
        matches!(found.ground, Ground::Own { .. }) || self.is_in_layer(&found.real)
    }

    /// Reports whether the directory cannot be changed, because no layer covers it.
    pub(super) fn is_read_only(&self, found: &Found) -> bool {
        !self.is_in_layer(&found.real) && is_fixed(found)
    }

    fn is_in_layer(&self, real: &Path) -> bool {
        self.layers.iter().any(|layer| real.starts_with(layer))
    }

    pub(super) fn is_shared(&self, dir: &Dir) -> bool {
        !self.is_in_layer(&dir.found.real) && is_shared(&dir.found)
    }

    /// Reports whether the file at this path is on a volume with shared propagation.
    pub(super) fn is_shared_at(&self, dir: &Dir, path: &ContainerPath) -> bool {
        match self.view.in_directory(&dir.found, path.file_name()) {
            Ok(found) if dir.exists && self.view.is_mount_point(&found.real) => is_shared(&found),
            _ => self.is_shared(dir),
        }
    }

    /// Foresees a layer on a directory.
    fn cover(&mut self, dir: &Dir, path: &Path, why: CoverReason) -> Result<()> {
        let real = &dir.found.real;
        let in_hosts_dev = match &dir.found.file {
            Some(file) => self.host_dev.has(&**file)?,
            None => false,
        };
        let lost = decide::cover(Uncreatable {
            path,
            why,
            is_read_only: self.is_read_only(&dir.found),
            is_shared: self.is_shared(dir),
            in_hosts_dev,
            need: self.need,
        })?;
        if real.as_os_str().is_empty() || self.has_others_inside(real)? {
            return Err(why.has_others_inside(path).into());
        }
        self.layers.push(real.clone());
        self.findings.extend(lost);
        Ok(())
    }

    /// Reports whether something is mounted below a directory that a layer would hide.
    fn has_others_inside(&self, real: &Path) -> Result<bool> {
        let is_below = |path: &Path| path != real && path.starts_with(real);
        if self.layers.iter().any(|layer| is_below(layer)) {
            return Ok(true);
        }
        for (path, made) in &self.made {
            let is_carried = match made {
                Made::Mounted(stat) => {
                    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                }
                Made::Link(_) => true,
                Made::Directory => false,
            };
            if is_below(path) && !is_carried {
                return Ok(true);
            }
        }
        for mounted in self.view.points_below(real) {
            let Some(file) = &mounted.file else {
                return Ok(true);
            };
            let stat = rustix::fs::fstat(&**file)?;
            if !self
                .read_only
                .carries(&stat, is_read_only(&**file), &mounted.real)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Reports whether a mount or its file system is read-only.
fn is_fixed(found: &Found) -> bool {
    let (Ground::Own { is_read_only: is }
    | Ground::Volume {
        is_read_only: is, ..
    }) = found.ground;
    is || found
        .file
        .as_ref()
        .is_some_and(|file| is_read_only(&**file))
}

const fn is_shared(found: &Found) -> bool {
    matches!(
        found.ground,
        Ground::Volume {
            is_shared: true,
            ..
        }
    )
}

fn cannot_open(path: &Path) -> String {
    format!("open its directory {:?}", Path::new("/").join(path))
}

fn parent_path(path: &ContainerPath) -> &Path {
    path.relative().parent().unwrap_or_else(|| Path::new("/"))
}
