//! Reads and sets the compute mode of a GPU, in a confined child that keeps NVML loaded.
//!
//! The child is started before it is needed, because the initialization of NVML can take seconds, and the mode must change as soon as an
//! MPS daemon ends. In contrast to other processes that call NVML it is root, and has the capability CAP_SYS_ADMIN, without which the
//! kernel module denies the change. It still cannot write files, start programs or signal other processes.

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use base::json;
use base::report::failure;
use base::sys::child::{self, Child, NoAnswer};
use base::sys::confine::{CapabilitySet, Identity};
use findings::catalog;

use super::identity::RunAs;
use super::query::{self, NvmlQuery, Unloadable};
use crate::nvml::api::{Code, DeviceHandle, Failed};
use crate::nvml::compute_mode::{ComputeMode, ComputeModes};

/// The order to report the mode. The digit of a mode is the order to set it.
const REPORT: u8 = b'?';

/// The limit for the number of GPUs that NVML reports.
const MAX_GPUS: u32 = 256;

const ROOT: Identity = Identity { uid: 0, gid: 0 };

/// The GPU whose mode is read and set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModeTarget {
    /// `GPU-…`
    pub uuid: String,
    /// The index that it probably has. The other GPUs are only asked if it has another one, because a broken GPU may not answer.
    pub index: Option<u32>,
}

/// A child that reads and sets the compute mode of a GPU.
#[derive(Debug)]
pub struct ModeProcess {
    process: Child,
    orders: File,
    question: NvmlQuery,
    identity: Option<Identity>,
    uuid: String,
}

/// A line that the child writes: the answer to an order, or the reason why there will not be one.
#[derive(Debug, Serialize, Deserialize)]
enum ModeLine {
    Mode(u32),
    Set,
    NoGpu,
    Nvml(Failed),
    Refused(Unloadable),
}

impl ModeProcess {
    /// Starts the child. The program must have only one thread. When the value is dropped, all children end that the program has
    /// started since.
    ///
    /// # Errors
    /// If the process cannot be started. That NVML fails is the error of the first question.
    pub fn start(question: NvmlQuery, target: &ModeTarget) -> Result<Self> {
        let identity = match question.who {
            RunAs::Unchanged => None,
            RunAs::Configured(_) | RunAs::Fewest => Some(ROOT),
        };
        let (process, orders) =
            child::spawn_with_input(|pipe| respond(&question, identity, target, pipe))
                .map_err(|error| query::without_answer(NoAnswer::System(error), &question))?;
        Ok(Self {
            process,
            orders,
            question,
            identity,
            uuid: target.uuid.clone(),
        })
    }

    /// Returns the mode of the GPU. `None` stands for a mode that is unknown to this program.
    ///
    /// # Errors
    /// If NVML fails or does not answer in time, or does not have the GPU.
    pub fn mode(&mut self) -> Result<Option<ComputeMode>> {
        match self.ask(REPORT)? {
            ModeLine::Mode(mode) => Ok(ComputeMode::from_number(mode)),
            line => Err(self.explain(&line)),
        }
    }

    /// Sets the mode of the GPU.
    ///
    /// # Errors
    /// If NVML fails or does not answer in time, or does not have the GPU.
    pub fn set(&mut self, mode: ComputeMode) -> Result<()> {
        let digit = b'0' + u8::try_from(mode.number()).unwrap_or_default();
        let result = match self.ask(digit) {
            Ok(ModeLine::Set) => Ok(()),
            Ok(line) => Err(self.explain(&line)),
            Err(error) => Err(error),
        };
        result.with_context(|| {
            let (uuid, name) = (&self.uuid, mode.name());
            format!("cannot set the compute mode of {uuid} to {name}")
        })
    }

    /// Kills all other children that this program has started since [`Self::start`], and their descendants, and waits at most `patience`
    /// for their end.
    pub fn end_other_children(&self, patience: Duration) {
        self.process.end_later_children(patience);
    }

    fn ask(&mut self, order: u8) -> Result<ModeLine> {
        let end = Instant::now() + self.question.deadline;
        let no_answer = |error| query::without_answer(error, &self.question);
        // A child that has ended has closed the pipe, and its last line states the reason.
        self.orders.write_all(&[order]).ok();
        let line = self.process.line(end).map_err(no_answer)?;
        json::from_bytes(&line).map_err(|error| no_answer(NoAnswer::System(error.into())))
    }

    fn explain(&self, line: &ModeLine) -> anyhow::Error {
        match line {
            ModeLine::Nvml(failed) if failed.code == Code::NO_PERMISSION => failure(
                &catalog::NVML_PERMISSION,
                failed.to_string(),
                "run the command as root of the host, with the capability CAP_SYS_ADMIN",
            ),
            ModeLine::Nvml(failed) => query::explain_nvml(failed, &self.question, self.identity),
            ModeLine::Refused(refused) => query::explain_refused(refused, &self.question),
            ModeLine::NoGpu => failure(
                &catalog::NOT_USABLE,
                format!("NVML does not list the GPU {:?}", self.uuid),
                "inspect it with \"nvidia-smi -q\" and \"journalctl -k\" on the host",
            ),
            ModeLine::Mode(_) | ModeLine::Set => {
                query::without_answer(NoAnswer::Died(None), &self.question)
            }
        }
    }
}

fn respond(question: &NvmlQuery, identity: Option<Identity>, target: &ModeTarget, pipe: &mut File) {
    let loaded = query::load(CapabilitySet::SYS_ADMIN, question, identity, &[], pipe);
    let mut write = |line: &ModeLine| query::write_line(pipe, line);
    match &loaded {
        Ok(loaded) => obey(&loaded.library, target, &mut next_order, &mut write),
        Err(refused) => write(&ModeLine::Refused(refused.clone())),
    }
}

/// Reads an order from the standard input, and returns `None` at its end.
fn next_order() -> Option<u8> {
    let mut order = [0];
    let count = rustix::io::read(rustix::stdio::stdin(), &mut order).ok()?;
    (count == 1).then_some(order[0])
}

/// Carries out orders until the parent closes the pipe.
fn obey(
    api: &impl ComputeModes,
    target: &ModeTarget,
    next: &mut dyn FnMut() -> Option<u8>,
    write: &mut dyn FnMut(&ModeLine),
) {
    let device = match find(api, target) {
        Ok(Some(device)) => device,
        Ok(None) => return write(&ModeLine::NoGpu),
        Err(failed) => return write(&ModeLine::Nvml(failed)),
    };
    while let Some(order) = next() {
        write(&carry_out(api, device, order));
    }
}

fn carry_out(api: &impl ComputeModes, device: DeviceHandle, order: u8) -> ModeLine {
    let digit = u32::from(order.wrapping_sub(b'0'));
    let done = match ComputeMode::from_number(digit) {
        Some(mode) => api.set_compute_mode(device, mode).map(|()| ModeLine::Set),
        None => api.compute_mode(device).map(ModeLine::Mode),
    };
    done.unwrap_or_else(ModeLine::Nvml)
}

/// Returns the GPU with this UUID.
fn find(api: &impl ComputeModes, target: &ModeTarget) -> Result<Option<DeviceHandle>, Failed> {
    api.init()?;
    let count = api.device_count()?.min(MAX_GPUS);
    let probable = target.index.filter(|index| *index < count);
    for index in probable.into_iter().chain(0..count) {
        let Ok(device) = api.device(index) else {
            continue;
        };
        if api.uuid(device).is_ok_and(|uuid| uuid == target.uuid) {
            return Ok(Some(device));
        }
    }
    Ok(None)
}
