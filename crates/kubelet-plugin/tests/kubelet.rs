//! Registration with a fake kubelet, with the limits that the documentation promises, five times as long for busy machines.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    clippy::disallowed_types,
    unreachable_pub,
    dead_code,
    missing_docs,
    reason = "tests"
)]

#[macro_use]
#[path = "../../../tests/it/harness.rs"]
mod harness;

mod fake_kubelet;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fake_kubelet::plugin::FakePlugin;
use fake_kubelet::thread::Thread;
use fake_kubelet::{Event, FakeKubelet, State};
use kubelet_plugin::kubelet::socket::KubeletDirs;
use kubelet_plugin::kubelet::{self, Registration, Status};
use kubelet_plugin::model::{Allocator, Refusal, Resource, ResourceDevice};
use kubelet_plugin::proto::device_plugin_client::DevicePluginClient;
use kubelet_plugin::proto::{ContainerAllocateResponse, Empty};
use tempfile::TempDir;
use tokio::sync::watch;

const GPU: &str = "nvidia.com/gpu";
const SOCKET: &str = "device-plugins/oci-nvidia-gpu.sock";

/// A new kubelet's socket, noticed with inotify.
const AT_ONCE: Duration = Duration::from_millis(5 * 100);
/// Everything else that ends a registration.
const SOON: Duration = Duration::from_secs(5 * 2);
/// Other plugins are searched for every 10 s.
const SEARCHED: Duration = Duration::from_secs(5 * 10);
/// Long enough for a wrong registration.
const A_WHILE: Duration = Duration::from_millis(1500);

tests! {
    &[] => devices_are_listed_with_each_change, containers_are_answered, refusals_can_be_read,
        a_restarted_kubelet_is_noticed_at_once, a_new_kubelet_next_to_the_old_one,
        a_changed_socket_is_no_new_kubelet, a_cut_stream_is_registered_again,
        a_deleted_socket_is_created_again, missed_events_do_not_matter, a_failed_attempt_is_repeated,
        the_directory_may_come_later, a_kubelet_that_hangs_is_left_for_its_successor,
        a_kubelet_that_hangs_is_asked_again, a_kubelet_that_is_late_does_not_have_two_streams,
        a_resource_has_one_stream_whatever_happens, nothing_is_registered_next_to_another_plugin,
        a_plugin_that_takes_over_is_left_alone, a_plugin_with_other_names_of_the_gpus_ends_the_registration,
        ids_of_another_plugin_prevent_a_registration, dead_sockets_are_not_plugins,
        a_second_process_does_not_interfere, the_end_is_not_an_empty_list, a_long_path_is_an_error,
        each_resource_has_a_socket_of_its_own, the_client_of_the_kubelet_is_answered,
        hostile_bytes_do_no_harm, a_kubelet_with_another_root_directory, the_stream_of_a_tool_does_not_count;
}

fn main() -> ExitCode {
    // Most of the time the tests wait.
    let trials = TESTS
        .iter()
        .map(|test| test.trial(test.name(), |run| run()));
    harness::Selection::of(trials).run(8)
}

/// Gives every known device, and refuses `GPU-failing`.
struct TestAllocator;

impl Allocator for TestAllocator {
    fn allocate(
        &self,
        resource: &str,
        ids: &[String],
    ) -> Result<ContainerAllocateResponse, Refusal> {
        if ids.iter().any(|id| id == "GPU-failing") {
            return Err(Refusal::new(
                "cannot allocate \"GPU-failing\": it is 100 % broken (ONH-613)",
            ));
        }
        let envs = [
            ("IDS".to_owned(), ids.join(",")),
            ("RESOURCE".to_owned(), resource.to_owned()),
        ];
        Ok(ContainerAllocateResponse {
            envs: envs.into(),
            ..ContainerAllocateResponse::default()
        })
    }

    fn prefer(
        &self,
        _: &str,
        available: &[String],
        required: &[String],
        size: usize,
    ) -> Vec<String> {
        let others = available.iter().filter(|id| !required.contains(id));
        required.iter().chain(others).take(size).cloned().collect()
    }
}

/// The plugin under test.
struct Plugin {
    list: watch::Sender<Arc<Vec<Resource>>>,
    status: watch::Receiver<Status>,
    events: Arc<Mutex<Vec<kubelet::Event>>>,
    thread: Thread<String>,
}

impl Plugin {
    fn start(dir: &Path, resources: Vec<Resource>) -> Self {
        let dirs = KubeletDirs {
            plugins: vec![dir.join("device-plugins")],
            pod_resources: dir.join("pod-resources/kubelet.sock"),
        };
        Self::start_in(dirs, resources)
    }

    fn start_in(dirs: KubeletDirs, resources: Vec<Resource>) -> Self {
        let (list, resources) = watch::channel(Arc::new(resources));
        let (sender, status) = watch::channel(Status::new());
        let events = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&events);
        let log: kubelet::Log = Arc::new(move |event| log.lock().unwrap().push(event.clone()));
        let thread = Thread::run(async move || {
            let allocator = Arc::new(TestAllocator);
            let result = kubelet::serve(dirs, resources, allocator, sender, log).await;
            format!("{:#}", result.unwrap_err())
        });
        Self {
            list,
            status,
            events,
            thread,
        }
    }

    fn registration(&self, resource: &str) -> Registration {
        self.status
            .borrow()
            .get(resource)
            .cloned()
            .unwrap_or_default()
    }

    #[track_caller]
    fn wait(&self, what: &str, most: Duration, is: impl Fn(&Registration) -> bool) {
        let start = Instant::now();
        while !is(&self.registration(GPU)) {
            assert!(
                start.elapsed() < most,
                "not within {most:?}: {what}: {:?}",
                self.status.borrow()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn device(id: &str, numa_node: Option<u32>, unhealthy: Option<&str>) -> ResourceDevice {
    let unhealthy = unhealthy.map(str::to_owned);
    ResourceDevice {
        id: id.to_owned(),
        gpu: id.to_owned(),
        numa_node,
        unhealthy,
        ..ResourceDevice::default()
    }
}

fn gpus(ids: &[&str]) -> Resource {
    Resource {
        name: GPU.to_owned(),
        devices: ids.iter().map(|id| device(id, None, None)).collect(),
    }
}

fn two_gpus() -> Vec<Resource> {
    vec![gpus(&["GPU-1", "GPU-2"])]
}

fn is_live(state: &State) -> bool {
    state.streams(GPU) == 1 && state.allocatable(GPU) == 2
}

fn strings(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

fn scratch() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A kubelet and a plugin that is registered.
fn registered() -> (TempDir, FakeKubelet, Plugin) {
    let dir = scratch();
    let kubelet = FakeKubelet::start(dir.path());
    let plugin = Plugin::start(dir.path(), two_gpus());
    kubelet.wait("the first registration", SOON, is_live);
    (dir, kubelet, plugin)
}

fn devices_are_listed_with_each_change() {
    let dir = scratch();
    let kubelet = FakeKubelet::start(dir.path());
    let plugin = Plugin::start(dir.path(), vec![gpus(&["GPU-1"])]);
    let list = |ids: &[(&str, bool)]| Event::List {
        resource: GPU.to_owned(),
        devices: ids
            .iter()
            .map(|(id, healthy)| ((*id).to_owned(), *healthy))
            .collect(),
    };
    let seen = |state: &State, event: &Event| state.count(|seen| seen == event) == 1;
    kubelet.wait("the list", SOON, |state| {
        seen(state, &list(&[("GPU-1", true)]))
    });
    let file = fs::metadata(dir.path().join(SOCKET)).unwrap();
    assert_eq!(file.permissions().mode() & 0o777, 0o600);

    let devices = vec![
        device("GPU-1", Some(1), Some("it fell off the bus")),
        device("GPU-2", Some(0), None),
    ];
    plugin.list.send_replace(Arc::new(vec![Resource {
        name: GPU.to_owned(),
        devices,
    }]));
    let changed = list(&[("GPU-1", false), ("GPU-2", true)]);
    let time = kubelet.wait("the change", AT_ONCE, |state| seen(state, &changed));
    assert!(time < AT_ONCE);

    // A change of another resource is no news.
    let mut both = Vec::clone(&plugin.list.borrow());
    both.push(Resource {
        name: "nvidia.com/other".to_owned(),
        devices: vec![device("GPU-3", None, None)],
    });
    plugin.list.send_replace(Arc::new(both));
    kubelet.wait("the other resource", SOON, |state| {
        state.streams("nvidia.com/other") == 1
    });
    assert_eq!(kubelet.state().count(|event| *event == changed), 1);
    assert!(
        dir.path()
            .join("device-plugins/oci-nvidia-other.sock")
            .exists()
    );

    // It goes again, and its socket with it.
    plugin.list.send_replace(Arc::new(two_gpus()));
    kubelet.wait("the end", SOON, |state| {
        state.streams("nvidia.com/other") == 0
    });
    kubelet.wait("the list without it", SOON, is_live);
    let gone = || {
        !dir.path()
            .join("device-plugins/oci-nvidia-other.sock")
            .exists()
    };
    let start = Instant::now();
    while !gone() {
        assert!(start.elapsed() < SOON);
    }
    assert_eq!(
        plugin.registration("nvidia.com/other"),
        Registration::default()
    );
    let registration = plugin.registration(GPU);
    assert!(
        registration.live && registration.registered.is_some(),
        "{registration:?}"
    );
    assert!(dir.path().join(SOCKET).exists());
}

fn containers_are_answered() {
    let (_dir, kubelet, _plugin) = registered();
    let envs = |answer: &ContainerAllocateResponse| answer.envs["IDS"].clone();

    let ids = strings(&["GPU-1"]);
    let answer = kubelet.allocate(GPU, &[&ids]).unwrap().container_responses;
    assert_eq!(
        (answer.len(), envs(&answer[0]), &*answer[0].envs["RESOURCE"]),
        (1, "GPU-1".to_owned(), GPU)
    );
    let others = strings(&["GPU-2", "GPU-1"]);
    let answer = kubelet
        .allocate(GPU, &[&ids, &others])
        .unwrap()
        .container_responses;
    assert_eq!(
        answer.iter().map(envs).collect::<Vec<_>>(),
        ["GPU-1", "GPU-2,GPU-1"]
    );
    assert_eq!(kubelet.allocate(GPU, &[]).unwrap().container_responses, []);

    let many: Vec<String> = (0..10_000)
        .map(|number| format!("GPU-00000000-0000-0000-0000-{number:012}"))
        .collect();
    assert_eq!(
        kubelet
            .allocate(GPU, &[&many])
            .unwrap()
            .container_responses
            .len(),
        1
    );
    let preferred = kubelet.prefer(
        GPU,
        &[
            (&many, &[], 10_000),
            (&ids, &[], -1),
            (&others, &ids, 1),
            (&[], &[], 3),
        ],
    );
    let preferred = preferred.unwrap();
    assert_eq!(
        (
            preferred[0].len(),
            preferred[1].len(),
            &preferred[2],
            preferred[3].len()
        ),
        (10_000, 0, &ids, 0)
    );
    assert!(kubelet.prefer(GPU, &[]).unwrap().is_empty());
    kubelet.pre_start(GPU, &ids).unwrap();
}

/// The kubelet writes `rpc error: code = … desc = …` into an event of the pod.
fn refusals_can_be_read() {
    let (_dir, kubelet, _plugin) = registered();
    let refused = |ids: &[&str]| {
        let status = kubelet
            .allocate(GPU, &[&strings(&["GPU-1"]), &strings(ids)])
            .unwrap_err();
        (status.code(), status.message().to_owned())
    };
    let code = tonic::Code::FailedPrecondition;
    let failing = "cannot allocate \"GPU-failing\": it is 100 % broken (ONH-613)";
    assert_eq!(refused(&["GPU-failing"]), (code, failing.to_owned()));
    let none = "cannot allocate \"nvidia.com/gpu\": the request names no device";
    assert_eq!(refused(&[]), (code, none.to_owned()));
    kubelet.stays("the stream", Duration::from_millis(100), is_live);
}

fn a_restarted_kubelet_is_noticed_at_once() {
    let (dir, mut kubelet, plugin) = registered();
    for round in 0..8 {
        drop(kubelet);
        plugin.wait("the end of the stream", SOON, |registration| {
            !registration.live
        });
        // A kubelet that ends by itself removes its socket. Then there is nothing to try until an event, or the next inspection.
        if round % 4 != 0 {
            fs::remove_file(dir.path().join("device-plugins/kubelet.sock")).unwrap();
        }
        std::thread::sleep(Duration::from_millis(50 + 130 * round));
        kubelet = FakeKubelet::start(dir.path());
        kubelet.wait("a registration", AT_ONCE, is_live);
        kubelet.stays(
            "only one registration",
            Duration::from_millis(200),
            |state| is_live(state) && state.registrations(GPU) == 1,
        );
    }
    assert!(fs::metadata(dir.path().join(SOCKET)).is_ok());
}

/// The kubelet restarts while the plugin still has the old stream, as it seems to a plugin that is slow.
fn a_new_kubelet_next_to_the_old_one() {
    let (dir, old, _plugin) = registered();
    let new = FakeKubelet::start(dir.path());
    new.wait("a registration", AT_ONCE, is_live);
    old.wait("the end of the old stream", SOON, |state| {
        state.streams(GPU) == 0
    });
    new.stays("only one registration", A_WHILE, |state| {
        is_live(state) && state.registrations(GPU) == 1
    });
}

/// touch(1), chmod(1) and restorecon(8) change the times of a socket, and not whose socket it is.
fn a_changed_socket_is_no_new_kubelet() {
    let (dir, kubelet, _plugin) = registered();
    let socket = dir.path().join("device-plugins/kubelet.sock");
    for round in 0..6 {
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o660 + round % 2)).unwrap();
        assert!(
            std::process::Command::new("touch")
                .arg(&socket)
                .status()
                .unwrap()
                .success()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    kubelet.stays("only one registration", A_WHILE, |state| {
        is_live(state) && state.registrations(GPU) == 1
    });
}

fn a_cut_stream_is_registered_again() {
    let (_dir, kubelet, _plugin) = registered();
    for round in 2..6 {
        kubelet.cut(GPU);
        kubelet.wait("the end", SOON, |state| state.count(is_end) == round - 1);
        kubelet.wait("a registration", SOON, |state| {
            is_live(state) && state.registrations(GPU) == round
        });
    }
    kubelet.stays("only one stream", A_WHILE, |state| {
        is_live(state) && state.registrations(GPU) == 5
    });
}

fn a_deleted_socket_is_created_again() {
    let (dir, kubelet, _plugin) = registered();
    let path = dir.path().join(SOCKET);
    fs::remove_file(&path).unwrap();
    let start = Instant::now();
    while UnixStream::connect(&path).is_err() {
        assert!(start.elapsed() < SOON);
        std::thread::sleep(Duration::from_millis(5));
    }
    // The stream was not cut for that.
    kubelet.stays("the stream", A_WHILE, |state| {
        is_live(state) && state.registrations(GPU) == 1
    });
    let ids = strings(&["GPU-1"]);
    assert!(kubelet.allocate(GPU, &[&ids]).is_ok());
    // The new socket serves.
    kubelet.cut(GPU);
    kubelet.wait("a registration", SOON, |state| {
        is_live(state) && state.registrations(GPU) == 2
    });
}

/// Renaming the directory creates no event for a watch of the old one.
fn missed_events_do_not_matter() {
    let (dir, kubelet, _plugin) = registered();
    drop(kubelet);
    fs::rename(dir.path().join("device-plugins"), dir.path().join("old")).unwrap();
    let kubelet = FakeKubelet::start(dir.path());
    kubelet.wait("a registration", SOON, is_live);
}

fn a_failed_attempt_is_repeated() {
    let dir = scratch();
    let kubelet = FakeKubelet::start_with(
        dir.path(),
        State {
            refuses: 3,
            ..State::default()
        },
    );
    let plugin = Plugin::start(dir.path(), two_gpus());
    kubelet.wait("a registration", SOON, is_live);
    assert_eq!(kubelet.state().registrations(GPU), 1);
    // The same error is logged once.
    let events = plugin.events.lock().unwrap();
    let failed = events
        .iter()
        .filter(|event| matches!(event, kubelet::Event::Failed(..)))
        .collect::<Vec<_>>();
    let text = "cannot register \"nvidia.com/gpu\": the kubelet refused: the test refuses";
    assert_eq!(
        failed.iter().map(ToString::to_string).collect::<Vec<_>>(),
        [text]
    );
}

fn the_directory_may_come_later() {
    let dir = scratch();
    let plugin = Plugin::start(&dir.path().join("kubelet"), two_gpus());
    plugin.wait("a reason", SOON, |registration| {
        registration
            .error
            .as_ref()
            .is_some_and(|error| error.contains("does not exist, waiting for the kubelet"))
    });
    let kubelet = FakeKubelet::start(&dir.path().join("kubelet"));
    kubelet.wait("a registration", SOON, is_live);
    assert_eq!(plugin.registration(GPU).error, None);
}

fn a_kubelet_that_hangs_is_left_for_its_successor() {
    let dir = scratch();
    let old = FakeKubelet::start_with(
        dir.path(),
        State {
            hangs: true,
            ..State::default()
        },
    );
    let _plugin = Plugin::start(dir.path(), two_gpus());
    old.wait("Register", SOON, |state| state.count(is_call) == 1);
    let new = FakeKubelet::start(dir.path());
    new.wait("a registration", AT_ONCE, is_live);
}

fn a_kubelet_that_hangs_is_asked_again() {
    let dir = scratch();
    let kubelet = FakeKubelet::start_with(
        dir.path(),
        State {
            hangs: true,
            ..State::default()
        },
    );
    let plugin = Plugin::start(dir.path(), two_gpus());
    let error = "the kubelet did not answer within 15 s";
    plugin.wait("the deadline", SOON + Duration::from_secs(15), |state| {
        state.error.as_deref() == Some(error)
    });
    assert_eq!(
        kubelet
            .state()
            .count(|event| matches!(event, Event::Called { .. })),
        1
    );
    kubelet.state().hangs = false;
    kubelet.wait("a registration", SOON, is_live);
}

/// The kubelet executes the first call after its deadline, when it has executed the second one.
fn a_kubelet_that_is_late_does_not_have_two_streams() {
    let dir = scratch();
    let kubelet = FakeKubelet::start_with(
        dir.path(),
        State {
            delay: Duration::from_secs(18),
            ..State::default()
        },
    );
    let _plugin = Plugin::start(dir.path(), two_gpus());
    kubelet.wait("the first call", SOON, |state| state.count(is_call) == 1);
    kubelet.state().delay = Duration::ZERO;
    let late = Duration::from_secs(18) + SOON;
    kubelet.wait("the second call", late, |state| {
        state.count(is_call) == 2 && is_live(state)
    });
    kubelet.wait("the first call", late, |state| state.count(is_end) == 2);
    kubelet.wait("a registration", SOON, |state| {
        is_live(state) && state.count(is_call) == 3
    });
    kubelet.stays("only one stream", A_WHILE, is_live);
}

fn is_call(event: &Event) -> bool {
    matches!(event, Event::Called { .. })
}

fn is_end(event: &Event) -> bool {
    matches!(event, Event::Ended { .. })
}

fn a_resource_has_one_stream_whatever_happens() {
    let (dir, mut kubelet, _plugin) = registered();
    let most = |kubelet: &FakeKubelet| {
        kubelet.stays("one stream", Duration::from_millis(30), |s| {
            s.streams(GPU) <= 1
        })
    };
    for round in 0..30 {
        most(&kubelet);
        match round % 5 {
            0 | 3 if kubelet.state().streams(GPU) == 1 => kubelet.cut(GPU),
            1 => drop(fs::remove_file(dir.path().join(SOCKET))),
            2 => kubelet.state().refuses = 2,
            4 => {
                drop(kubelet);
                kubelet = FakeKubelet::start(dir.path());
            }
            _ => {}
        }
    }
    kubelet.state().refuses = 0;
    kubelet.wait("the end", SOON, is_live);
    kubelet.stays("the end", A_WHILE, is_live);
}

fn nothing_is_registered_next_to_another_plugin() {
    for (socket, resource) in [
        ("nvidia-gpu.sock", Some(GPU)),
        ("nvidiaGPU-1700000000.sock", None),
    ] {
        let dir = scratch();
        let kubelet = FakeKubelet::start(dir.path());
        let other = FakePlugin::start(dir.path(), socket, &["GPU-1"], resource);
        let plugin = Plugin::start(dir.path(), two_gpus());
        plugin.wait("a finding", SOON, |registration| {
            registration.finding.is_some()
        });
        let finding = plugin.registration(GPU).finding.unwrap();
        assert!(
            finding.kind.id() == "ONH-601" && finding.what.contains(socket),
            "{finding:?}"
        );
        let called = usize::from(resource.is_some());
        kubelet.stays("no registration", A_WHILE, |state| {
            state.count(is_call) == called
        });
        assert_eq!(plugin.events.lock().unwrap().len(), 1, "one line");
        drop(other);
        kubelet.wait("a registration", SEARCHED, is_live);
        assert_eq!(plugin.registration(GPU).finding, None);
    }
}

/// The kubelet accepts lists from both, and disconnects the other plugin when our stream ends.
fn a_plugin_that_takes_over_is_left_alone() {
    let (dir, kubelet, plugin) = registered();
    let other = FakePlugin::start(dir.path(), "nvidia-gpu.sock", &["GPU-1"], Some(GPU));
    plugin.wait("a finding", SEARCHED, |registration| {
        registration.finding.is_some()
    });
    plugin
        .list
        .send_replace(Arc::new(vec![gpus(&["GPU-1", "GPU-2", "GPU-3"])]));
    let is_other = |state: &State| state.registrations(GPU) == 2 && state.allocatable(GPU) == 1;
    kubelet.stays("the other plugin", A_WHILE, is_other);
    let answer = kubelet.allocate(GPU, &[&strings(&["GPU-1"])]).unwrap();
    assert_eq!(answer.container_responses[0].envs["PLUGIN"], "another");

    drop(other);
    kubelet.wait("a registration", SEARCHED, |state| {
        state.streams(GPU) == 1 && state.allocatable(GPU) == 3
    });
    let answer = kubelet.allocate(GPU, &[&strings(&["GPU-1"])]).unwrap();
    assert_eq!(answer.container_responses[0].envs["IDS"], "GPU-1");
}

fn a_plugin_with_other_names_of_the_gpus_ends_the_registration() {
    let (dir, kubelet, plugin) = registered();
    let _other = FakePlugin::start(
        dir.path(),
        "nvidia-h100.sock",
        &["GPU-1"],
        Some("nvidia.com/h100"),
    );
    kubelet.wait("the end", SEARCHED, |state| state.streams(GPU) == 0);
    plugin.wait("a finding", SOON, |registration| {
        registration.finding.is_some() && !registration.live
    });
    kubelet.stays("no registration", A_WHILE, |state| {
        state.registrations(GPU) == 1
    });
}

fn ids_of_another_plugin_prevent_a_registration() {
    let dir = scratch();
    let more =
        |ids: &[&str]| -> BTreeMap<String, Vec<String>> { [(GPU.to_owned(), strings(ids))].into() };
    let state = State {
        more_devices: more(&["GPU-1::3", "nvidia0"]),
        ..State::default()
    };
    let kubelet = FakeKubelet::start_with(dir.path(), state);
    let plugin = Plugin::start(dir.path(), two_gpus());
    plugin.wait("a finding", SOON, |registration| {
        registration
            .finding
            .as_ref()
            .is_some_and(|finding| finding.what.contains("\"nvidia0\""))
    });
    kubelet.stays("no registration", A_WHILE, |state| {
        state.registrations(GPU) == 0
    });
    kubelet.state().more_devices = more(&["GPU-1::3"]);
    kubelet.wait("a registration", SEARCHED, is_live);
}

fn dead_sockets_are_not_plugins() {
    let dir = scratch();
    let kubelet = FakeKubelet::start(dir.path());
    let plugins = dir.path().join("device-plugins");
    drop(UnixListener::bind(plugins.join("nvidia-gpu.sock")).unwrap());
    fs::write(plugins.join("nvidia-mig.sock"), "").unwrap();
    // It accepts, and does not answer.
    let _hanging = UnixListener::bind(plugins.join("nvidia-h100.sock")).unwrap();
    let plugin = Plugin::start(dir.path(), two_gpus());
    kubelet.wait("a registration", SOON, is_live);
    assert_eq!(plugin.registration(GPU).finding, None);
}

/// Its socket is not taken away from a process that serves it.
fn a_second_process_does_not_interfere() {
    let (dir, kubelet, first) = registered();
    let second = Plugin::start(dir.path(), two_gpus());
    second.wait("a reason", SOON, |registration| {
        registration
            .error
            .as_ref()
            .is_some_and(|error| error.contains("another process answers at our socket"))
    });
    kubelet.stays("one registration", A_WHILE, |state| {
        is_live(state) && state.registrations(GPU) == 1
    });
    drop(first);
    kubelet.wait("the second one", SOON, |state| {
        is_live(state) && state.registrations(GPU) == 2
    });
}

fn the_end_is_not_an_empty_list() {
    let (dir, kubelet, plugin) = registered();
    assert_eq!(plugin.thread.stop(), None);
    kubelet.wait("the end", SOON, |state| state.count(is_end) == 1);
    let lists = |event: &Event| matches!(event, Event::List { devices, .. } if devices.len() == 2);
    let state = kubelet.state();
    assert_eq!((state.count(lists), state.events.len()), (1, 4));
    assert!(!dir.path().join(SOCKET).exists(), "the socket was removed");
}

/// `--root-dir` moves the socket for pod resources, and not the one for device plugins. MicroK8s has both in the other directory.
fn a_kubelet_with_another_root_directory() {
    let dir = scratch();
    let (root, constant) = (dir.path().join("root"), dir.path().join("constant"));
    let dirs = KubeletDirs {
        plugins: vec![root.join("device-plugins"), constant.join("device-plugins")],
        pod_resources: root.join("pod-resources/kubelet.sock"),
    };
    std::fs::create_dir_all(&dirs.plugins[1]).unwrap();
    let plugin = Plugin::start_in(dirs.clone(), two_gpus());
    let missing = |part: &str| {
        let start = Instant::now();
        loop {
            let events = plugin.events.lock().unwrap().clone();
            let mut missing = events.iter().map(ToString::to_string);
            if missing
                .any(|event| event.starts_with("cannot find the kubelet: ") && event.contains(part))
            {
                return;
            }
            assert!(start.elapsed() < SOON, "{part}: {events:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    missing(
        "constant/device-plugins/kubelet.sock\" do not exist: the kubelet does not run, or \"kubelet-dir\"",
    );
    let kubelet = FakeKubelet::start(&constant);
    plugin.wait("registered", SOON, |state| state.live);
    assert!(dirs.plugins[1].join("oci-nvidia-gpu.sock").exists());
    missing("root/pod-resources/kubelet.sock\" does not exist");
    drop(kubelet);
    std::fs::remove_file(dirs.plugins[1].join("kubelet.sock")).unwrap();
    let _kubelet = FakeKubelet::start(&root);
    plugin.wait("registered in the other directory", SOON, |state| {
        state.live && dirs.plugins[0].join("oci-nvidia-gpu.sock").exists()
    });
    assert_eq!(dirs.missing(), None);
}

fn a_long_path_is_an_error() {
    let dir = scratch();
    let long = dir.path().join("d".repeat(90));
    let error = Plugin::start(&long, two_gpus()).thread.join().unwrap();
    assert!(error.contains("the limit is 107"), "{error}");
}

fn each_resource_has_a_socket_of_its_own() {
    let dir = scratch();
    let kubelet = FakeKubelet::start(dir.path());
    let resources = [
        "example.com/gpu",
        GPU,
        &format!("nvidia.com/{}", "x".repeat(90)),
    ];
    let resource = |name: &&str| Resource {
        name: (*name).to_owned(),
        devices: vec![device("GPU-1", None, None)],
    };
    let plugin = Plugin::start(dir.path(), resources.iter().map(resource).collect());
    kubelet.wait("the first", SOON, |state| {
        state.streams("example.com/gpu") == 1
    });
    let error = |name: &str| plugin.registration(name).error.unwrap();
    assert!(
        error(GPU).contains("belongs to \"example.com/gpu\""),
        "{}",
        error(GPU)
    );
    assert!(
        error(resources[2]).contains("the limit is 107"),
        "{}",
        error(resources[2])
    );
}

/// Frames of HTTP/2 from the server: type, stream and payload, until one of the stream is an end, or the time is over.
fn answers(path: &Path, request: &[u8], streams: usize) -> Vec<(u8, u32, Vec<u8>)> {
    let mut socket = UnixStream::connect(path).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket.write_all(request).unwrap();
    let mut frames: Vec<(u8, u32, Vec<u8>)> = Vec::new();
    let (mut header, mut ended) = ([0; 9], 0);
    while ended < streams {
        socket.read_exact(&mut header).unwrap();
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        socket.read_exact(&mut payload).unwrap();
        let stream = u32::from_be_bytes(header[5..].try_into().unwrap());
        let is_end =
            header[3] == 3 || (stream != 0 && matches!(header[3], 0 | 1) && header[4] & 1 == 1);
        ended += usize::from(is_end);
        frames.push((header[3], stream, payload));
    }
    frames
}

/// The bytes that grpc-go 1.83 sends for two calls of GetDevicePluginOptions if it dials like the device manager of Kubernetes 1.26 and
/// newer, with `localhost` as `:authority`. Older kubelets send the path of the socket, which is not a host, and which h2 rejects.
const KUBELET: &[u8] = include_bytes!("fixtures/grpc-go-localhost.http2");

fn the_client_of_the_kubelet_is_answered() {
    let (dir, _kubelet, _plugin) = registered();
    let frames = answers(&dir.path().join(SOCKET), KUBELET, 2);
    let bodies: Vec<_> = frames
        .iter()
        .filter(|(kind, _, body)| *kind == 0 && !body.is_empty())
        .collect();
    assert_eq!(bodies.len(), 2, "{frames:?}");
    // Options with preferred allocation: a message of two bytes.
    assert!(
        bodies
            .iter()
            .all(|(_, _, body)| *body == [0, 0, 0, 0, 2, 0x10, 1]),
        "{frames:?}"
    );
}

fn hostile_bytes_do_no_harm() {
    let (dir, kubelet, _plugin) = registered();
    let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let huge_frame = [
        preface,
        &[0xff, 0xff, 0xff, 1, 4, 0, 0, 0, 1],
        &[0x41; 100_000],
    ]
    .concat();
    let many_headers = [
        preface,
        &[0, 0, 3, 1, 4, 0, 0, 0, 1, 0x41, 0x01, b'%'].repeat(10_000),
    ]
    .concat();
    let unfinished = [
        preface,
        &[
            0, 0x40, 0, 1, 4, 0, 0, 0, 1, 0x41, 0x7f, 0xff, 0xff, 0xff, 0xff,
        ],
    ]
    .concat();
    let inputs: [&[u8]; 6] = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 65536],
        &huge_frame,
        &many_headers,
        &unfinished,
    ];
    let mut open = Vec::new();
    for input in inputs {
        let mut socket = UnixStream::connect(dir.path().join(SOCKET)).unwrap();
        socket
            .set_write_timeout(Some(Duration::from_secs(1)))
            .unwrap();
        // The server may close the connection earlier.
        let _ = socket.write_all(input);
        open.push(socket);
    }
    let ids = strings(&["GPU-1"]);
    assert!(kubelet.allocate(GPU, &[&ids]).is_ok());
    kubelet.stays("the stream", Duration::from_millis(300), |state| {
        is_live(state) && state.registrations(GPU) == 1
    });
    drop(open);
}

/// A tool that watches the list is served, but it is not the kubelet.
fn the_stream_of_a_tool_does_not_count() {
    let (dir, kubelet, _plugin) = registered();
    let path: PathBuf = dir.path().join(SOCKET);
    let (tool, _) = Thread::serve(async move || {
        let channel = fake_kubelet::dial(path).await.unwrap();
        let mut plugin = DevicePluginClient::new(channel);
        let stream = plugin.list_and_watch(Empty {}).await.unwrap();
        let mut stream = stream.into_inner();
        let list = stream.message().await.unwrap().unwrap();
        assert_eq!(list.devices.len(), 2);
        tokio::spawn(async move {
            std::future::pending::<()>().await;
            drop((plugin, stream));
        });
    });
    kubelet.cut(GPU);
    kubelet.wait("a registration", SOON, |state| {
        is_live(state) && state.registrations(GPU) == 2
    });
    drop(tool);
    kubelet.stays("the stream", A_WHILE, |state| {
        is_live(state) && state.registrations(GPU) == 2
    });
}
