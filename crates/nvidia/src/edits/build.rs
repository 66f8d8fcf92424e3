//! Builds edits from driver files, device nodes and GPUs.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use base::paths::{ContainerPath, HostPath};

use super::{DevLink, DeviceNode, Edits, HostFile, Ipc, Need, NodeLink, Placement, ProcMask};
use crate::driver::file_table::{
    DEV_LINKS, LIBRARIES, LibraryKind, PLAIN_NAMES, WINE_DIR, WINE_FILES,
};
use crate::driver::files::DriverFiles;
use crate::driver::ldcache::Arch;
use crate::driver::libraries::Library;
use crate::driver::sonames::Sonames;

/// Builds the edits that every container with the driver gets, even one that requests `none`.
#[must_use]
pub fn common(
    files: &DriverFiles,
    ipc: Vec<Ipc>,
    nodes: Vec<DeviceNode>,
    proc_files: Option<Vec<(OsString, Vec<u8>)>>,
) -> Edits {
    let DriverFiles {
        libraries,
        binaries,
        placed,
    } = files;
    let mut files: Vec<_> = libraries.iter().map(library).collect();
    for binary in binaries {
        let name = binary.name.into();
        files.push(optional(&binary.source, Placement::Binary, name));
    }
    for file in placed {
        if let Some(dir) = file.target.parent() {
            let name = file.target.file_name().to_owned();
            files.push(optional(&file.source, Placement::At(dir), name));
        }
    }
    let mut links = Vec::new();
    for (name, link, target) in DEV_LINKS {
        let has_target = |library: &Library| {
            library.name == *name && library.sonames.contains(OsStr::new(target))
        };
        if libraries.iter().any(has_target) {
            links.push(DevLink {
                name: link.into(),
                target: target.into(),
            });
        }
    }
    Edits {
        files,
        ipc,
        links,
        nodes,
        proc_mask: proc_files.map(|files| ProcMask {
            files: files.into_iter().map(mask_file).collect(),
            mounts: vec![],
        }),
        ..Edits::default()
    }
}

fn optional(source: &HostPath, placement: Placement, name: OsString) -> HostFile {
    HostFile {
        source: source.clone(),
        placement,
        name,
        sonames: Sonames::default(),
        need: Need::Optional,
    }
}

fn library(library: &Library) -> HostFile {
    let row = LIBRARIES.iter().find(|row| row.name == library.name);
    let native = library.arch == Arch::native();
    HostFile {
        source: library.source.clone(),
        placement: match row.map(|row| row.kind) {
            Some(LibraryKind::Below(below)) => Placement::LibraryBelow(library.arch, below),
            None if WINE_FILES.contains(&library.name) => {
                Placement::LibraryBelow(library.arch, WINE_DIR)
            }
            _ => Placement::Library(library.arch),
        },
        name: library.file_name.clone(),
        sonames: sonames(library),
        need: match row.map(|row| row.kind) {
            Some(LibraryKind::Required) if native => Need::Required,
            _ => Need::Optional,
        },
    }
}

/// Returns the names for the linker cache, including the names of development links, which the host's cache may lack. ld.so searches
/// directories for a name that is not in the cache, and could find another copy: a program would load the image's newer libcuda with
/// one name, and the host's libcuda with the other.
fn sonames(library: &Library) -> Sonames {
    let mut sonames = library.sonames.clone();
    for (name, link, target) in DEV_LINKS {
        let has_target = *name == library.name && library.sonames.contains(OsStr::new(target));
        if has_target && !link.contains('/') {
            sonames.insert(link.into());
        }
    }
    if PLAIN_NAMES.contains(&library.name) {
        sonames.insert(format!("{}.so", library.name).into());
    }
    sonames
}

/// Builds the edits for one device: its nodes, and its files below /proc/driver/nvidia.
#[must_use]
pub fn device(nodes: Vec<DeviceNode>, proc_mounts: Vec<(PathBuf, HostPath)>) -> Edits {
    Edits {
        nodes,
        proc_mask: Some(ProcMask {
            files: vec![],
            mounts: proc_mounts,
        }),
        ..Edits::default()
    }
}

/// Builds the edits for the `/dev/dri` nodes of the GPU with this bus address (`0000:3b:00.0`). The links by bus address show programs
/// such as Wayland compositors to which GPU a node belongs.
#[must_use]
pub fn drm(nodes: Vec<DeviceNode>, bus_id: &str) -> Edits {
    let mut node_links = Vec::new();
    for node in &nodes {
        let name = node.path.file_name();
        let kind = if name.as_bytes().starts_with(b"render") {
            "render"
        } else {
            "card"
        };
        if let Some(path) = ContainerPath::new(format!("dev/dri/by-path/pci-{bus_id}-{kind}")) {
            node_links.push(NodeLink {
                path,
                text: Path::new("..").join(name),
                node: node.path.clone(),
            });
        }
    }
    Edits {
        node_links,
        ..device(nodes, Vec::new())
    }
}

/// Builds the edits of a GPU for EGL. libEGL_nvidia enumerates all GPUs of the host, and an application profile limits it to those in a
/// mask of 64 bits.
#[must_use]
pub(crate) fn egl_device(minor: u32) -> Edits {
    Edits {
        egl_devices: 1u64.checked_shl(minor).unwrap_or_default(),
        ..Edits::default()
    }
}

/// Masks `params`: NVML and CUDA in the container read it, and would create device nodes of all GPUs if it permits that
/// (CVE-2021-1056).
#[must_use]
pub fn mask_file((name, content): (OsString, Vec<u8>)) -> (OsString, Vec<u8>) {
    if name != "params" {
        return (name, content);
    }
    let masked = mask_params(&String::from_utf8_lossy(&content));
    (name, masked.map_or(content, String::into_bytes))
}

/// Returns `params` with `ModifyDeviceFiles: 0`, or `None` if nothing has to be changed.
#[must_use]
pub fn mask_params(text: &str) -> Option<String> {
    const ON: &str = "ModifyDeviceFiles: 1";
    let (mut masked, mut is_changed) = (String::new(), false);
    for line in text.lines() {
        is_changed |= line == ON;
        masked.push_str(if line == ON {
            "ModifyDeviceFiles: 0"
        } else {
            line
        });
        masked.push('\n');
    }
    if is_changed { Some(masked) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::files::Binary;
    use crate::edits::placement::{self, RootfsFacts};

    #[test]
    fn libraries_bring_their_dev_links() {
        let library = |name: &'static str, soname: &str| Library {
            name,
            arch: Arch::native(),
            source: HostPath::new("/usr/lib64/x"),
            file_name: format!("{name}.so.535").into(),
            sonames: [soname.into()].into(),
        };
        let files = DriverFiles {
            libraries: vec![
                library("libcuda", "libcuda.so.1"),
                library("libnvidia-ml", "libnvidia-ml.so.1"),
            ],
            binaries: vec![Binary {
                source: HostPath::new("/usr/bin/nvidia-smi"),
                name: "nvidia-smi",
            }],
            ..DriverFiles::default()
        };
        let edits = common(&files, vec![], vec![], None);
        let needs: Vec<_> = edits.files.iter().map(|file| file.need).collect();
        assert_eq!(needs, [Need::Required, Need::Required, Need::Optional]);
        assert!(
            edits.files[0].sonames.contains(OsStr::new("libcuda.so")),
            "the linker cache has it too"
        );
        let link = |name: &str| DevLink {
            name: format!("{name}.so").into(),
            target: format!("{name}.so.1").into(),
        };
        assert_eq!(edits.links, [link("libcuda"), link("libnvidia-ml")]);
    }

    #[test]
    fn a_library_that_is_opened_without_version() {
        let library = Library {
            name: "libnvidia-vulkan-producer",
            arch: Arch::native(),
            source: HostPath::new("/usr/lib64/x"),
            file_name: "libnvidia-vulkan-producer.so.535".into(),
            sonames: ["libnvidia-vulkan-producer.so.535".into()].into(),
        };
        let edits = common(
            &DriverFiles {
                libraries: vec![library],
                ..DriverFiles::default()
            },
            vec![],
            vec![],
            None,
        );
        let links = placement::links(&edits, RootfsFacts::default());
        let links: Vec<_> = links
            .iter()
            .map(|link| (link.link.file_name(), link.text.as_os_str()))
            .collect();
        assert_eq!(
            links,
            [(
                OsStr::new("libnvidia-vulkan-producer.so"),
                OsStr::new("libnvidia-vulkan-producer.so.535")
            )]
        );
    }

    #[test]
    fn the_container_may_not_make_nodes() {
        let params =
            b"ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileMode: 438\n".to_vec();
        let files = vec![
            (OsString::from("params"), params),
            ("version".into(), b"ModifyDeviceFiles: 1".to_vec()),
        ];
        let mask = common(&DriverFiles::default(), vec![], vec![], Some(files))
            .proc_mask
            .unwrap();
        assert_eq!(
            mask.files[0].1,
            b"ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 0\nDeviceFileMode: 438\n"
        );
        assert_eq!(mask.files[1].1, b"ModifyDeviceFiles: 1");
        for untouched in [
            "ModifyDeviceFiles: 11\n",
            " ModifyDeviceFiles: 1\n",
            "ModifyDeviceFiles: 1 \n",
        ] {
            assert_eq!(
                mask_file(("params".into(), untouched.into())).1,
                untouched.as_bytes()
            );
        }
    }
}
