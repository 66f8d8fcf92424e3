//! Reads, merges and writes the cache of the dynamic linker, `/etc/ld.so.cache`, without ldconfig.
//!
//! The input is the content of a cache, from the host or from a hostile image, and the libraries that the hook adds to the
//! container. The output is a cache in which the container's ld.so finds the added libraries first. ldconfig(8) is not executed: with
//! the privileges of the hook, it would write through symbolic links of the image (CVE-2025-23267).
//!
//! No standard describes the format. The references are glibc's `sysdeps/generic/dl-cache.h` (layout), `elf/dl-cache.c` (how ld.so
//! searches) and `elf/cache.c` (how ldconfig writes). The file has the byte order of its machine. See ld.so(8) and ldconfig(8).

mod parse;
mod splice;
mod write;

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ffi::{OsStr, c_char};
use std::mem;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use splice::{Spliced, splice};

pub use parse::{parse, with_prefix};

/// First bytes of the layout of libc5 and glibc 2.0 (`CACHEMAGIC`).
const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
/// `sizeof (struct cache_file)`: the magic, one byte of padding, the number of entries.
const OLD_HEADER: usize = 16;
const OLD_COUNT_AT: usize = 12;
/// `sizeof (struct file_entry)`: flags, name, path.
const OLD_ENTRY: usize = 12;

/// First bytes of the layout of glibc 2.2 (`CACHEMAGIC_VERSION_NEW`).
const NEW_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// `sizeof (struct cache_file_new)`, asserted to be 48 there.
const NEW_HEADER: usize = 48;
const NEW_COUNT_AT: usize = 20;
/// Zero before glibc 2.33, which began to record the byte order here.
const NEW_BYTE_ORDER_AT: usize = 28;
const NEW_EXTENSION_AT: usize = 32;
/// `sizeof (struct file_entry_new)`: flags, name, path, OS version, hwcap.
const NEW_ENTRY: usize = 24;
/// `ALIGN_CACHE` on 64-bit machines. 32-bit x86 aligns to 4, which is why ldconfig makes the old count even.
const NEW_ALIGN: usize = 8;

/// `cache_file_new_flags_endian_current`.
const BYTE_ORDER: u8 = if cfg!(target_endian = "little") { 2 } else { 3 };
/// `cache_file_new_flags_endian_mask`.
const BYTE_ORDER_MASK: u8 = 3;

/// `cache_extension_magic`.
const EXTENSION_MAGIC: u32 = 0xeaa4_2174;
/// The size of the magic and the count, which the sections follow.
const EXTENSION_HEADER: usize = 8;
/// `sizeof (struct cache_extension_section)`: tag, flags, offset, size.
const EXTENSION_SECTION: usize = 16;
/// The tag of the name of the program that wrote the cache, which has no NUL.
const TAG_GENERATOR: u32 = 0;
/// The tag of the offsets of the names of glibc-hwcaps subdirectories, which are sorted by name.
const TAG_HWCAPS: u32 = 1;

/// The limit for entries. A large desktop has about 5000.
const MAX_ENTRIES: usize = 1 << 17;
/// The limit for glibc-hwcaps subdirectories. A CPU has four or five.
const MAX_HWCAPS: usize = 1024;
/// The limit for one string in bytes (PATH_MAX).
const MAX_STRING: usize = 4096;
/// The limit for all names and paths in bytes. Strings can share bytes in the file, so its size does not limit the work.
const MAX_TEXT: usize = 16 << 20;

/// An architecture that the NVIDIA driver supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
pub enum Arch {
    /// 64-bit x86.
    X86_64,
    /// 64-bit Arm.
    Aarch64,
    /// 32-bit x86.
    I386,
    /// 32-bit Arm, hard float.
    Arm,
}

impl Arch {
    /// Returns the architecture of this program, which is also the driver's.
    #[must_use]
    pub const fn native() -> Self {
        NATIVE
    }

    /// Returns the architectures whose programs can run on this machine.
    pub fn supported() -> impl Iterator<Item = Self> {
        std::iter::once(NATIVE).chain(NATIVE.compat32())
    }

    /// Returns the 32-bit architecture whose programs the same kernel runs, and for which the driver has libraries.
    #[must_use]
    pub const fn compat32(self) -> Option<Self> {
        match self {
            Self::X86_64 => Some(Self::I386),
            Self::Aarch64 => Some(Self::Arm),
            Self::I386 | Self::Arm => None,
        }
    }

    /// Returns the flags for which ld.so searches (`_DL_CACHE_DEFAULT_ID`): `FLAG_ELF_LIBC6` and the flag of the architecture, from
    /// glibc's `sysdeps/generic/ldconfig.h`.
    #[must_use]
    pub const fn flags(self) -> i32 {
        match self {
            Self::I386 => 0x0003, // no flag of its own
            Self::X86_64 => 0x0303,
            Self::Arm => 0x0903,
            Self::Aarch64 => 0x0a03,
        }
    }
}

#[cfg(target_arch = "x86_64")]
const NATIVE: Arch = Arch::X86_64;
#[cfg(target_arch = "aarch64")]
const NATIVE: Arch = Arch::Aarch64;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("there is an NVIDIA driver for x86_64 and aarch64 only");

/// The layout of a file. A file is written in the layout in which it was read, because the image's ld.so can read that one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheFormat {
    /// The layout of libc5 and glibc up to 2.1, without hwcaps. Every later glibc can read it.
    Old,
    /// An old table, then a new one. It is the default from glibc 2.2 to 2.31. All versions can read it, so an image without a cache
    /// gets it.
    Compat,
    /// Only the new table, the default since glibc 2.32.
    New,
}

/// A library in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The kind and architecture, see [`Arch::flags`].
    pub flags: i32,
    /// The SONAME that programs load.
    pub name: &'a OsStr,
    /// The file.
    pub path: &'a Path,
    /// The oldest kernel that the library supports; 0 for any.
    pub os_version: u32,
    /// The CPU features that the library requires; 0 for none. See [`Entry::hwcaps_index`].
    pub hwcap: u64,
}

impl Entry<'_> {
    /// Whether the loader of this architecture uses the entry.
    #[must_use]
    pub fn is_for(&self, arch: Arch) -> bool {
        self.flags == arch.flags()
    }

    /// Returns the index of its subdirectory in [`Cache::hwcaps`], if the file is in a subdirectory of `glibc-hwcaps/`.
    ///
    /// Bit 62 marks such an entry, with 10 bits for the ISA level and 32 for the index (`dl_cache_hwcap_extension`). For loaders
    /// before glibc 2.33, this bit is a feature that no CPU has.
    #[must_use]
    pub(crate) fn hwcaps_index(&self) -> Option<u32> {
        const MARK: u64 = 1 << 62;
        const ISA_LEVEL_AND_INDEX: u64 = (1 << 42) - 1;
        if self.hwcap & !ISA_LEVEL_AND_INDEX == MARK {
            u32::try_from(self.hwcap & u64::from(u32::MAX)).ok()
        } else {
            None
        }
    }
}

/// A library to add to the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewEntry<'a> {
    /// The SONAME that programs load.
    pub name: &'a OsStr,
    /// The absolute path in the container.
    pub path: &'a Path,
    /// The architecture of the library.
    pub arch: Arch,
}

/// A parsed cache. Its strings are borrowed from the bytes of the file.
///
/// Its entries are always in ldconfig's order, because ld.so uses a binary search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache<'a> {
    layout: CacheFormat,
    entries: Vec<Entry<'a>>,
    hwcaps: Vec<&'a OsStr>,
    generator: Option<&'a [u8]>,
}

impl<'a> Cache<'a> {
    /// Returns a cache without entries. A container without a cache gets [`CacheFormat::Compat`].
    #[must_use]
    pub fn empty(layout: CacheFormat) -> Self {
        Self {
            layout,
            entries: Vec::new(),
            hwcaps: Vec::new(),
            generator: None,
        }
    }

    /// Returns the layout in which the cache was read and will be written.
    #[must_use]
    pub fn layout(&self) -> CacheFormat {
        self.layout
    }

    /// Returns all entries in ldconfig's order, with descending names.
    #[must_use]
    pub fn entries(&self) -> &[Entry<'a>] {
        &self.entries
    }

    /// Returns the names of the `glibc-hwcaps/` subdirectories that entries refer to.
    #[must_use]
    pub fn hwcaps(&self) -> &[&'a OsStr] {
        &self.hwcaps
    }

    /// Returns the name of the program that wrote the cache, if the file contains it.
    #[must_use]
    pub fn generator(&self) -> Option<&'a [u8]> {
        self.generator
    }

    /// Returns all entries that a loader of `arch` considers for `name`, in the order of the loader.
    pub fn candidates(&self, name: &OsStr, arch: Arch) -> impl Iterator<Item = &Entry<'a>> {
        let descending = |entry: &Entry<'_>| compare_names(name, entry.name);
        let from = self
            .entries
            .partition_point(|entry| descending(entry).is_lt());
        self.entries
            .iter()
            .skip(from)
            .take_while(move |entry| descending(entry).is_eq())
            .filter(move |entry| entry.is_for(arch))
    }

    /// Returns the entry that a loader of `arch` uses for `name` on a CPU without additional features: one without hwcaps, if there is
    /// one.
    #[must_use]
    pub fn lookup(&self, name: &OsStr, arch: Arch) -> Option<&Entry<'a>> {
        self.candidates(name, arch)
            .find(|entry| entry.hwcap == 0)
            .or_else(|| self.candidates(name, arch).next())
    }

    /// Adds `ours`, and removes the image's entries for the same name and architecture.
    ///
    /// If they stayed, ld.so could find them first: in ldconfig's order, entries from `glibc-hwcaps/` subdirectories and those with more
    /// hwcap bits precede a plain entry, and ld.so uses the first one that the CPU supports (`search_cache`; in the old layout it
    /// uses the first one). Names are compared as in ld.so, for which `libcuda.so.01` and `libcuda.so.1` are the same. If `ours`
    /// contains a name and architecture twice, the first one wins.
    pub fn merge(&mut self, ours: &[NewEntry<'a>]) {
        let ours = sorted(ours);
        let theirs = mem::take(&mut self.entries);
        self.entries
            .reserve_exact(theirs.len().saturating_add(ours.len()));
        let mut rest = theirs.as_slice();
        // There are few new entries, so the position of each one is searched for.
        for new in ours {
            let (before, from) =
                rest.split_at(rest.partition_point(|entry| compare_slots(entry, &new).is_lt()));
            let replaced = from.partition_point(|entry| compare_slots(entry, &new).is_eq());
            self.entries.extend_from_slice(before);
            self.entries.push(new);
            rest = from.get(replaced..).unwrap_or_default();
        }
        self.entries.extend_from_slice(rest);
    }
}

/// Converts new entries, sorts them, and removes duplicates.
fn sorted<'a>(ours: &[NewEntry<'a>]) -> Vec<Entry<'a>> {
    let mut ours: Vec<Entry<'a>> = ours
        .iter()
        .map(|new| Entry {
            flags: new.arch.flags(),
            name: new.name,
            path: new.path,
            os_version: 0,
            hwcap: 0,
        })
        .collect();
    ours.sort_by(compare); // the sort is stable, so the first of two equal entries stays first
    ours.dedup_by(|later, first| compare_slots(later, first).is_eq());
    ours
}

/// Adds `ours` to a file, see [`Cache::merge`], and removes the entries for the paths in `stale`. Returns `None` if that does not
/// change the file.
///
/// # Errors
/// If the file is not a cache, or becomes too large.
pub fn update(
    old: &[u8],
    ours: &[NewEntry<'_>],
    stale: &BTreeSet<PathBuf>,
) -> Result<Option<Vec<u8>>> {
    if stale.is_empty() {
        match splice(old, &sorted(ours))? {
            Spliced::Unchanged => return Ok(None),
            Spliced::New(bytes) => return Ok(Some(bytes)),
            Spliced::Unusual => {}
        }
    }
    let mut cache = parse(old)?;
    cache.entries.retain(|entry| !stale.contains(entry.path));
    cache.merge(ours);
    let new = cache.to_bytes()?;
    Ok((new != old).then_some(new))
}

/// Compares entries in ldconfig's order (`compare` in `elf/cache.c`): descending names, then the entries that ld.so prefers.
fn compare(a: &Entry<'_>, b: &Entry<'_>) -> Ordering {
    compare_slots(a, b)
        .then_with(|| match (a.hwcaps_index(), b.hwcaps_index()) {
            // search_cache stops at the first entry without a subdirectory. The subdirectories are sorted by name.
            (Some(a), Some(b)) => a.cmp(&b),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => b
                .hwcap
                .count_ones()
                .cmp(&a.hwcap.count_ones())
                .then_with(|| b.hwcap.cmp(&a.hwcap)),
        })
        .then_with(|| b.os_version.cmp(&a.os_version))
}

/// Compares name and flags. A new entry replaces the image's entries with an equal name and flags.
fn compare_slots(a: &Entry<'_>, b: &Entry<'_>) -> Ordering {
    compare_names(b.name, a.name).then_with(|| b.flags.cmp(&a.flags))
}

/// Compares names in the order of ld.so (`_dl_cache_libcmp`): runs of digits are compared as numbers, and sort after other characters.
///
/// The order must be total for all names of hostile images, otherwise sorting panics. ld.so computes numbers above `INT_MAX` modulo
/// 2^32 and compares them by subtraction, which is not a total order. Only for such names can this function differ from it.
fn compare_names(a: &OsStr, b: &OsStr) -> Ordering {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    // Neighboring names share a long prefix, which is skipped. The rest must not begin within a run of digits.
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let digits = a
        .iter()
        .take(same)
        .rev()
        .take_while(|byte| byte.is_ascii_digit())
        .count();
    let start = same.saturating_sub(digits);
    let (mut a, mut b) = (
        a.get(start..).unwrap_or_default(),
        b.get(start..).unwrap_or_default(),
    );
    while !(a.is_empty() && b.is_empty()) {
        let order = Token::take(&mut a).cmp(&Token::take(&mut b));
        if order.is_ne() {
            return order;
        }
    }
    Ordering::Equal
}

/// A character or a run of digits. With the derived order, numbers sort after characters.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Token {
    Char(c_char), // signed on x86 and unsigned on Arm, as in the C code of glibc
    Number(i32),
}

impl Token {
    fn take(text: &mut &[u8]) -> Self {
        let Some((&first, rest)) = text.split_first() else {
            return Self::Char(0);
        }; // the NUL at the end of the C string
        *text = rest;
        if !first.is_ascii_digit() {
            return Self::Char(c_char::from_ne_bytes([first]));
        }
        let mut number = i32::from(first - b'0');
        while let Some((&digit, rest)) = text.split_first()
            && digit.is_ascii_digit()
        {
            number = number
                .wrapping_mul(10)
                .wrapping_add(i32::from(digit - b'0'));
            *text = rest;
        }
        Self::Number(number)
    }
}

#[cfg(test)]
mod tests;
