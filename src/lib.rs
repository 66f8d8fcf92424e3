//! One OCI hook that makes NVIDIA GPUs work in containers of CRI-O and Podman.

pub mod driver;
pub mod error;
pub mod finding;
pub mod inject;
pub mod oci;
pub mod paths;
pub mod sys;
