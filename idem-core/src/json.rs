//! A message's JSON as its bytes have it: fields that stand twice, and digits that a double cannot hold, which are gone once
//! it is decoded.
//!
//! What is read here has been decoded before, so it is JSON; that it is not is an error all the same, never a panic.

use std::borrow::Cow;

use serde_json::{Map, Number, Value};

/// As deep as `serde_json` goes, so that a hostile payload cannot use up the stack.
const MAX_DEPTH: usize = 128;
/// Integers up to here are exact as doubles.
const EXACT: u64 = 1 << 53;
/// In front of an integer beyond [`EXACT`] that has become a string.
const INTEGER: &str = "\u{1}int:";
/// In front of another number that has become a string.
const NUMBER: &str = "\u{1}num:";

/// Why a payload cannot be compared with others.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreadable {
    /// Decoders differ in which of the two they take, so the message says two things.
    #[error("field `{0}` stands twice in one object")]
    Twice(String),
    #[error("it is nested deeper than {MAX_DEPTH} levels")]
    Deep,
    #[error("the number {0} is out of range")]
    OutOfRange(String),
    #[error("it is not JSON")]
    Malformed,
    #[error(transparent)]
    Text(#[from] serde_json::Error),
}

/// The whole payload, to be fingerprinted: numbers are as [`number`] makes them, and texts as [`text`] does.
pub(crate) fn read(bytes: &[u8]) -> Result<Value, Unreadable> {
    Reader { bytes, at: 0, depth: 0, keep: true, names: Vec::new() }.value()
}

/// Only checks that no field stands twice in one object.
pub(crate) fn check(bytes: &[u8]) -> Result<(), Unreadable> {
    Reader { bytes, at: 0, depth: 0, keep: false, names: Vec::new() }.value().map(drop)
}

/// The number as canonical JSON can hold it. That writes numbers as doubles (RFC 8785), and so merges integers beyond 2^53
/// with their neighbours, and longer ones by the thousands. Such numbers become marked strings. Nothing, if it is no finite
/// double.
fn number(written: &str) -> Option<Value> {
    if let Ok(integer) = written.parse::<u64>() {
        return Some(if integer > EXACT { marked(INTEGER, written) } else { integer.into() });
    }
    if let Ok(integer) = written.parse::<i64>() {
        return Some(if integer.unsigned_abs() > EXACT { marked(INTEGER, written) } else { integer.into() });
    }
    let double = Number::from_f64(written.parse().ok()?)?;
    // The shortest text of the double is what a producer that counts in doubles writes. Any other digits are more than that.
    let shortest = decimal(&format!("{:e}", double.as_f64()?));
    Some(match decimal(written) {
        exact if exact == shortest => Value::Number(double),
        Some(exact) => marked(NUMBER, &exact),
        None => marked(NUMBER, written),
    })
}

/// A text that looks like a marked number gets a mark itself, so that no text equals a number.
fn text(text: Cow<'_, str>) -> Value {
    if text.starts_with(INTEGER) || text.starts_with(NUMBER) {
        return marked(INTEGER, &text);
    }
    Value::String(text.into_owned())
}

fn marked(mark: &str, text: &str) -> Value {
    Value::String(format!("{mark}{text}"))
}

/// The same text for the same decimal number: its digits without zeros around them, and their exponent. Nothing, if the
/// exponent is beyond all bounds.
fn decimal(written: &str) -> Option<String> {
    let (sign, unsigned) = written.strip_prefix('-').map_or(("", written), |rest| ("-", rest));
    let (digits, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let digits = format!("{whole}{fraction}");
    let significant = digits.trim_end_matches('0');
    if significant.is_empty() {
        return Some("0".to_owned());
    }
    let exponent = i128::from(exponent.parse::<i64>().ok()?);
    let exponent = exponent + (digits.len() - significant.len()) as i128 - fraction.len() as i128;
    Some(format!("{sign}{}e{exponent}", significant.trim_start_matches('0')))
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    depth: usize,
    /// Whether values are wanted; else each is null.
    keep: bool,
    /// The names of the objects around, those of the innermost last: one list for all of them.
    names: Vec<Cow<'a, str>>,
}

impl<'a> Reader<'a> {
    fn value(&mut self) -> Result<Value, Unreadable> {
        match self.next()? {
            b'{' => self.nested(Self::object),
            b'[' => self.nested(Self::array),
            b'"' => self.text_value(),
            b'n' => self.word("null", Value::Null),
            b't' => self.word("true", Value::Bool(true)),
            b'f' => self.word("false", Value::Bool(false)),
            _ => self.number_value(),
        }
    }

    fn nested(&mut self, read: fn(&mut Self) -> Result<Value, Unreadable>) -> Result<Value, Unreadable> {
        if self.depth == MAX_DEPTH {
            return Err(Unreadable::Deep);
        }
        self.depth += 1;
        let value = read(self);
        self.depth -= 1;
        value
    }

    fn object(&mut self) -> Result<Value, Unreadable> {
        let (outer, mut fields) = (self.names.len(), Map::new());
        self.items(b'}', |reader| {
            let name = reader.text()?;
            reader.expect(b':')?;
            let value = reader.value()?;
            if reader.keep {
                fields.insert(name.clone().into_owned(), value);
            }
            reader.names.push(name);
            Ok(())
        })?;
        let names = &mut self.names[outer..];
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Unreadable::Twice(twice[0].clone().into_owned()));
        }
        self.names.truncate(outer);
        Ok(Value::Object(fields))
    }

    fn array(&mut self) -> Result<Value, Unreadable> {
        let mut items = Vec::new();
        self.items(b']', |reader| {
            let item = reader.value()?;
            if reader.keep {
                items.push(item);
            }
            Ok(())
        })?;
        Ok(Value::Array(items))
    }

    /// What stands between an opening bracket and `close`, with commas between.
    fn items(
        &mut self,
        close: u8,
        mut item: impl FnMut(&mut Self) -> Result<(), Unreadable>,
    ) -> Result<(), Unreadable> {
        self.at += 1;
        if self.next()? == close {
            self.at += 1;
            return Ok(());
        }
        loop {
            item(self)?;
            if self.next()? == close {
                self.at += 1;
                return Ok(());
            }
            self.expect(b',')?;
        }
    }

    fn text_value(&mut self) -> Result<Value, Unreadable> {
        if self.keep {
            return self.text().map(text);
        }
        self.quoted().map(|_| Value::Null)
    }

    fn text(&mut self) -> Result<Cow<'a, str>, Unreadable> {
        let (quoted, plain) = self.quoted()?;
        match std::str::from_utf8(&quoted[1..quoted.len() - 1]) {
            Ok(text) if plain => Ok(Cow::Borrowed(text)),
            // Escapes, and what is wrong with bytes that are no text, are left to the decoder.
            _ => Ok(Cow::Owned(serde_json::from_slice(quoted)?)),
        }
    }

    /// A text with its quotes, and whether it has no escapes.
    fn quoted(&mut self) -> Result<(&'a [u8], bool), Unreadable> {
        self.expect(b'"')?;
        let (begin, mut plain) = (self.at - 1, true);
        loop {
            match self.bytes.get(self.at).ok_or(Unreadable::Malformed)? {
                b'"' => break,
                b'\\' => {
                    plain = false;
                    self.at += 2;
                }
                _ => self.at += 1,
            }
        }
        self.at += 1;
        Ok((&self.bytes[begin..self.at], plain))
    }

    fn number_value(&mut self) -> Result<Value, Unreadable> {
        let rest = &self.bytes[self.at..];
        let is_part = |byte: &u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
        let length = rest.iter().position(|byte| !is_part(byte)).unwrap_or(rest.len());
        if length == 0 {
            return Err(Unreadable::Malformed);
        }
        self.at += length;
        if !self.keep {
            return Ok(Value::Null);
        }
        let written = std::str::from_utf8(&rest[..length]).map_err(|_| Unreadable::Malformed)?;
        number(written).ok_or_else(|| Unreadable::OutOfRange(written.to_owned()))
    }

    fn word(&mut self, word: &str, value: Value) -> Result<Value, Unreadable> {
        if !self.bytes[self.at..].starts_with(word.as_bytes()) {
            return Err(Unreadable::Malformed);
        }
        self.at += word.len();
        Ok(value)
    }

    fn expect(&mut self, wanted: u8) -> Result<(), Unreadable> {
        if self.next()? != wanted {
            return Err(Unreadable::Malformed);
        }
        self.at += 1;
        Ok(())
    }

    /// The next byte that is no space, which stays.
    fn next(&mut self) -> Result<u8, Unreadable> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let spaces = rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count();
        self.at += spaces;
        rest.get(spaces).copied().ok_or(Unreadable::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// What both ways of reading say.
    fn refused(payload: &str) -> String {
        let (read, checked) = (read(payload.as_bytes()).unwrap_err(), check(payload.as_bytes()).unwrap_err());
        assert_eq!(read.to_string(), checked.to_string());
        read.to_string()
    }

    #[test]
    fn k4_a_field_that_stands_twice_is_refused_at_every_depth() {
        for payload in [
            r#"{"id":1,"id":1}"#,
            r#"{ "id" : 1 , "amount" : 5 , "id" : 2 }"#,
            r#"[0,[{"a":{"b":"c"}},{"order":{"x":[],"id":1,"y":{},"id":null}}]]"#,
            r#"{"id":1,"\u0069d":2}"#,
            r#"{"\u0069\u0064":1,"z":{"id":2},"id":2}"#,
        ] {
            assert_eq!(refused(payload), "field `id` stands twice in one object", "{payload}");
        }
        assert_eq!(refused(r#"{"":1,"":2}"#), "field `` stands twice in one object");
        assert_eq!(refused(r#"{"é":1,"\u00e9":2}"#), "field `é` stands twice in one object");
    }

    #[test]
    fn the_same_name_in_other_objects_or_letters_is_no_duplicate() {
        for payload in [
            r#"{"id":{"id":{"id":1}},"Id":[{"id":1},{"id":1}]}"#,
            r#"{"a":"id","b":"id","id":"id"}"#,
            "{\"\u{e9}\":1,\"e\u{301}\":2,\"a\":0,\"a \":0}",
        ] {
            assert_eq!(read(payload.as_bytes()).unwrap(), serde_json::from_str::<Value>(payload).unwrap());
            check(payload.as_bytes()).unwrap();
        }
    }

    #[test]
    fn numbers_share_a_form_only_if_they_are_equal() {
        let distinct = [
            "9007199254740992",
            "9007199254740993",
            "18446744073709551615",
            "18446744073709551616",
            "18446744073709551617",
            "-9223372036854775808",
            "-9223372036854775809",
            "-9223372036854775810",
            "100000000000000000000",
            "100000000000000000001",
            "100000000000000000000.1",
            "0.1",
            "0.10000000000000001",
            "90000000000000.01",
            "90000000000000.02",
            "1e-400",
            "2e-400",
            "1e-99999999999999999999",
            "2e-99999999999999999999",
            "0",
            "1",
            "-1",
            "\"9007199254740993\"",
            "\"\\u0001int:9007199254740993\"",
            "\"\\u0001num:100000000000000000001e0\"",
            "\"\\u0001int:\\u0001num:100000000000000000001e0\"",
        ];
        let mut seen = std::collections::HashMap::new();
        for written in distinct {
            let form = read(written.as_bytes()).unwrap();
            let canonical = serde_json_canonicalizer::to_string(&form).unwrap();
            assert_eq!(seen.insert(canonical, written), None, "{written}");
        }
    }

    #[test]
    fn the_same_number_written_otherwise_has_the_same_form() {
        for (one, other) in [
            ("100000000000000000000", "1e20"),
            ("1.10", "1.1"),
            ("0.00000000000000000000012345678901234567890", "1.2345678901234567890E-22"),
            ("123456789012345678901.50", "1234567890123456789015e-1"),
            ("-0", "0"),
            ("0.0", "0e99999999999999999999"),
            ("5.0", "5"),
        ] {
            let form = |written: &str| serde_json_canonicalizer::to_string(&number(written).unwrap()).unwrap();
            assert_eq!(form(one), form(other), "{one}, {other}");
        }
    }

    #[test]
    fn what_is_no_json_is_an_error() {
        for bytes in ["", " ", "{", "[1,", r#"{"a" 1}"#, r#"{"a":1"#, "\"", "\"\\", "nul", "}", "{1:2}", "[1 2]"] {
            assert!(read(bytes.as_bytes()).is_err(), "{bytes:?}");
            assert!(check(bytes.as_bytes()).is_err(), "{bytes:?}");
        }
        assert!(read(b"+").is_err());
        assert!(read(b"\"\xff\"").is_err());
        assert!(read(br#""\ud800""#).is_err());
        assert_eq!(read(b"1e400").unwrap_err().to_string(), "the number 1e400 is out of range");
    }

    #[test]
    fn nesting_has_an_end() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert!(read(nested(MAX_DEPTH).as_bytes()).is_ok());
        assert_eq!(refused(&nested(MAX_DEPTH + 1)), "it is nested deeper than 128 levels");
        assert_eq!(refused(&"[{\"a\":".repeat(100_000)), "it is nested deeper than 128 levels");
    }

    fn values() -> impl Strategy<Value = Value> {
        let small = -(EXACT as i64)..=EXACT as i64;
        let scalar = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            small.prop_map(Value::from),
            any::<f64>().prop_filter("JSON has no others", |double| double.is_finite()).prop_map(Value::from),
            "[\\PC\"\\\\\n\u{2}]{0,8}".prop_map(Value::from),
        ];
        scalar.prop_recursive(4, 64, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::btree_map("[a-cé\"\\\\]{0,3}", inner, 0..6).prop_map(|fields| json!(fields)),
            ]
        })
    }

    proptest! {
        #[test]
        fn everything_else_is_read_as_the_decoder_reads_it(value in values(), pretty: bool) {
            let written =
                if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) }.unwrap();
            let canonical = |value: &Value| serde_json_canonicalizer::to_string(value).unwrap();
            prop_assert_eq!(canonical(&read(written.as_bytes()).unwrap()), canonical(&value));
            prop_assert!(check(written.as_bytes()).is_ok());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(
            prop_oneof![4 => prop::sample::select(&b"{}[]\",:\\ 0e-.tn"[..]), 1 => any::<u8>()], 0..24)
        ) {
            let _ = (read(&bytes), check(&bytes));
        }

        #[test]
        fn long_integers_stay_apart(one in "[1-9][0-9]{15,30}", other in "[1-9][0-9]{15,30}", last in 0..10_u8) {
            let form = |digits: &str| serde_json_canonicalizer::to_string(&number(digits).unwrap()).unwrap();
            let neighbour = format!("{}{last}", &one[..one.len() - 1]);
            for different in [&other, &neighbour] {
                prop_assert_eq!(form(&one) == form(different), one == *different);
            }
        }
    }
}
