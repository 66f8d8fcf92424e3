//! GKE's gpu_config.json.

use std::path::Path;

use kubelet_plugin::settings::{Settings, gke};

use super::shared::{check_error, check_findings, text};

/// Applies the file to the default settings. What is accepted is within the limits.
pub fn run(data: &[u8]) {
    let text = text(data);
    let mut settings = Settings::default();
    match gke::apply(&mut settings.plugin, Path::new("/gpu_config.json"), &text) {
        Ok(findings) => {
            check_findings(&findings);
            assert!(settings.plugin.replicas >= 1);
        }
        Err(error) => check_error(&error),
    }
}
