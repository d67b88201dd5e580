//! Claim first, then the handler, then the completion (T2): for effects outside the guard's database.

mod call;
mod shift;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::shift::Shift;
use super::{BUSY_LOCK, CrashPoint, Delivery, Inner, Outcome, Report, Undecided};
use crate::machine::{Decision, Run, RunDeadline, Token};
use crate::store::{Answer, LockRequest, StoreError, StoreErrorKind};

/// How long a claim may still be answered after it was stopped.
const LAST_ANSWER: Duration = Duration::from_secs(1);

pub(super) async fn run(
    inner: &Arc<Inner>,
    mut deliveries: Vec<Delivery>,
    stop: &CancellationToken,
    report: &dyn Report,
) {
    let sent = inner.now();
    let claimed = claim_unless_stopped(inner, &mut deliveries, stop).await;
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

    let (held, others) = sort_out(deliveries, answers);
    free_locks(inner, others.iter().filter(|(_, answer)| answer.is_some()).map(|(delivery, _)| delivery)).await;
    for (mut delivery, answer) in others {
        let outcome = match answer {
            Some(answer) => inner.outcome(&delivery, &answer),
            None => Outcome::InProgress { wait: BUSY_LOCK },
        };
        delivery.renew_token();
        report.decided(delivery, outcome);
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

/// As [`claim`]. If it is stopped while the claim is on its way, jobs whose handlers will not begin are given back, so that
/// the next process neither waits for their leases nor counts their tries.
async fn claim_unless_stopped(
    inner: &Inner,
    deliveries: &mut [Delivery],
    stop: &CancellationToken,
) -> Result<Vec<Option<Answer>>, Undecided> {
    if stop.is_cancelled() {
        return Err(Undecided::Cancelled);
    }
    let answers = {
        let mut claiming = pin!(claim(inner, deliveries));
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            claimed = &mut claiming => return claimed.map_err(Undecided::from_store),
        }
        // Not dropped at once: what the store has done would not be known.
        let Ok(Ok(answers)) = timeout(LAST_ANSWER, claiming).await else { return Err(Undecided::Cancelled) };
        answers
    };
    let runs = |answer: &Option<Answer>| matches!(answer, Some(Answer { decision: Decision::Run(_), .. }));
    let held: Vec<_> = deliveries
        .iter()
        .zip(&answers)
        .filter(|(_, answer)| runs(answer))
        .map(|(delivery, _)| (delivery.key().clone(), delivery.token()))
        .collect();
    if !held.is_empty()
        && let Err(error) = inner.store().release(&inner.terms, &held).await
    {
        tracing::debug!(consumerName = %inner.terms.consumer, errorMessage = %error, "claims were not released and run out");
    }
    free_locks(inner, deliveries.iter()).await;
    Err(Undecided::Cancelled)
}

/// One answer for each delivery; none for those whose lock somebody else holds.
async fn claim(inner: &Inner, deliveries: &mut [Delivery]) -> Result<Vec<Option<Answer>>, StoreError> {
    // Tries that were stopped because the store was away give their attempt back first.
    let owed: Vec<_> =
        deliveries.iter().filter_map(|delivery| Some((delivery.key().clone(), delivery.unreleased?))).collect();
    if !owed.is_empty() {
        // Whether a row was still theirs or not, nothing is owed afterwards.
        inner.store().release(&inner.terms, &owed).await?;
        // Nor do they keep their own locks from themselves.
        let locks: Vec<_> =
            deliveries.iter().filter_map(|delivery| lock_under(delivery, delivery.unreleased?)).collect();
        unlock(inner, &locks).await;
        deliveries.iter_mut().for_each(|delivery| delivery.unreleased = None);
    }
    let admitted = take_locks(inner, deliveries).await?;
    let requests: Vec<_> = deliveries
        .iter()
        .zip(&admitted)
        .filter(|(_, admitted)| **admitted)
        .map(|(delivery, _)| delivery.request.clone())
        .collect();
    let mut answers =
        if requests.is_empty() { Vec::new() } else { inner.store().claim(&inner.terms, &requests).await? }.into_iter();
    Ok(admitted.into_iter().map(|admitted| if admitted { answers.next() } else { None }).collect())
}

/// Takes the locks before the claims, so that a job which has to wait for one costs no attempt (L5). Their leases count from
/// later than the first request was sent, like the claims'.
async fn take_locks(inner: &Inner, deliveries: &[Delivery]) -> Result<Vec<bool>, StoreError> {
    let mut admitted = vec![true; deliveries.len()];
    let (places, requests): (Vec<_>, Vec<_>) =
        deliveries.iter().enumerate().filter_map(|(place, delivery)| Some((place, lock_request(delivery)?))).unzip();
    if !requests.is_empty() {
        let taken = inner.store().lock(&inner.terms, &requests).await?;
        for (place, taken) in places.into_iter().zip(taken) {
            admitted[place] = taken;
        }
    }
    Ok(admitted)
}

fn lock_request(delivery: &Delivery) -> Option<LockRequest> {
    lock_under(delivery, delivery.token())
}

fn lock_under(delivery: &Delivery, token: Token) -> Option<LockRequest> {
    Some(LockRequest { name: delivery.lock()?.clone(), token, key: delivery.key().clone() })
}

/// Frees the locks of deliveries that do not run. A lock that cannot be freed runs out by itself.
async fn free_locks(inner: &Inner, deliveries: impl Iterator<Item = &Delivery>) {
    let requests: Vec<_> = deliveries.filter_map(lock_request).collect();
    unlock(inner, &requests).await;
}

async fn unlock(inner: &Inner, requests: &[LockRequest]) {
    if !requests.is_empty()
        && let Err(error) = inner.store().unlock(requests).await
    {
        tracing::debug!(consumerName = %inner.terms.consumer, errorMessage = %error, "locks were not freed and run out");
    }
}

type Held = Vec<(Delivery, Run)>;
type Others = Vec<(Delivery, Option<Answer>)>;

fn sort_out(deliveries: Vec<Delivery>, answers: Vec<Option<Answer>>) -> (Held, Others) {
    let (mut held, mut others) = (Vec::new(), Vec::new());
    for (delivery, answer) in deliveries.into_iter().zip(answers) {
        match answer {
            Some(Answer { decision: Decision::Run(run), .. }) => held.push((delivery, run)),
            answer => others.push((delivery, answer)),
        }
    }
    (held, others)
}
