//! The suite that every store must pass, as tests that [`store_contract!`](crate::store_contract) makes for one store.
//!
//! Each check works under a consumer name of its own, so that all of them can share one database.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use tokio::runtime::Handle;
use uuid::Uuid;

use super::{
    Answer, ClaimRequest, Completion, Engine, FailedTry, FailureWritten, Fenced, LockRequest, Purge, Refusal, Renewal,
    Retry, Returned, Store, StoreError, StoreErrorKind, Terms, Tx,
};
use crate::machine::{
    Decision, Delivered, Failure, Input, OperatorAction, Record, Run, RunKind, State, Token, Transition, TryFailed,
    step,
};
use crate::timestamp::Timestamp;
use crate::{ConsumerName, EventKey, Fingerprint, LockName};

mod histories;
mod locking;
mod upkeep;

pub use histories::random_histories;
pub use locking::*;
pub use upkeep::*;

/// A store whose tables are empty and migrated, and what the checks need besides.
pub trait Subject: Send + Sync + 'static {
    /// The store.
    fn store(&self) -> Arc<dyn Store>;

    /// Lets time pass: sets the clock forward, or all instants of all rows back, those for people included.
    fn pass(&self, time: Duration) -> BoxFuture<'_, ()>;

    /// Removes a row.
    fn forget<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> BoxFuture<'a, ()>;

    /// The count of duplicates on a row.
    fn duplicates<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> BoxFuture<'a, u64>;
}

/// Makes one test for each check of the [contract](crate::store::contract). The argument is an async function without
/// parameters that makes a [`Subject`](crate::store::contract::Subject).
#[macro_export]
macro_rules! store_contract {
    ($subject:path) => {
        $crate::store_contract! { @checks $subject:
            a_new_job_runs
            a_completed_job_is_a_duplicate
            another_payload_is_a_conflict
            a_job_that_is_held_is_in_progress
            an_expired_job_is_taken_over_and_its_former_holder_is_fenced_off
            a_failed_job_waits_until_it_is_due
            a_terminal_failure_is_final
            attempts_run_out_by_failing
            attempts_run_out_by_crashing
            a_released_job_gets_its_attempt_back
            a_lost_reply_is_asked_again
            renewals_extend_only_what_is_held
            a_renewal_is_for_one_row
            nothing_is_written_over_a_completed_job
            a_completion_without_a_row_writes_it
            twins_in_a_batch_are_told_of_each_other
            a_twin_is_claimed_when_its_first_conflicts
            twins_among_completions_keep_their_fences
            answers_come_in_the_order_of_the_requests
            keys_are_compared_byte_by_byte
            consumers_are_apart
            consumers_are_apart_even_with_one_token
            texts_that_do_not_fit_are_stored_as_they_can_be
            empty_batches_are_answered
            one_of_many_gets_a_new_job
            one_of_many_takes_over
            overlapping_batches_run_each_job_once
            overlapping_transactions_run_each_job_once
            a_commit_completes
            a_rollback_undoes
            a_dropped_transaction_undoes
            a_transaction_takes_over_and_gives_back
            a_transaction_completes_the_lease_of_its_token
            a_claim_waits_for_the_transaction_before_it
            savepoints_nest
            failures_are_written_over_claims_of_the_transaction
            what_is_overwritten_is_wholly_so
            a_store_that_was_migrated_twice_is_as_before
            a_store_answers_pings
            what_a_handler_returned_is_kept
            what_handlers_returned_in_a_transaction_is_kept
            duplicates_are_counted_on_their_rows
            an_operator_changes_what_nobody_holds
            an_operator_is_refused_while_a_lease_is_alive
            a_worker_cannot_write_over_an_operator
            a_purge_removes_only_what_ended_long_ago
            a_purge_goes_in_batches
            a_purge_is_of_one_consumer_if_asked
            a_purge_beside_claims_harms_none
            a_lock_is_held_by_one
            a_lock_runs_out_with_its_lease
            one_of_many_takes_a_lock
            a_transaction_and_a_job_exclude_each_other
            a_purge_keeps_locks_that_are_held
        }
        #[test]
        fn random_histories_agree_with_the_machine() {
            let runtime = ::tokio::runtime::Runtime::new().expect("a runtime starts");
            let subject = runtime.block_on($subject());
            $crate::store::contract::random_histories(runtime.handle(), &subject);
        }
    };
    (@checks $subject:path: $($check:ident)+) => {
        $(
            #[::tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $check() {
                $crate::store::contract::$check(&$subject().await).await;
            }
        )+
    };
}

/// Long enough that no check runs into its end by itself.
const LEASE: Duration = Duration::from_secs(3600);
const MAX_ATTEMPTS: u32 = 3;
/// How many at once, where one must win.
const CROWD: usize = 12;

// ---- what a claim finds

/// Nothing: it runs, and the row holds the lease.
pub async fn a_new_job_runs(subject: &impl Subject) {
    let job = Job::new(subject, "new");
    let answer = job.claim(1).await;
    let locked_until = answer.now.plus(LEASE);
    let run = Run { kind: RunKind::Fresh, token: token(1), attempt: 1, fence: 1, locked_until };
    assert_eq!(answer.decision, Decision::Run(run));
    assert_eq!(answer.first_message_id, None);
    assert_eq!(answer.error, None);
    let record = Record { payload: Some(payload(0)), attempts: 1, fence: 1 };
    assert_eq!(answer.state, State::Processing { record, token: token(1), locked_until });
    assert_eq!(job.read().await, answer.state, "what was answered is what is stored");
}

/// A completed job: skipped, and the first delivery is named.
pub async fn a_completed_job_is_a_duplicate(subject: &impl Subject) {
    let job = Job::new(subject, "completed");
    let run = job.run(1).await;
    assert_eq!(job.complete(&run).await, Fenced::Applied);
    let completed = job.read().await;
    assert_eq!(completed.token(), Some(token(1)));
    for time in [Duration::ZERO, 10 * LEASE] {
        subject.pass(time).await;
        let answer = job.claim(2).await;
        assert_eq!(answer.decision, Decision::Duplicate);
        assert_eq!(answer.first_message_id, Some("message 1".to_owned()));
        assert_eq!(answer.state, completed);
    }
    assert_eq!(job.read().await, completed);
}

/// The same key with another payload: a conflict in every state, and the row stays. No payload proves nothing.
pub async fn another_payload_is_a_conflict(subject: &impl Subject) {
    let job = Job::new(subject, "conflict");
    let conflicts = async || {
        let before = job.read().await;
        let answer = job.claim_one(&ClaimRequest { payload: Some(payload(9)), ..job.request(99) }).await;
        assert_eq!(answer.decision, Decision::Conflict, "{before:?}");
        assert_eq!(job.read().await, before);
    };
    job.run(1).await;
    conflicts().await;
    subject.pass(LEASE).await;
    conflicts().await;
    job.run(2).await;
    job.release(token(2)).await;
    conflicts().await;
    job.run(3).await;
    job.fail(token(3), Retry::After(Duration::ZERO)).await;
    conflicts().await;
    let run = job.run(4).await;
    job.complete(&run).await;
    conflicts().await;

    let unknown = Job::new(subject, "without payload");
    let without = ClaimRequest { payload: None, ..unknown.request(1) };
    assert!(matches!(unknown.claim_one(&without).await.decision, Decision::Run(_)));
    assert!(matches!(unknown.claim(2).await.decision, Decision::InProgress { .. }));
    subject.pass(2 * LEASE).await;
    unknown.run(3).await;
    let record = *unknown.read().await.record().expect("there is a row");
    assert_eq!(record.payload, Some(payload(0)), "the first payload that is known is kept");
}

/// A job that another worker holds: come back.
pub async fn a_job_that_is_held_is_in_progress(subject: &impl Subject) {
    let job = Job::new(subject, "held");
    let run = job.run(1).await;
    let held = job.read().await;
    let answer = job.claim(2).await;
    assert_eq!(answer.decision, Decision::InProgress { until: run.locked_until });
    assert_eq!(answer.first_message_id, Some("message 1".to_owned()));
    assert_eq!(job.read().await, held);
    assert_eq!(job.complete(&run).await, Fenced::Applied, "asking does not disturb the holder");
}

/// A lease that has run out: one takes over, and whatever the former holder writes is refused.
pub async fn an_expired_job_is_taken_over_and_its_former_holder_is_fenced_off(subject: &impl Subject) {
    let job = Job::new(subject, "expired");
    let former = job.run(1).await;
    subject.pass(LEASE).await;
    let answer = job.claim(2).await;
    let locked_until = answer.now.plus(LEASE);
    let run = Run { kind: RunKind::Takeover, token: token(2), attempt: 2, fence: 2, locked_until };
    assert_eq!(answer.decision, Decision::Run(run));
    let held = job.read().await;
    assert_eq!(held, answer.state);
    assert_eq!(job.complete(&former).await, Fenced::LeaseLost);
    assert_eq!(job.renew(former.token).await, Renewal::LeaseLost);
    assert_eq!(job.release(former.token).await, Fenced::LeaseLost);
    let failed = job.fail(former.token, Retry::Never).await;
    assert_eq!((failed.fenced, failed.state), (Fenced::LeaseLost, held));
    assert_eq!(job.read().await, held);
    assert_eq!(job.complete(&run).await, Fenced::Applied);
    assert_eq!(job.complete(&former).await, Fenced::LeaseLost);
}

/// A failed job: not before its time, then a retry.
pub async fn a_failed_job_waits_until_it_is_due(subject: &impl Subject) {
    let job = Job::new(subject, "failed");
    job.run(1).await;
    let wait = Duration::from_secs(600);
    let failed = job.fail(token(1), Retry::After(wait)).await;
    let at = failed.now.plus(wait);
    assert_eq!(failed.fenced, Fenced::Applied);
    assert!(matches!(failed.state, State::Failed { failure: Failure::Due(due), .. } if due == at));
    assert_eq!(job.read().await, failed.state);
    assert_eq!(job.claim(2).await.decision, Decision::NotDue { at });
    assert_eq!(job.read().await, failed.state);
    subject.pass(wait).await;
    let run = job.run(3).await;
    assert_eq!((run.kind, run.attempt, run.fence), (RunKind::Retry, 2, 2));
}

/// A failure for good: set aside with its error, whatever comes.
pub async fn a_terminal_failure_is_final(subject: &impl Subject) {
    let job = Job::new(subject, "terminal");
    job.run(1).await;
    let failed = job.fail(token(1), Retry::Never).await;
    assert!(matches!(failed.state, State::Failed { failure: Failure::Terminal, .. }));
    subject.pass(10 * LEASE).await;
    let answer = job.claim(2).await;
    assert_eq!(answer.decision, Decision::Exhausted);
    assert_eq!(answer.error.as_deref(), Some("no answer"));
    assert_eq!(job.read().await, failed.state);
}

/// The last try that fails is the last.
pub async fn attempts_run_out_by_failing(subject: &impl Subject) {
    let job = Job::new(subject, "exhausted");
    for attempt in 1..=MAX_ATTEMPTS {
        assert_eq!(job.run(attempt.into()).await.attempt, attempt);
        let failed = job.fail(token(attempt.into()), Retry::After(Duration::ZERO)).await;
        let exhausted = matches!(failed.state, State::Failed { failure: Failure::Exhausted, .. });
        assert_eq!(exhausted, attempt == MAX_ATTEMPTS);
    }
    assert_eq!(job.claim(99).await.decision, Decision::Exhausted);
}

/// A message that kills its process each time runs out of tries too, and the row says so.
pub async fn attempts_run_out_by_crashing(subject: &impl Subject) {
    let job = Job::new(subject, "crashing");
    for attempt in 1..=MAX_ATTEMPTS {
        assert_eq!(job.run(attempt.into()).await.attempt, attempt);
        subject.pass(LEASE).await;
    }
    assert_eq!(job.claim(99).await.decision, Decision::Exhausted);
    assert!(matches!(job.read().await, State::Failed { failure: Failure::Exhausted, .. }));
    assert_eq!(
        job.fail(token(MAX_ATTEMPTS.into()), Retry::Never).await.fenced,
        Fenced::Applied,
        "it was the last holder"
    );
    assert_eq!(job.renew(token(MAX_ATTEMPTS.into())).await, Renewal::LeaseLost);
}

/// A job given back before its handler began has not used a try.
pub async fn a_released_job_gets_its_attempt_back(subject: &impl Subject) {
    let job = Job::new(subject, "released");
    for round in 1..=2 * u128::from(MAX_ATTEMPTS) {
        let run = job.run(round).await;
        assert_eq!(run.attempt, 1);
        assert_eq!(u128::try_from(run.fence), Ok(round), "the fence grows all the same");
        assert_eq!(job.release(token(round)).await, Fenced::Applied);
        assert!(matches!(job.read().await, State::Received(Record { attempts: 0, .. })));
        assert_eq!(job.renew(token(round)).await, Renewal::LeaseLost);
    }
}

// ---- writes of holders

/// The same request again changes nothing.
pub async fn a_lost_reply_is_asked_again(subject: &impl Subject) {
    let job = Job::new(subject, "asked again");
    let first = job.run(1).await;
    subject.pass(LEASE / 2).await;
    let again = job.claim(1).await;
    let locked_until = again.now.plus(LEASE);
    let again = run_of(&again);
    assert_eq!((again.token, again.attempt, again.fence), (first.token, 1, 1));
    assert_eq!(again.locked_until, locked_until, "its holder counts from the second request on");
    assert!(matches!(job.read().await, State::Processing { locked_until, .. } if locked_until == again.locked_until));
    assert_eq!(job.complete(&again).await, Fenced::Applied);
    let completed = job.read().await;
    assert_eq!(job.complete(&again).await, Fenced::Applied);
    let answer = job.claim(1).await;
    assert_eq!(answer.decision, Decision::Duplicate);
    assert_eq!(answer.state.token(), Some(token(1)), "by which its own claim is told from another's");
    assert_eq!(job.read().await, completed);

    let failing = Job::new(subject, "failed again");
    failing.run(1).await;
    let first = failing.fail(token(1), Retry::After(LEASE)).await;
    let again = failing.fail(token(1), Retry::Never).await;
    assert_eq!((again.fenced, again.state), (Fenced::Applied, first.state));
}

/// Renewals of a batch are answered each for itself.
pub async fn renewals_extend_only_what_is_held(subject: &impl Subject) {
    let job = Job::new(subject, "renewed");
    let [held, lost, absent, expired] = ["held", "lost", "absent", "expired"].map(key);
    let store = subject.store();
    for (number, key) in [(1, &held), (2, &lost), (3, &expired)] {
        job.claim_one(&ClaimRequest { key: key.clone(), ..job.request(number) }).await;
    }
    subject.pass(LEASE / 2).await;
    let renewed = store.renew(&job.terms, &[(held.clone(), token(1))]).await.expect("the store works");
    assert_eq!(renewed, [Renewal::Renewed]);
    subject.pass(LEASE * 3 / 4).await;
    let batch = [
        (lost.clone(), token(9)),
        (absent.clone(), token(3)),
        (held.clone(), token(1)),
        (expired.clone(), token(3)),
        // A token that is right for another key of the batch, and the same key twice.
        (lost.clone(), token(1)),
        (held.clone(), token(1)),
    ];
    let renewed = store.renew(&job.terms, &batch).await.expect("the store works");
    let (applied, gone) = (Renewal::Renewed, Renewal::LeaseLost);
    assert_eq!(renewed, [gone, gone, applied, gone, gone, applied]);
    assert_eq!(store.read(&job.terms.consumer, &[absent]).await.expect("the store works"), [State::Absent]);
    subject.pass(LEASE / 2).await;
    let answer = job.claim_one(&ClaimRequest { key: held, ..job.request(5) }).await;
    assert!(matches!(answer.decision, Decision::InProgress { until } if until > answer.now), "it was renewed twice");
}

/// A token that is right for one row extends no other, whatever it has in common with it.
pub async fn a_renewal_is_for_one_row(subject: &impl Subject) {
    let (one, other) = (Job::new(subject, "renewed"), Job::new(subject, "renewed"));
    let neighbour = key("neighbour");
    one.run(1).await;
    one.claim_one(&ClaimRequest { key: neighbour.clone(), ..one.request(1) }).await;
    other.run(1).await;
    subject.pass(LEASE / 2).await;
    let all = || async {
        let next_to_it = subject.store().read(&one.terms.consumer, std::slice::from_ref(&neighbour)).await;
        (next_to_it.expect("the store works")[0], other.read().await)
    };
    let before = all().await;
    let renewed = one.read().await;
    assert_eq!(one.renew(token(1)).await, Renewal::Renewed);
    assert_ne!(one.read().await, renewed);
    assert_eq!(all().await, before);

    // Another consumer's holder, and the holder of another key.
    let (second, theirs) = (Job::new(subject, "second"), Job::new(subject, "second"));
    second.run(2).await;
    theirs.run(3).await;
    theirs.claim_one(&ClaimRequest { key: key("third"), ..theirs.request(4) }).await;
    let before = second.read().await;
    assert_eq!(second.renew(token(3)).await, Renewal::LeaseLost);
    assert_eq!(theirs.renew(token(4)).await, Renewal::LeaseLost);
    assert_eq!(second.read().await, before);
}

/// COMPLETED is final.
pub async fn nothing_is_written_over_a_completed_job(subject: &impl Subject) {
    let job = Job::new(subject, "final");
    let run = job.run(1).await;
    job.complete(&run).await;
    let completed = job.read().await;
    subject.pass(2 * LEASE).await;
    for number in [1, 2] {
        let failed = job.fail(token(number), Retry::Never).await;
        assert_eq!((failed.fenced, failed.state), (Fenced::LeaseLost, completed));
        assert_eq!(job.renew(token(number)).await, Renewal::LeaseLost);
        assert_eq!(job.release(token(number)).await, Fenced::LeaseLost);
    }
    assert_eq!(job.complete(&Run { token: token(2), ..run }).await, Fenced::LeaseLost);
    assert_eq!(job.read().await, completed);
}

/// The effect is done, so the row must say so even if somebody removed it meanwhile.
pub async fn a_completion_without_a_row_writes_it(subject: &impl Subject) {
    let job = Job::new(subject, "removed");
    let first = job.run(1).await;
    assert_eq!(job.release(first.token).await, Fenced::Applied);
    job.run(2).await;
    subject.pass(LEASE).await;
    let run = job.run(3).await;
    subject.forget(&job.terms.consumer, &job.key).await;
    assert_eq!(job.read().await, State::Absent);
    assert_eq!(job.complete(&run).await, Fenced::Applied);
    let record = Record { payload: Some(payload(0)), attempts: 2, fence: 3 };
    assert_eq!(job.read().await, State::Completed { record, token: Some(token(3)) });
}

// ---- batches

/// The same key twice: the second waits for the first.
pub async fn twins_in_a_batch_are_told_of_each_other(subject: &impl Subject) {
    let job = Job::new(subject, "twins");
    let other = ClaimRequest { key: key("other"), ..job.request(2) };
    let conflicting = ClaimRequest { payload: Some(payload(9)), ..job.request(4) };
    let batch = [job.request(1), other, job.request(3), conflicting, job.request(1)];
    let answers = subject.store().claim(&job.terms, &batch).await.expect("the store works");
    let until = answers[0].now.plus(LEASE);
    assert!(matches!(answers[0].decision, Decision::Run(run) if run.token == token(1)));
    assert!(matches!(answers[1].decision, Decision::Run(run) if run.token == token(2)));
    assert_eq!(answers[2].decision, Decision::InProgress { until });
    assert_eq!(answers[2].first_message_id.as_deref(), Some("message 1"));
    assert_eq!(answers[3].decision, Decision::Conflict);
    assert_eq!(answers[4].decision, Decision::InProgress { until }, "the same request twice runs once");
}

/// A request that conflicts leaves the job to the next one of the batch, which must then really hold it.
pub async fn a_twin_is_claimed_when_its_first_conflicts(subject: &impl Subject) {
    let job = Job::new(subject, "conflict first");
    job.run(1).await;
    job.fail(token(1), Retry::After(Duration::ZERO)).await;
    let conflicting = ClaimRequest { payload: Some(payload(9)), ..job.request(2) };
    let batch = [conflicting, job.request(3), job.request(4)];
    let answers = subject.store().claim(&job.terms, &batch).await.expect("the store works");
    assert_eq!(answers[0].decision, Decision::Conflict);
    assert!(matches!(answers[1].decision, Decision::Run(run) if run.token == token(3)));
    assert!(matches!(answers[2].decision, Decision::InProgress { .. }));
    assert_eq!(job.read().await, answers[1].state);
    assert_eq!(job.read().await.token(), Some(token(3)));
}

/// Two completions of one key in one batch: only the holder's counts.
pub async fn twins_among_completions_keep_their_fences(subject: &impl Subject) {
    let job = Job::new(subject, "completed twice");
    let former = job.run(1).await;
    subject.pass(LEASE).await;
    let holder = job.run(2).await;
    let batch = [job.completion(&holder), job.completion(&former), job.completion(&holder)];
    let fenced = subject.store().complete(&job.terms, &batch).await.expect("the store works");
    assert_eq!(fenced, [Fenced::Applied, Fenced::LeaseLost, Fenced::Applied]);
}

/// Whatever order the rows are locked in.
pub async fn answers_come_in_the_order_of_the_requests(subject: &impl Subject) {
    let job = Job::new(subject, "order");
    let requests: Vec<_> = (0..300)
        .map(|number| ClaimRequest { key: key(&format!("{}", (number * 7919) % 300)), ..job.request(number) })
        .collect();
    let store = subject.store();
    let answers = store.claim(&job.terms, &requests).await.expect("the store works");
    let runs: Vec<_> = answers.iter().map(run_of).collect();
    for (request, run) in requests.iter().zip(&runs) {
        assert_eq!(run.token, request.token);
    }
    let (done, failing): (Vec<_>, Vec<_>) =
        requests.iter().zip(&runs).partition(|(request, _)| request.token.0.as_u128() % 2 == 0);
    let done: Vec<_> = done.into_iter().map(|(request, run)| completion(request, run)).collect();
    assert!(store.complete(&job.terms, &done).await.expect("the store works").iter().all(|f| *f == Fenced::Applied));
    let failed: Vec<_> = failing
        .iter()
        .map(|(request, run)| FailedTry {
            key: request.key.clone(),
            token: run.token,
            retry: Retry::Never,
            error: request.key.to_string(),
        })
        .collect();
    let written = store.fail(&job.terms, &failed).await.expect("the store works");
    assert!(written.iter().all(|written| written.fenced == Fenced::Applied));
    let keys: Vec<_> = requests.iter().map(|request| request.key.clone()).collect();
    for (request, state) in requests.iter().zip(store.read(&job.terms.consumer, &keys).await.expect("the store works"))
    {
        assert_eq!(state.token(), Some(request.token));
    }
    for (request, answer) in requests.iter().zip(store.claim(&job.terms, &requests).await.expect("the store works")) {
        match answer.decision {
            Decision::Duplicate => assert_eq!(request.token.0.as_u128() % 2, 0),
            Decision::Exhausted => assert_eq!(answer.error, Some(request.key.to_string())),
            other => panic!("{other:?}"),
        }
    }
}

/// No trimming, folding, normalising or reading as a number.
pub async fn keys_are_compared_byte_by_byte(subject: &impl Subject) {
    let job = Job::new(subject, "bytes");
    let four_bytes_each = "\u{1f980}".repeat(255);
    let keys: Vec<EventKey> = [
        "a",
        "A",
        "a ",
        " a",
        "a\t",
        "a\n",
        "a\r\n",
        "\u{e4}",
        "a\u{308}",
        "\u{e5}",
        "\u{c5}",
        "\u{212b}",
        "\u{3a9}",
        "\u{2126}",
        "\u{436}",
        "\u{4e2d}\u{6587}",
        "\u{645}\u{631}\u{62d}\u{628}\u{627}",
        "\u{939}\u{93f}",
        "\u{df}",
        "ss",
        "\u{131}",
        "i",
        "I",
        "\u{130}",
        "\u{feff}a",
        "a\u{200b}",
        "'",
        "''",
        "\"",
        "`",
        "\\",
        "\\\\",
        "\\0",
        "\\u0000",
        "%",
        "_",
        "--",
        ";",
        "$1",
        "?1",
        "{}",
        "[]",
        "{\"key\":1}",
        "null",
        "NULL",
        "true",
        "1",
        "01",
        "1.0",
        "1e0",
        "0x1",
        "+1",
        "-0",
        "0",
        "\u{1}",
        "\u{7f}",
        "\u{fffd}",
        "\u{10ffff}",
        "'; DROP TABLE processed_jobs; --",
        &four_bytes_each,
        &four_bytes_each[4..],
    ]
    .into_iter()
    .map(key)
    .collect();
    let store = subject.store();
    let requests: Vec<_> =
        (1..).zip(&keys).map(|(number, key)| ClaimRequest { key: key.clone(), ..job.request(number) }).collect();
    let answers = store.claim(&job.terms, &requests).await.expect("the store works");
    for (request, answer) in requests.iter().zip(&answers) {
        assert!(matches!(answer.decision, Decision::Run(_)), "{:?} is another job", request.key);
    }
    let held: Vec<_> = requests.iter().map(|request| (request.key.clone(), request.token)).collect();
    let renewed = store.renew(&job.terms, &held).await.expect("the store works");
    assert!(renewed.iter().all(|renewal| *renewal == Renewal::Renewed));
    let states = store.read(&job.terms.consumer, &keys).await.expect("the store works");
    for (request, state) in requests.iter().zip(states) {
        assert_eq!(state.token(), Some(request.token), "{:?}", request.key);
    }
    let done: Vec<_> =
        requests.iter().zip(&answers).map(|(request, answer)| completion(request, &run_of(answer))).collect();
    let completed = store.complete(&job.terms, &done).await.expect("the store works");
    assert!(completed.iter().all(|fenced| *fenced == Fenced::Applied));
}

/// The same key under two names is two jobs.
pub async fn consumers_are_apart(subject: &impl Subject) {
    let (one, two) = (Job::new(subject, "shared"), Job::new(subject, "shared"));
    let run = one.run(1).await;
    two.run(2).await;
    one.complete(&run).await;
    assert!(matches!(two.read().await, State::Processing { .. }));
    assert_eq!(two.complete(&run).await, Fenced::LeaseLost);
}

/// Nor does a write reach another consumer's row because everything else in it is the same.
pub async fn consumers_are_apart_even_with_one_token(subject: &impl Subject) {
    let (one, two) = (Job::new(subject, "any"), Job::new(subject, "any"));
    let now = one.claim_one(&ClaimRequest { key: key("clock"), ..one.request(9) }).await.now;
    let record = Record { payload: Some(payload(0)), attempts: 1, fence: 1 };
    let held = State::Processing { record, token: token(1), locked_until: now.plus(LEASE / 2) };
    let rows = [
        ("renewed", held),
        ("failed", held),
        ("released", held),
        ("completed", held),
        ("completed second", held),
        ("overwritten", held),
        ("claimed", State::Received(record)),
        ("retried", State::Failed { record, token: Some(token(1)), failure: Failure::Due(now) }),
        ("taken over", State::Processing { record, token: token(1), locked_until: now }),
    ];
    for Job { store, terms, .. } in [&one, &two] {
        let mut tx = store.begin().await.expect("the store works");
        let requests = rows.map(|(name, _)| ClaimRequest { key: key(name), ..one.request(1) });
        tx.store().claim(terms, &requests).await.expect("the store works");
        let states = rows.map(|(name, state)| (key(name), state, "as it was".to_owned()));
        tx.store().overwrite(terms, &states).await.expect("the store works");
        tx.commit().await.expect("the store works");
    }
    let read = |consumer: ConsumerName| {
        let (store, keys) = (subject.store(), rows.map(|(name, _)| key(name)));
        async move { store.read(&consumer, &keys).await.expect("the store works") }
    };
    let before = read(two.terms.consumer.clone()).await;
    assert_eq!(before, rows.map(|(_, state)| state));

    let on = |name| Job { key: key(name), ..one.again() };
    assert_eq!(on("renewed").renew(token(1)).await, Renewal::Renewed);
    assert_eq!(on("failed").fail(token(1), Retry::Never).await.fenced, Fenced::Applied);
    assert_eq!(on("released").release(token(1)).await, Fenced::Applied);
    for name in ["claimed", "retried", "taken over"] {
        on(name).run(2).await;
    }
    let run = Run { kind: RunKind::Fresh, token: token(1), attempt: 1, fence: 1, locked_until: now };
    assert_eq!(on("completed").complete(&run).await, Fenced::Applied);
    let second = on("completed second");
    let both = [Run { token: token(9), ..run }, run].map(|run| second.completion(&run));
    let written = one.store.complete(&one.terms, &both).await.expect("the store works");
    assert_eq!(written, [Fenced::LeaseLost, Fenced::Applied]);
    let mut tx = one.store.begin().await.expect("the store works");
    let row = (key("overwritten"), State::Received(record), "overwritten".to_owned());
    tx.store().overwrite(&one.terms, &[row]).await.expect("the store works");
    tx.commit().await.expect("the store works");

    assert_eq!(read(two.terms.consumer.clone()).await, before);
    let after = read(one.terms.consumer.clone()).await;
    assert!(after.iter().zip(&before).all(|(after, before)| after != before), "{after:?}");
}

/// What people and other systems wrote cannot make a row impossible to write.
pub async fn texts_that_do_not_fit_are_stored_as_they_can_be(subject: &impl Subject) {
    let job = Job::new(subject, "texts");
    let terms = Terms { owner: "o\0".repeat(2000).into(), ..job.terms.clone() };
    let request = ClaimRequest { message_id: "m\0\u{1f980}".repeat(2000).into(), ..job.request(1) };
    let store = subject.store();
    let answers = store.claim(&terms, std::slice::from_ref(&request)).await.expect("the store works");
    let run = run_of(&answers[0]);
    let error = "nul \0 quote ' line\n \u{1f980} ".repeat(200);
    let failed = FailedTry { key: request.key.clone(), token: run.token, retry: Retry::Never, error };
    let written = store.fail(&terms, &[failed]).await.expect("the store works");
    assert_eq!(written[0].fenced, Fenced::Applied);
    let error = job.claim(2).await.error.expect("it is kept");
    assert!(error.starts_with("nul ") && error.contains("\u{1f980}"));
}

/// Nothing asked, nothing answered.
pub async fn empty_batches_are_answered(subject: &impl Subject) {
    let job = Job::new(subject, "empty");
    let store = subject.store();
    assert_eq!(store.claim(&job.terms, &[]).await.expect("the store works"), []);
    assert_eq!(store.renew(&job.terms, &[]).await.expect("the store works"), []);
    assert_eq!(store.complete(&job.terms, &[]).await.expect("the store works"), []);
    assert_eq!(store.fail(&job.terms, &[]).await.expect("the store works"), []);
    assert_eq!(store.release(&job.terms, &[]).await.expect("the store works"), []);
    assert_eq!(store.read(&job.terms.consumer, &[]).await.expect("the store works"), []);
    let mut tx = store.begin().await.expect("the store works");
    assert_eq!(tx.store().claim(&job.terms, &[]).await.expect("the store works"), []);
    tx.store().overwrite(&job.terms, &[]).await.expect("the store works");
    tx.commit().await.expect("the store works");
}

// ---- races

/// Twelve at once: one runs.
pub async fn one_of_many_gets_a_new_job(subject: &impl Subject) {
    for _ in 0..5 {
        let job = Job::new(subject, "race");
        one_wins(subject, &job).await;
    }
}

/// Twelve find the lease run out at once: one takes over.
pub async fn one_of_many_takes_over(subject: &impl Subject) {
    for _ in 0..5 {
        let job = Job::new(subject, "race");
        job.run(99).await;
        subject.pass(LEASE).await;
        one_wins(subject, &job).await;
    }
}

async fn one_wins(subject: &impl Subject, job: &Job<'_>) {
    let claims = (1..=CROWD as u128).map(|number| {
        let (store, terms, request) = (subject.store(), job.terms.clone(), job.request(number));
        tokio::spawn(async move { store.claim(&terms, &[request]).await.expect("the store works").remove(0) })
    });
    let answers: Vec<Answer> = join_all(claims).await.into_iter().map(|joined| joined.expect("no panic")).collect();
    let winners: Vec<_> = answers.iter().filter(|answer| matches!(answer.decision, Decision::Run(_))).collect();
    assert_eq!(winners.len(), 1, "{answers:?}");
    for answer in &answers {
        assert!(matches!(answer.decision, Decision::Run(_) | Decision::InProgress { .. }), "{answer:?}");
    }
    assert_eq!(job.read().await.token(), winners[0].state.token());
}

/// Batches that share most of their keys, each in an order of its own.
pub async fn overlapping_batches_run_each_job_once(subject: &impl Subject) {
    let job = Job::new(subject, "overlap");
    let batches = (0..8).map(|batch| {
        let (store, terms, requests) = (subject.store(), job.terms.clone(), overlapping(&job, batch));
        tokio::spawn(async move {
            let answers = store.claim(&terms, &requests).await.expect("batches do not deadlock");
            requests
                .into_iter()
                .zip(answers)
                .filter(|(_, answer)| matches!(answer.decision, Decision::Run(_)))
                .map(|(request, _)| request.key)
                .collect::<Vec<_>>()
        })
    });
    let ran: Vec<EventKey> = join_all(batches).await.into_iter().flat_map(|joined| joined.expect("no panic")).collect();
    assert_each_once(ran);
}

/// The same in transactions, half of which roll back; those keys are claimed by a later one.
pub async fn overlapping_transactions_run_each_job_once(subject: &impl Subject) {
    let job = Job::new(subject, "overlap in tx");
    let batches = (0..8).map(|batch| {
        let (store, terms, requests) = (subject.store(), job.terms.clone(), overlapping(&job, batch));
        tokio::spawn(async move {
            let mut tx = store.begin().await.expect("the store works");
            let answers = tx.store().claim(&terms, &requests).await.expect("batches do not deadlock");
            if batch % 2 == 0 {
                tx.rollback().await.expect("the store works");
                return Vec::new();
            }
            tx.commit().await.expect("the store works");
            requests
                .into_iter()
                .zip(answers)
                .filter(|(_, answer)| matches!(answer.decision, Decision::Run(_)))
                .map(|(request, _)| request.key)
                .collect()
        })
    });
    let mut ran: Vec<EventKey> =
        join_all(batches).await.into_iter().flat_map(|joined| joined.expect("no panic")).collect();
    let rest = overlapping(&job, 99);
    let answers = subject.store().claim(&job.terms, &rest).await.expect("the store works");
    for (request, answer) in rest.into_iter().zip(answers) {
        match answer.decision {
            Decision::Run(_) => ran.push(request.key),
            Decision::Duplicate => {}
            other => panic!("{other:?}"),
        }
    }
    assert_each_once(ran);
}

const OVERLAPPING_KEYS: usize = 60;

/// All keys, in an order that depends on the batch.
fn overlapping(job: &Job<'_>, batch: usize) -> Vec<ClaimRequest> {
    let step = [7, 11, 13, 17, 19, 23, 29, 31][batch % 8];
    (0..OVERLAPPING_KEYS)
        .map(|position| ClaimRequest {
            key: key(&format!("k{}", (position * step + batch) % OVERLAPPING_KEYS)),
            ..job.request((batch * 1000 + position) as u128 + 1)
        })
        .collect()
}

fn assert_each_once(mut ran: Vec<EventKey>) {
    ran.sort();
    let all = ran.len();
    ran.dedup();
    assert_eq!((ran.len(), all), (OVERLAPPING_KEYS, OVERLAPPING_KEYS), "each job ran once");
}

// ---- transactions

/// Claim, effect and completion become visible together.
pub async fn a_commit_completes(subject: &impl Subject) {
    let job = Job::new(subject, "committed");
    let store = subject.store();
    let mut tx = store.begin().await.expect("the store works");
    assert_eq!(tx.engine(), store.engine());
    let answer = job.claim_in(&mut tx, 1).await;
    let run = run_of(&answer);
    assert_eq!((run.kind, run.attempt, run.fence), (RunKind::Fresh, 1, 1));
    assert!(matches!(answer.state, State::Processing { .. }), "to its own holder it is in progress");
    // The in-memory store lets nobody read meanwhile.
    if store.engine() != Engine::Memory {
        assert_eq!(job.read().await, State::Absent, "nobody sees it before the commit");
    }
    tx.commit().await.expect("the store works");
    let record = Record { payload: Some(payload(0)), attempts: 1, fence: 1 };
    assert_eq!(job.read().await, State::Completed { record, token: Some(token(1)) });
    assert_eq!(job.claim(2).await.decision, Decision::Duplicate);
    let mut tx = store.begin().await.expect("the store works");
    let answer = job.claim_in(&mut tx, 1).await;
    assert_eq!(answer.decision, Decision::Duplicate);
    assert_eq!(answer.state.token(), Some(token(1)), "by which a lost reply to the commit is settled");
    assert_eq!(answer.first_message_id.as_deref(), Some("message 1"));
    tx.rollback().await.expect("the store works");
}

/// Nothing of it was ever there.
pub async fn a_rollback_undoes(subject: &impl Subject) {
    let job = Job::new(subject, "rolled back");
    let mut tx = subject.store().begin().await.expect("the store works");
    assert!(matches!(job.claim_in(&mut tx, 1).await.decision, Decision::Run(_)));
    tx.rollback().await.expect("the store works");
    assert_eq!(job.read().await, State::Absent);
    job.run(2).await;
}

/// As if it had been rolled back.
pub async fn a_dropped_transaction_undoes(subject: &impl Subject) {
    let job = Job::new(subject, "dropped");
    for number in 1..=2 * CROWD as u128 {
        let mut tx = subject.store().begin().await.expect("no dropped transaction keeps its connection");
        assert!(matches!(job.claim_in(&mut tx, number).await.decision, Decision::Run(_)), "{number}");
    }
    job.run(99).await;
}

/// A takeover inside a transaction is as good as its commit.
pub async fn a_transaction_takes_over_and_gives_back(subject: &impl Subject) {
    let job = Job::new(subject, "taken over in tx");
    let former = job.run(1).await;
    let mut tx = subject.store().begin().await.expect("the store works");
    assert_eq!(job.claim_in(&mut tx, 2).await.decision, Decision::InProgress { until: former.locked_until });
    tx.commit().await.expect("the store works");
    subject.pass(LEASE).await;
    let expired = job.read().await;

    let mut tx = subject.store().begin().await.expect("the store works");
    let run = run_of(&job.claim_in(&mut tx, 3).await);
    assert_eq!((run.kind, run.attempt, run.fence), (RunKind::Takeover, 2, 2));
    tx.rollback().await.expect("the store works");
    assert_eq!(job.read().await, expired);

    let mut tx = subject.store().begin().await.expect("the store works");
    job.claim_in(&mut tx, 4).await;
    tx.commit().await.expect("the store works");
    assert_eq!(job.complete(&former).await, Fenced::LeaseLost);
    assert!(matches!(job.read().await, State::Completed { token: Some(by), .. } if by == token(4)));
}

/// A lease that was claimed first is completed by the transaction that asks with its token.
pub async fn a_transaction_completes_the_lease_of_its_token(subject: &impl Subject) {
    let job = Job::new(subject, "lease, then tx");
    let lease = job.run(1).await;
    let held = job.read().await;
    for _ in 0..2 {
        let mut tx = subject.store().begin().await.expect("the store works");
        let run = run_of(&job.claim_in(&mut tx, 1).await);
        assert_eq!((run.token, run.attempt, run.fence), (lease.token, 1, 1));
        tx.rollback().await.expect("the store works");
        assert_eq!(job.read().await, held);
    }
    let mut tx = subject.store().begin().await.expect("the store works");
    run_of(&job.claim_in(&mut tx, 1).await);
    tx.commit().await.expect("the store works");
    assert!(matches!(job.read().await, State::Completed { token: Some(by), .. } if by == token(1)));

    let lost = Job::new(subject, "lease lost, then tx");
    lost.run(1).await;
    subject.pass(LEASE).await;
    lost.run(2).await;
    let mut tx = subject.store().begin().await.expect("the store works");
    let answer = lost.claim_in(&mut tx, 1).await;
    assert!(matches!(answer.decision, Decision::InProgress { .. }), "{answer:?}");
    tx.commit().await.expect("the store works");
}

/// Whoever asks for a key of an open transaction gets the answer that its end makes right, and a whole lease.
pub async fn a_claim_waits_for_the_transaction_before_it(subject: &impl Subject) {
    for (commits, decision) in [(true, false), (false, true)] {
        let job = Job::new(subject, "waiting");
        let mut tx = subject.store().begin().await.expect("the store works");
        job.claim_in(&mut tx, 1).await;
        let (store, terms, request) = (subject.store(), job.terms.clone(), job.request(2));
        let second =
            tokio::spawn(async move { store.claim(&terms, &[request]).await.expect("the store works").remove(0) });
        tokio::task::yield_now().await;
        if commits { tx.commit().await } else { tx.rollback().await }.expect("the store works");
        let answer = second.await.expect("no panic");
        assert_eq!(matches!(answer.decision, Decision::Run(_)), decision, "{answer:?}");
        if let State::Processing { locked_until, .. } = answer.state {
            assert!(locked_until.since(answer.now) > LEASE * 8 / 10);
        }
    }
}

/// Undone to the innermost; the outer ones stand.
pub async fn savepoints_nest(subject: &impl Subject) {
    let job = Job::new(subject, "savepoints");
    let claim = async |tx: &mut Tx, number: u128| {
        let request = ClaimRequest { key: key(&number.to_string()), ..job.request(number) };
        let answer = tx.store().claim(&job.terms, &[request]).await.expect("the store works").remove(0);
        matches!(answer.decision, Decision::Run(_))
    };
    let mut tx = subject.store().begin().await.expect("the store works");
    for error in [tx.store().rollback_to_savepoint().await, tx.store().release_savepoint().await] {
        assert_eq!(error.map_err(|error| error.kind()), Err(StoreErrorKind::Broken), "none is set");
    }
    assert!(claim(&mut tx, 1).await);
    tx.store().savepoint().await.expect("the store works");
    assert!(claim(&mut tx, 2).await);
    tx.store().savepoint().await.expect("the store works");
    assert!(claim(&mut tx, 3).await);
    assert!(!claim(&mut tx, 1).await);
    tx.store().rollback_to_savepoint().await.expect("the store works");
    assert!(claim(&mut tx, 3).await, "its claim was undone");
    tx.store().savepoint().await.expect("a name can be used again");
    assert!(claim(&mut tx, 4).await);
    tx.store().release_savepoint().await.expect("the store works");
    tx.store().savepoint().await.expect("the store works");
    assert!(claim(&mut tx, 5).await);
    tx.store().rollback_to_savepoint().await.expect("the store works");
    tx.store().release_savepoint().await.expect("the outer one is still set");
    tx.commit().await.expect("the store works");

    let keys: Vec<_> = (1..=5).map(|number: u32| key(&number.to_string())).collect();
    let states = subject.store().read(&job.terms.consumer, &keys).await.expect("the store works");
    let completed: Vec<_> = states.iter().map(|state| matches!(state, State::Completed { .. })).collect();
    assert_eq!(completed, [true, true, true, true, false]);

    let mut tx = subject.store().begin().await.expect("the store works");
    tx.store().savepoint().await.expect("the store works");
    assert!(claim(&mut tx, 6).await);
    tx.store().release_savepoint().await.expect("the store works");
    tx.rollback().await.expect("the store works");
    let states = subject.store().read(&job.terms.consumer, &[key("6")]).await.expect("the store works");
    assert_eq!(states, [State::Absent], "a released savepoint is no commit");
}

/// A handler that failed inside the transaction of its batch: the row says so, with the error.
pub async fn failures_are_written_over_claims_of_the_transaction(subject: &impl Subject) {
    let job = Job::new(subject, "overwritten");
    let mut tx = subject.store().begin().await.expect("the store works");
    let answer = job.claim_in(&mut tx, 1).await;
    let Transition { next, .. } = step(
        &answer.state,
        Input::Fail(TryFailed {
            token: token(1),
            cause: Retry::After(LEASE).cause(answer.now),
            max_attempts: MAX_ATTEMPTS,
        }),
    )
    .expect("a holder may fail");
    let row = (job.key.clone(), next, "over\0written".to_owned());
    tx.store().overwrite(&job.terms, &[row]).await.expect("the store works");
    tx.commit().await.expect("the store works");
    assert_eq!(job.read().await, next);
    let at = answer.now.plus(LEASE);
    let answer = job.claim(2).await;
    assert_eq!(answer.decision, Decision::NotDue { at });
    assert!(answer.error.is_some_and(|error| error.starts_with("over") && error.ends_with("written")));
    subject.pass(LEASE).await;
    assert_eq!(job.run(3).await.attempt, 2);

    let mut tx = subject.store().begin().await.expect("the store works");
    let absent = tx.store().overwrite(&job.terms, &[(job.key.clone(), State::Absent, String::new())]).await;
    assert_eq!(absent.map_err(|error| error.kind()), Err(StoreErrorKind::Broken));
    tx.rollback().await.expect("the store works");
}

/// Whatever the row said before, it says what was written.
pub async fn what_is_overwritten_is_wholly_so(subject: &impl Subject) {
    let job = Job::new(subject, "overwritten");
    let neighbour = Job { key: key("neighbour"), ..job.again() };
    let other = neighbour.run(9).await;
    let mut tx = subject.store().begin().await.expect("the store works");
    let now = job.claim_in(&mut tx, 1).await.now;
    let record = |attempts| Record { payload: Some(payload(attempts)), attempts, fence: i64::from(attempts) + 10 };
    let failed = |attempts, failure| State::Failed { record: record(attempts), token: Some(token(2)), failure };
    let states = [
        State::Processing { record: record(2), token: token(3), locked_until: now.plus(LEASE) },
        failed(3, Failure::Due(now.plus(LEASE * 2))),
        failed(4, Failure::Terminal),
        State::Received(Record { payload: None, ..record(5) }),
        failed(6, Failure::Exhausted),
        State::Completed { record: record(7), token: Some(token(4)) },
        State::Processing { record: record(8), token: token(5), locked_until: now.plus(LEASE * 3) },
    ];
    tx.commit().await.expect("the store works");
    for state in states {
        let mut tx = subject.store().begin().await.expect("the store works");
        tx.store().overwrite(&job.terms, &[(job.key.clone(), state, String::new())]).await.expect("the store works");
        tx.commit().await.expect("the store works");
        assert_eq!(job.read().await, state);
    }
    let held = State::Processing {
        record: Record { payload: Some(payload(0)), attempts: 1, fence: 1 },
        token: other.token,
        locked_until: other.locked_until,
    };
    assert_eq!(neighbour.read().await, held);
}

// ---- the store as a whole

/// Migrating is for every start, not for the first one only.
pub async fn a_store_that_was_migrated_twice_is_as_before(subject: &impl Subject) {
    let job = Job::new(subject, "migrated");
    job.run(1).await;
    let before = job.read().await;
    subject.store().migrate().await.expect("the store works");
    assert_eq!(job.read().await, before);
}

/// And after it was closed it says so, unless it has nothing to close.
pub async fn a_store_answers_pings(subject: &impl Subject) {
    let store = subject.store();
    store.ping().await.expect("the store works");
    store.close().await;
    if store.engine() != Engine::Memory {
        assert_eq!(store.ping().await.map_err(|error| error.kind()), Err(StoreErrorKind::Unavailable));
    }
}

// ---- what the runtime does with a transaction and a handler cannot

/// Asks for jobs inside `tx`.
///
/// # Errors
/// As for [`StoreTx::claim`](super::StoreTx::claim).
pub async fn claim_in(tx: &mut Tx, terms: &Terms, requests: &[ClaimRequest]) -> Result<Vec<Answer>, StoreError> {
    tx.store().claim(terms, requests).await
}

/// Writes states over rows inside a transaction, as the runtime does with failed tries.
///
/// # Errors
/// Those of the store.
pub async fn overwrite_in(tx: &mut Tx, terms: &Terms, rows: &[(EventKey, State, String)]) -> Result<(), StoreError> {
    tx.store().overwrite(terms, rows).await
}

/// Commits `tx`.
///
/// # Errors
/// As for [`StoreTx::commit`](super::StoreTx::commit).
pub async fn commit(tx: Tx) -> Result<(), StoreError> {
    tx.commit().await
}

/// Rolls `tx` back.
///
/// # Errors
/// As for [`StoreTx::rollback`](super::StoreTx::rollback).
pub async fn rollback(tx: Tx) -> Result<(), StoreError> {
    tx.rollback().await
}

// ---- one job of a check

/// A job under a consumer name that no other check has.
struct Job<'a> {
    store: Arc<dyn Store>,
    terms: Terms,
    key: EventKey,
    _subject: std::marker::PhantomData<&'a ()>,
}

impl<'a> Job<'a> {
    fn new(subject: &'a impl Subject, name: &str) -> Self {
        let consumer = ConsumerName::new(format!("contract-{}", Uuid::new_v4())).expect("a name");
        let terms = Terms { consumer, lease: LEASE, max_attempts: MAX_ATTEMPTS, owner: "contract".into() };
        Self { store: subject.store(), terms, key: key(name), _subject: std::marker::PhantomData }
    }

    /// The same, to be changed.
    fn again(&self) -> Self {
        Self { store: Arc::clone(&self.store), terms: self.terms.clone(), key: self.key.clone(), ..*self }
    }

    fn request(&self, number: u128) -> ClaimRequest {
        ClaimRequest {
            key: self.key.clone(),
            token: token(number),
            payload: Some(payload(0)),
            message_id: format!("message {number}").into(),
        }
    }

    async fn claim_one(&self, request: &ClaimRequest) -> Answer {
        let requests = std::slice::from_ref(request);
        self.store.claim(&self.terms, requests).await.expect("the store works").remove(0)
    }

    async fn claim(&self, number: u128) -> Answer {
        self.claim_one(&self.request(number)).await
    }

    async fn claim_in(&self, tx: &mut Tx, number: u128) -> Answer {
        tx.store().claim(&self.terms, &[self.request(number)]).await.expect("the store works").remove(0)
    }

    /// A claim that must get the job.
    async fn run(&self, number: u128) -> Run {
        let run = run_of(&self.claim(number).await);
        assert_eq!(run.token, token(number));
        run
    }

    fn completion(&self, run: &Run) -> Completion {
        completion(&ClaimRequest { token: run.token, ..self.request(0) }, run)
    }

    async fn complete(&self, run: &Run) -> Fenced {
        self.store.complete(&self.terms, &[self.completion(run)]).await.expect("the store works")[0]
    }

    async fn renew(&self, token: Token) -> Renewal {
        self.store.renew(&self.terms, &[(self.key.clone(), token)]).await.expect("the store works")[0]
    }

    async fn release(&self, token: Token) -> Fenced {
        self.store.release(&self.terms, &[(self.key.clone(), token)]).await.expect("the store works")[0]
    }

    async fn fail(&self, token: Token, retry: Retry) -> FailureWritten {
        let failed = FailedTry { key: self.key.clone(), token, retry, error: "no answer".to_owned() };
        self.store.fail(&self.terms, &[failed]).await.expect("the store works")[0]
    }

    async fn read(&self) -> State {
        self.store.read(&self.terms.consumer, std::slice::from_ref(&self.key)).await.expect("the store works")[0]
    }
}

fn completion(request: &ClaimRequest, run: &Run) -> Completion {
    Completion { request: request.clone(), attempt: run.attempt, fence: run.fence, returned: Returned::default() }
}

fn run_of(answer: &Answer) -> Run {
    match answer.decision {
        Decision::Run(run) => run,
        other => panic!("it should run, but: {other:?}"),
    }
}

fn key(text: &str) -> EventKey {
    EventKey::from_parts([text]).expect("a key")
}

fn token(number: u128) -> Token {
    Token(Uuid::from_u128(number))
}

fn payload(number: u32) -> Fingerprint {
    Fingerprint::of(&number).expect("numbers have a form")
}
