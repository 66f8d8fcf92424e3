//! Containers that get GPUs from the hook, or from CDI.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cdi_spec::spec::{ContainerEdits, Spec};

use crate::bench::Bench;
use crate::check::{Outcome, Stop, cannot_run, failed};
use crate::container::Container;
use crate::process::{self, Ran};
use crate::{cdi, smi};

/// The fields of a GPU that do not change while the checks run.
const FIELDS: &str = "--query-gpu=index,uuid,name,memory.total,driver_version,pci.bus_id";
const FORMAT: &str = "--format=csv,noheader";

/// The words with which a container runs the CUDA program.
const CUDA: [&str; 3] = ["cuda-check", "vector-add", "/cuda/kernels.ptx"];

/// The user of the checks with another user than root.
pub const USER: u32 = 1000;

/// How a container gets its GPUs.
type Mode = fn(&Bench, Container<'_>) -> Result<Ran, Stop>;

fn by_hook(bench: &Bench, container: Container<'_>) -> Result<Ran, Stop> {
    let (device, config) = (bench.device()?, &bench.driver()?.config);
    Ok(container.gpus(&device, config).run()?)
}

/// As an engine does it: config.json has the edits of the spec, and the runtime applies them.
fn by_cdi(bench: &Bench, container: Container<'_>) -> Result<Ran, Stop> {
    let edits = edits(bench, &bench.driver()?.config, &bench.device()?)?;
    Ok(container.edits(edits).run()?)
}

/// Returns the edits for a device in the spec that the hook generates.
pub fn edits(bench: &Bench, config: &Path, device: &str) -> Result<ContainerEdits, Stop> {
    let hook = bench.options.program("oci-nvidia-hook");
    let mut generate = process::command(&hook);
    generate
        .arg("--config")
        .arg(config)
        .args([
            "cdi",
            "generate",
            "--output",
            "-",
            "--format",
            "json",
            "--spec-dir",
        ])
        .arg(bench.work.join("no-specs"));
    let text = bench.run(generate.arg("--hook-path").arg(hook))?.ok()?;
    let spec: Spec =
        serde_json::from_str(&text).map_err(|error| format!("invalid spec: {error}"))?;
    Ok(cdi::edits_of(&spec, device)?)
}

pub fn smi(bench: &Bench) -> Outcome {
    bench.smi()?;
    let driver = bench.driver()?;
    let in_container = |words: &[&str]| -> Result<String, Stop> {
        let container = bench
            .container("smi")?
            .args(&[&["nvidia-smi"], words].concat());
        Ok(container.gpus("all", &driver.config).run()?.ok()?)
    };
    compare(bench, &in_container)
}

fn compare(bench: &Bench, in_container: &dyn Fn(&[&str]) -> Result<String, Stop>) -> Outcome {
    let driver = bench.driver()?;
    let mut seen = Vec::new();
    for words in [&["-L"][..], &[FIELDS, FORMAT]] {
        let host = driver.smi(words, bench.left())?.ok()?;
        let container = in_container(words)?;
        if host.is_empty() || host != container {
            return failed(format!(
                "nvidia-smi {} prints {container:?} instead of {host:?}",
                words.join(" ")
            ));
        }
        seen.push(format!(
            "{} byte-equal",
            if words == ["-L"] { "-L" } else { "six fields" }
        ));
    }
    let host = driver.smi(&[], bench.left())?.ok()?;
    seen.push(format!(
        "the table {}",
        smi::same_table(&host, &in_container(&[])?)?
    ));
    Ok(seen.join(", "))
}

/// Returns what the CUDA program saw.
fn passed(ran: Ran) -> Outcome {
    let text = ran.ok()?;
    match text.lines().last() {
        Some("Test PASSED") => Ok(text.lines().collect::<Vec<_>>().join("; ")),
        _ => failed(text),
    }
}

pub fn cuda_on_host(bench: &Bench) -> Outcome {
    bench.uvm()?;
    bench.device()?;
    let kernels = bench.options.kit.join("image/cuda/kernels.ptx");
    let mut program = bench
        .driver()?
        .on_host(&bench.options.program("cuda-check"));
    passed(bench.run(program.arg("vector-add").arg(kernels))?)
}

fn cuda_in(
    bench: &Bench,
    name: &str,
    mode: Mode,
    change: fn(Container<'_>) -> Container<'_>,
) -> Outcome {
    let device = bench.device()?;
    let text = match passed(mode(bench, change(bench.container(name)?.args(&CUDA)))?) {
        // A machine without a fabric manager, for example. The check cuda-host fails then.
        Err(Stop::Failed(why)) if matches!(cuda_on_host(bench), Err(Stop::Failed(_))) => {
            return cannot_run(format!("it fails on the host, too: {why}"));
        }
        text => text?,
    };
    if !bench.driver()?.has_smi() {
        return Ok(text);
    }
    let listed = mode(
        bench,
        change(bench.container(name)?.args(&["nvidia-smi", "-L"])),
    )?
    .ok()?;
    if !listed.contains(&device) {
        return failed(format!("nvidia-smi -L lists {listed:?}"));
    }
    Ok(format!("{text}; nvidia-smi lists the GPU"))
}

pub fn cuda(bench: &Bench) -> Outcome {
    cuda_in(bench, "cuda", by_hook, |container| container)
}

pub fn user(bench: &Bench) -> Outcome {
    cuda_in(bench, "user", by_hook, |container| container.user(USER))
}

pub fn read_only(bench: &Bench) -> Outcome {
    cuda_in(bench, "read-only", by_hook, |container| {
        container.read_only()
    })
}

pub fn user_namespace(bench: &Bench) -> Outcome {
    has_user_namespaces(bench)?;
    cuda_in(bench, "user-namespace", by_hook, |container| {
        container.user_namespace()
    })
}

/// Starts a container without a GPU in a user namespace.
fn has_user_namespaces(bench: &Bench) -> Result<(), Stop> {
    let ran = bench
        .container("no-gpu")?
        .args(&["true"])
        .user_namespace()
        .run()?;
    match ran.status.success() {
        true => Ok(()),
        false => Err(Stop::CannotRun(format!(
            "no container starts in a user namespace: {}",
            ran.failure()
        ))),
    }
}

pub fn cdi(bench: &Bench) -> Outcome {
    let all = edits(bench, &bench.driver()?.config, "all")?;
    let in_container = |words: &[&str]| -> Result<String, Stop> {
        let container = bench
            .container("cdi-smi")?
            .args(&[&["nvidia-smi"], words].concat());
        Ok(container.edits(all.clone()).run()?.ok()?)
    };
    // A spec gives a GPU in MIG mode only with its MIG devices.
    let smi = match bench.driver()? {
        driver if !driver.has_smi() => "nvidia-smi is not installed".to_owned(),
        driver
            if driver
                .gpus
                .iter()
                .any(|gpu| gpu.is_mig && gpu.mig_devices.is_empty()) =>
        {
            "nvidia-smi not compared, because a GPU in MIG mode has no MIG device".to_owned()
        }
        _ => compare(bench, &in_container)?,
    };
    Ok(format!(
        "{smi}; {}",
        cuda_in(bench, "cdi", by_cdi, |container| container)?
    ))
}

pub fn cdi_user(bench: &Bench) -> Outcome {
    cuda_in(bench, "cdi-user", by_cdi, |container| container.user(USER))
}

pub fn cdi_read_only(bench: &Bench) -> Outcome {
    cuda_in(bench, "cdi-read-only", by_cdi, |container| {
        container.read_only()
    })
}

/// The runtime cannot create device nodes in a user namespace, and mounts those with the same path of the host instead.
pub fn cdi_user_namespace(bench: &Bench) -> Outcome {
    has_user_namespaces(bench)?;
    let nodes = &bench.driver()?.nodes;
    if nodes != Path::new("/dev") {
        return cannot_run(format!(
            "in a user namespace, the runtime mounts the nodes in /dev, and those of the driver are in {}",
            nodes.display()
        ));
    }
    let mode = std::fs::metadata(nodes.join("nvidiactl"))
        .map_err(|error| error.to_string())?
        .mode();
    if mode & 0o006 != 0o006 {
        return cannot_run(
            "in a user namespace, the runtime mounts the host's nodes, which only a group can open here",
        );
    }
    cuda_in(bench, "cdi-user-namespace", by_cdi, |container| {
        container.user_namespace()
    })
}

/// The hook under NVIDIA's name, next to the program that loads NVML.
pub fn compat(bench: &Bench) -> Outcome {
    bench.isolated()?;
    let driver = bench.driver()?;
    let dir = bench.work.join("compat");
    std::fs::create_dir_all(&dir).map_err(|error| error.to_string())?;
    for (from, to) in [
        ("oci-nvidia-nvml", "oci-nvidia-nvml"),
        ("oci-nvidia-hook", "nvidia-container-cli"),
    ] {
        std::fs::copy(bench.options.program(from), dir.join(to))
            .map_err(|error| format!("{from}: {error}"))?;
    }
    let list = |program: PathBuf, words: &[&str]| -> Result<String, Stop> {
        let mut command = process::command(program);
        Ok(bench.run(command.args(words))?.ok()?)
    };
    let root = format!("--root={}", driver.root.display());
    let theirs = list(
        dir.join("nvidia-container-cli"),
        &[&root, "list", "--libraries", "--binaries"],
    )?;
    let root = driver.root.display().to_string();
    let ours = list(
        bench.options.program("oci-nvidia-hook"),
        &["files", "--root", &root, "--libraries", "--binaries"],
    )?;
    if theirs.is_empty() || theirs != ours {
        return failed(format!(
            "nvidia-container-cli lists {theirs:?}, the hook {ours:?}"
        ));
    }
    Ok(format!("{} files", ours.lines().count()))
}
