//! Replaces words that a hook must not write to stderr.
//!
//! Podman searches the runtime's stderr, which includes the hook's, for these words. It would report that the
//! container's command is missing, with the exit code 127 instead of 126, or that the OCI runtime was refused permission. The
//! words come from the kernel and from libraries (dlerror(3), for example), so they are replaced where stderr is written, and
//! nowhere else.

const REPLACEMENTS: [(&str, &str); 4] = [
    ("no such file or directory", "it does not exist"),
    ("permission denied", "access denied"),
    ("operation not permitted", "not allowed"),
    ("not found", "missing"),
];

/// Replaces these words, in upper or lower case.
pub(super) fn reworded(text: &str) -> String {
    REPLACEMENTS
        .iter()
        .fold(text.to_owned(), |mut text, (words, replacement)| {
            // Conversion to ASCII lower case keeps every byte in its place.
            while let Some(at) = text.to_ascii_lowercase().find(words) {
                text.replace_range(at..at + words.len(), replacement);
            }
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_podman_searches_for_is_left() {
        for (text, expected) in [
            (
                "open \"/x\": no such file or directory (ENOENT)",
                "open \"/x\": it does not exist (ENOENT)",
            ),
            (
                "libx.so: No such file or directory",
                "libx.so: it does not exist",
            ),
            (
                "a: Permission Denied; b: operation not permitted",
                "a: access denied; b: not allowed",
            ),
            ("not not found found", "not missing found"),
        ] {
            assert_eq!(reworded(text), expected);
        }
        assert_eq!(reworded("no\nnot not foundfound"), "no\nnot missingfound");
    }
}
