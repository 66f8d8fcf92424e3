//! The table `[kubelet-plugin]`: what the device plugin offers to Kubernetes. The hook ignores it.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::de::DeValue;

/// The largest number of replicas of a device. NVIDIA's MPS supports 48 clients; more than a hundred containers on one GPU are a mistake.
const MAX_REPLICAS: u32 = 100;
/// The longest name of an extended resource after its prefix, by the rules of Kubernetes for qualified names.
const MAX_NAME: usize = 63;
/// The longest prefix, a DNS subdomain.
const MAX_PREFIX: usize = 253;

/// The settings of the device plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeletPlugin {
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

/// A row of `sharing.timeSlicing.resources` in the configuration file of NVIDIA's plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeSlicing {
    /// The name of the resource with its prefix, such as `nvidia.com/gpu`
    pub name: String,
    /// The name under which it is offered instead
    pub rename: Option<String>,
    /// The number of replicas
    pub replicas: u32,
}

impl TimeSlicing {
    /// Checks the row.
    ///
    /// # Errors
    /// The name of a field that is invalid, and the allowed values.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let resource = || "the name of a resource, such as \"nvidia.com/gpu\"".to_owned();
        if !is_resource(&self.name) {
            return Err(("name", resource()));
        }
        if self.rename.as_ref().is_some_and(|name| !is_resource(name)) {
            return Err(("rename", resource()));
        }
        checked_replicas(self.replicas).map(drop).map_err(|allowed| ("replicas", allowed))
    }
}

/// How containers get their devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// All strategies.
    pub const ALL: [Self; 5] = [Self::Envvar, Self::VolumeMounts, Self::CdiCri, Self::CdiAnnotations, Self::HostPath];

    /// Returns the name in config.toml.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Envvar => "envvar",
            Self::VolumeMounts => "volume-mounts",
            Self::CdiCri => "cdi-cri",
            Self::CdiAnnotations => "cdi-annotations",
            Self::HostPath => "host-path",
        }
    }
}

/// How the devices are named for the hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceIdStrategy {
    /// By UUID.
    Uuid,
    /// By NVML's index, `GPU:MIG` for MIG devices.
    Index,
}

impl DeviceIdStrategy {
    /// Returns the name in config.toml.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uuid => "uuid",
            Self::Index => "index",
        }
    }
}

/// A row of `resources`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceRow {
    /// The name with its prefix, such as `nvidia.com/h100`
    pub name: String,
    /// A pattern for the model of the GPU
    pub model: String,
    /// The number of replicas; `None` for the default
    pub replicas: Option<u32>,
}

/// How MIG devices are offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigStrategy {
    /// Not at all: a GPU in MIG mode is offered as a GPU.
    None,
    /// As the resource of whole GPUs, if all GPUs have MIG devices of one profile.
    Single,
    /// Each profile as a resource of its own.
    Mixed,
}

/// Which replicas containers get first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Those of the GPU with the fewest containers.
    Distributed,
    /// Those of the GPU with the most containers.
    Packed,
}

impl Default for KubeletPlugin {
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
            labels_dir: "/etc/kubernetes/node-feature-discovery/features.d".into(),
        }
    }
}

impl KubeletPlugin {
    /// Sets `replicas`.
    ///
    /// # Errors
    /// The allowed values.
    pub fn set_replicas(&mut self, value: u32) -> Result<(), String> {
        self.replicas = checked_replicas(value)?;
        Ok(())
    }

    /// Sets `resource-prefix`.
    ///
    /// # Errors
    /// The allowed values.
    pub fn set_resource_prefix(&mut self, value: &str) -> Result<(), String> {
        if !is_prefix(value) {
            return Err("a DNS name, such as \"nvidia.com\"".to_owned());
        }
        value.clone_into(&mut self.resource_prefix);
        Ok(())
    }

    /// Sets `mig-strategy`.
    ///
    /// # Errors
    /// The allowed values.
    pub fn set_mig_strategy(&mut self, value: &str) -> Result<(), String> {
        self.mig_strategy = match value {
            "none" => MigStrategy::None,
            "single" => MigStrategy::Single,
            "mixed" => MigStrategy::Mixed,
            _ => return Err("\"none\", \"single\" or \"mixed\"".to_owned()),
        };
        Ok(())
    }

    /// Sets `allocation`.
    ///
    /// # Errors
    /// The allowed values.
    pub fn set_allocation(&mut self, value: &str) -> Result<(), String> {
        self.allocation = match value {
            "distributed" => Allocation::Distributed,
            "packed" => Allocation::Packed,
            _ => return Err("\"distributed\" or \"packed\"".to_owned()),
        };
        Ok(())
    }

    /// Sets `device-list-strategy`.
    ///
    /// # Errors
    /// The allowed values.
    pub fn set_device_list_strategy<S: AsRef<str>>(&mut self, names: &[S]) -> Result<(), String> {
        let find = |name: &S| DeviceListStrategy::ALL.into_iter().find(|strategy| strategy.name() == name.as_ref());
        let strategies: Vec<_> = names.iter().map(find).collect::<Option<_>>().ok_or(STRATEGIES)?;
        if strategies.contains(&DeviceListStrategy::HostPath) && strategies.len() > 1 {
            return Err(format!("{STRATEGIES}, and \"host-path\" alone"));
        }
        self.device_list_strategy = strategies;
        Ok(())
    }

    /// Sets `device-id-strategy`.
    ///
    /// # Errors
    /// The allowed values.
    pub fn set_device_id_strategy(&mut self, value: &str) -> Result<(), String> {
        self.device_id_strategy = match value {
            "uuid" => DeviceIdStrategy::Uuid,
            "index" => DeviceIdStrategy::Index,
            _ => return Err("\"uuid\" or \"index\"".to_owned()),
        };
        Ok(())
    }

    /// Sets `metrics-address`. `:2112` is that port on all addresses; an empty string disables the metrics.
    ///
    /// # Errors
    /// The allowed values.
    pub fn set_metrics_address(&mut self, value: &str) -> Result<(), String> {
        self.metrics_address = match value.strip_prefix(':') {
            None if value.is_empty() => None,
            None => Some(value.parse().map_err(|_| ADDRESS)?),
            Some(port) => Some(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port.parse().map_err(|_| ADDRESS)?))),
        };
        Ok(())
    }

    /// Sets `labels` to `auto`, `true` or `false`.
    ///
    /// # Errors
    /// The allowed values.
    pub fn set_labels(&mut self, value: &str) -> Result<(), String> {
        self.labels = match value {
            "auto" => None,
            "true" => Some(true),
            "false" => Some(false),
            _ => return Err("auto, true or false".to_owned()),
        };
        Ok(())
    }

    /// Sets `labels-dir`.
    ///
    /// # Errors
    /// The allowed values.
    pub fn set_labels_dir(&mut self, value: &str) -> Result<(), String> {
        if !Path::new(value).is_absolute() {
            return Err("an absolute path".to_owned());
        }
        self.labels_dir = value.into();
        Ok(())
    }

    /// Sets `resources`.
    ///
    /// # Errors
    /// The allowed values, and what is wrong with a row.
    pub fn set_resources(&mut self, rows: Vec<ResourceRow>) -> Result<(), String> {
        for (at, row) in rows.iter().enumerate() {
            row.check().map_err(|why| format!("{ROWS}, and {why}"))?;
            let is_same = |other: &ResourceRow| other.name == row.name && other.model == row.model;
            if rows.iter().take(at).any(is_same) {
                return Err(format!("{ROWS}, and the row {:?} with model {:?} appears twice", row.name, row.model));
            }
        }
        self.resources = rows;
        Ok(())
    }
}

/// The values of `device-list-strategy`, for error messages.
const STRATEGIES: &str = "a list of \"envvar\", \"volume-mounts\", \"cdi-cri\", \"cdi-annotations\" and \"host-path\"";
const ADDRESS: &str = "an address with a port, such as \"127.0.0.1:2112\", or \":2112\" for all addresses";

/// The form of `resources`, for error messages.
const ROWS: &str = "a list of { name = \"nvidia.com/h100\", model = \"*H100*\", replicas = 1 }";

impl ResourceRow {
    /// Parses `name=nvidia.com/h100,model=*H100*,replicas=4`, the form on the command line.
    ///
    /// # Errors
    /// What is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut row = Self::default();
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("{part:?} is not KEY=VALUE"))?;
            row.set(key, value, value.parse().ok())?;
        }
        row.check()?;
        Ok(row)
    }

    fn set(&mut self, key: &str, text: &str, number: Option<u32>) -> Result<(), String> {
        match (key, number) {
            ("name", _) => text.clone_into(&mut self.name),
            ("model", _) => text.clone_into(&mut self.model),
            ("replicas", Some(number)) => self.replicas = Some(checked_replicas(number)?),
            ("replicas", None) => return Err(format!("{text:?} is not {REPLICAS}")),
            _ => return Err(format!("{key:?} is not one of name, model and replicas")),
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let Self { name, model, .. } = self;
        if !is_resource(name) {
            return Err(format!(
                "{name:?} is not the name of a resource: a DNS name, a slash and at most {MAX_NAME} letters, digits, \".\", \
                 \"-\" and \"_\""
            ));
        }
        match model.is_empty() {
            true => Err(format!("{name:?} has no model")),
            false => Ok(()),
        }
    }
}

/// Reads the rows of `resources`.
pub(super) fn rows(values: &[toml::Spanned<DeValue<'_>>]) -> Result<Vec<ResourceRow>, String> {
    values
        .iter()
        .map(|value| row(value.get_ref()))
        .collect::<Result<_, _>>()
        .map_err(|why| format!("{ROWS}, and {why}"))
}

fn row(value: &DeValue<'_>) -> Result<ResourceRow, String> {
    let DeValue::Table(table) = value else { return Err("an entry is not a table".to_owned()) };
    let mut row = ResourceRow::default();
    for (key, value) in table {
        match value.get_ref() {
            DeValue::String(text) if key.get_ref() != "replicas" => row.set(key.get_ref(), text, None)?,
            DeValue::Integer(number) if key.get_ref() == "replicas" => {
                row.set("replicas", number.as_str(), u32::from_str_radix(number.as_str(), number.radix()).ok())?;
            }
            _ => return Err(format!("{:?} has a value of the wrong type", key.get_ref())),
        }
    }
    Ok(row)
}

const REPLICAS: &str = "a number from 1 to 100";

fn checked_replicas(value: u32) -> Result<u32, String> {
    if (1..=MAX_REPLICAS).contains(&value) { Ok(value) } else { Err(REPLICAS.to_owned()) }
}

fn is_resource(name: &str) -> bool {
    name.split_once('/').is_some_and(|(prefix, name)| is_prefix(prefix) && is_qualified_name(name))
}

/// Whether this is a DNS subdomain in the sense of Kubernetes, except `kubernetes.io`, which extended resources must not use.
fn is_prefix(text: &str) -> bool {
    let is_label = |label: &str| {
        let is_allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
        !label.is_empty()
            && label.len() <= MAX_NAME
            && label.bytes().all(is_allowed)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let is_reserved = text == "kubernetes.io" || text.ends_with(".kubernetes.io") || text.starts_with("requests.");
    text.len() <= MAX_PREFIX && text.split('.').all(is_label) && !is_reserved
}

/// Whether this is the part of a qualified name after the slash.
#[must_use]
pub fn is_qualified_name(text: &str) -> bool {
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= MAX_NAME
        && is_end(text.chars().next())
        && is_end(text.chars().next_back())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_on_the_command_line() {
        let row = ResourceRow::parse("name=nvidia.com/h100,model=*H100*,replicas=4").unwrap();
        assert_eq!(row, ResourceRow { name: "nvidia.com/h100".into(), model: "*H100*".into(), replicas: Some(4) });
        for (text, why) in [
            ("", "not KEY=VALUE"),
            ("name=nvidia.com/h100", "has no model"),
            ("model=*", "not the name of a resource"),
            ("name=h100,model=*", "not the name of a resource"),
            ("name=nvidia.com/-x,model=*", "not the name of a resource"),
            ("name=kubernetes.io/x,model=*", "not the name of a resource"),
            ("name=a.b/x,model=*,replicas=0", "from 1 to 100"),
            ("name=a.b/x,model=*,replicas=many", "from 1 to 100"),
            ("name=a.b/x,model=*,color=red", "not one of name"),
        ] {
            let error = ResourceRow::parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        let long = format!("name=a.b/{},model=*", "x".repeat(MAX_NAME + 1));
        assert!(ResourceRow::parse(&long).is_err());
        assert!(ResourceRow::parse(&long.replacen('x', "", 1)).is_ok());
    }

    #[test]
    fn addresses_for_metrics() {
        let mut settings = KubeletPlugin::default();
        for (text, expected) in [
            ("127.0.0.1:2112", Some("127.0.0.1:2112")),
            ("[::1]:9400", Some("[::1]:9400")),
            (":2112", Some("[::]:2112")),
            ("", None),
        ] {
            settings.set_metrics_address(text).unwrap();
            assert_eq!(settings.metrics_address.map(|address| address.to_string()).as_deref(), expected, "{text:?}");
        }
        for text in ["2112", "localhost:2112", ":", ":70000", "127.0.0.1", "unix:/run/x"] {
            assert!(settings.set_metrics_address(text).is_err(), "{text:?}");
        }
        assert!(settings.set_labels_dir("features.d").is_err() && settings.set_labels_dir("/x").is_ok());
    }

    #[test]
    fn the_same_row_twice_is_an_error() {
        let row = |name: &str, model: &str| ResourceRow { name: name.into(), model: model.into(), replicas: None };
        let mut settings = KubeletPlugin::default();
        assert!(settings.set_resources(vec![row("a.b/x", "*A*"), row("a.b/x", "*B*")]).is_ok());
        let error = settings.set_resources(vec![row("a.b/x", "*A*"), row("a.b/x", "*A*")]).unwrap_err();
        assert!(error.ends_with("\"a.b/x\" with model \"*A*\" appears twice"), "{error}");
    }
}
