//! Attacks on the host's files that containers get, from both sides: a user of the host who chooses what a daemon's path means,
//! and a container that changes the host's device nodes and sockets.

use std::os::unix::fs::{FileTypeExt, MetadataExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use super::{NEEDS, NEEDS_PODMAN_CRUN};
use crate::cdi::{cdi, generate, write_spec_with};
use crate::cdi_containers::only_spec;
use crate::driver::{FakeDriver, Image, Waiting};
use crate::engine::{Cgroup, IMAGE, Podman};
use crate::kernels;
use crate::support::{HOOK, Ran, assert_says, fingerprint, scratch, sh_unshared, shell, unshare};

tests! {
    NEEDS => sources_that_users_of_the_host_choose, an_mps_directory_that_is_named, a_mount_of_a_users,
        a_daemon_that_swaps_its_socket;
    NEEDS_PODMAN_CRUN => nodes_and_sockets_stay_as_they_are;
}

const SOCKET: &str = "/run/nvidia-persistenced/socket";
const MPS: &str = "/tmp/nvidia-mps";

/// A host with the driver's daemons, and a directory of root that other users cannot enter.
fn host() -> FakeDriver {
    let fake = FakeDriver::new(&["--gpus", "2", "--drm"]);
    shell!(
        "cd '{}'; mkdir -p run/nvidia-persistenced run/nvidia-fabricmanager tmp secret; chmod 1777 tmp; chmod 700 secret; \
         echo host >secret/shadow; cp secret/shadow tmp/.of-root",
        fake.root.display()
    );
    for daemon in ["persistenced", "fabricmanager"] {
        drop(listen(&fake, &format!("run/nvidia-{daemon}/socket")));
    }
    fake
}

/// Creates a socket, with a path that is short enough for its address.
fn listen(fake: &FakeDriver, path: &str) -> UnixListener {
    let path = fake.root.join(path);
    let dir = std::fs::File::open(path.parent().unwrap()).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&dir);
    UnixListener::bind(format!(
        "/proc/self/fd/{fd}/{}",
        path.file_name().unwrap().to_str().unwrap()
    ))
    .unwrap()
}

/// What a user does to such a host, and what containers get then.
struct Plant {
    name: &'static str,
    /// Shell, in the driver root; `daemon` and `nobody` are users
    script: &'static str,
    /// The affected path
    path: &'static str,
    /// Why containers do not get it; empty if they do
    refused: &'static str,
    /// True in the rootfs of a container in which the old code's bind mount mounted what the path leads to
    fell: &'static str,
}

const PLANTS: &[Plant] = &[
    Plant {
        name: "a link of a user's to the host's root",
        script: "ln -s / tmp/nvidia-mps; chown -h 65534 tmp/nvidia-mps",
        path: MPS,
        refused: "is a symbolic link that another user may have created",
        fell: "grep -q host tmp/nvidia-mps$root/secret/shadow",
    },
    Plant {
        name: "the same, made by root of a container that has the host's /tmp",
        script: "ln -s / tmp/nvidia-mps",
        path: MPS,
        refused: "is a symbolic link that another user may have created",
        fell: "grep -q host tmp/nvidia-mps$root/secret/shadow",
    },
    Plant {
        name: "a link within /tmp, which the kernel does not follow for us",
        script: "mkdir -m 700 tmp/of-root; cp secret/shadow tmp/of-root; ln -s of-root tmp/nvidia-mps; \
                 chown -h 65534 tmp/nvidia-mps",
        path: MPS,
        refused: "is a symbolic link that another user may have created",
        fell: "grep -q host tmp/nvidia-mps/shadow",
    },
    Plant {
        name: "a directory of a user's",
        script: "mkdir tmp/nvidia-mps; echo user >tmp/nvidia-mps/control; chown -R 65534 tmp/nvidia-mps",
        path: MPS,
        refused: "it belongs to user 65534, not to root",
        fell: "grep -q user tmp/nvidia-mps/control",
    },
    Plant {
        name: "a file",
        script: "echo >tmp/nvidia-mps",
        path: MPS,
        refused: "it is not a directory",
        fell: "true",
    },
    Plant {
        name: "root's MPS daemon",
        script: "mkdir -m 777 tmp/nvidia-mps",
        path: MPS,
        refused: "",
        fell: "true",
    },
    Plant {
        name: "root's, in a directory that others can write",
        script: "chmod 777 tmp; mkdir tmp/nvidia-mps",
        path: MPS,
        refused: "other users can write to \"/tmp\"",
        fell: "true",
    },
    Plant {
        name: "a daemon's user who links to the host's root",
        script: "cd run/nvidia-persistenced; rm socket; ln -s / socket; chown -h 65533 . socket",
        path: SOCKET,
        refused: "is a symbolic link that another user may have created",
        fell: "grep -q host run/nvidia-persistenced/socket$root/secret/shadow",
    },
    Plant {
        name: "a daemon's user with a directory in place of its socket",
        script: "cd run/nvidia-persistenced; rm socket; mkdir socket; chown 65533 . socket",
        path: SOCKET,
        refused: "it is not a socket",
        fell: "true",
    },
    Plant {
        name: "a daemon's user who links another daemon's socket into its directory",
        script: "cd run/nvidia-persistenced; rm socket; ln ../nvidia-fabricmanager/socket socket; chown 65533 .",
        path: SOCKET,
        refused: "it is a hard link",
        fell: "test -S run/nvidia-persistenced/socket",
    },
    Plant {
        name: "a socket of another user's in a daemon's directory",
        script: "chown 65533 run/nvidia-persistenced; chown 65532 run/nvidia-persistenced/socket",
        path: SOCKET,
        refused: "it belongs to user 65532",
        fell: "test -S run/nvidia-persistenced/socket",
    },
    Plant {
        name: "a directory that everybody can write",
        script: "chmod 777 run/nvidia-persistenced",
        path: SOCKET,
        refused: "other users can write to its directory \"/run/nvidia-persistenced\"",
        fell: "test -S run/nvidia-persistenced/socket",
    },
    Plant {
        name: "a daemon of its own user",
        script: "chown 65533 run/nvidia-persistenced run/nvidia-persistenced/socket",
        path: SOCKET,
        refused: "",
        fell: "true",
    },
    Plant {
        name: "a socket that root opened for a daemon",
        script: "chown 65533 run/nvidia-persistenced",
        path: SOCKET,
        refused: "",
        fell: "true",
    },
    Plant {
        name: "a link of root's",
        script: "mv run/nvidia-persistenced secret; chmod 755 secret; ln -s ../secret/nvidia-persistenced run",
        path: SOCKET,
        refused: "",
        fell: "true",
    },
];

fn kernel_protects_links() -> bool {
    let setting = std::fs::read_to_string("/proc/sys/fs/protected_symlinks");
    setting.is_ok_and(|setting| setting.trim() != "0")
}

fn sources_that_users_of_the_host_choose() {
    let (_dir, image) = Image::debian();
    for plant in PLANTS {
        let fake = host();
        let root = fake.root.display();
        shell!("cd '{root}'; {}", plant.script);
        // The old behavior of the hook: it mounted whatever the path led to below the driver root.
        let naive = format!(
            "cd '{}'; root='{root}'; mount -t tmpfs run run; mount -t tmpfs tmp tmp; to=.{path}; mkdir -p \"$(dirname $to)\"; \
             if [ -d '{root}{path}' ]; then mkdir -p $to; else touch $to; fi; mount --rbind '{root}{path}' $to; {fell}",
            image.rootfs.display(),
            path = plant.path,
            fell = plant.fell
        );
        let ran = sh_unshared(&naive);
        // With fs.protected_symlinks, which systemd sets, the kernel does not follow another user's link in /tmp (proc_sys_fs(5)).
        let is_stopped_by_kernel = kernel_protects_links() && plant.script.contains("chown -h");
        assert!(
            ran.code == Some(0) || is_stopped_by_kernel,
            "{}: the naive program did not fall: {ran:?}",
            plant.name
        );
        every_way(plant, &fake, &image);
    }
}

/// The hook mode on this kernel and an old one, an edited config.json, CDI, plan and doctor.
fn every_way(plant: &Plant, fake: &FakeDriver, image: &Image) {
    let Plant {
        name,
        path,
        refused,
        ..
    } = plant;
    let is_given = refused.is_empty();
    let says = |ran: &Ran| ran.stderr.contains("ONH-218") && ran.stderr.contains(refused);
    let before = fingerprint(&fake.root, "");
    let dir = image.rootfs.parent().unwrap();
    for kernel in [None, Some(kernels::OLDEST)] {
        kernels::set(kernel);
        let container = Waiting::with_all_gpus(dir, image);
        let ran = container.hook(&fake.config);
        assert_eq!(
            (ran.code, !is_given),
            (Some(0), says(&ran)),
            "{name}: {ran:?}"
        );
        assert_eq!(
            is_mounted(&container, path),
            is_given,
            "{name}: {}",
            container.mountinfo()
        );
        container.output("nvidia-smi -L");
        if kernel.is_none() {
            let explained = plan(&container, fake);
            let (dir, file) = path.rsplit_once('/').unwrap();
            let (start, end) = (format!("files in {dir}"), format!(": {file}"));
            let is_listed = explained
                .stdout
                .lines()
                .any(|line| line.starts_with(&start) && line.ends_with(&end));
            assert_eq!(is_listed, is_given, "{name}: {explained:?}");
            let found = explained.stdout.contains("ONH-218") && explained.stdout.contains(refused);
            assert_eq!(!is_given, found, "{name}: {explained:?}");
        }
    }
    kernels::set(None);

    // By path only if no other user can change what the path means; otherwise by our hook entry, which opens it.
    let root = std::fs::metadata(
        fake.root
            .join(path.trim_start_matches('/'))
            .parent()
            .unwrap(),
    )
    .unwrap();
    let by_path = is_given && root.uid() == 0;
    let container = Waiting::start(dir, &image.rootfs, &[], "");
    let spec = json!({
        "ociVersion": "1.0.2", "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}, "root": {"path": image.rootfs},
    });
    let ran = fake.edit_config(&spec.to_string());
    assert_eq!(!is_given, says(&ran), "{name}: {ran:?}");
    let added: serde_json::Value = serde_json::from_str(&ran.ok()).unwrap();
    let is_target = |mount: &&serde_json::Value| mount["destination"] == *path;
    assert_eq!(
        added["mounts"]
            .as_array()
            .unwrap()
            .iter()
            .filter(is_target)
            .count(),
        usize::from(by_path),
        "{name}"
    );
    let entry = added["hooks"]["createRuntime"][0].clone();
    container.set_hooks("createRuntime", &json!([entry]));
    let args: Vec<String> = serde_json::from_value(entry["args"].clone()).unwrap();
    container.create_runtime_hook(&args[1..]).ok();
    assert_eq!(
        is_mounted(&container, path),
        is_given && !by_path,
        "{name}: {}",
        container.mountinfo()
    );

    let ran = cdi(fake, &["generate", "--output", "-"]);
    assert_eq!(!is_given, says(&ran), "{name}: {ran:?}");
    let edits = generate(fake, &["--hook-path", HOOK]).container_edits;
    let of_path: Vec<_> = edits
        .mounts
        .iter()
        .filter(|mount| mount.container_path == *path)
        .collect();
    assert_eq!(of_path.len(), usize::from(by_path), "{name}: {of_path:?}");
    let container = Waiting::start(dir, &image.rootfs, &[], "");
    container.set_hooks("createRuntime", &json!(edits.hooks));
    container
        .create_runtime_hook(&edits.hooks[0].args[1..])
        .ok();
    assert_eq!(
        is_mounted(&container, path),
        is_given && !by_path,
        "{name}: {}",
        container.mountinfo()
    );

    let ran = fake.run(&["doctor"]);
    assert_eq!(
        !is_given,
        ran.stdout.contains("ONH-218") && ran.stdout.contains(refused),
        "{name}: {ran:?}"
    );
    assert_eq!(fingerprint(&fake.root, ""), before, "{name}");
}

fn is_mounted(container: &Waiting, path: &str) -> bool {
    let point = format!("{}{path}", container.rootfs.display());
    container
        .mountinfo()
        .lines()
        .any(|line| line.split(' ').nth(4) == Some(&point))
}

fn plan(container: &Waiting, fake: &FakeDriver) -> Ran {
    fake.run_with(&["plan", "-"], &container.state())
}

/// The administrator's setting replaces the check of the owner, and nothing else.
fn an_mps_directory_that_is_named() {
    let named = "environment = [\"PATH=/nowhere\", \"CUDA_MPS_PIPE_DIRECTORY=/srv/mps\"]";
    for (script, refused) in rows! {
        "mkdir -p srv/mps; chown 65533 srv/mps", "";
        "mkdir -p srv/mps; chown 65533 srv srv/mps", "";
        "mkdir -p srv; chmod 1777 srv; ln -s / srv/mps", "\"/srv/mps\" is a symbolic link";
        "mkdir -p srv; chown 65533 srv; ln -s / srv/mps", "\"/srv/mps\" is a symbolic link";
        "mkdir -p srv; echo >srv/mps", "it is not a directory";
        "true", "the MPS directory \"/srv/mps\" that config.toml names does not exist";
    } {
        let (fake, dir) = (host(), scratch());
        fake.configure(named);
        shell!(
            "cd '{}'; mkdir tmp/nvidia-mps; {script}",
            fake.root.display()
        );
        let image = Image::new(dir.path(), &["--layout", "debian"]);
        let container = Waiting::with_all_gpus(dir.path(), &image);
        let ran = container.hook(&fake.config);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert!(!is_mounted(&container, MPS), "another one is named");
        assert_eq!(
            is_mounted(&container, "/srv/mps"),
            refused.is_empty(),
            "{script}: {ran:?}"
        );
        if refused.is_empty() {
            assert!(
                container
                    .mount_options("/srv/mps")
                    .starts_with("rw,nosuid,nodev,noexec")
            );
            assert!(!ran.stderr.contains("ONH-218"), "{ran:?}");
        } else {
            assert_says(&ran.stderr, &["ONH-218", refused]);
        }
    }
}

/// Another user's FUSE file system can show any owner and mode: a mount below `/tmp` does not belong to root.
fn a_mount_of_a_users() {
    let (fake, dir) = (host(), scratch());
    let root = fake.root.display();
    let mount =
        format!("mkdir '{root}{MPS}'; mount -t tmpfs -o mode=755 fuse '{root}{MPS}'; exec \"$@\"");
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::with_all_gpus(dir.path(), &image);
    let mut hook = unshare(&mount);
    hook.args([HOOK]);
    let ran = container.call(&mut hook, &fake.config);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_says(
        &ran.stderr,
        &["is a mount point in a directory of other users"],
    );
    assert!(!is_mounted(&container, MPS));
}

/// A daemon's user swaps its socket, its directory and links while containers start.
fn a_daemon_that_swaps_its_socket() {
    let fake = host();
    let dir = fake.root.join("run/nvidia-persistenced");
    std::fs::rename(dir.join("socket"), dir.join("good")).unwrap();
    symlink("/", dir.join("link")).unwrap();
    std::fs::create_dir(dir.join("dir")).unwrap();
    symlink("../nvidia-fabricmanager/socket", dir.join("other")).unwrap();
    for name in [".", "good", "dir"] {
        chown(dir.join(name), Some(65533), None).unwrap();
    }
    // A check by path, and a mount with the same path after the swap.
    let naive = format!(
        "cd '{}'; mv good socket; test -S socket; test ! -L socket; mv socket good; mv link socket; mkdir point; \
         mount --rbind socket point; test -d point/proc; umount -l point; rmdir point; mv socket link",
        dir.display()
    );
    sh_unshared(&naive).ok();
    let stop = AtomicBool::new(false);
    let (mut given, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for name in ["link", "good", "dir", "good", "other", "good"]
                .iter()
                .cycle()
            {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                std::fs::rename(dir.join(name), dir.join("socket")).unwrap();
                std::thread::yield_now();
                std::fs::rename(dir.join("socket"), dir.join(name)).unwrap();
            }
        });
        let stop_at_end = Stop(&stop);
        let scratch = scratch();
        let image = Image::new(scratch.path(), &["--layout", "debian"]);
        for round in 0..80 {
            kernels::set((round % 2 == 1).then_some(kernels::OLDEST));
            let container = Waiting::with_all_gpus(scratch.path(), &image);
            let ran = container.hook(&fake.config);
            assert_eq!(ran.code, Some(0), "{ran:?}");
            if !is_mounted(&container, SOCKET) {
                refused += 1;
                continue;
            }
            given += 1;
            let at = PathBuf::from(format!(
                "/proc/{}/root{}{SOCKET}",
                container.pid(),
                image.rootfs.display()
            ));
            let seen = std::fs::symlink_metadata(at).unwrap();
            assert!(
                seen.file_type().is_socket() && seen.uid() == 65533,
                "{seen:?}\n{}",
                container.mountinfo()
            );
        }
        kernels::set(None);
        drop(stop_at_end);
    });
    assert!(
        refused > 0 && given > 0,
        "the race was none: {given} given, {refused} refused"
    );
}

/// Ends the other thread, also if an assertion fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

const FILES: &str = "/dev/nvidiactl /dev/nvidia0 /dev/nvidia1 /dev/nvidia-uvm /dev/nvidia-modeset /dev/dri/card1 \
                     /dev/dri/renderD129 /run/nvidia-persistenced/socket /run/nvidia-fabricmanager/socket";

/// Returns mode, owner and times of the host's objects that containers get.
fn handed_out(fake: &FakeDriver) -> String {
    [
        fingerprint(&fake.root.join("dev"), ""),
        fingerprint(&fake.root.join("run"), ""),
    ]
    .concat()
}

const REFUSED: &str = ": chmod EROFS chmod EROFS chown EROFS utime EROFS xattr EROFS ";

/// All files exist, opening and connecting work, and nothing else does; nodes of the container itself may be changed.
#[track_caller]
fn is_harmless(said: &str, own_nodes: bool) {
    assert_eq!(
        said.lines().count(),
        FILES.split(' ').filter(|word| !word.is_empty()).count(),
        "{said}"
    );
    for line in said.lines() {
        let is_socket = line.contains("/socket: ");
        assert!(
            line.ends_with(if is_socket {
                " connect ok"
            } else {
                " open ENXIO"
            }),
            "{said}"
        );
        assert!(line.contains(REFUSED) || own_nodes && !is_socket, "{said}");
    }
}

/// This needs no capability: root of a container owns the inodes.
fn nodes_and_sockets_stay_as_they_are() {
    let fake = host();
    let env = [
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=all",
    ];
    let sockets = [
        "run/nvidia-persistenced/socket",
        "run/nvidia-fabricmanager/socket",
    ];
    sockets
        .iter()
        .for_each(|path| std::fs::remove_file(fake.root.join(path)).unwrap());
    let _listeners = sockets.map(|path| listen(&fake, path));
    let deface = format!("probe-deface {FILES}");

    // The old implementation: a bind mount that is not read-only.
    let (dir, victim) = (scratch(), host());
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let naive = format!(
        "cd '{}'; touch dev/nvidia0; mount --bind '{}/dev/nvidia0' dev/nvidia0; chroot . probe-deface /dev/nvidia0",
        image.rootfs.display(),
        victim.root.display()
    );
    let before = handed_out(&victim);
    sh_unshared(&naive).ok();
    assert_ne!(
        handed_out(&victim),
        before,
        "the naive program did not fall"
    );

    let before = handed_out(&fake);
    for kernel in [None, Some(kernels::OLDEST)] {
        kernels::set(kernel);
        let container = Waiting::debian(&env, "");
        container.hook(&fake.config).ok();
        is_harmless(&container.output(&deface), false);
    }
    kernels::set(None);

    let podman = Podman::with_image();
    let arguments = |more: &[&'static str]| -> Vec<String> {
        let mut words = vec!["--cap-drop=all".to_owned()];
        words.extend(more.iter().map(|word| (*word).to_owned()));
        words.extend([IMAGE, "sh", "-c"].map(str::to_owned));
        words.push(deface.clone());
        words
    };
    let asks = ["-e", env[0], "-e", env[1]];
    let start = |cgroup, more: &[&'static str]| {
        let words = arguments(more);
        podman
            .run(
                cgroup,
                &words.iter().map(String::as_str).collect::<Vec<_>>(),
            )
            .ok()
    };
    for stage in ["prestart", "createRuntime"] {
        podman.install_stage(stage, &fake.config);
        for cgroup in [Cgroup::AsMounted, Cgroup::V2, Cgroup::WithCrun] {
            is_harmless(&start(cgroup, &asks), false);
            assert_eq!(handed_out(&fake), before, "{stage} {cgroup:?}");
        }
    }
    podman.remove_hook();
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    write_spec_with(&fake, &path, &["--hook-path", HOOK]);
    let words = arguments(&["--device=nvidia.com/gpu=all"]);
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    is_harmless(
        &Podman::shared()
            .run_after(&only_spec(&path), Cgroup::AsMounted, &words)
            .ok(),
        true,
    );
    assert_eq!(handed_out(&fake), before, "CDI");
}
