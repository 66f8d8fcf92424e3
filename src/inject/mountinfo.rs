//! Parses /proc/self/mountinfo; see proc_pid_mountinfo(5).

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A mount. The paths are escaped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Line<'t> {
    pub id: u64,
    pub parent: u64,
    /// `MAJOR:MINOR` of the file system
    pub device: &'t [u8],
    /// The directory of the file system that is mounted
    pub root: &'t [u8],
    pub point: &'t [u8],
}

/// Returns all mounts.
pub(super) fn lines(mountinfo: &[u8]) -> impl Iterator<Item = Line<'_>> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(line)
}

fn line(line: &[u8]) -> Option<Line<'_>> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
    let (id, parent) = (number()?, number()?);
    Some(Line { id, parent, device: fields.next()?, root: fields.next()?, point: fields.next()? })
}

/// Returns the ids of mounts with shared propagation: mounts below them also appear in their peer group, for a volume on the
/// host.
pub(super) fn shared(mountinfo: &[u8]) -> Vec<u64> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(id_of_shared).collect()
}

fn id_of_shared(line: &[u8]) -> Option<u64> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    // Six fields, any number of optional fields, and a single hyphen. The mount source after it can contain "shared:" too.
    let mut optional = fields.skip(5).take_while(|field| *field != b"-");
    optional.any(|field| field.starts_with(b"shared:")).then_some(id)
}

/// Reports whether something is mounted below a directory, not on it.
pub(super) fn any_below(mountinfo: &[u8], dir: &Path) -> bool {
    let mut prefix = escaped(dir);
    prefix.push(b'/');
    let point = |line: &[u8]| line.split(|byte| *byte == b' ').nth(4).is_some_and(|point| point.starts_with(&prefix));
    mountinfo.split(|byte| *byte == b'\n').any(point)
}

/// Returns the device numbers (`st_dev`) of the mounts whose mount point `is_counted` accepts.
pub(super) fn devices(mountinfo: &[u8], is_counted: impl Fn(&[u8]) -> bool) -> Vec<u64> {
    let mounts = mountinfo.split(|byte| *byte == b'\n').filter_map(device_and_point);
    mounts.filter(|(_, point)| is_counted(point)).map(|(device, _)| device).collect()
}

fn device_and_point(line: &[u8]) -> Option<(u64, &[u8])> {
    let mut fields = line.split(|byte| *byte == b' ').skip(2);
    let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    Some((rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?), fields.nth(1)?))
}

/// Returns the device numbers (`st_dev`) of the mounts that are neither on the directory `dir` nor below it.
pub(super) fn devices_outside(mountinfo: &[u8], dir: &Path) -> Vec<u64> {
    let dir = escaped(dir);
    devices(mountinfo, |point| point.strip_prefix(&*dir).is_none_or(|rest| !matches!(rest.first(), None | Some(b'/'))))
}

/// Escapes a path like the kernel does in this file (`seq_path`).
pub(super) fn escaped(path: &Path) -> Vec<u8> {
    let mut escaped = Vec::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => escaped.extend(format!("\\{byte:03o}").bytes()),
            _ => escaped.push(*byte),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    type Numbers = std::collections::BTreeSet<u64>;

    const TEXT: &[u8] = b"21 1 8:1 / / rw shared:1 - ext4 /dev/a rw\n\
        22 21 0:5 / /dev rw,nosuid master:2 - devtmpfs x rw\n\
        23 21 0:6 / /a\\040b/c rw,nosuid shared:4 master:1 - tmpfs shared:9 rw\n\
        24 21 0:6 / /x rw - tmpfs shared:9 rw\n";

    #[test]
    fn shared_mounts() {
        assert_eq!(shared(TEXT), [21, 23]);
        assert!(shared(b"").is_empty());
    }

    #[test]
    fn mounts_below() {
        for (dir, below) in [("/a b", true), ("/a b/c", false), ("/a", false), ("/de", false), ("/dev", false)] {
            assert_eq!(any_below(TEXT, Path::new(dir)), below, "{dir}");
        }
    }

    #[test]
    fn file_systems() {
        let numbers = |minors: &[u32]| minors.iter().map(|minor| rustix::fs::makedev(0, *minor)).collect::<Numbers>();
        let disk = Numbers::from([rustix::fs::makedev(8, 1)]);
        assert_eq!(Numbers::from_iter(devices(TEXT, |_| true)), &disk | &numbers(&[5, 6]));
        assert_eq!(Numbers::from_iter(devices(TEXT, |point| point == b"/dev")), numbers(&[5]));
        for (dir, outside) in [("/dev", &[6][..]), ("/a b", &[5, 6]), ("/de", &[5, 6]), ("/x", &[5, 6])] {
            assert_eq!(Numbers::from_iter(devices_outside(TEXT, Path::new(dir))), &disk | &numbers(outside), "{dir}");
        }
        let twice = b"1 0 0:7 / /m/rootfs rw - overlay o rw\n2 1 0:8 / /m/rootfs/dev rw - tmpfs t rw\n3 0 0:9 / /m rw - a b c\n";
        assert_eq!(Numbers::from_iter(devices_outside(twice, Path::new("/m/rootfs"))), numbers(&[9]));
        assert!(devices(b"what\nis 1 x:y / /this\n", |_| true).is_empty());
    }
}
