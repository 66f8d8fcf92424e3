//! Decides whether engines can use the CDI devices of a host, and if not, why. The functions are pure.

mod hints;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Serialize, Serializer};

use base::report::{Finding, Kind};
use base::tree::Tree;
use cdi_spec::name::is_nvidia;
use cdi_spec::registry::{self, Found, SpecFile};
use cdi_spec::spec::{Device, DeviceNode, Spec};
use findings::catalog;
use nvidia_host::cdi::compare::{self, Difference, HostView, Parts};
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::cdi::generate::sources;
use nvidia_host::cdi::stamp::Stamp;
use nvidia_host::config::Config;
use nvidia_host::driver::node_name::NodeName;
use nvidia_host::driver::nodes::NVIDIA_MAJOR;
use nvidia_host::driver::wsl;
use nvidia_host::feature::Feature;
use nvidia_host::host::{DriverParts, Roots};
use nvidia_host::inventory::Inventory;
use nvidia_host::inventory::node_limits::{Judgment, NodeLimits};
use nvidia_host::request::{Node, nodes};
use plugin_api::kinds::SpecVendor;
use plugin_api::processes::PluginProcess;

use crate::cdi::SpecReader;
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
    /// The finding with which a container that uses the device does not start
    #[serde(
        rename = "finding",
        skip_serializing_if = "Option::is_none",
        serialize_with = "id"
    )]
    pub kind: Option<&'static Kind>,
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

fn id<S: Serializer>(kind: &Option<&'static Kind>, serializer: S) -> Result<S::Ok, S::Error> {
    match kind {
        Some(kind) => serializer.serialize_str(kind.id()),
        None => serializer.serialize_none(),
    }
}

/// The current state of the host.
#[derive(Debug)]
pub struct Now<'a> {
    /// The engines that search the same directories
    pub readers: &'a [SpecReader],
    /// `None` if no driver is loaded
    pub stamp: Option<&'a Stamp>,
    /// What the specs take from the host: see [`view`]
    pub host: &'a HostView,
    /// Whether units of systemd keep a spec in /var/run/cdi
    pub units_write: bool,
    /// The GPUs that containers may have
    pub limits: &'a NodeLimits,
    /// The running processes of the kubelet plugin, which writes some of the specs
    pub plugins: &'a [PluginProcess],
}

impl CdiVerdict {
    /// Returns a verdict without problems.
    fn usable(subject: impl Into<String>, file: impl Into<String>) -> Self {
        let (subject, file) = (subject.into(), file.into());
        let device = if subject == file {
            None
        } else {
            Some(subject.clone())
        };
        Self {
            subject,
            device,
            ok: true,
            file,
            ..Self::default()
        }
    }

    /// Returns the reason, with the number of the finding with which a container does not start.
    #[must_use]
    pub fn full_reason(&self) -> String {
        match self.kind {
            Some(kind) => format!("{} ({})", self.reason, kind.id()),
            None => self.reason.clone(),
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

/// Examines what the specs in these files take from the host. `stamp` is the host's, and `inventory` is NVML's answer, if it was asked.
#[must_use]
pub fn view(
    files: &[SpecFile],
    config: &Config,
    host: Option<&Tree>,
    stamp: Option<&Stamp>,
    inventory: Option<&Inventory>,
) -> HostView {
    let mut parts = Vec::new();
    for spec in files.iter().filter_map(|file| file.spec.as_ref().ok()) {
        for device in &spec.devices {
            parts.push(Parts::of_spec(spec, &device.container_edits));
        }
    }
    let Ok(roots) = Roots::open_on(host, config) else {
        return HostView::default();
    };
    let mut view = HostView::examine(&parts, &roots, host);
    view.mismatch = DriverParts::below(roots, config).mismatch(config, host);
    if let (None, Some(stamp)) = (&view.driver, stamp) {
        view.driver = Some(stamp.driver.clone());
    }
    view.mig_devices = inventory.map(Inventory::mig_uuids);
    view
}

/// Returns whether this program wrote the spec: all its specs contain an entry for this hook.
pub fn is_ours(spec: &Spec) -> bool {
    let mut hooks = spec.container_edits.hooks.iter();
    hooks.any(|hook| RootfsEdits::from_entry(&hook.args).is_some())
}

/// Returns a verdict for each file that engines cannot read.
pub fn files(files: &[SpecFile], now: &Now<'_>) -> Vec<CdiVerdict> {
    let mut verdicts = Vec::new();
    for file in files {
        let Err(why) = &file.spec else { continue };
        let path = file.path.display().to_string();
        // This program and NVIDIA's toolkit use the same file name, so "cdi generate" replaces the file in any case.
        let stem = file.path.file_stem().unwrap_or_default();
        let ours = stem == nvidia_host::cdi::DEFAULT_NAME;
        let hint = match &now.host.mismatch {
            // No spec can be written before that.
            Some(mismatch) if ours => mismatch.fix.clone(),
            _ if ours => hints::replace(&path),
            _ => format!("fix it, or remove it: \"rm {path}\""),
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
    let mut verdicts = Vec::new();
    for (file, finding) in hook_env::in_specs(files) {
        verdicts.push(unsafe_hook(file, finding));
    }
    verdicts
}

fn unsafe_hook(file: &SpecFile, finding: Finding) -> CdiVerdict {
    let path = file.path.display().to_string();
    let reason = format!("{} ({})", finding.what, finding.kind.id());
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
    let mut verdicts = Vec::new();
    for (name, found) in registry::resolve(files) {
        verdicts.push(match found {
            Found::Conflict(a, b) => match (files.get(a), files.get(b)) {
                (Some(a), Some(b)) => in_conflict(name, a, b, &exists),
                _ => unknown(&name, &[]),
            },
            Found::In(number) => match files.get(number) {
                Some(file) => of_device(file, name, now, &exists),
                None => unknown(&name, &[]),
            },
        });
    }
    verdicts
}

/// Returns a finding for each pair of files with the same device, of which engines use neither.
pub fn conflicts(files: &[SpecFile], exists: &impl Fn(&str) -> bool) -> Vec<Finding> {
    let mut pairs = BTreeMap::new();
    for (name, found) in registry::resolve(files) {
        if let Found::Conflict(a, b) = found {
            pairs.entry((a, b)).or_insert(name);
        }
    }
    let mut findings = Vec::new();
    for ((a, b), name) in pairs {
        if let (Some(a), Some(b)) = (files.get(a), files.get(b)) {
            let what = format!("{:?} and {:?} both contain {name}", a.path, b.path);
            let fix = how_to_separate(a, b, exists);
            findings.push(Finding::new(&catalog::SPEC_CONFLICT, what, fix));
        }
    }
    findings
}

fn in_conflict(
    name: String,
    a: &SpecFile,
    b: &SpecFile,
    exists: &impl Fn(&str) -> bool,
) -> CdiVerdict {
    let (a_path, b_path) = (a.path.display(), b.path.display());
    let reason = format!(
        "\"{a_path}\" and \"{b_path}\" both contain the device, therefore engines use neither"
    );
    CdiVerdict::usable(name, a_path.to_string()).unusable(reason, how_to_separate(a, b, exists))
}

/// A unit that writes a spec of the NVIDIA Container Toolkit.
struct Writer {
    /// The name of the spec without its extension
    stem: &'static str,
    service: &'static str,
    /// The command or setting that keeps the unit from writing the spec again
    stop: &'static str,
}

const WRITERS: [Writer; 2] = [
    Writer {
        stem: nvidia_host::cdi::DEFAULT_NAME,
        service: "nvidia-cdi-refresh.service",
        stop: "run \"systemctl disable --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service\"",
    },
    // NixOS generates its units from the configuration, so systemctl cannot disable them.
    Writer {
        stem: "nvidia-container-toolkit",
        service: "nvidia-container-toolkit-cdi-generator.service",
        stop: "set hardware.nvidia-container-toolkit.enable = false in the configuration of NixOS",
    },
];

/// The links of our enabled units, which write our spec in /var/run/cdi.
const OUR_LINKS: [&str; 2] = [
    "/etc/systemd/system/multi-user.target.wants/oci-nvidia-hook-cdi.path",
    "/etc/systemd/system/basic.target.wants/oci-nvidia-hook-cdi.service",
];

/// Returns whether a unit keeps our spec in /var/run/cdi. `exists` returns whether the host has a path.
pub fn units_write(exists: impl Fn(&str) -> bool) -> bool {
    OUR_LINKS.iter().any(|link| exists(link))
}

impl Writer {
    fn is_installed(&self, exists: &impl Fn(&str) -> bool) -> bool {
        ["/etc", "/usr/lib", "/lib"]
            .iter()
            .any(|dir| exists(&format!("{dir}/systemd/system/{}", self.service)))
    }
}

/// Returns how to resolve a conflict of two files, in whatever order they are given. This program keeps its own spec current, so the other
/// file is the one to remove; of two specs of this program, the one that has not the usual name.
#[must_use]
pub fn how_to_separate(a: &SpecFile, b: &SpecFile, exists: &impl Fn(&str) -> bool) -> String {
    let other = if rank(a) < rank(b) { a } else { b };
    let path = other.path.display();
    let is_ours = other.spec.as_ref().is_ok_and(is_ours);
    for writer in &WRITERS {
        if !is_ours && stem(other) == writer.stem && writer.is_installed(exists) {
            let (stop, service) = (writer.stop, writer.service);
            return format!("{stop}, then \"rm {path}\": {service} would write the file again");
        }
    }
    format!("run \"rm {path}\"")
}

/// The file with the higher rank remains.
fn rank(file: &SpecFile) -> impl Ord + use<'_> {
    let stem = stem(file);
    let usual = nvidia_host::cdi::DEFAULT_NAME;
    (
        file.spec.as_ref().is_ok_and(is_ours),
        stem == usual,
        stem.starts_with(usual),
        std::cmp::Reverse(&file.path),
    )
}

fn stem(file: &SpecFile) -> &str {
    let stem = file.path.file_stem().unwrap_or_default();
    stem.to_str().unwrap_or_default()
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
    if let Some(reason) = denied(spec, &verdict.subject, now.limits) {
        verdict.denied = true;
        let hint = hints::without_denied(spec, &verdict, now);
        return verdict.unusable(reason, hint);
    }
    // Problems for all engines come first, because a newer engine would not help.
    if let Some(Stale { kind, reason, hint }) = stale(spec, &verdict, now, exists) {
        let verdict = verdict.unusable(reason, hint);
        return CdiVerdict { kind, ..verdict };
    }
    if let Some(verdict) = unread(spec, &verdict, now) {
        return verdict;
    }
    verdict.root_only = !file.for_everybody;
    let outdated = outdated(spec, &verdict.file, now).filter(|_| file.for_everybody);
    verdict.outdated = outdated.is_some();
    (verdict.reason, verdict.hint) = remark(file, spec, now, outdated).unwrap_or_default();
    verdict
}

/// Returns the verdict for a device whose spec is too new for one of the engines.
fn unread(spec: &Spec, verdict: &CdiVerdict, now: &Now<'_>) -> Option<CdiVerdict> {
    let mut unread = Vec::new();
    for reader in now.readers {
        if reader.reads(&spec.cdi_version) == Some(false) {
            unread.push(reader);
        }
    }
    let reader = unread.first()?;
    let is_read_by_others = unread.len() < now.readers.len();
    let program = reader.kind.program();
    let hint = if verdict.ours {
        format!(
            "run \"oci-nvidia-hook cdi generate --no-additional-gids\", or install a newer {program}"
        )
    } else {
        format!(
            "install a newer {program}; another program wrote {}",
            verdict.file
        )
    };
    let reason = format!("{reader} does not read cdiVersion {}", spec.cdi_version);
    let mut verdict = verdict.clone().unusable(reason, hint);
    // The spec of another program may be meant for one engine only.
    verdict.ok = !verdict.ours && is_read_by_others;
    if is_read_by_others {
        verdict.unread_by = unread.iter().map(ToString::to_string).collect();
    }
    Some(verdict)
}

/// Returns why containers may not have the device: a GPU, or the feature of its spec.
fn denied(spec: &Spec, name: &str, limits: &NodeLimits) -> Option<String> {
    if let Some(path) = denied_node(spec, name, limits) {
        return Some(format!(
            "it includes {path:?}, which [devices] in config.toml denies"
        ));
    }
    let feature = denied_feature(spec, limits)?;
    let name = feature.row().name;
    Some(format!("[devices] in config.toml denies {name:?}"))
}

/// Returns the node of a GPU in the device that containers may not have.
fn denied_node(spec: &Spec, name: &str, limits: &NodeLimits) -> Option<String> {
    if limits.is_empty() {
        return None;
    }
    let edits = [
        &registry::device(spec, name)?.container_edits,
        &spec.container_edits,
    ];
    let mut nodes = Vec::new();
    for node in edits.into_iter().flat_map(|edits| &edits.device_nodes) {
        if limits.deny_wsl() && node.path == wsl::NODE_PATH {
            return Some(wsl::NODE_PATH.to_owned());
        }
        nodes.push(node_of(node));
    }
    match limits.judge(&nodes::granted(&nodes)?) {
        Judgment::Denied(minor) => Some(format!("/dev/{}", NodeName::Gpu(minor))),
        Judgment::Permitted | Judgment::Unknown(_) => None,
    }
}

/// Returns the feature of a spec if containers may not have it.
fn denied_feature(spec: &Spec, limits: &NodeLimits) -> Option<Feature> {
    let (_, class) = spec.kind.split_once('/')?;
    let feature = Feature::from_name(class)?;
    if is_nvidia(&spec.kind) && limits.deny_feature(feature) {
        Some(feature)
    } else {
        None
    }
}

/// Returns the number of a node. A spec without numbers has the host's node, whose name contains the minor number.
fn node_of(node: &DeviceNode) -> Node<'_> {
    let number = |number: Option<i64>| u32::try_from(number?).ok();
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

/// Returns why no engine can use the device, and the fix: the spec does not match the driver, the devices, the nodes or the files of the
/// host.
fn stale(
    spec: &Spec,
    verdict: &CdiVerdict,
    now: &Now<'_>,
    exists: &impl Fn(&str) -> bool,
) -> Option<Stale> {
    let device = registry::device(spec, &verdict.subject)?;
    let alone = Spec {
        devices: vec![device.clone()],
        container_edits: spec.container_edits.clone(),
        ..Spec::default()
    };
    let sources = sources(&alone);
    // Another spec would not help.
    if let Some(Finding { kind, what, fix }) = &now.host.mismatch
        && (verdict.ours || is_nvidia(&verdict.subject))
    {
        return Some(Stale::new(kind, what.clone(), fix.clone()));
    }
    if let Some(difference) = difference(spec, device, now) {
        let hint = match &difference {
            Difference::NotLoaded => "run \"modprobe nvidia\"".to_owned(),
            _ if verdict.ours => hints::rewrite(spec, verdict, now),
            _ => hints::of_others(&verdict.file),
        };
        let reason = difference.of_spec(&format!("{:?}", verdict.file));
        return Some(Stale::new(difference.kind(), reason, hint));
    }
    if let (Some(stamp), Some(host)) = (Stamp::from_spec(spec), now.stamp)
        && has_other_index(device, &stamp, host, &sources)
    {
        let reason = format!(
            "the MIG devices have changed, and the index {:?} may belong to another one",
            device.name
        );
        let hint = hints::rewrite(spec, verdict, now);
        return Some(Stale::new(&catalog::OUTDATED_NODE, reason, hint));
    }
    let mut missing = sources.into_iter().filter(|path| !exists(path));
    let first = missing.next()?;
    let more = match missing.count() {
        0 => String::new(),
        count => format!(" (and {count} more)"),
    };
    let hint = if verdict.ours {
        hints::rewrite(spec, verdict, now)
    } else {
        hints::for_others(first, &verdict.file)
    };
    let reason = format!("{first:?} is missing on the host{more}");
    Some(Stale {
        kind: None,
        reason,
        hint,
    })
}

/// Why no engine can use a device.
struct Stale {
    kind: Option<&'static Kind>,
    reason: String,
    hint: String,
}

impl Stale {
    fn new(kind: &'static Kind, reason: String, hint: String) -> Self {
        Self {
            kind: Some(kind),
            reason,
            hint,
        }
    }
}

/// Returns the first part of a device that is not the host's. A missing node is reported with the other missing files.
fn difference(spec: &Spec, device: &Device, now: &Now<'_>) -> Option<Difference> {
    let parts = Parts::of_spec(spec, &device.container_edits);
    let mut differences = compare::differences(&parts, now.host).into_iter();
    differences.find(|difference| !matches!(difference, Difference::Missing(_)))
}

/// Whether the name of a MIG device is an index, which can belong to another one after a change. A UUID is the same device as long as it
/// exists.
fn has_other_index(device: &Device, spec: &Stamp, host: &Stamp, sources: &BTreeSet<&str>) -> bool {
    let uses_mig = sources.iter().any(|path| path.contains("/nvidia-caps/"));
    uses_mig && device.name.contains(':') && spec.has_other_mig_devices(host)
}

/// Why a spec that engines can use is out of date. The kubelet plugin keeps its specs up to date itself: it is another program than this
/// one, and may see the files below another root directory.
fn outdated(spec: &Spec, path: &str, now: &Now<'_>) -> Option<String> {
    if SpecVendor::of_kind(&spec.kind).is_some() {
        return None;
    }
    let (spec, host) = (Stamp::from_spec(spec)?, now.stamp?);
    if spec.files != host.files {
        return Some(format!(
            "driver files were added or removed after {path:?} was written"
        ));
    }
    if spec.build != host.build {
        return Some(format!("another build of this program wrote {path:?}"));
    }
    None
}

/// Returns a remark about a usable device, and a hint.
fn remark(
    file: &SpecFile,
    spec: &Spec,
    now: &Now<'_>,
    outdated: Option<String>,
) -> Option<(String, String)> {
    let path = file.path.display().to_string();
    if !file.for_everybody {
        return Some((
            "rootless Podman cannot read the file".to_owned(),
            format!("run \"chmod 644 {path}\""),
        ));
    }
    if let Some(reason) = outdated {
        return Some((reason, hints::generate(spec, &path, now)));
    }
    let version = &spec.cdi_version;
    let mut readers = now.readers.iter();
    let unsure = readers.find(|reader| reader.reads(version).is_none())?;
    Some((
        format!("it is unknown whether {unsure} reads cdiVersion {version}"),
        String::new(),
    ))
}

/// Returns a file with the same devices as `ours` and the same or a higher priority, because of which engines do not use `ours`.
pub fn conflicting(files: &[SpecFile], ours: usize) -> Option<&SpecFile> {
    let spec = files.get(ours)?.spec.as_ref().ok()?;
    let found = registry::resolve(files);
    let mut first = None;
    for device in &spec.devices {
        let other = match found.get(&format!("{}={}", spec.kind, device.name)) {
            Some(Found::In(other)) if *other != ours => *other,
            Some(Found::Conflict(a, b)) if *a == ours => *b,
            Some(Found::Conflict(a, _)) => *a,
            _ => continue,
        };
        first = Some(first.map_or(other, |first: usize| first.min(other)));
    }
    files.get(first?)
}

/// Returns the verdict for an unknown name, with the known names as a hint.
pub fn unknown(name: &str, known: &[CdiVerdict]) -> CdiVerdict {
    let mut of_kind = Vec::new();
    let mut similar = None;
    for CdiVerdict { subject, .. } in known {
        if similar.is_none() && is_similar(subject, name) {
            similar = Some(subject);
        }
        if subject.split('=').next() == name.split('=').next() {
            of_kind.push(subject.as_str());
        }
    }
    let hint = if let Some(similar) = similar {
        format!("did you mean {similar}?")
    } else if !of_kind.is_empty() {
        format!("use one of {}", of_kind.join(", "))
    } else if !name.contains('/') && name.contains('=') {
        "a CDI name has the form vendor/class=device, such as nvidia.com/gpu=0".to_owned()
    } else if is_nvidia(name) || !name.contains('/') {
        hints::GENERATE.to_owned()
    } else {
        "specs of another vendor are written by that vendor's program".to_owned()
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
