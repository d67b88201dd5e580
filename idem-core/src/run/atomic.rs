//! Claim, effect and completion in one transaction (T1), for many messages at once.
//!
//! The common case is optimistic: one transaction, no savepoints. When a handler fails there, everything is rolled back and
//! run again with savepoints, so that the failing message neither takes its neighbours along nor makes them slow. Handlers
//! therefore may run more than once for one message; only what the last transaction did is kept.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use tokio_util::sync::CancellationToken;

use super::{
    AlreadyDone, BUSY_LOCK, CrashPoint, Delivery, Inner, Ordering, Outcome, Report, Undecided, caught, jitter,
    retry_in, returned,
};
use crate::handler::{FailureKind, HandlerFailure, Job, Output};
use crate::key::{EventKey, LockName};
use crate::machine::{Decision, FailureCause, Input, Run, RunKind, State, Token, TryFailed, step};
use crate::store::{Answer, Retry, Returned, StoreError, StoreErrorKind, Tx};
use crate::timestamp::Timestamp;

/// Messages between two savepoints once failures were seen: few enough to repeat, many enough that the savepoints cost
/// little.
const SEGMENT: usize = 16;
/// How many batches after a failing one set savepoints at once.
const SUSPICIOUS_BATCHES: u32 = 8;
/// How often a message that runs alone may lose its connection, while the store answers, before that counts as its failure.
const CUTS: u32 = 3;
/// How often a transaction that lost a deadlock or wait is tried again before it is split or given back.
const CONTENTION_TRIES: u32 = 4;

pub(super) async fn run(inner: &Inner, deliveries: Vec<Delivery>, stop: &CancellationToken, report: &dyn Report) {
    let (careful, mut others): (Vec<_>, Vec<_>) = deliveries.into_iter().partition(Delivery::is_careful);
    if !careful.is_empty() {
        match done_already(inner, &careful).await {
            Ok(done) => {
                for (delivery, done) in careful.into_iter().zip(done) {
                    if done { others.push(delivery) } else { run_carefully(inner, delivery, stop, report).await }
                }
            }
            Err(error) => {
                let undecided = Undecided::from_store(error);
                for delivery in careful {
                    report.decided(delivery, Outcome::Undecided(undecided.clone()));
                }
            }
        }
    }
    if !others.is_empty() {
        run_together(inner, others, stop, report).await;
    }
}

/// Which of these jobs are completed: no handler will run for them, so they need no care.
async fn done_already(inner: &Inner, deliveries: &[Delivery]) -> Result<Vec<bool>, StoreError> {
    let keys: Vec<_> = deliveries.iter().map(|delivery| delivery.key().clone()).collect();
    let states = inner.store().read(&inner.terms.consumer, &keys).await?;
    Ok(states.iter().map(|state| matches!(state, State::Completed { .. })).collect())
}

/// Commits the claim, and with it the attempt, before the handler runs: if it kills the process, that was a try. One at a
/// time, so that no other message's attempt is counted for it.
async fn run_carefully(inner: &Inner, delivery: Delivery, stop: &CancellationToken, report: &dyn Report) {
    let (key, token) = (delivery.key().clone(), delivery.token());
    let _turn = tokio::select! {
        biased;
        () = stop.cancelled() => return report.decided(delivery, Outcome::Undecided(Undecided::Cancelled)),
        turn = inner.careful.lock() => turn,
    };
    let claimed = tokio::select! {
        biased;
        () = stop.cancelled() => Err(Undecided::Cancelled),
        claimed = claim_ahead(inner, &delivery) => claimed.map_err(Undecided::from_store),
    };
    let decided = Mutex::new(None);
    let keep = |delivery: Delivery, outcome: Outcome| {
        *decided.lock().unwrap_or_else(PoisonError::into_inner) = Some((delivery, outcome));
    };
    let taken_over =
        matches!(&claimed, Ok(Answer { decision: Decision::Run(Run { kind: RunKind::Takeover, .. }), .. }));
    match claimed {
        Err(undecided) => keep(delivery, Outcome::Undecided(undecided)),
        // The transaction claims once more with the same token, so it gets what was claimed here.
        Ok(Answer { decision: Decision::Run(_), .. }) => run_together(inner, vec![delivery], stop, &keep).await,
        Ok(answer) => {
            let outcome = inner.outcome(&delivery, &answer);
            give_back(vec![delivery], vec![outcome], &keep);
        }
    }
    let Some((delivery, mut outcome)) = decided.into_inner().unwrap_or_else(PoisonError::into_inner) else { return };
    if let Outcome::Completed { takeover, .. } = &mut outcome {
        // For the transaction it was its own claim.
        *takeover |= taken_over;
    }
    if leaves_its_claim(&outcome) {
        // Its transaction is over or rolled back, so nothing of it runs any more. Before it is reported: whoever asks for it
        // next would find it in progress, with a try that it never had.
        give_up_claim(inner, key, token).await;
    }
    report.decided(delivery, outcome);
}

/// Whether a claim that was committed ahead may still be held after its transaction.
fn leaves_its_claim(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Completed { .. }
        | Outcome::Duplicate(_)
        | Outcome::Conflict
        | Outcome::NotDue { .. }
        | Outcome::Failed { .. }
        | Outcome::Exhausted { .. }
        | Outcome::LeaseLost => false,
        // Its lock is somebody else's (L5).
        Outcome::InProgress { .. } => true,
        Outcome::Undecided(Undecided::Cancelled | Undecided::Contention(_) | Undecided::Broken(_)) => true,
        // Nobody would hear it. Asked again with the same token, it is the same claim, and the same try.
        Outcome::Undecided(Undecided::Unavailable(_)) => false,
    }
}

async fn claim_ahead(inner: &Inner, delivery: &Delivery) -> Result<Answer, StoreError> {
    let mut answers = inner.store().claim(&inner.terms, std::slice::from_ref(&delivery.request)).await?;
    answers.pop().ok_or_else(|| StoreError::new(StoreErrorKind::Broken, "a claim was not answered"))
}

/// So that the next process need not wait for the lease. If it fails, it must.
async fn give_up_claim(inner: &Inner, key: EventKey, token: Token) {
    if let Err(error) = inner.store().release(&inner.terms, &[(key, token)]).await {
        tracing::debug!(consumerName = %inner.terms.consumer, errorMessage = %error, "a claim was not released and runs out");
    }
}

async fn run_together(inner: &Inner, deliveries: Vec<Delivery>, stop: &CancellationToken, report: &dyn Report) {
    let mut waiting = vec![deliveries];
    while let Some(mut batch) = waiting.pop() {
        match decide(inner, &mut batch, stop).await {
            Ok(outcomes) => give_back(batch, outcomes, report),
            // Something must change between two tries, else those who collided collide again: fewer keys at once.
            Err(Unfinished::Split) => {
                waiting.push(batch.split_off(batch.len() / 2));
                waiting.push(batch);
            }
            Err(Unfinished::Without(index, failure)) => {
                let failed = batch.remove(index);
                let outcome = record_failure(inner, &failed, failure).await;
                let outcomes = outcome.unwrap_or_else(|undecided| vec![Outcome::Undecided(undecided)]);
                give_back(vec![failed], outcomes, report);
                if !batch.is_empty() {
                    waiting.push(batch);
                }
            }
            Err(Unfinished::Undecided(undecided)) => {
                let rest = waiting.drain(..).flatten();
                for delivery in batch.into_iter().chain(rest) {
                    report.decided(delivery, Outcome::Undecided(undecided.clone()));
                }
            }
        }
    }
}

/// Why a batch has no outcomes yet.
enum Unfinished {
    /// Run it in halves.
    Split,
    /// This one has failed, in a way that took the transaction along: run the others without it.
    Without(usize, HandlerFailure),
    /// Nothing is decided.
    Undecided(Undecided),
}

fn give_back(batch: Vec<Delivery>, outcomes: Vec<Outcome>, report: &dyn Report) {
    for (mut delivery, outcome) in batch.into_iter().zip(outcomes) {
        // While it is undecided, the token is what tells our own commit from somebody else's.
        if !matches!(outcome, Outcome::Undecided(_)) {
            delivery.renew_token();
        }
        report.decided(delivery, outcome);
    }
}

/// One outcome for each delivery, all durable; or none.
async fn decide(inner: &Inner, batch: &mut [Delivery], stop: &CancellationToken) -> Result<Vec<Outcome>, Unfinished> {
    let mut with_savepoints = batch.len() > 1 && take_suspicion(inner);
    let (mut collisions, mut cuts) = (0, 0);
    loop {
        let attempt = transaction(inner, batch, with_savepoints, stop);
        let result = tokio::select! {
            biased;
            () = stop.cancelled() => return Err(Unfinished::Undecided(Undecided::Cancelled)),
            result = attempt => result,
        };
        let alone = batch.len() == 1;
        match result {
            Ok(outcomes) => return Ok(outcomes),
            Err(Aborted::Handler(failure)) if alone => return Err(Unfinished::Without(0, failure)),
            Err(Aborted::Handler(_)) => {
                with_savepoints = true;
                inner.suspicious.store(SUSPICIOUS_BATCHES, Ordering::Relaxed);
            }
            Err(Aborted::Hanging { index: Some(index), failure }) => return Err(Unfinished::Without(index, failure)),
            Err(Aborted::Hanging { index: None, failure }) if alone => return Err(Unfinished::Without(0, failure)),
            Err(Aborted::Hanging { index: None, .. }) => return Err(Unfinished::Split),
            Err(Aborted::Refused(error)) if alone => {
                return Err(Unfinished::Without(0, HandlerFailure::from_refused_commit(&error)));
            }
            Err(Aborted::Refused(_)) => return Err(Unfinished::Split),
            Err(Aborted::Severed(error)) => {
                // Away, or is it the message that cuts its own connection? A store that answers at once is not away.
                if inner.store().ping().await.is_err() {
                    return Err(Unfinished::Undecided(Undecided::from_store(error)));
                }
                if !alone {
                    return Err(Unfinished::Split);
                }
                cuts += 1;
                if cuts == CUTS {
                    return Err(Unfinished::Without(0, HandlerFailure::from_cut_connection(&error)));
                }
                jitter(Duration::from_millis(100)).await;
            }
            Err(Aborted::Store(error))
                if error.kind() == StoreErrorKind::Contention && collisions < CONTENTION_TRIES =>
            {
                if !alone && collisions > 0 {
                    return Err(Unfinished::Split);
                }
                collisions += 1;
                jitter(Duration::from_millis(10 << collisions)).await;
            }
            Err(Aborted::Store(error)) => return Err(Unfinished::Undecided(Undecided::from_store(error))),
        }
    }
}

fn take_suspicion(inner: &Inner) -> bool {
    inner.suspicious.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

/// Why a transaction was rolled back.
enum Aborted {
    /// A handler failed and no savepoint had been set.
    Handler(HandlerFailure),
    /// A handler ran longer than it may. Its statement may still be under way, so the connection is given up.
    Hanging {
        /// Which delivery, if the call was for one alone.
        index: Option<usize>,
        failure: HandlerFailure,
    },
    /// The engine refuses to keep what the handlers did: one of them hid a statement's error, or a constraint that is
    /// checked at the end is violated. Theirs, not the store's.
    Refused(StoreError),
    /// The connection was lost while handlers ran, or the outcome of COMMIT is unknown. The next claim with the same tokens
    /// tells.
    Severed(StoreError),
    /// The store failed before any handler began.
    Store(StoreError),
}

/// What the engine says once handlers have run: if it is neither away nor busy, it speaks of what they did.
fn after_handlers(error: StoreError) -> Aborted {
    match error.kind() {
        StoreErrorKind::Broken => Aborted::Refused(error),
        StoreErrorKind::Unavailable => Aborted::Severed(error),
        _ => Aborted::Store(error),
    }
}

impl From<StoreError> for Aborted {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

async fn transaction(
    inner: &Inner,
    batch: &mut [Delivery],
    with_savepoints: bool,
    stop: &CancellationToken,
) -> Result<Vec<Outcome>, Aborted> {
    let names: Vec<_> = batch.iter().filter_map(Delivery::lock).cloned().collect();
    if !names.is_empty() {
        inner.store().make_locks(&names).await?;
    }
    let mut tx = inner.store().begin().await?;
    CrashPoint::Begun.pass();
    let answers = claim(inner, &mut tx, batch, &names).await?;
    CrashPoint::Claimed.pass();

    let cancel = stop.child_token();
    let mut claimed: Vec<_> = answers
        .iter()
        .enumerate()
        .filter_map(|(index, answer)| Claimed::of(inner, index, &batch[index], answer.as_ref()?, cancel.clone()))
        .collect();
    // One order everywhere, so that handlers which lock rows of their own by key do not deadlock with each other.
    claimed.sort_by(|a, b| a.job.key().cmp(b.job.key()));

    let mut work = Work { inner, batch, tx: &mut tx, failures: Vec::new(), outputs: HashMap::new() };
    let handled = if with_savepoints { work.run_in_segments(&claimed).await } else { work.run_all(&claimed).await };
    let Work { failures, outputs, .. } = work;
    match handled {
        Ok(()) => {}
        Err(Aborted::Handler(failure)) => {
            // If even this fails, the connection is gone, and the failure may have been the store's, not the message's.
            tx.rollback().await.map_err(after_handlers)?;
            return Err(Aborted::Handler(failure));
        }
        Err(aborted) => return Err(aborted),
    }
    CrashPoint::Handled.pass();

    let verdicts = Verdicts::new(inner, &claimed, failures, outputs)?;
    let failed_rows = verdicts.rows(batch);
    if !failed_rows.is_empty() {
        tx.store().overwrite(&inner.terms, &failed_rows).await.map_err(after_handlers)?;
    }
    let results = verdicts.results(batch);
    if !results.is_empty() {
        tx.store().keep_results(&inner.terms.consumer, &results).await.map_err(after_handlers)?;
    }
    CrashPoint::BeforeCommit.pass();
    tx.commit().await.map_err(after_handlers)?;
    CrashPoint::Recorded.pass();
    Ok(verdicts.outcomes(inner, batch, &answers))
}

/// One answer for each delivery; none for those whose lock somebody else holds, which are not claimed (L5). Locks come first
/// and nobody waits for them, so they cannot deadlock with the rows.
async fn claim(
    inner: &Inner,
    tx: &mut Tx,
    batch: &[Delivery],
    names: &[LockName],
) -> Result<Vec<Option<Answer>>, StoreError> {
    let mut held = if names.is_empty() { Vec::new() } else { tx.store().lock(names).await? }.into_iter();
    let admitted: Vec<bool> =
        batch.iter().map(|delivery| delivery.lock().is_none() || held.next().unwrap_or(false)).collect();
    let of_admitted = batch.iter().zip(&admitted).filter(|(_, admitted)| **admitted);
    let requests: Vec<_> = of_admitted.map(|(delivery, _)| delivery.request.clone()).collect();
    let mut answers =
        if requests.is_empty() { Vec::new() } else { tx.store().claim(&inner.terms, &requests).await? }.into_iter();
    Ok(admitted.into_iter().map(|admitted| if admitted { answers.next() } else { None }).collect())
}

struct Claimed {
    /// Which delivery of the batch.
    index: usize,
    job: Job,
    run: Run,
    /// The row as it was claimed, and the database's clock then.
    state: State,
    now: Timestamp,
}

impl Claimed {
    /// Nothing if the answer is not to run.
    fn of(
        inner: &Inner,
        index: usize,
        delivery: &Delivery,
        answer: &Answer,
        cancel: CancellationToken,
    ) -> Option<Self> {
        let Decision::Run(run) = answer.decision else { return None };
        let job = inner.job(delivery, &run, cancel, None);
        Some(Self { index, job, run, state: answer.state, now: answer.now })
    }
}

struct Work<'a> {
    inner: &'a Inner,
    batch: &'a mut [Delivery],
    tx: &'a mut Tx,
    /// Failed tries, by their delivery's index. Their effects are undone.
    failures: Vec<(usize, HandlerFailure)>,
    /// What handlers of single messages returned, by their delivery's index. Of a try that was repeated, the last one's.
    outputs: HashMap<usize, Output>,
}

impl Work<'_> {
    /// Without savepoints: the first failure ends the transaction.
    async fn run_all(&mut self, claimed: &[Claimed]) -> Result<(), Aborted> {
        if claimed.is_empty() {
            return Ok(());
        }
        let calls = if self.inner.spec.batch { claimed.len() } else { 1 };
        for part in claimed.chunks(calls) {
            self.call(part).await.map_err(|failure| match (failure.kind, part) {
                (FailureKind::Timeout, [alone]) => Aborted::Hanging { index: Some(alone.index), failure },
                (FailureKind::Timeout, _) => Aborted::Hanging { index: None, failure },
                _ => Aborted::Handler(failure),
            })?;
        }
        Ok(())
    }

    /// With a savepoint before every few messages. Where a segment fails, it is repeated in parts.
    async fn run_in_segments(&mut self, claimed: &[Claimed]) -> Result<(), Aborted> {
        let length = if self.inner.spec.batch { claimed.len().max(1) } else { SEGMENT };
        for segment in claimed.chunks(length) {
            self.run_segment(segment).await?;
        }
        Ok(())
    }

    /// Runs all of it or, if that fails, its halves; for handlers of single messages at once each message alone. A message
    /// that fails alone has failed: what it did is undone, and its neighbours' effects stay.
    fn run_segment<'a>(&'a mut self, segment: &'a [Claimed]) -> BoxFuture<'a, Result<(), Aborted>> {
        async move {
            self.tx.store().savepoint().await.map_err(after_handlers)?;
            match self.run_all(segment).await {
                Ok(()) => return self.tx.store().release_savepoint().await.map_err(after_handlers),
                Err(
                    aborted @ (Aborted::Store(_) | Aborted::Severed(_) | Aborted::Refused(_) | Aborted::Hanging { .. }),
                ) => return Err(aborted),
                Err(Aborted::Handler(failure)) => {
                    // If even this fails, the connection is gone, and the failure may have been the store's.
                    self.tx.store().rollback_to_savepoint().await.map_err(after_handlers)?;
                    if let [alone] = segment {
                        self.failures.push((alone.index, failure));
                        return Ok(());
                    }
                }
            }
            let part = if self.inner.spec.batch { segment.len().div_ceil(2) } else { 1 };
            for part in segment.chunks(part) {
                self.run_segment(part).await?;
            }
            Ok(())
        }
        .boxed()
    }

    async fn call(&mut self, part: &[Claimed]) -> Result<(), HandlerFailure> {
        let jobs: Vec<_> = part.iter().map(|claimed| claimed.job.clone()).collect();
        let events = part.iter().map(|claimed| self.batch[claimed.index].take_event()).collect();
        let max_run = self.inner.policy.max_run;
        let running = caught(self.inner.handler.call(&jobs, events, Some(self.tx), &self.inner.guard.states));
        let output = match tokio::time::timeout(max_run, running).await {
            Ok(result) => result?,
            Err(_) => return Err(HandlerFailure::timeout(max_run)),
        };
        // What a call for several returned is no one job's.
        if let [alone] = part {
            self.outputs.insert(alone.index, output);
        }
        Ok(())
    }
}

/// What became of each claimed job, before it is written.
struct Verdicts {
    /// By delivery index.
    all: Vec<(usize, Verdict)>,
}

enum Verdict {
    Done { run: Run, already_done: Option<AlreadyDone>, output: Option<Output> },
    Failed { run: Run, state: State, retry: Retry, failure: HandlerFailure },
}

impl Verdicts {
    fn new(
        inner: &Inner,
        claimed: &[Claimed],
        failures: Vec<(usize, HandlerFailure)>,
        mut outputs: HashMap<usize, Output>,
    ) -> Result<Self, StoreError> {
        let mut failures: HashMap<_, _> = failures.into_iter().collect();
        let verdict = |claimed: &Claimed| {
            let run = claimed.run;
            let verdict = match failures.remove(&claimed.index) {
                None => {
                    let output = outputs.remove(&claimed.index).unwrap_or_default();
                    Verdict::Done { run, already_done: None, output: Some(output) }
                }
                // The domain says that the effect is there: done, and the row stays completed [T3].
                Some(failure) if inner.expects(&failure) => {
                    Verdict::Done { run, already_done: Some(AlreadyDone::Domain), output: None }
                }
                Some(failure) => {
                    let retry = inner.retry(&failure, run.attempt);
                    let cause = retry.cause(claimed.now);
                    let state = failed_state(&claimed.state, run, cause, inner.terms.max_attempts)?;
                    Verdict::Failed { run, state, retry, failure }
                }
            };
            Ok((claimed.index, verdict))
        };
        Ok(Self { all: claimed.iter().map(verdict).collect::<Result<_, _>>()? })
    }

    /// The rows that must not stay completed.
    fn rows(&self, batch: &[Delivery]) -> Vec<(EventKey, State, String)> {
        let row = |(index, verdict): &(usize, Verdict)| match verdict {
            Verdict::Done { .. } => None,
            Verdict::Failed { state, failure, .. } => {
                Some((batch[*index].key().clone(), *state, failure.message.clone()))
            }
        };
        self.all.iter().filter_map(row).collect()
    }

    /// What the rows keep of what handlers returned.
    fn results(&self, batch: &[Delivery]) -> Vec<(EventKey, Returned)> {
        let result = |(index, verdict): &(usize, Verdict)| match verdict {
            Verdict::Done { output: Some(output), .. } => {
                let returned = returned(output);
                (!returned.is_nothing()).then(|| (batch[*index].key().clone(), returned))
            }
            Verdict::Done { output: None, .. } | Verdict::Failed { .. } => None,
        };
        self.all.iter().filter_map(result).collect()
    }

    fn outcomes(self, inner: &Inner, batch: &[Delivery], answers: &[Option<Answer>]) -> Vec<Outcome> {
        let outcome = |(delivery, answer): (&Delivery, &Option<Answer>)| match answer {
            Some(answer) => inner.outcome(delivery, answer),
            None => Outcome::InProgress { wait: BUSY_LOCK },
        };
        let mut outcomes: Vec<_> = batch.iter().zip(answers).map(outcome).collect();
        for (index, verdict) in self.all {
            outcomes[index] = match verdict {
                Verdict::Done { run, already_done, output } => {
                    let takeover = run.kind == RunKind::Takeover;
                    Outcome::Completed { attempt: run.attempt, takeover, already_done, output }
                }
                Verdict::Failed { run, state, retry, failure } => {
                    Outcome::Failed { attempt: run.attempt, retry_in: retry_in(&state, retry), failure }
                }
            };
        }
        outcomes
    }
}

fn failed_state(state: &State, run: Run, cause: FailureCause, max_attempts: u32) -> Result<State, StoreError> {
    let failed = Input::Fail(TryFailed { token: run.token, cause, max_attempts });
    let moved = step(state, failed)
        .map_err(|illegal| StoreError::with_cause(StoreErrorKind::Broken, "a claimed job cannot fail", illegal))?;
    Ok(moved.next)
}

/// A message that ran alone has failed, and its transaction is rolled back: claims it once more and writes the failure, or,
/// where the domain says that the effect is there, the completion (T3). The handler does not run again.
async fn record_failure(
    inner: &Inner,
    delivery: &Delivery,
    failure: HandlerFailure,
) -> Result<Vec<Outcome>, Undecided> {
    let mut collisions = 0;
    loop {
        match write_failure(inner, delivery, &failure).await {
            Ok(outcomes) => return Ok(outcomes),
            Err(error) if error.kind() == StoreErrorKind::Contention && collisions < CONTENTION_TRIES => {
                collisions += 1;
                jitter(Duration::from_millis(10 << collisions)).await;
            }
            // Not forgotten: undecided, so the message runs again once the store is back.
            Err(error) => return Err(Undecided::from_store(error)),
        }
    }
}

async fn write_failure(
    inner: &Inner,
    delivery: &Delivery,
    failure: &HandlerFailure,
) -> Result<Vec<Outcome>, StoreError> {
    let mut tx = inner.store().begin().await?;
    let answers = tx.store().claim(&inner.terms, std::slice::from_ref(&delivery.request)).await?;
    let answers: Vec<_> = answers.into_iter().map(Some).collect();
    let batch = std::slice::from_ref(delivery);
    // Nothing if somebody else got the job meanwhile: what they made of it stands.
    let claimed: Vec<_> = answers
        .iter()
        .flatten()
        .filter_map(|answer| Claimed::of(inner, 0, delivery, answer, CancellationToken::new()))
        .collect();
    let failures = claimed.iter().map(|claimed| (claimed.index, failure.clone())).collect();
    let verdicts = Verdicts::new(inner, &claimed, failures, HashMap::new())?;
    let failed_rows = verdicts.rows(batch);
    if !failed_rows.is_empty() {
        tx.store().overwrite(&inner.terms, &failed_rows).await?;
    }
    tx.commit().await?;
    CrashPoint::Recorded.pass();
    Ok(verdicts.outcomes(inner, batch, &answers))
}
