//! NVML in a forked child with the configured identity, no kernel caps, no environment and a deadline.
//!
//! The library belongs to the driver vendor: 3 MB of code that opens devices, may hang for minutes on a sick GPU,
//! and starts a set-uid helper if it can. It gets the rights of a user who may open `/dev/nvidia*`, and no more.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::api::{Code, Failed};
use super::ffi::Library;
use crate::driver::DriverRoot;
use crate::error::{Failure, failure};
use crate::finding::catalog;
use crate::inventory::cache::Cache;
use crate::inventory::{self, Inventory};
use crate::paths::HostPath;
use crate::patience;
use crate::sys::process::{self, Identity, NoAnswer};

/// How to ask.
#[derive(Clone, Debug)]
pub struct Question {
    /// The child's `/`: the driver root if it has the device nodes, else the host's.
    pub root: HostPath,
    /// libnvidia-ml.so.1 inside of it.
    pub library: PathBuf,
    /// Who the child is; `None` leaves the user as it is (a plain user, or a user namespace).
    pub identity: Option<Identity>,
    /// How long it may take.
    pub deadline: Duration,
}

impl Question {
    /// Where NVML runs, and the library's path there: it opens the nodes that it finds at its own /dev. `driver` has the
    /// library, `dev` the nodes; a driver root without nodes has only files (GKE), and NVML runs on the host then.
    ///
    /// # Errors
    /// If the library is below neither of them.
    pub fn place(driver: &DriverRoot, dev: &DriverRoot, library: &HostPath) -> Result<(HostPath, PathBuf)> {
        match dev.inside(library) {
            Ok(path) => Ok((dev.path(), path)),
            Err(_) => Ok((driver.path(), driver.inside(library)?)),
        }
    }

    /// Where the answer is kept; `None` if it is not. How long it may take makes no other question of it.
    #[must_use]
    pub fn cache(&self) -> Option<Cache> {
        let root = self.root.as_path().to_str()?;
        let Self { library, identity, .. } = self;
        Cache::open(root, format!("{root:?} {library:?} {identity:?}"), patience::for_others(self.deadline))
    }
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Inventory(Inventory),
    Nvml(Failed),
    Load(String),
    Confine(String),
}

/// Libraries that NVML needs beside libc. In a driver root that is not `/` they may be missing or of another glibc
/// than the one already in this process, so ours are loaded before the root changes.
const PRELOAD: [&str; 5] = ["libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libgcc_s.so.1"];

/// Asks NVML for the inventory.
///
/// # Errors
/// If the library cannot be loaded, fails as a whole, or does not answer in time. Never because of one GPU.
pub fn ask(question: &Question) -> Result<Inventory> {
    let bytes = process::ask_child(question.deadline, |pipe| respond(question, pipe))
        .map_err(|error| no_answer(error, question))?;
    let answer = serde_json::from_slice(&bytes)
        .map_err(|error| anyhow::Error::new(error).context("cannot read the answer of the NVML process"))?;
    match answer {
        Answer::Inventory(inventory) => Ok(inventory),
        Answer::Nvml(failed) => Err(explain(&failed, question)),
        Answer::Load(text) => Err(failure(
            &catalog::NVML_LOAD,
            format!("cannot load the driver's library {:?} below {}: {text}", question.library, question.root),
            "install the driver's libraries again, and run \"ldconfig\"",
        )),
        Answer::Confine(text) => Err(failure(
            &catalog::NVML_PROCESS,
            format!("cannot prepare the process that asks NVML: {text}"),
            "run the hook as root, and check user and root in the [nvidia-container-cli] table of config.toml",
        )),
    }
}

fn respond(question: &Question, pipe: &mut File) {
    let answer = take_inventory(question);
    let bytes = serde_json::to_vec(&answer).unwrap_or_default();
    process::answer(pipe, &bytes);
}

fn take_inventory(question: &Question) -> Answer {
    let root = question.root.as_path();
    let preloaded: Vec<_> = if root == Path::new("/") {
        Vec::new()
    } else {
        PRELOAD.into_iter().filter_map(|name| Library::load(OsStr::new(name)).ok()).collect()
    };
    if let Err(error) = process::confine(root, question.identity) {
        return Answer::Confine(crate::error::line(&error.into()));
    }
    let answer = match Library::load(question.library.as_os_str()) {
        Ok(library) => match inventory::nvml::take(&library) {
            Ok(inventory) => Answer::Inventory(inventory),
            Err(failed) => Answer::Nvml(failed),
        },
        // What dlerror(3) says is the cause of the error, not its text.
        Err(error) => Answer::Load(crate::error::line(&error.into())),
    };
    drop(preloaded);
    answer
}

fn no_answer(error: NoAnswer, question: &Question) -> anyhow::Error {
    match error {
        NoAnswer::System(error) => anyhow::Error::new(error).context("cannot start the process that asks NVML"),
        NoAnswer::Timeout => failure(
            &catalog::NVML_TIMEOUT,
            format!("NVML did not answer within {} s", question.deadline.as_secs_f32()),
            "if \"nvidia-smi\" on the host is slow too, enable persistence mode (\"nvidia-smi -pm 1\"); or raise \
             nvml-timeout in the [oci-nvidia-hook] table of config.toml",
        ),
        NoAnswer::Died(signal) => failure(
            &catalog::NVML_DIED,
            match signal {
                Some(signal) => format!("the process that asks NVML was ended by {signal}"),
                None => "the process that asks NVML ended without an answer".to_owned(),
            },
            "run \"nvidia-smi\" on the host",
        ),
    }
}

fn explain(failed: &Failed, question: &Question) -> anyhow::Error {
    let (kind, what, hint) = match failed.code {
        Code::DRIVER_NOT_LOADED => (
            &catalog::NOT_LOADED,
            "the NVIDIA kernel driver is not loaded".to_owned(),
            "load it with \"modprobe nvidia\", then run \"nvidia-smi\" once as root to make the device nodes"
                .to_owned(),
        ),
        Code::NO_PERMISSION => (
            &catalog::NVML_PERMISSION,
            match question.identity {
                Some(Identity { uid, gid }) => format!("user {uid}, group {gid} may not open the GPUs"),
                None => "this user may not open the GPUs".to_owned(),
            },
            format!(
                "compare \"ls -l {}\" with user in the [nvidia-container-cli] table of config.toml",
                question.root.as_path().join("dev/nvidiactl").display()
            ),
        ),
        Code::LIB_RM_VERSION_MISMATCH => (
            &catalog::MISMATCH,
            "the driver's libraries are of another version than the loaded kernel module".to_owned(),
            "reboot the host to load the new kernel module".to_owned(),
        ),
        _ => (&catalog::NVML, "NVML cannot start".to_owned(), "run \"nvidia-smi\" on the host".to_owned()),
    };
    anyhow::Error::msg(failed.to_string()).context(Failure::new(kind, what, hint))
}
