//! `doctor` for a user other than root.

use engines::User;
use oci_nvidia_hook::testing::doctor::{Caller, Status};

use super::examine;
use super::host::changed;
use crate::support::{HOOK, Need, chmod, nvml_program, sh};

tests! {
    &[Need::OwnProcess, Need::Root, Need::Programs(&["cc", "setpriv"])] => podman_of_the_user, a_user_sees_less;
}

fn podman_of_the_user() {
    let tux = User {
        name: "tux".into(),
        uid: 1000,
        home: Some("/home/tux".into()),
    };
    let caller = Caller {
        user: Some(tux),
        groups: [484, 1000].into(),
    };
    let dir = changed("chgrp 484 dev/nvidia*; chmod 660 dev/nvidia*");
    let checks = examine(dir.path(), caller);
    let find = |check: &str, text: &str| {
        let mut found = checks.iter();
        let found = found.find(|found| found.check == check && found.what.contains(text));
        found.unwrap_or_else(|| panic!("{checks:?}"))
    };
    assert_eq!(find("engines", "Podman of tux").status, Status::Ok);
    let fix = &find("groups", "tux can open the device nodes").fix;
    assert_eq!(fix, "podman run --group-add keep-groups …");
}

/// NVML below another driver root is not asked.
fn a_user_sees_less() {
    let dir = changed("chgrp 484 dev/nvidia*; chmod 660 dev/nvidia*; chmod -R go+rX .");
    let parent = tempfile::tempdir_in("/var/tmp").unwrap();
    chmod(parent.path(), 0o755);
    let (host, path) = (dir.path().display(), parent.path().display());
    let text = sh(&format!(
        "cp -a '{host}' '{path}/root'; cp '{HOOK}' '{path}/hook'; cp '{nvml}' '{path}'; \
         printf '[nvidia-container-cli]\\nroot = \"{path}/root\"\\n' >'{path}/config.toml'; \
         setpriv --reuid 65534 --regid 65534 --clear-groups '{path}/hook' --config '{path}/config.toml' doctor --all || true",
        nvml = nvml_program().display()
    ));
    let text = text.ok();
    for words in [
        "only root can run NVML below another driver root",
        "only root can check whether the hook as root can open the GPUs",
    ] {
        assert!(text.contains(words), "{text}");
    }
}
