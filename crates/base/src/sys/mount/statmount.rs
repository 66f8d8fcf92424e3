//! What the kernel tells of one mount: statmount(2), Linux 6.8. The whole table, which is all that there is before, takes the
//! longer to write the more mounts a host has, and a node with many containers has thousands.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::libc;
use rustix::fs::{AtFlags, StatxFlags};

use crate::sys::proc_file;

/// `STATX_MNT_ID_UNIQUE`: a number that no other mount gets before the next boot.
const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
/// `STATMOUNT_SB_BASIC | STATMOUNT_MNT_BASIC | STATMOUNT_MNT_ROOT`
const ASKED: u64 = 0b1011;
/// statmount(2) has the same number on all architectures: it came after they were given one table.
const SYS_STATMOUNT: libc::c_long = 457;
/// `struct mnt_id_req`, its first version.
const REQUEST_SIZE: u64 = 24;
/// In words of 8 bytes: `struct statmount` has 64, and the longest path that a mount can have been made of fits behind it.
const ANSWER: usize = 64 + 4096 / 8;

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountFacts {
    /// It passes on what is mounted below it
    pub is_shared: bool,
    /// Nothing can be written to it
    pub is_read_only: bool,
    /// The kind of its file system, statfs(2)
    pub magic: u64,
    /// Which directory of its file system it shows; empty if that is no text
    pub root: String,
    /// The mount that it is mounted on, as [`Id::Unique`] has it
    pub parent: u64,
}

/// A mount. Ids of one process are comparable: the kernel reports all of them in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Id {
    /// No other mount gets it before the next boot. statmount(2) knows a mount by it.
    Unique(u64),
    /// As in /proc/PID/mountinfo: used again once the mount is gone, which none is that has an open file.
    Reused(u64),
}

/// The mount that `file` lies on: statx(2) since Linux 5.8, and /proc/self/fdinfo before, or where a seccomp filter refuses
/// statx.
///
/// # Errors
/// If neither reports it.
pub fn id(file: impl AsFd) -> io::Result<Id> {
    let asked = MNT_ID_UNIQUE | StatxFlags::MNT_ID;
    if let Ok(stat) = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, asked) {
        let has = |flag: StatxFlags| stat.stx_mask & flag.bits() != 0;
        match () {
            () if has(MNT_ID_UNIQUE) => return Ok(Id::Unique(stat.stx_mnt_id)),
            () if has(StatxFlags::MNT_ID) => return Ok(Id::Reused(stat.stx_mnt_id)),
            () => {}
        }
    }
    reused_id(file).map(Id::Reused)
}

/// The number that the mount of `file` has in /proc/PID/mountinfo.
///
/// # Errors
/// If the kernel does not report it.
pub fn reused_id(file: impl AsFd) -> io::Result<u64> {
    let info = proc_file::read_text(format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd()))?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the kernel does not report the mount of an open file"))
}

/// The mount that `file` lies on; `None` if this kernel, or a seccomp filter, does not tell.
pub fn facts(file: impl AsFd) -> Option<MountFacts> {
    facts_of(id(file).ok()?)
}

/// The same of a mount whose id is known.
pub fn facts_of(mount: Id) -> Option<MountFacts> {
    match mount {
        Id::Unique(mount) => parse(&ask(mount).ok()?),
        Id::Reused(_) => None,
    }
}

fn ask(mount: u64) -> io::Result<[u64; ANSWER]> {
    let request: [u64; 3] = [REQUEST_SIZE, mount, ASKED];
    let mut answer = [0; ANSWER];
    // SAFETY: statmount(2) reads the 24 bytes of `request`, whose first field says that there are so many, and writes at
    // most the given number of bytes to `answer`, which has them. Both live until it returns; it keeps neither.
    let result =
        unsafe { libc::syscall(SYS_STATMOUNT, request.as_ptr(), answer.as_mut_ptr(), size_of_val(&answer), 0_u32) };
    if result == 0 { Ok(answer) } else { Err(io::Error::last_os_error()) }
}

/// Of `struct statmount` the words `mask`, `sb_magic`, `mnt_parent_id`, `mnt_attr`, `mnt_propagation`, and at the half word `mnt_root` where
/// in the text behind it the root begins.
fn parse(answer: &[u64]) -> Option<MountFacts> {
    let word = |at: usize| answer.get(at).copied();
    if word(1)? & ASKED != ASKED {
        return None;
    }
    let half = |at: usize| Some(word(at / 2)?.to_ne_bytes().chunks(4).nth(at % 2)?.try_into().map(u32::from_ne_bytes));
    let at = usize::try_from(half(26)?.ok()?).ok()?;
    let texts: Vec<u8> = answer.get(64..)?.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let root = CStr::from_bytes_until_nul(texts.get(at..)?).ok()?;
    Some(MountFacts {
        is_shared: word(9)? & libc::MS_SHARED != 0,
        is_read_only: word(8)? & libc::MOUNT_ATTR_RDONLY != 0,
        magic: word(3)?,
        root: root.to_str().unwrap_or_default().to_owned(),
        parent: word(6)?,
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn the_answer_is_read() {
        let mut answer = [0; ANSWER];
        assert_eq!(parse(&answer), None, "not told");
        answer[1] = ASKED;
        answer[3] = 0x6367_7270;
        answer[6] = 7;
        (answer[8], answer[9]) = (libc::MOUNT_ATTR_RDONLY, libc::MS_SHARED | libc::MS_SLAVE);
        answer[13] = u64::from_ne_bytes(*b"\x02\0\0\0\0\0\0\0"); // mnt_root and mnt_point
        answer[64] = u64::from_ne_bytes(*b"x\0/a b\0y");
        let facts =
            MountFacts { is_shared: true, is_read_only: true, magic: 0x6367_7270, root: "/a b".to_owned(), parent: 7 };
        assert_eq!(parse(&answer), Some(facts));
        answer[13] = u64::MAX;
        assert_eq!(parse(&answer), None, "behind the end");
        assert_eq!(parse(&[]), None);
    }

    /// Where the kernel tells, it tells what the table has.
    #[test]
    fn it_is_what_mountinfo_says() {
        let file = std::fs::File::open("/proc/self").unwrap();
        let Some(facts) = facts(&file) else {
            let refused = ask(0).unwrap_err().raw_os_error();
            assert!(matches!(refused, Some(libc::ENOSYS | libc::EPERM)), "it is there, and did not tell: {refused:?}");
            return;
        };
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).unwrap();
        let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:")).unwrap().trim();
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = table.lines().find(|line| line.split(' ').next() == Some(id)).unwrap();
        assert_eq!(line.split(" - ").next().unwrap().contains("shared:"), facts.is_shared, "{line}");
        assert_eq!(line.split(' ').nth(3).unwrap(), facts.root, "{line}");
        assert_eq!(
            line.split(' ').nth(5).unwrap().split(',').any(|option| option == "ro"),
            facts.is_read_only,
            "{line}"
        );
        assert_eq!(facts.magic, 0x9fa0, "proc");
        let point = std::path::Path::new(line.split(' ').nth(4).unwrap());
        let parent = super::id(std::fs::File::open(point.parent().unwrap()).unwrap()).unwrap();
        assert_eq!(parent, Id::Unique(facts.parent), "{line}");
    }

    #[test]
    fn ids_tell_mounts_apart() {
        let open = |path| std::fs::File::open(path).unwrap();
        let (status, stat, null) = (open("/proc/self/status"), open("/proc/self/stat"), open("/dev/null"));
        assert_eq!(id(&status).unwrap(), id(&stat).unwrap());
        assert_ne!(id(&status).unwrap(), id(&null).unwrap());
        assert_eq!(reused_id(&status).unwrap(), reused_id(&stat).unwrap());
        assert_ne!(reused_id(&status).unwrap(), reused_id(&null).unwrap());
    }
}
