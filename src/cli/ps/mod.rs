//! `ps`: lists the containers that have GPUs now, with the processes that use them.

mod facts;
mod join;
mod table;

use std::path::Path;
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::Result;
use serde::Serialize;

use base::json;
use base::report::{Finding, failure};
use findings::catalog;
use nvidia_host::config::{self, Config};
use nvidia_host::device_id::DeviceId;
use nvidia_host::host::Host;
use nvidia_host::inventory::select::{self, every_device};
use nvidia_host::mps::Entry;
use records::{RecordedDevice, StoredFinding};

use self::facts::Recorded;
use self::join::{Process, State, Table};
use super::args::Ps;
use super::containers::{self, RemovedRecords};
use super::output;
use super::terminal::Terminal;
use crate::record::call::Call;

/// Prints the table.
///
/// # Errors
/// If the records or config.toml cannot be read.
pub(crate) fn run(options: &Ps, config: Option<&Path>, terminal: Terminal) -> Result<ExitCode> {
    let config = match config::read(config) {
        Ok((config, findings)) => {
            Call::default().findings(&findings);
            Some(config)
        }
        Err(error) => {
            Call::default().finding(&Finding::error(&error));
            None
        }
    };
    let table = read(options, config.as_ref())?;
    let hint = containers::roots_records("ps");
    if options.output.json {
        // On stderr, because stdout contains only the document.
        if let Some(hint) = &hint {
            Call::default().report(hint);
        }
        return Ok(output::print(&document(&table)?));
    }
    Ok(output::print(&text(&table, options, terminal)))
}

fn text(table: &Table, options: &Ps, terminal: Terminal) -> String {
    let mut text = table::text(table, options, terminal, SystemTime::now());
    if let Some(removed) = containers::removed_records() {
        text += &format!("{removed}\n");
    }
    if let Some(hint) = containers::roots_records("ps") {
        text += &format!("{hint}\n");
    }
    text
}

/// Returns the names of the running containers that have the files of another driver than this one. Records that cannot be read name none.
pub(super) fn with_other_driver(loaded: &str) -> Vec<String> {
    let mut names = Vec::new();
    for Recorded { record, is_running } in facts::recorded(containers::read().unwrap_or_default()) {
        if is_running && join::other_driver(&record, Some(loaded)).is_some() {
            let name = record.container.display_name();
            names.push(if name.is_empty() {
                record.container.short().to_owned()
            } else {
                name
            });
        }
    }
    names
}

/// Reads the table, and reports on stderr why processes are unknown.
fn read(options: &Ps, config: Option<&Config>) -> Result<Table> {
    let facts = facts::read(containers::read()?, config);
    let mut table = join::join(&facts);
    if let Some(name) = &options.gpu {
        let wanted = Wanted::resolve(name, config);
        let mut devices = table.rows.iter().flat_map(|row| &row.devices);
        // A GPU that was removed is still in records.
        if !wanted.exists && !devices.any(|device| wanted.matches(device)) {
            return Err(failure(
                &catalog::UNKNOWN_DEVICE,
                format!("unknown GPU {name:?}"),
                "\"oci-nvidia-hook info\" prints the GPUs of this host",
            ));
        }
        table
            .rows
            .retain(|row| row.devices.iter().any(|device| wanted.matches(device)));
    }
    table
        .rows
        .retain(|row| options.all || row.state == State::Running && !row.devices.is_empty());
    // On a host without containers, a missing driver is not worth a warning.
    if let Err(error) = facts.gpus
        && config.is_some()
        && table.rows.iter().any(|row| row.state == State::Running)
    {
        let error = error.context("cannot list the processes on the GPUs");
        Call::default().finding(&Finding::error(&error));
    }
    for unknown in &table.unknown {
        let what = format!("cannot list the processes on {unknown}");
        Call::default().finding(&Finding::new(
            &catalog::NOT_IN_TABLE,
            what,
            "run \"nvidia-smi\" on the host",
        ));
    }
    Ok(table)
}

/// The device that `--gpu` names.
struct Wanted {
    /// An index or UUID, in the form of records
    names: Vec<String>,
    /// Whether the host has it. Without an answer of NVML, every name may exist.
    exists: bool,
}

impl Wanted {
    /// Resolves a name like a request does: index, UUID, bus id, and the names of MIG devices.
    fn resolve(name: &str, config: Option<&Config>) -> Self {
        let mut wanted = Self {
            names: vec![name.to_owned()],
            exists: true,
        };
        let Some(config) = config else {
            return wanted;
        };
        let Ok(host) = Host::inspect(config, &|| ()) else {
            return wanted;
        };
        let id = DeviceId::parse(name);
        let mut devices = every_device(&host.inventory);
        let found = devices.find(|device| device.is_named(&id));
        wanted.exists = found.is_some();
        if let Some(device) = found {
            wanted.names.push(device.uuid().to_owned());
            if let select::Device::Gpu(gpu) = device {
                wanted.names.push(gpu.index.to_string());
            }
        }
        wanted
    }

    /// Reports whether the name matches a device of a row. The index of a GPU also names its MIG devices.
    fn matches(&self, device: &RecordedDevice) -> bool {
        let index = device.index.map(|index| index.to_string());
        self.names.iter().any(|name| {
            device.short() == *name
                || device.uuid.eq_ignore_ascii_case(name)
                || index.as_ref() == Some(name)
        })
    }
}

/// The document of `--json`, whose schema is `docs/schemas/ps.json`.
#[derive(Debug, Serialize)]
struct Document<'a> {
    version: u32,
    containers: Vec<Container<'a>>,
    /// Missing without NVML
    #[serde(skip_serializing_if = "Option::is_none")]
    processes_outside: Option<usize>,
    /// The GPUs that are shared with MPS
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mps: Vec<&'a Entry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    removed_records: Option<RemovedRecords>,
}

/// A container. The field names are part of the JSON interface.
#[derive(Debug, Serialize)]
struct Container<'a> {
    #[serde(flatten)]
    names: &'a records::ContainerNames,
    state: State,
    gpus: &'a [RecordedDevice],
    #[serde(skip_serializing_if = "Option::is_none")]
    processes: Option<&'a [Process]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    started: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    finding: Option<&'a StoredFinding>,
}

fn document(table: &Table) -> Result<String> {
    let time = |time: Option<SystemTime>| {
        time.map(|time| humantime::format_rfc3339_millis(time).to_string())
    };
    let mut containers = Vec::new();
    for row in &table.rows {
        containers.push(Container {
            names: &row.container,
            state: row.state,
            gpus: &row.devices,
            processes: row.processes.as_deref(),
            memory_bytes: row.memory(),
            started: time(row.started),
            ended: time(row.ended),
            finding: row.finding.as_ref(),
        });
    }
    let document = Document {
        version: json::VERSION,
        containers,
        processes_outside: table.outside,
        mps: table.shared.iter().map(|gpu| &gpu.entry).collect(),
        removed_records: containers::removed_records(),
    };
    Ok(json::pretty(&document)? + "\n")
}
