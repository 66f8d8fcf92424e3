//! Lists the processes on each GPU.

use base::sys::confine::CapabilitySet;
use nvidia_host::inventory::processes::{GpuProcess, GpuProcesses};
use nvidia_host::nvml::Failed;
use nvidia_host::nvml::protocol::{LibraryPlace, MAX_GPUS, ProcessLine};

use crate::api::{DeviceHandle, NvmlProcess, Processes, Use};
use crate::lines::Lines;
use crate::load::load;

/// Writes a line for each GPU, and a last line.
pub(crate) fn answer(place: &LibraryPlace, lines: &mut Lines) {
    let loaded = match load(CapabilitySet::empty(), place, &[], lines) {
        Ok(loaded) => loaded,
        Err(refused) => return lines.write(&ProcessLine::Refused(refused)),
    };
    let mut report = |gpu| lines.write(&ProcessLine::Gpu(gpu));
    let last = match take(&loaded.library, &mut report) {
        Ok(()) => ProcessLine::Done,
        Err(failed) => ProcessLine::Nvml(failed),
    };
    lines.write(&last);
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
