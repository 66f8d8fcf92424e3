//! Checks of container engines and their hook files.

use std::collections::BTreeMap;
use std::path::Path;

use cdi_spec::name::is_nvidia;
use findings::catalog;
use nvidia_host::timeouts;

use super::check::{Check, count, or_ok};
use super::facts::Facts;
use engines::cdi::list_paths;
use engines::hooks::{self, HookEntry};
use engines::status::EngineStatus;
use engines::{Engine, EngineKind, hook_args, status};

fn installed(facts: &Facts) -> impl Iterator<Item = &Engine> {
    let engines = facts.engines.iter();
    engines.filter(|engine| engine.program.is_some())
}

/// Returns the installed engines that read hooks directories.
pub(super) fn with_hooks(facts: &Facts) -> impl Iterator<Item = &Engine> {
    installed(facts).filter(|engine| engine.kind != EngineKind::Docker)
}

pub(super) fn hook(facts: &Facts) -> Vec<Check> {
    let mut checks = Vec::new();
    for engine in with_hooks(facts) {
        checks.push(in_engine(facts, engine));
    }
    for file in facts.engines.iter().flat_map(|engine| &engine.unseen) {
        checks.push(Check::skipped(format!("this user cannot read {file:?}")));
    }
    or_ok(
        checks,
        Check::skipped("neither Podman nor CRI-O is installed"),
    )
}

/// Reports for each way to request GPUs whether it works with this engine.
fn in_engine(facts: &Facts, engine: &Engine) -> Check {
    let status = status::judge(engine, &facts.installed);
    let stops = status::stops(engine);
    let others = if stops {
        String::new()
    } else {
        other_ways(facts, engine, &status)
    };
    if !status.active {
        let what = format!("{}: {}{others}", engine.kind, status.why);
        return if stops {
            Check::of(&catalog::ENGINE_STOPPED, what, status.fix)
        } else if status.nri {
            Check::ok(what)
        } else {
            Check::of(&catalog::NOT_ACTIVE, what, status.fix)
        };
    }
    let files = status.files().join(" and ");
    let active = format!("{} starts the hook, from {files}", engine.kind);
    if status.why.is_empty() {
        return Check::ok(active + &others);
    }
    let fix = match (status.fix.is_empty(), status.hooks.first()) {
        (true, Some(hook)) => {
            let file = hook.file.display();
            format!("set \"when\": {{\"always\": true}} in {file}")
        }
        _ => status.fix,
    };
    let what = format!("{active}, {}{others}", status.why);
    Check::of(&catalog::CONDITIONAL, what, fix)
}

/// Describes the ways to request GPUs that work without the hook.
fn other_ways(facts: &Facts, engine: &Engine, status: &EngineStatus) -> String {
    let mut ways = match usable_cdi_devices(facts, engine) {
        0 => "; it has no CDI device for GPUs".to_owned(),
        usable => format!("; {} can be requested by name", count(usable, "CDI device")),
    };
    if status.nri && status.active {
        ways += "; the NRI plugin runs";
    }
    if let Some(plugin) = &facts.kubelet_plugin
        && engine.kind == EngineKind::Crio
        && plugin.idle().is_none()
    {
        ways += "; the kubelet plugin serves the kubelet";
    }
    ways
}

/// Reports whether at least one engine starts the hook, or gives GPUs to containers that request them with the variable in another way.
pub(super) fn any_starts_the_hook(facts: &Facts) -> bool {
    with_hooks(facts).any(|engine| {
        let status = status::judge(engine, &facts.installed);
        status.active || status.nri
    })
}

/// Checks the timeouts of hook files. With a shorter one, the runtime kills the hook before it can report that NVML hangs.
pub(super) fn timeouts(facts: &Facts) -> Vec<Check> {
    let nvml = facts.settings().nvml_timeout;
    let needed = timeouts::longest_call(nvml).as_secs();
    let mut files = BTreeMap::new();
    for entry in with_hooks(facts).flat_map(status::ours) {
        files.insert(&entry.file, entry.hook.timeout);
    }
    if files.is_empty() {
        return vec![Check::skipped("no engine starts the hook")];
    }
    let enough = needed.max(timeouts::HOOK.as_secs());
    let mut outcomes = Vec::new();
    for (file, timeout) in files {
        let name = file.display();
        let (what, fix) = match timeout {
            Some(timeout) if timeout >= i64::try_from(needed).unwrap_or(i64::MAX) => continue,
            Some(timeout) => (
                format!(
                    "{file:?} kills the hook after {timeout} s, but with nvml-timeout = {} it can take {needed} s",
                    nvml.as_secs()
                ),
                format!(
                    "set \"timeout\": {enough} in {name}, or a shorter nvml-timeout in config.toml"
                ),
            ),
            None => (
                format!(
                    "{file:?} has no timeout: the engine waits without a limit for a hook that hangs"
                ),
                format!("set \"timeout\": {enough} in the \"hook\" of {name}"),
            ),
        };
        outcomes.push(Check::of(&catalog::TIMEOUTS, what, fix));
    }
    or_ok(
        outcomes,
        Check::ok("the hook files have timeouts that are long enough for the driver"),
    )
}

/// Returns the number of usable CDI devices for GPUs, with which an engine needs no hook.
fn usable_cdi_devices(facts: &Facts, engine: &Engine) -> usize {
    let mut views = facts.cdi.iter();
    let Some(view) = views.find(|view| view.dirs == engine.settings.cdi_dirs) else {
        return 0;
    };
    let verdicts = view.verdicts.iter();
    let usable = verdicts.filter(|verdict| verdict.ok && is_nvidia(&verdict.subject));
    usable.count()
}

pub(super) fn second_hook(facts: &Facts) -> Vec<Check> {
    let mut outcomes = Vec::new();
    for engine in with_hooks(facts) {
        for entry in &engine.hooks.entries {
            if !entry.is_nvidias() {
                continue;
            }
            let what = format!(
                "{} starts {}, from {}",
                engine.kind,
                entry.hook.path.display(),
                entry.file.display()
            );
            let fix = format!(
                "remove NVIDIA's package, or: mv {0} {0}.off",
                entry.file.display()
            );
            outcomes.push(Check::of(&catalog::SECOND_HOOK, what, fix));
        }
        let mut ours =
            status::ours(engine).filter(|entry| hook_args::removed_stage(&entry.hook).is_none());
        if let (Some(first), Some(second)) = (ours.next(), ours.next()) {
            outcomes.push(twice(engine, first, second));
        }
    }
    or_ok(outcomes, Check::ok("no engine starts another NVIDIA hook"))
}

/// Returns the finding for two files that start the hook. A package installs its own file again with the next update, so the fix names the
/// other one.
fn twice(engine: &Engine, first: &HookEntry, second: &HookEntry) -> Check {
    let is_packaged = second.file == Path::new(hooks::PACKAGED);
    let other = if is_packaged { first } else { second };
    let (one, two) = (first.file.display(), second.file.display());
    let what = format!(
        "{} starts the hook twice, from {one} and {two}",
        engine.kind
    );
    Check::of(
        &catalog::SECOND_HOOK,
        what,
        format!("rm {}", other.file.display()),
    )
}

pub(super) fn hook_env(facts: &Facts) -> Vec<Check> {
    or_ok(
        facts.without_env.iter().cloned().map(Check::found),
        Check::ok("the environment of containers reaches no hook of a hook file or a CDI spec"),
    )
}

pub(super) fn nvidias_toolkit(facts: &Facts) -> Vec<Check> {
    let mut outcomes = Vec::new();
    if !facts.nvidias.is_empty() {
        outcomes.push(Check::of(
            &catalog::NVIDIA_BESIDE,
            format!(
                "NVIDIA's container toolkit is also installed: {}",
                list_paths(&facts.nvidias)
            ),
            "remove nvidia-container-toolkit and libnvidia-container-tools, unless other programs need them",
        ));
    }
    if !facts.second_writers.is_empty() {
        let units = facts.second_writers.join(" ");
        outcomes.push(Check::of(
            &catalog::SECOND_WRITER,
            format!("the services of NVIDIA's container toolkit also write \"/var/run/cdi/nvidia.yaml\": {units}"),
            format!("systemctl disable --now {units}"),
        ));
    }
    or_ok(
        outcomes,
        Check::ok("NVIDIA's container toolkit is not installed"),
    )
}

pub(super) fn exposed(facts: &Facts) -> Check {
    let crio = installed(facts)
        .any(|engine| engine.kind == EngineKind::Crio && status::ours(engine).next().is_some());
    if !crio {
        return Check::skipped("the hook is not active in CRI-O");
    }
    if !facts.settings().accept_envvar_when_unprivileged {
        return Check::ok("pods get only the GPUs that the scheduler assigned to them");
    }
    Check::of(
        &catalog::EXPOSED,
        "every pod can request all GPUs with NVIDIA_VISIBLE_DEVICES",
        "write the lines accept-nvidia-visible-devices-envvar-when-unprivileged = false and \
         accept-nvidia-visible-devices-as-volume-mounts = true to \
         /etc/nvidia-container-runtime/config.toml.d/50-locked.toml",
    )
}
