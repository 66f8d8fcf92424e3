//! Reads the names of containers from containers/storage, which Podman and CRI-O use, and from Docker's files.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use base::sys::guarded;

use crate::oci::spec_view::Mount;

/// Upper limit for a file in bytes, enough for a list of thousands of containers.
const MAX_FILE: usize = 16 << 20;

/// A container in such a list.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Listed {
    /// 64 hex digits
    pub id: String,
    /// The name that Podman assigns, or CRI-O's name of several parts
    #[serde(default)]
    pub names: Vec<String>,
    #[serde(default)]
    pub layer: String,
}

/// Returns the name of the container `id` whose bundle is `<dir>/<id>/userdata`.
pub(crate) fn name_of(id: &str, bundle: &Path) -> Option<String> {
    listed(id, bundle)?.names.into_iter().next()
}

/// Returns the entry of the container in the list next to its bundle.
fn listed(id: &str, bundle: &Path) -> Option<Listed> {
    let containers = read(dir_of(bundle)?);
    containers.into_iter().find(|listed| listed.id == id)
}

/// Reports whether `rootfs` is the layer of the container `id` whose bundle is `<dir>/<id>/userdata`. Each container has its
/// own layer; containers that were started with `--rootfs` may share the directory.
pub(crate) fn has_layer(id: &str, bundle: &Path, rootfs: &Path) -> bool {
    match listed(id, bundle) {
        Some(Listed { layer, .. }) if !layer.is_empty() => {
            rootfs.iter().any(|part| part == layer.as_str())
        }
        _ => false,
    }
}

/// Returns the containers of a directory, including those that do not survive a reboot.
pub(crate) fn read(dir: &Path) -> Vec<Listed> {
    let mut containers = Vec::new();
    for name in ["containers.json", "volatile-containers.json"] {
        let listed: Option<Vec<_>> = read_json(&dir.join(name));
        containers.extend(listed.unwrap_or_default());
    }
    containers
}

/// Returns the directories of bundles, one for each storage driver: of root, or of the user with this home directory.
pub(crate) fn dirs(home: Option<&Path>) -> Vec<PathBuf> {
    let root = match home {
        Some(home) => home.join(".local/share"),
        None => PathBuf::from("/var/lib"),
    };
    ["overlay", "btrfs", "vfs"]
        .map(|driver| root.join(format!("containers/storage/{driver}-containers")))
        .into()
}

/// Returns the directory of all bundles that contains this bundle, `<dir>/<id>/userdata`.
pub(crate) fn dir_of(bundle: &Path) -> Option<&Path> {
    if bundle.file_name()? != "userdata" {
        return None;
    }
    bundle.parent()?.parent()
}

/// Derives the bundle from the sources of the engine's own mounts, because config.json does not contain the container's id.
pub(crate) fn bundle_of(mounts: &[Mount]) -> Option<PathBuf> {
    // The sources may also be below the engine's run root, which has no list of names.
    const OWN: [&str; 4] = [
        "/dev/shm",
        "/run/.containerenv",
        "/etc/hostname",
        "/etc/hosts",
    ];
    for own in OWN {
        for mount in mounts {
            if mount.destination != Path::new(own) {
                continue;
            }
            if let Some(bundle) = mount.source.ancestors().find(|path| is_bundle(path)) {
                return Some(bundle.to_owned());
            }
            break;
        }
    }
    None
}

/// A container in Docker's `config.v2.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct OfDocker {
    /// With a slash before it
    name: String,
}

/// Returns the name of a container of Docker, whose configuration is next to the file that Docker mounts at /etc/hostname.
pub(crate) fn name_in_docker(id: &str, mounts: &[Mount]) -> Option<String> {
    let mut mounts = mounts.iter();
    let hostname = mounts.find(|mount| mount.destination == Path::new("/etc/hostname"))?;
    let dir = hostname.source.parent()?;
    if dir.file_name()? != id {
        return None;
    }
    let container: OfDocker = read_json(&dir.join("config.v2.json"))?;
    Some(container.name.trim_start_matches('/').to_owned())
}

/// Returns whether the path has the form `<dir>/<id>/userdata`.
fn is_bundle(path: &Path) -> bool {
    let id = path.parent().and_then(Path::file_name).unwrap_or_default();
    dir_of(path).is_some()
        && id.len() == 64
        && id.as_encoded_bytes().iter().all(u8::is_ascii_hexdigit)
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let (file, stat) = guarded::open_file(path).ok()?;
    let bytes = base::read::read_known(&file, &stat, MAX_FILE).ok()?;
    serde_json::from_slice(&bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundle_is_derived_from_podmans_mounts() {
        let id = "081aafbe8e6f16108fa4dc01f17182c406dffc9f94a6282a3ff48eaeefb165cb";
        let mount = |source: String, destination: &str| Mount {
            source: source.into(),
            destination: destination.into(),
            ..Mount::default()
        };
        let of = |mounts: &[Mount]| bundle_of(mounts).map(|path| path.display().to_string());
        let hosts = mount(
            format!("/run/x/vfs-containers/{id}/userdata/hosts"),
            "/etc/hosts",
        );
        let shm = mount(
            format!("/var/x/vfs-containers/{id}/userdata/shm"),
            "/dev/shm",
        );
        assert_eq!(
            of(&[hosts.clone(), shm]),
            Some(format!("/var/x/vfs-containers/{id}/userdata"))
        );
        assert_eq!(
            of(&[hosts]),
            Some(format!("/run/x/vfs-containers/{id}/userdata"))
        );
        assert_eq!(
            of(&[
                mount(format!("/x/{id}/userdata/shm"), "/data"),
                mount("/x/ab/userdata".into(), "/dev/shm")
            ]),
            None
        );
    }

    #[test]
    fn docker_has_the_name_next_to_the_host_name() {
        let dir = tempfile::tempdir().unwrap();
        let container = dir.path().join("0a");
        std::fs::create_dir(&container).unwrap();
        let hostname = Mount {
            source: container.join("hostname"),
            destination: "/etc/hostname".into(),
            ..Mount::default()
        };
        let name = |id: &str| name_in_docker(id, std::slice::from_ref(&hostname));
        assert_eq!(name("0a"), None, "no configuration");
        let text = r#"{"ID":"0a","Name":"/web","State":{}}"#;
        std::fs::write(container.join("config.v2.json"), text).unwrap();
        assert_eq!(name("0a").as_deref(), Some("web"));
        assert_eq!(name("1b"), None, "another container");
    }

    #[test]
    fn names_are_in_the_list_next_to_the_bundles() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = dir.path().join("0a/userdata");
        assert_eq!(name_of("0a", &bundle), None);
        std::fs::write(
            dir.path().join("containers.json"),
            r#"[{"id":"1b","names":["other"],"layer":"x"}]"#,
        )
        .unwrap();
        std::fs::write(
            dir.path().join("volatile-containers.json"),
            r#"[{"id":"0a","names":["mine"]},{"id":"2c"}]"#,
        )
        .unwrap();
        assert_eq!(name_of("0a", &bundle).as_deref(), Some("mine"));
        assert_eq!(name_of("2c", &bundle), None);
        assert_eq!(name_of("0a", dir.path()), None, "no such bundle");
        let layer = |id: &str, rootfs: &str| {
            has_layer(id, &dir.path().join(id).join("userdata"), Path::new(rootfs))
        };
        assert!(
            layer("1b", "/storage/vfs/dir/x")
                && !layer("1b", "/storage/vfs/dir/y")
                && !layer("1b", "/xx")
        );
        assert!(!layer("0a", "/storage/vfs/dir/x") && !layer("3d", "/storage/vfs/dir/x"));
        std::fs::write(dir.path().join("containers.json"), "nonsense").unwrap();
        assert_eq!(name_of("0a", &bundle).as_deref(), Some("mine"));
    }
}
