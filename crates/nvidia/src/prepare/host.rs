//! Loads the driver's modules and creates its device nodes, for the command `prepare` and for the first container.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::make_node::{Made, NodeChange};
use super::{ModuleState, make_node};
use crate::config::Config;
use crate::host::Roots;
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

/// Loads missing modules and creates missing nodes, including those of these IMEX channels. It continues after an error. `patience` is the
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
            Ok(Made { node: NodeChange::Created, .. }) => prepared.done.push(format!("made {node}")),
            Ok(Made { node: NodeChange::Permissions, .. }) => {
                prepared.done.push(format!("set the owner and mode of {node}"));
            }
            Ok(Made { link: Some(link), .. }) => {
                prepared.done.push(format!("made the link {} to /dev/{}", link.display(), node.name));
            }
            Ok(Made { node: NodeChange::Unchanged, link: None }) => {}
            Err(error) => prepared.failed.push(error),
        }
    }
    prepared.failed.extend(channels.iter().filter_map(|channel| super::no_such_channel(&facts, *channel)));
    Ok(prepared)
}

fn load_modules(roots: &Roots, patience: Duration, prepared: &mut Prepared) {
    let program = roots.driver.read_text(Path::new("/proc/sys/kernel/modprobe")).unwrap_or_default();
    let program = if program.trim().is_empty() { "/sbin/modprobe" } else { program.trim() };
    let end = Instant::now() + patience;
    for module in super::missing_modules(&ModuleState::read(roots)) {
        let left = end.saturating_duration_since(Instant::now());
        if !left.is_zero() && process::run_modprobe(Path::new(program), module, left).unwrap_or(false) {
            prepared.done.push(format!("loaded {module}"));
            continue;
        }
        prepared.done.push(format!("could not load {module}"));
        prepared.failed.extend(super::not_loaded(program, module));
    }
}
