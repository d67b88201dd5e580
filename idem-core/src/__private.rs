//! What generated code calls. Not public API: may change with any version, together with the macro.

use std::future::Future;

pub use std::clone::Clone;
pub use std::marker::{Copy, Send};
pub use std::option::Option;
pub use std::result::Result;
pub use std::time::Duration;
pub use std::vec::Vec;

pub use crate::handler::{Call, Handler, HandlerFailure, Headers, Job, Mode, Requirements, Spec};
use crate::handler::{FailureKind, IntoOutcome, Parameter, Transactional, capped};
use crate::key::KeyField;
pub use crate::key::{EventKey, KeyBuilder, KeyError};
use crate::store::Tx;
pub use crate::{Classify, Disposition, Fingerprint, FingerprintError};

/// Adds the field `name` of an event to its key.
pub fn key_field<T: KeyField + ?Sized>(key: &mut KeyBuilder, name: &str, value: &T) -> Result<(), KeyError> {
    value.write(name, key)
}

/// Adds the header `name` to a key.
pub fn key_header(key: &mut KeyBuilder, headers: &dyn Headers, name: &str) -> Result<(), KeyError> {
    let value = headers.last(name).ok_or_else(|| KeyError::Missing { field: name.to_owned() })?;
    let value = std::str::from_utf8(value).map_err(|_| KeyError::NotText { field: name.to_owned() })?;
    key.push(name, value)
}

/// The fingerprint of chosen fields: of the object that they make up.
#[derive(Default)]
pub struct FingerprintBuilder {
    fields: serde_json::Map<String, serde_json::Value>,
    error: Option<serde_json::Error>,
}

impl FingerprintBuilder {
    /// Adds one field.
    pub fn field<T: serde::Serialize + ?Sized>(mut self, name: &str, value: &T) -> Self {
        match serde_json::to_value(value) {
            Ok(value) => {
                self.fields.insert(name.to_owned(), value);
            }
            Err(error) => self.error = Some(error),
        }
        self
    }

    /// The fingerprint.
    pub fn finish(self) -> Option<Result<Fingerprint, FingerprintError>> {
        Some(match self.error {
            Some(error) => Err(FingerprintError(error)),
            None => Fingerprint::of(&self.fields),
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
    pub fn job(&self) -> Result<&'a Job, HandlerFailure> {
        self.call.jobs.first().ok_or_else(|| broken("a call without its job"))
    }

    /// The jobs of a batch handler.
    pub fn jobs(&self) -> &'a [Job] {
        self.call.jobs
    }

    /// The transaction, as the type the function takes.
    pub fn transaction<T: Transactional>(&mut self) -> Result<&'a mut T, HandlerFailure> {
        let tx = self.call.tx.take().ok_or_else(|| broken("a call without its transaction"))?;
        T::of(tx).map_err(|error| broken(&error.to_string()))
    }

    /// A shared value.
    pub fn parameter<T: Parameter>(&self) -> Result<T, HandlerFailure> {
        T::take(self.call.states)
    }
}

/// Awaits the function and takes the types off its answer.
pub async fn outcome<F>(running: F) -> Result<(), HandlerFailure>
where
    F: Future,
    F::Output: IntoOutcome,
{
    running.await.into_outcome()
}

fn broken(what: &str) -> HandlerFailure {
    HandlerFailure { kind: FailureKind::Transient, message: capped(what.to_owned()), violated: None }
}

/// Names `Tx` for the macro's tests.
pub type AnyTx = Tx;
