use std::collections::BTreeMap;
use std::path::Path;

use base::paths::HostPath;
use base::report::{ErrorReport, render};
use proptest::prelude::*;

use super::*;

const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";
const CUDA: &str = "CUDA_VERSION";

/// A container as a row of a table describes it.
#[derive(Clone, Debug, Default)]
struct Asking {
    env: BTreeMap<String, String>,
    /// Destinations of mounts of `/dev/null`
    mounts: Vec<String>,
    /// Numbers of character devices, major and minor
    nodes: Vec<(u32, u32)>,
    privileged: bool,
}

impl Asking {
    fn of(env: &[(&str, &str)]) -> Self {
        let env = env
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Self {
            env: env.collect(),
            ..Self::default()
        }
    }

    fn with_mount(mut self, name: &str) -> Self {
        self.mounts
            .push(format!("/var/run/nvidia-container-devices/{name}"));
        self
    }

    /// With `/dev/nvidiactl` and `/dev/nvidia1`.
    fn with_nodes(self) -> Self {
        Self {
            nodes: vec![(195, 255), (195, 1)],
            ..self
        }
    }

    fn privileged(self) -> Self {
        Self {
            privileged: true,
            ..self
        }
    }

    fn view(&self) -> Container<'_> {
        let mount = |path| RequestMount {
            source: Path::new("/dev/null"),
            destination: Path::new(path),
        };
        let node = |&(major, minor)| Node {
            path: Path::new("/dev/x"),
            major: Some(major),
            minor: Some(minor),
        };
        Container {
            env: (&self.env).into(),
            mounts: self.mounts.iter().map(mount).collect(),
            nodes: self.nodes.iter().map(node).collect(),
            privileged: self.privileged,
        }
    }

    fn hint(&self) -> Hint {
        hint(&self.view())
    }

    fn decide(&self, config: &Config) -> Result<Decision> {
        decide(&self.view(), config)
    }

    /// Returns the request.
    #[track_caller]
    fn request(&self, config: &Config) -> GpuRequest {
        match self.decide(config) {
            Ok(Decision::Gpus(request)) => *request,
            other => panic!("{self:?}: {other:?}"),
        }
    }

    /// Returns the decision as text: the devices, or the number of the error.
    fn outcome(&self, config: &Config) -> String {
        match self.decide(config) {
            Ok(Decision::Gpus(request)) => request.devices.names().join(","),
            Ok(Decision::Nothing(_)) => "nothing".to_owned(),
            Ok(Decision::Refused(_)) => "refused".to_owned(),
            Err(error) => ErrorReport::new(&error).kind.id().to_owned(),
        }
    }
}

fn locked() -> Config {
    Config {
        accept_envvar_when_unprivileged: false,
        ..Config::default()
    }
}

fn by_mounts() -> Config {
    Config {
        accept_volume_mounts: true,
        ..locked()
    }
}

fn swarm() -> Config {
    let names = ["DOCKER_RESOURCE_GPU", "DOCKER_RESOURCE_TPU"];
    Config {
        swarm_resource: names.map(str::to_owned).to_vec(),
        ..Config::default()
    }
}

#[test]
fn config_is_read_only_if_it_can_matter() {
    for (asking, expected) in [
        (Asking::of(&[]), Hint::No),
        (Asking::of(&[("PATH", "/bin")]), Hint::No),
        (Asking::of(&[(VISIBLE, "void")]), Hint::No),
        (Asking::of(&[(CUDA, "9.0"), (VISIBLE, "")]), Hint::No),
        (
            Asking::of(&[(CUDA, "9.0"), ("NVIDIA_REQUIRE_CUDA", "x")]),
            Hint::No,
        ),
        (
            Asking::of(&[(CUDA, "9.0"), ("NVIDIA_REQUIRE_CUDA", "")]),
            Hint::Yes,
        ),
        (Asking::of(&[(CUDA, "9.0")]), Hint::Yes),
        (Asking::of(&[(CUDA, "")]), Hint::No),
        (Asking::of(&[(VISIBLE, "none")]), Hint::Yes),
        (Asking::of(&[("DOCKER_RESOURCE_GPU", "0")]), Hint::Perhaps),
        (Asking::of(&[]).with_mount("0"), Hint::Yes),
        (Asking::of(&[(VISIBLE, "void")]).with_mount("0"), Hint::Yes),
        (Asking::of(&[]).with_nodes(), Hint::Perhaps),
        (Asking::of(&[(VISIBLE, "0")]).with_nodes(), Hint::Yes),
        (Asking::of(&[(VISIBLE, "void")]).with_nodes(), Hint::No),
        (
            Asking {
                nodes: vec![(195, 255)],
                ..Asking::default()
            },
            Hint::No,
        ),
    ] {
        assert_eq!(asking.hint(), expected, "{asking:?}");
    }
}

#[test]
fn each_source_has_its_rank() {
    let open = Config::default();
    let both = Config {
        accept_volume_mounts: true,
        ..Config::default()
    };
    let all = Asking::of(&[(VISIBLE, "all")]);
    let old = Asking::of(&[(CUDA, "9.0")]);
    for (asking, [when_open, when_both, when_locked, when_mounts]) in [
        (Asking::of(&[]), ["nothing"; 4]),
        (
            Asking::of(&[(VISIBLE, "1,0,1")]),
            ["1,0", "1,0", "refused", "refused"],
        ),
        (all.clone(), ["all", "all", "refused", "refused"]),
        (all.clone().privileged(), ["all"; 4]),
        (old.clone(), ["all", "all", "refused", "refused"]),
        (old.clone().privileged(), ["all"; 4]),
        // A mount has precedence over the variable, and needs no privilege.
        (
            Asking::of(&[]).with_mount("GPU-1"),
            ["nothing", "GPU-1", "nothing", "GPU-1"],
        ),
        (
            all.clone().with_mount("GPU-1"),
            ["all", "GPU-1", "refused", "GPU-1"],
        ),
        (
            Asking::of(&[(VISIBLE, "void")]).with_mount("GPU-1"),
            ["nothing", "GPU-1", "nothing", "GPU-1"],
        ),
        (
            Asking::of(&[]).with_mount("../../etc"),
            ["nothing", "ONH-038", "nothing", "ONH-038"],
        ),
        // A mount of an IMEX channel alone requests no GPU.
        (Asking::of(&[]).with_mount("imex/0"), ["nothing"; 4]),
        // Nodes count if no accepted source says more.
        (Asking::of(&[]).with_nodes(), ["/dev/nvidia1"; 4]),
        (
            all.clone().with_nodes(),
            ["all", "all", "/dev/nvidia1", "/dev/nvidia1"],
        ),
        (
            old.with_nodes(),
            ["all", "all", "/dev/nvidia1", "/dev/nvidia1"],
        ),
        (
            Asking::of(&[(VISIBLE, "none")]).with_nodes(),
            ["none", "none", "refused", "refused"],
        ),
        (
            Asking::of(&[(VISIBLE, "void")]).with_nodes(),
            ["nothing"; 4],
        ),
        (Asking::of(&[(VISIBLE, "")]).with_nodes(), ["nothing"; 4]),
        (
            Asking::of(&[]).with_nodes().with_mount("GPU-1"),
            ["/dev/nvidia1", "GPU-1", "/dev/nvidia1", "GPU-1"],
        ),
    ] {
        let found = [&open, &both, &locked(), &by_mounts()].map(|config| asking.outcome(config));
        assert_eq!(
            found,
            [when_open, when_both, when_locked, when_mounts],
            "{asking:?}"
        );
        assert!(
            asking.hint() != Hint::No || found.iter().all(|text| text == "nothing"),
            "{asking:?}"
        );
    }
}

#[test]
fn a_swarm_variable_has_precedence() {
    for (env, outcome, asked_by) in [
        (
            &[("DOCKER_RESOURCE_GPU", "1")][..],
            "1",
            "DOCKER_RESOURCE_GPU",
        ),
        (
            &[("DOCKER_RESOURCE_GPU", "1"), (VISIBLE, "all")],
            "1",
            "DOCKER_RESOURCE_GPU",
        ),
        (
            &[("DOCKER_RESOURCE_GPU", "1"), (VISIBLE, "void")],
            "1",
            "DOCKER_RESOURCE_GPU",
        ),
        (
            &[("DOCKER_RESOURCE_TPU", "2"), ("DOCKER_RESOURCE_GPU", "1")],
            "1,2",
            "DOCKER_RESOURCE_GPU,DOCKER_RESOURCE_TPU",
        ),
        (
            &[("DOCKER_RESOURCE_OTHER", "1"), (VISIBLE, "0")],
            "0",
            VISIBLE,
        ),
    ] {
        let request = Asking::of(env).request(&swarm());
        assert_eq!(
            (request.devices.names().join(","), request.asked_by.as_str()),
            (outcome.to_owned(), asked_by)
        );
    }
    // An empty one is explicit: neither the other variable nor nodes count.
    let empty = Asking::of(&[("DOCKER_RESOURCE_GPU", ""), (VISIBLE, "all")]).with_nodes();
    assert_eq!(empty.outcome(&swarm()), "nothing");
    assert_eq!(empty.outcome(&Config::default()), "all");
    assert_eq!(
        Asking::of(&[("DOCKER_RESOURCE_GPU", "1")]).outcome(&locked()),
        "nothing"
    );
}

#[test]
fn the_origin_and_the_reason_are_named() {
    let origin = |asking: Asking, config: &Config| asking.request(config).asked_by;
    assert_eq!(
        origin(Asking::of(&[(VISIBLE, "0")]), &Config::default()),
        VISIBLE
    );
    assert_eq!(
        origin(Asking::of(&[(CUDA, "9.0")]), &Config::default()),
        CUDA
    );
    assert_eq!(
        origin(Asking::of(&[]).with_nodes(), &Config::default()),
        nodes::ORIGIN
    );
    assert_eq!(
        origin(Asking::of(&[(VISIBLE, "0")]).with_mount("1"), &by_mounts()),
        mounts::ORIGIN
    );
    for (asking, config, reason) in [
        (
            Asking::of(&[]),
            Config::default(),
            "NVIDIA_VISIBLE_DEVICES is not set",
        ),
        (
            Asking::of(&[(VISIBLE, "void")]),
            Config::default(),
            "NVIDIA_VISIBLE_DEVICES is \"void\"",
        ),
        (
            Asking::of(&[("DOCKER_RESOURCE_GPU", "")]),
            swarm(),
            "DOCKER_RESOURCE_GPU is \"\"",
        ),
        (
            Asking::of(&[(VISIBLE, "0")]),
            locked(),
            "NVIDIA_VISIBLE_DEVICES is ignored: the container is not privileged and \
             accept-nvidia-visible-devices-envvar-when-unprivileged is false",
        ),
    ] {
        let decision = asking.decide(&config).unwrap();
        assert!(
            matches!(&decision, Decision::Nothing(text) | Decision::Refused(text) if text == reason),
            "{decision:?}"
        );
    }
}

#[test]
fn capabilities_have_defaults_and_limits() {
    let named = |env: &[(&str, &str)], config: &Config| {
        Asking::of(env).request(config).capabilities.to_string()
    };
    let variable = "NVIDIA_DRIVER_CAPABILITIES";
    let open = Config::default();
    assert_eq!(named(&[(VISIBLE, "0")], &open), "compute,utility");
    assert_eq!(
        named(&[(VISIBLE, "0"), (variable, "video")], &open),
        "video"
    );
    let limited = Config {
        supported_driver_capabilities: Capabilities::supported("utility").unwrap(),
        ..Config::default()
    };
    assert_eq!(
        named(&[(VISIBLE, "0"), (variable, "all")], &limited),
        "utility"
    );
    // An image from before the variable gets everything that is supported.
    assert_eq!(named(&[(CUDA, "9.0")], &limited), "utility");
    assert!(named(&[(CUDA, "9.0")], &open).contains("graphics"));
    assert_eq!(
        Asking::of(&[(VISIBLE, "0"), (variable, "nonsense")]).outcome(&open),
        "ONH-036"
    );
}

#[test]
fn mig_management_needs_privilege() {
    for name in ["NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES"] {
        let asking = Asking::of(&[(VISIBLE, "all"), (name, "all")]);
        assert_eq!(asking.outcome(&Config::default()), "ONH-037", "{name}");
        let wanted = asking
            .clone()
            .privileged()
            .request(&Config::default())
            .wanted()
            .unwrap();
        let expected = (
            name == "NVIDIA_MIG_CONFIG_DEVICES",
            name == "NVIDIA_MIG_MONITOR_DEVICES",
        );
        assert_eq!((wanted.mig_config, wanted.mig_monitor), expected);
        let some = Asking::of(&[(VISIBLE, "all"), (name, "0")])
            .privileged()
            .request(&Config::default());
        assert!(
            render(&some.wanted().unwrap_err())
                .contains(&format!("{name}=\"0\" is not \"all\" (ONH-038)"))
        );
        let empty = Asking::of(&[(VISIBLE, "all"), (name, "")])
            .request(&Config::default())
            .wanted()
            .unwrap();
        assert!(!empty.mig_config && !empty.mig_monitor);
    }
}

#[test]
fn what_is_wanted_follows_from_the_request() {
    let wanted = |env: &[(&str, &str)]| Asking::of(env).request(&Config::default()).wanted();
    assert!(wanted(&[(VISIBLE, "0")]).unwrap().gpus);
    assert!(!wanted(&[(VISIBLE, "none")]).unwrap().gpus);
    let channels = wanted(&[(VISIBLE, "0"), ("NVIDIA_IMEX_CHANNELS", "3,1")])
        .unwrap()
        .imex_channels;
    assert_eq!(channels, [3, 1]);
    assert!(wanted(&[(VISIBLE, "0"), ("NVIDIA_IMEX_CHANNELS", "x")]).is_err());
}

#[test]
fn only_named_devices_are_examined_if_the_others_do_not_matter() {
    let limited = Config {
        devices: crate::config::Limits {
            deny: vec!["7".to_owned()],
            ..crate::config::Limits::default()
        },
        ..Config::default()
    };
    let open = Config::default();
    let mig = ("NVIDIA_MIG_CONFIG_DEVICES", "all");
    for (asking, config, names) in [
        (Asking::of(&[(VISIBLE, "1:0,GPU-1")]), &open, Some(2)),
        (Asking::of(&[(VISIBLE, "all")]), &open, None),
        (Asking::of(&[(VISIBLE, "1:0")]), &limited, None),
        (Asking::of(&[(VISIBLE, "1"), mig]).privileged(), &open, None),
    ] {
        let request = asking.request(config);
        assert_eq!(
            request.only_devices(config).map(<[_]>::len),
            names,
            "{asking:?}"
        );
    }
}

#[test]
fn imex_channels_are_accepted_like_gpus() {
    let variable = ("NVIDIA_IMEX_CHANNELS", "1,2");
    let ignoring = Config {
        ignore_imex_channels: true,
        ..by_mounts()
    };
    let (open, strict) = (Config::default(), by_mounts());
    for (asking, config, channels) in [
        (
            Asking::of(&[(VISIBLE, "0"), variable]),
            &open,
            &["1", "2"][..],
        ),
        (
            Asking::of(&[(VISIBLE, "0"), ("NVIDIA_IMEX_CHANNELS", "all")]),
            &open,
            &[],
        ),
        (
            Asking::of(&[(VISIBLE, "0"), ("NVIDIA_IMEX_CHANNELS", "none")]),
            &open,
            &[],
        ),
        (Asking::of(&[(VISIBLE, "0")]), &open, &[]),
        (
            Asking::of(&[(VISIBLE, "0"), variable])
                .privileged()
                .with_mount("imex/7"),
            &strict,
            &["7"],
        ),
        (
            Asking::of(&[(VISIBLE, "0"), variable]).privileged(),
            &strict,
            &["1", "2"],
        ),
        // The variable of an unprivileged container does not count, although its mount requests a GPU.
        (Asking::of(&[variable]).with_mount("0"), &strict, &[]),
        (
            Asking::of(&[(VISIBLE, "0"), variable])
                .privileged()
                .with_mount("imex/7"),
            &ignoring,
            &[],
        ),
    ] {
        assert_eq!(asking.request(config).imex_channels, channels, "{asking:?}");
    }
}

#[test]
fn a_switch_without_effect_is_reported() {
    for (value, hint) in [
        ("true", None),
        ("1", None),
        ("False", None),
        ("", None),
        ("\"true\"", Some("remove the quotes")),
        ("yes", Some("set NVIDIA_DISABLE_REQUIRE=true")),
        ("TrUe", Some("set NVIDIA_DISABLE_REQUIRE=true")),
    ] {
        let asking = Asking::of(&[(VISIBLE, "0"), ("NVIDIA_DISABLE_REQUIRE", value)]);
        let remarks = asking.request(&Config::default()).remarks;
        let hints: Vec<_> = remarks.iter().map(|finding| finding.fix.as_str()).collect();
        assert_eq!(
            hints.len(),
            usize::from(hint.is_some()),
            "{value}: {hints:?}"
        );
        if let Some(hint) = hint {
            assert!(hints[0].starts_with(hint), "{value}: {hints:?}");
        }
    }
}

#[test]
fn features_are_accepted_like_gpus() {
    let gpu = (VISIBLE, "0");
    let named = |asking: &Asking, config: &Config| {
        let request = asking.request(config);
        let ids: Vec<_> = request
            .remarks
            .iter()
            .map(|finding| finding.kind.id())
            .collect();
        (request.features.names().join(","), ids.join(","))
    };
    let (open, strict) = (Config::default(), by_mounts());
    let all = [
        gpu,
        ("NVIDIA_GDS", "enabled"),
        ("NVIDIA_MOFED", "enabled"),
        ("NVIDIA_GDRCOPY", "enabled"),
    ];
    let all = [&all[..], &[("NVIDIA_NVSWITCH", "enabled")]].concat();
    for (asking, config, features, remarks) in [
        (Asking::of(&[gpu]), &open, "", ""),
        (Asking::of(&all), &open, "gds,mofed,gdrcopy,nvswitch", ""),
        (Asking::of(&[gpu, ("NVIDIA_GDS", "")]), &open, "", ""),
        (
            Asking::of(&[gpu, ("NVIDIA_GDS", "Enabled")]),
            &open,
            "",
            "ONH-115",
        ),
        (
            Asking::of(&[gpu, ("NVIDIA_MOFED", "1"), ("NVIDIA_GDS", "enabled")]),
            &open,
            "gds",
            "ONH-115",
        ),
        (
            Asking::of(&[gpu, ("NVIDIA_NVSWITCH", "enabled")]).privileged(),
            &strict,
            "nvswitch",
            "",
        ),
        // The variable of an unprivileged container does not count, although its mount requests a GPU.
        (
            Asking::of(&[("NVIDIA_GDS", "enabled")]).with_mount("0"),
            &strict,
            "",
            "ONH-103",
        ),
        (
            Asking::of(&[])
                .with_mount("0")
                .with_mount("cdi/nvidia.com/gds/all"),
            &strict,
            "gds",
            "",
        ),
        (
            Asking::of(&[])
                .with_mount("0")
                .with_mount("cdi/nvidia.com/gdrcopy=all"),
            &strict,
            "gdrcopy",
            "",
        ),
        (
            Asking::of(&[("NVIDIA_MOFED", "enabled")])
                .with_mount("0")
                .with_mount("cdi/nvidia.com/mofed=all"),
            &strict,
            "mofed",
            "",
        ),
        (
            Asking::of(&[gpu]).with_mount("cdi/nvidia.com/gds=all"),
            &open,
            "",
            "",
        ),
    ] {
        assert_eq!(
            named(&asking, config),
            (features.to_owned(), remarks.to_owned()),
            "{asking:?}"
        );
    }
    let other = Asking::of(&[])
        .with_mount("cdi/nvidia.com/gds=0")
        .request(&strict);
    assert_eq!(
        other.devices.names(),
        ["nvidia.com/gds=0"],
        "the feature has one device"
    );
    let channel = Asking::of(&[])
        .with_mount("0")
        .with_mount("cdi/nvidia.com/imex-channel=3")
        .request(&strict);
    assert_eq!(channel.imex_channels, ["3"]);
    assert_eq!(
        Asking::of(&[("NVIDIA_GDS", "enabled")]).hint(),
        Hint::No,
        "a feature alone requests no GPU"
    );
}

#[test]
fn requirements_are_collected() {
    let asking = |more: &[(&str, &str)]| Asking::of(&[&[(VISIBLE, "0")], more].concat());
    let texts = |asking: &Asking, config: &Config| -> Vec<String> {
        asking
            .request(config)
            .requirements
            .into_iter()
            .map(|requirement| requirement.text)
            .collect()
    };
    let open = Config::default();
    let one = ("NVIDIA_REQUIRE_CUDA", "cuda>=12");
    let jetpack = ("NVIDIA_REQUIRE_JETPACK_HOST_MOUNTS", "base-only");
    assert_eq!(
        texts(
            &asking(&[one, ("NVIDIA_REQUIRE_ARCH", "arch>=7"), jetpack]),
            &open
        ),
        ["arch>=7", "cuda>=12"]
    );
    for (value, is_off) in [
        ("true", true),
        ("1", true),
        ("t", true),
        ("T", true),
        ("TRUE", true),
        ("True", true),
        ("yes", false),
        ("", false),
        ("0", false),
    ] {
        assert_eq!(
            texts(&asking(&[one, ("NVIDIA_DISABLE_REQUIRE", value)]), &open).is_empty(),
            is_off,
            "{value:?}"
        );
    }
    for (config, is_off) in [
        (
            Config {
                disable_require: true,
                ..Config::default()
            },
            true,
        ),
        (
            Config {
                require: Require::Off,
                ..Config::default()
            },
            true,
        ),
        (
            Config {
                require: Require::Warn,
                ..Config::default()
            },
            false,
        ),
    ] {
        assert_eq!(
            texts(&asking(&[one]), &config).is_empty(),
            is_off,
            "{:?}",
            config.require
        );
    }
    assert_eq!(
        texts(&Asking::of(&[(CUDA, "11.8.0")]), &open),
        ["cuda>=11.8"],
        "an image without requirements"
    );
    assert_eq!(
        texts(&asking(&[(CUDA, "11.8.0"), one]), &open),
        ["cuda>=12"]
    );
    assert_eq!(Asking::of(&[(CUDA, "eleven")]).outcome(&open), "ONH-035");
    let many = |count: usize| {
        let names: Vec<_> = (0..count)
            .map(|index| format!("NVIDIA_REQUIRE_{index}"))
            .collect();
        let env: Vec<_> = names
            .iter()
            .map(|name| (name.as_str(), "cuda>=1"))
            .collect();
        asking(&env).decide(&open).is_ok()
    };
    assert!(many(MAX_REQUIREMENTS) && !many(MAX_REQUIREMENTS + 1));
}

#[test]
fn a_host_without_gpus_may_excuse() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("sys/bus/pci/devices")).unwrap();
    let here = |no_gpu| Config {
        no_gpu,
        driver_root: HostPath::new(root.path()),
        ..Config::default()
    };
    let excuses = |asked: &str, config: &Config| {
        allow_without_gpu(
            &Asking::of(&[(VISIBLE, asked)]).request(config),
            config,
            anyhow::anyhow!("cause"),
        )
    };
    let finding = excuses("all", &here(NoGpu::Start)).unwrap();
    assert_eq!(finding.kind.id(), "ONH-112");
    assert!(
        finding
            .what
            .starts_with("NVIDIA_VISIBLE_DEVICES requests all GPUs"),
        "{}",
        finding.what
    );
    assert_eq!(
        excuses("0", &here(NoGpu::Start)).unwrap_err().to_string(),
        "cause",
        "a GPU is named"
    );
    assert_eq!(
        excuses("all", &here(NoGpu::Error)).unwrap_err().to_string(),
        "cause",
        "config.toml"
    );
    let gpu = root.path().join("proc/driver/nvidia/gpus/0000:01:00.0");
    std::fs::create_dir_all(&gpu).unwrap();
    assert_eq!(
        excuses("all", &here(NoGpu::Start)).unwrap_err().to_string(),
        "cause",
        "there is a GPU"
    );
}

proptest! {
    /// Without a hint, there is no request with any configuration, except for swarm variables of other names.
    #[test]
    fn no_hint_no_request(
        devices in prop::option::of("|void|all|0| , "),
        cuda in prop::option::of("|9\\.0"),
        require in prop::option::of("|cuda>=9\\.0"),
        nodes in any::<bool>(),
    ) {
        let vars = [(VISIBLE, devices), (CUDA, cuda), ("NVIDIA_REQUIRE_CUDA", require)];
        let env: Vec<_> = vars.iter().filter_map(|(name, value)| Some((*name, value.as_deref()?))).collect();
        let asking = Asking::of(&env);
        let asking = if nodes { asking.with_nodes() } else { asking };
        let decision = asking.decide(&Config::default()).unwrap();
        prop_assert_eq!(asking.hint() == Hint::No, matches!(decision, Decision::Nothing(_)));
    }
}
