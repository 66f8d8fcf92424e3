//! Parses the driver's table of MIG capabilities: `/proc/driver/nvidia-caps/mig-minors` lists which `/dev/nvidia-caps/nvidia-capN` grants
//! access to which GPU instance and compute instance. They are not related to kernel capabilities.
//! <https://docs.nvidia.com/datacenter/tesla/mig-user-guide/#device-nodes-and-capabilities>

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::procfs::DRIVER_PROC;
use crate::decimal::parse_decimal;

/// The path of the table.
pub const MIG_MINORS: &str = "/proc/driver/nvidia-caps/mig-minors";

/// A MIG capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MigCap {
    /// Creating and removing MIG devices
    Config,
    /// Monitoring all MIG devices
    Monitor,
    /// Access to a GPU instance: (device minor of the GPU, instance id)
    GpuInstance(u32, u32),
    /// Access to a compute instance: (device minor of the GPU, GPU instance id, compute instance id)
    ComputeInstance(u32, u32, u32),
}

impl MigCap {
    /// Returns its file below /proc.
    #[must_use]
    pub fn proc_path(self) -> PathBuf {
        PathBuf::from(DRIVER_PROC).join(match self {
            Self::Config => "capabilities/mig/config".to_owned(),
            Self::Monitor => "capabilities/mig/monitor".to_owned(),
            Self::GpuInstance(gpu, gi) => format!("capabilities/gpu{gpu}/mig/gi{gi}/access"),
            Self::ComputeInstance(gpu, gi, ci) => {
                format!("capabilities/gpu{gpu}/mig/gi{gi}/ci{ci}/access")
            }
        })
    }

    /// Returns its name in mig-minors.
    fn name(self) -> String {
        match self {
            Self::Config => "config".to_owned(),
            Self::Monitor => "monitor".to_owned(),
            Self::GpuInstance(gpu, gi) => format!("gpu{gpu}/gi{gi}/access"),
            Self::ComputeInstance(gpu, gi, ci) => format!("gpu{gpu}/gi{gi}/ci{ci}/access"),
        }
    }

    /// Returns the device minor of its GPU.
    #[must_use]
    pub const fn gpu(self) -> Option<u32> {
        match self {
            Self::Config | Self::Monitor => None,
            Self::GpuInstance(gpu, _) | Self::ComputeInstance(gpu, _, _) => Some(gpu),
        }
    }
}

/// Parses mig-minors. Each line contains a capability and a minor number; other lines are ignored.
#[must_use]
pub fn parse_mig_minors(text: &str) -> BTreeMap<MigCap, u32> {
    let mut minors = BTreeMap::new();
    minors.extend(text.lines().filter_map(parse_line));
    minors
}

/// Returns the minor numbers of these capabilities. This takes a fraction of the time in which the table is parsed, which has 4,000 lines.
#[must_use]
pub fn minors_of(text: &str, caps: &[MigCap]) -> BTreeMap<MigCap, u32> {
    let names: BTreeMap<String, MigCap> = caps.iter().map(|cap| (cap.name(), *cap)).collect();
    let mut minors = BTreeMap::new();
    for line in text.lines() {
        if minors.len() == names.len() {
            break;
        }
        if let Some((name, minor)) = line.trim().split_once(' ')
            && let Some(cap) = names.get(name)
            && let Some(minor) = parse_decimal(minor.trim())
        {
            minors.insert(*cap, minor);
        }
    }
    minors
}

/// Parses one line.
#[must_use]
pub fn parse_line(line: &str) -> Option<(MigCap, u32)> {
    let (name, minor) = line.trim().split_once(' ')?;
    Some((parse_cap(name)?, parse_decimal(minor.trim())?))
}

/// Parses the name of a capability in mig-minors.
#[must_use]
pub fn parse_cap(name: &str) -> Option<MigCap> {
    match name {
        "config" => return Some(MigCap::Config),
        "monitor" => return Some(MigCap::Monitor),
        _ => {}
    }
    let number = |part: &str, prefix: &str| parse_decimal(part.strip_prefix(prefix)?);
    let parts: Vec<_> = name.split('/').collect();
    match parts.as_slice() {
        [gpu, gi, "access"] => Some(MigCap::GpuInstance(number(gpu, "gpu")?, number(gi, "gi")?)),
        [gpu, gi, ci, "access"] => Some(MigCap::ComputeInstance(
            number(gpu, "gpu")?,
            number(gi, "gi")?,
            number(ci, "ci")?,
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_of_the_table() {
        let table = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi10/access 93\ngpu0/gi2/access x\n";
        let all = parse_mig_minors(table);
        assert_eq!(all.len(), 5);
        let caps: Vec<_> = all.keys().copied().collect();
        assert_eq!(minors_of(table, &caps), all);
        let few = [MigCap::GpuInstance(0, 1), MigCap::GpuInstance(0, 2)];
        assert_eq!(minors_of(table, &few), [(few[0], 12)].into());
        assert!(minors_of(table, &[]).is_empty());
    }

    #[test]
    fn numbers_are_digits() {
        assert_eq!(
            parse_mig_minors("gpu0/gi1/ci2/access 3\n"),
            [(MigCap::ComputeInstance(0, 1, 2), 3)].into()
        );
        for line in [
            "gpu+0/gi1/access 3",
            "gpu0/gi/access 3",
            "gpu0/gi4294967296/access 3",
            "config +1",
            "config",
        ] {
            assert!(parse_mig_minors(line).is_empty(), "{line}");
        }
    }
}
