//! Errors that contain foreign text: each line is a context.

use base::report::{Failure, failure, one_line};
use findings::catalog::CONFIG;

use super::{check_error, check_line, text};

/// An error is a line and a hint, whatever it contains.
pub fn run(data: &[u8]) {
    let text = text(data);
    let mut parts = text.split('\n');
    let what = parts.next().unwrap_or_default();
    let mut error = failure(&CONFIG, format!("cannot read {what}"), text.clone());
    for (count, part) in parts.take(20).enumerate() {
        error = match count % 2 {
            0 => error.context(part.to_owned()),
            _ => error.context(Failure::new(&CONFIG, part, what)),
        };
    }
    check_error(&error.context("cannot start"));
    check_line(&one_line(&text));
}
