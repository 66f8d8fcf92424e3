//! Keeps the CDI spec of the node current, for engines that get the names of CDI devices from the plugin.
//!
//! The spec has a kind of its own, so it never conflicts with a spec of the administrator for `nvidia.com/gpu`. Kind and file name are
//! those of NVIDIA's device plugin: this plugin takes its place, and containers that it started can restart.

use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, Result};

use base::paths::HostPath;
use cdi_spec::file::Format;
use engines::cdi_check::is_ours;
use nvidia_host::cdi::generate::Naming;
use nvidia_host::cdi::of_host::{self, Settings};
use nvidia_host::cdi::stamp::Stamp;
use nvidia_host::config::{Config, Limits};
use nvidia_host::host::Host;
use nvidia_host::inventory::Inventory;

/// The vendor in [`KIND`].
const VENDOR: &str = "k8s.device-plugin.nvidia.com";
/// The class in [`KIND`].
const CLASS: &str = "gpu";
/// The kind of the CDI devices: a device is `k8s.device-plugin.nvidia.com/gpu=GPU-…`.
pub const KIND: &str = "k8s.device-plugin.nvidia.com/gpu";
/// The directory for specs that do not outlive a boot.
pub const DIR: &str = "/var/run/cdi";
/// The program that the runtime starts on the host because of the spec, for links and the linker cache.
pub const HOOK: &str = "/usr/bin/oci-nvidia-hook";

/// Returns the full name of the CDI device with this UUID.
#[must_use]
pub fn device_name(uuid: &str) -> String {
    format!("{KIND}={uuid}")
}

/// Returns the path of the spec in this directory.
fn file_in(dir: &Path) -> PathBuf {
    dir.join(format!("{VENDOR}-{CLASS}.json"))
}

/// Removes the spec that an earlier run left in [`DIR`], because nothing would keep it current. A spec of NVIDIA's plugin, which has the same
/// name, remains. Reports whether there was one.
///
/// # Errors
/// If it cannot be removed.
pub fn remove_unused(dir: &Path) -> Result<bool> {
    let path = file_in(dir);
    let is_ours = fs::read(&path).is_ok_and(|bytes| cdi_spec::file::parse(&bytes).is_ok_and(|spec| is_ours(&spec)));
    if is_ours {
        fs::remove_file(&path).with_context(|| format!("cannot remove the CDI spec {path:?}, which is not used"))?;
    }
    Ok(is_ours)
}

/// Writes the spec file, and removes it.
#[derive(Debug)]
pub struct Keeper {
    config: Config,
    settings: Settings,
    path: PathBuf,
    /// The devices of the node; `None` if the driver does not work
    inventory: Option<Inventory>,
    /// The state of the host when the file was last written for these devices, and whether the file was created: engines reject a spec
    /// without devices, so none is written if the limits permit no device
    written: Option<(Stamp, bool)>,
}

impl Keeper {
    /// Creates a keeper for a file in this directory. The spec starts `program` in containers.
    #[must_use]
    pub fn new(config: &Config, dir: &Path, program: &Path) -> Self {
        let settings = Settings {
            naming: Naming::default(),
            vendor: VENDOR.to_owned(),
            class: CLASS.to_owned(),
            // Some engines reject the whole file because of this field, and the engine of the node is not asked.
            additional_gids: Some(false),
            program: HostPath::new(program),
            format: Format::Json,
        };
        Self { config: config.clone(), settings, path: file_in(dir), inventory: None, written: None }
    }

    /// Sets the devices of the node; `None` if the driver is missing, fails, or is being replaced. Updates the file.
    ///
    /// # Errors
    /// Those of [`Self::refresh`].
    pub fn set(&mut self, inventory: Option<&Inventory>) -> Result<()> {
        if self.inventory.as_ref() != inventory {
            self.inventory = inventory.cloned();
            self.written = None;
        }
        self.refresh()
    }

    /// Sets the limits: the spec has only the devices that they permit. Updates the file.
    ///
    /// # Errors
    /// Those of [`Self::refresh`].
    pub fn set_limits(&mut self, limits: &Limits) -> Result<()> {
        // They are part of the stamp, like the whole configuration.
        self.config.devices.clone_from(limits);
        self.refresh()
    }

    /// Updates the file if the driver's files or the limits have changed, or if another program removed the file.
    ///
    /// # Errors
    /// If the driver lacks a file that all containers require, or the file cannot be written. An old file is then removed, because
    /// its devices may not exist any more.
    pub fn refresh(&mut self) -> Result<()> {
        let Some(inventory) = self.inventory.clone() else {
            return self.remove();
        };
        let now = self.stamp(&inventory);
        let exists = fs::symlink_metadata(&self.path).is_ok();
        if now.is_some() && now.as_ref().map(|now| (now, exists)) == self.written.as_ref().map(|(was, has)| (was, *has))
        {
            return Ok(());
        }
        match self.write(inventory) {
            Ok(has_devices) => self.written = now.map(|now| (now, has_devices)),
            Err(error) => {
                self.remove()?;
                return Err(error);
            }
        }
        Ok(())
    }

    fn stamp(&self, inventory: &Inventory) -> Option<Stamp> {
        let mut stamp = Stamp::of_host(&self.config, &self.settings)?;
        stamp.complete(inventory);
        Some(stamp)
    }

    /// Writes the file, and returns whether there is one: engines reject a spec without devices.
    fn write(&self, inventory: Inventory) -> Result<bool> {
        let host = Host::with_inventory(&self.config, inventory)?;
        let spec = of_host::of_inspected(&self.config, &self.settings, &host, &mut Vec::new())?; // `check` and doctor report the findings
        if spec.devices.is_empty() {
            self.remove_file()?;
            return Ok(false);
        }
        let text = self.settings.format.print(&spec)?;
        cdi_spec::file::write(&self.path, &text).with_context(|| format!("cannot write {:?}", self.path))?;
        Ok(true)
    }

    fn remove(&mut self) -> Result<()> {
        self.written = None;
        self.remove_file()
    }

    fn remove_file(&self) -> Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {:?}", self.path))
            }
            _ => Ok(()),
        }
    }
}
