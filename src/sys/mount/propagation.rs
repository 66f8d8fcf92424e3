//! Whether a mount passes on what is mounted below it, asked of the kernel for one mount: statmount(2), Linux 6.8. The whole
//! table, which is what there is before, takes as long to write as a host has mounts.

use std::io;
use std::os::fd::AsFd;

use nix::libc;
use rustix::fs::{AtFlags, StatxFlags};

/// `STATX_MNT_ID_UNIQUE`: a number that no other mount gets before the next boot.
const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
/// `STATMOUNT_MNT_BASIC`
const MNT_BASIC: u64 = 2;
/// statmount(2) has the same number on all architectures: it came after they were given one table.
const SYS_STATMOUNT: libc::c_long = 457;
/// `struct mnt_id_req`, its first version.
const REQUEST_SIZE: u64 = 24;
/// `struct statmount` has 512 bytes, and we ask for no strings.
const ANSWER: usize = 128;

/// Whether the mount that `file` lies on is shared; `None` if this kernel, or a seccomp filter, does not tell.
pub fn is_shared(file: impl AsFd) -> Option<bool> {
    let stat = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, MNT_ID_UNIQUE).ok()?;
    if stat.stx_mask & MNT_ID_UNIQUE.bits() == 0 {
        return None;
    }
    shared_in(&ask(stat.stx_mnt_id).ok()?)
}

fn ask(mount: u64) -> io::Result<[u64; ANSWER]> {
    let request: [u64; 3] = [REQUEST_SIZE, mount, MNT_BASIC];
    let mut answer = [0; ANSWER];
    // SAFETY: statmount(2) reads the 24 bytes of `request`, whose first field says that there are so many, and writes at
    // most the given number of bytes to `answer`, which has them. Both live until it returns; it keeps neither.
    let result =
        unsafe { libc::syscall(SYS_STATMOUNT, request.as_ptr(), answer.as_mut_ptr(), size_of_val(&answer), 0_u32) };
    if result == 0 { Ok(answer) } else { Err(io::Error::last_os_error()) }
}

/// The fields are `size`, `mnt_opts`, `mask`, …, and the tenth word is `mnt_propagation`.
fn shared_in(answer: &[u64]) -> Option<bool> {
    let (mask, propagation) = (answer.get(1)?, answer.get(9)?);
    (mask & MNT_BASIC != 0).then_some(propagation & libc::MS_SHARED != 0)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn the_answer_is_read() {
        let mut answer = [0; ANSWER];
        assert_eq!(shared_in(&answer), None, "not told");
        (answer[1], answer[9]) = (MNT_BASIC, libc::MS_PRIVATE);
        assert_eq!(shared_in(&answer), Some(false));
        answer[9] = libc::MS_SHARED | libc::MS_SLAVE;
        assert_eq!(shared_in(&answer), Some(true));
        assert_eq!(shared_in(&[]), None);
    }

    /// Where the kernel tells, it tells what the table has.
    #[test]
    fn it_is_what_mountinfo_says() {
        let file = std::fs::File::open("/proc/self").unwrap();
        let Some(shared) = is_shared(&file) else { return };
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).unwrap();
        let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:")).unwrap().trim();
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = table.lines().find(|line| line.split(' ').next() == Some(id)).unwrap();
        assert_eq!(line.split(" - ").next().unwrap().contains("shared:"), shared, "{line}");
    }
}
