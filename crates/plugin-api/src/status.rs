//! Decides whether the kubelet plugin serves the kubelet, from its sockets and its processes.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use base::search_path;
use base::tree::Tree;

use crate::PROGRAM;
use crate::kubelet_dirs;
use crate::processes::{self, PluginProcess};

const UNIT: &str = "oci-nvidia-kubelet-plugin.service";
const NRI_UNIT: &str = "oci-nvidia-nri.service";
/// The socket for NRI plugins, of CRI-O and containerd.
const NRI_SOCKET: &str = "/run/nri/nri.sock";
/// The root directories of the kubelet in Kubernetes, k0s and MicroK8s.
const KUBELETS: [&str; 3] = [
    "/var/lib/kubelet",
    "/var/lib/k0s/kubelet",
    "/var/snap/microk8s/common/var/lib/kubelet",
];

/// The socket of our driver for claims in the directory of a kubelet. NVIDIA's driver has the same one.
const DRIVER_FOR_CLAIMS: &str = "plugins_registry/gpu.nvidia.com-reg.sock";

/// The kubelet and the sockets of device plugins.
#[derive(Clone, Debug, Default)]
pub struct KubeletPlugin {
    /// Whether a kubelet has its socket in one of the directories
    pub has_kubelet: bool,
    /// The sockets of our plugin, one for each resource
    pub sockets: Vec<PathBuf>,
    /// The sockets of NVIDIA's plugin and of GKE's
    pub others: Vec<PathBuf>,
    /// Whether the caller can see the sockets
    pub is_visible: bool,
    /// The running processes of our plugin
    pub processes: Vec<PluginProcess>,
    /// Our NRI plugin, if it runs
    pub nri: Option<NriStatus>,
}

/// Why the plugin does not serve the kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Idle {
    /// The caller cannot see the sockets.
    Hidden,
    /// No kubelet has its socket in the known directories.
    NoKubelet,
    /// Another plugin has this socket.
    Other(PathBuf),
    /// The plugin has no socket, and no other plugin has one.
    NotRunning,
}

/// The status of the plugin. The field names are part of the JSON interface.
#[derive(Clone, Debug, Serialize)]
pub struct PluginStatus {
    /// The systemd unit of the plugin; empty if it runs in a pod
    #[serde(skip_serializing_if = "str::is_empty")]
    pub unit: &'static str,
    /// Whether it runs in a pod
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub in_pod: bool,
    /// Whether the plugin serves the kubelet, if it is known
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active: Option<bool>,
    /// The sockets through which it serves the kubelet
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sockets: Vec<PathBuf>,
    /// Why the plugin does not serve the kubelet
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// The command that fixes it
    #[serde(skip_serializing_if = "String::is_empty")]
    pub fix: String,
}

impl PluginStatus {
    /// Whether the plugin is a driver for claims.
    #[must_use]
    pub fn serves_claims(&self) -> bool {
        let mut sockets = self.sockets.iter();
        sockets.any(|socket| socket.ends_with(DRIVER_FOR_CLAIMS))
    }
}

impl KubeletPlugin {
    /// Returns `None` if the plugin is not installed and does not run in a pod. Only root can see the sockets.
    pub fn inspect(host: &Tree, is_root: bool) -> Option<Self> {
        let processes = processes::of_host(host);
        let runs_in_pod = processes.iter().any(|process| process.in_pod);
        if !runs_in_pod && search_path::find(host, PROGRAM).is_none() {
            return None;
        }
        let serves_kubelet = processes.iter().any(|process| process.for_kubelet);
        let mut plugin = Self {
            is_visible: is_root,
            nri: NriStatus::of(host, &processes),
            processes,
            ..Self::default()
        };
        let roots = plugin.kubelet_roots();
        let mut plugin_dirs = BTreeSet::new();
        for root in &roots {
            let driver = root.join(DRIVER_FOR_CLAIMS);
            if serves_kubelet && host.locate(&driver).is_ok() {
                plugin.sockets.push(driver);
            }
            plugin_dirs.extend(kubelet_dirs::plugin_dirs(root));
        }
        for dir in plugin_dirs {
            plugin.add_sockets(host, &dir);
        }
        Some(plugin)
    }

    /// Returns the root directories in which kubelets of this host can have sockets: the usual ones, and those that the plugin uses.
    fn kubelet_roots(&self) -> BTreeSet<PathBuf> {
        let mut roots = BTreeSet::from(KUBELETS.map(PathBuf::from));
        for process in &self.processes {
            roots.extend(process.kubelet_dir.clone());
        }
        roots
    }

    fn add_sockets(&mut self, host: &Tree, dir: &Path) {
        for name in host.names(dir) {
            let Some(name) = name.to_str().filter(|name| name.ends_with(".sock")) else {
                continue;
            };
            if name == "kubelet.sock" {
                self.has_kubelet = true;
            } else if name.starts_with("oci-nvidia-") {
                self.sockets.push(dir.join(name));
            } else if name.starts_with("nvidia-") || name.starts_with("nvidiaGPU-") {
                self.others.push(dir.join(name));
            }
        }
    }

    /// Returns why the plugin does not serve the kubelet; `None` if it does.
    pub fn idle(&self) -> Option<Idle> {
        match (self.sockets.as_slice(), self.others.first()) {
            _ if !self.is_visible => Some(Idle::Hidden),
            // The plugin creates its sockets before a kubelet starts.
            _ if !self.has_kubelet => Some(Idle::NoKubelet),
            ([], Some(other)) => Some(Idle::Other(other.clone())),
            ([], None) => Some(Idle::NotRunning),
            _ => None,
        }
    }

    /// Returns what `status` shows.
    pub fn status(&self) -> PluginStatus {
        let mut processes = self.processes.iter();
        let in_pod = processes.any(|process| process.for_kubelet && process.in_pod);
        let mut status = PluginStatus {
            unit: if in_pod { "" } else { UNIT },
            in_pod,
            active: None,
            sockets: Vec::new(),
            why: String::new(),
            fix: String::new(),
        };
        let Some(idle) = self.idle() else {
            status.active = Some(true);
            status.sockets.clone_from(&self.sockets);
            return status;
        };
        if idle != Idle::Hidden {
            status.active = Some(false);
        }
        status.why = idle.to_string();
        status.fix = idle.fix();
        status
    }
}

/// An NRI plugin of ours that runs. The field names are part of the JSON interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NriStatus {
    /// The systemd unit of the plugin; empty if it runs in a pod
    #[serde(skip_serializing_if = "str::is_empty")]
    pub unit: &'static str,
    /// Whether it runs in a pod
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub in_pod: bool,
    /// The socket of the engine
    pub socket: &'static str,
}

impl NriStatus {
    /// Finds the NRI plugin of this host. Returns `None` if it does not run, or no engine has a socket for it.
    #[must_use]
    pub fn of_host(host: &Tree) -> Option<Self> {
        host.locate(Path::new(NRI_SOCKET)).ok()?;
        Self::of(host, &processes::of_host(host))
    }

    fn of(host: &Tree, processes: &[PluginProcess]) -> Option<Self> {
        host.locate(Path::new(NRI_SOCKET)).ok()?;
        let process = processes.iter().find(|process| process.for_engine)?;
        let unit = if process.in_pod {
            ""
        } else if process.for_kubelet {
            UNIT
        } else {
            NRI_UNIT
        };
        Some(Self {
            unit,
            in_pod: process.in_pod,
            socket: NRI_SOCKET,
        })
    }
}

impl Idle {
    /// Returns the command that makes the plugin serve the kubelet; an empty text if there is nothing to fix.
    pub fn fix(&self) -> String {
        match self {
            Self::Hidden | Self::NoKubelet => String::new(),
            Self::Other(_) => "remove one of the two plugins".to_owned(),
            Self::NotRunning => {
                format!("run \"{PROGRAM} check\" and \"systemctl enable --now {PROGRAM}\"")
            }
        }
    }
}

impl fmt::Display for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hidden => f.write_str("only root can see the sockets of the kubelet"),
            Self::NoKubelet => f.write_str("no kubelet runs"),
            Self::Other(socket) => write!(f, "another device plugin serves {socket:?}"),
            Self::NotRunning => f.write_str("it serves no resource to the kubelet"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;
    use std::fs;

    fn write(host: &Path, file: &str, text: &str) {
        let path = host.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_kubelet_with_another_root_directory() {
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path();
        let program = format!("/usr/bin/{PROGRAM}");
        write(host, &program[1..], "");
        write(
            host,
            "proc/7/status",
            "Name:\toci-nvidia-kube\nPPid:\t1\nUid:\t0\t0\t0\t0\n",
        );
        std::os::unix::fs::symlink(&program, host.join("proc/7/exe")).unwrap();
        let sockets = ["kubelet.sock", "oci-nvidia-gpu.sock"];
        for root in ["/data/kubelet", "/var/lib/kubelet"] {
            for socket in sockets {
                write(host, &format!("{root}/device-plugins/{socket}")[1..], "");
            }
            for (option, has_kubelet) in [(root, true), ("/other/kubelet", root == KUBELETS[0])] {
                let words = format!("{program}\0run\0--kubelet-dir\0{option}\0");
                write(host, "proc/7/cmdline", &words);
                let tree = Tree::open(&HostPath::new(host)).unwrap();
                let plugin = KubeletPlugin::inspect(&tree, true).unwrap();
                let socket = Path::new(root).join("device-plugins/oci-nvidia-gpu.sock");
                assert_eq!(plugin.has_kubelet, has_kubelet, "{root} {option}");
                assert_eq!(
                    plugin.sockets.contains(&socket),
                    has_kubelet,
                    "{root} {option}"
                );
            }
        }
    }
}
