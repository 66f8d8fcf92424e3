//! The table of node states: ways in which containers get GPUs, each with each fault, before the start of the plugin and after it.

/// The engine of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Containerd,
    /// containerd with `enable_cdi = false`
    ContainerdWithoutCdi,
    /// Docker with cri-dockerd, which drops CDI devices
    Docker,
    /// CRI-O, which starts the hook if it reads a hook file
    Crio,
    /// CRI-O without a hook file
    CrioWithoutHook,
}

impl Engine {
    pub const fn reads_cdi(self) -> bool {
        matches!(self, Self::Containerd | Self::Crio | Self::CrioWithoutHook)
    }

    /// Returns the script that installs it. `$kubelet` is the directory of the kubelet.
    pub fn script(self) -> String {
        let socket = match self {
            Self::Containerd | Self::ContainerdWithoutCdi => "/run/containerd/containerd.sock",
            Self::Docker => "/run/cri-dockerd.sock",
            Self::Crio | Self::CrioWithoutHook => "/run/crio/crio.sock",
        };
        let more = match self {
            Self::ContainerdWithoutCdi => {
                "mkdir -p /etc/containerd; printf 'version = 2\\n[plugins.\"io.containerd.grpc.v1.cri\"]\\nenable_cdi = false\\n' >/etc/containerd/config.toml;"
            }
            Self::Containerd => {
                "printf '#!/bin/sh\\necho containerd github.com/containerd/containerd/v2 v2.1.4 x\\n' >/usr/bin/containerd; chmod 755 /usr/bin/containerd;"
            }
            // The plugin judges hook files as a CRI-O does whose program exists.
            Self::Crio => {
                "printf '#!/bin/sh\\necho crio version 1.37.0\\n' >/usr/bin/crio; chmod 755 /usr/bin/crio; cp \"$hooks/oci-nvidia-hook.json\" /usr/share/containers/oci/hooks.d;"
            }
            Self::Docker | Self::CrioWithoutHook => "",
        };
        format!(
            "echo 'containerRuntimeEndpoint: unix://{socket}' >\"$kubelet/config.yaml\"; {more}"
        )
    }
}

/// A pod in which the plugin runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pod {
    /// The plugin runs on the host.
    No,
    WithSpecDir,
    WithoutSpecDir,
}

/// A state of a node.
#[derive(Clone, Debug)]
pub struct State {
    pub name: String,
    pub engine: Engine,
    pub pod: Pod,
    /// Whether the plugin serves claims
    pub has_claims: bool,
    /// The arguments of make-root
    pub root: &'static [&'static str],
    /// The options of the plugin
    pub options: Vec<&'static str>,
    /// The shell script that runs before the plugin starts
    pub before: String,
    /// The shell script that runs while the plugin runs; empty if nothing changes
    pub after: String,
    /// Whether the plugin is started
    pub runs: bool,
}

impl State {
    fn new(name: &str, engine: Engine) -> Self {
        Self {
            name: name.to_owned(),
            engine,
            pod: Pod::No,
            has_claims: false,
            root: &["--gpus", "2"],
            options: Vec::new(),
            before: String::new(),
            after: String::new(),
            runs: true,
        }
    }

    fn claims(name: &str, engine: Engine) -> Self {
        Self {
            has_claims: true,
            ..Self::new(name, engine)
        }
    }
}

const CONFIG: &str = "/etc/nvidia-container-runtime/config.toml";

/// Faults of the driver, its nodes and the configuration. `$lib` is the directory of the driver's libraries.
const FAULTS: &[(&str, &str)] = &rows! {
    "libcuda.so missing", "rm $lib/libcuda.so*";
    "libnvidia-ml.so missing", "rm $lib/libnvidia-ml.so*";
    "an optional library missing", "rm $lib/libnvidia-ptxjitcompiler.so*";
    "nvidia-smi missing", "rm /usr/bin/nvidia-smi";
    "no libraries", "rm $lib/libnvidia* $lib/libcuda*";
    "/proc/driver/nvidia missing", "rm -r /proc/driver/nvidia";
    "the node of one GPU missing", "rm /dev/nvidia1";
    "the nodes of all GPUs missing", "rm /dev/nvidia0 /dev/nvidia1";
    "/dev/nvidiactl missing", "rm /dev/nvidiactl";
    "/dev/nvidia-uvm missing", "rm /dev/nvidia-uvm";
    "a file in place of a node", "rm /dev/nvidia0; : >/dev/nvidia0";
    "one GPU lost", "sed -i 's/^gpu minor=0 /gpu minor=0 fail=15 /' $lib/nvml.conf";
    "all GPUs lost", "sed -i 's/^gpu /gpu fail=15 /' $lib/nvml.conf";
    "config.toml: one GPU denied", "printf '[devices]\\ndeny = [\"0\"]\\n' >$config";
    "config.toml: all GPUs denied", "printf '[devices]\\ndeny = [\"*\"]\\n' >$config";
    // Nothing locks the file, as after the supervisor of the daemon was killed.
    "one GPU with a dead MPS daemon",
        "gpu=GPU-51eed000-0000-4000-8000-0000fa4e0000; dir=/run/oci-nvidia-mps/$gpu; mkdir -p $dir/pipe; : >$dir/lock; \
         printf '{\"format\": 1, \"gpu\": \"%s\", \"state\": \"ready\"}' $gpu >$dir/state";
    "all GPUs with dead MPS daemons", "for gpu in GPU-51eed000-0000-4000-8000-0000fa4e0000 GPU-51eed001-0001-4001-8000-0000fa4e0001; do \
             dir=/run/oci-nvidia-mps/$gpu; mkdir -p $dir/pipe; : >$dir/lock; \
             printf '{\"format\": 1, \"gpu\": \"%s\", \"state\": \"ready\"}' $gpu >$dir/state; \
         done";
    "config.toml invalid", "echo '[[[' >$config";
    "the hook missing", "rm /usr/bin/oci-nvidia-hook";
};

/// Faults of the directory of CDI specs, before the start.
const DIRECTORIES: &[(&str, &str)] = &rows! {
    "the spec directory is read-only", "mount -t tmpfs -o ro specs /run/cdi";
    "the spec directory missing", "rmdir /run/cdi";
    "a file in place of the spec directory", "rmdir /run/cdi; : >/run/cdi";
    "/run is read-only",
        "mkdir /run/oci-nvidia-kubelet-plugin; mount --bind /run/oci-nvidia-kubelet-plugin /run/oci-nvidia-kubelet-plugin; mount -o remount,bind,ro /run";
};

/// What other programs do to the specs while the plugin runs.
const SPECS: &[(&str, &str)] = &rows! {
    "the spec deleted", "rm /run/cdi/*.json";
    "the spec directory deleted", "rm -r /run/cdi";
    "the spec replaced with an invalid one", "for file in /run/cdi/*.json; do echo '{' >$file; done";
    "the spec deleted, and its directory read-only", "rm /run/cdi/*.json; mount -t tmpfs -o ro specs /run/cdi";
};

fn with_faults(states: &mut Vec<State>, base: &State, faults: &[(&str, &str)], is_after: bool) {
    for (fault, script) in faults {
        let mut state = base.clone();
        let script = script.replace("$config", CONFIG);
        let when = if is_after {
            state.after = script;
            "later: "
        } else {
            state.before += &script;
            ""
        };
        state.name = format!("{}: {when}{fault}", base.name);
        states.push(state);
    }
}

/// Strategies, resources and limits of an engine, with a script that runs first.
const SETTINGS: &[(&str, Engine, &[&str], &str)] = &rows! {
    "annotations", Engine::Containerd, &["--device-list-strategy=cdi-annotations"], "";
    "replicas", Engine::Containerd, &["--replicas=3"], "";
    "another prefix", Engine::Containerd, &["--resource-prefix=example.com"], "";
    "envvar", Engine::Containerd, &["--device-list-strategy=envvar"], "";
    "cdi-cri", Engine::ContainerdWithoutCdi, &[], "";
    "envvar", Engine::ContainerdWithoutCdi, &["--device-list-strategy=envvar"], "";
    "the default", Engine::Docker, &[], "";
    "cdi-cri", Engine::Docker, &["--device-list-strategy=cdi-cri"], "";
    "cdi-cri", Engine::Crio, &["--device-list-strategy=cdi-cri"], "";
    "both", Engine::Crio, &["--device-list-strategy=envvar,cdi-annotations"], "";
    "by index", Engine::Crio, &["--device-id-strategy=index"], "";
    "without nodes", Engine::Crio, &["--pass-device-specs=false"], "";
    "mounts that are not accepted", Engine::Crio, &["--device-list-strategy=volume-mounts"], "";
    "mounts", Engine::Crio, &["--device-list-strategy=volume-mounts"],
        "echo 'accept-nvidia-visible-devices-as-volume-mounts = true' >$config";
    "envvar on a locked node", Engine::Crio, &[], "echo 'accept-nvidia-visible-devices-envvar-when-unprivileged = false' >$config";
    "the default", Engine::CrioWithoutHook, &[], "";
    "envvar", Engine::CrioWithoutHook, &["--device-list-strategy=envvar"], "";
    "volume-mounts", Engine::CrioWithoutHook, &["--device-list-strategy=volume-mounts"], "";
    "host-path without a directory", Engine::Containerd, &["--device-list-strategy=host-path"], "";
    "host-path", Engine::Containerd, &["--device-list-strategy=host-path", "--host-path=/run/driver"],
        "mkdir -p /run/driver/lib64; cp -P $lib/libcuda.so* /run/driver/lib64";
    "host-path with an empty directory", Engine::Containerd, &["--device-list-strategy=host-path", "--host-path=/run/driver"],
        "mkdir /run/driver";
    "a driver root without a driver", Engine::Containerd, &[],
        "mkdir /run/empty; printf '[nvidia-container-cli]\\nroot = \"/run/empty\"\\n' >$config";
    "one MIG strategy without MIG devices", Engine::Containerd, &["--mig-strategy=single"], "";
    "the kubelet has no plugin directory", Engine::Containerd, &[], "rm -r $kubelet/device-plugins";
};

fn with_settings(states: &mut Vec<State>) {
    for (name, engine, options, script) in SETTINGS {
        states.push(State {
            name: format!("{engine:?}: {name}"),
            options: options.to_vec(),
            before: script.replace("$config", CONFIG),
            ..State::new("", *engine)
        });
    }
    for engine in [
        Engine::ContainerdWithoutCdi,
        Engine::Docker,
        Engine::Crio,
        Engine::CrioWithoutHook,
    ] {
        states.push(State::claims(&format!("claims: {engine:?}"), engine));
    }
}

fn with_mig_and_pods(states: &mut Vec<State>) {
    for strategy in [
        "--mig-strategy=none",
        "--mig-strategy=single",
        "--mig-strategy=mixed",
    ] {
        for engine in [Engine::Containerd, Engine::Crio] {
            states.push(State {
                root: &["--gpus", "2", "--mig"],
                options: vec![strategy],
                ..State::new(&format!("{engine:?}: MIG, {strategy}"), engine)
            });
        }
    }
    states.push(State {
        root: &["--gpus", "2", "--mig"],
        ..State::claims("claims: MIG", Engine::Containerd)
    });
    for (name, pod, options) in rows! {
        "default", Pod::WithoutSpecDir, vec![];
        "CDI without the directory", Pod::WithoutSpecDir, vec!["--device-list-strategy=cdi-cri"];
        "CDI with the directory", Pod::WithSpecDir, vec!["--device-list-strategy=cdi-cri"];
    } {
        states.push(State {
            pod,
            options: options.clone(),
            ..State::new(&format!("in a pod: {name}"), Engine::Containerd)
        });
    }
    for has_claims in [false, true] {
        states.push(State {
            has_claims,
            runs: false,
            ..State::new(
                &format!("the plugin does not run, claims: {has_claims}"),
                Engine::Containerd,
            )
        });
        states.push(State {
            has_claims,
            root: &["--gpus", "0"],
            ..State::new(&format!("no GPU, claims: {has_claims}"), Engine::Containerd)
        });
    }
}

/// Returns the table.
pub fn all() -> Vec<State> {
    let cdi = State::new("CDI", Engine::Containerd);
    let hook = State::new("hook", Engine::Crio);
    let claims = State::claims("claims", Engine::Containerd);
    let mut states = vec![cdi.clone(), hook.clone(), claims.clone()];
    for base in [&cdi, &hook, &claims] {
        with_faults(&mut states, base, FAULTS, false);
        with_faults(&mut states, base, FAULTS, true);
    }
    for base in [&cdi, &claims] {
        with_faults(&mut states, base, DIRECTORIES, false);
        with_faults(&mut states, base, SPECS, true);
    }
    with_settings(&mut states);
    with_mig_and_pods(&mut states);
    states
}
