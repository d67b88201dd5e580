//! An extra lock on a state other than the key: only one run at a time may change it (L5).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use idem_core::machine::State as RowState;
use idem_core::store::contract::Subject;
use idem_core::store::{PgStore, StoreOptions};
use idem_core::{Clock, Guard, Guarded, Job, Outcome, State, SystemClock, Undecided, idempotent};
use sqlx::{PgConnection, PgPool};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::bench::{
    Bench, Failed, Order, PATIENCE, World, delivery, each_engine, execute, is_completed, memory, number, order_on,
    postgres_row, round, run_one, until_ended,
};
use crate::subjects::{self, PostgresSubject, key};
use crate::watched::Watched;

/// Reads a balance, thinks, and writes what it has read plus one: two at once lose one of the two.
async fn add_one(event: &Order, connection: &mut PgConnection, world: &World) -> Result<(), Failed> {
    world.begins(&event.id);
    let _inside = world.enter(&event.account);
    let read = "SELECT balance FROM accounts WHERE id = $1";
    let balance: i64 = sqlx::query_scalar(read).bind(&event.account).fetch_one(&mut *connection).await?;
    tokio::time::sleep(Duration::from_millis(3)).await;
    let write = "UPDATE accounts SET balance = $2 WHERE id = $1";
    sqlx::query(write).bind(&event.account).bind(balance + 1).execute(connection).await?;
    Ok(())
}

#[idempotent(key = "id", consumer = "transfer", lock = "account", lease = "60s")]
async fn transfer(event: Order, pool: State<PgPool>, world: State<World>) -> Result<(), Failed> {
    let mut connection = pool.acquire().await?;
    add_one(&event, &mut connection, &world).await
}

#[idempotent(key = "id", consumer = "posting", lock = "account", lease = "60s")]
async fn posting(event: Order, tx: &mut PgConnection, world: State<World>) -> Result<(), Failed> {
    add_one(&event, tx, &world).await
}

/// Holds its lock until the test lets it go. Does nothing but that.
#[idempotent(
    key = "id",
    consumer = "holding",
    lock = "account",
    lease = "900ms",
    max_run = "60s",
    attempts = 3,
    backoff = "1ms..1ms"
)]
async fn holding(event: Order, job: &Job, world: State<World>) -> Result<(), Failed> {
    world.begins(&event.id);
    let _inside = world.enter(&event.account);
    match event.act.as_str() {
        "wait" => {
            tokio::select! {
                () = world.passes_gate() => {}
                () = job.cancelled() => {
                    world.told.fetch_add(1, Ordering::SeqCst);
                    std::future::pending().await
                }
            }
            Ok(())
        }
        "never" => Err(Failed::Never),
        "panic" => panic!("on purpose"),
        _ => Ok(()),
    }
}

/// The same with a lease that nobody waits for.
#[idempotent(key = "id", consumer = "keeping", lock = "account", lease = "3600s")]
async fn keeping(event: Order, job: &Job, world: State<World>) -> Result<(), Failed> {
    holding::body(event, job, world).await
}

/// Two guards on one database, as two processes have them.
struct Two {
    postgres: PostgresSubject,
    world: World,
    guards: [Guard; 2],
}

impl Two {
    async fn new(accounts: &[&str]) -> Self {
        Self::with(accounts, &StoreOptions::default()).await
    }

    async fn with(accounts: &[&str], options: &StoreOptions) -> Self {
        let postgres = subjects::postgres_with(options, |schema| schema.url.clone()).await;
        execute(&postgres, "CREATE TABLE accounts (id text PRIMARY KEY, balance bigint NOT NULL)").await;
        for account in accounts {
            execute(&postgres, &format!("INSERT INTO accounts VALUES ('{account}', 0)")).await;
        }
        let other = PgStore::connect(&postgres.schema.url, options).await.expect("PostgreSQL answers");
        let world = World::default();
        let pool = sqlx::postgres::PgPoolOptions::new().max_connections(20).acquire_timeout(PATIENCE);
        let pool = pool.connect_lazy(&postgres.schema.url).expect("a URL");
        let guard = |store: PgStore| Guard::new(Arc::new(store)).state(world.clone()).state(pool.clone());
        let guards = [guard(postgres.store.clone()), guard(other)];
        Self { postgres, world, guards }
    }

    async fn balance(&self, account: &str) -> i64 {
        number(&self.postgres, &format!("SELECT balance FROM accounts WHERE id = '{account}'")).await
    }

    async fn most_attempts(&self) -> i64 {
        number(&self.postgres, "SELECT max(attempts) FROM processed_jobs").await
    }
}

/// Runs batches of orders at once, each until its end, and checks that all of them complete.
async fn all_complete(batches: Vec<(Guarded, Vec<Order>)>) {
    let runs = batches.into_iter().map(|(guarded, orders)| {
        tokio::spawn(async move {
            let deliveries = orders.iter().map(|order| delivery(&guarded, order)).collect();
            for (id, outcome) in until_ended(&guarded, deliveries).await {
                assert!(matches!(outcome, Outcome::Completed { attempt: 1, .. }), "{id}: {outcome:?}");
            }
        })
    });
    for ended in join_all(runs).await {
        ended.expect("no panic");
    }
}

const ACCOUNTS: [&str; 3] = ["1", "2", "3"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l5_leases_with_one_lock_never_run_at_once() {
    let two = Two::new(&ACCOUNTS).await;
    let mut batches = Vec::new();
    for (worker, guard) in two.guards.iter().enumerate() {
        let guarded = guard.bind(transfer).unwrap();
        for batch in 0..4 {
            // Each account twice: within a batch they exclude each other too.
            let orders = (0..6)
                .map(|number| order_on(ACCOUNTS[(number + batch) % 3], &format!("{worker}-{batch}-{number}"), ""));
            batches.push((guarded.clone(), orders.collect()));
        }
    }
    all_complete(batches).await;
    assert_eq!(two.world.most_inside(), 1);
    assert_eq!(two.world.runs().len(), 48, "each runs once");
    for account in ACCOUNTS {
        assert_eq!(two.balance(account).await, 16);
    }
    assert_eq!(two.most_attempts().await, 1, "waiting costs nobody an attempt");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l5_transactions_with_overlapping_locks_exclude_each_other_and_do_not_deadlock() {
    let two = Two::new(&ACCOUNTS).await;
    let mut batches = Vec::new();
    for (worker, guard) in two.guards.iter().enumerate() {
        let guarded = guard.bind(posting).unwrap();
        for batch in 0..4 {
            let orders = (0..6).map(|number| {
                // Each batch names its locks in another order, and each of them twice.
                let account = ACCOUNTS[(number * (worker + 1) + batch) % 3];
                order_on(account, &format!("{worker}-{batch}-{number}"), "")
            });
            batches.push((guarded.clone(), orders.collect()));
        }
    }
    all_complete(batches).await;
    // Committed and not only written: a lost update would be missing here.
    let mut sum = 0;
    for account in ACCOUNTS {
        sum += two.balance(account).await;
    }
    assert_eq!(sum, 48);
    assert_eq!(two.most_attempts().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l5_transactions_and_leases_exclude_each_other() {
    let two = Two::new(&["1"]).await;
    let mut batches = Vec::new();
    for (worker, guard) in two.guards.iter().enumerate() {
        let orders = |kind: &str| -> Vec<Order> {
            (0..8).map(|number| order_on("1", &format!("{worker}-{kind}-{number}"), "")).collect()
        };
        for order in orders("posting") {
            batches.push((guard.bind(posting).unwrap(), vec![order]));
        }
        for order in orders("transfer") {
            batches.push((guard.bind(transfer).unwrap(), vec![order]));
        }
    }
    all_complete(batches).await;
    assert_eq!(two.balance("1").await, 32);
    assert_eq!(two.most_attempts().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn few_connections_are_enough_for_many_that_want_one_lock() {
    let two = Two::with(&["1"], &StoreOptions::default().max_connections(2)).await;
    let mut batches = Vec::new();
    for number in 0..20 {
        let guarded = match number % 2 {
            0 => two.guards[0].bind(posting),
            _ => two.guards[0].bind(transfer),
        };
        batches.push((guarded.unwrap(), vec![order_on("1", &format!("A-{number}"), "")]));
    }
    timeout(PATIENCE, all_complete(batches)).await.expect("they do not wait for each other's connections");
    assert_eq!(two.balance("1").await, 20);
}

#[tokio::test]
async fn one_lock_twice_in_a_batch_is_one_transactions() {
    let two = Two::new(&["1"]).await;
    let guarded = two.guards[0].bind(posting).unwrap();
    let deliveries = ["A", "B", "C"].map(|id| delivery(&guarded, &order_on("1", id, ""))).into();
    for (delivery, outcome) in round(&guarded, deliveries).await {
        assert!(is_completed(&outcome), "{}: {outcome:?}", delivery.key());
    }
    assert_eq!(two.balance("1").await, 3);
}

// ---- the life of a lock

struct Holding {
    bench: Bench,
    world: World,
    guarded: Guarded,
}

impl Holding {
    async fn new(bench: Bench) -> Self {
        let world = World::default();
        let guarded = bench.guard().state(world.clone()).bind(holding).unwrap();
        Self { bench, world, guarded }
    }

    /// A job that holds the lock until the gate opens.
    async fn one_holds(&self) -> tokio::task::JoinHandle<Outcome> {
        let guarded = self.guarded.clone();
        let before = self.world.runs().len();
        let holder = tokio::spawn(async move { run_one(&guarded, &order_on("1", "holder", "wait")).await });
        self.world.has_begun(before + 1).await;
        holder
    }

    async fn asks(&self, id: &str) -> Outcome {
        run_one(&self.guarded, &order_on("1", id, "")).await
    }
}

/// A lock that somebody has is waited for, gently (R3).
fn is_busy(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::InProgress { wait } if !wait.is_zero() && *wait <= Duration::from_secs(1))
}

#[tokio::test]
async fn l5_a_lock_is_renewed_with_its_lease_and_waiting_for_it_costs_no_attempt() {
    for bench in each_engine().await.into_iter().filter(|bench| bench.name != "memory") {
        let scene = Holding::new(bench).await;
        let name = scene.bench.name;
        let holder = scene.one_holds().await;
        // Three leases.
        let end = SystemClock.monotonic() + Duration::from_millis(2700);
        while SystemClock.monotonic() < end {
            let waits = scene.asks("waits").await;
            assert!(is_busy(&waits), "{name}: {waits:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let consumer = subjects::terms("holding").consumer;
        let row = scene.bench.store.read(&consumer, &[key("waits")]).await.unwrap();
        assert_eq!(row, [RowState::Absent], "{name}: it was not even claimed");
        // Another state is nobody's concern.
        let other = run_one(&scene.guarded, &order_on("2", "other", "")).await;
        assert!(is_completed(&other), "{name}: {other:?}");
        scene.world.open_gate(1);
        assert!(is_completed(&holder.await.unwrap()), "{name}");
        assert!(is_completed(&scene.asks("waits").await), "{name}: free as soon as it is decided");
        assert_eq!(scene.world.most_inside(), 1, "{name}");
    }
}

#[tokio::test]
async fn l3_a_holder_that_dies_keeps_its_lock_for_its_lease_only() {
    for bench in each_engine().await.into_iter().filter(|bench| bench.name != "memory") {
        let scene = Holding::new(bench).await;
        let name = scene.bench.name;
        let claimed = SystemClock.monotonic();
        let holder = scene.one_holds().await;
        holder.abort();
        assert!(holder.await.unwrap_err().is_cancelled());
        let waits = scene.asks("next").await;
        assert!(is_busy(&waits), "{name}: it is held by a lease, not by a process: {waits:?}");
        let deliveries = vec![delivery(&scene.guarded, &order_on("1", "next", ""))];
        let ended = until_ended(&scene.guarded, deliveries).await;
        assert!(is_completed(&ended["next"]), "{name}: {ended:?}");
        let after = SystemClock.monotonic() - claimed;
        assert!(after >= Duration::from_millis(850), "{name}: nobody had it before: {after:?}");
    }
}

#[tokio::test]
async fn l5_a_lock_is_free_as_soon_as_the_outcome_is_written() {
    for bench in each_engine().await {
        let world = World::default();
        let guarded = bench.guard().state(world.clone()).bind(keeping).unwrap();
        for (id, act) in [("done", ""), ("failed", "never"), ("panics", "panic"), ("next", "")] {
            let outcome = run_one(&guarded, &order_on("1", id, act)).await;
            assert!(
                matches!(outcome, Outcome::Completed { .. } | Outcome::Failed { .. }),
                "{}: {outcome:?}",
                bench.name
            );
        }
        // Nor do those keep one who have nothing to do: a duplicate, a conflict, a dead job.
        let duplicate = run_one(&guarded, &order_on("1", "done", "")).await;
        assert!(matches!(duplicate, Outcome::Duplicate(_)), "{}: {duplicate:?}", bench.name);
        let conflict = run_one(&guarded, &order_on("1", "done", "wait")).await;
        assert!(matches!(conflict, Outcome::Conflict), "{}: {conflict:?}", bench.name);
        let dead = run_one(&guarded, &order_on("1", "failed", "never")).await;
        assert!(matches!(dead, Outcome::Exhausted { .. }), "{}: {dead:?}", bench.name);
        let last = run_one(&guarded, &order_on("1", "last", "")).await;
        assert!(is_completed(&last), "{}: {last:?}", bench.name);
        assert_eq!(world.runs(), ["done", "failed", "panics", "next", "last"]);
    }
}

#[tokio::test]
async fn a_lock_whose_freeing_is_lost_runs_out_and_changes_no_outcome() {
    let bench = memory().await;
    let (store, line) = Watched::new(Arc::clone(&bench.store));
    let guarded = Guard::new(store).state(World::default()).bind(keeping).unwrap();
    line.cut("unlock", 1, false);
    assert!(is_completed(&run_one(&guarded, &order_on("1", "A", "")).await));
    let next = run_one(&guarded, &order_on("1", "B", "")).await;
    assert!(is_busy(&next), "{next:?}");
    bench.subject.pass(subjects::LEASE).await;
    assert!(is_completed(&run_one(&guarded, &order_on("1", "B", "")).await));
}

#[tokio::test]
async fn a_lock_goes_free_with_what_is_written_though_another_write_is_not() {
    let bench = memory().await;
    let (store, line) = Watched::new(Arc::clone(&bench.store));
    let world = World::default();
    let guarded = Guard::new(store).state(world.clone()).bind(keeping).unwrap();
    line.cut("fail", u32::MAX, false);
    let (decided, mut outcomes) = tokio::sync::mpsc::unbounded_channel();
    let running = tokio::spawn({
        let guarded = guarded.clone();
        async move {
            let orders = [order_on("1", "A", ""), order_on("2", "B", "never")];
            let deliveries = orders.iter().map(|order| delivery(&guarded, order)).collect();
            let report = |_, outcome| drop(decided.send(outcome));
            guarded.run(deliveries, &CancellationToken::new(), &report).await;
        }
    });
    assert!(is_completed(&outcomes.recv().await.expect("one can be written")));
    assert!(is_completed(&run_one(&guarded, &order_on("1", "next", "")).await), "its lock is free");
    assert!(is_busy(&run_one(&guarded, &order_on("2", "next", "")).await), "the other's is needed until it is written");
    line.mend();
    assert!(matches!(outcomes.recv().await, Some(Outcome::Failed { retry_in: None, .. })));
    running.await.unwrap();
}

/// The lock that the try before had is not in its own way.
#[tokio::test]
async fn l5_a_job_that_lost_the_store_does_not_wait_for_its_own_lock() {
    let bench = memory().await;
    let (store, line) = Watched::new(Arc::clone(&bench.store));
    let world = World::default();
    let guarded = Guard::new(store).state(world.clone()).bind(holding).unwrap();
    line.cut("extend_locks", u32::MAX, false);
    let mut decided = round(&guarded, vec![delivery(&guarded, &order_on("1", "A", "wait"))]).await;
    let (again, outcome) = decided.remove(0);
    assert!(matches!(outcome, Outcome::Undecided(Undecided::Unavailable(_))), "{outcome:?}");
    assert_eq!(world.was_told(), 1, "a lock that cannot be renewed ends its run like a lease");
    line.mend();
    world.open_gate(1);
    // The store's clock stands still, so neither the lease nor the lock has run out.
    let mut decided = round(&guarded, vec![again]).await;
    let (_, outcome) = decided.remove(0);
    assert!(matches!(outcome, Outcome::Completed { attempt: 1, .. }), "{outcome:?}");
}

#[tokio::test]
async fn a_lock_that_cannot_be_asked_for_claims_nothing() {
    let bench = memory().await;
    let (store, line) = Watched::new(Arc::clone(&bench.store));
    let guarded = Guard::new(store).state(World::default()).bind(keeping).unwrap();
    for takes_effect in [false, true] {
        line.cut("lock", 1, takes_effect);
        let id = format!("A-{takes_effect}");
        let mut decided = round(&guarded, vec![delivery(&guarded, &order_on("1", &id, ""))]).await;
        let (again, outcome) = decided.remove(0);
        assert!(matches!(outcome, Outcome::Undecided(Undecided::Unavailable(_))), "{outcome:?}");
        assert_eq!(line.count("claim"), usize::from(takes_effect));
        let ended = until_ended(&guarded, vec![again]).await;
        assert!(is_completed(&ended[&id]), "{ended:?}");
    }
}

/// A careful claim is committed first, so it must be given back where the lock is somebody else's.
#[tokio::test]
async fn l5_a_careful_message_that_waits_for_a_lock_costs_no_attempt() {
    let two = Two::new(&["1"]).await;
    let keeper = two.guards[1].bind(keeping).unwrap();
    let holder = tokio::spawn(async move { run_one(&keeper, &order_on("1", "holder", "wait")).await });
    two.world.has_begun(1).await;
    let guarded = two.guards[0].bind(posting).unwrap();
    let careful = || delivery(&guarded, &order_on("1", "A", "")).with_care();
    for _ in 0..3 {
        let outcome = guarded.run_one(careful(), &CancellationToken::new()).await;
        assert!(is_busy(&outcome), "{outcome:?}");
        let (status, attempts, _) = postgres_row(&two.postgres, "A").await.expect("it was claimed");
        assert_eq!((status.as_str(), attempts), ("RECEIVED", 0));
    }
    two.world.open_gate(1);
    assert!(is_completed(&holder.await.unwrap()));
    let outcome = guarded.run_one(careful(), &CancellationToken::new()).await;
    assert!(matches!(outcome, Outcome::Completed { attempt: 1, .. }), "{outcome:?}");
    assert_eq!(two.balance("1").await, 1);
}

/// One who was taken over cannot free, or keep, what its successor has.
#[tokio::test]
async fn l5_a_takeover_takes_the_lock_along() {
    let two = Two::new(&["1"]).await;
    let [first, second] = [&two.guards[0], &two.guards[1]].map(|guard| guard.bind(keeping).unwrap());
    let former = tokio::spawn(async move { run_one(&first, &order_on("1", "A", "wait")).await });
    two.world.has_begun(1).await;
    two.postgres.pass(subjects::LEASE).await;
    let taken = tokio::spawn({
        let second = second.clone();
        async move { run_one(&second, &order_on("1", "A", "wait")).await }
    });
    two.world.has_begun(2).await;
    // The former one ends first, and its outcome is not written.
    two.world.open_gate(1);
    let former = former.await.unwrap();
    assert!(matches!(former, Outcome::LeaseLost), "{former:?}");
    let waits = run_one(&second, &order_on("1", "B", "")).await;
    assert!(is_busy(&waits), "the successor has the lock: {waits:?}");
    two.world.open_gate(1);
    let taken = taken.await.unwrap();
    assert!(matches!(taken, Outcome::Completed { attempt: 2, takeover: true, .. }), "{taken:?}");
    assert!(is_completed(&run_one(&second, &order_on("1", "B", "")).await));
}
