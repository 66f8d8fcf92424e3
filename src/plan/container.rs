//! Describes the container to set up.

use std::path::Path;

use anyhow::Result;

use base::sys::ns;

use crate::oci::{SpecView, State};
use crate::plan::process::Process;

/// The properties of a container on which its set-up depends.
#[derive(Clone, Debug)]
pub(crate) struct Container<'a> {
    pub id: &'a str,
    /// The directory of its config.json; `None` if it has none
    pub bundle: Option<&'a Path>,
    /// `linux.cgroupsPath`; `None` without a config.json
    pub cgroups_path: Option<&'a str>,
    /// Its config.json. A command line only has the location of the root file system.
    pub spec: &'a SpecView,
    /// The process of the container
    pub process: Process,
}

impl<'a> Container<'a> {
    /// Returns the container that an OCI runtime describes.
    ///
    /// # Errors
    /// If the user namespace of this process cannot be determined.
    pub(crate) fn new(state: &'a State, spec: &'a SpecView) -> Result<Self> {
        Ok(Self {
            id: &state.id,
            bundle: Some(&state.bundle),
            ..Self::from_spec(spec)?
        })
    }

    /// Returns the container of a config.json, without its id and bundle.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub(crate) fn from_spec(spec: &'a SpecView) -> Result<Self> {
        let process = Process::from_spec(spec, ns::in_user_namespace()?);
        Ok(Self {
            id: "",
            bundle: None,
            cgroups_path: Some(&spec.cgroups_path),
            spec,
            process,
        })
    }
}
