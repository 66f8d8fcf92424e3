//! The file with the errors of GPUs that an earlier process left.

use std::time::{Duration, Instant, SystemTime};

use kubelet_plugin::node::Node;
use kubelet_plugin::node::errors::parse;
use kubelet_plugin::settings::Settings;

/// The driver of the seeds.
const DRIVER: &str = "boot 1";

/// Restores the errors. None of them is in the future, so that a GPU can recover.
pub fn run(data: &[u8]) {
    let now = Instant::now() + Duration::from_secs(1000);
    let errors = parse(data, DRIVER, (now, SystemTime::now()));
    for error in errors.values() {
        assert!(error.since <= now && error.last <= now, "{error:?}");
    }
    assert!(parse(data, "another boot", (now, SystemTime::now())).is_empty() || !errors.is_empty());
    let mut node = Node::new(Settings::default(), Vec::new(), now);
    node.restore(errors, now);
    node.tick(now + Duration::from_secs(7 * 24 * 3600));
    let _ = (node.next_tick(), node.errors(), node.health(), node.offer());
}
