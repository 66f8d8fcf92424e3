//! Adds the driver libraries to the container's ld.so.cache without running `ldconfig`. To run it on files that the image
//! controls was the cause of CVE-2024-0135, CVE-2024-0136, CVE-2024-0137 and CVE-2025-23267.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::OFlags;

use base::report::Finding;
use base::sys::in_root::Root;
use findings::catalog;
use nvidia_host::driver::ldcache::{self, Arch, Cache, CacheFormat, NewEntry};

use crate::plan::step::CacheEntry;

/// Upper limit for the cache in bytes. A cache of 100 000 libraries has half of it.
const MAX_SIZE: usize = 16 << 20;

/// Returns the content of an image's cache; `None` if it is missing. Follows a symlink of the image, below the rootfs.
pub(in crate::inject) fn read(rootfs: &Root) -> Result<Option<Vec<u8>>> {
    let found = match rootfs.open_at(Path::new("etc/ld.so.cache"), OFlags::PATH) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).context("read it"),
    };
    let (file, stat) = rootfs.open_stored_known(found)?;
    base::read::read_known(&file, &stat, MAX_SIZE).map(Some)
}

/// The finding for a directory in which the missing cache cannot be created.
pub(in crate::inject) fn missing(is_volume: bool) -> Finding {
    let why = if is_volume {
        "\"/etc\" is on a volume that lacks this file"
    } else {
        "the image's file system is read-only and lacks this file"
    };
    left_unchanged(&anyhow::Error::msg(why))
}

/// Returns the new content, without the entries of `stale` paths. `None` if the old content is already right, or if
/// it cannot be changed safely; then there is a finding.
pub(crate) fn merge(
    old: Option<&[u8]>,
    entries: &[CacheEntry],
    stale: &BTreeSet<PathBuf>,
    findings: &mut Vec<Finding>,
) -> Option<Vec<u8>> {
    let paths: Vec<_> = entries.iter().map(|entry| entry.path.absolute()).collect();
    let ours = entries.iter().zip(&paths).map(|(entry, path)| NewEntry {
        name: &entry.soname,
        path,
        arch: entry.arch,
    });
    let ours: Vec<_> = ours.collect();
    // ldconfig first creates an empty file, which ld.so ignores.
    let new = match old.filter(|bytes| !bytes.is_empty()) {
        Some(old) => ldcache::update(old, &ours, stale),
        None => create(&ours).map(Some),
    };
    new.unwrap_or_else(|error| {
        findings.push(left_unchanged(&error));
        None
    })
}

/// The libraries of which CUDA's packages contain stubs. Programs with a stub find no GPU.
const WITH_STUBS: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];

/// Reports whether the image's ldconfig finds such a library in another directory. Images list a directory with CUDA's stubs, and the
/// name of its file decides whether ldconfig searches it before the driver's directory.
pub(crate) fn has_rival(old: &[u8], entries: &[CacheEntry]) -> bool {
    for name in WITH_STUBS {
        for other in ldcache::with_prefix(old, name).unwrap_or_default() {
            let is_ours =
                |entry: &CacheEntry| entry.path.absolute().parent() == other.path.parent();
            if other.name == name && other.is_for(Arch::native()) && !entries.iter().any(is_ours) {
                return true;
            }
        }
    }
    false
}

fn create(ours: &[NewEntry<'_>]) -> Result<Vec<u8>> {
    let mut cache = Cache::empty(CacheFormat::Compat);
    cache.merge(ours);
    cache.to_bytes()
}

/// The finding for a cache in an unknown format, which the hook does not change. ld.so also ignores a cache that it cannot
/// read, and it searches the directory of the driver libraries anyway. To replace a cache of a newer ldconfig could lose the
/// image's own entries.
pub(crate) fn left_unchanged(error: &anyhow::Error) -> Finding {
    Finding::new(
        &catalog::IMAGE_CACHE,
        format!(
            "the image's \"/etc/ld.so.cache\" is left unchanged: {}",
            base::report::line(error)
        ),
        "run \"ldconfig\" when the image is built, or set LD_LIBRARY_PATH in the container",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::ContainerPath;
    use nvidia_host::driver::ldcache::Arch;

    fn entries() -> Vec<CacheEntry> {
        let path = ContainerPath::new("/usr/lib64/libcuda.so.1").unwrap();
        vec![CacheEntry {
            soname: "libcuda.so.1".into(),
            path,
            arch: Arch::native(),
        }]
    }

    #[test]
    fn an_image_without_a_cache_gets_one() {
        for old in [None, Some(&b""[..])] {
            let new = merge(old, &entries(), &BTreeSet::new(), &mut Vec::new()).unwrap();
            let cache = ldcache::parse(&new).unwrap();
            let found = cache
                .lookup("libcuda.so.1".as_ref(), Arch::native())
                .unwrap();
            assert_eq!(found.path, std::path::Path::new("/usr/lib64/libcuda.so.1"));
            assert_eq!(
                merge(Some(&new), &entries(), &BTreeSet::new(), &mut Vec::new()),
                None,
                "idempotent"
            );
        }
    }

    #[test]
    fn an_invalid_cache_is_unchanged_and_reported() {
        let mut findings = Vec::new();
        assert_eq!(
            merge(
                Some(b"what is this"),
                &entries(),
                &BTreeSet::new(),
                &mut findings
            ),
            None
        );
        assert!(
            findings[0].what.contains("is left unchanged"),
            "{findings:?}"
        );
    }
}
