//! Processes that pretend to be others: their name, their arguments, and a cgroup with the id of a container.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use super::{NEEDS_SETPRIV, NEEDS_SETPRIV_STRACE};
use crate::driver::FakeDriver;
use crate::support::{HOOK, Ran, read, run, scratch, sh, source};

tests! {
    NEEDS_SETPRIV => a_name_that_another_container_has;
    NEEDS_SETPRIV_STRACE => arguments_without_an_end, a_bundle_that_another_user_names;
}

const ID: &str = "eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee";

/// The probe: tests/probes/pretends.c.
fn probe() -> &'static Path {
    static PROBE: OnceLock<PathBuf> = OnceLock::new();
    PROBE.get_or_init(|| {
        let probe = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pretends");
        let mut cc = Command::new("cc");
        cc.args(["-Wall", "-Werror", "-o"]).arg(&probe);
        run(cc.arg(source("tests/probes/pretends.c"))).ok();
        probe
    })
}

/// A process of this user that pretends, and the number of its child.
struct Pretends(Child, u32);

impl Pretends {
    fn start(uid: u32, name: &str, megabytes: u32, arguments: &str) -> Self {
        let mut program = Command::new("setpriv");
        program
            .args([format!("--reuid={uid}"), format!("--regid={uid}")])
            .arg("--clear-groups")
            .arg(probe())
            .args([name, &megabytes.to_string()])
            .args(arguments.split(' '));
        let mut process = program.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let stdout = process.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        let child = line.trim().parse().expect("the number of the child");
        Self(process, child)
    }
}

impl Drop for Pretends {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Root reads the arguments of other processes. Each process can declare any amount of its memory as them.
fn arguments_without_an_end() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let conmon = format!("conmon -c {ID} -n web");
    let plugin = "oci-nvidia-kubelet-plugin run";
    let processes: Vec<_> = [65534, 0]
        .into_iter()
        .flat_map(|uid| {
            [
                Pretends::start(uid, "conmon", 8192, &conmon),
                Pretends::start(uid, "oci-nvidia-kube", 8192, plugin),
            ]
        })
        .collect();
    for Pretends(process, _) in &processes {
        let naive = format!(
            "ulimit -v 1000000; head -c 1G /proc/{}/cmdline | wc -c",
            process.id()
        );
        assert_eq!(sh(&naive).ok().trim(), "1073741824");
    }
    for (arguments, codes) in [
        ("doctor --container web", &[3][..]),
        ("status --json", &[0, 1]),
        ("doctor --json", &[0, 1]),
    ] {
        let (ran, read) = arguments_read(&fake, arguments);
        assert!(
            ran.code.is_some_and(|code| codes.contains(&code)),
            "{arguments}: {ran:?}"
        );
        for (file, bytes) in read {
            assert!(bytes <= 4096, "{arguments}: {bytes} bytes of {file}");
        }
    }
}

/// Runs a command of the hook with four gigabytes of address space: the Go runtime of Podman 5, whose version doctor asks for, sometimes
/// fails to start with one. Returns how many bytes of the arguments of each process it has read.
fn arguments_read(fake: &FakeDriver, arguments: &str) -> (Ran, BTreeMap<String, u64>) {
    let dir = scratch();
    let (config, trace) = (fake.config.display(), dir.path().join("trace"));
    let ran = sh(&format!(
        "ulimit -v 4000000; exec timeout 60 strace -f -y -e trace=read,pread64 -o '{}' {HOOK} --config '{config}' {arguments}",
        trace.display()
    ));
    let mut bytes = BTreeMap::new();
    for line in read(trace).lines() {
        let (Some((before, _)), Some((_, result))) =
            (line.split_once("/cmdline>"), line.rsplit_once(" = "))
        else {
            continue;
        };
        let file = before.rsplit_once('<').unwrap().1.to_owned();
        *bytes.entry(file).or_default() += result.parse().unwrap_or(0);
    }
    (ran, bytes)
}

/// Root of a container can start a process that is called conmon, as the host's conmon would call the container of another one.
fn a_name_that_another_container_has() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let _other = Pretends::start(0, "conmon", 1, &format!("conmon -c {ID} -n web"));
    let stderr = fake.run(&["doctor", "--container", "web"]).failed(3);
    assert!(stderr.contains("no running container \"web\""), "{stderr}");
}

/// A user who may create cgroups, like each user of systemd, can create one with the name of a container, and a parent of its process
/// that names a bundle. The files there are links to others.
fn a_bundle_that_another_user_names() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let dir = scratch();
    let bundle = dir.path().join("bundle");
    std::fs::create_dir(&bundle).unwrap();
    std::os::unix::fs::symlink("/proc/kmsg", bundle.join("config.json")).unwrap();
    let arguments = format!("conmon -c {ID} -b {} -n prod-database", bundle.display());
    let Pretends(_parent, child) = &Pretends::start(65534, "conmon", 1, &arguments);
    let join = format!(
        "unshare -m sh -euc 'mount -t cgroup2 none /mnt; mkdir -p /mnt/libpod-{ID}.scope; echo {child} >/mnt/libpod-{ID}.scope/cgroup.procs'"
    );
    sh(&join).ok();
    let trace = dir.path().join("trace");
    let mut strace = Command::new("strace");
    strace
        .args(["-f", "-e", "trace=openat,openat2", "-o"])
        .arg(&trace);
    strace
        .arg(HOOK)
        .arg("--config")
        .arg(&fake.config)
        .args(["ps", "--all"]);
    let text = run(&mut strace).ok();
    assert!(!text.contains("prod-database"), "{text}");
    let opened = read(&trace);
    assert!(opened.contains("/proc"), "strace shows nothing");
    assert!(!opened.contains(&*bundle.to_string_lossy()), "{opened}");
    let leave = format!(
        "unshare -m sh -euc 'mount -t cgroup2 none /mnt; echo {child} >/mnt/cgroup.procs; rmdir /mnt/libpod-{ID}.scope'"
    );
    sh(&leave).ok();
}
