//! Leaves out the devices that pods of the device plugin still have. The node may have got the driver for claims while such pods run, and the
//! scheduler counts only claims: it would give their devices to another pod.

use std::collections::BTreeSet;
use std::future::pending;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use super::devices::ClaimDevice;
use super::pool::Pool;
use crate::kubelet::other_plugins::stem;
use crate::kubelet::pods;

/// How often the kubelet is asked while pods have devices, or while it does not answer.
const PERIOD: Duration = Duration::from_secs(10);

/// Why a device is not offered.
pub(super) const HELD: &str = "a pod that got it from the device plugin still runs";

/// Follows the devices of the node, and marks those that pods of the device plugin have. No pod gets devices from a device plugin while the
/// driver runs, so the kubelet is asked until none has any.
pub(super) async fn follow(
    pod_resources: &Path,
    mut node: watch::Receiver<Pool>,
    marked: watch::Sender<Pool>,
) {
    let mut held = pods::device_ids(pod_resources).await;
    loop {
        let pool = node.borrow_and_update().clone();
        let is_held = held.as_ref().is_none_or(|ids| has_any(&pool, ids));
        let pool = mark(pool, held.as_ref());
        marked.send_if_modified(|known| {
            let is_new = *known != pool;
            *known = pool;
            is_new
        });
        tokio::select! {
            changed = node.changed() => if changed.is_err() {
                // The node does not change any more.
                return pending().await;
            },
            () = sleep(PERIOD), if is_held => {
                held = pods::device_ids(pod_resources).await.or(held);
            }
        }
    }
}

fn has_any(pool: &Pool, ids: &BTreeSet<String>) -> bool {
    // Before NVML has answered, it is not known which devices there are.
    !pool.is_ready || pool.devices.iter().any(|device| is_held(device, ids))
}

/// Pods with replicas of a GPU, or with MIG devices, have ids of their own.
fn is_held(device: &ClaimDevice, ids: &BTreeSet<String>) -> bool {
    let mut stems = ids.iter().map(|id| stem(id));
    stems.any(|stem| stem == device.uuid || stem == device.gpu)
}

fn mark(pool: Pool, held: Option<&BTreeSet<String>>) -> Pool {
    let Some(ids) = held else { return pool };
    if !pool.devices.iter().any(|device| is_held(device, ids)) {
        return pool;
    }
    let mut devices = pool.devices.to_vec();
    for device in &mut devices {
        if is_held(device, ids) {
            device.unhealthy.get_or_insert_with(|| HELD.to_owned());
        }
    }
    Pool {
        devices: Arc::new(devices),
        ..pool
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_pods() {
        let device = |uuid: &str, unhealthy: Option<&str>| ClaimDevice {
            uuid: uuid.to_owned(),
            gpu: "GPU-0".to_owned(),
            unhealthy: unhealthy.map(str::to_owned),
            ..ClaimDevice::default()
        };
        let devices = [device("MIG-1", None), device("MIG-2", Some("XID 79"))];
        let pool = Pool {
            is_ready: true,
            devices: Arc::new(devices.to_vec()),
            ..Pool::default()
        };
        for (ids, expected) in [
            (&[][..], [None, Some("XID 79")]),
            (&["GPU-1", "0000:3b:00.0"], [None, Some("XID 79")]),
            (&["MIG-1::3"], [Some(HELD), Some("XID 79")]),
            (&["MIG-2"], [None, Some("XID 79")]),
            (&["GPU-0"], [Some(HELD), Some("XID 79")]),
        ] {
            let ids: BTreeSet<String> = ids.iter().map(|id| (*id).to_owned()).collect();
            let marked = mark(pool.clone(), Some(&ids));
            let mut found = Vec::new();
            for device in marked.devices.iter() {
                found.push(device.unhealthy.as_deref());
            }
            assert_eq!(found, expected, "{ids:?}");
        }
        assert_eq!(mark(pool.clone(), None), pool);
    }
}
