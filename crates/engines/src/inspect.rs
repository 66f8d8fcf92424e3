//! Inspects the engines of a host.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base::paths::HostPath;
use base::search_path;
use base::sys::file_id::FileId;
use base::sys::process;
use base::sys::run_dir::RunDir;
use base::tree::Tree;
use nvidia_host::programs;
use plugin_api::status::NriStatus;

use super::cdi::{self, SpecReader, View};
use super::hooks::{self, Hooks, Programs};
use super::runtime::{self, Runtime};
use super::settings::EngineSettings;
use super::{EngineKind, User, Version, files};

/// The longest file with a version, which has about 60 bytes.
const MAX_STORED: u64 = 1024;
/// The time limit for printing a version. Podman takes 0.1 s on a busy host.
const VERSION_DEADLINE: Duration = Duration::from_secs(5);

/// An engine and its configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Engine {
    /// Which engine it is
    pub kind: EngineKind,
    /// Its program; `None` if the engine is not installed, and then nothing else is known
    pub program: Option<PathBuf>,
    /// The version that `--version` prints
    pub version: Option<Version>,
    /// The existing configuration files
    pub files: Vec<PathBuf>,
    /// The settings in these files, or the settings of a running CRI-O
    pub settings: EngineSettings,
    /// Whether the engine is a running daemon that printed its settings
    pub running: bool,
    /// The settings in the files, if the daemon runs with other hooks directories
    pub on_disk: Option<EngineSettings>,
    /// Configuration files that this user cannot read
    pub unseen: Vec<PathBuf>,
    /// The hooks of its hooks directories
    pub hooks: Hooks,
    /// Default OCI runtime
    pub runtime: Option<Runtime>,
    /// Whether `--version` fails. This is checked only for the engine of the calling user
    pub fails: bool,
    /// For CRI-O, whether our NRI plugin gives GPUs to its containers
    pub nri: bool,
    /// For Docker, the program that `nvidia-container-runtime-hook` leads to
    pub dockers_hook: Option<PathBuf>,
}

/// Inspects all engines; with a user, also Podman of that user.
pub fn inspect_engines(host: &Tree, user: Option<User>) -> Vec<Engine> {
    let mut versions = Versions::existing();
    let mut engines = Vec::new();
    for kind in kinds(user) {
        engines.push(inspect_engine(host, kind, &mut versions));
    }
    engines
}

fn kinds(user: Option<User>) -> Vec<EngineKind> {
    let mut kinds = vec![EngineKind::Podman];
    kinds.extend(user.map(EngineKind::PodmanOf));
    kinds.extend([EngineKind::Crio, EngineKind::Docker]);
    kinds
}

/// Returns the directories in which the installed engines search for CDI specs. They depend on the configuration files, and these
/// on the version. Running a program for its version costs more than everything else, so it is done only if the result depends on it.
pub fn cdi_views(host: &Tree, user: Option<User>, versions: &mut Versions) -> Vec<View> {
    let mut readers = Vec::new();
    for kind in kinds(user) {
        if kind == EngineKind::Docker {
            continue;
        }
        let Some(program) = search_path::find(host, kind.program()) else {
            continue;
        };
        let mut found = reading(host, &kind, None);
        if kind != EngineKind::Crio && depends_on_version(host, &kind, &found.dirs) {
            found = reading(host, &kind, versions.ask(host, &program).ok());
        }
        let Reading { version, dirs } = found;
        readers.push((SpecReader { kind, version }, dirs));
    }
    cdi::group(readers)
}

/// Where a version of an engine searches for CDI specs.
struct Reading {
    version: Option<Version>,
    dirs: Vec<PathBuf>,
}

fn reading(host: &Tree, kind: &EngineKind, version: Option<Version>) -> Reading {
    Reading {
        version,
        dirs: configuration(host, kind, version).settings.cdi_dirs,
    }
}

/// Reports whether some version of the engine would search other directories than these.
fn depends_on_version(host: &Tree, kind: &EngineKind, dirs: &[PathBuf]) -> bool {
    let mut milestones = files::MILESTONES.iter();
    milestones.any(|milestone| reading(host, kind, Some(*milestone)).dirs != dirs)
}

/// Returns whether at least one engine is installed, and all are known to read CDI specs of this version.
pub fn all_read_cdi(
    host: &Tree,
    user: Option<User>,
    cdi_version: &str,
    versions: &mut Versions,
) -> bool {
    let mut any = false;
    for kind in kinds(user) {
        if kind == EngineKind::Docker {
            continue;
        }
        let Some(program) = search_path::find(host, kind.program()) else {
            continue;
        };
        let version = versions.ask(host, &program).ok();
        let reader = SpecReader { kind, version };
        if reader.reads(cdi_version) != Some(true) {
            return false;
        }
        any = true;
    }
    any
}

/// The configuration files of an engine, as read by one version.
#[derive(Debug, Default)]
struct Configuration {
    files: Vec<PathBuf>,
    unseen: Vec<PathBuf>,
    settings: EngineSettings,
}

fn configuration(host: &Tree, kind: &EngineKind, version: Option<Version>) -> Configuration {
    let mut found = Configuration::default();
    for file in files::list(kind, version, host) {
        if host.locate(&file).is_err() {
            continue;
        }
        match host.read(&file) {
            Ok(bytes) => {
                let text = String::from_utf8_lossy(&bytes);
                found.settings.add(&file, &text, kind, version);
                found.files.push(file);
            }
            Err(_) => found.unseen.push(file),
        }
    }
    found.settings.finish(kind, version);
    found
}

fn inspect_engine(host: &Tree, kind: EngineKind, versions: &mut Versions) -> Engine {
    let mut engine = Engine {
        program: search_path::find(host, kind.program()),
        kind,
        ..Engine::default()
    };
    let Some(program) = engine.program.clone() else {
        return engine;
    };
    let asked = versions.ask(host, &program);
    engine.version = asked.ok();
    let Configuration {
        files,
        unseen,
        settings,
    } = configuration(host, &engine.kind, engine.version);
    (engine.files, engine.unseen, engine.settings) = (files, unseen, settings);
    // Podman of another user would read other files.
    let is_root = rustix::process::geteuid().is_root();
    engine.fails = asked == Err(NoVersion::Failed)
        && is_root != matches!(engine.kind, EngineKind::PodmanOf(_));
    if let EngineKind::Docker = engine.kind {
        let linked = search_path::find(host, programs::RUNTIME_HOOK);
        engine.dockers_hook = linked.and_then(|link| Some(host.locate(&link).ok()?.path));
        return engine;
    }
    if let Some(running) = running(host, &engine.kind, &program) {
        take_running(&mut engine, running);
    }
    engine.nri = engine.kind == EngineKind::Crio && NriStatus::of_host(host).is_some();
    engine.hooks = hooks::read(
        host,
        &engine.settings.hooks_dirs,
        engine.kind.is_podman(),
        Programs::Visible,
    );
    let runtime = runtime::find_default(&engine.kind, &engine.settings, engine.version, host);
    if let Some((name, program)) = runtime {
        let version = program.as_ref().map(|program| versions.ask(host, program));
        engine.runtime = Some(Runtime {
            name,
            program,
            version: version.and_then(Result::ok),
        });
    }
    engine
}

/// Inspects CRI-O on a node whose kubelet uses it. A process in a container sees none of the host's programs, and therefore cannot
/// know whether the programs in hook files exist: they count as present.
pub(crate) fn crio_of_node(host: &Tree) -> Engine {
    let engine = inspect_engine(host, EngineKind::Crio, &mut Versions::stored());
    if engine.program.is_some() {
        return engine;
    }
    let Configuration {
        files,
        unseen,
        settings,
    } = configuration(host, &engine.kind, None);
    let hooks = hooks::read(host, &settings.hooks_dirs, false, Programs::Hidden);
    let program = Some(Path::new("/usr/bin").join(engine.kind.program()));
    Engine {
        program,
        files,
        unseen,
        settings,
        hooks,
        ..engine
    }
}

/// CRI-O's socket, which only root can use.
pub(crate) const CRIO_SOCKET: &str = "/run/crio/crio.sock";
/// The time limit for the configuration of a running CRI-O.
const STATUS_DEADLINE: Duration = Duration::from_secs(2);

/// Returns the settings of a running CRI-O. Options of its command line override its files, which it reads only when it starts.
fn running(host: &Tree, kind: &EngineKind, program: &Path) -> Option<EngineSettings> {
    let can_ask = *kind == EngineKind::Crio && rustix::process::geteuid().is_root();
    if !can_ask || host.locate(Path::new(CRIO_SOCKET)).is_err() {
        return None;
    }
    let program = trusted(host, program)?;
    let text =
        process::read_output(program.as_path(), &["status", "config"], STATUS_DEADLINE).ok()?;
    let mut settings = EngineSettings::default();
    settings.add(Path::new(CRIO_SOCKET), &text, kind, None);
    // Older versions do not have this command and print something else.
    if settings.refused.is_some() || settings.hooks_from.is_none() {
        return None;
    }
    Some(settings)
}

fn take_running(engine: &mut Engine, running: EngineSettings) {
    engine.running = true;
    let on_disk = std::mem::replace(&mut engine.settings, running);
    engine.settings.refused.clone_from(&on_disk.refused);
    if engine.settings.hooks_dirs == on_disk.hooks_dirs {
        engine.settings.hooks_from = on_disk.hooks_from;
    } else {
        engine.settings.hooks_from = None;
        engine.on_disk = Some(on_disk);
    }
}

/// Returns the program with all links resolved, if only root and the calling user can write it. Other programs must not be run,
/// because doctor may run as root.
pub(crate) fn trusted(host: &Tree, program: &Path) -> Option<HostPath> {
    let real = host.locate(program).ok()?;
    let us = rustix::process::geteuid().as_raw();
    let is_file = real.kind == rustix::fs::FileType::RegularFile;
    if is_file && [0, us].contains(&real.uid) && real.mode & 0o022 == 0 {
        Some(real.host)
    } else {
        None
    }
}

/// Why a program's version is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoVersion {
    /// The program was not run, or its output has no version
    Unknown,
    Failed,
}

/// The versions of programs. Each program is run only once.
#[derive(Debug, Default)]
pub struct Versions {
    known: Vec<(PathBuf, Result<Version, NoVersion>)>,
    /// The directory with versions that earlier processes stored
    stored: Option<RunDir>,
}

impl Versions {
    /// Uses the versions that earlier commands stored: running Podman for its version takes ten times as long as the rest of a command.
    pub fn stored() -> Self {
        Self {
            stored: RunDir::open().ok(),
            ..Self::default()
        }
    }

    /// Like [`Self::stored`], and stores nothing on a host on which the hook has stored nothing: these commands leave no file there.
    pub(crate) fn existing() -> Self {
        Self {
            stored: RunDir::existing().ok().flatten(),
            ..Self::default()
        }
    }

    pub(crate) fn ask(&mut self, host: &Tree, program: &Path) -> Result<Version, NoVersion> {
        if let Some((_, known)) = self.known.iter().find(|(known, _)| known == program) {
            return *known;
        }
        let version = match &self.stored {
            Some(dir) => stored_version(host, program, dir),
            None => ask_version(host, program),
        };
        self.known.push((program.to_owned(), version));
        version
    }
}

/// Returns the version that is stored for this file, or runs the program and stores its answer.
fn stored_version(host: &Tree, program: &Path, dir: &RunDir) -> Result<Version, NoVersion> {
    let path = trusted(host, program).ok_or(NoVersion::Unknown)?;
    // An update of the program is another file, or at least has another time of change.
    let file = FileId::at(path.as_path()).map_err(|_| NoVersion::Unknown)?;
    let file = file.to_string();
    let name = format!(
        "version-{}",
        program.file_name().unwrap_or_default().display()
    );
    let text = dir
        .read(&name, MAX_STORED)
        .ok()
        .flatten()
        .unwrap_or_default();
    let text = String::from_utf8(text).unwrap_or_default();
    if let Some(version) = text
        .split_once('\n')
        .filter(|(of, _)| *of == file)
        .and_then(|(_, said)| Version::parse(said))
    {
        return Ok(version);
    }
    let version = ask_version(host, program)?;
    // Without the file, the program runs again the next time.
    dir.replace(&name, format!("{file}\nversion {version}").as_bytes())
        .ok();
    Ok(version)
}

/// Runs a program for its version, if it is trusted.
fn ask_version(host: &Tree, program: &Path) -> Result<Version, NoVersion> {
    // crun creates its state directory even to print its version. `/` exists already.
    let arguments: &[&str] = if program.file_name() == Some("crun".as_ref()) {
        &["--root=/", "--version"]
    } else {
        &["--version"]
    };
    let program = trusted(host, program).ok_or(NoVersion::Unknown)?;
    match process::read_output(program.as_path(), arguments, VERSION_DEADLINE) {
        Ok(text) => Version::parse(&text).ok_or(NoVersion::Unknown),
        Err(error) if error.kind() == std::io::ErrorKind::Other => Err(NoVersion::Failed),
        Err(_) => Err(NoVersion::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_program_that_others_can_write_is_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let (program, trace) = (dir.path().join("podman"), dir.path().join("trace"));
        let host = Tree::open(&HostPath::new(dir.path())).unwrap();
        let script = format!(
            "#!/bin/sh\ntouch '{}'\necho podman version 5.4.1",
            trace.display()
        );
        std::fs::write(&program, script).unwrap();
        for (mode, version, ran) in [
            (0o777, Err(NoVersion::Unknown), false),
            (0o775, Err(NoVersion::Unknown), false),
            (0o644, Err(NoVersion::Unknown), false),
            (0o755, Ok(Version(5, 4, 1)), true),
        ] {
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(
                ask_version(&host, Path::new("/podman")),
                version,
                "{mode:o}"
            );
            assert_eq!(trace.try_exists().unwrap(), ran, "{mode:o}");
        }
        std::fs::write(&program, "#!/bin/sh\nexit 125").unwrap();
        assert_eq!(
            ask_version(&host, Path::new("/podman")),
            Err(NoVersion::Failed)
        );
    }

    /// Podman is found in all program directories. It runs only if the result depends on its version and no version is stored for the
    /// file.
    #[test]
    fn directories_of_cdi_specs() {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("trace");
        let host = Tree::open(&HostPath::new(dir.path())).unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        let versions = || Versions {
            stored: RunDir::open_in(dir.path()).ok(),
            ..Versions::default()
        };
        let views = || cdi_views(&host, None, &mut versions());
        let reads = |cdi_version| all_read_cdi(&host, None, cdi_version, &mut versions());
        assert_eq!((views(), reads("0.7.0")), (Vec::new(), false));
        let podman = |version: &str| {
            write(
                "usr/local/bin/podman",
                &format!(
                    "#!/bin/sh\ntouch '{}'\necho podman version {version}",
                    trace.display()
                ),
            );
        };
        podman("5.4.1");
        write(
            "etc/containers/containers.conf",
            "[engine]\ncdi_spec_dirs = [\"/a\"]",
        );
        write(
            "etc/crio/crio.conf.d/20-x.conf",
            "[crio.runtime]\ncdi_spec_dirs = [\"/b\"]",
        );
        let places = |views: Vec<View>| -> Vec<_> {
            views
                .into_iter()
                .map(|view| (view.readers[0].kind.to_string(), view.dirs))
                .collect()
        };
        let in_podman = |dir: &str| ("Podman as root".to_owned(), vec![PathBuf::from(dir)]);
        assert_eq!(places(views()), [in_podman("/a")]);
        assert!(
            !trace.try_exists().unwrap(),
            "all versions search this directory"
        );
        assert!(reads("0.7.0"));
        std::fs::remove_file(&trace).unwrap();
        assert!(reads("0.7.0") && !reads("1.1.0"));
        // Only Podman 5 reads this file.
        write(
            "root/.config/containers/containers.conf",
            "[engine]\ncdi_spec_dirs = [\"/c\"]",
        );
        assert_eq!(places(views()), [in_podman("/c")]);
        assert!(!trace.try_exists().unwrap());
        podman("4.9.5");
        assert!(
            !reads("0.7.0") && trace.try_exists().unwrap(),
            "an update is another file"
        );
        assert_eq!(places(views()), [in_podman("/a")]);
        write("usr/bin/crio", "#!/bin/sh\necho crio version 1.29.0");
        assert_eq!(
            places(views())[1],
            ("CRI-O".to_owned(), vec![PathBuf::from("/b")])
        );
        assert!(!reads("0.7.0"), "CRI-O 1.29 does not");
    }
}
