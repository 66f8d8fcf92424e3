//! Steps that only the hook entries of NVIDIA's CDI specs need.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FileType, Mode, OFlags};

use base::paths::ContainerPath;
use base::sys::in_root::fd_path;
use nvidia_host::edits::build;

use super::{Applier, Change};
use crate::inject::files::directory::{Present, find_present};
use crate::inject::layer::overlay;
use crate::inject::prepare::MAX_PARAMS;

impl Applier {
    /// Mounts a copy of /proc/driver/nvidia/params with `ModifyDeviceFiles: 0`. With 1, the driver's libraries create device
    /// nodes, also of GPUs that the container did not request (CVE-2021-1056). `params` is the file of the host.
    pub(super) fn mask_params(&mut self, params: Option<&[u8]>) -> Result<()> {
        let (dir, name) = (Path::new("proc/driver/nvidia"), OsStr::new("params"));
        let Some(open) = self
            .layout
            .rootfs
            .open_existing(dir, OFlags::PATH | OFlags::DIRECTORY)?
        else {
            return Ok(()); // the container has no /proc, or the driver is not loaded in this kernel
        };
        let Present::Other(point, _) = find_present(&open, name)? else {
            return Ok(());
        };
        let copy = match self.layout.rootfs.open_stored(point.try_clone()?) {
            Ok(copy) => Some(base::read::read_file_limited(&copy, MAX_PARAMS).context("read it")?),
            // A file of a proc file system is not read in a container, because it may be another one. The kernel module shows
            // the same text everywhere.
            Err(_) => None,
        };
        let Some(text) = copy.as_deref().or(params) else {
            return Ok(());
        };
        let Some(masked) = build::mask_params(&String::from_utf8_lossy(text)) else {
            return Ok(());
        };
        self.layout.mounts.refuse_shared(&open)?;
        self.layout.mounts.refuse_shared(&point)?;
        self.layout.forget_directories();
        let hidden = overlay::hide_file(
            &open,
            name,
            &point,
            masked.as_bytes(),
            self.layout.label.as_ref(),
        )?;
        self.layout.done.add(Change::Mounted(hidden.into()));
        Ok(())
    }

    /// Changes the mode of a file or directory on the root file system or on the container's own /dev. Files on volumes and
    /// device nodes are refused, because they can belong to the host.
    pub(super) fn set_mode(&mut self, target: &ContainerPath, mode: u32) -> Result<()> {
        let Some(file) = self
            .layout
            .rootfs
            .open_existing(target.relative(), OFlags::PATH | OFlags::NOFOLLOW)?
        else {
            return Ok(());
        };
        let stat = rustix::fs::fstat(&file)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        ensure!(
            matches!(kind, FileType::Directory | FileType::RegularFile),
            "it is neither a directory nor a file"
        );
        let file = Rc::new(file);
        let is_own = self.layout.may_create(&file, target.relative())?;
        ensure!(is_own, "it is on a volume and belongs to the host");
        // fchmod(2) rejects an O_PATH descriptor. The magic link in /proc/self/fd leads to the open file, not to its name.
        rustix::fs::chmod(fd_path(file.as_fd()), Mode::from_raw_mode(mode)).context("chmod")
    }
}
