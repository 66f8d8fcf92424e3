//! Files and mounts: sources that are opened on the host, and operations in a directory that is already open.

pub(in crate::inject) mod directory;
pub(in crate::inject) mod source;
pub(in crate::inject) mod tmpfs;
