//! The configuration file of NVIDIA's device plugin.

use std::path::Path;

use kubelet_plugin::settings::{Settings, nvidia_file};

use super::shared::{check_error, check_findings, text};

/// Applies the file to the default settings. What is accepted is within the limits.
pub fn run(data: &[u8]) {
    let text = text(data);
    let mut settings = Settings::default();
    match nvidia_file::apply(&mut settings, Path::new("/config.yaml"), &text) {
        Ok(findings) => {
            check_findings(&findings);
            assert!(settings.plugin.replicas >= 1);
            for row in &settings.plugin.shared_resources {
                assert!(row.replicas >= 1 && row.name.contains('/'), "{row:?}");
            }
        }
        Err(error) => check_error(&error),
    }
}
