//! Decides the labels of the node that describe its GPUs, with the names of NVIDIA's GPU Feature Discovery. Pure.
//!
//! Node Feature Discovery reads them from a file ([`mod@file`]), so that the plugin needs no rights in the cluster.

pub mod file;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Display, Write};

use nvidia_host::config::Limits;
use nvidia_host::inventory::Gpu;
use nvidia_host::inventory::limits::permit;

use crate::node::devices::{self, Sharing};
use crate::node::facts::{NvmlFacts, architecture};
use crate::node::gpus::NodeGpu;
use crate::settings::Plugin;
use crate::settings::values::{MigStrategy, SharingStrategy};

/// The longest value of a label.
const MAX_VALUE: usize = 63;
/// The prefix of all labels, also if the resources have another one: charts and node selectors name it.
const PREFIX: &str = "nvidia.com";
/// The labels of whole GPUs
const GPU: &str = "gpu";

/// What the labels contain about the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// The model of the computer
    pub machine: Option<String>,
    /// When the plugin started, in seconds since 1970
    pub started: u64,
    /// The PCI classes of the GPUs, such as `0x030200`, by their addresses in sysfs
    pub classes: BTreeMap<String, String>,
}

/// Returns the lines `name=value`, in the order of the names; without a driver or a GPU, an empty list.
#[must_use]
pub fn lines(
    facts: &NvmlFacts,
    gpus: &[NodeGpu],
    settings: &Plugin,
    limits: &Limits,
    host: &Host,
) -> Vec<String> {
    let is_single = devices::is_single(gpus, settings);
    let gpus: Vec<&NodeGpu> = gpus
        .iter()
        .filter(|gpu| is_permitted(gpu, limits))
        .collect();
    let parts = gpus.iter().flat_map(|gpu| {
        devices::parts(gpu, settings)
            .into_iter()
            .map(move |part| (*gpu, part))
    });
    let permitted = parts.filter(|(gpu, part)| permit(limits, &gpu.gpu, *part));
    let (mut whole, mut migs) = (Vec::new(), Vec::new());
    for (gpu, part) in permitted {
        match part {
            None => whole.push(gpu),
            Some(mig) => migs.extend(gpu.profiles.get(&mig.uuid).map(|profile| Mig {
                gpu,
                uuid: &mig.uuid,
                profile,
            })),
        }
    }
    if facts.driver_version.is_empty() || (whole.is_empty() && migs.is_empty()) {
        return Vec::new();
    }
    let mut labels = Labels::default();
    labels.of_software(facts);
    labels.add("gfd.timestamp", host.started);
    labels.add("gpu.machine", host.machine.as_deref().unwrap_or("unknown"));
    labels.add("gpu.mode", mode(&gpus, &host.classes));
    labels.add("mps.capable", is_mps_capable(&whole, settings));
    let mut known = gpus
        .iter()
        .filter_map(|gpu| facts.properties.get(&gpu.gpu.uuid));
    labels.add(
        "mig.capable",
        known.any(|properties| properties.mig_capable),
    );
    match settings.mig_strategy {
        MigStrategy::None => {}
        MigStrategy::Single => labels.add("mig.strategy", "single"),
        MigStrategy::Mixed => labels.add("mig.strategy", "mixed"),
    }
    labels.of_gpus(facts, &gpus, &whole, settings);
    if settings.mig_strategy == MigStrategy::Mixed || is_single {
        labels.of_migs(facts, &migs, settings, is_single);
    }
    labels.lines()
}

/// Whether the GPU, or a MIG device of it, is among the GPUs of the node for containers.
fn is_permitted(gpu: &NodeGpu, limits: &Limits) -> bool {
    let Gpu { mig_devices, .. } = &gpu.gpu;
    if gpu.gpu.is_display_only() {
        return false;
    }
    permit(limits, &gpu.gpu, None)
        || mig_devices
            .iter()
            .any(|mig| permit(limits, &gpu.gpu, Some(mig)))
}

/// A MIG device that is offered.
#[derive(Clone, Copy)]
struct Mig<'a> {
    gpu: &'a NodeGpu,
    uuid: &'a str,
    profile: &'a str,
}

/// Values by the name without the prefix.
#[derive(Debug, Default)]
struct Labels(BTreeMap<String, String>);

impl Labels {
    fn add(&mut self, name: &str, value: impl Display) {
        let value = sanitized(&value.to_string());
        if !value.is_empty() {
            self.0.insert(name.to_owned(), value);
        }
    }

    fn of_software(&mut self, facts: &NvmlFacts) {
        let driver: Vec<&str> = facts.driver_version.split('.').collect();
        self.add("cuda.driver-version.full", &facts.driver_version);
        // The names of older versions are in use.
        let names = [("major", "major"), ("minor", "minor"), ("revision", "rev")];
        for ((name, old), value) in names.into_iter().zip(driver) {
            self.add(&format!("cuda.driver-version.{name}"), value);
            self.add(&format!("cuda.driver.{old}"), value);
        }
        self.add("cuda.runtime-version.full", &facts.cuda_version);
        for (name, value) in ["major", "minor"]
            .into_iter()
            .zip(facts.cuda_version.split('.'))
        {
            self.add(&format!("cuda.runtime-version.{name}"), value);
            self.add(&format!("cuda.runtime.{name}"), value);
        }
    }

    /// Describes the model of which there are most GPUs: a node has one set of labels.
    fn of_gpus(
        &mut self,
        facts: &NvmlFacts,
        gpus: &[&NodeGpu],
        whole: &[&NodeGpu],
        settings: &Plugin,
    ) {
        // The first one of several with the same number
        let candidates = if whole.is_empty() { gpus } else { whole };
        let Some(gpu) = candidates
            .iter()
            .rev()
            .max_by_key(|gpu| of_model(gpus, &gpu.gpu.model))
        else {
            return;
        };
        let model = &gpu.gpu.model;
        let mut sharing = devices::sharing(model, None, settings);
        if whole.is_empty() {
            sharing.replicas = 0;
        }
        self.of_resource(GPU, model, of_model(gpus, model), &sharing);
        if let Some(memory) = facts
            .properties
            .get(&gpu.gpu.uuid)
            .and_then(|found| found.memory_mib)
        {
            self.add("gpu.memory", memory);
        }
        let Some((major, minor)) = gpu.gpu.compute_capability.split_once('.') else {
            return;
        };
        self.add("gpu.compute.major", major);
        self.add("gpu.compute.minor", minor);
        if let Some(architecture) = architecture(&gpu.gpu.compute_capability) {
            self.add("gpu.family", architecture.to_lowercase().replace(' ', "-"));
        }
    }

    /// Describes the MIG devices, each profile by a resource of its own or, if it is a single one, as GPUs.
    fn of_migs(&mut self, facts: &NvmlFacts, migs: &[Mig<'_>], settings: &Plugin, is_single: bool) {
        let mut by_profile: BTreeMap<&str, Vec<Mig<'_>>> = BTreeMap::new();
        for mig in migs {
            by_profile.entry(mig.profile).or_default().push(*mig);
        }
        for (profile, migs) in by_profile {
            let Some(first) = migs.first() else { continue };
            let name = if is_single {
                GPU.to_owned()
            } else {
                format!("mig-{}", profile.replace('+', "."))
            };
            let model = &first.gpu.gpu.model;
            let sharing = devices::sharing(model, (!is_single).then_some(profile), settings);
            self.of_resource(
                &name,
                &format!("{model}-MIG-{profile}"),
                migs.len(),
                &sharing,
            );
            let Some(parts) = facts.mig_attributes.get(first.uuid) else {
                continue;
            };
            for (suffix, value) in [
                ("multiprocessors", parts.multiprocessors),
                ("slices.gi", parts.gpu_slices),
                ("slices.ci", parts.compute_slices),
                ("engines.copy", parts.engines.copy),
                ("engines.decoder", parts.engines.decoder),
                ("engines.encoder", parts.engines.encoder),
                ("engines.jpeg", parts.engines.jpeg),
                ("engines.ofa", parts.engines.ofa),
            ] {
                self.add(&format!("{name}.{suffix}"), value);
            }
            self.add(&format!("{name}.memory"), parts.memory_mib);
        }
    }

    fn of_resource(&mut self, name: &str, product: &str, count: usize, sharing: &Sharing) {
        let is_shared = sharing.replicas > 1;
        // The name of a renamed resource already marks its devices as shared.
        let suffix = if is_shared && !sharing.is_renamed {
            "-SHARED"
        } else {
            ""
        };
        self.add(
            &format!("{name}.product"),
            format_args!("{product}{suffix}"),
        );
        self.add(&format!("{name}.count"), count);
        self.add(&format!("{name}.replicas"), sharing.replicas);
        self.add(
            &format!("{name}.sharing-strategy"),
            match sharing.strategy {
                SharingStrategy::Mps => "mps",
                SharingStrategy::TimeSlicing if is_shared => "time-slicing",
                SharingStrategy::TimeSlicing => "none",
            },
        );
    }

    fn lines(self) -> Vec<String> {
        self.0
            .into_iter()
            .map(|(name, value)| format!("{PREFIX}/{name}={value}"))
            .collect()
    }
}

/// Whether MPS shares GPUs of the node. The label has this meaning in NVIDIA's stack, where it selects the nodes that run a daemon.
fn is_mps_capable(whole: &[&NodeGpu], settings: &Plugin) -> bool {
    whole.iter().any(|gpu| {
        let sharing = devices::sharing(&gpu.gpu.model, None, settings);
        sharing.strategy == SharingStrategy::Mps && !gpu.gpu.mig_enabled
    })
}

/// Returns the number of GPUs of this model.
fn of_model(gpus: &[&NodeGpu], model: &str) -> usize {
    gpus.iter().filter(|gpu| gpu.gpu.model == model).count()
}

/// Returns a valid value of a label: at most 63 letters, digits, `-`, `_` and `.`, with a letter or a digit at each end.
fn sanitized(text: &str) -> String {
    let mut value = String::new();
    for c in text.trim().chars() {
        let is_allowed = c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        // Writing to a String does not fail.
        value.write_char(if is_allowed { c } else { '-' }).ok();
    }
    let mut value = value.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    value = value.get(..MAX_VALUE).unwrap_or(value);
    value
        .trim_end_matches(|c: char| !c.is_ascii_alphanumeric())
        .to_owned()
}

/// Returns the mode of the GPUs: whether the PCI bus shows them as 3D controllers or as VGA controllers.
fn mode(gpus: &[&NodeGpu], classes: &BTreeMap<String, String>) -> &'static str {
    let modes = gpus
        .iter()
        .map(|gpu| match classes.get(&gpu.gpu.bus_id.in_sysfs()) {
            Some(class) if class.starts_with("0x0302") => "compute",
            Some(class) if class.starts_with("0x0300") => "graphics",
            _ => "unknown",
        });
    let modes: BTreeSet<&str> = modes.collect();
    match modes.first() {
        Some(mode) if modes.len() == 1 => mode,
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests;
