//! `linux.resources.devices` of config.json: the list as JSON.

use std::path::Path;

use oci_nvidia_hook::testing::oci::device_rules::{DeviceRule, already_allowed};
use oci_nvidia_hook::testing::oci::spec_view::parse;

use super::check_error;

/// The last rule for reading and the last rule for writing decide.
pub fn run(data: &[u8]) {
    let read = |list: &[u8]| {
        let head = &br#"{"root":{"path":"/r"},"process":{},"linux":{"resources":{"devices":"#[..];
        parse(&[head, list, b"}}}"].concat(), Path::new("/b")).map(|spec| spec.device_rules)
    };
    let rules = match read(data) {
        Ok(rules) => rules,
        Err(error) => return check_error(&error),
    };
    let more = |text: &str| read(text.as_bytes()).expect("a good list");
    for (major, minor) in [(195, 0), (511, 1), (0, 0)] {
        let device = DeviceRule { major, minor };
        let with = |text: &str| already_allowed(&[rules.clone(), more(text)].concat(), device);
        let own = format!(
            r#"[{{"allow":true,"type":"c","major":{major},"minor":{minor},"access":"rw"}}]"#
        );
        assert!(with(&own), "the last word allows");
        assert!(
            !with(r#"[{"allow":false,"access":"rwm"}]"#),
            "the last word denies"
        );
        assert!(
            !with(r#"[{"allow":false}]"#),
            "also without saying which access"
        );
        assert!(
            !with(r#"[{"allow":false,"type":"c","access":"w"}]"#),
            "reading alone is not access"
        );
        let other = r#"[{"allow":true,"type":"c","major":7,"minor":7,"access":"rwm"},{"allow":false,"type":"b"}]"#;
        let allowed = already_allowed(&rules, device);
        assert_eq!(with(other), allowed, "other devices change nothing");
        assert!(
            !allowed || rules.iter().any(|rule| rule.allow()),
            "nothing allows it: {rules:?}"
        );
    }
}
