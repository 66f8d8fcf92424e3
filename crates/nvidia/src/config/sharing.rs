//! The table `[sharing]`: the GPUs that the Multi-Process Service (MPS) shares, and the limits for their clients.

use super::Config;
use crate::limit_entry;

/// The entry that stands for all GPUs.
pub const ALL: &str = "all";

/// What [`memory_mib`] accepts, for messages.
pub const MEMORY: &str = "an amount of memory, such as 8G or 512M";

/// Which GPUs are shared, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// The GPUs, as in the lists of `[devices]`, or [`ALL`]
    pub mps_gpus: Vec<String>,
    /// The limits of their clients
    pub limits: ClientLimits,
}

/// The limits that the MPS daemon of a GPU enforces for each client process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientLimits {
    /// The GPU memory in MiB; `None` for no limit
    pub memory_limit_mib: Option<u64>,
    /// The percentage of the GPU's multiprocessors, from 1 to 100; `None` for no limit
    pub thread_percentage: Option<u8>,
}

/// Parses an amount of memory as the MPS daemon writes it: a whole number with the suffix `G` or `M`, with a factor of 1024. Returns MiB.
#[must_use]
pub fn memory_mib(text: &str) -> Option<u64> {
    let (number, factor) = match text.strip_suffix('G') {
        Some(number) => (number, 1024),
        None => (text.strip_suffix('M')?, 1),
    };
    if !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let mib = number.parse::<u64>().ok()?.checked_mul(factor)?;
    // No GPU has a million GiB. The limit keeps sums of several amounts from overflowing.
    (1..1 << 30).contains(&mib).then_some(mib)
}

/// Appends GPUs: the lists of drop-in files are added to the list of config.toml.
pub(super) fn add_gpus(config: &mut Config, entries: Vec<String>) -> Result<(), String> {
    for entry in &entries {
        if entry != ALL
            && let Err(why) = limit_entry::check(entry)
        {
            return Err(format!(
                "a list of GPUs, and {entry:?} is not a valid entry; write \"{ALL}\", or {why}"
            ));
        }
    }
    config.sharing.mps_gpus.extend(entries);
    Ok(())
}

pub(super) fn set_memory_limit(config: &mut Config, value: &str) -> Result<(), String> {
    config.sharing.limits.memory_limit_mib = match value {
        "" => None,
        text => Some(memory_mib(text).ok_or(MEMORY)?),
    };
    Ok(())
}

pub(super) fn set_thread_percentage(config: &mut Config, value: u8) {
    // 100 is the daemon's default, and not a limit.
    config.sharing.limits.thread_percentage = Some(value).filter(|value| *value < 100);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_of_memory() {
        for (text, mib) in [
            ("8G", Some(8192)),
            ("512M", Some(512)),
            ("2048M", Some(2048)),
            ("0G", None),
            ("", None),
            ("G", None),
            ("8", None),
            ("8g", None),
            ("8GiB", None),
            ("+8G", None),
            ("-1G", None),
            ("1.5G", None),
            (" 8G", None),
            ("99999999999999999999G", None),
            ("18014398509481984G", None),
        ] {
            assert_eq!(memory_mib(text), mib, "{text:?}");
        }
    }
}
