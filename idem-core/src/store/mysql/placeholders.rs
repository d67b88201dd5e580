//! `$1`, `$2`, … as other engines have them, for an engine that has only `?`.

/// A text for MySQL, and which value each of its placeholders gets, counted from zero.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Positional {
    pub text: String,
    pub values: Vec<usize>,
}

/// Replaces the numbered placeholders of `text`. What stands in quotes or comments, or is part of a name, stays.
///
/// # Errors
/// A sentence: a placeholder has no value, or a value no placeholder.
pub(super) fn positional(text: &str, values: usize) -> Result<Positional, String> {
    let mut found = Positional { text: String::with_capacity(text.len()), values: Vec::new() };
    let mut rest = text;
    let mut in_name = false;
    while let Some(first) = rest.chars().next() {
        let number = if in_name { None } else { number_at(rest) };
        if let Some((digits, number)) = number {
            match number.checked_sub(1).filter(|&index| index < values) {
                Some(index) => found.values.push(index),
                None => return Err(format!("the statement has a placeholder ${digits}, but {values} value(s)")),
            }
            found.text.push('?');
            rest = &rest[1 + digits.len()..];
            // "$1a" is no placeholder elsewhere either; the engine will say so.
            in_name = true;
            continue;
        }
        let length = untouched_at(rest).unwrap_or(first.len_utf8());
        found.text.push_str(&rest[..length]);
        in_name = length == first.len_utf8() && is_of_a_name(first);
        rest = &rest[length..];
    }
    match (0..values).find(|index| !found.values.contains(index)) {
        Some(unused) => Err(format!("the statement has {values} value(s), but no placeholder ${}", unused + 1)),
        None => Ok(found),
    }
}

/// The digits after a dollar sign, and what they are.
fn number_at(text: &str) -> Option<(&str, usize)> {
    let digits = text.strip_prefix('$')?;
    let digits = &digits[..digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len())];
    Some((digits, digits.parse().ok()?))
}

/// The length of the quoted text or the comment that `text` begins with, to its end or the end of all.
fn untouched_at(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    match *bytes {
        [quote @ (b'\'' | b'"' | b'`'), ..] => Some(quoted(bytes, quote)),
        [b'#', ..] => Some(up_to(text, "\n")),
        // Two dashes are a comment only before a blank or the end: 5--$1 is a subtraction.
        [b'-', b'-'] => Some(2),
        [b'-', b'-', next, ..] if next.is_ascii_whitespace() || next.is_ascii_control() => Some(up_to(text, "\n")),
        [b'/', b'*', ..] => Some(2 + up_to(&text[2..], "*/")),
        _ => None,
    }
}

/// A quote is part of the text when it is doubled, or after a backslash, except in names.
fn quoted(bytes: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' if quote != b'`' => at += 2,
            byte if byte == quote && bytes.get(at + 1) == Some(&quote) => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

fn up_to(text: &str, end: &str) -> usize {
    text.find(end).map_or(text.len(), |at| at + end.len())
}

fn is_of_a_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_' || character == '$' || !character.is_ascii()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn becomes(text: &str, values: usize, expected: &str, order: &[usize]) {
        let found = positional(text, values).unwrap();
        assert_eq!((found.text.as_str(), found.values.as_slice()), (expected, order), "{text}");
    }

    #[test]
    fn values_follow_their_placeholders() {
        becomes("INSERT INTO a VALUES ($1, $2)", 2, "INSERT INTO a VALUES (?, ?)", &[0, 1]);
        becomes("SELECT $2, $1", 2, "SELECT ?, ?", &[1, 0]);
        becomes("SELECT $1+$1,$2", 2, "SELECT ?+?,?", &[0, 0, 1]);
        becomes(
            "VALUES ($1,$2,$3,$4,$5,$6,$7,$8,$9,$10,$11)",
            11,
            "VALUES (?,?,?,?,?,?,?,?,?,?,?)",
            &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        );
        becomes("$1", 1, "?", &[0]);
        becomes("", 0, "", &[]);
        becomes("5--$1", 1, "5--?", &[0]);
        becomes("a=$1-- $2", 1, "a=?-- $2", &[0]);
        becomes("'ä'=$1 OR ß=$1", 1, "'ä'=? OR ß=?", &[0, 0]);
    }

    #[test]
    fn quotes_comments_and_names_stay() {
        for (text, expected) in [
            ("'$1' = $1", "'$1' = ?"),
            ("'it''s $1' = $1", "'it''s $1' = ?"),
            (r"'\'$1' = $1", r"'\'$1' = ?"),
            (r"'\\' = $1 -- '$1", r"'\\' = ? -- '$1"),
            ("\"$1\"\"$1\" = $1", "\"$1\"\"$1\" = ?"),
            (r#""\"$1" = $1"#, r#""\"$1" = ?"#),
            (r"`\` = $1 AND `a``$1` = 1", r"`\` = ? AND `a``$1` = 1"),
            ("$1 -- it's $1\n+ '$1'", "? -- it's $1\n+ '$1'"),
            ("$1 # it's $1\n", "? # it's $1\n"),
            ("/* $1 '*/ $1 /* ' */", "/* $1 '*/ ? /* ' */"),
            ("/*/ $1 */ $1", "/*/ $1 */ ?"),
            ("a$1 = $1", "a$1 = ?"),
            ("é$1 = $1", "é$1 = ?"),
            ("$$1 = $1", "$$1 = ?"),
            ("$ 1, $a, $1", "$ 1, $a, ?"),
            ("$1 '$1", "? '$1"),
            ("$1 --", "? --"),
        ] {
            becomes(text, 1, expected, &[0]);
        }
    }

    #[test]
    fn what_does_not_match_is_said() {
        for (text, values, says) in [
            ("SELECT $2", 1, "placeholder $2, but 1 value"),
            ("SELECT $0", 1, "placeholder $0"),
            ("SELECT '$1'", 1, "no placeholder $1"),
            ("SELECT $1, $3", 3, "no placeholder $2"),
        ] {
            let error = positional(text, values).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    proptest! {
        /// Whatever the text is: no panic, and as many question marks more as there are values for them.
        #[test]
        fn every_placeholder_has_its_value(text in "[$1-3'\"`\\\\#/*a\u{e9} \n-]{0,40}") {
            if let Ok(found) = positional(&text, 3) {
                let marks = |text: &str| text.matches('?').count();
                prop_assert_eq!(marks(&found.text), found.values.len());
                prop_assert!(found.values.iter().all(|&index| index < 3));
            }
        }
    }
}
