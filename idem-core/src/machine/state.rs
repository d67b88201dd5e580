//! The states of one job and what each carries.

use std::fmt;

use uuid::Uuid;

use crate::fingerprint::Fingerprint;
use crate::timestamp::Timestamp;

/// Names one claim, and fences it: every write after the claim compares it with the row's. A holder whose token is no
/// longer there has lost the job, whatever it believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub Uuid);

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a row says of its job in every state but [`State::Absent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// What the first delivery said; nothing if it was not fingerprinted.
    pub payload: Option<Fingerprint>,
    /// Tries begun so far, counted when a try is claimed, so that a try which kills its process counts too.
    pub attempts: u32,
    /// Grows with each claim. For people and for ordering; the token is what fences.
    pub fence: i64,
}

/// The state of one job (S2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// No row.
    Absent,
    /// Known, not started: released before it ran, or let go by an operator.
    Received(Record),
    /// A worker holds the lease.
    Processing {
        /// What the row says.
        record: Record,
        /// The claim's.
        token: Token,
        /// From this instant on another worker may take over.
        locked_until: Timestamp,
    },
    /// The effect is done.
    Completed {
        /// What the row says.
        record: Record,
        /// The completing claim's; nothing if an operator completed the job.
        token: Option<Token>,
    },
    /// A try failed.
    Failed {
        /// What the row says.
        record: Record,
        /// The failed claim's; nothing if an operator failed the job.
        token: Option<Token>,
        /// Whether and when it may be tried again.
        failure: Failure,
    },
}

/// Whether a failed job may be tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// Yes, from this instant on.
    Due(Timestamp),
    /// No: the handler said that trying again is of no use.
    Terminal,
    /// No: the attempts are used up.
    Exhausted,
}

/// A [`State`] without what it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateKind {
    /// No row.
    Absent,
    /// `RECEIVED`
    Received,
    /// `PROCESSING`
    Processing,
    /// `COMPLETED`
    Completed,
    /// `FAILED`
    Failed,
}

impl State {
    /// Which state this is.
    pub fn kind(&self) -> StateKind {
        match self {
            State::Absent => StateKind::Absent,
            State::Received(_) => StateKind::Received,
            State::Processing { .. } => StateKind::Processing,
            State::Completed { .. } => StateKind::Completed,
            State::Failed { .. } => StateKind::Failed,
        }
    }

    /// What the row says; nothing without a row.
    pub fn record(&self) -> Option<&Record> {
        match self {
            State::Absent => None,
            State::Received(record)
            | State::Processing { record, .. }
            | State::Completed { record, .. }
            | State::Failed { record, .. } => Some(record),
        }
    }

    /// The token of the last claim, if the row still names one.
    pub fn token(&self) -> Option<Token> {
        match self {
            State::Absent | State::Received(_) => None,
            State::Processing { token, .. } => Some(*token),
            State::Completed { token, .. } | State::Failed { token, .. } => *token,
        }
    }
}

impl StateKind {
    /// As the status column has it; `NONE` without a row, as in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            StateKind::Absent => "NONE",
            StateKind::Received => "RECEIVED",
            StateKind::Processing => "PROCESSING",
            StateKind::Completed => "COMPLETED",
            StateKind::Failed => "FAILED",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stored rows, logs and dashboards have these names.
    #[test]
    fn names_stay_as_they_are() {
        use StateKind::{Absent, Completed, Failed, Processing, Received};
        let names = [Absent, Received, Processing, Completed, Failed].map(StateKind::as_str);
        assert_eq!(names, ["NONE", "RECEIVED", "PROCESSING", "COMPLETED", "FAILED"]);
        assert_eq!(Token(Uuid::from_u128(10)).to_string(), "00000000-0000-0000-0000-00000000000a");
    }
}
