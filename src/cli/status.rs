//! `status`: shows for each engine of this host whether it starts the hook.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use base::paths::HostPath;
use base::report::one_line;
use base::tree::Tree;

use super::terminal::{Line, Terminal, Tone};
use super::{args, output};
use crate::engine::User;
use crate::engine::status::{self, EngineStatus};

/// Prints the status of each engine. Returns 0 if every installed engine starts the hook.
pub(super) fn run(options: args::Output, terminal: Terminal) -> Result<ExitCode> {
    let statuses = status::statuses(&Tree::open(&HostPath::new("/"))?, this_user());
    let all_active = statuses.iter().all(|status| status.active || !status.installed);
    let text = if options.json { status::document(&statuses)? } else { text(&statuses, terminal) };
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

pub fn text(statuses: &[EngineStatus], terminal: Terminal) -> String {
    let width = terminal.column(statuses.iter().map(|status| status.engine.as_str()));
    let hang = width + 2;
    let mut lines = Vec::new();
    for status in statuses {
        let (tone, word) = match (status.installed, status.active) {
            (false, _) => (Tone::Plain, "not installed"),
            (true, true) => (Tone::Good, "active"),
            (true, false) => (Tone::Bad, "not active"),
        };
        let files = if status.active { format!(", from {}", one_line(&status.files())) } else { String::new() };
        let why = match status.why.as_str() {
            "" => String::new(),
            why => format!("{} {}", if status.active { "," } else { ":" }, one_line(why)),
        };
        let engine = format!("{:<width$} ", one_line(&status.engine) + ":", width = width + 1);
        lines.push(Line::new(hang, engine).then(tone, word).then(Tone::Plain, files + &why));
        if !status.fix.is_empty() {
            lines.push(Line::new(hang, format!("{:hang$}hint: {}", "", one_line(&status.fix))));
        }
    }
    terminal.render(&lines)
}
