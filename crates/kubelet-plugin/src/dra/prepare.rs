//! Decides what the containers of a claim get. The answer depends on the claim and on the state of the node only, so that nothing is
//! stored, and a repeated request has an equal answer. Last, the host is examined: a node or the spec can be missing.
//!
//! Whether another claim has the device is not checked: the scheduler allocates a device once, and the allocation in the API server is what
//! counts. NVIDIA's driver compares with its checkpoint. Without one, the other claims of the node are not known: a node may read only
//! the claims of its pods, by name, and the kubelet's pod resources no longer list a pod that was deleted by force, which is the only case in
//! which a device can be allocated again while containers still run.

use base::report::Kind;
use findings::catalog;
use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim,
};

use super::config;
use super::devices::ClaimDevice;
use super::pool::Pool;
use super::slice::taint_key;
use crate::answer::allocator::ClaimCheck;
use crate::cdi_specs;
use crate::model::Refusal;
use crate::proto::dra::v1;
use crate::settings::values::TaintEffect;

/// What the node has for claims.
#[derive(Clone, Copy, Debug)]
pub struct ClaimContext<'a> {
    /// The name of the node and of its pool; empty if it is not known
    pub node: &'a str,
    /// The name of the driver
    pub driver: &'a str,
    /// The devices
    pub pool: &'a Pool,
    /// What the taint of a device does that does not work
    pub effect: TaintEffect,
}

/// Returns the devices of a claim that the kubelet names.
///
/// # Errors
/// If the claim is another one, or is not allocated, if a device does not exist or does not work, or if its configuration is not supported.
pub fn prepare(
    claim: &ResourceClaim,
    uid: &str,
    known: &ClaimContext<'_>,
    host: Option<&ClaimCheck>,
) -> Result<Vec<v1::Device>, Refusal> {
    let name = claim_name(claim);
    if claim.metadata.uid.as_deref() != Some(uid) {
        let what = format!("the claim {name:?} was replaced by another one of this name");
        return Err(Refusal::of(&catalog::CLAIM_STALE, &what, "delete the pod"));
    }
    let allocation = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref());
    let Some(allocation) = allocation.and_then(|allocation| allocation.devices.as_ref()) else {
        let what = format!("no device is allocated to the claim {name:?}");
        return Err(Refusal::of(&catalog::CLAIM_STALE, &what, "delete the pod"));
    };
    let configs = allocation.config.as_deref().unwrap_or_default();
    let ours = allocation
        .results
        .iter()
        .flatten()
        .filter(|result| result.driver == known.driver);
    let mut devices = Vec::new();
    let (mut uuids, mut for_cuda) = (Vec::new(), Vec::new());
    for (position, result) in ours.enumerate() {
        let found = device(result, known, configs, position);
        let found = found.map_err(|Cause { kind, what, fix }| {
            let what = format!(
                "cannot prepare {:?} for the claim {name:?}: {what}",
                result.device
            );
            Refusal::of(kind, &what, &fix)
        })?;
        uuids.push(found.uuid.as_str());
        if !is_admin(result) {
            for_cuda.push(found.uuid.as_str());
        }
        devices.push(answer(result, found));
    }
    if let Some(host) = host
        && !uuids.is_empty()
    {
        let why = format!("cannot prepare the claim {name:?}");
        host.check(&uuids, &for_cuda)
            .map_err(|refusal| refusal.in_context(&why))?;
    }
    Ok(devices)
}

/// Returns the name of a claim with its namespace.
fn claim_name(claim: &ResourceClaim) -> String {
    let (namespace, name) = (
        claim.metadata.namespace.as_deref(),
        claim.metadata.name.as_deref(),
    );
    format!(
        "{}/{}",
        namespace.unwrap_or_default(),
        name.unwrap_or_default()
    )
}

/// Why a device cannot be given.
struct Cause {
    kind: &'static Kind,
    what: String,
    fix: String,
}

impl Cause {
    /// The driver cannot give the device at present.
    fn not_now(what: &str) -> Self {
        Self {
            kind: &catalog::PLUGIN_DRIVER,
            what: what.to_owned(),
            fix: "run \"oci-nvidia-hook doctor\" on the node; the kubelet tries it again"
                .to_owned(),
        }
    }
}

/// Finds an allocated device in the pool of the node.
fn find<'k>(
    result: &DeviceRequestAllocationResult,
    known: &ClaimContext<'k>,
) -> Result<&'k ClaimDevice, Cause> {
    let pool = known.pool;
    if let Some(problem) = &pool.problem {
        return Err(Cause::not_now(problem));
    }
    if !known.node.is_empty() && result.pool != known.node {
        return Err(Cause {
            kind: &catalog::CLAIM_STALE,
            what: format!(
                "it is in the pool {:?}, and the pool of this node is {:?}",
                result.pool, known.node
            ),
            fix: "delete the pod".to_owned(),
        });
    }
    for device in pool.devices.iter() {
        if device.name == result.device {
            return Ok(device);
        }
    }
    if let Some(why) = &pool.unanswered {
        return Err(Cause::not_now(why));
    }
    Err(Cause {
        kind: &catalog::PLUGIN_UNKNOWN_DEVICE,
        what: "the device does not exist on the node".to_owned(),
        fix: "delete the pod and the claim; the scheduler chooses another device for the next ones"
            .to_owned(),
    })
}

/// Finds an allocated device that works, with a configuration that is supported.
fn device<'k>(
    result: &DeviceRequestAllocationResult,
    known: &ClaimContext<'k>,
    configs: &[DeviceAllocationConfiguration],
    position: usize,
) -> Result<&'k ClaimDevice, Cause> {
    let mps = config::check(known.driver, &result.request, configs);
    let mps = mps.map_err(|what| Cause {
        kind: &catalog::CLAIM_CONFIG,
        what,
        fix: "remove the configuration from the claim or from its DeviceClass".to_owned(),
    })?;
    if mps.is_some() && is_admin(result) {
        return Err(Cause {
            kind: &catalog::CLAIM_CONFIG,
            what:
                "a request with adminAccess is for monitoring, and its configuration requires MPS"
                    .to_owned(),
            fix: "remove the configuration for this request from the claim".to_owned(),
        });
    }
    let device = find(result, known)?;
    // An engine that does not find the CDI device starts no container, and does not know the reason.
    if !known.pool.in_spec.contains(&device.uuid) {
        let unanswered = known.pool.unanswered.as_deref();
        // A GPU that is lost is not in the spec either.
        let why = unanswered.or(device.unhealthy.as_deref());
        let why = why.unwrap_or("the CDI spec of the node does not have the device");
        return Err(Cause::not_now(why));
    }
    if let Some(why) = &device.unhealthy
        && !device.driver_silent
        && !tolerates_unhealthy(result, known)
    {
        let fix =
            "delete the pod, or run \"oci-nvidia-kubelet-plugin check\" on the node".to_owned();
        return Err(Cause {
            kind: &catalog::PLUGIN_UNHEALTHY_DEVICE,
            what: format!("it does not work: {why}"),
            fix,
        });
    }
    if let Some(mps) = mps {
        let unfit = mps.check(device, position);
        unfit.map_err(|config::Unfit { what, fix }| Cause {
            kind: &catalog::CLAIM_CONFIG,
            what,
            fix,
        })?;
    }
    Ok(device)
}

/// Returns the answer for a device.
fn answer(result: &DeviceRequestAllocationResult, device: &ClaimDevice) -> v1::Device {
    let mut cdi_device_ids = vec![cdi_specs::CLAIMS.device_name(&device.uuid)];
    if is_admin(result) {
        cdi_device_ids.push(cdi_specs::CLAIMS.device_name(cdi_specs::MONITORING));
    }
    v1::Device {
        request_names: vec![main_request(&result.request).to_owned()],
        pool_name: result.pool.clone(),
        device_name: result.device.clone(),
        cdi_device_ids,
        share_id: result.share_id.clone(),
    }
}

/// Whether the claim has the device for monitoring, beside others. It needs NVML, and neither CUDA nor a daemon of MPS.
fn is_admin(result: &DeviceRequestAllocationResult) -> bool {
    result.admin_access == Some(true)
}

/// The kubelet expects the request without the name of the alternative that the scheduler chose.
fn main_request(request: &str) -> &str {
    request.split('/').next().unwrap_or(request)
}

/// Whether the claim may have a device that does not work: for monitoring, if it tolerates the taint, or if the taint has no effect.
fn tolerates_unhealthy(result: &DeviceRequestAllocationResult, known: &ClaimContext<'_>) -> bool {
    let effect = known.effect.name();
    let mut tolerations = result.tolerations.iter().flatten();
    let is_tolerated = tolerations.any(|toleration| {
        let has_key = toleration
            .key
            .as_ref()
            .is_none_or(|key| key.is_empty() || *key == taint_key(known.driver));
        // Our taints have no value.
        let has_value = toleration.operator.as_deref() == Some("Exists")
            || toleration.value.as_ref().is_none_or(String::is_empty);
        has_key
            && has_value
            && toleration
                .effect
                .as_ref()
                .is_none_or(|found| found.is_empty() || *found == effect)
    });
    known.effect == TaintEffect::None || is_admin(result) || is_tolerated
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::dra::devices::MpsLimits;
    use crate::dra::slice::tests::device as our_device;

    fn claim(results: &Value, config: &Value) -> ResourceClaim {
        let devices = json!({"results": results, "config": config});
        serde_json::from_value(json!({
            "metadata": {"namespace": "default", "name": "train", "uid": "u-1"},
            "spec": {},
            "status": {"allocation": {"devices": devices}},
        }))
        .unwrap()
    }

    fn result(device: &str, more: &Value) -> Value {
        let mut result = json!({"request": "gpu", "driver": "gpu.nvidia.com", "pool": "node-1", "device": device});
        result
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        result
    }

    fn ask(claim: &ResourceClaim) -> Result<Vec<v1::Device>, String> {
        ask_with(claim, |_| ())
    }

    fn ask_with(
        claim: &ResourceClaim,
        change: impl Fn(&mut Pool),
    ) -> Result<Vec<v1::Device>, String> {
        let devices = vec![
            our_device("gpu-0", None),
            our_device("gpu-1", Some("XID 79")),
        ];
        let in_spec = Arc::new(devices.iter().map(|device| device.uuid.clone()).collect());
        let mut pool = Pool {
            is_ready: true,
            devices: Arc::new(devices),
            in_spec,
            ..Pool::default()
        };
        change(&mut pool);
        let known = ClaimContext {
            driver: "gpu.nvidia.com",
            node: "node-1",
            pool: &pool,
            effect: TaintEffect::NoSchedule,
        };
        prepare(claim, "u-1", &known, None).map_err(|refusal| refusal.to_string())
    }

    #[test]
    fn a_driver_that_does_not_answer() {
        let wants = |name: &str| claim(&json!([result(name, &json!({}))]), &json!([]));
        let silent = |pool: &mut Pool| {
            pool.unanswered = Some("NVML hangs".to_owned());
            Arc::make_mut(&mut pool.devices)
                .iter_mut()
                .for_each(|device| {
                    device.unhealthy = Some("NVML hangs".to_owned());
                    device.driver_silent = true;
                });
        };
        assert!(
            ask_with(&wants("gpu-0"), silent).is_ok(),
            "no error of the GPU is known"
        );
        // A MIG device whose name only NVML knows, and a GPU that the kernel has not opened yet
        for name in ["gpu-0-mig-1g10gb-1-0", "gpu-7"] {
            let error = ask_with(&wants(name), silent).unwrap_err();
            assert!(error.contains("NVML hangs (ONH-074); hint: "), "{error}");
        }
        let error = ask_with(&wants("gpu-0"), |pool| pool.in_spec = Arc::default()).unwrap_err();
        assert!(
            error.contains("the CDI spec of the node does not have the device (ONH-074)"),
            "{error}"
        );
    }

    #[test]
    fn a_healthy_device() {
        let results = json!([
            result("gpu-0", &json!({"request": "gpu/large", "shareID": "s"})),
            {"request": "nic", "driver": "nic.example.com", "pool": "p", "device": "nic-0"},
        ]);
        let expected = v1::Device {
            request_names: vec!["gpu".into()],
            pool_name: "node-1".into(),
            device_name: "gpu-0".into(),
            cdi_device_ids: vec!["k8s.gpu.nvidia.com/gpu=GPU-gpu-0".into()],
            share_id: Some("s".into()),
        };
        assert_eq!(ask(&claim(&results, &json!([]))), Ok(vec![expected]));
        assert_eq!(ask(&claim(&json!([]), &json!([]))), Ok(vec![]));
    }

    #[test]
    fn refusals() {
        let unhealthy = |more: Value| claim(&json!([result("gpu-1", &more)]), &json!([]));
        let mps = json!([{"source": "FromClass", "opaque": {"driver": "gpu.nvidia.com", "parameters": {"kind": "X"}}}]);
        let mut other = unhealthy(json!({}));
        other.metadata.uid = Some("u-2".into());
        let mut unallocated = unhealthy(json!({}));
        unallocated.status = None;
        for (claim, part) in [
            (
                unhealthy(json!({})),
                "cannot prepare \"gpu-1\" for the claim \"default/train\": it does not work: XID 79 (ONH-072); hint: ",
            ),
            (
                claim(&json!([result("gpu-9", &json!({}))]), &json!([])),
                "\"gpu-9\" for the claim \"default/train\": the device does not exist on the node (ONH-071)",
            ),
            (
                claim(&json!([result("gpu-0", &json!({}))]), &mps),
                "(ONH-083)",
            ),
            (
                other,
                "the claim \"default/train\" was replaced by another one of this name (ONH-082)",
            ),
            (
                claim(
                    &json!([result("gpu-0", &json!({"pool": "node-2"}))]),
                    &json!([]),
                ),
                "it is in the pool \"node-2\", and the pool of this node is \"node-1\" (ONH-082)",
            ),
            (
                unallocated,
                "no device is allocated to the claim \"default/train\" (ONH-082)",
            ),
        ] {
            let error = ask(&claim).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn claims_that_share_a_gpu() {
        let mps = |pool: &mut Pool| {
            let devices = Arc::make_mut(&mut pool.devices);
            devices[0].mps = Some(MpsLimits {
                memory: Some(8 << 30),
                thread_percentage: 100,
            });
            devices[1].unhealthy = None;
        };
        let config = |limit: &str| {
            let sharing =
                json!({"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": limit}});
            let parameters = json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing});
            json!([{"source": "FromClaim", "opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}])
        };
        let share = |id: &str| {
            result(
                "gpu-0",
                &json!({"shareID": id, "consumedCapacity": {"memory": "8Gi"}}),
            )
        };
        let one = json!([share("a")]);
        let found = ask_with(&claim(&one, &config("8Gi")), mps).unwrap();
        assert_eq!(found[0].share_id.as_deref(), Some("a"));
        // Both shares are of one GPU.
        let two = json!([share("a"), share("b")]);
        assert_eq!(ask_with(&claim(&two, &json!([])), mps).unwrap().len(), 2);
        let error = ask_with(&claim(&one, &config("4Gi")), mps).unwrap_err();
        assert!(
            error.contains("permits a process 4096 MiB of memory, and the MPS daemon of the GPU 8192 MiB (ONH-083); hint: set mps-memory-limit = \"4096M\""),
            "{error}"
        );
        let error = ask(&claim(&one, &config("8Gi"))).unwrap_err();
        assert!(
            error.contains("config.toml of the node does not share the GPU (ONH-083)"),
            "{error}"
        );
    }

    /// Monitoring needs neither CUDA nor a daemon, and its container says so to the hook entry.
    #[test]
    fn admin_access_beside_mps() {
        let mps = |pool: &mut Pool| {
            let limits = MpsLimits {
                memory: None,
                thread_percentage: 100,
            };
            Arc::make_mut(&mut pool.devices)[0].mps = Some(limits);
        };
        let admin = json!({"adminAccess": true});
        let all = json!([result("gpu-0", &admin), result("gpu-1", &admin)]);
        let found = ask_with(&claim(&all, &json!([])), mps).unwrap();
        let ids: Vec<_> = found
            .into_iter()
            .map(|device| device.cdi_device_ids)
            .collect();
        let name = |device: &str| format!("k8s.gpu.nvidia.com/gpu={device}");
        let expected = [
            vec![name("GPU-gpu-0"), name("monitoring")],
            vec![name("GPU-gpu-1"), name("monitoring")],
        ];
        assert_eq!(ids, expected);
        let parameters = json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {"strategy": "MPS"}});
        let config = json!([{"source": "FromClaim", "opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]);
        let error = ask_with(&claim(&all, &config), mps).unwrap_err();
        assert!(
            error.contains("adminAccess") && error.contains("(ONH-083)"),
            "{error}"
        );
    }

    #[test]
    fn who_may_have_an_unhealthy_device() {
        let unhealthy =
            |more: Value| ask(&claim(&json!([result("gpu-1", &more)]), &json!([]))).is_ok();
        let toleration = |key: &str, operator: &str, effect: &str| {
            unhealthy(
                json!({"tolerations": [{"key": key, "operator": operator, "effect": effect}]}),
            )
        };
        assert!(unhealthy(json!({"adminAccess": true})));
        assert!(toleration("gpu.nvidia.com/unhealthy", "Exists", ""));
        assert!(toleration("", "Exists", "NoSchedule"));
        assert!(!toleration(
            "gpu.nvidia.com/unhealthy",
            "Exists",
            "NoExecute"
        ));
        assert!(!toleration("other.com/taint", "Exists", ""));
        // "Equal" is the default of the operator, and the taint has no value.
        for (operator, value, is_tolerated) in [
            ("Equal", "", true),
            ("Equal", "true", false),
            ("", "true", false),
            ("Exists", "", true),
        ] {
            let key = "gpu.nvidia.com/unhealthy";
            let toleration = json!({"key": key, "operator": operator, "value": value});
            let found = unhealthy(json!({"tolerations": [toleration]}));
            assert_eq!(found, is_tolerated, "{operator:?} {value:?}");
        }
    }
}
