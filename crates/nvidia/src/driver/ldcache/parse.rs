//! Parses the bytes of a file into a [`Cache`]. An image may have written any offset and count in the file.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::{
    BYTE_ORDER, BYTE_ORDER_MASK, Cache, CacheFormat, EXTENSION_HEADER, EXTENSION_MAGIC,
    EXTENSION_SECTION, Entry, MAX_ENTRIES, MAX_HWCAPS, MAX_STRING, MAX_TEXT, NEW_ALIGN,
    NEW_BYTE_ORDER_AT, NEW_COUNT_AT, NEW_ENTRY, NEW_EXTENSION_AT, NEW_HEADER, NEW_MAGIC,
    OLD_COUNT_AT, OLD_ENTRY, OLD_HEADER, OLD_MAGIC, TAG_GENERATOR, TAG_HWCAPS, compare,
    compare_names,
};

/// Parses a cache of any layout.
///
/// Entries are sorted if necessary, because ld.so and [`Cache::merge`] rely on the order. Extension sections with unknown tags are
/// dropped: they may contain offsets that would be wrong in a new file.
///
/// # Errors
/// If the file is not a cache, has the other byte order, contains an offset outside of it, or exceeds a limit.
pub fn parse(bytes: &[u8]) -> Result<Cache<'_>> {
    let mut text = Text::new(MAX_TEXT);
    let table = CacheTable::of(bytes)?;
    let entries = table.entries(&mut text)?;
    let mut cache = Cache {
        entries,
        ..extension_of(&table, bytes, &mut text)?
    };
    if !cache.entries.is_sorted_by(|a, b| compare(a, b).is_le()) {
        cache.entries.sort_by(compare);
    }
    Ok(cache)
}

/// Returns the entries of a cache whose names begin with `prefix`, which must end with a letter. It reads only the names that a binary
/// search meets, as ld.so does: a library that this function does not find in a table out of order, ld.so does not find either.
///
/// # Errors
/// If the bytes that were read are not a valid cache, see [`parse`].
pub fn with_prefix<'a>(bytes: &'a [u8], prefix: &str) -> Result<Vec<Entry<'a>>> {
    let table = CacheTable::of(bytes)?;
    let mut text = Text::new(MAX_TEXT);
    let (mut from, mut to) = (0, table.count());
    while from < to {
        let middle = from.midpoint(to);
        let name = table.entry(middle, &mut text)?.name;
        let is_before =
            !begins_with(name, prefix) && compare_names(name, OsStr::new(prefix)).is_gt();
        if is_before {
            from = middle.saturating_add(1)
        } else {
            to = middle
        }
    }
    let mut found = Vec::new();
    for index in from..table.count() {
        let entry = table.entry(index, &mut text)?;
        if !begins_with(entry.name, prefix) {
            break;
        }
        found.push(entry);
    }
    Ok(found)
}

fn begins_with(name: &OsStr, prefix: &str) -> bool {
    name.as_bytes().starts_with(prefix.as_bytes())
}

/// Returns a cache without entries, with the extension of the file.
pub(super) fn extension_of<'a>(
    table: &CacheTable<'a>,
    file: &'a [u8],
    text: &mut Text,
) -> Result<Cache<'a>> {
    let mut cache = Cache::empty(table.layout);
    if table.layout != CacheFormat::Old {
        parse_extension(&mut cache, table.strings, file, text).context("extension")?;
    }
    Ok(cache)
}

/// The table of a cache: its entries, which are not read yet, and the bytes to which the offsets of their strings are relative.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheTable<'a> {
    pub(super) layout: CacheFormat,
    pub(super) rows: &'a [u8],
    strings: &'a [u8],
}

impl<'a> CacheTable<'a> {
    pub(super) fn of(bytes: &'a [u8]) -> Result<Self> {
        if bytes.starts_with(NEW_MAGIC) {
            return Self::new(bytes, CacheFormat::New);
        }
        ensure!(
            bytes.starts_with(OLD_MAGIC),
            "not a linker cache: unknown magic"
        );
        let count = count(bytes, OLD_COUNT_AT, OLD_HEADER, OLD_ENTRY)?;
        let end = OLD_HEADER.saturating_add(count.saturating_mul(OLD_ENTRY));
        // The new table is at the position where an old loader expects strings, and its magic is a string for that loader.
        match bytes.get(end.next_multiple_of(NEW_ALIGN)..) {
            Some(part) if part.starts_with(NEW_MAGIC) => Self::new(part, CacheFormat::Compat),
            _ => {
                let rows = bytes.get(OLD_HEADER..end).context("truncated table")?;
                Ok(Self {
                    layout: CacheFormat::Old,
                    rows,
                    strings: bytes.get(end..).unwrap_or_default(),
                })
            }
        }
    }

    /// Returns the new table. `part` begins at the new header, to which the offsets of strings are relative.
    fn new(part: &'a [u8], layout: CacheFormat) -> Result<Self> {
        let order = *part.get(NEW_BYTE_ORDER_AT).context("truncated header")?;
        // As in cache_file_new_matches_endian, only the value 0 means that the byte order is not recorded.
        ensure!(
            order == 0 || order & BYTE_ORDER_MASK == BYTE_ORDER,
            "byte order mark {order:#x} is not this machine's {BYTE_ORDER:#x}"
        );
        let count = count(part, NEW_COUNT_AT, NEW_HEADER, NEW_ENTRY)?;
        let rows =
            slice(part, NEW_HEADER, count.saturating_mul(NEW_ENTRY)).context("truncated table")?;
        Ok(Self {
            layout,
            rows,
            strings: part,
        })
    }

    const fn row_size(&self) -> usize {
        if matches!(self.layout, CacheFormat::Old) {
            OLD_ENTRY
        } else {
            NEW_ENTRY
        }
    }

    pub(super) const fn count(&self) -> usize {
        self.rows.len() / self.row_size()
    }

    pub(super) fn entry(&self, index: usize, text: &mut Text) -> Result<Entry<'a>> {
        let row = slice(
            self.rows,
            index.saturating_mul(self.row_size()),
            self.row_size(),
        )
        .context("truncated table")?;
        self.read(row, text)
            .with_context(|| format!("entry {index}"))
    }

    fn entries(&self, text: &mut Text) -> Result<Vec<Entry<'a>>> {
        let mut entries = Vec::with_capacity(self.count());
        for (index, row) in self.rows.chunks_exact(self.row_size()).enumerate() {
            entries.push(
                self.read(row, text)
                    .with_context(|| format!("entry {index}"))?,
            );
        }
        Ok(entries)
    }

    fn read(&self, row: &[u8], text: &mut Text) -> Result<Entry<'a>> {
        let is_old = self.layout == CacheFormat::Old;
        Ok(Entry {
            flags: i32_at(row, 0)?,
            name: text.string(self.strings, u32_at(row, 4)?)?,
            path: Path::new(text.string(self.strings, u32_at(row, 8)?)?),
            os_version: if is_old { 0 } else { u32_at(row, 12)? },
            hwcap: if is_old {
                0
            } else {
                u64::from_ne_bytes(array_at(row, 16)?)
            },
        })
    }
}

/// Parses the extensions. `part` begins at the new header. The offsets of extensions are relative to `file`.
fn parse_extension<'a>(
    cache: &mut Cache<'a>,
    part: &'a [u8],
    file: &'a [u8],
    text: &mut Text,
) -> Result<()> {
    let at = u32_at(part, NEW_EXTENSION_AT)? as usize;
    if at == 0 {
        return Ok(()); // ldconfig before glibc 2.33
    }
    ensure!(
        at.is_multiple_of(4),
        "offset {at:#x} is not a multiple of 4"
    );
    let directory = file
        .get(at..)
        .with_context(|| format!("offset {at:#x} is outside the file"))?;
    ensure!(u32_at(directory, 0)? == EXTENSION_MAGIC, "unknown magic");
    let count = u32_at(directory, 4)? as usize;
    let sections = slice(
        directory,
        EXTENSION_HEADER,
        count.saturating_mul(EXTENSION_SECTION),
    )
    .with_context(|| format!("{count} sections do not fit into the file"))?;
    for section in sections.chunks_exact(EXTENSION_SECTION) {
        let (tag, start, size) = (
            u32_at(section, 0)?,
            u32_at(section, 8)?,
            u32_at(section, 12)?,
        );
        let data = slice(file, start as usize, size as usize).with_context(|| {
            format!("section {tag} of {size} bytes at {start:#x} is outside the file")
        })?;
        match tag {
            TAG_GENERATOR => {
                ensure!(data.len() <= MAX_STRING, "generator of {size} bytes");
                cache.generator = Some(data);
            }
            TAG_HWCAPS => cache.hwcaps = hwcaps(data, start, part, text).context("hwcaps")?,
            _ => {}
        }
    }
    Ok(())
}

/// Parses the names of `glibc-hwcaps/` subdirectories.
///
/// ldconfig writes their offsets relative to the new header, like all others, but ld.so and `ldconfig -p` read them relative to the
/// start of the file. In the compat layout these differ (seen with glibc 2.36), so loaders find no name and use the plain libraries.
/// This function reads the offsets as ldconfig writes them, and they are written in the same way, so loaders behave as before.
fn hwcaps<'a>(data: &[u8], start: u32, part: &'a [u8], text: &mut Text) -> Result<Vec<&'a OsStr>> {
    if !start.is_multiple_of(4) || !data.len().is_multiple_of(4) {
        return Ok(Vec::new()); // like cache_extension_verify
    }
    let offsets = data.chunks_exact(4);
    ensure!(
        offsets.len() <= MAX_HWCAPS,
        "{} subdirectories",
        offsets.len()
    );
    offsets
        .map(|offset| text.string(part, u32_at(offset, 0)?))
        .collect()
}

/// Reads the number of entries, which must fit into the file.
fn count(bytes: &[u8], count_at: usize, header: usize, entry: usize) -> Result<usize> {
    let room = bytes
        .len()
        .checked_sub(header)
        .context("truncated header")?
        / entry;
    let count = u32_at(bytes, count_at)?;
    if count as usize > room {
        ensure!(
            count.swap_bytes() as usize > room,
            "byte order is not this machine's"
        );
        bail!("{count} entries do not fit into {} bytes", bytes.len());
    }
    ensure!(
        count as usize <= MAX_ENTRIES,
        "{count} entries, more than {MAX_ENTRIES}"
    );
    Ok(count as usize)
}

/// Limits the bytes of strings that are read from a file.
pub(super) struct Text {
    left: usize,
}

impl Text {
    pub(super) const fn new(most: usize) -> Self {
        Self { left: most }
    }

    fn string<'a>(&mut self, table: &'a [u8], offset: u32) -> Result<&'a OsStr> {
        let rest = table
            .get(offset as usize..)
            .filter(|rest| !rest.is_empty())
            .with_context(|| format!("string offset {offset:#x} is outside the file"))?;
        let string = CStr::from_bytes_until_nul(rest.get(..MAX_STRING).unwrap_or(rest))
            .ok()
            .with_context(|| {
                format!("string at {offset:#x} has no end within {MAX_STRING} bytes")
            })?;
        self.left = self
            .left
            .checked_sub(string.count_bytes())
            .with_context(|| format!("more than {MAX_TEXT} bytes of strings"))?;
        Ok(OsStr::from_bytes(string.to_bytes()))
    }
}

fn slice(bytes: &[u8], start: usize, len: usize) -> Option<&[u8]> {
    bytes.get(start..start.checked_add(len)?)
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .copied()
        .context("truncated")
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32> {
    array_at(bytes, at).map(u32::from_ne_bytes)
}

fn i32_at(bytes: &[u8], at: usize) -> Result<i32> {
    array_at(bytes, at).map(i32::from_ne_bytes)
}
