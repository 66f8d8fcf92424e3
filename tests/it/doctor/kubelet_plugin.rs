//! What `doctor` reports about the device plugin that runs on the host.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;

use oci_nvidia_hook::testing::doctor::Caller;

use super::host::changed;
use super::{NEEDS, examine};

tests! {
    NEEDS => the_answer_of_the_plugin;
}

/// The running plugin knows which GPUs it has withdrawn. Its sockets alone do not show that it works.
fn the_answer_of_the_plugin() {
    let dir = changed(
        "install -m 755 /dev/null usr/bin/oci-nvidia-kubelet-plugin; mkdir -p run/oci-nvidia-kubelet-plugin; \
         mkdir -p var/lib/kubelet/device-plugins; cd var/lib/kubelet/device-plugins; touch kubelet.sock oci-nvidia-gpu.sock",
    );
    let socket = dir
        .path()
        .join("run/oci-nvidia-kubelet-plugin/control.sock");
    let found = || {
        let mut checks = examine(dir.path(), Caller::default()).into_iter();
        checks
            .find(|check| check.check == "kubelet-plugin")
            .unwrap()
            .what
    };
    assert!(found().contains("no kubelet plugin answers"), "{}", found());
    let listener = UnixListener::bind(socket).unwrap();
    let gpu = r#"{"id": "GPU-1::0", "gpu": "GPU-1", "unhealthy": {"why": "XID 79"}}"#;
    let answer = format!(
        r#"{{"resources": [{{"name": "nvidia.com/gpu", "is_live": true, "devices": [{gpu}]}}]}}"#
    );
    for (answer, expected) in [
        (
            answer.as_str(),
            "offers 0 of 1 device as healthy: GPU-1: XID 79",
        ),
        (
            "unknown command",
            "does not report its devices: its answer is invalid",
        ),
    ] {
        let what = std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut [0; "devices\n".len()]).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            });
            found()
        });
        assert!(what.contains(expected), "{what}");
    }
}
