//! Publishes the devices for claims, which follow from the state of the node.

use std::collections::BTreeSet;
use std::sync::Arc;

use nvidia_host::inventory::BusId;
use tokio::sync::watch;

use crate::dra::devices::{self, Places};
use crate::dra::pool::Pool;
use crate::monitor::update::Driver;
use crate::node::facts::Facts;
use crate::node::gpus::{NodeGpu, PcieRoots};
use crate::node::health::Failure;
use crate::node::{Node, host};
use crate::settings::Settings;

/// What the devices follow from, besides the GPUs.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// What NVML reports about the GPUs
    pub facts: &'a Facts,
    /// Whether the driver works
    pub driver: &'a Driver,
    /// Whether the driver has answered or failed, or had the time to
    pub is_ready: bool,
    /// NVML has not answered since the plugin started.
    pub is_unanswered: bool,
    /// What is wrong with the CDI spec
    pub cdi_error: Option<&'a str>,
    /// The names of the devices in it
    pub in_spec: &'a Arc<BTreeSet<String>>,
}

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

    /// Publishes what follows from the state of the node.
    pub fn publish(&mut self, node: &Node, sources: Sources<'_>) {
        let addresses: Vec<BusId> = node.gpus().iter().map(|gpu| gpu.gpu.bus_id).collect();
        if addresses != self.addresses {
            self.pcie_roots =
                host::pcie_roots(&self.settings.common, node.gpus()).unwrap_or_default();
            self.addresses = addresses;
        }
        let before = Arc::clone(&self.pool.borrow().devices);
        let places = Places {
            numa_nodes: node.numa_nodes(),
            pcie_roots: &self.pcie_roots,
        };
        let limited = (&self.settings.plugin, node.limits());
        let failure = |gpu: &NodeGpu| node.failure(gpu).or_else(|| sources.silence());
        let found = devices::devices(
            node.gpus(),
            sources.facts,
            places,
            limited,
            &before,
            failure,
        );
        let devices = if found == *before {
            before
        } else {
            Arc::new(found)
        };
        let pool = Pool {
            is_ready: sources.is_ready,
            devices,
            problem: sources.problem(node),
            unanswered: sources.is_unanswered.then(|| sources.why_not()),
            in_spec: Arc::clone(sources.in_spec),
        };
        self.pool.send_if_modified(|published| {
            let is_new = *published != pool;
            *published = pool;
            is_new
        });
    }
}

impl Sources<'_> {
    /// Returns why no container can have a device. While NVML has not answered, the spec of an earlier run may have all of them.
    fn problem(&self, node: &Node) -> Option<String> {
        if node.has_driver() || self.is_unanswered {
            return self
                .cdi_error
                .map(|error| format!("the node has no CDI spec: {error}"));
        }
        Some(self.why_not())
    }

    /// Returns the failure of all GPUs if NVML has not answered in time.
    fn silence(&self) -> Option<Failure> {
        let is_silent = self.is_unanswered && *self.driver != Driver::Unknown;
        is_silent.then(|| Failure {
            why: self.why_not(),
            is_of_driver: true,
        })
    }

    fn why_not(&self) -> String {
        self.driver
            .why_not()
            .unwrap_or("the driver does not work")
            .to_owned()
    }
}
