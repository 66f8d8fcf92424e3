//! Vulnerabilities that involve an engine or a running container: the hook's environment (CVE-2025-23266), nodes of other GPUs
//! (CVE-2021-1056).

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rustix::mount::{MountFlags, MountPropagationFlags};

use super::scene::Scene;
use crate::driver::{FakeDriver, Image};
use crate::engine::{Cgroup, IMAGE, Podman};
use crate::support::{HOOK, Ran, run, source};

/// A container that may create nodes creates one for a GPU that it was not given; only the cgroup prevents its use.
pub fn cve_2021_1056_nodes() {
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
    assert!(ours.starts_with("n0: EPERM\nGPU 0: ") && ours.lines().count() == 2, "{ours}");
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
pub fn cve_2021_1056_params() {
    let proc = "mount -t tmpfs proc $rootfs/proc; mkdir -p $rootfs/proc/driver/nvidia; \
                echo 'ModifyDeviceFiles: 1' >$rootfs/proc/driver/nvidia/params";
    let attack = |prefix: &[&str], dir: &Path, script: &str| {
        let mut command = Command::new(prefix[0]);
        command.args(&prefix[1..]).args(["setpriv", "--bounding-set=-sys_admin", "sh", "-uc", script, "sh"]);
        run(command.arg(dir))
    };

    // The CLI called mount(2) once with MS_BIND | MS_RDONLY, which leaves a bind mount writable.
    let scene = Scene::new("debian", "");
    let (params, shown) = (scene.dir().join("params"), scene.canary.join("nvidia"));
    std::fs::write(&params, "ModifyDeviceFiles: 0\n").unwrap();
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
    assert_eq!(naive.code, Some(0), "the naive mount cannot be written: {naive:?}");
    assert_eq!(std::fs::read_to_string(&params).unwrap(), "ModifyDeviceFiles: 1\n");

    let scene = Scene::new("debian", "");
    let container = scene.start(proc);
    let before = scene.host(&container);
    scene.hook(&container).ok();
    let dir = scene.rootfs.join("proc/driver/nvidia");
    let pid = container.pid().to_string();
    let shown = container.exec("cat /proc/driver/nvidia/params; ls -R /proc/driver/nvidia").ok();
    assert!(shown.lines().any(|line| line == "ModifyDeviceFiles: 0"), "{shown}");
    let mounts = container.mountinfo();
    for script in ATTACKS {
        let ran = attack(&["nsenter", "-m", "-t", &pid], &dir, script);
        assert!(ran.code != Some(0) && !ran.stderr.is_empty(), "{script}: {ran:?}");
        assert_eq!(container.mountinfo(), mounts, "{script}");
        let now = container.exec("cat /proc/driver/nvidia/params; ls -R /proc/driver/nvidia").ok();
        assert_eq!(now, shown, "{script}");
    }
    scene.is_untouched(&container, &before, "");
}

/// A library that writes to a file of the host which programs load it.
const PRELOADED: &str = r#"
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void tell(void)
{
	char exe[4096];
	ssize_t size = readlink("/proc/self/exe", exe, sizeof exe - 1);
	int fd = open(MARKER, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
	if (fd < 0 || size < 0)
		return;
	exe[size] = '\n';
	if (write(fd, exe, size + 1) < 0)
		return;
}
/* As an auditor, see rtld-audit(7). */
unsigned la_version(unsigned version)
{
	return version;
}
"#;

/// The hook inherits an image's ENV if the engine's entry for the hook has no environment.
pub fn cve_2025_23266() {
    let podman = Podman::new();
    let marker = podman.dir.path().join("preloaded");
    let image = Image::new(podman.dir.path(), &["--layout", "debian"]);
    std::fs::write(podman.dir.path().join("evil.c"), PRELOADED).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", &format!("-DMARKER=\"{}\"", marker.display()), "-o"]);
    run(cc.arg(image.rootfs.join("evil.so")).arg(podman.dir.path().join("evil.c"))).ok();
    for name in ["modprobe", "ldconfig", "nvidia-modprobe"] {
        let program = image.rootfs.join("evil").join(name);
        std::fs::create_dir_all(program.parent().unwrap()).unwrap();
        std::fs::write(&program, format!("#!/bin/sh\necho \"$0\" >>{}\n", marker.display())).unwrap();
        std::fs::set_permissions(program, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let config = image.rootfs.join("evil/nvidia-container-runtime/config.toml");
    std::fs::create_dir_all(config.parent().unwrap()).unwrap();
    std::fs::write(config, "this is no toml").unwrap();
    podman.import(&image.rootfs, IMAGE);

    let cwd = "/proc/self/cwd";
    let env = [
        format!("LD_PRELOAD={cwd}/evil.so"),
        format!("LD_AUDIT={cwd}/evil.so"),
        format!("LD_LIBRARY_PATH={cwd}/evil"),
        format!("GCONV_PATH={cwd}/evil"),
        format!("PATH={cwd}/evil:/bin"),
        format!("XDG_CONFIG_HOME={cwd}/evil"),
        format!("NVIDIA_CTK_CONFIG_FILE_PATH={cwd}/evil/nvidia-container-runtime/config.toml"),
        "GLIBC_TUNABLES=glibc.malloc.check=3".to_owned(),
        "NVIDIA_VISIBLE_DEVICES=all".to_owned(),
    ];
    let start = |change: &dyn Fn(&mut serde_json::Value)| -> (Ran, String) {
        let text = std::fs::read_to_string(source("hooks.d/oci-nvidia-hook.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json["hook"]["path"] = HOOK.into();
        change(&mut json);
        std::fs::write(podman.hooks.join("oci-nvidia-hook.json"), json.to_string()).unwrap();
        std::fs::remove_file(&marker).ok();
        let mut arguments: Vec<_> = env.iter().flat_map(|variable| ["-e", variable]).collect();
        arguments.extend([IMAGE, "nvidia-smi", "-L"]);
        let ran = podman.run(Cgroup::AsMounted, &arguments);
        (ran, std::fs::read_to_string(&marker).unwrap_or_default())
    };
    let with_config = serde_json::json!(["oci-nvidia-hook", "--config", FakeDriver::shared().config, "prestart"]);

    // At this stage, runc passes the container's environment to hooks that have none of their own.
    let (ran, preloaded) = start(&|json| {
        json["stages"] = serde_json::json!(["createContainer"]);
        json["hook"].as_object_mut().unwrap().remove("env");
    });
    assert!(preloaded.lines().any(|program| program == HOOK), "the naive entry did not fall: {ran:?}, {preloaded:?}");
    // No variable selects a file, whoever set it.
    assert!(!ran.stderr.contains("evil/nvidia-container-runtime/config.toml"), "{ran:?}");

    for stage in ["prestart", "createRuntime", "createContainer"] {
        let (ran, preloaded) = start(&|json| {
            json["stages"] = serde_json::json!([stage]);
            json["hook"]["args"] = with_config.clone();
        });
        assert_eq!(preloaded, "", "{stage}: {ran:?}");
        assert!(stage == "createContainer" || ran.stdout.starts_with("GPU 0: "), "{stage}: {ran:?}");
        let (ran, preloaded) = start(&|json| json["stages"] = serde_json::json!([stage]));
        assert_eq!(preloaded, "", "{stage}: {ran:?}");
        assert!(!ran.stderr.contains("evil"), "{stage}: {ran:?}");
    }
}
