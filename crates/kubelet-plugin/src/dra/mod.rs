//! Offers the GPUs as devices for claims: Dynamic Resource Allocation.
//!
//! Nothing is stored. The devices and what a claim gets follow from the state of the node, and the CDI spec has all devices at any time.
//!
//! | module | purpose |
//! |---|---|
//! | [`devices`] | which devices the node has for claims |
//! | [`pool`] | the devices at one time |
//! | [`mod@slice`] | describes them for the API server |
//! | [`plan`] | decides which slices are written |
//! | [`pace`] | spreads the requests of a cluster's nodes |
//! | [`publisher`] | writes them, and watches them |
//! | [`access`] | the API server, with the kubelet's credentials |
//! | [`config`], [`quantity`], [`prepare`] | decide what a claim gets |
//! | [`probe`] | asks once what the credentials permit, for `check` |
//! | [`service`], [`health`] | answer the kubelet |
//! | [`sockets`] | our sockets |
//! | [`other_drivers`] | finds other drivers and device plugins |
//! | [`held`] | devices that pods of a device plugin still have |
//! | [`authority`], [`connection`] | correct the requests of the kubelet's plugin watcher |

pub mod access;
pub mod authority;
pub mod config;
mod connection;
pub mod devices;
mod health;
mod held;
mod other_drivers;
pub mod pace;
pub mod plan;
pub mod pool;
pub mod prepare;
pub mod probe;
mod publisher;
mod quantity;
mod service;
pub mod slice;
mod sockets;

use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use base::report::Finding;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::answer::allocator::ClaimCheck;
use crate::dir_events::DirEvents;
use crate::kubelet::kept::Keeper;
use crate::kubelet::socket::{KubeletDirs, SocketId};
use crate::log::Log;
use crate::settings::Settings;
use crate::settings::values::TaintEffect;
use access::Access;
use pace::Pace;
use pool::Pool;
use publisher::Publisher;
use sockets::Sockets;

/// How often our sockets are inspected if their directories cannot be watched. The kubelet finds a new one by itself.
const INSPECTION: Duration = Duration::from_secs(1);
/// How long the kubelet may take to register the driver before the absence of its sockets is reported.
const PATIENCE: Duration = Duration::from_secs(5);
/// The time before the first search for other drivers and device plugins, and after a change of our directories. It doubles with each further
/// search.
const SEARCH: Duration = Duration::from_secs(10);
/// The longest time between two searches, as in the device-plugin mode.
const LONGEST_SEARCH: Duration = Duration::from_secs(60);

/// What the driver needs to know.
#[derive(Clone, Debug)]
pub struct DriverOptions {
    /// The directory of the kubelet
    pub kubelet_dir: PathBuf,
    /// The name of the driver
    pub driver: String,
    /// The taint of a device that does not work
    pub effect: TaintEffect,
    /// The credentials, if not the kubelet's
    pub kubeconfig: Option<PathBuf>,
    /// The name of the node, if it is not in the credentials
    pub node: Option<String>,
    /// Whether the kubelet has accepted the driver; `None` before it has decided
    pub registered: Arc<watch::Sender<Option<bool>>>,
    /// Why the API server does not have the devices as they are; `None` if it has them
    pub unpublished: Arc<watch::Sender<Option<String>>>,
    /// How long the publisher waits before another attempt
    pub pace: Pace,
    /// Examines the devices of a claim before it is prepared
    pub host: Option<Arc<ClaimCheck>>,
    /// Keeps the sockets open while the service restarts
    pub keeper: Arc<Keeper>,
    /// Becomes true when the process is about to end
    pub stopping: Arc<watch::Sender<bool>>,
}

impl DriverOptions {
    /// Takes the options from the settings.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        let plugin = &settings.plugin;
        Self {
            kubelet_dir: settings.kubelet_dir.clone(),
            driver: plugin.driver_name.clone(),
            effect: plugin.taint_effect,
            kubeconfig: plugin.kubeconfig.clone(),
            node: plugin.node_name.clone(),
            registered: Arc::new(watch::Sender::new(None)),
            unpublished: Arc::default(),
            pace: pace::PUBLISHER,
            host: None,
            keeper: Arc::default(),
            stopping: Arc::default(),
        }
    }
}

/// Serves the kubelet, and publishes the devices, until the process is about to end, and then answers the calls that it has. While another
/// program has the GPUs, the driver waits.
pub async fn serve(options: DriverOptions, pool: watch::Receiver<Pool>, log: Log) {
    // The kubelet may hang: the slices of an earlier run stay until it has answered, or for two seconds.
    let before = Pool {
        is_ready: false,
        ..pool.borrow().clone()
    };
    let marked = watch::Sender::new(before);
    let devices = marked.subscribe();
    let pod_resources = KubeletDirs::of(&options.kubelet_dir).pod_resources;
    tokio::select! {
        () = held::follow(&pod_resources, pool, marked) => {}
        () = serve_devices(options, devices, log) => {}
    }
}

/// Serves these devices.
async fn serve_devices(options: DriverOptions, pool: watch::Receiver<Pool>, log: Log) {
    let access = Arc::new(Access::new(
        options.kubeconfig.as_deref(),
        &options.kubelet_dir,
    ));
    let node = Arc::new(watch::Sender::new(options.node.clone().unwrap_or_default()));
    let mut reported: Option<String> = None;
    loop {
        let refused = match conflict(&options, &pool, &options.keeper.waiting()).await {
            Some(finding) => {
                options.keeper.discard();
                StartError::Conflict(finding)
            }
            None => match open(&options, &pool, &access, &node) {
                Err(error) => StartError::Failed(error),
                Ok(sockets) => {
                    reported = None;
                    let publisher = Publisher::new(publisher::PublisherOptions {
                        options: options.clone(),
                        access: access.clone(),
                        pool: pool.clone(),
                        node: node.clone(),
                        log,
                    });
                    tokio::select! {
                        never = publisher.run() => match never {},
                        end = watch_over(&options, &pool, sockets, log) => match end {
                            Some(refused) => refused,
                            None => return,
                        },
                    }
                }
            },
        };
        refused.log_once(&mut reported, log);
        tokio::select! {
            () = sleep(INSPECTION) => {}
            () = stopped(&options) => return,
        }
    }
}

/// Creates the sockets if the kubelet's directory exists: the kubelet may be installed later.
fn open(
    options: &DriverOptions,
    pool: &watch::Receiver<Pool>,
    access: &Arc<Access>,
    node: &watch::Sender<String>,
) -> Result<Sockets> {
    let dir = &options.kubelet_dir;
    if let Err(error) = std::fs::metadata(dir) {
        anyhow::bail!("the kubelet's directory {dir:?} cannot be used: {error}");
    }
    let service = service::ClaimService {
        options: options.clone(),
        pool: pool.clone(),
        access: access.clone(),
        node: node.subscribe(),
    };
    let health = health::HealthService {
        pool: pool.clone(),
        node: node.subscribe(),
        stopping: options.stopping.subscribe(),
    };
    Sockets::open(options, service, health)
}

/// Why the driver does not serve the kubelet.
enum StartError {
    /// Another program has the GPUs.
    Conflict(Finding),
    /// The sockets cannot be created.
    Failed(anyhow::Error),
    /// Another program has removed the sockets.
    Removed,
}

impl StartError {
    fn log_once(self, reported: &mut Option<String>, log: Log) {
        let (text, finding) = match self {
            Self::Removed => {
                return log.note("the sockets of the driver were removed, and are created again");
            }
            Self::Conflict(finding) => (finding.what.clone(), Some(finding)),
            Self::Failed(error) => (format!("cannot serve claims: {error:#}"), None),
        };
        if reported.as_ref() == Some(&text) {
            return;
        }
        match &finding {
            Some(finding) => log.finding(finding),
            None => log.note(&text),
        }
        *reported = Some(text);
    }
}

async fn conflict(
    options: &DriverOptions,
    pool: &watch::Receiver<Pool>,
    ours: &[SocketId],
) -> Option<Finding> {
    let devices = Arc::clone(&pool.borrow().devices);
    other_drivers::conflict(&options.kubelet_dir, &options.driver, ours, &devices).await
}

/// Returns why the driver does not serve the kubelet any more: the sockets are gone, or another program has the GPUs. Returns `None` when
/// the process is about to end, and all calls are answered.
async fn watch_over(
    options: &DriverOptions,
    pool: &watch::Receiver<Pool>,
    mut sockets: Sockets,
    log: Log,
) -> Option<StartError> {
    let mut registered = options.registered.subscribe();
    let mut searched = Instant::now();
    let mut pause = SEARCH;
    registered.mark_changed();
    let mut patience = pin!(sleep(PATIENCE));
    let mut is_patient = true;
    let events = DirEvents::new();
    loop {
        let mut are_watched = true;
        for dir in sockets.dirs() {
            are_watched &= events.add(&dir);
        }
        let inspection = if are_watched { pause } else { INSPECTION };
        tokio::select! {
            event = timeout(inspection, events.next()) => if event.is_ok() {
                pause = SEARCH;
            },
            () = &mut patience, if is_patient => {
                is_patient = false;
                if let Some(missing) = KubeletDirs::of(&options.kubelet_dir).missing()
                    && *registered.borrow() != Some(true)
                {
                    log.note(&format!("cannot find the kubelet: {missing}"));
                }
            }
            () = stopped(options) => {
                sockets.finish().await;
                return None;
            }
            // The sender is in the options.
            _ = registered.changed() => match *registered.borrow_and_update() {
                Some(true) => sockets.store(),
                Some(false) | None => sockets.withdraw(),
            },
        }
        if !sockets.exist() {
            sockets.withdraw();
            return Some(StartError::Removed);
        }
        if searched.elapsed() >= pause {
            searched = Instant::now();
            pause = (pause * 2).min(LONGEST_SEARCH);
            if let Some(finding) = conflict(options, pool, &sockets.ids()).await {
                sockets.withdraw();
                return Some(StartError::Conflict(finding));
            }
        }
    }
}

/// Waits until the process is about to end.
async fn stopped(options: &DriverOptions) {
    let mut stopping = options.stopping.subscribe();
    // The sender is in the options.
    let _ = stopping.wait_for(|is_stopping| *is_stopping).await;
}
