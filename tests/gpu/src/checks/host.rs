//! The commands of the hook on the host.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::mount::UnmountFlags;
use serde_json::Value;

use crate::bench::Bench;
use crate::check::{Outcome, Stop, cannot_run, failed};
use crate::driver::Gpu;
use crate::{isolation, process};

/// config.json of a container that requests all GPUs, for `plan`.
const REQUEST: &[u8] =
    br#"{"ociVersion":"1.0.2","root":{"path":"/"},"process":{"env":["NVIDIA_VISIBLE_DEVICES=all"]}}"#;

/// The system calls that NVML may make for each GPU, and for its start. A driver that needs ten times as many is a surprise.
const MOST_CALLS: usize = 20_000;

pub fn info(bench: &Bench) -> Outcome {
    let driver = match bench.found_driver() {
        Ok(driver) => driver,
        Err(why) => return failed(why.clone()),
    };
    let not_usable = driver.info["failed"].as_array().map_or(0, Vec::len);
    if not_usable > 0 {
        return failed(format!(
            "{not_usable} GPUs are not usable: {}",
            driver.info["failed"]
        ));
    }
    let ours: Vec<_> = driver
        .gpus
        .iter()
        .flat_map(|gpu| std::iter::once(&gpu.uuid).chain(&gpu.mig_devices))
        .cloned()
        .collect();
    if ours.is_empty() {
        return failed("the hook lists no GPU");
    }
    let compared = match driver.smi(&["-L"], bench.left()) {
        Err(Stop::CannotRun(why)) => why,
        listed => {
            let of_smi = uuids(&listed?.ok()?);
            if of_smi != ours {
                return failed(format!("info lists {ours:?}, nvidia-smi -L {of_smi:?}"));
            }
            "as nvidia-smi -L".to_owned()
        }
    };
    let mig: usize = driver.gpus.iter().map(|gpu| gpu.mig_devices.len()).sum();
    let cuda = driver.info["cuda_version"].as_str().unwrap_or("unknown");
    Ok(format!(
        "driver {}, CUDA {cuda}, {} GPUs, {mig} MIG devices, {compared}; {}",
        driver.version(),
        driver.gpus.len(),
        driver.how
    ))
}

/// The UUIDs in the output of `nvidia-smi -L`.
pub fn uuids(list: &str) -> Vec<String> {
    let uuids = list
        .split("(UUID: ")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'));
    uuids.map(|(uuid, _)| uuid.to_owned()).collect()
}

pub fn files(bench: &Bench) -> Outcome {
    let ran = bench.run(bench.hook()?.args(["files", "--json"]))?;
    let document: Value =
        serde_json::from_str(&ran.clone().ok()?).map_err(|error| error.to_string())?;
    let files = document["files"].as_array().cloned().unwrap_or_default();
    let names: Vec<_> = files
        .iter()
        .filter_map(|file| file["path"].as_str()?.rsplit('/').next())
        .map(str::to_owned)
        .collect();
    // Libraries have the version of the driver after their name.
    let has = |wanted: &str| {
        names
            .iter()
            .any(|name| name == wanted || (wanted.ends_with(".so") && name.starts_with(wanted)))
    };
    let required = [
        "libcuda.so",
        "libnvidia-ml.so",
        "libnvidia-ptxjitcompiler.so",
        "nvidiactl",
    ];
    let more = bench.driver()?.has_uvm().then_some("nvidia-uvm");
    let missing: Vec<_> = required
        .into_iter()
        .chain(more)
        .filter(|name| !has(name))
        .collect();
    let count = |kind: &str| files.iter().filter(|file| file["kind"] == kind).count();
    let unreadable: Vec<_> = files
        .iter()
        .filter_map(|file| file["source"].as_str())
        .filter(|path| std::fs::symlink_metadata(path).is_err())
        .collect();
    let minors = &bench.driver()?.gpus;
    if !missing.is_empty() || !unreadable.is_empty() || count("device") < minors.len() {
        return failed(format!(
            "missing: {missing:?}, unreadable: {unreadable:?}, devices: {}",
            count("device")
        ));
    }
    let unknown = files
        .iter()
        .filter(|file| file["cataloged"] == false)
        .filter_map(|file| file["path"].as_str());
    let unknown: Vec<_> = unknown
        .map(|path| path.rsplit('/').next().unwrap_or(path))
        .collect();
    Ok(format!(
        "{} libraries, {} programs, {} devices, {} firmware files; not in the catalog: {}",
        count("library"),
        count("binary"),
        count("device"),
        count("firmware"),
        if unknown.is_empty() {
            "none".to_owned()
        } else {
            unknown.join(", ")
        }
    ))
}

/// Errors and warnings are reported with their text, notes with their number. doctor starts the runtimes of the machine, and
/// `crun --version` creates a directory in /run.
pub fn doctor(bench: &Bench) -> Outcome {
    bench.isolated()?;
    let ran = bench.run(bench.hook()?.args(["doctor", "--json", "driver"]))?;
    let document: Value = serde_json::from_str(&ran.stdout).map_err(|_| ran.failure())?;
    let checks = document["checks"].as_array().cloned().unwrap_or_default();
    let with = |status: &str| {
        checks
            .iter()
            .filter(|check| check["status"] == status)
            .cloned()
            .collect::<Vec<_>>()
    };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let describe = |check: &Value| format!("{} {}", text(&check["id"]), text(&check["what"]));
    let problems: Vec<_> = with("error")
        .iter()
        .chain(&with("warning"))
        .map(describe)
        .collect();
    if ran.status.code().is_none_or(|code| code > 1) || !with("error").is_empty() {
        return failed(problems.join("; "));
    }
    let notes: Vec<_> = with("note")
        .iter()
        .map(|check| text(&check["id"]))
        .collect();
    let problems = if problems.is_empty() {
        "no problems".to_owned()
    } else {
        problems.join("; ")
    };
    Ok(format!(
        "{} checks passed, {problems}; notes: {}",
        with("ok").len(),
        notes.join(", ")
    ))
}

pub fn nvml(bench: &Bench) -> Outcome {
    let ran = bench.run(bench.hook()?.args(["--debug", "info"]))?;
    let answered = ran
        .stderr
        .lines()
        .find_map(|line| line.split_once("NVML answered after "));
    let Some((_, time)) = answered else {
        return failed(ran.failure());
    };
    if !ran.status.success() {
        return failed(ran.failure());
    }
    let driver = bench.driver()?;
    let smi = match driver.smi(&["-L"], bench.left()) {
        Err(Stop::CannotRun(why)) => why,
        ran => format!("nvidia-smi -L took {} ms", ran?.time.as_millis()),
    };
    Ok(format!(
        "NVML answered after {time}; the command took {} ms, {} ms before the checks kept the GPUs initialized; {smi}",
        ran.time.as_millis(),
        driver.first_answer.as_millis()
    ))
}

/// A CUDA program keeps memory on the first GPU meanwhile.
pub fn processes(bench: &Bench) -> Outcome {
    bench.uvm()?;
    let driver = bench.driver()?;
    let kernels = bench.options.kit.join("image/cuda/kernels.ptx");
    let mut program = driver.on_host(&bench.options.program("cuda-check"));
    let mut holding = process::start(program.arg("hold").arg(kernels), b"", &bench.work)?;
    if !holding.wait_for("holding", bench.left()) {
        holding.kill();
        return cannot_run("no CUDA program runs on the host");
    }
    let listed = driver.smi(
        &["--query-compute-apps=pid", "--format=csv,noheader"],
        bench.left(),
    );
    let ran = bench.run(bench.hook()?.args(["ps", "--json"]));
    holding.kill();
    let listed = listed?.ok()?;
    let listed = BTreeSet::from_iter(listed.lines().map(str::trim)).len();
    if listed == 0 {
        return cannot_run("nvidia-smi lists no process here");
    }
    let document: Value = serde_json::from_str(&ran?.ok()?).map_err(|error| error.to_string())?;
    let mut counted = document["processes_outside"].as_u64().unwrap_or_default();
    for container in document["containers"].as_array().into_iter().flatten() {
        let processes = container["processes"].as_array();
        counted += processes.map_or(0, Vec::len) as u64;
    }
    if counted != listed as u64 {
        return failed(format!(
            "ps counts {counted} processes, nvidia-smi lists {listed}"
        ));
    }
    Ok(format!("{counted}, as nvidia-smi"))
}

/// Counts the calls of all processes but the first one.
pub fn nvml_calls(bench: &Bench) -> Outcome {
    let Some(strace) = process::find("strace") else {
        return cannot_run("strace is not installed");
    };
    let trace = bench.work.join("trace");
    let mut command = process::command(strace);
    command
        .args(["-f", "-qq", "-o"])
        .arg(&trace)
        .arg(bench.options.program("oci-nvidia-hook"));
    let ran = bench.run(
        command
            .arg("--config")
            .arg(&bench.driver()?.config)
            .arg("info"),
    )?;
    let text = std::fs::read_to_string(&trace).unwrap_or_default();
    std::fs::remove_file(&trace).ok();
    if text.is_empty() {
        return cannot_run(format!("strace does not work here: {}", ran.failure()));
    }
    if !ran.status.success() {
        return failed(ran.failure());
    }
    let mut calls: BTreeMap<&str, usize> = BTreeMap::new();
    let first = text.split(' ').next().unwrap_or_default();
    for line in text
        .lines()
        .filter(|line| line.split(' ').next() != Some(first))
    {
        let call = line
            .split_once(' ')
            .and_then(|(_, rest)| rest.trim_start().split_once('('))
            .map(|(call, _)| call);
        if let Some(call) =
            call.filter(|call| call.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'))
        {
            *calls.entry(call).or_default() += 1;
        }
    }
    let total: usize = calls.values().sum();
    let mut most: Vec<_> = calls.iter().collect();
    most.sort_by(|a, b| b.1.cmp(a.1));
    let most: Vec<_> = most
        .iter()
        .take(6)
        .map(|(call, count)| format!("{count} {call}"))
        .collect();
    let denied = text.matches(" = -1 EPERM").count() + text.matches(" = -1 EACCES").count();
    let limit = MOST_CALLS * bench.driver()?.gpus.len().max(1);
    if total == 0 || total > limit {
        return failed(format!(
            "{total} system calls, at most {limit}: {}",
            most.join(", ")
        ));
    }
    Ok(format!(
        "{total} system calls, {denied} denied: {}",
        most.join(", ")
    ))
}

/// A replaced device node is a change that the fingerprint contains. The replacement is in another mount over this mount namespace.
pub fn cache(bench: &Bench) -> Outcome {
    bench.isolated()?;
    let driver = bench.driver()?;
    if driver.gpus.iter().any(Gpu::lacks_mig_devices) {
        return cannot_run("the inventory is not cached while a GPU in MIG mode has no MIG device");
    }
    bench.run(bench.hook()?.arg("info"))?.ok()?;
    let asks = || -> Result<bool, Stop> {
        let ran = bench.run_with(bench.hook()?.args(["--debug", "plan", "-"]), REQUEST)?;
        if !ran.status.success() {
            return failed(ran.failure());
        }
        Ok(ran.stderr.contains("NVML answered"))
    };
    if asks()? {
        return failed("the next command asks NVML again");
    }
    let node = driver.nodes.join("nvidiactl");
    let stat = std::fs::metadata(&node).map_err(|error| format!("{node:?}: {error}"))?;
    let other = bench.work.join("other-nvidiactl");
    // Another mode, which does not take away access.
    let mode = (stat.mode() & 0o777) ^ 0o100;
    make_node(&other, &stat, mode)?;
    rustix::mount::mount_bind(&other, &node)
        .map_err(|error| format!("cannot cover {node:?}: {error}"))?;
    let changed = asks();
    rustix::mount::unmount(&node, UnmountFlags::DETACH)
        .map_err(|error| format!("cannot uncover {node:?}: {error}"))?;
    std::fs::remove_file(&other).ok();
    if !changed? {
        return failed("the mode of nvidiactl changed, and the cached inventory was used");
    }
    bench.run(bench.hook()?.arg("info"))?.ok()?;
    Ok("used while nothing changes, discarded when the mode of nvidiactl changed".to_owned())
}

fn make_node(path: &Path, like: &std::fs::Metadata, mode: u32) -> Result<(), String> {
    use rustix::fs::{CWD, FileType, Mode};
    let error = |error: rustix::io::Errno| format!("cannot create {path:?}: {error}");
    rustix::fs::mknodat(
        CWD,
        path,
        FileType::CharacterDevice,
        Mode::from_raw_mode(mode),
        like.rdev(),
    )
    .map_err(error)?;
    rustix::fs::chmod(path, Mode::from_raw_mode(mode)).map_err(error)
}

/// The kind, number, owner and mode of each node of the driver, by name.
type Nodes = BTreeMap<PathBuf, String>;

fn nodes(dir: &Path, below: &Path, found: &mut Nodes) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = below.join(entry.file_name());
        let Ok(stat) = entry.metadata() else { continue };
        if !name.to_string_lossy().starts_with("nvidia") {
            continue;
        }
        if stat.is_dir() {
            nodes(&entry.path(), &name, found);
        } else if stat.file_type().is_char_device() {
            let (major, minor) = (
                rustix::fs::major(stat.rdev()),
                rustix::fs::minor(stat.rdev()),
            );
            let what = format!(
                "{major}:{minor} {}:{} {:o}",
                stat.uid(),
                stat.gid(),
                stat.mode() & 0o777
            );
            found.insert(name, what);
        }
    }
}

/// In an empty `/dev`, `prepare` creates the nodes. The driver's modules must be loaded, because no module can be loaded here.
pub fn prepare(bench: &Bench) -> Outcome {
    bench.isolated()?;
    let driver = bench.driver()?;
    bench.uvm()?;
    if driver
        .kernel_file("driver/nvidia/params")
        .contains("ModifyDeviceFiles: 0")
    {
        return cannot_run(
            "the driver is configured so that no program creates its nodes (ModifyDeviceFiles: 0)",
        );
    }
    let mut before = Nodes::new();
    nodes(&driver.nodes, Path::new(""), &mut before);
    isolation::separate(&driver.nodes, &bench.work.join("stage"), |name| {
        !name.starts_with("nvidia")
    })?;
    let ran = bench
        .hook()
        .and_then(|mut hook| Ok(bench.run(hook.args(["prepare", "--root"]).arg(&driver.root))?));
    let mut after = Nodes::new();
    nodes(&driver.nodes, Path::new(""), &mut after);
    rustix::mount::unmount(&driver.nodes, UnmountFlags::DETACH)
        .map_err(|error| format!("cannot uncover: {error}"))?;
    let ran = ran?;
    // The owner and mode in the parameters of the module do not apply to the nodes for CUDA, which rules of udev can set.
    let is_known = |name: &Path, was: &str, is: &str| {
        let number = |what: &str| what.split(' ').next().map(str::to_owned);
        was == is || (name.to_string_lossy().starts_with("nvidia-uvm") && number(was) == number(is))
    };
    let different: Vec<_> = after
        .iter()
        .filter_map(|(name, what)| Some((name, what, before.get(name)?)))
        .filter(|(name, what, was)| !is_known(name, was, what))
        .map(|(name, what, was)| format!("{} is {what} instead of {was}", name.display()))
        .collect();
    let needed = driver.gpus.iter().map(|gpu| format!("nvidia{}", gpu.minor));
    let needed = needed.chain(["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"].map(str::to_owned));
    let missing: Vec<_> = needed
        .filter(|name| !after.contains_key(Path::new(name)))
        .collect();
    if !different.is_empty() || !missing.is_empty() {
        return failed(format!(
            "missing: {missing:?}; {}; {}",
            different.join("; "),
            ran.failure()
        ));
    }
    let more: Vec<_> = after
        .keys()
        .filter(|name| !before.contains_key(*name))
        .map(|name| name.display().to_string())
        .collect();
    let more = if more.is_empty() {
        String::new()
    } else {
        format!("; the machine lacks {}", more.join(", "))
    };
    Ok(format!(
        "{} nodes, with the numbers, owners and modes of the machine{more}",
        after.len()
    ))
}
