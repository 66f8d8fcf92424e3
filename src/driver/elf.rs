//! What a library's ELF header and dynamic section say: for which machine it is, and its SONAME.

use std::ffi::OsString;
use std::io::{Read, Seek};

use elf::abi::{DT_SONAME, EM_386, EM_AARCH64, EM_ARM, EM_X86_64};
use elf::endian::AnyEndian;
use elf::{ElfStream, file::Class};

use super::ldcache::Arch;

/// The first bytes of a file: enough for [`is_for`].
pub const HEADER: usize = 20;

/// Whether a file that begins so is an ELF file for this architecture. See elf(5).
#[must_use]
pub fn is_for(header: &[u8], arch: Arch) -> bool {
    let (class, machine) = match arch {
        Arch::X86_64 => (2, EM_X86_64),
        Arch::Aarch64 => (2, EM_AARCH64),
        Arch::I386 => (1, EM_386),
        Arch::Arm => (1, EM_ARM),
    };
    // EI_CLASS, and e_machine in the machine's own byte order: all four are little-endian here.
    header.starts_with(b"\x7fELF")
        && header.get(4) == Some(&class)
        && header.get(18..20) == Some(&machine.to_le_bytes())
}

/// The name by which ld.so knows the library; `None` if it has none or is no library.
#[must_use]
pub fn soname(file: impl Read + Seek) -> Option<OsString> {
    let mut elf = ElfStream::<AnyEndian, _>::open_stream(file).ok()?;
    debug_assert!(matches!(elf.ehdr.class, Class::ELF32 | Class::ELF64));
    let offset = elf.dynamic().ok()??.iter().find(|entry| entry.d_tag == DT_SONAME)?.d_val();
    let strings = elf.section_header_by_name(".dynstr").ok()?.copied()?;
    let text = elf.section_data_as_strtab(&strings).ok()?.get(usize::try_from(offset).ok()?).ok()?.to_owned();
    (!text.is_empty() && !text.contains('/')).then(|| text.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Cursor;

    #[test]
    fn headers() {
        let header = |class: u8, machine: u16| {
            let mut bytes = b"\x7fELF".to_vec();
            bytes.push(class);
            bytes.resize(18, 0);
            bytes.extend(machine.to_le_bytes());
            bytes
        };
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
        let libc = maps.lines().find_map(|line| line.split_whitespace().nth(5).filter(|path| path.contains("libc.so")));
        assert_eq!(soname(open(libc.unwrap())).unwrap(), "libc.so.6");
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
