//! Asks NVML which processes use each GPU.

use std::time::Instant;

use anyhow::Result;

use base::json;
use base::sys::child::NoAnswer;

use super::program::{self, Isolation};
use super::protocol::{ProcessLine, Request};
use super::query::{self, NvmlQuery};
use crate::inventory::notice::Wait;
use crate::inventory::processes::GpuProcesses;

/// Asks NVML for the processes of all GPUs until `end`.
///
/// # Errors
/// If the library cannot be loaded, fails as a whole, or does not answer in time. A GPU that fails has the reason instead of processes.
pub fn ask(question: &NvmlQuery, end: Instant) -> Result<Vec<GpuProcesses>> {
    query::timed(question, || ask_all(question, end))
}

fn ask_all(question: &NvmlQuery, end: Instant) -> Result<Vec<GpuProcesses>> {
    let library = question.library_place()?;
    let identity = library.identity;
    let wait = Wait::begin(question.deadline);
    let request = Request::Processes { library };
    let mut process = program::start(&request, Isolation::AmongProcesses)?;
    let mut gpus = Vec::new();
    loop {
        let line = query::next_line(&mut process, end, wait)
            .map_err(|why| query::without_answer(why, question))?;
        match json::from_bytes(&line) {
            Ok(ProcessLine::Gpu(gpu)) => gpus.push(gpu),
            Ok(ProcessLine::Done) => return Ok(gpus),
            Ok(ProcessLine::Nvml(failed)) => {
                return Err(query::explain_nvml(&failed, question, identity));
            }
            Ok(ProcessLine::Refused(refused)) => {
                return Err(query::explain_refused(&refused, question));
            }
            Err(error) => {
                return Err(query::without_answer(
                    NoAnswer::System(error.into()),
                    question,
                ));
            }
        }
    }
}
