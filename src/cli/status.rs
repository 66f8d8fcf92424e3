//! `status`: shows for each engine of this host how containers get GPUs: with the hook, CDI, the NRI plugin or the device plugin.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use base::paths::HostPath;
use base::report::one_line;
use base::tree::Tree;

use super::terminal::{Line, Terminal, Tone, cell, table};
use super::{args, output};
use crate::doctor::count;
use engines::User;
use engines::status::{self, EngineStatus, ExtraDevices, Replaced, Report};
use nvidia_host::config;
use nvidia_host::feature::{self, ENABLED, Feature};
use plugin_api::status::{NriStatus, PluginStatus};

/// Prints the status of each engine. Returns 0 if every installed engine starts the hook.
pub(super) fn run(
    options: args::Output,
    config: Option<&Path>,
    terminal: Terminal,
) -> Result<ExitCode> {
    let mut report = status::report(&Tree::open(&HostPath::new("/"))?, this_user());
    // An invalid config.toml has an error in "doctor", and does not matter to the engines.
    report.extra_devices = config::read(config)
        .map(|(config, _)| ExtraDevices::of_host(&config))
        .unwrap_or_default();
    let all_active = report
        .engines
        .iter()
        .all(|status| status.active || status.nri || !status.installed);
    let text = if options.json {
        report.document()?
    } else {
        text(&report, terminal)
    };
    let printed = output::print(&text);
    Ok(if all_active {
        printed
    } else {
        ExitCode::FAILURE
    })
}

/// Returns the calling user; `None` if it is root. The home directory is that of the user database, because the environment was
/// cleared.
pub fn this_user() -> Option<User> {
    let uid = nix::unistd::getuid();
    if uid.is_root() {
        return None;
    }
    let entry = nix::unistd::User::from_uid(uid).ok().flatten();
    let name = entry
        .as_ref()
        .map_or_else(|| uid.to_string(), |entry| entry.name.clone());
    Some(User {
        name,
        uid: uid.as_raw(),
        home: entry
            .map(|entry| entry.dir)
            .filter(|home| home != Path::new("/")),
    })
}

/// The columns: the engine, how its containers get GPUs, whether that works, and the file that decides it.
const HEADER: [&str; 4] = ["ENGINE", "GPUS WITH", "STATE", "FILE"];

/// A row of the table. A row for another file of the engine repeats no word.
struct Row {
    engine: String,
    way: &'static str,
    state: (Tone, String),
    file: String,
    /// What is remarkable, and a hint: lines below the row
    remarks: Vec<String>,
}

/// Returns the table, with remarks and hints below the rows to which they belong.
pub fn text(report: &Report, terminal: Terminal) -> String {
    let mut rows: Vec<_> = report.engines.iter().flat_map(engine_rows).collect();
    rows.extend(report.nri.iter().map(|nri| nri_row(nri, &report.engines)));
    rows.extend(report.kubelet_plugin.iter().map(plugin_row));
    let cells = rows.iter().map(|row| {
        let (tone, state) = &row.state;
        [
            cell(one_line(&row.engine)),
            cell(row.way),
            (*tone, state.clone()),
            cell(one_line(&row.file)),
        ]
    });
    let header = HEADER.map(|name| (Tone::Heading, name.to_owned()));
    let table = table(std::iter::once(header).chain(cells).collect());
    let mut lines = Vec::new();
    let remarks = std::iter::once(&Vec::new())
        .chain(rows.iter().map(|row| &row.remarks))
        .cloned()
        .collect::<Vec<_>>();
    for (line, remarks) in table.into_iter().zip(remarks) {
        lines.push(line);
        lines.extend(remarks.iter().map(|remark| remark_line(INDENT, remark)));
    }
    let more = report.extra_devices.iter().filter_map(extra_line);
    lines
        .extend(more.enumerate().flat_map(|(number, line)| {
            (number == 0).then(Line::default).into_iter().chain([line])
        }));
    terminal.render(&lines)
}

/// Returns the line about devices next to the GPUs.
fn extra_line(
    ExtraDevices {
        name,
        nodes,
        denied,
    }: &ExtraDevices,
) -> Option<Line> {
    let feature::Row {
        title, variable, ..
    } = Feature::from_name(name)?.row();
    let how = match denied {
        true => "[devices] in config.toml denies them to containers".to_owned(),
        false => format!(
            "containers get them with {variable}={ENABLED} or the CDI device nvidia.com/{name}=all"
        ),
    };
    Some(Line::new(format!(
        "{title}: {}; {how}",
        count(nodes.len(), "device node")
    )))
}

/// The column of remarks.
const INDENT: usize = 4;

/// Returns the line of a reason or a hint below a row of a table, whose last column would be too narrow. It begins in column `indent`.
pub(super) fn remark_line(indent: usize, text: &str) -> Line {
    Line::new(format!("{:indent$}{}", "", one_line(text)))
}

fn engine_rows(status: &EngineStatus) -> Vec<Row> {
    let engine = match &status.version {
        Some(version) => format!("{} {version}", status.engine),
        None => status.engine.clone(),
    };
    if !status.installed {
        let state = (Tone::Plain, "not installed".to_owned());
        return vec![Row {
            engine,
            way: "",
            state,
            file: String::new(),
            remarks: Vec::new(),
        }];
    }
    let (tone, word) = match status.active {
        true => (Tone::Good, "active"),
        false if status.nri => (Tone::Plain, "not active"),
        false => (Tone::Bad, "not active"),
    };
    let state = (tone, word.to_owned());
    let files = if status.active {
        status.files()
    } else {
        Vec::new()
    };
    let mut files = files.into_iter();
    let remarks = remarks(status);
    let mut rows = vec![Row {
        engine,
        way: "hook",
        state,
        file: files.next().unwrap_or_default(),
        remarks,
    }];
    let more = |file| Row {
        engine: String::new(),
        way: "",
        state: (Tone::Plain, String::new()),
        file,
        remarks: Vec::new(),
    };
    rows.extend(files.map(more));
    rows.extend(status.cdi_specs.iter().map(|spec| Row {
        engine: String::new(),
        way: "CDI",
        state: (Tone::Good, count(spec.devices, "device")),
        file: spec.file.display().to_string(),
        remarks: Vec::new(),
    }));
    rows
}

fn remarks(status: &EngineStatus) -> Vec<String> {
    let replaced = status.replaced.iter().map(|Replaced { dir, file }| {
        format!(
            "hooks in {} do not run: a later file replaces hooks_dir of {}",
            dir.display(),
            file.display()
        )
    });
    with_hint(&status.why, &status.fix)
        .into_iter()
        .chain(replaced)
        .collect()
}

fn with_hint(why: &str, fix: &str) -> Vec<String> {
    let hint = if fix.is_empty() {
        String::new()
    } else {
        format!("hint: {fix}")
    };
    [why.to_owned(), hint]
        .into_iter()
        .filter(|remark| !remark.is_empty())
        .collect()
}

/// Returns the row of the NRI plugin. Its socket belongs to CRI-O, or to an engine that this program does not know, such as containerd.
fn nri_row(status: &NriStatus, engines: &[EngineStatus]) -> Row {
    let engine = engines.iter().find(|engine| engine.nri);
    Row {
        engine: engine.map_or_else(|| "other engine".to_owned(), |engine| engine.engine.clone()),
        way: "NRI plugin",
        state: (Tone::Good, "active".to_owned()),
        file: format!("{} ({})", status.socket, place(status.unit)),
        remarks: Vec::new(),
    }
}

fn plugin_row(status: &PluginStatus) -> Row {
    let (tone, word) = match status.active {
        Some(true) => (Tone::Good, "active"),
        Some(false) if status.fix.is_empty() => (Tone::Plain, "not active"),
        Some(false) => (Tone::Bad, "not active"),
        None => (Tone::Plain, "unknown"),
    };
    let sockets = status
        .sockets
        .iter()
        .map(|socket| socket.display().to_string())
        .collect::<Vec<_>>();
    let file = match sockets.as_slice() {
        [] => format!("({})", place(status.unit)),
        sockets => format!("{} ({})", sockets.join(", "), place(status.unit)),
    };
    let remarks = with_hint(&status.why, &status.fix);
    Row {
        engine: "kubelet".to_owned(),
        way: "device plugin",
        state: (tone, word.to_owned()),
        file,
        remarks,
    }
}

/// Returns where a plugin runs.
const fn place(unit: &'static str) -> &'static str {
    if unit.is_empty() { "in a pod" } else { unit }
}
