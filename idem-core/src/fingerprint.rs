//! A digest of what a message says: tells "the same job again" from "the same key, another job" (S4).

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::json::{self, Unreadable};

/// SHA-256 over the canonical JSON (RFC 8785) of a payload, or of the fields of it that matter.
///
/// Field order, spacing and escapes do not count. Numbers count by their value, to the last digit: where RFC 8785 would round
/// an integer beyond 2^53, or a number with more digits than a double has, it is taken as it is written. The number 7 and the
/// text `"7"` differ.
///
/// Written as `sha256:` and 64 hexadecimal digits.
///
/// ```
/// use idem_core::Fingerprint;
/// use serde_json::json;
///
/// let one = Fingerprint::of(&json!({"amount": 5, "currency": "IDR"}))?;
/// let same = Fingerprint::of(&json!({"currency": "IDR", "amount": 5}))?;
/// let other = Fingerprint::of(&json!({"amount": 6, "currency": "IDR"}))?;
/// assert_eq!(one, same);
/// assert_ne!(one, other);
/// # Ok::<(), idem_core::FingerprintError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

/// A value that has no canonical JSON form.
#[derive(Debug, thiserror::Error)]
#[error("the payload has no canonical JSON form")]
pub struct FingerprintError(#[source] Unreadable);

/// The text is not `sha256:` and 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a fingerprint: expected `sha256:` and 64 hexadecimal digits")]
pub struct FingerprintParseError;

impl Fingerprint {
    /// The fingerprint of `payload`.
    ///
    /// # Errors
    /// The value cannot be written as JSON (a map whose keys are no texts), or is written with a field twice in one object.
    pub fn of(payload: &impl Serialize) -> Result<Self, FingerprintError> {
        Self::of_exact(&exact(payload)?)
    }

    /// Of a payload as [`json::read`] reads it.
    pub(crate) fn of_exact(value: &Value) -> Result<Self, FingerprintError> {
        let canonical = serde_json_canonicalizer::to_vec(value).map_err(|error| FingerprintError(error.into()))?;
        Ok(Self::of_bytes(&canonical))
    }

    /// Of these bytes as they are.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
}

/// The value as [`json::read`] reads what it is written as: so 128-bit integers keep their digits, which a [`Value`] has no
/// room for.
pub(crate) fn exact(value: &(impl Serialize + ?Sized)) -> Result<Value, FingerprintError> {
    let written = serde_json::to_vec(value).map_err(|error| FingerprintError(error.into()))?;
    json::read(&written).map_err(FingerprintError)
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        let mut text = String::with_capacity(71);
        text.push_str("sha256:");
        for byte in self.0 {
            text.push(HEX[usize::from(byte >> 4)] as char);
            text.push(HEX[usize::from(byte & 15)] as char);
        }
        f.write_str(&text)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = FingerprintParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.strip_prefix("sha256:").ok_or(FingerprintParseError)?.as_bytes();
        let mut bytes = [0; 32];
        if digits.len() != 2 * bytes.len() {
            return Err(FingerprintParseError);
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = hex_digit(pair[0])? << 4 | hex_digit(pair[1])?;
        }
        Ok(Self(bytes))
    }
}

fn hex_digit(digit: u8) -> Result<u8, FingerprintParseError> {
    let value = (digit as char).to_digit(16).ok_or(FingerprintParseError)?;
    Ok(value as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(value: Value) -> Fingerprint {
        Fingerprint::of(&value).unwrap()
    }

    #[test]
    fn integers_beyond_double_precision_stay_apart() {
        assert_ne!(of(json!({"id": 9_007_199_254_740_993_u64})), of(json!({"id": 9_007_199_254_740_992_u64})));
        assert_ne!(of(json!(i64::MIN)), of(json!(i64::MIN + 1)));
        assert_ne!(of(json!(u64::MAX)), of(json!(u64::MAX - 1)));
        assert_ne!(of(json!(9_007_199_254_740_993_u64)), of(json!("9007199254740993")));
        assert_ne!(of(json!(9_007_199_254_740_993_u64)), of(json!("\u{1}int:9007199254740993")));
        assert_ne!(of(json!("\u{1}int:\u{1}int:1")), of(json!("\u{1}int:1")));
    }

    #[test]
    fn integers_of_128_bits_stay_apart() {
        let of = |integer: u128| Fingerprint::of(&integer).unwrap();
        assert_ne!(of(u128::MAX), of(u128::MAX - 1));
        assert_ne!(of(1 << 64), of((1 << 64) + 1));
        assert_ne!(Fingerprint::of(&i128::MIN).unwrap(), Fingerprint::of(&(i128::MIN + 1)).unwrap());
    }

    #[test]
    fn what_has_no_canonical_form_is_an_error() {
        #[derive(Serialize)]
        struct Twice {
            id: u8,
            #[serde(flatten)]
            more: std::collections::BTreeMap<&'static str, u8>,
        }
        let twice = Twice { id: 1, more: [("id", 2)].into() };
        let error = Fingerprint::of(&twice).unwrap_err();
        assert_eq!(std::error::Error::source(&error).unwrap().to_string(), "field `id` stands twice in one object");
        assert!(Fingerprint::of(&std::collections::BTreeMap::from([(vec![1], 1)])).is_err());
    }

    #[test]
    fn field_order_and_spacing_do_not_count() {
        let spaced: Value = serde_json::from_str(r#"{ "b" : [1, 2], "a" : {"y":1,"x":2} }"#).unwrap();
        assert_eq!(of(spaced), of(json!({"a": {"x": 2, "y": 1}, "b": [1, 2]})));
    }

    #[test]
    fn text_round_trips_and_fits_its_column() {
        let fingerprint = of(json!({"a": 1}));
        let text = fingerprint.to_string();
        assert_eq!(text.len(), 71);
        assert_eq!(text.parse(), Ok(fingerprint));
        for bad in ["", "sha256:", "sha256:zz", &text[..70], &text.replace("sha256", "sha1")] {
            assert_eq!(bad.parse::<Fingerprint>(), Err(FingerprintParseError), "{bad}");
        }
    }
}
