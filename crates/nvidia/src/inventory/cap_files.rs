//! Reads the kernel module's files for MIG capabilities below /proc/driver/nvidia/capabilities. There is a file for each existing
//! capability. It contains the minor number, owner and mode of the device node that grants the capability.

use std::path::Path;

use base::tree::Tree;

use crate::device_id::parse_decimal;
use crate::driver::params::{NodePolicy, field, parse_policy};
use crate::inventory::caps::MigCap;
use crate::inventory::procfs::DRIVER_PROC;
use crate::inventory::{Inventory, UnlistedMig};

/// A capability, and the node that grants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapFile {
    /// The capability
    pub cap: MigCap,
    /// The N of `/dev/nvidia-caps/nvidia-capN`
    pub minor: u32,
    /// Owner and mode of the node
    pub policy: NodePolicy,
}

impl CapFile {
    /// Returns the name of the node below /dev.
    #[must_use]
    pub(crate) fn node_name(&self) -> String {
        format!("nvidia-caps/nvidia-cap{}", self.minor)
    }

    /// Whether this root lacks the node.
    #[must_use]
    pub(crate) fn is_missing_below(&self, dev: &Tree) -> bool {
        dev.locate(&Path::new("/dev").join(self.node_name()))
            .is_err()
    }
}

/// Parses one of the files. Returns `None` if it contains no minor number.
#[must_use]
pub fn parse(cap: MigCap, text: &str) -> Option<CapFile> {
    let minor = field(text, "DeviceFileMinor")?;
    let mut policy = parse_policy(text);
    // Without a mode, only root gets the capability.
    if field(text, "DeviceFileMode").is_none() {
        policy.mode = 0o400;
    }
    policy.modify &= field(text, "DeviceFileModify") != Some(0);
    Some(CapFile { cap, minor, policy })
}

/// Returns the GPU instances, each before its compute instances. They are found by their directories, because the table of all
/// possible capabilities (mig-minors) has 4,000 lines.
#[must_use]
pub fn instances(proc: &Tree) -> Vec<MigCap> {
    let top = Path::new(DRIVER_PROC).join("capabilities");
    let mut caps = Vec::new();
    for gpu in numbers(proc, &top, "gpu") {
        let mig = top.join(format!("gpu{gpu}/mig"));
        for instance in numbers(proc, &mig, "gi") {
            caps.push(MigCap::GpuInstance(gpu, instance));
            let compute = numbers(proc, &mig.join(format!("gi{instance}")), "ci");
            caps.extend(
                compute
                    .into_iter()
                    .map(|compute| MigCap::ComputeInstance(gpu, instance, compute)),
            );
        }
    }
    caps
}

/// Returns the files of the capabilities that exist.
#[must_use]
pub fn existing(proc: &Tree) -> Vec<CapFile> {
    let caps = [MigCap::Config, MigCap::Monitor]
        .into_iter()
        .chain(instances(proc));
    caps.filter_map(|cap| parse(cap, &proc.read_text(&cap.proc_path()).ok()?))
        .collect()
}

/// Returns the numbers N of the entries `prefixN`.
fn numbers(proc: &Tree, dir: &Path, prefix: &str) -> Vec<u32> {
    let names = proc.names(dir);
    names
        .iter()
        .filter_map(|name| parse_decimal(name.to_str()?.strip_prefix(prefix)?))
        .collect()
}

/// Adds the MIG devices without device nodes to each GPU in MIG mode.
///
/// NVML lists a MIG device only if it can open both of its nodes, but the kernel module always lists its capabilities. Therefore a GPU
/// may have MIG devices even if NVML's answer contains none.
pub fn note_missing_nodes(inventory: &mut Inventory, caps: &[CapFile], dev: &Tree) {
    let missing: Vec<_> = caps
        .iter()
        .filter(|file| file.is_missing_below(dev))
        .collect();
    for gpu in inventory.gpus.iter_mut().filter(|gpu| gpu.mig_enabled) {
        gpu.unlisted_mig = caps
            .iter()
            .filter_map(|file| unlisted(gpu.minor, file.cap, &missing))
            .collect();
    }
}

/// Returns the MIG device of this capability of the GPU, if one of its two nodes is missing.
fn unlisted(gpu: u32, cap: MigCap, missing: &[&CapFile]) -> Option<UnlistedMig> {
    let MigCap::ComputeInstance(minor, gpu_instance, compute_instance) = cap else {
        return None;
    };
    let needed = [MigCap::GpuInstance(minor, gpu_instance), cap];
    let nodes = missing
        .iter()
        .filter(|file| needed.contains(&file.cap))
        .map(|file| file.node_name());
    let nodes: Vec<_> = nodes.collect();
    (minor == gpu && !nodes.is_empty()).then_some(UnlistedMig {
        gpu_instance,
        compute_instance,
        nodes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;

    #[test]
    fn each_file_has_its_own_mode() {
        let policy = |text: &str| {
            parse(MigCap::Config, text)
                .map(|file| (file.minor, file.policy.mode, file.policy.modify))
        };
        for (text, parsed) in [
            (
                "DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n",
                Some((1, 0o400, true)),
            ),
            (
                "DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 0\n",
                Some((12, 0o444, false)),
            ),
            ("DeviceFileMinor: 3\n", Some((3, 0o400, true))),
            ("DeviceFileMode: 292\n", None),
            ("", None),
        ] {
            assert_eq!(policy(text), parsed, "{text}");
        }
    }

    #[test]
    fn a_mig_device_lacks_a_node() {
        let file = |cap, minor| CapFile {
            cap,
            minor,
            ..parse(cap, "DeviceFileMinor: 1\n").unwrap()
        };
        let (access, other) = (
            file(MigCap::GpuInstance(0, 2), 21),
            file(MigCap::GpuInstance(1, 2), 31),
        );
        let cap = MigCap::ComputeInstance(0, 2, 0);
        let nodes =
            |missing: &[&CapFile], gpu| unlisted(gpu, cap, missing).map(|mig| mig.nodes.len());
        assert_eq!(nodes(&[], 0), None, "it has both nodes");
        assert_eq!(nodes(&[&access], 0), Some(1));
        assert_eq!(nodes(&[&access, &file(cap, 22)], 0), Some(2));
        assert_eq!(nodes(&[&other], 0), None, "a node of another GPU");
        assert_eq!(nodes(&[&access], 1), None, "an instance of another GPU");
        assert_eq!(
            unlisted(0, MigCap::GpuInstance(0, 2), &[&access]),
            None,
            "no compute instance"
        );
    }

    #[test]
    fn those_that_exist_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("proc/driver/nvidia/capabilities");
        for (path, minor) in [
            ("mig/config", 1),
            ("gpu0/mig/gi2/access", 21),
            ("gpu0/mig/gi2/ci0/access", 22),
        ] {
            std::fs::create_dir_all(top.join(path).parent().unwrap()).unwrap();
            std::fs::write(
                top.join(path),
                format!("DeviceFileMinor: {minor}\nDeviceFileMode: 256\n"),
            )
            .unwrap();
        }
        std::fs::create_dir_all(top.join("gpu0/mig/gi3")).unwrap();
        let proc = Tree::open(&HostPath::new(dir.path())).unwrap();
        let all = [
            MigCap::GpuInstance(0, 2),
            MigCap::ComputeInstance(0, 2, 0),
            MigCap::GpuInstance(0, 3),
        ];
        assert_eq!(instances(&proc), all);
        let found = existing(&proc);
        let found: Vec<_> = found.iter().map(|file| (file.cap, file.minor)).collect();
        let expected = [
            (MigCap::Config, 1),
            (MigCap::GpuInstance(0, 2), 21),
            (MigCap::ComputeInstance(0, 2, 0), 22),
        ];
        assert_eq!(found, expected);
    }
}
