//! Entries for the journal, parsed like the journal does: a value cannot begin a field.

use oci_nvidia_hook::testing::record::journal::encode;

use super::text;

const NAMES: [&str; 4] = ["MESSAGE", "CONTAINER_NAME", "ONH_POD", "ONH_HINT"];

/// The input: values with 0 bytes between them.
pub fn run(data: &[u8]) {
    let text = text(data);
    let fields: Vec<_> = NAMES.into_iter().zip(text.split('\0')).collect();
    let sent: Vec<_> = fields
        .iter()
        .copied()
        .filter(|(_, value)| !value.is_empty())
        .collect();
    assert_eq!(read(&encode(&fields)), sent);
}

/// <https://systemd.io/JOURNAL_NATIVE_PROTOCOL/>
fn read(mut bytes: &[u8]) -> Vec<(&str, &str)> {
    let mut fields = Vec::new();
    let text = |bytes| std::str::from_utf8(bytes).expect("a whole text");
    while !bytes.is_empty() {
        let end = bytes
            .iter()
            .position(|byte| *byte == b'\n')
            .expect("a line has an end");
        let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
        if let Some(at) = line.iter().position(|byte| *byte == b'=') {
            fields.push((text(&line[..at]), text(&line[at + 1..])));
            bytes = rest;
        } else {
            let (length, rest) = rest.split_first_chunk::<8>().expect("a length");
            let (value, rest) =
                rest.split_at(usize::try_from(u64::from_le_bytes(*length)).unwrap());
            fields.push((text(line), text(value)));
            bytes = rest.strip_prefix(b"\n").expect("an end");
        }
    }
    fields
}
