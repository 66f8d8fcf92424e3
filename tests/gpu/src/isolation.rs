//! A mount namespace in which the checks can create what they need, without a trace on the machine.
//!
//! The namespace has a separate `/run` and `/dev`: a tmpfs with the entries of the machine, each bind-mounted. New names, such as the
//! records of the hook or a device node that the driver's programs create, exist only in the namespace. No program in the namespace can
//! load a kernel module.

use std::ffi::OsString;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use nix::sched::CloneFlags;
use rustix::fs::{CWD, FileType, Mode};
use rustix::mount::{MountFlags, MountPropagationFlags};

/// Directories that must be empty in the namespace: what the checks write there is visible to engines and to the journal.
const EMPTY: [&str; 5] = [
    "/run/oci-nvidia-hook",
    "/run/cdi",
    "/run/systemd/journal",
    "/run/oci-nvidia-kubelet-plugin",
    "/run/nri",
];

/// The programs with which modules are loaded.
const LOADERS: [&str; 2] = ["modprobe", "insmod"];

/// Enters the namespace, with a tmpfs at `work`.
///
/// # Errors
/// If the kernel, or the sandbox in which this runs, does not permit it.
pub fn enter(work: &Path) -> Result<(), String> {
    new_namespace()?;
    tmpfs(work, c"mode=755")?;
    let stage = work.join("stage");
    make_dir(&stage)?;
    for dir in ["/run", "/dev"] {
        separate(Path::new(dir), &stage, |_| true)?;
    }
    for dir in EMPTY.iter().map(Path::new).filter(|dir| dir.is_dir()) {
        tmpfs(dir, c"mode=755")?;
    }
    // In a user namespace, the kernel permits a new /proc only if one is visible without mounts over its files, which engines and this
    // namespace have (mnt_already_visible). Without it, the checks of user namespaces cannot run.
    let proc = work.join("proc");
    make_dir(&proc)?;
    rustix::mount::mount("proc", &proc, "proc", MountFlags::empty(), None).ok();
    let refuses = work.join("refuses");
    std::fs::write(
        &refuses,
        "#!/bin/sh\necho 'the checks load no modules' >&2\nexit 1\n",
    )
    .map_err(text("write", &refuses))?;
    std::fs::set_permissions(&refuses, PermissionsExt::from_mode(0o755))
        .map_err(text("change", &refuses))?;
    for loader in LOADERS.iter().filter_map(|name| crate::process::find(name)) {
        // Often a link to kmod, which then refuses under all of its names.
        let program = std::fs::canonicalize(&loader).unwrap_or(loader);
        bind(&refuses, &program)?;
    }
    Ok(())
}

fn new_namespace() -> Result<(), String> {
    nix::sched::unshare(CloneFlags::CLONE_NEWNS)
        .map_err(|error| format!("cannot create a mount namespace: {error}"))?;
    rustix::mount::mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )
    .map_err(|error| format!("cannot make the mounts private: {error}"))
}

fn text<E: std::fmt::Display>(verb: &str, path: &Path) -> impl FnOnce(E) -> String {
    move |error| format!("cannot {verb} {path:?}: {error}")
}

fn make_dir(path: &Path) -> Result<(), String> {
    std::fs::create_dir_all(path).map_err(text("create", path))
}

/// Covers a directory with an empty one until the namespace ends.
///
/// # Errors
/// If nothing can be mounted on it.
pub fn cover(path: &Path) -> Result<(), String> {
    tmpfs(path, c"mode=755")
}

fn tmpfs(path: &Path, options: &std::ffi::CStr) -> Result<(), String> {
    rustix::mount::mount("gpu-checks", path, "tmpfs", MountFlags::empty(), options)
        .map_err(text("mount a tmpfs on", path))
}

fn bind(from: &Path, to: &Path) -> Result<(), String> {
    rustix::mount::mount_bind_recursive(from, to)
        .map_err(|error| format!("cannot mount {from:?} on {to:?}: {error}"))
}

/// Covers a directory with a tmpfs that has the entries of the directory that `keeps` selects by their names. `stage` is an empty
/// directory.
///
/// # Errors
/// If the directory cannot be covered. Entries that cannot be mounted, such as mount points of FUSE that belong to a user, are missing;
/// device nodes must not be.
pub fn separate(dir: &Path, stage: &Path, keeps: fn(&str) -> bool) -> Result<(), String> {
    tmpfs(stage, c"mode=755")?;
    for entry in std::fs::read_dir(dir).map_err(text("read", dir))?.flatten() {
        let (from, to) = (entry.path(), stage.join(entry.file_name()));
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        if !keeps(&entry.file_name().to_string_lossy()) {
            continue;
        }
        let made = if kind.is_symlink() {
            std::fs::read_link(&from)
                .and_then(|target| std::os::unix::fs::symlink(target, &to))
                .map_err(text("link", &to))
        } else if kind.is_char_device()
            && entry.file_name().to_string_lossy().starts_with("nvidia")
            && copy_node(&from, &to)
        {
            continue;
        } else if kind.is_dir() {
            make_dir(&to).and_then(|()| bind(&from, &to))
        } else {
            std::fs::write(&to, "")
                .map_err(text("create", &to))
                .and_then(|()| bind(&from, &to))
        };
        if let Err(error) = made
            && kind.is_char_device()
        {
            return Err(error);
        }
    }
    rustix::mount::mount_move(stage, dir).map_err(|error| format!("cannot cover {dir:?}: {error}"))
}

/// Creates the same device node, which the hook or a program of the driver can change without a trace on the machine. Returns whether
/// that is permitted here.
fn copy_node(from: &Path, to: &Path) -> bool {
    let copy = || -> std::io::Result<()> {
        let stat = rustix::fs::stat(from)?;
        let mode = Mode::from_raw_mode(stat.st_mode);
        rustix::fs::mknodat(CWD, to, FileType::CharacterDevice, mode, stat.st_rdev)?;
        rustix::fs::chmod(to, mode)?;
        std::os::unix::fs::chown(to, Some(stat.st_uid), Some(stat.st_gid))
    };
    copy().is_ok()
}

/// Runs a program in another mount namespace, in which `/dev` has the NVIDIA nodes of another directory: STAGE DIR PROGRAM ARGUMENT...
/// STAGE is an empty directory.
///
/// # Errors
/// If the namespace cannot be created, or the program not started. Otherwise the function does not return.
pub fn run_with_nodes(words: &[OsString]) -> Result<bool, String> {
    let [stage, dir, program, arguments @ ..] = words else {
        return Err("--on-host STAGE DIR PROGRAM".to_owned());
    };
    new_namespace()?;
    let (dir, dev) = (Path::new(dir), Path::new("/dev"));
    separate(dev, Path::new(stage), |_| true)?;
    for entry in std::fs::read_dir(dir).map_err(text("read", dir))?.flatten() {
        let name = entry.file_name();
        let to = dev.join(&name);
        if !name.to_string_lossy().starts_with("nvidia") || to.exists() {
            continue;
        }
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => make_dir(&to)?,
            _ => std::fs::write(&to, "").map_err(text("create", &to))?,
        }
        bind(&entry.path(), &to)?;
    }
    let error = Command::new(program).args(arguments).exec();
    Err(format!("cannot start {program:?}: {error}"))
}
