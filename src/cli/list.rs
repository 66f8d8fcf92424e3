//! `list`: prints the driver's files and devices that containers can get, one path on each line, relative to the driver root, in the
//! order of `nvidia-container-cli list`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use serde_json::json;

use base::paths::HostPath;
use base::report::{Finding, catalog, failure, one_line};
use base::tree::Tree;
use nvidia_host::capability::{Capabilities, Capability, Omit};
use nvidia_host::config::{Config, Limits};
use nvidia_host::driver::diagnosis;
use nvidia_host::driver::ipc::{self, Ipc};
use nvidia_host::driver::ldcache::Arch;
use nvidia_host::driver::libraries::{Library, LinkerCache, Search};
use nvidia_host::driver::locate::{DriverFiles, locate, unknown, unknown_finding};
use nvidia_host::edits::decide;
use nvidia_host::host::Host;
use nvidia_host::inventory::caps::{MigCap, parse_line};
use nvidia_host::inventory::procfs::{self, DRIVER_PROC};
use nvidia_host::inventory::select::Device;

use super::selection::{Parts, Selection};
use super::terminal::{Line, Terminal, cell, table};
use super::{args, info, output};
use crate::log::Log;
use crate::select;

/// A file or device that containers can get.
#[derive(Debug)]
struct Item {
    path: PathBuf,
    source: PathBuf,
    kind: Kind,
    /// Whether it is a driver library that is not in the catalog
    is_unknown: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Device,
    MigCapability,
    ImexChannel,
    Binary,
    Library,
    Library32,
    Ipc,
    Firmware,
    Description,
    DrmDevice,
}

impl Kind {
    /// Returns the name of the kind, which is part of the JSON interface.
    const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::MigCapability => "mig-capability",
            Self::ImexChannel => "imex-channel",
            Self::Binary => "binary",
            Self::Library => "library",
            Self::Library32 => "library-32",
            Self::Ipc => "ipc",
            Self::Firmware => "firmware",
            Self::Description => "description",
            Self::DrmDevice => "drm-device",
        }
    }

    /// Returns whether only `--json` lists this kind: nvidia-container-cli does not, and programs that read paths do not expect it.
    const fn is_json_only(self) -> bool {
        matches!(self, Self::Description | Self::DrmDevice)
    }
}

/// Prints the files and devices that the options select.
pub(crate) fn run(options: &args::List, config: Option<&Path>, terminal: Terminal) -> ExitCode {
    let mut log = Log::default();
    let text = info::configuration(config, options.root.as_deref()).and_then(|config| {
        let (items, unknown) = items(&options.parts, &config, &mut log)?;
        // On stderr, because stdout contains only paths, for scripts.
        unknown.iter().for_each(|finding| log.remark(finding));
        match options.output.json {
            true => json(&items),
            false if terminal.is_screen() => Ok(terminal.render(&columns(&items))),
            false => Ok(text_of(&items)),
        }
    });
    output::print_or_fail(text, &mut log)
}

/// Returns the output of `nvidia-container-cli list`: one path on each line.
///
/// # Errors
/// If the driver is missing, or a selected device does not exist.
pub(crate) fn text(parts: &Parts, config: &Config, log: &mut Log) -> Result<String> {
    Ok(text_of(&items(parts, config, log)?.0))
}

fn text_of(items: &[Item]) -> String {
    let lines = items.iter().filter(|item| !item.kind.is_json_only());
    lines.map(|item| format!("{}\n", item.path.display())).collect()
}

/// Returns a table of kinds and paths, for a terminal.
fn columns(items: &[Item]) -> Vec<Line> {
    let shown = items.iter().filter(|item| !item.kind.is_json_only());
    table(shown.map(|item| [cell(item.kind.name()), cell(one_line(&item.path.to_string_lossy()))]).collect())
}

fn json(items: &[Item]) -> Result<String> {
    let data = |Item { path, source, kind, is_unknown }: &Item| {
        let mut data = json!({"path": path, "source": source, "kind": kind.name()});
        if let (true, Some(fields)) = (*is_unknown, data.as_object_mut()) {
            fields.insert("catalogued".to_owned(), false.into());
        }
        data
    };
    Ok(base::json::document("files", &items.iter().map(data).collect::<Vec<_>>())?)
}

/// Returns the selected files and devices, and a finding about driver libraries that are not in the catalog.
fn items(parts: &Parts, config: &Config, log: &mut Log) -> Result<(Vec<Item>, Option<Finding>)> {
    let everything = parts.is_everything();
    let chosen = parts.clone().completed();
    let Selection { devices: chosen_devices, compat32, mig_config, mig_monitor, .. } = &chosen.selection;
    let (mut items, mut finding) = (Vec::new(), None);
    if chosen_devices.is_some()
        || mig_config.is_some()
        || mig_monitor.is_some()
        || chosen.selection.imex_channels().next().is_some()
    {
        items = devices(&chosen.selection, config, log)?;
    }
    let Parts { libraries, binaries, ipcs, firmwares, .. } = chosen;
    if [libraries, *compat32, binaries, ipcs, firmwares].contains(&true) {
        let (root, mut files, unknown) = find(config, log)?;
        files.leave_out(chosen.selection.omit());
        let ipc = if ipcs { daemons(&root, chosen.selection.omit(), config, log) } else { Vec::new() };
        items.extend(paths(&files, &ipc, &chosen, everything).into_iter().filter_map(|(kind, source)| {
            let is_unknown = unknown.iter().any(|library| library.source == *source);
            Some(Item { is_unknown, ..item(root.inside(source).ok()?, source.as_path(), kind) })
        }));
        finding = unknown_finding(&unknown).filter(|_| libraries || *compat32);
    }
    Ok((items, finding))
}

fn devices(chosen: &Selection, config: &Config, log: &mut Log) -> Result<Vec<Item>> {
    let host = Host::inspect_afresh(config)?;
    let request = chosen.request(config.supported_driver_capabilities, &[], config)?;
    let (devices, mut findings) = select::decide(&request, &host.inventory, config)?;
    let wanted = request.wanted()?;
    let facts = host.device_facts(&wanted, &devices);
    let mut items = Vec::new();
    if chosen.devices.is_some() {
        let common = decide::common_nodes(&facts, &wanted, &mut findings)?;
        let (mut gpus, mut drm, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for device in &devices {
            let edits = decide::of_device(&facts, &wanted, *device)?;
            let mounts = edits.proc_mask.unwrap_or_default().mounts;
            let access = mounts.into_iter().filter(|(path, _)| path.starts_with("capabilities"));
            parts.extend(
                access.map(|(path, source)| {
                    item(Path::new(DRIVER_PROC).join(path), source.as_path(), Kind::MigCapability)
                }),
            );
            for node in edits.nodes {
                let (path, source) = (node.path.absolute(), node.source.as_path());
                match path.parent().and_then(Path::file_name).and_then(|dir| dir.to_str()) {
                    Some("nvidia-caps") => parts.push(item(path, source, Kind::MigCapability)),
                    Some("dri") => drm.push(item(path, source, Kind::DrmDevice)),
                    // MIG devices of one GPU share its node.
                    _ if gpus.iter().any(|item: &Item| item.path == path) => {}
                    _ => gpus.push(item(path, source, Kind::Device)),
                }
            }
        }
        let common = common.iter().map(|node| item(node.path.absolute(), node.source.as_path(), Kind::Device));
        items.extend(common.chain(gpus).chain(parts).chain(drm));
    }
    findings.iter().for_each(|finding| log.finding(finding));
    for channel in &wanted.imex_channels {
        let path = Path::new("/dev/nvidia-caps-imex-channels").join(format!("channel{channel}"));
        items.push(item(path.clone(), &path, Kind::ImexChannel));
    }
    // Fails if the node of a capability is missing.
    decide::mig_management(&facts, &wanted, &devices)?;
    let table = host.mig_minors_text();
    for cap in decide::management_caps(&wanted) {
        items.extend(mig_management(cap, &devices, table.as_deref(), &config.devices));
    }
    Ok(items)
}

fn item(path: PathBuf, source: &Path, kind: Kind) -> Item {
    Item { path, source: source.to_owned(), kind, is_unknown: false }
}

/// Returns the nodes for configuring or monitoring the MIG devices of these GPUs, including those of instances that do not exist
/// yet.
fn mig_management(cap: MigCap, devices: &[Device<'_>], minors: Option<&str>, limits: &Limits) -> Vec<Item> {
    let nodes = |is: &dyn Fn(MigCap) -> bool| {
        let lines = minors.unwrap_or_default().lines().filter_map(parse_line);
        let chosen = lines.filter(|(cap, _)| is(*cap));
        chosen.map(|(_, minor)| PathBuf::from(format!("/dev/nvidia-caps/nvidia-cap{minor}"))).collect::<Vec<_>>()
    };
    let mut gpus: Vec<_> = devices.iter().map(|device| device.gpu()).filter(|gpu| gpu.mig_enabled).collect();
    gpus.dedup_by_key(|gpu| gpu.minor);
    let mut paths = Vec::new();
    if !gpus.is_empty() {
        paths.push(cap.proc_path());
        paths.extend(nodes(&|of| of == cap));
    }
    for gpu in gpus {
        paths.push(Path::new(DRIVER_PROC).join(format!("capabilities/gpu{}", gpu.minor)));
        if minors.is_some() {
            paths.push("/dev/nvidia-caps".into());
            paths.extend(nodes(&|of| decide::is_management_of(of, gpu, limits)));
        }
    }
    paths.into_iter().map(|path| item(path.clone(), &path, Kind::MigCapability)).collect()
}

/// Returns the driver files, and the driver libraries that are not in the catalog. The version is that of the loaded kernel module
/// or, if none is loaded, of the installed libraries. This function does not ask NVML.
fn find(config: &Config, log: &mut Log) -> Result<(Tree, DriverFiles, Vec<Library>)> {
    let root = Tree::open(&config.driver_root)?;
    let cache = LinkerCache::read(&root, config.ldcache.as_ref());
    let module = procfs::read_version(&root.owner_of(DRIVER_PROC)?);
    let any = Search { root: &root, cache: &cache, version: "", dirs: &config.library_dirs };
    let version = module.clone().or_else(|| diagnosis::inspect(&any, module).libraries).ok_or_else(|| {
        failure(
            &catalog::NO_LIBRARIES,
            format!("no NVIDIA driver below {}", root.path()),
            "set the driver root with --root, or with root in the [nvidia-container-cli] table of config.toml",
        )
    })?;
    let search = Search { version: &version, ..any };
    let (files, findings) = locate(&search, Capabilities::of(&Capability::ALL), &config.driver_files)?;
    findings.iter().for_each(|finding| log.finding(finding));
    let unknown = unknown(&search);
    Ok((root, files, unknown))
}

/// Returns the sockets and directories of daemons that containers get.
fn daemons(root: &Tree, omit: Omit, config: &Config, log: &mut Log) -> Vec<Ipc> {
    let all = Capabilities::of(&Capability::ALL);
    let (found, refused) = ipc::find(root, all, config.mps_directory.as_deref(), omit);
    refused.iter().for_each(|finding| log.finding(finding));
    found
}

fn paths<'a>(files: &'a DriverFiles, ipc: &'a [Ipc], chosen: &Parts, everything: bool) -> Vec<(Kind, &'a HostPath)> {
    let libraries = |native: bool, kind: Kind| {
        let of_arch = files.libraries.iter().filter(move |library| (library.arch == Arch::native()) == native);
        of_arch.map(move |library| (kind, &library.source))
    };
    let placed = |firmware: bool, kind: Kind| {
        let of_kind = files.placed.iter().filter(move |file| file.is_firmware() == firmware);
        of_kind.map(move |file| (kind, &file.source))
    };
    let mut paths = Vec::new();
    if chosen.binaries {
        paths.extend(files.binaries.iter().map(|binary| (Kind::Binary, &binary.source)));
    }
    if chosen.libraries {
        paths.extend(libraries(true, Kind::Library));
    }
    if chosen.selection.compat32 {
        paths.extend(libraries(false, Kind::Library32));
    }
    paths.extend(ipc.iter().map(|ipc| (Kind::Ipc, &ipc.source)));
    if chosen.firmwares {
        paths.extend(placed(true, Kind::Firmware));
    }
    if everything {
        paths.extend(placed(false, Kind::Description));
    }
    paths
}
