//! Random sequences of everything that can happen to one job, against `step` alone: several workers, some of them dead or
//! late, messages with other payloads, time, and people who intervene.

use std::collections::HashMap;
use std::time::Duration;

use idem_core::machine::{
    Decision, Delivered, Failure, FailureCause, IllegalStep, Input, OperatorAction, Run, State, StateKind, Token,
    Transition, TryFailed, step,
};
use idem_core::{Fingerprint, Timestamp};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use uuid::Uuid;

const LEASE: Duration = Duration::from_secs(10);
const MAX_ATTEMPTS: u32 = 3;

/// One thing that happens. Numbers pick among the claims that were made so far, living and dead.
#[derive(Clone, Copy, Debug)]
enum Event {
    Deliver { payload: Option<u32> },
    AskAgain { claim: usize },
    Renew { claim: usize },
    Complete { claim: usize },
    Fail { claim: usize, retry_in: Option<u64> },
    Release { claim: usize },
    Expire,
    Operate(OperatorAction),
    Pass { seconds: u64 },
}

fn event() -> impl Strategy<Value = Event> {
    let claim = any::<usize>;
    prop_oneof![
        8 => prop_oneof![6 => Just(Some(0)), 1 => Just(Some(1)), 1 => Just(None)].prop_map(|payload| Event::Deliver { payload }),
        1 => claim().prop_map(|claim| Event::AskAgain { claim }),
        3 => claim().prop_map(|claim| Event::Renew { claim }),
        3 => claim().prop_map(|claim| Event::Complete { claim }),
        4 => (claim(), prop::option::weighted(0.85, 0..20_u64)).prop_map(|(claim, retry_in)| Event::Fail { claim, retry_in }),
        2 => claim().prop_map(|claim| Event::Release { claim }),
        1 => Just(Event::Expire),
        1 => prop_oneof![
            Just(OperatorAction::Release),
            Just(OperatorAction::Retry),
            Just(OperatorAction::Complete),
            Just(OperatorAction::Fail),
        ]
        .prop_map(Event::Operate),
        6 => (0..15_u64).prop_map(|seconds| Event::Pass { seconds }),
    ]
}

/// What a worker knows of a job that it was given.
#[derive(Clone, Copy, Debug)]
struct Holder {
    run: Run,
    /// The end of the lease that was last confirmed to it.
    believes_until: Timestamp,
    /// It was told that the job is no longer its own, or has ended it itself.
    gone: bool,
}

#[derive(Debug)]
struct World {
    state: State,
    now: Timestamp,
    holders: Vec<Holder>,
    /// How often an effect was confirmed as completed, by token.
    completed_by: HashMap<Token, u32>,
    operator_completed: bool,
    greatest_fence: i64,
}

impl World {
    fn new() -> Self {
        Self {
            state: State::Absent,
            now: Timestamp::from_micros(1_000_000),
            holders: Vec::new(),
            completed_by: HashMap::new(),
            operator_completed: false,
            greatest_fence: 0,
        }
    }

    fn happens(&mut self, event: Event) -> Result<(), TestCaseError> {
        if let Event::Pass { seconds } = event {
            self.now = self.now.plus(Duration::from_secs(seconds));
            return Ok(());
        }
        let Some((input, by)) = self.input(event) else { return Ok(()) };
        let before = self.state;
        let moved = step(&before, input);
        prop_assert_eq!(moved, step(&before, input), "the same question has the same answer");
        match moved {
            Ok(Transition { next, decision }) => {
                self.check_row(before, next, input, decision)?;
                self.state = next;
                self.tell(by, before, input, decision)?;
                self.check_again(input, decision)
            }
            Err(IllegalStep { .. }) => {
                let unasked = matches!(input, Input::Expire { .. } | Input::Operator { .. });
                prop_assert!(unasked, "what workers do is never illegal: {:?} in {:?}", input, before);
                Ok(())
            }
        }
    }

    /// The event as an input, and which claim it comes from.
    fn input(&self, event: Event) -> Option<(Input, Option<usize>)> {
        let pick = |claim: usize| claim.checked_rem(self.holders.len());
        let token = |index: usize| self.holders[index].run.token;
        let delivered = |token, payload: Option<u32>| {
            let payload = payload.map(|payload| Fingerprint::of(&payload).expect("numbers have a form"));
            Input::Delivered(Delivered { token, payload, now: self.now, lease: LEASE, max_attempts: MAX_ATTEMPTS })
        };
        Some(match event {
            Event::Pass { .. } => return None,
            Event::Deliver { payload } => {
                let new = Token(Uuid::from_u128(self.holders.len() as u128 + 1));
                (delivered(new, payload), None)
            }
            Event::AskAgain { claim } => {
                let index = pick(claim)?;
                // Only a worker whose reply was lost asks again, and then its handler has not begun.
                (!self.holders[index].gone).then_some(())?;
                (delivered(token(index), None), Some(index))
            }
            Event::Renew { claim } => {
                let index = pick(claim)?;
                (Input::Renew { token: token(index), now: self.now, lease: LEASE }, Some(index))
            }
            Event::Complete { claim } => {
                let index = pick(claim)?;
                (Input::Complete { token: token(index) }, Some(index))
            }
            Event::Fail { claim, retry_in } => {
                let index = pick(claim)?;
                let cause = match retry_in {
                    Some(seconds) => FailureCause::Transient { retry_at: self.now.plus(Duration::from_secs(seconds)) },
                    None => FailureCause::Terminal,
                };
                (Input::Fail(TryFailed { token: token(index), cause, max_attempts: MAX_ATTEMPTS }), Some(index))
            }
            Event::Release { claim } => {
                let index = pick(claim)?;
                (Input::Release { token: token(index) }, Some(index))
            }
            Event::Expire => (Input::Expire { now: self.now }, None),
            Event::Operate(action) => (Input::Operator { action, now: self.now }, None),
        })
    }

    /// What must be true of the row whatever happens.
    fn check_row(&self, before: State, next: State, input: Input, decision: Decision) -> Result<(), TestCaseError> {
        if before.kind() == StateKind::Completed {
            prop_assert_eq!(next, before, "a completed job stays as it is");
            prop_assert!(!matches!(decision, Decision::Run(_)), "a completed job never runs again");
        }
        let writes = matches!(decision, Decision::Run(_) | Decision::Applied | Decision::Exhausted);
        prop_assert!(writes || next == before, "{:?} changed the row", decision);

        let (Some(old), Some(new)) = (before.record(), next.record()) else {
            prop_assert!(before == State::Absent, "a row does not vanish");
            return Ok(());
        };
        prop_assert!(new.fence >= old.fence);
        let is_new_claim = matches!(decision, Decision::Run(run) if before.token() != Some(run.token));
        prop_assert_eq!(new.fence > old.fence, is_new_claim, "the fence counts the claims");
        prop_assert!(old.payload.is_none() || new.payload == old.payload, "what the first message said stays");
        match input {
            Input::Release { .. } if decision == Decision::Applied => {
                prop_assert_eq!(new.attempts, old.attempts - 1, "a try given back is no try");
            }
            Input::Operator { action: OperatorAction::Retry, .. } if decision == Decision::Applied => {
                prop_assert_eq!(new.attempts, 0);
            }
            _ => prop_assert_eq!(
                new.attempts,
                old.attempts + u32::from(is_new_claim),
                "nothing else changes the attempts"
            ),
        }
        prop_assert!(new.attempts <= MAX_ATTEMPTS);
        Ok(())
    }

    /// Tells the worker its answer, and checks it against what workers know.
    fn tell(
        &mut self,
        by: Option<usize>,
        before: State,
        input: Input,
        decision: Decision,
    ) -> Result<(), TestCaseError> {
        match (input, decision) {
            (Input::Delivered(_), Decision::Run(run)) => match by {
                Some(index) => {
                    prop_assert_eq!(run.token, self.holders[index].run.token);
                    self.holders[index].believes_until = run.locked_until;
                }
                None => self.begins(before, run)?,
            },
            (Input::Renew { .. }, Decision::Applied) => {
                let index = by.expect("workers renew");
                prop_assert!(!self.holders[index].gone, "who was told to go is not let in again");
                self.holders[index].believes_until = self.now.plus(LEASE);
            }
            (Input::Complete { token }, Decision::Applied) => {
                *self.completed_by.entry(token).or_default() += 1;
                self.holders[by.expect("workers complete")].gone = true;
            }
            (Input::Operator { action: OperatorAction::Complete, .. }, Decision::Applied) => {
                self.operator_completed = true;
            }
            (Input::Fail(_) | Input::Release { .. }, Decision::Applied) | (_, Decision::LeaseLost) => {
                if let Some(index) = by {
                    self.holders[index].gone = true;
                }
            }
            _ => {}
        }
        prop_assert!(self.completed_by.len() <= 1, "two claims were told that their effect counts");
        prop_assert!(self.completed_by.is_empty() || !self.operator_completed);
        Ok(())
    }

    /// Another worker gets the job: nobody may still believe to have it.
    fn begins(&mut self, before: State, run: Run) -> Result<(), TestCaseError> {
        let others = self.holders.iter().filter(|holder| !holder.gone && self.now < holder.believes_until);
        prop_assert_eq!(others.count(), 0, "two holders at once, after {:?}", before);
        prop_assert!(run.fence > self.greatest_fence);
        prop_assert!(self.holders.iter().all(|holder| holder.run.token != run.token));
        prop_assert!(self.completed_by.is_empty() && !self.operator_completed);
        prop_assert!((1..=MAX_ATTEMPTS).contains(&run.attempt));
        prop_assert_eq!(run.locked_until, self.now.plus(LEASE));
        self.greatest_fence = run.fence;
        self.holders.push(Holder { run, believes_until: run.locked_until, gone: false });
        Ok(())
    }

    /// A write whose reply was lost is asked again: the same answer, and nothing changes.
    fn check_again(&self, input: Input, decision: Decision) -> Result<(), TestCaseError> {
        match input {
            Input::Complete { .. } | Input::Fail(_) | Input::Renew { .. } => {
                let again = step(&self.state, input).expect("a holder's writes are never illegal");
                prop_assert_eq!(again, Transition { next: self.state, decision });
            }
            Input::Delivered(by) if matches!(decision, Decision::Run(_)) => {
                let again = step(&self.state, Input::Delivered(by)).expect("a delivery is never illegal");
                let Decision::Run(run) = again.decision else {
                    return Err(TestCaseError::fail(format!("a claim asked again is {again:?}")));
                };
                prop_assert_eq!(Some(run.token), self.state.token());
                prop_assert_eq!(Some(run.fence), self.state.record().map(|record| record.fence));
                prop_assert_eq!(again.next.record(), self.state.record());
            }
            _ => {}
        }
        Ok(())
    }
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 2000,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn whatever_happens_the_job_counts_once(events in prop::collection::vec(event(), 1..60)) {
        let mut world = World::new();
        for event in events {
            world.happens(event)?;
        }
    }

    /// Whatever has happened, the job comes to an end once workers deliver, complete and crash no more.
    #[test]
    fn a_job_ends_when_workers_behave(events in prop::collection::vec(event(), 0..40)) {
        let mut world = World::new();
        for event in events {
            world.happens(event)?;
        }
        for _ in 0..3 {
            world.happens(Event::Pass { seconds: 60 })?;
            world.happens(Event::Deliver { payload: Some(0) })?;
            if world.state.kind() == StateKind::Processing {
                let last = world.holders.len() - 1;
                world.happens(Event::Complete { claim: last })?;
            }
        }
        // The first payload that was told may be the other one; then this message conflicts each time.
        let other = world.state.record().and_then(|record| record.payload) != Fingerprint::of(&0).ok();
        let ended = match world.state {
            State::Completed { .. } => true,
            State::Failed { failure: Failure::Terminal | Failure::Exhausted, .. } => true,
            _ => other,
        };
        prop_assert!(ended, "{:?}", world.state);
    }
}

/// The sequences above reach what they are about; otherwise their checks would be empty.
#[test]
fn random_sequences_reach_every_decision() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let mut seen: HashMap<&str, u32> = HashMap::new();
    let mut runner = TestRunner::deterministic();
    let sequences = prop::collection::vec(event(), 1..60);
    for _ in 0..300 {
        let mut world = World::new();
        for event in sequences.new_tree(&mut runner).expect("a sequence").current() {
            let (before, holders) = (world.state, world.holders.len());
            if let Some((input, _)) = world.input(event) {
                let decision = step(&before, input).map(|moved| moved.decision);
                let name = match decision {
                    Err(_) => "illegal",
                    Ok(Decision::Run(run)) => match run.kind {
                        idem_core::machine::RunKind::Fresh => "fresh",
                        idem_core::machine::RunKind::Retry => "retry",
                        idem_core::machine::RunKind::Takeover => "takeover",
                    },
                    Ok(Decision::Duplicate) => "duplicate",
                    Ok(Decision::Conflict) => "conflict",
                    Ok(Decision::InProgress { .. }) => "in progress",
                    Ok(Decision::NotDue { .. }) => "not due",
                    Ok(Decision::Exhausted) => "exhausted",
                    Ok(Decision::Applied) => "applied",
                    Ok(Decision::LeaseLost) => "lease lost",
                };
                *seen.entry(name).or_default() += 1;
            }
            world.happens(event).expect("checked above");
            assert!(world.holders.len() >= holders);
        }
    }
    for name in [
        "illegal",
        "fresh",
        "retry",
        "takeover",
        "duplicate",
        "conflict",
        "in progress",
        "not due",
        "exhausted",
        "applied",
        "lease lost",
    ] {
        assert!(seen.get(name).is_some_and(|count| *count >= 20), "{name} was hardly reached: {seen:?}");
    }
}
