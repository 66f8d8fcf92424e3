//! The build id of the running program.
//!
//! Files that one process writes and another one reads depend on tables in the program. The version does not distinguish two builds:
//! distributions rebuild a package with another release and the same version. The linker computes the build id from the content of the
//! program (`--build-id` in ld(1)), and rpmbuild computes it again with the release of the package.

#![allow(unsafe_code, reason = "the program headers are in memory")]

use std::ffi::{c_int, c_void};
use std::fmt::Write;
use std::slice;
use std::sync::OnceLock;

use nix::libc;

/// The type of a note with a build id (`NT_GNU_BUILD_ID` in elf.h), and its owner.
const NT_GNU_BUILD_ID: u32 = 3;
const OWNER: &[u8] = b"GNU\0";
/// Linkers align the parts of this note to four bytes, in 64-bit programs too.
const ALIGNMENT: usize = 4;

/// Returns the build id of this program in hexadecimal digits. Returns `None` if it was linked without one: nothing that such a program
/// stores is valid for another process.
#[must_use]
pub fn build_id() -> Option<&'static str> {
    static ID: OnceLock<Option<String>> = OnceLock::new();
    ID.get_or_init(read).as_deref()
}

fn read() -> Option<String> {
    let mut id: Option<String> = None;
    // SAFETY: dl_iterate_phdr(3) passes its second argument to the function, which expects a pointer to such a variable. The variable
    // lives longer than the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut id).cast()) };
    id
}

/// Reads the build id of the first object, which is the program itself, and ends the iteration.
extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, id: *mut c_void) -> c_int {
    // SAFETY: dl_iterate_phdr(3) passes a description of a loaded object, which is valid during this call.
    let info = unsafe { &*info };
    // SAFETY: `read` passes a pointer to a variable of this type, and does not use the variable during the call.
    let id = unsafe { &mut *id.cast::<Option<String>>() };
    // SAFETY: dl_iterate_phdr(3) states that the array has this many program headers.
    let headers = unsafe { slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    for header in headers {
        if header.p_type != libc::PT_NOTE {
            continue;
        }
        let (Ok(address), Ok(size)) = (
            usize::try_from(info.dlpi_addr.wrapping_add(header.p_vaddr)),
            usize::try_from(header.p_memsz),
        ) else {
            continue;
        };
        // SAFETY: the linker places notes in a segment that is mapped with the program, readable, at this distance from its base, and
        // never changed or unmapped.
        let notes = unsafe { slice::from_raw_parts(address as *const u8, size) };
        if let Some(bytes) = find(notes) {
            *id = Some(hexadecimal(bytes));
            break;
        }
    }
    1
}

/// Returns the build id in a segment of notes (elf(5)): each has the sizes of its owner and of its content, its type, and both.
fn find(notes: &[u8]) -> Option<&[u8]> {
    let mut rest = notes;
    loop {
        let (owner_size, after) = number(rest)?;
        let (size, after) = number(after)?;
        let (kind, after) = number(after)?;
        let (owner, after) = padded(after, owner_size)?;
        let (content, after) = padded(after, size)?;
        if kind == NT_GNU_BUILD_ID && owner == OWNER && !content.is_empty() {
            return Some(content);
        }
        rest = after;
    }
}

fn number(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u32::from_ne_bytes(*number), rest))
}

/// Splits off this many bytes, and drops the padding after them, which the last note may lack.
fn padded(bytes: &[u8], size: u32) -> Option<(&[u8], &[u8])> {
    let size = usize::try_from(size).ok()?;
    let (part, rest) = bytes.split_at_checked(size)?;
    let padding = size.next_multiple_of(ALIGNMENT) - size;
    Some((part, rest.get(padding..).unwrap_or_default()))
}

fn hexadecimal(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        write!(text, "{byte:02x}").ok();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_has_one() {
        let id = build_id().unwrap();
        assert!(id.len() >= 16, "{id}");
        assert!(id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
        assert_eq!(build_id(), Some(id));
    }

    fn note(owner: &[u8], kind: u32, content: &[u8]) -> Vec<u8> {
        let mut note = Vec::new();
        for number in [owner.len(), content.len()] {
            note.extend(u32::try_from(number).unwrap().to_ne_bytes());
        }
        note.extend(kind.to_ne_bytes());
        for part in [owner, content] {
            note.extend(part);
            note.resize(note.len().next_multiple_of(ALIGNMENT), 0);
        }
        note
    }

    #[test]
    fn among_other_notes() {
        let others = [
            note(OWNER, 1, &[0; 16]),
            note(b"Go\0\0", NT_GNU_BUILD_ID, b"another"),
            note(OWNER, NT_GNU_BUILD_ID, b""),
        ]
        .concat();
        assert_eq!(find(&others), None);
        for id in [&[1, 2, 3, 4, 5][..], &[0xab; 20]] {
            let notes = [others.clone(), note(OWNER, NT_GNU_BUILD_ID, id)].concat();
            assert_eq!(find(&notes), Some(id));
            for end in 0..notes.len() - id.len() {
                assert_eq!(find(&notes[..end]), None, "{end}");
            }
        }
        assert_eq!(find(&[0xff; 64]), None);
        assert_eq!(hexadecimal(&[0, 0x0a, 0xff]), "000aff");
    }
}
