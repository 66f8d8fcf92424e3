//! What the tasks share, and what they report.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base::report::Finding;
use tokio::sync::watch;

use super::other_plugins::{self, OtherPlugins};
use super::server::Resources;
use super::socket::KubeletDirs;
use super::socket_watch::SocketState;
use crate::model::Allocator;

/// The state of all resources, by name.
pub type Status = BTreeMap<String, Registration>;

/// The state of a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registration {
    /// The kubelet has an open stream with the list of devices.
    pub live: bool,
    /// When the kubelet last accepted a registration
    pub registered: Option<SystemTime>,
    /// Why the resource is not registered
    pub error: Option<String>,
    /// The other device plugin because of which the resource is not registered
    pub finding: Option<Finding>,
}

/// Something that happened, to be logged. `Display` writes one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The kubelet accepted the resource.
    Registered(String),
    /// The stream of a resource ended.
    Closed(String),
    /// A resource cannot be registered now, for this reason.
    Failed(String, String),
    /// The kubelet lacks these sockets.
    Missing(String),
    /// Another plugin offers the GPUs.
    Conflict(Finding),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registered(resource) => write!(f, "registered {resource:?} with the kubelet"),
            Self::Closed(resource) => write!(f, "the kubelet's stream for {resource:?} ended"),
            Self::Failed(resource, error) => write!(f, "cannot register {resource:?}: {error}"),
            Self::Missing(what) => write!(f, "cannot find the kubelet: {what}"),
            Self::Conflict(finding) => write!(f, "{} ({})", finding.what, finding.kind.id()),
        }
    }
}

/// Writes an event to the log.
pub type Log = Arc<dyn Fn(&Event) + Send + Sync>;

/// What the tasks of the resources share.
pub(super) struct Shared {
    /// The directory of the plugins' sockets
    pub(super) dir: PathBuf,
    /// Where the kubelet can have its sockets
    pub(super) dirs: KubeletDirs,
    /// The lists of devices
    pub(super) resources: Resources,
    /// Answers questions about devices
    pub(super) allocator: Arc<dyn Allocator>,
    /// What is in the directory
    pub(super) sockets: watch::Sender<SocketState>,
    /// Other plugins
    pub(super) others: watch::Sender<OtherPlugins>,
    /// The state of the resources
    pub(super) status: watch::Sender<Status>,
    /// The log
    pub(super) log: Log,
}

impl Shared {
    /// Logs an event.
    pub(super) fn log(&self, event: &Event) {
        (self.log)(event);
    }

    /// Changes the state of a resource.
    pub(super) fn note(&self, resource: &str, change: impl FnOnce(&mut Registration)) {
        self.status.send_if_modified(|status| {
            let Some(state) = status.get_mut(resource) else {
                return false;
            };
            let before = state.clone();
            change(state);
            *state != before
        });
    }

    /// Searches for other plugins, and wakes the tasks if that changed.
    pub(super) async fn search_others(&self, patience: Duration) -> OtherPlugins {
        let ours = Arc::clone(&self.resources.borrow());
        let found =
            other_plugins::search(&self.dir, &self.dirs.pod_resources, patience, &ours).await;
        self.others.send_if_modified(|others| {
            let changed = *others != found;
            others.clone_from(&found);
            changed
        });
        found
    }
}
