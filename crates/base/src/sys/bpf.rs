//! Reads and replaces the device programs of a cgroup with bpf(2).
//!
//! Layouts and constants come from `include/uapi/linux/bpf.h` and bpf(2). Each attribute struct is a prefix of one member of
//! `union bpf_attr`, and its size is passed to the kernel. The kernel treats missing fields as zero, and accepts unknown fields if
//! they are zero.
#![allow(unsafe_code, reason = "neither nix nor rustix has bpf(2)")]

use std::ffi::CString;
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nix::libc;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_PROG_DETACH: libc::c_int = 9;
const BPF_PROG_GET_FD_BY_ID: libc::c_int = 13;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_PROG_QUERY: libc::c_int = 16;

const BPF_PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const BPF_CGROUP_DEVICE: u32 = 6;
const BPF_F_QUERY_EFFECTIVE: u32 = 1;

/// Attach flag: the program of a descendant cgroup replaces this one.
pub const BPF_F_ALLOW_OVERRIDE: u32 = 1;
/// Attach flag: all programs run, including the programs of the ancestors, and every one must permit the access.
pub const BPF_F_ALLOW_MULTI: u32 = 1 << 1;
const BPF_F_REPLACE: u32 = 1 << 2;

/// The size of the verifier's log in bytes. The reason is at its end, and is lost if the log is longer.
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
        let registers = if cfg!(target_endian = "little") {
            src << 4 | dst & 15
        } else {
            dst << 4 | src & 15
        };
        Self {
            code,
            registers,
            off,
            imm,
        }
    }

    /// The register written to or compared.
    #[must_use]
    pub const fn dst(self) -> u8 {
        if cfg!(target_endian = "little") {
            self.registers & 15
        } else {
            self.registers >> 4
        }
    }

    /// The register read from.
    #[must_use]
    pub const fn src(self) -> u8 {
        if cfg!(target_endian = "little") {
            self.registers >> 4
        } else {
            self.registers & 15
        }
    }
}

/// The device programs of one cgroup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attached {
    /// How the programs are attached: 0, [`BPF_F_ALLOW_OVERRIDE`] or [`BPF_F_ALLOW_MULTI`].
    pub flags: u32,
    /// The ids of the programs.
    pub ids: Vec<u32>,
    /// The revision of the list, which each change increments. KERNEL(6.17): 0 before.
    pub revision: u64,
}

/// What the kernel shows of a loaded program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgInfo {
    /// The number by which [`attached`] lists it.
    pub id: u32,
    /// The name from its loader.
    pub name: String,
    /// The number of maps that it uses.
    pub maps: u32,
    /// The instructions after verification; `None` if the kernel withholds them (see [`prog_info`]).
    pub insns: Option<Vec<Insn>>,
}

/// Why the kernel did not load a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// The error of the system call.
    pub errno: Errno,
    /// The last line of the verifier's log; empty if the verifier did not run.
    pub reason: String,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::report::errno_text(self.errno))?;
        if self.reason.is_empty() {
            Ok(())
        } else {
            write!(f, ", the verifier reports {:?}", self.reason)
        }
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
    // Arrays that are not requested, and fields that newer kernels write
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// Returns the device programs that are attached to a cgroup itself.
///
/// # Errors
/// EPERM without `CAP_NET_ADMIN`, EINVAL on kernels without cgroup BPF, EBADF if `cgroup` is not a cgroup2 directory.
#[doc(alias = "BPF_PROG_QUERY")]
pub fn attached(cgroup: BorrowedFd<'_>) -> rustix::io::Result<Attached> {
    query(cgroup, 0)
}

/// Returns the ids of all device programs that are effective in a cgroup, including the programs of its ancestors.
///
/// # Errors
/// The errors of [`attached`].
#[doc(alias = "BPF_F_QUERY_EFFECTIVE")]
pub fn effective(cgroup: BorrowedFd<'_>) -> rustix::io::Result<Vec<u32>> {
    query(cgroup, BPF_F_QUERY_EFFECTIVE).map(|attached| attached.ids)
}

fn query(cgroup: BorrowedFd<'_>, query_flags: u32) -> rustix::io::Result<Attached> {
    // The kernel's limit for one cgroup is 64 (BPF_CGROUP_MAX_PROGS), but more programs can be effective.
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
                return Ok(Attached {
                    flags: attr.attach_flags,
                    ids,
                    revision: attr.revision,
                });
            }
            // The kernel has filled the array, and more programs are in effect (`__cgroup_bpf_query`).
            Err(Errno::NOSPC) if room < 1 << 16 => room *= 2,
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

/// Opens a program by its id.
///
/// # Errors
/// EPERM without `CAP_SYS_ADMIN`, ENOENT if the program does not exist any more.
#[doc(alias = "BPF_PROG_GET_FD_BY_ID")]
pub fn prog_by_id(id: u32) -> rustix::io::Result<OwnedFd> {
    let mut attr = GetIdAttr {
        id,
        ..GetIdAttr::default()
    };
    // SAFETY: GetIdAttr is the `prog_id` member of `union bpf_attr` and holds no pointer.
    let fd = unsafe { bpf(BPF_PROG_GET_FD_BY_ID, &mut attr) }?;
    // SAFETY: the kernel has just made this descriptor (close-on-exec) for this call; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[derive(Default)]
#[repr(C)]
struct PinAttr {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// Opens the program that is pinned at a path of a BPF file system.
///
/// # Errors
/// ENOENT if there is no such file, EACCES if it is not a pinned object or may not be used.
#[doc(alias = "BPF_OBJ_GET")]
pub fn pinned(path: &Path) -> rustix::io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    let mut attr = PinAttr {
        pathname: address(path.as_ptr()),
        ..PinAttr::default()
    };
    // SAFETY: PinAttr is the pin member of `union bpf_attr`; `pathname` is a C string that outlives the call.
    let fd = unsafe { bpf(BPF_OBJ_GET, &mut attr) }?;
    // SAFETY: the kernel has just made this descriptor (close-on-exec) for this call; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Pins a program at a path of a BPF file system, where it stays until the path is removed.
///
/// # Errors
/// EEXIST if the path exists, EPERM if its directory is not on a BPF file system.
#[doc(alias = "BPF_OBJ_PIN")]
pub fn pin(prog: BorrowedFd<'_>, path: &Path) -> rustix::io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    let mut attr = PinAttr {
        pathname: address(path.as_ptr()),
        bpf_fd: raw(prog)?,
        ..PinAttr::default()
    };
    // SAFETY: PinAttr is the pin member of `union bpf_attr`; `pathname` is a C string that outlives the call.
    unsafe { bpf(BPF_OBJ_PIN, &mut attr) }.map(drop)
}

#[derive(Default)]
#[repr(C)]
struct InfoAttr {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// `struct bpf_prog_info` up to the last field that is read. The kernel fills in as many bytes as `info_len` states.
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

/// Returns the name, the number of maps and the instructions of a program.
///
/// Without `CAP_BPF` the kernel withholds the instructions: it reports their length as 0. It also withholds the instructions of a program with
/// blinded constants from a caller that may not see kernel addresses: it sets the pointer to 0 (`bpf_prog_get_info_by_fd` in
/// `kernel/bpf/syscall.c`).
///
/// # Errors
/// The errors of bpf(2). Instructions that the kernel withholds are not an error.
#[doc(alias = "BPF_OBJ_GET_INFO_BY_FD")]
pub fn prog_info(prog: BorrowedFd<'_>) -> rustix::io::Result<ProgInfo> {
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
    let name = info
        .name
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default();
    Ok(ProgInfo {
        id: info.id,
        name: String::from_utf8_lossy(name).into_owned(),
        maps: info.nr_map_ids,
        insns: (!withheld).then_some(insns),
    })
}

/// Calls `BPF_OBJ_GET_INFO_BY_FD`. `info.xlated_prog_insns` is null, or points to `xlated_prog_len` writable bytes.
fn get_info(prog: BorrowedFd<'_>, info: &mut RawInfo) -> rustix::io::Result<()> {
    let info_len = u32::try_from(size_of::<RawInfo>()).unwrap_or(0);
    let mut attr = InfoAttr {
        bpf_fd: raw(prog)?,
        info_len,
        info: address(info),
    };
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

/// Verifies and loads a device program. `name` is cut to 15 bytes; the kernel accepts `[A-Za-z0-9_.]`.
///
/// KERNEL(5.11): before, programs count against `RLIMIT_MEMLOCK`, and EPERM means that the limit is too low. It is raised once, as
/// far as permitted.
///
/// # Errors
/// EACCES and EINVAL come from the verifier. In that case the program is loaded again with the log enabled, to get the reason.
/// EPERM without `CAP_BPF` or `CAP_SYS_ADMIN`.
#[doc(alias = "BPF_PROG_LOAD")]
pub fn load_device_program(name: &str, insns: &[Insn]) -> Result<OwnedFd, LoadError> {
    let plain = |errno| LoadError {
        errno,
        reason: String::new(),
    };
    match load(name, insns, &mut []) {
        Ok(fd) => Ok(fd),
        Err(Errno::PERM) if raise_memlock() => load(name, insns, &mut []).map_err(plain),
        Err(errno @ (Errno::ACCESS | Errno::INVAL)) => {
            let mut log = vec![0; LOG_SIZE];
            match load(name, insns, &mut log) {
                Ok(fd) => Ok(fd),
                Err(_) => Err(LoadError {
                    errno,
                    reason: last_words(&log),
                }),
            }
        }
        Err(errno) => Err(plain(errno)),
    }
}

fn load(name: &str, insns: &[Insn], log: &mut [u8]) -> rustix::io::Result<OwnedFd> {
    let mut prog_name = [0; 16];
    for (to, from) in prog_name.iter_mut().take(15).zip(name.bytes()) {
        *to = from;
    }
    // Only helper functions that are marked `gpl_only` require a license that is compatible with the GPL; see bpf(2). Device programs
    // of runtimes call none.
    let license = c"Apache-2.0";
    let with_log = !log.is_empty();
    let mut attr = LoadAttr {
        prog_type: BPF_PROG_TYPE_CGROUP_DEVICE,
        insn_cnt: u32::try_from(insns.len()).map_err(|_| Errno::TOOBIG)?,
        insns: address(insns.as_ptr()),
        license: address(license.as_ptr()),
        log_level: u32::from(with_log),
        log_size: u32::try_from(log.len()).map_err(|_| Errno::INVAL)?,
        log_buf: if with_log {
            address(log.as_mut_ptr())
        } else {
            0
        },
        prog_name,
        ..LoadAttr::default()
    };
    // The verifier returns EAGAIN if a signal is pending. libbpf (`sys_bpf_prog_load`) also tries five times.
    let mut tries = 5;
    let fd = loop {
        tries -= 1;
        // SAFETY: LoadAttr is the program load member of `union bpf_attr`; `insns` points to `insn_cnt` instructions,
        // `license` to a C string, `log_buf` is null or points to `log_size` writable bytes; all outlive the call.
        match unsafe { bpf(BPF_PROG_LOAD, &mut attr) } {
            Err(Errno::AGAIN) if tries > 0 => {}
            other => break other?,
        }
    };
    // SAFETY: the kernel has just made this descriptor (close-on-exec) for this call; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the reason from a log: the last line before the statistics.
fn last_words(log: &[u8]) -> String {
    let text = log.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text)
        .lines()
        .rev()
        .find(|line| !line.is_empty() && !line.starts_with("processed "))
        .unwrap_or_default()
        .to_owned()
}

/// Removes the memory lock limit, or raises it to the hard limit. Returns whether the limit has changed.
fn raise_memlock() -> bool {
    let before = getrlimit(Resource::Memlock);
    let hard = Rlimit {
        current: before.maximum,
        maximum: before.maximum,
    };
    setrlimit(
        Resource::Memlock,
        Rlimit {
            current: None,
            maximum: None,
        },
    )
    .is_ok()
        && before.current.is_some()
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

impl AttachAttr {
    fn new(cgroup: BorrowedFd<'_>, prog: BorrowedFd<'_>) -> rustix::io::Result<Self> {
        let (target_fd, attach_bpf_fd) = (raw(cgroup)?, raw(prog)?);
        Ok(Self {
            target_fd,
            attach_bpf_fd,
            attach_type: BPF_CGROUP_DEVICE,
            ..Self::default()
        })
    }
}

/// Attaches a device program. `flags` must equal the flags of the attached programs ([`attached`]). With [`BPF_F_ALLOW_MULTI`] it replaces
/// `replace`, if given. With other flags a cgroup has one program, which the new one replaces.
///
/// # Errors
/// ENOENT if `replace` is not attached any more, or is attached with a link. KERNEL(5.6): before, EINVAL if `replace` is given.
#[doc(alias = "BPF_PROG_ATTACH")]
pub fn attach(
    cgroup: BorrowedFd<'_>,
    prog: BorrowedFd<'_>,
    flags: u32,
    replace: Option<BorrowedFd<'_>>,
) -> rustix::io::Result<()> {
    let mut attr = AttachAttr {
        attach_flags: flags,
        ..AttachAttr::new(cgroup, prog)?
    };
    if let Some(old) = replace {
        attr.attach_flags |= BPF_F_REPLACE;
        attr.replace_bpf_fd = raw(old)?;
    }
    // SAFETY: AttachAttr is the attach member of `union bpf_attr` and holds no pointer.
    unsafe { bpf(BPF_PROG_ATTACH, &mut attr) }.map(drop)
}

/// Attaches a device program if the list still has this [`Attached::revision`]. 0 stands for any revision.
///
/// # Errors
/// ESTALE if the list has another revision. KERNEL(6.17): before, EINVAL if `revision` is not 0.
pub fn attach_at(
    cgroup: BorrowedFd<'_>,
    prog: BorrowedFd<'_>,
    flags: u32,
    revision: u64,
) -> rustix::io::Result<()> {
    let mut attr = AttachAttr {
        attach_flags: flags,
        expected_revision: revision,
        ..AttachAttr::new(cgroup, prog)?
    };
    // SAFETY: AttachAttr is the attach member of `union bpf_attr` and holds no pointer.
    unsafe { bpf(BPF_PROG_ATTACH, &mut attr) }.map(drop)
}

/// Detaches a device program from a cgroup.
///
/// # Errors
/// ENOENT if the program is not attached there.
#[doc(alias = "BPF_PROG_DETACH")]
pub fn detach(cgroup: BorrowedFd<'_>, prog: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let mut attr = AttachAttr::new(cgroup, prog)?;
    // SAFETY: AttachAttr is the attach member of `union bpf_attr`, which detach shares, and holds no pointer.
    unsafe { bpf(BPF_PROG_DETACH, &mut attr) }.map(drop)
}

/// Calls bpf(2).
///
/// # Safety
///
/// `T` has the layout of the start of the member of `union bpf_attr` that `command` reads and writes, has no padding
/// bytes, and every pointer in it is valid for what the command does with it.
unsafe fn bpf<T>(command: libc::c_int, attr: &mut T) -> rustix::io::Result<RawFd> {
    // SAFETY: the kernel reads and writes at most `size_of::<T>()` bytes at `attr`, which is exclusively ours; what it
    // points to is our caller's promise.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attr),
            size_of::<T>(),
        )
    };
    RawFd::try_from(super::answer::of(answer)?).map_err(|_| Errno::BADF)
}

fn raw(fd: BorrowedFd<'_>) -> rustix::io::Result<u32> {
    u32::try_from(fd.as_raw_fd()).map_err(|_| Errno::BADF)
}

/// Returns a pointer as bpf(2) takes it, with 64 bits on every architecture.
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
        assert_eq!(size_of::<PinAttr>(), 16);
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
