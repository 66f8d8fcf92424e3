//! Reads and sets the compute mode of a GPU, with a process that keeps NVML loaded.
//!
//! The process is started before it is needed, because the initialization of NVML can take seconds, and the mode must change as soon as an
//! MPS daemon ends. In contrast to other processes that call NVML it is root, and has the capability CAP_SYS_ADMIN, without which the
//! kernel module denies the change. It still cannot write files, start programs or signal other processes.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use anyhow::{Context, Result};

use base::json;
use base::report::failure;
use base::sys::child::{Child, NoAnswer};
use base::sys::confine::Identity;
use findings::catalog;

use super::Code;
use super::compute_mode::ComputeMode;
use super::program;
use super::protocol::{LibraryPlace, ModeLine, ModeTarget, REPORT, Request};
use super::query::{self, NvmlQuery};
use crate::inventory::identity::RunAs;

const ROOT: Identity = Identity { uid: 0, gid: 0 };

/// A child that reads and sets the compute mode of a GPU.
#[derive(Debug)]
pub struct ModeProcess {
    process: Child,
    orders: File,
    question: NvmlQuery,
    identity: Option<Identity>,
    uuid: String,
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
        let request = Request::ComputeMode {
            library: LibraryPlace {
                identity,
                ..question.library_place()?
            },
            target: target.clone(),
        };
        let (process, orders) = program::start_with_input(&request)?;
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
