//! Tests for older kernels: a seccomp filter makes the system calls fail that these kernels lack.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::support::{HOOK, run, scratch, source};

/// The system calls that the kernel of a test lacks.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// The prefix of the test's name
    pub name: &'static str,
    /// The error of a missing system call
    pub errno: &'static str,
    /// The calls
    pub without: &'static str,
}

const fn lacking(name: &'static str, without: &'static str) -> Kernel {
    Kernel {
        name,
        errno: "ENOSYS",
        without,
    }
}

/// Everything newer than SLE 15 SP1.
const NEW: &str = "openat2,open_tree,move_mount,mount_setattr,fsopen,fsconfig,fsmount,close_range,clone3,pidfd_open,faccessat2,statmount,\
                   open_tree_attr";

/// All tests run on these kernels.
pub const OLD: &[Kernel] = &[
    lacking("linux-4.12", NEW),
    lacking("without-openat2", "openat2"),
];

/// The tests of the main code path run on these kernels.
pub const PARTIAL: &[Kernel] = &[
    lacking("without-open_tree", "open_tree"),
    lacking("without-move_mount", "move_mount"),
    lacking("without-mount_setattr", "mount_setattr"),
    lacking("without-fsopen", "fsopen"),
    lacking("without-fsconfig", "fsconfig"),
    lacking("without-fsmount", "fsmount"),
    lacking("without-statmount", "statmount"),
    lacking("without-open_tree_attr", "open_tree_attr"),
    Kernel {
        name: "old-seccomp-profile",
        errno: "EPERM",
        without: NEW,
    },
];

thread_local! {
    static KERNEL: Cell<Option<Kernel>> = const { Cell::new(None) };
}

/// Sets the kernel of this test, which is the only one in this thread from now on.
pub fn set(kernel: Option<Kernel>) {
    KERNEL.set(kernel);
}

/// Returns the kernel of this test; `None` is the kernel without a filter.
pub fn current() -> Option<Kernel> {
    KERNEL.get()
}

/// Returns the words of the command line that start the hook.
pub fn hook() -> Vec<String> {
    let Some(Kernel { errno, without, .. }) = KERNEL.get() else {
        return vec![HOOK.to_owned()];
    };
    let wrapper = wrapper().display().to_string();
    [&wrapper, "--errno", errno, without, HOOK]
        .map(str::to_owned)
        .to_vec()
}

/// Returns the same as a command.
pub fn hook_command() -> Command {
    let words = hook();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

fn wrapper() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let path = scratch().keep().join("without-syscalls");
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&path);
        run(cc.arg(source("tests/probes/without-syscalls.c"))).ok();
        path
    })
}
