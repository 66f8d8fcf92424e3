//! How long a call of the hook may take, so that it reports what it waited for before the engine ends it. An engine that
//! ends a hook shows no text of it, and one without a limit waits for ever.

use std::time::Duration;

/// What every hook file that is shipped, and every hook entry that is written into a CDI spec or config.json, allows a call.
/// kubelet gives up on a container after 120 seconds, CRI-O and Podman after 240.
pub const HOOK: Duration = Duration::from_secs(60);

/// What the driver's modules may take to load in a container's start: on a host whose boot has not prepared them.
pub const MODULES: Duration = Duration::from_secs(10);

/// Opening files, mounting, and asking systemd, which has 5 seconds to answer.
const REST: Duration = Duration::from_secs(5);

/// What the file systems of a container may take to answer, which is milliseconds, where the driver took `spent` before.
#[must_use]
pub fn for_container(spent: Duration) -> Duration {
    const USUAL: Duration = Duration::from_secs(20);
    // Less than the engine waits, or it ends the hook before the hook can say why.
    HOOK.saturating_sub(spent + Duration::from_secs(3)).clamp(REST, USUAL)
}

/// What NVML may take if it is asked again, after `spent` on asking it first and waiting for others.
#[must_use]
pub fn left_for_nvml(nvml_timeout: Duration, spent: Duration) -> Duration {
    nvml_timeout.saturating_sub(spent).max(Duration::from_secs(1)).min(nvml_timeout)
}

/// What a call can take at most where NVML may take this long: waiting for another call that asks NVML is part of that.
#[must_use]
pub fn of_call(nvml_timeout: Duration) -> Duration {
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
            assert_eq!(for_container(spent), Duration::from_secs(patience), "{spent:?}");
        }
    }

    #[test]
    fn the_default_fits() {
        assert!(of_call(crate::config::Config::default().nvml_timeout) <= HOOK);
    }
}
