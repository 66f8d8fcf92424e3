//! What the engine hands us: the container state on stdin and the bundle's config.json.
//!
//! Both are read through small lenient views. `oci_spec::runtime::Spec` would drop fields it does not know and
//! refuse capability names it does not know; for a hook that is an outage over a field nobody reads.

pub mod insertion;
pub mod pod;
pub mod spec_view;
pub mod state;

pub use pod::Pod;
pub use spec_view::SpecView;
pub use state::State;

use std::fs::File;
use std::io::Read;

use anyhow::{Context, Result, ensure};

use crate::sys::proc_file::read_whole;

/// No engine writes a state or config.json anywhere near this; a larger one is a mistake or an attack on memory.
pub const MAX_JSON: usize = 16 << 20;

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

/// The first JSON value of `bytes`; what follows it is not looked at, as with the engines' own decoders.
fn first_json_value<'a, T: serde::Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
    match serde_json::Deserializer::from_slice(bytes).into_iter::<T>().next() {
        Some(value) => Ok(value?),
        None => anyhow::bail!("it is empty"),
    }
}
