//! `files`: prints the driver's files and devices that containers can get, one path on each line, relative to the driver root, in the
//! order of `nvidia-container-cli list`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use base::paths::HostPath;
use base::report::{Finding, failure};
use base::tree::Tree;
use findings::catalog;
use nvidia_host::capability::{Capabilities, Capability, Omit};
use nvidia_host::config::{Config, Limits};
use nvidia_host::driver::DriverKind;
use nvidia_host::driver::diagnosis;
use nvidia_host::driver::files::DriverFiles;
use nvidia_host::driver::ipc::{self, Ipc};
use nvidia_host::driver::ldcache::Arch;
use nvidia_host::driver::libraries::{Library, LinkerCache};
use nvidia_host::driver::locate::{locate, unknown, unknown_finding};
use nvidia_host::driver::node_name::NodeName;
use nvidia_host::driver::nodes::{CAPS, imex_channel};
use nvidia_host::driver::wsl;
use nvidia_host::edits::facts::DeviceFacts;
use nvidia_host::edits::{Wanted, decide};
use nvidia_host::host::{Driver, Roots, Source};
use nvidia_host::inventory::caps::{MigCap, parse_line};
use nvidia_host::inventory::procfs::{self, DRIVER_PROC};
use nvidia_host::inventory::select::Device;
use nvidia_host::request::select;

use super::selection::{Parts, Selection};
use super::{args, info, output};
use crate::record::call::Call;

/// A file or device that containers can get. The field names are part of the JSON interface.
#[derive(Debug, Serialize)]
struct Item {
    /// `false` for a driver library that is not in the catalog
    #[serde(skip_serializing_if = "bool::clone")]
    cataloged: bool,
    kind: ItemKind,
    path: PathBuf,
    source: PathBuf,
}

/// The kinds in the order of the output. Their names are part of the JSON interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum ItemKind {
    Device,
    MigCapability,
    ImexChannel,
    Binary,
    Library,
    #[serde(rename = "library-32")]
    Library32,
    Ipc,
    Firmware,
    Description,
    DrmDevice,
}

impl ItemKind {
    /// Reports whether nvidia-container-cli lists this kind. Programs that read paths do not expect the others.
    const fn is_path(self) -> bool {
        !matches!(self, Self::Description | Self::DrmDevice)
    }
}

impl fmt::Display for ItemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Prints the files and devices that the options select.
pub(crate) fn run(options: &args::Files, config: Option<&Path>) -> Result<ExitCode> {
    let mut call = Call::default();
    let config = info::configuration(config, options.root.as_deref())?;
    let (items, unknown) = items(&options.parts, &config, &mut call)?;
    // On stderr, because stdout contains only paths, for scripts.
    if let Some(finding) = &unknown {
        call.remark(finding);
    }
    let text = if options.output.json {
        base::json::document("files", &items)?
    } else {
        text_of(&items)
    };
    Ok(output::print(&text))
}

/// Returns the output of `nvidia-container-cli list`: one path on each line.
///
/// # Errors
/// If the driver is missing, or a selected device does not exist.
pub(crate) fn text(parts: &Parts, config: &Config, call: &mut Call) -> Result<String> {
    Ok(text_of(&items(parts, config, call)?.0))
}

fn text_of(items: &[Item]) -> String {
    let mut text = String::new();
    for item in items.iter().filter(|item| item.kind.is_path()) {
        text += &format!("{}\n", item.path.display());
    }
    text
}

/// Returns the selected files and devices, and a finding about driver libraries that are not in the catalog.
fn items(parts: &Parts, config: &Config, call: &mut Call) -> Result<(Vec<Item>, Option<Finding>)> {
    let everything = parts.is_everything();
    let chosen = parts.clone().completed();
    let Selection {
        devices: chosen_devices,
        compat32,
        mig_config,
        mig_monitor,
        ..
    } = &chosen.selection;
    let (mut items, mut finding) = (Vec::new(), None);
    if chosen_devices.is_some()
        || mig_config.is_some()
        || mig_monitor.is_some()
        || chosen.selection.imex_channels().next().is_some()
    {
        items = devices(&chosen.selection, config, call)?;
    }
    let Parts {
        libraries,
        binaries,
        ipcs,
        firmwares,
        ..
    } = chosen;
    if [libraries, *compat32, binaries, ipcs, firmwares].contains(&true) {
        let (root, mut files, unknown) = find(config, call)?;
        files.leave_out(chosen.selection.omit());
        let ipc = if ipcs {
            daemons(&root, chosen.selection.omit(), config, call)
        } else {
            Vec::new()
        };
        for (kind, source) in paths(&files, &ipc, &chosen, everything) {
            let Ok(inside) = root.inside(source) else {
                continue;
            };
            let mut item = item(inside, source.as_path(), kind);
            item.cataloged = !unknown.iter().any(|library| library.source == *source);
            items.push(item);
        }
        if libraries || *compat32 {
            finding = unknown_finding(&unknown);
        }
    }
    Ok((items, finding))
}

fn devices(chosen: &Selection, config: &Config, call: &mut Call) -> Result<Vec<Item>> {
    let host = Driver::find(config)?.host(Source::Nvml)?;
    let request = chosen.request(config.supported_driver_capabilities, &[], config)?;
    let (devices, mut findings) = select::decide(&request, &host.inventory, config)?;
    let wanted = request.wanted()?;
    let facts = host.device_facts(&wanted, &devices);
    let mut items = Vec::new();
    if chosen.devices.is_some() {
        for node in decide::common_nodes(&facts, &wanted, &mut findings)? {
            let path = node.path.absolute();
            items.push(item(path, node.source.as_path(), ItemKind::Device));
        }
        items.extend(items_of_gpus(&facts, &wanted, &devices)?);
    }
    call.findings(&findings);
    for channel in &wanted.imex_channels {
        let path = Path::new("/dev").join(imex_channel(*channel));
        items.push(item(path.clone(), &path, ItemKind::ImexChannel));
    }
    // Fails if the node of a capability is missing.
    decide::mig_management(&facts, &wanted, &devices)?;
    let table = host.mig_minors_text();
    for cap in decide::management_caps(&wanted) {
        items.extend(mig_management(
            cap,
            &devices,
            table.as_deref(),
            &config.devices,
        ));
    }
    Ok(items)
}

/// Returns the nodes of these GPUs, and then what their MIG devices and their displays need.
fn items_of_gpus(
    facts: &DeviceFacts,
    wanted: &Wanted,
    devices: &[Device<'_>],
) -> Result<Vec<Item>> {
    let (mut gpus, mut drm, mut parts) = (Vec::new(), Vec::new(), Vec::new());
    for device in devices {
        let edits = decide::of_device(facts, wanted, *device)?;
        for (path, source) in edits.proc_mask.unwrap_or_default().mounts {
            if path.starts_with("capabilities") {
                let path = Path::new(DRIVER_PROC).join(path);
                parts.push(item(path, source.as_path(), ItemKind::MigCapability));
            }
        }
        for node in edits.nodes {
            let (path, source) = (node.path.absolute(), node.source.as_path());
            match NodeName::of_path(&path) {
                Some(NodeName::Cap(_)) => parts.push(item(path, source, ItemKind::MigCapability)),
                _ if path.starts_with("/dev/dri") => {
                    drm.push(item(path, source, ItemKind::DrmDevice));
                }
                // MIG devices of one GPU share its node.
                _ if gpus.iter().any(|item: &Item| item.path == path) => {}
                _ => gpus.push(item(path, source, ItemKind::Device)),
            }
        }
    }
    gpus.extend(parts);
    gpus.extend(drm);
    Ok(gpus)
}

fn item(path: PathBuf, source: &Path, kind: ItemKind) -> Item {
    Item {
        cataloged: true,
        kind,
        path,
        source: source.to_owned(),
    }
}

/// Returns the nodes for configuring or monitoring the MIG devices of these GPUs, including the nodes of instances that do not exist
/// yet.
fn mig_management(
    cap: MigCap,
    devices: &[Device<'_>],
    minors: Option<&str>,
    limits: &Limits,
) -> Vec<Item> {
    let table: Vec<_> = minors
        .unwrap_or_default()
        .lines()
        .filter_map(parse_line)
        .collect();
    let mut gpus: Vec<_> = devices
        .iter()
        .map(|device| device.gpu())
        .filter(|gpu| gpu.mig_enabled)
        .collect();
    gpus.dedup_by_key(|gpu| gpu.minor);
    let mut paths = Vec::new();
    if !gpus.is_empty() {
        paths.push(cap.proc_path());
        paths.extend(table.iter().filter(|(of, _)| *of == cap).map(cap_node));
    }
    for gpu in gpus {
        paths.push(Path::new(DRIVER_PROC).join(format!("capabilities/gpu{}", gpu.minor)));
        if minors.is_some() {
            paths.push(CAPS.into());
            paths.extend(
                table
                    .iter()
                    .filter(|(of, _)| decide::is_management_of(*of, gpu, limits))
                    .map(cap_node),
            );
        }
    }
    paths
        .into_iter()
        .map(|path| item(path.clone(), &path, ItemKind::MigCapability))
        .collect()
}

fn cap_node((_, minor): &(MigCap, u32)) -> PathBuf {
    NodeName::Cap(*minor).path()
}

/// Returns the driver files, and the driver libraries that are not in the catalog. The version is the loaded kernel module's
/// or, if none is loaded, the installed libraries'. This function does not ask NVML.
fn find(config: &Config, call: &mut Call) -> Result<(Tree, DriverFiles, Vec<Library>)> {
    let roots = Roots::open(config)?;
    let root = &roots.driver;
    let cache = LinkerCache::of(root, config.ldcache.as_ref());
    let module = procfs::read_version(&roots.proc);
    let any = roots.search(&cache, "", config);
    let version = module.or_else(|| diagnosis::version_of_libraries(&any));
    if version.is_none() && roots.kind == DriverKind::Linux {
        return Err(failure(
            &catalog::NO_LIBRARIES,
            format!("no NVIDIA driver below {}", root.path()),
            "set the driver root with --root, or with root in the [nvidia-container-cli] table of config.toml",
        ));
    }
    let version = version.unwrap_or_default();
    let search = any.of_version(&version);
    let (files, findings) = locate(
        &search,
        Capabilities::new(&Capability::ALL),
        &config.driver_files,
    )?;
    call.findings(&findings);
    let unknown = unknown(&search);
    Ok((root.clone(), files, unknown))
}

/// Returns the sockets and directories of daemons that containers get.
fn daemons(root: &Tree, omit: Omit, config: &Config, call: &mut Call) -> Vec<Ipc> {
    let all = Capabilities::new(&Capability::ALL);
    let (found, refused) = ipc::find(root, all, config.mps_directory.as_deref(), omit);
    call.findings(&refused);
    found
}

/// Returns the chosen files, sorted by kind.
fn paths<'a>(
    files: &'a DriverFiles,
    ipc: &'a [Ipc],
    chosen: &Parts,
    everything: bool,
) -> Vec<(ItemKind, &'a HostPath)> {
    let mut paths = Vec::new();
    for binary in &files.binaries {
        paths.push((ItemKind::Binary, &binary.source));
    }
    for library in &files.libraries {
        let kind = if library.arch == Arch::native() {
            ItemKind::Library
        } else {
            ItemKind::Library32
        };
        paths.push((kind, &library.source));
    }
    for file in &files.placed {
        let kind = if file.is_firmware() {
            ItemKind::Firmware
        } else if file.target.absolute().starts_with(wsl::STORES) {
            // The libraries of WSL 2 that others open by path.
            ItemKind::Library
        } else {
            ItemKind::Description
        };
        paths.push((kind, &file.source));
    }
    for ipc in ipc {
        paths.push((ItemKind::Ipc, &ipc.source));
    }
    paths.retain(|(kind, _)| match kind {
        ItemKind::Binary => chosen.binaries,
        ItemKind::Library => chosen.libraries,
        ItemKind::Library32 => chosen.selection.compat32,
        ItemKind::Firmware => chosen.firmwares,
        ItemKind::Description => everything,
        _ => true,
    });
    paths.sort_by_key(|(kind, _)| *kind);
    paths
}
