//! Decides whether an engine starts our hook, from which file and at which stage, and if not, why. The functions are pure.

use std::path::{Path, PathBuf};

use serde::Serialize;

use base::tree::Tree;
use nvidia_host::config::Config;
use nvidia_host::host::{Roots, features};
use nvidia_host::mps::Entry;
use nvidia_host::{programs, timeouts};
use plugin_api::status::{KubeletPlugin, NriStatus, PluginStatus};

use super::cdi::{self, CdiSpec};
use super::hook_args::{REMOVED_STAGES, removed_stage};
use super::hook_file::Applies;
use super::hooks::{Execution, HookEntry};
use super::settings::{EngineSettings, HOOKS_DIR};
use super::{Engine, EngineKind, User, hook_args, hooks, inspect_engines};

/// The status of one engine. The field names are part of the JSON interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EngineStatus {
    /// `Podman as root`, `Podman of tux`, `CRI-O`, `Docker`
    pub engine: String,
    /// Whether the program of the engine exists
    pub installed: bool,
    /// The version of the engine, if it is known
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Whether the engine starts our hook
    pub active: bool,
    /// The files that make the engine start the hook, with their stages; for Docker, the program that it finds
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Started>,
    /// Whether the NRI plugin gives GPUs to its containers instead of the hook
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub nri: bool,
    /// The CDI specs from which it can add GPUs to containers
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cdi_specs: Vec<CdiSpec>,
    /// Why the engine does not start the hook, or the condition under which it does
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// The command or setting that fixes it
    #[serde(skip_serializing_if = "String::is_empty")]
    pub fix: String,
}

/// A hook file that makes the engine start our hook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Started {
    /// The file, or the program for Docker
    pub file: PathBuf,
    /// Stages at which the file starts the hook
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<String>,
}

impl EngineStatus {
    /// Returns each file with its stages: `/…/a.json (prestart)`.
    pub fn files(&self) -> Vec<String> {
        let files = self
            .hooks
            .iter()
            .map(|Started { file, stages }| match stages.as_slice() {
                [] => file.display().to_string(),
                stages => format!("{} ({})", file.display(), stages.join(", ")),
            });
        files.collect()
    }
}

/// The stages at which the hook sets up containers. It fails at [`REMOVED_STAGES`].
const SETUP_STAGES: [&str; 2] = ["prestart", "createRuntime"];

/// What `status` reports. The field names are part of the JSON interface.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    version: u32,
    /// The engines, installed or not
    pub engines: Vec<EngineStatus>,
    /// `None` if the device plugin for Kubernetes is not installed
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubelet_plugin: Option<PluginStatus>,
    /// `None` if our NRI plugin does not run
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nri: Option<NriStatus>,
    /// The devices next to the GPUs that this host has, such as the devices of GPUDirect
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub extra_devices: Vec<ExtraDevices>,
    /// The GPUs that are shared with MPS
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mps: Vec<Entry>,
}

/// The device nodes of a feature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExtraDevices {
    /// The name in config.toml, and the class of the CDI device
    pub name: &'static str,
    /// The nodes
    pub nodes: Vec<PathBuf>,
    /// Whether `[devices]` in config.toml denies them to containers
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub denied: bool,
}

impl ExtraDevices {
    /// Returns the devices of the host that the configuration names. If its roots cannot be opened, which `doctor` reports, the list is empty.
    #[must_use]
    pub fn of_host(config: &Config) -> Vec<Self> {
        let mut found = Vec::new();
        let Ok(roots) = Roots::open(config) else {
            return found;
        };
        for (feature, nodes) in features(&roots) {
            let nodes = nodes.into_iter().map(|name| Path::new("/dev").join(name));
            found.push(Self {
                name: feature.row().name,
                nodes: nodes.collect(),
                denied: config.devices.denied_features.has(feature),
            });
        }
        found
    }
}

impl Report {
    /// Judges each engine, and the device plugin, and reads the CDI specs of the engines. `installed` are the hook files on this host,
    /// including those that no engine reads.
    pub fn new(
        host: &Tree,
        engines: &[Engine],
        installed: &[PathBuf],
        plugin: Option<&KubeletPlugin>,
    ) -> Self {
        let mut statuses = Vec::new();
        for engine in engines {
            let mut status = judge(engine, installed);
            if status.installed {
                status.cdi_specs = cdi::specs(host, &engine.settings.cdi_dirs);
            }
            statuses.push(status);
        }
        Self {
            version: base::json::VERSION,
            engines: statuses,
            kubelet_plugin: plugin.map(KubeletPlugin::status),
            nri: plugin.and_then(|plugin| plugin.nri.clone()),
            extra_devices: Vec::new(),
            mps: Vec::new(),
        }
    }

    /// Returns the document of `status --json`.
    ///
    /// # Errors
    /// If a path is not UTF-8.
    pub fn document(&self) -> serde_json::Result<String> {
        Ok(base::json::pretty(self)? + "\n")
    }
}

/// Returns the entries that make an engine start our hook to set up containers, also at stages that it no longer has.
pub fn ours(engine: &Engine) -> impl Iterator<Item = &HookEntry> {
    let entries = engine.hooks.entries.iter().filter(|entry| entry.is_ours());
    entries.filter(|entry| {
        let mut stages = SETUP_STAGES.iter().chain(&REMOVED_STAGES);
        stages.any(|stage| entry.hook.is_at(stage))
    })
}

/// Returns the config.toml that the hook files of the installed engines name with `--config`, and the hook file: the first one, if there
/// are several.
#[must_use]
pub fn config_of_hooks(engines: &[Engine]) -> Option<(PathBuf, PathBuf)> {
    for engine in engines.iter().filter(|engine| engine.program.is_some()) {
        for entry in ours(engine) {
            let call = hook_args::parse_entry(&entry.hook.args);
            if let Some(config) = call.and_then(|call| call.config) {
                return Some((config.to_owned(), entry.file.clone()));
            }
        }
    }
    None
}

/// Returns the status of each engine of this host; with a user, also of the user's Podman.
pub fn report(host: &Tree, user: Option<User>) -> Report {
    let plugin = KubeletPlugin::inspect(host, user.is_none());
    Report::new(
        host,
        &inspect_engines(host, user),
        &hooks::installed(host),
        plugin.as_ref(),
    )
}

/// Judges whether an engine starts the hook. `installed` are the hook files on this host, including those that no engine reads.
pub fn judge(engine: &Engine, installed: &[PathBuf]) -> EngineStatus {
    let mut status = EngineStatus {
        engine: engine.kind.to_string(),
        installed: engine.program.is_some(),
        version: engine.version.map(|version| version.to_string()),
        ..EngineStatus::default()
    };
    if !status.installed {
        return status;
    }
    if let EngineKind::Docker = engine.kind {
        docker(engine, &mut status);
        return status;
    }
    let best =
        ours(engine).max_by_key(|entry| (entry.execution, entry.hook.applies == Applies::Always));
    for entry in ours(engine) {
        status.hooks.push(Started {
            file: entry.file.clone(),
            stages: entry.hook.stages.clone(),
        });
    }
    let problem = stopped(engine).or_else(|| match best {
        Some(entry) => unfit(entry),
        None => Some(missing(engine, installed)),
    });
    status.active = problem.is_none();
    if engine.nri && stopped(engine).is_none() && !status.active {
        status.nri = true;
        status.why = "the NRI plugin gives GPUs to its containers".to_owned();
    } else if let Some((why, fix)) = problem {
        (status.why, status.fix) = (why, fix);
    } else if let Some(Applies::If(condition)) = best.map(|entry| &entry.hook.applies) {
        status.why = format!("only if {condition}");
    } else if let Some(on_disk) = &engine.on_disk
        && !reads_one_of(on_disk, &status.hooks)
    {
        status.why = format!(
            "until its next start: its configuration sets the hooks directories {}",
            dirs_of(on_disk)
        );
        status.fix = format!(
            "add \"{}\" to hooks_dir in its configuration",
            parent(&status.hooks)
        );
    }
    status
}

fn reads_one_of(settings: &EngineSettings, hooks: &[Started]) -> bool {
    let mut dirs = hooks.iter().filter_map(|hook| hook.file.parent());
    dirs.any(|dir| settings.hooks_dirs.iter().any(|read| read == dir))
}

fn parent(hooks: &[Started]) -> String {
    let dir = hooks.first().and_then(|hook| hook.file.parent());
    let dir = dir.unwrap_or_else(|| Path::new(HOOKS_DIR));
    dir.display().to_string()
}

fn dirs_of(settings: &EngineSettings) -> String {
    if settings.hooks_dirs.is_empty() {
        "(none)".to_owned()
    } else {
        cdi::list_paths(&settings.hooks_dirs)
    }
}

/// Reports whether the engine starts no container at all.
#[must_use]
pub fn stops(engine: &Engine) -> bool {
    stopped(engine).is_some()
}

/// Returns why the engine starts no container at all, and the fix.
fn stopped(engine: &Engine) -> Option<(String, String)> {
    let starts = match engine.kind {
        // A running CRI-O watches the directories, and keeps its hooks if a file becomes invalid.
        EngineKind::Crio if engine.running => {
            "the engine uses the hooks that it read before, and cannot be restarted"
        }
        EngineKind::Crio => "the engine does not start",
        _ => "no container starts",
    };
    if let Some((file, why)) = &engine.settings.refused {
        return Some((
            format!("{starts}: {}: {why}", file.display()),
            fix_file(file),
        ));
    }
    if let Some((file, refusal)) = engine.hooks.refused.first() {
        let why = format!("{starts}: {}: {refusal}", file.display());
        return Some((why, fix_file(file)));
    }
    if engine.fails {
        let program = engine.kind.program();
        return Some((
            format!("{program} fails: {starts}"),
            format!("run \"{program} --version\" to see the error"),
        ));
    }
    ours(engine).find_map(fails)
}

/// Returns why the hook fails at each start because of its hook file, so that no container starts, and the fix.
fn fails(entry: &HookEntry) -> Option<(String, String)> {
    let (file, program) = (entry.file.display(), entry.program.display());
    if let Some(stage) = removed_stage(&entry.hook)
        && entry.hook.applies != Applies::Never
    {
        let why = format!(
            "no container that requests GPUs starts: {file} names the stage {stage:?}, which oci-nvidia-hook no longer has"
        );
        return Some((why, hooks::removal_of(&entry.file)));
    }
    let starts = match &entry.hook.applies {
        Applies::Never => return None,
        Applies::Always => "no container starts".to_owned(),
        Applies::If(condition) => format!("no container starts if {condition}"),
    };
    match entry.execution {
        Execution::Possible => {}
        Execution::Denied => {
            return Some((
                format!("{starts}: {file} names {program}, which is not executable"),
                format!("chmod 755 {program}"),
            ));
        }
        Execution::OtherFormat => {
            return Some((
                format!(
                    "{starts}: {file} names {program}, which is not a program for this machine"
                ),
                "reinstall the package oci-nvidia-hook".to_owned(),
            ));
        }
    }
    if let Some(timeout) = entry.hook.timeout
        && timeout <= 0
    {
        return Some((
            format!("{starts}: the timeout of {timeout} s in {file} kills the hook at once"),
            format!("set \"timeout\": {} in {file}", timeouts::HOOK.as_secs()),
        ));
    }
    if has_other_name(entry) {
        return None;
    }
    if hook_args::parse_entry(&entry.hook.args).is_some() || names_command(entry) {
        return None;
    }
    let fix = format!("set args and stages in {file} to the same stage");
    Some((
        format!("{starts}: the arguments in {file} are not a stage"),
        fix,
    ))
}

/// Reports whether the program is called with one of NVIDIA's names, with which it takes other arguments.
fn has_other_name(entry: &HookEntry) -> bool {
    let name = entry.hook.args.first().map(Path::new);
    name.is_some_and(programs::is_hook)
}

/// Reports whether the arguments are a command for people. The hook then does not fail, and sets up no container.
fn names_command(entry: &HookEntry) -> bool {
    let mut args = entry.hook.args.iter().skip(1);
    args.any(|arg| hook_args::COMMANDS.contains(&arg.as_str()))
}

fn fix_file(file: &Path) -> String {
    format!(
        "correct {0}, or disable it: \"mv {0} {0}.off\"",
        file.display()
    )
}

/// Returns why a hook entry has no effect, and the fix.
fn unfit(entry: &HookEntry) -> Option<(String, String)> {
    let file = entry.file.display();
    if entry.hook.applies == Applies::Never {
        let why = format!("the conditions in {file} match no container");
        return Some((why, format!("set \"when\": {{\"always\": true}} in {file}")));
    }
    let call = hook_args::parse_entry(&entry.hook.args);
    let sets_up = call.is_some_and(|call| SETUP_STAGES.contains(&call.stage));
    if sets_up || has_other_name(entry) {
        return None;
    }
    let args = entry.hook.args.get(1..).unwrap_or_default().join(" ");
    let stages = entry.hook.stages.join(", ");
    let why = format!("{file} starts the hook at the stage {stages} with the argument \"{args}\"");
    let fix = format!("set args and stages in {file} to the same stage");
    Some((why, fix))
}

/// Returns why the engine has no entry for our hook, and the fix.
fn missing(engine: &Engine, installed: &[PathBuf]) -> (String, String) {
    if let Some(ignored) = ignored_file(engine, installed) {
        return ignored;
    }
    let dirs = dirs_of(&engine.settings);
    if let Some(on_disk) = &engine.on_disk {
        let why = format!(
            "the hooks directories of the running CRI-O are {dirs}, its configuration files name {}",
            dirs_of(on_disk)
        );
        let fix = "run \"systemctl restart crio\"; if that does not help, remove --hooks-dir from its command line: \
                   \"systemctl cat crio\"";
        return (why, fix.to_owned());
    }
    let Some(file) = installed.first() else {
        let why = format!("no hook file in {dirs} names oci-nvidia-hook");
        let fix =
            "install the package oci-nvidia-hook, or use CDI: \"oci-nvidia-hook cdi generate\"";
        return (why, fix.to_owned());
    };
    let Some(from) = &engine.settings.hooks_from else {
        let file = file.display();
        let why = format!("the hooks directories are {dirs}, which do not contain {file}");
        return (why, format!("ln -s {file} {HOOKS_DIR}/"));
    };
    let from = from.display();
    let dir = file.parent().unwrap_or_else(|| Path::new(HOOKS_DIR));
    let dir = dir.display();
    let restart = if engine.kind == EngineKind::Crio {
        ", and run \"systemctl restart crio\""
    } else {
        ""
    };
    let why = format!("{from} sets the hooks directories {dirs}, without {dir}");
    (
        why,
        format!("add \"{dir}\" to hooks_dir in {from}{restart}"),
    )
}

/// Returns why the engine ignores an installed hook file in its directories, and the fix.
fn ignored_file(engine: &Engine, installed: &[PathBuf]) -> Option<(String, String)> {
    for (file, program) in &engine.hooks.without_program {
        if installed.contains(file) {
            let (file, program) = (file.display(), program.display());
            let why = format!("the engine ignores {file}: its program {program} is missing");
            return Some((why, "reinstall the package oci-nvidia-hook".to_owned()));
        }
    }
    for (ours, other) in &engine.hooks.masked {
        if installed.contains(ours) {
            let (ours, other) = (ours.display(), other.display());
            let why = format!("{other} replaces {ours}, which has the same name");
            return Some((why, format!("mv {other} {other}.off")));
        }
    }
    None
}

fn docker(engine: &Engine, status: &mut EngineStatus) {
    match &engine.dockers_hook {
        Some(program) if hooks::is_our_program(program) => {
            status.active = true;
            status.hooks = vec![Started {
                file: program.clone(),
                stages: Vec::new(),
            }];
            status.why = "for containers started with --gpus".to_owned();
        }
        Some(program) => {
            status.why = format!("--gpus starts {}", program.display());
            status.fix =
                "remove NVIDIA's container toolkit, and install the package oci-nvidia-hook-compat"
                    .to_owned();
        }
        None => {
            status.why =
                "nvidia-container-runtime-hook, which --gpus starts, is missing".to_owned();
            status.fix =
                "install the package oci-nvidia-hook-compat, and restart Docker".to_owned();
        }
    }
}
