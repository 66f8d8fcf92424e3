//! What must be known of the mounts around a mount point. Parses /proc/self/mountinfo, see proc_pid_mountinfo(5).

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::few;
use crate::sys::proc_file;

/// The ids of mounts that pass on what is mounted below them: to the host, for a volume with shared propagation.
#[must_use]
pub(super) fn shared(mountinfo: &[u8]) -> BTreeSet<u64> {
    let shared = |line: &&[u8]| {
        let fields = line.split(|byte| *byte == b' ').skip(6);
        fields.take_while(|field| *field != b"-").any(|field| field.starts_with(b"shared:"))
    };
    let id = |line: &[u8]| std::str::from_utf8(line.split(|byte| *byte == b' ').next()?).ok()?.parse().ok();
    few::set(mountinfo.split(|byte| *byte == b'\n').filter(shared).filter_map(id))
}

/// Whether something is mounted below a directory (not on it).
#[must_use]
pub(super) fn any_below(mountinfo: &[u8], dir: &Path) -> bool {
    let mut prefix = escaped(dir);
    prefix.push(b'/');
    let point = |line: &[u8]| line.split(|byte| *byte == b' ').nth(4).is_some_and(|point| point.starts_with(&prefix));
    mountinfo.split(|byte| *byte == b'\n').any(point)
}

/// The mount id in the text of /proc/self/fdinfo/N.
#[must_use]
pub(super) fn mount_id(fdinfo: &str) -> Option<u64> {
    fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

/// Whether two open files lie on the same mount. For a directory of a rootfs and the rootfs itself: whether it is no volume.
pub(super) fn is_same_mount(a: impl AsFd, b: impl AsFd) -> io::Result<bool> {
    let id = |file: &dyn AsFd| -> io::Result<Option<u64>> {
        Ok(mount_id(&proc_file::read_text(format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd()))?))
    };
    let (a, b) = (id(&a)?, id(&b)?);
    Ok(a.is_some() && a == b)
}

/// As the kernel writes paths there (`seq_path`).
fn escaped(path: &Path) -> Vec<u8> {
    let bytes = path.as_os_str().as_bytes().iter();
    let escape = |byte: &u8| match byte {
        b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}").into_bytes(),
        _ => vec![*byte],
    };
    bytes.flat_map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"21 1 8:1 / / rw shared:1 - ext4 /dev/a rw\n\
        22 21 0:5 / /dev rw,nosuid master:2 - devtmpfs x rw\n\
        23 21 0:6 / /a\\040b/c rw,nosuid shared:4 master:1 - tmpfs shared:9 rw\n\
        24 21 0:6 / /x rw - tmpfs shared:9 rw\n";

    #[test]
    fn shared_mounts() {
        assert_eq!(shared(TEXT), BTreeSet::from([21, 23]));
        assert_eq!(shared(b""), BTreeSet::new());
    }

    #[test]
    fn mounts_below() {
        for (dir, below) in [("/a b", true), ("/a b/c", false), ("/a", false), ("/de", false), ("/dev", false)] {
            assert_eq!(any_below(TEXT, Path::new(dir)), below, "{dir}");
        }
    }

    #[test]
    fn mount_ids() {
        assert_eq!(mount_id("pos:\t0\nflags:\t012000000\nmnt_id:\t29\nino:\t5\n"), Some(29));
        assert_eq!(mount_id("pos:\t0\n"), None);
    }
}
