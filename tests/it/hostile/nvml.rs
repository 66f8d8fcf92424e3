//! A malicious management library: what a process "without capabilities" can still do as root.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::driver::FakeDriver;
use crate::support::{HOOK, run, run_with, scratch, source};

/// Ends the processes of this name, and returns their number.
fn end_named(name: &str) -> usize {
    let mut ended = 0;
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        // A process that has ended and was not waited for still has its name.
        if status.starts_with(&format!("Name:\t{name}\n")) && !status.contains("\nState:\tZ") {
            let pid = entry.file_name().to_str().unwrap().parse().unwrap();
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).ok();
            ended += 1;
        }
    }
    ended
}

pub(super) fn a_library_that_attacks() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let library = fake.root.join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.183.01");
    let naive = dir.path().join("naive");
    let compile = |probe: &str, to: &Path, flags: &[&str]| {
        let mut cc = Command::new("cc");
        run(cc.args(["-Wall", "-Werror", "-O1"]).args(flags).arg("-o").arg(to).arg(source(probe)).arg("-ldl")).ok();
    };
    let soname = "-Wl,-soname,libnvidia-ml.so.1";
    compile("tests/probes/hostile-nvml.c", &library, &["-shared", "-fPIC", soname]);
    compile("tests/probes/naive-nvml.c", &naive, &[]);
    let marker = format!("onh-{}", std::process::id());
    let write = |name: &str, text: &str, mode: u32| {
        std::fs::write(fake.root.join(name), text).unwrap();
        std::fs::set_permissions(fake.root.join(name), PermissionsExt::from_mode(mode)).unwrap();
    };
    write("marker", &marker, 0o644);
    write("etc/passwd", "root:x:0:0::/:/bin/sh\n", 0o644);
    write("shared", "", 0o666);

    let inside = Path::new("/").join(library.strip_prefix(&fake.root).unwrap());
    let told = run(Command::new(&naive).arg(&fake.root).arg(inside)).ok();
    assert!(told.starts_with("passwd=1 preload=1 shared=1 stop=1 left=1 landlock="), "{told}");
    assert_eq!(end_named(&marker), 1, "the naive program leaves a process behind");
    std::fs::remove_file(fake.root.join("etc/ld.so.preload")).unwrap();

    let has_landlock = !told.trim().ends_with("landlock=-1");
    let shared = u8::from(!has_landlock);
    let mut hook = Command::new(HOOK);
    hook.arg("--config").arg(&fake.config).arg("info").env_clear();
    let stderr = run_with(&mut hook, b"").failed(1);
    assert!(stderr.contains(&format!("passwd=0 preload=0 shared={shared} stop=0 left=1 ")), "{stderr}");
    assert!(stderr.contains("(ONH-018)"), "{stderr}");
    assert_eq!(end_named(&marker), 0, "a process of the library's is left");
    assert!(!fake.root.join("etc/ld.so.preload").try_exists().unwrap());

    // As root, if config.toml requests it: only the confinement remains.
    fake.configure("user = \"root:root\"");
    let mut hook = Command::new(HOOK);
    hook.arg("--config").arg(&fake.config).arg("info").env_clear();
    let stderr = run_with(&mut hook, b"").failed(1);
    let denied = format!("passwd={shared} preload={shared} shared={shared} ");
    assert!(stderr.contains(&denied), "{stderr}");
    assert_eq!(end_named(&marker), 0, "a process of the library's is left");
}
