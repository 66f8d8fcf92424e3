//! Errors as the user reads them: one line, then one `hint:` line with the command that fixes it.
//!
//! Every function returns [`anyhow::Result`]; each boundary adds what it was doing with
//! [`anyhow::Context`]. If the fix is known, the context is a [`Failure`], which carries a hint.
//! [`render`] is the only place that turns an error into text.

use std::{fmt, io};

use rustix::io::Errno;

use super::hidden::is_hidden;
use super::kind::{Kind, SYSTEM};

/// A failed action, and the command or setting that fixes it.
#[derive(Debug)]
pub struct Failure {
    kind: &'static Kind,
    what: String,
    hint: String,
}

impl Failure {
    /// `what` is in lower case, quotes objects and has no final period; `hint` starts with a verb.
    pub fn new(kind: &'static Kind, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
            hint: hint.into(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Failure {}

/// Returns an error that consists of a [`Failure`] alone.
pub fn failure(
    kind: &'static Kind,
    what: impl Into<String>,
    hint: impl Into<String>,
) -> anyhow::Error {
    anyhow::Error::new(Failure::new(kind, what, hint))
}

/// Adds a kind and a hint to an error that has no kind yet. An error that has one is returned unchanged, because the code closer
/// to the cause knows more.
#[must_use]
pub fn classify(error: anyhow::Error, kind: &'static Kind, hint: &str) -> anyhow::Error {
    match kind_of(&error) {
        Some(_) => error,
        None => error.context(Failure::new(kind, "", hint)),
    }
}

/// Returns the kind of the outermost [`Failure`] of an error, if there is one.
#[must_use]
pub fn kind_of(error: &anyhow::Error) -> Option<&'static Kind> {
    error.downcast_ref::<Failure>().map(|failure| failure.kind)
}

/// Returns the errno of the system call that caused an error, if a system call did.
#[must_use]
pub fn errno_of(error: &anyhow::Error) -> Option<Errno> {
    error.chain().find_map(errno)
}

/// An error as text for terminals and logs. Control characters and invisible ones are escaped, because the texts may contain data
/// from a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorReport {
    /// The kind of the outermost [`Failure`], or [`SYSTEM`].
    pub kind: &'static Kind,
    /// The outermost action first, the cause last.
    pub line: String,
    /// The command or setting that fixes the error; empty if none is known.
    pub hint: String,
}

impl ErrorReport {
    /// Joins the causes of an error with colons.
    #[must_use]
    pub fn new(error: &anyhow::Error) -> Self {
        let causes: Vec<_> = error
            .chain()
            .map(describe)
            .filter(|cause| !cause.is_empty())
            .collect();
        let line = one_line(&causes.join(": "));
        let failure = error.downcast_ref::<Failure>();
        let hint = failure.map(|failure| one_line(&failure.hint));
        Self {
            kind: failure.map_or(&SYSTEM, |failure| failure.kind),
            line,
            hint: hint.unwrap_or_default(),
        }
    }
}

/// Returns an error as one line with its number, and a second line `hint: …` if it has a hint.
#[must_use]
pub fn render(error: &anyhow::Error) -> String {
    let ErrorReport { kind, line, hint } = ErrorReport::new(error);
    let hint = if hint.is_empty() {
        hint
    } else {
        format!("\nhint: {hint}")
    };
    format!("{line} ({}){hint}", kind.id())
}

/// Returns an error as one line without number and hint, to be part of another text.
#[must_use]
pub fn line(error: &anyhow::Error) -> String {
    ErrorReport::new(error).line
}

/// The most characters of a text that are shown: the value of a container's variable can have a megabyte.
const LONGEST: usize = 2000;

/// Returns the text with every character escaped that moves the cursor, ends the line, changes the direction of text or is invisible. A
/// text of more than 2000 characters is cut.
#[must_use]
pub fn one_line(text: &str) -> String {
    // Almost all texts
    if text.len() <= LONGEST && text.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        return text.to_owned();
    }
    let mut out = String::new();
    for (count, c) in text.chars().enumerate() {
        if count == LONGEST {
            out.push('…');
            break;
        }
        if is_hidden(c) {
            out.extend(c.escape_default())
        } else {
            out.push(c)
        }
    }
    out
}

fn describe(cause: &(dyn std::error::Error + 'static)) -> String {
    errno(cause).map_or_else(|| cause.to_string(), errno_text)
}

/// Returns the errno of one cause. rustix and std each have a type for it; nix has one too, which [`io::Error::from`] converts.
fn errno(cause: &(dyn std::error::Error + 'static)) -> Option<Errno> {
    match cause.downcast_ref::<io::Error>() {
        Some(error) => Errno::from_io_error(error),
        None => cause.downcast_ref::<Errno>().copied(),
    }
}

/// Formats an errno: `no such file or directory (ENOENT)`.
#[must_use]
pub(crate) fn errno_text(errno: Errno) -> String {
    let code = errno.raw_os_error();
    // std appends the number, which users do not look for.
    let text = io::Error::from(errno).to_string();
    let number = format!(" (os error {code})");
    let text = text.strip_suffix(&number).unwrap_or(&text);
    let name = nix::errno::Errno::from_raw(code);
    format!("{} ({name:?})", lower_first(text))
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| {
        std::iter::once(first.to_ascii_lowercase())
            .chain(chars)
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Severity;
    use anyhow::Context;

    static CONFIG: Kind = Kind::new("ONH-005", Severity::Error, "");
    static OTHER: Kind = Kind::new("ONH-016", Severity::Error, "");

    #[test]
    fn renders_outermost_first_and_the_hint_last() {
        let error = anyhow::Error::new(io::Error::from_raw_os_error(30))
            .context("open \"/x\"")
            .context(Failure::new(
                &CONFIG,
                "cannot inject GPU 0",
                "mount it read-write",
            ));
        assert_eq!(
            render(&error),
            "cannot inject GPU 0: open \"/x\": read-only file system (EROFS) (ONH-005)\nhint: mount it read-write"
        );
    }

    #[test]
    fn a_hint_below_other_context_is_kept() {
        let error = Err::<(), _>(failure(&CONFIG, "no driver", "install it"))
            .context("cannot set up")
            .unwrap_err();
        assert_eq!(
            render(&error),
            "cannot set up: no driver (ONH-005)\nhint: install it"
        );
    }

    #[test]
    fn system_errors_of_any_crate_have_the_same_form() {
        for (error, expected) in [
            (
                anyhow::Error::new(io::Error::from(nix::errno::Errno::ENOENT)),
                "no such file or directory (ENOENT) (ONH-001)",
            ),
            (
                anyhow::Error::new(io::Error::from(Errno::PERM)),
                "operation not permitted (EPERM) (ONH-001)",
            ),
            (
                anyhow::Error::new(Errno::ACCESS),
                "permission denied (EACCES) (ONH-001)",
            ),
        ] {
            assert_eq!(render(&error), expected);
            assert!(errno_of(&error.context("open \"/x\"")).is_some());
        }
        assert_eq!(errno_of(&failure(&CONFIG, "a", "b")), None);
    }

    #[test]
    fn the_kind_of_an_error() {
        assert_eq!(kind_of(&anyhow::anyhow!("a")), None);
        let error = classify(anyhow::anyhow!("a"), &CONFIG, "b");
        assert_eq!(kind_of(&error), Some(&CONFIG));
        assert_eq!(
            kind_of(&classify(error.context("c"), &OTHER, "d")),
            Some(&CONFIG)
        );
    }

    #[test]
    fn container_data_is_cut() {
        let text = render(&failure(&CONFIG, "x".repeat(1 << 20), "y"));
        assert!(
            text.len() < 2100 && text.ends_with("… (ONH-005)\nhint: y"),
            "{}",
            text.len()
        );
    }

    #[test]
    fn container_data_cannot_break_the_line() {
        let error = failure(&CONFIG, "unknown device a\n\u{1b}[2Jb", "x\ny");
        assert_eq!(
            render(&error),
            "unknown device a\\n\\u{1b}[2Jb (ONH-005)\nhint: x\\ny"
        );
        let error = failure(&CONFIG, "a\u{202e}b\u{2028}c", "d\u{2066}\u{85}");
        assert_eq!(
            render(&error),
            "a\\u{202e}b\\u{2028}c (ONH-005)\nhint: d\\u{2066}\\u{85}"
        );
        let error = failure(&CONFIG, "a\u{200b}b\u{e0041} c\u{a0}", "d\u{fe0f}");
        assert_eq!(
            render(&error),
            "a\\u{200b}b\\u{e0041} c\\u{a0} (ONH-005)\nhint: d\\u{fe0f}"
        );
    }
}
