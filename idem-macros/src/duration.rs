//! Durations as people write them: `"2m"`, `"1m 30s"`, `"250ms"`.

use std::time::Duration;

/// The units, with their milliseconds.
const UNITS: &[(&str, u64)] = &[("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];

/// Reads numbers with their units, and adds them up.
///
/// # Errors
/// What is wrong, and what to write instead, as half a sentence.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err("an empty text is no duration: write one such as `30s`".to_owned());
    }
    let mut millis = 0_u64;
    while !rest.is_empty() {
        let (number, unit, after) = next_part(rest);
        millis = amount(text, number, unit)
            .and_then(|more| millis.checked_add(more).ok_or_else(|| format!("`{text}` is too long")))?;
        rest = after;
    }
    Ok(Duration::from_millis(millis))
}

/// The first number, its unit, and what comes after them.
fn next_part(text: &str) -> (&str, &str, &str) {
    let (number, rest) = split_while(text, |c| c.is_ascii_digit());
    let (unit, rest) = split_while(rest.trim_start(), |c| !c.is_ascii_digit() && !c.is_whitespace());
    (number, unit, rest.trim_start())
}

fn split_while(text: &str, belongs: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !belongs(c)).unwrap_or(text.len()))
}

fn amount(text: &str, number: &str, unit: &str) -> Result<u64, String> {
    if number.is_empty() {
        return Err(format!("`{text}` is not a duration: write whole numbers with units, such as `1m 30s`"));
    }
    if unit.is_empty() {
        return Err(format!("`{text}` lacks its unit: write `{number}s` for seconds; the units are ms, s, m and h"));
    }
    let Some((_, millis)) = UNITS.iter().find(|(name, _)| *name == unit) else {
        return Err(format!(
            "`{text}` has the unknown unit `{unit}`: the units are ms, s, m and h, with whole numbers"
        ));
    };
    let number = number.parse::<u64>().ok();
    number.and_then(|number| number.checked_mul(*millis)).ok_or_else(|| format!("`{text}` is too long"))
}

/// The same in the fewest units, for messages.
pub(crate) fn text(duration: Duration) -> String {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    if millis == 0 {
        return "0s".to_owned();
    }
    let (unit, size) = UNITS.iter().rev().find(|(_, size)| millis.is_multiple_of(*size)).unwrap_or(&UNITS[0]);
    format!("{}{unit}", millis / size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_with_units_are_added_up() {
        for (text, millis) in [
            ("250ms", 250),
            ("2m", 120_000),
            ("1m 30s", 90_000),
            ("1m30s", 90_000),
            (" 1h  1ms ", 3_600_001),
            ("5 s", 5000),
            ("0s", 0),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text:?}");
        }
    }

    #[test]
    fn everything_else_is_refused_with_what_to_write() {
        for (text, said) in [
            ("", "an empty text"),
            (" ", "an empty text"),
            ("2", "`2` lacks its unit: write `2s`"),
            ("1m 30", "lacks its unit: write `30s`"),
            ("m", "is not a duration"),
            ("-2s", "is not a duration"),
            ("1.5s", "unknown unit `.`"),
            ("2 minutes", "unknown unit `minutes`"),
            ("2M", "unknown unit `M`"),
            ("30000000000000000h", "is too long"),
            ("99999999999999999999ms", "is too long"),
            ("18446744073709551615ms 1ms", "is too long"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(said), "{text:?}: {error}");
        }
    }

    #[test]
    fn messages_use_the_largest_unit_that_fits() {
        for text in ["0s", "300ms", "1s", "90s", "2m", "24h"] {
            assert_eq!(super::text(parse(text).unwrap()), text);
        }
    }
}
