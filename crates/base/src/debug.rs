//! The log of `--debug`: what a program reads and finds, and how long it waits. The functions that report are below many callers, so a
//! program says once, at its start, where the lines go. Otherwise, a line is not even formatted.

use std::sync::OnceLock;

static SINK: OnceLock<fn(&str)> = OnceLock::new();

/// Has this process log with this function.
pub fn set(sink: fn(&str)) {
    SINK.set(sink).ok();
}

/// Logs a line, if the program was started with `--debug`.
pub fn log(line: impl FnOnce() -> String) {
    if let Some(sink) = SINK.get() {
        sink(&line());
    }
}
