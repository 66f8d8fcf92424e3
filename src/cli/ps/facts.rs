//! Reads what `ps` shows: the records, the processes of containers, and NVML's processes on each GPU.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Result;

use base::report::one_line;
use base::sys::proc_file;
use nvidia_host::config::Config;
use nvidia_host::host::{self, Roots};
use nvidia_host::inventory::fingerprint::uptime;
use nvidia_host::inventory::processes::GpuProcesses;
use nvidia_host::inventory::procfs;
use nvidia_host::mps::Daemon;
use records::{Pod, Record, RecordedDevice};

use super::super::containers::KnownContainer;
use super::super::time;
use crate::doctor::container::find::{ProcessId, first_processes};
use crate::oci::{cgroup_id, conmon, spec_view};
use crate::plan::engine_devices;
use crate::record::storage;

/// Everything from which the table follows.
#[derive(Debug)]
pub(super) struct Facts {
    /// The records, the newest first
    pub records: Vec<Recorded>,
    /// The running containers that have no record with GPUs, and the GPUs that config.json shows
    pub others: Vec<Other>,
    /// NVML's processes, or why they are unknown
    pub gpus: Result<Vec<GpuProcesses>>,
    /// The container of each process that uses a GPU and belongs to one
    pub containers: BTreeMap<u32, String>,
    /// The MPS daemons of the host
    pub mps: Vec<Daemon>,
    /// The version of the loaded kernel module
    pub loaded: Option<String>,
}

/// A record, and whether its container runs.
#[derive(Debug)]
pub(super) struct Recorded {
    pub record: Record,
    pub is_running: bool,
}

impl Recorded {
    /// Reports whether this is the record of a running container with this id that got GPUs.
    fn has_gpus(&self, id: &str) -> bool {
        self.is_running && self.record.container.id == id && !self.record.devices.is_empty()
    }
}

/// A running container that the hook did not give GPUs.
#[derive(Debug)]
pub(super) struct Other {
    pub id: String,
    pub name: String,
    pub pod: Pod,
    pub devices: Vec<RecordedDevice>,
    pub started: SystemTime,
}

/// The directories in which containerd has the bundles of Kubernetes and Docker, by id.
const TASKS: [&str; 4] = [
    "/run/containerd/io.containerd.runtime.v2.task/k8s.io",
    "/run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io",
    "/run/containerd/io.containerd.runtime.v2.task/moby",
    "/run/docker/containerd/daemon/io.containerd.runtime.v2.task/moby",
];
/// The kernel counts time in /proc in hundredths of a second on all architectures of the driver (`USER_HZ`).
const TICKS: u64 = 100;
/// The time between the start of a process and the start of the hook, which is always later. Clocks can be adjusted meanwhile.
const TOLERANCE: Duration = Duration::from_secs(5);

/// Reads the facts. NVML can take seconds, and is not asked without a configuration.
pub(super) fn read(known: Vec<KnownContainer>, config: Option<&Config>) -> Facts {
    let running = first_processes(Path::new("/proc"), "").unwrap_or_default();
    let (mut records, mut others) = (Vec::new(), Vec::new());
    let mut names: BTreeMap<String, (String, PathBuf)> = BTreeMap::new();
    for known in known {
        let Some(record) = known.record else {
            let name = known.names.into_iter().next().unwrap_or_default();
            names.insert(known.id, (name, known.bundle));
            continue;
        };
        let is_running = runs(&record, &running);
        let place = (record.container.name.clone(), known.bundle);
        names.entry(known.id).or_insert(place);
        records.push(Recorded { record, is_running });
    }
    for (id, process) in &running {
        if !records.iter().any(|recorded| recorded.has_gpus(id)) {
            let (name, bundle) = names.remove(id).unwrap_or_default();
            others.push(other(id, *process, name, bundle));
        }
    }
    let gpus = match config {
        Some(config) => host::gpu_processes(config),
        None => Err(anyhow::anyhow!("config.toml is invalid")),
    };
    let mut containers = BTreeMap::new();
    for gpu in gpus.iter().flatten() {
        for process in gpu.processes.iter().flatten() {
            if let Some(id) = container_of(process.pid, &records) {
                containers.insert(process.pid, id);
            }
        }
    }
    Facts {
        records,
        others,
        gpus,
        containers,
        mps: config.map(host::mps_daemons).unwrap_or_default(),
        loaded: config.and_then(loaded_version),
    }
}

/// Returns the records, and whether their containers run.
pub(super) fn recorded(known: Vec<KnownContainer>) -> Vec<Recorded> {
    let running = first_processes(Path::new("/proc"), "").unwrap_or_default();
    let mut records = Vec::new();
    for record in known.into_iter().filter_map(|known| known.record) {
        let is_running = runs(&record, &running);
        records.push(Recorded { record, is_running });
    }
    records
}

fn runs(record: &Record, running: &BTreeMap<String, ProcessId>) -> bool {
    record.ended.is_empty() && (running.contains_key(&record.container.id) || is_alive(record))
}

/// Returns the version of the loaded kernel module.
fn loaded_version(config: &Config) -> Option<String> {
    procfs::read_version(&Roots::open(config).ok()?.proc)
}

fn id_of(pid: i32) -> Option<String> {
    let cgroup = proc_file::read_text(format!("/proc/{pid}/cgroup")).ok()?;
    cgroup_id::find(&cgroup, "").map(str::to_owned)
}

/// Returns when a process started. The clock can have been set since then, so this is not exact.
fn start_of(process: ProcessId) -> SystemTime {
    let boot = SystemTime::now() - Duration::from_secs(uptime());
    boot + Duration::from_secs(process.start / TICKS)
}

/// Reports whether the first process of the container of a record runs, for engines whose cgroups do not have the id as their name. The
/// kernel reuses the numbers of processes: another process started after the hook.
fn is_alive(record: &Record) -> bool {
    let dir = PathBuf::from(format!("/proc/{}", record.pid));
    if record.pid <= 0 {
        return false;
    }
    match (
        ProcessId::read(&dir, record.pid),
        time::parse(&record.started),
    ) {
        (Ok(process), Some(started)) => start_of(process) <= started + TOLERANCE,
        _ => false,
    }
}

/// Returns the id of the container of a process. If its cgroup does not have one, a parent can be the first process of a container.
fn container_of(pid: u32, records: &[Recorded]) -> Option<String> {
    let mut pid = i32::try_from(pid).ok()?;
    if let Some(id) = id_of(pid) {
        return Some(id);
    }
    loop {
        let first = |recorded: &&Recorded| recorded.is_running && recorded.record.pid == pid;
        if let Some(recorded) = records.iter().find(first) {
            return Some(recorded.record.container.id.clone());
        }
        pid = proc_file::parent(&pid.to_string()).filter(|parent| *parent > 1)?;
    }
}

/// Reads config.json of a container without a record.
fn other(id: &str, process: ProcessId, name: String, bundle: PathBuf) -> Other {
    let ProcessId { pid, .. } = process;
    let mut name = Some(name).filter(|name| !name.is_empty());
    name = name.or_else(|| conmon::name_of(id, pid));
    let mut bundles = vec![bundle];
    bundles.extend(conmon::bundle_of(id, pid));
    bundles.extend(TASKS.map(|dir| Path::new(dir).join(id)));
    bundles.retain(|bundle| !bundle.as_os_str().is_empty());
    let (mut pod, mut devices) = (Pod::default(), Vec::new());
    if let Some(spec) = bundles
        .iter()
        .find_map(|bundle| spec_view::read_named(bundle).ok())
    {
        if let Some(given) = engine_devices::find(&spec) {
            devices = given.devices();
        }
        name = name.or_else(|| storage::name_in_docker(id, &spec.mounts));
        pod = spec.pod;
    }
    Other {
        id: id.to_owned(),
        name: one_line(&name.unwrap_or_default()),
        pod,
        devices,
        started: start_of(process),
    }
}
