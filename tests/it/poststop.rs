//! The poststop stage removes what the setup left in the file system of a container.

use serde_json::Value;

use crate::cdi::cdi;
use crate::cdi_containers::only_spec;
use crate::driver::{FakeDriver, Image};
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::support::{HOOK, Ran, run, scratch, sh, source};

tests! {
    engine::NEEDS => podman_commits_a_clean_image = podman_commits_a_clean_image(Cgroup::AsMounted), copies,
        mount_points_of_the_runtime, podman_start_after_a_driver_update,
        podman_start_after_a_driver_update_in_other_modes, podman_commits_a_clean_image_on_overlayfs,
        a_shared_root_is_left_alone = a_shared_root_is_left_alone(Cgroup::AsMounted),
        a_root_that_others_only_see_is_cleaned, one_file_for_two_stages;
    engine::NEEDS_CRUN => podman_commits_a_clean_image_with_crun = podman_commits_a_clean_image(Cgroup::WithCrun),
        a_shared_root_is_left_alone_with_crun = a_shared_root_is_left_alone(Cgroup::WithCrun);
}

/// Installs the hook file of docs/modes.md, with the tested program.
fn install(podman: &Podman) {
    let docs = std::fs::read_to_string(source("docs/modes.md")).unwrap();
    let mut json: Value = serde_json::from_str(crate::docs::blocks(&docs, "json")[0]).unwrap();
    assert_eq!(json["stages"], serde_json::json!(["poststop"]));
    json["hook"]["path"] = HOOK.into();
    std::fs::write(
        podman.hooks.join("oci-nvidia-hook-poststop.json"),
        json.to_string(),
    )
    .unwrap();
}

fn uninstall(podman: &Podman) {
    std::fs::remove_file(podman.hooks.join("oci-nvidia-hook-poststop.json")).unwrap();
}

/// Returns what differs from the image after this container has run, and after its image was committed and run without GPUs.
/// Podman 5 can return from `podman run` before it has called the hook; `podman container cleanup` waits for the hook.
fn left(podman: &Podman, cgroup: Cgroup, name: &str, command: &str) -> String {
    left_after("", podman, cgroup, name, command)
}

/// The same after this script.
fn left_after(before: &str, podman: &Podman, cgroup: Cgroup, name: &str, command: &str) -> String {
    let script = format!(
        "{before}\n\
         run='run --network=none --log-driver=none'\n\
         \"$@\" $run --name {name} -e NVIDIA_VISIBLE_DEVICES=all {IMAGE} sh -euc '{command}' >&2\n\
         \"$@\" container cleanup {name} >&2\n\
         \"$@\" diff {name}\n\
         \"$@\" commit -q {name} localhost/{name} >&2\n\
         \"$@\" $run --rm -e NVIDIA_VISIBLE_DEVICES=void localhost/{name} sh -c 'find / -xdev -type f -size 0; find / -xdev -type l; ldconfig -p'"
    );
    let text = podman.shell(cgroup, &script).ok();
    let is_left = |line: &&str| {
        ["nvidia", "libcuda", "libvdpau", "libnv"]
            .iter()
            .any(|part| line.contains(part))
    };
    text.lines()
        .filter(is_left)
        .map(|line| line.to_owned() + "\n")
        .collect()
}

fn podman_commits_a_clean_image(cgroup: Cgroup) {
    let podman = Podman::with_image();
    let naive = left(&podman, cgroup, "naive", "nvidia-smi -L");
    for says in [
        "/nvidia-smi\n",
        "/libcuda.so.535.183.01\n",
        "/libcuda.so.1\n",
        "libcuda.so.1 (libc6",
    ] {
        assert!(naive.contains(says), "{says}: {naive}");
    }
    install(&podman);
    assert_eq!(left(&podman, cgroup, "clean", "nvidia-smi -L"), "");
    // Changes by the container stay: a package, a link that it changed, a file in a directory.
    let of_its_own = "nvidia-smi -L; cd /usr/lib/x86_64-linux-gnu; echo mine >libnvidia-mine.so.1; \
                      ln -sfn libnvidia-mine.so.1 libcuda.so; ldconfig";
    let changed = left(&podman, cgroup, "changed", of_its_own);
    assert!(
        changed.contains("/libnvidia-mine.so.1\n") && changed.contains("/libcuda.so\n"),
        "{changed}"
    );
    assert!(!changed.contains("libcuda.so.1"), "{changed}");
}

/// Podman's usual storage, where the root file system is a mount.
fn podman_commits_a_clean_image_on_overlayfs() {
    let podman = Podman::new();
    let image = Image::new(podman.dir.path(), &["--layout", "debian"]);
    let before = format!(
        "mkdir -p {dir}/overlay; set -- \"$@\" --root {dir}/overlay --storage-driver overlay\n\
         tar -C {image} -c . | \"$@\" import -q - {IMAGE} >&2",
        dir = podman.dir.path().display(),
        image = image.rootfs.display()
    );
    let left = |name| left_after(&before, &podman, Cgroup::AsMounted, name, "nvidia-smi -L");
    let naive = left("naive");
    assert!(naive.contains("/libcuda.so.535.183.01\n"), "{naive}");
    install(&podman);
    assert_eq!(left("clean"), "");
}

/// One hook file for two stages passes the same arguments at both.
fn one_file_for_two_stages() {
    let podman = Podman::with_image();
    let file = podman.hooks.join("oci-nvidia-hook.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    json["stages"] = serde_json::json!(["prestart", "poststop"]);
    std::fs::write(&file, json.to_string()).unwrap();
    assert_eq!(
        left(&podman, Cgroup::AsMounted, "both", "nvidia-smi -L"),
        ""
    );
    let id = podman
        .shell(
            Cgroup::AsMounted,
            "\"$@\" ps -aq --no-trunc --filter name=both",
        )
        .ok();
    // The record of a container without a failure is removed with it.
    let why = run(std::process::Command::new(HOOK).args(["why", id.trim()])).failed(1);
    assert!(why.contains("(ONH-053)"), "{why}");
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
    assert!(!after(
        "unchanged",
        &format!("grep libnvidia-opencl.so.1 {icd}")
    ));
    assert!(after(
        "changed",
        &format!("grep libnvidia-opencl.so.1 {icd}; echo libnvidia-opencl.so.1 >{icd}")
    ));
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
    let files: Vec<_> = clean
        .lines()
        .filter(|line| line.contains(".so") || line.contains("/bin/"))
        .collect();
    assert_eq!(files, [""; 0], "{clean}");
}

/// A library that the updated driver lacks.
const STALE: &str = "/usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.535.183.01";

/// A driver of another version, without two of the libraries.
fn newer_driver() -> FakeDriver {
    let new = FakeDriver::new(&["--gpus", "1", "--version", "550.54.14"]);
    sh(&format!(
        "cd '{}'; rm $(find . -name 'libnvidia-opencl*' -o -name 'libcudadebugger*'); /sbin/ldconfig -r .",
        new.root.display()
    ))
    .ok();
    new
}

/// A container that is started again after an update of the driver.
struct Restart<'a> {
    /// Its name
    name: &'a str,
    /// The option that requests GPUs
    request: &'a str,
    /// What happens before it is started again
    update: &'a str,
    /// What happens before its root file system is unmounted
    seen: &'a str,
}

impl Restart<'_> {
    /// Runs this script first. Prints what programs find after the update, and the empty files that remain at the end.
    fn run_after(&self, podman: &Podman, script: &str) -> Ran {
        let Restart {
            name,
            request,
            update,
            seen,
        } = self;
        let look = "for name in libcuda libnvidia-opencl libcudadebugger; do probe-dlopen $name.so.1 || true; done";
        podman.shell(
            Cgroup::AsMounted,
            &format!(
                "{script}\n\
                 \"$@\" create --name {name} --network=none --log-driver=none {request} {IMAGE} sh -c '{look}' >&2\n\
                 \"$@\" start -a {name} >&2\n\
                 \"$@\" container cleanup {name} >&2\n\
                 {update}\n\
                 \"$@\" start -a {name}\n\
                 {seen}\n\
                 \"$@\" container cleanup {name} >&2\n\
                 cd $(\"$@\" mount {name})/usr/lib/x86_64-linux-gnu; find . -name '*.so.[5]*' -size 0"
            ),
        )
    }
}

/// The runtime creates the mount points before the hook is called.
fn podman_start_after_a_driver_update_in_other_modes() {
    let (old, new) = (FakeDriver::new(&["--gpus", "1"]), newer_driver());
    let podman = Podman::with_image();
    podman.remove_hook();
    podman.install_precreate(&old.config);
    let hook = podman.hooks.join("oci-nvidia-hook-precreate.json");
    let precreate = format!(
        "sed -i 's#{}#{}#' '{}'",
        old.config.display(),
        new.config.display(),
        hook.display()
    );
    let request = "-e NVIDIA_VISIBLE_DEVICES=all";
    let spec = |fake: &FakeDriver, name: &str| {
        let path = podman.dir.path().join(name).join("nvidia.yaml");
        cdi(fake, &["generate", "--output", path.to_str().unwrap()]).ok();
        path
    };
    let (before, after) = (spec(&old, "before"), spec(&new, "after"));
    let cdi = format!("cp '{}' /run/cdi/", after.display());
    for (name, request, update) in [
        ("precreate", request, &precreate),
        ("cdi", "--device nvidia.com/gpu=all", &cdi),
    ] {
        let restart = Restart {
            name,
            request,
            update,
            seen: "",
        };
        let ran = restart.run_after(&podman, &only_spec(&before));
        assert!(ran.stderr.contains("libcudadebugger.so.1: ok "), "{ran:?}");
        let text = ran.ok();
        assert!(text.contains("libcuda.so.1: ok "), "{name}: {text}");
        assert!(
            !text.contains("file too short") && !text.contains("535.183.01"),
            "{name}: {text}"
        );
        assert!(text.contains("./libcuda.so.550.54.14\n"), "{name}: {text}");
    }
}

/// On vfs, a directory is the container's root file system, as on overlayfs; see `ldconfig::`.
fn podman_start_after_a_driver_update() {
    let podman = Podman::with_image();
    let fake = FakeDriver::new(&["--gpus", "1"]);
    podman.install_hook(&fake.config);
    let new = newer_driver();
    let start = |name: &str, update: &str, seen: &str| -> Ran {
        let restart = Restart {
            name,
            request: "-e NVIDIA_VISIBLE_DEVICES=all",
            update,
            seen,
        };
        restart.run_after(&podman, "true")
    };
    let hook = podman.hooks.join("oci-nvidia-hook.json");
    let update = format!(
        "sed -i 's#{}#{}#' '{}'",
        fake.config.display(),
        new.config.display(),
        hook.display()
    );
    // Another process uses the directory, and has mounted a file on the name that the new driver lacks.
    let other = format!(
        "{update}; export root=$(\"$@\" mount shared); there={dir}/there; \
         unshare -m sh -euc 'mount --bind /bin/true $root{STALE}; touch '$there'; exec sleep 600' & other=$!; \
         for n in $(seq 100); do [ -e $there ] && break; sleep 0.1; done",
        dir = podman.dir.path().display()
    );
    let seen = format!("nsenter -m -t $other cmp $root{STALE} /bin/true; kill $other");
    let text = start("shared", &other, &seen).ok();
    assert!(
        text.contains("libcuda.so.1: ok ") && text.contains(STALE.rsplit('/').next().unwrap()),
        "{text}"
    );
    podman.install_hook(&fake.config);
    let text = start("updated", &update, "").ok();
    assert!(text.contains("libcuda.so.1: ok "), "{text}");
    assert!(
        !text.contains("file too short") && !text.contains("535.183.01"),
        "{text}"
    );
    assert!(
        text.contains("./libcuda.so.550.54.14\n"),
        "the files of this driver stay: {text}"
    );
    // With poststop, nothing remains of either.
    podman.install_hook(&fake.config);
    install(&podman);
    let text = start("stopped", &update, "").ok();
    assert!(
        text.contains("libcuda.so.1: ok ") && !text.contains("\n./"),
        "{text}"
    );
    uninstall(&podman);
}

/// Mounts the image `$image` at `$root`, with `$layers` as room for other directories.
const OVERLAY: &str = "mkdir $layers/upper $layers/work; \
                       mount -t overlay -o lowerdir=$image,upperdir=$layers/upper,workdir=$layers/work none $root";

/// Removing a mount point would remove the mount from another container that uses the same directory.
fn a_shared_root_is_left_alone(cgroup: Cgroup) {
    for mount in [
        "mount --bind $image $root",
        OVERLAY,
        "mount -t tmpfs shared $root; cp -a $image/. $root",
    ] {
        let podman = Podman::new();
        install(&podman);
        let dir = scratch();
        let image = Image::new(dir.path(), &["--layout", "debian"]);
        let script = format!(
            "image={image}; layers={dir}; root={dir}/root; mkdir $root; {mount}\n\
             run='run --network=none --log-driver=none -e NVIDIA_VISIBLE_DEVICES=all'\n\
             \"$@\" $run --name first --rootfs $root sh -euc 'nvidia-smi -L; until [ -e /go ]; do sleep 0.1; done' >&2 &\n\
             for n in $(seq 100); do [ -e $root/usr/bin/nvidia-smi ] && break; sleep 0.1; done; sleep 1\n\
             \"$@\" $run -d --name second --rootfs $root sleep 600 >&2\n\
             touch $root/go; wait; \"$@\" container cleanup first >&2\n\
             \"$@\" exec second nvidia-smi -L; \"$@\" exec second probe-dlopen libcuda.so.1\n\
             rm $root/usr/bin/nvidia-smi; \"$@\" exec second nvidia-smi -L >&2 || echo the naive removal unmounts it\n\
             \"$@\" rm -f -t 0 second >&2",
            image = image.rootfs.display(),
            dir = dir.path().display()
        );
        let text = podman.shell(cgroup, &script).ok();
        assert!(
            text.contains("UUID: GPU-") && text.contains("libcuda.so.1: ok "),
            "{mount}: {text}"
        );
        assert!(
            text.contains("the naive removal unmounts it\n"),
            "{mount}: {text}"
        );
    }
}

/// Other mount namespaces have copies of the mount of the engine, such as the namespaces of services and of containers with the host's `/`. A
/// container that a runtime has begun to create has more than that.
fn a_root_that_others_only_see_is_cleaned() {
    for (other, is_cleaned) in [
        ("true", true),
        ("mount --make-rslave /", true),
        ("mount --make-rslave /; mount --rbind / $layers/host", true),
        ("mount --bind $root $root", false),
        ("mount --bind /bin/true $root/usr/bin/nvidia-smi", false),
        // A process that no longer sees the mount.
        (
            "mount --bind /bin/true $root/usr/bin/nvidia-smi; mount --rbind / $layers/host; inside=\"chroot $layers/small\"",
            false,
        ),
    ] {
        let podman = Podman::new();
        install(&podman);
        let dir = scratch();
        let image = Image::new(dir.path(), &["--layout", "debian"]);
        let script = format!(
            "image={image}; export layers={dir} root={dir}/root; mkdir $root $layers/small; {OVERLAY}\n\
             cp -a $image/. $layers/small\n\
             \"$@\" run --network=none --log-driver=none -e NVIDIA_VISIBLE_DEVICES=all --name first --rootfs $root \
               sh -euc 'nvidia-smi -L; until [ -e /go ]; do sleep 0.1; done' >&2 &\n\
             for n in $(seq 100); do [ -e $root/usr/bin/nvidia-smi ] && break; sleep 0.1; done; sleep 1\n\
             unshare -m --propagation unchanged sh -euc 'inside=; mkdir -p $layers/host; {other}; touch $layers/there; exec $inside sleep 600' & \
             other=$!; for n in $(seq 100); do [ -e $layers/there ] && break; sleep 0.1; done\n\
             touch $root/go; wait %1; \"$@\" container cleanup first >&2; kill $other\n\
             cd $layers/upper; find . -name '*libcuda*' -o -name nvidia-smi -o -name '*oci-nvidia-hook*'",
            image = image.rootfs.display(),
            dir = dir.path().display()
        );
        let text = podman.shell(Cgroup::AsMounted, &script).ok();
        assert_eq!(text.is_empty(), is_cleaned, "{other}: {text}");
        assert!(
            is_cleaned || text.contains("./usr/bin/nvidia-smi\n"),
            "{other}: {text}"
        );
        assert!(!text.contains("oci-nvidia-hook-"), "{other}: {text}");
    }
}
