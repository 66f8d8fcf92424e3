//! Keeps the node's slices on the API server as the devices are. While nothing changes, the watch is the only request.
//!
//! The kubelet deletes the slices when it starts, and when the driver was away for 30 seconds; the watch reports that, and they are written
//! again.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use base::report::{Finding, line};
use findings::catalog;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ListParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_stream::StreamExt;

use super::DriverOptions;
use super::access::{self, Access, describe, describe_slices};
use super::pace::{chance, watch_length};
use super::plan::{Action, count_shares, keep_attributes, plan};
use super::pool::Pool;
use super::slice::{Owner, specs};
use crate::log::Log;

/// The least time between two attempts, and between two writes because of other programs.
const SHORTEST: Duration = Duration::from_secs(1);
/// How often the files with the credentials are examined during a pause.
const CREDENTIALS: Duration = Duration::from_secs(5);
/// For how long requests may be forbidden before that is an error.
const STARTING: Duration = Duration::from_secs(10);
/// How often a change is tried again at once, after another program has changed the slices.
const MAX_CONFLICTS: u32 = 3;

/// How often the slices are written for one state of the devices: the answer to the first write can show that a field is not stored. An API
/// server that stores something else again is not asked without an end.
const MAX_WRITES: u32 = 2;

/// What the publisher needs.
#[derive(Debug)]
pub(super) struct PublisherOptions {
    pub(super) options: DriverOptions,
    pub(super) access: Arc<Access>,
    pub(super) pool: watch::Receiver<Pool>,
    /// The name of the node, which the settings give or the credentials have; empty before
    pub(super) node: Arc<watch::Sender<String>>,
    pub(super) log: Log,
}

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
    Stale(anyhow::Error),
    /// The API server has ended a watch early. It may be about to restart, and then it ends the watches of all nodes.
    Ended,
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
        let text = describe_slices(&error);
        match error {
            kube::Error::Api(status) if matches!(status.code, 409 | 410) => Self::Stale(text),
            kube::Error::Api(status) if status.code == 403 => Self::Forbidden(text),
            kube::Error::Api(_) => Self::Refused(text),
            _ => Self::Unreachable(text),
        }
    }
}

impl Failure {
    /// Takes the answer to a request for one slice, which another program may have deleted.
    fn of_slice(error: kube::Error) -> Self {
        match &error {
            kube::Error::Api(status) if status.code == 404 => Self::Stale(describe(&error)),
            _ => error.into(),
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
            if begun.elapsed() > self.parts.options.pace.first {
                self.failures = Failures::default();
            }
            let failures = self.failures.count(&failure);
            let log = self.parts.log;
            match failure {
                Failure::Ended => log.debug(|| "the API server has ended the watch".to_owned()),
                Failure::Stale(error) if failures == 0 => {
                    log.debug(|| format!("the slices are listed again: {error:#}"));
                    continue;
                }
                Failure::Forbidden(error) if self.failures.is_starting() => {
                    log.debug(|| format!("the API server may have just started: {error:#}"));
                }
                Failure::Forbidden(error) => {
                    let error = self.explain(error).await;
                    self.report(&error);
                }
                Failure::Stale(error) | Failure::Unreachable(error) | Failure::Refused(error) => {
                    self.report(&error);
                }
            }
            self.pause(failures).await;
        }
    }

    /// Waits before the next attempt. A change of the devices or the credentials ends the pause: it concerns one node, not all of a cluster.
    async fn pause(&mut self, failures: u32) {
        let asked = self.parts.access.take_retry_after();
        let pause = self.parts.options.pace.pause(failures, asked, chance());
        let end = Instant::now() + pause;
        let first = asked.unwrap_or_default().max(SHORTEST);
        let credentials = self.parts.access.stamp().await;
        sleep(pause.min(first)).await;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if timeout(left.min(CREDENTIALS), self.parts.pool.changed())
                .await
                .is_ok()
            {
                return;
            }
            if left.is_zero() || self.parts.access.stamp().await != credentials {
                return;
            }
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
        if self.parts.options.unpublished.borrow().as_ref() != Some(&what) {
            let fix = "run `oci-nvidia-kubelet-plugin check --interface dra`";
            self.parts
                .log
                .finding(&Finding::new(&catalog::API_SERVER, what.clone(), fix));
            self.parts.options.unpublished.send_replace(Some(what));
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
        let node = self.node_name().await?;
        // The API server of another version may store other fields.
        (self.taints, self.shares) = (Support::Unknown, Support::Unknown);
        let fields = fields(&node, &self.parts.options.driver);
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
        loop {
            let begun = Instant::now();
            let length = watch_length(chance());
            let params = WatchParams::default().fields(&fields).timeout(length);
            // The client is a new one if the kubelet's certificate was replaced.
            let slices = self.slices().await?;
            let mut events = pin!(in_time(slices.watch(&params, &version)).await?);
            loop {
                let is_event = tokio::select! {
                    event = events.next() => match event {
                        Some(event) => {
                            version = known.apply(received(event)?)?.unwrap_or(version);
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
                    sleep(SHORTEST).await;
                }
            }
            if begun.elapsed() + SHORTEST < Duration::from_secs(length.into()) {
                return Err(Failure::Ended);
            }
        }
    }

    async fn slices(&self) -> Result<Api<ResourceSlice>, Failure> {
        Ok(Api::all(
            self.parts.access.client().await.map_err(Failure::Refused)?,
        ))
    }

    async fn node_name(&self) -> Result<String, Failure> {
        let known = self.parts.node.borrow().clone();
        if !known.is_empty() {
            return Ok(known);
        }
        let name = self.parts.access.node_name().await;
        let name = name.map_err(Failure::Unreachable)?;
        self.parts.node.send_replace(name.clone());
        Ok(name)
    }

    fn note_success(&mut self, known: &Slices) {
        let devices = known.devices();
        if self.parts.options.unpublished.send_replace(None).is_some() {
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
                driver: &self.parts.options.driver,
                node,
                effect: self.parts.options.effect,
                has_taints: self.taints != Support::No,
                has_shares: self.shares != Support::No,
            };
            let mut desired = specs(&pool.devices, &owner);
            let existing: Vec<ResourceSlice> = known.0.values().cloned().collect();
            if pool.unanswered.is_some() {
                keep_attributes(&mut desired, &existing);
            }
            if owner.has_shares {
                count_shares(&mut desired, &existing);
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
        self.parts.options.unpublished.send_replace(None);
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

/// Takes an event of a watch. A connection that breaks is not a problem before another one cannot be made.
fn received(
    event: Result<WatchEvent<ResourceSlice>, kube::Error>,
) -> Result<WatchEvent<ResourceSlice>, Failure> {
    event.map_err(|error| match error {
        kube::Error::Api(_) => error.into(),
        _ => Failure::Ended,
    })
}

/// Awaits a request for a limited time.
async fn in_time<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Failure> {
    Ok(access::in_time(request)
        .await
        .map_err(Failure::Unreachable)??)
}

/// Awaits a request for one slice for a limited time.
async fn of_slice<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Failure> {
    let answer = access::in_time(request).await;
    answer
        .map_err(Failure::Unreachable)?
        .map_err(Failure::of_slice)
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
            of_slice(slices.replace(&slice.name_any(), &params, slice)).await?
        }
        Action::Delete(name) => {
            let deleted = access::in_time(slices.delete(name, &DeleteParams::default())).await;
            match deleted.map_err(Failure::Unreachable)? {
                Ok(_) => {}
                // Another program was faster: it is deleted.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => return Err(error.into()),
            }
            known.0.remove(name);
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
    unreachable: u32,
    forbidden: u32,
    refused: u32,
    /// When the first request of a series was forbidden
    forbidden_since: Option<Instant>,
}

impl Failures {
    /// Counts a failure, and returns the length of the series of such failures for which to wait; 0 if the next attempt follows at once.
    fn count(&mut self, failure: &Failure) -> u32 {
        if !matches!(failure, Failure::Forbidden(_)) {
            self.forbidden_since = None;
        }
        let counter = match failure {
            Failure::Stale(_) => {
                self.stale += 1;
                return self.stale.saturating_sub(MAX_CONFLICTS);
            }
            Failure::Forbidden(_) => {
                self.forbidden_since.get_or_insert_with(Instant::now);
                &mut self.forbidden
            }
            Failure::Ended | Failure::Unreachable(_) => &mut self.unreachable,
            Failure::Refused(_) => &mut self.refused,
        };
        *counter += 1;
        *counter
    }

    /// Reports whether the API server may have just started.
    fn is_starting(self) -> bool {
        self.forbidden_since
            .is_some_and(|since| since.elapsed() < STARTING)
    }
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
    fn each_kind_of_failure_is_counted() {
        let error = || anyhow::anyhow!("error");
        let (conflict, refused) = (Failure::Stale(error()), Failure::Refused(error()));
        let (unreachable, forbidden) = (Failure::Unreachable(error()), Failure::Forbidden(error()));
        let mut failures = Failures::default();
        let stale = [(); 5].map(|()| failures.count(&conflict));
        assert_eq!(stale, [0, 0, 0, 1, 2]);
        let ended = [&Failure::Ended, &unreachable, &unreachable];
        assert_eq!(ended.map(|failure| failures.count(failure)), [1, 2, 3]);
        assert!(!failures.is_starting());
        let others = [&forbidden, &refused, &forbidden];
        assert_eq!(others.map(|failure| failures.count(failure)), [1, 1, 2]);
        assert!(failures.is_starting());
        failures.forbidden_since = Instant::now().checked_sub(STARTING);
        failures.count(&forbidden);
        assert!(!failures.is_starting());
    }
}
