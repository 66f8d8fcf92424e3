//! `info`: the driver and its GPUs.

use std::fmt::Write;
use std::process::ExitCode;

use anyhow::Result;

use super::{Options, output};
use crate::config::{self, Config};
use crate::host::Host;
use crate::inventory::Inventory;
use crate::inventory::report::Report;
use crate::log::Log;
use crate::paths::HostPath;

/// Prints the inventory.
#[must_use]
pub fn run(options: &Options) -> ExitCode {
    match text(options) {
        Ok(text) => output::print(&text),
        Err(error) => {
            Log::default().error(&error);
            ExitCode::FAILURE
        }
    }
}

fn text(options: &Options) -> Result<String> {
    let inventory = Host::look_afresh(&configuration(options)?)?.inventory;
    if options.json {
        return Ok(serde_json::to_string_pretty(&Report::from(&inventory))? + "\n");
    }
    Ok(labelled(&inventory))
}

/// Config.toml with the driver root of the command line.
///
/// # Errors
/// If the file is wrong.
pub(super) fn configuration(options: &Options) -> Result<Config> {
    let (mut config, findings) = config::read(options.config.as_deref())?;
    let mut log = Log::default();
    findings.iter().for_each(|finding| log.finding(finding));
    if let Some(root) = &options.root {
        config.driver_root = HostPath::new(root);
    }
    Ok(config)
}

/// With the labels of `nvidia-container-cli info`, which scripts look for.
fn labelled(inventory: &Inventory) -> String {
    let mut text = String::new();
    let mut line = |label: &str, value: &str| {
        let blank = if matches!(label, "Device Index:" | "Not usable:") { "\n" } else { "" };
        writeln!(text, "{blank}{label:<15} {value}").ok();
    };
    line("NVRM version:", &inventory.driver_version);
    line("CUDA version:", &inventory.cuda_version);
    for gpu in &inventory.gpus {
        line("Device Index:", &gpu.index.to_string());
        line("Device Minor:", &gpu.minor.to_string());
        line("Model:", &gpu.model);
        line("Brand:", &gpu.brand);
        line("GPU UUID:", &gpu.uuid);
        line("Bus Location:", &gpu.bus_id.to_string());
        line("Architecture:", &gpu.compute_capability);
    }
    for failed in &inventory.failed {
        line("Not usable:", &failed.to_string());
    }
    text
}
