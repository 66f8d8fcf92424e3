//! Looking at the engines of a host.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base::paths::HostPath;
use base::sys::process;
use base::tree::Tree;

use super::cdi::{self, Reader, View};
use super::hooks::{self, Hooks};
use super::runtime::{self, Runtime};
use super::settings::Settings;
use super::{Kind, User, Version, files, version};

/// Docker looks for a program of this name when it starts.
const DOCKERS_HOOK: &str = "nvidia-container-runtime-hook";
/// How long a program may take to tell its version: podman takes a tenth of a second on a busy host.
const VERSION_DEADLINE: Duration = Duration::from_secs(5);

/// An engine, as its configuration makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    pub kind: Kind,
    /// Its program; none: it is not installed, and nothing else is known
    pub program: Option<PathBuf>,
    /// What it prints for `--version`
    pub version: Option<Version>,
    /// Its configuration files that are there
    pub files: Vec<PathBuf>,
    /// What they say; of a CRI-O that runs, what it runs with
    pub settings: Settings,
    /// Whether it is a daemon that runs and has answered
    pub running: bool,
    /// What its files say, where it runs with other hooks directories
    pub on_disk: Option<Settings>,
    /// Files that are there and cannot be read by us
    pub unseen: Vec<PathBuf>,
    pub hooks: Hooks,
    /// Default OCI runtime
    pub runtime: Option<Runtime>,
    /// Whether its program ends with an error instead of telling its version, where it is run as whom it is of
    pub fails: bool,
    /// For Docker, the program that [`DOCKERS_HOOK`] leads to
    pub dockers_hook: Option<PathBuf>,
}

/// Inspects all engines; with a user, also Podman of that user.
pub fn inspect_engines(host: &Tree, user: Option<User>) -> Vec<Engine> {
    let mut versions = Versions::default();
    kinds(user).map(|kind| inspect_engine(host, kind, &mut versions)).collect()
}

fn kinds(user: Option<User>) -> impl Iterator<Item = Kind> {
    [Some(Kind::Podman), user.map(Kind::PodmanOf), Some(Kind::Crio), Some(Kind::Docker)].into_iter().flatten()
}

/// Where the installed engines look for CDI specs. An engine's version decides which configuration files it reads, but it is
/// found out by running the program, which costs more than all the rest: that is done only where the answer depends on it.
pub(crate) fn cdi_views(host: &Tree, user: Option<User>) -> Vec<View> {
    let mut versions = Versions::default();
    let readers = kinds(user).filter(|kind| *kind != Kind::Docker).filter_map(|kind| {
        let program = runtime::program(host, kind.program())?;
        let dirs = |version| configuration(host, &kind, version).settings.cdi_dirs;
        let of_old = dirs(None);
        let any = kind != Kind::Crio && files::MILESTONES.iter().any(|version| dirs(Some(*version)) != of_old);
        let version = if any { versions.ask(host, &program).ok() } else { None };
        let dirs = if any { dirs(version) } else { of_old };
        Some((Reader { kind, version }, dirs))
    });
    cdi::group(readers)
}

/// Whether all engines of this host read CDI specs of this version, as far as it is known, and there is one.
pub(crate) fn all_read_cdi(host: &Tree, user: Option<User>, cdi_version: &str) -> bool {
    let mut versions = Versions::default();
    let mut any = false;
    kinds(user).filter(|kind| *kind != Kind::Docker).all(|kind| {
        let Some(program) = runtime::program(host, kind.program()) else { return true };
        any = true;
        Reader { kind, version: versions.ask(host, &program).ok() }.reads(cdi_version) == Some(true)
    }) && any
}

/// What an engine's files say, as one of this version reads them.
#[derive(Debug, Default)]
struct Configuration {
    files: Vec<PathBuf>,
    unseen: Vec<PathBuf>,
    settings: Settings,
}

fn configuration(host: &Tree, kind: &Kind, version: Option<Version>) -> Configuration {
    let mut found = Configuration::default();
    for file in files::list(kind, version, host) {
        if host.locate(&file).is_err() {
            continue;
        }
        match host.read(&file) {
            Ok(bytes) => {
                found.settings.add(&file, &String::from_utf8_lossy(&bytes), kind, version);
                found.files.push(file);
            }
            Err(_) => found.unseen.push(file),
        }
    }
    found.settings.finish(kind, version);
    found
}

fn inspect_engine(host: &Tree, kind: Kind, versions: &mut Versions) -> Engine {
    let program = runtime::program(host, kind.program());
    let asked = program.as_ref().map(|program| versions.ask(host, program));
    let mut engine = Engine {
        kind,
        version: asked.as_ref().and_then(|asked| asked.as_ref().ok().copied()),
        program,
        files: Vec::new(),
        settings: Settings::default(),
        running: false,
        on_disk: None,
        unseen: Vec::new(),
        hooks: Hooks::default(),
        runtime: None,
        fails: false,
        dockers_hook: None,
    };
    if engine.program.is_none() {
        return engine;
    }
    let Configuration { files, unseen, settings } = configuration(host, &engine.kind, engine.version);
    (engine.files, engine.unseen, engine.settings) = (files, unseen, settings);
    // Another user's program reads other files.
    let is_root = rustix::process::geteuid().is_root();
    engine.fails = asked == Some(Err(NoVersion::Failed)) && is_root != matches!(engine.kind, Kind::PodmanOf(_));
    if let Kind::Docker = engine.kind {
        let linked = runtime::program(host, DOCKERS_HOOK);
        engine.dockers_hook = linked.and_then(|link| Some(host.locate(&link).ok()?.path));
        return engine;
    }
    if let Some(running) = engine.program.as_ref().and_then(|program| running(host, &engine.kind, program)) {
        take_running(&mut engine, running);
    }
    engine.hooks = hooks::read(host, &engine.settings.hooks_dirs, engine.kind.is_podman());
    let runtime = runtime::find_default(&engine.kind, &engine.settings, engine.version, host);
    engine.runtime = runtime.map(|(name, program)| {
        let version = program.as_ref().and_then(|program| versions.ask(host, program).ok());
        Runtime { name, program, version }
    });
    engine
}

/// CRI-O's control socket, which only root may use.
const CRIO_SOCKET: &str = "/run/crio/crio.sock";
/// How long a running CRI-O may take to print its configuration.
const STATUS_DEADLINE: Duration = Duration::from_secs(2);

/// What a CRI-O that runs was started with. Options of its command line count more than its files, and it reads those only when
/// it starts.
fn running(host: &Tree, kind: &Kind, program: &Path) -> Option<Settings> {
    let can_ask = *kind == Kind::Crio && rustix::process::geteuid().is_root();
    if !can_ask || host.locate(Path::new(CRIO_SOCKET)).is_err() {
        return None;
    }
    let program = trusted(host, program)?;
    let text = process::read_output(program.as_path(), &["status", "config"], STATUS_DEADLINE).ok()?;
    let mut settings = Settings::default();
    settings.add(Path::new(CRIO_SOCKET), &text, kind, None);
    // An older one, without this command, prints something else.
    (settings.refused.is_none() && settings.hooks_from.is_some()).then_some(settings)
}

fn take_running(engine: &mut Engine, running: Settings) {
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

/// The program, all links followed, if nobody but root and us could have written it.
fn trusted(host: &Tree, program: &Path) -> Option<HostPath> {
    let real = host.locate(program).ok()?;
    let us = rustix::process::geteuid().as_raw();
    let is_file = real.kind == rustix::fs::FileType::RegularFile;
    (is_file && [0, us].contains(&real.uid) && real.mode & 0o022 == 0).then_some(real.host)
}

/// Why a program's version is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoVersion {
    /// It was not run, or says something else
    Unknown,
    Failed,
}

/// Versions of programs, each of which is run once.
#[derive(Debug, Default)]
struct Versions(Vec<(PathBuf, Result<Version, NoVersion>)>);

impl Versions {
    fn ask(&mut self, host: &Tree, program: &Path) -> Result<Version, NoVersion> {
        if let Some((_, known)) = self.0.iter().find(|(known, _)| known == program) {
            return *known;
        }
        let version = ask_version(host, program);
        self.0.push((program.to_owned(), version));
        version
    }
}

/// A program that somebody else could have written is not run.
fn ask_version(host: &Tree, program: &Path) -> Result<Version, NoVersion> {
    let program = trusted(host, program).ok_or(NoVersion::Unknown)?;
    match process::read_version(program.as_path(), VERSION_DEADLINE) {
        Ok(said) => version::parse(&said).ok_or(NoVersion::Unknown),
        Err(error) if error.kind() == std::io::ErrorKind::Other => Err(NoVersion::Failed),
        Err(_) => Err(NoVersion::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_others_could_have_written_is_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let (program, trace) = (dir.path().join("podman"), dir.path().join("trace"));
        let host = Tree::open(&HostPath::new(dir.path())).unwrap();
        let script = format!("#!/bin/sh\ntouch '{}'\necho podman version 5.4.1", trace.display());
        std::fs::write(&program, script).unwrap();
        for (mode, told, ran) in [
            (0o777, Err(NoVersion::Unknown), false),
            (0o775, Err(NoVersion::Unknown), false),
            (0o644, Err(NoVersion::Unknown), false),
            (0o755, Ok(Version(5, 4, 1)), true),
        ] {
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(ask_version(&host, Path::new("/podman")), told, "{mode:o}");
            assert_eq!(trace.try_exists().unwrap(), ran, "{mode:o}");
        }
        std::fs::write(&program, "#!/bin/sh\nexit 125").unwrap();
        assert_eq!(ask_version(&host, Path::new("/podman")), Err(NoVersion::Failed));
    }

    /// Podman wherever shells find it, and run only where its version decides what it reads.
    #[test]
    fn where_engines_look_for_cdi_specs() {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("trace");
        let host = Tree::open(&HostPath::new(dir.path())).unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        let views = || cdi_views(&host, None);
        assert_eq!((views(), all_read_cdi(&host, None, "0.7.0")), (Vec::new(), false));
        write("usr/local/bin/podman", &format!("#!/bin/sh\ntouch '{}'\necho podman version 5.4.1", trace.display()));
        write("etc/containers/containers.conf", "[engine]\ncdi_spec_dirs = [\"/a\"]");
        write("etc/crio/crio.conf.d/20-x.conf", "[crio.runtime]\ncdi_spec_dirs = [\"/b\"]");
        let places = |views: Vec<View>| -> Vec<_> {
            views.into_iter().map(|view| (view.readers[0].kind.to_string(), view.dirs)).collect()
        };
        let podman = |dir: &str| ("Podman as root".to_owned(), vec![PathBuf::from(dir)]);
        assert_eq!(places(views()), [podman("/a")]);
        assert!(!trace.try_exists().unwrap(), "all versions look there");
        assert!(all_read_cdi(&host, None, "0.7.0") && !all_read_cdi(&host, None, "1.1.0"));
        std::fs::remove_file(&trace).unwrap();
        // What only Podman 5 reads.
        write("root/.config/containers/containers.conf", "[engine]\ncdi_spec_dirs = [\"/c\"]");
        assert_eq!(places(views()), [podman("/c")]);
        assert!(trace.try_exists().unwrap());
        write("usr/bin/crio", "#!/bin/sh\necho crio version 1.29.0");
        assert_eq!(places(views())[1], ("CRI-O".to_owned(), vec![PathBuf::from("/b")]));
        assert!(!all_read_cdi(&host, None, "0.7.0"), "CRI-O 1.29 does not");
    }
}
