//! The text that `plan` prints for a person.

use serde_json::Value;

use base::report::{Finding, one_line};

use super::{Effect, Preview};
use crate::cli::terminal::{Line, Tone};
use crate::plan::text;

/// Returns the lines of a preview.
pub(super) fn lines(preview: &Preview) -> Vec<Line> {
    let (decisive, others) = match preview.findings.split_last() {
        Some((last, others)) if preview.last_decides => (Some(last), others),
        _ => (None, preview.findings.as_slice()),
    };
    let mut lines = outcome_lines(preview, decisive);
    lines.extend(request_lines(preview));
    let devices = if preview.device_names.is_empty() {
        &preview.devices
    } else {
        &preview.device_names
    };
    for device in devices {
        lines.push(item("device: ", device));
    }
    for one in &preview.prepares {
        lines.push(item("on the host: ", &preparation(one)));
    }
    for (heading, items) in text::groups(&preview.edits) {
        lines.push(item(&format!("{heading}: "), &items.join(", ")));
    }
    for finding in others {
        lines.extend(finding_lines(finding));
    }
    for what in &preview.unknown {
        lines.push(item("not checked: ", what));
    }
    if !preview.edits.is_empty() {
        lines.push(item("not checked: ", ONLY_AT_THE_START));
    }
    lines
}

/// What no preview examines.
const ONLY_AT_THE_START: &str =
    "what the container has at these paths; the hook examines that at the start";

/// Describes what the hook would do and why, with the finding that decides it.
fn outcome_lines(preview: &Preview, decisive: Option<&Finding>) -> Vec<Line> {
    let mut lines = Vec::new();
    if let Some(name) = &preview.container.name {
        lines.push(item("container ", name));
    }
    let (tone, outcome) = match preview.outcome {
        Effect::Inject => (Tone::Good, "the hook would set up the container"),
        Effect::None => (Tone::Plain, "the hook would do nothing"),
        Effect::Error => (Tone::Bad, "the hook would fail"),
    };
    let mut reason = format!(": {}", one_line(&preview.reason));
    if let Some(finding) = decisive {
        reason += &format!(" ({})", finding.kind.id());
    }
    let line = Line::default().then(tone, outcome);
    lines.push(line.then(Tone::Plain, reason));
    if let Some(finding) = decisive
        && !finding.fix.is_empty()
    {
        lines.push(item("  hint: ", &finding.fix));
    }
    lines
}

/// Describes the container and its request.
fn request_lines(preview: &Preview) -> Vec<Line> {
    let mut lines = Vec::new();
    let container = &preview.container;
    if !container.rootfs.is_empty() {
        lines.push(item("root file system: ", &container.rootfs));
    }
    if container.privileged {
        lines.push(item("privileged: ", "yes"));
    }
    let Some(asked) = &preview.request else {
        return lines;
    };
    let capabilities = asked.driver_capabilities.join(", ");
    lines.push(item("driver capabilities: ", &capabilities));
    if !asked.features.is_empty() {
        lines.push(item("features: ", &asked.features.join(", ")));
    }
    for requirement in &asked.requirements {
        lines.push(item("requires: ", requirement));
    }
    lines
}

fn finding_lines(finding: &Finding) -> Vec<Line> {
    let severity = finding.kind.severity.name();
    let what = format!(": {}", one_line(&finding.what));
    let line = Line::new(format!("{} ", finding.kind.id()));
    let line = line.then(Tone::of_severity(severity), severity);
    let mut lines = vec![line.then(Tone::Plain, what)];
    if !finding.fix.is_empty() {
        lines.push(item("  hint: ", &finding.fix));
    }
    lines
}

fn item(name: &str, text: &str) -> Line {
    Line::new(format!("{}{}", one_line(name), one_line(text)))
}

/// Describes what the hook does on the host first.
fn preparation(one: &Value) -> String {
    if let Some(module) = one["module"].as_str() {
        return format!("load the kernel module {module}");
    }
    let node = one["node"].as_str().unwrap_or_default();
    match one["permissions"].as_str() {
        Some(permissions) => format!("set the owner and mode of {node} to {permissions}"),
        None => format!("create {node} c {}:{}", one["major"], one["minor"]),
    }
}
