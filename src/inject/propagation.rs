//! Mounts that pass on what is mounted below them: on such a one, ours would appear on the host as well, and stay there when
//! the container ends.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;

use anyhow::{Context, Result};

use super::mountinfo;
use crate::error::Failure;
use crate::finding::catalog;
use crate::sys::{mount, proc_file};

/// What is known of it in the mount namespace that we are in.
#[derive(Debug)]
pub(super) struct Propagation {
    /// Directories of which it is known that nobody else sees what is mounted in them
    private: Vec<Rc<OwnedFd>>,
    /// Ids of shared mounts, where the kernel does not say that of a single one
    shared: OnceCell<BTreeSet<u64>>,
}

impl Propagation {
    pub(super) const fn new() -> Self {
        Self { private: Vec::new(), shared: OnceCell::new() }
    }

    /// Refuses to mount on `point` if others would see it.
    pub(super) fn refuse_shared(&self, point: &OwnedFd) -> Result<()> {
        let is_shared = match mount::statmount::facts(point) {
            Some(facts) => facts.is_shared,
            None => self.is_listed_as_shared(point)?,
        };
        if is_shared {
            return Err(anyhow::Error::new(Failure::new(
                &catalog::SHARED,
                "it lies in a volume with shared propagation, so the host would see the mount too",
                "mount that volume with rslave or rprivate propagation",
            )));
        }
        Ok(())
    }

    /// The same for what is made in a directory.
    pub(super) fn refuse_shared_dir(&mut self, dir: &Rc<OwnedFd>) -> Result<()> {
        if !self.private.iter().any(|known| Rc::ptr_eq(known, dir)) {
            self.refuse_shared(dir)?;
            self.private.push(Rc::clone(dir));
        }
        Ok(())
    }

    fn is_listed_as_shared(&self, point: &OwnedFd) -> Result<bool> {
        if self.shared.get().is_none() {
            let mountinfo = proc_file::read("/proc/self/mountinfo").context("read \"/proc/self/mountinfo\"")?;
            self.shared.set(mountinfo::shared(&mountinfo)).ok();
        }
        let shared = self.shared.get().filter(|shared| !shared.is_empty());
        let Some(shared) = shared else { return Ok(false) };
        let info = proc_file::read_text(format!("/proc/self/fdinfo/{}", point.as_raw_fd()))?;
        Ok(mountinfo::mount_id(&info).is_none_or(|id| shared.contains(&id)))
    }
}
