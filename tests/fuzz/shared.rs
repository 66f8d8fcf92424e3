//! What the targets of the hook and of the kubelet plugin have in common: properties of texts, and an inventory.

use std::borrow::Cow;

use base::report::{Finding, one_line, render};
use nvidia_host::inventory::{BusId, FailedGpu, Gpu, Inventory, MigDevice};

/// Converts bytes like the program does for text that should be UTF-8.
pub fn text(data: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(data)
}

/// Checks that the text is one line of limited length, without characters that move the cursor or reverse text.
#[track_caller]
pub fn check_line(line: &str) {
    // 2000 characters, each at most as long as \u{2028}, and the mark of truncation.
    assert!(
        line.chars().count() <= 16_001,
        "{} characters",
        line.chars().count()
    );
    let unsafe_in_terminals = |c: char| {
        c.is_control()
            || matches!(c, '\u{61c}' | '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    assert!(!line.contains(unsafe_in_terminals), "{line:?}");
}

/// Checks that an error is a line, possibly with a second line for the hint.
#[track_caller]
pub fn check_error(error: &anyhow::Error) {
    let text = render(error);
    let (what, hint) = text.split_once("\nhint: ").unwrap_or((&text, ""));
    assert!(!what.is_empty(), "an error that says nothing");
    check_line(what);
    check_line(hint);
}

/// Checks that findings are printed like errors.
#[track_caller]
pub fn check_findings(findings: &[Finding]) {
    for finding in findings {
        assert!(
            !finding.what.is_empty() && finding.kind.id().starts_with("ONH-"),
            "{finding:?}"
        );
        check_line(&one_line(&finding.what));
        check_line(&one_line(&finding.fix));
    }
}

/// Two GPUs that work, the second with two MIG devices, and one that does not answer.
pub fn sample_inventory() -> Inventory {
    let gpu = |index: u32| Gpu {
        index,
        minor: index + 1,
        uuid: format!("GPU-5{index}"),
        bus_id: BusId {
            domain: 0,
            bus: index + 1,
            device: 0,
        },
        model: "NVIDIA H100 80GB HBM3".to_owned(),
        compute_capability: "9.0".to_owned(),
        brand: "Tesla".to_owned(),
        mig_enabled: index == 1,
        mig_devices: Vec::new(),
        unlisted_mig: Vec::new(),
    };
    let mig = |index: u32| MigDevice {
        index,
        uuid: format!("MIG-6{index}"),
        profile: Some("1g.10gb".to_owned()),
        gpu_instance: 7 + index,
        compute_instance: 0,
    };
    let lost = FailedGpu {
        index: Some(2),
        uuid: None,
        bus_id: Some(BusId {
            domain: 0,
            bus: 3,
            device: 0,
        }),
        why: "GPU is lost".to_owned(),
        ..FailedGpu::default()
    };
    Inventory {
        driver_version: "535.183.01".to_owned(),
        cuda_version: "12.2".to_owned(),
        gpus: vec![
            gpu(0),
            Gpu {
                mig_devices: vec![mig(0), mig(1)],
                ..gpu(1)
            },
        ],
        failed: vec![lost],
        excluded: Vec::new(),
        driver_kind: nvidia_host::driver::DriverKind::Linux,
    }
}
