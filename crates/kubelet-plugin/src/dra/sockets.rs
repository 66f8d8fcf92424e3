//! The sockets for the kubelet: one at which the driver introduces itself, and one with its services.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::Router;

use super::connection::Connection;
use super::service::{self, Introduction};
use super::{DriverOptions, health};
use crate::kubelet::kept::{Keeper, KeptSocket};
use crate::kubelet::listener::{MAX_REQUESTS, accept};
use crate::kubelet::socket::{self, SocketId};
use crate::log::Log;
use crate::proto::dra::{v1, v1beta1};
use crate::proto::health as proto_health;
use crate::proto::pluginregistration::registration_server::RegistrationServer;

/// Returns the socket at which the driver introduces itself.
fn introduction(kubelet_dir: &Path, driver: &str) -> PathBuf {
    socket::plugin_registry(kubelet_dir).join(format!("{driver}-reg.sock"))
}

/// Returns the socket with the services.
pub(super) fn endpoint(kubelet_dir: &Path, driver: &str) -> PathBuf {
    kubelet_dir.join("plugins").join(driver).join("dra.sock")
}

/// Sockets that are served until they are dropped.
#[derive(Debug)]
pub(super) struct Sockets {
    introduction: Served,
    services: Served,
}

/// A socket that is served. The fields are dropped in their order: no connection is accepted any more before the file goes.
#[derive(Debug)]
struct Served {
    accepting: Task,
    stop: oneshot::Sender<()>,
    server: JoinHandle<()>,
    socket: KeptSocket,
}

/// A task that ends with this value.
#[derive(Debug)]
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Sockets {
    /// Creates the sockets, and serves them.
    ///
    /// # Errors
    /// If the kubelet's directory does not exist or is not writable.
    pub(super) fn open(
        options: &DriverOptions,
        service: service::ClaimService,
        health: health::HealthService,
    ) -> Result<Self> {
        let DriverOptions {
            kubelet_dir,
            driver,
            ..
        } = options;
        let endpoint = endpoint(kubelet_dir, driver);
        create_dirs(&socket::plugin_registry(kubelet_dir))?;
        create_dirs(endpoint.parent().unwrap_or(kubelet_dir))?;
        let server = || Server::builder().max_concurrent_streams(MAX_REQUESTS);
        let services = server()
            .add_service(v1::dra_plugin_server::DraPluginServer::new(service.clone()))
            .add_service(v1beta1::dra_plugin_server::DraPluginServer::new(service))
            .add_service(
                proto_health::v1::dra_resource_health_server::DraResourceHealthServer::new(
                    health.clone(),
                ),
            )
            .add_service(
                proto_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer::new(
                    health,
                ),
            );
        // The kubelet calls the services as soon as the driver has introduced itself.
        let services = serve(&options.keeper, &endpoint, services)?;
        let introduces = Introduction {
            driver: driver.clone(),
            endpoint: endpoint.to_string_lossy().into_owned(),
            registered: options.registered.clone(),
        };
        let router = server().add_service(RegistrationServer::new(introduces));
        let path = introduction(kubelet_dir, driver);
        let introduction = serve(&options.keeper, &path, router)?;
        if introduction.socket.is_received {
            // A socket is stored when the kubelet has registered the driver, and the kubelet sees no change.
            options.registered.send_replace(Some(true));
        }
        options.keeper.discard();
        Ok(Self {
            introduction,
            services,
        })
    }

    /// Reports whether the files still exist and are ours.
    pub(super) fn exist(&self) -> bool {
        self.introduction.socket.exists() && self.services.socket.exists()
    }

    /// Returns the directories of the sockets.
    pub(super) fn dirs(&self) -> Vec<PathBuf> {
        let paths = [self.introduction.socket.path(), self.services.socket.path()];
        let mut dirs = Vec::new();
        for path in paths {
            dirs.extend(path.parent().map(Path::to_owned));
        }
        dirs
    }

    /// Returns the identities of the sockets.
    pub(super) fn ids(&self) -> Vec<SocketId> {
        vec![self.introduction.socket.id(), self.services.socket.id()]
    }

    /// The sockets stay open when this process ends, if there is a service manager that keeps them.
    pub(super) fn store(&mut self) {
        let stored = self.services.socket.store();
        let stored = stored.and_then(|()| self.introduction.socket.store());
        if let Err(error) = stored
            && error.kind() != std::io::ErrorKind::Unsupported
        {
            Log::new().note(&format!(
                "cannot keep the sockets of the driver open across restarts: {error}"
            ));
        }
    }

    /// The sockets end with this value.
    pub(super) fn withdraw(&mut self) {
        self.introduction.socket.withdraw();
        self.services.socket.withdraw();
    }

    /// Accepts no connections any more, and waits until all calls are answered. gRPC clients make later calls on new connections, which
    /// wait for the next process.
    pub(super) async fn finish(self) {
        let Self {
            introduction,
            services,
        } = self;
        let _sockets = [introduction.finish().await, services.finish().await];
    }
}

impl Served {
    async fn finish(self) -> KeptSocket {
        drop(self.accepting);
        drop(self.stop);
        // It does not panic.
        let _ = self.server.await;
        self.socket
    }
}

fn create_dirs(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {dir:?}"))
}

fn serve(keeper: &Arc<Keeper>, path: &Path, router: Router) -> Result<Served> {
    let path = socket::checked(path)?;
    let (socket, listener) = KeptSocket::open(keeper, path)?;
    let (connections, incoming) = mpsc::channel::<std::io::Result<Connection>>(1);
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tokio::spawn(async move {
        let stopped = async { drop(stopped.await) };
        // It returns no error: an error of a connection ends that connection.
        let _ = router
            .serve_with_incoming_shutdown(ReceiverStream::new(incoming), stopped)
            .await;
    });
    Ok(Served {
        accepting: Task(tokio::spawn(accept(listener, connections))),
        stop,
        server,
        socket,
    })
}
