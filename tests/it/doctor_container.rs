//! `doctor --container`: a process that has an image as its root, like containers that were started by hand or with a device
//! plugin, with one missing or wrong object at a time.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde_json::Value;

use crate::driver::{FakeDriver, Image};
use crate::hostile::blocking;
use crate::support::{HOOK, Need, read, run, scratch, sh, shell, unshare, write_file};
use crate::{golden, json_schema};

const NEEDS: &[Need] = &[Need::Root, Need::Programs(&["cc", "unshare"])];
const NEEDS_STRACE: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "strace", "timeout"]),
];
const NEEDS_FUSE: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare"]),
    Need::Device("/dev/fuse"),
];
const V1: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare"]),
    Need::CgroupV1,
];

tests! {
    NEEDS => each_lack_has_its_finding, a_version_that_is_not_checked, only_files_of_a_container_are_opened, what_cannot_be_examined;
    NEEDS_STRACE => files_of_the_kernel_are_not_read;
    &[Need::Root, Need::Programs(&["cc", "unshare"]), golden::SCRIPT] => without_a_driver;
    NEEDS_FUSE => a_file_system_that_does_not_answer;
    V1 => a_cgroup_that_denies;
}

/// The process of a container, and the process that serves its file system, if there is one.
struct Container(Child, Option<i32>);

impl Drop for Container {
    fn drop(&mut self) {
        // A process that waits for the server ends only after it.
        if let Some(server) = self.1 {
            rustix::process::kill_process(Pid::from_raw(server).unwrap(), Signal::KILL).ok();
        }
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// The shell script `before` prepares its root, in which it runs, after a /dev with the nodes of one GPU was mounted; `program`
/// is the command line that starts the process there.
fn start(dir: &Path, before: &str, program: &str) -> Container {
    let script = format!(
        "cd '{}'; mount --bind . .; cd \"$PWD\"; mount -t tmpfs -o nosuid dev dev; \
         node() {{ mknod dev/$1 c $2 $3; chmod 666 dev/$1; }}; \
         node nvidiactl 195 255; node nvidia-uvm 511 0; node nvidia0 195 0; {before}\necho ready; exec {program}",
        dir.join("image").display()
    );
    let mut command = unshare(&script);
    command.stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(
        &mut std::io::BufReader::new(child.stdout.take().unwrap()),
        &mut line,
    )
    .unwrap();
    assert_eq!(line, "ready\n", "{before}");
    let server = std::fs::read_to_string(dir.join("image/server")).ok();
    let container = Container(child, server.map(|pid| pid.trim().parse().unwrap()));
    // The shell becomes the program.
    let end = Instant::now() + Duration::from_secs(30);
    while read(format!("/proc/{}/comm", container.0.id())).trim() != "sleep" {
        assert!(Instant::now() < end, "{program}");
        std::thread::sleep(Duration::from_millis(10));
    }
    container
}

const SLEEP: &str = "chroot . /bin/sleep 600";
const AS_USER: &str = "chroot --userspec=1000:1000 --groups= . /bin/sleep 600";
const IN_GROUP: &str = "chroot --userspec=1000:1000 --groups=44 . /bin/sleep 600";

/// An image that contains the driver's libraries, as a device plugin mounts them, and a linker cache that lists them.
fn image(dir: &Path) {
    let image = Image::new(dir, &["--layout", "debian"]);
    let script = format!(
        "cd '{}'; lib=usr/lib/x86_64-linux-gnu; mkdir -p $lib dev; \
         for name in libcuda libnvidia-ml; do echo x >$lib/$name.so.535.183.01; ln -sf $name.so.535.183.01 $lib/$name.so.1; done",
        image.rootfs.display()
    );
    sh(&script).ok();
}

fn doctor(fake: &FakeDriver, arguments: &[&str]) -> (Option<i32>, Vec<Value>, String) {
    let ran = fake.run(&[&["doctor", "--json"], arguments].concat());
    let checks = match ran.stdout.as_str() {
        "" => Vec::new(),
        text => json_schema::part("doctor", text, "checks"),
    };
    (ran.code, checks, ran.stderr)
}

fn ids(outcomes: &[Value]) -> Vec<String> {
    outcomes
        .iter()
        .filter_map(|outcome| Some(outcome["id"].as_str()?.to_owned()))
        .collect()
}

/// Changes to the container before it runs, the program, and the expected results.
const LACKS: &[(&str, &str, &[&str])] = &rows! {
    "true", SLEEP, &[];
    "rm usr/lib/x86_64-linux-gnu/libcuda.so*", SLEEP, &["ONH-509"];
    ": >usr/lib/x86_64-linux-gnu/libcuda.so.535.183.01", SLEEP, &["ONH-509"];
    // A link out of the image leads nowhere in it.
    "ln -sf /proc/self/cwd/../../etc/passwd usr/lib/x86_64-linux-gnu/libcuda.so.1", SLEEP, &["ONH-509"];
    // Mounted as by GKE's plugin: the loader finds them only with LD_LIBRARY_PATH.
    "mkdir -p usr/local/nvidia/lib64; mv usr/lib/x86_64-linux-gnu/lib*nvidia-ml* usr/local/nvidia/lib64", SLEEP, &["ONH-510"];
    "mkdir -p usr/local/nvidia/lib64; mv usr/lib/x86_64-linux-gnu/lib*nvidia-ml* usr/local/nvidia/lib64; \
         export LD_LIBRARY_PATH=/usr/local/nvidia/lib64", SLEEP, &[];
    "cd usr/lib/x86_64-linux-gnu; mv libcuda.so.535.183.01 libcuda.so.550.54.14; ln -sf libcuda.so.550.54.14 libcuda.so.1; \
         cd ../../..", SLEEP, &["ONH-511"];
    "rm dev/nvidia0", SLEEP, &["ONH-512"];
    "chmod 660 dev/nvidia0; chgrp 44 dev/nvidia0", SLEEP, &[];
    "chmod 660 dev/nvidia0; chgrp 44 dev/nvidia0", AS_USER, &["ONH-513"];
    "chmod 660 dev/nvidia0; chgrp 44 dev/nvidia0", IN_GROUP, &[];
    "mount -o remount,nodev dev", SLEEP, &["ONH-513"];
    // The module was loaded again after the container had started.
    "rm dev/nvidia-uvm; node nvidia-uvm 498 0", SLEEP, &["ONH-512"];
    "mkdir dev/nvidia-caps; node nvidia-caps/nvidia-cap12 498 12", SLEEP, &["ONH-512"];
    // The host has the GPUs 0 and 1.
    "node nvidia1 195 1", SLEEP, &[];
    "node nvidia2 195 2", SLEEP, &["ONH-030"];
};

fn each_lack_has_its_finding() {
    let fake = FakeDriver::shared();
    for (before, program, expected) in LACKS {
        let dir = scratch();
        image(dir.path());
        let container = start(dir.path(), before, program);
        let (code, outcomes, stderr) = doctor(fake, &["--pid", &container.0.id().to_string()]);
        assert_eq!(
            ids(&outcomes),
            *expected,
            "{before}: {outcomes:#?} {stderr}"
        );
        // A GPU that is gone is an error, what the container lacks is a warning.
        let status = match *expected {
            [] => 0,
            ["ONH-030"] => 3,
            _ => 1,
        };
        assert_eq!(code, Some(status), "{before}");
        assert!(
            outcomes
                .iter()
                .all(|outcome| outcome["id"].is_null() || outcome["fix"] != ""),
            "{outcomes:?}"
        );
    }
}

/// One cause has many symptoms, but one fix. What passed has the numbers of a process, so the golden file does not show it.
fn without_a_driver() {
    let dir = scratch();
    image(dir.path());
    let container = start(
        dir.path(),
        "rm -r usr/lib/*/libcuda* usr/lib/*/libnvidia-ml* dev/nvidia*; ldconfig -r .",
        SLEEP,
    );
    let mut doctor = Command::new(HOOK);
    doctor
        .arg("--config")
        .arg(&FakeDriver::shared().config)
        .args(["doctor", "--pid", &container.0.id().to_string()]);
    golden::check(
        "doctor-container",
        "oci-nvidia-hook doctor --pid PID",
        &doctor,
    );
}

/// A FIFO would block root's doctor for ever, and opening a device can have an effect: a watchdog resets the host.
fn only_files_of_a_container_are_opened() {
    let fake = FakeDriver::shared();
    let dir = scratch();
    image(dir.path());
    let before = "rm -f etc/ld.so.cache; mkfifo etc/ld.so.cache; rm usr/lib/x86_64-linux-gnu/libcuda.so.1; \
                  mkfifo usr/lib/x86_64-linux-gnu/libcuda.so.1";
    let container = start(dir.path(), before, SLEEP);
    let begin = Instant::now();
    let (code, outcomes, _) = doctor(fake, &["--pid", &container.0.id().to_string()]);
    assert!(begin.elapsed() < Duration::from_secs(30));
    assert_eq!(
        (code, ids(&outcomes)),
        (Some(1), vec!["ONH-509".to_owned()])
    );
    // A naive reader hangs.
    let fifo = dir.path().join("image/etc/ld.so.cache");
    let naive = run(Command::new("timeout").args(["1", "cat"]).arg(fifo));
    assert_eq!(naive.code, Some(124));
}

/// A read of /proc/kmsg takes the kernel's messages from syslog. It has the mode of a regular file.
fn files_of_the_kernel_are_not_read() {
    let fake = FakeDriver::shared();
    for (before, place) in [
        ("ln -sfn /proc/kmsg etc/ld.so.cache", "/proc"),
        (
            "rm etc/ld.so.cache; touch etc/ld.so.cache; mount --bind /proc/kmsg etc/ld.so.cache",
            "/etc/ld.so.cache",
        ),
        ("umount dev; rm -r dev; ln -s proc dev", "/proc"),
    ] {
        let dir = scratch();
        image(dir.path());
        let container = start(
            dir.path(),
            &format!("mount --bind /proc proc; {before}"),
            SLEEP,
        );
        // A naive reader reads the kernel's log.
        let root = format!("/proc/{}/root", container.0.id());
        if before.contains("kmsg") {
            let naive = run(Command::new("timeout").args([
                "1",
                "chroot",
                &root,
                "head",
                "-c",
                "1",
                "/etc/ld.so.cache",
            ]));
            assert!(
                naive.code == Some(124) || !naive.stdout.is_empty(),
                "{naive:?}"
            );
        }
        let trace = dir.path().join("trace");
        let mut strace = Command::new("strace");
        strace
            .args([
                "-ff",
                "-y",
                "-e",
                "trace=read,openat,openat2,getdents64",
                "-o",
            ])
            .arg(&trace)
            .arg(HOOK);
        strace
            .arg("--config")
            .arg(&fake.config)
            .args(["doctor", "--json", "--pid"])
            .arg(container.0.id().to_string());
        let begin = Instant::now();
        let ran = run(strace.env_clear());
        assert!(
            begin.elapsed() < Duration::from_secs(30) && matches!(ran.code, Some(0 | 1)),
            "{before}: {ran:?}"
        );
        // One file for each process.
        let trace = shell!("cat '{}'.*", trace.display());
        let inside = format!("{}{place}", dir.path().join("image").display());
        let read = trace
            .lines()
            .find(|line| !line.contains("O_PATH") && line.contains(&inside));
        assert_eq!(read, None, "{before}");
    }
}

/// The server of a FUSE file system in the container accepts each request and answers none, so that a process that waits for it
/// cannot be killed.
fn a_file_system_that_does_not_answer() {
    let (fake, probe) = (FakeDriver::shared(), blocking::silent_fuse().display());
    let examine = |before: &str| {
        let dir = scratch();
        image(dir.path());
        let mount = format!(
            "mkdir vol; mkfifo mounted; '{probe}' vol accept >mounted & echo $! >server; read line <mounted; {before}"
        );
        let container = start(dir.path(), &mount, SLEEP);
        let begin = Instant::now();
        let (code, outcomes, stderr) = doctor(fake, &["--pid", &container.0.id().to_string()]);
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(40), "{before}: {took:?}");
        let found = (code, ids(&outcomes));
        assert_eq!(
            found,
            (Some(1), vec!["ONH-515".to_owned()]),
            "{before}: {outcomes:#?} {stderr}"
        );
        let what = outcomes.last().unwrap()["what"].as_str().unwrap();
        assert!(
            what.ends_with("cannot be examined: no answer in time"),
            "{before}: {what}"
        );
    };
    // What doctor looks up.
    let places = [
        "ln -sfn /vol/x etc/ld.so.cache",
        "rm etc/ld.so.cache; ln -sfn /vol/x usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "export LD_LIBRARY_PATH=/none:/vol/lib",
        "ln -sfn /vol/x dev/nvidiactl",
        "ln -sfn /vol/x dev/nvidia7",
        "umount dev; rm -r dev; ln -s vol/x dev",
    ];
    std::thread::scope(|scope| {
        for before in places {
            scope.spawn(move || examine(before));
        }
    });
}

/// The container is found by the id in the name of its cgroup, as engines set it.
fn a_cgroup_that_denies() {
    let fake = FakeDriver::shared();
    let dir = scratch();
    image(dir.path());
    let container = start(dir.path(), "true", SLEEP);
    let id = format!("{:064x}", u64::from(container.0.id()) << 32 | 0xd0c);
    let id = id.replacen("0000000000", "abcdef0123", 1);
    let cgroup = Path::new("/sys/fs/cgroup/devices").join(format!("libpod-{id}"));
    std::fs::create_dir(&cgroup).unwrap();
    let write = |file: &str, text: &str| write_file(cgroup.join(file), text);
    write("cgroup.procs", &container.0.id().to_string());
    let asked = ["--container", &id[..30]];
    let denied = |outcomes: &[Value]| {
        let denied = outcomes.iter().filter(|outcome| outcome["id"] == "ONH-514");
        denied
            .map(|outcome| outcome["what"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let open = doctor(fake, &asked);
    write("devices.deny", "a");
    write("devices.allow", "c 195:* rw");
    let partly = doctor(fake, &asked);
    write("devices.allow", "c 511:* rw");
    let again = doctor(fake, &asked);
    drop(container);
    let end = Instant::now() + Duration::from_secs(10);
    while std::fs::remove_dir(&cgroup).is_err() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!((open.0, denied(&open.1)), (Some(0), Vec::new()), "{open:?}");
    assert_eq!(partly.0, Some(1));
    assert_eq!(
        denied(&partly.1),
        ["the device cgroup denies \"/dev/nvidia-uvm\" (511:0)"]
    );
    assert_eq!(
        (again.0, denied(&again.1)),
        (Some(0), Vec::new()),
        "{again:?}"
    );
}

fn what_cannot_be_examined() {
    let fake = FakeDriver::shared();
    // The process is in the mount namespace of the machine, and the test is not.
    let us = rustix::thread::gettid().to_string();
    for (arguments, says) in rows! {
        &["--pid", us.as_str()][..], "is not in a container (ONH-055)\nhint: ";
        &["--pid", "999999999"], "process 999999999 does not exist (ONH-055)\nhint: ";
        &["--container", "0123456789abcdef0123456789abcdef"], "\"0123456789abcdef0123456789abcdef\" (ONH-055)\nhint: ";
        &["--container", "no-such-name"], "no running container \"no-such-name\" (ONH-055)\nhint: ";
    } {
        let (code, outcomes, stderr) = doctor(fake, arguments);
        assert!(
            code == Some(3) && outcomes.is_empty() && stderr.contains(says),
            "{arguments:?}: {stderr}"
        );
    }
    assert_eq!(doctor(fake, &["--pid", "x"]).0, Some(2));
}

/// Files with the right name are not always the host's.
fn a_version_that_is_not_checked() {
    let fake = FakeDriver::shared();
    let lib = "usr/lib/x86_64-linux-gnu";
    let host = fake.root.join(lib).display().to_string();
    let mount = |from: &str, to: &str| format!("mount --bind '{host}/{from}' {lib}/{to}");
    let right = mount("libcuda.so.535.183.01", "libcuda.so.535.183.01");
    let bare = format!("rm {lib}/libcuda.so.1; : >{lib}/libcuda.so.1");
    for (before, status, says) in rows! {
        "true".to_owned(), "skipped", "which is not the host's file: only its name has the version, 535.183.01";
        right, "ok", "libcuda.so.1\", the host's file of driver 535.183.01";
        format!("{bare}; {}", mount("libcuda.so.535.183.01", "libcuda.so.1")), "ok", "the host's file of driver";
        format!("{bare}; {}", mount("libnvidia-ml.so.535.183.01", "libcuda.so.1")), "skipped",
            "which is not the host's file and has no version in its name: its version is unknown";
    } {
        let dir = scratch();
        image(dir.path());
        let container = start(dir.path(), &before, SLEEP);
        let (_, checks, stderr) = doctor(fake, &["--pid", &container.0.id().to_string()]);
        let found = |check: &&Value| {
            check["check"] == "libraries" && check["what"].as_str().unwrap().contains("libcuda")
        };
        let check = checks
            .iter()
            .find(found)
            .unwrap_or_else(|| panic!("{stderr}"));
        assert_eq!(check["status"], status, "{before}: {check}");
        assert!(
            check["what"].as_str().unwrap().contains(says),
            "{before}: {check}"
        );
    }
}
