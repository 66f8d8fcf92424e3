//! The configuration file of GKE's device plugin, `/etc/nvidia/gpu_config.json`.

use std::io;
use std::path::Path;

use anyhow::{Context, Result};
use base::report::Finding;

use super::document::{self, Document};
use super::problems::invalid_config;
use super::resources;
use super::values::{MigStrategy, Plugin};

const SHARING: &str = "GPUSharingConfig";
const MOST: &str = "MaxSharedClientsPerGPU";

/// Reads the file, if it exists.
///
/// # Errors
/// If it cannot be read.
pub(super) fn read(path: &Path) -> Result<Option<String>> {
    let text = document::read(path);
    let error = text.as_ref().err().and_then(|error| error.downcast_ref::<io::Error>());
    if error.is_some_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(None);
    }
    let what = || invalid_config(format!("cannot read the configuration {path:?}"), "correct gpu-config");
    text.map(Some).with_context(what)
}

/// Applies the text of the file. `path` is only used in messages.
///
/// # Errors
/// If it is not JSON, or a key has an invalid value.
pub(super) fn apply(plugin: &mut Plugin, path: &Path, text: &str) -> Result<Vec<Finding>> {
    let (mut file, root) = Document::parse(path, text)?;
    for (name, value) in file.map(&[], &root)? {
        let key = [name];
        match name {
            // The partitions themselves are created by GKE's partitioner, or with nvidia-smi.
            "GPUPartitionSize" if file.text(&key, value)?.is_empty() => {}
            "GPUPartitionSize" => plugin.mig_strategy = MigStrategy::Single,
            // The older key, which the sharing configuration replaces
            "MaxTimeSharedClientsPerGPU" if root.get(SHARING).is_some() => {}
            "MaxTimeSharedClientsPerGPU" => replicas(&file, plugin, &key, file.number(&key, value)?)?,
            SHARING => sharing(&mut file, plugin, value)?,
            _ => file.unknown(&key),
        }
    }
    Ok(file.findings)
}

fn sharing(file: &mut Document<'_>, plugin: &mut Plugin, value: &serde_json::Value) -> Result<()> {
    const STRATEGY: &str = "GPUSharingStrategy";
    let strategy = value.get(STRATEGY).map(|value| file.text(&[SHARING, STRATEGY], value)).transpose()?;
    for (name, value) in file.map(&[SHARING], value)? {
        let key = [SHARING, name];
        match (name, strategy.unwrap_or_default()) {
            (STRATEGY, "" | "time-sharing") => {}
            (STRATEGY, "mps") => file.no_effect(&key, "MPS is not supported"),
            (STRATEGY, _) => return Err(file.invalid(&key, "\"time-sharing\"")),
            (MOST, "time-sharing") => replicas(file, plugin, &key, file.number(&key, value)?)?,
            (MOST, _) => {}
            _ => file.unknown(&key),
        }
    }
    Ok(())
}

/// GKE writes 0 for GPUs that are not shared.
fn replicas(file: &Document<'_>, plugin: &mut Plugin, key: &[&str], number: u32) -> Result<()> {
    plugin.replicas = resources::replicas(number.max(1)).map_err(|allowed| file.invalid(key, &allowed))?;
    Ok(())
}
