//! The OCI runtime that an engine starts containers with.

use std::path::{Path, PathBuf};

use base::tree::Tree;

use super::settings::Settings;
use super::{Kind, Version};

/// CRI-O whose default is crun.
const CRIO_WITH_CRUN: Version = Version(1, 31, 0);
/// Where programs are, as engines and shells look.
pub(crate) const PROGRAM_DIRS: [&str; 7] =
    ["/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/sbin", "/bin", "/usr/lib/cri-o-runc/sbin"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// `runc`, `crun`
    pub name: String,
    /// Its program; none: it is not there
    pub program: Option<PathBuf>,
    /// What it prints for `--version`
    pub version: Option<Version>,
}

/// The first program of that name.
pub(crate) fn program(host: &Tree, name: &str) -> Option<PathBuf> {
    PROGRAM_DIRS.iter().map(|dir| Path::new(dir).join(name)).find(|path| host.locate(path).is_ok())
}

/// The name and the program of an engine's default runtime; `None` for Docker, whose runtime does not matter here.
pub(crate) fn find_default(
    kind: &Kind,
    settings: &Settings,
    version: Option<Version>,
    host: &Tree,
) -> Option<(String, Option<PathBuf>)> {
    let default = || match kind {
        Kind::Crio if version.is_some_and(|version| version < CRIO_WITH_CRUN) => "runc",
        _ if program(host, "crun").is_some() => "crun",
        _ => "runc",
    };
    let name = match kind {
        Kind::Docker => return None,
        _ => settings.runtime.clone().unwrap_or_else(|| default().to_owned()),
    };
    if name.contains('/') {
        let path = PathBuf::from(&name);
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Some((name, Some(path).filter(|path| host.locate(path).is_ok())));
    }
    let configured = settings.runtime_paths.iter().filter(|(known, _)| *known == name).map(|(_, path)| path.clone());
    let found = configured.into_iter().find(|path| host.locate(path).is_ok()).or_else(|| program(host, &name));
    Some((name, found))
}
