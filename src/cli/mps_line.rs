//! The line about an MPS daemon that `status`, `ps` and `info` print.

use nvidia_host::mps::Entry;

use super::terminal::{Line, Tone};

/// Returns the line. `index` is the index of the GPU, if it is known.
pub(super) fn of(entry: &Entry, index: Option<u32>) -> Line {
    let gpu = match index {
        Some(index) => format!("GPU {index}"),
        None => entry.gpu.clone(),
    };
    let line = Line::new(format!("{gpu}: MPS daemon "));
    let line = match entry.ready {
        true => line.then(Tone::Good, "ready"),
        false => line.then(Tone::Bad, "not ready"),
    };
    line.then(Tone::Plain, entry.details())
}
