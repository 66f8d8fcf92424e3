//! Finds the configuration that the engines of this host pass to the hook: a hook file can contain `--config FILE`.

use std::path::{Path, PathBuf};

use base::paths::HostPath;
use base::tree::Tree;

use super::args::Command;

/// Returns the configuration file for a command that reports about containers of engines: the file of its command line, or else the file
/// of the hook files. `None` stands for the usual file.
pub(super) fn of_command(command: &Command, named: Option<&Path>) -> Option<PathBuf> {
    let is_about_engines = matches!(
        command,
        Command::Status(_)
            | Command::Ps(_)
            | Command::Why(_)
            | Command::Info(_)
            | Command::Files(_)
    );
    match named {
        None if is_about_engines => of_engines(),
        _ => named.map(Path::to_owned),
    }
}

/// Returns the configuration file that the engines of this host pass to the hook, if it is not the usual one.
pub(super) fn of_engines() -> Option<PathBuf> {
    let host = Tree::open(&HostPath::new("/")).ok()?;
    let engines = engines::inspect_engines(&host, None);
    let (config, _) = engines::status::config_of_hooks(&engines)?;
    Some(config)
}
