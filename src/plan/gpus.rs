//! Turns what a container gets into one of two forms: steps in a waiting container, or additions to the config.json of a container
//! that does not exist yet.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;

use base::paths::{ContainerPath, HostPath};
use base::report::Finding;
use cdi_spec::spec::ContainerEdits;
use findings::catalog;
use nvidia_host::capability::{Capability, DRIVER_CAPABILITIES};
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::cdi::lower::{SpecContext, lower};
use nvidia_host::config::{Config, NodeAccess};
use nvidia_host::driver::compat;
use nvidia_host::edits::Edits;
use nvidia_host::edits::placement::RootfsFacts;
use nvidia_host::host::Host;
use serde::{Deserialize, Serialize};

use super::Container;
use crate::oci::SpecView;
use crate::oci::device_rules::{DeviceRule, already_allowed};
use crate::plan::access;
use crate::plan::additions::{Additions, OciFacts, gid_inside};
use crate::plan::process::{NodePermissions, Process};
use crate::plan::request::GpuRequest;
use crate::plan::{step::Step, steps};

/// What a container gets from this host, with the request and configuration from which it follows.
#[derive(Debug)]
pub(crate) struct Gpus {
    request: GpuRequest,
    config: Config,
    host: Host,
    edits: Edits,
}

/// The properties of an image on which the steps depend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Image {
    pub facts: RootfsFacts,
    /// The names of its CUDA compatibility libraries, if they are newer than the host's
    pub compat: BTreeSet<OsString>,
}

/// The changes of a container that waits for the hook.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Live {
    /// Steps in the order of their execution
    pub steps: Vec<Step>,
    /// Device rules to add to the cgroup. Rules of config.json are left out: unlike the hook's, they remain when the runtime
    /// applies its rules again (`podman update`, `systemctl daemon-reload`)
    pub rules: Vec<DeviceRule>,
    pub findings: Vec<Finding>,
}

impl Gpus {
    /// Combines the request with what [`super::decide`] returned for it.
    pub(crate) const fn new(request: GpuRequest, config: Config, host: Host, edits: Edits) -> Self {
        Self {
            request,
            config,
            host,
            edits,
        }
    }

    /// Returns the configuration.
    pub(crate) const fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the image directory of CUDA compatibility libraries, and the versions of the host's driver and of its CUDA, on which
    /// their use depends; `None` if they are not used.
    pub(crate) fn compat_libraries(&self) -> Option<(ContainerPath, &str, &str)> {
        if !self.uses_compat_libraries() {
            return None;
        }
        let inventory = &self.host.inventory;
        Some((
            ContainerPath::new(compat::DIR)?,
            &inventory.driver_version,
            &inventory.cuda_version,
        ))
    }

    fn uses_compat_libraries(&self) -> bool {
        self.config.cuda_compat
            && self.host.driver_kind().has_cuda_compat()
            && self.request.capabilities.has(Capability::Compute)
    }

    /// Returns the changes of the hook in the container.
    pub(crate) fn steps(&self, container: &Container<'_>, image: &Image) -> Live {
        let mut steps = steps::lower(&self.edits, image.facts);
        if self.request.omit.node_mounts {
            steps.retain(|step| !matches!(step, Step::MountNode { .. }));
        }
        for step in &mut steps {
            if let Step::MaskProc(mask) = step {
                *mask = std::mem::take(mask).with_gpus_together(&self.host.gpu_dirs());
            }
        }
        if let Some((dir, ..)) = self.compat_libraries() {
            steps::prefer(&mut steps, &dir, |soname| image.compat.contains(soname));
        }
        let mut findings = Vec::new();
        findings.extend(image.facts.finding());
        findings.extend(newer_libcuda(image));
        findings.extend(root_beside_limits(&steps, &container.process));
        findings.extend(self.give_access(&mut steps, container));
        let mut rules = Vec::new();
        for node in &self.edits.nodes {
            let (major, minor) = (node.major, node.minor);
            let rule = DeviceRule { major, minor };
            if !already_allowed(&container.spec.device_rules, rule) {
                rules.push(rule);
            }
        }
        Live {
            steps,
            rules,
            findings,
        }
    }

    /// Changes the steps to create device nodes instead of mounting the host's, if processes of the container could not open those.
    /// Returns a finding if nodes remain that its first process cannot open: a process in a user namespace may not create device nodes,
    /// and without a device cgroup nothing would limit the use of such nodes.
    fn give_access(&self, steps: &mut [Step], container: &Container<'_>) -> Option<Finding> {
        let (process, spec) = (&container.process, container.spec);
        let may_create = self.config.edit_cgroups && !process.is_rootless();
        if may_create && self.config.device_node_access == NodeAccess::Container {
            access::create_own(steps, process, spec);
        }
        process.finding(&access::of_others(steps, spec))
    }

    /// Returns the additions to config.json. Files are placed in the library directory of the image or, if it is
    /// unknown, in the host's, as with CDI. The hook entry starts `program`.
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
            additional_gids: true,
            node_access: self.config.device_node_access,
            image,
        };
        let mut entry = RootfsEdits::of_config(&self.config);
        if self.uses_compat_libraries() {
            let inventory = &self.host.inventory;
            entry.cuda_compat = Some((
                inventory.driver_version.clone(),
                inventory.cuda_version.clone(),
            ));
        }
        let lowered = lower(&self.edits, &context, entry).sort();
        let mut findings = Vec::new();
        findings.extend(image.and_then(RootfsFacts::finding));
        findings.extend(no_access(&self.edits, &lowered, spec, facts));
        (Additions::new(&lowered, spec, facts), findings)
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

/// Returns a finding if programs in the container use the libcuda of the image.
pub(crate) fn newer_libcuda(image: &Image) -> Option<Finding> {
    if image.compat.is_empty() {
        return None;
    }
    Some(Finding::new(
        &catalog::IMAGE_CUDA,
        format!(
            "the CUDA compatibility libraries of the image in \"/{}\" are used",
            compat::DIR.trim_matches('/')
        ),
        "to use the host's, set cuda-compat-mode = \"disabled\" in config.toml",
    ))
}

/// Returns a finding if the container gets an MPS daemon whose limits do not bind it: the daemon accepts commands from root of the host.
pub(crate) fn root_beside_limits(steps: &[Step], process: &Process) -> Option<Finding> {
    let has_daemon = steps.iter().any(Step::mounts_mps);
    if !has_daemon || !process.is_root() {
        return None;
    }
    Some(Finding::new(
        &catalog::MPS_ROOT,
        "the container's process is root without a user namespace, and can change the limits of its MPS daemon",
        "start the container as another user, or with a user namespace (podman run --userns=auto)",
    ))
}

/// Returns a finding if the process cannot open the device nodes. In a user namespace, the runtime cannot create nodes and mounts
/// the host's. Otherwise, it creates nodes that the process can open, unless config.json already lists others.
fn no_access(
    edits: &Edits,
    lowered: &ContainerEdits,
    spec: &SpecView,
    facts: OciFacts,
) -> Option<Finding> {
    let mounts_nodes = facts.in_user_namespace || spec.user_namespace;
    let mut process = Process::from_spec(spec, facts.in_user_namespace);
    for gid in &lowered.additional_gids {
        if gid_inside(*gid, spec, facts).is_some() {
            process.add_group(*gid);
        }
    }
    let mut nodes = Vec::new();
    for node in &edits.nodes {
        if mounts_nodes || access::listed(node, spec).is_some() {
            nodes.push(NodePermissions {
                path: &node.source,
                permissions: access::permissions(node, spec),
            });
        }
    }
    process.finding(&nodes)
}
