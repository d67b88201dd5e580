//! A row's columns, as values that every engine's driver can bind and read.

use std::borrow::Cow;

use super::{ClaimRequest, StoreError, StoreErrorKind, Terms, rows};
use crate::Fingerprint;
use crate::machine::{Failure, Record, State, StateKind, Token};
use crate::timestamp::Timestamp;

/// The widths of the columns that hold other people's text, in characters.
const OWNER_CHARS: usize = 255;
const MESSAGE_ID_CHARS: usize = 512;

/// A [`State`] as the columns that say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateColumns {
    pub status: &'static str,
    pub locked_until: Option<Timestamp>,
    pub token: Option<Token>,
    pub fence: i64,
    pub attempts: i32,
    pub next_attempt_at: Option<Timestamp>,
    pub failure_kind: Option<&'static str>,
    pub payload: Option<Fingerprint>,
}

impl StateColumns {
    /// # Errors
    /// [`State::Absent`] has no columns.
    pub(crate) fn of(state: &State) -> Result<Self, StoreError> {
        let record = state.record().ok_or_else(rows::absent)?;
        let mut columns = Self {
            status: state.kind().as_str(),
            locked_until: None,
            token: state.token(),
            fence: record.fence,
            attempts: attempts(record.attempts),
            next_attempt_at: None,
            failure_kind: None,
            payload: record.payload,
        };
        match *state {
            State::Absent | State::Received(_) | State::Completed { .. } => {}
            State::Processing { locked_until, .. } => columns.locked_until = Some(locked_until),
            State::Failed { failure, .. } => {
                (columns.failure_kind, columns.next_attempt_at) = match failure {
                    Failure::Due(at) => (Some("transient"), Some(at)),
                    Failure::Terminal => (Some("terminal"), None),
                    Failure::Exhausted => (Some("exhausted"), None),
                }
            }
        }
        Ok(columns)
    }
}

/// The same columns as they were read.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub status: String,
    pub locked_until: Option<Timestamp>,
    pub token: Option<Token>,
    pub fence: i64,
    pub attempts: i32,
    pub next_attempt_at: Option<Timestamp>,
    pub failure_kind: Option<String>,
    pub payload: Option<String>,
}

impl Stored {
    /// # Errors
    /// [`StoreErrorKind::Broken`]: the row says something that no worker writes and the table's constraint forbids.
    pub(crate) fn state(&self) -> Result<State, StoreError> {
        let payload =
            self.payload.as_deref().map(str::parse).transpose().map_err(|error| {
                StoreError::with_cause(StoreErrorKind::Broken, "read the payload hash of a job", error)
            })?;
        let attempts = u32::try_from(self.attempts).map_err(|_| self.impossible())?;
        let record = Record { payload, attempts, fence: self.fence };
        let token = self.token;
        let failure = match (self.failure_kind.as_deref(), self.next_attempt_at) {
            (Some("transient"), Some(at)) => Some(Failure::Due(at)),
            (Some("terminal"), None) => Some(Failure::Terminal),
            (Some("exhausted"), None) => Some(Failure::Exhausted),
            _ => None,
        };
        let is = |kind: StateKind| self.status == kind.as_str();
        match (token, self.locked_until, failure) {
            (None, None, None) if is(StateKind::Received) => Ok(State::Received(record)),
            (Some(token), Some(locked_until), None) if is(StateKind::Processing) => {
                Ok(State::Processing { record, token, locked_until })
            }
            (token, None, None) if is(StateKind::Completed) => Ok(State::Completed { record, token }),
            (token, None, Some(failure)) if is(StateKind::Failed) => Ok(State::Failed { record, token, failure }),
            _ => Err(self.impossible()),
        }
    }

    fn impossible(&self) -> StoreError {
        StoreError::new(StoreErrorKind::Broken, format!("the row of a job is impossible: {self:?}"))
    }
}

/// The column is a signed integer; more attempts than it holds are as many as it holds.
pub(crate) fn attempts(attempts: u32) -> i32 {
    i32::try_from(attempts).unwrap_or(i32::MAX)
}

pub(crate) fn owner(terms: &Terms) -> String {
    cut(&terms.owner, OWNER_CHARS)
}

pub(crate) fn message_id(request: &ClaimRequest) -> String {
    cut(&request.message_id, MESSAGE_ID_CHARS)
}

/// PostgreSQL cannot store NUL, and an error text may repeat bytes of the message.
pub(crate) fn storable(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { Cow::Owned(text.replace('\0', "\u{fffd}")) } else { Cow::Borrowed(text) }
}

fn cut(text: &str, chars: usize) -> String {
    storable(text).chars().take(chars).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn every_state_round_trips_through_its_columns() {
        let token = Token(Uuid::from_u128(7));
        let at = Timestamp::from_micros(5);
        for payload in [None, Some(Fingerprint::of(&"x").unwrap())] {
            let record = Record { payload, attempts: 2, fence: 3 };
            let failed = |failure, token| State::Failed { record, token, failure };
            for state in [
                State::Received(record),
                State::Processing { record, token, locked_until: at },
                State::Completed { record, token: Some(token) },
                State::Completed { record, token: None },
                failed(Failure::Due(at), Some(token)),
                failed(Failure::Terminal, None),
                failed(Failure::Exhausted, Some(token)),
            ] {
                let columns = StateColumns::of(&state).unwrap();
                let stored = Stored {
                    status: columns.status.to_owned(),
                    locked_until: columns.locked_until,
                    token: columns.token,
                    fence: columns.fence,
                    attempts: columns.attempts,
                    next_attempt_at: columns.next_attempt_at,
                    failure_kind: columns.failure_kind.map(str::to_owned),
                    payload: columns.payload.map(|payload| payload.to_string()),
                };
                assert_eq!(stored.state().unwrap(), state);
            }
        }
        assert_eq!(StateColumns::of(&State::Absent).unwrap_err().kind(), StoreErrorKind::Broken);
    }

    #[test]
    fn a_row_that_contradicts_itself_is_refused() {
        let stored = Stored {
            status: "PROCESSING".into(),
            locked_until: None,
            token: None,
            fence: 1,
            attempts: 1,
            next_attempt_at: None,
            failure_kind: None,
            payload: None,
        };
        assert_eq!(stored.state().unwrap_err().kind(), StoreErrorKind::Broken);
        assert!(Stored { status: "DONE".into(), ..stored.clone() }.state().is_err());
        assert!(Stored { status: "RECEIVED".into(), attempts: -1, ..stored.clone() }.state().is_err());
        assert!(Stored { status: "RECEIVED".into(), ..stored }.state().is_ok());
    }

    #[test]
    fn texts_of_others_fit_their_columns() {
        assert_eq!(storable("a\0b"), "a\u{fffd}b");
        assert_eq!(cut(&"é".repeat(600), 512).chars().count(), 512);
    }
}
