//! Makes the image's own ldconfig find the driver libraries. The hook adds them to the linker cache, but a package manager in
//! the container runs ldconfig, which rebuilds that cache.
//!
//! A drop-in file in `/etc/ld.so.conf.d` lists the directories that the image's configuration lacks. If the image's
//! `/etc/ld.so.conf` does not include it, the hook adds a line that does; no other file of the image changes. The image's
//! configuration is read within limits: if a part is not read, a directory is at worst listed twice.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, bail};
use rustix::fs::OFlags;
use rustix::io::Errno;

use base::paths::ContainerPath;
use base::report::Finding;
use base::sys::in_root::{Created, Root};
use findings::catalog;
use nvidia_host::driver::ldconf;

use super::{Applier, Change, replace_file};
use crate::inject::apply::decide::is_file;
use crate::inject::container::ld_so_conf::{Configured, MAIN, MAX_FILE, Main, has_ldconfig};
use crate::inject::files::directory::Seen;
use crate::inject::files::directory::{Present, find_present};
use crate::inject::files::tmpfs::is_read_only;

impl Applier {
    /// Makes ldconfig search these directories, `first` before all others.
    pub(super) fn list_directories(
        &mut self,
        first: &[ContainerPath],
        others: &[ContainerPath],
    ) -> Result<()> {
        self.lists_directories = true;
        let etc = self
            .layout
            .rootfs
            .open_existing(Path::new("etc"), OFlags::PATH | OFlags::DIRECTORY)?;
        let Some(etc) = etc.map(Rc::new) else {
            return Ok(());
        };
        // The cache is in the same directory. If that is read-only, ldconfig cannot rebuild it.
        if is_read_only(&*etc) || !has_ldconfig(&self.layout.rootfs) {
            return Ok(());
        }
        let configured = Configured::read(&self.layout.rootfs);
        let wanted = configured.lacks(&self.layout.rootfs, first, others);
        if wanted.is_empty() {
            self.remove_list();
            return Ok(());
        }
        let text = ldconf::drop_in(wanted.iter().map(PathBuf::as_path));
        if let Some(obstacle) = self.include_list(etc, configured)? {
            let finding = not_listed(&wanted, obstacle);
            self.layout.done.findings.push(finding);
            return Ok(());
        }
        self.write_list(&text)
    }

    /// Writes the drop-in file, unless it has this text.
    fn write_list(&mut self, text: &[u8]) -> Result<()> {
        let dir = self.layout.directory(Path::new(ldconf::DROP_INS))?;
        let name = Path::new(ldconf::DROP_IN);
        let change = match old_list(&self.layout.rootfs, &dir)? {
            Old::Nothing => Change::Created(Created {
                dir: dir.clone(),
                name: name.into(),
                is_dir: false,
            }),
            Old::Own(old) if old == text => return Ok(()),
            Old::Own(old) => Change::Rewritten {
                dir: dir.clone(),
                name: name.into(),
                old,
            },
            Old::Foreign => bail!(
                "the image has a different file at {:?}",
                Path::new("/").join(path())
            ),
        };
        replace_file(&dir, name, text).context("write it")?;
        self.layout.done.add(change);
        Ok(())
    }

    /// Removes the drop-in file of an earlier start, which had another driver or whose container was committed. Errors are
    /// ignored: the file does no harm.
    pub(super) fn remove_list(&mut self) {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        // Most containers have no such file.
        if self
            .layout
            .rootfs
            .open_at(&path(), OFlags::PATH | OFlags::NOFOLLOW)
            .is_err()
        {
            return;
        }
        let drop_ins = Path::new(ldconf::DROP_INS);
        let Ok(dir) = self.layout.rootfs.open_at(drop_ins, flags).map(Rc::new) else {
            return;
        };
        if is_read_only(&*dir) || !self.layout.may_create(&dir, drop_ins).unwrap_or_default() {
            return;
        }
        let Ok(Old::Own(old)) = old_list(&self.layout.rootfs, &dir) else {
            return;
        };
        let name = PathBuf::from(ldconf::DROP_IN);
        if rustix::fs::unlinkat(&*dir, &name, rustix::fs::AtFlags::empty()).is_ok() {
            self.layout.done.add(Change::Rewritten { dir, name, old });
        }
    }

    /// Makes `/etc/ld.so.conf` include the drop-in file. Returns what prevents the hook from creating that file, or from including
    /// it; nothing has changed then.
    fn include_list(
        &mut self,
        etc: Rc<OwnedFd>,
        configured: Configured,
    ) -> Result<Option<&'static str>> {
        let rootfs = &self.layout.rootfs;
        let drop_ins = Path::new(ldconf::DROP_INS);
        let dir = rootfs.open_at(drop_ins, OFlags::PATH | OFlags::DIRECTORY);
        let has_own_etc = self.layout.may_create(&etc, Path::new("etc"))?;
        let has_own_drop_ins = match dir {
            Ok(dir) if has_own_etc => self.layout.may_create(&Rc::new(dir), drop_ins)?,
            _ => true,
        };
        let at = include_at(has_own_etc, has_own_drop_ins, &configured);
        let is_included = match (at, configured.main) {
            (IncludeAt::Nowhere(why), _) => return Ok(Some(why)),
            (IncludeAt::Present, _) => true,
            (IncludeAt::InNewFile, _) => self.create_main(etc).map(|()| true)?,
            (IncludeAt::InFile, Main::Read(text)) => self.add_include(etc, text)?,
            (IncludeAt::InFile, _) => false,
        };
        Ok((!is_included).then_some(NOT_INCLUDED))
    }

    /// Creates `/etc/ld.so.conf` with the line that it has in every distribution: packages that are installed later may
    /// rely on it.
    fn create_main(&mut self, etc: Rc<OwnedFd>) -> Result<()> {
        let Present::Nothing = find_present(&etc, OsStr::new(MAIN))? else {
            bail!("\"/etc/ld.so.conf\" is a dangling symlink")
        };
        let created = Created {
            dir: etc,
            name: MAIN.into(),
            is_dir: false,
        };
        replace_file(&created.dir, Path::new(MAIN), ldconf::DEFAULT.as_bytes())
            .context("write \"/etc/ld.so.conf\"")?;
        self.layout.done.add(Change::Created(created));
        Ok(())
    }

    /// Includes only the hook's file, at the top of the image's `/etc/ld.so.conf`: the image does not expect the other files of
    /// the directory to have an effect, and ldconfig searches in the order of the file, where forward compatibility libraries
    /// must be first. Returns false if the path is a symlink or a volume, which the hook does not change.
    fn add_include(&mut self, etc: Rc<OwnedFd>, old: Vec<u8>) -> Result<bool> {
        let name = Path::new(MAIN);
        if !is_includable(find_present(&etc, name.as_os_str())?.seen()) {
            return Ok(false);
        }
        let include = format!("include {}\n", Path::new("/").join(path()).display());
        match replace_file(&etc, name, &[include.as_bytes(), &old].concat()) {
            // rename(2) does not replace a mount point.
            Err(error) if error.downcast_ref() == Some(&Errno::BUSY) => return Ok(false),
            result => result.context("write \"/etc/ld.so.conf\"")?,
        }
        self.layout.done.add(Change::Rewritten {
            dir: etc,
            name: name.into(),
            old,
        });
        Ok(true)
    }
}

/// How the image's configuration comes to include the drop-in file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IncludeAt {
    Present,
    InNewFile,
    /// With a line in the image's file
    InFile,
    /// It cannot, for this reason
    Nowhere(&'static str),
}

const NOT_INCLUDED: &str = "its \"/etc/ld.so.conf\" does not include \"/etc/ld.so.conf.d\"";

/// Decides how the image's configuration includes the drop-in file.
const fn include_at(
    has_own_etc: bool,
    has_own_drop_ins: bool,
    configured: &Configured,
) -> IncludeAt {
    if !has_own_etc {
        return IncludeAt::Nowhere("\"/etc\" is on a volume");
    }
    if !has_own_drop_ins {
        return IncludeAt::Nowhere("\"/etc/ld.so.conf.d\" is on a volume");
    }
    match configured.main {
        Main::Missing => IncludeAt::InNewFile,
        Main::Read(_) if configured.includes_drop_ins => IncludeAt::Present,
        Main::Read(_) => IncludeAt::InFile,
        Main::Unreadable => IncludeAt::Nowhere(NOT_INCLUDED),
    }
}

/// Reports whether the image's `/etc/ld.so.conf` is a file to which a line can be added.
fn is_includable(seen: Seen<'_>) -> bool {
    matches!(seen, Seen::Other(stat) if is_file(stat))
}

fn path() -> PathBuf {
    Path::new(ldconf::DROP_INS).join(ldconf::DROP_IN)
}

/// The file at the path of the hook's drop-in.
enum Old {
    Nothing,
    Own(Vec<u8>),
    Foreign,
}

fn old_list(rootfs: &Root, dir: &OwnedFd) -> Result<Old> {
    Ok(match find_present(dir, OsStr::new(ldconf::DROP_IN))? {
        Present::Nothing => Old::Nothing,
        Present::Link(_) => Old::Foreign,
        Present::Other(file, _) => {
            let text = rootfs
                .open_stored(file)
                .ok()
                .and_then(|file| base::read::read_file_limited(&file, MAX_FILE).ok());
            text.filter(|text| ldconf::is_ours(text))
                .map_or(Old::Foreign, Old::Own)
        }
    })
}

/// The finding for directories that the image's ldconfig will not search.
fn not_listed(dirs: &[PathBuf], why: &str) -> Finding {
    let dirs: Vec<_> = dirs.iter().map(|dir| format!("{dir:?}")).collect();
    Finding::new(
        &catalog::NOT_LISTED,
        format!(
            "the image's ldconfig will not find the libraries in {}: {why}",
            dirs.join(", ")
        ),
        "add the line \"include /etc/ld.so.conf.d/*.conf\" to \"/etc/ld.so.conf\" when the image is built, or start the \
         container again after ldconfig has run in it",
    )
}
