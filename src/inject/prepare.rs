//! Opens and checks the source of each step on the host, and clones it into a detached mount if the kernel supports that.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::FileType;

use base::paths::{ContainerPath, HostPath};
use base::read::read_file_limited;
use base::sys::in_root::open_host_file;
use base::sys::mount::{Api, Label, MountAttrs};
use nvidia_host::driver::ipc::Expected;
use nvidia_host::edits::placement::Link;
use nvidia_host::edits::{Channel, ProcMask};
use nvidia_host::inventory::procfs::DRIVER_PROC;

use super::source::Source;
use super::tmpfs::Directory;
use crate::plan::process::Process;
use crate::plan::step::{CacheEntry, Step};

/// A step with its opened sources.
#[derive(Debug)]
pub(crate) enum Prepared<'a> {
    /// Mount a regular file or a socket.
    Mount {
        source: Source,
        target: &'a ContainerPath,
    },
    /// Create a file, unless the image has one.
    Copy {
        content: Vec<u8>,
        target: &'a ContainerPath,
    },
    MountNode {
        /// the opened node of the host
        source: Source,
        target: &'a ContainerPath,
        /// major and minor number
        device: (u32, u32),
        /// the process that cannot open the host's node, so that the hook creates one for the container
        own: Option<&'a Process>,
    },
    MountDirectory {
        source: Source,
        target: &'a ContainerPath,
    },
    MountFiles {
        directory: Directory,
        target: &'a ContainerPath,
    },
    /// As in [`Step::Link`].
    Link(&'a Link),
    /// Mount a directory with the container's GPUs on /proc/driver/nvidia.
    MaskProc(Directory),
    /// As in [`Step::MaskParams`], with the host's file. `None` if the driver is not loaded.
    MaskParams(Option<Vec<u8>>),
    /// As in [`Step::SetMode`].
    SetMode {
        target: &'a ContainerPath,
        mode: u32,
    },
    /// As in [`Step::ListDirectories`].
    ListDirectories {
        /// directories that are searched before all others
        first: &'a [ContainerPath],
        /// directories that are added unless the image's configuration lists them
        others: &'a [ContainerPath],
    },
    /// As in [`Step::UpdateLinkerCache`].
    UpdateLinkerCache(&'a [CacheEntry]),
}

/// Does the part of a step that needs only the host.
///
/// # Errors
/// If a source is missing, has changed since the plan was made, or cannot be mounted.
pub(crate) fn prepare<'a>(step: &'a Step, api: Api, label: Option<&Label>) -> Result<Prepared<'a>> {
    Ok(match step {
        Step::MountFile { source, target, .. } => Prepared::Mount { source: open_file(source, api)?, target },
        Step::CopyFile { source, target, .. } => Prepared::Copy { content: read_file(source)?, target },
        Step::MountIpc { channel, target, .. } => prepare_ipc(channel, target, api)?,
        Step::MountNode { node, own } => {
            let device = (node.major, node.minor);
            let source = open_node(&node.source, device, api)?;
            Prepared::MountNode { source, target: &node.path, device, own: own.as_ref() }
        }
        Step::Link(link) => Prepared::Link(link),
        Step::MountFiles { target, files } => {
            let files = files.iter().map(|(name, content)| (name.into(), content.as_bytes().to_vec())).collect();
            Prepared::MountFiles { directory: Directory::prepare(files, Vec::new(), api, label)?, target }
        }
        Step::MaskProc(mask) => Prepared::MaskProc(prepare_mask(mask, api, label)?),
        Step::MaskParams => Prepared::MaskParams(read_params()?),
        Step::SetMode { target, mode } => Prepared::SetMode { target, mode: *mode },
        Step::ListDirectories { first, others } => Prepared::ListDirectories { first, others },
        Step::UpdateLinkerCache(entries) => Prepared::UpdateLinkerCache(entries),
    })
}

fn open_file(source: &HostPath, api: Api) -> Result<Source> {
    Source::open(source, MountAttrs::DRIVER_FILE, api, |kind, _| {
        ensure!(kind == FileType::RegularFile, "{source} was replaced and is not a regular file");
        Ok(())
    })
}

/// The limit for files that are copied. The largest description of a driver has 4 KiB.
const MAX_COPY: usize = 1 << 20;

fn read_file(source: &HostPath) -> Result<Vec<u8>> {
    let (file, _) = open_host_file(source.as_path()).with_context(|| format!("open {source}"))?;
    read_file_limited(&file, MAX_COPY)
}

/// Upper limit for the params file in bytes; it has about a dozen lines.
pub(super) const MAX_PARAMS: usize = 64 << 10;

fn read_params() -> Result<Option<Vec<u8>>> {
    match open_host_file(&Path::new(DRIVER_PROC).join("params")) {
        Ok((file, _)) => read_file_limited(&file, MAX_PARAMS).map(Some),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn open_node(source: &HostPath, device: (u32, u32), api: Api) -> Result<Source> {
    Source::open(source, MountAttrs::DEVICE_NODE, api, |kind, stat| {
        let is = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        ensure!(kind == FileType::CharacterDevice && is == device, "{source} is now another device");
        Ok(())
    })
}

/// Opens the socket or directory again and checks the descriptor, because the path may have changed since the plan was made.
fn prepare_ipc<'a>(channel: &Channel, target: &'a ContainerPath, api: Api) -> Result<Prepared<'a>> {
    let opened = channel.open()?;
    let path = channel.root.as_path().join(opened.path.strip_prefix("/").unwrap_or(&opened.path));
    let path = Some(HostPath::new(path));
    Ok(match channel.expected {
        Expected::Socket => {
            Prepared::Mount { source: Source::from_fd(opened.fd, path, MountAttrs::SOCKET, api)?, target }
        }
        Expected::Directory | Expected::NamedDirectory => Prepared::MountDirectory {
            source: Source::from_fd(opened.fd, path, MountAttrs::SHARED_DIRECTORY, api)?,
            target,
        },
    })
}

fn prepare_mask(mask: &ProcMask, api: Api, label: Option<&Label>) -> Result<Directory> {
    let mut mounts = Vec::new();
    for (path, source) in &mask.mounts {
        let mut found = FileType::Unknown;
        let opened = Source::open(source, MountAttrs::PROC_FILE, api, |kind, _| {
            found = kind;
            Ok(())
        })?;
        mounts.push((path.clone(), found, opened));
    }
    Directory::prepare(mask.files.clone(), mounts, api, label)
}
