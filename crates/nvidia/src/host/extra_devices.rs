//! Finds the devices next to the GPUs, below the roots of the driver: the nodes of the features, and IMEX channels.

use std::path::Path;

use base::report::Finding;
use base::tree::Tree;

use super::Roots;
use crate::decimal::parse_decimal;
use crate::driver::files::{self, PlacedFile};
use crate::driver::ipc::{self, Ipc};
use crate::driver::nodes::{DeviceNode, IMEX_CHANNELS, NodeState};
use crate::feature::Feature;
use crate::glob;

/// Returns the device nodes of a feature by their names below /dev. Like NVIDIA's stack, this leaves out files of another type.
pub(crate) fn nodes(dev: &Tree, feature: Feature) -> Vec<(String, DeviceNode)> {
    let mut found: Vec<(String, DeviceNode)> = Vec::new();
    for pattern in feature.row().nodes {
        let names = if pattern.contains('*') {
            matching(dev, pattern)
        } else {
            vec![(*pattern).to_owned()]
        };
        for name in names {
            if !found.iter().any(|(known, _)| *known == name)
                && let NodeState::Device(node) = NodeState::inspect(dev, &name)
            {
                found.push((name, node));
            }
        }
    }
    found
}

/// Returns the sorted names below /dev that match a pattern.
fn matching(dev: &Tree, pattern: &str) -> Vec<String> {
    let (dir, pattern) = pattern.rsplit_once('/').unwrap_or(("", pattern));
    let names = dev
        .names(&Path::new("/dev").join(dir))
        .into_iter()
        .filter_map(|name| name.into_string().ok());
    let matching = names.filter(|name| glob::matches(pattern.as_bytes(), name.as_bytes()));
    matching
        .map(|name| {
            if dir.is_empty() {
                name
            } else {
                format!("{dir}/{name}")
            }
        })
        .collect()
}

/// The files and directories that a container gets with the nodes of a feature.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) files: Vec<PlacedFile>,
    pub(crate) directories: Vec<Ipc>,
    pub(crate) findings: Vec<Finding>,
}

/// Returns those files and directories that exist below the driver root.
pub(crate) fn parts(driver: &Tree, feature: Feature) -> Parts {
    let row = feature.row();
    let files = row
        .files
        .iter()
        .filter_map(|path| files::at(driver, Path::new(path)))
        .collect();
    let mut parts = Parts {
        files,
        ..Parts::default()
    };
    for path in row.directories {
        match ipc::read_only_directory(driver, Path::new(path)) {
            Ok(found) => parts.directories.extend(found),
            Err(refused) => parts.findings.push(refused),
        }
    }
    parts
}

/// Returns the IMEX channels that have a node, in their order.
pub(crate) fn imex_channels(roots: &Roots) -> Vec<(u32, DeviceNode)> {
    let names = matching(&roots.dev, &format!("{IMEX_CHANNELS}/channel*"));
    let found = names.into_iter().filter_map(|name| {
        let digits = name.rsplit_once("/channel")?.1;
        let number = parse_decimal(digits)?;
        match NodeState::inspect(&roots.dev, &name) {
            NodeState::Device(node) if node.minor == number => Some((number, node)),
            _ => None,
        }
    });
    found.collect()
}
