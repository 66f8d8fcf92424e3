//! Request × inventory → the GPUs that the container gets.

use anyhow::Result;

use super::{FailedGpu, Gpu, Inventory};
use crate::error::failure;
use crate::finding::Finding;
use crate::request::{DeviceId, VISIBLE_DEVICES, VisibleDevices};

/// The chosen GPUs, each once, in NVML's order, and what there is to say about the others.
///
/// # Errors
/// If a GPU is asked for that the host does not have or that does not work, or `all` of none.
pub fn select<'a>(devices: &VisibleDevices, inventory: &'a Inventory) -> Result<(Vec<&'a Gpu>, Vec<Finding>)> {
    match devices {
        VisibleDevices::None => Ok((Vec::new(), Vec::new())),
        VisibleDevices::All => select_all(inventory),
        VisibleDevices::List(ids) => {
            let mut chosen = Vec::new();
            for id in ids {
                chosen.push(find(id, inventory)?);
            }
            chosen.sort_by_key(|gpu| gpu.index);
            chosen.dedup_by_key(|gpu| gpu.index);
            Ok((chosen, Vec::new()))
        }
    }
}

fn select_all(inventory: &Inventory) -> Result<(Vec<&Gpu>, Vec<Finding>)> {
    if let Some(missing) = inventory.failed.iter().find(|gpu| gpu.node_missing) {
        return Err(not_usable("all", missing));
    }
    if inventory.gpus.is_empty() {
        return Err(match inventory.failed.first() {
            Some(failed) => not_usable("all", failed),
            None => failure(
                format!("{VISIBLE_DEVICES}=all, but the driver finds no GPU"),
                "look for the GPU with \"nvidia-smi -L\" and in \"journalctl -k\" on the host",
            ),
        });
    }
    let left_out = inventory.failed.iter().map(|failed| {
        Finding::warning(
            format!("{failed}; the container gets the other {} GPUs", inventory.gpus.len()),
            "look at it with \"nvidia-smi -q\" and \"journalctl -k\" on the host",
        )
    });
    Ok((inventory.gpus.iter().collect(), left_out.collect()))
}

fn find<'a>(id: &DeviceId, inventory: &'a Inventory) -> Result<&'a Gpu> {
    if let Some(gpu) = inventory.gpus.iter().find(|gpu| matches(id, Some(gpu.index), Some(&gpu.uuid), Some(gpu.bus_id)))
    {
        return Ok(gpu);
    }
    let failed = inventory.failed.iter().find(|gpu| matches(id, gpu.index, gpu.uuid.as_deref(), gpu.bus_id));
    if let Some(failed) = failed {
        return Err(not_usable(&id.to_string(), failed));
    }
    let is_mig = matches!(id, DeviceId::Mig { .. }) || matches!(id, DeviceId::Uuid(uuid) if uuid.starts_with("MIG-"));
    let what = if is_mig { "MIG devices cannot be chosen yet" } else { "this host has no such GPU" };
    let mut what = format!("{VISIBLE_DEVICES} asks for {:?}: {what}", id.to_string());
    // It may be one that is there and broken: by index nobody can tell which one was meant.
    for failed in &inventory.failed {
        what.push_str(&format!("; {failed}"));
    }
    Err(failure(what, format!("ask for one of {}", known(inventory))))
}

fn matches(id: &DeviceId, index: Option<u32>, uuid: Option<&str>, bus_id: Option<super::BusId>) -> bool {
    match id {
        DeviceId::Index(asked) => index == Some(*asked),
        DeviceId::Uuid(asked) => uuid.is_some_and(|uuid| uuid.eq_ignore_ascii_case(asked)),
        DeviceId::PciBusId { domain, bus, device } => {
            bus_id == Some(super::BusId { domain: *domain, bus: u32::from(*bus), device: u32::from(*device) })
        }
        DeviceId::Mig { .. } | DeviceId::Unknown(_) => false,
    }
}

fn not_usable(asked: &str, failed: &FailedGpu) -> anyhow::Error {
    let hint = if failed.node_missing {
        "make the node with \"nvidia-modprobe -c 0 -u\" or \"nvidia-smi\" as root on the host"
    } else {
        "look at it with \"nvidia-smi -q\" and \"journalctl -k\" on the host"
    };
    failure(format!("{VISIBLE_DEVICES} asks for {asked:?}: {failed}"), hint)
}

fn known(inventory: &Inventory) -> String {
    let each = inventory.gpus.iter().map(|gpu| format!("{} ({}, {})", gpu.index, gpu.uuid, gpu.bus_id));
    each.chain(["all".to_owned(), "none".to_owned()]).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::render;
    use crate::inventory::BusId;
    use crate::request::devices;

    fn inventory() -> Inventory {
        let gpu = |index: u32| Gpu {
            index,
            minor: index,
            uuid: format!("GPU-0000000{index}"),
            bus_id: BusId { domain: 0, bus: index + 1, device: 0 },
            model: String::new(),
            compute_capability: String::new(),
            mig_enabled: false,
        };
        Inventory { gpus: (0..3).map(gpu).collect(), ..Inventory::default() }
    }

    fn failed(index: Option<u32>, node_missing: bool) -> FailedGpu {
        let why = "it is lost".to_owned();
        FailedGpu { index, uuid: None, bus_id: Some(BusId { domain: 0, bus: 9, device: 0 }), why, node_missing }
    }

    fn chosen(asked: &str, inventory: &Inventory) -> Result<Vec<u32>> {
        let asked = devices::parse(asked).unwrap();
        select(&asked, inventory).map(|(gpus, _)| gpus.iter().map(|gpu| gpu.index).collect())
    }

    #[test]
    fn each_form_finds_its_gpu_once() {
        for (asked, expected) in [
            ("all", vec![0, 1, 2]),
            ("none", vec![]),
            ("1", vec![1]),
            ("2,0,2", vec![0, 2]),
            ("gpu-00000001", vec![1]),
            ("0000:02:00.0,1", vec![1]),
        ] {
            assert_eq!(chosen(asked, &inventory()).unwrap(), expected, "{asked}");
        }
    }

    #[test]
    fn an_unknown_gpu_is_named_with_the_known_ones() {
        for asked in ["7", "GPU-x", "0000:55:00.0", "bogus", "0:1", "MIG-x"] {
            let text = render(&chosen(asked, &inventory()).unwrap_err());
            assert!(text.contains("NVIDIA_VISIBLE_DEVICES asks for"), "{text}");
            assert!(text.contains("0 (GPU-00000000, 00000000:01:00.0)") && text.contains("all, none"), "{text}");
        }
    }

    #[test]
    fn a_failed_gpu_matters_to_who_asks_for_it() {
        let mut inventory = inventory();
        inventory.failed.push(failed(Some(3), false));
        assert_eq!(chosen("0", &inventory).unwrap(), [0]);
        let (gpus, findings) = select(&VisibleDevices::All, &inventory).unwrap();
        assert_eq!((gpus.len(), findings.len()), (3, 1));
        assert!(findings[0].what.contains("GPU 3: it is lost"), "{}", findings[0].what);
        for asked in ["3", "0000:09:00.0"] {
            assert!(render(&chosen(asked, &inventory).unwrap_err()).contains("GPU 3: it is lost"));
        }
    }

    #[test]
    fn a_missing_node_stops_a_container_that_asks_for_all() {
        let mut inventory = inventory();
        inventory.failed.push(failed(None, true));
        assert!(render(&chosen("all", &inventory).unwrap_err()).contains("GPU at 00000000:09:00.0: it is lost"));
        assert_eq!(chosen("0,1", &inventory).unwrap(), [0, 1]);
        assert!(render(&chosen("3", &inventory).unwrap_err()).contains("GPU at 00000000:09:00.0"));
    }

    #[test]
    fn all_of_nothing_is_an_error() {
        assert!(render(&chosen("all", &Inventory::default()).unwrap_err()).contains("finds no GPU"));
    }
}
