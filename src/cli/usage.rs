//! Reports invalid command lines.

use std::process::ExitCode;

use crate::record::call::Call;

/// The exit status for an invalid command line.
const USAGE: u8 = 2;

/// Reports an invalid command line to a person.
pub(crate) fn usage_error(error: &anyhow::Error) -> ExitCode {
    Call::default().error(error);
    ExitCode::from(USAGE)
}

/// Reports the wrong command line of a hook, which must not wait for its engine to read the message.
pub(crate) fn hook_usage_error(stage: &str, error: &anyhow::Error) -> ExitCode {
    Call::for_stage(stage).error(error);
    ExitCode::from(USAGE)
}
