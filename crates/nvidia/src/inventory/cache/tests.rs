use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use base::report::failure;
use base::sys::file_id::{FileId, FileTime};
use findings::catalog;

use super::*;
use crate::inventory::FailedGpu;
use crate::inventory::cap_files::AtQuery;
use crate::inventory::caps::MigCap;
use crate::inventory::select::tests::inventory;

/// Two whole GPUs.
fn whole() -> Inventory {
    let mut whole = Inventory {
        driver_version: "535.1".into(),
        ..inventory()
    };
    whole.gpus.truncate(2);
    whole
}

fn with_failed() -> Inventory {
    let mut inventory = whole();
    let gpu = inventory.gpus.remove(1);
    let why = "GPU is lost".to_owned();
    let (index, uuid, bus_id) = (Some(1), Some(gpu.uuid), Some(gpu.bus_id));
    inventory.failed.push(FailedGpu {
        index,
        uuid,
        bus_id,
        why,
        ..FailedGpu::default()
    });
    inventory
}

fn fingerprint(host: &str, is_whole: bool) -> Fingerprint {
    Fingerprint {
        host: host.to_owned(),
        is_whole,
        ..Fingerprint::default()
    }
}

fn look(state: &str) -> KernelView {
    let gpu = |gpu: &crate::inventory::Gpu| KernelGpu {
        dir: gpu.bus_id.in_sysfs().into(),
        bus_id: gpu.bus_id,
        minor: Some(gpu.minor),
        uuid: Some(gpu.uuid.clone()),
        ..KernelGpu::default()
    };
    KernelView {
        scope: Scope::All,
        version: "535.1".into(),
        gpus: whole().gpus.iter().map(gpu).collect(),
        known_gpus: Vec::new(),
        nodes: BTreeMap::new(),
        instances: Vec::new(),
        caps: Vec::new(),
        missing_caps: Vec::new(),
        state: (!state.is_empty()).then(|| fingerprint(state, true)),
        uptime: 1000,
    }
}

/// A run-time directory, and how often NVML was asked.
struct Scene {
    base: tempfile::TempDir,
    asked: AtomicU64,
}

impl Scene {
    fn new() -> Self {
        Self {
            base: tempfile::tempdir().unwrap(),
            asked: AtomicU64::new(0),
        }
    }

    fn cache(&self, question: &str, patience: Duration) -> Cache {
        Cache::at(
            RunDir::open_in(self.base.path()).unwrap(),
            "/",
            question.to_owned(),
            patience,
        )
    }

    fn ask(&self, answer: &Inventory, takes: Duration) -> Result<gather::NvmlAnswer> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(takes);
        Ok(gather::NvmlAnswer {
            mig: AtQuery::default(),
            inventory: answer.clone(),
            gave_up: false,
        })
    }

    /// One start, and how often NVML was asked so far.
    fn start(&self, question: &str, state: &str, answer: &Inventory) -> (Inventory, u64) {
        let cache = self.cache(question, Duration::from_secs(9));
        let got = cache
            .get(None, &|_, _| look(state), &|| (), &|_| {
                self.ask(answer, Duration::ZERO)
            })
            .unwrap()
            .0;
        (got, self.asked.load(Ordering::SeqCst))
    }

    fn file(&self) -> PathBuf {
        self.base.path().join("oci-nvidia-hook/inventory")
    }
}

#[test]
fn an_answer_is_kept_as_long_as_the_host_is_the_same() {
    let scene = Scene::new();
    for (question, state, asked) in [
        ("q", "a", 1),
        ("q", "a", 1),
        ("q", "b", 2),
        ("q", "b", 2),
        ("q", "a", 3),
        ("r", "a", 4),
        ("r", "a", 4),
    ] {
        assert_eq!(
            scene.start(question, state, &whole()),
            (whole(), asked),
            "{question} {state}"
        );
    }
    let mode = scene.file().metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    let cache = scene.cache("r", Duration::from_secs(9));
    cache
        .renew(&|_, _| look("a"), &|_| scene.ask(&whole(), Duration::ZERO))
        .unwrap();
    assert_eq!(
        scene.start("r", "a", &whole()),
        (whole(), 5),
        "asked afresh, and known from then on"
    );
}

#[test]
fn what_may_not_be_kept_is_asked_again() {
    let other_driver = Inventory {
        driver_version: "1".into(),
        ..whole()
    };
    for (state, answer) in [("", whole()), ("a", with_failed()), ("a", other_driver)] {
        let scene = Scene::new();
        for asked in 1..4 {
            assert_eq!(scene.start("q", state, &answer), (answer.clone(), asked));
        }
        // What was in the way is gone.
        assert_eq!(scene.start("q", "a", &whole()), (whole(), 4));
        assert_eq!(scene.start("q", "a", &with_failed()), (whole(), 4));
        assert_eq!(
            scene.start("q", "", &with_failed()),
            (with_failed(), 5),
            "no longer confirmed"
        );
    }
}

#[test]
fn a_file_that_is_anything_else_is_replaced() {
    let scene = Scene::new();
    scene.start("q", "a", &whole());
    let good = std::fs::read(scene.file()).unwrap();
    let header = stored::header(KIND);
    let damaged = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    let older = String::from_utf8(good.clone())
        .unwrap()
        .replacen(" inventory 7 ", " inventory 0 ", 1)
        .into_bytes();
    let unknown = String::from_utf8(good[header.len() + 17..].to_vec())
        .unwrap()
        .replacen('{', "{\"more\":1,", 1);
    let unknown = format!(
        "{header}{:016x}\n{unknown}",
        stored::checksum(unknown.as_bytes())
    )
    .into_bytes();
    let mut files = vec![
        Vec::new(),
        b"nonsense".to_vec(),
        older,
        unknown,
        vec![b' '; 2 << 20],
    ];
    files.extend(
        [
            0,
            header.len(),
            header.len() + 16,
            header.len() + 17,
            good.len() / 2,
        ]
        .map(damaged),
    );
    files.extend([10, header.len() + 3, good.len() - 1].map(|end| good[..end].to_vec()));
    for (number, bytes) in files.into_iter().enumerate() {
        std::fs::write(scene.file(), &bytes).unwrap();
        let before = scene.asked.load(Ordering::SeqCst);
        assert_eq!(
            scene.start("q", "a", &whole()),
            (whole(), before + 1),
            "{number}"
        );
        assert_eq!(
            scene.start("q", "a", &whole()),
            (whole(), before + 1),
            "{number}"
        );
    }
}

#[test]
fn what_others_could_have_written_is_replaced() {
    let scene = Scene::new();
    scene.start("q", "a", &whole());
    let elsewhere = scene.base.path().join("elsewhere");
    std::fs::copy(scene.file(), &elsewhere).unwrap();
    let put: [(&str, &dyn Fn()); 4] = [
        ("a link", &|| symlink(&elsewhere, scene.file()).unwrap()),
        ("a hard link", &|| {
            std::fs::hard_link(&elsewhere, scene.file()).unwrap()
        }),
        ("a fifo", &|| {
            nix::unistd::mkfifo(&scene.file(), nix::sys::stat::Mode::S_IRUSR).unwrap()
        }),
        ("writable", &|| {
            std::fs::copy(&elsewhere, scene.file()).unwrap();
            std::fs::set_permissions(scene.file(), PermissionsExt::from_mode(0o622)).unwrap();
        }),
    ];
    for (what, put) in put {
        std::fs::remove_file(scene.file()).unwrap();
        put();
        let before = scene.asked.load(Ordering::SeqCst);
        assert_eq!(
            scene.start("q", "a", &whole()),
            (whole(), before + 1),
            "{what}"
        );
        assert!(scene.file().symlink_metadata().unwrap().is_file(), "{what}");
    }
}

/// So many threads at once; how often NVML was asked.
fn at_once(answer: &Inventory) -> u64 {
    let scene = Scene::new();
    std::thread::scope(|scope| {
        for _ in 0..100 {
            scope.spawn(|| {
                let cache = scene.cache("q", Duration::from_secs(30));
                let got = cache.get(None, &|_, _| look("a"), &|| (), &|_| {
                    scene.ask(answer, Duration::from_millis(100))
                });
                assert_eq!(got.unwrap().0, *answer);
            });
        }
    });
    scene.asked.load(Ordering::SeqCst)
}

#[test]
fn of_a_hundred_one_asks() {
    assert_eq!(at_once(&whole()), 1);
    // Those who come while one is asked need one more; so do those who come while that one is.
    let asked = at_once(&with_failed());
    assert!((1..=10).contains(&asked), "{asked}");
}

#[test]
fn what_was_asked_before_is_not_taken_for_new() {
    let scene = Scene::new();
    assert_eq!(scene.start("q", "a", &with_failed()).1, 1);
    let slow = scene.cache("q", Duration::from_secs(30));
    std::thread::scope(|scope| {
        let takes = Duration::from_millis(300);
        let (slow, scene) = (&slow, &scene);
        let asking = scope.spawn(move || {
            slow.get(None, &|_, _| look("a"), &|| (), &|_| {
                scene.ask(&with_failed(), takes)
            })
        });
        std::thread::sleep(takes / 4);
        assert_eq!(
            scene.start("q", "a", &whole()),
            (whole(), 3),
            "the GPU is well again"
        );
        asking.join().unwrap().unwrap();
    });
}

#[test]
fn without_a_lock_everybody_asks() {
    let scene = Scene::new();
    scene.start("q", "a", &whole());
    // A lock that is no file of ours.
    let lock = scene.base.path().join("oci-nvidia-hook/inventory.lock");
    std::fs::remove_file(&lock).unwrap();
    symlink("/dev/null", &lock).unwrap();
    assert_eq!(scene.start("q", "b", &whole()), (whole(), 2));
}

#[test]
fn waiting_for_the_lock_takes_time_off() {
    let scene = Scene::new();
    let held = RunDir::open_in(scene.base.path())
        .unwrap()
        .lock("inventory.lock", Duration::ZERO)
        .unwrap()
        .unwrap();
    let cache = scene.cache("q", Duration::from_millis(500));
    type Way = fn(&Cache, Look<'_>, Ask<'_>) -> Result<(Inventory, KernelView)>;
    let get: Way = |cache, look, ask| cache.get(None, look, &|| (), ask);
    let left = |end: Instant| end.saturating_duration_since(Instant::now());
    for answer in [get, Cache::renew] {
        let refuse = |end: Instant| anyhow::bail!("{} ms left", left(end).as_millis());
        let start = Instant::now();
        let error = answer(&cache, &|_, _| look("a"), &refuse).unwrap_err();
        assert_eq!(error.to_string(), "0 ms left");
        assert!(start.elapsed() >= Duration::from_millis(500));
    }
    // The holder goes while there is time left.
    let cache = scene.cache("q", Duration::from_secs(60));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            cache.get(None, &|_, _| look("a"), &|| (), &|end| {
                assert!(left(end) < Duration::from_millis(59_800), "{:?}", left(end));
                scene.ask(&whole(), Duration::ZERO)
            })
        });
        std::thread::sleep(Duration::from_millis(300));
        drop(held);
        waiter.join().unwrap().unwrap();
    });
}

#[test]
fn an_error_is_shared_with_those_who_waited() {
    let scene = Scene::new();
    let start = Instant::now();
    let ask = |_| -> Result<gather::NvmlAnswer> {
        scene.asked.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(700));
        Err(failure(
            &catalog::NVML_TIMEOUT,
            "NVML did not answer",
            "wait",
        ))
    };
    let one = || {
        scene
            .cache("q", Duration::from_secs(60))
            .get(None, &|_, _| look("a"), &|| (), &ask)
            .unwrap_err()
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(one);
        std::thread::sleep(Duration::from_millis(200));
        let waiters: Vec<_> = (0..10).map(|_| scope.spawn(one)).collect();
        for error in waiters
            .into_iter()
            .chain([first])
            .map(|waiter| waiter.join().unwrap())
        {
            assert_eq!(
                base::report::render(&error),
                "NVML did not answer (ONH-016)\nhint: wait"
            );
        }
    });
    // Under load one of them may have come late.
    assert!(
        scene.asked.load(Ordering::SeqCst) <= 3,
        "{:?} {:?}",
        scene.asked,
        start.elapsed()
    );
    let asked = scene.asked.load(Ordering::SeqCst);
    assert_eq!(
        scene.start("q", "a", &whole()),
        (whole(), asked + 1),
        "who comes later asks"
    );
}

#[test]
fn an_answer_without_a_gpu_that_hangs_is_kept_briefly() {
    let scene = Scene::new();
    let cache = scene.cache("q", Duration::from_secs(9));
    let ask = |_| {
        let answer = scene.ask(&with_failed(), Duration::ZERO)?;
        Ok(gather::NvmlAnswer {
            gave_up: true,
            ..answer
        })
    };
    let asked_at = |uptime: u64, text: &str, is_whole: bool| {
        let state = fingerprint(text, is_whole);
        let look = |_: &[KnownGpu], _| KernelView {
            uptime,
            state: Some(state.clone()),
            ..look("a")
        };
        assert_eq!(
            cache.get(None, &look, &|| (), &ask).unwrap().0,
            with_failed()
        );
        scene.asked.load(Ordering::SeqCst)
    };
    assert_eq!(asked_at(1000, "a", true), 1);
    assert_eq!(
        [asked_at(1001, "a", true), asked_at(1059, "a", false)],
        [1, 1]
    );
    assert_eq!(asked_at(1060, "a", true), 2, "a minute later");
    assert_eq!(
        [asked_at(1061, "b", true), asked_at(1062, "b", true)],
        [3, 3],
        "another host"
    );
    assert_eq!(asked_at(7, "b", true), 4, "not in the past");
    let without_state = |_: &[KnownGpu], _| KernelView {
        state: None,
        ..look("a")
    };
    for asked in 5..7 {
        cache.get(None, &without_state, &|| (), &ask).unwrap();
        assert_eq!(scene.asked.load(Ordering::SeqCst), asked);
    }
}

/// The answer could belong to the instances before the change, or to those after it.
#[test]
fn an_answer_is_not_kept_if_instances_changed_in_the_meantime() {
    let instance = Instance {
        cap: MigCap::GpuInstance(2, 5),
        entry: Some(FileId {
            changed: FileTime {
                seconds: 100,
                nanoseconds: 0,
            },
            ..FileId::default()
        }),
    };
    let instances = [
        instance,
        Instance {
            cap: MigCap::ComputeInstance(2, 5, 0),
            ..instance
        },
    ];
    let mut answer = Inventory {
        driver_version: "535.1".into(),
        ..inventory()
    };
    answer.gpus[2].mig_devices.truncate(1);
    let view = |_: &[KnownGpu], _| {
        let mut view = look("a");
        let more = answer.gpus[2].clone();
        view.gpus.push(KernelGpu {
            dir: more.bus_id.in_sysfs().into(),
            bus_id: more.bus_id,
            minor: Some(more.minor),
            uuid: Some(more.uuid),
            ..KernelGpu::default()
        });
        view.instances = instances.to_vec();
        view
    };
    for (before, time, asked) in [
        (instances.to_vec(), 102, 1),
        (instances.to_vec(), 101, 2),
        (Vec::new(), 102, 2),
    ] {
        let scene = Scene::new();
        let cache = scene.cache("q", Duration::from_secs(9));
        for _ in 0..2 {
            let ask = |_| {
                let mig = AtQuery {
                    instances: before.clone(),
                    time: SystemTime::UNIX_EPOCH + Duration::from_secs(time),
                };
                let answer = scene.ask(&answer, Duration::ZERO)?;
                Ok(gather::NvmlAnswer { mig, ..answer })
            };
            assert_eq!(cache.get(None, &view, &|| (), &ask).unwrap().0, answer);
        }
        assert_eq!(
            scene.asked.load(Ordering::SeqCst),
            asked,
            "{before:?} {time}"
        );
    }
}

/// A host with two whole GPUs and two in MIG mode.
#[derive(Clone)]
struct Divided {
    boot: &'static str,
    gpus: Vec<KernelGpu>,
    /// Of each GPU in MIG mode: the inode number of the entries of its instances
    entries: BTreeMap<u32, u64>,
    /// GPUs that do not respond on the bus
    lost: Vec<u32>,
}

impl Divided {
    fn inventory() -> Inventory {
        let mut divided = Inventory {
            driver_version: "535.1".into(),
            ..inventory()
        };
        let mut other = divided.gpus[2].clone();
        (other.index, other.minor, other.uuid) = (3, 3, "GPU-other".into());
        other.bus_id.bus += 1;
        for mig in &mut other.mig_devices {
            mig.uuid.push_str("-other");
        }
        divided.gpus.push(other);
        divided
    }

    fn new() -> Self {
        let gpu = |gpu: Gpu| KernelGpu {
            bus_id: gpu.bus_id,
            minor: Some(gpu.minor),
            uuid: Some(gpu.uuid),
            ..KernelGpu::default()
        };
        Self {
            boot: "b",
            gpus: Self::inventory().gpus.into_iter().map(gpu).collect(),
            entries: BTreeMap::from([(2, 20), (3, 30)]),
            lost: Vec::new(),
        }
    }

    fn view(&self, scope: Scope) -> KernelView {
        let (mut gpus, mut instances) = (BTreeMap::new(), Vec::new());
        for minor in (0..4).filter(|minor| scope.has(*minor)) {
            let responds = !self.lost.contains(&minor);
            gpus.insert(minor, format!("{responds} {:?}", self.entries.get(&minor)));
            if self.entries.contains_key(&minor) {
                for instance in [5, 7] {
                    let caps = [
                        MigCap::GpuInstance(minor, instance),
                        MigCap::ComputeInstance(minor, instance, 0),
                    ];
                    let entry = Some(FileId::default());
                    instances.extend(caps.map(|cap| Instance { cap, entry }));
                }
            }
        }
        let mut host = self.boot.to_owned();
        for gpu in &self.gpus {
            host.push_str(&gpu.bus_id.to_string());
        }
        let is_whole = !self.lost.iter().any(|minor| scope.has(*minor));
        KernelView {
            version: "535.1".into(),
            gpus: self.gpus.clone(),
            instances,
            state: Some(Fingerprint {
                host,
                gpus,
                is_whole,
            }),
            scope,
            ..KernelView::default()
        }
    }

    fn answer(&self) -> Result<gather::NvmlAnswer> {
        Ok(gather::NvmlAnswer {
            mig: AtQuery {
                instances: self.view(Scope::All).instances,
                time: SystemTime::now(),
            },
            inventory: Self::inventory(),
            gave_up: false,
        })
    }
}

#[test]
fn a_request_for_named_devices_does_not_depend_on_other_gpus() {
    type Change = fn(&mut Divided);
    let second = &Divided::inventory().gpus[2].mig_devices[0].uuid;
    let changes: [(&str, Change, &[&str], &[&str]); 7] = [
        ("nothing", |_| (), &["all", "0", "2:0", second, "3:1"], &[]),
        (
            "MIG devices of GPU 3 were created again",
            |host| _ = host.entries.insert(3, 31),
            &["0", "2:0", second, "0,2:1"],
            &["all", "3", "3:0", "0,3:1"],
        ),
        (
            "GPU 3 left MIG mode",
            |host| _ = host.entries.remove(&3),
            &["0", "2:0", second],
            &["all", "3", "3:0"],
        ),
        (
            "GPU 1 fell off the bus",
            |host| host.lost.push(1),
            &["0", "2:0", second],
            &["all", "1", "0,1"],
        ),
        (
            "GPU 0 left, so that all indices move",
            |host| drop(host.gpus.remove(0)),
            &[],
            &["all", "0", "1", "2:0", second],
        ),
        (
            "another GPU has the place of GPU 0",
            |host| host.gpus[0].uuid = Some("GPU-new".into()),
            &[],
            &["all", "0", "1", "2:0", second],
        ),
        (
            "another boot",
            |host| host.boot = "c",
            &[],
            &["all", "0", "2:0", second],
        ),
    ];
    for (what, change, same, other) in changes {
        for (request, is_asked) in same
            .iter()
            .map(|name| (name, false))
            .chain(other.iter().map(|name| (name, true)))
        {
            let (scene, host) = (Scene::new(), Divided::new());
            let cache = scene.cache("q", Duration::from_secs(9));
            let names: Vec<_> = request.split(',').map(str::to_owned).collect();
            let mut changed = host.clone();
            change(&mut changed);
            for (host, is_asked) in [(&host, true), (&host, false), (&changed, is_asked)] {
                let asked = std::cell::Cell::new(false);
                let ask = |_| {
                    asked.set(true);
                    host.answer()
                };
                let view = |_: &[KnownGpu], scope| host.view(scope);
                cache.get(Some(&names), &view, &|| (), &ask).unwrap();
                assert_eq!(asked.get(), is_asked, "{what}: {request}");
            }
        }
    }
}

/// A name that the cached inventory lacks can belong to a new MIG device of any GPU.
#[test]
fn an_unknown_name_depends_on_all_gpus() {
    let (scene, mut host) = (Scene::new(), Divided::new());
    let cache = scene.cache("q", Duration::from_secs(9));
    let names = ["2:0".to_owned(), "MIG-new".to_owned()];
    let mut asked = Vec::new();
    for entry in [30, 30, 31] {
        host.entries.insert(3, entry);
        let is_asked = std::cell::Cell::new(false);
        let ask = |_| {
            is_asked.set(true);
            host.answer()
        };
        let view = |_: &[KnownGpu], scope| host.view(scope);
        cache.get(Some(&names), &view, &|| (), &ask).unwrap();
        asked.push(is_asked.get());
    }
    assert_eq!(asked, [true, false, true]);
}

#[test]
fn what_nvml_cannot_say_is_an_error_each_time() {
    let scene = Scene::new();
    for _ in 0..2 {
        let cache = scene.cache("q", Duration::from_secs(9));
        assert!(
            cache
                .get(None, &|_, _| look("a"), &|| (), &|_| anyhow::bail!("no"))
                .is_err()
        );
    }
    assert!(!scene.file().try_exists().unwrap());
}

#[test]
fn an_inventory_that_a_newer_one_contradicts_is_invalidated() {
    type Change = fn(&mut Inventory);
    let changes: [(&str, Change, bool); 6] = [
        ("the same", |_| (), true),
        (
            "in another order, with other details",
            |newer| {
                newer.gpus.reverse();
                newer.gpus[0].model = "H200".into();
            },
            true,
        ),
        ("one less", |newer| newer.gpus.truncate(1), false),
        (
            "one more",
            |newer| newer.gpus.push(inventory().gpus[2].clone()),
            false,
        ),
        (
            "another one",
            |newer| newer.gpus[1].uuid = "GPU-new".into(),
            false,
        ),
        // The kernel does not show it without instances.
        ("MIG mode", |newer| newer.gpus[1].mig_enabled = true, false),
    ];
    for (what, change, is_kept) in changes {
        let scene = Scene::new();
        scene.start("q", "a", &whole());
        let mut newer = whole();
        change(&mut newer);
        scene
            .cache("q", Duration::from_secs(9))
            .invalidate_unless(Some(&newer));
        assert_eq!(
            scene.start("q", "a", &whole()).1,
            if is_kept { 1 } else { 2 },
            "{what}"
        );
    }
    let scene = Scene::new();
    scene
        .cache("q", Duration::from_secs(9))
        .invalidate_unless(None);
    assert!(
        !scene.file().try_exists().unwrap(),
        "there is nothing to invalidate"
    );
    scene.start("q", "a", &whole());
    scene
        .cache("q", Duration::from_secs(9))
        .invalidate_unless(None);
    assert_eq!(scene.start("q", "a", &whole()).1, 2, "NVML failed");
}
