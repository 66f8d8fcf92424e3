//! `explain`: what the hook would do for a container, and why. It changes nothing.

use std::fmt::Write;
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use super::plan::{self, Verdict};
use super::{Options, Stage, output};
use crate::config::Config;
use crate::error::one_line;
use crate::finding::Finding;
use crate::host::{self, Host};
use crate::inject::container::Container;
use crate::inventory::report;
use crate::json;
use crate::lower::text;
use crate::oci::{self, SpecView};
use crate::paths::{ContainerPath, HostPath};
use crate::request::asked::Asked;
use crate::request::{self, Decision, GpuRequest};

/// All that there is to tell. The names are an interface.
#[derive(Debug, Serialize)]
struct Explanation {
    outcome: Outcome,
    reason: String,
    container: Subject,
    request: Option<Asked>,
    devices: Vec<String>,
    edits: Vec<Value>,
    findings: Vec<Finding>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Inject,
    None,
    Error,
}

#[derive(Debug, Default, Serialize)]
struct Subject {
    rootfs: String,
    pid: i32,
    privileged: bool,
}

/// Explains the container whose state is on stdin. The exit code is the hook's.
#[must_use]
pub fn run(options: &Options) -> ExitCode {
    let explanation = explain(options);
    let text =
        if options.json { json::pretty(&explanation).unwrap_or_default() + "\n" } else { in_words(&explanation) };
    let printed = output::print(&text);
    if explanation.outcome == Outcome::Error { ExitCode::FAILURE } else { printed }
}

fn explain(options: &Options) -> Explanation {
    let mut explanation = Explanation {
        outcome: Outcome::None,
        reason: String::new(),
        container: Subject::default(),
        request: None,
        devices: Vec::new(),
        edits: Vec::new(),
        findings: Vec::new(),
    };
    if let Err(error) = follow(options, &mut explanation) {
        let finding = Finding::error(&error);
        explanation.outcome = Outcome::Error;
        explanation.reason.clone_from(&finding.what);
        explanation.edits.clear();
        explanation.findings.push(finding);
    }
    explanation
}

/// The hook's own way, as far as it goes without a container.
fn follow(options: &Options, explanation: &mut Explanation) -> Result<()> {
    let (spec, pid) = read_container(options)?;
    explanation.container = Subject { rootfs: spec.rootfs.display().to_string(), pid, privileged: spec.privileged };
    let config = plan::read_config(&spec, options.config.as_deref())?;
    let Some((mut config, findings)) = config else {
        let nothing = request::from_spec(&spec, &Config::default())?;
        explanation.reason = if let Decision::Nothing(reason) = nothing { reason } else { String::new() };
        return Ok(());
    };
    explanation.findings = findings;
    if let Some(root) = &options.root {
        config.driver_root = HostPath::new(root);
    }
    let request = match plan::verdict(&spec, &config)? {
        Verdict::Gpus(request) => request,
        Verdict::Nothing(reason) => {
            explanation.reason = reason;
            return Ok(());
        }
        Verdict::LeftAlone(finding) => {
            explanation.leave_alone(finding);
            return Ok(());
        }
    };
    explanation.outcome = Outcome::Inject;
    explanation.reason = format!("{} asks for {}", request.asked_by, request.devices.names().join(","));
    explanation.request = Some(Asked::from(&*request));
    if let Some(file) = &options.inventory {
        let inventory = report::read(file)?;
        let (devices, findings) = host::decide(&request, &inventory, &config)?;
        explanation.findings.extend(findings);
        explanation.devices = devices.iter().map(|device| device.uuid().to_owned()).collect();
    } else if !options.request_only
        && let Err(error) = decide(&spec, pid, &request, &config, explanation)
    {
        explanation.leave_alone(plan::excuse(&request, &config, error)?);
    }
    Ok(())
}

impl Explanation {
    fn leave_alone(&mut self, finding: Finding) {
        self.outcome = Outcome::None;
        self.reason.clone_from(&finding.what);
        self.devices.clear();
        self.findings.push(finding);
    }
}

fn decide(
    spec: &SpecView,
    pid: i32,
    request: &GpuRequest,
    config: &Config,
    explanation: &mut Explanation,
) -> Result<()> {
    let host = Host::look(config, &|| ())?;
    let (devices, edits) = plan::edits(&host, request, config, &mut explanation.findings)?;
    explanation.devices = devices.iter().map(|device| device.uuid().to_owned()).collect();
    // The container if it waits at a hook; else its rootfs as the host sees it.
    let waiting = (pid > 0).then(|| Container::open(pid, &spec.rootfs).ok()).flatten();
    let facts =
        waiting.as_ref().map_or_else(|| Container::facts_of(&spec.rootfs).unwrap_or_default(), Container::facts);
    explanation.findings.extend(facts.finding());
    let image = waiting.or_else(|| Container::here(&spec.rootfs).ok());
    let compat = |dir: &ContainerPath, driver: &str, cuda: &str| {
        image.map(|image| image.compat_libraries(dir, driver, cuda)).unwrap_or_default()
    };
    let (mut steps, finding) = plan::steps(&edits, facts, (request, config, &host), compat);
    explanation.findings.extend(finding);
    explanation.findings.extend(plan::access(&mut steps, &edits, spec, config)?);
    explanation.edits = steps.iter().map(text::describe).collect();
    Ok(())
}

fn read_container(options: &Options) -> Result<(SpecView, i32)> {
    let bytes = oci::read_limited(std::io::stdin().lock(), oci::MAX_JSON).context("cannot read stdin")?;
    if options.stage == Some(Stage::Precreate) {
        // The bundle is the working directory, and there is no process yet.
        let here = crate::sys::in_root::working_directory()?;
        let spec = oci::spec_view::parse(&bytes, &here).context("cannot read the container's spec on stdin")?;
        return Ok((spec, 0));
    }
    let state = oci::state::parse(&bytes)?;
    Ok((oci::spec_view::read(&state.bundle)?, state.pid))
}

fn in_words(explanation: &Explanation) -> String {
    let Explanation { outcome, reason, container, request, devices, edits, findings } = explanation;
    let mut text = String::new();
    let outcome = match outcome {
        Outcome::Inject => "the hook sets the container up",
        Outcome::None => "the hook does nothing",
        Outcome::Error => "the hook stops the container",
    };
    writeln!(text, "{outcome}: {}", one_line(reason)).ok();
    if !container.rootfs.is_empty() {
        let privileged = if container.privileged { "privileged" } else { "not privileged" };
        writeln!(text, "container: {}, {privileged}", one_line(&container.rootfs)).ok();
    }
    if let Some(asked) = request {
        writeln!(text, "driver capabilities: {}", asked.driver_capabilities.join(",")).ok();
        for requirement in &asked.requirements {
            writeln!(text, "requires: {}", one_line(requirement)).ok();
        }
    }
    for device in devices {
        writeln!(text, "device: {}", one_line(device)).ok();
    }
    for edit in edits {
        writeln!(text, "edit: {}", text::line(edit)).ok();
    }
    for finding in findings {
        writeln!(text, "{} {:?}: {}", finding.kind.id, finding.kind.severity, one_line(&finding.what)).ok();
        if !finding.fix.is_empty() {
            writeln!(text, "  hint: {}", one_line(&finding.fix)).ok();
        }
    }
    text
}
