//! `check`: prints what the plugin offers on this node, and why it does not offer a GPU. It needs no kubelet.
//!
//! The command asks the driver, and the running plugin: only that one knows which errors a GPU had. A GPU that the running plugin has
//! withdrawn is unhealthy here, whatever the driver reports about it now.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use base::json;
use base::report::{Finding, one_line};
use command_line::terminal::{Line, Terminal, Tone};
use engines::kubelet_plugin::running::{Offered, OfferedResource, Unanswered, Unhealthy};
use findings::catalog;

use super::ask::{Answer, ask};
use crate::answer::allocator;
use crate::model::{Device, Resource};
use crate::node::Offer;
use crate::settings::Settings;
use crate::strategy::Choice;

const HEALTHY: &str = "Healthy";
const UNHEALTHY: &str = "Unhealthy";

/// The exit status if a GPU is sick, or a setting is wrong for this node.
pub(super) const DEGRADED: u8 = 1;
/// The exit status if there are GPUs, and none can be offered.
pub(super) const NOTHING: u8 = 3;

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
    #[serde(skip_serializing_if = "Option::is_none")]
    active: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
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
    #[serde(skip_serializing_if = "Option::is_none")]
    registered: Option<bool>,
    devices: Vec<DeviceEntry>,
}

#[derive(Debug, Serialize)]
struct DeviceEntry {
    id: String,
    health: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    numa_node: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct FindingEntry {
    pub(super) id: &'static str,
    pub(super) severity: &'static str,
    what: String,
    #[serde(skip_serializing_if = "String::is_empty")]
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
    let Answer { node, problem, .. } = ask(settings, config_path).await?;
    Ok(Report::new(
        settings,
        choice,
        &node.offer(),
        problem.iter().chain(findings),
        offered,
    ))
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
        let asked = Asked {
            settings,
            choice,
            offer,
            running,
        };
        let mut resources: Vec<_> = offer
            .resources
            .iter()
            .map(|resource| asked.resource(resource))
            .collect();
        running
            .iter()
            .for_each(|running| add_withdrawn(&mut resources, offer, running));
        let names = choice
            .strategies
            .iter()
            .map(|strategy| strategy.name())
            .collect();
        let strategy = StrategyEntry {
            names,
            why: choice.why.clone(),
        };
        let running = RunningEntry {
            active: match offered {
                Ok(_) => Some(true),
                Err(Unanswered::NotRunning) => Some(false),
                Err(Unanswered::Denied | Unanswered::Failed(_)) => None,
            },
            why: offered.as_ref().err().map(Unanswered::to_string),
        };
        let document = Document {
            version: json::VERSION,
            running,
            strategy,
            resources,
            findings,
        };
        Self {
            document,
            has_gpus: !offer.gpus.is_empty(),
        }
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
    pub fn to_text(&self, terminal: Terminal) -> String {
        terminal.render(&self.lines())
    }

    fn lines(&self) -> Vec<Line> {
        let mut lines = Vec::new();
        for ResourceEntry {
            name,
            registered,
            devices,
        } in &self.document.resources
        {
            let healthy = devices.iter().filter(|device| device.why.is_none()).count();
            lines.push(Line::new(
                2,
                format!(
                    "{name}: {healthy} of {} devices can be allocated",
                    devices.len()
                ),
            ));
            if *registered == Some(false) {
                let text =
                    "  the kubelet has no connection to the running plugin for this resource";
                lines.push(Line::new(4, text));
            }
            lines.extend(devices.iter().map(device_line));
        }
        if self.document.resources.is_empty() {
            let why = if self.has_gpus {
                "no GPU of this node is offered"
            } else {
                "this node has no GPU to offer"
            };
            lines.push(Line::new(2, why));
        } else {
            let health = match &self.document.running.why {
                None => "the running plugin reports this health to the kubelet",
                Some(why) => &format!("{}: this is what it would offer", one_line(why)),
            };
            lines.push(Line::new(2, health));
            let StrategyEntry { names, why } = &self.document.strategy;
            let text = format!(
                "containers get their devices with {} ({})",
                names.join(", "),
                one_line(why)
            );
            lines.push(Line::new(2, text));
        }
        lines.extend(self.document.findings.iter().flat_map(finding_lines));
        lines
    }

    /// Returns the exit status: 0 if everything can be allocated, 1 if something is degraded, 3 if there are GPUs and none can be allocated.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        let devices: Vec<_> = self
            .document
            .resources
            .iter()
            .flat_map(|resource| &resource.devices)
            .collect();
        let nothing = !devices.iter().any(|device| device.why.is_none());
        let has_errors = self
            .document
            .findings
            .iter()
            .any(|finding| finding.severity == "error");
        match () {
            () if nothing && (self.has_gpus || has_errors) => ExitCode::from(NOTHING),
            () if devices.iter().any(|device| device.why.is_some()) => ExitCode::from(DEGRADED),
            () if self
                .document
                .findings
                .iter()
                .any(|finding| finding.severity != "note") =>
            {
                ExitCode::from(DEGRADED)
            }
            () => ExitCode::SUCCESS,
        }
    }
}

/// Describes a finding with its hint.
pub(super) fn finding_lines(
    FindingEntry {
        id,
        severity,
        what,
        fix,
    }: &FindingEntry,
) -> Vec<Line> {
    let line = Line::new(2, format!("{id} ")).then(Tone::of_severity(severity), *severity);
    let mut lines = vec![line.then(Tone::Plain, format!(": {}", one_line(what)))];
    if !fix.is_empty() {
        lines.push(Line::new(8, format!("  hint: {}", one_line(fix))));
    }
    lines
}

fn device_line(
    DeviceEntry {
        id,
        health,
        numa_node,
        why,
        since,
    }: &DeviceEntry,
) -> Line {
    let numa = numa_node
        .map(|node| format!(", NUMA node {node}"))
        .unwrap_or_default();
    let why = why
        .as_ref()
        .map(|why| format!(": {}", one_line(why)))
        .unwrap_or_default();
    let since = since
        .as_ref()
        .map(|since| format!(" (since {})", one_line(since)))
        .unwrap_or_default();
    let tone = if *health == HEALTHY {
        Tone::Good
    } else {
        Tone::Bad
    };
    let line = Line::new(4, format!("  {id} ")).then(tone, health.to_ascii_lowercase());
    line.then(Tone::Plain, format!("{numa}{why}{since}"))
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
            registered: self
                .running
                .map(|running| running.resources.iter().any(is_live)),
            devices: resource
                .devices
                .iter()
                .map(|device| self.device(resource, device))
                .collect(),
        }
    }

    fn device(&self, resource: &Resource, device: &Device) -> DeviceEntry {
        if let Some(unhealthy) = self
            .running
            .and_then(|running| running.unhealthy(&device.gpu))
        {
            return DeviceEntry {
                numa_node: device.numa_node,
                ..withdrawn(&device.id, unhealthy)
            };
        }
        let ids = std::slice::from_ref(&device.id);
        let why = device.unhealthy.clone().or_else(|| {
            let strategies = &self.choice.strategies;
            let answer =
                allocator::allocate(self.settings, strategies, self.offer, &resource.name, ids);
            Some(answer.err()?.to_string())
        });
        let health = if why.is_none() { HEALTHY } else { UNHEALTHY };
        DeviceEntry {
            id: device.id.clone(),
            health,
            numa_node: device.numa_node,
            why,
            since: None,
        }
    }
}

fn withdrawn(id: &str, Unhealthy { why, since }: &Unhealthy) -> DeviceEntry {
    DeviceEntry {
        id: id.to_owned(),
        health: UNHEALTHY,
        numa_node: None,
        why: Some(why.clone()),
        since: since.clone(),
    }
}

/// Adds the devices that the running plugin has withdrawn, and that the driver no longer reports.
fn add_withdrawn(resources: &mut Vec<ResourceEntry>, offer: &Offer, running: &Offered) {
    let known: BTreeSet<_> = offer
        .resources
        .iter()
        .flat_map(|resource| &resource.devices)
        .map(|device| &device.gpu)
        .collect();
    for OfferedResource {
        name,
        is_live,
        devices,
    } in &running.resources
    {
        let gone = devices.iter().filter(|device| !known.contains(&device.gpu));
        let gone: Vec<_> = gone
            .filter_map(|device| Some(withdrawn(&device.id, device.unhealthy.as_ref()?)))
            .collect();
        match resources.iter_mut().find(|resource| resource.name == *name) {
            _ if gone.is_empty() => {}
            Some(resource) => resource.devices.extend(gone),
            None => resources.push(ResourceEntry {
                name: name.clone(),
                registered: Some(*is_live),
                devices: gone,
            }),
        }
    }
}

/// Returns a finding if the running plugin offers other devices: it may have been started with other settings, or is not ready.
fn other_devices(offer: &Offer, running: &Offered) -> Option<Finding> {
    let ours = offer.resources.iter().flat_map(|resource| {
        resource
            .devices
            .iter()
            .map(|device| (&resource.name, &device.id))
    });
    let theirs = running.resources.iter().flat_map(|resource| {
        resource
            .devices
            .iter()
            .map(|device| (&resource.name, &device.id))
    });
    if ours.collect::<BTreeSet<_>>() == theirs.collect() {
        return None;
    }
    let counts = running
        .resources
        .iter()
        .map(|resource| format!("{} of {}", resource.devices.len(), resource.name));
    let counts: Vec<_> = counts.collect();
    let what = if counts.is_empty() {
        "no devices".to_owned()
    } else {
        format!("other devices: {}", counts.join(", "))
    };
    Some(Finding::new(
        &catalog::PLUGIN_DIFFERS,
        format!("the running plugin offers {what}"),
        "run this command with the options of the running plugin; if settings have changed, \
         run \"systemctl restart oci-nvidia-kubelet-plugin\"",
    ))
}

pub(super) fn finding_entry(finding: &Finding) -> FindingEntry {
    FindingEntry {
        id: finding.kind.id,
        severity: finding.kind.severity.name(),
        what: finding.what.clone(),
        fix: finding.fix.clone(),
    }
}
