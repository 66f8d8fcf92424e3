//! A claim with its allocation and its opaque configuration, as the API server answers.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kubelet_plugin::cdi_specs::CLAIMS;
use kubelet_plugin::dra::devices::{ClaimDevice, MpsLimits};
use kubelet_plugin::dra::pool::Pool;
use kubelet_plugin::dra::prepare::{ClaimContext, prepare};
use kubelet_plugin::settings::values::TaintEffect;

use super::shared::check_line;

/// Prepares the claim for a pod with its uid. Its containers only get devices of the node.
pub fn run(data: &[u8]) {
    let Ok(claim) = serde_json::from_slice::<ResourceClaim>(data) else {
        return;
    };
    let device = |name: &str, unhealthy: Option<&str>| ClaimDevice {
        name: name.to_owned(),
        uuid: format!("GPU-{name}"),
        gpu: format!("GPU-{name}"),
        unhealthy: unhealthy.map(str::to_owned),
        ..ClaimDevice::default()
    };
    let mps = Some(MpsLimits {
        memory: Some(8 << 30),
        thread_percentage: 25,
    });
    let pool = Pool {
        is_ready: true,
        devices: Arc::new(vec![
            ClaimDevice {
                mps,
                ..device("gpu-0", None)
            },
            device("gpu-1", Some("XID 79")),
        ]),
        ..Pool::default()
    };
    let known = ClaimContext {
        node: "node",
        driver: "gpu.nvidia.com",
        pool: &pool,
        effect: TaintEffect::NoSchedule,
    };
    let uid = claim.metadata.uid.clone().unwrap_or_default();
    match prepare(&claim, &uid, &known, None) {
        Ok(devices) => {
            for device in devices {
                assert_eq!(
                    (device.pool_name.as_str(), device.device_name.as_str()),
                    ("node", "gpu-0")
                );
                assert_eq!(device.cdi_device_ids, [CLAIMS.device_name("GPU-gpu-0")]);
            }
        }
        Err(refusal) => check_line(&refusal.to_string()),
    }
    let other = prepare(&claim, "the uid of another claim", &known, None);
    assert!(
        other.is_err() || uid == "the uid of another claim",
        "another claim"
    );
}
