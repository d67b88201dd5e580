//! A network that cuts, delays and swallows: between the guard and PostgreSQL is a relay, and every message must come to its
//! end with one effect, whatever it does (T1, T2, and a store that is away costs no attempt).
//!
//! `IDEM_TEST_CUTS` is the number of faults for each kind of handlers, `IDEM_TEST_SEED` what they are drawn from.

mod support;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use idem_core::store::{Engine, StoreOptions, connect};
use idem_core::{ConsumerName, DuplicateKind, EventKey, FailureKind, Guard, Guarded, Mode, Outcome, Policy};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::{sleep, timeout};

use crate::support::handlers::{Kind, Order, World, delivery};
use crate::support::relay::{Direction, Fault, Plan, Relay};
use crate::support::{PATIENCE, Place, Sql, drive, seed, setting, tell};

/// Each has a relay and a store of its own.
const WORKERS: u64 = 12;
const LEASE: Duration = Duration::from_millis(600);
/// Longer than any delay, so that only what never comes back costs an atomic handler its time.
const MAX_RUN: Duration = Duration::from_secs(3);
const LONGEST_DELAY: u64 = 700;
/// Beyond `MAX_RUN`, as the options ask for.
const IDLE_TRANSACTION: Duration = Duration::from_secs(4);

fn options() -> StoreOptions {
    StoreOptions::default()
        .max_connections(2)
        .acquire_timeout(Duration::from_millis(1000))
        .call_timeout(Duration::from_millis(500))
        .lock_timeout(Duration::from_millis(250))
        .idle_transaction_timeout(IDLE_TRANSACTION)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t1_a_cut_neither_loses_nor_doubles_an_atomic_effect() {
    attack(Engine::Postgres, Kind::Atomic).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t1_a_cut_neither_loses_nor_doubles_the_effects_of_an_atomic_batch() {
    attack(Engine::Postgres, Kind::AtomicBatch).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t2_a_cut_neither_loses_nor_doubles_an_outside_effect() {
    attack(Engine::Postgres, Kind::Lease).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t2_a_cut_neither_loses_nor_doubles_the_outside_effects_of_a_batch() {
    attack(Engine::Postgres, Kind::LeaseBatch).await;
}

/// A pool of one connection, of which each answer vanishes in turn: also the one by which a connection that is given back
/// shows that it lives. The store must get another one each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_answer_that_vanishes_costs_the_pool_its_place() {
    let place = Place::new(Engine::Postgres).await;
    let relay = Relay::new(server_of(&place.address.store), || {}).await;
    let store = connect(&through(&place.address.store, &relay), &options().max_connections(1)).await.expect("it works");
    let (consumer, keys) =
        (ConsumerName::new("nobody").expect("a name"), [EventKey::from_parts(["A"]).expect("a key")]);
    let reads = async || {
        timeout(PATIENCE, async { while store.read(&consumer, &keys).await.is_err() {} })
            .await
            .expect("it reads again");
    };
    reads().await;
    for chunk in 0..4 {
        relay.arm(Some(Plan { direction: Direction::ToClient, chunk, fault: Fault::Blackhole(PATIENCE) }));
        // Each read is answered, and so is the sign of life after it.
        for _ in 0..3 {
            reads().await;
        }
        assert!(relay.has_struck(), "{chunk}");
    }
    relay.arm(None);
    store.close().await;
}

/// A connection that was idle while the network lost it answers nothing and refuses nothing. Another one is opened in time:
/// else each such connection of a pool would cost a call, long after the network is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_died_in_silence_costs_no_call() {
    let place = Place::new(Engine::Postgres).await;
    let relay = Relay::new(server_of(&place.address.store), || {}).await;
    let store = connect(&through(&place.address.store, &relay), &StoreOptions::default()).await.expect("it works");
    let (consumer, keys) =
        (ConsumerName::new("nobody").expect("a name"), [EventKey::from_parts(["A"]).expect("a key")]);
    store.read(&consumer, &keys).await.expect("the store works");
    // Idle for so long that the store no longer trusts it.
    sleep(Duration::from_secs(2)).await;
    relay.arm(Some(Plan { direction: Direction::ToClient, chunk: 0, fault: Fault::Blackhole(PATIENCE) }));
    store.read(&consumer, &keys).await.expect("by another connection");
    assert!(relay.has_struck());
    relay.arm(None);
    store.close().await;
}

/// What happened, summed over workers.
#[derive(Default)]
struct Counts {
    jobs: u64,
    /// Faults that happened: connections that ended, chunks that were late, chunks that vanished.
    cuts: u64,
    delays: u64,
    blackholes: u64,
    /// Handlers whose own statement got no answer before their time was up: the only tries that a fault may cost in atomic
    /// mode, since nobody can tell this from a handler that hangs.
    hung: u64,
    lost_leases: u64,
    undecided: u64,
}

impl Counts {
    fn faults(&self) -> u64 {
        self.cuts + self.delays + self.blackholes
    }
}

async fn attack(engine: Engine, kind: Kind) {
    let place = Place::new(engine).await;
    let goal = setting("IDEM_TEST_CUTS", 200).div_ceil(WORKERS);
    let working = (0..WORKERS).map(|number| work(&place, kind, number, goal));
    let mut total = Counts::default();
    for counts in join_all(working).await {
        total.jobs += counts.jobs;
        total.cuts += counts.cuts;
        total.delays += counts.delays;
        total.blackholes += counts.blackholes;
        total.hung += counts.hung;
        total.lost_leases += counts.lost_leases;
        total.undecided += counts.undecided;
    }
    assert!(total.faults() >= goal * WORKERS);

    // The server ends what a vanished worker left open, at the latest when its transaction was idle for too long.
    place.sessions_end("state LIKE 'idle in transaction%'").await;
    place.sessions_end("true").await;
    let rows = place.rows().await;
    let jobs = i64::try_from(total.jobs).expect("a small number");
    let table = if kind.mode() == Mode::Atomic { "invoices" } else { "charges" };
    let column = if kind.mode() == Mode::Atomic { "id" } else { "job" };
    for (what, query) in [
        ("effects", format!("SELECT count(*) FROM {table}")),
        ("jobs with an effect", format!("SELECT count(DISTINCT {column}) FROM {table}")),
        ("rows", "SELECT count(*) FROM processed_jobs".to_owned()),
        ("COMPLETED rows", "SELECT count(*) FROM processed_jobs WHERE status = 'COMPLETED'".to_owned()),
    ] {
        assert_eq!(rows.number(&query).await, jobs, "{what} with IDEM_TEST_SEED={}", seed());
    }
    let Counts { jobs, cuts, delays, blackholes, hung, lost_leases, undecided } = total;
    tell(&format!(
        "network: {engine} {kind:?}: {} faults ({cuts} cuts, {delays} delays, {blackholes} blackholes), {jobs} jobs, \
         {undecided} undecided, {hung} hung handlers, {lost_leases} lost leases, seed {}",
        cuts + delays + blackholes,
        seed()
    ));
}

/// The URL with the relay's host and port instead of the server's.
fn through(url: &str, relay: &Relay) -> String {
    let server = server_of(url);
    url.replacen(server, &format!("127.0.0.1:{}", relay.port), 1)
}

fn server_of(url: &str) -> &str {
    let after_scheme = url.split_once("://").expect("a URL").1;
    let authority = after_scheme.split(['/', '?']).next().expect("there is always a first part");
    authority.rsplit_once('@').map_or(authority, |(_, server)| server)
}

/// One worker drives one message or batch after the other through its relay, each with one fault on its way.
async fn work(place: &Place, kind: Kind, number: u64, goal: u64) -> Counts {
    let what = format!("{kind:?}, worker {number}, IDEM_TEST_SEED={}", seed());
    let mut random = StdRng::seed_from_u64(seed().wrapping_mul(1_000_003) ^ number);
    let world = World::new(&place.address.outside, number).await;
    let in_statement = Arc::clone(&world.in_statement);
    // Whether the fault came upon a handler's own statement.
    let upon_handler = Arc::new(AtomicBool::new(false));
    let (statement, struck) = (Arc::clone(&in_statement), Arc::clone(&upon_handler));
    let relay = Relay::new(server_of(&place.address.store), move || {
        struck.store(statement.load(Ordering::SeqCst), Ordering::SeqCst);
    })
    .await;
    let store = connect(&through(&place.address.store, &relay), &options()).await.expect("the store works");
    let policy = Policy::default()
        .lease(LEASE)
        .max_run(if kind.mode() == Mode::Atomic { MAX_RUN } else { PATIENCE })
        .attempts(3)
        .backoff(Duration::from_millis(1), Duration::from_millis(1));
    let guarded = kind.bind(&Guard::new(Arc::clone(&store)).state(world).policy(policy));
    let rows = place.rows().await;

    let mut counts = Counts::default();
    let mut usual = [8, 8];
    for turn in 0_u64.. {
        if counts.faults() == goal {
            break;
        }
        assert!(turn < goal * 10 + 20, "{what}: the faults do not meet the messages");
        let orders = orders(kind, number, turn, &mut random);
        // The first ones show how many chunks there are to choose from.
        let plan = (turn >= 2).then(|| plan(usual, &mut random));
        in_statement.store(false, Ordering::SeqCst);
        upon_handler.store(false, Ordering::SeqCst);
        relay.arm(plan);
        let mut seen = Seen::default();
        let deliveries = orders.iter().map(|order| delivery(&guarded, order, &format!("turn {turn}"))).collect();
        drive(&format!("{what}, {plan:?}"), &guarded, deliveries, |delivery, outcome| {
            let loses_its_try = upon_handler.load(Ordering::SeqCst) && silent(plan);
            seen.note(&format!("{what}, {plan:?}"), delivery.key(), outcome, loses_its_try);
        })
        .await;
        let (passed, struck) = (relay.passed(), relay.has_struck());
        relay.arm(None);
        counts.jobs += orders.len() as u64;
        counts.hung += seen.hung.values().sum::<i64>() as u64;
        counts.lost_leases += seen.lost.values().sum::<i64>() as u64;
        counts.undecided += seen.undecided;
        match plan {
            Some(plan) if struck => match plan.fault {
                Fault::Delay(_) => counts.delays += 1,
                Fault::Blackhole(_) => counts.blackholes += 1,
                Fault::CutBefore | Fault::CutWithin | Fault::CutAfter => counts.cuts += 1,
            },
            _ => usual = passed.map(|chunks| chunks.max(1)),
        }
        check(&format!("{what}, {plan:?}, {:?}", seen), &rows, &guarded, &orders, &seen).await;
    }
    store.close().await;
    rows.close().await;
    counts
}

fn orders(kind: Kind, worker: u64, turn: u64, random: &mut StdRng) -> Vec<Order> {
    let several = if kind.is_batch() { random.random_range(2..=5) } else { random.random_range(1..=3) };
    let takes = match kind {
        Kind::Atomic | Kind::AtomicBatch => 0,
        // So long that leases are renewed meanwhile.
        Kind::Lease => random.random_range(0..500),
        Kind::LeaseBatch => random.random_range(0..500 / several),
    };
    (0..several).map(|part| Order { id: format!("{worker}-{turn}-{part}"), takes, ..Order::default() }).collect()
}

fn plan(usual: [usize; 2], random: &mut StdRng) -> Plan {
    let direction = if random.random() { Direction::ToServer } else { Direction::ToClient };
    let fault = match random.random_range(0..10) {
        0..=1 => Fault::CutBefore,
        2..=3 => Fault::CutWithin,
        4..=6 => Fault::CutAfter,
        7..=8 => Fault::Delay(Duration::from_millis(random.random_range(20..=LONGEST_DELAY))),
        _ => Fault::Blackhole(IDLE_TRANSACTION + Duration::from_millis(500)),
    };
    Plan { direction, chunk: random.random_range(0..usual[direction as usize]), fault }
}

/// Whether what was sent gets no answer and no error.
fn silent(plan: Option<Plan>) -> bool {
    plan.is_some_and(|plan| matches!(plan.fault, Fault::Blackhole(_)))
}

/// The outcomes on the way of one turn's messages.
#[derive(Debug, Default)]
struct Seen {
    hung: HashMap<EventKey, i64>,
    lost: HashMap<EventKey, i64>,
    undecided: u64,
}

impl Seen {
    fn note(&mut self, what: &str, key: &EventKey, outcome: &Outcome, loses_its_try: bool) {
        match outcome {
            Outcome::Completed { already_done: None, .. } => {}
            Outcome::Undecided(_) => self.undecided += 1,
            Outcome::LeaseLost => *self.lost.entry(key.clone()).or_default() += 1,
            Outcome::Failed { failure, .. } if failure.kind == FailureKind::Timeout && loses_its_try => {
                *self.hung.entry(key.clone()).or_default() += 1;
            }
            Outcome::NotDue { .. } if self.hung.contains_key(key) => {}
            Outcome::InProgress { .. } if self.lost.contains_key(key) => {}
            other => panic!("{what}: {key} ended as {other:?}"),
        }
    }
}

/// What the turn has left, seen by another way, and that the store works again.
async fn check(what: &str, rows: &Sql, guarded: &Guarded, orders: &[Order], seen: &Seen) {
    for order in orders {
        let id = &order.id;
        let attempts =
            rows.number(&format!("SELECT attempts FROM processed_jobs WHERE idempotency_key = '{id}'")).await;
        let key = EventKey::from_parts([id.as_str()]).expect("a key");
        let counted = |by: &HashMap<EventKey, i64>| by.get(&key).copied().unwrap_or_default();
        assert_eq!(attempts, 1 + counted(&seen.hung) + counted(&seen.lost), "{what}: tries of {id}");
    }
    let again = orders.iter().map(|order| delivery(guarded, order, "once more")).collect();
    // A connection that was cut behind an answer shows it only now.
    drive(what, guarded, again, |delivery, outcome| {
        let duplicate = matches!(outcome, Outcome::Duplicate(DuplicateKind::Producer) | Outcome::Undecided(_));
        assert!(duplicate, "{what}: {} once more: {outcome:?}", delivery.key());
    })
    .await;
}
