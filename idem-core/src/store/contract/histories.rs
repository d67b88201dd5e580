//! Random histories: what a store answers and keeps, compared with the pure state machine after every step.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestCaseError, TestRunner};

use super::*;

const KEYS: usize = 3;
const LONGEST: usize = 25;
/// Unless the environment names more, see [`CASES_VARIABLE`].
const CASES: u32 = 40;
/// How many histories each store is put through.
const CASES_VARIABLE: &str = "IDEM_TEST_HISTORIES";

/// One thing that happens. Numbers pick among what there is at that moment.
#[derive(Clone, Debug)]
enum Event {
    /// A batch asks for jobs, committed at once.
    Claim(Vec<Asked>),
    /// A batch asks for jobs in a transaction.
    ClaimInTransaction {
        asked: Vec<Asked>,
        commits: bool,
    },
    /// A reply was lost and the same claim is asked again.
    AskAgain {
        claim: usize,
    },
    /// Holders, present and former, write.
    Renew(Vec<usize>),
    Complete(Vec<usize>),
    Release(Vec<usize>),
    Fail {
        claim: usize,
        retry: Option<u64>,
    },
    /// A share of the lease passes, in tenths.
    Pass {
        tenths: u32,
    },
    /// A row is removed.
    Forget {
        key: usize,
    },
    /// A person intervenes.
    Operate {
        key: usize,
        action: OperatorAction,
    },
    /// What ended that many tenths of a lease ago is removed.
    Purge {
        tenths: u32,
    },
}

/// A request for the job of a key.
#[derive(Clone, Debug)]
struct Asked {
    key: usize,
    payload: Option<u32>,
}

fn event() -> impl Strategy<Value = Event> {
    let asked = || {
        let payload = prop_oneof![8 => Just(Some(0)), 1 => Just(Some(1)), 1 => Just(None)];
        prop::collection::vec((0..KEYS, payload).prop_map(|(key, payload)| Asked { key, payload }), 1..5)
    };
    let claims = || prop::collection::vec(any::<usize>(), 1..4);
    prop_oneof![
        6 => asked().prop_map(Event::Claim),
        3 => (asked(), any::<bool>()).prop_map(|(asked, commits)| Event::ClaimInTransaction { asked, commits }),
        1 => any::<usize>().prop_map(|claim| Event::AskAgain { claim }),
        2 => claims().prop_map(Event::Renew),
        3 => claims().prop_map(Event::Complete),
        2 => claims().prop_map(Event::Release),
        3 => (any::<usize>(), prop::option::weighted(0.8, 0..5000u64))
            .prop_map(|(claim, retry)| Event::Fail { claim, retry }),
        4 => (1..15u32).prop_map(|tenths| Event::Pass { tenths }),
        1 => (0..KEYS).prop_map(|key| Event::Forget { key }),
        2 => (0..KEYS, action()).prop_map(|(key, action)| Event::Operate { key, action }),
        1 => (1..30u32).prop_map(|tenths| Event::Purge { tenths }),
    ]
}

fn action() -> impl Strategy<Value = OperatorAction> {
    use OperatorAction::{Complete, Fail, Release, Retry};
    prop_oneof![Just(Release), Just(Retry), Just(Complete), Just(Fail)]
}

/// Replays random histories against the store, each under a consumer name of its own. A history that fails is shrunk.
///
/// `IDEM_TEST_HISTORIES` is how many, `PROPTEST_RNG_SEED` what they are drawn from.
pub fn random_histories(runtime: &Handle, subject: &impl Subject) {
    let cases = match std::env::var(CASES_VARIABLE) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{CASES_VARIABLE}={text} is no number")),
        Err(_) => CASES,
    };
    let persistence = FileFailurePersistence::WithSource("regressions");
    let config = Config { cases, failure_persistence: Some(Box::new(persistence)), ..Config::default() };
    let config = Config { source_file: Some(file!()), max_shrink_iters: 2000, ..config };
    let histories = prop::collection::vec(event(), 1..LONGEST);
    let replay =
        |history: Vec<Event>| runtime.block_on(History::new(subject).replay(&history)).map_err(TestCaseError::fail);
    if let Err(error) = TestRunner::new(config).run(&histories, replay) {
        panic!("{error}");
    }
    println!("histories: {}: {cases} histories", subject.store().engine());
}

/// What must be true now, according to the machine.
struct History<'a, S> {
    subject: &'a S,
    store: Arc<dyn Store>,
    terms: Terms,
    model: BTreeMap<EventKey, State>,
    /// Every claim that was ever made, with what its holder believes.
    claims: Vec<(ClaimRequest, Run)>,
    tokens: AtomicU64,
}

/// A sentence with what differs.
type Checked = Result<(), String>;

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> Checked {
    if found == expected { Ok(()) } else { Err(format!("{what}: found {found:?}, expected {expected:?}")) }
}

impl<'a, S: Subject> History<'a, S> {
    fn new(subject: &'a S) -> Self {
        let job = Job::new(subject, "unused");
        let tokens = AtomicU64::new(1);
        Self { subject, store: subject.store(), terms: job.terms, model: BTreeMap::new(), claims: Vec::new(), tokens }
    }

    async fn replay(mut self, history: &[Event]) -> Checked {
        for (number, event) in history.iter().enumerate() {
            let checked = self.one(event).await;
            checked.map_err(|difference| format!("event {number}, {event:?}: {difference}"))?;
            self.compare().await.map_err(|difference| format!("after event {number}, {event:?}: {difference}"))?;
        }
        Ok(())
    }

    async fn one(&mut self, event: &Event) -> Checked {
        match event {
            Event::Claim(asked) => {
                let requests = self.requests(asked);
                let answers = self.store.claim(&self.terms, &requests).await.map_err(text)?;
                let mut model = std::mem::take(&mut self.model);
                let checked = self.answered(&mut model, &requests, answers);
                self.model = model;
                checked
            }
            Event::ClaimInTransaction { asked, commits } => {
                let requests = self.requests(asked);
                let mut tx = self.store.begin().await.map_err(text)?;
                let answers = tx.store().claim(&self.terms, &requests).await.map_err(text)?;
                let mut model = self.model.clone();
                self.answered(&mut model, &requests, answers)?;
                if *commits { tx.commit().await } else { tx.rollback().await }.map_err(text)?;
                if *commits {
                    // What ran in the transaction is complete with it.
                    for request in &requests {
                        if let Some(State::Processing { record, token, .. }) = model.get(&request.key).copied()
                            && requests.iter().any(|request| request.token == token)
                        {
                            model.insert(request.key.clone(), State::Completed { record, token: Some(token) });
                        }
                    }
                    self.model = model;
                }
                Ok(())
            }
            Event::AskAgain { claim } => {
                let Some((request, _)) = self.picked(*claim).cloned() else { return Ok(()) };
                let answers = self.store.claim(&self.terms, std::slice::from_ref(&request)).await.map_err(text)?;
                let mut model = std::mem::take(&mut self.model);
                let checked = self.answered(&mut model, &[request], answers);
                self.model = model;
                checked
            }
            Event::Renew(claims) => {
                let held = self.held(claims);
                let renewals = self.store.renew(&self.terms, &held).await.map_err(text)?;
                // The answer has no clock, so the new instant is taken from the row and must be about right.
                let now = self.now().await?;
                let rows = self.rows().await?;
                for ((key, token), renewal) in held.into_iter().zip(renewals) {
                    let fenced = match renewal {
                        Renewal::Renewed => Fenced::Applied,
                        Renewal::LeaseLost => Fenced::LeaseLost,
                        Renewal::Unconfirmed => return Err(format!("{key} is locked by nobody")),
                    };
                    let input = Input::Renew { token, now, lease: self.terms.lease };
                    self.step(&key, input, fenced)?;
                    let (Some(State::Processing { locked_until: expected, .. }), Fenced::Applied) =
                        (self.model.get_mut(&key), fenced)
                    else {
                        continue;
                    };
                    let Some(State::Processing { locked_until, .. }) = rows.get(&key) else {
                        return Err(format!("{key} was renewed, but is {:?}", rows.get(&key)));
                    };
                    let apart = locked_until.since(*expected).max(expected.since(*locked_until));
                    if apart > Duration::from_secs(60) {
                        return Err(format!("{key} is renewed until {locked_until:?}, not about {expected:?}"));
                    }
                    *expected = *locked_until;
                }
                Ok(())
            }
            Event::Complete(claims) => {
                let done: Vec<_> = claims.iter().filter_map(|claim| self.picked(*claim)).cloned().collect();
                let completions: Vec<_> = done.iter().map(|(request, run)| completion(request, run)).collect();
                let fenced = self.store.complete(&self.terms, &completions).await.map_err(text)?;
                for ((request, run), fenced) in done.into_iter().zip(fenced) {
                    // Where the row is gone, the store writes it anew.
                    self.model.entry(request.key.clone()).or_insert_with(|| {
                        let record = Record { payload: request.payload, attempts: run.attempt, fence: run.fence };
                        State::Processing { record, token: run.token, locked_until: Timestamp::EPOCH }
                    });
                    self.step(&request.key, Input::Complete { token: run.token }, fenced)?;
                }
                Ok(())
            }
            Event::Release(claims) => {
                let held = self.held(claims);
                let fenced = self.store.release(&self.terms, &held).await.map_err(text)?;
                for ((key, token), fenced) in held.into_iter().zip(fenced) {
                    self.step(&key, Input::Release { token }, fenced)?;
                }
                Ok(())
            }
            Event::Fail { claim, retry } => {
                let Some((request, run)) = self.picked(*claim).cloned() else { return Ok(()) };
                let retry = retry.map_or(Retry::Never, |seconds| Retry::After(Duration::from_secs(seconds)));
                let failed =
                    FailedTry { key: request.key.clone(), token: run.token, retry, error: "it failed".to_owned() };
                let written = self.store.fail(&self.terms, &[failed]).await.map_err(text)?[0];
                let cause = retry.cause(written.now);
                let input = Input::Fail(TryFailed { token: run.token, cause, max_attempts: self.terms.max_attempts });
                self.step(&request.key, input, written.fenced)?;
                same("the state", written.state, self.state(&request.key))
            }
            Event::Pass { tenths } => {
                let time = self.terms.lease / 10 * *tenths;
                self.subject.pass(time).await;
                // Either the clock was set forward or the rows were set back; the rows tell which.
                let rows = self.rows().await?;
                for (key, state) in &mut self.model {
                    let (expected, found) =
                        (instant(state), rows.get(key).and_then(|state| instant(&mut state.clone()).copied()));
                    if let (Some(expected), Some(found)) = (expected, found) {
                        if found != *expected && found.plus(time) != *expected {
                            return Err(format!("time that passes moved {key} from {expected:?} to {found:?}"));
                        }
                        *expected = found;
                    }
                }
                Ok(())
            }
            Event::Forget { key } => {
                let key = super::key(&key.to_string());
                self.subject.forget(&self.terms.consumer, &key).await;
                self.model.remove(&key);
                Ok(())
            }
            Event::Operate { key, action } => {
                let key = super::key(&key.to_string());
                let before = self.state(&key);
                let operated = self.store.operate(&self.terms, &key, *action, "a reason").await.map_err(text)?;
                same("the state before", operated.before, before)?;
                let input = Input::Operator { action: *action, now: self.now().await? };
                let refused = match step(&before, input) {
                    Err(illegal) => Some(Refusal::Illegal(illegal)),
                    Ok(Transition { decision: Decision::InProgress { until }, .. }) => {
                        Some(Refusal::LeaseAlive { until })
                    }
                    Ok(Transition { next, .. }) => {
                        same("the state after", operated.after, next)?;
                        self.model.insert(key.clone(), next);
                        None
                    }
                };
                same("the refusal", operated.refused, refused)
            }
            Event::Purge { tenths } => {
                let older_than = self.terms.lease / 10 * *tenths;
                let purge = Purge { consumer: Some(self.terms.consumer.clone()), older_than, most: 100 };
                let removed = self.store.purge(&purge).await.map_err(text)?;
                // When a row ended is not in its state; but only what has ended may go.
                let rows = self.rows().await?;
                let gone: Vec<_> = rows.into_iter().filter(|(_, state)| *state == State::Absent).collect();
                let mut count = 0;
                for (key, _) in gone {
                    if let Some(state) = self.model.remove(&key) {
                        count += 1;
                        let ended = match state {
                            State::Completed { .. } => true,
                            State::Failed { failure, .. } => !matches!(failure, Failure::Due(_)),
                            _ => false,
                        };
                        same(&format!("whether {key} has ended"), ended, true)?;
                    }
                }
                same("the rows removed", removed, count)
            }
        }
    }

    /// Requests as the batch has them, each with a token of its own.
    fn requests(&self, asked: &[Asked]) -> Vec<ClaimRequest> {
        let request = |asked: &Asked| {
            let number = self.tokens.fetch_add(1, Ordering::Relaxed);
            ClaimRequest {
                key: key(&asked.key.to_string()),
                token: token(number.into()),
                payload: asked.payload.map(payload),
                message_id: format!("message {number}").into(),
            }
        };
        asked.iter().map(request).collect()
    }

    /// Checks the answers one after the other, as the machine gives them.
    fn answered(
        &mut self,
        model: &mut BTreeMap<EventKey, State>,
        requests: &[ClaimRequest],
        answers: Vec<Answer>,
    ) -> Checked {
        same("answers", answers.len(), requests.len())?;
        for (request, answer) in requests.iter().zip(answers) {
            let before = model.get(&request.key).copied().unwrap_or(State::Absent);
            let Transition { next, decision } = step(
                &before,
                Input::Delivered(Delivered {
                    token: request.token,
                    payload: request.payload,
                    now: answer.now,
                    lease: self.terms.lease,
                    max_attempts: self.terms.max_attempts,
                }),
            )
            .map_err(|illegal| illegal.to_string())?;
            same("the decision", answer.decision, decision)?;
            same("the state", answer.state, next)?;
            if next != State::Absent {
                model.insert(request.key.clone(), next);
            }
            if let Decision::Run(run) = decision {
                self.claims.push((request.clone(), run));
            }
        }
        Ok(())
    }

    /// One write of a holder.
    fn step(&mut self, key: &EventKey, input: Input, fenced: Fenced) -> Checked {
        let Transition { next, decision } = step(&self.state(key), input).map_err(|illegal| illegal.to_string())?;
        let expected = if decision == Decision::Applied { Fenced::Applied } else { Fenced::LeaseLost };
        same(&format!("the answer for {key}"), fenced, expected)?;
        if next != State::Absent {
            self.model.insert(key.clone(), next);
        }
        Ok(())
    }

    /// The rows are what the machine says, also of jobs that nobody asked for.
    async fn compare(&self) -> Checked {
        for (key, found) in self.rows().await? {
            same(&format!("the row of {key}"), found, self.state(&key))?;
        }
        Ok(())
    }

    fn state(&self, key: &EventKey) -> State {
        self.model.get(key).copied().unwrap_or(State::Absent)
    }

    async fn rows(&self) -> Result<BTreeMap<EventKey, State>, String> {
        let keys: Vec<_> = (0..KEYS).map(|number| key(&number.to_string())).collect();
        let states = self.store.read(&self.terms.consumer, &keys).await.map_err(text)?;
        Ok(keys.into_iter().zip(states).collect())
    }

    /// The store's clock, asked for through a job that is nobody's.
    async fn now(&self) -> Result<Timestamp, String> {
        let nobody = FailedTry { key: key("nobody"), token: token(0), retry: Retry::Never, error: String::new() };
        Ok(self.store.fail(&self.terms, &[nobody]).await.map_err(text)?[0].now)
    }

    fn picked(&self, claim: usize) -> Option<&(ClaimRequest, Run)> {
        self.claims.get(claim.checked_rem(self.claims.len())?)
    }

    fn held(&self, claims: &[usize]) -> Vec<(EventKey, Token)> {
        claims
            .iter()
            .filter_map(|claim| self.picked(*claim).map(|(request, run)| (request.key.clone(), run.token)))
            .collect()
    }
}

/// The instant that a state waits for.
fn instant(state: &mut State) -> Option<&mut Timestamp> {
    match state {
        State::Processing { locked_until, .. } => Some(locked_until),
        State::Failed { failure: Failure::Due(at), .. } => Some(at),
        State::Absent | State::Received(_) | State::Completed { .. } | State::Failed { .. } => None,
    }
}

fn text(error: StoreError) -> String {
    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
    format!("{error}{cause}")
}
