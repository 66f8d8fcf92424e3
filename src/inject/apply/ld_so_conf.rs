//! Makes the image's own ldconfig find the driver libraries. The hook adds them to the linker cache, but a package manager in
//! the container runs ldconfig, which rebuilds that cache.
//!
//! A drop-in file in `/etc/ld.so.conf.d` lists the directories that the image's configuration lacks. If the image's
//! `/etc/ld.so.conf` does not include it, the hook adds a line that does; no other file of the image changes. The image's
//! configuration is read within limits: if a part is not read, a directory is at worst listed twice.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, bail};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use base::paths::ContainerPath;
use base::report::Finding;
use base::sys::in_root::{Created, Root};
use findings::catalog;
use nvidia_host::driver::ldconf::{self, Directive};

use super::{Applier, Change, replace_file};
use crate::inject::files::directory::{Present, find_present};
use crate::inject::files::tmpfs::is_read_only;

const MAIN: &str = "ld.so.conf";
/// Without one of these, nothing in the container rebuilds the cache.
const LDCONFIG: [&str; 4] = [
    "sbin/ldconfig",
    "usr/sbin/ldconfig",
    "usr/bin/ldconfig",
    "bin/ldconfig",
];
/// The longest file that is read, in bytes.
const MAX_FILE: usize = 64 << 10;
/// The deepest level of included files.
const MAX_DEPTH: usize = 8;

impl Applier {
    /// Makes ldconfig search these directories, `first` before all others.
    pub(in crate::inject) fn list_directories(
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
        let mut wanted: Vec<PathBuf> = Vec::new();
        for dir in first {
            add_new(&mut wanted, dir);
        }
        for dir in others {
            if !configured.has(&self.layout.rootfs, dir) {
                add_new(&mut wanted, dir);
            }
        }
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
                "the image has a file of its own at {:?}",
                Path::new("/").join(path())
            ),
        };
        replace_file(&dir, name, text).context("write it")?;
        self.layout.done.note_created(&path(), &dir);
        self.layout.done.add(change);
        Ok(())
    }

    /// Removes the drop-in file of an earlier start, which had another driver or whose container was committed. Errors are
    /// ignored: the file does no harm.
    pub(in crate::inject) fn remove_list(&mut self) {
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
        if !self.layout.may_create(&etc, Path::new("etc"))? {
            return Ok(Some("\"/etc\" is on a volume"));
        }
        let drop_ins = Path::new(ldconf::DROP_INS);
        if let Ok(dir) = self
            .layout
            .rootfs
            .open_at(drop_ins, OFlags::PATH | OFlags::DIRECTORY)
            && !self.layout.may_create(&Rc::new(dir), drop_ins)?
        {
            return Ok(Some("\"/etc/ld.so.conf.d\" is on a volume"));
        }
        let is_included = match configured.main {
            Main::Missing => self.create_main(etc).map(|()| true)?,
            Main::Read(_) if configured.includes_drop_ins => true,
            Main::Read(text) => self.add_include(etc, text)?,
            Main::Unreadable => false,
        };
        Ok((!is_included)
            .then_some("its \"/etc/ld.so.conf\" does not include \"/etc/ld.so.conf.d\""))
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
        let Present::Other(_, stat) = find_present(&etc, name.as_os_str())? else {
            return Ok(false);
        };
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
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

fn has_ldconfig(rootfs: &Root) -> bool {
    for path in LDCONFIG {
        if rootfs.open_at(Path::new(path), OFlags::PATH).is_ok() {
            return true;
        }
    }
    false
}

fn add_new(dirs: &mut Vec<PathBuf>, dir: &ContainerPath) {
    let dir = dir.absolute();
    if !dirs.contains(&dir) {
        dirs.push(dir);
    }
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

/// The image's `/etc/ld.so.conf`.
#[derive(Debug, Default)]
enum Main {
    #[default]
    Missing,
    Read(Vec<u8>),
    Unreadable,
}

/// What is left of the work that an image's configuration may cause, in total: its author chooses how often one file includes others,
/// and how many names their directory has. A distribution has a dozen files of a few lines each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Allowance {
    files: usize,
    bytes: usize,
    directives: usize,
    /// Names in the directories that are listed for patterns
    names: usize,
}

impl Default for Allowance {
    fn default() -> Self {
        Self {
            files: 256,
            bytes: 1 << 20,
            directives: 4096,
            names: 16384,
        }
    }
}

/// Takes `count` from an allowance. Returns whether that much was left.
fn take(left: &mut usize, count: usize) -> bool {
    let rest = left.checked_sub(count);
    *left = rest.unwrap_or_default();
    rest.is_some()
}

/// The directories in the configuration of the image's ldconfig.
#[derive(Debug, Default)]
struct Configured {
    left: Allowance,
    main: Main,
    /// Whether the configuration includes the hook's drop-in in `/etc/ld.so.conf.d`
    includes_drop_ins: bool,
    /// Device and inode of each directory: `/lib64` and `/usr/lib64` are usually the same
    dirs: Vec<(u64, u64)>,
}

impl Configured {
    fn read(rootfs: &Root) -> Self {
        let mut configured = Self::default();
        configured.read_file(rootfs, &Path::new("/etc").join(MAIN), 0);
        configured
    }

    fn has(&self, rootfs: &Root, dir: &ContainerPath) -> bool {
        identity(rootfs, dir.relative()).is_some_and(|identity| self.dirs.contains(&identity))
    }

    fn read_file(&mut self, rootfs: &Root, path: &Path, depth: usize) {
        if depth > MAX_DEPTH || !take(&mut self.left.files, 1) {
            return;
        }
        let file = rootfs
            .open_at(path, OFlags::PATH)
            .and_then(|file| rootfs.open_stored(file));
        let text = file
            .map_err(Into::into)
            .and_then(|file| base::read::read_file_limited(&file, MAX_FILE));
        if depth == 0 {
            self.main = match &text {
                Ok(text) => Main::Read(text.clone()),
                Err(_) if rootfs.open_at(path, OFlags::PATH).is_ok() => Main::Unreadable,
                Err(_) => Main::Missing,
            };
        }
        let text = text.unwrap_or_default();
        if !take(&mut self.left.bytes, text.len()) {
            return;
        }
        let parent = path.parent().unwrap_or_else(|| Path::new("/"));
        for directive in ldconf::parse(&text, parent) {
            if !take(&mut self.left.directives, 1) {
                return;
            }
            match directive {
                Directive::Directory(dir) => self.dirs.extend(identity(rootfs, &dir)),
                Directive::Include(dir, pattern) => {
                    self.includes_drop_ins |= is_drop_ins(rootfs, &dir)
                        && ldconf::matches(&pattern, ldconf::DROP_IN.as_bytes());
                    for name in self.names(rootfs, &dir, &pattern) {
                        self.read_file(rootfs, &dir.join(name), depth + 1);
                    }
                }
            }
        }
    }

    /// Returns the files that an include directive matches, without the hook's drop-in. A directory is listed only for a pattern.
    fn names(&mut self, rootfs: &Root, dir: &Path, pattern: &[u8]) -> Vec<OsString> {
        if !pattern.iter().any(|byte| b"*?[".contains(byte)) {
            let is_own = pattern == ldconf::DROP_IN.as_bytes() && is_drop_ins(rootfs, dir);
            return if is_own {
                Vec::new()
            } else {
                vec![OsStr::from_bytes(pattern).to_owned()]
            };
        }
        let dir = rootfs
            .open_at(dir, OFlags::PATH | OFlags::DIRECTORY)
            .and_then(|dir| rootfs.open_stored_dir(dir));
        let Ok(entries) = dir.and_then(|dir| Ok(rustix::fs::Dir::new(dir)?)) else {
            return Vec::new();
        };
        let left = &mut self.left.names;
        let names = entries
            .take_while(|_| take(left, 1))
            .flatten()
            .map(|entry| entry.file_name().to_bytes().to_vec());
        let names = names
            .filter(|name| ldconf::matches(pattern, name) && name != ldconf::DROP_IN.as_bytes());
        names
            .map(|name| OsStr::from_bytes(&name).to_owned())
            .collect()
    }
}

fn identity(rootfs: &Root, dir: &Path) -> Option<(u64, u64)> {
    let stat =
        rustix::fs::fstat(rootfs.open_at(dir, OFlags::PATH | OFlags::DIRECTORY).ok()?).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// Reports whether this is the directory of the hook's drop-in. If it does not exist yet, the paths are compared.
fn is_drop_ins(rootfs: &Root, dir: &Path) -> bool {
    let drop_ins = Path::new("/").join(ldconf::DROP_INS);
    dir == drop_ins
        || identity(rootfs, dir).is_some_and(|dir| identity(rootfs, &drop_ins) == Some(dir))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::time::{ClockId, clock_gettime};
    use std::time::Duration;

    /// Each of many files includes a directory of many files, again and again.
    #[test]
    fn an_image_cannot_multiply_the_work() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        for number in 0..300 {
            write(&format!("d/q{number}"), "/lib\n");
            write(&format!("e/{number}.conf"), &"include /d/x*\n".repeat(4000));
        }
        write("etc/ld.so.conf", "include /e/*.conf\n");
        let root = Root::open(dir.path()).unwrap();
        // Of this thread, whatever else runs on the machine.
        let cpu_time = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
        let start = cpu_time();
        let configured = Configured::read(&root);
        let took = cpu_time() - start;
        assert!(took < Duration::from_secs(2), "{took:?}");
        assert_eq!(configured.left.names, 0);
        // The configuration of a distribution is read as a whole.
        write(
            "etc/ld.so.conf",
            "include /etc/ld.so.conf.d/*.conf\ninclude /etc/more\n",
        );
        write("etc/ld.so.conf.d/a.conf", "/d\n");
        write("etc/more", "/e\n");
        let configured = Configured::read(&root);
        assert_eq!(
            (configured.dirs.len(), configured.includes_drop_ins),
            (2, true)
        );
    }
}
