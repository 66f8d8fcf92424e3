//! Finds the programs and the daemons of the Multi-Process Service (MPS), and starts the process that sets the compute mode.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use base::paths::HostPath;
use base::report::failure;
use findings::catalog;

use super::Host;
use super::driver::Driver;
use crate::capability::{Capabilities, Capability};
use crate::config::Config;
use crate::driver::{locate, packages};
use crate::inventory::Gpu;
use crate::mps::{self, Daemon};
use crate::nvml::mode_process::ModeProcess;
use crate::nvml::protocol::ModeTarget;
use crate::programs;

/// The programs of MPS, and the directories in which they find each other and libcuda.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsPrograms {
    /// `nvidia-cuda-mps-control`, which is the daemon and also sends commands to it
    pub control: HostPath,
    /// The value of `PATH`: the daemon starts `nvidia-cuda-mps-server`
    pub path: OsString,
    /// The value of `LD_LIBRARY_PATH`
    pub library_path: OsString,
}

/// Returns the daemons of the GPUs that config.toml shares, for commands that show them. Without a driver that answers there are none.
#[must_use]
pub fn mps_daemons(config: &Config) -> Vec<Daemon> {
    if config.sharing.mps_gpus.is_empty() {
        return Vec::new();
    }
    match Host::inspect(config, &|| ()) {
        Ok(host) => host.mps_daemons(),
        Err(_) => Vec::new(),
    }
}

impl Host {
    /// Returns the MPS daemons of the GPUs that config.toml shares.
    #[must_use]
    pub fn mps_daemons(&self) -> Vec<Daemon> {
        self.mps_daemons_of(&self.inventory.gpus)
    }

    /// Returns the MPS daemons of those of these GPUs that config.toml shares. A start does not examine the daemons of other GPUs.
    #[must_use]
    pub fn mps_daemons_of<'g>(&self, gpus: impl IntoIterator<Item = &'g Gpu>) -> Vec<Daemon> {
        mps::daemons(&self.roots().driver, &self.config.sharing, gpus)
    }

    /// Finds the programs of MPS.
    ///
    /// # Errors
    /// If a program or libcuda is missing.
    pub fn mps_programs(&self) -> Result<MpsPrograms> {
        let search = self.search();
        let (files, _) = locate::locate(&search, Capabilities::new(&[Capability::Compute]), &[])
            .context("cannot find the driver's libraries for MPS")?;
        let mut programs = Vec::new();
        for name in [programs::MPS_CONTROL, programs::MPS_SERVER] {
            let found = files.binaries.iter().find(|binary| binary.name == name);
            let Some(binary) = found else {
                return Err(self.missing_program(name));
            };
            programs.push(binary.source.clone());
        }
        let mut dirs = Vec::new();
        for program in &programs {
            add_dir(&mut dirs, program.as_path());
        }
        dirs.extend(["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from));
        let mut library_dirs = Vec::new();
        for library in &files.libraries {
            add_dir(&mut library_dirs, library.source.as_path());
        }
        let Some(control) = programs.into_iter().next() else {
            return Err(self.missing_program(programs::MPS_CONTROL));
        };
        Ok(MpsPrograms {
            control,
            path: joined(&dirs),
            library_path: joined(&library_dirs),
        })
    }

    fn missing_program(&self, name: &str) -> anyhow::Error {
        let root = &self.roots().driver;
        let hint = match packages::install_mps(root, self.search().version) {
            Some(command) => format!("install it: {command}"),
            None => "install the package of the driver that contains it".to_owned(),
        };
        failure(
            &catalog::MPS_START,
            format!(
                "the driver's program {name:?} is missing below {}",
                root.path()
            ),
            hint,
        )
    }
}

fn add_dir(dirs: &mut Vec<PathBuf>, file: &Path) {
    if let Some(dir) = file.parent()
        && !dirs.iter().any(|known| known == dir)
    {
        dirs.push(dir.to_owned());
    }
}

/// Joins directories with colons.
fn joined(dirs: &[PathBuf]) -> OsString {
    let dirs = dirs.iter().map(|dir| dir.as_os_str());
    Vec::from_iter(dirs).join(std::ffi::OsStr::new(":"))
}

/// Starts the process that reads and sets the compute mode of a GPU. The program must have only one thread, because a child is forked.
///
/// # Errors
/// If there is no driver, or the process cannot be started.
pub fn mode_process(config: &Config, target: &ModeTarget) -> Result<ModeProcess> {
    ModeProcess::start(Driver::find(config)?.question()?, target)
}
