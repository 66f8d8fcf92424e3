//! Reads the properties of one mount with statmount(2), Linux 6.8. Earlier kernels only have the whole mount table, and a node
//! with many containers has thousands of mounts.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use nix::libc;
use rustix::fs::{AtFlags, CWD, Statx, StatxFlags};

use crate::sys::{answer, proc_file};

/// `STATX_MNT_ID_UNIQUE`: an id that is not reused before the next boot.
const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
/// `STATMOUNT_SB_BASIC | STATMOUNT_MNT_BASIC | STATMOUNT_MNT_ROOT`
const ASKED: u64 = 0b1011;
/// The system call number, which is the same on all architectures that the driver supports.
const SYS_STATMOUNT: libc::c_long = 457;
/// `struct mnt_id_req`, its first version.
const REQUEST_SIZE: u64 = 24;
/// The size of the answer in words of 8 bytes: 64 for `struct statmount`, and PATH_MAX bytes for the path after it.
const ANSWER: usize = 64 + 4096 / 8;

/// The properties of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountFacts {
    /// Whether mounts below it propagate to its peers
    pub is_shared: bool,
    /// Whether the mount is read-only
    pub is_read_only: bool,
    /// The magic number of the file system, see statfs(2)
    pub magic: u64,
    /// The directory of the file system that is mounted; empty if the path is not UTF-8
    pub root: String,
    /// The parent mount, as in [`Id::Unique`]
    pub parent: u64,
}

/// The id of a mount. The ids that one process reads are comparable, because the kernel reports all of them in the same form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Id {
    /// An id that is not reused before the next boot. statmount(2) takes this one.
    Unique(u64),
    /// The id in /proc/PID/mountinfo. It is reused after the mount is gone, but an open file keeps its mount.
    Reused(u64),
}

impl Id {
    /// The bits of statx(2) that ask for the id. Kernels before 6.8 ignore the unknown bit, and the mask of the answer shows which id it
    /// contains.
    pub const ASKED: StatxFlags = MNT_ID_UNIQUE.union(StatxFlags::MNT_ID);
}

/// Returns the id in an answer of statx(2) that was asked for [`Id::ASKED`], or `None` before Linux 5.8.
pub fn id_of(stat: &Statx) -> Option<Id> {
    let has = |flag: StatxFlags| stat.stx_mask & flag.bits() != 0;
    if has(MNT_ID_UNIQUE) {
        Some(Id::Unique(stat.stx_mnt_id))
    } else if has(StatxFlags::MNT_ID) {
        Some(Id::Reused(stat.stx_mnt_id))
    } else {
        None
    }
}

/// Returns the id of the mount that contains `file`. It comes from statx(2) since Linux 5.8, and from /proc/self/fdinfo on
/// earlier kernels or if a seccomp filter denies statx(2).
///
/// # Errors
/// If neither reports the id.
pub fn id(file: impl AsFd) -> io::Result<Id> {
    if let Ok(stat) = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, Id::ASKED)
        && let Some(id) = id_of(&stat)
    {
        return Ok(id);
    }
    reused_id(file).map(Id::Reused)
}

/// Returns the id that the mount of `file` has in /proc/PID/mountinfo.
///
/// # Errors
/// If the kernel does not report it.
pub fn reused_id(file: impl AsFd) -> io::Result<u64> {
    let info = proc_file::read_text(format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd()))?;
    let id = info
        .lines()
        .find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "the kernel does not report the mount of an open file",
        )
    })
}

/// Returns the properties of the mount that contains `file`, or `None` if the kernel lacks statmount(2) or a seccomp filter denies
/// it.
pub fn facts(file: impl AsFd) -> Option<MountFacts> {
    facts_of(id(file).ok()?)
}

/// Like [`facts`], for the mount that contains the file at `path` on the host. A link at its end is not followed.
pub fn facts_at(path: &Path) -> Option<MountFacts> {
    let stat = rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, Id::ASKED).ok()?;
    facts_of(id_of(&stat)?)
}

/// Like [`facts`], for a mount with a known id.
pub fn facts_of(mount: Id) -> Option<MountFacts> {
    let Id::Unique(mount) = mount else {
        return None;
    };
    let mut answer = [0; ANSWER];
    ask(mount, &mut answer).ok()?;
    parse(&answer)
}

/// Fills `answer`, which is not returned, because it is longer than a page and would be copied.
fn ask(mount: u64, answer: &mut [u64; ANSWER]) -> rustix::io::Result<()> {
    let request: [u64; 3] = [REQUEST_SIZE, mount, ASKED];
    // SAFETY: statmount(2) reads the 24 bytes of `request`, whose first field says that there are so many, and writes at
    // most the given number of bytes to `answer`, which has them. Both live until it returns; it keeps neither.
    let result = unsafe {
        libc::syscall(
            SYS_STATMOUNT,
            request.as_ptr(),
            answer.as_mut_ptr(),
            size_of_val(answer),
            0_u32,
        )
    };
    answer::of(result).map(drop)
}

/// Parses `struct statmount`: the words `mask` (1), `sb_magic` (3), `mnt_parent_id` (6), `mnt_attr` (8) and `mnt_propagation` (9),
/// and the half word `mnt_root` (26), which is the offset of the path in the strings after the struct.
fn parse(answer: &[u64]) -> Option<MountFacts> {
    let word = |at: usize| answer.get(at).copied();
    if word(1)? & ASKED != ASKED {
        return None;
    }
    let half = |at: usize| {
        Some(
            word(at / 2)?
                .to_ne_bytes()
                .chunks(4)
                .nth(at % 2)?
                .try_into()
                .map(u32::from_ne_bytes),
        )
    };
    let at = usize::try_from(half(26)?.ok()?).ok()?;
    let root = text_at(answer.get(64..)?, at)?;
    Some(MountFacts {
        is_shared: word(9)? & libc::MS_SHARED != 0,
        is_read_only: word(8)? & libc::MOUNT_ATTR_RDONLY != 0,
        magic: word(3)?,
        root,
        parent: word(6)?,
    })
}

/// Returns the text at this offset of the strings after the struct, or an empty one if it is not UTF-8. Only its bytes are copied,
/// because the buffer is much longer. Returns `None` if the text has no end.
fn text_at(strings: &[u64], offset: usize) -> Option<String> {
    let mut text = Vec::new();
    let mut skipped = offset % size_of::<u64>();
    for word in strings.get(offset / size_of::<u64>()..)? {
        let bytes = word.to_ne_bytes();
        let bytes = bytes.get(skipped..)?;
        if let Some(end) = bytes.iter().position(|byte| *byte == 0) {
            text.extend_from_slice(bytes.get(..end)?);
            return Some(String::from_utf8(text).unwrap_or_default());
        }
        text.extend_from_slice(bytes);
        skipped = 0;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;
    use rustix::io::Errno;

    #[test]
    fn the_answer_is_read() {
        let mut answer = [0; ANSWER];
        assert_eq!(
            parse(&answer),
            None,
            "the kernel did not fill in the fields"
        );
        answer[1] = ASKED;
        answer[3] = 0x6367_7270;
        answer[6] = 7;
        (answer[8], answer[9]) = (libc::MOUNT_ATTR_RDONLY, libc::MS_SHARED | libc::MS_SLAVE);
        answer[13] = u64::from_ne_bytes(*b"\x02\0\0\0\0\0\0\0"); // mnt_root and mnt_point
        answer[64] = u64::from_ne_bytes(*b"x\0/a b\0y");
        let facts = MountFacts {
            is_shared: true,
            is_read_only: true,
            magic: 0x6367_7270,
            root: "/a b".to_owned(),
            parent: 7,
        };
        assert_eq!(parse(&answer), Some(facts));
        answer[13] = u64::MAX;
        assert_eq!(parse(&answer), None, "after the end");
        assert_eq!(parse(&[]), None);
    }

    /// statmount(2) and the mount table agree.
    #[test]
    fn the_facts_are_those_of_mountinfo() {
        let file = std::fs::File::open("/proc/self").unwrap();
        let Some(facts) = facts(&file) else {
            let refused = ask(0, &mut [0; ANSWER]).unwrap_err();
            assert!(
                matches!(refused, Errno::NOSYS | Errno::PERM),
                "statmount(2) exists and failed: {refused:?}"
            );
            return;
        };
        let info =
            std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).unwrap();
        let id = info
            .lines()
            .find_map(|line| line.strip_prefix("mnt_id:"))
            .unwrap()
            .trim();
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = table
            .lines()
            .find(|line| line.split(' ').next() == Some(id))
            .unwrap();
        assert_eq!(
            line.split(" - ").next().unwrap().contains("shared:"),
            facts.is_shared,
            "{line}"
        );
        assert_eq!(line.split(' ').nth(3).unwrap(), facts.root, "{line}");
        assert_eq!(
            line.split(' ')
                .nth(5)
                .unwrap()
                .split(',')
                .any(|option| option == "ro"),
            facts.is_read_only,
            "{line}"
        );
        assert_eq!(facts.magic, 0x9fa0, "proc");
        let point = std::path::Path::new(line.split(' ').nth(4).unwrap());
        let parent = super::id(std::fs::File::open(point.parent().unwrap()).unwrap()).unwrap();
        assert_eq!(parent, Id::Unique(facts.parent), "{line}");
    }

    #[test]
    fn ids_distinguish_mounts() {
        let open = |path| std::fs::File::open(path).unwrap();
        let (status, stat, null) = (
            open("/proc/self/status"),
            open("/proc/self/stat"),
            open("/dev/null"),
        );
        assert_eq!(id(&status).unwrap(), id(&stat).unwrap());
        assert_ne!(id(&status).unwrap(), id(&null).unwrap());
        assert_eq!(reused_id(&status).unwrap(), reused_id(&stat).unwrap());
        assert_ne!(reused_id(&status).unwrap(), reused_id(&null).unwrap());
    }
}
