//! Asks NVML which processes use each GPU, in a confined child like the question for the inventory.

use std::fs::File;
use std::time::Instant;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use base::json;
use base::sys::child::{self, NoAnswer};
use base::sys::confine::{CapabilitySet, Identity};

use super::identity;
use super::notice::Wait;
use super::query::{self, NvmlQuery, Unloadable};
use crate::nvml::api::{DeviceHandle, Failed};
use crate::nvml::processes::{NvmlProcess, Processes, Use};

/// The limit for the number of GPUs that NVML reports.
const MAX_GPUS: u32 = 256;

/// The processes of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcesses {
    /// NVML's index
    pub index: u32,
    /// The N of `/dev/nvidiaN`
    pub minor: Option<u32>,
    /// `GPU-…`; empty if NVML does not report it
    pub uuid: String,
    /// The processes, or why NVML does not list them
    pub processes: Result<Vec<GpuProcess>, String>,
}

/// A process that uses a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Its id in this PID namespace
    pub pid: u32,
    /// The memory of the GPU that it uses, in bytes; `None` if the driver does not know it
    pub memory: Option<u64>,
    /// Whether it computes as a client of MPS
    pub is_mps_client: bool,
}

/// A line that the child writes.
#[derive(Serialize, Deserialize)]
enum ProcessLine {
    Gpu(GpuProcesses),
    Done,
    Nvml(Failed),
    Refused(Unloadable),
}

/// Asks NVML for the processes of all GPUs until `end`.
///
/// # Errors
/// If the library cannot be loaded, fails as a whole, or does not answer in time. A GPU that fails has the reason instead of processes.
pub fn ask(question: &NvmlQuery, end: Instant) -> Result<Vec<GpuProcesses>> {
    query::timed(question, || ask_all(question, end))
}

fn ask_all(question: &NvmlQuery, end: Instant) -> Result<Vec<GpuProcesses>> {
    let identity = identity::choose(question.who, &question.root, &question.library)?;
    let wait = Wait::begin(question.deadline);
    let mut process = child::spawn_among_processes(|pipe| respond(question, identity, pipe))
        .map_err(|error| query::without_answer(NoAnswer::System(error), question))?;
    let mut gpus = Vec::new();
    loop {
        let line = query::next_line(&mut process, end, wait)
            .map_err(|why| query::without_answer(why, question))?;
        match json::from_bytes(&line) {
            Ok(ProcessLine::Gpu(gpu)) => gpus.push(gpu),
            Ok(ProcessLine::Done) => return Ok(gpus),
            Ok(ProcessLine::Nvml(failed)) => {
                return Err(query::explain_nvml(&failed, question, identity));
            }
            Ok(ProcessLine::Refused(refused)) => {
                return Err(query::explain_refused(&refused, question));
            }
            Err(error) => {
                return Err(query::without_answer(
                    NoAnswer::System(error.into()),
                    question,
                ));
            }
        }
    }
}

fn respond(question: &NvmlQuery, identity: Option<Identity>, pipe: &mut File) {
    let loaded = query::load(CapabilitySet::empty(), question, identity, &[], pipe);
    let mut report = |gpu| query::write_line(pipe, &ProcessLine::Gpu(gpu));
    let last = match &loaded {
        Ok(loaded) => take(&loaded.library, &mut report)
            .map_or_else(ProcessLine::Nvml, |()| ProcessLine::Done),
        Err(refused) => ProcessLine::Refused(refused.clone()),
    };
    query::write_line(pipe, &last);
}

/// Reports the processes of each GPU.
fn take(api: &impl Processes, report: &mut dyn FnMut(GpuProcesses)) -> Result<(), Failed> {
    api.init()?;
    for index in 0..api.device_count()?.min(MAX_GPUS) {
        let mut gpu = GpuProcesses {
            index,
            minor: None,
            uuid: String::new(),
            processes: Ok(Vec::new()),
        };
        gpu.processes = of_gpu(api, &mut gpu).map_err(|failed| failed.to_string());
        report(gpu);
    }
    Ok(())
}

fn of_gpu(api: &impl Processes, gpu: &mut GpuProcesses) -> Result<Vec<GpuProcess>, Failed> {
    let device = api.device(gpu.index)?;
    gpu.uuid = api.uuid(device)?;
    gpu.minor = api.minor(device).ok();
    let mut processes = of_device(api, device)?;
    // A user without privileges gets only the processes of each MIG device, and not the processes of the whole GPU.
    if api.mig_mode(device) == Ok(1) {
        for index in 0..api.max_mig_device_count(device).unwrap_or_default().min(64) {
            let of_mig = api
                .mig_device(device, index)
                .and_then(|mig| of_device(api, mig))
                .unwrap_or_default();
            of_mig
                .into_iter()
                .for_each(|process| add(&mut processes, process));
        }
    }
    Ok(processes)
}

/// Returns the processes of a device. Only compute processes must be listed: devices without graphics or MPS refuse these lists.
fn of_device(api: &impl Processes, device: DeviceHandle) -> Result<Vec<GpuProcess>, Failed> {
    let mut processes = Vec::new();
    let lists = [
        api.processes(device, Use::Compute)?,
        api.processes(device, Use::Graphics).unwrap_or_default(),
        api.processes(device, Use::Mps).unwrap_or_default(),
    ];
    let uses = [Use::Compute, Use::Graphics, Use::Mps];
    for (how, list) in uses.into_iter().zip(lists) {
        for NvmlProcess { pid, memory } in list {
            let process = GpuProcess {
                pid,
                memory,
                is_mps_client: how == Use::Mps,
            };
            add(&mut processes, process);
        }
    }
    Ok(processes)
}

/// Adds a process. Each list of NVML that has a process has all the memory that it uses on the device.
fn add(processes: &mut Vec<GpuProcess>, process: GpuProcess) {
    match processes.iter_mut().find(|known| known.pid == process.pid) {
        Some(known) => {
            known.memory = known.memory.max(process.memory);
            known.is_mps_client |= process.is_mps_client;
        }
        None => processes.push(process),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_in_two_lists_counts_once() {
        let mut processes = Vec::new();
        for (pid, memory) in [
            (7, Some(5)),
            (8, None),
            (7, Some(6)),
            (8, Some(1)),
            (7, None),
        ] {
            let process = GpuProcess {
                pid,
                memory,
                is_mps_client: memory == Some(1),
            };
            add(&mut processes, process);
        }
        assert_eq!(
            processes,
            [
                GpuProcess {
                    pid: 7,
                    memory: Some(6),
                    is_mps_client: false
                },
                GpuProcess {
                    pid: 8,
                    memory: Some(1),
                    is_mps_client: true
                }
            ]
        );
    }
}
