//! Edits → the container edits of a CDI spec. Pure.
//!
//! A spec knows no container, so libraries go where the host has them, and the linker cache leads programs there.

use std::collections::BTreeMap;
use std::path::Path;

use super::live::{self, RootfsFacts, Step};
use super::rootfs::RootfsEdits;
use crate::cdi::spec::{ContainerEdits, DeviceNode, Hook, Mount};
use crate::edits::{self, Edits, Placement};
use crate::paths::{ContainerPath, HostPath};

/// What lowering has to know of the host.
#[derive(Clone, Debug)]
pub struct HostFacts {
    /// The directory that is `/` for the driver, its real path
    pub driver_root: HostPath,
    /// The host's /proc/driver/nvidia
    pub proc_dir: Option<HostPath>,
    /// This program
    pub program: HostPath,
    /// What device nodes are like
    pub nodes: BTreeMap<HostPath, NodeFacts>,
    /// Whether containers' processes may be put into the groups that own nodes
    pub additional_gids: bool,
}

/// What a device node on the host is like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Whether it is a character device
    pub is_char: bool,
    /// Permission bits
    pub mode: u32,
    /// Owner
    pub uid: u32,
    /// Group
    pub gid: u32,
}

impl NodeFacts {
    /// The group that a process must be in to use it, if not everybody may.
    #[must_use]
    pub const fn additional_gid(self) -> Option<u32> {
        let for_everybody = self.mode & 0o006 == 0o006;
        if self.gid != 0 && self.is_char && !for_everybody { Some(self.gid) } else { None }
    }
}

/// The environment of hook entries. Never empty: runc would give the hook the container's, LD_PRELOAD with it
/// (CVE-2025-23266).
const HOOK_ENV: &str = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";
/// As nvidia-ctk writes them; with these runc does not pass on mounts from or to the host.
const FILE_OPTIONS: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
const IPC_OPTIONS: [&str; 5] = ["nosuid", "nodev", "rbind", "rprivate", "noexec"];

/// The container edits; `stamp` goes into the hook's arguments.
#[must_use]
pub fn lower(edits: &Edits, host: &HostFacts, stamp: Option<&str>) -> ContainerEdits {
    let mut lowered = ContainerEdits::default();
    let files = edits.files.iter().filter_map(|file| {
        let dir = directory(file, host)?;
        mount(&file.source, &dir.join(&file.name)?, &FILE_OPTIONS)
    });
    lowered.mounts.extend(files);
    lowered.mounts.extend(edits.ipc.iter().filter_map(|ipc| mount(&ipc.source, &ipc.path, &IPC_OPTIONS)));
    for node in &edits.nodes {
        let facts = host.nodes.get(&node.source).copied().unwrap_or_default();
        lowered.device_nodes.extend(device_node(node, facts));
        lowered.additional_gids.extend(facts.additional_gid().filter(|_| host.additional_gids));
    }
    let rest = RootfsEdits { stamp: stamp.map(str::to_owned), ..rootfs_edits(edits, host) };
    lowered.hooks.extend(hook(&rest, host));
    lowered
}

/// What the engine leaves to do.
#[must_use]
pub fn rootfs_edits(edits: &Edits, host: &HostFacts) -> RootfsEdits {
    let mut rest = RootfsEdits { egl_devices: edits.egl_devices, ..RootfsEdits::default() };
    // The same files, each at the directory that it has here, give the same links as with any other.
    let mut placed = Edits { links: edits.links.clone(), ..Edits::default() };
    for file in &edits.files {
        let Some(dir) = directory(file, host) else { continue };
        if let Placement::Library(arch) = file.placement {
            let paths = file.sonames.iter().filter_map(|soname| dir.join(soname));
            rest.libraries.extend(paths.map(|path| (arch, path)));
        }
        placed.files.push(edits::HostFile { placement: Placement::At(dir), ..file.clone() });
    }
    for step in live::lower(&placed, RootfsFacts::default()) {
        if let Step::Link { link, text, .. } = step {
            rest.links.insert(link, text.into());
        }
    }
    if let Some(mask) = &edits.proc_mask {
        rest.mask = host.proc_dir.clone();
        rest.shown.extend(mask.mounts.iter().cloned());
    }
    rest
}

/// The hook entry that does it; none if nothing is left.
#[must_use]
pub fn hook(rest: &RootfsEdits, host: &HostFacts) -> Option<Hook> {
    Some(Hook {
        hook_name: "createContainer".to_owned(),
        path: host.program.as_path().to_str()?.to_owned(),
        args: rest.to_args()?,
        env: vec![HOOK_ENV.to_owned()],
        timeout: None,
    })
}

fn directory(file: &edits::HostFile, host: &HostFacts) -> Option<ContainerPath> {
    match &file.placement {
        Placement::Library(_) | Placement::LibraryBelow(..) => {
            let below = file.source.as_path().strip_prefix(host.driver_root.as_path()).ok()?;
            ContainerPath::new(below.parent()?)
        }
        Placement::Binary => ContainerPath::new("usr/bin"),
        Placement::At(dir) => Some(dir.clone()),
    }
}

fn mount(source: &HostPath, target: &ContainerPath, options: &[&str]) -> Option<Mount> {
    Some(Mount {
        host_path: source.as_path().to_str()?.to_owned(),
        container_path: target.absolute().to_str()?.to_owned(),
        options: options.iter().map(|option| (*option).to_owned()).collect(),
        kind: None,
    })
}

/// A device node. Its type is not said: then the engine looks whether the host still has it. What of it is root's is
/// not said either: then the container's user owns the container's node, and may use it whatever groups it is in.
#[must_use]
pub fn device_node(node: &edits::DeviceNode, facts: NodeFacts) -> Option<DeviceNode> {
    let path = node.path.absolute();
    let not_zero = |number: u32| Some(number).filter(|number| *number != 0);
    Some(DeviceNode {
        path: path.to_str()?.to_owned(),
        host_path: differs(&path, node.source.as_path())
            .then(|| node.source.as_path().to_str())
            .flatten()
            .map(str::to_owned),
        kind: None,
        major: Some(node.major.into()),
        minor: Some(node.minor.into()),
        file_mode: not_zero(facts.mode),
        permissions: Some("rw".to_owned()),
        uid: not_zero(facts.uid),
        gid: not_zero(facts.gid),
    })
}

fn differs(a: &Path, b: &Path) -> bool {
    a != b
}
