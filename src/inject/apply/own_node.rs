//! Creates device nodes for a process that the mode of the host's nodes excludes, like runtimes do. The container's device
//! cgroup still decides about access to the device.
//!
//! The node is not created in the container's `/dev`, which may be the host's. The hook creates it on a tmpfs of its own,
//! bind-mounts it read-only, and unmounts the tmpfs. This also works with a user namespace: device nodes do not work on a file
//! system that was mounted in one (`SB_I_NODEV`), and the hook mounts the tmpfs outside.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::io::Errno;

use base::paths::ContainerPath;
use base::report::errno_of;
use base::sys::mount::{Api, MountAttrs};
use nvidia_host::driver::access::Permissions;
use nvidia_host::edits::DeviceNode;

use super::{Applier, MountPoint};
use crate::inject::files::directory::{Present, find_present};
use crate::inject::files::source::Source;
use crate::inject::layer::overlay::Scratch;
use crate::inject::remove::undo::StillMounted;
use crate::plan::process::Process;

/// The nodes that the hook creates for a container.
#[derive(Debug)]
pub(in crate::inject) struct OwnNodes {
    /// The numbers of those that are not created yet
    missing: BTreeSet<(u32, u32)>,
    /// Those that are created and not mounted yet
    created: BTreeMap<(u32, u32), Source>,
}

impl OwnNodes {
    pub(in crate::inject) const fn new(missing: BTreeSet<(u32, u32)>) -> Self {
        Self {
            missing,
            created: BTreeMap::new(),
        }
    }
}

fn create(scratch: &Scratch, device: (u32, u32), api: Api) -> Result<Source> {
    Source::from_fd(
        scratch.create_node(device)?,
        None,
        MountAttrs::DEVICE_NODE,
        api,
    )
}

impl Applier {
    /// Mounts the host's node `source`, or one that is created for `own`.
    pub(super) fn mount_node(
        &mut self,
        source: Source,
        node: &DeviceNode,
        own: Option<&Process>,
    ) -> Result<()> {
        let (target, device) = (&node.path, (node.major, node.minor));
        let at = self.mount_point(&source, target, Some(device))?;
        let Some(process) = own else {
            return self.mount_on(source, target, at);
        };
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
        if let Some(scratch) = self.create_nodes(&dir, device)? {
            let mounted = self.mount_created(source, target, at, device, process);
            scratch.unmount().context(StillMounted)?;
            return mounted;
        }
        self.mount_created(source, target, at, device, process)
    }

    /// Mounts the node that was created, or the host's `source`.
    fn mount_created(
        &mut self,
        source: Source,
        target: &ContainerPath,
        at: MountPoint,
        device: (u32, u32),
        process: &Process,
    ) -> Result<()> {
        if let Some(created) = self.own_nodes.created.remove(&device) {
            return self.mount_on(created, target, at);
        }
        self.note_if_shut(target, process, Permissions::from_stat(&source.stat()?));
        self.mount_on(source, target, at)
    }

    /// Creates all nodes of the container with one tmpfs, or this one if the kernel cannot detach mounts. Then the tmpfs is returned,
    /// because it must stay until the node is mounted.
    fn create_nodes(&mut self, dir: &OwnedFd, device: (u32, u32)) -> Result<Option<Scratch>> {
        let devices = match self.api {
            Api::Detached => std::mem::take(&mut self.own_nodes.missing),
            Api::InPlace => BTreeSet::from([device]),
        };
        if devices.is_empty() {
            return Ok(None);
        }
        let scratch = Scratch::for_nodes(dir, self.layout.label.as_ref())?;
        let created = devices
            .into_iter()
            .map(|device| Ok((device, create(&scratch, device, self.api)?)));
        match created.collect::<Result<BTreeMap<_, _>>>() {
            Ok(created) => self.own_nodes.created = created,
            // The hook has no CAP_MKNOD, or its device cgroup forbids mknod(2). The host's nodes are mounted instead.
            Err(error) if errno_of(&error) == Some(Errno::PERM) => {}
            Err(error) => {
                scratch.unmount().context(StillMounted)?;
                return Err(error.context("create a device node"));
            }
        }
        if self.api == Api::InPlace {
            return Ok(Some(scratch));
        }
        scratch.unmount().context(StillMounted)?;
        Ok(None)
    }

    /// Adds a finding if the process cannot open the node. Only for the first node: all nodes usually have the same owner and
    /// mode.
    fn note_if_shut(
        &mut self,
        target: &ContainerPath,
        process: &Process,
        permissions: Permissions,
    ) {
        let findings = &mut self.layout.done.findings;
        findings.extend(process.shut_out(target, permissions, findings));
    }
}
