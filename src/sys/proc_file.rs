//! Files of proc(5), read at once: std begins with 32 bytes, and a kernel that is asked for a mount table piece by piece looks
//! for the place again each time.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Longer than most; a longer one takes one more read(2) for each doubling.
const USUAL: usize = 16 << 10;

/// The content of one.
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(USUAL);
    File::open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The same as text; what is no UTF-8 is replaced.
pub fn read_text(path: impl AsRef<Path>) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&read(path)?).into_owned())
}
