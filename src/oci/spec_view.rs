//! Reads the parts of config.json that the hook uses, and tolerates everything else.
//! <https://github.com/opencontainers/runtime-spec/blob/main/config.md>

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use oci_spec::runtime::LinuxDeviceCgroup;
use serde::Deserialize;
use serde_json::value::RawValue;

use base::sys::guarded;
use base::sys::in_root::open_host_file;
use nvidia_host::driver::access::Permissions;

use records::Pod;

use super::device_rules::allow_all;
use super::lists::{self, Environment, Object};
use super::pod;

/// The parts of config.json that the hook uses.
#[derive(Clone, Debug, Default)]
pub struct SpecView {
    /// `root.path` as an absolute path. containerd writes a path relative to the bundle, which is not the working directory of
    /// hooks in every runtime
    pub rootfs: PathBuf,
    /// `process.env`; the last of several equal names counts
    pub env: BTreeMap<String, String>,
    /// Whether CAP_SYS_ADMIN is in the bounding set, in the user namespace of the engine. NVIDIA's hook also accepts a container with
    /// a user namespace of its own, in which the capability gives no access to devices of the host
    pub privileged: bool,
    /// Whether the engine lists all device nodes of the host, as for `--privileged`, so that the nodes are not a request
    pub has_all_nodes: bool,
    /// `mounts`
    pub mounts: Vec<Mount>,
    /// `hooks` of all stages, without entries of an unknown form
    pub hooks: Vec<Hook>,
    /// `linux.resources.devices` in order, without entries of an unknown form, which thus allow nothing
    pub device_rules: Vec<LinuxDeviceCgroup>,
    /// `linux.devices`, the nodes that the runtime creates
    pub devices: Vec<LinuxDevice>,
    /// Whether `linux.namespaces` has a user namespace.
    pub user_namespace: bool,
    /// `linux.uidMappings`
    pub uid_mappings: Vec<IdMapping>,
    /// `linux.gidMappings`
    pub gid_mappings: Vec<IdMapping>,
    /// `linux.cgroupsPath`; empty if it is missing
    pub cgroups_path: String,
    /// `linux.mountLabel`, the SELinux label for file systems of the container; empty if it is missing
    pub mount_label: String,
    /// `process.user.uid` and `gid`
    pub user: (u32, u32),
    /// `process.user.additionalGids`
    pub additional_gids: Vec<u32>,
    /// Whether crun keeps the process in the groups of the user who started the engine
    pub keeps_groups: bool,
    /// Kubernetes names from `annotations`
    pub pod: Pod,
    /// CDI devices from `annotations`, which the kubelet's device manager writes; for messages
    pub cdi_devices: Vec<String>,
}

/// The used fields of a device node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct LinuxDevice {
    /// In the container
    pub path: PathBuf,
    /// `c`, `b`, `u` or `p`
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub major: Option<i64>,
    pub minor: Option<i64>,
    #[serde(rename = "fileMode")]
    pub file_mode: Option<u32>,
    /// The owner, as an id in the container
    pub uid: Option<u32>,
    pub gid: Option<u32>,
}

impl LinuxDevice {
    /// Returns the mode and the owner with which the runtime creates the node; runc and crun have the same defaults.
    pub(crate) fn permissions(&self) -> Permissions {
        Permissions {
            mode: self.file_mode.unwrap_or(0o666) & 0o777,
            uid: self.uid.unwrap_or_default(),
            gid: self.gid.unwrap_or_default(),
        }
    }
}

/// A range of ids in a user namespace, and the ids outside that they map to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct IdMapping {
    /// The first id in the container
    #[serde(rename = "containerID")]
    pub container_id: u32,
    /// The first id outside
    #[serde(rename = "hostID")]
    pub host_id: u32,
    pub size: u32,
}

/// The id that the kernel reports for unmapped ids: `/proc/sys/kernel/overflowuid` and
/// `overflowgid`, unless root changed them.
pub(crate) const OVERFLOW_ID: u32 = 65534;

impl IdMapping {
    /// Converts an id in the container to an id outside of the user namespace.
    pub(crate) fn outside(mappings: &[Self], id: u32) -> Option<u32> {
        mappings.iter().find_map(|mapping| {
            let offset = id
                .checked_sub(mapping.container_id)
                .filter(|offset| *offset < mapping.size)?;
            mapping.host_id.checked_add(offset)
        })
    }

    /// Converts an id outside of the user namespace to an id in the container.
    pub(crate) fn inside(mappings: &[Self], id: u32) -> Option<u32> {
        mappings.iter().find_map(|mapping| {
            let offset = id
                .checked_sub(mapping.host_id)
                .filter(|offset| *offset < mapping.size)?;
            mapping.container_id.checked_add(offset)
        })
    }
}

/// The used fields of a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Mount {
    /// On the host
    pub source: PathBuf,
    /// In the container
    pub destination: PathBuf,
    /// `bind`, or the type of the file system
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Options as in mount(8)
    pub options: Option<Vec<String>>,
}

impl Mount {
    /// Reports whether it is a bind mount, by the rules of the runtimes.
    pub fn is_bind(&self) -> bool {
        let mut options = self.options.iter().flatten();
        self.kind.as_deref() == Some("bind")
            || options.any(|option| option == "bind" || option == "rbind")
    }
}

/// The used fields of a hook.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Hook {
    /// The program, on the host
    pub path: PathBuf,
    /// Its arguments, including argv\[0\]
    pub args: Vec<String>,
}

/// The annotation of `--group-add keep-groups`; see crun(1).
const KEEP_GROUPS: &str = "run.oci.keep_original_groups";

/// The text of config.json, in which long values are only parsed if they are needed.
#[derive(Deserialize)]
struct Raw<'a> {
    #[serde(borrow)]
    annotations: Option<&'a RawValue>,
    #[serde(borrow)]
    hooks: Option<&'a RawValue>,
    #[serde(borrow)]
    mounts: Option<&'a RawValue>,
    #[serde(borrow)]
    process: Option<RawProcess<'a>>,
    root: Option<RawRoot>,
    #[serde(borrow)]
    linux: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct RawProcess<'a> {
    env: Option<Environment>,
    #[serde(borrow)]
    capabilities: Option<&'a RawValue>,
    #[serde(borrow)]
    user: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct RawRoot {
    #[serde(default)]
    path: PathBuf,
}

/// Reads `<bundle>/config.json`.
///
/// # Errors
/// If the file cannot be read or parsed, or names no rootfs.
pub(crate) fn read(bundle: &Path) -> Result<SpecView> {
    read_with(bundle, parse)
}

/// Like [`read`], with [`parse_if`].
///
/// # Errors
/// The errors of [`read`].
pub(crate) fn read_if(bundle: &Path, is_wanted: IsWanted) -> Result<SpecView> {
    read_with(bundle, |bytes, bundle| parse_if(bytes, bundle, is_wanted))
}

/// Like [`read`], for a bundle that a process or a record names.
///
/// # Errors
/// If the file cannot be read, see [`read_named_text`], or not be parsed, see [`parse`].
pub(crate) fn read_named(bundle: &Path) -> Result<SpecView> {
    let spec = read_named_text(bundle).and_then(|bytes| parse(&bytes, bundle));
    spec.with_context(|| cannot_read(bundle))
}

/// Returns the text of config.json in a bundle that a process or a record names.
///
/// # Errors
/// If another user can replace the file, or it cannot be read.
pub(crate) fn read_named_text(bundle: &Path) -> Result<Vec<u8>> {
    let (file, stat) = guarded::open_file(&config_of(bundle))?;
    base::read::read_known(&file, &stat, super::MAX_JSON)
}

fn read_with(
    bundle: &Path,
    parse: impl FnOnce(&[u8], &Path) -> Result<SpecView>,
) -> Result<SpecView> {
    let spec = read_file(&config_of(bundle)).and_then(|bytes| parse(&bytes, bundle));
    spec.with_context(|| cannot_read(bundle))
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    let (file, stat) = open_host_file(path)?;
    base::read::read_known(&file, &stat, super::MAX_JSON)
}

fn config_of(bundle: &Path) -> PathBuf {
    bundle.join("config.json")
}

/// Returns the beginning of the error for a bundle.
fn cannot_read(bundle: &Path) -> String {
    format!("cannot read the container's spec {:?}", config_of(bundle))
}

/// Parses config.json. A relative `root.path` is relative to `bundle`.
///
/// # Errors
/// If the text is not JSON of the expected form, an environment entry has no `=`, or `root.path` is missing.
pub fn parse(bytes: &[u8], bundle: &Path) -> Result<SpecView> {
    parse_if(bytes, bundle, |_, _, _| true)
}

/// Decides from environment, privilege, and the JSON text of `mounts` and `linux`, whether the rest of config.json is needed.
pub(crate) type IsWanted = fn(&SpecView, &str, &str) -> bool;

/// Like [`parse`], but if `is_wanted` returns false, only the rootfs, the environment and the privileges are read, and the
/// rest stays empty.
///
/// # Errors
/// The errors of [`parse`].
pub(crate) fn parse_if(bytes: &[u8], bundle: &Path, is_wanted: IsWanted) -> Result<SpecView> {
    let raw: Raw<'_> = super::first_json_value(bytes)?;
    let root = raw.root.map(|root| root.path).unwrap_or_default();
    ensure!(!root.as_os_str().is_empty(), "it has no \"root.path\"");
    let rootfs = bundle.join(root);
    ensure!(
        rootfs.is_absolute(),
        "its rootfs {rootfs:?} is not absolute"
    );
    let process = raw.process.context("it has no \"process\"")?;
    let (privileged, has_all_nodes) = privilege(process.capabilities, raw.linux)?;
    let env = process.env.unwrap_or_default().variables()?;
    let view = SpecView {
        rootfs,
        env,
        privileged,
        has_all_nodes,
        ..SpecView::default()
    };
    if !is_wanted(
        &view,
        raw.mounts.map_or("", RawValue::get),
        raw.linux.map_or("", RawValue::get),
    ) {
        return Ok(view);
    }
    let linux = linux(raw.linux)?;
    let user = Object::of(process.user, &["additionalGids", "gid", "uid"])?;
    let cgroups_path = linux.text("cgroupsPath").unwrap_or_default();
    Ok(SpecView {
        mounts: lists::known_entries(raw.mounts)?,
        hooks: hooks(raw.hooks)?,
        device_rules: device_rules(&linux)?,
        devices: lists::known_entries(linux.get("devices"))?,
        user_namespace: has_user_namespace(linux.get("namespaces"))?,
        uid_mappings: lists::known_entries(linux.get("uidMappings"))?,
        gid_mappings: lists::known_entries(linux.get("gidMappings"))?,
        user: (id(user.get("uid")), id(user.get("gid"))),
        additional_gids: lists::known_entries(user.get("additionalGids"))?,
        keeps_groups: Object::of(raw.annotations, &[KEEP_GROUPS])?
            .text(KEEP_GROUPS)
            .is_some_and(|on| on == "1"),
        pod: pod::from_annotations(raw.annotations, bundle, &cgroups_path)?,
        cdi_devices: super::annotated::cdi_devices(raw.annotations)?,
        cgroups_path,
        mount_label: linux.text("mountLabel").unwrap_or_default(),
        ..view
    })
}

fn linux(linux: Option<&RawValue>) -> Result<Object<'_>> {
    let ids = ["uidMappings", "gidMappings"];
    Object::of(
        linux,
        &[
            &ids[..],
            &[
                "cgroupsPath",
                "devices",
                "mountLabel",
                "namespaces",
                "resources",
            ],
        ]
        .concat(),
    )
}

fn device_rules(linux: &Object<'_>) -> Result<Vec<LinuxDeviceCgroup>> {
    lists::known_entries(Object::of(linux.get("resources"), &["devices"])?.get("devices"))
}

/// Returns a user or group id; 0 if it is missing, as in the runtimes.
fn id(number: Option<&RawValue>) -> u32 {
    number
        .and_then(|text| text.get().parse().ok())
        .unwrap_or_default()
}

fn hooks(stages: Option<&RawValue>) -> Result<Vec<Hook>> {
    let mut hooks = Vec::new();
    for (_, stage) in Object::of_names(stages, &|_| true)?.members() {
        if stage.get().starts_with('[') {
            hooks.extend(lists::known_entries(Some(stage))?);
        }
    }
    Ok(hooks)
}

/// Reports whether a container is privileged, and whether the engine lists all nodes of the host for it. `linux` is parsed only for
/// containers with CAP_SYS_ADMIN, which are few.
///
/// A user namespace counts also if config.json names an existing one to join. It cannot be the engine's own: setns(2) then fails with
/// EINVAL, and engines write no entry for `--userns=host`. With a rootless engine, the engine's namespace takes the place of
/// the host's: its user can open the same nodes without the hook.
fn privilege(capabilities: Option<&RawValue>, linux: Option<&RawValue>) -> Result<(bool, bool)> {
    if !has_sys_admin(capabilities)? {
        return Ok((false, false));
    }
    let linux = self::linux(linux)?;
    if !has_user_namespace(linux.get("namespaces"))? {
        return Ok((true, true));
    }
    Ok((false, allow_all(&device_rules(&linux)?)))
}

fn has_user_namespace(namespaces: Option<&RawValue>) -> Result<bool> {
    let mut found = false;
    lists::each(namespaces, &mut |entry| {
        found |= lists::value(entry)
            .get("type")
            .is_some_and(|kind| kind == "user");
    })?;
    Ok(found)
}

/// Reports whether CAP_SYS_ADMIN is in the bounding set. `capabilities` is an object, and before runtime-spec 1.0.0-rc5 it was
/// a list.
fn has_sys_admin(capabilities: Option<&RawValue>) -> Result<bool> {
    let bounding = match capabilities {
        Some(sets) if sets.get().starts_with('{') => {
            Object::of(Some(sets), &["bounding"])?.get("bounding")
        }
        list => list,
    };
    let mut found = false;
    let bounding = bounding.filter(|list| list.get().starts_with('['));
    lists::each(bounding, &mut |entry| {
        found |= lists::value(entry) == "CAP_SYS_ADMIN"
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests;
