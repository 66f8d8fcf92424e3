//! Creates device nodes for a process that the mode of the host's nodes excludes, like runtimes do. The container's device
//! cgroup still decides about access to the device.
//!
//! The node is not created in the container's `/dev`, which may be the host's. The hook creates it on a tmpfs of its own,
//! bind-mounts it read-only, and unmounts the tmpfs. This also works with a user namespace: device nodes do not work on a file
//! system that was mounted in one (`SB_I_NODEV`), and the hook mounts the tmpfs outside.

use std::iter::once;

use anyhow::{Context, Result};
use nix::errno::Errno;

use base::paths::ContainerPath;
use base::report::errno_of;
use base::sys::mount::MountAttrs;
use findings::catalog;
use nvidia_host::driver::access::Permissions;

use super::{MountPoint, Target};
use crate::inject::directory::{Present, find_present};
use crate::inject::read_only::Scratch;
use crate::inject::source::Source;
use crate::inject::undo::StillMounted;
use crate::plan::process::Process;

impl Target {
    /// Mounts the host's node `source`, or one that is created for `own`.
    pub(in crate::inject) fn mount_node(
        &mut self,
        source: Source,
        target: &ContainerPath,
        device: (u32, u32),
        own: Option<&Process>,
    ) -> Result<()> {
        let at = self.mount_point(&source, target, Some(device))?;
        let Some(process) = own else { return self.mount_on(source, target, at) };
        if matches!(at, MountPoint::Present) {
            let dir = self.layout.parent(target)?;
            if let Present::Other(_, stat) = find_present(&dir, target.file_name())? {
                self.note_if_shut(target, process, Permissions::from_stat(&stat));
            }
            return Ok(());
        }
        // The tmpfs is mounted on the directory of the node for a moment, which must not propagate to the host either.
        let dir = self.layout.parent(target)?;
        self.layout.mounts.refuse_shared_dir(&dir)?;
        let scratch = Scratch::for_nodes(&dir, self.layout.label.as_ref())?;
        let created = scratch.create_node(device).map_err(anyhow::Error::from);
        let created = created.and_then(|node| Source::from_fd(node, None, MountAttrs::DEVICE_NODE, self.api));
        let put = match created {
            Ok(created) => self.mount_on(created, target, at),
            // The hook has no CAP_MKNOD, or its device cgroup forbids mknod(2). The host's node is mounted instead.
            Err(error) if errno_of(&error) == Some(Errno::EPERM) => {
                self.note_if_shut(target, process, Permissions::from_stat(source.stat()));
                self.mount_on(source, target, at)
            }
            Err(error) => Err(error.context("create a device node")),
        };
        scratch.unmount().context(StillMounted)?;
        put
    }

    /// Adds a finding if the process cannot open the node. Only for the first node: all nodes usually have the same owner and
    /// mode.
    fn note_if_shut(&mut self, target: &ContainerPath, process: &Process, permissions: Permissions) {
        let is_noted = self.layout.done.findings.iter().any(|finding| finding.kind == &catalog::NO_ACCESS);
        if !is_noted && !process.may_open(permissions) {
            self.layout.done.findings.extend(process.finding(once((target, permissions))));
        }
    }
}
