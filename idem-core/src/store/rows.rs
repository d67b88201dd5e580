//! What every store does with rows, whatever engine holds them: insert, read, ask [`step`], replace if unchanged.
//!
//! An engine implements [`Rows`] for one of its connections; the functions here are the same for all.

use std::collections::{HashMap, HashSet};
use std::future::Future;

use super::{Answer, ClaimRequest, Completion, FailedTry, FailureWritten, Fenced, StoreError, StoreErrorKind, Terms};
use crate::key::{ConsumerName, EventKey};
use crate::machine::{Decision, Delivered, Input, Record, Run, RunKind, State, Token, Transition, TryFailed, step};
use crate::timestamp::Timestamp;

/// How often a row that changes or vanishes between reading and writing is looked at again before giving up.
const ROUNDS: usize = 8;

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

/// What an engine can do with guard rows on one connection. Nothing here decides.
///
/// All keys come sorted by their bytes and each once.
pub(crate) trait Rows: Send {
    /// Inserts the rows that are not there, with attempt 1 and fence 1; answers which, and the database's clock at the
    /// insert of each. A row that another open transaction has inserted is waited for.
    fn insert(
        &mut self,
        terms: &Terms,
        requests: &[&ClaimRequest],
        claim_as: ClaimAs,
    ) -> impl Future<Output = Result<HashMap<EventKey, Timestamp>, StoreError>> + Send;

    /// Reads rows in a statement of its own, so that it sees what was committed meanwhile.
    fn load(
        &mut self,
        consumer: &ConsumerName,
        keys: &[&EventKey],
    ) -> impl Future<Output = Result<Loaded, StoreError>> + Send;

    /// Writes `to` (and `error`, if there is one) if the row is still exactly `from`; answers whether it was.
    fn replace(
        &mut self,
        terms: &Terms,
        key: &EventKey,
        from: &State,
        to: &State,
        error: Option<&str>,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Completes the rows that are `PROCESSING` under the completion's token, and inserts those that are gone; answers which.
    fn complete(
        &mut self,
        terms: &Terms,
        done: &[&Completion],
    ) -> impl Future<Output = Result<Vec<EventKey>, StoreError>> + Send;

    /// Extends the leases of rows that are `PROCESSING` under the token and not run out; answers which.
    fn renew(
        &mut self,
        terms: &Terms,
        held: &[(&EventKey, Token)],
    ) -> impl Future<Output = Result<Vec<EventKey>, StoreError>> + Send;
}

pub(crate) async fn claim(
    rows: &mut impl Rows,
    terms: &Terms,
    requests: &[ClaimRequest],
    claim_as: ClaimAs,
) -> Result<Vec<Answer>, StoreError> {
    let (mut open, twins) = sorted_once(requests, |request| &request.key);
    let mut answers: Vec<Option<Answer>> = vec![None; requests.len()];
    for _ in 0..ROUNDS {
        if open.is_empty() {
            break;
        }
        let wanted: Vec<_> = open.iter().map(|&index| &requests[index]).collect();
        let inserted = rows.insert(terms, &wanted, claim_as).await?;
        open.retain(|&index| {
            let Some(&now) = inserted.get(&requests[index].key) else { return true };
            answers[index] = Some(fresh(terms, &requests[index], now));
            false
        });
        if open.is_empty() {
            break;
        }
        open = resolve(rows, terms, requests, claim_as, open, &mut answers).await?;
    }
    if !open.is_empty() {
        return Err(restless());
    }
    for (twin, first) in twins {
        answers[twin] = answers[first].clone().map(|first| after(terms, &requests[twin], first)).transpose()?;
    }
    answers.into_iter().map(|answer| answer.ok_or_else(restless)).collect()
}

/// Looks at the rows that were already there. Answers those that changed or vanished meanwhile, to be looked at again.
async fn resolve(
    rows: &mut impl Rows,
    terms: &Terms,
    requests: &[ClaimRequest],
    claim_as: ClaimAs,
    open: Vec<usize>,
    answers: &mut [Option<Answer>],
) -> Result<Vec<usize>, StoreError> {
    let keys: Vec<_> = open.iter().map(|&index| &requests[index].key).collect();
    let loaded = rows.load(&terms.consumer, &keys).await?;
    let mut restless = Vec::new();
    for (index, snapshot) in open.into_iter().zip(loaded.rows) {
        let Some(snapshot) = snapshot else {
            restless.push(index);
            continue;
        };
        let request = &requests[index];
        let Transition { next, decision } = advance(&snapshot.state, delivered(terms, request, loaded.now))?;
        if next != snapshot.state {
            let stored = as_stored(next, claim_as);
            if !rows.replace(terms, &request.key, &snapshot.state, &stored, None).await? {
                restless.push(index);
                continue;
            }
        }
        answers[index] = Some(Answer {
            decision,
            state: next,
            now: loaded.now,
            first_message_id: snapshot.message_id,
            error: snapshot.error,
        });
    }
    Ok(restless)
}

/// Marks as completed. The common case is one statement; only rows that refused it are looked at.
pub(crate) async fn complete(
    rows: &mut impl Rows,
    terms: &Terms,
    done: &[Completion],
) -> Result<Vec<Fenced>, StoreError> {
    let (order, _) = sorted_once(done, |completion| &completion.request.key);
    let wanted: Vec<_> = order.iter().map(|&index| &done[index]).collect();
    let applied: HashSet<_> = rows.complete(terms, &wanted).await?.into_iter().collect();
    let holders: Vec<_> =
        done.iter().map(|completion| (completion.request.key.clone(), completion.request.token)).collect();
    settle(rows, terms, &holders, |key| applied.contains(key), |token, _| Input::Complete { token }).await
}

/// Extends leases.
pub(crate) async fn renew(
    rows: &mut impl Rows,
    terms: &Terms,
    held: &[(EventKey, Token)],
) -> Result<Vec<Fenced>, StoreError> {
    let (order, _) = sorted_once(held, |(key, _)| key);
    let wanted: Vec<_> = order.iter().map(|&index| (&held[index].0, held[index].1)).collect();
    let renewed: HashSet<_> = rows.renew(terms, &wanted).await?.into_iter().collect();
    let lease = terms.lease;
    settle(rows, terms, held, |key| renewed.contains(key), |token, now| Input::Renew { token, now, lease }).await
}

/// Gives back.
pub(crate) async fn release(
    rows: &mut impl Rows,
    terms: &Terms,
    held: &[(EventKey, Token)],
) -> Result<Vec<Fenced>, StoreError> {
    settle(rows, terms, held, |_| false, |token, _| Input::Release { token }).await
}

/// Asks the machine for every holder whose write is not already in: replaces the row, or says that the lease is lost.
async fn settle(
    rows: &mut impl Rows,
    terms: &Terms,
    held: &[(EventKey, Token)],
    already: impl Fn(&EventKey) -> bool,
    input: impl Fn(Token, Timestamp) -> Input,
) -> Result<Vec<Fenced>, StoreError> {
    let mut fenced = vec![Fenced::Applied; held.len()];
    let open: Vec<_> = (0..held.len()).filter(|&index| !already(&held[index].0)).collect();
    for index in sorted(open, |&index| &held[index].0) {
        let (key, token) = &held[index];
        fenced[index] = write(rows, terms, key, None, |now| input(*token, now)).await?.fenced;
    }
    Ok(fenced)
}

/// Marks tries as failed.
pub(crate) async fn fail(
    rows: &mut impl Rows,
    terms: &Terms,
    failed: &[FailedTry],
) -> Result<Vec<FailureWritten>, StoreError> {
    let mut written = vec![None; failed.len()];
    for index in sorted((0..failed.len()).collect(), |&index| &failed[index].key) {
        let FailedTry { key, token, retry, error } = &failed[index];
        let input =
            |now| Input::Fail(TryFailed { token: *token, cause: retry.cause(now), max_attempts: terms.max_attempts });
        written[index] = Some(write(rows, terms, key, Some(error), input).await?);
    }
    written.into_iter().map(|written| written.ok_or_else(restless)).collect()
}

/// One holder's write: reads the row, asks the machine, and replaces the row if it is still the same.
async fn write(
    rows: &mut impl Rows,
    terms: &Terms,
    key: &EventKey,
    error: Option<&str>,
    input: impl Fn(Timestamp) -> Input,
) -> Result<FailureWritten, StoreError> {
    for _ in 0..ROUNDS {
        let mut loaded = rows.load(&terms.consumer, &[key]).await?;
        let now = loaded.now;
        let state = loaded.rows.pop().flatten().map_or(State::Absent, |snapshot| snapshot.state);
        let Transition { next, decision } = advance(&state, input(now))?;
        let fenced = if decision == Decision::Applied { Fenced::Applied } else { Fenced::LeaseLost };
        if next == state || rows.replace(terms, key, &state, &next, error).await? {
            return Ok(FailureWritten { fenced, state: next, now });
        }
    }
    Err(restless())
}

/// Where each different key is first, in the order of the keys' bytes; and for each further occurrence, where its first is.
fn sorted_once<T>(items: &[T], key: impl Fn(&T) -> &EventKey) -> (Vec<usize>, Vec<(usize, usize)>) {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by(|&a, &b| key(&items[a]).cmp(key(&items[b])).then(a.cmp(&b)));
    let mut twins = Vec::new();
    let mut firsts: Vec<usize> = Vec::with_capacity(order.len());
    for index in order {
        match firsts.last() {
            Some(&first) if key(&items[first]) == key(&items[index]) => twins.push((index, first)),
            _ => firsts.push(index),
        }
    }
    (firsts, twins)
}

fn sorted<'a>(mut indices: Vec<usize>, key: impl Fn(&usize) -> &'a EventKey) -> Vec<usize> {
    indices.sort_by(|a, b| key(a).cmp(key(b)));
    indices
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

/// The answer to the second request for a key in one batch, given the first one's.
fn after(terms: &Terms, request: &ClaimRequest, first: Answer) -> Result<Answer, StoreError> {
    let Transition { decision, .. } = advance(&first.state, delivered(terms, request, first.now))?;
    Ok(Answer { decision, ..first })
}

fn as_stored(next: State, claim_as: ClaimAs) -> State {
    match (next, claim_as) {
        (State::Processing { record, token, .. }, ClaimAs::Completed) => {
            State::Completed { record, token: Some(token) }
        }
        (next, _) => next,
    }
}

fn advance(state: &State, input: Input) -> Result<Transition, StoreError> {
    step(state, input)
        .map_err(|illegal| StoreError::with_cause(StoreErrorKind::Broken, "the row is in an impossible state", illegal))
}

fn restless() -> StoreError {
    StoreError::new(StoreErrorKind::Contention, "the row changed each time it was looked at")
}
