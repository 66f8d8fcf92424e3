//! Errors as the user reads them: one line, then one `hint:` line with the command that mends it.
//!
//! Every function returns [`anyhow::Result`]; each boundary adds what it was doing with
//! [`anyhow::Context`]. Where we know the mend, the context is a [`Failure`], which carries a hint.
//! [`render`] is the only place that turns an error into text.

use std::fmt;
use std::io;

use nix::errno::Errno;

/// What could not be done, and the command or the setting that mends it.
#[derive(Debug)]
pub struct Failure {
    what: String,
    hint: String,
}

impl Failure {
    /// `what` in lower case without a final period, objects quoted; `hint` starts with a verb.
    pub fn new(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { what: what.into(), hint: hint.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Failure {}

/// A [`Failure`] as an error of its own.
pub fn failure(what: impl Into<String>, hint: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Failure::new(what, hint))
}

/// An error as one line, outermost action first, cause last, and a second line `hint: …` if one is known.
///
/// Container data can stand in an error, so control characters are escaped: the text goes to terminals and logs.
#[must_use]
pub fn render(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(&describe(cause));
    }
    let mut text = one_line(&line);
    if let Some(failure) = error.downcast_ref::<Failure>() {
        text.push_str("\nhint: ");
        text.push_str(&one_line(&failure.hint));
    }
    text
}

/// Control characters escaped, so that the text stays on its line and moves no cursor.
#[must_use]
pub fn one_line(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

fn describe(cause: &(dyn std::error::Error + 'static)) -> String {
    if let Some(errno) = cause.downcast_ref::<Errno>() {
        return errno_text(*errno);
    }
    if let Some(errno) = cause.downcast_ref::<rustix::io::Errno>() {
        return errno_text(Errno::from_raw(errno.raw_os_error()));
    }
    if let Some(code) = cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
        return errno_text(Errno::from_raw(code));
    }
    cause.to_string()
}

/// The kernel's answer in words.
///
/// Not strerror(3): podman searches a hook's stderr for "no such file or directory" and for "permission denied"
/// and then tells the user that a command was missing (exit 127) or that the OCI runtime was refused.
#[must_use]
pub fn errno_text(errno: Errno) -> String {
    let text = match errno {
        Errno::ENOENT => "not found",
        Errno::EACCES => "access denied",
        Errno::EPERM => "not allowed",
        other => return format!("{} ({other:?})", lower_first(other.desc())),
    };
    format!("{text} ({errno:?})")
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_lowercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn renders_outermost_first_and_the_hint_last() {
        let error = anyhow::Error::new(io::Error::from_raw_os_error(30))
            .context("open \"/x\"")
            .context(Failure::new("cannot inject GPU 0", "mount it read-write"));
        assert_eq!(
            render(&error),
            "cannot inject GPU 0: open \"/x\": read-only file system (EROFS)\nhint: mount it read-write"
        );
    }

    #[test]
    fn a_hint_below_other_context_is_kept() {
        let error = Err::<(), _>(failure("no driver", "install it")).context("cannot set up").unwrap_err();
        assert_eq!(render(&error), "cannot set up: no driver\nhint: install it");
    }

    #[test]
    fn says_nothing_that_podman_takes_for_a_missing_command() {
        for errno in [Errno::ENOENT, Errno::EACCES, Errno::EPERM] {
            let text = render(&anyhow::Error::new(io::Error::from(errno))).to_lowercase();
            for taken in ["no such file or directory", "permission denied", "operation not permitted"] {
                assert!(!text.contains(taken), "{text}");
            }
        }
    }

    #[test]
    fn container_data_cannot_break_the_line() {
        let error = failure("unknown device a\n\u{1b}[2Jb", "x\ny");
        assert_eq!(render(&error), "unknown device a\\n\\u{1b}[2Jb\nhint: x\\ny");
    }
}
