//! CDI specs that are not the host's any more: the numbers of a device node, a GPU, a MIG device or the driver has changed. `cdi check`,
//! `doctor` and the hook entry of the spec name the same finding, and `cdi refresh` writes a spec that containers can use.

use std::fs;
use std::path::Path;
use std::process::Command;

use cdi_spec::registry;
use cdi_spec::spec::{ContainerEdits, Spec};

use crate::cdi::{GPU_0, GPU_1, MIG_1, cdi, edits_of, verdict};
use crate::cdi_containers::with_mounts;
use crate::driver::{FakeDriver, Image, NEEDS};
use crate::support::{HOOK, Ran, assert_says, run, scratch, shell};

tests! {
    NEEDS => device_numbers_of_an_earlier_load, devices_that_are_gone, drivers_that_are_not_loaded,
        an_update_before_the_reboot, nodes_that_are_no_devices;
}

/// A host with a spec, and an image.
pub struct Scene {
    pub fake: FakeDriver,
    pub dir: tempfile::TempDir,
    image: Image,
}

impl Scene {
    pub fn new(arguments: &[&str]) -> Self {
        let (fake, dir) = (FakeDriver::new(arguments), scratch());
        let image = Image::new(dir.path(), &["--layout", "debian"]);
        let scene = Self { fake, dir, image };
        scene.cdi("generate").ok();
        scene
    }

    fn spec_file(&self) -> String {
        format!("{}/nvidia.yaml", self.dir.path().display())
    }

    /// Runs `cdi VERB` for the spec of this host.
    fn cdi(&self, verb: &str) -> Ran {
        let file = self.spec_file();
        cdi(&self.fake, &[verb, "--output", &file, "--hook-path", HOOK])
    }

    fn spec(&self) -> Spec {
        registry::read_spec(Path::new(&self.spec_file())).unwrap()
    }

    /// Changes the host with a shell script in its root directory.
    fn change(&self, script: &str) {
        let root = self.fake.root.display();
        shell!("cd '{root}'; {script}");
    }

    /// Returns the number of the finding of `cdi check` about a device, and its reason.
    fn check(&self, device: &str) -> (Option<String>, String) {
        let (dir, name) = (
            self.dir.path().to_str().unwrap(),
            format!("nvidia.com/gpu={device}"),
        );
        verdict(&cdi(
            &self.fake,
            &["check", "--json", "--spec-dir", dir, &name],
        ))
    }

    /// Starts a container with a device as an engine would, and runs the hook entry of the spec.
    fn start(&self, device: &str) -> Ran {
        let spec = self.spec();
        let found = spec.devices.iter().find(|known| known.name == device);
        self.start_with(&spec.container_edits, &found.unwrap().container_edits)
    }

    fn start_with(&self, common: &ContainerEdits, device: &ContainerEdits) -> Ran {
        let edits = common.clone().merge(device.clone());
        let container = with_mounts(self.dir.path(), &self.image.rootfs, &edits);
        container.create_runtime_hook(&edits.hooks[0].args[1..])
    }

    /// A start is refused with this number, which `cdi check` and `doctor` name too.
    fn refuses(&self, device: &str, number: &str, parts: &[&str]) {
        let stderr = self.start(device).failed(1);
        assert!(
            stderr.contains(&format!("({number})")),
            "{device}: {stderr}"
        );
        assert!(stderr.contains("hint: run "), "{stderr}");
        let record = run(Command::new(HOOK).args(["why", "waiting"]).env_clear()).stdout;
        assert!(record.contains(&format!("number: {number};")), "{record}");
        let (found, why) = self.check(device);
        assert_eq!(found.as_deref(), Some(number), "{device}: {why}");
        let doctor = self.doctor();
        assert!(doctor.contains(number), "{device}: {doctor}");
        for part in parts {
            assert!(
                stderr.contains(part) && why.contains(part),
                "{part}: {stderr} {why}"
            );
            assert!(doctor.contains(part), "{part}: {doctor}");
        }
    }

    fn permits(&self, device: &str) {
        self.start(device).ok();
        let (number, why) = self.check(device);
        assert_eq!((number, why.as_str()), (None, ""), "{device}");
    }

    /// Runs `doctor cdi` on a host whose engines read the spec.
    fn doctor(&self) -> String {
        let script = format!(
            "mount -t tmpfs cdi /etc/cdi; cp '{}' /etc/cdi/nvidia.yaml; '{HOOK}' --config '{}' doctor cdi --json",
            self.spec_file(),
            self.fake.config.display(),
        );
        let script = format!("mkdir -p /etc/cdi; {script} || true");
        let mut command = Command::new("unshare");
        run(command.args(["--mount", "--propagation", "private", "sh", "-c", &script])).stdout
    }

    fn refresh(&self) {
        self.cdi("refresh").ok();
    }
}

/// Makes a node of the host have another major number, as after the module was loaded again.
fn renumber(node: &str, major: u32) -> String {
    format!(
        "minor=$((0x$(stat -c %T {node}))); rm {node}; mknod -m 666 {node} c {major} $minor; \
         sed -i 's/^[0-9]* nvidia-caps$/{major} nvidia-caps/' proc/devices"
    )
}

fn device_numbers_of_an_earlier_load() {
    for (arguments, node, major, old, device) in [
        (&["--gpus", "2"][..], "nvidia-uvm", 507, "511:0", "0"),
        (&["--gpus", "2"], "nvidia-uvm-tools", 507, "511:1", "all"),
        (
            &["--gpus", "2", "--mig"],
            "nvidia-caps/nvidia-cap13",
            506,
            "510:13",
            "0:0",
        ),
    ] {
        let scene = Scene::new(arguments);
        scene.permits(device);
        let path = format!("/dev/{node}");
        scene.change(&renumber(&format!("dev/{node}"), major));
        let (_, minor) = old.split_once(':').unwrap();
        let new = format!("{major}:{minor}");
        scene.refuses(device, "ONH-063", &[&path, old, &new]);
        scene.refresh();
        scene.permits(device);
    }
    // The numbers of these nodes are fixed, but a spec can have been edited.
    let scene = Scene::new(&["--gpus", "1"]);
    for node in [
        "/dev/nvidia-uvm",
        "/dev/nvidiactl",
        "/dev/nvidia-modeset",
        "/dev/nvidia0",
    ] {
        let mut spec = scene.spec();
        let mut device = spec.devices.remove(0);
        for nodes in [
            &mut device.container_edits.device_nodes,
            &mut spec.container_edits.device_nodes,
        ] {
            for node in nodes.iter_mut().filter(|known| known.path == node) {
                node.major = Some(498);
            }
        }
        let stderr = scene
            .start_with(&spec.container_edits, &device.container_edits)
            .failed(1);
        assert_says(&stderr, &["(ONH-063)", node]);
    }
}

fn devices_that_are_gone() {
    let gone = "rm -r proc/driver/nvidia/gpus/0000:02:00.0";
    let scene = Scene::new(&["--gpus", "2"]);
    scene.change(gone);
    for device in ["1", GPU_1, "all"] {
        scene.refuses(
            device,
            "ONH-030",
            &[
                "GPU-51eed001",
                "0000:02:00.0 does not exist on this host any more",
            ],
        );
    }
    scene.permits("0");

    // Another GPU in the same slot, and the same GPU with another number.
    let scene = Scene::new(&["--gpus", "2"]);
    let information = "proc/driver/nvidia/gpus/0000:02:00.0/information";
    scene.change(&format!(
        "sed -i 's/GPU-51eed001/GPU-71eed001/' {information}"
    ));
    scene.refuses(
        "1",
        "ONH-030",
        &["GPU-51eed001", "does not exist on this host any more"],
    );
    scene.permits("0");
    scene.change(&format!(
        "sed -i 's/GPU-71eed001/GPU-51eed001/; s/^Device Minor:.*/Device Minor: \\t 5/' {information}"
    ));
    scene.refuses(
        "1",
        "ONH-063",
        &[
            "/dev/nvidia1",
            "now belongs to another device than GPU GPU-51eed001",
        ],
    );

    let scene = Scene::new(&["--gpus", "2", "--mig"]);
    scene.permits(MIG_1);
    scene
        .fake
        .set_nvml(|old| old.replace(MIG_1, "MIG-71eed000-0002-4000-8000-0000fa4e0002"));
    scene.change("touch proc/driver/nvidia/capabilities/gpu0/mig/gi2/ci0; rm -rf run");
    scene.fake.configure("");
    scene.refuses(
        MIG_1,
        "ONH-030",
        &[MIG_1, "does not exist on this host any more"],
    );
    scene.permits("1");
    let scene = Scene::new(&["--gpus", "2", "--mig"]);
    scene.change("rm -r proc/driver/nvidia/capabilities/gpu0/mig/gi2");
    scene.refuses(
        MIG_1,
        "ONH-030",
        &[MIG_1, "does not exist on this host any more"],
    );
}

fn drivers_that_are_not_loaded() {
    let scene = Scene::new(&["--gpus", "1"]);
    scene.change("sed -i 's/535.183.01/550.54.14/' proc/driver/nvidia/version");
    let stderr = scene.start(GPU_0).failed(1);
    assert_says(
        &stderr,
        &["the loaded kernel module has version 550.54.14, and the libraries below"],
    );
    assert_says(
        &stderr,
        &["have version 535.183.01 (ONH-013)\nhint: install the libraries of driver 550.54.14"],
    );
    assert_eq!(scene.check(GPU_0).0.as_deref(), Some("ONH-013"));
    scene.change("rm -r proc/driver/nvidia");
    let stderr = scene.start(GPU_0).failed(1);
    assert_says(
        &stderr,
        &["the kernel module nvidia is not loaded (ONH-011)"],
    );
    assert!(stderr.contains("hint: run \"modprobe nvidia\""), "{stderr}");
}

/// The files of driver 550 are installed, and the module of driver 535 is loaded. The units run `cdi refresh`, which ends with success: it
/// cannot repair this. A container with the spec of driver 535 must not end at a missing file.
fn an_update_before_the_reboot() {
    let scene = Scene::new(&["--gpus", "1"]);
    scene.permits(GPU_0);
    scene.change(
        "for file in $(find usr/lib -name '*.so.535.183.01'); do mv $file ${file%535.183.01}550.54.14; done; \
         for link in $(find usr/lib -type l); do to=$(readlink $link); \
             case $to in *535.183.01) ln -sfn ${to%535.183.01}550.54.14 $link ;; esac; done; \
         /sbin/ldconfig -r .",
    );
    let mismatch = "have version 550.54.14 (ONH-013)";
    let refreshed = scene.cdi("refresh");
    assert_eq!(refreshed.code, Some(0), "{refreshed:?}");
    assert_eq!(refreshed.stderr.matches("ONH-013").count(), 1);
    assert_says(&refreshed.stderr, &[mismatch]);
    let stderr = scene.start(GPU_0).failed(1);
    assert_says(&stderr, &[mismatch]);
    assert_says(&stderr, &["hint: reboot the host"]);
    let spec = scene.spec();
    let of_devices = spec.devices.iter().map(|device| &device.container_edits);
    for edits in of_devices.chain([&spec.container_edits]) {
        assert!(edits.mounts.is_empty(), "{edits:?}");
    }
    let (number, why) = scene.check(GPU_0);
    assert_eq!(number.as_deref(), Some("ONH-013"));
    assert!(why.contains("have version 550.54.14"), "{why}");
    let doctor = scene.doctor();
    assert!(
        !doctor.contains("ONH-"),
        "the driver's section has the finding: {doctor}"
    );
    // A spec that engines cannot read cannot be written again now.
    let broken = scratch();
    fs::write(broken.path().join("nvidia.json"), "{").unwrap();
    let ran = cdi(
        &scene.fake,
        &["check", "--spec-dir", broken.path().to_str().unwrap()],
    );
    assert_says(
        &ran.stdout,
        &["cannot read the file", "hint: reboot the host"],
    );
    // The path unit must not see a change each time.
    let written = || fs::metadata(scene.spec_file()).unwrap().modified().unwrap();
    let before = written();
    assert_eq!(scene.cdi("refresh").code, Some(0));
    assert_eq!(written(), before);
    // After the reboot
    scene.change("sed -i 's/535.183.01/550.54.14/' proc/driver/nvidia/version; sed -i 's/^driver .*/driver 550.54.14/' usr/lib/*/nvml.conf");
    scene.cdi("refresh").ok();
    scene.permits(GPU_0);
}

/// A node of another type has the numbers of a GPU, but is not a GPU.
fn nodes_that_are_no_devices() {
    let scene = Scene::new(&["--gpus", "1"]);
    let spec = scene.spec();
    let mut edits = edits_of(&spec, &["0"]);
    let container = with_mounts(scene.dir.path(), &scene.image.rootfs, &edits);
    edits
        .device_nodes
        .retain(|node| node.path == "/dev/nvidia0");
    let mut device = serde_json::to_value(&edits.device_nodes[0]).unwrap();
    for (kind, is_refused) in [("b", true), ("p", true), ("u", false), ("c", false)] {
        device["type"] = kind.into();
        container.set_spec_field("linux", serde_json::json!({ "devices": [device] }));
        let ran = container.create_runtime_hook(&edits.hooks[0].args[1..]);
        assert_eq!(ran.code == Some(1), is_refused, "{kind}: {ran:?}");
        assert_eq!(
            ran.stderr.contains("(ONH-063)"),
            is_refused,
            "{kind}: {ran:?}"
        );
        container.set_env(&["NVIDIA_VISIBLE_DEVICES=0"]);
        container.set_spec_field("linux", serde_json::json!({ "devices": [device] }));
        let ran = container.hook(Path::new(&scene.fake.config));
        assert_eq!(
            ran.stderr.contains("(ONH-044)"),
            is_refused,
            "{kind}: {ran:?}"
        );
        container.set_hooks(&edits.hooks[0].hook_name, &serde_json::json!(edits.hooks));
    }
}
