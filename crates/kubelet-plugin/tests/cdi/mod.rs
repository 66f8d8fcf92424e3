//! The CDI spec of the node: it exists before the kubelet gets a list, and goes if no strategy uses it.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use super::fake_host::{Fake, uuid};
use super::fake_kubelet::FakeKubelet;
use super::node_extras::wait_for_labels;
use super::{GPU, Node, POLLED, PROGRAM, ROOT, SOON, answer, check, start_with};

tests! {
    ROOT => the_cdi_spec_is_there_before_the_list, an_unused_cdi_spec_goes, a_gpu_without_a_cdi_device_is_unhealthy,
        a_display_card_is_not_offered, a_spec_that_is_replaced_is_written_again, a_lost_spec_is_written_before_the_answer;
}

/// Engines look for the devices as soon as the kubelet has assigned them.
fn the_cdi_spec_is_there_before_the_list() {
    let fake = Fake::new(&["--gpus", "2"]);
    let cdi = fake.dir.path().join("cdi");
    let file = cdi.join("k8s.device-plugin.nvidia.com-gpu.json");
    std::fs::create_dir(&cdi).unwrap();
    std::fs::write(&file, "of a driver that is gone").unwrap();
    let node = Node::start_on(fake, &["--cdi-dir", cdi.to_str().unwrap()]);
    let names = || {
        let spec: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(spec["kind"], "k8s.device-plugin.nvidia.com/gpu");
        let names = spec["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|device| device["name"].as_str().unwrap().to_owned());
        names.collect::<BTreeSet<_>>()
    };
    node.wait("the list", SOON, GPU, 2, 2);
    assert_eq!(
        names(),
        ["0", "1", "all", &uuid(0), &uuid(1)]
            .map(str::to_owned)
            .into()
    );

    let layout = node.fake.dir.path().join("layout");
    std::fs::write(
        &layout,
        "mig gpu=0 gi=1 ci=0 profile=1g.10gb uuid=MIG-new\n",
    )
    .unwrap();
    node.fake
        .make_root(&["--mig-layout", layout.to_str().unwrap()]);
    node.wait("the MIG device", SOON, "nvidia.com/mig-1g.10gb", 1, 1);
    assert_eq!(
        names(),
        ["0:0", "1", "all", "MIG-new", &uuid(1)]
            .map(str::to_owned)
            .into()
    );

    std::fs::remove_file(&file).unwrap();
    node.until("the file that another program removed", POLLED, || {
        file.is_file()
    });
    node.signal("USR1");
    node.until("no file without a driver", SOON, || !file.is_file());
    node.signal("USR2");
    node.until("the file of the new driver", SOON, || file.is_file());
}

/// An engine would not find the CDI device, and would not know the reason.
fn a_gpu_without_a_cdi_device_is_unhealthy() {
    for strategy in ["cdi-cri", "cdi-annotations"] {
        let fake = Fake::new(&["--gpus", "1"]);
        let cdi = fake.dir.path().join("cdi");
        let hidden = fake.dir.path().join("hidden");
        std::fs::create_dir(&hidden).unwrap();
        move_libcuda(&fake.file(""), &hidden);
        let options = [
            "--cdi-dir",
            cdi.to_str().unwrap(),
            "--device-list-strategy",
            strategy,
        ];
        let node = Node::start_on(fake, &options);
        node.wait("an unhealthy GPU", SOON, GPU, 0, 1);
        let refusal = node.refusal(&uuid(0));
        assert!(
            refusal.contains("the node has no CDI device for it: ")
                && refusal.contains("libcuda.so")
                && refusal.contains("(ONH-072); hint: "),
            "{refusal}"
        );
        move_libcuda(&hidden, &node.fake.file(""));
        node.wait("the GPU with a CDI device", POLLED, GPU, 1, 1);
        node.kubelet.allocate(GPU, &[&[uuid(0)]]).unwrap();
    }
    // A directory that cannot exist
    let fake = Fake::new(&["--gpus", "1"]);
    let cdi = fake.config.join("cdi");
    let options = ["--cdi-dir", cdi.to_str().unwrap()];
    let node = Node::start_on(
        fake,
        &[&options[..], &["--device-list-strategy=cdi-cri"]].concat(),
    );
    node.wait("an unhealthy GPU", SOON, GPU, 0, 1);
    let refusal = node.refusal(&uuid(0));
    assert!(refusal.contains("cannot write "), "{refusal}");
}

fn move_libcuda(from: &Path, to: &Path) {
    for file in std::fs::read_dir(from).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        if name.starts_with("libcuda.so") {
            std::fs::rename(from.join(&name), to.join(&name)).unwrap();
        }
    }
}

/// A strategy without CDI: nothing would keep the spec of an earlier run current. The spec of NVIDIA's plugin has the same name.
fn an_unused_cdi_spec_goes() {
    let fake = Fake::new(&["--gpus", "1"]);
    let run = fake.dir.path().join("run-of-the-host");
    let cdi = run.join("cdi");
    let file = cdi.join("k8s.device-plugin.nvidia.com-gpu.json");
    let mut node = Node::start_on(fake, &["--cdi-dir", cdi.to_str().unwrap()]);
    node.wait("the list", SOON, GPU, 1, 1);
    let spec = std::fs::read_to_string(&file).unwrap();
    let mut restart = |strategy: &str, before: &str| {
        node.plugin.kill().unwrap();
        node.plugin.wait().unwrap();
        node.kubelet = FakeKubelet::start(&node.kubelet_dir);
        let mut command = Command::new("unshare");
        let script = format!("mount --bind '{}' /run; {before}exec \"$@\"", run.display());
        command.args(["-m", "bash", "-euc", &script, "bash", PROGRAM]);
        node.plugin = start_with(command, &node.fake, &node.kubelet_dir, &[strategy]);
        node.wait("the list", SOON, GPU, 1, 1);
        file.is_file()
    };
    // As the process of the unit for NRI does, which keeps the same spec
    let other = std::fs::File::open(&file).unwrap();
    rustix::fs::flock(&other, rustix::fs::FlockOperation::LockShared).unwrap();
    assert!(
        restart("--device-list-strategy=envvar", ""),
        "another process keeps the spec"
    );
    drop(other);
    assert!(!restart("--device-list-strategy=envvar", ""));
    assert!(restart("--device-list-strategy=cdi-cri", ""));
    let theirs = spec
        .replace("oci-nvidia-hook", "nvidia-cdi-hook")
        .replace("\"rootfs\"", "\"update-ldcache\"");
    std::fs::write(&file, theirs).unwrap();
    assert!(restart("--device-list-strategy=volume-mounts", ""));
    assert_eq!(
        node.log()
            .matches("removed the CDI spec of an earlier run")
            .count(),
        1,
        "{}",
        node.log()
    );
}

/// The card in a DGX Station that only drives its display.
fn a_display_card_is_not_offered() {
    let fake = Fake::new(&["--gpus", "2"]);
    fake.rename(1, "NVIDIA DGX Display");
    let (cdi, labels) = (fake.dir.path().join("cdi"), fake.dir.path().join("labels"));
    std::fs::create_dir(&labels).unwrap();
    let options = [
        "--device-list-strategy=cdi-cri",
        "--cdi-dir",
        cdi.to_str().unwrap(),
        "--labels-dir",
        labels.to_str().unwrap(),
    ];
    let node = Node::start_on(fake, &options);
    node.wait("the other GPU", SOON, GPU, 1, 1);
    let spec = cdi.join("k8s.device-plugin.nvidia.com-gpu.json");
    let spec: serde_json::Value = serde_json::from_slice(&std::fs::read(spec).unwrap()).unwrap();
    let all = spec["devices"].as_array().unwrap().iter();
    let all = all.clone().find(|device| device["name"] == "all").unwrap();
    let all = all["containerEdits"].to_string();
    assert!(
        all.contains("\"/dev/nvidia0\"") && !all.contains("\"/dev/nvidia1\""),
        "{all}"
    );
    let lines = [
        "nvidia.com/gpu.count=1",
        "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3",
    ];
    wait_for_labels(&labels.join("oci-nvidia-kubelet-plugin"), &lines, "-");
    for list in node.lists() {
        assert!(!list.contains_key(&uuid(1)), "{list:?}");
    }
    let error = node.kubelet.allocate(GPU, &[&[uuid(1)]]).unwrap_err();
    assert!(error.message().contains("(ONH-071)"), "{error}");
    // No plugin runs in the kubelet's default directory.
    let (code, report, _) = check(&node.fake, &["--device-list-strategy=envvar"]);
    assert_eq!(code, Some(1), "{report}");
    assert!(
        report.starts_with("nvidia.com/gpu: 1 of 1 devices"),
        "{report}"
    );
}

/// An engine would skip the whole file.
fn a_spec_that_is_replaced_is_written_again() {
    let fake = Fake::new(&["--gpus", "1"]);
    let cdi = fake.dir.path().join("cdi");
    let options = [
        "--device-list-strategy=cdi-cri",
        "--cdi-dir",
        cdi.to_str().unwrap(),
    ];
    let node = Node::start_on(fake, &options);
    node.wait("the list", SOON, GPU, 1, 1);
    let file = cdi.join("k8s.device-plugin.nvidia.com-gpu.json");
    let ours = std::fs::read_to_string(&file).unwrap();
    for other in ["{", "", &ours.replace(&uuid(0), "GPU-other")] {
        std::fs::write(&file, other).unwrap();
        node.until("our spec", SOON, || {
            std::fs::read_to_string(&file).unwrap() == ours
        });
    }
    // A copy of our spec, as another of our processes writes it, stays.
    let copy = cdi.join("copy");
    std::fs::write(&copy, ours.replace("  ", "   ")).unwrap();
    std::fs::rename(&copy, &file).unwrap();
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_ne!(std::fs::read_to_string(&file).unwrap(), ours);
}

/// The plugin also searches for lost files each second, so the answers are many.
fn a_lost_spec_is_written_before_the_answer() {
    let fake = Fake::new(&["--gpus", "1"]);
    let cdi = fake.dir.path().join("cdi");
    let options = [
        "--device-list-strategy=cdi-cri",
        "--cdi-dir",
        cdi.to_str().unwrap(),
    ];
    let node = Node::start_on(fake, &options);
    node.wait("the list", SOON, GPU, 1, 1);
    let file = cdi.join("k8s.device-plugin.nvidia.com-gpu.json");
    let ours = std::fs::read_to_string(&file).unwrap();
    let name = format!("k8s.device-plugin.nvidia.com/gpu={}", uuid(0));
    for _ in 0..5 {
        for other in [None, Some("{"), Some(&*ours.replace(&uuid(0), "GPU-other"))] {
            match other {
                None => std::fs::remove_file(&file).unwrap(),
                Some(text) => std::fs::write(&file, text).unwrap(),
            }
            assert_eq!(answer(&node.kubelet, GPU, &uuid(0)), name, "{other:?}");
            let found = std::fs::read_to_string(&file).unwrap_or_default();
            assert!(found == ours, "{other:?}: {found}");
        }
    }
    // A directory that cannot exist
    // The plugin creates it again at once.
    while std::fs::remove_dir_all(&cdi).is_err() || std::fs::write(&cdi, "").is_err() {}
    let refusal = node.refusal(&uuid(0));
    assert!(
        refusal.contains("the node has no CDI device for it: ") && refusal.contains("(ONH-072)"),
        "{refusal}"
    );
    std::fs::remove_file(&cdi).unwrap();
    node.until("the device works again", POLLED, || {
        node.kubelet.allocate(GPU, &[&[uuid(0)]]).is_ok()
    });
    assert!(file.is_file());
}
