//! cgroup v2: the device programs that are attached to the container's cgroups, extended.
//!
//! Each attached program must allow an access, those of ancestors too, so one more program could only forbid. What is
//! attached is read back, put behind our rules, and replaced: one program for all rules, in one step per program.
//! Where none is attached every device is allowed, and there is nothing to do.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{DeviceRule, program};
use crate::error::Failure;
use crate::sys::bpf;

/// A program that is attached, and the one to take its place.
struct Replacement {
    cgroup: PathBuf,
    dir: File,
    old: OwnedFd,
    new: OwnedFd,
    flags: u32,
}

/// Makes the programs on `cgroups` allow the devices of `rules`.
///
/// # Errors
/// If a program cannot be read back, loaded or replaced. All new ones are loaded before the first is replaced.
pub(super) fn allow(cgroups: &[PathBuf], rules: &[DeviceRule]) -> Result<()> {
    let mut replacements = Vec::new();
    for cgroup in cgroups {
        replacements.extend(prepare(cgroup, rules).with_context(|| Failure::new(
            format!("cannot extend the device programs of cgroup {cgroup:?}"),
            "let the engine allow the devices (--device, a device plugin, or CDI), and set no-cgroups = true in the \
             [nvidia-container-cli] table of config.toml",
        ))?);
    }
    for Replacement { cgroup, dir, old, new, flags } in replacements {
        bpf::replace(dir.as_fd(), old.as_fd(), new.as_fd(), flags)
            .with_context(|| format!("replace a device program of cgroup {cgroup:?}"))?;
    }
    Ok(())
}

fn prepare(cgroup: &Path, rules: &[DeviceRule]) -> Result<Vec<Replacement>> {
    let dir = File::open(cgroup)?;
    let (ids, flags) = bpf::query(dir.as_fd()).context("list them")?;
    let mut replacements = Vec::new();
    for id in ids {
        let old = bpf::open(id).with_context(|| format!("open program {id}"))?;
        let insns =
            bpf::instructions(old.as_fd()).with_context(|| format!("read program {id}"))?.with_context(|| {
                format!("program {id} is hidden by the kernel (net.core.bpf_jit_harden, or a lockdown)")
            })?;
        let Some(insns) = program::extend(&insns, rules) else { continue };
        let new = bpf::load(&insns).with_context(|| format!("load program {id} with our rules"))?;
        replacements.push(Replacement { cgroup: cgroup.to_owned(), dir: dir.try_clone()?, old, new, flags });
    }
    Ok(replacements)
}
