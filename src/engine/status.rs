//! Whether our hook is active in an engine, since which file and at which stage; and if not, why. Pure.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::hook_file::{Applies, PRECREATE, Refusal};
use super::hooks::Entry;
use super::settings::{HOOKS_DIR, Settings};
use super::{Engine, Kind};

/// The answer for one engine. The names are an interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// `Podman as root`, `Podman of tux`, `CRI-O`, `Docker`
    pub engine: String,
    pub installed: bool,
    /// Its version, where it tells one
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Whether it starts our hook for containers
    pub active: bool,
    /// Since which files, and at which stages; of Docker, the program that it finds
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Started>,
    /// Why not, or for which containers only
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Command or setting that fixes it
    #[serde(skip_serializing_if = "String::is_empty")]
    pub fix: String,
}

/// A JSON file of a hooks directory that has the engine start us.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Started {
    pub file: PathBuf,
    /// Stages at which the file starts the hook
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<String>,
}

impl Status {
    /// `/…/a.json (prestart) and /…/b.json (precreate)`
    pub fn files(&self) -> String {
        let words = |hook: &Started| match hook.stages.as_slice() {
            [] => hook.file.display().to_string(),
            stages => format!("{} ({})", hook.file.display(), stages.join(", ")),
        };
        self.hooks.iter().map(words).collect::<Vec<_>>().join(" and ")
    }
}

/// At these our hook does something.
const OUR_STAGES: [&str; 4] = ["prestart", "createRuntime", "createContainer", PRECREATE];

/// The document of `status --json`.
///
/// # Errors
/// If a path is not UTF-8.
pub(crate) fn document(statuses: &[Status]) -> serde_json::Result<String> {
    base::json::document("engines", &statuses)
}

/// Our hooks in an engine that do something.
pub(crate) fn ours(engine: &Engine) -> impl Iterator<Item = &Entry> {
    let at_our_stages = |entry: &&Entry| entry.hook.stages.iter().any(|stage| OUR_STAGES.contains(&stage.as_str()));
    engine.hooks.entries.iter().filter(|entry| entry.is_ours()).filter(at_our_stages)
}

/// Judges whether an engine starts the hook. `installed` are the hook files on this host, including those that no engine reads.
pub fn judge(engine: &Engine, installed: &[PathBuf]) -> Status {
    let mut status = Status {
        engine: engine.kind.to_string(),
        installed: engine.program.is_some(),
        version: engine.version.map(|version| version.to_string()),
        active: false,
        hooks: Vec::new(),
        why: String::new(),
        fix: String::new(),
    };
    if !status.installed {
        return status;
    }
    if let Kind::Docker = engine.kind {
        docker(engine, &mut status);
        return status;
    }
    let best = ours(engine).max_by_key(|entry| (entry.runs, entry.hook.applies == Applies::Always));
    let started = |entry: &Entry| Started { file: entry.file.clone(), stages: entry.hook.stages.clone() };
    status.hooks = ours(engine).map(started).collect();
    let problem = stopped(engine).or_else(|| match best {
        Some(entry) => unfit(entry),
        None => Some(missing(engine, installed)),
    });
    status.active = problem.is_none();
    if let Some((why, fix)) = problem {
        (status.why, status.fix) = (why, fix);
    } else if let Some(Applies::If(condition)) = best.map(|entry| &entry.hook.applies) {
        status.why = format!("for a container only if {condition}");
    } else if let Some(on_disk) = &engine.on_disk
        && !status
            .hooks
            .iter()
            .any(|hook| hook.file.parent().is_some_and(|dir| on_disk.hooks_dirs.iter().any(|d| d == dir)))
    {
        status.why = format!("until its next start: its configuration makes it look for hooks in {}", dirs_of(on_disk));
        status.fix = format!("add \"{}\" to hooks_dir in its configuration", parent(&status.hooks));
    }
    status
}

fn parent(hooks: &[Started]) -> String {
    let dir = hooks.first().and_then(|hook| hook.file.parent());
    dir.unwrap_or_else(|| Path::new(HOOKS_DIR)).display().to_string()
}

fn dirs_of(settings: &Settings) -> String {
    let dirs: Vec<_> = settings.hooks_dirs.iter().map(|dir| dir.display().to_string()).collect();
    if dirs.is_empty() { "no directory".to_owned() } else { dirs.join(", ") }
}

/// Why the engine starts no container at all.
fn stopped(engine: &Engine) -> Option<(String, String)> {
    let starts = match engine.kind {
        // It keeps what it has when a file that it reads again is wrong.
        Kind::Crio if engine.running => "it goes on with the hooks that it read before, and will not start again",
        Kind::Crio => "it does not start",
        _ => "no container starts",
    };
    if let Some((file, why)) = &engine.settings.refused {
        return Some((format!("{starts}: {}: {why}", file.display()), mend(file)));
    }
    if let Some((file, refusal)) = engine.hooks.refused.first() {
        let fix = match refusal {
            Refusal::UnknownStage(stage) if stage == PRECREATE => {
                format!("mv {} /usr/share/containers/oci/hooks.podman.d/", file.display())
            }
            Refusal::UnknownStage(_) | Refusal::Invalid(_) => mend(file),
        };
        return Some((format!("{starts}: {}: {refusal}", file.display()), fix));
    }
    engine.fails.then(|| {
        let program = engine.kind.program();
        (format!("{program} fails: {starts}"), format!("see what \"{program} --version\" says"))
    })
}

fn mend(file: &Path) -> String {
    format!("mend {0}, or take it away: \"mv {0} {0}.off\"", file.display())
}

/// Why a hook that the engine has does nothing.
fn unfit(entry: &Entry) -> Option<(String, String)> {
    let (file, program) = (entry.file.display(), entry.program.display());
    if !entry.runs {
        return Some((format!("{file} names {program}, which cannot be run"), format!("chmod 755 {program}")));
    }
    let says = |word: &str| entry.hook.args.iter().any(|arg| arg == word);
    let other = OUR_STAGES.into_iter().find(|stage| says(stage));
    let is_precreate = entry.hook.stages.iter().any(|stage| stage == PRECREATE);
    if let Some(other) = other.filter(|_| says(PRECREATE) != is_precreate) {
        let stages = entry.hook.stages.join(", ");
        let why = format!("{file} starts it with \"{other}\" at the stage {stages}, where its input is another");
        return Some((why, format!("make args and stages in {file} say the same")));
    }
    match entry.hook.applies {
        Applies::Never => {
            let why = format!("the conditions in {file} are true for no container");
            Some((why, format!("write \"when\": {{\"always\": true}} in {file}")))
        }
        Applies::Always | Applies::If(_) => None,
    }
}

/// Why the engine has no hook of ours.
fn missing(engine: &Engine, installed: &[PathBuf]) -> (String, String) {
    let is_ours = |file: &Path| installed.iter().any(|ours| ours == file);
    if let Some((file, program)) = engine.hooks.without_program.iter().find(|(file, _)| is_ours(file)) {
        let why = format!("{} is passed over: its program {} is missing", file.display(), program.display());
        return (why, "install the program again: \"zypper install --force oci-nvidia-hook\"".to_owned());
    }
    if let Some((ours, other)) = engine.hooks.masked.iter().find(|(file, _)| is_ours(file)) {
        let why = format!("{} has the name of {}, and takes its place", other.display(), ours.display());
        return (why, format!("mv {0} {0}.off", other.display()));
    }
    let dirs = dirs_of(&engine.settings);
    // Files that only Podman may read are of no use to others.
    let fits = |file: &&PathBuf| engine.kind.is_podman() || !file.to_string_lossy().contains(".podman.d");
    if let Some(on_disk) = &engine.on_disk {
        let why = format!("it runs with the hooks directories {dirs}, and its configuration has {}", dirs_of(on_disk));
        let fix = "run \"systemctl restart crio\"; if that changes nothing, take --hooks-dir out of its command line: \
                   \"systemctl cat crio\"";
        return (why, fix.to_owned());
    }
    let restart = if engine.kind == Kind::Crio { ", and run \"systemctl restart crio\"" } else { "" };
    match (installed.iter().find(fits), &engine.settings.hooks_from) {
        (Some(file), Some(from)) => {
            let dir = file.parent().unwrap_or_else(|| Path::new(HOOKS_DIR)).display();
            let why = format!("{} makes it look for hooks in {dirs}, and not in {dir}", from.display());
            (why, format!("add \"{dir}\" to hooks_dir in {}{restart}", from.display()))
        }
        (Some(file), None) => {
            let why = format!("it looks for hooks in {dirs}, where {} is not", file.display());
            (why, format!("ln -s {} {HOOKS_DIR}/", file.display()))
        }
        (None, _) => {
            let why = format!("no JSON file in {dirs} names oci-nvidia-hook");
            (why, "install the package oci-nvidia-hook, or use CDI: \"oci-nvidia-hook cdi generate\"".to_owned())
        }
    }
}

fn docker(engine: &Engine, status: &mut Status) {
    match &engine.dockers_hook {
        Some(program) if program.ends_with("oci-nvidia-hook") => {
            status.active = true;
            status.hooks = vec![Started { file: program.clone(), stages: Vec::new() }];
            status.why = "for containers started with --gpus".to_owned();
        }
        Some(program) => {
            status.why = format!("for --gpus it starts {}", program.display());
            status.fix = "remove NVIDIA's container toolkit, and install the package oci-nvidia-hook-compat".to_owned();
        }
        None => {
            status.why = "for --gpus it looks for nvidia-container-runtime-hook, which is not there".to_owned();
            status.fix = "install the package oci-nvidia-hook-compat, and restart Docker".to_owned();
        }
    }
}
