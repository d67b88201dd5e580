//! A handler that holds a lease completes its job inside a transaction of its own: both stand or neither does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use idem_core::store::contract::Subject;
use idem_core::store::{PgStore, StoreOptions, connect};
use idem_core::{
    AlreadyDone, CompleteError, FailureKind, Guard, Guarded, Job, Outcome, Policy, State, Undecided, idempotent,
};
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool, SqlitePool};

use crate::bench::{
    self, Failed, Order, PATIENCE, World, delivery, execute, is_completed, number, order, postgres_row, round, run,
    run_child, run_one, sqlite_row, until, until_ended,
};
use crate::subjects::{self, PostgresSubject};

/// What the handlers tell the test.
#[derive(Clone, Default)]
struct Told {
    /// The transaction is open and holds the completion.
    is_open: Arc<AtomicBool>,
    /// The handler came to its end after its commit.
    is_after: Arc<AtomicBool>,
    /// `complete_in` said that the lease was lost.
    lost: Arc<AtomicBool>,
    /// A handler has hung once.
    is_second_time: Arc<AtomicBool>,
}

async fn write(event: &Order, tx: &mut PgConnection) -> Result<(), Failed> {
    sqlx::query("INSERT INTO ledger (id) VALUES ($1)").bind(&event.id).execute(tx).await?;
    Ok(())
}

#[idempotent(key = "id", consumer = "ledger", attempts = 3, backoff = "1ms..1ms", domain_unique = "uq_refs")]
async fn settle(
    event: Order,
    job: &Job,
    pool: State<PgPool>,
    world: State<World>,
    told: State<Told>,
) -> Result<String, Failed> {
    world.begins(&event.id);
    if matches!(event.act.as_str(), "gate first" | "two gates") {
        world.passes_gate().await;
    }
    let mut tx = pool.begin().await?;
    write(&event, &mut tx).await?;
    if let Err(error) = job.complete_in(&mut *tx).await {
        told.lost.store(matches!(error, CompleteError::LeaseLost), Ordering::SeqCst);
        return Err(error.into());
    }
    told.is_open.store(true, Ordering::SeqCst);
    let first = job.attempt() == 1;
    match event.act.as_str() {
        "roll back" if first => {
            tx.rollback().await?;
            return Err(Failed::Again);
        }
        "forget" if first => return Ok("forgotten".to_owned()),
        "hang" if !told.is_second_time.swap(true, Ordering::SeqCst) => std::future::pending().await,
        "gate" | "two gates" => world.passes_gate().await,
        "refused" => {
            sqlx::query("INSERT INTO refs VALUES ('taken')").execute(&mut *tx).await?;
        }
        "abort before" if first => std::process::abort(),
        _ => {}
    }
    tx.commit().await?;
    match event.act.as_str() {
        "abort after" => std::process::abort(),
        "commit and fail" => return Err(Failed::Never),
        "commit twice" => {
            // As a handler does that takes its commit for failed.
            let mut again = pool.begin().await?;
            write(&event, &mut again).await?;
            job.complete_in(&mut *again).await?;
            again.commit().await?;
        }
        "commit and hang" => std::future::pending().await,
        "commit and work" => world.passes_gate().await,
        _ => {}
    }
    told.is_after.store(true, Ordering::SeqCst);
    Ok("settled".to_owned())
}

struct Ledger {
    postgres: PostgresSubject,
    world: World,
    told: Told,
    pool: PgPool,
    lease: Duration,
}

const TABLES: &str = "CREATE TABLE ledger (id text NOT NULL);
    CREATE TABLE refs (id text CONSTRAINT uq_refs UNIQUE);
    INSERT INTO refs VALUES ('taken')";

fn pool(url: &str) -> PgPool {
    sqlx::postgres::PgPoolOptions::new().acquire_timeout(PATIENCE).connect_lazy(url).expect("a URL")
}

impl Ledger {
    async fn new(lease: Duration) -> Self {
        let postgres = subjects::postgres().await;
        execute(&postgres, TABLES).await;
        let pool = pool(&postgres.schema.url);
        Self { postgres, world: World::default(), told: Told::default(), pool, lease }
    }

    fn guard(&self, store: PgStore) -> Guard {
        Guard::new(Arc::new(store))
            .policy(Policy::default().lease(self.lease))
            .state(self.world.clone())
            .state(self.told.clone())
            .state(self.pool.clone())
    }

    fn bind(&self) -> Guarded {
        self.guard(self.postgres.store.clone()).bind(settle).unwrap()
    }

    /// As another process has it.
    async fn other(&self) -> Guarded {
        self.other_with(&StoreOptions::default()).await
    }

    async fn other_with(&self, options: &StoreOptions) -> Guarded {
        let store = PgStore::connect(&self.postgres.schema.url, options).await;
        self.guard(store.expect("PostgreSQL answers")).bind(settle).unwrap()
    }

    fn begins(&self, id: &str, act: &str) -> tokio::task::JoinHandle<Outcome> {
        let (guarded, order) = (self.bind(), order(id, act));
        tokio::spawn(async move { run_one(&guarded, &order).await })
    }

    /// How many effects of this one there are.
    async fn effects(&self, id: &str) -> i64 {
        number(&self.postgres, &format!("SELECT count(*) FROM ledger WHERE id = '{id}'")).await
    }

    async fn row(&self, id: &str) -> (String, i64) {
        let (status, attempts, _) = postgres_row(&self.postgres, id).await.expect("the row is there");
        (status, attempts)
    }

    async fn is_open(&self) {
        until("the completion is written", || async { self.told.is_open.load(Ordering::SeqCst) }).await;
    }
}

const LONG: Duration = subjects::LEASE;

#[tokio::test]
async fn t1_effect_and_completion_are_committed_together() {
    let ledger = Ledger::new(LONG).await;
    let running = ledger.begins("A", "gate");
    ledger.is_open().await;
    assert_eq!((ledger.row("A").await.0.as_str(), ledger.effects("A").await), ("PROCESSING", 0), "nobody sees it yet");
    ledger.world.open_gate(1);
    let outcome = running.await.unwrap();
    assert!(is_completed(&outcome), "{outcome:?}");
    assert_eq!((ledger.row("A").await, ledger.effects("A").await), (("COMPLETED".into(), 1), 1));
    let again = run_one(&ledger.bind(), &order("A", "gate")).await;
    assert!(matches!(again, Outcome::Duplicate(_)), "{again:?}");
}

#[tokio::test]
async fn t1_what_is_rolled_back_is_a_failed_try_and_runs_again() {
    let ledger = Ledger::new(LONG).await;
    let guarded = ledger.bind();
    let first = run_one(&guarded, &order("A", "roll back")).await;
    let Outcome::Failed { attempt: 1, retry_in: Some(_), failure } = &first else { panic!("{first:?}") };
    assert_eq!(failure.message, "try again");
    assert_eq!((ledger.row("A").await, ledger.effects("A").await), (("FAILED".into(), 1), 0));
    let ended = until_ended(&guarded, vec![delivery(&guarded, &order("A", "roll back"))]).await;
    assert!(matches!(ended["A"], Outcome::Completed { attempt: 2, .. }), "{ended:?}");
    assert_eq!((ledger.row("A").await, ledger.effects("A").await), (("COMPLETED".into(), 2), 1));
}

#[tokio::test]
async fn t1_a_commit_that_is_forgotten_is_a_failed_try() {
    let ledger = Ledger::new(LONG).await;
    let guarded = ledger.bind();
    let first = run_one(&guarded, &order("A", "forget")).await;
    let Outcome::Failed { attempt: 1, retry_in: Some(_), failure } = &first else { panic!("{first:?}") };
    assert_eq!(failure.kind, FailureKind::Transient);
    assert_eq!(
        failure.message,
        "the handler returned without committing the transaction in which it completed its job"
    );
    let (status, attempts, error) = postgres_row(&ledger.postgres, "A").await.unwrap();
    assert_eq!((status.as_str(), attempts, error.as_ref()), ("FAILED", 1, Some(&failure.message)));
    assert_eq!(ledger.effects("A").await, 0);
    let ended = until_ended(&guarded, vec![delivery(&guarded, &order("A", "forget"))]).await;
    assert!(matches!(ended["A"], Outcome::Completed { attempt: 2, .. }), "{ended:?}");
    assert_eq!(ledger.effects("A").await, 1);
}

#[tokio::test]
async fn c5_whoever_lost_the_job_loses_its_effect_too() {
    let ledger = Ledger::new(LONG).await;
    let late = ledger.begins("A", "gate first");
    ledger.world.has_begun(1).await;
    ledger.postgres.pass(LONG).await;
    // Its successor does the same, and is done before it.
    let other = ledger.other().await;
    let second = tokio::spawn(async move { run_one(&other, &order("A", "gate first")).await });
    ledger.world.has_begun(2).await;
    // Whoever waits first goes first, and that is the late one: it finds that the job is another's.
    ledger.world.open_gate(1);
    let late = late.await.unwrap();
    assert!(matches!(late, Outcome::LeaseLost), "{late:?}");
    assert!(ledger.told.lost.load(Ordering::SeqCst), "it was told so by complete_in");
    assert_eq!(ledger.effects("A").await, 0);
    ledger.world.open_gate(1);
    let second = second.await.unwrap();
    assert!(matches!(second, Outcome::Completed { attempt: 2, takeover: true, .. }), "{second:?}");
    assert_eq!(ledger.effects("A").await, 1);
}

#[tokio::test]
async fn l3_nobody_takes_over_while_the_transaction_is_open() {
    let ledger = Ledger::new(LONG).await;
    let running = ledger.begins("A", "two gates");
    ledger.world.has_begun(1).await;
    // Its lease has run out, but nobody has noticed: it still holds the row's token, and completes.
    ledger.postgres.pass(2 * LONG).await;
    ledger.world.open_gate(1);
    ledger.is_open().await;
    let impatient = StoreOptions::default().lock_timeout(Duration::from_millis(200));
    let other = ledger.other_with(&impatient).await;
    for _ in 0..3 {
        let found = run_one(&other, &order("A", "two gates")).await;
        // A row that an open transaction has changed is waited for, as long as locks are.
        let is_kept = matches!(found, Outcome::InProgress { .. } | Outcome::Undecided(Undecided::Contention(_)));
        assert!(is_kept, "{found:?}");
    }
    ledger.world.open_gate(1);
    let outcome = running.await.unwrap();
    assert!(is_completed(&outcome), "{outcome:?}");
    assert_eq!((ledger.row("A").await, ledger.effects("A").await), (("COMPLETED".into(), 1), 1));
    let found = run_one(&other, &order("A", "two gates")).await;
    assert!(matches!(found, Outcome::Duplicate(_)), "{found:?}");
    assert_eq!(ledger.world.runs(), ["A"]);
}

#[tokio::test]
async fn l2_an_open_transaction_ends_with_its_lease_and_holds_up_no_other_job() {
    let lease = Duration::from_millis(1500);
    let ledger = Ledger::new(lease).await;
    let guarded = ledger.bind();
    let (decided, mut outcomes) = tokio::sync::mpsc::unbounded_channel();
    let running = tokio::spawn(async move {
        let orders = [order("A", "hang"), order("B", "gate first")];
        let deliveries = orders.iter().map(|order| delivery(&guarded, order)).collect();
        let report = |delivery, outcome| drop(decided.send((delivery, outcome)));
        guarded.run(deliveries, &tokio_util::sync::CancellationToken::new(), &report).await;
    });
    ledger.world.has_begun(2).await;
    ledger.is_open().await;
    let (again, outcome) = outcomes.recv().await.expect("one is decided");
    assert_eq!(again.key().as_str(), "A");
    assert!(matches!(outcome, Outcome::Undecided(Undecided::Unavailable(_))), "{outcome:?}");
    // The other one's lease was renewed meanwhile: it is still held.
    let held = "SELECT count(*) FROM processed_jobs WHERE idempotency_key = 'B' AND locked_until > clock_timestamp()";
    assert_eq!(number(&ledger.postgres, held).await, 1);
    assert_eq!(ledger.effects("A").await, 0);
    ledger.world.open_gate(1);
    let (_, outcome) = outcomes.recv().await.expect("the other is decided");
    assert!(is_completed(&outcome), "{outcome:?}");
    running.await.unwrap();
    // Its attempt was given back.
    let ended = until_ended(&ledger.bind(), vec![again]).await;
    assert!(matches!(ended["A"], Outcome::Completed { attempt: 1, .. }), "{ended:?}");
    assert_eq!((ledger.row("A").await, ledger.effects("A").await), (("COMPLETED".into(), 1), 1));
}

#[tokio::test]
async fn what_a_handler_does_after_its_commit_is_not_broken_off_by_a_renewal() {
    let ledger = Ledger::new(Duration::from_millis(1500)).await;
    let running = ledger.begins("A", "commit and work");
    until("it is committed", || async { ledger.effects("A").await == 1 }).await;
    // Renewals come every third of the lease, and find no lease any more.
    tokio::time::sleep(Duration::from_millis(800)).await;
    ledger.world.open_gate(1);
    let outcome = running.await.unwrap();
    assert!(is_completed(&outcome), "{outcome:?}");
    assert!(ledger.told.is_after.load(Ordering::SeqCst), "the handler came to its end");
}

#[tokio::test]
async fn what_is_committed_is_completed_however_the_handler_ends() {
    // Dropped at the end of its lease, or of its own time.
    let ledger = Ledger::new(Duration::from_millis(600)).await;
    let outcome = ledger.begins("A", "commit and hang").await.unwrap();
    assert!(is_completed(&outcome), "{outcome:?}");
    assert_eq!((ledger.row("A").await, ledger.effects("A").await), (("COMPLETED".into(), 1), 1));
    // A failure that comes too late is none, and nothing runs again.
    let outcome = ledger.begins("B", "commit and fail").await.unwrap();
    assert!(matches!(outcome, Outcome::LeaseLost), "{outcome:?}");
    let guarded = ledger.bind();
    let ended = until_ended(&guarded, vec![delivery(&guarded, &order("B", "commit and fail"))]).await;
    assert!(matches!(ended["B"], Outcome::Duplicate(_)), "{ended:?}");
    assert_eq!((ledger.row("B").await, ledger.effects("B").await), (("COMPLETED".into(), 1), 1));
}

#[tokio::test]
async fn t1_a_job_is_completed_in_one_transaction_only() {
    let ledger = Ledger::new(LONG).await;
    let guarded = ledger.bind();
    let first = run_one(&guarded, &order("A", "commit twice")).await;
    assert!(matches!(first, Outcome::LeaseLost), "{first:?}");
    assert_eq!(ledger.effects("A").await, 1, "what it wrote the second time is rolled back");
    let again = run_one(&guarded, &order("A", "commit twice")).await;
    assert!(matches!(again, Outcome::Duplicate(_)), "{again:?}");
}

#[tokio::test]
async fn t3_the_domains_constraint_completes_the_job_although_its_transaction_is_refused() {
    let ledger = Ledger::new(LONG).await;
    let outcome = ledger.begins("A", "refused").await.unwrap();
    assert!(
        matches!(outcome, Outcome::Completed { attempt: 1, already_done: Some(AlreadyDone::Domain), .. }),
        "{outcome:?}"
    );
    assert_eq!((ledger.row("A").await, ledger.effects("A").await), (("COMPLETED".into(), 1), 0));
}

// ---- crashes

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    url: String,
    act: String,
}

/// One worker's life.
pub async fn work(Task { url, act }: Task) {
    let store = connect(&url, &StoreOptions::default()).await.expect("the store works");
    let guard = Guard::new(store)
        .policy(Policy::default().lease(Duration::from_millis(400)))
        .state(World::default())
        .state(Told::default())
        .state(pool(&url));
    let guarded = guard.bind(settle).unwrap();
    let ended = until_ended(&guarded, vec![delivery(&guarded, &order("A", &act))]).await;
    assert!(matches!(ended["A"], Outcome::Completed { .. } | Outcome::Duplicate(_)), "{ended:?}");
}

#[tokio::test]
async fn c2_a_crash_leaves_both_or_neither() {
    for (act, after_crash) in [("abort before", ("PROCESSING", 0)), ("abort after", ("COMPLETED", 1))] {
        let ledger = Ledger::new(LONG).await;
        let task = bench::Task::Hybrid(Task { url: ledger.postgres.schema.url.clone(), act: act.to_owned() });
        assert!(!run_child(&task).await, "{act}: it did not crash");
        let row = ledger.row("A").await;
        assert_eq!((row.0.as_str(), ledger.effects("A").await), after_crash, "{act}");
        assert!(run_child(&task).await, "{act}: it does not go on");
        assert_eq!((ledger.row("A").await.0.as_str(), ledger.effects("A").await), ("COMPLETED", 1), "{act}");
    }
}

// ---- batches

/// Completes those itself that are `inside`, all in one transaction; the others are left to the guard.
#[idempotent(key = "id", consumer = "ledger-all", attempts = 3, backoff = "1ms..1ms")]
async fn settle_all(events: Vec<Order>, jobs: &[Job], pool: State<PgPool>) -> Result<(), Failed> {
    let mut tx = pool.begin().await?;
    for (event, job) in events.iter().zip(jobs) {
        write(event, &mut tx).await?;
        if event.act.starts_with("inside") {
            job.complete_in(&mut *tx).await?;
        }
    }
    if events.iter().any(|event| event.act == "never") {
        return Err(Failed::Never);
    }
    tx.commit().await?;
    if events.iter().any(|event| event.act == "fails late") { Err(Failed::Again) } else { Ok(()) }
}

#[tokio::test]
async fn a_batch_handler_may_complete_some_of_its_jobs_itself() {
    let ledger = Ledger::new(LONG).await;
    let guarded = ledger.guard(ledger.postgres.store.clone()).bind(settle_all).unwrap();
    let orders = [order("A", "inside"), order("B", ""), order("C", "inside"), order("D", "")];
    for (id, outcome) in run(&guarded, &orders).await {
        assert!(is_completed(&outcome), "{id}: {outcome:?}");
        assert_eq!((ledger.row(&id).await, ledger.effects(&id).await), (("COMPLETED".into(), 1), 1), "{id}");
    }
}

#[tokio::test]
async fn a_batch_that_fails_after_its_commit_has_completed_what_it_said() {
    let ledger = Ledger::new(LONG).await;
    let guarded = ledger.guard(ledger.postgres.store.clone()).bind(settle_all).unwrap();
    let orders = [order("A", "inside"), order("B", "fails late")];
    let deliveries = orders.iter().map(|order| delivery(&guarded, order)).collect();
    for (delivery, outcome) in round(&guarded, deliveries).await {
        match delivery.key().as_str() {
            // Neither done nor failed here: whoever comes back finds it completed.
            "A" => assert!(matches!(outcome, Outcome::LeaseLost), "{outcome:?}"),
            _ => assert!(matches!(outcome, Outcome::Failed { attempt: 1, .. }), "{outcome:?}"),
        }
    }
    assert_eq!(ledger.row("A").await, ("COMPLETED".into(), 1));
    assert!(matches!(run_one(&guarded, &orders[0]).await, Outcome::Duplicate(_)));
    assert_eq!(ledger.effects("A").await, 1);
}

#[tokio::test]
async fn r1_one_bad_event_of_a_batch_that_completes_its_jobs_itself_fails_alone() {
    let ledger = Ledger::new(LONG).await;
    let guarded = ledger.guard(ledger.postgres.store.clone()).bind(settle_all).unwrap();
    let mut orders: Vec<_> = (0..8).map(|number| order(&format!("A-{number}"), "inside")).collect();
    orders[5].act = "never".to_owned();
    for (id, outcome) in run(&guarded, &orders).await {
        if id == "A-5" {
            assert!(matches!(outcome, Outcome::Failed { attempt: 1, retry_in: None, .. }), "{id}: {outcome:?}");
        } else {
            assert!(is_completed(&outcome), "{id}: {outcome:?}");
            assert_eq!((ledger.row(&id).await, ledger.effects(&id).await), (("COMPLETED".into(), 1), 1), "{id}");
        }
    }
}

// ---- SQLite

#[idempotent(key = "id", consumer = "file", attempts = 2, backoff = "1ms..1ms")]
async fn file(event: Order, job: &Job, pool: State<SqlitePool>) -> Result<(), Failed> {
    let mut tx = pool.begin().await?;
    sqlx::query("INSERT INTO ledger (id) VALUES (?1)").bind(&event.id).execute(&mut *tx).await?;
    job.complete_in(&mut *tx).await?;
    match event.act.as_str() {
        "roll back" if job.attempt() == 1 => Err(Failed::Again),
        "forget" if job.attempt() == 1 => Ok(()),
        _ => Ok(tx.commit().await?),
    }
}

#[tokio::test]
async fn t1_on_sqlite_too() {
    let sqlite = subjects::sqlite().await;
    let pool = sqlite.store.pool().clone();
    sqlx::raw_sql("CREATE TABLE ledger (id TEXT NOT NULL)").execute(&pool).await.unwrap();
    let guarded = Guard::new(sqlite.store()).state(pool.clone()).bind(file).unwrap();
    for (act, attempts) in [("", 1), ("roll back", 2), ("forget", 2)] {
        let id = format!("A {act}");
        let ended = until_ended(&guarded, vec![delivery(&guarded, &order(&id, act))]).await;
        assert!(
            matches!(ended[&id], Outcome::Completed { attempt, .. } if i64::from(attempt) == attempts),
            "{ended:?}"
        );
        let (status, tried, _) = sqlite_row(&sqlite, &id).await.unwrap();
        assert_eq!((status.as_str(), tried), ("COMPLETED", attempts), "{act}");
        let count = "SELECT count(*) FROM ledger WHERE id = ?1";
        let effects: i64 = sqlx::query_scalar(count).bind(&id).fetch_one(&pool).await.unwrap();
        assert_eq!(effects, 1, "{act}");
    }
}

#[tokio::test]
async fn where_no_lease_is_held_there_is_nothing_to_complete() {
    let ledger = Ledger::new(LONG).await;
    let consumer = subjects::terms("ledger").consumer;
    let job = Job::detached(consumer, subjects::key("A"));
    let mut tx = ledger.pool.begin().await.unwrap();
    job.complete_in(&mut *tx).await.expect("it does nothing");
    tx.commit().await.unwrap();
    assert_eq!(postgres_row(&ledger.postgres, "A").await, None);
}
