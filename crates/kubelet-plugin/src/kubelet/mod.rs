//! Offers resources to the kubelet: one gRPC server for each resource, and its registration.
//!
//! | module | what it does |
//! |---|---|
//! | [`registration`] | decides what to do about a registration |
//! | [`registrar`] | keeps a resource registered |
//! | [`socket_watch`] | watches the kubelet's directory |
//! | [`other_plugins`] | finds other device plugins |
//! | [`server`], [`streams`] | answer the kubelet |
//! | [`listener`], [`socket`] | our sockets and their connections |
//! | [`kept`] | sockets that stay open while the service restarts |
//! | [`pods`] | lists which containers have which devices |
//! | [`dial`] | connects to sockets |
//! | [`status`] | what the tasks share and report |

pub(crate) mod dial;
pub mod kept;
pub(crate) mod listener;
pub mod other_plugins;
pub mod pods;
mod registrar;
pub mod registration;
mod server;
pub mod socket;
mod socket_watch;
mod status;
mod streams;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

pub use server::Resources;
pub use status::{Event, Log, Registration, Status};

use crate::model::Allocator;
use other_plugins::OtherPlugins;
use socket::KubeletDirs;
use socket_watch::SocketState;
use status::Shared;

/// The time between a change of the kubelet's directory and the search for other plugins. It doubles with each further search.
const FIRST_SEARCH: Duration = Duration::from_secs(1);
/// The longest time between two searches: other plugins and the kubelet have sockets in other directories too.
const SEARCH_INTERVAL: Duration = Duration::from_secs(60);

/// How long the kubelet may take to create its sockets before their absence is reported.
const PATIENCE: Duration = Duration::from_secs(5);

/// The tasks of the resources that are served.
type Tasks = BTreeMap<String, JoinSet<()>>;

/// Serves the resources of the list, which may change, to the kubelet with these directories. Its sockets are closed
/// and removed when the future is dropped; no empty list is sent, because the kubelet would report a capacity of 0.
///
/// # Errors
/// If the paths of the sockets are longer than the address of a Unix socket.
pub async fn serve(
    dirs: KubeletDirs,
    resources: Resources,
    allocator: Arc<dyn Allocator>,
    status: watch::Sender<Status>,
    log: Log,
) -> Result<Infallible> {
    for dir in &dirs.plugins {
        socket::path(dir, "nvidia.com/gpu")?;
    }
    loop {
        let dir = dirs.plugin_dir().to_owned();
        let shared = Arc::new(Shared {
            dir,
            dirs: dirs.clone(),
            resources: resources.clone(),
            allocator: Arc::clone(&allocator),
            sockets: watch::Sender::new(SocketState::default()),
            others: watch::Sender::new(OtherPlugins::default()),
            status: status.clone(),
            log: Arc::clone(&log),
        });
        tokio::select! {
            never = serve_in(&shared, resources.clone()) => match never {},
            () = socket_watch::watch(&shared.dir, &dirs, &shared.sockets) => {}
        }
    }
}

/// Serves the resources in one directory.
async fn serve_in(shared: &Arc<Shared>, mut resources: Resources) -> Infallible {
    let mut common = JoinSet::new();
    let (searcher, reporter) = (Arc::clone(shared), Arc::clone(shared));
    common.spawn(async move { search(&searcher).await });
    common.spawn(async move { report_missing(&reporter).await });
    let mut tasks = Tasks::new();
    loop {
        let names = resources
            .borrow_and_update()
            .iter()
            .map(|resource| resource.name.clone())
            .collect();
        update(shared, &mut tasks, &names);
        if resources.changed().await.is_err() {
            // The list does not change any more.
            std::future::pending::<()>().await;
        }
    }
}

/// Starts and ends tasks, so that there is one for each of these resources.
fn update(shared: &Arc<Shared>, tasks: &mut Tasks, names: &BTreeSet<String>) {
    tasks.retain(|name, _| names.contains(name));
    shared.status.send_if_modified(|status| {
        let before = status.len();
        status.retain(|name, _| names.contains(name));
        status.len() != before
    });
    for name in names {
        if tasks.contains_key(name) {
            continue;
        }
        let mut task = JoinSet::new();
        let path = socket_of(&shared.dir, name, tasks.keys());
        let error = path.as_ref().err().map(|error| format!("{error:#}"));
        let state = Registration {
            error: error.clone(),
            ..Registration::default()
        };
        shared
            .status
            .send_modify(|status| drop(status.insert(name.clone(), state)));
        if let Ok(path) = path {
            task.spawn(registrar::run(Arc::clone(shared), name.clone(), path));
        }
        if let Some(error) = error {
            shared.log(&Event::Failed(name.clone(), error));
        }
        tasks.insert(name.clone(), task);
    }
}

/// Returns the path of a resource's socket, which no other resource may have.
fn socket_of<'a>(
    dir: &Path,
    name: &str,
    mut others: impl Iterator<Item = &'a String>,
) -> Result<PathBuf> {
    let file = socket::file_name(name);
    if let Some(other) = others.find(|other| socket::file_name(other) == file) {
        anyhow::bail!("its socket {file:?} belongs to {other:?}; rename one of the two resources");
    }
    socket::path(dir, name)
}

/// Logs which sockets of the kubelet are missing after a while, once until the kubelet has its socket or loses it.
async fn report_missing(shared: &Shared) {
    let mut sockets = shared.sockets.subscribe();
    loop {
        sleep(PATIENCE).await;
        if let Some(missing) = shared.dirs.missing()
            && !shared.resources.borrow().is_empty()
        {
            shared.log(&Event::Missing(missing));
        }
        let kubelet = sockets.borrow_and_update().kubelet;
        // The sender lives as long as this task.
        let _ = sockets.wait_for(|seen| seen.kubelet != kubelet).await;
    }
}

/// Waits for a change of the kubelet's directory.
async fn next_event(sockets: &mut watch::Receiver<SocketState>) {
    let events = sockets.borrow_and_update().events;
    // The sender lives as long as this task.
    let _ = sockets.wait_for(|seen| seen.events != events).await;
}

async fn search(shared: &Shared) {
    let mut sockets = shared.sockets.subscribe();
    let mut pause = FIRST_SEARCH;
    loop {
        if !shared.resources.borrow().is_empty() {
            shared.search_others(other_plugins::patience(false)).await;
        }
        tokio::select! {
            () = sleep(pause) => pause = (pause * 2).min(SEARCH_INTERVAL),
            () = next_event(&mut sockets) => {
                pause = FIRST_SEARCH;
                sleep(pause).await;
            }
        }
    }
}
