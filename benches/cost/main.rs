//! Measures container starts with the fake driver, whose NVML responds immediately: `make bench`, as root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::indexing_slicing,
    dead_code,
    missing_docs,
    unreachable_pub,
    reason = "a program for developers, which ends at the first surprise and uses a part of what the tests share"
)]

#[path = "../../tests/it/scene.rs"]
mod cri_scene;
#[path = "../../tests/it/driver.rs"]
mod driver;
#[path = "../../tests/it/engine.rs"]
mod engine;
#[allow(unused_macros, reason = "a bench has no tests")]
#[path = "../../tests/it/harness.rs"]
mod harness;
#[path = "../../tests/it/kernels.rs"]
mod kernels;
mod measure;
mod scene;
#[path = "../../tests/it/support.rs"]
mod support;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use driver::{FakeDriver, Image};
use engine::{IMAGE, Podman};
use measure::{Case, Took, machine, ms, peak_rss, print, take_turns, time};
use scene::{Disk, FileSystem, Layer, Names, Scene, StateDir, forget, hook, installed};
use support::sh;

/// The number of rounds for short commands, for container starts, and for podman.
const ROUNDS: [usize; 3] = [400, 100, 25];

/// A row of the table: subject, target, result, and whether the result meets the target.
struct Row(String, &'static str, String, bool);

impl Row {
    fn new(subject: impl Into<String>, target: &'static str, result: String, is_met: bool) -> Self {
        Self(subject.into(), target, result, is_met)
    }
}

/// Measures all cases, or with `--at-once`, `--commands`, `--mig` or `--podman` only these. `--compare PROGRAM`... compares this build with other
/// builds of the hook instead. `--quick` takes fewer rounds.
fn main() {
    let asked = |word: &str| std::env::args().any(|argument| argument == word);
    if let [_, create, pid, rootfs, list] = &*std::env::args().collect::<Vec<_>>()
        && create == "--create"
    {
        return scene::create(pid, rootfs.as_ref(), list.as_ref());
    }
    if !asked("--inside") {
        return inside();
    }
    let quick = asked("--quick");
    let [short, starts, runs] = if quick { [60, 8, 3] } else { ROUNDS };
    println!(
        "{}; load {}",
        machine(),
        std::fs::read_to_string("/proc/loadavg").unwrap().trim()
    );
    println!(
        "median (first to last decile), and CPU time; x: median of the ratios to the first row of the block, round by round\n"
    );
    let scene = Scene::new();
    let mut rows = Vec::new();
    let fake = FakeDriver::new(&["--gpus", "8"]);
    if asked("--at-once") {
        at_once(&scene, starts / 6, &mut rows);
        return support::remove_shared();
    }
    if asked("--commands") {
        commands(short, &mut rows);
        rows.iter()
            .for_each(|Row(what, _, result, _)| println!("{what}: {result}"));
        return support::remove_shared();
    }
    if asked("--podman") {
        podman(runs, &mut rows);
        return support::remove_shared();
    }
    if asked("--mig") {
        mig(&scene, starts, &mut rows);
        return support::remove_shared();
    }
    let others = std::env::args()
        .skip_while(|word| word != "--compare")
        .skip(1);
    let others: Vec<String> = others.take_while(|word| !word.starts_with("--")).collect();
    if !others.is_empty() {
        compare(&scene, &others, starts);
        return support::remove_shared();
    }
    no_request(&scene, short, &mut rows);
    commands(short, &mut rows);
    containers(&scene, &fake, starts, &mut rows);
    mig(&scene, starts, &mut rows);
    at_once(&scene, starts / 6, &mut rows);
    podman(runs, &mut rows);
    let size = std::fs::metadata(hook()).unwrap().len();
    rows.push(Row::new(
        "binary, as it was built here",
        "2 MB",
        format!("{:.3} MB", size as f64 / 1e6),
        size <= 2_000_000,
    ));

    println!("| | target | result | met |\n|---|---|---|---|");
    for Row(what, target, result, is_met) in &rows {
        println!(
            "| {what} | {target} | {result} | {} |",
            if *is_met { "yes" } else { "MISSED" }
        );
    }
    let missed: Vec<_> = rows
        .iter()
        .filter(|Row(.., is_met)| !is_met)
        .map(|Row(what, ..)| what.as_str())
        .collect();
    println!(
        "\n{} of {} targets are missed: {}",
        missed.len(),
        rows.len(),
        missed.join("; ")
    );
    support::remove_shared();
}

/// Runs this program again in a mount namespace with a tmpfs on the hook's directory, because /run is a tmpfs on hosts with
/// systemd.
fn inside() {
    let script = "mkdir -p /run/oci-nvidia-hook; mount -t tmpfs -o mode=700 run /run/oci-nvidia-hook; exec \"$@\" --inside";
    let mut unshare = Command::new("unshare");
    unshare.args([
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-euc",
        script,
        "sh",
    ]);
    assert!(
        unshare
            .arg(std::env::current_exe().unwrap())
            .args(std::env::args().skip(1))
            .status()
            .unwrap()
            .success()
    );
}

fn no_request(scene: &Scene, rounds: usize, rows: &mut Vec<Row>) {
    let mut cases = [
        Case::new("/bin/true", || time(&mut Command::new("/bin/true"))),
        Case::new("no GPU requested", || time(&mut scene.no_request(0))),
        Case::new("no GPU requested, config.json of 1 MB", || {
            time(&mut scene.no_request(1 << 20))
        }),
    ];
    take_turns(&mut cases, rounds);
    print(&cases);
    let [base, none, large] = [0, 1, 2].map(|case: usize| ms(cases[case].median()));
    rows.push(Row::new(
        "no GPU requested",
        "≤ 1.5 × /bin/true",
        format!("{none:.2} ms, {:.2} ×", none / base),
        none <= 1.5 * base,
    ));
    let more = large - none;
    rows.push(Row::new(
        "1 MB more in config.json",
        "< 3 ms",
        format!("{more:.2} ms"),
        more < 3.0,
    ));
}

fn commands(rounds: usize, rows: &mut Vec<Row>) {
    // With nodes of a group, the spec depends on the version of Podman.
    let fake = FakeDriver::new(&[
        "--gpus",
        "8",
        "--all-files",
        "--dev-mode",
        "0660",
        "--dev-group",
        "video",
    ]);
    let output = fake.root.with_file_name("nvidia.yaml");
    let output = output.to_str().unwrap();
    let words = |words: &[&str]| -> Vec<String> {
        [hook(), "--config", fake.config.to_str().unwrap()]
            .iter()
            .chain(words)
            .map(|word| (*word).to_owned())
            .collect()
    };
    let verb = |arguments: &[&str]| {
        let words = words(arguments);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).env_clear().stderr(Stdio::null());
        command
    };
    let generate = ["cdi", "generate", "--output", output];
    time(&mut verb(&generate));
    let mut cases = [
        Case::new("/bin/true", || time(&mut Command::new("/bin/true"))),
        Case::new("info, 8 GPUs", || time(&mut verb(&["info"]))),
        Case::new("cdi generate, 8 GPUs", || time(&mut verb(&generate))),
        Case::new("cdi refresh, nothing changed", || {
            time(&mut verb(&["cdi", "refresh", "--output", output]))
        }),
    ];
    take_turns(&mut cases, rounds);
    print(&cases);
    let rss = peak_rss(&words(&generate), File::open("/dev/null").unwrap()) as f64 / 1024.0;
    let [made, refresh] = [2, 3].map(|case: usize| ms(cases[case].median()));
    rows.push(Row::new(
        "cdi generate, 8 GPUs",
        "≤ 4 ms, ≤ 6 MiB",
        format!("{made:.2} ms; {rss:.1} MiB"),
        made <= 4.0 && rss <= 6.0,
    ));
    rows.push(Row::new(
        "cdi refresh, nothing changed",
        "≤ 2 ms",
        format!("{refresh:.2} ms"),
        refresh <= 2.0,
    ));
}

/// Compares starts by this build with those by other builds, in turn. The first other build is the first row of each block.
fn compare(scene: &Scene, others: &[String], rounds: usize) {
    let mut programs: Vec<(&str, String)> = Vec::new();
    for other in others {
        programs.push((other, installed(other)));
    }
    programs.push(("this build", hook().to_owned()));
    let block = |what: &str, rounds: usize, start: &dyn Fn(&str) -> Took| {
        let case = |(name, program): &(&str, String)| {
            let (program, state) = (program.clone(), StateDir::new(scene));
            Case::new(format!("{what}, {name}"), move || {
                state.during(|| start(&program))
            })
        };
        let mut cases: Vec<_> = programs.iter().map(case).collect();
        // Each build writes its own inventory.
        take_turns(&mut cases, 1);
        cases.iter_mut().for_each(Case::forget);
        take_turns(&mut cases, rounds);
        print(&cases);
    };
    block("no GPU requested", 4 * rounds, &|program| {
        time(&mut scene.no_request_of(program, 0))
    });
    let fake = FakeDriver::new(&["--gpus", "8", "--all-files"]);
    let output = fake.root.with_file_name("nvidia.yaml");
    for verb in ["generate", "refresh"] {
        block(&format!("cdi {verb}, 8 GPUs"), 2 * rounds, &|program| {
            let mut command = Command::new(program);
            command.arg("--config").arg(&fake.config);
            command.args(["cdi", verb, "--output"]).arg(&output);
            time(command.env_clear().stderr(Stdio::null()))
        });
    }
    fake.divide();
    std::thread::sleep(Duration::from_secs(2));
    let small = scene.image(0);
    block("one of 56 MIG devices", rounds, &|program| {
        scene.start_one(program, &small, &fake, "1:1")
    });
    let (fake, large) = (FakeDriver::new(&["--gpus", "8"]), scene.image(5000));
    block("5000 additional libraries", rounds, &|program| {
        scene.start_with(program, &large, Layer::Tmpfs, &fake)
    });
    let fake = FakeDriver::new(&["--gpus", "8", "--all-files"]);
    for kind in FileSystem::ALL {
        let disk = Disk::new(kind);
        let image = scene.distribution(&disk);
        let tmpfs = (kind == FileSystem::Ext4).then_some(("tmpfs", Layer::Tmpfs));
        for (name, layer) in tmpfs.into_iter().chain([(kind.name(), Layer::Disk(&disk))]) {
            for (count, rounds) in [(1, rounds), (20, rounds / 5)] {
                let start =
                    |program: &str| scene.start_all_with(program, count, &image, layer, &fake);
                block(&format!("{count} × 8 GPUs, {name}"), rounds.max(2), &start);
            }
        }
    }
}

/// Compares the start of a container with one of 56 MIG devices with that of a container with one of eight GPUs.
fn mig(scene: &Scene, rounds: usize, rows: &mut Vec<Row>) {
    let [whole, divided] =
        ["whole", "divided"].map(|_| FakeDriver::new(&["--gpus", "8", "--all-files"]));
    divided.divide();
    // An answer is not cached while an instance is younger than a second.
    std::thread::sleep(Duration::from_secs(2));
    let image = scene.image(0);
    let mut cases = [
        Case::new("one of 8 GPUs, warm", || {
            scene.start_one(hook(), &image, &whole, "1")
        }),
        Case::new("one of 56 MIG devices, warm", || {
            scene.start_one(hook(), &image, &divided, "1:1")
        }),
    ];
    take_turns(&mut cases, 1);
    cases.iter_mut().for_each(Case::forget);
    take_turns(&mut cases, rounds);
    print(&cases);
    let [wall, cpu] =
        [|took: &Took| took.wall, |took: &Took| took.cpu].map(|of| cases[1].ratio(&cases[0], of));
    rows.push(Row::new(
        "one of 56 MIG devices, warm",
        "≤ 1.3 × one GPU",
        format!("{wall:.2} ×; CPU {cpu:.2} ×"),
        wall <= 1.3 && cpu <= 1.3,
    ));
}

fn containers(scene: &Scene, fake: &FakeDriver, rounds: usize, rows: &mut Vec<Row>) {
    let (one, sixteen) = (
        FakeDriver::new(&["--gpus", "1"]),
        FakeDriver::new(&["--gpus", "16"]),
    );
    let images = [0, 500, 2000, 5000].map(|libraries| (libraries, scene.image(libraries)));
    let small = &images[0].1;
    let mut cases = vec![
        Case::new("/bin/true", || time(&mut Command::new("/bin/true"))),
        Case::new("1 GPU, warm", || scene.start(small, &one)),
        Case::new("16 GPUs, warm", || scene.start(small, &sixteen)),
        Case::new("8 GPUs, cold", || {
            forget(fake);
            scene.start(small, fake)
        }),
    ];
    for (libraries, image) in &images {
        let name = format!("8 GPUs, warm, {libraries} additional libraries");
        cases.push(Case::new(name, || scene.start(image, fake)));
    }
    take_turns(&mut cases, rounds);
    print(&cases);
    let [base, cold, warm, large] = [0, 3, 4, 7].map(|case: usize| ms(cases[case].median()));
    let mut ldconfig: Vec<_> = images
        .iter()
        .map(|(libraries, image)| {
            let run = move || time(Command::new("/sbin/ldconfig").arg("-r").arg(image));
            Case::new(
                format!("ldconfig -r, {libraries} additional libraries"),
                run,
            )
        })
        .collect();
    take_turns(&mut ldconfig, rounds.min(10));
    print(&ldconfig);
    let scan = ms(ldconfig[3].median());

    let container = scene.container(small, Layer::Tmpfs);
    let state = || File::open(scene.state(&container)).unwrap();
    let words = [
        hook(),
        "--config",
        fake.config.to_str().unwrap(),
        "prestart",
    ]
    .map(str::to_owned);
    let rss = peak_rss(&words, state());
    println!(
        "peak RSS, 8 GPUs, warm: {rss} KiB; /bin/true: {} KiB\n",
        peak_rss(&["/bin/true".to_owned()], state())
    );

    let reached = format!(
        "{warm:.2} ms, {:.1} ×; {:.1} MiB",
        warm / base,
        rss as f64 / 1024.0
    );
    rows.push(Row::new(
        "8 GPUs, warm",
        "≤ 2.5 ms, ≤ 4 × /bin/true; ≤ 4 MiB",
        reached,
        warm <= 2.5 && warm <= 4.0 * base && rss <= 4096,
    ));
    rows.push(Row::new(
        "8 GPUs, cold",
        "≤ 6 ms + NVML's own time",
        format!("{cold:.2} ms"),
        cold <= 6.0,
    ));
    let (more, part) = (large / warm, scan / large);
    let reached = format!(
        "{large:.2} ms, {more:.2} × that with none, 1/{part:.0} of ldconfig -r ({scan:.0} ms)"
    );
    rows.push(Row::new(
        "image with 5000 libraries",
        "≤ 1.3 × none, ≤ 1/40 of ldconfig -r",
        reached,
        more <= 1.3 && part >= 40.0,
    ));
}

/// Containers that start at the same time, with their writable layers on a disk as in the storage of an engine.
fn at_once(scene: &Scene, rounds: usize, rows: &mut Vec<Row>) {
    FileSystem::ALL
        .into_iter()
        .for_each(|kind| at_once_on(kind, scene, rounds, rows));
}

fn at_once_on(kind: FileSystem, scene: &Scene, rounds: usize, rows: &mut Vec<Row>) {
    let fake = &FakeDriver::new(&["--gpus", "8", "--all-files"]);
    let disk = Disk::new(kind);
    let image = &*scene.distribution(&disk);
    let (tmpfs, on_disk, on) = (Layer::Tmpfs, Layer::Disk(&disk), kind.name());
    // Fills the cache of the inventory.
    scene.start_all(1, image, tmpfs, fake);
    let names = scene.names(image, &disk, fake);
    let before = disk.commits();
    let true_all =
        |count: usize| measure::time_all((0..count).map(|_| Command::new("/bin/true")).collect());
    let (mut medians, mut cpu, mut starts) = (Vec::new(), Vec::new(), 0);
    for (count, rounds) in [
        (1, 10 * rounds),
        (5, 4 * rounds),
        (20, rounds),
        (100, rounds.div_ceil(3)),
    ] {
        let mut cases = [
            Case::new(format!("{count} × /bin/true at once"), || true_all(count)),
            Case::new("the hook, 8 GPUs, warm, tmpfs", || {
                scene.start_all(count, image, tmpfs, fake)
            }),
            Case::new(format!("the hook, 8 GPUs, warm, {on}"), || {
                scene.start_all(count, image, on_disk, fake)
            }),
            Case::new(format!("the same while as many end, {on}"), || {
                scene.start_while_others_end(count, image, &disk, fake)
            }),
            Case::new("only the names, tmpfs", || {
                scene.create_all(count, image, tmpfs, &names.list)
            }),
            Case::new(format!("only the names, {on}"), || {
                scene.create_all(count, image, on_disk, &names.list)
            }),
        ];
        take_turns(&mut cases, rounds.max(2));
        print(&cases);
        // The hook and the names only
        starts += 2 * count * rounds.max(2);
        medians.push([0, 1, 2, 3].map(|case: usize| ms(cases[case].median())));
        cpu.push([0, 2].map(|case: usize| ms(cases[case].cpu())));
    }
    if kind == FileSystem::Ext4 {
        let (during, all) = (disk.commits_during_starts.get(), disk.commits() - before);
        println!(
            "commits of the journal: {during} while {starts} containers started, {all} in all"
        );
    }
    let Names {
        files,
        directories,
        copied,
        ..
    } = names;
    println!(
        "names in the layer: {files} files and links, {directories} directories, {copied} copied directories\n"
    );
    let [one, _, twenty, hundred] = *medians else {
        unreachable!()
    };
    let [base, _, disk, _] = one;
    let [cpu_base, cpu_one] = cpu[0];
    rows.push(Row::new(
        format!("8 GPUs, warm, {on}"),
        "≤ 3 ms, ≤ 3.8 × /bin/true",
        format!(
            "{disk:.2} ms, {:.1} ×; CPU {cpu_one:.2} ms, {:.1} ×",
            disk / base,
            cpu_one / cpu_base
        ),
        disk <= 3.0 && disk <= 3.8 * base,
    ));
    let [_, memory, disk, ending] = twenty;
    for (what, time) in [
        ("20 at once", disk),
        ("20 at once while 20 others end", ending),
    ] {
        let reached = format!("{time:.1} ms, {:.2} ×", time / memory);
        rows.push(Row::new(
            format!("{what}, {on}"),
            "≤ 1.5 × tmpfs",
            reached,
            time <= 1.5 * memory,
        ));
    }
    let more = hundred[2] / disk;
    let reached = format!("{:.0} ms, {more:.1} ×", hundred[2]);
    let is_met = more <= 6.0 && hundred[2] <= 1000.0;
    rows.push(Row::new(
        format!("100 at once, {on}"),
        "≤ 6 × 20 at once, ≤ 1 s",
        reached,
        is_met,
    ));
}

/// Writes two CDI specs of the fake driver: ours, and one that names `cat` instead of the hook. Returns their directories.
fn cdi_specs(fake: &FakeDriver) -> [PathBuf; 2] {
    let dir = fake.root.with_file_name("cdi");
    ["ours", "cat"].map(|name| {
        let (dir, program) = (
            dir.join(name),
            if name == "cat" { "/bin/cat" } else { hook() },
        );
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("nvidia.yaml");
        let mut generate = Command::new(hook());
        generate
            .arg("--config")
            .arg(&fake.config)
            .args(["cdi", "generate", "--hook-path", program, "--output"])
            .arg(&file);
        time(&mut generate);
        if name == "cat" {
            // The arguments would be names of files.
            let text = std::fs::read_to_string(&file).unwrap();
            let start = text.find("        - oci-nvidia-hook\n").unwrap();
            let end = start + text[start..].find("      timeout").unwrap();
            std::fs::write(
                &file,
                format!("{}        - cat\n{}", &text[..start], &text[end..]),
            )
            .unwrap();
        }
        dir
    })
}

fn podman(rounds: usize, rows: &mut Vec<Row>) {
    let fake = &FakeDriver::new(&["--gpus", "8", "--all-files"]);
    let disk = Disk::new(FileSystem::Ext4);
    let podman = Podman::new();
    let rootfs = Image::new(podman.dir.path(), &["--layout", "debian"]).rootfs;
    let [ours, cat_spec] = cdi_specs(fake);
    sh("mkdir -p /etc/cdi /run/cdi; mount -t tmpfs none /etc/cdi; mount -t tmpfs none /run/cdi")
        .ok();
    // As engines are set up: storage on a disk with overlayfs. The namespace of this program keeps the hook's cache.
    let command = |words: &[&str]| {
        let mut command = Command::new("podman");
        command.env("CONTAINERS_CONF", podman.dir.path().join("containers.conf"));
        command
            .args(["--storage-driver", "overlay"])
            .args(engine::OPTIONS);
        for (option, path) in [
            ("--root", disk.dir.join("storage")),
            ("--runroot", podman.dir.path().join("run")),
            ("--tmpdir", podman.dir.path().join("tmp")),
        ] {
            command.arg(option).arg(path);
        }
        command.arg("--hooks-dir").arg(&podman.hooks).args(words);
        command
    };
    let image = podman.dir.path().join("image.tar");
    sh(&format!(
        "tar -C '{}' -cf '{}' .",
        rootfs.display(),
        image.display()
    ))
    .ok();
    time(&mut command(&[
        "import",
        "--quiet",
        image.to_str().unwrap(),
        IMAGE,
    ]));
    let start = |argument: &str, spec: Option<&Path>, install: &dyn Fn(&Podman)| -> Took {
        std::fs::remove_dir_all(&podman.hooks).unwrap();
        std::fs::create_dir(&podman.hooks).unwrap();
        install(&podman);
        match spec {
            Some(dir) => std::fs::copy(dir.join("nvidia.yaml"), "/etc/cdi/nvidia.yaml")
                .map(drop)
                .unwrap(),
            None => sh("rm -f /etc/cdi/nvidia.yaml").ok().truncate(0),
        }
        time(&mut command(&[
            "run",
            "--rm",
            "--network=none",
            argument,
            IMAGE,
            "true",
        ]))
    };
    let with = |install: &dyn Fn(&Podman)| start("--env=NVIDIA_VISIBLE_DEVICES=all", None, install);
    let device = |spec: &Path| start("--device=nvidia.com/gpu=all", Some(spec), &|_| ());
    let mut cases = [
        Case::new("podman run, no hook", || with(&|_| ())),
        Case::new("podman run, prestart, 8 GPUs", || {
            with(&|podman| podman.install_hook(&fake.config))
        }),
        // The cost in Podman and the runtime, which read the spec and mount the files.
        Case::new("podman run, CDI, cat as the hook", || device(&cat_spec)),
        Case::new("podman run, CDI, 8 GPUs", || device(&ours)),
    ];
    take_turns(&mut cases, rounds);
    print(&cases);
    let [base, prestart, cat_of_spec, cdi] =
        [0, 1, 2, 3].map(|case: usize| ms(cases[case].median()));
    rows.push(Row::new(
        "podman run, added by prestart",
        "≤ 5 ms",
        format!("{:.1} ms", prestart - base),
        prestart - base <= 5.0,
    ));
    let (more, of_podman) = (cdi - cat_of_spec, cat_of_spec - base);
    let reached = format!("{more:.1} ms; cat adds {of_podman:.1} ms");
    rows.push(Row::new(
        "podman run, CDI",
        "≤ 25 ms more than with cat",
        reached,
        more <= 25.0,
    ));
}
