//! The functions that fuzzing and `tests/it/fuzz_corpus.rs` run: one for each parser of foreign data, which passes bytes
//! to the parser and panics if a property does not hold that must hold for all bytes.
//!
//! An input that violated a property is kept in `corpus/<target>/`, with a name that describes the input.

pub mod cached_inventory;
pub mod capabilities;
pub mod cdi_spec;
pub mod cgroup;
pub mod command_line;
pub mod compat_note;
pub mod config;
pub mod container_path;
pub mod device_program;
pub mod device_rules;
pub mod devices;
pub mod driver_proc;
pub mod elf;
pub mod engine_settings;
pub mod error_text;
pub mod hook_file;
pub mod inventory;
pub mod journal;
pub mod ldcache;
pub mod ldconf;
pub mod mig_minors;
pub mod record;
pub mod require;
pub mod spec;
pub mod state;

#[path = "../shared.rs"]
mod shared;

use std::io::{Read, Seek, SeekFrom};

pub use shared::{check_error, check_findings, check_line, sample_inventory, text};

/// A file that an image can contain: 1 TiB, all of it a hole except for the start. Reading it completely would exhaust the host.
#[derive(Debug)]
pub struct SparseFile<'a> {
    data: &'a [u8],
    at: u64,
    read: usize,
}

impl<'a> SparseFile<'a> {
    const LENGTH: u64 = 1 << 40;
    /// The number of bytes that a parser may read.
    const MOST: usize = 8 << 20;

    /// Creates the file with these bytes at its start.
    pub fn new(data: &'a [u8]) -> Self {
        Self {
            data,
            at: 0,
            read: 0,
        }
    }
}

impl Read for SparseFile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.read += buffer.len();
        assert!(
            self.read <= Self::MOST,
            "{} bytes are read at {:#x}",
            buffer.len(),
            self.at
        );
        let rest = usize::try_from(self.at)
            .ok()
            .and_then(|at| self.data.get(at..))
            .unwrap_or_default();
        let left = usize::try_from(Self::LENGTH.saturating_sub(self.at)).unwrap();
        let count = buffer.len().min(left);
        let from_data = rest.len().min(count);
        buffer[..from_data].copy_from_slice(&rest[..from_data]);
        buffer[from_data..count].fill(0);
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for SparseFile<'_> {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        let to = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => Self::LENGTH.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = to.ok_or(std::io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}
