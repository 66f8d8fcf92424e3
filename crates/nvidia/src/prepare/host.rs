//! Loads the driver's modules and creates its device nodes, for the command `prepare` and for the first container.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::make_node::{Made, NodeChange};
use super::{ModuleState, NodeToCreate, make_node};
use crate::config::Config;
use crate::driver::access::Permissions;
use crate::driver::nodes::{DeviceNode, NodeState};
use crate::driver::params::NodePolicy;
use crate::host::Roots;
use base::paths::{ContainerPath, HostPath};
use base::sys::{ns, process};

/// How long the driver's modules may take to load at boot. Loading a module of 100 MB from a slow disk takes seconds.
pub const AT_BOOT: Duration = Duration::from_secs(180);

/// What was done on a host, and what failed.
#[derive(Debug, Default)]
pub struct Prepared {
    /// A line for each module, node and link
    pub done: Vec<String>,
    /// Errors because of which containers get no GPU, or another one than they request
    pub failed: Vec<anyhow::Error>,
    /// Whether the driver is loaded now
    pub is_loaded: bool,
}

/// Whether this process can load modules and create device nodes.
///
/// # Errors
/// If the user namespace cannot be determined.
pub fn may_prepare() -> Result<bool> {
    Ok(rustix::process::geteuid().is_root() && !ns::in_user_namespace()?)
}

/// What [`prepare_host`] would do.
#[derive(Clone, Debug, Default)]
pub struct Preparation {
    /// The modules that it would load. What it does after that is unknown before.
    pub modules: Vec<&'static str>,
    /// The nodes that it would create, by their names below /dev
    pub nodes: BTreeMap<String, DeviceNode>,
    /// The existing nodes whose owner and mode it would set, as they would be after that
    pub permissions: BTreeMap<String, DeviceNode>,
}

impl Preparation {
    /// Reports whether it would do nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.modules.is_empty() && self.nodes.is_empty() && self.permissions.is_empty()
    }

    /// Returns all nodes that it would change, as they would be after that.
    #[must_use]
    pub fn changed_nodes(&self) -> BTreeMap<String, DeviceNode> {
        let mut nodes = self.nodes.clone();
        nodes.extend(self.permissions.clone());
        nodes
    }
}

/// Returns what [`prepare_host`] would do, and changes nothing.
///
/// # Errors
/// If a driver root cannot be opened.
pub fn foresee(config: &Config, channels: &[u32]) -> Result<Preparation> {
    let roots = Roots::open_to_prepare(config)?;
    let facts = ModuleState::read(&roots);
    let loads = config.driver_root.as_path() == Path::new("/");
    let mut preparation = Preparation::default();
    if loads {
        preparation.modules = super::missing_modules(&facts);
    }
    for node in super::plan(&facts, channels) {
        let Some(made) = made(&node, &roots) else {
            continue;
        };
        if !node.policy.modify {
            continue;
        }
        match NodeState::inspect(&roots.dev, &node.name) {
            NodeState::Unreadable(_) => {}
            NodeState::Device(found) if (found.major, found.minor) == node.device => {
                if is_changed(found.permissions, made.permissions) {
                    preparation.permissions.insert(node.name, made);
                }
            }
            _ => {
                preparation.nodes.insert(node.name, made);
            }
        }
    }
    Ok(preparation)
}

/// Whether [`make_node`] sets other permissions.
fn is_changed(found: Permissions, made: Permissions) -> bool {
    (found.mode & 0o777, found.uid, found.gid) != (made.mode, made.uid, made.gid)
}

/// Returns the node as it would be found after it was created.
fn made(node: &NodeToCreate, roots: &Roots) -> Option<DeviceNode> {
    let ((major, minor), NodePolicy { mode, uid, gid, .. }) = (node.device, node.policy);
    let path = Path::new("/dev").join(&node.name);
    let source = HostPath::new(roots.dev.path().as_path().join("dev").join(&node.name));
    Some(DeviceNode {
        source,
        path: ContainerPath::new(&path)?,
        major,
        minor,
        permissions: Permissions { mode, uid, gid },
    })
}

/// Loads missing modules and creates missing nodes, including the nodes of these IMEX channels. It continues after an error. `patience` is the
/// time limit for all modules together.
///
/// # Errors
/// If a driver root cannot be opened.
pub fn prepare_host(config: &Config, channels: &[u32], patience: Duration) -> Result<Prepared> {
    let roots = Roots::open_to_prepare(config)?;
    let mut prepared = Prepared::default();
    // Another driver root belongs to a driver container, which loads the modules itself.
    if config.driver_root.as_path() == Path::new("/") {
        load_modules(&roots, patience, &mut prepared);
    }
    let facts = ModuleState::read(&roots);
    prepared.is_loaded = facts.policy.is_some();
    for node in super::plan(&facts, channels) {
        match make_node::carry_out(&roots.dev.path(), &node) {
            Ok(Made {
                node: NodeChange::Created,
                ..
            }) => prepared.done.push(format!("made {node}")),
            Ok(Made {
                node: NodeChange::Permissions,
                ..
            }) => {
                prepared
                    .done
                    .push(format!("set the owner and mode of {node}"));
            }
            Ok(Made {
                link: Some(link), ..
            }) => {
                prepared.done.push(format!(
                    "created the link {} to /dev/{}",
                    link.display(),
                    node.name
                ));
            }
            Ok(Made {
                node: NodeChange::Unchanged,
                link: None,
            }) => {}
            Err(error) => prepared.failed.push(error),
        }
    }
    prepared.failed.extend(
        channels
            .iter()
            .filter_map(|channel| super::no_such_channel(&facts, *channel)),
    );
    Ok(prepared)
}

fn load_modules(roots: &Roots, patience: Duration, prepared: &mut Prepared) {
    let program = roots
        .driver
        .read_text(Path::new("/proc/sys/kernel/modprobe"))
        .unwrap_or_default();
    let program = if program.trim().is_empty() {
        "/sbin/modprobe"
    } else {
        program.trim()
    };
    let end = Instant::now() + patience;
    for module in super::missing_modules(&ModuleState::read(roots)) {
        let left = end.saturating_duration_since(Instant::now());
        if !left.is_zero()
            && process::run_modprobe(Path::new(program), module, left).unwrap_or(false)
        {
            prepared.done.push(format!("loaded {module}"));
            continue;
        }
        prepared.done.push(format!("could not load {module}"));
        prepared.failed.extend(super::not_loaded(program, module));
    }
}
