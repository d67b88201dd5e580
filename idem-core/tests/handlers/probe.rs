//! A probe answers whether an earlier try had its effect elsewhere (T2).

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_core::machine::{Decision, State as RowState};
use idem_core::{AlreadyDone, FailureKind, Guarded, Job, Outcome, Probe, State, idempotent};

use crate::bench::{Bench, Failed, Order, memory, order, run_one};
use crate::subjects::{LEASE, key, request, terms};

/// What the probe answers, and what was called.
#[derive(Clone, Default)]
struct Gateway {
    answer: Arc<Mutex<&'static str>>,
    probed: Arc<AtomicU32>,
    charged: Arc<AtomicU32>,
}

impl Gateway {
    fn answering(answer: &'static str) -> Self {
        Self { answer: Arc::new(Mutex::new(answer)), ..Self::default() }
    }

    fn calls(&self) -> (u32, u32) {
        (self.probed.load(Ordering::SeqCst), self.charged.load(Ordering::SeqCst))
    }
}

#[idempotent(key = "id", consumer = "settle", probe = settled, attempts = 3, backoff = "1ms..1ms", lease = "2s",
    max_run = "400ms")]
async fn settle(event: Order, job: &Job, gateway: State<Gateway>) -> Result<String, Failed> {
    gateway.charged.fetch_add(1, Ordering::SeqCst);
    match event.act.as_str() {
        "again" if job.attempt() == 1 => Err(Failed::Again),
        "slow after" if job.attempt() == 1 => Err(Failed::Again),
        "slow after" => {
            tokio::time::sleep(Duration::from_millis(350)).await;
            Ok("charged".to_owned())
        }
        _ => Ok("charged".to_owned()),
    }
}

async fn settled(event: &Order, job: &Job, gateway: State<Gateway>) -> Result<Probe, Failed> {
    assert_eq!(event.id, job.key().as_str());
    gateway.probed.fetch_add(1, Ordering::SeqCst);
    let answer = *gateway.answer.lock().unwrap();
    match answer {
        "done" => Ok(Probe::Done),
        "unknown" => Ok(Probe::Unknown),
        "again" => Err(Failed::Again),
        "never" => Err(Failed::Never),
        "panic" => panic!("no answer"),
        "hang" => std::future::pending().await,
        "slow" => {
            tokio::time::sleep(Duration::from_millis(350)).await;
            Ok(Probe::NotDone)
        }
        _ => Ok(Probe::NotDone),
    }
}

struct Settling {
    bench: Bench,
    gateway: Gateway,
    guarded: Guarded,
}

impl Settling {
    async fn answering(answer: &'static str) -> Self {
        let bench = memory().await;
        let gateway = Gateway::answering(answer);
        let guarded = bench.guard().state(gateway.clone()).bind(settle).unwrap();
        Self { bench, gateway, guarded }
    }

    /// After a first try that failed, and may have charged all the same.
    async fn retried(answer: &'static str) -> (Self, Outcome) {
        let settling = Self::answering(answer).await;
        let first = run_one(&settling.guarded, &order("A", "again")).await;
        assert!(matches!(first, Outcome::Failed { attempt: 1, retry_in: Some(_), .. }), "{first:?}");
        assert_eq!(settling.gateway.calls(), (0, 1), "a fresh job's probe is not asked");
        settling.bench.subject.pass(Duration::from_secs(1)).await;
        let second = run_one(&settling.guarded, &order("A", "again")).await;
        (settling, second)
    }

    /// After a first worker that died.
    async fn taken_over(answer: &'static str) -> (Self, Outcome) {
        let settling = Self::answering(answer).await;
        let died = settling.bench.store.claim(&terms("settle"), &[request("A", 1)]).await.expect("the store works");
        assert!(matches!(died[0].decision, Decision::Run(_)));
        settling.bench.subject.pass(LEASE).await;
        let second = run_one(&settling.guarded, &order("A", "")).await;
        (settling, second)
    }

    async fn row(&self) -> RowState {
        let consumer = terms("settle").consumer;
        self.bench.store.read(&consumer, &[key("A")]).await.expect("the store works")[0]
    }
}

#[tokio::test]
async fn t2_a_fresh_job_is_not_probed() {
    let settling = Settling::answering("done").await;
    let outcome = run_one(&settling.guarded, &order("A", "")).await;
    assert!(matches!(outcome, Outcome::Completed { already_done: None, .. }), "{outcome:?}");
    assert_eq!(settling.gateway.calls(), (0, 1));
    // Nor is a duplicate.
    assert!(matches!(run_one(&settling.guarded, &order("A", "")).await, Outcome::Duplicate(_)));
    assert_eq!(settling.gateway.calls(), (0, 1));
}

#[tokio::test]
async fn t2_what_the_probe_finds_done_is_completed_and_not_run() {
    let (settling, outcome) = Settling::retried("done").await;
    assert!(
        matches!(outcome, Outcome::Completed { attempt: 2, already_done: Some(AlreadyDone::Probe), output: None, .. }),
        "{outcome:?}"
    );
    assert_eq!(settling.gateway.calls(), (1, 1));
    assert!(matches!(settling.row().await, RowState::Completed { .. }));

    let (settling, outcome) = Settling::taken_over("done").await;
    let found = Some(AlreadyDone::Probe);
    assert!(
        matches!(outcome, Outcome::Completed { takeover: true, already_done, .. } if already_done == found),
        "{outcome:?}"
    );
    assert_eq!(settling.gateway.calls(), (1, 0));
    assert!(matches!(settling.row().await, RowState::Completed { .. }));
}

#[tokio::test]
async fn t2_what_is_not_done_runs() {
    let (settling, outcome) = Settling::retried("not done").await;
    assert!(matches!(outcome, Outcome::Completed { attempt: 2, already_done: None, .. }), "{outcome:?}");
    assert_eq!(settling.gateway.calls(), (1, 2));
    let (settling, outcome) = Settling::taken_over("not done").await;
    assert!(matches!(outcome, Outcome::Completed { takeover: true, already_done: None, .. }), "{outcome:?}");
    assert_eq!(settling.gateway.calls(), (1, 1));
}

#[tokio::test]
async fn t2_what_nobody_can_tell_goes_to_a_person() {
    for (settling, outcome) in [Settling::retried("unknown").await, Settling::taken_over("unknown").await] {
        let Outcome::Failed { attempt: 2, retry_in: None, failure } = &outcome else { panic!("{outcome:?}") };
        assert_eq!(failure.kind, FailureKind::Terminal);
        assert_eq!(failure.message, "the probe could not tell whether an earlier try had its effect");
        let charged = settling.gateway.calls().1;
        let again = run_one(&settling.guarded, &order("A", "")).await;
        // The retried one asked with another text, which is a conflict: nothing runs in either case.
        assert!(matches!(again, Outcome::Exhausted { attempts: 2, .. } | Outcome::Conflict), "{again:?}");
        assert_eq!(settling.gateway.calls(), (1, charged));
    }
}

#[tokio::test]
async fn r1_an_error_of_the_probe_is_a_failed_try_of_its_own_kind() {
    for (answer, kind, comes_again) in [
        ("again", FailureKind::Transient, true),
        ("never", FailureKind::Terminal, false),
        ("panic", FailureKind::Panicked, true),
        ("hang", FailureKind::Timeout, true),
    ] {
        let (settling, outcome) = Settling::retried(answer).await;
        let Outcome::Failed { attempt: 2, retry_in, failure } = &outcome else { panic!("{answer}: {outcome:?}") };
        assert_eq!((failure.kind, retry_in.is_some()), (kind, comes_again), "{answer}");
        assert_eq!(settling.gateway.calls(), (1, 1), "{answer}: the handler did not run");
        // It is asked again with the next try.
        if comes_again {
            *settling.gateway.answer.lock().unwrap() = "done";
            settling.bench.subject.pass(Duration::from_secs(1)).await;
            let third = run_one(&settling.guarded, &order("A", "again")).await;
            assert!(
                matches!(third, Outcome::Completed { attempt: 3, already_done: Some(AlreadyDone::Probe), .. }),
                "{answer}: {third:?}"
            );
        }
    }
}

#[tokio::test]
async fn the_probes_time_counts_into_the_tries_own() {
    let settling = Settling::answering("slow").await;
    let slow = order("A", "slow after");
    assert!(matches!(run_one(&settling.guarded, &slow).await, Outcome::Failed { attempt: 1, .. }));
    settling.bench.subject.pass(Duration::from_secs(1)).await;
    // 350 ms each, of 400 ms and the moment after which a handler that was told to go is dropped.
    let outcome = run_one(&settling.guarded, &slow).await;
    let Outcome::Failed { failure, .. } = &outcome else { panic!("{outcome:?}") };
    assert_eq!(failure.kind, FailureKind::Timeout);
    assert_eq!(settling.gateway.calls(), (1, 2), "the handler had begun");
}
