//! A container that waits at a hook: its rootfs, opened once, and its mount namespace.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::OFlags;

use crate::error::Failure;
use crate::lower::live::RootfsFacts;
use crate::sys::in_root::Root;
use crate::sys::ns::MountNs;

/// A container before pivot_root, seen from the host's side.
#[derive(Debug)]
pub struct Container {
    rootfs: Root,
    mount_ns: MountNs,
    /// Who owns files that are made in it: its root user on the host.
    owner: (u32, u32),
}

impl Container {
    /// Opens the container whose init process is `pid`.
    ///
    /// The rootfs is opened through `/proc/<pid>/root`, that is in the container's mount namespace, where `/dev` and
    /// `/proc` and volumes are mounted below it; this is the only time that its path is used.
    ///
    /// # Errors
    /// If the process is gone, or the rootfs is not there.
    pub fn open(pid: i32, rootfs: &Path) -> Result<Self> {
        let open = || -> Result<Self> {
            ensure!(rootfs != Path::new("/"), "its rootfs is \"/\"");
            let owner = std::fs::metadata(format!("/proc/{pid}")).context("its init process is gone")?;
            let host = Root::open(Path::new(&format!("/proc/{pid}/root")))?;
            let rootfs = host.open_root(rootfs).with_context(|| format!("open its rootfs {rootfs:?}"))?;
            Ok(Self { rootfs, mount_ns: MountNs::of(pid)?, owner: (owner.uid(), owner.gid()) })
        };
        open().with_context(|| {
            Failure::new(
                format!("cannot open the container of process {pid}"),
                "the hook must run at the prestart or createRuntime stage, before the container's process does; \
                 check \"stages\" in the hook's JSON file",
            )
        })
    }

    /// What lowering must know.
    #[must_use]
    pub fn facts(&self) -> RootfsFacts {
        facts(&self.rootfs)
    }

    /// The same of a rootfs that no process has mounted; the defaults if it is not there.
    #[must_use]
    pub fn facts_of(rootfs: &Path) -> RootfsFacts {
        Root::open(rootfs).map(|rootfs| facts(&rootfs)).unwrap_or_default()
    }

    /// Enters its mount namespace. There is no way back.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn enter(self) -> Result<Root> {
        let owner_is_us = self.owner == (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        self.mount_ns.enter().context("cannot enter the container's mount namespace")?;
        if !owner_is_us {
            let (uid, gid) = self.owner;
            crate::sys::process::create_files_as(uid, gid)
                .with_context(|| format!("cannot create files as the container's root user {uid}:{gid}"))?;
        }
        Ok(self.rootfs)
    }
}

/// Decided by what exists, whatever it is.
fn facts(rootfs: &Root) -> RootfsFacts {
    let has = |path: &str| rootfs.open_at(Path::new(path), OFlags::PATH).is_ok();
    RootfsFacts { debian: has("etc/debian_version"), lib32: has("usr/lib32") }
}

/// Whether an error means that there is nothing by that name.
#[must_use]
pub fn is_missing(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}
