//! What the checks use: the machine, the driver, and a runtime that starts containers here.

use std::cell::Cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::check::{Stop, cannot_run};
use crate::container::{Container, Runtime};
use crate::driver::{Driver, Gpu};
use crate::machine::Machine;
use crate::options::Options;
use crate::process::{self, Ran};
use crate::{isolation, redact};

/// The time limit of the first questions to the driver.
const PATIENCE: Duration = Duration::from_secs(90);

/// What the checks use.
#[derive(Debug)]
pub struct Bench {
    pub options: Options,
    pub machine: Machine,
    pub work: PathBuf,
    /// Whether this is in a mount namespace; if not, the reason
    isolated: Result<(), String>,
    driver: Result<Driver, String>,
    runtime: Result<Runtime, String>,
    /// Open nodes of the GPUs. Without a client, the driver takes seconds to initialize a GPU for each program, unless persistence mode
    /// is on.
    _nodes: Vec<File>,
    /// The end of the current check
    end: Cell<Instant>,
}

impl Bench {
    /// Enters the mount namespace, finds the driver, and tries to start a container without a GPU.
    pub fn new(options: &Options, end: Instant) -> Self {
        let machine = Machine::read();
        let work = options.work.clone();
        let isolated = if machine.is_root {
            isolation::enter(&work)
        } else {
            Err("this is not root, and only root can create a mount namespace".to_owned())
        };
        let limit = PATIENCE.min(end.saturating_duration_since(Instant::now()));
        let driver = may_ask(&isolated).and_then(|()| Driver::find(options, &work, limit));
        let runtime = isolated
            .clone()
            .and_then(|()| Runtime::find(options, &work));
        // The hook and the driver's programs may change nodes of a driver root, too.
        let nodes_of_root = driver
            .as_ref()
            .ok()
            .map(|driver| driver.nodes.clone())
            .filter(|dir| dir != Path::new("/dev"));
        let driver = match nodes_of_root {
            Some(dir) if isolated.is_ok() => {
                isolation::separate(&dir, &work.join("stage"), |_| true).and(driver)
            }
            _ => driver,
        };
        let open = |driver: &Driver| -> Vec<File> {
            let nodes = driver
                .gpus
                .iter()
                .map(|gpu| driver.nodes.join(format!("nvidia{}", gpu.minor)));
            nodes.filter_map(|node| File::open(node).ok()).collect()
        };
        let nodes = driver.as_ref().map(open).unwrap_or_default();
        Self {
            options: options.clone(),
            machine,
            work,
            isolated,
            driver,
            runtime,
            _nodes: nodes,
            end: Cell::new(end),
        }
    }

    /// Begins a check that may take until `end`.
    pub fn begin(&mut self, end: Instant) {
        self.end.set(end);
    }

    /// The rest of the time of the current check.
    pub fn left(&self) -> Duration {
        self.end.get().saturating_duration_since(Instant::now())
    }

    /// Returns the driver.
    ///
    /// # Errors
    /// If no driver works. The check `info` fails then.
    pub fn driver(&self) -> Result<&Driver, Stop> {
        let without =
            |_: &String| Stop::CannotRun("no working driver was found: see info".to_owned());
        self.driver.as_ref().map_err(without)
    }

    /// Returns the driver, or why it was not found.
    pub fn found_driver(&self) -> Result<&Driver, &String> {
        self.driver.as_ref()
    }

    /// Needs the mount namespace.
    ///
    /// # Errors
    /// The reason why the checks have no mount namespace of their own.
    pub fn isolated(&self) -> Result<(), Stop> {
        self.isolated.clone().map_err(Stop::CannotRun)
    }

    /// Returns a container that is configured like those of an engine.
    ///
    /// # Errors
    /// If no container starts on this machine, also without a GPU, or if the driver is not ready for CUDA.
    pub fn container(&self, name: &str) -> Result<Container<'_>, Stop> {
        let runtime = self
            .runtime
            .as_ref()
            .map_err(|why| Stop::CannotRun(why.clone()))?;
        self.uvm()?;
        Ok(Container::new(
            name,
            runtime,
            &self.options,
            &self.work,
            self.left(),
        ))
    }

    /// Needs the driver's device for CUDA.
    ///
    /// # Errors
    /// If its module is not loaded.
    pub fn uvm(&self) -> Result<(), Stop> {
        match self.driver()?.has_uvm() {
            true => Ok(()),
            false => cannot_run(
                "the module nvidia_uvm is not loaded; hint: run \"modprobe nvidia_uvm\" first",
            ),
        }
    }

    /// Needs `nvidia-smi`, which the hook adds to containers.
    ///
    /// # Errors
    /// If the driver lacks it.
    pub fn smi(&self) -> Result<(), Stop> {
        if self.driver()?.has_smi() {
            Ok(())
        } else {
            cannot_run("nvidia-smi is not installed")
        }
    }

    /// Returns a GPU that a container can use as a whole.
    ///
    /// # Errors
    /// If all GPUs are in MIG mode.
    pub fn whole_gpu(&self) -> Result<&Gpu, Stop> {
        let whole = self.driver()?.gpus.iter().find(|gpu| !gpu.is_mig);
        whole.map_or_else(|| cannot_run("all GPUs are in MIG mode"), Ok)
    }

    /// Returns the name of a device that CUDA can use: a whole GPU, or else a MIG device.
    ///
    /// # Errors
    /// If all GPUs are in MIG mode, and none has a MIG device.
    pub fn device(&self) -> Result<String, Stop> {
        let gpus = &self.driver()?.gpus;
        let whole = gpus
            .iter()
            .find(|gpu| !gpu.is_mig)
            .map(|gpu| gpu.uuid.clone());
        let device = whole.or_else(|| gpus.iter().find_map(|gpu| gpu.mig_devices.first().cloned()));
        device.map_or_else(
            || cannot_run("all GPUs are in MIG mode, and none has a MIG device"),
            Ok,
        )
    }

    /// Returns a command of the hook with the configuration of the checks.
    ///
    /// # Errors
    /// If there is no driver.
    pub fn hook(&self) -> Result<Command, Stop> {
        let mut hook = process::command(self.options.program("oci-nvidia-hook"));
        hook.arg("--config").arg(&self.driver()?.config);
        Ok(hook)
    }

    /// Runs a command within the time of the check.
    ///
    /// # Errors
    /// If it cannot be started, or does not end in time.
    pub fn run(&self, command: &mut Command) -> Result<Ran, String> {
        self.run_with(command, b"")
    }

    /// Runs a command with this input.
    ///
    /// # Errors
    /// If it cannot be started, or does not end in time.
    pub fn run_with(&self, command: &mut Command, input: &[u8]) -> Result<Ran, String> {
        process::run(command, input, &self.work, self.left())
    }

    /// Describes the machine for the report.
    pub fn description(&self) -> Value {
        let mut machine = self.machine.describe();
        machine["namespaces"] = match &self.isolated {
            Ok(()) => "permitted".into(),
            Err(why) => why.clone().into(),
        };
        machine["runtime"] = match &self.runtime {
            Ok(runtime) => runtime.version.clone().into(),
            Err(why) => why.clone().into(),
        };
        if let Ok(driver) = &self.driver {
            let cuda = driver.info["cuda_version"].as_str().unwrap_or("unknown");
            let gpu = |gpu: &Value| json!({"model": gpu["model"], "mig": gpu["mig"]["enabled"], "compute_capability": gpu["compute_capability"]});
            let gpus: Vec<_> = driver.info["gpus"]
                .as_array()
                .into_iter()
                .flatten()
                .map(gpu)
                .collect();
            machine["driver"] = json!({"version": driver.version(), "cuda": cuda, "place": driver.how, "gpus": gpus});
        }
        machine
    }

    /// Returns the texts that must not be in the report.
    pub fn secrets(&self) -> Vec<String> {
        let mut secrets = redact::secrets();
        // The kit can be in the home directory of a user.
        secrets.push(self.options.kit.display().to_string());
        secrets
    }
}

/// Without a mount namespace, the hook stores its answers on the machine. The first process removes its directory again, unless it
/// existed before.
fn may_ask(isolated: &Result<(), String>) -> Result<(), String> {
    match isolated {
        Err(why) if Path::new("/run/oci-nvidia-hook").exists() => Err(format!(
            "the hook would change /run/oci-nvidia-hook, because {why}"
        )),
        _ => Ok(()),
    }
}
