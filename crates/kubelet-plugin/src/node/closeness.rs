//! How close GPUs are to each other. Pure.

use std::collections::BTreeMap;

use crate::monitor::message::{Level, Link};

/// How close two GPUs are, by UUID. Larger numbers are closer. A pair that the driver does not know is missing.
pub type Closeness = BTreeMap<(String, String), u32>;

/// An NVLink is faster than any connection over PCIe, so each one counts more than all levels.
const NVLINK: u32 = 100;

/// Returns the closeness of the pairs with these links.
#[must_use]
pub fn of_links(links: &[Link]) -> Closeness {
    links
        .iter()
        .map(|link| {
            (
                link.gpus.clone(),
                of_level(link.level) + link.nvlinks.saturating_mul(NVLINK),
            )
        })
        .collect()
}

/// Returns the closeness of two GPUs at these NUMA nodes of which nothing else is known.
#[must_use]
pub fn of_numa_nodes(a: Option<u32>, b: Option<u32>) -> u32 {
    of_level(if a.is_some() && a == b {
        Level::Node
    } else {
        Level::System
    })
}

const fn of_level(level: Level) -> u32 {
    match level {
        Level::Board => 60,
        Level::Switch => 50,
        Level::Switches => 40,
        Level::HostBridge => 30,
        Level::Node => 20,
        Level::System => 10,
    }
}
