//! `status`: a line for each engine of this host, whether it starts our hook.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use base::paths::HostPath;
use base::report::one_line;
use base::tree::Tree;

use super::terminal::{Colour, Terminal};
use super::{args, output};
use crate::engine::status::{self, Status};
use crate::engine::{User, hooks, look};
use crate::log::Log;

/// Prints it. 0 if the hook is active in every engine that is installed.
pub fn run(options: &args::Status, terminal: Terminal) -> ExitCode {
    let printed = statuses().and_then(|statuses| {
        let all_active = statuses.iter().all(|status| status.active || !status.installed);
        let text = if options.json { base::json::pretty(&statuses)? + "\n" } else { text(&statuses, terminal) };
        let printed = output::print(&text);
        Ok(if all_active { printed } else { ExitCode::FAILURE })
    });
    printed.unwrap_or_else(|error| {
        Log::default().error(&error);
        ExitCode::FAILURE
    })
}

fn statuses() -> Result<Vec<Status>> {
    let host = Tree::open(&HostPath::new("/"))?;
    let installed = hooks::installed(&host);
    Ok(look::inspect_engines(&host, this_user()).iter().map(|engine| status::judge(engine, &installed)).collect())
}

/// Who calls, if it is not root. Without an environment, the home directory is what the user database says.
pub fn this_user() -> Option<User> {
    let uid = nix::unistd::getuid();
    if uid.is_root() {
        return None;
    }
    let entry = nix::unistd::User::from_uid(uid).ok().flatten();
    let name = entry.as_ref().map_or_else(|| uid.to_string(), |entry| entry.name.clone());
    Some(User { name, uid: uid.as_raw(), home: entry.map(|entry| entry.dir).filter(|home| home != Path::new("/")) })
}

pub fn text(statuses: &[Status], terminal: Terminal) -> String {
    let mut text = String::new();
    for status in statuses {
        let (colour, word) = match (status.installed, status.active) {
            (false, _) => (Colour::Plain, "not installed"),
            (true, true) => (Colour::Good, "active"),
            (true, false) => (Colour::Bad, "not active"),
        };
        write!(text, "{}: {}", one_line(&status.engine), terminal.paint(colour, word)).ok();
        if status.active {
            write!(text, ", by {}", one_line(&status.files())).ok();
        }
        if !status.why.is_empty() {
            let separator = if status.active { ", " } else { ": " };
            write!(text, "{separator}{}", one_line(&status.why)).ok();
        }
        text.push('\n');
        if !status.fix.is_empty() {
            writeln!(text, "  hint: {}", one_line(&status.fix)).ok();
        }
    }
    text
}
