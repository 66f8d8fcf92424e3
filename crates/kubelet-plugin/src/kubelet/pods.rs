//! Asks the kubelet which containers have which devices.
//!
//! The names become labels of metrics. Prometheus keeps each set of labels that it has ever seen, so their number and length are limited
//! here: names that the API server does not accept, and containers beyond the limits, are only counted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use tokio::time::timeout;

use super::dial::dial;
use crate::cdi_specs::CLAIMS;
use crate::proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use crate::proto::podresources::{
    DynamicResource, ListPodResourcesRequest, ListPodResourcesResponse,
};

/// How long the kubelet has to answer.
const DEADLINE: Duration = Duration::from_secs(2);

/// The limit for an answer in bytes, the same as in the kubelet.
const MAX_ANSWER: usize = 16 << 20;

/// The limit for the containers of an answer. A kubelet runs 110 pods by default, and 500 on OpenShift.
const MAX_CONTAINERS: usize = 1000;

/// The limit for the devices that all containers of an answer have together.
const MAX_DEVICES: usize = 4000;

/// The limit of a DNS label, which the names of namespaces, containers and drivers for claims have (`ValidateNamespaceName`).
const MAX_LABEL: usize = 63;

/// The limit of a DNS subdomain, which the name of a pod is (`ValidatePodName`).
const MAX_SUBDOMAIN: usize = 253;

/// The containers that have devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodContainers {
    /// Those that metrics name, by name
    pub listed: Vec<PodContainer>,
    /// How many more there are: they have invalid names, or exceed the limits
    pub omitted: u32,
}

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
pub async fn list(socket: &Path, resources: &[String]) -> Option<PodContainers> {
    let answer = timeout(DEADLINE, ask(socket)).await.ok()?.ok()?;
    Some(select(answer, resources))
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

/// Returns the containers of an answer that have devices of these resources or from claims, within the limits.
#[must_use]
pub fn select(answer: ListPodResourcesResponse, resources: &[String]) -> PodContainers {
    bounded(containers(answer, resources))
}

/// Returns the UUIDs in the names of our CDI devices, by driver. Two claims with one device, such as a claim for monitoring, count once.
fn claimed(resources: Vec<DynamicResource>) -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for resource in resources
        .into_iter()
        .flat_map(|resource| resource.claim_resources)
    {
        for uuid in resource
            .cdi_devices
            .iter()
            .filter_map(|device| CLAIMS.uuid(&device.name))
        {
            let uuids = found.entry(resource.driver_name.clone()).or_default();
            if !uuids.iter().any(|known| known == uuid) {
                uuids.push(uuid.to_owned());
            }
        }
    }
    found
}

fn containers(answer: ListPodResourcesResponse, resources: &[String]) -> Vec<PodContainer> {
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

/// Applies the limits. The containers are sorted, because the kubelet lists them in another order each time, and the same ones should be
/// omitted.
fn bounded(mut all: Vec<PodContainer>) -> PodContainers {
    all.sort_unstable_by(|a, b| a.names().cmp(&b.names()));
    let mut found = PodContainers::default();
    let mut devices = 0;
    for container in all {
        let count = container.count();
        let fits = found.listed.len() < MAX_CONTAINERS && devices + count <= MAX_DEVICES;
        if fits && container.has_valid_names() {
            devices += count;
            found.listed.push(container);
        } else {
            found.omitted = found.omitted.saturating_add(1);
        }
    }
    found
}

impl PodContainer {
    fn names(&self) -> [&str; 3] {
        [&self.namespace, &self.pod, &self.name]
    }

    fn count(&self) -> usize {
        let ids = self.devices.values().chain(self.claims.values());
        ids.map(Vec::len).sum()
    }

    fn has_valid_names(&self) -> bool {
        is_name(&self.namespace, MAX_LABEL)
            && is_name(&self.pod, MAX_SUBDOMAIN)
            && is_name(&self.name, MAX_LABEL)
            && self.claims.keys().all(|driver| is_name(driver, MAX_LABEL))
    }
}

/// Whether a text consists of the characters of a DNS name in lower case (RFC 1123), as the API server demands.
fn is_name(text: &str, limit: usize) -> bool {
    !text.is_empty() && text.len() <= limit && text.bytes().all(is_in_name)
}

fn is_in_name(byte: u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::podresources::{
        CdiDevice, ClaimResource, ContainerDevices, ContainerResources, PodResources,
    };

    fn pod(namespace: &str, pod: &str, name: &str, resource: &str, ids: usize) -> PodResources {
        let device_ids = (0..ids).map(|id| id.to_string()).collect();
        let devices = ContainerDevices {
            resource_name: resource.to_owned(),
            device_ids,
        };
        let container = ContainerResources {
            name: name.to_owned(),
            devices: vec![devices],
            ..ContainerResources::default()
        };
        PodResources {
            name: pod.to_owned(),
            namespace: namespace.to_owned(),
            containers: vec![container],
        }
    }

    fn listed(pod_resources: Vec<PodResources>) -> PodContainers {
        let answer = ListPodResourcesResponse { pod_resources };
        select(answer, &["nvidia.com/gpu".to_owned()])
    }

    #[test]
    fn names_that_the_api_server_does_not_accept() {
        let (label, subdomain) = ("a".repeat(63), "b.".repeat(126) + "b");
        let valid = pod(&label, &subdomain, &label, "nvidia.com/gpu", 1);
        let found = listed(vec![valid]);
        assert_eq!((found.listed.len(), found.omitted), (1, 0));
        let long = "a".repeat(64);
        for hostile in [
            "", "a\"b", "a\nb 1", "a\\", "a\0", "a\u{85}", "ä", "A", "a_b", "a}b", "a b", &long,
        ] {
            for [namespace, name] in [[hostile, "main"], ["ns", hostile]] {
                let found = listed(vec![pod(namespace, "pod", name, "nvidia.com/gpu", 1)]);
                assert_eq!((found.listed.len(), found.omitted), (0, 1), "{hostile:?}");
            }
        }
        let found = listed(vec![pod(
            "ns",
            &(subdomain + "b"),
            "main",
            "nvidia.com/gpu",
            1,
        )]);
        assert_eq!((found.listed.len(), found.omitted), (0, 1));
    }

    #[test]
    fn names_of_drivers() {
        for (driver, omitted) in [
            ("gpu.nvidia.com", 0),
            ("gpu\"} 1\n", 1),
            (&*"d".repeat(64), 1),
        ] {
            let device = CdiDevice {
                name: CLAIMS.device_name("GPU-0"),
            };
            let claim = ClaimResource {
                driver_name: driver.to_owned(),
                cdi_devices: vec![device],
            };
            let mut pod = pod("ns", "pod", "main", "nvidia.com/gpu", 1);
            pod.containers[0].dynamic_resources = vec![DynamicResource {
                claim_resources: vec![claim],
            }];
            assert_eq!(listed(vec![pod]).omitted, omitted, "{driver:?}");
        }
    }

    #[test]
    fn more_than_a_node_has() {
        let many = |count: usize, ids| -> Vec<PodResources> {
            let pods = (0..count).rev();
            pods.map(|number| {
                pod(
                    "ns",
                    &format!("p{number:06}"),
                    "main",
                    "nvidia.com/gpu",
                    ids,
                )
            })
            .collect()
        };
        let found = listed(many(50_000, 1));
        assert_eq!(
            (found.listed.len(), found.omitted),
            (MAX_CONTAINERS, 49_000)
        );
        assert_eq!(found.listed[0].pod, "p000000", "the same ones each time");
        assert_eq!(found.listed[999].pod, "p000999");
        // One with too many devices does not displace the others.
        let mut pods = many(100, 100);
        pods.push(pod("a", "first", "main", "nvidia.com/gpu", 1_000_000));
        let found = listed(pods);
        assert_eq!((found.listed.len(), found.omitted), (40, 61));
        // Nor do the devices of other plugins.
        let mut pods = many(3, 1);
        pods.push(pod("a", "first", "main", "example.com/nic", 1_000_000));
        let found = listed(pods);
        assert_eq!((found.listed.len(), found.omitted), (3, 0));
    }
}
