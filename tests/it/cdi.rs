//! CDI: what is written for a host, what engines make of it, and when it is written anew.

use std::path::{Path, PathBuf};
use std::process::Command;

use oci_nvidia_hook::cdi::file;
use oci_nvidia_hook::cdi::spec::Spec;

use crate::Test;
use crate::driver::FakeDriver;
use crate::podman::{Cgroup, IMAGE, Podman};
use crate::support::{HOOK, Need, Ran, run, scratch, snapshot};

const NEEDS_DRIVER: &[Need] = &[Need::Root, Need::Program("cc")];
const NEEDS_PODMAN: &[Need] = &[Need::Root, Need::Program("podman"), Need::Program("runc"), Need::Program("cc")];

pub const TESTS: &[Test] = &[
    ("cdi::a_spec_is_valid", NEEDS_DRIVER, a_spec_is_valid),
    ("cdi::podman_gives_devices_by_name", NEEDS_PODMAN, podman_gives_devices_by_name),
];

/// `cdi ARGUMENTS`, for this driver.
fn cdi(fake: &FakeDriver, arguments: &[&str]) -> Ran {
    let mut hook = Command::new(HOOK);
    run(hook.arg("--config").arg(&fake.config).arg("cdi").args(arguments).env_clear())
}

fn generate(fake: &FakeDriver, arguments: &[&str]) -> Spec {
    let mut words = vec!["generate", "--output", "-"];
    words.extend(arguments);
    file::parse(cdi(fake, &words).ok().as_bytes()).unwrap()
}

/// A host's directories of specs with this one in it.
fn only_spec(path: &Path) -> String {
    format!(
        "mkdir -p /etc/cdi /run/cdi; mount -t tmpfs none /etc/cdi; mount -t tmpfs none /run/cdi; cp '{}' /run/cdi/",
        path.display()
    )
}

fn a_spec_is_valid() {
    let fake = FakeDriver::new(&["--gpus", "2", "--mig", "--drm"]);
    let spec = generate(&fake, &[]);
    assert_eq!(spec.check(), Ok(()));
    let names: Vec<_> = spec.devices.iter().map(|device| device.name.as_str()).collect();
    println!("{names:?}");
    assert_eq!(spec.cdi_version, "0.5.0");
}

fn podman_gives_devices_by_name() {
    let fake = FakeDriver::shared();
    let podman = Podman::shared();
    let dir = scratch();
    for format in ["yaml", "json"] {
        let path: PathBuf = dir.path().join(format!("nvidia.{format}"));
        cdi(fake, &["generate", "--output", path.to_str().unwrap()]).ok();
        let before = only_spec(&path);
        let profile = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf";
        let script = format!(
            "nvidia-smi -L; probe-dlopen libcuda.so.1; probe-open /dev/nvidia? /dev/nvidia-uvm; cat {profile}; \
             echo $NVIDIA_VISIBLE_DEVICES"
        );
        for (names, gpus, egl) in [
            (&["0"][..], 1, "0x1"),
            (&["all"], 2, "0x3"),
            (&["GPU-51eed001-0001-4001-8000-0000fa4e0001"], 1, "0x2"),
            (&["0", "1"], 2, "0x3"), // each with a hook entry of its own
        ] {
            let devices: Vec<_> = names.iter().map(|name| format!("--device=nvidia.com/gpu={name}")).collect();
            let mut arguments: Vec<_> = devices.iter().map(String::as_str).collect();
            arguments.extend([IMAGE, "sh", "-euc", &script]);
            let text = podman.run_after(&before, Cgroup::AsMounted, &arguments).ok();
            assert_eq!(text.matches("UUID: GPU-").count(), gpus, "{text}");
            assert_eq!(text.matches(": ENXIO").count(), gpus + 1, "each may be opened, and has no driver here: {text}");
            assert!(text.contains(&format!("\"EGLVisibleDGPUDevices\", {egl}]")), "{text}");
            assert!(text.contains("void\n"), "{text}");
            println!("{text}");
        }
    }
}
