//! Asks the kubelet which containers have which devices.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use tokio::time::timeout;

use super::dial::dial;
use crate::cdi_specs::{CLAIMS, MONITORING};
use crate::proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use crate::proto::podresources::{
    DynamicResource, ListPodResourcesRequest, ListPodResourcesResponse,
};

/// How long the kubelet has to answer.
const DEADLINE: Duration = Duration::from_secs(2);

/// The limit for an answer in bytes, the same as in the kubelet.
const MAX_ANSWER: usize = 16 << 20;

/// A container that has devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodContainer {
    /// The namespace of the pod
    pub namespace: String,
    /// The name of the pod
    pub pod: String,
    /// The name of the container
    pub name: String,
    /// The ids of its devices by resource
    pub devices: BTreeMap<String, Vec<String>>,
    /// The UUIDs of the devices that it has from claims, by the name of our driver
    pub claims: BTreeMap<String, Vec<String>>,
}

/// Returns the containers that have devices of these resources or from claims, or `None` if the kubelet does not answer in time.
pub async fn list(socket: &Path, resources: &[String]) -> Option<Vec<PodContainer>> {
    let answer = timeout(DEADLINE, ask(socket)).await.ok()?.ok()?;
    Some(containers(answer, resources))
}

/// Returns the ids of all devices that containers have from device plugins, or `None` if the kubelet does not answer in time.
pub(crate) async fn device_ids(socket: &Path) -> Option<BTreeSet<String>> {
    let answer = timeout(DEADLINE, ask(socket)).await.ok()?.ok()?;
    let mut ids = BTreeSet::new();
    for pod in answer.pod_resources {
        for device in pod.containers.into_iter().flat_map(|found| found.devices) {
            ids.extend(device.device_ids);
        }
    }
    Some(ids)
}

async fn ask(socket: &Path) -> anyhow::Result<ListPodResourcesResponse> {
    let mut kubelet =
        PodResourcesListerClient::new(dial(socket).await?).max_decoding_message_size(MAX_ANSWER);
    Ok(kubelet.list(ListPodResourcesRequest {}).await?.into_inner())
}

/// Returns the UUIDs in the names of our CDI devices, by driver. Two claims with one device count once, and devices with administrative access
/// do not count: they monitor what other containers use.
fn claimed(resources: Vec<DynamicResource>) -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for resource in resources {
        for claimed in resource.claim_resources {
            let names = claimed
                .cdi_devices
                .iter()
                .map(|device| device.name.as_str());
            let uuids: Vec<&str> = names.filter_map(|name| CLAIMS.uuid(name)).collect();
            if uuids.is_empty() || uuids.contains(&MONITORING) {
                continue;
            }
            let known = found.entry(claimed.driver_name.clone()).or_default();
            for uuid in uuids {
                if !known.iter().any(|known| known == uuid) {
                    known.push(uuid.to_owned());
                }
            }
        }
    }
    found
}

/// Returns the containers of an answer that have devices of these resources or from claims.
#[must_use]
pub fn containers(answer: ListPodResourcesResponse, resources: &[String]) -> Vec<PodContainer> {
    let mut found = Vec::new();
    for pod in answer.pod_resources {
        for container in pod.containers {
            // A resource has several entries if its devices are at several NUMA nodes.
            let mut devices: BTreeMap<String, Vec<String>> = BTreeMap::new();
            for entry in container.devices {
                if resources.contains(&entry.resource_name) {
                    let ids = devices.entry(entry.resource_name).or_default();
                    ids.extend(entry.device_ids);
                }
            }
            let claims = claimed(container.dynamic_resources);
            if devices.is_empty() && claims.is_empty() {
                continue;
            }
            let (namespace, pod) = (pod.namespace.clone(), pod.name.clone());
            found.push(PodContainer {
                namespace,
                pod,
                name: container.name,
                devices,
                claims,
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::podresources::{CdiDevice, ClaimResource};

    #[test]
    fn administrative_access_is_no_use_of_a_gpu() {
        let claim = |names: &[&str]| {
            let cdi_devices = names.iter().map(|name| CdiDevice {
                name: CLAIMS.device_name(name),
            });
            DynamicResource {
                claim_resources: vec![ClaimResource {
                    driver_name: "gpu.nvidia.com".to_owned(),
                    cdi_devices: cdi_devices.collect(),
                }],
            }
        };
        let found = claimed(vec![
            claim(&["GPU-0"]),
            claim(&["GPU-1", MONITORING]),
            claim(&["GPU-0"]),
        ]);
        assert_eq!(found.len(), 1);
        assert_eq!(found["gpu.nvidia.com"], ["GPU-0"]);
        assert!(claimed(vec![claim(&["GPU-1", MONITORING])]).is_empty());
    }
}
