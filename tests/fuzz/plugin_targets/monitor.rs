//! The lines of the monitor, which loads the driver's library.

use std::time::Instant;

use kubelet_plugin::metrics::readings::Readings;
use kubelet_plugin::metrics::series::MetricSources;
use kubelet_plugin::monitor::message::{End, Message};
use kubelet_plugin::monitor::update::Update;
use kubelet_plugin::node::Node;
use kubelet_plugin::settings::Settings;

use super::check_metrics;

/// Follows the lines, and offers and shows what they report.
pub fn run(data: &[u8]) {
    let now = Instant::now();
    let mut node = Node::new(Settings::default(), Vec::new(), now);
    let mut readings = Readings::default();
    for line in data.split(|byte| *byte == b'\n').take(32) {
        let update = match base::json::from_bytes(line) {
            Ok(Message::Snapshot(snapshot)) => Update::Snapshot(snapshot),
            Ok(Message::Sample(sample)) => Update::Sample(sample),
            Ok(Message::Event(event)) => Update::Event(event),
            Ok(Message::End(End::Unusable(why))) => Update::Absent(why),
            Ok(Message::Polled { .. } | Message::End(End::Changed) | Message::Refused(_))
            | Err(_) => {
                continue;
            }
        };
        node.apply(&update, now);
        readings.apply(&update, now);
    }
    readings.health = node.health();
    let offer = node.offer();
    for device in offer.devices() {
        let is_known = |gpu: &kubelet_plugin::node::gpus::NodeGpu| gpu.gpu.uuid == device.gpu;
        assert!(offer.gpus.iter().any(is_known), "{device:?}");
    }
    check_metrics(MetricSources {
        offer,
        readings,
        ..MetricSources::default()
    });
}
