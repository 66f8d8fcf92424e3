//! Checks of the driver: its kernel module, libraries and device nodes.

use rustix::fs::FileType;

use base::tree::ResolvedFile;
use findings::catalog;
use nvidia_host::driver::access::Permissions;
use nvidia_host::driver::group::GIVE_A_GROUP;
use nvidia_host::driver::nodes::NVIDIA_MAJOR;
use nvidia_host::driver::packages::Distribution;
use nvidia_host::inventory::identity::NOBODY;

use super::check::{Check, count, or_ok};
use super::facts::{Facts, HostNode};

pub(super) const NO_MODULE: &str = "the kernel module is not loaded";

/// Returns why a check of the kernel module's parts is skipped.
pub(super) fn no_module(facts: &Facts) -> Check {
    Check::skipped(if facts.driver.wsl.is_some() {
        "WSL 2 does not have the kernel module nvidia"
    } else {
        NO_MODULE
    })
}

pub(super) fn module(facts: &Facts) -> Check {
    let driver = &facts.driver;
    if let (Some(version), true) = (&driver.module, driver.is_hidden) {
        return Check::ok(format!(
            "NVML reports driver {version}; \"/proc/driver/nvidia\" is hidden, so the inventory is not cached"
        ));
    }
    if let Some(version) = &driver.module {
        return Check::ok(format!("the kernel module of driver {version} is loaded"));
    }
    if driver.wsl.is_some() {
        return Check::ok("this host is WSL 2, whose driver is part of Windows");
    }
    if !facts.has_gpu() {
        return Check::skipped("this host has no NVIDIA GPU");
    }
    if let Some(check) = other_driver(facts) {
        return check;
    }
    let Some(mut finding) = driver.diagnosis.clone() else {
        return Check::of(&catalog::NOT_LOADED, NO_MODULE, "modprobe nvidia");
    };
    if let Some(refused) = &driver.refused {
        finding.what = format!("{}; the kernel logged: {refused}", finding.what);
    }
    if driver.secure_boot && finding.kind.id() == catalog::NOT_LOADED.id() {
        finding.what.push_str("; Secure Boot is on");
        finding.fix = match facts.distribution {
            Distribution::Suse => {
                "run \"mokutil --import /usr/share/nvidia-pubkeys/*.der\", reboot and enroll the key; or install \
                                   nvidia-open-driver-G07-signed-kmp-default"
                    .to_owned()
            }
            _ => "sign the module, run \"mokutil --import KEY.der\", reboot and enroll the key".to_owned(),
        };
    }
    Check::found(finding)
}

/// Returns the finding if another kernel module drives the GPUs: a free driver, or vfio-pci for virtual machines.
fn other_driver(facts: &Facts) -> Option<Check> {
    let pci = facts.driver.pci.iter().flatten();
    let gpus = Vec::from_iter(pci.filter(|device| device.is_gpu()));
    for gpu in &gpus {
        if let Some(other @ ("nouveau" | "nova_core" | "nova-core")) = gpu.driver.as_deref() {
            let what = format!(
                "the kernel module {other} drives {}, so nvidia is not loaded",
                gpu.address
            );
            let fix = format!(
                "echo \"blacklist {other}\" >/etc/modprobe.d/50-{other}.conf; dracut --force; reboot"
            );
            return Some(Check::of(&catalog::NOT_LOADED, what, fix));
        }
    }
    let is_reserved = gpus
        .iter()
        .all(|gpu| gpu.driver.as_deref() == Some("vfio-pci"));
    if gpus.is_empty() || !is_reserved {
        return None;
    }
    let what = "all GPUs are reserved for virtual machines (vfio-pci)";
    let fix = "remove them from the option ids= of vfio-pci, and reboot";
    Some(Check::of(&catalog::NOT_LOADED, what, fix))
}

pub(super) fn libraries(facts: &Facts) -> Check {
    let driver = &facts.driver;
    if let Some(packages) = &driver.wsl {
        let ok = || {
            Check::ok(format!(
                "Windows has the driver package {}",
                packages.replace('+', " and ")
            ))
        };
        return driver.diagnosis.clone().map_or_else(ok, Check::found);
    }
    match (&driver.module, &driver.diagnosis) {
        (None, _) if driver.on_disk.is_empty() => Check::skipped("no driver is installed"),
        (None, _) => Check::skipped(format!("{NO_MODULE}, so the required version is unknown")),
        (Some(_), Some(finding)) => Check::found(finding.clone()),
        (Some(version), None) if !driver.other_driver.is_empty() => Check::of(
            &catalog::MISMATCH,
            format!(
                "driver {version} is loaded, and these running containers have the files of another one: {}",
                driver.other_driver.join(", ")
            ),
            "restart these containers",
        ),
        (Some(version), None) => Check::ok(format!(
            "libnvidia-ml has the version of the kernel module, {version}"
        )),
    }
}

pub(super) fn versions(facts: &Facts) -> Check {
    if facts.driver.wsl.is_some() {
        return Check::skipped("the names of WSL 2's libraries do not contain the version");
    }
    let versions: Vec<_> = facts.driver.on_disk.iter().map(String::as_str).collect();
    match versions.as_slice() {
        [] => return Check::skipped("the library directories contain no driver"),
        [one] => return Check::ok(format!("only libraries of driver {one} are installed")),
        _ => {}
    }
    let what = format!(
        "the libraries of driver {} are installed",
        versions.join(" and ")
    );
    Check::of(
        &catalog::SEVERAL_VERSIONS,
        what,
        "remove the packages of the versions that are not loaded",
    )
}

pub(super) fn capabilities(facts: &Facts) -> Vec<Check> {
    let driver = &facts.driver;
    if driver.module.is_none() && driver.wsl.is_none() || driver.diagnosis.is_some() {
        return vec![Check::skipped("the driver is not complete")];
    }
    let parts = [&driver.not_installed, &driver.unknown];
    let notes = parts
        .into_iter()
        .flatten()
        .map(|finding| Check::found(finding.clone()));
    if driver.lacking.is_empty() && driver.not_installed.is_none() {
        let ok = Check::ok("the libraries of every driver capability are installed");
        return std::iter::once(ok).chain(notes).collect();
    }
    driver
        .lacking
        .iter()
        .map(|finding| Check::found(finding.clone()))
        .chain(notes)
        .collect()
}

/// Checks the sockets of the driver's daemons.
pub(super) fn daemons(facts: &Facts) -> Vec<Check> {
    let (given, refused) = &facts.driver.daemons;
    if !refused.is_empty() {
        return refused
            .iter()
            .map(|finding| Check::found(finding.clone()))
            .collect();
    }
    let given: Vec<_> = given.iter().map(ToString::to_string).collect();
    match given.as_slice() {
        [] => vec![Check::skipped("no daemon of the driver runs")],
        given => vec![Check::ok(format!(
            "containers can reach {}",
            given.join(", ")
        ))],
    }
}

pub(super) fn nodes(facts: &Facts) -> Vec<Check> {
    if facts.driver.wsl.is_some() {
        return or_ok(
            facts.driver.nodes.iter().map(of_wsl),
            Check::skipped("Windows does not have NVIDIA's driver"),
        );
    }
    if facts.driver.module.is_none() {
        return vec![Check::skipped(NO_MODULE)];
    }
    let nodes = &facts.driver.nodes;
    let absent: Vec<_> = nodes
        .iter()
        .filter(|node| node.found.is_none())
        .map(|node| node.name.as_str())
        .collect();
    let absent = (!absent.is_empty())
        .then(|| Check::of(&catalog::NODE_MISSING, missing(&absent), prepare(facts)));
    let wrong = nodes
        .iter()
        .filter_map(|node| is_another(node, node.found.as_ref()?));
    or_ok(
        absent.into_iter().chain(wrong),
        Check::ok(format!(
            "all {} required exist",
            count(nodes.len(), "device node")
        )),
    )
}

/// Checks the node of WSL 2. The kernel creates it when it starts.
fn of_wsl(node: &HostNode) -> Check {
    let restart = "run \"wsl --update\" and \"wsl --shutdown\" in Windows, and start WSL again";
    match &node.found {
        None => Check::of(&catalog::NODE_MISSING, missing(&[&node.name]), restart),
        Some(found) if found.kind != FileType::CharacterDevice => Check::of(
            &catalog::NODE_WRONG,
            format!("{} is not a character device", found.host),
            restart,
        ),
        Some(_) => Check::ok(format!(
            "the device node \"/dev/{}\" exists, which stands for all GPUs",
            node.name
        )),
    }
}

/// Names the device nodes, of which there is at least one, as missing.
pub(super) fn missing(names: &[&str]) -> String {
    let paths: Vec<_> = names
        .iter()
        .map(|name| format!("\"/dev/{name}\""))
        .collect();
    match paths.as_slice() {
        [path] => format!("the device node {path} is missing"),
        paths => format!("the device nodes {} are missing", paths.join(", ")),
    }
}

/// Returns the command that creates missing nodes.
pub(super) fn prepare(facts: &Facts) -> &'static str {
    if facts.user.is_some() {
        "as root: oci-nvidia-hook prepare"
    } else {
        "oci-nvidia-hook prepare"
    }
}

/// Returns an outcome if the node is not the device that belongs to its name.
fn is_another(node: &HostNode, found: &ResolvedFile) -> Option<Check> {
    if found.kind == FileType::CharacterDevice && found.device == (NVIDIA_MAJOR, node.minor) {
        return None;
    }
    if found.kind != FileType::CharacterDevice {
        return Some(not_a_device(found));
    }
    let what = format!(
        "{} is not the device {NVIDIA_MAJOR}:{}",
        found.host, node.minor
    );
    Some(Check::of(&catalog::NODE_WRONG, what, create_again(found)))
}

fn not_a_device(found: &ResolvedFile) -> Check {
    Check::of(
        &catalog::NODE_WRONG,
        format!("{} is not a character device", found.host),
        create_again(found),
    )
}

fn create_again(found: &ResolvedFile) -> String {
    format!(
        "rm {}; oci-nvidia-hook prepare",
        found.host.as_path().display()
    )
}

/// Checks the node for display output. Without a display, no program on the host opens the node, so the driver does not create it.
pub(super) fn modeset(facts: &Facts) -> Vec<Check> {
    let Some(node) = &facts.driver.modeset else {
        return vec![no_module(facts)];
    };
    let Some(found) = &node.found else {
        return vec![Check::of(
            &catalog::NO_MODESET,
            missing(&[&node.name]),
            prepare(facts),
        )];
    };
    or_ok(
        is_another(node, found),
        Check::ok("the device node \"/dev/nvidia-modeset\" exists"),
    )
}

pub(super) fn uvm(facts: &Facts) -> Check {
    if facts.driver.module.is_none() {
        return no_module(facts);
    }
    // Without /proc/modules, the module counts as loaded.
    let is_loaded = facts.driver.modules.contains("nvidia_uvm") || facts.driver.modules.is_empty();
    let loaded = if is_loaded {
        ""
    } else {
        ", and the kernel module nvidia_uvm is not loaded"
    };
    if let Some(found) = &facts.driver.uvm {
        return match found.kind {
            FileType::CharacterDevice => Check::ok("the device node \"/dev/nvidia-uvm\" exists"),
            _ => not_a_device(found),
        };
    }
    let fix = "run \"oci-nvidia-hook prepare\" as root, and for each boot \"echo nvidia-uvm >/etc/modules-load.d/nvidia-uvm.conf\"";
    let who = if facts.user.is_some() {
        "; rootless containers cannot load it"
    } else {
        ""
    };
    let what = format!("the device node \"/dev/nvidia-uvm\" is missing{loaded}{who}");
    Check::of(&catalog::NO_UVM, what, fix)
}

/// Returns whether a user without capabilities can open a node. `is_in` is whether the user is in a group.
pub(super) fn may_open(
    node: impl Into<Permissions>,
    uid: u32,
    is_in: impl Fn(u32) -> bool,
) -> bool {
    let node = node.into();
    node.allow(node.wanted(), node.uid == uid, is_in(node.gid))
}

pub(super) fn hooks_user(facts: &Facts) -> Check {
    match &facts.driver.identity {
        None if facts.driver.module.is_none() && facts.driver.wsl.is_none() => {
            Check::skipped(NO_MODULE)
        }
        None => Check::skipped("only root can check whether the hook as root can open the GPUs"),
        Some(Err(finding)) => Check::found(finding.clone()),
        Some(Ok(who)) => {
            let nodes = facts
                .driver
                .nodes
                .iter()
                .filter_map(|node| node.found.as_ref());
            let shut = nodes
                .clone()
                .find(|node| !may_open(*node, who.uid, |gid| gid == who.gid));
            let Some(node) = shut else {
                if facts.driver.only_root_may_ask {
                    return only_root(nodes);
                }
                let name = if who.uid == NOBODY { "nobody, " } else { "" };
                return Check::ok(format!(
                    "NVML runs as user {} ({name}group {}), who can open the GPUs",
                    who.uid, who.gid
                ));
            };
            let what = format!(
                "user {}, group {} cannot open {}",
                who.uid,
                who.gid,
                owned(node)
            );
            let fix = format!(
                "set user = \"root:{}\" in the [nvidia-container-cli] table of config.toml, or remove the line",
                group(node.gid)
            );
            Check::of(&catalog::NVML_PERMISSION, what, fix)
        }
    }
}

fn only_root<'a>(mut nodes: impl Iterator<Item = &'a ResolvedFile>) -> Check {
    let (what, fix) = if nodes.any(|node| !may_open(node, NOBODY, |gid| gid == node.gid)) {
        (
            "only root can open the driver's device nodes, so NVML runs as root",
            GIVE_A_GROUP,
        )
    } else {
        (
            "only root can read the driver's library libnvidia-ml.so.1, so NVML runs as root",
            "make the library readable, and the directories above it searchable, for all users (chmod o+rX)",
        )
    };
    Check::of(&catalog::NVML_AS_ROOT, what, fix)
}

/// Returns the path of a node with its owner and mode: `"/dev/nvidia0" (root:video 0660)`.
pub(super) fn owned(node: &ResolvedFile) -> String {
    format!(
        "{:?} ({}:{} {:04o})",
        node.path,
        user(node.uid),
        group(node.gid),
        node.mode
    )
}

fn user(uid: u32) -> String {
    let entry = base::accounts::user(uid).ok().flatten();
    entry.map_or_else(|| uid.to_string(), |user| user.name)
}

pub(super) fn group(gid: u32) -> String {
    nvidia_host::driver::group::name(gid).unwrap_or_else(|| gid.to_string())
}
