//! Lowers edits to steps in a container, to additions to config.json, and to text. Pure.

pub(crate) mod access;
pub(crate) mod live;
pub(crate) mod oci;
pub(crate) mod rootfs;
pub(crate) mod text;

#[cfg(test)]
mod tests;
