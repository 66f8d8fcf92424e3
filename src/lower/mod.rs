//! Lowering: edits as steps in a container, as changes of config.json, as text. Pure.

pub(crate) mod access;
pub(crate) mod live;
pub(crate) mod oci;
pub(crate) mod rootfs;
pub(crate) mod text;

#[cfg(test)]
mod tests;
