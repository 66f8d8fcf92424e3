//! Reads the administrator's config.toml. The file and most keys are NVIDIA's, so that an existing file keeps working; some keys are
//! our own. [`schema`] lists the keys, [`user`] resolves the value of `user`, and [`FileStates`] shows that the files have changed.

mod file_states;
mod files;
mod hint;
pub mod schema;
pub mod sharing;
pub mod user;
pub mod value;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use toml::de::{DeTable, DeValue};

use base::nearest::nearest_by;
use base::paths::HostPath;
use base::report::{Finding, failure};
use findings::catalog;

use crate::capability::{Capabilities, Capability};
use crate::feature::Features;
pub use file_states::FileStates;
pub use files::{FILE, drop_ins, read, read_below, read_with};
use schema::{Key, Meaning};
pub use sharing::{ClientLimits, Sharing};
pub use user::{UserSpec, resolve};

/// The prefix of the variables that Docker Swarm sets. `swarm-resource` names those that list GPUs.
pub const SWARM_PREFIX: &str = "DOCKER_";
/// The prefix of those for resources, under which Docker Swarm publishes a generic resource of a node.
pub const SWARM_RESOURCE_PREFIX: &str = "DOCKER_RESOURCE_";
/// The most unknown keys that are reported. For each of them the lines of the file are counted, which would take quadratic time.
const MAX_UNKNOWN: usize = 16;

/// The settings of the hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The file of `--config`; `None` for the default file.
    pub file: Option<HostPath>,
    /// Whether unprivileged containers can request GPUs with `NVIDIA_VISIBLE_DEVICES`.
    pub accept_envvar_when_unprivileged: bool,
    /// Whether containers can request GPUs with volume mounts.
    pub accept_volume_mounts: bool,
    /// Variables that replace `NVIDIA_VISIBLE_DEVICES`.
    pub swarm_resource: Vec<String>,
    /// NVIDIA's switch for [`Config::require`].
    pub disable_require: bool,
    /// How `NVIDIA_REQUIRE_*` is treated, unless `disable_require` is set.
    pub require: Require,
    /// Whether a container that requests `all` starts on a host without a GPU.
    pub no_gpu: NoGpu,
    /// Whether a container starts whose device cgroup denies the GPUs that it requests.
    pub denied_devices: DeniedDevices,
    /// Whether requests for IMEX channels are ignored.
    pub ignore_imex_channels: bool,
    /// Whether a missing device node of a requested IMEX channel is created.
    pub make_imex_channels: bool,
    /// The GPUs and features that containers may have.
    pub devices: Limits,
    /// The GPUs that MPS shares, and the limits for its clients.
    pub sharing: Sharing,
    /// The runtimes that `nvidia-container-runtime` can become, the preferred one first.
    pub runtimes: Vec<String>,
    /// The driver capabilities that containers may request.
    pub supported_driver_capabilities: Capabilities,
    /// The driver root.
    pub driver_root: HostPath,
    /// The directory that contains `dev` with the device nodes, if it is not found automatically.
    pub dev_root: Option<HostPath>,
    /// Additional directories with driver libraries, below the driver root.
    pub library_dirs: Vec<PathBuf>,
    /// Additional driver files, below the driver root, for every container with GPUs.
    pub driver_files: Vec<PathBuf>,
    /// The directory with the sockets of the MPS control daemon, below the driver root, if it is configured.
    pub mps_directory: Option<PathBuf>,
    /// The linker cache that lists the driver's libraries, below the driver root; by default /etc/ld.so.cache.
    pub ldcache: Option<HostPath>,
    /// Whether the hook loads missing modules and creates missing device nodes.
    pub load_kmods: bool,
    /// Whether a newer libcuda in the image is used.
    pub cuda_compat: bool,
    /// Whether device rules are added to the container's cgroup.
    pub edit_cgroups: bool,
    /// Which processes can open the device nodes of a container.
    pub device_node_access: NodeAccess,
    /// The user that calls NVML; by default [`crate::inventory::identity`] chooses one.
    pub user: Option<UserSpec>,
    /// The log file.
    pub debug: Option<HostPath>,
    /// The time limit for NVML.
    pub nvml_timeout: Duration,
}

impl Config {
    /// Returns how `NVIDIA_REQUIRE_*` is treated. Either of the two keys can turn it off.
    #[must_use]
    pub fn requirements(&self) -> Require {
        if self.disable_require {
            Require::Off
        } else {
            self.require
        }
    }
}

/// How the requirements of an image are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Require {
    /// A requirement that is not met keeps the container from starting.
    Enforce,
    /// A requirement that is not met is reported, and the container starts.
    Warn,
    /// Requirements are ignored.
    Off,
}

/// Whether a container that requests `all` starts on a host without a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoGpu {
    /// The container does not start.
    Error,
    /// The container starts without GPUs, which a finding reports.
    Start,
}

/// Whether a container starts whose device cgroup denies the GPUs that it requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeniedDevices {
    /// The container does not start.
    Error,
    /// The container starts with GPUs that it cannot open, which a finding reports.
    Start,
}

/// Which processes can open the device nodes of a container if a group owns the nodes of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeAccess {
    /// All processes of the container. The device cgroup keeps other containers from the devices.
    Container,
    /// Those that can open the host's nodes.
    Host,
}

/// The table `[devices]`: the GPUs that containers may have, as entries of [`crate::limit_entry`], and the denied features.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The only devices that containers may have; empty for all
    pub allow: Vec<String>,
    /// Devices that containers may not have, even if `allow` lists them
    pub deny: Vec<String>,
    /// Features that containers may not have
    pub denied_features: Features,
}

impl Limits {
    /// Whether containers may have every GPU.
    #[must_use]
    pub const fn permit_all_gpus(&self) -> bool {
        self.allow.is_empty() && self.deny.is_empty()
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            file: None,
            accept_envvar_when_unprivileged: true,
            accept_volume_mounts: false,
            swarm_resource: Vec::new(),
            disable_require: false,
            require: Require::Enforce,
            no_gpu: NoGpu::Error,
            denied_devices: DeniedDevices::Error,
            ignore_imex_channels: false,
            make_imex_channels: true,
            devices: Limits::default(),
            sharing: Sharing::default(),
            runtimes: ["runc", "crun"].map(str::to_owned).into(),
            supported_driver_capabilities: Capabilities::new(&Capability::ALL),
            driver_root: HostPath::new("/"),
            dev_root: None,
            library_dirs: Vec::new(),
            driver_files: Vec::new(),
            mps_directory: None,
            ldcache: None,
            load_kmods: true,
            cuda_compat: true,
            edit_cgroups: true,
            device_node_access: NodeAccess::Container,
            user: None,
            debug: None,
            nvml_timeout: Duration::from_secs(30),
        }
    }
}

/// Parses the text of a file. `path` is only used in messages.
///
/// # Errors
/// If the text is not TOML, or a key has an invalid value. The error names the file, the line, the key and the allowed values.
pub fn parse(text: &str, path: &Path) -> Result<(Config, Vec<Finding>)> {
    let mut config = Config::default();
    let findings = parse_into(&mut config, &mut (), text, path)?;
    Ok((config, findings))
}

/// Parses the text of a file as [`parse`] does, with other defaults, and with the table of the device plugin.
///
/// # Errors
/// As [`parse`].
pub fn parse_into(
    config: &mut Config,
    plugin: &mut dyn Table,
    text: &str,
    path: &Path,
) -> Result<Vec<Finding>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        failure(
            &catalog::CONFIG,
            format!(
                "{path:?} line {}: {}",
                line_of(text, at),
                error.message().replace('\n', ", ")
            ),
            hint::for_syntax(error.message()),
        )
    })?;
    let mut reader = Reader {
        text,
        path,
        plugin,
        config,
        unknown: Vec::new(),
    };
    reader.table("", table.get_ref())?;
    let mut findings = reader.findings();
    findings.extend(unheard_swarm_variables(config, path));
    Ok(findings)
}

/// Returns a finding if `swarm-resource` names a variable without the prefix. The hook ignores such variables, because the fast path
/// for containers without a request only searches for the prefix.
fn unheard_swarm_variables(config: &Config, path: &Path) -> Option<Finding> {
    let unheard = config
        .swarm_resource
        .iter()
        .find(|name| !name.starts_with(SWARM_PREFIX))?;
    Some(Finding::new(
        &catalog::SWARM_RESOURCE,
        format!(
            "{path:?}: swarm-resource contains {unheard:?}, which does not begin with {SWARM_PREFIX}"
        ),
        format!(
            "name the resource in Docker so that its variable begins with {SWARM_RESOURCE_PREFIX}"
        ),
    ))
}

/// Returns the number of the line that contains the byte `at`, starting at 1.
fn line_of(text: &str, at: usize) -> usize {
    let before = text.as_bytes().get(..at).unwrap_or_default();
    before.split(|byte| *byte == b'\n').count()
}

/// The table of the device plugin, which knows its keys. The hook accepts all names in it that are not its own keys.
const PLUGIN: &str = "kubelet-plugin";
/// The keys that the hook and the device plugin have, each in a table of its own.
const IN_BOTH: [&str; 1] = ["nvml-timeout"];

/// The program that reads the table `[kubelet-plugin]`.
pub trait Table {
    /// Returns the names of its keys; `None` if this program does not read the table.
    fn keys(&self) -> Option<Vec<&'static str>> {
        None
    }

    /// Sets a key.
    ///
    /// # Errors
    /// The allowed values.
    fn set(&mut self, _key: &str, _value: &DeValue<'_>) -> Result<(), String> {
        Ok(())
    }
}

/// The hook does not read it.
impl Table for () {}

struct Reader<'a> {
    text: &'a str,
    path: &'a Path,
    config: &'a mut Config,
    plugin: &'a mut dyn Table,
    /// Each key, and the byte at which it starts
    unknown: Vec<(String, usize)>,
}

impl Reader<'_> {
    fn table(&mut self, prefix: &str, table: &DeTable<'_>) -> Result<()> {
        for (name, value) in table {
            let (name, at) = (name.get_ref(), name.span().start);
            let key = if prefix.is_empty() {
                name.to_string()
            } else {
                format!("{prefix}.{name}")
            };
            match (schema::find(&key), value.get_ref()) {
                (Some(found), value) => {
                    set(self.config, found, value)
                        .map_err(|allowed| self.invalid(found.name, at, value, &allowed))?;
                }
                (None, value) if self.is_of_plugin(&key) => {
                    self.plugin
                        .set(name, value)
                        .map_err(|allowed| self.invalid(&key, at, value, &allowed))?;
                }
                (None, DeValue::Table(below)) if schema::is_table(&key) || key == PLUGIN => {
                    self.table(&key, below)?
                }
                (None, _)
                    if prefix == PLUGIN
                        && self.plugin.keys().is_none()
                        && !is_key_of_hook(name) => {}
                (None, _) => self.unknown.push((key, at)),
            }
        }
        Ok(())
    }

    fn invalid(&self, key: &str, at: usize, value: &DeValue<'_>, allowed: &str) -> anyhow::Error {
        let line = line_of(self.text, at);
        failure(
            &catalog::CONFIG,
            format!(
                "{:?} line {line}: {key} has an invalid value; it must be {allowed}",
                self.path
            ),
            hint::for_value(last(key), value, allowed),
        )
    }

    /// Whether this program reads the table of the plugin, and knows the key.
    fn is_of_plugin(&self, key: &str) -> bool {
        self.plugin_keys().any(|known| known == key)
    }

    fn plugin_keys(&self) -> impl Iterator<Item = String> {
        let keys = self.plugin.keys().unwrap_or_default();
        keys.into_iter().map(|key| format!("{PLUGIN}.{key}"))
    }

    /// Returns the known key with the most similar name, if one is similar enough.
    fn nearest(&self, key: &str) -> Option<String> {
        let of_plugin = Vec::from_iter(self.plugin_keys());
        let mut known: Vec<&str> = schema::KEYS.iter().map(|key| key.name).collect();
        known.push(PLUGIN);
        known.extend(of_plugin.iter().map(String::as_str));
        Some(nearest_by(last(key), known, last)?.to_owned())
    }

    fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for (key, at) in self.unknown.iter().take(MAX_UNKNOWN) {
            let fix = match self.nearest(key) {
                Some(known) => format!("did you mean {known}?"),
                None => "remove the key; oci-nvidia-hook.toml(5) lists the known keys".to_owned(),
            };
            let line = line_of(self.text, *at);
            let what = format!("{:?} line {line}: unknown key {key:?}", self.path);
            findings.push(Finding::new(&catalog::UNKNOWN_KEY, what, fix));
        }
        findings
    }
}

/// Returns whether only the hook has a key with this name, in some table, and the key has an effect.
fn is_key_of_hook(name: &str) -> bool {
    let has_name = |key: &Key| last(key.name) == name && !matches!(key.meaning, Meaning::Unused(_));
    !IN_BOTH.contains(&name) && schema::KEYS.iter().any(has_name)
}

/// Stores a value. The error says which values are allowed.
fn set(config: &mut Config, key: &Key, value: &DeValue<'_>) -> Result<(), String> {
    let allowed = || key.meaning.allowed().to_owned();
    match (key.meaning, value) {
        (Meaning::Unused(_), _) => {}
        (Meaning::Bool(set), DeValue::Boolean(value)) => set(config, *value),
        (Meaning::Text(set), DeValue::String(value)) => set(config, value)?,
        (Meaning::Texts(set), DeValue::Array(values)) => {
            let values = value::texts(values).ok_or_else(allowed)?;
            set(config, values.into_iter().map(str::to_owned).collect())?;
        }
        (Meaning::Seconds(set), DeValue::Integer(value)) => {
            set(config, value::seconds(value).ok_or_else(allowed)?);
        }
        (Meaning::Percent(set), DeValue::Integer(value)) => {
            set(config, value::percent(value).ok_or_else(allowed)?);
        }
        _ => return Err(allowed()),
    }
    Ok(())
}

/// Returns the part of a key after the last dot.
fn last(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::report::render;
    use proptest::prelude::*;

    const SHIPPED: &str = include_str!("../../../../config/config.toml");

    fn parsed(text: &str) -> Result<(Config, Vec<Finding>)> {
        parse(text, Path::new("/c.toml"))
    }

    #[test]
    fn deny_lists_gpus_and_features() {
        let (config, _) = parsed("[devices]\ndeny = [\"0\", \"gds\", \"nvswitch\"]").unwrap();
        assert_eq!(
            (config.devices.deny, config.devices.denied_features.names()),
            (
                vec!["0".to_owned()],
                vec!["gds".to_owned(), "nvswitch".to_owned()]
            )
        );
        for wrong in ["deny = [\"GDS\"]", "allow = [\"gds\"]"] {
            assert!(parsed(&format!("[devices]\n{wrong}")).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_hook_accepts_the_settings_of_the_plugin() {
        for text in [
            "replicas = \"many\"",
            "replica = 2",
            "new = { x = 1 }",
            "nvml-timeout = 0",
        ] {
            let found = parsed(&format!("[kubelet-plugin]\n{text}\n")).unwrap();
            assert_eq!(found, (Config::default(), Vec::new()), "{text}");
        }
        let (_, findings) = parsed("kubelet-plugin = 1").unwrap();
        assert!(
            findings[0].what.contains("unknown key \"kubelet-plugin\""),
            "{findings:?}"
        );
    }

    #[test]
    fn a_key_in_the_wrong_table_is_unknown() {
        for (text, unknown, known) in [
            (
                "[oci-nvidia-hook]\nrequire = \"warn\"\ndisable-require = true",
                "line 3: unknown key \"oci-nvidia-hook.disable-require\"",
                "did you mean disable-require?",
            ),
            (
                "no-cgroups = true",
                "line 1: unknown key \"no-cgroups\"",
                "did you mean nvidia-container-cli.no-cgroups?",
            ),
            (
                "[nvidia-container-cli]\ndeny = [\"0\"]",
                "line 2: unknown key \"nvidia-container-cli.deny\"",
                "did you mean devices.deny?",
            ),
            // The hook does not know the other keys of this table.
            (
                "[kubelet-plugin]\nreplicas = 2\nno-cgroups = true",
                "line 3: unknown key \"kubelet-plugin.no-cgroups\"",
                "did you mean nvidia-container-cli.no-cgroups?",
            ),
        ] {
            let (_, findings) = parsed(text).unwrap();
            assert_eq!(findings.len(), 1, "{findings:?}");
            assert!(findings[0].what.ends_with(unknown), "{findings:?}");
            assert_eq!(findings[0].fix, known, "{text}");
        }
    }

    #[test]
    fn an_empty_path_is_no_path() {
        let text = "[nvidia-container-cli]\nroot = \"\"\nldcache = \"\"\ndebug = \"\"\n[driver]\ndev-root = \"\"\n";
        assert_eq!(parsed(text).unwrap().0, Config::default());
    }

    #[test]
    fn the_shipped_file_is_the_default() {
        assert_eq!(parsed(SHIPPED).unwrap(), (Config::default(), Vec::new()));
    }

    #[test]
    fn the_shipped_files_comments_are_true() {
        let lines = SHIPPED.lines().map(|line| match line.strip_prefix('#') {
            Some(setting) if !setting.starts_with(' ') && !setting.is_empty() => setting,
            _ => line,
        });
        let text = lines.collect::<Vec<_>>().join("\n");
        let (_, findings) = parsed(&text).unwrap();
        assert_eq!(findings, Vec::new(), "{text}");
    }

    #[test]
    fn what_nvidias_tools_write_is_understood() {
        let (config, findings) = parsed(include_str!(
            "../../../../tests/fixtures/config/nvidia-ctk.toml"
        ))
        .unwrap();
        assert_eq!(findings, Vec::new());
        assert_eq!(
            config.user,
            Some(UserSpec {
                user: "root".into(),
                group: Some("video".into())
            })
        );
        assert!(config.edit_cgroups);
        assert_eq!(config.swarm_resource, ["DOCKER_RESOURCE_GPU"]);
    }

    #[test]
    fn values_arrive() {
        let (config, findings) = parsed(
            "\u{feff}accept-nvidia-visible-devices-envvar-when-unprivileged = false\r\n\
             supported-driver-capabilities = \"compute, utility\"\r\n\
             [nvidia-container-cli]\r\nroot = \"/run/nvidia/driver\"\r\nno-cgroups = true\r\nuser = \"\"\r\n\
             debug = \"/dev/null\"\r\n[oci-nvidia-hook]\r\nnvml-timeout = 7\r\nrequire = \"warn\"\r\n\
             denied-devices = \"start\"\r\n\
             [devices]\r\nallow = [\"0\", \"GPU-x*\"]\r\n\
             [sharing]\r\nmps-gpus = [\"0\", \"all\"]\r\nmps-memory-limit = \"8G\"\r\nmps-thread-percentage = 25\r\n\
             [nvidia-container-runtime]\r\nruntimes = [\"/opt/crun\", \"runc\"]\r\n\
             [kubelet-plugin]\r\nreplicas = 2\r\n",
        )
        .unwrap();
        assert_eq!(findings, Vec::new());
        assert_eq!(
            config,
            Config {
                accept_envvar_when_unprivileged: false,
                supported_driver_capabilities: Capabilities::new(&[
                    Capability::Compute,
                    Capability::Utility
                ]),
                driver_root: HostPath::new("/run/nvidia/driver"),
                edit_cgroups: false,
                nvml_timeout: Duration::from_secs(7),
                require: Require::Warn,
                denied_devices: DeniedDevices::Start,
                runtimes: vec!["/opt/crun".to_owned(), "runc".to_owned()],
                devices: Limits {
                    allow: vec!["0".into(), "GPU-x*".into()],
                    ..Limits::default()
                },
                sharing: Sharing {
                    mps_gpus: vec!["0".to_owned(), "all".to_owned()],
                    limits: ClientLimits {
                        memory_limit_mib: Some(8192),
                        thread_percentage: Some(25),
                    },
                },
                ..Config::default()
            }
        );
    }

    #[test]
    fn wrong_values_are_named_with_their_line() {
        for (text, says) in [
            ("a = ", "\"/c.toml\" line 1: "),
            ("\n[nvidia-container-cli\n", "\"/c.toml\" line 2: "),
            ("a = 1\na = 2\n", "line 2: duplicate key"),
            (
                "[nvidia-container-cli]\nno-cgroups = \"yes\"",
                "line 2: nvidia-container-cli.no-cgroups has an invalid value; it must be true or false",
            ),
            (
                "[nvidia-container-cli]\n\nroot = 3",
                "line 3: nvidia-container-cli.root has an invalid value",
            ),
            (
                "[nvidia-container-cli]\nroot = \"x\"",
                "it must be an absolute path",
            ),
            (
                "[nvidia-container-cli]\nuser = \"a:b:c\"",
                "it must be USER or USER:GROUP",
            ),
            (
                "[devices]\nallow = \"0\"",
                "it must be a list of strings in quotes",
            ),
            (
                "[devices]\ndeny = [0]",
                "it must be a list of strings in quotes",
            ),
            (
                "[devices]\nallow = [\"*\"]\ndeny = [\"0\", \"1,2\"]",
                "line 3: devices.deny has an invalid value",
            ),
            (
                "[devices]\nallow = [\"H100\"]",
                "\"H100\" is not a valid entry; write an index (0), a UUID",
            ),
            (
                "[oci-nvidia-hook]\nrequire = \"maybe\"",
                "it must be \"enforce\", \"warn\" or \"off\"",
            ),
            (
                "[oci-nvidia-hook]\ndevice-node-access = \"all\"",
                "it must be \"container\" or \"host\"",
            ),
            (
                "[oci-nvidia-hook]\nno-gpu = true",
                "it must be a string in quotes",
            ),
            (
                "[oci-nvidia-hook]\ndenied-devices = \"warn\"",
                "it must be \"error\" or \"start\"",
            ),
            (
                "[oci-nvidia-hook]\nno-gpu = \"ignore\"",
                "it must be \"error\" or \"start\"",
            ),
            (
                "[oci-nvidia-hook]\nnvml-timeout = 0",
                "it must be a number of seconds from 1 to 600",
            ),
            (
                "[sharing]\nmps-memory-limit = \"80 GB\"",
                "it must be an amount of memory, such as 8G or 512M",
            ),
            (
                "[sharing]\nmps-gpus = [\"0\", \"H100\"]",
                "and \"H100\" is not a valid entry; write \"all\", or ",
            ),
            (
                "[sharing]\nmps-thread-percentage = 101",
                "it must be a number from 1 to 100",
            ),
            (
                "supported-driver-capabilities = \"compute,typo\"",
                "\"typo\"",
            ),
        ] {
            let text = render(&parsed(text).unwrap_err());
            assert!(text.contains(says), "{text}");
            assert_eq!(text.lines().count(), 2, "{text}");
        }
    }

    #[test]
    fn either_key_turns_requirements_off() {
        for (text, require) in [
            (
                "disable-require = true\n[oci-nvidia-hook]\nrequire = \"enforce\"",
                Require::Off,
            ),
            (
                "disable-require = false\n[oci-nvidia-hook]\nrequire = \"off\"",
                Require::Off,
            ),
            ("[oci-nvidia-hook]\nrequire = \"warn\"", Require::Warn),
        ] {
            assert_eq!(parsed(text).unwrap().0.requirements(), require, "{text}");
        }
    }

    #[test]
    fn unknown_keys_are_warnings() {
        for (text, says, fix) in [
            (
                "[nvidia-container-cli]\nno-cgroup = true",
                "line 2: unknown key \"nvidia-container-cli.no-cgroup\"",
                "no-cgroups?",
            ),
            (
                "[elsewhere]\nx = 1",
                "unknown key \"elsewhere\"",
                "remove the key",
            ),
        ] {
            let (config, findings) = parsed(text).unwrap();
            assert_eq!(config, Config::default());
            assert!(
                findings[0].what.contains(says) && findings[0].fix.contains(fix),
                "{findings:?}"
            );
        }
    }

    #[test]
    fn swarm_variables_that_would_not_be_heard_are_named() {
        let (config, findings) =
            parsed("swarm-resource = \"DOCKER_RESOURCE_GPU, MY_GPU\"").unwrap();
        assert_eq!(config.swarm_resource, ["DOCKER_RESOURCE_GPU", "MY_GPU"]);
        assert!(findings[0].what.contains("\"MY_GPU\""), "{findings:?}");
    }

    proptest! {
        #[test]
        fn never_panics(text in ".{0,200}") {
            parsed(&text).ok();
        }

        #[test]
        fn never_panics_on_a_damaged_file(at in 0..SHIPPED.len(), with in any::<char>()) {
            let mut text: Vec<char> = SHIPPED.chars().collect();
            if let Some(c) = text.get_mut(at) {
                *c = with;
            }
            parsed(&text.into_iter().collect::<String>()).ok();
        }
    }
}
