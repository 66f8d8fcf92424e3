//! The setup in a real mount namespace that looks like the container of an engine at the prestart stage.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::driver::{ALL_GPUS, FakeDriver, Image, MASKABLE_PROC, NEEDS, Waiting};
use crate::support::{
    HOOK, Need, assert_says, nvml_program, read, run_with, scratch, snapshot, write_file,
};

const NEEDS_STRACE: &[Need] = &[Need::Root, Need::Programs(&["cc", "unshare", "strace"])];

// The first five also run on kernels that lack one system call (main.rs).
tests! {
    NEEDS => the_driver_works_in_the_container, mounts_are_restricted_and_private, only_what_was_asked_for;
    NEEDS_STRACE => no_request_no_trace;
    NEEDS => every_cache_layout, images_that_are_not_debian, proc_is_masked, the_image_has_files_of_its_own,
        descriptions_that_images_write, links_of_the_image_are_not_followed, a_failing_step_leaves_nothing,
        a_second_run_changes_nothing, a_failing_gpu_does_not_stop_the_others, none_or_sixteen_gpus_and_a_slow_driver,
        driver_libraries_in_lib64, linker_caches_that_are_missing_or_stale, optional_things_do_not_stop_a_container,
        graphics_gets_the_gpus_dri_nodes;
    NEEDS_STRACE => nothing_runs_and_nothing_of_the_container_is_loaded;
}

const LIBDIR: &str = "/usr/lib/x86_64-linux-gnu";

fn the_driver_works_in_the_container() {
    let fake = FakeDriver::shared();
    let container = Waiting::debian(ALL_GPUS, "");
    assert_eq!(container.hook(&fake.config).ok(), "");

    let listed = container.output("nvidia-smi -L");
    assert_eq!(listed.lines().count(), 2, "{listed}");
    assert!(
        listed
            .lines()
            .all(|line| line.starts_with("GPU ") && line.contains("(UUID: GPU-")),
        "{listed}"
    );
    assert!(
        container
            .output("nvidia-smi")
            .contains("Driver Version: 535.183.01")
    );
    let loaded = container.exec(
        "probe-dlopen libcuda.so.1 libcuda.so libnvidia-ml.so.1 libnvidia-ptxjitcompiler.so.1",
    );
    assert!(loaded.ok().lines().all(|line| line.contains(": ok ")));
    let cache = container.output("ldconfig -p");
    assert_says(
        &cache,
        &[&format!(
            "libcuda.so.1 (libc6,x86-64) => {LIBDIR}/libcuda.so.1"
        )],
    );
    for (link, text) in [
        ("libcuda.so.1", "libcuda.so.535.183.01"),
        ("libcuda.so", "libcuda.so.1"),
        ("libnvidia-ml.so.1", "libnvidia-ml.so.535.183.01"),
        ("libnvidia-nvvm.so.4", "libnvidia-nvvm.so.535.183.01"),
    ] {
        assert_eq!(
            container
                .output(&format!("readlink {LIBDIR}/{link}"))
                .trim(),
            text,
            "{link}"
        );
    }
    for program in [
        "nvidia-debugdump",
        "nvidia-persistenced",
        "nvidia-cuda-mps-control",
        "nvidia-cuda-mps-server",
    ] {
        container.output(&format!("test -x /usr/bin/{program}"));
    }
    // Files that only root can read would be useless in most containers.
    assert_eq!(
        container.output("stat -c %a /etc/ld.so.cache").trim(),
        "644"
    );
}

fn mounts_are_restricted_and_private() {
    let fake = FakeDriver::shared();
    let before = read("/proc/thread-self/mountinfo");
    let container = Waiting::debian(ALL_GPUS, "");
    container.hook(&fake.config).ok();
    for path in [
        format!("{LIBDIR}/libcuda.so.535.183.01"),
        "/usr/bin/nvidia-smi".into(),
    ] {
        let options = container.mount_options(&path);
        for option in ["ro", "nosuid", "nodev"] {
            assert!(options.split(',').any(|o| o == option), "{path}: {options}");
        }
        assert!(
            !container
                .exec(&format!("echo x >> {path}"))
                .stderr
                .is_empty(),
            "{path} is read-only"
        );
    }
    for path in ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"] {
        let options = container.mount_options(path);
        for option in ["ro", "nosuid", "noexec"] {
            assert!(options.split(',').any(|o| o == option), "{path}: {options}");
        }
    }
    // Field 7 and the following ones: "shared:N" or "master:N" would propagate mounts.
    let ours = container.mountinfo();
    let ours: Vec<_> = ours
        .lines()
        .filter(|line| line.contains("nvidia"))
        .collect();
    assert!(
        ours.len() > 10 && ours.iter().all(|line| line.split(' ').nth(6) == Some("-")),
        "{ours:#?}"
    );
    assert_eq!(
        read("/proc/thread-self/mountinfo"),
        before,
        "the host's mounts"
    );
}

fn only_what_was_asked_for() {
    let fake = FakeDriver::shared();
    let env = [
        "NVIDIA_VISIBLE_DEVICES=1",
        "NVIDIA_DRIVER_CAPABILITIES=utility",
    ];
    let container = Waiting::debian(&env, "");
    container.hook(&fake.config).ok();
    assert_eq!(
        container.output("cd /dev; echo nvidia*").trim(),
        "nvidia1 nvidiactl"
    );
    container.output("probe-dlopen libnvidia-ml.so.1");
    container.exec("probe-dlopen libcuda.so.1").failed(1);
    assert_eq!(container.output("nvidia-smi -L").lines().count(), 1);

    let container = Waiting::debian(&["NVIDIA_VISIBLE_DEVICES=none"], "");
    container.hook(&fake.config).ok();
    assert_eq!(
        container.output("cd /dev; echo nvidia*").trim(),
        "nvidia-uvm nvidia-uvm-tools nvidiactl"
    );
    container.output("probe-dlopen libcuda.so.1");
}

/// For a container without GPUs, the hook reads config.json and does nothing else.
fn no_request_no_trace() {
    let fake = FakeDriver::shared();
    let container = Waiting::debian(&["PATH=/bin"], "");
    let (mounts, files) = (container.mountinfo(), snapshot(&container.rootfs));
    for env in [
        &["PATH=/bin"][..],
        &["NVIDIA_VISIBLE_DEVICES="],
        &["NVIDIA_VISIBLE_DEVICES=void"],
    ] {
        container.set_env(env);
        let trace = container.dir().join("trace");
        let mut strace = Command::new("strace");
        strace
            .args(["-f", "-o"])
            .arg(&trace)
            .arg(HOOK)
            .arg("--config")
            .arg(&fake.config)
            .arg("prestart");
        run_with(&mut strace, container.state().as_bytes()).ok();
        let trace = read(trace);
        for word in [
            "nvidia-ml",
            "/dev/nvidia",
            "driver/nvidia",
            "config.toml",
            "ld.so.cache.",
            "setns(",
            "fork(",
            "clone(",
            "clone3(",
        ] {
            let hit = trace
                .lines()
                .find(|line| line.contains(word) && !line.contains("execve"));
            assert_eq!(hit, None, "{word}");
        }
        assert!(trace.contains("config.json"));
    }
    assert_eq!(
        (container.mountinfo(), snapshot(&container.rootfs)),
        (mounts, files)
    );
}

fn every_cache_layout() {
    let fake = FakeDriver::shared();
    for layout in ["new", "compat", "old", "none"] {
        let dir = scratch();
        let image = Image::new(dir.path(), &["--layout", "debian", "--cache", layout]);
        let container = Waiting::with_all_gpus(dir.path(), &image);
        container.hook(&fake.config).ok();
        container.output("probe-dlopen libcuda.so.1");
        assert!(
            container.output("ldconfig -p").contains("libcuda.so.1 "),
            "{layout}"
        );
        container.output("nvidia-smi -L");
    }
}

/// Also in a read-only rootfs, where the linker cache is mounted and not replaced.
fn images_that_are_not_debian() {
    for script in ["", "mount -o remount,bind,ro $rootfs"] {
        let (dir, fake) = (scratch(), FakeDriver::shared());
        let image = Image::new(dir.path(), &["--layout", "lib64"]);
        let env = ["NVIDIA_VISIBLE_DEVICES=all"];
        let container = Waiting::start(dir.path(), &image.rootfs, &env, script);
        assert_eq!(container.hook(&fake.config).ok(), "", "{script}");
        let listed = container.output("ldconfig -p");
        assert!(listed.contains("=> /usr/lib64/libcuda.so.1"), "{script}");
        // Debian's ld.so does not search /usr/lib64 by default: only the cache can have led to it.
        let opened = container.output("probe-dlopen libcuda.so.1");
        assert!(opened.contains("/usr/lib64/libcuda.so"), "{script}");
        container.output("nvidia-smi");
    }
}

fn proc_is_masked() {
    let fake = FakeDriver::shared();
    // This kernel has no NVIDIA driver; a tmpfs has the names of procfs.
    let proc = "mount -t tmpfs proc $rootfs/proc; mkdir -p $rootfs/proc/driver/nvidia/gpus/secret; \
                echo 'ModifyDeviceFiles: 1' > $rootfs/proc/driver/nvidia/params";
    let container = Waiting::debian(&["NVIDIA_VISIBLE_DEVICES=1"], proc);
    container.hook(&fake.config).ok();
    assert!(
        container
            .output("cat /proc/driver/nvidia/params")
            .contains("ModifyDeviceFiles: 0")
    );
    assert!(
        container
            .output("cat /proc/driver/nvidia/version")
            .contains("535.183.01")
    );
    let gpus = container.output("ls /proc/driver/nvidia/gpus");
    assert_eq!(gpus.lines().count(), 1, "{gpus}");
    let information = container.output("cat /proc/driver/nvidia/gpus/*/information");
    assert!(
        information
            .lines()
            .any(|line| line.starts_with("Device Minor:") && line.ends_with('1')),
        "{information}"
    );
    for script in [
        "echo x > /proc/driver/nvidia/params",
        "rm /proc/driver/nvidia/params",
        "mkdir /proc/driver/nvidia/x",
    ] {
        assert_ne!(container.exec(script).code, Some(0), "{script}");
    }
    assert!(
        container
            .mount_options("/proc/driver/nvidia")
            .starts_with("ro,nosuid,nodev,noexec")
    );
}

fn the_image_has_files_of_its_own() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let libdir = image.rootfs.join(&LIBDIR[1..]);
    write_file(libdir.join("libcuda.so.1"), "the image's own");
    write_file(libdir.join("libnvidia-ml.so.535.183.01"), "");
    symlink("libnvidia-ml.so.418.1", libdir.join("libnvidia-ml.so.1")).unwrap();
    write_file(
        image.rootfs.join("usr/bin/nvidia-smi"),
        "#!/bin/sh\nexit 9\n",
    );
    let container = Waiting::with_all_gpus(dir.path(), &image);
    container.hook(&fake.config).ok();
    container.output("nvidia-smi -L");
    container.output("probe-dlopen libcuda.so.1 libnvidia-ml.so.1");
    // The file is hidden, not lost: another container of the same image still has it.
    assert_eq!(
        std::fs::read(libdir.join("libcuda.so.1")).unwrap(),
        b"the image's own"
    );
}

/// Builds of images write these files, so they are copies that the container can change, and the image's own ones stay.
fn descriptions_that_images_write() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--all-files"]));
    let canary = dir.path().join("canary");
    write_file(&canary, "");
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let path = image.rootfs.join("etc/OpenCL/vendors/nvidia.icd");
    let write = |text: &'static str| {
        let path = &path;
        move || write_file(path, text)
    };
    let link = || symlink(&canary, &path).unwrap();
    // As in images that Bazel or Nix build.
    let of_1970 = || {
        write("own\n")();
        let start = std::time::SystemTime::UNIX_EPOCH;
        std::fs::File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(start)
            .unwrap();
    };
    let cases: [(&str, &dyn Fn(), &str); 5] = rows! {
        "the image's own, of 1970", &of_1970, "own\n";
        "none", &|| (), "libnvidia-opencl.so.1\n";
        "the image's own", &write("own\n"), "own\n";
        "a mount point of an earlier container", &write(""), "libnvidia-opencl.so.1\n";
        "a link", &link, "cat: /etc/OpenCL/vendors/nvidia.icd: No such file or directory\n";
    };
    for (what, create, expected) in cases {
        std::fs::remove_file(&path).ok();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        create();
        let env = [
            "NVIDIA_VISIBLE_DEVICES=all",
            "NVIDIA_DRIVER_CAPABILITIES=compute",
        ];
        let container = Waiting::start(&dir.path().join(what), &image.rootfs, &env, "");
        for _ in 0..2 {
            assert_eq!(container.hook(&fake.config).ok(), "", "{what}");
            let icd = container.output("cat /etc/OpenCL/vendors/nvidia.icd 2>&1 || true");
            assert_eq!(icd, expected, "{what}");
        }
        if what == "none" {
            // A container that is started again after a driver update gets the new description.
            let host = fake.root.join("etc/OpenCL/vendors/nvidia.icd");
            write_file(&host, "libnvidia-opencl.so.2\n");
            container.hook(&fake.config).ok();
            assert_eq!(std::fs::read(&path).unwrap(), b"libnvidia-opencl.so.2\n");
            write_file(&host, expected);
        }
        if what != "a link" {
            container.output("echo changed >/etc/OpenCL/vendors/nvidia.icd");
            container.hook(&fake.config).ok();
            assert_eq!(std::fs::read(&path).unwrap(), b"changed\n", "{what}");
        }
    }
    assert_eq!(std::fs::read(&canary).unwrap(), b"");
    std::fs::remove_file(&path).unwrap();
    write_file(
        fake.root.join("etc/OpenCL/vendors/nvidia.icd"),
        vec![b'x'; 2 << 20],
    );
    let env = [
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=compute",
    ];
    let container = Waiting::start(&dir.path().join("large"), &image.rootfs, &env, "");
    let ran = container.hook(&fake.config);
    assert_says(
        &ran.stderr,
        &["warning: cannot copy ", ": larger than 1 MiB ("],
    );
    ran.ok();
}

fn links_of_the_image_are_not_followed() {
    let (dir, fake) = (scratch(), FakeDriver::shared());
    let canary = dir.path().join("canary");
    std::fs::create_dir(&canary).unwrap();
    write_file(canary.join("file"), "host");
    let before = snapshot(&canary);
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let libdir = image.rootfs.join(&LIBDIR[1..]);
    // An absolute link, one with "..", and a magic link; each leads to a file of the host.
    symlink(canary.join("new"), libdir.join("libcuda.so.535.183.01")).unwrap();
    symlink(
        Path::new("/proc/self/root")
            .join(canary.strip_prefix("/").unwrap())
            .join("new"),
        libdir.join("libnvidia-ml.so.535.183.01"),
    )
    .unwrap();
    let climbing = format!("{}{}/file", "../".repeat(20), canary.display());
    symlink(climbing, image.rootfs.join("usr/bin/nvidia-smi")).unwrap();
    std::fs::remove_file(image.rootfs.join("etc/ld.so.cache")).unwrap();
    symlink(canary.join("file"), image.rootfs.join("etc/ld.so.cache")).unwrap();
    let container = Waiting::with_all_gpus(dir.path(), &image);
    container.hook(&fake.config).ok();
    container.output("nvidia-smi -L");
    assert_eq!(snapshot(&canary), before);
    assert_eq!(std::fs::read(canary.join("file")).unwrap(), b"host");
}

fn a_failing_step_leaves_nothing() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let libdir = image.rootfs.join(&LIBDIR[1..]);
    // Links are created after the mounts, so a directory at the path of a link causes a late failure.
    std::fs::create_dir(libdir.join("libcuda.so")).unwrap();
    symlink("elsewhere", libdir.join("libcuda.so.535.183.01")).unwrap();
    let before = snapshot(&image.rootfs);
    let container = Waiting::with_all_gpus(dir.path(), &image);
    let mounts = container.mountinfo();
    let stderr = container.hook(&fake.config).failed(1);
    assert_says(
        &stderr,
        &["cannot link", "libcuda.so\"", "(ONH-046)\nhint: "],
    );
    assert_eq!(snapshot(&image.rootfs), before);
    assert_eq!(container.mountinfo(), mounts);
    assert_eq!(container.output("cd /dev; echo nvidia*").trim(), "nvidia*");
}

fn a_second_run_changes_nothing() {
    let fake = FakeDriver::shared();
    let container = Waiting::debian(ALL_GPUS, MASKABLE_PROC);
    container.hook(&fake.config).ok();
    let once = (container.mountinfo(), snapshot(&container.rootfs));
    container.hook(&fake.config).ok();
    assert_eq!((container.mountinfo(), snapshot(&container.rootfs)), once);
}

fn a_failing_gpu_does_not_stop_the_others() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "3"]));
    fake.set_nvml(|old| old.replace("gpu minor=1 ", "gpu minor=1 fail=15 "));
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::with_all_gpus(dir.path(), &image);
    let ran = container.hook(&fake.config);
    assert_says(&ran.stderr, &["warning: GPU 1: nvmlDeviceGet"]);
    ran.ok();
    assert_eq!(
        container.output("cd /dev; echo nvidia[0-9]*").trim(),
        "nvidia0 nvidia2"
    );
    container.set_env(&["NVIDIA_VISIBLE_DEVICES=1"]);
    assert!(
        container
            .hook(&fake.config)
            .failed(1)
            .contains("requests \"1\": GPU 1: nvmlDeviceGet")
    );
}

fn none_or_sixteen_gpus_and_a_slow_driver() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "16"]));
    fake.set_nvml(|old| old + "\ninit-delay-ms 300\n");
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::with_all_gpus(dir.path(), &image);
    container.hook(&fake.config).ok();
    assert_eq!(
        container
            .output("echo /dev/nvidia[0-9]*")
            .split(' ')
            .count(),
        16
    );

    let fake = FakeDriver::new(&["--gpus", "0"]);
    let stderr = container.hook(&fake.config).failed(1);
    assert_says(&stderr, &["the driver finds no GPU (ONH-031)"]);
}

/// A host like openSUSE, an image like Debian: they have libraries in different directories.
fn driver_libraries_in_lib64() {
    let (dir, fake) = (
        scratch(),
        FakeDriver::new(&["--gpus", "1", "--layout", "lib64"]),
    );
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::with_all_gpus(dir.path(), &image);
    container.hook(&fake.config).ok();
    assert!(
        container
            .output("probe-dlopen libcuda.so.1")
            .contains(LIBDIR)
    );
    container.output("nvidia-smi");
}

fn linker_caches_that_are_missing_or_stale() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let container = Waiting::debian(ALL_GPUS, "");
    std::fs::remove_file(fake.root.join("etc/ld.so.cache")).unwrap();
    container.hook(&fake.config).ok();
    container.output("nvidia-smi");
    container.output("probe-dlopen libcuda.so.1 libcuda.so libnvidia-nvvm.so.4");

    // One library of the cache is missing; the others work.
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let container = Waiting::debian(ALL_GPUS, "");
    let opencl = fake
        .root
        .join(&LIBDIR[1..])
        .join("libnvidia-opencl.so.535.183.01");
    std::fs::remove_file(opencl).unwrap();
    let ran = container.hook(&fake.config);
    assert_says(
        &ran.stderr,
        &[
            "lists files that do not exist: \"libnvidia-opencl.so.1\" at",
            "ONH-202",
        ],
    );
    ran.ok();
    container.output("probe-dlopen libcuda.so.1");
}

fn optional_things_do_not_stop_a_container() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    std::fs::create_dir(image.rootfs.join("usr/bin/nvidia-debugdump")).unwrap();
    let container = Waiting::with_all_gpus(dir.path(), &image);
    let ran = container.hook(&fake.config);
    assert_says(&ran.stderr, &["nvidia-debugdump", "ONH-303"]);
    ran.ok();
    container.output("nvidia-smi");
}

/// The links of udev, and the device of each.
pub const DRI_LINKS: &str = "cd /dev/dri/by-path; for link in *; do echo $link $(readlink $link) $(readlink -f $link); done";
pub const LINKS_OF_GPU_1: &str = "pci-0000:02:00.0-card ../card2 /dev/dri/card2\n\
     pci-0000:02:00.0-render ../renderD130 /dev/dri/renderD130\n";

fn graphics_gets_the_gpus_dri_nodes() {
    let fake = FakeDriver::new(&["--gpus", "2", "--drm"]);
    for (capabilities, nodes) in [
        ("graphics,utility", "by-path card2 renderD130"),
        ("compute,utility", "*"),
    ] {
        let capabilities = format!("NVIDIA_DRIVER_CAPABILITIES={capabilities}");
        let container = Waiting::debian(&["NVIDIA_VISIBLE_DEVICES=1", &capabilities], "");
        container.hook(&fake.config).ok();
        let profile = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf";
        let seen = container.exec(&format!("cat {profile}"));
        assert_eq!(
            seen.stdout.contains("\"EGLVisibleDGPUDevices\", 0x2]"),
            nodes != "*",
            "{seen:?}"
        );
        container.hook(&fake.config).ok();
        assert_eq!(
            container
                .mountinfo()
                .matches(&format!(
                    "{}/etc/nvidia/nvidia-appl",
                    container.rootfs.display()
                ))
                .count(),
            usize::from(nodes != "*"),
            "twice is once"
        );
        assert_eq!(
            container
                .output("cd /dev/dri 2>/dev/null || { mkdir -p /nothing; cd /nothing; }; echo *")
                .trim(),
            nodes,
            "{capabilities}"
        );
        if nodes != "*" {
            assert_eq!(container.output(DRI_LINKS), LINKS_OF_GPU_1);
        }
    }
}

/// No program is started, and the loader opens no file of the container.
fn nothing_runs_and_nothing_of_the_container_is_loaded() {
    let fake = FakeDriver::shared();
    let container = Waiting::debian(ALL_GPUS, "");
    let trace = container.dir().join("trace");
    let mut strace = Command::new("strace");
    strace
        .args(["-f", "-y", "-e", "trace=execve,execveat,mmap", "-o"])
        .arg(&trace);
    strace
        .arg(HOOK)
        .arg("--config")
        .arg(&fake.config)
        .arg("prestart");
    run_with(&mut strace, container.state().as_bytes()).ok();
    let trace = read(trace);
    let mut started = Vec::new();
    for line in trace.lines().filter(|line| line.contains("exec")) {
        started.push(line.split('"').nth(1).unwrap());
    }
    let nvml = nvml_program();
    assert_eq!(started, [HOOK, nvml.to_str().unwrap()], "{trace}");
    let rootfs = container.rootfs.to_str().unwrap();
    assert!(
        !trace
            .lines()
            .any(|line| line.contains("PROT_EXEC") && line.contains(rootfs)),
        "{trace}"
    );
}
