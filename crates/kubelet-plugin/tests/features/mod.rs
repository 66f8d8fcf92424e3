//! Devices next to the GPUs, with the setting `extra-devices` and with the options of NVIDIA's plugin.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::fake_host::{Fake, uuid};
use super::{GPU, Node, POLLED, ROOT, SOON, answer, check};

tests! {
    ROOT => cdi_names_have_specs, variables_nodes_and_mounts, missing_and_denied_devices_are_named;
}

const KIND: &str = "k8s.device-plugin.nvidia.com";

/// Adds a device node with a number that no driver of this machine has.
fn add_node(fake: &Fake, name: &str) {
    let path = fake.root.join("dev").join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let output = Command::new("mknod")
        .arg("-m")
        .arg("666")
        .arg(&path)
        .args(["c", "508", "0"])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn host(nodes: &[&str]) -> Fake {
    let fake = Fake::new(&["--gpus", "1"]);
    nodes.iter().for_each(|name| add_node(&fake, name));
    fake
}

fn configure(fake: &Fake, text: &str) {
    fs::write(
        &fake.config,
        format!("[nvidia-container-cli]\nroot = {:?}\n{text}\n", fake.root),
    )
    .unwrap();
}

fn file(dir: &Path, class: &str) -> PathBuf {
    dir.join(format!("{KIND}-{class}.json"))
}

/// Engines reject a container with the name of a device that no spec has.
fn cdi_names_have_specs() {
    let fake = host(&["nvidia-fs0"]);
    let cdi = fake.dir.path().join("cdi");
    fs::create_dir(&cdi).unwrap();
    // NVIDIA's plugin leaves its specs.
    fs::write(file(&cdi, "gds"), "of another plugin").unwrap();
    let options = [
        "--device-list-strategy=cdi-cri",
        "--gds-enabled",
        "--gdrcopy-enabled",
        "--cdi-dir",
    ];
    let node = Node::start_on(fake, &[&options[..], &[cdi.to_str().unwrap()]].concat());
    node.wait("the list", SOON, GPU, 1, 1);
    let gpu = format!("{KIND}/gpu={}", uuid(0));
    assert_eq!(
        answer(&node.kubelet, GPU, &uuid(0)),
        format!("{gpu}\n{KIND}/gds=all")
    );
    let spec: serde_json::Value =
        serde_json::from_slice(&fs::read(file(&cdi, "gds")).unwrap()).unwrap();
    assert_eq!(
        (&spec["kind"], &spec["devices"][0]["name"]),
        (&format!("{KIND}/gds").into(), &"all".into())
    );
    let edits = &spec["devices"][0]["containerEdits"];
    assert_eq!(edits["deviceNodes"][0]["path"], "/dev/nvidia-fs0");
    assert!(!file(&cdi, "gdrcopy").exists());
    // The plugin also searches for lost files each second.
    for _ in 0..5 {
        fs::remove_file(file(&cdi, "gds")).unwrap();
        assert!(answer(&node.kubelet, GPU, &uuid(0)).ends_with("/gds=all"));
        assert!(file(&cdi, "gds").exists());
    }
    // The modules are loaded and unloaded.
    let inode =
        |class| std::os::unix::fs::MetadataExt::ino(&fs::metadata(file(&cdi, class)).unwrap());
    let before = inode("gds");
    add_node(&node.fake, "gdrdrv");
    node.until("GDRCopy", POLLED, || {
        answer(&node.kubelet, GPU, &uuid(0)).contains("/gdrcopy=all")
    });
    assert_eq!(
        answer(&node.kubelet, GPU, &uuid(0)),
        format!("{gpu}\n{KIND}/gds=all\n{KIND}/gdrcopy=all")
    );
    assert_eq!(inode("gds"), before, "a spec that is current stays");
    fs::remove_file(node.fake.root.join("dev/nvidia-fs0")).unwrap();
    node.until("without GPUDirect Storage", POLLED, || {
        !file(&cdi, "gds").exists()
    });
    node.until("without its name", SOON, || {
        !answer(&node.kubelet, GPU, &uuid(0)).contains("gds")
    });
    node.signal("USR1");
    node.until("no specs without a driver", SOON, || {
        fs::read_dir(&cdi).unwrap().next().is_none()
    });
}

fn variables_nodes_and_mounts() {
    let nodes = ["nvidia-fs0", "nvidia-fs1", "infiniband/uverbs0"];
    let node = Node::start_on(host(&nodes), &["--extra-devices=gds,mofed"]);
    node.wait("the list", SOON, GPU, 1, 1);
    let answer = node
        .kubelet
        .allocate(GPU, &[&[uuid(0)]])
        .unwrap()
        .container_responses
        .remove(0);
    for variable in ["NVIDIA_GDS", "NVIDIA_MOFED"] {
        assert_eq!(answer.envs[variable], "enabled");
    }
    assert!(!answer.envs.contains_key("NVIDIA_GDRCOPY"), "{answer:?}");
    for name in nodes {
        let path = format!("/dev/{name}");
        let host = node.fake.root.join("dev").join(name).display().to_string();
        let spec = answer
            .devices
            .iter()
            .find(|spec| spec.container_path == path)
            .unwrap();
        assert_eq!(
            (spec.host_path.as_str(), spec.permissions.as_str()),
            (host.as_str(), "rw")
        );
    }
}

fn missing_and_denied_devices_are_named() {
    let fake = host(&["gdrdrv"]);
    configure(
        &fake,
        "[devices]\ndeny = [\"gdrcopy\"]\n[kubelet-plugin]\nextra-devices = [\"mofed\", \"gdrcopy\"]",
    );
    let missing = "ONH-233 warning: extra-devices contains \"mofed\" (GPUDirect RDMA), but \"/dev/infiniband/uverbs*\" is missing";
    let denied = "ONH-604 warning: extra-devices contains \"gdrcopy\" (GDRCopy), which deny in [devices] of config.toml withholds";
    let (code, report, _) = check(&fake, &["--device-list-strategy=envvar"]);
    assert_eq!(code, Some(1), "{report}");
    for text in [
        missing,
        denied,
        "hint: load the kernel module on the host: \"modprobe ib_uverbs\"",
    ] {
        assert!(report.contains(text), "{report}");
    }
    let node = Node::start_on(fake, &[]);
    node.wait("the list", SOON, GPU, 1, 1);
    assert_eq!(
        answer(&node.kubelet, GPU, &uuid(0)),
        format!("NVIDIA_VISIBLE_DEVICES={}\nnodes", uuid(0))
    );
    assert_eq!(node.log().matches("(ONH-233)").count(), 1, "{}", node.log());
    assert_eq!(node.log().matches("(ONH-604)").count(), 1, "{}", node.log());
    // The limits are followed.
    configure(
        &node.fake,
        "[kubelet-plugin]\nextra-devices = [\"mofed\", \"gdrcopy\"]",
    );
    node.until("a feature that is permitted", POLLED, || {
        answer(&node.kubelet, GPU, &uuid(0)).contains("NVIDIA_GDRCOPY=enabled")
    });
    assert!(
        node.log()
            .contains("config.toml has changed, and has these limits: allow = [], deny = []"),
        "{}",
        node.log()
    );
    configure(
        &node.fake,
        "[devices]\ndeny = [\"gdrcopy\"]\n[kubelet-plugin]\nextra-devices = [\"gdrcopy\"]",
    );
    node.until("a feature that is denied", POLLED, || {
        !answer(&node.kubelet, GPU, &uuid(0)).contains("GDRCOPY")
    });
    assert!(
        node.log()
            .contains("these limits: allow = [], deny = [\"gdrcopy\"]"),
        "{}",
        node.log()
    );
    let (code, _, errors) = check(&node.fake, &["--extra-devices=gds,GDS"]);
    assert_eq!(code, Some(2), "{errors}");
    assert!(
        errors.contains("a list of \"gds\", \"mofed\", \"gdrcopy\" and \"nvswitch\""),
        "{errors}"
    );
}
