//! Spreads the requests of a cluster's nodes, so that an API server that has been away is not asked by all of them at once. Pure.
//!
//! A node does not know how many others there are. 5,000 nodes with these times make at most 400 requests in any second, also when the API
//! server goes away or comes back: `tests/fleet`.

use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;
use std::time::Duration;

/// How long a watch lasts, in seconds. Watches that began in the same second do not end in the same second. The library permits up to 294.
const WATCH: RangeInclusive<u32> = 200..=294;

/// How long to wait before a request is repeated.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// The most that the first pause lasts
    pub first: Duration,
    /// The most that any pause lasts
    pub longest: Duration,
}

/// The pace of the requests that publish devices.
pub const PUBLISHER: Pace = Pace {
    first: Duration::from_secs(40),
    longest: Duration::from_secs(80),
};

impl Pace {
    /// Returns the pause after the n-th failure of a series: any time up to a limit that doubles with each failure (exponential backoff with
    /// full jitter). `chance` is a random number from 0 to 1. The pause begins after the time for which the API server has asked.
    #[must_use]
    pub fn pause(self, failures: u32, retry_after: Option<Duration>, chance: f64) -> Duration {
        let doubled = 1 << failures.saturating_sub(1).min(10);
        let limit = self.first.saturating_mul(doubled).min(self.longest);
        let asked = retry_after.unwrap_or_default().min(self.longest);
        asked + limit.mul_f64(chance)
    }
}

/// Returns how long a watch lasts, in seconds. `chance` is a random number from 0 to 1.
#[must_use]
pub fn watch_length(chance: f64) -> u32 {
    let span = f64::from(WATCH.end() - WATCH.start());
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is at most the span"
    )]
    let more = (span * chance) as u32;
    WATCH.start() + more
}

/// Returns a random number from 0 to 1.
#[must_use]
pub fn chance() -> f64 {
    // The standard library seeds its hashers with random numbers of the kernel.
    let number = RandomState::new().hash_one(()) >> 32;
    #[expect(clippy::cast_precision_loss, reason = "it has 32 bits")]
    let number = number as f64;
    number / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_the_longest() {
        let seconds = |failures, retry_after, chance| {
            PUBLISHER.pause(failures, retry_after, chance).as_secs_f64()
        };
        for (failures, limit) in [(1, 40.0), (2, 80.0), (3, 80.0), (99, 80.0)] {
            for chance in [0.0, 0.5, 1.0] {
                assert_eq!(seconds(failures, None, chance), limit * chance);
            }
        }
        let asked = Some(Duration::from_secs(7));
        assert_eq!(seconds(1, asked, 0.5), 27.0);
        // A wrong answer does not stop the driver for a day.
        assert_eq!(seconds(1, Some(Duration::from_secs(86400)), 0.0), 80.0);
    }

    #[test]
    fn watches_last_for_different_times() {
        assert_eq!((watch_length(0.0), watch_length(1.0)), (200, 294));
        let mut chances: Vec<f64> = (0..1000).map(|_| chance()).collect();
        chances.sort_by(f64::total_cmp);
        assert!(0.0 <= chances[0] && chances[999] <= 1.0);
        let quarters = [250, 500, 750].map(|at| chances[at]);
        for (found, expected) in quarters.into_iter().zip([0.25, 0.5, 0.75]) {
            assert!((found - expected).abs() < 0.1, "{quarters:?}");
        }
        chances.dedup();
        assert!(chances.len() > 990, "{}", chances.len());
    }
}
