//! `/etc/ld.so.conf`: where an image's own ldconfig(8) looks for libraries. Pure.
//!
//! No standard describes the file; its authority is `parse_conf` in glibc's `elf/ldconfig.c`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The directory of the files that most images include.
pub const DROP_INS: &str = "etc/ld.so.conf.d";
/// Our file in that directory. For libraries of the same SONAME the directory that is listed first wins, so it must sort
/// before the files of the image.
pub const DROP_IN: &str = "00-oci-nvidia-hook.conf";
/// What is written where an image has no `/etc/ld.so.conf`. Every distribution that has such a file includes the same.
pub const DEFAULT: &str = "include /etc/ld.so.conf.d/*.conf\n";
/// The first line of our file.
const HEADER: &str = "# Written by oci-nvidia-hook: where the NVIDIA driver's libraries are in this container.\n";
/// PATH_MAX: a longer path could not be opened.
const MAX_LINE: usize = 4096;

/// A line that means something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Directive {
    /// A directory with libraries
    Directory(PathBuf),
    /// More files: the directory that they are in, and a pattern for their names
    Include(PathBuf, Vec<u8>),
}

/// What the configuration file in the directory `dir` (absolute, in the container) says.
#[must_use]
pub fn parse(text: &[u8], dir: &Path) -> Vec<Directive> {
    let lines = text.split(|byte| *byte == b'\n').filter(|line| line.len() <= MAX_LINE && !line.contains(&0));
    lines.flat_map(|line| of_line(line, dir)).collect()
}

fn of_line(line: &[u8], dir: &Path) -> Vec<Directive> {
    let line = line.split(|byte| *byte == b'#').next().unwrap_or_default().trim_ascii();
    if let Some(rest) = line.strip_prefix(b"include").filter(|rest| rest.first().is_some_and(u8::is_ascii_whitespace)) {
        let patterns = rest.split(u8::is_ascii_whitespace).filter(|pattern| !pattern.is_empty());
        return patterns.filter_map(|pattern| include(pattern, dir)).collect();
    }
    // Before glibc 2.32 a directory could have a type: "/lib=libc6".
    let path = line.split(|byte| *byte == b'=').next().unwrap_or_default().trim_ascii_end();
    // "hwcap 0 nosegneg" is a line of its own kind. A path that is not absolute is refused by ldconfig.
    if path.starts_with(b"/") {
        vec![Directive::Directory(Path::new(OsStr::from_bytes(path)).to_owned())]
    } else {
        vec![]
    }
}

/// A pattern is relative to the file that it is in. One with wildcards in the names of directories is left out: no
/// distribution has one, and at worst a directory is listed twice.
fn include(pattern: &[u8], dir: &Path) -> Option<Directive> {
    let path = dir.join(OsStr::from_bytes(pattern));
    let (parent, name) = (path.parent()?.to_owned(), path.file_name()?.as_bytes().to_vec());
    let has_wildcards = parent.as_os_str().as_bytes().iter().any(|byte| b"*?[".contains(byte));
    (!has_wildcards).then_some(Directive::Include(parent, name))
}

/// Whether a file name matches a pattern with `*` and `?`, as glob(3) matches them: a leading dot must be written. A set in
/// square brackets matches nothing here.
#[must_use]
pub fn matches(pattern: &[u8], name: &[u8]) -> bool {
    if name.first() == Some(&b'.') && pattern.first() != Some(&b'.') {
        return false;
    }
    let (mut at, mut in_name) = (0, 0);
    // Where to go on if what follows the last star does not fit here.
    let mut star: Option<(usize, usize)> = None;
    while let Some(byte) = name.get(in_name) {
        match pattern.get(at) {
            Some(b'*') => {
                at += 1;
                star = Some((at, in_name));
            }
            Some(wanted) if *wanted == b'?' || wanted == byte => {
                at += 1;
                in_name += 1;
            }
            _ => match &mut star {
                Some((after_star, taken)) => {
                    *taken += 1;
                    (at, in_name) = (*after_star, *taken);
                }
                None => return false,
            },
        }
    }
    pattern.iter().skip(at).all(|byte| *byte == b'*')
}

/// Our file: these directories, in this order.
#[must_use]
pub fn drop_in<'a>(dirs: impl Iterator<Item = &'a Path>) -> Vec<u8> {
    let mut text = HEADER.as_bytes().to_vec();
    for dir in dirs {
        text.extend(dir.as_os_str().as_bytes());
        text.push(b'\n');
    }
    text
}

/// Whether a file of our name was written by us.
#[must_use]
pub fn is_ours(text: &[u8]) -> bool {
    text.starts_with(HEADER.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_as_ldconfig_reads_them() {
        let text =
            b"# comment\n/usr/local/lib # more\n\n  /opt/x  \ninclude ld.so.conf.d/*.conf /a/b.conf\n/lib=libc6\n\
            hwcap 0 nosegneg\nrelative/dir\nincluded\ninclude\t/x*/y.conf\n/with space\n/nul\0\n/last";
        let dir = |path: &str| Directive::Directory(path.into());
        let include = |dir: &str, name: &str| Directive::Include(dir.into(), name.into());
        assert_eq!(
            parse(text, Path::new("/etc")),
            [
                dir("/usr/local/lib"),
                dir("/opt/x"),
                include("/etc/ld.so.conf.d", "*.conf"),
                include("/a", "b.conf"),
                dir("/lib"),
                dir("/with space"),
                dir("/last"),
            ]
        );
        assert_eq!(parse(&b"/x".repeat(MAX_LINE), Path::new("/etc")), []);
    }

    #[test]
    fn patterns() {
        for (pattern, name, matching) in [
            ("*.conf", DROP_IN, true),
            ("*", DROP_IN, true),
            ("??-*hook.conf", DROP_IN, true),
            (DROP_IN, DROP_IN, true),
            ("*a*b*c", "xaxbxbxc", true),
            ("*a*b*c", "xaxbxbx", false),
            ("*.conf", ".conf", false),
            (".*", ".conf", true),
            ("*.conf", "x.conf~", false),
            ("x", "", false),
            ("**", "", true),
            ("[0]*", DROP_IN, false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), matching, "{pattern} {name}");
        }
        // Not exponential.
        assert!(!matches(&b"*a".repeat(1000), &b"a".repeat(999)));
    }

    #[test]
    fn our_file_is_read_as_it_was_written() {
        let dirs = ["/usr/local/cuda/compat", "/usr/lib64"];
        let text = drop_in(dirs.iter().map(Path::new));
        assert!(is_ours(&text) && !is_ours(b"/usr/lib64\n"));
        assert_eq!(parse(&text, Path::new("/etc")), dirs.map(|dir| Directive::Directory(dir.into())));
    }

    #[test]
    fn our_file_comes_first() {
        for theirs in ["000_cuda.conf", "cuda.conf", "libc.conf", "x86_64-linux-gnu.conf", "fakeroot.conf", "99_x.conf"]
        {
            assert!(DROP_IN < theirs || theirs.starts_with("000"), "{theirs}");
        }
        assert!(matches(b"*.conf", DROP_IN.as_bytes()));
    }
}
