//! Removes what the hook created: when a start fails, and at poststop, unless another container uses the root file system.

pub(in crate::inject) mod hidden;
pub(crate) mod leftovers;
pub(in crate::inject) mod rootfs_users;
pub(in crate::inject) mod undo;
