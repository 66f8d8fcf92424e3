//! A node in one state: the host of the fake driver, the plugin, a kubelet, and an engine that starts containers.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kubelet_plugin::proto::ContainerAllocateResponse;
use serde_json::{Value, json};

use super::table::{Engine, Pod, State};
use crate::PROGRAM;
use crate::fake_api::FakeApi;
use crate::fake_host::Fake;
use crate::fake_kubelet::FakeKubelet;
use crate::fake_kubelet::dra::DraKubelet;

const DRIVER: &str = "gpu.nvidia.com";
const TOP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
/// How long the plugin may take before the kubelet has its devices.
const SETTLED: Duration = Duration::from_secs(8);

/// What `check` printed about pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Starts,
    Fails(String),
    Unknown(String),
}

/// What a container gets.
#[derive(Debug, Default)]
struct Container {
    cdi_devices: Vec<String>,
    env: Vec<String>,
    /// The paths on the host and in the container
    mounts: Vec<(String, String)>,
    nodes: Vec<String>,
    /// The programs that the runtime starts
    hooks: Vec<String>,
}

pub struct World<'a> {
    state: &'a State,
    fake: Fake,
    /// A directory whose path is short enough for sockets: the kubelet's
    dir: tempfile::TempDir,
    kubelet: FakeKubelet,
    dra: DraKubelet,
    api: FakeApi,
    /// The process whose mount namespace is the host
    host: Child,
    plugin: Option<Child>,
}

impl Drop for World<'_> {
    fn drop(&mut self) {
        for child in self.plugin.iter_mut().chain([&mut self.host]) {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

impl<'a> World<'a> {
    pub fn new(state: &'a State) -> Self {
        let fake = Fake::new(state.root);
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::create_dir(dir.path().join("rootfs")).unwrap();
        for name in ["etc", "usr", "sys/bus/pci/devices"] {
            std::fs::create_dir_all(fake.root.join(name)).unwrap();
        }
        let (kubelet, dra) = (
            FakeKubelet::start(dir.path()),
            DraKubelet::start(dir.path()),
        );
        let api = FakeApi::start(dir.path());
        let mut world = Self {
            state,
            host: start_host(state, &fake, dir.path()),
            plugin: None,
            fake,
            dir,
            kubelet,
            dra,
            api,
        };
        if state.runs {
            world.plugin = Some(world.start_plugin());
            world.settle();
        }
        world
    }

    /// Returns a command in the mount namespace of the host.
    fn in_host(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.host.id()));
        command.arg(program);
        if self.state.pod != Pod::No {
            command.env("KUBERNETES_SERVICE_HOST", "10.0.0.1");
        }
        command
    }

    fn plugin_command(&self, name: &str) -> Command {
        let mut command = self.in_host(PROGRAM);
        command.arg(name).arg("--kubelet-dir").arg(self.dir.path());
        if self.state.has_claims {
            command
                .args(["--interface", "dra", "--kubeconfig"])
                .arg(self.api.kubeconfig());
        }
        command.args(&self.state.options);
        command
    }

    fn start_plugin(&self) -> Child {
        let log = std::fs::File::create(self.dir.path().join("log")).unwrap();
        let mut command = self.plugin_command("run");
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(log).spawn().unwrap()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Waits until the kubelet has the devices, or until that takes too long.
    fn settle(&mut self) {
        let start = Instant::now();
        while start.elapsed() < SETTLED && !self.is_registered() {
            let plugin = self.plugin.as_mut().unwrap();
            if plugin.try_wait().unwrap().is_some() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn is_registered(&self) -> bool {
        if self.state.has_claims {
            return !self.api.state().devices().is_empty();
        }
        let state = self.kubelet.state();
        let mut resources = state.resources.values();
        resources.any(|resource| !resource.devices.is_empty())
    }

    /// Runs a script on the host.
    pub fn change(&self, script: &str) {
        let script = format!("{}{script}", self.variables());
        let ran = self.in_host("sh").args(["-euc", &script]).output().unwrap();
        assert!(
            ran.status.success(),
            "{}: {}",
            self.state.name,
            String::from_utf8_lossy(&ran.stderr)
        );
    }

    fn variables(&self) -> String {
        variables(&self.fake, self.dir.path())
    }

    /// Returns what `check` prints.
    pub fn check(&self) -> Answer {
        let Output { stdout, stderr, .. } =
            self.plugin_command("check").arg("--json").output().unwrap();
        let Ok(document) = serde_json::from_slice::<Value>(&stdout) else {
            let error = String::from_utf8_lossy(&stderr).into_owned();
            if self.state.after.is_empty() {
                return Answer::Fails(error);
            }
            return Answer::Unknown(error);
        };
        let verdict = &document["verdict"];
        let why = verdict["why"].as_str().unwrap_or_default().to_owned();
        match verdict["starts"].as_bool() {
            Some(true) => Answer::Starts,
            Some(false) => Answer::Fails(why),
            None => Answer::Unknown(why),
        }
    }

    /// Starts a pod with each device that the scheduler can choose.
    ///
    /// # Errors
    /// If there is no such device, or if one of the pods does not start with a GPU.
    pub fn start_pods(&self) -> Result<(), String> {
        if self.state.has_claims {
            return self.start_claims();
        }
        let mut offered = Vec::new();
        for (name, resource) in &self.kubelet.state().resources {
            for (id, healthy) in &resource.devices {
                if *healthy && resource.streams > 0 {
                    offered.push((name.clone(), id.clone()));
                }
            }
        }
        if offered.is_empty() {
            return Err("the kubelet has no healthy device".to_owned());
        }
        for (resource, id) in offered {
            let answer = self
                .kubelet
                .allocate(&resource, &[std::slice::from_ref(&id)]);
            let mut answers = answer.map_err(|error| format!("{id}: {}", error.message()))?;
            let container = container(answers.container_responses.remove(0));
            self.start_container(container)
                .map_err(|error| format!("{id}: {error}"))?;
        }
        Ok(())
    }

    fn start_claims(&self) -> Result<(), String> {
        let mut offered = Vec::new();
        for (name, is_tainted) in self.api.state().devices() {
            if !is_tainted {
                offered.push(name);
            }
        }
        if offered.is_empty() {
            return Err("no device without a taint is published".to_owned());
        }
        for name in offered {
            let uid = format!("u-{name}");
            self.api.state().allocate(&name, &uid, &[&name]);
            let mut answers = self.dra.try_prepare(DRIVER, &[(&name, &uid)])?;
            let answer = answers.remove(&uid).ok_or("no answer")?;
            if !answer.error.is_empty() {
                return Err(answer.error);
            }
            let mut container = Container::default();
            for device in answer.devices {
                container.cdi_devices.extend(device.cdi_device_ids);
            }
            self.start_container(container)?;
        }
        Ok(())
    }

    /// Does what the engine and the runtime do.
    fn start_container(&self, mut container: Container) -> Result<(), String> {
        let mut has_files = false;
        if self.state.engine.reads_cdi() && !container.cdi_devices.is_empty() {
            self.inject(&mut container)?;
            has_files = true;
        }
        let is_driver = |(_, path): &(String, String)| path == "/usr/local/nvidia";
        if let Some((dir, _)) = container.mounts.iter().find(|mount| is_driver(mount)) {
            self.expect("-e", &[format!("{dir}/lib64/libcuda.so.1")])?;
            has_files = true;
        }
        let paths: Vec<_> = container
            .mounts
            .iter()
            .map(|(host, _)| host.clone())
            .collect();
        self.expect("-e", &paths)?;
        self.expect("-c", &container.nodes)?;
        self.expect("-x", &container.hooks)?;
        let mut has_node = container.nodes.iter().any(|node| is_gpu(node));
        if !has_files && self.starts_hook() {
            self.run_hook(&container)?;
            (has_files, has_node) = (true, true);
        }
        if !has_files {
            return Err("the container has no driver files".to_owned());
        }
        if !has_node {
            return Err("the container has no GPU".to_owned());
        }
        Ok(())
    }

    /// Checks that the paths exist on the host, with an operator of test(1).
    fn expect(&self, operator: &str, paths: &[String]) -> Result<(), String> {
        let script = format!("for path; do [ {operator} \"$path\" ] || echo \"$path\"; done");
        let ran = self
            .in_host("sh")
            .args(["-c", &script, "sh"])
            .args(paths)
            .output();
        let missing = String::from_utf8(ran.unwrap().stdout).unwrap();
        if missing.is_empty() {
            return Ok(());
        }
        Err(format!("[ {operator} {} ] fails", missing.trim()))
    }

    /// Adds what the CDI specs have for the devices of the container.
    fn inject(&self, container: &mut Container) -> Result<(), String> {
        let specs = self.specs();
        for name in &container.cdi_devices {
            let Some((edits, of_spec)) = specs.get(name) else {
                return Err(format!("unresolvable CDI device {name}"));
            };
            for edits in [edits, of_spec] {
                for node in list(&edits["deviceNodes"]) {
                    let host = node["hostPath"].as_str().or_else(|| node["path"].as_str());
                    container.nodes.push(host.unwrap().to_owned());
                }
                for mount in list(&edits["mounts"]) {
                    let path = |key: &str| mount[key].as_str().unwrap().to_owned();
                    container
                        .mounts
                        .push((path("hostPath"), path("containerPath")));
                }
                for hook in list(&edits["hooks"]) {
                    container
                        .hooks
                        .push(hook["path"].as_str().unwrap().to_owned());
                }
            }
        }
        let is_libcuda = |(_, path): &(String, String)| path.contains("/libcuda.so");
        if !container.mounts.iter().any(is_libcuda) {
            return Err("the CDI device has no libcuda.so".to_owned());
        }
        Ok(())
    }

    /// Returns the edits of each CDI device that the engine finds, and those of its spec.
    fn specs(&self) -> BTreeMap<String, (Value, Value)> {
        let mut found = BTreeMap::new();
        if self.state.pod == Pod::WithoutSpecDir {
            return found;
        }
        let dir = format!("/proc/{}/root/run/cdi", self.host.id());
        for entry in std::fs::read_dir(dir).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let bytes = std::fs::read(path).unwrap_or_default();
            let Ok(spec) = serde_json::from_slice::<Value>(&bytes) else {
                continue;
            };
            let kind = spec["kind"].as_str().unwrap();
            for device in list(&spec["devices"]) {
                let name = format!("{kind}={}", device["name"].as_str().unwrap());
                let edits = device["containerEdits"].clone();
                found.insert(name, (edits, spec["containerEdits"].clone()));
            }
        }
        found
    }

    fn starts_hook(&self) -> bool {
        let files = [
            "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json".to_owned(),
            "/usr/bin/oci-nvidia-hook".to_owned(),
        ];
        self.state.engine == Engine::Crio && self.expect("-e", &files).is_ok()
    }

    /// Asks the hook what it does with the container, which has no privileges.
    fn run_hook(&self, container: &Container) -> Result<(), String> {
        let mut mounts = Vec::new();
        for (host, path) in &container.mounts {
            mounts.push(json!({"type": "bind", "source": host, "destination": path}));
        }
        let config = json!({
            "ociVersion": "1.0.2", "root": {"path": self.dir.path().join("rootfs")}, "mounts": mounts,
            "process": {"args": ["sh"], "env": container.env, "capabilities": {"bounding": [], "effective": []}},
        });
        let mut plan = self.in_host("/usr/bin/oci-nvidia-hook");
        plan.args(["plan", "-", "--json"]);
        plan.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut plan = plan.stderr(Stdio::piped()).spawn().unwrap();
        let mut input = plan.stdin.take().unwrap();
        write!(input, "{config}").unwrap();
        drop(input);
        let Output { stdout, stderr, .. } = plan.wait_with_output().unwrap();
        let plan: Value = serde_json::from_slice(&stdout).unwrap_or_default();
        // The real hook creates missing nodes, and plan does not.
        let reason = plan["reason"].as_str().unwrap_or_default();
        let is_complete =
            !list(&plan["devices"]).is_empty() || reason.contains("NVML answers only after that");
        if plan["outcome"] == "inject" && is_complete {
            return Ok(());
        }
        Err(format!(
            "the hook: {} {} {}",
            plan["outcome"],
            plan["reason"],
            String::from_utf8_lossy(&stderr)
        ))
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn is_gpu(node: &str) -> bool {
    let number = node.strip_prefix("/dev/nvidia").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

fn container(answer: ContainerAllocateResponse) -> Container {
    let mut container = Container::default();
    for device in answer.cdi_devices {
        container.cdi_devices.push(device.name);
    }
    for (key, value) in answer.annotations {
        if key.starts_with("cdi.k8s.io/") {
            let names = value.split(',').map(str::to_owned);
            container.cdi_devices.extend(names);
        }
    }
    for (name, value) in answer.envs {
        container.env.push(format!("{name}={value}"));
    }
    for mount in answer.mounts {
        container
            .mounts
            .push((mount.host_path, mount.container_path));
    }
    for node in answer.devices {
        container.nodes.push(node.host_path);
    }
    container
}

fn variables(fake: &Fake, kubelet: &Path) -> String {
    let library = fake.file("");
    let lib = Path::new("/").join(library.strip_prefix(&fake.root).unwrap());
    format!(
        "lib='{}' kubelet='{}' hooks='{TOP}/hooks.d'; ",
        lib.display(),
        kubelet.display()
    )
}

/// Hides the engines of this machine, their directories and the specs and hooks that they read. /usr and /etc are layers, /var is not.
const NO_ENGINES: &str = "for dir in /usr/bin /usr/sbin /usr/local/bin /usr/local/sbin; do \
     for name in containerd crio docker dockerd podman crun runc nvidia-ctk nvidia-container-runtime nvidia-container-runtime-hook; do \
       rm -f $dir/$name; done; done; \
     rm -rf /usr/share/containers/oci/hooks.d /etc/containers /etc/k0s; \
     for dir in /var/lib/rancher /var/lib/k0s /var/snap; do [ ! -d $dir ] || mount -t tmpfs hidden $dir; done;";

/// Starts the process that keeps the mount namespace, in which the files of the fake driver are those of `/`.
fn start_host(state: &State, fake: &Fake, kubelet: &Path) -> Child {
    let hook = Path::new(PROGRAM).with_file_name("oci-nvidia-hook");
    assert!(
        hook.is_file(),
        "run \"cargo test --workspace --no-run\" first"
    );
    let specs = match state.pod {
        // The directory of the test is on the file system of `/`, as /run of a pod is.
        Pod::WithoutSpecDir => {
            "mkdir $kubelet/run; mount --bind $kubelet/run /run; mkdir /run/cdi;"
        }
        Pod::WithSpecDir => "mount -t tmpfs specs /run/cdi;",
        Pod::No => "",
    };
    let engine = match state.pod {
        Pod::No => state.engine.script(),
        Pod::WithSpecDir | Pod::WithoutSpecDir => String::new(),
    };
    let script = format!(
        "{variables} {NO_ENGINES} mount -t tmpfs -o mode=755 run /run; mkdir -p /run/cdi /etc/nvidia-container-runtime \
         /usr/share/containers/oci/hooks.d; rm -rf /etc/crio /etc/containerd /etc/cdi /etc/nvidia-container-runtime/*; \
         ln -s '{hook}' /usr/bin/oci-nvidia-hook; {specs} {engine} {before}
         echo ready; exec sleep 1000",
        variables = variables(fake, kubelet),
        hook = hook.display(),
        before = state.before,
    );
    let mut command = Command::new(format!("{TOP}/tests/fake-driver/as-host"));
    command.arg(&fake.root).args(["sh", "-euc", &script]);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut host = command.spawn().unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(host.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n", "{}", state.name);
    host
}
