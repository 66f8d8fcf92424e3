//! Finds the containers of a pod of Podman. Its database contains the pods; config.json of each container names the cgroup of the pod,
//! which contains the pod's id, and the host name in the infra container is the name of the pod.
//!
//! A pod without an infra container (`podman pod create --infra=false`) has no cgroup. An annotation of its containers is the id of
//! the pod, and only the database contains its name.

use std::path::Path;

use serde::Deserialize;

use base::json;

use super::KnownContainer;
use crate::oci::spec_view;

/// Pods are found by their id, or by at least this many of its characters, like `podman pod ps` prints.
const SHORT_ID: usize = 12;

/// The used fields of config.json.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Spec {
    hostname: String,
    annotations: Annotations,
    linux: Linux,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Annotations {
    /// The id of the infra container, or of the pod if it has none. Podman uses CRI-O's name for the annotation.
    #[serde(rename = "io.kubernetes.cri-o.SandboxID")]
    sandbox: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Linux {
    #[serde(rename = "cgroupsPath")]
    cgroups_path: String,
}

/// Returns the containers of the pod with this name or id, without its infra container, which runs no program of the user.
pub(super) fn containers_of<'k>(
    name: &str,
    known: &'k [KnownContainer],
) -> Vec<&'k KnownContainer> {
    let members = members(known);
    let mut id = "";
    for member in &members {
        let is_named = member.is_infra && member.hostname == name;
        let has_id = name.len() >= SHORT_ID && member.pod.starts_with(name);
        if is_named || has_id {
            id = &member.pod;
            break;
        }
    }
    let mut found = Vec::new();
    for member in &members {
        if member.pod == id && !member.is_infra {
            found.push(member.container);
        }
    }
    found
}

/// Reports whether one of the containers is in a pod without an infra container, whose name config.json does not contain.
pub(super) fn has_pod_without_name(known: &[KnownContainer]) -> bool {
    let members = members(known);
    for member in &members {
        let has_infra = |other: &Member<'_>| other.is_infra && other.pod == member.pod;
        if !members.iter().any(has_infra) {
            return true;
        }
    }
    false
}

fn members(known: &[KnownContainer]) -> Vec<Member<'_>> {
    let mut members = Vec::new();
    for container in known.iter().filter(|container| container.is_listed) {
        if let Some(member) = member(container) {
            members.push(member);
        }
    }
    members
}

/// A container of a pod.
struct Member<'k> {
    container: &'k KnownContainer,
    /// The id of the pod
    pod: String,
    is_infra: bool,
    hostname: String,
}

/// Returns the container as a member of a pod; `None` if it is in no pod, or has no config.json because it was never started.
fn member(container: &KnownContainer) -> Option<Member<'_>> {
    let text = spec_view::read_named_text(&container.bundle).ok()?;
    let spec: Spec = json::from_bytes(&text).ok()?;
    let pod = match pod_of(&spec.linux.cgroups_path) {
        Some(pod) => pod.to_owned(),
        None if is_id(&spec.annotations.sandbox) => spec.annotations.sandbox,
        None => return None,
    };
    let infra = format!("{}-infra", pod.get(..SHORT_ID)?);
    Some(Member {
        container,
        is_infra: container.names.contains(&infra),
        hostname: spec.hostname,
        pod,
    })
}

/// Returns the id of the pod in a cgroup path: `machine-libpod_pod_POD.slice:libpod:ID` with systemd, and `/libpod_parent/POD/libpod-ID`
/// without (`getPodCgroupPath` and `createContainerCgroup` in libpod).
fn pod_of(cgroups_path: &str) -> Option<&str> {
    let pod = match cgroups_path.split_once(':') {
        Some((slice, _)) => slice.strip_suffix(".slice")?.split_once("libpod_pod_")?.1,
        None => Path::new(cgroups_path).parent()?.file_name()?.to_str()?,
    };
    if is_id(pod) { Some(pod) } else { None }
}

fn is_id(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "8bf524527ec5b50702da3a74249ab9ea3f86d1dfaddcdd6a0f31b5827014f667";

    #[test]
    fn pods_of_cgroups() {
        let systemd = format!("machine-libpod_pod_{POD}.slice:libpod:f1f478a9311b");
        let user = format!("user-libpod_pod_{POD}.slice:libpod:f1f478a9311b");
        let cgroupfs = format!("/libpod_parent/{POD}/libpod-f1f478a9311b");
        for path in [&systemd, &user, &cgroupfs] {
            assert_eq!(pod_of(path), Some(POD), "{path}");
        }
        for path in [
            "",
            "/libpod_parent/libpod-3a0eb6141104",
            "machine.slice:libpod:3a0e",
        ] {
            assert_eq!(pod_of(path), None, "{path}");
        }
    }

    #[test]
    fn a_pod_has_its_containers() {
        let dir = tempfile::tempdir().unwrap();
        let known = |id: &str, name: &str, pod: &str, sandbox: &str| {
            let bundle = dir.path().join(id);
            std::fs::create_dir(&bundle).unwrap();
            let spec = format!(
                r#"{{"hostname": "web", "annotations": {{"io.kubernetes.cri-o.SandboxID": "{sandbox}"}},
                    "linux": {{"cgroupsPath": "/libpod_parent/{pod}/libpod-{id}"}}}}"#
            );
            std::fs::write(bundle.join("config.json"), spec).unwrap();
            KnownContainer {
                id: id.to_owned(),
                names: vec![name.to_owned()],
                is_listed: true,
                bundle,
                record: None,
            }
        };
        let other = POD.replace('8', "7");
        let (infra, without_infra) = (POD.replace('8', "6"), POD.replace('8', "5"));
        let known = [
            known("a1", "one", POD, &infra),
            known("b2", &format!("{}-infra", &POD[..12]), POD, ""),
            known("c3", "two", POD, &infra),
            known("d4", "three", &other, ""),
            known("e5", "four", "", ""),
            known("f6", "five", "", &without_infra),
            known("a7", "six", "", &without_infra),
            known("a8", "seven", "", "../../etc"),
        ];
        assert!(has_pod_without_name(&known));
        assert!(!has_pod_without_name(&known[..3]) && !has_pod_without_name(&known[4..5]));
        let ids = |name: &str| {
            let found = containers_of(name, &known);
            found
                .iter()
                .map(|known| known.id.as_str())
                .collect::<Vec<_>>()
        };
        for (name, expected) in [
            ("web", &["a1", "c3"][..]),
            (POD, &["a1", "c3"]),
            (&POD[..12], &["a1", "c3"]),
            (&other[..20], &["d4"]),
            (&without_infra, &["f6", "a7"]),
            (&without_infra[..12], &["f6", "a7"]),
            (&without_infra[..11], &[]),
            (&infra, &[]),
            (&POD[..11], &[]),
            ("", &[]),
            ("other", &[]),
        ] {
            assert_eq!(ids(name), expected, "{name}");
        }
    }
}
