//! Measures how long the answers to Allocate take.

use std::sync::Arc;
use std::time::Instant;

use prometheus_client::metrics::histogram::Histogram;

use crate::model::{Allocator, Refusal};
use crate::proto::ContainerAllocateResponse;

/// The upper bounds of the histogram in seconds. The kubelet waits for ten seconds.
const BOUNDS: [f64; 9] = [0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5, 10.0];

/// Creates the histogram.
#[must_use]
pub fn latency() -> Histogram {
    Histogram::new(BOUNDS)
}

/// An allocator that records the time of each answer, also of refusals.
pub struct Timed {
    inner: Arc<dyn Allocator>,
    latency: Histogram,
}

impl Timed {
    /// Records the answers of this allocator.
    #[must_use]
    pub const fn new(inner: Arc<dyn Allocator>, latency: Histogram) -> Self {
        Self { inner, latency }
    }
}

impl std::fmt::Debug for Timed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Timed").finish_non_exhaustive()
    }
}

impl Allocator for Timed {
    fn allocate(
        &self,
        resource: &str,
        ids: &[String],
    ) -> Result<ContainerAllocateResponse, Refusal> {
        let start = Instant::now();
        let answer = self.inner.allocate(resource, ids);
        self.latency.observe(start.elapsed().as_secs_f64());
        answer
    }

    fn prefer(
        &self,
        resource: &str,
        available: &[String],
        required: &[String],
        size: usize,
    ) -> Vec<String> {
        self.inner.prefer(resource, available, required, size)
    }
}
