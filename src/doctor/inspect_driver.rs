//! Reads the driver and its GPUs into [`DriverFacts`].

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::FileType;

use base::report::Finding;
use base::sys::confine::Identity;
use base::tree::Tree;
use findings::catalog;
use nvidia_host::capability::{Capabilities, Capability, Omit};
use nvidia_host::config::Config;
use nvidia_host::driver::libraries::Search;
use nvidia_host::driver::nodes::{CTL_MINOR, MODESET_MINOR};
use nvidia_host::driver::platform::Platform;
use nvidia_host::driver::{DriverKind, ipc, lacking, locate, pci, wsl};
use nvidia_host::host::{self, DriverParts, Roots};
use nvidia_host::inventory::cap_files;
use nvidia_host::inventory::caps::MIG_MINORS;
use nvidia_host::inventory::identity::{self, RunAs};
use nvidia_host::inventory::procfs;
use nvidia_host::mps;
use nvidia_host::nvml::query::NvmlQuery;

use super::driver::NO_MODULE;
use super::facts::{DriverFacts, HostNode, MpsDaemon, Nvml};

/// The EFI variable of Secure Boot: four bytes of attributes, then 1 if the firmware enforces signatures, else 0.
const SECURE_BOOT: &str =
    "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// Inspects the driver. This asks NVML, which can take seconds.
pub(super) fn inspect_driver(host: &Tree, config: &Config) -> DriverFacts {
    let mut facts = of_host(host);
    let roots = match Roots::open_on(Some(host), config) {
        Ok(roots) => roots,
        Err(error) => {
            facts.diagnosis = Some(Finding::error(&error));
            "cannot open the driver root".clone_into(&mut facts.not_asked);
            return facts;
        }
    };
    facts.roots = Some(roots.clone());
    let parts = DriverParts::below(roots, config);
    add_installation(&mut facts, &parts, host, config);
    // Like a start, doctor asks NVML also if /proc/driver/nvidia is hidden, as in a sandbox.
    let is_hidden = parts.lacks_module();
    let is_broken_wsl = parts.roots.kind == DriverKind::Wsl && facts.diagnosis.is_some();
    if is_broken_wsl || is_hidden && !add_hidden_driver(&mut facts, &parts, config) {
        NO_MODULE.clone_into(&mut facts.not_asked);
        return facts;
    }
    let search = parts.search(config);
    (facts.lacking, facts.not_installed) = lacking(&search);
    facts.unknown = locate::unknown_finding(&locate::unknown(&search));
    add_nodes(&mut facts, &parts.roots, host);
    let who = identity::from_config(config);
    add_identity(&mut facts, &parts, &who);
    if facts.nvml.is_none() {
        match question(&parts, who, config) {
            Ok(question) => facts.nvml = Some(ask(&parts, question, config)),
            Err(why) => facts.not_asked = why,
        }
    }
    add_mps(&mut facts, &parts.roots.driver, config);
    facts
}

/// Adds the MPS daemons of the GPUs that config.toml shares, and the other GPUs that have been shared since this boot.
fn add_mps(facts: &mut DriverFacts, root: &Tree, config: &Config) {
    let Some(inventory) = facts.inventory() else {
        return;
    };
    let mut found = Vec::new();
    for daemon in mps::daemons(root, &config.sharing, &inventory.gpus) {
        let is_replaced = daemon.state.daemon.is_some_and(is_replaced);
        found.push(MpsDaemon {
            daemon,
            is_replaced,
        });
    }
    let is_shared = |uuid: &String| found.iter().any(|shared| shared.daemon.state.gpu == *uuid);
    let mut before = mps::gpus_with_a_state(root);
    before.retain(|uuid| !is_shared(uuid));
    (facts.mps, facts.mps_before) = (found, before);
}

/// Adds NVML's answer and its driver version if NVML answers although the kernel module has no files in /proc. Returns whether it does.
fn add_hidden_driver(facts: &mut DriverFacts, parts: &DriverParts, config: &Config) -> bool {
    if parts.library.is_none() || Platform::of_host(&parts.roots.driver, None).is_some() {
        return false;
    }
    let Ok(question) = question(parts, identity::from_config(config), config) else {
        return false;
    };
    let nvml = ask(parts, question, config);
    let Ok(inventory) = &nvml.answer else {
        return false;
    };
    facts.module = Some(inventory.driver_version.clone());
    facts.is_hidden = true;
    facts.diagnosis = None;
    facts.nvml = Some(nvml);
    true
}

/// Returns the facts that do not depend on the driver root.
fn of_host(host: &Tree) -> DriverFacts {
    let mut facts = DriverFacts {
        pci: pci::devices(host),
        ..DriverFacts::default()
    };
    for line in text(host, "/proc/modules").unwrap_or_default().lines() {
        facts
            .modules
            .extend(line.split(' ').next().map(str::to_owned));
    }
    let secure_boot = host.read(Path::new(SECURE_BOOT));
    facts.secure_boot = secure_boot.is_ok_and(|bytes| bytes.get(4) == Some(&1));
    (facts.refused, facts.xid) = kernel_log(host);
    let exists = |path: &str| host.locate(Path::new(path)).is_ok();
    facts.persistenced = exists("/run/nvidia-persistenced/socket");
    facts.fabric_manager = exists("/run/nvidia-fabricmanager/socket");
    facts
}

/// Adds what is installed and loaded, and why the driver as a whole does not work.
fn add_installation(facts: &mut DriverFacts, parts: &DriverParts, host: &Tree, config: &Config) {
    let root = &parts.roots.driver;
    let all = Capabilities::new(&Capability::ALL);
    let (found, refused) = ipc::find(root, all, config.mps_directory.as_deref(), Omit::default());
    facts.daemons = (found.into_iter().map(|ipc| ipc.source).collect(), refused);
    facts.module = parts.module.clone();
    if parts.roots.kind == DriverKind::Wsl {
        facts.wsl = Some(wsl::identity(root).unwrap_or_default());
    }
    facts.on_disk = versions(&parts.search(config));
    let fault = parts.fault(config, Some(host));
    facts.diagnosis = fault.map(|error| Finding::error(&error));
}

/// Whether the program of a process was replaced or removed, see proc_pid_exe(5). Only root can read the link.
fn is_replaced(pid: i32) -> bool {
    let program = std::fs::read_link(format!("/proc/{pid}/exe"));
    program.is_ok_and(|path| path.as_os_str().as_encoded_bytes().ends_with(b" (deleted)"))
}

/// Adds the device nodes that containers need.
fn add_nodes(facts: &mut DriverFacts, roots: &Roots, host: &Tree) {
    let Roots {
        dev, proc, kind, ..
    } = roots;
    match kind {
        DriverKind::Linux => {
            facts.nodes.push(node(dev, kind.control_node(), CTL_MINOR));
            for gpu in procfs::read_gpus(proc) {
                if !gpu.excluded
                    && let Some(minor) = gpu.minor
                {
                    facts.nodes.push(node(dev, &kind.gpu_node(minor), minor));
                }
            }
            facts.modeset = Some(node(dev, "nvidia-modeset", MODESET_MINOR));
        }
        // Its minor number is dynamic.
        DriverKind::Wsl => facts.nodes.push(node(dev, kind.control_node(), 0)),
    }
    if proc.locate(Path::new(MIG_MINORS)).is_ok() {
        facts.mig_caps = cap_files::existing(proc);
    }
    facts.features = host::features(roots);
    facts.uvm = dev.locate(Path::new("/dev/nvidia-uvm")).ok();
    let found = facts.nodes.iter().filter_map(|node| node.found.as_ref());
    for node in found.chain(&facts.uvm) {
        let (major, minor) = node.device;
        let link = format!("/dev/char/{major}:{minor}");
        if node.kind == FileType::CharacterDevice && host.locate(Path::new(&link)).is_err() {
            facts.without_link.push(node.path.display().to_string());
        }
    }
}

/// Adds the user that asks NVML. It is also shown if the library is missing.
fn add_identity(facts: &mut DriverFacts, parts: &DriverParts, who: &anyhow::Result<RunAs>) {
    let place = parts.place();
    let (root, library) = place.unwrap_or_else(|| (parts.roots.dev.path(), "/".into()));
    let chosen = match who {
        Ok(who) => identity::choose(*who, &root, &library).map_err(|error| Finding::error(&error)),
        Err(error) => Err(Finding::error(error)),
    };
    facts.only_root_may_ask = matches!(chosen, Ok(Some(Identity { uid: 0, .. })));
    facts.identity = chosen.transpose();
}

fn ask(parts: &DriverParts, question: NvmlQuery, config: &Config) -> Nvml {
    let start = Instant::now();
    let answer = parts.ask_for_inventory(&question, config);
    Nvml {
        question,
        answer: answer.map_err(|error| Finding::error(&error)),
        took: start.elapsed(),
    }
}

/// Returns the text of a file, or `None` if it cannot be read.
pub(super) fn text(host: &Tree, path: &str) -> Option<String> {
    Some(String::from_utf8_lossy(&host.read(Path::new(path)).ok()?).into_owned())
}

fn node(dev: &Tree, name: &str, minor: u32) -> HostNode {
    HostNode {
        found: dev.locate(&Path::new("/dev").join(name)).ok(),
        name: name.to_owned(),
        minor,
    }
}

/// Returns the question for NVML, or why NVML is not asked.
fn question(
    parts: &DriverParts,
    who: anyhow::Result<RunAs>,
    config: &Config,
) -> Result<NvmlQuery, String> {
    let Some((root, library)) = parts.place() else {
        // An update can leave a library of another version.
        let version = parts.module.as_deref().unwrap_or_default();
        return Err(format!("libnvidia-ml of driver {version} is missing"));
    };
    let who = who.map_err(|_| "the user in config.toml is unknown")?;
    if who == RunAs::Unchanged && root.as_path() != Path::new("/") {
        return Err("only root can run NVML below another driver root".to_owned());
    }
    Ok(NvmlQuery {
        root,
        library,
        who,
        deadline: config.nvml_timeout,
        kind: parts.roots.kind,
    })
}

/// Returns the versions in the file names of libnvidia-ml and libcuda in the usual directories.
fn versions(search: &Search<'_>) -> BTreeSet<String> {
    let usual = nvidia_host::driver::file_table::LIBRARY_DIRS.iter();
    let configured = search.dirs.iter().map(PathBuf::as_path);
    let mut found = BTreeSet::new();
    for dir in configured.chain(usual.map(Path::new)) {
        for name in search.root.names(dir) {
            let name = name.to_string_lossy();
            for library in ["libnvidia-ml.so.", "libcuda.so."] {
                let version = name.strip_prefix(library).unwrap_or_default();
                if version.contains('.') {
                    found.insert(version.to_owned());
                }
            }
        }
    }
    found
}

/// Returns an error for each driver capability without its required library, and a finding about missing optional libraries. The fixes
/// name packages of the driver root's distribution.
fn lacking(search: &Search<'_>) -> (Vec<Finding>, Option<Finding>) {
    let (mut errors, mut lacking) = (Vec::new(), Vec::new());
    for capability in Capability::ALL {
        // Few servers have 32-bit libraries, and few containers request them.
        if capability == Capability::Compat32 {
            continue;
        }
        let capabilities = Capabilities::new(&[capability]);
        match locate::locate(search, capabilities, &[]) {
            Err(error) => errors.push(Finding::error(&error)),
            Ok((files, _)) => {
                lacking.extend(lacking::of(search.kind, capabilities, &files.libraries));
            }
        }
    }
    let finding = lacking::finding(&catalog::NOT_INSTALLED, search, &lacking);
    (errors, finding)
}

/// Parts of kernel messages about a module that was rejected.
const REFUSALS: [&str; 6] = [
    "verification failed",
    "rejected",
    "Lockdown",
    "Unknown symbol",
    "version magic",
    "disagrees about version",
];

/// Returns the last kernel messages about a rejected module of NVIDIA and about an error of a GPU; nothing if this user cannot read the
/// kernel log.
#[expect(
    clippy::disallowed_methods,
    reason = "a device node below the driver root"
)]
fn kernel_log(host: &Tree) -> (Option<String>, Option<String>) {
    const MOST: usize = 8 << 20;
    let open = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(host.path().as_path().join("dev/kmsg"));
    let Ok(mut kmsg) = open else {
        return (None, None);
    };
    let mut bytes = Vec::new();
    let mut record = [0; 8192];
    // Each read returns one record. EPIPE means that the next record was overwritten.
    while bytes.len() < MOST {
        match kmsg.read(&mut record) {
            Ok(0) => break,
            Ok(count) => bytes.extend_from_slice(record.get(..count).unwrap_or_default()),
            Err(error) if error.raw_os_error() == Some(nix::libc::EPIPE) => {}
            Err(_) => break,
        }
    }
    let (mut refusal, mut xid) = (None, None);
    // A line of /dev/kmsg is "priority,sequence,time,flags;message".
    for line in String::from_utf8_lossy(&bytes).lines() {
        let message = line.split_once(';').map_or(line, |(_, message)| message);
        if message.contains("nvidia") && REFUSALS.iter().any(|sign| message.contains(sign)) {
            refusal = Some(message.to_owned());
        }
        if message.contains("NVRM: Xid") {
            xid = Some(message.to_owned());
        }
    }
    (refusal, xid)
}
