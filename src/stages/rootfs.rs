//! `rootfs`, the hook entry in generated CDI specs: does what an engine cannot do. Its arguments contain all steps; the host is
//! not inspected.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;

use base::paths::{ContainerPath, HostPath};
use base::report::{Finding, failure};
use base::tree::Tree;
use nvidia_host::cdi::compare::{self, Difference, HostView, NumberedNode, Parts, SpecNode};
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::config::Config;
use nvidia_host::device_id::VISIBLE_DEVICES;
use nvidia_host::driver::compat;
use nvidia_host::driver::ipc::Ipc;
use nvidia_host::driver::nodes::{CAPS, NVIDIA_MAJOR};
use nvidia_host::edits::build;
use nvidia_host::host::{DriverParts, Host, Roots};
use nvidia_host::inventory::procfs;

use super::{limits, read_state, run_stage, shared};
use crate::inject;
use crate::inject::container::OpenContainer;
use crate::oci::gpu_nodes::{device_number, gpu_nodes};
use crate::oci::spec_view::{LinuxDevice, Mount};
use crate::oci::{self, SpecView};
use crate::plan::engine_devices::node_device;
use crate::plan::step::Step;
use crate::plan::{self, Container, Image};
use crate::plan::{rootfs, steps};
use crate::record::call::Call;

/// Sets up the container whose state is on stdin. Exit status 0 if it may start, 1 if not.
pub(crate) fn run(edits: RootfsEdits) -> ExitCode {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    run_stage("rootfs", |call| finish(edits, call))
}

fn finish(edits: RootfsEdits, call: &mut Call) -> Result<()> {
    let start = Instant::now();
    let (bytes, state) = read_state()?;
    call.record().pid = state.pid;
    call.name_container(
        &state.id,
        oci::state::pod(&bytes, &state.bundle),
        &state.bundle,
    );
    let spec = oci::spec_view::read(&state.bundle)?;
    if edits.only_checks() {
        // The hook or another entry may set up GPUs in this container, and record that.
        check(&edits, &spec, edits.config.as_ref(), edits.root.as_ref())?;
        return Ok(());
    }
    let edits = with_entries(edits, &spec);
    call.name_container(&state.id, spec.pod.clone(), &state.bundle);
    call.keep();
    if !call.continue_edit() {
        record_engine_setup(call, &spec);
    }
    let mps = check(&edits, &spec, edits.config.as_ref(), edits.root.as_ref())?;
    call.set_deadline(start)?;
    // The source of a mount may be on a file system that does not answer.
    let edits = resolve(edits, &spec);
    let open = OpenContainer::open(state.init()?, &spec.rootfs)?;
    let image = image(&edits, &open);
    call.findings(&image.facts.finding());
    call.findings(&plan::newer_libcuda(&image));
    let mut steps = steps(&edits, &image);
    steps.extend(mps.iter().map(Step::mount_ipc));
    let prepared = inject::prepare(&steps, &spec.mount_label)?;
    let container = Container::new(&state, &spec)?;
    call.findings(&plan::root_beside_limits(&steps, &container.process));
    let findings = inject::apply(prepared, open, &container)?;
    call.findings(&findings);
    call.step_done("rootfs");
    call.end_of_rootfs(&format!(
        "completed the setup that the engine began, in {} steps",
        steps.len()
    ));
    Ok(())
}

/// Checks whether a container may have what its engine took from a spec, and returns the directory of the MPS daemon that it gets. The
/// configuration is in this file, and its driver root can be another one.
///
/// # Errors
/// If the spec is not this host's, config.toml denies a device, or a GPU is shared and its daemon is not ready.
pub(crate) fn check(
    edits: &RootfsEdits,
    spec: &SpecView,
    file: Option<&HostPath>,
    root: Option<&HostPath>,
) -> Result<Option<Ipc>> {
    let config = limits::configuration(file, root)?;
    refuse_outdated(edits, spec, &config)?;
    limits::check(spec, config.clone(), edits.features)?;
    shared::daemon_of(spec, &config)
}

/// Refuses a container with a GPU that has left the host, or with a device node that has another number on this host: the spec was
/// written for an earlier boot, or before a module was loaded again. The container could open the device of another driver.
///
/// # Errors
/// If a GPU, a MIG device or a node of the container is not the host's, or the driver root cannot be opened.
fn refuse_outdated(edits: &RootfsEdits, spec: &SpecView, config: &Config) -> Result<()> {
    let roots = Roots::open(config)?;
    let mut parts = Parts::default();
    parts.add_entry(edits, |node| has_node(spec, &node.absolute()));
    for device in &spec.devices {
        if is_of_driver(&device.path) {
            parts.nodes.push(SpecNode {
                path: device.path.clone(),
                source: roots.dev.on_host(&device.path),
                state: NumberedNode::of(device.kind.as_deref(), device.major, device.minor),
            });
        }
    }
    let mut view = HostView::examine([&parts], &roots, None);
    let mig_uuids = parts.mig_uuids();
    if !mig_uuids.is_empty() {
        // If NVML fails, the files of the MIG device show whether it exists.
        let host = Host::inspect_devices(config, &mig_uuids);
        view.mig_devices = host.ok().map(|host| host.inventory.mig_uuids());
    }
    let Some(difference) = compare::differences(&parts, &view).into_iter().next() else {
        return Ok(());
    };
    if matches!(difference, Difference::Driver { .. })
        && let Some(mismatch) = DriverParts::below(roots, config).mismatch(config, None)
    {
        let Finding { kind, what, fix } = mismatch;
        return Err(failure(kind, what, fix));
    }
    let fix = match difference {
        Difference::NotLoaded => "run \"modprobe nvidia\" on the host",
        Difference::Missing(_) => "run \"oci-nvidia-hook prepare\" as root on the host",
        _ => {
            "run \"oci-nvidia-hook cdi refresh\"; if the spec is in another file, \"oci-nvidia-hook cdi check\" names it"
        }
    };
    Err(failure(difference.kind(), difference.to_string(), fix))
}

/// Whether a node belongs to the driver by its name. The numbers of the nodes in /dev/dri and of other drivers follow from their names.
fn is_of_driver(path: &Path) -> bool {
    let name = path.strip_prefix("/dev").ok().and_then(Path::to_str);
    name.is_some_and(|name| name.starts_with("nvidia") || name == "gdrdrv")
}

/// Returns the edits for the nodes that the container has.
pub(crate) fn resolve(edits: RootfsEdits, spec: &SpecView) -> RootfsEdits {
    edits.resolve(|node| has_node(spec, &node.absolute()))
}

/// Returns the properties of the image on which the steps depend.
pub(crate) fn image(edits: &RootfsEdits, open: &OpenContainer) -> Image {
    let mut libraries = None;
    if let (Some((driver, cuda)), Some(dir)) = (&edits.cuda_compat, ContainerPath::new(compat::DIR))
    {
        libraries = open.compat_libraries(&dir, driver, cuda);
    }
    Image {
        facts: open.facts(),
        compat: libraries.unwrap_or_default(),
    }
}

/// Returns the steps of hook entries.
fn steps(edits: &RootfsEdits, image: &Image) -> Vec<Step> {
    let files = edits.mask.as_ref().map(mask_files).unwrap_or_default();
    let mut steps = rootfs::steps(edits, image.facts, files);
    if let (Some(_), Some(dir)) = (&edits.cuda_compat, ContainerPath::new(compat::DIR)) {
        // The image's libraries are newer than this driver.
        steps::prefer(&mut steps, &dir, |soname| image.compat.contains(soname));
    }
    steps
}

/// Returns the edits of all hook entries of a container; `None` if it has none.
pub(crate) fn all_entries(spec: &SpecView) -> Option<RootfsEdits> {
    let mut all = None;
    for hook in &spec.hooks {
        let Some(entry) = RootfsEdits::from_entry(&hook.args) else {
            continue;
        };
        all = Some(match all {
            Some(edits) => RootfsEdits::merge(edits, entry),
            None => entry,
        });
    }
    all
}

/// Records what the engine did before this call.
fn record_engine_setup(call: &mut Call, spec: &SpecView) {
    let record = call.record();
    record.request = engine_setup(spec);
    for node in gpu_nodes(spec).gpus() {
        record.devices.push(node_device(node.path));
    }
}

/// CDI specs set NVIDIA_VISIBLE_DEVICES to this value, so that no hook sets up the container again; the edit of
/// config.json does not change it.
const VOID: &str = "void";

/// Describes what the engine did before this call, for the record.
fn engine_setup(spec: &SpecView) -> String {
    let value = spec.env.get(VISIBLE_DEVICES).map(String::as_str);
    if value != Some(VOID) {
        return "the engine set it up, from a CDI spec or with nvidia-container-runtime".to_owned();
    }
    if spec.cdi_devices.is_empty() {
        return "the engine set it up from a CDI spec".to_owned();
    }
    let names = spec.cdi_devices.join(", ");
    format!("the engine set it up from a CDI spec, with {names}")
}

/// Merges the edits of all hook entries for the nodes of the container. A container with devices of several specs has an entry of each,
/// but the mask of /proc/driver/nvidia must contain all GPUs and cannot be changed later. So the first entry does the work of all, and
/// the others find it done.
fn with_entries(edits: RootfsEdits, spec: &SpecView) -> RootfsEdits {
    // An entry that cannot be parsed fails when it is called.
    match all_entries(spec) {
        Some(all) => edits.merge(all),
        None => edits,
    }
}

/// Reports whether the engine gives the container this node. In containers with a user namespace, engines mount the host's node. Another
/// file or device at this path does not count.
fn has_node(spec: &SpecView, path: &Path) -> bool {
    let is_created = |device: &LinuxDevice| match (device.major, device.minor) {
        (Some(major), Some(minor)) => device.path == path && has_number(path, major, minor),
        _ => false,
    };
    let is_mounted = |mount: &Mount| {
        mount.destination == path && mount.is_bind() && is_node(&mount.source, path)
    };
    spec.devices.iter().any(is_created) || spec.mounts.iter().any(is_mounted)
}

/// Reports whether this file of the host is the node for this path.
fn is_node(source: &Path, path: &Path) -> bool {
    let Some((major, minor)) = device_number(source) else {
        return false;
    };
    has_number(path, major.into(), minor.into())
}

/// Reports whether a node of the driver at this path has this number: its name ends in the minor number. The major number of
/// capabilities is not fixed.
fn has_number(path: &Path, major: i64, minor: i64) -> bool {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
    digits.parse() == Ok(minor) && (major == i64::from(NVIDIA_MAJOR) || path.starts_with(CAPS))
}

/// Returns the files of the mask; empty if the driver is not loaded, because the container's /proc then lacks them too.
fn mask_files(dir: &HostPath) -> Vec<(OsString, Vec<u8>)> {
    let root = Tree::open(dir);
    let files = root
        .map(|root| procfs::read_files(&root, Path::new("/"), None))
        .unwrap_or_default();
    files.into_iter().map(build::mask_file).collect()
}
