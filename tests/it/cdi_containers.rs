//! CDI in containers: how engines and runtimes apply a spec, and what its hook entries do.

use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use nix::sched::CloneFlags;
use serde_json::{Value, json};

use base::paths::ContainerPath;
use base::sys::{child, ns};
use cdi_spec::spec::{ContainerEdits, Hook, Spec};
use engines::Version;
use nvidia_host::cdi::entry::RootfsEdits;

use crate::cdi::{GPU_0, GPU_1, MIG_1, edits_of, generate, write_spec, write_spec_with};
use crate::driver::{ALL_GPUS, FakeDriver, Image, Waiting};
use crate::engine::{Cgroup, IMAGE, NEEDS, NEEDS_CRUN, NEEDS_V2, Podman};
use crate::live::{DRI_LINKS, LINKS_OF_GPU_1};
use crate::support::{
    HOOK, Need, assert_lacks, assert_says, fingerprint, read, run, run_with, scratch, shell,
    write_file,
};
use crate::why::{isolated, why};

tests! {
    crate::driver::NEEDS => hook_entry, volumes_at_the_directory_of_libraries, volumes_at_the_paths_of_nodes,
        hook_entries_at_the_wrong_stage, hook_entries_of_several_specs, libraries_that_are_opened_by_path, cuda_compat;
    NEEDS => the_containers_environment_does_not_reach_the_hook,
        podman_read_only = podman_in(Cgroup::AsMounted, "--read-only"), podman_with_a_user_namespace,
        podman_gives_nodes_of_a_group_to_users, podman_gives_devices_by_name, links_of_dri_nodes_at_all_ways;
    &[Need::OwnProcess, Need::Root] => a_thread_of_the_runtime;
    NEEDS_V2 => podman_on_cgroup_v2 = podman_in(Cgroup::V2, "--tty=false");
    NEEDS_CRUN => podman_with_crun = podman_in(Cgroup::WithCrun, "--tty=false");
}

/// A container for which the engine has applied its part, and that waits for the hook entries.
pub fn with_mounts(dir: &Path, rootfs: &Path, edits: &ContainerEdits) -> Waiting {
    with_mounts_after(dir, rootfs, edits, "")
}

/// The same with volumes that this shell script mounts first.
pub fn with_mounts_after(
    dir: &Path,
    rootfs: &Path,
    edits: &ContainerEdits,
    volumes: &str,
) -> Waiting {
    let mut before = format!(
        "{volumes}mount -t tmpfs proc $rootfs/proc; mkdir -p $rootfs/proc/driver/nvidia/gpus/secret\n"
    );
    for mount in &edits.mounts {
        let (from, to) = (&mount.host_path, format!("$rootfs{}", mount.container_path));
        let flag = mount
            .options
            .iter()
            .find(|option| *option == "ro")
            .map_or("rw", String::as_str);
        before +=
            &format!("mkdir -p $(dirname {to}); touch {to}; mount -o bind,{flag} {from} {to}\n");
    }
    let container = Waiting::start(dir, rootfs, &[], &before);
    container.set_hooks(&edits.hooks[0].hook_name, &json!(edits.hooks));
    let nodes = edits.device_nodes.iter();
    let devices: Vec<_> =
        nodes.map(|node| json!({"path": node.path, "type": "c", "major": node.major, "minor": node.minor})).collect();
    container.set_spec_field("linux", json!({ "devices": devices }));
    container
}

/// VDPAU and GBM open their libraries by path in the library directory of the image, which differs from the host's.
fn libraries_that_are_opened_by_path() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let host = fake.root.join("usr/lib/x86_64-linux-gnu");
    std::fs::create_dir_all(host.join("vdpau")).unwrap();
    for (name, soname) in [
        ("vdpau/libvdpau_nvidia", "libvdpau_nvidia.so.1"),
        ("libnvidia-allocator", "libnvidia-allocator.so.1"),
    ] {
        let library = host.join(format!("{name}.so.535.183.01"));
        let soname = format!("-Wl,-soname,{soname}");
        run(Command::new("cc")
            .args(["-shared", "-fPIC", "-x", "c", "/dev/null", &soname, "-o"])
            .arg(library))
        .ok();
    }
    let edits = generate(&fake, &["--hook-path", HOOK]).container_edits;
    let image = Image::new(dir.path(), &["--layout", "lib64"]);
    let container = with_mounts(dir.path(), &image.rootfs, &edits);
    container
        .create_runtime_hook(&edits.hooks[0].args[1..])
        .ok();
    let paths = "/usr/lib64/vdpau/libvdpau_nvidia.so.1 /usr/lib64/gbm/nvidia-drm_gbm.so";
    let found = container.output(&format!(
        "for path in {paths}; do readlink -f $path; done; probe-dlopen {paths}"
    ));
    assert_says(
        &found,
        &["/usr/lib/x86_64-linux-gnu/vdpau/libvdpau_nvidia.so.535.183.01\n"],
    );
    assert_says(
        &found,
        &["/usr/lib/x86_64-linux-gnu/libnvidia-allocator.so.535.183.01\n"],
    );
    assert_eq!(found.matches(": ok ").count(), 2, "{found}");
}

/// A newer libcuda of the image is used in the same way as in the hook mode.
fn cuda_compat() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    // The host's linker cache does not list the development link.
    let root = fake.root.display();
    shell!("rm '{root}/usr/lib/x86_64-linux-gnu/libcuda.so'; /sbin/ldconfig -r '{root}'");
    for (mode, theirs) in [("ldconfig", true), ("disabled", false)] {
        fake.configure(&format!(
            "[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = \"{mode}\""
        ));
        let edits = generate(&fake, &["--hook-path", HOOK]).container_edits;
        let (dir, image) = Image::debian();
        let compat = image.rootfs.join("usr/local/cuda/compat");
        std::fs::create_dir_all(&compat).unwrap();
        crate::features::compat_library(&compat.join("libcuda.so.575.57.08"), "");
        std::os::unix::fs::symlink("libcuda.so.575.57.08", compat.join("libcuda.so.1")).unwrap();
        let container = with_mounts(dir.path(), &image.rootfs, &edits);
        let hook = &edits.hooks[0];
        run_with(
            isolated(dir.path()).args(&hook.args[1..]),
            container.state().as_bytes(),
        )
        .ok();
        // A process that opens both names must not get two libraries.
        let found = container.output("probe-dlopen libcuda.so.1 libcuda.so");
        let from_image = found.matches("/usr/local/cuda/compat/libcuda.so").count();
        assert_eq!(from_image, if theirs { 2 } else { 0 }, "{mode}: {found}");
        assert_eq!(
            why(dir.path(), &["waiting"]).ok().contains("ONH-231"),
            theirs,
            "{mode}"
        );
    }
}

/// The hook entry, which does the work of two devices of three.
fn hook_entry() {
    let fake = FakeDriver::new(&["--gpus", "3"]);
    let spec = generate(&fake, &["--hook-path", HOOK]);
    assert!(
        spec.devices
            .iter()
            .all(|device| device.container_edits.hooks.is_empty()),
        "{spec:?}"
    );
    for hook in &spec.container_edits.hooks {
        assert_eq!(hook.hook_name, "createRuntime", "{hook:?}");
    }
    let mounts = || {
        read("/proc/thread-self/mountinfo")
            .matches("/image/usr/lib/")
            .count()
    };
    let before = mounts();
    do_their_work(&spec, 1);
    assert_eq!(
        mounts(),
        before,
        "they are in the container, not on the host"
    );
}

/// The container has devices of several specs, and so several entries.
fn hook_entries_of_several_specs() {
    let fake = FakeDriver::new(&["--gpus", "3"]);
    let mut spec = generate(&fake, &["--hook-path", HOOK]);
    let common = spec.container_edits.hooks.remove(0);
    let mut all = RootfsEdits::from_entry(&common.args).unwrap();
    let with_node = std::mem::take(&mut all.with_node);
    for edits in spec
        .devices
        .iter_mut()
        .map(|device| &mut device.container_edits)
    {
        let node = ContainerPath::new(&edits.device_nodes[0].path).unwrap();
        let of_node = with_node
            .iter()
            .find(|(known, _)| *known == node)
            .unwrap()
            .1
            .clone();
        let more = RootfsEdits {
            mask: all.mask.clone(),
            ..of_node
        };
        edits.hooks.push(Hook {
            args: more.to_args().unwrap(),
            ..common.clone()
        });
    }
    spec.container_edits.hooks.push(Hook {
        args: all.to_args().unwrap(),
        ..common
    });
    do_their_work(&spec, 3);
}

/// Another file or device at the path of a node does not show the container more of /proc/driver/nvidia.
fn volumes_at_the_paths_of_nodes() {
    let fake = FakeDriver::new(&["--gpus", "3"]);
    let spec = generate(&fake, &["--hook-path", HOOK]);
    let edits = edits_of(&spec, &["0"]);
    let node = fake.root.join("dev/nvidia1").display().to_string();
    let (one, two) = ("0000:01:00.0\n", "0000:01:00.0\n0000:02:00.0\n");
    for (source, shown) in [("/etc/hostname", one), ("/dev/null", one), (&*node, two)] {
        let (dir, image) = Image::debian();
        let container = with_mounts(dir.path(), &image.rootfs, &edits);
        let volume = json!({"type": "bind", "source": source, "destination": "/dev/nvidia1", "options": ["bind"]});
        container.set_spec_field("mounts", json!([volume]));
        let device = |path: &str, major: u32, minor: u32| json!({"path": path, "type": "c", "major": major, "minor": minor});
        let devices = [device("/dev/nvidia0", 195, 0)];
        container.set_spec_field("linux", json!({ "devices": devices }));
        container
            .create_runtime_hook(&edits.hooks[0].args[1..])
            .ok();
        assert_eq!(
            container.output("ls /proc/driver/nvidia/gpus"),
            shown,
            "{source}"
        );
        // The runtime would create another device at the path of a GPU.
        let devices = [device("/dev/nvidia0", 195, 0), device("/dev/nvidia2", 1, 3)];
        container.set_spec_field("linux", json!({ "devices": devices }));
        let ran = container.create_runtime_hook(&edits.hooks[0].args[1..]);
        assert!(ran.failed(1).contains("(ONH-063)"), "{source}");
    }
}

/// The runtime mounts libraries in a directory that is on a volume. The hook covers the directory for the links that the container
/// requires, like in the hook mode, and the libraries stay visible.
fn volumes_at_the_directory_of_libraries() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let edits = generate(&fake, &["--hook-path", HOOK]).container_edits;
    let inner = "mkdir $rootfs$libdir/inner; mount -t tmpfs inner $rootfs$libdir/inner\n";
    for (flags, more, refused) in [("rw", "", false), ("ro", "", false), ("rw", inner, true)] {
        let (dir, image) = Image::debian();
        let volume = dir.path().join("volume");
        let mounts = format!(
            "libdir=/usr/lib/x86_64-linux-gnu; cp -a $rootfs$libdir {volume}; mount --bind {volume} $rootfs$libdir\n{more}",
            volume = volume.display(),
        );
        let container = with_mounts_after(dir.path(), &image.rootfs, &edits, &mounts);
        if flags == "ro" {
            // The runtime makes the volume read-only after it has mounted the files on it.
            let mut remount = Command::new("nsenter");
            remount.args([
                "-m",
                "-t",
                &container.pid().to_string(),
                "mount",
                "-o",
                "remount,bind,ro",
            ]);
            run(remount.arg(image.rootfs.join("usr/lib/x86_64-linux-gnu"))).ok();
        }
        let seen = || fingerprint(&volume, "");
        let before = (seen(), container.mountinfo());
        let ran = container.create_runtime_hook(&edits.hooks[0].args[1..]);
        let about = format!("{flags} {more}: {ran:?}");
        assert_eq!(seen(), before.0, "{about}");
        if refused {
            assert!(
                ran.failed(1)
                    .contains("other files are mounted in \"/usr/lib/x86_64-linux-gnu\""),
                "{about}"
            );
            assert_eq!(container.mountinfo(), before.1);
            continue;
        }
        assert_eq!(
            (ran.code, ran.stderr.contains("ONH-303")),
            (Some(0), false),
            "{about}"
        );
        assert_eq!(ran.stderr.contains("ONH-307"), flags == "rw", "{about}");
        let works = "probe-dlopen libnvidia-ml.so.1 libcuda.so.1 libcuda.so";
        assert_eq!(
            container.output(works).matches(": ok ").count(),
            3,
            "{about}"
        );
        let options = container.mount_options("/usr/lib/x86_64-linux-gnu/libcuda.so.535.183.01");
        assert_says(&options, &["ro", "nosuid", "nodev"]);
        let mounts = container.mountinfo();
        container
            .create_runtime_hook(&edits.hooks[0].args[1..])
            .ok();
        assert_eq!(
            container.mountinfo(),
            mounts,
            "a second run changes nothing"
        );
    }
}

/// The entry, called in the container's mount namespace and with a process id of its PID namespace.
fn hook_entries_at_the_wrong_stage() {
    let fake = FakeDriver::shared();
    let container = Waiting::debian(ALL_GPUS, "");
    let spec = generate(fake, &["--hook-path", HOOK]);
    let host_mounts = read("/proc/thread-self/mountinfo");
    for hook in &spec.container_edits.hooks {
        let stderr = container.create_container_hook(&hook.args[1..]).failed(1);
        assert_says(
            &stderr,
            &["cannot open the container of process 1", "(ONH-"],
        );
        assert_says(
            &stderr,
            &["\nhint: the hook must run at the prestart or createRuntime stage"],
        );
    }
    assert_eq!(read("/proc/thread-self/mountinfo"), host_mounts);
}

fn do_their_work(spec: &Spec, entries: usize) {
    let dir = scratch();
    let edits = edits_of(spec, &["0", "2"]);
    assert_eq!(edits.hooks.len(), entries);
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let rootfs = &image.rootfs;
    // The image has a libcuda with the name that programs open.
    std::fs::create_dir_all(rootfs.join("usr/lib/x86_64-linux-gnu")).unwrap();
    write_file(
        rootfs.join("usr/lib/x86_64-linux-gnu/libcuda.so.1"),
        "the image's",
    );
    let container = with_mounts(dir.path(), rootfs, &edits);
    let look = "cat /proc/driver/nvidia/params; ls /proc/driver/nvidia/gpus; ldconfig -p; ls -l /usr/lib/*/libcuda*; \
                cat /etc/nvidia/nvidia-application-profiles-rc.d/*; probe-dlopen libcuda.so.1";
    let mut seen = Vec::new();
    for hook in &edits.hooks {
        container.create_runtime_hook(&hook.args[1..]).ok();
        seen.push((container.output(look), container.mountinfo()));
    }
    let (text, _) = &seen[0];
    assert_says(
        text,
        &["ModifyDeviceFiles: 0", "EGLVisibleDGPUDevices\", 0x5]"],
    );
    assert_says(text, &["0000:01:00.0\n0000:03:00.0\n"]);
    assert_lacks(text, &["secret"]);
    assert_says(
        text,
        &["libcuda.so.1: ok /usr/lib/x86_64-linux-gnu/libcuda.so.1"],
    );
    assert!(
        seen.iter().all(|one| *one == seen[0]),
        "the others find it done: {seen:#?}"
    );
    let own = container.output("cat /proc/driver/nvidia/gpus/*/information");
    assert_eq!(own.matches("Device Minor").count(), 2, "{own}");
}

/// Creates the spec directories of a host, with this spec in one of them.
pub fn only_spec(path: &Path) -> String {
    format!(
        "mkdir -p /etc/cdi /run/cdi; mount -t tmpfs none /etc/cdi; mount -t tmpfs none /run/cdi; cp '{}' /run/cdi/",
        path.display()
    )
}

/// Without an environment of its own, runc 1.1 would start the hook at createContainer with the environment of the container
/// (CVE-2025-23266). The library that LD_PRELOAD names there is a path of the host, and both are still visible to the hook.
fn the_containers_environment_does_not_reach_the_hook() {
    let dir = scratch();
    let (source, library, mark) = (
        dir.path().join("x.c"),
        dir.path().join("x.so"),
        dir.path().join("owned"),
    );
    let code = format!(
        "#include <fcntl.h>\n__attribute__((constructor)) void f(void) {{ open({mark:?}, O_CREAT, 0600); }}"
    );
    write_file(&source, code);
    run(Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source))
    .ok();
    let spec = dir.path().join("nvidia.json");
    write_spec(FakeDriver::shared(), &spec);
    let preload = format!("LD_PRELOAD={}", library.display());
    let arguments = ["--device=nvidia.com/gpu=0", "-e", &preload, IMAGE, "true"];
    let start =
        |spec: &Path| Podman::shared().run_after(&only_spec(spec), Cgroup::AsMounted, &arguments);
    start(&spec).ok();
    assert!(!mark.exists());
    // The same at the other stage. runc before 1.2 passes the container's environment if the entry has none, and a static program has no
    // linker that obeys it.
    let text = read(&spec);
    let mut open: Value = serde_json::from_str(&text).unwrap();
    let entry = open["containerEdits"]["hooks"][0].as_object_mut().unwrap();
    entry["hookName"] = "createContainer".into();
    // The entry is for another stage.
    entry["args"] = json!(["oci-nvidia-hook", "--version"]);
    for has_env in [true, false] {
        if !has_env {
            open["containerEdits"]["hooks"][0]
                .as_object_mut()
                .unwrap()
                .remove("env");
        }
        write_file(&spec, open.to_string());
        start(&spec).ok();
        assert!(!mark.exists(), "env: {has_env}");
    }
}

/// Only one thread of runc enters the namespace of the container. The threads of this test run in a forked process, because the
/// threads of this one are in the namespaces of several tests.
fn a_thread_of_the_runtime() {
    let mut forked = child::spawn(|pipe| {
        let shares = mount_ns_is_shared_before_and_after();
        child::report(pipe, format!("{shares:?}\n").as_bytes());
    })
    .unwrap();
    let shares = forked
        .line(Instant::now() + Duration::from_secs(60))
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&shares).trim(), "[true, false]");
}

/// Reports whether all threads of this process share its namespace, before and after one of them has entered another.
fn mount_ns_is_shared_before_and_after() -> [bool; 2] {
    // The PID that /proc knows; the process is in another PID namespace.
    let own = std::fs::read_link("/proc/self").unwrap();
    let own = own.to_str().unwrap();
    let before = ns::shares_mount_ns(own) && !ns::shares_mount_ns("4194305");
    let (entered, wait) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            nix::sched::unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS).unwrap();
            entered.wait();
            wait.wait();
        });
        entered.wait();
        let after = ns::shares_mount_ns(own);
        wait.wait();
        // The first thread alone says nothing.
        assert_eq!(ns::mount_ns_of(own), ns::mount_ns_of("self"));
        [before, after]
    })
}

pub fn runc_version() -> Version {
    Version::parse(&run(Command::new("runc").arg("--version")).ok()).unwrap()
}

fn podman_gives_devices_by_name() {
    let fake = FakeDriver::shared();
    let podman = Podman::shared();
    let dir = scratch();
    for format in ["yaml", "json"] {
        let path = dir.path().join(format!("nvidia.{format}"));
        write_spec(fake, &path);
        let before = only_spec(&path);
        let profile = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf";
        let script = format!(
            "nvidia-smi -L; probe-dlopen libcuda.so.1; probe-open /dev/nvidia? /dev/nvidia-uvm; cat {profile}; \
             echo $NVIDIA_VISIBLE_DEVICES"
        );
        for (names, gpus, egl) in [
            (&["0"][..], 1, "0x1"),
            (&["all"], 2, "0x3"),
            (&["GPU-51eed001-0001-4001-8000-0000fa4e0001"], 1, "0x2"),
            (&["0", "1"], 2, "0x3"), // each with its own hook entry
        ] {
            let devices: Vec<_> = names
                .iter()
                .map(|name| format!("--device=nvidia.com/gpu={name}"))
                .collect();
            let mut arguments: Vec<_> = devices.iter().map(String::as_str).collect();
            arguments.extend([IMAGE, "sh", "-euc", &script]);
            let text = podman
                .run_after(&before, Cgroup::AsMounted, &arguments)
                .ok();
            assert_eq!(text.matches("UUID: GPU-").count(), gpus, "{text}");
            assert_eq!(
                text.matches(": ENXIO").count(),
                gpus + 1,
                "each may be opened, and has no driver here: {text}"
            );
            assert_says(&text, &[&format!("\"EGLVisibleDGPUDevices\", {egl}]")]);
            assert!(text.contains("void\n"), "{text}");
        }
    }
}

const SEE: &str = "nvidia-smi -L; probe-dlopen libcuda.so.1; probe-open /dev/nvidia1; \
                   cat /etc/nvidia/nvidia-application-profiles-rc.d/*";

fn assert_gpu_1_alone(text: &str) {
    assert!(text.contains(GPU_1) && !text.contains(GPU_0), "{text}");
    assert_says(text, &["libcuda.so.1: ok /usr/lib/", "/dev/nvidia1: ENXIO"]);
    assert!(text.contains("EGLVisibleDGPUDevices\", 0x2]"), "{text}");
}

/// With another runtime, on cgroup v2, in a read-only container.
fn podman_in(cgroup: Cgroup, option: &str) {
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    write_spec(FakeDriver::shared(), &path);
    let arguments = [
        "--device=nvidia.com/gpu=1",
        option,
        IMAGE,
        "sh",
        "-euc",
        SEE,
    ];
    assert_gpu_1_alone(
        &Podman::shared()
            .run_after(&only_spec(&path), cgroup, &arguments)
            .ok(),
    );
}

/// Creates a /dev with the nodes of this driver.
pub fn nodes_at_dev(fake: &FakeDriver, dir: &Path) -> String {
    format!(
        "dev='{}'; mkdir $dev; mount -t tmpfs dev $dev; chmod 755 $dev; cd /dev; \
         cp -a null zero full random urandom tty ptmx fd std* '{}'/dev/nvidia* $dev; \
         mkdir $dev/pts $dev/shm $dev/mqueue; mount --rbind /dev/pts $dev/pts; mount --rbind $dev /dev; cd /",
        dir.join("dev").display(),
        fake.root.display()
    )
}

/// A runtime cannot create nodes in a user namespace and mounts the host's nodes of the same name, so this driver's nodes are in
/// /dev here.
fn podman_with_a_user_namespace() {
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    let fake = FakeDriver::shared();
    write_spec(fake, &path);
    let before = format!("{}; {}", only_spec(&path), nodes_at_dev(fake, dir.path()));
    let arguments = [
        "--device=nvidia.com/gpu=1",
        "--uidmap=0:100000:65536",
        "--gidmap=0:100000:65536",
        IMAGE,
    ];
    let arguments = [&arguments[..], &["sh", "-euc", SEE]].concat();
    // Separate storage, as in other tests with user namespaces.
    let text = Podman::with_image()
        .run_after(&before, Cgroup::AsMounted, &arguments)
        .ok();
    assert_gpu_1_alone(&text);
}

/// Nodes of `root:video`: a user of the container can use its own GPU, also with an engine that does not know additionalGids.
/// Such an engine does not read files that contain that key.
fn podman_gives_nodes_of_a_group_to_users() {
    let fake = FakeDriver::new(&[
        "--gpus",
        "2",
        "--mig",
        "--dev-mode",
        "0660",
        "--dev-group",
        "video",
    ]);
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    let write = |option: &str| {
        write_spec_with(&fake, &path, &[option]);
    };
    let start = |name: &str, script: &str| {
        let device = format!("--device=nvidia.com/gpu={name}");
        let arguments = [&device, "--user=1000", IMAGE, "sh", "-euc", script];
        Podman::shared().run_after(&only_spec(&path), Cgroup::AsMounted, &arguments)
    };
    write("--no-additional-gids");
    for name in ["0:1", MIG_1] {
        let text = start(
            name,
            "nvidia-smi -L; cd /dev; probe-open nvidia[0-9]* nvidia-caps/* nvidiactl",
        )
        .ok();
        assert_eq!(text.matches("UUID: MIG-").count(), 1, "{text}");
        let nodes: Vec<_> = text
            .lines()
            .filter(|line| line.ends_with(": ENXIO"))
            .collect();
        let caps = [
            "nvidia-caps/nvidia-cap21: ENXIO",
            "nvidia-caps/nvidia-cap22: ENXIO",
        ];
        assert_eq!(
            nodes,
            ["nvidia0: ENXIO", caps[0], caps[1], "nvidiactl: ENXIO"],
            "{text}"
        );
    }
    write("--additional-gids");
    let check = run(Command::new(HOOK)
        .args(["cdi", "check", "--spec-dir"])
        .arg(dir.path()));
    let podman = run(Command::new("podman").arg("--version")).ok();
    let podman = Version::parse(&podman).unwrap();
    let ran = start("1", "true");
    if podman < Version(5, 1, 0) {
        assert!(check.failed(1).is_empty(), "it is said on stdout");
        assert!(ran.failed(126).contains("unresolvable CDI devices"));
    } else {
        check.ok();
        ran.ok();
    }
}

/// The links come from the host's udev, only for the requested GPU.
fn links_of_dri_nodes_at_all_ways() {
    let fake = FakeDriver::new(&["--gpus", "2", "--drm"]);
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    write_spec(&fake, &path);
    let asked = [
        "-e",
        "NVIDIA_VISIBLE_DEVICES=1",
        "-e",
        "NVIDIA_DRIVER_CAPABILITIES=graphics,utility",
    ];
    let see = [IMAGE, "sh", "-euc", DRI_LINKS];
    let at = |stage: &str| {
        let podman = Podman::with_image();
        podman.install_stage(stage, &fake.config);
        podman
            .run(Cgroup::AsMounted, &[&asked[..], &see].concat())
            .ok()
    };
    for stage in ["prestart", "createRuntime"] {
        assert_eq!(at(stage), LINKS_OF_GPU_1, "{stage}");
    }
    let device = [&["--device=nvidia.com/gpu=1"][..], &see].concat();
    assert_eq!(
        Podman::shared()
            .run_after(&only_spec(&path), Cgroup::AsMounted, &device)
            .ok(),
        LINKS_OF_GPU_1
    );
}
