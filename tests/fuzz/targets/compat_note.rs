//! The note of a compatibility library: any file of an image.

use std::io::Cursor;

use nvidia_host::driver::compat::{is_to_be_used, read_note, version_of};

use super::{SparseFile, text};

/// Uses the bytes as a complete file, as the start of a huge one, and the lines as names in a directory.
pub fn run(data: &[u8]) {
    let host = ("535.183.01", "12.2");
    for note in [
        read_note(Cursor::new(data)),
        read_note(SparseFile::new(data)),
    ]
    .into_iter()
    .flatten()
    {
        assert!(note.cuda.len() <= 64 * 1024 && note.drivers.len() <= 64 * 1024);
        assert!(
            !is_to_be_used(Some(&note), host.0, host.0, host.1),
            "the host's own version is no newer one"
        );
        if is_to_be_used(Some(&note), "575.57.08", host.0, host.1) {
            assert!(note.drivers.contains(&535), "{note:?}");
        }
        assert!(!is_to_be_used(Some(&note), "", "", ""), "nothing is known");
    }
    let text = text(data);
    if let Some(version) = version_of(text.lines()) {
        assert!(
            version.bytes().all(|c| c.is_ascii_digit() || c == b'.'),
            "{version:?}"
        );
        assert_eq!(
            text.lines()
                .filter(|line| *line == format!("libcuda.so.{version}"))
                .count(),
            1
        );
        assert!(
            !is_to_be_used(None, version, version, host.1),
            "{version:?} is not newer than itself"
        );
    }
}
