//! Refuses containers that have a GPU which `[devices]` in config.toml denies. The engine has it from a CDI spec that is out of date or
//! that another program wrote, or from `--device`: the hook entry of the spec is the last program that can stop the container.

use anyhow::Result;

use base::paths::HostPath;
use base::report::{Finding, failure};
use base::sys::ns;
use findings::catalog;
use nvidia_host::config::{self, Config};
use nvidia_host::device_id::Nodes;
use nvidia_host::driver::node_name::NodeName;
use nvidia_host::feature::Features;
use nvidia_host::host::{self, Host, node_limits};
use nvidia_host::inventory::node_limits::{Judgment, NodeLimits};
use nvidia_host::request::select;

use crate::oci::device_rules::allow_all;
use crate::oci::{
    SpecView,
    gpu_nodes::{self, gpu_nodes},
};
use crate::record::call::Call;

/// Checks the features and the GPU nodes of a container against the limits of the configuration.
///
/// # Errors
/// If the container has a denied GPU, the limits or the GPU cannot be read, or a directory that came with a feature contains sockets.
pub(super) fn check(spec: &SpecView, config: Config, features: Features) -> Result<()> {
    select::refuse_denied(features, &config)?;
    host::check_directories(&config, features)?;
    if !config.devices.permit_all_gpus() && gpu_nodes(spec).has(NodeName::Dxg) {
        let refused = Host::inspect(&config, &|| ())?.refused_limits();
        if let Some(Finding { kind, what, fix }) = refused {
            return Err(failure(kind, what, fix));
        }
    }
    let Some(granted) = Granted::read(spec, config)? else {
        return Ok(());
    };
    match granted.limits.judge(&granted.nodes) {
        Judgment::Unknown(_) => refuse_unless_permitted(granted.judge_with_inventory()?),
        known => refuse_unless_permitted(known),
    }
}

/// Reads this configuration, or the default one. As in other modes, an invalid file stops containers with GPUs, because its limits are
/// unknown. `root` replaces the driver root of the file.
///
/// # Errors
/// If the file is invalid.
pub(super) fn configuration(file: Option<&HostPath>, root: Option<&HostPath>) -> Result<Config> {
    let (mut config, _) = config::read(file.map(HostPath::as_path))?;
    if let Some(root) = root {
        config.driver_root = root.clone();
    }
    Ok(config)
}

/// Does the same for an entry of NVIDIA's specs, which runs in the container's namespaces and device cgroup, and in a static program:
/// NVML does not work there. A GPU that only NVML can compare with the limits is permitted, with a note.
///
/// # Errors
/// If the container has a denied GPU, or the limits cannot be read.
pub(super) fn check_inside(spec: &SpecView, call: &mut Call) -> Result<()> {
    let (config, _) = config::read(None)?;
    let Some(granted) = Granted::read(spec, config)? else {
        return Ok(());
    };
    match granted.limits.judge(&granted.nodes) {
        Judgment::Unknown(_) => call.note(
            "NVML is necessary to compare a GPU of the container with [devices] in config.toml",
        ),
        known => refuse_unless_permitted(known)?,
    }
    Ok(())
}

/// The GPUs of a container, and the limits for them.
struct Granted {
    config: Config,
    limits: NodeLimits,
    nodes: Nodes,
}

impl Granted {
    /// Returns `None` if there are no limits, or the nodes do not show which GPUs were given to the container.
    fn read(spec: &SpecView, config: Config) -> Result<Option<Self>> {
        let limits = node_limits(&config)?;
        if limits.is_empty() || lists_all_nodes(spec)? {
            return Ok(None);
        }
        Ok(gpu_nodes::granted(spec).map(|nodes| Self {
            config,
            limits,
            nodes,
        }))
    }

    fn judge_with_inventory(self) -> Result<Judgment> {
        let inventory = Host::inspect(&self.config, &|| ())?.inventory;
        Ok(self.limits.with_inventory(inventory).judge(&self.nodes))
    }
}

fn refuse_unless_permitted(judgment: Judgment) -> Result<()> {
    match judgment {
        Judgment::Permitted => Ok(()),
        Judgment::Denied(minor) => Err(failure(
            &catalog::DENIED,
            format!(
                "the engine gives the container \"/dev/nvidia{minor}\", and [devices] in config.toml denies this GPU"
            ),
            "request another GPU, or change [devices] in config.toml; \"oci-nvidia-hook cdi check\" lists the CDI devices that \
             containers may have",
        )),
        Judgment::Unknown(minor) => Err(failure(
            &catalog::UNKNOWN_DEVICE,
            format!(
                "the engine gives the container \"/dev/nvidia{minor}\": this host has no such GPU, so [devices] in \
                 config.toml cannot permit it"
            ),
            "run \"oci-nvidia-hook cdi refresh\"",
        )),
    }
}

/// Reports whether the engine lists all nodes of the host for a privileged container, so that they show nothing about the CDI spec. The
/// container can open all GPUs anyway. A rootless engine, which has no device rules, mounts the nodes that its user can open.
pub(super) fn lists_all_nodes(spec: &SpecView) -> Result<bool> {
    Ok(spec.has_all_nodes && (allow_all(&spec.device_rules) || ns::in_user_namespace()?))
}
