//! Reads the kernel module's files for MIG capabilities below /proc/driver/nvidia/capabilities. There is a file for each existing
//! capability. It contains the minor number, owner and mode of the device node that grants the capability.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::Path;
use std::time::SystemTime;

use base::sys::file_id::FileId;
use base::tree::Tree;
use rustix::fs::{FileType, Stat};

use crate::decimal::parse_decimal;
use crate::driver::access::Permissions;
use crate::driver::node_name::NodeName;
use crate::driver::params::{NodePolicy, field, parse_policy};
use crate::inventory::caps::{self, MIG_MINORS, MigCap};
use crate::inventory::procfs::DRIVER_PROC;
use crate::inventory::scope::Scope;
use crate::inventory::{Inventory, UnlistedMig};

/// A capability, and the node that grants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapNode {
    /// The capability
    pub cap: MigCap,
    /// The N of `/dev/nvidia-caps/nvidia-capN`
    pub minor: u32,
}

impl CapNode {
    /// Returns the name of the node below /dev.
    #[must_use]
    pub(crate) fn name(self) -> String {
        NodeName::Cap(self.minor).to_string()
    }

    /// Whether this root lacks the node.
    #[must_use]
    pub(crate) fn is_missing_below(self, dev: &Tree) -> bool {
        self.stat_below(dev).is_none() && dev.locate(&NodeName::Cap(self.minor).path()).is_err()
    }

    /// Examines the node, without following a link.
    fn stat_below(self, dev: &Tree) -> Option<Stat> {
        let path = NodeName::Cap(self.minor).path();
        let dir = dev.open_dir(path.parent()?).ok()?;
        let stat = dir.stat(path.file_name()?.to_str()?)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::CharacterDevice => Some(stat),
            _ => None,
        }
    }
}

/// The file of a capability.
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
    /// Returns the node that grants the capability.
    #[must_use]
    pub(crate) const fn node(&self) -> CapNode {
        CapNode {
            cap: self.cap,
            minor: self.minor,
        }
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

/// A GPU instance or a compute instance that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Its capability
    pub cap: MigCap,
    /// Its directory, see [`crate::inventory::procfs`]; `None` if that cannot be examined
    pub entry: Option<FileId>,
}

/// Returns all GPU instances, each before its compute instances.
#[must_use]
pub fn instances(proc: &Tree) -> Vec<Instance> {
    instances_in(proc, &Scope::All)
}

/// Returns the GPU instances of these GPUs, each before its compute instances. They are found by their directories, because the table
/// of all possible capabilities (mig-minors) has 4,000 lines.
#[must_use]
pub(crate) fn instances_in(proc: &Tree, scope: &Scope) -> Vec<Instance> {
    let top = Path::new(DRIVER_PROC).join("capabilities");
    let mut instances = Vec::new();
    match scope {
        Scope::All => {
            for name in proc.names(&top) {
                if let Some(gpu) = number(&name, "gpu") {
                    add_instances(proc, &top, gpu, &mut instances);
                }
            }
        }
        Scope::Gpus(minors) => {
            for minor in minors {
                add_instances(proc, &top, *minor, &mut instances);
            }
        }
    }
    instances
}

fn add_instances(proc: &Tree, top: &Path, gpu: u32, instances: &mut Vec<Instance>) {
    let mig = top.join(format!("gpu{gpu}")).join("mig");
    for (name, stat) in proc.entries(&mig, "gi") {
        let Some(instance) = number(&name, "gi") else {
            continue;
        };
        instances.push(Instance {
            cap: MigCap::GpuInstance(gpu, instance),
            entry: stat.as_ref().map(FileId::from),
        });
        for (name, stat) in proc.entries(&mig.join(name), "ci") {
            if let Some(compute) = number(&name, "ci") {
                instances.push(Instance {
                    cap: MigCap::ComputeInstance(gpu, instance, compute),
                    entry: stat.as_ref().map(FileId::from),
                });
            }
        }
    }
}

/// Returns the files of the capabilities that exist.
#[must_use]
pub fn existing(proc: &Tree) -> Vec<CapFile> {
    read(proc, &instances(proc))
}

fn read(proc: &Tree, instances: &[Instance]) -> Vec<CapFile> {
    let mut files = Vec::new();
    for cap in caps_of(instances) {
        if let Ok(text) = proc.read_kernel_text(&cap.proc_path()) {
            files.extend(parse(cap, &text));
        }
    }
    files
}

/// Returns the capabilities that do not belong to an instance, and those of these instances.
fn caps_of(instances: &[Instance]) -> Vec<MigCap> {
    let mut caps = vec![MigCap::Config, MigCap::Monitor];
    caps.extend(instances.iter().map(|instance| instance.cap));
    caps
}

/// Returns the nodes of the capabilities that exist with these instances. The table has their numbers, so that not each file has to be
/// read. A driver without the table has no nodes for capabilities.
#[must_use]
pub(crate) fn nodes_in_table(proc: &Tree, instances: &[Instance]) -> Vec<CapNode> {
    let text = proc.read_kernel_text(Path::new(MIG_MINORS));
    let minors = caps::minors_of(&text.unwrap_or_default(), &caps_of(instances));
    let node = |(cap, minor)| CapNode { cap, minor };
    minors.into_iter().map(node).collect()
}

/// Returns the N of a name `prefixN`.
fn number(name: &OsStr, prefix: &str) -> Option<u32> {
    parse_decimal(name.to_str()?.strip_prefix(prefix)?)
}

/// The instances immediately before NVML was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AtQuery {
    /// The instances
    pub instances: Vec<Instance>,
    /// The time of the query
    pub time: SystemTime,
}

impl Default for AtQuery {
    /// A query of a host without instances.
    fn default() -> Self {
        Self {
            instances: Vec::new(),
            time: SystemTime::UNIX_EPOCH,
        }
    }
}

impl AtQuery {
    /// Reads the instances.
    #[must_use]
    pub fn now(proc: &Tree) -> Self {
        Self {
            instances: instances(proc),
            time: SystemTime::now(),
        }
    }

    /// Whether these were the same instances during the query, and later ones can be distinguished from them.
    #[must_use]
    pub fn is_certain(&self, after: &[Instance]) -> bool {
        let is_settled = |entry: FileId| entry.is_settled(self.time);
        let mut instances = after.iter();
        self.instances == after && instances.all(|known| known.entry.is_some_and(is_settled))
    }
}

/// An instance, and who can open its node; `None` if the node is missing.
pub type InstanceNode = (Instance, Option<Permissions>);

/// Examines the nodes of these instances. NVML lists only the MIG devices whose nodes it can open.
#[must_use]
pub(crate) fn nodes(dev: &Tree, instances: &[Instance], caps: &[CapNode]) -> Vec<InstanceNode> {
    let caps: BTreeMap<_, _> = caps.iter().map(|node| (node.cap, node)).collect();
    let mut nodes = Vec::new();
    for instance in instances {
        let node = caps.get(&instance.cap);
        let stat = node.and_then(|node| node.stat_below(dev));
        nodes.push((*instance, stat.as_ref().map(Permissions::from_stat)));
    }
    nodes
}

/// Returns the nodes that are missing. Some of them were examined already.
#[must_use]
pub(crate) fn missing(dev: &Tree, caps: &[CapNode], examined: &[InstanceNode]) -> Vec<CapNode> {
    let has_node = |(instance, access): &InstanceNode| access.map(|_| instance.cap);
    let existing: BTreeSet<_> = examined.iter().filter_map(has_node).collect();
    let mut missing = caps.to_vec();
    missing.retain(|node| !existing.contains(&node.cap) && node.is_missing_below(dev));
    missing
}

/// Adds the MIG devices without device nodes to each GPU in MIG mode.
///
/// NVML lists a MIG device only if it can open both of its nodes, but the kernel module always lists its capabilities. Therefore a GPU
/// may have MIG devices even if NVML's answer contains none.
///
/// `missing` are the missing ones among the nodes of all capabilities.
pub fn note_missing_nodes(inventory: &mut Inventory, caps: &[CapNode], missing: &[CapNode]) {
    for gpu in &mut inventory.gpus {
        if gpu.mig_enabled {
            let unlisted = caps
                .iter()
                .map(|node| unlisted(gpu.minor, node.cap, missing));
            gpu.unlisted_mig = unlisted.flatten().collect();
        }
    }
}

/// Returns the MIG device of this capability of the GPU, if one of its two nodes is missing.
fn unlisted(gpu: u32, cap: MigCap, missing: &[CapNode]) -> Option<UnlistedMig> {
    let MigCap::ComputeInstance(minor, gpu_instance, compute_instance) = cap else {
        return None;
    };
    let needed = [MigCap::GpuInstance(minor, gpu_instance), cap];
    let mut nodes = Vec::new();
    for node in missing {
        if needed.contains(&node.cap) {
            nodes.push(node.name());
        }
    }
    if minor != gpu || nodes.is_empty() {
        return None;
    }
    Some(UnlistedMig {
        gpu_instance,
        compute_instance,
        nodes,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base::sys::file_id::{FileTime, Inode};

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
        let file = |cap, minor| CapNode { cap, minor };
        let (access, other) = (
            file(MigCap::GpuInstance(0, 2), 21),
            file(MigCap::GpuInstance(1, 2), 31),
        );
        let cap = MigCap::ComputeInstance(0, 2, 0);
        let nodes =
            |missing: &[CapNode], gpu| unlisted(gpu, cap, missing).map(|mig| mig.nodes.len());
        assert_eq!(nodes(&[], 0), None, "it has both nodes");
        assert_eq!(nodes(&[access], 0), Some(1));
        assert_eq!(nodes(&[access, file(cap, 22)], 0), Some(2));
        assert_eq!(nodes(&[other], 0), None, "a node of another GPU");
        assert_eq!(nodes(&[access], 1), None, "an instance of another GPU");
        assert_eq!(
            unlisted(0, MigCap::GpuInstance(0, 2), &[access]),
            None,
            "no compute instance"
        );
    }

    #[test]
    fn instances_that_changed_during_the_query_are_uncertain() {
        let instance = |inode, changed| Instance {
            cap: MigCap::GpuInstance(0, 1),
            entry: Some(FileId {
                inode: Inode {
                    device: 1,
                    number: inode,
                },
                changed: FileTime {
                    seconds: changed,
                    nanoseconds: 999_999_999,
                },
                ..FileId::default()
            }),
        };
        let at = |seconds, instances: &[Instance]| AtQuery {
            instances: instances.to_vec(),
            time: SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
        };
        let (old, other) = (instance(1, 100), instance(2, 100));
        assert!(at(102, &[old]).is_certain(&[old]));
        assert!(at(0, &[]).is_certain(&[]));
        assert!(!at(101, &[old]).is_certain(&[old]), "younger than a second");
        assert!(!at(50, &[old]).is_certain(&[old]), "the clock was set");
        assert!(!at(102, &[old]).is_certain(&[other]), "created again");
        assert!(!at(102, &[old]).is_certain(&[]), "destroyed");
        assert!(!at(102, &[]).is_certain(&[old]), "created");
        let unknown = Instance { entry: None, ..old };
        assert!(!at(102, &[unknown]).is_certain(&[unknown]));
    }

    #[test]
    fn an_instance_that_was_created_again_is_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir
            .path()
            .join("proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0");
        let proc = Tree::open(&HostPath::new(dir.path())).unwrap();
        let mut seen = Vec::new();
        for _ in 0..3 {
            std::fs::create_dir_all(&path).unwrap();
            let found = instances(&proc);
            assert_eq!(found, instances(&proc), "nothing has changed");
            assert_eq!(found.len(), 2);
            assert!(found.iter().all(|instance| instance.entry.is_some()));
            assert!(!seen.contains(&found));
            seen.push(found);
            std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
            // The clock of a file system has ticks of up to 10 ms.
            std::thread::sleep(std::time::Duration::from_millis(30));
        }
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
        let caps: Vec<_> = instances(&proc).iter().map(|found| found.cap).collect();
        assert_eq!(caps, all);
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
