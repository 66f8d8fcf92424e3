//! Collects the reports of several child processes. If a child hangs or crashes at a GPU, only that GPU is lost.

use std::time::{Duration, Instant};

use base::sys::child::NoAnswer;

use crate::inventory::cap_files::AtQuery;
use crate::inventory::nvml::{Driver, NvmlProgress};
use crate::inventory::{FailedGpu, Gpu, Inventory};

/// The answer of NVML.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmlAnswer {
    /// The MIG instances before the query
    pub mig: AtQuery,
    /// The driver and its GPUs
    pub inventory: Inventory,
    /// Whether a GPU hung or crashed a child. It is one of the failed GPUs, and another query of it takes long.
    pub gave_up: bool,
}

/// The reports so far.
#[derive(Debug, Default)]
pub struct Gathered {
    driver: Option<Driver>,
    inventory: Inventory,
    /// The GPU that is being queried, and the start of the query
    asking: Option<(u32, Instant)>,
    given_up: Vec<u32>,
}

impl Gathered {
    /// Adds a report. Returns false if it contradicts earlier ones: the GPUs have changed in the meantime, and an index may now belong to
    /// another GPU.
    #[must_use]
    pub fn take(&mut self, report: NvmlProgress, now: Instant) -> bool {
        match report {
            NvmlProgress::Driver(driver) => {
                let is_same = self.driver.as_ref().is_none_or(|known| *known == driver);
                self.driver = Some(driver);
                return is_same;
            }
            NvmlProgress::Next(index) => self.asking = Some((index, now)),
            NvmlProgress::Gpu(gpu) => {
                self.asking = None;
                let is_new = |known: &Gpu| known.index != gpu.index && known.bus_id != gpu.bus_id;
                let is_consistent = self.inventory.gpus.iter().all(is_new);
                self.inventory.add_gpu(gpu);
                return is_consistent;
            }
            NvmlProgress::Failed(failed) => {
                self.asking = None;
                self.inventory.add_failed(failed);
            }
        }
        true
    }

    /// Returns the indices of the GPUs that are not queried again.
    #[must_use]
    pub fn indices(&self) -> Vec<u32> {
        let failed = self
            .inventory
            .failed
            .iter()
            .filter_map(|failed| failed.index);
        self.inventory
            .gpus
            .iter()
            .map(|gpu| gpu.index)
            .chain(failed)
            .collect()
    }

    /// Whether every GPU has been queried.
    #[must_use]
    pub(crate) fn is_whole(&self) -> bool {
        let is_asked = |count| self.asking.is_none() && self.indices().len() == count;
        self.driver
            .as_ref()
            .and_then(|driver| usize::try_from(driver.count).ok())
            .is_some_and(is_asked)
    }

    /// Returns the deadline for the next report. A GPU gets half of the remaining time, so that there is time for the others. The last one
    /// gets all of it.
    #[must_use]
    pub fn limit(&self, end: Instant) -> Instant {
        match (self.asking, &self.driver) {
            (Some((_, since)), Some(driver)) if !self.is_last(driver) => {
                since + end.saturating_duration_since(since) / 2
            }
            _ => end,
        }
    }

    fn is_last(&self, driver: &Driver) -> bool {
        usize::try_from(driver.count).is_ok_and(|count| self.indices().len() + 1 >= count)
    }

    /// Marks the GPU that is being queried as failed. Returns false if no GPU is the cause of the error.
    pub(crate) fn give_up(&mut self, why: &NoAnswer) -> bool {
        let Some((index, _)) = self.asking.take() else {
            return false;
        };
        let why = match why {
            NoAnswer::System(_) => return false,
            NoAnswer::Timeout => "NVML does not answer queries about it".to_owned(),
            NoAnswer::Died(Some(signal)) => {
                format!("NVML crashes in queries about it ({signal})")
            }
            NoAnswer::Died(None) => "NVML ends the process in queries about it".to_owned(),
        };
        self.given_up.push(index);
        self.inventory.add_failed(FailedGpu {
            index: Some(index),
            why,
            ..FailedGpu::default()
        });
        true
    }

    /// Returns the GPUs that hung or crashed, for a message.
    #[must_use]
    pub(crate) fn given_up(&self) -> &[u32] {
        &self.given_up
    }

    /// Returns the answer, in the order of indices.
    #[must_use]
    pub fn answer(self) -> NvmlAnswer {
        let driver = self.driver.unwrap_or_default();
        let inventory = Inventory {
            driver_version: driver.version,
            cuda_version: driver.cuda,
            ..self.inventory
        };
        NvmlAnswer {
            mig: AtQuery::default(),
            inventory,
            gave_up: !self.given_up.is_empty(),
        }
    }
}

/// The shortest remaining time for which another child is started.
pub(crate) const WORTH_ASKING: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use nix::sys::signal::Signal;

    use super::super::select::tests::inventory;
    use super::*;

    fn driver(count: u32) -> NvmlProgress {
        NvmlProgress::Driver(Driver {
            version: "535.1".into(),
            cuda: "12.2".into(),
            count,
        })
    }

    fn gpu(index: usize) -> NvmlProgress {
        NvmlProgress::Gpu(inventory().gpus[index].clone())
    }

    /// Takes them all; whether they are consistent.
    fn take(gathered: &mut Gathered, reports: Vec<NvmlProgress>) -> bool {
        reports
            .into_iter()
            .all(|report| gathered.take(report, Instant::now()))
    }

    #[test]
    fn a_gpu_that_hangs_is_left_out_and_the_others_are_asked() {
        let mut gathered = Gathered::default();
        assert!(take(
            &mut gathered,
            vec![
                driver(3),
                NvmlProgress::Next(0),
                gpu(0),
                NvmlProgress::Next(1)
            ]
        ));
        assert!(!gathered.is_whole());
        assert!(gathered.give_up(&NoAnswer::Timeout));
        assert_eq!(gathered.indices(), [0, 1]);
        assert!(take(
            &mut gathered,
            vec![driver(3), NvmlProgress::Next(2), gpu(2)]
        ));
        assert!(gathered.is_whole());
        let answer = gathered.answer();
        assert!(answer.gave_up);
        assert_eq!(
            answer
                .inventory
                .gpus
                .iter()
                .map(|gpu| gpu.index)
                .collect::<Vec<_>>(),
            [0, 2]
        );
        assert_eq!(
            answer.inventory.failed[0].to_string(),
            "GPU 1: NVML does not answer queries about it"
        );
    }

    #[test]
    fn a_crash_of_the_last_gpu_needs_no_other_process() {
        let mut gathered = Gathered::default();
        assert!(take(
            &mut gathered,
            vec![
                driver(2),
                NvmlProgress::Next(0),
                gpu(0),
                NvmlProgress::Next(1)
            ]
        ));
        assert!(gathered.give_up(&NoAnswer::Died(Some(Signal::SIGSEGV))));
        assert!(gathered.is_whole());
        assert!(
            gathered.answer().inventory.failed[0]
                .why
                .contains("(SIGSEGV)")
        );
        // Without a GPU that is being asked it is NVML itself.
        assert!(!Gathered::default().give_up(&NoAnswer::Timeout));
    }

    #[test]
    fn what_changes_between_two_processes_is_noticed() {
        for second in [vec![driver(2)], vec![driver(3), gpu(0)]] {
            let mut gathered = Gathered::default();
            assert!(take(
                &mut gathered,
                vec![
                    driver(3),
                    NvmlProgress::Next(0),
                    gpu(0),
                    NvmlProgress::Next(1)
                ]
            ));
            gathered.give_up(&NoAnswer::Timeout);
            assert!(!take(&mut gathered, second));
        }
    }

    #[test]
    fn time_is_left_for_those_behind() {
        let start = Instant::now();
        let seconds = |n| Duration::from_secs(n);
        let end = start + seconds(30);
        let mut gathered = Gathered::default();
        assert_eq!(gathered.limit(end), end, "before there is a GPU to blame");
        assert!(
            gathered.take(driver(2), start)
                && gathered.take(NvmlProgress::Next(0), start + seconds(10))
        );
        assert_eq!(gathered.limit(end), start + seconds(20));
        assert!(
            gathered.take(gpu(0), start)
                && gathered.take(NvmlProgress::Next(1), start + seconds(20))
        );
        assert_eq!(gathered.limit(end), end, "the last one");
    }
}
