//! The program called as NVIDIA's hook: by Docker's `--gpus`, and by hook files that name it. Docker itself does not run here:
//! the bundles have the form that dockerd writes, and runc is real.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::built;
use crate::driver::{ALL_GPUS, FakeDriver, Image, NEEDS, NEEDS_COMPAT, Waiting};
use crate::engine::{IMAGE, Podman};
use crate::nvidia_cli::link;
use crate::nvidia_ctk;
use crate::support::{
    HOOK, Need, Ran, assert_lacks, assert_says, copy_nvml_program, nvml_program, read, run,
    run_with, scratch, sh_unshared, shell, source, write_file,
};

const RUNC: &[Need] = &[Need::Root, Need::Programs(&["runc", "cc"]), Need::CgroupV1];

const RUNC_COMPAT: &[Need] = &[
    Need::Root,
    Need::Programs(&["runc", "cc"]),
    Need::CgroupV1,
    Need::Build,
    Need::StaticLibc,
];

const PODMAN_COMPAT: &[Need] = &[
    Need::Root,
    Need::Programs(&["podman", "runc", "cc"]),
    Need::Build,
    Need::StaticLibc,
];

tests! {
    RUNC => gpus_all, both_names_in_one_bundle;
    NEEDS_COMPAT => which_of_two_hooks;
    RUNC_COMPAT => runtime_nvidia;
    PODMAN_COMPAT => podman_knows_the_runtime;
    NEEDS => the_hooks_command_line;
}

/// `runtime: nvidia` in a compose file for Docker becomes `podman run --runtime nvidia`.
fn podman_knows_the_runtime() {
    let (podman, fake, host) = (Podman::with_image(), FakeDriver::shared(), scratch());
    let install = |from: &Path, to: &str| {
        let to = host.path().join(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, to).unwrap();
    };
    install(Path::new(HOOK), "usr/bin/oci-nvidia-hook");
    install(
        &nvml_program(),
        "usr/libexec/oci-nvidia-hook/oci-nvidia-nvml",
    );
    install(built::static_hook(), "usr/bin/nvidia-container-runtime");
    install(&fake.config, "etc/nvidia-container-runtime/config.toml");
    let asked = [
        "--runtime",
        "nvidia",
        "-e",
        "NVIDIA_VISIBLE_DEVICES=1",
        IMAGE,
        "nvidia-smi",
        "-L",
    ];
    let unknown = podman.run_installed(host.path(), &asked).failed(125);
    assert_says(&unknown, &["default OCI runtime \"nvidia\" not found"]);
    install(
        &source("packaging/podman/50-oci-nvidia-hook-compat.conf"),
        "etc/containers/containers.conf.d/50-oci-nvidia-hook-compat.conf",
    );
    let seen = podman.run_installed(host.path(), &asked).ok();
    assert_says(&seen, &["GPU-51eed001"]);
    assert_lacks(&seen, &["GPU-51eed000"]);
    let usual = ["-e", "NVIDIA_VISIBLE_DEVICES=1", IMAGE, "nvidia-smi", "-L"];
    let usual = podman.run_installed(host.path(), &usual);
    assert_ne!(
        usual.code,
        Some(0),
        "without a hook file, only this runtime gives GPUs: {usual:?}"
    );
}

/// A bundle like Docker's bundles, and runc to run it.
pub struct Bundle {
    dir: PathBuf,
    spec: Value,
}

impl Bundle {
    /// The output of `runc spec`, with the additions of Docker.
    pub fn new(dir: &Path, rootfs: &Path) -> Self {
        let dir = dir.join("runc-bundle");
        std::fs::create_dir_all(&dir).unwrap();
        shell!("cd '{}' && rm -f config.json && runc spec", dir.display());
        let text = read(dir.join("config.json"));
        let mut spec: Value = serde_json::from_str(&text).unwrap();
        spec["root"] = json!({"path": rootfs});
        spec["process"]["terminal"] = false.into();
        spec["process"]["user"] = json!({"uid": 0, "gid": 0, "additionalGids": [0, 10]});
        spec["process"].as_object_mut().unwrap().remove("rlimits");
        // The order of Docker's own list: nothing, then what every container may open.
        let allow = |kind: &str, numbers: Value, access: &str| {
            let mut rule = json!({"allow": true, "type": kind, "access": access});
            rule.as_object_mut()
                .unwrap()
                .extend(numbers.as_object().unwrap().clone());
            rule
        };
        spec["linux"]["resources"]["devices"] = json!([
            {"allow": false, "access": "rwm"},
            allow("c", json!({"major": 1, "minor": 5}), "rwm"),
            allow("c", json!({"major": 1, "minor": 3}), "rwm"),
            allow("c", json!({"major": 1, "minor": 9}), "rwm"),
            allow("c", json!({"major": 1, "minor": 8}), "rwm"),
            allow("c", json!({"major": 5, "minor": 0}), "rwm"),
            allow("c", json!({"major": 5, "minor": 1}), "rwm"),
            {"allow": false, "type": "c", "major": 10, "minor": 229, "access": "rwm"},
            // Nodes may be created but not opened.
            allow("c", json!({}), "m"),
        ]);
        let caps = json!([
            "CAP_CHOWN",
            "CAP_DAC_OVERRIDE",
            "CAP_MKNOD",
            "CAP_SETUID",
            "CAP_SETGID",
            "CAP_KILL"
        ]);
        spec["process"]["capabilities"] =
            json!({"bounding": caps, "effective": caps, "permitted": caps});
        spec["root"]["readonly"] = false.into();
        Self { dir, spec }
    }

    pub fn process(mut self, args: &[&str], env: &[&str]) -> Self {
        let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let env: Vec<_> = [path, "HOSTNAME=0123456789ab"]
            .into_iter()
            .chain(env.iter().copied())
            .collect();
        self.spec["process"]["args"] = json!(args);
        self.spec["process"]["env"] = json!(env);
        self
    }

    /// Adds a hook with the environment of the daemon, like Docker.
    pub fn hook(mut self, stage: &str, path: &Path, args: &[&str]) -> Self {
        let env = [
            "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
            "INVOCATION_ID=0",
            "NVIDIA_VISIBLE_DEVICES=void",
        ];
        let hook = json!({"path": path, "args": args, "env": env});
        let hooks = self
            .spec
            .as_object_mut()
            .unwrap()
            .entry("hooks")
            .or_insert_with(|| json!({}));
        let of_stage = hooks
            .as_object_mut()
            .unwrap()
            .entry(stage)
            .or_insert_with(|| json!([]));
        of_stage.as_array_mut().unwrap().push(hook);
        self
    }

    /// `root.path`
    pub fn rootfs(mut self, path: &str) -> Self {
        self.spec["root"]["path"] = path.into();
        self
    }

    /// Runs `runc run` in a separate mount namespace, after this shell script.
    pub fn run(self, before: &str) -> Ran {
        self.run_with(before, "runc")
    }

    /// Runs another runtime, with options.
    fn run_with(self, before: &str, runtime: &str) -> Ran {
        write_file(self.dir.join("config.json"), self.spec.to_string());
        // The bundle is the working directory, as with containerd's shim.
        let script = format!(
            "{before}\ncd '{dir}'\nexec {runtime} --root '{dir}/state' run 'onh-docker-{pid}-{name}'",
            dir = self.dir.display(),
            pid = std::process::id(),
            name = self
                .dir
                .parent()
                .unwrap()
                .file_name()
                .unwrap()
                .to_string_lossy()
                .trim_start_matches('.'),
        );
        sh_unshared(&script)
    }
}

/// A script that puts config.toml of the fake driver at the default path, because Docker passes no option.
fn default_config(dir: &Path, fake: &FakeDriver) -> String {
    let etc = dir.join("etc/nvidia-container-runtime");
    std::fs::create_dir_all(&etc).unwrap();
    std::fs::copy(&fake.config, etc.join("config.toml")).unwrap();
    format!(
        "mount -t overlay -o 'lowerdir={}:/etc' overlay /etc",
        dir.join("etc").display()
    )
}

const NAME: &str = "nvidia-container-runtime-hook";

/// `docker run --gpus all`, and `--gpus 1`.
fn gpus_all() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let config = default_config(dir.path(), fake);
    let hook = link(dir.path(), NAME);
    let script = "nvidia-smi -L; mknod /tmp/other c 195 9; probe-open /dev/nvidia0 /dev/nvidia1 /tmp/other; \
                  test ! -e /usr/lib/x86_64-linux-gnu/libnvidia-encode.so.1; rm /tmp/other";
    let bundle = |devices: &str| {
        let devices = format!("NVIDIA_VISIBLE_DEVICES={devices}");
        // The first hook is libnetwork's, which is in every bundle of Docker.
        Bundle::new(dir.path(), &image.rootfs)
            .process(
                &["sh", "-euc", script],
                &[&devices, "NVIDIA_DRIVER_CAPABILITIES=compute,utility"],
            )
            .hook(
                "prestart",
                Path::new("/bin/true"),
                &["libnetwork-setkey", "-exec-root=/var/run/docker", "0123"],
            )
            .hook("prestart", &hook, &[NAME, "prestart"])
    };
    let all = bundle("all").run(&config).ok();
    assert_eq!(all.matches("UUID: GPU-").count(), 2, "{all}");
    // No driver has these numbers: the kernel returns ENXIO to processes that may open them.
    for line in [
        "/dev/nvidia0: ENXIO",
        "/dev/nvidia1: ENXIO",
        "/tmp/other: EPERM",
    ] {
        assert!(all.contains(line), "{line}: {all}");
    }
    let one = bundle("0").run(&config).ok();
    assert_says(&one, &["UUID: GPU-51eed000", "/dev/nvidia1: ENOENT"]);
    // With containerd's image store, the rootfs is below the bundle, and its path is relative.
    let mount = format!(
        "{config}; mkdir -p '{dir}/runc-bundle/rootfs'; mount --bind '{image}' '{dir}/runc-bundle/rootfs'",
        dir = dir.path().display(),
        image = image.rootfs.display()
    );
    assert_eq!(bundle("0").rootfs("rootfs").run(&mount).ok(), one);
    // The user sees the error, and the container does not start.
    let wrong = bundle("7").run(&config);
    assert_ne!(wrong.code, Some(0));
    assert_says(&wrong.stderr, &["(ONH-030)"]);
    assert_lacks(&wrong.stdout, &["GPU"]);
}

/// Our hook file, and one that NVIDIA's toolkit left, whose program is now a link to ours: the container is set up once.
fn both_names_in_one_bundle() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let config = default_config(dir.path(), fake);
    let (theirs, old) = (
        link(dir.path(), NAME),
        link(dir.path(), "nvidia-container-toolkit"),
    );
    let script = "nvidia-smi -L; for path in /dev/nvidia0 /dev/nvidiactl /usr/bin/nvidia-smi /proc/driver/nvidia; do \
                  echo $path $(grep -c \" $path \" /proc/self/mountinfo); done; ldconfig -p | grep -c 'libcuda.so.1 '";
    let bundle =
        || Bundle::new(dir.path(), &image.rootfs).process(&["sh", "-euc", script], ALL_GPUS);
    let proc = format!("{config}; true");
    let once = bundle()
        .hook("prestart", &theirs, &[NAME, "prestart"])
        .run(&proc)
        .ok();
    assert!(
        once.contains("/dev/nvidia0 1\n") && once.ends_with("\n1\n"),
        "{once}"
    );
    let ours = Path::new(HOOK);
    for orders in [[ours, &theirs], [&theirs, ours], [&theirs, &old]] {
        let mut both = bundle();
        for path in orders {
            let name = path.file_name().unwrap().to_str().unwrap();
            both = both.hook("prestart", path, &[name, "prestart"]);
        }
        assert_eq!(both.run(&proc).ok(), once, "{orders:?}");
    }
}

/// `docker run --runtime=nvidia`: a variable of the image requests GPUs, and Docker adds no hook.
fn runtime_nvidia() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let config = default_config(dir.path(), fake);
    let log = dir.path().join("log.json");
    let runtime = nvidia_ctk::link(dir.path(), "nvidia-container-runtime");
    let runtime = format!(
        "{} --log {} --log-format json",
        runtime.display(),
        log.display()
    );
    // An earlier container may have left an empty file in the image, at which runc mounted nvidia-smi.
    let see = "nvidia-smi -L || true; probe-open /dev/nvidia0 /dev/nvidia1; echo \"$NVIDIA_VISIBLE_DEVICES\"; exit 0";
    let bundle =
        |env: &[&str]| Bundle::new(dir.path(), &image.rootfs).process(&["sh", "-euc", see], env);
    let one = bundle(&["NVIDIA_VISIBLE_DEVICES=1"])
        .run_with(&config, &runtime)
        .ok();
    for line in [
        "GPU-51eed001",
        "/dev/nvidia0: ENOENT",
        "/dev/nvidia1: ENXIO",
    ] {
        assert!(one.contains(line), "{line}: {one}");
    }
    // With --gpus, Docker adds its hook too.
    let hook = nvidia_ctk::link(dir.path(), NAME);
    let both = bundle(&["NVIDIA_VISIBLE_DEVICES=1"]).hook("prestart", &hook, &[NAME, "prestart"]);
    assert_eq!(both.run_with(&config, &runtime).ok(), one);
    // Without a request, and with CDI, config.json does not change.
    for env in [&[][..], &["NVIDIA_VISIBLE_DEVICES=void"]] {
        let plain = bundle(env).run_with(&config, &runtime);
        assert!(plain.stdout.contains("/dev/nvidia1: ENOENT"), "{plain:?}");
        let spec: Value = serde_json::from_slice(
            &std::fs::read(dir.path().join("runc-bundle/config.json")).unwrap(),
        )
        .unwrap();
        assert_eq!(spec.get("hooks"), None);
    }
    // The engine takes the message from the log.
    std::fs::remove_file(&log).ok();
    let wrong = bundle(&["NVIDIA_VISIBLE_DEVICES=7"]).run_with(&config, &runtime);
    assert_eq!(wrong.code, Some(1), "{wrong:?}");
    assert_says(&wrong.stderr, &["(ONH-030)"]);
    let entry: Value = serde_json::from_str(read(&log).trim()).unwrap();
    assert_eq!(entry["level"], "error");
    assert!(
        entry["msg"].as_str().unwrap().contains("(ONH-030)"),
        "{entry}"
    );
    // Other commands are runc's, and its environment is the caller's.
    let version = run(Command::new(runtime.split(' ').next().unwrap()).arg("--version")).ok();
    assert!(version.starts_with("runc version"), "{version}");
    // The first runtime of config.toml that exists.
    let other = dir.path().join("other");
    shell!(
        "printf '#!/bin/sh\\necho other \"$@\"\\n' >'{0}'; chmod 755 '{0}'",
        other.display()
    );
    let program = runtime.split(' ').next().unwrap();
    for (runtimes, code, text) in rows! {
        format!("[\"/gone\", {program:?}, {other:?}]"), 0, "other --version\n";
        "[\"/gone\"]".to_owned(), 1, "none of the runtimes [\"/gone\"] exists (ONH-001)\nhint: install the package runc";
        "1".to_owned(), 0, "runc version";
    } {
        let keys = format!("[nvidia-container-runtime]\nruntimes = {runtimes}\n");
        write_file(
            dir.path().join("etc/nvidia-container-runtime/config.toml"),
            keys,
        );
        let ran = sh_unshared(&format!("{config}; {program} --version"));
        assert!(
            ran.code == Some(code) && format!("{}{}", ran.stdout, ran.stderr).contains(text),
            "{runtimes}: {ran:?}"
        );
    }
}

/// The file, not the name, decides whether a hook with NVIDIA's name is another program. One of two hooks sets the container up,
/// whatever the order.
fn which_of_two_hooks() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let links = dir.path().join("links");
    std::fs::create_dir(&links).unwrap();
    let copies = dir.path().join("copies");
    std::fs::create_dir(&copies).unwrap();
    for dir in [dir.path(), &links, &copies] {
        copy_nvml_program(dir);
    }
    for name in [NAME, "nvidia-container-toolkit"] {
        link(&links, name);
        std::fs::copy(HOOK, copies.join(name)).unwrap();
    }
    let link_to_link = dir.path().join("nvidia-container-runtime-hook");
    std::os::unix::fs::symlink(links.join(NAME), &link_to_link).unwrap();
    std::fs::hard_link(HOOK, links.join("hard")).ok();
    // The links of the package -compat lead to a program that starts the hook.
    let packaged = dir.path().join("packaged");
    std::fs::create_dir(&packaged).unwrap();
    let packaged = nvidia_ctk::link(&packaged, NAME);
    // The caller, the hooks in config.json, and whether the caller sets up the container.
    for (caller, named, does_it) in rows! {
        PathBuf::from(HOOK), links.join(NAME), true;
        PathBuf::from(HOOK), link_to_link.clone(), true;
        PathBuf::from(HOOK), packaged.clone(), true;
        packaged.clone(), packaged.clone(), true;
        packaged.clone(), copies.join(NAME), false;
        links.join(NAME), PathBuf::from(HOOK), true;
        links.join(NAME), links.join("nvidia-container-toolkit"), true;
        PathBuf::from(HOOK), copies.join(NAME), false;
        links.join(NAME), copies.join("nvidia-container-toolkit"), false;
        copies.join(NAME), copies.join(NAME), true;
        PathBuf::from(HOOK), PathBuf::from("/gone/nvidia-container-runtime-hook"), false;
    } {
        let container = Waiting::start(dir.path(), &image.rootfs, &[], "");
        let hooks = json!({"prestart": [{"path": named, "args": ["x", "prestart"]}]});
        container.set_spec(ALL_GPUS, &json!({"hooks": hooks}));
        let mut hook = Command::new(&caller);
        let config = if caller.ends_with("oci-nvidia-hook") {
            "--config"
        } else {
            "-config"
        };
        let ran = run_with(
            hook.arg(config)
                .arg(&fake.config)
                .arg("prestart")
                .env_clear(),
            container.state().as_bytes(),
        );
        ran.ok();
        let there = container.exec("test -e /dev/nvidia0").code == Some(0);
        assert_eq!(there, does_it, "{caller:?} with {named:?}");
    }
}

/// Flags in the syntax of Go, and their effect.
fn the_hooks_command_line() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let config = fake.config.to_str().unwrap();
    for (name, flags) in [
        (NAME, &["-config", config][..]),
        ("nvidia-container-toolkit", &["--config", config]),
        (NAME, &[&format!("-config={config}"), "-debug"]),
    ] {
        let names = scratch();
        let container =
            Waiting::start(dir.path(), &image.rootfs, &["NVIDIA_VISIBLE_DEVICES=1"], "");
        let mut hook = Command::new(link(names.path(), name));
        let ran = run_with(
            hook.args(flags).args(["prestart", "more"]).env_clear(),
            container.state().as_bytes(),
        );
        assert_eq!(
            ran.stderr.contains("note: waiting: injected "),
            flags.contains(&"-debug"),
            "{ran:?}"
        );
        assert_eq!(ran.ok(), "");
        assert!(container.output("nvidia-smi -L").contains("GPU-51eed001"));
    }
}
