//! Reads the settings from config.toml, from the configuration of other device plugins, and from the command line.

pub mod compat;
pub mod options;

use std::path::{Path, PathBuf};

use anyhow::Result;
use base::report::Finding;
use nvidia_host::config::kubelet_plugin::DeviceListStrategy;
use nvidia_host::config::{self, Config, schema};

use compat::{Inputs, Target};
use options::Options;

/// The directory of the kubelet.
const KUBELET_DIR: &str = "/var/lib/kubelet";

/// The settings of a command.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// Those in config.toml
    pub config: Config,
    /// The directory of the kubelet
    pub kubelet_dir: PathBuf,
    /// What is wrong with them
    pub findings: Vec<Finding>,
}

/// Reads the settings.
///
/// # Errors
/// If a file cannot be read, or a setting has an invalid value.
pub fn read(options: &Options) -> Result<Resolved> {
    let inputs = Inputs::gather(&options.others)?;
    let (config, findings) = config::read_onto(inputs.defaults(), schema::ALL, options.config.as_deref())?;
    let target = Target { config, kubelet_dir: None };
    let resolved = resolve(options, &inputs, target.clone(), None)?;
    let plugin = &resolved.config.kubelet_plugin;
    let gke = match plugin.device_list_strategy.contains(&DeviceListStrategy::HostPath) {
        true => compat::read_gke(&plugin.gpu_config)?,
        false => None,
    };
    // GKE's file has the precedence of a configuration file, and is read only if another setting selects its strategy.
    let mut resolved = match gke {
        Some(text) => resolve(options, &inputs, target, Some((&plugin.gpu_config, &text)))?,
        None => resolved,
    };
    resolved.findings.splice(0..0, findings);
    Ok(resolved)
}

fn resolve(options: &Options, inputs: &Inputs, mut target: Target, gke: Option<(&Path, &str)>) -> Result<Resolved> {
    let mut findings = match gke {
        Some((path, text)) => compat::apply_gke(&mut target, path, text)?,
        None => Vec::new(),
    };
    findings.extend(inputs.apply(&mut target)?);
    options.apply(&mut target.config.kubelet_plugin)?;
    let kubelet_dir = options.kubelet_dir.clone().or(target.kubelet_dir).unwrap_or_else(|| KUBELET_DIR.into());
    Ok(Resolved { config: target.config, kubelet_dir, findings })
}
