//! Writes the driver libraries into the image's /etc/ld.so.cache.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result};
use rustix::fs::OFlags;
use rustix::io::Errno;

use base::paths::ContainerPath;
use base::report::errno_of;

use super::{Applier, Change};
use crate::inject::files::directory::{Present, find_present, replace_file};
use crate::inject::{container::linker_cache, layer::overlay, left_out};
use crate::plan::step::CacheEntry;

impl Applier {
    pub(super) fn update_linker_cache(&mut self, entries: &[CacheEntry]) -> Result<()> {
        let Some(etc) = self
            .layout
            .rootfs
            .open_existing(Path::new("etc"), OFlags::PATH | OFlags::DIRECTORY)?
            .map(Rc::new)
        else {
            return Ok(()); // without a cache, ld.so searches its built-in directories
        };
        let stale = self.find_stale(entries);
        let old = match linker_cache::read(&self.layout.rootfs) {
            Ok(old) => old,
            Err(error) => {
                self.report_unchanged(&error);
                return Ok(());
            }
        };
        let has_rival = old
            .as_deref()
            .is_some_and(|old| linker_cache::has_rival(old, entries));
        if has_rival {
            // The cache is right until ldconfig runs, so it is written even if the list of directories cannot be.
            if let Err(error) = self.list_directories(&directories(entries), &[]) {
                self.layout.done.findings.push(left_out(&error));
            }
        } else if !self.lists_directories {
            self.remove_list();
        }
        let findings = &mut self.layout.done.findings;
        match linker_cache::merge(old.as_deref(), entries, &stale, findings) {
            Some(new) => self.write_linker_cache(&etc, &new),
            None => Ok(()),
        }
    }

    /// Replaces the file, or mounts the new content over it if the image's file system is read-only or `/etc` is a volume.
    fn write_linker_cache(&mut self, etc: &Rc<OwnedFd>, content: &[u8]) -> Result<()> {
        let name = OsStr::new("ld.so.cache");
        let is_volume = !self.layout.may_create(etc, Path::new("etc"))?;
        if !is_volume {
            match replace_file(etc, Path::new(name), content) {
                Err(error) if errno_of(&error) == Some(Errno::ROFS) => {}
                written => return written.context("write it"),
            }
        }
        let Present::Other(point, _) = find_present(etc, name)? else {
            let finding = linker_cache::missing(is_volume);
            self.layout.done.findings.push(finding);
            return Ok(());
        };
        self.layout.mounts.refuse_shared_dir(etc)?;
        self.layout.mounts.refuse_shared(&point)?;
        let label = self.layout.label.as_ref();
        let hidden = overlay::hide_file(etc, name, &point, content, label)?;
        self.layout.done.add(Change::Mounted(hidden.into()));
        Ok(())
    }

    fn report_unchanged(&mut self, error: &anyhow::Error) {
        let finding = linker_cache::left_unchanged(error);
        self.layout.done.findings.push(finding);
    }
}

/// Returns the directories of these libraries, with the directory of libcuda first: with CUDA compatibility libraries, it is the image's.
fn directories(entries: &[CacheEntry]) -> Vec<ContainerPath> {
    let mut dirs = Vec::new();
    let is_cuda = |entry: &&CacheEntry| entry.soname == "libcuda.so.1";
    for entry in entries.iter().filter(is_cuda).chain(entries) {
        if let Some(dir) = entry.path.parent()
            && !dirs.contains(&dir)
        {
            dirs.push(dir);
        }
    }
    dirs
}
