//! The machine broken on purpose: each step differs from the real one in one decision. The model must show each.

use idem_core::Timestamp;
use idem_core::machine::{
    Decision, Delivered, Failure, IllegalStep, Input, Record, RunKind, State, StateKind, Transition, TryFailed, step,
};

use super::guard::{RULES, Rules, Step};

type Answer = Result<Transition, IllegalStep>;

/// What is broken, how, in which case it shows, and the promise that it breaks.
pub const STEPS: &[(&str, Step, &str, &str)] = &[
    ("completion does not compare tokens", anybody_completes, "lease_with_crash_and_stop", LAST_CLAIM_WRITES),
    ("failure does not compare tokens", anybody_fails, "lease_with_failures_and_stop", LAST_CLAIM_WRITES),
    ("release does not compare tokens", anybody_releases, "lease_with_lost_reply_and_stop", LAST_CLAIM_WRITES),
    ("renewal does not compare tokens", anybody_renews, "handlers_that_do_not_stop", LAST_CLAIM_WRITES),
    ("a living lease is taken over", takes_living, "lease_where_nothing_goes_wrong", ONE_HANDLER),
    ("a lease that is over is renewed", renews_what_is_over, "handlers_that_do_not_stop", OVER_STAYS_OVER),
    ("a completed job runs again", completed_runs_again, "lease_with_crash_and_lost_reply", COMPLETED_STAYS),
    ("a completed job runs again, atomic", completed_runs_again, "atomic_two_workers", EFFECT_ONCE),
    ("release leaves the lease", release_keeps_lease, "lease_with_lost_reply_and_stop", GIVEN_BACK_IS_FREE),
    ("release does not give the try back", release_costs_a_try, "lease_with_lost_reply_and_stop", ONE_TRY_EACH),
    ("a takeover is no try", takeover_is_free, "lease_with_crash_and_stop", ONE_TRY_EACH),
    ("a takeover is no try, careful", takeover_is_free, "careful_with_message_that_kills", BEGINS_BOUNDED),
    ("a takeover keeps the former token", takeover_keeps_token, "lease_with_crash_and_stop", LAST_CLAIM_WRITES),
    ("another payload counts as a duplicate", conflict_is_duplicate, "offsets", OTHER_PAYLOAD),
    ("another payload runs", conflict_runs, "offsets", OTHER_PAYLOAD),
    ("a claim asked again is another try", again_is_a_try, "lease_with_lost_reply_and_stop", ONE_TRY_EACH),
    ("a claim asked again keeps its old end", again_keeps_end, "lease_with_lost_reply_and_stop", ONE_HANDLER),
    ("a job set aside runs again", set_aside_runs, "lease_with_failures_and_crash", SET_ASIDE_STAYS),
    ("tries never run out", endless_tries, "careful_with_message_that_kills", BEGINS_BOUNDED),
    ("a try begins before it is due", never_waits, "lease_with_failures_and_crash", NOT_EARLY),
    ("a completion asked again is refused", completes_once, "lease_with_crash_and_lost_reply", COMPLETION_IS_TOLD),
    ("a person takes a living lease", person_meddles, "people", NO_MEDDLING),
    ("a person makes a completed job run", person_reruns, "people", COMPLETED_STAYS),
    ("who looks for leases ends living ones", sweep_meddles, "people", NO_MEDDLING),
    ("a failure is illegal once the job is completed", late_failure_is_illegal, "lease_with_failures_and_stop", LEGAL),
];

/// What surrounds the machine, broken likewise.
pub const SURROUNDINGS: &[(&str, Rules, &str, &str)] = &[
    (
        "a row is replaced whatever it is by now",
        Rules { compares: false, ..RULES },
        "lease_with_crash_and_stop",
        ONE_HANDLER,
    ),
    ("the highest decided offset is committed", Rules { holds_offsets: false, ..RULES }, "offsets", OFFSETS),
    (
        "an atomic handler's effect is outside its transaction",
        Rules { effect_in_tx: false, ..RULES },
        "atomic_two_workers",
        EFFECT_ONCE,
    ),
    (
        "the downstream key depends on the try",
        Rules { one_downstream_key: false, ..RULES },
        "lease_with_crash_and_stop",
        ONE_KEY,
    ),
    (
        "a handler does not stop at its deadline",
        Rules { stops: false, ..RULES },
        "lease_where_nothing_goes_wrong",
        EFFECT_ONCE,
    ),
    (
        "a claim whose reply was lost is asked again under another token",
        Rules { same_token: false, ..RULES },
        "lease_with_crash_and_lost_reply",
        OUTAGE_IS_FREE,
    ),
    (
        "a claim answered after its lease is used",
        Rules { minds_late_answers: false, ..RULES },
        "lease_with_crash_and_stop",
        ONE_HANDLER,
    ),
    (
        "a handler's second transaction completes what is completed",
        Rules { one_completion: false, ..RULES },
        "hybrid_with_crash_and_lost_reply",
        EFFECT_ONCE,
    ),
];

const LAST_CLAIM_WRITES: &str = "only the last claim can write";
const ONE_HANDLER: &str = "at most one handler runs";
const OVER_STAYS_OVER: &str = "a lease that is over stays over";
const COMPLETED_STAYS: &str = "a completed job never runs again";
const EFFECT_ONCE: &str = "the effect happens at most once";
const ONE_KEY: &str = "the callee sees one downstream key";
const GIVEN_BACK_IS_FREE: &str = "who has given a job back does not hold it";
const ONE_TRY_EACH: &str = "each claim counts as one try";
const OUTAGE_IS_FREE: &str = "an outage costs no try";
const BEGINS_BOUNDED: &str = "a job begins no more often than it may";
const COMPLETION_IS_TOLD: &str = "who has completed a job is not told otherwise";
const OTHER_PAYLOAD: &str = "another payload never counts as done";
const SET_ASIDE_STAYS: &str = "a job that was set aside stays so";
const NOT_EARLY: &str = "no try begins before it is due";
const NO_MEDDLING: &str = "nobody meddles with a living lease";
const OFFSETS: &str = "no offset passes an undecided job";
const LEGAL: &str = "what workers do is never illegal";

fn anybody_completes(state: &State, input: Input) -> Answer {
    match (state, input) {
        (State::Processing { token, .. }, Input::Complete { .. }) => step(state, Input::Complete { token: *token }),
        _ => step(state, input),
    }
}

fn anybody_fails(state: &State, input: Input) -> Answer {
    match (state, input) {
        (State::Processing { token, .. }, Input::Fail(failed)) => {
            step(state, Input::Fail(TryFailed { token: *token, ..failed }))
        }
        _ => step(state, input),
    }
}

fn anybody_releases(state: &State, input: Input) -> Answer {
    match (state, input) {
        (State::Processing { token, .. }, Input::Release { .. }) => step(state, Input::Release { token: *token }),
        _ => step(state, input),
    }
}

fn anybody_renews(state: &State, input: Input) -> Answer {
    match (state, input) {
        (State::Processing { token, .. }, Input::Renew { now, lease, .. }) => {
            step(state, Input::Renew { token: *token, now, lease })
        }
        _ => step(state, input),
    }
}

fn takes_living(state: &State, input: Input) -> Answer {
    match (*state, input) {
        (State::Processing { record, token, .. }, Input::Delivered(by)) if token != by.token => {
            step(&State::Processing { record, token, locked_until: Timestamp::EPOCH }, input)
        }
        _ => step(state, input),
    }
}

fn renews_what_is_over(state: &State, input: Input) -> Answer {
    match (*state, input) {
        (State::Processing { record, token, .. }, Input::Renew { now, lease, .. }) => {
            step(&State::Processing { record, token, locked_until: now.plus(lease) }, input)
        }
        _ => step(state, input),
    }
}

fn completed_runs_again(state: &State, input: Input) -> Answer {
    match (*state, input) {
        (State::Completed { record, .. }, Input::Delivered(_)) => step(&State::Received(record), input),
        _ => step(state, input),
    }
}

fn release_keeps_lease(state: &State, input: Input) -> Answer {
    let moved = step(state, input)?;
    Ok(match (*state, input, moved.next) {
        (State::Processing { token, locked_until, .. }, Input::Release { .. }, State::Received(record)) => {
            Transition { next: State::Processing { record, token, locked_until }, ..moved }
        }
        _ => moved,
    })
}

fn release_costs_a_try(state: &State, input: Input) -> Answer {
    let moved = step(state, input)?;
    Ok(match (*state, input, moved.next) {
        (State::Processing { record, .. }, Input::Release { .. }, State::Received(_)) => {
            Transition { next: State::Received(record), ..moved }
        }
        _ => moved,
    })
}

fn takeover_is_free(state: &State, input: Input) -> Answer {
    let moved = step(state, input)?;
    Ok(match (moved.decision, moved.next) {
        (Decision::Run(run), State::Processing { record, token, locked_until }) if run.kind == RunKind::Takeover => {
            let record = Record { attempts: record.attempts - 1, ..record };
            Transition { next: State::Processing { record, token, locked_until }, ..moved }
        }
        _ => moved,
    })
}

fn takeover_keeps_token(state: &State, input: Input) -> Answer {
    let moved = step(state, input)?;
    Ok(match (*state, moved.decision, moved.next) {
        (State::Processing { token, .. }, Decision::Run(run), State::Processing { record, locked_until, .. })
            if run.kind == RunKind::Takeover =>
        {
            Transition { next: State::Processing { record, token, locked_until }, ..moved }
        }
        _ => moved,
    })
}

fn conflict_is_duplicate(state: &State, input: Input) -> Answer {
    let moved = step(state, input)?;
    Ok(match moved.decision {
        Decision::Conflict => Transition { decision: Decision::Duplicate, ..moved },
        _ => moved,
    })
}

fn conflict_runs(state: &State, input: Input) -> Answer {
    match input {
        Input::Delivered(by) if *state != State::Absent => {
            step(state, Input::Delivered(Delivered { payload: None, ..by }))
        }
        _ => step(state, input),
    }
}

fn again_is_a_try(state: &State, input: Input) -> Answer {
    let moved = step(state, input)?;
    Ok(match (*state, input, moved.next) {
        (
            State::Processing { token: holder, .. },
            Input::Delivered(by),
            State::Processing { record, token, locked_until },
        ) if holder == by.token => {
            let record = Record { attempts: record.attempts + 1, ..record };
            Transition { next: State::Processing { record, token, locked_until }, ..moved }
        }
        _ => moved,
    })
}

fn again_keeps_end(state: &State, input: Input) -> Answer {
    let moved = step(state, input)?;
    Ok(match (*state, input) {
        (State::Processing { token, .. }, Input::Delivered(by)) if token == by.token => {
            Transition { next: *state, ..moved }
        }
        _ => moved,
    })
}

fn set_aside_runs(state: &State, input: Input) -> Answer {
    match (*state, input) {
        (State::Failed { record, token, failure: Failure::Terminal | Failure::Exhausted }, Input::Delivered(by)) => {
            let state = State::Failed { record, token, failure: Failure::Due(Timestamp::EPOCH) };
            step(&state, Input::Delivered(Delivered { max_attempts: by.max_attempts + 1, ..by }))
        }
        _ => step(state, input),
    }
}

fn endless_tries(state: &State, input: Input) -> Answer {
    match input {
        Input::Delivered(by) => step(state, Input::Delivered(Delivered { max_attempts: u32::MAX, ..by })),
        _ => step(state, input),
    }
}

fn never_waits(state: &State, input: Input) -> Answer {
    match (*state, input) {
        (State::Failed { record, token, failure: Failure::Due(_) }, Input::Delivered(_)) => {
            step(&State::Failed { record, token, failure: Failure::Due(Timestamp::EPOCH) }, input)
        }
        _ => step(state, input),
    }
}

fn completes_once(state: &State, input: Input) -> Answer {
    match (state, input) {
        (State::Completed { .. }, Input::Complete { .. }) => {
            Ok(Transition { next: *state, decision: Decision::LeaseLost })
        }
        _ => step(state, input),
    }
}

fn person_meddles(state: &State, input: Input) -> Answer {
    match (*state, input) {
        (State::Processing { record, token, .. }, Input::Operator { .. }) => {
            step(&State::Processing { record, token, locked_until: Timestamp::EPOCH }, input)
        }
        _ => step(state, input),
    }
}

fn person_reruns(state: &State, input: Input) -> Answer {
    match (*state, input) {
        (State::Completed { record, .. }, Input::Operator { .. }) => step(&State::Received(record), input),
        _ => step(state, input),
    }
}

fn sweep_meddles(state: &State, input: Input) -> Answer {
    match (*state, input) {
        (State::Processing { record, token, .. }, Input::Expire { .. }) => {
            step(&State::Processing { record, token, locked_until: Timestamp::EPOCH }, input)
        }
        _ => step(state, input),
    }
}

fn late_failure_is_illegal(state: &State, input: Input) -> Answer {
    match (state.kind(), input) {
        (StateKind::Completed, Input::Fail(_)) => Err(IllegalStep { state: StateKind::Completed, input: "a failure" }),
        _ => step(state, input),
    }
}
