//! The catalog of driver files, with the capabilities that they belong to.
//!
//! The names are from NVIDIA's container stack (libnvidia-container 1.20 and its CDI generator) and from the chapter "Installed
//! Components" of the driver README. A test compares them with Debian's packages of driver 535. The name of a library is the part
//! of its file name before `.so`.

use super::kind::DriverKind;
use crate::capability::Capability;
use crate::capability::Capability::{Compat32, Compute, Display, Graphics, Ngx, Utility, Video};

/// A library or a program.
#[derive(Clone, Copy, Debug)]
pub struct FileRow {
    /// `libcuda` for `libcuda.so.1`
    pub name: &'static str,
    /// Containers that request one of these get the file.
    pub capabilities: &'static [Capability],
    /// How the file is found and whether it is required.
    pub kind: LibraryKind,
}

/// How a library or a program is found, and whether it is required.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LibraryKind {
    /// Its file name ends in the driver version, and it is optional.
    Plain,
    /// Like `Plain`, but a container that requests the *first* of its capabilities does not start without it.
    Required,
    /// It has its own version, and this version in its SONAME.
    OwnVersion(&'static str),
    /// Programs open it by path, in this directory below the libraries.
    Below(&'static str),
}

const fn row(name: &'static str, capabilities: &'static [Capability]) -> FileRow {
    FileRow {
        name,
        capabilities,
        kind: LibraryKind::Plain,
    }
}

const fn kind(
    name: &'static str,
    kind: LibraryKind,
    capabilities: &'static [Capability],
) -> FileRow {
    FileRow {
        name,
        capabilities,
        kind,
    }
}

/// OpenGL, Vulkan and OptiX, with or without a display.
const GL: &[Capability] = &[Graphics, Display];
/// CUDA, which the video libraries use.
const CUDA: &[Capability] = &[Compute, Video];

/// Shared libraries.
pub const LIBRARIES: &[FileRow] = &[
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
pub(crate) const BINARIES: &[FileRow] = &[
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

/// Microsoft's library for GPUs
pub(crate) const DXCORE: &str = "libdxcore";

/// The libraries of WSL 2 that other hosts do not have, in addition to [`LIBRARIES`].
pub(crate) const WSL_LIBRARIES: &[FileRow] = &[
    // Every other library uses the GPUs through this one of Microsoft.
    kind(DXCORE, LibraryKind::Required, &Capability::ALL),
    // Microsoft's Direct3D, which Mesa's OpenGL uses, and NVIDIA's part of it.
    row("libd3d12", GL),
    row("libd3d12core", GL),
    row("libnvwgf2umx", GL),
    row("libnvdxdlkernels", GL),
    row("libnvoptix_loader", GL),
    row("libdirectml", &[Compute, Graphics, Display]),
];

/// Returns the name of a library, a program or another file as the catalog has it. A file that config.toml names has no name.
#[must_use]
pub(crate) fn name(text: &str) -> Option<&'static str> {
    if text.is_empty() {
        return Some("");
    }
    let mut rows = LIBRARIES.iter().chain(BINARIES);
    match rows.find(|row| row.name == text) {
        Some(row) => Some(row.name),
        None => WINE_FILES.iter().copied().find(|name| *name == text),
    }
}

/// The directories in which programs are searched for, in order. `$PATH` is not used, because the image may control the environment.
pub(crate) const BINARY_DIRS: &[&str] = &[
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
    "/run/current-system/sw/bin", // NixOS
];

/// The directories below the driver root in which libraries are searched for that are not in the linker cache, in order.
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

/// The directory of libgbm's backends, below the library directory.
pub(crate) const GBM_DIR: &str = "gbm";

/// Links that applications open although they are not SONAMEs: (library, link, SONAME that it leads to).
pub const DEV_LINKS: &[(&str, &str, &str)] = &[
    // Many programs call dlopen("libcuda.so").
    ("libcuda", "libcuda.so", "libcuda.so.1"),
    (
        "libnvidia-opticalflow",
        "libnvidia-opticalflow.so",
        "libnvidia-opticalflow.so.1",
    ),
    // The driver installs these links for development.
    (
        "libnvidia-encode",
        "libnvidia-encode.so",
        "libnvidia-encode.so.1",
    ),
    ("libnvidia-fbc", "libnvidia-fbc.so", "libnvidia-fbc.so.1"),
    ("libnvidia-ml", "libnvidia-ml.so", "libnvidia-ml.so.1"),
    ("libnvidia-ngx", "libnvidia-ngx.so", "libnvidia-ngx.so.1"),
    // GLVND's libGLX opens this name if the X server is remote.
    (
        "libGLX_nvidia",
        "libGLX_indirect.so.0",
        "libGLX_nvidia.so.0",
    ),
    // libgbm opens a backend with the name of the DRM driver.
    (
        "libnvidia-allocator",
        "gbm/nvidia-drm_gbm.so",
        "libnvidia-allocator.so.1",
    ),
];

/// Libraries whose SONAME contains the driver version, and that programs open with the plain name, for which NVIDIA's toolkit creates
/// a link.
pub(crate) const PLAIN_NAMES: &[&str] = &["libnvidia-vulkan-producer"];

/// A file that loaders read to find the driver: Vulkan and EGL vendors, OpenCL drivers, X configuration.
#[derive(Clone, Copy, Debug)]
pub struct Description {
    /// The path below one of the directories in `search`. `$V` stands for the driver version.
    pub path: &'static str,
    /// The directories of the host, in order
    pub search: &'static [&'static str],
    /// The directory in the container, which every loader reads
    pub dir: &'static str,
    /// Containers that request one of these get the file.
    pub capabilities: &'static [Capability],
    /// A capability that must be requested in addition.
    pub and: Option<Capability>,
}

const fn description(
    path: &'static str,
    dir: &'static str,
    capabilities: &'static [Capability],
) -> Description {
    Description {
        path,
        search: &[
            "/etc",
            "/usr/local/share",
            "/usr/share",
            "/share",
            "/",
            "/run/opengl-driver/share",
        ],
        dir,
        capabilities,
        and: None,
    }
}

/// All description files.
pub(crate) const DESCRIPTIONS: &[Description] = &[
    description("OpenCL/vendors/nvidia.icd", "etc", CUDA),
    description("glvnd/egl_vendor.d/10_nvidia.json", "usr/share", GL),
    description(
        "egl/egl_external_platform.d/15_nvidia_gbm.json",
        "usr/share",
        GL,
    ),
    description(
        "egl/egl_external_platform.d/10_nvidia_wayland.json",
        "usr/share",
        GL,
    ),
    description(
        "egl/egl_external_platform.d/09_nvidia_wayland2.json",
        "usr/share",
        GL,
    ),
    description(
        "egl/egl_external_platform.d/20_nvidia_xcb.json",
        "usr/share",
        GL,
    ),
    description(
        "egl/egl_external_platform.d/20_nvidia_xlib.json",
        "usr/share",
        GL,
    ),
    description("vulkan/icd.d/nvidia_icd.json", "etc", GL),
    description("vulkan/icd.d/nvidia_icd.x86_64.json", "etc", GL),
    description("vulkan/icd.d/nvidia_icd.aarch64.json", "etc", GL),
    // With both files, 64-bit and 32-bit loaders would find each GPU twice.
    Description {
        and: Some(Compat32),
        ..description("vulkan/icd.d/nvidia_icd.i686.json", "etc", GL)
    },
    description("vulkan/icd.d/nvidia_layers.json", "etc", GL),
    description("vulkan/implicit_layer.d/nvidia_layers.json", "etc", GL),
    description("vulkansc/icd.d/nvidia_icd_vksc.json", "etc", GL),
    description("nvidia/nvoptix.bin", "usr/share", GL),
    description("nvidia/nvidia-application-profiles-$V-rc", "usr/share", GL),
    description("X11/xorg.conf.d/10-nvidia.conf", "usr/share", &[Display]),
    description(
        "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
        "usr/share",
        &[Display],
    ),
];

/// Sockets through which programs in containers communicate with daemons of the host: (path, capability).
pub(crate) const SOCKETS: &[(&str, Capability)] = &[
    ("/run/nvidia-persistenced/socket", Utility),
    ("/run/nvidia-fabricmanager/socket", Utility),
];

/// The directory with the sockets and pipes of the MPS control daemon, unless the administrator names another one.
pub(crate) const MPS_DIRECTORY: (&str, Capability) = ("/tmp/nvidia-mps", Compute);

/// The firmware directories of the kernel. The firmware of the GPU's own processor (GSP) is in `nvidia/<version>` below one of them.
pub(crate) const FIRMWARE_DIRS: &[&str] = &[
    "/lib/firmware/updates",
    "/lib/firmware",
    "/usr/lib/firmware",
];

/// The kernel parameter with an additional firmware directory, which the kernel searches first.
pub(crate) const FIRMWARE_DIR_PARAMETER: &str = "/sys/module/firmware_class/parameters/path";

/// The directory with DLSS for Windows programs, below the libraries. Proton expects it next to libGLX_nvidia.
pub(crate) const WINE_DIR: &str = "nvidia/wine";
/// The files in [`WINE_DIR`].
pub(crate) const WINE_FILES: &[&str] = &["nvngx.dll", "_nvngx.dll", "nvngx_dlssg.dll"];

/// Libraries with the driver version that containers never need: the toolkits of nvidia-settings.
pub(crate) const HOST_ONLY: &[&str] = &["libnvidia-gtk2", "libnvidia-gtk3"];

/// Returns the libraries that a capability depends on, in groups of alternatives: a container with none of a group cannot use the
/// capability. On WSL 2, graphics use Microsoft's Direct3D.
#[must_use]
pub(crate) const fn characteristic(
    kind: DriverKind,
    capability: Capability,
) -> &'static [&'static [&'static str]] {
    match capability {
        Graphics | Display if matches!(kind, DriverKind::Wsl) => &[&["libd3d12"]],
        Utility => &[&["libnvidia-ml"]],
        Compute => &[&["libcuda"]],
        // The same libraries for another architecture.
        Compat32 => &[],
        Graphics => &[&["libnvidia-glcore", "libnvidia-eglcore"]],
        Display => &[&["libnvidia-glcore"]],
        Ngx => &[&["libnvidia-ngx"]],
        Video => &[&["libnvcuvid"], &["libnvidia-encode"]],
    }
}

/// The directories with the driver's modules for the X server.
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
        let paths: BTreeSet<_> = DESCRIPTIONS
            .iter()
            .map(|description| description.path)
            .collect();
        assert_eq!(paths.len(), DESCRIPTIONS.len());
    }
}
