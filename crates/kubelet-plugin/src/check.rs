//! `check`: prints what the plugin would offer on this node, and why it would not offer a GPU. It needs no kubelet.

use std::fmt::Write;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use base::json;
use base::report::{Finding, one_line};

use crate::allocator;
use crate::model::{Device, Resource};
use crate::node::Offer;
use nvidia_host::config::Config;

/// The exit status if a GPU is sick, or a setting is wrong for this node.
const DEGRADED: u8 = 1;
/// The exit status if there are GPUs, and none can be offered.
const NOTHING: u8 = 3;

/// The document of `--json`, whose schema is `docs/schemas/kubelet-plugin-check.json`.
#[derive(Debug, Serialize)]
struct Document {
    version: u32,
    resources: Vec<ResourceEntry>,
    findings: Vec<FindingEntry>,
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

/// What the node offers, as `check` reports it.
#[derive(Debug)]
pub struct Report {
    document: Document,
    has_gpus: bool,
}

impl Report {
    /// Creates the report. A device that works is also requested once, so that a missing device node is found. `problem` is why there
    /// is no offer, if the driver does not answer.
    #[must_use]
    pub fn new(config: &Config, offer: &Offer, problem: Option<&Finding>) -> Self {
        let entry = |resource: &Resource| ResourceEntry {
            name: resource.name.clone(),
            devices: resource.devices.iter().map(|device| device_entry(config, offer, resource, device)).collect(),
        };
        let findings = problem.into_iter().chain(&offer.findings).map(finding_entry).collect();
        let resources = offer.resources.iter().map(entry).collect();
        let document = Document { version: json::VERSION, resources, findings };
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
        let devices = || self.document.resources.iter().flat_map(|resource| &resource.devices);
        let nothing = !devices().any(|device| device.why.is_none());
        let has_errors = self.document.findings.iter().any(|finding| finding.severity == "error");
        match () {
            () if nothing && (self.has_gpus || has_errors) => ExitCode::from(NOTHING),
            () if devices().any(|device| device.why.is_some()) => ExitCode::from(DEGRADED),
            () if self.document.findings.iter().any(|finding| finding.severity != "note") => ExitCode::from(DEGRADED),
            () => ExitCode::SUCCESS,
        }
    }
}

fn device_entry(config: &Config, offer: &Offer, resource: &Resource, device: &Device) -> DeviceEntry {
    let refused = || allocator::allocate(config, offer, &resource.name, std::slice::from_ref(&device.id)).err();
    let why = device.unhealthy.clone().or_else(|| refused().map(|refusal| refusal.to_string()));
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
