//! Keeps the node's slices on the API server as the devices are. While nothing changes, the watch is the only request.
//!
//! The kubelet deletes the slices when it starts, and when the driver was away for 30 seconds; the watch reports that, and they are written
//! again.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use base::report::{Finding, line};
use findings::catalog;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ListParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_stream::StreamExt;

use super::access::{self, Access, describe};
use super::plan::{Action, keep_attributes, plan};
use super::pool::Pool;
use super::slice::{Owner, specs};
use crate::log::Log;
use crate::settings::values::TaintEffect;

/// How long a watch lasts, in seconds. The library permits up to 294.
const WATCH: u32 = 290;
/// The pause after a connection that failed: the first slices are written soon after the API server appears.
const RECONNECT: Duration = Duration::from_secs(1);
/// The longest pause after requests that the API server refused.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// How often a change is tried again at once, after another program has changed the slices.
const MAX_CONFLICTS: u32 = 3;

/// How often the slices are written for one state of the devices: the answer to the first write can show that a field is not stored. An API
/// server that stores something else again is not asked without an end.
const MAX_WRITES: u32 = 2;

/// What the publisher needs.
#[derive(Debug)]
pub(super) struct PublisherOptions {
    pub(super) access: Arc<Access>,
    /// The name of the driver
    pub(super) driver: String,
    /// The taint of a device that does not work
    pub(super) effect: TaintEffect,
    pub(super) pool: watch::Receiver<Pool>,
    /// The name of the node, which the settings give or the credentials have; empty before
    pub(super) node: Arc<watch::Sender<String>>,
    /// The problem that is in the log
    pub(super) reported: Arc<watch::Sender<Option<String>>>,
    pub(super) log: Log,
}

/// How many requests may be forbidden, one a second, before that is an error.
const MAX_FORBIDDEN: u32 = 6;

/// Publishes the devices.
#[derive(Debug)]
pub(super) struct Publisher {
    parts: PublisherOptions,
    /// Whether the API server stores taints
    taints: Support,
    /// Whether it stores that several claims can have a device
    shares: Support,
    /// The failures since slices were last written, or a session lasted
    failures: Failures,
}

/// Why a session ended.
enum Failure {
    /// Another program has changed the slices, or the watch is too old: they are listed again at once.
    Stale,
    /// The API server does not answer.
    Unreachable(anyhow::Error),
    /// The API server does not permit a request. The node authorizer answers this for a few seconds
    /// after it has started, until it knows which objects belong to the node.
    Forbidden(anyhow::Error),
    /// The API server refuses a request.
    Refused(anyhow::Error),
}

impl From<kube::Error> for Failure {
    fn from(error: kube::Error) -> Self {
        match &error {
            kube::Error::Api(status) if matches!(status.code, 404 | 409 | 410) => Self::Stale,
            kube::Error::Api(status) if status.code == 403 => Self::Forbidden(describe(&error)),
            kube::Error::Api(_) => Self::Refused(describe(&error)),
            _ => Self::Unreachable(describe(&error)),
        }
    }
}

impl Publisher {
    /// Creates a publisher.
    pub(super) fn new(parts: PublisherOptions) -> Self {
        Self {
            parts,
            taints: Support::Unknown,
            shares: Support::Unknown,
            failures: Failures::default(),
        }
    }

    /// Publishes until the future is dropped. The slices remain: the kubelet deletes them if the driver does not come back.
    pub(super) async fn run(mut self) -> Infallible {
        loop {
            let begun = Instant::now();
            let Err(failure) = self.session().await;
            if begun.elapsed() > MAX_PAUSE {
                self.failures = Failures::default();
            }
            let pause = self.failures.count(&failure);
            let log = self.parts.log;
            match failure {
                Failure::Stale => log.debug(|| "the slices are listed again".to_owned()),
                Failure::Forbidden(error) if self.failures.is_starting() => {
                    log.debug(|| format!("the API server may have just started: {error:#}"));
                }
                Failure::Forbidden(error) => {
                    let error = self.explain(error).await;
                    self.report(&error);
                }
                Failure::Unreachable(error) | Failure::Refused(error) => self.report(&error),
            }
            sleep(jittered(pause)).await;
        }
    }

    /// Adds the name of the node to which the credentials belong, if the settings name another one.
    async fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let node = self.parts.node.borrow().clone();
        match self.parts.access.node_name().await {
            Ok(real) if real != node && !node.is_empty() => error.context(format!(
                "node-name is {node:?}, and the credentials belong to the node {real:?}"
            )),
            _ => error,
        }
    }

    /// Logs a problem, once.
    fn report(&mut self, error: &anyhow::Error) {
        let what = format!("cannot publish the devices of the node: {}", line(error));
        if self.parts.reported.borrow().as_ref() != Some(&what) {
            let fix = "run `oci-nvidia-kubelet-plugin check --interface dra`";
            self.parts
                .log
                .finding(&Finding::new(&catalog::API_SERVER, what.clone(), fix));
            self.parts.reported.send_replace(Some(what));
        }
    }

    /// Lists the slices, and keeps them current with a watch, until a request fails.
    async fn session(&mut self) -> Result<Infallible, Failure> {
        if self
            .parts
            .pool
            .wait_for(|pool| pool.is_ready)
            .await
            .is_err()
        {
            return std::future::pending().await;
        }
        let node = self.node_name().await.map_err(Failure::Unreachable)?;
        // The API server of another version may store other fields.
        (self.taints, self.shares) = (Support::Unknown, Support::Unknown);
        let fields = fields(&node, &self.parts.driver);
        let listed = in_time(
            self.slices()
                .await?
                .list(&ListParams::default().fields(&fields)),
        )
        .await?;
        let mut version = listed.metadata.resource_version.unwrap_or_default();
        let mut known = Slices::default();
        for slice in listed.items {
            known.put(slice);
        }
        self.update(&mut known, &node).await?;
        self.note_success(&known);
        let params = WatchParams::default().fields(&fields).timeout(WATCH);
        loop {
            let begun = Instant::now();
            // The client is a new one if the kubelet's certificate was replaced.
            let slices = self.slices().await?;
            let mut events = pin!(in_time(slices.watch(&params, &version)).await?);
            loop {
                let is_event = tokio::select! {
                    event = events.next() => match event {
                        Some(event) => {
                            version = known.apply(event?)?.unwrap_or(version);
                            true
                        }
                        None => break,
                    },
                    changed = self.parts.pool.changed() => match changed {
                        Ok(()) => false,
                        Err(_) => return std::future::pending().await,
                    },
                };
                if self.update(&mut known, &node).await? && is_event {
                    // Another program that writes the slices again and again does not cause more requests than this.
                    sleep(jittered(RECONNECT)).await;
                }
            }
            if begun.elapsed() < RECONNECT {
                sleep(jittered(RECONNECT)).await;
            }
        }
    }

    async fn slices(&self) -> Result<Api<ResourceSlice>, Failure> {
        Ok(Api::all(
            self.parts.access.client().await.map_err(Failure::Refused)?,
        ))
    }

    async fn node_name(&self) -> Result<String> {
        let known = self.parts.node.borrow().clone();
        if !known.is_empty() {
            return Ok(known);
        }
        let name = self.parts.access.node_name().await?;
        self.parts.node.send_replace(name.clone());
        Ok(name)
    }

    fn note_success(&mut self, known: &Slices) {
        let devices = known.devices();
        if self.parts.reported.send_replace(None).is_some() {
            self.parts.log.note(&format!(
                "the devices of the node are published again: {devices}"
            ));
        }
    }

    /// Writes the slices if they are not as the devices are, and returns whether it has.
    async fn update(&mut self, known: &mut Slices, node: &str) -> Result<bool, Failure> {
        let pool = self.parts.pool.borrow_and_update().clone();
        for writes in 0..=MAX_WRITES {
            let actions = self.actions(&pool, known, node).await?;
            if actions.is_empty() {
                if writes > 0 {
                    self.note_written(known, node);
                }
                return Ok(writes > 0);
            }
            if writes < MAX_WRITES {
                self.write(&actions, known).await?;
            }
        }
        Err(Failure::Refused(anyhow::anyhow!(
            "the API server does not store the slices as they were written"
        )))
    }

    /// Decides what to write, and asks the API server whether it stores the fields that not every version has.
    async fn actions(
        &mut self,
        pool: &Pool,
        known: &Slices,
        node: &str,
    ) -> Result<Vec<Action>, Failure> {
        loop {
            let owner = Owner {
                driver: &self.parts.driver,
                node,
                effect: self.parts.effect,
                has_taints: self.taints != Support::No,
                has_shares: self.shares != Support::No,
            };
            let mut desired = specs(&pool.devices, &owner);
            let existing: Vec<ResourceSlice> = known.0.values().cloned().collect();
            if pool.unanswered.is_some() {
                keep_attributes(&mut desired, &existing);
            }
            let mut actions = plan(&existing, &desired, None);
            if actions.iter().any(is_create) {
                let reference = self.node_reference(node).await?;
                actions = plan(&existing, &desired, Some(&reference));
            }
            if let Some(action) = self.taints.question(&actions, is_tainted) {
                self.taints = self.ask(action, is_tainted).await?;
            } else if let Some(action) = self.shares.question(&actions, is_shared) {
                self.shares = self.ask(action, is_shared).await?;
            } else {
                return Ok(actions);
            }
        }
    }

    /// Asks the API server whether it stores a field, without storing anything: one that does not know the field drops it without an error.
    /// A device without its taint would be given to pods.
    async fn ask(&self, action: &Action, has: HasField) -> Result<Support, Failure> {
        let slices = self.slices().await?;
        let answer = execute(&slices, action, &mut Slices::default(), true).await?;
        Ok(match action {
            _ if !answer.as_ref().is_some_and(has) => Support::No,
            Action::Create(_) => Support::Yes,
            Action::Replace(_) | Action::Delete(_) => Support::InReplaced,
        })
    }

    /// Sends the requests. The answers show what was stored: a field may be dropped that an earlier answer had.
    async fn write(&mut self, actions: &[Action], known: &mut Slices) -> Result<(), Failure> {
        let slices = self.slices().await?;
        for action in actions {
            let stored = execute(&slices, action, known, false).await?;
            let (Action::Create(slice) | Action::Replace(slice), Some(stored)) = (action, stored)
            else {
                continue;
            };
            if is_tainted(slice) && !is_tainted(&stored) {
                self.taints = Support::No;
            }
            if is_shared(slice) && !is_shared(&stored) {
                self.shares = Support::No;
            }
        }
        Ok(())
    }

    fn note_written(&mut self, known: &Slices, node: &str) {
        let (devices, generation) = (known.devices(), known.generation());
        self.parts.log.note(&format!(
            "published {devices} devices of the node {node:?}, generation {generation}"
        ));
        self.parts.reported.send_replace(None);
        self.failures = Failures::default();
    }

    /// Returns the owner of the slices: they are deleted with the node.
    async fn node_reference(&self, node: &str) -> Result<OwnerReference, Failure> {
        match self
            .parts
            .access
            .node_reference(node)
            .await
            .map_err(Failure::Unreachable)?
        {
            Ok(reference) => Ok(reference),
            // A node that is not there is another problem than a slice that another program has deleted.
            Err(error @ kube::Error::Api(_)) => Err(Failure::Refused(
                describe(&error).context(format!("cannot read the node {node:?}")),
            )),
            Err(error) => Err(error.into()),
        }
    }
}

/// Awaits a request for a limited time.
async fn in_time<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Failure> {
    Ok(access::in_time(request)
        .await
        .map_err(Failure::Unreachable)??)
}

/// Returns the selector for the slices of a node: the API server permits no node to list the slices of other nodes.
#[must_use]
pub(super) fn fields(node: &str, driver: &str) -> String {
    format!("spec.nodeName={node},spec.driver={driver}")
}

/// Whether the API server stores a field. If the feature of the field is off, the API server drops the field in a new slice, but keeps it
/// in a slice that has it already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Support {
    Unknown,
    No,
    /// In a slice that is replaced; for a new one it is not known
    InReplaced,
    Yes,
}

/// Reports whether a slice has a field.
type HasField = fn(&ResourceSlice) -> bool;

impl Support {
    /// Returns the action with which to ask the API server, if the answer is not known.
    fn question(self, actions: &[Action], has: HasField) -> Option<&Action> {
        actions.iter().find(|action| match action {
            Action::Create(slice) => matches!(self, Self::Unknown | Self::InReplaced) && has(slice),
            Action::Replace(slice) => self == Self::Unknown && has(slice),
            Action::Delete(_) => false,
        })
    }
}

fn is_create(action: &Action) -> bool {
    matches!(action, Action::Create(_))
}

fn is_tainted(slice: &ResourceSlice) -> bool {
    let mut devices = slice.spec.devices.iter().flatten();
    devices.any(|device| device.taints.is_some())
}

fn is_shared(slice: &ResourceSlice) -> bool {
    let mut devices = slice.spec.devices.iter().flatten();
    devices.any(|device| device.allow_multiple_allocations == Some(true))
}

/// Sends one request, and returns the slice that the API server has stored.
async fn execute(
    slices: &Api<ResourceSlice>,
    action: &Action,
    known: &mut Slices,
    dry_run: bool,
) -> Result<Option<ResourceSlice>, Failure> {
    let params = PostParams {
        dry_run,
        ..PostParams::default()
    };
    let stored = match action {
        Action::Create(slice) => in_time(slices.create(&params, slice)).await?,
        Action::Replace(slice) => {
            in_time(slices.replace(&slice.name_any(), &params, slice)).await?
        }
        Action::Delete(name) => {
            match in_time(slices.delete(name, &DeleteParams::default())).await {
                // Another program was faster: it is deleted.
                Ok(_) | Err(Failure::Stale) => known.0.remove(name),
                Err(failure) => return Err(failure),
            };
            return Ok(None);
        }
    };
    known.put(stored.clone());
    Ok(Some(stored))
}

/// The slices on the API server, by name.
#[derive(Debug, Default)]
struct Slices(BTreeMap<String, ResourceSlice>);

impl Slices {
    /// Returns the number of devices.
    fn devices(&self) -> usize {
        let specs = self.0.values().map(|slice| &slice.spec);
        specs.flat_map(|spec| spec.devices.iter().flatten()).count()
    }

    /// Returns the newest generation.
    fn generation(&self) -> i64 {
        let generations = self.0.values().map(|slice| slice.spec.pool.generation);
        generations.max().unwrap_or_default()
    }

    /// Adds a slice, unless a newer one is known: the watch also reports what this program has written, and more may have been written since.
    fn put(&mut self, mut slice: ResourceSlice) {
        slice.metadata.managed_fields = None;
        let name = slice.name_any();
        if let Some(known) = self.0.get(&name)
            && version(known) > version(&slice)
        {
            return;
        }
        self.0.insert(name, slice);
    }

    /// Takes an event into account, and returns the version of the list after it.
    fn apply(&mut self, event: WatchEvent<ResourceSlice>) -> Result<Option<String>, Failure> {
        match event {
            WatchEvent::Added(slice) | WatchEvent::Modified(slice) => {
                let version = slice.resource_version();
                self.put(slice);
                Ok(version)
            }
            WatchEvent::Deleted(slice) => {
                // It may exist again.
                let name = slice.name_any();
                if let Some(known) = self.0.get(&name)
                    && known.metadata.uid == slice.metadata.uid
                {
                    self.0.remove(&name);
                }
                Ok(slice.resource_version())
            }
            WatchEvent::Bookmark(bookmark) => Ok(Some(bookmark.metadata.resource_version)),
            WatchEvent::Error(status) => Err(kube::Error::Api(status).into()),
        }
    }
}

/// Versions are numbers that grow (KEP-5504).
fn version(slice: &ResourceSlice) -> Option<u64> {
    slice.metadata.resource_version.as_ref()?.parse().ok()
}

/// How many sessions failed for each reason. After an outage of the API server, the first request
/// that is refused must not wait as long as the last one of a series that could not connect.
#[derive(Clone, Copy, Debug, Default)]
struct Failures {
    stale: u32,
    forbidden: u32,
    refused: u32,
}

impl Failures {
    /// Counts a failure, and returns how long to wait after it.
    fn count(&mut self, failure: &Failure) -> Duration {
        match failure {
            Failure::Unreachable(_) => RECONNECT,
            Failure::Stale => {
                self.stale += 1;
                if self.stale <= MAX_CONFLICTS {
                    return Duration::ZERO;
                }
                growing(self.stale)
            }
            Failure::Forbidden(_) => {
                self.forbidden += 1;
                growing(self.forbidden.saturating_sub(MAX_FORBIDDEN).max(1))
            }
            Failure::Refused(_) => {
                self.refused += 1;
                growing(self.refused)
            }
        }
    }

    /// Reports whether the API server may have just started.
    const fn is_starting(self) -> bool {
        self.forbidden < MAX_FORBIDDEN
    }
}

/// Returns the pause after the n-th failure of a series.
fn growing(failures: u32) -> Duration {
    let pause = RECONNECT.saturating_mul(1 << failures.saturating_sub(1).min(10));
    pause.min(MAX_PAUSE)
}

/// Returns a time that differs by up to a fifth, so that the nodes of a cluster do not ask all at once.
fn jittered(time: Duration) -> Duration {
    let nanos = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .subsec_nanos();
    time.mul_f64(0.8 + 0.4 * f64::from(nanos % 1_000_000) / 1_000_000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_event_does_not_replace_a_newer_slice() {
        let slice = |version: &str, generation| {
            let mut slice = ResourceSlice::default();
            slice.metadata.name = Some("node-1".to_owned());
            slice.metadata.resource_version = Some(version.to_owned());
            slice.spec.pool.generation = generation;
            slice
        };
        let mut known = Slices::default();
        known.put(slice("10", 2));
        // Numbers, not texts: "9" is older than "10".
        for (version, generation, expected) in [("9", 1, 2), ("10", 2, 2), ("11", 3, 3)] {
            let event = WatchEvent::Modified(slice(version, generation));
            assert!(known.apply(event).is_ok());
            assert_eq!(known.generation(), expected, "{version}");
        }
    }

    #[test]
    fn pauses() {
        let error = || anyhow::anyhow!("error");
        let seconds = |failure: &Failure, count| {
            let mut failures = Failures::default();
            for _ in 1..count {
                failures.count(failure);
            }
            failures.count(failure).as_secs()
        };
        let stale = [1, 3, 4, 9].map(|count| seconds(&Failure::Stale, count));
        assert_eq!(stale, [0, 0, 8, 30]);
        let unreachable = Failure::Unreachable(error());
        assert_eq!(
            [1, 2, 9].map(|count| seconds(&unreachable, count)),
            [1, 1, 1]
        );
        let refused = Failure::Refused(error());
        let pauses = [1, 2, 3, 9, 99].map(|count| seconds(&refused, count));
        assert_eq!(pauses, [1, 2, 4, 30, 30]);
        let forbidden = Failure::Forbidden(error());
        let pauses = [1, 6, 7, 8, 9, 99].map(|count| seconds(&forbidden, count));
        assert_eq!(pauses, [1, 1, 1, 2, 4, 30]);
        // An outage, then the first seconds of the API server, and a conflict
        let mut failures = Failures::default();
        for _ in 0..40 {
            failures.count(&unreachable);
        }
        assert_eq!(failures.count(&forbidden), RECONNECT);
        assert!(failures.is_starting());
        assert_eq!(failures.count(&Failure::Stale), Duration::ZERO);
        assert_eq!(failures.count(&refused), RECONNECT);
        let time = jittered(Duration::from_secs(1)).as_secs_f64();
        assert!((0.8..1.2).contains(&time), "{time}");
    }
}
