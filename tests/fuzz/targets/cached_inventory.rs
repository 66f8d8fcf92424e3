//! The cached inventory: the file, and whether the kernel confirms its contents.

use std::collections::BTreeMap;

use nvidia_host::inventory::cache::{CachedInventory, KernelView};
use nvidia_host::inventory::fingerprint;
use nvidia_host::inventory::procfs::KernelGpu;
use nvidia_host::inventory::scope::Scope;
use nvidia_host::inventory::{BusId, Inventory};

/// Uses the bytes as the file, and as its contents.
pub fn run(data: &[u8]) {
    if let Some(answer) = CachedInventory::parse(data) {
        check_file(&answer);
        let mut damaged = data.to_vec();
        if let Some(last) = damaged.last_mut() {
            *last ^= 1;
        }
        assert_eq!(CachedInventory::parse(&damaged), None);
    }
    if let Ok(answer) = serde_json::from_slice::<CachedInventory>(data) {
        check_file(&answer);
    }
    if let Ok(inventory) = serde_json::from_slice::<Inventory>(data) {
        check_confirmation(&inventory);
    }
}

fn check_file(answer: &CachedInventory) {
    let bytes = answer.to_bytes();
    assert_eq!(CachedInventory::parse(&bytes).as_ref(), Some(answer));
    assert_eq!(
        CachedInventory::parse(&bytes[..bytes.len() - 1]),
        None,
        "half a file"
    );
    let nobody = KernelView {
        scope: Scope::All,
        known_gpus: Vec::new(),
        version: String::new(),
        gpus: Vec::new(),
        nodes: BTreeMap::new(),
        instances: Vec::new(),
        caps: Vec::new(),
        missing_caps: Vec::new(),
        state: None,
        uptime: 0,
    };
    assert!(
        !answer.is_confirmed_by(&nobody),
        "a host that cannot be looked at"
    );
}

fn is_confirmed(inventory: &Inventory, version: &str, kernel: &[KernelGpu]) -> bool {
    fingerprint::is_confirmed(inventory, version, kernel, &[], &Scope::All)
}

/// A kernel with exactly these GPUs may confirm the inventory; a kernel that differs in any way does not.
fn check_confirmation(inventory: &Inventory) {
    let kernel = |gpu: &nvidia_host::inventory::Gpu| KernelGpu {
        bus_id: gpu.bus_id,
        dir: "0000:00:00.0".into(),
        minor: Some(gpu.minor),
        uuid: Some(gpu.uuid.clone()),
        ..KernelGpu::default()
    };
    let same: Vec<_> = inventory.gpus.iter().map(kernel).collect();
    let version = &inventory.driver_version;
    if !is_confirmed(inventory, version, &same) {
        return;
    }
    assert!(inventory.failed.is_empty() && !same.is_empty());
    assert!(
        !inventory
            .gpus
            .iter()
            .any(|gpu| gpu.mig_enabled || !gpu.mig_devices.is_empty())
    );
    assert!(!is_confirmed(inventory, &format!("{version}.1"), &same));
    for (at, gpu) in same.iter().enumerate().take(16) {
        let with = |change: &dyn Fn(&mut KernelGpu)| {
            let mut other = same.clone();
            change(&mut other[at]);
            is_confirmed(inventory, version, &other)
        };
        assert!(!with(&|gpu| gpu.excluded = true));
        assert!(!with(&|gpu| gpu.minor = None) && !with(&|gpu| gpu.uuid = None));
        assert!(!with(&|gpu| gpu.minor = gpu.minor.map(|minor| minor ^ 1)));
        assert!(!with(
            &|gpu| gpu.uuid = gpu.uuid.as_ref().map(|uuid| format!("{uuid}0"))
        ));
        assert!(!with(&|gpu| gpu.bus_id = BusId {
            bus: gpu.bus_id.bus ^ 1,
            ..gpu.bus_id
        }));
        let others = same
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != at)
            .map(|(_, gpu)| gpu.clone());
        assert!(
            !is_confirmed(inventory, version, &others.collect::<Vec<_>>()),
            "one less"
        );
        assert!(
            !is_confirmed(
                inventory,
                version,
                &[&same[..], std::slice::from_ref(gpu)].concat()
            ),
            "one twice"
        );
    }
    let turned: Vec<_> = same.iter().rev().cloned().collect();
    assert!(
        is_confirmed(inventory, version, &turned),
        "the kernel's order means nothing"
    );
}
