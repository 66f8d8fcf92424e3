//! Publishes the devices for claims, which follow from the state of the node.

use std::sync::Arc;

use nvidia_host::inventory::BusId;
use tokio::sync::watch;

use super::agent::specs::Specs;
use super::agent::state::NodeState;
use crate::dra::devices::{self, Sources};
use crate::dra::pool::Pool;
use crate::monitor::update::Driver;
use crate::node::facts::NvmlFacts;
use crate::node::gpus::PcieRoots;
use crate::node::health::GpuFailure;
use crate::node::host;
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

    /// Publishes what follows from the state of the node.
    pub fn publish(&mut self, state: &NodeState, specs: &Specs, facts: &NvmlFacts) {
        let node = &state.node;
        let addresses: Vec<BusId> = node.gpus().iter().map(|gpu| gpu.gpu.bus_id).collect();
        if addresses != self.addresses {
            self.pcie_roots =
                host::pcie_roots(&self.settings.common, node.gpus()).unwrap_or_default();
            self.addresses = addresses;
        }
        let sources = Sources {
            gpus: node.gpus(),
            facts,
            numa_nodes: node.numa_nodes(),
            pcie_roots: &self.pcie_roots,
            settings: &self.settings.plugin,
            limits: node.limits(),
            mps: &node.mps().daemons,
        };
        let before = Arc::clone(&self.pool.borrow().devices);
        let silence = silence(state);
        let found = devices::devices(&sources, &before, |gpu| {
            node.failure(gpu).or_else(|| silence.clone())
        });
        let pool = Pool {
            is_ready: state.listed_by().is_none(),
            devices: if found == *before {
                before
            } else {
                Arc::new(found)
            },
            problem: problem(state, specs),
            unanswered: state.is_unanswered.then(|| why_not(state)),
            in_spec: specs.names_for_claims(),
        };
        self.pool.send_if_modified(|published| {
            let is_new = *published != pool;
            *published = pool;
            is_new
        });
    }
}

/// Returns why no container can have a device. While NVML has not answered, the spec of an earlier
/// run may have all of them.
fn problem(state: &NodeState, specs: &Specs) -> Option<String> {
    if !state.node.has_driver() && !state.is_unanswered {
        return Some(why_not(state));
    }
    let error = specs.error()?;
    Some(format!("the node has no CDI spec: {error}"))
}

/// Returns the failure of all GPUs if NVML has not answered in time.
fn silence(state: &NodeState) -> Option<GpuFailure> {
    if !state.is_unanswered || state.driver == Driver::Unknown {
        return None;
    }
    Some(GpuFailure {
        why: why_not(state),
        driver_silent: true,
    })
}

fn why_not(state: &NodeState) -> String {
    let why = state.driver.why_not();
    why.unwrap_or("the driver does not work").to_owned()
}
