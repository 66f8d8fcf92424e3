//! Reads a host into [`Facts`].

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::FileType;

use super::facts::{CdiView, Distribution, DriverFacts, Facts, Node, PciDevice, Selinux};
use crate::cdi::check::{self, Now};
use crate::cdi::engine as cdi_engine;
use crate::cdi::registry::{self, Found};
use crate::cdi::stamp::Stamp;
use crate::config::{self, Config};
use crate::driver::diagnosis::{self, PCI_DEVICES};
use crate::driver::libraries::{LinkerCache, Search};
use crate::driver::nodes::CTL_MINOR;
use crate::driver::{DriverRoot, locate};
use crate::engine::{Engine, Kind, User, hooks, runtime};
use crate::error::line;
use crate::finding::{Finding, catalog};
use crate::inventory::procfs::{self, DRIVER_PROC};
use crate::nvml::child::{self, Question};
use crate::nvml::identity;
use crate::paths::HostPath;
use crate::request::{Capabilities, Capability};

/// Who asks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// If it is not root
    pub user: Option<User>,
    /// Group ids
    pub groups: BTreeSet<u32>,
}

/// Programs of NVIDIA's container toolkit.
const NVIDIAS: [&str; 6] = [
    "nvidia-container-runtime-hook",
    "nvidia-container-toolkit",
    "nvidia-container-runtime",
    "nvidia-container-cli",
    "nvidia-cdi-hook",
    "nvidia-ctk",
];

/// Where the firmware says whether it enforces signatures: four bytes of attributes, then 1 or 0.
const SECURE_BOOT: &str = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// Looks at the host below `host`. `config` is the file of `--config`.
#[must_use]
pub fn look(host: &DriverRoot, config: Option<&Path>, caller: Caller) -> Facts {
    let config = read_config(host, config);
    let settings = config.as_ref().map_or_else(|_| Config::default(), |(config, _)| config.clone());
    let engines = crate::engine::look::look(host, caller.user.clone());
    let is_nvidias = |path: &PathBuf| host.locate(path).is_ok_and(|found| !found.path.ends_with("oci-nvidia-hook"));
    let nvidias = NVIDIAS.iter().filter_map(|name| runtime::program(host, name)).filter(is_nvidias).collect();
    Facts {
        distribution: distribution(
            &text(host, "/etc/os-release").or_else(|| text(host, "/usr/lib/os-release")).unwrap_or_default(),
        ),
        log: settings.debug.as_ref().map(|log| (log.as_path().to_owned(), try_log(host, log))),
        journal: host.locate(Path::new("/run/systemd/journal/socket")).is_ok(),
        driver: driver(host, &settings),
        cdi: cdi(host, &settings, &engines),
        installed: hooks::installed(host),
        cgroup_v2: cgroup_v2(host),
        systemd: host.locate(Path::new("/run/systemd/system")).is_ok(),
        selinux: selinux(host),
        user: caller.user,
        groups: caller.groups,
        config,
        engines,
        nvidias,
    }
}

fn text(host: &DriverRoot, path: &str) -> Option<String> {
    Some(String::from_utf8_lossy(&host.read(Path::new(path)).ok()?).into_owned())
}

/// A host that is a directory has its driver there too.
fn read_config(host: &DriverRoot, path: Option<&Path>) -> Result<(Config, Vec<Finding>), Finding> {
    let prefix = host.path();
    let is_all = prefix.as_path() == Path::new("/");
    let below = host.locate(Path::new("/etc/nvidia-container-runtime/config.toml")).ok().filter(|_| !is_all);
    let path = path.map(Path::to_owned).or_else(|| below.map(|file| file.host.as_path().to_owned()));
    let read =
        if is_all || path.is_some() { config::read(path.as_deref()) } else { Ok((Config::default(), Vec::new())) };
    let (mut config, findings) = read.map_err(|error| Finding::error(&error))?;
    let moved = |path: &HostPath| {
        HostPath::new(prefix.as_path().join(path.as_path().strip_prefix("/").unwrap_or(path.as_path())))
    };
    if !is_all && !config.driver_root.as_path().starts_with(prefix.as_path()) {
        config.driver_root = moved(&config.driver_root);
        config.dev_root = config.dev_root.as_ref().map(moved);
    }
    Ok((config, findings))
}

fn distribution(os_release: &str) -> Distribution {
    let words = |key: &str| {
        let line = os_release.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        line.unwrap_or_default().trim_matches('"').to_owned()
    };
    let all = format!("{} {}", words("ID"), words("ID_LIKE"));
    for word in all.split_whitespace() {
        match word {
            "ubuntu" => return Distribution::Ubuntu,
            "debian" => return Distribution::Debian,
            "fedora" | "rhel" | "centos" => return Distribution::Fedora,
            _ if word.contains("suse") || word.starts_with("sle") => return Distribution::Suse,
            _ => {}
        }
    }
    Distribution::Other
}

/// Whether the log can be written, without writing it.
fn try_log(host: &DriverRoot, log: &HostPath) -> Result<(), String> {
    let path = host.path().as_path().join(log.as_path().strip_prefix("/").unwrap_or(log.as_path()));
    let dir = path.parent().unwrap_or_else(|| Path::new("/"));
    let place = match path.symlink_metadata() {
        Ok(metadata) if metadata.is_symlink() => return Err("it is a link".to_owned()),
        Ok(metadata) if !metadata.is_file() => return Err("it is no file".to_owned()),
        Ok(_) => &path,
        Err(_) => dir,
    };
    rustix::fs::access(place, rustix::fs::Access::WRITE_OK).map_err(|error| line(&error.into()))
}

/// The driver root itself if it has `path`, else the host.
fn owner<'r>(driver: &'r DriverRoot, host: &'r DriverRoot, path: &str) -> &'r DriverRoot {
    if driver.locate(Path::new(path)).is_ok() { driver } else { host }
}

fn driver(host: &DriverRoot, config: &Config) -> DriverFacts {
    let mut facts = DriverFacts { pci: pci(host), ..DriverFacts::default() };
    let modules = text(host, "/proc/modules").unwrap_or_default();
    facts.modules = modules.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect();
    facts.secure_boot = host.read(Path::new(SECURE_BOOT)).is_ok_and(|bytes| bytes.get(4) == Some(&1));
    (facts.refused, facts.xid) = kernel_log(host);
    facts.persistenced = host.locate(Path::new("/run/nvidia-persistenced/socket")).is_ok();
    facts.fabric_manager = host.locate(Path::new("/run/nvidia-fabricmanager/socket")).is_ok();
    let root = match DriverRoot::open(&config.driver_root) {
        Ok(root) => root,
        Err(error) => {
            facts.diagnosis = Some(Finding::error(&error));
            "the driver root cannot be opened".clone_into(&mut facts.not_asked);
            return facts;
        }
    };
    let proc = owner(&root, host, DRIVER_PROC);
    let dev_root = config.dev_root.as_ref().and_then(|root| DriverRoot::open(root).ok());
    let dev = dev_root.as_ref().unwrap_or_else(|| owner(&root, host, "/dev/nvidiactl"));
    facts.module = procfs::read_version(proc);
    let cache = LinkerCache::read(&root, config.ldcache.as_ref());
    let any = Search { root: &root, cache: &cache, version: "", dirs: &config.library_dirs };
    facts.on_disk = versions(&any);
    let version = facts.module.clone().unwrap_or_default();
    let search = Search { version: &version, ..any };
    let library = locate::management_library(&search);
    if library.is_none() || facts.module.is_none() {
        let seen = diagnosis::look(&search, facts.module.clone());
        let count = facts.pci.as_ref().map(|devices| devices.iter().filter(|device| device.is_gpu()).count());
        let transactional = host.locate(Path::new("/usr/sbin/transactional-update")).is_ok();
        let seen = diagnosis::Facts { pci_gpus: count, transactional, ..seen };
        facts.diagnosis = diagnosis::diagnose(&seen, &root).map(|error| Finding::error(&error));
    }
    if facts.module.is_none() {
        "the kernel module is not loaded".clone_into(&mut facts.not_asked);
        return facts;
    }
    facts.lacking = lacking(&search);
    let gpus = procfs::read_gpus(proc);
    let minors = gpus.iter().filter_map(|gpu| Some((format!("nvidia{}", gpu.minor?), gpu.minor?)));
    let all = std::iter::once(("nvidiactl".to_owned(), CTL_MINOR)).chain(minors);
    let node =
        |(name, minor): (String, u32)| Node { found: dev.locate(&Path::new("/dev").join(&name)).ok(), name, minor };
    facts.nodes = all.map(node).collect();
    facts.uvm = dev.locate(Path::new("/dev/nvidia-uvm")).ok();
    let found = facts.nodes.iter().filter_map(|node| node.found.as_ref()).chain(&facts.uvm);
    let linked = |(major, minor): (u32, u32)| host.locate(Path::new(&format!("/dev/char/{major}:{minor}"))).is_ok();
    let without = found.filter(|node| node.kind == FileType::CharacterDevice && !linked(node.device));
    facts.without_link = without.map(|node| node.path.display().to_string()).collect();
    let identity = identity::of(config, dev);
    facts.identity = identity.as_ref().map_or_else(|error| Some(Err(Finding::error(error))), |who| who.map(Ok));
    let Some(library) = library.and_then(|library| root.inside(&library.source).ok()) else {
        "libnvidia-ml is not there".clone_into(&mut facts.not_asked);
        return facts;
    };
    let Ok(identity) = identity else {
        "the user in config.toml is unknown".clone_into(&mut facts.not_asked);
        return facts;
    };
    if identity.is_none() && root.path().as_path() != Path::new("/") {
        "asking NVML below another driver root takes root".clone_into(&mut facts.not_asked);
        return facts;
    }
    let start = Instant::now();
    let question = Question { root: root.path(), library, identity, deadline: config.nvml_timeout };
    let answer = child::ask(&question).map_err(|error| Finding::error(&error));
    let took = start.elapsed();
    let answer = answer.map(|mut inventory| {
        let node_exists = |minor| facts.nodes.iter().any(|node| node.minor == minor && node.found.is_some());
        procfs::complete(&mut inventory, &gpus, node_exists);
        inventory
    });
    facts.nvml = Some((answer, took));
    facts
}

fn pci(host: &DriverRoot) -> Option<Vec<PciDevice>> {
    let dir = Path::new(PCI_DEVICES);
    host.locate(dir).ok()?;
    let device = |name: std::ffi::OsString| {
        let of =
            |file: &str| Some(String::from_utf8_lossy(&host.read(&dir.join(&name).join(file)).ok()?).trim().to_owned());
        if of("vendor")? != "0x10de" {
            return None;
        }
        let driver = host.locate(&dir.join(&name).join("driver")).ok();
        let driver = driver.and_then(|driver| Some(driver.path.file_name()?.to_string_lossy().into_owned()));
        Some(PciDevice { address: name.to_string_lossy().into_owned(), class: of("class")?, driver })
    };
    Some(host.names(dir).into_iter().filter_map(device).collect())
}

/// The versions in the names of libnvidia-ml and libcuda, wherever they usually are.
fn versions(search: &Search<'_>) -> BTreeSet<String> {
    let usual = crate::driver::catalog::LIBRARY_DIRS.iter().map(Path::new);
    let mut found = BTreeSet::new();
    for dir in search.dirs.iter().map(PathBuf::as_path).chain(usual) {
        for name in search.root.names(dir) {
            let version = name.to_str().and_then(|name| {
                name.strip_prefix("libnvidia-ml.so.").or_else(|| name.strip_prefix("libcuda.so.")).map(str::to_owned)
            });
            found.extend(version.filter(|version| version.contains('.')));
        }
    }
    found
}

fn lacking(search: &Search<'_>) -> Vec<(Capability, Finding)> {
    let missing = |capability: &Capability| {
        let error = locate::locate(search, Capabilities::of(&[*capability]), &[]).err()?;
        Some((*capability, Finding::error(&error)))
    };
    Capability::ALL.iter().filter_map(missing).collect()
}

/// What the kernel said last of a module of NVIDIA's that it refused, and of an error of a GPU; nothing if its log may
/// not be read.
fn kernel_log(host: &DriverRoot) -> (Option<String>, Option<String>) {
    const MOST: usize = 8 << 20;
    let open =
        OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(host.path().as_path().join("dev/kmsg"));
    let Ok(mut kmsg) = open else { return (None, None) };
    let mut bytes = Vec::new();
    let mut record = [0; 8192];
    // A record at each read; EPIPE: one was overwritten meanwhile.
    while bytes.len() < MOST {
        match kmsg.read(&mut record) {
            Ok(0) => break,
            Ok(count) => bytes.extend_from_slice(record.get(..count).unwrap_or_default()),
            Err(error) if error.raw_os_error() == Some(nix::libc::EPIPE) => {}
            Err(_) => break,
        }
    }
    let all = String::from_utf8_lossy(&bytes);
    let message = |line: &str| line.split_once(';').map_or(line, |(_, message)| message).to_owned();
    let last = |is: &dyn Fn(&str) -> bool| all.lines().rfind(|line| is(line)).map(message);
    let is_refusal = |line: &str| {
        let signs = [
            "verification failed",
            "rejected",
            "Lockdown",
            "Unknown symbol",
            "version magic",
            "disagrees about version",
        ];
        line.contains("nvidia") && signs.iter().any(|sign| line.contains(sign))
    };
    (last(&is_refusal), last(&|line: &str| line.contains("NVRM: Xid")))
}

fn cgroup_v2(host: &DriverRoot) -> Option<bool> {
    if host.locate(Path::new("/sys/fs/cgroup/cgroup.controllers")).is_ok() {
        return Some(true);
    }
    host.locate(Path::new("/sys/fs/cgroup/devices")).is_ok().then_some(false)
}

fn selinux(host: &DriverRoot) -> Option<Selinux> {
    let enforce = text(host, "/sys/fs/selinux/enforce")?;
    let boolean = |name: &str| Some(text(host, &format!("/sys/fs/selinux/booleans/{name}"))?.starts_with('1'));
    Some(Selinux {
        enforcing: enforce.trim() == "1",
        devices: boolean("container_use_devices"),
        xserver_devices: boolean("container_use_xserver_devices"),
    })
}

fn cdi(host: &DriverRoot, config: &Config, engines: &[Engine]) -> Vec<CdiView> {
    let stamp = Stamp::look(config, &"");
    let below = |path: &Path| host.path().as_path().join(path.strip_prefix("/").unwrap_or(path));
    let mut views: Vec<(Vec<PathBuf>, Vec<cdi_engine::Engine>, Vec<String>)> = Vec::new();
    for engine in engines.iter().filter(|engine| engine.program.is_some()) {
        let kind = match engine.kind {
            Kind::Podman | Kind::PodmanOf(_) => cdi_engine::Kind::Podman,
            Kind::Crio => cdi_engine::Kind::Crio,
            Kind::Docker => continue,
        };
        let known = engine.version.map(|version| cdi_engine::Engine { kind, version: (version.0, version.1) });
        let dirs = &engine.settings.cdi_dirs;
        match views.iter_mut().find(|(known, ..)| known == dirs) {
            Some((_, engines, names)) => {
                engines.extend(known);
                names.push(engine.kind.to_string());
            }
            None => views.push((dirs.clone(), known.into_iter().collect(), vec![engine.kind.to_string()])),
        }
    }
    let view = |(dirs, engines, names): (Vec<PathBuf>, Vec<cdi_engine::Engine>, Vec<String>)| {
        let files = registry::read(&dirs.iter().map(|dir| below(dir)).collect::<Vec<_>>());
        let now = Now { engines: &engines, stamp: stamp.as_ref() };
        let mut verdicts = check::devices(&files, &now, |path| rustix::fs::lstat(below(Path::new(path))).is_ok());
        let is_ours = |file: usize| files.get(file).and_then(|file| Stamp::of(file.spec.as_ref().ok()?)).is_some();
        let conflicts = registry::resolve(&files).into_iter().filter_map(|(name, found)| match found {
            Found::Conflict(a, b) => {
                // Ours is made anew by itself.
                let (a, b) = if is_ours(a) { (b, a) } else { (a, b) };
                let [a, b] =
                    [a, b].map(|file| files.get(file).map(|file| file.path.display().to_string()).unwrap_or_default());
                verdicts.retain(|verdict| verdict.subject != name);
                Some(Finding::of(
                    &catalog::SPEC_CONFLICT,
                    format!("\"{a}\" and \"{b}\" both have {name}"),
                    format!("rm {a}"),
                ))
            }
            Found::In(_) => None,
        });
        let conflicts = conflicts.collect();
        verdicts.extend(check::files(&files));
        CdiView { engines: names.join(", "), dirs, verdicts, conflicts }
    };
    views.into_iter().map(view).collect()
}
