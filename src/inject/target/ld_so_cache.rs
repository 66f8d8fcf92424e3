//! The image's /etc/ld.so.cache with the driver's libraries.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result};
use rustix::fs::OFlags;

use super::{Done, Target};
use crate::inject::container::is_missing;
use crate::inject::directory::{Present, find_present, write_beside};
use crate::inject::tmpfs::is_read_only;
use crate::inject::{linker_cache, read_only};
use crate::lower::live::CacheEntry;

impl Target {
    pub(super) fn update_linker_cache(&mut self, entries: &[CacheEntry]) -> Result<()> {
        let (path, name) = (Path::new("etc"), OsStr::new("ld.so.cache"));
        let etc = match self.rootfs.open_at(path, OFlags::PATH | OFlags::DIRECTORY) {
            Ok(etc) => Rc::new(etc),
            Err(error) if is_missing(&error) => return Ok(()), // ld.so has its built-in directories
            Err(error) => return Err(error.into()),
        };
        if !self.listed {
            self.remove_list();
        }
        let stale = if self.had_another { self.find_stale(entries) } else { BTreeSet::new() };
        let old = match self.read_linker_cache() {
            Ok(old) => old,
            Err(error) => {
                self.findings.push(linker_cache::left_alone(&error));
                return Ok(());
            }
        };
        let Some(new) = linker_cache::merge(old.as_deref(), entries, &stale, &mut self.findings) else { return Ok(()) };
        let is_volume = !self.may_create(&etc, path)?;
        if !is_volume && !is_read_only(&*etc) {
            return write_beside(&etc, Path::new(name), &new).context("write it");
        }
        match find_present(&etc, name)? {
            Present::Other(point, _) => {
                self.known.refuse_shared_dir(&etc)?;
                self.known.refuse_shared(&point)?;
                let hidden = read_only::hide_file(&etc, name, &point, &new, self.label.as_ref())?;
                self.done.push(Done::Mounted(hidden.into()));
            }
            _ => {
                let error = match is_volume {
                    true => "\"/etc\" lies on a volume, which has no such file",
                    false => "the image's file system is read-only and has no such file",
                };
                self.findings.push(linker_cache::left_alone(&anyhow::Error::msg(error)));
            }
        }
        Ok(())
    }

    /// Its bytes; `None` if there is none. Read where it leads to, also if the image made it a link.
    fn read_linker_cache(&self) -> Result<Option<Vec<u8>>> {
        let file = match self.rootfs.open_at(Path::new("etc/ld.so.cache"), OFlags::PATH) {
            Ok(path) => self.rootfs.open_stored(path)?,
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(anyhow::Error::new(error).context("read it")),
        };
        base::read::read_file_limited(&file, linker_cache::MAX_SIZE).map(Some)
    }
}
