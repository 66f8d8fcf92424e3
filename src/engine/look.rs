//! Looking at the engines of a host.

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
    /// Whether its program ends with an error instead of telling its version, where it is run as whom it is of
    pub fails: bool,
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
    let asked = program.as_ref().map(|program| versions.of(host, program));
    let mut engine = Engine {
        kind,
        version: asked.as_ref().and_then(|asked| asked.as_ref().ok().copied()),
        program,
        files: Vec::new(),
        settings: Settings::default(),
        unseen: Vec::new(),
        hooks: Hooks::default(),
        runtime: None,
        fails: false,
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
    // Another user's program reads other files.
    let is_root = rustix::process::geteuid().is_root();
    engine.fails = asked == Some(Err(Untold::Failed)) && is_root != matches!(engine.kind, Kind::PodmanOf(_));
    engine.settings.finish(&engine.kind, engine.version);
    if let Kind::Docker = engine.kind {
        let linked = runtime::program(host, DOCKERS_HOOK);
        engine.dockers_hook = linked.and_then(|link| Some(host.locate(&link).ok()?.path));
        return engine;
    }
    engine.hooks = hooks::read(host, &engine.settings.hooks_dirs, engine.kind.is_podman());
    let runtime = runtime::of(&engine.kind, &engine.settings, engine.version, host);
    engine.runtime = runtime.map(|(name, program)| {
        let version = program.as_ref().and_then(|program| versions.of(host, program).ok());
        Runtime { name, program, version }
    });
    engine
}

/// Why a program's version is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Untold {
    /// It was not run, or says something else
    Unknown,
    /// It ended with an error
    Failed,
}

/// Each program is asked once.
#[derive(Debug, Default)]
struct Versions(Vec<(PathBuf, Result<Version, Untold>)>);

impl Versions {
    fn of(&mut self, host: &DriverRoot, program: &Path) -> Result<Version, Untold> {
        if let Some((_, known)) = self.0.iter().find(|(known, _)| known == program) {
            return *known;
        }
        let told = ask_version(host, program);
        self.0.push((program.to_owned(), told));
        told
    }
}

/// A program that somebody else could have written is not run.
fn ask_version(host: &DriverRoot, program: &Path) -> Result<Version, Untold> {
    let real = host.locate(program).map_err(|_| Untold::Unknown)?;
    let us = rustix::process::geteuid().as_raw();
    let is_file = real.kind == rustix::fs::FileType::RegularFile;
    if !is_file || ![0, us].contains(&real.uid) || real.mode & 0o022 != 0 {
        return Err(Untold::Unknown);
    }
    match process::read_version(real.host.as_path(), VERSION_DEADLINE) {
        Ok(said) => version::parse(&said).ok_or(Untold::Unknown),
        Err(error) if error.kind() == std::io::ErrorKind::Other => Err(Untold::Failed),
        Err(_) => Err(Untold::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::HostPath;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_others_could_have_written_is_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let (program, trace) = (dir.path().join("podman"), dir.path().join("trace"));
        let host = DriverRoot::open(&HostPath::new(dir.path())).unwrap();
        let script = format!("#!/bin/sh\ntouch '{}'\necho podman version 5.4.1", trace.display());
        std::fs::write(&program, script).unwrap();
        for (mode, told, ran) in [
            (0o777, Err(Untold::Unknown), false),
            (0o775, Err(Untold::Unknown), false),
            (0o644, Err(Untold::Unknown), false),
            (0o755, Ok(Version(5, 4, 1)), true),
        ] {
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(ask_version(&host, Path::new("/podman")), told, "{mode:o}");
            assert_eq!(trace.try_exists().unwrap(), ran, "{mode:o}");
        }
        std::fs::write(&program, "#!/bin/sh\nexit 125").unwrap();
        assert_eq!(ask_version(&host, Path::new("/podman")), Err(Untold::Failed));
    }
}
