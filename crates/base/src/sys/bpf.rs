//! bpf(2): as much of it as reads the device programs of a cgroup and puts longer ones in their place.
//!
//! Layouts and constants: `include/uapi/linux/bpf.h`, and bpf(2). Each attribute struct is a prefix of one member of
//! `union bpf_attr`; the kernel is told its size, takes fields it does not get as zero, and accepts fields it does not
//! know as long as they are zero.
#![allow(unsafe_code, reason = "neither nix nor rustix has bpf(2)")]

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::libc;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_PROG_DETACH: libc::c_int = 9;
const BPF_PROG_GET_FD_BY_ID: libc::c_int = 13;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_PROG_QUERY: libc::c_int = 16;

const BPF_PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const BPF_CGROUP_DEVICE: u32 = 6;
const BPF_F_QUERY_EFFECTIVE: u32 = 1;

/// Attach flag: a descendant's program takes the place of this one.
pub const BPF_F_ALLOW_OVERRIDE: u32 = 1;
/// Attach flag: several programs run, those of all ancestors too, and all must allow.
pub const BPF_F_ALLOW_MULTI: u32 = 1 << 1;
const BPF_F_REPLACE: u32 = 1 << 2;

/// The verifier's reason is its last words; a log that does not fit is cut, which costs us at most the reason.
const LOG_SIZE: usize = 64 * 1024;

/// One eBPF instruction, `struct bpf_insn`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Insn {
    /// Class, operation and operand kind.
    pub code: u8,
    registers: u8,
    /// Jump distance, or offset from a pointer.
    pub off: i16,
    /// Immediate operand.
    pub imm: i32,
}

impl Insn {
    /// An instruction from its parts.
    #[must_use]
    pub const fn new(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> Self {
        // C bit-fields: `dst_reg` comes first, which is the low half only on little-endian machines
        let registers = if cfg!(target_endian = "little") { src << 4 | dst & 15 } else { dst << 4 | src & 15 };
        Self { code, registers, off, imm }
    }

    /// The register written to or compared.
    #[must_use]
    pub const fn dst(self) -> u8 {
        if cfg!(target_endian = "little") { self.registers & 15 } else { self.registers >> 4 }
    }

    /// The register read from.
    #[must_use]
    pub const fn src(self) -> u8 {
        if cfg!(target_endian = "little") { self.registers >> 4 } else { self.registers & 15 }
    }
}

/// The device programs of one cgroup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attached {
    /// How they are attached: none, [`BPF_F_ALLOW_OVERRIDE`] or [`BPF_F_ALLOW_MULTI`].
    pub flags: u32,
    /// Their ids.
    pub ids: Vec<u32>,
    /// Of the list; another one after each change. KERNEL(6.17): 0 before.
    pub revision: u64,
}

/// A loaded program, as far as the kernel shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgInfo {
    /// The name its loader gave it.
    pub name: String,
    /// How many maps it uses.
    pub maps: u32,
    /// Its instructions after verification; `None` where the kernel withholds them (see [`prog_info`]).
    pub insns: Option<Vec<Insn>>,
}

/// Why the kernel did not load a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// What the call returned.
    pub errno: Errno,
    /// The verifier's last words; empty if it was not asked.
    pub reason: String,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::report::errno_text(self.errno))?;
        if self.reason.is_empty() { Ok(()) } else { write!(f, ", the verifier says {:?}", self.reason) }
    }
}

impl std::error::Error for LoadError {}

#[derive(Default)]
#[repr(C)]
struct QueryAttr {
    target_fd: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    pad: u32,
    // arrays that we do not ask for, and what newer kernels write back
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// Ids and attach flags of the device programs attached to a cgroup directory itself.
///
/// EPERM without `CAP_NET_ADMIN`, EINVAL on kernels without cgroup BPF, EBADF if `cgroup` is not a cgroup2 directory.
#[doc(alias = "BPF_PROG_QUERY")]
pub fn attached(cgroup: BorrowedFd<'_>) -> nix::Result<Attached> {
    query(cgroup, 0)
}

/// Ids of all device programs that decide for a cgroup, its ancestors' too. Errors as for [`attached`].
#[doc(alias = "BPF_F_QUERY_EFFECTIVE")]
pub fn effective(cgroup: BorrowedFd<'_>) -> nix::Result<Vec<u32>> {
    query(cgroup, BPF_F_QUERY_EFFECTIVE).map(|attached| attached.ids)
}

fn query(cgroup: BorrowedFd<'_>, query_flags: u32) -> nix::Result<Attached> {
    // 64 is the kernel's own limit for one cgroup (BPF_CGROUP_MAX_PROGS); the effective ones can be more
    let mut room = 64;
    loop {
        let mut ids = vec![0_u32; room];
        let mut attr = QueryAttr {
            target_fd: raw(cgroup)?,
            attach_type: BPF_CGROUP_DEVICE,
            query_flags,
            prog_ids: address(ids.as_mut_ptr()),
            prog_cnt: u32::try_from(room).unwrap_or(u32::MAX),
            ..QueryAttr::default()
        };
        // SAFETY: QueryAttr is `union bpf_attr.query`; `prog_ids` points to `prog_cnt` writable u32s that outlive the call.
        let answer = unsafe { bpf(BPF_PROG_QUERY, &mut attr) };
        match answer {
            Ok(_) => {
                ids.truncate(usize::try_from(attr.prog_cnt).unwrap_or(usize::MAX));
                return Ok(Attached { flags: attr.attach_flags, ids, revision: attr.revision });
            }
            Err(Errno::ENOSPC) if room < 1 << 16 => room *= 2,
            Err(errno) => return Err(errno),
        }
    }
}

#[derive(Default)]
#[repr(C)]
struct GetIdAttr {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

/// A program by its id. EPERM without `CAP_SYS_ADMIN`, ENOENT if it is gone.
#[doc(alias = "BPF_PROG_GET_FD_BY_ID")]
pub fn prog_by_id(id: u32) -> nix::Result<OwnedFd> {
    let mut attr = GetIdAttr { id, ..GetIdAttr::default() };
    // SAFETY: GetIdAttr is the `prog_id` member of `union bpf_attr` and holds no pointer.
    let fd = unsafe { bpf(BPF_PROG_GET_FD_BY_ID, &mut attr) }?;
    // SAFETY: the kernel has just made this descriptor (close-on-exec) for this call; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[derive(Default)]
#[repr(C)]
struct InfoAttr {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// `struct bpf_prog_info` up to the fields we read; the kernel fills as much as it is told there is.
#[derive(Default)]
#[repr(C)]
struct RawInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_prog_len: u32,
    xlated_prog_len: u32,
    jited_prog_insns: u64,
    xlated_prog_insns: u64,
    load_time: u64,
    created_by_uid: u32,
    nr_map_ids: u32,
    map_ids: u64,
    name: [u8; 16],
}

/// Name, maps and instructions of a program.
///
/// The kernel withholds the instructions from a caller without `CAP_BPF` (their length is 0), and those of a program
/// with blinded constants from one that may not see kernel addresses (the pointer comes back as 0;
/// `bpf_prog_get_info_by_fd` in `kernel/bpf/syscall.c`).
#[doc(alias = "BPF_OBJ_GET_INFO_BY_FD")]
pub fn prog_info(prog: BorrowedFd<'_>) -> nix::Result<ProgInfo> {
    let mut info = RawInfo::default();
    get_info(prog, &mut info)?;
    let length = usize::try_from(info.xlated_prog_len).unwrap_or(usize::MAX) / size_of::<Insn>();
    let mut insns = vec![Insn::default(); length];
    let mut info = RawInfo {
        xlated_prog_len: info.xlated_prog_len,
        xlated_prog_insns: address(insns.as_mut_ptr()),
        ..RawInfo::default()
    };
    get_info(prog, &mut info)?;
    let withheld = info.xlated_prog_len == 0 || info.xlated_prog_insns == 0;
    let name = info.name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(ProgInfo {
        name: String::from_utf8_lossy(name).into_owned(),
        maps: info.nr_map_ids,
        insns: (!withheld).then_some(insns),
    })
}

/// `info.xlated_prog_insns` is null, or points to `xlated_prog_len` writable bytes.
fn get_info(prog: BorrowedFd<'_>, info: &mut RawInfo) -> nix::Result<()> {
    let info_len = u32::try_from(size_of::<RawInfo>()).unwrap_or(0);
    let mut attr = InfoAttr { bpf_fd: raw(prog)?, info_len, info: address(info) };
    // SAFETY: InfoAttr is `union bpf_attr.info`; `info` points to `info_len` writable bytes laid out as the start of
    // `struct bpf_prog_info`. The kernel writes at most `info_len` bytes there, and at most `xlated_prog_len` bytes to
    // the instruction buffer, which both callers size by that field. All other pointers and counts in it are zero.
    unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr) }.map(drop)
}

#[derive(Default)]
#[repr(C)]
struct LoadAttr {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

/// Verifies and loads a device program. `name` is cut to 15 bytes; the kernel wants `[A-Za-z0-9_.]`.
///
/// EACCES and EINVAL are the verifier's: the program is tried once more with its log switched on, for the reason.
/// KERNEL(5.11): before, programs count against `RLIMIT_MEMLOCK` and EPERM means that it is too low, so it is raised as
/// far as we may, once.
#[doc(alias = "BPF_PROG_LOAD")]
pub fn load_device_program(name: &str, insns: &[Insn]) -> Result<OwnedFd, LoadError> {
    let plain = |errno| LoadError { errno, reason: String::new() };
    match load(name, insns, &mut []) {
        Ok(fd) => Ok(fd),
        Err(Errno::EPERM) if raise_memlock() => load(name, insns, &mut []).map_err(plain),
        Err(errno @ (Errno::EACCES | Errno::EINVAL)) => {
            let mut log = vec![0; LOG_SIZE];
            match load(name, insns, &mut log) {
                Ok(fd) => Ok(fd),
                Err(_) => Err(LoadError { errno, reason: last_words(&log) }),
            }
        }
        Err(errno) => Err(plain(errno)),
    }
}

fn load(name: &str, insns: &[Insn], log: &mut [u8]) -> nix::Result<OwnedFd> {
    let mut prog_name = [0; 16];
    for (to, from) in prog_name.iter_mut().take(15).zip(name.bytes()) {
        *to = from;
    }
    let license = c"Apache-2.0";
    let with_log = !log.is_empty();
    let mut attempt = || {
        let mut attr = LoadAttr {
            prog_type: BPF_PROG_TYPE_CGROUP_DEVICE,
            insn_cnt: u32::try_from(insns.len()).map_err(|_| Errno::E2BIG)?,
            insns: address(insns.as_ptr()),
            license: address(license.as_ptr()),
            log_level: u32::from(with_log),
            log_size: u32::try_from(log.len()).map_err(|_| Errno::EINVAL)?,
            log_buf: if with_log { address(log.as_mut_ptr()) } else { 0 },
            prog_name,
            ..LoadAttr::default()
        };
        // SAFETY: LoadAttr is the program load member of `union bpf_attr`; `insns` points to `insn_cnt` instructions,
        // `license` to a C string, `log_buf` is null or points to `log_size` writable bytes; all outlive the call.
        unsafe { bpf(BPF_PROG_LOAD, &mut attr) }
    };
    // the verifier gives up with EAGAIN when a signal is pending; libbpf (`sys_bpf_prog_load`) tries five times too
    let mut tries = 5;
    let fd = loop {
        tries -= 1;
        match attempt() {
            Err(Errno::EAGAIN) if tries > 0 => {}
            other => break other?,
        }
    };
    // SAFETY: the kernel has just made this descriptor (close-on-exec) for this call; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The log ends with the reason, then with a line of statistics.
fn last_words(log: &[u8]) -> String {
    let text = log.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text)
        .lines()
        .rev()
        .find(|line| !line.is_empty() && !line.starts_with("processed "))
        .unwrap_or_default()
        .to_owned()
}

/// `ulimit -l unlimited`, or as high as the hard limit; false if it was there already.
fn raise_memlock() -> bool {
    let before = getrlimit(Resource::Memlock);
    let hard = Rlimit { current: before.maximum, maximum: before.maximum };
    setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None }).is_ok() && before.current.is_some()
        || before.current != before.maximum && setrlimit(Resource::Memlock, hard).is_ok()
}

#[derive(Default)]
#[repr(C)]
struct AttachAttr {
    target_fd: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
    replace_bpf_fd: u32,
    relative_fd: u32,
    expected_revision: u64,
}

/// Attaches a device program. `flags` must be those of the programs there are ([`attached`]); in place of `replace`
/// if given, which only goes with [`BPF_F_ALLOW_MULTI`]. With other flags a cgroup has one program, and the new one
/// takes its place.
///
/// KERNEL(5.6): EINVAL for `replace` before. ENOENT if `replace` is no longer attached, or is attached by a link.
#[doc(alias = "BPF_PROG_ATTACH")]
pub fn attach(
    cgroup: BorrowedFd<'_>,
    prog: BorrowedFd<'_>,
    flags: u32,
    replace: Option<BorrowedFd<'_>>,
) -> nix::Result<()> {
    let mut attr = AttachAttr {
        target_fd: raw(cgroup)?,
        attach_bpf_fd: raw(prog)?,
        attach_type: BPF_CGROUP_DEVICE,
        attach_flags: flags,
        ..AttachAttr::default()
    };
    if let Some(old) = replace {
        attr.attach_flags |= BPF_F_REPLACE;
        attr.replace_bpf_fd = raw(old)?;
    }
    // SAFETY: AttachAttr is the attach member of `union bpf_attr` and holds no pointer.
    unsafe { bpf(BPF_PROG_ATTACH, &mut attr) }.map(drop)
}

/// The same, if the programs are still those of this [`Attached::revision`], else ESTALE; 0 for any.
pub fn attach_at(cgroup: BorrowedFd<'_>, prog: BorrowedFd<'_>, flags: u32, revision: u64) -> nix::Result<()> {
    let mut attr = AttachAttr {
        target_fd: raw(cgroup)?,
        attach_bpf_fd: raw(prog)?,
        attach_type: BPF_CGROUP_DEVICE,
        attach_flags: flags,
        expected_revision: revision,
        ..AttachAttr::default()
    };
    // SAFETY: AttachAttr is the attach member of `union bpf_attr` and holds no pointer.
    unsafe { bpf(BPF_PROG_ATTACH, &mut attr) }.map(drop)
}

/// Takes a device program off a cgroup; ENOENT if it is not attached there.
#[doc(alias = "BPF_PROG_DETACH")]
pub fn detach(cgroup: BorrowedFd<'_>, prog: BorrowedFd<'_>) -> nix::Result<()> {
    let mut attr = AttachAttr {
        target_fd: raw(cgroup)?,
        attach_bpf_fd: raw(prog)?,
        attach_type: BPF_CGROUP_DEVICE,
        ..AttachAttr::default()
    };
    // SAFETY: AttachAttr is the attach member of `union bpf_attr`, which detach shares, and holds no pointer.
    unsafe { bpf(BPF_PROG_DETACH, &mut attr) }.map(drop)
}

/// # Safety
///
/// `T` has the layout of the start of the member of `union bpf_attr` that `command` reads and writes, has no padding
/// bytes, and every pointer in it is valid for what the command does with it.
unsafe fn bpf<T>(command: libc::c_int, attr: &mut T) -> nix::Result<RawFd> {
    // SAFETY: the kernel reads and writes at most `size_of::<T>()` bytes at `attr`, which is exclusively ours; what it
    // points to is our caller's promise.
    let answer = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    RawFd::try_from(Errno::result(answer)?).map_err(|_| Errno::EBADF)
}

fn raw(fd: BorrowedFd<'_>) -> nix::Result<u32> {
    u32::try_from(fd.as_raw_fd()).map_err(|_| Errno::EBADF)
}

/// A pointer as bpf(2) takes it: 64 bits on every machine.
fn address<T>(pointer: *const T) -> u64 {
    u64::try_from(pointer.expose_provenance()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_kernel() {
        // offsets from `pahole bpf_attr`, `pahole bpf_prog_info`
        assert_eq!(size_of::<Insn>(), 8);
        assert_eq!(size_of::<QueryAttr>(), 64);
        assert_eq!(size_of::<GetIdAttr>(), 12);
        assert_eq!(size_of::<InfoAttr>(), 16);
        assert_eq!(size_of::<RawInfo>(), 80);
        assert_eq!(std::mem::offset_of!(RawInfo, name), 64);
        assert_eq!(size_of::<LoadAttr>(), 72);
        assert_eq!(std::mem::offset_of!(LoadAttr, prog_name), 48);
        assert_eq!(size_of::<AttachAttr>(), 32);
        assert_eq!(std::mem::offset_of!(AttachAttr, expected_revision), 24);
    }

    #[test]
    fn registers_round_trip() {
        let insn = Insn::new(0xbf, 6, 1, 0, 0);
        assert_eq!((insn.dst(), insn.src()), (6, 1));
    }

    #[test]
    fn the_reason_is_before_the_statistics() {
        let log = b"0: (95) exit\nR0 !read_ok\nprocessed 1 insns (limit 1000000)\n\0\0garbage";
        assert_eq!(last_words(log), "R0 !read_ok");
        assert_eq!(last_words(&[]), "");
    }
}
