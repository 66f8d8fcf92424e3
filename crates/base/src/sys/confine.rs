//! Drops the privileges of a forked child before it runs the driver's library. The child cannot regain them.

use std::fs::File;
use std::io;
use std::path::Path;

use nix::unistd::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};
use serde::{Deserialize, Serialize};

use super::{child, landlock, process};

/// The user and group of the child.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The real, effective and saved user id
    pub uid: u32,
    /// The real, effective and saved group id, which is also the only supplementary group
    pub gid: u32,
}

/// Drops what NVML does not need: the environment, all kernel capabilities including the bounding set, and the ability to gain any
/// by execve(2). The child changes to `identity` if it is given, and [`landlock::restrict`] denies it changes of files. `pipe` is
/// the pipe to the parent process.
///
/// # Errors
/// If a privilege cannot be dropped.
pub fn confine(root: &Path, identity: Option<Identity>, pipe: &File) -> io::Result<()> {
    process::clear_environment();
    if root != Path::new("/") {
        nix::unistd::chroot(root)?;
        nix::unistd::chdir("/")?;
    }
    drop_bounding_set();
    if let Some(Identity { uid, gid }) = identity {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        nix::unistd::setgroups(&[gid])?;
        nix::unistd::setresgid(gid, gid, gid)?;
        nix::unistd::setresuid(uid, uid, uid)?;
    }
    rustix::thread::set_no_new_privs(true)?;
    drop_caps()?;
    landlock::restrict()?;
    child::die_with_parent(pipe)
}

/// Clears the bounding set. This requires CAP_SETPCAP, so it happens before the user is changed.
fn drop_bounding_set() {
    for cap in CapabilitySet::all() {
        // EPERM means that an unprivileged caller lacks CAP_SETPCAP, EINVAL that the kernel does not have the capability.
        rustix::thread::remove_capability_from_bounding_set(cap).ok();
    }
}

pub(super) fn drop_caps() -> io::Result<()> {
    rustix::thread::clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    rustix::thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, Instant};

    use super::super::child::{report, spawn};
    use super::*;

    /// Runs `body` after [`confine`], and returns what it reports.
    fn confined(identity: Option<Identity>, body: impl FnOnce() -> String) -> String {
        let mut child = spawn(|pipe| {
            confine(Path::new("/"), identity, pipe).unwrap();
            report(pipe, (body().replace('\n', "|") + "\n").as_bytes());
        })
        .unwrap();
        String::from_utf8(child.line(Instant::now() + Duration::from_secs(20)).unwrap()).unwrap()
    }

    #[test]
    fn a_confined_child_has_no_environment_and_no_caps() {
        let status = confined(None, || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            format!("{status}env {}", std::env::vars_os().count())
        });
        let mut lines = vec!["CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "env 0"];
        if nix::unistd::geteuid().is_root() {
            lines.push("CapBnd:\t0000000000000000"); // a plain user has no CAP_SETPCAP
        }
        for line in lines {
            assert!(status.contains(line), "{line} missing in\n{status}");
        }
    }

    #[test]
    fn a_confined_child_changes_no_file_and_runs_no_program() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o666)).unwrap();
        // Without Landlock, the mode bits permit all of this, so the test can fail.
        let attempts = |file: &Path| {
            let beside = |name: &str| file.with_file_name(name);
            let denied = [
                ("open", std::fs::OpenOptions::new().write(true).open(file).map(drop)),
                ("truncate", nix::unistd::truncate(file, 0).map_err(io::Error::from)),
                ("create", File::create(beside("new")).map(drop)),
                ("link", std::os::unix::fs::symlink("x", beside("link"))),
                ("mkdir", std::fs::create_dir(beside("dir"))),
                ("fifo", nix::unistd::mkfifo(&beside("fifo"), nix::sys::stat::Mode::S_IRUSR).map_err(io::Error::from)),
                ("rename", std::fs::rename(beside("old"), beside("older"))),
                ("remove", std::fs::remove_file(beside("gone"))),
                ("exec", nix::unistd::execv(c"/bin/true", &[c"true"]).map(drop).map_err(io::Error::from)),
            ]
            .map(|(what, result)| match result {
                Err(error) if error.kind() == ErrorKind::PermissionDenied => format!("{what} denied"),
                other => format!("{what} {other:?}"),
            });
            let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").map(drop);
            format!("{}; null {null:?}", denied.join(", "))
        };
        for name in ["old", "gone"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let report = confined(None, || attempts(&file));
        let expected = match landlock::version() {
            // truncate(2) is among what is denied since version 3
            3.. => {
                "open denied, truncate denied, create denied, link denied, mkdir denied, fifo denied, rename denied, \
                 remove denied, exec denied; null Ok(())"
            }
            _ => return assert!(report.ends_with("null Ok(())"), "{report}"),
        };
        assert_eq!(report, expected);
    }

    #[test]
    fn a_confined_child_signals_no_process_outside() {
        let parent = nix::unistd::getpid();
        let result = confined(None, || format!("{:?}", nix::sys::signal::kill(parent, None)));
        // ESRCH in a PID namespace of its own, EPERM with version 6 of Landlock
        let is_root = nix::unistd::geteuid().is_root();
        assert!(result != "Ok(())" || !is_root && landlock::version() < 6, "{result}");
    }
}
