//! The driver's files and device nodes on the host, found below the driver root.

pub mod catalog;
pub mod ldcache;
pub mod locate;
pub mod nodes;
pub mod root;

pub use root::DriverRoot;
