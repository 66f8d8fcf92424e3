//! A malicious management library: what a process "without capabilities" can still do as root.

use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::NEEDS;
use crate::driver::FakeDriver;
use crate::support::{HOOK, chmod, run, run_with, scratch, shell, source, write_file};

tests! {
    NEEDS => a_management_library_that_attacks;
}

/// Attacks that fail for a process of root without capabilities on its own: unprivileged BPF is off on most hosts, and a process with
/// another root directory cannot create a user namespace.
const NEED_MORE: [&str; 2] = ["bpf", "mount"];

/// Attacks that only Landlock denies, if a process belongs to root.
const NEED_LANDLOCK: [&str; 7] = [
    "passwd",
    "preload",
    "shm",
    "shadow",
    "kmsg",
    "device",
    "read-device",
];

/// Ends the processes of this name, and returns their number.
fn end_named(name: &str) -> usize {
    let mut ended = 0;
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        // A process that has ended and was not waited for still has its name.
        if status.starts_with(&format!("Name:\t{name}\n")) && !status.contains("\nState:\tZ") {
            let pid = entry.file_name().to_str().unwrap().parse().unwrap();
            nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(pid),
                nix::sys::signal::Signal::SIGKILL,
            )
            .ok();
            ended += 1;
        }
    }
    ended
}

/// A driver root whose library attacks, and files of root in it.
struct Host {
    fake: FakeDriver,
    library: PathBuf,
    marker: String,
    _socket: UnixListener,
}

impl Host {
    fn new(dev_mode: &str, dev_group: &str) -> Self {
        let fake = FakeDriver::new(&[
            "--gpus",
            "1",
            "--dev-mode",
            dev_mode,
            "--dev-group",
            dev_group,
        ]);
        let library = fake
            .root
            .join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.183.01");
        compile(
            "tests/probes/hostile-nvml.c",
            &library,
            &["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"],
        );
        shell!(
            "cd '{}'; mkdir -p dev/shm run; mknod -m 600 dev/kmsg c 1 3; mknod -m 600 dev/root c 1 3",
            fake.root.display()
        );
        let socket = UnixListener::bind(fake.root.join("run/root.sock")).unwrap();
        let host = Self {
            fake,
            library,
            marker: format!("onh-{}-{dev_mode}", std::process::id()),
            _socket: socket,
        };
        host.reset();
        host
    }

    /// Restores what a successful attack has changed.
    fn reset(&self) {
        let write = |name: &str, text: &str, mode: u32| {
            let path = self.fake.root.join(name);
            std::fs::remove_file(&path).ok();
            write_file(&path, text);
            chmod(path, mode);
        };
        write("usr/marker", &self.marker, 0o644);
        write("etc/passwd", "root:x:0:0::/:/bin/sh\n", 0o644);
        write("etc/shadow", "", 0o600);
        write("dev/shm/root", "", 0o600);
        write("shared", "", 0o666);
        chmod(self.fake.root.join("run/root.sock"), 0o600);
        std::fs::remove_file(self.fake.root.join("etc/ld.so.preload")).ok();
    }

    /// Returns the results of the library in the process that asks NVML.
    fn ask(&self, user: &str) -> BTreeMap<String, i64> {
        self.fake.configure(user);
        let mut hook = Command::new(HOOK);
        hook.arg("--config")
            .arg(&self.fake.config)
            .arg("info")
            .env_clear();
        let stderr = run_with(&mut hook, b"").failed(1);
        assert!(stderr.contains("(ONH-018)"), "{stderr}");
        assert_eq!(
            end_named(&self.marker),
            0,
            "a process of the library's is left"
        );
        results(&stderr)
    }
}

fn compile(probe: &str, to: &Path, flags: &[&str]) {
    let mut cc = Command::new("cc");
    run(cc
        .args(["-Wall", "-Werror", "-O1"])
        .args(flags)
        .arg("-o")
        .arg(to)
        .arg(source(probe))
        .arg("-ldl"))
    .ok();
}

/// Parses `name=number` in a message.
fn results(text: &str) -> BTreeMap<String, i64> {
    let pairs = text
        .split([' ', '\n', '"', ':', ')'])
        .filter_map(|word| word.split_once('='));
    pairs
        .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
        .collect()
}

/// Returns the attacks that succeeded.
fn succeeded(results: &BTreeMap<String, i64>) -> Vec<&str> {
    let attacks = results
        .iter()
        .filter(|(name, _)| !["uid", "gid", "ctl", "left", "landlock"].contains(&name.as_str()));
    attacks
        .filter(|(_, result)| **result == 1)
        .map(|(name, _)| name.as_str())
        .collect()
}

fn group(name: &str) -> i64 {
    nix::unistd::Group::from_name(name)
        .unwrap()
        .unwrap()
        .gid
        .as_raw()
        .into()
}

pub(super) fn a_management_library_that_attacks() {
    const NOBODY: i64 = 65534;
    let (dir, video) = (scratch(), group("video"));
    let naive = dir.path().join("naive");
    compile("tests/probes/naive-nvml.c", &naive, &[]);
    let on_suse = Host::new("0660", "video");
    let inside = Path::new("/").join(on_suse.library.strip_prefix(&on_suse.fake.root).unwrap());
    let shown = results(&run(Command::new(&naive).arg(&on_suse.fake.root).arg(inside)).ok());
    let attacks = shown.len() - 5;
    let missing: Vec<_> = succeeded(&shown)
        .into_iter()
        .filter(|name| !NEED_MORE.contains(name))
        .collect();
    assert_eq!(missing.len(), attacks - NEED_MORE.len(), "{shown:?}");
    assert_eq!(
        end_named(&on_suse.marker),
        1,
        "the naive program leaves a process behind"
    );
    on_suse.reset();

    let has_landlock = shown["landlock"] > 0;
    let for_all = Host::new("0666", "root");
    let for_root = Host::new("0600", "root");
    for (host, user, uid, gid) in [
        (&on_suse, "", NOBODY, video),
        (&on_suse, "user = \"root:video\"", NOBODY, video),
        (&on_suse, "user = \"root\"", NOBODY, video),
        (&on_suse, "user = \"nobody:video\"", NOBODY, video),
        (&for_all, "", NOBODY, NOBODY),
        (&for_all, "user = \"root:video\"", NOBODY, NOBODY),
        (&for_all, "user = \"nobody:video\"", NOBODY, video),
        (&for_root, "", 0, 0),
        (&for_root, "user = \"root\"", 0, 0),
        (&for_root, "user = \"root:video\"", 0, video),
    ] {
        let shown = host.ask(user);
        assert_eq!(shown.len(), attacks + 5, "{shown:?}");
        assert_eq!(
            (shown["uid"], shown["gid"], shown["ctl"], shown["left"]),
            (uid, gid, 1, 1),
            "{user}: {shown:?}"
        );
        let mut succeeded = succeeded(&shown);
        if !has_landlock {
            succeeded
                .retain(|name| *name != "shared" && (uid != 0 || !NEED_LANDLOCK.contains(name)));
        }
        assert_eq!(succeeded, [""; 0], "{user}, uid {uid}");
        assert!(
            !host
                .fake
                .root
                .join("etc/ld.so.preload")
                .try_exists()
                .unwrap()
                || !has_landlock
        );
        host.reset();
    }
}
