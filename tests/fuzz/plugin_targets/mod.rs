//! The targets for what the kubelet plugin reads: `crates/kubelet-plugin/tests/fuzz_corpus.rs` runs them too. Each has the prefix `plugin_`
//! in `fuzz_targets` and in `corpus`.
//!
//! A kubeconfig has no target: the crate kube parses it.

pub mod claim;
pub mod errors_file;
pub mod gpu_config;
pub mod monitor;
pub mod nri_container;
pub mod nri_session;
pub mod pod_resources;
pub mod sharing_file;

#[path = "../shared.rs"]
mod shared;

use kubelet_plugin::metrics::dcgm;
use kubelet_plugin::metrics::series::{MetricSources, series};
use kubelet_plugin::metrics::text::{latency, text};
use kubelet_plugin::settings::values::MetricsNames;

/// Checks that Prometheus can parse the metrics.
#[track_caller]
pub fn check_metrics(mut sources: MetricSources) {
    sources.names = vec![MetricsNames::Gke, MetricsNames::DcgmPerContainer];
    let mut all = series(&sources);
    dcgm::extend(&sources, &mut all);
    let text = text(all, latency()).expect("memory does not fail");
    // str::lines would also remove a carriage return.
    for line in text.split_terminator('\n') {
        assert!(line.starts_with("# ") || is_series(line), "{line:?}");
    }
}

/// Whether a line is `NAME VALUE` or `NAME{LABEL="TEXT",...} VALUE`, in which three characters of a text are escaped.
fn is_series(line: &str) -> bool {
    let is_in_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let rest = line.trim_start_matches(is_in_name);
    let Some(labels) = rest.strip_prefix('{') else {
        return rest.len() < line.len() && is_value(rest);
    };
    let mut rest = labels;
    loop {
        let Some((name, after)) = rest.split_once("=\"") else {
            return false;
        };
        if name.is_empty() || !name.chars().all(is_in_name) {
            return false;
        }
        let Some(after) = after_text(after) else {
            return false;
        };
        match after.strip_prefix(',') {
            Some(next) => rest = next,
            None => return after.strip_prefix('}').is_some_and(is_value),
        }
    }
}

/// Returns what follows a text and its closing quote.
fn after_text(text: &str) -> Option<&str> {
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return text.get(at + 1..),
            '\\' if !matches!(chars.next(), Some((_, '\\' | '"' | 'n'))) => return None,
            _ => {}
        }
    }
    None
}

fn is_value(rest: &str) -> bool {
    rest.strip_prefix(' ')
        .is_some_and(|value| value.parse::<f64>().is_ok())
}
