//! Parses the bytes of a file into a [`Cache`]. An image may have written any offset and count in the file.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::{
    BYTE_ORDER, BYTE_ORDER_MASK, Cache, EXTENSION_HEADER, EXTENSION_MAGIC, EXTENSION_SECTION, Entry, Layout,
    MAX_ENTRIES, MAX_HWCAPS, MAX_STRING, MAX_TEXT, NEW_ALIGN, NEW_BYTE_ORDER_AT, NEW_COUNT_AT, NEW_ENTRY,
    NEW_EXTENSION_AT, NEW_HEADER, NEW_MAGIC, OLD_COUNT_AT, OLD_ENTRY, OLD_HEADER, OLD_MAGIC, TAG_GENERATOR, TAG_HWCAPS,
    compare,
};

/// Parses a cache of any layout.
///
/// Entries are sorted if necessary, because ld.so and [`Cache::merge`] rely on the order. Extension sections with unknown tags are
/// dropped: they may contain offsets that would be wrong in a new file.
///
/// # Errors
/// If the file is not a cache, has the other byte order, contains an offset outside of it, or exceeds a limit.
pub fn parse(bytes: &[u8]) -> Result<Cache<'_>> {
    let mut text = Text { left: MAX_TEXT };
    let mut cache = if bytes.starts_with(NEW_MAGIC) {
        parse_new(bytes, bytes, Layout::New, &mut text)?
    } else if bytes.starts_with(OLD_MAGIC) {
        let count = count(bytes, OLD_COUNT_AT, OLD_HEADER, OLD_ENTRY)?;
        let end = OLD_HEADER.saturating_add(count.saturating_mul(OLD_ENTRY));
        // The new table is at the position where an old loader expects strings, and its magic is a string for that loader.
        match bytes.get(end.next_multiple_of(NEW_ALIGN)..) {
            Some(part) if part.starts_with(NEW_MAGIC) => parse_new(part, bytes, Layout::Compat, &mut text)?,
            _ => parse_old(bytes, count, end, &mut text)?,
        }
    } else {
        bail!("not a linker cache: unknown magic");
    };
    if !cache.entries.is_sorted_by(|a, b| compare(a, b).is_le()) {
        cache.entries.sort_by(compare);
    }
    Ok(cache)
}

fn parse_old<'a>(bytes: &'a [u8], count: usize, end: usize, text: &mut Text) -> Result<Cache<'a>> {
    let strings = bytes.get(end..).unwrap_or_default();
    let mut cache = Cache::empty(Layout::Old);
    cache.entries = entries(bytes, OLD_HEADER, OLD_ENTRY, count, |fields| {
        Ok(Entry {
            flags: i32_at(fields, 0)?,
            name: text.string(strings, u32_at(fields, 4)?)?,
            path: Path::new(text.string(strings, u32_at(fields, 8)?)?),
            os_version: 0,
            hwcap: 0,
        })
    })?;
    Ok(cache)
}

/// Parses the new table. `part` begins at the new header, to which the offsets of strings are relative. The offsets of extensions are
/// relative to `file`.
fn parse_new<'a>(part: &'a [u8], file: &'a [u8], layout: Layout, text: &mut Text) -> Result<Cache<'a>> {
    let order = *part.get(NEW_BYTE_ORDER_AT).context("truncated header")?;
    // As in cache_file_new_matches_endian, only the value 0 means that the byte order is not recorded.
    ensure!(
        order == 0 || order & BYTE_ORDER_MASK == BYTE_ORDER,
        "byte order mark {order:#x} is not this machine's {BYTE_ORDER:#x}"
    );
    let count = count(part, NEW_COUNT_AT, NEW_HEADER, NEW_ENTRY)?;
    let mut cache = Cache::empty(layout);
    cache.entries = entries(part, NEW_HEADER, NEW_ENTRY, count, |fields| {
        Ok(Entry {
            flags: i32_at(fields, 0)?,
            name: text.string(part, u32_at(fields, 4)?)?,
            path: Path::new(text.string(part, u32_at(fields, 8)?)?),
            os_version: u32_at(fields, 12)?,
            hwcap: u64::from_ne_bytes(array_at(fields, 16)?),
        })
    })?;
    parse_extension(&mut cache, part, file, text).context("extension")?;
    Ok(cache)
}

fn parse_extension<'a>(cache: &mut Cache<'a>, part: &'a [u8], file: &'a [u8], text: &mut Text) -> Result<()> {
    let at = u32_at(part, NEW_EXTENSION_AT)? as usize;
    if at == 0 {
        return Ok(()); // ldconfig before glibc 2.33
    }
    ensure!(at.is_multiple_of(4), "offset {at:#x} is not a multiple of 4");
    let directory = file.get(at..).with_context(|| format!("offset {at:#x} is outside the file"))?;
    ensure!(u32_at(directory, 0)? == EXTENSION_MAGIC, "unknown magic");
    let count = u32_at(directory, 4)? as usize;
    let sections = slice(directory, EXTENSION_HEADER, count.saturating_mul(EXTENSION_SECTION))
        .with_context(|| format!("{count} sections do not fit into the file"))?;
    for section in sections.chunks_exact(EXTENSION_SECTION) {
        let (tag, start, size) = (u32_at(section, 0)?, u32_at(section, 8)?, u32_at(section, 12)?);
        let data = slice(file, start as usize, size as usize)
            .with_context(|| format!("section {tag} of {size} bytes at {start:#x} is outside the file"))?;
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
    ensure!(offsets.len() <= MAX_HWCAPS, "{} subdirectories", offsets.len());
    offsets.map(|offset| text.string(part, u32_at(offset, 0)?)).collect()
}

/// Reads the number of entries, which must fit into the file.
fn count(bytes: &[u8], count_at: usize, header: usize, entry: usize) -> Result<usize> {
    let room = bytes.len().checked_sub(header).context("truncated header")? / entry;
    let count = u32_at(bytes, count_at)?;
    if count as usize > room {
        ensure!(count.swap_bytes() as usize > room, "byte order is not this machine's");
        bail!("{count} entries do not fit into {} bytes", bytes.len());
    }
    ensure!(count as usize <= MAX_ENTRIES, "{count} entries, more than {MAX_ENTRIES}");
    Ok(count as usize)
}

fn entries<'a>(
    bytes: &'a [u8],
    header: usize,
    size: usize,
    count: usize,
    mut read: impl FnMut(&'a [u8]) -> Result<Entry<'a>>,
) -> Result<Vec<Entry<'a>>> {
    let table = slice(bytes, header, count.saturating_mul(size)).context("truncated table")?;
    let mut entries = Vec::with_capacity(count);
    for (index, fields) in table.chunks_exact(size).enumerate() {
        entries.push(read(fields).with_context(|| format!("entry {index}"))?);
    }
    Ok(entries)
}

/// Limits the bytes of strings that are read from a file.
struct Text {
    left: usize,
}

impl Text {
    fn string<'a>(&mut self, table: &'a [u8], offset: u32) -> Result<&'a OsStr> {
        let rest = table
            .get(offset as usize..)
            .filter(|rest| !rest.is_empty())
            .with_context(|| format!("string offset {offset:#x} is outside the file"))?;
        let string = CStr::from_bytes_until_nul(rest.get(..MAX_STRING).unwrap_or(rest))
            .ok()
            .with_context(|| format!("string at {offset:#x} has no end within {MAX_STRING} bytes"))?;
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
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().context("truncated")
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32> {
    array_at(bytes, at).map(u32::from_ne_bytes)
}

fn i32_at(bytes: &[u8], at: usize) -> Result<i32> {
    array_at(bytes, at).map(i32::from_ne_bytes)
}
