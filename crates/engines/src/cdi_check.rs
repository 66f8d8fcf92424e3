//! Decides whether engines can use the CDI devices of a host, and if not, why. The functions are pure.

use std::path::Path;

use serde::Serialize;

use base::report::Finding;
use cdi_spec::file::Format;
use cdi_spec::name::is_nvidia;
use cdi_spec::registry::{self, Found, SpecFile};
use cdi_spec::spec::{DeviceNode, Spec};
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::cdi::extra_devices;
use nvidia_host::cdi::generate::sources;
use nvidia_host::cdi::stamp::Stamp;
use nvidia_host::driver::node_name::NodeName;
use nvidia_host::driver::nodes::NVIDIA_MAJOR;
use nvidia_host::driver::wsl;
use nvidia_host::feature::Feature;
use nvidia_host::inventory::node_limits::{Judgment, NodeLimits};
use nvidia_host::programs;
use nvidia_host::request::{Node, nodes};

use crate::cdi::Reader;
use crate::hook_env;

/// The result for a device or a file. The field names are part of the JSON interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CdiVerdict {
    /// The qualified name of the device, or the path of the file
    #[serde(skip)]
    pub subject: String,
    /// The qualified name of the device; `None` if the verdict is about the file
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    /// Whether engines can use it
    #[serde(rename = "usable")]
    pub ok: bool,
    /// Why engines cannot use it; if they can, a remark or nothing
    #[serde(rename = "why", skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The command or setting that fixes it
    #[serde(rename = "fix", skip_serializing_if = "String::is_empty")]
    pub hint: String,
    /// The file with the device; empty if no file has it
    #[serde(skip_serializing_if = "String::is_empty")]
    pub file: String,
    /// Whether this program wrote that file
    #[serde(rename = "written_by_hook")]
    pub ours: bool,
    /// Whether a runtime passes the environment of the container to a hook of the file
    #[serde(rename = "unsafe")]
    pub is_unsafe: bool,
    /// The engines that cannot use it, if others can
    #[serde(rename = "not_usable_by", skip_serializing_if = "Vec::is_empty")]
    pub unread_by: Vec<String>,
    /// Whether only root can read the file
    #[serde(skip)]
    pub root_only: bool,
    /// Whether the device includes a GPU that config.toml denies
    #[serde(skip)]
    pub denied: bool,
    /// Whether the spec was written for other driver files
    #[serde(skip)]
    pub outdated: bool,
}

/// The current state of the host.
#[derive(Debug)]
pub struct Now<'a> {
    /// The engines that search the same directories
    pub readers: &'a [Reader],
    /// `None` if no driver is loaded
    pub stamp: Option<&'a Stamp>,
    /// The GPUs that containers may have
    pub limits: &'a NodeLimits,
}

impl CdiVerdict {
    /// Returns a verdict without problems.
    fn usable(subject: impl Into<String>, file: impl Into<String>) -> Self {
        let (subject, file) = (subject.into(), file.into());
        let device = (subject != file).then(|| subject.clone());
        Self {
            subject,
            device,
            ok: true,
            file,
            ..Self::default()
        }
    }

    fn unusable(self, reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            ok: false,
            reason: reason.into(),
            hint: hint.into(),
            ..self
        }
    }
}

/// The start of the kinds that device plugins write.
const PLUGINS_VENDOR: &str = "k8s.device-plugin.";
const REFRESH: &str = "run \"oci-nvidia-hook cdi generate\"";

/// Returns the hint that replaces this file. A new spec in /var/run/cdi would hide an old one in /etc/cdi only until the next boot.
fn rewrite(file: &str) -> String {
    let base = extra_devices::base_of(Path::new(file));
    if base == nvidia_host::cdi::default_path(Format::Yaml) {
        return REFRESH.to_owned();
    }
    format!(
        "run \"oci-nvidia-hook cdi generate --output {}\"",
        base.display()
    )
}

/// Returns whether this program wrote the spec: all its specs contain an entry for this hook.
pub fn is_ours(spec: &Spec) -> bool {
    spec.container_edits
        .hooks
        .iter()
        .any(|hook| RootfsEdits::from_entry(&hook.args).is_some())
}

/// Returns a verdict for each file that engines cannot read.
pub fn files(files: &[SpecFile]) -> Vec<CdiVerdict> {
    let mut verdicts = Vec::new();
    for file in files {
        let Err(why) = &file.spec else { continue };
        let path = file.path.display().to_string();
        // This program and NVIDIA's toolkit use the same file name, so "cdi generate" replaces the file in any case.
        let ours = file
            .path
            .file_stem()
            .is_some_and(|stem| stem == nvidia_host::cdi::DEFAULT_NAME);
        let hint = if ours {
            rewrite(&path)
        } else {
            format!("fix it, or remove it: \"rm {path}\"")
        };
        let verdict = CdiVerdict::usable(path.clone(), path)
            .unusable(format!("engines cannot read the file: {why}"), hint);
        verdicts.push(CdiVerdict { ours, ..verdict });
    }
    verdicts
}

/// Returns a verdict for each hook in these files to which a runtime passes the environment of the container.
#[must_use]
pub fn without_env(files: &[SpecFile]) -> Vec<CdiVerdict> {
    hook_env::in_specs(files)
        .into_iter()
        .map(|(file, finding)| unsafe_hook(file, finding))
        .collect()
}

fn unsafe_hook(file: &SpecFile, finding: Finding) -> CdiVerdict {
    let path = file.path.display().to_string();
    let reason = format!("{} ({})", finding.what, finding.kind.id);
    let verdict = CdiVerdict::usable(path.clone(), path).unusable(reason, finding.fix);
    CdiVerdict {
        ours: file.spec.as_ref().is_ok_and(is_ours),
        is_unsafe: true,
        ..verdict
    }
}

/// Returns a verdict for each device, sorted by name. `exists` returns whether the host has a path.
pub fn devices(
    files: &[SpecFile],
    now: &Now<'_>,
    exists: impl Fn(&str) -> bool,
) -> Vec<CdiVerdict> {
    let path = |number: usize| {
        files
            .get(number)
            .map(|file| file.path.display().to_string())
            .unwrap_or_default()
    };
    let mut verdicts = Vec::new();
    for (name, found) in registry::resolve(files) {
        verdicts.push(match found {
            Found::Conflict(a, b) => {
                let (a, b) = (path(a), path(b));
                let reason = format!(
                    "\"{a}\" and \"{b}\" both contain the device, therefore engines use neither"
                );
                let hint = format!("remove one of them: \"rm {a}\"");
                CdiVerdict::usable(name, a).unusable(reason, hint)
            }
            Found::In(number) => match files.get(number) {
                Some(file) => of_device(file, name, now, &exists),
                None => unknown(&name, &[]),
            },
        });
    }
    verdicts
}

fn of_device(
    file: &SpecFile,
    name: String,
    now: &Now<'_>,
    exists: &impl Fn(&str) -> bool,
) -> CdiVerdict {
    let mut verdict = CdiVerdict::usable(name, file.path.display().to_string());
    let Ok(spec) = &file.spec else { return verdict };
    verdict.ours = is_ours(spec);
    if let Some(path) = denied(spec, &verdict.subject, now.limits) {
        let reason = format!("it includes {path:?}, which [devices] in config.toml denies");
        let hint = without_denied(spec, &verdict, now.limits);
        return CdiVerdict {
            denied: true,
            ..verdict
        }
        .unusable(reason, hint);
    }
    if let Some(feature) = denied_feature(spec, now.limits) {
        let reason = format!("[devices] in config.toml denies {:?}", feature.row().name);
        let hint = without_denied(spec, &verdict, now.limits);
        return CdiVerdict {
            denied: true,
            ..verdict
        }
        .unusable(reason, hint);
    }
    // Problems for all engines come first, because a newer engine would not help.
    if let Some((reason, hint)) = stale(spec, &verdict, now, exists) {
        return verdict.unusable(reason, hint);
    }
    let unread: Vec<_> = now
        .readers
        .iter()
        .filter(|reader| reader.reads(&spec.cdi_version) == Some(false))
        .collect();
    if let Some(reader) = unread.first() {
        // The spec of another program may be meant for one engine only.
        verdict.ok = !verdict.ours && unread.len() < now.readers.len();
        verdict.reason = format!("{reader} does not read cdiVersion {}", spec.cdi_version);
        verdict.hint = match verdict.ours {
            true => {
                format!(
                    "run \"oci-nvidia-hook cdi generate --no-additional-gids\", or install a newer {}",
                    reader.kind.program()
                )
            }
            false => format!(
                "install a newer {}; another program wrote {}",
                reader.kind.program(),
                verdict.file
            ),
        };
        if unread.len() < now.readers.len() {
            verdict.unread_by = unread.iter().map(ToString::to_string).collect();
        }
        return verdict;
    }
    verdict.root_only = !file.for_everybody;
    verdict.outdated = file.for_everybody && is_outdated(spec, now);
    (verdict.reason, verdict.hint) = remark(file, spec, now, verdict.outdated).unwrap_or_default();
    verdict
}

/// Returns the node of a GPU in the device that containers may not have.
fn denied(spec: &Spec, name: &str, limits: &NodeLimits) -> Option<String> {
    if limits.is_empty() {
        return None;
    }
    let edits = [
        &registry::device(spec, name)?.container_edits,
        &spec.container_edits,
    ];
    let nodes = edits.into_iter().flat_map(|edits| &edits.device_nodes);
    if limits.deny_wsl() && nodes.clone().any(|node| node.path == wsl::NODE_PATH) {
        return Some(wsl::NODE_PATH.to_owned());
    }
    let nodes: Vec<_> = nodes.map(node_of).collect();
    match limits.judge(&nodes::granted(&nodes)?) {
        Judgment::Denied(minor) => Some(format!("/dev/nvidia{minor}")),
        Judgment::Permitted | Judgment::Unknown(_) => None,
    }
}

/// Returns the feature of a spec if containers may not have it.
fn denied_feature(spec: &Spec, limits: &NodeLimits) -> Option<Feature> {
    let (vendor, class) = spec.kind.split_once('/')?;
    let feature = Feature::from_name(class).filter(|_| vendor.ends_with("nvidia.com"))?;
    limits.deny_feature(feature).then_some(feature)
}

/// Returns the number of a node. Without one in the spec, engines use that of the host's node, whose name contains the minor number.
fn node_of(node: &DeviceNode) -> Node<'_> {
    let number = |number: Option<i64>| number.and_then(|number| u32::try_from(number).ok());
    // The driver root can be another directory: "hostPath": "/run/nvidia/driver/dev/nvidia0".
    let host = node.host_path.as_ref().unwrap_or(&node.path);
    let name = host.rsplit_once("/dev/").map_or("", |(_, name)| name);
    let (major, minor) = match NodeName::parse(name) {
        Some(NodeName::Gpu(minor)) => (Some(NVIDIA_MAJOR), Some(minor)),
        Some(NodeName::Cap(minor)) => (None, Some(minor)),
        _ => (None, None),
    };
    Node {
        path: Path::new(&node.path),
        major: number(node.major).or(major),
        minor: number(node.minor).or(minor),
    }
}

/// Returns the hint for a spec that includes a denied GPU.
fn without_denied(spec: &Spec, verdict: &CdiVerdict, limits: &NodeLimits) -> String {
    let base = extra_devices::base_of(Path::new(&verdict.file));
    let file = base.display();
    match verdict.ours {
        true if spec.kind.starts_with(PLUGINS_VENDOR) => {
            "run \"systemctl restart oci-nvidia-kubelet-plugin\", which writes the file".to_owned()
        }
        true if base == nvidia_host::cdi::default_path(Format::Yaml) => {
            "run \"oci-nvidia-hook cdi refresh\"".to_owned()
        }
        true => format!("run \"oci-nvidia-hook cdi refresh --output {file}\""),
        false => {
            let what = if denied_feature(spec, limits).is_some() {
                "devices"
            } else {
                "GPU"
            };
            format!(
                "remove the {what} from {} with the program that wrote it, or remove the file",
                verdict.file
            )
        }
    }
}

/// Returns why no engine can use the device, and the fix: the spec does not match the driver, the MIG devices or the files of the
/// host.
fn stale(
    spec: &Spec,
    verdict: &CdiVerdict,
    now: &Now<'_>,
    exists: &impl Fn(&str) -> bool,
) -> Option<(String, String)> {
    let device = registry::device(spec, &verdict.subject)?;
    let alone = Spec {
        devices: vec![device.clone()],
        container_edits: spec.container_edits.clone(),
        ..Spec::default()
    };
    if let Some((stamp, now)) = Stamp::from_spec(spec).zip(now.stamp) {
        if stamp.driver != now.driver {
            let reason = format!(
                "{:?} is for driver {}, but {} is loaded",
                verdict.file, stamp.driver, now.driver
            );
            return Some((reason, rewrite(&verdict.file)));
        }
        // Devices that are whole GPUs do not depend on MIG devices.
        let uses_mig = sources(&alone)
            .iter()
            .any(|path| path.contains("/nvidia-caps/"));
        if uses_mig && stamp.has_other_mig_devices(now) {
            let reason = format!("{:?} is for MIG devices that no longer exist", verdict.file);
            return Some((reason, rewrite(&verdict.file)));
        }
    }
    let missing: Vec<_> = sources(&alone)
        .into_iter()
        .filter(|path| !exists(path))
        .map(str::to_owned)
        .collect();
    let first = missing.first()?;
    let more = if missing.len() > 1 {
        format!(" (and {} more)", missing.len() - 1)
    } else {
        String::new()
    };
    let hint = if verdict.ours {
        rewrite(&verdict.file)
    } else {
        hint_for_others(first, &verdict.file)
    };
    Some((format!("{first:?} is missing on the host{more}"), hint))
}

/// Returns the hint for a missing file in the spec of another program, which this program cannot regenerate.
fn hint_for_others(missing: &str, file: &str) -> String {
    let missing = Path::new(missing);
    if !programs::is_cdi_hook(missing) {
        return format!("run the program that wrote {file} again, or remove the file");
    }
    let program = missing.file_name().unwrap_or_default().display();
    format!("install oci-nvidia-hook-compat, which contains {program}, or remove {file}")
}

/// Whether this host now has other driver files than when the spec was written. The device plugin keeps its specs up to date itself, and
/// may see the files below another root directory.
fn is_outdated(spec: &Spec, now: &Now<'_>) -> bool {
    let is_plugins = !spec.kind.starts_with("nvidia.com/");
    let stamps = Stamp::from_spec(spec).zip(now.stamp);
    !is_plugins && stamps.is_some_and(|(stamp, now)| stamp.files != now.files)
}

/// Returns a remark about a usable device, and a hint.
fn remark(
    file: &SpecFile,
    spec: &Spec,
    now: &Now<'_>,
    is_outdated: bool,
) -> Option<(String, String)> {
    let path = file.path.display().to_string();
    if !file.for_everybody {
        return Some((
            "rootless Podman cannot read the file".to_owned(),
            format!("run \"chmod 644 {path}\""),
        ));
    }
    if is_outdated {
        let reason = format!("driver files were added or removed after {path:?} was written");
        return Some((reason, rewrite(&path)));
    }
    let unsure = now
        .readers
        .iter()
        .find(|reader| reader.reads(&spec.cdi_version).is_none())?;
    let version = &spec.cdi_version;
    Some((
        format!("it is unknown whether {unsure} reads cdiVersion {version}"),
        String::new(),
    ))
}

/// Returns a file with the same devices as `ours` and the same or a higher priority, because of which engines do not use `ours`.
pub fn conflicting(files: &[SpecFile], ours: usize) -> Option<&SpecFile> {
    let spec = files.get(ours)?.spec.as_ref().ok()?;
    let found = registry::resolve(files);
    let names = spec
        .devices
        .iter()
        .map(|device| format!("{}={}", spec.kind, device.name));
    let others = names.filter_map(|name| match found.get(&name)? {
        Found::In(other) if *other == ours => None,
        Found::In(other) => Some(*other),
        Found::Conflict(a, b) if *a == ours => Some(*b),
        Found::Conflict(a, _) => Some(*a),
    });
    files.get(others.min()?)
}

/// Returns the verdict for an unknown name, with the known names as a hint.
pub fn unknown(name: &str, known: &[CdiVerdict]) -> CdiVerdict {
    let names = known.iter().map(|known| known.subject.as_str());
    let similar = names.clone().find(|known| is_similar(known, name));
    let names: Vec<_> = names
        .filter(|known| known.split('=').next() == name.split('=').next())
        .collect();
    let is_nvidias = is_nvidia(name) || !name.contains('/');
    let hint = match similar {
        Some(similar) => format!("did you mean {similar}?"),
        None if names.is_empty() && is_nvidias => REFRESH.to_owned(),
        None if names.is_empty() => {
            "specs of another vendor are written by that vendor's program".to_owned()
        }
        None => format!("use one of {}", names.join(", ")),
    };
    CdiVerdict::usable(name, "").unusable("no spec contains the device", hint)
}

/// Returns whether `asked` is a short form of the qualified name `known`, such as `gpu=0`, which engines do not accept. A name with
/// another vendor is not.
fn is_similar(known: &str, asked: &str) -> bool {
    let device = known.split_once('=').map_or("", |(_, device)| device);
    let asked_device = asked.rsplit('=').next().unwrap_or_default();
    !asked.contains('/') && device == asked_device || format!("gpu{device}") == asked_device
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EngineKind, Version};
    use cdi_spec::spec::{ContainerEdits, Device, Hook, Mount};
    use nvidia_host::config::Limits;
    use nvidia_host::inventory::BusId;
    use nvidia_host::inventory::procfs::KernelGpu;
    use std::path::PathBuf;

    fn file(path: &str, priority: usize, version: &str) -> SpecFile {
        let mount = |path: &str| Mount {
            host_path: path.into(),
            container_path: path.into(),
            ..Mount::default()
        };
        let edits = |paths: &[&str]| ContainerEdits {
            mounts: paths.iter().map(|path| mount(path)).collect(),
            ..ContainerEdits::default()
        };
        let devices = ["0", "all"].map(|name| Device {
            name: name.into(),
            container_edits: edits(if name == "all" {
                &["/a", "/b"]
            } else {
                &["/a"]
            }),
            ..Device::default()
        });
        let spec = Spec {
            cdi_version: version.into(),
            kind: "nvidia.com/gpu".into(),
            devices: devices.into(),
            container_edits: edits(&["/common"]),
            ..Spec::default()
        };
        SpecFile {
            path: PathBuf::from(path),
            priority,
            for_everybody: true,
            spec: Ok(spec),
        }
    }

    fn judged(files: &[SpecFile], readers: &[Reader], gone: &[&str]) -> Vec<(bool, String)> {
        let now = Now {
            readers,
            stamp: None,
            limits: &NodeLimits::default(),
        };
        let verdicts = devices(files, &now, |path| !gone.contains(&path));
        verdicts
            .into_iter()
            .map(|verdict| (verdict.ok, verdict.reason))
            .collect()
    }

    fn podman(minor: u32) -> Reader {
        Reader {
            kind: EngineKind::Podman,
            version: Some(Version(4, minor, 0)),
        }
    }

    fn crio(minor: u32) -> Reader {
        Reader {
            kind: EngineKind::Crio,
            version: Some(Version(1, minor, 0)),
        }
    }

    #[test]
    fn the_first_reason() {
        let one = || file("/etc/cdi/x.yaml", 0, "0.5.0");
        let good = (true, String::new());
        assert_eq!(
            judged(&[one()], &[podman(3)], &[]),
            [good.clone(), good.clone()]
        );
        for (files, engine, gone, reason) in [
            (
                vec![one()],
                2,
                &[][..],
                "Podman as root (4.2.0) does not read cdiVersion 0.5.0",
            ),
            (
                vec![one()],
                3,
                &["/common", "/a"],
                "\"/a\" is missing on the host (and 1 more)",
            ),
            // A newer engine could not use it either.
            (
                vec![one()],
                2,
                &["/common", "/a"],
                "\"/a\" is missing on the host (and 1 more)",
            ),
            (
                vec![one(), file("/etc/cdi/y.yaml", 0, "0.5.0")],
                3,
                &[],
                "both contain the device",
            ),
        ] {
            let (ok, why) = judged(&files, &[podman(engine)], gone).remove(0);
            assert!(!ok && why.contains(reason), "{why}");
        }
        assert_eq!(
            judged(&[one()], &[], &["/b"])
                .iter()
                .filter(|(ok, _)| *ok)
                .count(),
            1,
            "only all has /b"
        );
        let winner = [one(), file("/var/run/cdi/y.yaml", 1, "0.5.0")];
        assert_eq!(judged(&winner, &[], &[]), [good.clone(), good]);
        let hidden = SpecFile {
            for_everybody: false,
            ..one()
        };
        assert_eq!(
            judged(&[hidden], &[], &[])[0],
            (true, "rootless Podman cannot read the file".to_owned())
        );
        assert!(
            judged(&[file("/x", 0, "0.6.0")], &[podman(9)], &[])[0]
                .1
                .starts_with("it is unknown")
        );
    }

    /// The spec of another program for CRI-O is not reported because of an old Podman.
    #[test]
    fn specs_of_other_programs() {
        let readers = [podman(3), crio(37)];
        let judge = |spec: &SpecFile, readers: &[Reader], gone: &str| {
            let now = Now {
                readers,
                stamp: None,
                limits: &NodeLimits::default(),
            };
            devices(std::slice::from_ref(spec), &now, |path| path != gone).remove(0)
        };
        let theirs = file("/var/run/cdi/theirs.json", 0, "0.7.0");
        let verdict = judge(&theirs, &readers, "");
        assert!(
            verdict.ok && !verdict.ours && verdict.unread_by == ["Podman as root (4.3.0)"],
            "{verdict:?}"
        );
        assert!(!verdict.hint.contains("cdi generate"), "{verdict:?}");
        let verdict = judge(&theirs, &readers[..1], "");
        assert!(
            !verdict.ok && verdict.unread_by.is_empty(),
            "no engine reads it: {verdict:?}"
        );
        let mut with_hook = theirs;
        let Ok(spec) = &mut with_hook.spec else {
            unreachable!()
        };
        spec.container_edits.hooks = vec![Hook {
            path: "/usr/bin/nvidia-ctk".into(),
            ..Hook::default()
        }];
        let verdict = judge(&with_hook, &readers, "/usr/bin/nvidia-ctk");
        assert_eq!(
            verdict.reason,
            "\"/usr/bin/nvidia-ctk\" is missing on the host"
        );
        assert!(
            !verdict.ok
                && verdict
                    .hint
                    .starts_with("install oci-nvidia-hook-compat, which contains nvidia-ctk, or"),
            "{verdict:?}"
        );
        let verdict = judge(&with_hook, &readers, "/a");
        assert_eq!(
            verdict.hint,
            "run the program that wrote /var/run/cdi/theirs.json again, or remove the file"
        );
        // The spec of this program is for all engines of the host.
        let Ok(spec) = &mut with_hook.spec else {
            unreachable!()
        };
        let edits = RootfsEdits {
            stamp: Some("driver=1,boot=b,host=7".into()),
            ..RootfsEdits::default()
        };
        spec.container_edits.hooks = vec![Hook {
            path: "/hook".into(),
            args: edits.to_args().unwrap(),
            ..Hook::default()
        }];
        let verdict = judge(&with_hook, &readers, "");
        assert!(
            !verdict.ok && verdict.ours && verdict.hint.contains("--no-additional-gids"),
            "{verdict:?}"
        );
        assert_eq!(verdict.unread_by, ["Podman as root (4.3.0)"]);
    }

    /// Of any kind, with and without numbers, of this program and of others.
    #[test]
    fn a_device_with_a_denied_gpu() {
        let gpu = |minor: u32| KernelGpu {
            bus_id: BusId {
                domain: 0,
                bus: minor + 1,
                device: 0,
            },
            minor: Some(minor),
            ..KernelGpu::default()
        };
        let deny = Limits {
            deny: vec!["1".to_owned()],
            ..Limits::default()
        };
        let limits = NodeLimits::new(deny, vec![gpu(0), gpu(1)], Vec::new());
        let node = |path: &str, host: Option<&str>, number: Option<(i64, i64)>| DeviceNode {
            path: path.to_owned(),
            host_path: host.map(str::to_owned),
            major: number.map(|(major, _)| major),
            minor: number.map(|(_, minor)| minor),
            ..DeviceNode::default()
        };
        let judge = |kind: &str, node: DeviceNode, is_ours: bool| {
            let mut file = file("/var/run/cdi/x.json", 0, "0.5.0");
            let Ok(spec) = &mut file.spec else {
                unreachable!()
            };
            spec.kind = kind.to_owned();
            spec.devices.truncate(1);
            spec.devices[0].container_edits.device_nodes = vec![node];
            let edits = RootfsEdits {
                stamp: Some("driver=1,boot=b,host=7".into()),
                ..RootfsEdits::default()
            };
            let hook = Hook {
                path: "/hook".into(),
                args: edits.to_args().unwrap(),
                ..Hook::default()
            };
            spec.container_edits.hooks = if is_ours { vec![hook] } else { Vec::new() };
            devices(
                &[file],
                &Now {
                    readers: &[],
                    stamp: None,
                    limits: &limits,
                },
                |_| true,
            )
            .remove(0)
        };
        for (node, denied) in [
            (node("/dev/nvidia1", None, None), true),
            (node("/dev/nvidia1", None, Some((195, 1))), true),
            (node("/dev/x", Some("/root/dev/nvidia1"), None), true),
            (node("/dev/nvidia0", Some("/dev/nvidia1"), None), true),
            (node("/dev/nvidia0", None, Some((195, 1))), true),
            (node("/dev/nvidia0", None, None), false),
            (node("/dev/nvidia1", None, Some((1, 3))), false),
            (node("/dev/nvidia-uvm", None, None), false),
            (node("/dev/nvidiactl", None, Some((195, 255))), false),
        ] {
            let verdict = judge("nvidia.com/gpu", node.clone(), false);
            assert_eq!((verdict.ok, verdict.denied), (!denied, denied), "{node:?}");
        }
        for (kind, is_ours, hint) in [
            (
                "nvidia.com/gpu",
                true,
                "run \"oci-nvidia-hook cdi refresh --output /var/run/cdi/x.json\"",
            ),
            (
                "k8s.device-plugin.nvidia.com/gpu",
                true,
                "run \"systemctl restart oci-nvidia-kubelet-plugin\"",
            ),
            (
                "k8s.gpu.nvidia.com/claim",
                false,
                "remove the GPU from /var/run/cdi/x.json with the program",
            ),
        ] {
            let verdict = judge(kind, node("/dev/nvidia1", None, None), is_ours);
            assert!(
                verdict.denied && verdict.hint.starts_with(hint),
                "{verdict:?}"
            );
            assert_eq!(
                verdict.reason,
                "it includes \"/dev/nvidia1\", which [devices] in config.toml denies"
            );
        }
    }

    /// A spec in /etc/cdi outlives a reboot; one that hides it in /var/run/cdi does not.
    #[test]
    fn a_spec_is_replaced_at_its_place() {
        assert_eq!(
            rewrite("/var/run/cdi/nvidia.yaml"),
            "run \"oci-nvidia-hook cdi generate\""
        );
        assert_eq!(
            rewrite("/etc/cdi/n.json"),
            "run \"oci-nvidia-hook cdi generate --output /etc/cdi/n.json\""
        );
    }

    #[test]
    fn conflicting_files() {
        let files = |priorities: &[usize]| -> Vec<_> {
            priorities
                .iter()
                .map(|priority| file("/x.yaml", *priority, "0.5.0"))
                .collect()
        };
        for (priorities, ours, other) in [
            (&[0, 1][..], 1, None),
            (&[0, 1], 0, Some(1)),
            (&[1, 1], 0, Some(1)),
            (&[1, 1], 1, Some(0)),
            // Two other files conflict with each other.
            (&[0, 0, 1], 2, Some(0)),
        ] {
            let files = files(priorities);
            let found = conflicting(&files, ours).map(std::ptr::from_ref);
            assert_eq!(
                found,
                other.map(|other: usize| std::ptr::from_ref(&files[other])),
                "{priorities:?} {ours}"
            );
        }
    }

    #[test]
    fn an_unknown_name_gets_a_suggestion() {
        let known = devices(
            &[file("/x.yaml", 0, "0.5.0")],
            &Now {
                readers: &[],
                stamp: None,
                limits: &NodeLimits::default(),
            },
            |_| true,
        );
        for (name, hint) in [
            ("nvidia.com/gpu=gpu0", "did you mean nvidia.com/gpu=0?"),
            ("all", "did you mean nvidia.com/gpu=all?"),
            ("gpu=0", "did you mean nvidia.com/gpu=0?"),
            ("gpu=7", "run \"oci-nvidia-hook cdi generate\""),
            (
                "nvidia.com/gpu=7",
                "use one of nvidia.com/gpu=0, nvidia.com/gpu=all",
            ),
            ("nvidia.com/x=7", "run \"oci-nvidia-hook cdi generate\""),
            (
                "amd.com/gpu=7",
                "specs of another vendor are written by that vendor's program",
            ),
        ] {
            assert_eq!(unknown(name, &known).hint, hint);
        }
    }
}
