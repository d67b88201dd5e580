//! What a handler and its probe answer, without the handler's own types.

use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Serialize;

use super::{Classify, HandlerFailure};
use crate::fingerprint::Fingerprint;

/// The longest returned value that is kept, in bytes of JSON: a row is read with every duplicate, so it stays small.
pub const MAX_RESULT_BYTES: usize = 64 * 1024;

/// What a handler returned, as JSON. Nothing for `()`, for other values that are `null` in JSON, for batch handlers (results
/// belong to one job each), and for a value that cannot be written as JSON.
///
/// ```
/// use std::convert::Infallible;
/// use idem_core::IntoOutcome;
///
/// let output = Ok::<_, Infallible>(vec![1, 2]).into_outcome()?;
/// assert_eq!(output.as_json(), Some(&b"[1,2]"[..]));
/// assert_eq!(Ok::<_, Infallible>(()).into_outcome()?.as_json(), None);
/// # Ok::<(), idem_core::HandlerFailure>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output(Option<Vec<u8>>);

impl Output {
    /// The value as JSON, all of it.
    pub fn as_json(&self) -> Option<&[u8]> {
        self.0.as_deref()
    }

    /// The same, to keep.
    pub fn into_json(self) -> Option<Vec<u8>> {
        self.0
    }

    /// What is stored with the job: all of it or, if it is longer than [`MAX_RESULT_BYTES`], nothing. Half a value would be
    /// another value. Its [`hash`](Self::hash) is stored in any case.
    pub fn stored(&self) -> Option<&[u8]> {
        self.as_json().filter(|json| json.len() <= MAX_RESULT_BYTES)
    }

    /// `sha256:` and 64 hexadecimal digits, over the whole of the value's JSON.
    pub fn hash(&self) -> Option<String> {
        self.as_json().map(|json| Fingerprint::of_bytes(json).to_string())
    }

    /// The effect has taken place when this is called, so nothing here may make the try fail: not an error of the value's
    /// `Serialize`, nor its panic.
    fn of(value: &impl Serialize) -> Self {
        let problem = match catch_unwind(AssertUnwindSafe(|| serde_json::to_vec(value))) {
            Ok(Ok(json)) if json == b"null" => return Self(None),
            Ok(Ok(json)) => return Self(Some(json)),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => HandlerFailure::from_panic(&*panic).message,
        };
        tracing::warn!(
            errorMessage = problem,
            "a handler's value cannot be written as JSON; its job completes without it"
        );
        Self(None)
    }
}

/// What a handler may return: `Result<T, E>`, where `T` can be written as JSON, and `E` is an error that says whether trying
/// again is of use.
#[diagnostic::on_unimplemented(
    message = "an `#[idempotent]` handler must return a `Result`, not `{Self}`",
    label = "this is no `Result<T, E>`",
    note = "return `Result<(), E>` with an `E` that implements `std::error::Error` and `Classify`"
)]
pub trait IntoOutcome {
    /// The same, without its types. A value that cannot be written as JSON counts as none, since its effect is done.
    ///
    /// # Errors
    /// The handler's error.
    fn into_outcome(self) -> Result<Output, HandlerFailure>;
}

impl<T, E> IntoOutcome for Result<T, E>
where
    T: Serialize,
    E: StdError + Classify + 'static,
{
    fn into_outcome(self) -> Result<Output, HandlerFailure> {
        match self {
            Ok(value) => Ok(Output::of(&value)),
            Err(error) => Err(HandlerFailure::from_error(&error)),
        }
    }
}

/// What a probe found: whether an effect outside the guard's database took place in an earlier try (T2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Probe {
    /// It did: the job is completed without running the handler.
    Done,
    /// It did not, and no earlier try can still bring it about: the handler runs.
    NotDone,
    /// Nobody can tell: the job is set aside for a person.
    Unknown,
}

/// What a probe may return: [`Probe`], or `Result<Probe, E>` with an error as a handler's.
#[diagnostic::on_unimplemented(
    message = "a probe must return `Probe` or `Result<Probe, E>`, not `{Self}`",
    label = "the function that `probe = ...` names does not answer with a `Probe`",
    note = "return `Result<Probe, E>` with an `E` that implements `std::error::Error` and `Classify`"
)]
pub trait IntoProbe {
    /// The same, without its types.
    ///
    /// # Errors
    /// The probe's error.
    fn into_probe(self) -> Result<Probe, HandlerFailure>;
}

impl IntoProbe for Probe {
    fn into_probe(self) -> Result<Probe, HandlerFailure> {
        Ok(self)
    }
}

impl<E: StdError + Classify + 'static> IntoProbe for Result<Probe, E> {
    fn into_probe(self) -> Result<Probe, HandlerFailure> {
        self.map_err(|error| HandlerFailure::from_error(&error))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    use serde::Serializer;

    use super::*;

    fn output(value: impl Serialize) -> Output {
        Ok::<_, Infallible>(value).into_outcome().unwrap()
    }

    #[test]
    fn a_value_is_kept_whole_or_not_at_all() {
        let fits = output("x".repeat(MAX_RESULT_BYTES - 2));
        assert_eq!(fits.stored().map(<[u8]>::len), Some(MAX_RESULT_BYTES));
        let long = output("x".repeat(MAX_RESULT_BYTES - 1));
        assert_eq!(long.stored(), None);
        assert_eq!(long.as_json().map(<[u8]>::len), Some(MAX_RESULT_BYTES + 1));
        assert_ne!(long.hash(), None);
        assert_ne!(long.hash(), fits.hash());
    }

    #[test]
    fn a_hash_is_the_one_of_the_json_text() {
        // printf '[1,2]' | sha256sum
        let expected = "sha256:49a64717d5d4cb19952e6eac2946415cf6879adacf9908e7d872332d32c6e684";
        assert_eq!(output([1, 2]).hash().as_deref(), Some(expected));
    }

    #[test]
    fn nothing_is_kept_of_nothing() {
        for output in [output(()), output(None::<u32>), output(serde_json::Value::Null)] {
            assert_eq!((output.as_json(), output.stored(), output.hash()), (None, None, None));
        }
        assert_eq!(output(false).into_json().as_deref(), Some(&b"false"[..]));
    }

    #[test]
    fn t2_a_value_that_is_no_json_does_not_undo_what_is_done() {
        struct Panics;
        impl Serialize for Panics {
            fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
                panic!("no");
            }
        }
        assert_eq!(output(BTreeMap::from([(vec![1], 1)])), Output::default());
        assert_eq!(output(Panics), Output::default());
    }

    #[test]
    fn a_probe_may_be_sure_or_fail() {
        assert_eq!(Probe::Done.into_probe(), Ok(Probe::Done));
        assert_eq!(Ok::<_, Infallible>(Probe::Unknown).into_probe(), Ok(Probe::Unknown));
        let failed = Err::<Probe, _>(std::io::Error::other("no answer")).into_probe().unwrap_err();
        assert_eq!((failed.kind, &*failed.message), (crate::FailureKind::Transient, "no answer"));
    }
}
