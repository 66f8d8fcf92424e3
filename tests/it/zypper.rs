//! The use case on SUSE, as close as possible on another distribution: the package is built with the openSUSE branch of the spec,
//! installed with zypper into a root file system that provides libc and podman, used by podman with nodes that belong to
//! root:video, and removed again.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::driver::{FakeDriver, Image};
use crate::engine::Podman;
use crate::rpm::{FAST, find};
use crate::support::{Need, Ran, assert_lacks, run, scratch, shell, source, write_file};
use crate::{built, docs, old_packages};

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Programs(&["rpmbuild", "cc", "podman", "runc", "zypper"]),
];

tests! {
    NEEDS => build_install_run_remove;
}

/// The environment of NVIDIA's CUDA images.
pub const CUDA_IMAGE: &str = "--change 'ENV NVIDIA_VISIBLE_DEVICES=all' \
     --change 'ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility' \
     --change 'ENV NVIDIA_REQUIRE_CUDA=cuda>=12.2 brand=tesla,driver>=470,driver<471 brand=tesla,driver>=535,driver<536'";

fn build_install_run_remove() {
    let packages = build();
    let host = scratch();
    let root = host.path().join("root");
    install_base(&root, &packages);
    let before = files(&root);

    // The command line of README.md.
    zypper(
        &root,
        "install --allow-unsigned-rpm",
        &[find(&packages, "oci-nvidia-hook")],
    )
    .ok();
    let program = root.join("usr/bin/oci-nvidia-hook");
    assert!(
        run(Command::new(&program).arg("--version"))
            .ok()
            .contains(env!("CARGO_PKG_VERSION"))
    );

    let fake = FakeDriver::new(&["--gpus", "2", "--dev-mode", "0660", "--dev-group", "video"]);
    let drop_in = root.join("etc/nvidia-container-runtime/config.toml.d/root.toml");
    let settings = format!(
        "[nvidia-container-cli]\nroot = \"{}\"\nuser = \"root:video\"\n",
        fake.root.display()
    );
    write_file(&drop_in, settings);
    let podman = Podman::new();
    let image = Image::new(podman.dir.path(), &["--layout", "debian"]);
    podman.import_with(&image.rootfs, "localhost/cuda", CUDA_IMAGE);
    // CUDA images set the variables, so no option is needed.
    let inside = podman
        .run_installed(&root, &["localhost/cuda", "nvidia-smi", "-L"])
        .ok();
    assert_eq!(inside, fake.on_host("nvidia-smi -L"));
    let asked = [
        "-e",
        "NVIDIA_VISIBLE_DEVICES=1",
        "localhost/cuda",
        "nvidia-smi",
        "-L",
    ];
    assert_eq!(
        podman
            .run_installed(&root, &asked)
            .ok()
            .matches("UUID: GPU-51eed001-")
            .count(),
        1
    );

    std::fs::remove_file(drop_in).unwrap();
    std::fs::remove_dir_all(root.join("etc/containers/containers.conf.d")).unwrap();
    remove_as_documented(&root);
    assert_eq!(files(&root), before);
    // From the packages of an earlier version
    let old = old_packages::rpms(host.path(), "0.1.0~old");
    zypper(&root, "install --allow-unsigned-rpm", &[&old[0], &old[1]]).ok();
    let of_podman = || old_packages::LEFT.map(|path| root.join(path).exists());
    assert_eq!(of_podman(), [true; 3]);
    let main = find(&packages, "oci-nvidia-hook");
    zypper(&root, "install --allow-unsigned-rpm", &[main]).ok();
    assert_eq!(of_podman(), [false; 3]);
    assert_ne!(rpm(&root, &["-q", old_packages::PODMAN]).code, Some(0));
    remove_as_documented(&root);
    assert_eq!(files(&root), before);
    // With the packages that require it
    let all: Vec<_> = packages.iter().map(PathBuf::as_path).collect();
    zypper(&root, "install --allow-unsigned-rpm", &all).ok();
    assert!(root.join("usr/bin/oci-nvidia-kubelet-plugin").exists());
    remove_as_documented(&root);
    assert_eq!(files(&root), before);
    assert_ne!(
        podman
            .run_installed(&root, &["localhost/cuda", "nvidia-smi", "-L"])
            .code,
        Some(0)
    );
}

/// Runs the command of install.md.
fn remove_as_documented(root: &Path) {
    let commands = docs::removal_commands("openSUSE, SLE");
    assert_eq!(commands.len(), 1, "{commands:?}");
    let words: Vec<_> = commands[0].split(' ').collect();
    assert_eq!(words[0], "zypper");
    let ran = command(root, &[&["--no-refresh"], &words[1..]].concat());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_lacks(&ran.stdout, &["scriptlet"]);
}

/// Runs the same commands as `make rpm` on openSUSE, with a cargo that has compiled the programs.
fn build() -> Vec<PathBuf> {
    let top = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rpm-suse");
    let mut build = Command::new(source("packaging/build-rpm"));
    build
        .arg(&top)
        .args(FAST)
        .arg("--load")
        .arg(source("tests/fixtures/rpm/macros.suse"));
    build
        .arg("--define")
        .arg(format!("test_cargo {}", built::cargo().display()));
    build
        .env("CARGO", built::cargo())
        .env("TARBALLS", built::dist());
    run(&mut build).ok();
    // From version 4.20 on, rpm creates packages for debuggers, which users do not install.
    let list = shell!(
        "find '{}/RPMS' -name '*.rpm' ! -name '*-debug*'",
        top.display()
    );
    let built: Vec<PathBuf> = list.lines().map(PathBuf::from).collect();
    // The directory in which the macro has cargo build, which differs from the directory of build-rpm elsewhere.
    let tree = crate::rpm::build_dir(&top);
    assert!(
        tree.join("target/release/oci-nvidia-hook").is_file()
            && !top.join("cargo/release").exists()
    );
    built
}

/// A shell, an rpm database, and a package that provides the dependencies of ours on a distribution.
pub fn install_base(root: &Path, packages: &[PathBuf]) {
    let parent = root.parent().unwrap();
    let image = Image::new(parent, &[]);
    std::fs::rename(&image.rootfs, root).unwrap();
    let requires = run(Command::new("rpm")
        .args(["-qp", "--requires"])
        .args(packages))
    .ok();
    let provides: Vec<_> = requires
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with("rpmlib("))
        .collect();
    let provides: Vec<_> = provides
        .iter()
        .filter(|line| !line.starts_with("oci-nvidia-hook"))
        .collect();
    assert!(
        provides.iter().any(|line| line.starts_with("libc.so.6")),
        "{requires}"
    );
    let spec = parent.join("base.spec");
    let tags: String = provides
        .iter()
        .map(|line| format!("Provides: {line}\n"))
        .collect();
    let head = "Name: base\nVersion: 1\nRelease: 1\nSummary: A distribution\nLicense: MIT\nBuildArch: noarch\nProvides: podman\n";
    write_file(
        &spec,
        format!("{head}{tags}%description\nA distribution.\n%files\n"),
    );
    let top = parent.join("base");
    run(Command::new("rpmbuild")
        .args(["-bb", "--quiet", "--define"])
        .arg(format!("_topdir {}", top.display()))
        .arg(spec))
    .ok();
    let rpm = shell!("find '{}/RPMS' -name '*.rpm'", top.display());
    let mut install = Command::new("rpm");
    install
        .arg("--root")
        .arg(root)
        .args(["--dbpath", "/var/lib/rpm", "-i"])
        .arg(rpm.trim());
    run(&mut install).ok();
}

/// Runs `zypper COMMAND ARGUMENTS` in this root, without a repository.
#[track_caller]
pub fn zypper(root: &Path, words: &str, arguments: &[&Path]) -> Ran {
    let arguments = arguments.iter().map(|path| path.to_str().unwrap());
    let ran = command(
        root,
        &["--no-refresh"]
            .into_iter()
            .chain(words.split(' '))
            .chain(arguments)
            .collect::<Vec<_>>(),
    );
    assert!(!ran.stdout.contains("scriptlet"), "{ran:?}");
    ran
}

/// Runs zypper in this root.
pub fn command(root: &Path, arguments: &[&str]) -> Ran {
    let mut zypper = Command::new("zypper");
    zypper
        .arg("--root")
        .arg(root)
        .arg("--non-interactive")
        .args(arguments);
    run(zypper.env("HOME", suse_home(root)))
}

/// Runs rpm in this root.
pub fn rpm(root: &Path, arguments: &[&str]) -> Ran {
    run(Command::new("rpm")
        .arg("--root")
        .arg(root)
        .args(arguments)
        .env("HOME", suse_home(root)))
}

/// Debian's rpm has its database in root's home; zypper and SUSE's rpm have it here.
fn suse_home(root: &Path) -> PathBuf {
    let home = root.join("../zypper-home");
    std::fs::create_dir_all(&home).unwrap();
    write_file(home.join(".rpmmacros"), "%_dbpath /var/lib/rpm\n");
    home
}

/// Returns everything that is not a directory, except for rpm's and zypper's own files.
fn files(root: &Path) -> Vec<String> {
    let own = [
        "./var/lib/rpm",
        "./var/cache/zypp",
        "./run/zypp.pid",
        "./run/zypp-rpm.pid",
        "./var/lib/zypp",
        "./var/log",
        "./dev",
        "./etc/zypp",
    ];
    let prune: String = own
        .iter()
        .map(|dir| format!("-path {dir} -prune -o "))
        .collect();
    let text = shell!(
        "cd '{}'; find . {prune} ! -type d -print | sort",
        root.display()
    );
    text.lines().map(str::to_owned).collect()
}
