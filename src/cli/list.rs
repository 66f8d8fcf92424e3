//! `list`: the driver's files that containers can get, a path on each line, without the driver root.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;

use super::{Options, info, output};
use crate::config::Config;
use crate::driver::ldcache::Arch;
use crate::driver::libraries::{LinkerCache, Search};
use crate::driver::locate::{DriverFiles, locate};
use crate::driver::{DriverRoot, diagnosis};
use crate::error::failure;
use crate::finding::catalog;
use crate::inventory::procfs::{self, DRIVER_PROC};
use crate::log::Log;
use crate::paths::HostPath;
use crate::request::capabilities::{Capabilities, Capability};

/// Which files; none of them is all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// `--libraries`
    pub libraries: bool,
    /// `--compat32`
    pub compat32: bool,
    /// `--binaries`
    pub binaries: bool,
    /// `--ipcs`
    pub ipcs: bool,
    /// `--firmwares`
    pub firmwares: bool,
}

/// Prints them.
#[must_use]
pub fn run(options: &Options) -> ExitCode {
    let wanted = options.wanted;
    match info::configuration(options).and_then(|config| find(&config)) {
        Ok((root, files)) => {
            let paths = paths(&files, if wanted == Wanted::default() { all() } else { wanted });
            let lines = paths.into_iter().filter_map(|path| root.inside(path).ok());
            let text: String = lines.map(|path: PathBuf| format!("{}\n", path.display())).collect();
            output::print(&text)
        }
        Err(error) => {
            Log::default().error(&error);
            ExitCode::FAILURE
        }
    }
}

const fn all() -> Wanted {
    Wanted { libraries: true, compat32: true, binaries: true, ipcs: true, firmwares: true }
}

/// Of the loaded driver; where none is loaded, of the one whose libraries are there. NVML is not asked.
fn find(config: &Config) -> Result<(DriverRoot, DriverFiles)> {
    let root = DriverRoot::open(&config.driver_root)?;
    let cache = LinkerCache::read(&root, config.ldcache.as_ref());
    let module = procfs::read_version(&root.owner_of(DRIVER_PROC)?);
    let any = Search { root: &root, cache: &cache, version: "", dirs: &config.library_dirs };
    let version = module.clone().or_else(|| diagnosis::look(&any, module).libraries).ok_or_else(|| {
        failure(
            &catalog::NO_LIBRARIES,
            format!("there is no NVIDIA driver below {}", root.path()),
            "name its directory with --root, or with root in the [nvidia-container-cli] table of config.toml",
        )
    })?;
    let search = Search { version: &version, ..any };
    let (files, findings) = locate(&search, Capabilities::of(&Capability::ALL), &config.driver_files)?;
    let mut log = Log::default();
    findings.iter().for_each(|finding| log.finding(finding));
    Ok((root, files))
}

/// In the order of `nvidia-container-cli list`.
fn paths(files: &DriverFiles, wanted: Wanted) -> Vec<&HostPath> {
    let libraries = |native: bool| {
        files
            .libraries
            .iter()
            .filter(move |library| (library.arch == Arch::native()) == native)
            .map(|library| &library.source)
    };
    let is_firmware = |path: &Path| path.components().any(|component| component.as_os_str() == "firmware");
    let mut paths = Vec::new();
    if wanted.binaries {
        paths.extend(files.binaries.iter().map(|binary| &binary.source));
    }
    if wanted.libraries {
        paths.extend(libraries(true));
    }
    if wanted.compat32 {
        paths.extend(libraries(false));
    }
    if wanted.ipcs {
        paths.extend(files.ipc.iter().map(|file| &file.source));
    }
    if wanted.firmwares {
        let firmware = files.placed.iter().filter(|file| is_firmware(&file.target.absolute()));
        paths.extend(firmware.map(|file| &file.source));
    }
    paths
}
