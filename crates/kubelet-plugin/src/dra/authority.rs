//! Replaces the `:authority` of HTTP/2 requests with `localhost`, in the bytes that a client sends.
//!
//! gRPC clients in Go that dial a Unix socket without naming a server send the percent-encoded path of the socket as `:authority`.
//! The crate h2 accepts only a host there, and resets the stream with `PROTOCOL_ERROR` before any code of the server runs. The
//! kubelet's plugin watcher, which finds drivers for claims, is such a client.
//!
//! The filter copies all bytes except the value of a literal header field with the name index 1, which is `:authority` in the static
//! table of HPACK. Later requests of the connection refer to the entry of the dynamic table, which then contains `localhost` too.
//! Frames that the filter does not understand are copied: the HTTP/2 server rejects them if they are invalid.
//!
//! This file uses only the standard library, because the fuzz target includes it.

use std::ops::Range;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The length of a frame's header, in bytes.
const FRAME_HEADER: usize = 9;
const TYPE_HEADERS: u8 = 1;
const FLAG_PADDED: u8 = 0x08;
const FLAG_PRIORITY: u8 = 0x20;
/// The length of the priority fields before the header block.
const PRIORITY: usize = 5;

/// The longest payload that an HTTP/2 server accepts unless it announces another limit. The filter stores at most one such frame.
const MAX_PAYLOAD: usize = 16 * 1024;

/// `localhost` as a string of HPACK: its length, and no Huffman code.
const LOCALHOST: &[u8] = b"\x09localhost";

/// The state of one connection.
#[derive(Debug)]
pub struct Filter {
    state: FrameState,
    /// The beginning of a frame whose end has not arrived
    frame: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
enum FrameState {
    /// So many bytes of the preface have arrived.
    Preface(usize),
    /// The header of a frame arrives.
    FrameHeader,
    /// A frame of this length with request headers arrives.
    Headers(usize),
    /// So many bytes belong to a frame that is copied.
    Payload(usize),
    /// The connection is not HTTP/2.
    Other,
}

impl Default for Filter {
    fn default() -> Self {
        Self {
            state: FrameState::Preface(0),
            frame: Vec::new(),
        }
    }
}

impl Filter {
    /// Appends to `out` what the server reads in place of `input`. The end of a frame with headers may come with a later call.
    pub fn feed(&mut self, mut input: &[u8], out: &mut Vec<u8>) {
        while !input.is_empty() {
            input = self.step(input, out);
        }
    }

    /// Handles at least one byte of `input` and returns the others.
    fn step<'a>(&mut self, input: &'a [u8], out: &mut Vec<u8>) -> &'a [u8] {
        match self.state {
            FrameState::Preface(seen) => {
                let (now, rest) = split(input, PREFACE.len() - seen);
                let expected = PREFACE.get(seen..seen + now.len());
                out.extend_from_slice(now);
                self.state = match seen + now.len() {
                    _ if expected != Some(now) => FrameState::Other,
                    all if all == PREFACE.len() => FrameState::FrameHeader,
                    some => FrameState::Preface(some),
                };
                rest
            }
            FrameState::FrameHeader => {
                let (now, rest) = split(input, FRAME_HEADER - self.frame.len());
                self.frame.extend_from_slice(now);
                if let [a, b, c, kind, flags, ..] = *self.frame
                    && self.frame.len() == FRAME_HEADER
                {
                    self.begin_frame(
                        usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c),
                        kind,
                        flags,
                        out,
                    );
                }
                rest
            }
            FrameState::Headers(length) => {
                let (now, rest) = split(input, length - self.frame.len());
                self.frame.extend_from_slice(now);
                if self.frame.len() == length {
                    rewrite(&self.frame, out);
                    self.frame.clear();
                    self.state = FrameState::FrameHeader;
                }
                rest
            }
            FrameState::Payload(left) => {
                let (now, rest) = split(input, left);
                out.extend_from_slice(now);
                self.state = payload(left - now.len());
                rest
            }
            FrameState::Other => {
                out.extend_from_slice(input);
                &[]
            }
        }
    }

    fn begin_frame(&mut self, length: usize, kind: u8, flags: u8, out: &mut Vec<u8>) {
        // gRPC clients do not pad.
        let rewritable =
            kind == TYPE_HEADERS && flags & FLAG_PADDED == 0 && (1..=MAX_PAYLOAD).contains(&length);
        if rewritable {
            self.state = FrameState::Headers(FRAME_HEADER + length);
        } else {
            out.append(&mut self.frame);
            self.state = payload(length);
        }
    }
}

fn payload(left: usize) -> FrameState {
    if left == 0 {
        FrameState::FrameHeader
    } else {
        FrameState::Payload(left)
    }
}

fn split(input: &[u8], at: usize) -> (&[u8], &[u8]) {
    input.split_at_checked(at).unwrap_or((input, &[]))
}

/// Appends a frame with headers to `out`, with the new `:authority` if it has one.
fn rewrite(frame: &[u8], out: &mut Vec<u8>) {
    match with_localhost(frame) {
        Some(frame) => out.extend_from_slice(&frame),
        None => out.extend_from_slice(frame),
    }
}

fn with_localhost(frame: &[u8]) -> Option<Vec<u8>> {
    let (header, payload) = frame.split_at_checked(FRAME_HEADER)?;
    let flags = *header.get(4)?;
    let skip = if flags & FLAG_PRIORITY == 0 {
        0
    } else {
        PRIORITY
    };
    let value = authority(payload.get(skip..)?)?;
    let before = payload.get(..skip + value.start)?;
    let after = payload.get(skip + value.end..)?;
    let length = before.len() + LOCALHOST.len() + after.len();
    let [_, high, middle, low] = u32::try_from(length)
        .ok()
        .filter(|_| length <= MAX_PAYLOAD)?
        .to_be_bytes();
    Some(
        [
            &[high, middle, low],
            header.get(3..)?,
            before,
            LOCALHOST,
            after,
        ]
        .concat(),
    )
}

/// Returns the place of the literal value of `:authority` in a header block, with its length.
fn authority(block: &[u8]) -> Option<Range<usize>> {
    let mut fields = Fields { block, at: 0 };
    loop {
        let first = *block.get(fields.at)?;
        let name_bits = match first {
            0x80.. => 7,
            0x40..0x80 => 6,
            0x20..0x40 => 5,
            _ => 4,
        };
        let name = fields.integer(name_bits)?;
        if matches!(name_bits, 5 | 7) {
            continue; // the size of the dynamic table, or a whole field of a table
        }
        if name == 0 {
            fields.skip_string()?;
        }
        let start = fields.at;
        fields.skip_string()?;
        if name == 1 {
            return Some(start..fields.at);
        }
    }
}

/// Reads a header block (RFC 7541).
struct Fields<'a> {
    block: &'a [u8],
    at: usize,
}

impl Fields<'_> {
    fn byte(&mut self) -> Option<u8> {
        let byte = *self.block.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    /// Reads an integer whose first byte has this many bits of it.
    fn integer(&mut self, bits: u32) -> Option<usize> {
        let most = (1usize << bits) - 1;
        let mut value = usize::from(self.byte()?) & most;
        if value < most {
            return Some(value);
        }
        // Four more bytes are 2^28, which is longer than a frame.
        for shift in [0, 7, 14, 21] {
            let byte = usize::from(self.byte()?);
            value += (byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn skip_string(&mut self) -> Option<()> {
        let length = self.integer(7)?;
        self.at = self
            .at
            .checked_add(length)
            .filter(|end| *end <= self.block.len())?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn filtered<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
        let (mut filter, mut out) = (Filter::default(), Vec::new());
        for chunk in chunks {
            filter.feed(chunk, &mut out);
            assert!(filter.frame.len() <= FRAME_HEADER + MAX_PAYLOAD);
        }
        out
    }

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    fn request(flags: u8, block: &[u8]) -> Vec<u8> {
        [
            PREFACE,
            &frame(4, 0, &[]),
            &frame(TYPE_HEADERS, flags, block),
            &frame(0, 1, b"body"),
        ]
        .concat()
    }

    #[test]
    fn the_value_is_replaced() {
        let path: &[u8] = b"\x0a%2Frun%2Fa";
        let before: &[u8] = b"\x83\x86\x3f\x01\x45\x02/x\x00\x01a\x01b";
        let after: &[u8] = b"\x0f\x10\x01c\xbe";
        for name in [0x41u8, 0x01, 0x11] {
            let found = filtered([&*request(4, &[before, &[name], path, after].concat())]);
            assert_eq!(
                found,
                request(4, &[before, &[name], LOCALHOST, after].concat())
            );
        }
        let priority = [0, 0, 0, 0, 16];
        let found = filtered([&*request(
            0x24,
            &[&priority, before, &[0x41], path].concat(),
        )]);
        assert_eq!(
            found,
            request(0x24, &[&priority, before, &[0x41], LOCALHOST].concat())
        );
        let long = [&[0xff, 0x80, 0x01][..], &[b'x'; 255]].concat();
        let found = filtered([&*request(4, &[before, &[0x41], &long, after].concat())]);
        assert_eq!(
            found,
            request(4, &[before, &[0x41], LOCALHOST, after].concat())
        );
    }

    #[test]
    fn all_else_is_copied() {
        let cases: &[&[u8]] = &[
            b"GET / HTTP/1.1\r\n\r\n",
            &request(4, b""),
            &request(4, b"\x83\x86"),
            &request(0x0c, b"\x00\x41\x01a"),              // padded
            &request(4, b"\x41\x05a"),                     // ends within the value
            &request(4, b"\x41\xff\xff\xff\xff\xff\x0fa"), // an integer beyond all limits
            &request(4, b"\x42\x03GET"),                   // another name
            &request(4, &[&[0u8; MAX_PAYLOAD][..], b"\x41\x01a"].concat()),
            &request(
                4,
                &[
                    b"\x41\x01a\x00\x01b\x7f\xf9\x7e".as_slice(),
                    &[0; MAX_PAYLOAD - 9],
                ]
                .concat(),
            ), // would be too long
        ];
        for case in cases {
            assert_eq!(filtered([*case]), *case);
        }
    }

    proptest! {
        #[test]
        fn chunks_do_not_matter(
            blocks in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..64), any::<u8>(), 0..3u8), 0..6),
            noise in prop::collection::vec(any::<u8>(), 0..64),
            size in 1..40usize,
        ) {
            let mut bytes = PREFACE.to_vec();
            for (block, flags, kind) in blocks {
                bytes.extend(frame(kind, flags, &block));
            }
            bytes.extend(noise);
            prop_assert_eq!(filtered(bytes.chunks(size)), filtered([&*bytes]));
        }

        #[test]
        fn filtering_twice_is_filtering_once(block in prop::collection::vec(any::<u8>(), 0..64), flags in any::<u8>()) {
            let once = filtered([&*request(flags, &block)]);
            prop_assert_eq!(filtered([&*once]), once);
        }
    }
}
