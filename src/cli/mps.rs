//! `mps`: parses what the supervisor of an MPS daemon is to do.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use super::args;
use crate::mps::{self, Request};

/// Runs the daemon, or cleans up after it.
///
/// # Errors
/// If the daemon fails, or the compute mode cannot be set.
pub(super) fn run(options: &args::Mps, config: Option<&Path>) -> Result<ExitCode> {
    if let Some(result) = &options.after {
        mps::clean_up(&options.gpu, result, config)?;
        return Ok(ExitCode::SUCCESS);
    }
    let request = Request {
        gpu: options.gpu.clone(),
        memory_limit_mib: options.memory_limit,
        thread_percentage: options.thread_percentage,
    };
    mps::run(&request, config)
}
