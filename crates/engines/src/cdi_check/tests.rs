use super::*;
use crate::{EngineKind, Version};
use cdi_spec::spec::{ContainerEdits, Device, Hook, Mount};
use nvidia_host::config::Limits;
use nvidia_host::inventory::BusId;
use nvidia_host::inventory::procfs::KernelGpu;
use std::path::PathBuf;

fn file(path: &str, priority: usize, version: &str) -> SpecFile {
    let mount = |path: &str| Mount {
        host_path: path.into(),
        container_path: path.into(),
        ..Mount::default()
    };
    let edits = |paths: &[&str]| ContainerEdits {
        mounts: paths.iter().map(|path| mount(path)).collect(),
        ..ContainerEdits::default()
    };
    let devices = ["0", "all"].map(|name| Device {
        name: name.into(),
        container_edits: edits(if name == "all" {
            &["/a", "/b"]
        } else {
            &["/a"]
        }),
        ..Device::default()
    });
    let spec = Spec {
        cdi_version: version.into(),
        kind: "nvidia.com/gpu".into(),
        devices: devices.into(),
        container_edits: edits(&["/common"]),
        ..Spec::default()
    };
    SpecFile {
        path: PathBuf::from(path),
        priority,
        for_everybody: true,
        spec: Ok(spec),
    }
}

fn judged(files: &[SpecFile], readers: &[SpecReader], gone: &[&str]) -> Vec<(bool, String)> {
    let now = Now {
        readers,
        stamp: None,
        host: &HostView::default(),
        units_write: false,
        limits: &NodeLimits::default(),
        plugins: &[],
    };
    let verdicts = devices(files, &now, |path| !gone.contains(&path));
    verdicts
        .into_iter()
        .map(|verdict| (verdict.ok, verdict.reason))
        .collect()
}

fn podman(minor: u32) -> SpecReader {
    SpecReader {
        kind: EngineKind::Podman,
        version: Some(Version(4, minor, 0)),
    }
}

fn crio(minor: u32) -> SpecReader {
    SpecReader {
        kind: EngineKind::Crio,
        version: Some(Version(1, minor, 0)),
    }
}

#[test]
fn the_first_reason() {
    let one = || file("/etc/cdi/x.yaml", 0, "0.5.0");
    let good = (true, String::new());
    assert_eq!(
        judged(&[one()], &[podman(3)], &[]),
        [good.clone(), good.clone()]
    );
    for (files, engine, gone, reason) in [
        (
            vec![one()],
            2,
            &[][..],
            "Podman as root (4.2.0) does not read cdiVersion 0.5.0",
        ),
        (
            vec![one()],
            3,
            &["/common", "/a"],
            "\"/a\" is missing on the host (and 1 more)",
        ),
        // A newer engine could not use it either.
        (
            vec![one()],
            2,
            &["/common", "/a"],
            "\"/a\" is missing on the host (and 1 more)",
        ),
        (
            vec![one(), file("/etc/cdi/y.yaml", 0, "0.5.0")],
            3,
            &[],
            "both contain the device",
        ),
    ] {
        let (ok, why) = judged(&files, &[podman(engine)], gone).remove(0);
        assert!(!ok && why.contains(reason), "{why}");
    }
    assert_eq!(
        judged(&[one()], &[], &["/b"])
            .iter()
            .filter(|(ok, _)| *ok)
            .count(),
        1,
        "only all has /b"
    );
    let winner = [one(), file("/var/run/cdi/y.yaml", 1, "0.5.0")];
    assert_eq!(judged(&winner, &[], &[]), [good.clone(), good]);
    let hidden = SpecFile {
        for_everybody: false,
        ..one()
    };
    assert_eq!(
        judged(&[hidden], &[], &[])[0],
        (true, "rootless Podman cannot read the file".to_owned())
    );
    assert!(
        judged(&[file("/x", 0, "0.6.0")], &[podman(9)], &[])[0]
            .1
            .starts_with("it is unknown")
    );
}

/// The spec of another program for CRI-O is not reported because of an old Podman.
#[test]
fn specs_of_other_programs() {
    let readers = [podman(3), crio(37)];
    let judge = |spec: &SpecFile, readers: &[SpecReader], gone: &str| {
        let now = Now {
            readers,
            stamp: None,
            host: &HostView::default(),
            units_write: false,
            limits: &NodeLimits::default(),
            plugins: &[],
        };
        devices(std::slice::from_ref(spec), &now, |path| path != gone).remove(0)
    };
    let theirs = file("/var/run/cdi/theirs.json", 0, "0.7.0");
    let verdict = judge(&theirs, &readers, "");
    assert!(
        verdict.ok && !verdict.ours && verdict.unread_by == ["Podman as root (4.3.0)"],
        "{verdict:?}"
    );
    assert!(!verdict.hint.contains("cdi generate"), "{verdict:?}");
    let verdict = judge(&theirs, &readers[..1], "");
    assert!(
        !verdict.ok && verdict.unread_by.is_empty(),
        "no engine reads it: {verdict:?}"
    );
    let mut with_hook = theirs;
    let Ok(spec) = &mut with_hook.spec else {
        unreachable!()
    };
    spec.container_edits.hooks = vec![Hook {
        path: "/usr/bin/nvidia-ctk".into(),
        ..Hook::default()
    }];
    let verdict = judge(&with_hook, &readers, "/usr/bin/nvidia-ctk");
    assert_eq!(
        verdict.reason,
        "\"/usr/bin/nvidia-ctk\" is missing on the host"
    );
    assert!(
        !verdict.ok
            && verdict
                .hint
                .starts_with("install oci-nvidia-hook-compat, which contains nvidia-ctk, or"),
        "{verdict:?}"
    );
    let verdict = judge(&with_hook, &readers, "/a");
    assert_eq!(
        verdict.hint,
        "run the program that wrote /var/run/cdi/theirs.json again, or remove the file"
    );
    // The spec of this program is for all engines of the host.
    let Ok(spec) = &mut with_hook.spec else {
        unreachable!()
    };
    let edits = RootfsEdits {
        stamp: Some("driver=1,boot=b,host=7".into()),
        ..RootfsEdits::default()
    };
    spec.container_edits.hooks = vec![Hook {
        path: "/hook".into(),
        args: edits.to_args().unwrap(),
        ..Hook::default()
    }];
    let verdict = judge(&with_hook, &readers, "");
    assert!(
        !verdict.ok && verdict.ours && verdict.hint.contains("--no-additional-gids"),
        "{verdict:?}"
    );
    assert_eq!(verdict.unread_by, ["Podman as root (4.3.0)"]);
}

/// Of any kind, with and without numbers, of this program and of others.
#[test]
fn a_device_with_a_denied_gpu() {
    let gpu = |minor: u32| KernelGpu {
        bus_id: BusId {
            domain: 0,
            bus: minor + 1,
            device: 0,
        },
        minor: Some(minor),
        ..KernelGpu::default()
    };
    let deny = Limits {
        deny: vec!["1".to_owned()],
        ..Limits::default()
    };
    let limits = NodeLimits::new(deny, vec![gpu(0), gpu(1)], Vec::new());
    let node = |path: &str, host: Option<&str>, number: Option<(i64, i64)>| DeviceNode {
        path: path.to_owned(),
        host_path: host.map(str::to_owned),
        major: number.map(|(major, _)| major),
        minor: number.map(|(_, minor)| minor),
        ..DeviceNode::default()
    };
    let judge = |kind: &str, node: DeviceNode, is_ours: bool| {
        let mut file = file("/var/run/cdi/x.json", 0, "0.5.0");
        let Ok(spec) = &mut file.spec else {
            unreachable!()
        };
        spec.kind = kind.to_owned();
        spec.devices.truncate(1);
        spec.devices[0].container_edits.device_nodes = vec![node];
        let edits = RootfsEdits {
            stamp: Some("driver=1,boot=b,host=7".into()),
            ..RootfsEdits::default()
        };
        let hook = Hook {
            path: "/hook".into(),
            args: edits.to_args().unwrap(),
            ..Hook::default()
        };
        spec.container_edits.hooks = if is_ours { vec![hook] } else { Vec::new() };
        devices(
            &[file],
            &Now {
                readers: &[],
                stamp: None,
                host: &HostView::default(),
                units_write: false,
                limits: &limits,
                plugins: &[],
            },
            |_| true,
        )
        .remove(0)
    };
    for (node, denied) in [
        (node("/dev/nvidia1", None, None), true),
        (node("/dev/nvidia1", None, Some((195, 1))), true),
        (node("/dev/x", Some("/root/dev/nvidia1"), None), true),
        (node("/dev/nvidia0", Some("/dev/nvidia1"), None), true),
        (node("/dev/nvidia0", None, Some((195, 1))), true),
        (node("/dev/nvidia0", None, None), false),
        (node("/dev/nvidia1", None, Some((1, 3))), false),
        (node("/dev/nvidia-uvm", None, None), false),
        (node("/dev/nvidiactl", None, Some((195, 255))), false),
    ] {
        let verdict = judge("nvidia.com/gpu", node.clone(), false);
        assert_eq!((verdict.ok, verdict.denied), (!denied, denied), "{node:?}");
    }
    for (kind, is_ours, hint) in [
        (
            "nvidia.com/gpu",
            true,
            "run \"oci-nvidia-hook cdi refresh --output /var/run/cdi/x.json\"",
        ),
        (
            "k8s.device-plugin.nvidia.com/gpu",
            true,
            "run \"systemctl restart oci-nvidia-kubelet-plugin\"",
        ),
        (
            "k8s.gpu.nvidia.com/gpu",
            true,
            "run \"systemctl restart oci-nvidia-kubelet-plugin\"",
        ),
        (
            "k8s.gpu.nvidia.com/claim",
            false,
            "remove the GPU from /var/run/cdi/x.json with the program",
        ),
    ] {
        let verdict = judge(kind, node("/dev/nvidia1", None, None), is_ours);
        assert!(
            verdict.denied && verdict.hint.starts_with(hint),
            "{verdict:?}"
        );
        assert_eq!(
            verdict.reason,
            "it includes \"/dev/nvidia1\", which [devices] in config.toml denies"
        );
    }
}

/// A spec in /etc/cdi outlives a reboot; one that hides it in /var/run/cdi does not. The new spec has the kind of the old one.
#[test]
fn a_spec_is_replaced_at_its_place() {
    for (kind, file, arguments) in [
        ("nvidia.com/gpu", "/var/run/cdi/nvidia.yaml", ""),
        ("", "/var/run/cdi/nvidia.yaml", ""),
        (
            "nvidia.com/gpu",
            "/etc/cdi/n.json",
            " --output /etc/cdi/n.json",
        ),
        ("nvidia.com/gds", "/var/run/cdi/nvidia-gds.yaml", ""),
        (
            "nvidia.com/gds",
            "/etc/cdi/x.yaml",
            " --class gds --output /etc/cdi/x.yaml",
        ),
        (
            "example.org/gpu",
            "/etc/cdi/n.json",
            " --vendor example.org --output /etc/cdi/n.json",
        ),
        (
            "example.org/gds",
            "/etc/cdi/n-gds.json",
            " --vendor example.org --output /etc/cdi/n.json",
        ),
    ] {
        let spec = Spec {
            kind: kind.to_owned(),
            ..Spec::default()
        };
        let hint = |units_write| {
            let now = Now {
                readers: &[],
                stamp: None,
                host: &HostView::default(),
                units_write,
                limits: &NodeLimits::default(),
                plugins: &[],
            };
            hints::generate(&spec, file, &now)
        };
        let generate = format!("run \"oci-nvidia-hook cdi generate{arguments}\"");
        assert_eq!(hint(false), generate, "{kind} {file}");
        // The spec of the units in /var/run/cdi takes its place.
        let is_shadowed = kind == "nvidia.com/gpu" && file.starts_with("/etc");
        let expected = if is_shadowed {
            format!("run \"rm {file}\" and \"oci-nvidia-hook cdi refresh --create\"")
        } else {
            generate
        };
        assert_eq!(hint(true), expected, "{kind} {file}");
    }
}

#[test]
fn conflicting_files() {
    let files = |priorities: &[usize]| -> Vec<_> {
        priorities
            .iter()
            .map(|priority| file("/x.yaml", *priority, "0.5.0"))
            .collect()
    };
    for (priorities, ours, other) in [
        (&[0, 1][..], 1, None),
        (&[0, 1], 0, Some(1)),
        (&[1, 1], 0, Some(1)),
        (&[1, 1], 1, Some(0)),
        // Two other files conflict with each other.
        (&[0, 0, 1], 2, Some(0)),
    ] {
        let files = files(priorities);
        let found = conflicting(&files, ours).map(std::ptr::from_ref);
        assert_eq!(
            found,
            other.map(|other: usize| std::ptr::from_ref(&files[other])),
            "{priorities:?} {ours}"
        );
    }
}

fn named(name: &str) -> SpecFile {
    file(&format!("/var/run/cdi/{name}"), 0, "0.5.0")
}

/// Returns what reports that a host has only this unit.
fn only_unit(unit: &str) -> impl Fn(&str) -> bool {
    let unit_file = format!("/etc/systemd/system/{unit}");
    move |path| path == unit_file
}

#[test]
fn one_of_two_files_is_removed() {
    let (refresh, nixos) = (
        "nvidia-cdi-refresh.service",
        "nvidia-container-toolkit-cdi-generator.service",
    );
    for (kept, removed, installed, hint) in [
        ("nvidia.yaml", "other.yaml", "", "run \"rm "),
        ("nvidia.yaml", "a.yaml", "", "run \"rm "),
        (
            "nvidia.yaml",
            "nvidia-container-toolkit.json",
            "",
            "run \"rm ",
        ),
        (
            "nvidia.yaml",
            "nvidia-container-toolkit.json",
            refresh,
            "run \"rm ",
        ),
        (
            "nvidia.yaml",
            "nvidia-container-toolkit.json",
            nixos,
            "set hardware.nvidia-container-toolkit.enable = false",
        ),
        ("a.yaml", "b.yaml", refresh, "run \"rm "),
    ] {
        let files = [named(kept), named(removed)];
        let exists = only_unit(installed);
        let advice = how_to_separate(&files[0], &files[1], &exists);
        assert!(advice.starts_with(hint), "{advice}");
        assert!(
            advice.contains(&format!("rm /var/run/cdi/{removed}\"")),
            "{advice}"
        );
        assert_eq!(
            advice.contains("would write the file again"),
            !hint.contains("rm")
        );
        assert_eq!(advice, how_to_separate(&files[1], &files[0], &exists));
    }
    // A spec of this program, which has the usual name, remains; another program's with that name is written again.
    let hook = Hook {
        args: vec!["oci-nvidia-hook".into(), "rootfs".into()],
        ..Hook::default()
    };
    let mut ours = named("mine.yaml");
    ours.spec.as_mut().unwrap().container_edits.hooks.push(hook);
    assert!(ours.spec.as_ref().is_ok_and(is_ours));
    let advice = how_to_separate(&named("nvidia.yaml"), &ours, &only_unit(refresh));
    assert!(
        advice.starts_with("run \"systemctl disable --now nvidia-cdi-refresh.path"),
        "{advice}"
    );
}

#[test]
fn an_unknown_name_gets_a_suggestion() {
    let known = devices(
        &[file("/x.yaml", 0, "0.5.0")],
        &Now {
            readers: &[],
            stamp: None,
            host: &HostView::default(),
            units_write: false,
            limits: &NodeLimits::default(),
            plugins: &[],
        },
        |_| true,
    );
    for (name, hint) in [
        ("nvidia.com/gpu=gpu0", "did you mean nvidia.com/gpu=0?"),
        ("all", "did you mean nvidia.com/gpu=all?"),
        ("gpu=0", "did you mean nvidia.com/gpu=0?"),
        (
            "gpu=7",
            "a CDI name has the form vendor/class=device, such as nvidia.com/gpu=0",
        ),
        (
            "nvidia.com/gpu=7",
            "use one of nvidia.com/gpu=0, nvidia.com/gpu=all",
        ),
        ("nvidia.com/x=7", "run \"oci-nvidia-hook cdi generate\""),
        (
            "amd.com/gpu=7",
            "specs of another vendor are written by that vendor's program",
        ),
    ] {
        assert_eq!(unknown(name, &known).hint, hint);
    }
}
