//! The plugin follows `[devices]` in config.toml while it runs: lists, Allocate, the CDI spec and the labels.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use super::fake_host::{Fake, uuid};
use super::node_extras::{address, get, wait_for_labels};
use super::{GPU, Node, ROOT, SOON};

tests! {
    ROOT => changed_files_are_followed, replicas_and_mig_devices, all_gpus_are_denied, an_invalid_file_changes_nothing,
        ids_of_gke;
}

/// More than the plugin needs to read a changed file.
const FOLLOWED: Duration = Duration::from_secs(6);

/// A plugin with a CDI spec and labels.
struct Limited {
    node: Node,
    spec: PathBuf,
    labels: PathBuf,
}

impl Limited {
    fn start(fake: Fake, options: &[&str]) -> Self {
        let path = |name: &str| fake.dir.path().join(name);
        let (cdi, labels) = (path("cdi"), path("features.d"));
        [&cdi, &labels, &path("config.toml.d")]
            .into_iter()
            .for_each(|dir| fs::create_dir(dir).unwrap());
        let own = [
            "--cdi-dir",
            cdi.to_str().unwrap(),
            "--labels-dir",
            labels.to_str().unwrap(),
        ];
        let node = Node::start_on(fake, &[&own, options].concat());
        let spec = cdi.join("k8s.device-plugin.nvidia.com-gpu.json");
        Self {
            node,
            spec,
            labels: labels.join("oci-nvidia-kubelet-plugin"),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.node.fake.dir.path().join(name)
    }

    /// Writes config.toml in place, with the driver root.
    fn configure(&self, keys: &str) {
        let text = format!(
            "[nvidia-container-cli]\nroot = {:?}\n{keys}\n",
            self.node.fake.root
        );
        fs::write(&self.node.fake.config, text).unwrap();
    }

    /// Writes a drop-in file with limits, and moves it to its place.
    fn drop_in(&self, limits: &str) {
        fs::write(self.path("new"), format!("[devices]\n{limits}\n")).unwrap();
        fs::rename(self.path("new"), self.path("config.toml.d/50.toml")).unwrap();
    }

    /// Waits for these devices, and checks everything else that depends on the limits.
    #[track_caller]
    fn expect(&self, what: &str, gpus: &[u32]) {
        let ids: BTreeSet<String> = gpus.iter().map(|gpu| uuid(*gpu)).collect();
        self.node.kubelet.wait(what, SOON, |state| {
            let known = state.resources.get(GPU);
            known.is_some_and(|resource| {
                resource.devices.keys().eq(&ids) && resource.devices.values().all(|is| *is)
            })
        });
        // The spec has a device before the kubelet knows of it.
        assert_eq!(self.devices_of_spec(), ids, "{what}");
        for gpu in 0..3 {
            let answer = self.node.kubelet.allocate(GPU, &[&[uuid(gpu)]]);
            match answer {
                Ok(_) => assert!(gpus.contains(&gpu), "{what}: {gpu}"),
                Err(refusal) => {
                    let expected = format!(
                        "config.toml does not allow containers to use {} (ONH-032); hint: ",
                        uuid(gpu)
                    );
                    assert!(
                        !gpus.contains(&gpu) && refusal.message().starts_with(&expected),
                        "{what}: {refusal}"
                    );
                }
            }
        }
        wait_for_labels(
            &self.labels,
            &[&format!("nvidia.com/gpu.count={}", gpus.len())],
            "-",
        );
    }

    /// The devices of the CDI spec by UUID.
    fn devices_of_spec(&self) -> BTreeSet<String> {
        let spec: serde_json::Value =
            serde_json::from_slice(&fs::read(&self.spec).unwrap()).unwrap();
        let names = spec["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|device| device["name"].as_str().unwrap().to_owned());
        names
            .filter(|name| name.starts_with("GPU-") || name.starts_with("MIG-"))
            .collect()
    }

    /// Waits for this line of the log, and checks that these GPUs remain offered, and that the line is not repeated.
    #[track_caller]
    fn stays(&self, what: &str, gpus: &[u32], line: &str) {
        self.node
            .until(what, SOON, || self.node.log().contains(line));
        std::thread::sleep(FOLLOWED);
        self.expect(what, gpus);
        let log = self.node.log();
        assert!(
            line.is_empty() || log.matches(line).count() == 1,
            "{what}: {log}"
        );
    }
}

fn changed_files_are_followed() {
    let limited = Limited::start(Fake::new(&["--gpus", "3"]), &[]);
    limited.expect("no limits", &[0, 1, 2]);
    limited.drop_in("deny = [\"1\"]");
    limited.expect("an added drop-in file", &[0, 2]);
    limited.drop_in(&format!("allow = [{:?}]", uuid(1)));
    limited.expect("a changed drop-in file", &[1]);
    fs::remove_file(limited.path("config.toml.d/50.toml")).unwrap();
    limited.expect("a removed drop-in file", &[0, 1, 2]);
    limited.configure("[devices]\ndeny = [\"0\", \"7\"]");
    limited.expect("a changed file", &[1, 2]);
    limited.configure("");
    limited.expect("a changed file without limits", &[0, 1, 2]);
    let log = limited.node.log();
    assert!(
        log.contains("config.toml has changed, and has these limits: allow = [], deny = [\"1\"]\n"),
        "{log}"
    );
    assert_eq!(log.matches("config.toml has changed").count(), 5, "{log}");
    assert_eq!(
        log.matches("\"7\", which matches no GPU of this host (ONH-107)")
            .count(),
        1,
        "{log}"
    );
}

fn replicas_and_mig_devices() {
    let fake = Fake::new(&["--gpus", "2"]);
    let layout = fake.dir.path().join("layout");
    let line = |gi: u32| format!("mig gpu=1 gi={gi} ci=0 profile=1g.10gb uuid=MIG-{gi}\n");
    fs::write(&layout, format!("{}{}", line(1), line(2))).unwrap();
    fake.make_root(&["--mig-layout", layout.to_str().unwrap()]);
    let limited = Limited::start(fake, &["--replicas", "3"]);
    let (node, mig) = (&limited.node, "nvidia.com/mig-1g.10gb");
    let count = |name: &str, count: u32| {
        wait_for_labels(
            &limited.labels,
            &[&format!("nvidia.com/{name}.count={count}")],
            "-",
        );
    };
    let refusal = |resource: &str, id: &str| {
        let ids = [id.to_owned()];
        node.kubelet
            .allocate(resource, &[&ids])
            .unwrap_err()
            .message()
            .to_owned()
    };
    node.wait("all MIG devices", SOON, mig, 6, 6);
    node.wait("all GPUs", SOON, GPU, 3, 3);

    limited.drop_in("deny = [\"1:1\"]");
    node.wait("one MIG device", SOON, mig, 3, 3);
    assert_eq!(
        limited.devices_of_spec(),
        [uuid(0), "MIG-1".to_owned()].into()
    );
    assert!(
        refusal(mig, "MIG-2::1").contains("use MIG-2::1 (ONH-032)"),
        "{}",
        refusal(mig, "MIG-2::1")
    );
    assert!(
        refusal(mig, "MIG-9::1").contains("does not exist (ONH-071)"),
        "{}",
        refusal(mig, "MIG-9::1")
    );
    count("mig-1g.10gb", 1);

    limited.drop_in("deny = [\"0\"]");
    node.wait("both MIG devices", SOON, mig, 6, 6);
    // A resource without devices ends, as after a change of the MIG layout.
    node.kubelet.wait("no GPU", SOON, |state| {
        state.allocatable(GPU) == 0 && !state.is_registered(GPU)
    });
    assert_eq!(
        limited.devices_of_spec(),
        ["MIG-1", "MIG-2"].map(str::to_owned).into()
    );
    node.kubelet
        .allocate(mig, &[&["MIG-2::1".to_owned()]])
        .unwrap();
    count("mig-1g.10gb", 2);

    fs::remove_file(limited.path("config.toml.d/50.toml")).unwrap();
    node.wait("all GPUs again", SOON, GPU, 3, 3);
    node.kubelet
        .allocate(GPU, &[&[format!("{}::2", uuid(0))]])
        .unwrap();
    count("gpu", 2);
}

fn all_gpus_are_denied() {
    let limited = Limited::start(Fake::new(&["--gpus", "2"]), &[]);
    let node = &limited.node;
    node.wait("the list", SOON, GPU, 2, 2);
    limited.drop_in("deny = [\"GPU-*\"]");
    node.kubelet.wait("no GPU", SOON, |state| {
        state.allocatable(GPU) == 0 && !state.is_registered(GPU)
    });
    assert!(
        !limited.spec.exists(),
        "engines reject a spec without devices"
    );
    node.until("no labels", SOON, || !limited.labels.exists());
    limited.drop_in("deny = []");
    node.wait("the list again", SOON, GPU, 2, 2);
    assert_eq!(limited.devices_of_spec(), [uuid(0), uuid(1)].into());
    wait_for_labels(&limited.labels, &["nvidia.com/gpu.count=2"], "-");
}

fn an_invalid_file_changes_nothing() {
    let limited = Limited::start(
        Fake::new(&["--gpus", "3"]),
        &["--metrics-address", "127.0.0.1:0"],
    );
    limited.expect("no limits", &[0, 1, 2]);
    limited.configure("[devices]\ndeny = [\"1\"]");
    limited.expect("limits", &[0, 2]);
    limited.configure("[devices]\ndeny = [");
    let error =
        "cannot follow a change of config.toml, and the lists of [devices] remain in force: ";
    limited.stays("an invalid file", &[0, 2], error);
    let log = limited.node.log();
    assert!(
        log.contains("config.toml\" line 4: ")
            && log.contains("(ONH-005)\n")
            && log.contains("hint: "),
        "{log}"
    );
    assert!(get(address(&limited.node), "/healthz").ends_with("\r\n\r\nok\n"));
    limited.drop_in("deny = [\"2\"]");
    limited.stays("the file is still invalid", &[0, 2], error);
    limited.configure("[devices]\ndeny = [\"1\"]");
    let again =
        "config.toml has changed, and has these limits: allow = [], deny = [\"1\", \"2\"]\n";
    limited.stays("both files", &[0], again);
}

/// With GKE's layout there is no hook that would apply the limits to the container.
fn ids_of_gke() {
    let options = [
        "--device-list-strategy=host-path",
        "--device-id-strategy=index",
        "--gpu-config=/nowhere",
        "--host-path=/usr",
    ];
    let limited = Limited::start(Fake::new(&["--gpus", "2"]), &options);
    let node = &limited.node;
    node.wait("the list", SOON, GPU, 2, 2);
    limited.drop_in("deny = [\"1\"]");
    node.wait("one GPU", SOON, GPU, 1, 1);
    assert!(
        node.refusal("nvidia1").contains("use nvidia1 (ONH-032)"),
        "{}",
        node.refusal("nvidia1")
    );
    assert!(
        node.refusal("nvidia2").contains("(ONH-071)"),
        "{}",
        node.refusal("nvidia2")
    );
    node.kubelet
        .allocate(GPU, &[&["nvidia0".to_owned()]])
        .unwrap();
}
