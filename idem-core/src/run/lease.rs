//! Claim first, then the handler, then the completion (T2): for effects outside the guard's database.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::atomic::retry_in;
use super::{CrashPoint, Delivery, Inner, Outcome, Report, Undecided, caught};
use crate::handler::{HandlerFailure, Job};
use crate::key::EventKey;
use crate::machine::{Decision, Run, RunDeadline, RunKind, Token};
use crate::store::{
    Completion, FailedTry, FailureWritten, Fenced, Renewal, Retry, Returned, StoreError, StoreErrorKind,
};

/// The wait before a write that the store did not answer is asked again: from here, doubling, to [`WRITE_RETRY_CAP`].
const WRITE_RETRY: Duration = Duration::from_millis(50);
const WRITE_RETRY_CAP: Duration = Duration::from_secs(2);

pub(super) async fn run(
    inner: &Arc<Inner>,
    mut deliveries: Vec<Delivery>,
    stop: &CancellationToken,
    report: &dyn Report,
) {
    let sent = inner.now();
    let claimed = tokio::select! {
        biased;
        () = stop.cancelled() => Err(Undecided::Cancelled),
        claimed = claim(inner, &mut deliveries) => claimed.map_err(Undecided::from_store),
    };
    report.claimed();
    let answers = match claimed {
        Ok(answers) => answers,
        Err(undecided) => {
            for delivery in deliveries {
                report.decided(delivery, Outcome::Undecided(undecided.clone()));
            }
            return;
        }
    };
    CrashPoint::Claimed.pass();

    let mut held = Vec::new();
    for (mut delivery, answer) in deliveries.into_iter().zip(answers) {
        if let Decision::Run(run) = answer.decision {
            held.push((delivery, run));
        } else {
            let outcome = inner.outcome(&delivery, &answer);
            delivery.renew_token();
            report.decided(delivery, outcome);
        }
    }
    if held.is_empty() {
        return;
    }
    let deadline = RunDeadline::claimed(Duration::ZERO, inner.policy.lease, inner.policy.max_run);
    if inner.now() >= sent + deadline.at() {
        // The answer came so late that the leases may be over already: no handler may begin. The claims are given back first
        // when these deliveries are asked for again.
        for (mut delivery, _) in held {
            let error = StoreError::new(StoreErrorKind::Unavailable, "the claim was answered after its lease");
            delivery.unreleased = Some(delivery.token());
            delivery.renew_token();
            report.decided(delivery, Outcome::Undecided(Undecided::from_store(error)));
        }
        return;
    }
    Shift::begin(inner, held, sent, deadline, stop).work(stop, report).await;
}

async fn claim(inner: &Inner, deliveries: &mut [Delivery]) -> Result<Vec<crate::store::Answer>, StoreError> {
    // Tries that were stopped because the store was away give their attempt back first.
    let owed: Vec<_> =
        deliveries.iter().filter_map(|delivery| Some((delivery.key().clone(), delivery.unreleased?))).collect();
    if !owed.is_empty() {
        // Whether a row was still theirs or not, nothing is owed afterwards.
        inner.store().release(&inner.terms, &owed).await?;
        deliveries.iter_mut().for_each(|delivery| delivery.unreleased = None);
    }
    let requests: Vec<_> = deliveries.iter().map(|delivery| delivery.request.clone()).collect();
    inner.store().claim(&inner.terms, &requests).await
}

/// The jobs of one claim: their handlers run side by side, their leases are renewed together, and what is finished is
/// written together.
struct Shift<'a> {
    inner: &'a Arc<Inner>,
    deadline: RunDeadline,
    /// What the deadline counts from.
    origin: Instant,
    /// By the position they were claimed in. Taken when reported.
    jobs: Vec<Held>,
    tasks: JoinSet<Result<(), HandlerFailure>>,
    /// Which jobs a task runs: one, or all of a batch handler.
    by_task: HashMap<Id, Vec<usize>>,
    cancel: CancellationToken,
    /// Set when the handlers were told to go: at this instant they are dropped.
    drop_at: Option<Instant>,
    /// Finished and not yet written.
    finished: Vec<Finished>,
    /// A write on its way. Beside the renewals, which it must not hold up.
    writing: Option<BoxFuture<'a, Written>>,
    /// A renewal on its way, and when it was sent.
    renewing: Option<BoxFuture<'a, Renewed>>,
}

type Finished = (usize, Result<(), HandlerFailure>);

/// The answers to what was finished.
struct Written {
    done: Vec<Finished>,
    completed: Result<Vec<Fenced>, StoreError>,
    failed: Vec<(usize, HandlerFailure, Retry)>,
    recorded: Result<Vec<FailureWritten>, StoreError>,
}

/// The answer to a renewal.
struct Renewed {
    sent: Instant,
    indices: Vec<usize>,
    answer: Result<Vec<Renewal>, StoreError>,
}

struct Held {
    delivery: Option<Delivery>,
    run: Run,
    abort: AbortHandle,
    /// The handler was told to go, for this reason.
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
    fn begin(
        inner: &'a Arc<Inner>,
        held: Vec<(Delivery, Run)>,
        sent: Instant,
        deadline: RunDeadline,
        stop: &CancellationToken,
    ) -> Self {
        let mut shift = Self {
            inner,
            deadline,
            origin: sent,
            jobs: Vec::with_capacity(held.len()),
            tasks: JoinSet::new(),
            by_task: HashMap::new(),
            cancel: stop.child_token(),
            drop_at: None,
            finished: Vec::new(),
            writing: None,
            renewing: None,
        };
        let per_call = if inner.spec.batch { held.len() } else { 1 };
        let mut held = held.into_iter().peekable();
        while held.peek().is_some() {
            shift.spawn(held.by_ref().take(per_call).collect());
        }
        shift
    }

    /// One call of the handler on a task of its own, so that one that blocks its thread cannot stop the renewals.
    fn spawn(&mut self, mut part: Vec<(Delivery, Run)>) {
        let jobs: Vec<Job> =
            part.iter().map(|(delivery, run)| self.inner.job(delivery, run, self.cancel.child_token())).collect();
        let events = part.iter_mut().map(|(delivery, _)| delivery.take_event()).collect();
        let inner = Arc::clone(self.inner);
        let abort = self
            .tasks
            .spawn(async move { caught(inner.handler.call(&jobs, events, None, &inner.guard.states)).await.map(drop) });
        let first = self.jobs.len();
        self.by_task.insert(abort.id(), (first..first + part.len()).collect());
        self.jobs.extend(part.into_iter().map(|(delivery, run)| Held {
            delivery: Some(delivery),
            run,
            abort: abort.clone(),
            stopped: None,
            running: true,
        }));
    }

    async fn work(mut self, stop: &CancellationToken, report: &dyn Report) {
        let interval = RunDeadline::renewal_interval(self.inner.policy.lease);
        let mut next_renewal = self.origin + interval;
        let mut write_wait = WRITE_RETRY;
        let mut write_at = self.origin;
        while self.jobs.iter().any(|job| job.delivery.is_some()) {
            if self.writing.is_none() && !self.finished.is_empty() && write_at <= self.inner.now() {
                CrashPoint::Handled.pass();
                self.begin_write();
            }
            let give_up = self.drop_at.unwrap_or(self.origin + self.deadline.at());
            tokio::select! {
                biased;
                () = stop.cancelled() => return self.abandon(Undecided::Cancelled, report).await,
                () = sleep_until(give_up), if self.any_running() => self.stop_all(),
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
                () = sleep_until(write_at), if self.writing.is_none() && !self.finished.is_empty() => {}
            }
        }
    }

    fn may_renew(&self) -> bool {
        // Also for jobs that only wait to be written: nobody should take them over meanwhile.
        self.renewing.is_none() && self.drop_at.is_none()
    }

    fn any_running(&self) -> bool {
        self.jobs.iter().any(|job| job.running && job.stopped.is_none())
    }

    /// Extends the leases of everything not yet written.
    fn begin_renewal(&mut self) {
        let held = |(index, job): (usize, &Held)| Some((index, (job.delivery.as_ref()?.key().clone(), job.run.token)));
        let (indices, holders): (Vec<usize>, Vec<(EventKey, Token)>) =
            self.jobs.iter().enumerate().filter_map(held).unzip();
        let inner: &'a Inner = self.inner;
        let sent = inner.now();
        self.renewing = Some(
            async move {
                let answer = inner.store().renew(&inner.terms, &holders).await;
                Renewed { sent, indices, answer }
            }
            .boxed(),
        );
    }

    /// Answers when to renew again. Only what is confirmed counts, and from when it was sent.
    fn take_renewal(&mut self, Renewed { sent, indices, answer }: Renewed, interval: Duration) -> Instant {
        match answer {
            Ok(answers) => {
                self.deadline.renewed(sent.duration_since(self.origin));
                for (index, renewal) in indices.into_iter().zip(answers) {
                    if renewal == Renewal::LeaseLost && self.jobs[index].running {
                        self.stop_one(index, Stopped::LeaseLost);
                    }
                }
                sent + interval
            }
            // One failed renewal harms nothing; there is time for more.
            Err(error) => {
                tracing::warn!(consumerName = %self.inner.terms.consumer, errorMessage = %error, "a lease could not be renewed; asking again");
                self.inner.now() + interval / 4
            }
        }
    }

    fn stop_one(&mut self, index: usize, reason: Stopped) {
        self.jobs[index].stopped = Some(reason);
        self.jobs[index].abort.abort();
    }

    /// The deadline has come: tells the handlers, and a moment later drops them. The deadline leaves room for that moment.
    fn stop_all(&mut self) {
        if self.drop_at.is_none() {
            self.cancel.cancel();
            // Counted from the deadline, not from now: this process may have been frozen meanwhile.
            self.drop_at = Some(self.origin + self.deadline.at() + self.deadline.grace());
            return;
        }
        let reason = if self.deadline.is_ceiling() { Stopped::Ceiling } else { Stopped::Unrenewed };
        for index in 0..self.jobs.len() {
            if self.jobs[index].running && self.jobs[index].stopped.is_none() {
                self.stop_one(index, reason);
            }
        }
    }

    /// A task has ended: by returning, by a panic outside the handler's own future, or because it was stopped.
    fn ended(&mut self, ended: Result<(Id, Result<(), HandlerFailure>), tokio::task::JoinError>, report: &dyn Report) {
        let (id, result) = match ended {
            Ok((id, result)) => (id, Some(result)),
            Err(error) if error.is_panic() => {
                let id = error.id();
                (id, Some(Err(HandlerFailure::from_panic(&*error.into_panic()))))
            }
            Err(error) => (error.id(), None),
        };
        for index in self.by_task.remove(&id).unwrap_or_default() {
            self.jobs[index].running = false;
            match (&result, self.jobs[index].stopped) {
                (Some(result), _) => self.finished.push((index, result.clone())),
                (None, Some(Stopped::Ceiling)) => {
                    self.finished.push((index, Err(HandlerFailure::timeout(self.inner.policy.max_run))));
                }
                (None, Some(Stopped::LeaseLost)) => self.report(index, Outcome::LeaseLost, report),
                (None, Some(Stopped::Unrenewed) | None) => {
                    let error = StoreError::new(StoreErrorKind::Unavailable, "the lease could not be renewed in time");
                    if let Some(delivery) = &mut self.jobs[index].delivery {
                        delivery.unreleased = Some(delivery.token());
                    }
                    self.report(index, Outcome::Undecided(Undecided::from_store(error)), report);
                }
            }
        }
    }

    /// Writes everything finished: completions in one statement, failures each.
    fn begin_write(&mut self) {
        let (mut done, mut completions) = (Vec::new(), Vec::new());
        let (mut failed, mut tries) = (Vec::new(), Vec::new());
        for (index, result) in std::mem::take(&mut self.finished) {
            let Held { delivery: Some(delivery), run, .. } = &self.jobs[index] else { continue };
            match result {
                Err(failure) if !self.inner.expects(&failure) => {
                    let retry = self.inner.retry(&failure, run.attempt);
                    let (key, error) = (delivery.key().clone(), failure.message.clone());
                    tries.push(FailedTry { key, token: run.token, retry, error });
                    failed.push((index, failure, retry));
                }
                result => {
                    let request = delivery.request.clone();
                    completions.push(Completion {
                        request,
                        attempt: run.attempt,
                        fence: run.fence,
                        returned: Returned::default(),
                    });
                    done.push((index, result));
                }
            }
        }
        let inner: &'a Inner = self.inner;
        self.writing = Some(
            async move {
                let completed = match completions.is_empty() {
                    true => Ok(Vec::new()),
                    false => inner.together.complete(inner.store(), &inner.terms, completions).await,
                };
                let recorded = match tries.is_empty() {
                    true => Ok(Vec::new()),
                    false => inner.store().fail(&inner.terms, &tries).await,
                };
                Written { done, completed, failed, recorded }
            }
            .boxed(),
        );
    }

    /// Reports what was written. What was not is finished still, and written again.
    fn take_written(&mut self, written: Written, report: &dyn Report) -> Result<(), StoreError> {
        let Written { done, completed, failed, recorded } = written;
        if completed.is_ok() && recorded.is_ok() {
            CrashPoint::Recorded.pass();
        }
        let completed = match completed {
            Ok(answers) => {
                for ((index, result), fenced) in done.into_iter().zip(answers) {
                    let outcome = self.completed(index, result.is_err(), fenced);
                    self.report(index, outcome, report);
                }
                Ok(())
            }
            Err(error) => {
                self.finished.extend(done);
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
        completed.and(recorded)
    }

    fn completed(&self, index: usize, already_done: bool, fenced: Fenced) -> Outcome {
        let run = self.jobs[index].run;
        match fenced {
            Fenced::Applied => {
                Outcome::Completed { attempt: run.attempt, takeover: run.kind == RunKind::Takeover, already_done }
            }
            Fenced::LeaseLost => Outcome::LeaseLost,
        }
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

/// The answer of what is on its way; never, if nothing is.
async fn answer_of<T>(on_its_way: &mut Option<BoxFuture<'_, T>>) -> T {
    match on_its_way {
        Some(answer) => answer.await,
        None => std::future::pending().await,
    }
}
