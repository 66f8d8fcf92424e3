//! Shows the files of a container as its start will find them: the root file system, with the mounts of config.json.
//!
//! `plan` examines containers before a runtime has mounted anything. This view resolves a path like the kernel, one component at a time
//! below the root directory, and continues in the source of a mount where config.json has one. Nothing is mounted or changed, and files
//! are opened with `O_PATH`.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

use base::sys::in_root::Root;

use crate::inject::container::Files;
use crate::inject::files::source::open_in;
use crate::oci::spec_view::Mount;

/// The number of links that the kernel follows in a path (`MAXSYMLINKS`).
const MAX_LINKS: u32 = 40;

/// A container's files.
#[derive(Debug)]
pub(in crate::inject) struct View {
    root: Root,
    /// Whether the mounts exist already
    is_mounted: bool,
    /// In the order of config.json: later ones cover earlier ones
    mounts: Vec<Covering>,
    /// Paths of mounts whose content is unknown, and which a lookup came to
    unknown: RefCell<BTreeSet<PathBuf>>,
}

/// What a directory is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::inject) enum Ground {
    /// The root file system, or a tmpfs of the container
    Own {
        is_read_only: bool,
    },
    Volume {
        is_read_only: bool,
        is_shared: bool,
    },
}

/// A mount of config.json.
#[derive(Debug)]
struct Covering {
    /// Its path without links, relative to the root directory
    at: PathBuf,
    /// Its root; `None` for an empty file system, or if it is unknown
    root: Option<Rc<OwnedFd>>,
    is_known: bool,
    ground: Ground,
}

/// What a path leads to.
#[derive(Clone, Debug)]
pub(in crate::inject) struct Found {
    /// The path without links, relative to the root directory
    pub real: PathBuf,
    /// `None` for a directory that only exists because something is mounted in or on it
    pub file: Option<Rc<OwnedFd>>,
    pub ground: Ground,
}

impl View {
    /// Returns the view of a root file system. `is_mounted`: the container has a process, so the mounts of config.json exist.
    pub(in crate::inject) fn new(root: Root, mounts: &[Mount], is_mounted: bool) -> Self {
        let mut view = Self {
            root,
            is_mounted,
            mounts: Vec::new(),
            unknown: RefCell::default(),
        };
        for mount in mounts {
            if let Some(covering) = view.covering(mount) {
                view.mounts.push(covering);
            }
        }
        view
    }

    /// Returns the paths at which something is mounted that could not be examined, as far as lookups came to them.
    pub(in crate::inject) fn unknown(&self) -> BTreeSet<PathBuf> {
        self.unknown.borrow().clone()
    }

    fn covering(&self, mount: &Mount) -> Option<Covering> {
        // Runtimes follow links in the destination, and create what is missing.
        let at = self.real_path(&mount.destination)?;
        let has = |flag: &str| mount.options.iter().flatten().any(|option| option == flag);
        let is_tmpfs = mount.kind.as_deref() == Some("tmpfs") && !mount.is_bind();
        let ground = if is_tmpfs {
            Ground::Own {
                is_read_only: has("ro"),
            }
        } else {
            Ground::Volume {
                is_read_only: has("ro"),
                is_shared: has("shared") || has("rshared"),
            }
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let root = if self.is_mounted || is_tmpfs && has("tmpcopyup") {
            self.root.open_at(&at, OFlags::PATH).ok()
        } else if mount.is_bind() {
            rustix::fs::openat(CWD, &mount.source, flags, Mode::empty()).ok()
        } else {
            None
        };
        let is_kernels = matches!(
            mount.kind.as_deref(),
            Some("proc" | "sysfs" | "cgroup" | "cgroup2" | "devpts" | "mqueue")
        );
        Some(Covering {
            at,
            is_known: root.is_some() || is_tmpfs || is_kernels,
            root: root.map(Rc::new),
            ground,
        })
    }

    /// Returns the path without links; where it leads to nothing, the rest is as given. `None` if it cannot be resolved.
    fn real_path(&self, path: &Path) -> Option<PathBuf> {
        let mut missing = Vec::new();
        for part in path.ancestors() {
            match self.find(part, true) {
                Ok(found) => {
                    let mut real = found.real;
                    real.extend(missing.iter().rev());
                    return Some(real);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    missing.push(part.file_name()?);
                }
                Err(_) => return None,
            }
        }
        None
    }

    /// Finds what a path leads to. `follow`: also if that is a symlink.
    ///
    /// # Errors
    /// NotFound, ELOOP, ENOTDIR and others, like openat2(2).
    pub(in crate::inject) fn find(&self, path: &Path, follow: bool) -> io::Result<Found> {
        let root = Found {
            real: PathBuf::new(),
            file: Some(Rc::new(self.root.open_at(Path::new("/"), OFlags::PATH)?)),
            ground: self.own_ground()?,
        };
        let mut places = vec![root];
        let mut rest: VecDeque<OsString> = VecDeque::new();
        prepend(&mut rest, path);
        let mut links = 0;
        while let Some(name) = rest.pop_front() {
            if name == ".." {
                places.truncate(places.len().saturating_sub(1).max(1));
                continue;
            }
            let Some(here) = places.last() else {
                return Err(Errno::NOENT.into());
            };
            let found = self.in_directory(here, &name)?;
            let is_last = rest.is_empty();
            match link_text(&found)? {
                Some(text) if follow || !is_last => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(Errno::LOOP.into());
                    }
                    if text.is_absolute() {
                        places.truncate(1);
                    }
                    prepend(&mut rest, &text);
                }
                _ => places.push(found),
            }
        }
        places.pop().ok_or_else(|| Errno::NOENT.into())
    }

    fn own_ground(&self) -> io::Result<Ground> {
        let flags = rustix::fs::fstatvfs(&self.root)?.f_flag;
        Ok(Ground::Own {
            is_read_only: flags.contains(rustix::fs::StatVfsMountFlags::RDONLY),
        })
    }

    /// Finds a name in a directory, without following a link.
    ///
    /// # Errors
    /// If it does not exist, or `dir` is not a directory.
    pub(in crate::inject) fn in_directory(&self, dir: &Found, name: &OsStr) -> io::Result<Found> {
        let real = dir.real.join(name);
        let covering = self.mounts.iter().rfind(|mount| mount.at == real);
        if let Some(covering) = covering {
            if !covering.is_known {
                self.unknown.borrow_mut().insert(Path::new("/").join(&real));
            }
            return Ok(Found {
                real,
                file: covering.root.clone(),
                ground: covering.ground,
            });
        }
        let opened = match &dir.file {
            Some(dir) => open_in(&**dir, name),
            None => Err(Errno::NOENT),
        };
        let ground = dir.ground;
        match opened {
            Ok(file) => Ok(Found {
                real,
                file: Some(Rc::new(file)),
                ground,
            }),
            // A runtime creates the directories of a mount point.
            Err(Errno::NOENT) if !self.points_below(&real).is_empty() => Ok(Found {
                real,
                file: None,
                ground,
            }),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns what config.json mounts below a directory, not on it.
    pub(in crate::inject) fn points_below(&self, real: &Path) -> Vec<Found> {
        let mut below = Vec::new();
        for mount in &self.mounts {
            if mount.at != real && mount.at.starts_with(real) {
                below.push(Found {
                    real: mount.at.clone(),
                    file: mount.root.clone(),
                    ground: mount.ground,
                });
            }
        }
        below
    }

    /// Reports whether config.json mounts something at this path.
    pub(in crate::inject) fn is_mount_point(&self, real: &Path) -> bool {
        self.mounts.iter().any(|mount| mount.at == real)
    }
}

impl Files for View {
    fn open_at(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let found = self.find(path, !flags.contains(OFlags::NOFOLLOW))?;
        let Some(file) = found.file else {
            return Err(Errno::NOENT.into());
        };
        if flags.contains(OFlags::DIRECTORY) && kind_of(&file)? != FileType::Directory {
            return Err(Errno::NOTDIR.into());
        }
        file.try_clone()
    }

    fn root(&self) -> &Root {
        &self.root
    }
}

fn prepend(rest: &mut VecDeque<OsString>, path: &Path) {
    for part in path.components().rev() {
        match part {
            Component::Normal(name) => rest.push_front(name.to_owned()),
            Component::ParentDir => rest.push_front("..".into()),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
}

fn kind_of(file: &OwnedFd) -> io::Result<FileType> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode))
}

/// Returns the text of a symlink; `None` for another file.
pub(in crate::inject) fn link_text(found: &Found) -> io::Result<Option<PathBuf>> {
    let Some(file) = &found.file else {
        return Ok(None);
    };
    if kind_of(file)? != FileType::Symlink {
        return Ok(None);
    }
    let text = rustix::fs::readlinkat(&**file, c"", Vec::new())?;
    Ok(Some(OsString::from_vec(text.into_bytes()).into()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn mount(destination: &str, kind: &str, source: &Path, options: &[&str]) -> Mount {
        Mount {
            source: source.to_owned(),
            destination: destination.into(),
            kind: Some(kind.to_owned()),
            options: Some(options.iter().map(|&option| option.to_owned()).collect()),
        }
    }

    #[test]
    fn a_path_leads_through_links_and_mounts() {
        let (dir, volume) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(path("usr/lib")).unwrap();
        std::fs::write(path("usr/lib/x"), "").unwrap();
        symlink("/usr/lib/../lib", path("lib")).unwrap();
        symlink("../../../../etc/passwd", path("out")).unwrap();
        symlink("loop", path("loop")).unwrap();
        symlink("/volume/sub", path("into")).unwrap();
        std::fs::create_dir(volume.path().join("sub")).unwrap();
        std::fs::write(volume.path().join("sub/y"), "").unwrap();
        symlink("/usr/lib/x", volume.path().join("back")).unwrap();
        let mounts = [
            mount("/volume", "bind", volume.path(), &["rbind", "ro"]),
            mount("/lib/dev", "tmpfs", Path::new("tmpfs"), &[]),
            mount("/a/b", "bind", Path::new("/nonexistent"), &["rbind"]),
        ];
        let view = View::new(Root::open(dir.path()).unwrap(), &mounts, false);
        let own = Ground::Own {
            is_read_only: false,
        };
        let there = Ground::Volume {
            is_read_only: true,
            is_shared: false,
        };
        for (given, real, ground) in [
            ("lib/x", "usr/lib/x", own),
            ("/lib/../lib/x", "usr/lib/x", own),
            ("into/y", "volume/sub/y", there),
            ("volume/back", "usr/lib/x", own),
            ("volume/../lib", "usr/lib", own),
            ("lib/dev", "usr/lib/dev", own),
            ("a", "a", own),
        ] {
            let found = view.find(Path::new(given), true).unwrap();
            assert_eq!(
                (&*found.real, found.ground),
                (Path::new(real), ground),
                "{given}"
            );
        }
        assert_eq!(
            view.find(Path::new("out"), false).unwrap().real,
            Path::new("out")
        );
        let error = |given: &str| view.find(Path::new(given), true).unwrap_err().kind();
        assert_eq!(error("out"), io::ErrorKind::NotFound, "not the host's");
        assert_eq!(error("usr/lib/x/y"), io::ErrorKind::NotADirectory);
        assert_eq!(error("lib/dev/null"), io::ErrorKind::NotFound);
        assert_eq!(
            view.find(Path::new("loop"), true)
                .unwrap_err()
                .raw_os_error(),
            Some(Errno::LOOP.raw_os_error())
        );
        assert!(view.unknown().is_empty());
        view.find(Path::new("a/b"), true).unwrap();
        assert_eq!(view.unknown(), BTreeSet::from(["/a/b".into()]));
    }
}
