//! Finds the driver's files, sockets and device nodes on the host, below the driver root.

pub mod access;
pub mod compat;
pub mod diagnosis;
pub mod elf;
pub mod file_table;
pub mod files;
pub mod group;
pub mod ipc;
pub mod kind;
pub mod lacking;
pub mod ldcache;
pub mod ldconf;
pub mod libraries;
pub mod locate;
pub mod mismatch;
pub mod node_name;
pub mod nodes;
pub mod packages;
pub mod params;
pub mod pci;
pub mod platform;
pub mod sonames;
pub mod wsl;

pub use self::kind::DriverKind;

use anyhow::Result;

use base::debug;
use base::paths::HostPath;
use base::report::Failure;
use base::tree::Tree;
use findings::catalog;

/// Opens the driver root.
///
/// # Errors
/// If the path is not a directory.
pub fn open_root(path: &HostPath) -> Result<Tree> {
    let hint = "set root in the [nvidia-container-cli] table of config.toml to the directory that contains the driver";
    debug::log(|| format!("driver root {:?}", path.as_path()));
    Tree::open(path)
        .map_err(|error| unusable(error, format!("cannot open the driver root {path}"), hint))
}

/// Opens the root with the device nodes that config.toml names.
///
/// # Errors
/// If the path is not a directory.
pub fn open_dev_root(path: &HostPath) -> Result<Tree> {
    let hint = "set dev-root in the [driver] table of config.toml to the directory that contains /dev/nvidiactl, or remove the line";
    Tree::open(path).map_err(|error| {
        unusable(
            error,
            format!("cannot open the root of the device nodes {path}"),
            hint,
        )
    })
}

fn unusable(error: std::io::Error, what: String, hint: &str) -> anyhow::Error {
    anyhow::Error::new(error).context(Failure::new(&catalog::DRIVER_ROOT, what, hint))
}

/// Whether a text has the form of a driver version, such as `535.183.01`.
#[must_use]
pub fn is_version(text: &str) -> bool {
    text.contains('.')
        && text
            .split('.')
            .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_root_says_what_to_do() {
        let text = base::report::render(&open_root(&HostPath::new("/nowhere")).unwrap_err());
        assert!(
            text.starts_with("cannot open the driver root \"/nowhere\": no such file or directory"),
            "{text}"
        );
        assert!(text.contains("\nhint: set root"), "{text}");
    }
}
