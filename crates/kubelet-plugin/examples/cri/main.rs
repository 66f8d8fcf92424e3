//! A small client of the Container Runtime Interface: it starts pods as the kubelet does, for tests with real engines.
//!
//! ```text
//! cri SOCKET run [OPTION]... IMAGE COMMAND...     start a pod with one container, print its log, remove the pod
//! cri SOCKET start [OPTION]... IMAGE COMMAND...   start it, and print the ids of the pod and the container
//! cri SOCKET exec CONTAINER COMMAND...            run a command in a container
//! cri SOCKET remove POD                           remove a pod
//! ```
//!
//! Options: `--allocate SOCKET=DEVICE` (the container gets what the device plugin behind the socket answers), `--env K=V`,
//! `--cdi NAME`, `--device PATH`, `--mount HOST:CONTAINER`, `--annotation K=V`, `--user UID`, `--userns`, `--runtime NAME`,
//! `--name NAME`. The exit status is the container's, or 125 if the engine reports an error.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    clippy::disallowed_types,
    missing_docs,
    unreachable_pub,
    reason = "a tool for tests"
)]

mod messages;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use hyper_util::rt::TokioIo;
use kubelet_plugin::proto::device_plugin_client::DevicePluginClient;
use kubelet_plugin::proto::{AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse};
use messages::*;
use prost::Message;
use tokio::net::UnixStream;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

/// What the engine reports, as a status of this program.
const ENGINE_ERROR: u8 = 125;
/// `NamespaceMode.POD`: a namespace of its own.
const POD: i32 = 0;
/// `NamespaceMode.NODE`: the pod shares the namespace with the node, so no CNI plugin is needed.
const NODE: i32 = 2;
/// `ContainerState.CONTAINER_EXITED`
const EXITED: i32 = 2;
/// The first id of pods with a user namespace.
const USERNS_FIRST: u32 = 200_000;
const USERNS_LENGTH: u32 = 65_536;

#[derive(Parser)]
struct Cli {
    socket: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(Container),
    Start(Container),
    Exec {
        container: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    Remove {
        pod: String,
    },
}

#[derive(Args)]
struct Container {
    #[arg(long)]
    allocate: Option<String>,
    #[arg(long)]
    env: Vec<String>,
    #[arg(long)]
    cdi: Vec<String>,
    #[arg(long)]
    device: Vec<String>,
    #[arg(long)]
    mount: Vec<String>,
    #[arg(long)]
    annotation: Vec<String>,
    #[arg(long)]
    user: Option<i64>,
    #[arg(long)]
    userns: bool,
    #[arg(long, default_value = "")]
    runtime: String,
    #[arg(long, default_value = "pod")]
    name: String,
    image: String,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut engine = Engine::connect(&cli.socket).await;
    let result = match cli.command {
        Command::Run(container) => engine.run(&container).await,
        Command::Start(container) => engine.start(&container).await.map(|(pod, container, _)| {
            println!("{pod} {container}");
            0
        }),
        Command::Exec { container, command } => engine.exec(container, command).await,
        Command::Remove { pod } => engine.remove(&pod).await.map(|()| 0),
    };
    match result {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)),
        Err(status) => {
            eprintln!("{}", status.message());
            ExitCode::from(ENGINE_ERROR)
        }
    }
}

async fn channel(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .unwrap()
}

struct Engine(Grpc<Channel>);

impl Engine {
    async fn connect(socket: &Path) -> Self {
        Self(Grpc::new(channel(socket).await))
    }

    async fn call<Q, A>(&mut self, method: &str, request: Q) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.0
            .ready()
            .await
            .map_err(|error| Status::unavailable(error.to_string()))?;
        let path = PathAndQuery::try_from(format!("/runtime.v1.RuntimeService/{method}")).unwrap();
        let codec = ProstCodec::<Q, A>::default();
        Ok(self
            .0
            .unary(Request::new(request), path, codec)
            .await?
            .into_inner())
    }

    /// Starts a pod with one container, and returns both ids and the path of the log.
    async fn start(&mut self, options: &Container) -> Result<(String, String, PathBuf), Status> {
        let mut container = container(options);
        if let Some(text) = &options.allocate {
            let (socket, device) = pair(text);
            add_answer(&mut container, allocate(Path::new(&socket), device).await?);
        }
        let pod = pod(options);
        let log = Path::new(&pod.log_directory).join("0.log");
        let request = RunPodSandboxRequest {
            config: Some(pod.clone()),
            runtime_handler: options.runtime.clone(),
        };
        let RunPodSandboxResponse { pod_sandbox_id: id } =
            self.call("RunPodSandbox", request).await?;
        let request = CreateContainerRequest {
            pod_sandbox_id: id.clone(),
            config: Some(container),
            sandbox_config: Some(pod),
        };
        match self.create_and_start(request).await {
            Ok(container) => Ok((id, container, log)),
            Err(error) => {
                self.remove(&id).await?;
                Err(error)
            }
        }
    }

    async fn create_and_start(
        &mut self,
        request: CreateContainerRequest,
    ) -> Result<String, Status> {
        let CreateContainerResponse { container_id } =
            self.call("CreateContainer", request).await?;
        let request = StartContainerRequest {
            container_id: container_id.clone(),
        };
        let Empty {} = self.call("StartContainer", request).await?;
        Ok(container_id)
    }

    async fn run(&mut self, options: &Container) -> Result<i32, Status> {
        let (pod, container, log) = self.start(options).await?;
        let code = loop {
            let request = ContainerStatusRequest {
                container_id: container.clone(),
            };
            let ContainerStatusResponse { status } = self.call("ContainerStatus", request).await?;
            let status = status.unwrap_or_default();
            if status.state == EXITED {
                break status.exit_code;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        self.remove(&pod).await?;
        print_log(&log);
        std::fs::remove_dir_all(log.parent().unwrap()).unwrap();
        Ok(code)
    }

    async fn exec(&mut self, container_id: String, cmd: Vec<String>) -> Result<i32, Status> {
        let request = ExecSyncRequest {
            container_id,
            cmd,
            timeout: 30,
        };
        let ExecSyncResponse {
            stdout,
            stderr,
            exit_code,
        } = self.call("ExecSync", request).await?;
        print!(
            "{}{}",
            String::from_utf8_lossy(&stdout),
            String::from_utf8_lossy(&stderr)
        );
        Ok(exit_code)
    }

    async fn remove(&mut self, pod: &str) -> Result<(), Status> {
        let request = || PodSandboxRequest {
            pod_sandbox_id: pod.to_owned(),
        };
        let Empty {} = self.call("StopPodSandbox", request()).await?;
        let Empty {} = self.call("RemovePodSandbox", request()).await?;
        Ok(())
    }
}

fn pod(options: &Container) -> PodSandboxConfig {
    let log_directory = tempfile::tempdir().unwrap().keep();
    let uid = log_directory.file_name().unwrap().display().to_string();
    let annotations = options.annotation.iter().map(|text| pair(text)).collect();
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: options.name.clone(),
            uid,
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        log_directory: log_directory.display().to_string(),
        annotations,
        linux: Some(LinuxPodSandboxConfig {
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces(options)),
            }),
        }),
    }
}

fn namespaces(options: &Container) -> NamespaceOption {
    let mapping = || {
        vec![IdMapping {
            host_id: USERNS_FIRST,
            container_id: 0,
            length: USERNS_LENGTH,
        }]
    };
    let userns = || UserNamespace {
        mode: POD,
        uids: mapping(),
        gids: mapping(),
    };
    // Engines support a user namespace only together with a network namespace.
    let network = if options.userns { POD } else { NODE };
    NamespaceOption {
        network,
        pid: 1,
        ipc: 0,
        userns_options: options.userns.then(userns),
    }
}

fn container(options: &Container) -> ContainerConfig {
    let device = |path: &String| Device {
        container_path: path.clone(),
        host_path: path.clone(),
        permissions: "rw".to_owned(),
    };
    let mount = |text: &String| {
        let (host_path, container_path) = text.split_once(':').expect("--mount HOST:CONTAINER");
        Mount {
            container_path: container_path.to_owned(),
            host_path: host_path.to_owned(),
            readonly: true,
        }
    };
    let env = |text: &String| {
        let (key, value) = pair(text);
        KeyValue { key, value }
    };
    let security = LinuxContainerSecurityContext {
        namespace_options: Some(namespaces(options)),
        run_as_user: options.user.map(|value| Int64Value { value }),
    };
    ContainerConfig {
        metadata: Some(ContainerMetadata {
            name: "main".to_owned(),
        }),
        image: Some(ImageSpec {
            image: options.image.clone(),
        }),
        command: options.command.clone(),
        envs: options.env.iter().map(env).collect(),
        mounts: options.mount.iter().map(mount).collect(),
        devices: options.device.iter().map(device).collect(),
        annotations: options.annotation.iter().map(|text| pair(text)).collect(),
        log_path: "0.log".to_owned(),
        linux: Some(LinuxContainerConfig {
            security_context: Some(security),
        }),
        cdi_devices: options
            .cdi
            .iter()
            .map(|name| CdiDevice { name: name.clone() })
            .collect(),
    }
}

/// Asks a device plugin for a device.
async fn allocate(socket: &Path, device: String) -> Result<ContainerAllocateResponse, Status> {
    let request = ContainerAllocateRequest {
        devices_ids: vec![device],
    };
    let request = AllocateRequest {
        container_requests: vec![request],
    };
    let answer = DevicePluginClient::new(channel(socket).await)
        .allocate(request)
        .await?;
    Ok(answer.into_inner().container_responses.remove(0))
}

/// Adds what a device plugin answers, as the kubelet does.
fn add_answer(container: &mut ContainerConfig, answer: ContainerAllocateResponse) {
    container.envs.extend(
        answer
            .envs
            .into_iter()
            .map(|(key, value)| KeyValue { key, value }),
    );
    container
        .mounts
        .extend(answer.mounts.into_iter().map(|mount| Mount {
            container_path: mount.container_path,
            host_path: mount.host_path,
            readonly: mount.read_only,
        }));
    container
        .devices
        .extend(answer.devices.into_iter().map(|device| Device {
            container_path: device.container_path,
            host_path: device.host_path,
            permissions: device.permissions,
        }));
    container.annotations.extend(answer.annotations);
    container.cdi_devices.extend(
        answer
            .cdi_devices
            .into_iter()
            .map(|device| CdiDevice { name: device.name }),
    );
}

fn pair(text: &str) -> (String, String) {
    let (name, value) = text.split_once('=').expect("NAME=VALUE");
    (name.to_owned(), value.to_owned())
}

/// Prints a log in the format of the CRI, whose lines begin with a time, the stream and a tag.
fn print_log(log: &Path) {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    text.lines()
        .for_each(|line| println!("{}", line.splitn(4, ' ').nth(3).unwrap_or_default()));
}
