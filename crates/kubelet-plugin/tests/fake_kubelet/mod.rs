//! A kubelet's device manager at its real interface, without pods.
//!
//! It does what the kubelet of Kubernetes 1.36 does with its sockets: at its start it deletes all files of the directory but its
//! checkpoint, and creates its socket. Within Register it connects to the plugin and asks for its options, then it opens
//! ListAndWatch. If the stream of a resource ends, it disconnects the plugin that registered the resource last, even if the stream
//! belonged to an earlier registration (Kubernetes issue 127803). Each kubelet runs in a thread of its own, so that stopping it closes all its
//! connections, as the end of a process does.

pub mod dra;
pub mod plugin;
pub mod thread;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use kubelet_plugin::proto;
use kubelet_plugin::proto::device_plugin_client::DevicePluginClient;
use kubelet_plugin::proto::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use kubelet_plugin::proto::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, CdiDevice, ClaimResource,
    ContainerDevices, ContainerResources, DynamicResource, ListPodResourcesRequest,
    ListPodResourcesResponse, PodResources as Pod,
};
use kubelet_plugin::proto::registration_server::{Registration, RegistrationServer};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

use thread::Thread;

/// What happened, in its order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Register was called.
    Called { resource: String },
    /// Register succeeded.
    Registered { resource: String, endpoint: String },
    /// Register failed.
    Refused { resource: String, error: String },
    /// A list arrived: ids, and whether they are healthy.
    List {
        resource: String,
        devices: BTreeMap<String, bool>,
    },
    /// A stream ended.
    Ended { resource: String },
}

/// What the kubelet knows of a resource.
#[derive(Debug, Default)]
pub struct Resource {
    /// The file name of the plugin's socket
    pub endpoint: String,
    /// The ids of the last list, and whether they are healthy
    pub devices: BTreeMap<String, bool>,
    /// The number of open streams
    pub streams: usize,
    client: Option<Client>,
}

/// A connection to a plugin.
#[derive(Clone, Debug)]
struct Client {
    plugin: DevicePluginClient<Channel>,
    cut: Arc<Notify>,
}

/// A container that has devices.
#[derive(Clone, Debug)]
pub struct Container {
    pub namespace: &'static str,
    pub pod: &'static str,
    pub name: &'static str,
    pub resource: &'static str,
    pub ids: Vec<String>,
}

/// What a test can inspect and change while the kubelet runs.
#[derive(Debug, Default)]
pub struct State {
    /// All events with their times
    pub events: Vec<(Instant, Event)>,
    /// By name
    pub resources: BTreeMap<String, Resource>,
    /// Register does not return.
    pub hangs: bool,
    /// Register takes so long, and is executed even if the caller does not wait for it.
    pub delay: Duration,
    /// Register fails so many times.
    pub refuses: usize,
    /// Devices that the pod resources list in addition
    pub more_devices: BTreeMap<String, Vec<String>>,
    /// The containers that have devices
    pub containers: Vec<Container>,
    /// The containers that have devices from claims: the name of the driver instead of the resource, and names of CDI devices as ids
    pub claims: Vec<Container>,
    /// The pod resources do not return.
    pub pods_hang: bool,
}

impl State {
    /// The number of devices that pods can get.
    pub fn allocatable(&self, resource: &str) -> usize {
        self.resources.get(resource).map_or(0, |known| {
            known.devices.values().filter(|healthy| **healthy).count()
        })
    }

    /// Whether a plugin is connected.
    pub fn is_registered(&self, resource: &str) -> bool {
        self.resources
            .get(resource)
            .is_some_and(|known| known.client.is_some())
    }

    /// The number of open streams of a resource.
    pub fn streams(&self, resource: &str) -> usize {
        self.resources
            .get(resource)
            .map_or(0, |known| known.streams)
    }

    /// The number of events like this one.
    pub fn count(&self, is: impl Fn(&Event) -> bool) -> usize {
        self.events.iter().filter(|(_, event)| is(event)).count()
    }

    /// The number of successful registrations.
    pub fn registrations(&self, name: &str) -> usize {
        self.count(|event| matches!(event, Event::Registered { resource, .. } if resource == name))
    }
}

type Shared = thread::Shared<State>;

impl Shared {
    fn log(&self, event: Event) {
        self.change(|state| state.events.push((Instant::now(), event)));
    }
}

/// A kubelet. Dropping it is as `kill -9`: its sockets stay.
#[derive(Debug)]
pub struct FakeKubelet {
    shared: Shared,
    runtime: tokio::runtime::Handle,
    _thread: Thread,
}

impl FakeKubelet {
    /// Starts a kubelet with this directory, as `/var/lib/kubelet`.
    pub fn start(dir: &Path) -> Self {
        Self::start_with(dir, State::default())
    }

    /// Starts a kubelet that behaves as the state demands.
    pub fn start_with(dir: &Path, state: State) -> Self {
        let shared = Shared::default();
        *shared.lock() = state;
        let (dir, served) = (dir.to_owned(), shared.clone());
        let (_thread, runtime) = Thread::serve(async move || serve(&dir, &served));
        Self {
            shared,
            runtime,
            _thread,
        }
    }

    /// The state at this moment. It does not change until the guard is dropped.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }

    /// Waits until the state is so, and returns how long that took.
    #[track_caller]
    pub fn wait(&self, what: &str, most: Duration, is: impl Fn(&State) -> bool) -> Duration {
        self.shared.wait(what, most, is)
    }

    /// Waits until the condition of [`FakeKubelet::wait`] holds, and checks that it is not violated for some time.
    #[track_caller]
    pub fn stays(&self, what: &str, time: Duration, is: impl Fn(&State) -> bool) {
        let start = Instant::now();
        while start.elapsed() < time {
            let state = self.state();
            assert!(is(&state), "{what}: {:#?}", *state);
            drop(state);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Closes the connection to the plugin of a resource.
    pub fn cut(&self, resource: &str) {
        let client = self.client(resource);
        client.cut.notify_one();
    }

    /// Asks the plugin for devices, one request for each container.
    pub fn allocate(
        &self,
        resource: &str,
        containers: &[&[String]],
    ) -> Result<proto::AllocateResponse, Status> {
        let request = |ids: &&[String]| proto::ContainerAllocateRequest {
            devices_ids: ids.to_vec(),
        };
        let container_requests = containers.iter().map(request).collect();
        let mut plugin = self.client(resource).plugin;
        let call = async move {
            plugin
                .allocate(proto::AllocateRequest { container_requests })
                .await
        };
        self.block_on(call).map(Response::into_inner)
    }

    /// Asks the plugin which devices are best, one request for each container: available, required, number.
    pub fn prefer(
        &self,
        resource: &str,
        containers: &[(&[String], &[String], i32)],
    ) -> Result<Vec<Vec<String>>, Status> {
        let request = |(available, required, size): &(&[String], &[String], i32)| {
            proto::ContainerPreferredAllocationRequest {
                available_device_i_ds: available.to_vec(),
                must_include_device_i_ds: required.to_vec(),
                allocation_size: *size,
            }
        };
        let request = proto::PreferredAllocationRequest {
            container_requests: containers.iter().map(request).collect(),
        };
        let mut plugin = self.client(resource).plugin;
        let answer =
            self.block_on(async move { plugin.get_preferred_allocation(request).await })?;
        Ok(answer
            .into_inner()
            .container_responses
            .into_iter()
            .map(|container| container.device_i_ds)
            .collect())
    }

    /// Asks the plugin to prepare a container.
    pub fn pre_start(&self, resource: &str, ids: &[String]) -> Result<(), Status> {
        let request = proto::PreStartContainerRequest {
            devices_ids: ids.to_vec(),
        };
        let mut plugin = self.client(resource).plugin;
        self.block_on(async move { plugin.pre_start_container(request).await })
            .map(drop)
    }

    fn client(&self, resource: &str) -> Client {
        let state = self.state();
        let client = state
            .resources
            .get(resource)
            .and_then(|known| known.client.clone());
        client.unwrap_or_else(|| panic!("{resource} is not registered"))
    }

    fn block_on<T: Send + 'static>(&self, call: impl Future<Output = T> + Send + 'static) -> T {
        let (sender, receiver) = std::sync::mpsc::channel();
        self.runtime.spawn(async move { sender.send(call.await) });
        receiver.recv().unwrap()
    }
}

fn serve(dir: &Path, shared: &Shared) {
    let plugins = dir.join("device-plugins");
    fs::create_dir_all(&plugins).unwrap();
    for file in fs::read_dir(&plugins).unwrap().flatten() {
        if file.file_name() != "kubelet_internal_checkpoint" && !file.file_type().unwrap().is_dir()
        {
            let _ = fs::remove_file(file.path());
        }
    }
    let listener = UnixListener::bind(plugins.join("kubelet.sock")).unwrap();
    let service = RegistrationServer::new(DeviceManager {
        dir: plugins,
        shared: shared.clone(),
    });
    spawn_server(Server::builder().add_service(service), listener);

    let pod_resources = dir.join("pod-resources");
    fs::create_dir_all(&pod_resources).unwrap();
    let _ = fs::remove_file(pod_resources.join("kubelet.sock"));
    let listener = UnixListener::bind(pod_resources.join("kubelet.sock")).unwrap();
    spawn_server(
        Server::builder().add_service(PodResourcesListerServer::new(PodResources(shared.clone()))),
        listener,
    );
}

/// Serves a socket.
pub fn spawn_server(server: tonic::transport::server::Router, listener: UnixListener) {
    tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
}

/// Connects to a server at a socket.
pub async fn dial(path: PathBuf) -> Result<Channel, tonic::transport::Error> {
    let connect = move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    };
    Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(connect))
        .await
}

struct DeviceManager {
    dir: PathBuf,
    shared: Shared,
}

#[tonic::async_trait]
impl Registration for DeviceManager {
    async fn register(
        &self,
        request: Request<proto::RegisterRequest>,
    ) -> Result<Response<proto::Empty>, Status> {
        let request = request.into_inner();
        let resource = request.resource_name.clone();
        let delay = self.shared.lock().delay;
        self.shared.log(Event::Called {
            resource: resource.clone(),
        });
        let manager = Self {
            dir: self.dir.clone(),
            shared: self.shared.clone(),
        };
        let execute = async move {
            tokio::time::sleep(delay).await;
            manager.try_register(request).await
        };
        // Go executes a call to its end.
        let result = tokio::spawn(execute).await.unwrap();
        match &result {
            Ok(endpoint) => self.shared.log(Event::Registered {
                resource,
                endpoint: endpoint.clone(),
            }),
            Err(error) => self.shared.log(Event::Refused {
                resource,
                error: error.message().to_owned(),
            }),
        }
        result.map(|_| Response::new(proto::Empty {}))
    }
}

impl DeviceManager {
    async fn try_register(&self, request: proto::RegisterRequest) -> Result<String, Status> {
        if self.shared.lock().hangs {
            std::future::pending::<()>().await;
        }
        let refuses = self.shared.change(|state| {
            let refuses = state.refuses > 0;
            state.refuses = state.refuses.saturating_sub(1);
            refuses
        });
        if refuses {
            return Err(Status::unavailable("the test refuses"));
        }
        if request.version != "v1beta1" {
            return Err(Status::invalid_argument(format!(
                "unsupported API version {:?}",
                request.version
            )));
        }
        let (resource, endpoint) = (request.resource_name, request.endpoint);
        let connect = async {
            let mut plugin = DevicePluginClient::new(dial(self.dir.join(&endpoint)).await?);
            let options = plugin
                .get_device_plugin_options(proto::Empty {})
                .await?
                .into_inner();
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>((plugin, options))
        };
        let (plugin, _) = match tokio::time::timeout(Duration::from_secs(10), connect).await {
            Ok(Ok(connected)) => connected,
            Ok(Err(error)) => {
                return Err(Status::unknown(format!(
                    "failed to dial device plugin: {error}"
                )));
            }
            Err(_) => {
                return Err(Status::unknown(
                    "failed to dial device plugin: context deadline exceeded",
                ));
            }
        };
        let client = Client {
            plugin,
            cut: Arc::new(Notify::new()),
        };
        self.shared.change(|state| {
            let known = state.resources.entry(resource.clone()).or_default();
            known.endpoint.clone_from(&endpoint);
            known.client = Some(client.clone());
        });
        tokio::spawn(run_client(self.shared.clone(), resource, client));
        Ok(endpoint)
    }
}

async fn run_client(shared: Shared, resource: String, mut client: Client) {
    let stream = client.plugin.list_and_watch(proto::Empty {}).await;
    if let Ok(stream) = stream {
        let mut stream = stream.into_inner();
        shared.change(|state| state.resources.entry(resource.clone()).or_default().streams += 1);
        loop {
            let message = tokio::select! {
                message = stream.message() => message,
                () = client.cut.notified() => break,
            };
            let Ok(Some(list)) = message else { break };
            let healthy = |device: proto::Device| (device.id, device.health == "Healthy");
            let devices: BTreeMap<_, _> = list.devices.into_iter().map(healthy).collect();
            shared.change(|state| {
                state.resources.entry(resource.clone()).or_default().devices = devices.clone()
            });
            shared.log(Event::List {
                resource: resource.clone(),
                devices,
            });
        }
        shared.change(|state| state.resources.entry(resource.clone()).or_default().streams -= 1);
    }
    // Whichever client is the current one, as the kubelet does.
    let current = shared.change(|state| {
        let known = state.resources.entry(resource.clone()).or_default();
        known
            .devices
            .values_mut()
            .for_each(|healthy| *healthy = false);
        known.client.take()
    });
    if let Some(current) = current {
        current.cut.notify_one();
    }
    shared.log(Event::Ended { resource });
}

struct PodResources(Shared);

#[tonic::async_trait]
impl PodResourcesLister for PodResources {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        if self.0.lock().pods_hang {
            std::future::pending::<()>().await;
        }
        let pod = |container: &Container| {
            // One entry for each NUMA node, as the kubelet has it.
            let entry = |id: &String| ContainerDevices {
                resource_name: container.resource.to_owned(),
                device_ids: vec![id.clone()],
            };
            let devices = container.ids.iter().map(entry).collect();
            let sidecar = ContainerResources {
                name: "sidecar".to_owned(),
                ..ContainerResources::default()
            };
            let main = ContainerResources {
                name: container.name.to_owned(),
                devices,
                ..ContainerResources::default()
            };
            let containers = vec![sidecar, main];
            Pod {
                name: container.pod.to_owned(),
                namespace: container.namespace.to_owned(),
                containers,
            }
        };
        let with_claims = |container: &Container| {
            // One entry for each device of the claim, as the kubelet has it.
            let claim = |id: &String| ClaimResource {
                cdi_devices: vec![CdiDevice { name: id.clone() }],
                driver_name: container.resource.to_owned(),
            };
            let dynamic_resources = vec![DynamicResource {
                claim_resources: container.ids.iter().map(claim).collect(),
            }];
            let name = container.name.to_owned();
            let containers = vec![ContainerResources {
                name,
                dynamic_resources,
                ..ContainerResources::default()
            }];
            Pod {
                name: container.pod.to_owned(),
                namespace: container.namespace.to_owned(),
                containers,
            }
        };
        let state = self.0.lock();
        let pod_resources = state
            .containers
            .iter()
            .map(pod)
            .chain(state.claims.iter().map(with_claims))
            .collect();
        drop(state);
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        let state = self.0.lock();
        let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (name, known) in &state.resources {
            let healthy = known.devices.iter().filter(|(_, healthy)| **healthy);
            found
                .entry(name.clone())
                .or_default()
                .extend(healthy.map(|(id, _)| id.clone()));
        }
        for (name, ids) in &state.more_devices {
            found
                .entry(name.clone())
                .or_default()
                .extend(ids.iter().cloned());
        }
        // One entry for each device, as the kubelet has it.
        let entry = |name: &String, id: String| ContainerDevices {
            resource_name: name.clone(),
            device_ids: vec![id],
        };
        let devices = found
            .iter()
            .flat_map(|(name, ids)| ids.iter().map(move |id| entry(name, id.clone())))
            .collect();
        Ok(Response::new(AllocatableResourcesResponse { devices }))
    }
}
