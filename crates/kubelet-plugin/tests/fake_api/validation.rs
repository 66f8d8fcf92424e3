//! The rules of the API for slices (pkg/apis/resource/validation).

use k8s_openapi::api::resource::v1::{Device, ResourceSlice};

pub fn validate(slice: &ResourceSlice) -> Result<(), String> {
    let spec = &slice.spec;
    let devices = spec.devices.as_deref().unwrap_or_default();
    let has_taints = devices.iter().any(|device| device.taints.is_some());
    let most = if has_taints { 64 } else { 128 };
    check(
        devices.len() <= most,
        &format!("spec.devices: must have at most {most} items"),
    )?;
    check(spec.node_name.is_some(), "spec.nodeName: required")?;
    check(!spec.pool.name.is_empty(), "spec.pool.name: required")?;
    check(
        spec.pool.generation >= 0 && spec.pool.resource_slice_count > 0,
        "spec.pool",
    )?;
    let owner = slice
        .metadata
        .owner_references
        .as_deref()
        .unwrap_or_default();
    check(
        owner.iter().all(|owner| !owner.uid.is_empty()),
        "metadata.ownerReferences.uid: must not be empty",
    )?;
    for (at, device) in devices.iter().enumerate() {
        validate_device(device)?;
        let is_double = devices[..at].iter().any(|other| other.name == device.name);
        check(!is_double, &format!("{:?}: duplicate", device.name))?;
    }
    Ok(())
}

fn validate_device(device: &Device) -> Result<(), String> {
    check(
        is_label(&device.name),
        &format!(
            "{:?}: a lowercase RFC 1123 label must consist of …",
            device.name
        ),
    )?;
    let attributes = device.attributes.clone().unwrap_or_default();
    let count = attributes.len()
        + device
            .capacity
            .as_ref()
            .map_or(0, |capacity| capacity.len());
    check(
        count <= 32,
        "the total number of attributes and capacities must not exceed 32",
    )?;
    for (name, value) in &attributes {
        let id = name.split_once('/').map_or(name.as_str(), |(_, id)| id);
        let is_id = id.len() <= 32 && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        check(is_id, &format!("{name}: a valid C identifier must …"))?;
        let set = [
            value.string.is_some(),
            value.int.is_some(),
            value.bool.is_some(),
            value.version.is_some(),
        ];
        check(
            set.iter().filter(|set| **set).count() == 1,
            &format!("{name}: exactly one value must be specified"),
        )?;
        check(
            value.string.as_ref().is_none_or(|text| text.len() <= 64),
            &format!("{name}: may not be more than 64 bytes"),
        )?;
        let is_semver = |text: &String| {
            let parts: Vec<_> = text.split('.').collect();
            let is_number = |part: &&str| {
                part.parse::<u64>()
                    .is_ok_and(|number| number.to_string() == **part)
            };
            parts.len() == 3 && parts.iter().all(is_number)
        };
        let version = value.version.as_ref();
        check(
            version.is_none_or(is_semver),
            &format!("{name}: must be a string compatible with semver.org spec 2.0.0"),
        )?;
    }
    for capacity in device.capacity.iter().flat_map(|all| all.values()) {
        let Some(policy) = &capacity.request_policy else {
            continue;
        };
        check(
            device.allow_multiple_allocations == Some(true),
            "requestPolicy: allowMultipleAllocations must be true",
        )?;
        let valid = policy.valid_values.as_deref().unwrap_or_default();
        let default = policy.default.as_ref();
        check(
            default.is_some_and(|default| valid.contains(default)),
            "requestPolicy.default: must be one of validValues",
        )?;
    }
    for taint in device.taints.iter().flatten() {
        check(taint.key.contains('/'), "taints.key")?;
        check(
            ["None", "NoSchedule", "NoExecute"].contains(&taint.effect.as_str()),
            "taints.effect",
        )?;
    }
    Ok(())
}

fn is_label(name: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let ends = name.starts_with(is_letter) && name.ends_with(is_letter);
    ends && name.len() <= 63 && name.chars().all(|c| is_letter(c) || c == '-')
}

fn check(holds: bool, error: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(error.to_owned()) }
}
