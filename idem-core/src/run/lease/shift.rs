//! The jobs of one claim, from their first call to their last write.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::call::{CallResult, Handled, HandlerCall};
use super::{lock_request, unlock};
use crate::handler::{HandlerFailure, HeldClaim, Output};
use crate::key::EventKey;
use crate::machine::{Run, RunDeadline, RunKind, State};
use crate::run::outcome::AlreadyDone;
use crate::run::{CrashPoint, Delivery, Inner, Outcome, Report, Undecided, retry_in, returned};
use crate::store::{
    Completion, FailedTry, FailureWritten, Fenced, LockRequest, Renewal, Retry, Returned, StoreError, StoreErrorKind,
};

/// The wait before a write that the store did not answer is asked again: from here, doubling, to [`WRITE_RETRY_CAP`].
const WRITE_RETRY: Duration = Duration::from_millis(50);
const WRITE_RETRY_CAP: Duration = Duration::from_secs(2);

/// The jobs of one claim: their handlers run side by side, their leases are renewed together, and what is finished is
/// written together.
pub(super) struct Shift<'a> {
    inner: &'a Arc<Inner>,
    /// What the deadlines count from.
    origin: Instant,
    /// By the position they were claimed in.
    jobs: Vec<HeldJob>,
    tasks: JoinSet<CallResult>,
    /// Which jobs a task runs: one, or several of a batch handler.
    by_task: HashMap<Id, Vec<usize>>,
    cancel: CancellationToken,
    /// Finished and not yet written.
    finished: Vec<Finished>,
    /// Calls for several that failed after their handler had completed some of the jobs itself: whether it got as far as its
    /// commit is to be looked up.
    unsure: Vec<Unsure>,
    /// A write on its way. Beside the renewals, which it must not hold up.
    writing: Option<BoxFuture<'a, Written>>,
    /// A renewal on its way, and when it was sent.
    renewing: Option<BoxFuture<'a, Renewed>>,
}

type Finished = (usize, CallResult);
type Unsure = (Vec<usize>, HandlerFailure);

/// The answers to what was finished.
struct Written {
    done: Vec<(usize, Done)>,
    completed: Result<Vec<Fenced>, StoreError>,
    /// Completed inside transactions of their handlers: what their rows say.
    inside: Vec<(usize, Done)>,
    /// Failed after such a completion, or before its commit: likewise.
    unsure: Vec<Unsure>,
    /// The rows of those inside, and after them of those unsure.
    found: Result<Vec<State>, StoreError>,
    failed: Vec<(usize, HandlerFailure, Retry)>,
    recorded: Result<Vec<FailureWritten>, StoreError>,
}

/// The locks of what is being written.
#[derive(Default)]
struct LocksByWrite {
    done: Vec<LockRequest>,
    inside: Vec<LockRequest>,
    failed: Vec<LockRequest>,
}

impl LocksByWrite {
    /// Only of what is written down: before that, nobody may change the state after this try.
    fn of_written(self, done: bool, inside: bool, failed: bool) -> Vec<LockRequest> {
        let written = [(self.done, done), (self.inside, inside), (self.failed, failed)];
        written.into_iter().filter(|(_, is_written)| *is_written).flat_map(|(locks, _)| locks).collect()
    }
}

/// A try that had its effect, or found it.
struct Done {
    already: Option<AlreadyDone>,
    /// What the handler answered, also for another attempt to write it down.
    result: CallResult,
}

impl Done {
    fn output(&self) -> Option<&Output> {
        match &self.result {
            Ok(Handled::Ran(output)) => Some(output),
            Ok(Handled::Found) | Err(_) => None,
        }
    }

    fn into_output(self) -> Option<Output> {
        match self.result {
            Ok(Handled::Ran(output)) => Some(output),
            Ok(Handled::Found) | Err(_) => None,
        }
    }
}

/// The answers to a renewal.
struct Renewed {
    sent: Instant,
    indices: Vec<usize>,
    leases: Result<Vec<Renewal>, StoreError>,
    /// For each of the indices; renewed for those without a lock.
    locks: Result<Vec<Renewal>, StoreError>,
}

struct HeldJob {
    /// Taken when it is reported.
    delivery: Option<Delivery>,
    run: Run,
    claim: Arc<HeldClaim>,
    deadline: RunDeadline,
    cancel: CancellationToken,
    abort: Option<AbortHandle>,
    /// Set when the handler was told to go: at this instant it is dropped.
    drop_at: Option<Instant>,
    /// The handler was dropped, for this reason.
    stopped: Option<Stopped>,
    running: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stopped {
    /// Another worker has the job.
    LeaseLost,
    /// The lease could not be renewed in time.
    Unrenewed,
    /// It ran too long.
    Ceiling,
}

impl<'a> Shift<'a> {
    pub(super) fn begin(
        inner: &'a Arc<Inner>,
        held: Vec<(Delivery, Run)>,
        sent: Instant,
        deadline: RunDeadline,
        stop: &CancellationToken,
    ) -> Self {
        let cancel = stop.child_token();
        let job = |(delivery, run): (Delivery, Run)| HeldJob {
            claim: Arc::new(claim_of(inner, &delivery, &run)),
            delivery: Some(delivery),
            run,
            deadline,
            cancel: cancel.child_token(),
            abort: None,
            drop_at: None,
            stopped: None,
            running: false,
        };
        let mut shift = Self {
            inner,
            origin: sent,
            jobs: held.into_iter().map(job).collect(),
            tasks: JoinSet::new(),
            by_task: HashMap::new(),
            cancel,
            finished: Vec::new(),
            unsure: Vec::new(),
            writing: None,
            renewing: None,
        };
        let all: Vec<usize> = (0..shift.jobs.len()).collect();
        let per_call = if inner.spec.batch { all.len().max(1) } else { 1 };
        for part in all.chunks(per_call) {
            shift.spawn(part.to_vec());
        }
        shift
    }

    /// One call of the handler on a task of its own, so that one that blocks its thread cannot stop the renewals.
    fn spawn(&mut self, part: Vec<usize>) {
        let mut jobs = Vec::with_capacity(part.len());
        for &index in &part {
            let job = &self.jobs[index];
            if let Some(delivery) = &job.delivery {
                let claim = Some(Arc::clone(&job.claim));
                jobs.push(self.inner.job(delivery, &job.run, job.cancel.clone(), claim));
            }
        }
        let held = self.jobs.iter_mut().enumerate().filter(|(index, _)| part.contains(index));
        let deliveries = held.filter_map(|(_, job)| Some((job.delivery.as_mut()?, &job.run)));
        let call = HandlerCall::new(self.inner, jobs, deliveries);
        let abort = self.tasks.spawn(call.run(Arc::clone(self.inner)));
        for &index in &part {
            self.jobs[index].running = true;
            self.jobs[index].abort = Some(abort.clone());
        }
        self.by_task.insert(abort.id(), part);
    }

    pub(super) async fn work(mut self, stop: &CancellationToken, report: &dyn Report) {
        let interval = RunDeadline::renewal_interval(self.inner.policy.lease);
        let mut next_renewal = self.origin + interval;
        let mut write_wait = WRITE_RETRY;
        let mut write_at = self.origin;
        while self.jobs.iter().any(|job| job.delivery.is_some()) {
            if self.may_write() && write_at <= self.inner.now() {
                CrashPoint::Handled.pass();
                self.begin_write();
            }
            let next_stop = self.next_stop();
            tokio::select! {
                biased;
                () = stop.cancelled() => return self.abandon(Undecided::Cancelled, report).await,
                () = sleep_until(next_stop.unwrap_or(self.origin)), if next_stop.is_some() => self.stop_due(),
                renewed = answer_of(&mut self.renewing) => {
                    self.renewing = None;
                    next_renewal = self.take_renewal(renewed, interval);
                }
                written = answer_of(&mut self.writing) => {
                    self.writing = None;
                    match self.take_written(written, report) {
                        Ok(()) => write_wait = WRITE_RETRY,
                        Err(error) if error.is_transient() => {
                            tracing::warn!(consumerName = %self.inner.terms.consumer, errorMessage = %error, "an outcome could not be written down; asking again");
                            write_at = self.inner.now() + write_wait;
                            write_wait = (write_wait * 2).min(WRITE_RETRY_CAP);
                        }
                        Err(error) => return self.abandon(Undecided::from_store(error), report).await,
                    }
                }
                Some(ended) = self.tasks.join_next_with_id() => {
                    self.ended(ended, report);
                    // What else has ended meanwhile is written in the same statement.
                    while let Some(ended) = self.tasks.try_join_next_with_id() {
                        self.ended(ended, report);
                    }
                }
                () = sleep_until(next_renewal), if self.may_renew() => self.begin_renewal(),
                () = sleep_until(write_at), if self.may_write() => {}
            }
        }
    }

    // ---- leases

    /// Also for jobs that only wait to be written: nobody should take them over meanwhile.
    fn may_renew(&self) -> bool {
        self.renewing.is_none() && self.jobs.iter().any(HeldJob::is_renewed)
    }

    /// Extends the leases of everything not yet written, and the locks of what runs.
    fn begin_renewal(&mut self) {
        let (mut indices, mut holders, mut locks) = (Vec::new(), Vec::new(), Vec::new());
        for (index, job) in self.jobs.iter().enumerate().filter(|(_, job)| job.is_renewed()) {
            let Some(delivery) = &job.delivery else { continue };
            indices.push(index);
            holders.push((delivery.key().clone(), job.run.token));
            locks.push(job.lock());
        }
        let inner: &'a Inner = self.inner;
        let sent = inner.now();
        self.renewing = Some(
            async move {
                let (leases, locks) =
                    futures_util::join!(inner.store().renew(&inner.terms, &holders), extend_locks(inner, locks));
                Renewed { sent, indices, leases, locks }
            }
            .boxed(),
        );
    }

    /// Answers when to renew again. Only what is confirmed counts, and from when it was sent.
    fn take_renewal(&mut self, renewed: Renewed, interval: Duration) -> Instant {
        let Renewed { sent, indices, leases, locks } = renewed;
        let (leases, locks) = match (leases, locks) {
            (Ok(leases), Ok(locks)) => (leases, locks),
            // One failed renewal harms nothing; there is time for more.
            (Err(error), _) | (_, Err(error)) => {
                tracing::warn!(consumerName = %self.inner.terms.consumer, errorMessage = %error, "a lease could not be renewed; asking again");
                return self.inner.now() + interval / 4;
            }
        };
        let mut unconfirmed = false;
        for ((index, lease), lock) in indices.into_iter().zip(leases).zip(locks) {
            match (lease, lock) {
                (Renewal::LeaseLost, _) if self.jobs[index].is_lost_while_running() => {
                    self.stop_one(index, Stopped::LeaseLost);
                }
                (Renewal::Renewed, Renewal::Renewed) => {
                    self.jobs[index].deadline.renewed(sent.duration_since(self.origin));
                }
                _ => unconfirmed = true,
            }
        }
        if unconfirmed { self.inner.now() + interval / 4 } else { sent + interval }
    }

    // ---- stopping

    /// When the next handler must be told to go, or dropped.
    fn next_stop(&self) -> Option<Instant> {
        self.jobs.iter().filter(|job| job.may_be_stopped()).map(|job| job.stop_at(self.origin)).min()
    }

    /// Deadlines have come: tells the handlers, and a moment later drops them. The deadline leaves room for that moment.
    fn stop_due(&mut self) {
        let now = self.inner.now();
        for index in 0..self.jobs.len() {
            let job = &mut self.jobs[index];
            if !job.may_be_stopped() || job.stop_at(self.origin) > now {
                continue;
            }
            if job.drop_at.is_none() {
                job.cancel.cancel();
                // Counted from the deadline, not from now: this process may have been frozen meanwhile.
                job.drop_at = Some(self.origin + job.deadline.at() + job.deadline.grace());
            } else {
                let reason = if job.deadline.is_ceiling() { Stopped::Ceiling } else { Stopped::Unrenewed };
                self.stop_one(index, reason);
            }
        }
    }

    fn stop_one(&mut self, index: usize, reason: Stopped) {
        self.jobs[index].stopped = Some(reason);
        if let Some(abort) = &self.jobs[index].abort {
            abort.abort();
        }
    }

    /// A task has ended: by returning, by a panic outside the handler's own future, or because it was stopped.
    fn ended(&mut self, ended: Result<(Id, CallResult), JoinError>, report: &dyn Report) {
        let (id, result) = match ended {
            Ok((id, result)) => (id, Some(result)),
            Err(error) if error.is_panic() => {
                let id = error.id();
                (id, Some(Err(HandlerFailure::from_panic(&*error.into_panic()))))
            }
            Err(error) => (error.id(), None),
        };
        let part = self.by_task.remove(&id).unwrap_or_default();
        for &index in &part {
            self.jobs[index].running = false;
        }
        if let Some(Err(failure)) = &result
            && self.may_be_halved(&part)
        {
            if part.iter().any(|&index| self.jobs[index].claim.is_completed_inside()) {
                self.unsure.push((part, failure.clone()));
            } else {
                self.spawn_halves(&part);
            }
            return;
        }
        for index in part {
            match (&result, self.jobs[index].stopped) {
                (Some(result), _) => self.finished.push((index, result.clone())),
                // Its row tells whether the handler got as far as its commit.
                (None, _) if self.jobs[index].claim.is_completed_inside() => {
                    self.finished.push((index, Ok(Handled::Ran(Output::default()))));
                }
                (None, Some(Stopped::Ceiling)) => {
                    self.finished.push((index, Err(HandlerFailure::timeout(self.inner.policy.max_run))));
                }
                (None, Some(Stopped::LeaseLost)) => self.report(index, Outcome::LeaseLost, report),
                (None, Some(Stopped::Unrenewed) | None) => self.report_unrenewed(index, report),
            }
        }
    }

    /// Its try does not count: it is given back when this delivery is asked for again.
    fn report_unrenewed(&mut self, index: usize, report: &dyn Report) {
        let error = StoreError::new(StoreErrorKind::Unavailable, "the lease could not be renewed in time");
        if let Some(delivery) = &mut self.jobs[index].delivery {
            delivery.unreleased = Some(delivery.token());
        }
        self.report(index, Outcome::Undecided(Undecided::from_store(error)), report);
    }

    /// A call for several has failed, and one of them may be to blame: called again in halves, within the same try, the
    /// others lose nothing. Not when time is up.
    fn may_be_halved(&self, part: &[usize]) -> bool {
        let has_time = |index: &usize| self.jobs[*index].stopped.is_none() && self.jobs[*index].drop_at.is_none();
        part.len() > 1 && part.iter().all(has_time)
    }

    fn spawn_halves(&mut self, part: &[usize]) {
        let (first, second) = part.split_at(part.len().div_ceil(2));
        self.spawn(first.to_vec());
        self.spawn(second.to_vec());
    }

    // ---- writing

    fn may_write(&self) -> bool {
        self.writing.is_none() && !(self.finished.is_empty() && self.unsure.is_empty())
    }

    /// Writes everything finished: completions in one statement, failures each.
    fn begin_write(&mut self) {
        let (mut done, mut completions) = (Vec::new(), Vec::new());
        let (mut inside, mut keys) = (Vec::new(), Vec::new());
        let (mut failed, mut tries) = (Vec::new(), Vec::new());
        let mut locks = LocksByWrite::default();
        for (index, result) in std::mem::take(&mut self.finished) {
            let job = &self.jobs[index];
            let Some(delivery) = &job.delivery else { continue };
            match self.success(result) {
                // Where the effect was there already, the handler's own completion went with its refused transaction (T3).
                Ok(success) if job.claim.is_completed_inside() && success.already.is_none() => {
                    locks.inside.extend(job.lock());
                    keys.push(delivery.key().clone());
                    inside.push((index, success));
                }
                Ok(success) => {
                    locks.done.extend(job.lock());
                    let returned = success.output().map_or_else(Returned::default, returned);
                    completions.push(Completion { returned, ..job.claim.completion.clone() });
                    done.push((index, success));
                }
                Err(failure) => {
                    locks.failed.extend(job.lock());
                    let retry = self.inner.retry(&failure, job.run.attempt);
                    let (key, error) = (delivery.key().clone(), failure.message.clone());
                    tries.push(FailedTry { key, token: job.run.token, retry, error });
                    failed.push((index, failure, retry));
                }
            }
        }
        let unsure = std::mem::take(&mut self.unsure);
        let delivery_of = |index: &usize| self.jobs[*index].delivery.as_ref();
        keys.extend(
            unsure.iter().flat_map(|(part, _)| part).filter_map(delivery_of).map(|delivery| delivery.key().clone()),
        );
        let inner: &'a Inner = self.inner;
        self.writing = Some(
            async move {
                let (completed, found, recorded) =
                    futures_util::join!(complete(inner, completions), read(inner, &keys), fail(inner, &tries));
                unlock(inner, &locks.of_written(completed.is_ok(), found.is_ok(), recorded.is_ok())).await;
                Written { done, completed, inside, unsure, found, failed, recorded }
            }
            .boxed(),
        );
    }

    /// What a result is worth, if it says that the effect is there.
    fn success(&self, result: CallResult) -> Result<Done, HandlerFailure> {
        let already = match &result {
            Ok(Handled::Ran(_)) => None,
            Ok(Handled::Found) => Some(AlreadyDone::Probe),
            Err(failure) if self.inner.expects(failure) => Some(AlreadyDone::Domain),
            Err(_) => return result.map(|handled| Done { already: None, result: Ok(handled) }),
        };
        Ok(Done { already, result })
    }

    /// Reports what was written. What was not is finished still, and written again.
    fn take_written(&mut self, written: Written, report: &dyn Report) -> Result<(), StoreError> {
        let Written { done, completed, inside, unsure, found, failed, recorded } = written;
        if completed.is_ok() && recorded.is_ok() {
            CrashPoint::Recorded.pass();
        }
        let completed = match completed {
            Ok(answers) => {
                for ((index, done), fenced) in done.into_iter().zip(answers) {
                    self.report_done(index, done, fenced, report);
                }
                Ok(())
            }
            Err(error) => {
                self.finished.extend(done.into_iter().map(|(index, done)| (index, done.result)));
                Err(error)
            }
        };
        let found = match found {
            Ok(states) => {
                let mut states = states.into_iter();
                for ((index, done), state) in inside.into_iter().zip(states.by_ref()) {
                    self.take_inside(index, done, state, report);
                }
                for (part, failure) in unsure {
                    let states: Vec<_> = states.by_ref().take(part.len()).collect();
                    self.take_unsure(part, &failure, &states);
                }
                Ok(())
            }
            Err(error) => {
                self.unsure.extend(unsure);
                self.finished.extend(inside.into_iter().map(|(index, done)| (index, done.result)));
                Err(error)
            }
        };
        let recorded = match recorded {
            Ok(answers) => {
                for ((index, failure, retry), FailureWritten { fenced, state, .. }) in failed.into_iter().zip(answers) {
                    let attempt = self.jobs[index].run.attempt;
                    let outcome = match fenced {
                        Fenced::Applied => Outcome::Failed { attempt, retry_in: retry_in(&state, retry), failure },
                        Fenced::LeaseLost => Outcome::LeaseLost,
                    };
                    self.report(index, outcome, report);
                }
                Ok(())
            }
            Err(error) => {
                self.finished.extend(failed.into_iter().map(|(index, failure, _)| (index, Err(failure))));
                Err(error)
            }
        };
        completed.and(found).and(recorded)
    }

    /// A handler said that it completed its job inside its own transaction: the row tells whether that was committed.
    fn take_inside(&mut self, index: usize, done: Done, state: State, report: &dyn Report) {
        let token = self.jobs[index].run.token;
        match state {
            State::Completed { token: Some(by), .. } if by == token => {
                self.report_done(index, done, Fenced::Applied, report);
            }
            // Still held, so what the handler wrote there is not kept.
            State::Processing { token: by, .. } if by == token => {
                self.jobs[index].claim.completed_inside.store(false, Ordering::Release);
                match self.jobs[index].stopped {
                    None => self.finished.push((index, Err(HandlerFailure::from_uncommitted_completion()))),
                    Some(Stopped::Ceiling) => {
                        self.finished.push((index, Err(HandlerFailure::timeout(self.inner.policy.max_run))));
                    }
                    Some(Stopped::Unrenewed | Stopped::LeaseLost) => self.report_unrenewed(index, report),
                }
            }
            _ => self.report(index, Outcome::LeaseLost, report),
        }
    }

    /// Nothing of it is committed: it is halved as others are. A commit whose reply was lost may still come, but then the
    /// rows refuse to be completed inside another transaction.
    fn take_unsure(&mut self, part: Vec<usize>, failure: &HandlerFailure, states: &[State]) {
        let is_held = |(index, state): (&usize, &State)| matches!(state, State::Processing { token, .. } if *token == self.jobs[*index].run.token);
        if self.may_be_halved(&part) && part.iter().zip(states).all(is_held) {
            for &index in &part {
                self.jobs[index].claim.completed_inside.store(false, Ordering::Release);
            }
            self.spawn_halves(&part);
        } else {
            self.finished.extend(part.into_iter().map(|index| (index, Err(failure.clone()))));
        }
    }

    fn report_done(&mut self, index: usize, done: Done, fenced: Fenced, report: &dyn Report) {
        let run = self.jobs[index].run;
        let outcome = match fenced {
            Fenced::Applied => Outcome::Completed {
                attempt: run.attempt,
                takeover: run.kind == RunKind::Takeover,
                already_done: done.already,
                output: done.into_output(),
            },
            Fenced::LeaseLost => Outcome::LeaseLost,
        };
        self.report(index, outcome, report);
    }

    fn report(&mut self, index: usize, outcome: Outcome, report: &dyn Report) {
        if let Some(mut delivery) = self.jobs[index].delivery.take() {
            delivery.renew_token();
            report.decided(delivery, outcome);
        }
    }

    /// Stops everything and gives back what is not decided, once no handler runs any more. Their rows stay `PROCESSING`
    /// until the lease runs out: a handler that was dropped may have had its effect.
    async fn abandon(mut self, undecided: Undecided, report: &dyn Report) {
        self.cancel.cancel();
        self.tasks.shutdown().await;
        for index in 0..self.jobs.len() {
            self.report(index, Outcome::Undecided(undecided.clone()), report);
        }
    }
}

impl HeldJob {
    /// One that was told to go must not be given more time: it is gone before its lease ends.
    fn is_renewed(&self) -> bool {
        self.delivery.is_some() && self.drop_at.is_none() && self.stopped.is_none()
    }

    /// One that completed its job itself holds no lease any more once that is committed, and may have more to do.
    fn is_lost_while_running(&self) -> bool {
        self.running && !self.claim.is_completed_inside()
    }

    fn may_be_stopped(&self) -> bool {
        self.running && self.stopped.is_none()
    }

    fn stop_at(&self, origin: Instant) -> Instant {
        self.drop_at.unwrap_or(origin + self.deadline.at())
    }

    fn lock(&self) -> Option<LockRequest> {
        lock_request(self.delivery.as_ref()?)
    }
}

fn claim_of(inner: &Inner, delivery: &Delivery, run: &Run) -> HeldClaim {
    let request = delivery.request.clone();
    let returned = Returned::default();
    HeldClaim {
        terms: inner.terms.clone(),
        completion: Completion { request, attempt: run.attempt, fence: run.fence, returned },
        completed_inside: AtomicBool::new(false),
    }
}

async fn complete(inner: &Inner, completions: Vec<Completion>) -> Result<Vec<Fenced>, StoreError> {
    match completions.is_empty() {
        true => Ok(Vec::new()),
        false => inner.together.complete(inner.store(), &inner.terms, completions).await,
    }
}

async fn read(inner: &Inner, keys: &[EventKey]) -> Result<Vec<State>, StoreError> {
    match keys.is_empty() {
        true => Ok(Vec::new()),
        false => inner.store().read(&inner.terms.consumer, keys).await,
    }
}

async fn fail(inner: &Inner, tries: &[FailedTry]) -> Result<Vec<FailureWritten>, StoreError> {
    match tries.is_empty() {
        true => Ok(Vec::new()),
        false => inner.store().fail(&inner.terms, tries).await,
    }
}

/// Extends the locks that there are; the others need none.
async fn extend_locks(inner: &Inner, locks: Vec<Option<LockRequest>>) -> Result<Vec<Renewal>, StoreError> {
    let requests: Vec<_> = locks.iter().flatten().cloned().collect();
    let mut answers =
        if requests.is_empty() { Vec::new() } else { inner.store().extend_locks(&inner.terms, &requests).await? }
            .into_iter();
    let answer = |lock: Option<LockRequest>| match lock {
        Some(_) => answers.next().unwrap_or(Renewal::Unconfirmed),
        None => Renewal::Renewed,
    };
    Ok(locks.into_iter().map(answer).collect())
}

/// The answer of what is on its way; never, if nothing is.
async fn answer_of<T>(on_its_way: &mut Option<BoxFuture<'_, T>>) -> T {
    match on_its_way {
        Some(answer) => answer.await,
        None => std::future::pending().await,
    }
}
