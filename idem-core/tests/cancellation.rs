//! Every future of the public API is dropped at every await: no transaction stays open, the next use of the same store works,
//! and the job comes to its end with one effect.
//!
//! A future is dropped after its n-th poll, for n from 0 until it is ready. Each store has one connection for its work, so
//! one that is lost is missed at once.

mod support;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use idem_core::machine::{Decision, Failure, Record, State, Token};
use idem_core::store::{
    Completion, Engine, FailedTry, Fenced, Renewal, Retry, Returned, Store, StoreOptions, StoreTx, connect, sql,
};
use idem_core::{Guard, Guarded, Mode, Policy, RunGuarded, Timestamp};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::support::handlers::{self, Kind, Order, World, delivery};
use crate::support::subjects::{key, request, terms};
use crate::support::{ENGINES, PATIENCE, Place, Sql, drive, tell};

const CONSUMER: &str = "cancelled";
/// Far more than any of the futures needs.
const MOST_POLLS: usize = 1000;

/// Polls `future` so many times at most, and drops it right after the last; its answer, if it was ready by then.
async fn polled<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(context) {
            Poll::Ready(answer) => Poll::Ready(Some(answer)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

struct Bed {
    place: Place,
    store: Arc<dyn Store>,
    rows: Sql,
    futures: usize,
    drops: usize,
}

fn options() -> StoreOptions {
    StoreOptions::default().max_connections(1)
}

impl Bed {
    async fn new(engine: Engine) -> Self {
        let place = Place::new(engine).await;
        let store = connect(&place.address.store, &options()).await.expect("the store works");
        let rows = place.rows().await;
        Self { place, store, rows, futures: 0, drops: 0 }
    }

    /// `attempt` makes a future with a key of its own, polls it so many times, drops it, and says whether it was ready.
    /// When nothing is open any more, `afterwards` uses the same store again.
    async fn at_every_await(
        &mut self,
        name: &str,
        attempt: impl AsyncFn(&Self, usize, &str) -> bool,
        afterwards: impl AsyncFn(&Self, &str),
    ) {
        self.futures += 1;
        for polls in 0.. {
            assert!(polls < MOST_POLLS, "{name} has no end");
            let key = format!("{name}-{polls}");
            let ready = attempt(self, polls, &key).await;
            self.place.is_at_rest().await;
            timeout(PATIENCE, afterwards(self, &key)).await.unwrap_or_else(|_| panic!("{key}: the next use hangs"));
            if ready {
                assert!(polls > 0, "{name} is ready before it is polled");
                return;
            }
            self.drops += 1;
        }
    }

    async fn state(&self, text: &str) -> State {
        self.store.read(&terms(CONSUMER).consumer, &[key(text)]).await.expect("the store works")[0]
    }

    async fn decision(&self, text: &str, number: u128) -> Decision {
        self.store.claim(&terms(CONSUMER), &[request(text, number)]).await.expect("the store works")[0].decision
    }

    async fn claimed(&self, text: &str, number: u128) {
        assert!(matches!(self.decision(text, number).await, Decision::Run(_)), "{text}");
    }

    /// The holder completes its job.
    async fn completes(&self, text: &str, number: u128, fence: i64) {
        let fenced = self.store.complete(&terms(CONSUMER), &[completion(text, number, fence)]).await;
        assert_eq!(fenced.expect("the store works"), [Fenced::Applied], "{text}");
        assert!(matches!(self.state(text).await, State::Completed { .. }), "{text}");
    }

    /// A transaction with the claim of `number` and, if it gets the job, its effect.
    async fn transaction(&self, text: &str, number: u128) -> Box<dyn StoreTx> {
        let mut tx = self.store.begin().await.expect("the store works").into_inner();
        let answers = tx.claim(&terms(CONSUMER), &[request(text, number)]).await.expect("the store works");
        match answers[0].decision {
            Decision::Run(_) => {
                tx.execute(effect(text)).await.expect("the store works");
            }
            Decision::Duplicate => {}
            other => panic!("{text}: {other:?}"),
        }
        tx
    }

    /// Asks for the job in a transaction and commits: if it was committed before, nothing happens.
    async fn has_one_effect(&self, text: &str) {
        self.transaction(text, 1).await.commit().await.expect("the store works");
        self.effects(text, Mode::Atomic, 1).await;
        assert!(matches!(self.state(text).await, State::Completed { .. }), "{text}");
    }

    async fn effects(&self, text: &str, mode: Mode, expected: i64) {
        let query = match mode {
            Mode::Atomic => format!("SELECT count(*) FROM invoices WHERE id = '{text}'"),
            Mode::Lease => format!("SELECT count(*) FROM charges WHERE job = '{text}'"),
        };
        let outside = self.place.outside().await;
        let effects = if mode == Mode::Atomic { &self.rows } else { &outside };
        assert_eq!(effects.number(&query).await, expected, "{text}: effects");
        outside.close().await;
    }
}

fn effect(text: &str) -> idem_core::store::Statement {
    sql("INSERT INTO invoices (id) VALUES ($1)").bind(text)
}

fn completion(text: &str, number: u128, fence: i64) -> Completion {
    Completion { request: request(text, number), attempt: 1, fence, returned: Returned::default() }
}

fn failed_try(text: &str) -> FailedTry {
    FailedTry { key: key(text), token: token(1), retry: Retry::After(Duration::ZERO), error: "it failed".to_owned() }
}

fn token(number: u128) -> Token {
    Token(Uuid::from_u128(number))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_methods_of_a_store() {
    for engine in ENGINES {
        let mut bed = Bed::new(engine).await;
        bed.at_every_await(
            "claim",
            async |bed, polls, text| {
                polled(polls, bed.store.claim(&terms(CONSUMER), &[request(text, 1)])).await.is_some()
            },
            async |bed, text| {
                bed.claimed(text, 1).await;
                bed.completes(text, 1, 1).await;
            },
        )
        .await;
        bed.at_every_await(
            "complete",
            async |bed, polls, text| {
                bed.claimed(text, 1).await;
                polled(polls, bed.store.complete(&terms(CONSUMER), &[completion(text, 1, 1)])).await.is_some()
            },
            async |bed, text| bed.completes(text, 1, 1).await,
        )
        .await;
        bed.at_every_await(
            "renew",
            async |bed, polls, text| {
                bed.claimed(text, 1).await;
                polled(polls, bed.store.renew(&terms(CONSUMER), &[(key(text), token(1))])).await.is_some()
            },
            async |bed, text| {
                let renewed = bed.store.renew(&terms(CONSUMER), &[(key(text), token(1))]).await;
                assert_eq!(renewed.expect("the store works"), [Renewal::Renewed], "{text}");
                bed.completes(text, 1, 1).await;
            },
        )
        .await;
        bed.at_every_await(
            "fail",
            async |bed, polls, text| {
                bed.claimed(text, 1).await;
                polled(polls, bed.store.fail(&terms(CONSUMER), &[failed_try(text)])).await.is_some()
            },
            async |bed, text| {
                let written = bed.store.fail(&terms(CONSUMER), &[failed_try(text)]).await.expect("the store works");
                assert_eq!(written[0].fenced, Fenced::Applied, "{text}");
                bed.claimed(text, 2).await;
                bed.completes(text, 2, 2).await;
            },
        )
        .await;
        bed.at_every_await(
            "release",
            async |bed, polls, text| {
                bed.claimed(text, 1).await;
                polled(polls, bed.store.release(&terms(CONSUMER), &[(key(text), token(1))])).await.is_some()
            },
            async |bed, text| {
                // Applied now, or before.
                bed.store.release(&terms(CONSUMER), &[(key(text), token(1))]).await.expect("the store works");
                assert!(matches!(bed.state(text).await, State::Received(_)), "{text}");
                bed.claimed(text, 2).await;
                bed.completes(text, 2, 2).await;
            },
        )
        .await;
        bed.at_every_await(
            "begin",
            async |bed, polls, _| polled(polls, bed.store.begin()).await.is_some(),
            async |bed, text| bed.has_one_effect(text).await,
        )
        .await;
        bed.at_every_await(
            "read",
            async |bed, polls, text| {
                polled(polls, bed.store.read(&terms(CONSUMER).consumer, &[key(text)])).await.is_some()
            },
            async |bed, text| assert_eq!(bed.state(text).await, State::Absent),
        )
        .await;
        bed.at_every_await(
            "ping",
            async |bed, polls, _| polled(polls, bed.store.ping()).await.is_some(),
            async |bed, text| {
                bed.store.ping().await.expect("the store works");
                bed.has_one_effect(text).await;
            },
        )
        .await;
        bed.at_every_await(
            "migrate",
            async |bed, polls, _| polled(polls, bed.store.migrate()).await.is_some(),
            async |bed, text| {
                bed.store.migrate().await.expect("the store works");
                bed.has_one_effect(text).await;
            },
        )
        .await;
        // Pools open their connections when these are first used.
        bed.at_every_await(
            "first-claim",
            async |bed, polls, text| {
                let store = connect(&bed.place.address.store, &options()).await.expect("the store works");
                let ready = polled(polls, store.claim(&terms(CONSUMER), &[request(text, 1)])).await.is_some();
                let answers = store.claim(&terms(CONSUMER), &[request(text, 1)]).await.expect("the store works");
                assert!(matches!(answers[0].decision, Decision::Run(_)), "{text}");
                store.close().await;
                ready
            },
            async |bed, text| bed.completes(text, 1, 1).await,
        )
        .await;
        bed.at_every_await(
            "first-ping",
            async |bed, polls, _| {
                let store = connect(&bed.place.address.store, &options()).await.expect("the store works");
                let ready = polled(polls, store.ping()).await.is_some();
                store.ping().await.expect("the store works");
                store.close().await;
                ready
            },
            async |bed, text| bed.has_one_effect(text).await,
        )
        .await;
        bed.at_every_await(
            "connect",
            async |bed, polls, _| polled(polls, connect(&bed.place.address.store, &options())).await.is_some(),
            async |bed, text| {
                let store = connect(&bed.place.address.store, &options()).await.expect("the store works");
                store.ping().await.expect("the store works");
                store.close().await;
                bed.has_one_effect(text).await;
            },
        )
        .await;
        assert_eq!(bed.futures, 12);
        said("Store", &bed);
        // For the last time: the store itself is gone afterwards, with all of its sessions.
        let mut closing = 0;
        for polls in 0.. {
            assert!(polls < MOST_POLLS, "close has no end");
            let store = connect(&bed.place.address.store, &options()).await.expect("the store works");
            store.ping().await.expect("the store works");
            let ready = polled(polls, store.close()).await.is_some();
            timeout(PATIENCE, store.close()).await.expect("it closes");
            store.ping().await.expect_err("it is closed");
            closing = polls;
            if ready {
                break;
            }
        }
        assert!(closing > 0);
        bed.store.close().await;
        bed.place.sessions_end("true").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_methods_of_a_transaction() {
    for engine in ENGINES {
        let mut bed = Bed::new(engine).await;
        // Each attempt drops the transaction too: after a call that did not end, that is all that may be done with it.
        bed.at_every_await(
            "tx-claim",
            async |bed, polls, text| {
                let mut tx = bed.store.begin().await.expect("the store works").into_inner();
                polled(polls, tx.claim(&terms(CONSUMER), &[request(text, 1)])).await.is_some()
            },
            async |bed, text| bed.has_one_effect(text).await,
        )
        .await;
        bed.at_every_await(
            "tx-overwrite",
            async |bed, polls, text| {
                let mut tx = bed.transaction(text, 1).await;
                let record = Record { payload: None, attempts: 1, fence: 1 };
                let state = State::Failed { record, token: Some(token(1)), failure: Failure::Due(Timestamp::EPOCH) };
                let row = (key(text), state, "it failed".to_owned());
                polled(polls, tx.overwrite(&terms(CONSUMER), &[row])).await.is_some()
            },
            async |bed, text| bed.has_one_effect(text).await,
        )
        .await;
        bed.at_every_await(
            "tx-execute",
            async |bed, polls, text| {
                let mut tx = bed.transaction(text, 1).await;
                polled(polls, tx.execute(effect(text))).await.is_some()
            },
            async |bed, text| bed.has_one_effect(text).await,
        )
        .await;
        bed.at_every_await(
            "tx-savepoint",
            async |bed, polls, text| {
                let mut tx = bed.transaction(text, 1).await;
                polled(polls, tx.savepoint()).await.is_some()
            },
            async |bed, text| bed.has_one_effect(text).await,
        )
        .await;
        bed.at_every_await(
            "tx-rollback-to-savepoint",
            async |bed, polls, text| {
                let mut tx = bed.transaction(text, 1).await;
                tx.savepoint().await.expect("the store works");
                polled(polls, tx.rollback_to_savepoint()).await.is_some()
            },
            async |bed, text| bed.has_one_effect(text).await,
        )
        .await;
        bed.at_every_await(
            "tx-release-savepoint",
            async |bed, polls, text| {
                let mut tx = bed.transaction(text, 1).await;
                tx.savepoint().await.expect("the store works");
                polled(polls, tx.release_savepoint()).await.is_some()
            },
            async |bed, text| bed.has_one_effect(text).await,
        )
        .await;
        bed.at_every_await(
            "tx-commit",
            async |bed, polls, text| {
                let tx = bed.transaction(text, 1).await;
                polled(polls, tx.commit()).await.is_some()
            },
            async |bed, text| bed.has_one_effect(text).await,
        )
        .await;
        bed.at_every_await(
            "tx-rollback",
            async |bed, polls, text| {
                let tx = bed.transaction(text, 1).await;
                polled(polls, tx.rollback()).await.is_some()
            },
            async |bed, text| bed.has_one_effect(text).await,
        )
        .await;
        assert_eq!(bed.futures, 8);
        said("StoreTx", &bed);
        bed.store.close().await;
    }
}

/// A handler behind a guard on the bed's store.
async fn guard(bed: &Bed) -> Guard {
    let world = World::new(&bed.place.address.outside, 0).await;
    // The shortest: a run that is dropped leaves its lease.
    let policy = Policy::default().lease(Duration::from_millis(300));
    Guard::new(Arc::clone(&bed.store)).state(world).policy(policy)
}

fn orders(text: &str) -> [Order; 2] {
    ["a", "b"].map(|part| Order { id: format!("{text}-{part}"), ..Order::default() })
}

async fn comes_to_its_end(bed: &Bed, guarded: &Guarded, orders: &[Order]) {
    let again = orders.iter().map(|order| delivery(guarded, order, "m")).collect();
    drive("after the drop", guarded, again, |_, _| {}).await;
    for Order { id, .. } in orders {
        bed.effects(id, guarded.spec().mode, 1).await;
        let completed =
            format!("SELECT count(*) FROM processed_jobs WHERE idempotency_key = '{id}' AND status = 'COMPLETED'");
        assert_eq!(bed.rows.number(&completed).await, 1, "{id}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guarded_run() {
    for engine in ENGINES {
        let mut bed = Bed::new(engine).await;
        let guard = guard(&bed).await;
        for kind in Kind::ALL {
            let guarded = kind.bind(&guard);
            bed.at_every_await(
                &format!("run-{kind:?}"),
                async |_, polls, text| {
                    let deliveries = orders(text).iter().map(|order| delivery(&guarded, order, "m")).collect();
                    let stop = CancellationToken::new();
                    let ignore = |_, _| {};
                    polled(polls, guarded.run(deliveries, &stop, &ignore)).await.is_some()
                },
                async |bed, text| comes_to_its_end(bed, &guarded, &orders(text)).await,
            )
            .await;
        }
        assert_eq!(bed.futures, Kind::ALL.len());
        said("Guarded::run", &bed);
        bed.store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_guarded_run() {
    for engine in ENGINES {
        let mut bed = Bed::new(engine).await;
        let guard = guard(&bed).await;
        for kind in [Kind::Atomic, Kind::Lease] {
            let guarded = kind.bind(&guard);
            let order = |text: &str| Order { id: text.to_owned(), ..Order::default() };
            bed.at_every_await(
                &format!("direct-{kind:?}"),
                async |_, polls, text| {
                    let running = match kind.mode() {
                        Mode::Atomic => handlers::atomic.run(&guard, order(text)),
                        Mode::Lease => handlers::lease.run(&guard, order(text)),
                    };
                    polled(polls, running).await.is_some_and(|outcome| outcome.is_ok())
                },
                async |bed, text| comes_to_its_end(bed, &guarded, &[order(text)]).await,
            )
            .await;
        }
        said("RunGuarded::run", &bed);
        bed.store.close().await;
    }
}

fn said(what: &str, bed: &Bed) {
    let Bed { place, futures, drops, .. } = bed;
    assert!(drops > futures, "{what}: no future was dropped while it waited");
    tell(&format!("cancellation: {what} on {}: {futures} futures, {drops} drops", place.engine));
}
