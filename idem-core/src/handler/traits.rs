//! The trait that `#[idempotent]` fills in, and those by which it reads the function's signature.

use std::any::type_name;
use std::future::Future;

use serde::de::DeserializeOwned;

use super::{FailureKind, HandlerFailure, Headers, Job, Output, Probe, Spec, State, States};
use crate::key::{EventKey, KeyError, LockName};
use crate::store::{Engine, Tx, WrongEngine};
use crate::{Fingerprint, FingerprintError};

/// One run of a handler: what the generated code hands to the function.
#[derive(Debug)]
pub struct Call<'a, E> {
    /// One event, or those of a batch, in the order of `jobs`.
    pub events: Vec<E>,
    /// One job for each event.
    pub jobs: &'a [Job],
    /// The transaction of an atomic handler.
    pub tx: Option<&'a mut Tx>,
    /// Shared values.
    pub states: &'a States,
}

/// A handler value: what `#[idempotent]` makes of a function. Not meant to be written by hand.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler",
    label = "not a function with `#[idempotent]`",
    note = "put `#[idempotent(key = \"…\", consumer = \"…\")]` on the function"
)]
pub trait Handler: Copy + Send + Sync + 'static {
    /// What a message says.
    type Event: DeserializeOwned + Send + 'static;

    /// The attribute, as data.
    const SPEC: Spec;

    /// Takes the key from the message (K1).
    ///
    /// # Errors
    /// There is no usable key (K4).
    fn key(event: &Self::Event, headers: &dyn Headers) -> Result<EventKey, KeyError>;

    /// The fingerprint of the chosen fields; nothing if the whole payload counts, as it does unless fields are chosen.
    ///
    /// # Errors
    /// A field cannot be written as JSON.
    fn fingerprint(event: &Self::Event) -> Option<Result<Fingerprint, FingerprintError>> {
        let _ = event;
        None
    }

    /// Names the lock that is held while the function runs (L5). Nothing, unless the attribute says `lock = …`.
    ///
    /// # Errors
    /// The message does not say which lock it needs: like a message without a key (K4), it is set aside.
    fn lock(event: &Self::Event, headers: &dyn Headers) -> Option<Result<LockName, KeyError>> {
        let _ = (event, headers);
        None
    }

    /// Names everything the function takes besides its event, so that what is missing is found at start. Nothing, unless
    /// it takes something.
    fn require(requirements: &mut Requirements<'_>) {
        let _ = requirements;
    }

    /// Asks whether an earlier try had its effect (T2). [`Probe::NotDone`], unless the attribute says `probe = …`.
    fn probe(call: Call<'_, Self::Event>) -> impl Future<Output = Result<Probe, HandlerFailure>> + Send {
        drop(call);
        std::future::ready(Ok(Probe::NotDone))
    }

    /// Calls the function.
    fn call(call: Call<'_, Self::Event>) -> impl Future<Output = Result<Output, HandlerFailure>> + Send;
}

/// Collects what a handler needs and does not have.
#[derive(Debug)]
pub struct Requirements<'a> {
    states: &'a States,
    engine: Engine,
    missing: Vec<String>,
}

impl<'a> Requirements<'a> {
    /// Checks against these values and this engine.
    pub fn new(states: &'a States, engine: Engine) -> Self {
        Self { states, engine, missing: Vec::new() }
    }

    /// The function takes a transaction of this engine; of any, if there is none.
    pub fn transaction(&mut self, wanted: Option<Engine>) {
        if let Some(wanted) = wanted.filter(|wanted| *wanted != self.engine) {
            self.missing.push(format!("it takes a {wanted} connection, but the store is {}", self.engine));
        }
    }

    /// The function takes a parameter that checks itself.
    pub fn parameter(&mut self, check: fn(&States) -> Result<(), String>) {
        if let Err(error) = check(self.states) {
            self.missing.push(error);
        }
    }

    /// One sentence for each thing that is missing.
    pub fn missing(self) -> Vec<String> {
        self.missing
    }
}

/// A connection that a handler can take as `tx: &mut T`.
#[diagnostic::on_unimplemented(
    message = "`&mut {Self}` is not a transaction that idem can hand to a handler",
    label = "a `&mut` parameter is the transaction",
    note = "take `&mut Tx`, `&mut PgConnection`, `&mut MySqlConnection` or `&mut SqliteConnection`; shared values come as `State<T>`"
)]
pub trait Transactional: Send {
    /// The engine it belongs to; nothing if it runs on any.
    const ENGINE: Option<Engine>;

    /// This view of the transaction.
    ///
    /// # Errors
    /// The store is another engine's.
    fn of(tx: &mut Tx) -> Result<&mut Self, WrongEngine>;
}

/// A value that a handler can take besides its event and transaction.
#[diagnostic::on_unimplemented(
    message = "a handler cannot take a `{Self}`",
    label = "not the event, a transaction, `&Job` or `State<T>`",
    note = "the first parameter is the event; take shared values as `State<{Self}>`"
)]
pub trait Parameter: Sized + Send {
    /// Whether it can be had.
    ///
    /// # Errors
    /// A sentence that says what is missing.
    fn check(states: &States) -> Result<(), String>;

    /// The value.
    ///
    /// # Errors
    /// It cannot be had; [`check`](Self::check) says so at start.
    fn take(states: &States) -> Result<Self, HandlerFailure>;
}

impl<T: Send + Sync + 'static> Parameter for State<T> {
    fn check(states: &States) -> Result<(), String> {
        match states.get::<T>() {
            Some(_) => Ok(()),
            None => Err(format!("it takes `State<{0}>`, but no `{0}` was given with `.state(…)`", type_name::<T>())),
        }
    }

    fn take(states: &States) -> Result<Self, HandlerFailure> {
        states.get().ok_or_else(|| HandlerFailure {
            kind: FailureKind::Transient,
            message: format!("no state of type `{}`", type_name::<T>()),
            violated: None,
        })
    }
}
