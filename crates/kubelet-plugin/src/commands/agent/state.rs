//! The state of the node, and what is known about its driver.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nvidia_host::config::Config;
use nvidia_host::inventory::{Gpu, Inventory};
use nvidia_host::mps;

use crate::commands::role::Role;
use crate::log::Log;
use crate::monitor::message::Snapshot;
use crate::monitor::update::{Driver, Update};
use crate::node::obstacle::NOT_ANSWERED;
use crate::node::{Node, host};
use crate::settings::Settings;

/// How long the driver may take to answer before the devices are listed as unhealthy. A list from
/// before its answer would show all GPUs as unhealthy at each restart.
const FIRST_ANSWER: Duration = Duration::from_secs(3);

/// How long the slices of an earlier run stay as they are while the driver does not answer. The
/// kernel does not show the attributes that claims select by, and a taint would evict pods at each
/// restart of the plugin.
const FIRST_SLICES: Duration = Duration::from_secs(300);

/// The node and its driver.
#[derive(Debug)]
pub struct NodeState {
    /// The node
    pub node: Node,
    /// What the log says about the driver
    pub driver: Driver,
    /// NVML has not answered or failed since the plugin started; it may hang.
    pub is_unanswered: bool,
    /// When the devices are listed for the first time, unless the driver answers before; `None` if
    /// they are listed
    listed_by: Option<Instant>,
    config: Config,
}

impl NodeState {
    /// Creates the state before NVML has answered.
    #[must_use]
    pub fn new(settings: &Settings, role: &Role) -> Self {
        let gpus = host::kernel_gpus(&settings.common, NOT_ANSWERED).unwrap_or_default();
        let now = Instant::now();
        let patience = match role {
            Role::Claims(_) => FIRST_SLICES,
            Role::DevicePlugin(_) | Role::Engine => FIRST_ANSWER,
        };
        Self {
            node: Node::new(settings.clone(), gpus, now),
            driver: Driver::Unknown,
            is_unanswered: true,
            listed_by: Some(now + patience),
            config: settings.common.clone(),
        }
    }

    /// Returns when the devices are listed for the first time; `None` if they are listed.
    #[must_use]
    pub const fn listed_by(&self) -> Option<Instant> {
        self.listed_by
    }

    /// Ends the wait for the first list if the driver has answered, or had the time to.
    pub fn end_wait(&mut self) {
        let is_answered = self.driver != Driver::Unknown && self.node.is_measured();
        if is_answered || self.listed_by.is_some_and(|by| by <= Instant::now()) {
            self.listed_by = None;
        }
    }

    /// Takes the GPUs that the kernel lists into account, and returns them.
    pub fn list_kernel_gpus(&mut self) -> Vec<Gpu> {
        let found = host::kernel_gpus(&self.config, NOT_ANSWERED).unwrap_or_default();
        let gpus = found.iter().map(|found| found.gpu.clone()).collect();
        self.node.set_unanswered(found);
        gpus
    }

    /// Returns the directories in which MPS daemons can be (see [`mps::daemons`]), and those of daemons, which have their state.
    #[must_use]
    pub fn mps_dirs(&self) -> Vec<PathBuf> {
        let below_root = mps::DIRECTORY.trim_start_matches('/');
        let driver_root = self.config.driver_root.as_path();
        let mut dirs = vec![driver_root.join(below_root), mps::DIRECTORY.into()];
        for index in 0..dirs.len() {
            let daemons = dirs.get(index).and_then(|dir| std::fs::read_dir(dir).ok());
            for daemon in daemons.into_iter().flatten().flatten() {
                dirs.push(daemon.path());
            }
        }
        dirs
    }

    /// Inspects the MPS daemons, and returns whether they have changed.
    pub fn find_mps_daemons(&mut self) -> bool {
        let daemons = host::mps_daemons(&self.config, self.node.gpus());
        self.node.set_mps(daemons)
    }

    /// Takes the health in a report into account, and logs a change of the driver.
    pub fn apply(&mut self, update: &Update, log: Log) {
        self.set_driver(update, log);
        self.node.apply_to_health(update, Instant::now());
        if matches!(
            update,
            Update::Snapshot(_) | Update::Absent(_) | Update::LetGo
        ) {
            self.is_unanswered = false;
        }
    }

    /// Sets the GPUs and MIG devices.
    pub fn set_devices(&mut self, snapshot: &Snapshot) {
        self.node.set_devices(snapshot);
        // The indexes of the GPUs are known now.
        self.find_mps_daemons();
        let numa_nodes = host::numa_nodes(&self.config, self.node.gpus());
        self.node.set_numa_nodes(numa_nodes.unwrap_or_default());
    }

    /// Logs that the driver works, or why it does not, once.
    fn set_driver(&mut self, update: &Update, log: Log) {
        let Some(driver) = Driver::after(update) else {
            return;
        };
        if driver == self.driver {
            return;
        }
        match (&driver, update) {
            (Driver::Fails(why), _) => log.note(why),
            (Driver::LetGo, _) => {
                log.note("the driver is being replaced, and the plugin does not use it");
            }
            (_, Update::Snapshot(snapshot)) => log.note(&summary(&snapshot.inventory)),
            _ => {}
        }
        self.driver = driver;
    }
}

fn summary(inventory: &Inventory) -> String {
    let count = inventory.gpus.len() + inventory.failed.len();
    let gpus = if count == 1 { "GPU" } else { "GPUs" };
    match inventory.driver_version.as_str() {
        "" => format!("the node has {count} {gpus}"),
        version => format!("the node has {count} {gpus} and driver {version}"),
    }
}
