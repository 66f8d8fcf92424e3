//! The type of the entries of the catalog, which is the crate `findings`, and the one entry that this crate uses.

use serde::Serialize;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Information; nothing has to be done.
    Note,
    /// The container starts, but lacks something.
    Warning,
    /// The container does not start, or the command fails.
    Error,
}

impl Severity {
    /// The word that messages, JSON and documents use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// An entry of the catalog: what is true of a finding on every host.
///
/// It contains only one pointer. The dynamic linker writes each pointer of a static value at every start of a program, which copies
/// its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    id: [u8; 7],
    /// `error` for the numbers below 100.
    pub severity: Severity,
    texts: &'static str,
}

/// The texts of an entry. `explain --json` prints them under these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Texts {
    /// The meaning, without the names of a particular host.
    pub title: &'static str,
    /// The consequence.
    pub why: &'static str,
    /// The general fix; a [`Finding`](super::Finding) has the command for its host.
    pub fix: &'static str,
    /// The page of the documentation with more about the subject, such as `usage.md` or `oci-nvidia-hook(8)`; or empty.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub see: &'static str,
}

impl Kind {
    /// Returns an entry. Its id is `ONH-` and three digits; a number is never reused. `texts` are the fields of [`Texts`], a line
    /// each.
    #[must_use]
    pub const fn new(id: &'static str, severity: Severity, texts: &'static str) -> Self {
        let id = match id.as_bytes().first_chunk() {
            Some(id) => *id,
            None => *b"ONH-001",
        };
        Self {
            id,
            severity,
            texts,
        }
    }

    /// Returns `ONH-` and three digits.
    #[must_use]
    pub fn id(&self) -> &str {
        std::str::from_utf8(&self.id).unwrap_or_default()
    }

    /// Returns the texts.
    #[must_use]
    pub fn texts(&self) -> Texts {
        let mut lines = self.texts.lines();
        let mut next = || lines.next().unwrap_or_default();
        Texts {
            title: next(),
            why: next(),
            fix: next(),
            see: next(),
        }
    }

    /// Returns the entry of the finding in the installed documentation: a page and an anchor.
    #[must_use]
    pub fn entry(&self) -> String {
        format!("findings.md#{}", self.id().to_ascii_lowercase())
    }
}

/// Returns a text of the catalog for people. The catalog marks commands and names of files for documents; messages have them in double
/// quotes.
#[must_use]
pub fn without_markdown(text: &str) -> String {
    let mut parts = text.split('`');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    let mut is_code = true;
    for part in parts {
        let quote = if part.contains('"') { "" } else { "\"" };
        match is_code {
            true => plain.extend([quote, part, quote]),
            false => plain.push_str(part),
        }
        is_code = !is_code;
    }
    plain
}

/// The kind of errors that have no other one.
pub static SYSTEM: Kind = Kind::new(
    "ONH-001",
    Severity::Error,
    "an operation failed\n\
     the message states the operation, its object and the error of the kernel\n\
     check the object in the message; if nothing is wrong with it, report a bug and attach the output of \
     `oci-nvidia-hook doctor --json`",
);
