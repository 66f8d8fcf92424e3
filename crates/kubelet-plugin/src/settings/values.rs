//! The settings, their defaults and their values.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use nvidia_host::config::Config;

use super::resources::{ResourceRow, TimeSlicing};

/// The settings of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Those that the hook has too
    pub common: Config,
    /// Those of the device plugin
    pub plugin: Plugin,
    /// The directory of the kubelet
    pub kubelet_dir: PathBuf,
}

impl Default for Settings {
    fn default() -> Self {
        let kubelet_dir = PathBuf::from("/var/lib/kubelet");
        Self { common: Config::default(), plugin: Plugin::default(), kubelet_dir }
    }
}

/// The settings of the device plugin, most of them in the table `[kubelet-plugin]` of config.toml.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plugin {
    /// How many containers may share a device, unless a row of `resources` has its own number.
    pub replicas: u32,
    /// The rows of `resources`. The first one that matches a GPU names its resource.
    pub resources: Vec<ResourceRow>,
    /// The prefix of resources that no row names.
    pub resource_prefix: String,
    /// How MIG devices are offered.
    pub mig_strategy: MigStrategy,
    /// Which replicas containers get first.
    pub allocation: Allocation,
    /// The time without further errors after which a GPU that was repaired counts as healthy.
    pub quiet_period: Duration,
    /// XIDs that are errors of an application, not of the GPU.
    pub ignored_xids: Vec<u32>,
    /// The time limit for one call of NVML.
    pub nvml_timeout: Duration,
    /// How containers get their devices. If the list is empty, the plugin chooses.
    pub device_list_strategy: Vec<DeviceListStrategy>,
    /// How the devices are named for the hook.
    pub device_id_strategy: DeviceIdStrategy,
    /// Whether the kubelet also passes the device nodes, if the hook adds the files.
    pub pass_device_specs: bool,
    /// The directory of the host with the driver's files, for [`DeviceListStrategy::HostPath`].
    pub host_path: PathBuf,
    /// GKE's configuration file, which is read for [`DeviceListStrategy::HostPath`] if it exists.
    pub gpu_config: PathBuf,
    /// The rows of `sharing.timeSlicing.resources` in the configuration file of NVIDIA's plugin. The first one with the name of a
    /// resource replaces [`Self::replicas`].
    pub time_slicing: Vec<TimeSlicing>,
    /// Whether a container may request several replicas of a resource. NVIDIA's plugin permits it by default.
    pub several_replicas: bool,
    /// Where metrics are served; `None` for nowhere.
    pub metrics_address: Option<SocketAddr>,
    /// Whether labels for Node Feature Discovery are written; `None` if its directory exists.
    pub labels: Option<bool>,
    /// That directory.
    pub labels_dir: PathBuf,
}

impl Default for Plugin {
    fn default() -> Self {
        Self {
            replicas: 1,
            resources: Vec::new(),
            resource_prefix: "nvidia.com".to_owned(),
            mig_strategy: MigStrategy::Mixed,
            allocation: Allocation::Distributed,
            quiet_period: Duration::from_secs(60),
            ignored_xids: vec![13, 31, 43, 45, 68, 109],
            nvml_timeout: Duration::from_secs(10),
            device_list_strategy: Vec::new(),
            device_id_strategy: DeviceIdStrategy::Uuid,
            pass_device_specs: true,
            host_path: PathBuf::from("/home/kubernetes/bin/nvidia"),
            gpu_config: PathBuf::from("/etc/nvidia/gpu_config.json"),
            time_slicing: Vec::new(),
            several_replicas: false,
            metrics_address: None,
            labels: None,
            labels_dir: PathBuf::from("/etc/kubernetes/node-feature-discovery/features.d"),
        }
    }
}

/// How containers get their devices. The order is that in which an answer is arranged: if the variable does not name the devices, it
/// names the directory of the mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceListStrategy {
    /// `NVIDIA_VISIBLE_DEVICES` lists them for the hook.
    Envvar,
    /// Mounts of `/dev/null` list them for the hook.
    VolumeMounts,
    /// The kubelet passes their CDI names to the engine.
    CdiCri,
    /// Annotations of the container contain their CDI names.
    CdiAnnotations,
    /// Device nodes, and a mount of a directory with the driver's files, as on GKE. No hook is needed.
    HostPath,
}

impl DeviceListStrategy {
    /// Returns the name in config.toml.
    #[must_use]
    pub fn name(self) -> String {
        name_of(&self)
    }
}

/// How the devices are named for the hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceIdStrategy {
    /// By UUID.
    Uuid,
    /// By NVML's index, `GPU:MIG` for MIG devices.
    Index,
}

/// How MIG devices are offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MigStrategy {
    /// Not at all: a GPU in MIG mode is offered as a GPU.
    None,
    /// As the resource of whole GPUs, if all GPUs have MIG devices of one profile.
    Single,
    /// Each profile as a resource of its own.
    Mixed,
}

/// Which replicas containers get first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Allocation {
    /// Those of the GPU with the fewest containers.
    Distributed,
    /// Those of the GPU with the most containers.
    Packed,
}

/// Returns the name of a value in config.toml.
fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Parses the name of a value.
///
/// # Errors
/// The names of all values.
pub(super) fn word<T: ValueEnum>(text: &str) -> Result<T, String> {
    T::from_str(text, false).map_err(|_| names_of::<T>("or"))
}

/// `"a", "b" or "c"`
fn names_of<T: ValueEnum>(conjunction: &str) -> String {
    let names: Vec<String> = T::value_variants().iter().map(|value| format!("{:?}", name_of(value))).collect();
    match names.split_last() {
        Some((last, others)) => format!("{} {conjunction} {last}", others.join(", ")),
        None => String::new(),
    }
}

/// Parses the names of `device-list-strategy`.
///
/// # Errors
/// The allowed values.
pub(super) fn strategies(names: &[&str]) -> Result<Vec<DeviceListStrategy>, String> {
    let found: Result<Vec<DeviceListStrategy>, String> = names.iter().copied().map(word).collect();
    let allowed = format!("a list of {}", names_of::<DeviceListStrategy>("and"));
    match found {
        Err(_) => Err(allowed),
        Ok(found) if found.contains(&DeviceListStrategy::HostPath) && found.len() > 1 => {
            Err(format!("{allowed}, and \"host-path\" alone"))
        }
        Ok(found) => Ok(found),
    }
}

/// Parses an address for metrics. `:2112` is that port on all addresses, and an empty text is no address.
///
/// # Errors
/// The allowed values.
pub(super) fn address(text: &str) -> Result<Option<SocketAddr>, String> {
    let allowed = "an address with a port, such as \"127.0.0.1:2112\", or \":2112\" for all addresses";
    let parsed = match text.strip_prefix(':') {
        None if text.is_empty() => return Ok(None),
        None => text.parse().ok(),
        Some(port) => port.parse().ok().map(|port: u16| SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))),
    };
    parsed.map(Some).ok_or_else(|| allowed.to_owned())
}

/// Parses an absolute path.
///
/// # Errors
/// The allowed values.
pub(super) fn absolute(text: &str) -> Result<PathBuf, String> {
    Some(PathBuf::from(text)).filter(|path| path.is_absolute()).ok_or_else(|| "an absolute path".to_owned())
}
