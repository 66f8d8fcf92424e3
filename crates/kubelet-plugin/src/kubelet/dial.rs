//! Connects to a gRPC server at a Unix socket.

use std::path::Path;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

/// Connects to the server at this path. The caller sets a deadline.
///
/// # Errors
/// If no server listens there.
pub(crate) async fn dial(path: &Path) -> anyhow::Result<Channel> {
    let path = path.to_owned();
    let connector = service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The connector has the address. This one becomes the `:authority`, in which HTTP/2 servers expect a host (RFC 9113, section 8.3.1).
    Ok(Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await?)
}

/// Returns the text of a server's answer that reports an error.
#[must_use]
pub(super) fn text(status: &Status) -> String {
    if status.message().is_empty() {
        status.code().to_string()
    } else {
        status.message().to_owned()
    }
}
