//! What doctor decides from the facts of a host.

use std::path::Path;
use std::time::Duration;

use ::engines::cdi_check::CdiVerdict;
use ::engines::hook_file;
use ::engines::hooks::{Execution, HookEntry, Hooks};
use ::engines::runtime::Runtime;
use ::engines::{Engine, EngineKind, User, Version};
use base::paths::HostPath;
use base::report::{Finding, Kind};
use base::sys::confine::Identity;
use base::tree::ResolvedFile;
use findings::catalog;
use nvidia_host::config::{Config, NodeAccess};
use nvidia_host::driver::DriverKind;
use nvidia_host::driver::packages::Distribution;
use nvidia_host::driver::params::NodePolicy;
use nvidia_host::driver::pci::PciDevice;
use nvidia_host::feature::Feature;
use nvidia_host::inventory::cap_files::CapFile;
use nvidia_host::inventory::caps::MigCap;
use nvidia_host::inventory::identity::{NOBODY, RunAs};
use nvidia_host::inventory::{FailedGpu, Inventory, UnlistedMig};
use nvidia_host::nvml::query::NvmlQuery;
use nvidia_host::prepare::host::Preparation;
use plugin_api::control::{Offered, OfferedDevice, OfferedDriver, OfferedResource, Unanswered};
use plugin_api::status::KubeletPlugin;
use rustix::fs::FileType;
use serde_json::{from_value, json};

use super::facts::{CdiView, DriverFacts, HostNode, Selinux, Start};
use super::*;

/// A group without a name on any host
const GROUP: u32 = 4_321_000;
const HOOK_FILE: &str = "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json";

fn node(name: &str, minor: u32) -> HostNode {
    let path = Path::new("/dev").join(name);
    let found = ResolvedFile {
        host: HostPath::new(&path),
        path,
        kind: FileType::CharacterDevice,
        device: (195, minor),
        uid: 0,
        gid: 0,
        mode: 0o666,
    };
    HostNode {
        name: name.to_owned(),
        minor,
        found: Some(found),
    }
}

fn gpu(address: &str, class: &str, driver: &str) -> PciDevice {
    PciDevice {
        address: address.to_owned(),
        class: class.to_owned(),
        driver: Some(driver.to_owned()),
    }
}

fn nvml() -> Nvml {
    let gpu = json!({
        "index": 0, "minor": 0, "uuid": "GPU-0", "bus_id": "00000000:01:00.0", "model": "A", "compute_capability": "8.0", "brand": "",
        "mig_enabled": false, "mig_devices": [],
    });
    let inventory = Inventory {
        driver_version: "535.1".to_owned(),
        gpus: vec![from_value(gpu).unwrap()],
        ..Inventory::default()
    };
    Nvml {
        question: NvmlQuery {
            root: HostPath::new("/"),
            library: "/usr/lib64/libnvidia-ml.so.1".into(),
            who: RunAs::Fewest,
            deadline: Duration::from_secs(10),
            kind: DriverKind::Linux,
        },
        answer: Ok(inventory),
        took: Duration::from_secs(1),
    }
}

fn driver() -> DriverFacts {
    let start = Start {
        capabilities: "all",
        findings: Vec::new(),
        error: None,
        prepares: Preparation::default(),
    };
    DriverFacts {
        starts: vec![start],
        pci: Some(vec![gpu("0000:01:00.0", "0x030200", "nvidia")]),
        module: Some("535.1".to_owned()),
        modules: ["nvidia", "nvidia_uvm"].map(str::to_owned).into(),
        on_disk: ["535.1".to_owned()].into(),
        nodes: vec![node("nvidiactl", 255), node("nvidia0", 0)],
        uvm: node("nvidia-uvm", 0).found,
        modeset: Some(node("nvidia-modeset", 254)),
        identity: Some(Ok(Identity {
            uid: NOBODY,
            gid: NOBODY,
        })),
        nvml: Some(nvml()),
        persistenced: true,
        ..DriverFacts::default()
    }
}

fn hook_entry(file: &str) -> HookEntry {
    HookEntry {
        file: file.into(),
        hook: hook_file::parse(include_bytes!("../../hooks.d/oci-nvidia-hook.json")).unwrap(),
        program: "/usr/bin/oci-nvidia-hook".into(),
        execution: Execution::Possible,
    }
}

/// CRI-O with runc and the hook.
fn engine() -> Engine {
    Engine {
        kind: EngineKind::Crio,
        program: Some("/usr/bin/crio".into()),
        hooks: Hooks {
            entries: vec![hook_entry(HOOK_FILE)],
            ..Hooks::default()
        },
        runtime: Some(Runtime {
            name: "runc".to_owned(),
            program: Some("/usr/bin/runc".into()),
            version: Some(Version(1, 1, 4)),
        }),
        ..Engine::default()
    }
}

/// A host without problems.
fn good() -> Facts {
    let config = Config {
        accept_envvar_when_unprivileged: false,
        ..Config::default()
    };
    Facts {
        user: None,
        groups: [].into(),
        distribution: Distribution::Suse,
        config: Ok((config, Vec::new())),
        has_config: true,
        config_of_hooks: None,
        has_drop_ins: false,
        has_defaults: true,
        log: None,
        journal: true,
        driver: driver(),
        engines: vec![engine()],
        installed: vec![HOOK_FILE.into()],
        nvidias: Vec::new(),
        second_writers: Vec::new(),
        cgroup_v2: Some(true),
        systemd: true,
        selinux: None,
        cdi: Vec::new(),
        without_env: Vec::new(),
        kubelet_plugin: None,
        offered: None,
    }
}

fn finding(kind: &'static Kind) -> Finding {
    Finding::new(kind, "what", "fix")
}

fn settings(facts: &mut Facts) -> &mut Config {
    &mut facts.config.as_mut().unwrap().0
}

fn inventory(facts: &mut Facts) -> &mut Inventory {
    facts.driver.nvml.as_mut().unwrap().answer.as_mut().unwrap()
}

/// Only members of a group can open the nodes.
fn close_nodes(facts: &mut Facts) {
    let found = facts
        .driver
        .nodes
        .iter_mut()
        .chain(&mut facts.driver.modeset);
    let nodes = found.filter_map(|node| node.found.as_mut());
    for node in nodes.chain(&mut facts.driver.uvm) {
        (node.gid, node.mode) = (GROUP, 0o660);
    }
}

fn log_in(facts: &mut Facts) {
    facts.user = Some(User {
        name: "tux".to_owned(),
        uid: 1000,
        home: None,
    });
}

fn split_gpu(facts: &mut Facts, caps: &[MigCap]) {
    inventory(facts).gpus[0].mig_enabled = true;
    let policy = NodePolicy {
        uid: 0,
        gid: 0,
        mode: 0o666,
        modify: true,
    };
    for cap in caps {
        facts.driver.mig_caps.push(CapFile {
            cap: *cap,
            minor: 1,
            policy,
        });
    }
}

fn plugin(facts: &mut Facts, socket: &str) {
    facts.kubelet_plugin = Some(KubeletPlugin {
        has_kubelet: true,
        sockets: vec![socket.into()],
        is_visible: true,
        ..KubeletPlugin::default()
    });
    let devices = vec![OfferedDevice::default(), OfferedDevice::default()];
    let resource = OfferedResource {
        devices,
        ..OfferedResource::default()
    };
    facts.offered = Some(Ok(Offered {
        resources: vec![resource],
        ..Offered::default()
    }));
}

fn claims(facts: &mut Facts, driver: OfferedDriver) {
    plugin(facts, "x");
    facts.offered.as_mut().unwrap().as_mut().unwrap().driver = Some(driver);
}

fn selinux(devices: Option<bool>, xserver_devices: Option<bool>) -> Option<Selinux> {
    Some(Selinux {
        enforcing: true,
        devices,
        xserver_devices,
    })
}

fn verdict(subject: &str, ok: bool, reason: &str) -> CdiVerdict {
    let mut verdict = CdiVerdict::default();
    verdict.subject = subject.to_owned();
    verdict.ok = ok;
    verdict.reason = reason.to_owned();
    verdict.hint = "fix".to_owned();
    verdict
}

fn view(verdicts: Vec<CdiVerdict>) -> Vec<CdiView> {
    vec![CdiView {
        engines: "CRI-O".to_owned(),
        dirs: vec!["/etc/cdi".into()],
        verdicts,
        conflicts: Vec::new(),
    }]
}

/// Returns the results of a check as `ONH-010: what`, or with the status instead of the number; then their fix.
fn results(facts: &Facts, check: &str) -> Vec<String> {
    in_words(examine(facts), check)
}

pub(super) fn in_words(results: Vec<Check>, check: &str) -> Vec<String> {
    let mut found = Vec::new();
    for result in results {
        let status = result.status.to_string();
        let head = result.id.unwrap_or(&status);
        assert_eq!(result.fix.is_empty(), result.id.is_none(), "{result:?}");
        if result.check == check {
            found.push(format!("{head}: {}; {}", result.what, result.fix));
        }
    }
    found
}

/// `CHECK facts: CHANGE => RESULT`: a change of facts without problems, and the beginning of a result of this check. The first words
/// are the functions that return these facts and the results of a check.
macro_rules! rows {
    ($good:ident $results:ident $($check:literal $facts:ident: $change:expr => $result:literal;)+) => {
        $(
            let mut facts = $good();
            let $facts = &mut facts;
            $change;
            let found = $results(&facts, $check);
            assert!(found.iter().any(|result| result.starts_with($result)), "{}: {}\n{found:#?}", $check, $result);
        )+
    };
}
pub(super) use rows;

#[test]
fn a_host_without_problems() {
    for check in examine(&good()) {
        assert!(check.status <= Status::Skipped, "{check:?}");
    }
}

#[test]
fn the_driver() {
    rows! { good results
        "pci" f: f.driver.pci = None => "skipped: the PCI bus cannot be inspected";
        "pci" f: f.driver.pci = Some(vec![]) => "ok: no GPU is on the PCI bus, but the driver is loaded";
        "pci" f: { f.driver.pci = Some(vec![]); f.driver.module = None } => "ONH-010: this host has no NVIDIA GPU";
        "pci" f: f.driver.pci = Some(vec![gpu("a", "0x030200", "nvidia"), gpu("b", "0x030200", "vfio-pci")])
            => "ok: 2 NVIDIA GPUs on the PCI bus, 1 of them reserved";
        "pci" f: f.driver.diagnosis = Some(finding(&catalog::PLATFORM)) => "ONH-024: what";
        "pci" f: f.driver.wsl = Some(String::new()) => "skipped: the GPUs of WSL 2";
        "module" f: f.driver.is_hidden = true => "ok: NVML reports driver 535.1; \"/proc/driver/nvidia\" is hidden";
        "module" f: f.driver.module = None => "ONH-011: the kernel module is not loaded; modprobe nvidia";
        "module" f: { f.driver.module = None; f.driver.pci = Some(vec![]) } => "skipped: this host has no NVIDIA GPU";
        "module" f: { f.driver.module = None; f.driver.pci = Some(vec![gpu("a", "0x030000", "nouveau")]) }
            => "ONH-011: the kernel module nouveau drives a, so nvidia is not loaded";
        "module" f: { f.driver.module = None; f.driver.pci = Some(vec![gpu("a", "0x030000", "vfio-pci")]) }
            => "ONH-011: all GPUs are reserved for virtual machines";
        "module" f: {
            f.driver.module = None;
            f.driver.diagnosis = Some(finding(&catalog::NOT_LOADED));
            f.driver.refused = Some("no signature".to_owned());
            f.driver.secure_boot = true;
        } => "ONH-011: what; the kernel logged: no signature; Secure Boot is on; run \"mokutil --import /usr/share/nvidia-pubkeys";
        "libraries" f: f.driver.module = None => "skipped: the kernel module is not loaded, so the required version";
        "libraries" f: { f.driver.module = None; f.driver.on_disk.clear() } => "skipped: no driver is installed";
        "libraries" f: f.driver.diagnosis = Some(finding(&catalog::MISMATCH)) => "ONH-013: what";
        "libraries" f: f.driver.wsl = Some("a+b".to_owned()) => "ok: Windows has the driver package a and b";
        "versions" f: f.driver.on_disk.insert("550".to_owned()) => "ONH-209: the libraries of driver 535.1 and 550 are";
        "versions" f: f.driver.on_disk.clear() => "skipped: the library directories contain no driver";
        "capabilities" f: f.driver.lacking = vec![finding(&catalog::LIBRARY_MISSING)] => "ONH-023: what";
        "capabilities" f: f.driver.diagnosis = Some(finding(&catalog::NO_LIBRARIES)) => "skipped: the driver is not complete";
        "daemons" f: f.driver.daemons.0 = vec![HostPath::new("/run/x")] => "ok: containers can reach \"/run/x\"";
    }
}

#[test]
fn device_nodes() {
    rows! { good results
        "nodes" f: f.driver.nodes[1].found = None => "ONH-021: the device node \"/dev/nvidia0\" is missing; oci-nvidia-hook prepare";
        "nodes" f: f.driver.nodes.iter_mut().for_each(|node| node.found = None) => "ONH-021: the device nodes \"/dev/nvidiactl\", ";
        "nodes" f: f.driver.nodes[1].minor = 5 => "ONH-022: \"/dev/nvidia0\" is not the device 195:5; rm /dev/nvidia0; ";
        "nodes" f: f.driver.nodes[1].found.as_mut().unwrap().kind = FileType::RegularFile
            => "ONH-022: \"/dev/nvidia0\" is not a character device";
        "nodes" f: f.driver.module = None => "skipped: the kernel module is not loaded";
        "modeset" f: f.driver.modeset.as_mut().unwrap().found = None => "ONH-223: the device node \"/dev/nvidia-modeset\" is missing";
        "modeset" f: f.driver.modeset.as_mut().unwrap().minor = 5 => "ONH-022: ";
        "uvm" f: f.driver.uvm = None => "ONH-205: the device node \"/dev/nvidia-uvm\" is missing; run ";
        "uvm" f: { f.driver.uvm = None; f.driver.modules.remove("nvidia_uvm") }
            => "ONH-205: the device node \"/dev/nvidia-uvm\" is missing, and the kernel module nvidia_uvm is not loaded";
        "uvm" f: { f.driver.uvm = None; log_in(f) }
            => "ONH-205: the device node \"/dev/nvidia-uvm\" is missing; rootless containers cannot load it; run ";
        "hook-user" f: f.driver.identity = None => "skipped: only root can check";
        "hook-user" f: { close_nodes(f); f.driver.identity = Some(Ok(Identity { uid: NOBODY, gid: 7 })) }
            => "ONH-019: user 65534, group 7 cannot open \"/dev/nvidiactl\" (root:4321000 0660); set user = \"root:4321000\"";
        "hook-user" f: { close_nodes(f); f.driver.identity = Some(Ok(Identity { uid: NOBODY, gid: GROUP })) }
            => "ok: NVML runs as user 65534 (nobody, group 4321000)";
        "hook-user" f: f.driver.only_root_may_ask = true => "ONH-314: only root can read the driver's library";
        "groups" f: close_nodes(f) => "ONH-212: only members of the group 4321000 can open the device nodes";
        "groups" f: { close_nodes(f); log_in(f) }
            => "ONH-211: user tux cannot open \"/dev/nvidiactl\" (root:4321000 0660); as root, run \"groupadd -g 4321000 ";
        "groups" f: { close_nodes(f); log_in(f); f.groups = [GROUP].into() }
            => "ONH-211: tux can open the device nodes as a member of 4321000, but containers lose this group; podman run --group-add";
        "groups" f: f.driver.nodes.clear() => "skipped: the device nodes are missing";
    }
}

#[test]
fn gpus() {
    rows! { good results
        "nvml" f: { f.driver.nvml = None; f.driver.not_asked = "why".to_owned() } => "skipped: why";
        "nvml" f: f.driver.nvml.as_mut().unwrap().took = Duration::from_millis(3_001) => "ONH-213: NVML took 3.0 s for 1 GPU";
        "nvml" f: f.driver.nvml.as_mut().unwrap().took = Duration::from_secs(3) => "ok: 1 GPU answered: driver 535.1, CUDA unknown";
        "nvml" f: f.driver.nvml.as_mut().unwrap().answer = Err(finding(&catalog::NVML)) => "ONH-018: what";
        "nvml" f: { f.driver.nvml.as_mut().unwrap().answer = Err(finding(&catalog::NVML_PERMISSION)); log_in(f) }
            => "skipped: this user cannot open the GPUs";
        "gpus" f: {
            inventory(f).failed = vec![FailedGpu { index: Some(3), why: "lost".to_owned(), ..FailedGpu::default() }];
            f.driver.xid = Some("Xid 79".to_owned());
        } => "ONH-201: GPU 3";
        "gpus" f: inventory(f).failed = vec![FailedGpu { node_missing: true, ..FailedGpu::default() }] => "ok: all GPUs with a device node";
        "persistence" f: f.driver.persistenced = false => "ONH-214: nvidia-persistenced does not run";
        "fabric-manager" f: f.driver.pci.as_mut().unwrap().push(gpu("c", "0x068000", "nvidia"))
            => "ONH-215: this host has 1 NVSwitch device, but";
        "mig" f: split_gpu(f, &[]) => "ONH-216: GPU 0 is in MIG mode but has no MIG device; run \"nvidia-smi mig -i 0 -cgi 0 -C\", ";
        "mig" f: split_gpu(f, &[MigCap::GpuInstance(0, 1)])
            => "ONH-216: GPU 0 has GPU instances without a compute instance, and therefore no MIG device; nvidia-smi mig -i 0 -cci";
        "mig" f: split_gpu(f, &[MigCap::GpuInstance(0, 1), MigCap::ComputeInstance(0, 1, 0)]) => "ONH-216: NVML lists no MIG device of GPU 0";
        "mig" f: split_gpu(f, &[MigCap::GpuInstance(7, 1)]) => "ONH-216: GPU 0 is in MIG mode but has no MIG device";
        // The instances exist: creating them again would stop containers.
        "mig" f: {
            split_gpu(f, &[]);
            let nodes = vec!["nvidia-caps/nvidia-cap13".to_owned()];
            inventory(f).gpus[0].unlisted_mig = vec![UnlistedMig { gpu_instance: 1, compute_instance: 0, nodes }];
        } => "ONH-232: device nodes of MIG devices of GPU 0 are missing: \"/dev/nvidia-caps/nvidia-cap13\" (GPU instance 1, ";
        "extra-devices" f: f.driver.modules.insert("gdrdrv".to_owned())
            => "ONH-233: the kernel module gdrdrv is loaded, but \"/dev/gdrdrv\" is missing";
        "extra-devices" f: f.driver.features = vec![(Feature::Gds, vec!["a".to_owned(), "b".to_owned()])]
            => "ok: containers get GPUDirect Storage (2 device nodes) with NVIDIA_GDS=enabled; no usable CDI spec contains nvidia.com/gds=all";
        "extra-devices" f: {
            f.driver.features = vec![(Feature::Gds, vec!["a".to_owned()])];
            f.cdi = view(vec![verdict("nvidia.com/gds=all", true, "")]);
        } => "ok: containers get GPUDirect Storage (1 device node) with NVIDIA_GDS=enabled or the CDI device nvidia.com/gds=all";
        "extra-devices" f: f.driver.pci = None => "skipped: this host does not have GPUDirect Storage";
    }
}

#[test]
fn settings_and_users() {
    rows! { good results
        "config" f: f.config = Err(finding(&catalog::CONFIG)) => "ONH-005: what";
        "config" f: settings(f).edit_cgroups = false => "ONH-313: no-cgroups = true in config.toml";
        "config" f: { settings(f).edit_cgroups = false; log_in(f) } => "ok: config.toml is valid";
        "config" f: f.config_of_hooks = Some(("/a".into(), "/b".into())) => "ok: \"/a\", which /b passes to the hook, is valid";
        "config" f: f.has_config = false => "ok: config.toml does not exist: the defaults are used, which ";
        "log" f: f.log = Some(("/x".into(), Err("gone".to_owned()))) => "ONH-102: cannot open the log file \"/x\": gone";
        "log" f: { f.log = Some(("/x".into(), Err("gone".to_owned()))); log_in(f) } => "skipped: the log file \"/x\" is not written";
        "log" f: f.journal = false => "ok: config.toml names no log file, and the journal does not run";
        "selinux" f: f.selinux = selinux(Some(false), None) => "ONH-508: SELinux is in enforcing mode, and container_use_devices is off";
        "selinux" f: f.selinux = selinux(Some(false), Some(false)) => "ONH-508: SELinux is in enforcing mode, and container_use_xserver_";
        "selinux" f: f.selinux = selinux(Some(false), Some(true)) => "ok: containers can use the GPUs";
        "selinux" f: f.selinux = selinux(None, None) => "skipped: the booleans of the policy";
        // The hook creates the nodes, unless one is open for all users, and not for rootless containers.
        "selinux" f: { f.selinux = selinux(Some(false), None); close_nodes(f) } => "ok: the hook creates the device nodes of containers";
        "selinux" f: { f.selinux = selinux(Some(false), None); close_nodes(f); f.driver.uvm.as_mut().unwrap().mode = 0o666 } => "ONH-508: ";
        "selinux" f: { f.selinux = selinux(Some(false), None); close_nodes(f); log_in(f) } => "ONH-508: ";
        "selinux" f: { f.selinux = selinux(Some(false), None); close_nodes(f); settings(f).device_node_access = NodeAccess::Host }
            => "ONH-508: ";
        "exposed" f: settings(f).accept_envvar_when_unprivileged = true => "ONH-106: every pod can request all GPUs";
        "exposed" f: f.engines.clear() => "skipped: the hook is not active in CRI-O";
    }
}

#[test]
fn engines_and_runtimes() {
    rows! { good results
        "engines" f: f.engines[0].hooks.entries.clear() => "ONH-501: CRI-O";
        // A CDI spec does not hide that no engine starts the hook.
        "engines" f: {
            f.engines[0].hooks.entries.clear();
            f.engines[0].settings.hooks_dirs = vec!["/d".into()];
            f.engines[0].settings.cdi_dirs = vec!["/etc/cdi".into()];
            f.cdi = view(vec![verdict("nvidia.com/gpu=all", true, "")]);
        } => "ONH-501: CRI-O: the hooks directories are /d, which do not contain /usr/share/containers/oci/hooks.d/oci-nvidia-hook.json; \
              1 CDI device can be requested by name";
        "engines" f: f.engines.clear() => "skipped: neither Podman nor CRI-O is installed";
        "engines" f: f.engines[0].unseen = vec!["/x".into()] => "skipped: this user cannot read \"/x\"";
        "engines" f: f.engines[0].settings.refused = Some(("/x".into(), "invalid".to_owned())) => "ONH-060: CRI-O";
        "containers" f: f.engines[0].hooks.entries.clear() => "skipped: no engine starts the hook";
        "timeouts" f: f.engines[0].hooks.entries[0].hook.timeout = None => "ONH-108: \"/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json\" has no timeout";
        "timeouts" f: settings(f).nvml_timeout = Duration::from_secs(55)
            => "ONH-108: \"/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json\" kills the hook after 60 s, but with nvml-timeout = 55 it can take 70 s";
        "timeouts" f: settings(f).nvml_timeout = Duration::from_secs(45) => "ok: the hook files have timeouts";
        // A package installs its own file again.
        "second-hook" f: f.engines[0].hooks.entries.push(hook_entry("/z.json"))
            => "ONH-503: CRI-O starts the hook twice, from /usr/share/containers/oci/hooks.d/oci-nvidia-hook.json and /z.json; rm /z.json";
        "second-hook" f: f.engines[0].hooks.entries.insert(0, hook_entry("/a.json"))
            => "ONH-503: CRI-O starts the hook twice, from /a.json and /usr/share/containers/oci/hooks.d/oci-nvidia-hook.json; rm /a.json";
        "second-hook" f: f.engines[0].hooks.entries[0].program = "/usr/bin/nvidia-container-runtime-hook".into() => "ONH-503: CRI-O starts ";
        "hook-env" f: f.without_env = vec![finding(&catalog::HOOK_WITHOUT_ENV)] => "ONH-061: what";
        "nvidia-toolkit" f: f.nvidias = vec!["/usr/bin/nvidia-ctk".into()] => "ONH-504: ";
        "nvidia-toolkit" f: f.second_writers = vec!["nvidia-cdi-refresh.path"]
            => "ONH-517: the services of NVIDIA's container toolkit also write \"/var/run/cdi/nvidia.yaml\": nvidia-cdi-refresh.path; systemctl";
        "runtime" f: f.engines[0].runtime.as_mut().unwrap().program = None => "ONH-505: CRI-O: the runtime runc is missing; install runc";
        "cgroups" f: f.cgroup_v2 = Some(false) => "ONH-506: CRI-O: systemd manages cgroups of version 1";
        "cgroups" f: { f.cgroup_v2 = Some(false); f.systemd = false } => "ok: the host uses cgroup version 1";
        "cgroups" f: { f.cgroup_v2 = Some(false); f.engines[0].settings.cgroup_manager = Some("cgroupfs".to_owned()) } => "ok: ";
        "cgroups" f: f.cgroup_v2 = None => "skipped: ";
        "dev-char" f: f.driver.without_link = vec!["/dev/nvidia3".to_owned()] => "ONH-507: CRI-O: runc 1.1.4 denies access to \"/dev/nvidia3\"";
        "dev-char" f: {
            f.driver.without_link = vec!["/dev/nvidia3".to_owned()];
            f.engines[0].runtime.as_mut().unwrap().version = Some(Version(1, 1, 7));
        } => "ok: no runtime of this host needs links";
    }
}

#[test]
fn cdi_specs_and_kubernetes() {
    rows! { good results
        "specs" f: f.cdi = view(vec![]) => "ok: no CDI devices in /etc/cdi; ";
        "specs" f: f.cdi = view(vec![verdict("a", true, "")]) => "ok: CRI-O can use 1 CDI device; ";
        "specs" f: {
            (f.engines[0].kind, f.engines[0].version) = (EngineKind::Podman, Some(Version(5, 4, 2)));
            f.cdi = view(vec![verdict("a", true, "")]);
            f.cdi[0].engines = "Podman".to_owned();
        }
            => "ok: Podman can use 1 CDI device; \"podman build\" of Podman 5.4 reads only /etc/cdi, ";
        "specs" f: f.cdi = view(vec![verdict("a", false, "old")]) => "ONH-404: CRI-O: a: old; fix";
        "specs" f: f.cdi = view(vec![verdict("a", false, "old"), verdict("b", false, "old")]) => "ONH-404: CRI-O: 2 devices: old; fix";
        "specs" f: f.cdi = view(["a", "b", "c", "d", "e"].map(|name| verdict(name, false, name)).into())
            => "ONH-404: 2 more devices with other problems";
        "kubelet-plugin" f: f.kubelet_plugin = Some(KubeletPlugin { is_visible: true, ..KubeletPlugin::default() })
            => "skipped: the kubelet plugin is installed, and ";
        "kubelet-plugin" f: f.kubelet_plugin = Some(KubeletPlugin { is_visible: true, has_kubelet: true, ..KubeletPlugin::default() })
            => "ONH-603: ";
        "kubelet-plugin" f: { plugin(f, "x"); let plugin = f.kubelet_plugin.as_mut().unwrap(); plugin.others = plugin.sockets.split_off(0) }
            => "ONH-601: another device plugin serves \"x\"";
        "kubelet-plugin" f: { plugin(f, "x"); f.offered = None } => "skipped: the kubelet has x, and no kubelet plugin answers";
        "kubelet-plugin" f: { plugin(f, "x"); f.offered = Some(Err(Unanswered::NotRunning)) } => "skipped: the kubelet has x, and no ";
        "kubelet-plugin" f: plugin(f, "x") => "ok: the kubelet plugin serves x, and offers 2 devices as healthy";
        "kubelet-plugin" f: {
            plugin(f, "x");
            let device = &mut f.offered.as_mut().unwrap().as_mut().unwrap().resources[0].devices[0];
            device.gpu = "GPU-1".to_owned();
            device.unhealthy = Some(from_value(json!({"why": "XID 79", "since": "2026-01-02T03:04:05Z"})).unwrap());
        } => "ONH-606: the kubelet plugin offers 1 of 2 devices as healthy: GPU-1: XID 79 (since 2026-01-02T03:04:05Z)";
        "kubelet-plugin" f: claims(f, OfferedDriver::default()) => "ONH-603: the driver \"\" for claims runs, and the kubelet has not";
        "kubelet-plugin" f: claims(f, OfferedDriver { is_registered: true, problem: Some("NVML".to_owned()), ..OfferedDriver::default() })
            => "ONH-074: claims cannot have a device: NVML";
        "kubelet-plugin" f: claims(f, OfferedDriver { is_registered: true, unpublished: Some("no".to_owned()), ..OfferedDriver::default() })
            => "ONH-608: no";
        "kubelet-plugin" f: claims(f, OfferedDriver { is_registered: true, name: "gpu".to_owned(), ..OfferedDriver::default() })
            => "ok: the driver \"gpu\" serves claims";
    }
}

/// A fault of the driver is an error only if containers do not start because of it.
#[test]
fn what_a_start_tolerates() {
    let status = |facts: &Facts| {
        let mut checks = examine(facts).into_iter();
        checks.find(|check| check.check == "nodes").unwrap().status
    };
    let mut facts = good();
    facts.driver.nodes[1].found = None;
    assert_eq!(status(&facts), Status::Warning);
    facts.driver.starts[0].prepares.modules = vec!["nvidia"];
    assert_eq!(status(&facts), Status::Note);
    facts.driver.starts[0].error = Some(finding(&catalog::NODE_MISSING));
    assert_eq!(status(&facts), Status::Error);
    facts.driver.starts.clear();
    assert_eq!(status(&facts), Status::Error);
    rows! { good results
        "containers" f: f.driver.starts[0].prepares.modules = vec!["nvidia-uvm"]
            => "ok: containers that request all GPUs start, and the hook first loads nvidia-uvm";
        "containers" f: f.driver.starts[0].error = Some(finding(&catalog::NODE_MISSING))
            => "ONH-021: a container with NVIDIA_DRIVER_CAPABILITIES=all does not start: what";
        "containers" f: f.driver.starts[0].findings = vec![finding(&catalog::NO_UVM)] => "ONH-205: what";
        // Another check has reported it.
        "containers" f: { f.driver.starts[0].findings = vec![finding(&catalog::NO_UVM)]; f.driver.uvm = None } => "ok: ";
        "containers" f: f.driver.starts.clear() => "skipped: NVML did not answer";
    }
}
