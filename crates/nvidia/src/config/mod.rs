//! The administrator's config.toml: NVIDIA's file and its keys, so that an existing one keeps working, and a few keys
//! of ours. What each key means is in [`schema`]; who `user` is, in [`user`].

mod files;
mod misplaced;
pub mod schema;
pub mod user;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use toml::de::{DeTable, DeValue};

use base::nearest::nearest_by;
use base::paths::HostPath;
use base::report::{Finding, catalog, failure};

use crate::capability::{Capabilities, Capability};
pub use files::read;
use schema::{KEYS, Key, Meaning};
pub use user::{UserSpec, resolve};

/// Docker's swarm names variables so; `swarm-resource` says which of them list GPUs.
pub const SWARM_PREFIX: &str = "DOCKER_";
/// Each costs a look for its line; a file of nothing but mistakes shall not cost their square.
const MAX_UNKNOWN: usize = 16;

/// What the hook acts on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Whether `NVIDIA_VISIBLE_DEVICES` of a container that is not privileged counts.
    pub accept_envvar_when_unprivileged: bool,
    /// Whether devices may be asked for by volume mounts.
    pub accept_volume_mounts: bool,
    /// Variables that replace `NVIDIA_VISIBLE_DEVICES`.
    pub swarm_resource: Vec<String>,
    /// NVIDIA's switch for [`Config::require`].
    pub disable_require: bool,
    /// What becomes of `NVIDIA_REQUIRE_*`, if the switch does not turn it off.
    pub require: Require,
    /// What becomes of a container that asks for `all` on a host without a GPU.
    pub no_gpu: NoGpu,
    /// Whether requests for IMEX channels are ignored.
    pub ignore_imex_channels: bool,
    /// Whether the node of an IMEX channel that a container asks for is made if it is missing.
    pub make_imex_channels: bool,
    /// The GPUs that containers may have.
    pub devices: Limits,
    /// The driver capabilities that containers may ask for.
    pub supported_driver_capabilities: Capabilities,
    /// The directory that is `/` for the driver.
    pub driver_root: HostPath,
    /// The directory that is `/` for its device nodes, if it is another.
    pub dev_root: Option<HostPath>,
    /// More directories to look for its libraries in, below the driver root.
    pub library_dirs: Vec<PathBuf>,
    /// More files of the driver, below the driver root, for every container with GPUs.
    pub driver_files: Vec<PathBuf>,
    /// The directory of the MPS control daemon's sockets, below the driver root, if the administrator named one.
    pub mps_directory: Option<PathBuf>,
    /// The linker cache to look the driver's libraries up in, below the driver root; by default /etc/ld.so.cache.
    pub ldcache: Option<HostPath>,
    /// Whether the hook loads modules and makes device nodes that are missing.
    pub load_kmods: bool,
    /// Whether a newer libcuda that the image brings is used.
    pub cuda_compat: bool,
    /// Whether device rules are added to the container's cgroup.
    pub edit_cgroups: bool,
    /// Who asks NVML; by default [`crate::inventory::identity`] decides.
    pub user: Option<UserSpec>,
    /// The log file.
    pub debug: Option<HostPath>,
    /// How long NVML may take.
    pub nvml_timeout: Duration,
}

impl Config {
    /// What becomes of `NVIDIA_REQUIRE_*`: either key turns it off.
    #[must_use]
    pub fn requirements(&self) -> Require {
        if self.disable_require { Require::Off } else { self.require }
    }
}

/// What becomes of an image's requirements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Require {
    /// One that is not met stops the container.
    Enforce,
    /// It is said, and the container starts.
    Warn,
    /// They are not looked at.
    Off,
}

/// What becomes of a container that asks for `all` on a host without a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoGpu {
    /// It does not start.
    Error,
    /// It starts without GPUs, and a finding says so.
    Start,
}

/// Which GPUs containers may have: entries of [`crate::limit_entry`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The only devices that containers may have; empty for all
    pub allow: Vec<String>,
    /// Devices that containers may not have, even if `allow` has them
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
            supported_driver_capabilities: Capabilities::of(&Capability::ALL),
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
        }
    }
}

/// Parses the text of `path`, which is only named in messages.
///
/// # Errors
/// If it is no TOML, or a key has a value that it cannot have: with file, line, key, and what it can have.
pub fn parse(text: &str, path: &Path) -> Result<(Config, Vec<Finding>)> {
    let mut config = Config::default();
    let findings = parse_into(&mut config, text, path)?;
    Ok((config, findings))
}

fn parse_into(config: &mut Config, text: &str, path: &Path) -> Result<Vec<Finding>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        failure(
            &catalog::CONFIG,
            format!("{path:?} line {}: {}", line_of(text, at), error.message().replace('\n', ", ")),
            "the file must be TOML: one key = value on each line",
        )
    })?;
    let mut reader = Reader { text, path, config, unknown: Vec::new() };
    reader.table("", table.get_ref())?;
    let mut findings = reader.findings();
    findings.extend(unheard_swarm_variables(config, path));
    Ok(findings)
}

/// A container is only looked at more closely if it has a variable that Docker's swarm could have set.
fn unheard_swarm_variables(config: &Config, path: &Path) -> Option<Finding> {
    let unheard = config.swarm_resource.iter().find(|name| !name.starts_with(SWARM_PREFIX))?;
    Some(Finding::of(
        &catalog::SWARM_RESOURCE,
        format!("{path:?}: swarm-resource has {unheard:?}, which does not begin with {SWARM_PREFIX}"),
        format!("name the resource in Docker so that its variable begins with {SWARM_PREFIX}RESOURCE_"),
    ))
}

/// 1 for the first line.
fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes().get(..at).unwrap_or_default().iter().filter(|byte| **byte == b'\n').count() + 1
}

struct Reader<'a> {
    text: &'a str,
    path: &'a Path,
    config: &'a mut Config,
    /// (key, where it starts)
    unknown: Vec<(String, usize)>,
}

impl Reader<'_> {
    fn table(&mut self, prefix: &str, table: &DeTable<'_>) -> Result<()> {
        for (name, value) in table {
            let key =
                if prefix.is_empty() { name.get_ref().to_string() } else { format!("{prefix}.{}", name.get_ref()) };
            match (schema::find(&key), value.get_ref()) {
                (Some(found), value) => self.key(found, value, name.span().start)?,
                (None, DeValue::Table(below)) if schema::is_table(&key) => self.table(&key, below)?,
                (None, value) => match misplaced::place_of(prefix, name.get_ref(), value) {
                    Some(place) => return Err(misplaced::error(self.text, self.path, &key, place, name.span().start)),
                    None => self.unknown.push((key, name.span().start)),
                },
            }
        }
        Ok(())
    }

    fn key(&mut self, key: &Key, value: &DeValue<'_>, at: usize) -> Result<()> {
        let set = match (key.meaning, value) {
            (Meaning::Unused(_), _) => Ok(()),
            (Meaning::Bool(set), DeValue::Boolean(value)) => {
                set(self.config, *value);
                Ok(())
            }
            (Meaning::Bool(_), _) => Err("true or false".to_owned()),
            (Meaning::Text(set), DeValue::String(value)) => set(self.config, value),
            (Meaning::Text(_), _) => Err("a text in quotes".to_owned()),
            (Meaning::Texts(set), DeValue::Array(values)) => {
                let texts = values.iter().map(|value| value.get_ref().as_str().map(str::to_owned));
                match texts.collect::<Option<Vec<_>>>() {
                    Some(texts) => set(self.config, texts),
                    None => Err("a list of texts in quotes".to_owned()),
                }
            }
            (Meaning::Texts(_), _) => Err("a list of texts in quotes".to_owned()),
            (Meaning::Seconds(set), DeValue::Integer(value)) => {
                let seconds = u64::from_str_radix(value.as_str(), value.radix()).ok();
                match seconds.filter(|seconds| (1..=600).contains(seconds)) {
                    Some(seconds) => {
                        set(self.config, Duration::from_secs(seconds));
                        Ok(())
                    }
                    None => Err("a number of seconds from 1 to 600".to_owned()),
                }
            }
            (Meaning::Seconds(_), _) => Err("a number of seconds from 1 to 600".to_owned()),
        };
        set.map_err(|allowed| {
            let line = line_of(self.text, at);
            failure(
                &catalog::CONFIG,
                format!("{:?} line {line}: {} has a wrong value, it must be {allowed}", self.path, key.name),
                format!("change line {line} of {:?}", self.path),
            )
        })
    }

    fn findings(&self) -> Vec<Finding> {
        let said = self.unknown.iter().take(MAX_UNKNOWN).map(|(key, at)| {
            let fix = match nearest(key) {
                Some(known) => format!("did you mean {known}?"),
                None => "remove it, or see oci-nvidia-hook's config.toml for the keys there are".to_owned(),
            };
            let what = format!("{:?} line {}: unknown key {key:?}", self.path, line_of(self.text, *at));
            Finding::of(&catalog::UNKNOWN_KEY, what, fix)
        });
        said.collect()
    }
}

/// The known key that was probably meant: one or two letters off.
fn nearest(key: &str) -> Option<&'static str> {
    let name = key.rsplit('.').next().unwrap_or(key);
    nearest_by(name, KEYS.iter().map(|key| key.name), |known| known.rsplit('.').next().unwrap_or(known))
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
        for key in KEYS.iter().filter(|key| !matches!(key.meaning, Meaning::Unused(_))) {
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
             [devices]\r\nallow = [\"0\", \"GPU-x*\"]\r\n",
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
                "line 2: nvidia-container-cli.no-cgroups has a wrong value, it must be true or false",
            ),
            ("[nvidia-container-cli]\n\nroot = 3", "line 3: nvidia-container-cli.root has a wrong value"),
            ("[nvidia-container-cli]\nroot = \"x\"", "it must be an absolute path"),
            ("[nvidia-container-cli]\nuser = \"a:b:c\"", "it must be USER or USER:GROUP"),
            ("[devices]\nallow = \"0\"", "it must be a list of texts in quotes"),
            ("[devices]\ndeny = [0]", "it must be a list of texts in quotes"),
            ("[devices]\nallow = [\"*\"]\ndeny = [\"0\", \"1,2\"]", "line 3: devices.deny has a wrong value"),
            ("[devices]\nallow = [\"H100\"]", "\"H100\" does not name one: write an index (0), a UUID"),
            ("[oci-nvidia-hook]\nrequire = \"maybe\"", "it must be \"enforce\", \"warn\" or \"off\""),
            ("[oci-nvidia-hook]\nno-gpu = true", "it must be a text in quotes"),
            ("[oci-nvidia-hook]\nno-gpu = \"ignore\"", "it must be \"error\" or \"start\""),
            ("[oci-nvidia-hook]\nnvml-timeout = 0", "it must be a number of seconds from 1 to 600"),
            ("supported-driver-capabilities = \"compute,typo\"", "\"typo\""),
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
            ("[elsewhere]\nx = 1", "unknown key \"elsewhere\"", "remove it"),
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
