//! Inserts entries into a cache without parsing all of it: a binary search finds the neighbors of each new entry, and the strings of
//! the image are copied as one block.
//!
//! This supports only the new layout, and only files in the form that ldconfig writes. For other files,
//! [`parse`](super::parse()) and [`Cache::merge`] have the same result.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::ffi::{CStr, OsStr};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::parse::{Text, i32_at, parse_extension, u32_at};
use super::write::{Strings, put, put_new_header};
use super::{
    BYTE_ORDER, Cache, Entry, Layout, MAX_ENTRIES, MAX_STRING, NEW_BYTE_ORDER_AT, NEW_COUNT_AT, NEW_ENTRY,
    NEW_EXTENSION_AT, NEW_HEADER, NEW_MAGIC, NEW_STRINGS_AT, NewEntry, compare_slots, sorted,
};

/// The consecutive parts of the new file; `None` if the file does not change.
pub type Pieces<'a> = Option<Vec<Cow<'a, [u8]>>>;

/// Returns the new file, or `None` if the file is not supported.
pub(super) fn splice<'a>(old: &'a [u8], ours: &[NewEntry<'_>]) -> Option<Pieces<'a>> {
    let table = Table::parse(old)?;
    let mut changes = Vec::new();
    for new in sorted(ours) {
        let place = table.place(&new)?;
        let exists = place.len() == 1 && table.entry(place.start)? == new;
        if !exists {
            changes.push((place, new));
        }
    }
    if changes.is_empty() {
        return Some(None);
    }
    let removed: usize = changes.iter().map(|(place, _)| place.len()).sum();
    let count = table.count.checked_sub(removed)?.checked_add(changes.len())?;
    if count > MAX_ENTRIES {
        return None;
    }
    // All strings move by this number of bytes.
    let shift =
        isize::try_from(changes.len()).ok()?.checked_sub_unsigned(removed)?.checked_mul(NEW_ENTRY.cast_signed())?;
    let shift = i32::try_from(shift).ok()?;

    let mut cache = Cache::empty(Layout::New);
    parse_extension(&mut cache, old, old, &mut Text::new()).ok()?;
    let mut strings = Strings::default();
    let mut head = Vec::with_capacity(NEW_HEADER.checked_add(count.checked_mul(NEW_ENTRY)?)?);
    head.resize(NEW_HEADER, 0);
    let mut from = 0;
    let behind = u32::try_from(table.strings.end).ok()?.checked_add_signed(shift)?;
    for (place, new) in &changes {
        table.copy(from..place.start, shift, &mut head)?;
        let offsets = strings.add_entry(new).ok()?;
        head.extend_from_slice(&new.flags.to_ne_bytes());
        for offset in [offsets.name, offsets.path] {
            put(&mut head, (behind as usize).checked_add(offset)?).ok()?;
        }
        head.extend_from_slice(&[0; 12]);
        from = place.end;
    }
    table.copy(from..table.count, shift, &mut head)?;
    for name in &cache.hwcaps {
        strings.add_hwcap(name).ok()?;
    }

    let texts = old.get(table.strings.clone())?;
    let end = (behind as usize).checked_add(strings.bytes.len())?;
    let (extension, bytes) = cache.extension(&strings, behind as usize, end).ok()?;
    let mut header = Vec::new();
    put_new_header(&mut header, count, texts.len().checked_add(strings.bytes.len())?, extension).ok()?;
    head.get_mut(..NEW_HEADER)?.copy_from_slice(&header);
    let mut tail = strings.bytes;
    tail.extend_from_slice(&bytes);
    Some(Some(vec![head.into(), texts.into(), tail.into()]))
}

/// The table of a file in the form that ldconfig writes.
struct Table<'a> {
    bytes: &'a [u8],
    count: usize,
    /// The range of all strings
    strings: Range<usize>,
}

impl<'a> Table<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let order = *bytes.get(NEW_BYTE_ORDER_AT)?;
        let number = |at| u32_at(bytes, at).ok().map(|number| number as usize);
        let (count, length, extension) = (number(NEW_COUNT_AT)?, number(NEW_STRINGS_AT)?, number(NEW_EXTENSION_AT)?);
        let start = NEW_HEADER.checked_add(count.checked_mul(NEW_ENTRY)?)?;
        let strings = start..start.checked_add(length)?;
        let ends = bytes.get(strings.clone())?.last().is_none_or(|byte| *byte == 0);
        let in_order = extension == 0 && bytes.len() == strings.end || extension >= strings.end;
        (bytes.starts_with(NEW_MAGIC) && (order == 0 || order == BYTE_ORDER) && ends && in_order).then_some(Self {
            bytes,
            count,
            strings,
        })
    }

    fn fields(&self, index: usize) -> Option<&'a [u8]> {
        let at = index.checked_mul(NEW_ENTRY)?.checked_add(NEW_HEADER)?;
        self.bytes.get(at..at.checked_add(NEW_ENTRY)?)
    }

    fn entry(&self, index: usize) -> Option<Entry<'a>> {
        let fields = self.fields(index).filter(|_| index < self.count)?;
        let string = |at| -> Option<&'a OsStr> {
            let offset = u32_at(fields, at).ok()? as usize;
            let rest = self.bytes.get(offset..self.strings.end).filter(|_| offset >= self.strings.start)?;
            let text = CStr::from_bytes_until_nul(rest.get(..MAX_STRING).unwrap_or(rest)).ok()?;
            Some(OsStr::from_bytes(text.to_bytes()))
        };
        Some(Entry {
            flags: i32_at(fields, 0).ok()?,
            name: string(4)?,
            path: Path::new(string(8)?),
            os_version: u32_at(fields, 12).ok()?,
            hwcap: u64::from_ne_bytes(fields.get(16..)?.try_into().ok()?),
        })
    }

    /// Returns the range of entries that a new entry replaces, or `None` if the table is not sorted there.
    fn place(&self, new: &Entry<'_>) -> Option<Range<usize>> {
        let (mut from, mut to) = (0, self.count);
        while from < to {
            let middle = from.midpoint(to);
            match compare_slots(&self.entry(middle)?, new) {
                Ordering::Less => from = middle + 1,
                _ => to = middle,
            }
        }
        let mut place = from..from;
        while place.end < self.count && compare_slots(&self.entry(place.end)?, new).is_eq() {
            place.end += 1;
        }
        let is = |index: usize, order| Some(compare_slots(&self.entry(index)?, new) == order);
        let before = from.checked_sub(1).is_none_or(|index| is(index, Ordering::Less) == Some(true));
        let after = place.end == self.count || is(place.end, Ordering::Greater)?;
        (before && after).then_some(place)
    }

    /// Copies entries, and adds `shift` to the offsets of their strings.
    fn copy(&self, range: Range<usize>, shift: i32, out: &mut Vec<u8>) -> Option<()> {
        let at = |index: usize| Some(NEW_HEADER + index.checked_mul(NEW_ENTRY)?);
        let strings = u32::try_from(self.strings.start).ok()?..u32::try_from(self.strings.end).ok()?;
        for fields in self.bytes.get(at(range.start)?..at(range.end)?)?.chunks_exact(NEW_ENTRY) {
            let mut moved = [0; NEW_ENTRY];
            moved.copy_from_slice(fields);
            for field in [4..8, 8..12] {
                let offset = u32_at(fields, field.start).ok().filter(|offset| strings.contains(offset))?;
                moved.get_mut(field)?.copy_from_slice(&offset.checked_add_signed(shift)?.to_ne_bytes());
            }
            out.extend_from_slice(&moved);
        }
        Some(())
    }
}
