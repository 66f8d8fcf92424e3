//! The MPS daemons of the node, as `check` reports them. Pure.

use command_line::terminal::{Line, Tone};
use nvidia_host::mps::Entry;

/// Describes a daemon for people.
pub(super) fn line(entry: &Entry) -> Line {
    let line = Line::new(format!("{}: MPS daemon ", entry.gpu));
    let line = match entry.ready {
        true => line.then(Tone::Good, "ready"),
        false => line.then(Tone::Bad, "not ready"),
    };
    line.then(Tone::Plain, entry.details())
}
