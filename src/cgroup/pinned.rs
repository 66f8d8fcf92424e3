//! Extends the device program that crun has given to systemd, so that systemd does not restore the original.
//!
//! crun 1.23 and newer pins its program below `/sys/fs/bpf/crun` and names the pin in `BPFProgram=` of the container's transient
//! scope (`add_bpf_program` in src/libcrun/cgroup-systemd.c). systemd attaches the program when the scope starts. At
//! `daemon-reload` and `daemon-reexec` it detaches the program, reads the unit file again, and attaches the program that is pinned
//! (`bpf_foreign_install` in src/core/bpf-foreign.c). It detaches no program that it has not attached. `set-property` does not
//! attach it again, because systemd remembers the cgroup (`bpf_program_cgroup_attach` in src/shared/bpf-program.c).
//!
//! Therefore the extended program replaces the original one in the cgroup, and the line with the pin becomes a comment in the
//! transient unit file. The pin itself must not change: `crun update`, which `podman update` calls, compares it with a program
//! that crun makes anew, and refuses another one. D-Bus does not help either: systemd accepts `BPFProgram` only before the
//! start, and `DeviceAllow` adds a second program, while both have to allow a device.
//!
//! The order fails closed: if the hook is killed between the two steps, the next reload attaches the original program as well,
//! and the devices are denied. In the other order, a reload would leave the container without any device filter.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{CWD, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;

use base::report::{Finding, errno_of};
use findings::catalog;

use super::attach::{Cgroup, Program};
use super::interpret::{FilterEffect, interpret};
use super::program::extend;
use crate::oci::device_rules::DeviceRule;

/// The directory of crun's pins.
const PINS: &str = "/sys/fs/bpf/crun";
/// The directory in which systemd writes the unit files of transient units.
const UNIT_FILES: &str = "/run/systemd/transient";
/// Upper limit for a unit file in bytes; a scope's file has a few hundred.
const MAX_UNIT_FILE: u64 = 1 << 20;
/// Upper limit for changes of the list of programs until it is as intended. A reload of systemd causes one or two.
const MAX_CHANGES: usize = 8;

/// A program that crun has given to systemd, and the program that is to replace it.
pub(super) struct Pinned {
    scope: String,
    cgroup: Cgroup,
    original: Program,
    extended: Program,
    /// The file in which systemd finds the pin, or why it cannot be edited
    unit_file: io::Result<UnitFile>,
}

impl Pinned {
    /// Finds the scope among the container's cgroups whose program crun has given to systemd, and extends the program without
    /// attaching it. `None` if there is no such scope, if the program allows the devices, or if systemd no longer knows the pin
    /// because of an earlier call of the hook.
    ///
    /// The program is read from the pin: while systemd reloads, none is attached to the scope.
    ///
    /// # Errors
    /// If the program cannot be read or extended.
    pub(super) fn find(own: &[PathBuf], rules: &[DeviceRule]) -> Result<Option<Self>> {
        for cgroup in own {
            let Some(scope) = scope_name(cgroup) else {
                continue;
            };
            let pin = pin_of(scope);
            if rustix::fs::lstat(&pin).is_ok() {
                return Self::of(scope, cgroup, &pin, rules)
                    .with_context(|| format!("cannot extend the device program {pin:?} of crun"));
            }
        }
        Ok(None)
    }

    fn of(scope: &str, cgroup: &Path, pin: &Path, rules: &[DeviceRule]) -> Result<Option<Self>> {
        let unit_file = UnitFile::open(&Path::new(UNIT_FILES).join(scope), pin);
        if let Ok(file) = &unit_file
            && file.lines.is_empty()
        {
            return Ok(None);
        }
        let original = Program::pinned(pin)?;
        // A program that allows the devices stays, and so does one that singles them out to deny them.
        if interpret(&original.insns, rules) != FilterEffect::AllowList {
            return Ok(None);
        }
        let Some(longer) = extend(&original.insns, rules)? else {
            return Ok(None);
        };
        Ok(Some(Self {
            scope: scope.to_owned(),
            cgroup: Cgroup::open(cgroup)?,
            original,
            extended: Program::load(longer)?,
            unit_file,
        }))
    }

    /// Removes the pin from the unit file, after [`Self::settle`]. The caller then waits for a running reload of systemd, which may
    /// have read the file before, and calls [`Self::settle`] again.
    ///
    /// # Errors
    /// If the file cannot be changed: the next reload then attaches the original program as well.
    pub(super) fn edit_unit_file(&self) -> Result<()> {
        let edited = match &self.unit_file {
            Ok(file) => file.comment_out(),
            Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
        };
        let file = Path::new(UNIT_FILES).join(&self.scope);
        edited.with_context(|| format!("cannot edit the unit file {file:?}"))
    }

    /// Changes the list of attached programs until it contains the extended program and not the original one. systemd can detach
    /// and attach the original one at any time while it reloads.
    pub(super) fn settle(&self) -> Result<()> {
        let (original, extended) = (self.original.fd.as_fd(), self.extended.fd.as_fd());
        let mut last = None;
        for _ in 0..MAX_CHANGES {
            let attached = self.cgroup.attached()?;
            let changed = match next(&attached.ids, self.original.id, self.extended.id) {
                Change::None => return Ok(()),
                Change::Add => self.cgroup.add(extended).map_err(anyhow::Error::new),
                Change::Replace => self.cgroup.replace(&attached, original, extended),
                Change::Detach => self.cgroup.detach(original).map_err(anyhow::Error::new),
            };
            match changed {
                Err(error) if is_outdated(&error) => last = Some(error),
                other => other.with_context(|| self.cgroup.cannot_extend(self.original.id))?,
            }
        }
        match last {
            Some(error) => Err(error.context(self.cgroup.cannot_extend(self.original.id))),
            None => bail!("systemd attaches its device program again and again"),
        }
    }

    /// Returns the finding for a container whose devices are denied after the next reload.
    pub(super) fn finding(&self, why: &anyhow::Error) -> Finding {
        Finding::new(
            &catalog::CRUN,
            format!(
                "\"systemctl daemon-reload\" removes the devices from {:?} again: {}",
                self.scope,
                base::report::line(why)
            ),
            format!(
                "allow the engine's hooks to write to {UNIT_FILES:?}, or {}",
                super::LISTED_HINT
            ),
        )
    }
}

/// Reports whether a change failed because the list of programs is no longer the one that was read.
pub(super) fn is_outdated(error: &anyhow::Error) -> bool {
    matches!(errno_of(error), Some(Errno::NOENT | Errno::STALE))
}

/// A change of the list of attached programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    None,
    /// Attach the extended program
    Add,
    /// Replace the original program with the extended one
    Replace,
    /// Detach the original program
    Detach,
}

/// Determines the next change. Both programs have to allow a device, so the original one must go, and the extended one must come
/// before it goes, because a cgroup without a program allows all devices.
fn next(attached: &[u32], original: u32, extended: u32) -> Change {
    match (attached.contains(&original), attached.contains(&extended)) {
        (false, true) => Change::None,
        // systemd is between two steps of a reload.
        (false, false) => Change::Add,
        (true, false) => Change::Replace,
        (true, true) => Change::Detach,
    }
}

/// Returns the name of the unit if a cgroup is a scope of systemd.
fn scope_name(cgroup: &Path) -> Option<&str> {
    let name = cgroup.file_name()?.to_str()?;
    name.ends_with(".scope").then_some(name)
}

/// Returns the path at which crun pins the program of a scope (`bpfprog_path_from_scope`). A BPF file system allows no dots in
/// names (bpf(2)).
fn pin_of(scope: &str) -> PathBuf {
    Path::new(PINS).join(scope.replace('.', "_"))
}

/// The open file of a transient unit.
struct UnitFile {
    file: File,
    times: Timestamps,
    /// Where the lines begin that name the pin
    lines: Vec<u64>,
}

impl UnitFile {
    /// Opens a unit file and finds the lines that name the pin.
    fn open(path: &Path, pin: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(CWD, path, flags, Mode::empty())?);
        let facts = file.metadata()?;
        if !facts.is_file() || facts.uid() != 0 {
            return Err(io::Error::other("it is not a regular file of root"));
        }
        let mut text = Vec::new();
        (&file).take(MAX_UNIT_FILE).read_to_end(&mut text)?;
        let time = |seconds, nanoseconds| Timespec {
            tv_sec: seconds,
            tv_nsec: nanoseconds,
        };
        Ok(Self {
            lines: lines_with(&text, pin),
            times: Timestamps {
                last_access: time(facts.atime(), facts.atime_nsec()),
                last_modification: time(facts.mtime(), facts.mtime_nsec()),
            },
            file,
        })
    }

    /// Turns the lines into comments. One byte changes, so that systemd reads either the old line or the comment at any time, and
    /// the file keeps its owner, mode and SELinux label. It also keeps its time of modification, because systemd compares that with
    /// the time of its last reload, and `systemctl` would print that the unit file has changed on disk.
    fn comment_out(&self) -> io::Result<()> {
        for start in &self.lines {
            self.file.write_all_at(b"#", *start)?;
        }
        // Without the time, systemctl prints that warning, and the devices stay all the same.
        rustix::fs::futimens(&self.file, &self.times).ok();
        Ok(())
    }
}

/// Returns where the lines of a unit file begin that make systemd attach the pinned program. systemd writes one line for each program
/// (`bus_cgroup_set_transient_property` in src/core/dbus-cgroup.c).
fn lines_with(unit_file: &[u8], pin: &Path) -> Vec<u64> {
    let wanted = [b"BPFProgram=device:", pin.as_os_str().as_bytes()].concat();
    let mut lines = Vec::new();
    let mut start = 0;
    for line in unit_file.split_inclusive(|byte| *byte == b'\n') {
        if line.strip_suffix(b"\n").unwrap_or(line) == wanted {
            lines.push(start);
        }
        start += u64::try_from(line.len()).unwrap_or(u64::MAX);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As systemd 262 writes it for crun 1.28
    const SCOPE: &str = "# This is a transient unit file, created programmatically via the systemd API. Do not edit.\n\
        [Scope]\nSlice=machine.slice\n\n[Scope]\nDelegate=yes\nBPFProgram=\nBPFProgram=device:/sys/fs/bpf/crun/libpod-0a_scope\n";

    #[test]
    fn the_pin_of_a_scope() {
        let cgroup = Path::new("/sys/fs/cgroup/machine.slice/libpod-0a.scope");
        assert_eq!(scope_name(cgroup), Some("libpod-0a.scope"));
        assert_eq!(
            pin_of("libpod-0a.scope"),
            Path::new("/sys/fs/bpf/crun/libpod-0a_scope")
        );
        let others = [
            "/sys/fs/cgroup/libpod_parent/libpod-0a",
            "/sys/fs/cgroup/a.service",
        ];
        for other in others {
            assert_eq!(scope_name(Path::new(other)), None);
        }
    }

    #[test]
    fn the_list_becomes_the_extended_program() {
        let (original, extended, other) = (1, 2, 3);
        for (attached, change) in [
            (vec![original], Change::Replace),
            (vec![extended], Change::None),
            (vec![], Change::Add),
            (vec![extended, original], Change::Detach),
            (vec![original, extended], Change::Detach),
            (vec![other], Change::Add),
            (vec![other, original], Change::Replace),
            (vec![other, extended], Change::None),
        ] {
            assert_eq!(next(&attached, original, extended), change, "{attached:?}");
        }
    }

    #[test]
    fn lines_of_the_pin() {
        let pin = pin_of("libpod-0a.scope");
        let start = SCOPE.find("BPFProgram=device").unwrap();
        let start = u64::try_from(start).unwrap();
        assert_eq!(lines_with(SCOPE.as_bytes(), &pin), [start]);
        let cut = SCOPE.trim_end();
        assert_eq!(lines_with(cut.as_bytes(), &pin), [start], "no line end");
        let twice = SCOPE.repeat(2);
        assert_eq!(lines_with(twice.as_bytes(), &pin).len(), 2);
        for other in [
            "",
            "\n",
            "BPFProgram=\n",
            "#PFProgram=device:/sys/fs/bpf/crun/libpod-0a_scope\n",
            "BPFProgram=device:/sys/fs/bpf/crun/libpod-0a_scope_2\n",
            "BPFProgram=device:/sys/fs/bpf/crun/libpod-0b_scope\n",
            "BPFProgram=egress:/sys/fs/bpf/crun/libpod-0a_scope\n",
        ] {
            assert!(lines_with(other.as_bytes(), &pin).is_empty(), "{other}");
        }
    }

    #[test]
    fn a_unit_file_keeps_everything_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("libpod-0a.scope");
        std::fs::write(&path, SCOPE).unwrap();
        let before = std::fs::metadata(&path).unwrap();
        if before.uid() != 0 {
            let refused = UnitFile::open(&path, &pin_of("libpod-0a.scope"));
            assert!(refused.is_err(), "the file of another user");
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        let pin = pin_of("libpod-0a.scope");
        UnitFile::open(&path, &pin).unwrap().comment_out().unwrap();
        let (text, after) = (
            std::fs::read_to_string(&path).unwrap(),
            std::fs::metadata(&path).unwrap(),
        );
        assert_eq!(
            text,
            SCOPE.replace("BPFProgram=device", "#PFProgram=device")
        );
        assert_eq!(
            (after.ino(), after.mode(), after.mtime_nsec()),
            (before.ino(), before.mode(), before.mtime_nsec())
        );
        assert!(UnitFile::open(&path, &pin).unwrap().lines.is_empty());
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(UnitFile::open(&link, &pin).is_err(), "a link");
    }
}
