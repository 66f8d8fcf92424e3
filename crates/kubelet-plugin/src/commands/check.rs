//! `check`: prints what the plugin offers on this node, and why it does not offer a GPU. It needs no kubelet.
//!
//! The command asks the driver, and the running plugin: only that one knows which errors a GPU had. A GPU that the running plugin has
//! withdrawn is unhealthy here, whatever the driver reports about it now.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use serde::Serialize;

use base::json;
use base::report::{Finding, one_line};
use command_line::terminal::{Line, Tone};
use findings::catalog;
use plugin_api::control::{Offered, OfferedResource, Unanswered, Unhealthy};

use super::ask::{Answer, ask};
use super::delivery::Delivery;
use super::mps_report;
use super::report::{self, CheckReport, FindingEntry, Verdict};
use crate::answer::allocator;
use crate::cdi_specs::{self, DEVICE_PLUGIN, VendorSpecs};
use crate::kubelet::socket::KubeletDirs;
use crate::model::{InSpecs, Resource, ResourceDevice};
use crate::node::{Node, Offer, host};
use crate::settings::Settings;
use crate::strategy::Choice;
use nvidia_host::mps::Entry;

const HEALTHY: &str = "Healthy";
const UNHEALTHY: &str = "Unhealthy";

/// The document of `--json`, whose schema is `docs/schemas/kubelet-plugin-check.json`.
#[derive(Debug, Serialize)]
pub struct CheckDocument {
    version: u32,
    running: RunningEntry,
    strategy: StrategyEntry,
    resources: Vec<ResourceEntry>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mps: Vec<Entry>,
    findings: Vec<FindingEntry>,
    verdict: Verdict,
    /// Which sockets the kubelet lacks; the verdict has it if no pod would start
    #[serde(skip)]
    missing: Option<String>,
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
) -> Result<CheckReport<CheckDocument>> {
    let Answer {
        mut node, problem, ..
    } = ask(settings, config_path).await?;
    let made = made_specs(settings, &node);
    if choice.uses_cdi() {
        node.set_in_specs(foresee_specs(settings, made.as_ref(), offered.is_ok()));
    }
    let mut all: Vec<Finding> = problem.into_iter().collect();
    all.extend_from_slice(findings);
    all.extend(choice.finding());
    // The driver lacks a file that each container needs.
    let driver = made.and_then(Result::err);
    let input = CheckInput {
        settings,
        choice,
        offer: &node.offer(),
        running: offered.as_ref().ok(),
        driver: driver.as_deref(),
        missing: KubeletDirs::of(&settings.kubelet_dir).missing(),
    };
    Ok(report(&input, &all, offered))
}

/// Returns the devices of the CDI spec that the plugin would write, or why it would write none; `None` without a driver.
fn made_specs(settings: &Settings, node: &Node) -> Option<Result<BTreeSet<String>, String>> {
    let made = specs(settings).would_have(node.inventory()?);
    Some(made.map_err(|error| format!("{error:#}")))
}

fn specs(settings: &Settings) -> VendorSpecs {
    let (dir, hook) = (Path::new(cdi_specs::DIR), Path::new(cdi_specs::HOOK));
    VendorSpecs::new(DEVICE_PLUGIN, &settings.common, dir, hook)
}

/// Describes this CDI spec. The running plugin may write it to another directory than the default.
fn foresee_specs(
    settings: &Settings,
    made: Option<&Result<BTreeSet<String>, String>>,
    is_running: bool,
) -> InSpecs {
    let mut in_specs = InSpecs {
        are_needed: true,
        ..InSpecs::default()
    };
    let features = host::extra_devices(&settings.common, settings.plugin.extra_devices);
    if let Ok((found, _)) = features {
        in_specs.features = found;
    }
    let Some(made) = made else {
        return in_specs;
    };
    let writable = if is_running {
        Ok(())
    } else {
        specs(settings).check_dir()
    };
    match (writable, made) {
        (Err(error), _) => in_specs.error = Some(format!("{error:#}")),
        (Ok(()), Ok(names)) => in_specs.devices = Arc::new(names.clone()),
        (Ok(()), Err(error)) => in_specs.error = Some(error.clone()),
    }
    in_specs
}

/// Creates the report. For each healthy device, the report includes the result of Allocate, which
/// finds a missing device node. `findings` are added to the findings of the offer.
#[must_use]
pub fn report(
    input: &CheckInput<'_>,
    findings: &[Finding],
    offered: &Result<Offered, Unanswered>,
) -> CheckReport<CheckDocument> {
    let CheckInput {
        choice,
        offer,
        running,
        ref missing,
        ..
    } = *input;
    let mut entries = Vec::new();
    for finding in findings.iter().chain(&offer.findings) {
        entries.push(finding.into());
    }
    let mut resources = Vec::new();
    for resource in offer.resources.iter() {
        resources.push(input.resource(resource));
    }
    if let Some(running) = running {
        if let Some(finding) = other_devices(offer, running) {
            entries.push((&finding).into());
        }
        add_withdrawn(&mut resources, offer, running);
    }
    let (active, why) = match offered {
        Ok(_) => (Some(true), None),
        Err(error @ Unanswered::NotRunning) => (Some(false), Some(error.to_string())),
        Err(error) => (None, Some(error.to_string())),
    };
    let verdict = match offered {
        _ if offer.gpus.is_empty() => Verdict::fails("the node has no GPU"),
        Ok(running) => input.verdict(&resources, running),
        Err(error) => Verdict::of_unanswered(error),
    };
    let document = CheckDocument {
        version: json::VERSION,
        verdict,
        running: RunningEntry { active, why },
        strategy: StrategyEntry {
            names: choice.names(),
            why: choice.why.clone(),
        },
        resources,
        mps: Entry::of(&offer.mps),
        findings: entries,
        missing: missing.clone().filter(|_| running.is_some()),
    };
    CheckReport {
        document,
        has_gpus: !offer.gpus.is_empty(),
    }
}

impl report::JsonReport for CheckDocument {
    fn lines(&self, has_gpus: bool) -> Vec<Line> {
        let mut lines = Vec::new();
        for resource in &self.resources {
            lines.extend(resource.lines());
        }
        if self.resources.is_empty() {
            let why = if has_gpus {
                "no GPU of this node is offered"
            } else {
                "this node has no GPU to offer"
            };
            lines.push(Line::new(why));
            return lines;
        }
        let health = match &self.running.why {
            None => "the running plugin reports this health to the kubelet",
            Some(why) => &format!("{}: this is what it would offer", one_line(why)),
        };
        lines.push(Line::new(health));
        let StrategyEntry { names, why } = &self.strategy;
        let text = format!(
            "containers get their devices with {} ({})",
            names.join(", "),
            one_line(why)
        );
        lines.push(Line::new(text));
        if let Some(missing) = &self.missing {
            let text = format!("cannot find the kubelet: {}", one_line(missing));
            lines.push(Line::new(text));
        }
        lines.extend(self.mps.iter().map(mps_report::line));
        lines
    }

    fn health(&self) -> Vec<bool> {
        let devices = self.resources.iter().flat_map(|resource| &resource.devices);
        devices.map(|device| device.why.is_none()).collect()
    }

    fn findings(&self) -> &[FindingEntry] {
        &self.findings
    }

    fn verdict(&self) -> &Verdict {
        &self.verdict
    }
}

/// Decides whether the kubelet would give a device of the running plugin to a pod.
fn of_kubelet(resources: &[ResourceEntry], running: &Offered, missing: Option<&String>) -> Verdict {
    let mut why = "the running plugin offers no GPU".to_owned();
    for resource in resources {
        for device in &resource.devices {
            match &device.why {
                Some(error) => why.clone_from(error),
                None if is_live(running, &resource.name) => return Verdict::starts(),
                None => {
                    why = format!("the kubelet does not have {}", resource.name);
                    if let Some(missing) = missing {
                        why += &format!(": {missing}");
                    }
                }
            }
        }
    }
    Verdict::fails(why)
}

/// Whether the kubelet has this resource of the running plugin, which can have others.
fn is_live(running: &Offered, name: &str) -> bool {
    let mut offered = running.resources.iter();
    offered.any(|resource| resource.name == name && resource.is_live)
}

impl ResourceEntry {
    fn lines(&self) -> Vec<Line> {
        let is_healthy = |device: &&DeviceEntry| device.why.is_none();
        let text = format!(
            "{}: {} of {} devices can be allocated",
            self.name,
            self.devices.iter().filter(is_healthy).count(),
            self.devices.len()
        );
        let mut lines = vec![Line::new(text)];
        if self.registered == Some(false) {
            let text = "  the kubelet has no connection to the running plugin for this resource";
            lines.push(Line::new(text));
        }
        for (device, others) in report::by_reason(&self.devices, DeviceEntry::reason) {
            lines.push(device.line(others));
        }
        lines
    }
}

impl DeviceEntry {
    /// Returns why the device cannot be allocated, and since when.
    fn reason(&self) -> Option<(&str, Option<&str>)> {
        Some((self.why.as_deref()?, self.since.as_deref()))
    }

    /// Returns the line of the device, and of so many others with the same reason.
    fn line(&self, others: usize) -> Line {
        let tone = if self.health == HEALTHY {
            Tone::Good
        } else {
            Tone::Bad
        };
        let mut details = String::new();
        if let Some(node) = self.numa_node {
            details += &format!(", NUMA node {node}");
        }
        if let Some(why) = &self.why {
            details += &format!(": {}", one_line(why));
        }
        if let Some(since) = &self.since {
            details += &format!(" (since {})", one_line(since));
        }
        let line = Line::new(format!("  {}", report::named(&self.id, others)));
        line.then(tone, self.health.to_ascii_lowercase())
            .then(Tone::Plain, details)
    }
}

/// What the report is made of.
#[derive(Clone, Debug)]
pub struct CheckInput<'a> {
    /// The settings
    pub settings: &'a Settings,
    /// The strategy
    pub choice: &'a Choice,
    /// What the driver reported
    pub offer: &'a Offer,
    /// What the running plugin reported
    pub running: Option<&'a Offered>,
    /// Why the driver lacks a file that each container needs; `None` if it lacks none
    pub driver: Option<&'a str>,
    /// Which sockets the kubelet lacks; `None` if it has them
    pub missing: Option<String>,
}

impl CheckInput<'_> {
    /// Decides whether a pod would start with a device of the running plugin.
    fn verdict(&self, resources: &[ResourceEntry], running: &Offered) -> Verdict {
        let verdict = of_kubelet(resources, running, self.missing.as_ref());
        if !verdict.is_start() {
            return verdict;
        }
        let delivery = Delivery {
            settings: self.settings,
            choice: self.choice,
            running,
            driver: self.driver,
        };
        let mut uuids = BTreeSet::new();
        for device in self.offer.devices() {
            if device.unhealthy.is_none() && running.unhealthy(&device.gpu).is_none() {
                uuids.insert(device.uuid.as_str());
            }
        }
        delivery.verdict(&uuids)
    }

    fn resource(&self, resource: &Resource) -> ResourceEntry {
        let mut devices = Vec::new();
        for device in &resource.devices {
            devices.push(self.device(resource, device));
        }
        ResourceEntry {
            name: resource.name.clone(),
            registered: self.running.map(|running| is_live(running, &resource.name)),
            devices,
        }
    }

    fn device(&self, resource: &Resource, device: &ResourceDevice) -> DeviceEntry {
        if let Some(running) = self.running
            && let Some(unhealthy) = running.unhealthy(&device.gpu)
        {
            return DeviceEntry {
                numa_node: device.numa_node,
                ..withdrawn(&device.id, unhealthy)
            };
        }
        let why = match &device.unhealthy {
            Some(why) => Some(why.clone()),
            None => self.refusal(resource, device),
        };
        let health = if why.is_none() { HEALTHY } else { UNHEALTHY };
        DeviceEntry {
            id: device.id.clone(),
            health,
            numa_node: device.numa_node,
            why,
            since: None,
        }
    }

    /// Returns why Allocate would refuse the device.
    fn refusal(&self, resource: &Resource, device: &ResourceDevice) -> Option<String> {
        let ids = std::slice::from_ref(&device.id);
        let sources = allocator::Sources {
            settings: self.settings,
            strategies: &self.choice.strategies,
            offer: self.offer,
            in_specs: &self.offer.in_specs,
        };
        let answer = allocator::allocate(&sources, &resource.name, ids);
        Some(answer.err()?.to_string())
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
    let known: BTreeSet<&String> = offer.devices().map(|device| &device.gpu).collect();
    for found in &running.resources {
        let mut gone = Vec::new();
        for device in &found.devices {
            if let Some(unhealthy) = &device.unhealthy
                && !known.contains(&device.gpu)
            {
                gone.push(withdrawn(&device.id, unhealthy));
            }
        }
        match resources.iter_mut().find(|entry| entry.name == found.name) {
            _ if gone.is_empty() => {}
            Some(resource) => resource.devices.extend(gone),
            None => resources.push(ResourceEntry {
                name: found.name.clone(),
                registered: Some(found.is_live),
                devices: gone,
            }),
        }
    }
}

/// Returns a finding if the running plugin offers other devices: it may have been started with
/// other settings, or is not ready.
fn other_devices(offer: &Offer, running: &Offered) -> Option<Finding> {
    let mut ours = BTreeSet::new();
    for Resource { name, devices } in offer.resources.iter() {
        ours.extend(devices.iter().map(|device| (name, &device.id)));
    }
    let mut theirs = BTreeSet::new();
    let mut counts = Vec::new();
    for OfferedResource { name, devices, .. } in &running.resources {
        theirs.extend(devices.iter().map(|device| (name, &device.id)));
        counts.push(format!("{} of {name}", devices.len()));
    }
    if ours == theirs {
        return None;
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_several_resources_is_live() {
        let resource = |name: &str, is_live| OfferedResource {
            name: name.to_owned(),
            is_live,
            ..OfferedResource::default()
        };
        let running = Offered {
            resources: vec![
                resource("a", true),
                resource("b", false),
                resource("c", true),
            ],
            ..Offered::default()
        };
        for (name, expected) in [("a", true), ("b", false), ("c", true), ("d", false)] {
            assert_eq!(is_live(&running, name), expected, "{name}");
        }
        assert!(!is_live(&Offered::default(), "a"));
    }

    #[test]
    fn whether_a_pod_would_start() {
        let device = |why: Option<&str>| DeviceEntry {
            id: "GPU-0".to_owned(),
            health: HEALTHY,
            numa_node: None,
            why: why.map(str::to_owned),
            since: None,
        };
        let lost = "the GPU is lost";
        let not_live = "the kubelet does not have nvidia.com/gpu";
        for (whys, is_live, expected) in [
            (vec![None], true, None),
            (vec![Some(lost), None], true, None),
            (vec![Some(lost)], true, Some(lost)),
            (vec![None], false, Some(not_live)),
            (vec![], true, Some("the running plugin offers no GPU")),
        ] {
            let resources = [ResourceEntry {
                name: "nvidia.com/gpu".to_owned(),
                registered: Some(is_live),
                devices: whys.iter().map(|why| device(*why)).collect(),
            }];
            let running = Offered {
                resources: vec![OfferedResource {
                    name: "nvidia.com/gpu".to_owned(),
                    is_live,
                    ..OfferedResource::default()
                }],
                ..Offered::default()
            };
            let found = of_kubelet(&resources, &running, None);
            match expected {
                None => assert_eq!(found, Verdict::starts()),
                Some(why) => {
                    let text = serde_json::to_string(&found).unwrap();
                    assert!(text.contains("false") && text.contains(why), "{text}");
                }
            }
        }
    }
}
