//! The endpoints of an API server that a driver for claims uses, over TLS with client certificates.
//!
//! It behaves like the API server of Kubernetes 1.36: the node authorizer permits a node's own objects, slices are listed and watched only with a field
//! selector for the node, a write with an old resource version is a conflict, and invalid slices are refused.

pub mod certificates;
pub mod validation;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::MutexGuard;
use std::time::Duration;

use certificates::Certificates;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::{Value, json};
use tokio::net::TcpSocket;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::fake_kubelet::thread::{self, Thread};

pub const NODE: &str = "node-1";
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

/// A request that was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub method: String,
    pub path: String,
    pub query: String,
    /// The serial number of the client's certificate
    pub serial: Vec<u8>,
    pub code: u16,
    pub bytes: usize,
    /// Its `User-Agent`
    pub agent: String,
}

/// An error that the server answers instead of its usual answer.
#[derive(Clone, Debug)]
pub struct Fault {
    pub method: &'static str,
    /// A part of the path
    pub path: &'static str,
    pub code: u16,
    pub times: usize,
}

/// What a test can inspect and change.
#[derive(Debug, Default)]
pub struct State {
    pub slices: BTreeMap<String, Value>,
    /// By namespace and name
    pub claims: BTreeMap<(String, String), Value>,
    pub version: u64,
    pub asked: Vec<Asked>,
    pub faults: Vec<Fault>,
    /// The feature DRADeviceTaints is off: the field is dropped, except in a slice that has one already.
    pub drops_taints: bool,
    /// The feature DRAConsumableCapacity is off: its fields are dropped, except in a slice that has them already.
    pub drops_shares: bool,
    /// Something changes each slice before it is stored.
    pub drops_attributes: bool,
    /// How long clients wait, in seconds, after an answer that they ask too much
    pub retry_after: Option<u64>,
    /// The time for each answer
    pub delay: Duration,
    /// What it answers to each request, instead of objects
    pub hostile: Option<Hostile>,
    watchers: Vec<mpsc::UnboundedSender<String>>,
    /// The events by version
    history: Vec<(u64, String)>,
}

impl State {
    /// The devices of all slices, and whether they are tainted.
    pub fn devices(&self) -> BTreeMap<String, bool> {
        let devices = self.slices.values().flat_map(|slice| {
            slice["spec"]["devices"]
                .as_array()
                .cloned()
                .unwrap_or_default()
        });
        devices
            .map(|device| {
                (
                    device["name"].as_str().unwrap().to_owned(),
                    device["taints"].is_array(),
                )
            })
            .collect()
    }

    /// The number of answered requests with this method whose path has this part.
    pub fn count(&self, method: &str, path: &str) -> usize {
        self.asked
            .iter()
            .filter(|asked| asked.method == method && asked.path.contains(path))
            .count()
    }

    /// The number of requests that stored slices.
    pub fn writes(&self) -> usize {
        let is_write = |asked: &&Asked| {
            asked.path.contains("resourceslices")
                && matches!(&*asked.method, "POST" | "PUT")
                && !asked.query.contains("dryRun")
        };
        self.asked.iter().filter(is_write).count()
    }

    pub fn generation(&self) -> i64 {
        self.slices
            .values()
            .filter_map(|slice| slice["spec"]["pool"]["generation"].as_i64())
            .max()
            .unwrap_or_default()
    }

    /// Stores a slice, and notifies the watchers.
    fn store(&mut self, name: &str, mut slice: Value, kind: &str) -> Value {
        self.version += 1;
        slice["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.slices.insert(name.to_owned(), slice.clone());
        self.notify(kind, &slice);
        slice
    }

    /// Deletes a slice, and notifies the watchers.
    pub fn remove(&mut self, name: &str) -> Option<Value> {
        let mut slice = self.slices.remove(name)?;
        self.version += 1;
        slice["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.notify("DELETED", &slice);
        Some(slice)
    }

    /// Deletes all slices, as the kubelet does.
    pub fn wipe(&mut self) {
        for name in self.slices.keys().cloned().collect::<Vec<_>>() {
            self.remove(&name);
        }
    }

    /// Ends all watches.
    pub fn cut(&mut self) {
        self.watchers.clear();
    }

    /// Tells all watchers that their version is too old, as after a compaction.
    pub fn expire(&mut self) {
        let status = json!({"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old resource version"});
        self.notify("ERROR", &status);
        self.cut();
    }

    fn notify(&mut self, kind: &str, object: &Value) {
        let line = format!("{}\n", json!({"type": kind, "object": object}));
        if kind != "ERROR" {
            self.history.push((self.version, line.clone()));
        }
        self.watchers
            .retain(|watcher| watcher.send(line.clone()).is_ok());
    }

    /// Adds a claim for a share of a device, with these configurations.
    pub fn share(&mut self, name: &str, uid: &str, device: &str, config: &Value) {
        self.allocate(name, uid, &[device]);
        let key = ("default".to_owned(), name.to_owned());
        let claim = self.claims.get_mut(&key).unwrap();
        let devices = &mut claim["status"]["allocation"]["devices"];
        devices["results"][0]["shareID"] = json!(format!("share-of-{uid}"));
        devices["results"][0]["consumedCapacity"] = json!({"memory": "8Gi"});
        devices["config"] = config.clone();
    }

    /// Adds a claim with one request for which these devices are allocated.
    pub fn allocate(&mut self, name: &str, uid: &str, devices: &[&str]) {
        let result = |device: &&str| json!({"request": "gpu", "driver": "gpu.nvidia.com", "pool": NODE, "device": device});
        let results: Vec<_> = devices.iter().map(result).collect();
        let claim = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"namespace": "default", "name": name, "uid": uid, "resourceVersion": "1"},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}},
            "status": {"allocation": {"devices": {"results": results}}},
        });
        self.claims
            .insert(("default".to_owned(), name.to_owned()), claim);
    }
}

/// Answers of a server that is broken or hostile.
#[derive(Clone, Copy, Debug)]
pub enum Hostile {
    /// Bytes without an end
    Endless,
    /// The beginning, and then nothing
    Hanging,
}

impl Hostile {
    fn body(self) -> Body {
        let chunk = || Ok(Frame::data(Bytes::from_static(&[b' '; 1 << 16])));
        let chunks = tokio_stream::iter(std::iter::repeat_with(chunk));
        match self {
            Self::Endless => StreamBody::new(chunks).boxed_unsync(),
            Self::Hanging => {
                StreamBody::new(chunks.take(1).chain(tokio_stream::pending())).boxed_unsync()
            }
        }
    }
}

type Shared = thread::Shared<State>;

/// An API server. It can be stopped and started again at its address, and keeps its objects.
#[derive(Debug)]
pub struct FakeApi {
    pub dir: PathBuf,
    pub certificates: Certificates,
    shared: Shared,
    address: SocketAddr,
    /// Has the address for as long as the value exists: while the server is stopped, the kernel gives its port to no other socket.
    _reserved: TcpSocket,
    running: Option<Thread>,
}

impl FakeApi {
    /// Starts a server, and writes the kubelet's credentials to this directory.
    pub fn start(dir: &Path) -> Self {
        let mut api = Self::stopped(dir);
        api.run();
        api
    }

    /// Writes the credentials for a server that does not run yet.
    pub fn stopped(dir: &Path) -> Self {
        // A socket that does not listen refuses connections, and lets another one listen at its address if both have SO_REUSEADDR.
        let reserved = TcpSocket::new_v4().unwrap();
        reserved.set_reuseaddr(true).unwrap();
        reserved.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = reserved.local_addr().unwrap();
        let certificates = Certificates::write(dir, address, NODE);
        let shared = Shared::default();
        Self {
            dir: dir.to_owned(),
            certificates,
            shared,
            address,
            _reserved: reserved,
            running: None,
        }
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.join("kubelet.conf")
    }

    pub fn run(&mut self) {
        let (shared, address) = (self.shared.clone(), self.address);
        let config = self.certificates.server();
        let (running, _) = Thread::serve(async move || {
            let listener = tokio::net::TcpListener::bind(address).await.unwrap();
            tokio::spawn(serve(listener, TlsAcceptor::from(config), shared));
        });
        self.running = Some(running);
    }

    pub fn stop(&mut self) {
        self.state().cut();
        self.running = None;
    }

    /// The state at this moment. It does not change until the guard is dropped.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }

    /// Waits until the state is so, and returns how long that took.
    #[track_caller]
    pub fn wait(&self, what: &str, most: Duration, is: impl Fn(&State) -> bool) -> Duration {
        self.shared.wait(what, most, is)
    }
}

impl Drop for FakeApi {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn serve(listener: tokio::net::TcpListener, acceptor: TlsAcceptor, shared: Shared) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        let (acceptor, shared) = (acceptor.clone(), shared.clone());
        tokio::spawn(async move {
            let Ok(stream) = acceptor.accept(stream).await else {
                return;
            };
            let serial =
                certificates::serial(stream.get_ref().1.peer_certificates().unwrap()[0].as_ref());
            let answer = service_fn(move |request| answer(shared.clone(), serial.clone(), request));
            drop(
                hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), answer)
                    .await,
            );
        });
    }
}

type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>;

async fn answer(
    shared: Shared,
    serial: Vec<u8>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body
        .collect()
        .await
        .map(|body| body.to_bytes())
        .unwrap_or_default();
    let (path, query) = (
        parts.uri.path().to_owned(),
        parts.uri.query().unwrap_or_default().to_owned(),
    );
    let agent = parts.headers.get("user-agent");
    let agent = agent.map_or("", |agent| agent.to_str().unwrap()).to_owned();
    let delay = shared.lock().delay;
    tokio::time::sleep(delay).await;
    let mut state = shared.lock();
    let is_watch = query.contains("watch=true");
    let (code, value) = match fault(&mut state, parts.method.as_str(), &path) {
        Some(code) => (code, status(code, "the test refuses")),
        None => handle(&mut state, &parts.method, &path, &query, &body),
    };
    let bytes = body.len() + if is_watch { 0 } else { value.to_string().len() };
    state.asked.push(Asked {
        method: parts.method.to_string(),
        path,
        query,
        serial,
        code,
        bytes,
        agent,
    });
    let mut response = Response::builder()
        .status(code)
        .header("content-type", "application/json");
    if let Some(seconds) = state.retry_after.filter(|_| code == 429) {
        response = response.header("retry-after", seconds);
    }
    let body = if let Some(hostile) = state.hostile {
        hostile.body()
    } else if is_watch && code == 200 {
        let (sender, receiver) = mpsc::unbounded_channel();
        let since = query_value(&state.asked.last().unwrap().query, "resourceVersion")
            .parse::<u64>()
            .unwrap();
        let missed = state.history.iter().filter(|(version, _)| *version > since);
        missed.for_each(|(_, line)| sender.send(line.clone()).unwrap());
        state.watchers.push(sender);
        let frames =
            UnboundedReceiverStream::new(receiver).map(|line| Ok(Frame::data(Bytes::from(line))));
        StreamBody::new(frames).boxed_unsync()
    } else {
        http_body_util::Full::new(Bytes::from(value.to_string())).boxed_unsync()
    };
    drop(state);
    shared.change(|_| ());
    Ok(response.body(body).unwrap())
}

fn query_value<'a>(query: &'a str, name: &str) -> &'a str {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs
        .into_iter()
        .find(|(key, _)| *key == name)
        .map_or("", |(_, value)| value)
}

fn fault(state: &mut State, method: &str, path: &str) -> Option<u16> {
    let is_it =
        |fault: &&mut Fault| fault.times > 0 && fault.method == method && path.contains(fault.path);
    let fault = state.faults.iter_mut().find(is_it)?;
    fault.times -= 1;
    Some(fault.code)
}

fn status(code: u16, message: &str) -> Value {
    let reason = match code {
        404 => "NotFound",
        409 => "Conflict",
        _ => "Test",
    };
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message, "reason": reason})
}

fn handle(
    state: &mut State,
    method: &Method,
    path: &str,
    query: &str,
    body: &[u8],
) -> (u16, Value) {
    let dry_run = query.contains("dryRun=All");
    if path == "/apis/authentication.k8s.io/v1/selfsubjectreviews" {
        let user = json!({"username": format!("system:node:{NODE}"), "groups": ["system:nodes"]});
        return (201, json!({"metadata": {}, "status": {"userInfo": user}}));
    }
    if let Some(name) = path.strip_prefix("/api/v1/nodes/") {
        return match name {
            NODE => (
                200,
                json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": {"name": NODE, "uid": "node-uid"}}),
            ),
            _ => (403, status(403, "node \"node-1\" cannot read another node")),
        };
    }
    if let Some(rest) = path.strip_prefix("/apis/resource.k8s.io/v1/namespaces/") {
        let (namespace, name) = rest.split_once("/resourceclaims/").unwrap();
        let claim = state
            .claims
            .get(&(namespace.to_owned(), name.to_owned()))
            .cloned();
        return claim.map_or_else(
            || (404, status(404, "resourceclaims not found")),
            |claim| (200, claim),
        );
    }
    let Some(name) = path.strip_prefix(SLICES) else {
        return (404, status(404, "unknown path"));
    };
    let name = name.trim_start_matches('/');
    match *method {
        Method::GET if !query.contains(&format!("fieldSelector=spec.nodeName%3D{NODE}")) => (
            403,
            status(
                403,
                "can only list/watch/get resourceslices with nodeName or spec.nodeName field selector",
            ),
        ),
        Method::GET => {
            let items: Vec<_> = state.slices.values().cloned().collect();
            let metadata = json!({"resourceVersion": state.version.to_string()});
            (
                200,
                json!({"kind": "ResourceSliceList", "apiVersion": "resource.k8s.io/v1", "metadata": metadata, "items": items}),
            )
        }
        Method::POST | Method::PUT => write(state, *method == Method::POST, body, dry_run),
        Method::DELETE => match state.remove(name) {
            Some(slice) => (200, slice),
            None => (404, status(404, "not found")),
        },
        _ => (405, status(405, "method")),
    }
}

/// Whether a device of a slice has a field.
fn uses(slice: &Value, field: &str) -> bool {
    let devices = slice["spec"]["devices"].as_array();
    let mut devices = devices.into_iter().flatten();
    devices.any(|device| !device[field].is_null())
}

fn write(state: &mut State, is_new: bool, body: &[u8], dry_run: bool) -> (u16, Value) {
    let mut slice: Value = serde_json::from_slice(body).unwrap();
    if let Err(error) = serde_json::from_value::<ResourceSlice>(slice.clone())
        .map_err(|error| error.to_string())
        .and_then(|slice| validation::validate(&slice))
    {
        return (422, status(422, &error));
    }
    let name = slice["metadata"]["name"].as_str().unwrap().to_owned();
    let known = state.slices.get(&name);
    match known {
        Some(_) if is_new => return (409, status(409, "already exists")),
        None if !is_new => return (404, status(404, "not found")),
        Some(known)
            if known["metadata"]["resourceVersion"] != slice["metadata"]["resourceVersion"] =>
        {
            return (409, status(409, "the object has been modified"));
        }
        Some(known) if known["spec"]["nodeName"] != slice["spec"]["nodeName"] => {
            return (422, status(422, "field is immutable"));
        }
        _ => {}
    }
    let drops_taints = state.drops_taints && !known.is_some_and(|known| uses(known, "taints"));
    let drops_shares =
        state.drops_shares && !known.is_some_and(|known| uses(known, "allowMultipleAllocations"));
    for device in slice["spec"]["devices"]
        .as_array_mut()
        .into_iter()
        .flatten()
    {
        if drops_taints {
            device.as_object_mut().unwrap().remove("taints");
        }
        if state.drops_attributes {
            device.as_object_mut().unwrap().remove("attributes");
        }
        if drops_shares {
            device
                .as_object_mut()
                .unwrap()
                .remove("allowMultipleAllocations");
            let capacities = device["capacity"].as_object_mut();
            for capacity in capacities.into_iter().flat_map(|all| all.values_mut()) {
                capacity.as_object_mut().unwrap().remove("requestPolicy");
            }
        }
        for taint in device["taints"].as_array_mut().into_iter().flatten() {
            if taint["timeAdded"].is_null() {
                taint["timeAdded"] = json!("2026-11-24T00:00:00Z");
            }
        }
        let device = device.as_object_mut().unwrap();
        if device.get("taints").is_some_and(Value::is_null) {
            device.remove("taints");
        }
    }
    if slice["metadata"]["uid"].is_null() {
        slice["metadata"]["uid"] = json!(format!("uid-{}", state.version));
    }
    slice["apiVersion"] = json!("resource.k8s.io/v1");
    slice["kind"] = json!("ResourceSlice");
    if dry_run {
        return (200, slice);
    }
    let slice = state.store(&name, slice, if is_new { "ADDED" } else { "MODIFIED" });
    (if is_new { 201 } else { 200 }, slice)
}
