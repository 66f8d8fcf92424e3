//! The checks. Each is a function that returns what it saw.

mod claims;
mod containers;
mod host;
mod limits;
mod mps;
mod node;
mod plugin;
mod times;

use crate::check::Check;

/// Creates the list from the name, the time limit in seconds, the function, and what it checks.
macro_rules! checks {
    ($($name:literal $limit:literal $run:path: $about:literal;)*) => {
        /// All checks, in the order in which they are performed.
        pub const ALL: &[Check] = &[$(Check { name: $name, about: $about, limit: $limit, run: $run }),*];
    };
}

checks! {
    "info" 60 host::info: "the hook lists the GPUs of nvidia-smi";
    "files" 30 host::files: "the hook finds the driver's files and nodes";
    "doctor" 60 host::doctor: "doctor finds no error of the driver";
    "nvml" 60 host::nvml: "NVML answers in its confined process";
    "nvml-calls" 60 host::nvml_calls: "the confined process makes few system calls";
    "cache" 60 host::cache: "the next start uses the cached inventory, and a change discards it";
    "prepare" 60 host::prepare: "prepare creates the nodes that the driver has";
    "smi" 60 containers::smi: "nvidia-smi in a container prints what it prints on the host";
    "cuda-host" 60 containers::cuda_on_host: "a CUDA program on the host, as the baseline";
    "processes" 60 host::processes: "ps counts the processes that nvidia-smi lists";
    "cuda" 60 containers::cuda: "a CUDA program in a container";
    "user" 60 containers::user: "as another user";
    "read-only" 60 containers::read_only: "with a read-only root file system";
    "user-namespace" 60 containers::user_namespace: "in a user namespace";
    "compat" 60 containers::compat: "nvidia-container-cli of the package -compat lists the same files";
    "cdi" 60 containers::cdi: "nvidia-smi and CUDA in a container with a CDI device";
    "cdi-user" 60 containers::cdi_user: "a CDI device as another user";
    "cdi-read-only" 60 containers::cdi_read_only: "a CDI device with a read-only root file system";
    "cdi-user-namespace" 60 containers::cdi_user_namespace: "a CDI device in a user namespace";
    "one-gpu" 60 limits::one_gpu: "only the requested GPU is visible";
    "mig" 60 limits::mig: "only the requested MIG device is visible";
    "cgroup" 60 limits::cgroup: "the device cgroup denies a GPU that was not requested";
    "denied" 60 limits::denied: "a GPU that [devices] denies stops the container";
    "unknown-gpu" 60 limits::unknown_gpu: "a GPU that does not exist stops the container";
    "plugin" 60 plugin::list_and_allocate: "the device plugin lists and allocates the GPUs";
    "metrics" 60 plugin::metrics: "metrics have the values of nvidia-smi";
    "xid" 90 plugin::xid: "a real XID makes the GPU unhealthy, and it recovers";
    "claims" 60 claims::prepare: "the DRA driver publishes the GPUs and prepares a claim";
    "claims-xid" 90 claims::xid: "a real XID taints the device, and the taint is removed";
    "mps" 90 mps::limits: "two containers share a GPU through MPS, with limits";
    "mps-client" 60 mps::client_killed: "a client of MPS is killed, and the other one goes on";
    "mps-daemon" 90 mps::daemon_killed: "without its daemon, a shared GPU is closed";
    "warm" 120 times::warm: "ten starts with the cached inventory";
    "cold" 180 times::cold: "ten starts that ask NVML";
    "at-once" 120 times::at_once: "twenty starts at once";
}
