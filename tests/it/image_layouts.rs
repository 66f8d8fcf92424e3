//! Images whose directories are not those of the host, in each mode: a program finds the driver's libraries with and without the linker
//! cache.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cdi::{cdi, generate};
use crate::cdi_containers::with_mounts;
use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::edit_config;
use crate::hosts::stub;
use crate::support::{HOOK, Need, assert_says, run, scratch, shell, write_file};

tests! {
    NEEDS => one_library_directory, one_library_directory_with_cdi, a_library_that_is_not_whole, a_volume_that_makes_the_directories_one,
        loaders_without_the_cache, libraries_of_an_older_driver, copies_of_an_older_driver, stubs_after_ldconfig, no_gpu_needs_no_nvml;
    &[Need::Root, Need::Program("cc")] => one_library_directory_in_config_json, a_partial_linker_cache;
}

const ALL: &[&str] = &[
    "NVIDIA_VISIBLE_DEVICES=all",
    "NVIDIA_DRIVER_CAPABILITIES=all",
];

/// A host like openSUSE and Fedora with 32-bit libraries: /usr/lib64 has the 64-bit libraries, and /usr/lib the 32-bit ones.
fn host_with_32_bit_libraries() -> FakeDriver {
    let fake = FakeDriver::new(&["--gpus", "1", "--layout", "lib64"]);
    let (root, lib) = (fake.root.display(), fake.root.join("usr/lib"));
    std::fs::create_dir_all(&lib).unwrap();
    for name in ["libcuda", "libnvidia-ml"] {
        let file = format!("{name}.so.535.183.01");
        std::fs::copy(stub(&format!("{name}.so.1"), true), lib.join(&file)).unwrap();
        std::os::unix::fs::symlink(&file, lib.join(format!("{name}.so.1"))).unwrap();
    }
    shell!("printf '/usr/lib64\n/usr/lib\n' >'{root}/etc/ld.so.conf'; /sbin/ldconfig -r '{root}'");
    fake
}

/// An image like docker.io/archlinux: /usr/lib64 is a link to lib, and there is no /usr/lib32.
fn arch_image(dir: &Path) -> Image {
    let image = Image::new(dir, &[]);
    let script = "cd \"$0\"; mkdir new; find usr -name 'lib*.so*' -type f -exec cp {} new/ ';'; \
        cp -L lib64/ld-linux-x86-64.so.2 new/; for d in lib lib32 lib64 libx32; do rm -rf $d usr/$d; done; \
        mv new usr/lib; ln -s lib usr/lib64; ln -s usr/lib lib; ln -s usr/lib lib64; \
        rm -rf etc/debian_version etc/ld.so.conf* etc/ld.so.cache; echo /usr/lib >etc/ld.so.conf; /sbin/ldconfig -r .";
    run(Command::new("sh").args(["-euc", script]).arg(&image.rootfs)).ok();
    image
}

/// Loads libraries with the cache, and without it like the loaders of Plex and Emby.
fn assert_finds(container: &Waiting) {
    container.output("probe-dlopen libcuda.so.1 libnvidia-ml.so.1");
    container.output("/lib64/ld-linux-x86-64.so.2 --inhibit-cache /usr/bin/probe-dlopen libcuda.so.1 libnvidia-ml.so.1");
}

fn one_library_directory() {
    let (dir, fake) = (scratch(), host_with_32_bit_libraries());
    let image = arch_image(dir.path());
    let container = Waiting::start(dir.path(), &image.rootfs, ALL, "");
    let ran = container.hook(&fake.config);
    assert_eq!(ran.stderr, "");
    ran.ok();
    assert_finds(&container);
    let listed = container.output("ldconfig -p");
    assert_says(&listed, &["libcuda.so.1 (libc6) => /usr/lib32/"]);
    container.output("ldconfig");
    assert_finds(&container);
}

/// Engines sort the mounts of a spec in different ways, so the result must not depend on the order.
fn one_library_directory_with_cdi() {
    let fake = host_with_32_bit_libraries();
    let spec = generate(&fake, &["--hook-path", HOOK]);
    for reversed in [false, true] {
        let dir = scratch();
        let image = arch_image(dir.path());
        let mut edits = spec.container_edits.clone();
        edits
            .mounts
            .sort_by(|a, b| a.container_path.cmp(&b.container_path));
        if reversed {
            edits.mounts.reverse();
        }
        let container = with_mounts(dir.path(), &image.rootfs, &edits);
        container
            .create_runtime_hook(&edits.hooks[0].args[1..])
            .ok();
        assert_finds(&container);
    }
}

fn one_library_directory_in_config_json() {
    let (dir, fake) = (scratch(), host_with_32_bit_libraries());
    let image = arch_image(dir.path());
    let printed =
        edit_config::edit_config(&fake.config, &edit_config::spec(&image.rootfs, ALL)).ok();
    let config: Value = serde_json::from_str(&printed.replace("1e400", "0")).unwrap();
    let mut paths = Vec::new();
    for mount in config["mounts"].as_array().unwrap() {
        let path = mount["destination"].as_str().unwrap();
        if path.contains("libcuda.so") {
            paths.push(path);
        }
    }
    assert_eq!(
        paths,
        [
            "/usr/lib32/libcuda.so.535.183.01",
            "/usr/lib64/libcuda.so.535.183.01"
        ]
    );
}

/// The first driver file at a place stays: the 64-bit libraries are mounted first.
fn a_volume_that_makes_the_directories_one() {
    let (dir, fake) = (scratch(), host_with_32_bit_libraries());
    let image = Image::new(dir.path(), &["--layout", "lib64"]);
    let before =
        "mkdir -p \"$rootfs/usr/lib32\"; mount --bind \"$rootfs/usr/lib64\" \"$rootfs/usr/lib32\"";
    let container = Waiting::start(dir.path(), &image.rootfs, ALL, before);
    let ran = container.hook(&fake.config);
    assert!(!ran.stderr.contains("ONH-301"), "{ran:?}");
    ran.ok();
    container.output("probe-dlopen libcuda.so.1");
}

/// With CDI, libraries are at the host's paths. Loaders that do not read the cache search only the image's directory.
fn loaders_without_the_cache() {
    let fake = FakeDriver::new(&["--gpus", "1", "--layout", "lib64"]);
    let edits = generate(&fake, &["--hook-path", HOOK]).container_edits;
    let (dir, image) = Image::debian();
    let container = with_mounts(dir.path(), &image.rootfs, &edits);
    let args = &edits.hooks[0].args[1..];
    container.create_runtime_hook(args).ok();
    assert_finds(&container);
    let mounts = container.mountinfo();
    container.create_runtime_hook(args).ok();
    assert_eq!(
        container.mountinfo(),
        mounts,
        "the second call changes nothing"
    );
}

/// An image that was committed from a container with an older driver has its links, and empty files as mount points. With CDI,
/// they are in another directory than the driver's libraries. This directory may be shared, so what remains is reported.
fn libraries_of_an_older_driver() {
    let fake = FakeDriver::new(&["--gpus", "1", "--layout", "lib64"]);
    shell!(
        "cd '{}'; rm $(find . -name 'libnvidia-opencl*'); /sbin/ldconfig -r .",
        fake.root.display()
    );
    let edits = generate(&fake, &["--hook-path", HOOK]).container_edits;
    let (dir, image) = Image::debian();
    let lib = image.rootfs.join("usr/lib/x86_64-linux-gnu");
    for name in ["libcuda", "libnvidia-ml", "libnvidia-opencl"] {
        let file = format!("{name}.so.470.1");
        write_file(lib.join(&file), "");
        std::os::unix::fs::symlink(&file, lib.join(format!("{name}.so.1"))).unwrap();
    }
    let container = with_mounts(dir.path(), &image.rootfs, &edits);
    let ran = container.create_runtime_hook(&edits.hooks[0].args[1..]);
    let says = "another driver version left the empty file \"/usr/lib/x86_64-linux-gnu/libcuda.so.470.1\" and 3 more in the container (ONH-318)";
    assert!(ran.stderr.contains(says), "{ran:?}");
    ran.ok();
    assert_finds(&container);
    container.output(
        "LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu probe-dlopen libcuda.so.1 libnvidia-ml.so.1",
    );
}

/// The copy that a start with an older driver left is replaced, and a file that the container has written stays.
fn copies_of_an_older_driver() {
    let fake = FakeDriver::new(&["--gpus", "1", "--all-files"]);
    let (dir, image) = Image::debian();
    let start = |text: &str| {
        let icd = "etc/OpenCL/vendors/nvidia.icd";
        write_file(fake.root.join(icd), text);
        let container = Waiting::with_all_gpus(dir.path(), &image);
        container.hook(&fake.config).ok();
        let seen = container.output(&format!("cat /{icd}"));
        (seen, container.rootfs.join(icd))
    };
    assert_eq!(start("older").0, "older");
    let (seen, copy) = start("newer driver");
    assert_eq!(seen, "newer driver");
    write_file(copy, "the container's");
    assert_eq!(start("newest").0, "the container's");
}

/// Incus and LXC request only the driver's files, and enroot gives them to containers with "none".
fn no_gpu_needs_no_nvml() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    fake.set_nvml(|old| old + "\ninit-hang\n");
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::start(
        dir.path(),
        &image.rootfs,
        &["NVIDIA_VISIBLE_DEVICES=none"],
        "",
    );
    let began = Instant::now();
    container.hook(&fake.config).ok();
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
    container.output("test -x /usr/bin/nvidia-smi && test ! -e /dev/nvidia0");
    // A requirement is about the GPUs, which only NVML knows.
    fake.configure("[oci-nvidia-hook]\nnvml-timeout = 1");
    container.set_env(&[
        "NVIDIA_VISIBLE_DEVICES=none",
        "NVIDIA_REQUIRE_CUDA=cuda>=12.0",
    ]);
    let stderr = container.hook(&fake.config).failed(1);
    assert!(stderr.contains("(ONH-016)"), "{stderr}");
}

/// TensorFlow's and other images list CUDA's stubs for ldconfig, and a user runs it in the container.
fn stubs_after_ldconfig() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let (dir, image) = Image::debian();
    let script = "cd \"$0\"; mkdir -p usr/local/cuda/stubs etc/ld.so.conf.d; cp \"$1\" usr/local/cuda/stubs/libcuda.so.1; \
        echo /usr/local/cuda/stubs >etc/ld.so.conf.d/cuda-stubs.conf; /sbin/ldconfig -r .";
    run(Command::new("sh")
        .args(["-euc", script])
        .arg(&image.rootfs)
        .arg(stub("libcuda.so.1", false)))
    .ok();
    let container = Waiting::start(dir.path(), &image.rootfs, ALL, "");
    container.hook(&fake.config).ok();
    for ldconfig in ["true", "ldconfig"] {
        let listed = container.output(&format!("{ldconfig}; ldconfig -p"));
        let first = listed
            .lines()
            .find(|line| line.contains("libcuda.so.1 ("))
            .unwrap();
        assert!(
            first.ends_with("=> /lib/x86_64-linux-gnu/libcuda.so.1")
                || first.ends_with("=> /usr/lib/x86_64-linux-gnu/libcuda.so.1"),
            "{listed}"
        );
    }
}

/// A full disk during an update leaves empty and truncated files.
fn a_library_that_is_not_whole() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let (dir, image) = Image::debian();
    let library = fake
        .root
        .join("usr/lib/x86_64-linux-gnu/libcuda.so.535.183.01");
    let whole = std::fs::read(&library).unwrap();
    for (content, fault) in [
        (&b""[..], "the file is empty"),
        (&whole[..whole.len() / 2], "the file is truncated"),
        (b"#!/bin/sh\n", "it has another format"),
    ] {
        std::fs::remove_file(&library).unwrap();
        write_file(&library, content);
        let spec = edit_config::spec(&image.rootfs, ALL);
        let container = Waiting::start(dir.path(), &image.rootfs, ALL, "");
        for stderr in [
            container.hook(&fake.config).failed(1),
            edit_config::edit_config(&fake.config, &spec).failed(1),
            cdi(&fake, &["generate", "--output", "-"]).failed(1),
        ] {
            let what = format!("libcuda.so.535.183.01\" is not a library: {fault} (ONH-023)");
            assert!(stderr.contains(&what), "{stderr}");
        }
    }
}

/// Debian after `update-glx` chose Mesa: the links to nvidia/current are gone, and the linker cache lists only libraries that no
/// alternative covers.
fn a_partial_linker_cache() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let lib = fake.root.join("usr/lib/x86_64-linux-gnu");
    let script = "cd \"$0\"; mkdir -p nvidia/current; mv libcuda* libnvidia-* nvml.conf nvidia/current/; cp \"$1\" libnvidia-glcore.so.535.183.01; \
        echo /usr/lib/x86_64-linux-gnu >../../../etc/ld.so.conf; /sbin/ldconfig -r ../../..";
    run(Command::new("sh")
        .args(["-euc", script])
        .arg(&lib)
        .arg(stub("libnvidia-glcore.so.535.183.01", false)))
    .ok();
    let listed = fake.run(&["files", "--libraries"]).ok();
    for name in ["libcuda", "libnvidia-ml", "libnvidia-glcore"] {
        assert_says(&listed, &[&format!("{name}.so.535.183.01")]);
    }
    let spec = cdi(&fake, &["generate", "--output", "-"]).ok();
    assert_says(&spec, &["nvidia/current/libcuda.so.535.183.01"]);
}
