//! Asks the API server once what is published, and what the credentials permit. Nothing is written.

use std::path::PathBuf;

use anyhow::Result;
use k8s_openapi::api::resource::v1::{ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde::Serialize;

use super::Options;
use super::access::{Access, describe, in_time};
use super::plan::{Action, plan};
use super::publisher::fields;

/// What the API server answered.
#[derive(Debug, Default, Serialize)]
pub struct Probe {
    /// The file with the credentials; missing for those of a pod
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// The name of the node, if it is known
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// What the credentials have to permit
    pub rights: Vec<Right>,
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
    /// Whether they are those that the driver would write
    pub current: bool,
}

/// Asks the API server. `specs` describes the devices for a node of this name.
pub async fn probe(options: &Options, specs: impl Fn(&str) -> Vec<ResourceSliceSpec>) -> Probe {
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
    let reference = access
        .node_reference(&node)
        .await
        .and_then(|answer| answer.map_err(|error| describe(&error)));
    let reference = probe.note("read the node", reference);
    let slices = match access.client().await {
        Ok(client) => Api::<ResourceSlice>::all(client),
        Err(error) => {
            probe.note("list the slices of the node", Err::<(), _>(error));
            return probe;
        }
    };
    let params = ListParams::default().fields(&fields(&node, &options.driver));
    let listed = in_time(slices.list(&params))
        .await
        .and_then(|answer| answer.map_err(|error| describe(&error)));
    let Some(listed) = probe.note("list the slices of the node", listed) else {
        return probe;
    };
    let desired = specs(&node);
    let actions = plan(&listed.items, &desired, reference.as_ref());
    let devices = listed
        .items
        .iter()
        .map(|slice| slice.spec.devices.as_ref().map_or(0, Vec::len))
        .sum();
    let generation = listed
        .items
        .iter()
        .map(|slice| slice.spec.pool.generation)
        .max()
        .unwrap_or_default();
    probe.published = Some(Published {
        devices,
        generation,
        current: actions.is_empty(),
    });
    if let Some(result) = dry_run(
        &slices,
        &actions,
        &listed.items,
        &desired,
        reference.as_ref(),
    )
    .await
    {
        probe.note("write slices", result);
    }
    probe
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
    desired: &[ResourceSliceSpec],
    node: Option<&OwnerReference>,
) -> Option<Result<()>> {
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let is_write = |action: &&Action| !matches!(action, Action::Delete(_));
    // Slices that are current can be written, too.
    let others = plan(&[], desired, node);
    let answer = match (
        actions.iter().find(is_write),
        listed.first(),
        others.first(),
    ) {
        (Some(Action::Create(slice)), ..) => in_time(slices.create(&params, slice)).await,
        (Some(Action::Replace(slice)), ..) => {
            in_time(slices.replace(&slice.name_any(), &params, slice)).await
        }
        (_, Some(slice), Some(_)) => {
            in_time(slices.replace(&slice.name_any(), &params, slice)).await
        }
        _ => return None,
    };
    Some(answer.and_then(|answer| answer.map(drop).map_err(|error| describe(&error))))
}
