//! NVML in this process, for a program that keeps it loaded. Other programs use [`query::ask`].

use std::fs::File;

use anyhow::{Error, Result};

use base::sys::confine::{CapabilitySet, Identity};
use base::tree::Tree;

use super::identity;
use super::query::{self, Loaded, NvmlQuery};
use crate::nvml::NvmlLibrary;
use crate::nvml::api::Failed;

/// NVML in this process.
#[derive(Debug)]
pub struct Session {
    loaded: Loaded,
    question: NvmlQuery,
    identity: Option<Identity>,
}

impl Session {
    /// Drops the privileges of this process, which must have one thread, and loads the library. The kernel kills this process when
    /// its parent ends. `pipe` is the pipe to that parent. `watched` are directories whose `/dev`, `/proc` and `/sys` the process reads
    /// later.
    ///
    /// # Errors
    /// If a privilege cannot be dropped, or the library cannot be loaded.
    pub fn start(question: NvmlQuery, watched: &[Tree], pipe: &File) -> Result<Self> {
        let identity = identity::choose(question.who, &question.root, &question.library)?;
        match query::load(CapabilitySet::empty(), &question, identity, watched, pipe) {
            Ok(loaded) => Ok(Self {
                loaded,
                question,
                identity,
            }),
            Err(refused) => Err(query::explain_refused(&refused, &question)),
        }
    }

    /// Returns the library.
    #[must_use]
    pub const fn api(&self) -> &NvmlLibrary {
        &self.loaded.library
    }

    /// Whether this process can read only the files that it needs, and that existed when it started. They include the nodes of MIG
    /// devices.
    #[must_use]
    pub fn limits_reading(&self) -> bool {
        identity::may_own_files(self.identity)
    }

    /// Returns the error for a failed initialization, with its number and hint.
    #[must_use]
    pub fn explain(&self, failed: &Failed) -> Error {
        query::explain_nvml(failed, &self.question, self.identity)
    }
}
