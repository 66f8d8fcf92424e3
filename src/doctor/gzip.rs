//! A gzip file without compression, RFC 1951 and RFC 1952. Pure. A compressor would be 47 KB of the program that is read
//! for every container; a bundle has a few hundred.

/// What one block that is stored as it is can hold.
const LONGEST: usize = 0xffff;

/// The file.
pub(super) fn store(content: &[u8]) -> Vec<u8> {
    // Magic, method, no flags, no time, no hint, of no known system.
    let mut file = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let mut blocks = content.chunks(LONGEST).peekable();
    if blocks.peek().is_none() {
        file.extend_from_slice(&[1, 0, 0, 0xff, 0xff]);
    }
    while let Some(block) = blocks.next() {
        let length = u16::try_from(block.len()).unwrap_or(u16::MAX);
        file.push(u8::from(blocks.peek().is_none()));
        file.extend_from_slice(&length.to_le_bytes());
        file.extend_from_slice(&(!length).to_le_bytes());
        file.extend_from_slice(block);
    }
    file.extend_from_slice(&crc32(content).to_le_bytes());
    // Modulo 2^32, as the format wants it.
    let [a, b, c, d, ..] = content.len().to_le_bytes();
    file.extend_from_slice(&[a, b, c, d]);
    file
}

/// The one of IEEE 802.3.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_the_standards_have_it() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926); // its check value
        let file = store(b"abc");
        assert_eq!(file[10..18], [1, 3, 0, 0xfc, 0xff, b'a', b'b', b'c']);
        assert_eq!(file[22..], [3, 0, 0, 0]);
        assert_eq!(store(b"").len(), 23);
        let long = store(&[7; LONGEST + 1]);
        assert_eq!((long[10], long[15 + LONGEST]), (0, 1), "the last block says so");
    }
}
