//! Reports the health of the devices to the kubelet, which shows it in the status of pods.

use std::pin::Pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use findings::catalog;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::pool::Pool;
use crate::model::Refusal;
use crate::proto::health::{v1, v1alpha1};
use v1alpha1::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest,
    NodeWatchResourcesResponse,
};

/// How often the health is repeated. After [`PATIENCE`] without a report the kubelet shows it as unknown.
const PERIOD: Duration = Duration::from_secs(10);
/// How long the kubelet waits for the next report, in seconds.
const PATIENCE: i64 = 30;

type Reports = Pin<Box<dyn Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send>>;

/// The health of the devices.
#[derive(Clone, Debug)]
pub(super) struct HealthService {
    pub(super) pool: watch::Receiver<Pool>,
    pub(super) node: watch::Receiver<String>,
    /// The reports end when it becomes true
    pub(super) stopping: watch::Receiver<bool>,
}

impl HealthService {
    fn reports(&self) -> Reports {
        // One report waits at most: the kubelet needs only the newest.
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(send(self.clone(), sender));
        Box::pin(ReceiverStream::new(receiver))
    }
}

/// Serves versions of the interface, which have the same messages.
macro_rules! serve_versions {
    ($($version:ident)*) => {$(
        #[tonic::async_trait]
        impl $version::dra_resource_health_server::DraResourceHealth for HealthService {
            type NodeWatchResourcesStream = Reports;

            async fn node_watch_resources(
                &self,
                _: Request<NodeWatchResourcesRequest>,
            ) -> Result<Response<Reports>, Status> {
                Ok(Response::new(self.reports()))
            }
        }
    )*};
}

serve_versions! { v1alpha1 v1 }

async fn send(
    service: HealthService,
    sender: mpsc::Sender<Result<NodeWatchResourcesResponse, Status>>,
) {
    let HealthService {
        mut pool,
        mut node,
        mut stopping,
    } = service;
    loop {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        // The pool has the name of the node, which is known as soon as the API server has answered.
        let report = report(&pool.borrow_and_update(), &node.borrow_and_update(), now);
        if sender.send(Ok(report)).await.is_err() {
            return;
        }
        tokio::select! {
            () = sender.closed() => return,
            _ = stopping.wait_for(|is_stopping| *is_stopping) => return,
            changed = timeout(PERIOD, pool.changed()) => if matches!(changed, Ok(Err(_))) { return },
            changed = node.changed() => if changed.is_err() { return },
        }
    }
}

/// Returns the report of this second since 1970.
fn report(pool: &Pool, node: &str, now: u64) -> NodeWatchResourcesResponse {
    let device = |device: &super::devices::ClaimDevice| {
        let health = if device.unhealthy.is_some() {
            HealthStatus::Unhealthy
        } else {
            HealthStatus::Healthy
        };
        let message = |why: &String| {
            Refusal::new(&format!(
                "{why} ({})",
                catalog::PLUGIN_UNHEALTHY_DEVICE.id()
            ))
            .to_string()
        };
        DeviceHealth {
            device: Some(DeviceIdentifier {
                pool_name: node.to_owned(),
                device_name: device.name.clone(),
            }),
            health: health.into(),
            last_updated_time: i64::try_from(now).unwrap_or_default(),
            health_check_timeout_seconds: PATIENCE,
            message: device.unhealthy.as_ref().map(message).unwrap_or_default(),
        }
    };
    let devices = pool
        .devices
        .iter()
        .filter(|_| !node.is_empty())
        .map(device)
        .collect();
    NodeWatchResourcesResponse { devices }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio_stream::StreamExt;

    use super::*;
    use crate::dra::slice::tests::device;

    fn pool(why: Option<&str>) -> Pool {
        Pool {
            is_ready: true,
            devices: Arc::new(vec![device("gpu-0", why)]),
            ..Pool::default()
        }
    }

    #[test]
    fn an_unhealthy_device_has_its_reason_and_the_number() {
        let found = report(&pool(Some("XID 79")), "node-1", 7).devices.remove(0);
        let place = DeviceIdentifier {
            pool_name: "node-1".into(),
            device_name: "gpu-0".into(),
        };
        assert_eq!(
            (found.device.clone(), found.health()),
            (Some(place), HealthStatus::Unhealthy)
        );
        assert_eq!(
            (found.message.as_str(), found.last_updated_time),
            ("XID 79 (ONH-072)", 7)
        );
        let long = report(&pool(Some(&"x".repeat(5000))), "node-1", 7)
            .devices
            .remove(0);
        assert!(long.message.len() <= 1024);
    }

    #[tokio::test]
    async fn each_change_is_reported() {
        let (sender, receiver) = watch::channel(pool(None));
        let (_node, node) = watch::channel("node-1".to_owned());
        let (stop, stopping) = watch::channel(false);
        let mut reports = HealthService {
            pool: receiver,
            node,
            stopping,
        }
        .reports();
        let mut next = async || {
            reports
                .next()
                .await
                .unwrap()
                .unwrap()
                .devices
                .remove(0)
                .health()
        };
        assert_eq!(next().await, HealthStatus::Healthy);
        sender.send_replace(pool(Some("XID 79")));
        assert_eq!(next().await, HealthStatus::Unhealthy);
        stop.send_replace(true);
        assert!(reports.next().await.is_none());
    }
}
