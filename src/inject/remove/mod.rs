//! Removes what the hook created, unless another container uses the root file system.

pub(in crate::inject) mod hidden;
pub(in crate::inject) mod rootfs_users;
pub(in crate::inject) mod undo;
