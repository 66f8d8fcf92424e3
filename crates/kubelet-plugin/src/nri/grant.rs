//! Decides which GPUs a container gets that an engine creates: with the hook's rules for requests, as CDI devices. Pure, apart from the
//! search for GPUs on the PCI bus after an error.
//!
//! NRI does not report capabilities, so a privileged container is treated like others. Engines list all nodes of the host for it, which
//! leaves it to the hook.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use base::report::{Finding, failure};
use cdi_spec::name::is_nvidia;
use findings::catalog;
use nvidia_host::capability::Capability;
use nvidia_host::cdi::extra_devices;
use nvidia_host::cdi::generate::Naming;
use nvidia_host::config::{Config, Limits};
use nvidia_host::device_id::VisibleDevices;
use nvidia_host::driver::node_name::NodeName;
use nvidia_host::edits::decide;
use nvidia_host::feature::{Feature, FeatureRow};
use nvidia_host::inventory::Inventory;
use nvidia_host::inventory::select::{Device, permitted};
use nvidia_host::mps::Daemon;
use nvidia_host::request::{self, Decision, GpuRequest, Hint, Node, RequestMount, select};

use crate::cdi_specs::DEVICE_PLUGIN;
use crate::model::InSpecs;
use crate::proto::nri::{Container, LinuxDevice};

/// What a container gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grant {
    /// It requests nothing, or another program gives it GPUs.
    Nothing,
    /// It starts without GPUs from us, although it requests them.
    Unchanged(Finding),
    /// These CDI devices
    Devices(Vec<String>, Vec<Finding>),
}

/// Reports whether the container can request GPUs, so that config.toml matters.
#[must_use]
pub fn may_ask(container: &Container) -> bool {
    let env = environment(container);
    request::hint(&view(container, &env)) != Hint::No && !has_gpus(container)
}

/// What the plugin knows of the node.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    /// `None` if the driver is missing, or has not answered yet
    pub inventory: Option<&'a Inventory>,
    /// The limits in force, from which the CDI spec was made
    pub limits: &'a Limits,
    /// What the CDI specs have
    pub in_specs: &'a InSpecs,
    /// The MPS daemons of the GPUs
    pub mps: &'a [Daemon],
}

/// Decides what a container gets.
///
/// # Errors
/// If the container must not start: the request is invalid, or cannot be met.
pub fn grant(container: &Container, config: &Config, known: Known<'_>) -> Result<Grant> {
    if has_gpus(container) {
        return Ok(Grant::Nothing);
    }
    let env = environment(container);
    let request = match request::decide(&view(container, &env), config)? {
        Decision::Nothing(_) => return Ok(Grant::Nothing),
        Decision::Refused(reason) => {
            let hint = "request a GPU from the scheduler: resources: {limits: {nvidia.com/gpu: 1}} in the container of the pod";
            return Ok(Grant::Unchanged(Finding::new(
                &catalog::REFUSED,
                reason,
                hint,
            )));
        }
        Decision::Gpus(request) => *request,
    };
    // The CDI spec does not have files without a GPU. The hook provides them.
    if request.devices == VisibleDevices::None {
        return Ok(Grant::Nothing);
    }
    for channel in request.wanted()?.imex_channels {
        if !known.in_specs.imex_channels.contains(&channel) {
            return Ok(Grant::Unchanged(without_channel(channel)));
        }
    }
    match devices(&request, config, known) {
        Ok(grant) => Ok(grant),
        Err(error) => request::allow_without_gpu(&request, config, error).map(Grant::Unchanged),
    }
}

fn devices(request: &GpuRequest, config: &Config, known: Known<'_>) -> Result<Grant> {
    let Some(inventory) = known.inventory else {
        return Err(failure(
            &catalog::PLUGIN_DRIVER,
            format!(
                "{} requests GPUs, but the driver does not answer",
                request.asked_by
            ),
            "wait for the next try, or run \"oci-nvidia-kubelet-plugin check\" on the node",
        ));
    };
    let (chosen, mut findings) = select::decide(request, inventory, config)?;
    let (granted, withheld) = sort(chosen, known);
    let is_all = request.devices == VisibleDevices::All;
    // "all" means all that the spec has.
    if !is_all || granted.is_empty() {
        let first = withheld
            .into_iter()
            .min_by_key(|device| device.rank(is_all));
        if let Some(first) = first {
            return first.into_grant(request);
        }
    }
    if request.wanted()?.capabilities.has(Capability::Compute) {
        decide::shared(known.mps, &granted)?;
    }
    let mut names = Vec::new();
    for device in granted {
        names.push(DEVICE_PLUGIN.device_name(device.uuid()));
    }
    for feature in request.features.iter() {
        if known.in_specs.features.has(feature) {
            names.push(DEVICE_PLUGIN.feature_name(feature));
        } else {
            findings.push(without_spec(feature, config));
        }
    }
    for channel in request.wanted()?.imex_channels {
        names.push(DEVICE_PLUGIN.imex_name(channel));
    }
    Ok(Grant::Devices(names, findings))
}

/// A device that was chosen, and that the plugin cannot give.
enum Withheld<'d> {
    /// The limits in force deny it, although config.toml allows it now.
    Denied(Device<'d>),
    /// The CDI spec lacks it, with this reason.
    NotInSpec(Device<'d>, String),
    /// CDI has no name for it.
    OnlyByHook(Device<'d>),
}

/// Separates the devices that the container gets from the others.
fn sort<'d>(chosen: Vec<Device<'d>>, known: Known<'_>) -> (Vec<Device<'d>>, Vec<Withheld<'d>>) {
    let (mut granted, mut withheld) = (Vec::new(), Vec::new());
    for device in chosen {
        // A deny list that was just added applies at once. One that was removed applies when the CDI
        // spec has the devices: until then, the file may be incomplete or lost.
        if !permitted(device, known.limits) {
            withheld.push(Withheld::Denied(device));
        } else if !has_name(device) {
            withheld.push(Withheld::OnlyByHook(device));
        } else if let Some(why) = known.in_specs.why_missing(device.uuid()) {
            withheld.push(Withheld::NotInSpec(device, why));
        } else {
            granted.push(device);
        }
    }
    (granted, withheld)
}

impl Withheld<'_> {
    /// Of several devices, the one with the lowest rank is reported. "all" does not request the denied ones in particular.
    const fn rank(&self, is_all: bool) -> u8 {
        match self {
            Self::Denied(_) if !is_all => 0,
            Self::NotInSpec(..) => 1,
            Self::OnlyByHook(_) => 2,
            Self::Denied(_) => 3,
        }
    }

    fn into_grant(self, request: &GpuRequest) -> Result<Grant> {
        match self {
            Self::Denied(device) => Err(not_yet(request, device)),
            Self::NotInSpec(device, why) => Err(not_in_spec(request, device, &why)),
            // Compute programs cannot use a whole GPU in MIG mode.
            Self::OnlyByHook(device) => Ok(Grant::Unchanged(only_by_hook(device))),
        }
    }
}

fn not_yet(request: &GpuRequest, device: Device<'_>) -> anyhow::Error {
    let what = format!(
        "{} requests {device}, which config.toml allows now, but the CDI spec lacks",
        request.asked_by
    );
    failure(
        &catalog::DENIED,
        what,
        "try again in a few seconds; if that fails too, the log of the plugin states the reason",
    )
}

fn not_in_spec(request: &GpuRequest, device: Device<'_>, why: &str) -> anyhow::Error {
    failure(
        &catalog::PLUGIN_DRIVER,
        format!("{} requests {device}, but {why}", request.asked_by),
        "run \"oci-nvidia-hook doctor\" on the node",
    )
}

/// Reports whether CDI specs name the device by its UUID.
fn has_name(device: Device<'_>) -> bool {
    !Naming {
        index: false,
        uuid: true,
        type_index: false,
    }
    .names(device)
    .is_empty()
}

fn only_by_hook(device: Device<'_>) -> Finding {
    let what = format!("{device} has no CDI device, so only the hook can give it");
    Finding::new(
        &catalog::MIG_WHOLE,
        what,
        "request MIG devices, or install oci-nvidia-hook",
    )
}

/// Returns the finding about an IMEX channel without a device node, which this plugin does not create. The hook does.
fn without_channel(channel: u32) -> Finding {
    let what = format!("the container requests IMEX channel {channel}, which has no device node");
    let fix =
        format!("run \"oci-nvidia-hook prepare --imex-channel {channel}\" as root on the node");
    Finding::new(&catalog::NODE_MISSING, what, fix)
}

fn without_spec(feature: Feature, config: &Config) -> Finding {
    let FeatureRow {
        title, variable, ..
    } = feature.row();
    feature.missing(
        &format!("{variable} requests {title}"),
        config.dev_root.as_ref().unwrap_or(&config.driver_root),
    )
}

/// Reports whether a device plugin or CDI gives GPUs to the container.
fn has_gpus(container: &Container) -> bool {
    let mut names = container.cdi_devices.iter().map(|device| &device.name);
    let mut nodes = character_nodes(container).into_iter();
    names.any(|name| is_nvidia(name) && !is_extra(name))
        || nodes.any(|node| node.name().is_some_and(NodeName::is_gpu))
}

/// Reports whether a CDI device is one next to the GPUs, so that the container can still request GPUs.
fn is_extra(name: &str) -> bool {
    let kind = name.split('=').next().unwrap_or(name);
    match kind.split_once('/') {
        Some((_, class)) => extra_devices::class_named(class).is_some(),
        None => false,
    }
}

/// Of a variable that is set twice, the last value counts, as in config.json.
fn environment(container: &Container) -> BTreeMap<String, String> {
    let mut variables = BTreeMap::new();
    for entry in &container.env {
        if let Some((name, value)) = entry.split_once('=') {
            variables.insert(name.to_owned(), value.to_owned());
        }
    }
    variables
}

fn view<'a>(container: &'a Container, env: &'a BTreeMap<String, String>) -> request::Container<'a> {
    let mut mounts = Vec::new();
    for found in &container.mounts {
        mounts.push(RequestMount {
            source: found.source.as_ref(),
            destination: found.destination.as_ref(),
        });
    }
    request::Container {
        env: env.into(),
        mounts,
        nodes: character_nodes(container),
        privileged: false,
    }
}

fn character_nodes(container: &Container) -> Vec<Node<'_>> {
    let devices = container.linux.iter().flat_map(|linux| &linux.devices);
    let is_character = |device: &&LinuxDevice| device.r#type == "c";
    devices.filter(is_character).map(node).collect()
}

fn node(device: &LinuxDevice) -> Node<'_> {
    let (major, minor) = (
        u32::try_from(device.major).ok(),
        u32::try_from(device.minor).ok(),
    );
    Node {
        path: Path::new(&device.path),
        major,
        minor,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::gpus::tests::gpu;
    use crate::node::mps::tests::daemon;
    use crate::proto::nri::{CdiDevice, LinuxContainer, Mount};
    use base::report::ErrorReport;
    use nvidia_host::config::NoGpu;
    use nvidia_host::feature::Features;
    use nvidia_host::mps::Status;
    use std::sync::{Arc, LazyLock};

    static NO_LIMITS: Limits = Limits {
        allow: Vec::new(),
        deny: Vec::new(),
        denied_features: Features::EMPTY,
    };

    static IN_SPECS: LazyLock<InSpecs> = LazyLock::new(|| {
        let devices = ["GPU-0", "GPU-1", "MIG-2-0", "MIG-2-1"].map(str::to_owned);
        InSpecs {
            devices: Arc::new(devices.into_iter().collect()),
            features: [Feature::Gds].into_iter().collect(),
            imex_channels: vec![0, 7],
            ..InSpecs::default()
        }
    });

    fn known(inventory: Option<&Inventory>) -> Known<'_> {
        Known {
            inventory,
            limits: &NO_LIMITS,
            in_specs: &IN_SPECS,
            mps: &[],
        }
    }

    fn inventory() -> Inventory {
        let gpus = [
            gpu(0, "A", &[]),
            gpu(1, "B", &[]),
            gpu(2, "C", &["1g.5gb", "1g.5gb"]),
        ];
        Inventory {
            driver_version: "535.183.01".to_owned(),
            cuda_version: "12.2".to_owned(),
            gpus: gpus.into_iter().map(|gpu| gpu.gpu).collect(),
            ..Inventory::default()
        }
    }

    #[test]
    fn gpus_with_an_mps_daemon() {
        let inventory = inventory();
        for (status, env, expected) in [
            (Status::Ready, &["NVIDIA_VISIBLE_DEVICES=0"][..], None),
            (
                Status::Ready,
                &["NVIDIA_VISIBLE_DEVICES=0,1"],
                Some("ONH-057"),
            ),
            (Status::Ready, &["NVIDIA_VISIBLE_DEVICES=1"], None),
            (Status::Dead, &["NVIDIA_VISIBLE_DEVICES=0"], Some("ONH-056")),
            (Status::Dead, &["NVIDIA_VISIBLE_DEVICES=1"], None),
            (
                Status::Ready,
                &[
                    "NVIDIA_VISIBLE_DEVICES=0,1",
                    "NVIDIA_DRIVER_CAPABILITIES=utility",
                ],
                None,
            ),
        ] {
            let daemons = [daemon(status, None)];
            let known = Known {
                mps: &daemons,
                ..known(Some(&inventory))
            };
            let found = grant(&asking(env), &Config::default(), known);
            let id = found
                .as_ref()
                .err()
                .map(|error| ErrorReport::new(error).kind.id());
            assert_eq!(id, expected, "{env:?}: {found:?}");
        }
    }

    #[test]
    fn a_device_that_the_cdi_spec_lacks() {
        let inventory = inventory();
        let lacking = InSpecs {
            devices: Arc::new(["GPU-1".to_owned()].into()),
            error: Some("libcuda.so.1 is missing".to_owned()),
            ..InSpecs::default()
        };
        let known = Known {
            in_specs: &lacking,
            ..known(Some(&inventory))
        };
        let grant_of = |value: &str| {
            let variable = format!("NVIDIA_VISIBLE_DEVICES={value}");
            grant(&asking(&[&variable]), &Config::default(), known)
        };
        let error = ErrorReport::new(&grant_of("0").unwrap_err());
        assert!(
            error
                .line
                .ends_with("the node has no CDI device for it: libcuda.so.1 is missing"),
            "{error:?}"
        );
        // "all" means all that the spec has.
        match grant_of("all").unwrap() {
            Grant::Devices(names, _) => {
                assert_eq!(names, ["k8s.device-plugin.nvidia.com/gpu=GPU-1"]);
            }
            other => panic!("{other:?}"),
        }
    }

    fn asking(env: &[&str]) -> Container {
        Container {
            env: env.iter().map(|entry| (*entry).to_owned()).collect(),
            ..Container::default()
        }
    }

    fn with_node(env: &[&str], path: &str, kind: &str, minor: i64) -> Container {
        let device = LinuxDevice {
            path: path.to_owned(),
            r#type: kind.to_owned(),
            major: 195,
            minor,
        };
        Container {
            linux: Some(LinuxContainer {
                devices: vec![device],
            }),
            ..asking(env)
        }
    }

    fn with_cdi(env: &[&str], name: &str) -> Container {
        Container {
            cdi_devices: vec![CdiDevice {
                name: name.to_owned(),
            }],
            ..asking(env)
        }
    }

    fn with_mount(env: &[&str], name: &str) -> Container {
        let destination = format!("/var/run/nvidia-container-devices/{name}");
        Container {
            mounts: vec![Mount {
                destination,
                source: "/dev/null".to_owned(),
            }],
            ..asking(env)
        }
    }

    fn text(container: &Container, config: &Config) -> String {
        text_within(&NO_LIMITS, container, config)
    }

    /// The result as text: UUIDs, or the number of a finding.
    fn text_within(limits: &Limits, container: &Container, config: &Config) -> String {
        match grant(
            container,
            config,
            Known {
                limits,
                ..known(Some(&inventory()))
            },
        ) {
            Ok(Grant::Nothing) => "nothing".to_owned(),
            Ok(Grant::Unchanged(finding)) => format!("left alone: {}", finding.kind.id()),
            Ok(Grant::Devices(names, _)) => {
                let uuids = names.iter().map(|name| {
                    name.strip_prefix("k8s.device-plugin.nvidia.com/gpu=")
                        .unwrap()
                });
                uuids.collect::<Vec<_>>().join(",")
            }
            Err(error) => format!("refused: {}", ErrorReport::new(&error).kind.id()),
        }
    }

    const ALL: &str = "NVIDIA_VISIBLE_DEVICES=all";

    #[test]
    fn variables_and_mounts_by_the_rules_of_the_hook() {
        let open = Config::default();
        let mounts = Config {
            accept_volume_mounts: true,
            ..Config::default()
        };
        let locked = Config {
            accept_envvar_when_unprivileged: false,
            accept_volume_mounts: true,
            ..Config::default()
        };
        for (container, expected) in [
            (
                asking(&["NVIDIA_VISIBLE_DEVICES=1,0"]),
                ["GPU-0,GPU-1", "GPU-0,GPU-1", "left alone: ONH-103"],
            ),
            (
                asking(&[ALL]),
                [
                    "GPU-0,GPU-1,MIG-2-0,MIG-2-1",
                    "GPU-0,GPU-1,MIG-2-0,MIG-2-1",
                    "left alone: ONH-103",
                ],
            ),
            (
                asking(&["NVIDIA_VISIBLE_DEVICES=2:1"]),
                ["MIG-2-1", "MIG-2-1", "left alone: ONH-103"],
            ),
            (
                asking(&["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=1"]),
                ["GPU-1", "GPU-1", "left alone: ONH-103"],
            ),
            (
                asking(&["CUDA_VERSION=12.1"]),
                [
                    "GPU-0,GPU-1,MIG-2-0,MIG-2-1",
                    "GPU-0,GPU-1,MIG-2-0,MIG-2-1",
                    "left alone: ONH-103",
                ],
            ),
            (with_mount(&[], "GPU-1"), ["nothing", "GPU-1", "GPU-1"]),
            (
                with_mount(&[ALL], "GPU-1"),
                ["GPU-0,GPU-1,MIG-2-0,MIG-2-1", "GPU-1", "GPU-1"],
            ),
            (
                with_mount(&[], "../../etc"),
                ["nothing", "refused: ONH-038", "refused: ONH-038"],
            ),
            (asking(&[]), ["nothing"; 3]),
            (asking(&["PATH=/bin", "=", "x", ""]), ["nothing"; 3]),
            (asking(&["NVIDIA_VISIBLE_DEVICES=void"]), ["nothing"; 3]),
            (asking(&["NVIDIA_VISIBLE_DEVICES="]), ["nothing"; 3]),
            (
                asking(&["NVIDIA_VISIBLE_DEVICES=none"]),
                ["nothing", "nothing", "left alone: ONH-103"],
            ),
        ] {
            let found = [&open, &mounts, &locked].map(|config| text(&container, config));
            assert_eq!(found, expected, "{container:?}");
            assert!(
                may_ask(&container) || found.iter().all(|text| text == "nothing"),
                "{container:?}"
            );
        }
    }

    #[test]
    fn containers_with_gpus_are_left_alone() {
        let mut on_wsl = with_node(&[ALL], "/dev/dxg", "c", 125);
        on_wsl.linux.as_mut().unwrap().devices[0].major = 10;
        for (container, expected) in [
            (with_node(&[ALL], "/dev/nvidia0", "c", 0), "nothing"),
            (with_node(&[], "/dev/nvidia0", "c", 0), "nothing"),
            (on_wsl, "nothing"),
            (
                with_node(&["NVIDIA_VISIBLE_DEVICES=0"], "/dev/nvidiactl", "c", 255),
                "GPU-0",
            ),
            (
                with_node(&["NVIDIA_VISIBLE_DEVICES=0"], "/dev/nvidia0", "b", 0),
                "GPU-0",
            ),
            (
                with_cdi(&[ALL], "k8s.device-plugin.nvidia.com/gpu=GPU-0"),
                "nothing",
            ),
            (with_cdi(&[ALL], "nvidia.com/gpu=0"), "nothing"),
            (
                with_cdi(&["NVIDIA_VISIBLE_DEVICES=0"], "notnvidia.com/gpu=0"),
                "GPU-0",
            ),
            (
                with_cdi(&["NVIDIA_VISIBLE_DEVICES=0"], "nvidia.com/gds=all"),
                "GPU-0",
            ),
            (
                with_cdi(&["NVIDIA_VISIBLE_DEVICES=0"], "nvidia.com/imex-channel=0"),
                "GPU-0",
            ),
            (
                with_cdi(&["NVIDIA_VISIBLE_DEVICES=0"], "example.com/nic=nvidia.com"),
                "GPU-0",
            ),
            // A privileged container, in which engines list all nodes
            (
                with_node(
                    &[ALL, "NVIDIA_MIG_CONFIG_DEVICES=all"],
                    "/dev/nvidia0",
                    "c",
                    0,
                ),
                "nothing",
            ),
        ] {
            assert_eq!(
                text(&container, &Config::default()),
                expected,
                "{container:?}"
            );
        }
    }

    #[test]
    fn devices_next_to_the_gpus() {
        let all = [
            "NVIDIA_VISIBLE_DEVICES=0",
            "NVIDIA_GDS=enabled",
            "NVIDIA_MOFED=enabled",
        ];
        let names = [
            "k8s.device-plugin.nvidia.com/gpu=GPU-0",
            "k8s.device-plugin.nvidia.com/gds=all",
        ];
        match grant(&asking(&all), &Config::default(), known(Some(&inventory()))).unwrap() {
            Grant::Devices(found, findings) => {
                assert_eq!(
                    (found, findings.len()),
                    (names.map(str::to_owned).into(), 1)
                );
                assert!(
                    findings[0].kind.id() == "ONH-233" && findings[0].fix.contains("ib_uverbs"),
                    "{findings:?}"
                );
            }
            other => panic!("{other:?}"),
        }
        let devices = Limits {
            denied_features: [Feature::Gds].into_iter().collect(),
            ..Limits::default()
        };
        assert_eq!(
            text(
                &asking(&all),
                &Config {
                    devices,
                    ..Config::default()
                }
            ),
            "refused: ONH-032"
        );
        assert_eq!(text(&asking(&all[1..]), &Config::default()), "nothing");
    }

    #[test]
    fn imex_channels() {
        let container = asking(&["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_IMEX_CHANNELS=7,0"]);
        let names = ["gpu=GPU-0", "imex-channel=7", "imex-channel=0"];
        let names = names
            .map(|name| format!("k8s.device-plugin.nvidia.com/{name}"))
            .into();
        let found = grant(&container, &Config::default(), known(Some(&inventory()))).unwrap();
        assert_eq!(found, Grant::Devices(names, Vec::new()));
        let ignoring = Config {
            ignore_imex_channels: true,
            ..Config::default()
        };
        assert_eq!(text(&container, &ignoring), "GPU-0");
    }

    #[test]
    fn what_cannot_be_given_is_an_error() {
        let denied = Limits {
            deny: vec!["1".to_owned()],
            ..Limits::default()
        };
        let config = Config {
            devices: denied,
            ..Config::default()
        };
        let zero = "NVIDIA_VISIBLE_DEVICES=0";
        for (env, expected) in [
            (&["NVIDIA_VISIBLE_DEVICES=9"][..], "refused: ONH-030"),
            (&["NVIDIA_VISIBLE_DEVICES=1"], "refused: ONH-032"),
            (&[ALL], "GPU-0,MIG-2-0,MIG-2-1"),
            (&["NVIDIA_VISIBLE_DEVICES=0,2"], "left alone: ONH-230"),
            (
                &[zero, "NVIDIA_REQUIRE_CUDA=cuda>=99.0"],
                "refused: ONH-034",
            ),
            (&[zero, "NVIDIA_REQUIRE_CUDA=cuda>=12.0"], "GPU-0"),
            (
                &[
                    zero,
                    "NVIDIA_REQUIRE_CUDA=cuda>=99.0",
                    "NVIDIA_DISABLE_REQUIRE=true",
                ],
                "GPU-0",
            ),
            (
                &[zero, "NVIDIA_DRIVER_CAPABILITIES=nonsense"],
                "refused: ONH-036",
            ),
            (&[zero, "NVIDIA_MIG_CONFIG_DEVICES=all"], "refused: ONH-037"),
            (&[zero, "NVIDIA_IMEX_CHANNELS=0,1"], "left alone: ONH-021"),
            (&[zero, "NVIDIA_IMEX_CHANNELS=x"], "refused: ONH-038"),
        ] {
            assert_eq!(text(&asking(env), &config), expected, "{env:?}");
        }
    }

    #[test]
    fn limits_that_have_just_changed() {
        let deny = |entry: &str| Limits {
            deny: vec![entry.to_owned()],
            ..Limits::default()
        };
        let (zero, one) = (deny("0"), deny("1"));
        let config = |devices: &Limits| Config {
            devices: devices.clone(),
            ..Config::default()
        };
        for (in_force, now, env, expected) in [
            (&NO_LIMITS, &one, "all", "GPU-0,MIG-2-0,MIG-2-1"),
            (&NO_LIMITS, &one, "1", "refused: ONH-032"),
            (&one, &NO_LIMITS, "all", "GPU-0,MIG-2-0,MIG-2-1"),
            (&one, &NO_LIMITS, "1", "refused: ONH-032"),
            (&one, &NO_LIMITS, "0,1", "refused: ONH-032"),
            (&one, &NO_LIMITS, "0", "GPU-0"),
            (&zero, &one, "all", "MIG-2-0,MIG-2-1"),
            (&deny("GPU-*"), &NO_LIMITS, "all", "refused: ONH-032"),
            (&deny("2:0"), &NO_LIMITS, "2:1", "MIG-2-1"),
            (&deny("2:0"), &NO_LIMITS, "2:0", "refused: ONH-032"),
        ] {
            let container = asking(&[&format!("NVIDIA_VISIBLE_DEVICES={env}")]);
            assert_eq!(
                text_within(in_force, &container, &config(now)),
                expected,
                "{env}: {in_force:?}, {now:?}"
            );
        }
    }

    #[test]
    fn a_driver_that_does_not_answer() {
        let error = grant(&asking(&[ALL]), &Config::default(), known(None)).unwrap_err();
        let ErrorReport { kind, line, .. } = ErrorReport::new(&error);
        assert_eq!(kind.id(), "ONH-074");
        assert_eq!(
            line,
            "NVIDIA_VISIBLE_DEVICES requests GPUs, but the driver does not answer"
        );
        assert_eq!(
            grant(&asking(&[]), &Config::default(), known(None)).unwrap(),
            Grant::Nothing
        );
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("sys/bus/pci/devices")).unwrap();
        let driver_root = base::paths::HostPath::new(root.path());
        let start = Config {
            no_gpu: NoGpu::Start,
            driver_root,
            ..Config::default()
        };
        let found = grant(&asking(&[ALL]), &start, known(None)).unwrap();
        assert!(
            matches!(&found, Grant::Unchanged(finding) if finding.kind.id() == "ONH-112"),
            "{found:?}"
        );
    }
}
