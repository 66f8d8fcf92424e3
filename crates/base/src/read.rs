//! Reads input with a size limit. A container or another user may have written it, and could fill the memory of the host.

use std::fs::File;
use std::io::Read;

use anyhow::{Context, Result, ensure};
use rustix::fs::Stat;

use crate::sys::proc_file::{Length, read_whole};

/// Reads `input` to its end.
///
/// # Errors
/// If a read fails, or `input` has more than `limit` bytes.
pub fn read_limited(input: impl Read, limit: usize) -> Result<Vec<u8>> {
    read_sized(input, Length::Unknown, limit)
}

/// Reads a file to its end. The buffer is allocated once, with the size of the file.
///
/// # Errors
/// If a read fails, or the file has more than `limit` bytes.
pub fn read_file_limited(file: &File, limit: usize) -> Result<Vec<u8>> {
    read_known(file, &rustix::fs::fstat(file)?, limit)
}

/// Reads a file to its end, whose state is known.
///
/// # Errors
/// The errors of [`read_file_limited`].
pub fn read_known(file: &File, stat: &Stat, limit: usize) -> Result<Vec<u8>> {
    // Files of proc(5) have size 0.
    let length = match usize::try_from(stat.st_size) {
        Ok(size) if size > 0 => Length::Known(size.min(limit.saturating_add(1))),
        _ => Length::Unknown,
    };
    read_sized(file, length, limit)
}

fn read_sized(input: impl Read, length: Length, limit: usize) -> Result<Vec<u8>> {
    let capped = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    let bytes = read_whole(input.take(capped), length).context("read")?;
    ensure!(bytes.len() <= limit, "larger than {} MiB", limit >> 20);
    Ok(bytes)
}
