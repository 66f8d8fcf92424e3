//! `check`: prints what the plugin offers on this node, and why it does not offer a GPU. It needs no kubelet.
//!
//! The command asks the driver, and the running plugin: only that one knows which errors a GPU had. A GPU that the running plugin has
//! withdrawn is unhealthy here, whatever the driver reports about it now.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::sleep_until;

use base::json;
use base::report::{Finding, one_line};
use engines::kubelet_plugin::running::{Offered, OfferedResource, Unanswered, Unhealthy};
use findings::catalog;
use nvidia_host::host::has_no_gpu;

use crate::answer::allocator;
use crate::model::{Device, Resource};
use crate::monitor::message::Sample;
use crate::monitor::supervisor;
use crate::monitor::update::Update;
use crate::node::{Node, Offer, host};
use crate::settings::Settings;
use crate::strategy::Choice;

const HEALTHY: &str = "Healthy";
const UNHEALTHY: &str = "Unhealthy";

/// The exit status if a GPU is sick, or a setting is wrong for this node.
const DEGRADED: u8 = 1;
/// The exit status if there are GPUs, and none can be offered.
const NOTHING: u8 = 3;
/// The time for the monitor to start, in addition to the time limit of a call.
const MARGIN: Duration = Duration::from_secs(5);

/// The document of `--json`, whose schema is `docs/schemas/kubelet-plugin-check.json`.
#[derive(Debug, Serialize)]
struct Document {
    version: u32,
    running: RunningEntry,
    strategy: StrategyEntry,
    resources: Vec<ResourceEntry>,
    findings: Vec<FindingEntry>,
}

/// Whether the running plugin has reported its devices.
#[derive(Debug, Serialize)]
struct RunningEntry {
    /// `None` if it is not known
    active: Option<bool>,
    why: Option<String>,
}

#[derive(Debug, Serialize)]
struct StrategyEntry {
    names: Vec<String>,
    why: String,
}

#[derive(Debug, Serialize)]
struct ResourceEntry {
    name: String,
    /// Whether the kubelet has the running plugin's list
    registered: Option<bool>,
    devices: Vec<DeviceEntry>,
}

#[derive(Debug, Serialize)]
struct DeviceEntry {
    id: String,
    health: &'static str,
    numa: Vec<u32>,
    why: Option<String>,
    since: Option<String>,
}

#[derive(Debug, Serialize)]
struct FindingEntry {
    id: &'static str,
    severity: &'static str,
    what: String,
    fix: String,
}

/// Asks the driver once, and reports what the node offers. `findings` are those about the settings, `offered` is the answer of the running
/// plugin.
///
/// # Errors
/// If the monitor cannot be started.
pub async fn check(
    settings: &Settings,
    config_path: Option<&Path>,
    choice: &Choice,
    findings: &[Finding],
    offered: &Result<Offered, Unanswered>,
) -> Result<Report> {
    let (updates, mut received) = mpsc::channel(64);
    let gpus = host::kernel_gpus(&settings.common, "the driver does not answer").unwrap_or_default();
    let mut node = Node::new(settings.clone(), gpus, Instant::now());
    let time_limit = settings.plugin.nvml_timeout;
    let deadline = Instant::now() + time_limit + MARGIN;
    let mut problem = None;
    let collect = async {
        let mut unanswered: Option<BTreeSet<String>> = None;
        while unanswered.as_ref().is_none_or(|gpus| !gpus.is_empty()) {
            let Some(update) = received.recv().await else { return };
            match &update {
                Update::Snapshot(snapshot) => {
                    unanswered = Some(snapshot.inventory.gpus.iter().map(|gpu| gpu.uuid.clone()).collect());
                }
                Update::Sample(Sample { gpu, .. }) => drop(unanswered.as_mut().map(|gpus| gpus.remove(gpu))),
                Update::Silent { gpu: Some(gpu), .. } => drop(unanswered.as_mut().map(|gpus| gpus.remove(gpu))),
                Update::Absent(why) | Update::Silent { gpu: None, why } => {
                    problem = Some(why.clone());
                    unanswered = Some(BTreeSet::new());
                }
                Update::Event(_) | Update::LetGo => {}
            }
            node.apply(&update, Instant::now());
        }
    };
    tokio::select! {
        () = collect => {}
        () = sleep_until(deadline.into()) => {}
        error = supervisor::supervise(supervisor::Options::new(config_path, settings, false), updates) => return Err(error),
    }
    node.set_numa_nodes(host::numa_nodes(&settings.common, node.gpus()).unwrap_or_default());
    // A node without a GPU needs no driver.
    let problem = problem
        .filter(|_| !has_no_gpu(&settings.common))
        .map(|why| Finding::new(&catalog::PLUGIN_DRIVER, why, "run \"oci-nvidia-hook doctor\" on the node"));
    Ok(Report::new(settings, choice, &node.offer(), problem.iter().chain(findings), offered))
}

/// What the node offers, as `check` reports it.
#[derive(Debug)]
pub struct Report {
    document: Document,
    has_gpus: bool,
}

impl Report {
    /// Creates the report. For each healthy device, the report includes the result of Allocate, which finds a missing device
    /// node. `findings` are added to those of the offer.
    #[must_use]
    pub fn new<'a>(
        settings: &Settings,
        choice: &Choice,
        offer: &'a Offer,
        findings: impl Iterator<Item = &'a Finding>,
        offered: &Result<Offered, Unanswered>,
    ) -> Self {
        let running = offered.as_ref().ok();
        let other = running.and_then(|running| other_devices(offer, running));
        let findings = findings.chain(&offer.findings).map(finding_entry);
        let findings = findings.chain(other.iter().map(finding_entry)).collect();
        let asked = Asked { settings, choice, offer, running };
        let mut resources: Vec<_> = offer.resources.iter().map(|resource| asked.resource(resource)).collect();
        running.iter().for_each(|running| add_withdrawn(&mut resources, offer, running));
        let names = choice.strategies.iter().map(|strategy| strategy.name()).collect();
        let strategy = StrategyEntry { names, why: choice.why.clone() };
        let running = RunningEntry {
            active: match offered {
                Ok(_) => Some(true),
                Err(Unanswered::NotRunning) => Some(false),
                Err(Unanswered::Denied | Unanswered::Failed(_)) => None,
            },
            why: offered.as_ref().err().map(Unanswered::to_string),
        };
        let document = Document { version: json::VERSION, running, strategy, resources, findings };
        Self { document, has_gpus: !offer.gpus.is_empty() }
    }

    /// Returns the JSON document.
    ///
    /// # Errors
    /// Those of serde_json.
    pub fn to_json(&self) -> Result<String> {
        Ok(json::pretty(&self.document)? + "\n")
    }

    /// Returns the report as text.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for ResourceEntry { name, registered, devices } in &self.document.resources {
            let healthy = devices.iter().filter(|device| device.why.is_none()).count();
            writeln!(text, "{name}: {healthy} of {} devices can be allocated", devices.len()).ok();
            if *registered == Some(false) {
                writeln!(text, "  the kubelet has no connection to the running plugin for this resource").ok();
            }
            for device in devices {
                let numa = device.numa.first().map(|node| format!(", NUMA node {node}")).unwrap_or_default();
                let why = device.why.as_ref().map(|why| format!(": {}", one_line(why))).unwrap_or_default();
                let since =
                    device.since.as_ref().map(|since| format!(" (since {})", one_line(since))).unwrap_or_default();
                writeln!(text, "  {} {}{numa}{why}{since}", device.id, device.health.to_ascii_lowercase()).ok();
            }
        }
        if self.document.resources.is_empty() {
            let why = if self.has_gpus { "no GPU of this node is offered" } else { "this node has no GPU to offer" };
            writeln!(text, "{why}").ok();
        }
        if !self.document.resources.is_empty() {
            let health = match &self.document.running.why {
                None => "the running plugin reports this health to the kubelet",
                Some(why) => &format!("{}: this is what it would offer", one_line(why)),
            };
            writeln!(text, "{health}").ok();
            let StrategyEntry { names, why } = &self.document.strategy;
            writeln!(text, "containers get their devices with {} ({})", names.join(", "), one_line(why)).ok();
        }
        for FindingEntry { id, severity, what, fix } in &self.document.findings {
            writeln!(text, "{id} {severity}: {}", one_line(what)).ok();
            if !fix.is_empty() {
                writeln!(text, "  hint: {}", one_line(fix)).ok();
            }
        }
        text
    }

    /// Returns the exit status: 0 if everything can be allocated, 1 if something is degraded, 3 if there are GPUs and none can be allocated.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        let devices: Vec<_> = self.document.resources.iter().flat_map(|resource| &resource.devices).collect();
        let nothing = !devices.iter().any(|device| device.why.is_none());
        let has_errors = self.document.findings.iter().any(|finding| finding.severity == "error");
        match () {
            () if nothing && (self.has_gpus || has_errors) => ExitCode::from(NOTHING),
            () if devices.iter().any(|device| device.why.is_some()) => ExitCode::from(DEGRADED),
            () if self.document.findings.iter().any(|finding| finding.severity != "note") => ExitCode::from(DEGRADED),
            () => ExitCode::SUCCESS,
        }
    }
}

/// What the entries of devices are made of.
struct Asked<'a> {
    settings: &'a Settings,
    choice: &'a Choice,
    /// What the driver reported
    offer: &'a Offer,
    /// What the running plugin reported
    running: Option<&'a Offered>,
}

impl Asked<'_> {
    fn resource(&self, resource: &Resource) -> ResourceEntry {
        let is_live = |other: &OfferedResource| other.name == resource.name && other.is_live;
        ResourceEntry {
            name: resource.name.clone(),
            registered: self.running.map(|running| running.resources.iter().any(is_live)),
            devices: resource.devices.iter().map(|device| self.device(resource, device)).collect(),
        }
    }

    fn device(&self, resource: &Resource, device: &Device) -> DeviceEntry {
        let numa = device.numa_node.into_iter().collect();
        if let Some(unhealthy) = self.running.and_then(|running| running.unhealthy(&device.gpu)) {
            return DeviceEntry { numa, ..withdrawn(&device.id, unhealthy) };
        }
        let ids = std::slice::from_ref(&device.id);
        let why = device.unhealthy.clone().or_else(|| {
            let strategies = &self.choice.strategies;
            let answer = allocator::allocate(self.settings, strategies, self.offer, &resource.name, ids);
            Some(answer.err()?.to_string())
        });
        let health = if why.is_none() { HEALTHY } else { UNHEALTHY };
        DeviceEntry { id: device.id.clone(), health, numa, why, since: None }
    }
}

fn withdrawn(id: &str, Unhealthy { why, since }: &Unhealthy) -> DeviceEntry {
    DeviceEntry { id: id.to_owned(), health: UNHEALTHY, numa: Vec::new(), why: Some(why.clone()), since: since.clone() }
}

/// Adds the devices that the running plugin has withdrawn, and that the driver no longer reports.
fn add_withdrawn(resources: &mut Vec<ResourceEntry>, offer: &Offer, running: &Offered) {
    let known: BTreeSet<_> =
        offer.resources.iter().flat_map(|resource| &resource.devices).map(|device| &device.gpu).collect();
    for OfferedResource { name, is_live, devices } in &running.resources {
        let gone = devices.iter().filter(|device| !known.contains(&device.gpu));
        let gone: Vec<_> = gone.filter_map(|device| Some(withdrawn(&device.id, device.unhealthy.as_ref()?))).collect();
        match resources.iter_mut().find(|resource| resource.name == *name) {
            _ if gone.is_empty() => {}
            Some(resource) => resource.devices.extend(gone),
            None => resources.push(ResourceEntry { name: name.clone(), registered: Some(*is_live), devices: gone }),
        }
    }
}

/// Returns a finding if the running plugin offers other devices: it may have been started with other settings, or is not ready.
fn other_devices(offer: &Offer, running: &Offered) -> Option<Finding> {
    let ours =
        offer.resources.iter().flat_map(|resource| resource.devices.iter().map(|device| (&resource.name, &device.id)));
    let theirs = running
        .resources
        .iter()
        .flat_map(|resource| resource.devices.iter().map(|device| (&resource.name, &device.id)));
    if ours.collect::<BTreeSet<_>>() == theirs.collect() {
        return None;
    }
    let counts = running.resources.iter().map(|resource| format!("{} of {}", resource.devices.len(), resource.name));
    let counts: Vec<_> = counts.collect();
    let what =
        if counts.is_empty() { "no devices".to_owned() } else { format!("other devices: {}", counts.join(", ")) };
    Some(Finding::new(
        &catalog::PLUGIN_DIFFERS,
        format!("the running plugin offers {what}"),
        "run this command with the options of the running plugin; if settings have changed, \
         run \"systemctl restart oci-nvidia-kubelet-plugin\"",
    ))
}

fn finding_entry(finding: &Finding) -> FindingEntry {
    FindingEntry {
        id: finding.kind.id,
        severity: finding.kind.severity.name(),
        what: finding.what.clone(),
        fix: finding.fix.clone(),
    }
}
