//! Hook files that still name a stage of an earlier version: `precreate` or `createContainer`.

use std::path::Path;
use std::process::Command;

use crate::cdi::write_spec;
use crate::cdi_containers::only_spec;
use crate::driver::{FakeDriver, NEEDS, Waiting};
use crate::edit_config::spec;
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::support::{HOOK, Ran, assert_says, run, run_with, scratch, source, unshare, write_file};

tests! {
    NEEDS => precreate, create_container, the_error_names_the_hook_file;
    engine::NEEDS => containers_of_podman;
}

const NO_LONGER: &str =
    "cannot set up the container: the stage \"precreate\" no longer exists (ONH-002)\nhint: ";

fn at_precreate(config: &Path, options: &[&str], text: &str) -> Ran {
    let mut hook = Command::new(HOOK);
    hook.arg("--config").arg(config).args(options);
    run_with(hook.arg("precreate").env_clear(), text.as_bytes())
}

/// Podman starts a container with the output of this stage.
fn precreate() {
    let (dir, fake) = (scratch(), FakeDriver::shared());
    for env in [
        &[][..],
        &["NVIDIA_VISIBLE_DEVICES=void"],
        &["NVIDIA_VISIBLE_DEVICES="],
    ] {
        let text = spec(dir.path(), env);
        let printed = at_precreate(&fake.config, &[], &text).ok();
        assert_eq!(printed, text, "{env:?}");
    }
    let text = spec(dir.path(), &["NVIDIA_VISIBLE_DEVICES=0"]);
    for options in [&[][..], &["--debug"], &["--color", "never"]] {
        let ran = at_precreate(&fake.config, options, &text);
        assert_eq!(
            (ran.code, ran.stdout.as_str()),
            (Some(1), ""),
            "{options:?}: {ran:?}"
        );
        assert!(ran.stderr.contains(NO_LONGER), "{options:?}: {ran:?}");
    }
}

fn create_container() {
    let fake = FakeDriver::shared();
    let container = Waiting::debian(&[], "");
    let config = fake.config.display().to_string();
    let hook = || {
        let words = ["--config", &config, "createContainer"].map(str::to_owned);
        container.create_container_hook(&words)
    };
    assert_eq!(hook().ok(), "");
    container.set_env(&["NVIDIA_VISIBLE_DEVICES=0"]);
    let mounts = container.mountinfo();
    let stderr = hook().failed(1);
    assert!(
        stderr.contains(&NO_LONGER.replace("precreate", "createContainer")),
        "{stderr}"
    );
    assert_eq!(container.mountinfo(), mounts);
}

/// The file is found in a directory that Podman reads; otherwise doctor finds it.
fn the_error_names_the_hook_file() {
    let (dir, fake) = (scratch(), FakeDriver::shared());
    let text = spec(dir.path(), &["NVIDIA_VISIBLE_DEVICES=0"]);
    let file = dir.path().join("config.json");
    write_file(&file, text);
    let at = |script: &str| {
        let shipped = source("hooks.d/oci-nvidia-hook.json");
        let script = format!(
            "mount -t tmpfs x /etc/containers; mkdir -p /etc/containers/oci/hooks.d /usr/share/containers; \
             mount -t tmpfs x /usr/share/containers; {script}; exec '{HOOK}' --config \"$1\" precreate <\"$2\""
        );
        let mut unshare = unshare(&script);
        unshare.arg(&fake.config).arg(&file);
        run(unshare.env("shipped", shipped)).failed(1)
    };
    let replacement =
        "use the hook file of the package oci-nvidia-hook, or \"--device nvidia.com/gpu=all\"\n";
    let own = "/etc/containers/oci/hooks.d/own.json";
    let stderr = at(&format!("sed s/prestart/precreate/ \"$shipped\" >{own}"));
    let hint = format!("{NO_LONGER}run \"rm {own}\", and {replacement}");
    assert!(stderr.ends_with(&hint), "{stderr}");
    // A file with another stage is not the one.
    let stderr = at(&format!("cp \"$shipped\" {own}"));
    let hint = format!(
        "{NO_LONGER}remove the hook file that \"oci-nvidia-hook doctor\" prints, and {replacement}"
    );
    assert!(stderr.ends_with(&hint), "{stderr}");
}

/// Podman discards the messages of the hook at precreate, so the record has them. A container without a request starts, and also one
/// with CDI devices, although the file is still there.
fn containers_of_podman() {
    let fake = FakeDriver::shared();
    let (podman, dir) = (Podman::with_image(), scratch());
    podman.install_stage("precreate", &fake.config);
    let script = format!(
        "\"$@\" run --rm --name web --network=none --log-driver=none -e NVIDIA_VISIBLE_DEVICES=1 {IMAGE} true 2>&1 \
         || echo \"failed: $?\"; {HOOK} why web"
    );
    let text = podman.shell(Cgroup::AsMounted, &script).ok();
    assert!(text.contains("failed: 12"), "{text}");
    let says =
        "the hook failed: cannot set up the container: the stage \"precreate\" no longer exists";
    assert_says(&text, &[" (web)\nat precreate, ", says]);
    podman.run(Cgroup::AsMounted, &[IMAGE, "true"]).ok();
    let path = dir.path().join("nvidia.yaml");
    write_spec(fake, &path);
    let with_cdi = ["--device=nvidia.com/gpu=1", IMAGE, "nvidia-smi", "-L"];
    let seen = podman.run_after(&only_spec(&path), Cgroup::AsMounted, &with_cdi);
    assert_eq!(seen.ok().matches("UUID: GPU-").count(), 1);
    podman.install_stage("createContainer", &fake.config);
    let asked = ["-e", "NVIDIA_VISIBLE_DEVICES=1", IMAGE, "true"];
    let ran = podman.run(Cgroup::AsMounted, &asked);
    assert!(ran.code == Some(126) || ran.code == Some(127), "{ran:?}");
    assert_says(
        &ran.stderr,
        &["the stage \"createContainer\" no longer exists"],
    );
}
