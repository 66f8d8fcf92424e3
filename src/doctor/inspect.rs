//! Reads a host into [`Facts`].

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use base::paths::HostPath;
use base::report::{Finding, line};
use base::search_path;
use base::tree::Tree;
use cdi_spec::registry::{self, Found, SpecFile};
use nvidia_host::cdi::stamp::Stamp;
use nvidia_host::config::{self, Config};
use nvidia_host::driver::packages;
use nvidia_host::host::node_limits;
use nvidia_host::programs;

use super::facts::{CdiView, DriverFacts, Facts, Selinux};
use super::inspect_driver::{inspect_driver, text};
use super::start;
use crate::record::log_file;
use engines::cdi::{self, DEFAULT_DIRS, View};
use engines::cdi_check::{self, CdiVerdict, Now};
use engines::{Engine, User, hook_env, hooks, status};
use plugin_api::control;
use plugin_api::processes;
use plugin_api::status::KubeletPlugin;

/// The calling user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// `None` if it is root
    pub user: Option<User>,
    pub groups: BTreeSet<u32>,
}

pub(super) const CONFIG: &str = "/etc/nvidia-container-runtime/config.toml";
/// The file of the packages with the defaults as comments.
pub(super) const DEFAULTS: &str = "/usr/share/oci-nvidia-hook/config.toml";

/// Inspects the host with this root directory. `config` is the file of `--config`; without it, the file that the engines pass to the hook.
pub fn inspect(host: &Tree, config: Option<&Path>, caller: Caller) -> Facts {
    let engines = engines::inspect_engines(host, caller.user.clone());
    let of_hooks = match config {
        Some(_) => None,
        None => status::config_of_hooks(&engines),
    };
    let of_hooks_on_host = of_hooks.as_ref().map(|(config, _)| host.on_host(config));
    let config = config.or(of_hooks_on_host.as_deref());
    let has_config = config.is_some() || host.locate(Path::new(CONFIG)).is_ok();
    let on_host = config.map_or_else(|| host.on_host(Path::new(CONFIG)), Path::to_owned);
    let config = read_config(host, config);
    let settings = match &config {
        Ok((config, _)) => config.clone(),
        Err(_) => Config::default(),
    };
    let mut driver = inspect_driver(host, &settings);
    driver.starts = start::inspect(host, &settings, &driver, caller.user.is_none());
    let kubelet_plugin = KubeletPlugin::inspect(host, caller.user.is_none());
    Facts {
        distribution: packages::distribution_of(host),
        log: settings
            .debug
            .as_ref()
            .map(|log| try_log(host, log.as_path())),
        journal: host
            .locate(Path::new("/run/systemd/journal/socket"))
            .is_ok(),
        cdi: inspect_cdi(host, &settings, &engines, &driver),
        driver,
        without_env: without_env(host, &engines),
        installed: hooks::installed(host),
        cgroup_v2: cgroup_v2(host),
        offered: if kubelet_plugin.is_some() {
            Some(control::devices(&host.on_host(Path::new(control::DIR))))
        } else {
            None
        },
        kubelet_plugin,
        systemd: host.locate(Path::new("/run/systemd/system")).is_ok(),
        selinux: selinux(host),
        user: caller.user,
        groups: caller.groups,
        config,
        has_config,
        config_of_hooks: of_hooks,
        has_drop_ins: config::drop_ins(&on_host).is_ok_and(|files| !files.is_empty()),
        has_defaults: host.locate(Path::new(DEFAULTS)).is_ok(),
        engines,
        nvidias: nvidias_programs(host),
        second_writers: second_writers(host),
    }
}

/// Returns the installed programs of NVIDIA's container toolkit.
fn nvidias_programs(host: &Tree) -> Vec<PathBuf> {
    let mut programs = Vec::new();
    for name in programs::ALL {
        if let Some(path) = search_path::find(host, name)
            && let Ok(found) = host.locate(&path)
            && !hooks::is_our_program(&found.path)
        {
            programs.push(path);
        }
    }
    programs
}

/// The units of NVIDIA's container toolkit 1.18 and newer that write `/var/run/cdi/nvidia.yaml`.
const TOOLKIT_UNITS: [&str; 2] = ["nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service"];

/// Returns the toolkit's units that are enabled, if ours are enabled too.
fn second_writers(host: &Tree) -> Vec<&'static str> {
    if !cdi_check::units_write(exists_on(host)) {
        return Vec::new();
    }
    let directory = host.on_host(Path::new("/etc/systemd/system"));
    let mut units = Vec::new();
    for unit in TOOLKIT_UNITS {
        // A unit can be masked and still have the link that enabled it.
        let is_masked =
            std::fs::read_link(directory.join(unit)).is_ok_and(|to| to == Path::new("/dev/null"));
        if !is_masked
            && directory
                .join("multi-user.target.wants")
                .join(unit)
                .is_symlink()
        {
            units.push(unit);
        }
    }
    units
}

/// Reads config.toml. If the host is a directory (in tests), the driver root is below that directory.
fn read_config(host: &Tree, path: Option<&Path>) -> Result<(Config, Vec<Finding>), Finding> {
    let prefix = host.path();
    let is_all = prefix.as_path() == Path::new("/");
    let read = if path.is_some() || is_all {
        config::read(path)
    } else if let Ok(file) = host.locate(Path::new(CONFIG)) {
        config::read(Some(file.host.as_path()))
    } else {
        config::read_below(prefix.as_path())
    };
    let (mut config, findings) = read.map_err(|error| Finding::error(&error))?;
    if !is_all && !config.driver_root.as_path().starts_with(prefix.as_path()) {
        config.driver_root = HostPath::new(host.on_host(config.driver_root.as_path()));
        if let Some(root) = &config.dev_root {
            config.dev_root = Some(HostPath::new(host.on_host(root.as_path())));
        }
    }
    Ok((config, findings))
}

fn try_log(host: &Tree, log: &Path) -> (PathBuf, Result<(), String>) {
    let result = log_file::check(host, log).map_err(|error| line(&error));
    (log.to_owned(), result)
}

fn cgroup_v2(host: &Tree) -> Option<bool> {
    let exists = |path: &str| host.locate(Path::new(path)).is_ok();
    if exists("/sys/fs/cgroup/cgroup.controllers") {
        Some(true)
    } else if exists("/sys/fs/cgroup/devices") {
        Some(false)
    } else {
        None
    }
}

fn selinux(host: &Tree) -> Option<Selinux> {
    let enforce = text(host, "/sys/fs/selinux/enforce")?;
    let boolean = |name: &str| {
        Some(text(host, &format!("/sys/fs/selinux/booleans/{name}"))?.starts_with('1'))
    };
    Some(Selinux {
        enforcing: enforce.trim() == "1",
        devices: boolean("container_use_devices"),
        xserver_devices: boolean("container_use_xserver_devices"),
    })
}

/// Returns a finding for each hook entry without its own environment: in the hook files that engines read, and in the CDI specs in the
/// directories of all engines and of programs that this one does not know, such as containerd.
fn without_env(host: &Tree, engines: &[Engine]) -> Vec<Finding> {
    let mut dirs = DEFAULT_DIRS.map(PathBuf::from).to_vec();
    for engine in engines {
        dirs.extend_from_slice(&engine.settings.cdi_dirs);
    }
    // /var/run/cdi and /run/cdi are the same directory.
    let mut real = BTreeSet::new();
    for dir in dirs {
        if let Ok(found) = host.locate(&dir) {
            real.insert(host.on_host(&found.path));
        }
    }
    let specs = registry::read(&Vec::from_iter(real));
    let mut findings = hook_env::in_hook_files(engines);
    for (_, finding) in hook_env::in_specs(&specs) {
        findings.push(finding);
    }
    findings
}

fn inspect_cdi(
    host: &Tree,
    config: &Config,
    engines: &[Engine],
    driver: &DriverFacts,
) -> Vec<CdiView> {
    let mut stamp = Stamp::of_host(config, &"");
    if let (Some(stamp), Some(inventory)) = (&mut stamp, driver.inventory()) {
        stamp.complete(inventory);
    }
    let limits = node_limits(config).unwrap_or_default(); // the checks of the driver report its root
    let limits = match driver.inventory() {
        Some(inventory) => limits.with_inventory(inventory.clone()),
        None => limits,
    };
    let plugins = processes::of_host(host);
    let mut views = Vec::new();
    for View { readers, dirs } in cdi::views(engines) {
        let files = read_specs(host, &dirs);
        let inventory = driver.inventory();
        let view = cdi_check::view(&files, config, Some(host), stamp.as_ref(), inventory);
        let now = Now {
            readers: &readers,
            stamp: stamp.as_ref(),
            host: &view,
            units_write: cdi_check::units_write(exists_on(host)),
            limits: &limits,
            plugins: &plugins,
        };
        let (verdicts, conflicts) = inspect_specs(host, &files, &now);
        let names: Vec<_> = readers
            .iter()
            .map(|reader| reader.kind.to_string())
            .collect();
        views.push(CdiView {
            engines: names.join(", "),
            dirs,
            verdicts,
            conflicts,
        });
    }
    views
}

fn read_specs(host: &Tree, dirs: &[PathBuf]) -> Vec<SpecFile> {
    let dirs: Vec<_> = dirs.iter().map(|dir| host.on_host(dir)).collect();
    registry::read(&dirs)
}

fn exists_on(host: &Tree) -> impl Fn(&str) -> bool {
    |path| rustix::fs::lstat(host.on_host(Path::new(path))).is_ok()
}

/// Returns what is known about the devices in these files, and the conflicts between files.
fn inspect_specs(
    host: &Tree,
    files: &[SpecFile],
    now: &Now<'_>,
) -> (Vec<CdiVerdict>, Vec<Finding>) {
    let exists = exists_on(host);
    let mut verdicts = cdi_check::devices(files, now, &exists);
    let found = registry::resolve(files);
    verdicts.retain(|verdict| !matches!(found.get(&verdict.subject), Some(Found::Conflict(..))));
    verdicts.extend(cdi_check::files(files, now));
    (verdicts, cdi_check::conflicts(files, &exists))
}
