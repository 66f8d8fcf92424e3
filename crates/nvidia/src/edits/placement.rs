//! Determines the paths of edits in an image, and the links to the files.

use std::ffi::OsString;
use std::path::Path;

use serde::{Deserialize, Serialize};

use base::paths::ContainerPath;
use base::report::Finding;
use findings::catalog;

use super::{DevLink, Edits, Need, Placement};
use crate::driver::ldcache::Arch;

/// The properties of an image that affect paths. They contain no text from the image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootfsFacts {
    /// `/etc/debian_version` exists: libraries are in the multiarch directories.
    pub debian: bool,
    /// Where 32-bit libraries are, unless the image has multiarch directories
    pub compat32: Compat32,
    /// `/usr/lib` and `/usr/lib64` are one directory, as in Arch's images.
    pub merged: bool,
    /// The dynamic loader.
    pub loader: Loader,
}

/// The directory for 32-bit libraries in an image without multiarch directories. It must not be the directory of the native libraries
/// under another name: libraries of both architectures have the same file names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Compat32 {
    /// `/usr/lib` (openSUSE, Fedora)
    #[default]
    Lib,
    /// `/usr/lib32`, because it exists, or because `/usr/lib` is the directory of the native libraries (Arch, Buildroot)
    Lib32,
    /// Both are the directory of the native libraries.
    Nowhere,
}

/// The dynamic loader of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Loader {
    /// That of glibc, which the driver requires
    #[default]
    Glibc,
    /// That of musl (Alpine), which cannot load the driver
    Musl,
    /// No loader: all programs are static
    None,
}

impl RootfsFacts {
    /// Returns a finding if the driver's programs and libraries cannot run in the image.
    #[must_use]
    pub fn finding(self) -> Option<Finding> {
        let what = match self.loader {
            Loader::Glibc => return None,
            Loader::Musl => "the image is built on musl",
            Loader::None => "the image has no dynamic loader",
        };
        Some(Finding::new(
            &catalog::NO_GLIBC,
            format!(
                "{what}: the container gets its GPUs, but the driver's libraries and programs require glibc"
            ),
            "use a base image with glibc (openSUSE, Debian, Fedora, UBI)",
        ))
    }
}

/// Returns the directory in which ld.so of this image searches for libraries of this architecture.
#[must_use]
pub const fn library_dir(facts: RootfsFacts, arch: Arch) -> &'static str {
    match arch {
        Arch::X86_64 if facts.debian => "usr/lib/x86_64-linux-gnu",
        Arch::Aarch64 if facts.debian => "usr/lib/aarch64-linux-gnu",
        Arch::I386 if facts.debian => "usr/lib/i386-linux-gnu",
        Arch::Arm if facts.debian => "usr/lib/arm-linux-gnueabihf",
        Arch::X86_64 | Arch::Aarch64 => "usr/lib64",
        Arch::I386 | Arch::Arm => match facts.compat32 {
            Compat32::Lib => "usr/lib",
            Compat32::Lib32 | Compat32::Nowhere => "usr/lib32",
        },
    }
}

/// Reports whether both paths are in one directory of the image.
#[must_use]
pub fn is_same_dir(facts: RootfsFacts, a: &ContainerPath, b: &ContainerPath) -> bool {
    let (Some(a), Some(b)) = (a.parent(), b.parent()) else {
        return false;
    };
    let is_merged = |dir: &ContainerPath| {
        let dirs = ["lib", "lib64", "usr/lib", "usr/lib64"];
        dirs.iter()
            .any(|merged| dir.relative() == Path::new(merged))
    };
    a == b || facts.merged && is_merged(&a) && is_merged(&b)
}

/// Reports whether the image has no directory for libraries of this architecture, so that they are left out.
#[must_use]
pub fn has_no_dir(facts: RootfsFacts, arch: Arch) -> bool {
    arch != Arch::native() && !facts.debian && facts.compat32 == Compat32::Nowhere
}

/// Returns the directory of a placement, and the architecture if its files are in the linker cache.
#[must_use]
pub fn directory(
    facts: RootfsFacts,
    placement: &Placement,
) -> Option<(ContainerPath, Option<Arch>)> {
    match placement {
        Placement::Library(arch) | Placement::LibraryBelow(arch, _) if has_no_dir(facts, *arch) => {
            None
        }
        Placement::Library(arch) => {
            Some((ContainerPath::new(library_dir(facts, *arch))?, Some(*arch)))
        }
        // Programs load these files by path, so they are not in the linker cache.
        Placement::LibraryBelow(arch, below) => Some((
            ContainerPath::new(library_dir(facts, *arch))?.join(below)?,
            None,
        )),
        Placement::Binary => Some((ContainerPath::new("usr/bin")?, None)),
        Placement::At(dir) => Some((dir.clone(), None)),
    }
}

/// Whether ldconfig searches a directory without configuration. These are glibc's `SLIBDIR` and `LIBDIR`, which are the multiarch
/// directories on Debian, and /lib and /usr/lib.
#[must_use]
pub fn is_builtin(facts: RootfsFacts, dir: &ContainerPath) -> bool {
    let native = Path::new(library_dir(facts, Arch::native()));
    let dir = dir.relative();
    let is_native = dir == native || Path::new("usr").join(dir) == native;
    is_native || dir == Path::new("usr/lib") || dir == Path::new("lib")
}

/// A symbolic link in the container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The path of the link
    pub link: ContainerPath,
    /// The text of the link, which the hook never resolves
    pub text: OsString,
    /// The mounted file that it leads to
    pub file: ContainerPath,
    /// Whether the container can start without the link
    pub need: Need,
}

/// Returns the links to the files and nodes of these edits: SONAMEs, development links, names of device nodes.
#[must_use]
pub fn links(edits: &Edits, facts: RootfsFacts) -> Vec<Link> {
    let mut links: Vec<Link> = Vec::new();
    for file in &edits.files {
        let Some((dir, _)) = directory(facts, &file.placement) else {
            continue;
        };
        let Some(target) = dir.join(&file.name) else {
            continue;
        };
        let others = file.sonames.iter().filter(|soname| **soname != file.name);
        links.extend(others.filter_map(|soname| {
            let (text, file_path) = (file.name.clone(), target.clone());
            Some(Link {
                link: dir.join(soname)?,
                text,
                file: file_path,
                need: file.need,
            })
        }));
    }
    for dev_link in &edits.links {
        let made: Vec<_> = links
            .iter()
            .filter_map(|link| beside(link, dev_link))
            .collect();
        for made in made {
            // If the host has the same link, ldconfig lists it, and it is among the SONAMEs.
            links.retain(|link| link.link != made.link);
            links.push(made);
        }
    }
    links.extend(edits.node_links.iter().map(|link| Link {
        link: link.path.clone(),
        text: link.text.clone().into(),
        file: link.node.clone(),
        need: Need::Optional,
    }));
    links
}

/// Returns the development link that belongs to the link of a SONAME, in its directory or below.
fn beside(link: &Link, dev_link: &DevLink) -> Option<Link> {
    let Link {
        link, file, need, ..
    } = link;
    if link.file_name() != dev_link.target {
        return None;
    }
    let up = "../".repeat(
        Path::new(&dev_link.name)
            .components()
            .count()
            .saturating_sub(1),
    );
    let mut text = OsString::from(up);
    text.push(&dev_link.target);
    Some(Link {
        link: link.parent()?.join(&dev_link.name)?,
        text,
        file: file.clone(),
        need: *need,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edits::HostFile;
    use base::paths::HostPath;

    fn facts() -> RootfsFacts {
        RootfsFacts {
            debian: true,
            ..RootfsFacts::default()
        }
    }

    /// Links as `link -> text`.
    fn texts(edits: &Edits) -> Vec<String> {
        let links = links(edits, facts());
        links
            .iter()
            .map(|link| {
                format!(
                    "{} -> {}",
                    link.link.absolute().display(),
                    link.text.display()
                )
            })
            .collect()
    }

    #[test]
    fn links_of_a_library() {
        let library = HostFile {
            source: HostPath::new("/usr/lib64/libcuda.so.1.2"),
            placement: Placement::Library(Arch::native()),
            name: "libcuda.so.1.2".into(),
            // ldconfig lists a development link of the host too.
            sonames: ["libcuda.so.1.2", "libcuda.so.1", "libcuda.so"]
                .map(Into::into)
                .into(),
            need: Need::Required,
        };
        let dev_link = |name: &str| DevLink {
            name: name.into(),
            target: "libcuda.so.1".into(),
        };
        let edits = Edits {
            files: vec![library],
            links: vec![dev_link("libcuda.so"), dev_link("a/b/libcuda.so")],
            ..Edits::default()
        };
        let dir = format!(
            "/{}",
            library_dir(facts(), Arch::native()).trim_start_matches('/')
        );
        assert_eq!(
            texts(&edits),
            [
                format!("{dir}/libcuda.so.1 -> libcuda.so.1.2"),
                format!("{dir}/libcuda.so -> libcuda.so.1"),
                format!("{dir}/a/b/libcuda.so -> ../../libcuda.so.1"),
            ],
            "no link to itself, and one link of each name"
        );
        let other = Edits {
            links: vec![dev_link("libcuda.so")],
            ..Edits::default()
        };
        assert_eq!(
            texts(&other),
            Vec::<String>::new(),
            "no link to a missing library"
        );
    }
}
