//! Reads the lines of the monitor, with a limit for their length.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::ChildStdout;

/// The limit for a line in bytes. A snapshot of 64 GPUs with 8 MIG devices each has a third of this size.
const MAX_LINE: usize = 1 << 20;

/// The lines of a monitor.
pub(super) struct Lines<R = ChildStdout> {
    input: R,
    buffer: Vec<u8>,
    /// The length of the line at the start of the buffer that was returned
    returned: usize,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(super) const fn new(input: R) -> Self {
        Self {
            input,
            buffer: Vec::new(),
            returned: 0,
        }
    }

    /// Returns the next line without its newline, or `None` at the end. A line without an end is not returned. The future can be
    /// dropped without losing anything.
    pub(super) async fn next(&mut self) -> io::Result<Option<&[u8]>> {
        self.buffer.drain(..std::mem::take(&mut self.returned));
        let mut searched = 0;
        let end = loop {
            let rest = self.buffer.get(searched..).unwrap_or_default();
            if let Some(at) = rest.iter().position(|byte| *byte == b'\n') {
                break searched + at;
            }
            searched = self.buffer.len();
            if searched > MAX_LINE {
                return Err(io::Error::other("a line is too long"));
            }
            if self.input.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        };
        self.returned = end + 1;
        Ok(self.buffer.get(..end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines, and whether the last read failed.
    fn lines(input: &[u8]) -> (Vec<String>, bool) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut lines = Lines::new(input);
            let mut found = Vec::new();
            loop {
                match lines.next().await {
                    Ok(Some(line)) => found.push(String::from_utf8_lossy(line).into_owned()),
                    Ok(None) => return (found, false),
                    Err(_) => return (found, true),
                }
            }
        })
    }

    #[test]
    fn lines_are_split_and_limited() {
        assert_eq!(
            lines(b"a\n\nbc\nrest"),
            (vec!["a".into(), String::new(), "bc".into()], false)
        );
        assert_eq!(lines(b""), (vec![], false));
        let (found, failed) = lines(&[b"a\n".to_vec(), vec![b'x'; MAX_LINE + 100]].concat());
        assert!(found == ["a"] && failed);
        let long = [vec![b'x'; MAX_LINE - 1], b"\n".to_vec()].concat();
        assert_eq!(lines(&long).0[0].len(), MAX_LINE - 1);
    }
}
