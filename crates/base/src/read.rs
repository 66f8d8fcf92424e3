//! Reading input of bounded size: what is read may be written by a container or another user.

use std::fs::File;
use std::io::Read;

use anyhow::{Context, Result, ensure};

use crate::sys::proc_file::read_whole;

/// Reads all of `input`, but no more than `limit` bytes.
///
/// # Errors
/// If reading fails or `input` is longer.
pub fn read_limited(input: impl Read, limit: usize) -> Result<Vec<u8>> {
    read_sized(input, 0, limit)
}

/// The same of a file that may be large.
///
/// # Errors
/// If reading fails or the file is longer.
pub fn read_file_limited(file: &File, limit: usize) -> Result<Vec<u8>> {
    let size = usize::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or_default();
    read_sized(file, size.min(limit), limit)
}

fn read_sized(input: impl Read, size: usize, limit: usize) -> Result<Vec<u8>> {
    let capped = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    let bytes = read_whole(input.take(capped), size).context("read")?;
    ensure!(bytes.len() <= limit, "larger than {} MiB", limit >> 20);
    Ok(bytes)
}
