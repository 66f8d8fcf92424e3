//! What the agent learns from the monitor and from its end.

use super::message::{GpuEvent, Sample, Snapshot};

/// A change that the agent must know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// The GPUs and MIG devices of the host
    Snapshot(Box<Snapshot>),
    /// The state of one GPU
    Sample(Sample),
    /// An event of one GPU
    Event(GpuEvent),
    /// The driver hangs or crashes. It was asked about the GPU with this UUID, or about no single GPU.
    Silent {
        /// The UUID
        gpu: Option<String>,
        /// What happened
        why: String,
    },
    /// The driver is missing, or NVML fails, with this error.
    Absent(String),
    /// The administrator replaces the driver, and no process of the plugin uses it.
    LetGo,
}

/// Whether the driver works.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Driver {
    /// It has not answered yet.
    #[default]
    Unknown,
    /// NVML answers.
    Works,
    /// It is missing, or NVML does not answer, with this reason.
    Fails(String),
    /// The administrator replaces it.
    LetGo,
}

impl Driver {
    /// Returns the state after this update, if the update is about the driver.
    #[must_use]
    pub fn after(update: &Update) -> Option<Self> {
        match update {
            Update::Snapshot(_) => Some(Self::Works),
            Update::Absent(why) | Update::Silent { gpu: None, why } => {
                Some(Self::Fails(why.clone()))
            }
            Update::LetGo => Some(Self::LetGo),
            Update::Silent { gpu: Some(_), .. } | Update::Sample(_) | Update::Event(_) => None,
        }
    }

    /// Returns why containers cannot use the driver; `None` if they can.
    #[must_use]
    pub fn why_not(&self) -> Option<&str> {
        match self {
            Self::Works => None,
            Self::Unknown => Some("the driver has not answered yet"),
            Self::Fails(why) => Some(why),
            Self::LetGo => Some("the driver is being replaced"),
        }
    }
}
