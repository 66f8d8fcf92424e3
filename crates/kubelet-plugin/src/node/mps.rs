//! Decides whether a container can have a GPU that an MPS daemon serves. Pure.
//!
//! The plugin starts no daemon: `oci-nvidia-mps.service` does, and describes its state in files, which [`nvidia_host::mps`] reads.

use std::collections::BTreeMap;
use std::sync::Arc;

use nvidia_host::inventory::Gpu;
use nvidia_host::mps::{self, Daemon};

/// The most clients of a daemon ("Client-Server Connection Limits" in NVIDIA's manual "Multi-Process Service"). The manual counts contexts
/// for each device, and a container has one at least.
const MAX_CLIENTS: u32 = 48;
/// The same for GPUs before compute capability 7.0 (Volta)
const MAX_CLIENTS_BEFORE_VOLTA: u32 = 16;

/// The MPS daemons of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mps {
    /// The daemons
    pub daemons: Arc<Vec<Daemon>>,
    /// The memory of GPUs in MiB, by UUID. A GPU that uses the memory of the host has none.
    pub memory_mib: BTreeMap<String, u64>,
}

impl Mps {
    /// Returns the daemon of the GPU with this UUID.
    #[must_use]
    pub fn daemon(&self, gpu: &str) -> Option<&Daemon> {
        mps::of_gpu(&self.daemons, gpu)
    }

    /// Returns why containers cannot use a GPU. `replicas` is the number of those that are to share it with MPS; `None` if it is not shared in
    /// this way.
    #[must_use]
    pub fn why_unusable(&self, gpu: &Gpu, replicas: Option<u32>) -> Option<String> {
        match replicas {
            Some(replicas) => self.why_unshared(gpu, replicas),
            None => why_not_ready(self.daemon(&gpu.uuid)?),
        }
    }

    /// Returns why this many containers cannot share the GPU.
    fn why_unshared(&self, gpu: &Gpu, replicas: u32) -> Option<String> {
        if gpu.mig_enabled {
            let why = "MPS shares whole GPUs only, and the GPU is in MIG mode; disable MIG mode, or set sharing = \"time-slicing\"";
            return Some(why.to_owned());
        }
        let most = max_clients(gpu);
        if replicas > most {
            return Some(format!(
                "MPS serves at most {most} clients on this GPU; set replicas = {most}, or fewer"
            ));
        }
        let Some(daemon) = self.daemon(&gpu.uuid) else {
            let why = "mps-gpus in [sharing] of config.toml does not list it; list it, or set sharing = \"time-slicing\"";
            return Some(why.to_owned());
        };
        let not_ready = why_not_ready(daemon);
        not_ready.or_else(|| self.why_over_limit(daemon, replicas))
    }

    /// Returns why the memory limit of the daemon does not protect this many containers from each other.
    fn why_over_limit(&self, daemon: &Daemon, replicas: u32) -> Option<String> {
        // A single container may have the whole memory.
        if replicas == 1 {
            return None;
        }
        let total = self.memory_mib.get(&daemon.state.gpu);
        let what = match (daemon.state.memory_limit_mib, total) {
            (Some(limit), Some(total)) if limit.saturating_mul(replicas.into()) > *total => {
                format!(
                    "{replicas} containers with {limit} MiB each, the memory limit of its MPS daemon, exceed its {total} MiB"
                )
            }
            (Some(_), _) => return None,
            (None, _) => "its MPS daemon has no memory limit".to_owned(),
        };
        let most = match total {
            Some(total) => format!(
                "mps-memory-limit = \"{}M\", or less,",
                total / u64::from(replicas)
            ),
            None => "mps-memory-limit".to_owned(),
        };
        let unit = mps::UNIT;
        Some(format!(
            "{what}; set {most} in [sharing] of config.toml, and run \"systemctl restart {unit}\""
        ))
    }
}

/// Returns why a daemon serves no client, with the command that shows more; `None` if it is ready.
fn why_not_ready(daemon: &Daemon) -> Option<String> {
    let (why, fix) = (daemon.problem()?, daemon.fix());
    Some(format!("its MPS daemon is not ready: {why}; {fix}"))
}

/// Returns the most clients of the daemon of a GPU.
pub(crate) fn max_clients(gpu: &Gpu) -> u32 {
    let major = gpu.compute_capability.split('.').next();
    let major: Option<u32> = major.and_then(|text| text.parse().ok());
    if major.is_some_and(|major| major < 7) {
        MAX_CLIENTS_BEFORE_VOLTA
    } else {
        MAX_CLIENTS
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use base::paths::{ContainerPath, HostPath};
    use nvidia_host::driver::ipc::{Channel, Expected, Ipc};
    use nvidia_host::mps::Status;

    use super::*;
    use crate::node::gpus::tests::gpu;

    /// The daemon of `GPU-0`.
    pub(crate) fn daemon(status: Status, memory_limit_mib: Option<u64>) -> Daemon {
        let uuid = "GPU-0";
        let path = mps::directory_of(uuid).join(mps::PIPE);
        Daemon {
            index: 0,
            state: mps::State {
                memory_limit_mib,
                ..mps::State::new(uuid, mps::Phase::Ready)
            },
            status,
            ipc: Some(Ipc {
                channel: Channel {
                    root: HostPath::new("/"),
                    path: path.clone(),
                    expected: Expected::MpsDirectory,
                },
                source: HostPath::new(path),
                is_fixed: true,
                path: ContainerPath::new(mps::CONTAINER_DIRECTORY).unwrap(),
            }),
        }
    }

    fn mps(status: Status, memory_limit_mib: Option<u64>) -> Mps {
        Mps {
            daemons: Arc::new(vec![daemon(status, memory_limit_mib)]),
            memory_mib: [("GPU-0".to_owned(), 81_559)].into(),
        }
    }

    #[test]
    fn why_containers_cannot_share_a_gpu() {
        let ready = |limit| mps(Status::Ready, limit);
        let failed = Status::Failed("the driver was updated".to_owned());
        for (mps, replicas, expected) in [
            (ready(Some(20_000)), 4, None),
            (ready(Some(20_389)), 4, None),
            (ready(None), 1, None),
            (
                ready(Some(20_390)),
                4,
                Some(
                    "4 containers with 20390 MiB each, the memory limit of its MPS daemon, exceed its 81559 MiB; \
                      set mps-memory-limit = \"20389M\", or less, in [sharing] of config.toml, and run \
                      \"systemctl restart oci-nvidia-mps\"",
                ),
            ),
            (
                ready(None),
                2,
                Some(
                    "its MPS daemon has no memory limit; set mps-memory-limit = \"40779M\", or less, in [sharing]",
                ),
            ),
            (ready(Some(u64::MAX)), 48, Some("48 containers with ")),
            (
                ready(Some(1)),
                49,
                Some("MPS serves at most 48 clients on this GPU; set replicas = 48, or fewer"),
            ),
            (
                Mps::default(),
                1,
                Some("mps-gpus in [sharing] of config.toml does not list it; "),
            ),
            (
                mps(Status::Missing, None),
                1,
                Some(
                    "its MPS daemon is not ready: it was not started; run \"systemctl enable --now oci-nvidia-mps\"",
                ),
            ),
            (
                mps(Status::Starting, None),
                1,
                Some("its MPS daemon is not ready: it is starting or stopping; run "),
            ),
            (
                mps(failed, Some(1)),
                1,
                Some(
                    "its MPS daemon is not ready: the driver was updated; run \"systemctl status oci-nvidia-mps@GPU-0\"",
                ),
            ),
            (
                mps(Status::Dead, Some(1)),
                1,
                Some(
                    "its MPS daemon is not ready: its supervisor has ended; run \"systemctl status oci-nvidia-mps@GPU-0\"",
                ),
            ),
        ] {
            let found = mps.why_unshared(&gpu(0, "A", &[]).gpu, replicas);
            let found = found.as_deref();
            assert_eq!(found.is_some(), expected.is_some(), "{found:?}");
            let (found, expected) = (found.unwrap_or_default(), expected.unwrap_or_default());
            assert!(found.starts_with(expected), "{found}");
        }
    }

    #[test]
    fn gpus_that_mps_does_not_share() {
        let mps = mps(Status::Ready, Some(1));
        let why = mps.why_unshared(&gpu(0, "A", &["1g.5gb"]).gpu, 2);
        assert!(why.unwrap().starts_with("MPS shares whole GPUs only"));
        // Volta, with 7.0, is the first with more clients.
        for (compute_capability, most) in [("6.2", 16), ("7.0", 48), ("12.0", 48)] {
            let mut gpu = gpu(0, "A", &[]).gpu;
            gpu.compute_capability = compute_capability.to_owned();
            assert_eq!(mps.why_unshared(&gpu, most), None, "{compute_capability}");
            let why = mps.why_unshared(&gpu, most + 1).unwrap();
            let expected = format!("MPS serves at most {most} clients");
            assert!(why.starts_with(&expected), "{compute_capability}: {why}");
        }
    }

    #[test]
    fn a_whole_gpu_with_a_daemon() {
        let gpu = gpu(0, "A", &[]).gpu;
        assert_eq!(Mps::default().why_unusable(&gpu, None), None);
        assert_eq!(mps(Status::Ready, None).why_unusable(&gpu, None), None);
        // No program can use the GPU: the compute mode is PROHIBITED.
        for status in [
            Status::Starting,
            Status::Dead,
            Status::Failed(String::new()),
        ] {
            assert!(mps(status, None).why_unusable(&gpu, None).is_some());
        }
    }
}
