//! `precreate`, Podman's own stage: config.json on stdin, and on stdout as the runtime shall see it. The runtime then gives
//! the devices, and gives them again whenever it applies its rules again.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};

use base::read::read_limited;
use base::report::Finding;
use base::sys::in_root::working_directory;
use base::sys::ns;
use cdi_spec::spec::ContainerEdits;
use nvidia_host::capability::Capability;
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::cdi::lower::{NodeFacts, SpecContext, lower};
use nvidia_host::config::Config;
use nvidia_host::edits::Edits;
use nvidia_host::edits::placement::RootfsFacts;
use nvidia_host::host::Host;

use super::prestart;
use crate::inject::container::{self, Container};
use crate::inject::hosts_dev::HostsDev;
use crate::log::Log;
use crate::lower::access::Process;
use crate::lower::oci::{Additions, OciFacts, gid_inside};
use crate::oci::{self, SpecView};
use crate::plan::hook_program;
use crate::record::{Outcome, storage};
use crate::request::{self, GpuRequest};

/// The config.json of the container whose config.json is on stdin; `None` if it must not start. Podman does not show what is
/// said here. `hook_path` is the program for the hook entry, if it is not this one.
#[must_use]
pub fn run(config: Option<&Path>, hook_path: Option<&Path>) -> Option<Vec<u8>> {
    let mut log = Log::of("precreate");
    match edit(config, hook_path, &mut log) {
        Ok(config_json) => Some(config_json),
        Err(error) => {
            log.fail(&error);
            None
        }
    }
}

/// The bytes that were read, where there is nothing to do.
fn edit(config: Option<&Path>, hook_path: Option<&Path>, log: &mut Log) -> Result<Vec<u8>> {
    let start = Instant::now();
    let bytes = read_limited(std::io::stdin().lock(), oci::MAX_JSON).context("cannot read stdin")?;
    let spec = working_directory()
        .map_err(Into::into)
        .and_then(|here| oci::spec_view::parse_if(&bytes, &here, request::may_ask))
        .context("cannot read the container's spec on stdin")?;
    let (id, bundle) = name(&spec);
    log.name_container(&id, spec.pod.clone(), &bundle);
    let Some((request, config)) = prestart::read_request(&spec, config, log)? else { return Ok(bytes) };
    let Some((host, edits)) = prestart::look(&request, &config, log)? else { return Ok(bytes) };
    container::set_deadline(start)?;
    let mut findings = Vec::new();
    let additions = plan(&spec, &host, &edits, (&request, &config, hook_path), &mut findings);
    findings.iter().for_each(|finding| log.finding(finding));
    let additions = additions?;
    let text = String::from_utf8(bytes).context("the container's spec on stdin is not UTF-8")?;
    let edited = additions.apply(text)?;
    let given = format!("config.json has {} now", prestart::in_words(&edits, &host, &request));
    log.step_done("config.json");
    log.note(&given);
    log.end(Outcome::Given, &given);
    Ok(edited.into_bytes())
}

/// What is added to config.json. Findings are added as they are made, also before an error. It changes nothing, so that
/// `explain` can show it.
///
/// # Errors
/// If the container cannot have these edits.
pub fn plan(
    spec: &SpecView,
    host: &Host,
    edits: &Edits,
    (request, config, hook_path): (&GpuRequest, &Config, Option<&Path>),
    findings: &mut Vec<Finding>,
) -> Result<Additions> {
    let facts = host_facts(spec, host, edits, hook_path, findings)?;
    let more = RootfsEdits { cuda_compat: cuda_compat(host, request, config), ..RootfsEdits::default() };
    let lowered = lower(edits, &facts, more).sort();
    let facts = OciFacts { in_user_namespace: ns::in_user_namespace()? };
    let additions = Additions::of(&lowered, spec, facts)?;
    findings.extend(shut(edits, &lowered, spec, facts));
    let hosts_dev = HostsDev::look();
    for point in &additions.points {
        hosts_dev.refuse_missing(point).with_context(|| format!("cannot mount a device node at {point:?}"))?;
    }
    Ok(additions)
}

/// Where the runtime cannot create nodes, it mounts the host's, and the process must be able to open those.
fn shut(edits: &Edits, lowered: &ContainerEdits, spec: &SpecView, facts: OciFacts) -> Option<Finding> {
    if !facts.in_user_namespace && !spec.user_namespace {
        return None;
    }
    let groups = lowered.additional_gids.iter().copied().filter(|gid| gid_inside(*gid, spec, facts).is_some());
    let process = Process::of(spec, facts.in_user_namespace).with_groups(groups);
    let nodes = NodeFacts::of_nodes(std::iter::once(edits));
    process.finding(nodes.iter().filter(|(_, node)| !process.may_open(**node)).map(|(path, node)| (path, *node)))
}

/// The container's id and bundle. Where they are not to be known, the rootfs has to do.
fn name(spec: &SpecView) -> (String, PathBuf) {
    let bundle = storage::bundle_of(&spec.mounts).unwrap_or_default();
    let id = storage::dir_of(&bundle).and_then(|dir| bundle.strip_prefix(dir).ok()?.parent());
    (id.unwrap_or(&spec.rootfs).display().to_string(), bundle)
}

/// Of the image we look at names only: its rootfs is mounted, and nobody is in it. If it cannot be seen, files go where the
/// host has them, as with CDI.
fn host_facts(
    spec: &SpecView,
    host: &Host,
    edits: &Edits,
    hook_path: Option<&Path>,
    findings: &mut Vec<Finding>,
) -> Result<SpecContext> {
    let image = Container::facts_of(&spec.rootfs);
    findings.extend(image.and_then(RootfsFacts::finding));
    Ok(SpecContext {
        driver_root: host.driver().path(),
        proc_dir: host.proc_dir(),
        program: hook_program(hook_path)?,
        nodes: NodeFacts::of_nodes(std::iter::once(edits)),
        additional_gids: true,
        image,
    })
}

/// The versions with which an image's newer libcuda may be used.
fn cuda_compat(host: &Host, request: &GpuRequest, config: &Config) -> Option<(String, String)> {
    let wanted = config.cuda_compat && request.capabilities.has(Capability::Compute);
    let inventory = &host.inventory;
    wanted.then(|| (inventory.driver_version.clone(), inventory.cuda_version.clone()))
}
