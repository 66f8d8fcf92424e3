//! The program called as `nvidia-container-cli`. Its output is compared with files that were written by hand from the documented
//! format: `tests/fixtures/nvidia-cli`.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::json_schema;
use crate::support::{
    HOOK, Need, Ran, assert_lacks, assert_says, copy_nvml_program, read, run, scratch, sh, shell,
    source, write_file, write_program,
};

const HOST: &[Need] = &[Need::Root, Need::Programs(&["cc", "setpriv"])];
const RUNC: &[Need] = &[Need::Root, Need::Programs(&["cc", "runc"]), Need::CgroupV1];

const TERMINAL: &[Need] = &[Need::Root, Need::Programs(&["cc", "script"])];

tests! {
    HOST => info_as_documented, list_as_documented, list_of_a_mig_host, list_prints_kinds,
        list_names_what_it_does_not_know, a_broken_gpu, a_plain_user, modules_first, errors;
    TERMINAL => a_terminal_as_the_log;
    &[] => the_version;
    NEEDS => configure_by_pid, configure_as_lxc_does, configure_as_enroot_does, configure_obeys;
    RUNC => configure_gives_access;
}

/// Returns the program under this name, in `dir`.
pub fn link(dir: &Path, name: &str) -> PathBuf {
    let link = dir.join(name);
    symlink(HOOK, &link).unwrap();
    link
}

/// Returns `nvidia-container-cli --root ROOT ARGUMENTS`, with an environment that must have no effect.
fn cli(root: &Path, arguments: &[&str]) -> Ran {
    let dir = scratch();
    let mut cli = Command::new(link(dir.path(), "nvidia-container-cli"));
    run(cli
        .arg("--root")
        .arg(root)
        .args(arguments)
        .env_clear()
        .env("NVIDIA_VISIBLE_DEVICES", "void"))
}

fn golden(name: &str) -> String {
    read(source("tests/fixtures/nvidia-cli").join(name))
}

/// A host with an object of each kind.
fn host() -> FakeDriver {
    let fake = FakeDriver::new(&["--gpus", "2", "--layout", "lib64", "--drm"]);
    let (root, version) = (fake.root.display(), "535.183.01");
    for (name, soname) in [
        ("libcuda", "libcuda.so.1"),
        ("libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1"),
    ] {
        let library = fake.root.join(format!("usr/lib/{name}.so.{version}"));
        std::fs::create_dir_all(library.parent().unwrap()).unwrap();
        std::fs::copy(crate::hosts::stub(soname, true), library).unwrap();
    }
    shell!(
        "cd '{root}'; echo /usr/lib >>etc/ld.so.conf; /sbin/ldconfig -r .; \
         mkdir -p opt/nvidia etc/alternatives run/nvidia-persistenced run/nvidia-fabricmanager tmp/nvidia-mps var; \
         mv usr/bin/nvidia-smi opt/nvidia; ln -s /opt/nvidia/nvidia-smi etc/alternatives/nvidia-smi; \
         ln -s /etc/alternatives/nvidia-smi usr/bin/nvidia-smi; ln -s ../run var/run; \
         mkdir -p lib/firmware/nvidia/{version} usr/share/glvnd/egl_vendor.d; \
         touch lib/firmware/nvidia/{version}/gsp_ga10x.bin lib/firmware/nvidia/{version}/gsp_tu10x.bin \
           usr/share/glvnd/egl_vendor.d/10_nvidia.json"
    );
    for daemon in ["persistenced", "fabricmanager"] {
        let path = fake.root.join(format!("run/nvidia-{daemon}/socket"));
        let kind = rustix::fs::FileType::Socket;
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path,
            kind,
            rustix::fs::Mode::from_raw_mode(0o666),
            0,
        )
        .unwrap();
    }
    fake
}

fn info_as_documented() {
    let fake = FakeDriver::shared();
    assert_eq!(cli(&fake.root, &["info"]).ok(), golden("info"));
    assert_eq!(cli(&fake.root, &["info", "--csv"]).ok(), golden("info.csv"));
    // It does not contain MIG devices.
    let mig = FakeDriver::new(&["--gpus", "2", "--mig"]);
    assert_eq!(cli(&mig.root, &["info"]).ok(), golden("info"));
    // With its own name, the program prints a table.
    let table = |fake: &FakeDriver| {
        run(Command::new(HOOK)
            .args(["info", "--root"])
            .arg(&fake.root)
            .env_clear())
        .ok()
    };
    assert_eq!(table(fake), golden("table"));
    assert_eq!(table(&mig), golden("table-mig"));
    // Without a GPU, there is still a driver.
    let none = FakeDriver::new(&["--gpus", "0"]);
    assert_eq!(
        cli(&none.root, &["info"]).ok().lines().collect::<Vec<_>>(),
        &golden("info").lines().collect::<Vec<_>>()[..2]
    );
    assert_eq!(table(&none), "Driver 535.183.01, CUDA 12.2\nno GPUs\n");
}

fn list_as_documented() {
    let fake = host();
    let list = |options: &[&str]| {
        let arguments: Vec<_> = ["list"]
            .into_iter()
            .chain(options.iter().copied())
            .collect();
        let ran = cli(&fake.root, &arguments);
        assert_eq!(ran.stderr, "");
        ran.ok()
    };
    assert_eq!(
        list(&["--device", "all", "--libraries"]),
        golden("devices-libraries")
    );
    let everything = golden("everything");
    assert_eq!(list(&[]), everything);
    let kept = |drop: &[&str]| -> String {
        let lines = everything
            .lines()
            .filter(|line| !drop.iter().any(|part| line.contains(part)));
        lines.map(|line| format!("{line}\n")).collect()
    };
    // Each option alone, in its long and its short form.
    for (long, short, keep) in [
        ("--binaries", "-b", &["/bin/", "/opt/"][..]),
        ("--libraries", "-l", &["/lib64/"]),
        ("--ipcs", "-i", &["/run/", "/tmp/"]),
        ("--firmwares", "-f", &["/firmware/"]),
        ("--compat32", "--compat32", &["/usr/lib/"]),
        ("--device=1", "-d1", &["ctl", "uvm", "modeset", "nvidia1"]),
    ] {
        let lines = everything
            .lines()
            .filter(|line| keep.iter().any(|part| line.contains(part)));
        let lines: String = lines.map(|line| format!("{line}\n")).collect();
        assert_eq!(list(&[long]), lines, "{long}");
        assert_eq!(list(&[short]), lines, "{short}");
    }
    // Several options select the union, and the order stays the same.
    assert_eq!(
        list(&["-f", "-i", "-b", "--compat32", "-l", "-d", "1,0"]),
        everything
    );
    assert_eq!(
        list(&[
            "--device",
            "GPU-51eed001-0001-4001-8000-0000fa4e0001",
            "-d",
            "0000:01:00.0"
        ]),
        kept(&["/usr/", "/opt", "/run", "/tmp", "/lib"])
    );
    assert_eq!(
        list(&["--no-persistenced"]),
        kept(&["/run/nvidia-persistenced"])
    );
    assert_eq!(list(&["--no-fabricmanager"]), kept(&["fabricmanager"]));
    assert_eq!(list(&["--no-gsp-firmware"]), kept(&["/firmware/"]));
    // Driver root and linker cache come from the command line; no device was requested, so the driver is not asked.
    fake.set_nvml(|old| old + "\ninit-error 9\n");
    assert!(list(&["--binaries"]).starts_with("/opt/nvidia/nvidia-smi\n"));
    let stderr = cli(&fake.root, &["list"]).failed(1);
    assert!(stderr.starts_with("oci-nvidia-hook: "), "{stderr}");
}

fn list_of_a_mig_host() {
    let fake = FakeDriver::new(&["--gpus", "2", "--mig"]);
    let list = |options: &[&str]| {
        let arguments: Vec<_> = ["list"]
            .into_iter()
            .chain(options.iter().copied())
            .collect();
        cli(&fake.root, &arguments).ok()
    };
    assert_eq!(
        list(&["--device", "all", "--imex-channel=3,2047"]),
        golden("mig-devices")
    );
    // A channel does not exclude other entries.
    assert!(list(&["--imex-channel=3"]).contains("channel3\n/usr/bin/nvidia-smi\n"));
    // One MIG device, and its GPU.
    let one: Vec<_> = golden("mig-devices").lines().map(str::to_owned).collect();
    let expected: Vec<_> = one[..5].iter().chain(&one[10..14]).cloned().collect();
    assert_eq!(list(&["-d", "0:1"]).lines().collect::<Vec<_>>(), expected);
    assert_eq!(
        list(&["-d", "MIG-51eed000-0002-4000-8000-0000fa4e0002"])
            .lines()
            .collect::<Vec<_>>(),
        expected
    );
    // Permission to configure MIG devices includes all nodes that could exist: 15 GPU instances with 8 compute instances each.
    for (option, name, minor) in [
        ("--mig-config=all", "config", 1),
        ("--mig-monitor=all", "monitor", 2),
    ] {
        let management: Vec<_> = [
            format!("/proc/driver/nvidia/capabilities/mig/{name}"),
            format!("/dev/nvidia-caps/nvidia-cap{minor}"),
            "/proc/driver/nvidia/capabilities/gpu0".to_owned(),
            "/dev/nvidia-caps".to_owned(),
        ]
        .into_iter()
        .chain((3..138).map(|minor| format!("/dev/nvidia-caps/nvidia-cap{minor}")))
        .collect();
        let expected: Vec<_> = one[..6].iter().chain(&management).cloned().collect();
        assert_eq!(
            list(&["--device=all", option]).lines().collect::<Vec<_>>(),
            expected
        );
    }
    let stderr = cli(&fake.root, &["list", "-d", "0:1", "--mig-config=all"]).failed(1);
    assert_says(&stderr, &["cannot be combined with selected MIG devices"]);
}

/// Libraries of a driver that is newer than this program, of both architectures, are listed and reported.
fn list_names_what_it_does_not_know() {
    let fake = host();
    let root = fake.root.display();
    shell!(
        "cd '{root}'; for dir in usr/lib usr/lib64; do cp $dir/libcuda.so.535.183.01 $dir/libnvidia-later.so.535.183.01; done"
    );
    let ours = |options: &[&str]| {
        let mut files = Command::new(HOOK);
        run(files
            .arg("files")
            .args(options)
            .arg("--root")
            .arg(&fake.root)
            .env_clear())
    };
    let note = "oci-nvidia-hook: note: libraries of the driver are not in the catalog: \
                \"libnvidia-later.so.535.183.01\" (ONH-225)\nhint: ";
    for options in [&[][..], &["--libraries"], &["--compat32"]] {
        let ran = ours(options);
        assert!(
            ran.code == Some(0) && ran.stderr.starts_with(note),
            "{options:?}: {ran:?}"
        );
        assert!(
            ran.stdout.lines().all(|line| line.starts_with('/')),
            "{ran:?}"
        );
        assert_says(&ran.stdout, &["/libnvidia-later.so.535.183.01\n"]);
    }
    assert_eq!(ours(&["--binaries"]).stderr, "", "no libraries are listed");
    let items = json_schema::part("files", &ours(&["--json"]).stdout, "files");
    let marked: Vec<_> = items
        .iter()
        .filter(|item| item["cataloged"] == false)
        .collect();
    let paths: Vec<_> = marked
        .iter()
        .map(|item| (item["path"].as_str().unwrap(), &item["kind"]))
        .collect();
    let (native, other) = (&"library".into(), &"library-32".into());
    assert_eq!(
        paths,
        [
            ("/usr/lib64/libnvidia-later.so.535.183.01", native),
            ("/usr/lib/libnvidia-later.so.535.183.01", other)
        ]
    );
    // Programs that read the output of the original expect nothing more.
    let theirs = cli(&fake.root, &["list"]);
    assert!(
        theirs.stdout.contains("libnvidia-later") && theirs.stderr.is_empty(),
        "{theirs:?}"
    );
}

/// Our additions: the kind of each entry, and kinds that the original does not know.
fn list_prints_kinds() {
    let fake = host();
    let mut ours = Command::new(HOOK);
    let text = run(ours
        .args(["files", "--json", "--root"])
        .arg(&fake.root)
        .env_clear())
    .ok();
    let items = json_schema::part("files", &text, "files");
    let path = |item: &serde_json::Value| item["path"].as_str().unwrap().to_owned();
    let is_ours =
        |item: &&serde_json::Value| item["kind"] == "description" || item["kind"] == "drm-device";
    let (more, same): (Vec<_>, Vec<_>) = items.iter().partition(is_ours);
    let same: String = same.into_iter().map(|item| path(item) + "\n").collect();
    assert_eq!(same, golden("everything"));
    let more: Vec<_> = more.into_iter().map(path).collect();
    assert!(
        more.contains(&"/usr/share/glvnd/egl_vendor.d/10_nvidia.json".to_owned()),
        "{more:?}"
    );
    assert!(more.contains(&"/dev/dri/renderD129".to_owned()), "{more:?}");
    for (of, kind) in [
        ("/dev/nvidia0", "device"),
        ("/opt/nvidia/nvidia-smi", "binary"),
        ("/usr/lib64/libcuda.so.535.183.01", "library"),
        ("/usr/lib/libcuda.so.535.183.01", "library-32"),
        ("/tmp/nvidia-mps", "ipc"),
        ("/lib/firmware/nvidia/535.183.01/gsp_ga10x.bin", "firmware"),
    ] {
        let item = items.iter().find(|item| path(item) == of).unwrap();
        assert_eq!(item["kind"], kind);
        assert_eq!(
            item["source"],
            format!("{}{of}", fake.root.display()),
            "on the host"
        );
    }
}

/// The other GPUs are listed, and the problem is reported.
fn a_broken_gpu() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    fake.set_nvml(|old| old.replacen("\ngpu minor=1", "\ngpu fail=15 minor=1", 1));
    let labels = cli(&fake.root, &["info"]).ok();
    let csv = cli(&fake.root, &["info", "--csv"]);
    assert_says(&labels, &["Device Index:   0\n"]);
    assert_lacks(&labels, &["Device Index:   1\n"]);
    assert!(labels.contains("\nNot usable:"), "{labels}");
    assert_says(&csv.stderr, &["warning: ", "ONH-217"]);
    assert_eq!(csv.ok().lines().count(), 5);
}

/// On a host with an installed driver, as the user who is logged in.
fn a_plain_user() {
    let (dir, fake) = (
        scratch(),
        FakeDriver::new(&["--gpus", "2", "--layout", "lib64"]),
    );
    let image = Image::new(dir.path(), &["--layout", "lib64"]);
    std::fs::copy(HOOK, fake.root.join("usr/bin/nvidia-container-cli")).unwrap();
    copy_nvml_program(&fake.root.join("usr/bin"));
    shell!(
        "mknod -m 666 '{}' c 1 3",
        fake.root.join("dev/null").display()
    );
    let host = dir.path().join("host");
    std::fs::create_dir(&host).unwrap();
    let as_user = |arguments: &str| {
        sh(&format!(
            "exec unshare -m sh -euc \"mount -t overlay -o 'lowerdir={root}:{image}' overlay '{host}'; mount -t proc proc '{host}/proc'; mount --bind '{root}/proc/driver' '{host}/proc/driver'; \
             exec chroot --userspec=65534:65534 --groups= '{host}' /usr/bin/nvidia-container-cli {arguments}\"",
            root = fake.root.display(),
            image = image.rootfs.display(),
            host = host.display(),
        ))
    };
    assert_eq!(as_user("info").ok(), golden("info"));
    assert!(
        as_user("-k --user list")
            .ok()
            .starts_with("/dev/nvidiactl\n")
    );
    // The process lacks the permissions for entering a container.
    let stderr = as_user("configure --device=0 --pid=1 /x").failed(1);
    assert_says(&stderr, &["cannot open the container of process 1"]);
}

/// `-k`: as root, nodes are created before the driver is asked.
fn modules_first() {
    let fake = FakeDriver::new(&["--gpus", "2", "--no-dev"]);
    write_file(
        fake.root.join("proc/devices"),
        "Character devices:\n195 nvidia\n511 nvidia-uvm\n",
    );
    let list = ["list", "--device", "all"];
    assert!(cli(&fake.root, &list).failed(1).contains("nvidia"));
    let said = cli(
        &fake.root,
        &["-k", "--debug=/dev/stderr", "list", "--device", "all"],
    );
    assert_says(&said.stderr, &["note: made /dev/nvidia0"]);
    assert!(said.ok().contains("/dev/nvidia1\n"));
    cli(&fake.root, &list).ok();
}

/// NVIDIA's issue template has this command.
fn a_terminal_as_the_log() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1", "--no-dev"]));
    write_file(
        fake.root.join("proc/devices"),
        "Character devices:\n195 nvidia\n511 nvidia-uvm\n",
    );
    let cli = link(dir.path(), "nvidia-container-cli");
    let command = format!(
        "'{}' --root '{}' -k -d /dev/tty info",
        cli.display(),
        fake.root.display()
    );
    let shown = run(Command::new("script").args(["-qec", &command, "/dev/null"])).ok();
    assert_says(&shown, &["made /dev/nvidia0", "note: NVRM version:"]);
    assert_lacks(&shown, &["ONH-102"]);
    // Without a terminal, the command works all the same.
    let ran = run(Command::new("setsid").args(["--wait", "sh", "-c", &command]));
    assert!(ran.stderr.contains("(ONH-102)"), "{ran:?}");
    ran.ok();
}

fn the_version() {
    let text = cli(Path::new("/nowhere"), &["--version"]).ok();
    let labels: Vec<_> = text
        .lines()
        .map(|line| line.split_once(": ").unwrap().0)
        .collect();
    let documented = [
        "cli-version",
        "lib-version",
        "build date",
        "build revision",
        "build compiler",
        "build platform",
        "build flags",
    ];
    assert_eq!(labels, documented);
    assert!(
        text.starts_with(&format!("cli-version: {}\n", env!("CARGO_PKG_VERSION"))),
        "{text}"
    );
    assert_eq!(cli(Path::new("/nowhere"), &["-V"]).ok(), text);
    for help in ["-?", "--help", "--usage"] {
        assert!(
            cli(Path::new("/nowhere"), &[help])
                .ok()
                .contains("configure")
        );
    }
    let dir = scratch();
    let mut cli = Command::new(link(dir.path(), "nvidia-container-cli"));
    assert!(
        run(cli.args(["configure", "--help"]))
            .ok()
            .contains("--cuda-compat-mode <MODE>")
    );
}

/// One line and a hint, and exit status 1, also for an invalid command line.
fn errors() {
    let fake = FakeDriver::shared();
    for (arguments, says) in [
        (&["list", "--device", "9"][..], "\"9\""),
        (&["list", "--device", "none"], "\"none\""),
        (&["list", "--imex-channel", "1048576"], "\"1048576\""),
        (&["configure", "rootfs"], "\"rootfs\""),
        (&["configure", "/"], "\"/\""),
        (&["configure", "--pid=4194304", "/x"], "4194304"),
        (&["configure", "--device=7", "--pid=1", "/x"], "\"7\""),
        (
            &["configure", "--require=cuda>=99", "--pid=1", "/x"],
            "cuda>=99",
        ),
        (&["--user=nobody-here", "info"], "\"nobody-here\""),
    ] {
        let stderr = cli(&fake.root, arguments).failed(1);
        assert!(
            stderr.contains(says) && stderr.lines().count() == 2,
            "{arguments:?}: {stderr}"
        );
        assert!(
            stderr.starts_with("oci-nvidia-hook: ") && stderr.contains("\nhint: "),
            "{stderr}"
        );
    }
}

const SEES_GPU_1: &str = "nvidia-smi -L; probe-dlopen libcuda.so.1 && test ! -e /dev/nvidia0";

/// "Supervised": the caller is outside, and names the container's first process.
fn configure_by_pid() {
    let fake = FakeDriver::shared();
    let container = Waiting::debian(&[], crate::driver::MASKABLE_PROC);
    let (pid, rootfs) = (
        format!("--pid={}", container.pid()),
        container.rootfs.to_str().unwrap(),
    );
    let arguments = [
        "--user=root:video",
        "--no-pivot",
        "configure",
        "--ldconfig=@/sbin/ldconfig",
        "--cuda-compat-mode=ldconfig",
        "--no-cgroups",
        "--device=1",
        "--compute",
        "--utility",
        "--require=cuda>=11.0 brand=tesla,driver>=470",
        &pid,
        rootfs,
    ];
    let ran = cli(&fake.root, &arguments);
    assert_eq!(
        (ran.stdout.as_str(), ran.stderr.as_str(), ran.code),
        ("", "", Some(0))
    );
    let seen = container.output(SEES_GPU_1);
    assert_says(&seen, &["GPU 0: ", "GPU-51eed001"]);
    assert!(
        container
            .output("ls /proc/driver/nvidia/gpus")
            .contains("0000:02:00.0")
    );
    assert!(
        !read("/proc/thread-self/mountinfo").contains(rootfs),
        "nothing on the host"
    );
}

/// "Standalone": the caller is in the container's mount namespace, and the rootfs is not its root yet.
fn configure_as_lxc_does() {
    let fake = FakeDriver::shared();
    let container = Waiting::debian(&[], "");
    let cli = link(container.dir(), "nvidia-container-cli");
    let mut enter = Command::new("nsenter");
    enter
        .args(["-m", "-t", &container.pid().to_string()])
        .arg(cli)
        .arg("--root")
        .arg(&fake.root);
    enter.args([
        "--user",
        "configure",
        "--no-cgroups",
        "--ldconfig=@/sbin/ldconfig",
        "--device=1",
        "--compute",
    ]);
    assert_eq!(run(enter.arg("--utility").arg(&container.rootfs)).ok(), "");
    let seen = container.output(SEES_GPU_1);
    assert!(seen.contains("GPU-51eed001"), "{seen}");
}

/// The same in a user namespace in which only root exists.
fn configure_as_enroot_does() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let cli = link(dir.path(), "nvidia-container-cli");
    let script = format!(
        "mount --rbind '{rootfs}' '{rootfs}'; mount -t tmpfs dev '{rootfs}/dev'; \
         '{cli}' --root '{root}' --user --debug=/dev/stderr configure --no-cgroups --ldconfig=@/sbin/ldconfig --device=1 \
           --compute --compat32 --display --graphics --utility --video '{rootfs}'; \
         exec chroot '{rootfs}' /bin/sh -euc '{SEES_GPU_1}'",
        rootfs = image.rootfs.display(),
        root = fake.root.display(),
        cli = cli.display(),
    );
    let mut unshare = Command::new("unshare");
    let ran = run(unshare.args([
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-euc",
        &script,
    ]));
    assert_says(&ran.stderr, &["note: process ", "injected "]);
    let seen = ran.ok();
    assert!(seen.contains("GPU-51eed001"), "{seen}");
}

/// The listed parts are left out.
fn configure_obeys() {
    let fake = host();
    let configured = |options: &[&str], script: &str| {
        let dir = scratch();
        let image = Image::new(dir.path(), &["--layout", "lib64"]);
        let container = Waiting::start(dir.path(), &image.rootfs, &[], "");
        let (pid, rootfs) = (
            format!("-p{}", container.pid()),
            image.rootfs.to_str().unwrap(),
        );
        let arguments: Vec<_> = ["configure", "--no-cgroups"]
            .iter()
            .chain(options)
            .copied()
            .chain([pid.as_str(), rootfs])
            .collect();
        cli(&fake.root, &arguments).ok();
        container.output(script)
    };
    let there = "for path in dev/nvidiactl dev/nvidia0 dev/nvidia-uvm usr/lib64/libcuda.so.1 usr/lib64/libnvidia-ml.so.1 \
                 run/nvidia-persistenced/socket run/nvidia-fabricmanager/socket lib/firmware/nvidia; do \
                 test -e /$path && echo ${path##*/} || true; done";
    let utility = configured(&["-u"], there);
    assert_eq!(
        utility,
        "nvidiactl\nlibnvidia-ml.so.1\nsocket\nsocket\nnvidia\n"
    );
    let less = [
        "-u",
        "-d",
        "0",
        "--no-persistenced",
        "--no-fabricmanager",
        "--no-gsp-firmware",
    ];
    assert_eq!(
        configured(&less, there),
        "nvidiactl\nnvidia0\nlibnvidia-ml.so.1\n"
    );
    let compute = configured(&["-cd0", "--no-devbind"], there);
    assert_eq!(compute, "libcuda.so.1\nnvidia\n");
}

/// From a hook script of a runtime, with a device cgroup: the container can open its GPU, and no other.
fn configure_gives_access() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let cli = link(dir.path(), "nvidia-container-cli");
    let hook = dir.path().join("hook");
    let text = format!(
        "#!/bin/sh\npid=$(sed 's/.*\"pid\": *\\([0-9]*\\).*/\\1/')\n\
         exec '{}' --root '{}' configure --pid=$pid --device=1 --utility '{}'\n",
        cli.display(),
        fake.root.display(),
        image.rootfs.display()
    );
    write_program(&hook, text);
    let script =
        "nvidia-smi -L; mknod /tmp/other c 195 0; probe-open /dev/nvidia1 /tmp/other || true";
    let seen = crate::docker::Bundle::new(dir.path(), &image.rootfs)
        .process(&["sh", "-euc", script], &[])
        .hook("prestart", &hook, &["hook"])
        .run("")
        .ok();
    assert!(seen.contains("GPU-51eed001"), "{seen}");
    // No driver has the number: the kernel returns ENXIO to processes that may open the node, and EPERM to others.
    assert_says(&seen, &["/dev/nvidia1: ENXIO", "/tmp/other: EPERM"]);
}
