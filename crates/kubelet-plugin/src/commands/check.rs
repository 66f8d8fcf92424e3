//! `check`: prints what the plugin would offer on this node, and why it would not offer a GPU. It needs no kubelet.

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
    strategy: StrategyEntry,
    resources: Vec<ResourceEntry>,
    findings: Vec<FindingEntry>,
}

#[derive(Debug, Serialize)]
struct StrategyEntry {
    names: Vec<String>,
    why: String,
}

#[derive(Debug, Serialize)]
struct ResourceEntry {
    name: String,
    devices: Vec<DeviceEntry>,
}

#[derive(Debug, Serialize)]
struct DeviceEntry {
    id: String,
    health: &'static str,
    numa: Vec<u32>,
    why: Option<String>,
}

#[derive(Debug, Serialize)]
struct FindingEntry {
    id: &'static str,
    severity: &'static str,
    what: String,
    fix: String,
}

/// Asks the driver once, and reports what the node would offer. `findings` are those about the settings.
///
/// # Errors
/// If the monitor cannot be started.
pub async fn check(
    settings: &Settings,
    config_path: Option<&Path>,
    choice: &Choice,
    findings: &[Finding],
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
    Ok(Report::new(settings, choice, &node.offer(), problem.iter().chain(findings)))
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
    ) -> Self {
        let findings = findings.chain(&offer.findings).map(finding_entry).collect();
        let resources = offer.resources.iter();
        let resources = resources.map(|resource| resource_entry(settings, choice, offer, resource)).collect();
        let names = choice.strategies.iter().map(|strategy| strategy.name()).collect();
        let strategy = StrategyEntry { names, why: choice.why.clone() };
        let document = Document { version: json::VERSION, strategy, resources, findings };
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
        for ResourceEntry { name, devices } in &self.document.resources {
            let healthy = devices.iter().filter(|device| device.why.is_none()).count();
            writeln!(text, "{name}: {healthy} of {} devices can be allocated", devices.len()).ok();
            for device in devices {
                let numa = device.numa.first().map(|node| format!(", NUMA node {node}")).unwrap_or_default();
                let why = device.why.as_ref().map(|why| format!(": {}", one_line(why))).unwrap_or_default();
                writeln!(text, "  {} {}{numa}{why}", device.id, device.health.to_ascii_lowercase()).ok();
            }
        }
        if self.document.resources.is_empty() {
            let why = if self.has_gpus { "no GPU of this node is offered" } else { "this node has no GPU to offer" };
            writeln!(text, "{why}").ok();
        }
        if !self.document.resources.is_empty() {
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

fn resource_entry(settings: &Settings, choice: &Choice, offer: &Offer, resource: &Resource) -> ResourceEntry {
    let devices = resource.devices.iter();
    let devices = devices.map(|device| device_entry(settings, choice, offer, resource, device)).collect();
    ResourceEntry { name: resource.name.clone(), devices }
}

fn device_entry(
    settings: &Settings,
    choice: &Choice,
    offer: &Offer,
    resource: &Resource,
    device: &Device,
) -> DeviceEntry {
    let ids = std::slice::from_ref(&device.id);
    let why = device.unhealthy.clone().or_else(|| {
        let answer = allocator::allocate(settings, &choice.strategies, offer, &resource.name, ids);
        Some(answer.err()?.to_string())
    });
    DeviceEntry {
        id: device.id.clone(),
        health: if why.is_none() { "Healthy" } else { "Unhealthy" },
        numa: device.numa_node.into_iter().collect(),
        why,
    }
}

fn finding_entry(finding: &Finding) -> FindingEntry {
    FindingEntry {
        id: finding.kind.id,
        severity: finding.kind.severity.name(),
        what: finding.what.clone(),
        fix: finding.fix.clone(),
    }
}
