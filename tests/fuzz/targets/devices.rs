//! `NVIDIA_VISIBLE_DEVICES` against an inventory and the administrator's limits: the first line is the variable, the
//! second `devices.allow`, the third `devices.deny`.

use base::report::render;
use nvidia_host::config::Limits;
use nvidia_host::device_id::{DeviceId, VisibleDevices, parse};
use nvidia_host::inventory::limits::permit;
use nvidia_host::inventory::select::{Device, select};
use nvidia_host::inventory::{Gpu, Inventory};

use super::{check_error, check_findings, sample_inventory, text};

/// Parses the variable and selects devices.
pub fn run(data: &[u8]) {
    let text = text(data);
    let mut lines = text.lines();
    let value = lines.next().unwrap_or_default();
    let mut list = || -> Vec<String> {
        lines
            .next()
            .unwrap_or_default()
            .split(',')
            .filter(|word| !word.is_empty())
            .map(str::to_owned)
            .collect()
    };
    let limits = Limits {
        allow: list(),
        deny: list(),
        ..Limits::default()
    };
    let Some(devices) = parse(value) else { return };
    if let VisibleDevices::List(names) = &devices {
        check_names(names);
        assert_eq!(
            parse(&names.join(",")),
            Some(devices.clone()),
            "a list is its own list"
        );
    }
    let inventory = sample_inventory();
    match select(&devices, "NVIDIA_VISIBLE_DEVICES", &inventory, &limits) {
        Ok((chosen, findings)) => {
            check_findings(&findings);
            check_chosen(&devices, &chosen, &inventory, &limits);
        }
        Err(error) => {
            check_error(&error);
            check_not_offered(&render(&error), value, &inventory, &limits);
        }
    }
}

fn check_names(names: &[String]) {
    assert!(!names.is_empty());
    for name in names {
        assert!(
            !name.is_empty() && name.trim() == name && !name.contains(',') && name != "void",
            "{names:?}"
        );
        let id = DeviceId::parse(name);
        assert_eq!(
            DeviceId::parse(&id.to_string()),
            id,
            "what is printed means the same"
        );
    }
}

fn check_chosen(
    devices: &VisibleDevices,
    chosen: &[Device<'_>],
    inventory: &Inventory,
    limits: &Limits,
) {
    let place = |device: &Device<'_>| match device {
        Device::Gpu(gpu) => (gpu.index, None),
        Device::Mig(gpu, mig) => (gpu.index, Some(mig.index)),
    };
    assert!(
        chosen.is_sorted_by(|a, b| place(a) < place(b)),
        "each once, in NVML's order: {chosen:?}"
    );
    assert!(
        chosen.iter().all(|device| permitted(device, limits)),
        "{chosen:?} with {limits:?}"
    );
    match devices {
        VisibleDevices::None => assert!(chosen.is_empty()),
        VisibleDevices::Nodes(nodes) => panic!("no variable asks by {nodes:?}"),
        VisibleDevices::All => {
            let all = all(inventory)
                .filter(|device| permitted(device, limits))
                .count();
            assert_eq!(chosen.len(), all, "all that it may have");
        }
        VisibleDevices::List(names) => {
            assert!(!chosen.is_empty());
            let named = |device: &Device<'_>| {
                names
                    .iter()
                    .map(|name| DeviceId::parse(name))
                    .any(|id| match device {
                        Device::Gpu(gpu) => gpu.is_named(&id),
                        Device::Mig(gpu, mig) => mig.is_named(&id, gpu),
                    })
            };
            assert!(
                chosen.iter().all(named),
                "{chosen:?} was not asked for by {names:?}"
            );
            assert_eq!(
                all(inventory).filter(named).count(),
                chosen.len(),
                "{names:?} names more"
            );
        }
    }
}

/// Messages do not name devices that containers may not have.
fn check_not_offered(message: &str, value: &str, inventory: &Inventory, limits: &Limits) {
    for device in all(inventory).filter(|device| !permitted(device, limits)) {
        assert!(
            !message.contains(device.uuid()) || value.contains(device.uuid()),
            "{device:?} is offered: {message}"
        );
    }
}

fn permitted(device: &Device<'_>, limits: &Limits) -> bool {
    match device {
        Device::Gpu(gpu) => permit(limits, gpu, None),
        Device::Mig(gpu, mig) => permit(limits, gpu, Some(mig)),
    }
}

fn all(inventory: &Inventory) -> impl Iterator<Item = Device<'_>> {
    let parts = |gpu: &'_ Gpu| gpu.mig_devices.len();
    inventory.gpus.iter().flat_map(move |gpu| {
        (0..=parts(gpu)).map(move |part| match part {
            0 => Device::Gpu(gpu),
            mig => Device::Mig(gpu, &gpu.mig_devices[mig - 1]),
        })
    })
}
