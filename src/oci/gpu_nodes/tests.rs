use std::path::Path;

use super::{gpu_nodes, granted};
use crate::oci::spec_view::{self, SpecView};
use crate::plan::other_setup::OtherSetup;
use crate::plan::{engine_devices, other_setup, request};
use nvidia_host::driver::node_name::NodeName;
use nvidia_host::request::Hint;

/// What each reader of a container's nodes finds.
#[derive(Debug, Default, PartialEq, Eq)]
struct Read {
    /// The GPUs in messages, in records and for the limits of WSL 2
    gpus: &'static str,
    /// The control node, which is a sign of a CDI spec next to a driver library
    control: &'static str,
    /// The minor numbers that are compared with `[devices]`
    limited: &'static [u32],
    /// Whether the node is a request for a GPU
    is_request: bool,
}

fn spec(device: &str, mount: &str, process: &str) -> SpecView {
    let library =
        r#"{"type":"bind","source":"/l","destination":"/usr/lib64/libcuda.so.1"}"#.to_owned();
    let mounts = [library, mount.to_owned()];
    let mounts: Vec<_> = mounts.into_iter().filter(|text| !text.is_empty()).collect();
    let text = format!(
        r#"{{"root":{{"path":"/r"}},"process":{{{process}}},"mounts":[{}],"linux":{{"devices":[{device}]}}}}"#,
        mounts.join(",")
    );
    spec_view::parse(text.as_bytes(), Path::new("/b")).unwrap()
}

fn check(spec: &SpecView, expected: &Read, case: &str) {
    let nodes = gpu_nodes(spec);
    let given = engine_devices::find(spec).unwrap_or_default();
    let given: Vec<_> = given
        .nodes
        .iter()
        .map(|path| path.to_str().unwrap())
        .collect();
    let control = match other_setup::set_up_by(spec, |_| false) {
        Some(OtherSetup::Files(files)) => files.rsplit_once(" and ").unwrap().1.replace('"', ""),
        _ => String::new(),
    };
    let limited = granted(spec).unwrap_or_default().gpus;
    assert_eq!(
        given.join(" "),
        expected.gpus,
        "plan::engine_devices: {case}"
    );
    assert_eq!(control, expected.control, "plan::other_setup: {case}");
    assert!(
        limited.iter().eq(expected.limited),
        "stages::limits: {case}: {limited:?}"
    );
    assert_eq!(
        nodes.has(NodeName::Dxg),
        case.contains("dxg"),
        "limits of WSL 2: {case}"
    );
    let is_request = request::hint(spec) != Hint::No;
    assert_eq!(is_request, expected.is_request, "plan::request: {case}");
}

#[test]
fn every_reader_knows_every_node() {
    let created = |path: &str, major: u32, minor: u32| {
        format!(r#"{{"path":"{path}","type":"c","major":{major},"minor":{minor}}}"#)
    };
    let mounted = |source: &str, path: &str| {
        format!(r#"{{"type":"bind","source":"{source}","destination":"{path}"}}"#)
    };
    let nothing = Read::default;
    for (device, mount, expected) in [
        (
            created("/dev/nvidia1", 195, 1),
            String::new(),
            Read {
                gpus: "/dev/nvidia1",
                limited: &[1],
                is_request: true,
                ..nothing()
            },
        ),
        (
            created("/dev/other", 195, 2),
            String::new(),
            Read {
                gpus: "/dev/other",
                limited: &[2],
                is_request: true,
                ..nothing()
            },
        ),
        (
            created("/dev/nvidia248", 195, 248),
            String::new(),
            nothing(),
        ),
        (created("/dev/nvidia0", 1, 3), String::new(), nothing()),
        (
            created("/dev/nvidiactl", 195, 255),
            String::new(),
            Read {
                control: "/dev/nvidiactl",
                ..nothing()
            },
        ),
        (
            created("/dev/nvidia-caps/nvidia-cap1", 510, 1),
            String::new(),
            nothing(),
        ),
        (
            created("/dev/dxg", 10, 125),
            String::new(),
            Read {
                gpus: "/dev/dxg",
                control: "/dev/dxg",
                ..nothing()
            },
        ),
        (
            String::new(),
            mounted("/dev/nvidia4", "/dev/nvidia4"),
            Read {
                gpus: "/dev/nvidia4",
                ..nothing()
            },
        ),
        (
            String::new(),
            mounted("/driver/dev/nvidia4", "/dev/nvidia4"),
            Read {
                gpus: "/dev/nvidia4",
                ..nothing()
            },
        ),
        (
            String::new(),
            mounted("/dev/nvidia4", "/dev/other"),
            Read {
                gpus: "/dev/other",
                ..nothing()
            },
        ),
        (String::new(), mounted("/x", "/dev/nvidia+1"), nothing()),
        (
            String::new(),
            mounted("/dev/nvidiactl", "/dev/nvidiactl"),
            Read {
                control: "/dev/nvidiactl",
                ..nothing()
            },
        ),
        (
            String::new(),
            mounted("/dev/dxg", "/dev/dxg"),
            Read {
                gpus: "/dev/dxg",
                control: "/dev/dxg",
                ..nothing()
            },
        ),
    ] {
        let case = format!("{device}{mount}");
        check(&spec(&device, &mount, ""), &expected, &case);
    }
}

/// The nodes that the engine lists for every privileged container show nothing. A mount is always a decision of the engine's caller.
#[test]
fn nodes_of_a_privileged_container_are_not_given() {
    let process = r#""capabilities":{"bounding":["CAP_SYS_ADMIN"]}"#;
    let all = r#"{"path":"/dev/nvidia1","type":"c","major":195,"minor":1},{"path":"/dev/nvidiactl","type":"c","major":195,"minor":255}"#;
    let limited = Read {
        limited: &[1],
        ..Read::default()
    };
    check(&spec(all, "", process), &limited, "all nodes");
    let mount = r#"{"type":"bind","source":"/dev/nvidiactl","destination":"/dev/nvidiactl"}"#;
    let expected = Read {
        control: "/dev/nvidiactl",
        gpus: "/dev/nvidia1",
        ..limited
    };
    check(
        &spec(all, mount, process),
        &expected,
        "all nodes and a mount",
    );
}
