//! Chooses the user and group of the process that calls NVML.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Result;
use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use base::paths::HostPath;
use base::sys::confine::Identity;
use base::sys::ns;
use base::tree::Tree;

use crate::config::{self, Config};
use crate::driver::access::Permissions;
use crate::driver::node_name::{CONTROL, NodeName};

/// The id of `nobody` and its group on all supported distributions. The names are not looked up, because the driver root may lack a user
/// database.
pub const NOBODY: u32 = 65534;

/// The choice that does not depend on the driver's nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunAs {
    /// The user cannot be changed: a plain user, or a user namespace, where the host's groups do not exist.
    Unchanged,
    /// `user` in config.toml.
    Configured(Identity),
    /// The user with the fewest privileges that can open the nodes, see [`choose`].
    Fewest,
}

/// Makes the first part of the choice, from config.toml and the privileges of this process.
///
/// # Errors
/// If the configured user or group does not exist.
pub fn from_config(config: &Config) -> Result<RunAs> {
    if !rustix::process::geteuid().is_root() || ns::in_user_namespace()? {
        return Ok(RunAs::Unchanged);
    }
    let configured = config.user.as_ref().map(config::resolve).transpose()?;
    Ok(configured.map_or(RunAs::Fewest, RunAs::Configured))
}

/// Chooses the user for a process with this root directory and library. `None` means that the user is not changed.
///
/// For a configured root, only the group counts: without capabilities, root can open the nodes because it owns them or because of the
/// group, and whatever else root owns must not be open to the driver's library.
///
/// # Errors
/// If the root cannot be opened.
pub fn choose(who: RunAs, root: &HostPath, library: &Path) -> Result<Option<Identity>> {
    let group = match who {
        RunAs::Unchanged => return Ok(None),
        RunAs::Configured(identity) if identity.uid != 0 => return Ok(Some(identity)),
        RunAs::Configured(root) => Some(root.gid),
        RunAs::Fewest => None,
    };
    Ok(Some(fewest(
        &required_files(&Tree::open(root)?, library),
        group,
    )))
}

/// Whether files can belong to the user of the process, which it can then open and change although it has no capabilities.
#[must_use]
pub fn may_own_files(identity: Option<Identity>) -> bool {
    identity.is_none_or(|identity| identity.uid != NOBODY)
}

/// A file that the process must open, or a directory on the path to one, with the required permissions: 6 for a node that is opened for
/// reading and writing.
type Need = (Permissions, u32);

fn is_met_by((file, bits): Need, identity: Identity) -> bool {
    file.allow(bits, file.uid == identity.uid, file.gid == identity.gid)
}

/// Returns `/dev/nvidiactl`, then the nodes of the GPUs, or `/dev/dxg` on WSL 2, then the library and its directories.
fn required_files(root: &Tree, library: &Path) -> Vec<Need> {
    let mut needs = Vec::new();
    let mut names = vec![OsString::from(CONTROL)];
    for name in root.names(Path::new("/dev")) {
        let node = name.to_str().and_then(NodeName::parse);
        if node.is_some_and(NodeName::is_gpu) {
            names.push(name);
        }
    }
    for name in names {
        if let Ok(node) = root.locate(&Path::new("/dev").join(name))
            && node.kind == FileType::CharacterDevice
        {
            needs.push((Permissions::from(&node), 6));
        }
    }
    for dir in library.ancestors().skip(1) {
        if let Ok(dir) = root.locate(dir) {
            needs.push((Permissions::from(&dir), 1));
        }
    }
    if let Ok(file) = root.locate(library) {
        needs.push((Permissions::from(&file), 4));
    }
    needs
}

/// Returns the identity with the fewest privileges that can open all files that root without capabilities can open. `configured` is the
/// group in config.toml.
///
/// With the usual mode 0666 of the nodes, that is `nobody`. On SUSE the nodes are root:video 0660, so it is `nobody` with the group
/// `video`. It is root only if no other user can open the nodes or the library.
fn fewest(needs: &[Need], configured: Option<u32>) -> Identity {
    let of_nodes = needs.first().map_or(NOBODY, |(control, _)| control.gid);
    let root = Identity {
        uid: 0,
        gid: configured.unwrap_or(of_nodes),
    };
    for gid in [NOBODY, configured.unwrap_or(NOBODY), of_nodes] {
        let nobody = Identity { uid: NOBODY, gid };
        let mut needs = needs.iter();
        if needs.all(|need| is_met_by(*need, nobody) || !is_met_by(*need, root)) {
            return nobody;
        }
    }
    root
}

#[cfg(test)]
mod tests {
    use super::*;

    const VIDEO: u32 = 44;

    fn node(gid: u32, mode: u32) -> Need {
        (Permissions { uid: 0, gid, mode }, 6)
    }

    #[test]
    fn it_has_the_fewest_rights_that_will_do() {
        let dir = |mode| {
            (
                Permissions {
                    uid: 0,
                    gid: 0,
                    mode,
                },
                1,
            )
        };
        for (what, needs, uid, gid) in [
            ("nothing is there", vec![], NOBODY, NOBODY),
            (
                "nodes for everyone",
                vec![node(0, 0o666), node(0, 0o666)],
                NOBODY,
                NOBODY,
            ),
            (
                "of a group all the same",
                vec![node(VIDEO, 0o666)],
                NOBODY,
                NOBODY,
            ),
            (
                "SUSE",
                vec![node(VIDEO, 0o660), node(VIDEO, 0o660)],
                NOBODY,
                VIDEO,
            ),
            ("the group root", vec![node(0, 0o660)], NOBODY, 0),
            (
                "one for root alone",
                vec![node(VIDEO, 0o660), node(VIDEO, 0o600)],
                0,
                VIDEO,
            ),
            (
                "one for another group",
                vec![node(VIDEO, 0o660), node(7, 0o660)],
                0,
                VIDEO,
            ),
            (
                "one for nobody at all",
                vec![node(0, 0o666), node(0, 0)],
                NOBODY,
                NOBODY,
            ),
            (
                "one that the group is denied",
                vec![node(VIDEO, 0o606)],
                NOBODY,
                NOBODY,
            ),
            (
                "a library that only root can reach",
                vec![node(0, 0o666), dir(0o700)],
                0,
                0,
            ),
            (
                "a library that all can reach",
                vec![node(0, 0o666), dir(0o755)],
                NOBODY,
                NOBODY,
            ),
        ] {
            assert_eq!(fewest(&needs, None), Identity { uid, gid }, "{what}");
        }
    }

    #[test]
    fn of_a_configured_root_only_the_group_counts() {
        const OTHER: u32 = 7;
        for (what, needs, configured, uid, gid) in [
            (
                "root:video on SUSE",
                vec![node(VIDEO, 0o660), node(VIDEO, 0o660)],
                VIDEO,
                NOBODY,
                VIDEO,
            ),
            (
                "root:root on SUSE",
                vec![node(VIDEO, 0o660)],
                0,
                NOBODY,
                VIDEO,
            ),
            (
                "nodes for everyone",
                vec![node(VIDEO, 0o666)],
                VIDEO,
                NOBODY,
                NOBODY,
            ),
            (
                "nodes for the configured group",
                vec![node(VIDEO, 0o666), node(OTHER, 0o660)],
                OTHER,
                NOBODY,
                OTHER,
            ),
            (
                "nodes for root alone",
                vec![node(VIDEO, 0o600)],
                VIDEO,
                0,
                VIDEO,
            ),
            (
                "one for root alone",
                vec![node(VIDEO, 0o660), node(VIDEO, 0o600)],
                OTHER,
                0,
                OTHER,
            ),
            (
                "one that root cannot open either",
                vec![node(VIDEO, 0o660), node(VIDEO, 0)],
                VIDEO,
                NOBODY,
                VIDEO,
            ),
            ("no nodes", vec![], VIDEO, NOBODY, NOBODY),
        ] {
            assert_eq!(
                fewest(&needs, Some(configured)),
                Identity { uid, gid },
                "{what}"
            );
        }
    }

    /// A file in place of a node does not decide who may open the nodes.
    #[test]
    fn only_device_nodes_count() {
        let (dir, _) = crate::cdi::stamp::tests::host();
        std::fs::write(dir.path().join("dev/nvidia0"), "").unwrap();
        let tree = Tree::open(&HostPath::new(dir.path())).unwrap();
        let library = Path::new("/usr/lib/driver/libcuda.so.570.86");
        let bits: Vec<_> = required_files(&tree, library)
            .into_iter()
            .map(|(_, bits)| bits)
            .collect();
        assert_eq!(bits, [1, 1, 1, 1, 4], "four directories and the library");
    }

    #[test]
    fn another_configured_user_stays() {
        let tux = Identity {
            uid: 1000,
            gid: VIDEO,
        };
        let chosen = choose(
            RunAs::Configured(tux),
            &HostPath::new("/"),
            Path::new("/lib/x"),
        )
        .unwrap();
        assert_eq!(chosen, Some(tux));
        assert!(may_own_files(chosen) && may_own_files(None));
        assert!(!may_own_files(Some(Identity {
            uid: NOBODY,
            gid: VIDEO
        })));
    }
}
