//! Reads the device programs of a cgroup of cgroup v2, and replaces them.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rustix::io::Errno;

use base::report::{Failure, failure};
use base::sys::bpf::{self, Attached, BPF_F_ALLOW_MULTI, BPF_F_ALLOW_OVERRIDE, Insn};
use findings::catalog;

use super::LISTED_HINT;
use super::program::UNBLIND_HINT;

/// The program name that `bpftool prog` shows.
const NAME: &str = "onh_devices";

/// A loaded device program and its instructions.
pub(super) struct Program {
    pub(super) id: u32,
    pub(super) fd: OwnedFd,
    pub(super) insns: Vec<Insn>,
}

impl Program {
    /// Opens the program with this id.
    ///
    /// # Errors
    /// If it does not exist any more, or the hook cannot extend it.
    pub(super) fn by_id(id: u32) -> Result<Self> {
        Self::read(bpf::prog_by_id(id).context("cannot open it")?)
    }

    /// Opens the program that is pinned at this path.
    ///
    /// # Errors
    /// If there is no program, or the hook cannot extend it.
    pub(super) fn pinned(pin: &Path) -> Result<Self> {
        Self::read(bpf::pinned(pin).context("cannot open it")?)
    }

    fn read(fd: OwnedFd) -> Result<Self> {
        let info = bpf::prog_info(fd.as_fd()).context("cannot read it")?;
        if info.maps > 0 {
            let what = format!("its program {:?} uses maps", info.name);
            return Err(failure(&catalog::CGROUP, what, LISTED_HINT));
        }
        let Some(insns) = info.insns else {
            let what = "the kernel withholds its instructions";
            return Err(failure(&catalog::CGROUP, what, UNBLIND_HINT));
        };
        Ok(Self {
            id: info.id,
            fd,
            insns,
        })
    }

    /// Verifies and loads a program. It has no effect before it is attached.
    pub(super) fn load(insns: Vec<Insn>) -> Result<Self> {
        let fd = bpf::load_device_program(NAME, &insns)?;
        let id = bpf::prog_info(fd.as_fd()).context("cannot read it")?.id;
        Ok(Self { id, fd, insns })
    }
}

/// An open cgroup.
pub(super) struct Cgroup {
    pub(super) path: PathBuf,
    dir: File,
}

impl Cgroup {
    #[expect(clippy::disallowed_methods, reason = "a directory of cgroupfs")]
    pub(super) fn open(path: &Path) -> Result<Self> {
        let dir = File::open(path).with_context(|| format!("cannot open cgroup {path:?}"))?;
        Ok(Self {
            path: path.to_owned(),
            dir,
        })
    }

    /// Returns the programs that are attached to this cgroup itself.
    ///
    /// # Errors
    /// [`catalog::CGROUP`] without the privilege to read them.
    pub(super) fn attached(&self) -> Result<Attached> {
        bpf::attached(self.dir.as_fd()).map_err(|errno| refused(errno, &self.path))
    }

    /// Returns the ids of the programs that decide for this cgroup, including the programs of the cgroups above it.
    pub(super) fn effective(&self) -> rustix::io::Result<Vec<u32>> {
        bpf::effective(self.dir.as_fd())
    }

    pub(super) fn cannot_extend(&self, id: u32) -> String {
        format!(
            "cannot extend device program {id} of cgroup {:?}",
            self.path
        )
    }

    /// Attaches a program in addition to the attached ones.
    pub(super) fn add(&self, new: BorrowedFd<'_>) -> rustix::io::Result<()> {
        bpf::attach(self.dir.as_fd(), new, BPF_F_ALLOW_MULTI, None)
    }

    pub(super) fn detach(&self, old: BorrowedFd<'_>) -> rustix::io::Result<()> {
        bpf::detach(self.dir.as_fd(), old)
    }

    /// Replaces a program atomically, with the flags with which it was attached. `attached` is the list that contained it.
    ///
    /// # Errors
    /// ENOENT or ESTALE if the list has changed since.
    pub(super) fn replace(
        &self,
        attached: &Attached,
        old: BorrowedFd<'_>,
        new: BorrowedFd<'_>,
    ) -> Result<()> {
        if attached.flags & BPF_F_ALLOW_MULTI == 0 {
            return self.replace_alone(attached, new);
        }
        match bpf::attach(self.dir.as_fd(), new, BPF_F_ALLOW_MULTI, Some(old)) {
            // KERNEL(5.6): BPF_F_REPLACE. On older kernels both are attached for a moment, and both must allow: no access is
            // gained
            Err(Errno::INVAL) => {
                self.add(new)?;
                Ok(self.detach(old)?)
            }
            // a bpf_link holds it, which only the owner of the link can update; or it was detached in the meantime
            Err(Errno::NOENT) => Err(anyhow::Error::new(Errno::NOENT).context(Failure::new(
                &catalog::CGROUP,
                "another program has attached it with a BPF link",
                LISTED_HINT,
            ))),
            other => Ok(other?),
        }
    }

    /// Replaces the program of a cgroup that accepts only one, where an attach replaces any program. BPF_F_REPLACE is only for
    /// several. KERNEL(6.17): bpf(2) fails with ESTALE if the revision has changed. For older kernels, the attached programs
    /// are compared first. The race is harmless: only the runtime attaches such a program to the container's cgroup (systemd
    /// 239 and newer uses BPF_F_ALLOW_MULTI), and the runtime waits for the hook.
    fn replace_alone(&self, attached: &Attached, new: BorrowedFd<'_>) -> Result<()> {
        let dir = self.dir.as_fd();
        let now = bpf::attached(dir)?;
        if now != *attached {
            return Err(Errno::STALE.into());
        }
        let flags = attached.flags & BPF_F_ALLOW_OVERRIDE;
        Ok(bpf::attach_at(dir, new, flags, attached.revision)?)
    }
}

fn refused(errno: Errno, path: &Path) -> anyhow::Error {
    let what = format!("cannot read the device programs of cgroup {path:?}");
    let error = anyhow::Error::new(errno);
    match errno {
        Errno::PERM => error.context(Failure::new(
            &catalog::CGROUP,
            what,
            "run the engine as root on the host, or have it list the devices in config.json (CDI)",
        )),
        _ => error.context(what),
    }
}
