//! Reads a container's Kubernetes names from the annotations of CRI-O and containerd.
//!
//! The author of a pod can set annotations, and so can the author of an image with some versions of Podman. If such a name counted,
//! records of other users could be replaced with it, or displaced ([`records::store`]). So only those names count that the
//! engine itself wrote over what it was given.

use std::path::Path;

use anyhow::Result;
use serde_json::value::RawValue;

use base::report::one_line;
use records::Pod;

use super::lists::Object;

/// The names of the pod, its namespace and the container. These are the kubelet's labels of the container, which CRI-O adds after the
/// annotations of the pod (`SpecAddAnnotations`). The author of the pod cannot set labels of a container.
const CRI_O: [&str; 3] = [
    "io.kubernetes.pod.name",
    "io.kubernetes.pod.namespace",
    "io.kubernetes.container.name",
];
/// The same of containerd, which adds them after those annotations of the pod that its configuration passes on
/// (`DefaultCRIAnnotations`).
const CONTAINERD: [&str; 3] = [
    "io.kubernetes.cri.sandbox-name",
    "io.kubernetes.cri.sandbox-namespace",
    "io.kubernetes.cri.container-name",
];
/// containerd gives this annotation to each container of a pod.
const OF_CONTAINERD: &str = "io.kubernetes.cri.container-type";

/// Reads the names from the annotations of config.json or of the state. `bundle` and `cgroups_path`, which is empty if it is
/// unknown, identify the engine.
///
/// # Errors
/// If the annotations are not a JSON object.
pub(crate) fn from_annotations(
    annotations: Option<&RawValue>,
    bundle: &Path,
    cgroups_path: &str,
) -> Result<Pod> {
    let of_cri_o = match prefix(cgroups_path) {
        // Its pods have no namespaces, and the user who starts a container chooses its annotations.
        prefix if prefix.starts_with("libpod") => return Ok(Pod::default()),
        prefix => prefix == "crio" || bundle.ends_with("userdata"),
    };
    let known = Object::of_names(annotations, &|name| {
        CRI_O.contains(&name) || !of_cri_o && (CONTAINERD.contains(&name) || name == OF_CONTAINERD)
    })?;
    let is_containerd = known.members().any(|(name, _)| !CRI_O.contains(&name));
    let [name, namespace, container] = if is_containerd { CONTAINERD } else { CRI_O }
        .map(|name| one_line(&known.text(name).unwrap_or_default()));
    Ok(Pod {
        name,
        namespace,
        container,
    })
}

/// Returns the name of the engine in a cgroup path, which is `SLICE:crio:ID` with systemd and `/PARENT/crio-ID` without. The author of a
/// pod cannot choose it.
fn prefix(cgroups_path: &str) -> &str {
    if let Some((_, unit)) = cgroups_path.split_once(':') {
        return unit.split(':').next().unwrap_or_default();
    }
    let name = cgroups_path.rsplit('/').next().unwrap_or_default();
    name.rsplit_once('-').map_or("", |(prefix, _)| prefix)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUNDLE: &str = "/run/containers/storage/overlay-containers/0a/userdata";

    fn namespace(annotations: &[(&str, &str)], bundle: &str, cgroups_path: &str) -> String {
        let annotations: std::collections::BTreeMap<_, _> = annotations.iter().copied().collect();
        let text = serde_json::to_string(&annotations).unwrap();
        let annotations = Some(serde_json::from_str(&text).unwrap());
        from_annotations(annotations, Path::new(bundle), cgroups_path)
            .unwrap()
            .namespace
    }

    #[test]
    fn the_engine_of_a_cgroup() {
        for (path, expected) in [
            ("kubepods-burstable-pod7.slice:crio:0a", "crio"),
            ("/kubepods/besteffort/pod7-8/crio-0a", "crio"),
            ("machine.slice:libpod:0a", "libpod"),
            ("/libpod_parent/libpod-0a", "libpod"),
            ("/user.slice/x/libpod-payload-0a", "libpod-payload"),
            ("kubepods-pod7.slice:cri-containerd:0a", "cri-containerd"),
            ("/kubepods/pod7/0a", ""),
            ("", ""),
        ] {
            assert_eq!(prefix(path), expected, "{path}");
        }
    }

    #[test]
    fn a_name_that_the_pods_author_invents_does_not_count() {
        let kubelet = ("io.kubernetes.pod.namespace", "real");
        let containerd = ("io.kubernetes.cri.sandbox-namespace", "real");
        let (typed, invented) = ((OF_CONTAINERD, "container"), "invented");
        let with = |name| (name, invented);
        let tasks = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/0a";
        for (annotations, bundle, cgroup, expected) in [
            // CRI-O, with and without config.json.
            (
                &[kubelet, with(containerd.0), with(OF_CONTAINERD)][..],
                BUNDLE,
                "x.slice:crio:0a",
                "real",
            ),
            (
                &[kubelet, with(containerd.0)],
                "/",
                "/kubepods/crio-0a",
                "real",
            ),
            (
                &[kubelet, with(containerd.0), with(OF_CONTAINERD)],
                BUNDLE,
                "",
                "real",
            ),
            (
                &[with(containerd.0), with(OF_CONTAINERD)],
                BUNDLE,
                "x.slice:crio:0a",
                "",
            ),
            // containerd that passes on all annotations, and one that does not name the namespace.
            (
                &[containerd, typed, with(kubelet.0)],
                tasks,
                "x.slice:cri-containerd:0a",
                "real",
            ),
            (
                &[
                    containerd,
                    typed,
                    with(kubelet.0),
                    with("io.container.manager"),
                ],
                tasks,
                "/kubepods/pod7/0a",
                "real",
            ),
            (&[typed, with(kubelet.0)], tasks, "", ""),
            // Podman, which has no namespaces.
            (
                &[with(kubelet.0), with(containerd.0)],
                BUNDLE,
                "machine.slice:libpod:0a",
                "",
            ),
            (
                &[with(kubelet.0), ("io.container.manager", "cri-o")],
                BUNDLE,
                "/libpod_parent/libpod-0a",
                "",
            ),
            // Another engine.
            (&[kubelet], "/bundle", "", "real"),
            (&[containerd], "/bundle", "", "real"),
            (&[], "/bundle", "", ""),
        ] {
            assert_eq!(
                namespace(annotations, bundle, cgroup),
                expected,
                "{annotations:?} {bundle} {cgroup}"
            );
        }
    }

    #[test]
    fn names_that_a_kubelet_gave() {
        let spec = include_bytes!("../../tests/fixtures/captures/kubelet-prestart/config.json");
        let spec = super::super::spec_view::parse(spec, Path::new(BUNDLE)).unwrap();
        let expected = Pod {
            name: "gpu1-node1".into(),
            namespace: "default".into(),
            container: "c".into(),
        };
        assert_eq!(spec.pod, expected);
    }
}
