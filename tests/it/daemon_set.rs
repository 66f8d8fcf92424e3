//! The device plugin in a real container, with the restrictions and the volumes of the DaemonSet in deploy/kubernetes, and of the one that
//! NVIDIA's Helm chart renders.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use nvidia_host::mps;
use serde_json::Value;

use crate::built;
use crate::cdi::GPU_0;
use crate::driver::{FakeDriver, Image};
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::support::{Need, assert_says, read, sh, source, write_file};

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Cargo,
    Need::Programs(&["cc", "podman", "runc", "ldd", "mkfifo"]),
];

tests! {
    NEEDS => the_plugin_works_in_its_container, the_plugin_sees_the_mps_daemons_of_the_node, the_plugin_works_in_nvidias_chart;
    engine::NEEDS => the_plugin_gets_the_gpus_of_a_locked_node;
}

/// Returns the pod of the DaemonSet.
fn pod() -> Value {
    let text = read(source("deploy/kubernetes/base/daemon-set.yaml"));
    cdi_spec::yaml::parse(&text).unwrap()["spec"]["template"]["spec"].clone()
}

/// Returns the pod of the DaemonSet with the changes of an overlay.
fn pod_of_overlay(name: &str) -> Value {
    let mut pod = pod();
    let text = read(source(&format!(
        "deploy/kubernetes/overlays/{name}/kustomization.yaml"
    )));
    let overlay = cdi_spec::yaml::parse(&text).unwrap();
    let patch = cdi_spec::yaml::parse(overlay["patches"][0]["patch"].as_str().unwrap()).unwrap();
    for change in patch.as_array().unwrap() {
        let path = change["path"]
            .as_str()
            .unwrap()
            .strip_prefix("/spec/template/spec")
            .unwrap();
        let (parent, field) = path.rsplit_once('/').unwrap();
        let parent = pod.pointer_mut(parent).unwrap();
        match field {
            "-" => parent.as_array_mut().unwrap().push(change["value"].clone()),
            field => parent[field] = change["value"].clone(),
        }
    }
    pod
}

/// Returns Podman's options for a volume: a directory below `node` takes the place of one of the node.
fn volume(pod: &Value, mount: &Value, node: &Path) -> String {
    let volumes = pod["volumes"].as_array().unwrap();
    let volume = volumes
        .iter()
        .find(|volume| volume["name"] == mount["name"])
        .unwrap();
    let path = mount["mountPath"].as_str().unwrap();
    let Some(host) = volume["hostPath"]["path"].as_str() else {
        assert_eq!(volume["emptyDir"]["medium"], "Memory", "{volume}");
        return format!("--tmpfs {path}");
    };
    let is_dir = volume["hostPath"]["type"] != "CharDevice";
    let host = if is_dir {
        node.join(&host[1..])
    } else {
        host.into()
    };
    if is_dir {
        fs::create_dir_all(&host).unwrap();
    }
    format!(
        "-v '{}:{path}:{}'",
        host.display(),
        if mount["readOnly"] == true {
            "ro"
        } else {
            "rw"
        }
    )
}

/// Returns Podman's options for the container of the pod.
fn options(pod: &Value, node: &Path) -> Vec<String> {
    let container = &pod["containers"][0];
    let security = container["securityContext"].as_object().unwrap();
    let mut options = Vec::new();
    for (name, value) in security {
        options.push(match (name.as_str(), value.to_string().as_str()) {
            ("allowPrivilegeEscalation", "false") => "--security-opt=no-new-privileges".to_owned(),
            ("readOnlyRootFilesystem", "true") => "--read-only --read-only-tmpfs=false".to_owned(),
            ("capabilities", r#"{"drop":["ALL"]}"#) => "--cap-drop=all".to_owned(),
            // Podman's default
            ("seccompProfile", r#"{"type":"RuntimeDefault"}"#) => String::new(),
            (name, value) => panic!("{name}: {value}"),
        });
    }
    let mounts = container["volumeMounts"].as_array().unwrap();
    options.extend(mounts.iter().map(|mount| volume(pod, mount, node)));
    // The kubelet sets this variable in each pod.
    options.push("-e KUBERNETES_SERVICE_HOST=10.96.0.1".to_owned());
    for variable in container["env"].as_array().unwrap() {
        // Others come from a field of the pod.
        if let Some(value) = variable["value"].as_str() {
            let name = variable["name"].as_str().unwrap();
            options.push(format!("-e '{name}={value}'"));
        }
    }
    options
}

/// Returns the program of a container and its arguments.
fn command(container: &Value) -> String {
    let list = |key: &str| container[key].as_array().cloned().unwrap_or_default();
    let mut words = list("command");
    if words.is_empty() {
        // The entry point of the image
        words.push("oci-nvidia-kubelet-plugin".into());
    }
    words.extend(list("args"));
    let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
    words.join(" ")
}

/// Copies a program and the libraries that it needs to an image.
fn install(program: &Path, rootfs: &Path) {
    let script = format!(
        "cd '{rootfs}'; cp '{program}' usr/bin; \
         for library in $(ldd '{program}' | grep -o ' /[^ ]*'); do \
             [ -e .$library ] || {{ mkdir -p .$(dirname $library); cp -L $library .$library; }}; \
         done",
        rootfs = rootfs.display(),
        program = program.display()
    );
    sh(&script).ok();
}

/// Runs the plugin in the container of a pod, next to a fake kubelet that allocates a GPU. Returns what the kubelet and the plugin printed.
fn run(pod: &Value) -> String {
    run_on(pod, "", |_| ())
}

/// Runs the plugin as [`run`] does, on a node whose directories `prepare` has changed. Its result exists as long as the plugin runs.
fn run_on<T>(pod: &Value, settings: &str, prepare: impl FnOnce(&Path) -> T) -> String {
    let (programs, podman, fake) = (
        built::programs(),
        Podman::new(),
        FakeDriver::new(&["--gpus", "2"]),
    );
    let dir = podman.dir.path();
    let image = Image::new(&dir.join("plugin"), &["--layout", "debian"]);
    for program in ["oci-nvidia-kubelet-plugin", "oci-nvidia-nvml"] {
        install(&programs.join(program), &image.rootfs);
    }
    // As in packaging/Containerfile
    let nvidias_name = image.rootfs.join("usr/bin/nvidia-device-plugin");
    symlink("oci-nvidia-kubelet-plugin", nvidias_name).unwrap();
    // On a node, the hook adds the driver to the container. The fake one has its own /proc/driver/nvidia, below another root
    // directory, and to change to that takes CAP_SYS_CHROOT.
    let config = image.rootfs.join("etc/nvidia-container-runtime");
    fs::create_dir_all(&config).unwrap();
    write_file(
        config.join("config.toml"),
        format!("[nvidia-container-cli]\nroot = \"/driver\"\n{settings}"),
    );
    fs::create_dir(image.rootfs.join("driver")).unwrap();
    let driver = format!(
        "--cap-add=SYS_CHROOT -v '{}:/driver:ro,dev' --device-cgroup-rule='c 195:* rw' --device-cgroup-rule='c 511:* rw'",
        fake.root.display()
    );
    let node = dir.join("node");
    let options = options(pod, &node).join(" ");
    let _prepared = prepare(&node);
    for mount in pod["containers"][0]["volumeMounts"].as_array().unwrap() {
        let path = mount["mountPath"].as_str().unwrap();
        fs::create_dir_all(image.rootfs.join(&path[1..])).unwrap();
    }
    podman.import(&image.rootfs, "localhost/plugin");
    let until = |pattern: &str, what: &str| {
        format!(
            "for i in $(seq 300); do ! grep -q '{pattern}' {what} || break; sleep 0.1; done\n\
             grep '{pattern}' {what} || {{ cat kubelet log; exit 1; }}\n"
        )
    };
    let script = format!(
        "cd '{node}'; mkfifo in; trap '\"$@\" rm -f -t 0 plugin >/dev/null 2>&1 || true; kill $kubelet' EXIT\n\
         '{programs}/examples/fake-kubelet' '{node}/var/lib/kubelet' <>in >kubelet 2>&1 & kubelet=$!\n\
         {started}\
         \"$@\" run --rm --replace --name plugin --network=none {options} {driver} localhost/plugin \
                 {command} >log 2>&1 & podman=$!\n\
         {healthy}\
         echo allocate nvidia.com/gpu {GPU_0} >in\n\
         {allocated}\
         cat etc/kubernetes/node-feature-discovery/features.d/* 2>/dev/null || true\n\
         \"$@\" stop -t 10 plugin >/dev/null\n\
         wait $podman; echo \"exit status $?\"; cat log",
        node = node.display(),
        programs = programs.display(),
        started = "for i in $(seq 300); do [ ! -S var/lib/kubelet/device-plugins/kubelet.sock ] || break; sleep 0.1; done\n",
        healthy = until("list nvidia.com/gpu .*=Healthy .*=Healthy", "kubelet"),
        allocated = until("allocated .*NVIDIA_VISIBLE_DEVICES", "kubelet"),
        command = command(&pod["containers"][0]),
    );
    podman.shell(Cgroup::AsMounted, &script).ok()
}

/// Checks what is the same in all pods.
fn check(text: &str) {
    for says in [
        &format!("\"NVIDIA_VISIBLE_DEVICES\": \"{GPU_0}\""),
        "\nexit status 0\n",
        "the node has 2 GPUs and driver 535.183.01",
        "registered \"nvidia.com/gpu\" with the kubelet",
    ] {
        assert!(text.contains(says), "{says}: {text}");
    }
    assert!(!text.contains("is unhealthy"), "{text}");
}

fn the_plugin_works_in_its_container() {
    let text = run(&pod());
    check(&text);
    for says in ["\nnvidia.com/gpu.count=2\n", "serving metrics at http://"] {
        assert!(text.contains(says), "{says}: {text}");
    }
}

/// The pod has no capabilities, and sees the directory of the daemons read-only.
fn the_plugin_sees_the_mps_daemons_of_the_node() {
    let text = run_on(&pod(), "[sharing]\nmps-gpus = [\"0\"]\n", |node| {
        let below = mps::directory_of(GPU_0);
        let directory = node.join(below.strip_prefix("/").unwrap());
        fs::create_dir_all(directory.join(mps::PIPE)).unwrap();
        let state = fs::File::create(directory.join(mps::STATE)).unwrap();
        mps::lock(&state).unwrap();
        let ready = mps::State::new(GPU_0, mps::Phase::Ready);
        serde_json::to_writer(&state, &ready).unwrap();
        state
    });
    check(&text);
    for says in [
        "\"CUDA_MPS_PIPE_DIRECTORY\": \"/tmp/nvidia-mps\"",
        &format!("/run/oci-nvidia-mps/{GPU_0}/pipe"),
    ] {
        assert!(text.contains(says), "{says}: {text}");
    }
}

/// Only the image is another one. The pod does not show the engine of the node, and the chart mounts the directory of CDI specs.
fn the_plugin_works_in_nvidias_chart() {
    let text = read(source("tests/fixtures/nvidia-chart/pod.yaml"));
    let mut pod = cdi_spec::yaml::parse(&text).unwrap();
    let text = run(&pod);
    check(&text);
    assert_says(
        &text,
        &["containers get their devices with envvar (the pod does not see"],
    );
    // No finding: each variable of the chart has an effect, or needs none.
    assert!(!text.contains("(ONH-"), "{text}");
    let mounts = pod["containers"][0]["volumeMounts"].as_array_mut().unwrap();
    mounts.retain(|mount| mount["name"] != "cdi-root");
    let text = run(&pod);
    check(&text);
    let missing = "\"/var/run/cdi\" is not a directory of the node; mount it into the pod with a hostPath volume";
    assert!(text.contains(missing), "{text}");
}

/// The overlay requests the GPUs with a mount, which needs no privileges. The variable of the plugin's image has no effect.
fn the_plugin_gets_the_gpus_of_a_locked_node() {
    let (podman, fake) = (Podman::with_image(), FakeDriver::new(&["--gpus", "2"]));
    let drop_ins = fake.config.with_file_name("config.toml.d");
    fs::create_dir_all(&drop_ins).unwrap();
    fs::copy(
        source("deploy/kubernetes/overlays/locked/50-locked.toml"),
        drop_ins.join("50-locked.toml"),
    )
    .unwrap();
    podman.install_hook(&fake.config);
    let node = podman.dir.path().join("node");
    for (pod, gpus) in [(pod(), 0), (pod_of_overlay("locked"), 2)] {
        let options = options(&pod, &node).join(" ");
        let text = podman.shell(
            Cgroup::AsMounted,
            &format!(
                "\"$@\" run --rm --network=none {options} -e NVIDIA_VISIBLE_DEVICES=all -e NVIDIA_DRIVER_CAPABILITIES=utility {IMAGE} \
                 sh -c 'nvidia-smi -L || true; grep CapBnd /proc/self/status'"
            ),
        );
        let text = text.ok();
        assert_eq!(
            text.matches("UUID: GPU-").count(),
            gpus,
            "{options}: {text}"
        );
        assert!(
            text.contains("CapBnd:\t0000000000000000"),
            "{options}: {text}"
        );
    }
}
