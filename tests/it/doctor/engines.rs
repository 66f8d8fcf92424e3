//! What `doctor` reports about the engines: their hook files and their configuration.

use std::process::Command;

use oci_nvidia_hook::testing::doctor::{Caller, Status};

use super::host::changed;
use super::{NEEDS, below_root, examine};
use crate::support::{HOOK, Need, run};

tests! {
    NEEDS => the_configuration_of_the_hook_file;
    &[Need::Root, Need::Programs(&["podman", "crun", "runc"])] => programs_that_are_asked_change_nothing;
}

/// doctor judges the configuration that the engines pass to the hook.
fn the_configuration_of_the_hook_file() {
    const PASS: &str = r#"sed -i 's|"prestart"\],|"--config", "/etc/gpu.toml", "prestart"],|' \
        usr/share/containers/oci/hooks.d/oci-nvidia-hook.json; "#;
    let config_of = |script: &str| {
        let dir = changed(&format!("{PASS}{script}"));
        let outcomes = examine(dir.path(), Caller::default());
        let mut found = outcomes.into_iter();
        let check = found.find(|check| check.check == "config").unwrap();
        let what = below_root(&check.what, dir.path().to_str().unwrap());
        (check.status, check.id, what)
    };
    let (status, id, what) = config_of("echo '[devices' >etc/gpu.toml");
    assert_eq!((status, id), (Status::Error, Some("ONH-005")), "{what}");
    assert!(what.contains("/etc/gpu.toml"), "{what}");
    let what = "\"/etc/gpu.toml\", which /usr/share/containers/oci/hooks.d/oci-nvidia-hook.json passes to the hook, is valid";
    assert_eq!(
        config_of("echo >etc/gpu.toml"),
        (Status::Ok, None, what.to_owned())
    );
}

/// doctor and status ask engines and runtimes for their versions, and each of these programs could create files in /run.
fn programs_that_are_asked_change_nothing() {
    let script = "mount -t tmpfs run /run; said=$(\"$0\" doctor --all || true; \"$0\" status || true); \
                  echo \"$said\" | grep -c 'crun [0-9]'; find /run -mindepth 1";
    let text = run(Command::new("unshare").args(["-m", "sh", "-euc", script, HOOK])).ok();
    let (asked, left) = text.split_once('\n').unwrap();
    assert!(
        asked.parse::<u32>().unwrap() > 0 && left.is_empty(),
        "{text}"
    );
}
