//! From delivery to outcome: the guard on a real SQLite file, with handlers that fail, hang, panic and collide.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use idem_core::machine::{OperatorAction, State as Row, Token};
use idem_core::store::{
    Answer, ClaimRequest, Completion, Engine, FailedTry, FailureWritten, Fenced, LockRequest, MemoryStore, Operated,
    Purge, Renewal, Returned, Statement, Store, StoreError, StoreErrorKind, StoreOptions, StoreTx, Terms, Tx, connect,
    sql,
};
use idem_core::{
    AlreadyDone, Classify, Clock, ConsumerName, Delivery, DuplicateKind, EventKey, FailureKind, Guard, Guarded, Job,
    LockName, Outcome, State, SystemClock, Undecided, idempotent,
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

#[derive(serde::Deserialize)]
struct Order {
    order_id: String,
    /// What the handler is told to do.
    #[serde(default)]
    act: String,
}

#[derive(Debug, thiserror::Error, Classify)]
enum Failed {
    #[error("try again")]
    #[classify(transient)]
    Again,
    #[error("never")]
    #[classify(terminal)]
    Never,
    #[error(transparent)]
    #[classify(inner)]
    Database(#[from] sqlx::Error),
}

#[idempotent(key = "order_id", consumer = "invoice", attempts = 3, backoff = "1ms..2ms", max_run = "200ms",
    domain_unique = ["uq_invoices_order_id", "invoices.order_id"])]
async fn invoice(event: Order, tx: &mut Tx) -> Result<(), Failed> {
    tx.execute(sql("INSERT INTO invoices (order_id) VALUES ($1)").bind(&event.order_id)).await?;
    match event.act.as_str() {
        "again" => Err(Failed::Again),
        "never" => Err(Failed::Never),
        "panic" => panic!("on purpose"),
        "hang" => std::future::pending().await,
        "undeclared" => {
            tx.execute(sql("INSERT INTO others (id) VALUES (1)")).await?;
            Ok(())
        }
        _ => Ok(()),
    }
}

/// One statement for all, so one bad event fails the whole call.
#[idempotent(key = "order_id", consumer = "invoice-batch", domain_unique = ["uq_invoices_order_id", "invoices.order_id"])]
async fn invoices(events: Vec<Order>, tx: &mut Tx, calls: State<AtomicU32>) -> Result<(), Failed> {
    calls.fetch_add(1, Ordering::SeqCst);
    for event in &events {
        tx.execute(sql("INSERT INTO invoices (order_id) VALUES ($1)").bind(&event.order_id)).await?;
    }
    if events.iter().any(|event| event.act == "never") { Err(Failed::Never) } else { Ok(()) }
}

/// The world outside the database. Clones share it.
#[derive(Clone, Default)]
struct Outside {
    effects: Arc<Mutex<HashMap<String, u32>>>,
    cancelled: Arc<AtomicBool>,
    running: Arc<AtomicU32>,
    gate: Arc<tokio::sync::Notify>,
}

impl Outside {
    fn of(&self, id: &str) -> u32 {
        self.effects.lock().unwrap().get(id).copied().unwrap_or_default()
    }

    async fn is_running(&self, handlers: u32) {
        let begins = async {
            while self.running.load(Ordering::SeqCst) < handlers {
                tokio::task::yield_now().await;
            }
        };
        assert!(tokio::time::timeout(Duration::from_secs(20), begins).await.is_ok(), "the handler does not begin");
    }
}

#[idempotent(
    key = "order_id",
    consumer = "outside",
    fingerprint = "order_id",
    attempts = 3,
    backoff = "1ms..2ms",
    lease = "600ms",
    max_run = "5s"
)]
async fn outside(event: Order, job: &Job, world: State<Outside>) -> Result<(), Failed> {
    world.running.fetch_add(1, Ordering::SeqCst);
    match event.act.as_str() {
        "again" => return Err(Failed::Again),
        "panic" => panic!("on purpose"),
        "gate" => world.gate.notified().await,
        "hang" => {
            job.cancelled().await;
            world.cancelled.store(true, Ordering::SeqCst);
            std::future::pending().await
        }
        _ => {}
    }
    *world.effects.lock().unwrap().entry(event.order_id).or_default() += 1;
    Ok(())
}

/// The same with a short life.
#[idempotent(key = "order_id", consumer = "hurried", attempts = 1, lease = "10s", max_run = "200ms")]
async fn hurried(event: Order, world: State<Outside>) -> Result<(), Failed> {
    outside::body(event, &Job::detached(ConsumerName::new("x").unwrap(), EventKey::from_parts(["x"]).unwrap()), world)
        .await
}

struct Bed {
    guard: Guard,
    pool: sqlx::SqlitePool,
    _folder: tempfile::TempDir,
}

async fn bed() -> Bed {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", folder.path().join("test.sqlite").display());
    let store = connect(&url, &StoreOptions::default()).await.unwrap();
    store.migrate().await.unwrap();
    let pool = sqlx::SqlitePool::connect(&url).await.unwrap();
    sqlx::raw_sql("CREATE TABLE invoices (order_id TEXT NOT NULL UNIQUE); CREATE TABLE others (id INTEGER PRIMARY KEY); INSERT INTO others VALUES (1)")
        .execute(&pool)
        .await
        .unwrap();
    Bed { guard: Guard::new(store).state(AtomicU32::new(0)), pool, _folder: folder }
}

impl Bed {
    async fn invoices(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT order_id FROM invoices ORDER BY order_id").fetch_all(&self.pool).await.unwrap()
    }

    async fn status(&self, key: &str) -> Option<(String, i64, Option<String>)> {
        sqlx::query_as("SELECT status, attempts, error_message FROM processed_jobs WHERE idempotency_key = $1")
            .bind(key)
            .fetch_optional(&self.pool)
            .await
            .unwrap()
    }
}

fn delivery(guarded: &Guarded, id: &str, act: &str, message_id: &str) -> Delivery {
    let body = json!({"order_id": id, "act": act}).to_string().into_bytes();
    guarded.prepare(Some(Arc::new(body)), &(), message_id.into()).unwrap()
}

/// Runs all of `orders` in one batch; outcomes by order id.
async fn run(guarded: &Guarded, orders: &[(&str, &str)]) -> HashMap<String, Outcome> {
    let deliveries = orders.iter().map(|(id, act)| delivery(guarded, id, act, "m")).collect();
    let outcomes = Mutex::new(HashMap::new());
    let report = |delivery: Delivery, outcome: Outcome| {
        outcomes.lock().unwrap().insert(delivery.key().to_string(), outcome);
    };
    guarded.run(deliveries, &CancellationToken::new(), &report).await;
    outcomes.into_inner().unwrap()
}

async fn run_one(guarded: &Guarded, id: &str, act: &str) -> Outcome {
    guarded.run_one(delivery(guarded, id, act, "m"), &CancellationToken::new()).await
}

#[tokio::test]
async fn t1_effect_and_completion_are_both_there_or_both_not() {
    let bed = bed().await;
    let guarded = bed.guard.bind(invoice).unwrap();
    assert!(matches!(run_one(&guarded, "A", "").await, Outcome::Completed { attempt: 1, already_done: None, .. }));
    assert!(matches!(run_one(&guarded, "A", "").await, Outcome::Duplicate(DuplicateKind::Redelivery)));
    let other = guarded.run_one(delivery(&guarded, "A", "", "n"), &CancellationToken::new()).await;
    assert!(matches!(other, Outcome::Duplicate(DuplicateKind::Producer)));
    let Outcome::Failed { attempt: 1, retry_in: Some(_), .. } = run_one(&guarded, "B", "again").await else { panic!() };
    assert_eq!(bed.invoices().await, ["A"]);
    assert_eq!(bed.status("B").await, Some(("FAILED".into(), 1, Some("try again".into()))));
}

#[tokio::test]
async fn r2_attempts_are_bounded_and_durable() {
    let bed = bed().await;
    let guarded = bed.guard.bind(invoice).unwrap();
    let mut tries = Vec::new();
    loop {
        match run_one(&guarded, "A", "again").await {
            Outcome::Failed { attempt, retry_in, .. } => tries.push((attempt, retry_in.is_some())),
            Outcome::NotDue { wait } => tokio::time::sleep(wait).await,
            Outcome::Exhausted { attempts, error } => {
                assert_eq!((attempts, error.as_deref()), (3, Some("try again")));
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(tries, [(1, true), (2, true), (3, false)]);
    assert_eq!(bed.invoices().await, [""; 0]);
}

#[tokio::test]
async fn r1_one_failing_message_leaves_its_neighbours_alone() {
    let bed = bed().await;
    let guarded = bed.guard.bind(invoice).unwrap();
    let ids: Vec<String> = (0..100).map(|number| format!("A-{number:03}")).collect();
    let act = |number: usize| match number {
        7 => "again",
        30 => "never",
        31 => "panic",
        99 => "undeclared",
        _ => "",
    };
    let orders: Vec<_> = ids.iter().enumerate().map(|(number, id)| (id.as_str(), act(number))).collect();
    let outcomes = run(&guarded, &orders).await;
    let failed = |id: &str| match &outcomes[id] {
        Outcome::Failed { attempt: 1, retry_in, failure } => (failure.kind, retry_in.is_some()),
        other => panic!("{other:?}"),
    };
    assert_eq!(failed("A-007"), (FailureKind::Transient, true));
    assert_eq!(failed("A-030"), (FailureKind::Terminal, false));
    assert_eq!(failed("A-031"), (FailureKind::Panicked, true));
    assert_eq!(failed("A-099"), (FailureKind::Terminal, false), "an undeclared constraint stays an error");
    assert_eq!(outcomes.values().filter(|outcome| matches!(outcome, Outcome::Completed { .. })).count(), 96);
    assert_eq!(bed.invoices().await.len(), 96, "no effect of a failed try is kept");
}

#[tokio::test]
async fn t3_the_domains_own_constraint_completes_the_job() {
    let bed = bed().await;
    sqlx::raw_sql("INSERT INTO invoices VALUES ('A-1'), ('A-3')").execute(&bed.pool).await.unwrap();
    let guarded = bed.guard.bind(invoice).unwrap();
    assert!(matches!(
        run_one(&guarded, "A-1", "").await,
        Outcome::Completed { already_done: Some(AlreadyDone::Domain), .. }
    ));
    let outcomes = run(&guarded, &[("A-2", ""), ("A-3", ""), ("A-4", "")]).await;
    let done = |id: &str| matches!(outcomes[id], Outcome::Completed { already_done: Some(AlreadyDone::Domain), .. });
    assert_eq!([done("A-2"), done("A-3"), done("A-4")], [false, true, false]);
    assert_eq!(bed.invoices().await, ["A-1", "A-2", "A-3", "A-4"]);
    assert_eq!(bed.status("A-3").await.unwrap().0, "COMPLETED");
}

#[tokio::test]
async fn a_batch_handler_is_halved_until_the_bad_event_stands_alone() {
    let bed = bed().await;
    let guarded = bed.guard.bind(invoices).unwrap();
    let ids: Vec<String> = (0..64).map(|number| format!("A-{number:02}")).collect();
    let orders: Vec<_> = ids.iter().map(|id| (id.as_str(), if id == "A-40" { "never" } else { "" })).collect();
    let outcomes = run(&guarded, &orders).await;
    assert!(matches!(outcomes["A-40"], Outcome::Failed { retry_in: None, .. }));
    assert_eq!(bed.invoices().await.len(), 63);
}

#[tokio::test]
async fn a_hanging_handler_is_stopped_at_its_max_run_and_leaves_no_transaction() {
    let bed = bed().await;
    let guarded = bed.guard.bind(invoice).unwrap();
    let Outcome::Failed { failure, .. } = run_one(&guarded, "A", "hang").await else { panic!() };
    assert_eq!(failure.kind, FailureKind::Timeout);
    assert_eq!(bed.invoices().await, [""; 0]);
    assert!(matches!(run_one(&guarded, "B", "").await, Outcome::Completed { .. }));
}

struct Explosive;

impl<'de> serde::Deserialize<'de> for Explosive {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        panic!("{} on purpose", String::deserialize(deserializer)?)
    }
}

#[derive(serde::Deserialize)]
struct Parcel {
    id: String,
    #[expect(dead_code, reason = "never there")]
    content: Explosive,
}

#[idempotent(key = "id", consumer = "parcel")]
async fn unpack(_event: Parcel) -> Result<(), Failed> {
    Ok(())
}

#[tokio::test]
async fn k4_a_panic_of_the_events_own_code_rejects_its_message() {
    let guarded = Guard::new(Arc::new(MemoryStore::default())).bind(unpack).unwrap();
    let body = json!({"id": "A", "content": "boom"}).to_string().into_bytes();
    let rejection = guarded.prepare(Some(Arc::new(body)), &(), "m".into()).unwrap_err();
    assert!(rejection.to_string().contains("boom on purpose"), "{rejection}");
}

#[tokio::test]
async fn c1_stopping_leaves_everything_as_it_was() {
    let bed = bed().await;
    let guarded = bed.guard.bind(invoice).unwrap();
    let stop = CancellationToken::new();
    let running = tokio::spawn({
        let (guarded, stop) = (guarded.clone(), stop.clone());
        async move { guarded.run_one(delivery(&guarded, "A", "hang", "m"), &stop).await }
    });
    stop.cancel();
    assert!(matches!(running.await.unwrap(), Outcome::Undecided(Undecided::Cancelled)));
    assert_eq!(bed.status("A").await, None);
    assert!(matches!(run_one(&guarded, "A", "").await, Outcome::Completed { attempt: 1, .. }));
}

#[tokio::test]
async fn t2_l1_l2_a_lease_is_held_while_the_handler_runs_and_renewed() {
    let bed = bed().await;
    let world = Outside::default();
    let guarded = bed.guard.clone().state(world.clone()).bind(outside).unwrap();
    let running = tokio::spawn({
        let guarded = guarded.clone();
        async move { run_one(&guarded, "A", "gate").await }
    });
    world.is_running(1).await;
    // Longer than the lease: without renewals the second worker would take over.
    let since = SystemClock.monotonic();
    while since.elapsed() < Duration::from_millis(1500) {
        match run_one(&guarded, "A", "").await {
            Outcome::InProgress { wait } => assert!(wait <= Duration::from_millis(600), "{wait:?}"),
            other => panic!("{other:?}"),
        }
        tokio::task::yield_now().await;
    }
    world.gate.notify_one();
    assert!(matches!(running.await.unwrap(), Outcome::Completed { attempt: 1, .. }));
    assert_eq!(world.of("A"), 1);
}

#[tokio::test]
async fn c5_l3_l4_a_takeover_fences_the_former_holder() {
    let bed = bed().await;
    let store = bed.guard.store().clone();
    let guarded = bed.guard.clone().state(Outside::default()).bind(outside).unwrap();
    let terms = Terms {
        consumer: ConsumerName::new("outside").unwrap(),
        lease: Duration::from_millis(300),
        max_attempts: 3,
        owner: "former".into(),
    };
    let key = EventKey::from_parts(["A"]).unwrap();
    let request =
        ClaimRequest { key: key.clone(), token: Token(uuid::Uuid::new_v4()), payload: None, message_id: "m".into() };
    store.claim(&terms, std::slice::from_ref(&request)).await.unwrap();
    let outcome = loop {
        match run_one(&guarded, "A", "").await {
            Outcome::InProgress { wait } => tokio::time::sleep(wait).await,
            other => break other,
        }
    };
    assert!(matches!(outcome, Outcome::Completed { takeover: true, attempt: 2, .. }), "{outcome:?}");
    let late = Completion { request, attempt: 1, fence: 1, returned: Returned::default() };
    assert_eq!(store.complete(&terms, &[late]).await.unwrap(), [Fenced::LeaseLost]);
}

#[tokio::test]
async fn a_handler_whose_lease_cannot_be_renewed_is_gone_before_a_takeover() {
    let (guard, cuts) = line(false);
    let world = Outside::default();
    let guarded = guard.state(world.clone()).bind(outside).unwrap();
    let running = tokio::spawn({
        let guarded = guarded.clone();
        async move {
            let outcome = run_one(&guarded, "A", "hang").await;
            (SystemClock.monotonic(), outcome)
        }
    });
    world.is_running(1).await;
    let begun = SystemClock.monotonic();
    cuts.store(u32::MAX, Ordering::SeqCst);
    let (gone, outcome) = running.await.unwrap();
    assert!(matches!(outcome, Outcome::Undecided(Undecided::Unavailable(_))), "an outage is not the message's fault");
    assert!(world.cancelled.load(Ordering::SeqCst), "it was told first");
    assert!(
        gone.duration_since(begun) < Duration::from_millis(600),
        "the lease is counted from before the handler began"
    );
}

#[tokio::test]
async fn a_lease_handler_that_runs_too_long_is_told_then_dropped_and_counted() {
    let bed = bed().await;
    let guarded = bed.guard.clone().state(Outside::default()).bind(hurried).unwrap();
    let Outcome::Failed { failure, retry_in: None, .. } = run_one(&guarded, "A", "gate").await else { panic!() };
    assert_eq!(failure.kind, FailureKind::Timeout);
    assert_eq!(bed.status("A").await.unwrap().0, "FAILED");
}

#[tokio::test]
async fn panics_in_lease_mode_are_failures_of_their_own_message() {
    let bed = bed().await;
    let guarded = bed.guard.clone().state(Outside::default()).bind(outside).unwrap();
    let outcomes = run(&guarded, &[("A", "panic"), ("B", ""), ("C", "again")]).await;
    assert!(matches!(&outcomes["A"], Outcome::Failed { failure, .. } if failure.kind == FailureKind::Panicked));
    assert!(matches!(outcomes["B"], Outcome::Completed { .. }));
    assert!(matches!(&outcomes["C"], Outcome::Failed { failure, .. } if failure.kind == FailureKind::Transient));
}

// ---------------------------------------------------------------- a store whose replies are lost

/// The in-memory store behind a line that can be cut: calls fail, before or after they took effect.
struct Line {
    store: MemoryStore,
    /// The next so many calls fail.
    cuts: Arc<AtomicU32>,
    /// Whether a failing call takes effect all the same.
    after: bool,
    /// How late the answers to the next claims are.
    late: Mutex<Vec<Duration>>,
}

impl Line {
    fn cut(&self) -> bool {
        self.cuts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
    }

    async fn carry<T>(&self, call: BoxFuture<'_, Result<T, StoreError>>) -> Result<T, StoreError> {
        carry(self.cut(), self.after, call).await
    }
}

async fn carry<T>(cut: bool, after: bool, call: BoxFuture<'_, Result<T, StoreError>>) -> Result<T, StoreError> {
    let lost = || StoreError::new(StoreErrorKind::Unavailable, "the reply was lost");
    if cut && !after {
        return Err(lost());
    }
    let answer = call.await?;
    if cut { Err(lost()) } else { Ok(answer) }
}

impl Store for Line {
    fn engine(&self) -> Engine {
        self.store.engine()
    }
    fn migrate(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        self.store.migrate()
    }
    fn claim<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [ClaimRequest],
    ) -> BoxFuture<'a, Result<Vec<Answer>, StoreError>> {
        async move {
            let answers = self.carry(self.store.claim(terms, requests)).await;
            let late = self.late.lock().unwrap().pop();
            tokio::time::sleep(late.unwrap_or_default()).await;
            answers
        }
        .boxed()
    }
    fn renew<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Renewal>, StoreError>> {
        self.carry(self.store.renew(terms, held)).boxed()
    }
    fn complete<'a>(
        &'a self,
        terms: &'a Terms,
        done: &'a [Completion],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        self.carry(self.store.complete(terms, done)).boxed()
    }
    fn fail<'a>(
        &'a self,
        terms: &'a Terms,
        failed: &'a [FailedTry],
    ) -> BoxFuture<'a, Result<Vec<FailureWritten>, StoreError>> {
        self.carry(self.store.fail(terms, failed)).boxed()
    }
    fn release<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        self.carry(self.store.release(terms, held)).boxed()
    }
    fn begin(&self) -> BoxFuture<'_, Result<Tx, StoreError>> {
        async {
            let inner = self.store.begin().await?.into_inner();
            let (cuts, after) = (self.cuts.clone(), self.after);
            Ok(Tx::new(CutTx { inner, cuts, after }))
        }
        .boxed()
    }
    fn lock<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [LockRequest],
    ) -> BoxFuture<'a, Result<Vec<bool>, StoreError>> {
        self.carry(self.store.lock(terms, requests)).boxed()
    }
    fn extend_locks<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [LockRequest],
    ) -> BoxFuture<'a, Result<Vec<Renewal>, StoreError>> {
        self.carry(self.store.extend_locks(terms, requests)).boxed()
    }
    fn unlock<'a>(&'a self, requests: &'a [LockRequest]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.carry(self.store.unlock(requests)).boxed()
    }
    fn make_locks<'a>(&'a self, names: &'a [LockName]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.carry(self.store.make_locks(names)).boxed()
    }
    fn read<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        keys: &'a [EventKey],
    ) -> BoxFuture<'a, Result<Vec<Row>, StoreError>> {
        self.store.read(consumer, keys)
    }
    fn result<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        key: &'a EventKey,
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        self.store.result(consumer, key)
    }
    fn count_duplicates<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        counts: &'a [(EventKey, u64)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.carry(self.store.count_duplicates(consumer, counts)).boxed()
    }
    fn operate<'a>(
        &'a self,
        terms: &'a Terms,
        key: &'a EventKey,
        action: OperatorAction,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<Operated, StoreError>> {
        self.store.operate(terms, key, action, reason)
    }
    fn purge<'a>(&'a self, purge: &'a Purge) -> BoxFuture<'a, Result<u64, StoreError>> {
        self.store.purge(purge)
    }
    fn check_schema(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        self.store.check_schema()
    }
    fn ping(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        self.store.ping()
    }
    fn close(&self) -> BoxFuture<'_, ()> {
        self.store.close()
    }
}

/// Only its COMMIT can be cut.
struct CutTx {
    inner: Box<dyn StoreTx>,
    cuts: Arc<AtomicU32>,
    after: bool,
}

impl StoreTx for CutTx {
    fn engine(&self) -> Engine {
        self.inner.engine()
    }
    fn claim<'a>(
        &'a mut self,
        terms: &'a Terms,
        requests: &'a [ClaimRequest],
    ) -> BoxFuture<'a, Result<Vec<Answer>, StoreError>> {
        self.inner.claim(terms, requests)
    }
    fn overwrite<'a>(
        &'a mut self,
        terms: &'a Terms,
        rows: &'a [(EventKey, Row, String)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.overwrite(terms, rows)
    }
    fn lock<'a>(&'a mut self, names: &'a [LockName]) -> BoxFuture<'a, Result<Vec<bool>, StoreError>> {
        self.inner.lock(names)
    }
    fn keep_results<'a>(
        &'a mut self,
        consumer: &'a ConsumerName,
        results: &'a [(EventKey, Returned)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.keep_results(consumer, results)
    }
    fn savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        self.inner.savepoint()
    }
    fn rollback_to_savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        self.inner.rollback_to_savepoint()
    }
    fn release_savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        self.inner.release_savepoint()
    }
    fn execute(&mut self, _statement: Statement) -> BoxFuture<'_, Result<u64, sqlx::Error>> {
        // The in-memory store has no tables: the effect is not what these tests look at.
        async { Ok(1) }.boxed()
    }
    fn connection(&mut self) -> &mut (dyn std::any::Any + Send) {
        self.inner.connection()
    }
    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        let cut = self.cuts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
        async move { carry(cut, self.after, self.inner.commit()).await }.boxed()
    }
    fn rollback(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        self.inner.rollback()
    }
}

fn line(after: bool) -> (Guard, Arc<AtomicU32>) {
    let cuts = Arc::new(AtomicU32::new(0));
    let line = Line { store: MemoryStore::default(), cuts: cuts.clone(), after, late: Mutex::default() };
    (Guard::new(Arc::new(line)).state(Outside::default()).state(AtomicU32::new(0)), cuts)
}

/// Runs a delivery as the runtime does: again, with the very same delivery, while nothing is decided.
async fn until_decided(guarded: &Guarded, delivery: Delivery) -> (u32, Outcome) {
    let mut next = delivery;
    let mut undecided = 0;
    loop {
        let reported = Mutex::new(None);
        let report = |delivery: Delivery, outcome: Outcome| *reported.lock().unwrap() = Some((delivery, outcome));
        guarded.run(vec![next], &CancellationToken::new(), &report).await;
        match reported.into_inner().unwrap().expect("each delivery is reported") {
            (delivery, Outcome::Undecided(Undecided::Unavailable(_))) => {
                undecided += 1;
                next = delivery;
            }
            (_, outcome) => return (undecided, outcome),
        }
    }
}

#[tokio::test]
async fn c2_a_lost_reply_to_commit_is_read_back_not_guessed() {
    for after in [false, true] {
        let (guard, cuts) = line(after);
        let guarded = guard.bind(invoice).unwrap();
        cuts.store(1, Ordering::SeqCst);
        let (undecided, outcome) = until_decided(&guarded, delivery(&guarded, "A", "", "m")).await;
        assert!(undecided <= 1);
        // Committed or not: it ends as completed by this very delivery, never as somebody's duplicate.
        assert!(matches!(outcome, Outcome::Completed { attempt: 1, .. }), "after={after}: {outcome:?}");
    }
}

/// The process ends while its claim is on its way: nobody has to wait for its lease, and it was no try.
#[tokio::test]
async fn l3_a_claim_that_is_stopped_on_its_way_is_given_back() {
    let cuts = Arc::new(AtomicU32::new(0));
    let late = Mutex::new(vec![Duration::from_millis(200)]);
    let store = MemoryStore::default();
    let line = Line { store: store.clone(), cuts, after: false, late };
    let guard = Guard::new(Arc::new(line)).state(Outside::default());
    let guarded = guard.bind(outside).unwrap();
    let stop = CancellationToken::new();
    let asked = delivery(&guarded, "A", "", "m");
    let (key, consumer) = (asked.key().clone(), ConsumerName::new("outside").unwrap());
    let stopped = async {
        while matches!(store.read(&consumer, std::slice::from_ref(&key)).await.unwrap()[0], Row::Absent) {
            tokio::task::yield_now().await;
        }
        stop.cancel();
    };
    let (outcome, ()) = tokio::join!(guarded.run_one(asked, &stop), stopped);
    assert!(matches!(outcome, Outcome::Undecided(Undecided::Cancelled)), "{outcome:?}");
    let row = store.read(&consumer, &[key]).await.unwrap()[0];
    assert!(matches!(row, Row::Received(record) if record.attempts == 0), "{row:?}");
}

#[tokio::test]
async fn lost_replies_in_lease_mode_cost_no_attempt_and_no_second_effect() {
    for after in [false, true] {
        for cut in 1..=3 {
            let (guard, cuts) = line(after);
            let guarded = guard.bind(outside).unwrap();
            cuts.store(cut, Ordering::SeqCst);
            let (undecided, outcome) = until_decided(&guarded, delivery(&guarded, "A", "", "m")).await;
            assert!(matches!(outcome, Outcome::Completed { attempt: 1, .. }), "after={after}, cut={cut}: {outcome:?}");
            assert!(undecided <= cut);
        }
    }
}

#[tokio::test]
async fn no_handler_begins_under_a_lease_that_may_be_over() {
    let world = Outside::default();
    let late = Mutex::new(vec![Duration::from_millis(700)]);
    let line = Line { store: MemoryStore::default(), cuts: Arc::default(), after: false, late };
    let guarded = Guard::new(Arc::new(line)).state(world.clone()).bind(outside).unwrap();
    let (undecided, outcome) = until_decided(&guarded, delivery(&guarded, "A", "", "m")).await;
    assert_eq!(undecided, 1, "the first claim was answered after its lease of 600 ms");
    assert!(matches!(outcome, Outcome::Completed { attempt: 1, .. }), "and cost no attempt: {outcome:?}");
    assert_eq!(world.running.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_completion_is_asked_again_until_it_is_written() {
    for after in [false, true] {
        let (guard, cuts) = line(after);
        let world = Outside::default();
        let guarded = guard.clone().state(world.clone()).bind(outside).unwrap();
        let running = tokio::spawn({
            let guarded = guarded.clone();
            async move { run_one(&guarded, "A", "gate").await }
        });
        world.is_running(1).await;
        // The claim is through: what is cut now is the completion, or a renewal.
        cuts.store(2, Ordering::SeqCst);
        world.gate.notify_one();
        assert!(matches!(running.await.unwrap(), Outcome::Completed { attempt: 1, .. }));
        assert_eq!((world.of("A"), cuts.load(Ordering::SeqCst)), (1, 0));
        assert!(matches!(run_one(&guarded, "A", "").await, Outcome::Duplicate(_)), "it is really written");
    }
}
