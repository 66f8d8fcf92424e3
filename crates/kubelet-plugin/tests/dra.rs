//! Claims, with a fake kubelet and a fake API server. The limits are five times as long as in the documentation, for busy machines.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    clippy::disallowed_types,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    unreachable_pub,
    dead_code,
    missing_docs,
    reason = "tests"
)]

#[macro_use]
#[path = "../../../tests/it/harness.rs"]
mod harness;

mod fake_api;
mod fake_kubelet;
mod fleet;
mod kept;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fake_api::{FakeApi, Fault, Hostile, NODE};
use fake_kubelet::dra::DraKubelet;
use fake_kubelet::plugin::FakePlugin;
use fake_kubelet::thread::Thread;
use fake_kubelet::{Container, FakeKubelet};
use kubelet_plugin::dra::devices::{ClaimDevice, MpsLimits, Value};
use kubelet_plugin::dra::pace::{self, Pace};
use kubelet_plugin::dra::pool::Pool;
use kubelet_plugin::dra::{self, DriverOptions};
use kubelet_plugin::kubelet::kept::Keeper;
use kubelet_plugin::log::Log;
use kubelet_plugin::settings::Settings;
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::watch;

const DRIVER: &str = "gpu.nvidia.com";

/// The pauses of the driver, which are much longer in a cluster.
const PACE: Pace = Pace {
    first: Duration::from_secs(1),
    longest: Duration::from_secs(2),
};
/// The first slices after the API server appears, and a change.
const SOON: Duration = Duration::from_secs(5 * 2);
/// The slices after the kubelet deleted them.
const WIPED: Duration = Duration::from_secs(5 * 5);
/// Other drivers are first searched for after 10 s.
const SEARCHED: Duration = Duration::from_secs(5 * 10);
/// Long enough for a wrong request.
const A_WHILE: Duration = Duration::from_secs(3);

tests! {
    &[] => devices_are_published_and_given, one_failing_claim_does_not_affect_the_others,
        an_unhealthy_device_is_tainted_alone, an_api_server_without_taints, the_kubelet_deletes_the_slices,
        several_claims_can_have_a_device, an_api_server_without_shares, fields_that_are_stored_no_longer, slices_that_are_stored_otherwise,
        watches_that_are_cut_or_too_old, requests_that_are_refused, conflicts, an_api_server_that_appears_later,
        an_api_server_that_restarts, a_certificate_is_replaced, a_slow_api_server, slices_of_others_are_adopted,
        nothing_is_asked_while_nothing_changes, nothing_is_published_before_the_driver_answers,
        sockets_that_are_removed, a_kubelet_that_restarts, another_driver_is_left_alone,
        a_device_plugin_is_left_alone, a_resource_of_another_plugin, devices_of_pods_that_still_run, the_plugin_watcher_is_answered, many_devices, nothing_is_stored,
        answers_without_an_end, a_node_name_of_another_node, no_second_with_many_requests, requests_are_not_repeated_at_once,
        the_api_server_asks_to_wait, an_api_server_without_the_api, refusals_of_every_request, new_credentials_are_used_at_once;
}

fn main() -> ExitCode {
    kept::run_with_manager(|| {
        // Most of the time the tests wait.
        let trials = TESTS
            .iter()
            .chain(kept::TESTS)
            .map(|test| test.trial(test.name(), |run| run()));
        harness::Selection::of(trials).run(8)
    })
}

fn device(number: usize, unhealthy: Option<&str>) -> ClaimDevice {
    let uuid = format!("GPU-{number}");
    ClaimDevice {
        name: format!("gpu-{number}"),
        attributes: [
            ("type", Value::Text("gpu".into())),
            ("uuid", Value::Text(uuid.clone())),
        ]
        .into(),
        capacity: [("memory", 81559 * 1024 * 1024)].into(),
        gpu: uuid.clone(),
        uuid,
        mps: None,
        unhealthy: unhealthy.map(str::to_owned),
        driver_silent: false,
    }
}

fn pool(unhealthy: &[Option<&str>]) -> Pool {
    let devices: Vec<_> = unhealthy
        .iter()
        .enumerate()
        .map(|(number, why)| device(number, *why))
        .collect();
    let in_spec = Arc::new(devices.iter().map(|device| device.uuid.clone()).collect());
    Pool {
        is_ready: true,
        devices: Arc::new(devices),
        in_spec,
        ..Pool::default()
    }
}

/// The driver under test.
struct Driver {
    pool: watch::Sender<Pool>,
    registered: Arc<watch::Sender<Option<bool>>>,
    stopping: Arc<watch::Sender<bool>>,
    unpublished: Arc<watch::Sender<Option<String>>>,
    thread: Thread,
}

impl Driver {
    fn start(dir: &Path, pool: Pool) -> Self {
        Self::start_with(dir, pool, Keeper::default())
    }

    fn start_with(dir: &Path, pool: Pool, keeper: Keeper) -> Self {
        Self::start_as(dir, pool, keeper, None)
    }

    fn start_at(dir: &Path, pool: Pool, pace: Pace) -> Self {
        Self::run(dir, pool, |options| options.pace = pace)
    }

    fn start_as(dir: &Path, pool: Pool, keeper: Keeper, node: Option<&str>) -> Self {
        Self::run(dir, pool, |options| {
            options.keeper = Arc::new(keeper);
            options.node = node.map(str::to_owned);
        })
    }

    fn run(dir: &Path, pool: Pool, change: impl FnOnce(&mut DriverOptions)) -> Self {
        let settings = Settings::default();
        let mut options = DriverOptions {
            kubelet_dir: dir.to_owned(),
            kubeconfig: Some(dir.join("kubelet.conf")),
            pace: PACE,
            ..DriverOptions::new(&settings)
        };
        change(&mut options);
        let registered = Arc::clone(&options.registered);
        let stopping = Arc::clone(&options.stopping);
        let unpublished = Arc::clone(&options.unpublished);
        let (pool, receiver) = watch::channel(pool);
        let thread = Thread::run(async move || dra::serve(options, receiver, Log::new()).await);
        Self {
            pool,
            registered,
            stopping,
            unpublished,
            thread,
        }
    }

    /// Ends as after SIGTERM. Without it, dropping is like a process that is killed.
    fn end(self) {
        self.stopping.send_replace(true);
        self.thread.join();
    }

    fn is_registered(&self) -> bool {
        *self.registered.borrow() == Some(true)
    }

    fn set(&self, unhealthy: &[Option<&str>]) {
        self.pool.send_replace(pool(unhealthy));
    }
}

/// A node with two GPUs, whose devices are published.
struct Node {
    driver: Driver,
    kubelet: DraKubelet,
    api: FakeApi,
    dir: TempDir,
}

impl Node {
    fn start() -> Self {
        Self::start_with(|_| {})
    }

    fn start_with(prepare: impl Fn(&mut fake_api::State)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let api = FakeApi::start(dir.path());
        prepare(&mut api.state());
        let kubelet = DraKubelet::start(dir.path());
        let driver = Driver::start(dir.path(), pool(&[None, None]));
        let node = Self {
            driver,
            kubelet,
            api,
            dir,
        };
        node.kubelet
            .wait("the driver is registered", SOON, |state| {
                state.drivers.contains_key(DRIVER)
            });
        node.api.wait("the devices", SOON, |state| {
            state.devices() == names(&[false, false])
        });
        node
    }

    fn published(&self, what: &str, most: Duration, tainted: &[bool]) -> Duration {
        self.api
            .wait(what, most, |state| state.devices() == names(tainted))
    }
}

/// The devices by name, and whether they are tainted.
fn names(tainted: &[bool]) -> BTreeMap<String, bool> {
    tainted
        .iter()
        .enumerate()
        .map(|(number, is_tainted)| (format!("gpu-{number}"), *is_tainted))
        .collect()
}

fn devices_are_published_and_given() {
    let node = Node::start();
    {
        let state = node.api.state();
        let slice = &state.slices[&format!("{NODE}-{DRIVER}-0")];
        assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "node-uid");
        let expected = json!({"name": NODE, "generation": 1, "resourceSliceCount": 1});
        assert_eq!(
            (&slice["spec"]["pool"], &slice["spec"]["nodeName"]),
            (&expected, &json!(NODE))
        );
        assert_eq!(state.count("POST", "resourceslices"), 1);
    }
    node.api
        .state()
        .allocate("train", "u-1", &["gpu-1", "gpu-0"]);
    for _ in 0..2 {
        let start = Instant::now();
        let answer = &node.kubelet.prepare(DRIVER, &[("train", "u-1")])["u-1"];
        assert!(start.elapsed() < SOON);
        let found: Vec<_> = answer
            .devices
            .iter()
            .map(|device| (device.device_name.as_str(), &device.cdi_device_ids[..]))
            .collect();
        let cdi = |uuid| vec![format!("k8s.gpu.nvidia.com/gpu={uuid}")];
        assert_eq!(
            (answer.error.as_str(), found),
            (
                "",
                vec![("gpu-1", &cdi("GPU-1")[..]), ("gpu-0", &cdi("GPU-0")[..])]
            )
        );
        assert_eq!(answer.devices[0].pool_name, NODE);
    }
    let released = node
        .kubelet
        .unprepare(DRIVER, &[("train", "u-1"), ("never-seen", "u-9")]);
    assert!(
        released.len() == 2 && released.values().all(|claim| claim.error.is_empty()),
        "{released:?}"
    );
}

fn one_failing_claim_does_not_affect_the_others() {
    let node = Node::start();
    node.driver.set(&[None, Some("XID 79")]);
    node.published("the taint", SOON, &[false, true]);
    {
        let mut state = node.api.state();
        state.allocate("good", "u-1", &["gpu-0"]);
        state.allocate("unhealthy", "u-2", &["gpu-1"]);
        state.allocate("old", "u-3", &["gpu-0"]);
        state.allocate("gone", "u-4", &["gpu-7"]);
        state.faults.push(Fault {
            method: "GET",
            path: "resourceclaims/refused",
            code: 403,
            times: 9,
        });
    }
    let asked = [
        ("good", "u-1"),
        ("unhealthy", "u-2"),
        ("old", "u-other"),
        ("gone", "u-4"),
        ("missing", "u-5"),
        ("refused", "u-6"),
    ];
    let answers = node.kubelet.prepare(DRIVER, &asked);
    assert_eq!(answers.len(), asked.len());
    assert!(answers["u-1"].error.is_empty() && answers["u-1"].devices.len() == 1);
    for (uid, parts) in [
        ("u-2", ["default/unhealthy", "XID 79 (ONH-072)"]),
        ("u-other", ["default/old", "(ONH-082)"]),
        ("u-4", ["\"gpu-7\"", "(ONH-071)"]),
        ("u-5", ["default/missing", "(ONH-082)"]),
        (
            "u-6",
            [
                "default/refused",
                "answered 403: the test refuses (ONH-081)",
            ],
        ),
    ] {
        let error = &answers[uid].error;
        assert!(
            answers[uid].devices.is_empty() && parts.iter().all(|part| error.contains(part)),
            "{error}"
        );
    }
    node.driver
        .pool
        .send_modify(|pool| pool.problem = Some("the driver is being replaced".to_owned()));
    let error = &node.kubelet.prepare(DRIVER, &[("good", "u-1")])["u-1"].error;
    assert!(
        error.contains("the driver is being replaced (ONH-074)"),
        "{error}"
    );
    // A GPU that is lost is not in the CDI spec either, which is not the reason.
    node.driver.pool.send_modify(|pool| {
        *pool = self::pool(&[None, Some("the GPU is lost")]);
        pool.in_spec = Arc::new(["GPU-0".to_owned()].into());
    });
    node.kubelet.wait("the reason", SOON, |state| {
        state
            .health
            .get("gpu-1")
            .is_some_and(|(_, why)| why.contains("the GPU is lost"))
    });
    let error = &node.kubelet.prepare(DRIVER, &[("unhealthy", "u-2")])["u-2"].error;
    assert!(error.contains("the GPU is lost (ONH-"), "{error}");
}

fn an_unhealthy_device_is_tainted_alone() {
    let node = Node::start();
    let healthy = |state: &fake_kubelet::dra::State, device: &str| {
        state.health.get(device).map(|(healthy, _)| *healthy)
    };
    node.kubelet.wait("health", SOON, |state| {
        healthy(state, "gpu-1") == Some(true)
    });
    node.driver.set(&[None, Some("XID 79")]);
    node.published("the taint", SOON, &[false, true]);
    node.kubelet.wait("the reason", SOON, |state| {
        state.health["gpu-1"] == (false, "XID 79 (ONH-072)".to_owned())
    });
    assert_eq!(healthy(&node.kubelet.state(), "gpu-0"), Some(true));
    assert_eq!(node.api.state().generation(), 2);
    node.driver.set(&[None, Some("XID 79; another reason")]);
    node.driver.set(&[None, None]);
    node.published("recovery", SOON, &[false, false]);
    let state = node.api.state();
    assert_eq!((state.generation(), state.slices.len()), (3, 1));
}

fn an_api_server_without_taints() {
    let node = Node::start_with(|state| state.drops_taints = true);
    node.driver.set(&[None, Some("XID 79")]);
    node.published("the device is withdrawn", SOON, &[false]);
    assert_eq!(
        node.api.state().generation(),
        2,
        "it was not listed without its taint"
    );
    node.driver.set(&[None, None]);
    node.published("recovery", SOON, &[false, false]);
}

/// Two GPUs, of which MPS limits the memory of the first one.
fn shared_pool(mib: u64) -> Pool {
    let mut devices = [device(0, None), device(1, None)];
    devices[0].mps = Some(MpsLimits {
        memory: Some(mib * 1024 * 1024),
        thread_percentage: 100,
    });
    Pool {
        devices: Arc::new(devices.into()),
        ..pool(&[None, None])
    }
}

/// What is published about the first GPU.
fn first_device(state: &fake_api::State) -> serde_json::Value {
    let slice = state.slices.values().next();
    slice.map_or_else(serde_json::Value::default, |slice| {
        slice["spec"]["devices"][0].clone()
    })
}

fn several_claims_can_have_a_device() {
    let node = Node::start();
    node.driver.pool.send_replace(shared_pool(8192));
    node.api.wait("shares", SOON, |state| {
        first_device(state)["allowMultipleAllocations"] == true
    });
    node.driver.pool.send_replace(shared_pool(4096));
    node.api.wait("another limit", SOON, |state| {
        let policy = &first_device(state)["capacity"]["memory"]["requestPolicy"];
        *policy == json!({"default": "4Gi", "validValues": ["4Gi"]})
    });
    node.driver.set(&[None, None]);
    // Claims may still hold shares: the next one gets the whole device, after them.
    node.api.wait("no daemon", SOON, |state| {
        let device = first_device(state);
        let total = &device["capacity"]["memory"]["value"];
        device["allowMultipleAllocations"] == true
            && device["capacity"]["memory"]["requestPolicy"]
                == json!({"default": total, "validValues": [total]})
    });
    node.api.state().wipe();
    node.api.wait("new slices", WIPED, |state| {
        first_device(state)["allowMultipleAllocations"].is_null()
            && !first_device(state)["name"].is_null()
    });
}

fn an_api_server_without_shares() {
    let node = Node::start_with(|state| state.drops_shares = true);
    node.driver.pool.send_replace(shared_pool(8192));
    std::thread::sleep(A_WHILE);
    assert_eq!(node.api.state().writes(), 1, "nothing has changed");
    // Another program writes the slices: they are compared again.
    node.api.state().wipe();
    node.published("again", WIPED, &[false, false]);
    std::thread::sleep(A_WHILE);
    let state = node.api.state();
    assert_eq!(state.writes(), 2, "written without an end");
    assert!(first_device(&state)["allowMultipleAllocations"].is_null());
}

/// A feature of the API server is switched off, or the API server is older than before: it keeps a field in the slices that have it, and drops
/// it in new ones.
fn fields_that_are_stored_no_longer() {
    let node = Node::start();
    let mut shared = shared_pool(8192);
    Arc::make_mut(&mut shared.devices)[1].unhealthy = Some("XID 79".to_owned());
    node.driver.pool.send_replace(shared.clone());
    node.published("the taint", SOON, &[false, true]);
    {
        let mut state = node.api.state();
        (state.drops_taints, state.drops_shares) = (true, true);
    }
    // Slices that have the fields keep them.
    Arc::make_mut(&mut shared.devices)[0].unhealthy = Some("XID 48".to_owned());
    node.driver.pool.send_replace(shared.clone());
    node.published("another taint", SOON, &[true, true]);
    Arc::make_mut(&mut shared.devices)[0].unhealthy = None;
    node.driver.pool.send_replace(shared);
    node.published("one taint", SOON, &[false, true]);
    let before = node.api.state().writes();
    node.api.state().wipe();
    node.published("the lost device is withdrawn", WIPED, &[false]);
    std::thread::sleep(A_WHILE);
    let state = node.api.state();
    let writes = state.writes() - before;
    assert!(writes <= 2, "{writes} writes");
    assert_eq!(state.devices(), names(&[false]));
    assert!(first_device(&state)["allowMultipleAllocations"].is_null());
}

/// A program between the driver and the storage changes what is written.
fn slices_that_are_stored_otherwise() {
    let node = Node::start();
    let before = {
        let mut state = node.api.state();
        state.drops_attributes = true;
        state.writes()
    };
    node.driver.set(&[None, None, None]);
    let start = Instant::now();
    let expected = "the API server does not store the slices as they were written";
    loop {
        let unpublished = node.driver.unpublished.borrow().clone();
        if unpublished.is_some_and(|why| why.contains(expected)) {
            break;
        }
        assert!(start.elapsed() < SOON, "nothing is reported");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(A_WHILE);
    let writes = node.api.state().writes() - before;
    // An attempt writes twice, and the pauses are random: there were up to four attempts in this time. Without pauses there are hundreds.
    assert!(writes <= 30, "{writes} writes");
    node.api.state().drops_attributes = false;
    node.api.wait("attributes", WIPED, |state| {
        !first_device(state)["attributes"].is_null()
    });
}

fn the_kubelet_deletes_the_slices() {
    let node = Node::start();
    for _ in 0..3 {
        node.api.state().wipe();
        let time = node.published("again", WIPED, &[false, false]);
        assert!(time < WIPED);
    }
}

fn watches_that_are_cut_or_too_old() {
    let node = Node::start();
    node.api.state().cut();
    node.api.state().wipe();
    node.published("after a cut", WIPED, &[false, false]);
    node.api.wait("a watch", SOON, |state| {
        state.count("GET", "resourceslices") >= 2
    });
    {
        let mut state = node.api.state();
        state.expire();
        state.wipe();
    }
    node.published("after an expiry", WIPED, &[false, false]);
    node.driver.set(&[Some("XID 79"), None]);
    node.published("a change", SOON, &[true, false]);
}

fn requests_that_are_refused() {
    for (method, path, code) in [
        ("GET", "resourceslices", 403),
        ("POST", "resourceslices", 422),
        ("POST", "resourceslices", 500),
        ("GET", "nodes", 403),
        ("POST", "selfsubjectreviews", 500),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let api = FakeApi::start(dir.path());
        api.state().faults.push(Fault {
            method,
            path,
            code,
            times: 2,
        });
        let _driver = Driver::start(dir.path(), pool(&[None]));
        api.wait(path, 2 * SOON, |state| state.devices() == names(&[false]));
        let asked = api.state().asked.len();
        assert!(asked < 20, "{asked} requests");
    }
}

fn conflicts() {
    let node = Node::start();
    for time in 0..3 {
        node.api.state().faults.push(Fault {
            method: "PUT",
            path: "resourceslices",
            code: 409,
            times: 2,
        });
        let is_unhealthy = time % 2 == 0;
        node.driver.set(&[is_unhealthy.then_some("XID 79"), None]);
        node.published("after conflicts", SOON, &[is_unhealthy, false]);
    }
    // Another program changes the slice.
    {
        let mut state = node.api.state();
        let name = state.slices.keys().next().unwrap().clone();
        state.remove(&name);
        state.allocate("unused", "u-1", &[]);
    }
    node.published("after a deletion", WIPED, &[true, false]);
}

fn an_api_server_that_appears_later() {
    let dir = tempfile::tempdir().unwrap();
    let mut api = FakeApi::stopped(dir.path());
    let kubelet = DraKubelet::start(dir.path());
    let _driver = Driver::start(dir.path(), pool(&[None]));
    kubelet.wait("the driver serves before", SOON, |state| {
        state.drivers.contains_key(DRIVER)
    });
    let released = kubelet.unprepare(DRIVER, &[("any", "u-1")]);
    assert!(released["u-1"].error.is_empty(), "a pod can be deleted");
    let error = kubelet
        .prepare(DRIVER, &[("any", "u-1")])
        .remove("u-1")
        .unwrap()
        .error;
    assert!(
        error.contains("the API server cannot be reached: ") && error.contains("(ONH-081)"),
        "{error}"
    );
    std::thread::sleep(A_WHILE);
    api.run();
    api.wait("the first slices", SOON, |state| {
        state.devices() == names(&[false])
    });
}

fn an_api_server_that_restarts() {
    let mut node = Node::start();
    for is_unhealthy in [true, false] {
        node.api.stop();
        node.driver.set(&[None, is_unhealthy.then_some("XID 79")]);
        node.api.run();
        node.published("what changed in the meantime", SOON, &[false, is_unhealthy]);
    }
}

fn a_certificate_is_replaced() {
    let node = Node::start();
    assert!(
        node.api
            .state()
            .asked
            .iter()
            .all(|asked| asked.serial == [1])
    );
    node.api.certificates.rotate(2);
    node.api.state().allocate("train", "u-1", &["gpu-0"]);
    assert!(
        node.kubelet.prepare(DRIVER, &[("train", "u-1")])["u-1"]
            .error
            .is_empty()
    );
    assert_eq!(node.api.state().asked.last().unwrap().serial, [2]);
    node.api.state().cut();
    node.api.wait("a watch", SOON, |state| {
        state
            .asked
            .last()
            .is_some_and(|asked| asked.query.contains("watch") && asked.serial == [2])
    });
}

fn a_slow_api_server() {
    let node = Node::start();
    node.api.state().delay = Duration::from_secs(2);
    node.driver.set(&[Some("XID 79"), None]);
    node.published("a change", 2 * SOON, &[true, false]);
    node.api.state().allocate("train", "u-1", &["gpu-1"]);
    assert!(
        node.kubelet.prepare(DRIVER, &[("train", "u-1")])["u-1"]
            .error
            .is_empty()
    );
}

/// The driver neither reads gigabytes nor waits longer than the kubelet, which has 45 s.
fn answers_without_an_end() {
    let node = Node::start();
    node.api.state().allocate("train", "u-1", &["gpu-1"]);
    for (hostile, expected) in [
        (
            Hostile::Endless,
            "the answer of the API server is longer than 16777216 bytes (ONH-081)",
        ),
        (
            Hostile::Hanging,
            "the API server did not answer in time: deadline has elapsed (ONH-081)",
        ),
    ] {
        node.api.state().hostile = Some(hostile);
        let error = &node.kubelet.prepare(DRIVER, &[("train", "u-1")])["u-1"].error;
        assert!(error.contains(expected), "{hostile:?}: {error}");
    }
    node.api.state().hostile = None;
    let answer = node.kubelet.prepare(DRIVER, &[("train", "u-1")]);
    assert_eq!(answer["u-1"].error, "");
}

/// An outage of ten minutes, and restarts, for all nodes of a cluster.
fn no_second_with_many_requests() {
    for away in [3600..4200, 3600..3602, 3600..3610, 3600..3630, 3600..3660] {
        let end = away.end + 3600;
        let counts = fleet::requests(pace::PUBLISHER, &away, end);
        let peak = counts.peak(60..end);
        assert!(peak <= fleet::MOST, "{away:?}: {peak}");
    }
    let counts = fleet::requests(pace::PUBLISHER, &(7200..7201), 7200);
    let idle = counts.sum(3600..7200) / fleet::NODES;
    assert!(idle <= 18, "{idle} requests in an idle hour");
    // All watches begin in the same minute, and drift apart.
    let spread = counts.peak(3600..7200);
    assert!(spread < 60, "{spread} in a second");
}

fn faults(method: &'static str, path: &'static str, code: u16, times: usize) -> Fault {
    Fault {
        method,
        path,
        code,
        times,
    }
}

fn requests_are_not_repeated_at_once() {
    let node = Node::start();
    node.api.state().allocate("train", "u-1", &["gpu-1"]);
    let fault = faults("GET", "resourceclaims", 503, 99);
    node.api.state().faults.push(fault);
    let error = &node.kubelet.prepare(DRIVER, &[("train", "u-1")])["u-1"].error;
    assert!(
        error.contains("the API server answered 503: the test refuses (ONH-081)"),
        "{error}"
    );
    assert_eq!(node.api.state().count("GET", "resourceclaims"), 4);
    // A watch that ends early costs a list and a watch.
    let before = {
        let mut state = node.api.state();
        state.cut();
        state.asked.len()
    };
    std::thread::sleep(A_WHILE);
    let methods: Vec<_> = node.api.state().asked[before..]
        .iter()
        .map(|asked| (asked.method.clone(), asked.query.contains("watch=true")))
        .collect();
    let expected = [("GET".to_owned(), false), ("GET".to_owned(), true)];
    assert_eq!(methods, expected);
    let mut state = node.api.state();
    state.faults.push(faults("GET", "resourceslices", 503, 99));
    let before = state.asked.len();
    state.cut();
    drop(state);
    std::thread::sleep(A_WHILE);
    let asked = node.api.state().asked.len() - before;
    assert!((1..10).contains(&asked), "{asked} requests");
}

fn the_api_server_asks_to_wait() {
    let dir = tempfile::tempdir().unwrap();
    let api = FakeApi::start(dir.path());
    api.state().retry_after = Some(2);
    api.state()
        .faults
        .push(faults("GET", "resourceslices", 429, 1));
    let start = Instant::now();
    let driver = Driver::start(dir.path(), pool(&[None]));
    api.wait("the refusal", SOON, |state| !state.asked.is_empty());
    // A change of the devices does not come earlier.
    driver.set(&[None, None]);
    api.wait("the devices", SOON, |state| !state.slices.is_empty());
    assert!(start.elapsed() > Duration::from_secs(2));
    let state = api.state();
    assert_eq!(state.devices(), names(&[false, false]));
    let agents: Vec<_> = state.asked.iter().map(|asked| &asked.agent).collect();
    assert!(
        agents
            .iter()
            .all(|agent| agent.starts_with("oci-nvidia-kubelet-plugin/")),
        "{agents:?}"
    );
}

/// Kubernetes before 1.34.
fn an_api_server_without_the_api() {
    let dir = tempfile::tempdir().unwrap();
    let api = FakeApi::start(dir.path());
    api.state()
        .faults
        .push(faults("GET", "resource.k8s.io", 404, 99));
    let driver = Driver::start(dir.path(), pool(&[None]));
    unpublished(
        &driver,
        "the API server has no resource.k8s.io/v1, which needs Kubernetes 1.34 or newer: the API server answered 404",
    );
    api.state().faults.clear();
    api.wait("after the update", SOON, |state| {
        state.devices() == names(&[false])
    });
}

/// Waits until the driver reports why it cannot publish the devices.
fn unpublished(driver: &Driver, part: &str) {
    let start = Instant::now();
    loop {
        let why = driver.unpublished.borrow().clone().unwrap_or_default();
        if why.contains(part) {
            return;
        }
        assert!(start.elapsed() < 3 * SOON, "{part}: {why:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whatever the API server refuses for a longer time is reported.
fn refusals_of_every_request() {
    let requests = [
        ("GET", "resourceslices"),
        ("POST", "resourceslices"),
        ("PUT", "resourceslices"),
        ("DELETE", "resourceslices"),
        ("GET", "nodes"),
        ("POST", "selfsubjectreviews"),
    ];
    let refuse = |method: &'static str, path: &'static str, code: u16| {
        let dir = tempfile::tempdir().unwrap();
        let api = FakeApi::start(dir.path());
        api.state().faults.push(faults(method, path, code, 999));
        let driver = Driver::start(dir.path(), pool(&[None]));
        match method {
            "PUT" => {
                api.wait("a slice", SOON, |state| !state.slices.is_empty());
                driver.set(&[Some("XID 79")]);
            }
            "DELETE" => {
                api.wait("a slice", SOON, |state| !state.slices.is_empty());
                driver.set(&[]);
            }
            _ => {}
        }
        if (method, code) == ("DELETE", 404) {
            // It does not exist any more.
            return;
        }
        unpublished(&driver, &format!("answered {code}"));
    };
    std::thread::scope(|scope| {
        for (method, path) in requests {
            for code in [400, 401, 403, 404, 409, 410, 422, 429, 500, 503] {
                scope.spawn(move || refuse(method, path, code));
            }
        }
    });
}

/// The token of a kubeconfig is replaced after it has expired.
fn new_credentials_are_used_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let api = FakeApi::start(dir.path());
    let fault = faults("GET", "resourceslices", 401, 999);
    api.state().faults.push(fault);
    let pace = Pace {
        first: Duration::from_secs(3600),
        longest: Duration::from_secs(3600),
    };
    let driver = Driver::start_at(dir.path(), pool(&[None]), pace);
    unpublished(&driver, "answered 401");
    api.state().faults.clear();
    api.certificates.rotate(2);
    api.wait("the devices", SOON, |state| !state.slices.is_empty());
}

/// The API server answers only that it forbids the request.
fn a_node_name_of_another_node() {
    let dir = tempfile::tempdir().unwrap();
    let api = FakeApi::start(dir.path());
    let _kubelet = DraKubelet::start(dir.path());
    api.state().faults.push(Fault {
        method: "GET",
        path: "nodes",
        code: 403,
        times: 99,
    });
    let driver = Driver::start_as(dir.path(), pool(&[None]), Keeper::default(), Some("node-2"));
    let start = Instant::now();
    loop {
        let unpublished = driver.unpublished.borrow().clone().unwrap_or_default();
        if unpublished.contains(
            "node-name is \"node-2\", and the credentials belong to the node \"node-1\": ",
        ) {
            assert!(unpublished.contains("answered 403"), "{unpublished}");
            return;
        }
        assert!(start.elapsed() < 2 * SOON, "{unpublished}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn slices_of_others_are_adopted() {
    let node = Node::start_with(|state| {
        for (name, generation) in [
            ("node-1-gpu.nvidia.com-x7k2p", 4),
            ("node-1-gpu.nvidia.com-z9q1m", 5),
        ] {
            let pool = json!({"name": NODE, "generation": generation, "resourceSliceCount": 2});
            let slice = json!({
                "metadata": {"name": name, "uid": name, "resourceVersion": "0"},
                "spec": {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": [{"name": "gpu-7"}]},
            });
            state.slices.insert(name.to_owned(), slice);
        }
    });
    let state = node.api.state();
    let names: Vec<_> = state.slices.keys().map(String::as_str).collect();
    assert_eq!(
        (names, state.generation()),
        (vec!["node-1-gpu.nvidia.com-x7k2p"], 6)
    );
}

fn nothing_is_asked_while_nothing_changes() {
    let node = Node::start();
    node.api.wait("the watch", SOON, |state| {
        state
            .asked
            .last()
            .is_some_and(|asked| asked.query.contains("watch=true"))
    });
    let (before, bytes) = {
        let state = node.api.state();
        (
            state.asked.len(),
            state.asked.iter().map(|asked| asked.bytes).sum::<usize>(),
        )
    };
    // The user of the credentials, the slices, the node, a new slice, and the watch
    assert!(
        before == 5 && bytes < 2500,
        "{before} requests, {bytes} bytes in bodies"
    );
    std::thread::sleep(A_WHILE);
    node.driver.set(&[None, None]);
    std::thread::sleep(A_WHILE);
    assert_eq!(node.api.state().asked[before..], []);
    node.driver.set(&[None, Some("XID 79")]);
    node.published("the taint", SOON, &[false, true]);
    let state = node.api.state();
    let bytes: usize = state.asked[before..].iter().map(|asked| asked.bytes).sum();
    // One to learn whether the API server stores taints, and one that writes
    let count = state.asked.len() - before;
    assert!(
        count == 2 && bytes < 4000,
        "{count} requests, {bytes} bytes in bodies"
    );
}

fn nothing_is_published_before_the_driver_answers() {
    let dir = tempfile::tempdir().unwrap();
    let api = FakeApi::start(dir.path());
    let driver = Driver::start(dir.path(), Pool::default());
    std::thread::sleep(A_WHILE);
    assert_eq!(api.state().asked, []);
    driver.set(&[None]);
    api.wait("the devices", SOON, |state| {
        state.devices() == names(&[false])
    });
    drop(driver);
    let _driver = Driver::start(dir.path(), pool(&[None]));
    std::thread::sleep(A_WHILE);
    assert_eq!(api.state().generation(), 1, "a restart changes nothing");
}

fn sockets_that_are_removed() {
    let node = Node::start();
    let sockets = [
        node.dir
            .path()
            .join("plugins_registry")
            .join(format!("{DRIVER}-reg.sock")),
        dra_socket(node.dir.path()),
    ];
    for socket in &sockets {
        assert_eq!(
            std::fs::metadata(socket).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let before = node.kubelet.state().registrations;
        std::fs::remove_file(socket).unwrap();
        node.kubelet.wait("registered again", SOON, |state| {
            state.registrations > before && state.drivers.contains_key(DRIVER)
        });
        assert!(socket.exists());
    }
    drop(node.driver);
    assert!(sockets.iter().all(|socket| !socket.exists()));
    let slices = node.api.state().slices.len();
    assert_eq!(
        slices, 1,
        "the kubelet deletes them if the driver does not come back"
    );
}

fn dra_socket(dir: &Path) -> PathBuf {
    dir.join("plugins").join(DRIVER).join("dra.sock")
}

fn a_kubelet_that_restarts() {
    let Node {
        driver,
        kubelet,
        api,
        dir,
    } = Node::start();
    drop(kubelet);
    api.state().wipe();
    let kubelet = DraKubelet::start(dir.path());
    kubelet.wait("registered", SOON, |state| {
        state.drivers.contains_key(DRIVER)
    });
    api.wait("the devices", WIPED, |state| {
        state.devices() == names(&[false, false])
    });
    kubelet.wait("health", SOON, |state| state.health.len() == 2);
    drop(driver);
}

fn another_driver_is_left_alone() {
    let first = Node::start();
    let is_watch = |asked: &fake_api::Asked| asked.query.contains("watch=true");
    first.api.wait("the watch", SOON, |state| {
        state.asked.last().is_some_and(is_watch)
    });
    let before = first.api.state().asked.len();
    // The same directory, so the second driver would take the sockets of the first one.
    let second = Driver::start(first.dir.path(), pool(&[None]));
    std::thread::sleep(A_WHILE);
    assert_eq!(
        (
            first.api.state().asked.len(),
            first.kubelet.state().registrations
        ),
        (before, 1)
    );
    drop(first.driver);
    first
        .api
        .wait("the second one takes over", SEARCHED, |state| {
            state.devices() == names(&[false])
        });
    drop(second);
}

fn a_device_plugin_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let api = FakeApi::start(dir.path());
    let _kubelet = FakeKubelet::start(dir.path());
    for socket in ["nvidia-gpu.sock", "oci-nvidia-gpu.sock"] {
        let plugin = FakePlugin::start(dir.path(), socket, &["GPU-0"], None);
        let driver = Driver::start(dir.path(), pool(&[None]));
        std::thread::sleep(A_WHILE);
        assert!(!dra_socket(dir.path()).exists(), "{socket}");
        drop(plugin);
        api.wait("after its end", SEARCHED, |state| {
            state.devices() == names(&[false])
        });
        drop(driver);
        api.state().wipe();
    }
}

/// They got it from the device plugin, before the node got the driver for claims.
fn devices_of_pods_that_still_run() {
    let dir = tempfile::tempdir().unwrap();
    let api = FakeApi::start(dir.path());
    let kubelet = FakeKubelet::start(dir.path());
    kubelet.state().containers = vec![Container {
        namespace: "ns",
        pod: "pod",
        name: "main",
        resource: "nvidia.com/gpu",
        ids: vec!["GPU-1::0".to_owned()],
    }];
    let _driver = Driver::start(dir.path(), pool(&[None, None]));
    let offered = [names(&[false, true]), names(&[false, false])];
    api.wait("the device of the pod", SOON, |state| {
        let devices = state.devices();
        assert_ne!(devices, offered[1], "the device is offered");
        devices == offered[0]
    });
    kubelet.state().containers.clear();
    api.wait("after its end", SEARCHED, |state| {
        state.devices() == offered[1]
    });
}

/// The names of sockets are free, and the kubelet knows the resources.
fn a_resource_of_another_plugin() {
    let dir = tempfile::tempdir().unwrap();
    let api = FakeApi::start(dir.path());
    let kubelet = FakeKubelet::start(dir.path());
    let registers = |resource: &str, id: &str| {
        kubelet.state().more_devices = [(resource.to_owned(), vec![id.to_owned()])].into();
    };
    for (resource, id) in [
        ("nvidia.com/gpu", "nvidia0"),
        ("example.com/h100", "GPU-0::3"),
    ] {
        registers(resource, id);
        let driver = Driver::start(dir.path(), pool(&[None]));
        std::thread::sleep(A_WHILE);
        assert!(!dra_socket(dir.path()).exists(), "{resource}");
        registers("nvidia.com/hostdev", "0000:3b:00.0");
        api.wait("after its end", SEARCHED, |state| {
            state.devices() == names(&[false])
        });
        // It comes while the driver serves.
        registers(resource, id);
        let start = Instant::now();
        while dra_socket(dir.path()).exists() {
            assert!(start.elapsed() < SEARCHED, "{resource}");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(driver);
        api.state().wipe();
    }
}

/// The bytes that grpc-go sends if it dials like the kubelet's plugin watcher: the path of the socket as `:authority`, which h2 rejects.
const WATCHER: &[u8] = include_bytes!("fixtures/grpc-go-socket-path.http2");
const RESET: u8 = 3;
const HEADERS: u8 = 1;

fn the_plugin_watcher_is_answered() {
    let node = Node::start();
    for socket in [
        node.dir
            .path()
            .join("plugins_registry")
            .join(format!("{DRIVER}-reg.sock")),
        dra_socket(node.dir.path()),
    ] {
        let frames = frames(&socket, WATCHER);
        assert!(frames.iter().all(|kind| *kind != RESET), "{frames:?}");
        assert!(frames.contains(&HEADERS), "{frames:?}");
    }
}

/// Sends bytes, and returns the types of the frames that a server answers within a second.
fn frames(socket: &Path, bytes: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    stream.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(length) = stream.read(&mut buffer) {
        if length == 0 {
            break;
        }
        answer.extend_from_slice(&buffer[..length]);
    }
    let (mut kinds, mut rest) = (Vec::new(), &answer[..]);
    while rest.len() >= 9 {
        let length = usize::from(rest[0]) << 16 | usize::from(rest[1]) << 8 | usize::from(rest[2]);
        kinds.push(rest[3]);
        rest = rest.get(9 + length..).unwrap_or_default();
    }
    kinds
}

fn many_devices() {
    let node = Node::start();
    let all = |count: usize| pool(&vec![None; count]);
    for (count, slices) in [(130, 3), (65, 2), (3, 1), (0, 0), (64, 1)] {
        node.driver.pool.send_replace(all(count));
        node.api.wait("the devices", SOON, |state| {
            state.devices().len() == count && state.slices.len() == slices
        });
        let state = node.api.state();
        assert!(
            state
                .slices
                .values()
                .all(|slice| slice["spec"]["pool"]["generation"] == state.generation())
        );
    }
}

fn nothing_is_stored() {
    let node = Node::start();
    node.api.state().allocate("train", "u-1", &["gpu-0"]);
    assert!(
        node.kubelet.prepare(DRIVER, &[("train", "u-1")])["u-1"]
            .error
            .is_empty()
    );
    let Node {
        driver,
        kubelet,
        api,
        dir,
    } = node;
    drop(driver);
    let mut files = Vec::new();
    let mut dirs = vec![dir.path().to_owned()];
    while let Some(next) = dirs.pop() {
        for entry in std::fs::read_dir(next).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                dirs.push(entry.path());
            } else {
                files.push(entry.file_name().into_string().unwrap());
            }
        }
    }
    files.sort();
    assert_eq!(
        files,
        [
            "ca.crt",
            "kubelet-client-1.pem",
            "kubelet-client-current.pem",
            "kubelet.conf"
        ]
    );
    // A claim that was prepared before is prepared again, and released, by another process.
    let _driver = Driver::start(dir.path(), pool(&[None, None]));
    kubelet.wait("registered again", SOON, |state| {
        state.registrations == 2 && state.drivers.contains_key(DRIVER)
    });
    assert!(
        kubelet.prepare(DRIVER, &[("train", "u-1")])["u-1"]
            .error
            .is_empty()
    );
    assert!(
        kubelet.unprepare(DRIVER, &[("train", "u-1")])["u-1"]
            .error
            .is_empty()
    );
    drop(api);
}
