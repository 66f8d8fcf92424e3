//! A tar archive of small files that we made up the names of: ustar, POSIX.1-1988. Pure.

/// The size of everything in an archive.
const BLOCK: usize = 512;

/// Adds a file. One whose name is too long is left out: ours are not.
pub(super) fn add(archive: &mut Vec<u8>, name: &str, content: &[u8], time: u64) {
    let Some((prefix, name)) = split(name) else { return };
    let mut header = [0u8; BLOCK];
    let mut put = |at: usize, text: &str| {
        if let Some(field) = header.get_mut(at..at + text.len()) {
            field.copy_from_slice(text.as_bytes());
        }
    };
    put(0, name);
    put(100, "0000600\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{:011o}\0", content.len()));
    put(136, &format!("{time:011o}\0"));
    put(148, "        "); // the checksum, while it is taken
    put(156, "0");
    put(257, "ustar\x0000");
    put(345, prefix);
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    if let Some(field) = header.get_mut(148..156) {
        field.copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    archive.extend_from_slice(&header);
    archive.extend_from_slice(content);
    archive.resize(archive.len().next_multiple_of(BLOCK), 0);
}

/// Ends it.
pub(super) fn finish(archive: &mut Vec<u8>) {
    archive.resize(archive.len() + 2 * BLOCK, 0);
}

/// A directory of at most 155 bytes, and a name of at most 100.
fn split(path: &str) -> Option<(&str, &str)> {
    if path.len() <= 100 {
        return Some(("", path));
    }
    let fits = |at: &usize| *at <= 155 && path.len() - at - 1 <= 100;
    let at = path.match_indices('/').map(|(at, _)| at).find(fits)?;
    Some((path.get(..at)?, path.get(at + 1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_at_a_slash() {
        let long = |dir: usize, name: usize| format!("{}/{}", "d".repeat(dir), "n".repeat(name));
        assert_eq!(split("a/b"), Some(("", "a/b")));
        assert_eq!(split(&long(60, 60)).unwrap().1.len(), 60);
        assert_eq!(split(&long(155, 100)).unwrap().0.len(), 155);
        assert_eq!(split(&long(156, 100)), None);
        assert_eq!(split(&long(50, 101)), None);
    }
}
