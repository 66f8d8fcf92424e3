//! What the plugin offers to the kubelet, as data. The modules that decide it, and those that send it, depend only on this one.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use base::report::{ErrorReport, Kind};
use nvidia_host::feature::Features;

use crate::proto::ContainerAllocateResponse;

/// A resource, such as `nvidia.com/gpu`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resource {
    /// The name with its prefix
    pub name: String,
    /// Its devices, in a stable order
    pub devices: Vec<ResourceDevice>,
}

/// A device of a resource: a GPU, a MIG device, or a replica of one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceDevice {
    /// The id for the kubelet: the UUID of the GPU or MIG device, followed by `::k` for a replica, or the id in GKE's plugin. It does not
    /// change while the GPU exists: the kubelet refuses a restarted container whose id is unknown.
    pub id: String,
    /// The UUID of the GPU or MIG device
    pub uuid: String,
    /// Whether other devices have the same UUID
    pub is_shared: bool,
    /// How many containers share the device as clients of its MPS daemon; `None` if it is not shared in this way
    pub mps_replicas: Option<u32>,
    /// The UUID of the GPU
    pub gpu: String,
    /// The NUMA node of the GPU, if the kernel knows it
    pub numa_node: Option<u32>,
    /// Why the device cannot be used; `None` if it can
    pub unhealthy: Option<String>,
}

/// What the CDI specs of the plugin have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InSpecs {
    /// The UUIDs of the GPUs and MIG devices
    pub devices: Arc<BTreeSet<String>>,
    /// The features that have a spec
    pub features: Features,
    /// The IMEX channels that have a CDI device
    pub imex_channels: Vec<u32>,
    /// Why the specs are not as the node is
    pub error: Option<String>,
    /// Containers of the device plugin get their devices with these specs, so that a device without
    /// one cannot be used.
    pub are_needed: bool,
}

impl InSpecs {
    /// Returns why an engine does not find the CDI device with this UUID; `None` if it does.
    #[must_use]
    pub fn why_missing(&self, uuid: &str) -> Option<String> {
        if self.devices.contains(uuid) {
            return None;
        }
        Some(match &self.error {
            Some(error) => format!("the node has no CDI device for it: {error}"),
            None => "the CDI spec of the node has no device for it".to_owned(),
        })
    }

    /// The same, but only if containers of the device plugin get their devices with these specs.
    #[must_use]
    pub fn why_unusable(&self, uuid: &str) -> Option<String> {
        if self.are_needed {
            return self.why_missing(uuid);
        }
        None
    }
}

/// Why the plugin does not give a device to a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    line: String,
}

impl Refusal {
    /// The kubelet writes the text into an event of the pod, whose note has at most 1 kB (`events.k8s.io/v1`).
    const MAX_LINE: usize = 1024;

    /// Creates a refusal with one line of ASCII.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut line: String = text
            .chars()
            .map(|c| if matches!(c, ' '..='~') { c } else { '?' })
            .collect();
        line.truncate(Self::MAX_LINE);
        Self { line }
    }

    /// Creates a refusal with the number of a finding and a hint, in one line: an event of the pod with a second one is hard to read.
    #[must_use]
    pub fn of(kind: &Kind, what: &str, fix: &str) -> Self {
        Self::new(&format!("{what} ({}); hint: {fix}", kind.id()))
    }

    /// Adds what fails because of it, as the beginning of the line.
    #[must_use]
    pub fn in_context(self, what_fails: &str) -> Self {
        Self::new(&format!("{what_fails}: {}", self.line))
    }
}

impl From<&anyhow::Error> for Refusal {
    /// The number and the hint are those that the hook prints for the error.
    fn from(error: &anyhow::Error) -> Self {
        let ErrorReport { kind, line, hint } = ErrorReport::new(error);
        Self::of(kind, &line, &hint)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
    }
}

/// Answers the kubelet's questions about devices.
pub trait Allocator: Send + Sync + 'static {
    /// Returns what a container with these devices gets.
    ///
    /// # Errors
    /// If a device is unknown, does not work, or may not be given in this combination.
    fn allocate(
        &self,
        resource: &str,
        ids: &[String],
    ) -> Result<ContainerAllocateResponse, Refusal>;

    /// Returns the best `size` of the available devices, which include `required`. There is always an answer, because the
    /// kubelet does not start a pod after an error.
    fn prefer(
        &self,
        resource: &str,
        available: &[String],
        required: &[String],
        size: usize,
    ) -> Vec<String>;
}
