//! The settings: config.toml, the options, and the configuration of other device plugins.
//!
//! | module | purpose |
//! |---|---|
//! | [`table`] | one row for each key of `[kubelet-plugin]`, which is also an option |
//! | [`values`], [`resources`], [`parse`] | the types of the values, and their parsers |
//! | [`xids`] | the default of one of them |
//! | [`options`] | the command line |
//! | [`follow`] | changes of the limits while the plugin runs |
//! | [`nvidia`], [`nvidia_options`], [`nvidia_file`] | the settings of NVIDIA's plugin |
//! | [`gke`] | the configuration file of GKE's plugin |
//! | [`document`], [`problems`] | the parts that these have in common |

mod document;
pub mod follow;
pub mod gke;
mod nvidia;
pub mod nvidia_file;
mod nvidia_options;
pub mod options;
mod parse;
mod problems;
pub mod resources;
pub mod table;
#[cfg(test)]
mod tests;
pub mod values;
mod xids;

use std::path::Path;

use anyhow::Result;
use base::report::Finding;
use findings::catalog;
use nvidia_host::config;

use nvidia::Inputs;
use options::Options;
pub use table::{Plugin, Settings};
use values::{DeviceListStrategy, Interface, MigStrategy};

/// Reads the settings of a command, and findings about them.
///
/// # Errors
/// If a file cannot be read, or a setting has an invalid value.
pub fn read(options: &Options) -> Result<(Settings, Vec<Finding>)> {
    let inputs = Inputs::gather(&options.given)?;
    let (from_file, mut findings) = read_file(inputs.defaults(), options.config.as_deref())?;
    let (mut settings, mut more) = layered(options, &inputs, from_file.clone(), None)?;
    if settings
        .plugin
        .device_list_strategy
        .contains(&DeviceListStrategy::HostPath)
    {
        // GKE's file has the precedence of a configuration file, and is read only if another setting selects its strategy.
        let path = settings.plugin.gpu_config;
        let text = gke::read(&path)?;
        (settings, more) = layered(
            options,
            &inputs,
            from_file,
            text.as_deref().map(|text| (&*path, text)),
        )?;
    }
    findings.append(&mut more);
    findings.extend(unaccepted_mounts(&settings));
    findings.extend(unused_by_claims(&settings.plugin));
    if settings
        .plugin
        .device_list_strategy
        .contains(&DeviceListStrategy::HostPath)
    {
        findings.extend(missing_host_path(&settings.plugin));
    }
    Ok((settings, findings))
}

/// Returns the finding about requests by mounts that the hook does not accept.
fn unaccepted_mounts(Settings { common, plugin, .. }: &Settings) -> Option<Finding> {
    let asks = plugin
        .device_list_strategy
        .contains(&DeviceListStrategy::VolumeMounts);
    (asks && !common.accept_volume_mounts).then(|| {
        Finding::new(
            &catalog::PLUGIN_MOUNTS,
            "device-list-strategy is \"volume-mounts\", and containers may not request GPUs with mounts",
            "set accept-nvidia-visible-devices-as-volume-mounts = true above the first table of config.toml",
        )
    })
}

/// Returns findings about settings that only resources of the device plugin have, if the kubelet gets
/// devices for claims.
fn unused_by_claims(plugin: &Plugin) -> Vec<Finding> {
    let default = Plugin::default();
    if plugin.interface != Interface::Dra {
        return Vec::new();
    }
    let is_single = plugin.mig_strategy == MigStrategy::Single;
    let settings = [
        ("replicas", plugin.replicas != default.replicas),
        ("resources", plugin.resources != default.resources),
        (
            "resource-prefix",
            plugin.resource_prefix != default.resource_prefix,
        ),
        ("mig-strategy = \"single\"", is_single),
        ("allocation", plugin.allocation != default.allocation),
        ("sharing", plugin.sharing != default.sharing),
        (
            "the section \"sharing\" of NVIDIA's file",
            !plugin.shared_resources.is_empty(),
        ),
        (
            "device-list-strategy",
            !plugin.device_list_strategy.is_empty(),
        ),
        (
            "device-id-strategy",
            plugin.device_id_strategy != default.device_id_strategy,
        ),
        (
            "pass-device-specs",
            plugin.pass_device_specs != default.pass_device_specs,
        ),
    ];
    let mut findings = Vec::new();
    for (name, is_set) in settings {
        if is_set {
            findings.push(Finding::new(
                &catalog::PLUGIN_NO_EFFECT,
                format!("{name} has no effect with interface = \"dra\""),
                "remove the setting; pods share a GPU with a claim that both of them name",
            ));
        }
    }
    findings
}

/// Returns the finding about a directory for `host-path` that does not exist. An engine would create it, empty.
#[must_use]
pub fn missing_host_path(Plugin { host_path, .. }: &Plugin) -> Option<Finding> {
    (!host_path.is_dir()).then(|| {
        Finding::new(
            &catalog::PLUGIN_HOST_PATH,
            format!("device-list-strategy is \"host-path\", and the directory {host_path:?} is missing"),
            "install the driver there, set host-path to the directory with the driver, or set another strategy",
        )
    })
}

/// Reads only config.toml and its drop-in files.
///
/// # Errors
/// As [`config::read`].
pub fn read_file(defaults: Settings, path: Option<&Path>) -> Result<(Settings, Vec<Finding>)> {
    let Settings {
        common,
        mut plugin,
        kubelet_dir,
    } = defaults;
    let (common, findings) = config::read_with(common, &mut plugin, path)?;
    Ok((
        Settings {
            common,
            plugin,
            kubelet_dir,
        },
        findings,
    ))
}

/// Applies the settings of other plugins and the options, by ascending precedence.
fn layered(
    options: &Options,
    inputs: &Inputs,
    mut settings: Settings,
    gke: Option<(&Path, &str)>,
) -> Result<(Settings, Vec<Finding>)> {
    let mut findings = match gke {
        Some((path, text)) => gke::apply(&mut settings.plugin, path, text)?,
        None => Vec::new(),
    };
    findings.extend(inputs.apply(&mut settings)?);
    options.given.apply(&mut settings.plugin)?;
    if let Some(dir) = &options.kubelet_dir {
        settings.kubelet_dir.clone_from(dir);
    }
    Ok((settings, findings))
}
