//! Answers HTTP requests for `/metrics` and `/healthz`.
//!
//! A client can be anything that reaches the address. Requests and connections have limits in size and time. At the limit for
//! connections, the oldest one without a request is closed. So slow clients do not keep a new one out, and a flood of connections does not
//! close one that waits for its answer.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use base::report::line;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT_ENCODING, ALLOW, CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::metrics::histogram::Histogram;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, watch};
use tokio::task::{AbortHandle, JoinSet, yield_now};
use tokio::time::{sleep, timeout};

use super::dcgm;
use super::readings::Readings;
use super::series::{MetricSources, Series, series};
use super::text;
use crate::kubelet::Status;
use crate::kubelet::pods::{self, PodContainer};
use crate::node::Offer;
use crate::settings::values::MetricsNames;

/// How many clients are served at the same time.
const MAX_CONNECTIONS: usize = 16;
/// The limit for a request without its body in bytes.
const MAX_HEADER: usize = 8 << 10;
/// How long a client may take to send its request.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a connection lasts at most.
const MAX_TIME: Duration = Duration::from_secs(15);
/// How long an answer of the kubelet is used.
const CACHED: Duration = Duration::from_secs(1);
/// The time before the next attempt if the address cannot be used.
const RETRY: Duration = Duration::from_secs(10);
/// The time before the next attempt if no connection can be accepted.
const PAUSE: Duration = Duration::from_secs(1);

/// What the metrics are made from.
#[derive(Debug)]
pub struct Sources {
    /// The GPUs and the resources
    pub offer: watch::Receiver<Offer>,
    /// The values
    pub readings: watch::Receiver<Readings>,
    /// The registrations
    pub status: watch::Receiver<Status>,
    /// The times of Allocate
    pub latency: Histogram,
    /// The kubelet's socket for pod resources
    pub pod_resources: PathBuf,
    /// Whose names the metrics of GPUs have
    pub names: Vec<MetricsNames>,
    /// The name of the node
    pub node: String,
    /// The XIDs that do not affect the health
    pub ignored_xids: Vec<u32>,
}

/// Serves until the future is dropped. `note` logs a line.
pub async fn serve(address: SocketAddr, sources: Sources, note: impl Fn(&str)) -> Infallible {
    let listener = listen(address, &note).await;
    let server = Arc::new(Server {
        sources,
        containers: Mutex::default(),
    });
    let mut tasks = JoinSet::new();
    let mut open: VecDeque<Client> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) if is_of_peer(&error) => continue,
            Err(error) => {
                note(&format!(
                    "cannot accept a connection for metrics: {}",
                    line(&error.into())
                ));
                sleep(PAUSE).await;
                continue;
            }
        };
        while tasks.try_join_next().is_some() {}
        open.retain(|client| !client.task.is_finished());
        if open.len() >= MAX_CONNECTIONS {
            close_one(&mut open);
            // A burst of connections is accepted in one poll. The earlier ones must be able to read their requests.
            yield_now().await;
        }
        let has_asked = Arc::new(AtomicBool::new(false));
        let answer = answer(stream, Arc::clone(&server), Arc::clone(&has_asked));
        open.push_back(Client {
            task: tasks.spawn(answer),
            has_asked,
        });
    }
}

/// An open connection.
struct Client {
    task: AbortHandle,
    /// Whether it has sent a request
    has_asked: Arc<AtomicBool>,
}

/// Closes the oldest connection that has sent no request, or the oldest one if all have.
fn close_one(open: &mut VecDeque<Client>) {
    let has_asked = |client: &Client| client.has_asked.load(Ordering::Relaxed);
    let silent = open.iter().position(|client| !has_asked(client));
    if let Some(client) = open.remove(silent.unwrap_or(0)) {
        client.task.abort();
    }
}

async fn listen(address: SocketAddr, note: &impl Fn(&str)) -> TcpListener {
    let mut last = String::new();
    loop {
        let error = match bind(address).await {
            Ok(listener) => {
                let address = listener.local_addr().unwrap_or(address);
                note(&format!("serving metrics at http://{address}/metrics"));
                return listener;
            }
            Err(error) => format!("cannot serve metrics at {address}: {}", line(&error.into())),
        };
        if error != last {
            note(&error);
            last = error;
        }
        sleep(RETRY).await;
    }
}

async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        // `[::]` accepts IPv4 too, unless net.ipv6.bindv6only is set (ipv6(7)). Without IPv6 in the kernel, it is EAFNOSUPPORT.
        Err(_) if address.is_ipv6() && address.ip().is_unspecified() => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        result => result,
    }
}

/// Whether the client closed the connection before it was accepted, which accept(2) reports as ECONNABORTED.
fn is_of_peer(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
    )
}

async fn answer(stream: TcpStream, server: Arc<Server>, has_asked: Arc<AtomicBool>) {
    let service = service_fn(|request: Request<Incoming>| {
        has_asked.store(true, Ordering::Relaxed);
        let server = Arc::clone(&server);
        async move { Ok::<_, Infallible>(server.respond(&request).await) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_header_size(MAX_HEADER)
        .max_buf_size(MAX_HEADER);
    // A connection for each request: a client that keeps one open would use up the limit.
    let connection = http
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    // The client made the error, or took too long.
    timeout(MAX_TIME, connection).await.ok();
}

#[derive(Debug)]
struct Server {
    sources: Sources,
    /// The last answer of the kubelet. The lock is held while the kubelet is asked, so that it is asked once.
    containers: Mutex<Option<(Instant, Option<Vec<PodContainer>>)>>,
}

impl Server {
    async fn respond(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let (method, path) = (request.method(), request.uri().path());
        if !matches!(path, "/metrics" | "/healthz") {
            return plain(StatusCode::NOT_FOUND, "not found\n");
        }
        if !matches!(*method, Method::GET | Method::HEAD) {
            let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
            response
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return response;
        }
        if path == "/healthz" {
            return plain(StatusCode::OK, "ok\n");
        }
        let containers = self.containers().await;
        let Ok(text) = text::text(self.series(containers), self.sources.latency.clone()) else {
            return plain(
                StatusCode::INTERNAL_SERVER_ERROR,
                "cannot write the metrics\n",
            );
        };
        let encodings = request.headers().get(ACCEPT_ENCODING);
        let encodings = encodings.and_then(|value| value.to_str().ok());
        if text::accepts_gzip(encodings.unwrap_or_default())
            && let Ok(compressed) = text::gzip(&text)
        {
            let mut response = response(StatusCode::OK, text::CONTENT_TYPE, compressed);
            let gzip = HeaderValue::from_static("gzip");
            response.headers_mut().insert(CONTENT_ENCODING, gzip);
            return response;
        }
        response(StatusCode::OK, text::CONTENT_TYPE, text)
    }

    async fn containers(&self) -> Option<Vec<PodContainer>> {
        let mut last = self.containers.lock().await;
        if let Some((_, containers)) = last.as_ref().filter(|(at, _)| at.elapsed() < CACHED) {
            return containers.clone();
        }
        let resources = Arc::clone(&self.sources.offer.borrow().resources);
        let names: Vec<String> = resources.iter().map(|found| found.name.clone()).collect();
        let containers = pods::list(&self.sources.pod_resources, &names).await;
        *last = Some((Instant::now(), containers.clone()));
        containers
    }

    fn series(&self, containers: Option<Vec<PodContainer>>) -> Series {
        let Sources {
            offer,
            readings,
            status,
            names,
            node,
            ignored_xids,
            ..
        } = &self.sources;
        let facts = MetricSources {
            offer: offer.borrow().clone(),
            readings: readings.borrow().clone(),
            containers: containers.unwrap_or_default(),
            status: status.borrow().clone(),
            names: names.clone(),
            node: node.clone(),
            ignored_xids: ignored_xids.clone(),
        };
        let mut all = series(&facts);
        if names.iter().any(|names| names.are_dcgm()) {
            dcgm::extend(&facts, &mut all);
        }
        all
    }
}

fn plain(status: StatusCode, body: &'static str) -> Response<Full<Bytes>> {
    response(status, "text/plain; charset=utf-8", body)
}

fn response(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;
    use tokio::sync::mpsc;

    /// Serves metrics, with a kubelet that accepts connections and does not answer. Returns the address.
    async fn start(dir: &std::path::Path) -> SocketAddr {
        let kubelet = dir.join("kubelet.sock");
        let silent = UnixListener::bind(&kubelet).unwrap();
        tokio::spawn(async move {
            let mut held = Vec::new();
            while let Ok((stream, _)) = silent.accept().await {
                held.push(stream);
            }
        });
        let sources = Sources {
            offer: watch::channel(Offer::default()).1,
            readings: watch::channel(Readings::default()).1,
            status: watch::channel(Status::default()).1,
            latency: text::latency(),
            pod_resources: kubelet,
            names: Vec::new(),
            node: "node".to_owned(),
            ignored_xids: Vec::new(),
        };
        let (sender, mut lines) = mpsc::unbounded_channel();
        let note = move |line: &str| drop(sender.send(line.to_owned()));
        tokio::spawn(serve(([127, 0, 0, 1], 0).into(), sources, note));
        let line = lines.recv().await.unwrap();
        let address = line.trim_start_matches("serving metrics at http://");
        address.trim_end_matches("/metrics").parse().unwrap()
    }

    async fn connect(address: SocketAddr, request: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request).await.ok();
        stream
    }

    async fn answer_to(mut stream: TcpStream) -> String {
        let mut text = String::new();
        let read = timeout(MAX_TIME, stream.read_to_string(&mut text)).await;
        read.expect("an answer in time").ok();
        text
    }

    const SCRAPE: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n";

    #[tokio::test]
    async fn a_client_that_accepts_gzip_gets_less() {
        let dir = tempfile::tempdir().unwrap();
        let address = start(dir.path()).await;
        let answer = async |path: &str, encodings: &str| {
            let request = format!(
                "GET {path} HTTP/1.1\r\nHost: node\r\nAccept-Encoding: {encodings}\r\n\r\n"
            );
            let mut stream = connect(address, request.as_bytes()).await;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.unwrap();
            let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
            let body = answer.split_off(end.unwrap() + 4);
            (String::from_utf8(answer).unwrap(), body)
        };
        let (headers, plain) = answer("/metrics", "gzip;q=0").await;
        assert!(plain.starts_with(b"# HELP ") && !headers.contains("content-encoding"));
        let (headers, compressed) = answer("/metrics", "deflate, gzip").await;
        assert!(headers.contains("content-encoding: gzip\r\n"), "{headers}");
        assert!(compressed.len() < plain.len() / 2);
        let mut text = Vec::new();
        let mut decoder = flate2::read::GzDecoder::new(&*compressed);
        std::io::Read::read_to_end(&mut decoder, &mut text).unwrap();
        assert!(text.starts_with(b"# HELP "));
    }

    /// A user of the node opens connections while Prometheus waits for the kubelet.
    #[tokio::test]
    async fn a_flood_of_connections_does_not_close_one_that_waits() {
        let dir = tempfile::tempdir().unwrap();
        let address = start(dir.path()).await;
        let scrape = connect(address, SCRAPE).await;
        let mut flood = Vec::new();
        for number in 0..40 * MAX_CONNECTIONS {
            let request: &[u8] = if number % 2 == 0 { b"" } else { b"GET /metr" };
            flood.push(connect(address, request).await);
        }
        assert!(answer_to(scrape).await.starts_with("HTTP/1.1 200 OK\r\n"));
        let health = connect(address, b"GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n").await;
        assert!(answer_to(health).await.ends_with("ok\n"), "after the flood");
    }

    #[tokio::test]
    async fn requests_without_an_end() {
        let dir = tempfile::tempdir().unwrap();
        let address = start(dir.path()).await;
        let header = b"X-Flood: 0123456789\r\n".repeat(100_000);
        for (request, status) in [
            (
                [b"GET /", "a".repeat(1 << 20).as_bytes()].concat(),
                "HTTP/1.1 4",
            ),
            (
                [b"GET /metrics HTTP/1.1\r\n", header.as_slice()].concat(),
                "HTTP/1.1 431",
            ),
            (vec![0xff; 1 << 20], "HTTP/1.1 400"),
            (
                b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n".to_vec(),
                "HTTP/1.1 405",
            ),
        ] {
            let answer = answer_to(connect(address, &request).await).await;
            // The kernel discards the answer if the client still sends.
            assert!(answer.is_empty() || answer.starts_with(status), "{answer}");
        }
        let health = connect(address, b"GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n").await;
        assert!(answer_to(health).await.ends_with("ok\n"));
    }
}
