//! The driver's files on the host.

pub mod ldcache;
