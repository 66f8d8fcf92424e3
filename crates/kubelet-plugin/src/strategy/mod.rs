//! Chooses how containers get their devices, if the settings do not: the hook's files are useful only if the engine starts the hook.

mod facts;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nvidia_host::config::kubelet_plugin::{DeviceListStrategy, KubeletPlugin};

use crate::log::Log;
use facts::Facts;

/// How containers get their devices, and why in this way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The strategies, at least one
    pub strategies: Vec<DeviceListStrategy>,
    /// Why these
    pub why: String,
    /// Whether no engine was found, so that the choice may change
    pub is_provisional: bool,
}

impl Choice {
    /// Whether containers get CDI devices, now or when an engine has been found.
    #[must_use]
    pub fn may_use_cdi(&self) -> bool {
        use DeviceListStrategy::{CdiAnnotations, CdiCri};
        self.is_provisional || self.strategies.iter().any(|strategy| matches!(strategy, CdiCri | CdiAnnotations))
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.strategies.iter().map(|strategy| strategy.name()).collect();
        write!(f, "{} ({})", names.join(", "), self.why)
    }
}

/// Makes the choice for this node. An engine that starts later changes it.
#[derive(Debug)]
pub struct Chooser {
    configured: Vec<DeviceListStrategy>,
    kubelet_dir: PathBuf,
    log: Log,
    logged: Mutex<Option<Choice>>,
}

impl Chooser {
    /// Creates a chooser. `kubelet_dir` is the directory of the kubelet, whose configuration names the engine.
    #[must_use]
    pub fn new(settings: &KubeletPlugin, kubelet_dir: &Path, log: Log) -> Self {
        let configured = settings.device_list_strategy.clone();
        Self { configured, kubelet_dir: kubelet_dir.to_owned(), log, logged: Mutex::new(None) }
    }

    /// Returns the choice as the node is now.
    #[must_use]
    pub fn choose(&self) -> Choice {
        if !self.configured.is_empty() {
            let strategies = self.configured.clone();
            return Choice { strategies, why: "configured".to_owned(), is_provisional: false };
        }
        choose(&Facts::gather(Path::new("/"), &self.kubelet_dir))
    }

    /// Returns the choice as the node is now, and logs it if it is new.
    #[must_use]
    pub fn current(&self) -> Choice {
        let choice = self.choose();
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.as_ref() != Some(&choice) {
            self.log.note(&format!("containers get their devices with {choice}"));
            *logged = Some(choice.clone());
        }
        choice
    }
}

/// Chooses from what the node has.
fn choose(facts: &Facts) -> Choice {
    use DeviceListStrategy::{CdiCri, Envvar};
    let engine = facts.engine();
    let (strategy, why) = match (&engine, &facts.hook_file) {
        (Some(engine), Some(file)) if engine.reads_hooks() => (Envvar, format!("{engine} starts the hook of {file:?}")),
        (Some(engine), None) if engine.reads_hooks() => {
            (CdiCri, format!("{engine} reads no hook file of oci-nvidia-hook"))
        }
        (Some(engine), _) => (CdiCri, format!("{engine} does not read hook files")),
        (None, Some(file)) => (Envvar, format!("no engine was found, and {file:?} is installed")),
        (None, None) => (CdiCri, "no engine and no hook file of oci-nvidia-hook was found".to_owned()),
    };
    Choice { strategies: vec![strategy], why, is_provisional: engine.is_none() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use facts::{CONTAINERD, CRIO, K3S};

    #[test]
    fn the_choice() {
        let hook = "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json";
        let crio_starts = format!("CRI-O starts the hook of {hook:?}");
        let containerd = "containerd does not read hook files";
        for (endpoint, sockets, has_hook, strategy, why) in [
            (Some("unix:///var/run/crio/crio.sock"), &[][..], true, "envvar", crio_starts.as_str()),
            (Some("/run/crio/crio.sock"), &[CONTAINERD], true, "envvar", &crio_starts),
            (
                Some("unix:///run/crio/crio.sock"),
                &[CRIO],
                false,
                "cdi-cri",
                "CRI-O reads no hook file of oci-nvidia-hook",
            ),
            (Some("unix:///run/containerd/containerd.sock"), &[CRIO], true, "cdi-cri", containerd),
            (Some("unix:///run/k3s/containerd/containerd.sock"), &[], false, "cdi-cri", containerd),
            (
                Some("unix:///run/x.sock"),
                &[],
                true,
                "cdi-cri",
                "the engine at \"/run/x.sock\" does not read hook files",
            ),
            (None, &[CRIO], true, "envvar", &crio_starts),
            // Docker's
            (None, &[CRIO, CONTAINERD], true, "envvar", &crio_starts),
            (None, &[CRIO], false, "cdi-cri", "CRI-O reads no hook file of oci-nvidia-hook"),
            (None, &[CONTAINERD], true, "cdi-cri", containerd),
            (None, &[K3S], true, "cdi-cri", containerd),
            // Docker's, or that of an RPM
            (None, &[K3S, CONTAINERD, CRIO], true, "cdi-cri", containerd),
            (None, &[], true, "envvar", "no engine was found, and "),
            (None, &[], false, "cdi-cri", "no engine and no hook file"),
        ] {
            let facts = Facts {
                endpoint: endpoint.map(str::to_owned),
                sockets: sockets.to_vec(),
                hook_file: has_hook.then(|| hook.into()),
            };
            let choice = choose(&facts);
            assert_eq!(choice.strategies[0].name(), strategy, "{facts:?}");
            assert!(choice.why.starts_with(why), "{facts:?}: {}", choice.why);
            assert_eq!(choice.may_use_cdi(), strategy == "cdi-cri" || endpoint.is_none() && sockets.is_empty());
        }
    }

    #[test]
    fn settings_come_first() {
        let settings = KubeletPlugin {
            device_list_strategy: vec![DeviceListStrategy::VolumeMounts, DeviceListStrategy::CdiCri],
            ..KubeletPlugin::default()
        };
        let choice = Chooser::new(&settings, Path::new("/missing"), Log::new()).current();
        assert_eq!(choice.to_string(), "volume-mounts, cdi-cri (configured)");
        assert!(choice.may_use_cdi());
    }
}
