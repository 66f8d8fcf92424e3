//! The poststop stage removes what the setup left in the file system of a container.

use serde_json::Value;

use crate::Test;
use crate::driver::{FakeDriver, Image};
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::support::{HOOK, Ran, scratch, sh, source};

pub const TESTS: &[Test] = &[
    ("poststop::podman_commits_a_clean_image", engine::NEEDS, || podman_commits_a_clean_image(Cgroup::AsMounted)),
    ("poststop::podman_commits_a_clean_image_with_crun", engine::NEEDS_CRUN, || {
        podman_commits_a_clean_image(Cgroup::WithCrun);
    }),
    ("poststop::copies", engine::NEEDS, copies),
    ("poststop::mount_points_of_the_runtime", engine::NEEDS, mount_points_of_the_runtime),
    ("poststop::podman_start_after_a_driver_update", engine::NEEDS, podman_start_after_a_driver_update),
    ("poststop::a_shared_root_is_left_alone", engine::NEEDS, a_shared_root_is_left_alone),
];

/// Installs the hook file of docs/modes.md, with the tested program.
fn install(podman: &Podman) {
    let docs = std::fs::read_to_string(source("docs/modes.md")).unwrap();
    let mut json: Value = serde_json::from_str(crate::docs::blocks(&docs, "json")[0]).unwrap();
    assert_eq!(json["stages"], serde_json::json!(["poststop"]));
    json["hook"]["path"] = HOOK.into();
    std::fs::write(podman.hooks.join("oci-nvidia-hook-poststop.json"), json.to_string()).unwrap();
}

fn uninstall(podman: &Podman) {
    std::fs::remove_file(podman.hooks.join("oci-nvidia-hook-poststop.json")).unwrap();
}

/// Returns what differs from the image after this container has run, and after its image was committed and run without GPUs.
/// Podman 5 can return from `podman run` before it has called the hook; `podman container cleanup` waits for the hook.
fn left(podman: &Podman, cgroup: Cgroup, name: &str, command: &str) -> String {
    let script = format!(
        "run='run --network=none --log-driver=none'\n\
         \"$@\" $run --name {name} -e NVIDIA_VISIBLE_DEVICES=all {IMAGE} sh -euc '{command}' >&2\n\
         \"$@\" container cleanup {name} >&2\n\
         \"$@\" diff {name}\n\
         \"$@\" commit -q {name} localhost/{name} >&2\n\
         \"$@\" $run --rm -e NVIDIA_VISIBLE_DEVICES=void localhost/{name} sh -c 'find / -xdev -type f -size 0; find / -xdev -type l; ldconfig -p'"
    );
    let text = podman.shell(cgroup, &script).ok();
    let is_left = |line: &&str| ["nvidia", "libcuda", "libvdpau", "libnv"].iter().any(|part| line.contains(part));
    text.lines().filter(is_left).map(|line| line.to_owned() + "\n").collect()
}

fn podman_commits_a_clean_image(cgroup: Cgroup) {
    let podman = Podman::with_image();
    let naive = left(&podman, cgroup, "naive", "nvidia-smi -L");
    for says in ["/nvidia-smi\n", "/libcuda.so.535.183.01\n", "/libcuda.so.1\n", "libcuda.so.1 (libc6"] {
        assert!(naive.contains(says), "{says}: {naive}");
    }
    install(&podman);
    assert_eq!(left(&podman, cgroup, "clean", "nvidia-smi -L"), "");
    // Changes by the container stay: a package, a link that it changed, a file in a directory.
    let of_its_own = "nvidia-smi -L; cd /usr/lib/x86_64-linux-gnu; echo mine >libnvidia-mine.so.1; \
                      ln -sfn libnvidia-mine.so.1 libcuda.so; ldconfig";
    let changed = left(&podman, cgroup, "changed", of_its_own);
    assert!(changed.contains("/libnvidia-mine.so.1\n") && changed.contains("/libcuda.so\n"), "{changed}");
    assert!(!changed.contains("libcuda.so.1"), "{changed}");
}

/// A copy of a driver file is removed, unless the container has changed it.
fn copies() {
    let (podman, fake) = (Podman::with_image(), FakeDriver::new(&["--all-files"]));
    podman.install_hook(&fake.config);
    install(&podman);
    let icd = "/etc/OpenCL/vendors/nvidia.icd";
    let after = |name: &str, command: &str| {
        let script = format!(
            "\"$@\" run --name {name} --network=none --log-driver=none -e NVIDIA_VISIBLE_DEVICES=all \
               -e NVIDIA_DRIVER_CAPABILITIES=compute {IMAGE} sh -euc '{command}' >&2\n\
             \"$@\" container cleanup {name} >&2\n\
             \"$@\" diff {name}"
        );
        let text = podman.shell(Cgroup::AsMounted, &script).ok();
        assert!(!text.contains("libcuda"), "{text}");
        text.lines().any(|line| line == format!("A {icd}"))
    };
    assert!(!after("unchanged", &format!("grep libnvidia-opencl.so.1 {icd}")));
    assert!(after("changed", &format!("grep libnvidia-opencl.so.1 {icd}; echo libnvidia-opencl.so.1 >{icd}")));
}

/// With precreate, the runtime creates the mount points.
fn mount_points_of_the_runtime() {
    let podman = Podman::with_image();
    podman.remove_hook();
    podman.install_precreate(&FakeDriver::shared().config);
    let naive = left(&podman, Cgroup::AsMounted, "naive", "nvidia-smi -L");
    assert!(naive.contains("/libcuda.so.535.183.01\n"), "{naive}");
    install(&podman);
    let clean = left(&podman, Cgroup::AsMounted, "clean", "nvidia-smi -L");
    // Directories that the runtime created stay.
    let files: Vec<_> = clean.lines().filter(|line| line.contains(".so") || line.contains("/bin/")).collect();
    assert_eq!(files, [""; 0], "{clean}");
}

/// On vfs, a directory is the container's root file system, as on overlayfs; see `ldconfig::`.
fn podman_start_after_a_driver_update() {
    let podman = Podman::with_image();
    let fake = FakeDriver::new(&["--gpus", "1"]);
    podman.install_hook(&fake.config);
    let new = FakeDriver::new(&["--gpus", "1", "--version", "550.54.14"]);
    sh(&format!("cd '{}'; rm $(find . -name 'libnvidia-opencl*'); /sbin/ldconfig -r .", new.root.display())).ok();
    let start = |name: &str, update: &str| -> Ran {
        let look = "probe-dlopen libcuda.so.1 libnvidia-opencl.so.1 || true";
        podman.shell(
            Cgroup::AsMounted,
            &format!(
                "\"$@\" run --name {name} --network=none --log-driver=none -e NVIDIA_VISIBLE_DEVICES=all {IMAGE} \
                   sh -c '{look}' >&2\n\
                 \"$@\" container cleanup {name} >&2\n\
                 {update}\n\
                 \"$@\" start -a {name}\n\
                 \"$@\" container cleanup {name} >&2\n\
                 cd $(\"$@\" mount {name})/usr/lib/x86_64-linux-gnu; find . -name '*.so.[5]*' -size 0"
            ),
        )
    };
    let hook = podman.hooks.join("oci-nvidia-hook.json");
    let update = format!("sed -i 's#{}#{}#' '{}'", fake.config.display(), new.config.display(), hook.display());
    let text = start("updated", &update).ok();
    assert!(text.contains("libcuda.so.1: ok "), "{text}");
    assert!(!text.contains("file too short") && !text.contains("535.183.01"), "{text}");
    assert!(text.contains("./libcuda.so.550.54.14\n"), "the files of this driver stay: {text}");
    // With poststop, nothing remains of either.
    podman.install_hook(&fake.config);
    install(&podman);
    let text = start("stopped", &update).ok();
    assert!(text.contains("libcuda.so.1: ok ") && !text.contains("\n./"), "{text}");
    uninstall(&podman);
}

/// Removing a mount point would remove the mount from another container that uses the same directory.
fn a_shared_root_is_left_alone() {
    let podman = Podman::new();
    install(&podman);
    let dir = scratch();
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let script = format!(
        "run='run --network=none --log-driver=none -e NVIDIA_VISIBLE_DEVICES=all'\n\
         \"$@\" $run --name first --rootfs {root} sh -euc 'nvidia-smi -L; until [ -e /go ]; do sleep 0.1; done' >&2 &\n\
         for n in $(seq 100); do [ -e {root}/usr/bin/nvidia-smi ] && break; sleep 0.1; done; sleep 1\n\
         \"$@\" $run -d --name second --rootfs {root} sleep 600 >&2\n\
         touch {root}/go; wait\n\
         \"$@\" exec second nvidia-smi -L; \"$@\" exec second probe-dlopen libcuda.so.1\n\
         rm {root}/usr/bin/nvidia-smi; \"$@\" exec second nvidia-smi -L >&2 || echo the naive removal unmounts it\n\
         \"$@\" rm -f -t 0 second >&2",
        root = image.rootfs.display()
    );
    let text = podman.shell(Cgroup::AsMounted, &script).ok();
    assert!(text.contains("UUID: GPU-") && text.contains("libcuda.so.1: ok "), "{text}");
    assert!(text.contains("the naive removal unmounts it\n"), "{text}");
}
