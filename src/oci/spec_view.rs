//! The few things we read from the bundle's config.json; tolerant of everything else in it.
//! <https://github.com/opencontainers/runtime-spec/blob/main/config.md>

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use oci_spec::runtime::LinuxDeviceCgroup;
use serde::Deserialize;
use serde_json::value::RawValue;

use base::sys::in_root::open_host_file;

use super::Pod;
use super::lists::{self, Environment};

/// What the hook looks at in config.json.
#[derive(Clone, Debug, Default)]
pub struct SpecView {
    /// `root.path`, made absolute against the bundle: containerd writes it relative, and our working
    /// directory is not the bundle in every runtime.
    pub rootfs: PathBuf,
    /// `process.env`; the last of equal names counts, as for the process itself. Never our own environment.
    pub env: BTreeMap<String, String>,
    /// CAP_SYS_ADMIN in the bounding set: what NVIDIA's stack calls a privileged container.
    pub privileged: bool,
    /// `mounts`, for devices that are asked for by mounts.
    pub mounts: Vec<Mount>,
    /// `hooks`, of all stages. Entries of an unknown form are left out.
    pub hooks: Vec<Hook>,
    /// `linux.resources.devices`, in order. Entries of an unknown form are left out: they then allow nothing.
    pub device_rules: Vec<LinuxDeviceCgroup>,
    /// `linux.devices`, the nodes that the runtime makes.
    pub devices: Vec<Device>,
    /// Whether `linux.namespaces` has a user namespace.
    pub user_namespace: bool,
    /// `linux.uidMappings`
    pub uid_mappings: Vec<IdMapping>,
    /// `linux.gidMappings`
    pub gid_mappings: Vec<IdMapping>,
    /// `linux.cgroupsPath`; empty if there is none.
    pub cgroups_path: String,
    /// `linux.mountLabel`: the SELinux label of file systems that are mounted for it; empty if there is none.
    pub mount_label: String,
    /// `process.user.uid` and `gid`
    pub user: (u32, u32),
    /// `process.user.additionalGids`
    pub additional_gids: Vec<u32>,
    /// Whether crun leaves the process in the groups of the user who started the engine.
    pub keeps_groups: bool,
    /// What Kubernetes calls it, from `annotations`.
    pub pod: Pod,
    /// CDI devices that `annotations` name, as Kubernetes' device manager writes them: for people to read.
    pub cdi_devices: Vec<String>,
}

/// What we look at of a device node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Device {
    /// In the container
    pub path: PathBuf,
    /// `c`, `b`, `u` or `p`
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub major: Option<i64>,
    pub minor: Option<i64>,
}

/// Ids of a user namespace, and those that they are outside of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct IdMapping {
    /// The first one inside
    #[serde(rename = "containerID")]
    pub container_id: u32,
    /// The first one outside
    #[serde(rename = "hostID")]
    pub host_id: u32,
    pub size: u32,
}

/// The number that the kernel shows for an id that the reader's user namespace does not map: `/proc/sys/kernel/overflowuid` and
/// `overflowgid`, unless root changed them.
pub(crate) const OVERFLOW_ID: u32 = 65534;

impl IdMapping {
    /// An id of the container as it is outside of the user namespace.
    pub(crate) fn outside(mappings: &[Self], id: u32) -> Option<u32> {
        mappings.iter().find_map(|mapping| {
            let offset = id.checked_sub(mapping.container_id).filter(|offset| *offset < mapping.size)?;
            mapping.host_id.checked_add(offset)
        })
    }

    /// An id of the outside as it is in the user namespace.
    pub(crate) fn inside(mappings: &[Self], id: u32) -> Option<u32> {
        mappings.iter().find_map(|mapping| {
            let offset = id.checked_sub(mapping.host_id).filter(|offset| *offset < mapping.size)?;
            mapping.container_id.checked_add(offset)
        })
    }
}

/// What we look at of a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Mount {
    /// On the host
    pub source: PathBuf,
    /// In the container
    pub destination: PathBuf,
    /// `bind`, or the file system's
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// As mount(8) has them
    pub options: Option<Vec<String>>,
}

impl Mount {
    /// Whether it shows a place of the host's, as runtimes decide it.
    pub fn is_bind(&self) -> bool {
        let mut options = self.options.iter().flatten();
        self.kind.as_deref() == Some("bind") || options.any(|option| option == "bind" || option == "rbind")
    }
}

/// What we look at of a hook.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Hook {
    /// The program, on the host
    pub path: PathBuf,
    /// Its arguments, its own name first
    pub args: Vec<String>,
}

/// The annotation of `--group-add keep-groups`; see crun(1).
const KEEP_GROUPS: &str = "run.oci.keep_original_groups";

/// What is long in it stays text until it is known to matter.
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

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawUser<'a> {
    #[serde(borrow)]
    uid: Option<&'a RawValue>,
    #[serde(borrow)]
    gid: Option<&'a RawValue>,
    #[serde(borrow)]
    additional_gids: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct RawRoot {
    #[serde(default)]
    path: PathBuf,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawLinux<'a> {
    #[serde(borrow)]
    resources: Option<RawResources<'a>>,
    #[serde(borrow)]
    devices: Option<&'a RawValue>,
    #[serde(borrow)]
    namespaces: Option<&'a RawValue>,
    #[serde(borrow)]
    uid_mappings: Option<&'a RawValue>,
    #[serde(borrow)]
    gid_mappings: Option<&'a RawValue>,
    #[serde(borrow)]
    cgroups_path: Option<&'a RawValue>,
    #[serde(borrow)]
    mount_label: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct RawResources<'a> {
    #[serde(borrow)]
    devices: Option<&'a RawValue>,
}

/// Reads `<bundle>/config.json`.
///
/// # Errors
/// If it cannot be read or parsed, or names no rootfs.
pub(crate) fn read(bundle: &Path) -> Result<SpecView> {
    read_with(bundle, parse)
}

/// The same, as [`parse_if`] does.
///
/// # Errors
/// Those of [`read`].
pub(crate) fn read_if(bundle: &Path, is_wanted: IsWanted) -> Result<SpecView> {
    read_with(bundle, |bytes, bundle| parse_if(bytes, bundle, is_wanted))
}

fn read_with(bundle: &Path, parse: impl FnOnce(&[u8], &Path) -> Result<SpecView>) -> Result<SpecView> {
    let path = bundle.join("config.json");
    let spec = read_file(&path).and_then(|bytes| parse(&bytes, bundle));
    spec.with_context(|| format!("cannot read the container's spec {path:?}"))
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    base::read::read_limited(open_host_file(path)?.0, super::MAX_JSON)
}

/// Parses config.json; `bundle` is what a relative `root.path` is relative to.
///
/// # Errors
/// If it is no JSON of the expected shape, an environment entry has no `=`, or it names no rootfs.
pub fn parse(bytes: &[u8], bundle: &Path) -> Result<SpecView> {
    parse_if(bytes, bundle, |_, _, _| true)
}

/// Whether a container is of interest, by its environment and privilege, and the JSON text of its `mounts` and `linux`.
pub(crate) type IsWanted = fn(&SpecView, &str, &str) -> bool;

/// The same, but of a container that is not wanted only the rootfs, the environment and the privilege are read, and the rest
/// stays empty.
///
/// # Errors
/// Those of [`parse`].
pub fn parse_if(bytes: &[u8], bundle: &Path, is_wanted: IsWanted) -> Result<SpecView> {
    let raw: Raw<'_> = super::first_json_value(bytes)?;
    let root = raw.root.map(|root| root.path).unwrap_or_default();
    ensure!(!root.as_os_str().is_empty(), "it has no \"root.path\"");
    let rootfs = bundle.join(root);
    ensure!(rootfs.is_absolute(), "its rootfs {rootfs:?} is not absolute");
    let process = raw.process.context("it has no \"process\"")?;
    let view = SpecView {
        rootfs,
        env: process.env.unwrap_or_default().variables()?,
        privileged: has_sys_admin(process.capabilities)?,
        ..SpecView::default()
    };
    if !is_wanted(&view, raw.mounts.map_or("", RawValue::get), raw.linux.map_or("", RawValue::get)) {
        return Ok(view);
    }
    let linux: RawLinux<'_> = of_text(raw.linux)?.unwrap_or_default();
    let user: RawUser<'_> = of_text(process.user)?.unwrap_or_default();
    let mut user_namespace = false;
    lists::each(linux.namespaces, &mut |entry| {
        user_namespace |= lists::value(entry).get("type").is_some_and(|kind| kind == "user");
    })?;
    Ok(SpecView {
        mounts: lists::of_known_form(raw.mounts)?,
        hooks: hooks(of_text(raw.hooks)?)?,
        device_rules: lists::of_known_form(linux.resources.and_then(|resources| resources.devices))?,
        devices: lists::of_known_form(linux.devices)?,
        user_namespace,
        uid_mappings: lists::of_known_form(linux.uid_mappings)?,
        gid_mappings: lists::of_known_form(linux.gid_mappings)?,
        user: (id(user.uid), id(user.gid)),
        additional_gids: lists::of_known_form(user.additional_gids)?,
        keeps_groups: lists::members(raw.annotations, &[KEEP_GROUPS])?.get(KEEP_GROUPS).is_some_and(|on| on == "1"),
        pod: Pod::from_annotations(raw.annotations)?,
        cdi_devices: super::annotated::cdi_devices(raw.annotations)?,
        cgroups_path: text_of(linux.cgroups_path),
        mount_label: text_of(linux.mount_label),
        ..view
    })
}

/// A text, or nothing if it is something else.
fn text_of(value: Option<&RawValue>) -> String {
    let value = value.map(|text| lists::value(text.get()));
    value.and_then(|value| Some(value.as_str()?.to_owned())).unwrap_or_default()
}

/// Root where it is missing, as for runtimes.
fn id(number: Option<&RawValue>) -> u32 {
    number.and_then(|text| text.get().parse().ok()).unwrap_or_default()
}

fn of_text<'a, T: Deserialize<'a>>(text: Option<&'a RawValue>) -> Result<Option<T>> {
    Ok(text.map(|text| serde_json::from_str(text.get())).transpose()?.flatten())
}

fn hooks(stages: Option<BTreeMap<String, &RawValue>>) -> Result<Vec<Hook>> {
    let mut hooks = Vec::new();
    for stage in stages.unwrap_or_default().into_values().filter(|stage| stage.get().starts_with('[')) {
        hooks.extend(lists::of_known_form(Some(stage))?);
    }
    Ok(hooks)
}

/// `capabilities` is an object of sets, and was one flat list before runtime-spec 1.0.0-rc5.
fn has_sys_admin(capabilities: Option<&RawValue>) -> Result<bool> {
    #[derive(Deserialize)]
    struct Sets<'a> {
        #[serde(borrow)]
        bounding: Option<&'a RawValue>,
    }
    let bounding = match capabilities {
        Some(list) if list.get().starts_with('[') => Some(list),
        Some(sets) if sets.get().starts_with('{') => serde_json::from_str::<Sets<'_>>(sets.get())?.bounding,
        _ => None,
    };
    let mut found = false;
    let bounding = bounding.filter(|list| list.get().starts_with('['));
    lists::each(bounding, &mut |entry| found |= lists::value(entry) == "CAP_SYS_ADMIN")?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request;

    fn view(text: &str) -> Result<SpecView> {
        parse(text.as_bytes(), Path::new("/bundle"))
    }

    #[test]
    fn reads_a_captured_spec_of_a_kubelet_pod() {
        let spec = include_bytes!("../../tests/fixtures/captures/kubelet-prestart/config.json");
        let spec = parse(spec, Path::new("/bundle")).unwrap();
        assert!(spec.rootfs.ends_with("merged"));
        assert_eq!(spec.env["NVIDIA_VISIBLE_DEVICES"], "GPU-00000000-1111-2222-3333-444444444444");
        assert!(!spec.privileged);
        assert_eq!(spec.device_rules.len(), 2);
    }

    #[test]
    fn a_relative_rootfs_is_below_the_bundle() {
        let spec = view(r#"{"root":{"path":"rootfs"},"process":{}}"#).unwrap();
        assert_eq!(spec.rootfs, Path::new("/bundle/rootfs"));
    }

    #[test]
    fn what_it_does_not_know_is_no_reason_to_fail() {
        let spec = view(
            r#"{"ociVersion":"9","process":{"env":["A=1","A=2=3"],"new":1,"capabilities":{"bounding":["CAP_NEW"]}},
               "root":{"path":"/r"},"linux":{"resources":{"devices":[{"allow":true,"type":"z"},{"allow":true,"type":"c","major":195,"access":"rwm"}]}}}"#,
        )
        .unwrap();
        assert_eq!(spec.env["A"], "2=3");
        assert_eq!(spec.device_rules.len(), 1);
    }

    /// The rest is passed over only where it does not matter.
    #[test]
    fn who_may_ask_is_looked_at_whole() {
        let mount = |path: &str| format!(r#"{{"source":"/dev/null","destination":"{path}"}}"#);
        for (env, mounts, whole) in [
            ("A=1", mount("/var/run/x"), false),
            ("NVIDIA_VISIBLE_DEVICES=void", mount("/x"), false),
            ("NVIDIA_VISIBLE_DEVICES=0", mount("/x"), true),
            ("CUDA_VERSION=9.0", mount("/x"), true),
            ("DOCKER_RESOURCE_X=0", mount("/x"), true),
            ("A=1", mount("/var/run/nvidia-container-devices/0"), true),
            ("A=1", mount("\\/var\\/run\\/nvidia-container-devices\\/0"), true),
            ("A=1", mount("/var/run/\\u006evidia-container-devices/0"), true),
        ] {
            let text = format!(r#"{{"root":{{"path":"/r"}},"process":{{"env":["{env}"]}},"mounts":[{mounts}]}}"#);
            let spec = parse_if(text.as_bytes(), Path::new("/bundle"), request::may_ask).unwrap();
            assert_eq!(spec.mounts.len(), usize::from(whole), "{env} {mounts}");
            assert!(whole || request::hint(&view(&text).unwrap()) == request::Hint::No, "{env} {mounts}");
        }
        let gpu = r#"{"path":"/dev/nvidia0","type":"c","major": 195,"minor":0}"#;
        let fuse = r#"{"path":"/dev/fuse","type":"c","major":10,"minor":229}"#;
        for (process, device, whole) in [
            ("", gpu, true),
            ("", fuse, false),
            (r#""env":["NVIDIA_VISIBLE_DEVICES=void"]"#, gpu, false),
            (r#""capabilities":{"bounding":["CAP_SYS_ADMIN"]}"#, gpu, false),
        ] {
            let text =
                format!(r#"{{"root":{{"path":"/r"}},"process":{{{process}}},"linux":{{"devices":[{device}]}}}}"#);
            let spec = parse_if(text.as_bytes(), Path::new("/bundle"), request::may_ask).unwrap();
            assert_eq!(spec.devices.len(), usize::from(whole), "{process} {device}");
            assert_eq!(request::hint(&view(&text).unwrap()) == request::Hint::Perhaps, whole, "{process} {device}");
        }
    }

    #[test]
    fn the_mount_label_is_text_or_none() {
        for (linux, label) in [
            (
                r#"{"mountLabel":"system_u:object_r:container_file_t:s0:c1,c2"}"#,
                "system_u:object_r:container_file_t:s0:c1,c2",
            ),
            (r#"{"mountLabel":""}"#, ""),
            (r#"{"mountLabel":null}"#, ""),
            (r#"{"mountLabel":3}"#, ""),
            ("{}", ""),
            ("null", ""),
        ] {
            let spec = view(&format!(r#"{{"root":{{"path":"/r"}},"process":{{}},"linux":{linux}}}"#)).unwrap();
            assert_eq!(spec.mount_label, label, "{linux}");
        }
    }

    #[test]
    fn privilege_is_judged_by_the_bounding_set() {
        for (capabilities, privileged) in [
            (r#"{"bounding":["CAP_SYS_ADMIN"]}"#, true),
            (r#"{"bounding":["CAP_CHOWN"],"effective":["CAP_SYS_ADMIN"]}"#, false),
            (r#"["CAP_SYS_ADMIN"]"#, true),
            ("null", false),
            ("3", false),
        ] {
            let spec =
                view(&format!(r#"{{"root":{{"path":"/r"}},"process":{{"capabilities":{capabilities}}}}}"#)).unwrap();
            assert_eq!(spec.privileged, privileged, "{capabilities}");
        }
    }

    #[test]
    fn bad_specs_are_named() {
        for (text, says) in [
            ("", "empty"),
            ("{", "EOF"),
            (r#"{"process":{}}"#, "no \"root.path\""),
            (r#"{"root":{"path":"/r"}}"#, "no \"process\""),
            (r#"{"root":{"path":"/r"},"process":{"env":["FOO"]}}"#, "\"FOO\", which is not NAME=VALUE"),
        ] {
            let text = base::report::render(&view(text).unwrap_err());
            assert!(text.contains(says), "{text}");
        }
    }
}
