//! A separate /run for each test, because the programs store data in fixed directories there: a test must neither find the data of
//! this machine or of another test, nor leave data. The directories are empty that the programs read on a host in use.

use std::fs::{DirEntry, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use nix::sched::{CloneFlags, unshare};
use rustix::mount::{MountFlags, MountPropagationFlags};

/// The names in /run that each test starts without.
const HIDDEN: [&str; 5] = [
    "cdi",
    "oci-nvidia-hook",
    "oci-nvidia-kubelet-plugin",
    "oci-nvidia-kubelet-plugin-sockets",
    "oci-nvidia-mps",
];

/// Directories of this machine that each test sees without their content: specs, hook files, the configuration of the hook and of the
/// engines of Kubernetes.
const EMPTY: [&str; 6] = [
    "/etc/cdi",
    "/etc/containers/oci/hooks.d",
    "/usr/share/containers/oci/hooks.d",
    "/etc/nvidia-container-runtime",
    "/var/lib/rancher",
    "/var/lib/k0s",
];

/// Runs a test in a thread with a separate mount namespace, which its processes inherit. A plain user cannot create a namespace, and
/// cannot change /run.
pub fn with_private_run(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(|| {
        if rustix::process::geteuid().is_root() {
            replace_run();
        }
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Replaces /run of this thread with a tmpfs that shows all other names of it.
fn replace_run() {
    // Root of a container can lack CAP_SYS_ADMIN. The tests that mount something report that.
    if unshare(CloneFlags::CLONE_NEWNS).is_err() {
        return;
    }
    let propagation = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", propagation).unwrap();
    let dir = tempfile::tempdir().unwrap();
    rustix::mount::mount(
        "run",
        dir.path(),
        "tmpfs",
        MountFlags::empty(),
        c"mode=0755",
    )
    .unwrap();
    for entry in std::fs::read_dir("/run").unwrap() {
        let entry = entry.unwrap();
        if !HIDDEN.iter().any(|hidden| entry.file_name() == *hidden) {
            show(&entry, &dir.path().join(entry.file_name())).ok(); // it can have been removed
        }
    }
    rustix::mount::mount_move(dir.path(), "/run").unwrap();
    for dir in EMPTY {
        let flags = MountFlags::empty();
        // Most machines lack most of them.
        rustix::mount::mount("hidden", dir, "tmpfs", flags, c"mode=0755").ok();
    }
    if !std::fs::symlink_metadata("/var/run").is_ok_and(|found| found.is_symlink()) {
        rustix::mount::mount_bind("/run", "/var/run").ok(); // a system can lack /var/run
    }
}

fn show(entry: &DirEntry, path: &Path) -> io::Result<()> {
    let kind = entry.file_type()?;
    if kind.is_symlink() {
        return symlink(std::fs::read_link(entry.path())?, path);
    }
    if kind.is_dir() {
        std::fs::create_dir(path)?;
    } else {
        File::create(path)?;
    }
    Ok(rustix::mount::mount_bind_recursive(entry.path(), path)?)
}
