//! Publishes the devices for claims, which follow from the state of the node.

use std::sync::Arc;

use nvidia_host::inventory::BusId;
use tokio::sync::watch;

use crate::dra::devices::{self, Places};
use crate::dra::pool::Pool;
use crate::monitor::update::Driver;
use crate::node::facts::Facts;
use crate::node::gpus::PcieRoots;
use crate::node::{Node, host};
use crate::settings::Settings;

/// The devices for claims.
#[derive(Debug)]
pub struct Claims {
    settings: Settings,
    pool: watch::Sender<Pool>,
    pcie_roots: PcieRoots,
    /// The addresses of the GPUs for which the roots are known
    addresses: Vec<BusId>,
}

impl Claims {
    /// Creates the devices before the driver has answered.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        Self {
            settings: settings.clone(),
            pool: watch::Sender::default(),
            pcie_roots: PcieRoots::new(),
            addresses: Vec::new(),
        }
    }

    /// Returns the newest devices.
    #[must_use]
    pub fn pool(&self) -> watch::Receiver<Pool> {
        self.pool.subscribe()
    }

    /// Publishes what follows from the state of the node. `is_ready` is false while the driver has time to answer for the first time.
    pub fn publish(&mut self, node: &Node, facts: &Facts, is_ready: bool, driver: &Driver, cdi_error: Option<&str>) {
        let addresses: Vec<BusId> = node.gpus().iter().map(|gpu| gpu.gpu.bus_id).collect();
        if addresses != self.addresses {
            self.pcie_roots = host::pcie_roots(&self.settings.common, node.gpus()).unwrap_or_default();
            self.addresses = addresses;
        }
        let health = node.health();
        let before = Arc::clone(&self.pool.borrow().devices);
        let places = Places { numa_nodes: node.numa_nodes(), pcie_roots: &self.pcie_roots };
        let limited = (&self.settings.plugin, node.limits());
        let found = devices::devices(node.gpus(), facts, places, limited, &before, |uuid| health.get(uuid)?.clone());
        let devices = if found == *before { before } else { Arc::new(found) };
        let pool = Pool { is_ready, devices, problem: problem(node, driver, cdi_error) };
        self.pool.send_if_modified(|published| {
            let is_new = *published != pool;
            *published = pool;
            is_new
        });
    }
}

/// Returns why no container can have a device: there is no CDI spec then.
fn problem(node: &Node, driver: &Driver, cdi_error: Option<&str>) -> Option<String> {
    if node.has_driver() {
        return cdi_error.map(|error| format!("the node has no CDI spec: {error}"));
    }
    Some(driver.why_not().unwrap_or("the driver does not work").to_owned())
}
