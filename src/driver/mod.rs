//! The driver's files on the host.
