//! `info`: prints the versions of the driver and its GPUs.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use base::paths::HostPath;
use base::report::{Finding, one_line};
use findings::catalog;
use nvidia_host::config::{self, Config};
use nvidia_host::driver::DriverKind;
use nvidia_host::host::{Driver, Source};
use nvidia_host::inventory::report::Report;
use nvidia_host::inventory::{ExcludedGpu, FailedGpu, Gpu, Inventory, MigDevice};
use nvidia_host::mps::Entry;
use serde::Serialize;

use super::args::Info;
use super::terminal::{Cell, Line, Terminal, Tone, cell, heading, table};
use super::{mps_line, output};
use crate::record::call::Call;

/// The format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A table of the GPUs
    Table(Terminal),
    /// A label and a value on each line, as nvidia-container-cli prints them
    Labels,
    /// `--csv`
    Csv,
    /// `--json`
    Json,
}

/// Prints the inventory.
pub(crate) fn run(options: &Info, config: Option<&Path>, terminal: Terminal) -> Result<ExitCode> {
    let form = match (options.output.json, options.csv) {
        (true, _) => Form::Json,
        (_, true) => Form::Csv,
        _ => Form::Table(terminal),
    };
    let config = configuration(config, options.root.as_deref())?;
    Ok(output::print(&text(&config, form, &mut Call::default())?))
}

/// Asks NVML, and returns the output of `info`.
///
/// # Errors
/// If the driver is missing or does not answer.
pub(crate) fn text(config: &Config, form: Form, call: &mut Call) -> Result<String> {
    let host = Driver::find(config)?.host(Source::Nvml)?;
    let mps = Entry::of(&host.mps_daemons());
    let inventory = host.inventory;
    Ok(match form {
        Form::Table(terminal) => {
            let mut lines = overview(&inventory);
            lines.extend(shared(&mps, &inventory));
            terminal.render(&lines)
        }
        Form::Labels => labelled(&inventory),
        Form::Csv => {
            // The table has no columns for them.
            for failed in inventory.failed.iter().filter(|gpu| !gpu.denied) {
                call.finding(&not_usable(failed));
            }
            comma_separated(&inventory)
        }
        Form::Json => {
            let document = Document {
                report: Report::from(&inventory),
                mps,
            };
            base::json::pretty(&document)? + "\n"
        }
    })
}

/// The document of `info --json`.
#[derive(Serialize)]
struct Document {
    #[serde(flatten)]
    report: Report,
    /// The GPUs that are shared with MPS
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mps: Vec<Entry>,
}

/// Returns a line for each GPU that is shared with MPS, after an empty line.
fn shared(mps: &[Entry], inventory: &Inventory) -> Vec<Line> {
    let mut lines = Vec::new();
    for daemon in mps {
        let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == daemon.gpu);
        lines.push(mps_line::of(daemon, gpu.map(|gpu| gpu.index)));
    }
    if !lines.is_empty() {
        lines.insert(0, Line::default());
    }
    lines
}

fn not_usable(failed: &FailedGpu) -> Finding {
    let fix = "inspect it with \"nvidia-smi -q\" and \"journalctl -k\" on the host";
    Finding::new(&catalog::NOT_IN_TABLE, failed.to_string(), fix)
}

/// Reads config.toml, with the driver root of the command line.
///
/// # Errors
/// If the file is invalid.
pub(crate) fn configuration(file: Option<&Path>, root: Option<&Path>) -> Result<Config> {
    let (mut config, findings) = config::read(file)?;
    Call::default().findings(&findings);
    if let Some(root) = root {
        config.driver_root = HostPath::new(root);
    }
    Ok(config)
}

/// Returns the versions, and a row for each GPU and MIG device with the names that `NVIDIA_VISIBLE_DEVICES` accepts.
fn overview(inventory: &Inventory) -> Vec<Line> {
    let [driver, cuda] = of_driver(inventory).map(or_unknown);
    let versions = Line::new(format!("Driver {driver}, CUDA {cuda}"));
    let mut rows = vec![["GPU", "Name", "Bus ID", "Minor", "MIG", "State", "UUID"].map(heading)];
    for gpu in &inventory.gpus {
        rows.push(row(gpu, inventory.driver_kind));
        for mig in &gpu.mig_devices {
            rows.push(mig_row(gpu, mig));
        }
    }
    rows.extend(inventory.failed.iter().map(failed_row));
    rows.extend(inventory.excluded.iter().map(excluded_row));
    if rows.len() == 1 {
        return vec![versions, Line::new("no GPUs")];
    }
    let mut lines = vec![versions, Line::default()];
    lines.extend(table(rows));
    for failed in &inventory.failed {
        let reason = format!(": {}", one_line(&failed.to_string()));
        let line = Line::default().then(Tone::Bad, "not usable");
        lines.push(line.then(Tone::Plain, reason));
    }
    lines
}

type Row = [Cell; 7];

fn row(gpu: &Gpu, kind: DriverKind) -> Row {
    let mig = if gpu.mig_enabled {
        gpu.mig_devices.len().to_string()
    } else {
        "-".to_owned()
    };
    [
        cell(gpu.index.to_string()),
        cell(or_unknown(gpu.model.clone())),
        cell(gpu.bus_id.to_string()),
        cell(match kind {
            DriverKind::Linux => gpu.minor.to_string(),
            DriverKind::Wsl => "-".to_owned(),
        }),
        cell(mig),
        state(gpu),
        cell(one_line(&gpu.uuid)),
    ]
}

fn state(gpu: &Gpu) -> Cell {
    if gpu.is_display_only() {
        return (Tone::Plain, "display only".to_owned());
    }
    (Tone::Good, "ok".to_owned())
}

fn mig_row(gpu: &Gpu, mig: &MigDevice) -> Row {
    let kind = match &mig.profile {
        Some(profile) => one_line(profile),
        None => "device".to_owned(),
    };
    let name = format!(
        "MIG {kind}, instance {}/{}",
        mig.gpu_instance, mig.compute_instance
    );
    let index = format!("{}:{}", gpu.index, mig.index);
    [
        cell(index),
        cell(name),
        cell(""),
        cell(""),
        cell(""),
        (Tone::Good, "ok".to_owned()),
        cell(one_line(&mig.uuid)),
    ]
}

fn failed_row(gpu: &FailedGpu) -> Row {
    let known = |text: Option<String>| cell(or_unknown(text.unwrap_or_default()));
    [
        known(gpu.index.map(|index| index.to_string())),
        known(gpu.model.clone()),
        known(gpu.bus_id.map(|bus_id| bus_id.to_string())),
        known(gpu.minor.map(|minor| minor.to_string())),
        cell("-"),
        (Tone::Bad, "not usable".to_owned()),
        known(gpu.uuid.clone()),
    ]
}

/// Returns the row of a GPU that the driver excludes. NVML does not list it, so it has no index.
fn excluded_row(gpu: &ExcludedGpu) -> Row {
    let uuid = cell(or_unknown(gpu.uuid.clone().unwrap_or_default()));
    [
        cell("-"),
        cell("-"),
        cell(gpu.bus_id.to_string()),
        cell("-"),
        cell("-"),
        (Tone::Warning, "excluded".to_owned()),
        uuid,
    ]
}

fn or_unknown(text: String) -> String {
    if text.is_empty() {
        "?".to_owned()
    } else {
        one_line(&text)
    }
}

/// The labels of `nvidia-container-cli info` in their order. Scripts search for them.
const DRIVER: [&str; 2] = ["NVRM version", "CUDA version"];
const GPU: [&str; 7] = [
    "Device Index",
    "Device Minor",
    "Model",
    "Brand",
    "GPU UUID",
    "Bus Location",
    "Architecture",
];

fn of_driver(inventory: &Inventory) -> [String; 2] {
    [
        inventory.driver_version.clone(),
        inventory.cuda_version.clone(),
    ]
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
    let mut parts = vec![lines(&DRIVER, &of_driver(inventory))];
    for gpu in &inventory.gpus {
        parts.push(lines(&GPU, &of_gpu(gpu)));
    }
    for failed in &inventory.failed {
        parts.push(lines(&["Not usable"], &[failed.to_string()]));
    }
    for excluded in &inventory.excluded {
        parts.push(lines(&["Excluded"], &[excluded.to_string()]));
    }
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

/// Returns comma-separated values. As with nvidia-container-cli, they are not quoted or escaped.
fn comma_separated(inventory: &Inventory) -> String {
    let mut rows = vec![
        DRIVER.join(","),
        of_driver(inventory).join(","),
        String::new(),
        GPU.join(","),
    ];
    rows.extend(inventory.gpus.iter().map(|gpu| of_gpu(gpu).join(",")));
    rows.join("\n") + "\n"
}
