//! Tables: a host as data, what is wanted, and the edits or the error.

use std::collections::BTreeMap;

use base::paths::{ContainerPath, HostPath};
use base::report::line;

use super::*;
use crate::capability::Capabilities;
use crate::driver::access::Permissions;
use crate::driver::files::DriverFiles;
use crate::driver::ipc::{Channel, Expected, Ipc};
use crate::driver::nodes::NodeState;
use crate::inventory::select::tests::inventory;

fn node(name: &str, major: u32, minor: u32) -> (String, NodeState) {
    let path = format!("/dev/{name}");
    let (source, path) = (HostPath::new(&path), ContainerPath::new(&path).unwrap());
    (
        name.to_owned(),
        NodeState::Device(DeviceNode {
            source,
            path,
            major,
            minor,
            permissions: Permissions::default(),
        }),
    )
}

/// A host with three GPUs, of which the last has two MIG devices, as [`inventory`] has them.
fn facts() -> DeviceFacts {
    let nodes = [
        node("nvidiactl", 195, 255),
        node("nvidia0", 195, 0),
        node("nvidia1", 195, 1),
        node("nvidia2", 195, 2),
        node("nvidia-uvm", 510, 0),
        node("nvidia-uvm-tools", 510, 1),
        node("nvidia-modeset", 195, 254),
        node("dri/card1", 226, 1),
        node("dri/renderD128", 226, 128),
        node("nvidia-caps/nvidia-cap1", 511, 1),
        node("nvidia-caps/nvidia-cap21", 511, 21),
        node("nvidia-caps/nvidia-cap22", 511, 22),
        node("nvidia-caps/nvidia-cap31", 511, 31),
        node("nvidia-caps-imex-channels/channel7", 512, 7),
    ];
    let minors = [
        (MigCap::Config, 1),
        (MigCap::Monitor, 2),
        (MigCap::GpuInstance(2, 5), 21),
        (MigCap::ComputeInstance(2, 5, 0), 22),
        (MigCap::GpuInstance(2, 7), 31),
        (MigCap::ComputeInstance(2, 7, 0), 32),
        (MigCap::GpuInstance(0, 1), 41),
    ];
    let dirs = inventory()
        .gpus
        .into_iter()
        .map(|gpu| (gpu.bus_id, gpu.bus_id.in_sysfs().into()));
    let mut facts = DeviceFacts {
        nodes: nodes.into(),
        drm: [(
            inventory().gpus[0].bus_id,
            vec!["card1".to_owned(), "renderD128".to_owned()],
        )]
        .into(),
        mig_minors: Some(minors.into()),
        has_proc: true,
        gpu_dirs: dirs.collect(),
        dev_root: HostPath::new("/"),
        ..DeviceFacts::default()
    };
    let mut paths: Vec<_> = inventory()
        .gpus
        .iter()
        .map(|gpu| facts.gpu_dir(gpu.bus_id).unwrap())
        .collect();
    paths.push(Path::new(DRIVER_PROC).join("capabilities"));
    paths.extend(
        facts
            .mig_minors
            .iter()
            .flatten()
            .map(|(cap, _)| cap.proc_path()),
    );
    facts.proc_paths = paths
        .into_iter()
        .map(|path| (path.clone(), HostPath::new(path)))
        .collect();
    facts
}

fn host(devices: DeviceFacts) -> HostFacts {
    let proc_files = devices
        .has_proc
        .then(|| vec![("version".into(), b"NVRM version".to_vec())]);
    HostFacts {
        files: DriverFiles::default(),
        ipc: Vec::new(),
        proc_files,
        devices,
        findings: Vec::new(),
    }
}

fn compute() -> Wanted {
    Wanted {
        capabilities: Capabilities::new(&[Compute]),
        gpus: true,
        ..Wanted::default()
    }
}

/// Node names and masked mounts, or the line of the error.
fn outcome(facts: DeviceFacts, wanted: &Wanted, devices: &[Device<'_>]) -> String {
    let (edits, findings) = match edits(&host(facts), wanted, devices) {
        Ok(decided) => decided,
        Err(error) => return line(&error),
    };
    let nodes = edits.nodes.iter().map(|node| {
        node.path
            .relative()
            .strip_prefix("dev")
            .unwrap()
            .display()
            .to_string()
    });
    let mounts = edits.proc_mask.into_iter().flat_map(|mask| mask.mounts);
    let mounts = mounts.map(|(path, _)| format!("proc:{}", path.display()));
    let links = edits
        .node_links
        .iter()
        .map(|link| format!("link:{}", link.path.file_name().display()));
    let findings = findings.iter().map(|finding| finding.kind.id().to_owned());
    nodes
        .chain(mounts)
        .chain(links)
        .chain(findings)
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn what_devices_give() {
    let inventory = inventory();
    let (whole, split) = (Device::Gpu(&inventory.gpus[0]), &inventory.gpus[2]);
    let mig = Device::Mig(split, &split.mig_devices[0]);
    let graphics = Wanted {
        capabilities: Capabilities::new(&[Graphics]),
        gpus: true,
        ..Wanted::default()
    };
    let utility = Wanted {
        capabilities: Capabilities::new(&[Capability::Utility]),
        gpus: true,
        ..Wanted::default()
    };
    let imex = Wanted {
        imex_channels: vec![7],
        ..utility.clone()
    };
    let no_gpu = Wanted {
        gpus: false,
        ..compute()
    };
    for (what, wanted, devices, expected) in [
        (
            "no device",
            no_gpu,
            vec![],
            "nvidiactl nvidia-uvm nvidia-uvm-tools",
        ),
        (
            "a GPU",
            compute(),
            vec![whole],
            "nvidiactl nvidia-uvm nvidia-uvm-tools nvidia0 proc:gpus/0000:01:00.0",
        ),
        (
            "a GPU without CUDA",
            utility,
            vec![whole],
            "nvidiactl nvidia0 proc:gpus/0000:01:00.0",
        ),
        (
            "graphics",
            graphics,
            vec![whole],
            "nvidiactl nvidia-modeset nvidia0 dri/card1 dri/renderD128 proc:gpus/0000:01:00.0 \
             link:pci-0000:01:00.0-card link:pci-0000:01:00.0-render",
        ),
        (
            "a MIG device",
            compute(),
            vec![mig],
            "nvidiactl nvidia-uvm nvidia-uvm-tools nvidia2 nvidia-caps/nvidia-cap21 nvidia-caps/nvidia-cap22 \
             proc:gpus/0000:03:00.0 proc:capabilities/gpu2/mig/gi5/access proc:capabilities/gpu2/mig/gi5/ci0/access",
        ),
        (
            "an IMEX channel",
            imex,
            vec![whole],
            "nvidiactl nvidia0 nvidia-caps-imex-channels/channel7 proc:gpus/0000:01:00.0",
        ),
    ] {
        assert_eq!(outcome(facts(), &wanted, &devices), expected, "{what}");
    }
}

/// A missing feature is a warning, as the container starts without it.
#[test]
fn what_features_give() {
    let wanted = |feature| Wanted {
        features: [feature].into_iter().collect(),
        gpus: false,
        ..Wanted::default()
    };
    let mut facts = facts();
    facts
        .nodes
        .extend([node("nvidia-fs0", 508, 0), node("nvidia-fs1", 508, 1)]);
    facts.features = vec![
        (
            Feature::Gds,
            vec!["nvidia-fs0".to_owned(), "nvidia-fs1".to_owned()],
        ),
        (Feature::Mofed, Vec::new()),
    ];
    assert_eq!(
        outcome(facts.clone(), &wanted(Feature::Gds), &[]),
        "nvidiactl nvidia-fs0 nvidia-fs1"
    );
    for feature in [Feature::Mofed, Feature::Gdrcopy, Feature::Nvswitch] {
        assert_eq!(
            outcome(facts.clone(), &wanted(feature), &[]),
            "nvidiactl ONH-233"
        );
        let (_, findings) = edits(&host(facts.clone()), &wanted(feature), &[]).unwrap();
        let fix = &findings[0].fix;
        assert!(fix.contains(feature.row().module), "{fix}");
    }
}

#[test]
fn what_is_missing_or_wrong() {
    type Change = fn(&mut DeviceFacts);
    let inventory = inventory();
    let whole = Device::Gpu(&inventory.gpus[0]);
    let imex = Wanted {
        imex_channels: vec![8],
        ..compute()
    };
    let monitor = Wanted {
        mig_monitor: true,
        ..compute()
    };
    let changes: [(Change, Wanted, &str); 8] = [
        (
            |facts| drop(facts.nodes.remove("nvidiactl")),
            compute(),
            "\"/dev/nvidiactl\" is missing below \"/\"",
        ),
        (
            |facts| drop(facts.nodes.remove("nvidia0")),
            compute(),
            "cannot give GPU-00000000 of GPU 0 to the container",
        ),
        (
            |facts| facts.nodes.extend([node("nvidia0", 195, 1)]),
            compute(),
            "is 195:1, not minor 0 of the NVIDIA",
        ),
        (
            |facts| facts.nodes.extend([node("nvidia0", 8, 0)]),
            compute(),
            "is 8:0, not 195:0 of the NVIDIA driver",
        ),
        (
            |facts| {
                drop(facts.nodes.insert(
                    "nvidia0".into(),
                    NodeState::NotADevice(HostPath::new("/dev/nvidia0")),
                ))
            },
            compute(),
            "\"/dev/nvidia0\" is not a character device",
        ),
        (
            |facts| {
                drop(
                    facts
                        .nodes
                        .insert("nvidia-uvm".into(), NodeState::Unreadable(5)),
                )
            },
            compute(),
            "cannot examine \"/dev/nvidia-uvm\"",
        ),
        (|_| (), imex, "channel8\" is missing"),
        (
            |_| (),
            monitor,
            "\"/dev/nvidia-caps/nvidia-cap2\" is missing",
        ),
    ];
    for (change, wanted, expected) in changes {
        let mut facts = facts();
        change(&mut facts);
        let error = outcome(facts, &wanted, &[whole]);
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let mut facts = facts();
    facts.nodes.remove("nvidia-uvm");
    let found = outcome(facts.clone(), &compute(), &[whole]);
    assert_eq!(
        found,
        format!(
            "nvidiactl nvidia-uvm-tools nvidia0 proc:gpus/0000:01:00.0 {}",
            catalog::NO_UVM.id()
        )
    );
    let without_gpus = Wanted {
        gpus: false,
        ..compute()
    };
    assert_eq!(
        outcome(facts, &without_gpus, &[]),
        "nvidiactl nvidia-uvm-tools",
        "nothing that a container lacks"
    );
}

#[test]
fn a_host_without_files_in_proc() {
    let inventory = inventory();
    let split = &inventory.gpus[2];
    let mig = [Device::Mig(split, &split.mig_devices[0])];
    let facts = DeviceFacts {
        has_proc: false,
        proc_paths: std::collections::BTreeMap::new(),
        ..facts()
    };
    let decided = edits(&host(facts.clone()), &compute(), &mig).unwrap().0;
    assert_eq!(decided.proc_mask, None);
    assert_eq!(
        of_device(&facts, &compute(), mig[0]).unwrap().proc_mask,
        None
    );
    // A driver without nodes for capabilities: the files below /proc give access.
    let facts = DeviceFacts {
        mig_minors: None,
        ..self::facts()
    };
    let found = outcome(facts, &compute(), &mig);
    assert!(
        !found.contains("nvidia-cap") && found.contains("proc:capabilities/gpu2/mig/gi5/access"),
        "{found}"
    );
    // A table that lacks the instance.
    let facts = DeviceFacts {
        mig_minors: Some(std::collections::BTreeMap::new()),
        ..self::facts()
    };
    let error = outcome(facts, &compute(), &mig);
    assert!(error.contains("cannot give MIG-20 of GPU 2"), "{error}");
}

#[test]
fn the_table_of_mig_capabilities() {
    let inventory = inventory();
    let (whole, split) = (Device::Gpu(&inventory.gpus[0]), &inventory.gpus[2]);
    let mig = Device::Mig(split, &split.mig_devices[0]);
    let (config, monitor) = (
        Wanted {
            mig_config: true,
            ..compute()
        },
        Wanted {
            mig_monitor: true,
            ..compute()
        },
    );
    for (wanted, devices, is) in [
        (compute(), vec![whole], false),
        (compute(), vec![whole, mig], true),
        (config, vec![whole], true),
        (monitor, vec![whole], true),
    ] {
        assert_eq!(super::wants_mig_minors(&wanted, &devices), is, "{wanted:?}");
    }
}

#[test]
fn management_of_mig_devices() {
    let inventory = inventory();
    let split = [Device::Gpu(&inventory.gpus[2])];
    let config = Wanted {
        mig_config: true,
        ..compute()
    };
    let all = outcome(facts(), &config, &split);
    // nvidia-cap32 does not exist, and nvidia-cap41 would be another GPU's.
    assert_eq!(
        all,
        "nvidiactl nvidia-uvm nvidia-uvm-tools nvidia2 nvidia-caps/nvidia-cap1 nvidia-caps/nvidia-cap21 \
         nvidia-caps/nvidia-cap31 nvidia-caps/nvidia-cap22 proc:gpus/0000:03:00.0 proc:capabilities"
    );
    let limits = Limits {
        deny: vec!["MIG-20".to_owned()],
        ..Limits::default()
    };
    let limited = outcome(
        DeviceFacts {
            limits,
            withholds_mig: true,
            ..facts()
        },
        &config,
        &split,
    );
    assert_eq!(
        limited,
        "nvidiactl nvidia-uvm nvidia-uvm-tools nvidia2 nvidia-caps/nvidia-cap1 nvidia-caps/nvidia-cap31 \
         proc:gpus/0000:03:00.0 proc:capabilities/gpu2/mig/gi7/access proc:capabilities/gpu2/mig/gi7/ci0/access \
         proc:capabilities/mig/config"
    );
    // RunAs manages them does not get a part on top.
    let part = [Device::Mig(
        &inventory.gpus[2],
        &inventory.gpus[2].mig_devices[0],
    )];
    assert_eq!(outcome(facts(), &config, &part), all);
}

#[test]
fn on_wsl_one_node_stands_for_all_gpus() {
    let inventory = inventory();
    let [first, second] = [0, 1].map(|index: usize| Device::Gpu(&inventory.gpus[index]));
    let wsl = |count, denied: &[&str]| {
        let denied = denied.iter().map(|name| (*name).to_owned()).collect();
        let wsl = Some(WslGpus { count, denied });
        DeviceFacts {
            nodes: [node("dxg", 10, 125)].into(),
            dev_root: HostPath::new("/"),
            wsl,
            ..DeviceFacts::default()
        }
    };
    let graphics = Wanted {
        capabilities: Capabilities::new(&[Graphics, Compute]),
        gpus: true,
        ..Wanted::default()
    };
    let without_node = DeviceFacts {
        nodes: BTreeMap::new(),
        ..wsl(1, &[])
    };
    let missing = "the device node \"/dev/dxg\" is missing below \"/\"";
    let denied = "[devices] in config.toml denies GPU 1 to containers, and on WSL 2 a container has all GPUs or none";
    for (facts, devices, expected) in [
        (wsl(1, &[]), vec![first], "dxg"),
        (wsl(2, &[]), vec![first, second], "dxg"),
        (wsl(2, &[]), vec![first], "dxg ONH-234"),
        (wsl(2, &["1"]), vec![], ""),
        (wsl(2, &["1"]), vec![first], denied),
        (without_node, vec![first], missing),
    ] {
        assert_eq!(outcome(facts, &graphics, &devices), expected);
    }
}

fn daemon(uuid: &str, status: mps::Status) -> mps::Daemon {
    let path = mps::directory_of(uuid).join(mps::PIPE);
    mps::Daemon {
        index: 0,
        state: mps::State::new(uuid, mps::Phase::Ready),
        status,
        ipc: Some(Ipc {
            channel: Channel {
                root: HostPath::new("/"),
                path: path.clone(),
                expected: Expected::MpsDirectory,
            },
            source: HostPath::new(path),
            is_fixed: true,
            path: ContainerPath::new(CONTAINER_DIRECTORY).unwrap(),
        }),
    }
}

#[test]
fn a_gpu_that_is_shared_through_mps() {
    let inventory = inventory();
    let (first, second) = (
        Device::Gpu(&inventory.gpus[0]),
        Device::Gpu(&inventory.gpus[1]),
    );
    let sources = |status: mps::Status, devices: &[Device<'_>]| {
        let ours = daemon(first.uuid(), status);
        let usual = Ipc {
            source: HostPath::new(CONTAINER_DIRECTORY),
            ..ours.ipc.clone().unwrap()
        };
        let mut host = host(facts());
        host.ipc.push(usual);
        host.devices.mps.push(ours);
        let (edits, _) = edits(&host, &compute(), devices).map_err(|error| line(&error))?;
        let sources = edits.ipc.iter().map(|ipc| ipc.source.to_string());
        Ok::<_, String>(sources.collect::<Vec<_>>())
    };
    let pipe = format!("\"/run/oci-nvidia-mps/{}/pipe\"", first.uuid());
    assert_eq!(sources(mps::Status::Ready, &[first]), Ok(vec![pipe]));
    assert_eq!(
        sources(mps::Status::Dead, &[second]),
        Ok(vec!["\"/tmp/nvidia-mps\"".to_owned()]),
        "another GPU"
    );
    for (status, devices, expected) in [
        (
            mps::Status::Ready,
            vec![second, first],
            "GPU 0 is shared through MPS, and the container requests 2 GPUs",
        ),
        (
            mps::Status::Failed("it hangs".to_owned()),
            vec![first],
            "the MPS daemon of GPU 0 is not ready: it hangs",
        ),
        (
            mps::Status::Dead,
            vec![first],
            "the MPS daemon of GPU 0 is not ready: its supervisor has ended",
        ),
    ] {
        let error = sources(status, &devices).unwrap_err();
        assert_eq!(error, expected);
    }
}
