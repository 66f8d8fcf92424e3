//! Suggests a known word for a misspelled one.

/// Returns the known word with the fewest differing letters, at most two. A word that `word` abbreviates counts as one letter
/// away.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    nearest_by(word, known, |known| known)
}

/// Like [`nearest`], but compares `word` with a part of each known word.
pub fn nearest_by<'a>(
    word: &str,
    known: impl IntoIterator<Item = &'a str>,
    part: impl Fn(&'a str) -> &'a str,
) -> Option<&'a str> {
    let near = known
        .into_iter()
        .map(|known| (distance(word, part(known)), known));
    // At least two letters are the same, or a letter was typed twice or after a short word.
    let shared = |away: usize, known: &str| away + 1 < word.len().min(known.len());
    let is_longer =
        |known: &str| known.len() > 1 && word.len() == known.len() + 1 && word.starts_with(known);
    near.filter(|(away, known)| {
        *away <= 2 && (shared(*away, part(known)) || is_longer(part(known)))
    })
    .min()
    .map(|(_, known)| known)
}

fn distance(word: &str, known: &str) -> usize {
    if word.len() > 2 && known.starts_with(word) {
        1
    } else {
        strsim::levenshtein(known, word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_or_two_letters() {
        let known = ["files", "info", "explain", "root", "ps", "poststop"];
        for (word, meant) in [
            ("fles", Some("files")),
            ("flies", Some("files")),
            ("infos", Some("info")),
            ("explian", Some("explain")),
            ("exp", Some("explain")),
            ("poststart", None),
            ("pss", Some("ps")),
            ("pos", Some("poststop")),
            ("p", None),
            ("po", None),
            ("ls", None),
            ("foo", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, known), meant, "{word}");
        }
    }
}
