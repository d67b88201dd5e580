//! The only transition table.

use super::decision::{Decision, Run, RunKind, Transition};
use super::input::{Delivered, FailureCause, Input, OperatorAction, TryFailed};
use super::lease;
use super::state::{Failure, Record, State, StateKind, Token};
use crate::timestamp::Timestamp;

/// The input makes no sense in this state: nothing is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a {state:?} job cannot take {input}")]
pub struct IllegalStep {
    /// The state it was in.
    pub state: StateKind,
    /// What came.
    pub input: &'static str,
}

/// Moves one job forward. Total: every pair is either a move or an [`IllegalStep`].
///
/// ```
/// use std::time::Duration;
/// use idem_core::Timestamp;
/// use idem_core::machine::{step, Decision, Delivered, Input, State, Token};
/// use uuid::Uuid;
///
/// let delivery = |token| Input::Delivered(Delivered {
///     token: Token(Uuid::from_u128(token)),
///     payload: None,
///     now: Timestamp::EPOCH,
///     lease: Duration::from_secs(30),
///     max_attempts: 8,
/// });
/// let claimed = step(&State::Absent, delivery(1))?;
/// let Decision::Run(run) = claimed.decision else { panic!("the first delivery runs") };
///
/// let second = step(&claimed.next, delivery(2))?;
/// assert_eq!(second.decision, Decision::InProgress { until: run.locked_until });
///
/// let completed = step(&claimed.next, Input::Complete { token: run.token })?;
/// assert_eq!(step(&completed.next, delivery(3))?.decision, Decision::Duplicate);
/// # Ok::<(), idem_core::machine::IllegalStep>(())
/// ```
///
/// # Errors
/// [`IllegalStep`] for the pairs of the last arm.
pub fn step(state: &State, input: Input) -> Result<Transition, IllegalStep> {
    let state = *state;
    Ok(match (state, input) {
        // ---- a message asks for the job
        (State::Absent, Input::Delivered(by)) => {
            run(Record { payload: by.payload, attempts: 0, fence: 0 }, RunKind::Fresh, by)
        }
        // First of all: a message that asks for something else under this key must neither run nor count as done.
        (
            State::Received(record)
            | State::Processing { record, .. }
            | State::Completed { record, .. }
            | State::Failed { record, .. },
            Input::Delivered(by),
        ) if conflicts(&record, &by) => keep(state, Decision::Conflict),
        (State::Received(record), Input::Delivered(by)) => run_or_exhaust(record, None, by, again(&record)),
        // The reply to this very claim was lost and it is asked again; its handler has not begun.
        (State::Processing { record, token, locked_until }, Input::Delivered(by)) if token == by.token => {
            keep(state, Decision::Run(claimed(&record, again(&record), token, locked_until)))
        }
        (State::Processing { record, token, locked_until }, Input::Delivered(by)) => {
            if lease::is_alive(locked_until, by.now) {
                keep(state, Decision::InProgress { until: locked_until })
            } else {
                run_or_exhaust(record, Some(token), by, RunKind::Takeover)
            }
        }
        (State::Completed { .. }, Input::Delivered(_)) => keep(state, Decision::Duplicate),
        (State::Failed { record, token, failure: Failure::Due(at) }, Input::Delivered(by)) => {
            if by.now < at {
                keep(state, Decision::NotDue { at })
            } else {
                run_or_exhaust(record, token, by, RunKind::Retry)
            }
        }
        (State::Failed { failure: Failure::Terminal | Failure::Exhausted, .. }, Input::Delivered(_)) => {
            keep(state, Decision::Exhausted)
        }

        // ---- the holder writes: only with the token of the row
        (State::Processing { record, token, locked_until }, Input::Renew { token: by, now, lease }) => {
            // A lease that has run out may be somebody else's in the next instant: its holder has to stop.
            if token == by && lease::is_alive(locked_until, now) {
                wrote(State::Processing { record, token, locked_until: now.plus(lease) })
            } else {
                keep(state, Decision::LeaseLost)
            }
        }
        (State::Processing { record, token, .. }, Input::Complete { token: by }) if token == by => {
            wrote(State::Completed { record, token: Some(token) })
        }
        (State::Processing { record, token, .. }, Input::Fail(failed)) if token == failed.token => {
            wrote(State::Failed { record, token: Some(token), failure: verdict(&record, failed) })
        }
        // Not run, so not a try: rolling a fleet must not use up attempts.
        (State::Processing { record, token, .. }, Input::Release { token: by }) if token == by => {
            wrote(State::Received(Record { attempts: record.attempts.saturating_sub(1), ..record }))
        }
        // The same write once more, because its reply was lost.
        (State::Completed { token: Some(token), .. }, Input::Complete { token: by }) if token == by => {
            keep(state, Decision::Applied)
        }
        (State::Failed { token: Some(token), .. }, Input::Fail(failed)) if token == failed.token => {
            keep(state, Decision::Applied)
        }
        // Anything else that a holder writes is too late.
        (
            State::Absent
            | State::Received(_)
            | State::Processing { .. }
            | State::Completed { .. }
            | State::Failed { .. },
            Input::Complete { .. } | Input::Fail(_) | Input::Release { .. },
        )
        | (State::Absent | State::Received(_) | State::Completed { .. } | State::Failed { .. }, Input::Renew { .. }) => {
            keep(state, Decision::LeaseLost)
        }

        // ---- leases that have run out
        (State::Processing { record, locked_until, .. }, Input::Expire { now }) => {
            if lease::is_alive(locked_until, now) {
                keep(state, Decision::InProgress { until: locked_until })
            } else {
                wrote(State::Received(record))
            }
        }

        // ---- a person intervenes: never against a living lease, never to run a completed job again
        (State::Processing { locked_until, .. }, Input::Operator { now, .. }) if lease::is_alive(locked_until, now) => {
            keep(state, Decision::InProgress { until: locked_until })
        }
        (
            State::Processing { record, .. } | State::Failed { record, .. },
            Input::Operator { action: OperatorAction::Release, .. },
        ) => wrote(State::Received(record)),
        (
            State::Received(record) | State::Processing { record, .. } | State::Failed { record, .. },
            Input::Operator { action: OperatorAction::Retry, .. },
        ) => wrote(State::Received(Record { attempts: 0, ..record })),
        (
            State::Received(record) | State::Processing { record, .. } | State::Failed { record, .. },
            Input::Operator { action: OperatorAction::Complete, .. },
        ) => wrote(State::Completed { record, token: None }),
        (
            State::Received(record) | State::Processing { record, .. } | State::Failed { record, .. },
            Input::Operator { action: OperatorAction::Fail, .. },
        ) => wrote(State::Failed { record, token: None, failure: Failure::Terminal }),

        // ---- illegal
        (State::Absent | State::Received(_) | State::Completed { .. } | State::Failed { .. }, Input::Expire { .. })
        | (State::Absent | State::Completed { .. }, Input::Operator { .. })
        | (State::Received(_), Input::Operator { action: OperatorAction::Release, .. }) => {
            return Err(IllegalStep { state: state.kind(), input: input.name() });
        }
    })
}

/// A fingerprint on one side only proves nothing.
fn conflicts(record: &Record, by: &Delivered) -> bool {
    matches!((record.payload, by.payload), (Some(first), Some(this)) if first != this)
}

fn again(record: &Record) -> RunKind {
    if record.attempts <= 1 && record.fence <= 1 { RunKind::Fresh } else { RunKind::Retry }
}

/// A try that killed its process has been counted too, so a message that does so each time ends here.
fn run_or_exhaust(record: Record, token: Option<Token>, by: Delivered, kind: RunKind) -> Transition {
    if record.attempts >= by.max_attempts {
        Transition { next: State::Failed { record, token, failure: Failure::Exhausted }, decision: Decision::Exhausted }
    } else {
        run(record, kind, by)
    }
}

fn run(record: Record, kind: RunKind, by: Delivered) -> Transition {
    let record = Record {
        payload: record.payload.or(by.payload),
        attempts: record.attempts.saturating_add(1),
        fence: record.fence.saturating_add(1),
    };
    let locked_until = by.now.plus(by.lease);
    Transition {
        next: State::Processing { record, token: by.token, locked_until },
        decision: Decision::Run(claimed(&record, kind, by.token, locked_until)),
    }
}

fn claimed(record: &Record, kind: RunKind, token: Token, locked_until: Timestamp) -> Run {
    Run { kind, token, attempt: record.attempts, fence: record.fence, locked_until }
}

fn verdict(record: &Record, failed: TryFailed) -> Failure {
    match failed.cause {
        FailureCause::Terminal => Failure::Terminal,
        FailureCause::Transient { .. } if record.attempts >= failed.max_attempts => Failure::Exhausted,
        FailureCause::Transient { retry_at } => Failure::Due(retry_at),
    }
}

fn keep(state: State, decision: Decision) -> Transition {
    Transition { next: state, decision }
}

fn wrote(next: State) -> Transition {
    Transition { next, decision: Decision::Applied }
}

impl Input {
    fn name(&self) -> &'static str {
        match self {
            Input::Delivered(_) => "a delivery",
            Input::Renew { .. } => "a renewal",
            Input::Complete { .. } => "a completion",
            Input::Fail(_) => "a failure",
            Input::Release { .. } => "a release",
            Input::Expire { .. } => "an expiry",
            Input::Operator { .. } => "an operator's action",
        }
    }
}
