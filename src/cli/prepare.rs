//! `prepare`: modules loaded and device nodes made, at boot or before the first container.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::{Options, output};
use crate::config;
use crate::driver::{DriverRoot, prepare};
use crate::error::failure;
use crate::finding::catalog;
use crate::host::Host;
use crate::log::Log;
use crate::paths::HostPath;
use crate::sys::{ns, process};

/// How long the driver's modules may take to load. A module of 100 MB from a slow disk takes seconds.
pub const AT_BOOT: Duration = Duration::from_secs(180);

/// Prepares the host, and prints what was done.
#[must_use]
pub fn run(options: &Options) -> ExitCode {
    let prepared = config::read(options.config.as_deref()).and_then(|(mut config, _)| {
        if let Some(root) = &options.root {
            config.driver_root = HostPath::new(root);
        }
        if !rustix::process::geteuid().is_root() || ns::in_user_namespace()? {
            return Err(failure(
                &catalog::NOT_ROOT,
                "only root of the host can make device nodes",
                "run \"sudo oci-nvidia-hook prepare\"",
            ));
        }
        let said = prepare_host(&config.driver_root, AT_BOOT)?;
        // The first container need not wait for NVML then. Why it does not answer is told to who asks for a GPU.
        Host::look_afresh(&config).ok();
        Ok(said)
    });
    match prepared {
        Ok(text) => output::print(&text),
        Err(error) => {
            Log::default().error(&error);
            ExitCode::FAILURE
        }
    }
}

/// Loads what is missing and makes what is missing; says what, a line each. Nothing to do is no error: a host without
/// GPUs boots as well. All modules together may take as long as `patience`.
///
/// # Errors
/// If a node cannot be made.
pub fn prepare_host(root: &HostPath, patience: Duration) -> Result<String> {
    let mut said = String::new();
    let driver = DriverRoot::open(root)?;
    // A driver root of its own is a container's that loads modules itself.
    if driver.path().as_path() == Path::new("/") {
        load_modules(&driver, patience, &mut said);
    }
    for node in prepare::plan(&prepare::look(&driver)) {
        if prepare::carry_out(&driver.path(), &node)? {
            writeln!(said, "made {node}").ok();
        }
    }
    Ok(said)
}

fn load_modules(driver: &DriverRoot, patience: Duration, said: &mut String) {
    let program = driver.read(Path::new("/proc/sys/kernel/modprobe")).unwrap_or_default();
    let program = String::from_utf8_lossy(&program).trim().to_owned();
    let program = if program.is_empty() { "/sbin/modprobe" } else { &program };
    let end = Instant::now() + patience;
    for module in prepare::missing_modules(&prepare::look(driver)) {
        let left = end.saturating_duration_since(Instant::now());
        let loaded = !left.is_zero() && process::run_modprobe(Path::new(program), module, left).unwrap_or(false);
        writeln!(said, "{} {module}", if loaded { "loaded" } else { "could not load" }).ok();
    }
}
