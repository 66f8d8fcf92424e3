//! Reads and sets the compute mode of a GPU.

use base::sys::confine::CapabilitySet;
use nvidia_host::nvml::Failed;
use nvidia_host::nvml::compute_mode::ComputeMode;
use nvidia_host::nvml::protocol::{LibraryPlace, MAX_GPUS, ModeLine, ModeTarget};

use crate::api::{ComputeModes, DeviceHandle};
use crate::lines::Lines;
use crate::load::load;

/// Carries out orders from the standard input until it is closed.
pub(crate) fn answer(place: &LibraryPlace, target: &ModeTarget, lines: &mut Lines) {
    match load(CapabilitySet::SYS_ADMIN, place, &[], lines) {
        Ok(loaded) => obey(&loaded.library, target, &mut next_order, &mut |line| {
            lines.write(line)
        }),
        Err(refused) => lines.write(&ModeLine::Refused(refused)),
    }
}

/// Reads an order from the standard input, and returns `None` at its end.
fn next_order() -> Option<u8> {
    let mut order = [0];
    let count = rustix::io::read(rustix::stdio::stdin(), &mut order).ok()?;
    (count == 1).then_some(order[0])
}

/// Carries out orders until the parent closes the pipe.
fn obey(
    api: &impl ComputeModes,
    target: &ModeTarget,
    next: &mut dyn FnMut() -> Option<u8>,
    write: &mut dyn FnMut(&ModeLine),
) {
    let device = match find(api, target) {
        Ok(Some(device)) => device,
        Ok(None) => return write(&ModeLine::NoGpu),
        Err(failed) => return write(&ModeLine::Nvml(failed)),
    };
    while let Some(order) = next() {
        write(&carry_out(api, device, order));
    }
}

fn carry_out(api: &impl ComputeModes, device: DeviceHandle, order: u8) -> ModeLine {
    let digit = u32::from(order.wrapping_sub(b'0'));
    let done = match ComputeMode::from_number(digit) {
        Some(mode) => api.set_compute_mode(device, mode).map(|()| ModeLine::Set),
        None => api.compute_mode(device).map(ModeLine::Mode),
    };
    done.unwrap_or_else(ModeLine::Nvml)
}

/// Returns the GPU with this UUID.
fn find(api: &impl ComputeModes, target: &ModeTarget) -> Result<Option<DeviceHandle>, Failed> {
    api.init()?;
    let count = api.device_count()?.min(MAX_GPUS);
    let probable = target.index.filter(|index| *index < count);
    for index in probable.into_iter().chain(0..count) {
        let Ok(device) = api.device(index) else {
            continue;
        };
        if api.uuid(device).is_ok_and(|uuid| uuid == target.uuid) {
            return Ok(Some(device));
        }
    }
    Ok(None)
}
