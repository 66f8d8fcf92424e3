//! Files on which a reader waits: files of the kernel, and files of file systems whose server does not answer.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::scene::Scene;
use super::{NEEDS, NEEDS_FUSE};
use crate::driver::FakeDriver;
use crate::support::{HOOK, read, run, source};

tests! {
    NEEDS => blocking_files_of_the_kernel_are_not_read;
    NEEDS_FUSE => blocking_file_systems_end_at_the_deadline;
}

/// A file in procfs that its mode shows as regular: a read waits for the kernel's next message, and takes it from syslog.
fn blocking_files_of_the_kernel_are_not_read() {
    let proc = "mount --bind /proc $rootfs/proc";
    for (name, image, says) in rows! {
        "a link", "ln -sfn /proc/kmsg $rootfs/etc/ld.so.cache", "ONH-302";
        "a climbing link", "ln -sfn ../../proc/kmsg $rootfs/etc/ld.so.cache", "ONH-302";
        "a link to text", "ln -sfn /proc/self/mounts $rootfs/etc/ld.so.cache", "ONH-302";
        "a directory of CUDA compatibility libraries", "mkdir -p $rootfs/usr/local/cuda; ln -s /proc $rootfs/usr/local/cuda/compat", "";
    } {
        let scene = Scene::new("debian", image);
        if image.contains("kmsg") {
            // A naive read waits for a message, or takes one.
            let naive = "code=0; timeout 1 chroot $rootfs head -c 1 /etc/ld.so.cache >$canary/read || code=$?; \
                         test $code = 124 || test -s $canary/read";
            scene.naive(&format!("{proc}\n{naive}")).ok();
        }
        let container = scene.start(proc);
        let trace = scene.dir().join("trace");
        let mut strace = Command::new("strace");
        strace
            .args(["-y", "-e", "trace=read,openat,getdents64", "-o"])
            .arg(&trace)
            .arg(HOOK);
        let start = Instant::now();
        let ran = container.call(&mut strace, &FakeDriver::shared().config);
        assert!(start.elapsed() < Duration::from_secs(10), "{name}: {ran:?}");
        assert!(
            ran.code == Some(0) && ran.stderr.contains(says),
            "{name}: {ran:?}"
        );
        let trace = read(trace);
        let inside = format!("{}/proc", scene.rootfs.display());
        let read = trace
            .lines()
            .find(|line| !line.contains("O_PATH") && line.contains(&inside));
        assert_eq!(read, None, "{name}");
        container.output("nvidia-smi -L");
    }
}

/// Returns the program that mounts a FUSE file system whose server hangs.
pub fn silent_fuse() -> &'static Path {
    static PROBE: OnceLock<PathBuf> = OnceLock::new();
    PROBE.get_or_init(|| {
        let probe = Path::new(env!("CARGO_TARGET_TMPDIR")).join("silent-fuse");
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&probe);
        run(cc.arg(source("tests/probes/silent-fuse.c"))).ok();
        probe
    })
}

/// A FUSE file system whose server hangs.
fn blocking_file_systems_end_at_the_deadline() {
    let probe = silent_fuse();
    let scene = Scene::new(
        "debian",
        "mkdir $rootfs/volume; ln -sfn /volume/x $rootfs/etc/ld.so.cache",
    );
    let mount = format!(
        "mkfifo $canary/mounted; '{}' $rootfs/volume >$canary/mounted & read line <$canary/mounted",
        probe.display()
    );
    let naive = scene.naive(&format!(
        "{mount}\ncode=0; timeout 2 cat $rootfs/volume/x || code=$?; test $code = 124"
    ));
    naive.ok();
    let scene = Scene::new(
        "debian",
        "mkdir $rootfs/volume; ln -sfn /volume/x $rootfs/etc/ld.so.cache",
    );
    let container = scene.start(&mount);
    let mut hook = Command::new("timeout");
    hook.args(["--signal=KILL", "100", HOOK]);
    let start = Instant::now();
    let ran = container.call(&mut hook, &FakeDriver::shared().config);
    let took = start.elapsed();
    // The hook's own deadlines, and some more on a busy machine; the deadline of its hook file is 60 seconds.
    assert!(
        took > Duration::from_secs(15) && took < Duration::from_secs(50),
        "{took:?}, {ran:?}"
    );
    // The kernel only lets the hook be killed, and then it cannot print anything.
    assert!(
        ran.code.is_none() || ran.stderr.contains("(ONH-049)\nhint: "),
        "{ran:?}"
    );
}
