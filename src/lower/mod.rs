//! Lowering: edits as steps in a container, as changes of config.json, as text. Pure.

pub mod access;
pub mod live;
pub mod oci;
pub mod rootfs;
pub mod text;

#[cfg(test)]
mod tests;
