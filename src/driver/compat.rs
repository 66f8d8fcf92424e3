//! CUDA forward compatibility: an image may bring a libcuda that is newer than the host's driver, in
//! `/usr/local/cuda/compat`, and NVIDIA says with which drivers it works.
//! <https://docs.nvidia.com/deploy/cuda-compatibility/#forward-compatibility>
//!
//! Nothing of the image is mounted or loaded by us: its own linker cache leads its own programs to its own library.

use std::cmp::Ordering;
use std::io::{Read, Seek};

use elf::ElfStream;
use elf::abi::ELFCLASS32;
use elf::endian::AnyEndian;
use elf::note::Note as ElfNote;
use serde::Deserialize;

use crate::request::require::compare_versions;

/// Where images have it, below the rootfs.
pub const DIR: &str = "usr/local/cuda/compat";

/// What the library says of itself, in the ELF section `.note.cuda.fwd_compatibility`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Note {
    /// Its CUDA version
    #[serde(default, rename = "CUDA Version")]
    pub cuda: String,
    /// The driver branches that it works with
    #[serde(default, rename = "Driver")]
    pub drivers: Vec<u32>,
}

/// The most that is read of one section, in bytes; a note of this kind is some hundred.
const MAX_SECTION: u64 = 64 * 1024;

/// The version in `libcuda.so.575.57.08`, if the directory has exactly one such name.
#[must_use]
pub fn version_of<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let is_version = |text: &&str| text.contains('.') && text.bytes().all(|c| c.is_ascii_digit() || c == b'.');
    let mut versions = names.filter_map(|name| name.strip_prefix("libcuda.so.")).filter(is_version);
    let first = versions.next()?;
    versions.next().is_none().then_some(first)
}

/// Reads the note of a library. It comes from an image: any file will do, and a sparse one has any size.
#[must_use]
pub fn read_note(mut file: impl Read + Seek) -> Option<Note> {
    if !has_bounded_headers(&mut file) {
        return None;
    }
    let mut elf = ElfStream::<AnyEndian, _>::open_stream(file).ok()?;
    let names = elf.section_headers().get(usize::from(elf.ehdr.e_shstrndx))?;
    if names.sh_size > MAX_SECTION {
        return None;
    }
    let section = elf.section_header_by_name(".note.cuda.fwd_compatibility").ok()?.copied()?;
    if section.sh_size > MAX_SECTION {
        return None;
    }
    let mut notes = elf.section_data_as_notes(&section).ok()?;
    notes.find_map(|note| match note {
        ElfNote::Unknown(note) => serde_json::from_slice(note.desc.split(|c| *c == 0).next()?).ok(),
        _ => None,
    })
}

/// Whether the numbers of headers are in the file's own header, and so at most 65 535: larger ones are elsewhere, of 32
/// and 64 bits (elf(5), on `e_shnum` and `e_phnum`), and the parser allocates what they ask for.
fn has_bounded_headers(file: &mut (impl Read + Seek)) -> bool {
    let mut header = [0; 64];
    if file.read_exact(&mut header).is_err() || file.rewind().is_err() {
        return false;
    }
    let (phnum, shnum) = if header.get(4) == Some(&ELFCLASS32) { (44, 48) } else { (56, 60) };
    // The marks are the same in both byte orders.
    let is = |at: usize, mark: [u8; 2]| header.get(at..).is_some_and(|bytes| bytes.starts_with(&mark));
    !is(phnum, [0xff, 0xff]) && !is(shnum, [0, 0])
}

/// Whether the image's library is to be used. Empty versions are not known.
#[must_use]
pub fn is_to_be_used(note: Option<&Note>, compat_driver: &str, host_driver: &str, host_cuda: &str) -> bool {
    let major = |version: &str| version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    let newer = |a: &str, b: &str| compare_versions(a, b) == Some(Ordering::Greater);
    match (note, major(compat_driver), major(host_driver)) {
        (Some(note), Some(_), Some(host)) => note.drivers.contains(&host) && newer(compat_driver, host_driver),
        (Some(note), _, _) => !host_cuda.is_empty() && newer(&note.cuda, host_cuda),
        (None, Some(compat), Some(host)) => host < compat,
        (None, _, _) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_version_is_one_version() {
        for (names, version) in [
            (&["libcuda.so", "libcuda.so.1", "libcuda.so.575.57.08"][..], Some("575.57.08")),
            (&["libcuda.so.575.57.08", "libcuda.so.560.1"], None),
            (&["libcuda.so.1"], None),
            (&["libcuda.so.5.x"], None),
            (&[], None),
        ] {
            assert_eq!(version_of(names.iter().copied()), version, "{names:?}");
        }
    }

    #[test]
    fn no_note_in_what_is_no_library() {
        assert_eq!(read_note(std::io::Cursor::new(b"\x7fELF")), None);
        assert_eq!(read_note(std::fs::File::open("/proc/self/exe").unwrap()), None);
    }
}
