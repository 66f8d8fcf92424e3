//! Decides which GPUs work, from what the monitor reports and a clock. The module does not read anything.
//!
//! An error makes a GPU unhealthy. It becomes healthy again if a later sample is good, and no error was reported for the quiet period:
//! the driver recommends no recovery action, all calls about the GPU succeed, and no row remapping has failed. That calls succeed is
//! not sufficient, because they can succeed immediately after a fatal error.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::monitor::message::{EventKind, GpuEvent, Recovery, Sample, Snapshot};
use crate::monitor::update::Update;
use crate::settings::Plugin;

/// A GPU that becomes unhealthy again this often within [`RELAPSE_WINDOW`] stays unhealthy.
const MAX_RELAPSES: usize = 3;
const RELAPSE_WINDOW: Duration = Duration::from_secs(60 * 60);

/// The settings of the administrator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How long a GPU must be without an error before it is healthy again
    pub quiet_period: Duration,
    /// XIDs that do not affect the health
    pub ignored_xids: BTreeSet<u64>,
}

impl From<&Plugin> for Policy {
    fn from(settings: &Plugin) -> Self {
        let ignored_xids = settings
            .ignored_xids
            .iter()
            .copied()
            .map(u64::from)
            .collect();
        Self {
            quiet_period: settings.quiet_period,
            ignored_xids,
        }
    }
}

/// Whether a GPU can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuState {
    /// Containers can get it.
    Healthy,
    /// The driver has not reported its state since this time.
    Unknown(Instant),
    /// Containers cannot get it since this time.
    Failed(GpuFailure, Instant),
}

/// The health of all GPUs.
#[derive(Clone, Debug)]
pub struct Health {
    policy: Policy,
    gpus: BTreeMap<String, Gpu>,
    /// Why no GPU can be used, and since when
    driver: Option<(String, Instant)>,
    started: Instant,
}

/// Why a GPU is unhealthy before the first report.
pub const UNKNOWN: &str = "the driver has not reported the state of the GPU yet";

/// What is known about a GPU.
#[derive(Clone, Debug, Default)]
struct Gpu {
    node_missing_since: Option<Instant>,
    trouble: Option<Trouble>,
    /// Since when the driver has not reported the state of the GPU, because the plugin or the driver has just started
    unknown_since: Option<Instant>,
    /// The last good sample
    good: Option<Instant>,
    uncorrectable_ecc: Option<u64>,
    has_recovered: bool,
    relapses: Vec<Instant>,
    is_stuck: bool,
}

/// An error that has not been overcome, for another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenError {
    /// The first error
    pub cause: String,
    /// When it was reported
    pub since: Instant,
    /// The last error
    pub last: Instant,
    /// The driver did not answer, and no error of this GPU was reported.
    pub driver_silent: bool,
    /// The GPU failed again and again, and stays unhealthy until it is cleared.
    pub is_stuck: bool,
}

/// An error that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFailure {
    /// The reason, such as `XID 79`
    pub why: String,
    /// The driver as a whole does not answer, which does not prove that this GPU fails.
    pub driver_silent: bool,
}

impl GpuFailure {
    /// Describes the failure of one GPU.
    #[must_use]
    pub fn of_gpu(why: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            driver_silent: false,
        }
    }
}

/// An error that has not been overcome.
#[derive(Clone, Debug)]
struct Trouble {
    /// The first error
    cause: String,
    /// What the last bad sample showed
    condition: Option<String>,
    since: Instant,
    /// The last error
    last: Instant,
    /// The driver did not answer, and no error of this GPU was reported.
    driver_silent: bool,
}

impl Health {
    /// Creates the state before the driver has answered.
    #[must_use]
    pub const fn new(policy: Policy, now: Instant) -> Self {
        Self {
            policy,
            gpus: BTreeMap::new(),
            driver: None,
            started: now,
        }
    }

    /// Takes a report of the monitor into account.
    pub fn apply(&mut self, update: &Update, now: Instant) {
        self.tick(now);
        match update {
            Update::Snapshot(snapshot) => self.apply_snapshot(snapshot, now),
            Update::Sample(sample) => self.gpu(&sample.gpu, now).apply_sample(sample, now),
            Update::Event(event) => self.apply_event(event, now),
            Update::Silent {
                gpu: Some(gpu),
                why,
            } => self.gpu(gpu, now).fail(why, now, true),
            Update::Silent { gpu: None, why } => self
                .gpus
                .values_mut()
                .for_each(|gpu| gpu.fail(why, now, false)),
            Update::Absent(why) => self.driver = Some((why.clone(), self.driver_since(now))),
            Update::LetGo => self.driver = Some(("driver is being replaced".to_owned(), now)),
        }
        self.tick(now);
    }

    /// Makes the GPUs healthy whose quiet period has passed.
    pub fn tick(&mut self, now: Instant) {
        for gpu in self.gpus.values_mut() {
            if gpu
                .recovers_at(self.policy.quiet_period)
                .is_some_and(|at| at <= now)
            {
                gpu.trouble = None;
                gpu.has_recovered = true;
            }
        }
    }

    /// Returns when [`Self::tick`] makes the next GPU healthy.
    #[must_use]
    pub fn next_tick(&self) -> Option<Instant> {
        self.gpus
            .values()
            .filter_map(|gpu| gpu.recovers_at(self.policy.quiet_period))
            .min()
    }

    /// Returns the state of the GPU with this UUID.
    #[must_use]
    pub fn state(&self, uuid: &str) -> GpuState {
        if let Some((why, since)) = &self.driver {
            let failure = GpuFailure {
                why: why.clone(),
                driver_silent: true,
            };
            return GpuState::Failed(failure, *since);
        }
        let Some(gpu) = self.gpus.get(uuid) else {
            return GpuState::Unknown(self.started);
        };
        match (gpu.failure(), gpu.unknown_since) {
            (Some((failure, since)), _) => GpuState::Failed(failure, since),
            (None, Some(since)) => GpuState::Unknown(since),
            (None, None) => GpuState::Healthy,
        }
    }

    /// Returns the errors that have not been overcome, by UUID.
    #[must_use]
    pub fn errors(&self) -> BTreeMap<String, OpenError> {
        let mut errors = BTreeMap::new();
        for (uuid, gpu) in &self.gpus {
            if let Some(trouble) = &gpu.trouble {
                let error = OpenError {
                    cause: trouble.cause.clone(),
                    since: trouble.since,
                    last: trouble.last,
                    driver_silent: trouble.driver_silent,
                    is_stuck: gpu.is_stuck,
                };
                errors.insert(uuid.clone(), error);
            }
        }
        errors
    }

    /// Takes the errors of an earlier process into account. A GPU needs a good sample and the rest of the quiet period.
    pub fn restore(&mut self, errors: BTreeMap<String, OpenError>, now: Instant) {
        for (uuid, error) in errors {
            let gpu = self.gpu(&uuid, now);
            gpu.is_stuck = error.is_stuck;
            gpu.trouble = Some(Trouble {
                cause: error.cause,
                condition: None,
                since: error.since,
                last: error.last,
                driver_silent: error.driver_silent,
            });
        }
    }

    /// Forgets all errors of a GPU, and returns whether there were any. The GPU is healthy until the next error.
    pub fn clear(&mut self, uuid: &str) -> bool {
        let Some(gpu) = self.gpus.get_mut(uuid) else {
            return false;
        };
        gpu.relapses.clear();
        gpu.has_recovered = false;
        let was_stuck = std::mem::take(&mut gpu.is_stuck);
        gpu.trouble.take().is_some() || was_stuck
    }

    fn gpu(&mut self, uuid: &str, now: Instant) -> &mut Gpu {
        self.gpus.entry(uuid.to_owned()).or_insert_with(|| Gpu {
            unknown_since: Some(now),
            ..Gpu::default()
        })
    }

    fn driver_since(&self, now: Instant) -> Instant {
        self.driver.as_ref().map_or(now, |(_, since)| *since)
    }

    fn apply_snapshot(&mut self, snapshot: &Snapshot, now: Instant) {
        if self.driver.take().is_some() {
            for gpu in self.gpus.values_mut() {
                gpu.unknown_since = Some(now);
            }
        }
        for gpu in &snapshot.inventory.gpus {
            self.gpu(&gpu.uuid, now);
        }
        for failed in &snapshot.inventory.failed {
            let Some(uuid) = &failed.uuid else { continue };
            let gpu = self.gpu(uuid, now);
            if failed.node_missing {
                gpu.node_missing_since.get_or_insert(now);
            } else {
                gpu.fail(&failed.why, now, true);
            }
        }
    }

    fn apply_event(&mut self, event: &GpuEvent, now: Instant) {
        let cause = match event.kind {
            EventKind::Xid(code) if self.policy.ignored_xids.contains(&code) => return,
            EventKind::Xid(code) => format!("XID {code}"),
            EventKind::Unavailable => "the driver reports that the GPU is unavailable".to_owned(),
            EventKind::UncorrectableEcc => "uncorrectable memory error".to_owned(),
            // The monitor sends a sample with the new action.
            EventKind::RecoveryAction => return,
        };
        self.gpu(&event.gpu, now).fail(&cause, now, true);
    }
}

impl Gpu {
    fn apply_sample(&mut self, sample: &Sample, now: Instant) {
        self.node_missing_since = sample
            .node_missing
            .then(|| self.node_missing_since.unwrap_or(now));
        let ecc_before = self.uncorrectable_ecc.unwrap_or(u64::MAX);
        let ecc_grew = sample
            .uncorrectable_ecc
            .is_some_and(|count| count > ecc_before);
        self.uncorrectable_ecc = sample.uncorrectable_ecc.or(self.uncorrectable_ecc);
        if ecc_grew {
            self.fail("uncorrectable memory error", now, true);
        }
        match condition(sample) {
            Some(condition) => {
                self.fail(&condition, now, true);
                self.note(condition);
            }
            None => {
                self.good = Some(now);
                self.unknown_since = None;
                if let Some(trouble) = &mut self.trouble {
                    trouble.condition = None;
                }
            }
        }
    }

    /// Records an error. `counts` is false for an error of the driver, which is not a relapse of this GPU.
    fn fail(&mut self, cause: &str, now: Instant, counts: bool) {
        self.good = None;
        if let Some(trouble) = &mut self.trouble {
            trouble.last = now;
            trouble.driver_silent &= !counts;
            return;
        }
        let driver_silent = !counts;
        self.trouble = Some(Trouble {
            cause: cause.to_owned(),
            condition: None,
            since: now,
            last: now,
            driver_silent,
        });
        if counts && self.has_recovered {
            self.relapses
                .retain(|at| now.saturating_duration_since(*at) < RELAPSE_WINDOW);
            self.relapses.push(now);
            self.is_stuck |= self.relapses.len() >= MAX_RELAPSES;
        }
    }

    fn note(&mut self, condition: String) {
        if let Some(trouble) = &mut self.trouble {
            trouble.condition = (condition != trouble.cause).then_some(condition);
        }
    }

    /// Returns when the GPU becomes healthy, if nothing else happens.
    fn recovers_at(&self, quiet_period: Duration) -> Option<Instant> {
        let trouble = self.trouble.as_ref().filter(|_| !self.is_stuck)?;
        self.good.map(|good| good.max(trouble.last + quiet_period))
    }

    /// Returns the error that has not been overcome, and when it began.
    fn failure(&self) -> Option<(GpuFailure, Instant)> {
        if let Some(since) = self.node_missing_since {
            return Some((GpuFailure::of_gpu("its device node is missing"), since));
        }
        let trouble = self.trouble.as_ref()?;
        let mut why = trouble.cause.clone();
        if let Some(condition) = &trouble.condition {
            why = format!("{why}; {condition}");
        }
        if self.is_stuck {
            why.push_str("; it failed again and again, and stays unhealthy until it is cleared");
        }
        let failure = GpuFailure {
            why,
            driver_silent: trouble.driver_silent,
        };
        Some((failure, trouble.since))
    }
}

/// Returns what is wrong with the GPU now.
fn condition(sample: &Sample) -> Option<String> {
    if let Some(error) = &sample.error {
        return Some(error.clone());
    }
    if sample.remap_failed == Some(true) {
        return Some("the GPU could not replace defective rows of its memory".to_owned());
    }
    sample
        .recovery
        .filter(|action| *action != Recovery::None)
        .map(|action| action.to_string())
}

#[cfg(test)]
mod tests;
