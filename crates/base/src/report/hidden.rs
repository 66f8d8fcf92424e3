//! Finds characters that a terminal does not show as they are. Names with such characters can look like other names.

/// Whether a character moves the cursor of a terminal, ends a line, changes the direction of text (CVE-2021-42574), or is invisible
/// or a space other than U+0020.
#[must_use]
pub(crate) fn is_hidden(c: char) -> bool {
    if c.is_ascii() {
        // Almost all characters. With the tables of Unicode, they took a seventh of the instructions of a start.
        return c.is_ascii_control();
    }
    c.is_control() || c.is_whitespace() || is_ignorable(c)
}

/// The code points with the property Default_Ignorable_Code_Point of Unicode 17, and the annotation characters U+FFF9 to U+FFFB. They
/// are in a few blocks, and Unicode reserves unassigned code points for later ones, so that the list is stable.
/// <https://www.unicode.org/Public/UCD/latest/ucd/DerivedCoreProperties.txt>
fn is_ignorable(c: char) -> bool {
    matches!(
        c,
        '\u{ad}'
            | '\u{34f}'
            | '\u{61c}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}'
            | '\u{202a}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}'
            | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invisible_characters_and_unusual_spaces() {
        for range in [
            '\0'..='\u{1f}',
            '\u{7f}'..='\u{a0}',
            '\u{ad}'..='\u{ad}',
            '\u{115f}'..='\u{1160}',
            '\u{2000}'..='\u{200f}',
            '\u{2028}'..='\u{202f}',
            '\u{205f}'..='\u{206f}',
            '\u{3000}'..='\u{3000}',
            '\u{fe00}'..='\u{fe0f}',
            '\u{e0000}'..='\u{e0fff}',
        ] {
            assert!(range.clone().all(is_hidden), "{range:x?}");
        }
        for text in [
            " ~",
            "\u{a1}\u{ac}\u{ae}é日本語",
            "\u{ff21}",
            "\u{1f600}",
            "\u{10ffff}",
            "e\u{301}",
        ] {
            assert!(!text.contains(is_hidden), "{text}");
        }
    }
}
