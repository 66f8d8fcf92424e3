//! Keeps one resource registered with the kubelet.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::dial::{dial, text};
use super::listener::Listener;
use super::other_plugins::{self, Conflict};
use super::registration::{Action, RegistrationState, Socket, Stream, decide};
use super::server::{self, Service};
use super::socket::{self, SocketId};
use super::socket_watch::SocketState;
use super::status::{Event, Shared};
use super::streams::{Kubelet, Streams};
use crate::proto::RegisterRequest;
use crate::proto::registration_client::RegistrationClient;

/// How long the kubelet has to answer Register. It connects to the plugin within the call, with a deadline of 10 s.
const DEADLINE: Duration = Duration::from_secs(15);

/// The pause after a failed attempt doubles from the first to the second. A kubelet's socket exists shortly before it accepts
/// connections.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// A stream that lasted so long was accepted by the kubelet.
const SETTLED: Duration = Duration::from_secs(1);

/// How long the kubelet may take from its answer to ListAndWatch. A second registration that overlaps the first one would end both.
const STREAM_DEADLINE: Duration = Duration::from_secs(5);

/// How long the kubelet may take to forget a stream that the plugin has closed.
const FORGET: Duration = Duration::from_millis(200);

/// How often the creation of our socket is tried.
const BIND_PAUSE: Duration = Duration::from_secs(1);

enum Registration {
    Registered,
    Failed(String),
    Unanswered,
    Conflict,
}

type Attempt = Pin<Box<dyn Future<Output = Registration> + Send>>;

struct Registrar {
    shared: Arc<Shared>,
    resource: String,
    path: PathBuf,
    streams: Streams,
    listener: Listener,
    attempt: Option<(SocketId, Attempt)>,
    /// The kubelet of the last attempt
    kubelet: Option<SocketId>,
    /// This kubelet did not answer a call of Register in time, and may still execute it.
    unanswered: bool,
    /// The kubelet's stream when it was last inspected
    stream: Kubelet,
    /// When it was opened
    opened: Option<Instant>,
    pause: Duration,
    next_attempt: Instant,
    next_bind: Instant,
}

/// Serves a resource, and keeps it registered, until it is dropped.
pub(super) async fn run(shared: Arc<Shared>, resource: String, path: PathBuf) {
    let streams = Streams::default();
    let listener = Listener::start(Service {
        resource: resource.clone(),
        resources: shared.resources.clone(),
        allocator: Arc::clone(&shared.allocator),
        streams: streams.clone(),
    });
    let now = Instant::now();
    let registrar = Registrar {
        shared,
        resource,
        path,
        streams,
        listener,
        attempt: None,
        kubelet: None,
        unanswered: false,
        stream: Kubelet::None,
        opened: None,
        pause: PAUSES.0,
        next_attempt: now,
        next_bind: now,
    };
    registrar.run().await;
}

impl Registrar {
    async fn run(mut self) {
        let (mut sockets, mut others) = (
            self.shared.sockets.subscribe(),
            self.shared.others.subscribe(),
        );
        let mut streams = self.streams.watch();
        loop {
            let kubelet = streams.borrow_and_update().kubelet;
            self.note_stream(kubelet);
            let seen = self.seen(*sockets.borrow_and_update());
            let conflict = others.borrow_and_update().conflict(&self.resource);
            let facts = self.facts(&seen, conflict.as_ref());
            self.report_conflict(conflict);
            match decide(&facts) {
                Action::Wait => {
                    self.wait(&mut sockets, &mut others, &mut streams, &facts)
                        .await
                }
                Action::Bind => self.bind().await,
                Action::Register => self.register(&seen),
                Action::Abandon => {
                    self.attempt = None;
                    // A stream that the earlier kubelet opens now does not count.
                    self.streams.close();
                    self.stream = Kubelet::None;
                    self.next_attempt = Instant::now();
                }
                Action::Close => self.close(&facts),
                Action::Silence => self.streams.silence(),
            }
        }
    }

    /// Inspects the kubelet's socket again: an attempt must know its kubelet, and the watch may be late.
    fn seen(&self, seen: SocketState) -> SocketState {
        let kubelet = SocketId::at(&socket::kubelet(&self.shared.dir));
        SocketState {
            kubelet,
            is_new: seen.is_new || (seen.inspections > 0 && kubelet != seen.kubelet),
            ..seen
        }
    }

    fn facts(&self, seen: &SocketState, conflict: Option<&Conflict>) -> RegistrationState {
        let now = Instant::now();
        let state = *self.streams.watch().borrow();
        let stream = self
            .kubelet
            .filter(|_| matches!(state.kubelet, Kubelet::Open(_)));
        RegistrationState {
            kubelet: seen.kubelet,
            socket: match self.listener.is_bound() {
                true => Socket::Bound,
                false if now >= self.next_bind => Socket::Missing,
                false => Socket::Unavailable,
            },
            stream: stream.map(|kubelet| Stream {
                kubelet,
                silent: state.silent,
                doubled: self.unanswered && state.since > 1,
            }),
            registering: self.attempt.as_ref().map(|(kubelet, _)| *kubelet),
            conflict: conflict.map(|conflict| conflict.same_resource),
            may_register: now >= self.next_attempt || seen.kubelet != self.kubelet,
        }
    }

    /// Notes the state of the kubelet's stream, to register again without a pause if the stream was open for some time.
    fn note_stream(&mut self, kubelet: Kubelet) {
        let before = std::mem::replace(&mut self.stream, kubelet);
        if matches!(kubelet, Kubelet::Open(_)) && before != kubelet {
            self.opened = Some(Instant::now());
            self.shared.note(&self.resource, |state| {
                state.live = true;
                state.error = None;
            });
        }
        if kubelet == Kubelet::None && before != Kubelet::None {
            let settled = self
                .opened
                .take()
                .is_some_and(|opened| opened.elapsed() >= SETTLED);
            self.pause = if settled {
                PAUSES.0
            } else {
                (self.pause * 2).min(PAUSES.1)
            };
            self.next_attempt = Instant::now() + if settled { Duration::ZERO } else { self.pause };
            self.shared.note(&self.resource, |state| state.live = false);
            self.shared.log(&Event::Closed(self.resource.clone()));
        }
    }

    async fn wait(
        &mut self,
        sockets: &mut watch::Receiver<SocketState>,
        others: &mut watch::Receiver<other_plugins::OtherPlugins>,
        streams: &mut watch::Receiver<super::streams::StreamState>,
        facts: &RegistrationState,
    ) {
        let waits_for_attempt =
            !facts.may_register && facts.kubelet.is_some() && facts.registering.is_none();
        let outcome = async {
            match &mut self.attempt {
                Some((_, attempt)) => attempt.await,
                None => std::future::pending().await,
            }
        };
        let outcome = tokio::select! {
            outcome = outcome => Some(outcome),
            // Their senders live as long as this task.
            _ = sockets.changed() => None,
            _ = others.changed() => None,
            _ = streams.changed() => None,
            () = sleep_until(self.next_attempt), if waits_for_attempt => None,
            () = sleep_until(self.next_bind), if facts.socket == Socket::Unavailable => None,
        };
        if let Some(outcome) = outcome {
            self.attempt = None;
            self.finish(outcome);
        }
    }

    fn finish(&mut self, outcome: Registration) {
        match outcome {
            Registration::Registered => {
                // The kubelet may have closed its stream already.
                let expected = self.streams.watch().borrow().kubelet != Kubelet::None;
                self.next_attempt = Instant::now()
                    + if expected {
                        STREAM_DEADLINE
                    } else {
                        self.pause
                    };
                self.shared.note(&self.resource, |state| {
                    state.registered = Some(SystemTime::now());
                    state.error = None;
                });
                self.shared.log(&Event::Registered(self.resource.clone()));
            }
            Registration::Failed(error) => self.try_later(error),
            Registration::Unanswered => {
                self.unanswered = true;
                self.try_later(format!(
                    "the kubelet did not answer within {} s",
                    DEADLINE.as_secs()
                ));
            }
            Registration::Conflict => {}
        }
    }

    fn try_later(&mut self, error: String) {
        self.next_attempt = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(PAUSES.1);
        // An earlier call may have succeeded.
        if !matches!(self.stream, Kubelet::Open(_)) {
            self.fail(error);
        }
    }

    /// Logs an error once, until the resource is registered or another error occurs.
    fn fail(&self, error: String) {
        let mut is_new = false;
        self.shared.note(&self.resource, |state| {
            is_new = state.error.as_ref() != Some(&error);
            state.error = Some(error.clone());
        });
        if is_new {
            self.shared
                .log(&Event::Failed(self.resource.clone(), error));
        }
    }

    fn report_conflict(&self, conflict: Option<Conflict>) {
        let finding = conflict.map(|conflict| conflict.finding(&self.resource));
        let mut is_new = false;
        self.shared.note(&self.resource, |state| {
            is_new = finding.is_some() && state.finding != finding;
            state.finding.clone_from(&finding);
        });
        if let Some(finding) = finding.filter(|_| is_new) {
            self.shared.log(&Event::Conflict(finding));
        }
    }

    async fn bind(&mut self) {
        self.next_bind = Instant::now() + BIND_PAUSE;
        // A second process of this plugin
        if SocketId::at(&self.path).is_some() && other_plugins::answers(&self.path).await {
            let error = format!("another process answers at our socket {:?}", self.path);
            return self.fail(error);
        }
        if !self.shared.dir.is_dir() {
            return self.fail(format!(
                "the directory {:?} does not exist, waiting for the kubelet",
                self.shared.dir
            ));
        }
        match self.listener.bind(&self.path) {
            Ok(()) => self.next_bind = Instant::now(),
            Err(error) => self.fail(format!("{error:#}")),
        }
    }

    fn register(&mut self, seen: &SocketState) {
        let Some(kubelet) = seen.kubelet else { return };
        if self.kubelet.replace(kubelet) != Some(kubelet) {
            self.pause = PAUSES.0;
            self.unanswered = false;
        }
        let attempt = attempt(
            Arc::clone(&self.shared),
            self.streams.clone(),
            self.resource.clone(),
            other_plugins::patience(seen.is_new),
        );
        self.attempt = Some((kubelet, Box::pin(attempt)));
    }

    fn close(&mut self, facts: &RegistrationState) {
        self.streams.close();
        self.note_stream(Kubelet::None);
        self.unanswered = false;
        // A new kubelet knows nothing of the stream.
        let is_new = facts.stream.map(|stream| stream.kubelet) != facts.kubelet;
        self.next_attempt = Instant::now() + if is_new { Duration::ZERO } else { FORGET };
    }
}

async fn attempt(
    shared: Arc<Shared>,
    streams: Streams,
    resource: String,
    patience: Duration,
) -> Registration {
    let found = shared.search_others(patience).await;
    if found.conflict(&resource).is_some() {
        return Registration::Conflict;
    }
    streams.expect();
    match timeout(DEADLINE, register(&shared, &resource)).await {
        Ok(Ok(())) => Registration::Registered,
        Ok(Err(error)) => Registration::Failed(format!("{error:#}")),
        Err(_) => Registration::Unanswered,
    }
}

async fn register(shared: &Shared, resource: &str) -> anyhow::Result<()> {
    let mut kubelet = RegistrationClient::new(dial(&socket::kubelet(&shared.dir)).await?);
    let request = RegisterRequest {
        version: "v1beta1".to_owned(),
        endpoint: socket::file_name(resource),
        resource_name: resource.to_owned(),
        options: Some(server::options()),
    };
    let answer = kubelet.register(request).await;
    answer
        .map(drop)
        .map_err(|status| anyhow::anyhow!("the kubelet refused: {}", text(&status)))
}
