//! What a container gets of a host, in the two forms in which it can be given: steps that are taken in a container that waits,
//! and additions to the config.json of one that does not exist yet.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;

use base::paths::{ContainerPath, HostPath};
use base::report::{Finding, catalog};
use cdi_spec::spec::ContainerEdits;
use nvidia_host::capability::{Capability, DRIVER_CAPABILITIES};
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::cdi::lower::{NodeFacts, SpecContext, lower};
use nvidia_host::config::Config;
use nvidia_host::driver::compat;
use nvidia_host::edits::placement::RootfsFacts;
use nvidia_host::edits::{DeviceNode, Edits};
use nvidia_host::host::Host;

use super::Container;
use crate::lower::access::{self, Process};
use crate::lower::live::{self, Step};
use crate::lower::oci::{Additions, OciFacts, gid_inside};
use crate::oci::SpecView;
use crate::oci::device_rules::{DeviceRule, already_allowed};
use crate::request::GpuRequest;

/// What a container gets of this host, and what that follows from.
#[derive(Debug)]
pub(crate) struct Gpus {
    pub(super) request: GpuRequest,
    pub(super) config: Config,
    pub(super) host: Host,
    pub(super) edits: Edits,
}

/// What has to be known of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Image {
    pub facts: RootfsFacts,
    /// The names of its CUDA compatibility libraries, if they are newer than the host's
    pub compat: BTreeSet<OsString>,
}

/// What is done in a container that waits at a hook.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Live {
    /// In this order
    pub steps: Vec<Step>,
    /// What its device cgroup must allow, and config.json does not: what the runtime allowed survives when it applies its
    /// rules again
    pub rules: Vec<DeviceRule>,
    pub findings: Vec<Finding>,
}

impl Gpus {
    /// config.toml, with which it was decided.
    pub(crate) const fn config(&self) -> &Config {
        &self.config
    }

    /// Where an image may have CUDA compatibility libraries, if those are to be used, with the versions of the host's driver and
    /// of its CUDA that decide about it.
    pub(crate) fn compat_libraries(&self) -> Option<(ContainerPath, &str, &str)> {
        if !self.uses_compat_libraries() {
            return None;
        }
        let inventory = &self.host.inventory;
        Some((ContainerPath::new(compat::DIR)?, &inventory.driver_version, &inventory.cuda_version))
    }

    fn uses_compat_libraries(&self) -> bool {
        self.config.cuda_compat && self.request.capabilities.has(Capability::Compute)
    }

    /// What the hook does in the container.
    pub(crate) fn steps(&self, container: &Container<'_>, image: &Image) -> Live {
        let mut steps = match self.request.omit.node_mounts {
            true => live::lower(&Edits { nodes: Vec::new(), ..self.edits.clone() }, image.facts),
            false => live::lower(&self.edits, image.facts),
        };
        if let Some((dir, ..)) = self.compat_libraries() {
            live::prefer(&mut steps, &dir, |soname| image.compat.contains(soname));
        }
        let findings = [image.facts.finding(), newer_libcuda(image), self.give_access(&mut steps, container)];
        let rules = self.edits.nodes.iter().map(|node| DeviceRule { major: node.major, minor: node.minor });
        let rules = rules.filter(|rule| !already_allowed(container.device_rules, *rule)).collect();
        Live { steps, rules, findings: findings.into_iter().flatten().collect() }
    }

    /// Has device nodes created that the container's process could not open as they are on the host; what there is to say
    /// where that cannot be done: a user namespace of ours may not create any, and without cgroups nothing else would limit
    /// their use.
    fn give_access(&self, steps: &mut [Step], container: &Container<'_>) -> Option<Finding> {
        let mut nodes = NodeFacts::of_nodes(std::iter::once(&self.edits));
        // The runtime creates these, for this container.
        let is_given = |node: &&DeviceNode| container.devices.iter().any(|device| device.path == node.path.absolute());
        for node in self.edits.nodes.iter().filter(is_given) {
            nodes.remove(&node.source);
        }
        let process = &container.process;
        if self.config.edit_cgroups && !process.is_rootless() {
            access::create_own(steps, process, &nodes);
        }
        process.finding(access::inaccessible(steps, process, &nodes))
    }

    /// What precreate adds to config.json. Files go where `image` looks; if that is not known, where the host has them, as with
    /// CDI. `program` is what its hook entry starts.
    pub(crate) fn additions(
        &self,
        spec: &SpecView,
        image: Option<RootfsFacts>,
        program: HostPath,
        facts: OciFacts,
    ) -> (Additions, Vec<Finding>) {
        let context = SpecContext {
            driver_root: self.host.driver().path(),
            proc_dir: self.host.proc_dir(),
            program,
            nodes: NodeFacts::of_nodes(std::iter::once(&self.edits)),
            additional_gids: true,
            image,
        };
        let inventory = &self.host.inventory;
        let versions = || (inventory.driver_version.clone(), inventory.cuda_version.clone());
        let entry = RootfsEdits { cuda_compat: self.uses_compat_libraries().then(versions), ..RootfsEdits::default() };
        let lowered = lower(&self.edits, &context, entry).sort();
        let additions = Additions::new(&lowered, spec, facts);
        let findings = [image.and_then(RootfsFacts::finding), no_access(&context, &lowered, spec, facts)];
        (additions, findings.into_iter().flatten().collect())
    }
}

impl fmt::Display for Gpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} files and {} device nodes of driver {} for {DRIVER_CAPABILITIES}={}",
            self.edits.files.len(),
            self.edits.nodes.len(),
            self.host.inventory.driver_version,
            self.request.capabilities
        )
    }
}

/// Programs in the container use the image's libcuda.
pub(crate) fn newer_libcuda(image: &Image) -> Option<Finding> {
    if image.compat.is_empty() {
        return None;
    }
    Some(Finding::of(
        &catalog::IMAGE_CUDA,
        format!("the CUDA compatibility libraries of the image in \"/{}\" are used", compat::DIR.trim_matches('/')),
        "to use the host's, set cuda-compat-mode = \"disabled\" in config.toml",
    ))
}

/// Where the runtime cannot create nodes, it mounts the host's, and the process must be able to open those.
fn no_access(context: &SpecContext, lowered: &ContainerEdits, spec: &SpecView, facts: OciFacts) -> Option<Finding> {
    if !facts.in_user_namespace && !spec.user_namespace {
        return None;
    }
    let groups = lowered.additional_gids.iter().copied().filter(|gid| gid_inside(*gid, spec, facts).is_some());
    let process = Process::from_spec(spec, facts.in_user_namespace).with_groups(groups);
    let shut = context.nodes.iter().filter(|(_, node)| !process.may_open(**node));
    process.finding(shut.map(|(path, node)| (path, *node)))
}
