//! An accepted connection whose requests pass the [`Filter`].

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::{Connected, UdsConnectInfo};

use super::authority::Filter;

/// A connection of the kubelet.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    filter: Filter,
    /// What has passed the filter. It is at most one chunk longer than the longest frame with headers.
    ready: Vec<u8>,
    /// How much of `ready` was read
    read: usize,
}

impl Connection {
    /// What is read from the socket at once, in bytes.
    const CHUNK: usize = 4096;
}

impl From<UnixStream> for Connection {
    /// Filters what this stream receives.
    fn from(stream: UnixStream) -> Self {
        Self {
            stream,
            filter: Filter::default(),
            ready: Vec::new(),
            read: 0,
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while buf.remaining() > 0 {
            let rest = this.ready.get(this.read..).unwrap_or_default();
            if let Some(now) = rest
                .get(..rest.len().min(buf.remaining()))
                .filter(|now| !now.is_empty())
            {
                buf.put_slice(now);
                this.read += now.len();
                return Poll::Ready(Ok(()));
            }
            this.ready.clear();
            this.read = 0;
            let mut bytes = [0; Self::CHUNK];
            let mut chunk = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut chunk))?;
            if chunk.filled().is_empty() {
                break;
            }
            this.filter.feed(chunk.filled(), &mut this.ready);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl Connected for Connection {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}
