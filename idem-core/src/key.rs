//! What names a job: the consumer and the idempotency key, as validated values.

use std::fmt;

use uuid::Uuid;

/// The most characters (Unicode scalar values) an idempotency key may have: the width of its column (S1).
pub const MAX_KEY_CHARS: usize = 255;
/// The most characters a consumer name may have: the width of its column (S1).
pub const MAX_CONSUMER_CHARS: usize = 100;

/// The name under which a handler guards its jobs. The same key under two names is two jobs (K3).
///
/// Letters, digits, `.`, `_` and `-` of ASCII, beginning with a letter or digit, since the name goes into topic names and
/// metric labels.
///
/// ```
/// use idem_core::ConsumerName;
///
/// assert_eq!(ConsumerName::new("payment-settlement")?.as_str(), "payment-settlement");
/// assert!(ConsumerName::new("payment settlement").is_err());
/// # Ok::<(), idem_core::ConsumerNameError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConsumerName(String);

/// Why a text cannot be a [`ConsumerName`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "consumer name {name:?} is not valid: 1 to {MAX_CONSUMER_CHARS} of a-z, A-Z, 0-9, `.`, `_`, `-`, beginning with a letter or digit"
)]
pub struct ConsumerNameError {
    name: String,
}

impl ConsumerName {
    /// Checks and takes `name`.
    ///
    /// # Errors
    /// The name is empty, too long, or has a character that topic names and labels cannot carry.
    pub fn new(name: impl Into<String>) -> Result<Self, ConsumerNameError> {
        let name = name.into();
        let starts_well = name.starts_with(|c: char| c.is_ascii_alphanumeric());
        let all_allowed = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
        if starts_well && all_allowed && name.len() <= MAX_CONSUMER_CHARS {
            Ok(Self(name))
        } else {
            Err(ConsumerNameError { name: name.chars().take(MAX_CONSUMER_CHARS).collect() })
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ConsumerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The idempotency key of one job, as it is stored: 1 to [`MAX_KEY_CHARS`] characters, no NUL, otherwise byte for byte
/// what the message said. No trimming, no case folding, no normalisation: `"A-1"` and `"A-1 "` are two jobs.
///
/// A key of one field is that field's text. A key of several joins their texts by `|`, with `|` and `\` inside a text
/// escaped by `\`, so that no two lists of several texts share a key. One text is never escaped, so `"a|b"` alone is the key of
/// `["a", "b"]`: a consumer takes its keys from the same fields always, or changes its name.
///
/// A number is its decimal digits: the integer 7 and the text `"7"` are one key. They do not meet, since a field of the event
/// has one type, and its decoder refuses the other; where a producer changes from one to the other, the event must change with
/// it, and the jobs stay the same. Integers are exact in every size that Rust has.
///
/// ```
/// use idem_core::EventKey;
///
/// assert_eq!(EventKey::from_parts(["A-1001"])?.as_str(), "A-1001");
/// assert_eq!(EventKey::from_parts(["A-1001", "paid"])?.as_str(), "A-1001|paid");
/// assert_ne!(EventKey::from_parts(["a|b", "c"])?, EventKey::from_parts(["a", "b|c"])?);
/// assert!(EventKey::from_parts(["", "paid"]).is_err());
/// # Ok::<(), idem_core::KeyError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventKey(String);

/// Why a message has no usable key (K4). Such a message is set aside; its key is never guessed or cut.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The field or header that names the key is absent or null.
    #[error("key field `{field}` is missing")]
    Missing {
        /// The field or header.
        field: String,
    },
    /// The field or header is there and empty.
    #[error("key field `{field}` is empty")]
    Empty {
        /// The field or header.
        field: String,
    },
    /// The key has a NUL character, which PostgreSQL cannot store.
    #[error("key field `{field}` contains a NUL character")]
    Nul {
        /// The field or header.
        field: String,
    },
    /// The whole key is longer than its column.
    #[error("the key has {chars} characters, more than {MAX_KEY_CHARS}")]
    TooLong {
        /// Characters in the whole key.
        chars: usize,
    },
    /// The header's bytes are not UTF-8 text.
    #[error("key header `{field}` is not UTF-8 text")]
    NotText {
        /// The header.
        field: String,
    },
}

impl EventKey {
    /// A key of one or several texts, in this order.
    ///
    /// # Errors
    /// A text is empty or has a NUL, or the whole is longer than [`MAX_KEY_CHARS`]. Errors name the text by its position.
    pub fn from_parts<I>(parts: I) -> Result<Self, KeyError>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let mut builder = KeyBuilder::default();
        for (position, part) in parts.into_iter().enumerate() {
            builder.push(&position.to_string(), part.as_ref())?;
        }
        builder.finish()
    }

    /// A key as it was read back from a store, which only ever held valid ones.
    #[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
    pub(crate) fn from_stored(key: String) -> Self {
        Self(key)
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for EventKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Joins the parts of a key, see [`EventKey`].
#[derive(Debug, Default)]
pub struct KeyBuilder {
    /// The first part as it came, until a second one shows that parts must be escaped.
    parts: Vec<String>,
}

impl KeyBuilder {
    /// Adds one part; `field` names it in errors.
    ///
    /// # Errors
    /// The part is empty or has a NUL character.
    pub fn push(&mut self, field: &str, part: &str) -> Result<(), KeyError> {
        check_part(field, part)?;
        self.parts.push(part.to_owned());
        Ok(())
    }

    /// The whole key.
    ///
    /// # Errors
    /// No part was added, or the whole is longer than [`MAX_KEY_CHARS`].
    pub fn finish(mut self) -> Result<EventKey, KeyError> {
        let text = match self.parts.len() {
            0 => return Err(KeyError::Missing { field: "key".to_owned() }),
            1 => self.parts.remove(0),
            _ => self.parts.iter().map(|part| escape(part)).collect::<Vec<_>>().join("|"),
        };
        within_limit(text).map(EventKey)
    }

    pub(crate) fn into_parts(self) -> Vec<String> {
        self.parts
    }
}

fn check_part(field: &str, part: &str) -> Result<(), KeyError> {
    if part.is_empty() {
        return Err(KeyError::Empty { field: field.to_owned() });
    }
    if part.contains('\0') {
        return Err(KeyError::Nul { field: field.to_owned() });
    }
    Ok(())
}

fn within_limit(text: String) -> Result<String, KeyError> {
    match text.chars().count() {
        chars if chars > MAX_KEY_CHARS => Err(KeyError::TooLong { chars }),
        _ => Ok(text),
    }
}

fn escape(part: &str) -> String {
    part.replace('\\', r"\\").replace('|', r"\|")
}

/// The name of a state that only one run at a time may change, whatever its key and consumer (L5): at most
/// [`MAX_KEY_CHARS`] characters.
///
/// Made of paths and their values, and not of values alone, so that the account 7 and the user 7 are two locks. It knows no
/// consumer, so that all consumers that name the same state share its lock. The order of the parts does not count.
///
/// ```
/// use idem_core::LockName;
///
/// let account = LockName::from_parts([("account_id", "7"), ("tenant", "north")])?;
/// assert_eq!(account.as_str(), "account_id=7|tenant=north");
/// assert_eq!(account, LockName::from_parts([("tenant", "north"), ("account_id", "7")])?);
/// assert_ne!(LockName::from_parts([("account_id", "7")])?, LockName::from_parts([("user_id", "7")])?);
/// # Ok::<(), idem_core::KeyError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockName(String);

impl LockName {
    /// A lock on what these pairs of path and value name.
    ///
    /// # Errors
    /// There is no pair, a value is empty or has a NUL character, or the whole is longer than [`MAX_KEY_CHARS`].
    pub fn from_parts<I, P, V>(parts: I) -> Result<Self, KeyError>
    where
        I: IntoIterator<Item = (P, V)>,
        P: AsRef<str>,
        V: AsRef<str>,
    {
        let mut pairs = Vec::new();
        for (path, value) in parts {
            let (path, value) = (path.as_ref(), value.as_ref());
            check_part(path, value)?;
            pairs.push((path.to_owned(), format!("{}={}", escape(path).replace('=', r"\="), escape(value))));
        }
        if pairs.is_empty() {
            return Err(KeyError::Missing { field: "lock".to_owned() });
        }
        // By path, and values of one path as they came: the order in which an attribute lists its fields says nothing.
        pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
        let texts: Vec<String> = pairs.into_iter().map(|(_, text)| text).collect();
        within_limit(texts.join("|")).map(Self)
    }

    /// What a store has, which was a lock's name when it was stored.
    #[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
    pub(crate) fn from_stored(text: String) -> Self {
        Self(text)
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A type whose values can name a job: text, integers, UUIDs, and optional ones of these.
///
/// The text must be the same for every delivery of the same job (K1), so there is no implementation for floating point
/// numbers, whose text depends on who wrote it. An implementation adds the same number of parts always: one, or one for each
/// field of a composite value.
///
/// ```
/// use idem_core::{KeyBuilder, KeyError, KeyField};
///
/// struct Tenant { id: u32 }
///
/// impl KeyField for Tenant {
///     fn write(&self, field: &str, key: &mut KeyBuilder) -> Result<(), KeyError> {
///         self.id.write(field, key)
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be used as an idempotency key",
    label = "this field is named by `key = ...` or `lock = ...`",
    note = "keys are stored as text: use `String`, an integer or a `Uuid`, or implement `KeyField` for `{Self}`"
)]
pub trait KeyField {
    /// Adds this value to `key` under the name `field`.
    ///
    /// # Errors
    /// The value is missing, empty, or cannot be stored.
    fn write(&self, field: &str, key: &mut KeyBuilder) -> Result<(), KeyError>;
}

macro_rules! key_field_by_display {
    ($($type:ty),*) => {$(
        impl KeyField for $type {
            fn write(&self, field: &str, key: &mut KeyBuilder) -> Result<(), KeyError> {
                key.push(field, &self.to_string())
            }
        }
    )*};
}
key_field_by_display!(i8, i16, i32, i64, i128, isize, u8, u16, u32, u64, u128, usize, Uuid);

impl KeyField for str {
    fn write(&self, field: &str, key: &mut KeyBuilder) -> Result<(), KeyError> {
        key.push(field, self)
    }
}

impl KeyField for String {
    fn write(&self, field: &str, key: &mut KeyBuilder) -> Result<(), KeyError> {
        key.push(field, self)
    }
}

impl<T: KeyField + ?Sized> KeyField for &T {
    fn write(&self, field: &str, key: &mut KeyBuilder) -> Result<(), KeyError> {
        (**self).write(field, key)
    }
}

impl<T: KeyField + ?Sized> KeyField for Box<T> {
    fn write(&self, field: &str, key: &mut KeyBuilder) -> Result<(), KeyError> {
        (**self).write(field, key)
    }
}

impl<T: KeyField> KeyField for Option<T> {
    fn write(&self, field: &str, key: &mut KeyBuilder) -> Result<(), KeyError> {
        match self {
            Some(value) => value.write(field, key),
            None => Err(KeyError::Missing { field: field.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn k4_a_key_is_refused_rather_than_changed() {
        assert_eq!(EventKey::from_parts([""]), Err(KeyError::Empty { field: "0".into() }));
        assert_eq!(EventKey::from_parts(["a\0b"]), Err(KeyError::Nul { field: "0".into() }));
        assert_eq!(EventKey::from_parts(Vec::<String>::new()), Err(KeyError::Missing { field: "key".into() }));
        assert_eq!(EventKey::from_parts(["x".repeat(256)]), Err(KeyError::TooLong { chars: 256 }));
        assert!(EventKey::from_parts(["é".repeat(255)]).is_ok(), "the limit counts characters, as the column does");
    }

    #[test]
    fn k1_text_is_kept_byte_for_byte() {
        for text in ["A-1 ", " A-1", "a-1", "\u{e9}", "e\u{301}", "'; DROP TABLE x; --", r"a\b|c"] {
            assert_eq!(EventKey::from_parts([text]).unwrap().as_str(), text);
        }
    }

    #[test]
    fn k4_a_part_is_refused_wherever_it_stands() {
        for (parts, error) in [
            (vec!["a", ""], KeyError::Empty { field: "1".into() }),
            (vec!["", "a"], KeyError::Empty { field: "0".into() }),
            (vec!["a", "b", "\0"], KeyError::Nul { field: "2".into() }),
            (vec!["\0a"], KeyError::Nul { field: "0".into() }),
        ] {
            assert_eq!(EventKey::from_parts(parts), Err(error));
        }
    }

    #[test]
    fn k4_the_limit_counts_what_is_stored() {
        let fits = EventKey::from_parts(["x".repeat(127), "y".repeat(127)]).unwrap();
        assert_eq!(fits.as_str().chars().count(), MAX_KEY_CHARS);
        let escaped = ["|".repeat(127), "y".repeat(127)];
        assert_eq!(EventKey::from_parts(escaped), Err(KeyError::TooLong { chars: 255 + 127 }));
        assert_eq!(EventKey::from_parts(["\u{1f980}".repeat(255)]).unwrap().as_str().len(), 4 * 255);
    }

    #[test]
    fn k1_unicode_is_kept_as_bytes() {
        let composed = EventKey::from_parts(["\u{e9}", "x"]).unwrap();
        let decomposed = EventKey::from_parts(["e\u{301}", "x"]).unwrap();
        assert_ne!(composed, decomposed);
        assert_eq!(decomposed.as_str().as_bytes(), "e\u{301}|x".as_bytes());
        for pair in [["A", "a"], ["ß", "ss"], ["K", "\u{212a}"], ["1", "\u{661}"], ["a", "a\u{200b}"], ["a", "a "]] {
            assert_ne!(EventKey::from_parts([pair[0]]), EventKey::from_parts([pair[1]]), "{pair:?}");
        }
    }

    #[derive(serde::Deserialize)]
    struct Exact<T> {
        id: T,
    }

    fn key_of<T: serde::de::DeserializeOwned + KeyField>(json: &str) -> Result<String, serde_json::Error> {
        let event: Exact<T> = serde_json::from_str(json)?;
        let mut key = KeyBuilder::default();
        event.id.write("id", &mut key).unwrap();
        Ok(key.finish().unwrap().to_string())
    }

    #[test]
    fn k1_integers_are_exact_from_json() {
        assert_eq!(key_of::<u64>(r#"{"id":9007199254740993}"#).unwrap(), "9007199254740993");
        assert_eq!(key_of::<u64>(r#"{"id":18446744073709551615}"#).unwrap(), "18446744073709551615");
        assert_eq!(key_of::<i64>(r#"{"id":-9223372036854775808}"#).unwrap(), "-9223372036854775808");
        let largest = u128::MAX;
        assert_eq!(key_of::<u128>(&format!(r#"{{"id":{largest}}}"#)).unwrap(), largest.to_string());
        assert!(key_of::<u64>(r#"{"id":18446744073709551616}"#).is_err(), "refused, not rounded");
    }

    #[test]
    fn k1_a_number_and_a_text_are_not_merged_unseen() {
        // One field has one type, and the other one does not decode.
        assert!(key_of::<u64>(r#"{"id":"7"}"#).is_err());
        assert!(key_of::<String>(r#"{"id":7}"#).is_err());
        assert!(key_of::<u64>(r#"{"id":7.0}"#).is_err());
        assert_eq!(key_of::<String>(r#"{"id":"007"}"#).unwrap(), "007");
        // In a composite key each keeps its place.
        assert_ne!(EventKey::from_parts(["7", "a"]), EventKey::from_parts(["a", "7"]));
    }

    proptest! {
        #[test]
        fn k1_no_two_tuples_share_a_key(
            one in prop::collection::vec("[ab|\\\\=é]{1,4}", 2..5),
            other in prop::collection::vec("[ab|\\\\=é]{1,4}", 2..5),
        ) {
            let (first, second) = (EventKey::from_parts(&one).unwrap(), EventKey::from_parts(&other).unwrap());
            prop_assert_eq!(first == second, one == other);
        }

        #[test]
        fn k1_one_text_is_stored_as_it_is(text in "[^\\x00]{1,255}") {
            let key = EventKey::from_parts([&text]).unwrap();
            prop_assert_eq!(key.as_str(), text);
        }

        #[test]
        fn l5_no_two_states_share_a_lock(one in states(), other in states()) {
            let (first, second) = (LockName::from_parts(&one).unwrap(), LockName::from_parts(&other).unwrap());
            prop_assert_eq!(first == second, one == other);
        }
    }

    /// Values by path.
    fn states() -> impl Strategy<Value = BTreeMap<String, String>> {
        prop::collection::btree_map("[ab|\\\\=.:]{1,3}", "[ab|\\\\=]{1,3}", 1..4)
    }

    /// The worst cases of the above, each pair of them.
    #[test]
    fn composite_keys_are_injective() {
        let texts = ["a", "b", "|", r"\", r"\|", "a|", r"a\", "|a", "a|b", r"a\|b"];
        let mut seen = std::collections::HashMap::new();
        for first in texts {
            for second in texts {
                let key = EventKey::from_parts([first, second]).unwrap();
                assert_eq!(seen.insert(key, (first, second)), None, "{first:?}, {second:?}");
            }
        }
    }

    #[test]
    fn l5_a_lock_is_refused_as_a_key_is() {
        let nothing: [(&str, &str); 0] = [];
        assert_eq!(LockName::from_parts(nothing), Err(KeyError::Missing { field: "lock".into() }));
        assert_eq!(LockName::from_parts([("id", "")]), Err(KeyError::Empty { field: "id".into() }));
        assert_eq!(LockName::from_parts([("id", "a\0")]), Err(KeyError::Nul { field: "id".into() }));
        assert_eq!(LockName::from_parts([("id", "x".repeat(253))]), Err(KeyError::TooLong { chars: 256 }));
        assert!(LockName::from_parts([("id", "x".repeat(252))]).is_ok());
    }

    #[test]
    fn l5_the_order_of_paths_does_not_count_and_that_of_values_does() {
        let name = |parts: &[(&str, &str)]| LockName::from_parts(parts.iter().copied()).unwrap();
        assert_eq!(name(&[("a", "1"), ("b", "2")]), name(&[("b", "2"), ("a", "1")]));
        assert_ne!(name(&[("a", "1"), ("a", "2")]), name(&[("a", "2"), ("a", "1")]));
        assert_eq!(name(&[("a=b", "c=d|e")]).as_str(), r"a\=b=c=d\|e");
    }

    #[test]
    fn an_absent_optional_field_is_missing() {
        let mut key = KeyBuilder::default();
        assert_eq!(None::<u32>.write("order_id", &mut key), Err(KeyError::Missing { field: "order_id".into() }));
    }

    #[test]
    fn consumer_names_fit_topics_and_labels() {
        for bad in ["", "a b", "-a", "a/b", "ü", &"x".repeat(101)] {
            assert!(ConsumerName::new(bad).is_err(), "{bad:?}");
        }
        assert!(ConsumerName::new("x".repeat(100)).is_ok());
    }
}
