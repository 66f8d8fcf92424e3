//! Decides whether the configuration of a claim, which has the format of NVIDIA's driver for DRA, can be fulfilled. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::DeviceAllocationConfiguration;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::Deserialize;

use nvidia_host::mps::UNIT;

use super::devices::{ClaimDevice, MIB};
use super::quantity;

/// The version of NVIDIA's configurations.
const API_VERSION: &str = "resource.nvidia.com/v1beta1";

/// A configuration of NVIDIA's driver for a GPU or a MIG device.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "a field that is not declared is an error")]
struct DeviceConfig {
    api_version: String,
    kind: String,
    #[serde(default)]
    sharing: Option<Sharing>,
}

/// How the containers of a claim share a device.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Sharing {
    strategy: String,
    #[serde(default)]
    time_slicing_config: Option<TimeSlicing>,
    #[serde(default)]
    mps_config: Option<MpsConfig>,
}

/// The limits of the daemon, which NVIDIA's driver starts for the claim.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct MpsConfig {
    #[serde(default)]
    default_active_thread_percentage: Option<u8>,
    #[serde(default)]
    default_pinned_device_memory_limit: Option<Quantity>,
    #[serde(default)]
    default_per_device_pinned_memory_limit: BTreeMap<String, Quantity>,
}

impl MpsConfig {
    fn requirements(self) -> Result<MpsRequirements, String> {
        let percentage = self.default_active_thread_percentage;
        if percentage.is_some_and(|percentage| !(1..=100).contains(&percentage)) {
            return Err("defaultActiveThreadPercentage is not from 1 to 100".to_owned());
        }
        let mut requirements = MpsRequirements {
            thread_percentage: percentage,
            ..MpsRequirements::default()
        };
        if let Some(limit) = &self.default_pinned_device_memory_limit {
            requirements.memory = Some(quantity::bytes(limit)?);
        }
        for (gpu, limit) in &self.default_per_device_pinned_memory_limit {
            let bytes = quantity::bytes(limit)?;
            requirements.memory_by_gpu.insert(gpu.clone(), bytes);
        }
        Ok(requirements)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimeSlicing {
    #[serde(default)]
    interval: Option<String>,
}

/// What a claim requires of the MPS daemon of its GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpsRequirements {
    thread_percentage: Option<u8>,
    /// The memory limit in bytes
    memory: Option<u64>,
    /// The same for some GPUs, by UUID or by their position in the claim
    memory_by_gpu: BTreeMap<String, u64>,
}

/// Why the limits of a daemon are not those of a claim, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// The reason
    pub what: String,
    /// What to do
    pub fix: String,
}

impl Unfit {
    /// The daemon permits more than the claim. `setting` is the line of config.toml that lowers its limit.
    fn of_limit(what: String, setting: &str) -> Self {
        let fix = format!(
            "set {setting} in [sharing] of config.toml on the node, and run \"systemctl restart {UNIT}\""
        );
        Self { what, fix }
    }
}

impl MpsRequirements {
    /// Checks that a daemon enforces at least these limits. `position` is that of the device in the claim. A claim cannot change the limits:
    /// they are the same for all clients of the GPU.
    ///
    /// # Errors
    /// If the GPU has no daemon, or the daemon permits more than the claim.
    pub fn check(&self, device: &ClaimDevice, position: usize) -> Result<(), Unfit> {
        let Some(limits) = &device.mps else {
            return Err(Unfit {
                what: "the claim requires MPS, and config.toml of the node does not share the GPU"
                    .to_owned(),
                fix: "request the class mps.nvidia.com, whose devices are shared".to_owned(),
            });
        };
        if let Some(percentage) = self.thread_percentage
            && limits.thread_percentage > percentage
        {
            let of_daemon = limits.thread_percentage;
            return Err(Unfit::of_limit(
                format!(
                    "the claim permits {percentage} % of the threads, and the MPS daemon of the GPU {of_daemon} %"
                ),
                &format!("mps-thread-percentage = {percentage}"),
            ));
        }
        let by_gpu = self.memory_by_gpu.get(&device.uuid);
        let by_gpu = by_gpu.or_else(|| self.memory_by_gpu.get(&position.to_string()));
        let Some(memory) = by_gpu.copied().or(self.memory) else {
            return Ok(());
        };
        if limits.memory.is_none_or(|limit| limit > memory) {
            let mib = memory / MIB;
            let of_daemon = match limits.memory {
                Some(limit) => format!("{} MiB", limit / MIB),
                None => "all memory".to_owned(),
            };
            return Err(Unfit::of_limit(
                format!(
                    "the claim permits a process {mib} MiB of memory, and the MPS daemon of the GPU {of_daemon}"
                ),
                &format!("mps-memory-limit = \"{mib}M\""),
            ));
        }
        Ok(())
    }
}

/// Decides whether a device can be given with the configurations of its claim, of which the last one for the device's request applies: those
/// of the class come first. Returns what it requires of the MPS daemon; `None` if it requires none.
///
/// # Errors
/// What is not supported.
pub fn check(
    driver: &str,
    request: &str,
    configs: &[DeviceAllocationConfiguration],
) -> Result<Option<MpsRequirements>, String> {
    let applies = |config: &&DeviceAllocationConfiguration| {
        let is_ours = config
            .opaque
            .as_ref()
            .is_some_and(|opaque| opaque.driver == driver);
        is_ours
            && config
                .requests
                .as_ref()
                .is_none_or(|requests| requests.is_empty() || names(requests, request))
    };
    match configs
        .iter()
        .rfind(applies)
        .and_then(|config| config.opaque.as_ref())
    {
        Some(opaque) => check_one(&opaque.parameters.0),
        None => Ok(None),
    }
}

/// Whether the list has this request, or the request of which it is an alternative: `request/alternative`.
fn names(requests: &[String], request: &str) -> bool {
    let main = request.split('/').next().unwrap_or(request);
    requests
        .iter()
        .any(|listed| listed == request || listed == main)
}

/// GPUs share their time by default, so that the defaults of time-slicing need no action.
fn check_one(parameters: &serde_json::Value) -> Result<Option<MpsRequirements>, String> {
    let text = |key| parameters.get(key).and_then(serde_json::Value::as_str);
    let (kind, version) = (text("kind"), text("apiVersion"));
    let name = format!(
        "the configuration {:?} of {:?}",
        kind.unwrap_or_default(),
        version.unwrap_or_default()
    );
    if version != Some(API_VERSION) || !matches!(kind, Some("GpuConfig" | "MigDeviceConfig")) {
        return Err(format!("{name} is unknown"));
    }
    let DeviceConfig { sharing, .. } = match DeviceConfig::deserialize(parameters) {
        Ok(config) => config,
        Err(error) => return Err(format!("{name} is invalid: {error}")),
    };
    let Some(Sharing {
        strategy,
        time_slicing_config,
        mps_config,
    }) = sharing
    else {
        return Ok(None);
    };
    if strategy == "MPS" {
        return check_mps(kind, time_slicing_config.is_some(), mps_config);
    }
    if strategy != "TimeSlicing" {
        return Err(format!(
            "the sharing strategy {strategy:?} is not supported"
        ));
    }
    if mps_config.is_some() {
        return Err(
            "mpsConfig and the sharing strategy \"TimeSlicing\" exclude each other".to_owned(),
        );
    }
    match time_slicing_config.and_then(|config| config.interval) {
        Some(interval) if interval != "Default" => Err(format!(
            "time slices of the length {interval:?} are not supported"
        )),
        _ => Ok(None),
    }
}

fn check_mps(
    kind: Option<&str>,
    has_time_slicing: bool,
    config: Option<MpsConfig>,
) -> Result<Option<MpsRequirements>, String> {
    if kind != Some("GpuConfig") {
        return Err("MPS does not share MIG devices here".to_owned());
    }
    if has_time_slicing {
        return Err(
            "timeSlicingConfig and the sharing strategy \"MPS\" exclude each other".to_owned(),
        );
    }
    config.unwrap_or_default().requirements().map(Some)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::dra::devices::MpsLimits;
    use crate::dra::slice::tests::device;

    fn config(
        driver: &str,
        requests: &[&str],
        parameters: &Value,
    ) -> DeviceAllocationConfiguration {
        let text = json!({"source": "FromClaim", "requests": requests, "opaque": {"driver": driver, "parameters": parameters}});
        serde_json::from_value(text).unwrap()
    }

    fn gpu(sharing: &Value) -> Value {
        json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "sharing": sharing})
    }

    #[test]
    fn what_is_supported() {
        let slices = |interval: &str| {
            gpu(&json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}))
        };
        let cases = [
            (
                json!({"apiVersion": API_VERSION, "kind": "GpuConfig"}),
                None,
            ),
            (
                json!({"apiVersion": API_VERSION, "kind": "MigDeviceConfig"}),
                None,
            ),
            (gpu(&json!({"strategy": "TimeSlicing"})), None),
            (slices("Default"), None),
            (
                slices("Long"),
                Some("time slices of the length \"Long\" are not supported"),
            ),
            (gpu(&json!({"strategy": "MPS"})), None),
            (
                gpu(&json!({"strategy": "Fractions"})),
                Some("the sharing strategy \"Fractions\" is not supported"),
            ),
            (
                gpu(&json!({"strategy": "MPS", "timeSlicingConfig": {}})),
                Some("exclude each other"),
            ),
            (
                json!({"apiVersion": API_VERSION, "kind": "MigDeviceConfig", "sharing": {"strategy": "MPS"}}),
                Some("MPS does not share MIG devices"),
            ),
            (
                gpu(
                    &json!({"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "4X"}}),
                ),
                Some("\"4X\" is not a quantity"),
            ),
            (
                gpu(&json!({"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 0}})),
                Some("is not from 1 to 100"),
            ),
            (
                gpu(&json!({"strategy": "TimeSlicing", "mpsConfig": {}})),
                Some("exclude each other"),
            ),
            (
                json!({"apiVersion": API_VERSION, "kind": "VfioDeviceConfig"}),
                Some("\"VfioDeviceConfig\" of"),
            ),
            (
                json!({"apiVersion": "v2", "kind": "GpuConfig"}),
                Some("of \"v2\" is unknown"),
            ),
            (
                json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "other": 1}),
                Some("unknown field `other`"),
            ),
            (
                json!({"apiVersion": "gpu.nvidia.com/v1alpha1", "kind": "GpuConfig", "x": 1}),
                Some("\"GpuConfig\" of \"gpu.nvidia.com/v1alpha1\" is unknown"),
            ),
            (
                json!("text"),
                Some("the configuration \"\" of \"\" is unknown"),
            ),
            (
                Value::Null,
                Some("the configuration \"\" of \"\" is unknown"),
            ),
        ];
        for (parameters, expected) in cases {
            match (
                check("d", "gpu", &[config("d", &[], &parameters)]),
                expected,
            ) {
                (Ok(_), None) => {}
                (Err(error), Some(part)) => assert!(error.contains(part), "{error}"),
                (result, _) => panic!("{parameters}: {result:?}"),
            }
        }
    }

    #[test]
    fn the_last_one_for_the_request_applies() {
        let (good, bad) = (
            gpu(&json!({"strategy": "TimeSlicing"})),
            gpu(&json!({"strategy": "Fractions"})),
        );
        for (configs, is_ok) in [
            (
                vec![config("d", &[], &bad), config("d", &["gpu"], &good)],
                true,
            ),
            (
                vec![config("d", &[], &good), config("d", &["gpu"], &bad)],
                false,
            ),
            (vec![config("d", &["other"], &bad)], true),
            (vec![config("other", &[], &bad)], true),
            (vec![], true),
        ] {
            assert_eq!(
                check("d", "gpu/large", &configs).is_ok(),
                is_ok,
                "{configs:?}"
            );
        }
    }

    #[test]
    fn limits_of_the_daemon() {
        let requirements = |config: Value| {
            let parameters = gpu(&json!({"strategy": "MPS", "mpsConfig": config}));
            let found = check("d", "gpu", &[config_of(&parameters)]);
            found.unwrap().unwrap()
        };
        let device = |mps: Option<MpsLimits>| ClaimDevice {
            mps,
            ..device("gpu-0", None)
        };
        let limits = |memory_mib: Option<u64>, thread_percentage| MpsLimits {
            memory: memory_mib.map(|mib| mib * MIB),
            thread_percentage,
        };
        let no_daemon =
            "the claim requires MPS, and config.toml of the node does not share the GPU";
        let memory =
            "the claim permits a process 4096 MiB of memory, and the MPS daemon of the GPU ";
        for (config, daemon, expected) in [
            (json!({}), None, Some(no_daemon)),
            (json!({}), Some(limits(None, 100)), None),
            (
                json!({"defaultPinnedDeviceMemoryLimit": "4Gi"}),
                Some(limits(Some(4096), 100)),
                None,
            ),
            (
                json!({"defaultPinnedDeviceMemoryLimit": "4Gi"}),
                Some(limits(Some(4097), 100)),
                Some(memory),
            ),
            (
                json!({"defaultPinnedDeviceMemoryLimit": "4Gi"}),
                Some(limits(None, 100)),
                Some(memory),
            ),
            (
                json!({"defaultPinnedDeviceMemoryLimit": "8Gi", "defaultPerDevicePinnedMemoryLimit": {"0": "4Gi"}}),
                Some(limits(Some(8192), 100)),
                Some(memory),
            ),
            (
                json!({"defaultPerDevicePinnedMemoryLimit": {"GPU-gpu-0": "4Gi", "1": "1Gi"}}),
                Some(limits(Some(4096), 100)),
                None,
            ),
            (
                json!({"defaultActiveThreadPercentage": 25}),
                Some(limits(None, 25)),
                None,
            ),
            (
                json!({"defaultActiveThreadPercentage": 25}),
                Some(limits(None, 26)),
                Some("the claim permits 25 % of the threads, and the MPS daemon of the GPU 26 %"),
            ),
        ] {
            let found = requirements(config.clone()).check(&device(daemon), 0);
            let what = found.as_ref().err().map(|unfit| unfit.what.as_str());
            assert_eq!(what.is_some(), expected.is_some(), "{config}: {what:?}");
            let (what, expected) = (what.unwrap_or_default(), expected.unwrap_or_default());
            assert!(what.starts_with(expected), "{config}: {what}");
        }
    }

    fn config_of(parameters: &Value) -> DeviceAllocationConfiguration {
        config("d", &[], parameters)
    }
}
