//! The targets of the hook, and those of the kubelet plugin.

#[path = "targets/mod.rs"]
mod hook;
#[path = "plugin_targets/mod.rs"]
pub mod plugin;

pub use hook::*;
