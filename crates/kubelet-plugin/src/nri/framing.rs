//! Splits a byte stream into frames: a header of fixed size, which contains the length of the payload, and the payload. Pure.

use std::fmt;

/// A header and its payload.
pub type Frame<const HEADER: usize> = ([u8; HEADER], Vec<u8>);

/// Collects bytes until a frame is complete.
#[derive(Clone, Debug)]
pub struct FrameReader<const HEADER: usize> {
    buffer: Vec<u8>,
    length: fn(&[u8; HEADER]) -> u32,
    limit: usize,
}

/// A frame is longer than allowed. The stream cannot be read any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLong {
    /// The length in the header
    length: usize,
    limit: usize,
}

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a message has {} bytes, at most {} are allowed",
            self.length, self.limit
        )
    }
}

impl std::error::Error for TooLong {}

impl<const HEADER: usize> FrameReader<HEADER> {
    /// Creates a reader. `length` returns the length of the payload from a header, and `limit` is the largest one.
    #[must_use]
    pub const fn new(length: fn(&[u8; HEADER]) -> u32, limit: usize) -> Self {
        Self {
            buffer: Vec::new(),
            length,
            limit,
        }
    }

    /// Adds bytes, and returns the frames that are complete.
    ///
    /// # Errors
    /// If the next frame is too long. The frames before it were returned by an earlier call.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<Frame<HEADER>>, TooLong> {
        self.buffer.extend_from_slice(bytes);
        let mut frames = Vec::new();
        let mut rest = self.buffer.as_slice();
        while let Some((header, body)) = rest.split_first_chunk() {
            let length = usize::try_from((self.length)(header)).unwrap_or(usize::MAX);
            if length > self.limit {
                if frames.is_empty() {
                    return Err(TooLong {
                        length,
                        limit: self.limit,
                    });
                }
                break;
            }
            let Some((payload, after)) = body.split_at_checked(length) else {
                break;
            };
            frames.push((*header, payload.to_vec()));
            rest = after;
        }
        let used = self.buffer.len() - rest.len();
        self.buffer.drain(..used);
        Ok(frames)
    }
}
