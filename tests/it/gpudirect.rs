//! GPUDirect Storage, GPUDirect RDMA, GDRCopy and NVSwitches: devices next to the GPUs, which a container requests with a variable each.

use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use cdi_spec::registry;

use crate::cdi::{cdi, check_specs, create_spec, write_spec};
use crate::cdi_containers::only_spec;
use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::json_schema::fields;
use crate::support::{assert_lacks, assert_says, read, scratch, shell, write_file};

tests! {
    NEEDS => specs_of_other_devices, one_class, a_spec_follows_the_host, each_variable_gives_its_devices, a_missing_module_is_named, denied_features_are_refused,
        files_of_another_place, no_directory_leads_to_a_program, a_socket_in_a_given_directory, the_edited_config_lists_them, status_shows_them;
    engine::NEEDS => podman_gives_them_by_variable, podman_gives_them_by_name;
}

const GPU: &str = "NVIDIA_VISIBLE_DEVICES=0";

/// Adds the nodes to a driver root, with numbers that no driver of this machine has.
const NODES: &str = "mkdir -p dev/infiniband run/udev etc; \
    node() { mknod -m 666 dev/$1 c $2 $3; }; \
    node nvidia-fs 508 0; node nvidia-fs0 508 1; node nvidia-fs10 508 11; node nvidia-fs2 508 3; \
    node infiniband/uverbs0 231 192; node infiniband/rdma_cm 507 58; node infiniband/issm0 231 64; \
    node gdrdrv 506 0; node nvidia-nvswitchctl 505 255; node nvidia-nvswitch0 505 0; \
    echo not-a-node >dev/nvidia-fs.conf; echo '{}' >etc/cufile.json; mkdir -p run/udev/data; echo host >run/udev/data/x";

/// A host with all of them.
pub fn host() -> FakeDriver {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    shell!("cd '{}'; {NODES}", fake.root.display());
    fake
}

/// The variables, and the nodes that NVIDIA's stack gives for each of them.
const FEATURES: [(&str, &str); 4] = [
    ("NVIDIA_GDS", "nvidia-fs nvidia-fs0 nvidia-fs10 nvidia-fs2"),
    ("NVIDIA_MOFED", "infiniband/rdma_cm infiniband/uverbs0"),
    ("NVIDIA_GDRCOPY", "gdrdrv"),
    ("NVIDIA_NVSWITCH", "nvidia-nvswitch0 nvidia-nvswitchctl"),
];

/// Lists the nodes of a container that do not belong to its GPU.
const LIST: &str = "cd /dev; for name in nvidia-fs* infiniband/* gdrdrv nvidia-nvswitch*; do if [ -e $name ]; then echo $name; fi; done";

fn each_variable_gives_its_devices() {
    let fake = host();
    for (variable, nodes) in FEATURES {
        let enabled = format!("{variable}=enabled");
        let container = Waiting::debian(&[GPU, &enabled], "");
        let ran = container.hook(&fake.config);
        assert!(!ran.stderr.contains("ONH-"), "{ran:?}");
        ran.ok();
        let listed = container.output(LIST);
        assert_eq!(
            listed.split_whitespace().collect::<Vec<_>>().join(" "),
            nodes,
            "{variable}"
        );
        let files =
            container.exec("cat /etc/cufile.json /run/udev/data/x; echo x >/run/udev/data/y; :");
        let (text, refused) = (files.stdout, files.stderr.contains("Read-only file system"));
        assert_eq!(
            (text == "{}\nhost\n", refused),
            (variable == "NVIDIA_GDS", variable == "NVIDIA_GDS"),
            "{variable}"
        );
    }
    let container = Waiting::debian(&[GPU, "NVIDIA_GDS=1"], "");
    let ran = container.hook(&fake.config);
    assert_says(
        &ran.stderr,
        &["NVIDIA_GDS=\"1\" has no effect", "(ONH-115)"],
    );
    ran.ok();
    assert_eq!(container.exec(LIST).stdout, "");
}

/// Returns the output of `plan --json` for a container with these variables.
/// The container starts without the devices, as with NVIDIA's stack.
fn a_missing_module_is_named() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    for ((variable, _), module) in
        FEATURES
            .iter()
            .zip(["nvidia_fs", "ib_uverbs", "gdrdrv", "nvidia-fabricmanager"])
    {
        let enabled = format!("{variable}=enabled");
        let shown = fake.plan(&[GPU, &enabled]);
        assert_eq!(shown["outcome"], "inject", "{shown}");
        let finding = &shown["findings"][0];
        assert_eq!(finding["id"], "ONH-233", "{shown}");
        assert!(
            finding["fix"].as_str().unwrap().contains(module),
            "{finding}"
        );
        let name = variable.trim_start_matches("NVIDIA_").to_lowercase();
        assert_eq!(shown["request"]["features"], json!([name]));
    }
    let shown = fake.plan(&[GPU]);
    assert!(
        shown["findings"] == json!([]) && shown["request"].get("features").is_none(),
        "{shown}"
    );
}

fn denied_features_are_refused() {
    let fake = host();
    fake.configure("[devices]\ndeny = [\"gdrcopy\"]");
    let env = [GPU, "NVIDIA_GDRCOPY=enabled"];
    let container = Waiting::debian(&env, "");
    let stderr = container.hook(&fake.config).failed(1);
    assert_says(&stderr, &["the devices of GDRCopy", "(ONH-032)"]);
    assert_eq!(
        container.exec("ls /dev").stdout.matches("nvidia").count(),
        0
    );
    assert_eq!(fake.plan(&env)["outcome"], "error");
    assert_eq!(fake.plan(&[GPU, "NVIDIA_GDS=enabled"])["outcome"], "inject");
}

/// Links lead to files below the driver root, and users of the host cannot choose what containers see.
fn files_of_another_place() {
    let fake = host();
    let etc = fake.root.join("etc");
    std::fs::create_dir(etc.join("alternatives")).unwrap();
    std::fs::rename(etc.join("cufile.json"), etc.join("alternatives/cufile")).unwrap();
    symlink("/etc/alternatives/cufile", etc.join("cufile.json")).unwrap();
    let env = [GPU, "NVIDIA_GDS=enabled"];
    let container = Waiting::debian(&env, "");
    container.hook(&fake.config).ok();
    assert_eq!(container.output("cat /etc/cufile.json"), "{}\n");
    for change in ["ln -sfn /etc etc/cufile.json", "chown 65534 run/udev"] {
        shell!("cd '{}'; {change}", fake.root.display());
    }
    let container = Waiting::debian(&env, "");
    let ran = container.hook(&fake.config);
    assert_says(
        &ran.stderr,
        &["\"/run/udev/data\" is not given to containers: \"/run/udev\" belongs to user 65534"],
    );
    ran.ok();
    assert_eq!(
        container.exec("ls /etc/cufile.json /run/udev/data").stdout,
        ""
    );
    assert!(
        container.output(LIST).contains("nvidia-fs0"),
        "the nodes do not depend on the files"
    );
}

/// The variables of all features.
const ALL_FEATURES: [&str; 5] = [
    GPU,
    "NVIDIA_GDS=enabled",
    "NVIDIA_MOFED=enabled",
    "NVIDIA_GDRCOPY=enabled",
    "NVIDIA_NVSWITCH=enabled",
];

/// Adds to `found` the sockets below a directory that accept a connection, the FIFOs and the device nodes.
fn search_for_programs(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let kind = std::fs::symlink_metadata(&path).unwrap().file_type();
        if kind.is_dir() {
            search_for_programs(&path, found);
        } else if kind.is_socket() && UnixStream::connect(&path).is_err() {
            panic!("nothing listens at {path:?}: the test cannot show that it is reachable");
        } else if kind.is_socket() || kind.is_fifo() || kind.is_char_device() {
            found.push(path);
        }
    }
}

/// Searches the directories among these paths.
fn programs_below(paths: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in paths {
        if std::fs::metadata(&path).unwrap().is_dir() {
            search_for_programs(&path, &mut found);
        }
    }
    found
}

/// The control socket of udevd obeys uid 0 of any container, and a read-only mount does not prevent a connection.
fn no_directory_leads_to_a_program() {
    let fake = host();
    let control = fake.root.join("run/udev/control");
    let _listening = UnixListener::bind(&control).unwrap();
    assert_eq!(programs_below([fake.root.join("run/udev")]), [control]);

    let (dir, image) = Image::debian();
    let container = Waiting::start(dir.path(), &image.rootfs, &ALL_FEATURES, "");
    container.hook(&fake.config).ok();
    let mountinfo = container.mountinfo();
    let points = mountinfo.lines().filter_map(|line| line.split(' ').nth(4));
    let [rootfs, own] = ["", "/dev"].map(|at| format!("{}{at}", image.rootfs.display()));
    let given = points.filter(|point| point.starts_with(&format!("{rootfs}/")) && **point != own);
    let namespace = format!("/proc/{}/root", container.pid());
    let mut given: Vec<_> = given.map(|at| format!("{namespace}{at}").into()).collect();
    assert!(
        given.iter().any(|at: &PathBuf| at.ends_with("udev/data")),
        "{given:?}"
    );
    assert_eq!(programs_below(given.drain(..)), Vec::<PathBuf>::new());

    let edited = edit_config(&fake, &image, &ALL_FEATURES);
    let mounts = edited["mounts"].as_array().unwrap().iter();
    let sources = mounts.map(|mount| PathBuf::from(mount["source"].as_str().unwrap()));
    assert_eq!(programs_below(sources), Vec::<PathBuf>::new());

    write_spec(&fake, &dir.path().join("nvidia.yaml"));
    let spec = registry::read_spec(&dir.path().join("nvidia-gds.yaml")).unwrap();
    let mounts = spec.devices[0].container_edits.mounts.iter();
    let sources = mounts.map(|mount| PathBuf::from(&mount.host_path));
    assert_eq!(programs_below(sources), Vec::<PathBuf>::new());
}

/// The directory is examined at each start, also if the engine mounts it.
fn a_socket_in_a_given_directory() {
    let fake = host();
    let (dir, image) = Image::debian();
    write_spec(&fake, &dir.path().join("nvidia.yaml"));
    let spec = registry::read_spec(&dir.path().join("nvidia-gds.yaml")).unwrap();
    let entry = &spec.devices[0].container_edits.hooks;
    let entry = entry
        .iter()
        .chain(&spec.container_edits.hooks)
        .next()
        .unwrap();
    let container = Waiting::start(dir.path(), &image.rootfs, &ALL_FEATURES, "");
    container.create_runtime_hook(&entry.args[1..]).ok();

    let socket = fake.root.join("run/udev/data/new");
    let _listening = UnixListener::bind(&socket).unwrap();
    let stderr = container.create_runtime_hook(&entry.args[1..]).failed(1);
    let why = "\"/run/udev/data\" is not given to containers: \"new\" in it is a socket, a FIFO or a device (ONH-218)";
    assert!(stderr.contains(why), "{stderr}");
    let ran = container.hook(&fake.config);
    assert!(ran.stderr.contains(why), "{ran:?}");
    ran.ok();
    assert_eq!(container.exec("ls /run/udev/data").stdout, "");
    let edited = edit_config(&fake, &image, &ALL_FEATURES).to_string();
    assert!(!edited.contains("/run/udev"), "{edited}");
    let said = cdi(&fake, &["generate", "--class=gds", "--output=-"]);
    assert_says(&said.stderr, &[why]);
    assert_lacks(&said.stdout, &["/run/udev"]);
}

/// Returns the edited config.json for a container with these variables.
fn edit_config(fake: &FakeDriver, image: &Image, env: &[&str]) -> Value {
    let spec = json!({
        "root": {"path": image.rootfs}, "process": {"env": env}, "mounts": [],
        "linux": {"resources": {"devices": [{"allow": false, "access": "rwm"}]}},
    });
    serde_json::from_str(&fake.edit_config(&spec.to_string()).ok()).unwrap()
}

fn the_edited_config_lists_them() {
    let fake = host();
    let (_dir, image) = Image::debian();
    let env = [GPU, "NVIDIA_GDS=enabled", "NVIDIA_MOFED=enabled"];
    let edited = edit_config(&fake, &image, &env);
    let (devices, mounts) = (
        &edited["linux"]["devices"],
        edited["mounts"].as_array().unwrap(),
    );
    let listed = fields(devices, "path");
    for node in [
        "/dev/nvidia-fs10",
        "/dev/infiniband/uverbs0",
        "/dev/infiniband/rdma_cm",
    ] {
        assert!(listed.contains(&node), "{listed:?}");
    }
    assert!(
        !listed
            .iter()
            .any(|path| path.contains("issm") || path.contains("conf")),
        "{listed:?}"
    );
    for path in ["/etc/cufile.json", "/run/udev/data"] {
        let mount = mounts
            .iter()
            .find(|mount| mount["destination"] == path)
            .unwrap();
        assert!(
            mount["options"].as_array().unwrap().contains(&json!("ro")),
            "{mount}"
        );
    }
    let rules = edited["linux"]["resources"]["devices"].as_array().unwrap();
    assert!(
        rules
            .iter()
            .any(|rule| rule["major"] == 231 && rule["minor"] == 192 && rule["allow"] == true),
        "{rules:?}"
    );
}

fn status_shows_them() {
    let fake = host();
    fake.configure("[devices]\ndeny = [\"gdrcopy\"]");
    let text = fake.run(&["status"]).stdout;
    let line = "GPUDirect Storage: 4 device nodes; containers get them with NVIDIA_GDS=enabled or the CDI device nvidia.com/gds=all";
    assert!(text.contains(line), "{text}");
    assert_says(
        &text,
        &["GDRCopy: 1 device node; [devices] in config.toml denies them to containers"],
    );
    let shown = crate::json_schema::checked("status", &fake.run(&["status", "--json"]).stdout);
    let devices = &shown["extra_devices"];
    assert_eq!(
        fields(devices, "name"),
        ["gds", "mofed", "gdrcopy", "nvswitch"]
    );
    assert_eq!(
        (&devices[2]["denied"], &devices[2]["nodes"]),
        (&json!(true), &json!(["/dev/gdrdrv"]))
    );
}

/// The device cgroup allows the devices of the request, and no others.
fn podman_gives_them_by_variable() {
    let podman = Podman::with_image();
    let fake = host();
    podman.install_hook(&fake.config);
    let script = "cd /tmp; mknod ours c 506 0; mknod other c 505 0; cat /etc/cufile.json; ls /run/udev/data; \
                  probe-open /dev/gdrdrv /dev/nvidia-fs10 ours other";
    let mut arguments = vec![
        "--cap-add=MKNOD",
        "-e",
        GPU,
        "-e",
        "NVIDIA_GDS=enabled",
        "-e",
        "NVIDIA_GDRCOPY=enabled",
    ];
    arguments.extend([IMAGE, "sh", "-euc", script]);
    let text = podman.run(Cgroup::AsMounted, &arguments).ok();
    for line in [
        "{}",
        "x",
        "/dev/gdrdrv: ENXIO",
        "/dev/nvidia-fs10: ENXIO",
        "ours: ENXIO",
        "other: EPERM",
    ] {
        assert!(
            text.lines().any(|found| found == line),
            "{line} is not in\n{text}"
        );
    }
}

/// Adds the nodes of two IMEX channels.
fn add_channels(fake: &FakeDriver) {
    let dir = "dev/nvidia-caps-imex-channels";
    shell!(
        "cd '{}'; mkdir {dir}; mknod {dir}/channel0 c 509 0; mknod {dir}/channel11 c 509 11",
        fake.root.display()
    );
}

/// The kinds and names come from NVIDIA's generator.
fn specs_of_other_devices() {
    let fake = host();
    add_channels(&fake);
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    let said = cdi(&fake, &["generate", "--output", path.to_str().unwrap()]);
    for (class, names, nodes, mounts) in [
        (
            "gds",
            &["all"][..],
            4,
            &["/etc/cufile.json", "/run/udev/data"][..],
        ),
        ("mofed", &["all"], 2, &[]),
        ("gdrcopy", &["all"], 1, &[]),
        ("nvswitch", &["all"], 2, &[]),
        ("imex-channel", &["0", "11", "all"], 2, &[]),
    ] {
        let path = dir.path().join(format!("nvidia-{class}.yaml"));
        assert_says(&said.stderr, &[&format!("nvidia.com/{class}={}", names[0])]);
        let spec = registry::read_spec(&path).unwrap();
        assert_eq!(spec.kind, format!("nvidia.com/{class}"));
        assert_eq!(
            spec.devices
                .iter()
                .map(|device| device.name.as_str())
                .collect::<Vec<_>>(),
            names
        );
        let all = &spec.devices.last().unwrap().container_edits;
        assert_eq!(all.device_nodes.len(), nodes, "{class}");
        assert_eq!(
            all.mounts
                .iter()
                .map(|mount| mount.container_path.as_str())
                .collect::<Vec<_>>(),
            mounts
        );
        assert!(
            all.mounts
                .iter()
                .all(|mount| mount.options.contains(&"ro".to_owned())),
            "{all:?}"
        );
        assert!(
            spec.container_edits.env.is_empty(),
            "the GPUs may come from the hook"
        );
    }
    let listed = cdi(&fake, &["list", "--spec-dir", dir.path().to_str().unwrap()]).ok();
    assert_says(
        &listed,
        &["nvidia.com/imex-channel=11\n", "nvidia.com/gds=all\n"],
    );
    let check = check_specs(&fake, dir.path());
    assert_eq!(check.code, Some(0), "{check:?}");
}

/// As the modes of NVIDIA's generator: only this spec, on stdout or in a file.
fn one_class() {
    let fake = host();
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    write_spec(&fake, &path);
    for class in ["gds", "mofed", "gdrcopy", "nvswitch"] {
        let printed = cdi(&fake, &["generate", "--class", class, "--output", "-"]).ok();
        let of_host = read(dir.path().join(format!("nvidia-{class}.yaml")));
        assert_eq!(printed, of_host, "{class}");
    }
    let file = dir.path().join("x.json");
    let said = cdi(
        &fake,
        &[
            "generate",
            "--class=gds",
            "--vendor=example.com",
            "--output",
            file.to_str().unwrap(),
        ],
    );
    assert_says(&said.stderr, &["x.json: example.com/gds=all\n"]);
    assert_eq!(
        registry::read_spec(&file).unwrap().devices[0]
            .container_edits
            .device_nodes
            .len(),
        4
    );
    fake.configure("[devices]\ndeny = [\"mofed\"]");
    for (arguments, code, text) in rows! {
        &["generate", "--class=imex-channel", "--output=-"][..], 1, "this host has no IMEX channel (ONH-051)";
        &["generate", "--class=mofed", "--output=-"], 1, "[devices] in config.toml denies \"mofed\" to containers";
        &["refresh", "--class=gds"], 2, "\"cdi refresh\" updates the spec of gds together with the spec of the GPUs";
    } {
        let stderr = cdi(&fake, arguments).failed(code);
        assert_says(&stderr, &[text, "\nhint: "]);
    }
    shell!("rm '{}'", fake.root.join("dev/gdrdrv").display());
    let stderr = cdi(&fake, &["generate", "--class=gdrcopy", "--output=-"]).failed(1);
    let expected = "this host has no devices of GDRCopy (ONH-051)\nhint: load the kernel module on the host: \"modprobe gdrdrv\"";
    assert!(stderr.contains(expected), "{stderr}");
}

/// A spec appears and disappears with its devices, and with [devices] in config.toml.
fn a_spec_follows_the_host() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    let refresh = || drop(create_spec(&fake, &path).ok());
    let files = || {
        let mut names: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names.join(" ")
    };
    refresh();
    assert_eq!(files(), "nvidia.yaml");
    shell!(
        "mknod -m 666 '{}' c 506 0",
        fake.root.join("dev/gdrdrv").display()
    );
    refresh();
    assert_eq!(files(), "nvidia-gdrcopy.yaml nvidia.yaml");
    let number = |path: &str| {
        registry::read_spec(&dir.path().join(path)).unwrap().devices[0]
            .container_edits
            .device_nodes[0]
            .major
    };
    assert_eq!(number("nvidia-gdrcopy.yaml"), Some(506));
    shell!(
        "cd '{}'; rm dev/gdrdrv; mknod -m 666 dev/gdrdrv c 504 0",
        fake.root.display()
    );
    refresh();
    assert_eq!(
        number("nvidia-gdrcopy.yaml"),
        Some(504),
        "the kernel assigns the number"
    );
    fake.configure("[devices]\ndeny = [\"gdrcopy\"]");
    let check = check_specs(&fake, dir.path());
    assert_says(
        &check.stdout,
        &["[devices] in config.toml denies \"gdrcopy\""],
    );
    refresh();
    assert_eq!(files(), "nvidia.yaml");
    fake.configure("");
    // The spec of another program stays, and ours is not written next to it.
    let other = dir.path().join("other.yaml");
    let spec = "cdiVersion: 0.5.0\nkind: nvidia.com/gdrcopy\ndevices:\n- name: all\n  containerEdits:\n    env: [A=b]\n";
    write_file(&other, spec);
    refresh();
    assert_eq!(files(), "nvidia.yaml other.yaml");
}

/// The GPU comes from CDI or from the hook, and the other devices from CDI. The hook entry stops a container with a denied device.
fn podman_gives_them_by_name() {
    let podman = Podman::with_image();
    let fake = host();
    add_channels(&fake);
    podman.install_hook(&fake.config);
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    write_spec(&fake, &path);
    let before = format!(
        "{}; cp '{}'/* /run/cdi/",
        only_spec(&path),
        dir.path().display()
    );
    let run = |arguments: &[&str]| {
        let script = "nvidia-smi -L; cat /etc/cufile.json; probe-open /dev/gdrdrv /dev/nvidia-fs10 \
                      /dev/nvidia-caps-imex-channels/channel11; ls /dev/nvidia-caps-imex-channels";
        let devices = [
            "--device=nvidia.com/gds=all",
            "--device=nvidia.com/gdrcopy=all",
            "--device=nvidia.com/imex-channel=11",
        ];
        let words = [arguments, &devices, &[IMAGE, "sh", "-euc", script]].concat();
        podman.run_after(&before, Cgroup::AsMounted, &words)
    };
    for gpu in [&["--device=nvidia.com/gpu=0"][..], &["-e", GPU]] {
        let text = run(gpu).ok();
        assert_eq!(text.matches("UUID: GPU-").count(), 1, "{text}");
        for line in [
            "{}",
            "/dev/gdrdrv: ENXIO",
            "/dev/nvidia-fs10: ENXIO",
            "channel11",
        ] {
            assert!(
                text.lines().any(|found| found == line),
                "{line} is not in\n{text}"
            );
        }
        assert_says(&text, &["channel11: ENXIO"]);
        assert_lacks(&text, &["channel0"]);
    }
    fake.configure("[devices]\ndeny = [\"gdrcopy\"]");
    let ran = run(&["--device=nvidia.com/gpu=0"]);
    assert!(
        ran.code != Some(0) && ran.stderr.contains("the devices of GDRCopy"),
        "{ran:?}"
    );
}
