//! What was probably meant by a word that nobody knows.

/// The known word that is one or two letters off, or begins so; the nearest of them.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    nearest_by(word, known, |known| known)
}

/// The same, compared by a part of each word.
pub fn nearest_by<'a>(
    word: &str,
    known: impl IntoIterator<Item = &'a str>,
    part: impl Fn(&'a str) -> &'a str,
) -> Option<&'a str> {
    // The start of a word counts as near.
    let far = |known: &str| if word.len() > 2 && known.starts_with(word) { 1 } else { distance(known, word) };
    let near = known.into_iter().map(|known| (far(part(known)), known));
    near.filter(|(far, known)| *far <= 2 && *far < part(known).len()).min().map(|(_, known)| known)
}

/// Levenshtein's.
fn distance(a: &str, b: &str) -> usize {
    if a.len().abs_diff(b.len()) > 2 {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut before = i;
        let mut left = i + 1;
        for (cell, y) in row.iter_mut().skip(1).zip(b.bytes()) {
            let here = left.min(*cell).saturating_add(1).min(before + usize::from(x != y));
            before = std::mem::replace(cell, here);
            left = here;
        }
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_or_two_letters() {
        let known = ["list", "info", "explain"];
        for (word, meant) in [
            ("lst", Some("list")),
            ("lsit", Some("list")),
            ("infos", Some("info")),
            ("explian", Some("explain")),
            ("exp", Some("explain")),
            ("poststart", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, known), meant, "{word}");
        }
    }
}
