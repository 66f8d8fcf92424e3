//! Creates one device node as [`super::plan()`] describes it.

use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Uid};

use base::paths::HostPath;
use base::report::{classify, failure};
use findings::catalog;

use super::{NodeToCreate, label};
use crate::driver::params::NodePolicy;

/// What was done for a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// What was done to the node
    pub node: NodeChange,
    /// The `/dev/char` link, if it was created
    pub link: Option<PathBuf>,
}

/// A change of a device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeChange {
    /// The node was right.
    Unchanged,
    /// Its owner or mode was set.
    Permissions,
    /// The node was created or replaced.
    Created,
}

/// Creates a missing node or replaces a wrong one. Creates its `/dev/char` link, which runc and systemd use to find a device by its number.
///
/// # Errors
/// If the node cannot be created, or the driver leaves that to the administrator.
pub fn carry_out(root: &HostPath, node: &NodeToCreate) -> Result<Made> {
    let dev = root.as_path().join("dev");
    let path = dev.join(&node.name);
    let made = if node.policy.modify {
        make(&path, node)
    } else {
        leave(&path, node)
    };
    let made = made.and_then(|made| {
        Ok(Made {
            node: made,
            link: link(&dev, node)?,
        })
    });
    made.with_context(|| format!("cannot make the device node {path:?}")).map_err(|error| {
        let fix = format!("check that {dev:?} can be written to, and run \"oci-nvidia-hook prepare\" again as root");
        classify(error, &catalog::NODE_MISSING, &fix)
    })
}

/// Returns an error if the node is missing: with `NVreg_ModifyDeviceFiles=0`, the administrator creates the nodes.
fn leave(path: &Path, node: &NodeToCreate) -> Result<NodeChange> {
    if path.symlink_metadata().is_ok() {
        return Ok(NodeChange::Unchanged);
    }
    let (major, minor) = node.device;
    Err(failure(
        &catalog::NODE_MISSING,
        "it is missing, and the driver leaves its device nodes to the administrator (ModifyDeviceFiles: 0)",
        format!(
            "run \"mknod -m {:o} {} c {major} {minor}\" as root",
            node.policy.mode,
            path.display()
        ),
    ))
}

/// Creates the link if necessary, and returns its path if it did.
fn link(dev: &Path, node: &NodeToCreate) -> Result<Option<PathBuf>> {
    let (major, minor) = node.device;
    let chars = dev.join("char");
    let link = chars.join(format!("{major}:{minor}"));
    let text = PathBuf::from("..").join(&node.name);
    if has_text(&link, &text) {
        return Ok(None);
    }
    make_dir(&chars)?;
    rustix::fs::unlinkat(CWD, &link, AtFlags::empty()).ok();
    match rustix::fs::symlinkat(&text, CWD, &link) {
        // Another hook that runs at the same time may have created the link.
        Err(_) if has_text(&link, &text) => Ok(None),
        Ok(()) => Ok(Some(link)),
        Err(errno) => Err(errno).with_context(|| format!("cannot make the link {link:?}")),
    }
}

fn has_text(link: &Path, text: &Path) -> bool {
    let old = rustix::fs::readlinkat(CWD, link, Vec::new());
    old.is_ok_and(|old| old.as_bytes() == text.as_os_str().as_encoded_bytes())
}

fn make(path: &Path, node: &NodeToCreate) -> Result<NodeChange> {
    let NodePolicy { uid, gid, mode, .. } = node.policy;
    let (major, minor) = node.device;
    let device = rustix::fs::makedev(major, minor);
    if let Ok(stat) = rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
        let right = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
            && stat.st_rdev == device;
        if right && stat.st_mode & 0o777 == mode && (stat.st_uid, stat.st_gid) == (uid, gid) {
            return Ok(NodeChange::Unchanged);
        }
        if !right {
            rustix::fs::unlinkat(CWD, path, AtFlags::empty())?;
        }
    } else if let Some(parent) = path.parent() {
        make_dir(parent)?;
    }
    // mknod(2) applies the umask to the mode, so chmod(2) follows. Until then only root can open the node.
    let change = match rustix::fs::mknodat(
        CWD,
        path,
        FileType::CharacterDevice,
        Mode::from_raw_mode(0o600),
        device,
    ) {
        Ok(()) => {
            label::give(path);
            NodeChange::Created
        }
        Err(rustix::io::Errno::EXIST) => NodeChange::Permissions,
        Err(errno) => return Err(errno.into()),
    };
    // The owner is set first. If the mode were set first, members of the old group could open the node for a moment.
    rustix::fs::chownat(
        CWD,
        path,
        Some(Uid::from_raw(uid)),
        Some(Gid::from_raw(gid)),
        AtFlags::SYMLINK_NOFOLLOW,
    )?;
    rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(mode), AtFlags::empty())?;
    Ok(change)
}

/// Creates a directory with mode 0755, independent of the umask.
fn make_dir(path: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o755).create(path) {
        Ok(()) => std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)),
        Err(_) if path.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}
