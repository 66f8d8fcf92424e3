//! Container engines of this host, by their own configuration: which hooks they run, with which runtime.
//!
//! [`files`] says where an engine looks, [`settings`] reads what it says, [`hook_file`] one JSON file of a hooks
//! directory, [`hooks`] all of them as the engine does, and [`status`] decides whether our hook is among them. [`cdi`] has
//! what an engine makes of CDI specs. Every command that needs to know an engine goes through here.
//! Environment variables that lead an engine elsewhere (`CONTAINERS_CONF`, `XDG_CONFIG_HOME`) are not ours to see.

pub(crate) mod cdi;
pub(crate) mod files;
pub(crate) mod hook_file;
pub(crate) mod hooks;
pub(crate) mod inspect;
pub(crate) mod runtime;
pub(crate) mod settings;
pub(crate) mod status;
pub(crate) mod version;

use std::fmt;
use std::path::PathBuf;

pub(crate) use inspect::Engine;
pub use inspect::inspect_engines;
pub use version::Version;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// `tux`; the number where the user has no name
    pub name: String,
    pub uid: u32,
    /// The home directory, if it is known
    pub home: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Podman,
    /// Podman of a user
    PodmanOf(User),
    Crio,
    /// Docker, which starts hooks by itself only for `--gpus`
    Docker,
}

impl Kind {
    /// The program whose presence means that the engine is installed.
    pub const fn program(&self) -> &'static str {
        match self {
            Self::Podman | Self::PodmanOf(_) => "podman",
            Self::Crio => "crio",
            Self::Docker => "dockerd",
        }
    }

    /// Whether it is one of the two Podmans.
    pub const fn is_podman(&self) -> bool {
        matches!(self, Self::Podman | Self::PodmanOf(_))
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Podman => f.write_str("Podman as root"),
            Self::PodmanOf(user) => write!(f, "Podman of {}", user.name),
            Self::Crio => f.write_str("CRI-O"),
            Self::Docker => f.write_str("Docker"),
        }
    }
}
