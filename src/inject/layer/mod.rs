//! Covers a directory that cannot be changed, such as a volume, with a layer of the container.

pub(in crate::inject) mod overlay;
pub(in crate::inject) mod remounted;
