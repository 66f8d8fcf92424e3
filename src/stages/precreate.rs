//! `precreate`, a stage of Podman: reads config.json from stdin and prints the config.json for the runtime. The runtime then
//! creates the devices, and restores their rules whenever it applies the container's rules again.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};

use base::read::read_limited;
use base::report::Finding;
use base::sys::in_root::working_directory;
use base::sys::ns;

use super::decide;
use crate::inject::container::{self, OpenContainer};
use crate::inject::hosts_dev::HostsDev;
use crate::oci::{self, SpecView};
use crate::plan::additions::{Additions, OciFacts};
use crate::plan::request;
use crate::plan::{Gpus, hook_program};
use crate::record::call::Call;
use crate::record::{Outcome, storage};

/// Returns the edited config.json; `None` if the container must not start. Podman does not show the stderr of this stage.
pub(crate) fn run(config: Option<&Path>) -> Option<Vec<u8>> {
    let mut call = Call::for_stage("precreate");
    match edit(config, &mut call) {
        Ok(config_json) => Some(config_json),
        Err(error) => {
            call.fail(&error);
            None
        }
    }
}

/// Returns the edited config.json, or the bytes from stdin if the container needs no change.
fn edit(config: Option<&Path>, call: &mut Call) -> Result<Vec<u8>> {
    let start = Instant::now();
    let bytes = read_limited(std::io::stdin().lock(), oci::MAX_JSON).context("cannot read stdin")?;
    let spec = working_directory()
        .map_err(Into::into)
        .and_then(|here| oci::spec_view::parse_if(&bytes, &here, request::may_ask))
        .context("cannot read the container's spec on stdin")?;
    let (id, bundle) = name(&spec);
    call.name_container(&id, spec.pod.clone(), &bundle);
    let Some((request, config)) = decide::asked(&spec, config, call)? else { return Ok(bytes) };
    let Some(gpus) = decide::gpus(request, config, &spec.devices, call)? else { return Ok(bytes) };
    container::set_deadline(start)?;
    let mut findings = Vec::new();
    let additions = additions(&gpus, &spec, &mut findings);
    findings.iter().for_each(|finding| call.finding(finding));
    let additions = additions?;
    let text = String::from_utf8(bytes).context("the container's spec on stdin is not UTF-8")?;
    let edited = additions.apply(text)?;
    let given = format!("added to config.json: {gpus}");
    call.step_done("config.json");
    call.note(&given);
    call.end(Outcome::Given, &given);
    Ok(edited.into_bytes())
}

/// Returns the additions to config.json, and pushes findings, also before an error. It has no effects, because `explain` calls
/// it too.
///
/// # Errors
/// If the edits are impossible for this container.
pub(crate) fn additions(gpus: &Gpus, spec: &SpecView, findings: &mut Vec<Finding>) -> Result<Additions> {
    // The rootfs is mounted, but has no process yet: only the existence of paths is checked.
    let image = OpenContainer::facts_of(&spec.rootfs);
    let facts = OciFacts { in_user_namespace: ns::in_user_namespace()? };
    let (additions, more) = gpus.additions(spec, image, hook_program(None)?, facts);
    findings.extend(more);
    let hosts_dev = HostsDev::find();
    for point in &additions.points {
        hosts_dev.refuse_missing(point).with_context(|| format!("cannot mount a device node at {point:?}"))?;
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
