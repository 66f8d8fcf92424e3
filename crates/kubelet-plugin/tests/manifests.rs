//! The manifests in deploy/kubernetes: what kustomize makes of them has the types of the API, and fits the plugin.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "tests"
)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::Parser;
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Namespace, Pod, PodSpec, ResourceQuota, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, RoleBinding};
use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceClaim, DeviceClass, ResourceClaim, ResourceClaimTemplate,
};
use kubelet_plugin::commands::cli::Cli;
use kubelet_plugin::settings::Plugin;
use nvidia_host::config::SWARM_RESOURCE_PREFIX;
use nvidia_host::request::Variable;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Kinds of objects that are in no namespace.
const CLUSTER_SCOPED: [&str; 7] = [
    "ClusterRole",
    "ClusterRoleBinding",
    "DeviceClass",
    "Namespace",
    "RuntimeClass",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
];

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../deploy/kubernetes")
        .canonicalize()
        .unwrap()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| {
            if path.is_dir() {
                files(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}

fn kustomizations() -> Vec<PathBuf> {
    let dirs = files(&top())
        .into_iter()
        .filter(|file| file.ends_with("kustomization.yaml"));
    let dirs: Vec<PathBuf> = dirs.map(|file| file.parent().unwrap().to_owned()).collect();
    assert!(dirs.len() >= 8, "{dirs:?}");
    dirs
}

fn documents(file: &Path) -> Vec<Value> {
    let text =
        std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let parse = |text: &str| {
        cdi_spec::yaml::parse(text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
    };
    text.split("\n---\n").map(parse).collect()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

/// Does what `kubectl kustomize` does with the fields that our files have.
fn render(dir: &Path) -> Vec<Value> {
    let file = dir.join("kustomization.yaml");
    let kustomization = documents(&file).remove(0);
    let known = ["apiVersion", "kind", "namespace", "resources", "patches"];
    let unknown = kustomization
        .as_object()
        .unwrap()
        .keys()
        .find(|key| !known.contains(&key.as_str()));
    assert_eq!(unknown, None, "{}", file.display());
    let resources = list(&kustomization, "resources")
        .iter()
        .map(|name| dir.join(name.as_str().unwrap()));
    let mut objects: Vec<Value> = resources
        .flat_map(|path| {
            if path.is_dir() {
                render(&path)
            } else {
                documents(&path)
            }
        })
        .collect();
    for patch in list(&kustomization, "patches") {
        let operations = cdi_spec::yaml::parse(patch["patch"].as_str().unwrap()).unwrap();
        let operations: json_patch::Patch = serde_json::from_value(operations).unwrap();
        let (kind, name) = (&patch["target"]["kind"], &patch["target"]["name"]);
        let mut targets = objects
            .iter_mut()
            .filter(|object| object["kind"] == *kind && object["metadata"]["name"] == *name);
        let target = targets
            .next()
            .unwrap_or_else(|| panic!("{}: no {kind} {name}", file.display()));
        json_patch::patch(target, &operations).unwrap();
    }
    if let Some(namespace) = kustomization.get("namespace") {
        for object in &mut objects {
            if !CLUSTER_SCOPED.contains(&object["kind"].as_str().unwrap()) {
                object["metadata"]["namespace"] = namespace.clone();
            }
        }
    }
    objects
}

/// Fails if the type lacks a field of the object, or a field has another type.
fn typed<T: DeserializeOwned + Serialize>(object: &Value) -> T {
    let typed: T = serde_json::from_value(object.clone())
        .unwrap_or_else(|error| panic!("{error}: {object:#}"));
    assert_eq!(serde_json::to_value(&typed).unwrap(), *object);
    typed
}

/// The API server accepts numbers for quantities.
fn quantities_as_text(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match field {
                    Value::Object(quantities) if name == "limits" || name == "requests" => {
                        let numbers = quantities
                            .values_mut()
                            .filter(|quantity| quantity.is_number());
                        numbers.for_each(|quantity| *quantity = quantity.to_string().into());
                    }
                    field => quantities_as_text(field),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(quantities_as_text),
        _ => {}
    }
}

#[test]
fn every_overlay_has_the_types_of_the_api() {
    for dir in kustomizations() {
        for mut object in render(&dir) {
            quantities_as_text(&mut object);
            match object["kind"].as_str().unwrap() {
                "ClusterRole" => drop(typed::<ClusterRole>(&object)),
                "ClusterRoleBinding" => drop(typed::<ClusterRoleBinding>(&object)),
                "DaemonSet" => check_daemon_set(&typed(&object)),
                "DeviceClass" => drop(typed::<DeviceClass>(&object)),
                "Namespace" => drop(typed::<Namespace>(&object)),
                "NetworkPolicy" => drop(typed::<NetworkPolicy>(&object)),
                "Pod" => check_pod(typed::<Pod>(&object).spec.as_ref().unwrap()),
                "ResourceClaim" => {
                    check_claim(&typed::<ResourceClaim>(&object).spec.devices.unwrap())
                }
                "ResourceClaimTemplate" => {
                    check_claim(
                        &typed::<ResourceClaimTemplate>(&object)
                            .spec
                            .spec
                            .devices
                            .unwrap(),
                    );
                }
                "ResourceQuota" => drop(typed::<ResourceQuota>(&object)),
                "RoleBinding" => drop(typed::<RoleBinding>(&object)),
                "RuntimeClass" => drop(typed::<RuntimeClass>(&object)),
                "ServiceAccount" => drop(typed::<ServiceAccount>(&object)),
                "ValidatingAdmissionPolicy" => drop(typed::<ValidatingAdmissionPolicy>(&object)),
                "ValidatingAdmissionPolicyBinding" => {
                    drop(typed::<ValidatingAdmissionPolicyBinding>(&object))
                }
                kind => panic!("no type for {kind}"),
            }
        }
    }
}

/// What a distribution of Kubernetes has that decides about our objects, from its documents.
struct Distribution {
    name: &'static str,
    /// The overlays that the documents name for it
    overlays: &'static [&'static str],
    /// The labels of a node with a GPU
    node: &'static [(&'static str, &'static str)],
    /// The runtime handlers of its engine
    handlers: &'static [&'static str],
    /// The handler of a RuntimeClass "nvidia" that it creates, and which is immutable
    own_class: Option<&'static str>,
    /// Pods of critical priority classes need a quota with that scope, apart from kube-system.
    needs_quota: bool,
    /// Pods with directories of the host need the use of a security context constraint.
    needs_scc: bool,
}

const DISTRIBUTIONS: &[Distribution] = &[
    Distribution {
        name: "kubeadm with containerd",
        overlays: &["image-nodes", "rpm-nodes", "field-labels", "locked"],
        node: &[("nvidia.com/gpu", "true")],
        handlers: &["runc"],
        own_class: None,
        needs_quota: false,
        needs_scc: false,
    },
    Distribution {
        name: "CRI-O with its default runtime, and NVIDIA's operator",
        overlays: &["image-nodes", "crun-nodes"],
        node: &[("nvidia.com/gpu.present", "true")],
        handlers: &["crun"],
        own_class: None,
        needs_quota: false,
        needs_scc: false,
    },
    Distribution {
        name: "kubespray",
        overlays: &["kubespray"],
        node: &[("nvidia.com/gpu", "true")],
        handlers: &["runc"],
        own_class: None,
        needs_quota: false,
        needs_scc: false,
    },
    Distribution {
        name: "K3s, RKE2, with Node Feature Discovery",
        overlays: &["image-nodes"],
        node: &[("feature.node.kubernetes.io/pci-0302_10de.present", "true")],
        handlers: &["runc", "nvidia"],
        own_class: Some("nvidia"),
        needs_quota: false,
        needs_scc: false,
    },
    Distribution {
        name: "GKE",
        overlays: &["gke-layout"],
        node: &[("feature.node.kubernetes.io/pci-10de.present", "true")],
        handlers: &["runc"],
        own_class: None,
        needs_quota: true,
        needs_scc: false,
    },
    Distribution {
        name: "OpenShift, MicroShift",
        overlays: &["openshift"],
        node: &[("feature.node.kubernetes.io/pci-10de.present", "true")],
        handlers: &["crun", "runc"],
        own_class: None,
        needs_quota: false,
        needs_scc: true,
    },
];

impl Distribution {
    fn admits(&self, object: &Value, all: &[Value]) -> Result<(), String> {
        let namespace = &object["metadata"]["namespace"];
        match object["kind"].as_str().unwrap() {
            "RuntimeClass" => {
                let handler = object["handler"].as_str().unwrap();
                check(
                    self.handlers.contains(&handler),
                    "failed to find runtime handler",
                )?;
                let is_same = self.own_class.is_none_or(|own| own == handler);
                check(is_same, "field is immutable")
            }
            "DaemonSet" => {
                let spec = &object["spec"]["template"]["spec"];
                let terms = &spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
                let terms = list(terms, "nodeSelectorTerms");
                let selected = terms.iter().any(|term| self.is_selected(term));
                check(selected, "no node is selected")?;
                let priority = spec["priorityClassName"].as_str().unwrap();
                let is_critical = priority.starts_with("system-") && *namespace != "kube-system";
                let mut quotas = all.iter().filter(|other| {
                    other["kind"] == "ResourceQuota" && other["metadata"]["namespace"] == *namespace
                });
                let has_quota = quotas.any(|quota| {
                    let scope = &list(&quota["spec"]["scopeSelector"], "matchExpressions")[0];
                    scope["scopeName"] == "PriorityClass"
                        && list(scope, "values").iter().any(|value| value == priority)
                });
                let needs_quota = self.needs_quota && is_critical;
                check(
                    !needs_quota || has_quota,
                    "insufficient quota to match these scopes",
                )?;
                let has_host_path = list(spec, "volumes")
                    .iter()
                    .any(|volume| !volume["hostPath"].is_null());
                let may_use = all.iter().any(|other| {
                    other["kind"] == "RoleBinding"
                        && other["metadata"]["namespace"] == *namespace
                        && other["roleRef"]["name"] == "system:openshift:scc:privileged"
                        && other["subjects"][0]["name"] == spec["serviceAccountName"]
                });
                let needs_scc = self.needs_scc && has_host_path;
                check(
                    !needs_scc || may_use,
                    "unable to validate against any security context constraint",
                )?;
                let labels = all.iter().find(|other| other["kind"] == "Namespace");
                let level = labels.map(
                    |other| &other["metadata"]["labels"]["pod-security.kubernetes.io/enforce"],
                );
                check(
                    level.is_none_or(|level| level == "privileged"),
                    "violates PodSecurity",
                )
            }
            "Pod" => Err("a pod that nobody has asked for, which keeps a GPU".to_owned()),
            _ => Ok(()),
        }
    }

    fn is_selected(&self, term: &Value) -> bool {
        let mut expressions = list(term, "matchExpressions").iter();
        expressions.all(|expression| {
            let label = self
                .node
                .iter()
                .find(|(name, _)| expression["key"] == **name);
            let Some((_, value)) = label else {
                return false;
            };
            expression["operator"] == "Exists"
                || list(expression, "values")
                    .iter()
                    .any(|known| known == value)
        })
    }
}

fn check(holds: bool, error: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(error.to_owned()) }
}

/// Each overlay is admitted by the distributions for which the documents name it, and starts there.
#[test]
fn distributions_admit_the_overlays() {
    let mut checked = BTreeSet::from(["claims-service-account"]);
    for distribution in DISTRIBUTIONS {
        for overlay in distribution.overlays {
            let objects = render(&top().join("overlays").join(overlay));
            for object in &objects {
                let admitted = distribution.admits(object, &objects);
                assert_eq!(
                    admitted,
                    Ok(()),
                    "{}, {overlay}: {object:#}",
                    distribution.name
                );
            }
            checked.insert(overlay);
        }
    }
    for entry in std::fs::read_dir(top().join("overlays")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(checked.contains(&*name), "{name}");
    }
}

/// The requests that the driver makes, which `refusals_of_every_request` in dra.rs refuses one after the other.
#[test]
fn the_role_has_the_verbs_that_are_used() {
    let objects = render(&top().join("overlays/claims-service-account"));
    let role = objects
        .iter()
        .find(|object| object["kind"] == "ClusterRole");
    let mut found = BTreeSet::new();
    for rule in list(role.unwrap(), "rules") {
        for verb in list(rule, "verbs") {
            let resource = rule["resources"][0].as_str().unwrap();
            found.insert(format!("{} {resource}", verb.as_str().unwrap()));
        }
    }
    let expected = [
        "list resourceslices",
        "watch resourceslices",
        "create resourceslices",
        "update resourceslices",
        "delete resourceslices",
        "get resourceclaims",
        "get nodes",
    ];
    assert_eq!(found, expected.map(str::to_owned).into());
}

/// The labels of the target are those of the plugin's pod.
#[test]
fn the_pod_monitor_keeps_the_labels_of_the_metrics() {
    let monitor = documents(&top().join("monitoring/pod-monitor.yaml")).remove(0);
    let objects = render(&top().join("overlays/image-nodes"));
    let set = objects
        .iter()
        .find(|object| object["kind"] == "DaemonSet")
        .unwrap();
    let pod = &set["spec"]["template"];
    let labels = &monitor["spec"]["selector"]["matchLabels"];
    for (name, value) in labels.as_object().unwrap() {
        assert_eq!(pod["metadata"]["labels"][name], *value);
    }
    assert_eq!(
        monitor["metadata"]["namespace"],
        set["metadata"]["namespace"]
    );
    let endpoint = &monitor["spec"]["podMetricsEndpoints"][0];
    assert_eq!(
        endpoint["port"],
        pod["spec"]["containers"][0]["ports"][0]["name"]
    );
    assert_eq!(endpoint["honorLabels"], true);
}

#[test]
fn every_manifest_is_in_an_overlay() {
    let mut named = BTreeSet::new();
    for dir in kustomizations() {
        let kustomization = documents(&dir.join("kustomization.yaml")).remove(0);
        let resources = list(&kustomization, "resources")
            .iter()
            .map(|name| dir.join(name.as_str().unwrap()));
        named.extend(resources.map(|path| path.canonicalize().unwrap()));
    }
    let manifests = files(&top()).into_iter().filter(|file| {
        let is_yaml = file
            .extension()
            .is_some_and(|extension| extension == "yaml");
        is_yaml
            && !file.ends_with("kustomization.yaml")
            && !file.starts_with(top().join("monitoring"))
    });
    for file in manifests {
        assert!(
            named.contains(&file),
            "{} is in no kustomization.yaml",
            file.display()
        );
    }
}

/// Returns the values of all keys `image` in an object.
fn images(value: &Value) -> Vec<&str> {
    match value {
        Value::Object(fields) => {
            let named = fields.get("image").and_then(Value::as_str);
            named
                .into_iter()
                .chain(fields.values().flat_map(images))
                .collect()
        }
        Value::Array(values) => values.iter().flat_map(images).collect(),
        _ => Vec::new(),
    }
}

/// Whether an image name begins with a registry and ends with a tag, so that its meaning does not depend on the node.
fn is_complete(image: &str) -> bool {
    let Some((registry, rest)) = image.split_once('/') else {
        return false;
    };
    let is_registry = registry == "localhost" || registry.contains(['.', ':']);
    is_registry && rest.split_once(':').is_some_and(|(_, tag)| tag != "latest")
}

/// CRI-O has no default registry: an engine does not pull an image with a short name, or asks which registry is meant.
#[test]
fn every_image_has_a_complete_name() {
    for (name, complete) in [
        ("docker.io/nvidia/cuda:12.2.2-base-ubuntu22.04", true),
        ("localhost/plugin:1", true),
        ("nvidia/cuda:12.2.2-base-ubuntu22.04", false),
        ("plugin:1", false),
        ("docker.io/nvidia/cuda", false),
    ] {
        assert_eq!(is_complete(name), complete, "{name}");
    }
    let is_yaml = |file: &PathBuf| {
        file.extension()
            .is_some_and(|extension| extension == "yaml")
    };
    let mut count = 0;
    for file in files(&top()).into_iter().filter(is_yaml) {
        for image in documents(&file).iter().flat_map(images) {
            assert!(is_complete(image), "{}: {image}", file.display());
            count += 1;
        }
    }
    assert!(count >= 5, "{count} images");
}

#[test]
fn objects_name_each_other() {
    for dir in kustomizations() {
        let objects = render(&dir);
        let names = |kind: &str| -> Vec<&Value> {
            objects
                .iter()
                .filter(|object| object["kind"] == kind)
                .map(|object| &object["metadata"]["name"])
                .collect()
        };
        for object in &objects {
            let spec = &object["spec"]["template"]["spec"];
            assert!(
                spec.is_null() || names("ServiceAccount").contains(&&spec["serviceAccountName"]),
                "{dir:?}"
            );
            for claim in list(&object["spec"], "resourceClaims") {
                let [kind, field] = match claim["resourceClaimName"].is_null() {
                    true => ["ResourceClaimTemplate", "resourceClaimTemplateName"],
                    false => ["ResourceClaim", "resourceClaimName"],
                };
                assert!(names(kind).contains(&&claim[field]), "{dir:?}: {claim}");
            }
            if object["kind"] == "ClusterRoleBinding" {
                assert!(
                    names("ClusterRole").contains(&&object["roleRef"]["name"]),
                    "{dir:?}"
                );
                assert!(
                    names("ServiceAccount").contains(&&object["subjects"][0]["name"]),
                    "{dir:?}"
                );
            }
            if object["kind"] == "ValidatingAdmissionPolicyBinding" {
                assert!(
                    names("ValidatingAdmissionPolicy").contains(&&object["spec"]["policyName"]),
                    "{dir:?}"
                );
            }
            if object["kind"] == "NetworkPolicy" {
                let labels = &object["spec"]["podSelector"]["matchLabels"];
                let pods = objects
                    .iter()
                    .find(|object| object["kind"] == "DaemonSet")
                    .unwrap();
                let pod_labels = &pods["spec"]["template"]["metadata"]["labels"];
                for (name, value) in labels.as_object().unwrap() {
                    assert_eq!(pod_labels[name], *value, "{dir:?}");
                }
            }
        }
    }
}

fn check_daemon_set(set: &DaemonSet) {
    let spec = set.spec.as_ref().unwrap();
    let labels = spec
        .template
        .metadata
        .as_ref()
        .unwrap()
        .labels
        .as_ref()
        .unwrap();
    for (name, value) in spec.selector.match_labels.as_ref().unwrap() {
        assert_eq!(labels.get(name), Some(value));
    }
    let pod = spec.template.spec.as_ref().unwrap();
    check_pod(pod);
    // The taint of kubespray and of most guides, with any value.
    let tolerations = pod.tolerations.as_ref().unwrap();
    assert!(tolerations.iter().any(|toleration| {
        toleration.key.as_deref() == Some("nvidia.com/gpu")
            && toleration.operator.as_deref() == Some("Exists")
    }));
    // The command lines fit this version.
    for container in &pod.containers {
        let arguments = container
            .args
            .clone()
            .unwrap_or_else(|| vec!["run".to_owned()]);
        Cli::try_parse_from(std::iter::once(container.name.clone()).chain(arguments)).unwrap();
    }
}

/// The classes are ours, and so is the driver of configurations.
fn check_claim(claim: &DeviceClaim) {
    let classes = render(&top().join("claims"));
    for request in claim.requests.iter().flatten() {
        let class = &request.exactly.as_ref().unwrap().device_class_name;
        assert!(
            classes
                .iter()
                .any(|object| object["metadata"]["name"] == **class),
            "{class}"
        );
    }
    let driver = Plugin::default().driver_name;
    for config in claim.config.iter().flatten() {
        assert_eq!(config.opaque.as_ref().unwrap().driver, driver);
        let config = DeviceAllocationConfiguration {
            opaque: config.opaque.clone(),
            source: "FromClaim".to_owned(),
            ..DeviceAllocationConfiguration::default()
        };
        kubelet_plugin::dra::config::check(&driver, "gpu", &[config]).unwrap();
    }
}

fn check_pod(pod: &PodSpec) {
    let claims: Vec<&str> = pod
        .resource_claims
        .iter()
        .flatten()
        .map(|claim| claim.name.as_str())
        .collect();
    for container in &pod.containers {
        let named = container
            .resources
            .iter()
            .flat_map(|resources| resources.claims.iter().flatten());
        named.for_each(|claim| {
            assert!(
                claims.contains(&claim.name.as_str()),
                "{} has no claim",
                container.name
            )
        });
    }
    let volumes: Vec<&str> = pod
        .volumes
        .iter()
        .flatten()
        .map(|volume| volume.name.as_str())
        .collect();
    for container in &pod.containers {
        for mount in container.volume_mounts.iter().flatten() {
            assert!(
                volumes.contains(&mount.name.as_str()),
                "{} has no volume {}",
                container.name,
                mount.name
            );
        }
    }
}

/// Returns the text literals of a CEL expression.
fn literals(expression: &str) -> BTreeSet<&str> {
    expression.split('\'').skip(1).step_by(2).collect()
}

/// The policy rejects each variable with which the request parser takes a request.
#[test]
fn the_policy_names_every_variable_that_requests() {
    let policy = &documents(&top().join("policy/no-gpu-by-variable.yaml"))[0]["spec"];
    let variable = |name: &str| {
        let variable = list(policy, "variables")
            .iter()
            .find(|variable| variable["name"] == name)
            .unwrap();
        literals(variable["expression"].as_str().unwrap())
    };
    let requesting = Variable::ALL
        .into_iter()
        .filter(|variable| variable.requests())
        .map(Variable::name);
    assert_eq!(variable("names"), requesting.collect());
    assert_eq!(variable("prefix"), [SWARM_RESOURCE_PREFIX].into());
    assert_eq!(variable("filled"), [Variable::RequireCuda.name()].into());
    // All containers are judged by the same rule.
    let rules = list(policy, "validations")
        .iter()
        .map(|rule| rule["expression"].as_str().unwrap());
    let rules: BTreeSet<_> = rules
        .map(|rule| rule.split_once(".all(").unwrap().1)
        .collect();
    assert_eq!(rules.len(), 1, "{rules:?}");
    let rule = rules.first().unwrap();
    for part in [
        "!(e.name in variables.names)",
        "!e.name.startsWith(variables.prefix)",
        "!(e.name in variables.filled)",
    ] {
        assert!(rule.contains(part), "{rule}");
    }
}

/// Only the layout without a hook needs privileges: the engine adds no device for its container.
#[test]
fn privileged_containers() {
    for dir in kustomizations() {
        for object in render(&dir)
            .iter()
            .filter(|object| object["kind"] == "DaemonSet")
        {
            let set: DaemonSet = typed(object);
            for container in set.spec.unwrap().template.spec.unwrap().containers {
                let security = container.security_context.unwrap();
                let is_gke = dir.ends_with("overlays/gke-layout");
                assert_eq!(security.privileged.unwrap_or_default(), is_gke, "{dir:?}");
                let drops = security
                    .capabilities
                    .and_then(|caps| caps.drop)
                    .unwrap_or_default();
                assert!(
                    is_gke
                        || drops == ["ALL"] && security.allow_privilege_escalation == Some(false),
                    "{dir:?}"
                );
            }
        }
    }
}

#[test]
fn the_settings_of_locked_nodes() {
    let dir = tempfile::tempdir().unwrap();
    let drop_in = dir.path().join("config.toml.d");
    std::fs::create_dir(&drop_in).unwrap();
    std::fs::copy(
        top().join("overlays/locked/50-locked.toml"),
        drop_in.join("50-locked.toml"),
    )
    .unwrap();
    std::fs::write(dir.path().join("config.toml"), "").unwrap();
    let (config, findings) =
        nvidia_host::config::read(Some(&dir.path().join("config.toml"))).unwrap();
    assert!(findings.is_empty(), "{findings:?}");
    assert!(!config.accept_envvar_when_unprivileged && config.accept_volume_mounts);
}

/// The commands of docs/kubernetes.md name units, manifests and pods that exist, and have options of this version. The test
/// `docs::command_lines_are_understood` checks the hook's commands.
#[test]
fn commands_of_the_page() {
    let page = std::fs::read_to_string(top().join("../../docs/kubernetes.md")).unwrap();
    let blocks = page
        .split("\n```sh\n")
        .skip(1)
        .map(|rest| rest.split("\n```").next().unwrap());
    let lines = blocks
        .flat_map(str::lines)
        .map(|line| line.split(" #").next().unwrap().trim());
    let samples = render(&top().join("samples"));
    let is_sample = |pod: &str| {
        samples
            .iter()
            .any(|object| object["kind"] == "Pod" && object["metadata"]["name"] == pod)
    };
    let mut seen = 0;
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        match *words {
            ["kubectl", "apply" | "delete", "-k", dir] => {
                drop(render(&top().join("../..").join(dir)))
            }
            ["kubectl", "logs", pod] => {
                assert!(is_sample(pod.strip_prefix("pod/").unwrap()), "{line}")
            }
            ["kubectl", "describe", "pod", pod] => assert!(is_sample(pod), "{line}"),
            ["kubectl", "describe", "node", "NODE", ..] => {}
            ["oci-nvidia-kubelet-plugin", ..] => drop(Cli::try_parse_from(&words).unwrap()),
            ["oci-nvidia-hook", ..] => {}
            ["journalctl", "-t", "oci-nvidia-hook"] => {}
            ["podman", "push", image, _] => {
                let manifest = top().join("base/daemon-set.yaml");
                let manifest = std::fs::read_to_string(manifest).unwrap();
                assert!(manifest.contains(image), "{line}");
            }
            ["systemctl", "enable", "--now", unit] => {
                let file = top().join(format!("../../packaging/systemd/{unit}.service"));
                assert!(file.is_file(), "{line}");
            }
            ["zypper", "install", "--allow-unsigned-rpm", ref files @ ..] => {
                let spec = std::fs::read_to_string(top().join("../../packaging/rpm.spec")).unwrap();
                let is_built = |name: &str| {
                    spec.lines()
                        .any(|line| line.split_whitespace().last() == Some(name))
                };
                let name = |file: &&str| {
                    file.strip_prefix("./")?
                        .strip_suffix("-[0-9]*.rpm")
                        .map(str::to_owned)
                };
                assert!(
                    files
                        .iter()
                        .all(|file| name(file).is_some_and(|name| is_built(&name))),
                    "{line}"
                );
            }
            _ => panic!("{line}"),
        }
        seen += 1;
    }
    assert!(seen >= 10, "{seen} commands");
}
