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

/// A kernel on which tests are repeated.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    pub kernel: Kernel,
    pub scope: Scope,
    /// Whether `make test` runs the tests of the main path on it
    pub in_make_test: bool,
}

/// The tests that are repeated on a kernel.
#[derive(Clone, Copy, Debug)]
pub enum Scope {
    /// All tests whose code uses one of the calls
    Everything,
    /// The tests of container starts
    Starts,
    /// The first of them
    MainPath,
}

/// Everything newer than SLE 15 SP1.
const NEW: &str = "openat2,open_tree,move_mount,mount_setattr,fsopen,fsconfig,fsmount,close_range,clone3,pidfd_open,faccessat2,\
                   landlock_create_ruleset,statmount,open_tree_attr";

/// The kernel that lacks all of them.
pub const OLDEST: Kernel = Kernel {
    name: "linux-4.12",
    errno: "ENOSYS",
    without: NEW,
};

const fn lacking(name: &'static str, without: &'static str, scope: Scope) -> Variant {
    Variant {
        kernel: Kernel {
            name,
            errno: "ENOSYS",
            without,
        },
        scope,
        in_make_test: false,
    }
}

/// A kernel before 5.6.
pub const WITHOUT_OPENAT2: Variant = lacking("without-openat2", "openat2", Scope::Starts);

/// The kernels on which tests are repeated.
pub const VARIANTS: &[Variant] = &[
    Variant {
        kernel: OLDEST,
        scope: Scope::Everything,
        in_make_test: true,
    },
    Variant {
        kernel: Kernel {
            name: "old-seccomp-profile",
            errno: "EPERM",
            without: NEW,
        },
        scope: Scope::MainPath,
        in_make_test: true,
    },
    WITHOUT_OPENAT2,
    lacking("without-open_tree", "open_tree", Scope::MainPath),
    lacking("without-move_mount", "move_mount", Scope::MainPath),
    lacking("without-mount_setattr", "mount_setattr", Scope::MainPath),
    lacking("without-fsopen", "fsopen", Scope::MainPath),
    lacking("without-fsconfig", "fsconfig", Scope::MainPath),
    lacking("without-fsmount", "fsmount", Scope::MainPath),
    lacking("without-statmount", "statmount", Scope::MainPath),
    lacking("without-open_tree_attr", "open_tree_attr", Scope::MainPath),
];

thread_local! {
    static KERNEL: Cell<Option<Kernel>> = const { Cell::new(None) };
}

/// Sets the kernel of this test, which is the only one in its thread.
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
