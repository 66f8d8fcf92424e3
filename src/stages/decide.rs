//! Takes the decisions of the plan for a call of the hook, and writes them to its log and record.

use std::path::Path;

use anyhow::Result;

use base::report::Finding;
use findings::catalog;
use nvidia_host::config::Config;

use super::host::inspect_prepared;
use super::open_log;
use crate::oci::SpecView;
use crate::oci::spec_view::LinuxDevice;
use crate::plan::request::GpuRequest;
use crate::plan::{self, Gpus, Verdict};
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
        .any(|finding| finding.kind.id == catalog::MISSPELLED_VARIABLE.id);
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
    let found = inspect_prepared(&request, &config, call).and_then(|host| {
        call.record()
            .driver
            .clone_from(&host.inventory.driver_version);
        call.step_done("driver");
        Ok((
            plan::decide(&request, &config, &host, listed, &mut findings)?,
            host,
        ))
    });
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

/// Ends a call for a container that starts without GPUs, although it requests them or has device nodes of GPUs.
fn leave_unchanged(finding: &Finding, call: &mut Call) {
    call.finding(finding);
    call.end(Outcome::Unchanged, &finding.what);
}
