//! The gRPC service for one resource.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::streams::{Open, StreamState, Streams};
use crate::log::Log;
use crate::model::{Allocator, Refusal, Resource, ResourceDevice};
use crate::proto;
use crate::proto::device_plugin_server::DevicePlugin;

/// The current list of all resources.
pub type Resources = watch::Receiver<Arc<Vec<Resource>>>;

/// Returns what the plugin supports.
#[must_use]
pub(super) fn options() -> proto::DevicePluginOptions {
    proto::DevicePluginOptions {
        pre_start_required: false,
        get_preferred_allocation_available: true,
    }
}

/// The service for one resource.
pub(super) struct Service {
    /// The name of the resource
    pub(super) resource: String,
    /// The lists of devices
    pub(super) resources: Resources,
    /// Answers questions about devices
    pub(super) allocator: Arc<dyn Allocator>,
    /// The streams of this resource
    pub(super) streams: Streams,
}

type Lists = Pin<Box<dyn Stream<Item = Result<proto::ListAndWatchResponse, Status>> + Send>>;

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = Lists;

    async fn get_device_plugin_options(
        &self,
        _: Request<proto::Empty>,
    ) -> Result<Response<proto::DevicePluginOptions>, Status> {
        Ok(Response::new(options()))
    }

    async fn list_and_watch(&self, _: Request<proto::Empty>) -> Result<Response<Lists>, Status> {
        // One list waits at most: the kubelet needs only the newest.
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(send_lists(
            self.resource.clone(),
            self.resources.clone(),
            self.streams.watch(),
            self.streams.open(),
            sender,
        ));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<proto::PreferredAllocationRequest>,
    ) -> Result<Response<proto::PreferredAllocationResponse>, Status> {
        let containers = request.into_inner().container_requests;
        let container_responses = containers
            .iter()
            .map(|container| self.prefer(container))
            .collect();
        Ok(Response::new(proto::PreferredAllocationResponse {
            container_responses,
        }))
    }

    async fn allocate(
        &self,
        request: Request<proto::AllocateRequest>,
    ) -> Result<Response<proto::AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests;
        Log::new().debug(|| {
            format!(
                "the kubelet requests {:?} of {:?}",
                ids_of(&containers),
                self.resource
            )
        });
        let answers = containers
            .iter()
            .map(|container| self.allocate_ids(&container.devices_ids));
        let container_responses = answers.collect::<Result<_, _>>().map_err(status)?;
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

fn ids_of(containers: &[proto::ContainerAllocateRequest]) -> Vec<&[String]> {
    containers
        .iter()
        .map(|container| container.devices_ids.as_slice())
        .collect()
}

impl Service {
    fn prefer(
        &self,
        container: &proto::ContainerPreferredAllocationRequest,
    ) -> proto::ContainerPreferredAllocationResponse {
        let size = usize::try_from(container.allocation_size).unwrap_or_default();
        let (available, required) = (
            &container.available_device_i_ds,
            &container.must_include_device_i_ds,
        );
        let device_i_ds = self
            .allocator
            .prefer(&self.resource, available, required, size);
        proto::ContainerPreferredAllocationResponse { device_i_ds }
    }

    fn allocate_ids(&self, ids: &[String]) -> Result<proto::ContainerAllocateResponse, Refusal> {
        if ids.is_empty() {
            return Err(Refusal::new(&format!(
                "cannot allocate \"{}\": the request names no device",
                self.resource
            )));
        }
        self.allocator.allocate(&self.resource, ids)
    }
}

/// The kubelet writes the code and the text into an event of the pod. The code states that a retry does not help.
#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn status(refusal: Refusal) -> Status {
    Status::failed_precondition(refusal.to_string())
}

/// Sends the list of a resource's devices, and again whenever it has changed.
async fn send_lists(
    resource: String,
    mut resources: Resources,
    mut streams: watch::Receiver<StreamState>,
    stream: Open,
    sender: mpsc::Sender<Result<proto::ListAndWatchResponse, Status>>,
) {
    let mut sent: Option<Vec<ResourceDevice>> = None;
    let mut may_change = true;
    loop {
        let state = *streams.borrow_and_update();
        if stream.is_ended(&state) {
            return;
        }
        let all = Arc::clone(&resources.borrow_and_update());
        let devices = all
            .iter()
            .find(|other| other.name == resource)
            .map(|found| &found.devices);
        let unsent = devices.filter(|devices| !state.silent && sent.as_ref() != Some(*devices));
        tokio::select! {
            permit = sender.reserve(), if unsent.is_some() => {
                let (Ok(permit), Some(devices)) = (permit, unsent) else { return };
                permit.send(Ok(proto::ListAndWatchResponse { devices: devices.iter().map(device).collect() }));
                sent = Some(devices.clone());
            }
            () = sender.closed() => return,
            change = streams.changed() => if change.is_err() { return },
            change = resources.changed(), if may_change => may_change = change.is_ok(),
        }
    }
}

fn device(device: &ResourceDevice) -> proto::Device {
    let health = if device.unhealthy.is_none() {
        "Healthy"
    } else {
        "Unhealthy"
    };
    let topology = device.numa_node.map(|id| proto::TopologyInfo {
        nodes: vec![proto::NumaNode { id: id.into() }],
    });
    proto::Device {
        id: device.id.clone(),
        health: health.to_owned(),
        topology,
    }
}
