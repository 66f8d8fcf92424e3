//! `check --interface dra`: prints the devices that claims can have, the slices that would be published, and what the node's credentials
//! permit. It needs no kubelet.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;
use base::json;
use base::report::{Finding, one_line};
use command_line::terminal::{Line, Tone};
use engines::cdi::CdiVerdict;
use findings::catalog;
use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use plugin_api::control::{Offered, Unanswered};
use serde::Serialize;

use super::ask::{Answer, ask};
use super::delivery::{spec_dir, spec_problem};
use super::mps_report;
use super::report::{self, CheckReport, FindingEntry, Verdict};
use crate::dra::DriverOptions;
use crate::dra::access::NO_SLICES;
use crate::dra::devices::{self, ClaimDevice, Sources};
use crate::dra::probe::{Probe, Published, Right, probe};
use crate::dra::slice::{Owner, specs};
use crate::kubelet::socket::KubeletDirs;
use crate::node::Node;
use crate::node::facts::NvmlFacts;
use crate::node::gpus::NodeGpu;
use crate::node::health::GpuFailure;
use crate::node::host;
use crate::settings::Settings;
use crate::strategy;
use nvidia_host::mps::Entry;

/// The document of `--json`, whose schema is `docs/schemas/kubelet-plugin-check-dra.json`.
#[derive(Debug, Serialize)]
pub struct ClaimsDocument {
    version: u32,
    driver: String,
    api: Probe,
    devices: Vec<DeviceEntry>,
    slices: Vec<ResourceSliceSpec>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mps: Vec<Entry>,
    findings: Vec<FindingEntry>,
    verdict: Verdict,
}

#[derive(Debug, Serialize)]
struct DeviceEntry {
    name: String,
    uuid: String,
    healthy: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

/// Asks the driver and the API server once. `findings` concern the settings, `offered` is the answer of the running plugin.
///
/// # Errors
/// If the monitor cannot be started.
pub async fn check(
    settings: &Settings,
    config_path: Option<&Path>,
    findings: &[Finding],
    offered: &Result<Offered, Unanswered>,
) -> Result<CheckReport<ClaimsDocument>> {
    let Answer {
        node,
        facts,
        problem,
    } = ask(settings, config_path).await?;
    let devices = devices_of(settings, &node, &facts, offered.as_ref().ok());
    let options = DriverOptions::new(settings);
    let slices_of = |node: &str, has_shares: bool| {
        let owner = Owner {
            driver: &options.driver,
            node,
            effect: options.effect,
            has_taints: true,
            has_shares,
        };
        specs(&devices, &owner)
    };
    let api = probe(&options, slices_of).await;
    let cdi = strategy::claims_verdict(&settings.kubelet_dir, &spec_dir(offered));
    let engine = strategy::claims_finding(&cdi);
    let (offer, refused) = (node.offer(), refusals(&api));
    let of_settings = problem.iter().chain(findings);
    let of_node = offer.findings.iter().chain(&refused).chain(&engine);
    let entries = of_settings.chain(of_node).map(FindingEntry::from).collect();
    let verdict = match offered {
        Ok(running) => {
            let missing = KubeletDirs::of(&settings.kubelet_dir).missing();
            let verdict = verdict(&devices, running, &api, engine.as_ref(), missing);
            match cdi {
                CdiVerdict::Unknown(why) if verdict.is_start() => {
                    Verdict::unknown(strategy::unknown_cdi(&why))
                }
                _ => verdict,
            }
        }
        Err(Unanswered::NotRunning) => Verdict::fails("no DRA driver runs on this host"),
        Err(error) => Verdict::of_unanswered(error),
    };
    let document = ClaimsDocument {
        verdict,
        version: json::VERSION,
        driver: options.driver.clone(),
        slices: slices_of(api.node.as_deref().unwrap_or_default(), true),
        api,
        devices: devices.iter().map(entry).collect(),
        mps: Entry::of(&node.mps().daemons),
        findings: entries,
    };
    Ok(CheckReport {
        document,
        has_gpus: !node.gpus().is_empty(),
    })
}

/// Returns the devices of the node. `running` is the answer of the running plugin, which has seen the errors of a GPU.
fn devices_of(
    settings: &Settings,
    node: &Node,
    facts: &NvmlFacts,
    running: Option<&Offered>,
) -> Vec<ClaimDevice> {
    let pcie_roots = host::pcie_roots(&settings.common, node.gpus()).unwrap_or_default();
    let sources = Sources {
        gpus: node.gpus(),
        facts,
        numa_nodes: node.numa_nodes(),
        pcie_roots: &pcie_roots,
        settings: &settings.plugin,
        limits: node.limits(),
        mps: &node.mps().daemons,
    };
    let health = node.health();
    let of_running = |uuid: &str| Some(running?.unhealthy(uuid)?.why.clone());
    devices::devices(&sources, &[], |NodeGpu { gpu, .. }| {
        let why = of_running(&gpu.uuid).or_else(|| health.get(&gpu.uuid)?.clone())?;
        Some(GpuFailure {
            why,
            driver_silent: false,
        })
    })
}

/// Returns a finding for each right that the node lacks.
fn refusals(api: &Probe) -> Vec<Finding> {
    let mut findings = Vec::new();
    for Right { what, error } in &api.rights {
        if let Some(error) = error {
            // The text of an admission policy or an authorizer says what to do.
            let fix = if error.contains(NO_SLICES) {
                "use the device-plugin mode on this cluster, or update the cluster and enable resource.k8s.io/v1"
            } else if error.contains("denied") || error.contains("forbidden") {
                "give these credentials the right, or name other ones with `--kubeconfig`: see claims.md"
            } else if rustix::process::geteuid().is_root() {
                "name the kubelet's kubeconfig file with `--kubeconfig`; `systemctl cat kubelet` shows it"
            } else {
                "run this command as root; on a node whose kubelet has other credentials, name a file with `--kubeconfig`"
            };
            let what = if error.starts_with("cannot ") {
                error.clone()
            } else {
                format!("cannot {what}: {error}")
            };
            findings.push(Finding::new(&catalog::API_SERVER, what, fix));
        }
    }
    findings
}

fn entry(device: &ClaimDevice) -> DeviceEntry {
    let why = device.unhealthy.clone();
    DeviceEntry {
        name: device.name.clone(),
        uuid: device.uuid.clone(),
        healthy: why.is_none(),
        why,
    }
}

impl report::JsonReport for ClaimsDocument {
    fn lines(&self, _: bool) -> Vec<Line> {
        let counts = format!(
            "{}: {} of {} devices can be allocated",
            self.driver,
            self.devices.iter().filter(|device| device.healthy).count(),
            self.devices.len()
        );
        let mut lines = vec![Line::new(counts)];
        for (device, others) in report::by_reason(&self.devices, |device| device.why.as_deref()) {
            lines.push(device.line(others));
        }
        lines.extend(self.mps.iter().map(mps_report::line));
        if let Some(file) = &self.api.kubeconfig {
            lines.push(Line::new(format!("credentials: {}", file.display())));
        }
        if let Some(node) = &self.api.node {
            lines.push(Line::new(format!("node: {node}")));
        }
        for Right { what, error } in &self.api.rights {
            let (tone, word) = if error.is_none() {
                (Tone::Good, "yes")
            } else {
                (Tone::Bad, "no")
            };
            lines.push(Line::new(format!("  {what}: ")).then(tone, word));
        }
        if let Some(Published {
            devices,
            generation,
            current,
        }) = &self.api.published
        {
            let state = if *current { "as above" } else { "not as above" };
            lines.push(Line::new(format!(
                "published: {devices} devices, generation {generation}, {state}"
            )));
        }
        let slices = format!("slices: {}; --json prints them", self.slices.len());
        lines.push(Line::new(slices));
        lines
    }

    fn health(&self) -> Vec<bool> {
        self.devices.iter().map(|device| device.healthy).collect()
    }

    fn findings(&self) -> &[FindingEntry] {
        &self.findings
    }

    fn verdict(&self) -> &Verdict {
        &self.verdict
    }
}

/// Decides whether a pod with a claim would start with a device of the running driver.
fn verdict(
    devices: &[ClaimDevice],
    running: &Offered,
    api: &Probe,
    engine: Option<&Finding>,
    missing: Option<String>,
) -> Verdict {
    if let Some(finding) = engine {
        return Verdict::fails(&finding.what);
    }
    let Some(driver) = &running.driver else {
        return Verdict::fails("the running plugin is not in DRA mode");
    };
    if !driver.is_registered {
        let mut why = format!("the kubelet has not registered {:?}", driver.name);
        if let Some(missing) = missing {
            why += &format!(": {missing}");
        }
        return Verdict::fails(why);
    }
    if let Some(why) = driver.problem.as_ref().or(driver.unpublished.as_ref()) {
        return Verdict::fails(why);
    }
    if let Some(why) = &api.refused {
        return Verdict::fails(why);
    }
    let mut why = "the node has no GPU for claims".to_owned();
    let mut healthy = BTreeSet::new();
    for device in devices {
        match &device.unhealthy {
            Some(error) => why.clone_from(error),
            None => drop(healthy.insert(device.uuid.as_str())),
        }
    }
    if healthy.is_empty() {
        return Verdict::fails(why);
    }
    if api.published.as_ref().is_some_and(|api| api.devices == 0) {
        return Verdict::fails("the API server has no devices of this node yet");
    }
    spec_problem(running, &healthy).map_or_else(Verdict::starts, Verdict::fails)
}

impl DeviceEntry {
    /// Returns the line of the device, and of so many others with the same reason.
    fn line(&self, others: usize) -> Line {
        let (tone, word) = if self.healthy {
            (Tone::Good, "healthy")
        } else {
            (Tone::Bad, "unhealthy")
        };
        let mut details = match others {
            0 => format!(", {}", self.uuid),
            _ => String::new(),
        };
        if let Some(why) = &self.why {
            details += &format!(": {}", one_line(why));
        }
        Line::new(format!("  {}", report::named(&self.name, others)))
            .then(tone, word)
            .then(Tone::Plain, details)
    }
}
