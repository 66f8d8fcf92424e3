//! The setup is atomic: strace's fault injection makes each system call of the hook fail, one in each run.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::driver::{FakeDriver, Image, Waiting};
use crate::kernels;
use crate::support::{Need, read, run_with, scratch, snapshot};

const NEEDS: &[Need] = &[Need::Root, Need::Programs(&["cc", "unshare", "strace"])];

tests! {
    NEEDS => every_call_that_changes_something = every_call(CHANGING, WRITABLE),
        every_call_that_opens_or_reads = every_call(READING, WRITABLE),
        every_call_on_a_read_only_rootfs = every_call(LAYERING, READ_ONLY), every_call_that_creates_a_node,
        a_root_file_system_that_another_container_uses;
}

const CHANGING: &[&str] = &[
    "mkdirat",
    "symlinkat",
    "renameat",
    "unlinkat",
    "write",
    "setns",
    "move_mount",
    "open_tree",
    "mount_setattr",
    "fsopen",
    "fsconfig",
    "fsmount",
    "mount",
    "fcntl",
    "pipe2",
    "setfsuid",
];
const READING: &[&str] = &["openat", "openat2", "readlinkat", "getdents64"];

/// The system calls that create the layers of a read-only rootfs.
const LAYERING: &[&str] = &[
    "mount",
    "mkdirat",
    "mknodat",
    "symlinkat",
    "write",
    "umount2",
    "openat2",
    "move_mount",
    "statx",
];

/// Commands that run on the rootfs at the end.
const WRITABLE: &str = "true";
const READ_ONLY: &str = "mount -o remount,bind,ro merged";

/// An image as lower layer, and the container's upper layer.
struct Layers {
    dir: tempfile::TempDir,
    image: Image,
    /// The process id of the container's process
    user: u32,
}

impl Layers {
    fn new() -> Self {
        let (dir, image) = Image::debian();
        Self {
            dir,
            image,
            user: 0,
        }
    }

    fn start(&self, last: &str) -> (Waiting, std::path::PathBuf) {
        let upper = self.dir.path().join("upper");
        std::fs::remove_dir_all(&upper).ok();
        std::fs::create_dir(&upper).unwrap();
        for name in ["work", "merged"] {
            std::fs::remove_dir_all(self.dir.path().join(name)).ok();
            std::fs::create_dir(self.dir.path().join(name)).unwrap();
        }
        let merged = self.dir.path().join("merged");
        std::fs::create_dir(merged.join("dev")).unwrap();
        let before = format!(
            "umount \"$rootfs/dev\"; cd '{}'; mount -t overlay -o lowerdir='{}',upperdir=upper,workdir=work none merged; \
             mount -t tmpfs -o nosuid dev merged/dev; mount -t tmpfs proc merged/proc; mkdir -p merged/proc/driver/nvidia; {last}",
            self.dir.path().display(),
            self.image.rootfs.display()
        );
        let env = ["NVIDIA_VISIBLE_DEVICES=0"];
        let container = Waiting::start(self.dir.path(), &merged, &env, &before);
        let process = serde_json::json!({"args": ["sh"], "env": env, "user": {"uid": self.user, "gid": self.user}});
        container.set_spec(&env, &serde_json::json!({"process": process}));
        (container, upper)
    }
}

/// Returns the files of an upper layer except for copies of the image's directories: overlayfs creates these copies when
/// something is created in the directories, and keeps them when it is removed.
fn left_in(upper: &Path) -> String {
    snapshot(upper)
        .lines()
        .filter(|line| line.split(' ').nth(1) != Some("d"))
        .collect()
}

fn every_call(calls: &[&str], last: &str) {
    fails_at(
        &FakeDriver::new(&["--gpus", "2", "--drm"]),
        &Layers::new(),
        calls,
        last,
    );
}

/// For a user who has no permission to open the host's nodes.
fn every_call_that_creates_a_node() {
    let fake = FakeDriver::new(&["--gpus", "1", "--dev-mode", "0660", "--dev-group", "video"]);
    let layers = Layers {
        user: 1000,
        ..Layers::new()
    };
    fails_at(
        &fake,
        &layers,
        &[
            "mount",
            "umount2",
            "mknodat",
            "fchmodat",
            "open_tree",
            "move_mount",
        ],
        WRITABLE,
    );
}

fn fails_at(fake: &FakeDriver, layers: &Layers, calls: &[&str], last: &str) {
    let (mut container, mut upper) = layers.start(last);
    let mut clean_mounts = container.mountinfo();
    let host_mounts = read("/proc/thread-self/mountinfo");
    let mut failed = 0;
    for call in calls {
        for n in 1.. {
            let trace = layers.dir.path().join("trace");
            let injected = format!("inject={call}:error=EIO:when={n}");
            let mut strace = Command::new("strace");
            strace
                .args(["-e", &format!("trace={call}"), "-e", &injected, "-o"])
                .arg(&trace);
            strace
                .args(kernels::hook())
                .arg("--config")
                .arg(&fake.config)
                .arg("prestart")
                .env_clear();
            let ran = run_with(&mut strace, container.state().as_bytes());
            let was_hit = read(&trace).contains("(INJECTED)");
            let about = format!("{call} {n}: {ran:?}");
            assert!(ran.code.is_some(), "the hook ends: {about}");
            assert!(
                read("/proc/thread-self/mountinfo") == host_mounts,
                "{about}"
            );
            if ran.code == Some(0) {
                if was_hit {
                    let works = container
                        .exec("probe-dlopen libcuda.so.1 libnvidia-ml.so.1; test -c /dev/nvidia0");
                    assert_eq!(works.code, Some(0), "{about}: {works:?}");
                    let image = container.exec("test -s /etc/passwd && test -x /usr/bin/cat");
                    assert_eq!(
                        image.code,
                        Some(0),
                        "no file of the image is hidden: {about}"
                    );
                    let complete = container.exec("nvidia-smi -L").code == Some(0);
                    assert!(
                        complete || ran.stderr.contains("nvidia-smi"),
                        "the missing file is reported: {about}"
                    );
                }
                drop(container);
                (container, upper) = layers.start(last);
                clean_mounts = container.mountinfo();
            } else {
                failed += 1;
                assert_eq!(left_in(&upper), "", "{about}");
                assert!(
                    container.mountinfo() == clean_mounts,
                    "{about}\n{}",
                    container.mountinfo()
                );
                let lines: Vec<_> = ran.stderr.lines().collect();
                let by_the_loader =
                    ran.code == Some(127) && ran.stderr.contains("shared libraries");
                assert!(
                    by_the_loader || (1..=2).contains(&lines.len()),
                    "one line and a hint: {about}"
                );
            }
            if !was_hit {
                assert_eq!(ran.code, Some(0), "{about}");
                break;
            }
        }
    }
    assert!(failed > 0, "at least one failure has an effect");
}

/// While the hook sets up a container, another one starts with the same root file system, and mounts files on the names that the hook
/// has created. Then the setup fails.
fn a_root_file_system_that_another_container_uses() {
    let (fake, dir) = (FakeDriver::new(&["--gpus", "1"]), scratch());
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let start = |name: &str| {
        Waiting::start(
            &dir.path().join(name),
            &image.rootfs,
            &["NVIDIA_VISIBLE_DEVICES=0"],
            "",
        )
    };
    let (before, first) = (snapshot(&image.rootfs), start("first"));
    let mut strace = Command::new("strace");
    // The links follow the last mount.
    let injected = "inject=symlinkat:error=EIO:when=1:delay_enter=10000000";
    strace
        .args(["-e", "trace=symlinkat", "-e", injected, "-o"])
        .arg(dir.path().join("trace"))
        .args(kernels::hook());
    let fails = std::thread::scope(|scope| {
        let fails = scope.spawn(|| first.call(&mut strace, &fake.config));
        let started = Instant::now();
        while !std::fs::read_to_string(dir.path().join("trace"))
            .is_ok_and(|trace| trace.contains("symlinkat"))
        {
            assert!(started.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(10));
        }
        let second = start("second");
        second.hook(&fake.config).ok();
        let works = || second.output("probe-dlopen libcuda.so.1 && nvidia-smi -L");
        works();
        assert!(!fails.is_finished(), "the first one still waits");
        let fails = fails.join().unwrap();
        assert!(works().contains("UUID: GPU-"));
        fails
    });
    assert_eq!(fails.code, Some(1), "{fails:?}");
    let names = snapshot(&image.rootfs);
    assert!(
        names != before && !names.contains("oci-nvidia-hook-"),
        "no name is lost: {names}"
    );
}
