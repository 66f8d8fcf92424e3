//! Foresees what a start would report about a container's files, for `plan`. Nothing is changed.
//!
//! It goes through the steps like [`apply`](mod@super::apply) and takes the same decisions ([`decide`](super::apply::decide)). What a step would
//! create is only noted, because later steps find it there.

mod ground;
mod linker;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::Stat;

use base::paths::{ContainerPath, HostPath};
use base::report::{Finding, classify};
use base::sys::in_root::Root;
use findings::catalog;
use nvidia_host::driver::access::Permissions;
use nvidia_host::driver::ipc::Expected;
use nvidia_host::edits::placement::{Link, RootfsFacts};
use nvidia_host::edits::{DeviceNode, Need};

use super::apply::decide::{
    CopyAt, LinkAt, MountAt, Mounting, copy_at, directory_at, hidden, hides_file, link_at, mask_at,
    mount_at,
};
use super::container::host_dev::HostDev;
use super::container::mounts::refuse_shared;
use super::container::{compat_libraries, facts};
use super::layer::remounted::ReadOnlyMounts;
use super::{INSPECT, omitted};
use crate::oci::SpecView;
use crate::plan::process::Process;
use crate::plan::step::Step;
use ground::{Has, Made};
use view::View;

/// A container whose start is foreseen.
#[derive(Debug)]
pub(crate) struct Foresight<'a> {
    view: View,
    spec: &'a SpecView,
    host_dev: HostDev,
    read_only: ReadOnlyMounts,
    /// Whether the container requires the names of the current step
    need: Need,
    findings: Vec<Finding>,
    /// What earlier steps would have created, by the path without links
    made: BTreeMap<PathBuf, Made>,
    /// The files that earlier steps would have mounted, by device and inode number
    placed: Vec<(u64, u64)>,
    /// The directories, without links, that earlier steps would have covered with layers
    layers: Vec<PathBuf>,
}

/// What a start would report.
#[derive(Debug, Default)]
pub(crate) struct Foreseen {
    pub findings: Vec<Finding>,
    /// The error with which the container would not start
    pub error: Option<Finding>,
    /// Paths at which config.json mounts something that is not visible from here
    pub unknown: BTreeSet<PathBuf>,
}

impl<'a> Foresight<'a> {
    /// Examines the container of this config.json. `root`: its root file system. `is_mounted`: the container has a process, so the
    /// mounts exist.
    pub(crate) fn new(root: Root, spec: &'a SpecView, is_mounted: bool) -> Self {
        Self {
            view: View::new(root, &spec.mounts, is_mounted),
            spec,
            host_dev: HostDev::find(),
            read_only: ReadOnlyMounts::new(&spec.mounts),
            need: Need::Required,
            findings: Vec::new(),
            made: BTreeMap::new(),
            placed: Vec::new(),
            layers: Vec::new(),
        }
    }

    /// Returns the facts about the root file system that decide which steps are needed.
    pub(crate) fn facts(&self) -> RootfsFacts {
        facts(&self.view)
    }

    /// Returns the names in the image's directory of CUDA compatibility libraries; `None` if they must not be used with this driver.
    pub(crate) fn compat_libraries(
        &self,
        dir: &ContainerPath,
        host_driver: &str,
        host_cuda: &str,
    ) -> Option<BTreeSet<std::ffi::OsString>> {
        compat_libraries(&self.view, dir, host_driver, host_cuda)
    }

    /// Goes through the steps, like a start: an optional step that fails becomes a finding, and a required one ends it.
    pub(crate) fn steps(mut self, steps: &[Step]) -> Foreseen {
        let mut error = None;
        for step in steps {
            self.need = step.need();
            let Err(failed) = self.step(step).with_context(|| format!("cannot {step}")) else {
                continue;
            };
            if self.need == Need::Required {
                let failed = classify(failed, &catalog::IN_THE_WAY, INSPECT);
                error = Some(Finding::error(&failed));
                break;
            }
            self.findings.extend(omitted(step, &failed));
        }
        Foreseen {
            findings: self.findings,
            error,
            unknown: self.view.unknown(),
        }
    }

    fn step(&mut self, step: &Step) -> Result<()> {
        match step {
            Step::MountFile { source, target, .. } => self.mount(source, target, None).map(drop),
            Step::CopyFile { target, .. } => self.copy(target),
            Step::MountIpc {
                channel,
                source,
                target,
            } => match channel.expected {
                Expected::Socket => self.mount(source, target, None).map(drop),
                Expected::Directory
                | Expected::NamedDirectory
                | Expected::ReadOnlyDirectory
                | Expected::MpsDirectory => self.directory_point(target),
            },
            Step::MountNode { node, own } => self.node(node, own.as_ref()),
            Step::Link(link) => self.link(link),
            Step::MountFiles { target, .. } => self.directory_point(target),
            Step::MaskProc(_) => self.mask_proc(),
            Step::ListDirectories { first, others } => self.list_directories(first, others),
            Step::UpdateLinkerCache(entries) => self.update_linker_cache(entries),
            // Only the entries of NVIDIA's CDI specs have these.
            Step::MaskParams | Step::SetMode { .. } => Ok(()),
        }
    }

    /// Foresees the mount of a file. Returns the node that is already there.
    fn mount(
        &mut self,
        source: &HostPath,
        target: &ContainerPath,
        device: Option<(u32, u32)>,
    ) -> Result<Option<Stat>> {
        // A start creates missing device nodes on the host first.
        let source = rustix::fs::stat(source.as_path()).ok();
        let id = source.map(|source| (source.st_dev, source.st_ino));
        let (dir, has) = self.make(target)?;
        let file = Mounting {
            source: id.unwrap_or_default(),
            device,
            placed: &self.placed,
        };
        let at = mount_at(has.seen(), file)?;
        if let MountAt::Over { hides: true } | MountAt::InsteadOfLink { hides: true } = at {
            self.findings.push(hidden(target));
        }
        match at {
            MountAt::Present => return Ok(has.stat()),
            MountAt::InsteadOfLink { .. } => self.replace(&dir, target)?,
            MountAt::Over { .. } => refuse_shared(self.is_shared_at(&dir, target))?,
            MountAt::Free => refuse_shared(self.is_shared(&dir))?,
        }
        self.placed.extend(id);
        if let Some(source) = source {
            self.note(&dir, target, Made::Mounted(Box::new(source)));
        }
        Ok(None)
    }

    fn node(&mut self, node: &DeviceNode, own: Option<&Process>) -> Result<()> {
        let number = (Some(i64::from(node.major)), Some(i64::from(node.minor)));
        let path = node.path.absolute();
        let mut listed = self.spec.devices.iter();
        // The runtime creates it.
        if listed.any(|device| device.path == path && (device.major, device.minor) == number) {
            return Ok(());
        }
        let present = self.mount(&node.source, &node.path, Some((node.major, node.minor)))?;
        if let (Some(present), Some(process)) = (present, own) {
            let permissions = Permissions::from_stat(&present);
            self.findings
                .extend(process.shut_out(&node.path, permissions, &self.findings));
        }
        Ok(())
    }

    fn copy(&mut self, target: &ContainerPath) -> Result<()> {
        let (dir, has) = self.make(target)?;
        if copy_at(has.seen()) == CopyAt::InsteadOfCopy {
            self.replace(&dir, target)?;
        }
        Ok(())
    }

    fn link(&mut self, link: &Link) -> Result<()> {
        let text = Path::new(&link.text);
        let (dir, has) = self.make(&link.link)?;
        match link_at(has.seen(), text)? {
            LinkAt::Present => return Ok(()),
            LinkAt::Free => {}
            LinkAt::InsteadOfLink => self.replace(&dir, &link.link)?,
            LinkAt::Over => return self.mount_over(&dir, &has, link),
        }
        self.note(&dir, &link.link, Made::Link(text.to_owned()));
        Ok(())
    }

    fn mount_over(&mut self, dir: &ground::Dir, has: &Has, link: &Link) -> Result<()> {
        let Some(file) = has.stat() else {
            return Ok(());
        };
        let Some(mounted) = self.at(&link.file)?.stat() else {
            return Ok(());
        };
        if hides_file(&mounted, &file) {
            refuse_shared(self.is_shared_at(dir, &link.link))?;
            self.findings.push(hidden(&link.link));
        }
        Ok(())
    }

    fn mask_proc(&mut self) -> Result<()> {
        // The mask is for a proc file system, which is not mounted yet.
        let proc_dir = Path::new("proc");
        let is_proc = |mount: &crate::oci::spec_view::Mount| {
            mount.kind.as_deref() == Some("proc") && mount.destination.ends_with(proc_dir)
        };
        if self.spec.mounts.iter().any(is_proc) {
            return Ok(());
        }
        let target = ContainerPath::new("proc/driver/nvidia").context("proc")?;
        mask_at(self.at(&target)?.seen()).map(drop)
    }

    fn directory_point(&mut self, target: &ContainerPath) -> Result<()> {
        let (dir, has) = self.make(target)?;
        directory_at(has.seen())?;
        refuse_shared(self.is_shared_at(&dir, target))?;
        if matches!(has, Has::Nothing) {
            self.note(&dir, target, Made::Directory);
        }
        Ok(())
    }
}
