//! The configuration file of GKE's device plugin, `/etc/nvidia/gpu_config.json`.

use std::path::Path;

use anyhow::Result;
use base::report::Finding;
use nvidia_host::config::kubelet_plugin::MigStrategy;

use super::Target;
use super::document::Document;

const SHARING: &str = "GPUSharingConfig";
const MOST: &str = "MaxSharedClientsPerGPU";

/// Applies the text of the file. `path` is only used in messages.
///
/// # Errors
/// If it is not JSON, or a key has an invalid value.
pub fn apply(target: &mut Target, path: &Path, text: &str) -> Result<Vec<Finding>> {
    let (mut file, root) = Document::parse(path, text)?;
    for (name, value) in file.map(&[], &root)? {
        let key = [name];
        match name {
            // The partitions themselves are created by GKE's partitioner, or with nvidia-smi.
            "GPUPartitionSize" if file.text(&key, value)?.is_empty() => {}
            "GPUPartitionSize" => target.config.kubelet_plugin.mig_strategy = MigStrategy::Single,
            // The older key, which the sharing configuration replaces
            "MaxTimeSharedClientsPerGPU" if root.get(SHARING).is_some() => {}
            "MaxTimeSharedClientsPerGPU" => replicas(&file, target, &key, file.number(&key, value)?)?,
            SHARING => sharing(&mut file, target, value)?,
            _ => file.unknown(&key),
        }
    }
    Ok(file.findings)
}

fn sharing(file: &mut Document<'_>, target: &mut Target, value: &serde_json::Value) -> Result<()> {
    const STRATEGY: &str = "GPUSharingStrategy";
    let strategy = value.get(STRATEGY).map(|value| file.text(&[SHARING, STRATEGY], value)).transpose()?;
    for (name, value) in file.map(&[SHARING], value)? {
        let key = [SHARING, name];
        match (name, strategy.unwrap_or_default()) {
            (STRATEGY, "" | "time-sharing") => {}
            (STRATEGY, "mps") => file.no_effect(&key, "MPS is not supported"),
            (STRATEGY, _) => return Err(file.invalid(&key, "\"time-sharing\"")),
            (MOST, "time-sharing") => replicas(file, target, &key, file.number(&key, value)?)?,
            (MOST, _) => {}
            _ => file.unknown(&key),
        }
    }
    Ok(())
}

/// GKE writes 0 for GPUs that are not shared.
fn replicas(file: &Document<'_>, target: &mut Target, key: &[&str], number: u32) -> Result<()> {
    let result = target.config.kubelet_plugin.set_replicas(number.max(1));
    result.map_err(|allowed| file.invalid(key, &allowed))
}
