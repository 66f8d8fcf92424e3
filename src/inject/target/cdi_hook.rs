//! What only the hook entries of NVIDIA's CDI specs ask for.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FileType, Mode, OFlags};

use base::paths::ContainerPath;
use base::sys::in_root::{fd_path, open_regular};
use nvidia_host::edits::build;

use super::{Done, Target};
use crate::inject::container::is_missing;
use crate::inject::directory::{Present, find_present};
use crate::inject::read_only;

/// Upper limit for the params file in bytes; it has about a dozen lines.
const MAX_PARAMS: usize = 64 << 10;

impl Target {
    /// Hides the one file by which the driver's libraries are told to make device nodes: of GPUs that the container did not
    /// ask for, too (CVE-2021-1056). Where the switch is off already, nothing is done.
    pub(super) fn mask_params(&mut self) -> Result<()> {
        let (dir, name) = (Path::new("proc/driver/nvidia"), OsStr::new("params"));
        let open = match self.rootfs.open_at(dir, OFlags::PATH | OFlags::DIRECTORY) {
            Ok(open) => open,
            // No driver in this kernel, or a container without /proc.
            Err(error) if is_missing(&error) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let Present::Other(point, _) = find_present(&open, name)? else { return Ok(()) };
        let text = base::read::read_file_limited(&open_regular(point.try_clone()?)?, MAX_PARAMS).context("read it")?;
        let Some(masked) = build::mask_params(&String::from_utf8_lossy(&text)) else { return Ok(()) };
        self.known.refuse_shared(&open)?;
        self.known.refuse_shared(&point)?;
        self.forget_directories();
        let content = [masked.into_bytes().into()];
        let hidden = read_only::hide_file(&open, name, &point, &content, self.label.as_ref())?;
        self.done.push(Done::Mounted(hidden.into()));
        Ok(())
    }

    /// Only of files on the root file system and on a /dev of the container's own: on a volume, the host's file would be
    /// changed, and a device node may be mounted from the host.
    pub(super) fn set_mode(&mut self, target: &ContainerPath, mode: u32) -> Result<()> {
        let file = match self.rootfs.open_at(target.relative(), OFlags::PATH | OFlags::NOFOLLOW) {
            Ok(file) => file,
            Err(error) if is_missing(&error) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let stat = rustix::fs::fstat(&file)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        ensure!(matches!(kind, FileType::Directory | FileType::RegularFile), "it is neither a directory nor a file");
        let file = Rc::new(file);
        let is_own = self.may_create(&file, target.relative())?;
        ensure!(is_own, "it is on a volume, and so the host's");
        // The magic link means the open file, not its name; fchmod(2) takes no descriptor of O_PATH.
        rustix::fs::chmod(fd_path(file.as_fd()), Mode::from_raw_mode(mode)).context("change it")
    }
}
