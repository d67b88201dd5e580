//! What a handler may take besides its event: the job, and shared values.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Classify, Disposition};
use crate::key::{ConsumerName, EventKey};
use crate::store::{Completion, Fenced, JobConnection, StoreError, Terms};

/// The job a handler runs for. Take it as `job: &Job`.
#[derive(Clone, Debug)]
pub struct Job {
    pub(crate) consumer: ConsumerName,
    pub(crate) key: EventKey,
    pub(crate) attempt: u32,
    pub(crate) fence: i64,
    pub(crate) message_id: Arc<str>,
    pub(crate) cancel: CancellationToken,
    /// The claim that a lease holds; nothing where there is none to complete.
    pub(crate) held: Option<Arc<HeldClaim>>,
}

/// What completes a job that is held under a lease.
#[derive(Debug)]
pub(crate) struct HeldClaim {
    pub terms: Terms,
    pub completion: Completion,
    /// The handler has completed the job inside a transaction of its own, which may or may not have been committed.
    pub completed_inside: AtomicBool,
}

impl HeldClaim {
    pub(crate) fn is_completed_inside(&self) -> bool {
        self.completed_inside.load(Ordering::Acquire)
    }
}

/// A job could not be completed inside the handler's own transaction. Return the error, so that the transaction is rolled
/// back: its effect must not stand without the completion.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompleteError {
    /// Another worker has taken the job over, an operator has ended it, or an earlier transaction has completed it.
    #[error("the job is no longer this worker's: its lease was lost, or it is completed already")]
    LeaseLost,
    /// The statement failed.
    #[error("the job could not be completed in the transaction")]
    Store(#[from] StoreError),
}

/// It may pass: what became of the job is looked up, and the try repeated if it is still to be done.
impl Classify for CompleteError {
    fn disposition(&self) -> Disposition {
        Disposition::Transient
    }
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

    /// Completes this job inside `connection`'s open transaction, so that the completion stands if and only if what the handler
    /// wrote there does: for a handler that holds a lease because part of its effect is elsewhere, and keeps another part in
    /// the guard's database. `connection` must be open to the database and schema that the store has its tables in.
    ///
    /// From then on the row is locked until the transaction ends, and nobody can take the job over. Commit soon, and return
    /// `Ok`: whether the transaction was committed is read back, and if it was not, the try counts as failed. What the handler
    /// does after the commit has no lease that could be renewed: it is dropped when the one it had would have ended, and the
    /// job stays completed. A value that the handler returns is not kept.
    ///
    /// Where no lease is held (an atomic handler, whose own transaction completes the job; a [detached](Self::detached) job)
    /// it does nothing.
    ///
    /// ```
    /// use idem_core::{CompleteError, Job};
    ///
    /// # #[cfg(feature = "postgres")]
    /// async fn settle(job: &Job, pool: &sqlx::PgPool, payment: i64) -> Result<(), Box<dyn std::error::Error>> {
    ///     // … the call to the gateway, with `job.downstream_key("charge")` …
    ///     let mut tx = pool.begin().await?;
    ///     sqlx::query("INSERT INTO ledger (payment) VALUES ($1)").bind(payment).execute(&mut *tx).await?;
    ///     job.complete_in(&mut *tx).await?;
    ///     tx.commit().await?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// [`CompleteError::LeaseLost`] if the lease was lost or the job is completed already, also by an earlier transaction of
    /// this very try whose commit seemed to fail; and the engine's error otherwise. The row is as before, and the transaction
    /// must be rolled back.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the transaction to be rolled back.
    ///
    /// # Crash safety
    /// A crash before the commit leaves `PROCESSING`, one after it `COMPLETED`, each together with the transaction's writes.
    pub async fn complete_in<C: JobConnection>(&self, connection: &mut C) -> Result<(), CompleteError> {
        let Some(held) = &self.held else { return Ok(()) };
        // Set first: if the reply is lost, the transaction may still be committed.
        held.completed_inside.store(true, Ordering::Release);
        match connection.complete(&held.terms, &held.completion).await? {
            Fenced::Applied => Ok(()),
            Fenced::LeaseLost => Err(CompleteError::LeaseLost),
        }
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
            held: None,
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

    pub(super) fn get<T: Send + Sync + 'static>(&self) -> Option<State<T>> {
        let value = Arc::clone(self.0.get(&TypeId::of::<T>())?);
        Some(State(value.downcast().ok()?))
    }
}

impl fmt::Debug for States {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "States({})", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downstream_keys_are_stable_over_releases() {
        let job = Job::detached(ConsumerName::new("payment").unwrap(), EventKey::from_parts(["P-1"]).unwrap());
        assert_eq!(job.downstream_key("charge"), "ba248d7d-4c96-5904-b751-4ad1bdd8cf8b");
    }
}
