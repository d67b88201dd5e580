//! What generated code calls. Not public API: may change with any version, together with the macro.

pub use std::option::Option;
pub use std::time::Duration;

use crate::fingerprint::exact;
pub use crate::handler::{
    Call, Classify, Disposition, Handler, HandlerFailure, Headers, IntoOutcome, IntoProbe, Mode, OnConflict, Parameter,
    Requirements, Spec, Transactional,
};
use crate::handler::{FailureKind, Job, Output, Probe, States, capped};
pub use crate::key::{EventKey, KeyError};
use crate::key::{KeyBuilder, KeyField, LockName};
use crate::store::{Tx, WrongEngine};
pub use crate::{Fingerprint, FingerprintError};

/// What [`Handler::key`] answers.
pub type KeyResult = Result<EventKey, KeyError>;
/// What [`Handler::fingerprint`] answers.
pub type FingerprintResult = Option<Result<Fingerprint, FingerprintError>>;
/// What [`Handler::call`] answers.
pub type CallResult = Result<Output, HandlerFailure>;
/// What [`Handler::probe`] answers.
pub type ProbeResult = Result<Probe, HandlerFailure>;
/// What [`Handler::lock`] answers.
pub type LockResult = Option<Result<LockName, KeyError>>;

/// Begins the key of a message with these headers.
pub fn key(headers: &dyn Headers) -> Key<'_> {
    Key { headers, parts: KeyBuilder::default() }
}

/// The key of a message, part by part.
pub struct Key<'a> {
    headers: &'a dyn Headers,
    parts: KeyBuilder,
}

impl Key<'_> {
    /// Adds a field of the event.
    pub fn field<T: KeyField + ?Sized>(mut self, name: &str, value: &T) -> Result<Self, KeyError> {
        value.write(name, &mut self.parts)?;
        Ok(self)
    }

    /// Adds a header.
    pub fn header(mut self, name: &str) -> Result<Self, KeyError> {
        self.parts.push(name, header(self.headers, name)?)?;
        Ok(self)
    }

    /// The key.
    pub fn finish(self) -> KeyResult {
        self.parts.finish()
    }
}

fn header<'a>(headers: &'a dyn Headers, name: &str) -> Result<&'a str, KeyError> {
    let value = headers.value(name).ok_or_else(|| KeyError::Missing { field: name.to_owned() })?;
    std::str::from_utf8(value).map_err(|_| KeyError::NotText { field: name.to_owned() })
}

/// Begins the lock of a message with these headers.
pub fn lock(headers: &dyn Headers) -> Lock<'_> {
    Lock { headers, parts: Ok(Vec::new()) }
}

/// The lock of a message, part by part.
pub struct Lock<'a> {
    headers: &'a dyn Headers,
    /// Paths and texts, or the first part's error.
    parts: Result<Vec<(String, String)>, KeyError>,
}

impl Lock<'_> {
    /// Adds a field of the event.
    pub fn field<T: KeyField + ?Sized>(self, name: &str, value: &T) -> Self {
        self.part(name, |_, parts| value.write(name, parts))
    }

    /// Adds a header.
    pub fn header(self, name: &str) -> Self {
        self.part(&format!("header:{name}"), |headers, parts| parts.push(name, header(headers, name)?))
    }

    fn part(mut self, path: &str, write: impl FnOnce(&dyn Headers, &mut KeyBuilder) -> Result<(), KeyError>) -> Self {
        self.parts = self.parts.and_then(|mut all| {
            let mut texts = KeyBuilder::default();
            write(self.headers, &mut texts)?;
            all.extend(texts.into_parts().into_iter().map(|text| (path.to_owned(), text)));
            Ok(all)
        });
        self
    }

    /// The lock.
    pub fn finish(self) -> LockResult {
        Some(self.parts.and_then(LockName::from_parts))
    }
}

/// Begins the fingerprint of chosen fields.
pub fn fingerprint() -> FingerprintBuilder {
    FingerprintBuilder::default()
}

/// The fingerprint of chosen fields: of the object that they make up.
#[derive(Default)]
pub struct FingerprintBuilder {
    fields: serde_json::Map<String, serde_json::Value>,
    error: Option<FingerprintError>,
}

impl FingerprintBuilder {
    /// Adds one field.
    pub fn field<T: serde::Serialize + ?Sized>(mut self, name: &str, value: &T) -> Self {
        match exact(value) {
            Ok(value) => {
                self.fields.insert(name.to_owned(), value);
            }
            Err(error) => self.error = Some(error),
        }
        self
    }

    /// The fingerprint.
    pub fn finish(self) -> FingerprintResult {
        Some(match self.error {
            Some(error) => Err(error),
            None => Fingerprint::of_exact(&self.fields.into()),
        })
    }
}

/// What a call hands to the function, piece by piece.
pub struct Arguments<'a, E> {
    call: Call<'a, E>,
}

/// Takes a call apart.
pub fn arguments<E>(call: Call<'_, E>) -> Arguments<'_, E> {
    Arguments { call }
}

impl<'a, E> Arguments<'a, E> {
    /// The event of a handler that takes one at a time.
    pub fn event(&mut self) -> Result<E, HandlerFailure> {
        self.call.events.pop().ok_or_else(|| broken("a call without its event"))
    }

    /// The events of a batch handler.
    pub fn events(&mut self) -> Vec<E> {
        std::mem::take(&mut self.call.events)
    }

    /// The job of a handler that takes one event at a time.
    pub fn job<T: ?Sized>(&self, view: fn(&Job) -> &T) -> Result<&'a T, HandlerFailure> {
        self.call.jobs.first().map(view).ok_or_else(|| broken("a call without its job"))
    }

    /// The jobs of a batch handler.
    pub fn jobs<T>(&self, view: fn(&[Job]) -> &[T]) -> &'a [T] {
        view(self.call.jobs)
    }

    /// The transaction, as the type the function takes.
    pub fn transaction<T: ?Sized>(&mut self, view: View<T>) -> Result<&'a mut T, HandlerFailure> {
        let tx = self.call.tx.take().ok_or_else(|| broken("a call without its transaction"))?;
        view(tx).map_err(|error| broken(&error.to_string()))
    }

    /// A shared value.
    pub fn parameter<T>(&self, take: fn(&States) -> Result<T, HandlerFailure>) -> Result<T, HandlerFailure> {
        take(self.call.states)
    }
}

/// [`Transactional::of`]. Generated code names the traits' functions instead of relying on bounds here: then a type
/// that does not implement one is reported once, on its own tokens, however often it is used.
type View<T> = fn(&mut Tx) -> Result<&mut T, WrongEngine>;

/// What a handler may take by reference: [`Job`] alone. A trait only for what the compiler then says.
#[diagnostic::on_unimplemented(
    message = "a handler cannot take a `&{Self}`",
    label = "a `&` parameter is the job",
    note = "take the job as `&Job`, the event by value, and shared values as `State<T>`"
)]
pub trait JobParameter {
    /// The job as what it is.
    fn one(job: &Job) -> &Self;

    /// The jobs as what they are.
    fn all(jobs: &[Job]) -> &[Self]
    where
        Self: Sized;
}

impl JobParameter for Job {
    fn one(job: &Job) -> &Self {
        job
    }

    fn all(jobs: &[Job]) -> &[Self] {
        jobs
    }
}

fn broken(what: &str) -> HandlerFailure {
    HandlerFailure { kind: FailureKind::Transient, message: capped(what.to_owned()), violated: None }
}
