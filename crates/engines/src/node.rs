//! Determines the engine of a Kubernetes node, and whether it starts our hook.

use std::fmt;
use std::path::{Path, PathBuf};

use base::sys::host_process::{self, Status};
use base::tree::Tree;
use cdi_spec::yaml;
use plugin_api::status::NriStatus;

use super::cdi::{CdiSpecs, plain};
use super::status::{self, EngineStatus};
use super::{EngineKind, containerd, files, hooks, inspect};

/// The sockets of engines, in the order in which they are considered: K3s and RKE2 have their own
/// engine, and only Kubernetes uses CRI-O and cri-dockerd, while Docker uses containerd too.
const SOCKETS: [&str; 7] = [
    "/run/k3s/cri-dockerd/cri-dockerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
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

/// Directories with the files of engines: a file that appears changes its directory.
const DIRS: [&str; 6] = [
    "/etc/crio",
    "/etc/crio/crio.conf.d",
    "/etc/containerd",
    "/usr/share/containers/oci/hooks.d",
    "/etc/containers/oci/hooks.d",
    "/run/nri",
];

/// The files in the kubelet's directory that name the socket of its engine.
const KUBELET_FILES: [&str; 3] = ["kubeadm-flags.env", "instance-config.yaml", "config.yaml"];

/// The engine of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeEngine {
    /// CRI-O, and whether it starts our hook
    Crio(Box<EngineStatus>),
    /// containerd, which reads no hook files
    Containerd,
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
    /// Where it searches for CDI specs
    pub cdi: CdiSpecs,
    /// The files and directories that decide all this: while they do not change, the view does not
    pub files: Vec<PathBuf>,
    /// Our hook files, including those that no engine reads
    pub installed: Vec<PathBuf>,
    /// Whether our NRI plugin answers the engine, so that no hook is needed
    pub has_nri: bool,
}

impl fmt::Display for NodeEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Crio(_) => f.write_str("CRI-O"),
            Self::Containerd => f.write_str("containerd"),
            Self::Docker => f.write_str("Docker with cri-dockerd"),
            Self::Other(socket) => write!(f, "the engine at {socket:?}"),
        }
    }
}

impl EngineView {
    /// Inspects the node whose root directory is `host`. `kubelet_dir` is the directory of the
    /// kubelet on this machine, whose configuration names the socket of the engine.
    #[must_use]
    pub fn inspect(host: &Tree, kubelet_dir: &Path) -> Self {
        let mut view = Self {
            files: deciding_files(kubelet_dir),
            installed: hooks::installed(host),
            has_nri: NriStatus::of_host(host).is_some(),
            ..Self::default()
        };
        view.files.extend(view.installed.iter().cloned());
        let socket = endpoint(host, kubelet_dir).or_else(|| first_socket(host));
        if let Some(socket) = socket {
            view.inspect_engine(host, socket.trim_start_matches("unix://"));
        }
        view
    }

    fn inspect_engine(&mut self, host: &Tree, socket: &str) {
        let socket = plain(Path::new(socket));
        let socket = socket.to_string_lossy();
        let engine = match &*socket {
            socket if socket.contains("crio") => {
                let crio = inspect::crio_of_node(host);
                self.files
                    .extend(files::list(&EngineKind::Crio, None, host));
                self.files.extend(crio.settings.hooks_dirs.iter().cloned());
                // CRI-O ignores a hook file whose program is missing.
                for entry in &crio.hooks.entries {
                    self.files
                        .extend([entry.file.clone(), entry.hook.path.clone()]);
                }
                for (file, program) in &crio.hooks.without_program {
                    self.files.extend([file.clone(), program.clone()]);
                }
                self.cdi = cdi_specs_of_crio(&crio);
                NodeEngine::Crio(Box::new(status::judge(&crio, &self.installed)))
            }
            socket if socket.contains("cri-dockerd") => {
                self.cdi = CdiSpecs::Off("cri-dockerd passes no CDI devices to Docker".to_owned());
                NodeEngine::Docker
            }
            socket if socket.contains("containerd") => {
                self.cdi = containerd::cdi_specs(host, socket, &mut self.files);
                NodeEngine::Containerd
            }
            socket => {
                self.cdi = CdiSpecs::Unknown(format!("the engine at {socket:?} is not known"));
                NodeEngine::Other(socket.to_owned())
            }
        };
        self.engine = Some(engine);
    }
}

/// Returns the files that show which engine the kubelet uses, and the directories of the configuration files and the hook files of engines.
fn deciding_files(kubelet_dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = KUBELET_FILES
        .iter()
        .map(|file| kubelet_dir.join(file))
        .collect();
    for path in RANCHER.iter().chain(&SOCKETS).chain(&DIRS) {
        files.push(path.into());
    }
    files
}

/// Returns where CRI-O searches for CDI specs.
fn cdi_specs_of_crio(crio: &inspect::Engine) -> CdiSpecs {
    if let Some((file, why)) = &crio.settings.refused {
        return CdiSpecs::Unknown(format!("CRI-O cannot read {file:?}: {why}"));
    }
    if let Some(file) = crio.unseen.first()
        && !crio.running
    {
        return CdiSpecs::Unknown(format!("{file:?} of CRI-O cannot be read"));
    }
    CdiSpecs::Dirs(crio.settings.cdi_dirs.clone())
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
        // A node has one kubelet. Without the option, its configuration file names the socket.
        let line = host_process::arguments(&dir).ok()?;
        return endpoint_in_words(String::from_utf8_lossy(&line).split('\0').skip(1));
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
    use crate::cdi::CdiVerdict;
    use base::paths::HostPath;

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

    const OURS: &str = "/var/run/cdi";

    fn cdi(root: &Path) -> CdiVerdict {
        let host = Tree::open(&HostPath::new(root)).unwrap();
        let view = EngineView::inspect(&host, Path::new("/var/lib/kubelet"));
        view.cdi.verdict(Path::new(OURS))
    }

    #[test]
    fn engines_that_are_not_known() {
        let unknown = |prepare: &dyn Fn(&Path)| {
            let dir = tempfile::tempdir().unwrap();
            prepare(dir.path());
            match cdi(dir.path()) {
                CdiVerdict::Unknown(why) => why,
                other => panic!("{other:?}"),
            }
        };
        let kubelet = |root: &Path, socket: &str| {
            let text = format!("containerRuntimeEndpoint: {socket}\n");
            write(root, "var/lib/kubelet/config.yaml", &text);
        };
        let config = "etc/containerd/config.toml";
        let socket = "run/containerd/containerd.sock";
        for (part, prepare) in [
            (
                "the engine of the node is not known",
                &(|_: &Path| {}) as &dyn Fn(&Path),
            ),
            ("the engine at \"/run/x.sock\" is not known", &|root| {
                kubelet(root, "/run/x.sock")
            }),
            (
                "the configuration file of the containerd at \"/run/x/containerd.sock\" is not known",
                &|root| kubelet(root, "unix:///run/x/containerd.sock"),
            ),
            (
                "at \"/run/k3s/containerd/containerd.sock\" is not known",
                &|root| {
                    write(root, "run/k3s/containerd/containerd.sock", "");
                    write(root, config, "version = 2\n");
                },
            ),
            ("it depends on the version of containerd", &|root| {
                write(root, socket, "")
            }),
            (
                "containerd cannot read \"/etc/containerd/config.toml\": ",
                &|root| {
                    write(root, socket, "");
                    write(root, config, "a = [");
                },
            ),
            ("containerd cannot read \"/etc/x.toml\": ", &|root| {
                write(root, socket, "");
                write(root, config, "imports = [\"../x.toml\", \"/etc/x.toml\"]");
            }),
            (
                "enable_cdi in \"/etc/containerd/config.toml\" is invalid",
                &|root| {
                    write(root, socket, "");
                    write(
                        root,
                        config,
                        "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = 1",
                    );
                },
            ),
        ] {
            let why = unknown(prepare);
            assert!(why.contains(part), "{part}: {why}");
        }
    }

    /// The process that listens at the socket has another configuration file than the default one.
    #[test]
    fn the_running_containerd() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let socket = "/run/k3s/containerd/containerd.sock";
        write(root, "run/k3s/containerd/containerd.sock", "");
        let default = "var/lib/rancher/k3s/agent/etc/containerd/config.toml";
        let docker = "etc/containerd/config.toml";
        for (file, is_enabled) in [
            (default, false),
            ("data/k3s/config.toml", true),
            (docker, false),
        ] {
            let table = "[plugins.\"io.containerd.grpc.v1.cri\"]";
            let text = format!("version = 2\n{table}\nenable_cdi = {is_enabled}\n");
            write(root, file, &text);
        }
        for (pid, uid, words) in [
            (5, 0, "containerd".to_owned()),
            (
                6,
                1000,
                format!("containerd -c /etc/containerd/config.toml -a {socket}"),
            ),
            (
                7,
                0,
                format!("containerd -c /data/k3s/config.toml -a {socket}"),
            ),
        ] {
            let status = format!("Name:\tcontainerd\nPPid:\t1\nUid:\t{uid}\t{uid}\t0\t0\n");
            write(root, &format!("proc/{pid}/status"), &status);
            write(
                root,
                &format!("proc/{pid}/cmdline"),
                &words.replace(' ', "\0"),
            );
        }
        assert_eq!(cdi(root), CdiVerdict::Given);
    }

    #[test]
    fn cdi_specs_of_crio() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        write(root, "run/crio/crio.sock", "");
        assert_eq!(cdi(root), CdiVerdict::Given);
        let file = |name: &str, dir: &str| {
            let text = format!("[crio.runtime]\ncdi_spec_dirs = [\"{dir}\"]\n");
            write(root, &format!("etc/crio/{name}"), &text);
        };
        file("crio.conf", "/srv/cdi");
        let CdiVerdict::Dropped(why) = cdi(root) else {
            panic!()
        };
        let expected =
            "reads CDI specs in [\"/srv/cdi\"] (cdi_spec_dirs), and not in \"/var/run/cdi\"";
        assert!(why.ends_with(expected), "{why}");
        file("crio.conf.d/10.conf", "/run/cdi");
        assert_eq!(cdi(root), CdiVerdict::Given);
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
