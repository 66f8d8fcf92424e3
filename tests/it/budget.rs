//! Limits what a start may cost, in numbers that do not depend on the load of the machine: instructions, system calls, page faults,
//! processes, bytes. The program is the one that packages contain.
//!
//! The count of `--version`, which does nothing, is subtracted from each count. The rest is the hook's own, whatever the loader
//! does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use nvidia_host::capability::Capability;
use rustix::process::{WaitId, WaitIdOptions};

use crate::built;
use crate::driver::{ALL_GPUS, FakeDriver, Image, Waiting};
use crate::scene::{CriContainer, overlay};
use crate::support::{HOOK, Need, read, run, run_with, scratch, sh, shell, write_file};

const NEEDS_CARGO: &[Need] = &[Need::Release, Need::Programs(&["cc", "strip"])];
const NEEDS_VALGRIND: &[Need] = &[Need::Release, Need::Programs(&["cc", "valgrind"])];
const NEEDS_DRIVER: &[Need] = &[
    Need::Root,
    Need::Release,
    Need::Programs(&["cc", "valgrind", "strace"]),
];

tests! {
    NEEDS_CARGO => bytes_of_the_program, relocated_bytes;
    NEEDS_VALGRIND => nothing_asked;
    NEEDS_DRIVER => eight_gpus_warm, one_mig_device_warm, generate_and_refresh, other_sets_of_capabilities, limits_of_a_cdi_container, memory_for_a_large_config_json;
    crate::driver::NEEDS => names_in_the_image;
}

/// The limits are ten percent above the counts when they were written down (x86-64, Rust 1.95, valgrind 3.19, which does not know
/// openat2).
pub mod most {
    pub const BYTES: u64 = 4_230_000;
    pub const RELOCATED: u64 = 86_000;
    pub const NOTHING_ASKED: u64 = 30_000;
    /// For a million bytes of mounts.
    pub const LARGE_CONFIG: u64 = 16_000_000;
    /// With the text that `plan` prints, a quarter of it
    pub const EIGHT_GPUS: u64 = 2_400_000;
    pub const NOTHING_ASKED_CALLS: usize = 10;
    /// Page faults more than those of `/bin/true`, here and below.
    pub const NOTHING_ASKED_FAULTS: u64 = 5;
    pub const EIGHT_GPUS_CALLS: usize = 376;
    pub const EIGHT_GPUS_FAULTS: u64 = 43;
    /// What a start with one of 56 MIG devices costs, times a start with one whole GPU. The cached inventory is valid while the procfs
    /// entries of the instances of the GPU and their nodes are unchanged, and each GPU instance takes eight calls.
    pub const MIG_CALLS: f64 = 1.5;
    pub const MIG_INSTRUCTIONS: f64 = 1.8;
    /// Of the process that prints the spec of eight GPUs. The process that calls NVML makes as many calls as the library.
    pub const GENERATE_CALLS: usize = 550;
    /// With a spec that is up to date, which needs no NVML.
    pub const REFRESH_CALLS: usize = 405;
    /// What `[devices]` adds to the hook entry of a CDI spec, with eight GPUs.
    pub const LIMITS: u64 = 395_000;
    pub const LIMITS_CALLS: usize = 66;
    /// Files and links in the container's layer, directories that the image lacks, and directories of the image. Exact: each name costs
    /// more than ten other system calls, and stays in images that are made from the container.
    pub const NAMES: [usize; 3] = [29, 5, 5];
    /// Address space for a config.json of 16 MiB, in KiB.
    pub const MEMORY: u64 = 6 * 16 * 1024;
}

/// Returns the program that packages install.
fn program() -> &'static Path {
    static STRIPPED: OnceLock<PathBuf> = OnceLock::new();
    STRIPPED.get_or_init(|| {
        built::stripped(built::nvml_release());
        built::stripped(built::release())
    })
}

fn instructions(dir: &Path, args: &[&str], stdin: &str) -> u64 {
    let out = dir.join("callgrind");
    let mut valgrind = Command::new("valgrind");
    valgrind
        .args(["--quiet", "--tool=callgrind"])
        .arg(format!("--callgrind-out-file={}", out.display()));
    run_with(valgrind.arg(program()).args(args), stdin.as_bytes()).ok();
    let text = read(out);
    let total = text.lines().find_map(|line| {
        line.strip_prefix("summary: ")
            .or_else(|| line.strip_prefix("totals: "))
    });
    total.unwrap().trim().parse().unwrap()
}

/// Returns the names of the system calls of the program and of all programs that it starts.
fn calls(dir: &Path, args: &[&str], stdin: &str) -> Vec<String> {
    names_of_calls(&trace(dir, &["-f"], args, stdin))
}

fn names_of_calls(trace: &str) -> Vec<String> {
    let name = |line: &str| Some(line.split_once(' ')?.1.trim().split_once('(')?.0.to_owned());
    trace.lines().filter_map(name).collect()
}

/// Returns the number of system calls of the process of a command, without its children.
fn own_calls(dir: &Path, args: &[&str]) -> usize {
    let text = trace(dir, &[], args, "");
    // The other lines are signals.
    text.lines().filter(|line| line.contains('(')).count()
}

fn trace(dir: &Path, options: &[&str], args: &[&str], stdin: &str) -> String {
    let out = dir.join("strace");
    let mut strace = Command::new("strace");
    strace
        .args(options)
        .args(["-qq", "-e", "signal=none", "-o"])
        .arg(&out)
        .arg(program())
        .args(args)
        .env_clear();
    run_with(&mut strace, stdin.as_bytes()).ok();
    read(out)
}

/// Returns how many page faults of the program were served without reading a file.
fn faults(dir: &Path, program: &Path, args: &[&str], stdin: &str) -> u64 {
    let state = dir.join("stdin");
    write_file(&state, stdin);
    let mut command = Command::new(program);
    command.args(args).env_clear();
    let mut child = command
        .stdin(fs::File::open(state).unwrap())
        .spawn()
        .unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    rustix::process::waitid(WaitId::Pid(pid), ended).unwrap();
    // proc_pid_stat(5): the name in parentheses is the second field, and minflt the tenth. Until it is reaped, the process has them.
    let stat = read(format!("/proc/{}/stat", child.id()));
    assert!(child.wait().unwrap().success());
    let fields = stat.rsplit_once(") ").unwrap().1;
    fields.split(' ').nth(7).unwrap().parse().unwrap()
}

/// Returns the faults of an empty program.
fn faults_of_true(dir: &Path) -> u64 {
    (0..5)
        .map(|_| faults(dir, Path::new("/bin/true"), &[], ""))
        .min()
        .unwrap()
}

fn bundle(dir: &Path, spec: &serde_json::Value) -> String {
    write_file(dir.join("config.json"), spec.to_string());
    serde_json::json!({"id": "budget", "pid": 1, "bundle": dir}).to_string()
}

#[track_caller]
fn at_most<T: PartialOrd + std::fmt::Display>(what: &str, is: T, most: T) {
    assert!(
        is <= most,
        "{what}: {is}, more than {most}; see docs/performance.md"
    );
}

fn bytes_of_the_program() {
    at_most(
        "bytes of the program",
        fs::metadata(program()).unwrap().len(),
        most::BYTES,
    );
}

/// The start-up code of a static program at a random address writes to each page of tables with addresses, such as tables of names, and each page costs a fault of each start.
fn relocated_bytes() {
    let shown = run(Command::new("objdump").arg("-h").arg(program())).ok();
    let section = shown
        .lines()
        .find_map(|line| line.split_once(" .data.rel.ro "))
        .unwrap()
        .1;
    let size = section.split_whitespace().next().unwrap();
    at_most(
        "bytes of tables with addresses",
        u64::from_str_radix(size, 16).unwrap(),
        most::RELOCATED,
    );
}

fn nothing_asked() {
    let dir = scratch();
    let process = serde_json::json!({"args": ["sh"], "env": ["PATH=/bin"]});
    let mut spec =
        serde_json::json!({"ociVersion": "1.0.2", "process": process, "root": {"path": "/r"}});
    let state = bundle(dir.path(), &spec);
    let floor = instructions(dir.path(), &["--version"], &state);
    let own = |state: &str| {
        instructions(dir.path(), &["prestart"], state)
            .checked_sub(floor)
            .unwrap()
    };
    at_most(
        "instructions, nothing asked",
        own(&state),
        most::NOTHING_ASKED,
    );
    let calls = |verb: &str| calls(dir.path(), &[verb], &state).len();
    at_most(
        "calls, nothing asked",
        calls("prestart").saturating_sub(calls("--version")),
        most::NOTHING_ASKED_CALLS,
    );
    let faults = (0..5)
        .map(|_| faults(dir.path(), program(), &["prestart"], &state))
        .min()
        .unwrap();
    at_most(
        "page faults, nothing asked",
        faults.saturating_sub(faults_of_true(dir.path())),
        most::NOTHING_ASKED_FAULTS,
    );
    let mount = |n: u32| serde_json::json!({"destination": format!("/m/{n:041}"), "source": "/s", "options": ["ro"]});
    let per_mount = mount(0).to_string().len() + 1;
    spec["mounts"] = (0..u32::try_from(1_000_000 / per_mount).unwrap())
        .map(mount)
        .collect();
    at_most(
        "instructions, a megabyte",
        own(&bundle(dir.path(), &spec)),
        most::LARGE_CONFIG,
    );
}

fn eight_gpus_warm() {
    let fake = FakeDriver::new(&["--gpus", "8", "--all-files"]);
    let (dir, image) = Image::debian();
    let start = |name: &str| {
        let dir = dir.path().join(name);
        CriContainer::start(&dir, &image.rootfs, "mount -t tmpfs layer $layer")
    };
    let container = start("container");
    let config = fake.config.to_str().unwrap();
    let state = container.state();
    // Where the driver's files are is stored only if nothing has changed in the second before the search.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    run_with(
        Command::new(program()).args(["--config", config, "plan", "-"]),
        state.as_bytes(),
    )
    .ok();
    // `plan` runs the same code as the hook, but clap parses its command line, which the hook does not run.
    let floor = instructions(
        dir.path(),
        &["--config", config, "explain", "ONH-001"],
        &state,
    );
    // Other tests start containers at the same time, and a call then waits for their records or reads more of them.
    let counts =
        (0..3).map(|_| instructions(dir.path(), &["--config", config, "plan", "-"], &state));
    let own = counts
        .min()
        .and_then(|least| least.checked_sub(floor))
        .unwrap();
    at_most("instructions, 8 GPUs, warm", own, most::EIGHT_GPUS);

    let prestart = ["--config", config, "prestart"];
    let faults = ["second", "third", "fourth"].map(|name| {
        let container = start(name);
        faults(dir.path(), program(), &prestart, &container.state())
    });
    let least = faults.iter().min().unwrap();
    at_most(
        "page faults, 8 GPUs, warm",
        least.saturating_sub(faults_of_true(dir.path())),
        most::EIGHT_GPUS_FAULTS,
    );

    let floor = calls(dir.path(), &["--version"], &state).len();
    let hook = calls(dir.path(), &prestart, &state);
    assert_eq!(
        container
            .output("cd /dev; echo nvidia[0-9]*")
            .split_whitespace()
            .count(),
        8
    );
    at_most(
        "calls, 8 GPUs, warm",
        hook.len().saturating_sub(floor),
        most::EIGHT_GPUS_CALLS,
    );
    let count = |names: &[&str]| {
        hook.iter()
            .filter(|call| names.contains(&call.as_str()))
            .count()
    };
    assert_eq!(
        count(&["fork", "vfork", "clone", "clone3"]),
        0,
        "no other process"
    );
    assert_eq!(count(&["setns"]), 1);
    assert_eq!(count(&["execve"]), 1, "its own");
    // One step for each mount: no path is mounted twice or remounted.
    let mounted = shell!(
        "grep -c '{}' /proc/{}/mountinfo",
        container.rootfs.display(),
        container.pid()
    );
    assert!(
        count(&["move_mount"]) <= mounted.trim().parse::<usize>().unwrap(),
        "{mounted}"
    );
}

/// What other containers have requested costs a start nothing: each set of capabilities has its own stored locations of driver files.
fn other_sets_of_capabilities() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "8", "--all-files"]));
    let config = fake.config.to_str().unwrap();
    let edit = ["--config", config, "edit-config"];
    let spec = |capabilities: &str| {
        let variables = [
            "NVIDIA_VISIBLE_DEVICES=all".to_owned(),
            format!("NVIDIA_DRIVER_CAPABILITIES={capabilities}"),
        ];
        serde_json::json!({"root": {"path": "/r"}, "process": {"env": variables}}).to_string()
    };
    let usual = spec("compute,utility");
    // The locations are stored only if nothing has changed in the second before the search.
    std::thread::sleep(Duration::from_millis(1100));
    run_with(Command::new(program()).args(edit), usual.as_bytes()).ok();
    let stored = || sh("ls /run/oci-nvidia-hook | grep -c '^located'").ok();
    assert_eq!(stored().trim(), "1");
    let cost = || Cost {
        calls: calls(dir.path(), &edit, &usual).len() as u64,
        instructions: instructions(dir.path(), &edit, &usual),
    };
    let before = cost();
    for set in 1..1_usize << Capability::ALL.len() {
        let mut names = Vec::new();
        for (index, capability) in Capability::ALL.into_iter().enumerate() {
            if set & 1 << index != 0 {
                names.push(capability.name());
            }
        }
        let forward = names.join(",");
        names.reverse();
        for words in [forward, names.join(", ")] {
            run_with(Command::new(program()).args(edit), spec(&words).as_bytes()).ok();
        }
    }
    assert_eq!(stored().trim(), "16");
    let after = cost();
    assert_eq!(after.calls, before.calls);
    // Numbers in the files, such as times, do not always have the same number of digits.
    let more = before.instructions / 200;
    at_most(
        "instructions after all sets",
        after.instructions,
        before.instructions + more,
    );
}

/// A MIG device of a host with 8 GPUs and 7 instances each costs little more than a whole GPU. Only the configuration space of the requested
/// GPU is read, which would wake another one that sleeps.
fn one_mig_device_warm() {
    let fake = FakeDriver::new(&["--gpus", "8", "--all-files"]);
    let (dir, image) = Image::debian();
    let whole = cost_of_one(&dir.path().join("whole"), &fake, &image, "1");
    fake.divide();
    let mig = cost_of_one(&dir.path().join("mig"), &fake, &image, "1:1");
    assert_eq!([whole.configs, mig.configs], [1, 1]);
    let times = |mig: u64, whole: u64| mig as f64 / whole as f64;
    at_most(
        "calls, a MIG device",
        times(mig.calls, whole.calls),
        most::MIG_CALLS,
    );
    let times = times(mig.instructions, whole.instructions);
    at_most("instructions, a MIG device", times, most::MIG_INSTRUCTIONS);
}

/// The cost of a start, without what the program does in any case.
struct Cost {
    calls: u64,
    instructions: u64,
}

/// The cost of a start with one device.
struct CostOfOne {
    calls: u64,
    instructions: u64,
    /// The number of GPUs whose configuration space was read
    configs: usize,
}

/// Returns the cost of a warm start with one device.
fn cost_of_one(dir: &Path, fake: &FakeDriver, image: &Image, device: &str) -> CostOfOne {
    let mount = "mount -t tmpfs layer $layer";
    let container = CriContainer::start_with(dir, &image.rootfs, mount, device);
    let config = fake.config.to_str().unwrap();
    let (plan, state) = (["--config", config, "plan", "-"], container.state());
    // An answer is not cached if an instance is younger than a second.
    std::thread::sleep(Duration::from_secs(3));
    run_with(Command::new(program()).args(plan), state.as_bytes()).ok();
    let floor = instructions(dir, &["--config", config, "explain", "ONH-001"], &state);
    let own = instructions(dir, &plan, &state).saturating_sub(floor);
    let floor = calls(dir, &["--version"], &state).len();
    let trace = trace(dir, &["-f"], &["--config", config, "prestart"], &state);
    let hook = names_of_calls(&trace);
    let is_child = |call: &String| ["fork", "vfork", "clone", "clone3"].contains(&call.as_str());
    assert!(
        !hook.iter().any(is_child),
        "{device}: the inventory is cached"
    );
    let of_gpus = trace.lines().filter(|line| line.contains(":00.0/config\""));
    CostOfOne {
        calls: hook.len().saturating_sub(floor) as u64,
        instructions: own,
        configs: of_gpus.count(),
    }
}

/// The specs that are read are those of the directory of the output only.
fn generate_and_refresh() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "8", "--all-files"]));
    let (specs, config) = (dir.path().join("specs"), fake.config.to_str().unwrap());
    fs::create_dir(&specs).unwrap();
    let output = specs.join("nvidia.yaml");
    let (specs, output) = (specs.to_str().unwrap(), output.to_str().unwrap());
    let mut generate = vec!["--config", config, "cdi", "generate"];
    generate.extend(["--spec-dir", specs, "--output", output]);
    let refresh = ["--config", config, "cdi", "refresh", "--output", output];
    let floor = own_calls(dir.path(), &["--version"]);
    // How many reads the answer of NVML takes depends on the load of the machine.
    let own = |args: &[&str]| {
        let counts = (0..3).map(|_| own_calls(dir.path(), args));
        counts.min().unwrap_or_default().saturating_sub(floor)
    };
    at_most("calls, cdi generate", own(&generate), most::GENERATE_CALLS);
    at_most("calls, cdi refresh", own(&refresh), most::REFRESH_CALLS);
    assert!(
        !calls(dir.path(), &refresh, "")
            .iter()
            .any(|call| call.contains("clone")),
        "the spec is up to date"
    );
}

/// The hook entry of a CDI spec compares the GPUs with the limits, and calls no NVML.
fn limits_of_a_cdi_container() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "8"]));
    let spec = crate::cdi::generate(&fake, &["--hook-path", HOOK]);
    let edits = crate::cdi::edits_of(&spec, &["all"]);
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = crate::cdi_containers::with_mounts(dir.path(), &image.rootfs, &edits);
    let args: Vec<&str> = edits.hooks[0].args[1..]
        .iter()
        .map(String::as_str)
        .collect();
    // Each call is a start of another container, so that none continues the record of the call before it, or of other tests.
    let mut starts = 0..;
    let mut state = || {
        let mut state: serde_json::Value = serde_json::from_str(&container.state()).unwrap();
        state["id"] = format!("budget-{}-{}", std::process::id(), starts.next().unwrap()).into();
        state.to_string()
    };
    // The first call sets the container up, and the others find it done.
    run_with(Command::new(program()).args(&args), state().as_bytes()).ok();
    let mut cost = |table: &str| {
        fake.configure(table);
        let calls = calls(dir.path(), &args, &state());
        assert!(
            !calls
                .iter()
                .any(|call| ["fork", "vfork", "clone", "clone3"].contains(&call.as_str())),
            "{calls:?}"
        );
        (instructions(dir.path(), &args, &state()), calls.len())
    };
    let (floor, floor_calls) = cost("");
    let (own, own_calls) =
        cost("[devices]\nallow = [\"GPU-*\"]\ndeny = [\"8\", \"GPU-00000000*\"]");
    at_most(
        "instructions, limits",
        own.saturating_sub(floor),
        most::LIMITS,
    );
    at_most(
        "calls, limits",
        own_calls.saturating_sub(floor_calls),
        most::LIMITS_CALLS,
    );
}

/// What a start leaves in the layer of a container that requests compute and utility, with all files of the driver.
fn names_in_the_image() {
    let fake = FakeDriver::new(&["--gpus", "8", "--all-files"]);
    let (dir, image) = Image::debian();
    let merged = dir.path().join("merged");
    fs::create_dir(&merged).unwrap();
    let layer = overlay(dir.path(), &image.rootfs, "mount -t tmpfs layer $layer");
    fs::create_dir(merged.join("dev")).unwrap();
    let container = Waiting::start(dir.path(), &merged, ALL_GPUS, &layer);
    container.hook(&fake.config).ok();
    let upper = format!(
        "/proc/{}/root{}/layer/upper",
        container.pid(),
        dir.path().display()
    );
    let listed = shell!("cd '{upper}'; find . -mindepth 1 -printf '%y %P\\n'");
    let (dirs, files): (Vec<_>, Vec<_>) = listed.lines().partition(|line| line.starts_with("d "));
    let (own, new): (Vec<_>, Vec<_>) = dirs
        .into_iter()
        .partition(|line| image.rootfs.join(&line[2..]).exists());
    assert_eq!([files.len(), new.len(), own.len()], most::NAMES, "{listed}");
}

/// Lists and objects as long as the largest config.json: the items that are not kept take no memory.
fn memory_for_a_large_config_json() {
    let (dir, fake) = (scratch(), FakeDriver::shared());
    let file = dir.path().join("large.json");
    let large = |pointer: &str, entry: &str, is_asked: bool| {
        let mut spec = serde_json::json!({
            "root": {"path": "/r"}, "mounts": [], "hooks": {"poststop": []},
            "process": {"args": [], "env": ["A=b"], "capabilities": {"bounding": []}, "user": {"additionalGids": []}},
            "linux": {"namespaces": [], "devices": [], "resources": {"devices": []}},
        });
        if is_asked {
            spec["process"]["env"] = serde_json::json!(["NVIDIA_VISIBLE_DEVICES=all"]);
        }
        *spec.pointer_mut(pointer).unwrap() = serde_json::json!(["@"]);
        let text = spec.to_string();
        let count = ((16 << 20) - text.len()) / (entry.len() + 1);
        let entries = format!("{entry},").repeat(count);
        write_file(&file, text.replace("\"@\"", entries.trim_end_matches(',')));
        assert!(fs::metadata(&file).unwrap().len() > 16_000_000);
    };
    for (pointer, entry) in [
        ("/process/capabilities/bounding", "\"\""),
        ("/process/user/additionalGids", "{}"),
        ("/process/args", "\"\""),
        ("/process/env", "\"NAME=value\""),
        ("/hooks/poststop", "0"),
        ("/mounts", "0"),
        ("/linux/devices", "\"\""),
        ("/linux/namespaces", "{}"),
        ("/linux/resources/devices", "0"),
    ] {
        for is_asked in [false, true]
            .into_iter()
            .filter(|is_asked| !is_asked || pointer != "/process/env")
        {
            large(pointer, entry, is_asked);
            let script =
                "ulimit -v \"$1\"; exec \"$2\" --config \"$3\" edit-config <\"$4\" >/dev/null";
            let mut limited = Command::new("sh");
            limited.args(["-euc", script, "sh", &most::MEMORY.to_string()]);
            let ran = run(limited.arg(program()).arg(&fake.config).arg(&file));
            assert!(ran.code == Some(0), "{pointer}, {is_asked}: {ran:?}");
        }
    }
}
