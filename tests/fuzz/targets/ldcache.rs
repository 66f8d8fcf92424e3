//! `/etc/ld.so.cache` of an image: a parsed cache can be written unchanged; our libraries are found first.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;

use nvidia_host::driver::ldcache::{Arch, Cache, NewEntry, parse, update, with_prefix};

use super::check_error;

/// The maximum size of the texts of a cache, names and paths together.
const MAX_TEXT: usize = 16 << 20;

/// Parses, writes and parses the cache, then merges entries.
pub fn run(data: &[u8]) {
    drop(with_prefix(data, "libcuda.so"));
    let cache = match parse(data) {
        Ok(cache) => cache,
        Err(error) => return check_error(&error),
    };
    let bytes = cache.to_bytes().expect("what was parsed can be written");
    assert_eq!(
        parse(&bytes).expect("what was written can be parsed"),
        cache
    );

    if cache
        .entries()
        .iter()
        .any(|entry| entry.path.starts_with("/ours"))
    {
        return; // our entries could not be distinguished from the image's
    }
    // Our libraries, and ones with names of the image, which ours replace.
    let own = [cache.entries().first(), cache.entries().last()];
    let own = own.iter().flatten().map(|entry| NewEntry {
        name: entry.name,
        path: Path::new("/ours/x"),
        arch: Arch::native(),
    });
    let mut ours: Vec<NewEntry<'_>> = own.filter(|new| !new.name.is_empty()).collect();
    ours.extend(
        [
            ("libcuda.so.1", Arch::X86_64),
            ("libcuda.so.1", Arch::I386),
            ("libnvidia-ml.so.1", Arch::X86_64),
        ]
        .map(|(name, arch)| NewEntry {
            name: OsStr::new(name),
            path: Path::new("/ours/lib"),
            arch,
        }),
    );
    let mut merged = cache.clone();
    merged.merge(&ours);
    check_merged(&cache, &merged, &ours);

    let mut twice = merged.clone();
    twice.merge(&ours);
    assert_eq!(twice, merged, "merging twice is merging once");
    // The hook inserts entries into the bytes of most files. Those of the image may be out of order, and those of `bytes` are not.
    drop(update(data, &ours, &BTreeSet::new()));
    if let Ok(Some(updated)) = update(&bytes, &ours, &BTreeSet::new()) {
        assert_eq!(
            parse(&updated).expect("what was updated can be parsed"),
            merged
        );
    }
    match merged.to_bytes() {
        Ok(bytes) => assert_eq!(
            parse(&bytes).expect("what was merged can be parsed"),
            merged
        ),
        Err(error) => {
            assert!(text_of(&merged) > MAX_TEXT, "{error}");
            check_error(&error);
        }
    }
}

fn check_merged(cache: &Cache<'_>, merged: &Cache<'_>, ours: &[NewEntry<'_>]) {
    let is_ours = |path: &Path| path.starts_with("/ours");
    for new in ours {
        let found = merged.lookup(new.name, new.arch).expect("ours are found");
        assert!(is_ours(found.path), "{found:?} instead of {new:?}");
        // The same without the order on which lookups rely: no entry precedes ours.
        let first = merged
            .entries()
            .iter()
            .find(|entry| entry.name == new.name && entry.is_for(new.arch));
        assert!(
            first.is_none_or(|entry| is_ours(entry.path)),
            "{first:?} is before {new:?}"
        );
    }
    // Other entries are unchanged, except for those that ours replace.
    let mut left = merged
        .entries()
        .iter()
        .filter(|entry| !ours.iter().any(|new| new.path == entry.path))
        .peekable();
    for entry in cache.entries() {
        if left.next_if_eq(&entry).is_none() {
            let arch = [Arch::X86_64, Arch::I386, Arch::Aarch64]
                .into_iter()
                .find(|arch| entry.is_for(*arch));
            let instead = arch.and_then(|arch| merged.lookup(entry.name, arch));
            assert!(
                instead.is_some_and(|instead| is_ours(instead.path)),
                "{entry:?} is lost"
            );
        }
    }
    assert_eq!(left.next(), None, "an entry came from nowhere");
    assert_eq!(
        (merged.layout(), merged.hwcaps(), merged.generator()),
        (cache.layout(), cache.hwcaps(), cache.generator())
    );
}

fn text_of(cache: &Cache<'_>) -> usize {
    let entries = cache
        .entries()
        .iter()
        .map(|entry| entry.name.len() + entry.path.as_os_str().len());
    entries.sum::<usize>() + cache.hwcaps().iter().map(|name| name.len()).sum::<usize>()
}
