//! Reads the ELF headers and sections of libraries: the architecture, the SONAME and notes. See elf(5).

use std::ffi::{CStr, OsString};
use std::io::{Read, Seek, SeekFrom};

use elf::abi::{
    DT_SONAME, EI_NIDENT, EM_386, EM_AARCH64, EM_ARM, EM_X86_64, SHT_DYNAMIC, SHT_NOBITS,
};
use elf::dynamic::DynamicTable;
use elf::endian::AnyEndian;
use elf::file::{Class, ELF32_EHDR_TAILSIZE, ELF64_EHDR_TAILSIZE, FileHeader, parse_ident};
use elf::parse::ParseAt;
use elf::section::{SectionHeader, SectionHeaderTable};

use super::ldcache::Arch;

/// The largest part in bytes that is read. The section table, the section names and the dynamic section of a library have a few KiB
/// each.
const MAX_PART: u64 = 1 << 20;
/// The longest file name in bytes (NAME_MAX).
const MAX_NAME: u64 = 255;

/// The number of bytes that [`is_for`] needs.
pub const HEADER: usize = 20;

/// Whether a file with these first bytes is an ELF file for this architecture.
#[must_use]
pub fn is_for(header: &[u8], arch: Arch) -> bool {
    let (class, machine) = match arch {
        Arch::X86_64 => (2, EM_X86_64),
        Arch::Aarch64 => (2, EM_AARCH64),
        Arch::I386 => (1, EM_386),
        Arch::Arm => (1, EM_ARM),
    };
    // EI_CLASS and e_machine. All four architectures are little-endian.
    header.starts_with(b"\x7fELF")
        && header.get(4) == Some(&class)
        && header.get(18..20) == Some(&machine.to_le_bytes())
}

/// The number of bytes that [`fault`] needs.
pub const FULL_HEADER: usize = 64;

/// Returns why a file with these first bytes is not a whole library for this 64-bit architecture, in words. A full disk during an update
/// leaves empty and truncated files. The section headers are at the end of a file, so their place shows the size that it must have.
#[must_use]
pub fn fault(header: &[u8; FULL_HEADER], size: u64, arch: Arch) -> Option<&'static str> {
    if size == 0 {
        return Some("the file is empty");
    }
    if !is_for(header, arch) {
        return Some("it has another format");
    }
    // e_shoff, e_shentsize and e_shnum
    let sections = number(header, 40, 8);
    let end = sections.saturating_add(number(header, 58, 2) * number(header, 60, 2));
    if end > size {
        return Some("the file is truncated");
    }
    None
}

/// Returns the little-endian number at this place.
fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    let mut number = 0;
    for byte in bytes.iter().skip(at).take(length).rev() {
        number = number << 8 | u64::from(*byte);
    }
    number
}

/// Returns the SONAME of a library, or `None` if the file has none.
#[must_use]
pub fn soname(file: impl Read + Seek) -> Option<OsString> {
    let mut elf = Elf::open(file)?;
    let dynamic = *elf
        .sections
        .iter()
        .find(|section| section.sh_type == SHT_DYNAMIC)?;
    let dynamic = elf.data(&dynamic)?;
    let table: DynamicTable<'_, _> = DynamicTable::new(elf.endian(), elf.class(), &dynamic);
    let offset = table.iter().find(|entry| entry.d_tag == DT_SONAME)?.d_val();
    let strings = elf.section(".dynstr")?;
    let size = strings.sh_size.checked_sub(offset)?.min(MAX_NAME + 1);
    let text = read_at(&mut elf.file, strings.sh_offset.checked_add(offset)?, size)?;
    let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
    (!text.is_empty() && !text.contains('/')).then(|| text.into())
}

/// An open ELF file with sections.
///
/// A file from an image can be sparse, with a size of a terabyte and tables of that size. `elf::ElfStream` trusts all sizes in the
/// file; this type treats parts of more than 1 MiB as missing.
#[derive(Debug)]
pub struct Elf<R> {
    file: R,
    header: FileHeader<AnyEndian>,
    sections: Vec<SectionHeader>,
    names: Vec<u8>,
}

impl<R: Read + Seek> Elf<R> {
    /// Reads the headers. Returns `None` if the file is not an ELF file with sections.
    pub fn open(mut file: R) -> Option<Self> {
        let ident = parse_ident(&read_at(&mut file, 0, EI_NIDENT as u64)?).ok()?;
        let rest = match ident.1 {
            Class::ELF32 => ELF32_EHDR_TAILSIZE,
            Class::ELF64 => ELF64_EHDR_TAILSIZE,
        };
        let header =
            FileHeader::parse_tail(ident, &read_at(&mut file, EI_NIDENT as u64, rest as u64)?)
                .ok()?;
        let size = SectionHeader::validate_entsize(header.class, header.e_shentsize.into()).ok()?;
        // The number 0 stands for more than 65279 sections, which no library has.
        let table = read_at(
            &mut file,
            header.e_shoff,
            u64::from(header.e_shnum).checked_mul(size as u64)?,
        )?;
        let sections: Vec<_> = SectionHeaderTable::new(header.endianness, header.class, &table)
            .iter()
            .collect();
        let names = sections.get(usize::from(header.e_shstrndx))?;
        let names = read_at(&mut file, names.sh_offset, names.sh_size)?;
        Some(Self {
            file,
            header,
            sections,
            names,
        })
    }

    /// Returns the byte order of the file.
    #[must_use]
    pub(crate) fn endian(&self) -> AnyEndian {
        self.header.endianness
    }

    /// Returns whether the file has 32 or 64 bits.
    #[must_use]
    pub fn class(&self) -> Class {
        self.header.class
    }

    /// Returns the first section with this name.
    #[must_use]
    pub fn section(&self, name: &str) -> Option<SectionHeader> {
        self.sections
            .iter()
            .find(|section| self.is_named(section, name))
            .copied()
    }

    /// Compares only the prefix: in a hostile file, 16,000 sections can share one name of a megabyte.
    fn is_named(&self, section: &SectionHeader, name: &str) -> bool {
        let rest = self
            .names
            .get(section.sh_name as usize..)
            .and_then(|text| text.strip_prefix(name.as_bytes()));
        rest.is_some_and(|rest| rest.first() == Some(&0))
    }

    /// Reads the content of a section. Returns `None` if it is missing or has more than 1 MiB.
    pub fn data(&mut self, section: &SectionHeader) -> Option<Vec<u8>> {
        (section.sh_type != SHT_NOBITS)
            .then(|| read_at(&mut self.file, section.sh_offset, section.sh_size))?
    }
}

fn read_at(file: &mut (impl Read + Seek), at: u64, size: u64) -> Option<Vec<u8>> {
    if size > MAX_PART {
        return None;
    }
    file.seek(SeekFrom::Start(at)).ok()?;
    let mut bytes = Vec::new();
    file.take(size).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 == size).then_some(bytes)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn files_that_are_not_whole_libraries() {
        let program = std::fs::read("/proc/self/exe").unwrap();
        let fault_of = |bytes: &[u8], size: usize| {
            let mut header = [0; FULL_HEADER];
            let known = bytes.len().min(FULL_HEADER);
            header[..known].copy_from_slice(&bytes[..known]);
            fault(&header, size.try_into().unwrap(), Arch::native())
        };
        assert_eq!(fault_of(&program, program.len()), None);
        assert_eq!(
            fault_of(&program, program.len() / 2),
            Some("the file is truncated")
        );
        assert_eq!(fault_of(&program, 64), Some("the file is truncated"));
        assert_eq!(fault_of(b"", 0), Some("the file is empty"));
        assert_eq!(fault_of(b"#!/bin/sh\n", 10), Some("it has another format"));
    }
    use proptest::prelude::*;
    use std::io::Cursor;

    fn header(class: u8, machine: u16) -> Vec<u8> {
        let mut bytes = b"\x7fELF".to_vec();
        bytes.push(class);
        bytes.resize(18, 0);
        bytes.extend(machine.to_le_bytes());
        bytes
    }

    /// A whole library for this machine: a header, and no section.
    pub(crate) fn of_this_machine() -> Vec<u8> {
        let machine = if cfg!(target_arch = "aarch64") {
            EM_AARCH64
        } else {
            EM_X86_64
        };
        let mut whole = header(2, machine);
        whole.resize(FULL_HEADER, 0);
        whole
    }

    #[test]
    fn headers() {
        assert!(is_for(&header(2, EM_X86_64), Arch::X86_64));
        assert!(is_for(&header(1, EM_386), Arch::I386));
        assert!(!is_for(&header(2, EM_AARCH64), Arch::X86_64));
        assert!(!is_for(&header(1, EM_X86_64), Arch::X86_64));
        assert!(!is_for(b"\x7fELF", Arch::X86_64) && !is_for(b"", Arch::X86_64));
    }

    #[test]
    fn this_program_has_no_soname_and_libc_has() {
        let open = |path: &str| std::fs::File::open(path).unwrap();
        assert_eq!(soname(open("/proc/self/exe")), None);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps.lines().find_map(|line| {
            line.split_whitespace()
                .nth(5)
                .filter(|path| path.contains("libc.so"))
        });
        assert_eq!(soname(open(libc.unwrap())).unwrap(), "libc.so.6");
    }

    /// The start of a 64-bit file with two sections, the second of which has the names, and is as large as it says.
    fn with_names_of(size: u64) -> Vec<u8> {
        let mut bytes = vec![0; 64 + 2 * 64];
        bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        for (at, value) in [(20, 1), (40, 64), (58, 64), (60, 2), (62, 1)] {
            bytes[at] = value; // e_version, e_shoff, e_shentsize, e_shnum, e_shstrndx
        }
        bytes[64 + 64 + 32..][..8].copy_from_slice(&size.to_le_bytes()); // sh_size
        bytes
    }

    #[test]
    fn a_hole_of_a_terabyte_is_not_read() {
        for (size, opens) in [
            (0, true),
            (1 << 20, true),
            ((1 << 20) + 1, false),
            (1 << 39, false),
            (u64::MAX, false),
        ] {
            let mut file = tempfile::tempfile().unwrap();
            std::io::Write::write_all(&mut file, &with_names_of(size)).unwrap();
            file.set_len(1 << 40).unwrap();
            assert_eq!(Elf::open(file).is_some(), opens, "{size}");
        }
    }

    #[test]
    fn long_names_are_not_read_for_each_section() {
        let count = 16_000;
        let mut bytes = with_names_of(1 << 20);
        bytes[60..62].copy_from_slice(&u16::try_from(count).unwrap().to_le_bytes());
        bytes.resize(64 + count * 64, 0);
        let names = u64::try_from(bytes.len()).unwrap();
        bytes[64 + 64 + 24..][..8].copy_from_slice(&names.to_le_bytes()); // sh_offset
        bytes.resize(bytes.len() + (1 << 20), b'x');
        let elf = Elf::open(Cursor::new(bytes)).unwrap();
        let start = std::time::Instant::now();
        assert_eq!(elf.section(".dynstr"), None);
        assert!(start.elapsed().as_secs() < 1, "{:?}", start.elapsed());
    }

    proptest! {
        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300), real in any::<bool>(), at in 0usize..64) {
            let mut bytes = bytes;
            if real {
                let mut program = std::fs::read("/bin/true").unwrap();
                for (to, from) in program.iter_mut().skip(at).zip(&bytes) {
                    *to = *from;
                }
                bytes = program;
            }
            prop_assert!(soname(Cursor::new(bytes)).is_none_or(|name| !name.is_empty()));
        }
    }
}
