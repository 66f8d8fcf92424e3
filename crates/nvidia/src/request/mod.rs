//! Decides which GPUs a container requests, and whether it may: the rules for the variables, mounts and device nodes of NVIDIA's image
//! convention. The hook reads them from config.json, the NRI plugin from the engine.
//!
//! <https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html>

pub mod misspelled;
pub mod mounts;
pub mod nodes;
pub mod select;
pub mod variables;

use anyhow::{Result, bail};

use base::go;
use base::report::{Finding, failure};
use findings::catalog;

use crate::capability::{self, Capabilities, Omit};
use crate::config::{Config, NoGpu, Require};
use crate::device_id::{self, VisibleDevices, imex_channel};
use crate::edits::Wanted;
use crate::feature::{self, Feature, Features};
use crate::host;
use crate::quotes;
use crate::require::{self, Requirement};

pub use mounts::RequestMount;
pub use nodes::Node;
pub use variables::{Environment, Variable};

/// The properties of a container on which its request depends.
#[derive(Clone, Debug)]
pub struct Container<'a> {
    /// The environment of its process
    pub env: Environment<'a>,
    /// Its mounts
    pub mounts: Vec<RequestMount<'a>>,
    /// Its character device nodes; empty if the engine lists all nodes of the host, which is not a request
    pub nodes: Vec<Node<'a>>,
    /// Whether it has CAP_SYS_ADMIN in the user namespace of its engine; false if that is unknown
    pub privileged: bool,
}

/// The request of a container for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuRequest {
    /// The requested GPUs; may be none, for driver files without a GPU
    pub devices: VisibleDevices,
    /// The source of the request, for messages: a variable, or the mounts
    pub asked_by: String,
    /// The driver capabilities
    pub capabilities: Capabilities,
    /// Conditions for the driver and the GPUs
    pub requirements: Vec<Requirement>,
    /// The GPUs whose MIG devices it may configure; only for privileged containers
    pub mig_config: Option<String>,
    /// The GPUs whose MIG devices it may monitor; only for privileged containers
    pub mig_monitor: Option<String>,
    /// The IMEX channels
    pub imex_channels: Vec<String>,
    /// Devices next to the GPUs
    pub features: Features,
    /// Findings about variables that have no effect
    pub remarks: Vec<Finding>,
    /// Parts to omit; only options of commands can set this
    pub omit: Omit,
}

impl GpuRequest {
    /// Reports whether the container gets a GPU, or something else that only NVML knows. A request for driver files only, as Incus and
    /// enroot make it, needs no NVML, unless its requirements name a property of the GPUs.
    #[must_use]
    pub fn needs_nvml(&self) -> bool {
        self.devices != VisibleDevices::None
            || !self.requirements.is_empty()
            || self.mig_config.is_some()
            || self.mig_monitor.is_some()
    }

    /// Returns the names of the only devices on which the decision depends, or `None` if it depends on all devices of the host: it requests
    /// all, manages MIG devices, or config.toml limits the devices of containers.
    #[must_use]
    pub fn only_devices(&self, config: &Config) -> Option<&[String]> {
        let manages_mig = self.mig_config.is_some() || self.mig_monitor.is_some();
        match &self.devices {
            VisibleDevices::List(names) if !manages_mig && config.devices.permit_all_gpus() => {
                Some(names)
            }
            _ => None,
        }
    }

    /// Returns the parts of the driver that it needs.
    ///
    /// # Errors
    /// If a MIG variable is not "all", or an IMEX channel is invalid.
    pub fn wanted(&self) -> Result<Wanted> {
        let channels: Result<Vec<u32>> = self
            .imex_channels
            .iter()
            .map(|text| imex_channel(text))
            .collect();
        Ok(Wanted {
            capabilities: self.capabilities,
            omit: self.omit,
            gpus: self.devices != VisibleDevices::None,
            mig_config: is_all(Variable::MigConfigDevices, self.mig_config.as_deref())?,
            mig_monitor: is_all(Variable::MigMonitorDevices, self.mig_monitor.as_deref())?,
            imex_channels: channels?,
            features: self.features,
        })
    }
}

/// Returns whether a MIG variable is set. It must be "all": MIG management applies to all GPUs of the container.
fn is_all(variable: Variable, value: Option<&str>) -> Result<bool> {
    let variable = variable.name();
    match value {
        None => Ok(false),
        Some("all") => Ok(true),
        Some(value) => Err(failure(
            &catalog::BAD_REQUEST,
            format!("{variable}={value:?} is not \"all\""),
            format!("set {variable}=all"),
        )),
    }
}

/// The decision about a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It requests nothing, for this reason
    Nothing(String),
    /// Its request is denied for this reason. It starts without GPUs, as with NVIDIA's stack
    Refused(String),
    /// Its request is accepted
    Gpus(Box<GpuRequest>),
}

/// Whether a container requests GPUs: decides whether config.toml is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// No request, regardless of config.toml
    No,
    /// A request if config.toml names one of its variables as `swarm-resource`, or because of its device nodes; or only a variable with
    /// a misspelled name. An invalid config.toml does not stop the container
    Perhaps,
    /// A request
    Yes,
}

/// Decides without config.toml whether the container requests GPUs. So a container without GPUs costs little, and an invalid
/// config.toml cannot stop it.
#[must_use]
pub fn hint(container: &Container<'_>) -> Hint {
    match hint_of(container.env) {
        _ if container.mounts.iter().any(mounts::is_request) => Hint::Yes,
        Hint::No
            if nodes_may_request(container.env) && nodes::granted(&container.nodes).is_some() =>
        {
            Hint::Perhaps
        }
        hint => hint,
    }
}

/// Reports whether device nodes can be a request. Not if the variable is set: it is explicit, and CDI specs set it to `void`.
#[must_use]
pub fn nodes_may_request(env: Environment<'_>) -> bool {
    env.get(Variable::VisibleDevices).is_none()
}

/// Like [`hint`], from the environment alone.
#[must_use]
pub fn hint_of(env: Environment<'_>) -> Hint {
    let asks = match env.get(Variable::VisibleDevices) {
        Some(value) => device_id::parse(value).is_some(),
        None => is_legacy_image(env),
    };
    if asks {
        Hint::Yes
    } else if env.may_have_swarm_resource() || misspelled::is_any(env) {
        Hint::Perhaps
    } else {
        Hint::No
    }
}

/// Decides about the request with the rules of config.toml.
///
/// # Errors
/// If the request is invalid, or requires a privileged container.
pub fn decide(container: &Container<'_>, config: &Config) -> Result<Decision> {
    let from_mounts = mounts::parse(&container.mounts, config.accept_volume_mounts)?;
    let env_counts = container.privileged || config.accept_envvar_when_unprivileged;
    let by_mounts = from_mounts
        .visible()
        .map(|devices| (mounts::ORIGIN.to_owned(), devices));
    let (asked_by, devices) =
        match by_mounts.map_or_else(|| asked_by_env(container, config, env_counts), Ok) {
            Ok(asked) => asked,
            Err((decision, Rank::Explicit)) => return Ok(decision),
            Err((decision, Rank::Default)) => match nodes::granted(&container.nodes) {
                Some(nodes) => (nodes::ORIGIN.to_owned(), VisibleDevices::Nodes(nodes)),
                None => return Ok(decision),
            },
        };
    let legacy = is_legacy_image(container.env);
    let asked = container.env.get(Variable::DriverCapabilities);
    let (features, mut remarks) = features(container, from_mounts.features, env_counts);
    remarks.extend(invalid_switch(container.env));
    Ok(Decision::Gpus(Box::new(GpuRequest {
        devices,
        asked_by,
        capabilities: capability::parse(asked, legacy, config.supported_driver_capabilities)?,
        requirements: requirements(container, config, legacy)?,
        mig_config: privileged_only(container, Variable::MigConfigDevices)?,
        mig_monitor: privileged_only(container, Variable::MigMonitorDevices)?,
        imex_channels: imex_channels(container, config, from_mounts.imex, env_counts),
        features,
        remarks,
        omit: Omit::default(),
    })))
}

/// Returns the finding for a container that starts although this host cannot give it GPUs.
///
/// # Errors
/// The given error, if the container must not start.
pub fn allow_without_gpu(
    request: &GpuRequest,
    config: &Config,
    error: anyhow::Error,
) -> Result<Finding> {
    if config.no_gpu == NoGpu::Start
        && request.devices == VisibleDevices::All
        && host::has_no_gpu(config)
    {
        return Ok(Finding::new(
            &catalog::NO_GPU_HERE,
            format!(
                "{} requests all GPUs, but this host has no NVIDIA GPU",
                request.asked_by
            ),
            "to stop such containers, set no-gpu = \"error\" in the [oci-nvidia-hook] table of config.toml",
        ));
    }
    Err(error)
}

/// How explicitly a container requests nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rank {
    Explicit,
    /// No accepted source contains a request: device nodes can be one.
    Default,
}

/// Returns the request of the environment; or the decision without one, if no other source has a request.
fn asked_by_env(
    container: &Container<'_>,
    config: &Config,
    env_counts: bool,
) -> Result<(String, VisibleDevices), (Decision, Rank)> {
    let (asked_by, devices) = visible_by_env(container, config)
        .map_err(|(reason, rank)| (Decision::Nothing(reason), rank))?;
    if env_counts {
        return Ok((asked_by, devices));
    }
    let rank = if devices == VisibleDevices::None {
        Rank::Explicit
    } else {
        Rank::Default
    };
    let refused = Decision::Refused(format!(
        "{asked_by} is ignored: the container is not privileged and \
         accept-nvidia-visible-devices-envvar-when-unprivileged is false"
    ));
    Err((refused, rank))
}

/// Reports whether the image is older than NVIDIA_REQUIRE_CUDA. Such an image requests all GPUs without a variable.
fn is_legacy_image(env: Environment<'_>) -> bool {
    env.get_filled(Variable::CudaVersion).is_some()
        && env.get_filled(Variable::RequireCuda).is_none()
}

/// Returns the variable with the request and its value; or why no variable requests GPUs.
fn visible_by_env(
    container: &Container<'_>,
    config: &Config,
) -> Result<(String, VisibleDevices), (String, Rank)> {
    let visible_devices = Variable::VisibleDevices.name();
    // A swarm variable has precedence over NVIDIA_VISIBLE_DEVICES, even if it is empty.
    let (names, values): (Vec<_>, Vec<_>) = container
        .env
        .swarm_resources(&config.swarm_resource)
        .into_iter()
        .unzip();
    let (asked_by, value) = if names.is_empty() {
        let value = match container.env.get(Variable::VisibleDevices) {
            Some(value) => value.to_owned(),
            None if is_legacy_image(container.env) => {
                return Ok((Variable::CudaVersion.name().to_owned(), VisibleDevices::All));
            }
            None => return Err((format!("{visible_devices} is not set"), Rank::Default)),
        };
        (visible_devices.to_owned(), value)
    } else {
        (names.join(","), values.join(","))
    };
    match device_id::parse(&value) {
        Some(devices) => Ok((asked_by, devices)),
        None => Err((format!("{asked_by} is {value:?}"), Rank::Explicit)),
    }
}

fn privileged_only(container: &Container<'_>, variable: Variable) -> Result<Option<String>> {
    let Some(value) = container.env.get_filled(variable) else {
        return Ok(None);
    };
    if !container.privileged {
        let name = variable.name();
        return Err(failure(
            &catalog::PRIVILEGE,
            format!(
                "insufficient privileges for {name}={value:?}: the container is not privileged"
            ),
            format!(
                "start the container with --privileged and without a user namespace, or without {name}"
            ),
        ));
    }
    Ok(Some(value.to_owned()))
}

fn imex_channels(
    container: &Container<'_>,
    config: &Config,
    from_mounts: Vec<String>,
    env_counts: bool,
) -> Vec<String> {
    if config.ignore_imex_channels {
        return Vec::new();
    }
    if !from_mounts.is_empty() || !env_counts {
        return from_mounts;
    }
    // The syntax is the same as for NVIDIA_VISIBLE_DEVICES, but `all` and `none` are not channels.
    match container
        .env
        .get(Variable::ImexChannels)
        .and_then(device_id::parse)
    {
        Some(VisibleDevices::List(channels)) => channels,
        _ => Vec::new(),
    }
}

/// Returns the requested features, and findings about variables that have no effect.
fn features(
    container: &Container<'_>,
    from_mounts: Features,
    env_counts: bool,
) -> (Features, Vec<Finding>) {
    let (mut features, mut remarks) = (from_mounts, Vec::new());
    for feature in Feature::ALL {
        let name = feature.row().variable;
        match container.env.get_filled(Variable::Feature(feature)) {
            None => {}
            Some(feature::ENABLED) if env_counts => features.insert(feature),
            Some(feature::ENABLED) if features.has(feature) => {}
            Some(feature::ENABLED) => remarks.push(Finding::new(
                &catalog::REFUSED,
                format!(
                    "{name} is ignored: the container is not privileged and \
                     accept-nvidia-visible-devices-envvar-when-unprivileged is false"
                ),
                "start the container with --privileged, or have a device plugin request the devices with a mount",
            )),
            Some(value) => remarks.push(Finding::new(
                &catalog::FEATURE_VALUE,
                format!("{name}={value:?} has no effect, because the value is not {:?}", feature::ENABLED),
                format!("set {name}={}, or remove the variable", feature::ENABLED),
            )),
        }
    }
    (features, remarks)
}

/// Returns a finding if the switch for requirements has a value that Go's `strconv.ParseBool` does not accept. NVIDIA's hook ignores it,
/// and then reports a requirement that the user meant to disable.
fn invalid_switch(env: Environment<'_>) -> Option<Finding> {
    let value = env.get_filled(Variable::DisableRequire)?;
    if go::parse_bool(value).is_some() {
        return None;
    }
    let name = Variable::DisableRequire.name();
    Some(Finding::new(
        &catalog::FEATURE_VALUE,
        format!("{name}={value:?} has no effect, because the value is not \"true\" or \"false\""),
        quotes::fix(value).unwrap_or("set NVIDIA_DISABLE_REQUIRE=true, or remove the variable"),
    ))
}

/// Upper limit for the requirements of a container; images have one to five.
pub const MAX_REQUIREMENTS: usize = 32;

fn requirements(
    container: &Container<'_>,
    config: &Config,
    legacy: bool,
) -> Result<Vec<Requirement>> {
    let disabled = container
        .env
        .get(Variable::DisableRequire)
        .is_some_and(|value| go::parse_bool(value) == Some(true));
    if disabled || config.requirements() == Require::Off {
        return Ok(Vec::new());
    }
    let named = container.env.requirements();
    let mut list: Vec<_> = named
        .map(|(name, text)| Requirement {
            variable: name.to_owned(),
            text: text.to_owned(),
        })
        .collect();
    if legacy {
        let variable = Variable::CudaVersion.name();
        let version = container.env.get(Variable::CudaVersion).unwrap_or_default();
        let Some((major, minor)) = require::parse_cuda_version(version) else {
            return Err(failure(
                &catalog::BAD_REQUIREMENT,
                format!("invalid {variable}={version:?}: expected a version like 11.8 or 11.8.0"),
                "set NVIDIA_REQUIRE_CUDA or NVIDIA_DISABLE_REQUIRE=true in the container",
            ));
        };
        list.push(Requirement {
            variable: variable.to_owned(),
            text: format!("cuda>={major}.{minor}"),
        });
    }
    if list.len() > MAX_REQUIREMENTS {
        bail!(
            "the container has {} NVIDIA_REQUIRE_ variables, at most {MAX_REQUIREMENTS} are allowed",
            list.len()
        );
    }
    Ok(list)
}

#[cfg(test)]
mod tests;
