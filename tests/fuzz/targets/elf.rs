//! A library's ELF header and SONAME.

use std::ffi::OsString;
use std::io::Cursor;

use base::paths::ContainerPath;
use nvidia_host::driver::elf::{HEADER, is_for, soname};
use nvidia_host::driver::ldcache::Arch;

use super::SparseFile;

/// Uses the bytes as a complete file, and as the start of a huge one.
pub fn run(data: &[u8]) {
    let header = data.get(..HEADER).unwrap_or(data);
    let arches = [Arch::X86_64, Arch::Aarch64, Arch::I386, Arch::Arm];
    let fitting = arches.iter().filter(|arch| is_for(header, **arch)).count();
    assert!(fitting <= 1, "a library is for one architecture");
    for name in [soname(Cursor::new(data)), soname(SparseFile::new(data))]
        .into_iter()
        .flatten()
    {
        assert!(
            data.starts_with(b"\x7fELF"),
            "{name:?} is the name of something else"
        );
        check_name(&name);
    }
}

/// The SONAME becomes the name of a link: one component, below the directory.
fn check_name(name: &OsString) {
    let text = name.to_str().expect("a text");
    assert!(!text.is_empty() && !text.contains(['/', '\0']), "{name:?}");
    let dir = ContainerPath::new("/usr/lib64").unwrap();
    if let Some(link) = dir.join(name) {
        assert_eq!(
            (link.parent(), link.file_name()),
            (Some(dir), name.as_os_str())
        );
    }
}
