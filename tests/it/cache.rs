//! The cached inventory is used as long as its fingerprint matches. The fake NVML hangs, so a query fails.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use base::paths::HostPath;
use base::sys::file_id::FileId;
use base::sys::mount::statmount::{self, Id};
use base::tree::Tree;

use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::gpus;
use crate::support::{HOOK, Need, Ran, read, run, scratch, sh, shell, write_file};

tests! {
    NEEDS => a_cached_inventory_spares_nvml, what_changed_is_asked_for, a_failed_gpu_is_reported_again,
        a_gpu_that_hangs_stops_only_its_own_containers, doctor_and_info_invalidate_a_cached_inventory,
        a_doctor_without_an_answer_invalidates_it_too, mig_devices_are_kept_until_an_instance_is_created_again, a_hundred_at_once_ask_once,
        version_does_not_ask;
    JOURNAL => an_entry_of_procfs_that_was_created_again_is_another_one, a_replaced_image_is_noticed;
}

const JOURNAL: &[Need] = &[
    Need::Root,
    Need::Programs(&["losetup", "mkfs.ext4", "debugfs"]),
];

fn plan(fake: &FakeDriver) -> Ran {
    gpus::plan(fake, "all")
}

/// Returns whether NVML was asked, in which case there was no answer.
fn asks(fake: &FakeDriver) -> bool {
    let ran = plan(fake);
    match ran.code {
        Some(0) => assert!(ran.stdout.contains("GPU-51eed000-"), "{ran:?}"),
        _ => assert!(ran.stdout.contains("(ONH-016)"), "{ran:?}"),
    }
    ran.code != Some(0)
}

/// From now on, NVML does not answer.
fn hang(fake: &FakeDriver) {
    fake.configure("[oci-nvidia-hook]\nnvml-timeout = 1");
    fake.set_nvml(|old| old + "\ninit-hang\n");
}

/// Returns the file of the cached inventory.
pub fn kept(fake: &FakeDriver) -> PathBuf {
    let list = format!(
        "grep -l '{}' /run/oci-nvidia-hook/inventory-* | grep -v 'failed$'",
        fake.root.display()
    );
    let files = sh(&list).ok();
    assert_eq!(files.lines().count(), 1, "{files}");
    files.trim().into()
}

fn a_cached_inventory_spares_nvml() {
    let dir = scratch();
    let fake = FakeDriver::new(&["--gpus", "2"]);
    fake.run(&["prepare"]).ok();
    hang(&fake);
    assert!(!asks(&fake));
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::start(dir.path(), &image.rootfs, &["NVIDIA_VISIBLE_DEVICES=1"], "");
    container.hook(&fake.config).ok();
    assert_eq!(
        container.output("cd /dev; echo nvidia[0-9]*").trim(),
        "nvidia1"
    );
    // These commands must report the present state.
    assert!(fake.run(&["info"]).failed(1).contains("(ONH-016)"));
    let kept = kept(&fake);
    assert_eq!(
        kept.metadata().unwrap().permissions().mode() & 0o7777,
        0o600
    );
    write_file(&kept, "nonsense");
    assert!(asks(&fake), "a damaged file is not used");
}

/// The version of CUDA is known after NVML was asked, and as long as the answer is valid.
fn version_does_not_ask() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let program = concat!("oci-nvidia-hook ", env!("CARGO_PKG_VERSION"), "\n");
    let driver = format!("{program}NVIDIA driver 535.183.01\n");
    assert_eq!(fake.run(&["version"]).ok(), driver);
    fake.run(&["info"]).ok();
    hang(&fake);
    assert_eq!(fake.run(&["version"]).ok(), format!("{driver}CUDA 12.2\n"));
    write_file(kept(&fake), "nonsense");
    assert_eq!(fake.run(&["version"]).ok(), driver);
    fake.configure("nonsense");
    assert_eq!(fake.run(&["version"]).ok(), program);
    let without = scratch();
    let of = |words: &[&str]| run(Command::new(HOOK).args(words).env_clear()).ok();
    assert_eq!(of(&["--version"]), program);
    write_file(
        without.path().join("c.toml"),
        format!("[nvidia-container-cli]\nroot = {:?}\n", without.path()),
    );
    let config = without.path().join("c.toml");
    assert_eq!(
        of(&["--config", config.to_str().unwrap(), "version"]),
        format!("{program}NVIDIA driver not found\n")
    );
}

fn what_changed_is_asked_for() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    plan(&fake).ok();
    hang(&fake);
    let root = fake.root.display();
    let gpu = format!("{root}/proc/driver/nvidia/gpus/0000:02:00.0");
    let pci = format!("{root}/sys/bus/pci/devices/0000:02:00.0");
    for (what, change, back) in rows! {
        "a GPU is gone", format!("mv '{gpu}' '{root}/gpu'"), format!("mv '{root}/gpu' '{gpu}'");
        "another GPU at the same place", format!("cp '{gpu}/information' '{root}/old'; sed -i s/51eed001/51eed009/ '{gpu}/information'"),
            format!("mv '{root}/old' '{gpu}/information'");
        "a module that was just loaded",
            format!("cp '{gpu}/information' '{root}/old'; sed -i '/^GPU UUID/s/GPU-.*/GPU-????????-/' '{gpu}/information'"),
            format!("mv '{root}/old' '{gpu}/information'");
        "numbered anew", format!("cp '{gpu}/information' '{root}/old'; sed -i '/^Device Minor/s/1/2/' '{gpu}/information'"),
            format!("mv '{root}/old' '{gpu}/information'");
        "a GPU more", format!("cp -r '{gpu}' '{root}/proc/driver/nvidia/gpus/0000:09:00.0'"),
            format!("rm -r '{root}/proc/driver/nvidia/gpus/0000:09:00.0'");
        "off the bus", format!("cp '{pci}/config' '{root}/old'; printf '\\377\\377\\377\\377' >'{pci}/config'"),
            format!("mv '{root}/old' '{pci}/config'");
        "off the bus for good", format!("mv '{pci}' '{root}/old'"), format!("mv '{root}/old' '{pci}'");
        "a node that NVML cannot open", format!("chmod 0600 '{root}/dev/nvidia1'"), format!("chmod 0666 '{root}/dev/nvidia1'");
        "a node of others", format!("chown 7 '{root}/dev/nvidiactl'"), format!("chown 0 '{root}/dev/nvidiactl'");
        "the node of another GPU", format!("mv '{root}/dev/nvidia1' '{root}/old'; mknod -m 666 '{root}/dev/nvidia1' c 195 0"),
            format!("mv '{root}/old' '{root}/dev/nvidia1'");
        "a MIG device", format!("mkdir -p '{root}/proc/driver/nvidia/capabilities/gpu1/mig/gi1'"),
            format!("rmdir '{root}/proc/driver/nvidia/capabilities/gpu1/mig/gi1'");
        "another identity", format!("cp '{0}' '{root}/old'; sed -i '1auser = \"0:1\"' '{0}'", fake.config.display()),
            format!("mv '{root}/old' '{}'", fake.config.display());
    } {
        sh(&change).ok();
        assert!(asks(&fake), "{what}");
        sh(&back).ok();
        assert!(!asks(&fake), "back again: {what}");
    }
    shell!("touch '{root}'/usr/lib/*/libnvidia-ml.so.*.*");
    assert!(asks(&fake), "another library");
    shell!("sed -i s/535.183.01/570.86.15/ '{root}/proc/driver/nvidia/version'");
    // The library then has another version.
    assert!(plan(&fake).failed(1).is_empty());
}

fn a_failed_gpu_is_reported_again() {
    let fake = FakeDriver::new(&["--gpus", "3"]);
    fake.set_nvml(|old| old.replace("gpu minor=1 ", "gpu minor=1 fail=15 "));
    for _ in 0..3 {
        let shown = plan(&fake).ok();
        assert!(
            shown.contains("GPU 1: nvml") && shown.matches("(UUID: GPU-").count() == 2,
            "{shown}"
        );
    }
    fake.set_nvml(|old| old.replace(" fail=15", ""));
    let shown = plan(&fake).ok();
    assert!(
        !shown.contains("GPU 1: nvml") && shown.matches("(UUID: GPU-").count() == 3,
        "at once: {shown}"
    );
    // A missing node is another failure, also of a GPU that worked before.
    fs::remove_file(fake.root.join("dev/nvidia2")).unwrap();
    assert!(plan(&fake).failed(1).is_empty());
}

/// One query never returns, and one ends the process: the other GPUs work, and the message names the failed one.
fn a_gpu_that_hangs_stops_only_its_own_containers() {
    let ask = |fake: &FakeDriver, devices: &str| {
        let start = Instant::now();
        (gpus::plan(fake, devices), start.elapsed())
    };
    for (fault, says) in [
        ("hang", "does not answer queries about it"),
        ("crash", "(SIGABRT)"),
    ] {
        let fake = FakeDriver::new(&["--gpus", "3"]);
        fake.configure("[oci-nvidia-hook]\nnvml-timeout = 8");
        fake.set_nvml(|old| old.replace("gpu minor=1 ", &format!("gpu minor=1 {fault}=handle ")));
        let (all, took) = ask(&fake, "all");
        let shown = all.ok();
        assert!(
            shown.contains("GPU 1: NVML ") && shown.contains(says) && shown.contains("ONH-201"),
            "{fault}: {shown}"
        );
        assert_eq!(shown.matches("(UUID: GPU-").count(), 2, "{fault}: {shown}");
        assert!(
            took.as_secs() < 8,
            "{fault}: the deadline holds for all of it: {took:?}"
        );
        // Whether or not the library hangs, the answer is cached for a minute.
        fake.set_nvml(|old| old + "\ninit-hang\n");
        assert!(ask(&fake, "0").0.ok().contains("GPU-51eed000-"), "{fault}");
        for name in ["1", "GPU-51eed001-0001-4001-8000-0000fa4e0001"] {
            let refused = ask(&fake, name).0;
            assert!(
                refused.code == Some(1) && refused.stdout.contains("ONH-033"),
                "{fault}: {refused:?}"
            );
            assert!(refused.stdout.contains(says), "{fault}: {refused:?}");
        }
    }
}

/// A GPU that breaks in a way that the kernel does not show stays in the cached inventory until NVML is asked again.
fn doctor_and_info_invalidate_a_cached_inventory() {
    for command_of in ["doctor", "info"] {
        let fake = FakeDriver::new(&["--gpus", "2"]);
        plan(&fake).ok();
        fake.set_nvml(|old| old.replace("gpu minor=1 ", "gpu minor=1 fail=15 "));
        let shown = plan(&fake).ok();
        assert!(
            shown.matches("(UUID: GPU-").count() == 2 && !shown.contains("ONH-201"),
            "kept: {shown}"
        );
        let ran = fake.run(&[command_of]);
        assert!(ran.stdout.contains("GPU 1: nvml"), "{ran:?}");
        let shown = plan(&fake).ok();
        assert!(
            shown.matches("(UUID: GPU-").count() == 1 && shown.contains("ONH-201"),
            "{command_of}: {shown}"
        );
        // The kernel does not show MIG mode without instances.
        let fake = FakeDriver::new(&["--gpus", "2"]);
        plan(&fake).ok();
        fake.set_nvml(|old| old.replace("gpu minor=1 ", "gpu minor=1 mig "));
        assert!(!plan(&fake).ok().contains("ONH-230"), "{command_of}");
        fake.run(&[command_of]);
        assert!(plan(&fake).ok().contains("ONH-230"), "{command_of}");
    }
}

/// If NVML fails as a whole, the cache is removed too: the earlier answer may no longer be true. A doctor that lacks a permission
/// has not learned anything about the GPUs.
fn a_doctor_without_an_answer_invalidates_it_too() {
    for (fault, is_ended) in [
        ("init-hang", true),
        ("init-crash", true),
        ("init-error 999", true),
        ("init-error 4", false),
    ] {
        let fake = FakeDriver::new(&["--gpus", "2"]);
        plan(&fake).ok();
        // Only now: on a busy machine, a driver that works can take longer.
        fake.configure("[oci-nvidia-hook]\nnvml-timeout = 1");
        fake.set_nvml(|old| format!("{old}\n{fault}\n"));
        assert_eq!(
            plan(&fake).ok().matches("(UUID: GPU-").count(),
            2,
            "{fault}: it is kept"
        );
        assert_eq!(fake.run(&["doctor"]).code, Some(3), "{fault}");
        assert_eq!(plan(&fake).code == Some(0), !is_ended, "{fault}");
    }
    let fake = FakeDriver::new(&["--gpus", "2"]);
    plan(&fake).ok();
    hang(&fake);
    let mut doctor = Command::new("setpriv");
    doctor
        .args([
            "--bounding-set",
            "-sys_chroot",
            "--inh-caps",
            "-sys_chroot",
            HOOK,
            "--config",
        ])
        .arg(&fake.config);
    let ran = run(doctor.arg("doctor"));
    assert!(ran.stdout.contains("(ONH-020)"), "{ran:?}");
    assert!(
        !asks(&fake),
        "root without permission to change its root directory"
    );
    fake.run(&["doctor"]);
    assert!(asks(&fake), "root");
}

/// The directories of MIG instances are entries of procfs, like the directories of the journals of ext4: the kernel creates and removes both with
/// `proc_mkdir` and `remove_proc_entry`.
fn an_entry_of_procfs_that_was_created_again_is_another_one() {
    let dir = scratch();
    let (image, mount) = (dir.path().join("image"), dir.path().join("mount"));
    let proc = dir.path().join("proc");
    fs::create_dir(&mount).unwrap();
    fs::create_dir(&proc).unwrap();
    let (image, mount) = (image.display(), mount.display());
    shell!("truncate -s 16M '{image}' && mkfs.ext4 -q '{image}'");
    let losetup = sh(&format!("losetup --find --show '{image}'"));
    let device = losetup.ok().trim().to_owned();
    let journal = format!("{}-8", device.trim_start_matches("/dev/"));
    let entry = |root: &Path| {
        let root = Tree::open(&HostPath::new(root)).unwrap();
        let entries = root.entries(Path::new("/fs/jbd2"), "");
        let of_journal = entries.iter().find(|(name, _)| *name == *journal);
        FileId::from(of_journal.unwrap().1.as_ref().unwrap())
    };
    let host = Path::new("/proc");
    let attach = || shell!("mount {device} '{mount}'");
    let detach = || shell!("umount '{mount}'");
    let mut seen = Vec::new();
    for _ in 0..20 {
        attach();
        let found = entry(host);
        assert_eq!(found, entry(host), "the same entry");
        assert!(!seen.contains(&found), "{found:?}");
        seen.push(found);
        detach();
    }
    let inodes: BTreeSet<u64> = seen.iter().map(|entry| entry.inode.number).collect();
    // If this ever changes, the number would suffice.
    assert!(inodes.len() < seen.len(), "procfs gives out numbers again");
    attach();
    let before = entry(host);
    let another = format!("mount -t proc proc '{}'", proc.display());
    sh(&another).ok();
    assert_ne!(before, entry(&proc), "in another mount, NVML is asked");
    shell!("umount '{}'", proc.display());
    detach();
    shell!("losetup --detach {device}");
}

/// A mount whose image is replaced by another one of the same size. A directory has the same device, number, size and times as before, and on
/// kernels before 6.8 also the same id of the mount. The stored locations of driver files are based on such directories.
fn a_replaced_image_is_noticed() {
    let dir = scratch();
    let top = dir.path().display();
    shell!(
        "cd '{top}'; mkdir -p content/usr/lib content/lib image mount more
         touch content/usr/lib/libcuda.so.1 content/lib/libcuda.so.1
         truncate -s 16M first; mkfs.ext4 -q -d content first; cp first second; cp first disk
         debugfs -w -R 'unlink /usr/lib/libcuda.so.1' second
         debugfs -w -R 'unlink /lib/libcuda.so.1' second"
    );
    let device = sh(&format!("cd '{top}'; losetup --find --show disk"));
    let device = device.ok().trim().to_owned();
    for (way, mount) in rows! {
        "an image", format!("mount -o ro {device} mount");
        "a directory of an image", format!("mount -o ro {device} image; mount --bind image/usr mount");
        "a layer, as systemd-sysext mounts images",
            format!("mount -o ro {device} image; mount -t overlay -o lowerdir=image/usr:more overlay mount");
    } {
        let show = |image: &str| {
            let write = format!("dd if={image} of={device} bs=1M conv=fsync status=none");
            shell!("cd '{top}'; {write}; {mount}");
            let lib = rustix::fs::stat(dir.path().join("mount/lib")).unwrap();
            FileId::from(&lib)
        };
        let hide = || shell!("cd '{top}'; umount mount; ! mountpoint -q image || umount image");
        let tree = Tree::open(&HostPath::new(dir.path())).unwrap();
        let first = show("first");
        let is_new = matches!(
            statmount::id(fs::File::open(dir.path().join("mount")).unwrap()),
            Ok(Id::Unique(_))
        );
        let basis = {
            let tree = tree.recording();
            let library = tree.regular_file(Path::new("/mount/lib/libcuda.so.1"));
            assert!(library.unwrap().is_some(), "{way}");
            tree.basis(SystemTime::now() + Duration::from_secs(5))
        };
        assert_eq!(basis.is_some(), is_new, "{way}");
        let is_unchanged = || {
            basis
                .as_ref()
                .is_some_and(|basis| basis.is_unchanged(&tree))
        };
        assert_eq!(is_unchanged(), is_new, "{way}");
        hide();
        let second = show("second");
        // Another overlay can have taken the number of its device.
        assert_eq!(
            (first.inode.number, first.changed),
            (second.inode.number, second.changed),
            "{way}"
        );
        assert!(way.starts_with("a layer") || first == second, "{way}");
        assert!(!is_unchanged(), "{way}");
        hide();
    }
    shell!("losetup --detach {device}");
}

/// The fake NVML gives the same instances another UUID, as the real one does if they have another engine.
fn mig_devices_are_kept_until_an_instance_is_created_again() {
    let fake = FakeDriver::new(&["--gpus", "2", "--mig"]);
    let (first, second) = ("MIG-51eed000-0001", "MIG-51eed000-0009");
    assert!(plan(&fake).ok().contains(first));
    // The instances were created just now, so the first answer is not kept.
    std::thread::sleep(Duration::from_secs(3));
    assert!(plan(&fake).ok().contains(first));
    fake.set_nvml(|old| old.replace(first, second));
    assert!(plan(&fake).ok().contains(first), "NVML is not asked");
    let mig = fake.root.join("proc/driver/nvidia/capabilities/gpu0/mig");
    let again = "for gi in gi*; do cp -r $gi new; rm -r $gi; mv new $gi; done";
    shell!("cd '{}'; {again}", mig.display());
    assert!(plan(&fake).ok().contains(second));
    // The nodes decide which MIG devices NVML lists.
    std::thread::sleep(Duration::from_secs(3));
    plan(&fake).ok();
    hang(&fake);
    assert!(!asks(&fake));
    let nodes = fake.root.join("dev/nvidia-caps");
    shell!("chmod 0400 '{}'/*", nodes.display());
    assert!(asks(&fake));
}

fn a_hundred_at_once_ask_once() {
    let fake = FakeDriver::new(&["--gpus", "8"]);
    fake.set_nvml(|old| old + "\ninit-delay-ms 1000\n");
    let spec = fake.root.with_file_name("spec");
    write_file(
        &spec,
        r#"{"root":{"path":"/nowhere"},"process":{"env":["NVIDIA_VISIBLE_DEVICES=all"]}}"#,
    );
    let start = Instant::now();
    let start_one = |_| {
        let mut command = fake.command();
        command.args(["plan", "-", "--json"]).env_clear();
        command
            .stdin(fs::File::open(&spec).unwrap())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    let started: Vec<_> = (0..100).map(start_one).collect();
    for hook in started {
        let shown = Ran::from(hook.wait_with_output().unwrap()).ok();
        assert_eq!(shown.matches("\"GPU-51eed").count(), 8, "{shown}");
    }
    // Each answer has a number.
    let text = read(kept(&fake));
    assert!(text.contains("{\"number\":1,"), "{text}");
    assert!(start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
    assert!(
        Path::new("/run/oci-nvidia-hook")
            .metadata()
            .unwrap()
            .permissions()
            .mode()
            & 0o7777
            == 0o700
    );
}
