//! What `doctor` reports about the device plugin that runs on the host.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;

use oci_nvidia_hook::testing::doctor::{Caller, Status};
use serde_json::{Value, json};

use super::host::changed;
use super::{NEEDS, examine};

tests! {
    NEEDS => the_health_that_the_kubelet_has;
}

/// The running plugin knows which GPUs it has withdrawn. Its sockets alone do not show that it works.
fn the_health_that_the_kubelet_has() {
    let dir = changed(
        "install -m 755 /dev/null usr/bin/oci-nvidia-kubelet-plugin; mkdir -p run/oci-nvidia-kubelet-plugin; \
         mkdir -p var/lib/kubelet/device-plugins; cd var/lib/kubelet/device-plugins; touch kubelet.sock oci-nvidia-gpu.sock",
    );
    let found = || {
        examine(dir.path(), Caller::default())
            .into_iter()
            .find(|check| check.check == "kubelet-plugin")
    };
    let found = || {
        found()
            .map(|check| (check.status, check.id, check.what))
            .unwrap()
    };
    let (status, id, what) = found();
    assert_eq!((status, id), (Status::Skipped, None), "{what}");
    assert!(what.contains("no device plugin answers"), "{what}");
    let listener = UnixListener::bind(
        dir.path()
            .join("run/oci-nvidia-kubelet-plugin/control.sock"),
    )
    .unwrap();
    let device = |number: u32, unhealthy: Value| json!({"id": format!("GPU-{number}::0"), "gpu": format!("GPU-{number}"), "unhealthy": unhealthy});
    let sick = json!({"why": "XID 79", "since": "2026-01-02T03:04:05Z"});
    let answer = |devices: Value| {
        json!({"resources": [{"name": "nvidia.com/gpu", "is_live": true, "devices": devices}]})
            .to_string()
    };
    let claims = |is_registered: bool, problem: Value, unpublished: Value| {
        let driver = json!({"name": "gpu.nvidia.com", "is_registered": is_registered, "problem": problem, "unpublished": unpublished});
        let resource = json!({"name": "nvidia.com/gpu", "is_live": is_registered, "devices": [device(0, Value::Null)]});
        json!({"resources": [resource], "driver": driver}).to_string()
    };
    let cases = [
        (
            claims(true, Value::Null, Value::Null),
            Status::Ok,
            None,
            "the driver \"gpu.nvidia.com\" serves claims",
        ),
        (
            claims(false, Value::Null, Value::Null),
            Status::Warning,
            Some("ONH-603"),
            "has not registered it",
        ),
        (
            claims(true, json!("NVML fails"), Value::Null),
            Status::Error,
            Some("ONH-074"),
            "cannot have a device: NVML",
        ),
        (
            claims(true, Value::Null, json!("cannot publish")),
            Status::Warning,
            Some("ONH-608"),
            "cannot publish",
        ),
        (
            answer(json!([device(0, Value::Null)])),
            Status::Ok,
            None,
            "offers 1 device as healthy",
        ),
        (
            answer(json!([
                device(0, Value::Null),
                device(1, sick.clone()),
                device(1, sick)
            ])),
            Status::Warning,
            Some("ONH-606"),
            "the device plugin offers 1 of 3 devices as healthy: GPU-1: XID 79 (since 2026-01-02T03:04:05Z)",
        ),
        (
            "unknown command".to_owned(),
            Status::Skipped,
            None,
            "does not report its devices: its answer is invalid",
        ),
    ];
    for (answer, status, id, what) in cases {
        let found = std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut [0; "devices\n".len()]).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            });
            found()
        });
        assert_eq!((found.0, found.1), (status, id), "{found:?}");
        assert!(found.2.contains(what), "{found:?}");
    }
}
