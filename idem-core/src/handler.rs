//! What a handler's author meets: the job, state, how errors are classified, and the trait that `#[idempotent]` fills in.

use std::any::{Any, TypeId, type_name};
use std::collections::HashMap;
use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::key::{ConsumerName, ConsumerNameError, EventKey, KeyError};
use crate::policy::{Policy, PolicyError};
use crate::store::{Engine, Tx, WrongEngine};
use crate::{Fingerprint, FingerprintError};

/// The job a handler runs for. Take it as `job: &Job`.
#[derive(Clone, Debug)]
pub struct Job {
    pub(crate) consumer: ConsumerName,
    pub(crate) key: EventKey,
    pub(crate) attempt: u32,
    pub(crate) fence: i64,
    pub(crate) message_id: Arc<str>,
    pub(crate) cancel: CancellationToken,
}

/// Under which [`Job::downstream_key`]s are made. Changing it would change every key.
const DOWNSTREAM_NAMESPACE: Uuid = Uuid::from_u128(0x1de3_c0de_5f1a_4d6b_9c53_7a2e_41b0_8f67);

impl Job {
    /// The consumer's name.
    pub fn consumer(&self) -> &ConsumerName {
        &self.consumer
    }

    /// The idempotency key.
    pub fn key(&self) -> &EventKey {
        &self.key
    }

    /// Which try this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Which claim of this job this is: grows with each, so that the callee can refuse a late one.
    pub fn fence(&self) -> i64 {
        self.fence
    }

    /// Names the delivery this try came from, as `topic/partition/offset` for Kafka.
    pub fn message_id(&self) -> &str {
        &self.message_id
    }

    /// An idempotency key for a call to another system (T2): the same on every attempt, for every duplicate and in every
    /// process, and another one for each `purpose`.
    ///
    /// ```
    /// # use idem_core::{ConsumerName, EventKey, Job};
    /// # fn example(job: &Job) {
    /// let header = job.downstream_key("charge");
    /// assert_eq!(header, job.downstream_key("charge"));
    /// assert_ne!(header, job.downstream_key("refund"));
    /// # }
    /// # example(&Job::detached(ConsumerName::new("payment")?, EventKey::from_parts(["P-1"])?));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn downstream_key(&self, purpose: &str) -> String {
        let (consumer, key) = (self.consumer.as_str(), self.key.as_str());
        // Lengths in front, so that no two triples share a text.
        let name = format!("{}:{consumer}{}:{key}{purpose}", consumer.len(), key.len());
        Uuid::new_v5(&DOWNSTREAM_NAMESPACE, name.as_bytes()).to_string()
    }

    /// Waits until this try must stop. In lease mode it fires when the lease cannot be renewed or the time is up, and the
    /// handler's future is dropped a moment later. Where nothing can be gained by warning (an atomic handler, whose effect
    /// is rolled back; the deadline of ending; a lease that somebody else has) the future is dropped at once.
    ///
    /// # Cancel safety
    /// Safe: it only waits.
    pub async fn cancelled(&self) {
        self.cancel.cancelled().await;
    }

    /// A job that no store knows, to call a handler's body by hand, in tests above all.
    pub fn detached(consumer: ConsumerName, key: EventKey) -> Self {
        Self {
            consumer,
            key,
            attempt: 1,
            fence: 1,
            message_id: Arc::from("detached"),
            cancel: CancellationToken::new(),
        }
    }
}

/// A value shared by all runs of all handlers: a client, a pool, settings. Take it as `gateway: State<Gateway>`; hand it
/// over where the application is built.
///
/// ```
/// use idem_core::State;
///
/// struct Gateway { url: String }
///
/// fn url(gateway: &State<Gateway>) -> &str {
///     &gateway.url
/// }
/// assert_eq!(url(&State::new(Gateway { url: "http://127.0.0.1".into() })), "http://127.0.0.1");
/// ```
pub struct State<T>(Arc<T>);

impl<T> State<T> {
    /// Shares `value`.
    pub fn new(value: T) -> Self {
        Self(Arc::new(value))
    }
}

impl<T> Clone for State<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Deref for State<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: fmt::Debug> fmt::Debug for State<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("State").field(&self.0).finish()
    }
}

/// The shared values of an application, one per type.
#[derive(Clone, Default)]
pub struct States(HashMap<TypeId, Arc<dyn Any + Send + Sync>>);

impl States {
    /// Adds `value`, in place of an earlier one of the same type.
    pub fn insert<T: Send + Sync + 'static>(&mut self, value: T) {
        self.0.insert(TypeId::of::<T>(), Arc::new(value));
    }

    fn get<T: Send + Sync + 'static>(&self) -> Option<State<T>> {
        let value = Arc::clone(self.0.get(&TypeId::of::<T>())?);
        Some(State(value.downcast().ok()?))
    }
}

impl fmt::Debug for States {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "States({})", self.0.len())
    }
}

/// Whether trying again is of use (R1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Disposition {
    /// Yes: a time-out, a lock, a service that is away.
    Transient,
    /// No: the message asks for something that cannot be done.
    Terminal,
}

/// Says of an error whether trying again is of use (R1). Derive it, or write it:
///
/// ```
/// use idem_core::{Classify, Disposition};
///
/// #[derive(Debug, thiserror::Error)]
/// enum GatewayError {
///     #[error("the gateway did not answer")]
///     NoAnswer,
///     #[error("the card was declined")]
///     Declined,
/// }
///
/// impl Classify for GatewayError {
///     fn disposition(&self) -> Disposition {
///         match self {
///             GatewayError::NoAnswer => Disposition::Transient,
///             GatewayError::Declined => Disposition::Terminal,
///         }
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say whether trying again is of use",
    label = "the error type of an `#[idempotent]` handler",
    note = "derive it with `#[derive(Classify)]`, or implement `Classify` for `{Self}`"
)]
pub trait Classify {
    /// The answer for this error.
    fn disposition(&self) -> Disposition;
}

/// Constraint violations and refused values stay wrong; everything else may pass: locks, time-outs, lost connections.
impl Classify for sqlx::Error {
    fn disposition(&self) -> Disposition {
        use sqlx::error::ErrorKind;
        match self {
            sqlx::Error::Database(error) => match error.kind() {
                ErrorKind::UniqueViolation
                | ErrorKind::ForeignKeyViolation
                | ErrorKind::NotNullViolation
                | ErrorKind::CheckViolation => Disposition::Terminal,
                // Class 22 of SQLSTATE: a value that is too long, out of range, of a wrong form.
                _ if error.code().is_some_and(|code| code.len() == 5 && code.starts_with("22")) => {
                    Disposition::Terminal
                }
                _ => Disposition::Transient,
            },
            sqlx::Error::RowNotFound
            | sqlx::Error::TypeNotFound { .. }
            | sqlx::Error::ColumnIndexOutOfBounds { .. }
            | sqlx::Error::ColumnNotFound(_)
            | sqlx::Error::ColumnDecode { .. }
            | sqlx::Error::Encode(_)
            | sqlx::Error::Decode(_) => Disposition::Terminal,
            _ => Disposition::Transient,
        }
    }
}

impl Classify for std::io::Error {
    fn disposition(&self) -> Disposition {
        use std::io::ErrorKind;
        match self.kind() {
            ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::Unsupported => Disposition::Terminal,
            _ => Disposition::Transient,
        }
    }
}

impl Classify for serde_json::Error {
    fn disposition(&self) -> Disposition {
        if self.is_io() { Disposition::Transient } else { Disposition::Terminal }
    }
}

impl Classify for std::convert::Infallible {
    fn disposition(&self) -> Disposition {
        match *self {}
    }
}

impl<E: Classify + ?Sized> Classify for Box<E> {
    fn disposition(&self) -> Disposition {
        (**self).disposition()
    }
}

/// What a handler may return: `Result<T, E>`, where `E` is an error that says whether trying again is of use.
#[diagnostic::on_unimplemented(
    message = "an `#[idempotent]` handler must return a `Result`, not `{Self}`",
    label = "this is no `Result<T, E>`",
    note = "return `Result<(), E>` with an `E` that implements `std::error::Error` and `Classify`"
)]
pub trait IntoOutcome {
    /// The same, without its types.
    ///
    /// # Errors
    /// The handler's error.
    fn into_outcome(self) -> Result<(), HandlerFailure>;
}

impl<T, E> IntoOutcome for Result<T, E>
where
    T: Serialize,
    E: StdError + Classify + 'static,
{
    fn into_outcome(self) -> Result<(), HandlerFailure> {
        self.map(drop).map_err(|error| HandlerFailure::from_error(&error))
    }
}

/// The longest error text that is kept, in bytes: enough to see what happened, small enough for a row and a header.
pub const MAX_ERROR_BYTES: usize = 1024;

/// A failed try, without the handler's own types.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandlerFailure {
    /// How it ended.
    pub kind: FailureKind,
    /// The error and its causes, at most [`MAX_ERROR_BYTES`].
    pub message: String,
    /// The UNIQUE constraint that the handler's own statement violated, if that is what happened.
    pub violated: Option<UniqueViolation>,
}

/// How a try ended without its effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// The handler returned an error that may pass.
    Transient,
    /// The handler returned an error that stays.
    Terminal,
    /// The handler panicked. It may pass.
    Panicked,
    /// The handler ran longer than its `max_run`. It may pass.
    Timeout,
}

impl FailureKind {
    /// Whether trying again is of use.
    pub fn disposition(self) -> Disposition {
        match self {
            FailureKind::Terminal => Disposition::Terminal,
            FailureKind::Transient | FailureKind::Panicked | FailureKind::Timeout => Disposition::Transient,
        }
    }

    /// As it stands in logs, headers and labels.
    pub fn as_str(self) -> &'static str {
        match self {
            FailureKind::Transient => "transient",
            FailureKind::Terminal => "terminal",
            FailureKind::Panicked => "panicked",
            FailureKind::Timeout => "timeout",
        }
    }
}

/// A UNIQUE constraint of the application's own tables said that the effect is already there (T3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UniqueViolation {
    /// Its name where the engine tells it (PostgreSQL), else its columns as `table.column, table.column` (SQLite).
    pub constraint: String,
}

impl HandlerFailure {
    /// What a handler returned.
    pub fn from_error<E: StdError + Classify + 'static>(error: &E) -> Self {
        let kind = match error.disposition() {
            Disposition::Transient => FailureKind::Transient,
            Disposition::Terminal => FailureKind::Terminal,
        };
        Self { kind, message: with_causes(error), violated: crate::store::unique_violation(error) }
    }

    /// A panic, with what it said.
    pub fn from_panic(payload: &(dyn Any + Send)) -> Self {
        let said = payload
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no text".to_owned());
        Self { kind: FailureKind::Panicked, message: capped(format!("the handler panicked: {said}")), violated: None }
    }

    /// The engine refused to keep what the handler did, at the end of its transaction.
    pub(crate) fn from_refused_commit(error: &(dyn StdError + 'static)) -> Self {
        let message = format!(
            "the transaction was refused, so a statement failed whose error was hidden, or a constraint \
            that is checked at its end is violated: {}",
            with_causes(error)
        );
        Self { kind: FailureKind::Transient, message: capped(message), violated: crate::store::unique_violation(error) }
    }

    /// The handler's connection was lost each time it ran, while the store answered others.
    pub(crate) fn from_cut_connection(error: &(dyn StdError + 'static)) -> Self {
        let message = format!("the connection is lost whenever the handler runs: {}", with_causes(error));
        Self { kind: FailureKind::Transient, message: capped(message), violated: None }
    }

    /// A handler that was stopped at its `max_run`.
    pub fn timeout(max_run: Duration) -> Self {
        Self {
            kind: FailureKind::Timeout,
            message: format!("the handler ran longer than max_run ({})", humantime::format_duration(max_run)),
            violated: None,
        }
    }
}

/// The error's text and its causes', each once, joined by `: `.
pub(crate) fn with_causes(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = error.source();
        if text.len() > MAX_ERROR_BYTES {
            break;
        }
    }
    capped(text)
}

/// Cuts at a character's edge. NUL characters, which PostgreSQL cannot store, become spaces.
pub(crate) fn capped(mut text: String) -> String {
    if text.contains('\0') {
        text = text.replace('\0', " ");
    }
    if text.len() > MAX_ERROR_BYTES {
        let end = (0..=MAX_ERROR_BYTES - '…'.len_utf8()).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

/// What the attribute says about a handler, as data.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// The function's name.
    pub name: &'static str,
    /// The consumer's name.
    pub consumer: &'static str,
    /// Where the effect lives.
    pub mode: Mode,
    /// Whether the function takes all fresh events of a batch at once.
    pub batch: bool,
    /// `lease = …`
    pub lease: Option<Duration>,
    /// `attempts = …`
    pub attempts: Option<u32>,
    /// `backoff = "base..cap"`
    pub backoff: Option<(Duration, Duration)>,
    /// `max_run = …`
    pub max_run: Option<Duration>,
    /// `domain_unique = …`: constraints whose violation says that the effect is already there.
    pub domain_unique: &'static [&'static str],
}

/// Where a handler's effect lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// In the guard's own database: one transaction holds claim, effect and completion (T1).
    Atomic,
    /// Elsewhere: the guard holds a lease, renews it, and fences the completion (T2).
    Lease,
}

impl Spec {
    /// A spec of the two required arguments.
    pub const fn new(name: &'static str, consumer: &'static str, mode: Mode) -> Self {
        Self {
            name,
            consumer,
            mode,
            batch: false,
            lease: None,
            attempts: None,
            backoff: None,
            max_run: None,
            domain_unique: &[],
        }
    }

    /// The consumer's name, checked.
    ///
    /// # Errors
    /// The name is not valid. The attribute refuses such names when it is compiled.
    pub fn consumer_name(&self) -> Result<ConsumerName, ConsumerNameError> {
        ConsumerName::new(self.consumer)
    }

    /// The limits of the handler's jobs: what the attribute sets, else what `defaults` say.
    ///
    /// # Errors
    /// Settings that clash, all at once.
    pub fn policy(&self, defaults: Policy) -> Result<Policy, PolicyError> {
        let mut policy = defaults;
        policy.lease = self.lease.unwrap_or(policy.lease);
        policy.attempts = self.attempts.unwrap_or(policy.attempts);
        policy.max_run = self.max_run.unwrap_or(policy.max_run);
        if let Some((base, cap)) = self.backoff {
            policy = policy.backoff(base, cap);
        }
        policy.build()
    }

    /// Whether `violation` is one that the attribute declares. A name matches itself; where the engine tells columns
    /// instead of a name, `table.column` (or a list of them) matches too.
    pub fn declares(&self, violation: &UniqueViolation) -> bool {
        self.domain_unique.contains(&violation.constraint.as_str())
    }
}

/// What a message says besides its event: its headers.
pub trait Headers: Sync {
    /// The value of the *last* header of that name. The name is compared without regard to case for `idempotency-key`
    /// only.
    fn value(&self, name: &str) -> Option<&[u8]>;
}

/// No headers.
impl Headers for () {
    fn value(&self, _name: &str) -> Option<&[u8]> {
        None
    }
}

/// Pairs of name and value, in the order of the message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderList(pub Vec<(String, Vec<u8>)>);

impl Headers for HeaderList {
    fn value(&self, name: &str) -> Option<&[u8]> {
        let same =
            |other: &str| if name == "idempotency-key" { other.eq_ignore_ascii_case(name) } else { other == name };
        self.0.iter().rev().find(|(other, _)| same(other)).map(|(_, value)| value.as_slice())
    }
}

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

    /// Names everything the function takes besides its event, so that what is missing is found at start. Nothing, unless
    /// it takes something.
    fn require(requirements: &mut Requirements<'_>) {
        let _ = requirements;
    }

    /// Calls the function.
    fn call(call: Call<'_, Self::Event>) -> impl Future<Output = Result<(), HandlerFailure>> + Send;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_texts_are_bounded_and_storable() {
        let long = capped("é".repeat(2000));
        assert!(long.len() <= MAX_ERROR_BYTES && long.ends_with('…'));
        assert_eq!(capped("a\0b".into()), "a b");
    }

    #[test]
    fn downstream_keys_are_stable_over_releases() {
        let job = Job::detached(ConsumerName::new("payment").unwrap(), EventKey::from_parts(["P-1"]).unwrap());
        assert_eq!(job.downstream_key("charge"), "ba248d7d-4c96-5904-b751-4ad1bdd8cf8b");
    }

    #[test]
    fn the_last_header_counts_and_only_one_name_ignores_case() {
        let headers = HeaderList(vec![
            ("Idempotency-Key".to_owned(), b"1".to_vec()),
            ("request".to_owned(), b"2".to_vec()),
            ("request".to_owned(), b"3".to_vec()),
        ]);
        assert_eq!(headers.value("idempotency-key"), Some(&b"1"[..]));
        assert_eq!(headers.value("request"), Some(&b"3"[..]));
        assert_eq!(headers.value("Request"), None);
    }
}
