//! The pictures of the documentation show their sources.

use std::process::Command;

use serde_json::Value;

use crate::docs::texts;
use crate::support::{Need, read, run, source};

tests! {
    &[] => pictures_show_their_sources, the_dashboard_has_the_shipped_queries;
    &[Need::Program("python3")] => the_dashboard_is_rendered_from_its_data;
}

/// Returns the text of an SVG file, without spaces and XML's entities.
fn text_of_svg(svg: &str) -> String {
    let mut text = String::new();
    for part in svg.split("<text").skip(1) {
        let (_, rest) = part.split_once('>').unwrap();
        text += rest.split("</text>").next().unwrap();
    }
    for (entity, letter) in [
        ("&#160;", ""),
        ("&#45;", "-"),
        ("&#39;", "'"),
        ("&#x27;", "'"),
        ("&quot;", "\""),
        ("&gt;", ">"),
    ] {
        text = text.replace(entity, letter);
    }
    text.split_whitespace().collect()
}

/// Each picture was rendered again after a label in its source changed.
fn pictures_show_their_sources() {
    let dir = source("docs/pictures");
    let mut labels = texts(&dir, "txt");
    for (path, text) in texts(&dir, "dot") {
        for label in text.split("label=\"").skip(1) {
            let label = label.split('"').next().unwrap();
            labels.push((path.clone(), label.replace("\\n", "\n")));
        }
    }
    assert!(labels.len() > 30, "{}", labels.len());
    for (path, text) in labels {
        let svg = read(path.with_extension("svg"));
        let svg = text_of_svg(&svg);
        for line in text.lines() {
            let line: String = line.split_whitespace().collect();
            assert!(svg.contains(&line), "{path:?}: run make-pictures: {line:?}");
        }
    }
}

/// The recorded data has the panels, units and queries of dashboard.json.
fn the_dashboard_has_the_shipped_queries() {
    let dashboard: Value =
        serde_json::from_str(&read(source("deploy/kubernetes/monitoring/dashboard.json"))).unwrap();
    let mut expected = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        expected.push(format!("panel {}", panel["title"].as_str().unwrap()));
        let unit = &panel["fieldConfig"]["defaults"]["unit"];
        expected.push(format!("unit {}", unit.as_str().unwrap()));
        for target in panel["targets"].as_array().unwrap() {
            expected.push(format!("query {}", target["expr"].as_str().unwrap()));
        }
    }
    let recorded = read(source("docs/pictures/dashboard.series"));
    let is_data = |line: &&str| !line.starts_with("series ") && !line.starts_with("step ");
    let found: Vec<_> = recorded.lines().filter(is_data).collect();
    assert_eq!(found, expected, "run docs/pictures/record-dashboard");
}

fn the_dashboard_is_rendered_from_its_data() {
    let rendered = run(&mut Command::new(source("docs/pictures/render-dashboard"))).ok();
    let committed = read(source("docs/pictures/dashboard.svg"));
    assert!(
        rendered == committed,
        "run docs/pictures/render-dashboard >docs/pictures/dashboard.svg"
    );
}
