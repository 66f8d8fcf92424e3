//! Writes a [`Cache`] as bytes, in its layout.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, Result, ensure};

use super::{
    BYTE_ORDER, Cache, CacheFormat, EXTENSION_HEADER, EXTENSION_MAGIC, EXTENSION_SECTION, Entry,
    MAX_ENTRIES, MAX_STRING, MAX_TEXT, NEW_ALIGN, NEW_BYTE_ORDER_AT, NEW_ENTRY, NEW_HEADER,
    NEW_MAGIC, OLD_COUNT_AT, OLD_ENTRY, OLD_HEADER, OLD_MAGIC, TAG_GENERATOR, TAG_HWCAPS,
};

impl Cache<'_> {
    /// Returns the content of the file. Equal caches have equal bytes, and [`parse`](super::parse()) of them returns this cache.
    ///
    /// # Errors
    /// If a name or a path has a NUL byte, or the cache exceeds a limit of `parse`.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        ensure!(
            self.entries.len() <= MAX_ENTRIES,
            "{} entries, more than {MAX_ENTRIES}",
            self.entries.len()
        );
        let strings = Strings::new(self)?;
        let tables = new_table_size(self.entries.len()).saturating_mul(2);
        let mut out = Vec::with_capacity(
            tables
                .saturating_add(strings.bytes.len())
                .saturating_add(MAX_STRING),
        );
        match self.layout {
            CacheFormat::Old => {
                let all: Vec<_> = self.entries.iter().zip(&strings.entries).collect();
                let gap = if looks_new(&strings, all.len()) {
                    NEW_ALIGN
                } else {
                    0
                };
                put_old(&mut out, &all, gap)?;
                out.resize(out.len().saturating_add(gap), 0);
                out.extend_from_slice(&strings.bytes);
            }
            CacheFormat::Compat => {
                // The old table has no hwcaps. With an even count, the new table has the same offset on 32-bit and 64-bit machines.
                let mut plain: Vec<_> = self
                    .entries
                    .iter()
                    .zip(&strings.entries)
                    .filter(|(entry, _)| entry.hwcap == 0)
                    .collect();
                if let Some(&last) = plain.last()
                    && plain.len() % 2 == 1
                {
                    plain.push(last);
                }
                put_old(&mut out, &plain, new_table_size(self.entries.len()))?;
                debug_assert!(
                    out.len().is_multiple_of(NEW_ALIGN),
                    "an even count needs no padding"
                );
                self.put_new(&mut out, &strings)?;
            }
            CacheFormat::New => self.put_new(&mut out, &strings)?,
        }
        Ok(out)
    }

    fn put_new(&self, out: &mut Vec<u8>, strings: &Strings) -> Result<()> {
        let table = new_table_size(self.entries.len());
        let end = out
            .len()
            .saturating_add(table)
            .saturating_add(strings.bytes.len());
        let (extension, bytes) = self.extension(strings, table, end)?;
        put_new_header(out, self.entries.len(), strings.bytes.len(), extension)?;
        for (entry, string) in self.entries.iter().zip(&strings.entries) {
            let row = entry.row(
                table.saturating_add(string.name),
                table.saturating_add(string.path),
            )?;
            out.extend_from_slice(row.as_flattened());
        }
        out.extend_from_slice(&strings.bytes);
        out.extend_from_slice(&bytes);
        Ok(())
    }

    /// Returns the offset of the extension in the file, and the bytes after the strings, which end at `end`. Returns 0 and no bytes if
    /// no extension is needed. The offset `base` of `strings` is relative to the new header.
    ///
    /// The extension consists of the directory, then the hwcaps, which must be aligned, then the generator.
    pub(super) fn extension(
        &self,
        strings: &Strings,
        base: usize,
        end: usize,
    ) -> Result<(usize, Vec<u8>)> {
        if self.generator.is_none() && self.hwcaps.is_empty() {
            return Ok((0, Vec::new()));
        }
        let mut hwcaps = Vec::with_capacity(self.hwcaps.len().saturating_mul(4));
        for offset in &strings.hwcaps {
            put(&mut hwcaps, base.saturating_add(*offset))?;
        }
        let generator = self.generator.map(|text| (TAG_GENERATOR, text));
        let hwcaps = (!hwcaps.is_empty()).then_some((TAG_HWCAPS, hwcaps.as_slice()));
        let count = usize::from(generator.is_some()).saturating_add(usize::from(hwcaps.is_some()));

        let at = end.next_multiple_of(4);
        let mut out = vec![0; at.saturating_sub(end)];
        let sections = EXTENSION_HEADER.saturating_add(count.saturating_mul(EXTENSION_SECTION));
        let hwcaps_at = at.saturating_add(sections);
        let generator_at = hwcaps_at.saturating_add(hwcaps.map_or(0, |(_, data)| data.len()));
        out.extend_from_slice(&EXTENSION_MAGIC.to_ne_bytes());
        put(&mut out, count)?;
        for (section, at) in [(generator, generator_at), (hwcaps, hwcaps_at)] {
            if let Some((tag, data)) = section {
                out.extend_from_slice(&tag.to_ne_bytes());
                out.extend_from_slice(&[0; 4]);
                put(&mut out, at)?;
                put(&mut out, data.len())?;
            }
        }
        for (_, data) in [hwcaps, generator].into_iter().flatten() {
            out.extend_from_slice(data);
        }
        Ok((at, out))
    }
}

impl Entry<'_> {
    /// Returns the row of the new table, with the offsets of name and path.
    pub(super) fn row(&self, name: usize, path: usize) -> Result<[[u8; 4]; NEW_ENTRY / 4]> {
        let [a, b, c, d, e, f, g, h] = self.hwcap.to_ne_bytes();
        let (flags, os_version) = (self.flags.to_ne_bytes(), self.os_version.to_ne_bytes());
        Ok([
            flags,
            number(name)?,
            number(path)?,
            os_version,
            [a, b, c, d],
            [e, f, g, h],
        ])
    }
}

/// Writes the header of the new layout.
pub(super) fn put_new_header(
    out: &mut Vec<u8>,
    entries: usize,
    strings: usize,
    extension: usize,
) -> Result<()> {
    out.extend_from_slice(NEW_MAGIC);
    put(out, entries)?;
    put(out, strings)?;
    const { assert!(NEW_BYTE_ORDER_AT == NEW_MAGIC.len() + 8) };
    out.extend_from_slice(&[BYTE_ORDER, 0, 0, 0]);
    put(out, extension)?;
    out.extend_from_slice(&[0; 12]);
    Ok(())
}

/// Returns the size of the header and the table in the new layout.
pub(super) fn new_table_size(entries: usize) -> usize {
    NEW_HEADER.saturating_add(entries.saturating_mul(NEW_ENTRY))
}

/// Whether loaders would mistake the strings after an old table for a new table. An image can have a library whose name is the magic
/// of the new table, and then no loader would find any library.
fn looks_new(strings: &Strings, entries: usize) -> bool {
    let end = OLD_HEADER.saturating_add(entries.saturating_mul(OLD_ENTRY));
    let skipped = end.next_multiple_of(NEW_ALIGN).saturating_sub(end);
    strings
        .bytes
        .get(skipped..)
        .is_some_and(|bytes| bytes.starts_with(NEW_MAGIC))
}

/// Writes the old header and table. The strings begin `distance` bytes after the table.
fn put_old(out: &mut Vec<u8>, entries: &[(&Entry<'_>, &Offsets)], distance: usize) -> Result<()> {
    out.extend_from_slice(OLD_MAGIC);
    out.resize(OLD_COUNT_AT, 0);
    put(out, entries.len())?;
    const { assert!(OLD_COUNT_AT + 4 == OLD_HEADER) };
    for (entry, string) in entries {
        let name = number(distance.saturating_add(string.name))?;
        let path = number(distance.saturating_add(string.path))?;
        let row: [_; OLD_ENTRY / 4] = [entry.flags.to_ne_bytes(), name, path];
        out.extend_from_slice(row.as_flattened());
    }
    Ok(())
}

/// Writes a number with 32 bits.
fn put(out: &mut Vec<u8>, value: usize) -> Result<()> {
    out.extend_from_slice(&number(value)?);
    Ok(())
}

/// Returns the 32 bits of a number.
pub(super) fn number(value: usize) -> Result<[u8; 4]> {
    Ok(u32::try_from(value)
        .context("too large for a linker cache")?
        .to_ne_bytes())
}

/// The offsets of the strings of an entry, relative to the first string.
pub(super) struct Offsets {
    pub(super) name: usize,
    pub(super) path: usize,
}

/// All strings, each with a final NUL.
pub(super) struct Strings {
    pub(super) bytes: Vec<u8>,
    pub(super) entries: Vec<Offsets>,
    hwcaps: Vec<usize>,
}

impl Strings {
    pub(super) fn new(cache: &Cache<'_>) -> Result<Self> {
        let names = cache
            .entries
            .iter()
            .map(|entry| entry.name)
            .chain(cache.hwcaps.iter().copied());
        let paths = cache.entries.iter().map(|entry| entry.path.as_os_str());
        let (count, text) = names
            .chain(paths)
            .fold((0_usize, 0_usize), |(count, text), string| {
                (count.saturating_add(1), text.saturating_add(string.len()))
            });
        ensure!(
            text <= MAX_TEXT,
            "{text} bytes of strings, more than {MAX_TEXT}"
        );

        // The capacity is computed first, because growing the buffer would take more time than all other work here.
        let mut strings = Self {
            bytes: Vec::with_capacity(text.saturating_add(count)),
            entries: Vec::with_capacity(cache.entries.len()),
            hwcaps: Vec::with_capacity(cache.hwcaps.len()),
        };
        for entry in &cache.entries {
            let (name, path) = (entry.name, entry.path.as_os_str());
            let path_at = strings.add(path)?;
            // Usually the name is the end of the path, so one string is enough for both.
            let name_at = match path.len().checked_sub(name.len()) {
                Some(before) if path.as_bytes().ends_with(name.as_bytes()) => {
                    path_at.saturating_add(before)
                }
                _ => strings.add(name)?,
            };
            strings.entries.push(Offsets {
                name: name_at,
                path: path_at,
            });
        }
        for name in &cache.hwcaps {
            let at = strings.add(name)?;
            strings.hwcaps.push(at);
        }
        Ok(strings)
    }

    fn add(&mut self, string: &OsStr) -> Result<usize> {
        let at = self.bytes.len();
        ensure!(!string.as_bytes().contains(&0), "{string:?} has a NUL byte");
        ensure!(
            string.len() < MAX_STRING,
            "a string of {} bytes, more than {}",
            string.len(),
            MAX_STRING - 1
        );
        self.bytes.extend_from_slice(string.as_bytes());
        self.bytes.push(0);
        Ok(at)
    }
}
