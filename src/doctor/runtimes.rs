//! Checks of the runtimes that the engines start, and of the cgroups in which they create containers.

use engines::runtime::Runtime;
use engines::{Engine, EngineKind, Version, status};
use findings::catalog;

use super::check::{Check, or_ok};
use super::engines::with_hooks;
use super::facts::Facts;

/// The first runc that does not need links in /dev/char.
const RUNC_WITHOUT_DEV_CHAR: Version = Version(1, 1, 7);
/// The fix for device rules that do not last: the engine adds the devices to config.json.
const LIST_DEVICES: &str = "have the engine list the devices, with \"oci-nvidia-hook cdi generate\" and --device nvidia.com/gpu=all";

fn runtimes(facts: &Facts) -> Vec<(&Engine, &Runtime)> {
    let mut runtimes = Vec::new();
    for engine in with_hooks(facts) {
        if let Some(runtime) = &engine.runtime {
            runtimes.push((engine, runtime));
        }
    }
    runtimes
}

/// Returns whether the engine lets systemd manage cgroups.
fn by_systemd(facts: &Facts, engine: &Engine) -> bool {
    match engine.settings.cgroup_manager.as_deref() {
        Some(manager) => manager == "systemd",
        None => facts.systemd,
    }
}

/// Returns whether the hook changes device cgroups. Rootless containers have none.
fn adds_devices(engine: &Engine) -> bool {
    let is_rootless = matches!(engine.kind, EngineKind::PodmanOf(_));
    !is_rootless && status::ours(engine).next().is_some()
}

pub(super) fn runtime(facts: &Facts) -> Vec<Check> {
    let mut checks = Vec::new();
    for (engine, runtime) in runtimes(facts) {
        checks.push(runtime_of(engine, runtime));
    }
    or_ok(
        checks,
        Check::skipped("neither Podman nor CRI-O is installed"),
    )
}

fn runtime_of(engine: &Engine, runtime: &Runtime) -> Check {
    let Some(program) = &runtime.program else {
        let what = format!("{}: the runtime {} is missing", engine.kind, runtime.name);
        let from = if engine.kind == EngineKind::Crio {
            "default_runtime in crio.conf"
        } else {
            "runtime in containers.conf"
        };
        return Check::of(
            &catalog::NO_RUNTIME,
            what,
            format!("install {}, or change {from}", runtime.name),
        );
    };
    let version = match runtime.version {
        Some(version) => version.to_string(),
        None => "of unknown version".to_owned(),
    };
    Check::ok(format!(
        "{} starts containers with {} ({} {version})",
        engine.kind,
        program.display(),
        runtime.name
    ))
}

pub(super) fn cgroups(facts: &Facts) -> Check {
    let Some(v2) = facts.cgroup_v2 else {
        return Check::skipped("no device cgroups are mounted at /sys/fs/cgroup");
    };
    let mut engines = with_hooks(facts);
    let at_risk = engines.find(|engine| adds_devices(engine) && by_systemd(facts, engine));
    if !v2 && let Some(engine) = at_risk {
        let what = format!(
            "{}: systemd manages cgroups of version 1, and removes the rules of the hook when it reloads its configuration",
            engine.kind
        );
        return Check::of(&catalog::RELOAD_CUTS, what, LIST_DEVICES);
    }
    Check::ok(format!(
        "the host uses cgroup version {}",
        if v2 { 2 } else { 1 }
    ))
}

pub(super) fn dev_char(facts: &Facts) -> Check {
    if facts.driver.nodes.is_empty() {
        return Check::skipped("the device nodes are missing");
    }
    let mut runtimes = runtimes(facts).into_iter();
    let needing = runtimes.find(|(engine, runtime)| {
        let version = runtime.version.unwrap_or(RUNC_WITHOUT_DEV_CHAR);
        runtime.name == "runc" && version < RUNC_WITHOUT_DEV_CHAR && by_systemd(facts, engine)
    });
    match (needing, facts.driver.without_link.first()) {
        (Some((engine, runtime)), Some(node)) => {
            let version = runtime.version.unwrap_or_default();
            let what = format!(
                "{}: runc {version} denies access to {node:?}, which has no link in /dev/char",
                engine.kind
            );
            Check::of(
                &catalog::DEV_CHAR,
                what,
                "run \"oci-nvidia-hook prepare\", or install runc 1.1.7 or newer",
            )
        }
        (None, _) => Check::ok("no runtime of this host needs links in /dev/char"),
        (Some(_), None) => Check::ok("the device nodes have their links in /dev/char"),
    }
}
