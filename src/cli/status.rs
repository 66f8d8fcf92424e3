//! `status`: shows for each engine of this host how containers get GPUs: with the hook, CDI, the NRI plugin or the device plugin.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

use anyhow::Result;

use base::accounts;
use base::paths::HostPath;
use base::report::one_line;
use base::tree::Tree;

use super::terminal::{Cell, Line, Terminal, Tone, cell, heading, table};
use super::{args, mps_line, output};
use crate::doctor::count;
use engines::User;
use engines::cdi::list_paths;
use engines::status::{self, EngineStatus, ExtraDevices, Report};
use nvidia_host::config;
use nvidia_host::feature::{self, ENABLED, Feature};
use nvidia_host::host;
use nvidia_host::mps::Entry;
use plugin_api::status::{NriStatus, PluginStatus};

/// Prints the status of each engine. Returns 0 if every installed engine starts the hook.
pub(super) fn run(
    options: args::Output,
    config: Option<&Path>,
    terminal: Terminal,
) -> Result<ExitCode> {
    let mut report = status::report(&Tree::open(&HostPath::new("/"))?, this_user());
    // An invalid config.toml has an error in "doctor", and does not matter to the engines.
    if let Ok((config, _)) = config::read(config) {
        report.extra_devices = ExtraDevices::of_host(&config);
        report.mps = Entry::of(&host::mps_daemons(&config));
    }
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

/// Returns the calling user; `None` if it is root. The home directory comes from /etc/passwd, and from the environment
/// for users that only a name service knows.
pub fn this_user() -> Option<User> {
    let uid = nix::unistd::getuid();
    if uid.is_root() {
        return None;
    }
    let uid = uid.as_raw();
    let (name, home) = match accounts::user(uid) {
        Ok(Some(entry)) => (entry.name, Some(entry.home)),
        // A user of LDAP, for example.
        _ => (uid.to_string(), HOME.get().cloned()),
    };
    Some(User {
        name,
        uid,
        home: home.filter(|home| home != Path::new("/")),
    })
}

/// The home directory in the environment of a command. It is only used for users that are not in /etc/passwd.
static HOME: OnceLock<PathBuf> = OnceLock::new();

/// Sets the home directory that the environment contained.
pub(super) fn set_home(home: PathBuf) {
    HOME.set(home).ok();
}

/// The columns: the engine, how its containers get GPUs, whether that works, and the file that decides it.
const HEADER: [&str; 4] = ["ENGINE", "GPUS WITH", "STATE", "FILE"];

/// A row of the table. A row for another file of the engine repeats no word.
#[derive(Default)]
struct Row {
    engine: String,
    way: &'static str,
    state: Cell,
    file: String,
    /// What is remarkable, and a hint: lines below the row
    remarks: Vec<String>,
}

/// Returns the table, with remarks and hints below the rows to which they belong.
pub fn text(report: &Report, terminal: Terminal) -> String {
    let mut rows = Vec::new();
    for status in &report.engines {
        rows.extend(engine_rows(status));
    }
    if let Some(nri) = &report.nri {
        rows.push(nri_row(nri, &report.engines));
    }
    if let Some(plugin) = &report.kubelet_plugin {
        rows.push(plugin_row(plugin));
    }
    let mut cells = vec![HEADER.map(heading)];
    let mut remarks = vec![Vec::new()];
    for row in rows {
        cells.push([
            cell(one_line(&row.engine)),
            cell(row.way),
            row.state,
            cell(one_line(&row.file)),
        ]);
        remarks.push(row.remarks);
    }
    let mut lines = Vec::new();
    for (line, remarks) in table(cells).into_iter().zip(remarks) {
        lines.push(line);
        for remark in remarks {
            lines.push(remark_line(INDENT, &remark));
        }
    }
    if !report.extra_devices.is_empty() {
        lines.push(Line::default());
    }
    for devices in &report.extra_devices {
        lines.extend(extra_line(devices));
    }
    if !report.mps.is_empty() {
        lines.push(Line::default());
    }
    for daemon in &report.mps {
        lines.push(mps_line::of(daemon, None));
    }
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
    let feature::FeatureRow {
        title, variable, ..
    } = Feature::from_name(name)?.row();
    let how = if *denied {
        "[devices] in config.toml denies them to containers".to_owned()
    } else {
        format!(
            "containers get them with {variable}={ENABLED} or the CDI device nvidia.com/{name}=all"
        )
    };
    let nodes = count(nodes.len(), "device node");
    Some(Line::new(format!("{title}: {nodes}; {how}")))
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
        return vec![Row {
            engine,
            state: cell("not installed"),
            ..Row::default()
        }];
    }
    let mut files = Vec::new();
    if status.active {
        files = status.files();
    }
    let mut files = files.into_iter();
    let mut rows = vec![Row {
        engine,
        way: "hook",
        state: hook_state(status),
        file: files.next().unwrap_or_default(),
        remarks: with_hint(&status.why, &status.fix),
    }];
    for file in files {
        rows.push(Row {
            file,
            ..Row::default()
        });
    }
    for spec in &status.cdi_specs {
        rows.push(Row {
            way: "CDI",
            state: (Tone::Good, count(spec.devices, "device")),
            file: spec.file.display().to_string(),
            ..Row::default()
        });
    }
    rows
}

fn hook_state(status: &EngineStatus) -> Cell {
    let (tone, word) = if status.active {
        (Tone::Good, "active")
    } else if status.nri {
        (Tone::Plain, "not active")
    } else {
        (Tone::Bad, "not active")
    };
    (tone, word.to_owned())
}

fn with_hint(why: &str, fix: &str) -> Vec<String> {
    let mut lines = Vec::new();
    if !why.is_empty() {
        lines.push(why.to_owned());
    }
    if !fix.is_empty() {
        lines.push(format!("hint: {fix}"));
    }
    lines
}

/// Returns the row of the NRI plugin. Its socket belongs to CRI-O, or to an engine that this program does not know, such as containerd.
fn nri_row(status: &NriStatus, engines: &[EngineStatus]) -> Row {
    let engine = match engines.iter().find(|engine| engine.nri) {
        Some(engine) => engine.engine.clone(),
        None => "other engine".to_owned(),
    };
    Row {
        engine,
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
    let mut file = format!("({})", place(status.unit));
    if !status.sockets.is_empty() {
        file = format!("{} {file}", list_paths(&status.sockets));
    }
    let remarks = with_hint(&status.why, &status.fix);
    let way = if status.serves_claims() {
        "claims"
    } else {
        "device plugin"
    };
    Row {
        engine: "kubelet".to_owned(),
        way,
        state: (tone, word.to_owned()),
        file,
        remarks,
    }
}

/// Returns where a plugin runs.
const fn place(unit: &'static str) -> &'static str {
    if unit.is_empty() { "in a pod" } else { unit }
}
