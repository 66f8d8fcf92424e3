//! Reads the driver and its GPUs into [`DriverFacts`].

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use rustix::fs::FileType;

use base::paths::HostPath;
use base::report::Finding;
use base::sys::confine::Identity;
use base::tree::Tree;
use findings::catalog;
use nvidia_host::capability::{Capabilities, Capability, Omit};
use nvidia_host::config::Config;
use nvidia_host::driver::diagnosis;
use nvidia_host::driver::libraries::{LinkerCache, Search};
use nvidia_host::driver::nodes::{CTL_MINOR, MODESET_MINOR};
use nvidia_host::driver::platform::Platform;
use nvidia_host::driver::{ipc, locate, packages, pci, wsl};
use nvidia_host::host::{self, Roots, complete};
use nvidia_host::inventory::ask::{self, Question};
use nvidia_host::inventory::cap_files;
use nvidia_host::inventory::caps::MIG_MINORS;
use nvidia_host::inventory::identity::{self, Who};
use nvidia_host::inventory::procfs;

use super::driver::NO_MODULE;
use super::facts::{DriverFacts, HostNode, Nvml};

/// The EFI variable of Secure Boot: four bytes of attributes, then 1 if the firmware enforces signatures, else 0.
const SECURE_BOOT: &str =
    "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// Inspects the driver. This asks NVML, which can take seconds.
pub(super) fn inspect_driver(host: &Tree, config: &Config) -> DriverFacts {
    let mut facts = DriverFacts {
        pci: pci::devices(host),
        ..DriverFacts::default()
    };
    let modules = text(host, "/proc/modules").unwrap_or_default();
    facts.modules.extend(
        modules
            .lines()
            .filter_map(|line| line.split(' ').next())
            .map(str::to_owned),
    );
    facts.secure_boot = host
        .read(Path::new(SECURE_BOOT))
        .is_ok_and(|bytes| bytes.get(4) == Some(&1));
    (facts.refused, facts.xid) = kernel_log(host);
    facts.persistenced = host
        .locate(Path::new("/run/nvidia-persistenced/socket"))
        .is_ok();
    facts.fabric_manager = host
        .locate(Path::new("/run/nvidia-fabricmanager/socket"))
        .is_ok();
    let roots = match Roots::open_on(Some(host), config) {
        Ok(roots) => roots,
        Err(error) => {
            facts.diagnosis = Some(Finding::error(&error));
            "cannot open the driver root".clone_into(&mut facts.not_asked);
            return facts;
        }
    };
    let Roots {
        driver: root,
        dev,
        proc,
        ..
    } = &roots;
    facts.roots = Some(roots.clone());
    let all = Capabilities::new(&Capability::ALL);
    let (found, refused) = ipc::find(root, all, config.mps_directory.as_deref(), Omit::default());
    facts.daemons = (found.into_iter().map(|ipc| ipc.source).collect(), refused);
    facts.module = procfs::read_version(proc);
    facts.wsl = roots
        .is_wsl
        .then(|| wsl::identity(root).unwrap_or_default());
    let cache = LinkerCache::read(root, config.ldcache.as_ref());
    let any = Search {
        root,
        cache: &cache,
        version: "",
        dirs: &config.library_dirs,
        is_wsl: roots.is_wsl,
    };
    facts.on_disk = versions(&any);
    let version = facts.module.clone().unwrap_or_default();
    let search = Search {
        version: &version,
        ..any
    };
    let library = locate::management_library(&search);
    if library.is_none() || facts.module.is_none() && !roots.is_wsl {
        let seen = diagnosis::inspect(&search, facts.module.clone());
        let count = facts
            .pci
            .as_ref()
            .map(|devices| devices.iter().filter(|device| device.is_gpu()).count());
        let transactional = host
            .locate(Path::new("/usr/sbin/transactional-update"))
            .is_ok();
        let seen = diagnosis::Installation {
            platform: Platform::of_host(root, Some(host)),
            pci_gpus: count,
            transactional,
            ..seen
        };
        facts.diagnosis = diagnosis::diagnose(&seen, root).map(|error| Finding::error(&error));
    }
    if facts.diagnosis.is_some() && roots.is_wsl || facts.module.is_none() && !roots.is_wsl {
        NO_MODULE.clone_into(&mut facts.not_asked);
        return facts;
    }
    (facts.lacking, facts.not_installed) = lacking(&search);
    facts.unknown = locate::unknown_finding(&locate::unknown(&search));
    let gpus = procfs::read_gpus(proc);
    let minors = gpus
        .iter()
        .filter(|gpu| !gpu.excluded)
        .filter_map(|gpu| gpu.minor);
    if roots.is_wsl {
        // Its minor number is dynamic.
        facts.nodes.push(node(dev, wsl::NODE.to_owned(), 0));
    } else {
        facts
            .nodes
            .push(node(dev, "nvidiactl".to_owned(), CTL_MINOR));
        facts
            .nodes
            .extend(minors.map(|minor| node(dev, format!("nvidia{minor}"), minor)));
        facts.modeset = Some(node(dev, "nvidia-modeset".to_owned(), MODESET_MINOR));
    }
    if proc.locate(Path::new(MIG_MINORS)).is_ok() {
        facts.mig_caps = cap_files::existing(proc);
    }
    facts.features = host::features(&roots);
    facts.uvm = dev.locate(Path::new("/dev/nvidia-uvm")).ok();
    let found = facts
        .nodes
        .iter()
        .filter_map(|node| node.found.as_ref())
        .chain(&facts.uvm);
    let linked = |(major, minor): (u32, u32)| {
        host.locate(Path::new(&format!("/dev/char/{major}:{minor}")))
            .is_ok()
    };
    let without =
        found.filter(|node| node.kind == FileType::CharacterDevice && !linked(node.device));
    facts.without_link = without
        .map(|node| node.path.display().to_string())
        .collect();
    let who = identity::from_config(config);
    let place = library.and_then(|library| Question::place(root, dev, &library.source).ok());
    let (nvml_root, inside) = place.clone().unwrap_or_else(|| (dev.path(), "/".into()));
    let chosen = who
        .as_ref()
        .ok()
        .map(|who| identity::choose(*who, &nvml_root, &inside));
    facts.identity = match (&who, &chosen) {
        (Err(error), _) | (_, Some(Err(error))) => Some(Err(Finding::error(error))),
        (Ok(_), Some(Ok(identity))) => identity.map(Ok),
        (Ok(_), None) => None,
    };
    facts.only_root_may_ask = matches!(facts.identity, Some(Ok(Identity { uid: 0, .. })));
    let question = match question(place, who, &version, config) {
        Ok(question) => Question {
            is_wsl: roots.is_wsl,
            ..question
        },
        Err(why) => {
            facts.not_asked = why;
            return facts;
        }
    };
    let start = Instant::now();
    let mut answer =
        ask::ask(&question, start + config.nvml_timeout).map(|answer| answer.inventory);
    let took = start.elapsed();
    if let Ok(inventory) = &mut answer {
        complete(&roots, inventory, &gpus);
        inventory.is_wsl = roots.is_wsl;
    }
    facts.nvml = Some(Nvml {
        question,
        answer: answer.map_err(|error| Finding::error(&error)),
        took,
    });
    facts
}

/// Returns the text of a file, or `None` if it cannot be read.
pub(super) fn text(host: &Tree, path: &str) -> Option<String> {
    Some(String::from_utf8_lossy(&host.read(Path::new(path)).ok()?).into_owned())
}

fn node(dev: &Tree, name: String, minor: u32) -> HostNode {
    HostNode {
        found: dev.locate(&Path::new("/dev").join(&name)).ok(),
        name,
        minor,
    }
}

/// Returns the question for the library at this place, or why NVML is not asked.
fn question(
    place: Option<(HostPath, PathBuf)>,
    who: Result<Who>,
    version: &str,
    config: &Config,
) -> Result<Question, String> {
    // An update can leave a library of another version.
    let (root, library) =
        place.ok_or_else(|| format!("libnvidia-ml of driver {version} is missing"))?;
    let who = who.map_err(|_| "the user in config.toml is unknown")?;
    if who == Who::Unchanged && root.as_path() != Path::new("/") {
        return Err("only root can ask NVML below another driver root".to_owned());
    }
    Ok(Question {
        root,
        library,
        who,
        deadline: config.nvml_timeout,
        is_wsl: false,
    })
}

/// Returns the versions in the file names of libnvidia-ml and libcuda in the usual directories.
fn versions(search: &Search<'_>) -> BTreeSet<String> {
    let usual = nvidia_host::driver::file_table::LIBRARY_DIRS
        .iter()
        .map(Path::new);
    let mut found = BTreeSet::new();
    for dir in search.dirs.iter().map(PathBuf::as_path).chain(usual) {
        for name in search.root.names(dir) {
            let version = name.to_str().and_then(|name| {
                name.strip_prefix("libnvidia-ml.so.")
                    .or_else(|| name.strip_prefix("libcuda.so."))
                    .map(str::to_owned)
            });
            found.extend(version.filter(|version| version.contains('.')));
        }
    }
    found
}

/// Returns an error for each driver capability without its required library, and a finding about missing optional libraries. The fixes
/// name packages of the driver root's distribution.
fn lacking(search: &Search<'_>) -> (Vec<Finding>, Option<Finding>) {
    let (mut errors, mut lacking) = (Vec::new(), Vec::new());
    // Few servers have 32-bit libraries, and few containers request them.
    for capability in Capability::ALL
        .into_iter()
        .filter(|capability| *capability != Capability::Compat32)
    {
        match locate::locate(search, Capabilities::new(&[capability]), &[]) {
            Err(error) => errors.push(Finding::error(&error)),
            Ok((files, _)) => {
                let names = match search.is_wsl {
                    true => wsl::lacking_libraries(capability, &files.libraries),
                    false => locate::lacking_libraries(capability, &files.present()),
                };
                lacking.extend((!names.is_empty()).then_some((capability, names)));
            }
        }
    }
    if lacking.is_empty() {
        return (errors, None);
    }
    if search.is_wsl {
        return (
            errors,
            Some(wsl::lacking_finding(&catalog::NOT_INSTALLED, &lacking)),
        );
    }
    let fix = packages::commands(
        search.root,
        lacking.iter().map(|(capability, _)| *capability),
    );
    let what = packages::lacking_in_words(search.root, &lacking);
    (
        errors,
        Some(Finding::new(&catalog::NOT_INSTALLED, what, fix)),
    )
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
    let all = String::from_utf8_lossy(&bytes);
    // A line of /dev/kmsg is "priority,sequence,time,flags;message".
    let mut messages = all
        .lines()
        .map(|line| line.split_once(';').map_or(line, |(_, message)| message));
    let refusal = messages
        .clone()
        .rfind(|line| line.contains("nvidia") && REFUSALS.iter().any(|sign| line.contains(sign)));
    let xid = messages.rfind(|line| line.contains("NVRM: Xid"));
    (refusal.map(str::to_owned), xid.map(str::to_owned))
}
