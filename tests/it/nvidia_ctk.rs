//! The program called as `nvidia-ctk hook` and `nvidia-cdi-hook`: the hook entries of CDI specs of NVIDIA's toolkit and device
//! plugin. The specs here contain their entries verbatim, with the mounts and nodes of the fake driver.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use cdi_spec::spec::{ContainerEdits, Spec};

use crate::built;
use crate::cdi::{GPU_0, generate, write_spec};
use crate::cdi_containers::{only_spec, with_mounts};
use crate::driver::{FakeDriver, Image, NEEDS_COMPAT, Waiting};
use crate::engine::{Cgroup, IMAGE, Podman};
use crate::ldconfig::LIST;
use crate::support::{
    HOOK, Need, Ran, assert_says, chmod, run, run_with, scratch, sh, sh_unshared, shell, snapshot,
    write_file,
};

const BUILD: &[Need] = &[Need::Program("cc"), Need::Build, Need::StaticLibc];
const NEEDS_RUNC: &[Need] = &[
    Need::Root,
    Need::Programs(&["podman", "runc", "cc"]),
    Need::Build,
    Need::StaticLibc,
];
const NEEDS_CRUN: &[Need] = &[
    Need::Root,
    Need::Programs(&["podman", "crun", "cc"]),
    Need::Build,
    Need::StaticLibc,
];

tests! {
    NEEDS_RUNC => specs_of_each_version_with_runc = specs_of_each_version(Cgroup::AsMounted);
    NEEDS_CRUN => specs_of_each_version_with_crun = specs_of_each_version(Cgroup::WithCrun);
    NEEDS_COMPAT => cuda_compat, device_nodes_are_not_modified, modes, application_profile,
        links_of_the_image_are_not_followed, state_in_a_file;
    BUILD => what_is_not_known;
    NEEDS_COMPAT => the_commands_of_guides;
}

/// Creates a link with this name that leads to the program of the package -compat.
pub fn link(dir: &Path, name: &str) -> PathBuf {
    let link = dir.join(name);
    symlink(built::static_hook(), &link).unwrap();
    link
}

/// The entries of the toolkit of this version, for 17 the entries of 1.17.5 to 1.17.7; the device plugins 0.17 to 0.20 have the entries of 1.17 to
/// 1.20.
fn entries(program: &Path, version: u32, edits: &ContainerEdits, minor: u32) -> Vec<Value> {
    let path = program.to_str().unwrap();
    let name = program.file_name().unwrap().to_str().unwrap();
    let mut dirs: Vec<_> = edits
        .mounts
        .iter()
        .map(|mount| Path::new(&mount.container_path))
        .collect();
    dirs.retain(|path| path.to_str().unwrap().contains(".so."));
    let library = dirs
        .iter()
        .find(|path| path.to_str().unwrap().contains("/libcuda.so."))
        .unwrap();
    let dir = library.parent().unwrap().to_str().unwrap().to_owned();
    let mut folders: Vec<_> = dirs
        .iter()
        .map(|path| path.parent().unwrap().to_str().unwrap().to_owned())
        .collect();
    folders.sort();
    folders.dedup();
    let folders = folders
        .iter()
        .flat_map(|dir| ["--folder".to_owned(), dir.clone()])
        .collect();
    let entry = |verb: &str, options: Vec<String>| {
        let group = (name == "nvidia-ctk").then(|| "hook".to_owned());
        let args: Vec<_> = [name.to_owned()]
            .into_iter()
            .chain(group)
            .chain([verb.to_owned()])
            .chain(options)
            .collect();
        let mut entry = json!({"hookName": "createContainer", "path": path, "args": args});
        // Since 1.17.8: before, runc passed the environment of the image to the hooks (CVE-2025-23266).
        if version > 17 {
            entry["env"] = json!(["NVIDIA_CTK_DEBUG=false"]);
        }
        entry
    };
    let mut all = vec![entry(
        "create-symlinks",
        vec!["--link".into(), format!("libcuda.so.1::{dir}/libcuda.so")],
    )];
    match version {
        17 => all.push(entry(
            "enable-cuda-compat",
            vec!["--host-driver-version=535.183.01".into()],
        )),
        _ => all.push(entry(
            "enable-cuda-compat",
            vec![
                "--host-driver-version=535.183.01".into(),
                "--host-cuda-version=12.2".into(),
            ],
        )),
    }
    all.push(entry("update-ldcache", folders));
    if version >= 18 {
        all.push(entry("disable-device-node-modification", vec![]));
    }
    if version >= 20 {
        all.push(entry("update-application-profile", vec![]));
    }
    if version == 17 {
        all.push(entry(
            "chmod",
            vec![
                "--mode".into(),
                "755".into(),
                "--path".into(),
                "/dev".into(),
            ],
        ));
    }
    assert!(minor < 64);
    all
}

/// The plugin's own CDI kind, from our spec.
pub fn spec_of_nvidia(fake: &FakeDriver, program: &Path, version: u32) -> (Spec, Value) {
    let ours = generate(fake, &["--hook-path", HOOK]);
    let dir = scratch();
    let path = dir.path().join("x.json");
    write_spec(fake, &path);
    let mut spec: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    spec["kind"] = "k8s.device-plugin.nvidia.com/gpu".into();
    spec["cdiVersion"] = "0.5.0".into();
    spec["containerEdits"]["hooks"] = entries(program, version, &ours.container_edits, 0).into();
    spec["containerEdits"]["env"] = json!(["NVIDIA_VISIBLE_DEVICES=void"]);
    for device in spec["devices"].as_array_mut().unwrap() {
        device["containerEdits"]
            .as_object_mut()
            .unwrap()
            .remove("hooks");
    }
    (ours, spec)
}

fn specs_of_each_version(cgroup: Cgroup) {
    let dir = scratch();
    let fake = FakeDriver::new(&["--gpus", "1", "--layout", "lib64"]);
    let libraries =
        "libcuda.so.1 libnvidia-ml.so.1 libnvidia-ptxjitcompiler.so.1 libnvidia-nvvm.so.4";
    let look = format!("nvidia-smi -L; probe-dlopen {libraries}; readlink /usr/lib64/libcuda.so");
    let script = format!(
        "{look}; ldconfig; {look}; cat /etc/nvidia/nvidia-application-profiles-rc.d/* || true"
    );
    for (name, version) in [
        ("nvidia-ctk", 17),
        ("nvidia-ctk", 18),
        ("nvidia-cdi-hook", 18),
        ("nvidia-cdi-hook", 20),
        ("nvidia-ctk", 20),
    ] {
        let bin = scratch();
        let (_, spec) = spec_of_nvidia(&fake, &link(bin.path(), name), version);
        let path = dir.path().join("plugin.json");
        write_file(&path, spec.to_string());
        let arguments = [
            "--device=k8s.device-plugin.nvidia.com/gpu=0",
            IMAGE,
            "sh",
            "-euc",
            &script,
        ];
        let text = Podman::shared()
            .run_after(&only_spec(&path), cgroup, &arguments)
            .ok();
        assert_eq!(text.matches(GPU_0).count(), 2, "{name} {version}: {text}");
        assert_eq!(
            text.matches(": ok /usr/lib64/").count(),
            8,
            "{name} {version}: {text}"
        );
        assert_eq!(
            text.matches("\nlibcuda.so.1\n").count(),
            2,
            "{name} {version}: {text}"
        );
        assert_eq!(
            text.contains("EGLVisibleDGPUDevices\", 0x1]"),
            version == 20,
            "{name} {version}: {text}"
        );
    }
}

/// Calls one hook, like runc.
fn call(container: &Waiting, program: &Path, args: &[&str]) -> Ran {
    container.create_container_program(
        program,
        &args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>(),
    )
}

fn ctk() -> (tempfile::TempDir, PathBuf) {
    let dir = scratch();
    let program = link(dir.path(), "nvidia-cdi-hook");
    (dir, program)
}

/// The image's newer libcuda is found first, also after its ldconfig has run.
fn cuda_compat() {
    let ((_bin, program), fake) = (
        ctk(),
        FakeDriver::new(&["--gpus", "1", "--layout", "lib64"]),
    );
    let (dir, image) = crate::ldconfig::with_compat("include");
    let (ours, _) = spec_of_nvidia(&fake, &program, 20);
    let container = with_mounts(dir.path(), &image.rootfs, &ours.container_edits);
    let hooks = entries(&program, 20, &ours.container_edits, 0);
    container.set_spec_field("mounts", mounts_of(&ours.container_edits));
    container.set_hooks("createContainer", &json!(hooks));
    for hook in &hooks {
        let args: Vec<String> = serde_json::from_value(hook["args"].clone()).unwrap();
        container
            .create_container_program(&program, &args[1..])
            .ok();
    }
    for look in ["true", "ldconfig"] {
        let found = container.output(&format!(
            "{look}; probe-dlopen libcuda.so.1 libnvidia-ml.so.1"
        ));
        assert!(
            found.contains("libcuda.so.1: ok /usr/local/cuda/compat/libcuda.so.1"),
            "{look}: {found}"
        );
        assert!(
            found.contains("libnvidia-ml.so.1: ok /usr/lib64/libnvidia-ml.so.1"),
            "{look}: {found}"
        );
    }
    // An older one is not.
    let old = "enable-cuda-compat --host-driver-version=580.1";
    call(&container, &program, &old.split(' ').collect::<Vec<_>>()).ok();
    assert!(
        container.output(&format!("cat {LIST}")).contains("compat"),
        "update-ldcache decides"
    );
}

fn mounts_of(edits: &ContainerEdits) -> Value {
    let mount = |mount: &cdi_spec::spec::Mount| json!({"source": mount.host_path, "destination": mount.container_path, "type": "bind", "options": ["rbind", "ro"]});
    edits.mounts.iter().map(mount).collect()
}

const PARAMS: &str = "mount -t tmpfs proc $rootfs/proc; mkdir -p $rootfs/proc/driver/nvidia/gpus/x; \
                      printf 'Mobile: 0\\nModifyDeviceFiles: 1\\nX: 1\\n' >$rootfs/proc/driver/nvidia/params";

fn device_nodes_are_not_modified() {
    let (_bin, program) = ctk();
    let container = Waiting::debian(&[], PARAMS);
    let see = "cd /proc/driver/nvidia; cat params; ls -d gpus/x; echo >>params";
    let mut mounts = String::new();
    for _ in 0..2 {
        call(&container, &program, &["disable-device-node-modification"]).ok();
        let seen = container.exec(see);
        assert_eq!(
            seen.stdout, "Mobile: 0\nModifyDeviceFiles: 0\nX: 1\ngpus/x\n",
            "{seen:?}"
        );
        assert!(seen.stderr.contains("Read-only file system"), "{seen:?}");
        assert!(
            mounts.is_empty() || mounts == container.mountinfo(),
            "idempotent"
        );
        mounts = container.mountinfo();
    }
    // A container that does not see the driver there.
    let container = Waiting::debian(&[], "");
    call(&container, &program, &["disable-device-node-modification"]).ok();
    // A file of the kernel at that path is not read: a read of this one takes messages from syslog.
    let (dir, image) = (scratch(), scratch());
    let image = Image::new(image.path(), &["--layout", "debian"]);
    let kernels = format!("{PARAMS}; mount --bind /proc/kmsg $rootfs/proc/driver/nvidia/params");
    let container = Waiting::start(dir.path(), &image.rootfs, &[], &kernels);
    let mounts = container.mountinfo();
    call(&container, &program, &["disable-device-node-modification"]).ok();
    assert_eq!(container.mountinfo(), mounts);
}

/// Files of the container are changed and nothing else: a volume belongs to the host.
fn modes() {
    let (_bin, program) = ctk();
    let dir = scratch();
    let (canary, node) = (dir.path().join("canary"), dir.path().join("canary/node"));
    std::fs::create_dir(&canary).unwrap();
    chmod(&canary, 0o700);
    shell!("mknod -m 600 '{}' c 1 3", node.display());
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    shell!(
        "cd '{}'; mkdir volume own; ln -s '{}' escape",
        image.rootfs.display(),
        canary.display()
    );
    let mounts = format!(
        "mount --bind '{0}' $rootfs/volume; mkdir -m 700 $rootfs/dev/dri; touch $rootfs/dev/nvidia0; \
         mount --bind '{0}/node' $rootfs/dev/nvidia0",
        canary.display()
    );
    let paths = [
        "/volume",
        "/volume/node",
        "/escape",
        "/dev/nvidia0",
        "/own",
        "/dev/dri",
        "/missing",
    ];
    let before = snapshot(&canary);
    // The naive program changes the host's file.
    let naive = format!(
        "rootfs='{}'; unshare -m --propagation private sh -euc '{mounts}; chmod 777 $rootfs/volume/node'; \
         mode=$(stat -c %a '{}'); chmod 600 '{1}'; echo $mode",
        image.rootfs.display(),
        node.display()
    );
    assert_eq!(
        sh(&naive.replace("$rootfs", &image.rootfs.display().to_string()))
            .ok()
            .trim(),
        "777"
    );
    assert_eq!(snapshot(&canary), before);
    let container = Waiting::start(dir.path(), &image.rootfs, &[], &mounts);
    let mut args = vec!["chmod", "--mode", "751"];
    args.extend(paths.iter().flat_map(|path| ["--path", path]));
    let ran = call(&container, &program, &args);
    assert_eq!(ran.stderr.matches("ONH-303").count(), 4, "{ran:?}");
    assert_says(&ran.stderr, &["it is on a volume and belongs to the host"]);
    ran.ok();
    assert_eq!(snapshot(&canary), before);
    assert_eq!(container.output("stat -c %a /own /dev/dri"), "751\n751\n");
}

fn application_profile() {
    let (_bin, program) = ctk();
    let container = Waiting::debian(&[], "");
    container.set_spec_field(
        "linux",
        json!({"devices": [
            {"path": "/dev/nvidia3", "type": "c", "major": 195, "minor": 3},
            {"path": "/dev/nvidia-uvm", "type": "c", "major": 511, "minor": 0},
        ]}),
    );
    call(&container, &program, &["update-application-profile"]).ok();
    let profile =
        container.output("cat /etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf");
    assert_says(&profile, &["\"EGLVisibleDGPUDevices\", 0x8]"]);
}

/// CVE-2024-0134 and CVE-2025-23267, with these names.
fn links_of_the_image_are_not_followed() {
    let (_bin, program) = ctk();
    let fake = FakeDriver::new(&["--gpus", "1", "--layout", "lib64"]);
    let (ours, _) = spec_of_nvidia(&fake, &program, 18);
    for (image, naive, args) in rows! {
        "ln -s $canary $rootfs/pwn", "ln -s x $rootfs/pwn/x", &["create-symlinks", "--link", "x::/pwn/x"][..];
        "ln -s ../../../../../../../../../../../..$canary $rootfs/pwn", "ln -s x $rootfs/pwn/x",
            &["create-symlinks", "--link", "x::/pwn/x"];
        "ln -sf $canary/file $rootfs/etc/ld.so.cache", ": >$rootfs/etc/ld.so.cache", &["update-ldcache", "--folder", "/usr/lib64"];
        "rm -r $rootfs/etc/ld.so.conf.d; ln -s $canary $rootfs/etc/ld.so.conf.d", "echo x >$rootfs/etc/ld.so.conf.d/00-x.conf",
            &["update-ldcache", "--folder", "/usr/lib64"];
        "rm -r $rootfs/etc/ld.so.conf.d; ln -s $canary $rootfs/etc/ld.so.conf.d", "echo x >$rootfs/etc/ld.so.conf.d/00-x.conf",
            &["enable-cuda-compat", "--host-driver-version", "535.183.01"];
    } {
        for is_naive in [true, false] {
            let (dir, base) = crate::ldconfig::with_compat("include");
            let canary = dir.path().join("canary");
            std::fs::create_dir(&canary).unwrap();
            write_file(canary.join("file"), "host");
            let before = snapshot(&canary);
            let script = |script: &str| {
                shell!(
                    "rootfs='{}'; canary='{}'; {script}",
                    base.rootfs.display(),
                    canary.display()
                )
            };
            script(image);
            if is_naive {
                script(naive);
                assert_ne!(
                    snapshot(&canary),
                    before,
                    "{naive}: the naive program did not fall"
                );
                continue;
            }
            let container = with_mounts(dir.path(), &base.rootfs, &ours.container_edits);
            container.set_spec_field("mounts", mounts_of(&ours.container_edits));
            let ran = call(&container, &program, args);
            assert_eq!(snapshot(&canary), before, "{args:?}: {ran:?}");
            ran.ok();
        }
    }
}

fn state_in_a_file() {
    let (_bin, program) = ctk();
    let container = Waiting::debian(&[], "");
    let state = container.dir().join("state.json");
    write_file(&state, container.state());
    let mut enter = Command::new("nsenter");
    enter
        .args(["-m", "-t", &container.pid().to_string()])
        .arg(&program)
        .env_clear();
    enter
        .args(["create-symlinks", "--link", "x::/y", "--container-spec"])
        .arg(&state);
    run_with(enter.env("PATH", "/usr/bin:/bin"), b"").ok();
    assert_eq!(container.output("readlink /y"), "x\n");
    // Outside of the container, it would change the host's mounts.
    let mut outside = Command::new(&program);
    let ran = run_with(
        outside.args(["create-symlinks", "--link", "x::/z"]),
        container.state().as_bytes(),
    );
    assert!(
        ran.failed(1)
            .contains("the hook is not in the container's mount namespace")
    );
}

fn what_is_not_known() {
    let dir = scratch();
    for name in ["nvidia-ctk", "nvidia-cdi-hook"] {
        let program = link(dir.path(), name);
        let run = |line: &str| {
            run(Command::new(&program)
                .args(line.split_whitespace())
                .env_clear())
        };
        let hook = if name == "nvidia-ctk" { "hook " } else { "" };
        let ran = run(&format!("{hook}new-hook --x"));
        assert_says(&ran.stderr, &["unknown CDI hook \"new-hook\"", "ONH-316"]);
        ran.ok();
        run(hook).ok();
        let stderr = run(&format!("{hook}update-ldcache --new x")).failed(2);
        assert_says(
            &stderr,
            &["unknown option \"--new\" of update-ldcache (ONH-002)\nhint: "],
        );
        assert_says(
            &stderr,
            &["create-symlinks, update-ldcache, enable-cuda-compat"],
        );
        assert!(
            run(&format!("{hook}chmod --help"))
                .ok()
                .contains("--mode OCTAL --path PATH")
        );
        assert!(
            run("--version")
                .ok()
                .starts_with(&format!("{name} version "))
        );
        let stderr = run(&format!("{hook}create-symlinks --link a::/b")).failed(1);
        assert_says(&stderr, &["cannot read the container state"]);
    }
}

/// The commands of NVIDIA's installation guide and of scripts, in this order on one host: each exit status, and a part of the output.
const GUIDE: [(&str, i32, &str); 37] = rows! {
    "nvidia-ctk --version", 0, "nvidia-ctk version ";
    "nvidia-ctk -v", 0, "nvidia-ctk version ";
    "nvidia-ctk", 2, "a command is missing";
    "nvidia-ctk hok", 2, "nvidia-ctk: invalid command line: unrecognized subcommand \"hok\"";
    "nvidia-ctk cdi", 2, "a command is missing";
    "nvidia-ctk system", 2, "a command is missing";
    "nvidia-ctk --help", 0, "config";
    "nvidia-ctk config", 0, "root = ";
    "nvidia-ctk config default", 0, "#no-cgroups = false";
    "nvidia-ctk runtime configure --runtime=docker --dry-run", 0, "\"path\": \"$BIN/nvidia-container-runtime\"";
    "cat /etc/docker/daemon.json", 1, "";
    "nvidia-ctk runtime configure --runtime=docker", 0, "restart docker, for example with \"systemctl restart docker\"";
    "cat /etc/docker/daemon.json", 0, "\"cdi\": true";
    "nvidia-ctk runtime configure --runtime=docker", 0, "\"/etc/docker/daemon.json\" is already configured";
    "nvidia-ctk runtime configure --runtime=docker --config=$HOME/.config/docker/daemon.json", 0,
        "/.config/docker/daemon.json\"; restart docker";
    "nvidia-ctk runtime configure --runtime=docker --set-as-default --cdi.enabled", 0, "wrote ";
    "cat /etc/docker/daemon.json", 0, "\"default-runtime\": \"nvidia\"";
    "nvidia-ctk runtime configure --runtime=containerd", 0, "wrote \"/etc/containerd/config.toml\"";
    "cat /etc/containerd/config.toml", 0, "enable_cdi = true";
    "nvidia-ctk runtime configure --runtime=crio", 0, "CRI-O";
    "nvidia-ctk runtime configure --runtime=lxc", 2, "[possible values: crio, podman, docker, containerd]";
    "nvidia-ctk runtime configure --runtime=crio --config-mode=oci-hook", 2, "invalid value";
    "nvidia-ctk config --set nvidia-container-cli.no-cgroups --in-place", 0, "";
    "grep -c '^no-cgroups = true' /etc/nvidia-container-runtime/config.toml", 0, "1";
    "nvidia-ctk config --in-place --set nvidia-container-runtime.mode=cdi", 0, "nvidia-container-runtime.mode has no effect";
    "nvidia-ctk config --set nvidia-container-runtime-hook.skip-mode-detection=true --in-place", 0, "no effect";
    "nvidia-ctk config --set nvidia-container-cli.no-cgruops", 2, "did you mean nvidia-container-cli.no-cgroups?";
    "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml", 0, "wrote /etc/cdi/nvidia.yaml: nvidia.com/gpu=0";
    "nvidia-ctk cdi generate", 0, "kind: nvidia.com/gpu";
    "nvidia-ctk cdi generate --device-name-strategy=type-index --format=json", 0, "\"name\": \"gpu0\"";
    "nvidia-ctk cdi generate --mode=nvml --vendor=example.com --class=accel", 0, "kind: example.com/accel";
    "nvidia-ctk cdi generate --mode=csv", 2, "invalid value \"csv\"";
    "nvidia-ctk cdi generate --mode=gdrcopy", 1, "hint: load the kernel module on the host: \"modprobe gdrdrv\"";
    "nvidia-ctk cdi list", 0, "nvidia.com/gpu=all";
    "nvidia-ctk cdi transform root --from=/usr/lib64 --to=/x --relative-to=container --input=/etc/cdi/nvidia.yaml", 0,
        "containerPath: /x/libcuda.so";
    "nvidia-ctk info", 0, "GPU-51eed000";
    "nvidia-ctk system create-dev-char-symlinks --create-all", 0, "";
};

fn the_commands_of_guides() {
    let (bin, dir) = (scratch(), scratch());
    link(bin.path(), "nvidia-ctk");
    let program = built::static_hook().parent().unwrap().display().to_string();
    let fake = FakeDriver::new(&["--gpus", "1", "--layout", "lib64"]);
    let mut script = format!(
        "cd '{dir}'; mount -t tmpfs tmpfs .; mkdir upper work home bin bin-work\n\
         mount -t overlay -o lowerdir=/usr/bin,upperdir=bin,workdir=bin-work overlay /usr/bin; rm -f /usr/bin/crio\n\
         mount -t overlay -o lowerdir=/etc,upperdir=upper,workdir=work overlay /etc\n\
         rm -rf /etc/docker /etc/containerd /etc/crio /etc/containers/oci /etc/cdi /etc/nvidia-container-runtime\n\
         mkdir /etc/nvidia-container-runtime; cp '{config}' /etc/nvidia-container-runtime/config.toml\n\
         export HOME='{dir}/home' PATH='{bin}':/usr/sbin:/usr/bin:/sbin:/bin NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=/ignored\n",
        dir = dir.path().display(),
        bin = bin.path().display(),
        config = fake.config.display()
    );
    for (line, ..) in GUIDE {
        script += &format!(
            "code=0; said=$({line} 2>&1) || code=$?; printf '%s\\0%s\\0' $code \"$said\"\n"
        );
    }
    let said = sh_unshared(&script).ok();
    let parts: Vec<_> = said.split('\0').collect();
    assert_eq!(parts.len(), 2 * GUIDE.len() + 1, "{said}");
    for ((line, code, text), said) in GUIDE.iter().zip(parts.chunks(2)) {
        let text = text.replace("$BIN", &program);
        assert_eq!(said[0], code.to_string(), "{line}: {}", said[1]);
        assert!(said[1].contains(&text), "{line}: {}", said[1]);
        assert!(
            *code != 2 || said[1].contains("\nhint: "),
            "{line}: {}",
            said[1]
        );
    }
}
