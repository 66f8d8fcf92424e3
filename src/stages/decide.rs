//! Takes the decisions of the plan for a call of the hook, and writes them to its log and record.

use std::path::Path;

use anyhow::Result;

use base::report::Finding;
use findings::catalog;
use nvidia_host::config::Config;
use nvidia_host::host::Host;

use super::host::{self, inspect_prepared};
use super::open_log;
use crate::oci::SpecView;
use crate::oci::spec_view::LinuxDevice;
use crate::plan::request::GpuRequest;
use crate::plan::{self, Gpus, Provided, Verdict};
use crate::record::call::Call;
use records::Outcome;
use records::asked::RecordedRequest;

/// Returns the request of the container and the configuration; `None` if the container is left unchanged. Most containers request
/// nothing: for them, not even config.toml is read.
///
/// # Errors
/// If the request or config.toml is invalid.
pub(crate) fn request(
    spec: &SpecView,
    config: Option<&Path>,
    call: &mut Call,
) -> Result<Option<(GpuRequest, Config)>> {
    let Some((config, findings)) = plan::read_config(spec, config)? else {
        return Ok(None);
    };
    open_log(&config, call);
    let verdict = plan::verdict(spec, &config);
    // A misspelled variable: keep a record, so that "why" can explain it.
    let is_misspelled = findings
        .iter()
        .any(|finding| finding.kind.id() == catalog::MISSPELLED_VARIABLE.id());
    if is_misspelled || !matches!(verdict, Ok(Verdict::Nothing(_))) {
        call.keep();
    }
    call.findings(&findings);
    match verdict? {
        Verdict::Nothing(reason) if is_misspelled => call.end(Outcome::Unchanged, &reason),
        Verdict::Nothing(reason) => call.note(&format!("nothing to do: {reason}")),
        Verdict::Unchanged(finding) => leave_unchanged(&finding, call),
        Verdict::Gpus(request) => {
            call.record().asked = Some(RecordedRequest::from(&*request));
            call.record().request.clone_from(&request.asked_by);
            call.step_done("request");
            return Ok(Some((*request, config)));
        }
    }
    Ok(None)
}

/// Prepares and inspects the host, and returns what it provides for the request of a container whose config.json lists the device
/// nodes `listed`; `None` if the container starts without it.
///
/// # Errors
/// If the driver is missing, the request cannot be met, or a required part is missing.
pub(crate) fn gpus_for(
    request: GpuRequest,
    config: Config,
    listed: &[LinuxDevice],
    call: &mut Call,
) -> Result<Option<Gpus>> {
    let mut findings = Vec::new();
    let found = decide_or_repair(&request, &config, listed, &mut findings, call);
    call.findings(&findings);
    match found {
        Ok((provided, host)) => {
            call.record().devices = provided.devices;
            call.step_done("files");
            Ok(Some(Gpus::new(request, config, host, provided.edits)))
        }
        Err(error) => {
            leave_unchanged(&plan::allow_without_gpu(&request, &config, error)?, call);
            Ok(None)
        }
    }
}

/// Decides with the prepared host, and again if a wrong node was the reason for an error and is repaired.
fn decide_or_repair(
    request: &GpuRequest,
    config: &Config,
    listed: &[LinuxDevice],
    findings: &mut Vec<Finding>,
    call: &mut Call,
) -> Result<(Provided, Host)> {
    let host = inspect_prepared(request, config, call)?;
    call.record()
        .driver
        .clone_from(&host.inventory.driver_version);
    call.step_done("driver");
    let error = match plan::decide(request, config, &host, listed, findings) {
        Ok(provided) => return Ok((provided, host)),
        Err(error) => error,
    };
    let Some(repaired) = host::repair(&error, request, config, call)? else {
        return Err(error);
    };
    findings.clear();
    let provided = plan::decide(request, config, &repaired, listed, findings)?;
    Ok((provided, repaired))
}

/// Ends a call for a container that starts without GPUs, although it requests them or has device nodes of GPUs.
fn leave_unchanged(finding: &Finding, call: &mut Call) {
    call.finding(finding);
    call.end(Outcome::Unchanged, &finding.what);
}
