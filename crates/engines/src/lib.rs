//! Reads the configuration of the container engines of this host: which hooks they run, and with which runtime.
//!
//! [`files`] lists the configuration files of an engine and [`settings`] reads them. [`hook_file`] and [`hook_args`] parse a hook file,
//! [`hooks`] reads all of them like the engine, [`hook_env`] finds those that get the environment of a container, and [`status`]
//! decides whether the engine starts our hook. [`ignored`] finds requests that Podman does not pass on.
//! [`cdi`] knows which CDI specs an engine reads, [`cdi_check`] whether it can use them, and
//! [`node`] which engine a Kubernetes node has. Environment variables that change an engine's files (`CONTAINERS_CONF`,
//! `XDG_CONFIG_HOME`) are ignored: the program clears its environment, and an engine may run with another one.

pub mod cdi;
pub mod cdi_check;
mod containerd;
pub mod files;
pub mod hook_args;
pub mod hook_env;
pub mod hook_file;
pub mod hooks;
pub mod ignored;
pub mod inspect;
pub mod node;
pub mod runtime;
pub mod settings;
pub mod status;
pub mod version;

use std::fmt;
use std::path::PathBuf;

pub use inspect::{Engine, inspect_engines};
pub use version::Version;

/// A user of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// `tux`; the number if the user has no name
    pub name: String,
    /// The user id
    pub uid: u32,
    /// The home directory, if it is known
    pub home: Option<PathBuf>,
}

/// A container engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// Podman as root
    #[default]
    Podman,
    /// Rootless Podman of a user
    PodmanOf(User),
    /// CRI-O
    Crio,
    /// Docker, which starts only one hook, for `--gpus`
    Docker,
}

impl EngineKind {
    /// Returns the program of the engine, whose presence means that the engine is installed.
    pub const fn program(&self) -> &'static str {
        match self {
            Self::Podman | Self::PodmanOf(_) => "podman",
            Self::Crio => "crio",
            Self::Docker => "dockerd",
        }
    }

    /// Returns whether the engine is Podman, of root or of a user.
    pub const fn is_podman(&self) -> bool {
        matches!(self, Self::Podman | Self::PodmanOf(_))
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Podman => f.write_str("Podman as root"),
            Self::PodmanOf(user) => write!(f, "Podman of {}", user.name),
            Self::Crio => f.write_str("CRI-O"),
            Self::Docker => f.write_str("Docker"),
        }
    }
}
