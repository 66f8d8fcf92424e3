//! Chooses how containers get their devices, if the settings do not: the hook's files are useful only if the engine starts the hook.

use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::paths::HostPath;
use base::report::Finding;
use base::tree::Tree;
use engines::cdi::CdiVerdict;
use engines::node::{EngineView, NodeEngine};
use findings::catalog;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use crate::kubelet::socket::{self, KubeletDirs};
use crate::log::Log;
use crate::node::host::is_in_pod;
use crate::settings::Plugin;
use crate::settings::values::DeviceListStrategy;
use crate::watched_files::WatchedFiles;

/// How often the files are examined that decide the choice.
const PERIOD: Duration = Duration::from_secs(30);
/// The same before an engine has been found.
const PROVISIONAL_PERIOD: Duration = Duration::from_secs(10);

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
    /// Why it is not known whether the node's engine gives containers CDI devices; `None` if it is
    pub unknown_cdi: Option<String>,
    /// Why it depends on the pod whether the hook runs for a container; `None` if it runs for each
    pub without_hook: Option<String>,
}

impl Choice {
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
    /// The directory of our CDI specs
    spec_dir: PathBuf,
    log: Log,
    last: Mutex<Option<Made>>,
}

/// A choice, and the state of the files that have decided it.
#[derive(Clone, Debug)]
struct Made {
    choice: Choice,
    files: WatchedFiles,
}

impl Chooser {
    /// Creates a chooser. `kubelet_dir` is the directory of the kubelet, whose configuration names the engine, and `spec_dir` the one of our
    /// CDI specs.
    #[must_use]
    pub fn new(settings: &Plugin, kubelet_dir: &Path, spec_dir: &Path, log: Log) -> Self {
        let configured = settings.device_list_strategy.clone();
        Self {
            configured,
            kubelet_dir: kubelet_dir.to_owned(),
            spec_dir: spec_dir.to_owned(),
            log,
            last: Mutex::new(None),
        }
    }

    /// Whether containers may get CDI devices. If the settings do not decide, a change of the engine's configuration does.
    #[must_use]
    pub fn may_use_cdi(&self) -> bool {
        self.configured.is_empty() || uses_cdi(&self.configured)
    }

    /// Returns the choice as the node is now. A running CRI-O is asked for its configuration, which takes 50 ms, and 2 s if it hangs.
    #[must_use]
    pub fn choose(&self) -> Choice {
        self.make().choice
    }

    fn make(&self) -> Made {
        let node = inspect(&self.kubelet_dir);
        let mut files = node.files.clone();
        // A kubelet that starts may use another engine.
        let dirs = KubeletDirs::of(&self.kubelet_dir);
        files.extend(dirs.plugins.iter().map(|dir| socket::kubelet(dir)));
        Made {
            files: WatchedFiles::of(files),
            choice: self.decide(&node),
        }
    }

    fn decide(&self, node: &EngineView) -> Choice {
        if self.configured.is_empty() {
            return choose(node, &self.spec_dir, is_in_pod());
        }
        Choice {
            strategies: self.configured.clone(),
            why: "configured".to_owned(),
            is_provisional: false,
            ..undecided(node, &self.spec_dir)
        }
    }

    /// Returns the last choice. Only the first call inspects the node.
    #[must_use]
    pub fn current(&self) -> Choice {
        if let Some(made) = self.lock().as_ref() {
            return made.choice.clone();
        }
        let made = self.make();
        let choice = made.choice.clone();
        self.store(made);
        choice
    }

    /// Makes the choice again whenever a file has changed that decides it, on another thread: an engine that hangs does not delay the answers
    /// for the kubelet.
    pub async fn follow(self: Arc<Self>) -> Infallible {
        loop {
            sleep(self.period()).await;
            if self.is_current() {
                continue;
            }
            let chooser = Arc::clone(&self);
            if let Ok(made) = spawn_blocking(move || chooser.make()).await {
                self.store(made);
            }
        }
    }

    fn period(&self) -> Duration {
        match self.lock().as_ref() {
            Some(made) if made.choice.is_provisional => PROVISIONAL_PERIOD,
            _ => PERIOD,
        }
    }

    /// Reports whether no file has changed.
    fn is_current(&self) -> bool {
        let last = self.lock();
        last.as_ref().is_none_or(|made| made.files.are_the_same())
    }

    fn store(&self, made: Made) {
        let choice = made.choice.clone();
        let before = self.lock().replace(made);
        if before.is_some_and(|before| before.choice == choice) {
            return;
        }
        self.log
            .note(&format!("containers get their devices with {choice}"));
        if let Some(finding) = choice.finding() {
            self.log.finding(&finding);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Made>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Decides whether the engine gives containers the devices of claims. `spec_dir` is the directory of our CDI specs.
#[must_use]
pub fn claims_verdict(kubelet_dir: &Path, spec_dir: &Path) -> CdiVerdict {
    inspect(kubelet_dir).cdi.verdict(spec_dir)
}

/// Returns the finding about claims, which need an engine with CDI.
#[must_use]
pub fn claims_finding(verdict: &CdiVerdict) -> Option<Finding> {
    match verdict {
        CdiVerdict::Dropped(why) => Some(without_cdi("claims need CDI devices", why)),
        CdiVerdict::Given | CdiVerdict::Unknown(_) => None,
    }
}

/// Returns what to inspect if it is not known whether the engine gives containers CDI devices.
#[must_use]
pub fn unknown_cdi(why: &str) -> String {
    format!(
        "whether the engine reads CDI specs is not known: {why}; inspect enable_cdi and cdi_spec_dirs in the output of \"containerd config dump\" or \"crio status config\""
    )
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

/// Returns what is known about the engine, for a choice that is not made.
fn undecided(node: &EngineView, spec_dir: &Path) -> Choice {
    let (mut without_cdi, mut unknown) = (None, None);
    match node.cdi.verdict(spec_dir) {
        CdiVerdict::Given => {}
        CdiVerdict::Dropped(why) => without_cdi = Some(why),
        CdiVerdict::Unknown(why) => unknown = Some(unknown_cdi(&why)),
    }
    Choice {
        strategies: Vec::new(),
        why: String::new(),
        is_provisional: node.engine.is_none(),
        without_cdi,
        unknown_cdi: unknown,
        without_hook: why_without_hook(node),
    }
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
fn choose(node: &EngineView, spec_dir: &Path, in_pod: bool) -> Choice {
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
        ..undecided(node, spec_dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cdi_specs::DIR;
    use engines::cdi::CdiSpecs;
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
                Some(NodeEngine::Containerd),
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
                ..EngineView::default()
            };
            let choose = |in_pod| choose(&node, Path::new(DIR), in_pod);
            let choice = choose(false);
            assert_eq!(choice.finding(), None);
            if node != EngineView::default() {
                assert_eq!(choose(true), choice, "a pod that sees the node");
            }
            assert_eq!(choice.strategies[0].name(), strategy, "{choice}");
            assert!(choice.why.starts_with(why), "{choice}");
            assert_eq!(choice.is_provisional, !is_known);
        }
    }

    #[test]
    fn a_pod_that_does_not_see_the_node() {
        let choice = choose(&EngineView::default(), Path::new(DIR), true);
        assert_eq!(choice.names(), ["envvar"]);
        assert!(choice.is_provisional);
    }

    #[test]
    fn engines_that_pass_no_cdi_devices() {
        let choose = |engine, cdi| {
            let node = EngineView {
                engine: Some(engine),
                cdi,
                ..EngineView::default()
            };
            super::choose(&node, Path::new(DIR), false)
        };
        let off = || CdiSpecs::Off("it passes no CDI devices".to_owned());
        let docker = choose(NodeEngine::Docker, off());
        assert_eq!(
            (docker.names(), docker.finding()),
            (vec!["envvar".to_owned()], None)
        );
        let finding = choose(NodeEngine::Containerd, off()).finding().unwrap();
        assert_eq!(finding.kind, &catalog::ENGINE_WITHOUT_CDI);
        let dirs = |dirs: &[&str]| CdiSpecs::Dirs(dirs.iter().map(PathBuf::from).collect());
        let elsewhere = choose(NodeEngine::Containerd, dirs(&["/etc/cdi", "/srv/cdi"]));
        let what = elsewhere.finding().unwrap().what;
        assert!(
            what.contains("and not in \"/var/run/cdi\": pods start"),
            "{what}"
        );
        for dir in ["/run/cdi", "/var/run/cdi/"] {
            let choice = choose(NodeEngine::Containerd, dirs(&["/etc/cdi", dir]));
            assert_eq!(
                (choice.finding(), choice.unknown_cdi),
                (None, None),
                "{dir}"
            );
        }
        let unknown = choose(NodeEngine::Containerd, CdiSpecs::Unknown("why".to_owned()));
        assert_eq!(unknown.finding(), None);
        assert!(
            unknown
                .unknown_cdi
                .unwrap()
                .contains("not known: why; inspect")
        );
        let configured = Choice {
            strategies: vec![DeviceListStrategy::CdiAnnotations],
            ..docker
        };
        let what = configured.finding().unwrap().what;
        assert!(what.contains("it passes no CDI devices"), "{what}");
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
        let choice =
            Chooser::new(&settings, Path::new("/missing"), Path::new(DIR), Log::new()).current();
        assert_eq!(choice.to_string(), "volume-mounts, cdi-cri (configured)");
        assert!(choice.uses_cdi());
    }
}
