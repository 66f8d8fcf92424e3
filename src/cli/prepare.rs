//! `prepare`: loads the driver's modules and creates its device nodes, at boot or before the first container.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use base::paths::HostPath;
use base::report::{failure, kind_of};
use findings::catalog;
use nvidia_host::config;
use nvidia_host::device_id::imex_channel;
use nvidia_host::host::{Driver, Source};
use nvidia_host::prepare::host::{AT_BOOT, Prepared, may_prepare, prepare_host};

use super::{args, output, selection};
use crate::record::call::Call;

/// Prepares the host, and prints each action.
pub(crate) fn run(options: &args::Prepare, config: Option<&Path>) -> Result<ExitCode> {
    let prepared = run_as_root(options, config)?;
    let printed = output::print(
        &prepared
            .done
            .iter()
            .flat_map(|line| [line.as_str(), "\n"])
            .collect::<String>(),
    );
    prepared
        .failed
        .iter()
        .for_each(|error| Call::default().error(error));
    Ok(if prepared.failed.is_empty() {
        printed
    } else {
        ExitCode::FAILURE
    })
}

fn run_as_root(options: &args::Prepare, config: Option<&Path>) -> Result<Prepared> {
    let (mut config, _) = config::read(config)?;
    if let Some(root) = &options.root {
        config.driver_root = HostPath::new(root);
    }
    let channels = selection::words(&options.imex_channels).map(imex_channel);
    let channels = channels.collect::<Result<Vec<_>>>()?;
    if !may_prepare()? {
        return Err(failure(
            &catalog::NOT_ROOT,
            "only root of the host can create device nodes",
            "run \"sudo oci-nvidia-hook prepare\"",
        ));
    }
    let mut prepared = prepare_host(&config, &channels, AT_BOOT)?;
    // A host without GPUs, or without a driver, must boot without an error.
    if prepared.is_loaded && prepared.failed.is_empty() {
        // This caches the inventory, so that the first container need not wait for NVML.
        let inspected = Driver::find(&config).and_then(|driver| driver.host(Source::Nvml));
        let is_host_root = options.root.as_deref() == Some(Path::new("/"));
        match inspected.err() {
            // `--root /` creates the nodes of a driver that is in another directory (ONH-047).
            Some(error) if is_host_root && kind_of(&error) == Some(&catalog::NO_LIBRARIES) => {}
            error => prepared.failed.extend(error),
        }
    }
    Ok(prepared)
}
