use super::*;
use crate::monitor::message::{Properties, Snapshot};
use crate::monitor::update::Update;
use crate::node::gpus::tests::gpu;
use crate::settings::resources::SharedResource;
use nvidia_host::inventory::Inventory;
use nvidia_host::nvml::monitoring::Engines;
use nvidia_host::nvml::monitoring::MigAttributes;

fn facts(gpus: &[NodeGpu]) -> NvmlFacts {
    let properties = Properties {
        memory_mib: Some(81559),
        mig_capable: true,
        addressing_mode: None,
    };
    let engines = Engines {
        copy: 1,
        decoder: 2,
        ..Engines::default()
    };
    let attributes = MigAttributes {
        gpu_slices: 1,
        compute_slices: 1,
        memory_mib: 9984,
        multiprocessors: 16,
        engines,
    };
    let mut facts = NvmlFacts::default();
    facts.apply(&Update::Snapshot(Box::new(Snapshot {
        inventory: Inventory {
            driver_version: "535.183.01".into(),
            cuda_version: "12.2".into(),
            gpus: gpus.iter().map(|gpu| gpu.gpu.clone()).collect(),
            ..Inventory::default()
        },
        properties: gpus
            .iter()
            .map(|gpu| (gpu.gpu.uuid.clone(), properties))
            .collect(),
        mig_attributes: gpus
            .iter()
            .flat_map(|gpu| gpu.profiles.keys().map(|uuid| (uuid.clone(), attributes)))
            .collect(),
        ..Snapshot::default()
    })));
    facts
}

fn labels(gpus: &[NodeGpu], settings: &Plugin) -> Vec<String> {
    lines(
        &facts(gpus),
        gpus,
        settings,
        &Limits::default(),
        &host(&["0x030200", "0x030200", "0x030200"]),
    )
}

fn host(classes: &[&str]) -> Host {
    let classes = classes.iter().enumerate();
    let classes =
        classes.map(|(at, class)| (format!("0000:{:02x}:00.0", at + 1), (*class).to_owned()));
    Host {
        machine: Some("PowerEdge XE9680".to_owned()),
        started: 1_764_000_000,
        classes: classes.collect(),
    }
}

#[test]
fn the_mode_follows_from_the_pci_class() {
    let gpus = [gpu(0, MODEL, &[]), gpu(1, MODEL, &[])];
    let gpus: Vec<&NodeGpu> = gpus.iter().collect();
    for (classes, expected) in [
        (&["0x030200", "0x030200"][..], "compute"),
        (&["0x030000", "0x030000"], "graphics"),
        (&["0x030000", "0x030200"], "unknown"),
        (&["0x030200"], "unknown"),
        (&["0x038000", "0x038000"], "unknown"),
    ] {
        assert_eq!(mode(&gpus, &host(classes).classes), expected, "{classes:?}");
    }
    assert_eq!(mode(&[], &BTreeMap::new()), "unknown");
}

/// The labels whose names begin with one of these, without the prefix.
fn some(gpus: &[NodeGpu], settings: &Plugin, names: &[&str]) -> Vec<String> {
    let all = labels(gpus, settings).into_iter();
    let bare = all.map(|line| line.strip_prefix("nvidia.com/").unwrap().to_owned());
    bare.filter(|line| names.iter().any(|name| line.starts_with(name)))
        .collect()
}

fn with(mig_strategy: MigStrategy, replicas: u32) -> Plugin {
    Plugin {
        mig_strategy,
        replicas,
        ..Plugin::default()
    }
}

const MODEL: &str = "NVIDIA H100 80GB HBM3";

#[test]
fn all_labels_of_a_node_with_whole_gpus() {
    let gpus = [gpu(0, MODEL, &[]), gpu(1, MODEL, &[])];
    assert_eq!(
        labels(&gpus, &Plugin::default()),
        [
            "nvidia.com/cuda.driver-version.full=535.183.01",
            "nvidia.com/cuda.driver-version.major=535",
            "nvidia.com/cuda.driver-version.minor=183",
            "nvidia.com/cuda.driver-version.revision=01",
            "nvidia.com/cuda.driver.major=535",
            "nvidia.com/cuda.driver.minor=183",
            "nvidia.com/cuda.driver.rev=01",
            "nvidia.com/cuda.runtime-version.full=12.2",
            "nvidia.com/cuda.runtime-version.major=12",
            "nvidia.com/cuda.runtime-version.minor=2",
            "nvidia.com/cuda.runtime.major=12",
            "nvidia.com/cuda.runtime.minor=2",
            "nvidia.com/gfd.timestamp=1764000000",
            "nvidia.com/gpu.compute.major=9",
            "nvidia.com/gpu.compute.minor=0",
            "nvidia.com/gpu.count=2",
            "nvidia.com/gpu.family=hopper",
            "nvidia.com/gpu.machine=PowerEdge-XE9680",
            "nvidia.com/gpu.memory=81559",
            "nvidia.com/gpu.mode=compute",
            "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3",
            "nvidia.com/gpu.replicas=1",
            "nvidia.com/gpu.sharing-strategy=none",
            "nvidia.com/mig.capable=true",
            "nvidia.com/mig.strategy=mixed",
            "nvidia.com/mps.capable=false",
        ]
    );
}

fn sliced(name: &str, rename: Option<&str>) -> Plugin {
    let row = SharedResource {
        name: name.to_owned(),
        rename: rename.map(str::to_owned),
        replicas: 4,
        strategy: SharingStrategy::TimeSlicing,
    };
    Plugin {
        shared_resources: vec![row],
        ..with(MigStrategy::Mixed, 1)
    }
}

#[test]
fn gpus_that_mps_shares() {
    let gpus = [gpu(0, MODEL, &[]), gpu(1, MODEL, &[])];
    let mps = |replicas| Plugin {
        sharing: SharingStrategy::Mps,
        ..with(MigStrategy::Mixed, replicas)
    };
    let has = |gpus: &[NodeGpu], settings: &Plugin, label: &str| {
        labels(gpus, settings).contains(&format!("nvidia.com/{label}"))
    };
    for replicas in [1, 4] {
        for label in [
            "mps.capable=true",
            "gpu.sharing-strategy=mps",
            &format!("gpu.replicas={replicas}"),
        ] {
            assert!(has(&gpus, &mps(replicas), label), "{label}");
        }
    }
    assert!(has(
        &gpus,
        &mps(4),
        "gpu.product=NVIDIA-H100-80GB-HBM3-SHARED"
    ));
    let migs = [gpu(0, MODEL, &["1g.5gb"])];
    assert!(has(&migs, &mps(4), "mps.capable=false"));
}

#[test]
fn products_counts_and_strategies() {
    const BASIC: &[&str] = &[
        "gpu.product",
        "gpu.count",
        "gpu.replicas",
        "gpu.sharing",
        "mig.strategy",
        "mig-1g.5gb.product",
    ];
    let whole = [
        gpu(0, MODEL, &[]),
        gpu(1, "NVIDIA T4", &[]),
        gpu(2, "NVIDIA T4", &[]),
    ];
    let mixed = [
        gpu(0, "A100", &["1g.5gb", "1g.5gb", "2g.10gb+me"]),
        gpu(1, "A100", &[]),
    ];
    let uniform = [
        gpu(0, "A100", &["1g.5gb", "1g.5gb"]),
        gpu(1, "A100", &["1g.5gb"]),
    ];
    let rows: &[(&[NodeGpu], Plugin, &[&str])] = &[
        (
            &whole,
            with(MigStrategy::None, 1),
            &[
                "gpu.count=2",
                "gpu.product=NVIDIA-T4",
                "gpu.replicas=1",
                "gpu.sharing-strategy=none",
            ],
        ),
        (
            &whole[..1],
            with(MigStrategy::None, 4),
            &[
                "gpu.count=1",
                "gpu.product=NVIDIA-H100-80GB-HBM3-SHARED",
                "gpu.replicas=4",
                "gpu.sharing-strategy=time-slicing",
            ],
        ),
        (
            &mixed,
            with(MigStrategy::Mixed, 2),
            &[
                "gpu.count=2",
                "gpu.product=A100-SHARED",
                "gpu.replicas=2",
                "gpu.sharing-strategy=time-slicing",
                "mig-1g.5gb.product=A100-MIG-1g.5gb-SHARED",
                "mig.strategy=mixed",
            ],
        ),
        (
            &uniform,
            with(MigStrategy::Mixed, 1),
            &[
                "gpu.count=2",
                "gpu.product=A100",
                "gpu.replicas=0",
                "gpu.sharing-strategy=none",
                "mig-1g.5gb.product=A100-MIG-1g.5gb",
                "mig.strategy=mixed",
            ],
        ),
        (
            &uniform,
            with(MigStrategy::Single, 1),
            &[
                "gpu.count=3",
                "gpu.product=A100-MIG-1g.5gb",
                "gpu.replicas=1",
                "gpu.sharing-strategy=none",
                "mig.strategy=single",
            ],
        ),
        (
            &mixed,
            sliced("nvidia.com/gpu", None),
            &[
                "gpu.count=2",
                "gpu.product=A100-SHARED",
                "gpu.replicas=4",
                "gpu.sharing-strategy=time-slicing",
                "mig-1g.5gb.product=A100-MIG-1g.5gb",
                "mig.strategy=mixed",
            ],
        ),
        (
            &mixed,
            sliced(
                "nvidia.com/mig-1g.5gb",
                Some("nvidia.com/mig-1g.5gb.shared"),
            ),
            &[
                "gpu.count=2",
                "gpu.product=A100",
                "gpu.replicas=1",
                "gpu.sharing-strategy=none",
                "mig-1g.5gb.product=A100-MIG-1g.5gb",
                "mig.strategy=mixed",
            ],
        ),
        // The MIG devices are not offered.
        (
            &mixed,
            with(MigStrategy::Single, 1),
            &[
                "gpu.count=2",
                "gpu.product=A100",
                "gpu.replicas=1",
                "gpu.sharing-strategy=none",
                "mig.strategy=single",
            ],
        ),
    ];
    for (gpus, settings, expected) in rows {
        assert_eq!(
            some(gpus, settings, BASIC),
            *expected,
            "{:?}",
            settings.mig_strategy
        );
    }
    let gpus = [gpu(0, "A100", &["1g.5gb", "1g.5gb"])];
    let renamed = sliced(
        "nvidia.com/mig-1g.5gb",
        Some("nvidia.com/mig-1g.5gb.shared"),
    );
    assert_eq!(
        some(
            &gpus,
            &renamed,
            &[
                "mig-1g.5gb.replicas",
                "mig-1g.5gb.sharing",
                "mig-1g.5gb.product"
            ]
        ),
        [
            "mig-1g.5gb.product=A100-MIG-1g.5gb",
            "mig-1g.5gb.replicas=4",
            "mig-1g.5gb.sharing-strategy=time-slicing"
        ]
    );
    let parts = [
        "engines.copy=1",
        "engines.decoder=2",
        "engines.encoder=0",
        "engines.jpeg=0",
        "engines.ofa=0",
        "memory=9984",
        "multiprocessors=16",
    ];
    let slices = ["slices.ci=1", "slices.gi=1"];
    let mig = [
        "product=A100-MIG-1g.5gb",
        "replicas=1",
        "sharing-strategy=none",
    ];
    let expected = ["count=2"].iter().chain(&parts).chain(&mig).chain(&slices);
    let expected: Vec<String> = expected.map(|line| format!("mig-1g.5gb.{line}")).collect();
    assert_eq!(
        some(&gpus, &with(MigStrategy::Mixed, 1), &["mig-"]),
        expected
    );
    let single = some(
        &gpus,
        &with(MigStrategy::Single, 1),
        &["gpu.memory", "gpu.slices", "gpu.family", "mig-"],
    );
    assert_eq!(
        single,
        [
            "gpu.family=hopper",
            "gpu.memory=9984",
            "gpu.slices.ci=1",
            "gpu.slices.gi=1"
        ]
    );
    assert_eq!(
        some(
            &mixed,
            &with(MigStrategy::Mixed, 1),
            &["mig-2g.10gb.me.count"]
        ),
        ["mig-2g.10gb.me.count=1"]
    );
}

/// The labels describe the GPUs that the node offers.
#[test]
fn denied_gpus_do_not_count() {
    let gpus = [
        gpu(0, MODEL, &[]),
        gpu(1, MODEL, &[]),
        gpu(2, "NVIDIA T4", &[]),
        gpu(3, MODEL, &["1g.5gb", "1g.5gb"]),
    ];
    let found = |deny: &[&str], names: &[&str]| {
        let limits = Limits {
            deny: deny.iter().map(|entry| (*entry).to_owned()).collect(),
            ..Limits::default()
        };
        let all = lines(
            &facts(&gpus),
            &gpus,
            &Plugin::default(),
            &limits,
            &Host::default(),
        );
        let bare = all
            .iter()
            .map(|line| line.strip_prefix("nvidia.com/").unwrap().to_owned());
        bare.filter(|line| names.iter().any(|name| line.starts_with(name)))
            .collect::<Vec<_>>()
    };
    let names = ["gpu.count", "gpu.product", "mig-1g.5gb.count"];
    let h100 = "gpu.product=NVIDIA-H100-80GB-HBM3";
    assert_eq!(
        found(&[], &names),
        ["gpu.count=3", h100, "mig-1g.5gb.count=2"]
    );
    assert_eq!(
        found(&["1"], &names),
        ["gpu.count=2", h100, "mig-1g.5gb.count=2"]
    );
    assert_eq!(
        found(&["1", "3:0"], &names),
        ["gpu.count=2", h100, "mig-1g.5gb.count=1"]
    );
    assert_eq!(found(&["1", "3"], &names), ["gpu.count=1", h100]);
    assert_eq!(
        found(&["*H100*"], &names),
        ["gpu.count=1", "gpu.product=NVIDIA-T4"]
    );
}

#[test]
fn without_a_driver_or_a_permitted_gpu_there_are_no_labels() {
    let gpus = [gpu(0, MODEL, &[])];
    let settings = Plugin::default();
    assert!(labels(&[], &settings).is_empty());
    assert!(
        lines(
            &NvmlFacts::default(),
            &gpus,
            &settings,
            &Limits::default(),
            &Host::default()
        )
        .is_empty()
    );
    let deny = Limits {
        deny: vec!["0".into()],
        ..Limits::default()
    };
    assert!(lines(&facts(&gpus), &gpus, &settings, &deny, &Host::default()).is_empty());
    let mut facts = facts(&gpus);
    facts.apply(&Update::LetGo);
    let found = lines(
        &facts,
        &gpus,
        &settings,
        &Limits::default(),
        &Host::default(),
    );
    assert!(
        found.contains(&"nvidia.com/gpu.machine=unknown".to_owned()),
        "{found:?}"
    );
    facts.apply(&Update::Absent("no driver".into()));
    assert!(
        lines(
            &facts,
            &gpus,
            &settings,
            &Limits::default(),
            &Host::default()
        )
        .is_empty()
    );
}

#[test]
fn values_follow_the_rules_of_kubernetes() {
    for (text, value) in [
        ("NVIDIA H100 80GB HBM3", "NVIDIA-H100-80GB-HBM3"),
        (
            " Standard PC (Q35 + ICH9, 2009) ",
            "Standard-PC--Q35---ICH9--2009",
        ),
        ("-_.a._-", "a"),
        ("é", ""),
        ("\n", ""),
        ("a=b\nnvidia.com/x=y", "a-b-nvidia.com-x-y"),
    ] {
        assert_eq!(sanitized(text), value, "{text:?}");
    }
    let long = format!("{}-{}", "a".repeat(MAX_VALUE - 1), "b".repeat(9));
    assert_eq!(sanitized(&long), "a".repeat(MAX_VALUE - 1));
}
