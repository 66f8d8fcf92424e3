//! Inserts entries into the bytes of a cache. An image can have thousands of libraries: to parse, sort and write all of them takes as long
//! as the rest of a container start.

use anyhow::{Result, ensure};

use super::parse::{CacheTable, Text, extension_of};
use super::write::{Strings, new_table_size, number, put_new_header};
use super::{
    Cache, CacheFormat, Entry, MAX_ENTRIES, MAX_TEXT, NEW_ENTRY, NEW_EXTENSION_AT, NEW_HEADER,
    compare_slots,
};

/// The result of [`splice`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Spliced {
    /// The file has the entries already.
    Unchanged,
    /// The new file
    New(Vec<u8>),
    /// The file is not as ldconfig writes it since glibc 2.32. It must be parsed.
    Unusual,
}

/// A position in the old table, and how many entries of the image a new one replaces there.
struct Place {
    index: usize,
    replaced: usize,
}

/// Inserts `ours`, which are in ldconfig's order, without duplicates. The rows and the strings of the image are copied as they are, except
/// for the offsets, which all change by the same number. A table out of order remains so: ld.so, which searches it in the same way, finds
/// as much in it as before.
///
/// # Errors
/// If the file is not a cache, an entry that a binary search meets is damaged, or the cache becomes too large.
pub(super) fn splice(old: &[u8], ours: &[Entry<'_>]) -> Result<Spliced> {
    let table = CacheTable::of(old)?;
    let text = &mut Text::new(MAX_TEXT);
    let end = NEW_HEADER.saturating_add(table.rows.len());
    let Some(area) = strings_of(&table, old, end) else {
        return Ok(Spliced::Unusual);
    };
    let Cache {
        hwcaps, generator, ..
    } = extension_of(&table, old, text)?;

    let (places, has_all) = places(&table, ours, text)?;
    if has_all {
        return Ok(Spliced::Unchanged);
    }
    let count = new_count(&table, &places)?;
    let new = Cache {
        layout: CacheFormat::New,
        entries: ours.to_vec(),
        hwcaps,
        generator,
    };
    let strings = Strings::new(&new)?;
    let new_end = new_table_size(count);
    let base = new_end.saturating_add(area.len());
    let strings_end = base.saturating_add(strings.bytes.len());
    let (extension, extension_bytes) = new.extension(&strings, base, strings_end)?;

    let mut out = Vec::with_capacity(strings_end.saturating_add(extension_bytes.len()));
    let strings_len = area.len().saturating_add(strings.bytes.len());
    put_new_header(&mut out, count, strings_len, extension)?;
    let moved = Moved {
        from: end,
        to: new_end,
        length: area.len(),
    };
    let mut copied = 0;
    for ((place, entry), offsets) in places.iter().zip(ours).zip(&strings.entries) {
        if !moved.copy(&table, copied..place.index, &mut out) {
            return Ok(Spliced::Unusual);
        }
        let name = base.saturating_add(offsets.name);
        let path = base.saturating_add(offsets.path);
        out.extend_from_slice(entry.row(name, path)?.as_flattened());
        copied = place.index.saturating_add(place.replaced);
    }
    if !moved.copy(&table, copied..table.count(), &mut out) {
        return Ok(Spliced::Unusual);
    }
    out.extend_from_slice(area);
    out.extend_from_slice(&strings.bytes);
    out.extend_from_slice(&extension_bytes);
    Ok(Spliced::New(out))
}

/// Returns the strings of the image, which begin at `end`. Returns `None` if the layout is old or the last string has no end.
fn strings_of<'o>(table: &CacheTable<'_>, old: &'o [u8], end: usize) -> Option<&'o [u8]> {
    if table.layout != CacheFormat::New {
        return None;
    }
    let mut area_end = old.len();
    if let Some(extension) = old.get(NEW_EXTENSION_AT..)?.first_chunk() {
        let at = u32::from_ne_bytes(*extension) as usize;
        if at > 0 {
            area_end = at;
        }
    }
    let area = old.get(end..area_end)?;
    // With a NUL at the end of the strings, each of them has an end.
    area.ends_with(&[0]).then_some(area)
}

/// Returns how many entries the new table has, one for each place.
fn new_count(table: &CacheTable<'_>, places: &[Place]) -> Result<usize> {
    let replaced: usize = places.iter().map(|place| place.replaced).sum();
    let kept = table.count().saturating_sub(replaced);
    let count = kept.saturating_add(places.len());
    ensure!(
        count <= MAX_ENTRIES,
        "{count} entries, more than {MAX_ENTRIES}"
    );
    Ok(count)
}

/// Finds the place of each new entry, and whether the table has all of them.
fn places(
    table: &CacheTable<'_>,
    ours: &[Entry<'_>],
    text: &mut Text,
) -> Result<(Vec<Place>, bool)> {
    let (mut places, mut has_all, mut start) = (Vec::with_capacity(ours.len()), true, 0);
    for new in ours {
        let (mut from, mut to) = (start, table.count());
        while from < to {
            let middle = from.midpoint(to);
            let is_before = compare_slots(&table.entry(middle, text)?, new).is_lt();
            if is_before {
                from = middle.saturating_add(1)
            } else {
                to = middle
            }
        }
        let mut replaced = 0_usize;
        let mut is_same = true;
        while let Some(index) = from
            .checked_add(replaced)
            .filter(|index| *index < table.count())
        {
            let entry = table.entry(index, text)?;
            if compare_slots(&entry, new).is_ne() {
                break;
            }
            is_same &= entry == *new;
            replaced = replaced.saturating_add(1);
        }
        has_all &= is_same && replaced == 1;
        start = from.saturating_add(replaced);
        places.push(Place {
            index: from,
            replaced,
        });
    }
    Ok((places, has_all))
}

/// The strings of the image, whose offsets change.
struct Moved {
    from: usize,
    to: usize,
    length: usize,
}

impl Moved {
    /// Copies rows. Returns false if a string is not in the area.
    fn copy(
        &self,
        table: &CacheTable<'_>,
        rows: std::ops::Range<usize>,
        out: &mut Vec<u8>,
    ) -> bool {
        let bytes = rows.start.saturating_mul(NEW_ENTRY)..rows.end.saturating_mul(NEW_ENTRY);
        let Some(bytes) = table.rows.get(bytes) else {
            return false;
        };
        let at = out.len();
        out.extend_from_slice(bytes);
        let copied = out.get_mut(at..).unwrap_or_default();
        copied
            .as_chunks_mut::<NEW_ENTRY>()
            .0
            .iter_mut()
            .all(|row| self.shift(row, 4) && self.shift(row, 8))
    }

    fn shift(&self, row: &mut [u8; NEW_ENTRY], at: usize) -> bool {
        let Some(field) = row
            .get_mut(at..)
            .and_then(|rest| rest.first_chunk_mut::<4>())
        else {
            return false;
        };
        let Some(offset) = (u32::from_ne_bytes(*field) as usize).checked_sub(self.from) else {
            return false;
        };
        let new = number(offset.saturating_add(self.to));
        match new {
            Ok(new) if offset < self.length => {
                *field = new;
                true
            }
            _ => false,
        }
    }
}
