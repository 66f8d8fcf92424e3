//! Device nodes of a group (`root:video` 0660, as on SUSE) for processes that are not members, at the hook's usual stages.

use std::io::Read;
use std::process::{Command, Stdio};

use serde_json::json;

use crate::cdi::write_spec_with;
use crate::cdi_containers::only_spec;
use crate::driver::{FakeDriver, Image, MASKABLE_PROC, NEEDS, Waiting};
use crate::edit_config::video;
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::kernels;
use crate::support::{HOOK, Need, Ran, assert_lacks, assert_says, fingerprint, read, run, scratch};

const NEEDS_CRUN: &[Need] = &[
    Need::Root,
    Need::Programs(&["podman", "runc", "crun", "cc"]),
    Need::CgroupV2,
];

const NEEDS_STRACE: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "nsenter", "strace"]),
];

const NEEDS_SETPRIV: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "nsenter", "setpriv"]),
];

tests! {
    NEEDS_STRACE => one_tmpfs_for_all_nodes;
    NEEDS_SETPRIV => users_of_the_host_with_the_same_ids;
    NEEDS => a_user_opens_them, nodes_that_the_runtime_created, the_hosts_nodes_if_configured, where_none_can_be_created,
        the_hosts_dev_is_left_alone;
    NEEDS_CRUN => podman, processes_that_leave_root;
    engine::NEEDS => podman_with_a_user_namespace;
}

/// The setting for containers whose nodes have the host's owner and mode.
pub const NODES_OF_THE_HOST: &str = "[oci-nvidia-hook]\ndevice-node-access = \"host\"";

/// Like the nodes on SUSE.
fn suse() -> FakeDriver {
    FakeDriver::new(&[
        "--gpus",
        "2",
        "--drm",
        "--dev-mode",
        "0660",
        "--dev-group",
        "video",
    ])
}

const ENV: &[&str] = &["NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_DRIVER_CAPABILITIES=all"];
const NODES: &str = "/dev/nvidia1 /dev/nvidiactl /dev/nvidia-uvm /dev/dri/card2";
const OPEN: &str =
    "/dev/nvidia1: ENXIO\n/dev/nvidiactl: ENXIO\n/dev/nvidia-uvm: ENXIO\n/dev/dri/card2: ENXIO\n";

fn start(dir: &std::path::Path, image: &Image, user: &serde_json::Value, before: &str) -> Waiting {
    let container = Waiting::start(dir, &image.rootfs, ENV, before);
    container.set_spec(
        ENV,
        &json!({"process": {"args": ["sh"], "env": ENV, "user": user}}),
    );
    container
}

/// Runs a program as a user and with groups of the container.
fn exec_as(container: &Waiting, user: &str, groups: &str, script: &str) -> Ran {
    let mut enter = Command::new("nsenter");
    enter.args([
        "-m",
        "-t",
        &container.pid().to_string(),
        "chroot",
        &format!("--userspec={user}"),
    ]);
    enter
        .arg(format!("--groups={groups}"))
        .arg(&container.rootfs)
        .args(["/bin/sh", "-c", script]);
    run(&mut enter)
}

/// On most hosts of SUSE, each start creates all nodes.
fn one_tmpfs_for_all_nodes() {
    let (dir, fake) = (scratch(), suse());
    let image = Image::new(dir.path(), &[]);
    let container = start(dir.path(), &image, &json!({"uid": 0, "gid": 0}), "");
    let trace = dir.path().join("trace");
    let mut strace = Command::new("strace");
    strace
        .args(["-f", "-e", "trace=mount,mknodat", "-o"])
        .arg(&trace)
        .arg(HOOK);
    container.call(&mut strace, &fake.config).ok();
    let calls = read(trace);
    let count = |call: &str| calls.lines().filter(|line| line.contains(call)).count();
    assert!(count("S_IFCHR") > 3, "{calls}");
    assert_eq!(count(" mount("), 1, "{calls}");
    assert_eq!(
        exec_as(&container, "1000:1000", "", &format!("probe-open {NODES}")).ok(),
        OPEN
    );
}

/// Users of the host reach a container's nodes through /proc/PID/root only with the user and the group of its process (ptrace(2),
/// `PTRACE_MODE_READ`). So no owner, group or mode that the process can use would keep them out, except the host's ids.
fn users_of_the_host_with_the_same_ids() {
    let fake = suse();
    for (config, expected) in [
        ("", "No such device or address"),
        (NODES_OF_THE_HOST, "Permission denied"),
    ] {
        fake.configure(config);
        let dir = scratch();
        let image = Image::new(dir.path(), &[]);
        let container = start(dir.path(), &image, &json!({"uid": 1000, "gid": 1000}), "");
        container.hook(&fake.config).ok();
        let mut enter = Command::new("nsenter");
        enter.args(["-m", "-t", &container.pid().to_string(), "chroot"]);
        enter
            .args(["--userspec=1000:1000", "--groups="])
            .arg(&container.rootfs);
        let mut process = enter
            .args(["/bin/sh", "-c", "echo ready; exec sleep 60"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = [0; 6];
        process
            .stdout
            .take()
            .unwrap()
            .read_exact(&mut ready)
            .unwrap();
        let open = |uid: u32, gid: u32| {
            let script = format!(": <>/proc/{}/root/dev/nvidia1", process.id());
            let mut user = Command::new("setpriv");
            user.args([
                format!("--reuid={uid}"),
                format!("--regid={gid}"),
                "--clear-groups".to_owned(),
            ]);
            run(user.args(["sh", "-c", &script])).stderr
        };
        for (uid, gid, expected) in [
            (1000, 1000, expected),
            (1000, 1001, "Permission denied"),
            (1001, 1000, "Permission denied"),
        ] {
            let stderr = open(uid, gid);
            assert!(stderr.contains(expected), "{config} {uid}:{gid}: {stderr}");
        }
        process.kill().unwrap();
        process.wait().unwrap();
    }
}

/// On new and old kernels, twice, and in a read-only rootfs.
fn a_user_opens_them() {
    let fake = suse();
    let before = fingerprint(&fake.root.join("dev"), "");
    let read_only = "mkdir -p $rootfs/run/nvidia-persistenced; mount -o remount,bind,ro $rootfs";
    for (kernel, script) in [
        (None, MASKABLE_PROC),
        (None, read_only),
        (Some(kernels::OLDEST), MASKABLE_PROC),
        (Some(kernels::OLDEST), read_only),
        (Some(kernels::WITHOUT_OPENAT2.kernel), MASKABLE_PROC),
    ] {
        kernels::set(kernel);
        let (dir, image) = Image::debian();
        // The first process of the second container is root, and opens them too.
        let user = if script == read_only {
            json!({"uid": 0, "gid": 0})
        } else {
            json!({"uid": 1000, "gid": 1000})
        };
        let container = start(dir.path(), &image, &user, script);
        let ran = container.hook(&fake.config);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert_lacks(&ran.stderr, &["ONH-219"]);
        for user in ["1000:1000", "0:0"] {
            let opened = exec_as(
                &container,
                user,
                "",
                &format!("nvidia-smi -L; probe-open {NODES}"),
            )
            .ok();
            assert!(
                opened.starts_with("GPU 0: ") && opened.ends_with(OPEN),
                "{kernel:?} {script} {user}: {opened}"
            );
        }
        for node in NODES.split(' ') {
            let options = container.mount_options(node);
            assert!(options.starts_with("ro,nosuid,noexec"), "{node}: {options}");
            let seen = container.output(&format!("stat -c '%F %a %u:%g' {node}"));
            assert_eq!(seen, "character special file 666 0:0\n", "{node}");
        }
        let defaced = container.output(&format!("probe-deface {NODES}"));
        assert_eq!(defaced.matches("chmod EROFS").count(), 8, "{defaced}");
        // Only the nodes remain of the file system on which they were created, and a second run finds them.
        let dev = format!("{}/dev", image.rootfs.display());
        let once = container.mountinfo();
        let tmpfs = once
            .lines()
            .filter(|line| line.split(' ').nth(4) == Some(&dev))
            .count();
        assert_eq!(tmpfs, 1, "{once}");
        container.hook(&fake.config).ok();
        assert_eq!(container.mountinfo(), once);
    }
    kernels::set(None);
    assert_eq!(
        fingerprint(&fake.root.join("dev"), ""),
        before,
        "the host's nodes"
    );
}

/// With `--device` and `--privileged`, the runtime creates nodes with the host's mode and owner.
fn nodes_that_the_runtime_created() {
    let fake = suse();
    let group = video();
    let before = format!(
        "mount -t tmpfs dev $rootfs/dev; mknod -m 660 $rootfs/dev/nvidia1 c 195 1; chgrp {group} $rootfs/dev/nvidia1"
    );
    let listed = json!({"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1, "fileMode": 0o660, "uid": 0, "gid": group});
    for config in ["", NODES_OF_THE_HOST] {
        fake.configure(config);
        let container = Waiting::debian(ENV, &before);
        let user = json!({"uid": 1000, "gid": 1000});
        container.set_spec(
            ENV,
            &json!({
                "process": {"args": ["sh"], "env": ENV, "user": user},
                "linux": {"devices": [listed]},
            }),
        );
        let ran = container.hook(&fake.config);
        assert!(ran.stderr.contains("ONH-219"), "{ran:?}");
        ran.ok();
        let opened = exec_as(&container, "1000:1000", "", "probe-open /dev/nvidia1").ok();
        assert_eq!(opened, "/dev/nvidia1: EACCES\n", "{config}");
    }
}

/// With the setting, all containers get the host's nodes unchanged. Without it, a node that only root may open stays so.
fn the_hosts_nodes_if_configured() {
    let fake = suse();
    let group = video();
    fake.configure(NODES_OF_THE_HOST);
    for (user, groups) in [
        (json!({"uid": 0, "gid": 0}), String::new()),
        (json!({"uid": 1000, "gid": group}), String::new()),
        (
            json!({"uid": 1000, "gid": 1000, "additionalGids": [group]}),
            group.to_string(),
        ),
    ] {
        let (dir, image) = Image::debian();
        let container = start(dir.path(), &image, &user, "");
        container.hook(&fake.config).ok();
        let userspec = format!("{}:{}", user["uid"], user["gid"]);
        assert_eq!(
            exec_as(
                &container,
                &userspec,
                &groups,
                &format!("probe-open {NODES}")
            )
            .ok(),
            OPEN,
            "{user}"
        );
        assert_eq!(
            container.output("stat -c '%a %G' /dev/nvidia1"),
            "660 video\n",
            "{user}"
        );
        let opened = exec_as(&container, "1000:1000", "", &format!("probe-open {NODES}")).ok();
        assert_eq!(opened.matches(": EACCES").count(), 4, "{opened}");
    }
    let (dir, image) = Image::debian();
    let container = start(dir.path(), &image, &json!({"uid": 1000, "gid": 1000}), "");
    let ran = container.hook(&fake.config);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_says(&ran.stderr, &["ONH-219"]);
    fake.configure("");
    for node in ["nvidia1", "nvidiactl"] {
        let path = fake.root.join("dev").join(node);
        run(Command::new("chown").arg("0:0").arg(&path)).ok();
        run(Command::new("chmod").arg("600").arg(&path)).ok();
    }
    let (dir, image) = Image::debian();
    let container = start(dir.path(), &image, &json!({"uid": 1000, "gid": 1000}), "");
    let ran = container.hook(&fake.config);
    let says = "user 1000 of the container cannot open \"";
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_says(&ran.stderr, &[says, "ONH-219"]);
    let opened = exec_as(&container, "1000:1000", "", &format!("probe-open {NODES}")).ok();
    assert!(
        opened
            .starts_with("/dev/nvidia1: EACCES\n/dev/nvidiactl: EACCES\n/dev/nvidia-uvm: ENXIO\n"),
        "{opened}"
    );
}

/// Without a device cgroup of the container, or without CAP_MKNOD: the host's nodes, and a finding.
fn where_none_can_be_created() {
    let fake = suse();
    let user = json!({"uid": 1000, "gid": 1000});
    let (dir, image) = Image::debian();
    for (config, hook) in [
        ("no-cgroups = true", vec![HOOK]),
        ("", vec!["setpriv", "--bounding-set=-mknod", HOOK]),
    ] {
        fake.configure(config);
        let container = start(dir.path(), &image, &user, "");
        let mut command = Command::new(hook[0]);
        let ran = container.call(command.args(&hook[1..]), &fake.config);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert_eq!(ran.stderr.matches("ONH-219").count(), 1, "{ran:?}");
        assert_says(&ran.stderr, &[&format!("--group-add {}", video())]);
        let explained = fake.run_with(&["plan", "-"], &container.state()).ok();
        // Whether it may create nodes is examined at the start only.
        let is_created = explained.contains("\ndevice nodes that the hook creates: ");
        assert_eq!(is_created, config.is_empty(), "{explained}");
        assert_eq!(explained.contains("ONH-219"), !is_created, "{explained}");
        assert_eq!(
            container.output("stat -c '%a %G' /dev/nvidia1"),
            "660 video\n"
        );
        let why = run(Command::new(HOOK).args(["why", "waiting"]).env_clear()).ok();
        assert_says(
            &why,
            &["but its process cannot open the device nodes: injected"],
        );
    }
}

/// A volume with the host's /dev already has the nodes: they stay, and nothing is created there.
fn the_hosts_dev_is_left_alone() {
    let fake = suse();
    let host = fake.root.join("dev");
    let before = fingerprint(&host, "");
    let volume = format!("mount --bind '{}' $rootfs/dev", host.display());
    let container = Waiting::debian(ENV, &volume);
    // Without "graphics", which adds links in /dev/dri.
    let process = json!({"args": ["sh"], "env": [ENV[0]], "user": {"uid": 1000, "gid": 1000}});
    container.set_spec(ENV, &json!({"process": process}));
    let ran = container.hook(&fake.config);
    assert!(
        ran.code == Some(0) && ran.stderr.matches("ONH-219").count() == 1,
        "{ran:?}"
    );
    assert_eq!(fingerprint(&host, ""), before);
    let opened = exec_as(&container, "1000:1000", "", &format!("probe-open {NODES}")).ok();
    assert_eq!(opened.matches(": EACCES").count(), 4, "{opened}");
}

const SEE: &str = "id -u; nvidia-smi -L; probe-open /dev/nvidia1 /dev/nvidiactl; cd /tmp; mknod n0 c 195 0 2>/dev/null && \
                   probe-open n0 || echo no mknod";

/// The device cgroup stays in effect: GPUs that were not requested cannot be opened.
fn podman() {
    let fake = suse();
    let podman = Podman::with_image();
    let asks = ["-e", "NVIDIA_VISIBLE_DEVICES=1"];
    for stage in ["prestart", "createRuntime"] {
        podman.install_stage(stage, &fake.config);
        for cgroup in [Cgroup::AsMounted, Cgroup::V2, Cgroup::WithCrun] {
            for more in [
                &["--user=1000"][..],
                &["--user=1000:1000", "--read-only"],
                &["--user=1000", "--cap-drop=all"],
            ] {
                let words = [&asks[..], more, &[IMAGE, "sh", "-uc", SEE]].concat();
                let text = podman.run(cgroup, &words).ok();
                assert!(
                    text.starts_with("1000\nGPU 0: "),
                    "{stage} {cgroup:?} {more:?}: {text}"
                );
                assert!(
                    text.contains("/dev/nvidia1: ENXIO\n/dev/nvidiactl: ENXIO\n"),
                    "{stage} {cgroup:?} {more:?}: {text}"
                );
            }
        }
    }
    // A process of the container that may create nodes gains nothing.
    podman.install_stage("prestart", &fake.config);
    let words = [
        &asks[..],
        &["--user=1000", "--cap-add=MKNOD", IMAGE, "sh", "-uc", SEE],
    ]
    .concat();
    for cgroup in [Cgroup::AsMounted, Cgroup::V2] {
        let text = podman.run(cgroup, &words).ok();
        assert!(
            text.ends_with("n0: EPERM\n") || text.ends_with("no mknod\n"),
            "{text}"
        );
    }
}

/// A container whose first process is root: a service that starts as another user, and `podman exec --user`, have none of the groups
/// of the first process.
fn processes_that_leave_root() {
    let fake = suse();
    let podman = Podman::with_image();
    let dir = scratch();
    let spec = dir.path().join("nvidia.yaml");
    write_spec_with(&fake, &spec, &["--no-additional-gids"]);
    let asks = "-e NVIDIA_VISIBLE_DEVICES=1";
    for (mode, before, asks) in [
        ("hook", String::new(), asks),
        (
            "cdi",
            format!("{};", only_spec(&spec)),
            "--device=nvidia.com/gpu=1",
        ),
    ] {
        podman.remove_hooks();
        if mode == "hook" {
            podman.install_stage("prestart", &fake.config);
        }
        for cgroup in [Cgroup::AsMounted, Cgroup::WithCrun] {
            let open = "sh -c 'id -u; nvidia-smi -L; probe-open /dev/nvidia1 /dev/nvidiactl'";
            let script = format!(
                "{before} \"$@\" run -d --name c --network=none --log-driver=none {asks} {IMAGE} sleep 100 >/dev/null; \
                 \"$@\" exec --user 2000:2000 c {open}; \"$@\" exec c {open}; \"$@\" rm -f -t 0 c >/dev/null"
            );
            let text = podman.shell(cgroup, &script).ok();
            let nodes = "/dev/nvidia1: ENXIO\n/dev/nvidiactl: ENXIO\n";
            assert_eq!(text.matches(nodes).count(), 2, "{mode} {cgroup:?}: {text}");
            assert_eq!(
                text.matches("\nGPU 0: ").count(),
                2,
                "{mode} {cgroup:?}: {text}"
            );
        }
    }
}

/// Root of a user namespace, and a user in it, are unprivileged users of the host. Device nodes on file systems that a runtime
/// mounts there do not work; those that the hook mounts do.
fn podman_with_a_user_namespace() {
    let fake = suse();
    // Separate storage, as in other tests with user namespaces.
    let podman = Podman::with_image();
    podman.install_stage("prestart", &fake.config);
    for more in [&[][..], &["--user=1000"], &["--read-only"]] {
        let mapped = [
            "--uidmap=0:100000:65536",
            "--gidmap=0:100000:65536",
            "-e",
            "NVIDIA_VISIBLE_DEVICES=1",
        ];
        let words = [
            &mapped[..],
            more,
            &[
                IMAGE,
                "sh",
                "-euc",
                "nvidia-smi -L; probe-open /dev/nvidia1 /dev/nvidiactl",
            ],
        ];
        let text = podman.run(Cgroup::AsMounted, &words.concat()).ok();
        assert!(text.starts_with("GPU 0: "), "{more:?}: {text}");
        assert!(
            text.ends_with("/dev/nvidia1: ENXIO\n/dev/nvidiactl: ENXIO\n"),
            "{more:?}: {text}"
        );
    }
}
