//! Finds the sockets and directories through which programs in containers communicate with daemons of the host.
//!
//! They are searched for below the driver root, as in NVIDIA's stack: if a container contains the driver, it also runs the daemons.
//! Unlike driver files, they are in directories in which other users can create names: `/run/nvidia-persistenced` belongs to the
//! user of the daemon, and all users can write to `/tmp`. Therefore they are opened with [`guarded`], and the open file is checked.
//! Both are repeated for each container, so that no result depends on a path that was checked earlier.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::FileType;

use base::paths::{ContainerPath, HostPath};
use base::report::{Finding, failure, line};
use base::sys::guarded::{self, Chooser, Guarded, Refused};
use base::sys::in_root::Root;
use base::sys::live_files;
use base::sys::ns::in_user_namespace;
use base::tree::{Tree, is_missing};
use findings::catalog;

use super::file_table::{MPS_DIRECTORY, SOCKETS};
use crate::capability::{Capabilities, Omit};

/// The file that must exist at the path of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Expected {
    /// A socket that belongs to root or to the owner of its directory
    Socket,
    /// A directory that belongs to root
    Directory,
    /// A directory that config.toml names, with any owner
    NamedDirectory,
    /// A directory that belongs to root, which containers can only read, and that contains no socket, FIFO or device
    ReadOnlyDirectory,
    /// The directory of an MPS daemon that this program runs. It belongs to root, and containers can only read it: clients connect to its
    /// socket.
    MpsDirectory,
}

/// The socket or directory of a daemon, as a path. [`Channel::open`] opens and checks it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Channel {
    /// The driver root
    pub root: HostPath,
    /// The path below the driver root, with a leading slash, which is also the path in containers
    pub path: PathBuf,
    /// The expected file
    pub expected: Expected,
}

/// An optional socket or directory of a daemon that a container gets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ipc {
    /// How to open it
    pub channel: Channel,
    /// The path on the host, after symbolic links
    pub source: HostPath,
    /// Whether only root can replace the file. If not, it must not be mounted by its path.
    pub is_fixed: bool,
    /// The path in the container
    pub path: ContainerPath,
}

impl Ipc {
    /// Returns the opened file as a container gets it at `path`, or `None` if it is missing or fails a check.
    pub(crate) fn open_at(root: &Tree, channel: Channel, path: &Path) -> Option<Self> {
        let opened = channel.open_below(root.as_root()).ok()?;
        Some(Self {
            path: ContainerPath::new(path)?,
            ..opened_at(root, channel, &opened)?
        })
    }
}

impl Channel {
    /// Opens the file, if no user other than root, the user of this process and the user of the daemon can have replaced it.
    ///
    /// # Errors
    /// If the file is missing or fails a check.
    pub fn open(&self) -> Result<Guarded> {
        let root =
            Root::open(self.root.as_path()).with_context(|| format!("open {}", self.root))?;
        self.open_below(&root)
    }

    fn open_below(&self, root: &Root) -> Result<Guarded> {
        let found = guarded::open(root, &self.path).map_err(|refused| match refused {
            Refused::Io(error) => error.into(),
            Refused::Link(link) => self.refusal(
                &format!("{link:?} is a symbolic link that another user may have created"),
                &link,
            ),
            Refused::Mount(point) => self.refusal(
                &format!("{point:?} is a mount point in a directory of other users"),
                &point,
            ),
        })?;
        let stat = &found.stat;
        let expected = match self.expected {
            // The host's root appears as another user, and this process has only the rights of the user whose container it is.
            Expected::MpsDirectory if in_user_namespace()? => Expected::NamedDirectory,
            expected => expected,
        };
        let seen = Seen {
            kind: FileType::from_raw_mode(stat.st_mode),
            is_trusted: guarded::is_trusted(stat.st_uid),
            uid: stat.st_uid,
            has_other_names: stat.st_nlink > 1,
            chooser: &found.chooser,
        };
        match judge(expected, &seen) {
            None => self.check_content(found),
            Some(why) => Err(self.refusal(&why, &found.path)),
        }
    }

    /// Returns the opened file, unless it is a directory to read that contains more than files. MPS directories are the only ones that
    /// containers get for their sockets.
    fn check_content(&self, found: Guarded) -> Result<Guarded> {
        if self.expected != Expected::ReadOnlyDirectory {
            return Ok(found);
        }
        let why = match live_files::first(&found.fd) {
            Ok(None) => return Ok(found),
            Ok(Some(name)) => format!("{name:?} in it is a socket, a FIFO or a device"),
            Err(error) => format!("cannot search it for sockets: {}", line(&error.into())),
        };
        Err(self.refusal(&why, &found.path))
    }

    fn refusal(&self, why: &str, at: &Path) -> anyhow::Error {
        let at = at.display();
        let fix = match self.expected {
            Expected::Socket => {
                format!(
                    "see the owner with \"ls -ld {at}\", remove the file, and restart the driver's daemon"
                )
            }
            Expected::ReadOnlyDirectory => {
                format!(
                    "see its owner and its files with \"ls -la {at}\": root must own it, and it may only contain files"
                )
            }
            Expected::MpsDirectory => {
                format!("see its owner with \"ls -ld {at}\": root must own it")
            }
            Expected::Directory | Expected::NamedDirectory => format!(
                "remove {at}, or have an MPS daemon use a directory that only root can create and name it with \
                 CUDA_MPS_PIPE_DIRECTORY in environment of [nvidia-container-cli] in config.toml"
            ),
        };
        failure(
            &catalog::LOCAL_SOURCE,
            format!("{:?} is not given to containers: {why}", self.path),
            fix,
        )
    }
}

/// The properties of the opened file.
struct Seen<'a> {
    kind: FileType,
    is_trusted: bool,
    uid: u32,
    has_other_names: bool,
    chooser: &'a Chooser,
}

/// Returns why the file must not be given to containers, or `None` if it may.
fn judge(expected: Expected, seen: &Seen<'_>) -> Option<String> {
    let uid = seen.uid;
    match expected {
        Expected::Socket if seen.kind != FileType::Socket => {
            return Some("it is not a socket".to_owned());
        }
        Expected::Socket => {}
        _ if seen.kind != FileType::Directory => {
            return Some("it is not a directory".to_owned());
        }
        // The administrator has chosen it.
        Expected::NamedDirectory => return None,
        Expected::Directory | Expected::ReadOnlyDirectory | Expected::MpsDirectory
            if !seen.is_trusted =>
        {
            return Some(format!("it belongs to user {uid}, not to root"));
        }
        Expected::Directory | Expected::ReadOnlyDirectory | Expected::MpsDirectory => {
            return match seen.chooser {
                Chooser::NoOther => None,
                Chooser::Owner(dir, uid) => {
                    Some(format!("{dir:?} belongs to user {uid}, not to root"))
                }
                Chooser::Others(dir) => Some(format!("other users can write to {dir:?}")),
            };
        }
    }
    match seen.chooser {
        Chooser::Others(dir) => Some(format!("other users can write to its directory {dir:?}")),
        // With fs.protected_hardlinks = 0, the user of a daemon could link the socket of another daemon into its directory.
        _ if seen.has_other_names => Some("it is a hard link".to_owned()),
        _ if !owner_is_known(seen) => Some(format!("it belongs to user {uid}")),
        _ => None,
    }
}

/// A daemon's socket belongs to root, or to the user to whom root gave its directory.
fn owner_is_known(seen: &Seen<'_>) -> bool {
    seen.is_trusted || matches!(seen.chooser, Chooser::Owner(_, uid) if *uid == seen.uid)
}

/// Finds the existing sockets and directories for these capabilities. `mps` is the configured directory of the MPS daemon, below the
/// driver root.
#[must_use]
pub fn find(
    root: &Tree,
    capabilities: Capabilities,
    mps: Option<&Path>,
    omit: Omit,
) -> (Vec<Ipc>, Vec<Finding>) {
    let mut candidates = Vec::new();
    for (path, capability) in SOCKETS {
        if !is_left_out(path, omit) {
            candidates.push((Path::new(path), *capability, Expected::Socket));
        }
    }
    let (usual, compute) = MPS_DIRECTORY;
    candidates.push(match mps {
        Some(named) => (named, compute, Expected::NamedDirectory),
        None => (Path::new(usual), compute, Expected::Directory),
    });
    let (mut found, mut findings) = (Vec::new(), Vec::new());
    for (path, capability, expected) in candidates {
        if !capabilities.has(capability) {
            continue;
        }
        let channel = Channel {
            root: root.path(),
            path: path.to_owned(),
            expected,
        };
        match channel.open_below(root.as_root()) {
            Ok(opened) => found.extend(opened_at(root, channel, &opened)),
            Err(error) => match error.downcast::<io::Error>() {
                Ok(error) if expected == Expected::NamedDirectory && is_missing(&error) => {
                    findings.push(named_and_missing(root, path));
                }
                // The daemon's directory is closed to this user, for whom enroot and rootless engines start containers.
                Ok(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                Ok(error) => drop(root.noted::<()>(path, Err(error))),
                Err(refused) => findings.push(Finding::error(&refused)),
            },
        }
    }
    (found, findings)
}

/// Returns the opened file as a container gets it.
fn opened_at(root: &Tree, channel: Channel, opened: &Guarded) -> Option<Ipc> {
    Some(Ipc {
        source: HostPath::new(root.on_host(&opened.path)),
        is_fixed: opened.chooser == Chooser::NoOther,
        path: ContainerPath::new(&channel.path)?,
        channel,
    })
}

/// Finds a directory of root that containers can read, or `None` if it does not exist.
///
/// # Errors
/// The finding, if another user may have replaced the directory.
pub(crate) fn read_only_directory(root: &Tree, path: &Path) -> Result<Option<Ipc>, Finding> {
    let channel = Channel {
        root: root.path(),
        path: path.to_owned(),
        expected: Expected::ReadOnlyDirectory,
    };
    match channel.open_below(root.as_root()) {
        Ok(opened) => Ok(opened_at(root, channel, &opened)),
        Err(error) => match error.downcast::<io::Error>() {
            Ok(error) => Ok(root.noted(path, Err(error)).ok()),
            Err(refused) => Err(Finding::error(&refused)),
        },
    }
}

fn is_left_out(socket: &str, omit: Omit) -> bool {
    omit.persistenced && socket.contains("/nvidia-persistenced/")
        || omit.fabricmanager && socket.contains("/nvidia-fabricmanager/")
}

fn named_and_missing(root: &Tree, path: &Path) -> Finding {
    Finding::new(
        &catalog::LOCAL_SOURCE,
        format!(
            "the MPS directory {path:?} that config.toml names does not exist below {}",
            root.path()
        ),
        "start the MPS control daemon, or check CUDA_MPS_PIPE_DIRECTORY in environment of [nvidia-container-cli]",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_to_containers() {
        let (none, daemon) = (Chooser::NoOther, Chooser::Owner("/run/d".into(), 7));
        let others = Chooser::Others("/run/d".into());
        let socket = FileType::Socket;
        for (expected, kind, uid, names, chooser, why) in [
            (Expected::Socket, socket, 0, 1, &none, None),
            (Expected::Socket, socket, 0, 1, &daemon, None),
            (Expected::Socket, socket, 7, 1, &daemon, None),
            (
                Expected::Socket,
                socket,
                8,
                1,
                &daemon,
                Some("it belongs to user 8"),
            ),
            (
                Expected::Socket,
                socket,
                7,
                1,
                &none,
                Some("it belongs to user 7"),
            ),
            (
                Expected::Socket,
                socket,
                0,
                2,
                &daemon,
                Some("it is a hard link"),
            ),
            (
                Expected::Socket,
                socket,
                0,
                1,
                &others,
                Some("other users can write to its directory \"/run/d\""),
            ),
            (
                Expected::Socket,
                FileType::Directory,
                0,
                2,
                &none,
                Some("it is not a socket"),
            ),
            (
                Expected::Socket,
                FileType::RegularFile,
                0,
                1,
                &others,
                Some("it is not a socket"),
            ),
            (Expected::Directory, FileType::Directory, 0, 2, &none, None),
            (
                Expected::Directory,
                FileType::Directory,
                7,
                2,
                &none,
                Some("it belongs to user 7, not to root"),
            ),
            (
                Expected::Directory,
                FileType::Directory,
                0,
                2,
                &daemon,
                Some("\"/run/d\" belongs to user 7, not to root"),
            ),
            (
                Expected::Directory,
                FileType::Directory,
                0,
                2,
                &others,
                Some("other users can write to \"/run/d\""),
            ),
            (
                Expected::Directory,
                socket,
                0,
                1,
                &none,
                Some("it is not a directory"),
            ),
            (
                Expected::NamedDirectory,
                FileType::Directory,
                7,
                2,
                &others,
                None,
            ),
            (
                Expected::NamedDirectory,
                FileType::RegularFile,
                0,
                1,
                &none,
                Some("it is not a directory"),
            ),
        ] {
            let seen = Seen {
                kind,
                is_trusted: uid == 0,
                uid,
                has_other_names: names > 1,
                chooser,
            };
            assert_eq!(
                judge(expected, &seen).as_deref(),
                why,
                "{expected:?} {kind:?} {uid} {names} {chooser:?}"
            );
        }
    }
}
