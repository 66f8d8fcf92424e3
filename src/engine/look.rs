//! Looking at the engines of a host.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::hooks::{self, Hooks};
use super::runtime::{self, Runtime};
use super::settings::Settings;
use super::{Kind, User, Version, files, version};
use crate::driver::DriverRoot;
use crate::sys::process;

/// Docker looks for a program of this name when it starts.
const DOCKERS_HOOK: &str = "nvidia-container-runtime-hook";
/// How long a program may take to tell its version: podman takes a tenth of a second on a busy host.
const VERSION_DEADLINE: Duration = Duration::from_secs(5);

/// An engine, as its configuration makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Which
    pub kind: Kind,
    /// Its program; none: it is not installed, and nothing else is known
    pub program: Option<PathBuf>,
    /// What it prints for `--version`
    pub version: Option<Version>,
    /// Its configuration files that are there
    pub files: Vec<PathBuf>,
    /// What they say
    pub settings: Settings,
    /// Files that are there and cannot be read by us
    pub unseen: Vec<PathBuf>,
    /// Its hooks
    pub hooks: Hooks,
    /// Its OCI runtime
    pub runtime: Option<Runtime>,
    /// Of Docker: what [`DOCKERS_HOOK`] leads to
    pub dockers_hook: Option<PathBuf>,
}

/// Looks at all engines, and Podman of this user, if it is not root.
#[must_use]
pub fn look(host: &DriverRoot, user: Option<User>) -> Vec<Engine> {
    let mut versions = Versions::default();
    let kinds = [Some(Kind::Podman), user.map(Kind::PodmanOf), Some(Kind::Crio), Some(Kind::Docker)];
    kinds.into_iter().flatten().map(|kind| look_at(host, kind, &mut versions)).collect()
}

fn look_at(host: &DriverRoot, kind: Kind, versions: &mut Versions) -> Engine {
    let program = runtime::program(host, kind.program());
    let mut engine = Engine {
        kind,
        version: program.as_ref().and_then(|program| versions.of(host, program)),
        program,
        files: Vec::new(),
        settings: Settings::default(),
        unseen: Vec::new(),
        hooks: Hooks::default(),
        runtime: None,
        dockers_hook: None,
    };
    if engine.program.is_none() {
        return engine;
    }
    for file in files::of(&engine.kind, engine.version, host) {
        if host.locate(&file).is_err() {
            continue;
        }
        match host.read(&file) {
            Ok(bytes) => {
                engine.settings.add(&file, &String::from_utf8_lossy(&bytes), &engine.kind, engine.version);
                engine.files.push(file);
            }
            Err(_) => engine.unseen.push(file),
        }
    }
    engine.settings.finish(&engine.kind, engine.version);
    if let Kind::Docker = engine.kind {
        let linked = runtime::program(host, DOCKERS_HOOK);
        engine.dockers_hook = linked.and_then(|link| Some(host.locate(&link).ok()?.path));
        return engine;
    }
    engine.hooks = hooks::read(host, &engine.settings.hooks_dirs, engine.kind.is_podman());
    let runtime = runtime::of(&engine.kind, &engine.settings, engine.version, host);
    engine.runtime = runtime.map(|(name, program)| {
        let version = program.as_ref().and_then(|program| versions.of(host, program));
        Runtime { name, program, version }
    });
    engine
}

/// Each program is asked once.
#[derive(Debug, Default)]
struct Versions(BTreeMap<PathBuf, Option<Version>>);

impl Versions {
    fn of(&mut self, host: &DriverRoot, program: &Path) -> Option<Version> {
        *self.0.entry(program.to_owned()).or_insert_with(|| ask_version(host, program))
    }
}

/// A program that somebody else could have written is not run.
fn ask_version(host: &DriverRoot, program: &Path) -> Option<Version> {
    let real = host.locate(program).ok()?.host;
    let metadata = real.as_path().metadata().ok()?;
    let us = rustix::process::geteuid().as_raw();
    let is_safe = [0, us].contains(&metadata.uid()) && metadata.mode() & 0o022 == 0 && metadata.is_file();
    let said = is_safe.then(|| process::read_version(real.as_path(), VERSION_DEADLINE).ok()).flatten()?;
    version::parse(&said)
}
