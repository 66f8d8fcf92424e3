//! Which files of the driver belong to which capability: data only.
//!
//! The names are those that NVIDIA's container stack injects (libnvidia-container 1.20 and its CDI generator), and the
//! "Installed Components" chapter of the driver README; a test holds them against Debian's packages of driver 535.
//! A library's name here is what stands before `.so`.

use crate::capability::Capability;
use crate::capability::Capability::{Compat32, Compute, Display, Graphics, Ngx, Utility, Video};

/// A library or a program.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// `libcuda` for `libcuda.so.1`
    pub name: &'static str,
    /// One of these must be asked for.
    pub capabilities: &'static [Capability],
    /// What is special about it.
    pub kind: LibraryKind,
}

/// What is special about a library or a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LibraryKind {
    /// Nothing: it carries the driver's version, and a container does without it.
    Plain,
    /// A container that asked for the *first* of its capabilities cannot do anything without it.
    Required,
    /// It has a version of its own, and this one in its SONAME.
    OwnVersion(&'static str),
    /// It is opened by path in this directory beside the libraries.
    Below(&'static str),
}

const fn row(name: &'static str, capabilities: &'static [Capability]) -> Row {
    Row { name, capabilities, kind: LibraryKind::Plain }
}

const fn kind(name: &'static str, kind: LibraryKind, capabilities: &'static [Capability]) -> Row {
    Row { name, capabilities, kind }
}

/// OpenGL, Vulkan and OptiX, with a screen or without.
const GL: &[Capability] = &[Graphics, Display];
/// CUDA, with which the video libraries work.
const CUDA: &[Capability] = &[Compute, Video];

/// Shared libraries.
pub const LIBRARIES: &[Row] = &[
    kind("libnvidia-ml", LibraryKind::Required, &[Utility]),
    row("libnvidia-cfg", &[Utility]),
    row("libnvidia-nscq", &[Utility]), // NVSwitch queries
    row("libnvsdm", &[Utility]),       // NVLink fabric
    row("libnvidia-sandboxutils", &[Utility]),
    kind("libcuda", LibraryKind::Required, CUDA),
    row("libcudadebugger", CUDA),
    row("libnvidia-opencl", CUDA),
    row("libnvidia-gpucomp", &[Compute, Video, Graphics, Display]),
    row("libnvidia-ptxjitcompiler", CUDA),
    row("libnvidia-fatbinaryloader", CUDA),
    row("libnvidia-allocator", &[Compute, Video, Graphics, Display]),
    row("libnvidia-compiler", CUDA),
    row("libnvidia-pkcs11", CUDA), // confidential computing
    row("libnvidia-pkcs11-openssl3", CUDA),
    row("libnvidia-nvvm", CUDA),
    kind("libnvidia-nvvm70", LibraryKind::OwnVersion("4"), CUDA),
    row("libnvidia-tileiras", CUDA),
    kind("libvdpau_nvidia", LibraryKind::Below("vdpau"), &[Video]),
    row("libnvidia-encode", &[Video]),
    row("libnvidia-opticalflow", &[Video]),
    row("libnvcuvid", &[Video]),
    row("libnvidia-eglcore", GL),
    row("libnvidia-glcore", GL),
    row("libnvidia-tls", GL),
    row("libnvidia-glsi", GL),
    row("libnvidia-fbc", GL),
    row("libnvidia-ifr", GL),
    row("libnvidia-rtcore", GL),
    row("libnvoptix", GL),
    row("libGLX_nvidia", GL),
    row("libEGL_nvidia", GL),
    row("libGLESv2_nvidia", GL),
    row("libGLESv1_CM_nvidia", GL),
    row("libnvidia-glvkspirv", GL),
    row("libnvidia-cbl", GL),
    row("libnvidia-vulkan-producer", GL),
    row("libnvidia-present", GL),
    row("libnvidia-vksc-core", GL), // Vulkan SC
    kind("libnvidia-api", LibraryKind::OwnVersion("1"), GL),
    kind("libnvidia-egl-gbm", LibraryKind::OwnVersion("1"), GL),
    kind("libnvidia-egl-wayland", LibraryKind::OwnVersion("1"), GL),
    kind("libnvidia-egl-wayland2", LibraryKind::OwnVersion("1"), GL),
    kind("libnvidia-egl-xcb", LibraryKind::OwnVersion("1"), GL),
    kind("libnvidia-egl-xlib", LibraryKind::OwnVersion("1"), GL),
    row("libnvidia-wayland-client", &[Display]),
    row("libnvidia-ngx", &[Ngx]),
];

/// Programs.
pub(crate) const BINARIES: &[Row] = &[
    row("nvidia-smi", &[Utility]),
    row("nvidia-debugdump", &[Utility]),
    row("nvidia-persistenced", &[Utility]),
    row("nv-fabricmanager", &[Utility]),
    row("nvidia-imex", &[Utility]),
    row("nvidia-imex-ctl", &[Utility]),
    row("nvidia-cuda-mps-control", &[Compute]),
    row("nvidia-cuda-mps-server", &[Compute]),
    row("nvidia-xconfig", &[Display]),
];

/// Where programs are looked for, in order. Not `$PATH`: the environment decides nothing here.
pub(crate) const BINARY_DIRS: &[&str] = &[
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
    "/run/current-system/sw/bin", // NixOS
];

/// Where libraries are looked for that no linker cache lists, in order, below the driver root.
pub const LIBRARY_DIRS: &[&str] = &[
    "/usr/lib64",                               // openSUSE, Fedora
    "/usr/lib/x86_64-linux-gnu/nvidia/current", // Debian's alternatives
    "/usr/lib/x86_64-linux-gnu",                // Debian, Ubuntu
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64/nvidia",
    "/usr/lib/nvidia",
    "/lib64",                            // GKE: root /home/kubernetes/bin/nvidia
    "/lib",                              // NixOS: root /run/opengl-driver
    "/usr/lib",                          // Arch
    "/run/opengl-driver/lib",            // NixOS from /
    "/usr/local/nvidia/lib64",           // GKE, as containers see it
    "/home/kubernetes/bin/nvidia/lib64", // GKE from /
];

/// Links that applications open by name and that no SONAME gives: (library, link, SONAME it leads to).
pub const DEV_LINKS: &[(&str, &str, &str)] = &[
    // dlopen("libcuda.so") is what much software does instead of the SONAME
    ("libcuda", "libcuda.so", "libcuda.so.1"),
    ("libnvidia-opticalflow", "libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
    // The driver's own links for development
    ("libnvidia-encode", "libnvidia-encode.so", "libnvidia-encode.so.1"),
    ("libnvidia-fbc", "libnvidia-fbc.so", "libnvidia-fbc.so.1"),
    ("libnvidia-ml", "libnvidia-ml.so", "libnvidia-ml.so.1"),
    ("libnvidia-ngx", "libnvidia-ngx.so", "libnvidia-ngx.so.1"),
    // GLVND's libGLX asks for the vendor by this name when the X server is remote
    ("libGLX_nvidia", "libGLX_indirect.so.0", "libGLX_nvidia.so.0"),
    // libgbm opens its backend by the DRM driver's name
    ("libnvidia-allocator", "gbm/nvidia-drm_gbm.so", "libnvidia-allocator.so.1"),
];

/// A file that says where something of the driver is: Vulkan and EGL vendors, OpenCL drivers.
#[derive(Clone, Copy, Debug)]
pub struct Description {
    /// Below one of `search`; `$V` in it is the driver's version.
    pub path: &'static str,
    /// Directories, in order
    pub search: &'static [&'static str],
    /// The directory in the container: the one that every loader reads
    pub dir: &'static str,
    /// One of these must be asked for.
    pub capabilities: &'static [Capability],
    /// And this one.
    pub and: Option<Capability>,
}

const fn description(path: &'static str, dir: &'static str, capabilities: &'static [Capability]) -> Description {
    Description {
        path,
        search: &["/etc", "/usr/local/share", "/usr/share", "/share", "/", "/run/opengl-driver/share"],
        dir,
        capabilities,
        and: None,
    }
}

/// All of them.
pub(crate) const DESCRIPTIONS: &[Description] = &[
    description("OpenCL/vendors/nvidia.icd", "etc", CUDA),
    description("glvnd/egl_vendor.d/10_nvidia.json", "usr/share", GL),
    description("egl/egl_external_platform.d/15_nvidia_gbm.json", "usr/share", GL),
    description("egl/egl_external_platform.d/10_nvidia_wayland.json", "usr/share", GL),
    description("egl/egl_external_platform.d/09_nvidia_wayland2.json", "usr/share", GL),
    description("egl/egl_external_platform.d/20_nvidia_xcb.json", "usr/share", GL),
    description("egl/egl_external_platform.d/20_nvidia_xlib.json", "usr/share", GL),
    description("vulkan/icd.d/nvidia_icd.json", "etc", GL),
    description("vulkan/icd.d/nvidia_icd.x86_64.json", "etc", GL),
    description("vulkan/icd.d/nvidia_icd.aarch64.json", "etc", GL),
    // Beside the other one, loaders of either kind would find each GPU twice.
    Description { and: Some(Compat32), ..description("vulkan/icd.d/nvidia_icd.i686.json", "etc", GL) },
    description("vulkan/icd.d/nvidia_layers.json", "etc", GL),
    description("vulkan/implicit_layer.d/nvidia_layers.json", "etc", GL),
    description("vulkansc/icd.d/nvidia_icd_vksc.json", "etc", GL),
    description("nvidia/nvoptix.bin", "usr/share", GL),
    description("nvidia/nvidia-application-profiles-$V-rc", "usr/share", GL),
    description("X11/xorg.conf.d/10-nvidia.conf", "usr/share", &[Display]),
    description("X11/xorg.conf.d/nvidia-drm-outputclass.conf", "usr/share", &[Display]),
];

/// Sockets by which programs in the container talk to daemons of the host: (path, capability).
pub(crate) const SOCKETS: &[(&str, Capability)] =
    &[("/run/nvidia-persistenced/socket", Utility), ("/run/nvidia-fabricmanager/socket", Utility)];

/// The directory with the sockets and pipes of the MPS control daemon, unless the administrator names another one.
pub(crate) const MPS_DIRECTORY: (&str, Capability) = ("/tmp/nvidia-mps", Compute);

/// Where the kernel looks for firmware; the GPU's own (GSP) is below `nvidia/<version>` there.
pub(crate) const FIRMWARE_DIRS: &[&str] = &["/lib/firmware/updates", "/lib/firmware", "/usr/lib/firmware"];

/// Where the kernel looks for firmware first, if the administrator has named a directory.
pub(crate) const FIRMWARE_DIR_PARAMETER: &str = "/sys/module/firmware_class/parameters/path";

/// DLSS for Windows programs, in this directory below the libraries. Proton looks for it beside libGLX_nvidia.
pub(crate) const WINE_DIR: &str = "nvidia/wine";
/// Its files.
pub(crate) const WINE_FILES: &[&str] = &["nvngx.dll", "_nvngx.dll", "nvngx_dlssg.dll"];

/// Libraries of the driver's version that are of use on the host only: the settings program's.
pub(crate) const HOST_ONLY: &[&str] = &["libnvidia-gtk2", "libnvidia-gtk3"];

/// What a capability is about: without one library of each group, a container gets nothing of it, or half of it.
#[must_use]
pub(crate) const fn characteristic(capability: Capability) -> &'static [&'static [&'static str]] {
    match capability {
        Utility => &[&["libnvidia-ml"]],
        Compute => &[&["libcuda"]],
        // Whatever the others are about, for another architecture.
        Compat32 => &[],
        Graphics => &[&["libnvidia-glcore", "libnvidia-eglcore"]],
        Display => &[&["libnvidia-glcore"]],
        Ngx => &[&["libnvidia-ngx"]],
        Video => &[&["libnvcuvid"], &["libnvidia-encode"]],
    }
}

/// Where the X server's modules of the driver are.
pub(crate) const XORG_DIRS: &[&str] = &[
    "/usr/lib/xorg/modules/drivers",
    "/usr/lib/xorg/modules/extensions",
    "/usr/lib64/xorg/modules/drivers",
    "/usr/lib64/xorg/modules/extensions",
    "/usr/lib64/xorg/modules/updates/extensions",
    "/usr/lib/x86_64-linux-gnu/nvidia/xorg",
    "/usr/lib/x86_64-linux-gnu/nvidia/current/xorg",
    "/usr/lib64/nvidia/xorg",
    "/usr/lib/nvidia/nvidia", // Debian's alternatives; nvidia-drm-outputclass.conf names it
    "/usr/lib/nvidia/current",
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
        let paths: BTreeSet<_> = DESCRIPTIONS.iter().map(|description| description.path).collect();
        assert_eq!(paths.len(), DESCRIPTIONS.len());
    }
}
