//! Finds the driver files that are not libraries: programs, descriptions, firmware and X server modules.

use std::path::{Path, PathBuf};

use base::paths::{ContainerPath, HostPath};
use base::tree::{RegularFile, Tree};

use super::file_table::{
    BINARIES, BINARY_DIRS, DESCRIPTIONS, Description, FIRMWARE_DIR_PARAMETER, FIRMWARE_DIRS,
    XORG_DIRS,
};
use super::libraries::Library;
use crate::capability::{Capabilities, Omit};

/// The driver's files for one set of capabilities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverFiles {
    /// Shared libraries, in the order of the catalog
    pub libraries: Vec<Library>,
    /// Programs
    pub binaries: Vec<Binary>,
    /// Descriptions, firmware and other files with a fixed path
    pub placed: Vec<PlacedFile>,
}

impl DriverFiles {
    /// Removes the files that are not wanted.
    pub fn leave_out(&mut self, omit: Omit) {
        self.placed
            .retain(|file| !(omit.firmware && file.is_firmware()));
    }
}

/// A program of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binary {
    /// The real file
    pub source: HostPath,
    /// The name in the container. It is the name in the catalog, even if the host's file is a link to another name.
    pub name: &'static str,
}

/// A file with a fixed path in the container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedFile {
    /// The real file
    pub source: HostPath,
    /// The path in the container
    pub target: ContainerPath,
}

impl PlacedFile {
    /// Whether it is firmware.
    #[must_use]
    pub fn is_firmware(&self) -> bool {
        self.target
            .absolute()
            .components()
            .any(|part| part.as_os_str() == "firmware")
    }
}

/// The number of programs from which listing a small directory takes fewer system calls than looking them up.
const MANY: usize = 5;

/// Finds the programs for these capabilities, in the order of the catalog. `library_dirs` are the directories with the driver's libraries.
///
/// A driver whose libraries are not below /usr, such as one in `/usr/local/nvidia/lib64`, has its programs beside them. These come
/// first, because the ones in /usr/bin can be scripts that start them, and a container would get only the script.
#[must_use]
pub fn binaries(root: &Tree, library_dirs: &[PathBuf], capabilities: Capabilities) -> Vec<Binary> {
    let beside = library_dirs.iter().filter_map(|dir| bin_beside(dir));
    let beside: Vec<PathBuf> = beside.filter(|dir| root.open_dir(dir).is_ok()).collect();
    let mut dirs: Vec<&Path> = beside.iter().map(PathBuf::as_path).collect();
    dirs.extend(root.existing(BINARY_DIRS));
    binaries_in(root, &dirs, capabilities)
}

/// Returns the directory `bin` next to a directory `lib` or `lib64` that is not one of the system's.
fn bin_beside(library_dir: &Path) -> Option<PathBuf> {
    if !library_dir.ends_with("lib") && !library_dir.ends_with("lib64") {
        return None;
    }
    let parent = library_dir.parent()?;
    let system = [Path::new("/"), Path::new("/usr")];
    (!system.contains(&parent)).then(|| parent.join("bin"))
}

/// Finds the programs for these capabilities in these directories.
pub(super) fn binaries_in(root: &Tree, dirs: &[&Path], capabilities: Capabilities) -> Vec<Binary> {
    let mut wanted: Vec<_> = BINARIES.iter().collect();
    wanted.retain(|row| capabilities.any(row.capabilities));
    if wanted.len() > MANY {
        for dir in dirs {
            root.expect_lookups(dir);
        }
    }
    let mut found = Vec::new();
    for row in wanted {
        let name = row.name;
        if let Some(file) = dirs.iter().find_map(|dir| regular(root, &dir.join(name))) {
            let source = file.host;
            found.push(Binary { source, name });
        }
    }
    found
}

pub(super) fn regular(root: &Tree, path: &Path) -> Option<RegularFile> {
    root.regular_file(path).ok()?
}

/// Finds the description files for these capabilities.
#[must_use]
pub fn descriptions(root: &Tree, version: &str, capabilities: Capabilities) -> Vec<PlacedFile> {
    let mut search = DescriptionSearch {
        root,
        version,
        missing: Vec::new(),
    };
    let mut found = Vec::new();
    for description in DESCRIPTIONS {
        if capabilities.any(description.capabilities)
            && description.and.is_none_or(|and| capabilities.has(and))
        {
            found.extend(search.find(description));
        }
    }
    found
}

/// A search for descriptions. Several of them can be in the same directories, of which a host has few.
struct DescriptionSearch<'a> {
    root: &'a Tree,
    version: &'a str,
    /// The directories that do not exist
    missing: Vec<PathBuf>,
}

impl DescriptionSearch<'_> {
    fn find(&mut self, description: &Description) -> Option<PlacedFile> {
        let path = description.path.replace("$V", self.version);
        for dir in description.search {
            let place = Path::new(dir).join(&path);
            if self.lacks_directory_of(&place) {
                continue;
            }
            if let Some(file) = regular(self.root, &place) {
                return Some(PlacedFile {
                    source: file.host,
                    target: ContainerPath::new(description.dir)?.join(&path)?,
                });
            }
        }
        None
    }

    fn lacks_directory_of(&mut self, file: &Path) -> bool {
        let Some(dir) = file.parent() else {
            return false;
        };
        let mut missing = self.missing.iter();
        if missing.any(|missing| missing.as_os_str() == dir.as_os_str()) {
            return true;
        }
        let is_missing = self.root.lacks_dir(dir);
        if is_missing {
            self.missing.push(dir.to_owned());
        }
        is_missing
    }
}

/// Finds the firmware of the GPU's own processor (GSP), which NVIDIA's stack also gives to containers.
#[must_use]
pub fn firmware(root: &Tree, version: &str) -> Vec<PlacedFile> {
    let parameter = root
        .read_kernel_text(Path::new(FIRMWARE_DIR_PARAMETER))
        .unwrap_or_default();
    let configured = Some(parameter.trim_end()).filter(|dir| dir.starts_with('/'));
    for dir in configured.into_iter().chain(FIRMWARE_DIRS.iter().copied()) {
        let dir = Path::new(dir).join("nvidia").join(version);
        let Ok(opened) = root.open_dir(&dir) else {
            continue;
        };
        let mut found = Vec::new();
        for name in opened.names() {
            let bytes = name.as_encoded_bytes();
            if bytes.starts_with(b"gsp") && bytes.ends_with(b".bin") {
                found.extend(at(root, &dir.join(name)));
            }
        }
        if !found.is_empty() {
            return found;
        }
    }
    Vec::new()
}

/// Finds the driver's modules for the X server. They have the same path in the container, because the configuration of the X server
/// names their directories.
#[must_use]
pub(crate) fn xorg_modules(root: &Tree, version: &str) -> Vec<PlacedFile> {
    // The X server opens the names without a version.
    let names = [
        "nvidia_drv.so",
        "libglxserver_nvidia.so",
        &format!("libglxserver_nvidia.so.{version}"),
    ];
    let dirs = root.existing(XORG_DIRS);
    let found = names
        .iter()
        .filter_map(|name| dirs.iter().find_map(|dir| at(root, &dir.join(name))));
    found.collect()
}

/// Returns a regular file of the host, to be given to the container at the same path.
#[must_use]
pub fn at(root: &Tree, path: &Path) -> Option<PlacedFile> {
    Some(PlacedFile {
        source: regular(root, path)?.host,
        target: ContainerPath::new(path)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_beside_the_libraries() {
        for (dir, expected) in [
            ("/usr/local/nvidia/lib64", Some("/usr/local/nvidia/bin")),
            ("/opt/nvidia/lib", Some("/opt/nvidia/bin")),
            ("/usr/lib64", None),
            ("/lib64", None),
            ("/usr/lib/x86_64-linux-gnu", None),
            ("/usr/lib/nvidia/current", None),
        ] {
            let found = bin_beside(Path::new(dir));
            assert_eq!(found.as_deref(), expected.map(Path::new), "{dir}");
        }
    }

    /// With both files, 64-bit and 32-bit loaders would find each GPU twice.
    #[test]
    fn the_32_bit_description_needs_32_bit_libraries() {
        let dir = tempfile::tempdir().unwrap();
        let icd = dir.path().join("etc/vulkan/icd.d");
        std::fs::create_dir_all(&icd).unwrap();
        for name in ["nvidia_icd.json", "nvidia_icd.i686.json"] {
            std::fs::write(icd.join(name), "").unwrap();
        }
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        let count = |capabilities: &str| {
            descriptions(
                &root,
                "535.1",
                Capabilities::supported(capabilities).unwrap(),
            )
            .len()
        };
        assert_eq!(
            [
                "graphics",
                "graphics,compat32",
                "compat32",
                "compute,compat32"
            ]
            .map(count),
            [1, 2, 0, 0]
        );
    }

    #[test]
    fn firmware_is_where_the_kernel_looks() {
        let dir = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let found = || {
            let root = Tree::open(&HostPath::new(dir.path())).unwrap();
            let files = firmware(&root, "535.1");
            files
                .iter()
                .map(|file| file.target.absolute().display().to_string())
                .collect::<Vec<_>>()
        };
        put("lib/firmware/nvidia/535.1/gsp_ga10x.bin", "");
        assert_eq!(found(), ["/lib/firmware/nvidia/535.1/gsp_ga10x.bin"]);
        for (parameter, expected) in [
            (
                "/var/lib/firmware\n",
                "/var/lib/firmware/nvidia/535.1/gsp_ga10x.bin",
            ),
            ("\n", "/lib/firmware/nvidia/535.1/gsp_ga10x.bin"),
            ("relative\n", "/lib/firmware/nvidia/535.1/gsp_ga10x.bin"),
        ] {
            put("var/lib/firmware/nvidia/535.1/gsp_ga10x.bin", "");
            put("sys/module/firmware_class/parameters/path", parameter);
            assert_eq!(found(), [expected], "{parameter:?}");
        }
    }
}
