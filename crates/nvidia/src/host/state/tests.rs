use base::sys::file_id::{FileTime, Inode};

use super::*;
use crate::cdi::stamp::tests::write;
use crate::driver::elf::tests as elf;

const VERSION: &str = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86  Release Build\n";

#[test]
fn the_state_changes_with_the_driver() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        driver_root: HostPath::new(dir.path()),
        library_dirs: vec!["/usr/lib/driver".into()],
        ..Config::default()
    };
    let mut states = vec![HostState::of_host(&config)];
    for (path, text) in [
        ("proc/driver/nvidia/version", VERSION),
        ("proc/driver/nvidia/gpus/0000:01:00.0/information", ""),
        (
            "proc/driver/nvidia/gpus/0000:01:00.0/information",
            "GPU UUID: \t GPU-1\n",
        ),
        ("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", ""),
        (
            "proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access",
            "",
        ),
    ] {
        write(dir.path(), path, text);
        let state = HostState::of_host(&config);
        assert!(!states.contains(&state), "{path} {text}: {state:?}");
        states.push(state);
    }
    // There is no linker cache, as in some driver containers.
    for library in [
        elf::of_this_machine(),
        [elf::of_this_machine(), vec![0]].concat(),
    ] {
        write(dir.path(), "usr/lib/driver/libnvidia-ml.so.570.86", library);
        let state = HostState::of_host(&config);
        assert!(
            state.library.is_some() && !states.contains(&state),
            "{state:?}"
        );
        states.push(state);
    }
    for unrelated in [
        "etc/ld.so.cache",
        "dev/nvidia-modeset",
        "usr/lib/driver/libother.so.1",
        "dev/nvidia0",
    ] {
        write(dir.path(), unrelated, "");
        assert_eq!(
            states.last(),
            Some(&HostState::of_host(&config)),
            "{unrelated}"
        );
    }
    let last = states.pop().unwrap();
    assert_eq!(last.module.as_deref(), Some("570.86"));
    assert_eq!(
        last.instances,
        [MigCap::GpuInstance(0, 1), MigCap::ComputeInstance(0, 1, 0)]
    );
    assert_eq!(
        last.nodes,
        BTreeMap::new(),
        "a file in place of a node is not the node"
    );
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(last.boot.as_deref(), Some(boot.trim()));
    let nowhere = Config {
        driver_root: HostPath::new(dir.path().join("nowhere")),
        ..Config::default()
    };
    assert_eq!(HostState::of_host(&nowhere), HostState::default());
}

#[test]
fn a_node_has_its_number_and_is_no_link() {
    let null = rustix::fs::stat("/dev/null").unwrap();
    let with_number = |mut stat: Stat, major, minor| {
        stat.st_rdev = rustix::fs::makedev(major, minor);
        stat
    };
    let numbered = |major, minor| with_number(null, major, minor);
    assert!(is_node(&numbered(195, 3), 3) && is_node(&numbered(195, CTL_MINOR), CTL_MINOR));
    assert!(!is_node(&numbered(195, 3), 4) && !is_node(&numbered(1, 3), 3));
    let regular = rustix::fs::stat("/etc/passwd").unwrap();
    assert!(!is_node(&with_number(regular, 195, 3), 3));
    let host = Tree::open(&HostPath::new("/")).unwrap();
    let found = examine(&host, "null").unwrap();
    assert_eq!((found.st_rdev, found.st_ino), (null.st_rdev, null.st_ino));
    assert!(examine(&host, "nothing-here").is_none());
}

fn gpu(number: u32) -> KernelGpu {
    let bus_id = BusId {
        domain: 0,
        bus: number + 1,
        device: 0,
    };
    let uuid = Some(format!("GPU-{number}"));
    KernelGpu {
        bus_id,
        dir: bus_id.in_sysfs().into(),
        minor: Some(number),
        uuid,
        ..KernelGpu::default()
    }
}

fn node(gid: u32) -> HostNode {
    HostNode {
        inode: 1,
        permissions: Permissions {
            mode: 0o660,
            uid: 0,
            gid,
        },
    }
}

/// Two GPUs that work.
fn sample() -> HostState {
    HostState {
        boot: Some("b".into()),
        module: Some("535.1".into()),
        load: 7,
        gpus: vec![gpu(0), gpu(1)],
        nodes: [CONTROL, "nvidia0", "nvidia1"]
            .map(|name| (name.to_owned(), node(44)))
            .into(),
        instances: Vec::new(),
        library: Some(FileId::default()),
    }
}

/// A root with the configuration space of two GPUs.
fn bus() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for number in [0, 1] {
        write(
            dir.path(),
            &format!("{PCI_DEVICES}/{}/config", gpu(number).bus_id.in_sysfs())[1..],
            "\u{10}\u{de}",
        );
    }
    dir
}

type Change = fn(&mut HostState);

#[test]
fn the_fingerprint_is_the_state_on_which_nvml_depends() {
    let dir = bus();
    let sys = Tree::open(&HostPath::new(dir.path())).unwrap();
    let taken = |change: Change| {
        let mut state = sample();
        change(&mut state);
        state.fingerprint(&sys, &[], &Scope::All)
    };
    let whole = taken(|_| ()).unwrap();
    assert!(whole.is_whole);
    let changes: [(&str, Change); 10] = [
        ("boot", |state| state.boot = Some("c".into())),
        ("module", |state| state.module = Some("535.2".into())),
        ("load", |state| state.load = 8),
        ("library", |state| {
            state.library = Some(FileId {
                size: 4,
                ..FileId::default()
            });
        }),
        ("control node", |state| {
            _ = state.nodes.insert(CONTROL.into(), node(0))
        }),
        ("node", |state| {
            _ = state.nodes.insert("nvidia1".into(), node(0))
        }),
        ("bus id", |state| state.gpus[1].bus_id.bus = 9),
        ("minor", |state| state.gpus[1].minor = Some(0)),
        ("uuid", |state| state.gpus[1].uuid = Some("GPU-9".into())),
        ("one less", |state| drop(state.gpus.pop())),
    ];
    let mut texts = vec![whole.host.clone()];
    for (what, change) in changes {
        let text = taken(change).unwrap().host;
        assert!(!texts.contains(&text), "{what}");
        texts.push(text);
    }
    let broken: [(&str, Change); 4] = [
        ("no node", |state| _ = state.nodes.remove("nvidia1")),
        ("no minor", |state| state.gpus[1].minor = None),
        ("no UUID", |state| state.gpus[1].uuid = None),
        ("not on the bus", |state| state.gpus[1].bus_id.bus = 9),
    ];
    for (what, change) in broken {
        assert!(!taken(change).unwrap().is_whole, "{what}");
    }
    let missing: [(&str, Change); 3] = [
        ("boot", |state| state.boot = None),
        ("library", |state| state.library = None),
        ("control node", |state| _ = state.nodes.remove(CONTROL)),
    ];
    for (what, change) in missing {
        assert_eq!(taken(change), None, "{what}");
    }
    let ignored: [(&str, Change); 3] = [
        ("inode", |state| {
            _ = state.nodes.insert(
                "nvidia1".into(),
                HostNode {
                    inode: 2,
                    ..node(44)
                },
            )
        }),
        ("model", |state| state.gpus[0].model = Some("H100".into())),
        ("other node", |state| {
            _ = state.nodes.insert("nvidia7".into(), node(0))
        }),
    ];
    for (what, change) in ignored {
        assert_eq!(taken(change).as_ref(), Some(&whole), "{what}");
    }
    // The module never learns the UUID of an excluded GPU, and it needs no node.
    let excluded = taken(|state| {
        state.gpus[1] = KernelGpu {
            excluded: true,
            uuid: None,
            ..gpu(1)
        };
        state.nodes.remove("nvidia1");
    });
    assert!(excluded.is_some_and(|taken| taken.is_whole && taken.host != whole.host));
    write(
        dir.path(),
        &format!("{PCI_DEVICES}/{}/config", gpu(1).bus_id.in_sysfs())[1..],
        "x",
    );
    assert!(
        !taken(|_| ()).unwrap().is_whole,
        "the configuration space cannot be read"
    );
}

/// An instance that was created again has the same numbers, and another entry in procfs.
#[test]
fn the_fingerprint_has_the_entries_of_instances_and_who_can_open_their_nodes() {
    let dir = bus();
    let sys = Tree::open(&HostPath::new(dir.path())).unwrap();
    let entry = |device, number, seconds, nanoseconds| FileId {
        inode: Inode { device, number },
        changed: FileTime {
            seconds,
            nanoseconds,
        },
        ..FileId::default()
    };
    let known = Some(entry(5, 6, 7, 8));
    let taken = |cap, entry, node: Option<u32>| {
        let permissions = node.map(|mode| Permissions {
            mode,
            uid: 0,
            gid: 0,
        });
        sample().fingerprint(&sys, &[(Instance { cap, entry }, permissions)], &Scope::All)
    };
    let cap = MigCap::GpuInstance(0, 1);
    let same = || taken(cap, known, Some(0o444));
    let first = same().unwrap();
    assert!(first.is_whole && same() == Some(first.clone()));
    let mut texts = vec![
        first.gpus,
        sample().fingerprint(&sys, &[], &Scope::All).unwrap().gpus,
    ];
    for changed in [
        taken(MigCap::ComputeInstance(0, 1, 0), known, Some(0o444)),
        taken(cap, Some(entry(6, 6, 7, 8)), Some(0o444)),
        taken(cap, Some(entry(5, 7, 7, 8)), Some(0o444)),
        taken(cap, Some(entry(5, 6, 8, 8)), Some(0o444)),
        taken(cap, Some(entry(5, 6, 7, 9)), Some(0o444)),
        taken(cap, known, Some(0o400)),
    ] {
        let text = changed.unwrap().gpus;
        assert!(!texts.contains(&text), "{text:?}");
        texts.push(text);
    }
    assert_eq!(taken(cap, None, Some(0o444)), None, "an unknown entry");
    let without_node = taken(cap, known, None).unwrap();
    assert!(!without_node.is_whole, "NVML does not list the device");
}

/// Reading the configuration space of a GPU that sleeps would wake it.
#[test]
fn the_fingerprint_of_some_gpus_reads_only_their_configuration_space() {
    let dir = bus();
    let sys = Tree::open(&HostPath::new(dir.path())).unwrap();
    let second = gpu(1).bus_id.in_sysfs();
    std::fs::remove_file(
        dir.path()
            .join(&format!("{PCI_DEVICES}/{second}/config")[1..]),
    )
    .unwrap();
    let of = |minors: &[u32]| {
        let scope = Scope::Gpus(minors.iter().copied().collect());
        sample().fingerprint(&sys, &[], &scope).unwrap()
    };
    let first = of(&[0]);
    assert!(first.is_whole && first.gpus.keys().eq(&[0]));
    assert!(!of(&[1]).is_whole && !of(&[0, 1]).is_whole);
    assert_eq!(first.host, of(&[1]).host, "the host lists both");
}

#[test]
fn a_gpu_that_fell_off_the_bus_does_not_respond() {
    let dir = bus();
    let sys = Tree::open(&HostPath::new(dir.path())).unwrap();
    assert!(is_on_the_bus(&sys, gpu(1).bus_id) && !is_on_the_bus(&sys, gpu(5).bus_id));
    let config = dir
        .path()
        .join(format!("{PCI_DEVICES}/{}/config", gpu(1).bus_id.in_sysfs()).trim_start_matches('/'));
    for (bytes, responds) in [
        ([0xff, 0xff], false),
        ([0xff, 0x10], true),
        ([0xde, 0xff], true),
    ] {
        std::fs::write(&config, bytes).unwrap();
        assert_eq!(is_on_the_bus(&sys, gpu(1).bus_id), responds, "{bytes:?}");
    }
}

#[test]
fn nvml_counts_other_gpus_if_they_nodes_or_the_module_change() {
    let changes: [(&str, Change, bool); 9] = [
        ("module", |state| state.module = None, true),
        ("a GPU less", |state| drop(state.gpus.pop()), true),
        ("another place", |state| state.gpus[1].bus_id.bus = 9, true),
        (
            "a missing node",
            |state| _ = state.nodes.remove("nvidia1"),
            true,
        ),
        (
            "a node with other permissions",
            |state| _ = state.nodes.insert("nvidia1".into(), node(0)),
            true,
        ),
        (
            "another node of the same name",
            |state| {
                _ = state.nodes.insert(
                    "nvidia1".into(),
                    HostNode {
                        inode: 2,
                        ..node(44)
                    },
                )
            },
            true,
        ),
        ("the UUID", |state| state.gpus[1].uuid = None, false),
        (
            "MIG",
            |state| state.instances.push(MigCap::GpuInstance(0, 1)),
            false,
        ),
        ("the library", |state| state.library = None, false),
    ];
    for (what, change, expected) in changes {
        let mut state = sample();
        change(&mut state);
        assert_eq!(state.has_other_gpus(&sample()), expected, "{what}");
    }
}
