//! The gRPC server of one resource, whose socket can be created again while its connections continue.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;

use super::server::Service;
use super::socket::{self, Bound};
use super::streams::Streams;
use crate::proto::device_plugin_server::DevicePluginServer;

/// Requests of one connection that are handled at the same time. The kubelet has a stream and one call for each starting pod.
pub(crate) const MAX_REQUESTS: u32 = 100;

type Accepted = std::io::Result<UnixStream>;

/// The server. It ends its streams and removes its socket when it is dropped.
#[derive(Debug)]
pub(super) struct Listener {
    streams: Streams,
    connections: mpsc::Sender<Accepted>,
    bound: Option<(Bound, JoinHandle<()>)>,
    _stop: oneshot::Sender<()>,
}

impl Listener {
    /// Starts the server, which has no socket yet.
    #[must_use]
    pub(super) fn start(service: Service) -> Self {
        let (connections, incoming) = mpsc::channel(1);
        let (stop, stopped) = oneshot::channel::<()>();
        let streams = service.streams.clone();
        tokio::spawn(async move {
            let mut server = Server::builder().max_concurrent_streams(MAX_REQUESTS);
            let server = server.add_service(DevicePluginServer::new(service));
            let stopped = async { drop(stopped.await) };
            // It returns no error: an error of a connection ends that connection.
            let _ = server
                .serve_with_incoming_shutdown(ReceiverStream::new(incoming), stopped)
                .await;
        });
        Self {
            streams,
            connections,
            bound: None,
            _stop: stop,
        }
    }

    /// Creates the socket, in place of an earlier one.
    ///
    /// # Errors
    /// See [`socket::bind`].
    pub(super) fn bind(&mut self, path: &Path) -> Result<()> {
        self.unbind();
        let (bound, listener) = socket::bind(path)?;
        self.bound = Some((
            bound,
            tokio::spawn(accept(listener, self.connections.clone())),
        ));
        Ok(())
    }

    /// Reports whether the socket's file exists and is ours.
    #[must_use]
    pub(super) fn is_bound(&self) -> bool {
        self.bound.as_ref().is_some_and(|(bound, _)| bound.exists())
    }

    fn unbind(&mut self) {
        if let Some((_, task)) = self.bound.take() {
            task.abort();
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.unbind();
        self.streams.close();
    }
}

/// Accepts connections until the receiver is closed.
pub(crate) async fn accept<T: From<UnixStream>>(
    listener: UnixListener,
    connections: mpsc::Sender<std::io::Result<T>>,
) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if connections.send(Ok(stream.into())).await.is_err() {
                    return;
                }
            }
            // EMFILE or ENFILE, for example. The connection stays in the queue (accept(2)), so that accept fails again at once.
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    }
}
