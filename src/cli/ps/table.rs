//! The table of `ps` as text. Pure.

use std::time::SystemTime;

use base::report::one_line;
use records::RecordedDevice;

use super::super::args::Ps;
use super::super::mps_line;
use super::super::terminal::{Cell, Terminal, Tone, cell, heading, table};
use super::super::time::ago;
use super::join::{Row, SharedGpu, State, Table};

/// A value that is unknown, or that a container does not have.
const NONE: &str = "-";

/// Returns the table, or a sentence if it is empty, and the number of processes outside of containers.
pub(super) fn text(found: &Table, options: &Ps, terminal: Terminal, now: SystemTime) -> String {
    let mut text = match (found.rows.is_empty(), options.all) {
        (true, true) => format!("no container with {} is known\n", wanted(options)),
        (true, false) => {
            let more = "\"oci-nvidia-hook ps --all\" also lists containers that ended or failed";
            format!("no running container has {}\n{more}\n", wanted(options))
        }
        (false, true) => terminal.render(&table(all(found, now))),
        (false, false) => terminal.render(&table(running(found, now))),
    };
    match found.outside {
        None | Some(0) => {}
        Some(1) => text += "1 process outside of containers uses a GPU\n",
        Some(outside) => text += &format!("{outside} processes outside of containers use GPUs\n"),
    }
    let mut lines = Vec::new();
    for SharedGpu { index, entry } in &found.shared {
        lines.push(mps_line::of(entry, *index));
    }
    text + &terminal.render(&lines)
}

fn wanted(options: &Ps) -> String {
    match &options.gpu {
        Some(gpu) => format!("GPU {}", one_line(gpu)),
        None => "GPUs".to_owned(),
    }
}

fn running(found: &Table, now: SystemTime) -> Vec<[Cell; 6]> {
    let mut rows = vec![["CONTAINER", "ID", "GPUS", "PROCS", "MEMORY", "STARTED"].map(heading)];
    for row in &found.rows {
        let [name, id, gpus, processes, memory] = shared(row);
        rows.push([name, id, gpus, processes, memory, cell(since(row, now))]);
    }
    rows
}

/// Has no ids, so that the rows fit a terminal of 80 columns. A container without a name is shown with its id.
fn all(found: &Table, now: SystemTime) -> Vec<[Cell; 7]> {
    let mut rows = vec![
        [
            "CONTAINER",
            "STATE",
            "GPUS",
            "PROCS",
            "MEMORY",
            "STARTED",
            "NUMBER",
        ]
        .map(heading),
    ];
    for row in &found.rows {
        let [name, id, gpus, processes, memory] = shared(row);
        let name = if row.container.display_name().is_empty() {
            id
        } else {
            name
        };
        rows.push([
            name,
            (tone(row.state), row.state.to_string()),
            gpus,
            processes,
            memory,
            cell(since(row, now)),
            row.finding.as_ref().map_or_else(|| cell(NONE), number),
        ]);
    }
    rows
}

fn number(finding: &records::StoredFinding) -> Cell {
    (Tone::of_severity(&finding.severity), one_line(&finding.id))
}

const fn tone(state: State) -> Tone {
    match state {
        State::Running => Tone::Good,
        State::Ended => Tone::Plain,
        State::Failed | State::Unfinished => Tone::Bad,
    }
}

/// Returns the cells that all tables have: name, id, GPUs, processes and memory.
fn shared(row: &Row) -> [Cell; 5] {
    let gpus: Vec<_> = row.devices.iter().map(RecordedDevice::short).collect();
    let processes = row.count().map(|count| count.to_string());
    let memory = row.memory().map(size);
    let texts = [
        row.container.display_name(),
        row.container.short().to_owned(),
        gpus.join(","),
        processes.unwrap_or_default(),
        memory.unwrap_or_default(),
    ];
    texts.map(|text| {
        if text.is_empty() {
            cell(NONE)
        } else {
            cell(one_line(&text))
        }
    })
}

/// Returns when the container started, or when it ended.
fn since(row: &Row, now: SystemTime) -> String {
    match row.ended.or(row.started) {
        Some(then) => ago(then, now),
        None => NONE.to_owned(),
    }
}

/// Returns a size like nvidia-smi, in MiB, or in GiB from 10 GiB on.
fn size(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    if bytes < 10 * GIB {
        format!("{} MiB", bytes / MIB)
    } else {
        format!("{}.{} GiB", bytes / GIB, bytes % GIB * 10 / GIB)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (bytes, words) in [
            (0, "0 MiB"),
            (512 << 20, "512 MiB"),
            (9 << 30, "9216 MiB"),
            (10 << 30, "10.0 GiB"),
            ((40 << 30) + (1 << 29), "40.5 GiB"),
            (u64::MAX, "17179869183.9 GiB"),
        ] {
            assert_eq!(size(bytes), words);
        }
    }
}
