//! Parses `/etc/ld.so.conf` of an image, which lists the directories that ldconfig(8) searches. No input or output.
//!
//! No standard describes the format. The reference is `parse_conf` in glibc's `elf/ldconfig.c`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::glob;

/// The directory of the files that most images include.
pub const DROP_INS: &str = "etc/ld.so.conf.d";
/// The hook's file in that directory. If several libraries have the same SONAME, the first directory wins, so the name must sort
/// before the names of the image's files.
pub const DROP_IN: &str = "00-oci-nvidia-hook.conf";
/// The content of a new `/etc/ld.so.conf`, for an image without that file. The files of the distributions contain the same line.
pub const DEFAULT: &str = "include /etc/ld.so.conf.d/*.conf\n";
/// The first line of the hook's file.
const HEADER: &str =
    "# Written by oci-nvidia-hook: where the NVIDIA driver's libraries are in this container.\n";
/// The longest line in bytes (PATH_MAX). A longer path could not be opened.
const MAX_LINE: usize = 4096;

/// A directive of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Directive {
    /// A directory with libraries
    Directory(PathBuf),
    /// Files to include: their directory, and a pattern for their names
    Include(PathBuf, Vec<u8>),
}

/// Parses a file. `dir` is its directory, as an absolute path in the container.
#[must_use]
pub fn parse(text: &[u8], dir: &Path) -> Vec<Directive> {
    let lines = text
        .split(|byte| *byte == b'\n')
        .filter(|line| line.len() <= MAX_LINE && !line.contains(&0));
    lines.flat_map(|line| parse_line(line, dir)).collect()
}

fn parse_line(line: &[u8], dir: &Path) -> Vec<Directive> {
    let line = line
        .split(|byte| *byte == b'#')
        .next()
        .unwrap_or_default()
        .trim_ascii();
    if let Some(rest) = line
        .strip_prefix(b"include")
        .filter(|rest| rest.first().is_some_and(u8::is_ascii_whitespace))
    {
        let patterns = rest
            .split(u8::is_ascii_whitespace)
            .filter(|pattern| !pattern.is_empty());
        return patterns
            .filter_map(|pattern| include(pattern, dir))
            .collect();
    }
    // Before glibc 2.32 a directory could have a type: "/lib=libc6".
    let path = line
        .split(|byte| *byte == b'=')
        .next()
        .unwrap_or_default()
        .trim_ascii_end();
    // Other lines, such as "hwcap 0 nosegneg", are ignored. ldconfig also rejects paths that are not absolute.
    if path.starts_with(b"/") {
        vec![Directive::Directory(
            Path::new(OsStr::from_bytes(path)).to_owned(),
        )]
    } else {
        vec![]
    }
}

/// Parses a pattern, which is relative to the directory of its file. A pattern with wildcards in directory names is ignored: no
/// distribution uses one, and the only consequence is that a directory may be listed twice.
fn include(pattern: &[u8], dir: &Path) -> Option<Directive> {
    let path = dir.join(OsStr::from_bytes(pattern));
    let (parent, name) = (
        path.parent()?.to_owned(),
        path.file_name()?.as_bytes().to_vec(),
    );
    let has_wildcards = parent
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|byte| b"*?[".contains(byte));
    (!has_wildcards).then_some(Directive::Include(parent, name))
}

/// Whether a file name matches a pattern with `*` and `?`, by the rules of glob(3): wildcards do not match a leading dot. Sets in
/// square brackets are not supported and match nothing.
#[must_use]
pub fn matches(pattern: &[u8], name: &[u8]) -> bool {
    if name.first() == Some(&b'.') && pattern.first() != Some(&b'.') {
        return false;
    }
    glob::matches(pattern, name)
}

/// Returns the content of the hook's file, with these directories in this order.
#[must_use]
pub fn drop_in<'a>(dirs: impl Iterator<Item = &'a Path>) -> Vec<u8> {
    let mut text = HEADER.as_bytes().to_vec();
    for dir in dirs {
        text.extend(dir.as_os_str().as_bytes());
        text.push(b'\n');
    }
    text
}

/// Whether the hook wrote a file.
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
            assert_eq!(
                matches(pattern.as_bytes(), name.as_bytes()),
                matching,
                "{pattern} {name}"
            );
        }
        // Not exponential.
        assert!(!matches(&b"*a".repeat(1000), &b"a".repeat(999)));
    }

    #[test]
    fn our_file_is_read_as_it_was_written() {
        let dirs = ["/usr/local/cuda/compat", "/usr/lib64"];
        let text = drop_in(dirs.iter().map(Path::new));
        assert!(is_ours(&text) && !is_ours(b"/usr/lib64\n"));
        assert_eq!(
            parse(&text, Path::new("/etc")),
            dirs.map(|dir| Directive::Directory(dir.into()))
        );
    }

    #[test]
    fn our_file_comes_first() {
        for theirs in [
            "000_cuda.conf",
            "cuda.conf",
            "libc.conf",
            "x86_64-linux-gnu.conf",
            "fakeroot.conf",
            "99_x.conf",
        ] {
            assert!(DROP_IN < theirs || theirs.starts_with("000"), "{theirs}");
        }
        assert!(matches(b"*.conf", DROP_IN.as_bytes()));
    }
}
