//! The connections of a socket: a limited number is open. At the limit, the oldest one without a stream is closed, and gRPC clients
//! connect again. The kubelet has one connection with the stream of its list, and few others.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};

use rustix::net::Shutdown;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::Request;
use tonic::transport::server::Connected;

/// How many connections of a socket are open at the same time.
pub(crate) const MAX_CONNECTIONS: usize = 64;

/// An accepted connection.
#[derive(Debug)]
pub(crate) struct Peer {
    stream: Arc<UnixStream>,
    info: PeerInfo,
}

/// What the requests of a connection know about it.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerInfo {
    has_stream: Arc<AtomicBool>,
}

impl PeerInfo {
    /// Records that the connection of this request has a stream, for which it stays open.
    pub(crate) fn keep<T>(request: &Request<T>) {
        if let Some(info) = request.extensions().get::<Self>() {
            info.has_stream.store(true, Ordering::Relaxed);
        }
    }
}

/// The open connections of a socket, the oldest one first.
#[derive(Debug, Default)]
pub(super) struct Peers {
    open: VecDeque<(Weak<UnixStream>, PeerInfo)>,
}

impl Peers {
    /// Adds a connection. Returns `None` if the number of connections with streams is at the limit.
    pub(super) fn admit(&mut self, stream: UnixStream) -> Option<Peer> {
        self.open.retain(|(peer, _)| peer.strong_count() > 0);
        if self.open.len() >= MAX_CONNECTIONS && !self.close_one() {
            return None;
        }
        let stream = Arc::new(stream);
        let info = PeerInfo::default();
        self.open.push_back((Arc::downgrade(&stream), info.clone()));
        Some(Peer { stream, info })
    }

    /// Closes the oldest connection without a stream. Reports whether there was one.
    fn close_one(&mut self) -> bool {
        let is_idle = |(_, info): &(_, PeerInfo)| !info.has_stream.load(Ordering::Relaxed);
        let Some(number) = self.open.iter().position(is_idle) else {
            return false;
        };
        if let Some((peer, _)) = self.open.remove(number)
            && let Some(stream) = peer.upgrade()
        {
            // The server reads the end of the stream, and drops the connection.
            rustix::net::shutdown(&stream, Shutdown::Both).ok();
        }
        true
    }
}

impl AsyncRead for Peer {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            match self.stream.try_read(buf.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => {
                    buf.advance(result?);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for Peer {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(buf)])
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(rustix::net::shutdown(&self.stream, Shutdown::Write)?))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream.poll_write_ready(cx))?;
            match self.stream.try_write_vectored(bufs) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}

impl Connected for Peer {
    type ConnectInfo = PeerInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.info.clone()
    }
}
