//! The kubelet's answer about pods and their devices.

use std::time::Instant;

use kubelet_plugin::kubelet::pods::containers;
use kubelet_plugin::metrics::series::MetricSources;
use kubelet_plugin::monitor::message::Snapshot;
use kubelet_plugin::monitor::update::Update;
use kubelet_plugin::node::Node;
use kubelet_plugin::proto::podresources::ListPodResourcesResponse;
use kubelet_plugin::settings::Settings;
use prost::Message;

use super::check_metrics;
use super::shared::sample_inventory;

/// Shows the containers in metrics.
pub fn run(data: &[u8]) {
    let Ok(answer) = ListPodResourcesResponse::decode(data) else {
        return;
    };
    let now = Instant::now();
    let mut node = Node::new(Settings::default(), Vec::new(), now);
    let snapshot = Snapshot {
        inventory: sample_inventory(),
        ..Snapshot::default()
    };
    node.apply(&Update::Snapshot(Box::new(snapshot)), now);
    check_metrics(MetricSources {
        offer: node.offer(),
        containers: containers(answer, &["nvidia.com/gpu".to_owned()]),
        ..MetricSources::default()
    });
}
