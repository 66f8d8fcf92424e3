//! Device nodes for a process that the mode of the host's does not let in: created for the container, as runtimes do it. The
//! container's device cgroup decides about the device as before.
//!
//! Nothing is created in the container's own `/dev`, which may be the host's: a node is created on a tmpfs of the hook's, mounted
//! like a node of the host's, read-only, and the tmpfs is unmounted again. For a container with a user namespace there is no other
//! way: a file system that was mounted in such a namespace has no working device nodes (`SB_I_NODEV`), and the hook's tmpfs is not.

use std::iter::once;

use anyhow::{Context, Result};
use nix::errno::Errno;

use base::paths::ContainerPath;
use base::report::{catalog, errno_of};
use base::sys::mount::MountAttrs;
use nvidia_host::cdi::lower::NodeFacts;

use super::super::StillMounted;
use super::super::directory::{Present, find_present};
use super::super::read_only::Scratch;
use super::super::source::Source;
use super::{Existing, Target};
use crate::lower::access::Process;

impl Target {
    /// Mounts the host's node `source`, or one that is created for `own`.
    pub(super) fn mount_node(
        &mut self,
        source: Source,
        target: &ContainerPath,
        device: (u32, u32),
        own: Option<&Process>,
    ) -> Result<()> {
        let place = self.place(&source, target, Some(device))?;
        let Some(process) = own else { return self.put(source, target, place) };
        if matches!(place, Existing::Asked) {
            let dir = self.parent(target)?;
            if let Present::Other(_, stat) = find_present(&dir, target.file_name())? {
                self.note_if_shut(target, process, NodeFacts::from_stat(&stat));
            }
            return Ok(());
        }
        // The tmpfs is mounted on the node's directory for a moment: others must not see that either.
        let dir = self.parent(target)?;
        self.known.refuse_shared_dir(&dir)?;
        let scratch = Scratch::for_nodes(&dir, self.label.as_ref())?;
        let created = scratch.create_node(device).map_err(anyhow::Error::from);
        let created = created.and_then(|node| Source::copy_of(&node, MountAttrs::DEVICE_NODE, self.api));
        let put = match created {
            Ok(created) => self.put(created, target, place),
            // Without CAP_MKNOD, or in a device cgroup that does not allow it.
            Err(error) if errno_of(&error) == Some(Errno::EPERM) => {
                self.note_if_shut(target, process, NodeFacts::from_stat(source.stat()));
                self.put(source, target, place)
            }
            Err(error) => Err(error.context("create a device node")),
        };
        scratch.unmount().context(StillMounted)?;
        put
    }

    /// Once: what is true of one node is mostly true of all.
    fn note_if_shut(&mut self, target: &ContainerPath, process: &Process, facts: NodeFacts) {
        let is_noted = self.findings.iter().any(|finding| finding.kind == &catalog::NO_ACCESS);
        if !is_noted && !process.may_open(facts) {
            self.findings.extend(process.finding(once((target, facts))));
        }
    }
}
