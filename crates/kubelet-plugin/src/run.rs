//! `run`: connects the monitor, the state of the node and the kubelet. One thread, and no call that blocks for long.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep_until, timeout};

use base::report::Finding;
use nvidia_host::config::Config;

use crate::allocator::NodeAllocator;
use crate::control::{self, Clear};
use crate::host;
use crate::kubelet;
use crate::log::Log;
use crate::monitor::supervisor;
use crate::monitor::update::Update;
use crate::node::{Node, Offer};

/// The program that refreshes the CDI spec of the host, if it is installed.
const HOOK: &str = "/usr/bin/oci-nvidia-hook";
/// How long the CDI spec may take, before the list is sent without it.
const REFRESH_PATIENCE: Duration = Duration::from_secs(30);
/// Why a GPU is unhealthy before NVML has answered.
const NOT_ANSWERED: &str = "NVML has not answered yet";

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// If the plugin cannot start.
pub async fn run(config: Config, config_path: Option<&Path>, kubelet_dir: PathBuf, run_dir: &Path) -> Result<ExitCode> {
    let log = Log::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (updates, received) = mpsc::channel(64);
    let (commands, cleared) = mpsc::channel(1);
    let gpus = host::kernel_gpus(&config, NOT_ANSWERED).unwrap_or_default();
    let node = Node::new(config.clone(), gpus, Instant::now());
    let (offers, offer) = watch::channel(node.offer());
    let (lists, list) = watch::channel(Arc::clone(&offers.borrow().resources));
    let allocator = Arc::new(NodeAllocator::new(config.clone(), offer));
    let (status, _) = watch::channel(kubelet::Status::default());
    let note: kubelet::Log = Arc::new(move |event| log_event(log, event));
    let mut agent = Agent { config, node, offers, lists, reported: Vec::new(), log };
    let monitor = supervisor::Options::new(config_path, agent.config.kubelet_plugin.nvml_timeout);
    sd_notify::notify(&[sd_notify::NotifyState::Ready]).ok();
    tokio::select! {
        result = kubelet::serve(kubelet_dir, list, allocator, status, note) => match result {
            Ok(never) => match never {},
            Err(error) => Err(error),
        },
        error = supervisor::supervise(monitor, updates) => Err(error),
        result = serve_control(run_dir, commands, log) => result,
        () = agent.follow(received, cleared) => Ok(ExitCode::SUCCESS),
        _ = terminate.recv() => Ok(ExitCode::SUCCESS),
        _ = interrupt.recv() => Ok(ExitCode::SUCCESS),
    }
}

/// Without the socket, only `clear` does not work.
async fn serve_control(run_dir: &Path, commands: mpsc::Sender<Clear>, log: Log) -> Result<ExitCode> {
    let result = control::serve(run_dir, commands).await;
    let error = result.err().context("the control socket was closed")?;
    log.note(&format!("cannot serve the command \"clear\" in {run_dir:?}: {error}"));
    std::future::pending().await
}

fn log_event(log: Log, event: &kubelet::Event) {
    match event {
        kubelet::Event::Conflict(finding) => log.finding(finding),
        event => log.note(&event.to_string()),
    }
}

struct Agent {
    config: Config,
    node: Node,
    offers: watch::Sender<Offer>,
    lists: watch::Sender<Arc<Vec<crate::model::Resource>>>,
    /// The findings that are in the log
    reported: Vec<Finding>,
    log: Log,
}

impl Agent {
    /// Publishes every change until the monitor's supervisor ends.
    async fn follow(&mut self, mut updates: mpsc::Receiver<Update>, mut cleared: mpsc::Receiver<Clear>) {
        loop {
            let next_tick = self.node.next_tick();
            tokio::select! {
                update = updates.recv() => match update {
                    Some(update) => self.apply(&update).await,
                    None => return,
                },
                Some(Clear { uuid, done }) = cleared.recv() => {
                    // The caller of the command may have gone.
                    done.send(self.node.clear(&uuid)).ok();
                }
                () = sleep_until(next_tick.unwrap_or_else(Instant::now).into()), if next_tick.is_some() => {}
            }
            self.node.tick(Instant::now());
            self.publish();
        }
    }

    async fn apply(&mut self, update: &Update) {
        let before = self.mig_devices();
        self.node.apply(update, Instant::now());
        if let Update::Snapshot(_) = update {
            self.node.set_numa_nodes(host::numa_nodes(&self.config, self.node.gpus()).unwrap_or_default());
        }
        // Engines look up CDI devices at the next container, which the kubelet may start as soon as it has the list.
        if self.mig_devices() != before {
            refresh_cdi(self.log).await;
        }
    }

    fn mig_devices(&self) -> Vec<String> {
        let gpus = self.node.gpus().iter();
        gpus.flat_map(|gpu| gpu.gpu.mig_devices.iter().map(|mig| mig.uuid.clone())).collect()
    }

    /// Publishes the offer if it has changed, and logs which devices became healthy or unhealthy.
    fn publish(&mut self) {
        let offer = self.node.offer();
        if offer == *self.offers.borrow() {
            return;
        }
        self.log_changes(&offer);
        let resources = Arc::clone(&offer.resources);
        self.offers.send_replace(offer);
        self.lists.send_if_modified(|list| {
            let changed = *list != resources;
            *list = resources;
            changed
        });
    }

    fn log_changes(&mut self, offer: &Offer) {
        let old = Arc::clone(&self.offers.borrow().resources);
        let mut logged: Vec<&str> = Vec::new();
        for device in offer.resources.iter().flat_map(|resource| &resource.devices) {
            let before = old.iter().flat_map(|resource| &resource.devices).find(|known| known.id == device.id);
            let is_new = before.is_none_or(|before| before.unhealthy != device.unhealthy);
            if !is_new || logged.contains(&device.gpu.as_str()) {
                continue;
            }
            logged.push(&device.gpu);
            match &device.unhealthy {
                None => self.log.note(&format!("{} is healthy", device.gpu)),
                Some(why) => self.log.note(&format!("{} is unhealthy: {why}", device.gpu)),
            }
        }
        for finding in offer.findings.iter().filter(|finding| !self.reported.contains(finding)) {
            self.log.finding(finding);
        }
        self.reported.clone_from(&offer.findings);
    }
}

/// Refreshes an existing CDI spec of the host. Without the hook's package, there is none.
async fn refresh_cdi(log: Log) {
    let mut command = Command::new(HOOK);
    command.args(["cdi", "refresh"]).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    let result = timeout(REFRESH_PATIENCE, command.status()).await;
    let failure = match result {
        Ok(Ok(status)) if status.success() => return,
        Ok(Ok(status)) => status.to_string(),
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "it did not end in time".to_owned(),
    };
    log.note(&format!("cannot refresh the CDI spec with \"{HOOK} cdi refresh\": {failure}"));
}
