//! Each feature that containers can request and administrators can configure, tested in a container.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::driver::{ALL_GPUS, FakeDriver, Image, MASKABLE_PROC, NEEDS, Waiting};
use crate::own_nodes::NODES_OF_THE_HOST;
use crate::support::{assert_says, read, run_with, scratch, shell, write_file};

tests! {
    NEEDS => prepare_makes_nodes, cuda_compat, files_of_the_administrator, links_for_development,
        unknown_libraries_are_for_all, one_mig_device, mig_management_is_for_privileged_containers,
        limits_and_requirements, suse_nodes_need_the_video_group;
}

const LIBDIR: &str = "/usr/lib/x86_64-linux-gnu";

/// Nodes are created as stated in the module's parameters and capability files, with links for runc and systemd. A second run
/// changes nothing, and a wrong node is replaced.
fn prepare_makes_nodes() {
    let fake = FakeDriver::new(&[
        "--gpus",
        "2",
        "--mig",
        "--dev-mode",
        "0660",
        "--dev-group",
        "video",
        "--no-dev",
    ]);
    std::fs::create_dir_all(fake.root.join("sys/module/nvidia_modeset")).unwrap();
    let prepare = || fake.run(&["prepare"]).ok();
    let said = prepare();
    let made: Vec<_> = said
        .lines()
        .map(|line| line.split(' ').nth(1).unwrap())
        .collect();
    assert_eq!(made.len(), 2 + 1 + 1 + 2 + 6, "{said}");
    assert_says(&said, &["made /dev/nvidia1 c 195:1 0:", " 0660\n"]);
    // Capabilities have their own owners and modes: the first one repartitions GPUs.
    for cap in [
        "1 c 510:1 0:0 0400",
        "2 c 510:2 0:0 0444",
        "12 c 510:12 0:0 0444",
        "22 c 510:22 0:0 0444",
    ] {
        assert_says(
            &said,
            &[&format!("made /dev/nvidia-caps/nvidia-cap{cap}\n")],
        );
    }
    assert_eq!(prepare(), "");
    let dev = fake.root.join("dev");
    std::fs::remove_file(dev.join("nvidia0")).unwrap();
    write_file(dev.join("nvidia0"), "");
    assert!(prepare().starts_with("made /dev/nvidia0 "));
    let link = std::fs::read_link(dev.join("char/510:12")).unwrap();
    assert_eq!(link, Path::new("../nvidia-caps/nvidia-cap12"));
    // The created nodes are those that the driver needs.
    fake.configure(NODES_OF_THE_HOST);
    let container = Waiting::debian(ALL_GPUS, "");
    container.hook(&fake.config).ok();
    assert_eq!(
        container.output("stat -c '%a %U:%G' /dev/nvidia0").trim(),
        "660 root:video"
    );

    write_file(
        fake.root.join("proc/driver/nvidia/params"),
        "ModifyDeviceFiles: 0\n",
    );
    assert_eq!(prepare(), "", "the administrator makes them");
}

/// A newer libcuda of the image is found before the host's; an older one, and one that is reached through a link to the host, is
/// not.
fn cuda_compat() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let compat = "usr/local/cuda-12.9/compat";
    for (version, mode, note, theirs) in [
        ("575.57.08", "ldconfig", "", true),
        ("575.57.08", "disabled", "", false),
        ("470.1.1", "ldconfig", "", false),
        ("575.57.08", "ldconfig", "[535, 550]", true),
        ("575.57.08", "ldconfig", "[550]", false),
    ] {
        fake.configure(&format!(
            "[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = \"{mode}\""
        ));
        let (dir, image) = Image::debian();
        let target = image.rootfs.join(compat);
        std::fs::create_dir_all(&target).unwrap();
        symlink("/usr/local/cuda-12.9", image.rootfs.join("usr/local/cuda")).unwrap();
        compat_library(&target.join(format!("libcuda.so.{version}")), note);
        symlink(format!("libcuda.so.{version}"), target.join("libcuda.so.1")).unwrap();
        let container = Waiting::with_all_gpus(dir.path(), &image);
        let shown = fake.run_with(&["plan", "-"], &container.state()).ok();
        assert_eq!(
            shown.contains("ONH-231"),
            theirs,
            "{version} {mode} {note}: {shown}"
        );
        container.hook(&fake.config).ok();
        let found = container.output("probe-dlopen libcuda.so.1 libcuda.so libnvidia-ml.so.1");
        // A process that opens both names must not get two libraries.
        let from_image = found.matches("/usr/local/cuda/compat/libcuda.so").count();
        assert_eq!(
            from_image,
            if theirs { 2 } else { 0 },
            "{version} {mode} {note}: {found}"
        );
        // After the first run, the host's linker cache does not list the development link.
        std::fs::remove_file(fake.root.join(&LIBDIR[1..]).join("libcuda.so")).ok();
        shell!("/sbin/ldconfig -r '{}'", fake.root.display());
        assert_says(&found, &[&format!("{LIBDIR}/libnvidia-ml.so.1")]);
    }
    fake.configure("");
    let (dir, image) = Image::debian();
    std::fs::create_dir_all(dir.path().join("host")).unwrap();
    write_file(dir.path().join("host/libcuda.so.999.1.1"), "");
    std::fs::create_dir_all(image.rootfs.join("usr/local/cuda")).unwrap();
    symlink(
        dir.path().join("host"),
        image.rootfs.join("usr/local/cuda/compat"),
    )
    .unwrap();
    let container = Waiting::with_all_gpus(dir.path(), &image);
    container.hook(&fake.config).ok();
    assert!(
        container
            .output("probe-dlopen libcuda.so.1")
            .contains(LIBDIR)
    );
}

/// Programs open the libraries by these names, whether or not the host's development packages are installed. The hook and CDI
/// both create them.
fn links_for_development() {
    const NAMES: [&str; 4] = [
        "libnvidia-encode",
        "libnvidia-fbc",
        "libnvidia-ml",
        "libnvidia-ngx",
    ];
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    for name in NAMES.iter().filter(|name| **name != "libnvidia-ml") {
        let library = fake
            .root
            .join(&LIBDIR[1..])
            .join(format!("{name}.so.535.183.01"));
        std::fs::copy(crate::hosts::stub(&format!("{name}.so.1"), false), library).unwrap();
    }
    shell!("/sbin/ldconfig -r '{}'", fake.root.display());
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let env = [
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=all",
    ];
    let container = Waiting::start(dir.path(), &image.rootfs, &env, "");
    container.hook(&fake.config).ok();
    let spec = fake.run(&["cdi", "generate", "--output", "-"]).ok();
    for name in NAMES {
        assert_eq!(
            container.output(&format!("readlink {LIBDIR}/{name}.so")),
            format!("{name}.so.1\n")
        );
        container.output(&format!("probe-dlopen {name}.so"));
        let link = format!("{name}.so.1::{LIBDIR}/{name}.so");
        assert!(
            spec.lines().any(|line| line.contains(&link)),
            "{link} is not in\n{spec}"
        );
    }
}

/// The capability of an unknown library cannot be determined, so the library is provided only if no capability is withheld.
fn unknown_libraries_are_for_all() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let libdir = fake.root.join(&LIBDIR[1..]);
    std::fs::copy(
        libdir.join("libnvidia-cfg.so.535.183.01"),
        libdir.join("libnvidia-later.so.535.183.01"),
    )
    .unwrap();
    let shipped = read(&fake.config);
    for (supported, asked, given) in [
        ("", "all", true),
        ("compute,display,graphics,ngx,utility,video", "all", true),
        ("compute,utility", "all", false),
        ("", "compute,utility", false),
    ] {
        let lock = if supported.is_empty() {
            String::new()
        } else {
            format!("supported-driver-capabilities = \"{supported}\"\n")
        };
        write_file(&fake.config, lock + &shipped);
        let capabilities = format!("NVIDIA_DRIVER_CAPABILITIES={asked}");
        let shown = fake.plan(&[ALL_GPUS[0], &capabilities]).to_string();
        assert_eq!(
            shown.contains("libnvidia-later"),
            given,
            "{supported:?} {asked}: {shown}"
        );
    }
}

/// A drop-in names a library and a file that the catalog does not contain.
fn files_of_the_administrator() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let opt = fake.root.join("opt/extra");
    std::fs::create_dir_all(&opt).unwrap();
    std::fs::copy(
        fake.root
            .join(&LIBDIR[1..])
            .join("libnvidia-nvvm.so.535.183.01"),
        opt.join("libextra.so.7"),
    )
    .unwrap();
    write_file(opt.join("extra.conf"), "extra");
    let drop_ins = fake.config.with_file_name("config.toml.d");
    std::fs::create_dir(&drop_ins).unwrap();
    write_file(
        drop_ins.join("extra.toml"),
        "[driver]\nfiles = [\"/opt/extra/libextra.so.7\", \"/opt/extra/extra.conf\", \"/opt/extra/none\"]\n",
    );
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::with_all_gpus(dir.path(), &image);
    let ran = container.hook(&fake.config);
    assert_says(&ran.stderr, &["\"/opt/extra/none\"", "ONH-207"]);
    ran.ok();
    assert_eq!(container.output("cat /opt/extra/extra.conf"), "extra");
    container.output(&format!("probe-dlopen {LIBDIR}/libextra.so.7"));
}

/// Creates a library, with the note of a compatibility library if `drivers` are given.
pub fn compat_library(path: &Path, drivers: &str) {
    let json = format!(
        "{{\\\"Format\\\":1,\\\"CUDA Version\\\":\\\"12.9\\\",\\\"Driver\\\":{drivers},\\\"Device\\\":[9]}}"
    );
    let note = format!(
        ".section .note.cuda.fwd_compatibility,\"a\",@note\n.balign 4\n.long 5, 2f-1f, 1\n.asciz \"CUDA\"\n.balign 4\n\
         1: .asciz \"{json}\"\n2: .balign 4\n"
    );
    let source = path.with_extension("s");
    write_file(&source, if drivers.is_empty() { "" } else { &note });
    let mut cc = Command::new("cc");
    run_with(
        cc.args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
            .arg(path)
            .arg(&source),
        b"",
    )
    .ok();
    std::fs::remove_file(source).unwrap();
}

/// The container gets the node of its GPU, its two capability nodes, and no node of another device.
fn one_mig_device() {
    let fake = FakeDriver::new(&["--gpus", "2", "--mig"]);
    let container = Waiting::debian(&["NVIDIA_VISIBLE_DEVICES=0:1"], MASKABLE_PROC);
    container.hook(&fake.config).ok();
    assert_eq!(
        container
            .output("cd /dev; echo nvidia[0-9]* nvidia-caps/*")
            .trim(),
        "nvidia0 nvidia-caps/nvidia-cap21 nvidia-caps/nvidia-cap22"
    );
    let listed = container.output("nvidia-smi -L");
    let lines: Vec<_> = listed.lines().collect();
    assert_eq!(lines.len(), 2, "{listed}");
    assert!(
        lines[1].starts_with("  MIG ") && lines[1].contains("(UUID: MIG-51eed000-0002-"),
        "{listed}"
    );
    let files = container.output(
        "cd /proc/driver/nvidia/capabilities; echo gpu0/mig/*/access gpu0/mig/*/*/access mig",
    );
    assert_eq!(
        files.trim(),
        "gpu0/mig/gi2/access gpu0/mig/gi2/ci0/access mig"
    );
    assert!(
        container
            .mount_options("/proc/driver/nvidia/capabilities/gpu0/mig/gi2/access")
            .starts_with("ro,nosuid,nodev,noexec")
    );

    // The same device by its other names, in a new container each.
    for name in [
        "MIG-51eed000-0002-4000-8000-0000fa4e0002",
        "mig-gpu-51eed000-0000-4000-8000-0000fa4e0000/2/0",
    ] {
        let env = format!("NVIDIA_VISIBLE_DEVICES={name}");
        let container = Waiting::debian(&[&env], "");
        container.hook(&fake.config).ok();
        assert_eq!(container.output("nvidia-smi -L"), listed, "{name}");
    }
    container.set_env(&["NVIDIA_VISIBLE_DEVICES=0:7"]);
    let stderr = container.hook(&fake.config).failed(1);
    assert_says(
        &stderr,
        &["\"0:7\"", "(ONH-030)", " 0, 0:0, 0:1, 1, all, none"],
    );
}

fn mig_management_is_for_privileged_containers() {
    let fake = FakeDriver::new(&["--gpus", "2", "--mig"]);
    let env = [
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_MIG_CONFIG_DEVICES=all",
    ];
    let container = Waiting::debian(&env, MASKABLE_PROC);
    let stderr = container.hook(&fake.config).failed(1);
    assert_says(&stderr, &["NVIDIA_MIG_CONFIG_DEVICES=\"all\""]);
    container.set_privileged_env(&env);
    container.hook(&fake.config).ok();
    let nodes = container.output("cd /dev/nvidia-caps; echo *");
    assert_eq!(
        nodes.trim(),
        "nvidia-cap1 nvidia-cap12 nvidia-cap13 nvidia-cap21 nvidia-cap22"
    );
    container.output("cat /proc/driver/nvidia/capabilities/mig/config");
    container.set_privileged_env(&["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_MIG_MONITOR_DEVICES=0"]);
    assert!(container.hook(&fake.config).failed(1).contains("(ONH-038)"));
}

fn limits_and_requirements() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    fake.configure("[devices]\ndeny = [\"1\"]\n[oci-nvidia-hook]\nrequire = \"warn\"");
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let env = ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_REQUIRE_CUDA=cuda>=99"];
    let container = Waiting::start(dir.path(), &image.rootfs, &env, "");
    let ran = container.hook(&fake.config);
    assert_says(
        &ran.stderr,
        &["NVIDIA_REQUIRE_CUDA=\"cuda>=99\", but GPU 0 has cuda 12.2"],
    );
    assert!(ran.stderr.contains("(ONH-204)"), "{ran:?}");
    ran.ok();
    assert_eq!(
        container.output("cd /dev; echo nvidia[0-9]*").trim(),
        "nvidia0"
    );
    container.set_env(&["NVIDIA_VISIBLE_DEVICES=1"]);
    assert!(container.hook(&fake.config).failed(1).contains("(ONH-032)"));
    fake.configure("");
    container.set_env(&env);
    assert!(container.hook(&fake.config).failed(1).contains("(ONH-034)"));
}

/// SUSE's driver creates its nodes as root:video 0660. The default configuration detects the group.
fn suse_nodes_need_the_video_group() {
    let (dir, fake) = (
        scratch(),
        FakeDriver::new(&["--gpus", "1", "--dev-mode", "0660", "--dev-group", "video"]),
    );
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::with_all_gpus(dir.path(), &image);
    for user in ["", "user = \"root:video\"", "user = \"nobody:video\""] {
        fake.configure(user);
        container.hook(&fake.config).ok();
    }
    assert_eq!(
        container.output("stat -c '%a %U:%G' /dev/nvidia0").trim(),
        "666 root:root"
    );
}
