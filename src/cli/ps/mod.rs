//! `ps`: lists the containers that have GPUs now, with the processes that use them.

mod facts;
mod join;
mod table;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use serde::Serialize;

use base::json;
use base::report::{Finding, failure};
use findings::catalog;
use nvidia_host::config::{self, Config};
use records::{Device, StoredFinding};

use self::join::{Process, Row, State, Table};
use super::args::Ps;
use super::terminal::{Terminal, redrawn};
use super::{containers, output};
use crate::record::call::Call;

/// The time between two tables of `--watch`.
const PAUSE: Duration = Duration::from_secs(2);

/// Prints the table.
///
/// # Errors
/// If the records or config.toml cannot be read, or `--watch` is given without a terminal.
pub(crate) fn run(options: &Ps, config: Option<&Path>, terminal: Terminal) -> Result<ExitCode> {
    let (config, findings) = config::read(config)?;
    findings
        .iter()
        .for_each(|finding| Call::default().finding(finding));
    if options.watch {
        return watch(options, &config, terminal);
    }
    let table = read(options, &config)?;
    let hint = containers::roots_records("ps");
    if options.output.json {
        // On stderr, because stdout contains only the document.
        hint.iter().for_each(|hint| Call::default().report(hint));
        return Ok(output::print(&document(&table)?));
    }
    let text = table::text(&table, options, terminal, SystemTime::now());
    Ok(output::print(
        &(text + &hint.map(|hint| format!("{hint}\n")).unwrap_or_default()),
    ))
}

/// Prints the table again and again until the program is interrupted.
fn watch(options: &Ps, config: &Config, terminal: Terminal) -> Result<ExitCode> {
    if !terminal.is_screen() {
        let what = "invalid command line: --watch needs a terminal";
        return Err(failure(
            &catalog::COMMAND_LINE,
            what,
            "omit --watch, or run the command with watch(1)",
        ));
    }
    loop {
        let table = read(options, config)?;
        let hint = containers::roots_records("ps")
            .map(|hint| format!("{hint}\n"))
            .unwrap_or_default();
        let text = table::text(&table, options, terminal, SystemTime::now()) + &hint;
        if output::print(&redrawn(&text)) != ExitCode::SUCCESS {
            return Ok(ExitCode::FAILURE);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Reads the table, and reports on stderr why processes are unknown.
fn read(options: &Ps, config: &Config) -> Result<Table> {
    let facts = facts::read(containers::read()?, config);
    let mut table = join::join(&facts);
    table.rows.retain(|row| is_wanted(row, options));
    // On a host without containers, a missing driver is not worth a warning.
    if let Err(error) = facts.gpus
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

fn is_wanted(row: &Row, options: &Ps) -> bool {
    let is_shown = options.all || row.state == State::Running && !row.devices.is_empty();
    is_shown
        && options
            .gpu
            .as_deref()
            .is_none_or(|gpu| row.devices.iter().any(|device| is_named(device, gpu)))
}

/// Reports whether an index or UUID names a device. The index of a GPU also names its MIG devices.
fn is_named(device: &Device, name: &str) -> bool {
    device.short() == name
        || device.uuid.eq_ignore_ascii_case(name)
        || device.index.is_some_and(|index| index.to_string() == name)
}

/// The document of `--json`, whose schema is `docs/schemas/ps.json`.
#[derive(Debug, Serialize)]
struct Document<'a> {
    version: u32,
    containers: Vec<Container<'a>>,
    /// Missing without NVML
    #[serde(skip_serializing_if = "Option::is_none")]
    processes_outside: Option<usize>,
}

/// A container. The field names are part of the JSON interface.
#[derive(Debug, Serialize)]
struct Container<'a> {
    #[serde(flatten)]
    names: &'a records::Container,
    state: State,
    gpus: &'a [Device],
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
    let containers = table.rows.iter().map(|row| Container {
        names: &row.container,
        state: row.state,
        gpus: &row.devices,
        processes: row.processes.as_deref(),
        memory_bytes: row.memory(),
        started: time(row.started),
        ended: time(row.ended),
        finding: row.finding.as_ref(),
    });
    let document = Document {
        version: json::VERSION,
        containers: containers.collect(),
        processes_outside: table.outside,
    };
    Ok(json::pretty(&document)? + "\n")
}
