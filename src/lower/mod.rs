//! Lowering: edits into the words of one backend. Pure.

pub mod access;
pub mod cdi;
pub mod live;
pub mod oci;
pub mod rootfs;
pub mod text;
