//! Another device plugin.

use std::path::Path;
use std::pin::Pin;

use kubelet_plugin::proto;
use kubelet_plugin::proto::device_plugin_server::{DevicePlugin, DevicePluginServer};
use kubelet_plugin::proto::registration_client::RegistrationClient;
use tokio::net::UnixListener;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::thread::Thread;

/// A plugin with these devices. Dropping it is as `kill -9`: its socket stays.
#[derive(Debug)]
pub struct FakePlugin {
    _thread: Thread,
}

impl FakePlugin {
    /// Serves a socket in the directory of the plugins, and registers a resource if it is given.
    pub fn start(dir: &Path, socket: &str, ids: &[&str], resource: Option<&str>) -> Self {
        let path = dir.join("device-plugins").join(socket);
        let _ = std::fs::remove_file(&path);
        let service = Service {
            ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        };
        let request = resource.map(|resource| proto::RegisterRequest {
            version: "v1beta1".to_owned(),
            endpoint: socket.to_owned(),
            resource_name: resource.to_owned(),
            options: None,
        });
        let kubelet = dir.join("device-plugins/kubelet.sock");
        let (_thread, _) = Thread::serve(async move || {
            let listener = UnixListener::bind(path).unwrap();
            super::spawn_server(
                Server::builder().add_service(DevicePluginServer::new(service)),
                listener,
            );
            if let Some(request) = request {
                let mut kubelet = RegistrationClient::new(super::dial(kubelet).await.unwrap());
                kubelet.register(request).await.unwrap();
            }
        });
        Self { _thread }
    }
}

struct Service {
    ids: Vec<String>,
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<proto::ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<proto::Empty>,
    ) -> Result<Response<proto::DevicePluginOptions>, Status> {
        Ok(Response::new(proto::DevicePluginOptions::default()))
    }

    async fn list_and_watch(
        &self,
        _: Request<proto::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |id: &String| proto::Device {
            id: id.clone(),
            health: "Healthy".to_owned(),
            topology: None,
        };
        let list = proto::ListAndWatchResponse {
            devices: self.ids.iter().map(device).collect(),
        };
        Ok(Response::new(Box::pin(
            tokio_stream::once(Ok(list)).chain(tokio_stream::pending()),
        )))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<proto::PreferredAllocationRequest>,
    ) -> Result<Response<proto::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }

    async fn allocate(
        &self,
        request: Request<proto::AllocateRequest>,
    ) -> Result<Response<proto::AllocateResponse>, Status> {
        let answer = proto::ContainerAllocateResponse {
            envs: [("PLUGIN".to_owned(), "another".to_owned())].into(),
            ..proto::ContainerAllocateResponse::default()
        };
        let container_responses = vec![answer; request.into_inner().container_requests.len()];
        Ok(Response::new(proto::AllocateResponse {
            container_responses,
        }))
    }

    async fn pre_start_container(
        &self,
        _: Request<proto::PreStartContainerRequest>,
    ) -> Result<Response<proto::PreStartContainerResponse>, Status> {
        Ok(Response::new(proto::PreStartContainerResponse {}))
    }
}
