//! NRI's multiplexer: two connections over one socket. A frame is the number of the connection, the length of the payload, both as 32
//! bits in network order, and the payload. A connection is a byte stream: frames do not respect the borders of its messages.

use super::framing::FrameReader;
use super::ttrpc;

/// The connection on which the engine calls us.
pub const PLUGIN: u32 = 1;
/// The connection on which we call the engine.
pub const RUNTIME: u32 = 2;

/// The length of a header.
pub const HEADER: usize = 8;
/// The largest payload that engines send.
const MAX_PAYLOAD: usize = ttrpc::HEADER + ttrpc::MAX_PAYLOAD;
/// The largest payload that we send. Engines read with a buffer of this size, and close the connection if a payload is larger
/// (`Read` in NRI's `mux.go`, `bufio` of Go).
const PIECE: usize = 4096;

/// Creates a reader for what comes from the engine.
#[must_use]
pub const fn reader() -> FrameReader<HEADER> {
    FrameReader::new(
        |[_, _, _, _, length @ ..]| u32::from_be_bytes(*length),
        MAX_PAYLOAD,
    )
}

/// Returns the number of the connection.
#[must_use]
pub const fn connection([a, b, c, d, ..]: [u8; HEADER]) -> u32 {
    u32::from_be_bytes([a, b, c, d])
}

/// Appends the frames with these bytes of a connection.
pub fn write(connection: u32, bytes: &[u8], output: &mut Vec<u8>) {
    for piece in bytes.chunks(PIECE) {
        output.extend(connection.to_be_bytes());
        output.extend(u32::try_from(piece.len()).unwrap_or(u32::MAX).to_be_bytes());
        output.extend(piece);
    }
}
