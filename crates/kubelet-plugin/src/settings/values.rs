//! The values of settings that have names.

use clap::ValueEnum;

/// How containers get their devices. The order is that in which an answer is arranged: if the variable does not name the devices, it
/// names the directory of the mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceListStrategy {
    /// `NVIDIA_VISIBLE_DEVICES` lists them for the hook.
    Envvar,
    /// Mounts of `/dev/null` list them for the hook.
    VolumeMounts,
    /// The kubelet passes their CDI names to the engine.
    CdiCri,
    /// Annotations of the container contain their CDI names.
    CdiAnnotations,
    /// Device nodes, and a mount of a directory with the driver's files, as on GKE. No hook is needed.
    HostPath,
}

impl DeviceListStrategy {
    /// Returns the name in config.toml.
    #[must_use]
    pub fn name(self) -> String {
        name_of(&self)
    }
}

/// How the devices are named for the hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceIdStrategy {
    /// By UUID.
    Uuid,
    /// By NVML's index, `GPU:MIG` for MIG devices.
    Index,
}

/// How MIG devices are offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MigStrategy {
    /// Not at all: a GPU in MIG mode is offered as a GPU.
    None,
    /// As the resource of whole GPUs, if all GPUs have MIG devices of one profile.
    Single,
    /// Each profile as a separate resource.
    Mixed,
}

/// How several containers share a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SharingStrategy {
    /// The driver runs their work in turns, and nothing limits their memory.
    #[default]
    TimeSlicing,
    /// They are clients of the MPS daemon of the GPU, which limits their memory.
    Mps,
}

impl SharingStrategy {
    /// Returns the name in config.toml.
    #[must_use]
    pub fn name(self) -> String {
        name_of(&self)
    }
}

/// Which replicas containers get first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Allocation {
    /// Replicas of the GPU with the fewest containers.
    Distributed,
    /// Replicas of the GPU with the most containers.
    Packed,
}

/// How the kubelet learns of the GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Interface {
    /// As resources of a device plugin
    #[default]
    DevicePlugin,
    /// As devices for claims: Dynamic Resource Allocation
    Dra,
}

/// What happens if a device that claims can have does not work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TaintEffect {
    /// No pod gets it any more.
    #[default]
    #[value(name = "NoSchedule")]
    NoSchedule,
    /// Pods that have it are evicted too.
    #[value(name = "NoExecute")]
    NoExecute,
    /// Only the taint shows it.
    #[value(name = "None")]
    None,
}

impl TaintEffect {
    /// Returns the name in the API.
    #[must_use]
    pub fn name(self) -> String {
        name_of(&self)
    }
}

/// The program whose names the metrics of GPUs have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MetricsNames {
    /// GKE's device plugin
    Gke,
    /// NVIDIA's DCGM exporter
    Dcgm,
    /// NVIDIA's DCGM exporter, with a series for each container that has the GPU, as the exporter has with
    /// `KUBERNETES_VIRTUAL_GPUS`
    DcgmPerContainer,
}

impl MetricsNames {
    /// Whether these are the names of NVIDIA's DCGM exporter.
    #[must_use]
    pub const fn are_dcgm(self) -> bool {
        matches!(self, Self::Dcgm | Self::DcgmPerContainer)
    }
}

/// Returns the name of a value in config.toml.
fn name_of(value: &impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map(|value| value.get_name().to_owned())
        .unwrap_or_default()
}

/// `"a", "b" or "c"`
pub(super) fn names_of<T: ValueEnum>(conjunction: &str) -> String {
    let names: Vec<String> = T::value_variants()
        .iter()
        .map(|value| format!("{:?}", name_of(value)))
        .collect();
    enumerated(&names, conjunction)
}

/// `a, b or c`
pub(super) fn enumerated(names: &[String], conjunction: &str) -> String {
    match names.split_last() {
        Some((last, [first])) => format!("{first} {conjunction} {last}"),
        Some((last, others)) => format!("{} {conjunction} {last}", others.join(", ")),
        None => String::new(),
    }
}
