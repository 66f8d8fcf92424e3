//! A request for `oci-nvidia-nvml`, and the lines with which it answers.
//!
//! The program is started for one request. Its arguments are [`ID`] and the request as JSON, and it writes JSON documents to its
//! standard output, one on each line. Its standard input is read only for [`Request::ComputeMode`] (orders) and [`Request::Monitor`],
//! which lasts until it is closed.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use base::sys::confine::Identity;

use super::Failed;
use crate::driver::DriverKind;
use crate::inventory::nvml::NvmlProgress;
use crate::inventory::processes::GpuProcesses;

/// Identifies the sources of this crate. Two programs understand each other only if they were built from the same ones: the update of a
/// package replaces one file after the other.
pub const ID: &str = env!("NVML_PROTOCOL");

/// The answer of a program with another [`ID`]. It must never change.
pub const OTHER_BUILD: &str = r#"{"Refused":"OtherBuild"}"#;

/// The order to report the compute mode. The digit of a mode is the order to set it.
pub const REPORT: u8 = b'?';

/// The limit for the number of GPUs that NVML reports.
pub const MAX_GPUS: u32 = 256;

/// What the program is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// The driver and its GPUs. Answered by [`InventoryLine`]s.
    Inventory {
        /// The library
        library: LibraryPlace,
        /// The indices of GPUs that are not asked
        leave_out: Vec<u32>,
    },
    /// The processes on each GPU. Answered by [`ProcessLine`]s.
    Processes {
        /// The library
        library: LibraryPlace,
    },
    /// The compute mode of a GPU. Each order is answered by a [`ModeLine`].
    ComputeMode {
        /// The library
        library: LibraryPlace,
        /// The GPU
        target: ModeTarget,
    },
    /// The GPUs and their health, until the standard input is closed. Answered by [`super::message::Message`]s.
    Monitor(MonitorRequest),
}

/// Where the library is, and who loads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LibraryPlace {
    /// The root directory of the process
    pub root: PathBuf,
    /// The path of the library below it
    pub library: PathBuf,
    /// The user of the process. `None` means that it is not changed.
    pub identity: Option<Identity>,
    /// The kind of the driver
    pub kind: DriverKind,
}

/// The GPU whose mode is read and set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModeTarget {
    /// `GPU-…`
    pub uuid: String,
    /// The index that it probably has. The other GPUs are only asked if it has another one, because a broken GPU may not answer.
    pub index: Option<u32>,
}

/// What is watched. The program finds the driver, because it also looks at the nodes and the kernel module all the time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MonitorRequest {
    /// The configuration file, if it is not the usual one
    pub config: Option<PathBuf>,
    /// The driver root, which an option may have changed
    pub driver_root: PathBuf,
    /// The directory with the device nodes
    pub dev_root: Option<PathBuf>,
    /// The indices of GPUs that are not asked
    pub skip: Vec<u32>,
    /// What is measured
    pub measures: Measures,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Measures {
    /// Nothing: metrics are not served.
    Nothing,
    /// The values of metrics with GKE's names
    Few,
    /// The values of metrics with DCGM's names as well
    All,
}

/// A line of the answer to [`Request::Inventory`].
#[derive(Debug, Serialize, Deserialize)]
pub enum InventoryLine {
    /// A part of the answer
    Report(NvmlProgress),
    /// The last line
    Done,
    /// NVML failed
    Nvml(Failed),
    /// There is no answer
    Refused(Unloadable),
}

/// A line of the answer to [`Request::Processes`].
#[derive(Debug, Serialize, Deserialize)]
pub enum ProcessLine {
    /// The processes of a GPU
    Gpu(GpuProcesses),
    /// The last line
    Done,
    /// NVML failed
    Nvml(Failed),
    /// There is no answer
    Refused(Unloadable),
}

/// The answer to an order of [`Request::ComputeMode`], or the reason why there will not be one.
#[derive(Debug, Serialize, Deserialize)]
pub enum ModeLine {
    /// The number of the mode
    Mode(u32),
    /// The mode was set
    Set,
    /// NVML does not list the GPU
    NoGpu,
    /// NVML failed
    Nvml(Failed),
    /// There is no answer
    Refused(Unloadable),
}

/// Why the program does not have the library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unloadable {
    /// The program was built from other sources than the one that asks.
    OtherBuild,
    /// The library cannot be loaded, with this error.
    Load(String),
    /// A privilege cannot be dropped, with this error.
    Confine(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_answer_can_be_that_of_another_build() {
        let line = OTHER_BUILD.as_bytes();
        assert!(matches!(
            base::json::from_bytes(line).unwrap(),
            InventoryLine::Refused(Unloadable::OtherBuild)
        ));
        assert!(matches!(
            base::json::from_bytes(line).unwrap(),
            ProcessLine::Refused(Unloadable::OtherBuild)
        ));
        assert!(matches!(
            base::json::from_bytes(line).unwrap(),
            ModeLine::Refused(Unloadable::OtherBuild)
        ));
        assert!(matches!(
            base::json::from_bytes(line).unwrap(),
            super::super::message::Message::Refused(Unloadable::OtherBuild)
        ));
    }
}
