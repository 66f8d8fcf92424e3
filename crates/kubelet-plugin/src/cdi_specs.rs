//! Keeps the CDI specs of the node current, for engines that get the names of CDI devices from the plugin: the spec of the GPUs, and one
//! for each kind of device next to them that the node has, such as the devices of GPUDirect.
//!
//! The specs have kinds of their own, so they never conflict with a spec of the administrator for `nvidia.com/gpu`. Kinds and file names are
//! the same as with NVIDIA's device plugin: this plugin takes its place, and containers that it started can restart. The names for claims have
//! other kinds, with the vendor of NVIDIA's driver for DRA.
//!
//! Containers restart at any time, with the names that they got before, and the kubelet does not ask the plugin again. So the spec of an
//! earlier run stays until NVML has answered if the kernel confirms it, and otherwise is made from the GPUs that the kernel lists.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};

use base::paths::HostPath;
use base::sys::file_id::FileId;
use base::sys::mount::statmount;
use cdi_spec::file::Format;
use cdi_spec::spec::{ContainerEdits, Device, Spec};
use engines::cdi_check::is_ours;
use nvidia_host::capability::DRIVER_CAPABILITIES;
use nvidia_host::cdi::extra_devices;
use nvidia_host::cdi::generate::{ALL, Naming};
use nvidia_host::cdi::of_host::{Settings, SpecWriter};
use nvidia_host::cdi::stamp::Stamp;
use nvidia_host::config::{Config, Limits};
use nvidia_host::decimal::parse_decimal;
use nvidia_host::feature::{Feature, Features};
use nvidia_host::host::{Driver, Source};
use nvidia_host::inventory::{Gpu, Inventory};
use plugin_api::kinds;
use rustix::fs::{Access, FlockOperation, Mode, OFlags, flock};

use crate::model::InSpecs;
use crate::node::host::is_in_pod;
use crate::spec_dirs;
use crate::watched_files::WatchedFiles;

/// The class of GPUs and MIG devices.
const CLASS: &str = "gpu";

/// The kinds of CDI devices with one vendor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    vendor: &'static str,
}

/// The devices of the device plugin and of NRI: `k8s.device-plugin.nvidia.com/gpu=GPU-…`.
pub const DEVICE_PLUGIN: Kind = Kind {
    vendor: kinds::DEVICE_PLUGIN.as_str(),
};
/// The devices of claims: `k8s.gpu.nvidia.com/gpu=GPU-…`.
pub const CLAIMS: Kind = Kind {
    vendor: kinds::CLAIMS.as_str(),
};

/// The name of the device for claims that say that the container only monitors its GPUs: the hook entry then gives it no MPS daemon, and the
/// labels of metrics do not name it.
pub const MONITORING: &str = "monitoring";

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

    /// Returns the UUID in the full name of a CDI device of a GPU; `None` for other devices.
    #[must_use]
    pub fn uuid(self, name: &str) -> Option<&str> {
        name.strip_prefix(self.vendor)?
            .strip_prefix('/')?
            .strip_prefix(CLASS)?
            .strip_prefix('=')
    }

    /// Returns the full name of the CDI device of a feature.
    #[must_use]
    pub fn feature_name(self, feature: Feature) -> String {
        format!("{}/{}={ALL}", self.vendor, feature.row().name)
    }

    /// Returns the full name of the CDI device of an IMEX channel.
    #[must_use]
    pub fn imex_name(self, channel: u32) -> String {
        format!("{}/{}={channel}", self.vendor, extra_devices::IMEX_CLASS)
    }

    /// Returns the path of the spec of the GPUs in this directory.
    #[must_use]
    pub fn spec_in(self, dir: &Path) -> PathBuf {
        self.file_in(dir, CLASS)
    }

    /// Returns the path of the spec of a class in this directory.
    fn file_in(self, dir: &Path, class: &str) -> PathBuf {
        dir.join(format!("{}-{class}.json", self.vendor))
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{CLASS}", self.vendor)
    }
}

/// Locks a spec. Each process that keeps it current has a shared lock, and a process that removes it has the only one. The kernel removes
/// a lock with its process (flock(2)), so that a process which was killed leaves none. The spec itself is locked, because each further file
/// in its directory is one that engines and administrators ask about.
#[expect(
    clippy::disallowed_methods,
    reason = "users cannot write to this directory, and a link is not followed"
)]
fn lock(path: &Path, operation: FlockOperation) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)?;
    flock(&file, operation)?;
    Ok(file)
}

/// Removes the specs that an earlier run left in [`DIR`], because nothing would keep them current. The specs of NVIDIA's plugin, which have
/// the same names, remain, and so do specs that a living process keeps. Reports whether there was one.
///
/// # Errors
/// If it cannot be removed.
pub fn remove_unused(dir: &Path, kind: Kind) -> Result<bool> {
    let mut found = false;
    for path in extra_devices::classes()
        .chain([CLASS])
        .map(|class| kind.file_in(dir, class))
    {
        if read_ours(&path).is_none() {
            continue;
        }
        let Ok(_lock) = lock(&path, FlockOperation::NonBlockingLockExclusive) else {
            continue;
        };
        fs::remove_file(&path)
            .with_context(|| format!("cannot remove the CDI spec {path:?}, which is not used"))?;
        found = true;
    }
    Ok(found)
}

/// Reads a spec, unless it is missing, invalid, or another program's.
#[expect(
    clippy::disallowed_methods,
    reason = "engines read this directory, so users cannot write to it"
)]
pub(crate) fn read_ours(path: &Path) -> Option<Spec> {
    cdi_spec::file::parse(&fs::read(path).ok()?)
        .ok()
        .filter(is_ours)
}

/// Returns the file system of a path that may not exist yet.
fn device_of(path: &Path) -> Option<u64> {
    let existing = path.ancestors().find(|path| fs::metadata(path).is_ok())?;
    Some(fs::metadata(existing).ok()?.dev())
}

/// Whether something is mounted at this path.
fn is_mount_point(path: &Path) -> bool {
    let (Some(own), Some(above)) = (mount_id(path), path.parent().and_then(mount_id)) else {
        return false;
    };
    own != above
}

/// Returns the id of the mount that contains the file.
fn mount_id(path: &Path) -> Option<u64> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    statmount::reused_id(file).ok()
}

fn monitoring() -> Device {
    let container_edits = ContainerEdits {
        env: vec![format!("{DRIVER_CAPABILITIES}=utility")],
        ..ContainerEdits::default()
    };
    Device {
        name: MONITORING.to_owned(),
        container_edits,
        ..Device::default()
    }
}

fn names(spec: &Spec) -> BTreeSet<String> {
    spec.devices
        .iter()
        .map(|device| device.name.clone())
        .collect()
}

/// The devices that the spec has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Devices {
    /// NVML has not answered since the plugin started. These are the GPUs that the kernel lists.
    Unanswered(Vec<Gpu>),
    /// The driver is missing, fails, or is being replaced.
    Absent,
    /// What NVML reported
    Known(Inventory),
}

/// What becomes of the spec of an earlier run before NVML has answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    /// It stays.
    Keep,
    /// The GPUs that the kernel lists replace its devices.
    Replace,
    /// It is removed: its files may not exist any more.
    Remove,
}

impl Before {
    /// Decides from the stamps of the spec and of the host, and from whether the kernel lists GPUs that are not in MIG mode. The kernel
    /// does not show the UUIDs of MIG devices.
    fn decide(spec: Option<&Stamp>, host: Option<&Stamp>, has_gpus: bool) -> Self {
        let Some(host) = host else {
            return Self::Remove;
        };
        let has_same_files = |spec: &&Stamp| {
            (&spec.driver, &spec.boot, spec.files) == (&host.driver, &host.boot, host.files)
        };
        let spec = spec.filter(has_same_files);
        let is_current = spec.is_some_and(|spec| {
            let has_same_build = !host.build.is_empty() && spec.build == host.build;
            has_same_build && (spec.host, spec.mig.is_some()) == (host.host, host.mig.is_some())
        });
        match (is_current, spec, has_gpus) {
            (true, ..) => Self::Keep,
            (false, _, true) if host.mig.is_none() => Self::Replace,
            // Another build of this program, or other settings: a list without MIG devices would be worse.
            (false, Some(_), _) => Self::Keep,
            (false, None, true) => Self::Replace,
            (false, None, false) => Self::Remove,
        }
    }
}

/// Writes the spec files, and removes them.
#[derive(Debug)]
pub struct VendorSpecs {
    kind: Kind,
    config: Config,
    settings: Settings,
    dir: PathBuf,
    /// The spec of the GPUs
    gpus: SpecFile,
    /// The specs of the devices next to the GPUs
    extra: Vec<SpecFile>,
    devices: Devices,
    /// The directories of what the spec of the GPUs has
    dirs: WatchedFiles,
    /// The state of the host when the file was last written for these devices, and whether the file was created: engines reject a spec
    /// without devices, so none is written if the limits permit no device
    written: Option<(Stamp, bool)>,
    /// The features that have a spec
    features: Features,
    /// The IMEX channels in the spec of their class
    imex_channels: Vec<u32>,
    /// Why the files are not as the node is
    error: Option<String>,
}

/// A spec file, and what engines must find in it.
#[derive(Debug)]
struct SpecFile {
    path: PathBuf,
    /// The names of its devices, without the kind; empty if there is no such file
    names: Arc<BTreeSet<String>>,
    /// The version of the file that is known to have the devices
    seen: Option<FileId>,
    /// The locked file: no other process removes it
    kept: Option<File>,
}

impl SpecFile {
    fn new(path: PathBuf, names: BTreeSet<String>) -> Self {
        Self {
            path,
            names: Arc::new(names),
            seen: None,
            kept: None,
        }
    }

    /// Locks the file that has the path now. If a process removes it at this moment, the file is lost, and is written again.
    fn keep(&mut self) {
        self.kept = lock(&self.path, FlockOperation::LockShared).ok();
    }

    /// Reports whether another program has removed the file, or has replaced it with one without our devices. Several of our processes can
    /// write the same file.
    fn is_lost(&mut self) -> bool {
        if self.names.is_empty() {
            return false;
        }
        let seen = FileId::at(&self.path).ok();
        if seen.is_some() && seen == self.seen {
            return false;
        }
        let Some(spec) = read_ours(&self.path) else {
            return true;
        };
        let is_lost = !self.names.is_subset(&names(&spec));
        if !is_lost {
            self.seen = seen;
            self.keep();
        }
        is_lost
    }
}

impl VendorSpecs {
    /// Creates the specs of the devices of this kind, with files in this directory. The specs start `program` for containers.
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
            gpus: SpecFile::new(kind.spec_in(dir), BTreeSet::new()),
            extra: Vec::new(),
            devices: Devices::Unanswered(Vec::new()),
            dirs: WatchedFiles::default(),
            written: None,
            features: Features::EMPTY,
            imex_channels: Vec::new(),
            error: None,
        }
    }

    /// Returns the names that the spec of these GPUs would have, without writing it.
    ///
    /// # Errors
    /// If the driver lacks a file that all containers require.
    pub fn would_have(mut self, inventory: Inventory) -> Result<BTreeSet<String>> {
        self.devices = Devices::Known(inventory.clone());
        Ok(names(&self.make(inventory)?))
    }

    /// Checks whether the file can be written, without writing it.
    ///
    /// # Errors
    /// If the directory, or the parent in which it would be created, is not writable.
    pub fn check_dir(&self) -> Result<()> {
        self.check_mount()?;
        let mut dirs = self.dir.ancestors();
        let existing = dirs.find(|dir| fs::metadata(dir).is_ok());
        let existing = existing.unwrap_or(&self.dir);
        rustix::fs::access(existing, Access::WRITE_OK)
            .with_context(|| format!("cannot write {:?}", self.gpus.path))
    }

    /// Checks that the engine can read the directory: in a pod, it must be a mount of the host. It can be on the file system of the
    /// container's root, for example with the storage driver `vfs`.
    fn check_mount(&self) -> Result<()> {
        let is_on_root = device_of(&self.dir) == device_of(Path::new("/"));
        if !is_in_pod() || !is_on_root || is_mount_point(&self.dir) {
            return Ok(());
        }
        let dir = &self.dir;
        bail!(
            "{dir:?} is not a directory of the node; mount it into the pod with a hostPath volume"
        )
    }

    /// Returns the path of the spec of the GPUs.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.gpus.path
    }

    /// Reports whether another program has removed or replaced a file.
    #[must_use]
    pub fn are_lost(&mut self) -> bool {
        self.gpus.is_lost() || self.extra.iter_mut().any(SpecFile::is_lost)
    }

    /// Writes the files again that another program has removed or replaced, or that could not be written.
    ///
    /// # Errors
    /// See [`Self::refresh`].
    pub fn restore(&mut self) -> Result<()> {
        if self.error.is_some() || self.are_lost() {
            return self.refresh();
        }
        Ok(())
    }

    /// Reports whether nothing shows that the files are not as the host is.
    #[must_use]
    pub fn are_settled(&self) -> bool {
        // The directories of a spec of an earlier run are not known.
        let are_known = self.dirs.first().is_some();
        self.error.is_none() && self.written.is_some() && are_known && self.dirs.are_the_same()
    }

    /// Returns what the specs have.
    #[must_use]
    pub fn in_specs(&self) -> InSpecs {
        InSpecs {
            devices: Arc::clone(&self.gpus.names),
            features: self.features,
            imex_channels: self.imex_channels.clone(),
            error: self.error.clone(),
            are_needed: false,
        }
    }

    /// Sets the devices of the node. Updates the files.
    ///
    /// # Errors
    /// See [`Self::refresh`].
    pub fn set(&mut self, devices: &Devices) -> Result<()> {
        if self.devices != *devices {
            self.devices.clone_from(devices);
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
        let result = self.update();
        self.error = result.as_ref().err().map(|error| format!("{error:#}"));
        result
    }

    fn update(&mut self) -> Result<()> {
        let result = self.update_files();
        self.gpus.keep();
        for file in &mut self.extra {
            file.keep();
        }
        result
    }

    fn update_files(&mut self) -> Result<()> {
        let now = match &self.devices {
            Devices::Absent => None,
            Devices::Unanswered(_) => Stamp::of_host(&self.config, &self.settings),
            Devices::Known(inventory) => self.stamp(inventory),
        };
        let result = self.refresh_features(now.as_ref());
        // An error of one spec does not keep the others.
        match self.devices.clone() {
            Devices::Absent => self.remove(),
            Devices::Unanswered(gpus) => self.keep_or_replace(gpus, now),
            Devices::Known(inventory) => self.refresh_gpus(inventory, now),
        }?;
        result
    }

    /// Keeps the spec of an earlier run, or replaces it.
    fn keep_or_replace(&mut self, gpus: Vec<Gpu>, now: Option<Stamp>) -> Result<()> {
        if self.is_current(now.as_ref()) {
            return Ok(());
        }
        let spec = read_ours(&self.gpus.path);
        let stamp = spec.as_ref().and_then(Stamp::from_spec);
        match Before::decide(stamp.as_ref(), now.as_ref(), !gpus.is_empty()) {
            Before::Remove => self.remove(),
            Before::Keep => {
                self.gpus.names = Arc::new(spec.map(|spec| names(&spec)).unwrap_or_default());
                self.written = now.map(|now| (now, true));
                Ok(())
            }
            Before::Replace => {
                let driver_version = now
                    .as_ref()
                    .map(|now| now.driver.clone())
                    .unwrap_or_default();
                self.refresh_gpus(
                    Inventory {
                        driver_version,
                        gpus,
                        ..Inventory::default()
                    },
                    now,
                )
            }
        }
    }

    /// Updates the specs of the devices next to the GPUs. The stamp of the host does not include these devices, so the specs are compared.
    fn refresh_features(&mut self, now: Option<&Stamp>) -> Result<()> {
        (self.features, self.imex_channels) = (Features::EMPTY, Vec::new());
        self.extra.clear();
        let mut writer = SpecWriter::new(&self.config, &self.settings, || false);
        let specs = match now {
            Some(now) => writer.make_extra(now)?,
            None => Vec::new(),
        };
        let features = specs
            .iter()
            .filter_map(|(class, _)| Feature::from_name(class))
            .collect();
        let channels = specs
            .iter()
            .filter(|(class, _)| *class == extra_devices::IMEX_CLASS);
        let channels = channels
            .flat_map(|(_, spec)| &spec.devices)
            .filter_map(|device| parse_decimal(&device.name));
        let channels = channels.collect();
        let mut files = Vec::new();
        for (class, spec) in &specs {
            let path = self.kind.file_in(&self.dir, class);
            files.push(SpecFile::new(path, names(spec)));
        }
        writer
            .update_extra(specs, &|class| self.kind.file_in(&self.dir, class))
            .with_context(|| format!("cannot update the CDI specs in {:?}", self.dir))?;
        (self.features, self.imex_channels) = (features, channels);
        // No file is written if another program's has the devices.
        files.retain(|file| FileId::at(&file.path).is_ok());
        self.extra = files;
        Ok(())
    }

    /// Whether the file is as it was written for this state of the host.
    fn is_current(&mut self, now: Option<&Stamp>) -> bool {
        let exists = fs::symlink_metadata(&self.gpus.path).is_ok() && !self.gpus.is_lost();
        now.is_some()
            && now.map(|now| (now, exists)) == self.written.as_ref().map(|(was, has)| (was, *has))
    }

    fn refresh_gpus(&mut self, inventory: Inventory, now: Option<Stamp>) -> Result<()> {
        if self.is_current(now.as_ref()) {
            return Ok(());
        }
        match self.write(inventory) {
            Ok(names) => {
                self.written = now.map(|now| (now, !names.is_empty()));
                self.gpus.names = Arc::new(names);
            }
            Err(error) => {
                // The first error is the cause, such as a file system that is read-only.
                self.remove().ok();
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

    fn make(&self, inventory: Inventory) -> Result<Spec> {
        let host = Driver::find(&self.config)?.host(Source::Given(inventory))?;
        // NVML's indices are not known before it has answered.
        let naming = Naming {
            index: matches!(self.devices, Devices::Known(_)),
            ..self.settings.naming
        };
        let settings = Settings {
            naming,
            ..self.settings.clone()
        };
        // `check` and doctor report the findings.
        let mut spec = SpecWriter::new(&self.config, &settings, || false).make_of(&host)?;
        if self.kind == CLAIMS && !spec.devices.is_empty() {
            spec.devices.push(monitoring());
        }
        Ok(spec)
    }

    /// Writes the file, and returns the names of its devices. Without a device, it writes no file: engines reject such a spec.
    fn write(&mut self, inventory: Inventory) -> Result<BTreeSet<String>> {
        self.check_mount()?;
        let spec = self.make(inventory)?;
        self.dirs = spec_dirs::examine(&spec, &self.config);
        if spec.devices.is_empty() {
            self.remove_file()?;
            return Ok(BTreeSet::new());
        }
        let text = self.settings.format.print(&spec)?;
        cdi_spec::file::write(&self.gpus.path, &text)
            .with_context(|| format!("cannot write {:?}", self.gpus.path))?;
        Ok(names(&spec))
    }

    fn remove(&mut self) -> Result<()> {
        self.written = None;
        self.gpus.names = Arc::default();
        self.remove_file()
    }

    fn remove_file(&self) -> Result<()> {
        let path = &self.gpus.path;
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {path:?}"))
            }
            _ => Ok(()),
        }
    }
}

/// The specs of a kind, for the task that keeps them current and for those that answer with names of their devices.
#[derive(Clone, Debug)]
pub struct SharedSpecs(Arc<Mutex<VendorSpecs>>);

impl SharedSpecs {
    /// Shares these specs.
    #[must_use]
    pub fn new(specs: VendorSpecs) -> Self {
        Self(Arc::new(Mutex::new(specs)))
    }

    /// Waits until no other task uses the specs.
    pub fn lock(&self) -> MutexGuard<'_, VendorSpecs> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Restores the files, and returns what they have: an engine looks for a device as soon as it has the name.
    #[must_use]
    pub fn restored(&self) -> InSpecs {
        let mut specs = self.lock();
        // The error is a part of the result.
        specs.restore().ok();
        specs.in_specs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_that_a_process_keeps_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = CLAIMS.spec_in(dir.path());
        fs::write(&path, "{}").unwrap();
        let new = || {
            let mut file = SpecFile::new(path.clone(), BTreeSet::new());
            file.keep();
            file
        };
        let remove = || lock(&path, FlockOperation::NonBlockingLockExclusive);
        let (keeper, other) = (new(), new());
        assert!(remove().is_err());
        drop(keeper);
        assert!(remove().is_err());
        drop(other);
        assert!(remove().is_ok());
        let names = fs::read_dir(dir.path()).unwrap();
        assert_eq!(names.count(), 1, "no file besides the spec");
    }

    #[test]
    fn names_of_devices() {
        assert_eq!(CLAIMS.uuid(&CLAIMS.device_name("GPU-1")), Some("GPU-1"));
        for name in [
            "k8s.gpu.nvidia.com/gds=all",
            "k8s.device-plugin.nvidia.com/gpu=GPU-1",
            "GPU-1",
            "",
        ] {
            assert_eq!(CLAIMS.uuid(name), None, "{name}");
        }
    }

    #[test]
    fn the_spec_of_an_earlier_run() {
        let stamp = |driver: &str, boot: &str, host, files, mig| Stamp {
            driver: driver.into(),
            boot: boot.into(),
            host,
            files,
            mig,
            build: "b".into(),
        };
        let (plain, mig) = (
            stamp("1.0", "a", 7, 8, None),
            stamp("1.0", "a", 7, 8, Some(0)),
        );
        let with_mig = stamp("1.0", "a", 7, 8, Some(99));
        let rebuilt = Stamp {
            build: "c".into(),
            ..plain.clone()
        };
        for (spec, host, has_gpus, expected) in [
            (Some(&plain), Some(&plain), true, Before::Keep),
            (Some(&with_mig), Some(&mig), false, Before::Keep),
            // After a reboot, an update of the driver, or with other devices
            (None, Some(&plain), true, Before::Replace),
            (
                Some(&stamp("1.0", "b", 7, 8, None)),
                Some(&plain),
                true,
                Before::Replace,
            ),
            (
                Some(&stamp("0.9", "a", 7, 8, None)),
                Some(&plain),
                true,
                Before::Replace,
            ),
            (
                Some(&stamp("1.0", "a", 7, 9, None)),
                Some(&plain),
                true,
                Before::Replace,
            ),
            (
                Some(&stamp("1.0", "a", 6, 8, None)),
                Some(&plain),
                true,
                Before::Replace,
            ),
            (Some(&rebuilt), Some(&plain), true, Before::Replace),
            // The kernel does not show the names of MIG devices.
            (
                Some(&stamp("1.0", "a", 6, 8, Some(99))),
                Some(&mig),
                true,
                Before::Keep,
            ),
            (
                Some(&stamp("0.9", "a", 7, 8, Some(99))),
                Some(&mig),
                true,
                Before::Replace,
            ),
            (
                Some(&stamp("0.9", "a", 7, 8, Some(99))),
                Some(&mig),
                false,
                Before::Remove,
            ),
            (None, Some(&mig), false, Before::Remove),
            (None, Some(&plain), false, Before::Remove),
            (Some(&plain), None, true, Before::Remove),
        ] {
            assert_eq!(
                Before::decide(spec, host, has_gpus),
                expected,
                "{spec:?} {host:?} {has_gpus}"
            );
        }
    }
}
