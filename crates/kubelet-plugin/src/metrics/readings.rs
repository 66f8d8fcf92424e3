//! Collects the measurements and counts the errors that the monitor reports. Pure, apart from the clock that callers pass.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use nvidia_host::nvml::monitoring::Memory;

use crate::monitor::message::{EventKind, GpuEvent, More, Sample};
use crate::monitor::update::{Driver, Update};

/// The time over which the utilization is averaged: three polls.
const WINDOW: Duration = Duration::from_secs(30);

/// What is known about all GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readings {
    /// The newest values by the UUID of the GPU. A GPU that does not answer has none.
    pub gpus: BTreeMap<String, Reading>,
    /// How often an XID was reported, by UUID and number
    pub xids: BTreeMap<(String, u64), u64>,
    /// The last XID that was reported, by UUID
    pub last_xids: BTreeMap<String, u64>,
    /// Why a GPU cannot be used, by UUID; `None` if it can
    pub health: BTreeMap<String, Option<String>>,
    /// Whether the driver works
    pub driver: Driver,
    /// Whether the host has no GPU, and so needs no driver
    pub is_without_gpu: bool,
}

/// The values of a GPU. `None` is a value that the driver does not report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    utilization: VecDeque<(Instant, u32)>,
    /// The memory of the whole GPU
    pub memory: Option<Memory>,
    /// Degrees Celsius
    pub temperature: Option<u32>,
    /// Milliwatts
    pub power: Option<u32>,
    /// The memory of its MIG devices by UUID
    pub mig_memory: BTreeMap<String, Memory>,
    /// What only metrics with DCGM's names contain
    pub more: Option<Box<More>>,
    /// When the last two polls were, and the KiB of the NVLinks that they reported, the older one first
    nvlink_data: [Option<(Instant, u64)>; 2],
}

impl Reading {
    /// Returns the power that the GPU's board uses, in watts.
    #[must_use]
    pub fn watts(&self) -> Option<f64> {
        Some(f64::from(self.power?) / 1000.0)
    }

    /// Returns what only metrics with DCGM's names contain, if it is measured.
    #[must_use]
    pub fn more(&self) -> Option<&More> {
        self.more.as_deref()
    }

    /// Returns the mean utilization of the last polls, in percent.
    #[must_use]
    pub fn utilization(&self) -> Option<f64> {
        let count = u32::try_from(self.utilization.len())
            .ok()
            .filter(|count| *count > 0)?;
        let sum: f64 = self
            .utilization
            .iter()
            .map(|(_, percent)| f64::from(*percent))
            .sum();
        Some(sum / f64::from(count))
    }

    /// Returns the utilization of the last poll, in percent.
    #[must_use]
    pub fn newest_utilization(&self) -> Option<u32> {
        self.utilization.back().map(|(_, percent)| *percent)
    }

    /// Returns the megabytes that the GPU sent and received through its NVLinks each second, between the last two polls. There is none
    /// for the poll after the driver was loaded again, because the counter has restarted at zero.
    #[must_use]
    pub fn nvlink_rate(&self) -> Option<f64> {
        let [Some((before, older)), Some((now, newer))] = self.nvlink_data else {
            return None;
        };
        let seconds = now.saturating_duration_since(before).as_secs_f64();
        let kib = newer.checked_sub(older)?;
        if seconds <= 0.0 {
            return None;
        }
        // DCGM divides the KiB by 1000 (`ReadAndCacheNvLinkBandwidth`).
        Some(float(kib) / 1000.0 / seconds)
    }

    fn take(&mut self, sample: &Sample, now: Instant) {
        let Some(measured) = &sample.measured else {
            return;
        };
        self.memory = sample.memory;
        (self.temperature, self.power) = (measured.temperature, measured.power);
        self.mig_memory.clone_from(&measured.mig_memory);
        self.more.clone_from(&measured.more);
        let data = measured.more.as_ref().and_then(|more| more.nvlink_data);
        self.nvlink_data.rotate_left(1);
        self.nvlink_data[1] = data.map(|kib| (now, kib));
        self.utilization
            .retain(|(at, _)| now.saturating_duration_since(*at) < WINDOW);
        match measured.utilization {
            Some(percent) => self.utilization.push_back((now, percent)),
            None => self.utilization.clear(),
        }
    }
}

impl Readings {
    /// Takes a report of the monitor into account.
    pub fn apply(&mut self, update: &Update, now: Instant) {
        if let Some(driver) = Driver::after(update) {
            self.driver = driver;
        }
        match update {
            Update::Sample(sample) if sample.error.is_some() => drop(self.gpus.remove(&sample.gpu)),
            Update::Sample(sample) => self
                .gpus
                .entry(sample.gpu.clone())
                .or_default()
                .take(sample, now),
            Update::Event(GpuEvent {
                gpu,
                kind: EventKind::Xid(number),
            }) => {
                *self.xids.entry((gpu.clone(), *number)).or_default() += 1;
                self.last_xids.insert(gpu.clone(), *number);
            }
            Update::Event(_) => {}
            Update::Snapshot(snapshot) => {
                let listed = &snapshot.inventory.gpus;
                self.gpus
                    .retain(|uuid, _| listed.iter().any(|gpu| gpu.uuid == *uuid));
            }
            Update::Silent { gpu: Some(gpu), .. } => drop(self.gpus.remove(gpu)),
            Update::Silent { gpu: None, .. } | Update::Absent(_) | Update::LetGo => {
                self.gpus.clear()
            }
        }
    }
}

/// Returns the number for a metric.
#[allow(
    clippy::cast_precision_loss,
    reason = "numbers of bytes and errors are below 2^53"
)]
pub(super) const fn float(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::message::Measured;

    fn sample(gpu: &str, utilization: Option<u32>) -> Update {
        let measured = Measured {
            utilization,
            temperature: Some(40),
            ..Measured::default()
        };
        let memory = Some(Memory { total: 8, used: 2 });
        Update::Sample(Sample {
            gpu: gpu.into(),
            memory,
            measured: Some(measured),
            ..Sample::default()
        })
    }

    #[test]
    fn the_utilization_is_a_mean_of_three_polls() {
        let start = Instant::now();
        let mut readings = Readings::default();
        for (second, percent, mean) in [
            (0, Some(10), Some(10.0)),
            (10, Some(30), Some(20.0)),
            (20, Some(50), Some(30.0)),
            (30, Some(70), Some(50.0)),
            (40, None, None),
        ] {
            readings.apply(
                &sample("GPU-0", percent),
                start + Duration::from_secs(second),
            );
            assert_eq!(readings.gpus["GPU-0"].utilization(), mean, "{second} s");
        }
    }

    #[test]
    fn the_rate_of_nvlinks() {
        let start = Instant::now();
        let mut reading = Reading::default();
        // The driver is loaded again after 4 s, and does not report the data after 8 s.
        for (second, kib, rate) in [
            (0, Some(1000), None),
            (2, Some(5000), Some(2.0)),
            (4, Some(0), None),
            (6, Some(500), Some(0.25)),
            (8, None, None),
            (10, Some(900), None),
            (10, Some(900), None),
            (14, Some(900), Some(0.0)),
        ] {
            let more = More {
                nvlink_data: kib,
                ..More::default()
            };
            let measured = Measured {
                more: Some(Box::new(more)),
                ..Measured::default()
            };
            let sample = Sample {
                measured: Some(measured),
                ..Sample::default()
            };
            reading.take(&sample, start + Duration::from_secs(second));
            assert_eq!(reading.nvlink_rate(), rate, "{second} s");
        }
    }

    #[test]
    fn a_gpu_that_does_not_answer_has_no_values() {
        let now = Instant::now();
        let failed = Sample {
            gpu: "GPU-0".into(),
            error: Some("lost".into()),
            ..Sample::default()
        };
        for (update, left) in [
            (Update::Sample(failed), 1),
            (
                Update::Silent {
                    gpu: Some("GPU-0".into()),
                    why: String::new(),
                },
                1,
            ),
            (
                Update::Silent {
                    gpu: None,
                    why: String::new(),
                },
                0,
            ),
            (Update::Absent(String::new()), 0),
            (Update::LetGo, 0),
            (Update::Snapshot(Box::default()), 0),
        ] {
            let mut readings = Readings::default();
            readings.apply(&sample("GPU-0", Some(1)), now);
            readings.apply(&sample("GPU-1", Some(1)), now);
            readings.apply(&update, now);
            assert_eq!(readings.gpus.len(), left, "{update:?}");
        }
    }

    #[test]
    fn xids_are_counted_by_gpu() {
        let now = Instant::now();
        let mut readings = Readings::default();
        for (gpu, kind) in [
            ("GPU-0", EventKind::Xid(79)),
            ("GPU-0", EventKind::Xid(79)),
            ("GPU-1", EventKind::Xid(13)),
            ("GPU-1", EventKind::Unavailable),
        ] {
            readings.apply(
                &Update::Event(GpuEvent {
                    gpu: gpu.into(),
                    kind,
                }),
                now,
            );
        }
        readings.apply(&Update::LetGo, now);
        let expected = [(("GPU-0".to_owned(), 79), 2), (("GPU-1".to_owned(), 13), 1)];
        assert_eq!(readings.xids, expected.into());
    }
}
