//! `doctor` for a user other than root.

use std::os::unix::fs::PermissionsExt;

use base::paths::HostPath;
use base::report::Finding;
use base::tree::Tree;
use engines::User;
use findings::catalog;
use oci_nvidia_hook::testing::doctor::{self, Caller, Check, Status};

use super::examine;
use super::host::changed;
use crate::support::{HOOK, Need, sh};

tests! {
    &[Need::OwnProcess, Need::Root, Need::Program("cc"), Need::Program("setpriv")] => a_user_sees_less_and_says_so;
}

fn a_user_sees_less_and_says_so() {
    let tux = |groups: &[u32]| Caller {
        user: Some(User {
            name: "tux".into(),
            uid: 1000,
            home: Some("/home/tux".into()),
        }),
        groups: groups.iter().copied().collect(),
    };
    let dir = changed("chgrp 484 dev/nvidia*; chmod 660 dev/nvidia*; rm dev/nvidia-uvm");
    let find = |outcomes: &[Check], check: &str| {
        outcomes
            .iter()
            .find(|outcome| outcome.check == check)
            .unwrap()
            .clone()
    };
    let outside = examine(dir.path(), tux(&[1000]));
    let groups = find(&outside, "groups");
    assert_eq!(groups.id.unwrap(), "ONH-211");
    assert_eq!(
        groups.what,
        "user tux cannot open \"/dev/nvidiactl\" (root:484 0660)"
    );
    assert_eq!(
        groups.fix,
        "as root: groupadd -g 484 gpu484 && usermod -aG gpu484 tux, and log in again"
    );
    let uvm = find(&outside, "uvm");
    assert!(
        uvm.what.contains("rootless containers cannot load it") && uvm.fix.starts_with("as root"),
        "{uvm:?}"
    );
    let inside = find(&examine(dir.path(), tux(&[484, 1000])), "groups");
    assert_eq!(inside.id.unwrap(), "ONH-212");
    assert_eq!(inside.fix, "podman run --group-add keep-groups …");
    // The configuration of the user's Podman is examined too.
    let mut engines = outside
        .iter()
        .filter(|outcome| outcome.check == "engines" && outcome.what.contains("Podman of tux"));
    assert_eq!(engines.next().unwrap().status, Status::Ok);
    // A fault is reported once: as a warning, with the group.
    let mut facts = doctor::inspect(
        &Tree::open(&HostPath::new(dir.path())).unwrap(),
        None,
        tux(&[1000]),
    );
    let refused = Finding::new(
        &catalog::NVML_PERMISSION,
        "this user may not open the GPUs",
        "x",
    );
    for (user, status) in [(facts.user.clone(), Status::Skipped), (None, Status::Error)] {
        facts.user = user;
        facts.driver.nvml.as_mut().unwrap().answer = Err(refused.clone());
        facts.driver.starts.clear();
        let nvml = find(&doctor::examine(&facts), "nvml");
        assert_eq!(nvml.status, status, "{nvml:?}");
    }
    // A real user: NVML below another driver root is not asked, and doctor reports that.
    sh(&format!(
        "chmod 755 '{}'; chmod -R go+rX '{}'",
        dir.path().display(),
        dir.path().display()
    ))
    .ok();
    let parent = tempfile::tempdir_in("/var/tmp").unwrap();
    std::fs::set_permissions(parent.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = parent.path().display();
    sh(&format!(
        "cp -a '{}' '{path}/root'; cp '{HOOK}' '{path}/hook'",
        dir.path().display()
    ))
    .ok();
    let config = parent.path().join("config.toml");
    std::fs::write(
        &config,
        format!("[nvidia-container-cli]\nroot = \"{path}/root\"\n"),
    )
    .unwrap();
    let ran = sh(&format!(
        "setpriv --reuid 65534 --regid 65534 --clear-groups '{path}/hook' --config '{path}/config.toml' doctor --all || true"
    ));
    let text = ran.ok();
    for says in [
        "only root can ask NVML below another driver root",
        "only root can check whether the hook as root can open the GPUs",
    ] {
        assert!(text.contains(says), "{text}");
    }
}
