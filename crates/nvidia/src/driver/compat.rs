//! Decides about CUDA forward compatibility. An image may contain a libcuda in `/usr/local/cuda/compat` that is newer than the
//! host's driver. A note in the library lists the drivers that it works with.
//! <https://docs.nvidia.com/deploy/cuda-compatibility/#forward-compatibility>
//!
//! The hook neither mounts nor loads that library. Only the order of the linker cache in the container changes.

use std::cmp::Ordering;
use std::io::{Read, Seek};

use elf::abi::SHT_NOTE;
use elf::note::{Note as ElfNote, NoteIterator};
use serde::Deserialize;

use base::json;

use super::elf::Elf;
use super::is_version;
use crate::require::compare_versions;

/// The directory of the library in images, below the rootfs.
pub const DIR: &str = "usr/local/cuda/compat";

/// The note of the library, in the ELF section `.note.cuda.fwd_compatibility`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Note {
    /// The CUDA version of the library
    #[serde(default, rename = "CUDA Version")]
    pub cuda: String,
    /// The driver branches that the library works with
    #[serde(default, rename = "Driver")]
    pub drivers: Vec<u32>,
}

/// Returns the version in `libcuda.so.575.57.08`, if there is exactly one such name.
#[must_use]
pub fn version_of<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut versions = names
        .filter_map(|name| name.strip_prefix("libcuda.so."))
        .filter(|text| is_version(text));
    let first = versions.next()?;
    versions.next().is_none().then_some(first)
}

/// Reads the note of a library. The file comes from an image and may have any content.
#[must_use]
pub fn read_note(file: impl Read + Seek) -> Option<Note> {
    let mut elf = Elf::open(file)?;
    let section = elf
        .section(".note.cuda.fwd_compatibility")
        .filter(|section| section.sh_type == SHT_NOTE)?;
    let data = elf.data(&section)?;
    let align = usize::try_from(section.sh_addralign).ok()?;
    NoteIterator::new(elf.endian(), elf.class(), align, &data).find_map(|note| match note {
        ElfNote::Unknown(note) => json::from_bytes(note.desc.split(|c| *c == 0).next()?).ok(),
        _ => None,
    })
}

/// Whether to use the image's library. Empty versions are unknown.
#[must_use]
pub fn is_to_be_used(
    note: Option<&Note>,
    compat_driver: &str,
    host_driver: &str,
    host_cuda: &str,
) -> bool {
    let major = |version: &str| {
        version
            .split('.')
            .next()
            .and_then(|major| major.parse::<u32>().ok())
    };
    let newer = |a: &str, b: &str| compare_versions(a, b) == Some(Ordering::Greater);
    match (note, major(compat_driver), major(host_driver)) {
        (Some(note), Some(_), Some(host)) => {
            note.drivers.contains(&host) && newer(compat_driver, host_driver)
        }
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
            (
                &["libcuda.so", "libcuda.so.1", "libcuda.so.575.57.08"][..],
                Some("575.57.08"),
            ),
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
        assert_eq!(
            read_note(std::fs::File::open("/proc/self/exe").unwrap()),
            None
        );
    }
}
