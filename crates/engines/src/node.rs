//! Determines the engine of a Kubernetes node, and whether it starts our hook.

use std::fmt;
use std::path::{Path, PathBuf};

use base::tree::Tree;
use cdi_spec::yaml;

use super::status::{self, EngineStatus};
use super::{hooks, inspect};

/// The sockets of engines, in the order in which they are considered: that of K3s and RKE2 belongs to their own containerd, and CRI-O
/// is used by nothing but Kubernetes, while Docker uses containerd too.
const SOCKETS: [&str; 3] = [
    "/run/k3s/containerd/containerd.sock",
    inspect::CRIO_SOCKET,
    "/run/containerd/containerd.sock",
];

/// The engine of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeEngine {
    /// CRI-O, and whether it starts our hook
    Crio(Box<EngineStatus>),
    /// containerd, which reads no hook files
    Containerd,
    /// Another one, with its socket
    Other(String),
}

/// The engine of a node and our hook files, as far as this process sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// `None` if neither the kubelet's configuration nor a socket shows an engine
    pub engine: Option<NodeEngine>,
    /// Our hook files, including those that no engine reads
    pub installed: Vec<PathBuf>,
}

impl fmt::Display for NodeEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Crio(_) => f.write_str("CRI-O"),
            Self::Containerd => f.write_str("containerd"),
            Self::Other(socket) => write!(f, "the engine at {socket:?}"),
        }
    }
}

impl Node {
    /// Inspects the node whose root directory is `host`. `kubelet_dir` is the directory of the kubelet on this machine, whose
    /// configuration names the socket of the engine.
    #[must_use]
    pub fn inspect(host: &Tree, kubelet_dir: &Path) -> Self {
        let installed = hooks::installed(host);
        let config = host.read(&kubelet_dir.join("config.yaml")).ok();
        let endpoint = config.and_then(|bytes| endpoint_in(&String::from_utf8_lossy(&bytes)));
        let socket = endpoint.or_else(|| first_socket(host));
        let engine =
            socket.map(|socket| engine_at(socket.trim_start_matches("unix://"), host, &installed));
        Self { engine, installed }
    }
}

fn first_socket(host: &Tree) -> Option<String> {
    SOCKETS
        .iter()
        .find(|socket| host.locate(Path::new(socket)).is_ok())
        .map(|socket| (*socket).to_owned())
}

fn engine_at(socket: &str, host: &Tree, installed: &[PathBuf]) -> NodeEngine {
    match socket {
        _ if socket.contains("crio") => NodeEngine::Crio(Box::new(status::judge(
            &inspect::crio_of_node(host),
            installed,
        ))),
        _ if socket.contains("containerd") => NodeEngine::Containerd,
        _ => NodeEngine::Other(socket.to_owned()),
    }
}

/// Returns the socket of the engine from the kubelet's configuration.
fn endpoint_in(config: &str) -> Option<String> {
    let config = yaml::parse(config).ok()?;
    let endpoint = config.get("containerRuntimeEndpoint")?.as_str()?;
    (!endpoint.is_empty()).then(|| endpoint.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn engine(root: &Path) -> Option<NodeEngine> {
        let host = Tree::open(&HostPath::new(root)).unwrap();
        Node::inspect(&host, Path::new("/var/lib/kubelet")).engine
    }

    fn name(engine: Option<NodeEngine>) -> String {
        engine.map(|engine| engine.to_string()).unwrap_or_default()
    }

    #[test]
    fn the_engine_of_the_kubelet() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert_eq!(engine(root), None);
        write(root, "run/containerd/containerd.sock", "");
        assert_eq!(engine(root), Some(NodeEngine::Containerd));
        write(root, "run/crio/crio.sock", "");
        assert_eq!(name(engine(root)), "CRI-O", "Docker uses containerd too");
        write(root, "run/k3s/containerd/containerd.sock", "");
        assert_eq!(
            engine(root),
            Some(NodeEngine::Containerd),
            "K3s has its own containerd"
        );
        let config = "var/lib/kubelet/config.yaml";
        for (endpoint, expected) in [
            ("unix:///run/crio/crio.sock", "CRI-O"),
            ("/var/run/crio/crio.sock", "CRI-O"),
            ("unix:///run/containerd/containerd.sock", "containerd"),
            ("unix:///run/x.sock", "the engine at \"/run/x.sock\""),
        ] {
            write(
                root,
                config,
                &format!("kind: KubeletConfiguration\ncontainerRuntimeEndpoint: {endpoint}\n"),
            );
            assert_eq!(name(engine(root)), expected);
        }
        for broken in [
            "containerRuntimeEndpoint: \"\"\n",
            "a: [",
            "- 1\n",
            "containerRuntimeEndpoint: 3\n",
        ] {
            write(root, config, broken);
            assert_eq!(name(engine(root)), "containerd", "{broken}");
        }
    }

    /// A container of a DaemonSet sees the configuration of CRI-O if the administrator mounts it, but not the programs of the host.
    #[test]
    fn programs_that_are_out_of_sight_exist() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let is_active = || matches!(engine(root), Some(NodeEngine::Crio(status)) if status.active);
        write(root, "run/crio/crio.sock", "");
        assert!(!is_active());
        let hook = r#"{"version":"1.0.0","hook":{"path":"/usr/bin/oci-nvidia-hook","args":["h","prestart"],"env":["A=b"]},
            "when":{"always":true},"stages":["prestart"]}"#;
        write(
            root,
            "usr/share/containers/oci/hooks.d/oci-nvidia-hook.json",
            hook,
        );
        assert!(is_active());
        write(root, "usr/bin/crio", "");
        assert!(
            !is_active(),
            "CRI-O ignores a hook file whose program is missing"
        );
        write(
            root,
            "etc/crio/crio.conf.d/a/10.conf",
            "[crio.runtime]\nhooks_dir = []\n",
        );
        std::fs::remove_file(root.join("usr/bin/crio")).unwrap();
        assert!(!is_active());
    }
}
