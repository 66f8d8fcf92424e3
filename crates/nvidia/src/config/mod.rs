//! Reads the administrator's config.toml. The file and most keys are NVIDIA's, so that an existing file keeps working; some keys are
//! our own. [`schema`] lists the keys, and [`user`] resolves the value of `user`.

mod files;
pub mod kubelet_plugin;
mod misplaced;
pub mod schema;
pub mod user;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use toml::de::{DeArray, DeInteger, DeTable, DeValue};

use base::nearest::nearest_by;
use base::paths::HostPath;
use base::report::{Finding, catalog, failure};

use crate::capability::{Capabilities, Capability};
pub use files::{read, read_onto};
pub use kubelet_plugin::KubeletPlugin;
use schema::{Key, Keys, Meaning};
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
    /// Whether requests for IMEX channels are ignored.
    pub ignore_imex_channels: bool,
    /// Whether a missing device node of a requested IMEX channel is created.
    pub make_imex_channels: bool,
    /// The GPUs that containers may have.
    pub devices: Limits,
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
    /// The user that calls NVML; by default [`crate::inventory::identity`] chooses one.
    pub user: Option<UserSpec>,
    /// The log file.
    pub debug: Option<HostPath>,
    /// The time limit for NVML.
    pub nvml_timeout: Duration,
    /// The settings of the device plugin.
    pub kubelet_plugin: KubeletPlugin,
}

impl Config {
    /// Returns how `NVIDIA_REQUIRE_*` is treated. Either of the two keys can turn it off.
    #[must_use]
    pub fn requirements(&self) -> Require {
        if self.disable_require { Require::Off } else { self.require }
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

/// The GPUs that containers may have, as entries of [`crate::limit_entry`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The only devices that containers may have; empty for all
    pub allow: Vec<String>,
    /// Devices that containers may not have, even if `allow` lists them
    pub deny: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            accept_envvar_when_unprivileged: true,
            accept_volume_mounts: false,
            swarm_resource: Vec::new(),
            disable_require: false,
            require: Require::Enforce,
            no_gpu: NoGpu::Error,
            ignore_imex_channels: false,
            make_imex_channels: true,
            devices: Limits::default(),
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
            user: None,
            debug: None,
            nvml_timeout: Duration::from_secs(30),
            kubelet_plugin: KubeletPlugin::default(),
        }
    }
}

/// Parses the text of a file. `path` is only used in messages.
///
/// # Errors
/// If the text is not TOML, or a key has an invalid value. The error names the file, the line, the key and the allowed values.
pub fn parse(text: &str, path: &Path) -> Result<(Config, Vec<Finding>)> {
    let mut config = Config::default();
    let findings = parse_into(&mut config, schema::HOOK, text, path)?;
    Ok((config, findings))
}

fn parse_into(config: &mut Config, keys: Keys, text: &str, path: &Path) -> Result<Vec<Finding>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        failure(
            &catalog::CONFIG,
            format!("{path:?} line {}: {}", line_of(text, at), error.message().replace('\n', ", ")),
            "the file must be TOML: one key = value on each line",
        )
    })?;
    let mut reader = Reader { text, path, keys, config, unknown: Vec::new() };
    reader.table("", table.get_ref())?;
    let mut findings = reader.findings();
    findings.extend(unheard_swarm_variables(config, path));
    Ok(findings)
}

/// Returns a finding if `swarm-resource` names a variable without the prefix. The hook ignores such variables, because the fast path
/// for containers without a request only searches for the prefix.
fn unheard_swarm_variables(config: &Config, path: &Path) -> Option<Finding> {
    let unheard = config.swarm_resource.iter().find(|name| !name.starts_with(SWARM_PREFIX))?;
    Some(Finding::new(
        &catalog::SWARM_RESOURCE,
        format!("{path:?}: swarm-resource contains {unheard:?}, which does not begin with {SWARM_PREFIX}"),
        format!("name the resource in Docker so that its variable begins with {SWARM_RESOURCE_PREFIX}"),
    ))
}

/// Returns the number of the line that contains the byte `at`, starting at 1.
fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes().get(..at).unwrap_or_default().iter().filter(|byte| **byte == b'\n').count() + 1
}

struct Reader<'a> {
    text: &'a str,
    path: &'a Path,
    keys: Keys,
    config: &'a mut Config,
    /// Each key, and the byte at which it starts
    unknown: Vec<(String, usize)>,
}

impl Reader<'_> {
    fn table(&mut self, prefix: &str, table: &DeTable<'_>) -> Result<()> {
        for (name, value) in table {
            let key =
                if prefix.is_empty() { name.get_ref().to_string() } else { format!("{prefix}.{}", name.get_ref()) };
            match (schema::find(self.keys, &key), value.get_ref()) {
                (Some(found), value) => self.key(found, value, name.span().start)?,
                (None, DeValue::Table(below)) if schema::is_table(self.keys, &key) => self.table(&key, below)?,
                (None, value) => match misplaced::place_of(self.keys, prefix, name.get_ref(), value) {
                    Some(place) => return Err(misplaced::error(self.text, self.path, &key, place, name.span().start)),
                    None => self.unknown.push((key, name.span().start)),
                },
            }
        }
        Ok(())
    }

    fn key(&mut self, key: &Key, value: &DeValue<'_>, at: usize) -> Result<()> {
        self.set(key, value).map_err(|allowed| {
            let line = line_of(self.text, at);
            failure(
                &catalog::CONFIG,
                format!("{:?} line {line}: {} has an invalid value; it must be {allowed}", self.path, key.name),
                format!("correct line {line} of {:?}", self.path),
            )
        })
    }

    /// Stores a value. The error says which values are allowed.
    fn set(&mut self, key: &Key, value: &DeValue<'_>) -> Result<(), String> {
        let allowed = || key.meaning.allowed().to_owned();
        match (key.meaning, value) {
            (Meaning::Unused(_), _) => {}
            (Meaning::Bool(set), DeValue::Boolean(value)) => set(self.config, *value),
            (Meaning::Switch(set), DeValue::Boolean(value)) => set(self.config, Some(*value)),
            (Meaning::Switch(set), DeValue::String(value)) if value == "auto" => set(self.config, None),
            (Meaning::Text(set), DeValue::String(value)) => set(self.config, value)?,
            (Meaning::Texts(set), DeValue::Array(values)) => set(self.config, texts(values).ok_or_else(allowed)?)?,
            (Meaning::Seconds(set), DeValue::Integer(value)) => set(self.config, seconds(value).ok_or_else(allowed)?),
            (Meaning::Number(set), DeValue::Integer(value)) => set(self.config, number(value).ok_or_else(allowed)?)?,
            (Meaning::Numbers(set), DeValue::Array(values)) => set(self.config, numbers(values).ok_or_else(allowed)?),
            (Meaning::Resources(set), DeValue::Array(values)) => set(self.config, values)?,
            _ => return Err(allowed()),
        }
        Ok(())
    }

    fn findings(&self) -> Vec<Finding> {
        let unknown = self.unknown.iter().take(MAX_UNKNOWN).map(|(key, at)| {
            let fix = match nearest(self.keys, key) {
                Some(known) => format!("did you mean {known}?"),
                None => "remove the key; oci-nvidia-hook.toml(5) lists the known keys".to_owned(),
            };
            let what = format!("{:?} line {}: unknown key {key:?}", self.path, line_of(self.text, *at));
            Finding::new(&catalog::UNKNOWN_KEY, what, fix)
        });
        unknown.collect()
    }
}

fn texts(values: &DeArray<'_>) -> Option<Vec<String>> {
    values.iter().map(|value| value.get_ref().as_str().map(str::to_owned)).collect()
}

fn numbers(values: &DeArray<'_>) -> Option<Vec<u32>> {
    values.iter().map(|value| value.get_ref().as_integer().and_then(number)).collect()
}

fn number(value: &DeInteger<'_>) -> Option<u32> {
    u32::from_str_radix(value.as_str(), value.radix()).ok()
}

fn seconds(value: &DeInteger<'_>) -> Option<Duration> {
    number(value).filter(|seconds| (1..=600).contains(seconds)).map(|seconds| Duration::from_secs(seconds.into()))
}

/// Returns the known key with the most similar name, if one is similar enough.
fn nearest(keys: Keys, key: &str) -> Option<&'static str> {
    let name = key.rsplit('.').next().unwrap_or(key);
    nearest_by(name, schema::rows_of(keys).map(|key| key.name), |known| known.rsplit('.').next().unwrap_or(known))
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::report::render;
    use proptest::prelude::*;

    const SHIPPED: &str = include_str!("../../../../config/config.toml");

    /// As the device plugin reads it, with all keys.
    fn parsed(text: &str) -> Result<(Config, Vec<Finding>)> {
        let mut config = Config::default();
        let findings = parse_into(&mut config, schema::ALL, text, Path::new("/c.toml"))?;
        Ok((config, findings))
    }

    #[test]
    fn the_hook_ignores_the_settings_of_the_plugin() {
        let (config, findings) = parse("[kubelet-plugin]\nreplicas = \"many\"\n", Path::new("/c.toml")).unwrap();
        assert_eq!((config, findings), (Config::default(), Vec::new()));
        let (_, findings) = parse("[kubelet-plugin]\nreplica = 2\n", Path::new("/c.toml")).unwrap();
        assert!(findings[0].what.contains("unknown key \"kubelet-plugin.replica\""), "{findings:?}");
        // A lock that is appended to the file.
        let locked = "[kubelet-plugin]\naccept-nvidia-visible-devices-envvar-when-unprivileged = false\n";
        assert!(parse(locked, Path::new("/c.toml")).unwrap_err().to_string().contains("above the first table"));
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
        for key in schema::rows_of(schema::ALL).filter(|key| !matches!(key.meaning, Meaning::Unused(_))) {
            let name = key.name.rsplit('.').next().unwrap();
            assert!(text.contains(&format!("\n{name} = ")), "{name} is not in config/config.toml");
            let man = include_str!("../../../../docs/man/oci-nvidia-hook.toml.5");
            assert!(man.contains(&format!("\n.BR {name} \"")), "{name} is not in its man page");
            let page = include_str!("../../../../docs/configuration.md");
            assert!(page.contains(&format!("`{}`", key.name)), "{} is not in docs/configuration.md", key.name);
        }
    }

    #[test]
    fn what_nvidias_tools_write_is_understood() {
        let (config, findings) = parsed(include_str!("../../../../tests/fixtures/config/nvidia-ctk.toml")).unwrap();
        assert_eq!(findings, Vec::new());
        assert_eq!(config.user, Some(UserSpec { user: "root".into(), group: Some("video".into()) }));
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
             [devices]\r\nallow = [\"0\", \"GPU-x*\"]\r\n\
             [kubelet-plugin]\r\nreplicas = 2\r\nignored-xids = []\r\n\
             resources = [{ name = \"a.b/c\", model = \"*\", replicas = 3 }]\r\n",
        )
        .unwrap();
        assert_eq!(findings, Vec::new());
        assert_eq!(
            config,
            Config {
                accept_envvar_when_unprivileged: false,
                supported_driver_capabilities: Capabilities::default_set(),
                driver_root: HostPath::new("/run/nvidia/driver"),
                edit_cgroups: false,
                nvml_timeout: Duration::from_secs(7),
                require: Require::Warn,
                devices: Limits { allow: vec!["0".into(), "GPU-x*".into()], deny: Vec::new() },
                kubelet_plugin: KubeletPlugin {
                    replicas: 2,
                    ignored_xids: Vec::new(),
                    resources: vec![kubelet_plugin::ResourceRow {
                        name: "a.b/c".into(),
                        model: "*".into(),
                        replicas: Some(3),
                    }],
                    ..KubeletPlugin::default()
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
            ("[nvidia-container-cli]\n\nroot = 3", "line 3: nvidia-container-cli.root has an invalid value"),
            ("[nvidia-container-cli]\nroot = \"x\"", "it must be an absolute path"),
            ("[nvidia-container-cli]\nuser = \"a:b:c\"", "it must be USER or USER:GROUP"),
            ("[devices]\nallow = \"0\"", "it must be a list of strings in quotes"),
            ("[devices]\ndeny = [0]", "it must be a list of strings in quotes"),
            ("[devices]\nallow = [\"*\"]\ndeny = [\"0\", \"1,2\"]", "line 3: devices.deny has an invalid value"),
            ("[devices]\nallow = [\"H100\"]", "\"H100\" is not a valid entry; write an index (0), a UUID"),
            ("[oci-nvidia-hook]\nrequire = \"maybe\"", "it must be \"enforce\", \"warn\" or \"off\""),
            ("[oci-nvidia-hook]\nno-gpu = true", "it must be a string in quotes"),
            ("[oci-nvidia-hook]\nno-gpu = \"ignore\"", "it must be \"error\" or \"start\""),
            ("[oci-nvidia-hook]\nnvml-timeout = 0", "it must be a number of seconds from 1 to 600"),
            ("supported-driver-capabilities = \"compute,typo\"", "\"typo\""),
            (
                "[kubelet-plugin]\nreplicas = 0",
                "line 2: kubelet-plugin.replicas has an invalid value; it must be a number",
            ),
            ("[kubelet-plugin]\nreplicas = -1", "it must be a number"),
            ("[kubelet-plugin]\nignored-xids = [\"13\"]", "it must be a list of numbers"),
            ("[kubelet-plugin]\nresource-prefix = \"nvidia com\"", "it must be a DNS name"),
            ("[kubelet-plugin]\nmig-strategy = \"both\"", "it must be \"none\", \"single\" or \"mixed\""),
            (
                "[kubelet-plugin]\ndevice-list-strategy = [\"cdi\"]",
                "line 2: kubelet-plugin.device-list-strategy has an invalid value; it must be a list of \"envvar\", ",
            ),
            ("[kubelet-plugin]\ndevice-list-strategy = [\"host-path\", \"envvar\"]", "and \"host-path\" alone"),
            ("[kubelet-plugin]\ndevice-id-strategy = \"name\"", "it must be \"uuid\" or \"index\""),
            ("[kubelet-plugin]\nhost-path = \"x\"", "it must be an absolute path"),
            ("[kubelet-plugin]\nallocation = \"spread\"", "it must be \"distributed\" or \"packed\""),
            ("[kubelet-plugin]\nresources = [\"a\"]", "and an entry is not a table"),
            ("[kubelet-plugin]\nresources = [{ name = \"a.b/c\" }]", "and \"a.b/c\" has no model"),
            ("[kubelet-plugin]\nresources = [{ name = 1 }]", "and \"name\" has a value of the wrong type"),
            ("[kubelet-plugin]\nresources = [{ nam = \"x\" }]", "and \"nam\" is not one of name, model and replicas"),
        ] {
            let text = render(&parsed(text).unwrap_err());
            assert!(text.contains(says), "{text}");
            assert_eq!(text.lines().count(), 2, "{text}");
        }
    }

    #[test]
    fn either_key_turns_requirements_off() {
        for (text, require) in [
            ("disable-require = true\n[oci-nvidia-hook]\nrequire = \"enforce\"", Require::Off),
            ("disable-require = false\n[oci-nvidia-hook]\nrequire = \"off\"", Require::Off),
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
            ("[elsewhere]\nx = 1", "unknown key \"elsewhere\"", "remove the key"),
        ] {
            let (config, findings) = parsed(text).unwrap();
            assert_eq!(config, Config::default());
            assert!(findings[0].what.contains(says) && findings[0].fix.contains(fix), "{findings:?}");
        }
    }

    #[test]
    fn swarm_variables_that_would_not_be_heard_are_named() {
        let (config, findings) = parsed("swarm-resource = \"DOCKER_RESOURCE_GPU, MY_GPU\"").unwrap();
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
