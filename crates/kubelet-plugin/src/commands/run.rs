//! `run` and `nri`: connect the monitor, the state of the node, the kubelet and engines. One thread, and no call that blocks for long.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep_until, timeout};

use base::paths::HostPath;
use base::report::{Finding, line};
use base::tree::Tree;
use engines::kubelet_plugin::processes;
use engines::kubelet_plugin::running::OfferedDriver;
use nvidia_host::config::{Config, Limits};
use nvidia_host::feature::{Feature, Features};
use nvidia_host::inventory::Inventory;

use super::claims::{Claims, Sources as ClaimSources};
use super::control::{self, Command as Asked};
use super::observer::Observer;
use super::offered::offered;
use crate::answer::allocator::NodeAllocator;
use crate::cdi_keeper::{self, CLAIMS, DEVICE_PLUGIN, Devices, HOOK, Keeper, Kind};
use crate::dra;
use crate::kubelet;
use crate::log::Log;
use crate::metrics::server::{self, Sources};
use crate::metrics::timed::{self, Timed};
use crate::model::Resource;
use crate::monitor::message::Snapshot;
use crate::monitor::supervisor;
use crate::monitor::update::{Driver, Update};
use crate::node::changes;
use crate::node::errors::ErrorFile;
use crate::node::gpus::{NodeGpu, mig_uuids};
use crate::node::health;
use crate::node::host;
use crate::node::{NOT_ANSWERED, Node, Offer};
use crate::nri::answer::NodePlugin;
use crate::nri::engine;
use crate::settings::Settings;
use crate::settings::follow::{self, Change, Follower, Valid};
use crate::settings::values::Interface;
use crate::strategy::Chooser;

/// How long the driver may take to answer before the devices are listed as unhealthy. A list from before its answer would show all GPUs
/// as unhealthy at each restart.
const FIRST_ANSWER: Duration = Duration::from_secs(3);

/// How long the slices of an earlier run stay as they are while the driver does not answer. The kernel does not show the attributes that
/// claims select by, and a taint would evict pods at each restart of the plugin.
const FIRST_SLICES: Duration = Duration::from_secs(300);

/// How long the CDI spec may take, before the list is sent without it.
const REFRESH_PATIENCE: Duration = Duration::from_secs(10);
/// The time between two checks of the plugin's own CDI specs: files of the driver, sockets of its services and devices next to the GPUs
/// can appear at any time.
const CDI_PERIOD: Duration = Duration::from_secs(10);

/// Where the plugin reads and writes.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The directory of the kubelet; `None` if it is not served
    pub kubelet_dir: Option<PathBuf>,
    /// The directory for the CDI spec of the plugin; `None` for the default, if containers get CDI devices
    pub cdi_dir: Option<PathBuf>,
    /// The program that the runtime starts on the host because of this spec
    pub hook: PathBuf,
    /// The directory for the socket of `check` and `clear`
    pub run_dir: PathBuf,
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// If the plugin cannot start.
pub async fn run(
    settings: Settings,
    config_path: Option<&Path>,
    paths: Paths,
    nri: Option<engine::Options>,
) -> Result<ExitCode> {
    let log = Log::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (updates, received) = mpsc::channel(64);
    let (commands, asked) = mpsc::channel(1);
    let gpus = host::kernel_gpus(&settings.common, NOT_ANSWERED).unwrap_or_default();
    let mut node = Node::new(settings.clone(), gpus, Instant::now());
    let errors = paths
        .kubelet_dir
        .is_some()
        .then(|| ErrorFile::new(&paths.run_dir, &settings.common));
    if let Some(errors) = &errors {
        let now = Instant::now();
        node.restore(errors.read((now, SystemTime::now())), now);
    }
    let (offers, offer) = watch::channel(node.offer());
    let (lists, list) = watch::channel(Arc::default());
    let engines = NodePlugin::new(config_path.map(Path::to_owned), offer.clone(), log);
    let kubelet_dir = paths.kubelet_dir.as_deref();
    let chooser = Chooser::new(
        &settings.plugin,
        kubelet_dir.unwrap_or_else(|| Path::new("")),
        log,
    );
    let claims = kubelet_dir
        .filter(|_| settings.plugin.interface == Interface::Dra)
        .map(|_| Claims::new(&settings));
    let is_plugin = kubelet_dir.is_some() && claims.is_none();
    let may_use_cdi = is_plugin && (paths.cdi_dir.is_some() || chooser.current().may_use_cdi());
    let kinds = cdi_kinds(claims.is_some(), may_use_cdi || nri.is_some());
    remove_unused_specs(&kinds, log);
    let cdi_dir = paths
        .cdi_dir
        .clone()
        .unwrap_or_else(|| cdi_keeper::DIR.into());
    let latency = timed::latency();
    let allocator = NodeAllocator::new(settings.clone(), offer.clone(), chooser);
    let allocator = Arc::new(Timed::new(Arc::new(allocator), latency.clone()));
    let (status, _) = watch::channel(kubelet::Status::default());
    let observer = paths
        .kubelet_dir
        .is_some()
        .then(|| Observer::new(&settings, log));
    let metrics = match (
        &paths.kubelet_dir,
        &observer,
        settings.plugin.metrics_address,
    ) {
        (Some(kubelet_dir), Some(observer), Some(address)) => {
            let (readings, status) = (observer.readings(), status.subscribe());
            let pod_resources = kubelet::pods::socket(kubelet_dir);
            let (names, node) = (settings.plugin.metrics_names.clone(), host::node_name());
            let ignored_xids = settings.plugin.ignored_xids.clone();
            Some((
                address,
                Sources {
                    offer,
                    readings,
                    status,
                    latency,
                    pod_resources,
                    names,
                    node,
                    ignored_xids,
                },
            ))
        }
        _ => None,
    };
    let note: kubelet::Log = Arc::new(move |event| log_event(log, event));
    let keeper = |kind: &Kind| Keeper::new(*kind, &settings.common, &cdi_dir, &paths.hook);
    let cdi = kinds.iter().map(keeper).collect();
    let driver = claims
        .as_ref()
        .map(|claims| (dra::Options::new(&settings), claims.pool()));
    let follower = Follower::new(config_path, settings.common.devices.clone());
    let extra_devices = if paths.kubelet_dir.is_some() {
        settings.plugin.extra_devices
    } else {
        Features::EMPTY
    };
    let patience = if claims.is_some() {
        FIRST_SLICES
    } else {
        FIRST_ANSWER
    };
    let mut agent = Agent {
        settings,
        extra_devices,
        node,
        offers,
        lists,
        registrations: status.subscribe(),
        driver_for_claims: driver.as_ref().map(|(options, _)| options.clone()),
        claims,
        observer,
        errors,
        held: None,
        cdi,
        cdi_error: None,
        follower,
        driver: Driver::Unknown,
        is_unanswered: true,
        lists_by: Some(Instant::now() + patience),
        reported: Vec::new(),
        log,
    };
    let monitor = supervisor::Options::new(config_path, &agent.settings, metrics.is_some());
    sd_notify::notify(&[sd_notify::NotifyState::Ready]).ok();
    let lists_to = paths.kubelet_dir.as_ref().filter(|_| driver.is_none());
    tokio::select! {
        result = serve_kubelet(lists_to, list, allocator, status, note) => match result {
            Ok(never) => match never {},
            Err(error) => Err(error),
        },
        never = serve_claims(driver, log) => match never {},
        never = serve_engine(nri.as_ref(), &engines, log) => match never {},
        error = supervisor::supervise(monitor, updates) => Err(error),
        result = serve_control(&paths, commands, log) => result,
        never = serve_metrics(metrics, log) => match never {},
        () = agent.follow(received, asked) => Ok(ExitCode::SUCCESS),
        _ = terminate.recv() => Ok(ExitCode::SUCCESS),
        _ = interrupt.recv() => Ok(ExitCode::SUCCESS),
    }
}

/// Returns the kinds of CDI devices that containers can get.
fn cdi_kinds(has_claims: bool, has_others: bool) -> Vec<Kind> {
    [(CLAIMS, has_claims), (DEVICE_PLUGIN, has_others)]
        .iter()
        .filter(|(_, is_used)| *is_used)
        .map(|(kind, _)| *kind)
        .collect()
}

/// Removes the specs that an earlier run wrote with other settings: after the next update of the driver, they would name missing files. A
/// process of the other unit, `oci-nvidia-nri`, uses one of the files and keeps it current.
fn remove_unused_specs(used: &[Kind], log: Log) {
    let is_of_engine = || {
        Tree::open(&HostPath::new("/")).is_ok_and(|host| {
            processes::of_host(&host)
                .iter()
                .any(|found| found.for_engine)
        })
    };
    for kind in [CLAIMS, DEVICE_PLUGIN] {
        if used.contains(&kind) || (kind == DEVICE_PLUGIN && is_of_engine()) {
            continue;
        }
        match cdi_keeper::remove_unused(Path::new(cdi_keeper::DIR), kind) {
            Ok(true) => log
                .note("removed the CDI spec of an earlier run, because containers get no CDI devices from this plugin"),
            Ok(false) => {}
            Err(error) => log.error(&error),
        }
    }
}

async fn serve_claims(
    driver: Option<(dra::Options, watch::Receiver<dra::pool::Pool>)>,
    log: Log,
) -> Infallible {
    match driver {
        Some((options, pool)) => dra::serve(options, pool, log).await,
        None => std::future::pending().await,
    }
}

async fn serve_kubelet(
    dir: Option<&PathBuf>,
    list: watch::Receiver<Arc<Vec<Resource>>>,
    allocator: Arc<Timed>,
    status: watch::Sender<kubelet::Status>,
    note: kubelet::Log,
) -> Result<Infallible> {
    match dir {
        Some(dir) => kubelet::serve(dir.clone(), list, allocator, status, note).await,
        None => std::future::pending().await,
    }
}

async fn serve_engine(
    options: Option<&engine::Options>,
    plugin: &NodePlugin,
    log: Log,
) -> Infallible {
    match options {
        Some(options) => engine::serve(options, plugin, |event| log.note(&event.to_string())).await,
        None => std::future::pending().await,
    }
}

async fn serve_metrics(metrics: Option<(SocketAddr, Sources)>, log: Log) -> Infallible {
    match metrics {
        Some((address, sources)) => server::serve(address, sources, |line| log.note(line)).await,
        None => std::future::pending().await,
    }
}

/// Without the socket, `clear` does not work, and `check` does not show what the kubelet has.
async fn serve_control(paths: &Paths, commands: mpsc::Sender<Asked>, log: Log) -> Result<ExitCode> {
    if paths.kubelet_dir.is_none() {
        return std::future::pending().await;
    }
    let run_dir = &paths.run_dir;
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

struct Agent {
    settings: Settings,
    /// The features that containers are to get; none without a kubelet
    extra_devices: Features,
    node: Node,
    offers: watch::Sender<Offer>,
    lists: watch::Sender<Arc<Vec<Resource>>>,
    /// The state of the resources at the kubelet
    registrations: watch::Receiver<kubelet::Status>,
    /// `None` if the kubelet gets resources
    driver_for_claims: Option<dra::Options>,
    /// The devices for claims; `None` if the kubelet gets resources
    claims: Option<Claims>,
    /// `None` without a kubelet
    observer: Option<Observer>,
    /// `None` without a kubelet
    errors: Option<ErrorFile>,
    held: Option<Held>,
    /// One for each kind of names
    cdi: Vec<Keeper>,
    /// The error of the CDI spec that is in the log
    cdi_error: Option<String>,
    follower: Follower,
    /// What the log says about the driver
    driver: Driver,
    /// NVML has not answered or failed since the plugin started; it may hang.
    is_unanswered: bool,
    /// When the devices are listed for the first time, unless the driver answers before; `None` if they are listed
    lists_by: Option<Instant>,
    /// The findings that are in the log
    reported: Vec<Finding>,
    log: Log,
}

/// New devices, which are not published until the CDI spec of the host has them: engines look up CDI devices at the next container,
/// which the kubelet may start as soon as it has the list. In the meantime, the health of the known devices is published.
struct Held {
    snapshot: Box<Snapshot>,
    refreshed: Pin<Box<dyn Future<Output = ()>>>,
}

impl Agent {
    /// Publishes every change until the monitor's supervisor ends.
    async fn follow(
        &mut self,
        mut updates: mpsc::Receiver<Update>,
        mut asked: mpsc::Receiver<Asked>,
    ) {
        self.list_kernel_gpus();
        let mut cdi_period = interval(CDI_PERIOD);
        let mut follow_period = interval(follow::PERIOD);
        follow_period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let next_tick = self.node.next_tick();
            tokio::select! {
                update = updates.recv() => match update {
                    Some(update) => self.apply(update),
                    None => return,
                },
                Some(command) = asked.recv() => self.obey(command),
                snapshot = devices_ready(&mut self.held) => self.set_devices(&snapshot),
                _ = follow_period.tick() => match self.follower.poll(Instant::now()) {
                    Some(change) => self.apply_change(change),
                    None => continue,
                },
                _ = cdi_period.tick() => match self.is_unanswered {
                    true => self.list_kernel_gpus(),
                    false => self.keep_cdi(Keeper::refresh),
                },
                () = sleep_until(next_tick.unwrap_or_else(Instant::now).into()), if next_tick.is_some() => {}
                () = sleep_until(self.lists_by.unwrap_or_else(Instant::now).into()), if self.lists_by.is_some() => {}
            }
            self.node.tick(Instant::now());
            self.publish();
            if let Some(observer) = &mut self.observer {
                observer.publish(&self.node);
            }
            self.publish_claims();
            if let Some(file) = &mut self.errors {
                let now = (Instant::now(), SystemTime::now());
                file.update(self.node.errors(), now)
                    .unwrap_or_else(|error| self.log.note(&error));
            }
        }
    }

    fn publish_claims(&mut self) {
        let (Some(claims), Some(observer)) = (&mut self.claims, &self.observer) else {
            return;
        };
        let no_names = Arc::default();
        let sources = ClaimSources {
            facts: observer.facts(),
            driver: &self.driver,
            is_ready: self.lists_by.is_none(),
            is_unanswered: self.is_unanswered,
            cdi_error: self.cdi_error.as_deref(),
            in_spec: self.cdi.first().map_or(&no_names, Keeper::names),
        };
        claims.publish(&self.node, sources);
    }

    /// Takes the GPUs that the kernel lists into account, until NVML answers. The kernel knows the UUID of a GPU that was opened once.
    fn list_kernel_gpus(&mut self) {
        let gpus = host::kernel_gpus(&self.settings.common, NOT_ANSWERED).unwrap_or_default();
        let in_spec = gpus.iter().map(|NodeGpu { gpu, .. }| gpu.clone()).collect();
        self.node.set_unanswered(gpus);
        let devices = Devices::Unanswered(in_spec);
        self.keep_cdi(|cdi| cdi.set(&devices));
    }

    /// Carries out a command. Its caller may have gone.
    fn obey(&mut self, command: Asked) {
        match command {
            Asked::Clear(uuid, done) => drop(done.send(self.node.clear(&uuid))),
            Asked::Devices(done) => {
                let now = (Instant::now(), SystemTime::now());
                let mut devices = offered(
                    &self.lists.borrow(),
                    |name| self.is_live(name),
                    &self.node,
                    now,
                );
                devices.driver = self.offered_driver();
                drop(done.send(devices));
            }
        }
    }

    /// Reports whether the kubelet has this resource, or the driver for claims.
    fn is_live(&self, resource: &str) -> bool {
        match &self.driver_for_claims {
            Some(options) => *options.registered.borrow() == Some(true),
            None => self
                .registrations
                .borrow()
                .get(resource)
                .is_some_and(|registration| registration.live),
        }
    }

    fn offered_driver(&self) -> Option<OfferedDriver> {
        let options = self.driver_for_claims.as_ref()?;
        Some(OfferedDriver {
            name: options.driver.clone(),
            is_registered: *options.registered.borrow() == Some(true),
            problem: self
                .claims
                .as_ref()
                .and_then(|claims| claims.pool().borrow().problem.clone()),
            unpublished: options.unpublished.borrow().clone(),
        })
    }

    fn apply(&mut self, update: Update) {
        self.log.debug(|| format!("the driver: {update:?}"));
        self.log_driver(&update);
        if let Some(observer) = &mut self.observer {
            observer.apply(&update);
        }
        self.node.apply_to_health(&update, Instant::now());
        self.is_unanswered &= !matches!(
            update,
            Update::Snapshot(_) | Update::Absent(_) | Update::LetGo
        );
        if matches!(update, Update::Absent(_) | Update::LetGo) {
            self.keep_cdi(|cdi| cdi.set(&Devices::Absent));
        }
        let Update::Snapshot(snapshot) = update else {
            return;
        };
        let devices = Devices::Known(snapshot.inventory.clone());
        self.keep_cdi(|cdi| cdi.set(&devices));
        // Devices that are held may be in the CDI spec already.
        if self.held.is_some() || self.node.mig_uuids() != mig_uuids(&snapshot.inventory.gpus) {
            self.held = Some(Held {
                snapshot,
                refreshed: Box::pin(refresh_cdi(self.log)),
            });
        } else {
            self.set_devices(&snapshot);
        }
    }

    /// Updates the plugin's own CDI specs and the features that containers get, and logs what is wrong with the specs.
    fn keep_cdi(&mut self, update: impl Fn(&mut Keeper) -> Result<()>) {
        let mut result = Ok(());
        for keeper in &mut self.cdi {
            // An error of one kind does not keep the others.
            let updated = update(keeper);
            result = result.and(updated);
        }
        // The specs of each kind have equal devices.
        let last = self.cdi.last();
        let channels = last
            .map(|keeper| keeper.imex_channels().to_vec())
            .unwrap_or_default();
        self.node
            .set_devices_in_specs(last.map(Keeper::features).unwrap_or_default(), channels);
        self.find_features();
        let error = result.as_ref().err().map(|error| format!("{error:#}"));
        if error == self.cdi_error {
            return;
        }
        match &result {
            Ok(()) => self.log.note("the CDI spec is current again"),
            Err(error) => self.log.error(error),
        }
        self.cdi_error = error;
    }

    /// Determines which features containers get: a container with the name of a device that is in no spec would not start.
    fn find_features(&mut self) {
        if self.extra_devices.is_empty() {
            return;
        }
        let config = Config {
            devices: self.node.limits().clone(),
            ..self.settings.common.clone()
        };
        let Ok((found, findings)) = host::extra_devices(&config, self.extra_devices) else {
            return;
        };
        let in_specs = |feature: &Feature| self.cdi.iter().all(|cdi| cdi.features().has(*feature));
        self.node
            .set_features(found.iter().filter(in_specs).collect(), findings);
    }

    /// Applies a change of config.toml. The CDI spec has a GPU before the kubelet learns of it.
    fn apply_change(&mut self, change: Change) {
        let Valid {
            limits,
            was_held,
            findings,
        } = match change {
            Change::Valid(valid) => valid,
            Change::Held(error) => return self.log.error(&error),
        };
        let what = match (was_held, &limits) {
            (true, None) => {
                Some("config.toml is valid again, with the same limits in [devices]".to_owned())
            }
            (true, Some(limits)) => Some(format!(
                "config.toml is valid again, with other limits: {}",
                in_words(limits)
            )),
            (false, Some(limits)) => Some(format!(
                "the limits in config.toml have changed: {}",
                in_words(limits)
            )),
            (false, None) => None,
        };
        if let Some(limits) = limits {
            self.node.set_limits(limits.clone());
            self.keep_cdi(|cdi| cdi.set_limits(&limits));
        }
        what.iter().for_each(|what| self.log.note(what));
        findings
            .iter()
            .for_each(|finding| self.log.finding(finding));
    }

    fn set_devices(&mut self, snapshot: &Snapshot) {
        self.node.set_devices(snapshot);
        self.node.set_numa_nodes(
            host::numa_nodes(&self.settings.common, self.node.gpus()).unwrap_or_default(),
        );
    }

    /// Logs that the driver works, or why it does not, once.
    fn log_driver(&mut self, update: &Update) {
        let Some(driver) = Driver::after(update).filter(|driver| *driver != self.driver) else {
            return;
        };
        match (&driver, update) {
            (Driver::Fails(why), _) => self.log.note(why),
            (Driver::LetGo, _) => self
                .log
                .note("the driver is being replaced, and the plugin does not use it"),
            (_, Update::Snapshot(snapshot)) => self.log.note(&summary(&snapshot.inventory)),
            _ => {}
        }
        self.driver = driver;
    }

    /// Publishes the offer if it has changed, and logs which devices became healthy or unhealthy.
    fn publish(&mut self) {
        let offer = self.node.offer();
        if offer != *self.offers.borrow() {
            self.log_changes(&offer);
            self.offers.send_replace(offer);
        }
        let is_answered = self.driver != Driver::Unknown && self.held.is_none();
        self.lists_by = self
            .lists_by
            .filter(|by| !is_answered && Instant::now() < *by);
        if self.lists_by.is_some() {
            return;
        }
        let resources = Arc::clone(&self.offers.borrow().resources);
        self.lists.send_if_modified(|list| {
            let changed = *list != resources;
            *list = resources;
            changed
        });
    }

    fn log_changes(&mut self, offer: &Offer) {
        let changes = changes::of_devices(&self.offers.borrow(), offer, &self.settings.plugin);
        changes.iter().for_each(|change| self.log.note(change));
        let old = Arc::clone(&self.offers.borrow().resources);
        let mut logged: Vec<&str> = Vec::new();
        for device in offer
            .resources
            .iter()
            .flat_map(|resource| &resource.devices)
        {
            let before = old
                .iter()
                .flat_map(|resource| &resource.devices)
                .find(|known| known.id == device.id);
            let is_new = before.is_none_or(|before| before.unhealthy != device.unhealthy);
            if !is_new || logged.contains(&device.gpu.as_str()) {
                continue;
            }
            logged.push(&device.gpu);
            match &device.unhealthy {
                None => self.log.note(&format!("{} is healthy", device.gpu)),
                // Each start would otherwise log that all GPUs are unhealthy, for a fraction of a second.
                Some(why)
                    if why == health::UNKNOWN
                        && before.is_none_or(|before| before.unhealthy.is_some()) => {}
                Some(why) => self
                    .log
                    .note(&format!("{} is unhealthy: {why}", device.gpu)),
            }
        }
        for finding in offer
            .findings
            .iter()
            .filter(|finding| !self.reported.contains(finding))
        {
            self.log.finding(finding);
        }
        self.reported.clone_from(&offer.findings);
    }
}

/// Waits until the CDI spec is refreshed, and returns the devices that were held.
async fn devices_ready(held: &mut Option<Held>) -> Box<Snapshot> {
    if let Some(waiting) = held {
        waiting.refreshed.as_mut().await;
    }
    match held.take() {
        Some(Held { snapshot, .. }) => snapshot,
        None => std::future::pending().await,
    }
}

fn in_words(limits: &Limits) -> String {
    let deny: Vec<_> = limits
        .deny
        .iter()
        .cloned()
        .chain(limits.denied_features.names())
        .collect();
    format!("allow = {:?}, deny = {deny:?}", limits.allow)
}

fn summary(inventory: &Inventory) -> String {
    let count = inventory.gpus.len() + inventory.failed.len();
    let gpus = if count == 1 { "GPU" } else { "GPUs" };
    match inventory.driver_version.as_str() {
        "" => format!("the node has {count} {gpus}"),
        version => format!("the node has {count} {gpus} and driver {version}"),
    }
}

/// Refreshes the CDI spec of the host, if it exists. Without the hook, no program can refresh it.
async fn refresh_cdi(log: Log) {
    let mut command = Command::new(HOOK);
    command
        .args(["cdi", "refresh"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true);
    let result = timeout(REFRESH_PATIENCE, command.status()).await;
    let failure = match result {
        Ok(Ok(status)) if status.success() => return,
        Ok(Ok(status)) => status.to_string(),
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "it did not end in time".to_owned(),
    };
    log.note(&format!(
        "cannot refresh the CDI spec with \"{HOOK} cdi refresh\": {failure}"
    ));
}
