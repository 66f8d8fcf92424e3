//! `/proc/driver/nvidia-caps/mig-minors`.

use nvidia_host::inventory::caps::{MigCap, parse_cap, parse_mig_minors};

use super::text;

/// Parses the text, and parses the result again.
pub fn run(data: &[u8]) {
    let text = text(data);
    let minors = parse_mig_minors(&text);
    assert!(minors.len() <= text.lines().count());
    let again: String = minors
        .iter()
        .map(|(cap, minor)| format!("{} {minor}\n", name(*cap)))
        .collect();
    assert_eq!(parse_mig_minors(&again), minors);
    for cap in minors.keys() {
        let path = cap.proc_path();
        let path = path
            .to_str()
            .unwrap()
            .strip_prefix("/proc/driver/nvidia/capabilities/")
            .unwrap();
        assert!(
            path.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'/'),
            "{path:?}"
        );
    }
    for word in text.split_whitespace() {
        assert!(
            parse_cap(word).is_none()
                || word.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'/'),
            "{word:?}"
        );
    }
}

/// Formats the table like the kernel module.
fn name(cap: MigCap) -> String {
    match cap {
        MigCap::Config => "config".to_owned(),
        MigCap::Monitor => "monitor".to_owned(),
        MigCap::GpuInstance(gpu, gi) => format!("gpu{gpu}/gi{gi}/access"),
        MigCap::ComputeInstance(gpu, gi, ci) => format!("gpu{gpu}/gi{gi}/ci{ci}/access"),
    }
}
