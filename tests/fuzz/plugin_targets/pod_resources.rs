//! The kubelet's answer about pods and their devices.

use std::time::Instant;

use kubelet_plugin::kubelet::pods::select;
use kubelet_plugin::metrics::series::MetricSources;
use kubelet_plugin::monitor::message::Snapshot;
use kubelet_plugin::monitor::update::Update;
use kubelet_plugin::node::Node;
use kubelet_plugin::proto::podresources::ListPodResourcesResponse;
use kubelet_plugin::settings::Settings;
use prost::Message;

use super::check_metrics;
use super::shared::sample_inventory;

/// Shows the containers in metrics. Their number and the length of their names are limited.
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
    let found = select(answer, &["nvidia.com/gpu".to_owned()]);
    assert!(
        found.listed.len() <= 1000,
        "{} containers",
        found.listed.len()
    );
    let mut devices = 0;
    for container in &found.listed {
        for name in [&container.namespace, &container.pod, &container.name] {
            assert!(!name.is_empty() && name.len() <= 253, "{name:?}");
            assert!(
                !name.contains(|c: char| c.is_control() || c == '"'),
                "{name:?}"
            );
        }
        let ids = container.devices.values().chain(container.claims.values());
        devices += ids.map(Vec::len).sum::<usize>();
    }
    assert!(devices <= 4000, "{devices} devices");
    check_metrics(MetricSources {
        offer: node.offer(),
        containers: found.listed,
        omitted_containers: Some(found.omitted),
        ..MetricSources::default()
    });
}
