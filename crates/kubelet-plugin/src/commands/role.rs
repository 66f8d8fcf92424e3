//! What a process of the plugin serves, and where its CDI specs are.

use std::path::{Path, PathBuf};

use crate::settings::Settings;
use crate::settings::values::Interface;

/// What the process serves.
#[derive(Clone, Debug)]
pub enum Role {
    /// Offers resources to the kubelet. The path is the directory for the socket of `check` and
    /// `clear`.
    DevicePlugin(PathBuf),
    /// Offers devices for claims to the kubelet, with the same socket.
    Claims(PathBuf),
    /// Answers only engines.
    Engine,
}

impl Role {
    /// Returns the role for the kubelet that the settings give.
    #[must_use]
    pub fn for_kubelet(settings: &Settings, run_dir: PathBuf) -> Self {
        match settings.plugin.interface {
            Interface::DevicePlugin => Self::DevicePlugin(run_dir),
            Interface::Dra => Self::Claims(run_dir),
        }
    }

    /// Returns the directory for the control socket; `None` if no kubelet is served.
    #[must_use]
    pub fn run_dir(&self) -> Option<&Path> {
        match self {
            Self::DevicePlugin(dir) | Self::Claims(dir) => Some(dir),
            Self::Engine => None,
        }
    }
}

/// The paths in and of the CDI specs of the process.
#[derive(Clone, Debug)]
pub struct SpecPaths {
    /// The directory; `None` for the default, if containers get CDI devices
    pub dir: Option<PathBuf>,
    /// The program that the runtime starts on the host because of the specs
    pub hook: PathBuf,
}
