//! Gathers the facts for a request. This is the only step towards edits that reads from the host.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;

use base::paths::HostPath;
use base::report::Finding;

use super::{Host, extra_devices};
use crate::capability::{Capabilities, Capability};
use crate::driver::files::DriverFiles;
use crate::driver::node_name::NodeName;
use crate::driver::nodes::{NodeState, imex_channel};
use crate::driver::pci;
use crate::driver::{DriverKind, ipc, locate};
use crate::edits::facts::{DeviceFacts, HostFacts, WslGpus};
use crate::edits::{Wanted, decide};
use crate::feature::Feature;
use crate::inventory::caps::{self, MigCap};
use crate::inventory::procfs::{self, DRIVER_PROC, KernelGpu};
use crate::inventory::select::{Device, every_device, permitted};
use crate::inventory::{Gpu, Inventory, limits};

/// The driver's files for the capabilities that config.toml supports.
#[derive(Clone, Debug)]
pub(crate) struct SpecFiles {
    /// The version of the driver
    pub(crate) version: String,
    pub(crate) files: DriverFiles,
    /// Findings about the files, and about paths that could not be examined
    pub(crate) findings: Vec<Finding>,
}

impl Host {
    /// Gathers all facts for containers with this request and these devices. Nothing else is examined.
    ///
    /// # Errors
    /// If a required library of a requested capability is missing.
    pub fn facts(&self, wanted: &Wanted, devices: &[Device<'_>]) -> Result<HostFacts> {
        let (files, findings) = self.driver_files(wanted.capabilities)?;
        Ok(self.facts_with(files, findings, wanted, devices))
    }

    /// Returns the driver's files for these capabilities, from the cache if it may be used and has them.
    fn driver_files(&self, capabilities: Capabilities) -> Result<(DriverFiles, Vec<Finding>)> {
        let located = self.parts.located.as_ref();
        let located =
            located.filter(|cache| cache.is_for(&self.inventory.driver_version, capabilities));
        if let Some(cache) = located
            && let Some(found) = cache.files()
        {
            return Ok(found);
        }
        let (files, findings) =
            locate::locate(&self.search(), capabilities, &self.config.driver_files)?;
        if let (Some(cache), Some(library)) = (located, &self.parts.library) {
            cache.store(self.roots(), library, (&files, &findings));
        }
        Ok((files, findings))
    }

    /// Gathers all facts, as [`Self::facts`], for a spec. The files have been located for the stamp, unless that belongs to another driver.
    pub(crate) fn facts_for_spec(
        &self,
        located: Option<SpecFiles>,
        wanted: &Wanted,
        devices: &[Device<'_>],
    ) -> Result<HostFacts> {
        match located {
            Some(located) if located.version == self.inventory.driver_version => {
                Ok(self.facts_with(located.files, located.findings, wanted, devices))
            }
            _ => {
                let (files, findings) = locate::locate_installed(
                    &self.search(),
                    wanted.capabilities,
                    &self.config.driver_files,
                )?;
                Ok(self.facts_with(files, findings, wanted, devices))
            }
        }
    }

    fn facts_with(
        &self,
        mut files: DriverFiles,
        mut findings: Vec<Finding>,
        wanted: &Wanted,
        devices: &[Device<'_>],
    ) -> HostFacts {
        files.leave_out(wanted.omit);
        let mps = self.config.mps_directory.as_deref();
        let (mut ipc, refused) =
            ipc::find(&self.roots().driver, wanted.capabilities, mps, wanted.omit);
        findings.extend(refused);
        let devices = self.device_facts(wanted, devices);
        for (feature, nodes) in &devices.features {
            if nodes.is_empty() {
                continue;
            }
            let parts = extra_devices::parts(&self.roots().driver, *feature);
            files.placed.extend(parts.files);
            ipc.extend(parts.directories);
            findings.extend(parts.findings);
        }
        let (proc, version) = (&self.roots().proc, self.parts.version_file.as_deref());
        let proc_files = if devices.has_proc {
            Some(procfs::read_files(proc, Path::new(DRIVER_PROC), version))
        } else {
            None
        };
        HostFacts {
            files,
            ipc,
            proc_files,
            devices,
            findings,
        }
    }

    /// Gathers only the facts about device nodes.
    #[must_use]
    pub fn device_facts(&self, wanted: &Wanted, devices: &[Device<'_>]) -> DeviceFacts {
        let mut gatherer = Gatherer {
            host: self,
            facts: self.known_facts(),
        };
        match self.roots().kind {
            DriverKind::Linux => {
                gatherer.nodes(decide::common_node_names(wanted).map(str::to_owned));
            }
            kind @ DriverKind::Wsl => gatherer.nodes([kind.control_node().to_owned()]),
        }
        for channel in &wanted.imex_channels {
            gatherer.nodes([imex_channel(*channel)]);
        }
        for feature in wanted.features.iter() {
            gatherer.feature(feature);
        }
        if decide::wants_mig_minors(wanted, devices) {
            gatherer.facts.mig_minors = if wanted.mig_config || wanted.mig_monitor {
                self.mig_minors()
            } else {
                self.mig_minors_of(devices)
            };
        }
        for device in devices {
            gatherer.gpu(wanted, device.gpu());
        }
        if wanted.capabilities.has(Capability::Compute) && !devices.is_empty() {
            gatherer.facts.mps = self.mps_daemons_of(devices.iter().map(|device| device.gpu()));
        }
        if wanted.mig_config || wanted.mig_monitor {
            gatherer.management(wanted, devices);
        } else {
            gatherer.mig_devices(devices);
        }
        gatherer.facts
    }

    /// Returns the facts that are known without reading from the host.
    fn known_facts(&self) -> DeviceFacts {
        DeviceFacts {
            dev_root: self.roots().dev.path(),
            has_proc: self.proc_dir.is_some(),
            gpu_dirs: self
                .view
                .gpus
                .iter()
                .map(|gpu| (gpu.bus_id, gpu.dir.clone()))
                .collect(),
            limits: self.config.devices.clone(),
            wsl: self.wsl_gpus(),
            ..DeviceFacts::default()
        }
    }

    /// Returns why no container may have the GPUs of WSL 2: the limits deny some of them.
    #[must_use]
    pub fn refused_limits(&self) -> Option<Finding> {
        decide::refused_limits(&self.wsl_gpus()?)
    }

    /// Returns the GPUs that share a node.
    fn wsl_gpus(&self) -> Option<WslGpus> {
        if !self.roots().kind.has_one_node_for_all() {
            return None;
        }
        let Inventory { gpus, failed, .. } = &self.inventory;
        let mut denied = Vec::new();
        for gpu in gpus {
            if !limits::permit(&self.config.devices, gpu, None) {
                denied.push(gpu.index.to_string());
            }
        }
        for gpu in failed {
            if !limits::permit_failed(&self.config.devices, gpu) {
                denied.push(
                    gpu.index
                        .map_or_else(|| "?".to_owned(), |index| index.to_string()),
                );
            }
        }
        Some(WslGpus {
            count: gpus.len() + failed.len(),
            denied,
        })
    }

    fn withholds_mig(&self) -> bool {
        let limits = &self.config.devices;
        every_device(&self.inventory)
            .any(|device| matches!(device, Device::Mig(..)) && !permitted(device, limits))
    }
}

struct Gatherer<'a> {
    host: &'a Host,
    facts: DeviceFacts,
}

impl Gatherer<'_> {
    fn nodes(&mut self, names: impl IntoIterator<Item = String>) {
        for name in names {
            self.facts
                .nodes
                .entry(name)
                .or_insert_with_key(|name| self.host.node(name));
        }
    }

    fn feature(&mut self, feature: Feature) {
        let nodes = extra_devices::nodes(&self.host.roots().dev, feature);
        let mut names = Vec::new();
        for (name, node) in nodes {
            names.push(name.clone());
            self.facts.nodes.insert(name, NodeState::Device(node));
        }
        self.facts.features.push((feature, names));
    }

    fn proc_path(&mut self, path: PathBuf) {
        if let Ok(located) = self.host.roots().proc.locate(&path) {
            self.facts.proc_paths.insert(path, located.host);
        }
    }

    /// The directory of a GPU whose minor number is known has been read. procfs has no links there.
    fn gpu_dir(&mut self, gpu: &Gpu) {
        let Some(path) = self.facts.gpu_dir(gpu.bus_id) else {
            return;
        };
        if self.facts.proc_paths.contains_key(&path) {
            return;
        }
        let is_read = |known: &KernelGpu| known.bus_id == gpu.bus_id && known.minor.is_some();
        if let Some(dir) = &self.host.proc_dir
            && let Ok(below) = path.strip_prefix(DRIVER_PROC)
            && self.host.view.gpus.iter().any(is_read)
        {
            let source = HostPath::new(dir.as_path().join(below));
            self.facts.proc_paths.insert(path, source);
        } else {
            self.proc_path(path);
        }
    }

    fn gpu(&mut self, wanted: &Wanted, gpu: &Gpu) {
        let kind = self.host.roots().kind;
        if kind.has_one_node_for_all() {
            return;
        }
        self.nodes([kind.gpu_node(gpu.minor)]);
        self.gpu_dir(gpu);
        if decide::wants_drm(wanted) && !self.facts.drm.contains_key(&gpu.bus_id) {
            let names = pci::drm_names(&self.host.roots().sys, gpu.bus_id);
            self.nodes(names.iter().map(|name| format!("dri/{name}")));
            self.facts.drm.insert(gpu.bus_id, names);
        }
    }

    fn cap(&mut self, cap: MigCap) {
        if let Some(minors) = &self.facts.mig_minors
            && let Some(minor) = minors.get(&cap)
        {
            self.nodes([NodeName::Cap(*minor).to_string()]);
        }
    }

    fn mig_devices(&mut self, devices: &[Device<'_>]) {
        for device in devices {
            let Device::Mig(gpu, mig) = device else {
                continue;
            };
            for cap in decide::caps_of(gpu, mig) {
                self.cap(cap);
                self.proc_path(cap.proc_path());
            }
        }
    }

    fn management(&mut self, wanted: &Wanted, devices: &[Device<'_>]) {
        self.facts.withholds_mig = self.host.withholds_mig();
        for cap in decide::management_caps(wanted) {
            self.cap(cap);
            for path in decide::management_paths(&self.facts, cap, devices) {
                self.proc_path(path);
            }
        }
        let names = decide::instance_nodes(&self.facts, devices);
        self.nodes(names);
    }
}

impl Host {
    /// Returns the minor numbers of all possible MIG capabilities, or `None` if the driver has no device nodes for them.
    #[must_use]
    pub fn mig_minors(&self) -> Option<BTreeMap<MigCap, u32>> {
        self.mig_minors_text()
            .map(|text| caps::parse_mig_minors(&text))
    }

    /// Returns the minor numbers of the capabilities of these devices, which are known if the inventory was confirmed.
    fn mig_minors_of(&self, devices: &[Device<'_>]) -> Option<BTreeMap<MigCap, u32>> {
        let known: BTreeMap<_, _> = self
            .view
            .caps
            .iter()
            .map(|node| (node.cap, node.minor))
            .collect();
        for device in devices {
            if let Device::Mig(gpu, mig) = device
                && !decide::caps_of(gpu, mig)
                    .iter()
                    .all(|cap| known.contains_key(cap))
            {
                return self.mig_minors();
            }
        }
        Some(known)
    }

    /// Returns the driver's table of MIG capabilities.
    #[must_use]
    pub fn mig_minors_text(&self) -> Option<String> {
        self.roots()
            .proc
            .read_text(Path::new(caps::MIG_MINORS))
            .ok()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Driver, DriverParts, Roots, Source};
    use super::*;
    use crate::cdi::stamp::tests as stamp;
    use base::paths::HostPath;
    use base::tree::Tree;

    #[test]
    fn the_modules_files_exist_only_if_it_is_loaded() {
        let ((dir, config), empty) = (stamp::host(), tempfile::tempdir().unwrap());
        // Without the module, the version of the library is unknown.
        let library = dir.path().join("usr/lib/driver/libnvidia-ml.so");
        std::fs::copy(
            library.with_extension("so.570.86"),
            library.with_extension("so.1"),
        )
        .unwrap();
        for (root, is_loaded) in [(dir.path(), true), (empty.path(), false)] {
            let proc = Tree::open(&HostPath::new(root)).unwrap();
            let roots = Roots {
                proc,
                ..Roots::open(&config).unwrap()
            };
            let inventory = Inventory {
                driver_version: "570.86".to_owned(),
                ..Inventory::default()
            };
            let driver = Driver::of_parts(DriverParts::below(roots, &config), &config).unwrap();
            let host = driver.host(Source::Given(inventory)).unwrap();
            let facts = host.facts(&Wanted::default(), &[]).unwrap();
            let files = facts
                .proc_files
                .map(|files| files.into_iter().map(|(name, _)| name).collect::<Vec<_>>());
            assert_eq!(
                (facts.devices.has_proc, files),
                (is_loaded, is_loaded.then(|| vec!["version".into()]))
            );
        }
    }
}
