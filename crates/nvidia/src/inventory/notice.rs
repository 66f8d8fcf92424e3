//! Tells a person that NVML takes long. A GPU without persistence mode takes seconds, and a broken one the whole time limit.
//!
//! The functions that wait are below many callers, most of which run for an engine. So a program says once, at its start, that a person
//! reads its messages. The stages of engines and NVIDIA's command names do not. The device plugin waits in another way, and uses only the line.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A function that prints the time limit of the wait.
pub type Notice = fn(Duration);

/// How long a wait is not worth a message.
pub const SOON: Duration = Duration::from_secs(1);

static NOTICE: OnceLock<Notice> = OnceLock::new();
/// Whether the notice was given. A process that has waited for another one waits for its own query next, with one time limit for both.
static IS_GIVEN: AtomicBool = AtomicBool::new(false);

/// Has this process call the function once if it waits long for NVML, or for another process that asks NVML.
pub fn set(notice: Notice) {
    NOTICE.set(notice).ok();
}

/// Returns the line for a person.
#[must_use]
pub fn line(limit: Duration) -> String {
    format!(
        "waiting for NVML, at most {} s; press Ctrl-C to stop\n",
        limit.as_secs_f32()
    )
}

/// A wait that has begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    begun: Instant,
    limit: Duration,
}

impl Wait {
    /// Begins a wait with this time limit, which the notice contains.
    pub(crate) fn begin(limit: Duration) -> Self {
        Self {
            begun: Instant::now(),
            limit,
        }
    }

    /// Waits until `end`. `answer` waits until the time that it gets, and returns `None` if there is no answer by then. It is called a second
    /// time if the notice is due before the end.
    pub(crate) fn until<T>(
        self,
        end: Instant,
        mut answer: impl FnMut(Instant) -> Option<T>,
    ) -> Option<T> {
        let due = self.begun + SOON;
        if let Some(notice) = NOTICE
            .get()
            .filter(|_| due < end && !IS_GIVEN.load(Ordering::Relaxed))
        {
            if let Some(answer) = answer(due) {
                return Some(answer);
            }
            IS_GIVEN.store(true, Ordering::Relaxed);
            notice(self.limit);
        }
        answer(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_fits_a_terminal() {
        let limit = Duration::from_secs(30);
        assert_eq!(
            line(limit),
            "waiting for NVML, at most 30 s; press Ctrl-C to stop\n"
        );
        assert!(line(Duration::from_millis(3_599_500)).len() <= 80);
    }
}
