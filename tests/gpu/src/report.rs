//! The report, as JSON and as Markdown.

use serde_json::Value;

/// Formats a report as Markdown.
pub fn markdown(report: &Value) -> String {
    let text = |value: &Value| {
        value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned)
    };
    let mut out = format!("# Checks on a GPU, {}\n\n", text(&report["date"]));
    out += &format!(
        "oci-nvidia-hook {}, `make gpu`\n\n",
        text(&report["version"])
    );
    out += "| | |\n|---|---|\n";
    let machine = &report["machine"];
    for (name, value) in machine
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(name, _)| *name != "driver")
    {
        out += &row(&[&name.replace('_', " "), &text(value)]);
    }
    let driver = &machine["driver"];
    if driver.is_object() {
        let version = format!(
            "{}, CUDA {}, {}",
            text(&driver["version"]),
            text(&driver["cuda"]),
            text(&driver["place"])
        );
        out += &row(&["driver", &version]);
        for gpu in driver["gpus"].as_array().into_iter().flatten() {
            let mig = if gpu["mig"] == true { ", MIG mode" } else { "" };
            let capability = text(&gpu["compute_capability"]);
            out += &row(&[
                "GPU",
                &format!(
                    "{}, compute capability {capability}{mig}",
                    text(&gpu["model"])
                ),
            ]);
        }
    }
    let checks = report["checks"].as_array().cloned().unwrap_or_default();
    let count = |verdict: &str| {
        checks
            .iter()
            .filter(|check| check["verdict"] == verdict)
            .count()
    };
    out += &format!(
        "\n{} passed, {} failed, {} cannot run here.\n\n| check | verdict | seen | s |\n|---|---|---|---|\n",
        count("passed"),
        count("failed"),
        count("cannot run")
    );
    for check in &checks {
        let name = format!("{}: {}", text(&check["check"]), text(&check["about"]));
        let verdict = match text(&check["verdict"]).as_str() {
            "failed" => "**failed**".to_owned(),
            verdict => verdict.to_owned(),
        };
        out += &row(&[
            &name,
            &verdict,
            &text(&check["seen"]),
            &text(&check["seconds"]),
        ]);
    }
    out
}

fn row(cells: &[&str]) -> String {
    let clean = |cell: &&str| {
        cell.replace('|', "\\|")
            .replace(['\n', '\r'], " ")
            .replace('<', "&lt;")
    };
    format!(
        "| {} |\n",
        cells.iter().map(clean).collect::<Vec<_>>().join(" | ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_as_markdown() {
        let report = serde_json::json!({
            "date": "2026-01-02", "version": "1", "machine": {"kernel": "6.1", "driver": {
                "version": "535", "cuda": "12.2", "place": "driver root /",
                "gpus": [{"model": "H100", "mig": false, "compute_capability": "9.0"}]}},
            "checks": [
                {"check": "info", "about": "a", "verdict": "passed", "seen": "x|y\nz", "seconds": 0.5},
                {"check": "smi", "about": "b", "verdict": "failed", "seen": "no", "seconds": 1},
            ],
        });
        let text = markdown(&report);
        assert!(
            text.contains(
                "| driver | 535, CUDA 12.2, driver root / |\n| GPU | H100, compute capability 9.0 |"
            ),
            "{text}"
        );
        assert!(
            text.contains("1 passed, 1 failed, 0 cannot run here.") && text.contains("x\\|y z"),
            "{text}"
        );
        assert!(text.contains("| smi: b | **failed** | no | 1 |"), "{text}");
    }
}
