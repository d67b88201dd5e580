//! From a delivered message to its decided outcome: claim, handler, record.
//!
//! What decides is [`machine::step`](crate::machine::step), behind the [`Store`]. This module orders the steps, and is where
//! a crash can fall between them; each such place has a name in [`CrashPoint`].

mod atomic;
mod crash;
mod direct;
mod duplicates;
mod lease;
mod outcome;
mod together;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rand::Rng;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::duplicates::Duplicates;
use crate::clock::{Clock, SystemClock};
use crate::delivery::{DynHandler, Payload, Typed};
use crate::handler::{Handler, HandlerFailure, Headers, HeldClaim, Job, Mode, Output, Requirements, Spec, States};
use crate::key::EventKey;
use crate::machine::{Decision, Failure, Run, State, backoff};
use crate::policy::Policy;
use crate::store::{Answer, Retry, Returned, Store, StoreError, Terms};

pub use crash::CrashPoint;
pub use direct::{Ran, RunError, RunGuarded};
pub use outcome::{AlreadyDone, DuplicateKind, Outcome, Undecided};

pub use crate::delivery::{Delivery, Rejection};

/// After which wait to come back for a lock that somebody else holds.
const BUSY_LOCK: Duration = Duration::from_millis(200);

/// A store and everything that handlers share: what guards jobs.
///
/// ```
/// use std::sync::Arc;
/// use idem_core::Guard;
/// use idem_core::store::MemoryStore;
///
/// let guard = Guard::new(Arc::new(MemoryStore::default())).state(String::from("shared by all handlers"));
/// # drop(guard);
/// ```
#[derive(Clone)]
pub struct Guard {
    store: Arc<dyn Store>,
    states: Arc<States>,
    owner: Arc<str>,
    clock: Arc<dyn Clock>,
    defaults: Policy,
    duplicates: Arc<Duplicates>,
}

/// A handler cannot work with this guard. Nothing was begun.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("handler `{handler}` cannot start: {}", .reasons.join("; "))]
pub struct SetupError {
    /// The function's name.
    pub handler: &'static str,
    /// One sentence each.
    pub reasons: Vec<String>,
}

impl Guard {
    /// Guards jobs with the rows of `store`.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            states: Arc::default(),
            owner: Arc::from(format!("pid-{}-{}", std::process::id(), short_id())),
            clock: Arc::new(SystemClock),
            defaults: Policy::default(),
            duplicates: Arc::default(),
        }
    }

    /// Shares `value` with handlers that take a `State<T>`.
    pub fn state<T: Send + Sync + 'static>(mut self, value: T) -> Self {
        Arc::make_mut(&mut self.states).insert(value);
        self
    }

    /// Shares all of `states` with handlers.
    pub fn states(mut self, states: States) -> Self {
        self.states = Arc::new(states);
        self
    }

    /// What rows show as their owner. For people; it decides nothing. Default: the process id and a random part.
    pub fn owner(mut self, owner: impl Into<Arc<str>>) -> Self {
        self.owner = owner.into();
        self
    }

    /// The limits of handlers whose attribute sets none.
    pub fn policy(mut self, defaults: Policy) -> Self {
        self.defaults = defaults;
        self
    }

    /// Another clock, for tests.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Writes the counts of duplicates that are not written yet, which otherwise happens every second. Before a process ends,
    /// lest the last second's be missing.
    ///
    /// # Errors
    /// As [`Store::count_duplicates`]. The counts are dropped: they are for people, and decide nothing.
    ///
    /// # Cancel safety
    /// The counts that were being written may be missing.
    pub async fn flush(&self) -> Result<(), StoreError> {
        self.duplicates.flush(&self.store).await
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Puts a handler behind this guard.
    ///
    /// # Errors
    /// Something the handler takes is missing, it takes another engine's connection, or its settings clash. All reasons
    /// at once.
    pub fn bind<H: Handler>(&self, handler: H) -> Result<Guarded, SetupError> {
        let spec = H::SPEC;
        let handler: Arc<dyn DynHandler> = Arc::new(Typed(handler));
        let mut requirements = Requirements::new(&self.states, self.store.engine());
        handler.require(&mut requirements);
        let mut reasons = requirements.missing();
        let policy = spec.policy(self.defaults).map_err(|error| reasons.extend(error.clashes));
        let consumer = spec.consumer_name().map_err(|error| reasons.push(error.to_string()));
        let (Ok(policy), Ok(consumer), true) = (policy, consumer, reasons.is_empty()) else {
            return Err(SetupError { handler: spec.name, reasons });
        };
        let terms =
            Terms { consumer, lease: policy.lease, max_attempts: policy.attempts, owner: Arc::clone(&self.owner) };
        Ok(Guarded(Arc::new(Inner {
            guard: self.clone(),
            handler,
            spec,
            policy,
            terms,
            suspicious: AtomicU32::new(0),
            together: together::Together::default(),
            careful: tokio::sync::Mutex::default(),
        })))
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("engine", &self.store.engine())
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}

/// A handler behind a guard. Cheap to clone.
#[derive(Clone)]
pub struct Guarded(Arc<Inner>);

struct Inner {
    guard: Guard,
    handler: Arc<dyn DynHandler>,
    spec: Spec,
    policy: Policy,
    terms: Terms,
    /// How many of the next batches set savepoints at once, because one before them had a failure.
    suspicious: AtomicU32,
    together: together::Together,
    /// Held by the one delivery that runs carefully, see [`Delivery::with_care`].
    careful: tokio::sync::Mutex<()>,
}

impl fmt::Debug for Guarded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guarded").field("spec", &self.0.spec).field("policy", &self.0.policy).finish_non_exhaustive()
    }
}

/// Receives each delivery back with its outcome, as soon as it is decided.
pub trait Report: Sync {
    /// `delivery` is decided.
    fn decided(&self, delivery: Delivery, outcome: Outcome);

    /// All deliveries have been asked for in the store: the next ones may be.
    fn claimed(&self) {}
}

impl<F: Fn(Delivery, Outcome) + Sync> Report for F {
    fn decided(&self, delivery: Delivery, outcome: Outcome) {
        self(delivery, outcome);
    }
}

impl Guarded {
    /// What the attribute says.
    pub fn spec(&self) -> &Spec {
        &self.0.spec
    }

    /// The limits in force.
    pub fn policy(&self) -> &Policy {
        &self.0.policy
    }

    /// Takes the key and the fingerprint from a message. Asks no store.
    ///
    /// # Errors
    /// The message cannot ask for a job (K4).
    pub fn prepare(
        &self,
        payload: Option<Payload>,
        headers: &dyn Headers,
        message_id: Arc<str>,
    ) -> Result<Delivery, Rejection> {
        self.0.handler.prepare(payload, headers, message_id)
    }

    /// Runs deliveries to their outcome. Each is reported once, as soon as it is decided; in atomic mode all together with
    /// the commit. Keys should differ: of two deliveries with one key the second is told that the first is in progress.
    ///
    /// `stop` ends it early: handlers are dropped, and what is not decided is reported as [`Undecided::Cancelled`].
    ///
    /// # Cancel safety
    /// Dropping the future drops the handlers. Nothing is then known of the deliveries: their rows are as before, or as
    /// after; deliver them again.
    ///
    /// # Crash safety
    /// Atomic: effect and COMPLETED are both there or both not. Lease: a crash between effect and completion leaves
    /// `PROCESSING`, and the job runs again when its lease has run out.
    pub async fn run(&self, deliveries: Vec<Delivery>, stop: &CancellationToken, report: &dyn Report) {
        match self.0.spec.mode {
            Mode::Atomic => atomic::run(&self.0, deliveries, stop, report).await,
            Mode::Lease => lease::run(&self.0, deliveries, stop, report).await,
        }
    }

    /// Runs one delivery.
    pub async fn run_one(&self, delivery: Delivery, stop: &CancellationToken) -> Outcome {
        let outcome = std::sync::Mutex::new(None);
        let report = |_: Delivery, decided: Outcome| {
            *outcome.lock().expect("nothing panics while it is held") = Some(decided);
        };
        self.run(vec![delivery], stop, &report).await;
        let decided = outcome.lock().expect("nothing panics while it is held").take();
        decided.unwrap_or(Outcome::Undecided(Undecided::Cancelled))
    }

    /// What the row keeps of what the handler returned. A value that cannot be read now counts as none: the outcome stands.
    async fn stored_result(&self, key: &EventKey) -> Option<Vec<u8>> {
        let inner = &self.0;
        match inner.store().result(&inner.terms.consumer, key).await {
            Ok(result) => result,
            Err(error) => {
                tracing::warn!(consumerName = %inner.terms.consumer, errorMessage = %error, "what a job returned could not be read");
                None
            }
        }
    }
}

impl Inner {
    fn store(&self) -> &dyn Store {
        &*self.guard.store
    }

    fn now(&self) -> Instant {
        self.guard.clock.monotonic()
    }

    fn job(&self, delivery: &Delivery, run: &Run, cancel: CancellationToken, held: Option<Arc<HeldClaim>>) -> Job {
        Job {
            consumer: self.terms.consumer.clone(),
            key: delivery.key().clone(),
            attempt: run.attempt,
            fence: run.fence,
            message_id: Arc::clone(delivery.message_id()),
            cancel,
            held,
        }
    }

    /// Whether and after which wait a failed try is repeated.
    fn retry(&self, failure: &HandlerFailure, attempt: u32) -> Retry {
        match failure.kind.disposition() {
            crate::Disposition::Terminal => Retry::Never,
            crate::Disposition::Transient => Retry::After(backoff(&self.policy.backoff, attempt, rand::rng().random())),
        }
    }

    fn expects(&self, failure: &HandlerFailure) -> bool {
        failure.violated.as_ref().is_some_and(|violation| self.spec.declares(violation))
    }

    /// What an answer other than [`Decision::Run`] means for its delivery.
    fn outcome(&self, delivery: &Delivery, answer: &Answer) -> Outcome {
        match answer.decision {
            // The reply to our own commit was lost: the row says that it went through.
            Decision::Duplicate if answer.state.token() == Some(delivery.token()) => {
                let attempt = answer.state.record().map_or(1, |record| record.attempts);
                Outcome::Completed { attempt, takeover: false, already_done: None, output: None }
            }
            Decision::Duplicate => {
                self.guard.duplicates.note(&self.guard.store, &self.terms.consumer, delivery.key());
                Outcome::Duplicate(duplicate_kind(delivery, answer))
            }
            Decision::Conflict => Outcome::Conflict,
            Decision::InProgress { until } => Outcome::InProgress { wait: until.since(answer.now) },
            Decision::NotDue { at } => Outcome::NotDue { wait: at.since(answer.now) },
            Decision::Exhausted => Outcome::Exhausted {
                attempts: answer.state.record().map_or(0, |record| record.attempts),
                error: answer.error.clone(),
            },
            // `Run` is handled before; the others answer writes, not claims.
            Decision::Run(_) | Decision::Applied | Decision::LeaseLost => Outcome::LeaseLost,
        }
    }
}

fn duplicate_kind(delivery: &Delivery, answer: &Answer) -> DuplicateKind {
    if delivery.is_replay() {
        DuplicateKind::Replay
    } else if answer.first_message_id.as_deref() == Some(&**delivery.message_id()) {
        DuplicateKind::Redelivery
    } else {
        DuplicateKind::Producer
    }
}

/// The wait that was drawn, if the row says that there is a next try.
fn retry_in(state: &State, retry: Retry) -> Option<Duration> {
    match (state, retry) {
        (State::Failed { failure: Failure::Due(_), .. }, Retry::After(wait)) => Some(wait),
        _ => None,
    }
}

/// What the row keeps of what a handler returned.
fn returned(output: &Output) -> Returned {
    Returned { value: output.stored().map(Arc::from), hash: output.hash() }
}

/// Runs a handler, or its probe, so that its panic is its failure and nobody else's.
async fn caught<T>(running: BoxFuture<'_, Result<T, HandlerFailure>>) -> Result<T, HandlerFailure> {
    match AssertUnwindSafe(running).catch_unwind().await {
        Ok(result) => result,
        Err(panic) => Err(HandlerFailure::from_panic(&*panic)),
    }
}

/// Waits a random part of `longest`, so that those who collided do not do so again.
async fn jitter(longest: Duration) {
    let share: f64 = rand::rng().random();
    tokio::time::sleep(longest.mul_f64(share)).await;
}

fn short_id() -> String {
    let mut id = Uuid::new_v4().simple().to_string();
    id.truncate(8);
    id
}
