//! The dashboard, the alert rules and the documentation name metrics that the plugin exports.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    missing_docs,
    reason = "tests"
)]

use std::collections::BTreeSet;
use std::path::Path;

use kubelet_plugin::metrics::dcgm;
use kubelet_plugin::metrics::series::METRICS;
use kubelet_plugin::metrics::text::LATENCY;
use serde_json::Value;

fn read(path: &str) -> String {
    std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../..")
            .join(path),
    )
    .unwrap()
}

fn exported() -> BTreeSet<String> {
    let names = METRICS
        .into_iter()
        .chain(dcgm::metrics())
        .map(|metric| metric.name.to_owned());
    let histogram = ["bucket", "sum", "count"].map(|suffix| format!("{LATENCY}_{suffix}"));
    names.chain(histogram).collect()
}

/// Removes the text between these characters, which do not nest.
fn without(text: &str, open: char, close: char) -> String {
    let mut inside = false;
    let mut keep = |c: char| {
        let was_inside = inside;
        inside = if was_inside { c != close } else { c == open };
        !was_inside && !inside
    };
    text.chars().filter(|c| keep(*c)).collect()
}

/// Returns the metrics that an expression of PromQL names: words that are neither functions, keywords nor labels.
fn metrics(expression: &str) -> Vec<String> {
    let text = without(&without(&without(expression, '"', '"'), '{', '}'), '[', ']');
    let mut found = Vec::new();
    let mut rest = text.as_str();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    while let Some(start) = rest.find(is_word) {
        let tail = &rest[start..];
        let end = tail.find(|c| !is_word(c)).unwrap_or(tail.len());
        let (word, after) = tail.split_at(end);
        rest = after;
        match word {
            "by" | "on" | "without" | "ignoring" | "group_left" | "group_right" => {
                rest = after.split_once(')').unwrap().1;
            }
            "and" | "or" | "unless" | "bool" => {}
            // A time follows.
            "offset" => rest = after.trim_start().trim_start_matches(is_word),
            _ if ["(", "by (", "without ("]
                .iter()
                .any(|next| after.trim_start().starts_with(next)) => {}
            _ if word.starts_with(|c: char| c.is_ascii_digit()) => {}
            _ => found.push(word.to_owned()),
        }
    }
    found
}

#[test]
fn expressions() {
    let expression = "sum by (a, b) (rate(x_total{c=~\"y|z\"}[$__rate_interval])) / on (a) group_left () z > 0.5 and w";
    assert_eq!(metrics(expression), ["x_total", "z", "w"]);
}

#[test]
fn alert_rules_name_exported_metrics() {
    let rules = cdi_spec::yaml::parse(&read("deploy/kubernetes/monitoring/alerts.yaml")).unwrap();
    let rules = rules["groups"][0]["rules"].as_array().unwrap();
    assert!(rules.len() >= 5, "{rules:?}");
    for rule in rules {
        let found = metrics(rule["expr"].as_str().unwrap());
        // Prometheus adds "up" for each target.
        let found: Vec<&String> = found.iter().filter(|name| *name != "up").collect();
        assert!(
            !found.is_empty() && found.iter().all(|name| exported().contains(*name)),
            "{found:?}"
        );
        let is_text = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
        assert!(
            is_text(&rule["alert"]) && is_text(&rule["annotations"]["summary"]),
            "{rule}"
        );
        assert!(is_text(&rule["labels"]["severity"]), "{rule}");
    }
}

#[test]
fn the_dashboard_shows_exported_metrics() {
    let dashboard: Value =
        serde_json::from_str(&read("deploy/kubernetes/monitoring/dashboard.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().unwrap());
    let mut found: Vec<String> = targets
        .flat_map(|target| metrics(target["expr"].as_str().unwrap()))
        .collect();
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        let query = variable["query"].as_str().unwrap();
        let metric = query
            .strip_prefix("label_values(")
            .and_then(|rest| rest.split(',').next());
        found.extend(metric.map(str::to_owned));
    }
    assert!(found.len() >= 12, "{found:?}");
    assert!(
        found.iter().all(|name| exported().contains(name)),
        "{found:?}"
    );
    let ids: BTreeSet<_> = panels
        .iter()
        .map(|panel| panel["id"].as_u64().unwrap())
        .collect();
    assert_eq!(ids.len(), panels.len());
}

#[test]
fn the_documentation_lists_all_metrics() {
    let page = read("deploy/kubernetes/monitoring/README.md");
    for name in exported()
        .iter()
        .filter(|name| !name.starts_with(LATENCY))
        .chain([&LATENCY.to_owned()])
    {
        assert!(page.contains(&format!("`{name}`")), "{name}");
    }
}
