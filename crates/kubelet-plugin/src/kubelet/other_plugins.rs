//! Searches for other device plugins that offer the GPUs of this node.
//!
//! Two plugins would give the same GPU to two pods. If both offer the same resource, the kubelet disconnects the plugin that
//! registered last as soon as the stream of the other one ends. The kubelet does not report which plugins are registered, so this
//! module connects to the sockets of the known plugins, and compares the device ids that the kubelet can assign with ours.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::report::Finding;
use findings::catalog;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::dial::dial;
use super::socket::{self, SocketId};
use crate::model::Resource;
use crate::proto;
use crate::proto::device_plugin_client::DevicePluginClient;
use crate::proto::pluginregistration::InfoRequest;
use crate::proto::pluginregistration::registration_client::RegistrationClient;
use crate::proto::podresources::AllocatableResourcesRequest;
use crate::proto::podresources::pod_resources_lister_client::PodResourcesListerClient;

/// The type with which drivers for claims introduce themselves.
pub const DRIVER_FOR_CLAIMS: &str = "DRAPlugin";

/// The name of NVIDIA's driver for claims, and of ours.
const DRIVER: &str = "gpu.nvidia.com";

/// How long a plugin, or the kubelet, has to answer.
const DEADLINE: Duration = Duration::from_secs(1);

/// How many sockets are tried at most. A node has one or two.
const MAX_SOCKETS: usize = 64;

/// The kubelet may not yet have received a list that the plugin has sent.
const LIST_DELAY: Duration = Duration::from_secs(1);

/// The other plugins of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OtherPlugins {
    /// The file names of sockets at which another plugin answers
    pub sockets: BTreeSet<String>,
    /// For each resource an id that is not ours
    pub ids: BTreeMap<String, String>,
    /// The socket of a driver that offers the GPUs for claims
    pub driver: Option<PathBuf>,
}

/// Why a resource is not registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// What was found
    pub what: String,
    /// The other plugin offers the same resource.
    pub same_resource: bool,
}

impl Conflict {
    fn at(socket: &str, same_resource: bool) -> Self {
        let what =
            format!("another device plugin answers at {socket:?} in the kubelet's directory");
        Self {
            what,
            same_resource,
        }
    }

    /// Returns the finding about this resource.
    #[must_use]
    pub fn finding(&self, resource: &str) -> Finding {
        Finding::new(
            &catalog::OTHER_PLUGIN,
            format!("cannot register {resource:?}: {}", self.what),
            "delete the DaemonSet of the other device plugin, or stop `oci-nvidia-kubelet-plugin.service`",
        )
    }
}

impl OtherPlugins {
    /// Returns why this resource must not be registered, if another plugin offers it or the GPUs.
    #[must_use]
    pub fn conflict(&self, resource: &str) -> Option<Conflict> {
        if let Some(socket) = self.sockets.iter().find(|socket| offers(socket, resource)) {
            return Some(Conflict::at(socket, true));
        }
        if let Some(id) = self.ids.get(resource) {
            let what = format!("another device plugin has registered it with the device {id:?}");
            return Some(Conflict {
                what,
                same_resource: true,
            });
        }
        if let Some(path) = &self.driver {
            let what = format!("a DRA driver with the name {DRIVER:?} answers at {path:?}");
            return Some(Conflict {
                what,
                same_resource: false,
            });
        }
        let socket = self.sockets.first()?;
        Some(Conflict::at(socket, false))
    }
}

/// Reports whether the plugin with this socket probably offers this resource: NVIDIA's plugin has a
/// socket for each of its resources, and GKE's offers `nvidia.com/gpu`.
fn offers(socket: &str, resource: &str) -> bool {
    if socket.starts_with("nvidiaGPU-") {
        return resource == "nvidia.com/gpu";
    }
    let ours = resource.strip_prefix("nvidia.com/");
    ours.is_some_and(|name| socket == format!("nvidia-{name}.sock"))
}

fn is_plugin_socket(name: &str) -> bool {
    (name.starts_with("nvidia-") || name.starts_with("nvidiaGPU-")) && name.ends_with(".sock")
}

/// How long the kubelet has to answer, depending on its age. A kubelet that has just started knows no plugin, and may not answer yet.
#[must_use]
pub const fn patience(kubelet_is_new: bool) -> Duration {
    if kubelet_is_new {
        Duration::from_millis(50)
    } else {
        DEADLINE
    }
}

/// Searches for other plugins in the directory of the sockets, and asks the kubelet at its socket for pod resources.
pub async fn search(
    dir: &Path,
    pod_resources: &Path,
    patience: Duration,
    ours: &[Resource],
) -> OtherPlugins {
    let registry = socket::plugin_registry(dir.parent().unwrap_or(dir));
    let drivers = driver_for_claims(&registry, DRIVER, &[]);
    let (sockets, ids, driver) = tokio::join!(
        live_sockets(dir),
        lasting_ids(pod_resources, patience, ours),
        drivers
    );
    OtherPlugins {
        sockets,
        ids,
        driver,
    }
}

/// Returns the socket at which a driver for claims of this name introduces itself. `ours` are our sockets.
pub async fn driver_for_claims(
    registry: &Path,
    driver: &str,
    ours: &[SocketId],
) -> Option<PathBuf> {
    for file in fs::read_dir(registry).ok()?.flatten().take(MAX_SOCKETS) {
        let path = file.path();
        if let Some(id) = SocketId::at(&path)
            && !ours.contains(&id)
            && is_driver(&path, driver).await
        {
            return Some(path);
        }
    }
    None
}

async fn is_driver(path: &Path, driver: &str) -> bool {
    let ask = async {
        let mut plugin = RegistrationClient::new(dial(path).await?);
        anyhow::Ok(plugin.get_info(InfoRequest {}).await?.into_inner())
    };
    let answer = timeout(DEADLINE, ask).await;
    matches!(answer, Ok(Ok(info)) if info.r#type == DRIVER_FOR_CLAIMS && info.name == driver)
}

async fn live_sockets(dir: &Path) -> BTreeSet<String> {
    answering(plugin_sockets(dir, is_plugin_socket)).await
}

/// Returns the file names of the sockets in this directory at which a device plugin answers for NVIDIA's GPUs, also one of this program.
pub async fn device_plugins(dir: &Path) -> BTreeSet<String> {
    answering(plugin_sockets(dir, |name| {
        is_plugin_socket(name) || socket::is_ours(name)
    }))
    .await
}

/// Returns a resource of a device plugin that the kubelet can assign now, and that has the GPUs of this node: by the name, or because one of
/// these UUIDs is in its ids. A kubelet that does not answer knows no plugin yet. Resources of other devices can have NVIDIA's domain too,
/// such as `nvidia.com/hostdev` of the network operator.
pub async fn resource_with_gpus(pod_resources: &Path, uuids: &BTreeSet<&str>) -> Option<String> {
    for (name, ids) in allocatable(pod_resources, DEADLINE).await {
        if has_gpus(&name, &ids, uuids) {
            return Some(name);
        }
    }
    None
}

fn has_gpus(name: &str, ids: &[String], uuids: &BTreeSet<&str>) -> bool {
    let is_theirs = ["nvidia.com/gpu", "nvidia.com/gpu.shared"].contains(&name)
        || name.starts_with("nvidia.com/mig-");
    !ids.is_empty() && (is_theirs || ids.iter().any(|id| uuids.contains(stem(id))))
}

async fn answering(sockets: Vec<(String, PathBuf)>) -> BTreeSet<String> {
    let mut probes = JoinSet::new();
    for (name, path) in sockets {
        probes.spawn(async move { (answers(&path).await, name) });
    }
    let mut found = BTreeSet::new();
    for (has_answered, name) in probes.join_all().await {
        if has_answered {
            found.insert(name);
        }
    }
    found
}

fn plugin_sockets(dir: &Path, is_wanted: fn(&str) -> bool) -> Vec<(String, PathBuf)> {
    let mut sockets = Vec::new();
    let Ok(files) = fs::read_dir(dir) else {
        return sockets;
    };
    for file in files.flatten() {
        if sockets.len() == MAX_SOCKETS {
            break;
        }
        let is_socket = file.file_type().is_ok_and(|kind| kind.is_socket());
        if let Ok(name) = file.file_name().into_string()
            && is_socket
            && is_wanted(&name)
        {
            sockets.push((name, file.path()));
        }
    }
    sockets
}

/// Reports whether a device plugin answers at this socket.
pub async fn answers(socket: &Path) -> bool {
    let ask = async {
        let mut plugin = DevicePluginClient::new(dial(socket).await?);
        anyhow::Ok(plugin.get_device_plugin_options(proto::Empty {}).await?)
    };
    matches!(timeout(DEADLINE, ask).await, Ok(Ok(_)))
}

/// Returns the ids of others that the kubelet lists twice. A list with new ids of ours may be on its way to the kubelet.
async fn lasting_ids(
    socket: &Path,
    patience: Duration,
    ours: &[Resource],
) -> BTreeMap<String, String> {
    let first = ids_of_others(&allocatable(socket, patience).await, ours);
    if first.is_empty() {
        return first;
    }
    sleep(LIST_DELAY).await;
    let mut lasting = ids_of_others(&allocatable(socket, patience).await, ours);
    lasting.retain(|resource, _| first.contains_key(resource));
    lasting
}

/// The ids that the kubelet can assign, for each resource; nothing if the kubelet does not answer.
async fn allocatable(socket: &Path, patience: Duration) -> Vec<(String, Vec<String>)> {
    let ask = async {
        let mut kubelet = PodResourcesListerClient::new(dial(socket).await?);
        let request = AllocatableResourcesRequest {};
        let answer = kubelet.get_allocatable_resources(request).await?;
        anyhow::Ok(answer.into_inner())
    };
    let Ok(Ok(answer)) = timeout(patience, ask).await else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for device in answer.devices {
        found.push((device.resource_name, device.device_ids));
    }
    found
}

/// Returns an id for each of our resources that does not belong to one of our GPUs.
fn ids_of_others(
    allocatable: &[(String, Vec<String>)],
    ours: &[Resource],
) -> BTreeMap<String, String> {
    let mut known = BTreeSet::new();
    for device in ours.iter().flat_map(|resource| &resource.devices) {
        known.extend([stem(&device.id), &device.uuid, &device.gpu]);
    }
    let mut found = BTreeMap::new();
    for (resource, ids) in allocatable {
        if !ours.iter().any(|our| our.name == *resource) {
            continue;
        }
        if let Some(id) = ids.iter().find(|id| !known.contains(stem(id))) {
            found.insert(resource.clone(), id.clone());
        }
    }
    found
}

/// Returns the id without the number of a replica, which GKE's plugin writes in another way.
pub(crate) fn stem(id: &str) -> &str {
    let split = id.split_once("::").or_else(|| id.split_once("/vgpu"));
    split.map_or(id, |(stem, _)| stem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ResourceDevice;

    fn resource(name: &str, ids: &[&str]) -> Resource {
        let device = |id: &&str| ResourceDevice {
            id: (*id).to_owned(),
            gpu: stem(id).to_owned(),
            ..ResourceDevice::default()
        };
        Resource {
            name: name.to_owned(),
            devices: ids.iter().map(device).collect(),
        }
    }

    #[test]
    fn sockets_of_other_plugins() {
        for (name, resource, expected) in [
            ("nvidia-gpu.sock", "nvidia.com/gpu", Some(true)),
            ("nvidia-gpu.sock", "nvidia.com/h100", Some(false)),
            ("nvidia-gpu.sock", "example.com/gpu", Some(false)),
            (
                "nvidia-mig-1g.5gb.sock",
                "nvidia.com/mig-1g.5gb",
                Some(true),
            ),
            ("nvidiaGPU-1700000000.sock", "nvidia.com/gpu", Some(true)),
            ("nvidiaGPU-1700000000.sock", "nvidia.com/h100", Some(false)),
            ("oci-nvidia-gpu.sock", "nvidia.com/gpu", None),
            ("kubelet.sock", "nvidia.com/gpu", None),
            ("nvidia-gpu.lock", "nvidia.com/gpu", None),
        ] {
            let sockets = is_plugin_socket(name)
                .then(|| name.to_owned())
                .into_iter()
                .collect();
            let found = OtherPlugins {
                sockets,
                ..OtherPlugins::default()
            }
            .conflict(resource);
            assert_eq!(
                found.map(|conflict| conflict.same_resource),
                expected,
                "{name} {resource}"
            );
        }
    }

    #[test]
    fn ids_of_other_plugins() {
        let ours = [
            resource("nvidia.com/gpu", &["GPU-1::0", "GPU-1::1", "GPU-2"]),
            resource("a.com/b", &[]),
        ];
        let found = |name: &str, ids: &[&str]| {
            let ids = ids.iter().map(|id| (*id).to_owned()).collect();
            ids_of_others(&[(name.to_owned(), ids)], &ours)
                .into_values()
                .next()
        };
        assert_eq!(
            found("nvidia.com/gpu", &["GPU-1", "GPU-1::7", "GPU-2::0"]),
            None
        );
        assert_eq!(
            found("nvidia.com/gpu", &["GPU-1", "nvidia0"]),
            Some("nvidia0".to_owned())
        );
        assert_eq!(
            found("a.com/b", &["GPU-2", "GPU-3"]),
            Some("GPU-3".to_owned())
        );
        assert_eq!(found("other.com/nic", &["eth0"]), None);
    }

    #[test]
    fn resources_with_gpus() {
        let uuids = ["GPU-1", "MIG-2"].into();
        for (name, ids, expected) in [
            ("nvidia.com/gpu", &["nvidia0"][..], true),
            ("nvidia.com/gpu", &[], false),
            ("nvidia.com/gpu.shared", &["GPU-7::0"], true),
            ("nvidia.com/mig-1g.10gb", &["MIG-7"], true),
            ("example.com/h100", &["GPU-7", "GPU-1::3"], true),
            ("example.com/small", &["MIG-2"], true),
            ("example.com/h100", &["GPU-7"], false),
            ("nvidia.com/hostdev", &["0000:3b:00.0"], false),
        ] {
            let ids: Vec<String> = ids.iter().map(|id| (*id).to_owned()).collect();
            assert_eq!(has_gpus(name, &ids, &uuids), expected, "{name} {ids:?}");
        }
    }

    #[test]
    fn a_conflict_is_a_finding() {
        let driver = OtherPlugins {
            driver: Some("/r/gpu.sock".into()),
            ..OtherPlugins::default()
        };
        let expected = "a DRA driver with the name \"gpu.nvidia.com\" answers at \"/r/gpu.sock\"";
        assert_eq!(
            driver
                .conflict("nvidia.com/h100")
                .map(|found| found.what)
                .as_deref(),
            Some(expected)
        );
        let others = OtherPlugins {
            sockets: ["nvidia-gpu.sock".to_owned()].into(),
            ..OtherPlugins::default()
        };
        let finding = others
            .conflict("nvidia.com/gpu")
            .unwrap()
            .finding("nvidia.com/gpu");
        assert_eq!(
            (finding.kind.id(), &*finding.what),
            (
                "ONH-601",
                "cannot register \"nvidia.com/gpu\": another device plugin answers at \"nvidia-gpu.sock\" in the kubelet's directory"
            )
        );
    }
}
