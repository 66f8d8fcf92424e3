//! A kubelet's plugin watcher and its manager of claims, at their real interfaces, without pods.
//!
//! It finds drivers by their sockets, asks them for their services, and calls the best of those that it knows. It reads the health of devices.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kubelet_plugin::kubelet::socket::SocketId;
use kubelet_plugin::proto::dra::v1;
use kubelet_plugin::proto::health::v1alpha1::NodeWatchResourcesRequest;
use kubelet_plugin::proto::health::v1alpha1::dra_resource_health_client::DraResourceHealthClient;
use kubelet_plugin::proto::pluginregistration::registration_client::RegistrationClient;
use kubelet_plugin::proto::pluginregistration::{InfoRequest, PluginInfo, RegistrationStatus};
use tonic::transport::Channel;
use v1::dra_plugin_client::DraPluginClient;

use super::thread::{Shared, Thread};

/// What a test can inspect.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The drivers that are registered, by name
    pub drivers: BTreeMap<String, PluginInfo>,
    pub registrations: usize,
    /// The last report: whether the device is healthy, and the message
    pub health: BTreeMap<String, (bool, String)>,
}

/// The part of a kubelet for claims. Dropping it closes all connections, as the end of a process does.
#[derive(Debug)]
pub struct DraKubelet {
    state: Shared<State>,
    runtime: tokio::runtime::Handle,
    _thread: Thread,
}

impl DraKubelet {
    /// Starts it with this directory, as `/var/lib/kubelet`.
    pub fn start(dir: &Path) -> Self {
        let registry = dir.join("plugins_registry");
        std::fs::create_dir_all(&registry).unwrap();
        let state = Shared::default();
        let shared = state.clone();
        let (_thread, runtime) = Thread::serve(async move || {
            tokio::spawn(watch(registry, shared));
        });
        Self {
            state,
            runtime,
            _thread,
        }
    }

    pub fn state(&self) -> State {
        self.state.lock().clone()
    }

    #[track_caller]
    pub fn wait(&self, what: &str, most: Duration, is: impl Fn(&State) -> bool) -> Duration {
        self.state.wait(what, most, is)
    }

    /// Has the driver prepare claims, which are given by name and UID.
    #[track_caller]
    pub fn prepare(
        &self,
        driver: &str,
        claims: &[(&str, &str)],
    ) -> HashMap<String, v1::NodePrepareResourceResponse> {
        self.try_prepare(driver, claims).unwrap()
    }

    /// Has the driver release claims.
    #[track_caller]
    pub fn unprepare(
        &self,
        driver: &str,
        claims: &[(&str, &str)],
    ) -> HashMap<String, v1::NodeUnprepareResourceResponse> {
        self.try_unprepare(driver, claims).unwrap()
    }

    /// As [`DraKubelet::prepare`]. After an error, the kubelet tries it again.
    pub fn try_prepare(
        &self,
        driver: &str,
        claims: &[(&str, &str)],
    ) -> Result<HashMap<String, v1::NodePrepareResourceResponse>, String> {
        let (claims, endpoint) = (wire(claims), self.endpoint(driver)?);
        self.block_on(async move {
            let request = v1::NodePrepareResourcesRequest { claims };
            let answer = client(endpoint)
                .await?
                .node_prepare_resources(request)
                .await;
            answer
                .map(|answer| answer.into_inner().claims)
                .map_err(|error| error.to_string())
        })
    }

    /// As [`DraKubelet::unprepare`]. After an error, the kubelet tries it again.
    pub fn try_unprepare(
        &self,
        driver: &str,
        claims: &[(&str, &str)],
    ) -> Result<HashMap<String, v1::NodeUnprepareResourceResponse>, String> {
        let (claims, endpoint) = (wire(claims), self.endpoint(driver)?);
        self.block_on(async move {
            let request = v1::NodeUnprepareResourcesRequest { claims };
            let answer = client(endpoint)
                .await?
                .node_unprepare_resources(request)
                .await;
            answer
                .map(|answer| answer.into_inner().claims)
                .map_err(|error| error.to_string())
        })
    }

    fn endpoint(&self, driver: &str) -> Result<PathBuf, String> {
        let state = self.state();
        let info = state
            .drivers
            .get(driver)
            .ok_or_else(|| format!("DRA driver {driver} is not registered"))?;
        Ok(PathBuf::from(&info.endpoint))
    }

    fn block_on<T: Send + 'static>(&self, call: impl Future<Output = T> + Send + 'static) -> T {
        let (sender, receiver) = std::sync::mpsc::channel();
        self.runtime.spawn(async move { sender.send(call.await) });
        receiver
            .recv_timeout(Duration::from_secs(45))
            .expect("an answer within the kubelet's limit")
    }
}

fn wire(claims: &[(&str, &str)]) -> Vec<v1::Claim> {
    let claim = |(name, uid): &(&str, &str)| v1::Claim {
        namespace: "default".to_owned(),
        uid: (*uid).to_owned(),
        name: (*name).to_owned(),
    };
    claims.iter().map(claim).collect()
}

async fn client(endpoint: PathBuf) -> Result<DraPluginClient<Channel>, String> {
    super::dial(endpoint)
        .await
        .map(DraPluginClient::new)
        .map_err(|error| error.to_string())
}

async fn watch(registry: PathBuf, state: Shared<State>) {
    let mut known: BTreeMap<PathBuf, (SocketId, String)> = BTreeMap::new();
    loop {
        let files = std::fs::read_dir(&registry).into_iter().flatten().flatten();
        let sockets = files
            .filter(|file| file.file_type().is_ok_and(|kind| kind.is_socket()))
            .map(|file| file.path());
        let seen: BTreeMap<PathBuf, SocketId> = sockets
            .filter_map(|path| SocketId::at(&path).map(|id| (path, id)))
            .collect();
        known.retain(|path, (id, driver)| {
            let stays = seen.get(path) == Some(id);
            if !stays {
                state.change(|state| state.drivers.remove(driver));
            }
            stays
        });
        for (path, id) in seen {
            if known.contains_key(&path) {
                continue;
            }
            if let Some(driver) = register(&path, &state).await {
                known.insert(path, (id, driver));
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// As `handleRegistration` of the kubelet, with its limits.
async fn register(path: &Path, state: &Shared<State>) -> Option<String> {
    let mut plugin = RegistrationClient::new(super::dial(path.to_owned()).await.ok()?);
    let info = tokio::time::timeout(Duration::from_secs(1), plugin.get_info(InfoRequest {}))
        .await
        .ok()?
        .ok()?;
    let info = info.into_inner();
    assert_eq!(info.r#type, "DRAPlugin");
    assert!(Path::new(&info.endpoint).is_absolute(), "{info:?}");
    let best = info
        .supported_versions
        .iter()
        .find(|version| ["v1.DRAPlugin", "v1beta1.DRAPlugin"].contains(&version.as_str()));
    assert_eq!(best.map(String::as_str), Some("v1.DRAPlugin"));
    let channel = super::dial(PathBuf::from(&info.endpoint)).await.ok()?;
    let name = info.name.clone();
    state.change(|state| {
        state.drivers.insert(name.clone(), info);
        state.registrations += 1;
    });
    tokio::spawn(read_health(channel, state.clone()));
    plugin
        .notify_registration_status(RegistrationStatus {
            plugin_registered: true,
            error: String::new(),
        })
        .await
        .ok()?;
    Some(name)
}

async fn read_health(channel: Channel, state: Shared<State>) {
    let mut client = DraResourceHealthClient::new(channel);
    let Ok(stream) = client
        .node_watch_resources(NodeWatchResourcesRequest {})
        .await
    else {
        return;
    };
    let mut stream = stream.into_inner();
    while let Ok(Some(report)) = stream.message().await {
        let device = |device: kubelet_plugin::proto::health::v1alpha1::DeviceHealth| {
            let is_healthy = device.health == 1;
            (
                device.device.unwrap().device_name,
                (is_healthy, device.message),
            )
        };
        let health = report.devices.into_iter().map(device).collect();
        state.change(|state| state.health = health);
    }
    state.change(|state| state.health.clear());
}
