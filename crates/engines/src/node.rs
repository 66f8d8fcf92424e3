//! Determines the engine of a Kubernetes node, and whether it starts our hook.

use std::fmt;
use std::path::{Path, PathBuf};

use base::search_path;
use base::sys::host_process::{self, Status};
use base::tree::Tree;
use cdi_spec::yaml;
use plugin_api::status::NriStatus;

use super::inspect::Versions;
use super::status::{self, EngineStatus};
use super::{Version, hooks, inspect};

/// The sockets of engines, in the order in which they are considered: K3s and RKE2 have their own
/// engine, and only Kubernetes uses CRI-O and cri-dockerd, while Docker uses containerd too.
const SOCKETS: [&str; 5] = [
    "/run/k3s/cri-dockerd/cri-dockerd.sock",
    "/run/k3s/containerd/containerd.sock",
    inspect::CRIO_SOCKET,
    "/run/cri-dockerd.sock",
    "/run/containerd/containerd.sock",
];

/// The option of the kubelet that names the socket of its engine, and the key of K3s and RKE2.
const ENDPOINT: &str = "container-runtime-endpoint";

/// The configuration files of K3s and RKE2, which run the kubelet in their own process.
const RANCHER: [&str; 2] = [
    "/etc/rancher/k3s/config.yaml",
    "/etc/rancher/rke2/config.yaml",
];

/// The first version of containerd that reads CDI specs unless its configuration switches that off.
const CDI_BY_DEFAULT: Version = Version(2, 0, 0);

/// The engine of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeEngine {
    /// CRI-O, and whether it starts our hook
    Crio(Box<EngineStatus>),
    /// containerd, which reads no hook files
    Containerd {
        /// Its configuration switches CDI off, or its version has CDI off by default
        cdi_disabled: bool,
    },
    /// Docker with cri-dockerd, which drops the CDI devices of the kubelet
    Docker,
    /// Another one, with its socket
    Other(String),
}

/// The engine of a node and our hook files, as far as this process sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineView {
    /// `None` if neither the kubelet's configuration nor a socket shows an engine
    pub engine: Option<NodeEngine>,
    /// Our hook files, including those that no engine reads
    pub installed: Vec<PathBuf>,
    /// Whether our NRI plugin answers the engine, so that no hook is needed
    pub has_nri: bool,
}

impl fmt::Display for NodeEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Crio(_) => f.write_str("CRI-O"),
            Self::Containerd { .. } => f.write_str("containerd"),
            Self::Docker => f.write_str("Docker with cri-dockerd"),
            Self::Other(socket) => write!(f, "the engine at {socket:?}"),
        }
    }
}

impl NodeEngine {
    /// Returns why containers of this engine get no CDI devices; `None` if they do, or if that is
    /// not known.
    #[must_use]
    pub fn without_cdi(&self) -> Option<&'static str> {
        match self {
            Self::Docker => Some("cri-dockerd passes no CDI devices to Docker"),
            Self::Containerd { cdi_disabled: true } => {
                Some("containerd reads no CDI specs without enable_cdi = true in its configuration")
            }
            Self::Containerd { .. } | Self::Crio(_) | Self::Other(_) => None,
        }
    }
}

impl EngineView {
    /// Inspects the node whose root directory is `host`. `kubelet_dir` is the directory of the
    /// kubelet on this machine, whose configuration names the socket of the engine.
    #[must_use]
    pub fn inspect(host: &Tree, kubelet_dir: &Path) -> Self {
        let installed = hooks::installed(host);
        let socket = endpoint(host, kubelet_dir).or_else(|| first_socket(host));
        let engine =
            socket.map(|socket| engine_at(socket.trim_start_matches("unix://"), host, &installed));
        Self {
            engine,
            installed,
            has_nri: NriStatus::of_host(host).is_some(),
        }
    }
}

/// Returns the socket that the kubelet was given. Its options come before its configuration file,
/// into which kubeadm merges `instance-config.yaml`.
fn endpoint(host: &Tree, kubelet_dir: &Path) -> Option<String> {
    if let Some(endpoint) = endpoint_of_process(host) {
        return Some(endpoint);
    }
    if let Ok(flags) = host.read_text(&kubelet_dir.join("kubeadm-flags.env"))
        && let Some((_, arguments)) = flags.split_once("KUBELET_KUBEADM_ARGS=")
        && let Some(endpoint) = endpoint_in_words(arguments.trim().trim_matches('"').split(' '))
    {
        return Some(endpoint);
    }
    for file in ["instance-config.yaml", "config.yaml"] {
        if let Ok(config) = host.read_text(&kubelet_dir.join(file))
            && let Some(endpoint) = text_in(&config, "containerRuntimeEndpoint")
        {
            return Some(endpoint);
        }
    }
    for file in RANCHER {
        let Ok(config) = host.read_text(Path::new(file)) else {
            continue;
        };
        if let Some(endpoint) = text_in(&config, ENDPOINT) {
            return Some(endpoint);
        }
        if is_true(&config, "docker") {
            return Some(SOCKETS[0].to_owned());
        }
    }
    None
}

/// The names of processes that run a kubelet.
const KUBELETS: [&str; 3] = ["kubelet", "k3s-server", "k3s-agent"];

/// Returns the socket on the command line of the running kubelet. Any user can start a program with
/// that name, so only root's counts.
fn endpoint_of_process(host: &Tree) -> Option<String> {
    let proc = host.on_host(Path::new("/proc"));
    for name in host.names(Path::new("/proc")) {
        let dir = proc.join(&name);
        let is_pid = name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
        // The arguments of other programs are not read: each process chooses them, of any size.
        if !is_pid || !Status::read(&dir).is_ok_and(|status| is_kubelet(&status)) {
            continue;
        }
        if let Ok(line) = host_process::arguments(&dir)
            && let Some(endpoint) =
                endpoint_in_words(String::from_utf8_lossy(&line).split('\0').skip(1))
        {
            return Some(endpoint);
        }
    }
    None
}

fn is_kubelet(status: &Status) -> bool {
    status.uid == 0 && KUBELETS.iter().any(|name| status.may_run(name))
}

/// Returns the value of the option in `--NAME=VALUE` or `--NAME VALUE`. The last one applies.
fn endpoint_in_words<'a>(words: impl Iterator<Item = &'a str>) -> Option<String> {
    let mut found = None;
    let mut is_next = false;
    for word in words {
        if is_next {
            found = Some(word.to_owned());
            is_next = false;
        } else if word == "--docker" {
            // Of K3s, which starts cri-dockerd itself
            found = Some(SOCKETS[0].to_owned());
        } else if let Some(option) = word.strip_prefix("--")
            && let Some(rest) = option.strip_prefix(ENDPOINT)
        {
            match rest.strip_prefix('=') {
                Some(value) => found = Some(value.to_owned()),
                None => is_next = rest.is_empty(),
            }
        }
    }
    found.filter(|endpoint| !endpoint.is_empty())
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
        _ if socket.contains("cri-dockerd") => NodeEngine::Docker,
        _ if socket.contains("containerd") => NodeEngine::Containerd {
            cdi_disabled: is_cdi_disabled(host, socket),
        },
        _ => NodeEngine::Other(socket.to_owned()),
    }
}

/// Reports whether CDI is off in containerd, whose socket this is. Its version 2 enables CDI by default, and its version 1.7 does not.
/// K3s and RKE2 have their own containerd, which they configure.
fn is_cdi_disabled(host: &Tree, socket: &str) -> bool {
    let config = host.read_text(Path::new("/etc/containerd/config.toml"));
    for line in config.unwrap_or_default().lines() {
        let line = line.replace([' ', '\t'], "");
        if let Some(value) = line.strip_prefix("enable_cdi=") {
            return value.starts_with("false");
        }
    }
    if socket.contains("k3s") {
        return false;
    }
    let version = search_path::find(host, "containerd")
        .and_then(|program| Versions::stored().ask(host, &program).ok());
    version.is_some_and(|version| version < CDI_BY_DEFAULT)
}

/// Returns the text of a key in a YAML file.
fn text_in(config: &str, key: &str) -> Option<String> {
    let config = yaml::parse(config).ok()?;
    let text = config.get(key)?.as_str()?;
    if text.is_empty() {
        return None;
    }
    Some(text.to_owned())
}

fn is_true(config: &str, key: &str) -> bool {
    let prefix = format!("{key}:");
    let mut values = config.lines().filter_map(|line| line.strip_prefix(&prefix));
    values.any(|value| value.trim() == "true")
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn engine(root: &Path) -> Option<NodeEngine> {
        let host = Tree::open(&HostPath::new(root)).unwrap();
        EngineView::inspect(&host, Path::new("/var/lib/kubelet")).engine
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
        assert_eq!(name(engine(root)), "containerd");
        write(root, "run/crio/crio.sock", "");
        assert_eq!(name(engine(root)), "CRI-O", "Docker uses containerd too");
        write(root, "run/k3s/containerd/containerd.sock", "");
        assert_eq!(
            name(engine(root)),
            "containerd",
            "K3s has its own containerd"
        );
        let config = "var/lib/kubelet/config.yaml";
        for (endpoint, expected) in [
            ("unix:///run/crio/crio.sock", "CRI-O"),
            ("/var/run/crio/crio.sock", "CRI-O"),
            ("unix:///run/containerd/containerd.sock", "containerd"),
            ("unix:///run/x.sock", "the engine at \"/run/x.sock\""),
            ("unix:///run/cri-dockerd.sock", "Docker with cri-dockerd"),
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

    #[test]
    fn the_engine_that_the_kubelet_uses() {
        let docker = "Docker with cri-dockerd";
        let flags = "var/lib/kubelet/kubeadm-flags.env";
        let process = |root: &Path, words: &str, uid: u32| {
            let program = words.split(' ').next().unwrap();
            let name = program.rsplit('/').next().unwrap();
            let status = format!("Name:\t{name}\nPPid:\t1\nUid:\t{uid}\t{uid}\t0\t0\n");
            write(root, "proc/7/cmdline", &words.replace(' ', "\0"));
            write(root, "proc/7/status", &status);
        };
        let kubelet = "/usr/bin/kubelet --a=b --container-runtime-endpoint";
        for (what, prepare, expected) in [
            (
                "an option of kubeadm",
                &(|root: &Path| {
                    let option = "--container-runtime-endpoint=unix:///run/cri-dockerd.sock";
                    write(
                        root,
                        flags,
                        &format!("KUBELET_KUBEADM_ARGS=\"{option} --x=y\"\n"),
                    );
                }) as &dyn Fn(&Path),
                docker,
            ),
            (
                "the options of the process come first",
                &|root| {
                    write(
                        root,
                        "var/lib/kubelet/config.yaml",
                        "containerRuntimeEndpoint: /x\n",
                    );
                    process(root, &format!("{kubelet} /run/cri-dockerd.sock --c"), 0);
                },
                docker,
            ),
            (
                "K3s with Docker",
                &|root| process(root, "k3s-server server --docker", 0),
                docker,
            ),
            (
                "K3s with another engine",
                &|root| {
                    process(
                        root,
                        "k3s-agent agent --container-runtime-endpoint /run/x/containerd.sock",
                        0,
                    )
                },
                "containerd",
            ),
            (
                "a process of another user",
                &|root| process(root, &format!("{kubelet}=/run/cri-dockerd.sock"), 1000),
                "CRI-O",
            ),
            (
                "another program",
                &|root| process(root, "/bin/x kubelet --container-runtime-endpoint=/a", 0),
                "CRI-O",
            ),
            (
                "kubeadm's file for this node",
                &|root| {
                    let file = "var/lib/kubelet/instance-config.yaml";
                    write(
                        root,
                        file,
                        "containerRuntimeEndpoint: unix:///run/cri-dockerd.sock\n",
                    );
                },
                docker,
            ),
            (
                "K3s with Docker",
                &|root| write(root, "etc/rancher/k3s/config.yaml", "docker: true\n"),
                docker,
            ),
            (
                "RKE2 with another engine",
                &|root| {
                    let text = "container-runtime-endpoint: /run/containerd/containerd.sock\n";
                    write(root, "etc/rancher/rke2/config.yaml", text);
                },
                "containerd",
            ),
            (
                "a socket",
                &|root| write(root, "run/k3s/cri-dockerd/cri-dockerd.sock", ""),
                docker,
            ),
        ] {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path(), "run/crio/crio.sock", "");
            write(dir.path(), "run/containerd/containerd.sock", "");
            prepare(dir.path());
            assert_eq!(name(engine(dir.path())), expected, "{what}");
        }
    }

    #[test]
    fn engines_without_cdi() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        write(root, "run/containerd/containerd.sock", "");
        let has_cdi = || engine(root).unwrap().without_cdi().is_none();
        assert!(has_cdi());
        for (line, expected) in [
            ("enable_cdi = true", true),
            ("    enable_cdi = false # off", false),
            ("# enable_cdi = false", true),
        ] {
            write(
                root,
                "etc/containerd/config.toml",
                &format!("version = 2\n{line}\n"),
            );
            assert_eq!(has_cdi(), expected, "{line}");
        }
        for (config, version, expected) in [
            (
                "version = 3",
                "containerd github.com/containerd/containerd/v2 v2.1.4 x",
                true,
            ),
            ("version = 2", "containerd containerd.io 1.7.22 x", false),
            (
                "enable_cdi = true",
                "containerd containerd.io 1.7.22 x",
                true,
            ),
        ] {
            write(root, "etc/containerd/config.toml", config);
            let program = root.join("usr/bin/containerd");
            let (script, mode) = (
                format!("#!/bin/sh\necho {version}\n"),
                Permissions::from_mode(0o755),
            );
            write(root, "usr/bin/containerd", &script);
            std::fs::set_permissions(program, mode).unwrap();
            assert_eq!(has_cdi(), expected, "{config}, {version}");
        }
        std::fs::remove_file(root.join("run/containerd/containerd.sock")).unwrap();
        write(root, "run/cri-dockerd.sock", "");
        assert!(!has_cdi());
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
