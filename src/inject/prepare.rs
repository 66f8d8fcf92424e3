//! The one place that knows how each step is applied. It opens and checks the source of the step on the host, and clones the source
//! into a detached mount if the kernel supports that; what is left is a call of [`Applier`].

use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::FileType;

use base::paths::HostPath;
use base::read::read_known;
use base::sys::in_root::open_host_file;
use base::sys::mount::{Api, Label, MountAttrs};
use nvidia_host::driver::ipc::Expected;
use nvidia_host::edits::{Channel, ProcMask};
use nvidia_host::inventory::procfs::DRIVER_PROC;

use crate::inject::ApplyStep;
use crate::inject::apply::{Applier, MAX_PARAMS};
use crate::inject::files::source::Source;
use crate::inject::files::tmpfs::Directory;
use crate::plan::step::Step;

/// Opens the sources of a step on the host. Returns the closure that applies it in the container.
///
/// # Errors
/// If a source is missing, has changed since the plan was made, or cannot be mounted.
pub(super) fn prepare<'a>(
    step: &'a Step,
    api: Api,
    label: Option<&Label>,
) -> Result<ApplyStep<'a, Applier>> {
    Ok(match step {
        Step::MountFile { source, target, .. } => {
            let source = open_file(source, api)?;
            Box::new(move |container| container.mount(source, target))
        }
        Step::CopyFile { source, target, .. } => {
            let content = read_file(source)?;
            Box::new(move |container| container.copy(&content, target))
        }
        Step::MountIpc {
            channel, target, ..
        } => {
            let source = open_ipc(channel, api)?;
            match channel.expected {
                Expected::Socket => Box::new(move |container| container.mount(source, target)),
                Expected::Directory
                | Expected::NamedDirectory
                | Expected::ReadOnlyDirectory
                | Expected::MpsDirectory => {
                    Box::new(move |container| container.mount_directory(source, target))
                }
            }
        }
        Step::MountNode { node, own } => {
            let device = (node.major, node.minor);
            let source = open_node(&node.source, device, api)?;
            Box::new(move |container| {
                container.mount_node(source, &node.path, device, own.as_ref())
            })
        }
        Step::Link(link) => Box::new(|container| container.link(link)),
        Step::MountFiles { target, files } => {
            let files = files
                .iter()
                .map(|(name, content)| (name.into(), content.as_bytes().to_vec()))
                .collect();
            let directory = Directory::prepare(files, Vec::new(), api, label)?;
            Box::new(move |container| container.mount_files(directory, target))
        }
        Step::MaskProc(mask) => {
            let directory = prepare_mask(mask, api, label)?;
            Box::new(|container| container.mask_proc(directory))
        }
        Step::MaskParams => {
            let params = read_params()?;
            Box::new(move |container| container.mask_params(params.as_deref()))
        }
        Step::SetMode { target, mode } => Box::new(|container| container.set_mode(target, *mode)),
        Step::ListDirectories { first, others } => {
            Box::new(|container| container.list_directories(first, others))
        }
        Step::UpdateLinkerCache(entries) => {
            Box::new(|container| container.update_linker_cache(entries))
        }
    })
}

/// Opens a driver file. The decision found a regular file, and only root can replace it, so its type is not read again: that would be a
/// system call for each file. Nor would another type give the container anything of the host: the kernel mounts no directory on a file,
/// devices do not work on the mount, and the container resolves a symlink below its own root.
fn open_file(source: &HostPath, api: Api) -> Result<Source> {
    Source::open(source, MountAttrs::DRIVER_FILE, api)
}

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

fn open_node(source: &HostPath, device: (u32, u32), api: Api) -> Result<Source> {
    let opened = Source::open(source, MountAttrs::DEVICE_NODE, api)?;
    let stat = opened.stat()?;
    let is = (
        rustix::fs::major(stat.st_rdev),
        rustix::fs::minor(stat.st_rdev),
    );
    ensure!(
        FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && is == device,
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
