//! Checks regular expressions like Go's `regexp.Compile`, because an engine rejects a hook file with a pattern that does not compile.
//!
//! This follows `regexp/syntax/parse.go` with the flags of Perl. Names of Unicode classes and the total size of nested repetitions are not
//! checked. An expression is never matched here.

/// The largest number in a repetition.
const MAX_REPEAT: u32 = 1000;

/// Checks a pattern.
///
/// # Errors
/// Returns the mistake, in Go's words.
pub fn check(pattern: &str) -> Result<(), &'static str> {
    let mut parser = Parser { rest: pattern };
    // For each open group, and for the whole pattern, whether something precedes that can be repeated.
    let mut groups = vec![false];
    let mut after_repeat = false;
    while let Some(c) = parser.next() {
        let was_repeat = std::mem::take(&mut after_repeat);
        let Some(has_operand) = groups.last_mut() else {
            return Err("unexpected )");
        };
        match c {
            '(' => {
                if !parser.take("?") || parser.flags()? {
                    groups.push(false);
                }
            }
            ')' => {
                groups.pop();
                match groups.last_mut() {
                    Some(has_operand) => *has_operand = true,
                    None => return Err("unexpected )"),
                }
            }
            '|' => *has_operand = false,
            '[' => {
                parser.class()?;
                *has_operand = true;
            }
            '\\' => {
                parser.escape()?;
                *has_operand = true;
            }
            '*' | '+' | '?' => after_repeat = true,
            '{' => match parser.repetition() {
                Some(is_valid) => {
                    if !is_valid {
                        return Err("invalid repeat count");
                    }
                    after_repeat = true;
                }
                None => *has_operand = true,
            },
            _ => *has_operand = true,
        }
        if after_repeat {
            parser.take("?");
            if was_repeat {
                return Err("invalid nested repetition operator");
            }
            if groups.last() == Some(&false) {
                return Err("missing argument to repetition operator");
            }
        }
    }
    if groups.len() == 1 {
        Ok(())
    } else {
        Err("missing closing )")
    }
}

struct Parser<'p> {
    rest: &'p str,
}

impl Parser<'_> {
    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let mut chars = self.rest.chars();
        let next = chars.next();
        self.rest = chars.as_str();
        next
    }

    fn take(&mut self, text: &str) -> bool {
        match self.rest.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// Reads what follows `(?`. Returns whether it opens a group.
    fn flags(&mut self) -> Result<bool, &'static str> {
        if self.take("P<") || self.take("<") {
            let Some((name, rest)) = self.rest.split_once('>') else {
                return Err("invalid named capture");
            };
            self.rest = rest;
            let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            if name.is_empty() || !name.chars().all(is_word) {
                return Err("invalid named capture");
            }
            return Ok(true);
        }
        let (mut is_negated, mut has_flag) = (false, false);
        while let Some(c) = self.next() {
            match c {
                'i' | 'm' | 's' | 'U' => has_flag = true,
                '-' if !is_negated => (is_negated, has_flag) = (true, false),
                ':' | ')' if !is_negated || has_flag => return Ok(c == ':'),
                _ => break,
            }
        }
        // Lookaround, possessive groups and other syntax of Perl
        Err("invalid or unsupported Perl syntax")
    }

    /// Reads what follows `{`. Returns whether the numbers are valid; `None` if the brace is a literal.
    fn repetition(&mut self) -> Option<bool> {
        let (inner, rest) = self.rest.split_once('}')?;
        let (min, max) = match inner.split_once(',') {
            Some((min, "")) => (min, min),
            Some(numbers) => numbers,
            None => (inner, inner),
        };
        let is_number = |text: &str| {
            let has_zero = text.len() > 1 && text.starts_with('0');
            !text.is_empty() && !has_zero && text.bytes().all(|byte| byte.is_ascii_digit())
        };
        if !is_number(min) || !is_number(max) {
            return None;
        }
        self.rest = rest;
        // A number that does not fit is too large.
        let number = |text: &str| text.parse().unwrap_or(u32::MAX);
        Some(number(max) <= MAX_REPEAT && number(min) <= number(max))
    }

    /// Reads what follows a backslash outside of brackets.
    fn escape(&mut self) -> Result<(), &'static str> {
        match self.peek() {
            Some('A' | 'b' | 'B' | 'z' | 'd' | 'D' | 's' | 'S' | 'w' | 'W') => {
                self.next();
                Ok(())
            }
            Some('p' | 'P') => self.unicode_class(),
            Some('Q') => {
                let quoted = self.rest.split_once("\\E");
                self.rest = quoted.map_or("", |(_, rest)| rest);
                Ok(())
            }
            _ => self.character().map(|_| ()),
        }
    }

    fn unicode_class(&mut self) -> Result<(), &'static str> {
        self.next();
        match self.next() {
            Some('{') => match self.rest.split_once('}') {
                Some((_, rest)) => {
                    self.rest = rest;
                    Ok(())
                }
                None => Err("invalid character class range"),
            },
            Some(_) => Ok(()),
            None => Err("invalid character class range"),
        }
    }

    /// Reads the character that follows a backslash.
    fn character(&mut self) -> Result<char, &'static str> {
        const INVALID: &str = "invalid escape sequence";
        let c = self
            .next()
            .ok_or("trailing backslash at end of expression")?;
        match c {
            '0'..='7' => {
                let mut value = c.to_digit(8).unwrap_or_default();
                let mut digits = 1;
                while digits < 3
                    && let Some(digit) = self.peek().and_then(|c| c.to_digit(8))
                {
                    self.next();
                    value = value * 8 + digit;
                    digits += 1;
                }
                // A single digit other than 0 would be a reference to a group.
                if c != '0' && digits == 1 {
                    return Err(INVALID);
                }
                char::from_u32(value).ok_or(INVALID)
            }
            'x' => {
                let digits = if self.take("{") {
                    let (digits, rest) = self.rest.split_once('}').ok_or(INVALID)?;
                    self.rest = rest;
                    digits
                } else {
                    let (digits, rest) = self.rest.split_at_checked(2).ok_or(INVALID)?;
                    self.rest = rest;
                    digits
                };
                if digits.starts_with('+') {
                    return Err(INVALID);
                }
                let value = u32::from_str_radix(digits, 16).map_err(|_| INVALID)?;
                // Go accepts surrogates, which are not characters in Rust.
                if value > u32::from(char::MAX) {
                    return Err(INVALID);
                }
                Ok(char::from_u32(value).unwrap_or(char::REPLACEMENT_CHARACTER))
            }
            'a' | 'f' | 'n' | 'r' | 't' | 'v' => Ok('\n'),
            c if c.is_ascii() && !c.is_ascii_alphanumeric() => Ok(c),
            _ => Err(INVALID),
        }
    }

    /// Reads what follows an opening bracket.
    fn class(&mut self) -> Result<(), &'static str> {
        const MISSING: &str = "missing closing ]";
        self.take("^");
        let mut is_first = true;
        loop {
            match self.peek() {
                Some(']') if !is_first => {
                    self.next();
                    return Ok(());
                }
                Some(_) => {}
                None => return Err(MISSING),
            }
            is_first = false;
            if self.rest.starts_with("[:")
                && let Some((name, rest)) = self.rest.split_once(":]")
            {
                let name = name.trim_start_matches("[:").trim_start_matches('^');
                if !POSIX_CLASSES.contains(&name) {
                    return Err("invalid character class range");
                }
                self.rest = rest;
                continue;
            }
            let Some(low) = self.class_item()? else {
                continue;
            };
            let is_range = self.rest.starts_with('-') && !self.rest.starts_with("-]");
            if is_range && self.rest.len() > 1 {
                self.next();
                match self.class_item()? {
                    Some(high) if high >= low => {}
                    _ => return Err("invalid character class range"),
                }
            }
        }
    }

    /// Reads a character in brackets; returns `None` for a class such as `\d`.
    fn class_item(&mut self) -> Result<Option<char>, &'static str> {
        let c = self.next().ok_or("missing closing ]")?;
        if c != '\\' {
            return Ok(Some(c));
        }
        match self.peek() {
            Some('d' | 'D' | 's' | 'S' | 'w' | 'W') => {
                self.next();
                Ok(None)
            }
            Some('p' | 'P') => self.unicode_class().map(|()| None),
            _ => self.character().map(Some),
        }
    }
}

const POSIX_CLASSES: [&str; 14] = [
    "alnum", "alpha", "ascii", "blank", "cntrl", "digit", "graph", "lower", "print", "punct",
    "space", "upper", "word", "xdigit",
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Go 1.22 returns these results.
    #[test]
    fn patterns() {
        for pattern in [
            "",
            ".*",
            "^/usr/bin/.+$",
            "a|b|",
            "()",
            "(a|)*",
            "x{2}",
            "x{2,}",
            "x{2,3}?",
            "a{,2}",
            "a{",
            "a{x}",
            "{",
            "}",
            "]",
            "[]a]",
            "[^]]",
            "[a-]",
            "[-a]",
            "[[:alpha:]_]",
            r"[\d-]",
            r"\d+\.\d",
            r"\pL",
            r"\p{Greek}",
            r"\x41",
            r"\x{1F600}",
            r"\012",
            r"\Qa*(\E+",
            "(?i)abc",
            "(?i-s:a)",
            "(?P<name>a)",
            "^*",
            "(?:a)+",
            "a{01}",
            "é+",
        ] {
            assert_eq!(check(pattern), Ok(()), "{pattern}");
        }
        for pattern in [
            "*",
            "+a",
            "?",
            "a**",
            "a+*",
            "a|*",
            "(*)",
            "(",
            ")",
            "a)",
            "(a",
            "[",
            "[a",
            "[]",
            "[z-a]",
            "[[:foo:]]",
            "(?=a)",
            "(?!a)",
            "(?<=a)",
            "(?>a)",
            "(?x)a",
            "(?P<>a)",
            "(?P=a)",
            r"\",
            r"\1",
            r"\k",
            r"\Z",
            r"\x{110000}",
            r"\xg0",
            "x{1001}",
            "x{3,2}",
            "(?i",
            "(?-)",
            r"[\d-z]",
        ] {
            let is_range_of_class = pattern == r"[\d-z]"; // Go takes the dash literally
            assert_eq!(check(pattern).is_err(), !is_range_of_class, "{pattern}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_pattern_ends_the_program(pattern in "[a-z0-9\\[\\](){}*+?|^$.\\\\:<>PpxQE,-]{0,20}") {
            check(&pattern).ok();
        }
    }
}
