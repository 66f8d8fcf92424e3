//! The driver's files and device nodes on the host, found below the driver root.

pub mod cap_files;
pub mod catalog;
pub mod compat;
pub mod diagnosis;
pub mod elf;
pub mod files;
pub mod group;
pub mod ipc;
mod label;
pub mod ldcache;
pub mod ldconf;
pub mod libraries;
pub mod locate;
pub mod make_node;
pub mod nodes;
pub mod packages;
pub mod prepare;
pub mod root;

pub use root::{DriverRoot, Located};
