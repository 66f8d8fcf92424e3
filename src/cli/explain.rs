//! `explain`: prints the catalog entry of a finding, or the list of all findings.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use base::json;
use base::report::{Kind, Severity, Texts, failure, without_markdown};
use findings::catalog;

use super::terminal::{Line, Terminal, Tone, cell, table};
use super::usage::usage_error;
use super::{args, output};

/// Prints the finding with the given number, or all findings.
pub(crate) fn run(options: &args::Explain, terminal: Terminal) -> Result<ExitCode> {
    let Some(number) = options.number.as_deref() else {
        return list(options.json, terminal);
    };
    let Some(kind) = catalog::find(number) else {
        return Ok(usage_error(&unknown(number)));
    };
    Ok(output::print(&if options.json {
        document(&[kind])?
    } else {
        terminal.render(&page(kind))
    }))
}

fn list(is_json: bool, terminal: Terminal) -> Result<ExitCode> {
    if is_json {
        return Ok(output::print(&document(catalog::ALL)?));
    }
    let row = |kind: &&Kind| {
        let severity = kind.severity.name();
        [
            cell(kind.id()),
            (Tone::of_severity(severity), severity.to_owned()),
            cell(without_markdown(kind.texts().title)),
        ]
    };
    Ok(output::print(
        &terminal.render(&table(catalog::ALL.iter().map(row).collect())),
    ))
}

/// Returns the JSON document, whose schema is `docs/schemas/explain.json`.
fn document(kinds: &[&'static Kind]) -> Result<String> {
    #[derive(Serialize)]
    struct Entry {
        id: &'static str,
        severity: Severity,
        #[serde(flatten)]
        texts: Texts,
    }
    let entry = |kind: &&'static Kind| Entry {
        id: kind.id(),
        severity: kind.severity,
        texts: kind.texts(),
    };
    let entries: Vec<Entry> = kinds.iter().map(entry).collect();
    Ok(json::document("findings", &entries)?)
}

fn unknown(number: &str) -> anyhow::Error {
    let all = "\"oci-nvidia-hook explain --list\" prints all numbers";
    let hint = match catalog::number_of(number).and_then(catalog::neighbor) {
        Some(near) => format!("did you mean {}? {all}", near.id()),
        None => all.to_owned(),
    };
    failure(
        &catalog::COMMAND_LINE,
        format!("unknown number {number:?}"),
        hint,
    )
}

/// Returns the path of a page of the documentation where a package has installed it, with its anchor. For another reference, or
/// without a package, it returns the reference itself.
fn installed(reference: &str) -> String {
    let (page, _) = reference.split_once('#').unwrap_or((reference, ""));
    let dirs = [
        "/usr/share/doc/packages/oci-nvidia-hook",
        "/usr/share/doc/oci-nvidia-hook",
    ];
    let dir = dirs
        .iter()
        .map(|dir| Path::new(dir).join("docs"))
        .find(|dir| dir.join(page).try_exists().unwrap_or_default());
    dir.map_or_else(
        || reference.to_owned(),
        |dir| dir.join(reference).display().to_string(),
    )
}

fn page(kind: &Kind) -> Vec<Line> {
    let Texts {
        title,
        why,
        fix,
        see,
    } = kind.texts();
    let head = Line::default()
        .then(Tone::Heading, kind.id())
        .then(Tone::Plain, format!(": {}", without_markdown(title)));
    let severity = kind.severity.name();
    let severity = (Tone::of_severity(severity), severity.to_owned());
    let mut rows = vec![[cell("severity:"), severity]];
    rows.extend(
        [("why:", why), ("fix:", fix)]
            .map(|(label, text)| [cell(label), cell(without_markdown(text))]),
    );
    rows.push([cell("see:"), cell(installed(&kind.entry()))]);
    if !see.is_empty() {
        rows.push([cell(""), cell(installed(see))]);
    }
    let mut lines = vec![head];
    lines.extend(table(rows));
    lines
}

#[cfg(test)]
mod tests {
    use base::report::Finding;

    use super::*;

    #[test]
    fn each_page_contains_the_whole_catalog_entry() {
        for kind in catalog::ALL {
            let text = Terminal::default().render(&page(kind));
            let texts = kind.texts();
            let (id, severity) = (kind.id(), kind.severity.name());
            for part in [id, texts.title, severity, texts.why, texts.fix, texts.see] {
                assert!(text.contains(&without_markdown(part)), "{text}");
            }
            assert!(
                text.contains(&kind.entry()) && !text.contains('`'),
                "{text}"
            );
            assert_eq!(
                text.lines().count(),
                if texts.see.is_empty() { 5 } else { 6 },
                "{text}"
            );
        }
    }

    #[test]
    fn unknown_numbers() {
        let all = "\"oci-nvidia-hook explain --list\" prints all numbers";
        let near = format!("did you mean ONH-038? {all}");
        for (number, hint) in [("39", near.as_str()), ("999", all), ("web", all), ("", all)] {
            let found = Finding::error(&unknown(number));
            assert_eq!(found.what, format!("unknown number {number:?}"));
            assert_eq!(found.fix, hint, "{number}");
        }
    }
}
