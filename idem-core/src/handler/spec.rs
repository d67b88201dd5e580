//! The attribute, as data.

use std::time::Duration;

use super::UniqueViolation;
use crate::key::{ConsumerName, ConsumerNameError};
use crate::policy::{Policy, PolicyError};

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
    /// `on_conflict = …`
    pub on_conflict: OnConflict,
    /// `probe = …`: whether [`Handler::probe`](super::Handler::probe) is asked before a takeover or a retry.
    pub probe: bool,
    /// `lock = …`: whether [`Handler::lock`](super::Handler::lock) names a lock that is held during a run.
    pub lock: bool,
}

/// What becomes of a message whose key was used for another payload (S4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnConflict {
    /// It is set aside as a dead letter. A false conflict can be replayed from there; a message that was skipped is lost.
    #[default]
    DeadLetter,
    /// It is skipped, as a duplicate is.
    Skip,
    /// Nothing is decided and no further message is taken, until a person has looked.
    Stop,
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
            on_conflict: OnConflict::DeadLetter,
            probe: false,
            lock: false,
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
