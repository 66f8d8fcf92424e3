//! Reads a container's request for GPUs from config.json: the variables and mounts of NVIDIA's image convention.
//!
//! <https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html>

pub(crate) mod asked;
pub(crate) mod given;
pub(crate) mod mounts;
pub(crate) mod nodes;
pub(crate) mod others;

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use base::report::{catalog, failure};
use nvidia_host::capability::{self, Capabilities, DRIVER_CAPABILITIES, Omit};
use nvidia_host::config::{Config, Require, SWARM_PREFIX};
use nvidia_host::device_id::{self, VISIBLE_DEVICES, VisibleDevices, imex_channel};
use nvidia_host::edits::Wanted;
use nvidia_host::require::{self, Requirement};

use crate::oci::SpecView;

pub(crate) const MIG_CONFIG_DEVICES: &str = "NVIDIA_MIG_CONFIG_DEVICES";
pub(crate) const MIG_MONITOR_DEVICES: &str = "NVIDIA_MIG_MONITOR_DEVICES";
const IMEX_CHANNELS: &str = "NVIDIA_IMEX_CHANNELS";
const CUDA_VERSION: &str = "CUDA_VERSION";

/// The request of a container for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuRequest {
    /// The requested GPUs; may be none, for driver files without a GPU
    pub devices: VisibleDevices,
    /// The source of the request, for messages: a variable, or the mounts
    pub asked_by: String,
    pub capabilities: Capabilities,
    /// Conditions for the driver and the GPUs
    pub requirements: Vec<Requirement>,
    /// The GPUs whose MIG devices it may configure; only for privileged containers
    pub mig_config: Option<String>,
    /// The GPUs whose MIG devices it may monitor; only for privileged containers
    pub mig_monitor: Option<String>,
    pub imex_channels: Vec<String>,
    /// Parts to omit; only options of commands can set this
    pub omit: Omit,
}

impl GpuRequest {
    /// Returns the parts of the driver that it needs.
    ///
    /// # Errors
    /// If a MIG variable is not "all", or an IMEX channel is invalid.
    pub fn wanted(&self) -> Result<Wanted> {
        let channels: Result<Vec<u32>> = self.imex_channels.iter().map(|text| imex_channel(text)).collect();
        Ok(Wanted {
            capabilities: self.capabilities,
            omit: self.omit,
            gpus: self.devices != VisibleDevices::None,
            mig_config: is_all(MIG_CONFIG_DEVICES, self.mig_config.as_deref())?,
            mig_monitor: is_all(MIG_MONITOR_DEVICES, self.mig_monitor.as_deref())?,
            imex_channels: channels?,
        })
    }
}

/// Returns whether a MIG variable is set. It must be "all": MIG management applies to all GPUs of the container.
fn is_all(variable: &str, value: Option<&str>) -> Result<bool> {
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

/// Whether config.json contains a request: decides whether config.toml is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// No request, regardless of config.toml
    No,
    /// A request if config.toml names one of its variables as `swarm-resource`, or because of its device nodes. An invalid
    /// config.toml does not stop the container
    Perhaps,
    Yes,
}

/// Decides from config.json alone whether the container requests GPUs. So a container without GPUs costs little, and an invalid
/// config.toml cannot stop it.
pub fn hint(spec: &SpecView) -> Hint {
    match hint_of(&spec.env) {
        _ if spec.mounts.iter().any(mounts::is_request) => Hint::Yes,
        Hint::No if nodes_may_request(spec) && nodes::granted(&spec.devices).is_some() => Hint::Perhaps,
        hint => hint,
    }
}

/// Reports whether device nodes can be a request. Not if the variable is set: it is explicit, and CDI specs set it to `void`.
/// And not in a privileged container, whose config.json lists all nodes of the host.
fn nodes_may_request(spec: &SpecView) -> bool {
    !spec.privileged && !spec.env.contains_key(VISIBLE_DEVICES)
}

fn hint_of(env: &BTreeMap<String, String>) -> Hint {
    let asks = match env.get(VISIBLE_DEVICES) {
        Some(value) => device_id::parse(value).is_some(),
        None => is_legacy_image(env),
    };
    if asks {
        Hint::Yes
    } else if env.keys().any(|name| name.starts_with(SWARM_PREFIX)) {
        Hint::Perhaps
    } else {
        Hint::No
    }
}

/// Reports from environment, privilege, and the JSON text of `mounts` and `linux` whether the container can contain a request.
/// Never false if [`hint`] is not [`Hint::No`].
pub fn may_ask(spec: &SpecView, mounts: &str, linux: &str) -> bool {
    hint_of(&spec.env) != Hint::No
        || mounts::may_request(mounts)
        || (nodes_may_request(spec) && nodes::may_be_granted(linux))
}

/// Decides about the request with the rules of config.toml.
///
/// # Errors
/// If the request is invalid, or requires a privileged container.
pub fn from_spec(spec: &SpecView, config: &Config) -> Result<Decision> {
    let from_mounts = mounts::parse(&spec.mounts, config.accept_volume_mounts)?;
    let env_counts = spec.privileged || config.accept_envvar_when_unprivileged;
    let by_mounts = from_mounts.visible().map(|devices| (mounts::ORIGIN.to_owned(), devices));
    let (asked_by, devices) = match by_mounts.map_or_else(|| asked_by_env(spec, config, env_counts), Ok) {
        Ok(asked) => asked,
        Err((decision, Rank::Explicit)) => return Ok(decision),
        Err((decision, Rank::Default)) => match nodes::granted(&spec.devices).filter(|_| !spec.privileged) {
            Some(nodes) => (nodes::ORIGIN.to_owned(), VisibleDevices::Nodes(nodes)),
            None => return Ok(decision),
        },
    };
    let legacy = is_legacy_image(&spec.env);
    let asked = spec.env.get(DRIVER_CAPABILITIES).map(String::as_str);
    Ok(Decision::Gpus(Box::new(GpuRequest {
        devices,
        asked_by,
        capabilities: capability::parse(asked, legacy, config.supported_driver_capabilities)?,
        requirements: requirements(spec, config, legacy)?,
        mig_config: privileged_only(spec, MIG_CONFIG_DEVICES)?,
        mig_monitor: privileged_only(spec, MIG_MONITOR_DEVICES)?,
        imex_channels: imex_channels(spec, config, from_mounts.imex, env_counts),
        omit: Omit::default(),
    })))
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
    spec: &SpecView,
    config: &Config,
    env_counts: bool,
) -> Result<(String, VisibleDevices), (Decision, Rank)> {
    let (asked_by, devices) =
        visible_by_env(spec, config).map_err(|(reason, rank)| (Decision::Nothing(reason), rank))?;
    if env_counts {
        return Ok((asked_by, devices));
    }
    let rank = if devices == VisibleDevices::None { Rank::Explicit } else { Rank::Default };
    let refused = Decision::Refused(format!(
        "{asked_by} is ignored: the container is not privileged and \
         accept-nvidia-visible-devices-envvar-when-unprivileged is false"
    ));
    Err((refused, rank))
}

/// Reports whether the image is older than NVIDIA_REQUIRE_CUDA. Such an image requests all GPUs without a variable.
fn is_legacy_image(env: &BTreeMap<String, String>) -> bool {
    let is_set = |name| env.get(name).is_some_and(|value: &String| !value.is_empty());
    is_set(CUDA_VERSION) && !is_set("NVIDIA_REQUIRE_CUDA")
}

/// Returns the variable with the request and its value; or the reason why there is none.
fn visible_by_env(spec: &SpecView, config: &Config) -> Result<(String, VisibleDevices), (String, Rank)> {
    // A swarm variable has precedence over NVIDIA_VISIBLE_DEVICES, even if it is empty.
    let swarm: Vec<_> = config.swarm_resource.iter().filter(|name| spec.env.contains_key(*name)).collect();
    let (asked_by, value) = if swarm.is_empty() {
        let value = match spec.env.get(VISIBLE_DEVICES) {
            Some(value) => value.clone(),
            None if is_legacy_image(&spec.env) => return Ok((CUDA_VERSION.to_owned(), VisibleDevices::All)),
            None => return Err((format!("{VISIBLE_DEVICES} is not set"), Rank::Default)),
        };
        (VISIBLE_DEVICES.to_owned(), value)
    } else {
        let values = swarm.iter().filter_map(|name| spec.env.get(*name)).cloned();
        let names = swarm.iter().map(|name| name.as_str());
        (names.collect::<Vec<_>>().join(","), values.collect::<Vec<_>>().join(","))
    };
    match device_id::parse(&value) {
        Some(devices) => Ok((asked_by, devices)),
        None => Err((format!("{asked_by} is {value:?}"), Rank::Explicit)),
    }
}

fn privileged_only(spec: &SpecView, name: &str) -> Result<Option<String>> {
    let value = spec.env.get(name).filter(|value| !value.is_empty());
    if value.is_some() && !spec.privileged {
        return Err(failure(
            &catalog::PRIVILEGE,
            format!(
                "insufficient privileges for {name}={:?}: the container is not privileged",
                value.unwrap_or(&String::new())
            ),
            format!("start the container with --privileged, or without {name}"),
        ));
    }
    Ok(value.cloned())
}

fn imex_channels(spec: &SpecView, config: &Config, from_mounts: Vec<String>, env_counts: bool) -> Vec<String> {
    if config.ignore_imex_channels {
        return Vec::new();
    }
    if !from_mounts.is_empty() || !env_counts {
        return from_mounts;
    }
    // The syntax is that of NVIDIA_VISIBLE_DEVICES, but `all` and `none` are not channels.
    match spec.env.get(IMEX_CHANNELS).and_then(|value| device_id::parse(value)) {
        Some(VisibleDevices::List(channels)) => channels,
        _ => Vec::new(),
    }
}

/// Upper limit for the requirements of a container; images have one to five.
pub(crate) const MAX_REQUIREMENTS: usize = 32;

fn requirements(spec: &SpecView, config: &Config, legacy: bool) -> Result<Vec<Requirement>> {
    let disabled = spec.env.get("NVIDIA_DISABLE_REQUIRE").is_some_and(|value| is_go_true(value));
    if disabled || config.requirements() == Require::Off {
        return Ok(Vec::new());
    }
    let named = spec.env.iter().filter(|(name, _)| {
        // On Tegra, these variables contain lists of files.
        name.starts_with("NVIDIA_REQUIRE_") && !name.starts_with("NVIDIA_REQUIRE_JETPACK")
    });
    let mut list: Vec<_> =
        named.map(|(name, value)| Requirement { variable: name.clone(), text: value.clone() }).collect();
    if legacy {
        let version = spec.env.get(CUDA_VERSION).map(String::as_str).unwrap_or_default();
        let Some((major, minor)) = require::parse_cuda_version(version) else {
            return Err(failure(
                &catalog::BAD_REQUIREMENT,
                format!("invalid {CUDA_VERSION}={version:?}: expected a version like 11.8 or 11.8.0"),
                "set NVIDIA_REQUIRE_CUDA or NVIDIA_DISABLE_REQUIRE=true in the container",
            ));
        };
        list.push(Requirement { variable: CUDA_VERSION.to_owned(), text: format!("cuda>={major}.{minor}") });
    }
    if list.len() > MAX_REQUIREMENTS {
        bail!("the container has {} NVIDIA_REQUIRE_ variables, at most {MAX_REQUIREMENTS} are allowed", list.len());
    }
    Ok(list)
}

/// Parses a boolean like Go's strconv.ParseBool, which NVIDIA's hook uses.
fn is_go_true(value: &str) -> bool {
    matches!(value, "1" | "t" | "T" | "TRUE" | "true" | "True")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::Path;

    fn decide(env: &[String]) -> Option<Decision> {
        let text = serde_json::json!({"root": {"path": "/r"}, "process": {"env": env}}).to_string();
        let spec = crate::oci::spec_view::parse(text.as_bytes(), Path::new("/b")).unwrap();
        from_spec(&spec, &Config::default()).ok()
    }

    fn spec(env: &[(&str, &str)]) -> SpecView {
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        SpecView { env: env.collect(), ..SpecView::default() }
    }

    #[test]
    fn config_is_read_only_if_it_can_matter() {
        for (env, expected) in [
            (&[][..], Hint::No),
            (&[("PATH", "/bin")], Hint::No),
            (&[("NVIDIA_VISIBLE_DEVICES", "void")], Hint::No),
            (&[("CUDA_VERSION", "9.0"), ("NVIDIA_VISIBLE_DEVICES", "")], Hint::No),
            (&[("CUDA_VERSION", "9.0"), ("NVIDIA_REQUIRE_CUDA", "x")], Hint::No),
            (&[("CUDA_VERSION", "9.0")], Hint::Yes),
            (&[("NVIDIA_VISIBLE_DEVICES", "none")], Hint::Yes),
            (&[("DOCKER_RESOURCE_GPU", "0")], Hint::Perhaps),
        ] {
            assert_eq!(hint(&spec(env)), expected, "{env:?}");
        }
    }

    #[test]
    fn device_nodes_are_a_request_without_the_variable() {
        let node = |minor| crate::oci::spec_view::Device {
            path: format!("/dev/nvidia{minor}").into(),
            kind: Some("c".into()),
            major: Some(195),
            minor: Some(minor),
        };
        let open = Config::default();
        let locked = Config { accept_envvar_when_unprivileged: false, ..Config::default() };
        let decide = |env: &[(&str, &str)], privileged: bool, config: &Config| {
            let spec = SpecView { devices: vec![node(255), node(1)], privileged, ..spec(env) };
            let decision = from_spec(&spec, config).unwrap();
            assert!(hint(&spec) != Hint::No || matches!(decision, Decision::Nothing(_)), "{env:?}");
            match decision {
                Decision::Gpus(request) => request.devices.names().join(","),
                Decision::Nothing(_) => "nothing".to_owned(),
                Decision::Refused(_) => "refused".to_owned(),
            }
        };
        let all = ("NVIDIA_VISIBLE_DEVICES", "all");
        for (env, when_open, when_locked) in [
            (&[][..], "/dev/nvidia1", "/dev/nvidia1"),
            (&[all], "all", "/dev/nvidia1"),
            (&[("CUDA_VERSION", "9.0")], "all", "/dev/nvidia1"),
            (&[("NVIDIA_VISIBLE_DEVICES", "none")], "none", "refused"),
            (&[("NVIDIA_VISIBLE_DEVICES", "void")], "nothing", "nothing"),
            (&[("NVIDIA_VISIBLE_DEVICES", "")], "nothing", "nothing"),
        ] {
            assert_eq!(decide(env, false, &open), when_open, "{env:?}");
            assert_eq!(decide(env, false, &locked), when_locked, "{env:?}");
        }
        assert_eq!(decide(&[], true, &open), "nothing", "a privileged one has every node of the host");
        assert_eq!(decide(&[all], true, &locked), "all");
        let swarm = Config { swarm_resource: vec!["DOCKER_RESOURCE_GPU".into()], ..Config::default() };
        assert_eq!(decide(&[("DOCKER_RESOURCE_GPU", "")], false, &swarm), "nothing");
    }

    proptest! {
        /// Without a hint, there is no request with any configuration, except for swarm variables of other names.
        #[test]
        fn no_hint_no_request(
            devices in prop::option::of("|void|all|0| , "),
            cuda in prop::option::of("|9\\.0"),
            require in prop::option::of("|cuda>=9\\.0"),
        ) {
            let vars = [("NVIDIA_VISIBLE_DEVICES", devices), ("CUDA_VERSION", cuda), ("NVIDIA_REQUIRE_CUDA", require)];
            let env: Vec<_> = vars.iter().filter_map(|(name, value)| Some((*name, value.as_deref()?))).collect();
            let spec = spec(&env);
            let decision = from_spec(&spec, &Config::default()).unwrap();
            prop_assert_eq!(hint(&spec) == Hint::No, matches!(decision, Decision::Nothing(_)));
        }

        #[test]
        fn the_order_of_variables_means_nothing(
            seed in any::<u64>(),
            devices in "all|none|0|1,0|GPU-x|void",
            capabilities in "all|compute|utility,video|nonsense",
            requirement in "cuda>=12.0|brand=tesla|x",
        ) {
            let mut env = vec![
                format!("NVIDIA_VISIBLE_DEVICES={devices}"),
                format!("NVIDIA_DRIVER_CAPABILITIES={capabilities}"),
                format!("NVIDIA_REQUIRE_CUDA={requirement}"),
                "NVIDIA_REQUIRE_OTHER=arch>=7".to_owned(),
                "CUDA_VERSION=12.1".to_owned(),
                "PATH=/bin".to_owned(),
            ];
            let before = decide(&env);
            let by = usize::try_from(seed % 6).unwrap();
            env.rotate_left(by);
            env.swap(0, by);
            prop_assert_eq!(decide(&env), before);
        }
    }
}
