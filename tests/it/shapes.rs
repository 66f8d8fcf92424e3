//! Unusual images and mounts.

use std::os::unix::fs::symlink;

use crate::driver::{ALL_GPUS, FakeDriver, Image, NEEDS, Waiting};
use crate::support::{assert_says, scratch, shell, snapshot, write_file};

tests! {
    NEEDS => read_only_rootfs, read_only_rootfs_with_mounts_in_the_way, read_only_rootfs_made_for_the_driver,
        read_only_rootfs_that_lacks_directories, driver_files_of_the_image, links_in_the_image, no_etc,
        a_linker_cache_that_is_none, no_glibc, noexec_dev, volumes_with_shared_propagation, set_up_by_another_program;
}

const LIBDIR: &str = "/usr/lib/x86_64-linux-gnu";
const READ_ONLY: &str = "mount -o remount,bind,ro \"$rootfs\"";

fn assert_works(container: &Waiting) {
    assert_eq!(container.output("nvidia-smi -L").lines().count(), 2);
    container.output("probe-dlopen libcuda.so.1 libnvidia-ml.so.1 libnvidia-nvvm.so.4");
}

fn read_only_rootfs() {
    let fake = FakeDriver::shared();
    for layout in ["debian", "lib64"] {
        let dir = scratch();
        let image = Image::new(dir.path(), &["--layout", layout]);
        let before = snapshot(&image.rootfs);
        let container = Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, READ_ONLY);
        assert_eq!(container.hook(&fake.config).ok(), "");
        assert_works(&container);
        assert!(
            container
                .output("ldconfig -p")
                .contains("libcuda.so.1 (libc6,x86-64) => ")
        );
        assert_eq!(
            container.output("stat -c %a /etc/ld.so.cache").trim(),
            "644"
        );
        assert_eq!(snapshot(&image.rootfs), before, "nothing is created in it");
        let libraries = if layout == "debian" {
            LIBDIR
        } else {
            "/usr/lib64"
        };
        for place in [
            &format!("{libraries}/x"),
            "/usr/bin/x",
            "/etc/x",
            "/etc/ld.so.cache",
        ] {
            let written = container.exec(&format!("echo x >{place}"));
            assert!(
                written.stderr.contains("Read-only file system"),
                "{place}: {written:?}"
            );
        }
        let mounts = container.mountinfo();
        assert_eq!(container.hook(&fake.config).ok(), "");
        assert_eq!(container.mountinfo(), mounts, "twice is once");
    }
}

/// A layer would hide the volume: an error is better than a hidden volume.
fn read_only_rootfs_with_mounts_in_the_way() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    std::fs::create_dir(image.rootfs.join(&LIBDIR[1..]).join("volume")).unwrap();
    let before = format!("{READ_ONLY}; mount -t tmpfs volume \"$rootfs{LIBDIR}/volume\"");
    let container = Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, &before);
    let mounts = container.mountinfo();
    let stderr = container.hook(&fake.config).failed(1);
    assert!(stderr.contains("(ONH-043)\nhint: "), "{stderr}");
    assert_eq!(container.mountinfo(), mounts);
}

/// If the image contains the mount points, no layer is needed.
fn read_only_rootfs_made_for_the_driver() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, "")
        .hook(&fake.config)
        .ok();
    let container = Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, READ_ONLY);
    container.hook(&fake.config).ok();
    assert_works(&container);
    assert!(
        !container.mountinfo().contains(" overlay "),
        "{}",
        container.mountinfo()
    );
}

/// Without a directory, a layer would be needed over one that has layers of ours below it: those are not hidden.
fn read_only_rootfs_that_lacks_directories() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    let vendors = fake.root.join("usr/share/glvnd/egl_vendor.d");
    std::fs::create_dir_all(&vendors).unwrap();
    write_file(vendors.join("10_nvidia.json"), "{}");
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    std::fs::remove_dir_all(image.rootfs.join("usr/share")).ok();
    let all = [
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=all",
    ];
    let container = Waiting::start(dir.path(), &image.rootfs, &all, READ_ONLY);
    let ran = container.hook(&fake.config);
    assert_says(&ran.stderr, &["10_nvidia.json", "(ONH-303)\nhint: "]);
    ran.ok();
    assert_works(&container);
}

fn driver_files_of_the_image() {
    let fake = FakeDriver::shared();
    let names = [
        "libcuda.so.1",
        "libcuda.so.535.183.01",
        "libnvidia-ml.so.1",
        "libcuda.so.470.1",
        "libcuda.so",
    ];
    for kind in ["file", "link", "dangling link", "link to a directory"] {
        let (dir, image) = Image::debian();
        for name in names {
            let path = image.rootfs.join(&LIBDIR[1..]).join(name);
            match kind {
                "file" => write_file(&path, "not the driver's"),
                "link" => symlink("/etc/passwd", &path).unwrap(),
                "dangling link" => symlink("/nowhere/x", &path).unwrap(),
                _ => symlink("/usr/bin", &path).unwrap(),
            }
        }
        let container = Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, "");
        container.hook(&fake.config).ok();
        assert_works(&container);
        assert!(
            container.output("cat /etc/passwd").starts_with("root:"),
            "{kind}"
        );
    }
    for name in names {
        let (dir, image) = Image::debian();
        std::fs::create_dir(image.rootfs.join(&LIBDIR[1..]).join(name)).unwrap();
        let before = snapshot(&image.rootfs);
        let container = Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, "");
        let ran = container.hook(&fake.config);
        if matches!(name, "libcuda.so.470.1") {
            ran.ok();
            continue;
        }
        let stderr = ran.failed(1);
        assert_says(&stderr, &[name, "at this path (ONH-046)"]);
        assert_eq!(snapshot(&image.rootfs), before, "{name}");
    }
}

fn links_in_the_image() {
    let fake = FakeDriver::shared();
    // (script in the image, the hook's message if the container cannot be set up)
    for (script, says) in rows! {
        "mv usr/lib/x86_64-linux-gnu usr/real; ln -s /usr/real usr/lib/x86_64-linux-gnu", "";
        "mv usr/lib/x86_64-linux-gnu usr/real; ln -s ../../../../usr/real usr/lib/x86_64-linux-gnu", "";
        "mv usr/bin usr/real; ln -s real usr/bin", "";
        "mv usr usr2; ln -s a usr; ln -s usr2 a", "";
        "rm -r usr/lib/x86_64-linux-gnu; ln -s x86_64-linux-gnu usr/lib/x86_64-linux-gnu", "(ELOOP)";
        "rm -r usr/lib/x86_64-linux-gnu; ln -s /nowhere usr/lib/x86_64-linux-gnu", "open its directory";
        "rm -r usr/lib/x86_64-linux-gnu; echo >usr/lib/x86_64-linux-gnu", "(ENOTDIR)";
    } {
        let (dir, image) = Image::debian();
        shell!("cd '{}'; {script}", image.rootfs.display());
        let before = snapshot(&image.rootfs);
        let container = Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, "");
        let ran = container.hook(&fake.config);
        if says.is_empty() {
            ran.ok();
            assert_works(&container);
        } else {
            let stderr = ran.failed(1);
            assert!(stderr.contains(says), "{script}: {stderr}");
            assert_eq!(snapshot(&image.rootfs), before, "{script}");
        }
    }
    // lib64 images: /usr/lib64 is a link to another directory, or a file.
    for (script, works) in [
        ("mv usr/lib64 usr/lib/64; ln -s /usr/lib/64 usr/lib64", true),
        ("rm -r usr/lib64; echo >usr/lib64", false),
    ] {
        let dir = scratch();
        let image = Image::new(dir.path(), &["--layout", "lib64"]);
        shell!("cd '{}'; {script}", image.rootfs.display());
        let container = Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, "");
        let ran = container.hook(&fake.config);
        assert_eq!(ran.code, Some(i32::from(!works)), "{script}: {ran:?}");
    }
}

fn no_etc() {
    let (dir, fake) = (scratch(), FakeDriver::shared());
    let image = Image::new(dir.path(), &["--layout", "lib64"]);
    std::fs::remove_dir_all(image.rootfs.join("etc")).unwrap();
    let container = Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, "");
    container.hook(&fake.config).ok();
    assert!(
        !image.rootfs.join("etc").try_exists().unwrap(),
        "it is not made for a cache"
    );
    assert_eq!(
        container
            .exec("/usr/bin/stat -c %t:%T /dev/nvidia1")
            .stdout
            .trim(),
        "c3:1"
    );
}

fn a_linker_cache_that_is_none() {
    let fake = FakeDriver::shared();
    for (make, says) in [
        ("mkfifo etc/ld.so.cache", true),
        ("mkdir etc/ld.so.cache", true),
        ("mknod etc/ld.so.cache c 1 5", true),
        ("truncate -s 1T etc/ld.so.cache", true),
        ("head -c 5000 /dev/urandom >etc/ld.so.cache", true),
        ("ln -s /nowhere etc/ld.so.cache", false),
        ("ln -s ld.so.cache etc/ld.so.cache", true),
    ] {
        let dir = scratch();
        let image = Image::new(dir.path(), &["--layout", "debian", "--cache", "none"]);
        shell!("cd '{}'; {make}", image.rootfs.display());
        let container = Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, "");
        let ran = container.hook(&fake.config);
        assert_eq!(ran.stderr.contains("ONH-302"), says, "{make}: {ran:?}");
        ran.ok();
        // Debian's loader also searches that directory without a cache. Any loader waits for ever at a FIFO.
        if !make.contains("mkfifo") {
            assert_works(&container);
        }
    }
}

/// Alpine, busybox, and a static program alone get their GPUs, and the hook reports what will not run.
fn no_glibc() {
    let fake = FakeDriver::shared();
    for (script, says) in [
        ("touch lib/ld-musl-x86_64.so.1", "built on musl"),
        ("true", "no dynamic loader"),
        ("rm -r usr/bin usr/sbin etc", "no dynamic loader"),
    ] {
        let dir = scratch();
        let image = Image::new(dir.path(), &["--layout", "lib64"]);
        let rootfs = image.rootfs.display();
        shell!(
            "cd '{rootfs}'; rm -f lib64/ld-linux-* usr/lib64/ld-linux-* etc/ld.so.cache; {script}"
        );
        let container = Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, "");
        let ran = container.hook(&fake.config);
        assert_says(&ran.stderr, &["ONH-306", says]);
        ran.ok();
        assert!(container.mount_options("/dev/nvidia0").contains("nosuid"));
        assert!(!image.rootfs.join("etc/ld.so.cache").try_exists().unwrap());
    }
}

fn noexec_dev() {
    let fake = FakeDriver::shared();
    let container = Waiting::debian(ALL_GPUS, "mount -o remount,noexec,nodev \"$rootfs/dev\"");
    container.hook(&fake.config).ok();
    assert_works(&container);
    assert_eq!(
        container.exec("probe-open /dev/nvidia0").stdout.trim(),
        "/dev/nvidia0: ENXIO"
    );
}

/// Mounts in such a volume would appear on the host, and stay there.
fn volumes_with_shared_propagation() {
    let fake = FakeDriver::shared();
    for propagation in ["shared", "slave"] {
        let (dir, image) = Image::debian();
        // The host's side: a shared mount in a namespace from which the container's is created.
        let before = format!(
            "mkdir '{0}/volume'; mount -t tmpfs volume '{0}/volume'; mount --make-shared '{0}/volume'; \
             cp -a \"$rootfs{LIBDIR}/.\" '{0}/volume'; \
             mount --bind '{0}/volume' \"$rootfs{LIBDIR}\"; mount --make-{propagation} \"$rootfs{LIBDIR}\"",
            dir.path().display()
        );
        let container = Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, &before);
        let mounts = container.mountinfo();
        let ran = container.hook(&fake.config);
        let volume = dir.path().join("volume").display().to_string();
        if propagation == "slave" {
            ran.ok();
            assert_works(&container);
        } else {
            let stderr = ran.failed(1);
            assert!(stderr.contains("(ONH-042)\nhint: "), "{stderr}");
            assert_eq!(container.mountinfo(), mounts);
        }
        assert_eq!(
            container.mountinfo().matches(&volume).count(),
            1,
            "{}",
            container.mountinfo()
        );
    }
}

fn set_up_by_another_program() {
    let fake = FakeDriver::shared();
    let container = Waiting::debian(ALL_GPUS, "");
    let (files, mounts) = (snapshot(&container.rootfs), container.mountinfo());
    for more in [
        serde_json::json!({"hooks": {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]}}),
        serde_json::json!({"hooks": {"createContainer": [{"path": "/usr/bin/nvidia-cdi-hook", "args": ["x", "update-ldcache"]}]}}),
    ] {
        container.set_spec(ALL_GPUS, &more);
        let ran = container.hook(&fake.config);
        assert!(ran.stderr.is_empty(), "a note is for the log: {ran:?}");
        ran.ok();
        assert_eq!(
            (snapshot(&container.rootfs), container.mountinfo()),
            (files.clone(), mounts.clone()),
            "{more}"
        );
    }
    container.set_env(ALL_GPUS);
    container.hook(&fake.config).ok();
    assert_works(&container);
}
