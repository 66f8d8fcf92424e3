//! Lists the processes on a GPU.

use super::structs::{ProcessInfo, ProcessList};
use super::table::Room;
use super::{NvmlLibrary, stored};
use crate::api::{DeviceHandle, NvmlProcess, Processes, Use};
use nvidia_host::nvml::{Code, Failed};

impl Processes for NvmlLibrary {
    fn processes(&self, device: DeviceHandle, how: Use) -> Result<Vec<NvmlProcess>, Failed> {
        let newest = |(room, list): &mut (Room, Box<ProcessList>)| match how {
            Use::Compute => self.nvmlDeviceGetComputeRunningProcesses_v3(device, room, list),
            Use::Graphics => self.nvmlDeviceGetGraphicsRunningProcesses_v3(device, room, list),
            Use::Mps => self.nvmlDeviceGetMPSComputeRunningProcesses_v3(device, room, list),
        };
        let before_510 = |(room, list): &mut (Room, Box<ProcessList>)| match how {
            Use::Compute => self.nvmlDeviceGetComputeRunningProcesses_v2(device, room, list),
            Use::Graphics => self.nvmlDeviceGetGraphicsRunningProcesses_v2(device, room, list),
            Use::Mps => self.nvmlDeviceGetMPSComputeRunningProcesses_v2(device, room, list),
        };
        let empty = || (Room::OF_PROCESSES, ProcessInfo::empty_list());
        let (room, list) = match stored(empty(), newest) {
            Err(Failed {
                code: Code::FUNCTION_NOT_FOUND,
                ..
            }) => stored(empty(), before_510)?,
            answer => answer?,
        };
        Ok(list
            .iter()
            .take(room.count())
            .map(ProcessInfo::process)
            .collect())
    }
}
