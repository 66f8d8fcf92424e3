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

/// How long a call waits for another one that asks NVML already, before it asks by itself.
#[must_use]
pub fn for_others(nvml_timeout: Duration) -> Duration {
    nvml_timeout / 2
}

/// What a call can take at most where NVML may take this long.
#[must_use]
pub fn of_call(nvml_timeout: Duration) -> Duration {
    MODULES + for_others(nvml_timeout) + nvml_timeout + REST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_fits() {
        assert!(of_call(crate::config::Config::default().nvml_timeout) <= HOOK);
    }
}
