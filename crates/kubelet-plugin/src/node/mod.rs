//! The state of the node: its GPUs, their health, and the resources that follow from both. It changes with each report of the monitor.
//! Pure, apart from the clock that callers pass.

pub mod changes;
pub mod closeness;
pub mod devices;
pub mod errors;
pub mod facts;
pub mod gpus;
pub mod health;
pub mod host;
pub mod mps;
pub mod obstacle;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use base::report::Finding;
use nvidia_host::config::Limits;
use nvidia_host::feature::Features;
use nvidia_host::inventory::{Inventory, limits};
use nvidia_host::mps::Daemon;

use crate::model::{InSpecs, Resource, ResourceDevice};
use crate::monitor::message::Snapshot;
use crate::monitor::update::Update;
use crate::settings::Settings;
use closeness::Closeness;
use devices::OfferedPart;
use gpus::{NodeGpu, NumaNodes};
use health::{GpuFailure, GpuState, Health, OpenError, Policy};
use mps::Mps;
use obstacle::{NOT_ANSWERED, Obstacle};

/// The state of the node at one time: the lists for the kubelet, and the data for Allocate and GetPreferredAllocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// The resources in the order of their names
    pub resources: Arc<Vec<Resource>>,
    /// The ids of the devices that the limits deny. The kubelet may have chosen one before they did.
    pub denied: BTreeSet<String>,
    /// The GPUs of the node
    pub gpus: Vec<NodeGpu>,
    /// How close the GPUs are to each other
    pub closeness: Closeness,
    /// What is wrong with the settings on this node
    pub findings: Vec<Finding>,
    /// The limits within which the resources are
    pub limits: Limits,
    /// The features that containers get with their GPUs
    pub features: Features,
    /// What the CDI specs of the plugin have
    pub in_specs: InSpecs,
    /// What NVML last reported, from which requests of containers are answered; `None` without a driver
    pub known: Option<Arc<Inventory>>,
    /// The MPS daemons of the GPUs
    pub mps: Arc<Vec<Daemon>>,
}

/// The state of the node.
#[derive(Clone, Debug)]
pub struct Node {
    settings: Settings,
    /// The limits of the settings, until config.toml changes
    limits: Limits,
    gpus: Vec<NodeGpu>,
    numa_nodes: NumaNodes,
    closeness: Closeness,
    findings: Vec<Finding>,
    /// The features that containers get, and findings about the others in the settings
    features: (Features, Vec<Finding>),
    in_specs: InSpecs,
    known: Option<Arc<Inventory>>,
    mps: Mps,
    health: Health,
}

impl Node {
    /// Creates the state before NVML has answered, with the GPUs that the kernel lists.
    #[must_use]
    pub fn new(settings: Settings, gpus: Vec<NodeGpu>, now: Instant) -> Self {
        let policy = Policy::from(&settings.plugin);
        let (numa_nodes, closeness) = (NumaNodes::new(), Closeness::new());
        Self {
            limits: settings.common.devices.clone(),
            settings,
            gpus,
            numa_nodes,
            closeness,
            findings: Vec::new(),
            features: (Features::EMPTY, Vec::new()),
            in_specs: InSpecs::default(),
            known: None,
            mps: Mps::default(),
            health: Health::new(policy, now),
        }
    }

    /// Takes a report into account.
    pub fn apply(&mut self, update: &Update, now: Instant) {
        if let Update::Snapshot(snapshot) = update {
            self.set_devices(snapshot);
        }
        self.apply_to_health(update, now);
    }

    /// Takes only the health in a report into account. The GPUs and MIG devices remain as they were.
    pub fn apply_to_health(&mut self, update: &Update, now: Instant) {
        self.health.apply(update, now);
        // A container that requests GPUs must not start with the devices of a driver that was replaced.
        if matches!(update, Update::Absent(_) | Update::LetGo) {
            self.known = None;
        }
    }

    /// Sets the GPUs and MIG devices.
    pub fn set_devices(&mut self, snapshot: &Snapshot) {
        self.gpus = gpus::update(&self.gpus, &snapshot.inventory, &snapshot.mig_profiles);
        self.closeness = closeness::of_links(&snapshot.links);
        self.findings = limits::findings(&self.limits, &snapshot.inventory);
        self.known = Some(Arc::new(snapshot.inventory.clone()));
        for (uuid, properties) in &snapshot.properties {
            if let Some(memory) = properties.memory_mib {
                self.mps.memory_mib.insert(uuid.clone(), memory);
            }
        }
    }

    /// Sets the MPS daemons, and returns whether they have changed.
    pub fn set_mps(&mut self, daemons: Vec<Daemon>) -> bool {
        let is_new = *self.mps.daemons != daemons;
        if is_new {
            self.mps.daemons = Arc::new(daemons);
        }
        is_new
    }

    /// Returns the MPS daemons.
    #[must_use]
    pub const fn mps(&self) -> &Mps {
        &self.mps
    }

    /// Sets the limits: the resources have only the devices that they permit.
    pub fn set_limits(&mut self, limits: Limits) {
        // Without a driver, the next report of the monitor has the findings.
        self.findings = self
            .known
            .as_ref()
            .map(|known| limits::findings(&limits, known))
            .unwrap_or_default();
        self.limits = limits;
    }

    /// Sets the features that containers get, and findings about the others.
    pub fn set_features(&mut self, features: Features, findings: Vec<Finding>) {
        self.features = (features, findings);
    }

    /// Sets what the CDI specs have.
    pub fn set_in_specs(&mut self, in_specs: InSpecs) {
        self.in_specs = in_specs;
    }

    /// Reports whether the state of each GPU is known. NVML lists the GPUs before it is asked about
    /// each of them.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        for gpu in &self.gpus {
            if self.obstacles(gpu, None).first() == Some(&Obstacle::Unknown) {
                return false;
            }
        }
        true
    }

    /// Returns the limits in force.
    #[must_use]
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Sets the NUMA nodes.
    pub fn set_numa_nodes(&mut self, numa_nodes: NumaNodes) {
        self.numa_nodes = numa_nodes;
    }

    /// Returns the NUMA nodes.
    #[must_use]
    pub const fn numa_nodes(&self) -> &NumaNodes {
        &self.numa_nodes
    }

    /// Reports whether NVML has answered, and the driver has not stopped since.
    #[must_use]
    pub const fn has_driver(&self) -> bool {
        self.known.is_some()
    }

    /// Returns what NVML last reported; `None` without a driver.
    #[must_use]
    pub fn inventory(&self) -> Option<Inventory> {
        self.known.as_deref().cloned()
    }

    /// Sets the GPUs that the kernel lists, until NVML answers for the first time.
    pub fn set_unanswered(&mut self, gpus: Vec<NodeGpu>) {
        self.gpus = gpus;
    }

    /// Returns why containers cannot use a GPU or a part of it, the reason to show first. Without a part, only the reasons of the GPU itself
    /// are returned.
    fn obstacles(&self, gpu: &NodeGpu, part: Option<&OfferedPart<'_>>) -> Vec<Obstacle> {
        let mut found = Vec::new();
        match &gpu.failure {
            Some(why) if why == NOT_ANSWERED => found.push(Obstacle::NotAnswered),
            Some(why) => found.push(Obstacle::Failure(GpuFailure::of_gpu(why))),
            None => {}
        }
        match self.health.state(&gpu.gpu.uuid) {
            GpuState::Healthy => {}
            GpuState::Unknown(_) => found.push(Obstacle::Unknown),
            GpuState::Failed(failure, _) => found.push(Obstacle::Failure(failure)),
        }
        let (uuid, replicas) = match part {
            Some(part) => (Some(part.uuid), part.mps_replicas),
            None => (None, None),
        };
        let why = uuid.and_then(|uuid| self.in_specs.why_unusable(uuid));
        found.extend(why.map(Obstacle::NoCdiDevice));
        // NVML's index, which config.toml can name, is not known before.
        if gpu.failure.as_deref() != Some(NOT_ANSWERED) {
            let why = self.mps.why_unusable(&gpu.gpu, replicas);
            found.extend(why.map(Obstacle::Mps));
        }
        found
    }

    /// Returns the error of a GPU, for claims: a GPU about which nothing is known has none.
    #[must_use]
    pub fn failure(&self, gpu: &NodeGpu) -> Option<GpuFailure> {
        for obstacle in self.obstacles(gpu, None) {
            match obstacle {
                // The kernel lists a GPU before NVML does.
                Obstacle::NotAnswered | Obstacle::Unknown => {}
                Obstacle::Failure(failure) => return Some(failure),
                Obstacle::NoCdiDevice(why) | Obstacle::Mps(why) => {
                    return Some(GpuFailure::of_gpu(why));
                }
            }
        }
        None
    }

    /// Returns the GPUs of the node.
    #[must_use]
    pub fn gpus(&self) -> &[NodeGpu] {
        &self.gpus
    }

    /// Makes the GPUs healthy whose quiet period has passed.
    pub fn tick(&mut self, now: Instant) {
        self.health.tick(now);
    }

    /// Returns when [`Self::tick`] changes something.
    #[must_use]
    pub fn next_tick(&self) -> Option<Instant> {
        self.health.next_tick()
    }

    /// Returns the errors that have not been overcome, by the UUID of the GPU.
    #[must_use]
    pub fn errors(&self) -> BTreeMap<String, OpenError> {
        self.health.errors()
    }

    /// Takes the errors of an earlier process into account.
    pub fn restore(&mut self, errors: BTreeMap<String, OpenError>, now: Instant) {
        self.health.restore(errors, now);
    }

    /// Forgets the errors of a GPU. Returns false if it is unknown or has none.
    pub fn clear(&mut self, uuid: &str) -> bool {
        self.health.clear(uuid)
    }

    /// Returns why each GPU cannot be used, by UUID; `None` if it can.
    #[must_use]
    pub fn health(&self) -> BTreeMap<String, Option<String>> {
        self.gpus
            .iter()
            .map(|gpu| (gpu.gpu.uuid.clone(), self.why_not(gpu)))
            .collect()
    }

    /// Returns why a GPU, or a part that is offered, cannot be used.
    fn why_not(&self, gpu: &NodeGpu) -> Option<String> {
        let settings = &self.settings.plugin;
        let single = devices::is_single(&self.gpus, settings);
        for part in devices::offered_parts(gpu, settings, single) {
            if limits::permit(&self.limits, &gpu.gpu, part.mig)
                && let Some(why) = self.first_obstacle(gpu, Some(&part))
            {
                return Some(why);
            }
        }
        self.first_obstacle(gpu, None)
    }

    fn first_obstacle(&self, gpu: &NodeGpu, part: Option<&OfferedPart<'_>>) -> Option<String> {
        let first = self.obstacles(gpu, part).into_iter().next();
        first.map(Obstacle::into_why)
    }

    /// Returns since when a GPU cannot be used; `None` if it can, or if that is unknown.
    #[must_use]
    pub fn unhealthy_since(&self, uuid: &str) -> Option<Instant> {
        match self.health.state(uuid) {
            GpuState::Healthy => None,
            GpuState::Unknown(since) | GpuState::Failed(_, since) => Some(since),
        }
    }

    /// Returns what the node offers now.
    #[must_use]
    pub fn offer(&self) -> Offer {
        let found = devices::resources(
            &self.gpus,
            &self.numa_nodes,
            &self.settings.plugin,
            &self.limits,
            |gpu, part| self.first_obstacle(gpu, Some(part)),
        );
        let mut findings = self.findings.clone();
        findings.extend_from_slice(&self.features.1);
        findings.extend(found.findings);
        Offer {
            resources: Arc::new(found.offered),
            denied: found.denied,
            gpus: self.gpus.clone(),
            closeness: self.closeness.clone(),
            findings,
            limits: self.limits.clone(),
            features: self.features.0,
            in_specs: self.in_specs.clone(),
            known: self.known.clone(),
            mps: Arc::clone(&self.mps.daemons),
        }
    }
}

impl Offer {
    /// Returns the devices of all resources.
    pub fn devices(&self) -> impl Iterator<Item = &ResourceDevice> {
        self.resources.iter().flat_map(|resource| &resource.devices)
    }

    /// Returns the inventory of the GPUs that work, for the functions of the hook.
    #[must_use]
    pub fn inventory(&self) -> Inventory {
        let gpus = self.gpus.iter().filter(|gpu| gpu.failure.is_none());
        Inventory {
            gpus: gpus.map(|gpu| gpu.gpu.clone()).collect(),
            ..Inventory::default()
        }
    }
}

#[cfg(test)]
mod tests;
