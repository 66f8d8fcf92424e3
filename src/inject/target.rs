//! The container's side of each step. From here on there are only fds of the rootfs and names below it.

mod cdi_hook;
mod ld_so_conf;
mod stale;

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::container::is_missing;
use super::directory::{Present, make_file, present, replace_link, write_beside};
use super::hosts_dev::HostsDev;
use super::prepare::Prepared;
use super::propagation::Propagation;
use super::source::Source;
use super::tmpfs::{Directory, is_ours, is_read_only};
use super::{Take, hosts_dev, linker_cache, read_only};
use crate::error::Failure;
use crate::finding::{Finding, catalog};
use crate::lower::live::CacheEntry;
use crate::paths::ContainerPath;
use crate::sys::in_root::{Created, Root, open_regular};
use crate::sys::mount::{self, Api, Label, MountAttrs};

/// A container whose mount namespace we are in, and what we did to it.
#[derive(Debug)]
pub struct Target {
    rootfs: Root,
    api: Api,
    hosts_dev: HostsDev,
    /// Directories of /dev of which it is known that they are not the host's
    own_dev: Vec<Rc<OwnedFd>>,
    /// Of file systems of ours
    label: Option<Label>,
    propagation: Propagation,
    done: Vec<Done>,
    /// Files mounted so far
    mounts: Vec<(ContainerPath, Rc<OwnedFd>)>,
    /// Over directories of a read-only rootfs
    layers: Vec<Rc<OwnedFd>>,
    /// Directories that were opened, by their paths: most files go to a few of them, and none is found a second way.
    /// Forgotten when something is mounted on a directory.
    opened: Vec<(PathBuf, Rc<OwnedFd>)>,
    /// Whether the directories of the libraries were listed for the image's ldconfig
    listed: bool,
    /// Whether a link to another driver's library was replaced: the container has run with that one
    had_another: bool,
    /// What that one left
    stale: Vec<Created>,
    findings: Vec<Finding>,
}

/// What undoing has to take back, newest last.
#[derive(Debug)]
enum Done {
    Created(Created),
    Mounted(Rc<OwnedFd>),
    /// A symlink of the image's that ours replaced
    Replaced {
        dir: Rc<OwnedFd>,
        name: PathBuf,
        text: PathBuf,
    },
    /// A file that an earlier start left, which was replaced or removed
    Rewritten {
        dir: Rc<OwnedFd>,
        name: PathBuf,
        old: Vec<u8>,
    },
}

/// What is at a name that is taken.
enum Existing {
    /// What is asked for
    Asked,
    /// A new file of ours in this directory, in place of a link
    Replaced(Rc<OwnedFd>),
    /// Something to mount on, in this directory
    Point(Rc<OwnedFd>, OwnedFd),
}

impl Take for Target {
    fn take(&mut self, step: Prepared<'_>) -> Result<()> {
        let before = self.done.len();
        let result = match step {
            Prepared::Mount { source, target, device } => self.mount(source, target, device),
            Prepared::MountDirectory { source, target } => self.mount_directory(source, target),
            Prepared::MountFiles { directory, target } => self.mount_files(directory, target),
            Prepared::Link { link, text, file } => self.link(link, text, file),
            Prepared::MaskProc(directory) => self.mask_proc(directory),
            Prepared::MaskParams => self.mask_params(),
            Prepared::SetMode { target, mode } => self.set_mode(target, mode),
            Prepared::ListDirectories { first, others } => self.list_directories(first, others),
            Prepared::UpdateLinkerCache(entries) => self.update_linker_cache(entries),
        };
        if result.is_err() {
            take_back(self.done.split_off(before));
        }
        result
    }

    fn note(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    fn undo(self) {
        // Open mounts keep their mount points busy.
        drop(self.mounts);
        drop(self.layers);
        drop(self.opened);
        drop(self.propagation);
        drop(self.own_dev);
        take_back(self.done);
    }

    fn finish(&mut self) -> Result<Vec<Finding>> {
        self.layers.iter().try_for_each(|layer| read_only::seal(layer))?;
        // Nothing can fail from here on, and what cannot be removed does no harm.
        for left in self.stale.drain(..) {
            left.remove().ok();
        }
        Ok(std::mem::take(&mut self.findings))
    }
}

impl Target {
    /// `rootfs` must have been opened in the mount namespace that we are in now.
    #[must_use]
    pub const fn new(rootfs: Root, api: Api, hosts_dev: HostsDev, label: Option<Label>) -> Self {
        Self {
            rootfs,
            api,
            hosts_dev,
            own_dev: Vec::new(),
            label,
            propagation: Propagation::new(),
            done: Vec::new(),
            mounts: Vec::new(),
            layers: Vec::new(),
            opened: Vec::new(),
            listed: false,
            had_another: false,
            stale: Vec::new(),
            findings: Vec::new(),
        }
    }

    /// The open directory of this path, made if necessary.
    fn directory(&mut self, path: &Path) -> Result<Rc<OwnedFd>> {
        if let Some((_, dir)) = self.opened.iter().find(|(known, _)| known.as_os_str() == path.as_os_str()) {
            return Ok(Rc::clone(dir));
        }
        if path.starts_with("dev") && path.components().count() > 1 {
            let part = self.rootfs.existing_part(path);
            if part != path && self.hosts_dev.has(self.rootfs.open_at(part, OFlags::PATH)?)? {
                return Err(hosts_dev::refusal());
            }
        }
        let mut created = Vec::new();
        let mut opened = self.rootfs.create_dir_all(path, &mut created);
        if opened.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::ReadOnlyFilesystem) {
            self.cover(self.rootfs.existing_part(path))?;
            opened = self.rootfs.create_dir_all(path, &mut created);
        }
        self.done.extend(created.into_iter().map(Done::Created));
        let dir = opened.with_context(|| format!("open its directory {:?}", Path::new("/").join(path)))?;
        self.opened.push((path.to_owned(), Rc::clone(&dir)));
        Ok(dir)
    }

    /// Something is mounted on one: its path leads elsewhere now.
    fn forget_directories(&mut self) {
        self.opened.clear();
    }

    /// The open directory in which `path` lies, made if necessary.
    fn parent(&mut self, path: &ContainerPath) -> Result<Rc<OwnedFd>> {
        self.directory(parent_path(path))
    }

    /// Whether the directory is the host's: nothing may be made in it.
    fn is_hosts_dev(&mut self, dir: &Rc<OwnedFd>, path: &ContainerPath) -> Result<bool> {
        if !path.relative().starts_with("dev") || self.own_dev.iter().any(|known| Rc::ptr_eq(known, dir)) {
            return Ok(false);
        }
        let is_hosts = self.hosts_dev.has(&**dir)?;
        if !is_hosts {
            self.own_dev.push(Rc::clone(dir));
        }
        Ok(is_hosts)
    }

    /// The same directory again, where a name can be replaced.
    fn writable(&mut self, dir: Rc<OwnedFd>, path: &ContainerPath) -> Result<Rc<OwnedFd>> {
        if self.is_hosts_dev(&dir, path)? {
            return Err(hosts_dev::refusal());
        }
        if !is_read_only(&*dir) {
            return Ok(dir);
        }
        self.covered_parent(path)
    }

    fn covered_parent(&mut self, path: &ContainerPath) -> Result<Rc<OwnedFd>> {
        self.cover(parent_path(path))?;
        self.parent(path)
    }

    /// Makes something new, in a layer of ours if its directory is read-only; returns the directory, too. `None` if the
    /// name is taken: whether it is, is asked by making it, which no look beforehand can be sure of.
    fn make<T>(
        &mut self,
        path: &ContainerPath,
        is_dir: bool,
        make: impl Fn(&OwnedFd, &OsStr) -> rustix::io::Result<T>,
    ) -> Result<Option<(Rc<OwnedFd>, T)>> {
        let mut dir = self.parent(path)?;
        let name = path.file_name();
        if self.is_hosts_dev(&dir, path)? {
            return match present(&dir, name)? {
                Present::Nothing => Err(hosts_dev::refusal()),
                _ => Ok(None),
            };
        }
        let mut made = make(&dir, name);
        if matches!(made, Err(Errno::ROFS)) {
            dir = self.covered_parent(path)?;
            made = make(&dir, name);
        }
        match made {
            Ok(made) => {
                self.done.push(Done::Created(Created { dir: Rc::clone(&dir), name: name.into(), is_dir }));
                Ok(Some((dir, made)))
            }
            Err(Errno::EXIST) => Ok(None),
            Err(errno) => Err(anyhow::Error::new(errno).context("make it")),
        }
    }

    fn cover(&mut self, path: &Path) -> Result<()> {
        self.forget_directories();
        let mut mounts = Vec::new();
        let covered = read_only::cover(&self.rootfs, path, self.label.as_ref(), &mut mounts);
        self.layers.extend(mounts.last().filter(|_| covered.is_ok()).cloned());
        self.done.extend(mounts.into_iter().map(Done::Mounted));
        covered
    }

    fn mount(&mut self, source: Source, target: &ContainerPath, device: Option<(u32, u32)>) -> Result<()> {
        let name = Path::new(target.file_name());
        let mounted = match self.make(target, false, make_file)? {
            Some((dir, ())) => {
                self.propagation.refuse_shared_dir(&dir)?;
                source.attach_at(&dir, name)?
            }
            None => match self.existing_point(&source, target, device)? {
                Existing::Asked => return Ok(()),
                Existing::Replaced(dir) => {
                    self.propagation.refuse_shared_dir(&dir)?;
                    source.attach_at(&dir, name)?
                }
                Existing::Point(dir, point) => {
                    self.propagation.refuse_shared(&point)?;
                    source.attach(&dir, name, point)?
                }
            },
        };
        let mounted = Rc::new(mounted);
        self.done.push(Done::Mounted(Rc::clone(&mounted)));
        self.mounts.push((target.clone(), mounted));
        Ok(())
    }

    /// Looks where the name is taken. A link makes way for a new file: followed, it would have us mount wherever the image
    /// likes (CVE-2024-0133).
    fn existing_point(
        &mut self,
        source: &Source,
        target: &ContainerPath,
        device: Option<(u32, u32)>,
    ) -> Result<Existing> {
        let dir = self.parent(target)?;
        let name = target.file_name();
        Ok(match present(&dir, name)? {
            Present::Other(_, stat) if is_device(&stat, device) => Existing::Asked, // the engine made it already
            Present::Other(_, stat) if source.is(&stat) => Existing::Asked,         // a second run
            Present::Other(point, stat) => {
                ensure!(!is_directory(&stat), "the image has a directory in its place");
                Existing::Point(dir, point)
            }
            Present::Link(text) => {
                let dir = self.writable(dir, target)?;
                rustix::fs::unlinkat(&*dir, name, AtFlags::empty())?;
                self.done.push(Done::Replaced { dir, name: name.into(), text });
                let made = self.make(target, false, make_file)?;
                Existing::Replaced(made.context("somebody made it meanwhile")?.0)
            }
            Present::Nothing => bail!("somebody removed it meanwhile"),
        })
    }

    fn link(&mut self, link: &ContainerPath, text: &Path, file: &ContainerPath) -> Result<()> {
        if self.make(link, false, |dir, name| rustix::fs::symlinkat(text, dir, name))?.is_some() {
            return Ok(());
        }
        let dir = self.parent(link)?;
        let name = link.file_name();
        match present(&dir, name)? {
            Present::Link(old) if old == text => {}
            Present::Link(old) => {
                let dir = self.writable(dir, link)?;
                replace_link(&dir, Path::new(name), text)?;
                self.had_another |= stale::is_library_of_a_driver(&old);
                self.done.push(Done::Replaced { dir, name: name.into(), text: old });
            }
            Present::Nothing => bail!("somebody removed it meanwhile"),
            Present::Other(point, stat) => {
                ensure!(
                    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
                    "the image has something else than a file in its place"
                );
                self.mount_over(&dir, point, &stat, link, file)?;
            }
        }
        Ok(())
    }

    /// The image ships a file of its own under a name of the driver's: it stays in the image, and ours hides it.
    fn mount_over(
        &mut self,
        dir: &OwnedFd,
        point: OwnedFd,
        stat: &Stat,
        link: &ContainerPath,
        file: &ContainerPath,
    ) -> Result<()> {
        let mounted = match self.mounts.iter().find(|(path, _)| path == file) {
            Some((_, mounted)) => Rc::clone(mounted),
            // Mounted by the engine, where it does that.
            None => match self.rootfs.open_at(file.relative(), OFlags::PATH | OFlags::NOFOLLOW) {
                Ok(mounted) => mounted.into(),
                Err(error) if is_missing(&error) => return Ok(()),
                Err(error) => return Err(error.into()),
            },
        };
        let is_file = FileType::from_raw_mode(rustix::fs::fstat(&*mounted)?.st_mode) == FileType::RegularFile;
        let copy = Source::copy_of(&mounted, MountAttrs::DRIVER_FILE, self.api)?;
        if copy.is(stat) || !is_file {
            return Ok(());
        }
        self.propagation.refuse_shared(&point)?;
        self.done.push(Done::Mounted(copy.attach(dir, Path::new(link.file_name()), point)?.into()));
        self.findings.push(Finding::of(
            &catalog::HIDDEN,
            format!("the image's own {link} is hidden by the driver's"),
            "",
        ));
        Ok(())
    }

    fn mask_proc(&mut self, directory: Directory) -> Result<()> {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let dir = match self.rootfs.open_at(Path::new("proc/driver"), flags) {
            Ok(dir) => dir,
            // A container without /proc, or a driver that is not in this kernel (its root has a /proc of its own).
            Err(error) if is_missing(&error) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let name = OsStr::new("nvidia");
        match present(&dir, name)? {
            Present::Nothing => Ok(()),
            Present::Other(point, stat) if is_directory(&stat) => {
                if is_ours(&point) {
                    Ok(())
                } else {
                    self.attach(directory, &dir, name, point)
                }
            }
            // The kernel's own is a directory: this is not the kernel's.
            _ => Err(Failure::new(
                &catalog::NO_PROC,
                "\"/proc/driver/nvidia\" is no directory there",
                "have the engine mount a proc file system at \"/proc\" in the container",
            )
            .into()),
        }
    }

    fn mount_files(&mut self, directory: Directory, target: &ContainerPath) -> Result<()> {
        let (dir, point) = self.directory_point(target)?;
        if is_ours(&point) {
            return Ok(());
        }
        self.attach(directory, &dir, target.file_name(), point)
    }

    fn mount_directory(&mut self, source: Source, target: &ContainerPath) -> Result<()> {
        let (dir, point) = self.directory_point(target)?;
        if source.is(&rustix::fs::fstat(&point)?) {
            return Ok(());
        }
        self.propagation.refuse_shared(&point)?;
        self.forget_directories();
        self.done.push(Done::Mounted(source.attach(&dir, Path::new(target.file_name()), point)?.into()));
        Ok(())
    }

    /// A directory to mount on, made if necessary, and the one it lies in.
    fn directory_point(&mut self, target: &ContainerPath) -> Result<(Rc<OwnedFd>, OwnedFd)> {
        let make_dir = |dir: &OwnedFd, name: &OsStr| rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o755));
        self.make(target, true, make_dir)?;
        let dir = self.parent(target)?;
        match present(&dir, target.file_name())? {
            Present::Other(point, stat) if is_directory(&stat) => Ok((dir, point)),
            _ => Err(anyhow::anyhow!("the image has something else than a directory in its place")),
        }
    }

    fn attach(&mut self, directory: Directory, dir: &OwnedFd, name: &OsStr, point: OwnedFd) -> Result<()> {
        self.propagation.refuse_shared(&point)?;
        self.forget_directories();
        let mut mounts = Vec::new();
        let attached = directory.attach(dir, name, point, &mut mounts);
        self.done.extend(mounts.into_iter().map(Done::Mounted));
        attached
    }

    fn update_linker_cache(&mut self, entries: &[CacheEntry]) -> Result<()> {
        let (path, name) = (Path::new("etc"), OsStr::new("ld.so.cache"));
        let etc = match self.rootfs.open_at(path, OFlags::PATH | OFlags::DIRECTORY) {
            Ok(etc) => etc,
            Err(error) if is_missing(&error) => return Ok(()), // ld.so has its built-in directories
            Err(error) => return Err(error.into()),
        };
        if !self.listed {
            self.remove_list();
        }
        let stale = if self.had_another { self.find_stale(entries) } else { std::collections::BTreeSet::new() };
        let old = match self.read_linker_cache() {
            Ok(old) => old,
            Err(error) => {
                self.findings.push(linker_cache::left_alone(&error));
                return Ok(());
            }
        };
        let Some(new) = linker_cache::merge(old.as_deref(), entries, &stale, &mut self.findings) else { return Ok(()) };
        if !is_read_only(&etc) {
            return write_beside(&etc, Path::new(name), &new).context("write it");
        }
        match present(&etc, name)? {
            Present::Other(point, _) => {
                self.propagation.refuse_shared(&point)?;
                let hidden = read_only::hide_file(&self.rootfs, path, name, &point, &new, self.label.as_ref())?;
                self.done.push(Done::Mounted(hidden.into()));
            }
            _ => {
                let error = anyhow::anyhow!("the image's file system is read-only and has no such file");
                self.findings.push(linker_cache::left_alone(&error));
            }
        }
        Ok(())
    }

    /// Its bytes; `None` if there is none. Read where it leads to, also if the image made it a link.
    fn read_linker_cache(&self) -> Result<Option<Vec<u8>>> {
        let file = match self.rootfs.open_at(Path::new("etc/ld.so.cache"), OFlags::PATH) {
            Ok(path) => open_regular(path)?,
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(anyhow::Error::new(error).context("read it")),
        };
        crate::oci::read_file_limited(&file, linker_cache::MAX_SIZE).map(Some)
    }
}

fn parent_path(path: &ContainerPath) -> &Path {
    path.relative().parent().unwrap_or_else(|| Path::new("/"))
}

/// Newest first.
fn take_back(done: Vec<Done>) {
    for done in done.into_iter().rev() {
        match done {
            Done::Created(created) => created.remove().ok(),
            Done::Mounted(mount) => mount::detach(mount.as_fd()).ok(),
            Done::Replaced { dir, name, text } => replace_link(&dir, &name, &text).ok(),
            Done::Rewritten { dir, name, old } => write_beside(&dir, &name, &[old.into()]).ok(),
        };
    }
}

fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

fn is_device(stat: &Stat, device: Option<(u32, u32)>) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
        && device == Some((rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)))
}
