//! The table of all keys of config.toml, and the functions that set them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base::paths::HostPath;

use super::{Config, DeniedDevices, NoGpu, NodeAccess, Require, UserSpec, sharing};
use crate::capability::Capabilities;
use crate::feature::Feature;
use crate::limit_entry;

/// The type of a key, and the function that sets it. The error of a setter describes the allowed values.
#[derive(Clone, Copy, Debug)]
pub enum Meaning {
    /// A boolean
    Bool(fn(&mut Config, bool)),
    /// A string
    Text(fn(&mut Config, &str) -> Result<(), String>),
    /// A list of strings
    Texts(fn(&mut Config, Vec<String>) -> Result<(), String>),
    /// Seconds from 1 to 600
    Seconds(fn(&mut Config, Duration)),
    /// A percentage from 1 to 100
    Percent(fn(&mut Config, u8)),
    /// A key of NVIDIA's stack that has no effect here, with the reason. It is accepted without a warning, so that both programs can
    /// share a file.
    Unused(&'static str),
}

impl Meaning {
    /// Describes the values of a key, for errors.
    pub(super) const fn allowed(self) -> &'static str {
        match self {
            Bool(_) => "true or false",
            Text(_) => "a string in quotes",
            Texts(_) => "a list of strings in quotes",
            Seconds(_) => "a number of seconds from 1 to 600",
            Percent(_) => "a number from 1 to 100",
            Unused(_) => "any value",
        }
    }
}

/// A key and its meaning.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// `table.key`; with a final dot, all keys of that table
    pub name: &'static str,
    /// The type and the setter
    pub meaning: Meaning,
}

use Meaning::{Bool, Percent, Seconds, Text, Texts, Unused};

const fn key(name: &'static str, meaning: Meaning) -> Key {
    Key { name, meaning }
}

const WRAPPER: &str = "the runtime of oci-nvidia-hook-compat has one mode";
const ONE_BINARY: &str = "no other program is run";

/// The keys of NVIDIA Container Toolkit 1.20, and the hook's own keys.
pub const KEYS: &[Key] = &[
    key(
        "accept-nvidia-visible-devices-envvar-when-unprivileged",
        Bool(|c, v| c.accept_envvar_when_unprivileged = v),
    ),
    key(
        "accept-nvidia-visible-devices-as-volume-mounts",
        Bool(|c, v| c.accept_volume_mounts = v),
    ),
    key("supported-driver-capabilities", Text(capabilities)),
    key("disable-require", Bool(|c, v| c.disable_require = v)),
    key("swarm-resource", Text(swarm_resource)),
    key(
        "nvidia-container-cli.root",
        Text(|c, v| path(v).map(|path| c.driver_root = path.unwrap_or_else(|| HostPath::new("/")))),
    ),
    key(
        "nvidia-container-cli.ldcache",
        Text(|c, v| path(v).map(|path| c.ldcache = path)),
    ),
    key(
        "nvidia-container-cli.no-cgroups",
        Bool(|c, v| c.edit_cgroups = !v),
    ),
    key("nvidia-container-cli.user", Text(user)),
    key("nvidia-container-cli.debug", Text(debug)),
    key(
        "nvidia-container-cli.load-kmods",
        Bool(|c, v| c.load_kmods = v),
    ),
    key("nvidia-container-cli.path", Unused(ONE_BINARY)),
    key("nvidia-container-cli.environment", Texts(environment)),
    key(
        "nvidia-container-cli.ldconfig",
        Unused("the linker cache is written without ldconfig"),
    ),
    key(
        "nvidia-container-cli.no-pivot",
        Unused("the linker cache is written without ldconfig"),
    ),
    key(
        "nvidia-container-cli.cuda-compat-mode",
        Unused("the key belongs in nvidia-container-runtime.modes.legacy"),
    ),
    key(
        "nvidia-container-runtime.modes.legacy.cuda-compat-mode",
        Text(cuda_compat),
    ),
    key(
        "nvidia-container-runtime-hook.",
        Unused("there is one mode"),
    ),
    key(
        "nvidia-container-runtime.runtimes",
        Texts(|c, v| {
            c.runtimes = v;
            Ok(())
        }),
    ),
    key("nvidia-container-runtime.", Unused(WRAPPER)),
    key("nvidia-ctk.", Unused(ONE_BINARY)),
    key(
        "features.ignore-imex-channel-requests",
        Bool(|c, v| c.ignore_imex_channels = v),
    ),
    key(
        "features.disable-imex-channel-creation",
        Bool(|c, v| c.make_imex_channels = !v),
    ),
    key(
        "features.",
        Unused(
            "the other features make NVIDIA's stack less secure, or are for modes that do not exist here",
        ),
    ),
    key("devices.allow", Texts(|c, v| add(&mut c.devices.allow, v))),
    key("devices.deny", Texts(deny)),
    key("sharing.mps-gpus", Texts(sharing::add_gpus)),
    key("sharing.mps-memory-limit", Text(sharing::set_memory_limit)),
    key(
        "sharing.mps-thread-percentage",
        Percent(sharing::set_thread_percentage),
    ),
    key(
        "driver.dev-root",
        Text(|c, v| path(v).map(|path| c.dev_root = path)),
    ),
    key(
        "driver.library-dirs",
        Texts(|c, v| add_paths(&mut c.library_dirs, v)),
    ),
    key(
        "driver.files",
        Texts(|c, v| add_paths(&mut c.driver_files, v)),
    ),
    key("oci-nvidia-hook.require", Text(require)),
    key("oci-nvidia-hook.no-gpu", Text(no_gpu)),
    key("oci-nvidia-hook.denied-devices", Text(denied_devices)),
    key(
        "oci-nvidia-hook.device-node-access",
        Text(device_node_access),
    ),
    key(
        "oci-nvidia-hook.nvml-timeout",
        Seconds(|c, v| c.nvml_timeout = v),
    ),
];

/// Returns the row of a key, or the row of its whole table.
#[must_use]
pub fn find(name: &str) -> Option<&'static Key> {
    let exact = KEYS.iter().find(|key| key.name == name);
    if exact.is_some() || is_table(name) {
        return exact; // if some keys of a table have their own rows, the table is read key by key
    }
    let table = name.split('.').next();
    KEYS.iter()
        .find(|key| key.name.ends_with('.') && key.name.strip_suffix('.') == table)
}

/// Whether a table has keys with their own rows.
#[must_use]
pub(crate) fn is_table(name: &str) -> bool {
    let mut below = KEYS
        .iter()
        .filter_map(|key| key.name.strip_prefix(name)?.strip_prefix('.'));
    below.any(|rest| !rest.is_empty())
}

/// Parses a path. Returns `None` for an empty string, because NVIDIA's generated file contains empty values for unset keys.
fn path(value: &str) -> Result<Option<HostPath>, String> {
    match value {
        "" => Ok(None),
        path if Path::new(path).is_absolute() => Ok(Some(HostPath::new(path))),
        _ => Err("an absolute path".to_owned()),
    }
}

/// Appends entries: the lists of drop-in files are added to the lists of config.toml.
fn add(list: &mut Vec<String>, more: Vec<String>) -> Result<(), String> {
    if let Some((entry, why)) = more
        .iter()
        .find_map(|entry| Some((entry, limit_entry::check(entry).err()?)))
    {
        return Err(format!(
            "a list of GPUs, and {entry:?} is not a valid entry; write {why}"
        ));
    }
    list.extend(more);
    Ok(())
}

/// Appends entries of `deny`, which can also be names of features.
fn deny(config: &mut Config, entries: Vec<String>) -> Result<(), String> {
    let (features, gpus): (Vec<_>, Vec<_>) = entries
        .into_iter()
        .partition(|entry| Feature::from_name(entry).is_some());
    features
        .iter()
        .filter_map(|name| Feature::from_name(name))
        .for_each(|feature| config.devices.denied_features.insert(feature));
    add(&mut config.devices.deny, gpus)
}

fn add_paths(list: &mut Vec<PathBuf>, more: Vec<String>) -> Result<(), String> {
    if more.iter().any(|path| !Path::new(path).is_absolute()) {
        return Err("a list of absolute paths".to_owned());
    }
    list.extend(more.into_iter().map(PathBuf::from));
    Ok(())
}

fn debug(config: &mut Config, value: &str) -> Result<(), String> {
    config.debug = path(value)?.filter(|path| path.as_path() != Path::new("/dev/null"));
    Ok(())
}

/// Parses the environment variables for nvidia-container-cli. Only the directory of the MPS daemon has an effect here, because that
/// program is not executed.
fn environment(config: &mut Config, variables: Vec<String>) -> Result<(), String> {
    const MPS: &str = "CUDA_MPS_PIPE_DIRECTORY";
    for variable in &variables {
        let Some((name, value)) = variable.split_once('=') else {
            return Err("a list of NAME=VALUE in quotes".to_owned());
        };
        if name == MPS {
            let directory = Path::new(value);
            if !directory.is_absolute() || base::paths::ContainerPath::new(directory).is_none() {
                return Err(format!(
                    "a list of NAME=VALUE in quotes, and {MPS} an absolute path without \"..\""
                ));
            }
            config.mps_directory = Some(directory.to_owned());
        }
    }
    Ok(())
}

fn user(config: &mut Config, value: &str) -> Result<(), String> {
    config.user = UserSpec::parse(value)?;
    Ok(())
}

fn require(config: &mut Config, value: &str) -> Result<(), String> {
    config.require = match value {
        "enforce" => Require::Enforce,
        "warn" => Require::Warn,
        "off" => Require::Off,
        _ => return Err("\"enforce\", \"warn\" or \"off\"".to_owned()),
    };
    Ok(())
}

fn no_gpu(config: &mut Config, value: &str) -> Result<(), String> {
    config.no_gpu = match value {
        "error" => NoGpu::Error,
        "start" => NoGpu::Start,
        _ => return Err("\"error\" or \"start\"".to_owned()),
    };
    Ok(())
}

fn denied_devices(config: &mut Config, value: &str) -> Result<(), String> {
    config.denied_devices = match value {
        "error" => DeniedDevices::Error,
        "start" => DeniedDevices::Start,
        _ => return Err("\"error\" or \"start\"".to_owned()),
    };
    Ok(())
}

fn device_node_access(config: &mut Config, value: &str) -> Result<(), String> {
    config.device_node_access = match value {
        "container" => NodeAccess::Container,
        "host" => NodeAccess::Host,
        _ => return Err("\"container\" or \"host\"".to_owned()),
    };
    Ok(())
}

fn cuda_compat(config: &mut Config, value: &str) -> Result<(), String> {
    // NVIDIA's three modes have the same result here: the order of the libraries in the linker cache.
    config.cuda_compat = match value {
        "ldconfig" | "mount" | "hook" | "" => true,
        "disabled" => false,
        _ => return Err("\"ldconfig\", \"mount\", \"hook\" or \"disabled\"".to_owned()),
    };
    Ok(())
}

fn swarm_resource(config: &mut Config, value: &str) -> Result<(), String> {
    config.swarm_resource = value
        .split(',')
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
        .collect();
    Ok(())
}

fn capabilities(config: &mut Config, value: &str) -> Result<(), String> {
    config.supported_driver_capabilities = Capabilities::supported(value)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_tables_are_found() {
        for name in [
            "disable-require",
            "nvidia-container-cli.root",
            "nvidia-ctk",
            "features.x",
            "nvidia-container-runtime.modes.cdi",
        ] {
            assert!(find(name).is_some(), "{name}");
        }
        assert!(
            find("root").is_none()
                && find("nvidia-container-cli").is_none()
                && find("features").is_none()
        );
        assert!(
            is_table("nvidia-container-cli")
                && is_table("oci-nvidia-hook")
                && !is_table("elsewhere")
        );
    }
}
