//! `info`: the driver and its GPUs.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use base::paths::HostPath;
use base::report::{Finding, catalog};
use nvidia_host::config::{self, Config};
use nvidia_host::host::Host;
use nvidia_host::inventory::report::Report;
use nvidia_host::inventory::{FailedGpu, Gpu, Inventory};

use super::args::Info;
use super::output;
use crate::log::Log;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Form {
    /// A label and a value on each line
    #[default]
    Labels,
    /// `--csv`
    Csv,
    /// `--json`
    Json,
}

pub(crate) fn run(options: &Info, config: Option<&Path>) -> ExitCode {
    let form = match (options.json, options.csv) {
        (true, _) => Form::Json,
        (_, true) => Form::Csv,
        _ => Form::Labels,
    };
    let mut log = Log::default();
    let text = configuration(config, options.root.as_deref()).and_then(|config| text(&config, form, &mut log));
    output::print_or_fail(text, &mut log)
}

/// What `info` prints.
///
/// # Errors
/// If there is no driver, or it does not answer.
pub(super) fn text(config: &Config, form: Form, log: &mut Log) -> Result<String> {
    let inventory = Host::look_afresh(config)?.inventory;
    Ok(match form {
        Form::Labels => labelled(&inventory),
        Form::Csv => {
            // A table has no place for them.
            inventory.failed.iter().for_each(|failed| log.finding(&not_usable(failed)));
            table(&inventory)
        }
        Form::Json => base::json::pretty(&Report::from(&inventory))? + "\n",
    })
}

fn not_usable(failed: &FailedGpu) -> Finding {
    let fix = "look at it with \"nvidia-smi -q\" and \"journalctl -k\" on the host";
    Finding::of(&catalog::NOT_IN_TABLE, failed.to_string(), fix)
}

/// Config.toml with the driver root of the command line.
///
/// # Errors
/// If the file is wrong.
pub(super) fn configuration(file: Option<&Path>, root: Option<&Path>) -> Result<Config> {
    let (mut config, findings) = config::read(file)?;
    let mut log = Log::default();
    findings.iter().for_each(|finding| log.finding(finding));
    if let Some(root) = root {
        config.driver_root = HostPath::new(root);
    }
    Ok(config)
}

/// The labels of `nvidia-container-cli info`, which scripts look for, in its order.
const DRIVER: [&str; 2] = ["NVRM version", "CUDA version"];
const GPU: [&str; 7] = ["Device Index", "Device Minor", "Model", "Brand", "GPU UUID", "Bus Location", "Architecture"];

fn of_driver(inventory: &Inventory) -> [String; 2] {
    [inventory.driver_version.clone(), inventory.cuda_version.clone()]
}

fn of_gpu(gpu: &Gpu) -> [String; 7] {
    [
        gpu.index.to_string(),
        gpu.minor.to_string(),
        gpu.model.clone(),
        gpu.brand.clone(),
        gpu.uuid.clone(),
        gpu.bus_id.to_string(),
        gpu.compute_capability.clone(),
    ]
}

fn labelled(inventory: &Inventory) -> String {
    let gpus = inventory.gpus.iter().map(|gpu| lines(&GPU, &of_gpu(gpu)));
    let failed = inventory.failed.iter().map(|failed| lines(&["Not usable"], &[failed.to_string()]));
    let excluded = inventory.excluded.iter().map(|gpu| lines(&["Excluded"], &[gpu.to_string()]));
    let driver = std::iter::once(lines(&DRIVER, &of_driver(inventory)));
    let parts: Vec<_> = driver.chain(gpus).chain(failed).chain(excluded).collect();
    parts.join("\n")
}

fn lines(labels: &[&str], values: &[String]) -> String {
    let mut text = String::new();
    for (label, value) in labels.iter().zip(values) {
        let label = format!("{label}:");
        writeln!(text, "{label:<15} {value}").ok();
    }
    text
}

/// Nothing is quoted or escaped: programs that read it do not expect that.
fn table(inventory: &Inventory) -> String {
    let mut rows = vec![DRIVER.join(","), of_driver(inventory).join(","), String::new(), GPU.join(",")];
    rows.extend(inventory.gpus.iter().map(|gpu| of_gpu(gpu).join(",")));
    rows.join("\n") + "\n"
}
