//! Broken hosts that are fixed with the printed text alone: an error, the command of its hint, and a container that works.

use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::hints;
use crate::support::{
    HOOK, Need, assert_says, nvml_program, read, sh_unshared, shell, source, write_file,
};

const USER: &[Need] = &[Need::Root, Need::Programs(&["cc", "setpriv"])];

tests! {
    NEEDS => an_update_without_a_reboot, a_missing_node;
    USER => a_user_outside_of_the_group;
    engine::NEEDS => leftovers_of_a_rootless_guide;
}

/// Returns the rest of the line after `before`.
fn after<'a>(text: &'a str, before: &str) -> &'a str {
    let (_, rest) = text
        .split_once(before)
        .unwrap_or_else(|| panic!("no {before:?} in {text}"));
    rest.lines().next().unwrap()
}

fn is_documented(text: &str) {
    let pages = ["docs/troubleshooting.md", "docs/findings.md"];
    assert!(
        pages.iter().any(|page| read(source(page)).contains(text)),
        "neither of {pages:?} contains {text:?}"
    );
}

/// The libraries are new and the kernel module is old. After the reboot that the hint suggests, the module is new too.
fn an_update_without_a_reboot() {
    let (dir, fake) = (
        tempfile::tempdir().unwrap(),
        FakeDriver::new(&["--gpus", "1"]),
    );
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::with_all_gpus(dir.path(), &image);
    let version = fake.root.join("proc/driver/nvidia/version");
    let booted = read(&version);
    write_file(&version, booted.replace("535.183.01", "535.129.03"));
    let shown = crate::support::run(fake.command().arg("version")).ok();
    let both = "NVIDIA kernel module 535.129.03, libraries 535.183.01 (ONH-013)\n";
    assert!(shown.ends_with(both), "{shown}");
    let stderr = container.hook(&fake.config).failed(1);
    assert!(
        stderr.contains("535.129.03") && stderr.contains("535.183.01"),
        "both versions: {stderr}"
    );
    assert!(
        after(&stderr, "(ONH-013)\nhint: ").starts_with("reboot the host"),
        "{stderr}"
    );
    is_documented(
        "### ONH-013\n\n**error: the kernel module and the libraries have different versions**\n",
    );
    write_file(&version, booted);
    container.hook(&fake.config).ok();
}

/// A host like SUSE, on which a node is missing that the hook cannot create, because the driver is not in `/`.
fn a_missing_node() {
    let dir = tempfile::tempdir().unwrap();
    let fake = FakeDriver::new(&["--gpus", "2", "--dev-mode", "0660", "--dev-group", "video"]);
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::with_all_gpus(dir.path(), &image);
    std::fs::remove_file(fake.root.join("dev/nvidia0")).unwrap();
    let ran = container.hook(&fake.config);
    assert_says(&ran.stderr, &["\"/dev/nvidia0\"", "(ONH-021)\n"]);
    hints::obey(&ran, &fake.config);
    container.hook(&fake.config).ok();
}

/// The hint names the caller and the group. A login after usermod(8) gives the process that group.
fn a_user_outside_of_the_group() {
    let fake = FakeDriver::new(&["--gpus", "1", "--dev-mode", "0660", "--dev-group", "video"]);
    // Without privileges, the process that asks NVML cannot enter the driver root: the nodes are in the host's /dev.
    let place = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = place.path().display();
    shell!(
        "chmod 755 '{path}'; cp '{HOOK}' '{path}/hook'; cp '{nvml}' '{path}'; cp -a '{}' '{path}/root'; mv '{path}/root/dev' '{path}'",
        fake.root.display(),
        nvml = nvml_program().display()
    );
    write_file(
        place.path().join("config.toml"),
        format!("[nvidia-container-cli]\nroot = \"{path}/root\"\n"),
    );
    let info = |groups: &str, namespace: &str| {
        let script = format!(
            "mount -t tmpfs -o mode=755 dev /mnt; cp -a /dev/null /dev/urandom '{path}'/dev/. /mnt; mount --move /mnt /dev; \
             mount -t tmpfs proc /proc/driver; cp -a '{path}'/root/proc/driver/. /proc/driver; \
             exec setpriv --reuid 65534 --regid 65534 {groups} {namespace} '{path}/hook' --config '{path}/config.toml' info"
        );
        sh_unshared(&script)
    };
    let stderr = info("--clear-groups", "").failed(1);
    let command = after(&stderr, "(ONH-019)\nhint: as root, run ");
    assert_eq!(command, "\"usermod -aG video nobody\", and log in again");
    // Rootless Podman calls the hook in a user namespace.
    let stderr = info("--clear-groups", "unshare -Ur").failed(1);
    let hint = after(&stderr, "(ONH-019)\nhint: as root, run ");
    let (first, second) = hint.split_once("; ").unwrap();
    assert_eq!(
        (
            first,
            second.contains("crun and \"--group-add keep-groups\"")
        ),
        (command, true),
        "{hint}"
    );
    let group = command.split(' ').nth(2).unwrap();
    let ran = info(
        &format!("--groups \"$(getent group {group} | cut -d: -f3)\""),
        "",
    );
    assert!(!ran.stderr.contains("ONH-019"), "{ran:?}");
}

/// NVIDIA's guide for rootless containers sets `no-cgroups`, and the toolkit's hook is still installed, without its libraries.
fn leftovers_of_a_rootless_guide() {
    let (podman, fake) = (Podman::with_image(), FakeDriver::new(&["--gpus", "1"]));
    podman.install_hook(&fake.config);
    fake.configure("no-cgroups = true");
    let theirs = podman.dir.path().join("nvidia-container-runtime-hook");
    write_file(
        &theirs,
        "#!/bin/sh\necho 'nvidia-container-cli: initialization error: load library failed' >&2\nexit 1\n",
    );
    shell!("chmod 755 '{}'", theirs.display());
    let json = serde_json::json!({
        "version": "1.0.0", "hook": {"path": theirs}, "when": {"always": true}, "stages": ["prestart"],
    });
    let file = podman.hooks.join("oci-nvidia-toolkit.json");
    write_file(&file, json.to_string());
    let arguments = [
        "-e",
        "NVIDIA_VISIBLE_DEVICES=all",
        IMAGE,
        "nvidia-smi",
        "-L",
    ];

    let ran = podman.run(Cgroup::AsMounted, &arguments);
    assert!(ran.stderr.contains("nvidia-container-cli: "), "{ran:?}");
    is_documented(
        "| `nvidia-container-cli: …` | NVIDIA's hook is installed too, and fails (ONH-503) |",
    );
    std::fs::remove_file(file).unwrap();

    let why = format!(
        "\"$@\" run --network=none --log-driver=none --cidfile '{dir}/id' {} || true; '{HOOK}' why \"$(cat '{dir}/id')\"; \
         \"$@\" rm --force --time 0 \"$(cat '{dir}/id')\"",
        arguments.join(" "),
        dir = podman.dir.path().display(),
    );
    let ran = podman.shell(Cgroup::AsMounted, &why);
    assert!(!ran.stdout.contains("\nGPU 0: "), "{ran:?}");
    let printed = format!("{}{}", ran.stdout, ran.stderr);
    assert!(
        after(&printed, "denies the GPUs: ").contains("no-cgroups = true"),
        "{printed}"
    );
    assert!(printed.contains("(ONH-041)"), "{printed}");
    assert!(
        after(&printed, "hint: ").starts_with("remove no-cgroups from config.toml"),
        "{printed}"
    );
    fake.configure("");
    assert!(
        podman
            .run(Cgroup::AsMounted, &arguments)
            .ok()
            .starts_with("GPU 0: ")
    );
}
