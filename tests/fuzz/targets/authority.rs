//! What a client sends to the socket of the kubelet plugin: the filter stores a frame at most, changes nothing but `:authority`, and
//! does not depend on how the bytes are divided.

#[path = "../../../crates/kubelet-plugin/src/kubelet/authority.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the plugin, which is not a dependency")]
mod filter;

use filter::Filter;

/// A frame with headers, and the longest replacement.
const MAX_STORED: usize = 9 + 16 * 1024 + 10;

/// Filters the input at once, byte by byte, and a second time.
pub fn run(data: &[u8]) {
    let once = filtered(data, data.len().max(1));
    assert_eq!(filtered(data, 1), once);
    let twice = filtered(&once, once.len().max(1));
    assert_eq!(twice, once, "filtering twice is filtering once");
}

fn filtered(data: &[u8], chunk: usize) -> Vec<u8> {
    let (mut filter, mut out) = (Filter::default(), Vec::new());
    let mut fed = 0;
    for bytes in data.chunks(chunk) {
        let before = out.len();
        filter.feed(bytes, &mut out);
        fed += bytes.len();
        assert!(chunk > 1 || out.len() - before <= MAX_STORED, "{} bytes at once", out.len() - before);
        // A frame of 12 bytes can have an empty value, in place of which 10 bytes are written.
        assert!(out.len() <= 2 * fed, "{} bytes of {fed}", out.len());
    }
    out
}
