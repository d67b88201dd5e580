//! Everything that can happen to a job.

use std::time::Duration;

use super::state::Token;
use crate::fingerprint::Fingerprint;
use crate::timestamp::Timestamp;

/// One thing that happens to a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// A message asks for the job.
    Delivered(Delivered),
    /// The holder extends its lease.
    Renew {
        /// The holder's.
        token: Token,
        /// The database's clock.
        now: Timestamp,
        /// Counted from `now`.
        lease: Duration,
    },
    /// The holder has done the effect.
    Complete {
        /// The holder's.
        token: Token,
    },
    /// The holder's try has failed.
    Fail(TryFailed),
    /// The holder gives the job back without having begun its effect, or after its handler has returned at shutdown.
    Release {
        /// The holder's.
        token: Token,
    },
    /// Somebody looks for claims that have run out.
    Expire {
        /// The database's clock.
        now: Timestamp,
    },
    /// A person intervenes.
    Operator {
        /// What for.
        action: OperatorAction,
        /// The database's clock.
        now: Timestamp,
    },
}

/// A message asks for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Delivered {
    /// Names the claim this delivery makes if it gets the job. New for each claim; the same only when a claim is asked
    /// again because its reply was lost.
    pub token: Token,
    /// What the message says.
    pub payload: Option<Fingerprint>,
    /// The database's clock.
    pub now: Timestamp,
    /// How long the claim holds, counted from `now`.
    pub lease: Duration,
    /// Tries the job may have.
    pub max_attempts: u32,
}

/// A try of the holder has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TryFailed {
    /// The holder's.
    pub token: Token,
    /// Whether trying again is of use.
    pub cause: FailureCause,
    /// Tries the job may have.
    pub max_attempts: u32,
}

/// Whether trying again is of use (R1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureCause {
    /// Yes, not before this instant.
    Transient {
        /// The database's clock and the back-off.
        retry_at: Timestamp,
    },
    /// No.
    Terminal,
}

/// What a person may do to a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperatorAction {
    /// Let go of a claim that has run out, or of a failed job, so that the next delivery runs it at once.
    Release,
    /// Give a failed job all its attempts again.
    Retry,
    /// Say that the effect is done.
    Complete,
    /// Say that the job must not be tried any more.
    Fail,
}
