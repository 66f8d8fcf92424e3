//! Tables of what settings in the form of other plugins mean here.

use std::path::Path;

use base::report::render;
use clap::{Args, Command, FromArgMatches, Parser};

use super::nvidia_options::{Effect, OPTIONS};
use super::options::Given;
use super::table::SETTINGS;
use super::values::{Allocation, DeviceIdStrategy, MigStrategy, SharingStrategy};
use super::*;

/// An array of tuples, each of which is a row.
macro_rules! rows {
    ($($($cell:expr),+;)+) => {
        [$(($($cell),+)),+]
    };
}

/// The given options.
fn given(flags: &[&str]) -> Given {
    let command = Given::augment_args(Command::new("x"));
    let matches = command
        .try_get_matches_from([&["x"], flags].concat())
        .unwrap();
    Given::from_arg_matches(&matches).unwrap()
}

/// The inputs from flags, variables and the text of a file.
fn inputs(flags: &[&str], variables: &[(&'static str, &str)], file: &str) -> Inputs {
    Inputs {
        given: given(flags),
        variables: variables
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()))
            .collect(),
        file: (!file.is_empty()).then(|| ("/c.yaml".into(), file.to_owned())),
    }
}

fn applied(inputs: &Inputs) -> Result<(Settings, Vec<Finding>)> {
    let mut settings = inputs.defaults();
    let findings = inputs.apply(&mut settings)?;
    Ok((settings, findings))
}

/// The settings of the plugin that a file leads to.
fn of_file(text: &str) -> Plugin {
    let (settings, findings) = applied(&inputs(&[], &[], text)).unwrap();
    assert_eq!(findings, Vec::new(), "{text}");
    settings.plugin
}

const SHIPPED: &str = include_str!("../../../../config/config.toml");

/// The settings of a config.toml.
fn parsed(text: &str) -> Result<(Settings, Vec<Finding>)> {
    let Settings {
        mut common,
        mut plugin,
        kubelet_dir,
    } = Settings::default();
    let findings = config::parse_into(&mut common, &mut plugin, text, Path::new("/c.toml"))?;
    Ok((
        Settings {
            common,
            plugin,
            kubelet_dir,
        },
        findings,
    ))
}

/// The shipped file with its settings, which are comments.
fn uncommented() -> String {
    let lines = SHIPPED.lines().map(|line| match line.strip_prefix('#') {
        Some(setting) if !setting.starts_with(' ') && !setting.is_empty() => setting,
        _ => line,
    });
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn the_shipped_file_is_the_default() {
    assert_eq!(parsed(SHIPPED).unwrap(), (Settings::default(), Vec::new()));
    let (mut found, findings) = parsed(&uncommented()).unwrap();
    assert_eq!(
        found.plugin.resources[0].name, "nvidia.com/h100",
        "an example"
    );
    found.plugin.resources.clear();
    assert_eq!((found.plugin, findings), (Plugin::default(), Vec::new()));
}

#[test]
fn every_setting_is_documented() {
    let keys = include_str!("../../../../docs/man/oci-nvidia-hook.toml.5");
    let options = include_str!("../../../../docs/man/oci-nvidia-kubelet-plugin.8");
    let table = SHIPPED
        .split("\n[kubelet-plugin]\n")
        .nth(1)
        .unwrap()
        .split("\n[")
        .next()
        .unwrap();
    for table::Setting { name, .. } in SETTINGS {
        assert!(
            table.contains(&format!("\n#{name} = ")),
            "{name} is not in config/config.toml"
        );
        assert!(
            keys.contains(&format!("\n.BR {name} \"")),
            "{name} is not in oci-nvidia-hook.toml(5)"
        );
        let option = format!("\n.B \\-\\-{}", name.replace('-', "\\-"));
        let is_end = |rest: &str| rest.starts_with([' ', '\\']);
        assert!(
            options.split(&option).skip(1).any(is_end),
            "--{name} is not in oci-nvidia-kubelet-plugin(8)"
        );
    }
}

/// Returns the entry of a man page that begins with this text.
fn entry<'a>(page: &'a str, head: &str) -> &'a str {
    let (_, rest) = page
        .split_once(head)
        .unwrap_or_else(|| panic!("{head:?} is missing"));
    rest.split("\n.TP\n").next().unwrap()
}

/// The values that the program accepts are in its help and in oci-nvidia-hook.toml(5).
#[test]
fn every_value_is_documented() {
    let keys = include_str!("../../../../docs/man/oci-nvidia-hook.toml.5").replace("\\-", "-");
    let mut seen = 0;
    for setting in SETTINGS {
        let name = setting.name;
        let Err(allowed) = setting.set(&mut Plugin::default(), &["?"]) else {
            continue;
        };
        let key = entry(&keys, &format!("\n.TP\n.BR {name} \""));
        let help = setting.option().get_help().unwrap().to_string();
        // Others have examples, which need not be documented.
        let quoted = allowed.split('"').skip(1).step_by(2);
        for value in quoted.filter(|value| *value != "?" && !value.contains('.')) {
            for place in [key, &help] {
                assert!(place.contains(value), "{name}, {value}: {place}");
            }
            seen += 1;
        }
    }
    assert!(seen > 20, "{seen}");
}

#[test]
fn xids_that_are_ignored() {
    let ignored = Plugin::default().ignored_xids;
    assert!(ignored.is_sorted_by(|a, b| a < b), "{ignored:?}");
    let config = parsed("[kubelet-plugin]\nignored-xids = \"all\"")
        .unwrap()
        .0;
    assert!(config.plugin.ignored_xids.contains(&119));
    // A page fault, a contained memory error; a double-bit error, a lost GPU, an uncontained memory error, two that need a reset
    for (xid, expected) in [
        (31, true),
        (94, true),
        (48, false),
        (79, false),
        (95, false),
        (109, false),
        (119, false),
        (200, false),
    ] {
        assert_eq!(ignored.contains(&xid), expected, "{xid}");
    }
}

#[test]
fn more_xids_that_are_ignored() {
    for (value, xids) in [
        ("all", &[31, 79][..]),
        ("xids", &[31, 79]),
        ("79, 48", &[31, 79, 48]),
    ] {
        let variables = [("DP_DISABLE_HEALTHCHECKS", value)];
        let (settings, _) = applied(&inputs(&[], &variables, "")).unwrap();
        for xid in xids {
            assert!(settings.plugin.ignored_xids.contains(xid), "{value}: {xid}");
        }
    }
    assert!(applied(&inputs(&[], &[("DP_DISABLE_HEALTHCHECKS", "x")], "")).is_err());
}

#[test]
fn values_of_config_toml() {
    let (found, findings) = parsed(
        "disable-require = true\n[kubelet-plugin]\nreplicas = 2\nignored-xids = []\nlabels = false\nnvml-timeout = 7\n\
         mig-strategy = \"single\"\npass-device-specs = false\ndevice-list-strategy = [\"cdi-cri\", \"envvar\"]\n\
         resources = [{ name = \"a.b/c\", model = \"*, 80GB\", replicas = 3 }]\n[oci-nvidia-hook]\nnvml-timeout = 8\n",
    )
    .unwrap();
    assert_eq!(findings, Vec::new());
    let row = resources::ResourceRow {
        name: "a.b/c".into(),
        model: "*, 80GB".into(),
        replicas: Some(3),
    };
    let expected = Plugin {
        replicas: 2,
        ignored_xids: Vec::new(),
        labels: Some(false),
        nvml_timeout: std::time::Duration::from_secs(7),
        mig_strategy: MigStrategy::Single,
        pass_device_specs: false,
        device_list_strategy: vec![DeviceListStrategy::CdiCri, DeviceListStrategy::Envvar],
        resources: vec![row],
        ..Plugin::default()
    };
    assert_eq!(found.plugin, expected);
    assert!(found.common.disable_require && found.common.nvml_timeout.as_secs() == 8);
}

#[test]
fn strategies_as_one_string() {
    use DeviceListStrategy::{CdiAnnotations, VolumeMounts};
    let of = |value: &str| {
        parsed(&format!("[kubelet-plugin]\ndevice-list-strategy = {value}"))
            .unwrap()
            .0
            .plugin
    };
    assert_eq!(of("\"volume-mounts\"").device_list_strategy, [VolumeMounts]);
    assert_eq!(
        of("\"volume-mounts, cdi-annotations\"").device_list_strategy,
        [VolumeMounts, CdiAnnotations]
    );
}

#[test]
fn mounts_that_the_hook_does_not_accept() {
    let of = |strategies: &[DeviceListStrategy], accept_volume_mounts: bool| {
        let plugin = Plugin {
            device_list_strategy: strategies.to_vec(),
            ..Plugin::default()
        };
        let common = nvidia_host::config::Config {
            accept_volume_mounts,
            ..Default::default()
        };
        unaccepted_mounts(&Settings {
            common,
            plugin,
            ..Settings::default()
        })
        .map(|finding| finding.kind.id())
    };
    assert_eq!(
        of(&[DeviceListStrategy::VolumeMounts], false),
        Some("ONH-076")
    );
    assert_eq!(of(&[DeviceListStrategy::VolumeMounts], true), None);
    assert_eq!(of(&[DeviceListStrategy::Envvar], false), None);
}

#[test]
fn wrong_values_of_config_toml() {
    for (text, says) in rows! {
        "[kubelet-plugin]\nreplicas = 0", "line 2: kubelet-plugin.replicas has an invalid value; it must be a number";
        "[kubelet-plugin]\nreplicas = -1", "it must be a number";
        "[kubelet-plugin]\nignored-xids = [\"13\"]", "it must be a list of numbers, or \"all\"";
        "[kubelet-plugin]\nresource-prefix = \"nvidia com\"", "it must be a DNS name";
        "[kubelet-plugin]\nmig-strategy = \"both\"", "it must be \"none\", \"single\" or \"mixed\"";
        "[kubelet-plugin]\ndevice-list-strategy = [\"cdi\"]",
            "line 2: kubelet-plugin.device-list-strategy has an invalid value; it must be a list of \"envvar\", ";
        "[kubelet-plugin]\ndevice-list-strategy = [\"host-path\", \"envvar\"]", "and \"host-path\" alone";
        "[kubelet-plugin]\ndevice-id-strategy = \"name\"", "it must be \"uuid\" or \"index\"";
        "[kubelet-plugin]\nhost-path = \"x\"", "it must be an absolute path";
        "[kubelet-plugin]\nallocation = \"spread\"", "it must be \"distributed\" or \"packed\"";
        "[kubelet-plugin]\nresources = [\"a\"]", "and an entry is not a table";
        "[kubelet-plugin]\nresources = [{ name = \"a.b/c\" }]", "and \"a.b/c\" has no model";
        "[kubelet-plugin]\nresources = [{ name = 1 }]", "and \"name\" has a value of the wrong type";
        "[kubelet-plugin]\nresources = [{ nam = \"x\" }]", "and \"nam\" is not one of name, model and replicas";
        "[kubelet-plugin]\nlabels = \"yes\"", "it must be true, false or \"auto\"";
        "[kubelet-plugin]\nquiet-period = 601", "it must be a number of seconds from 1 to 600";
    } {
        let text = render(&parsed(text).unwrap_err());
        assert!(text.contains(says), "{text}");
        assert_eq!(text.lines().count(), 2, "{text}");
    }
    let (_, findings) = parsed(
        "[kubelet-plugin]\nreplica = 2\n[kubelet-plugins]\nx = 1\n[devices]\nmig-strategy = \"single\"\n",
    )
    .unwrap();
    let found: Vec<_> = findings
        .iter()
        .map(|finding| (&*finding.what, &*finding.fix))
        .collect();
    let expected = [
        (
            "\"/c.toml\" line 6: unknown key \"devices.mig-strategy\"",
            "did you mean kubelet-plugin.mig-strategy?",
        ),
        (
            "\"/c.toml\" line 2: unknown key \"kubelet-plugin.replica\"",
            "did you mean kubelet-plugin.replicas?",
        ),
        (
            "\"/c.toml\" line 3: unknown key \"kubelet-plugins\"",
            "did you mean kubelet-plugin?",
        ),
    ];
    assert_eq!(found, expected);
}

#[test]
fn values_of_options() {
    let applied = |flags: &[&str]| {
        let mut plugin = Plugin::default();
        given(flags).apply(&mut plugin).map(|()| plugin)
    };
    let found = applied(&[
        "--replicas=2",
        "--replicas=3",
        "--resources=name=a.b/c,model=*A*",
        "--resources=name=a.b/d,model=*B*,replicas=2",
        "--ignored-xids=13, 31",
        "--ignored-xids=43",
        "--device-list-strategy=",
        "--pass-device-specs=0",
        "--labels=auto",
        "--metrics-address=:2112",
        "--quiet-period=600",
        "--host-path=/x",
    ])
    .unwrap();
    assert_eq!(
        (found.replicas, found.resources.len(), &*found.ignored_xids),
        (3, 2, &[13, 31, 43][..])
    );
    assert_eq!(
        (
            found.device_list_strategy.len(),
            found.pass_device_specs,
            found.labels
        ),
        (0, false, None)
    );
    assert_eq!(
        (found.quiet_period.as_secs(), &*found.host_path),
        (600, Path::new("/x"))
    );
    // The unit passes a variable, which may be empty.
    let address = |flags| {
        applied(flags)
            .unwrap()
            .metrics_address
            .map(|address| address.port())
    };
    assert_eq!(address(&["--metrics-address", ""]), None);
    assert_eq!(
        address(&["--metrics-address=:1", "--metrics-address", ":2"]),
        Some(2)
    );
    for (flag, says) in rows! {
        "--replicas=many", "--replicas has an invalid value; it must be a number from 1 to 100 (ONH-002)";
        "--resources=x", "it must be name=NAME,model=PATTERN[,replicas=N], and \"x\" is not KEY=VALUE";
        "--ignored-xids=a", "it must be a list of numbers";
        "--quiet-period=0", "it must be a number of seconds from 1 to 600";
        "--labels=maybe", "it must be true, false or \"auto\"";
        "--labels-dir=x", "it must be an absolute path";
        "--mig-strategy=", "it must be \"none\", \"single\" or \"mixed\"";
    } {
        let text = render(&applied(&[flag]).unwrap_err());
        assert!(text.contains(says), "{text}");
    }
}

#[test]
fn addresses_for_metrics() {
    for (text, expected) in [
        ("127.0.0.1:2112", Some("127.0.0.1:2112")),
        ("[::1]:9400", Some("[::1]:9400")),
        (":2112", Some("[::]:2112")),
        ("", None),
    ] {
        let found = parse::address(&[text])
            .unwrap()
            .map(|address| address.to_string());
        assert_eq!(found.as_deref(), expected, "{text:?}");
    }
    for text in [
        "2112",
        "localhost:2112",
        ":",
        ":70000",
        "127.0.0.1",
        "unix:/run/x",
    ] {
        assert!(parse::address(&[text]).is_err(), "{text:?}");
    }
}

#[test]
fn every_option_has_its_place() {
    for option in OPTIONS {
        assert!(!option.variable.is_empty(), "{option:?}");
        if let Effect::Setting(name) = option.effect {
            assert!(table::find(name).is_some(), "{option:?}");
        }
        if option.names.is_empty() {
            continue;
        }
        let own = crate::commands::cli::Cli::try_parse_from([
            "x",
            "check",
            &format!("--{}=x", option.name()),
        ]);
        // The value may be wrong, but the option is known.
        let kind = own.err().map(|error| error.kind());
        assert_ne!(
            kind,
            Some(clap::error::ErrorKind::UnknownArgument),
            "{option:?}"
        );
    }
}

#[test]
fn precedence() {
    let file = "version: v1\nflags:\n  migStrategy: single\n  plugin: {deviceIDStrategy: index}\n";
    let with = |flags, variables| applied(&inputs(flags, variables, file)).unwrap().0;
    let settings = with(&[], &[]);
    assert_eq!(settings.plugin.mig_strategy, MigStrategy::Single);
    assert_eq!(settings.plugin.device_id_strategy, DeviceIdStrategy::Index);
    let settings = with(
        &["--driver-root=/b"],
        &[("MIG_STRATEGY", "mixed"), ("NVIDIA_DRIVER_ROOT", "/a")],
    );
    assert_eq!(settings.plugin.mig_strategy, MigStrategy::Mixed);
    assert_eq!(settings.common.driver_root.as_path(), Path::new("/b"));
    assert_eq!(settings.plugin.device_id_strategy, DeviceIdStrategy::Index);
    let dir = with(&["--kubelet-socket", "/k/device-plugins/kubelet.sock"], &[]).kubelet_dir;
    assert_eq!(dir, Path::new("/k"));
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
        assert_eq!(
            defaults.plugin.mig_strategy, expected,
            "{flags:?} {variables:?}"
        );
    }
}

/// The command line has precedence over variables, and these over the file.
#[test]
fn devices_next_to_the_gpus() {
    let file = "version: v1\nflags: {gdrcopyEnabled: true, gdsEnabled: true}\n";
    for (flags, variables, file, expected) in rows! {
        &[][..], &[][..], file, &["gds", "gdrcopy"][..];
        &[], &[("GDS_ENABLED", "0"), ("MOFED_ENABLED", "1")], file, &["mofed", "gdrcopy"];
        &["--gds-enabled", "--mofed-enabled=false"], &[("MOFED_ENABLED", "true")], "", &["gds"];
        &["--gdrcopy-enabled=false"], &[], file, &["gds"];
    } {
        let (Settings { plugin, .. }, findings) = applied(&inputs(flags, variables, file)).unwrap();
        assert_eq!(
            (plugin.extra_devices.names(), findings),
            (names(expected), vec![]),
            "{flags:?} {variables:?}"
        );
    }
    let error = render(
        &applied(&inputs(
            &[],
            &[],
            "version: v1\nflags: {mofedEnabled: many}\n",
        ))
        .unwrap_err(),
    );
    assert!(
        error.contains("line 2: flags.mofedEnabled has an invalid value; it must be true or false"),
        "{error}"
    );
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn options_and_variables() {
    for (flags, variables, finds) in rows! {
        &["--fail-on-init-error=false", "--mps-root=/x", "--gds-enabled=false"][..], &[][..], &[][..];
        &["--imex-required", "--nvidia-ctk-path=/x"], &[], &["--nvidia-cdi-hook-path has no", "--imex-required has no effect"];
        &[], &[("DEVICE_DISCOVERY_STRATEGY", "auto"), ("DRIVER_ROOT_CTR_PATH", "/driver-root")], &[];
        &[], &[("DP_ENABLE_HEALTHCHECKS", "13")], &["DP_ENABLE_HEALTHCHECKS has no effect: ignored-xids"];
        &[], &[("DEVICE_DISCOVERY_STRATEGY", "tegra"), ("USE_NODE_FEATURE_API", "true")],
            &["USE_NODE_FEATURE_API has no effect: the labels are in a file", "DEVICE_DISCOVERY_STRATEGY has no effect: "];
        &["--imex-channel-ids=0"], &[("IMEX_REQUIRED", "1")], &["IMEX_REQUIRED has no", "--imex-channel-ids has no"];
    } {
        let (_, findings) = applied(&inputs(flags, variables, "")).unwrap();
        assert_eq!(findings.len(), finds.len(), "{findings:?}");
        for (finding, text) in findings.iter().zip(finds) {
            assert!(
                finding.what.starts_with(text) && finding.kind.id() == "ONH-604",
                "{finding:?}"
            );
        }
    }
    let plugin = applied(&inputs(
        &["--shared-devices-allocation-policy=packed"],
        &[
            ("DEVICE_LIST_STRATEGY", "envvar, cdi-cri"),
            ("PASS_DEVICE_SPECS", "0"),
        ],
        "",
    ));
    let plugin = plugin.unwrap().0.plugin;
    assert_eq!(
        plugin.device_list_strategy,
        [DeviceListStrategy::Envvar, DeviceListStrategy::CdiCri]
    );
    assert!(!plugin.pass_device_specs);
    assert_eq!(plugin.allocation, Allocation::Packed);
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
    assert_eq!(
        (
            plugin.resources[0].name.as_str(),
            plugin.resources[0].model.as_str()
        ),
        ("nvidia.com/h100", "*H100*")
    );
    let slices: Vec<_> = plugin
        .shared_resources
        .iter()
        .map(|row| (&*row.name, row.rename.as_deref(), row.replicas))
        .collect();
    assert_eq!(
        slices,
        [
            ("nvidia.com/gpu", Some("nvidia.com/gpu.shared"), 4),
            ("nvidia.com/mig-1g.5gb", Some("a.b/c"), 2)
        ]
    );
    let mps = of_file(
        "version: v1\nsharing:\n  mps:\n    renameByDefault: true\n    resources: [{name: gpu, devices: all, replicas: 4}]\n\
         \x20 timeSlicing: {resources: [{name: mig-1g.5gb, replicas: 2}]}",
    );
    let rows: Vec<_> = mps
        .shared_resources
        .iter()
        .map(|row| (row.rename.as_deref(), row.replicas, row.strategy))
        .collect();
    assert_eq!(
        rows,
        [
            (None, 2, SharingStrategy::TimeSlicing),
            (Some("nvidia.com/gpu.shared"), 4, SharingStrategy::Mps)
        ]
    );
    assert!(mps.several_replicas, "only of the MIG devices");
    assert!(
        !of_file("version: v1\nsharing: {mps: {resources: [{name: gpu, replicas: 2}]}}")
            .several_replicas
    );
    let strict = of_file(
        "version: v1\nsharing: {timeSlicing: {failRequestsGreaterThanOne: true, resources: [{name: gpu, replicas: 2}]}}",
    );
    assert!(!strict.several_replicas && strict.shared_resources[0].rename.is_none());
    assert_eq!(
        of_file("{\"version\": \"v1\", \"flags\": {\"plugin\": null}}"),
        Plugin::default()
    );
    let list = of_file("version: v1\nflags: {plugin: {deviceListStrategy: envvar}}\n")
        .device_list_strategy;
    assert_eq!(list, [DeviceListStrategy::Envvar]);
}

#[test]
fn what_the_file_cannot_have() {
    for (text, says) in rows! {
        "", "\"/c.yaml\" line 1: version has an invalid value; it must be \"v1\"";
        "\nversion: v2\n", "\"/c.yaml\" line 2: version has";
        "version: v1\nflags: [\n", "\"/c.yaml\" line ";
        "- version: v1\n", "line 1: version has";
        "version: v1\nflags:\n  migStrategy: both\n", "line 3: flags.migStrategy has an invalid value; it must be \"none\",";
        "version: v1\nflags:\n  plugin:\n    passDeviceSpecs: maybe\n", "line 4: flags.plugin.passDeviceSpecs has an invalid value";
        "version: v1\nflags: {plugin: {deviceListStrategy: {a: b}}}", "line 2: flags.plugin.deviceListStrategy has";
        "version: v1\nflags: 3\n", "line 2: flags has an invalid value; it must be a map";
        "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - name: gpu\n      replicas: 0\n",
            "line 6: sharing.timeSlicing.resources.0.replicas has an invalid value; it must be a number from 1 to 100";
        "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - replicas: 2\n      name: a b\n",
            "line 6: sharing.timeSlicing.resources.0.name has";
        "version: v1\nsharing:\n  timeSlicing: {resources: [{name: gpu, replicas: 2}]}\n  mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}",
            "line 4: sharing.mps.resources.0.name has an invalid value; it must be a resource that is not in sharing.timeSlicing too";
        "version: v1\nsharing: {mps: {resources: [{name: gpu, replicas: 101}]}}",
            "sharing.mps.resources.0.replicas has an invalid value; it must be a number from 1 to 100";
        "version: v1\nsharing: {timeSlicing: {renameByDefault: 1}}", "renameByDefault has an invalid value; it must be true or false";
        "version: v1\nresources: {gpus: [{name: gpu}]}", "line 2: resources.gpus has";
    } {
        let text = render(&applied(&inputs(&[], &[], &format!("{text}\n"))).unwrap_err());
        assert!(text.contains(says) && text.contains("(ONH-075)"), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
    for (text, says) in rows! {
        "imex: {channelIDs: [0]}", "\"/c.yaml\" line 2: imex.channelIDs has no effect: ";
        "sharing: {mps: {failRequestsGreaterThanOne: false, resources: [{name: gpu, replicas: 2}]}}",
            "line 2: sharing.mps.failRequestsGreaterThanOne has no effect: a container gets one replica";
        "flags: {deviceDiscoveryStrategy: tegra}", "line 2: flags.deviceDiscoveryStrategy has no effect: ";
        "flags: {x: true}", "line 2: flags.x has no effect: the key is unknown";
        "x: {}", "line 2: x has no effect";
        "flags: {renameByDefault: true}", "line 2: flags.renameByDefault has no effect: the key is unknown";
        "resources: {mig: [{pattern: \"*\", name: a}]}", "line 2: resources.mig has no effect";
        "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0]}]}}", "resources.0.devices has no effect";
    } {
        let (_, findings) = applied(&inputs(&[], &[], &format!("version: v1\n{text}\n"))).unwrap();
        assert!(
            findings.len() == 1 && findings[0].what.contains(says),
            "{findings:?}"
        );
    }
}

#[test]
fn keys_of_files_that_people_write() {
    let merged = of_file(
        "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - &all {name: gpu, replicas: 3}\n\
         \x20   - {<<: *all, name: a}\n    - {<<: [{replicas: 5}, *all], name: b}\n    - {<<: *all, replicas: 7, name: c}\n",
    );
    let mut slices = Vec::new();
    for row in &merged.shared_resources {
        slices.push((row.name.as_str(), row.replicas));
    }
    assert_eq!(
        slices,
        [
            ("nvidia.com/gpu", 3),
            ("nvidia.com/a", 3),
            ("nvidia.com/b", 5),
            ("nvidia.com/c", 7)
        ]
    );
    let text = "version: v1\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}, {name: nvidia.com/gpu, replicas: 8}]}}\n";
    let (settings, findings) = applied(&inputs(&[], &[], text)).unwrap();
    let what = "line 2: sharing.timeSlicing.resources.1 has no effect: an earlier entry is about \"nvidia.com/gpu\"";
    assert!(
        findings.len() == 1 && findings[0].what.contains(what),
        "{findings:?}"
    );
    assert_eq!(settings.plugin.shared_resources[0].replicas, 4);
    // The key is not in the text.
    let text = "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {name: gpu, replicas: 4}\n    - {<<: {replicas: 0}, name: a}\n";
    let error = render(&applied(&inputs(&[], &[], text)).unwrap_err());
    assert!(
        error.contains("line 6: sharing.timeSlicing.resources.1.replicas has"),
        "{error}"
    );
}

#[test]
fn errors_name_their_place() {
    for (flags, variables, says) in rows! {
        &["--driver-root=x"][..], &[][..], "--nvidia-driver-root has an invalid value; it must be an absolute path (ONH-002)";
        &["--kubelet-socket=/x.sock"], &[], "it must be an absolute path that ends in \"device-plugins/kubelet.sock\"";
        &[], &[("DEVICE_LIST_STRATEGY", "cdi")],
            "the environment variable DEVICE_LIST_STRATEGY has an invalid value; it must be a list of \"envvar\"";
        &[], &[("PASS_DEVICE_SPECS", "maybe")], "it must be true or false (ONH-075)";
    } {
        let text = render(&applied(&inputs(flags, variables, "")).unwrap_err());
        assert!(text.contains(says), "{text}");
    }
}

#[test]
fn gkes_file() {
    let of = |text: &str| {
        let mut plugin = Plugin::default();
        let findings = gke::apply(&mut plugin, Path::new("/gpu_config.json"), text)?;
        let is_mps = plugin.sharing == SharingStrategy::Mps;
        let mut notes: Vec<_> = findings.iter().map(|f| f.what.clone()).collect();
        notes.extend(is_mps.then(|| "mps".to_owned()));
        anyhow::Ok((plugin.replicas, plugin.mig_strategy, notes.join("; ")))
    };
    let (single, mixed) = (MigStrategy::Single, MigStrategy::Mixed);
    for (text, replicas, mig, finds) in rows! {
        "{}", 1, mixed, "";
        "", 1, mixed, "";
        r#"{"GPUPartitionSize":"","GPUSharingConfig":{"GPUSharingStrategy":"","MaxSharedClientsPerGPU":0}}"#, 1, mixed, "";
        r#"{"GPUPartitionSize":"1g.5gb"}"#, 1, single, "";
        r#"{"MaxTimeSharedClientsPerGPU":3}"#, 3, mixed, "";
        r#"{"MaxTimeSharedClientsPerGPU":3,"GPUSharingConfig":{"GPUSharingStrategy":"time-sharing","MaxSharedClientsPerGPU":2}}"#, 3,
            mixed, "";
        r#"{"GPUSharingConfig":{"MaxSharedClientsPerGPU":2,"GPUSharingStrategy":"mps"}}"#, 2, mixed, "mps";
        r#"{"MaxTimeSharedClientsPerGPU":4,"GPUSharingConfig":{"GPUSharingStrategy":"","MaxSharedClientsPerGPU":0}}"#, 4, mixed, "";
        r#"{"MaxTimeSharedClientsPerGPU":4,"GPUSharingConfig":{"GPUSharingStrategy":"time-sharing"}}"#, 4, mixed, "";
        r#"{"HealthCriticalXid":[61,62]}"#, 1, mixed, "";
        r#"{"GPUFractionDivisor":4}"#, 1, mixed,
            "\"/gpu_config.json\" line 1: GPUFractionDivisor has no effect: parts of a GPU are not offered without MIG";
        r#"{"x":1}"#, 1, mixed, "\"/gpu_config.json\" line 1: x has no effect: the key is unknown";
    } {
        assert_eq!(
            of(text).unwrap(),
            (replicas, mig, finds.to_owned()),
            "{text}"
        );
    }
    for (text, says) in rows! {
        "{", "\"/gpu_config.json\" line ";
        "{\"GPUPartitionSize\":\n1}", "line 1: GPUPartitionSize has an invalid value; it must be a string";
        "{\"GPUSharingConfig\":{\n\"GPUSharingStrategy\":\"time-sharing\",\n\"MaxSharedClientsPerGPU\":101}}",
            "line 3: GPUSharingConfig.MaxSharedClientsPerGPU has an invalid value; it must be a number from 1 to 100";
        r#"{"GPUSharingConfig":{"GPUSharingStrategy":"x"}}"#, "it must be \"time-sharing\"";
    } {
        let text = render(&of(text).unwrap_err());
        assert!(text.contains(says), "{text}");
    }
    for text in [
        r#"{"GPUSharingConfig":{"GPUSharingStrategy":"time-sharing"}}"#,
        r#"{"GPUSharingConfig":{"GPUSharingStrategy":"mps"}}"#,
        r#"{"GPUSharingConfig":{"GPUSharingStrategy":"time-sharing","MaxSharedClientsPerGPU":0}}"#,
        r#"{"HealthCriticalXid":61}"#,
    ] {
        assert!(of(text).is_err(), "{text}");
    }
    let mut plugin = Plugin::default();
    assert!(plugin.ignored_xids.contains(&13));
    let text = r#"{"HealthCriticalXid":[13]}"#;
    gke::apply(&mut plugin, Path::new("/x"), text).unwrap();
    assert!(!plugin.ignored_xids.contains(&13));
}

proptest::proptest! {
    #[test]
    fn a_damaged_config_toml(at in 0..SHIPPED.len(), with in proptest::prelude::any::<char>()) {
        let mut text: Vec<char> = uncommented().chars().collect();
        if let Some(c) = text.get_mut(at) {
            *c = with;
        }
        parsed(&text.into_iter().collect::<String>()).ok();
    }

    #[test]
    fn no_text_ends_the_program(text in "\\PC{0,80}", key in "[a-zA-Z]{1,8}", value in "[\\[\\]{}a-z0-9:, \n-]{0,30}") {
        for text in [text, format!("version: v1\n{key}: {value}"), format!("version: v1\nsharing: {{timeSlicing: {{resources: [{value}]}}}}")] {
            applied(&inputs(&[], &[], &text)).ok();
            gke::apply(&mut Plugin::default(), Path::new("/x"), &text).ok();
        }
    }
}

#[test]
fn settings_that_claims_do_not_have() {
    let unused = |change: &dyn Fn(&mut Plugin)| {
        let mut plugin = Plugin {
            interface: Interface::Dra,
            ..Plugin::default()
        };
        change(&mut plugin);
        let names = unused_by_claims(&plugin).into_iter().map(|f| f.what);
        names.collect::<Vec<_>>().join("; ")
    };
    assert_eq!(unused(&|_| ()), "");
    let found = unused(&|plugin| {
        plugin.replicas = 4;
        plugin.mig_strategy = MigStrategy::Single;
    });
    assert_eq!(
        found,
        "replicas has no effect with interface = \"dra\"; \
         mig-strategy = \"single\" has no effect with interface = \"dra\""
    );
    let found = unused(&|plugin| {
        plugin.interface = Interface::DevicePlugin;
        plugin.replicas = 4;
    });
    assert_eq!(found, "");
}
