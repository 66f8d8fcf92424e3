//! Knows which CDI versions an engine reads, and in which directories it searches for specs.
//!
//! An engine rejects a whole file of a version that it does not know. Its error then states only that the device is unknown.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use base::tree::Tree;
use cdi_spec::name::is_nvidia;
use cdi_spec::registry::{self, Found};
use cdi_spec::rules::VERSIONS;

use super::{Engine, EngineKind, Version};

/// The default directories of engines, sorted by ascending priority.
pub const DEFAULT_DIRS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// An engine that reads CDI specs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecReader {
    /// The engine
    pub kind: EngineKind,
    /// The version that `--version` prints; `None` if it is unknown
    pub version: Option<Version>,
}

/// Engines that search the same directories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The engines
    pub readers: Vec<SpecReader>,
    /// The directories, sorted by ascending priority
    pub dirs: Vec<PathBuf>,
}

/// CDI versions, and the first Podman that reads each. NVIDIA's toolkit documents the one for 0.7.0. Its issue 38 reports that
/// Podman 4.3 reads 0.5.0, and 4.2 does not.
const PODMAN: [(&str, Version); 4] = [
    ("0.1.0", Version(4, 1, 0)),
    ("0.4.0", Version(4, 1, 0)),
    ("0.5.0", Version(4, 3, 0)),
    ("0.7.0", Version(5, 1, 0)),
];
/// CDI versions, and the first release of CRI-O that supports each.
const CRIO: [(&str, Version); 3] = [
    ("0.1.0", Version(1, 23, 0)),
    ("0.4.0", Version(1, 23, 0)),
    ("0.7.0", Version(1, 30, 0)),
];

impl SpecReader {
    /// Returns whether the engine reads specs of this version; `None` if that is unknown.
    pub fn reads(&self, cdi_version: &str) -> Option<bool> {
        let since: &[(&str, Version)] = match self.kind {
            EngineKind::Podman | EngineKind::PodmanOf(_) => &PODMAN,
            EngineKind::Crio => &CRIO,
            EngineKind::Docker => &[],
        };
        let version = self.version?;
        let asked = place(cdi_version.trim_start_matches('v'))?;
        for (known, first) in since {
            if place(known) >= Some(asked) && version >= *first {
                return Some(true);
            }
        }
        for (known, first) in since {
            if place(known) <= Some(asked) && version < *first {
                return Some(false);
            }
        }
        None
    }
}

/// Returns the position of a CDI version among all versions.
fn place(version: &str) -> Option<usize> {
    VERSIONS.iter().position(|known| *known == version)
}

impl fmt::Display for SpecReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.version {
            Some(version) => write!(f, "{} ({version})", self.kind),
            None => write!(f, "{} (unknown version)", self.kind),
        }
    }
}

/// Returns the paths as text.
pub fn list_paths(paths: &[PathBuf]) -> String {
    let paths: Vec<_> = paths
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    paths.join(", ")
}

/// A spec file with devices of NVIDIA that engines find. The field names are part of the JSON interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CdiSpec {
    /// The path of the file
    pub file: PathBuf,
    /// The number of its devices that engines find
    pub devices: usize,
}

/// Returns the spec files in these directories that define devices of NVIDIA.
pub(crate) fn specs(host: &Tree, dirs: &[PathBuf]) -> Vec<CdiSpec> {
    let files = registry::read(&dirs.iter().map(|dir| host.on_host(dir)).collect::<Vec<_>>());
    let mut devices: BTreeMap<usize, usize> = BTreeMap::new();
    for (name, found) in registry::resolve(&files) {
        if let Found::In(file) = found
            && is_nvidia(&name)
        {
            *devices.entry(file).or_default() += 1;
        }
    }
    let mut specs = Vec::new();
    for (file, devices) in devices {
        if let Some(file) = files.get(file) {
            let file = file.path.clone();
            specs.push(CdiSpec { file, devices });
        }
    }
    specs
}

/// Groups the installed engines by the directories that they search. Docker is left out, because it is unknown which versions it
/// reads.
pub fn views(engines: &[Engine]) -> Vec<View> {
    let mut readers = Vec::new();
    for engine in engines {
        if engine.program.is_some() && engine.kind != EngineKind::Docker {
            let reader = SpecReader {
                kind: engine.kind.clone(),
                version: engine.version,
            };
            readers.push((reader, engine.settings.cdi_dirs.clone()));
        }
    }
    group(readers)
}

/// Returns one view for all engines that search the same directories.
pub(crate) fn group(readers: Vec<(SpecReader, Vec<PathBuf>)>) -> Vec<View> {
    let mut views: Vec<View> = Vec::new();
    for (reader, dirs) in readers {
        match views.iter_mut().find(|view| view.dirs == dirs) {
            Some(view) => view.readers.push(reader),
            None => views.push(View {
                readers: vec![reader],
                dirs,
            }),
        }
    }
    views
}

/// Where the engine of a node searches for CDI specs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CdiSpecs {
    /// In these directories
    Dirs(Vec<PathBuf>),
    /// Nowhere, for this reason
    Off(String),
    /// It is not known, for this reason.
    Unknown(String),
}

impl Default for CdiSpecs {
    fn default() -> Self {
        Self::Unknown("the engine of the node is not known".to_owned())
    }
}

/// Whether containers get the CDI devices of a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CdiVerdict {
    /// They do.
    Given,
    /// They do not, for this reason.
    Dropped(String),
    /// It is not known, for this reason.
    Unknown(String),
}

impl CdiSpecs {
    /// Decides whether containers get the devices of the specs in this directory.
    #[must_use]
    pub fn verdict(&self, ours: &Path) -> CdiVerdict {
        match self {
            Self::Off(why) => CdiVerdict::Dropped(why.clone()),
            Self::Unknown(why) => CdiVerdict::Unknown(why.clone()),
            Self::Dirs(dirs) if dirs.iter().any(|dir| plain(dir) == plain(ours)) => {
                CdiVerdict::Given
            }
            Self::Dirs(dirs) => CdiVerdict::Dropped(format!(
                "the engine reads CDI specs in {dirs:?} (cdi_spec_dirs), and not in {ours:?}"
            )),
        }
    }
}

/// Returns the path of a directory for comparison: `/var/run` is a link to `/run`.
pub(crate) fn plain(dir: &Path) -> PathBuf {
    let dir: PathBuf = dir.components().collect();
    match dir.strip_prefix("/var/run") {
        Ok(rest) => Path::new("/run").join(rest),
        Err(_) => dir,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_engines_read() {
        for (kind, version, cdi, reads) in [
            (
                EngineKind::Podman,
                Some(Version(3, 4, 4)),
                "0.3.0",
                Some(false),
            ),
            (
                EngineKind::Podman,
                Some(Version(4, 2, 0)),
                "0.3.0",
                Some(true),
            ),
            (
                EngineKind::Podman,
                Some(Version(4, 2, 0)),
                "0.5.0",
                Some(false),
            ),
            (
                EngineKind::Podman,
                Some(Version(4, 3, 1)),
                "0.5.0",
                Some(true),
            ),
            (EngineKind::Podman, Some(Version(4, 9, 5)), "0.6.0", None),
            (
                EngineKind::Podman,
                Some(Version(4, 9, 5)),
                "0.7.0",
                Some(false),
            ),
            (
                EngineKind::Podman,
                Some(Version(5, 1, 0)),
                "0.7.0",
                Some(true),
            ),
            (EngineKind::Podman, Some(Version(5, 1, 0)), "1.1.0", None),
            (EngineKind::Podman, None, "0.3.0", None),
            (EngineKind::Crio, Some(Version(1, 29, 9)), "0.5.0", None),
            (
                EngineKind::Crio,
                Some(Version(1, 29, 9)),
                "0.7.0",
                Some(false),
            ),
            (
                EngineKind::Crio,
                Some(Version(1, 30, 0)),
                "v0.5.0",
                Some(true),
            ),
            (EngineKind::Docker, Some(Version(28, 3, 0)), "0.3.0", None),
        ] {
            let reader = SpecReader { kind, version };
            assert_eq!(reader.reads(cdi), reads, "{reader} {cdi}");
        }
    }
}
