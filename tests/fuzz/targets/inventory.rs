//! The inventory, in the forms that the NVML process writes and that `plan --inventory` reads.

use nvidia_host::config::Limits;
use nvidia_host::device_id::VisibleDevices;
use nvidia_host::inventory::Inventory;
use nvidia_host::inventory::report::Report;
use nvidia_host::inventory::select::select;

use super::{check_error, check_findings};

/// Parses, prints and parses the inventory, then selects devices.
pub fn run(data: &[u8]) {
    if let Ok(inventory) = serde_json::from_slice::<Inventory>(data) {
        let text = serde_json::to_vec(&inventory).unwrap();
        assert_eq!(
            serde_json::from_slice::<Inventory>(&text).expect("what was printed"),
            inventory
        );
        check_choice(&inventory);
    }
    if let Ok(report) = serde_json::from_slice::<Report>(data) {
        let inventory = Inventory::from(report);
        let text = serde_json::to_vec(&Report::from(&inventory)).unwrap();
        let again = serde_json::from_slice::<Report>(&text).expect("what was printed");
        assert_eq!(Inventory::from(again), inventory);
        check_choice(&inventory);
    }
}

fn check_choice(inventory: &Inventory) {
    let names = ["0", "GPU-x", "0:0", "a/b=c"].map(str::to_owned);
    let lists = names
        .into_iter()
        .map(|name| VisibleDevices::List(vec![name]));
    for asked in lists.chain([VisibleDevices::All]) {
        match select(
            &asked,
            "NVIDIA_VISIBLE_DEVICES",
            inventory,
            &Limits::default(),
        ) {
            Ok((devices, findings)) => {
                let parts: usize = inventory
                    .gpus
                    .iter()
                    .map(|gpu| 1 + gpu.mig_devices.len())
                    .sum();
                assert!(!devices.is_empty() && devices.len() <= parts);
                check_findings(&findings);
            }
            Err(error) => check_error(&error),
        }
    }
}
