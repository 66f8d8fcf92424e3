//! Rights that a forked child gives up before it runs code of the driver's vendor. There is no way back.

use std::fs::File;
use std::io;
use std::path::Path;

use nix::unistd::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};
use serde::{Deserialize, Serialize};

use super::{child, landlock, process};

/// Who the child is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// real, effective and saved user id
    pub uid: u32,
    /// real, effective and saved group id, and the only supplementary group
    pub gid: u32,
}

/// Gives up everything that the NVML library does not need: environment, kernel caps (bounding set too), the chance
/// to gain any by exec, with `identity` the user and groups, and with [`landlock::restrict`] every change of the file
/// system. `pipe` is how the child reports.
///
/// # Errors
/// If a right cannot be given up.
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

/// Before the user changes: it takes CAP_SETPCAP.
fn drop_bounding_set() {
    for cap in CapabilitySet::all() {
        // EPERM: an unprivileged caller has no CAP_SETPCAP, and nothing to lose; EINVAL: a cap this kernel does not know.
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

    /// What `body` reports after [`confine`].
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
        // Without the fence the mode bits allow all of this to everyone: the test can see a difference.
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
        let told = confined(None, || attempts(&file));
        let expected = match landlock::version() {
            // truncate(2) is among what is denied since version 3
            3.. => {
                "open denied, truncate denied, create denied, link denied, mkdir denied, fifo denied, rename denied, \
                 remove denied, exec denied; null Ok(())"
            }
            _ => return assert!(told.ends_with("null Ok(())"), "{told}"),
        };
        assert_eq!(told, expected);
    }

    #[test]
    fn a_confined_child_signals_no_process_outside() {
        let parent = nix::unistd::getpid();
        let told = confined(None, || format!("{:?}", nix::sys::signal::kill(parent, None)));
        // ESRCH in a PID namespace of its own, EPERM behind the fence (version 6)
        let is_root = nix::unistd::geteuid().is_root();
        assert!(told != "Ok(())" || !is_root && landlock::version() < 6, "{told}");
    }
}
