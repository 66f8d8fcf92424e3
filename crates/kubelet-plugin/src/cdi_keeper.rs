//! Keeps the CDI specs of the node current, for engines that get the names of CDI devices from the plugin: the spec of the GPUs, and one
//! for each kind of device next to them that the node has, such as those of GPUDirect.
//!
//! The specs have kinds of their own, so they never conflict with a spec of the administrator for `nvidia.com/gpu`. Kinds and file names are
//! those of NVIDIA's device plugin: this plugin takes its place, and containers that it started can restart. The names for claims have
//! other kinds, with the vendor of NVIDIA's driver for DRA.

use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, Result};

use base::paths::HostPath;
use cdi_spec::file::Format;
use engines::cdi_check::is_ours;
use nvidia_host::cdi::extras;
use nvidia_host::cdi::generate::{ALL, Naming};
use nvidia_host::cdi::of_host::{self, Settings};
use nvidia_host::cdi::stamp::Stamp;
use nvidia_host::config::{Config, Limits};
use nvidia_host::feature::{Feature, Features};
use nvidia_host::host::Host;
use nvidia_host::inventory::Inventory;

/// The class of GPUs and MIG devices.
const CLASS: &str = "gpu";

/// The kinds of CDI devices with one vendor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    vendor: &'static str,
}

/// The devices of the device plugin and of NRI: `k8s.device-plugin.nvidia.com/gpu=GPU-…`.
pub const DEVICE_PLUGIN: Kind = Kind { vendor: "k8s.device-plugin.nvidia.com" };
/// The devices of claims: `k8s.gpu.nvidia.com/gpu=GPU-…`.
pub const CLAIMS: Kind = Kind { vendor: "k8s.gpu.nvidia.com" };

/// The directory for specs that do not outlive a boot.
pub const DIR: &str = "/var/run/cdi";
/// The program that the runtime starts on the host because of the spec, for links and the linker cache.
pub const HOOK: &str = "/usr/bin/oci-nvidia-hook";

impl Kind {
    /// Returns the full name of the CDI device with this UUID.
    #[must_use]
    pub fn device_name(self, uuid: &str) -> String {
        format!("{}/{CLASS}={uuid}", self.vendor)
    }

    /// Returns the full name of the CDI device of a feature.
    #[must_use]
    pub fn feature_name(self, feature: Feature) -> String {
        format!("{}/{}={ALL}", self.vendor, feature.row().name)
    }

    /// Returns the path of the spec of a class in this directory.
    fn file_in(self, dir: &Path, class: &str) -> PathBuf {
        dir.join(format!("{}-{class}.json", self.vendor))
    }
}

/// Removes the specs that an earlier run left in [`DIR`], because nothing would keep them current. The specs of NVIDIA's plugin, which have
/// the same names, remain. Reports whether there was one.
///
/// # Errors
/// If it cannot be removed.
pub fn remove_unused(dir: &Path, kind: Kind) -> Result<bool> {
    let mut found = false;
    for path in extras::classes().chain([CLASS]).map(|class| kind.file_in(dir, class)) {
        let is_ours = fs::read(&path).is_ok_and(|bytes| cdi_spec::file::parse(&bytes).is_ok_and(|spec| is_ours(&spec)));
        if is_ours {
            fs::remove_file(&path)
                .with_context(|| format!("cannot remove the CDI spec {path:?}, which is not used"))?;
        }
        found |= is_ours;
    }
    Ok(found)
}

/// Writes the spec files, and removes them.
#[derive(Debug)]
pub struct Keeper {
    kind: Kind,
    config: Config,
    settings: Settings,
    dir: PathBuf,
    /// The spec of the GPUs
    path: PathBuf,
    /// The devices of the node; `None` if the driver does not work
    inventory: Option<Inventory>,
    /// The state of the host when the file was last written for these devices, and whether the file was created: engines reject a spec
    /// without devices, so none is written if the limits permit no device
    written: Option<(Stamp, bool)>,
    /// The features that have a spec
    features: Features,
}

impl Keeper {
    /// Creates a keeper for the devices of this kind, with files in this directory. The specs start `program` for containers.
    #[must_use]
    pub fn new(kind: Kind, config: &Config, dir: &Path, program: &Path) -> Self {
        let settings = Settings {
            naming: Naming::default(),
            vendor: kind.vendor.to_owned(),
            class: CLASS.to_owned(),
            // Some engines reject the whole file because of this field, and the engine of the node is not asked.
            additional_gids: Some(false),
            program: HostPath::new(program),
            format: Format::Json,
        };
        Self {
            kind,
            config: config.clone(),
            settings,
            dir: dir.to_owned(),
            path: kind.file_in(dir, CLASS),
            inventory: None,
            written: None,
            features: Features::EMPTY,
        }
    }

    /// Returns the features that have a spec.
    #[must_use]
    pub const fn features(&self) -> Features {
        self.features
    }

    /// Sets the devices of the node; `None` if the driver is missing, fails, or is being replaced. Updates the files.
    ///
    /// # Errors
    /// See [`Self::refresh`].
    pub fn set(&mut self, inventory: Option<&Inventory>) -> Result<()> {
        if self.inventory.as_ref() != inventory {
            self.inventory = inventory.cloned();
            self.written = None;
        }
        self.refresh()
    }

    /// Sets the limits: the specs have only the devices that they permit. Updates the files.
    ///
    /// # Errors
    /// See [`Self::refresh`].
    pub fn set_limits(&mut self, limits: &Limits) -> Result<()> {
        // They are part of the stamp, like the whole configuration.
        self.config.devices.clone_from(limits);
        self.refresh()
    }

    /// Updates the files if the driver's files, the devices or the limits have changed, or if another program removed a file.
    ///
    /// # Errors
    /// If the driver lacks a file that all containers require, or a file cannot be written. An old file is then removed, because
    /// its devices may not exist any more.
    pub fn refresh(&mut self) -> Result<()> {
        let now = self.inventory.as_ref().and_then(|inventory| self.stamp(inventory));
        let result = self.refresh_features(now.as_ref());
        // An error of one spec does not keep the others.
        self.refresh_gpus(now)?;
        result
    }

    /// Updates the specs of the devices next to the GPUs. The stamp of the host does not include these devices, so the specs are compared.
    fn refresh_features(&mut self, now: Option<&Stamp>) -> Result<()> {
        self.features = Features::EMPTY;
        let specs = match now {
            Some(now) => extras::make(&self.config, &self.settings, now, &|| false, &mut Vec::new())?,
            None => Vec::new(),
        };
        let features = specs.iter().filter_map(|(class, _)| Feature::from_name(class)).collect();
        extras::update(specs, &|class| self.kind.file_in(&self.dir, class), &self.settings, &mut Vec::new())
            .with_context(|| format!("cannot update the CDI specs in {:?}", self.dir))?;
        self.features = features;
        Ok(())
    }

    fn refresh_gpus(&mut self, now: Option<Stamp>) -> Result<()> {
        let Some(inventory) = self.inventory.clone() else {
            return self.remove();
        };
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
