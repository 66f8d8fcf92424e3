//! Time limits of the hook. They are shorter than the limits of the engines, so that the hook can report the reason for a delay: an engine
//! that kills a hook does not show its output, and an engine without a limit waits forever.

use std::time::Duration;

/// The timeout in the hook files of the packages, and in the hook entries of CDI specs and config.json. kubelet gives up on a
/// container after 120 seconds, CRI-O and Podman after 240.
pub const HOOK: Duration = Duration::from_secs(60);

/// How long the driver's modules may take to load when a container starts, on a host that has not loaded them at boot.
pub const MODULES: Duration = Duration::from_secs(10);

/// How long the rest may take: opening files, mounting, and a request to systemd, which has 5 seconds to answer.
const REST: Duration = Duration::from_secs(5);

/// Returns how long the file systems of a container may take to answer if the hook has already `spent` this time on the driver.
/// Usually they answer within milliseconds.
#[must_use]
pub fn for_container(spent: Duration) -> Duration {
    const USUAL: Duration = Duration::from_secs(20);
    // Three seconds less than the engine waits, so that the hook can report the reason before it is killed.
    HOOK.saturating_sub(spent + Duration::from_secs(3))
        .clamp(REST, USUAL)
}

/// Returns how long a second query of NVML may take, after the first one and the wait for other processes took `spent`.
#[must_use]
pub fn left_for_nvml(nvml_timeout: Duration, spent: Duration) -> Duration {
    nvml_timeout
        .saturating_sub(spent)
        .max(Duration::from_secs(1))
        .min(nvml_timeout)
}

/// Returns the longest time that a call of the hook can take with this limit for NVML. The wait for another process that queries
/// NVML is part of that limit.
#[must_use]
pub fn longest_call(nvml_timeout: Duration) -> Duration {
    MODULES + nvml_timeout + REST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asking_twice_takes_no_longer_than_once() {
        let (timeout, second) = (Duration::from_secs(30), Duration::from_secs(1));
        for spent in [0, 1, 10, 29, 43] {
            let spent = second * spent;
            let left = left_for_nvml(timeout, spent);
            assert!(left == second || spent + left <= timeout, "{spent:?}");
        }
        assert_eq!(left_for_nvml(timeout, second * 20), second * 10);
        assert_eq!(left_for_nvml(second / 2, second), second / 2);
        assert_eq!(left_for_nvml(timeout, second * 60), second);
    }

    #[test]
    fn a_container_is_waited_for_until_the_engine_loses_patience() {
        for (spent, patience) in [(0, 20), (30, 20), (45, 12), (52, 5), (600, 5)] {
            let spent = Duration::from_secs(spent);
            assert_eq!(
                for_container(spent),
                Duration::from_secs(patience),
                "{spent:?}"
            );
        }
    }

    #[test]
    fn the_default_fits() {
        assert!(longest_call(crate::config::Config::default().nvml_timeout) <= HOOK);
    }
}
