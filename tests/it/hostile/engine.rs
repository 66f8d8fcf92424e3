//! A vulnerability that involves an engine or a running container: nodes of other GPUs (CVE-2021-1056).

use std::path::Path;
use std::process::Command;

use rustix::mount::{MountFlags, MountPropagationFlags};

use super::scene::Scene;
use super::{NEEDS_PODMAN, NEEDS_SETPRIV};
use crate::engine::{Cgroup, IMAGE, Podman};
use crate::support::{read, run, write_file};

tests! {
    NEEDS_PODMAN => cve_2021_1056_other_gpus_by_mknod;
    NEEDS_SETPRIV => cve_2021_1056_params_that_the_container_rewrites;
}

/// A container that may create nodes creates one for a GPU that it was not given; only the cgroup prevents its use.
fn cve_2021_1056_other_gpus_by_mknod() {
    let script = "cd /tmp; mknod n0 c 195 0; probe-open n0; nvidia-smi -L";
    let arguments = ["--cap-add=MKNOD", "-e", "NVIDIA_VISIBLE_DEVICES=1"];
    let open = |more: &[&str]| {
        let arguments = [&arguments[..], more, &[IMAGE, "sh", "-euc", script]].concat();
        Podman::shared().run(Cgroup::AsMounted, &arguments).ok()
    };
    // The recommendation for containers without their own device rules. ENXIO: there is no driver here, but access was not
    // denied.
    let naive = open(&["--device-cgroup-rule=c 195:* rwm"]);
    assert!(naive.starts_with("n0: ENXIO\n"), "{naive}");
    let ours = open(&[]);
    assert!(
        ours.starts_with("n0: EPERM\nGPU 0: ") && ours.lines().count() == 2,
        "{ours}"
    );
}

/// The attempts of a process in the container, with all of root's capabilities except CAP_SYS_ADMIN; `$1` is /proc/driver/nvidia.
const ATTACKS: [&str; 9] = [
    "echo 'ModifyDeviceFiles: 1' >$1/params",
    "chmod 666 $1/params",
    "rm $1/params",
    "mv $1/params $1/p",
    "mknod $1/x c 195 0",
    "mount -o remount,bind,rw $1",
    "umount $1",
    "umount -l $1",
    "mount --bind /proc/version $1/params",
];

/// The params file allows the creation of device nodes, or can be changed to allow it.
fn cve_2021_1056_params_that_the_container_rewrites() {
    let proc = "mount -t tmpfs proc $rootfs/proc; mkdir -p $rootfs/proc/driver/nvidia; \
                echo 'ModifyDeviceFiles: 1' >$rootfs/proc/driver/nvidia/params";
    let attack = |prefix: &[&str], dir: &Path, script: &str| {
        let mut command = Command::new(prefix[0]);
        command.args(&prefix[1..]).args([
            "setpriv",
            "--bounding-set=-sys_admin",
            "sh",
            "-uc",
            script,
            "sh",
        ]);
        run(command.arg(dir))
    };

    // The CLI called mount(2) once with MS_BIND | MS_RDONLY, which leaves a bind mount writable.
    let scene = Scene::new("debian", "");
    let (params, shown) = (scene.dir().join("params"), scene.canary.join("nvidia"));
    write_file(&params, "ModifyDeviceFiles: 0\n");
    let naive = std::thread::scope(|scope| {
        // The thread has its own mount namespace, which the programs that it starts share.
        let mounter = scope.spawn(|| {
            let flags = nix::sched::CloneFlags::CLONE_NEWNS | nix::sched::CloneFlags::CLONE_FS;
            nix::sched::unshare(flags).unwrap();
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            rustix::mount::mount_change("/", private).unwrap();
            let flags = MountFlags::BIND | MountFlags::RDONLY;
            rustix::mount::mount(&params, shown.join("params"), c"", flags, None).unwrap();
            attack(&["env"], &shown, ATTACKS[0])
        });
        mounter.join().unwrap()
    });
    assert_eq!(
        naive.code,
        Some(0),
        "the naive mount cannot be written: {naive:?}"
    );
    assert_eq!(read(&params), "ModifyDeviceFiles: 1\n");

    let scene = Scene::new("debian", "");
    let container = scene.start(proc);
    let before = scene.host(&container);
    scene.hook(&container).ok();
    let dir = scene.rootfs.join("proc/driver/nvidia");
    let pid = container.pid().to_string();
    let shown = container.output("cat /proc/driver/nvidia/params; ls -R /proc/driver/nvidia");
    assert!(
        shown.lines().any(|line| line == "ModifyDeviceFiles: 0"),
        "{shown}"
    );
    let mounts = container.mountinfo();
    for script in ATTACKS {
        let ran = attack(&["nsenter", "-m", "-t", &pid], &dir, script);
        assert!(
            ran.code != Some(0) && !ran.stderr.is_empty(),
            "{script}: {ran:?}"
        );
        assert_eq!(container.mountinfo(), mounts, "{script}");
        let now = container.output("cat /proc/driver/nvidia/params; ls -R /proc/driver/nvidia");
        assert_eq!(now, shown, "{script}");
    }
    scene.is_untouched(&container, &before, "");
}
