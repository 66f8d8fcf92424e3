//! The configuration file of GKE's device plugin, `/etc/nvidia/gpu_config.json`.

use std::io;
use std::path::Path;

use anyhow::{Context, Result};
use base::report::{Failure, Finding};
use findings::catalog;
use serde_json::Value;

use super::document::{self, ConfigDocument, is_empty, leaves};
use super::resources;
use super::table::Plugin;
use super::values::{MigStrategy, SharingStrategy};

const SHARING: &str = "GPUSharingConfig";
const STRATEGY: &str = "GPUSharingStrategy";
const TIME_SHARING: &str = "time-sharing";
const MPS: &str = "mps";
const CLIENTS: &str = "MaxSharedClientsPerGPU";
/// The number of containers in the form before [`SHARING`]
const OLDER: &str = "MaxTimeSharedClientsPerGPU";

/// Reads the file, if it exists.
///
/// # Errors
/// If it cannot be read.
pub(super) fn read(path: &Path) -> Result<Option<String>> {
    let text = document::read(path);
    let error = text
        .as_ref()
        .err()
        .and_then(|error| error.downcast_ref::<io::Error>());
    if error.is_some_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(None);
    }
    text.map(Some).with_context(|| {
        Failure::new(
            &catalog::PLUGIN_CONFIG,
            format!("cannot read the configuration {path:?}"),
            "",
        )
    })
}

/// Applies the text of the file. `path` is only used in messages.
///
/// # Errors
/// If it is not JSON, or a key has an invalid value.
pub fn apply(plugin: &mut Plugin, path: &Path, text: &str) -> Result<Vec<Finding>> {
    let (mut file, root) = ConfigDocument::parse(path, text)?;
    let sharing = |key| root.get(SHARING)?.get(key);
    let strategy = sharing(STRATEGY).and_then(Value::as_str);
    let is_shared = matches!(strategy, Some(TIME_SHARING | MPS));
    let older = root.get(OLDER).and_then(Value::as_u64).unwrap_or_default();
    let clients = sharing(CLIENTS).and_then(Value::as_u64).unwrap_or_default();
    if is_shared && older == 0 && clients == 0 {
        return Err(file.invalid(
            &[SHARING, CLIENTS],
            "a number from 1, with \"time-sharing\" or \"mps\"",
        ));
    }
    for (keys, value) in leaves(&root) {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        match *keys {
            [] | [SHARING] if is_empty(value) => {}
            [] | [SHARING] => return Err(file.invalid(&keys, "a map")),
            // The partitions themselves are created by GKE's partitioner, or with nvidia-smi.
            ["GPUPartitionSize"] if file.text(&keys, value)?.is_empty() => {}
            ["GPUPartitionSize"] => plugin.mig_strategy = MigStrategy::Single,
            // GKE's plugin prefers the older key if it is set (pkg/gpu/nvidia/manager.go).
            [OLDER] => plugin.replicas = replicas(&file, &keys, value)?,
            [SHARING, STRATEGY] => match file.text(&keys, value)? {
                "" => {}
                TIME_SHARING => plugin.sharing = SharingStrategy::TimeSlicing,
                MPS => plugin.sharing = SharingStrategy::Mps,
                _ => return Err(file.invalid(&keys, "\"time-sharing\" or \"mps\"")),
            },
            [SHARING, CLIENTS] if !is_shared || older > 0 => {}
            [SHARING, CLIENTS] => plugin.replicas = replicas(&file, &keys, value)?,
            // More XIDs that make a GPU unhealthy than those that NVIDIA documents
            ["HealthCriticalXid"] => {
                let Some(xids) = value.as_array() else {
                    return Err(file.invalid(&keys, "a list of numbers"));
                };
                let is_listed = |xid: u32| xids.contains(&Value::from(xid));
                plugin.ignored_xids.retain(|xid| !is_listed(*xid));
            }
            ["GPUFractionDivisor"] => {
                file.no_effect(&keys, "parts of a GPU are not offered without MIG");
            }
            _ => file.unknown(&keys),
        }
    }
    Ok(file.findings)
}

/// GKE writes 0 for GPUs that are not shared.
fn replicas(file: &ConfigDocument<'_>, keys: &[&str], value: &Value) -> Result<u32> {
    resources::in_range(file.number(keys, value)?.max(1))
        .map_err(|allowed| file.invalid(keys, &allowed))
}
