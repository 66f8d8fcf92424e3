//! Compares CDI specs with the output of nvidia-ctk, row by row: `tests/fixtures/conformance/cdi.json`.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use base::paths::{ContainerPath, HostPath};
use base::tree::Tree;
use cdi_spec::file::{self, Format, from_value};
use cdi_spec::spec::{ContainerEdits, Device, DeviceNode, Mount, Spec};
use nvidia_host::capability::{Capabilities, Capability};
use nvidia_host::cdi::lower::{SpecContext, device_node, rootfs_edits};
use nvidia_host::driver::access::Permissions;
use nvidia_host::driver::files;
use nvidia_host::edits::{self, DevLink, Edits, HostFile, Need, Placement};

use crate::conformance::{rows_of, table};
use crate::json_schema::fields;
use crate::support::{scratch, write_file};

tests! {
    &[] => every_group, additional_gids, device_nodes, library_links, graphics_configs, versions, simplified,
        merged_devices, order;
}

const TESTED: [&str; 10] = [
    "additional_gids",
    "device_node",
    "so_symlinks",
    "graphics_configs",
    "spec_version",
    "dedupe",
    "simplify",
    "merged_device",
    "sort_mounts",
    "sort_device_nodes",
];

/// Groups that do not concern the contents of our specs, and the reasons.
const NOT_OURS: [(&str, &str); 7] = rows! {
    "hook_disabled", "we have one hook entry, and no options that take parts of it away";
    "imex_channel_ids", "no IMEX devices; requests for channels are tested with hook.json";
    "so_link", "a helper of nvidia-ctk: libraries are found by catalogue, links by SONAME";
    "is_lib_name", "a helper of nvidia-ctk";
    "is_driver_library", "unit tests of driver::libraries";
    "driver_lib_dirs", "the tests of hosts, tests/fixtures/hosts";
    "root_transform_path", "a command of oci-nvidia-hook-compat, which has its own test";
};

fn rows(group: &str) -> Vec<Value> {
    rows_of("cdi.json", group)
}

fn every_group() {
    let table = table("cdi.json");
    let mut groups = fields(&table["groups"], "id");
    let mut known: Vec<_> = NOT_OURS
        .iter()
        .map(|(group, _)| *group)
        .chain(TESTED)
        .collect();
    groups.sort_unstable();
    known.sort_unstable();
    assert_eq!(groups, known);
}

/// The bit of Go for a character device. The permission bits are the same.
const GO_CHAR_DEVICE: u64 = 1 << 21;

fn additional_gids() {
    for row in rows("additional_gids") {
        let node = &row["input"]["device_node"];
        let mode = node["fileMode"].as_u64().unwrap_or_default();
        if mode & GO_CHAR_DEVICE == 0 {
            // Our edits contain character devices only.
            assert_eq!(row["expect"], Value::Null, "{row}");
            continue;
        }
        let node = Permissions {
            mode: u32::try_from(mode & 0o777).unwrap(),
            uid: 0,
            gid: u32::try_from(node["gid"].as_u64().unwrap_or_default()).unwrap(),
        };
        assert_eq!(
            json!(node.additional_gid().map(|gid| [gid])),
            row["expect"],
            "{row}"
        );
    }
}

/// The permissions are our own (`rw`, because containers need not create nodes), and the mode consists of permission bits only.
fn device_nodes() {
    for row in rows("device_node") {
        let path = row["input"]["path"].as_str().unwrap();
        let source = row["input"]["hostPath"].as_str().unwrap_or(path);
        let number =
            |name: &str| u32::try_from(row["expect"][name].as_u64().unwrap_or_default()).unwrap();
        let node = edits::DeviceNode {
            source: HostPath::new(source),
            path: ContainerPath::new(path).unwrap(),
            major: number("major"),
            minor: number("minor"),
            permissions: Permissions {
                mode: number("fileMode") & 0o777,
                uid: 0,
                gid: number("gid"),
            },
        };
        let mut lowered = device_node(&node, nvidia_host::config::NodeAccess::Host).unwrap();
        let mut expected = edits_of(json!({"deviceNodes": [row["expect"]]}))
            .device_nodes
            .remove(0);
        assert_eq!(lowered.permissions.take().unwrap(), "rw");
        expected.permissions = None;
        expected.file_mode = expected.file_mode.map(|mode| mode & 0o777);
        if row["mocked_stat"] == false {
            // Our edits do not contain a node that could not be examined.
            (lowered.major, lowered.minor) = (None, None);
        }
        assert_eq!(lowered, expected, "{row}");
    }
}

fn library_links() {
    for row in rows("so_symlinks") {
        let source = Path::new(row["input"]["host_library"].as_str().unwrap());
        let target = Path::new(row["input"]["container_library"].as_str().unwrap());
        let file_name = source.file_name().unwrap();
        let mut file = HostFile {
            source: HostPath::new(source),
            placement: Placement::At(ContainerPath::new(target.parent().unwrap()).unwrap()),
            name: file_name.into(),
            sonames: [file_name.into()].into(),
            need: Need::Required,
        };
        let mut links = Vec::new();
        for link in row["expect"]["links"].as_array().unwrap() {
            let (text, path) = link.as_str().unwrap().split_once("::").unwrap();
            let name = Path::new(path).file_name().unwrap();
            if text == file_name {
                file.sonames.insert(name.into());
            } else {
                links.push(DevLink {
                    name: name.into(),
                    target: text.into(),
                });
            }
        }
        let args = rootfs_edits(
            &Edits {
                files: vec![file],
                links,
                ..Edits::default()
            },
            &host(),
        )
        .to_args()
        .unwrap();
        let mut made: Vec<_> = args[2..]
            .chunks(2)
            .map(|pair| (pair[0].as_str(), json!(pair[1])))
            .collect();
        made.reverse();
        let expected: Vec<_> = row["expect"]["links"]
            .as_array()
            .unwrap()
            .iter()
            .map(|link| ("--required-link", link.clone()))
            .collect();
        assert_eq!(made, expected, "{row}");
    }
}

fn host() -> SpecContext {
    SpecContext {
        driver_root: HostPath::new("/"),
        proc_dir: None,
        program: HostPath::new("/usr/bin/oci-nvidia-hook"),
        additional_gids: false,
        node_access: nvidia_host::config::NodeAccess::Host,
        image: None,
    }
}

fn graphics_configs() {
    for row in rows("graphics_configs") {
        let dir = scratch();
        for file in row["input"]["files"].as_array().unwrap() {
            let path = dir
                .path()
                .join(file.as_str().unwrap().trim_start_matches('/'));
            write_file(path, "");
        }
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        let found = files::descriptions(&root, "535.1", Capabilities::new(&Capability::ALL));
        let found: BTreeMap<_, _> = found
            .iter()
            .map(|file| (root.inside(&file.source).unwrap(), file.target.absolute()))
            .collect();
        assert_eq!(json!(found), row["expect"], "{row}");
    }
}

fn versions() {
    for row in rows("spec_version") {
        let text = row["expect"]["text"].as_str().unwrap();
        let spec = file::parse(text.as_bytes()).unwrap();
        assert_eq!(spec.check(), Ok(()), "{row}");
        assert_eq!(
            file::parse(Format::Yaml.print(&spec).unwrap().as_bytes()).unwrap(),
            spec,
            "{row}"
        );
        let chosen = !["version is overridden", "raw spec is used as is"]
            .contains(&row["name"].as_str().unwrap());
        let minimum = spec.clone().with_minimum_version();
        assert_eq!(minimum == spec, chosen, "{row}");
        assert!(minimum.cdi_version <= spec.cdi_version, "{row}");
    }
}

/// A part of a spec in the form of the rows.
fn spec(part: &Value) -> Spec {
    let mut part = part.clone();
    part["cdiVersion"] = json!("0.3.0");
    from_value(part).unwrap()
}

fn edits_of(edits: Value) -> ContainerEdits {
    spec(&json!({"containerEdits": edits})).container_edits
}

fn devices_of(devices: &Value) -> Vec<Device> {
    spec(&json!({"devices": devices})).devices
}

fn simplified() {
    for row in rows("dedupe").into_iter().chain(rows("simplify")) {
        if row["input"].is_null() {
            continue; // not a spec at all: the types here cannot express it
        }
        assert_eq!(
            spec(&row["input"]).simplify(),
            spec(&row["expect"]),
            "{row}"
        );
    }
}

fn merged_devices() {
    for row in rows("merged_device") {
        let devices = devices_of(&row["input"]["devices"]);
        let merged = Device::merged(&devices, row["input"]["name"].as_str().unwrap());
        let expected = if row["expect"].is_null() {
            vec![]
        } else {
            devices_of(&json!([row["expect"]]))
        };
        assert_eq!(merged.unwrap_or_default().as_slice(), expected, "{row}");
    }
}

fn order() {
    for row in rows("sort_mounts") {
        let mount = |path: &Value| Mount {
            container_path: path.as_str().unwrap().into(),
            ..Mount::default()
        };
        let mounts = row["input"].as_array().unwrap().iter().map(mount).collect();
        let sorted = ContainerEdits {
            mounts,
            ..ContainerEdits::default()
        }
        .sort();
        let paths: Vec<_> = sorted
            .mounts
            .iter()
            .map(|mount| &mount.container_path)
            .collect();
        assert_eq!(json!(paths), row["expect"], "{row}");
    }
    for row in rows("sort_device_nodes") {
        let node = |path: &Value| DeviceNode {
            path: path.as_str().unwrap().into(),
            ..DeviceNode::default()
        };
        let device_nodes = row["input"].as_array().unwrap().iter().map(node).collect();
        let sorted = ContainerEdits {
            device_nodes,
            ..ContainerEdits::default()
        }
        .sort();
        let paths: Vec<_> = sorted.device_nodes.iter().map(|node| &node.path).collect();
        assert_eq!(json!(paths), row["expect"], "{row}");
    }
}
