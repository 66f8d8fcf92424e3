//! Each picture of the documentation was rendered again after its source had changed.

use std::process::Command;

use serde_json::Value;

use crate::docs::texts;
use crate::support::{Need, run, source};

tests! {
    &[] => pictures_show_their_sources, the_dashboard_is_the_one_that_is_shipped;
    &[Need::Program("python3")] => the_dashboard_is_rendered_from_its_data;
}

/// The text of an SVG file, without spaces.
fn text_of_svg(svg: &str) -> String {
    let texts = svg.split("<text").skip(1).map(|rest| {
        rest.split_once('>')
            .unwrap()
            .1
            .split("</text>")
            .next()
            .unwrap()
    });
    let whole: String = texts.collect();
    let plain = whole
        .replace("&#160;", " ")
        .replace("&#45;", "-")
        .replace("&#39;", "'")
        .replace("&quot;", "\"");
    plain
        .replace("&#x27;", "'")
        .replace("&gt;", ">")
        .split_whitespace()
        .collect()
}

/// Each picture was rendered again after its source changed.
fn pictures_show_their_sources() {
    let squeeze = |text: &str| text.split_whitespace().collect::<String>();
    let mut seen = 0;
    for (path, text) in texts(&source("docs/pictures"), "dot")
        .into_iter()
        .chain(texts(&source("docs/pictures"), "txt"))
    {
        let svg = text_of_svg(&std::fs::read_to_string(path.with_extension("svg")).unwrap());
        let labels: Vec<String> = if path.extension().is_some_and(|kind| kind == "txt") {
            text.lines().map(squeeze).collect()
        } else {
            let labels = text
                .split("label=\"")
                .skip(1)
                .map(|rest| rest.split('"').next().unwrap());
            labels
                .flat_map(|label| label.split("\\n"))
                .map(squeeze)
                .collect()
        };
        for label in labels {
            assert!(
                svg.contains(&label),
                "{}: {label:?} is missing; run docs/pictures/make-pictures",
                path.display()
            );
            seen += 1;
        }
    }
    assert!(seen > 60, "{seen}");
}

/// A panel as `docs/pictures/record-dashboard` has recorded it.
#[derive(Debug, Default, PartialEq)]
struct Panel {
    title: String,
    unit: String,
    queries: Vec<String>,
    /// The number of values of each series
    values: Vec<usize>,
}

fn recorded() -> Vec<Panel> {
    let text = std::fs::read_to_string(source("docs/pictures/dashboard.series")).unwrap();
    let mut panels: Vec<Panel> = Vec::new();
    for line in text.lines() {
        let (kind, rest) = line.split_once(' ').unwrap();
        if kind == "panel" {
            panels.push(Panel::default());
        }
        let Some(panel) = panels.last_mut() else {
            continue;
        };
        match kind {
            "panel" => rest.clone_into(&mut panel.title),
            "unit" => rest.clone_into(&mut panel.unit),
            "query" => panel.queries.push(rest.to_owned()),
            "series" => {
                let values = rest.rsplit_once(": ").unwrap().1.split(' ');
                panel
                    .values
                    .push(values.filter(|value| *value != "-").count());
            }
            _ => panic!("{line}"),
        }
    }
    panels
}

/// The picture has the panels and the queries of dashboard.json, with data in each.
fn the_dashboard_is_the_one_that_is_shipped() {
    let path = source("deploy/kubernetes/monitoring/dashboard.json");
    let dashboard: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let shipped = dashboard["panels"].as_array().unwrap();
    let recorded = recorded();
    assert_eq!(recorded.len(), shipped.len());
    for (panel, shipped) in recorded.iter().zip(shipped) {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        assert_eq!(panel.title, text(&shipped["title"]));
        assert_eq!(
            panel.unit,
            text(&shipped["fieldConfig"]["defaults"]["unit"])
        );
        let queries: Vec<String> = shipped["targets"]
            .as_array()
            .unwrap()
            .iter()
            .map(|target| text(&target["expr"]))
            .collect();
        assert_eq!(
            panel.queries, queries,
            "{}: run docs/pictures/record-dashboard",
            panel.title
        );
        assert!(
            panel.values.iter().any(|count| *count >= 10),
            "{}: {:?}",
            panel.title,
            panel.values
        );
    }
}

fn the_dashboard_is_rendered_from_its_data() {
    let rendered = run(&mut Command::new(source("docs/pictures/render-dashboard"))).ok();
    let committed = std::fs::read_to_string(source("docs/pictures/dashboard.svg")).unwrap();
    assert!(
        rendered == committed,
        "run docs/pictures/render-dashboard >docs/pictures/dashboard.svg"
    );
}
