//! `status`: shows for each engine of this host whether it starts the hook, and whether the device plugin serves the kubelet.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use base::paths::HostPath;
use base::report::one_line;
use base::tree::Tree;

use super::terminal::{Line, Terminal, Tone};
use super::{args, output};
use engines::User;
use engines::kubelet_plugin::{NriStatus, PluginStatus};
use engines::status::{self, EngineStatus, Replaced, Report};

/// Prints the status of each engine. Returns 0 if every installed engine starts the hook.
pub(super) fn run(options: args::Output, terminal: Terminal) -> Result<ExitCode> {
    let report = status::report(&Tree::open(&HostPath::new("/"))?, this_user());
    let all_active = report.engines.iter().all(|status| status.active || status.nri || !status.installed);
    let text = if options.json { report.document()? } else { text(&report, terminal) };
    let printed = output::print(&text);
    Ok(if all_active { printed } else { ExitCode::FAILURE })
}

/// Returns the calling user; `None` if it is root. The home directory is that of the user database, because the environment was
/// cleared.
pub fn this_user() -> Option<User> {
    let uid = nix::unistd::getuid();
    if uid.is_root() {
        return None;
    }
    let entry = nix::unistd::User::from_uid(uid).ok().flatten();
    let name = entry.as_ref().map_or_else(|| uid.to_string(), |entry| entry.name.clone());
    Some(User { name, uid: uid.as_raw(), home: entry.map(|entry| entry.dir).filter(|home| home != Path::new("/")) })
}

/// The name of the device plugin in the column of the engines.
const PLUGIN: &str = "device plugin";
/// That of the NRI plugin
const NRI: &str = "NRI plugin";

pub fn text(report: &Report, terminal: Terminal) -> String {
    let plugin = report.kubelet_plugin.iter().map(|_| PLUGIN).chain(report.nri.iter().map(|_| NRI));
    let width = terminal.column(report.engines.iter().map(|status| status.engine.as_str()).chain(plugin));
    let engines = report.engines.iter().flat_map(|status| engine_lines(status, width));
    let plugin = report.kubelet_plugin.iter().flat_map(|status| plugin_lines(status, width));
    let nri = report.nri.iter().flat_map(|status| nri_lines(status, width));
    terminal.render(&engines.chain(plugin).chain(nri).collect::<Vec<_>>())
}

fn engine_lines(status: &EngineStatus, width: usize) -> Vec<Line> {
    let (tone, word) = match (status.installed, status.active) {
        (false, _) => (Tone::Plain, "not installed"),
        (true, true) => (Tone::Good, "active"),
        (true, false) if status.nri => (Tone::Plain, "not active"),
        (true, false) => (Tone::Bad, "not active"),
    };
    let files = if status.active { format!(", from {}", one_line(&status.files())) } else { String::new() };
    let why = match status.why.as_str() {
        "" => String::new(),
        why => format!("{} {}", if status.active { "," } else { ":" }, one_line(why)),
    };
    let mut lines = lines(width, &status.engine, (tone, word), files + &why, &status.fix);
    let hang = width + 2;
    for Replaced { dir, file } in &status.replaced {
        let text =
            format!("hooks in {} do not run: a later file replaces hooks_dir of {}", dir.display(), file.display());
        lines.push(Line::new(hang, format!("{:hang$}{}", "", one_line(&text))));
    }
    lines
}

fn plugin_lines(status: &PluginStatus, width: usize) -> Vec<Line> {
    let word = match status.active {
        Some(true) => (Tone::Good, "active"),
        Some(false) if status.fix.is_empty() => (Tone::Plain, "not active"),
        Some(false) => (Tone::Bad, "not active"),
        None => (Tone::Plain, "unknown"),
    };
    let sockets = status.sockets.iter().map(|socket| socket.display().to_string()).collect::<Vec<_>>();
    let what = match status.why.as_str() {
        "" => format!(", serves {}", sockets.join(" and ")),
        why => format!(": {why}"),
    };
    lines(width, PLUGIN, word, format!("{} ({})", one_line(&what), place(status.unit)), &status.fix)
}

fn nri_lines(status: &NriStatus, width: usize) -> Vec<Line> {
    let what = format!(", gives GPUs to the containers of the engine at {} ({})", status.socket, place(status.unit));
    lines(width, NRI, (Tone::Good, "active"), what, "")
}

/// Returns where a plugin runs.
const fn place(unit: &'static str) -> &'static str {
    if unit.is_empty() { "in a pod" } else { unit }
}

/// Returns a line about an engine or the device plugin, and a line with the hint.
fn lines(width: usize, name: &str, (tone, word): (Tone, &'static str), rest: String, fix: &str) -> Vec<Line> {
    let hang = width + 2;
    let name = format!("{:<width$} ", one_line(name) + ":", width = width + 1);
    let mut lines = vec![Line::new(hang, name).then(tone, word).then(Tone::Plain, rest)];
    if !fix.is_empty() {
        lines.push(Line::new(hang, format!("{:hang$}hint: {}", "", one_line(fix))));
    }
    lines
}
