//! Containers that have ended: what stays in their file systems, and how they start again.

use crate::cdi::write_spec;
use crate::cdi_containers::only_spec;
use crate::driver::FakeDriver;
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::support::{Ran, assert_lacks, read, shell, write_file};

tests! {
    engine::NEEDS => the_end_of_a_container, podman_start_after_a_driver_update, podman_start_after_a_driver_update_with_cdi;
}

/// Hook files of earlier versions name poststop. Nothing is removed at this stage: neither the names that the start created, nor an empty
/// file of the image at the mount point of a volume whose path contains "nvidia".
fn the_end_of_a_container() {
    let podman = Podman::with_image();
    let hook_file = podman.hooks.join("oci-nvidia-hook.json");
    let shipped = read(&hook_file);
    let both = shipped.replace("[\"prestart\"]", "[\"prestart\",\"poststop\"]");
    assert_ne!(both, shipped);
    write_file(&hook_file, &both);
    let poststop = both
        .replace("\"prestart\"", "\"poststop\"")
        .replace("[\"poststop\",\"poststop\"]", "[\"poststop\"]");
    write_file(
        podman.hooks.join("oci-nvidia-hook-poststop.json"),
        &poststop,
    );
    let file = podman.dir.path().join("file");
    write_file(&file, "the user's");
    let script = format!(
        "run='run --network=none --log-driver=none'; file=/opt/nvidia/empty.conf\n\
         \"$@\" $run --name image {IMAGE} sh -euc \"mkdir -p /opt/nvidia; touch $file\" >&2\n\
         \"$@\" commit -q image localhost/empty >&2\n\
         \"$@\" $run --name ended -e NVIDIA_VISIBLE_DEVICES=all -v {}:$file localhost/empty \
           sh -euc \"nvidia-smi -L; cat $file\" >&2\n\
         \"$@\" container cleanup ended >&2\n\
         \"$@\" diff ended; cd $(\"$@\" mount ended); ls -l opt/nvidia",
        file.display()
    );
    let ran = podman.shell(Cgroup::AsMounted, &script);
    assert!(!ran.stderr.contains("oci-nvidia-hook"), "{ran:?}");
    let text = ran.ok();
    for says in ["A /usr/bin/nvidia-smi\n", " empty.conf\n"] {
        assert!(text.contains(says), "{says}: {text}");
    }
    assert!(!text.contains("D /"), "{text}");
}

/// A library that the updated driver lacks.
const STALE: &str = "/usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.535.183.01";

/// A driver of another version, without two of the libraries.
fn newer_driver() -> FakeDriver {
    let new = FakeDriver::new(&["--gpus", "1", "--version", "550.54.14"]);
    shell!(
        "cd '{}'; rm $(find . -name 'libnvidia-opencl*' -o -name 'libcudadebugger*'); /sbin/ldconfig -r .",
        new.root.display()
    );
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
fn podman_start_after_a_driver_update_with_cdi() {
    let (old, new) = (FakeDriver::new(&["--gpus", "1"]), newer_driver());
    let podman = Podman::with_image();
    podman.remove_hook();
    let spec = |fake: &FakeDriver, name: &str| {
        let path = podman.dir.path().join(name).join("nvidia.yaml");
        write_spec(fake, &path);
        path
    };
    let (before, after) = (spec(&old, "before"), spec(&new, "after"));
    let restart = Restart {
        name: "cdi",
        request: "--device nvidia.com/gpu=all",
        update: &format!("cp '{}' /run/cdi/", after.display()),
        seen: "",
    };
    let ran = restart.run_after(&podman, &only_spec(&before));
    assert!(ran.stderr.contains("libcudadebugger.so.1: ok "), "{ran:?}");
    let text = ran.ok();
    assert!(text.contains("libcuda.so.1: ok "), "{text}");
    assert_lacks(&text, &["file too short", "535.183.01"]);
    assert!(text.contains("./libcuda.so.550.54.14\n"), "{text}");
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
    assert_lacks(&text, &["file too short", "535.183.01"]);
    assert!(
        text.contains("./libcuda.so.550.54.14\n"),
        "the files of this driver stay: {text}"
    );
}
