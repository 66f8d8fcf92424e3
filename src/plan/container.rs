//! Describes the container to set up.

use std::path::Path;

use anyhow::Result;
use oci_spec::runtime::LinuxDeviceCgroup;

use base::sys::ns;

use crate::lower::access::Process;
use crate::oci::spec_view::{Device, Mount};
use crate::oci::{SpecView, State};

/// The properties of a container on which its set-up depends. config.json contains all of them, a command line only the location.
#[derive(Clone, Debug)]
pub(crate) struct Container<'a> {
    pub id: &'a str,
    /// The directory of its config.json; `None` if it has none
    pub bundle: Option<&'a Path>,
    /// Its root file system, as a path of the caller
    pub rootfs: &'a Path,
    /// The mounts of the runtime
    pub mounts: &'a [Mount],
    /// The SELinux label for file systems that are mounted in the container; may be empty
    pub mount_label: &'a str,
    /// The device nodes that the runtime creates
    pub devices: &'a [Device],
    /// The device rules that the runtime applies
    pub device_rules: &'a [LinuxDeviceCgroup],
    /// `linux.cgroupsPath`; `None` without a config.json
    pub cgroups_path: Option<&'a str>,
    /// The process of the container
    pub process: Process,
}

impl<'a> Container<'a> {
    /// Returns the container that an OCI runtime describes.
    ///
    /// # Errors
    /// If the user namespace of this process cannot be determined.
    pub(crate) fn of(state: &'a State, spec: &'a SpecView) -> Result<Self> {
        Ok(Self { id: &state.id, bundle: Some(&state.bundle), ..Self::of_spec(spec)? })
    }

    /// Returns the container of a config.json, without its id and bundle.
    ///
    /// # Errors
    /// Those of [`Self::of`].
    pub(crate) fn of_spec(spec: &'a SpecView) -> Result<Self> {
        Ok(Self {
            id: "",
            bundle: None,
            rootfs: &spec.rootfs,
            mounts: &spec.mounts,
            mount_label: &spec.mount_label,
            devices: &spec.devices,
            device_rules: &spec.device_rules,
            cgroups_path: Some(&spec.cgroups_path),
            process: Process::from_spec(spec, ns::in_user_namespace()?),
        })
    }

    /// Returns a container without a config.json. Its process counts as root, and no device is allowed yet.
    ///
    /// # Errors
    /// Those of [`Self::of`].
    pub(crate) fn at(rootfs: &'a Path, id: &'a str) -> Result<Self> {
        Ok(Self {
            id,
            bundle: None,
            rootfs,
            mounts: &[],
            mount_label: "",
            devices: &[],
            device_rules: &[],
            cgroups_path: None,
            process: Process::root(ns::in_user_namespace()?),
        })
    }
}
