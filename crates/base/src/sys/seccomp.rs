//! Denies system calls to this process with a filter (seccomp(2)), which needs no privilege and also applies to root.
//!
//! A library that reads the state of devices needs none of these calls. For most of them, the process also lacks the capability, or
//! Landlock denies what they would do. The rest is what a process of root can do with root's files and sockets although it has no
//! capability. A denied call fails with EPERM and does not end the process, because libraries try some of them (NVIDIA's tries to
//! create missing device nodes and to start nvidia-modprobe) and continue without.

use std::io;

use nix::libc;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, sock_filter,
};

/// Owner, mode, times, attributes and flags of files. Landlock has no right for them, and the owner of a file needs no capability.
const METADATA: &[libc::c_long] = &[
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    FCHMODAT2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    SETXATTRAT,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    REMOVEXATTRAT,
    FILE_SETATTR,
];

/// Names of files, and programs. Landlock denies them too, since Linux 5.13 or 6.2 (truncate).
const NAMES: &[libc::c_long] = &[
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_truncate,
    libc::SYS_execve,
    libc::SYS_execveat,
];

/// Mounts and namespaces.
const MOUNTS: &[libc::c_long] = &[
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    OPEN_TREE_ATTR,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_open_by_handle_at,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_swapon,
    libc::SYS_swapoff,
];

/// Other processes: a process may signal and schedule processes of its user, also without capabilities.
const PROCESSES: &[libc::c_long] = &[
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_kcmp,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_setpriority,
    libc::SYS_ioprio_set,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setattr,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
];

/// The kernel itself, and interfaces of it that have had many vulnerabilities.
const KERNEL: &[libc::c_long] = &[
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_reboot,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
];

/// Sockets of every family. A filter cannot read the address that connect(2) gets, so it cannot distinguish Unix sockets, and
/// a process of root can connect to the sockets of systemd and of container engines, which is as much as root's password.
const SOCKETS: &[libc::c_long] = &[
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
];

/// System V IPC and POSIX message queues, which have owners and modes like files.
const IPC: &[libc::c_long] = &[
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
];

/// The older forms of calls above, which only this architecture has.
#[cfg(target_arch = "x86_64")]
const OLD: &[libc::c_long] = &[
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_rename,
    libc::SYS_unlink,
    libc::SYS_rmdir,
    libc::SYS_mkdir,
    libc::SYS_mknod,
    libc::SYS_creat,
    libc::SYS_iopl,
    libc::SYS_ioperm,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[libc::c_long] = &[];

// Calls that the crate libc does not have for all architectures, or with another type. Their numbers are the same everywhere.
const CLONE3: u32 = 435;
const FCHMODAT2: libc::c_long = 452;
const SETXATTRAT: libc::c_long = 463;
const REMOVEXATTRAT: libc::c_long = 466;
const OPEN_TREE_ATTR: libc::c_long = 467;
const FILE_SETATTR: libc::c_long = 469;

/// The first number that had no call, or one that is harmless here, when this list was written (Linux 6.18). Calls from here on fail
/// with ENOSYS, as on the kernel of that time. On x86-64 these are also the numbers of the x32 ABI.
const FIRST_UNKNOWN: u32 = 470;

/// A value of one argument with which a call is denied.
struct Case {
    call: libc::c_long,
    argument: u8,
    op: SeccompCmpOp,
    value: u64,
}

impl Case {
    /// The argument is an int and has this value.
    const fn is(call: libc::c_long, argument: u8, value: u64) -> Self {
        Self {
            call,
            argument,
            op: SeccompCmpOp::Eq,
            value,
        }
    }

    /// The argument is an int and has another value.
    const fn is_not(call: libc::c_long, argument: u8, value: u64) -> Self {
        Self {
            call,
            argument,
            op: SeccompCmpOp::Ne,
            value,
        }
    }

    fn rule(self) -> Result<(i64, SeccompRule), BackendError> {
        let condition =
            SeccompCondition::new(self.argument, SeccompCmpArgLen::Dword, self.op, self.value)?;
        Ok((self.call, SeccompRule::new(vec![condition])?))
    }
}

// Constants that the crate libc lacks or has with a type of the C library.
const CLONE_NEWUSER: u64 = 0x1000_0000;
const F_SETOWN: u64 = 8;
const F_SETSIG: u64 = 10;
const F_SETOWN_EX: u64 = 15;
const F_SETLEASE: u64 = 1024;
const F_NOTIFY: u64 = 1026;
const TIOCSTI: u64 = 0x5412;
const TIOCLINUX: u64 = 0x541c;
const FIOSETOWN: u64 = 0x8901;
const SIOCSPGRP: u64 = 0x8902;
const FS_IOC_SETFLAGS: u64 = 0x4008_6602;
const FS_IOC_FSSETXATTR: u64 = 0x401c_5820;

/// Returns the calls that are denied for some values of their arguments only. `pid` is the id of this process.
fn cases(pid: u32) -> Vec<Case> {
    vec![
        // A user namespace has all capabilities in it.
        Case {
            op: SeccompCmpOp::MaskedEq(CLONE_NEWUSER),
            ..Case::is(libc::SYS_clone, 0, CLONE_NEWUSER)
        },
        // abort(3) sends a signal to its own thread.
        Case::is_not(libc::SYS_tgkill, 0, pid.into()),
        Case::is_not(libc::SYS_prlimit64, 0, 0),
        Case::is_not(libc::SYS_sched_setaffinity, 0, 0),
        // The kernel sends a chosen signal to a chosen process when a file can be read, and delays other users of a file.
        Case::is(libc::SYS_fcntl, 1, F_SETOWN),
        Case::is(libc::SYS_fcntl, 1, F_SETOWN_EX),
        Case::is(libc::SYS_fcntl, 1, F_SETSIG),
        Case::is(libc::SYS_fcntl, 1, F_SETLEASE),
        Case::is(libc::SYS_fcntl, 1, F_NOTIFY),
        Case::is(libc::SYS_ioctl, 1, FIOSETOWN),
        Case::is(libc::SYS_ioctl, 1, SIOCSPGRP),
        // Input for a terminal
        Case::is(libc::SYS_ioctl, 1, TIOCSTI),
        Case::is(libc::SYS_ioctl, 1, TIOCLINUX),
        // Flags of a file that is only open for reading
        Case::is(libc::SYS_ioctl, 1, FS_IOC_SETFLAGS),
        Case::is(libc::SYS_ioctl, 1, FS_IOC_FSSETXATTR),
    ]
}

/// Denies the calls of this module to this process, which must have one thread, and to its children. The process must have set
/// no_new_privs.
///
/// # Errors
/// If the filter cannot be built. If the kernel has no filters, or another filter denies the call, the process is not restricted, and
/// that is not an error.
pub fn restrict() -> io::Result<()> {
    // The error cannot occur: the tests build the same program. Its text would make the program larger.
    let denied = denied(std::process::id()).map_err(|_| io::ErrorKind::InvalidData)?;
    for program in [denied, unknown()] {
        // Only the kernel returns errors.
        seccompiler::apply_filter(&program).ok();
    }
    Ok(())
}

/// Returns the program for the calls of this module. It kills a process that makes calls of another architecture, such as the calls of
/// 32-bit programs.
fn denied(pid: u32) -> Result<BpfProgram, BackendError> {
    let always = [
        METADATA, NAMES, MOUNTS, PROCESSES, KERNEL, SOCKETS, IPC, OLD,
    ]
    .concat();
    let mut rules: std::collections::BTreeMap<i64, Vec<SeccompRule>> =
        always.into_iter().map(|call| (call, Vec::new())).collect();
    for case in cases(pid) {
        let (call, rule) = case.rule()?;
        rules.entry(call).or_default().push(rule);
    }
    let denied = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    let arch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, SeccompAction::Allow, denied, arch)?.try_into()
}

/// Returns the program for calls that the kernel is said not to have. clone3(2) is one of them, because its flags are in memory, which a
/// filter cannot read: the C library then calls clone(2).
fn unknown() -> BpfProgram {
    // BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_JMP | BPF_JGE | BPF_K, BPF_RET | BPF_K
    const LOAD: u16 = 0x20;
    const IS: u16 = 0x15;
    const IS_AT_LEAST: u16 = 0x35;
    const RETURN: u16 = 0x06;
    let step = |code, jt, k| sock_filter { code, jt, jf: 0, k };
    vec![
        // The number of the call is the first field of seccomp_data.
        step(LOAD, 0, 0),
        step(IS, 2, CLONE3),
        step(IS_AT_LEAST, 1, FIRST_UNKNOWN),
        step(RETURN, 0, libc::SECCOMP_RET_ALLOW),
        step(
            RETURN,
            0,
            libc::SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned(),
        ),
    ]
}
