//! Determines whether a device cgroup allows access to a device, without opening the device.

use std::fs::File;
use std::os::fd::AsFd as _;

use anyhow::{Context as _, Result};
use nix::unistd::Pid;

use base::sys::bpf::{self, Insn};

use super::{DeviceCgroup, interpret, located, mounts};
use crate::oci::device_rules::DeviceRule;

/// The filter that decides which devices the processes of a cgroup may open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    /// No filter: all devices are allowed
    None,
    /// cgroup v1: the content of `devices.list`
    List(String),
    /// cgroup v2: programs, all of which must allow. `None` for a program whose instructions the kernel withholds
    Programs(Vec<Option<Vec<Insn>>>),
}

/// Reads the filter of the process `pid`.
///
/// # Errors
/// If the cgroup is missing or cannot be read: cgroup v2 requires root.
pub(crate) fn filter(pid: Pid) -> Result<Filter> {
    filter_of(&located(&mounts()?, &format!("/proc/{pid}/cgroup"))?)
}

#[expect(clippy::disallowed_methods, reason = "a directory of cgroupfs")]
pub(super) fn filter_of(cgroup: &DeviceCgroup) -> Result<Filter> {
    match cgroup {
        DeviceCgroup::None => Ok(Filter::None),
        DeviceCgroup::V1(path) => {
            let path = path.as_path().join("devices.list");
            let text = base::sys::proc_file::read_text(&path)
                .with_context(|| format!("cannot read {path:?}"))?;
            Ok(Filter::List(text))
        }
        DeviceCgroup::V2 { path, .. } => {
            let dir = File::open(path.as_path()).with_context(|| format!("cannot open {path}"))?;
            programs_of(&dir).context("cannot read its device programs")
        }
    }
}

fn programs_of(cgroup: &File) -> rustix::io::Result<Filter> {
    let mut programs = Vec::new();
    for id in bpf::effective(cgroup.as_fd())? {
        let program = bpf::prog_by_id(id)?;
        programs.push(bpf::prog_info(program.as_fd())?.insns);
    }
    if programs.is_empty() {
        return Ok(Filter::None);
    }
    Ok(Filter::Programs(programs))
}

impl Filter {
    /// Reports whether the filter denies one of the devices; `None` if that cannot be determined.
    pub(super) fn denies_any(&self, rules: &[DeviceRule]) -> Option<bool> {
        let mut denies_any = Some(false);
        for rule in rules {
            match self.allows(*rule) {
                Some(false) => return Some(true),
                None => denies_any = None,
                Some(true) => {}
            }
        }
        denies_any
    }

    /// Reports whether the device may be read and written; `None` if that cannot be determined.
    pub(crate) fn allows(&self, rule: DeviceRule) -> Option<bool> {
        match self {
            Self::None => Some(true),
            Self::List(text) => Some(is_listed(text, rule)),
            Self::Programs(programs) => {
                let mut allows = Some(true);
                for program in programs {
                    match program.as_ref().and_then(|program| run(program, rule)) {
                        Some(0) => return Some(false),
                        None => allows = None,
                        Some(_) => {}
                    }
                }
                allows
            }
        }
    }
}

/// Reports whether `devices.list` allows the device. Lines are `c 195:* rw`, or `a *:* rwm` for all devices. Read and write
/// access can be on different lines.
fn is_listed(list: &str, rule: DeviceRule) -> bool {
    let (mut read, mut write) = (false, false);
    for line in list.lines() {
        let granted = access(line, rule).unwrap_or_default();
        read |= granted.contains('r');
        write |= granted.contains('w');
    }
    read && write
}

/// Returns the access that a line of `devices.list` allows to this device.
fn access(line: &str, rule: DeviceRule) -> Option<&str> {
    let mut words = line.split(' ');
    let (kind, numbers, access) = (words.next()?, words.next()?, words.next()?);
    let (major, minor) = numbers.split_once(':')?;
    if !matches!(kind, "a" | "c") || !is_number(major, rule.major) || !is_number(minor, rule.minor)
    {
        return None;
    }
    Some(access)
}

fn is_number(text: &str, number: u32) -> bool {
    text == "*" || text.parse() == Ok(number)
}

/// Returns the result of a device program for an open(2) for reading and writing.
fn run(program: &[Insn], rule: DeviceRule) -> Option<u64> {
    interpret::run(program, [interpret::BOTH, rule.major, rule.minor])
}

#[cfg(test)]
mod tests {
    use super::super::program;
    use super::*;

    const GPU: DeviceRule = DeviceRule {
        major: 195,
        minor: 0,
    };

    #[test]
    fn lists_of_version_1() {
        for (list, allowed) in [
            ("a *:* rwm\n", true),
            ("c 195:0 rw\n", true),
            ("c 195:* rwm\n", true),
            ("c *:* m\nb *:* rw\n", false),
            ("c 195:255 rw\nc 1:3 rwm\n", false),
            ("c 195:0 r\n", false),
            ("c 195:0 r\nc *:0 w\n", true),
            ("", false),
        ] {
            assert_eq!(
                Filter::List(list.to_owned()).allows(GPU),
                Some(allowed),
                "{list:?}"
            );
        }
    }

    #[test]
    fn programs_of_version_2() {
        let answer = |value| vec![Insn::new(0xb7, 0, 0, 0, value), Insn::new(0x95, 0, 0, 0, 0)];
        let ours = program::extend(
            &answer(0),
            &[
                GPU,
                DeviceRule {
                    major: 195,
                    minor: 255,
                },
            ],
        )
        .unwrap()
        .unwrap();
        let unknown = vec![Insn::new(0x85, 0, 0, 0, 1)];
        let ask =
            |programs: &[Option<Vec<Insn>>], rule| Filter::Programs(programs.to_vec()).allows(rule);
        let (ours, yes, no, unknown) =
            (Some(ours), Some(answer(1)), Some(answer(0)), Some(unknown));
        let other = DeviceRule {
            major: 195,
            minor: 1,
        };
        for (programs, gpu, others) in [
            (&[yes.clone()][..], Some(true), Some(true)),
            (std::slice::from_ref(&no), Some(false), Some(false)),
            (std::slice::from_ref(&ours), Some(true), Some(false)),
            (&[ours.clone(), yes.clone()], Some(true), Some(false)),
            (&[ours.clone(), no.clone()], Some(false), Some(false)),
            (&[ours.clone(), unknown.clone()], None, Some(false)),
            (&[yes, None], None, None),
            (&[None, no.clone()], Some(false), Some(false)),
        ] {
            assert_eq!(
                (ask(programs, GPU), ask(programs, other)),
                (gpu, others),
                "{programs:?}"
            );
        }
        // The kernel refuses a program that does not end.
        let endless = vec![Insn::new(0x05, 0, 0, -1, 0)];
        assert_eq!(ask(&[Some(endless)], GPU), None);
    }
}
