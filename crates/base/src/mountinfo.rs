//! Parses mount tables such as /proc/self/mountinfo; see proc_pid_mountinfo(5).

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// A mount. The paths are escaped, see [`escaped`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountEntry<'t> {
    /// The id of the mount, which is reused after the mount is gone
    pub id: u64,
    /// The id of the mount on which it is mounted
    pub parent: u64,
    /// The number of the file system, as in `st_dev`
    pub device: u64,
    /// The directory of the file system that is mounted
    pub root: &'t [u8],
    /// Where it is mounted
    pub point: &'t [u8],
    /// Whether the mount is read-only. Its file system can be read-only too
    pub is_read_only: bool,
    /// Whether mounts below it also appear in its peer group, for a volume on the host
    pub is_shared: bool,
    /// The type of the file system
    pub kind: &'t [u8],
    /// The options of the file system
    pub super_options: &'t [u8],
}

/// Returns the mounts of a table. Lines of another form are left out.
pub fn mounts(table: &[u8]) -> impl Iterator<Item = MountEntry<'_>> {
    table.split(|byte| *byte == b'\n').filter_map(mount)
}

/// `ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [TAG]... - TYPE SOURCE SUPER_OPTIONS`. Spaces in paths are escaped.
fn mount(line: &[u8]) -> Option<MountEntry<'_>> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mut text = || std::str::from_utf8(fields.next()?).ok();
    let (id, parent) = (text()?.parse().ok()?, text()?.parse().ok()?);
    let (major, minor) = text()?.split_once(':')?;
    let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
    let (root, point, options) = (fields.next()?, fields.next()?, fields.next()?);
    let is_read_only = options
        .split(|byte| *byte == b',')
        .any(|option| option == b"ro");
    // Any number of tags, and a single hyphen. The mount source after it can contain "shared:" too.
    let is_shared = fields
        .by_ref()
        .take_while(|field| *field != b"-")
        .any(|tag| tag.starts_with(b"shared:"));
    if is_shared {
        fields.find(|field| *field == b"-")?;
    }
    let (kind, super_options) = (fields.next()?, fields.nth(1).unwrap_or_default());
    Some(MountEntry {
        id,
        parent,
        device,
        root,
        point,
        is_read_only,
        is_shared,
        kind,
        super_options,
    })
}

/// Escapes a path like the kernel does in these files (`seq_path`).
#[must_use]
pub fn escaped(path: &Path) -> Vec<u8> {
    let bytes = path.as_os_str().as_bytes().iter().map(|byte| match byte {
        b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}").into_bytes(),
        _ => vec![*byte],
    });
    bytes.flatten().collect()
}

/// Decodes octal escapes (`\040` for a space); other backslashes are unchanged.
#[must_use]
pub fn unescaped(path: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((first, tail)) = rest.split_first() {
        let escaped = match tail {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] if *first == b'\\' => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        out.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() {
            tail.get(3..).unwrap_or_default()
        } else {
            tail
        };
    }
    PathBuf::from(OsString::from_vec(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_table() {
        let text = b"21 1 8:1 / / rw shared:1 - ext4 /dev/a rw\n\
            22 21 0:5 / /dev ro,nosuid master:2 - devtmpfs x rw,x\n\
            23 21 0:6 /d\\040e /a\\040b/c rw,nosuid shared:4 master:1 - tmpfs shared:9\n\
            what\nis 1 x:y / /this\n24 21 0:6 / /x rw -\n";
        let found: Vec<_> = mounts(text).collect();
        let root = MountEntry {
            id: 21,
            parent: 1,
            device: rustix::fs::makedev(8, 1),
            root: b"/",
            point: b"/",
            is_read_only: false,
            is_shared: true,
            kind: b"ext4",
            super_options: b"rw",
        };
        let device = rustix::fs::makedev(0, 5);
        let dev = MountEntry {
            id: 22,
            parent: 21,
            device,
            point: b"/dev",
            is_read_only: true,
            is_shared: false,
            ..root
        };
        let dev = MountEntry {
            kind: b"devtmpfs",
            super_options: b"rw,x",
            ..dev
        };
        assert_eq!(found.get(..2).unwrap(), [root, dev]);
        let [_, _, last] = found.as_slice() else {
            panic!("{found:?}")
        };
        assert_eq!(
            (last.is_shared, last.kind, last.super_options),
            (true, &b"tmpfs"[..], &b""[..])
        );
        assert_eq!(
            (unescaped(last.root), unescaped(last.point)),
            ("/d e".into(), "/a b/c".into())
        );
    }

    #[test]
    fn escapes() {
        for (path, text) in [
            ("/a b", r"/a\040b"),
            ("/a\\\t\n", r"/a\134\011\012"),
            ("/x", "/x"),
        ] {
            assert_eq!(escaped(Path::new(path)), text.as_bytes());
            assert_eq!(unescaped(text.as_bytes()), Path::new(path));
        }
        assert_eq!(unescaped(br"\999\"), Path::new(r"\999\"));
    }
}
