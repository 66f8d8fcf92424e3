//! Checks that the hook, the additions to config.json and a CDI spec have the same effect.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;

use proptest::prelude::*;

use base::paths::{ContainerPath, HostPath};
use cdi_spec::spec::ContainerEdits;
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::cdi::lower::{STAGE, SpecContext, lower};
use nvidia_host::driver::access::Permissions;
use nvidia_host::driver::ipc::{Expected, Ipc};
use nvidia_host::driver::ldcache::Arch;
use nvidia_host::edits::placement::{Compat32, Link, Loader, RootfsFacts};
use nvidia_host::edits::{self, Channel, DevLink, Edits, HostFile, Need, Placement, ProcMask};

use super::step::Step;
use super::steps;

fn host() -> SpecContext {
    SpecContext {
        driver_root: HostPath::new("/"),
        proc_dir: Some(HostPath::new("/proc/driver/nvidia")),
        program: HostPath::new("/usr/bin/oci-nvidia-hook"),
        additional_gids: false,
        node_access: nvidia_host::config::NodeAccess::Host,
        image: None,
    }
}

fn file_in(dir: &str, name: &str, placement: u8, soname: Option<&str>) -> HostFile {
    HostFile {
        source: HostPath::new(format!("/{dir}/{name}")),
        placement: match placement {
            0 => Placement::Library(Arch::native()),
            1 => Placement::LibraryBelow(Arch::native(), "vdpau"),
            2 => Placement::Binary,
            _ => Placement::At(ContainerPath::new("etc/x").unwrap()),
        },
        name: name.into(),
        sonames: soname
            .map(OsString::from)
            .filter(|_| placement < 2)
            .into_iter()
            .collect(),
        need: Need::Optional,
    }
}

fn name() -> impl Strategy<Value = String> {
    "[a-c]{1,2}"
}

prop_compose! {
    fn any_edits()(
        // one directory for each kind, like a real driver
        files in prop::collection::vec((name(), 0..4_u8, prop::option::of(name())), 0..6),
        nodes in prop::collection::vec(0..4_u32, 0..4),
        ipc in prop::collection::vec((name(), any::<bool>()), 0..2),
        links in prop::collection::vec((name(), name()), 0..2),
        mounts in prop::option::of(prop::collection::vec(name(), 0..3)),
        egl_devices in 0..16_u64,
    ) -> Edits {
        let file = |(name, placement, soname): &(String, u8, Option<String>)| {
            let dir = if *placement == 1 { "lib/vdpau" } else { "lib" };
            file_in(dir, &format!("lib{name}"), *placement, soname.as_deref())
        };
        let edits = Edits {
            files: files.iter().map(file).collect(),
            ipc: ipc.iter().map(|(name, is_fixed)| Ipc {
                channel: Channel {
                    root: HostPath::new("/"),
                    path: format!("/run/{name}").into(),
                    expected: Expected::Socket,
                },
                is_fixed: *is_fixed,
                source: HostPath::new(format!("/run/{name}")),
                path: ContainerPath::new(format!("run/{name}")).unwrap(),
            }).collect(),
            links: links.iter().map(|(name, target)| DevLink { name: name.into(), target: target.into() }).collect(),
            nodes: nodes.iter().map(|minor| edits::DeviceNode {
                source: HostPath::new(format!("/dev/nvidia{minor}")),
                path: ContainerPath::new(format!("dev/nvidia{minor}")).unwrap(),
                major: 195,
                minor: *minor,
                permissions: Permissions::default(),
            }).collect(),
            node_links: nodes.iter().map(|minor| edits::NodeLink {
                path: ContainerPath::new(format!("dev/by-path/{minor}")).unwrap(),
                text: format!("../nvidia{minor}").into(),
                node: ContainerPath::new(format!("dev/nvidia{minor}")).unwrap(),
            }).collect(),
            proc_mask: mounts.map(|mounts| ProcMask {
                files: vec![],
                mounts: mounts.iter().map(|name| (name.into(), HostPath::new(format!("/proc/{name}")))).collect(),
            }),
            egl_devices,
        };
        Edits::default().merge(edits)
    }
}

/// The edits of a device, which contain no files: those belong to the driver.
fn any_device() -> impl Strategy<Value = Edits> {
    any_edits().prop_map(|edits| Edits {
        files: vec![],
        links: vec![],
        ..edits
    })
}

fn any_image() -> impl Strategy<Value = RootfsFacts> {
    let loader = prop_oneof![Just(Loader::Glibc), Just(Loader::Musl), Just(Loader::None)];
    let compat32 = prop_oneof![
        Just(Compat32::Lib),
        Just(Compat32::Lib32),
        Just(Compat32::Nowhere)
    ];
    let facts = (any::<bool>(), any::<bool>(), compat32, loader);
    facts.prop_map(|(debian, merged, compat32, loader)| RootfsFacts {
        debian,
        compat32,
        merged,
        loader,
    })
}

/// The effects of a spec's edits as text, including the effects of the hook entry.
fn of_spec(edits: &ContainerEdits) -> BTreeSet<String> {
    let mounts = edits
        .mounts
        .iter()
        .map(|mount| format!("mount {} {}", mount.host_path, mount.container_path));
    let nodes = edits
        .device_nodes
        .iter()
        .map(|node| format!("{} {:?} {:?}", node.path, node.major, node.minor));
    let hooks = edits.hooks.iter().map(|hook| {
        assert!(!hook.env.is_empty() && hook.path.starts_with('/') && hook.hook_name == STAGE);
        RootfsEdits::from_entry(&hook.args).unwrap()
    });
    let rest = hooks.fold(RootfsEdits::default(), RootfsEdits::merge);
    mounts.chain(nodes).chain(of_rest(&rest)).collect()
}

fn of_rest(rest: &RootfsEdits) -> Vec<String> {
    let links = rest
        .links
        .iter()
        .map(|(link, text)| format!("link {link} {text:?}"));
    let libraries = rest.libraries.iter().map(|library| format!("{library:?}"));
    let shown = rest.shown.iter().map(|shown| format!("{shown:?}"));
    let others = [
        format!("mask {:?}", rest.mask),
        format!("egl {:#x}", rest.egl_devices),
    ];
    let channels = rest
        .channels
        .iter()
        .map(|ipc| format!("mount {0} {0}", ipc.path.display()));
    let links = links.chain(channels);
    links.chain(libraries).chain(shown).chain(others).collect()
}

/// The effects of the hook, in the same form. Without `image`, in an image with the library directories of the host.
fn of_hook(edits: &Edits, image: Option<RootfsFacts>) -> BTreeSet<String> {
    let mut words = BTreeSet::new();
    let mut rest = RootfsEdits {
        egl_devices: edits.egl_devices,
        ..RootfsEdits::default()
    };
    let at_host = |path: &ContainerPath| {
        let path = path.absolute();
        if image.is_some() {
            return ContainerPath::new(path).unwrap();
        }
        let at_host = path
            .strip_prefix("/usr/lib64")
            .map(|below| Path::new("/lib").join(below));
        ContainerPath::new(at_host.unwrap_or(path)).unwrap()
    };
    for step in steps::lower(edits, image.unwrap_or_default()) {
        match step {
            // An engine can only mount what the hook copies.
            Step::MountFile { source, target, .. }
            | Step::CopyFile { source, target, .. }
            | Step::MountIpc { source, target, .. } => {
                let target = at_host(&target).absolute();
                words.insert(format!(
                    "mount {} {}",
                    source.as_path().display(),
                    target.display()
                ));
            }
            Step::MountNode {
                node:
                    edits::DeviceNode {
                        path: target,
                        major,
                        minor,
                        ..
                    },
                ..
            } => {
                let (major, minor) = (Some(major), Some(minor));
                words.insert(format!(
                    "{} {major:?} {minor:?}",
                    target.absolute().display()
                ));
            }
            Step::Link(Link { link, text, .. }) => {
                rest.links.insert(at_host(&link), text.into());
            }
            Step::MaskProc(mask) => {
                rest.mask = host().proc_dir;
                rest.shown = mask.mounts.into_iter().collect();
            }
            Step::UpdateLinkerCache(entries) => {
                rest.libraries = entries
                    .iter()
                    .map(|entry| (entry.arch, at_host(&entry.path)))
                    .collect();
            }
            Step::MountFiles { .. }
            | Step::MaskParams
            | Step::SetMode { .. }
            | Step::ListDirectories { .. } => {}
        }
    }
    words.extend(of_rest(&rest));
    words
}

proptest! {
    #[test]
    fn the_hook_and_the_spec_agree(common in any_edits(), devices in prop::collection::vec(any_device(), 0..4)) {
        let all = devices.iter().cloned().fold(common.clone(), Edits::merge);
        let union = devices.iter().map(|edits| lower(edits, &host(), RootfsEdits::default()));
        let union = union.fold(lower(&common, &host(), RootfsEdits::default()), ContainerEdits::merge);
        prop_assert_eq!(of_spec(&union), of_hook(&all, None));
    }

    /// Lowers the same edits in both ways: config.json gets exactly what the hook injects.
    #[test]
    fn the_hook_does_what_config_json_gets(edits in any_edits(), image in any_image()) {
        let lowered = lower(&edits, &SpecContext { image: Some(image), ..host() }, RootfsEdits::default());
        prop_assert_eq!(of_spec(&lowered), of_hook(&edits, Some(image)));
    }
}
