//! The main use case with a real engine and a real runtime: podman and runc start a container, and the hook sets it up.

use crate::driver::FakeDriver;
use crate::engine::{Cgroup, IMAGE, NEEDS, NEEDS_V1, NEEDS_V2, Podman};
use crate::support::{assert_says, private_dir, read, write_file};

// The first four also run on old kernels (main.rs).
tests! {
    NEEDS => prints_what_the_host_prints;
    NEEDS_V1 => one_gpu_and_no_other_on_cgroup_v1 = one_gpu_and_no_other(Cgroup::AsMounted);
    NEEDS_V2 => one_gpu_and_no_other_on_cgroup_v2 = one_gpu_and_no_other(Cgroup::V2), all_gpus_on_cgroup_v2;
    NEEDS => one_mig_device_and_no_other, no_request_no_difference, privileged_containers_are_left_their_access, containers_with_a_user_namespace, a_build_that_writes_its_own_icd,
        copies_in_other_containers, what_happened_is_in_the_log, errors_reach_the_user;
    NEEDS_V1 => devices_of_config_json_stay_the_runtimes;
    &[] => the_shipped_hook_file_is_the_one_tested;
}

fn prints_what_the_host_prints() {
    let podman = Podman::shared();
    for program in ["nvidia-smi", "nvidia-smi -L"] {
        let mut arguments = vec!["-e", "NVIDIA_VISIBLE_DEVICES=all", IMAGE];
        arguments.extend(program.split(' '));
        let inside = podman.run(Cgroup::AsMounted, &arguments).ok();
        assert_eq!(
            without_clock(&inside),
            without_clock(&FakeDriver::shared().on_host(program))
        );
        assert!(
            inside.contains("NVIDIA H100 80GB HBM3") || inside.contains("NVIDIA H100 80GB"),
            "{inside}"
        );
    }
}

/// Removes the first line, in which nvidia-smi prints the time.
fn without_clock(text: &str) -> String {
    text.lines()
        .filter(|line| !line.contains(" 20"))
        .collect::<Vec<_>>()
        .join("\n")
}

/// With permission to create any node, a container can open its own GPU and no other: the cgroup decides.
fn one_gpu_and_no_other(cgroup: Cgroup) {
    let script = "nvidia-smi -L; cd /tmp; mknod n0 c 195 0; mknod n1 c 195 1; probe-open /dev/nvidia1 n1 n0; ls /dev";
    let arguments = [
        "--cap-add=MKNOD",
        "-e",
        "NVIDIA_VISIBLE_DEVICES=1",
        IMAGE,
        "sh",
        "-euc",
        script,
    ];
    let text = Podman::shared().run(cgroup, &arguments).ok();
    assert_eq!(text.matches("UUID: GPU-").count(), 1, "{text}");
    for line in ["/dev/nvidia1: ENXIO", "n1: ENXIO", "n0: EPERM"] {
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
    }
    assert!(!text.lines().any(|line| line == "nvidia0"), "{text}");
}

fn all_gpus_on_cgroup_v2() {
    let arguments = [
        "-e",
        "NVIDIA_VISIBLE_DEVICES=all",
        IMAGE,
        "nvidia-smi",
        "-L",
    ];
    let text = Podman::shared().run(Cgroup::V2, &arguments).ok();
    assert_eq!(text, FakeDriver::shared().on_host("nvidia-smi -L"));
}

/// The same as with GPUs: a process that creates the nodes of the other device cannot open them.
fn one_mig_device_and_no_other() {
    let podman = Podman::with_image();
    let fake = FakeDriver::new(&["--gpus", "2", "--mig"]);
    podman.install_hook(&fake.config);
    let script = "nvidia-smi -L; cd /tmp; mknod ours c 510 12; mknod other c 510 21; mknod gpu1 c 195 1; \
                  probe-open /dev/nvidia0 ours other gpu1";
    let arguments = [
        "--cap-add=MKNOD",
        "-e",
        "NVIDIA_VISIBLE_DEVICES=0:0",
        IMAGE,
        "sh",
        "-euc",
        script,
    ];
    for cgroup in [Cgroup::AsMounted, Cgroup::V2] {
        let text = podman.run(cgroup, &arguments).ok();
        assert_eq!(text.matches("UUID: MIG-").count(), 1, "{text}");
        for line in [
            "/dev/nvidia0: ENXIO",
            "ours: ENXIO",
            "other: EPERM",
            "gpu1: EPERM",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}

fn no_request_no_difference() {
    let podman = Podman::shared();
    let script = "cut -d' ' -f5- /proc/self/mountinfo; ls -A /dev /etc /usr/bin /usr/lib/*";
    let seen = |arguments: &[&str]| {
        let mut words = arguments.to_vec();
        words.extend([IMAGE, "sh", "-c", script]);
        let text = podman.run(Cgroup::AsMounted, &words).ok();
        // podman mounts in random order, from directories named after the container.
        let mut lines: Vec<_> = text.lines().map(without_ids).collect();
        lines.sort();
        lines
    };
    let plain = seen(&[]);
    assert_eq!(seen(&["-e", "NVIDIA_VISIBLE_DEVICES=void"]), plain);
    assert!(!plain.concat().contains("nvidia"), "{plain:?}");
    let asked = seen(&["-e", "NVIDIA_VISIBLE_DEVICES=all"]);
    assert!(
        asked.concat().contains("nvidia"),
        "the test can see a difference"
    );
}

fn without_ids(line: &str) -> String {
    let is_id = |word: &&str| word.len() >= 32 && word.bytes().all(|b| b.is_ascii_hexdigit());
    line.split(['/', ' '])
        .filter(|word| !is_id(word))
        .collect::<Vec<_>>()
        .join(" ")
}

fn privileged_containers_are_left_their_access() {
    let arguments = [
        "--privileged",
        "-e",
        "NVIDIA_VISIBLE_DEVICES=0",
        IMAGE,
        "sh",
        "-euc",
    ];
    for cgroup in [Cgroup::AsMounted, Cgroup::V2] {
        let mut arguments = arguments.to_vec();
        arguments.push("nvidia-smi -L; mknod /tmp/other c 195 9; probe-open /tmp/other");
        let text = Podman::shared().run(cgroup, &arguments).ok();
        assert_says(&text, &["GPU 0: ", "/tmp/other: ENXIO"]);
    }
}

/// Many images are built like this, because NVIDIA's hook does not provide the file.
fn a_build_that_writes_its_own_icd() {
    let (podman, fake) = (Podman::with_image(), FakeDriver::new(&["--all-files"]));
    podman.install_hook(&fake.config);
    let icd = "/etc/OpenCL/vendors/nvidia.icd";
    let containerfile = format!(
        "FROM {IMAGE}\nENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility\n\
         RUN nvidia-smi -L && mkdir -p /etc/OpenCL/vendors && echo libnvidia-opencl.so.1 >{icd}\n\
         RUN cat {icd} && echo a-later-step >>{icd}\nRUN cat {icd}\n"
    );
    let script = format!(
        "printf '%s' '{containerfile}' | \"$@\" build --hooks-dir {} --network=none --isolation=oci --no-cache - 2>&1",
        podman.hooks.display()
    );
    let text = podman.shell(Cgroup::AsMounted, &script).ok();
    assert_says(
        &text,
        &["GPU 0: ", "\nlibnvidia-opencl.so.1\na-later-step\n"],
    );
}

/// The copy belongs to the container's root, and a read-only container has it in a layer.
fn copies_in_other_containers() {
    let (podman, fake) = (Podman::with_image(), FakeDriver::new(&["--all-files"]));
    podman.install_hook(&fake.config);
    let icd = "/etc/OpenCL/vendors/nvidia.icd";
    let look = format!("stat -c %u:%g:%a {icd}; cat {icd}; echo own >{icd} || true; cat {icd}");
    for (options, expected) in rows! {
        &[][..], "0:0:644\nlibnvidia-opencl.so.1\nown\n";
        &["--uidmap=0:100000:65536", "--gidmap=0:100000:65536"][..], "0:0:644\nlibnvidia-opencl.so.1\nown\n";
        &["--read-only"][..], "0:0:644\nlibnvidia-opencl.so.1\nlibnvidia-opencl.so.1\n";
    } {
        let env = [
            "-e",
            "NVIDIA_VISIBLE_DEVICES=all",
            "-e",
            "NVIDIA_DRIVER_CAPABILITIES=compute",
        ];
        let arguments: Vec<_> = options
            .iter()
            .copied()
            .chain(env)
            .chain([IMAGE, "sh", "-uc", &look])
            .collect();
        let ran = podman.run(Cgroup::AsMounted, &arguments);
        assert_eq!(
            (ran.code, ran.stdout.as_str()),
            (Some(0), expected),
            "{options:?}: {}",
            ran.stderr
        );
    }
}

/// A device that the engine added is not changed: `rwm`, and no second mount.
fn devices_of_config_json_stay_the_runtimes() {
    let root = FakeDriver::shared().root.display().to_string();
    let device = |name: &str| format!("--device={root}/dev/{name}:/dev/{name}");
    let (ctl, gpu) = (device("nvidiactl"), device("nvidia0"));
    let arguments = [
        &ctl,
        &gpu,
        "-e",
        "NVIDIA_VISIBLE_DEVICES=0",
        "-e",
        "NVIDIA_DRIVER_CAPABILITIES=utility",
        IMAGE,
        "sh",
        "-euc",
        "nvidia-smi -L; grep -c ' /dev/nvidia' /proc/self/mountinfo || true",
    ];
    let text = Podman::shared().run(Cgroup::AsMounted, &arguments).ok();
    assert!(
        text.contains("GPU 0: ") && text.lines().any(|line| line == "0"),
        "{text}"
    );
}

/// Files are created as the container's root, which is another user of the host.
fn containers_with_a_user_namespace() {
    let arguments = [
        "--uidmap=0:100000:65536",
        "--gidmap=0:100000:65536",
        "-e",
        "NVIDIA_VISIBLE_DEVICES=all",
        IMAGE,
        "sh",
        "-euc",
        "nvidia-smi -L; stat -c %u:%g:%a /etc/ld.so.cache; probe-dlopen libcuda.so.1",
    ];
    // Separate storage: another podman that starts at the same time removes other users' permission for the vfs directory.
    let podman = Podman::with_image();
    let text = podman.run(Cgroup::AsMounted, &arguments).ok();
    assert_says(&text, &["GPU 1: ", "\n0:0:644\n"]);
}

/// crun does not print the messages of a hook, so the log contains them too.
fn what_happened_is_in_the_log() {
    let podman = Podman::with_image();
    let private = private_dir();
    let (config, log) = (
        podman.dir.path().join("config.toml"),
        private.path().join("log"),
    );
    let root = FakeDriver::shared().root.display().to_string();
    write_file(
        &config,
        format!(
            "[nvidia-container-cli]\nroot = \"{root}\"\ndebug = \"{}\"\n",
            log.display()
        ),
    );
    podman.install_hook(&config);
    podman
        .run(
            Cgroup::AsMounted,
            &["-e", "NVIDIA_VISIBLE_DEVICES=0", IMAGE, "true"],
        )
        .ok();
    podman
        .run(
            Cgroup::AsMounted,
            &["-e", "NVIDIA_VISIBLE_DEVICES=9", IMAGE, "true"],
        )
        .failed(126);
    let text = read(log);
    for says in [
        ": note: ",
        "driver 535.183.01",
        ": error: ",
        "\"9\"",
        "(ONH-030)",
        ": hint: ",
    ] {
        assert!(text.contains(says), "{says:?} is not in\n{text}");
    }
}

fn errors_reach_the_user() {
    let arguments = ["-e", "NVIDIA_VISIBLE_DEVICES=9", IMAGE, "nvidia-smi"];
    let stderr = Podman::shared()
        .run(Cgroup::AsMounted, &arguments)
        .failed(126);
    for text in [
        "NVIDIA_VISIBLE_DEVICES",
        "\"9\"",
        "(ONH-030)",
        "hint: ",
        " 0, 1, ",
    ] {
        assert!(stderr.contains(text), "{stderr}");
    }
    // podman searches stderr for words that it takes for its own errors.
    let podman = Podman::with_image();
    let config = podman.dir.path().join("config.toml");
    write_file(&config, "[nvidia-container-cli]\nroot = \"/nowhere\"\n");
    podman.install_hook(&config);
    let arguments = ["-e", "NVIDIA_VISIBLE_DEVICES=all", IMAGE, "nvidia-smi"];
    let stderr = podman.run(Cgroup::AsMounted, &arguments).failed(126);
    assert!(stderr.contains("(ONH-014)"), "{stderr}");
    assert!(!stderr.contains("command that was not found"), "{stderr}");
}

fn the_shipped_hook_file_is_the_one_tested() {
    let shipped = read(crate::support::source("hooks.d/oci-nvidia-hook.json"));
    let json: serde_json::Value = serde_json::from_str(&shipped).unwrap();
    assert_eq!(json["when"], serde_json::json!({"always": true}));
    assert_eq!(
        json["stages"],
        serde_json::json!(["prestart"]),
        "CRI-O rejects unknown stages"
    );
    assert!(
        json["hook"]["env"]
            .as_array()
            .is_some_and(|env| !env.is_empty()),
        "CVE-2025-23266"
    );
    assert_eq!(json["hook"]["path"], "/usr/bin/oci-nvidia-hook");
}
