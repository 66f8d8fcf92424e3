//! `check --interface dra`: prints the devices that claims can have, the slices that would be published, and what the node's credentials
//! permit. It needs no kubelet.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use base::json;
use base::report::{Finding, one_line};
use command_line::terminal::{Line, Terminal, Tone};
use engines::kubelet_plugin::running::{Offered, Unanswered};
use findings::catalog;
use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use serde::Serialize;

use super::ask::{Answer, ask};
use super::check::{DEGRADED, FindingEntry, NOTHING, finding_entry, finding_lines};
use crate::dra::Options;
use crate::dra::devices::{self, Device, Places};
use crate::dra::probe::{Probe, Published, Right, probe};
use crate::dra::slice::{Owner, specs};
use crate::node::gpus::NodeGpu;
use crate::node::health::Failure;
use crate::node::host;
use crate::settings::Settings;

/// The document of `--json`, whose schema is `docs/schemas/kubelet-plugin-check-dra.json`.
#[derive(Debug, Serialize)]
struct Document {
    version: u32,
    driver: String,
    api: Probe,
    devices: Vec<DeviceEntry>,
    slices: Vec<ResourceSliceSpec>,
    findings: Vec<FindingEntry>,
}

#[derive(Debug, Serialize)]
struct DeviceEntry {
    name: String,
    uuid: String,
    healthy: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

/// What the node has for claims.
#[derive(Debug)]
pub struct Report {
    document: Document,
    has_gpus: bool,
}

/// Asks the driver and the API server once. `findings` are those about the settings, `offered` is the answer of the running plugin.
///
/// # Errors
/// If the monitor cannot be started.
pub async fn check(
    settings: &Settings,
    config_path: Option<&Path>,
    findings: &[Finding],
    offered: &Result<Offered, Unanswered>,
) -> Result<Report> {
    let Answer {
        node,
        facts,
        problem,
    } = ask(settings, config_path).await?;
    let pcie_roots = host::pcie_roots(&settings.common, node.gpus()).unwrap_or_default();
    let places = Places {
        numa_nodes: node.numa_nodes(),
        pcie_roots: &pcie_roots,
    };
    let health = node.health();
    let limited = (&settings.plugin, node.limits());
    // The running plugin has seen the errors of a GPU.
    let of_running = |uuid: &str| Some(offered.as_ref().ok()?.unhealthy(uuid)?.why.clone());
    let devices = devices::devices(
        node.gpus(),
        &facts,
        places,
        limited,
        &[],
        |NodeGpu { gpu, .. }| {
            let why = of_running(&gpu.uuid).or_else(|| health.get(&gpu.uuid)?.clone())?;
            Some(Failure {
                why,
                is_of_driver: false,
            })
        },
    );
    let options = Options::new(settings);
    let owner = |node: &str| {
        specs(
            &devices,
            &Owner {
                driver: &options.driver,
                node,
                effect: options.effect,
                has_taints: true,
            },
        )
    };
    let api = probe(&options, owner).await;
    let refused = api.rights.iter().filter_map(refusal);
    let offer = node.offer();
    let findings = problem
        .iter()
        .chain(findings)
        .chain(&offer.findings)
        .map(finding_entry);
    let findings: Vec<_> = findings
        .chain(refused.map(|finding| finding_entry(&finding)))
        .collect();
    let slices = owner(api.node.as_deref().unwrap_or_default());
    let entries = devices.iter().map(entry).collect();
    let document = Document {
        version: json::VERSION,
        driver: options.driver.clone(),
        api,
        devices: entries,
        slices,
        findings,
    };
    Ok(Report {
        document,
        has_gpus: !node.gpus().is_empty(),
    })
}

fn refusal(Right { what, error }: &Right) -> Option<Finding> {
    let what = format!("cannot {what}: {}", error.as_ref()?);
    let fix = "run this command as root; on a node whose kubelet has other credentials, name a file with `--kubeconfig`";
    Some(Finding::new(&catalog::API_SERVER, what, fix))
}

fn entry(device: &Device) -> DeviceEntry {
    let why = device.unhealthy.clone();
    DeviceEntry {
        name: device.name.clone(),
        uuid: device.uuid.clone(),
        healthy: why.is_none(),
        why,
    }
}

impl Report {
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
        let Document {
            driver,
            api,
            devices,
            slices,
            findings,
            ..
        } = &self.document;
        let healthy = devices.iter().filter(|device| device.healthy).count();
        let counts = format!(
            "{driver}: {healthy} of {} devices can be allocated",
            devices.len()
        );
        let mut lines = vec![Line::new(2, counts)];
        lines.extend(devices.iter().map(device_line));
        let kubeconfig = api
            .kubeconfig
            .as_ref()
            .map(|file| format!("credentials: {}", file.display()));
        let node = api.node.as_ref().map(|node| format!("node: {node}"));
        lines.extend(
            [kubeconfig, node]
                .into_iter()
                .flatten()
                .map(|text| Line::new(2, text)),
        );
        for Right { what, error } in &api.rights {
            let (tone, word) = if error.is_none() {
                (Tone::Good, "yes")
            } else {
                (Tone::Bad, "no")
            };
            lines.push(Line::new(4, format!("  {what}: ")).then(tone, word));
        }
        if let Some(Published {
            devices,
            generation,
            current,
        }) = &api.published
        {
            let state = if *current { "as above" } else { "not as above" };
            lines.push(Line::new(
                2,
                format!("published: {devices} devices, generation {generation}, {state}"),
            ));
        }
        lines.push(Line::new(
            2,
            format!("slices: {}; --json prints them", slices.len()),
        ));
        lines.extend(findings.iter().flat_map(finding_lines));
        lines
    }

    /// Returns the exit status: 0 if everything can be allocated, 1 if something is degraded, 3 if there are GPUs and none can be allocated.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        let Document {
            devices, findings, ..
        } = &self.document;
        let has_errors = findings.iter().any(|finding| finding.severity == "error");
        let nothing = !devices.iter().any(|device| device.healthy);
        let is_degraded = devices.iter().any(|device| !device.healthy)
            || findings.iter().any(|finding| finding.severity != "note");
        match () {
            () if nothing && (self.has_gpus || has_errors) => ExitCode::from(NOTHING),
            () if is_degraded => ExitCode::from(DEGRADED),
            () => ExitCode::SUCCESS,
        }
    }
}

fn device_line(
    DeviceEntry {
        name,
        uuid,
        healthy,
        why,
    }: &DeviceEntry,
) -> Line {
    let (tone, word) = if *healthy {
        (Tone::Good, "healthy")
    } else {
        (Tone::Bad, "unhealthy")
    };
    let why = why
        .as_ref()
        .map(|why| format!(": {}", one_line(why)))
        .unwrap_or_default();
    Line::new(4, format!("  {name} "))
        .then(tone, word)
        .then(Tone::Plain, format!(", {uuid}{why}"))
}
