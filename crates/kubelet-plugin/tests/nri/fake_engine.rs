//! The NRI side of an engine at its socket, for tests: like containerd and CRI-O, it accepts a plugin, waits for its registration,
//! configures and synchronizes it, and asks about containers. Written from NRI's protocol, not with the code of the plugin.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kubelet_plugin::proto::nri::{
    ConfigureRequest, ConfigureResponse, Container, CreateContainerRequest,
    CreateContainerResponse, PodSandbox, RegisterPluginRequest, SynchronizeRequest,
    SynchronizeResponse,
};
use kubelet_plugin::proto::ttrpc::{Request, Response, Status};
use prost::Message;

/// An engine closes the connection of a plugin that needs longer.
const REQUEST_TIME: Duration = Duration::from_secs(2);
/// The buffer of an engine: a larger frame breaks its connection.
const BUFFER: usize = 4096;
const CREATE_CONTAINER: i32 = 8;

/// The socket of an engine.
pub struct FakeEngine {
    path: PathBuf,
    listener: UnixListener,
}

impl FakeEngine {
    /// Like an engine that starts: the socket of the last run is replaced.
    pub fn start(path: &Path) -> Self {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::remove_file(path).ok();
        let listener = UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        Self {
            path: path.to_owned(),
            listener,
        }
    }

    /// Accepts a connection, and does nothing with it.
    pub fn connection(&self, limit: Duration) -> UnixStream {
        let start = Instant::now();
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).unwrap();
                    stream.set_read_timeout(Some(limit)).unwrap();
                    return stream;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock && start.elapsed() < limit => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => panic!("no plugin connects: {error}"),
            }
        }
    }

    /// Accepts a plugin, up to the point where it is asked about containers.
    pub fn accept(&self, limit: Duration) -> Plugin {
        let mut plugin = Plugin::new(self.connection(limit));
        plugin.register();
        plugin.configure();
        plugin.synchronize();
        plugin
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        std::fs::remove_file(&self.path).ok();
    }
}

/// A connected plugin.
pub struct Plugin {
    stream: UnixStream,
    /// What was read and is not complete
    trunk: Vec<u8>,
    /// By number of the connection
    received: BTreeMap<u32, Vec<u8>>,
    next_id: u32,
    pub name: String,
    pub index: String,
}

/// What a plugin sent on a connection.
struct Frame {
    id: u32,
    kind: u8,
    payload: Vec<u8>,
}

impl Plugin {
    pub fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(5 * REQUEST_TIME)).unwrap();
        let (name, index) = (String::new(), String::new());
        Self {
            stream,
            trunk: Vec::new(),
            received: BTreeMap::new(),
            next_id: 1,
            name,
            index,
        }
    }

    /// Engines configure the plugin at the same time as they answer.
    pub fn register(&mut self) {
        let frame = self.read(2).expect("no registration");
        assert_eq!((frame.id % 2, frame.kind), (1, 1), "a request of a client");
        let request = Request::decode(frame.payload.as_slice()).unwrap();
        assert_eq!(request.service, "nri.pkg.api.v1alpha1.Runtime");
        assert_eq!(request.method, "RegisterPlugin");
        let plugin = RegisterPluginRequest::decode(request.payload.as_slice()).unwrap();
        assert!(!plugin.plugin_name.is_empty());
        assert!(
            plugin.plugin_idx.len() == 2
                && plugin.plugin_idx.bytes().all(|byte| byte.is_ascii_digit())
        );
        (self.name, self.index) = (plugin.plugin_name, plugin.plugin_idx);
        self.send(2, frame.id, 2, &Response::default().encode_to_vec());
    }

    pub fn refuse_registration(&mut self, why: &str) {
        let frame = self.read(2).expect("no registration");
        let status = Status {
            code: 2,
            message: why.to_owned(),
        };
        self.send(
            2,
            frame.id,
            2,
            &Response {
                status: Some(status),
                ..Response::default()
            }
            .encode_to_vec(),
        );
    }

    fn configure(&mut self) {
        let request = ConfigureRequest {
            runtime_name: "fake".to_owned(),
            runtime_version: "v1".to_owned(),
        };
        // The timeouts, in fields that the plugin does not know
        let mut request = request.encode_to_vec();
        request.extend([0x20, 0x88, 0x27, 0x28, 0xd0, 0x0f]);
        let answer =
            ConfigureResponse::decode(self.call("Configure", request).unwrap().as_slice()).unwrap();
        assert_eq!(
            answer.events, CREATE_CONTAINER,
            "an engine calls only for these events"
        );
    }

    /// With many containers, engines split the message.
    fn synchronize(&mut self) {
        for more in [true, false] {
            let mut request = SynchronizeRequest { more }.encode_to_vec();
            // A pod and a container
            request.extend([0x0a, 0x02, 0x0a, 0x00, 0x12, 0x02, 0x0a, 0x00]);
            let answer = self.call("Synchronize", request).unwrap();
            let answer = SynchronizeResponse::decode(answer.as_slice()).unwrap();
            assert_eq!(
                answer.more, more,
                "an engine closes the connection otherwise"
            );
        }
    }

    /// Calls a method of the plugin.
    pub fn call(&mut self, method: &str, payload: Vec<u8>) -> Result<Vec<u8>, String> {
        let id = self.send_call(method, payload);
        self.answer(id)
    }

    /// Sends a call. Several ones may be under way.
    pub fn send_call(&mut self, method: &str, payload: Vec<u8>) -> u32 {
        let (service, method) = ("nri.pkg.api.v1alpha1.Plugin".to_owned(), method.to_owned());
        let timeout_nano = 2_000_000_000;
        let id = self.next_id;
        self.next_id += 2;
        self.send(
            1,
            id,
            1,
            &Request {
                service,
                method,
                payload,
                timeout_nano,
            }
            .encode_to_vec(),
        );
        id
    }

    /// Returns the next answer, which must be that to this call.
    pub fn answer(&mut self, id: u32) -> Result<Vec<u8>, String> {
        let start = Instant::now();
        let frame = self.read(1).expect("no answer");
        assert!(start.elapsed() < 5 * REQUEST_TIME);
        assert_eq!((frame.id, frame.kind), (id, 2));
        let response = Response::decode(frame.payload.as_slice()).unwrap();
        match response.status {
            Some(status) if status.code != 0 => Err(status.message),
            _ => Ok(response.payload),
        }
    }

    /// Asks about a container, and returns the names of the CDI devices that it gets.
    pub fn create(&mut self, container: Container) -> Result<Vec<String>, String> {
        let answer = self.call("CreateContainer", request(container))?;
        Ok(names(&answer))
    }

    fn send(&mut self, connection: u32, id: u32, kind: u8, payload: &[u8]) {
        let mut message = Vec::new();
        message.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
        message.extend(id.to_be_bytes());
        message.extend([kind, 0]);
        message.extend(payload);
        for piece in message.chunks(BUFFER) {
            let mut frame = connection.to_be_bytes().to_vec();
            frame.extend(u32::try_from(piece.len()).unwrap().to_be_bytes());
            frame.extend(piece);
            self.send_bytes(&frame);
        }
    }

    pub fn send_bytes(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Whether the plugin closes the connection.
    pub fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        loop {
            match self.stream.read(&mut byte) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == ErrorKind::ConnectionReset,
            }
        }
    }

    /// The next message on a connection; none if the plugin closes the socket.
    fn read(&mut self, connection: u32) -> Option<Frame> {
        loop {
            let received = self.received.entry(connection).or_default();
            if let Some(frame) = take_message(received) {
                return Some(frame);
            }
            let mut buffer = [0; 1000];
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(length) => self.trunk.extend(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("{error}"),
            }
            while let Some((connection, payload)) = take_frame(&mut self.trunk) {
                assert!(
                    payload.len() <= BUFFER,
                    "an engine closes the connection: {} bytes",
                    payload.len()
                );
                self.received.entry(connection).or_default().extend(payload);
            }
        }
    }
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes.try_into().unwrap())
}

fn take_frame(trunk: &mut Vec<u8>) -> Option<(u32, Vec<u8>)> {
    let length = number(trunk.get(4..8)?) as usize;
    trunk.get(..8 + length)?;
    let frame: Vec<u8> = trunk.drain(..8 + length).collect();
    Some((number(&frame[..4]), frame[8..].to_vec()))
}

fn take_message(received: &mut Vec<u8>) -> Option<Frame> {
    let length = number(received.get(..4)?) as usize;
    received.get(..10 + length)?;
    let message: Vec<u8> = received.drain(..10 + length).collect();
    Some(Frame {
        id: number(&message[4..8]),
        kind: message[8],
        payload: message[10..].to_vec(),
    })
}

/// The message for a container of a pod. It has fields that the plugin does not know.
pub fn request(container: Container) -> Vec<u8> {
    let pod = PodSandbox {
        name: "cuda".to_owned(),
        namespace: "lab".to_owned(),
    };
    CreateContainerRequest {
        pod: Some(pod),
        container: Some(container),
    }
    .encode_to_vec()
}

/// The names of the CDI devices in an answer.
pub fn names(answer: &[u8]) -> Vec<String> {
    let answer = CreateContainerResponse::decode(answer).unwrap();
    answer
        .adjust
        .unwrap_or_default()
        .cdi_devices
        .into_iter()
        .map(|device| device.name)
        .collect()
}

/// The id of the containers
pub const CONTAINER: &str = "0a1b2c";

/// A container with these variables.
pub fn container(env: &[&str]) -> Container {
    Container {
        id: CONTAINER.to_owned(),
        name: "main".to_owned(),
        env: env.iter().map(|entry| (*entry).to_owned()).collect(),
        ..Container::default()
    }
}
