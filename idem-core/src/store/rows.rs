//! What every store does with rows, whatever engine holds them: insert, read, ask [`step`], replace if unchanged.
//!
//! An engine implements [`Rows`] for one of its connections; the functions here are the same for all.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::time::Duration;

use super::{
    Answer, ClaimRequest, Completion, FailedTry, FailureWritten, Fenced, Operated, Refusal, Renewal, StoreError,
    StoreErrorKind, Terms,
};
use crate::key::{ConsumerName, EventKey};
use crate::machine::{
    Decision, Delivered, Input, OperatorAction, Record, Run, RunKind, State, Token, Transition, TryFailed, step,
};
use crate::timestamp::Timestamp;

/// How often a row that changes or vanishes between reading and writing is looked at again before giving up.
const ROUNDS: usize = 8;

/// After which wait to come back for a row that another transaction is busy with.
const BUSY_WAIT: Duration = Duration::from_millis(500);

/// As what a claim stores a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClaimAs {
    /// `PROCESSING` with a lease: the claim is committed before the handler runs.
    Processing,
    /// `COMPLETED`: the claim is committed together with the effect, and nobody can see it before.
    Completed,
}

/// A row as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub state: State,
    /// Which delivery made the row.
    pub message_id: Option<String>,
    /// The last error.
    pub error: Option<String>,
}

/// Rows as they were read, in the order asked for, and the database's clock at that moment.
pub(crate) struct Loaded {
    pub now: Timestamp,
    pub rows: Vec<Option<Snapshot>>,
}

/// A row that was inserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inserted {
    /// The database's clock from which the lease counts.
    pub now: Timestamp,
    /// How long the insert waited afterwards for another transaction that held the key.
    pub waited: Duration,
}

/// What [`Rows::replace`] does with a row that another transaction has locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locked {
    /// Waits for it, as long as the store's limits allow.
    Wait,
    /// Leaves it.
    Skip,
}

/// What an engine can do with guard rows on one connection. Nothing here decides.
///
/// All keys come sorted by their bytes and each once.
pub(crate) trait Rows: Send {
    /// Inserts the rows that are not there, with attempt 1 and fence 1; answers which. A row that another open transaction
    /// has inserted is waited for.
    fn insert(
        &mut self,
        terms: &Terms,
        requests: &[&ClaimRequest],
        claim_as: ClaimAs,
    ) -> impl Future<Output = Result<HashMap<EventKey, Inserted>, StoreError>> + Send;

    /// Reads rows in a statement of its own, so that it sees what was committed meanwhile.
    fn load(
        &mut self,
        consumer: &ConsumerName,
        keys: &[&EventKey],
    ) -> impl Future<Output = Result<Loaded, StoreError>> + Send;

    /// Writes the replacement if the row is still exactly what it replaces; answers whether it was.
    fn replace(
        &mut self,
        terms: &Terms,
        replacement: Replacement<'_>,
        locked: Locked,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Completes the rows that are `PROCESSING` under the completion's token, and inserts those that are gone; answers which.
    fn complete(
        &mut self,
        terms: &Terms,
        done: &[&Completion],
    ) -> impl Future<Output = Result<HashSet<EventKey>, StoreError>> + Send;

    /// Extends the leases of rows that are `PROCESSING` under the token, not run out and not locked; answers which.
    fn renew(
        &mut self,
        terms: &Terms,
        held: &[(&EventKey, Token)],
    ) -> impl Future<Output = Result<HashSet<EventKey>, StoreError>> + Send;

    /// Reads what a completed job returned.
    fn result(
        &mut self,
        consumer: &ConsumerName,
        key: &EventKey,
    ) -> impl Future<Output = Result<Option<Vec<u8>>, StoreError>> + Send;

    /// Adds to the counts of duplicates on rows that are there and not locked.
    fn count_duplicates(
        &mut self,
        consumer: &ConsumerName,
        counts: &[(&EventKey, u64)],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// One row's change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Replacement<'a> {
    pub key: &'a EventKey,
    /// What was read. Everything but [`State::Absent`].
    pub from: &'a State,
    /// What it becomes. Everything but [`State::Absent`].
    pub to: &'a State,
    /// The new last error; nothing leaves the one that is there.
    pub error: Option<&'a str>,
}

/// Asks for jobs, see [`Store::claim`](super::Store::claim).
pub(crate) async fn claim(
    rows: &mut impl Rows,
    terms: &Terms,
    requests: &[ClaimRequest],
    claim_as: ClaimAs,
) -> Result<Vec<Answer>, StoreError> {
    let key = |index: usize| &requests[index].key;
    let mut answers: Vec<Option<Answer>> = vec![None; requests.len()];
    let mut open: Vec<usize> = (0..requests.len()).collect();
    while !open.is_empty() {
        let Sorted { firsts, twins } = sorted(open, key);
        claim_each_once(rows, terms, requests, claim_as, firsts, &mut answers).await?;
        open = Vec::new();
        for (twin, first) in twins {
            let before = open.last().is_some_and(|&last| key(last) == key(twin));
            let first = answers[first].as_ref().filter(|_| !before).map(|answer| (&requests[first], answer));
            match first.map(|first| after(terms, &requests[twin], first)).transpose()?.flatten() {
                Some(answer) => answers[twin] = Some(answer),
                None => open.push(twin),
            }
        }
    }
    answers.into_iter().map(|answer| answer.ok_or_else(restless)).collect()
}

/// Answers the requests at `open`, which are sorted and for different keys.
async fn claim_each_once(
    rows: &mut impl Rows,
    terms: &Terms,
    requests: &[ClaimRequest],
    claim_as: ClaimAs,
    mut open: Vec<usize>,
    answers: &mut [Option<Answer>],
) -> Result<(), StoreError> {
    let mut seen = HashMap::new();
    for _ in 0..ROUNDS {
        let wanted: Vec<_> = open.iter().map(|&index| &requests[index]).collect();
        let inserted = rows.insert(terms, &wanted, claim_as).await?;
        open.retain(|&index| {
            let request = &requests[index];
            let Some(row) = inserted.get(&request.key) else { return true };
            // The lease was counted from before the wait, so part of it is gone: asked again, it counts anew.
            if claim_as == ClaimAs::Processing && row.waited > terms.lease / 10 {
                return true;
            }
            answers[index] = Some(fresh(terms, request, row.now));
            false
        });
        if !open.is_empty() {
            open = resolve(rows, terms, requests, claim_as, open, &mut seen, answers).await?;
        }
        if open.is_empty() {
            return Ok(());
        }
    }
    Err(restless())
}

/// Looks at the rows that were already there. Answers those that changed or vanished meanwhile, to be looked at again;
/// `seen` is what was read of such rows.
async fn resolve(
    rows: &mut impl Rows,
    terms: &Terms,
    requests: &[ClaimRequest],
    claim_as: ClaimAs,
    open: Vec<usize>,
    seen: &mut HashMap<usize, State>,
    answers: &mut [Option<Answer>],
) -> Result<Vec<usize>, StoreError> {
    let keys: Vec<_> = open.iter().map(|&index| &requests[index].key).collect();
    let Loaded { now, rows: loaded } = rows.load(&terms.consumer, &keys).await?;
    let mut restless = Vec::new();
    for (index, snapshot) in open.into_iter().zip(loaded) {
        let Some(Snapshot { state, message_id, error }) = snapshot else {
            restless.push(index);
            continue;
        };
        let request = &requests[index];
        let Transition { mut next, mut decision } = advance(&state, delivered(terms, request, now))?;
        let stored = as_stored(next, decision, claim_as);
        // Another transaction that holds the row is not waited for: the other rows of the batch would wait too.
        let replacement = Replacement { key: &request.key, from: &state, to: &stored, error: None };
        if stored != state && !rows.replace(terms, replacement, Locked::Skip).await? {
            if seen.insert(index, state) != Some(state) {
                restless.push(index);
                continue;
            }
            // Twice the same, and it cannot be replaced: it is locked.
            (next, decision) = (state, Decision::InProgress { until: now.plus(BUSY_WAIT) });
        }
        answers[index] = Some(Answer { decision, state: next, now, first_message_id: message_id, error });
    }
    Ok(restless)
}

/// Marks as completed. The common case is one statement; only rows that refused it are looked at.
pub(crate) async fn complete(
    rows: &mut impl Rows,
    terms: &Terms,
    done: &[Completion],
) -> Result<Vec<Fenced>, StoreError> {
    let Sorted { firsts, .. } = sorted((0..done.len()).collect(), |index| &done[index].request.key);
    let wanted: Vec<_> = firsts.iter().map(|&index| &done[index]).collect();
    let applied = rows.complete(terms, &wanted).await?;
    let writes = done.iter().map(|done| HolderWrite::Complete(&done.request.key, done.request.token)).collect();
    fenced(settle(rows, terms, writes, &firsts, &applied).await?)
}

/// Marks one job as completed inside a transaction of its handler's. What is completed already is refused, also if this very
/// claim did it: another transaction of the handler's has committed, perhaps without its hearing of it, and what it wrote
/// must not be written twice.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) async fn complete_once(
    rows: &mut impl Rows,
    terms: &Terms,
    done: &Completion,
) -> Result<Fenced, StoreError> {
    let applied = rows.complete(terms, &[done]).await?;
    Ok(if applied.contains(&done.request.key) { Fenced::Applied } else { Fenced::LeaseLost })
}

/// Extends leases.
pub(crate) async fn renew(
    rows: &mut impl Rows,
    terms: &Terms,
    held: &[(EventKey, Token)],
) -> Result<Vec<Renewal>, StoreError> {
    let Sorted { firsts, .. } = sorted((0..held.len()).collect(), |index| &held[index].0);
    let wanted: Vec<_> = firsts.iter().map(|&index| (&held[index].0, held[index].1)).collect();
    let renewed = rows.renew(terms, &wanted).await?;
    let writes = held.iter().map(|(key, token)| HolderWrite::Renew(key, *token)).collect();
    settle(rows, terms, writes, &firsts, &renewed).await
}

/// Gives back.
pub(crate) async fn release(
    rows: &mut impl Rows,
    terms: &Terms,
    held: &[(EventKey, Token)],
) -> Result<Vec<Fenced>, StoreError> {
    let writes = held.iter().map(|(key, token)| HolderWrite::Release(key, *token)).collect();
    fenced(settle(rows, terms, writes, &[], &HashSet::new()).await?)
}

/// Does what a person asks for, unless the machine refuses.
pub(crate) async fn operate(
    rows: &mut impl Rows,
    terms: &Terms,
    key: &EventKey,
    action: OperatorAction,
    reason: &str,
) -> Result<Operated, StoreError> {
    let error = (action == OperatorAction::Fail).then_some(reason);
    for _ in 0..ROUNDS {
        let Loaded { now, rows: loaded } = rows.load(&terms.consumer, &[key]).await?;
        let before = loaded.into_iter().flatten().next().map_or(State::Absent, |snapshot| snapshot.state);
        let refused = |refusal| Operated { before, after: before, refused: Some(refusal) };
        let Transition { next, decision } = match step(&before, Input::Operator { action, now }) {
            Ok(transition) => transition,
            Err(illegal) => return Ok(refused(illegal.into())),
        };
        if let Decision::InProgress { until } = decision {
            return Ok(refused(Refusal::LeaseAlive { until }));
        }
        let replacement = Replacement { key, from: &before, to: &next, error };
        if next == before || rows.replace(terms, replacement, Locked::Wait).await? {
            return Ok(Operated { before, after: next, refused: None });
        }
    }
    Err(restless())
}

/// Marks tries as failed.
pub(crate) async fn fail(
    rows: &mut impl Rows,
    terms: &Terms,
    failed: &[FailedTry],
) -> Result<Vec<FailureWritten>, StoreError> {
    let writes: Vec<_> = failed.iter().map(HolderWrite::Fail).collect();
    let mut written = vec![None; failed.len()];
    write_each(rows, terms, &writes, (0..failed.len()).collect(), &mut written).await?;
    written.into_iter().map(|written| written.ok_or_else(restless)).collect()
}

/// Asks the machine for every write that is not already in. Those at `tried` are in if their key is among `applied`; a
/// second write for the same key is always looked at, since it may come from another holder.
async fn settle(
    rows: &mut impl Rows,
    terms: &Terms,
    writes: Vec<HolderWrite<'_>>,
    tried: &[usize],
    applied: &HashSet<EventKey>,
) -> Result<Vec<Renewal>, StoreError> {
    let done: HashSet<usize> = tried.iter().copied().filter(|&index| applied.contains(writes[index].key())).collect();
    let open = (0..writes.len()).filter(|index| !done.contains(index)).collect();
    let mut written = vec![None; writes.len()];
    write_each(rows, terms, &writes, open, &mut written).await?;
    Ok((0..)
        .zip(written)
        .map(|(index, written)| match written {
            Some(FailureWritten { fenced: Fenced::Applied, .. }) => Renewal::Renewed,
            Some(FailureWritten { fenced: Fenced::LeaseLost, .. }) => Renewal::LeaseLost,
            None if done.contains(&index) => Renewal::Renewed,
            None => Renewal::Unconfirmed,
        })
        .collect())
}

/// The answers to writes that wait for locks, so that none of them stays unconfirmed.
fn fenced(answers: Vec<Renewal>) -> Result<Vec<Fenced>, StoreError> {
    let fenced = |answer| match answer {
        Renewal::Renewed => Ok(Fenced::Applied),
        Renewal::LeaseLost => Ok(Fenced::LeaseLost),
        Renewal::Unconfirmed => Err(restless()),
    };
    answers.into_iter().map(fenced).collect()
}

/// Counts duplicates. A key may occur twice.
pub(crate) async fn count_duplicates(
    rows: &mut impl Rows,
    consumer: &ConsumerName,
    counts: &[(EventKey, u64)],
) -> Result<(), StoreError> {
    let mut sums: BTreeMap<&EventKey, u64> = BTreeMap::new();
    for (key, times) in counts {
        let sum = sums.entry(key).or_default();
        *sum = sum.saturating_add(*times);
    }
    let sums: Vec<_> = sums.into_iter().collect();
    if sums.is_empty() { Ok(()) } else { rows.count_duplicates(consumer, &sums).await }
}

/// Reads rows as they are.
pub(crate) async fn read(
    rows: &mut impl Rows,
    consumer: &ConsumerName,
    keys: &[EventKey],
) -> Result<Vec<State>, StoreError> {
    let Sorted { firsts, twins } = sorted((0..keys.len()).collect(), |index| &keys[index]);
    let wanted: Vec<_> = firsts.iter().map(|&index| &keys[index]).collect();
    let loaded = rows.load(consumer, &wanted).await?.rows;
    let mut states = vec![State::Absent; keys.len()];
    for (index, snapshot) in firsts.into_iter().zip(loaded) {
        states[index] = snapshot.map_or(State::Absent, |snapshot| snapshot.state);
    }
    for (twin, first) in twins {
        states[twin] = states[first];
    }
    Ok(states)
}

/// What a holder writes.
#[derive(Clone, Copy)]
enum HolderWrite<'a> {
    Complete(&'a EventKey, Token),
    Renew(&'a EventKey, Token),
    Release(&'a EventKey, Token),
    Fail(&'a FailedTry),
}

impl<'a> HolderWrite<'a> {
    fn key(&self) -> &'a EventKey {
        match self {
            Self::Complete(key, _) | Self::Renew(key, _) | Self::Release(key, _) => key,
            Self::Fail(failed) => &failed.key,
        }
    }

    /// Whether it waits for another transaction that has locked its row.
    fn locked(&self) -> Locked {
        match self {
            Self::Complete(..) | Self::Release(..) | Self::Fail(_) => Locked::Wait,
            Self::Renew(..) => Locked::Skip,
        }
    }

    fn error(&self) -> Option<&'a str> {
        match self {
            Self::Complete(..) | Self::Renew(..) | Self::Release(..) => None,
            Self::Fail(failed) => Some(&failed.error),
        }
    }

    fn input(&self, terms: &Terms, now: Timestamp) -> Input {
        match *self {
            Self::Complete(_, token) => Input::Complete { token },
            Self::Renew(_, token) => Input::Renew { token, now, lease: terms.lease },
            Self::Release(_, token) => Input::Release { token },
            Self::Fail(failed) => Input::Fail(TryFailed {
                token: failed.token,
                cause: failed.retry.cause(now),
                max_attempts: terms.max_attempts,
            }),
        }
    }
}

/// Reads the rows, asks the machine, and replaces each row if it is still the same. A renewal of a row that is locked stays
/// without an answer.
async fn write_each(
    rows: &mut impl Rows,
    terms: &Terms,
    writes: &[HolderWrite<'_>],
    mut open: Vec<usize>,
    written: &mut [Option<FailureWritten>],
) -> Result<(), StoreError> {
    let mut seen = HashMap::new();
    for _ in 0..ROUNDS {
        if open.is_empty() {
            return Ok(());
        }
        let Sorted { firsts, twins } = sorted(open, |index| writes[index].key());
        let keys: Vec<_> = firsts.iter().map(|&index| writes[index].key()).collect();
        let Loaded { now, rows: loaded } = rows.load(&terms.consumer, &keys).await?;
        open = twins.into_iter().map(|(twin, _)| twin).collect();
        for (index, snapshot) in firsts.into_iter().zip(loaded) {
            let write = &writes[index];
            let state = snapshot.map_or(State::Absent, |snapshot| snapshot.state);
            let Transition { next, decision } = advance(&state, write.input(terms, now))?;
            let fenced = if decision == Decision::Applied { Fenced::Applied } else { Fenced::LeaseLost };
            let replacement = Replacement { key: write.key(), from: &state, to: &next, error: write.error() };
            if next == state || rows.replace(terms, replacement, write.locked()).await? {
                written[index] = Some(FailureWritten { fenced, state: next, now });
            } else if write.locked() == Locked::Wait || seen.insert(index, state) != Some(state) {
                open.push(index);
            }
            // Else it is twice the same and cannot be replaced, so another transaction has locked it. The renewals beside
            // it must not wait for that one.
        }
    }
    if open.is_empty() { Ok(()) } else { Err(restless()) }
}

/// Indices of a batch in the order of their keys' bytes.
struct Sorted {
    /// Where each different key is first.
    firsts: Vec<usize>,
    /// Each further occurrence, and where its key is first.
    twins: Vec<(usize, usize)>,
}

fn sorted<'a>(mut indices: Vec<usize>, key: impl Fn(usize) -> &'a EventKey) -> Sorted {
    indices.sort_by(|&a, &b| key(a).cmp(key(b)).then(a.cmp(&b)));
    let mut sorted = Sorted { firsts: Vec::with_capacity(indices.len()), twins: Vec::new() };
    for index in indices {
        match sorted.firsts.last() {
            Some(&first) if key(first) == key(index) => sorted.twins.push((index, first)),
            _ => sorted.firsts.push(index),
        }
    }
    sorted
}

fn delivered(terms: &Terms, request: &ClaimRequest, now: Timestamp) -> Input {
    Input::Delivered(Delivered {
        token: request.token,
        payload: request.payload,
        now,
        lease: terms.lease,
        max_attempts: terms.max_attempts,
    })
}

/// The answer to a claim whose row was inserted at `now`.
fn fresh(terms: &Terms, request: &ClaimRequest, now: Timestamp) -> Answer {
    let record = Record { payload: request.payload, attempts: 1, fence: 1 };
    let locked_until = now.plus(terms.lease);
    let run = Run { kind: RunKind::Fresh, token: request.token, attempt: 1, fence: 1, locked_until };
    Answer {
        decision: Decision::Run(run),
        state: State::Processing { record, token: request.token, locked_until },
        now,
        first_message_id: None,
        error: None,
    }
}

/// The answer to a further request for a key in one batch, given the one before it; nothing if it would change the row,
/// which only the database can answer: the first may conflict where the second runs.
fn after(
    terms: &Terms,
    request: &ClaimRequest,
    (first, answer): (&ClaimRequest, &Answer),
) -> Result<Option<Answer>, StoreError> {
    let Transition { next, decision } = advance(&answer.state, delivered(terms, request, answer.now))?;
    if next != answer.state {
        return Ok(None);
    }
    let decision = match decision {
        // The same request twice: the job must still run once.
        Decision::Run(run) => Decision::InProgress { until: run.locked_until },
        decision => decision,
    };
    let first_message_id = answer.first_message_id.clone().or_else(|| Some(first.message_id.to_string()));
    Ok(Some(Answer { decision, first_message_id, ..answer.clone() }))
}

fn as_stored(next: State, decision: Decision, claim_as: ClaimAs) -> State {
    match (next, decision, claim_as) {
        (State::Processing { record, token, .. }, Decision::Run(_), ClaimAs::Completed) => {
            State::Completed { record, token: Some(token) }
        }
        (next, ..) => next,
    }
}

fn advance(state: &State, input: Input) -> Result<Transition, StoreError> {
    step(state, input)
        .map_err(|illegal| StoreError::with_cause(StoreErrorKind::Broken, "the row is in an impossible state", illegal))
}

fn restless() -> StoreError {
    StoreError::new(StoreErrorKind::Contention, "the row changed each time it was looked at")
}

/// [`State::Absent`] cannot be written.
pub(crate) fn absent() -> StoreError {
    StoreError::new(StoreErrorKind::Broken, "a row cannot be made absent: roll back or release the job instead")
}

/// There is no savepoint to go back to or to release.
pub(crate) fn no_savepoint() -> StoreError {
    StoreError::new(StoreErrorKind::Broken, "no savepoint is set")
}
