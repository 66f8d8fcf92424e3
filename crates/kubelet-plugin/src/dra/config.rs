//! Decides whether the configuration of a claim, which has the format of NVIDIA's driver for DRA, can be fulfilled. Pure.

use k8s_openapi::api::resource::v1::DeviceAllocationConfiguration;
use serde::Deserialize;

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
    mps_config: Option<serde_json::Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimeSlicing {
    #[serde(default)]
    interval: Option<String>,
}

/// Decides whether a device can be given with the configurations of its claim, of which the last one for the device's request applies: those
/// of the class come first.
///
/// # Errors
/// What is not supported.
pub fn check(
    driver: &str,
    request: &str,
    configs: &[DeviceAllocationConfiguration],
) -> Result<(), String> {
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
        None => Ok(()),
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
fn check_one(parameters: &serde_json::Value) -> Result<(), String> {
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
        return Ok(());
    };
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
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

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
            (
                gpu(&json!({"strategy": "MPS"})),
                Some("the sharing strategy \"MPS\" is not supported"),
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
                (Ok(()), None) => {}
                (Err(error), Some(part)) => assert!(error.contains(part), "{error}"),
                (result, _) => panic!("{parameters}: {result:?}"),
            }
        }
    }

    #[test]
    fn the_last_one_for_the_request_applies() {
        let (good, bad) = (
            gpu(&json!({"strategy": "TimeSlicing"})),
            gpu(&json!({"strategy": "MPS"})),
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
}
