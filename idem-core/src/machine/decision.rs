//! What the caller must do next.

use super::state::{State, Token};
use crate::timestamp::Timestamp;

/// What a row becomes, and what the caller must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Transition {
    /// The row from now on; the same as before if nothing is to be written.
    pub next: State,
    /// For the caller.
    pub decision: Decision,
}

/// What the caller must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// Run the handler.
    Run(Run),
    /// Skip: the effect is done. Not an error.
    Duplicate,
    /// Set aside: the key was used for another payload.
    Conflict,
    /// Come back: another worker holds the job.
    InProgress {
        /// When its lease ends unless it is renewed.
        until: Timestamp,
    },
    /// Come back: the job waits for its next try.
    NotDue {
        /// When it is due.
        at: Timestamp,
    },
    /// Set aside: the job failed for good.
    Exhausted,
    /// The holder's or operator's write stands.
    Applied,
    /// The writer no longer holds the job: it must claim neither success nor failure.
    LeaseLost,
}

/// The caller holds the job and must run the handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// Why.
    pub kind: RunKind,
    /// The claim's, for every later write.
    pub token: Token,
    /// Which try this is, from 1.
    pub attempt: u32,
    /// Which claim of this job this is.
    pub fence: i64,
    /// When the lease ends unless it is renewed.
    pub locked_until: Timestamp,
}

/// Why a handler runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RunKind {
    /// The first try.
    Fresh,
    /// A try after a failed or released one.
    Retry,
    /// A try after another worker's lease ran out.
    Takeover,
}
