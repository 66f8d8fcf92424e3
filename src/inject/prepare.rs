//! Opens and checks the source of each step on the host, and clones it into a detached mount if the kernel supports that. What is left
//! is a call of `Applier`.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::FileType;

use base::paths::{ContainerPath, HostPath};
use base::read::read_known;
use base::sys::in_root::open_host_file;
use base::sys::mount::{Api, Label, MountAttrs};
use nvidia_host::driver::ipc::Expected;
use nvidia_host::edits::placement::Link;
use nvidia_host::edits::{Channel, DeviceNode, ProcMask};
use nvidia_host::inventory::procfs::DRIVER_PROC;

use crate::inject::files::source::Source;
use crate::inject::files::tmpfs::Directory;
use crate::plan::process::Process;
use crate::plan::step::{CacheEntry, Step};

/// A step whose sources are open and checked.
pub(super) enum Prepared<'a> {
    Mount(Source, &'a ContainerPath),
    MountDirectory(Source, &'a ContainerPath),
    /// Mount the host's node, or one that is created for this process
    MountNode(Source, &'a DeviceNode, Option<&'a Process>),
    MountFiles(Directory, &'a ContainerPath),
    Copy(Vec<u8>, &'a ContainerPath),
    Link(&'a Link),
    MaskProc(Directory),
    /// The content of the host's file; `None` if it is missing
    MaskParams(Option<Vec<u8>>),
    SetMode(&'a ContainerPath, u32),
    ListDirectories {
        first: &'a [ContainerPath],
        others: &'a [ContainerPath],
    },
    UpdateLinkerCache(&'a [CacheEntry]),
}

/// Opens the sources of a step on the host.
///
/// # Errors
/// If a source is missing, has changed since the plan was made, or cannot be mounted.
pub(super) fn prepare<'a>(step: &'a Step, api: Api, label: Option<&Label>) -> Result<Prepared<'a>> {
    Ok(match step {
        Step::MountFile { source, target, .. } => Prepared::Mount(open_file(source, api)?, target),
        Step::CopyFile { source, target, .. } => Prepared::Copy(read_file(source)?, target),
        Step::MountIpc {
            channel, target, ..
        } => {
            let source = open_ipc(channel, api)?;
            match channel.expected {
                Expected::Socket => Prepared::Mount(source, target),
                Expected::Directory
                | Expected::NamedDirectory
                | Expected::ReadOnlyDirectory
                | Expected::MpsDirectory => Prepared::MountDirectory(source, target),
            }
        }
        Step::MountNode { node, own } => {
            Prepared::MountNode(open_node(node, api)?, node, own.as_ref())
        }
        Step::Link(link) => Prepared::Link(link),
        Step::MountFiles { target, files } => {
            let files = files
                .iter()
                .map(|(name, content)| (name.into(), content.as_bytes().to_vec()))
                .collect();
            let directory = Directory::prepare(files, Vec::new(), api, label)?;
            Prepared::MountFiles(directory, target)
        }
        Step::MaskProc(mask) => Prepared::MaskProc(prepare_mask(mask, api, label)?),
        Step::MaskParams => Prepared::MaskParams(read_params()?),
        Step::SetMode { target, mode } => Prepared::SetMode(target, *mode),
        Step::ListDirectories { first, others } => Prepared::ListDirectories { first, others },
        Step::UpdateLinkerCache(entries) => Prepared::UpdateLinkerCache(entries),
    })
}

/// Opens a driver file. The decision found a regular file, and only root can replace it, so its type is not read again: that would be a
/// system call for each file. Nor would another type give the container anything of the host: the kernel mounts no directory on a file,
/// devices do not work on the mount, and the container resolves a symlink below its own root.
fn open_file(source: &HostPath, api: Api) -> Result<Source> {
    Source::open(source, MountAttrs::DRIVER_FILE, api)
}

/// Upper limit for the params file in bytes; it has about a dozen lines.
pub(super) const MAX_PARAMS: usize = 64 << 10;
/// The limit for files that are copied. The largest description of a driver has 4 KiB.
const MAX_COPY: usize = 1 << 20;

fn read_file(source: &HostPath) -> Result<Vec<u8>> {
    let (file, stat) =
        open_host_file(source.as_path()).with_context(|| format!("open {source}"))?;
    read_known(&file, &stat, MAX_COPY)
}

fn read_params() -> Result<Option<Vec<u8>>> {
    match open_host_file(&Path::new(DRIVER_PROC).join("params")) {
        Ok((file, stat)) => read_known(&file, &stat, MAX_PARAMS).map(Some),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn open_node(node: &DeviceNode, api: Api) -> Result<Source> {
    let source = &node.source;
    let opened = Source::open(source, MountAttrs::DEVICE_NODE, api)?;
    let stat = opened.stat()?;
    let is = (
        rustix::fs::major(stat.st_rdev),
        rustix::fs::minor(stat.st_rdev),
    );
    ensure!(
        FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
            && is == (node.major, node.minor),
        "{source} is now another device"
    );
    Ok(opened)
}

/// Opens the socket or directory again and checks the descriptor, because the path may have changed since the plan was made.
fn open_ipc(channel: &Channel, api: Api) -> Result<Source> {
    let opened = channel.open()?;
    let path = channel
        .root
        .as_path()
        .join(opened.path.strip_prefix("/").unwrap_or(&opened.path));
    let attrs = match channel.expected {
        Expected::Socket | Expected::ReadOnlyDirectory | Expected::MpsDirectory => {
            MountAttrs::READ_ONLY
        }
        Expected::Directory | Expected::NamedDirectory => MountAttrs::SHARED_DIRECTORY,
    };
    Source::from_fd(opened.fd, Some(HostPath::new(path)), attrs, api)
}

fn prepare_mask(mask: &ProcMask, api: Api, label: Option<&Label>) -> Result<Directory> {
    let mut mounts = Vec::new();
    for (path, source) in &mask.mounts {
        let opened = Source::open(source, MountAttrs::PROC_FILE, api)?;
        let kind = FileType::from_raw_mode(opened.stat()?.st_mode);
        mounts.push((path.clone(), kind, opened));
    }
    Directory::prepare(mask.files.clone(), mounts, api, label)
}
