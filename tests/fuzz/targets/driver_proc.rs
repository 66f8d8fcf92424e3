//! Files of `/proc/driver/nvidia`, and `/proc/devices`.

use nvidia_host::driver::params::parse_policy;
use nvidia_host::edits::build::mask_params;
use nvidia_host::inventory::BusId;
use nvidia_host::inventory::procfs::{parse_minor, parse_version};
use nvidia_host::prepare::parse_majors;

use super::text;

/// Parses the same text as each of the files.
pub fn run(data: &[u8]) {
    let text = text(data);
    if let Some(version) = parse_version(&text) {
        assert!(
            version.contains('.') && version.split('.').all(|part| part.parse::<f64>().is_ok()),
            "{version:?}"
        );
        assert_eq!(
            parse_version(&format!("NVRM version: {version}")),
            Some(version)
        );
    }
    if let Some(minor) = parse_minor(&text) {
        assert_eq!(
            parse_minor(&format!("Device Minor: \t {minor}")),
            Some(minor)
        );
    }
    for word in text.split_whitespace() {
        if let Some(id) = BusId::parse(word) {
            assert!(id.bus <= 0xff && id.device <= 0x1f, "{id:?}");
            assert_eq!(
                (BusId::parse(&id.to_string()), BusId::parse(&id.in_sysfs())),
                (Some(id), Some(id))
            );
        }
    }
    let policy = parse_policy(&text);
    assert_eq!(policy.mode & !0o777, 0, "{policy:?}");
    // The container's programs are not allowed to create nodes, and nothing else changes.
    if let Some(masked) = mask_params(&text) {
        assert!(
            !parse_policy(&masked).modify || !text.starts_with("ModifyDeviceFiles: 1"),
            "{masked:?}"
        );
        assert_eq!(mask_params(&masked), None, "masking twice is masking once");
        assert_eq!(masked.lines().count(), text.lines().count());
    }
    let majors = parse_majors(&text);
    assert!(
        majors
            .keys()
            .all(|name| name == "nvidia" || name.starts_with("nvidia-")),
        "{majors:?}"
    );
    let again: String = majors
        .iter()
        .map(|(name, major)| format!("{major} {name}\n"))
        .collect();
    assert_eq!(parse_majors(&again), majors);
}
