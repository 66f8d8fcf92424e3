//! Asks the API server once what is published, and what the credentials permit. Nothing is written.

use std::path::PathBuf;

use anyhow::Result;
use k8s_openapi::api::resource::v1::{ResourceSlice, ResourceSliceSpec};
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde::Serialize;

use super::DriverOptions;
use super::access::{Access, describe, describe_slices, in_time};
use super::plan::{Action, plan};
use super::publisher::fields;

/// What the API server answered.
#[derive(Debug, Default, Serialize)]
pub struct Probe {
    /// The file with the credentials; missing in a pod with a ServiceAccount
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// The name of the node, if it is known
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// What the credentials have to permit
    pub rights: Vec<Right>,
    /// Why the API server lists no slices, if it has refused to
    #[serde(skip)]
    pub refused: Option<String>,
    /// What is published, if it could be read
    #[serde(skip_serializing_if = "Option::is_none")]
    pub published: Option<Published>,
}

/// A request that the driver makes.
#[derive(Debug, Serialize)]
pub struct Right {
    /// The request
    pub what: &'static str,
    /// Why it fails; missing if it succeeds
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The slices on the API server.
#[derive(Debug, Serialize)]
pub struct Published {
    /// The number of devices
    pub devices: usize,
    /// The generation
    pub generation: i64,
    /// Whether the driver would write equal ones
    pub current: bool,
}

impl Published {
    fn of(slices: &[ResourceSlice], current: bool) -> Self {
        let mut published = Self {
            devices: 0,
            generation: 0,
            current,
        };
        for ResourceSlice { spec, .. } in slices {
            published.devices += spec.devices.iter().flatten().count();
            published.generation = published.generation.max(spec.pool.generation);
        }
        published
    }
}

/// Asks the API server. `specs` describes the devices for a node of this name, on an API server that stores that several claims can have a
/// device, or does not.
pub async fn probe(
    options: &DriverOptions,
    specs: impl Fn(&str, bool) -> Vec<ResourceSliceSpec>,
) -> Probe {
    let access = Access::new(options.kubeconfig.as_deref(), &options.kubelet_dir);
    let mut probe = Probe::default();
    match access.kubeconfig() {
        Ok(file) => probe.kubeconfig = file,
        Err(error) => {
            probe.note("find the credentials", Err::<(), _>(error));
            return probe;
        }
    }
    let node = match &options.node {
        Some(node) => Ok(node.clone()),
        None => access.node_name().await,
    };
    let Some(node) = probe.note("learn the name of the node", node) else {
        return probe;
    };
    probe.node = Some(node.clone());
    let reference = described(access.node_reference(&node).await);
    let reference = probe.note("read the node", reference);
    let slices = match access.client().await {
        Ok(client) => Api::<ResourceSlice>::all(client),
        Err(error) => {
            probe.note("list the slices of the node", Err::<(), _>(error));
            return probe;
        }
    };
    let params = ListParams::default().fields(&fields(&node, &options.driver));
    let listed = match in_time(slices.list(&params)).await {
        Ok(Err(error)) => {
            let error = describe_slices(&error);
            probe.refused = Some(format!("cannot list the slices of the node: {error:#}"));
            Err(error)
        }
        answer => described(answer),
    };
    let Some(listed) = probe.note("list the slices of the node", listed) else {
        return probe;
    };
    let desired = specs(&node, true);
    let mut actions = plan(&listed.items, &desired, reference.as_ref());
    let without_shares = plan(&listed.items, &specs(&node, false), reference.as_ref());
    if without_shares.is_empty() {
        actions = without_shares;
    }
    probe.published = Some(Published::of(&listed.items, actions.is_empty()));
    let others = plan(&[], &desired, reference.as_ref());
    if let Some(result) = dry_run(&slices, &actions, &listed.items, !others.is_empty()).await {
        probe.note("write slices", result);
    }
    probe
}

/// Merges the errors of a request.
fn described<T>(answer: Result<Result<T, kube::Error>>) -> Result<T> {
    answer?.map_err(|error| describe(&error))
}

impl Probe {
    fn note<T>(&mut self, what: &'static str, result: Result<T>) -> Option<T> {
        let (found, error) = match result {
            Ok(found) => (Some(found), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        self.rights.push(Right { what, error });
        found
    }
}

/// Has the API server check a request that writes, without storing anything; `None` if there is nothing to write.
async fn dry_run(
    slices: &Api<ResourceSlice>,
    actions: &[Action],
    listed: &[ResourceSlice],
    has_devices: bool,
) -> Option<Result<()>> {
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let is_write = |action: &&Action| !matches!(action, Action::Delete(_));
    let slice = match (actions.iter().find(is_write), listed.first()) {
        (Some(Action::Create(slice)), _) => {
            let answer = described(in_time(slices.create(&params, slice)).await);
            return Some(answer.map(drop));
        }
        (Some(Action::Replace(slice)), _) => slice,
        // Slices that are current can be written, too.
        (_, Some(slice)) if has_devices => slice,
        _ => return None,
    };
    let answer = in_time(slices.replace(&slice.name_any(), &params, slice)).await;
    Some(described(answer).map(drop))
}
