//! The dynamic linker's cache, `/etc/ld.so.cache`, without ldconfig: read, merged and written as bytes.
//!
//! Pure. In: the bytes of a cache, the host's own or one from a hostile image, and the libraries that we put into
//! the container. Out: the bytes of the cache in which the container's own ld.so finds ours first. No ldconfig(8)
//! is run: with our rights, it writes through symbolic links that the image chose (CVE-2025-23267).
//!
//! No standard describes the file; its authorities are glibc's `sysdeps/generic/dl-cache.h` (layout),
//! `elf/dl-cache.c` (how ld.so searches) and `elf/cache.c` (how ldconfig writes). The file is in the byte order of
//! its machine. See ld.so(8) and ldconfig(8).

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
pub use parse::parse;
pub use splice::Pieces;

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
/// The bytes of all strings.
const NEW_STRINGS_AT: usize = 24;
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

/// `cache_extension_magic`, a value chosen at random there.
const EXTENSION_MAGIC: u32 = 0xeaa4_2174;
/// Magic and count, then the sections.
const EXTENSION_HEADER: usize = 8;
/// `sizeof (struct cache_extension_section)`: tag, flags, offset, size.
const EXTENSION_SECTION: usize = 16;
/// The program that wrote the cache, as text without a NUL.
const TAG_GENERATOR: u32 = 0;
/// Offsets of the names of glibc-hwcaps subdirectories, sorted by name.
const TAG_HWCAPS: u32 = 1;

/// A large desktop has about 5000.
const MAX_ENTRIES: usize = 1 << 17;
/// A CPU has four or five.
const MAX_HWCAPS: usize = 1024;
/// PATH_MAX: a longer path could not be opened.
const MAX_STRING: usize = 4096;
/// Names and paths together. Strings may share bytes in the file, so its size alone does not bound our work.
const MAX_TEXT: usize = 16 << 20;

/// An architecture for which there is an NVIDIA driver, as ldconfig marks its libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// The one this program was built for, and so the driver's.
    #[must_use]
    pub const fn native() -> Self {
        NATIVE
    }

    /// The 32-bit one whose programs the same kernel runs and for which the driver has libraries too.
    #[must_use]
    pub const fn compat32(self) -> Option<Self> {
        match self {
            Self::X86_64 => Some(Self::I386),
            Self::Aarch64 => Some(Self::Arm),
            Self::I386 | Self::Arm => None,
        }
    }

    /// `FLAG_ELF_LIBC6` with the architecture's own flag, from glibc's `sysdeps/generic/ldconfig.h`: the value that
    /// its ld.so searches for (`_DL_CACHE_DEFAULT_ID`).
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

/// Which of the three forms a file has. It is written back in the form it was read in: the image's own ld.so,
/// whatever its age, reads that one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// libc5 and glibc up to 2.1; every later glibc still reads it. No hwcaps.
    Old,
    /// An old table for old loaders, then a whole new one. The default of ldconfig from glibc 2.2 to 2.31, and
    /// read by all of them: the one for an image without a cache.
    Compat,
    /// The new table alone, the default since glibc 2.32.
    New,
}

/// A library in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Kind and architecture, see [`Arch::flags`].
    pub flags: i32,
    /// What a program asks for: the SONAME.
    pub name: &'a OsStr,
    /// The file that it gets.
    pub path: &'a Path,
    /// The oldest kernel that it runs on; 0 is any.
    pub os_version: u32,
    /// CPU features that it needs; 0 is none. See [`Entry::hwcaps_index`].
    pub hwcap: u64,
}

impl Entry<'_> {
    /// True if a loader of this architecture takes it.
    #[must_use]
    pub fn is_for(&self, arch: Arch) -> bool {
        self.flags == arch.flags()
    }

    /// The index of its subdirectory in [`Cache::hwcaps`], if it lies in one of `glibc-hwcaps/`.
    ///
    /// `dl_cache_hwcap_extension`: bit 62 alone, beside 10 bits for the ISA level and 32 for the index. Loaders
    /// before glibc 2.33 take it for a feature that no CPU has.
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

/// A library of ours, to be found first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewEntry<'a> {
    /// What a program asks for: the SONAME.
    pub name: &'a OsStr,
    /// Absolute, as the container sees it.
    pub path: &'a Path,
    /// Whose programs may load it.
    pub arch: Arch,
}

/// A cache in memory; its strings are borrowed from the bytes it was read from.
///
/// Its entries are always in ldconfig's order, without which ld.so's binary search goes astray.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache<'a> {
    layout: Layout,
    entries: Vec<Entry<'a>>,
    hwcaps: Vec<&'a OsStr>,
    generator: Option<&'a [u8]>,
}

impl<'a> Cache<'a> {
    /// Without entries. A container without a cache gets [`Layout::Compat`].
    #[must_use]
    pub fn empty(layout: Layout) -> Self {
        Self { layout, entries: Vec::new(), hwcaps: Vec::new(), generator: None }
    }

    /// As it was read, and as it will be written.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// All of them, in ldconfig's order: names descending.
    #[must_use]
    pub fn entries(&self) -> &[Entry<'a>] {
        &self.entries
    }

    /// The names of the `glibc-hwcaps/` subdirectories that entries refer to.
    #[must_use]
    pub fn hwcaps(&self) -> &[&'a OsStr] {
        &self.hwcaps
    }

    /// The program that wrote it, if it says so.
    #[must_use]
    pub fn generator(&self) -> Option<&'a [u8]> {
        self.generator
    }

    /// Every entry that a loader of `arch` considers for `name`, in its order.
    pub fn candidates(&self, name: &OsStr, arch: Arch) -> impl Iterator<Item = &Entry<'a>> {
        let descending = |entry: &Entry<'_>| compare_names(name, entry.name);
        let from = self.entries.partition_point(|entry| descending(entry).is_lt());
        self.entries
            .iter()
            .skip(from)
            .take_while(move |entry| descending(entry).is_eq())
            .filter(move |entry| entry.is_for(arch))
    }

    /// The entry that a loader of `arch` takes for `name` on the plainest CPU: one without hwcaps before any other.
    #[must_use]
    pub fn lookup(&self, name: &OsStr, arch: Arch) -> Option<&Entry<'a>> {
        self.candidates(name, arch).find(|entry| entry.hwcap == 0).or_else(|| self.candidates(name, arch).next())
    }

    /// Puts `ours` in; entries of the image for the same name and architecture go.
    ///
    /// They must go: in ldconfig's order, entries from `glibc-hwcaps/` subdirectories and ones with more hwcap bits
    /// stand before a plain one like ours, and ld.so takes the first that suits the CPU (`search_cache`; in the old
    /// layout simply the first). "The same name" is ld.so's notion of it, in which `libcuda.so.01` is
    /// `libcuda.so.1`. Of two of ours for one name and architecture, the first counts.
    pub fn merge(&mut self, ours: &[NewEntry<'a>]) {
        let ours = sorted(ours);
        let theirs = mem::take(&mut self.entries);
        self.entries.reserve_exact(theirs.len().saturating_add(ours.len()));
        let mut ours = ours.into_iter().peekable();
        let mut last = None;
        for entry in theirs {
            while let Some(new) = ours.next_if(|new| compare_slots(new, &entry).is_le()) {
                self.entries.push(new);
                last = Some(new);
            }
            if last.is_none_or(|new| compare_slots(&new, &entry).is_ne()) {
                self.entries.push(entry);
            }
        }
        self.entries.extend(ours);
    }
}

/// As entries, in order, and one for each name and architecture.
fn sorted<'a>(ours: &[NewEntry<'a>]) -> Vec<Entry<'a>> {
    let mut ours: Vec<Entry<'a>> = ours
        .iter()
        .map(|new| Entry { flags: new.arch.flags(), name: new.name, path: new.path, os_version: 0, hwcap: 0 })
        .collect();
    ours.sort_by(compare); // of entries without hwcaps the same order
    ours.dedup_by(|later, first| compare_slots(later, first).is_eq());
    ours
}

/// The file with `ours` in it, see [`Cache::merge`], and without what leads to `stale`; `None` if it has them already.
///
/// # Errors
/// If it is no cache, or becomes too large.
pub fn update<'a>(old: &'a [u8], ours: &[NewEntry<'_>], stale: &BTreeSet<PathBuf>) -> Result<Pieces<'a>> {
    if stale.is_empty()
        && let Some(spliced) = splice::splice(old, ours)
    {
        return Ok(spliced);
    }
    let mut cache = parse(old)?;
    cache.entries.retain(|entry| !stale.contains(entry.path));
    cache.merge(ours);
    let new = cache.to_bytes()?;
    Ok((new != old).then(|| vec![new.into()]))
}

/// ldconfig's order of entries (`compare` in `elf/cache.c`): names descending, then what ld.so must see first.
fn compare(a: &Entry<'_>, b: &Entry<'_>) -> Ordering {
    compare_slots(a, b)
        .then_with(|| match (a.hwcaps_index(), b.hwcaps_index()) {
            // search_cache stops at the first entry without a subdirectory; the subdirectories are sorted by name.
            (Some(a), Some(b)) => a.cmp(&b),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => b.hwcap.count_ones().cmp(&a.hwcap.count_ones()).then_with(|| b.hwcap.cmp(&a.hwcap)),
        })
        .then_with(|| b.os_version.cmp(&a.os_version))
}

/// The order of (name, flags), the pair that one of our entries takes over from the image.
fn compare_slots(a: &Entry<'_>, b: &Entry<'_>) -> Ordering {
    compare_names(b.name, a.name).then_with(|| b.flags.cmp(&a.flags))
}

/// ld.so's order of names (`_dl_cache_libcmp`): runs of digits count as numbers, and after everything else.
///
/// A total order, also on the names of hostile images, or sorting would panic. ld.so takes a run above `INT_MAX`
/// modulo 2^32 and compares by subtraction, which is no order at all; there, and only there, we may differ from it.
fn compare_names(a: &OsStr, b: &OsStr) -> Ordering {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    // Neighbours in a cache have much in common; what follows must begin where a run of digits does.
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let digits = a.iter().take(same).rev().take_while(|byte| byte.is_ascii_digit()).count();
    let start = same.saturating_sub(digits);
    let (mut a, mut b) = (a.get(start..).unwrap_or_default(), b.get(start..).unwrap_or_default());
    while !(a.is_empty() && b.is_empty()) {
        let order = Token::take(&mut a).cmp(&Token::take(&mut b));
        if order.is_ne() {
            return order;
        }
    }
    Ordering::Equal
}

/// A character or a run of digits; derived order: any number is after any character.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Token {
    Char(c_char), // signed on x86, unsigned on Arm, as in the C code there
    Number(i32),
}

impl Token {
    fn take(text: &mut &[u8]) -> Self {
        let Some((&first, rest)) = text.split_first() else { return Self::Char(0) }; // the C string's end
        *text = rest;
        if !first.is_ascii_digit() {
            return Self::Char(c_char::from_ne_bytes([first]));
        }
        let mut number = i32::from(first - b'0');
        while let Some((&digit, rest)) = text.split_first()
            && digit.is_ascii_digit()
        {
            number = number.wrapping_mul(10).wrapping_add(i32::from(digit - b'0'));
            *text = rest;
        }
        Self::Number(number)
    }
}

#[cfg(test)]
mod tests;
