//! What is wrong with a setting, for people.

use anyhow::Error;
use base::report::{Finding, failure};
use findings::catalog;

/// Returns the error for an option with an invalid value.
pub(super) fn invalid_option(name: &str, allowed: &str) -> Error {
    let what = format!("invalid command line: --{name} has an invalid value; it must be {allowed}");
    failure(
        &catalog::COMMAND_LINE,
        what,
        "run \"oci-nvidia-kubelet-plugin run --help\", which describes the option",
    )
}

/// Returns the error for the configuration of another device plugin. It names the place and the allowed values, which a hint would repeat.
pub(super) fn invalid_config(what: String) -> Error {
    failure(&catalog::PLUGIN_CONFIG, what, "")
}

/// Returns the finding about a setting that has no effect here.
pub(super) fn no_effect(place: &str, why: &str) -> Finding {
    Finding::new(
        &catalog::PLUGIN_NO_EFFECT,
        format!("{place} has no effect: {why}"),
        "remove it",
    )
}
