//! What `doctor` reports about the engines: their hook files and their configuration.

use std::process::Command;

use oci_nvidia_hook::testing::doctor::{Caller, Status};

use super::host::changed;
use super::{NEEDS, below_root, examine};
use crate::support::{HOOK, Need, run};

tests! {
    NEEDS => a_package_keeps_its_hook_file, a_spec_is_not_the_hook, the_configuration_of_the_hook_file;
    &[Need::Root, Need::Program("podman"), Need::Program("crun"), Need::Program("runc")] => programs_that_are_asked_change_nothing;
}

/// Of two hook files that start the hook, the fix names the one that no package installs again.
fn a_package_keeps_its_hook_file() {
    for name in ["nvidia-old.json", "z.json"] {
        let dir = changed(&format!(
            "cd usr/share/containers/oci/hooks.d; cp oci-nvidia-hook.json {name}"
        ));
        let outcomes = examine(dir.path(), Caller::default());
        let fixes = outcomes
            .iter()
            .filter(|outcome| outcome.id == Some("ONH-503"))
            .map(|outcome| outcome.fix.as_str());
        let expected = format!("rm /usr/share/containers/oci/hooks.d/{name}");
        assert_eq!(
            fixes.collect::<Vec<_>>(),
            [expected.as_str(); 2],
            "of Podman and of CRI-O"
        );
    }
}

/// A CDI spec does not hide that no engine starts the hook: the unit of the packages always writes one.
fn a_spec_is_not_the_hook() {
    let dir = changed(
        "rm usr/share/containers/oci/hooks.d/* etc/containers/containers.conf.d/*; mkdir -p etc/cdi; \
         printf 'cdiVersion: 0.3.0\\nkind: nvidia.com/gpu\\ndevices:\\n- name: all\\n  containerEdits:\\n    \
         env: [A=b]\\n' >etc/cdi/a.yaml",
    );
    let outcomes = examine(dir.path(), Caller::default());
    let of = |check: &str| {
        let mut found = outcomes.clone();
        found.retain(|outcome| outcome.check == check);
        found
    };
    assert_eq!(of("engines").len(), 2, "{outcomes:?}");
    for engine in of("engines") {
        assert_eq!(
            (engine.status, engine.id),
            (Status::Warning, Some("ONH-501"))
        );
        assert!(
            engine
                .what
                .contains("1 CDI device can be requested by name"),
            "{engine:?}"
        );
    }
    assert!(
        of("containers")
            .iter()
            .all(|found| found.status != Status::Ok)
    );
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
