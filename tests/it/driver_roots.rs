//! Drivers that are not at `/`, or not completely, as described in docs/hosts.md.

use std::path::Path;

use crate::driver::{ALL_GPUS, FakeDriver, NEEDS, Waiting};
use crate::support::{HOOK, Ran, scratch, shell, unshare};

tests! {
    NEEDS => library_dirs_of_the_administrator, programs_beside_the_libraries, nodes_and_proc_are_the_roots_or_the_hosts, dev_root;
}

/// Calls the hook for a new container on a host that this shell script prepared, and runs `nvidia-smi -L` in the container.
fn smi(fake: &FakeDriver, host: &str) -> (Ran, String) {
    let container = Waiting::debian(ALL_GPUS, "");
    // The hook finds the container's namespace by its process id, whatever its own namespace looks like.
    let mut hook = unshare(&format!(
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin; {host} exec \"$@\""
    ));
    hook.args([HOOK]);
    let ran = container.call(&mut hook, &fake.config);
    let listed = if ran.code == Some(0) {
        container.output("nvidia-smi -L")
    } else {
        String::new()
    };
    (ran, listed)
}

fn library_dirs_of_the_administrator() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let usual = fake.on_host("nvidia-smi -L");
    let root = fake.root.display();
    shell!(
        "cd '{root}'; mkdir -p opt/nvidia/lib64; mv usr/lib/x86_64-linux-gnu/lib* opt/nvidia/lib64; rm etc/ld.so.cache"
    );
    let (ran, _) = smi(&fake, "");
    let stderr = ran.failed(1);
    assert!(stderr.contains("(ONH-012)"), "{stderr}");
    fake.configure("[driver]\nlibrary-dirs = [\"/opt/nvidia/lib64\"]\n");
    let (ran, listed) = smi(&fake, "");
    ran.ok();
    assert_eq!(listed, usual);
}

/// On a machine with the driver in /usr/local/nvidia, the nvidia-smi in /usr/bin was a script that starts the one next to the libraries.
fn programs_beside_the_libraries() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let usual = fake.on_host("nvidia-smi -L");
    shell!(
        "cd '{root}'; mkdir -p usr/local/nvidia/lib64 usr/local/nvidia/bin; mv usr/lib/x86_64-linux-gnu/lib* usr/local/nvidia/lib64
         mv usr/bin/nvidia-smi usr/local/nvidia/bin
         printf '#!/bin/sh\nexec /usr/local/nvidia/bin/nvidia-smi \"$@\"\n' >usr/bin/nvidia-smi; chmod 755 usr/bin/nvidia-smi
         echo /usr/local/nvidia/lib64 >etc/ld.so.conf; /sbin/ldconfig -r .",
        root = fake.root.display()
    );
    let (ran, listed) = smi(&fake, "");
    ran.ok();
    assert_eq!(listed, usual);
}

/// Each object comes from the host if the driver root lacks it. NVML must then be asked outside of the driver root.
fn nodes_and_proc_are_the_roots_or_the_hosts() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let usual = fake.on_host("nvidia-smi -L");
    let kept = scratch();
    let (root, kept) = (fake.root.display(), kept.path().display());
    shell!(
        "mv '{root}/dev' '{kept}/dev'; mkdir '{root}/dev'; cp -a '{root}/proc' '{kept}/proc'; mknod '{kept}/dev/null' c 1 3"
    );
    let (ran, _) = smi(&fake, "mount -t tmpfs dev /dev; mknod /dev/null c 1 3;");
    let stderr = ran.failed(1);
    assert!(stderr.contains("(ONH-011)"), "{stderr}");

    let dev = format!("mount --bind '{kept}/dev' /dev; ");
    let (ran, listed) = smi(&fake, &dev);
    ran.ok();
    assert_eq!(listed, usual, "the host's nodes");

    // The proc of a kernel without the driver does not have such a directory.
    shell!("rm -r '{root}/proc/driver/nvidia'");
    let proc =
        format!("mount -t tmpfs proc /proc/driver; cp -a '{kept}/proc/driver/.' /proc/driver; ");
    let (ran, listed) = smi(&fake, &format!("{dev}{proc}"));
    ran.ok();
    assert_eq!(listed, usual, "the host's proc");
}

/// `dev-root` decides if both have nodes.
fn dev_root() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let usual = fake.on_host("nvidia-smi -L");
    let other = scratch();
    shell!(
        "cp -a '{root}/dev' '{other}/dev'; rm '{root}/dev/nvidia0'; mknod '{root}/dev/nvidia0' c 1 3",
        root = fake.root.display(),
        other = other.path().display()
    );
    let (ran, _) = smi(&fake, "");
    let stderr = ran.failed(1);
    assert!(stderr.contains("(ONH-022)"), "{stderr}");
    fake.configure(&format!(
        "[driver]\ndev-root = \"{}\"\n",
        Path::new(other.path()).display()
    ));
    let (ran, listed) = smi(&fake, "");
    ran.ok();
    assert_eq!(listed, usual);
}
