//! Converts edits to the container edits of a CDI spec.
//!
//! A spec is independent of containers, so libraries have the paths of the host in it, and programs find them through the linker cache.
//! If the image is known, libraries have the same paths as those that the hook mounts.

use std::path::{Path, PathBuf};

use base::paths::{ContainerPath, HostPath};
use cdi_spec::spec::{ContainerEdits, DeviceNode, Hook, Mount};

use super::entry::RootfsEdits;
use crate::config::NodeAccess;
use crate::driver::ipc::Expected;
use crate::driver::ldcache::Arch;
use crate::edits::placement::{self, Link, Loader, RootfsFacts};
use crate::edits::{self, DevLink, Edits, HostFile, Need, Placement};
use crate::timeouts;

/// What the conversion needs to know about the host.
#[derive(Clone, Debug)]
pub struct SpecContext {
    /// The real path of the driver root
    pub driver_root: HostPath,
    /// The host's /proc/driver/nvidia
    pub proc_dir: Option<HostPath>,
    /// The program that hook entries execute
    pub program: HostPath,
    /// Whether to add the groups of the nodes to the processes of containers
    pub additional_gids: bool,
    /// Which processes can open nodes that belong to a group on the host
    pub node_access: NodeAccess,
    /// The properties of the image; `None` for a CDI spec
    pub image: Option<RootfsFacts>,
}

/// The environment of hook entries. It must not be empty: runc before 1.3 would pass the environment of the container, including
/// LD_PRELOAD (CVE-2025-23266).
const HOOK_ENV: &str = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";
/// The options that nvidia-ctk writes. With `rprivate`, mounts do not propagate from or to the host.
const FILE_OPTIONS: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
/// The options for a directory in which clients may create a socket.
const DIRECTORY_OPTIONS: [&str; 5] = ["nosuid", "nodev", "rbind", "rprivate", "noexec"];
/// The options for sockets, and for directories that programs only read, as in [`base::sys::mount::MountAttrs::READ_ONLY`].
/// On a read-only mount connect(2) works and chmod(2) fails.
const READ_ONLY_OPTIONS: [&str; 6] = ["ro", "nosuid", "nodev", "rbind", "rprivate", "noexec"];

/// Converts edits. `more` is added to the arguments of the hook entry.
#[must_use]
pub fn lower(edits: &Edits, host: &SpecContext, more: RootfsEdits) -> ContainerEdits {
    let mut lowered = lower_for_engine(edits, host);
    lowered
        .hooks
        .extend(hook(&more.merge(rootfs_edits(edits, host)), host));
    lowered
}

/// Converts what an engine does itself.
#[must_use]
pub fn lower_for_engine(edits: &Edits, host: &SpecContext) -> ContainerEdits {
    let mut lowered = ContainerEdits::default();
    for file in &edits.files {
        if let Some(dir) = directory(file, host)
            && let Some(path) = dir.join(&file.name)
        {
            let mount = mount(&file.source, &path, &FILE_OPTIONS);
            lowered.mounts.extend(mount);
        }
    }
    for ipc in &edits.ipc {
        // An engine mounts a path without a check. Files that another user can replace are left to the hook, which checks them.
        if !ipc.is_fixed {
            continue;
        }
        let options: &[&str] = match ipc.channel.expected {
            Expected::MpsDirectory => continue,
            Expected::Socket | Expected::ReadOnlyDirectory => &READ_ONLY_OPTIONS,
            Expected::Directory | Expected::NamedDirectory => &DIRECTORY_OPTIONS,
        };
        let mount = mount(&ipc.source, &ipc.path, options);
        lowered.mounts.extend(mount);
    }
    for node in &edits.nodes {
        let lowered_node = device_node(node, host.node_access);
        lowered.device_nodes.extend(lowered_node);
        if host.additional_gids {
            let gid = node.permissions.additional_gid();
            lowered.additional_gids.extend(gid);
        }
    }
    lowered
}

/// Returns the changes that the engine cannot make.
#[must_use]
pub fn rootfs_edits(edits: &Edits, host: &SpecContext) -> RootfsEdits {
    let mut rest = RootfsEdits {
        egl_devices: edits.egl_devices,
        ..RootfsEdits::default()
    };
    for ipc in &edits.ipc {
        // The entry finds the directory of an MPS daemon itself, with the state of the daemon at the start.
        if !ipc.is_fixed && ipc.channel.expected != Expected::MpsDirectory {
            rest.channels.insert(ipc.channel.clone());
        }
    }
    // Without a known image, libraries are not in the directories that the image searches.
    let unknown = host.image.is_none();
    // The links are computed as usual, with each file in the directory that it has here.
    let (links, node_links) = (edits.links.clone(), edits.node_links.clone());
    let mut placed = Edits {
        links,
        node_links,
        ..Edits::default()
    };
    for file in &edits.files {
        let Some(dir) = directory(file, host) else {
            continue;
        };
        add_library(&mut rest, file, &dir, host);
        placed.files.push(HostFile {
            placement: Placement::At(dir),
            ..file.clone()
        });
    }
    for Link {
        link, text, need, ..
    } in placement::links(&placed, RootfsFacts::default())
    {
        // gbm/nvidia-drm_gbm.so
        let is_below = |dev: &&DevLink| {
            Path::new(&dev.name).components().count() > 1 && link.relative().ends_with(&dev.name)
        };
        if unknown && let Some(dev) = edits.links.iter().find(is_below) {
            rest.below.insert(PathBuf::from(&dev.name), link.clone());
        }
        if need == Need::Required {
            rest.required.insert(link.clone());
        }
        rest.links.insert(link, text.into());
    }
    if let Some(mask) = &edits.proc_mask {
        rest.mask = host.proc_dir.clone();
        rest.shown.extend(mask.mounts.iter().cloned());
    }
    rest
}

/// Adds what the linker cache and `ldconfig` do not find without the hook: the libraries in `dir`.
fn add_library(rest: &mut RootfsEdits, file: &HostFile, dir: &ContainerPath, host: &SpecContext) {
    let reads_cache = host.image.is_none_or(|image| image.loader == Loader::Glibc);
    match &file.placement {
        Placement::Library(arch) if reads_cache => {
            for soname in &file.sonames {
                if let Some(path) = dir.join(soname) {
                    rest.libraries.insert((*arch, path));
                }
            }
        }
        Placement::LibraryBelow(arch, below) if host.image.is_none() && *arch == Arch::native() => {
            for name in file.sonames.iter().chain([&file.name]) {
                if let Some(path) = dir.join(name) {
                    rest.below.insert(Path::new(below).join(name), path);
                }
            }
        }
        _ => {}
    }
}

/// The stage of the hook entry. At createContainer, root in a user namespace may lack access to the bundle, which Podman 5.0 and newer
/// keep below a directory of the host's root. crun cannot start any hook at that stage then.
pub const STAGE: &str = "createRuntime";

/// Returns the hook entry that makes these changes, or `None` if there are none.
#[must_use]
pub fn hook(rest: &RootfsEdits, host: &SpecContext) -> Option<Hook> {
    Some(Hook {
        hook_name: STAGE.to_owned(),
        path: host.program.as_path().to_str()?.to_owned(),
        args: rest.to_args()?,
        env: vec![HOOK_ENV.to_owned()],
        timeout: i64::try_from(timeouts::HOOK.as_secs()).ok(),
    })
}

fn directory(file: &HostFile, host: &SpecContext) -> Option<ContainerPath> {
    if let Some(image) = host.image {
        return placement::directory(image, &file.placement).map(|(dir, _)| dir);
    }
    match &file.placement {
        Placement::Library(arch) => {
            let dir = source_dir(file, host)?;
            // In images with one library directory, /usr/lib is the directory of the native libraries.
            if *arch != Arch::native() && is_usr_lib(&dir) {
                return ContainerPath::new("usr/lib32");
            }
            Some(dir)
        }
        Placement::LibraryBelow(_, name) => {
            let dir = source_dir(file, host)?;
            if dir.relative().ends_with(name) {
                return Some(dir);
            }
            // Debian's alternatives: vdpau/libvdpau_nvidia.so.1 of the library directory leads to nvidia/current.
            match dir.parent() {
                Some(above) if above.file_name() == "nvidia" => {
                    above.parent().unwrap_or(dir).join(name)
                }
                _ => dir.join(name),
            }
        }
        Placement::Binary => ContainerPath::new("usr/bin"),
        Placement::At(dir) => Some(dir.clone()),
    }
}

fn is_usr_lib(dir: &ContainerPath) -> bool {
    let dir = dir.relative();
    dir == Path::new("usr/lib") || dir == Path::new("lib")
}

/// Returns the directory in which the host has a library, below the driver root.
fn source_dir(file: &HostFile, host: &SpecContext) -> Option<ContainerPath> {
    let below = file
        .source
        .as_path()
        .strip_prefix(host.driver_root.as_path())
        .ok()?;
    ContainerPath::new(below.parent()?)
}

fn mount(source: &HostPath, target: &ContainerPath, options: &[&str]) -> Option<Mount> {
    Some(Mount {
        host_path: source.as_path().to_str()?.to_owned(),
        container_path: target.absolute().to_str()?.to_owned(),
        options: options.iter().map(|option| (*option).to_owned()).collect(),
        // Without a type, crun up to 1.28 crashes in pods with a user namespace (`init_container` compares the types of all mounts).
        kind: Some("bind".to_owned()),
    })
}

/// Converts a device node. The type is omitted, so that the engine checks that the host still has the node. An owner or group 0 is
/// omitted too: the container's user then owns the node and can open it without being a member of a group.
///
/// The group of a node does not help a process that leaves root (gosu, `podman exec --user`): it has no additional groups. Runtimes
/// create the node with `fileMode`, regardless of their umask, and the device cgroup decides about the device.
#[must_use]
pub fn device_node(node: &edits::DeviceNode, access: NodeAccess) -> Option<DeviceNode> {
    let path = node.path.absolute();
    let is_for_all = access == NodeAccess::Container && node.permissions.is_for_a_group();
    let mode = if is_for_all {
        node.permissions.mode_for_all()
    } else {
        node.permissions.mode
    };
    let not_zero = |number: u32| Some(number).filter(|number| *number != 0);
    Some(DeviceNode {
        path: path.to_str()?.to_owned(),
        host_path: if path == node.source.as_path() {
            None
        } else {
            node.source.as_path().to_str().map(str::to_owned)
        },
        kind: None,
        major: Some(node.major.into()),
        minor: Some(node.minor.into()),
        file_mode: not_zero(mode),
        permissions: Some("rw".to_owned()),
        uid: not_zero(node.permissions.uid),
        gid: not_zero(node.permissions.gid),
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::{OsStr, OsString};

    use super::*;
    use crate::driver::access::Permissions;

    fn host() -> SpecContext {
        SpecContext {
            driver_root: HostPath::new("/"),
            proc_dir: Some(HostPath::new("/proc/driver/nvidia")),
            program: HostPath::new("/usr/bin/oci-nvidia-hook"),
            additional_gids: false,
            node_access: NodeAccess::Host,
            image: None,
        }
    }

    fn file_in(dir: &str, name: &str, placement: u8, soname: Option<&str>) -> HostFile {
        HostFile {
            source: HostPath::new(format!("/{dir}/{name}")),
            placement: match placement {
                0 => Placement::Library(Arch::native()),
                1 => Placement::LibraryBelow(Arch::native(), "vdpau"),
                2 => Placement::Binary,
                _ => Placement::At(ContainerPath::new("etc/x").unwrap()),
            },
            name: name.into(),
            sonames: soname
                .map(OsString::from)
                .filter(|_| placement < 2)
                .into_iter()
                .collect(),
            need: Need::Optional,
        }
    }

    #[test]
    fn libraries_go_where_the_host_has_them_below_the_driver_root() {
        let host = SpecContext {
            driver_root: HostPath::new("/run/nvidia/driver"),
            ..host()
        };
        let library = file_in(
            "run/nvidia/driver/usr/lib64",
            "libcuda.so.535",
            0,
            Some("libcuda.so.1"),
        );
        let beside = file_in("run/nvidia/driver-old/usr/lib64", "libx.so.535", 0, None);
        let edits = Edits {
            files: vec![library, beside],
            ..Edits::default()
        };
        let lowered = lower(
            &edits,
            &host,
            RootfsEdits {
                stamp: Some("s".into()),
                ..RootfsEdits::default()
            },
        );
        let mounts: Vec<_> = lowered
            .mounts
            .iter()
            .map(|mount| mount.container_path.as_str())
            .collect();
        assert_eq!(
            mounts,
            ["/usr/lib64/libcuda.so.535"],
            "what is not below the driver root is none of its files"
        );
        assert_eq!(lowered.mounts[0].options, FILE_OPTIONS);
        let args = [
            "--stamp",
            "s",
            "--link",
            "libcuda.so.535::/usr/lib64/libcuda.so.1",
            "--library",
        ];
        assert_eq!(lowered.hooks[0].args[2..7], args);
    }

    /// Programs open VDPAU's library in `vdpau` below the library directory, also if it is elsewhere on the host.
    #[test]
    fn libraries_that_are_opened_by_path() {
        for (dir, expected) in [
            (
                "usr/lib/x86_64-linux-gnu/nvidia/current",
                "/usr/lib/x86_64-linux-gnu/vdpau",
            ),
            (
                "usr/lib/x86_64-linux-gnu/vdpau",
                "/usr/lib/x86_64-linux-gnu/vdpau",
            ),
            ("usr/lib64", "/usr/lib64/vdpau"),
        ] {
            let file = file_in(
                dir,
                "libvdpau_nvidia.so.535",
                1,
                Some("libvdpau_nvidia.so.1"),
            );
            let edits = Edits {
                files: vec![file],
                ..Edits::default()
            };
            let mounted = &lower(&edits, &host(), RootfsEdits::default()).mounts[0].container_path;
            assert_eq!(
                *mounted,
                format!("{expected}/libvdpau_nvidia.so.535"),
                "{dir}"
            );
            let rest = rootfs_edits(&edits, &host());
            let link = ContainerPath::new(format!("{expected}/libvdpau_nvidia.so.1")).unwrap();
            assert_eq!(
                rest.links.get(&link).map(PathBuf::as_path),
                Some(Path::new("libvdpau_nvidia.so.535")),
                "{dir}"
            );
            assert_eq!(
                rest.below.get(Path::new("vdpau/libvdpau_nvidia.so.1")),
                Some(&link),
                "{dir}"
            );
        }
    }

    /// An image with another library directory needs them in the same place below that one.
    #[test]
    fn libraries_two_directories_below() {
        let mut file = file_in("usr/lib64/nvidia/wine", "nvngx.dll", 1, None);
        file.placement = Placement::LibraryBelow(Arch::native(), "nvidia/wine");
        let rest = rootfs_edits(
            &Edits {
                files: vec![file],
                ..Edits::default()
            },
            &host(),
        );
        let path = ContainerPath::new("usr/lib64/nvidia/wine/nvngx.dll").unwrap();
        assert_eq!(
            rest.below.into_iter().collect::<Vec<_>>(),
            [(PathBuf::from("nvidia/wine/nvngx.dll"), path)]
        );
    }

    #[test]
    fn nodes_of_a_group() {
        let node = edits::DeviceNode {
            source: HostPath::new("/dev/nvidia0"),
            path: ContainerPath::new("dev/nvidia0").unwrap(),
            major: 195,
            minor: 0,
            permissions: Permissions {
                mode: 0o660,
                uid: 0,
                gid: 44,
            },
        };
        let edits = Edits {
            nodes: vec![node],
            ..Edits::default()
        };
        let lowered = |additional_gids| {
            lower(
                &edits,
                &SpecContext {
                    additional_gids,
                    ..host()
                },
                RootfsEdits::default(),
            )
        };
        assert!(lowered(false).additional_gids.is_empty());
        assert_eq!(lowered(true).additional_gids, [44]);
        let node = &lowered(false).device_nodes[0];
        assert_eq!(
            (node.file_mode, node.uid, node.gid, &node.host_path),
            (Some(0o660), None, Some(44), &None)
        );
        assert!(OsStr::new(&node.path) == "/dev/nvidia0");
        let for_all = SpecContext {
            node_access: NodeAccess::Container,
            ..host()
        };
        let node = &lower(&edits, &for_all, RootfsEdits::default()).device_nodes[0];
        assert_eq!(
            (node.file_mode, node.uid, node.gid),
            (Some(0o666), None, Some(44))
        );
    }
}
