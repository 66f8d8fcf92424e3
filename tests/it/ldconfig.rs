//! Runs the image's own ldconfig in a container, like package managers: the driver's libraries must still be found afterwards.

use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};

use crate::cdi::{generate, write_spec};
use crate::cdi_containers::{only_spec, with_mounts};
use crate::driver::{ALL_GPUS, FakeDriver, Image, NEEDS, Waiting};
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::support::{
    HOOK, assert_lacks, assert_says, private_dir, read, scratch, shell, snapshot, write_file,
};

tests! {
    NEEDS => directories_of_the_host_in_cdi, directories_of_the_host_in_config_json, cuda_compat_stays_first,
        images_without_configuration, a_configuration_without_drop_ins, nothing_is_written_without_need,
        a_list_that_is_out_of_date_goes, volumes_are_left_alone, a_container_that_ran_with_another_driver;
    engine::NEEDS => podman_installs_a_package = podman_installs_a_package(Cgroup::AsMounted), podman_read_only;
    engine::NEEDS_CRUN => podman_installs_a_package_with_crun = podman_installs_a_package(Cgroup::WithCrun);
}

pub const LIST: &str = "/etc/ld.so.conf.d/00-oci-nvidia-hook.conf";
/// The commands of maintainer scripts and triggers of dpkg, rpm and zypper.
const RUN: [&str; 2] = ["ldconfig", "/sbin/ldconfig -X"];
pub const LOOK: &str =
    "probe-dlopen libcuda.so.1 libnvidia-ml.so.1 libnvidia-ptxjitcompiler.so.1 libnvidia-nvvm.so.4";

/// A host whose libraries are in directories that an image like Debian does not search.
fn suse() -> FakeDriver {
    FakeDriver::new(&["--gpus", "1", "--layout", "lib64"])
}

fn files_found(listed: &str) -> Vec<&str> {
    let lines = listed
        .lines()
        .filter(|line| line.contains("535.183.01") || line.contains("libcuda"));
    lines.collect()
}

#[track_caller]
fn assert_the_same_after_ldconfig(container: &Waiting) {
    let before = container.output(LOOK);
    for ldconfig in RUN {
        assert_eq!(
            container.output(&format!("{ldconfig} && {LOOK}")),
            before,
            "{ldconfig}"
        );
    }
}

pub fn cdi_container(dir: &Path, fake: &FakeDriver, rootfs: &Path) -> Waiting {
    let edits = generate(fake, &["--hook-path", HOOK]).container_edits;
    let container = with_mounts(dir, rootfs, &edits);
    container
        .create_runtime_hook(&edits.hooks[0].args[1..])
        .ok();
    container
}

fn directories_of_the_host_in_cdi() {
    let (dir, fake) = (scratch(), suse());
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = cdi_container(dir.path(), &fake, &image.rootfs);
    let listed = container.output("ldconfig -p");
    assert_the_same_after_ldconfig(&container);
    assert!(
        files_found(&container.output("ldconfig -p")).len() >= files_found(&listed).len() - 1,
        "{listed}"
    );
    // Without the list, the image's ldconfig finds the links in the image's library directory.
    let listed = container.output(&format!("rm {LIST}; ldconfig; ldconfig -p"));
    assert!(!listed.contains("=> /usr/lib64/libcuda.so.1"), "{listed}");
    container.output("probe-dlopen libcuda.so.1");
}

/// Podman 5 does not have a root file system yet for a container with a user namespace: files are placed at the paths of the
/// host.
fn directories_of_the_host_in_config_json() {
    let (dir, fake) = (scratch(), suse());
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    assert_the_same_after_ldconfig(&edited_container(dir.path(), &fake, &image.rootfs));
}

pub fn edited_container(dir: &Path, fake: &FakeDriver, rootfs: &Path) -> Waiting {
    let empty = dir.join("empty");
    std::fs::create_dir(&empty).unwrap();
    let env = ["NVIDIA_VISIBLE_DEVICES=all"];
    let spec = json!({"ociVersion": "1.0.2", "root": {"path": empty}, "process": {"env": env, "args": ["sh"]}});
    let edited: Value = serde_json::from_str(&fake.edit_config(&spec.to_string()).ok()).unwrap();
    let mut before = String::new();
    for mount in edited["mounts"].as_array().unwrap() {
        let (from, to) = (
            mount["source"].as_str().unwrap(),
            mount["destination"].as_str().unwrap(),
        );
        before += &format!(
            "mkdir -p $rootfs$(dirname {to}); touch $rootfs{to}; mount --bind {from} $rootfs{to}\n"
        );
    }
    let container = Waiting::start(dir, rootfs, &env, &before);
    let entry = &edited["hooks"]["createRuntime"];
    container.set_hooks("createRuntime", entry);
    let args: Vec<String> = serde_json::from_value(entry[0]["args"].clone()).unwrap();
    container.create_runtime_hook(&args[1..]).ok();
    container
}

/// An image with a newer libcuda of its own.
pub fn with_compat(ldconf: &str) -> (tempfile::TempDir, Image) {
    let dir = scratch();
    let image = Image::new(dir.path(), &["--layout", "debian", "--ldconf", ldconf]);
    let compat = image.rootfs.join("usr/local/cuda/compat");
    std::fs::create_dir_all(&compat).unwrap();
    crate::features::compat_library(&compat.join("libcuda.so.575.57.08"), "");
    symlink("libcuda.so.575.57.08", compat.join("libcuda.so.1")).unwrap();
    (dir, image)
}

/// An image with its own newer libcuda, which programs also get after ldconfig ran.
fn cuda_compat_stays_first() {
    for (layout, cdi) in [
        ("multiarch", false),
        ("lib64", false),
        ("multiarch", true),
        ("lib64", true),
    ] {
        let fake = FakeDriver::new(&["--gpus", "1", "--layout", layout]);
        let (dir, image) = with_compat("include");
        let container = if cdi {
            cdi_container(dir.path(), &fake, &image.rootfs)
        } else {
            let container = Waiting::with_all_gpus(dir.path(), &image);
            container.hook(&fake.config).ok();
            container
        };
        assert!(
            container
                .output("probe-dlopen libcuda.so.1")
                .contains("/cuda/compat/"),
            "{layout} {cdi}"
        );
        assert_the_same_after_ldconfig(&container);
        let list = container.output(&format!("cat {LIST}"));
        let dirs: Vec<_> = list.lines().filter(|line| line.starts_with('/')).collect();
        let ours = ["/usr/local/cuda/compat", "/usr/lib64"];
        assert_eq!(
            dirs,
            &ours[..if cdi && layout == "lib64" { 2 } else { 1 }],
            "{layout} {cdi}"
        );
    }
}

/// The image gets the line that all distributions have, and an image without an ldconfig gets nothing.
fn images_without_configuration() {
    let (dir, fake) = (scratch(), suse());
    let image = Image::new(dir.path(), &["--layout", "debian", "--ldconf", "none"]);
    let container = cdi_container(dir.path(), &fake, &image.rootfs);
    assert_the_same_after_ldconfig(&container);
    assert_eq!(
        container.output("cat /etc/ld.so.conf"),
        "include /etc/ld.so.conf.d/*.conf\n"
    );

    let dir = scratch();
    let image = Image::new(dir.path(), &["--layout", "debian", "--ldconf", "none"]);
    std::fs::remove_file(image.rootfs.join("usr/sbin/ldconfig")).unwrap();
    let container = cdi_container(dir.path(), &fake, &image.rootfs);
    container.output(LOOK);
    container.output("ls /etc/ld.so.conf* && exit 1; exit 0");
}

/// The line that includes the directory is added once. A link and a volume are not changed, and are reported.
fn a_configuration_without_drop_ins() {
    let (dir, fake) = (scratch(), suse());
    let image = Image::new(dir.path(), &["--layout", "debian", "--ldconf", "plain"]);
    let conf = read(image.rootfs.join("etc/ld.so.conf"));
    assert!(!conf.contains("include"), "{conf}");
    // The image does not use this directory, so the hook must not activate its other files.
    std::fs::create_dir(image.rootfs.join("etc/ld.so.conf.d")).unwrap();
    write_file(
        image.rootfs.join("etc/ld.so.conf.d/unused.conf"),
        "/unused\n",
    );
    std::fs::create_dir(image.rootfs.join("unused")).unwrap();
    crate::features::compat_library(&image.rootfs.join("unused/libunused.so.1"), "");
    let expected = format!("include {LIST}\n{conf}");
    for _start in 0..2 {
        let container = cdi_container(dir.path(), &fake, &image.rootfs);
        assert_the_same_after_ldconfig(&container);
        assert_eq!(read(image.rootfs.join("etc/ld.so.conf")), expected);
        let listed = container.output("ldconfig -p");
        assert!(!listed.contains("/unused/"), "{listed}");
    }
    let (dir, image) = with_compat("plain");
    let container = Waiting::with_all_gpus(dir.path(), &image);
    container.hook(&fake.config).ok();
    assert!(
        container
            .output("probe-dlopen libcuda.so.1")
            .contains("/cuda/compat/")
    );
    assert_the_same_after_ldconfig(&container);
    drop(container);

    let (dir, image) = with_compat("plain");
    let rename = |from: &str, to: &str| {
        std::fs::rename(image.rootfs.join(from), image.rootfs.join(to)).unwrap()
    };
    rename("etc/ld.so.conf", "etc/other.conf");
    symlink("other.conf", image.rootfs.join("etc/ld.so.conf")).unwrap();
    assert_left_alone(dir.path(), &fake, &image, "");
    std::fs::remove_file(image.rootfs.join("etc/ld.so.conf")).unwrap();
    rename("etc/other.conf", "etc/ld.so.conf");
    assert_left_alone(
        dir.path(),
        &fake,
        &image,
        "mount --bind $rootfs/etc/ld.so.conf $rootfs/etc/ld.so.conf\n",
    );

    // A configuration that lists the directory itself needs no change.
    let dir = scratch();
    let image = Image::new(dir.path(), &["--layout", "debian", "--ldconf", "plain"]);
    write_file(
        image.rootfs.join("etc/ld.so.conf"),
        format!("{conf}/usr/lib64\n"),
    );
    let container = cdi_container(dir.path(), &fake, &image.rootfs);
    // ldconfig finds the links in the image's library directory first, which lead to the same files.
    for ldconfig in RUN {
        container.output(&format!("{ldconfig} && {LOOK}"));
    }
    assert!(!image.rootfs.join("etc/ld.so.conf.d").exists());
}

fn assert_left_alone(dir: &Path, fake: &FakeDriver, image: &Image, setup: &str) {
    let conf = image.rootfs.join("etc/ld.so.conf");
    let before = std::fs::read(&conf).unwrap();
    let private = private_dir();
    let log = private.path().join("log");
    fake.configure(&format!("debug = \"{}\"", log.display()));
    let container = Waiting::start(dir, &image.rootfs, ALL_GPUS, setup);
    container.hook(&fake.config).ok();
    let text = read(&log);
    assert_says(
        &text,
        &[
            "will not find the libraries in \"/usr/local/cuda/compat\"",
            "ONH-315",
        ],
    );
    assert_eq!(std::fs::read(&conf).unwrap(), before);
    assert!(!image.rootfs.join("etc/ld.so.conf.d").exists());
    std::fs::remove_file(log).unwrap();
}

fn nothing_is_written_without_need() {
    // Directories that the image searches anyway, and a configuration that contains the host's directory with another path.
    for (layout, extra) in [
        ("multiarch", ""),
        ("lib64", "/opt/../usr/lib64\n"),
        ("lib64", "/alias\n"),
    ] {
        let (dir, fake) = (
            scratch(),
            FakeDriver::new(&["--gpus", "1", "--layout", layout]),
        );
        let image = Image::new(dir.path(), &["--layout", "debian"]);
        symlink("usr/lib64", image.rootfs.join("alias")).unwrap();
        std::fs::create_dir(image.rootfs.join("opt")).unwrap();
        write_file(image.rootfs.join("etc/ld.so.conf.d/more.conf"), extra);
        let container = cdi_container(dir.path(), &fake, &image.rootfs);
        container.output(&format!("ldconfig && {LOOK}"));
        container.exec(&format!("test -e {LIST}")).failed(1);
    }
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let conf = || {
        snapshot(&image.rootfs.join("etc"))
            .lines()
            .filter(|line| line.contains("ld.so.conf"))
            .count()
    };
    let before = conf();
    let container = Waiting::with_all_gpus(dir.path(), &image);
    container.hook(&fake.config).ok();
    assert_the_same_after_ldconfig(&container);
    assert_eq!(conf(), before);
}

/// Files of an earlier start: with another driver, or of a container from which the image was committed.
fn a_list_that_is_out_of_date_goes() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let list = image.rootfs.join(&LIST[1..]);
    for (text, stays) in [
        (
            "# Written by oci-nvidia-hook: where the NVIDIA driver's libraries are in this container.\n/usr/lib64\n",
            false,
        ),
        ("/opt/other\n", true),
    ] {
        write_file(&list, text);
        let container = Waiting::with_all_gpus(dir.path(), &image);
        container.hook(&fake.config).ok();
        assert_eq!(list.exists(), stays, "{text}");
        assert_the_same_after_ldconfig(&container);
    }
    // A file that is not ours is not replaced either.
    let (dir, image) = Image::debian();
    write_file(image.rootfs.join(&LIST[1..]), "/opt/other\n");
    let container = cdi_container(dir.path(), &suse(), &image.rootfs);
    assert_eq!(container.output(&format!("cat {LIST}")), "/opt/other\n");
}

fn volumes_are_left_alone() {
    let fake = suse();
    for (point, ldconf) in [
        ("etc", "include"),
        ("etc/ld.so.conf.d", "include"),
        ("etc/ld.so.conf.d", "plain"),
    ] {
        let dir = scratch();
        let image = Image::new(dir.path(), &["--layout", "debian", "--ldconf", ldconf]);
        std::fs::create_dir_all(image.rootfs.join(point)).unwrap();
        let conf = std::fs::read(image.rootfs.join("etc/ld.so.conf")).unwrap();
        let volume = dir.path().join("volume");
        std::process::Command::new("cp")
            .arg("-a")
            .arg(image.rootfs.join(point))
            .arg(&volume)
            .status()
            .unwrap();
        std::fs::remove_file(volume.join("ld.so.cache")).ok();
        let before = snapshot(&volume);
        let edits = generate(&fake, &["--hook-path", HOOK]).container_edits;
        let mount = format!("mount --bind '{}' $rootfs/{point}\n", volume.display());
        let container =
            crate::cdi_containers::with_mounts_after(dir.path(), &image.rootfs, &edits, &mount);
        container
            .create_runtime_hook(&edits.hooks[0].args[1..])
            .ok();
        let after = snapshot(&volume);
        let is_conf = |text: &str| -> Vec<String> {
            text.lines()
                .filter(|line| line.contains(".conf"))
                .map(str::to_owned)
                .collect()
        };
        assert_eq!(is_conf(&after), is_conf(&before), "{point} {ldconf}");
        assert_eq!(
            std::fs::read(image.rootfs.join("etc/ld.so.conf")).unwrap(),
            conf,
            "{point} {ldconf}"
        );
    }
}

/// After a driver update, `podman start` of an old container removes the files of the old driver, and nothing else.
fn a_container_that_ran_with_another_driver() {
    let dir = scratch();
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let libdir = image.rootfs.join("usr/lib/x86_64-linux-gnu");
    // Files of the image: an empty file of another kind, a library of another driver that is not empty, a link.
    write_file(libdir.join("libmine.so.1.2"), "");
    write_file(libdir.join("libnvidia-fbc.so.470.1"), "the image's");
    symlink("libmine.so.1.2", libdir.join("libmine.so.1")).unwrap();
    for name in ["upper", "work", "merged", "merged/dev"] {
        std::fs::create_dir(dir.path().join(name)).unwrap();
    }
    let overlay = format!(
        "umount $rootfs/dev; cd '{}'; mount -t overlay -o lowerdir=image,upperdir=upper,workdir=work none merged; \
         mount -t tmpfs dev merged/dev",
        dir.path().display()
    );
    let start = || {
        let container = Waiting::start(dir.path(), &dir.path().join("merged"), ALL_GPUS, &overlay);
        container.hook(&fake.config).ok();
        container
    };
    let names = "cd /usr/lib/x86_64-linux-gnu; for file in *.so.*; do test -s $file || echo $file; done; \
                 ldconfig -p | grep libnvidia-opencl; true";
    let old = start();
    old.output("probe-dlopen libnvidia-opencl.so.1");
    drop(old);
    // Without the fix: the name that the new driver lacks leads to an empty file.
    fake.rebuild(&["--gpus", "1", "--version", "550.54.14"]);
    fake.configure("");
    shell!(
        "cd '{}'; rm $(find . -name 'libnvidia-opencl*'); /sbin/ldconfig -r .",
        fake.root.display()
    );
    let naive = Waiting::start(dir.path(), &dir.path().join("merged"), &[], &overlay);
    let said = naive.exec("probe-dlopen libnvidia-opencl.so.1");
    assert!(said.stdout.contains("file too short"), "{said:?}");
    drop(naive);
    for _ in 0..2 {
        let new = start();
        new.output("nvidia-smi -L; probe-dlopen libcuda.so.1 libnvidia-ml.so.1");
        let said = new.exec("probe-dlopen libnvidia-opencl.so.1");
        assert_eq!(said.code, Some(1), "{said:?}");
        assert_lacks(&said.stdout, &["file too short"]);
        assert_eq!(new.output(names), "libmine.so.1\nlibmine.so.1.2\n");
        new.output(
            "test -L /usr/lib/x86_64-linux-gnu/libmine.so.1; cat /usr/lib/x86_64-linux-gnu/libnvidia-fbc.so.470.1",
        );
    }
    // A rootfs that may also belong to another container is not changed.
    let (dir, image) = Image::debian();
    let empty = image
        .rootfs
        .join("usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.535.183.01");
    write_file(&empty, "");
    symlink(
        "libcuda.so.535.183.01",
        empty.with_file_name("libcuda.so.1"),
    )
    .unwrap();
    let ran = Waiting::with_all_gpus(dir.path(), &image).hook(&fake.config);
    assert!(empty.exists());
    let says = "another driver version left the empty file \"/usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.535.183.01\"";
    assert_says(&ran.stderr, &[says, "(ONH-318)\nhint: "]);
    ran.ok();
}

/// With CDI on a host like openSUSE, in an image like Debian; and at the hook's own stages.
fn podman_installs_a_package(cgroup: Cgroup) {
    let (dir, fake) = (scratch(), suse());
    let path = dir.path().join("nvidia.yaml");
    write_spec(&fake, &path);
    let script = format!("nvidia-smi -L; {LOOK}; ldconfig; {LOOK}; nvidia-smi -L");
    let cdi = ["--device=nvidia.com/gpu=0", IMAGE, "sh", "-euc", &script];
    let hook = [
        "-e",
        "NVIDIA_VISIBLE_DEVICES=0",
        IMAGE,
        "sh",
        "-euc",
        &script,
    ];
    let podman = Podman::shared();
    for text in [
        podman.run_after(&only_spec(&path), cgroup, &cdi).ok(),
        podman.run_after("", cgroup, &hook).ok(),
    ] {
        assert_eq!(text.matches("UUID: GPU-").count(), 2, "{text}");
        assert_eq!(text.matches(": ok ").count(), 8, "{text}");
    }
}

/// In such a container, ldconfig cannot write the cache.
fn podman_read_only() {
    let (dir, fake) = (scratch(), suse());
    let path = dir.path().join("nvidia.yaml");
    write_spec(&fake, &path);
    let script =
        format!("nvidia-smi -L; {LOOK}; ldconfig 2>/dev/null && exit 7; {LOOK}; nvidia-smi -L");
    let arguments = [
        "--device=nvidia.com/gpu=0",
        "--read-only",
        IMAGE,
        "sh",
        "-euc",
        &script,
    ];
    let text = Podman::shared()
        .run_after(&only_spec(&path), Cgroup::AsMounted, &arguments)
        .ok();
    assert_eq!(text.matches("UUID: GPU-").count(), 2, "{text}");
}
