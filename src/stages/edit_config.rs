//! `edit-config`, which `nvidia-container-runtime` starts: reads config.json from stdin and prints the config.json for runc, with the
//! GPUs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};

use base::read::read_limited;
use base::report::Finding;
use base::sys::in_root::working_directory;
use base::sys::{ns, stdio};
use nvidia_host::programs::RUNTIME;

use super::{decide, run_stage};
use crate::inject::container::OpenContainer;
use crate::inject::container::host_dev::HostDev;
use crate::oci::{self, SpecView};
use crate::plan::additions::{Additions, OciFacts};
use crate::plan::request;
use crate::plan::{Gpus, hook_program};
use crate::record::call::Call;

use crate::record::storage;

/// Prints the edited config.json. Exit status 0 if the container may start, 1 if not.
// Not inlined: a start at a stage would need a larger stack, and each page costs a fault.
#[inline(never)]
pub(crate) fn run(config: Option<&Path>) -> ExitCode {
    run_stage(RUNTIME, |call| {
        let Edited { config_json, given } = edit(config, call)?;
        // A config.json that is cut off is an error, and not the container that the engine asked for.
        stdio::write_stdout(&config_json).context("cannot write the container's spec to stdout")?;
        if let Some(given) = given {
            call.given(&given);
        }
        Ok(())
    })
}

/// The config.json for the runtime.
struct Edited {
    config_json: Vec<u8>,
    /// What was added; `None` if these are the bytes from stdin, because the container needs no change
    given: Option<String>,
}

fn edit(config: Option<&Path>, call: &mut Call) -> Result<Edited> {
    let start = Instant::now();
    let (bytes, spec) = read_spec(call)?;
    let gpus = match decide::request(&spec, config, call)? {
        Some((request, config)) => decide::gpus_for(request, config, &spec.devices, call)?,
        None => None,
    };
    let Some(gpus) = gpus else {
        return Ok(Edited {
            config_json: bytes,
            given: None,
        });
    };
    call.set_deadline(start)?;
    let mut findings = Vec::new();
    let additions = additions(&gpus, &spec, &mut findings);
    call.findings(&findings);
    let additions = additions?;
    let text = String::from_utf8(bytes).context("the container's spec on stdin is not UTF-8")?;
    let config_json = additions.apply(text)?.into_bytes();
    call.step_done("config.json");
    Ok(Edited {
        config_json,
        given: Some(format!("added to config.json: {gpus}")),
    })
}

/// Reads the text of config.json on stdin, and names its container in the record.
pub(super) fn read_spec(call: &mut Call) -> Result<(Vec<u8>, SpecView)> {
    let bytes =
        read_limited(std::io::stdin().lock(), oci::MAX_JSON).context("cannot read stdin")?;
    let spec = working_directory()
        .map_err(Into::into)
        .and_then(|here| oci::spec_view::parse_if(&bytes, &here, request::may_ask))
        .context("cannot read the container's spec on stdin")?;
    let (id, bundle) = name(&spec);
    call.name_container(&id, spec.pod.clone(), &bundle);
    Ok((bytes, spec))
}

/// Returns the additions to config.json, and pushes findings, also before an error.
///
/// # Errors
/// If the edits are impossible for this container.
fn additions(gpus: &Gpus, spec: &SpecView, findings: &mut Vec<Finding>) -> Result<Additions> {
    // The rootfs is mounted, but has no process yet: only the existence of paths is checked.
    let image = OpenContainer::facts_of(&spec.rootfs);
    let facts = OciFacts {
        in_user_namespace: ns::in_user_namespace()?,
    };
    let (additions, more) = gpus.additions(spec, image, hook_program(None)?, facts);
    findings.extend(more);
    let host_dev = HostDev::find();
    for point in &additions.points {
        host_dev
            .refuse_missing(point)
            .with_context(|| format!("cannot mount a device node at {point:?}"))?;
    }
    Ok(additions)
}

/// Returns the container's id and bundle. config.json does not contain them: they are derived from the engine's mounts, and
/// otherwise the rootfs is the id.
fn name(spec: &SpecView) -> (String, PathBuf) {
    let bundle = storage::bundle_of(&spec.mounts).unwrap_or_default();
    let id = storage::dir_of(&bundle).and_then(|dir| bundle.strip_prefix(dir).ok()?.parent());
    (id.unwrap_or(&spec.rootfs).display().to_string(), bundle)
}
