//! The settings, and the table of the plugin's settings: each is a key in the table `[kubelet-plugin]` of config.toml and an option with the same name.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, ArgAction};
use nvidia_host::config::{self, Config, value};
use nvidia_host::feature::Features;
use toml::de::DeValue;

use super::parse::{
    absolute, address, driver_name, features, metrics_names, optional_path, optional_text, seconds,
    strategies, switch, truth, word,
};
use super::resources::{self, ResourceRow, SharedResource, prefix, replicas, rows};
use super::values::{
    Allocation, DeviceIdStrategy, DeviceListStrategy, Interface, MetricsNames, MigStrategy,
    SharingStrategy, TaintEffect,
};
use super::xids::{self, ignored_xids};

/// The settings of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The settings that the hook also has
    pub common: Config,
    /// The settings of the device plugin only
    pub plugin: Plugin,
    /// The directory of the kubelet
    pub kubelet_dir: PathBuf,
}

impl Default for Settings {
    fn default() -> Self {
        let kubelet_dir = PathBuf::from("/var/lib/kubelet");
        Self {
            common: Config::default(),
            plugin: Plugin::default(),
            kubelet_dir,
        }
    }
}

/// A setting.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The name of the key and of the option
    pub name: &'static str,
    kind: ValueType,
    /// The name of the value in the help text of the option
    value: &'static str,
    help: &'static str,
    set: fn(&mut Plugin, &[&str]) -> Result<(), String>,
}

/// The type of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueType {
    Bool,
    /// A boolean, or `auto`
    Switch,
    Text,
    Texts,
    Number,
    Numbers,
    Rows,
}

/// Defines [`Plugin`] and [`SETTINGS`] from rows of the help text, the name, the name and the type of the value, the field with its
/// type and default, and the function that parses the value. Its error describes the allowed values.
macro_rules! settings {
    ($(#[doc = $help:literal] $name:literal $value:ident $kind:ident $field:ident: $type:ty = $default:expr, $parse:ident;)*) => {
        /// The settings of the device plugin that the hook does not have.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Plugin {
            $(#[doc = concat!("`", $name, "`:", $help)] pub $field: $type,)*
            /// The rows of `sharing.timeSlicing.resources` and `sharing.mps.resources` in the configuration file of NVIDIA's plugin. A row
            /// with the name of a resource replaces [`Self::replicas`] and [`Self::sharing`].
            pub shared_resources: Vec<SharedResource>,
            /// Whether a container may request several replicas of a resource that is shared with time-slicing. NVIDIA's plugin permits it
            /// by default.
            pub several_replicas: bool,
        }

        impl Default for Plugin {
            fn default() -> Self {
                Self { $($field: $default,)* shared_resources: Vec::new(), several_replicas: false }
            }
        }

        /// All settings, in the order of the help text.
        pub const SETTINGS: &[Setting] = &[$(Setting {
            name: $name,
            kind: ValueType::$kind,
            value: stringify!($value),
            help: $help,
            set: |plugin, values| {
                plugin.$field = $parse(values)?;
                Ok(())
            },
        }),*];
    };
}

settings! {
    /// How the kubelet learns of the GPUs: device-plugin, or dra for claims [default: device-plugin]
    "interface" NAME Text interface: Interface = Interface::DevicePlugin, word;
    /// The name of the driver [default: gpu.nvidia.com]
    "driver-name" NAME Text driver_name: String = "gpu.nvidia.com".to_owned(), driver_name;
    /// The taint of a device that does not work: NoSchedule, NoExecute or None [default: NoSchedule]
    "taint-effect" EFFECT Text taint_effect: TaintEffect = TaintEffect::NoSchedule, word;
    /// The credentials for the API server [default: the kubelet's]
    "kubeconfig" FILE Text kubeconfig: Option<PathBuf> = None, optional_path;
    /// The name of the node [default: the name in the credentials]
    "node-name" NAME Text node_name: Option<String> = None, optional_text;
    /// How many containers may share a device [default: 1]
    "replicas" N Number replicas: u32 = 1, replicas;
    /// How containers share a device: time-slicing or mps [default: time-slicing]
    "sharing" STRATEGY Text sharing: SharingStrategy = SharingStrategy::TimeSlicing, word;
    /// A resource for GPUs of a model: name=NAME,model=PATTERN[,replicas=N]. May be repeated
    "resources" ROW Rows resources: Vec<ResourceRow> = Vec::new(), rows;
    /// The prefix of all other resources [default: nvidia.com]
    "resource-prefix" PREFIX Text resource_prefix: String = "nvidia.com".to_owned(), prefix;
    /// How MIG devices are offered: none, single or mixed [default: mixed]
    "mig-strategy" STRATEGY Text mig_strategy: MigStrategy = MigStrategy::Mixed, word;
    /// Which replicas containers get first: distributed or packed [default: distributed]
    "allocation" ORDER Text allocation: Allocation = Allocation::Distributed, word;
    /// Seconds without an error after which a repaired GPU is offered again [default: 60]
    "quiet-period" SECONDS Number quiet_period: Duration = Duration::from_secs(60), seconds;
    /// XIDs that are errors of an application, separated by commas, or all [default: see config.toml]
    "ignored-xids" XIDS Numbers ignored_xids: Vec<u32> = xids::IGNORED.to_vec(), ignored_xids;
    /// Seconds to wait for one call of NVML [default: 10]
    "nvml-timeout" SECONDS Number nvml_timeout: Duration = Duration::from_secs(10), seconds;
    /// How containers get their devices: envvar, volume-mounts, cdi-cri, cdi-annotations, host-path, separated by commas [default: depends on the engine]
    "device-list-strategy" STRATEGIES Texts device_list_strategy: Vec<DeviceListStrategy> = Vec::new(), strategies;
    /// The names of the devices for the hook: uuid or index [default: uuid]
    "device-id-strategy" STRATEGY Text device_id_strategy: DeviceIdStrategy = DeviceIdStrategy::Uuid, word;
    /// Whether the engine creates the device nodes, with envvar and volume-mounts: true or false [default: true]
    "pass-device-specs" BOOL Bool pass_device_specs: bool = true, truth;
    /// Devices that containers get with their GPUs: gds, mofed, gdrcopy, nvswitch, separated by commas [default: none]
    "extra-devices" NAMES Texts extra_devices: Features = Features::EMPTY, features;
    /// The directory that host-path mounts at /usr/local/nvidia [default: /home/kubernetes/bin/nvidia]
    "host-path" DIR Text host_path: PathBuf = PathBuf::from("/home/kubernetes/bin/nvidia"), absolute;
    /// GKE's configuration file, for host-path [default: /etc/nvidia/gpu_config.json]
    "gpu-config" FILE Text gpu_config: PathBuf = PathBuf::from("/etc/nvidia/gpu_config.json"), absolute;
    /// Serve metrics at this address, such as 127.0.0.1:2112 or :2112 [default: none]
    "metrics-address" ADDRESS Text metrics_address: Option<SocketAddr> = None, address;
    /// The names of the metrics of GPUs: gke, dcgm, dcgm-per-container, separated by commas [default: gke]
    "metrics-names" NAMES Texts metrics_names: Vec<MetricsNames> = vec![MetricsNames::Gke], metrics_names;
    /// Whether labels for Node Feature Discovery are written: auto, true or false [default: auto]
    "labels" WHEN Switch labels: Option<bool> = None, switch;
    /// The directory for the file with the labels [default: /etc/kubernetes/node-feature-discovery/features.d]
    "labels-dir" DIR Text labels_dir: PathBuf = PathBuf::from("/etc/kubernetes/node-feature-discovery/features.d"), absolute;
}

/// Returns the setting with this name.
#[must_use]
pub(super) fn find(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

impl Setting {
    /// Returns the heading above the option in the help.
    fn heading(&self) -> &'static str {
        match self.name {
            "driver-name" | "taint-effect" | "kubeconfig" | "node-name" => "DRA mode",
            "replicas" | "sharing" | "allocation" => "Sharing",
            "device-list-strategy"
            | "device-id-strategy"
            | "pass-device-specs"
            | "host-path"
            | "gpu-config" => "Containers",
            "metrics-address" | "metrics-names" | "labels" | "labels-dir" => "Metrics and labels",
            _ => "Devices",
        }
    }

    /// Returns the option. Of an option that is repeated, the last value applies, or all of a list.
    pub(super) fn option(&self) -> Arg {
        let arg = Arg::new(self.name)
            .long(self.name)
            .value_name(self.value)
            .help_heading(self.heading())
            .help(self.help.trim());
        match self.kind {
            ValueType::Bool => arg
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true"),
            ValueType::Texts | ValueType::Numbers | ValueType::Rows => {
                arg.action(ArgAction::Append)
            }
            ValueType::Switch | ValueType::Text | ValueType::Number => {
                arg.overrides_with(self.name)
            }
        }
    }

    /// Sets the value of an option, or of an option or variable of NVIDIA's plugin. Lists are separated by commas.
    ///
    /// # Errors
    /// The allowed values.
    pub(super) fn set(&self, plugin: &mut Plugin, values: &[&str]) -> Result<(), String> {
        match self.kind {
            ValueType::Texts | ValueType::Numbers => (self.set)(plugin, &entries(values)),
            _ => (self.set)(plugin, values),
        }
    }
}

fn entries<'a>(values: &[&'a str]) -> Vec<&'a str> {
    values
        .iter()
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|entry| !entry.is_empty())
        .collect()
}

impl ValueType {
    /// Returns a value of config.toml as texts, if it has this type.
    fn texts(self, value: &DeValue<'_>) -> Option<Vec<String>> {
        Some(match (self, value) {
            (Self::Bool | Self::Switch, DeValue::Boolean(is)) => vec![is.to_string()],
            (Self::Switch, DeValue::String(text)) if text == "auto" => vec![text.to_string()],
            (Self::Text, DeValue::String(text)) => vec![text.to_string()],
            // NVIDIA's setting is one string.
            (Self::Texts, DeValue::String(text)) => {
                text.split(',').map(|text| text.trim().to_owned()).collect()
            }
            (Self::Texts, DeValue::Array(list)) => {
                value::texts(list)?.into_iter().map(str::to_owned).collect()
            }
            (Self::Number, DeValue::Integer(number)) => vec![value::number(number)?.to_string()],
            (Self::Numbers, DeValue::String(text)) if text == "all" => vec![text.to_string()],
            (Self::Numbers, DeValue::Array(list)) => {
                value::numbers(list)?.iter().map(u32::to_string).collect()
            }
            _ => return None,
        })
    }

    /// Describes the values of this type, for errors.
    const fn allowed(self) -> &'static str {
        match self {
            Self::Bool => "true or false",
            Self::Switch => "true, false or \"auto\"",
            Self::Text => "a string in quotes",
            Self::Texts => "a string or a list of strings in quotes",
            Self::Number => "a number",
            Self::Numbers => "a list of numbers, or \"all\"",
            Self::Rows => "a list of tables",
        }
    }
}

impl config::Table for Plugin {
    fn keys(&self) -> Option<Vec<&'static str>> {
        Some(SETTINGS.iter().map(|setting| setting.name).collect())
    }

    fn set(&mut self, key: &str, value: &DeValue<'_>) -> Result<(), String> {
        let Some(setting) = find(key) else {
            return Ok(());
        };
        if let (ValueType::Rows, DeValue::Array(list)) = (setting.kind, value) {
            self.resources = resources::read(list)?;
            return Ok(());
        }
        let texts = setting
            .kind
            .texts(value)
            .ok_or_else(|| setting.kind.allowed().to_owned())?;
        (setting.set)(self, &texts.iter().map(String::as_str).collect::<Vec<_>>())
    }
}
