//! Lowers edits to the ordered steps that set up a live container, using facts about its root file system.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use base::paths::ContainerPath;
use nvidia_host::driver::file_table::DEV_LINKS;
use nvidia_host::driver::ldcache::Arch;
use nvidia_host::edits::placement::{Loader, RootfsFacts, directory, is_builtin, links};
use nvidia_host::edits::{Edits, Placement};

use super::step::{CacheEntry, Step};

/// Returns the steps in the order in which they must run: a link after its target, and the linker cache last, because its
/// update cannot be undone.
pub(crate) fn lower(edits: &Edits, facts: RootfsFacts) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut cache = Vec::new();
    for file in &edits.files {
        let Some((dir, arch)) = directory(facts, &file.placement) else {
            continue;
        };
        let Some(target) = dir.join(&file.name) else {
            continue;
        };
        if let Some(arch) = arch {
            let entry = |soname: &OsString| {
                Some(CacheEntry {
                    soname: soname.clone(),
                    path: dir.join(soname)?,
                    arch,
                })
            };
            cache.extend(file.sonames.iter().filter_map(entry));
        }
        let (source, need) = (file.source.clone(), file.need);
        steps.push(
            match images_write(&file.name) && matches!(file.placement, Placement::At(_)) {
                true => Step::CopyFile {
                    source,
                    target,
                    need,
                },
                false => Step::MountFile {
                    source,
                    target,
                    need,
                },
            },
        );
    }
    steps.extend(edits.nodes.iter().map(|node| Step::MountNode {
        node: node.clone(),
        own: None,
    }));
    steps.extend(edits.ipc.iter().map(Step::mount_ipc));
    steps.extend(links(edits, facts).into_iter().map(Step::Link));
    steps.extend(edits.proc_mask.clone().map(Step::MaskProc));
    steps.extend(egl_profile(edits.egl_devices));
    steps.extend(linker_steps(cache, facts));
    steps
}

/// Reports whether a file is a description of the driver for OpenCL, Vulkan or EGL. Many images are built with a command that writes
/// such a file, because NVIDIA's hook does not provide it. On a read-only mount, that command would fail (EROFS).
fn images_write(name: &OsStr) -> bool {
    Path::new(name)
        .extension()
        .is_some_and(|extension| extension == "icd" || extension == "json")
}

/// Returns the steps that make the image's loader find these libraries, also after the image's ldconfig has run.
pub(super) fn linker_steps(entries: Vec<CacheEntry>, facts: RootfsFacts) -> Vec<Step> {
    // Only glibc's loader reads the cache.
    if entries.is_empty() || facts.loader != Loader::Glibc {
        return Vec::new();
    }
    let mut others: Vec<ContainerPath> = Vec::new();
    for dir in entries.iter().filter_map(|entry| entry.path.parent()) {
        if !is_builtin(facts, &dir) && !others.contains(&dir) {
            others.push(dir);
        }
    }
    let list = (!others.is_empty()).then(|| Step::ListDirectories {
        first: Vec::new(),
        others,
    });
    list.into_iter()
        .chain([Step::UpdateLinkerCache(entries)])
        .collect()
}

/// Returns the step for an application profile that limits EGL to these GPUs in all programs; `None` if `devices` is 0.
pub(super) fn egl_profile(devices: u64) -> Option<Step> {
    let target = ContainerPath::new("etc/nvidia/nvidia-application-profiles-rc.d")?;
    let profile = format!(
        "{{\"profiles\": [{{\"name\": \"_container_\", \"settings\": [\"EGLVisibleDGPUDevices\", {devices:#x}]}}],\n\
         \"rules\": [{{\"pattern\": [], \"profile\": \"_container_\"}}]}}\n"
    );
    // A bit mask of the GPUs that EGL lists; bit N is /dev/nvidiaN.
    (devices != 0).then(|| Step::MountFiles {
        target,
        files: vec![("10-container.conf", profile)],
    })
}

/// Prefers the image's own libraries in `dir` to driver libraries of the same names.
pub(crate) fn prefer(steps: &mut Vec<Step>, dir: &ContainerPath, has: impl Fn(&OsStr) -> bool) {
    let mut is_preferred = false;
    for step in &mut *steps {
        let Step::UpdateLinkerCache(entries) = step else {
            continue;
        };
        for entry in entries
            .iter_mut()
            .filter(|entry| entry.arch == Arch::native())
        {
            let link = DEV_LINKS.iter().find(|(_, link, _)| entry.soname == *link);
            // If the image lacks the development link, the host's link must not lead to a different libcuda.
            let target = link.map_or_else(
                || entry.soname.clone(),
                |(.., target)| OsString::from(target),
            );
            let name = [&entry.soname, &target].into_iter().find(|name| has(name));
            if let Some(path) = name.and_then(|name| dir.join(name)) {
                entry.path = path;
                is_preferred = true;
            }
        }
    }
    if !is_preferred {
        return;
    }
    let list = steps.iter_mut().find_map(|step| match step {
        Step::ListDirectories { first, .. } => Some(first),
        _ => None,
    });
    match list {
        Some(first) => first.push(dir.clone()),
        // The linker cache stays the last step.
        None => steps.insert(
            steps.len().saturating_sub(1),
            Step::ListDirectories {
                first: vec![dir.clone()],
                others: vec![],
            },
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;
    use nvidia_host::driver::access::Permissions;
    use nvidia_host::edits::placement::{Compat32, library_dir};
    use nvidia_host::edits::{DevLink, DeviceNode, HostFile, Need, ProcMask};

    fn edits(sonames: &[&str]) -> Edits {
        Edits {
            files: vec![HostFile {
                source: HostPath::new("/usr/lib64/libcuda.so.535"),
                placement: Placement::Library(Arch::X86_64),
                name: "libcuda.so.535".into(),
                sonames: sonames.iter().map(OsString::from).collect(),
                need: Need::Required,
            }],
            ipc: vec![],
            links: vec![DevLink {
                name: "libcuda.so".into(),
                target: "libcuda.so.1".into(),
            }],
            nodes: vec![DeviceNode {
                source: HostPath::new("/dev/nvidiactl"),
                path: ContainerPath::new("/dev/nvidiactl").unwrap(),
                major: 195,
                minor: 255,
                permissions: Permissions::default(),
            }],
            node_links: vec![],
            proc_mask: Some(ProcMask::default()),
            egl_devices: 0,
        }
    }

    fn texts(edits: &Edits, debian: bool) -> Vec<String> {
        lower(
            edits,
            RootfsFacts {
                debian,
                ..RootfsFacts::default()
            },
        )
        .iter()
        .map(ToString::to_string)
        .collect()
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
    fn descriptions_that_images_write_are_copied() {
        for (name, is_copied) in [
            ("nvidia.icd", true),
            ("nvidia_icd.json", true),
            ("nvoptix.bin", false),
            ("libcuda.so.1", false),
        ] {
            let mut edits = edits(&[]);
            edits.files[0].name = name.into();
            edits.files[0].placement = Placement::At(ContainerPath::new("/etc/x").unwrap());
            assert_eq!(
                texts(&edits, false)[0].starts_with("copy "),
                is_copied,
                "{name}"
            );
        }
    }

    #[test]
    fn the_linker_cache_is_glibcs() {
        for loader in [Loader::Musl, Loader::None] {
            let facts = RootfsFacts {
                loader,
                ..RootfsFacts::default()
            };
            let steps = lower(&edits(&["libcuda.so.1"]), facts);
            assert!(
                !steps
                    .iter()
                    .any(|step| matches!(step, Step::UpdateLinkerCache(_)))
            );
            assert!(
                steps
                    .iter()
                    .any(|step| matches!(step, Step::MountNode { .. })),
                "it gets its GPUs"
            );
            assert!(facts.finding().is_some());
        }
        assert_eq!(RootfsFacts::default().finding(), None);
    }

    #[test]
    fn debian_like_images_have_their_own_directory() {
        assert!(
            texts(&edits(&["libcuda.so.1"]), true)[0]
                .contains("at \"/usr/lib/x86_64-linux-gnu/libcuda.so.535\"")
        );
    }

    #[test]
    fn each_architecture_has_its_directory() {
        let dir = |debian, compat32, arch| {
            let facts = RootfsFacts {
                debian,
                compat32,
                ..RootfsFacts::default()
            };
            let placed = directory(facts, &Placement::Library(arch));
            placed.map(|(dir, _)| dir.relative().to_owned())
        };
        for (debian, compat32, arch, expected) in [
            (
                true,
                Compat32::Lib32,
                Arch::I386,
                Some("usr/lib/i386-linux-gnu"),
            ),
            (
                true,
                Compat32::Nowhere,
                Arch::I386,
                Some("usr/lib/i386-linux-gnu"),
            ),
            (false, Compat32::Lib32, Arch::I386, Some("usr/lib32")),
            (false, Compat32::Lib, Arch::I386, Some("usr/lib")),
            (false, Compat32::Nowhere, Arch::I386, None),
            (false, Compat32::Nowhere, Arch::native(), Some("usr/lib64")),
        ] {
            assert_eq!(
                dir(debian, compat32, arch).as_deref(),
                expected.map(Path::new)
            );
        }
    }

    fn listed(steps: &[Step]) -> Vec<(Vec<&Path>, Vec<&Path>)> {
        let paths = |dirs| -> Vec<_> {
            <[ContainerPath]>::iter(dirs)
                .map(ContainerPath::relative)
                .collect()
        };
        let list = steps.iter().filter_map(|step| match step {
            Step::ListDirectories { first, others } => Some((paths(first), paths(others))),
            _ => None,
        });
        list.collect()
    }

    #[test]
    fn directories_that_ldconfig_does_not_search_are_listed() {
        let entry = |path: &str, arch| {
            let path = ContainerPath::new(path).unwrap();
            CacheEntry {
                soname: path.file_name().to_owned(),
                path,
                arch,
            }
        };
        let facts = |debian| RootfsFacts {
            debian,
            ..RootfsFacts::default()
        };
        let native = |debian| library_dir(facts(debian), Arch::native());
        let entries = |debian: bool| {
            vec![entry(
                &format!("{}/libcuda.so.1", native(debian)),
                Arch::native(),
            )]
        };
        let dirs = [Path::new(native(true)), Path::new(native(false))];
        let compat = ContainerPath::new("usr/local/cuda/compat").unwrap();
        for debian in [false, true] {
            assert_eq!(listed(&linker_steps(entries(debian), facts(debian))), []);
            let other = dirs[usize::from(debian)];
            let mut steps = linker_steps(entries(!debian), facts(debian));
            assert_eq!(listed(&steps), [(vec![], vec![other])]);
            prefer(&mut steps, &compat, |soname| soname == "libcuda.so.1");
            assert_eq!(
                listed(&steps),
                [(vec![Path::new("usr/local/cuda/compat")], vec![other])]
            );
            let mut steps = linker_steps(entries(debian), facts(debian));
            prefer(&mut steps, &compat, |_| false);
            assert_eq!(listed(&steps), [], "not used");
            prefer(&mut steps, &compat, |_| true);
            assert_eq!(
                listed(&steps),
                [(vec![Path::new("usr/local/cuda/compat")], vec![])]
            );
            assert!(
                matches!(steps.last(), Some(Step::UpdateLinkerCache(_))),
                "it cannot be undone"
            );
        }
        let musl = RootfsFacts {
            loader: Loader::Musl,
            ..facts(true)
        };
        assert_eq!(linker_steps(entries(false), musl), []);
    }

    #[test]
    fn a_link_in_a_subdirectory_is_relative() {
        let mut edits = edits(&["libcuda.so.1"]);
        edits.links = vec![DevLink {
            name: "gbm/x.so".into(),
            target: "libcuda.so.1".into(),
        }];
        let steps = texts(&edits, false);
        assert!(
            steps.contains(
                &"link \"/usr/lib64/gbm/x.so\" to \"../libcuda.so.1\" in the container".to_owned()
            ),
            "{steps:?}"
        );
    }

    #[test]
    fn a_link_that_the_host_has_too_is_created_once() {
        let steps = texts(&edits(&["libcuda.so", "libcuda.so.1"]), false);
        let links: Vec<_> = steps
            .iter()
            .filter(|step| step.starts_with("link"))
            .collect();
        assert_eq!(links.len(), 2, "{links:?}");
        assert!(
            links[1].contains("libcuda.so\" to \"libcuda.so.1\""),
            "{links:?}"
        );
    }
}
