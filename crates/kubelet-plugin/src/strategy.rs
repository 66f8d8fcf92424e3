//! Chooses how containers get their devices, if the settings do not: the hook's files are useful only if the engine starts the hook.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use base::paths::HostPath;
use base::report::Finding;
use base::tree::Tree;
use engines::node::{EngineView, NodeEngine};
use findings::catalog;

use crate::log::Log;
use crate::node::host::is_in_pod;
use crate::settings::Plugin;
use crate::settings::values::DeviceListStrategy;

/// The time for which a choice is used. A running CRI-O prints its configuration in 50 ms, too long for every allocation.
const VALID: Duration = Duration::from_secs(10);

/// How containers get their devices, and why in this way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The strategies, at least one
    pub strategies: Vec<DeviceListStrategy>,
    /// Why these
    pub why: String,
    /// Whether no engine was found, so that the choice may change
    pub is_provisional: bool,
    /// Why the node's engine gives containers no CDI devices; `None` if it does
    pub without_cdi: Option<String>,
    /// Why it depends on the pod whether the hook runs for a container; `None` if it runs for each
    pub without_hook: Option<String>,
}

impl Choice {
    /// Whether containers get CDI devices, now or when an engine has been found.
    #[must_use]
    pub fn may_use_cdi(&self) -> bool {
        self.is_provisional || self.uses_cdi()
    }

    /// Whether containers get CDI devices now.
    #[must_use]
    pub fn uses_cdi(&self) -> bool {
        uses_cdi(&self.strategies)
    }

    /// Returns the finding about an engine that drops the CDI devices of these strategies.
    #[must_use]
    pub fn finding(&self) -> Option<Finding> {
        let why = self.without_cdi.as_ref()?;
        if !self.uses_cdi() {
            return None;
        }
        let names = self.names().join(", ");
        Some(without_cdi(
            &format!("device-list-strategy {names:?} names CDI devices"),
            why,
        ))
    }

    /// Returns the names of the strategies.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let names = self.strategies.iter().map(|strategy| strategy.name());
        names.collect()
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.names().join(", "), self.why)
    }
}

/// Whether containers get CDI devices with these strategies.
#[must_use]
pub fn uses_cdi(strategies: &[DeviceListStrategy]) -> bool {
    strategies.contains(&DeviceListStrategy::CdiCri)
        || strategies.contains(&DeviceListStrategy::CdiAnnotations)
}

/// Makes the choice for this node. An engine that starts later changes it.
#[derive(Debug)]
pub struct Chooser {
    configured: Vec<DeviceListStrategy>,
    kubelet_dir: PathBuf,
    log: Log,
    last: Mutex<Option<(Instant, Choice)>>,
}

impl Chooser {
    /// Creates a chooser. `kubelet_dir` is the directory of the kubelet, whose configuration names the engine.
    #[must_use]
    pub fn new(settings: &Plugin, kubelet_dir: &Path, log: Log) -> Self {
        let configured = settings.device_list_strategy.clone();
        Self {
            configured,
            kubelet_dir: kubelet_dir.to_owned(),
            log,
            last: Mutex::new(None),
        }
    }

    /// Returns the choice as the node is now.
    #[must_use]
    pub fn choose(&self) -> Choice {
        let node = inspect(&self.kubelet_dir);
        if self.configured.is_empty() {
            return choose(&node, is_in_pod());
        }
        Choice {
            strategies: self.configured.clone(),
            why: "configured".to_owned(),
            is_provisional: false,
            without_cdi: why_without_cdi(&node),
            without_hook: why_without_hook(&node),
        }
    }

    /// Returns the choice as the node is now, or was a few seconds ago, and logs it if it is new.
    #[must_use]
    pub fn current(&self) -> Choice {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, choice)) = last.as_ref().filter(|(made, _)| made.elapsed() < VALID) {
            return choice.clone();
        }
        let choice = self.choose();
        if last.as_ref().is_none_or(|(_, before)| *before != choice) {
            self.log
                .note(&format!("containers get their devices with {choice}"));
            if let Some(finding) = choice.finding() {
                self.log.finding(&finding);
            }
        }
        *last = Some((Instant::now(), choice.clone()));
        choice
    }
}

/// Returns the finding about claims, which need an engine with CDI.
#[must_use]
pub fn claims_finding(kubelet_dir: &Path) -> Option<Finding> {
    let why = why_without_cdi(&inspect(kubelet_dir))?;
    Some(without_cdi("claims need CDI devices", &why))
}

fn without_cdi(what: &str, why: &str) -> Finding {
    let fix = format!(
        "run \"oci-nvidia-hook explain {}\"",
        catalog::ENGINE_WITHOUT_CDI.id()
    );
    Finding::new(
        &catalog::ENGINE_WITHOUT_CDI,
        format!("{what}, and {why}: pods start without a GPU"),
        fix,
    )
}

fn why_without_cdi(node: &EngineView) -> Option<String> {
    let why = node.engine.as_ref()?.without_cdi()?;
    Some(why.to_owned())
}

/// Returns why the engine may not start the hook. The runtime `nvidia` of the package -compat does what the hook does, for the pods that
/// select it.
fn why_without_hook(node: &EngineView) -> Option<String> {
    let engine = match &node.engine {
        None => return Some("the engine of the node is not known".to_owned()),
        Some(NodeEngine::Crio(status)) if status.active || status.nri => return None,
        Some(NodeEngine::Crio(status)) => {
            format!("CRI-O does not start the hook ({})", status.why)
        }
        Some(_) if node.has_nri => return None,
        Some(engine) => format!("{engine} does not read hook files"),
    };
    Some(format!(
        "{engine}: only a pod with the runtime \"nvidia\" gets the driver files"
    ))
}

fn inspect(kubelet_dir: &Path) -> EngineView {
    match Tree::open(&HostPath::new("/")) {
        Ok(host) => EngineView::inspect(&host, kubelet_dir),
        Err(_) => EngineView::default(),
    }
}

/// Chooses from what the node has. A pod sees neither the engine nor the hook files of the node
/// unless they are mounted, and NVIDIA's manifests rely on the default `envvar`.
fn choose(node: &EngineView, in_pod: bool) -> Choice {
    use DeviceListStrategy::{CdiCri, Envvar};
    let (strategy, why) = match (&node.engine, node.installed.first()) {
        (Some(engine @ NodeEngine::Crio(status)), _) if status.active => (
            Envvar,
            format!(
                "{engine} starts the hook of {}",
                status.files().join(" and ")
            ),
        ),
        (Some(engine @ NodeEngine::Crio(status)), _) => (
            CdiCri,
            format!("{engine} does not start the hook: {}", status.why),
        ),
        (Some(NodeEngine::Docker), _) => (
            Envvar,
            "cri-dockerd passes no CDI devices, and the runtime \"nvidia\" reads the variable"
                .to_owned(),
        ),
        (Some(engine), _) => (CdiCri, format!("{engine} does not read hook files")),
        (None, Some(file)) => (
            Envvar,
            format!("no engine was found, and {file:?} is installed"),
        ),
        (None, None) if in_pod => (
            Envvar,
            "the pod does not see the engine of the node; set device-list-strategy".to_owned(),
        ),
        (None, None) => (
            CdiCri,
            "no engine and no hook file of oci-nvidia-hook was found".to_owned(),
        ),
    };
    Choice {
        strategies: vec![strategy],
        why,
        is_provisional: node.engine.is_none(),
        without_cdi: why_without_cdi(node),
        without_hook: why_without_hook(node),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engines::status::{EngineStatus, Started};

    #[test]
    fn the_choice() {
        let file = PathBuf::from("/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json");
        let crio = |active| {
            let hooks = vec![Started {
                file: file.clone(),
                stages: vec!["prestart".to_owned()],
            }];
            let why = if active {
                String::new()
            } else {
                "no hook file".to_owned()
            };
            NodeEngine::Crio(Box::new(EngineStatus {
                installed: true,
                active,
                hooks,
                why,
                ..EngineStatus::default()
            }))
        };
        for (engine, has_hook, strategy, why) in [
            (
                Some(crio(true)),
                true,
                "envvar",
                "CRI-O starts the hook of /usr/",
            ),
            (
                Some(crio(false)),
                true,
                "cdi-cri",
                "CRI-O does not start the hook: no hook file",
            ),
            (
                Some(NodeEngine::Containerd {
                    cdi_disabled: false,
                }),
                true,
                "cdi-cri",
                "containerd does not read hook files",
            ),
            (
                Some(NodeEngine::Other("/x".to_owned())),
                true,
                "cdi-cri",
                "the engine at \"/x\" does not read",
            ),
            (None, true, "envvar", "no engine was found, and "),
            (None, false, "cdi-cri", "no engine and no hook file"),
        ] {
            let is_known = engine.is_some();
            let node = EngineView {
                engine,
                installed: if has_hook { vec![file.clone()] } else { vec![] },
                has_nri: false,
            };
            let choice = choose(&node, false);
            assert_eq!(choice.finding(), None);
            if node != EngineView::default() {
                assert_eq!(choose(&node, true), choice, "a pod that sees the node");
            }
            assert_eq!(choice.strategies[0].name(), strategy, "{choice}");
            assert!(choice.why.starts_with(why), "{choice}");
            assert_eq!(choice.may_use_cdi(), strategy == "cdi-cri" || !is_known);
        }
    }

    #[test]
    fn a_pod_that_does_not_see_the_node() {
        let choice = choose(&EngineView::default(), true);
        assert_eq!(choice.names(), ["envvar"]);
        assert!(choice.is_provisional);
    }

    #[test]
    fn engines_that_pass_no_cdi_devices() {
        let choose = |engine| {
            let node = EngineView {
                engine: Some(engine),
                ..EngineView::default()
            };
            super::choose(&node, false)
        };
        let docker = choose(NodeEngine::Docker);
        assert_eq!(
            (docker.names(), docker.finding()),
            (vec!["envvar".to_owned()], None)
        );
        let cdi_disabled = true;
        let finding = choose(NodeEngine::Containerd { cdi_disabled })
            .finding()
            .unwrap();
        assert_eq!(finding.kind, &catalog::ENGINE_WITHOUT_CDI);
        let configured = Choice {
            strategies: vec![DeviceListStrategy::CdiAnnotations],
            ..docker
        };
        let what = configured.finding().unwrap().what;
        assert!(what.contains("cri-dockerd passes no CDI devices"), "{what}");
    }

    #[test]
    fn settings_come_first() {
        let settings = Plugin {
            device_list_strategy: vec![
                DeviceListStrategy::VolumeMounts,
                DeviceListStrategy::CdiCri,
            ],
            ..Plugin::default()
        };
        let choice = Chooser::new(&settings, Path::new("/missing"), Log::new()).current();
        assert_eq!(choice.to_string(), "volume-mounts, cdi-cri (configured)");
        assert!(choice.may_use_cdi());
    }
}
