//! Lowers the arguments of the hook's entry in a CDI spec to the steps that the engine cannot do: links, the linker cache, and
//! the mask of /proc/driver/nvidia. Pure.

use std::ffi::OsString;
use std::path::Path;

use base::paths::{ContainerPath, HostPath};
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::driver::ldcache::Arch;
use nvidia_host::edits::placement::{Link, RootfsFacts, has_no_dir, is_same_dir, library_dir};
use nvidia_host::edits::{Need, ProcMask};

use super::step::{CacheEntry, Step};
use super::steps;

/// Returns the steps in the order in which they must run. `proc_files` are the files of the mask with their content.
pub(crate) fn steps(
    edits: &RootfsEdits,
    facts: RootfsFacts,
    proc_files: Vec<(OsString, Vec<u8>)>,
) -> Vec<Step> {
    let mut steps = links(edits, facts);
    for channel in &edits.channels {
        let Some(target) = ContainerPath::new(&channel.path) else {
            continue;
        };
        let below = channel.path.strip_prefix("/").unwrap_or(&channel.path);
        steps.push(Step::MountIpc {
            channel: channel.clone(),
            source: HostPath::new(channel.root.as_path().join(below)),
            target,
        });
    }
    if edits.mask.is_some() {
        steps.push(Step::MaskProc(ProcMask {
            files: proc_files,
            mounts: edits.shown.clone().into_iter().collect(),
        }));
    }
    steps.extend(steps::egl_profile(edits.egl_devices));
    let mut entries = Vec::new();
    for (arch, path) in &edits.libraries {
        entries.push(CacheEntry {
            soname: path.file_name().to_owned(),
            path: path.clone(),
            arch: *arch,
        });
    }
    steps.extend(steps::linker_steps(entries, facts));
    steps
}

/// Returns the links: required ones first, because they make the hook cover a directory on a volume, and optional ones then find the
/// layer.
fn links(edits: &RootfsEdits, facts: RootfsFacts) -> Vec<Step> {
    let (mut required, mut optional) = (Vec::new(), Vec::new());
    for (link, text) in &edits.links {
        let (list, need) = if edits.required.contains(link) {
            (&mut required, Need::Required)
        } else {
            (&mut optional, Need::Optional)
        };
        list.push(Step::Link(Link {
            link: link.clone(),
            text: text.clone().into(),
            file: file_of(edits, link),
            need,
        }));
    }
    // Loaders that do not read the linker cache, such as musl's in Plex, search only the image's library directory.
    for (arch, path) in &edits.libraries {
        if has_no_dir(facts, *arch) {
            continue;
        }
        let dir = ContainerPath::new(library_dir(facts, *arch));
        let Some(link) = dir.and_then(|dir| dir.join(path.file_name())) else {
            continue;
        };
        if !is_same_dir(facts, &link, path) {
            optional.push(Step::Link(Link {
                link,
                text: path.absolute().into(),
                file: file_of(edits, path),
                need: Need::Optional,
            }));
        }
    }
    // Programs search the image's library directory, which may be the host's too.
    if let Some(dir) = ContainerPath::new(library_dir(facts, Arch::native())) {
        for (name, path) in &edits.below {
            let Some(link) = dir.join(name) else {
                continue;
            };
            if link != *path {
                optional.push(Step::Link(Link {
                    link,
                    text: path.absolute().into(),
                    file: file_of(edits, path),
                    need: Need::Optional,
                }));
            }
        }
    }
    required.extend(optional);
    required
}

/// Returns the file that a link leads to, across the other links of the edits.
fn file_of(edits: &RootfsEdits, link: &ContainerPath) -> ContainerPath {
    let mut file = link.clone();
    // A chain is libcuda.so, libcuda.so.1, libcuda.so.535; the limit ends a cycle.
    for _ in 0..8 {
        let Some(next) = edits
            .links
            .get(&file)
            .and_then(|text| link_target(&file, text))
        else {
            break;
        };
        file = next;
    }
    file
}

/// Resolves the text of a link without the file system.
fn link_target(link: &ContainerPath, text: &Path) -> Option<ContainerPath> {
    let mut dir = link.parent();
    let mut rest = text;
    while let Ok(more) = rest.strip_prefix("..") {
        dir = dir?.parent();
        rest = more;
    }
    dir?.join(rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvidia_host::edits::placement::Compat32;

    fn parsed(args: &[&str]) -> anyhow::Result<RootfsEdits> {
        RootfsEdits::parse(args.iter().map(OsString::from).collect())
    }

    const ARGS: [&str; 14] = [
        "--link",
        "libcuda.so.1::/usr/lib64/libcuda.so",
        "--link",
        "libcuda.so.535::/usr/lib64/libcuda.so.1",
        "--link",
        "../libcuda.so.1::/usr/lib64/gbm/x.so",
        "--library",
        "/usr/lib64/libcuda.so.1",
        "--mask-proc",
        "/proc/driver/nvidia",
        "--show-proc",
        "/proc/driver/nvidia/gpus/0000:01:00.0::gpus/0000:01:00.0",
        "--egl-devices",
        "0x5",
    ];

    #[test]
    fn steps_of_arguments() {
        let edits = parsed(&ARGS).unwrap();
        let files = vec![("params".into(), b"x".to_vec())];
        let steps = super::steps(&edits, RootfsFacts::default(), files.clone());
        let texts: Vec<_> = steps.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "link \"/usr/lib64/gbm/x.so\" to \"../libcuda.so.1\" in the container",
                "link \"/usr/lib64/libcuda.so\" to \"libcuda.so.1\" in the container",
                "link \"/usr/lib64/libcuda.so.1\" to \"libcuda.so.535\" in the container",
                "mask \"/proc/driver/nvidia\" in the container",
                "mount a directory of the hook at \"/etc/nvidia/nvidia-application-profiles-rc.d\" in the container",
                "update \"/etc/ld.so.cache\" in the container",
            ]
        );
        for step in &steps {
            match step {
                Step::Link(Link { file, .. }) => {
                    assert_eq!(file.absolute(), Path::new("/usr/lib64/libcuda.so.535"))
                }
                Step::MaskProc(mask) => assert_eq!((&mask.files, mask.mounts.len()), (&files, 1)),
                _ => {}
            }
        }
    }

    #[test]
    fn files_are_linked_in_the_image_library_directory() {
        let edits = parsed(&[
            "--below",
            "vdpau/x.so.1::/usr/lib64/vdpau/x.so.1",
            "--link",
            "x.so.5::/usr/lib64/vdpau/x.so.1",
        ]);
        let steps = |debian| {
            super::steps(
                edits.as_ref().unwrap(),
                RootfsFacts {
                    debian,
                    ..RootfsFacts::default()
                },
                vec![],
            )
        };
        assert_eq!(steps(false).len(), 1, "alike");
        let dir = library_dir(
            RootfsFacts {
                debian: true,
                ..RootfsFacts::default()
            },
            Arch::native(),
        );
        let link = ContainerPath::new(dir)
            .unwrap()
            .join("vdpau/x.so.1")
            .unwrap();
        let text = "/usr/lib64/vdpau/x.so.1".into();
        let file = ContainerPath::new("/usr/lib64/vdpau/x.so.5").unwrap();
        assert_eq!(
            steps(true)[1],
            Step::Link(Link {
                link,
                text,
                file,
                need: Need::Optional
            })
        );
    }

    /// As in hook mode, a loader that does not read the cache finds the libraries in the image's directory.
    #[test]
    fn sonames_are_linked_in_the_image_library_directory() {
        let of = |path: &str, facts: RootfsFacts| {
            let link = format!("libcuda.so.535::{path}");
            let edits = parsed(&["--link", &link, "--library", path]).unwrap();
            let steps = super::steps(&edits, facts, vec![]);
            let links = steps.iter().filter_map(|step| match step {
                Step::Link(Link {
                    link, text, file, ..
                }) => {
                    assert!(file.absolute().ends_with("libcuda.so.535"));
                    Some(format!(
                        "{} -> {}",
                        link.absolute().display(),
                        text.display()
                    ))
                }
                _ => None,
            });
            links.skip(1).collect::<Vec<_>>()
        };
        let redhat = RootfsFacts::default();
        let arch = RootfsFacts {
            merged: true,
            compat32: Compat32::Lib32,
            ..redhat
        };
        let debian = RootfsFacts {
            debian: true,
            ..redhat
        };
        let native = library_dir(debian, Arch::native());
        let on_debian = format!("/{native}/libcuda.so.1");
        for (path, facts, links) in [
            ("/usr/lib64/libcuda.so.1", redhat, vec![]),
            ("/usr/lib64/libcuda.so.1", arch, vec![]),
            ("/usr/lib/libcuda.so.1", arch, vec![]),
            (
                "/usr/lib/libcuda.so.1",
                redhat,
                vec!["/usr/lib64/libcuda.so.1 -> /usr/lib/libcuda.so.1".to_owned()],
            ),
            (
                "/usr/lib64/libcuda.so.1",
                debian,
                vec![format!("{on_debian} -> /usr/lib64/libcuda.so.1")],
            ),
            (&on_debian, debian, vec![]),
            (
                &on_debian,
                arch,
                vec![format!("/usr/lib64/libcuda.so.1 -> {on_debian}")],
            ),
        ] {
            assert_eq!(of(path, facts), links, "{path} {facts:?}");
        }
    }

    #[test]
    fn required_links_come_first() {
        let edits = parsed(&["--link", "b::/a", "--required-link", "d::/c"]).unwrap();
        let steps = super::steps(&edits, RootfsFacts::default(), vec![]);
        assert_eq!(
            steps.iter().map(Step::need).collect::<Vec<_>>(),
            [Need::Required, Need::Optional]
        );
        assert!(
            steps[0].to_string().starts_with("link \"/c\""),
            "{}",
            steps[0]
        );
    }

    #[test]
    fn a_cycle_of_links_ends() {
        let edits = parsed(&["--link", "b::/a", "--link", "a::/b"]).unwrap();
        assert_eq!(
            super::steps(&edits, RootfsFacts::default(), vec![]).len(),
            2
        );
    }
}
