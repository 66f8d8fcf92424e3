//! Checks of container engines, their runtimes, cgroups and CDI specs.

use std::collections::BTreeMap;
use std::path::Path;

use base::report::Kind;
use cdi_spec::name::is_nvidia;
use findings::catalog;
use nvidia_host::timeouts;

use super::check::{Check, count, or_ok};
use super::facts::{CdiView, Facts};
use engines::cdi::list_paths;
use engines::cdi_check::CdiVerdict;
use engines::hook_file::PRECREATE;
use engines::hooks::{self, HookEntry};
use engines::runtime::Runtime;
use engines::status::{EngineStatus, Replaced};
use engines::{Engine, EngineKind, Version, status};

/// The first runc that does not need links in /dev/char.
const RUNC_WITHOUT_DEV_CHAR: Version = Version(1, 1, 7);
/// The fix for device rules that do not last: the engine adds the devices to config.json.
const LIST_DEVICES: &str = "have the engine list the devices, with \"oci-nvidia-hook cdi generate\" and --device nvidia.com/gpu=all, or with the precreate stage of Podman";

fn installed(facts: &Facts) -> impl Iterator<Item = &Engine> {
    let engines = facts.engines.iter();
    engines.filter(|engine| engine.program.is_some())
}

/// Returns the installed engines that read hooks directories.
fn with_hooks(facts: &Facts) -> impl Iterator<Item = &Engine> {
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

/// Checks that no hooks directory of the administrator, and not the packages' own for Podman, is lost because of another list.
pub(super) fn hooks_dir(facts: &Facts) -> Vec<Check> {
    let outcomes = with_hooks(facts).flat_map(|engine| lost_dirs(facts, engine));
    or_ok(
        outcomes,
        Check::ok("engines read all hooks directories that their configuration lists"),
    )
}

fn lost_dirs(facts: &Facts, engine: &Engine) -> Vec<Check> {
    let Some(in_force) = &engine.settings.hooks_from else {
        return Vec::new();
    };
    let fix = |dir: &Path| format!("add {dir:?} to hooks_dir in {}", in_force.display());
    let mut outcomes = Vec::new();
    for Replaced { dir, file } in &engine.replaced {
        let what = format!(
            "{}: the hooks in {dir:?} do not run: {in_force:?} replaces hooks_dir of {file:?}",
            engine.kind
        );
        outcomes.push(Check::of(&catalog::HOOKS_REPLACED, what, fix(dir)));
    }
    let dir = Path::new(hooks::PODMAN_DIR);
    let has_files = facts.installed.iter().any(|file| file.starts_with(dir));
    let is_read = engine.settings.hooks_dirs.iter().any(|known| known == dir);
    if engine.kind.is_podman() && has_files && !is_read && outcomes.is_empty() {
        let what = format!(
            "{}: the hook file in {dir:?} has no effect: {in_force:?} sets hooks_dir",
            engine.kind
        );
        outcomes.push(Check::of(&catalog::HOOKS_REPLACED, what, fix(dir)));
    }
    outcomes
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
        ways += "; the device plugin serves the kubelet";
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
        // A container gets its GPUs at precreate or at a later stage, so that one file for each of them is usual.
        for at_precreate in [true, false] {
            let mut ours =
                status::ours(engine).filter(|entry| entry.hook.is_at(PRECREATE) == at_precreate);
            if let (Some(first), Some(second)) = (ours.next(), ours.next()) {
                outcomes.push(twice(engine, first, second));
            }
        }
    }
    or_ok(outcomes, Check::ok("no engine starts another NVIDIA hook"))
}

/// Returns the finding for two files that start the hook. A package installs its own file again with the next update, so the fix names the
/// other one.
fn twice(engine: &Engine, first: &HookEntry, second: &HookEntry) -> Check {
    let mut packaged = hooks::PACKAGED.into_iter();
    let is_packaged = packaged.any(|file| second.file == Path::new(file));
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

/// Returns whether the hook changes device cgroups: not those of rootless containers, which have none, and not at precreate.
fn adds_devices(engine: &Engine) -> bool {
    let at_precreate = status::ours(engine).any(|entry| entry.hook.is_at(PRECREATE));
    !matches!(engine.kind, EngineKind::PodmanOf(_))
        && !at_precreate
        && status::ours(engine).next().is_some()
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
                "oci-nvidia-hook prepare; or install runc 1.1.7 or newer",
            )
        }
        (None, _) => Check::ok("no runtime of this host needs links in /dev/char"),
        (Some(_), None) => Check::ok("the device nodes have their links in /dev/char"),
    }
}

pub(super) fn cdi(facts: &Facts) -> Vec<Check> {
    /// A broken file affects all devices of a host.
    const MOST: usize = 3;
    let mut checks = Vec::new();
    for view in &facts.cdi {
        let problems = spec_problems(view, MOST);
        if problems.is_empty() {
            checks.push(usable_devices(view));
        }
        checks.extend(problems);
    }
    or_ok(
        checks,
        Check::skipped("no engine that reads CDI is installed"),
    )
}

fn usable_devices(view: &CdiView) -> Check {
    let what = match view.verdicts.len() {
        0 => {
            let dirs = list_paths(&view.dirs);
            format!("no CDI devices in {dirs}; \"oci-nvidia-hook cdi generate\" writes a spec")
        }
        good => format!("{} can use {}", view.engines, count(good, "CDI device")),
    };
    Check::ok(what)
}

/// Returns at most `most` findings of a kind.
fn spec_problems(view: &CdiView, most: usize) -> Vec<Check> {
    let mut checks = Vec::new();
    for conflict in view.conflicts.iter().take(most) {
        checks.push(Check::found(conflict.clone()));
    }
    let mut bad: Vec<_> = view.verdicts.iter().filter(|verdict| !verdict.ok).collect();
    bad.sort_by_key(|verdict| !verdict.denied);
    let causes = causes(&bad);
    for cause in causes.iter().take(most) {
        let [first, others @ ..] = cause.as_slice() else {
            continue;
        };
        let subject = if others.is_empty() {
            first.subject.clone()
        } else {
            count(cause.len(), "device")
        };
        let what = format!("{}: {subject}: {}", view.engines, first.reason);
        checks.push(Check::of(problem(first), what, first.hint.clone()));
    }
    let more: Vec<_> = causes.iter().skip(most).flatten().collect();
    if let Some(next) = more.first() {
        let what = format!("{} with other problems", count(more.len(), "more device"));
        let fix = "run \"oci-nvidia-hook cdi check\", which prints a hint for each device";
        checks.push(Check::of(problem(next), what, fix));
    }
    if let Some(verdict) = view.verdicts.iter().find(|verdict| verdict.root_only) {
        checks.push(Check::of(
            &catalog::SPEC_USELESS,
            format!("{}: {}", verdict.file, verdict.reason),
            verdict.hint.clone(),
        ));
    }
    if let Some(verdict) = view.verdicts.iter().find(|verdict| verdict.outdated) {
        checks.push(Check::of(
            &catalog::SPEC_OUTDATED,
            verdict.reason.clone(),
            verdict.hint.clone(),
        ));
    }
    checks
}

/// Groups devices that have the same problem and the same fix, in their order: one cause is one line.
fn causes<'v>(bad: &[&'v CdiVerdict]) -> Vec<Vec<&'v CdiVerdict>> {
    let mut causes: Vec<Vec<&CdiVerdict>> = Vec::new();
    for verdict in bad {
        let is_same = |cause: &&mut Vec<&CdiVerdict>| {
            let first = cause.first();
            first.is_some_and(|first| {
                (&first.reason, &first.hint) == (&verdict.reason, &verdict.hint)
            })
        };
        match causes.iter_mut().find(is_same) {
            Some(cause) => cause.push(verdict),
            None => causes.push(vec![verdict]),
        }
    }
    causes
}

/// Returns the finding for a device that containers cannot or may not have.
fn problem(verdict: &CdiVerdict) -> &'static Kind {
    if verdict.denied {
        &catalog::SPEC_DENIED
    } else {
        &catalog::SPEC_USELESS
    }
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
