use nvidia_host::inventory::{BusId, FailedGpu, Gpu as Known, Inventory};

use super::*;

const A: &str = "GPU-a";
const B: &str = "GPU-b";

/// A step of a scenario.
enum Step {
    Xid(u64),
    Happens(EventKind),
    /// The GPU answers, and the driver supports field 230
    Good,
    /// The GPU answers, and the driver does not support field 230
    GoodOld,
    Bad(&'static str),
    Recommends(Recovery),
    RemapFailed,
    Ecc(u64),
    NodeMissing,
    Silent,
    AllSilent,
    Absent,
    LetGo,
    Snapshot,
    SnapshotFailed(bool),
    Clear,
    /// Nothing happens
    Quiet,
}

fn sample(gpu: &str) -> Sample {
    Sample {
        gpu: gpu.to_owned(),
        recovery: Some(Recovery::None),
        remap_failed: Some(false),
        uncorrectable_ecc: Some(3),
        ..Sample::default()
    }
}

fn snapshot(failed: Option<bool>) -> Update {
    let gpu = |uuid: &str, bus: u32| Known {
        index: bus,
        minor: bus,
        uuid: uuid.to_owned(),
        bus_id: BusId {
            domain: 0,
            bus,
            device: 0,
        },
        model: String::new(),
        compute_capability: String::new(),
        brand: String::new(),
        mig_enabled: false,
        mig_devices: Vec::new(),
        unlisted_mig: Vec::new(),
    };
    let mut inventory = Inventory {
        gpus: vec![gpu(A, 1), gpu(B, 2)],
        ..Inventory::default()
    };
    if let Some(node_missing) = failed {
        let gone = inventory.gpus.remove(0);
        let why = "GPU is lost".to_owned();
        inventory.failed.push(FailedGpu {
            uuid: Some(gone.uuid),
            why,
            node_missing,
            ..FailedGpu::default()
        });
    }
    Update::Snapshot(Box::new(Snapshot {
        inventory,
        ..Snapshot::default()
    }))
}

fn update(step: &Step) -> Option<Update> {
    let event = |kind| {
        Update::Event(GpuEvent {
            gpu: A.to_owned(),
            kind,
        })
    };
    let sample = sample(A);
    Some(match step {
        Step::Xid(code) => event(EventKind::Xid(*code)),
        Step::Happens(kind) => event(*kind),
        Step::Good => Update::Sample(sample),
        Step::GoodOld => Update::Sample(Sample {
            recovery: None,
            remap_failed: None,
            uncorrectable_ecc: None,
            ..sample
        }),
        Step::Bad(why) => Update::Sample(Sample {
            error: Some((*why).to_owned()),
            recovery: None,
            ..sample
        }),
        Step::Recommends(action) => Update::Sample(Sample {
            recovery: Some(*action),
            ..sample
        }),
        Step::RemapFailed => Update::Sample(Sample {
            remap_failed: Some(true),
            recovery: None,
            ..sample
        }),
        Step::Ecc(count) => Update::Sample(Sample {
            uncorrectable_ecc: Some(*count),
            ..sample
        }),
        Step::NodeMissing => Update::Sample(Sample {
            node_missing: true,
            ..sample
        }),
        Step::Silent => Update::Silent {
            gpu: Some(A.to_owned()),
            why: "driver does not answer".to_owned(),
        },
        Step::AllSilent => Update::Silent {
            gpu: None,
            why: "driver does not answer".to_owned(),
        },
        Step::Absent => Update::Absent("there is no driver".to_owned()),
        Step::LetGo => Update::LetGo,
        Step::Snapshot => snapshot(None),
        Step::SnapshotFailed(node_missing) => snapshot(Some(*node_missing)),
        Step::Clear | Step::Quiet => return None,
    })
}

fn policy() -> Policy {
    Policy::from(&Plugin::default())
}

/// A row: the seconds since the start, the step, and the start of the reason, or `""`.
type Row = (u64, Step, &'static str);

/// Returns the state after two healthy GPUs went through these rows.
fn play(name: &str, rows: &[Row]) -> (Health, Instant) {
    let start = Instant::now();
    let mut health = Health::new(policy(), start);
    health.apply(&snapshot(None), start);
    for gpu in [A, B] {
        health.apply(&Update::Sample(sample(gpu)), start);
        assert_eq!(health.state(gpu), GpuState::Healthy, "{name}");
    }
    for (seconds, step, expected) in rows {
        let now = start + Duration::from_secs(*seconds);
        if matches!(step, Step::Clear) {
            health.clear(A);
        }
        match update(step) {
            Some(update) => health.apply(&update, now),
            None => health.tick(now),
        }
        match health.state(A) {
            GpuState::Healthy => assert_eq!(*expected, "", "{name}, {seconds} s"),
            GpuState::Failed(GpuFailure { why, .. }, _) => {
                assert!(
                    !expected.is_empty() && why.starts_with(expected),
                    "{name}, {seconds} s: {why:?}"
                );
            }
            GpuState::Unknown(_) => {
                assert!(UNKNOWN.starts_with(expected), "{name}, {seconds} s");
                assert_ne!(*expected, "", "{name}, {seconds} s");
            }
        }
    }
    (health, start)
}

#[test]
fn each_error_ends_in_its_own_way() {
    use Step::{
        Absent, AllSilent, Bad, Clear, Ecc, Good, GoodOld, Happens, LetGo, NodeMissing, Quiet,
        Recommends, RemapFailed, Silent, SnapshotFailed, Xid,
    };
    let again = "XID 79; it failed again and again";
    let rows: &[(&str, &[Row])] = &[
        (
            "an XID lasts until the driver recommends nothing and the quiet period has passed",
            &[
                (10, Xid(79), "XID 79"),
                (
                    15,
                    Recommends(Recovery::Reset),
                    "XID 79; the driver recommends a reset",
                ),
                (100, Quiet, "XID 79"),
                (200, Recommends(Recovery::Reset), "XID 79"),
                (210, Good, "XID 79"),
                (259, Quiet, "XID 79"),
                (260, Quiet, ""),
            ],
        ),
        (
            "a good sample from before the error does not count",
            &[
                (10, Good, ""),
                (11, Xid(79), "XID 79"),
                (300, Quiet, "XID 79"),
                (301, Good, ""),
            ],
        ),
        (
            "another error restarts the quiet period",
            &[
                (10, Xid(79), "XID 79"),
                (15, Good, "XID 79"),
                (60, Xid(48), "XID 79"),
                (65, Good, "XID 79"),
                (119, Quiet, "XID 79"),
                (120, Quiet, ""),
            ],
        ),
        (
            "an ignored XID",
            &[(10, Xid(13), ""), (11, Xid(31), ""), (12, Xid(94), "")],
        ),
        (
            "unavailable",
            &[
                (
                    10,
                    Happens(EventKind::Unavailable),
                    "the driver reports that the GPU is unavailable",
                ),
                (15, Good, "the driver reports"),
                (70, Quiet, ""),
            ],
        ),
        (
            "an uncorrectable memory error, as an event",
            &[
                (
                    10,
                    Happens(EventKind::UncorrectableEcc),
                    "uncorrectable memory error",
                ),
                (12, Good, "uncorrectable"),
                (72, Good, ""),
            ],
        ),
        (
            "an uncorrectable memory error, counted",
            &[
                (5, Ecc(3), ""),
                (10, Ecc(4), "uncorrectable memory error"),
                (15, Ecc(4), "unc"),
                (70, Ecc(4), ""),
            ],
        ),
        (
            "a count that starts again",
            &[
                (5, Ecc(0), ""),
                (10, Ecc(0), ""),
                (15, Ecc(1), "uncorrectable"),
            ],
        ),
        (
            "a failed remapping",
            &[
                (10, RemapFailed, "the GPU could not replace defective rows"),
                (500, RemapFailed, "the GPU"),
                (505, Good, "the GPU"),
                (560, Quiet, ""),
            ],
        ),
        (
            "an event of the recovery action alone decides nothing",
            &[
                (10, Happens(EventKind::RecoveryAction), ""),
                (
                    10,
                    Recommends(Recovery::DrainP2p),
                    "the driver recommends that programs",
                ),
                (20, Good, "the driver recommends"),
                (70, Quiet, ""),
            ],
        ),
        (
            "a driver without field 230",
            &[
                (10, Xid(79), "XID 79"),
                (15, Bad("GPU is lost"), "XID 79; GPU is lost"),
                (20, GoodOld, "XID 79"),
                (74, Quiet, "XID 79"),
                (75, Quiet, ""),
            ],
        ),
        (
            "a lost GPU",
            &[
                (10, Bad("GPU is lost"), "GPU is lost"),
                (400, Bad("GPU is lost"), "GPU is lost"),
                (405, Good, "GPU is lost"),
                (459, Quiet, "GPU is lost"),
                (460, Quiet, ""),
            ],
        ),
        (
            "a GPU that is lost when the monitor starts",
            &[
                (10, SnapshotFailed(false), "GPU is lost"),
                (20, Step::Snapshot, "GPU is lost"),
                (21, Good, "GPU"),
                (70, Good, ""),
            ],
        ),
        (
            "a missing node has no quiet period",
            &[
                (10, NodeMissing, "its device node is missing"),
                (15, NodeMissing, "its device"),
                (20, Good, ""),
            ],
        ),
        (
            "a node that is missing when the monitor starts",
            &[
                (10, SnapshotFailed(true), "its device node is missing"),
                (15, Step::Snapshot, "its"),
                (15, Good, ""),
            ],
        ),
        (
            "a driver that hangs or crashes at a GPU",
            &[
                (10, Silent, "driver does not answer"),
                (11, Step::Snapshot, "driver does"),
                (12, Good, "driver does"),
                (70, Quiet, ""),
            ],
        ),
        (
            "a driver that hangs or crashes",
            &[
                (10, AllSilent, "driver does not answer"),
                (11, Good, "driver does"),
                (70, Quiet, ""),
            ],
        ),
        (
            "no driver, until it has reported the state of the GPU",
            &[
                (10, Absent, "there is no driver"),
                (20, Step::Snapshot, "the driver has not reported"),
                (21, Good, ""),
            ],
        ),
        (
            "a driver that is being replaced",
            &[
                (10, LetGo, "driver is being replaced"),
                (300, Quiet, "driver is being replaced"),
                (301, Step::Snapshot, "the driver has not"),
                (301, Good, ""),
            ],
        ),
        (
            "the third relapse within an hour",
            &[
                (0, Xid(79), "XID 79"),
                (5, Good, "XID 79"),
                (60, Quiet, ""),
                (1000, Xid(79), "XID 79"),
                (1005, Good, "XID 79"),
                (1060, Quiet, ""),
                (2000, Bad("GPU is lost"), "GPU is lost"),
                (2005, Good, "GPU is lost"),
                (2060, Quiet, ""),
                (3000, Xid(79), again),
                (3005, Good, again),
                (9000, Good, again),
                (9001, Clear, ""),
                (9002, Xid(79), "XID 79"),
                (9003, Good, "XID 79"),
                (9062, Quiet, ""),
            ],
        ),
        (
            "three relapses within more than an hour",
            &[
                (0, Xid(79), "XID 79"),
                (5, Good, "XID 79"),
                (1000, Xid(79), "XID 79"),
                (1005, Good, "XID 79"),
                (3000, Xid(79), "XID 79"),
                (3005, Good, "XID 79"),
                (4601, Xid(79), "XID 79"),
                (4605, Good, "XID 79"),
                (4661, Quiet, ""),
            ],
        ),
    ];
    for (name, rows) in rows {
        let (health, _) = play(name, rows);
        let all = rows
            .iter()
            .any(|(_, step, _)| matches!(step, AllSilent | Absent | LetGo));
        assert!(all || health.state(B) == GpuState::Healthy, "{name}");
    }
}

#[test]
fn errors_of_the_driver_are_not_relapses() {
    let mut rows = vec![(0, Step::Xid(79), "XID 79"), (1, Step::Good, "XID 79")];
    for start in [100, 200, 300, 400] {
        rows.push((start, Step::AllSilent, "driver does not answer"));
        rows.push((start + 1, Step::Good, "driver does not answer"));
        rows.push((start + 61, Step::Quiet, ""));
    }
    play("crashes", &rows);
}

#[test]
fn it_is_known_when_to_look_again_and_since_when() {
    let rows = [
        (10, Step::Xid(79), "XID"),
        (15, Step::Bad("GPU is lost"), "XID"),
        (20, Step::Good, "XID"),
    ];
    let (health, start) = play("", &rows);
    assert_eq!(health.next_tick(), Some(start + Duration::from_secs(75)));
    let GpuState::Failed(_, since) = health.state(A) else {
        panic!()
    };
    assert_eq!(since, start + Duration::from_secs(10));
    assert_eq!(Health::new(policy(), start).next_tick(), None);
}

#[test]
fn a_gpu_is_unhealthy_until_the_driver_has_answered() {
    let start = Instant::now();
    let mut health = Health::new(policy(), start);
    assert_eq!(health.state(A), GpuState::Unknown(start));
    health.apply(&snapshot(None), start);
    assert_eq!(health.state(A), GpuState::Unknown(start));
    health.apply(&Update::Sample(sample(A)), start);
    assert_eq!(health.state(A), GpuState::Healthy);
    assert!(!health.clear(A) && !health.clear("GPU-x"));
}

#[test]
fn errors_of_an_earlier_process() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let policy = Policy {
        quiet_period: Duration::from_secs(60),
        ignored_xids: BTreeSet::new(),
    };
    let mut before = Health::new(policy.clone(), start);
    let xid = |uuid: &str| {
        Update::Event(GpuEvent {
            gpu: uuid.to_owned(),
            kind: EventKind::Xid(79),
        })
    };
    let good = |uuid: &str| {
        Update::Sample(Sample {
            gpu: uuid.to_owned(),
            ..Sample::default()
        })
    };
    before.apply(&good("GPU-0"), at(0));
    before.apply(&good("GPU-1"), at(0));
    before.apply(&xid("GPU-1"), at(1));
    let errors = before.errors();
    assert_eq!(errors.keys().collect::<Vec<_>>(), ["GPU-1"]);
    let mut after = Health::new(policy, at(10));
    after.restore(errors, at(10));
    after.apply(&good("GPU-0"), at(11));
    after.apply(&good("GPU-1"), at(11));
    assert_eq!(after.state("GPU-0"), GpuState::Healthy);
    assert_eq!(
        after.state("GPU-1"),
        GpuState::Failed(GpuFailure::of_gpu("XID 79"), at(1))
    );
    assert_eq!(after.next_tick(), Some(at(61)));
    after.tick(at(61));
    assert_eq!(
        (after.state("GPU-1"), after.errors().len()),
        (GpuState::Healthy, 0)
    );
}

#[test]
fn a_gpu_that_is_stuck_stays_so_after_a_restart() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let policy = Policy {
        quiet_period: Duration::from_secs(10),
        ignored_xids: BTreeSet::new(),
    };
    let good = Update::Sample(Sample {
        gpu: "GPU-0".to_owned(),
        ..Sample::default()
    });
    let xid = Update::Event(GpuEvent {
        gpu: "GPU-0".to_owned(),
        kind: EventKind::Xid(79),
    });
    let mut before = Health::new(policy.clone(), start);
    for round in 0..4 {
        before.apply(&good, at(100 * round));
        before.apply(&xid, at(100 * round + 1));
        before.apply(&good, at(100 * round + 2));
        before.tick(at(100 * round + 50));
    }
    assert!(before.errors()["GPU-0"].is_stuck);
    let mut after = Health::new(policy, at(500));
    after.restore(before.errors(), at(500));
    after.apply(&good, at(501));
    after.tick(at(1000));
    assert_ne!(after.state("GPU-0"), GpuState::Healthy);
    assert!(after.clear("GPU-0"));
    assert_eq!(after.state("GPU-0"), GpuState::Healthy);
}
