//! Which files of the driver belong to which capability: data only.
//!
//! Sources: the file lists of the 535 driver packages of Debian and openSUSE, and NVIDIA's "Installed Components"
//! chapter of the driver README. A library's name here is what stands before `.so`.

use crate::request::Capability;
use crate::request::Capability::{Compute, Display, Graphics, Ngx, Utility, Video};

/// A row: the name, and the capabilities that bring it along.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// `libcuda` for `libcuda.so.1`
    pub name: &'static str,
    /// One of these must be asked for.
    pub capabilities: &'static [Capability],
    /// Whether a container that asked for the *first* of them cannot do anything without it.
    pub required: bool,
}

const fn row(name: &'static str, capabilities: &'static [Capability]) -> Row {
    Row { name, capabilities, required: false }
}

const fn required(name: &'static str, capabilities: &'static [Capability]) -> Row {
    Row { name, capabilities, required: true }
}

/// Shared libraries.
pub const LIBRARIES: &[Row] = &[
    required("libnvidia-ml", &[Utility]),
    row("libnvidia-cfg", &[Utility]),
    row("libnvidia-nscq", &[Utility]),
    required("libcuda", &[Compute, Video]),
    row("libcudadebugger", &[Compute]),
    row("libnvidia-opencl", &[Compute]),
    row("libnvidia-gpucomp", &[Compute, Video, Graphics, Display]),
    row("libnvidia-ptxjitcompiler", &[Compute, Video]),
    row("libnvidia-fatbinaryloader", &[Compute, Video]),
    row("libnvidia-allocator", &[Compute, Video, Graphics, Display]),
    row("libnvidia-compiler", &[Compute]),
    row("libnvidia-pkcs11", &[Compute]),
    row("libnvidia-pkcs11-openssl3", &[Compute]),
    row("libnvidia-nvvm", &[Compute]),
    row("libnvidia-nvvm70", &[Compute]),
    row("libnvidia-tileiras", &[Compute]),
    row("libvdpau_nvidia", &[Video]),
    row("libnvidia-encode", &[Video]),
    row("libnvidia-opticalflow", &[Video]),
    row("libnvcuvid", &[Video]),
    row("libnvidia-eglcore", &[Graphics, Display]),
    row("libnvidia-glcore", &[Graphics, Display]),
    row("libnvidia-tls", &[Graphics, Display]),
    row("libnvidia-glsi", &[Graphics, Display]),
    row("libnvidia-fbc", &[Graphics, Display]),
    row("libnvidia-ifr", &[Graphics, Display]),
    row("libnvidia-rtcore", &[Graphics, Display]),
    row("libnvoptix", &[Graphics, Display]),
    row("libGLX_nvidia", &[Graphics, Display]),
    row("libEGL_nvidia", &[Graphics, Display]),
    row("libGLESv2_nvidia", &[Graphics, Display]),
    row("libGLESv1_CM_nvidia", &[Graphics, Display]),
    row("libnvidia-glvkspirv", &[Graphics, Display]),
    row("libnvidia-cbl", &[Graphics, Display]),
    row("libnvidia-ngx", &[Ngx]),
];

/// Programs.
pub const BINARIES: &[Row] = &[
    row("nvidia-smi", &[Utility]),
    row("nvidia-debugdump", &[Utility]),
    row("nvidia-persistenced", &[Utility]),
    row("nv-fabricmanager", &[Utility]),
    row("nvidia-cuda-mps-control", &[Compute]),
    row("nvidia-cuda-mps-server", &[Compute]),
];

/// Where programs are looked for, in order. Not `$PATH`: the environment decides nothing here.
pub const BINARY_DIRS: &[&str] = &["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Links that applications open by name and that no SONAME gives: (library, link, target).
pub const DEV_LINKS: &[(&str, &str, &str)] = &[
    // dlopen("libcuda.so") is what much software does instead of the SONAME
    ("libcuda", "libcuda.so", "libcuda.so.1"),
    ("libnvidia-opticalflow", "libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_name_stands_once() {
        for table in [LIBRARIES, BINARIES] {
            let names: BTreeSet<_> = table.iter().map(|row| row.name).collect();
            assert_eq!(names.len(), table.len());
            assert!(table.iter().all(|row| !row.capabilities.is_empty()));
        }
    }
}
