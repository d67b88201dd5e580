//! How a delivery ended.

use std::sync::Arc;
use std::time::Duration;

use crate::handler::{HandlerFailure, Output};
use crate::store::StoreError;

/// How a delivery ended, as the database has it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// The handler ran and the row is COMPLETED.
    Completed {
        /// Which try it was.
        attempt: u32,
        /// Another worker's lease had run out.
        takeover: bool,
        /// How it became known that an earlier try had the effect; nothing if this one did.
        already_done: Option<AlreadyDone>,
        /// What the handler returned; nothing if only the row knows it, because an earlier try had the effect or the reply
        /// to this one's commit was lost.
        output: Option<Output>,
    },
    /// The row was COMPLETED already. Normal.
    Duplicate(DuplicateKind),
    /// The key was used for another payload (S4). Set it aside.
    Conflict,
    /// Another worker holds the job. Come back.
    InProgress {
        /// Until its lease ends, unless it is renewed.
        wait: Duration,
    },
    /// The job waits for its next try. Come back.
    NotDue {
        /// Until then.
        wait: Duration,
    },
    /// The try failed and is recorded. Come back after `retry_in`; if there is none, set it aside.
    Failed {
        /// Which try it was.
        attempt: u32,
        /// Until the next try; nothing if there is none.
        retry_in: Option<Duration>,
        /// The handler's error.
        failure: HandlerFailure,
    },
    /// The job had failed for good before. Set it aside.
    Exhausted {
        /// Tries it had.
        attempts: u32,
        /// Its last error.
        error: Option<String>,
    },
    /// The claim was taken over while the handler ran: neither done nor failed here. Come back.
    LeaseLost,
    /// Nothing is decided.
    Undecided(Undecided),
}

/// Why nothing is decided. None of it is the message's fault or costs it an attempt.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Undecided {
    /// The store does not answer. Wait until it does.
    Unavailable(Arc<StoreError>),
    /// Other transactions were in the way too often. Come back soon.
    Contention(Arc<StoreError>),
    /// The store refuses the guard's own statements: a person must look.
    Broken(Arc<StoreError>),
    /// The caller stopped it.
    Cancelled,
}

/// How it became known that an earlier try had the effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AlreadyDone {
    /// The domain's own UNIQUE constraint said so (T3).
    Domain,
    /// The handler's probe said so (T2).
    Probe,
}

/// Where a duplicate came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DuplicateKind {
    /// The very delivery that made the row came again.
    Redelivery,
    /// A person has sent the message again, see [`REPLAYED_BY`](crate::REPLAYED_BY).
    Replay,
    /// Another message asks for the same job.
    Producer,
}

impl Undecided {
    pub(crate) fn from_store(error: StoreError) -> Self {
        use crate::store::StoreErrorKind as Kind;
        let error = Arc::new(error);
        match error.kind() {
            Kind::Unavailable => Self::Unavailable(error),
            Kind::Contention => Self::Contention(error),
            Kind::Schema | Kind::Configuration | Kind::Broken => Self::Broken(error),
        }
    }
}
