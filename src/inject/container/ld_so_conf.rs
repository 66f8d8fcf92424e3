//! Reads the configuration of an image's ldconfig, within limits.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use base::paths::ContainerPath;
use base::sys::in_root::Root;
use nvidia_host::driver::ldconf::{self, Directive};

/// The name of the configuration in `/etc`.
pub(in crate::inject) const MAIN: &str = "ld.so.conf";
/// Without one of these, nothing in the container rebuilds the cache.
const LDCONFIG: [&str; 4] = [
    "sbin/ldconfig",
    "usr/sbin/ldconfig",
    "usr/bin/ldconfig",
    "bin/ldconfig",
];
/// The longest file that is read, in bytes.
pub(in crate::inject) const MAX_FILE: usize = 64 << 10;
/// The deepest level of included files.
const MAX_DEPTH: usize = 8;

/// Reports whether the image has a ldconfig.
pub(in crate::inject) fn has_ldconfig(rootfs: &Root) -> bool {
    for path in LDCONFIG {
        if rootfs.open_at(Path::new(path), OFlags::PATH).is_ok() {
            return true;
        }
    }
    false
}

/// The image's `/etc/ld.so.conf`.
#[derive(Debug, Default)]
pub(in crate::inject) enum Main {
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
pub(in crate::inject) struct Configured {
    left: Allowance,
    pub main: Main,
    /// Whether the configuration includes the hook's drop-in in `/etc/ld.so.conf.d`
    pub includes_drop_ins: bool,
    /// Device and inode of each directory: `/lib64` and `/usr/lib64` are usually the same
    dirs: Vec<(u64, u64)>,
}

impl Configured {
    pub(in crate::inject) fn read(rootfs: &Root) -> Self {
        let mut configured = Self::default();
        configured.read_file(rootfs, &Path::new("/etc").join(MAIN), 0);
        configured
    }

    /// Returns the directories that ldconfig is to search: `first` before all others, and those of `others` that the image's
    /// configuration lacks.
    pub(in crate::inject) fn lacks(
        &self,
        rootfs: &Root,
        first: &[ContainerPath],
        others: &[ContainerPath],
    ) -> Vec<PathBuf> {
        let mut wanted = Vec::new();
        for dir in first {
            add_new(&mut wanted, dir);
        }
        for dir in others {
            if !self.has(rootfs, dir) {
                add_new(&mut wanted, dir);
            }
        }
        wanted
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

fn add_new(dirs: &mut Vec<PathBuf>, dir: &ContainerPath) {
    let dir = dir.absolute();
    if !dirs.contains(&dir) {
        dirs.push(dir);
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
