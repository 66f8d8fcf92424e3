//! Matches patterns with wildcards.

/// Whether `text` matches a pattern with `*` and `?`. Sets in square brackets are not supported.
#[must_use]
pub(crate) fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut in_text) = (0, 0);
    // The position to resume from if the text after the last star does not match.
    let mut star: Option<(usize, usize)> = None;
    while let Some(byte) = text.get(in_text) {
        match pattern.get(at) {
            Some(b'*') => {
                at += 1;
                star = Some((at, in_text));
            }
            Some(wanted) if *wanted == b'?' || wanted == byte => {
                at += 1;
                in_text += 1;
            }
            _ => match &mut star {
                Some((after_star, taken)) => {
                    *taken += 1;
                    (at, in_text) = (*after_star, *taken);
                }
                None => return false,
            },
        }
    }
    pattern.iter().skip(at).all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs() {
        for (pattern, text, is) in [
            ("nvidia h100*", "nvidia h100 80gb hbm3", true),
            ("*h100*", "nvidia h100 80gb hbm3", true),
            ("*a100*", "nvidia h100 80gb hbm3", false),
            ("h?00", "h100", true),
            ("h?00", "h1000", false),
            ("*", "", true),
            ("", "", true),
            ("a*b*c", "axxbxxbxc", true),
            ("a*b*c", "axxbxx", false),
        ] {
            assert_eq!(
                matches(pattern.as_bytes(), text.as_bytes()),
                is,
                "{pattern} {text}"
            );
        }
    }
}
