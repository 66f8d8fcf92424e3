//! Joins records, running containers and processes into rows. Pure.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::time::SystemTime;

use serde::Serialize;

use base::report::Finding;
use findings::catalog;
use nvidia_host::driver::node_name::NodeName;
use nvidia_host::inventory::processes::GpuProcesses;
use nvidia_host::mps::Entry;
use records::{Outcome, Record, RecordedDevice, StoredFinding};

use super::super::time;
use super::facts::{Facts, Other, Recorded};

/// What a container does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum State {
    #[default]
    Running,
    /// It has ended, or its end was not seen.
    Ended,
    /// The hook failed, so it did not start.
    Failed,
    /// The hook did not finish.
    Unfinished,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A process of a container on a GPU. The field names are part of the JSON interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Process {
    pub pid: u32,
    /// NVML's index of the GPU
    pub gpu: u32,
    /// The memory of the GPU that it uses
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Whether it is a client of MPS
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub mps: bool,
}

/// A container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Row {
    pub container: records::ContainerNames,
    pub state: State,
    pub devices: Vec<RecordedDevice>,
    /// Its processes; `None` if NVML does not list them
    pub processes: Option<Vec<Process>>,
    pub started: Option<SystemTime>,
    pub ended: Option<SystemTime>,
    /// The most severe finding about it
    pub finding: Option<StoredFinding>,
}

impl Row {
    /// Returns the number of its processes.
    pub(super) fn count(&self) -> Option<usize> {
        let processes = self.processes.as_ref()?.iter();
        Some(BTreeSet::from_iter(processes.map(|process| process.pid)).len())
    }

    /// Returns the GPU memory of its processes in bytes; `None` if NVML does not report the memory of one.
    pub(super) fn memory(&self) -> Option<u64> {
        let processes = self.processes.as_ref()?.iter();
        processes.map(|process| process.memory_bytes).sum()
    }

    fn is_running(&self, id: &str) -> bool {
        self.state == State::Running && self.container.id == id
    }

    fn has_gpu(&self, index: u32) -> bool {
        let mut devices = self.devices.iter();
        devices.any(|device| device.index == Some(index))
    }
}

/// The result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Table {
    /// Those that run come first, then from the newest to the oldest
    pub rows: Vec<Row>,
    /// The processes that use a GPU and belong to no container; `None` without NVML
    pub outside: Option<usize>,
    /// Why processes are unknown, for each GPU that NVML cannot ask
    pub unknown: Vec<String>,
    /// The GPUs that are shared with MPS
    pub shared: Vec<SharedGpu>,
}

/// A GPU that is shared with MPS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedGpu {
    /// NVML's index, if NVML lists the GPU
    pub index: Option<u32>,
    pub entry: Entry,
}

/// Returns all containers with a record, and the others that have GPUs.
pub(super) fn join(facts: &Facts) -> Table {
    let asked = facts.gpus.as_deref().ok();
    let mut rows = Vec::new();
    for recorded in &facts.records {
        rows.push(from_record(recorded, facts.loaded.as_deref()));
    }
    for other in &facts.others {
        rows.push(from_other(other));
    }
    if let Some(gpus) = asked {
        complete(&mut rows, gpus);
    }
    let mut seen = BTreeSet::new();
    // The newest record of a container is the first one.
    rows.retain(|row| row.state != State::Running || seen.insert(row.container.id.clone()));
    for (id, gpu) in of_unknown(facts, &rows) {
        let device = RecordedDevice {
            index: Some(gpu.index),
            uuid: gpu.uuid.clone(),
            ..RecordedDevice::default()
        };
        match rows.iter_mut().find(|row| row.is_running(&id)) {
            Some(row) if row.has_gpu(gpu.index) => {}
            Some(row) => row.devices.push(device),
            None => rows.push(unknown(id, device)),
        }
    }
    let mut unknown = Vec::new();
    for gpu in asked.unwrap_or_default() {
        if let Err(why) = &gpu.processes {
            unknown.push(format!("GPU {}: {why}", gpu.index));
        }
    }
    if let Some(gpus) = asked {
        for row in &mut rows {
            row.processes = processes(row, gpus, facts);
        }
    }
    rows.retain(|row| {
        row.state != State::Running || !row.devices.is_empty() || row.finding.is_some()
    });
    rows.sort_by_key(|row| (row.state != State::Running, std::cmp::Reverse(row.started)));
    Table {
        rows,
        outside: asked.map(|gpus| outside(gpus, facts)),
        unknown,
        shared: shared(facts),
    }
}

/// Returns the GPUs that are shared with MPS.
fn shared(facts: &Facts) -> Vec<SharedGpu> {
    let mut shared = Vec::new();
    for daemon in &facts.mps {
        let gpu = facts
            .gpus
            .iter()
            .flatten()
            .find(|gpu| gpu.uuid == daemon.state.gpu);
        shared.push(SharedGpu {
            index: gpu.map(|gpu| gpu.index),
            entry: Entry::from(daemon),
        });
    }
    shared
}

fn from_record(Recorded { record, is_running }: &Recorded, loaded: Option<&str>) -> Row {
    let state = match record.outcome {
        Outcome::Failed => State::Failed,
        // The engine can have ended the hook and the container.
        Outcome::Unfinished => State::Unfinished,
        _ if *is_running => State::Running,
        _ => State::Ended,
    };
    let mut finding = record.most_severe().cloned();
    if state == State::Running
        && let Some(other) = other_driver(record, loaded)
    {
        finding = Some(StoredFinding::from(&other));
    }
    Row {
        container: record.container.clone(),
        state,
        devices: record.devices.clone(),
        processes: None,
        started: time::parse(&record.started),
        ended: time::parse(&record.ended),
        finding,
    }
}

/// Returns the finding about a running container that has the files of another driver than the loaded one: each call of CUDA fails there.
pub(super) fn other_driver(record: &Record, loaded: Option<&str>) -> Option<Finding> {
    let loaded = loaded?;
    if record.driver.is_empty() || record.devices.is_empty() || record.driver == loaded {
        return None;
    }
    let what = format!(
        "the container has the files of driver {}, and {loaded} is loaded",
        record.driver
    );
    let fix = "restart the container";
    Some(Finding::new(&catalog::MISMATCH, what, fix))
}

fn from_other(
    Other {
        id,
        name,
        pod,
        devices,
        started,
    }: &Other,
) -> Row {
    let container = records::ContainerNames {
        id: id.clone(),
        name: name.clone(),
        pod: pod.clone(),
        ..Default::default()
    };
    Row {
        container,
        devices: devices.clone(),
        started: Some(*started),
        ..Row::default()
    }
}

/// Returns a running container of which only a process is known.
fn unknown(id: String, device: RecordedDevice) -> Row {
    Row {
        container: records::ContainerNames {
            id,
            ..Default::default()
        },
        devices: vec![device],
        ..Row::default()
    }
}

/// Adds index and UUID of GPUs of which only the node is known.
fn complete(rows: &mut [Row], gpus: &[GpuProcesses]) {
    for device in rows.iter_mut().flat_map(|row| &mut row.devices) {
        let Some(NodeName::Gpu(minor)) = NodeName::of_path(Path::new(&device.node)) else {
            continue;
        };
        for gpu in gpus {
            if device.index.is_none() && gpu.minor == Some(minor) {
                (device.index, device.uuid) = (Some(gpu.index), gpu.uuid.clone());
            }
        }
    }
}

/// Returns the ids of running containers whose GPUs are known only from their processes, and these GPUs.
fn of_unknown<'f>(facts: &'f Facts, rows: &[Row]) -> Vec<(String, &'f GpuProcesses)> {
    let mut found = Vec::new();
    for gpu in facts.gpus.iter().flatten() {
        for process in gpu.processes.iter().flatten() {
            let Some(id) = facts.containers.get(&process.pid) else {
                continue;
            };
            let row = rows.iter().find(|row| row.is_running(id));
            if row.is_none_or(|row| row.devices.is_empty()) {
                found.push((id.clone(), gpu));
            }
        }
    }
    found
}

/// Returns the processes of a container; `None` if NVML does not list the processes of one of its GPUs.
fn processes(row: &Row, gpus: &[GpuProcesses], facts: &Facts) -> Option<Vec<Process>> {
    if row.state != State::Running {
        return None;
    }
    let mut found = Vec::new();
    for gpu in gpus {
        let Ok(all) = &gpu.processes else {
            if row.has_gpu(gpu.index) {
                return None;
            }
            continue;
        };
        let id = Some(&row.container.id);
        let own = all
            .iter()
            .filter(|process| facts.containers.get(&process.pid) == id);
        found.extend(own.map(|process| Process {
            pid: process.pid,
            gpu: gpu.index,
            memory_bytes: process.memory,
            mps: process.is_mps_client,
        }));
    }
    Some(found)
}

/// Counts the processes that use a GPU and belong to no container. The servers of MPS work for their clients.
fn outside(gpus: &[GpuProcesses], facts: &Facts) -> usize {
    let mut servers = BTreeSet::new();
    for daemon in &facts.mps {
        servers.extend(daemon.state.server.and_then(|pid| u32::try_from(pid).ok()));
    }
    let all = gpus
        .iter()
        .filter_map(|gpu| gpu.processes.as_ref().ok())
        .flatten()
        .map(|process| process.pid);
    let outside: BTreeSet<_> = all
        .filter(|pid| !facts.containers.contains_key(pid) && !servers.contains(pid))
        .collect();
    outside.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvidia_host::inventory::processes::GpuProcess;
    use records::Pod;
    use std::collections::BTreeMap;
    use std::path::Path;

    fn gpu(index: u32, processes: Result<&[(u32, u64)], &str>) -> GpuProcesses {
        let of = |(pid, memory): &(u32, u64)| GpuProcess {
            pid: *pid,
            memory: Some(*memory),
            is_mps_client: false,
        };
        let processes = processes
            .map(|all| all.iter().map(of).collect())
            .map_err(str::to_owned);
        GpuProcesses {
            index,
            minor: Some(index + 4),
            uuid: format!("GPU-{index}"),
            processes,
        }
    }

    fn recorded(id: &str, outcome: Outcome, is_running: bool, gpus: &[u32]) -> Recorded {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        record.name_container(id.to_owned(), Pod::default(), Path::new("/b"));
        record.devices = gpus
            .iter()
            .map(|gpu| RecordedDevice {
                index: Some(*gpu),
                ..RecordedDevice::default()
            })
            .collect();
        record.end(outcome, String::new());
        Recorded { record, is_running }
    }

    fn other(id: &str, devices: Vec<RecordedDevice>) -> Other {
        Other {
            id: id.to_owned(),
            name: String::new(),
            pod: Pod::default(),
            devices,
            started: SystemTime::UNIX_EPOCH,
        }
    }

    /// Returns each row as `id state GPUs processes memory`.
    fn rows(table: &Table) -> Vec<String> {
        let of = |row: &Row| {
            let gpus: Vec<_> = row.devices.iter().map(RecordedDevice::short).collect();
            let (id, state) = (&row.container.id, row.state.to_string());
            format!(
                "{id} {state} {} {:?} {:?}",
                gpus.join(","),
                row.count(),
                row.memory()
            )
        };
        table.rows.iter().map(of).collect()
    }

    #[test]
    fn processes_belong_to_containers() {
        let facts = Facts {
            records: vec![
                recorded("a", Outcome::Given, true, &[0, 1]),
                recorded("b", Outcome::Given, false, &[0]),
                recorded("c", Outcome::Failed, false, &[]),
                recorded("d", Outcome::Unfinished, true, &[]),
            ],
            others: vec![
                other(
                    "e",
                    vec![RecordedDevice::of_node("/dev/nvidia5".to_owned())],
                ),
                other("f", Vec::new()),
                other("g", Vec::new()),
            ],
            gpus: Ok(vec![
                gpu(0, Ok(&[(10, 5), (11, 6), (90, 1)])),
                gpu(1, Ok(&[(10, 7), (12, 8), (13, 9)])),
            ]),
            mps: Vec::new(),
            loaded: None,
            containers: BTreeMap::from(
                [(10, "a"), (11, "a"), (12, "e"), (13, "f")].map(|(pid, id)| (pid, id.to_owned())),
            ),
        };
        let table = join(&facts);
        // A process in two lists of GPUs counts once. g has no GPUs, and the GPU of f is known only from its process.
        let expected = [
            "a running 0,1 Some(2) Some(18)",
            "e running 1 Some(1) Some(8)",
            "f running 1 Some(1) Some(9)",
            "b ended 0 None None",
            "c failed  None None",
            "d unfinished  None None",
        ];
        assert_eq!(rows(&table), expected);
        assert_eq!((table.outside, table.unknown.len()), (Some(1), 0));
    }

    #[test]
    fn a_container_of_another_driver() {
        let record = |driver: &str, devices| {
            let mut record = recorded("a", Outcome::Given, true, devices).record;
            driver.clone_into(&mut record.driver);
            record
        };
        let id =
            |record: &Record, loaded| other_driver(record, loaded).map(|finding| finding.kind.id());
        let old = record("535.1", &[0]);
        assert_eq!(id(&old, Some("550.2")), Some("ONH-013"));
        for (record, loaded) in [
            (&old, Some("535.1")),
            (&old, None),
            (&record("", &[0]), Some("550.2")),
            (&record("535.1", &[]), Some("550.2")),
        ] {
            assert_eq!(id(record, loaded), None, "{record:?}");
        }
    }

    #[test]
    fn a_gpu_that_nvml_cannot_ask() {
        let mut facts = Facts {
            records: vec![
                recorded("a", Outcome::Given, true, &[0]),
                recorded("b", Outcome::Given, true, &[1]),
            ],
            others: Vec::new(),
            gpus: Ok(vec![gpu(0, Ok(&[])), gpu(1, Err("lost"))]),
            mps: Vec::new(),
            loaded: None,
            containers: BTreeMap::new(),
        };
        let table = join(&facts);
        assert_eq!(
            rows(&table),
            ["a running 0 Some(0) Some(0)", "b running 1 None None"]
        );
        assert_eq!(table.unknown, ["GPU 1: lost"]);
        facts.gpus = Err(anyhow::anyhow!("no driver"));
        let table = join(&facts);
        assert_eq!(
            rows(&table),
            ["a running 0 None None", "b running 1 None None"]
        );
        assert_eq!(table.outside, None);
    }
}
