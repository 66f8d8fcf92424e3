//! Finds the default OCI runtime of an engine.

use std::path::PathBuf;

use base::search_path;
use base::tree::Tree;

use super::settings::EngineSettings;
use super::{EngineKind, Version};

/// The first CRI-O whose default is crun.
const CRIO_WITH_CRUN: Version = Version(1, 31, 0);

/// An OCI runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// `runc`, `crun`
    pub name: String,
    /// Its program; `None` if it is missing
    pub program: Option<PathBuf>,
    /// The version that `--version` prints
    pub version: Option<Version>,
}

/// Returns the name and the program of an engine's default runtime; `None` for Docker, whose runtime is not inspected.
pub fn find_default(
    kind: &EngineKind,
    settings: &EngineSettings,
    version: Option<Version>,
    host: &Tree,
) -> Option<(String, Option<PathBuf>)> {
    let name = match (kind, settings.runtime.as_deref()) {
        (EngineKind::Docker, _) => return None,
        (_, Some(name)) => name,
        (EngineKind::Crio, _) if version.is_some_and(|version| version < CRIO_WITH_CRUN) => "runc",
        _ if search_path::find(host, "crun").is_some() => "crun",
        _ => "runc",
    };
    if name.contains('/') {
        let path = PathBuf::from(name);
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        return Some((name, Some(path).filter(|path| host.locate(path).is_ok())));
    }
    let mut configured = settings
        .runtime_paths
        .iter()
        .filter(|(known, _)| known == name)
        .map(|(_, path)| path.clone());
    let found = configured
        .find(|path| host.locate(path).is_ok())
        .or_else(|| search_path::find(host, name));
    Some((name.to_owned(), found))
}
