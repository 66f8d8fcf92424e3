//! ttrpc: remote calls over a byte stream. A frame is the length of the payload and the number of the call, both as 32 bits in network
//! order, the kind of the message, flags, and the payload. Only calls with one request and one response are used.

use prost::Message;

use super::framing::FrameReader;
use crate::proto::ttrpc::{Request, Response, Status};

/// The length of a header.
pub const HEADER: usize = 10;
/// The largest payload of a message.
pub const MAX_PAYLOAD: usize = 4 << 20;

/// The header of a message.
pub type Header = [u8; HEADER];

/// The kind of a request.
const REQUEST: u8 = 1;
/// The kind of a response.
const RESPONSE: u8 = 2;

/// gRPC's codes of failed calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The message is invalid.
    InvalidArgument = 3,
    /// The call is refused.
    FailedPrecondition = 9,
    /// The method does not exist.
    Unimplemented = 12,
}

/// Creates a reader for a connection.
#[must_use]
pub const fn reader() -> FrameReader<HEADER> {
    FrameReader::new(
        |[a, b, c, d, ..]| u32::from_be_bytes([*a, *b, *c, *d]),
        MAX_PAYLOAD,
    )
}

/// Returns the number of the call of a request.
#[must_use]
pub fn request_id(header: Header) -> Option<u32> {
    id(header, REQUEST)
}

/// Returns the number of the call of a response.
#[must_use]
pub fn response_id(header: Header) -> Option<u32> {
    id(header, RESPONSE)
}

fn id([_, _, _, _, a, b, c, d, kind, _]: Header, wanted: u8) -> Option<u32> {
    (kind == wanted).then_some(u32::from_be_bytes([a, b, c, d]))
}

/// Returns a request.
#[must_use]
pub fn request(id: u32, request: &Request) -> Vec<u8> {
    frame(id, REQUEST, &request.encode_to_vec())
}

/// Returns the response to a call: a message, or an error.
#[must_use]
pub fn response(id: u32, result: Result<Vec<u8>, (Code, String)>) -> Vec<u8> {
    let response = match result {
        Ok(payload) => Response {
            payload,
            status: None,
        },
        Err((code, message)) => Response {
            status: Some(Status {
                code: code as i32,
                message,
            }),
            ..Response::default()
        },
    };
    frame(id, RESPONSE, &response.encode_to_vec())
}

fn frame(id: u32, kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let mut frame = Vec::with_capacity(HEADER + payload.len());
    frame.extend(length.to_be_bytes());
    frame.extend(id.to_be_bytes());
    frame.extend([kind, 0]);
    frame.extend(payload);
    frame
}
