//! Edits × facts about the rootfs → the steps that a live injection takes, in order.

use std::ffi::OsString;
use std::fmt;

use crate::edits::{Edits, Placement, ProcMask};
use crate::paths::{ContainerPath, HostPath};

/// What lowering has to know of a container. Booleans only: no text of the container's gets any further.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RootfsFacts {
    /// `/etc/debian_version` exists: libraries are in the multiarch directory.
    pub debian: bool,
}

/// One thing to do to a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Mount a regular file, read-only.
    MountFile {
        /// on the host
        source: HostPath,
        /// in the container
        target: ContainerPath,
    },
    /// Mount a device node.
    MountNode {
        /// on the host
        source: HostPath,
        /// in the container
        target: ContainerPath,
        /// major and minor, checked again on the open file
        device: (u32, u32),
    },
    /// `ln -sfn TEXT LINK`
    Link {
        /// The link
        link: ContainerPath,
        /// Its text, never resolved by us
        text: OsString,
        /// The mounted file it leads to: mounted at `link` instead where the image has a file of its own there
        file: ContainerPath,
    },
    /// Hide /proc/driver/nvidia behind this.
    MaskProc(ProcMask),
    /// Add these to /etc/ld.so.cache: (soname, path).
    UpdateLinkerCache(Vec<(OsString, ContainerPath)>),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MountFile { source, target } | Self::MountNode { source, target, .. } => {
                write!(f, "mount {source} at {target} in the container")
            }
            Self::Link { link, text, .. } => write!(f, "link {link} to {text:?} in the container"),
            Self::MaskProc(_) => f.write_str("mask \"/proc/driver/nvidia\" in the container"),
            Self::UpdateLinkerCache(_) => f.write_str("update \"/etc/ld.so.cache\" in the container"),
        }
    }
}

#[cfg(target_arch = "x86_64")]
const MULTIARCH: &str = "usr/lib/x86_64-linux-gnu";
#[cfg(target_arch = "aarch64")]
const MULTIARCH: &str = "usr/lib/aarch64-linux-gnu";
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const MULTIARCH: &str = "usr/lib64";

/// Where ld.so of this image looks for native libraries.
#[must_use]
pub const fn library_dir(facts: RootfsFacts) -> &'static str {
    if facts.debian { MULTIARCH } else { "usr/lib64" }
}

/// The steps, in the order in which they must be taken: a link after the file it leads to, and the linker cache,
/// which cannot be taken back, last.
#[must_use]
pub fn lower(edits: &Edits, facts: RootfsFacts) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut links = Vec::new();
    let mut cache = Vec::new();
    for file in &edits.files {
        let dir = match file.placement {
            Placement::Library => library_dir(facts),
            Placement::Binary => "usr/bin",
        };
        let Some(target) = in_dir(dir, &file.name) else { continue };
        for soname in &file.sonames {
            let Some(link) = in_dir(dir, soname) else { continue };
            cache.push((soname.clone(), link.clone()));
            links.push(Step::Link { link, text: file.name.clone(), file: target.clone() });
        }
        steps.push(Step::MountFile { source: file.source.clone(), target });
    }
    for dev_link in &edits.links {
        let file = links.iter().find_map(|step| match step {
            Step::Link { link, file, .. } if link.file_name() == dev_link.target => Some(file.clone()),
            _ => None,
        });
        let link = in_dir(library_dir(facts), &dev_link.name);
        // The host may have the same link, and ldconfig then lists it among the sonames.
        if let (Some(link), Some(file)) = (link, file) {
            links.retain(|step| !matches!(step, Step::Link { link: other, .. } if *other == link));
            links.push(Step::Link { link, text: dev_link.target.clone(), file });
        }
    }
    steps.extend(edits.nodes.iter().map(|node| Step::MountNode {
        source: node.source.clone(),
        target: node.path.clone(),
        device: (node.major, node.minor),
    }));
    steps.extend(links);
    steps.extend(edits.proc_mask.clone().map(Step::MaskProc));
    if !cache.is_empty() {
        steps.push(Step::UpdateLinkerCache(cache));
    }
    steps
}

fn in_dir(dir: &str, name: &std::ffi::OsStr) -> Option<ContainerPath> {
    ContainerPath::new(dir)?.join(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edits::{DevLink, DeviceNode, HostFile};

    fn edits(sonames: &[&str]) -> Edits {
        Edits {
            files: vec![HostFile {
                source: HostPath::new("/usr/lib64/libcuda.so.535"),
                placement: Placement::Library,
                name: "libcuda.so.535".into(),
                sonames: sonames.iter().map(OsString::from).collect(),
            }],
            links: vec![DevLink { name: "libcuda.so".into(), target: "libcuda.so.1".into() }],
            nodes: vec![DeviceNode {
                source: HostPath::new("/dev/nvidiactl"),
                path: ContainerPath::new("/dev/nvidiactl").unwrap(),
                major: 195,
                minor: 255,
            }],
            proc_mask: Some(ProcMask::default()),
        }
    }

    fn texts(edits: &Edits, debian: bool) -> Vec<String> {
        lower(edits, RootfsFacts { debian }).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn steps_in_order() {
        assert_eq!(
            texts(&edits(&["libcuda.so.1"]), false),
            [
                "mount \"/usr/lib64/libcuda.so.535\" at \"/usr/lib64/libcuda.so.535\" in the container",
                "mount \"/dev/nvidiactl\" at \"/dev/nvidiactl\" in the container",
                "link \"/usr/lib64/libcuda.so.1\" to \"libcuda.so.535\" in the container",
                "link \"/usr/lib64/libcuda.so\" to \"libcuda.so.1\" in the container",
                "mask \"/proc/driver/nvidia\" in the container",
                "update \"/etc/ld.so.cache\" in the container",
            ]
        );
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn debian_like_images_have_their_own_directory() {
        assert!(texts(&edits(&["libcuda.so.1"]), true)[0].contains("at \"/usr/lib/x86_64-linux-gnu/libcuda.so.535\""));
    }

    #[test]
    fn a_link_that_the_host_has_too_is_made_once() {
        let steps = texts(&edits(&["libcuda.so", "libcuda.so.1"]), false);
        let links: Vec<_> = steps.iter().filter(|step| step.starts_with("link")).collect();
        assert_eq!(links.len(), 2, "{links:?}");
        assert!(links[1].contains("libcuda.so\" to \"libcuda.so.1\""), "{links:?}");
    }
}
