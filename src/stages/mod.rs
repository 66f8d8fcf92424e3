//! The stages of a container's life at which an engine or a runtime calls the program: what each reads, has decided by
//! [`crate::plan`], and does.

pub mod precreate;
pub mod prestart;
pub mod rootfs;
