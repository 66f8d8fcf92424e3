//! bpf(2), as far as device programs of cgroups need it. The structures are those of the kernel's uapi/linux/bpf.h.
#![allow(unsafe_code, reason = "bpf(2) has no wrapper in libc, nix or rustix")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

/// One instruction, `struct bpf_insn`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Insn {
    /// operation
    pub code: u8,
    /// destination register in the low, source register in the high four bits
    pub registers: u8,
    /// of a jump, or of a memory access
    pub offset: i16,
    /// immediate value
    pub immediate: i32,
}

/// How a program is attached, beside other programs of the same cgroup.
pub const ALLOW_MULTI: u32 = 1 << 1;
const REPLACE: u32 = 1 << 2;

const PROG_LOAD: libc::c_int = 5;
const PROG_ATTACH: libc::c_int = 8;
const PROG_DETACH: libc::c_int = 9;
const PROG_GET_FD_BY_ID: libc::c_int = 13;
const OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const PROG_QUERY: libc::c_int = 16;

const TYPE_CGROUP_DEVICE: u32 = 15;
const ATTACH_CGROUP_DEVICE: u32 = 6;

/// More than runtimes and systemd ever attach to one cgroup; the kernel's own limit (BPF_CGROUP_MAX_PROGS).
const MAX_PROGRAMS: usize = 64;
/// The kernel's limit for a program of root.
const MAX_INSNS: usize = 1_000_000;

#[derive(Default)]
#[repr(C)]
struct Load {
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
}

#[derive(Default)]
#[repr(C)]
struct Attach {
    target_fd: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
    replace_bpf_fd: u32,
}

#[derive(Default)]
#[repr(C)]
struct Query {
    target_fd: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    padding: u32,
}

#[derive(Default)]
#[repr(C)]
struct GetById {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

#[derive(Default)]
#[repr(C)]
struct GetInfo {
    fd: u32,
    info_len: u32,
    info: u64,
}

/// The start of `struct bpf_prog_info`: the kernel fills as much as there is room for.
#[derive(Default)]
#[repr(C)]
struct ProgInfo {
    prog_type: u32,
    id: u32,
    tag: [u8; 8],
    jited_prog_len: u32,
    xlated_prog_len: u32,
    jited_prog_insns: u64,
    xlated_prog_insns: u64,
}

/// Marks the structures above: plain integers, laid out as bpf(2) wants them.
trait Attr {}
impl Attr for Load {}
impl Attr for Attach {}
impl Attr for Query {}
impl Attr for GetById {}
impl Attr for GetInfo {}

/// `attr` holds addresses of buffers as integers: each caller keeps them alive, and of the size it states, until it returns.
fn bpf<T: Attr>(command: libc::c_int, attr: &mut T) -> io::Result<RawFd> {
    // SAFETY: bpf(2) reads and writes `size` bytes at `attr`, which is a live T of that size, and the buffers whose
    // addresses and lengths stand in it, which the callers below own for the time of the call. It keeps none of them.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    RawFd::try_from(result).map_err(io::Error::other)
}

fn bpf_fd<T: Attr>(command: libc::c_int, attr: &mut T) -> io::Result<OwnedFd> {
    let fd = bpf(command, attr)?;
    // SAFETY: for these commands a result that is no error is a new file descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn address<T>(slice: &[T]) -> u64 {
    slice.as_ptr().addr() as u64
}

fn number(fd: BorrowedFd<'_>) -> u32 {
    // A file descriptor is never negative.
    u32::try_from(fd.as_raw_fd()).unwrap_or_default()
}

fn length(count: usize) -> io::Result<u32> {
    u32::try_from(count).map_err(io::Error::other)
}

/// The device programs attached to a cgroup itself, and how. Those of its ancestors count too, but are not listed.
pub fn query(cgroup: BorrowedFd<'_>) -> io::Result<(Vec<u32>, u32)> {
    let mut ids = vec![0u32; MAX_PROGRAMS];
    let mut attr = Query {
        target_fd: number(cgroup),
        attach_type: ATTACH_CGROUP_DEVICE,
        prog_ids: address(&ids),
        prog_cnt: length(ids.len())?,
        ..Query::default()
    };
    bpf(PROG_QUERY, &mut attr)?;
    ids.truncate(usize::try_from(attr.prog_cnt).unwrap_or_default());
    Ok((ids, attr.attach_flags))
}

/// Opens a loaded program.
pub fn open(id: u32) -> io::Result<OwnedFd> {
    bpf_fd(PROG_GET_FD_BY_ID, &mut GetById { id, ..GetById::default() })
}

/// The instructions of a loaded program. `None` where the kernel keeps them to itself (net.core.bpf_jit_harden).
pub fn instructions(program: BorrowedFd<'_>) -> io::Result<Option<Vec<Insn>>> {
    let mut info = ProgInfo::default();
    get_info(program, &mut info)?;
    let count = usize::try_from(info.xlated_prog_len).unwrap_or_default() / size_of::<Insn>();
    if count == 0 || count > MAX_INSNS {
        return Ok(None);
    }
    let insns = vec![Insn::default(); count];
    let mut info =
        ProgInfo { xlated_prog_len: info.xlated_prog_len, xlated_prog_insns: address(&insns), ..ProgInfo::default() };
    get_info(program, &mut info)?;
    // A NULL that comes back means that nothing was copied.
    Ok((info.xlated_prog_insns != 0).then_some(insns))
}

fn get_info(program: BorrowedFd<'_>, info: &mut ProgInfo) -> io::Result<()> {
    let mut attr = GetInfo {
        fd: number(program),
        info_len: length(size_of::<ProgInfo>())?,
        info: std::ptr::from_mut(info).addr() as u64,
    };
    bpf(OBJ_GET_INFO_BY_FD, &mut attr).map(drop)
}

/// Loads a device program.
pub fn load(insns: &[Insn]) -> io::Result<OwnedFd> {
    let mut name = [0; 16];
    let text = b"onh_devices";
    name.iter_mut().zip(text).for_each(|(to, from)| *to = *from);
    let license = c"Apache-2.0";
    let mut attr = Load {
        prog_type: TYPE_CGROUP_DEVICE,
        insn_cnt: length(insns.len())?,
        insns: address(insns),
        license: license.as_ptr().addr() as u64,
        prog_name: name,
        ..Load::default()
    };
    match bpf_fd(PROG_LOAD, &mut attr) {
        // Before Linux 5.11 programs count as locked memory, of which root has 64 KiB by default.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY).map_err(|_| error)?;
            bpf_fd(PROG_LOAD, &mut attr)
        }
        result => result,
    }
}

/// Puts `new` in the place of `old` on a cgroup where programs are attached with `flags`.
pub fn replace(cgroup: BorrowedFd<'_>, old: BorrowedFd<'_>, new: BorrowedFd<'_>, flags: u32) -> io::Result<()> {
    let (cgroup, old, new) = (number(cgroup), number(old), number(new));
    let attr = |flags, old| Attach {
        target_fd: cgroup,
        attach_bpf_fd: new,
        attach_type: ATTACH_CGROUP_DEVICE,
        attach_flags: flags,
        replace_bpf_fd: old,
    };
    if flags & ALLOW_MULTI == 0 {
        // Without it there is one program, and attaching is replacing.
        return bpf(PROG_ATTACH, &mut attr(flags, 0)).map(drop);
    }
    match bpf(PROG_ATTACH, &mut attr(flags | REPLACE, old)) {
        Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) => {
            // Before Linux 5.6. Both must agree in between, so nothing is allowed that was not: the old one rules.
            bpf(PROG_ATTACH, &mut attr(flags, 0))?;
            let mut detach = Attach { attach_bpf_fd: old, ..attr(0, 0) };
            bpf(PROG_DETACH, &mut detach).map(drop)
        }
        result => result.map(drop),
    }
}

/// Attaches a first program to a cgroup.
pub fn attach(cgroup: BorrowedFd<'_>, program: BorrowedFd<'_>, flags: u32) -> io::Result<()> {
    let mut attr = Attach {
        target_fd: number(cgroup),
        attach_bpf_fd: number(program),
        attach_type: ATTACH_CGROUP_DEVICE,
        attach_flags: flags,
        replace_bpf_fd: 0,
    };
    bpf(PROG_ATTACH, &mut attr).map(drop)
}
