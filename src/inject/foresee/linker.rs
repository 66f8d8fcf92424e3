//! What a start would report about the image's linker cache and the configuration of its ldconfig.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;

use anyhow::{Result, bail};

use base::paths::ContainerPath;
use nvidia_host::driver::ldconf;

use super::Foresight;
use super::ground::Has;
use crate::inject::apply::ld_so_cache::directories;
use crate::inject::apply::ld_so_conf::{
    IncludeAt, NOT_INCLUDED, include_at, is_includable, not_listed,
};
use crate::inject::container::ld_so_conf::{Configured, MAIN, has_ldconfig};
use crate::inject::container::linker_cache;
use crate::inject::container::mounts::refuse_shared;
use crate::inject::foresee::view::Found;
use crate::inject::left_out;
use crate::plan::step::CacheEntry;

impl Foresight<'_> {
    pub(super) fn update_linker_cache(&mut self, entries: &[CacheEntry]) -> Result<()> {
        let Some(etc) = self.etc() else {
            return Ok(());
        };
        let old = match linker_cache::read(&self.view) {
            Ok(old) => old,
            Err(error) => {
                self.findings.push(linker_cache::left_unchanged(&error));
                return Ok(());
            }
        };
        let has_rival = old
            .as_deref()
            .is_some_and(|old| linker_cache::has_rival(old, entries));
        if has_rival && let Err(error) = self.list_directories(&directories(entries), &[]) {
            self.findings.push(left_out(&error));
        }
        let new = linker_cache::merge(
            old.as_deref(),
            entries,
            &BTreeSet::new(),
            &mut self.findings,
        );
        let is_volume = !self.is_own(&etc);
        if new.is_none() || !is_volume && !self.is_read_only(&etc) {
            return Ok(());
        }
        let Some(cache) = ContainerPath::new("etc/ld.so.cache") else {
            return Ok(());
        };
        if matches!(self.at(&cache)?, Has::Other(_)) {
            let dir = self.directory(Path::new("etc"))?;
            refuse_shared(self.is_shared(&dir))?;
            return refuse_shared(self.is_shared_at(&dir, &cache));
        }
        self.findings.push(linker_cache::missing(is_volume));
        Ok(())
    }

    pub(super) fn list_directories(
        &mut self,
        first: &[ContainerPath],
        others: &[ContainerPath],
    ) -> Result<()> {
        let Some(etc) = self.etc() else {
            return Ok(());
        };
        if self.is_read_only(&etc) || !has_ldconfig(&self.view) {
            return Ok(());
        }
        let configured = Configured::read(&self.view);
        let wanted = configured.lacks(&self.view, first, others);
        if wanted.is_empty() {
            return Ok(());
        }
        let drop_ins = self.view.find(Path::new(ldconf::DROP_INS), true);
        let has_own_drop_ins = drop_ins.is_ok_and(|dir| self.is_own(&dir));
        let exists = self.view.find(Path::new(ldconf::DROP_INS), true).is_ok();
        let main = self.view.in_directory(&etc, OsStr::new(MAIN));
        let obstacle = match include_at(self.is_own(&etc), has_own_drop_ins || !exists, &configured)
        {
            IncludeAt::Nowhere(why) => Some(why),
            IncludeAt::Present => None,
            IncludeAt::InNewFile if main.is_ok() => {
                bail!("\"/etc/ld.so.conf\" is a dangling symlink")
            }
            IncludeAt::InNewFile => None,
            IncludeAt::InFile => (!self.is_replaceable(&etc)?).then_some(NOT_INCLUDED),
        };
        if let Some(obstacle) = obstacle {
            self.findings.push(not_listed(&wanted, obstacle));
            return Ok(());
        }
        self.directory(Path::new(ldconf::DROP_INS)).map(drop)
    }

    /// Reports whether the image's ld.so.conf can get a line.
    fn is_replaceable(&self, etc: &Found) -> Result<bool> {
        let Some(main) = ContainerPath::new(Path::new("etc").join(MAIN)) else {
            return Ok(false);
        };
        // rename(2) does not replace a mount point.
        let is_mounted = self.view.is_mount_point(&etc.real.join(MAIN));
        Ok(!is_mounted && is_includable(self.at(&main)?.seen()))
    }

    /// Returns `/etc`; `None` if the image has none.
    fn etc(&self) -> Option<Found> {
        self.view.find(Path::new("etc"), true).ok()
    }
}
