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
        (State::Received(record), Input::Delivered(by)) => {
            run_or_exhaust(record, None, by, again(&record, record.fence))
        }
        // The reply to this very claim was lost and it is asked again; its handler has not begun. The holder counts its lease
        // from this request on, so the row must too.
        (State::Processing { record, token, .. }, Input::Delivered(by)) if token == by.token => {
            let locked_until = by.now.plus(by.lease);
            Transition {
                next: State::Processing { record, token, locked_until },
                decision: Decision::Run(claimed(&record, again(&record, record.fence - 1), token, locked_until)),
            }
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

/// A job that was claimed before is no fresh one, even if that claim was given back and is not counted as a try: its
/// handler may have begun.
fn again(record: &Record, claims_before: i64) -> RunKind {
    if claims_before > 0 || record.attempts > 1 { RunKind::Retry } else { RunKind::Fresh }
}

/// A try whose claim was committed before it killed its process has been counted too, so a message that does so each time
/// ends here.
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

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::time::Duration;

    use uuid::Uuid;

    use super::*;
    use crate::fingerprint::Fingerprint;

    const MINE: Token = Token(Uuid::from_u128(1));
    const OTHER: Token = Token(Uuid::from_u128(2));
    const NOW: Timestamp = Timestamp::from_micros(1_000);
    const BEFORE: Timestamp = Timestamp::from_micros(999);
    const AFTER: Timestamp = Timestamp::from_micros(1_001);
    const MAX_ATTEMPTS: u32 = 3;

    fn payload(text: &str) -> Option<Fingerprint> {
        Some(Fingerprint::of(&text).unwrap())
    }

    fn record(attempts: u32) -> Record {
        Record { payload: payload("first"), attempts, fence: i64::from(attempts) }
    }

    fn states() -> Vec<(&'static str, State)> {
        let processing = |token, locked_until| State::Processing { record: record(1), token, locked_until };
        let failed = |failure| State::Failed { record: record(1), token: Some(MINE), failure };
        vec![
            ("absent", State::Absent),
            ("received", State::Received(record(0))),
            ("received, tries used up", State::Received(record(3))),
            ("received, given back", State::Received(Record { fence: 1, ..record(0) })),
            ("received, counted by hand", State::Received(Record { fence: 0, ..record(2) })),
            ("processing, mine, alive", processing(MINE, AFTER)),
            (
                "processing, mine, alive, given back before",
                State::Processing { record: Record { fence: 2, ..record(1) }, token: MINE, locked_until: AFTER },
            ),
            (
                "processing, mine, alive, last try",
                State::Processing { record: record(3), token: MINE, locked_until: AFTER },
            ),
            ("processing, mine, run out", processing(MINE, NOW)),
            ("processing, other's, alive", processing(OTHER, AFTER)),
            ("processing, other's, run out", processing(OTHER, NOW)),
            ("processing, run out, last try", State::Processing { record: record(3), token: OTHER, locked_until: NOW }),
            ("completed by me", State::Completed { record: record(1), token: Some(MINE) }),
            ("completed by other", State::Completed { record: record(1), token: Some(OTHER) }),
            ("completed by operator", State::Completed { record: record(1), token: None }),
            ("failed, due", failed(Failure::Due(NOW))),
            ("failed, not due", failed(Failure::Due(AFTER))),
            (
                "failed, due, tries used up",
                State::Failed { record: record(3), token: Some(MINE), failure: Failure::Due(BEFORE) },
            ),
            ("failed, terminal", failed(Failure::Terminal)),
            (
                "failed by other, terminal",
                State::Failed { record: record(1), token: Some(OTHER), failure: Failure::Terminal },
            ),
            ("failed by operator", State::Failed { record: record(1), token: None, failure: Failure::Terminal }),
            ("failed, exhausted", failed(Failure::Exhausted)),
        ]
    }

    fn inputs() -> Vec<(&'static str, Input)> {
        let lease = Duration::from_micros(10);
        let delivered = |token, said| {
            Input::Delivered(Delivered { token, payload: said, now: NOW, lease, max_attempts: MAX_ATTEMPTS })
        };
        let third = Token(Uuid::from_u128(3));
        let fail = |cause| Input::Fail(TryFailed { token: MINE, cause, max_attempts: MAX_ATTEMPTS });
        let operator = |action| Input::Operator { action, now: NOW };
        vec![
            ("delivered", delivered(third, payload("first"))),
            ("delivered again by my token", delivered(MINE, payload("first"))),
            ("delivered with another payload", delivered(third, payload("second"))),
            ("delivered without fingerprint", delivered(third, None)),
            ("renew", Input::Renew { token: MINE, now: NOW, lease }),
            ("complete", Input::Complete { token: MINE }),
            ("fail, transient", fail(FailureCause::Transient { retry_at: AFTER })),
            ("fail, terminal", fail(FailureCause::Terminal)),
            ("release", Input::Release { token: MINE }),
            ("expire", Input::Expire { now: NOW }),
            ("operator: release", operator(OperatorAction::Release)),
            ("operator: retry", operator(OperatorAction::Retry)),
            ("operator: complete", operator(OperatorAction::Complete)),
            ("operator: fail", operator(OperatorAction::Fail)),
        ]
    }

    fn shown(state: &State) -> String {
        let record = state.record().map_or_else(String::new, |record| format!(" try {}", record.attempts));
        match state {
            State::Absent => "absent".to_owned(),
            State::Received(_) => format!("received{record}"),
            State::Processing { token, .. } => format!("processing{record} by {}", token.0.as_u128()),
            State::Completed { token, .. } => {
                format!(
                    "completed{record} by {}",
                    token.map_or("operator".to_owned(), |token| token.0.as_u128().to_string())
                )
            }
            State::Failed { failure: Failure::Due(_), .. } => format!("failed, due{record}"),
            State::Failed { failure: Failure::Terminal, .. } => format!("failed, terminal{record}"),
            State::Failed { failure: Failure::Exhausted, .. } => format!("failed, exhausted{record}"),
        }
    }

    /// Every pair of states and inputs, compared with the table that people read. Rewritten with `UPDATE_EXPECT=1`: then
    /// read the difference line by line.
    #[test]
    fn every_pair_is_as_the_table_says() {
        let mut table = String::new();
        for (state_name, state) in states() {
            writeln!(table, "{state_name}").unwrap();
            for (input_name, input) in inputs() {
                let outcome = match step(&state, input) {
                    Err(_) => "illegal".to_owned(),
                    Ok(Transition { next, decision }) => {
                        let decision = match decision {
                            Decision::Run(run) => {
                                assert_eq!(next.token(), Some(run.token), "a run holds the row");
                                format!("Run ({:?}, try {})", run.kind, run.attempt)
                            }
                            other => format!("{other:?}").split(' ').next().unwrap().to_owned(),
                        };
                        let change = if next == state { "unchanged".to_owned() } else { shown(&next) };
                        format!("{decision:22} {change}")
                    }
                };
                writeln!(table, "    {input_name:32} {}", outcome.trim_end()).unwrap();
            }
        }
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/step.txt");
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            std::fs::write(&path, &table).unwrap();
        }
        let expected = std::fs::read_to_string(&path).unwrap();
        assert!(
            table == expected,
            "the table has changed; if that is meant, run with UPDATE_EXPECT=1 and read the difference\n{table}"
        );
    }

    #[test]
    fn what_is_illegal_is_named() {
        let names = |state: State| {
            inputs().into_iter().filter_map(move |(_, input)| Some(step(&state, input).err()?.to_string()))
        };
        let absent: Vec<_> = names(State::Absent).collect();
        assert_eq!(absent[0], "a Absent job cannot take an expiry");
        assert!(absent[1..].iter().all(|text| text == "a Absent job cannot take an operator's action"), "{absent:?}");
        assert_eq!(names(State::Received(record(0))).count(), 2);
    }

    #[test]
    fn a_takeover_has_a_new_token_and_the_former_holder_can_write_nothing() {
        let lapsed = State::Processing { record: record(1), token: MINE, locked_until: NOW };
        let by = Delivered {
            token: OTHER,
            payload: payload("first"),
            now: NOW,
            lease: Duration::from_secs(1),
            max_attempts: MAX_ATTEMPTS,
        };
        let taken = step(&lapsed, Input::Delivered(by)).unwrap().next;
        for input in [
            Input::Complete { token: MINE },
            Input::Renew { token: MINE, now: NOW, lease: by.lease },
            Input::Release { token: MINE },
            Input::Fail(TryFailed { token: MINE, cause: FailureCause::Terminal, max_attempts: MAX_ATTEMPTS }),
        ] {
            assert_eq!(
                step(&taken, input).unwrap(),
                Transition { next: taken, decision: Decision::LeaseLost },
                "{input:?}"
            );
        }
    }
}
