//! Gathers which engine the kubelet uses, and whether it reads the hook's file.

use std::fmt;
use std::path::{Path, PathBuf};

use toml::de::DeTable;

/// The sockets of engines, in the order in which they are considered: that of K3s and RKE2 belongs to their own containerd, and CRI-O
/// is used by nothing but Kubernetes, while Docker uses containerd too.
pub(super) const K3S: &str = "/run/k3s/containerd/containerd.sock";
pub(super) const CRIO: &str = "/run/crio/crio.sock";
pub(super) const CONTAINERD: &str = "/run/containerd/containerd.sock";
const SOCKETS: [&str; 3] = [K3S, CRIO, CONTAINERD];

/// The directory that CRI-O reads unless its configuration names others.
const HOOKS_DIR: &str = "/usr/share/containers/oci/hooks.d";
/// The name of the hook's file.
const HOOK_FILE: &str = "oci-nvidia-hook.json";
const CRIO_CONF: &str = "/etc/crio/crio.conf";
const CRIO_CONF_DIR: &str = "/etc/crio/crio.conf.d";
/// The size limit of a configuration file in bytes.
const MAX_SIZE: usize = 1 << 20;

/// What the choice depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// The socket of the engine in the kubelet's configuration, if that can be read
    pub(super) endpoint: Option<String>,
    /// The sockets that exist
    pub(super) sockets: Vec<&'static str>,
    /// The hook's file in a directory that CRI-O reads
    pub(super) hook_file: Option<PathBuf>,
}

/// The engine of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Engine {
    Crio,
    Containerd,
    /// Another one, with its socket
    Other(String),
}

impl Engine {
    fn at(socket: &str) -> Self {
        match socket {
            _ if socket.contains("crio") => Self::Crio,
            _ if socket.contains("containerd") => Self::Containerd,
            _ => Self::Other(socket.to_owned()),
        }
    }

    pub(super) const fn reads_hooks(&self) -> bool {
        matches!(self, Self::Crio)
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Crio => f.write_str("CRI-O"),
            Self::Containerd => f.write_str("containerd"),
            Self::Other(socket) => write!(f, "the engine at {socket:?}"),
        }
    }
}

impl Facts {
    /// Reads them below `root`.
    pub(super) fn gather(root: &Path, kubelet_dir: &Path) -> Self {
        let below = |path: &str| root.join(path.trim_start_matches('/'));
        let config = read(&kubelet_dir.join("config.yaml"));
        let hook_dirs = hook_dirs(&crio_files(root));
        let files = hook_dirs.into_iter().map(|dir| Path::new(&dir).join(HOOK_FILE));
        Self {
            endpoint: config.as_deref().and_then(endpoint_in),
            sockets: SOCKETS.into_iter().filter(|socket| exists(&below(socket))).collect(),
            hook_file: files.into_iter().find(|file| exists(&below(&file.to_string_lossy()))),
        }
    }

    /// Returns the engine that the kubelet uses.
    pub(super) fn engine(&self) -> Option<Engine> {
        let endpoint = self.endpoint.as_deref().map(|endpoint| endpoint.trim_start_matches("unix://"));
        endpoint.or_else(|| self.sockets.first().copied()).map(Engine::at)
    }
}

/// Returns the socket of the engine from the kubelet's configuration.
fn endpoint_in(config: &str) -> Option<String> {
    let config = cdi_spec::yaml::parse(config).ok()?;
    let endpoint = config.get("containerRuntimeEndpoint")?.as_str()?;
    (!endpoint.is_empty()).then(|| endpoint.to_owned())
}

/// Returns the texts of CRI-O's configuration files, by ascending priority.
fn crio_files(root: &Path) -> Vec<String> {
    let below = |path: &str| root.join(path.trim_start_matches('/'));
    let entries = std::fs::read_dir(below(CRIO_CONF_DIR)).into_iter().flatten().flatten();
    let mut drop_ins: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    drop_ins.sort();
    std::iter::once(below(CRIO_CONF)).chain(drop_ins).filter_map(|file| read(&file)).collect()
}

/// Returns the directories from which CRI-O reads hook files. A later file replaces the list.
fn hook_dirs(files: &[String]) -> Vec<String> {
    files.iter().rev().find_map(|file| hooks_dir_in(file)).unwrap_or_else(|| vec![HOOKS_DIR.to_owned()])
}

fn hooks_dir_in(file: &str) -> Option<Vec<String>> {
    let parsed = DeTable::parse(file).ok()?;
    let crio = parsed.get_ref().get("crio")?.get_ref().as_table()?;
    let runtime = crio.get("runtime")?.get_ref().as_table()?;
    let dirs = runtime.get("hooks_dir")?.get_ref().as_array()?;
    Some(dirs.iter().filter_map(|dir| dir.get_ref().as_str()).map(str::to_owned).collect())
}

fn exists(path: &Path) -> bool {
    std::fs::metadata(path).is_ok()
}

fn read(path: &Path) -> Option<String> {
    let bytes = base::read::read_limited(std::fs::File::open(path).ok()?, MAX_SIZE).ok()?;
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn what_is_gathered() {
        let dir = tempfile::tempdir().unwrap();
        let (root, kubelet) = (dir.path(), dir.path().join("kubelet"));
        assert_eq!(Facts::gather(root, &kubelet), Facts::default());
        write(root, "run/containerd/containerd.sock", "");
        write(root, "run/crio/crio.sock", "");
        write(root, "opt/hooks/oci-nvidia-hook.json", "{}");
        let facts = Facts::gather(root, &kubelet);
        assert_eq!((facts.sockets.as_slice(), &facts.hook_file), (&[CRIO, CONTAINERD][..], &None));
        write(root, "etc/crio/crio.conf", "[crio.runtime]\nhooks_dir = [\"/a\", \"/opt/hooks\"]\n");
        let ours = PathBuf::from("/opt/hooks/oci-nvidia-hook.json");
        assert_eq!(Facts::gather(root, &kubelet).hook_file, Some(ours.clone()));
        write(root, "etc/crio/crio.conf.d/10-runtime", "[crio.runtime]\ndefault_runtime = \"crun\"\n");
        assert_eq!(Facts::gather(root, &kubelet).hook_file, Some(ours));
        write(root, "etc/crio/crio.conf.d/20-hooks.conf", "[crio.runtime]\nhooks_dir = []\n");
        assert_eq!(Facts::gather(root, &kubelet).hook_file, None);
        std::fs::remove_dir_all(root.join("etc")).unwrap();
        write(root, "usr/share/containers/oci/hooks.d/oci-nvidia-hook.json", "{}");
        assert!(Facts::gather(root, &kubelet).hook_file.is_some());
        write(
            root,
            "kubelet/config.yaml",
            "kind: KubeletConfiguration\ncontainerRuntimeEndpoint: unix:///run/x.sock\n",
        );
        let facts = Facts::gather(root, &kubelet);
        assert_eq!(facts.engine(), Some(Engine::Other("/run/x.sock".to_owned())));
        for broken in ["containerRuntimeEndpoint: \"\"\n", "a: [", "- 1\n", "containerRuntimeEndpoint: 3\n"] {
            write(root, "kubelet/config.yaml", broken);
            assert_eq!(Facts::gather(root, &kubelet).engine(), Some(Engine::Crio), "{broken}");
        }
    }
}
