//! Determines which devices the device rules of config.json already allow. Pure.

use std::fmt;

use oci_spec::runtime::{LinuxDeviceCgroup, LinuxDeviceType};

/// Read and write access to a character device, without mknod(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceRule {
    pub major: u32,
    pub minor: u32,
}

/// The format of `devices.allow` of cgroup v1.
impl fmt::Display for DeviceRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "c {}:{} rw", self.major, self.minor)
    }
}

/// Reports whether `linux.resources.devices` lets the container read and write the device.
///
/// Entries apply in order; a missing number, or -1, matches all. Without an entry, and if runtimes differ, returns false: the
/// hook then adds the rule to the cgroup, which does no harm if the cgroup allows the device.
pub fn already_allowed(config_rules: &[LinuxDeviceCgroup], rule: DeviceRule) -> bool {
    let (mut read, mut write) = (false, false);
    for entry in config_rules.iter().filter(|entry| concerns(entry, rule)) {
        match entry.access() {
            Some(access) => {
                for (letter, granted) in [('r', &mut read), ('w', &mut write)] {
                    if access.contains(letter) {
                        *granted = entry.allow();
                    }
                }
            }
            // without "access", runc assumes none, and other runtimes assume all
            None if entry.allow() => {}
            None => (read, write) = (false, false),
        }
    }
    read && write
}

/// Reports whether `linux.resources.devices` allows all devices, as engines write it for `--privileged`.
pub(crate) fn allow_all(config_rules: &[LinuxDeviceCgroup]) -> bool {
    let mut allow = false;
    for entry in config_rules {
        let is_all = matches!(entry.typ(), None | Some(LinuxDeviceType::A));
        if is_all && is_wildcard(entry.major()) && is_wildcard(entry.minor()) {
            allow = entry.allow();
        }
    }
    allow
}

/// A missing number, or -1, stands for all.
fn is_wildcard(number: Option<i64>) -> bool {
    number.is_none_or(|number| number < 0)
}

fn concerns(entry: &LinuxDeviceCgroup, rule: DeviceRule) -> bool {
    let kind = match entry.typ() {
        None | Some(LinuxDeviceType::A | LinuxDeviceType::C) => true,
        // "u" is a character device for mknod(2), but is undefined for cgroups: such an entry can only deny
        Some(LinuxDeviceType::U) => !entry.allow(),
        Some(LinuxDeviceType::B | LinuxDeviceType::P) => false,
    };
    kind && is_number(entry.major(), rule.major) && is_number(entry.minor(), rule.minor)
}

fn is_number(given: Option<i64>, wanted: u32) -> bool {
    is_wildcard(given) || given == Some(wanted.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: DeviceRule = DeviceRule {
        major: 195,
        minor: 0,
    };

    fn allowed(json: &str) -> bool {
        let entries: Vec<LinuxDeviceCgroup> = serde_json::from_str(json).unwrap();
        already_allowed(&entries, GPU)
    }

    #[test]
    fn what_allows_all_devices() {
        for (json, expected) in [
            ("[]", false),
            (r#"[{"allow":true,"access":"rwm"}]"#, true),
            (
                r#"[{"allow":false,"access":"rwm"},{"allow":true,"type":"a","major":-1,"minor":-1,"access":"rwm"}]"#,
                true,
            ),
            (
                r#"[{"allow":true,"access":"rwm"},{"allow":false,"type":"a"}]"#,
                false,
            ),
            (
                r#"[{"allow":true,"access":"rwm"},{"allow":false,"type":"c","major":1,"minor":3}]"#,
                true,
            ),
            (
                r#"[{"allow":true,"type":"c","access":"rwm"},{"allow":true,"major":195,"access":"rwm"}]"#,
                false,
            ),
        ] {
            let entries: Vec<LinuxDeviceCgroup> = serde_json::from_str(json).unwrap();
            assert_eq!(allow_all(&entries), expected, "{json}");
        }
    }

    #[test]
    fn entries_apply_in_order() {
        for (json, expected) in [
            ("[]", false),
            (r#"[{"allow":false,"access":"rwm"}]"#, false),
            (r#"[{"allow":true,"access":"rwm"}]"#, true),
            (r#"[{"allow":true,"type":"a","access":"rwm"}]"#, true),
            (
                r#"[{"allow":false,"access":"rwm"},{"allow":true,"type":"c","major":195,"minor":0,"access":"rw"}]"#,
                true,
            ),
            (
                r#"[{"allow":true,"type":"c","major":195,"minor":0,"access":"rw"},{"allow":false,"access":"rwm"}]"#,
                false,
            ),
            (
                r#"[{"allow":true,"type":"c","major":195,"access":"rwm"}]"#,
                true,
            ),
            (
                r#"[{"allow":true,"type":"c","major":195,"minor":-1,"access":"rwm"}]"#,
                true,
            ),
            (
                r#"[{"allow":true,"type":"c","major":195,"minor":1,"access":"rwm"}]"#,
                false,
            ),
            (
                r#"[{"allow":true,"type":"b","major":195,"minor":0,"access":"rwm"}]"#,
                false,
            ),
            (
                r#"[{"allow":true,"type":"c","major":195,"minor":0,"access":"r"}]"#,
                false,
            ),
            (
                r#"[{"allow":true,"type":"c","access":"r"},{"allow":true,"type":"c","major":195,"access":"w"}]"#,
                true,
            ),
            (
                r#"[{"allow":true,"type":"a","access":"rwm"},{"allow":false,"type":"c","major":195,"access":"w"}]"#,
                false,
            ),
            (
                r#"[{"allow":true,"type":"a","access":"rwm"},{"allow":false,"type":"c","major":195,"access":"m"}]"#,
                true,
            ),
            (
                r#"[{"allow":true,"type":"c","major":195,"minor":0}]"#,
                false,
            ),
            (
                r#"[{"allow":true,"type":"a","access":"rwm"},{"allow":false}]"#,
                false,
            ),
        ] {
            assert_eq!(allowed(json), expected, "{json}");
        }
    }
}
