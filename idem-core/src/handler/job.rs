//! What a handler may take besides its event: the job, and shared values.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::key::{ConsumerName, EventKey};

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
