//! The gRPC services for the kubelet: claims are prepared, and plugins introduce themselves.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tonic::{Request, Response, Status};

use super::DriverOptions;
use super::access::Access;
use super::pool::Pool;
use super::prepare::{self, ClaimContext};
use crate::kubelet::other_plugins::DRIVER_FOR_CLAIMS;
use crate::log::Log;
use crate::model::Refusal;
use crate::proto::dra::{v1, v1beta1};
use crate::proto::pluginregistration as registration;

/// The services at the driver's socket, the best first: the kubelet uses the first one that it knows. These are not the names of gRPC.
const VERSIONS: [&str; 4] = [
    "v1.DRAPlugin",
    "v1beta1.DRAPlugin",
    "v1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth",
];

/// How long a call waits for the first answer of the driver. The kubelet waits 45 s for the call.
const FIRST_ANSWER: Duration = Duration::from_secs(10);

/// Prepares claims.
#[derive(Clone)]
pub(super) struct ClaimService {
    pub(super) options: DriverOptions,
    pub(super) pool: watch::Receiver<Pool>,
    pub(super) access: Arc<Access>,
    /// The name of the node, which its pool has; empty if it is not known
    pub(super) node: watch::Receiver<String>,
}

impl ClaimService {
    async fn prepare(
        &self,
        request: v1::NodePrepareResourcesRequest,
    ) -> v1::NodePrepareResourcesResponse {
        let mut claims = Vec::new();
        for claim in request.claims {
            let answer = self.prepare_one(&claim).await;
            Log::new().debug(|| format!("the kubelet prepares {:?}: {answer:?}", claim.name));
            claims.push((claim.uid, answer));
        }
        v1::NodePrepareResourcesResponse {
            claims: claims.into_iter().collect(),
        }
    }

    /// A claim that fails does not affect the others.
    async fn prepare_one(&self, asked: &v1::Claim) -> v1::NodePrepareResourceResponse {
        let prepared = match self.access.claim(&asked.namespace, &asked.name).await {
            Ok(claim) => self.prepare_known(&claim, &asked.uid).await,
            Err(refusal) => Err(refusal),
        };
        match prepared {
            Ok(devices) => v1::NodePrepareResourceResponse {
                devices,
                error: String::new(),
            },
            Err(refusal) => {
                Log::new().note(&refusal.to_string());
                v1::NodePrepareResourceResponse {
                    devices: Vec::new(),
                    error: refusal.to_string(),
                }
            }
        }
    }

    /// The kubelet can call before the driver has answered for the first time since the plugin started: its devices are not known then, and
    /// after an error, the kubelet waits a minute.
    async fn prepare_known(
        &self,
        claim: &ResourceClaim,
        uid: &str,
    ) -> Result<Vec<v1::Device>, Refusal> {
        let deadline = Instant::now() + FIRST_ANSWER;
        let mut pool = self.pool.clone();
        loop {
            let is_ready = pool.borrow_and_update().is_ready;
            let prepared = self.prepare_now(claim, uid);
            if is_ready || prepared.is_ok() {
                return prepared;
            }
            if !matches!(timeout_at(deadline, pool.changed()).await, Ok(Ok(()))) {
                return prepared;
            }
        }
    }

    fn prepare_now(&self, claim: &ResourceClaim, uid: &str) -> Result<Vec<v1::Device>, Refusal> {
        let known = ClaimContext {
            driver: &self.options.driver,
            node: &self.node.borrow(),
            pool: &self.pool.borrow(),
            effect: self.options.effect,
        };
        prepare::prepare(claim, uid, &known, self.options.host.as_deref())
    }

    /// Nothing was stored for a claim, so that there is nothing to remove: also for claims that this process has never seen.
    fn unprepare(request: v1::NodeUnprepareResourcesRequest) -> v1::NodeUnprepareResourcesResponse {
        let done = |claim: v1::Claim| (claim.uid, v1::NodeUnprepareResourceResponse::default());
        v1::NodeUnprepareResourcesResponse {
            claims: request.claims.into_iter().map(done).collect(),
        }
    }
}

/// Serves versions of the interface, which have the same messages.
macro_rules! serve_versions {
    ($($version:ident)*) => {$(
        #[tonic::async_trait]
        impl $version::dra_plugin_server::DraPlugin for ClaimService {
            async fn node_prepare_resources(
                &self,
                request: Request<v1::NodePrepareResourcesRequest>,
            ) -> Result<Response<v1::NodePrepareResourcesResponse>, Status> {
                Ok(Response::new(self.prepare(request.into_inner()).await))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<v1::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
                Ok(Response::new(Self::unprepare(request.into_inner())))
            }
        }
    )*};
}

serve_versions! { v1 v1beta1 }

/// Introduces the driver to the kubelet.
#[derive(Clone, Debug)]
pub(super) struct Introduction {
    pub(super) driver: String,
    /// The path of the socket with the services
    pub(super) endpoint: String,
    /// Whether the kubelet has accepted the driver
    pub(super) registered: Arc<watch::Sender<Option<bool>>>,
}

#[tonic::async_trait]
impl registration::registration_server::Registration for Introduction {
    async fn get_info(
        &self,
        _: Request<registration::InfoRequest>,
    ) -> Result<Response<registration::PluginInfo>, Status> {
        Ok(Response::new(registration::PluginInfo {
            r#type: DRIVER_FOR_CLAIMS.to_owned(),
            name: self.driver.clone(),
            endpoint: self.endpoint.clone(),
            supported_versions: VERSIONS.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<registration::RegistrationStatus>,
    ) -> Result<Response<registration::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        let what = match status.plugin_registered {
            true => format!("the kubelet has registered the driver {:?}", self.driver),
            false => format!(
                "the kubelet does not register the driver {:?}: {}",
                self.driver, status.error
            ),
        };
        Log::new().note(&what);
        self.registered.send_replace(Some(status.plugin_registered));
        Ok(Response::new(registration::RegistrationStatusResponse {}))
    }
}
