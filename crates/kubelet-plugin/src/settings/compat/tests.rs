//! Tables of what settings in the form of other plugins mean here.

use super::*;
use base::report::render;
use clap::{FromArgMatches, Parser};
use nvidia_host::config::KubeletPlugin;
use nvidia_host::config::kubelet_plugin::{DeviceIdStrategy, DeviceListStrategy};

/// The inputs from flags, variables and the text of a file.
fn inputs(flags: &[&str], variables: &[(&'static str, &str)], file: &str) -> Inputs {
    let command = <Flags as clap::Args>::augment_args(Command::new("x"));
    let matches = command.try_get_matches_from([&["x"], flags].concat()).unwrap();
    Inputs {
        flags: Flags::from_arg_matches(&matches).unwrap().0,
        variables: variables.iter().map(|(name, value)| (*name, (*value).to_owned())).collect(),
        file: (!file.is_empty()).then(|| (PathBuf::from("/c.yaml"), file.to_owned())),
    }
}

fn applied(inputs: &Inputs) -> Result<(Target, Vec<Finding>)> {
    let mut target = Target { config: inputs.defaults(), kubelet_dir: None };
    let findings = inputs.apply(&mut target)?;
    Ok((target, findings))
}

/// The settings of the plugin that a file leads to.
fn of_file(text: &str) -> KubeletPlugin {
    let (target, findings) = applied(&inputs(&[], &[], text)).unwrap();
    assert_eq!(findings, Vec::new(), "{text}");
    target.config.kubelet_plugin
}

#[test]
fn every_option_has_its_place() {
    for option in &OPTIONS {
        assert!(!option.variable.is_empty(), "{option:?}");
        if option.names.is_empty() {
            continue;
        }
        let own = crate::commands::cli::Cli::try_parse_from(["x", "check", &format!("--{}=x", option.name())]);
        // The value may be wrong, but the option is known.
        let kind = own.err().map(|error| error.kind());
        assert_ne!(kind, Some(clap::error::ErrorKind::UnknownArgument), "{option:?}");
    }
}

#[test]
fn precedence() {
    let file = "version: v1\nflags:\n  migStrategy: single\n  plugin: {deviceIDStrategy: index}\n";
    let with = |flags, variables| applied(&inputs(flags, variables, file)).unwrap().0;
    let target = with(&[], &[]);
    assert_eq!(target.config.kubelet_plugin.mig_strategy, MigStrategy::Single);
    assert_eq!(target.config.kubelet_plugin.device_id_strategy, DeviceIdStrategy::Index);
    let target = with(&["--driver-root=/b"], &[("MIG_STRATEGY", "mixed"), ("NVIDIA_DRIVER_ROOT", "/a")]);
    assert_eq!(target.config.kubelet_plugin.mig_strategy, MigStrategy::Mixed);
    assert_eq!(target.config.driver_root.as_path(), Path::new("/b"));
    assert_eq!(target.config.kubelet_plugin.device_id_strategy, DeviceIdStrategy::Index);
    let dir = with(&["--kubelet-socket", "/k/device-plugins/kubelet.sock"], &[]).kubelet_dir;
    assert_eq!(dir.as_deref(), Some(Path::new("/k")));
}

#[test]
fn mig_is_off_by_default_in_nvidias_form() {
    for (flags, variables, expected) in [
        (&[][..], &[][..], MigStrategy::Mixed),
        (&["--fail-on-init-error"], &[], MigStrategy::None),
        (&[], &[("PASS_DEVICE_SPECS", "true")], MigStrategy::None),
        (&["--config-file=/c.yaml"], &[], MigStrategy::None),
    ] {
        let defaults = inputs(flags, variables, "").defaults();
        assert_eq!(defaults.kubelet_plugin.mig_strategy, expected, "{flags:?} {variables:?}");
    }
}

#[test]
fn options_and_variables() {
    for (flags, variables, finds) in [
        (&["--fail-on-init-error=false", "--mps-root=/x", "--gds-enabled=false"][..], &[][..], &[][..]),
        (
            &["--gds-enabled", "--nvidia-ctk-path=/x"],
            &[],
            &["--nvidia-cdi-hook-path has no", "--gds-enabled has no effect"],
        ),
        (&[], &[("DEVICE_DISCOVERY_STRATEGY", "auto"), ("DRIVER_ROOT_CTR_PATH", "/driver-root")], &[]),
        (&[], &[("DP_DISABLE_HEALTHCHECKS", "xids")], &["DP_DISABLE_HEALTHCHECKS has no effect: ignored-xids"]),
        (&[], &[("DEVICE_DISCOVERY_STRATEGY", "tegra")], &["DEVICE_DISCOVERY_STRATEGY has no effect: "]),
        (&["--imex-channel-ids=0"], &[("MOFED_ENABLED", "1")], &["MOFED_ENABLED has no", "--imex-channel-ids has no"]),
    ] {
        let (_, findings) = applied(&inputs(flags, variables, "")).unwrap();
        assert_eq!(findings.len(), finds.len(), "{findings:?}");
        for (finding, text) in findings.iter().zip(finds) {
            assert!(finding.what.starts_with(text) && finding.kind.id == "ONH-604", "{finding:?}");
        }
    }
    let plugin = applied(&inputs(
        &["--shared-devices-allocation-policy=packed"],
        &[("DEVICE_LIST_STRATEGY", "envvar, cdi-cri"), ("PASS_DEVICE_SPECS", "0")],
        "",
    ));
    let plugin = plugin.unwrap().0.config.kubelet_plugin;
    assert_eq!(plugin.device_list_strategy, [DeviceListStrategy::Envvar, DeviceListStrategy::CdiCri]);
    assert!(!plugin.pass_device_specs);
    assert_eq!(plugin.allocation, nvidia_host::config::kubelet_plugin::Allocation::Packed);
}

#[test]
fn the_file() {
    let plugin = of_file(
        "version: v1\n\
         flags:\n  migStrategy: mixed\n  failOnInitError: true\n  nvidiaDriverRoot: null\n  gfd: {oneshot: false}\n\
         \x20 plugin:\n    passDeviceSpecs: false\n    deviceListStrategy: [volume-mounts, cdi-annotations]\n\
         resources:\n  gpus:\n  - {pattern: \"*H100*\", name: h100}\n  mig: []\n\
         sharing:\n  timeSlicing:\n    renameByDefault: true\n    resources:\n\
         \x20   - {name: nvidia.com/gpu, replicas: 4}\n    - {name: mig-1g.5gb, rename: a.b/c, replicas: 2, devices: all}\n",
    );
    assert_eq!(plugin.mig_strategy, MigStrategy::Mixed);
    assert!(!plugin.pass_device_specs && plugin.several_replicas);
    use DeviceListStrategy::{CdiAnnotations, VolumeMounts};
    assert_eq!(plugin.device_list_strategy, [VolumeMounts, CdiAnnotations]);
    assert_eq!((plugin.resources[0].name.as_str(), plugin.resources[0].model.as_str()), ("nvidia.com/h100", "*H100*"));
    let slices: Vec<_> =
        plugin.time_slicing.iter().map(|row| (&*row.name, row.rename.as_deref(), row.replicas)).collect();
    assert_eq!(
        slices,
        [("nvidia.com/gpu", Some("nvidia.com/gpu.shared"), 4), ("nvidia.com/mig-1g.5gb", Some("a.b/c"), 2)]
    );
    let strict = of_file(
        "version: v1\nsharing: {timeSlicing: {failRequestsGreaterThanOne: true, resources: [{name: gpu, replicas: 2}]}}",
    );
    assert!(!strict.several_replicas && strict.time_slicing[0].rename.is_none());
    assert_eq!(of_file("{\"version\": \"v1\", \"flags\": {\"plugin\": null}}"), KubeletPlugin::default());
    let list = of_file("version: v1\nflags: {plugin: {deviceListStrategy: envvar}}\n").device_list_strategy;
    assert_eq!(list, [DeviceListStrategy::Envvar]);
}

#[test]
fn what_the_file_cannot_have() {
    for (text, says) in [
        ("", "\"/c.yaml\" line 1: version has an invalid value; it must be \"v1\""),
        ("\nversion: v2\n", "\"/c.yaml\" line 2: version has"),
        ("version: v1\nflags: [\n", "\"/c.yaml\" line "),
        ("- version: v1\n", "line 1: version has"),
        (
            "version: v1\nflags:\n  migStrategy: both\n",
            "line 3: flags.migStrategy has an invalid value; it must be \"none\",",
        ),
        (
            "version: v1\nflags:\n  plugin:\n    passDeviceSpecs: maybe\n",
            "line 4: flags.plugin.passDeviceSpecs has an invalid value",
        ),
        ("version: v1\nflags: {plugin: {deviceListStrategy: {a: b}}}", "line 2: flags.plugin.deviceListStrategy has"),
        ("version: v1\nflags: 3\n", "line 2: flags has an invalid value; it must be a map"),
        (
            "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - name: gpu\n      replicas: 0\n",
            "line 6: sharing.timeSlicing.resources.0.replicas has an invalid value; it must be a number from 1 to 100",
        ),
        (
            "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - replicas: 2\n      name: a b\n",
            "line 6: sharing.timeSlicing.resources.0.name has",
        ),
        (
            "version: v1\nsharing: {timeSlicing: {renameByDefault: 1}}",
            "renameByDefault has an invalid value; it must be true or false",
        ),
        ("version: v1\nresources: {gpus: [{name: gpu}]}", "line 2: resources.gpus has"),
    ] {
        let text = render(&applied(&inputs(&[], &[], &format!("{text}\n"))).unwrap_err());
        assert!(text.contains(says) && text.contains("(ONH-075)"), "{text}");
        assert_eq!(text.lines().count(), 2, "{text}");
    }
    for (text, says) in [
        ("imex: {channelIDs: [0]}", "\"/c.yaml\" line 2: imex.channelIDs has no effect: "),
        ("sharing:\n  mps:\n    resources: [{name: gpu, replicas: 2}]", "line 3: sharing.mps has no effect: MPS"),
        ("flags: {gdrcopyEnabled: true}", "line 2: flags.gdrcopyEnabled has no effect: "),
        ("flags: {x: true}", "line 2: flags.x has no effect: the key is unknown"),
        ("x: {}", "line 2: x has no effect"),
        ("resources: {mig: [{pattern: \"*\", name: a}]}", "line 2: resources.mig has no effect"),
        (
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0]}]}}",
            "resources.0.devices has no effect",
        ),
    ] {
        let (_, findings) = applied(&inputs(&[], &[], &format!("version: v1\n{text}\n"))).unwrap();
        assert!(findings.len() == 1 && findings[0].what.contains(says), "{findings:?}");
    }
}

#[test]
fn errors_name_their_place() {
    for (flags, variables, says) in [
        (
            &["--driver-root=x"][..],
            &[][..],
            "--nvidia-driver-root has an invalid value; it must be an absolute path (ONH-002)",
        ),
        (
            &["--kubelet-socket=/x.sock"],
            &[],
            "it must be an absolute path that ends in \"device-plugins/kubelet.sock\"",
        ),
        (
            &[],
            &[("DEVICE_LIST_STRATEGY", "cdi")],
            "the environment variable DEVICE_LIST_STRATEGY has an invalid value; it must be a list of \"envvar\"",
        ),
        (&[], &[("PASS_DEVICE_SPECS", "maybe")], "it must be true or false (ONH-075)"),
    ] {
        let text = render(&applied(&inputs(flags, variables, "")).unwrap_err());
        assert!(text.contains(says), "{text}");
    }
}

#[test]
fn gkes_file() {
    let of = |text: &str| {
        let mut target = Target::default();
        let findings = apply_gke(&mut target, Path::new("/gpu_config.json"), text)?;
        let plugin = target.config.kubelet_plugin;
        anyhow::Ok((
            plugin.replicas,
            plugin.mig_strategy,
            findings.iter().map(|f| f.what.clone()).collect::<Vec<_>>().join("; "),
        ))
    };
    let (single, mixed) = (MigStrategy::Single, MigStrategy::Mixed);
    for (text, replicas, mig, finds) in [
        ("{}", 1, mixed, ""),
        ("", 1, mixed, ""),
        (
            r#"{"GPUPartitionSize":"","GPUSharingConfig":{"GPUSharingStrategy":"","MaxSharedClientsPerGPU":0}}"#,
            1,
            mixed,
            "",
        ),
        (r#"{"GPUPartitionSize":"1g.5gb"}"#, 1, single, ""),
        (r#"{"MaxTimeSharedClientsPerGPU":3}"#, 3, mixed, ""),
        (
            r#"{"MaxTimeSharedClientsPerGPU":3,"GPUSharingConfig":{"GPUSharingStrategy":"time-sharing","MaxSharedClientsPerGPU":2}}"#,
            2,
            mixed,
            "",
        ),
        (
            r#"{"GPUSharingConfig":{"MaxSharedClientsPerGPU":2,"GPUSharingStrategy":"mps"}}"#,
            1,
            mixed,
            "\"/gpu_config.json\" line 1: GPUSharingConfig.GPUSharingStrategy has no effect: MPS is not supported",
        ),
        (r#"{"x":1}"#, 1, mixed, "\"/gpu_config.json\" line 1: x has no effect: the key is unknown"),
    ] {
        assert_eq!(of(text).unwrap(), (replicas, mig, finds.to_owned()), "{text}");
    }
    for (text, says) in [
        ("{", "\"/gpu_config.json\" line "),
        ("{\"GPUPartitionSize\":\n1}", "line 1: GPUPartitionSize has an invalid value; it must be a string"),
        (
            "{\"GPUSharingConfig\":{\n\"GPUSharingStrategy\":\"time-sharing\",\n\"MaxSharedClientsPerGPU\":101}}",
            "line 3: GPUSharingConfig.MaxSharedClientsPerGPU has an invalid value; it must be a number from 1 to 100",
        ),
        (r#"{"GPUSharingConfig":{"GPUSharingStrategy":"x"}}"#, "it must be \"time-sharing\""),
    ] {
        let text = render(&of(text).unwrap_err());
        assert!(text.contains(says), "{text}");
    }
}

proptest::proptest! {
    #[test]
    fn no_text_ends_the_program(text in "\\PC{0,80}", key in "[a-zA-Z]{1,8}", value in "[\\[\\]{}a-z0-9:, \n-]{0,30}") {
        for text in [text, format!("version: v1\n{key}: {value}"), format!("version: v1\nsharing: {{timeSlicing: {{resources: [{value}]}}}}")] {
            applied(&inputs(&[], &[], &text)).ok();
            apply_gke(&mut Target::default(), Path::new("/x"), &text).ok();
        }
    }
}
