//! `run` and `nri`: starts the tasks of the process. One thread, and no call that blocks for long.

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use prometheus_client::metrics::histogram::Histogram;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use base::report::line;

use super::agent::Agent;
use super::agent::outlets::Outlets;
use super::agent::specs::Specs;
use super::agent::state::NodeState;
use super::control::{self, ControlCommand};
use super::role::{Role, SpecPaths};
use crate::answer::allocator::{ClaimCheck, NodeAllocator};
use crate::cdi_specs::{self, CLAIMS, DEVICE_PLUGIN, Kind, SharedSpecs};
use crate::dra;
use crate::dra::pool::Pool;
use crate::kubelet;
use crate::kubelet::kept::Keeper;
use crate::kubelet::socket::KubeletDirs;
use crate::log::Log;
use crate::metrics::server::{self, Sources};
use crate::metrics::text;
use crate::monitor::supervisor;
use crate::node::host;
use crate::nri::answer::NodePlugin;
use crate::nri::engine;
use crate::settings::Settings;
use crate::strategy::{self, Chooser};

/// How long calls of the kubelet may take that began before the end of the process.
const LAST_CALLS: Duration = Duration::from_secs(2);

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// If the plugin cannot start.
pub async fn run(
    settings: Settings,
    config_path: Option<&Path>,
    role: Role,
    paths: SpecPaths,
    nri: Option<engine::NriOptions>,
) -> Result<ExitCode> {
    let log = Log::new();
    let keeper = Arc::new(Keeper::of_process());
    let signals = signals_of_the_end()?;
    let (updates, received) = mpsc::channel(64);
    let (commands, received_commands) = mpsc::channel(1);
    let (status, registrations) = watch::channel(kubelet::Status::default());
    let latency = text::latency();

    let mut state = NodeState::new(&settings, &role);
    let outlets = Outlets::new(&settings, &role, &mut state, registrations.clone(), log);
    let spec_dir = spec_dir(&paths);
    let chooser = Chooser::new(&settings.plugin, &settings.kubelet_dir, spec_dir, log);
    let chooser = Arc::new(chooser);
    let kinds = cdi_kinds(&role, &paths, &chooser, nri.is_some());
    remove_unused_specs(&kinds, log);
    note_engine_of_claims(&settings, &role, spec_dir, log);

    let specs = Specs::new(&settings, &role, &kinds, &paths, &chooser, log);
    let shared = specs.of(DEVICE_PLUGIN);
    let engines = NodePlugin::new(config_path, outlets.offer(), shared.clone(), log);
    let engine = nri
        .as_ref()
        .map(|options| engine::serve(options, &engines, |line| log.note(line)));
    let metrics = metrics(&settings, &outlets, registrations, &latency)
        .map(|(address, sources)| server::serve(address, sources, |line| log.note(line)));
    let monitor = supervisor::SupervisorOptions::new(config_path, &settings, metrics.is_some());
    let stopping = Arc::default();
    let claims = claims(&settings, &outlets, &specs, keeper, &stopping);
    let end = ended(signals, claims.is_some(), stopping);
    let claims = claims.map(|(options, pool)| dra::serve(options, pool, log));
    let follows = matches!(role, Role::DevicePlugin(_)).then(|| Arc::clone(&chooser).follow());
    let allocator = allocator(&settings, &outlets, chooser, shared, latency);
    let note: kubelet::Log = Arc::new(move |event| log_event(log, event));
    let kubelet = matches!(role, Role::DevicePlugin(_)).then(|| {
        let dirs = KubeletDirs::of(&settings.kubelet_dir);
        kubelet::serve(dirs, outlets.list(), Arc::new(allocator), status, note)
    });
    let control = role.run_dir().map(|dir| serve_control(dir, commands, log));
    let mut agent = Agent::new(&settings, config_path, state, specs, outlets, log);
    sd_notify::notify(&[sd_notify::NotifyState::Ready]).ok();
    // This reads files of other processes, for which the kubelet does not wait.
    tokio::select! {
        result = serve(kubelet) => match result {
            Ok(never) => match never {},
            Err(error) => Err(error),
        },
        () = serve(claims) => Ok(ExitCode::SUCCESS),
        never = serve(engine) => match never {},
        never = serve(follows) => match never {},
        never = serve(metrics) => match never {},
        result = serve(control) => result,
        error = supervisor::supervise(monitor, updates) => Err(error),
        () = agent.follow(received, received_commands) => Ok(ExitCode::SUCCESS),
        () = end => Ok(ExitCode::SUCCESS),
    }
}

fn allocator(
    settings: &Settings,
    outlets: &Outlets,
    chooser: Arc<Chooser>,
    specs: Option<SharedSpecs>,
    latency: Histogram,
) -> NodeAllocator {
    NodeAllocator {
        settings: settings.clone(),
        offer: outlets.offer(),
        chooser,
        specs,
        latency,
    }
}

/// Returns the directory of the CDI specs of this process.
fn spec_dir(paths: &SpecPaths) -> &Path {
    match &paths.dir {
        Some(dir) => dir,
        None => Path::new(cdi_specs::DIR),
    }
}

/// Returns the signals that end the process.
fn signals_of_the_end() -> Result<[Signal; 2]> {
    Ok([
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    ])
}

/// Logs why claims would get no GPU with the engine of this node.
fn note_engine_of_claims(settings: &Settings, role: &Role, spec_dir: &Path, log: Log) {
    if let Role::Claims(_) = role
        && let verdict = strategy::claims_verdict(&settings.kubelet_dir, spec_dir)
        && let Some(finding) = strategy::claims_finding(&verdict)
    {
        log.finding(&finding);
    }
}

/// Waits for a signal that ends the process, and then for the calls that are not answered yet.
async fn ended(signals: [Signal; 2], has_claims: bool, stopping: Arc<watch::Sender<bool>>) {
    let [mut terminate, mut interrupt] = signals;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    stopping.send_replace(true);
    if has_claims {
        sleep(LAST_CALLS).await;
    }
}

/// Runs a task that this process may not have.
async fn serve<T>(task: Option<impl Future<Output = T>>) -> T {
    match task {
        Some(task) => task.await,
        None => std::future::pending().await,
    }
}

/// Returns the kinds of CDI devices that containers can get while this process runs.
fn cdi_kinds(role: &Role, paths: &SpecPaths, chooser: &Chooser, has_nri: bool) -> Vec<Kind> {
    let mut kinds = Vec::new();
    if matches!(role, Role::Claims(_)) {
        kinds.push(CLAIMS);
    }
    let may_use_cdi =
        matches!(role, Role::DevicePlugin(_)) && (paths.dir.is_some() || chooser.may_use_cdi());
    if may_use_cdi || has_nri {
        kinds.push(DEVICE_PLUGIN);
    }
    kinds
}

/// Removes the specs that an earlier run wrote with other settings: after the next update of the
/// driver, they would name missing files. Specs that another process keeps stay.
fn remove_unused_specs(used: &[Kind], log: Log) {
    for kind in [CLAIMS, DEVICE_PLUGIN] {
        if used.contains(&kind) {
            continue;
        }
        match cdi_specs::remove_unused(Path::new(cdi_specs::DIR), kind) {
            Ok(true) => log.note(&format!(
                "removed the CDI spec of an earlier run for {kind}, which nothing keeps current"
            )),
            Ok(false) => {}
            Err(error) => log.error(&error),
        }
    }
}

/// Returns where metrics are served, and from what; `None` if they are not wanted.
fn metrics(
    settings: &Settings,
    outlets: &Outlets,
    status: watch::Receiver<kubelet::Status>,
    latency: &Histogram,
) -> Option<(SocketAddr, Sources)> {
    let readings = outlets.readings()?;
    let sources = Sources {
        offer: outlets.offer(),
        readings,
        status,
        latency: latency.clone(),
        pod_resources: KubeletDirs::of(&settings.kubelet_dir).pod_resources,
        names: settings.plugin.metrics_names.clone(),
        node: host::node_name(),
        ignored_xids: settings.plugin.ignored_xids.clone(),
    };
    Some((settings.plugin.metrics_address?, sources))
}

/// Returns what the driver for claims serves; `None` if the kubelet gets no claims, and then sockets of an earlier process are removed.
fn claims(
    settings: &Settings,
    outlets: &Outlets,
    specs: &Specs,
    keeper: Arc<Keeper>,
    stopping: &Arc<watch::Sender<bool>>,
) -> Option<(dra::DriverOptions, watch::Receiver<Pool>)> {
    let Some((mut options, pool)) = outlets.claims() else {
        keeper.discard();
        return None;
    };
    (options.keeper, options.stopping) = (keeper, Arc::clone(stopping));
    if let Some(specs) = specs.of(CLAIMS) {
        let check = ClaimCheck {
            settings: settings.clone(),
            offer: outlets.offer(),
            specs,
        };
        options.host = Some(Arc::new(check));
    }
    Some((options, pool))
}

/// Without the socket, `clear` does not work, and `check` does not show what the kubelet has.
async fn serve_control(
    run_dir: &Path,
    commands: mpsc::Sender<ControlCommand>,
    log: Log,
) -> Result<ExitCode> {
    let result = control::serve(run_dir, commands).await;
    let error = result.err().context("the control socket was closed")?;
    log.note(&format!(
        "cannot serve the commands \"check\" and \"clear\" in {run_dir:?}: {}",
        line(&error)
    ));
    std::future::pending().await
}

fn log_event(log: Log, event: &kubelet::Event) {
    match event {
        kubelet::Event::Conflict(finding) => log.finding(finding),
        event => log.note(&event.to_string()),
    }
}
