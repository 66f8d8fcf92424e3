//! What the hook finds on the host, and what it makes of it for a request: the way from files and NVML to edits.

mod missing;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};

use base::paths::HostPath;
use base::report::{Finding, catalog, failure};
use base::tree::Tree;

use crate::capability::Capability;
use crate::config::{Config, Limits};
use crate::device_id::Nodes;
use crate::driver::diagnosis::{self, PCI_DEVICES};
use crate::driver::libraries::{LinkerCache, Search};
use crate::driver::nodes::{self, CTL_MINOR, DeviceNode, IMEX_CHANNELS, PREPARE};
use crate::driver::{ipc, locate};
use crate::edits::{Edits, Wanted, build};
use crate::inventory::ask::{self, Question};
use crate::inventory::cache::{Ask, Cache, KernelView};
use crate::inventory::caps::{self, MIG_MINORS, MigCap};
use crate::inventory::fingerprint::{self, Sources};
use crate::inventory::procfs::{self, DRIVER_PROC, KernelGpu};
use crate::inventory::select::{Device, names_of};
use crate::inventory::{Gpu, Inventory, MigDevice, cap_files, identity, limits, merge};

/// Whether this host has no NVIDIA GPU at all: a driver that is missing or broken is another matter.
#[must_use]
pub fn has_no_gpu(config: &Config) -> bool {
    let look = || -> Result<bool> {
        let driver = crate::driver::open_root(&config.driver_root)?;
        // A GPU of an SoC is on no PCI bus, and the kernel module has it.
        let of_module = procfs::read_gpus(&driver.owner_of(DRIVER_PROC)?);
        Ok(of_module.is_empty() && diagnosis::pci_gpus(&driver.owner_of(PCI_DEVICES)?) == Some(0))
    };
    look().unwrap_or_default()
}

/// By [`Cache::get`] or [`Cache::renew`]
type Way<'a> = &'a dyn Fn(&Cache, &dyn Fn() -> KernelView, Ask<'_>) -> Result<(Inventory, KernelView)>;

/// The driver and the GPUs of this host.
#[derive(Debug)]
pub struct Host {
    driver: Tree,
    cache: LinkerCache,
    /// From config.toml
    library_dirs: Vec<PathBuf>,
    /// From config.toml
    more_files: Vec<PathBuf>,
    /// From config.toml
    mps_directory: Option<PathBuf>,
    /// The root that has the device nodes
    dev: Tree,
    /// The root that has /proc/driver/nvidia
    proc: Tree,
    /// That directory on the host, if it is there
    proc_dir: Option<HostPath>,
    /// The root that has the PCI devices
    sys: Tree,
    kernel_gpus: Vec<KernelGpu>,
    /// From config.toml
    limits: Limits,
    /// What NVML and the kernel module say
    pub inventory: Inventory,
}

impl Host {
    /// Looks. NVML is asked if what it said before is not true any more, or nobody knows: this is what takes time, and
    /// before it `slow` is called.
    ///
    /// # Errors
    /// If there is no driver, or it does not answer.
    pub fn look(config: &Config, slow: &dyn Fn()) -> Result<Self> {
        Self::find(config, slow, &|cache, look, ask| cache.get(look, slow, ask))
    }

    /// Looks, and asks NVML whatever it said before; the next ones who look know.
    ///
    /// # Errors
    /// If there is no driver, or it does not answer.
    pub fn look_afresh(config: &Config) -> Result<Self> {
        Self::find(config, &|| (), &Cache::renew)
    }

    fn find(config: &Config, slow: &dyn Fn(), way: Way<'_>) -> Result<Self> {
        let driver = crate::driver::open_root(&config.driver_root)?;
        let cache = LinkerCache::read(&driver, config.ldcache.as_ref());
        let dev = match &config.dev_root {
            Some(root) => crate::driver::open_root(root)?,
            None => driver.owner_of("/dev/nvidiactl")?,
        };
        let proc = driver.owner_of(DRIVER_PROC)?;
        let sys = driver.owner_of(PCI_DEVICES)?;
        let module = procfs::read_version(&proc);
        let version = module.as_deref().unwrap_or_default();
        let search = Search { root: &driver, cache: &cache, version, dirs: &config.library_dirs };
        let diagnosis = || diagnosis::diagnose(&diagnosis::look(&search, module.clone()), &driver);
        let library = locate::management_library(&search);
        let Some(library) = library else { return Err(diagnosis().unwrap_or_else(|| no_driver(&driver))) };
        let (root, path) = Question::place(&driver, &dev, &library.source)?;
        let question = Question { root, library: path, who: identity::of(config)?, deadline: config.nvml_timeout };
        // Where the module is not loaded, that is what to say, not what NVML makes of it.
        let ask = |end| {
            ask::ask(&question, end).map_err(|error| match module {
                None => diagnosis().unwrap_or(error),
                Some(_) => error,
            })
        };
        let look = || {
            let gpus = procfs::read_gpus(&proc);
            let places = Sources { library: &library.source, dev: &dev, proc: &proc, sys: &sys };
            let state = fingerprint::take(&places, version, &gpus);
            KernelView { version: version.to_owned(), state, gpus, uptime: fingerprint::uptime() }
        };
        let (mut inventory, look) = match module.as_ref().and_then(|_| question.cache()) {
            Some(cache) => way(&cache, &look, &ask)?,
            None => {
                slow();
                (ask(Instant::now() + config.nvml_timeout)?.inventory, look())
            }
        };
        let node_exists = |minor| matches!(nodes::optional(&dev, &format!("nvidia{minor}")), Ok(Some(_)));
        merge::complete(&mut inventory, &look.gpus, node_exists);
        if inventory.gpus.iter().any(|gpu| gpu.mig_enabled) && proc.locate(Path::new(MIG_MINORS)).is_ok() {
            cap_files::note_missing_nodes(&mut inventory, &cap_files::existing(&proc), &dev);
        }
        let (library_dirs, more_files) = (config.library_dirs.clone(), config.driver_files.clone());
        let mps_directory = config.mps_directory.clone();
        let proc_dir = proc.locate(Path::new(DRIVER_PROC)).ok().map(|located| located.host);
        let kernel_gpus = look.gpus;
        let limits = config.devices.clone();
        Ok(Self {
            driver,
            cache,
            library_dirs,
            more_files,
            mps_directory,
            dev,
            proc,
            proc_dir,
            sys,
            kernel_gpus,
            limits,
            inventory,
        })
    }

    /// The UUIDs of the GPUs and MIG devices that these device nodes belong to.
    #[must_use]
    pub fn names_of(&self, nodes: &Nodes) -> Vec<String> {
        let minors = self.mig_minors().map(|text| caps::parse_mig_minors(&text)).unwrap_or_default();
        names_of(nodes, &self.inventory, &minors)
    }

    /// What the container gets. Nothing has been done to it yet.
    ///
    /// # Errors
    /// If something is missing that it cannot do without.
    pub fn edits(&self, wanted: &Wanted, devices: &[Device<'_>]) -> Result<(Edits, Vec<Finding>)> {
        let (mut edits, mut findings) = self.common_edits(wanted)?;
        for device in devices {
            edits = edits.merge(self.device_edits(wanted, *device)?);
        }
        edits = edits.merge(self.in_proc(self.mig_management(wanted, devices)?));
        edits = edits.merge(build::device(self.imex_nodes(wanted)?, Vec::new()));
        let edits = self.in_proc(edits);
        findings.extend(self.findings());
        Ok((edits, findings))
    }

    /// What could not be looked at so far, and so is missing in what containers get.
    pub fn findings(&self) -> impl Iterator<Item = Finding> {
        let mut roots: Vec<&Tree> = Vec::new();
        for root in [&self.driver, &self.dev, &self.proc, &self.sys] {
            if !roots.iter().any(|known| known.is(root)) {
                roots.push(root);
            }
        }
        roots.into_iter().flat_map(Tree::findings)
    }

    /// What every container gets that wants this, whichever devices it is given.
    ///
    /// # Errors
    /// If something is missing that it cannot do without.
    pub fn common_edits(&self, wanted: &Wanted) -> Result<(Edits, Vec<Finding>)> {
        let search = Search {
            root: &self.driver,
            cache: &self.cache,
            version: &self.inventory.driver_version,
            dirs: &self.library_dirs,
        };
        let (mut files, mut findings) = locate::locate(&search, wanted.capabilities, &self.more_files)?;
        files.leave_out(wanted.omit);
        let mps = self.mps_directory.as_deref();
        let (ipc, refused) = ipc::find(&self.driver, wanted.capabilities, mps, wanted.omit);
        findings.extend(refused);
        let edits = build::common(&files, ipc, self.common_nodes(wanted, &mut findings)?, self.proc_files());
        Ok((self.in_proc(edits), findings))
    }

    /// What one device adds to that.
    ///
    /// # Errors
    /// If a device node of it is missing.
    pub fn device_edits(&self, wanted: &Wanted, device: Device<'_>) -> Result<Edits> {
        let mut edits = self.gpu(device.gpu())?;
        if wanted.capabilities.any(&[Capability::Graphics, Capability::Display]) {
            edits = edits.merge(build::drm(self.drm_nodes(device.gpu())?, &device.gpu().bus_id.in_sysfs()));
            edits = edits.merge(build::egl_device(device.gpu().minor));
        }
        let whole_caps = wanted.mig_config || wanted.mig_monitor;
        if let Device::Mig(gpu, mig) = device
            && !whole_caps
        {
            edits = edits.merge(self.mig_device(gpu, mig)?);
        }
        Ok(self.in_proc(edits))
    }

    /// Without /proc/driver/nvidia there is nothing to mask.
    fn in_proc(&self, mut edits: Edits) -> Edits {
        if self.proc_dir.is_none() {
            edits.proc_mask = None;
        }
        edits
    }

    /// The driver root, opened: paths of driver files in a CDI spec are those below it.
    #[must_use]
    pub const fn driver(&self) -> &Tree {
        &self.driver
    }

    /// Its /proc/driver/nvidia on the host, if it has one.
    #[must_use]
    pub fn proc_dir(&self) -> Option<HostPath> {
        self.proc_dir.clone()
    }

    /// The nodes that are no GPU's.
    ///
    /// # Errors
    /// If one is missing without which no other is of use.
    pub fn common_nodes(&self, wanted: &Wanted, findings: &mut Vec<Finding>) -> Result<Vec<DeviceNode>> {
        let mut found = vec![nodes::required(&self.dev, "nvidiactl", CTL_MINOR)?];
        if wanted.capabilities.any(&[Capability::Compute, Capability::Video]) {
            match nodes::optional(&self.dev, "nvidia-uvm")? {
                Some(uvm) => found.push(uvm),
                None if wanted.gpus => findings.push(Finding::of(
                    &catalog::NO_UVM,
                    "the device node \"/dev/nvidia-uvm\" is missing",
                    PREPARE,
                )),
                None => {}
            }
            found.extend(nodes::optional(&self.dev, "nvidia-uvm-tools")?);
        }
        if wanted.capabilities.any(&[Capability::Graphics, Capability::Display]) {
            match nodes::optional(&self.dev, "nvidia-modeset")? {
                Some(modeset) => found.push(modeset),
                None if wanted.gpus => findings.push(Finding::of(
                    &catalog::NO_MODESET,
                    "the device node \"/dev/nvidia-modeset\" is missing",
                    PREPARE,
                )),
                None => {}
            }
        }
        Ok(found)
    }

    fn gpu(&self, gpu: &Gpu) -> Result<Edits> {
        let node = nodes::required(&self.dev, &format!("nvidia{}", gpu.minor), gpu.minor)
            .with_context(|| cannot_give(&gpu.uuid, gpu))?;
        let kernel = self.kernel_gpus.iter().find(|kernel| kernel.bus_id == gpu.bus_id);
        let mount = kernel.and_then(|kernel| self.proc_mount(&Path::new(DRIVER_PROC).join("gpus").join(&kernel.dir)));
        Ok(build::device(vec![node], mount.into_iter().collect()))
    }

    /// Its `/dev/dri` nodes: what Vulkan and EGL open. A host without nvidia-drm has none.
    fn drm_nodes(&self, gpu: &Gpu) -> Result<Vec<DeviceNode>> {
        let names = self.sys.names(&Path::new(PCI_DEVICES).join(gpu.bus_id.in_sysfs()).join("drm"));
        let names = names.iter().filter_map(|name| name.to_str());
        let nodes = names.filter(|name| name.starts_with("card") || name.starts_with("renderD"));
        nodes.filter_map(|name| nodes::optional(&self.dev, &format!("dri/{name}")).transpose()).collect()
    }

    /// What a MIG device needs beside the node of its GPU: access to its GPU instance and its compute instance.
    fn mig_device(&self, gpu: &Gpu, mig: &MigDevice) -> Result<Edits> {
        let instance = MigCap::GpuInstance(gpu.minor, mig.gpu_instance);
        let compute = MigCap::ComputeInstance(gpu.minor, mig.gpu_instance, mig.compute_instance);
        let mut edits = Edits::default();
        for cap in [instance, compute] {
            let node = self.cap_node(cap).with_context(|| cannot_give(&mig.uuid, gpu))?;
            let mount = self.proc_mount(&cap.proc_path());
            edits = edits.merge(build::device(node.into_iter().collect(), mount.into_iter().collect()));
        }
        Ok(edits)
    }

    /// A path below /proc/driver/nvidia that the container may see.
    fn proc_mount(&self, path: &Path) -> Option<(PathBuf, HostPath)> {
        let located = self.proc.locate(path).ok()?;
        Some((path.strip_prefix(DRIVER_PROC).ok()?.to_owned(), located.host))
    }

    /// The node of a MIG capability; none with a driver that has only the files under /proc.
    fn cap_node(&self, cap: MigCap) -> Result<Option<DeviceNode>> {
        let Some(text) = self.mig_minors() else { return Ok(None) };
        let minor = caps::parse_mig_minors(&text)
            .get(&cap)
            .copied()
            .with_context(|| format!("{MIG_MINORS:?} does not have {cap:?}"))?;
        nodes::required_of(&self.dev, &format!("nvidia-caps/nvidia-cap{minor}"), minor).map(Some)
    }

    /// The table of MIG capabilities, where the driver has device nodes for them.
    #[must_use]
    pub fn mig_minors(&self) -> Option<String> {
        let bytes = self.proc.read(Path::new(MIG_MINORS)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// For a privileged container that lays out or watches MIG devices: the capability itself, and those of all
    /// instances of its GPUs.
    ///
    /// # Errors
    /// If the node of the capability is missing.
    pub fn mig_management(&self, wanted: &Wanted, devices: &[Device<'_>]) -> Result<Edits> {
        let caps = [(wanted.mig_config, MigCap::Config), (wanted.mig_monitor, MigCap::Monitor)];
        let mut edits = Edits::default();
        for cap in caps.into_iter().filter_map(|(is_wanted, cap)| is_wanted.then_some(cap)) {
            let minors = self.mig_minors().map(|text| caps::parse_mig_minors(&text)).unwrap_or_default();
            let mut nodes: Vec<_> = self.cap_node(cap)?.into_iter().collect();
            for (of_gpu, minor) in &minors {
                let chosen = devices.iter().any(|device| self.is_management_of(*of_gpu, device.gpu()));
                // The table lists every instance that could be; nodes exist for those that are.
                if chosen && let Some(node) = nodes::optional(&self.dev, &format!("nvidia-caps/nvidia-cap{minor}"))? {
                    nodes.push(node);
                }
            }
            edits = edits.merge(build::device(nodes, self.management_files(cap, devices)));
        }
        Ok(edits)
    }

    /// Whether this capability is of an instance of the GPU, and config.toml lets containers have a MIG device in it, or
    /// there is none in it yet.
    #[must_use]
    pub fn is_management_of(&self, cap: MigCap, gpu: &Gpu) -> bool {
        let is_in = |mig: &&MigDevice| match cap {
            MigCap::GpuInstance(_, instance) => mig.gpu_instance == instance,
            MigCap::ComputeInstance(_, instance, compute) => {
                (mig.gpu_instance, mig.compute_instance) == (instance, compute)
            }
            MigCap::Config | MigCap::Monitor => false,
        };
        let mut inside = gpu.mig_devices.iter().filter(is_in).peekable();
        cap.gpu() == Some(gpu.minor)
            && (inside.peek().is_none() || inside.any(|mig| limits::permit(&self.limits, gpu, Some(mig))))
    }

    /// What is to be seen below /proc/driver/nvidia: the whole directory of capabilities, unless it has files of MIG devices
    /// that containers may not have. With a driver that has no nodes for capabilities, those files give access.
    fn management_files(&self, cap: MigCap, devices: &[Device<'_>]) -> Vec<(PathBuf, HostPath)> {
        let may_have = |gpu: &Gpu, mig: &MigDevice| limits::permit(&self.limits, gpu, Some(mig));
        let all = self.inventory.gpus.iter().flat_map(|gpu| gpu.mig_devices.iter().map(move |mig| (gpu, mig)));
        let dir = Path::new(DRIVER_PROC).join("capabilities");
        if all.clone().all(|(gpu, mig)| may_have(gpu, mig)) {
            return self.proc_mount(&dir).into_iter().collect();
        }
        let chosen =
            all.filter(|(gpu, mig)| devices.iter().any(|device| device.gpu().minor == gpu.minor) && may_have(gpu, mig));
        let caps = chosen.flat_map(|(gpu, mig)| {
            let instance = MigCap::GpuInstance(gpu.minor, mig.gpu_instance);
            [instance, MigCap::ComputeInstance(gpu.minor, mig.gpu_instance, mig.compute_instance)]
        });
        let paths = BTreeSet::from_iter(std::iter::once(cap).chain(caps).map(MigCap::proc_path));
        paths.iter().filter_map(|path| self.proc_mount(path)).collect()
    }

    fn imex_nodes(&self, wanted: &Wanted) -> Result<Vec<DeviceNode>> {
        let node = |number: &u32| {
            let fix = format!("run \"oci-nvidia-hook prepare --imex-channel {number}\" as root on the host");
            nodes::required_with(&self.dev, &format!("{IMEX_CHANNELS}/channel{number}"), *number, &fix)
        };
        wanted.imex_channels.iter().map(node).collect()
    }

    fn proc_files(&self) -> Option<Vec<(OsString, Vec<u8>)>> {
        self.proc_dir.as_ref()?;
        Some(procfs::read_files(&self.proc, Path::new(DRIVER_PROC)))
    }
}

fn cannot_give(uuid: &str, gpu: &Gpu) -> String {
    format!("cannot give {uuid} of GPU {} to the container", gpu.index)
}

fn no_driver(root: &Tree) -> anyhow::Error {
    failure(
        &catalog::NO_LIBRARIES,
        format!("there is no NVIDIA driver below {}: no \"libnvidia-ml.so.1\" is there", root.path()),
        "install the driver (openSUSE: nvidia-compute-utils-G06; Debian: nvidia-smi), or unset \
         NVIDIA_VISIBLE_DEVICES to run the container without GPUs",
    )
}
