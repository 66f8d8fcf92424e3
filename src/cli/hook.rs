//! The stages at which a container is set up: the pipeline from the state on stdin to the injection.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::config::{self, Config};
use crate::driver::nodes::{self, CTL_MINOR, DeviceNode};
use crate::driver::{DriverRoot, locate};
use crate::edits::{Edits, build};
use crate::error::Failure;
use crate::finding::Finding;
use crate::inject::cgroup::{self, DeviceRule};
use crate::inject::container::Container;
use crate::inventory::procfs::{self, DRIVER_PROC, KernelGpu};
use crate::inventory::{Gpu, Inventory, select};
use crate::log::Log;
use crate::lower::live;
use crate::nvml::child::{self, Question};
use crate::nvml::identity;
use crate::oci::{self, SpecView, State};
use crate::request::{self, Capability, GpuRequest, VisibleDevices};

/// Sets the container up whose state is on stdin. 0 if it may start, 1 if it must not.
#[must_use]
pub fn run(config: Option<PathBuf>, xdg_config_home: Option<PathBuf>) -> ExitCode {
    // What we create in a container is for all its users, whatever mask the engine runs with.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let mut log = Log::default();
    match set_up(config.as_deref(), xdg_config_home.as_deref(), &mut log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log.error(&error);
            ExitCode::FAILURE
        }
    }
}

fn set_up(config: Option<&std::path::Path>, xdg: Option<&std::path::Path>, log: &mut Log) -> Result<()> {
    let state = read_state()?;
    let spec = oci::spec_view::read(&state.bundle)?;
    // Most containers end here: nothing else has been read, not even config.toml.
    let Some(devices) = request::visible_devices(&spec) else { return Ok(()) };
    *log = Log::of(&state.id);
    let (config, mut findings) = config::read(config, xdg)?;
    if let Some(path) = &config.debug {
        // Losing a log is no reason to stop a container.
        if let Err(error) = log.open(path) {
            findings.push(Finding::warning(crate::error::render(&error), "check debug in config.toml"));
        }
    }
    findings.iter().for_each(|finding| log.finding(finding));
    match request::from_spec(devices, &spec, &config)? {
        Ok(request) => inject(&state, &spec, &request, &config, log),
        Err(refused) => {
            log.finding(&Finding::warning(
                refused,
                "start the container privileged, or set accept-nvidia-visible-devices-envvar-when-unprivileged = true",
            ));
            Ok(())
        }
    }
}

fn read_state() -> Result<State> {
    let bytes = oci::read_limited(std::io::stdin().lock(), oci::MAX_JSON)
        .context("cannot read the container state on stdin")?;
    oci::state::parse(&bytes)
}

fn inject(state: &State, spec: &SpecView, request: &GpuRequest, config: &Config, log: &mut Log) -> Result<()> {
    let host = Host::look(config)?;
    let (edits, findings) = host.edits(request)?;
    findings.iter().for_each(|finding| log.finding(finding));

    let container = Container::open(state.pid, &spec.rootfs)?;
    let steps = live::lower(&edits, container.facts());
    if config.edit_cgroups {
        let rules = rules_to_add(&edits, spec);
        cgroup::allow(&state.id, state.pid, &rules).context("cannot give the container access to the GPUs")?;
    }
    let findings = crate::inject::run(container, &steps)?;
    findings.iter().for_each(|finding| log.finding(finding));
    log.note(&format!(
        "injected {} files and {} device nodes of driver {} for NVIDIA_DRIVER_CAPABILITIES={}",
        edits.files.len(),
        edits.nodes.len(),
        host.inventory.driver_version,
        request.capabilities
    ));
    Ok(())
}

/// A device rule for each node, but for those that config.json allows already: what the runtime gave stays the
/// runtime's, and survives what it does later.
fn rules_to_add(edits: &Edits, spec: &SpecView) -> Vec<DeviceRule> {
    let rules = edits.nodes.iter().map(|node| DeviceRule { major: node.major, minor: node.minor });
    rules.filter(|rule| !cgroup::already_allowed(&spec.device_rules, *rule)).collect()
}

/// What was found on the host.
struct Host {
    driver: DriverRoot,
    cache: locate::LinkerCache,
    /// The root that has the device nodes
    dev: DriverRoot,
    /// The root that has /proc/driver/nvidia
    proc: DriverRoot,
    kernel_gpus: Vec<KernelGpu>,
    inventory: Inventory,
}

impl Host {
    fn look(config: &Config) -> Result<Self> {
        let driver = DriverRoot::open(&config.driver_root)?;
        let cache = locate::read_linker_cache(&driver, config.ldcache.as_ref())?;
        let library = cache.find("libnvidia-ml.so.1").ok_or_else(|| no_driver(&driver))?;
        let dev = driver.owner_of("/dev/nvidiactl")?;
        let proc = driver.owner_of(DRIVER_PROC)?;
        let mut inventory = child::ask(&Question {
            root: driver.path(),
            library,
            identity: identity::of(config, &dev)?,
            deadline: config.nvml_timeout,
        })?;
        let kernel_gpus = procfs::read_gpus(&proc);
        let node_exists = |minor| matches!(nodes::optional(&dev, &format!("nvidia{minor}")), Ok(Some(_)));
        procfs::complete(&mut inventory, &kernel_gpus, node_exists);
        Ok(Self { driver, cache, dev, proc, kernel_gpus, inventory })
    }

    /// What the container gets. Nothing has been done to it yet.
    fn edits(&self, request: &GpuRequest) -> Result<(Edits, Vec<Finding>)> {
        let (gpus, mut findings) = select::select(&request.devices, &self.inventory)?;
        let (files, more) =
            locate::locate(&self.driver, &self.cache, &self.inventory.driver_version, request.capabilities)?;
        findings.extend(more);
        let mut edits = build::common(&files, self.common_nodes(request, &mut findings)?, self.proc_files());
        for gpu in gpus {
            edits = edits.merge(self.device(gpu)?);
        }
        Ok((edits, findings))
    }

    fn common_nodes(&self, request: &GpuRequest, findings: &mut Vec<Finding>) -> Result<Vec<DeviceNode>> {
        let mut found = vec![nodes::required(&self.dev, "nvidiactl", CTL_MINOR)?];
        if request.capabilities.any(&[Capability::Compute, Capability::Video]) {
            match nodes::optional(&self.dev, "nvidia-uvm")? {
                Some(uvm) => found.push(uvm),
                None if request.devices != VisibleDevices::None => findings.push(Finding::warning(
                    "the device node \"/dev/nvidia-uvm\" is missing: CUDA will not work in the container",
                    "run \"nvidia-modprobe -c 0 -u\" as root on the host",
                )),
                None => {}
            }
            found.extend(nodes::optional(&self.dev, "nvidia-uvm-tools")?);
        }
        if request.capabilities.any(&[Capability::Graphics, Capability::Display]) {
            found.extend(nodes::optional(&self.dev, "nvidia-modeset")?);
        }
        Ok(found)
    }

    fn device(&self, gpu: &Gpu) -> Result<Edits> {
        let node = nodes::required(&self.dev, &format!("nvidia{}", gpu.minor), gpu.minor)
            .with_context(|| format!("cannot give GPU {} ({}) to the container", gpu.index, gpu.uuid))?;
        let proc_dir = self.kernel_gpus.iter().find(|kernel| kernel.bus_id == gpu.bus_id).and_then(|kernel| {
            let located = self.proc.locate(&std::path::Path::new(DRIVER_PROC).join("gpus").join(&kernel.dir)).ok()?;
            Some((kernel.dir.clone(), located.host))
        });
        Ok(build::device(node, proc_dir))
    }

    fn proc_files(&self) -> Option<Vec<(std::ffi::OsString, Vec<u8>)>> {
        let dir = std::path::Path::new(DRIVER_PROC);
        self.proc.locate(dir).ok()?;
        let read = |name: &str| Some((name.into(), self.proc.read(&dir.join(name)).ok()?));
        Some(["params", "version", "registry"].into_iter().filter_map(read).collect())
    }
}

fn no_driver(root: &DriverRoot) -> anyhow::Error {
    anyhow::Error::new(Failure::new(
        format!("there is no NVIDIA driver below {}: its linker cache has no \"libnvidia-ml.so.1\"", root.path()),
        "install the driver (openSUSE: nvidia-compute-utils-G06; Debian: nvidia-smi), or unset \
         NVIDIA_VISIBLE_DEVICES to run the container without GPUs",
    ))
}
