//! What the hook, its commands and the kubelet plugin know of each other.
//!
//! | module | what it does |
//! |---|---|
//! | [`kinds`] | the kinds of the CDI specs that the plugin writes |
//! | [`control`] | the messages at the control socket of a running plugin, and its client |
//! | [`kubelet_dirs`] | the directories of a kubelet |
//! | [`processes`] | the running processes of the plugin |
//! | [`status`] | whether the plugin serves the kubelet |

pub mod control;
pub mod kinds;
pub mod kubelet_dirs;
pub mod processes;
pub mod status;

/// The name of the plugin's program.
pub const PROGRAM: &str = "oci-nvidia-kubelet-plugin";
