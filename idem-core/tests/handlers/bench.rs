//! Events, deliveries and a world outside, as the tests of handlers need them.

use std::collections::HashMap;
use std::future::Future;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_core::store::Store;
use idem_core::store::contract::Subject;
use idem_core::{Classify, Delivery, Guard, Guarded, HeaderList, Outcome, Undecided};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::subjects::{self, PostgresSubject, SqliteSubject};

/// Within which anything that must happen happens, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Order {
    pub id: String,
    /// What is locked for it, if the handler says so.
    #[serde(default)]
    pub account: String,
    /// What the handler is told to do.
    #[serde(default)]
    pub act: String,
}

pub fn order(id: &str, act: &str) -> Order {
    Order { id: id.to_owned(), act: act.to_owned(), ..Order::default() }
}

/// For a handler with `lock = "account"`.
pub fn order_on(account: &str, id: &str, act: &str) -> Order {
    Order { account: account.to_owned(), ..order(id, act) }
}

#[derive(Debug, thiserror::Error, Classify)]
pub enum Failed {
    #[error("try again")]
    #[classify(transient)]
    Again,
    #[error("never")]
    #[classify(terminal)]
    Never,
    #[error(transparent)]
    #[classify(inner)]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    #[classify(inner)]
    Completion(#[from] idem_core::CompleteError),
}

pub fn delivery_of(guarded: &Guarded, order: &Order, message_id: &str) -> Delivery {
    let body = serde_json::to_vec(order).expect("orders can be written");
    guarded.prepare(Some(Arc::new(body)), &(), message_id.into()).expect("orders have keys")
}

pub fn delivery(guarded: &Guarded, order: &Order) -> Delivery {
    delivery_of(guarded, order, "m")
}

/// One that a person has sent again.
pub fn replay_of(guarded: &Guarded, order: &Order, message_id: &str) -> Delivery {
    let body = serde_json::to_vec(order).expect("orders can be written");
    let headers = HeaderList(vec![(idem_core::REPLAYED_BY.to_owned(), b"somebody".to_vec())]);
    guarded.prepare(Some(Arc::new(body)), &headers, message_id.into()).expect("orders have keys")
}

/// Runs deliveries once; answers each with its outcome, in the order of their decisions.
pub async fn round(guarded: &Guarded, deliveries: Vec<Delivery>) -> Vec<(Delivery, Outcome)> {
    let decided = Mutex::new(Vec::new());
    let report = |delivery: Delivery, outcome: Outcome| decided.lock().unwrap().push((delivery, outcome));
    guarded.run(deliveries, &CancellationToken::new(), &report).await;
    decided.into_inner().unwrap()
}

/// Runs orders once, together; outcomes by their ids.
pub async fn run(guarded: &Guarded, orders: &[Order]) -> HashMap<String, Outcome> {
    let deliveries = orders.iter().map(|order| delivery(guarded, order)).collect();
    let decided = round(guarded, deliveries).await;
    decided.into_iter().map(|(delivery, outcome)| (delivery.key().to_string(), outcome)).collect()
}

pub async fn run_one(guarded: &Guarded, order: &Order) -> Outcome {
    guarded.run_one(delivery(guarded, order), &CancellationToken::new()).await
}

/// Runs deliveries, together and each again while it is to come back, until all are at their end. Answers how each ended.
///
/// # Panics
/// They do not come to their end.
pub async fn until_ended(guarded: &Guarded, deliveries: Vec<Delivery>) -> HashMap<String, Outcome> {
    let mut open = deliveries;
    let mut ended = HashMap::new();
    let mut last = Vec::new();
    let running = async {
        while !open.is_empty() {
            let decided = round(guarded, std::mem::take(&mut open)).await;
            last = decided.iter().map(|(_, outcome)| outcome.clone()).collect();
            let mut wait = Duration::ZERO;
            for (delivery, outcome) in decided {
                match comes_again(&outcome) {
                    Some(this) => {
                        wait = wait.max(this);
                        open.push(delivery);
                    }
                    None => drop(ended.insert(delivery.key().to_string(), outcome)),
                }
            }
            sleep(wait).await;
        }
    };
    if timeout(PATIENCE, running).await.is_err() {
        panic!("the messages do not come to their end; the last outcomes were {last:?}");
    }
    ended
}

/// After which wait a delivery comes again; nothing if it is at its end.
pub fn comes_again(outcome: &Outcome) -> Option<Duration> {
    match outcome {
        Outcome::InProgress { wait } | Outcome::NotDue { wait } | Outcome::Failed { retry_in: Some(wait), .. } => {
            Some(*wait)
        }
        Outcome::LeaseLost
        | Outcome::Undecided(Undecided::Unavailable(_) | Undecided::Contention(_) | Undecided::Cancelled) => {
            Some(Duration::from_millis(10))
        }
        _ => None,
    }
}

/// Waits for what another task brings about.
pub async fn until<F: Future<Output = bool>>(what: &str, mut is_so: impl FnMut() -> F) {
    let waiting = async {
        while !is_so().await {
            sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(timeout(PATIENCE, waiting).await.is_ok(), "it does not come about: {what}");
}

pub fn is_completed(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Completed { attempt: 1, takeover: false, already_done: None, .. })
}

// ---- the world outside

/// What handlers do, and what they wait for. Clones share it.
#[derive(Clone)]
pub struct World {
    seen: Arc<Mutex<Seen>>,
    /// Lets one handler that waits for it go on.
    pub gate: Arc<Semaphore>,
    /// How many handlers have been told to stop.
    pub told: Arc<AtomicU32>,
}

#[derive(Default)]
struct Seen {
    runs: Vec<String>,
    inside: HashMap<String, u32>,
    most_inside: u32,
}

impl Default for World {
    fn default() -> Self {
        Self { seen: Arc::default(), gate: Arc::new(Semaphore::new(0)), told: Arc::default() }
    }
}

/// A handler changes a state; it ends when this is dropped, also if the handler is.
pub struct Inside {
    world: World,
    state: String,
}

impl World {
    /// A handler has begun.
    pub fn begins(&self, id: &str) {
        self.seen.lock().unwrap().runs.push(id.to_owned());
    }

    /// A handler begins to change `state`.
    pub fn enter(&self, state: &str) -> Inside {
        let mut seen = self.seen.lock().unwrap();
        let inside = seen.inside.entry(state.to_owned()).or_default();
        *inside += 1;
        let inside = *inside;
        seen.most_inside = seen.most_inside.max(inside);
        Inside { world: self.clone(), state: state.to_owned() }
    }

    /// The most handlers that ever changed one state at once.
    pub fn most_inside(&self) -> u32 {
        self.seen.lock().unwrap().most_inside
    }

    /// Which handlers began, in that order.
    pub fn runs(&self) -> Vec<String> {
        self.seen.lock().unwrap().runs.clone()
    }

    pub async fn has_begun(&self, runs: usize) {
        until("handlers begin", || async { self.runs().len() >= runs }).await;
    }

    /// Waits until a test lets it go on.
    pub async fn passes_gate(&self) {
        self.gate.acquire().await.expect("it is never closed").forget();
    }

    pub fn open_gate(&self, handlers: usize) {
        self.gate.add_permits(handlers);
    }

    pub fn was_told(&self) -> u32 {
        self.told.load(Ordering::SeqCst)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if let Some(inside) = self.world.seen.lock().unwrap().inside.get_mut(&self.state) {
            *inside -= 1;
        }
    }
}

// ---- stores

/// A store of any engine, with what keeps it.
pub struct Bench {
    pub name: &'static str,
    pub store: Arc<dyn Store>,
    pub subject: Box<dyn Subject>,
}

impl Bench {
    fn of(name: &'static str, subject: impl Subject) -> Self {
        Self { name, store: subject.store(), subject: Box::new(subject) }
    }

    pub fn guard(&self) -> Guard {
        Guard::new(Arc::clone(&self.store))
    }
}

pub async fn memory() -> Bench {
    Bench::of("memory", subjects::memory().await)
}

/// One of each engine.
pub async fn each_engine() -> Vec<Bench> {
    let (sqlite, postgres) = (subjects::sqlite().await, subjects::postgres().await);
    vec![memory().await, Bench::of("SQLite", sqlite), Bench::of("PostgreSQL", postgres)]
}

/// A row's status, attempts and last error.
pub type Row = (String, i64, Option<String>);

pub async fn sqlite_row(subject: &SqliteSubject, key: &str) -> Option<Row> {
    sqlx::query_as("SELECT status, attempts, error_message FROM processed_jobs WHERE idempotency_key = ?1")
        .bind(key)
        .fetch_optional(subject.store.pool())
        .await
        .expect("the table is there")
}

pub async fn postgres_row(subject: &PostgresSubject, key: &str) -> Option<Row> {
    let columns = "status, attempts::bigint, error_message";
    let query = format!("SELECT {columns} FROM processed_jobs WHERE idempotency_key = $1");
    sqlx::query_as(sqlx::AssertSqlSafe(query))
        .bind(key)
        .fetch_optional(subject.store.pool())
        .await
        .expect("the table is there")
}

pub async fn execute(subject: &PostgresSubject, text: &str) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(text.to_owned()))
        .execute(subject.store.pool())
        .await
        .expect("the statement works");
}

pub async fn number(subject: &PostgresSubject, query: &str) -> i64 {
    let wide = format!("SELECT ({query})::bigint");
    sqlx::query_scalar(sqlx::AssertSqlSafe(wide)).fetch_one(subject.store.pool()).await.expect("the query works")
}

// ---- processes

/// Set for a process that is a worker of a test: what it is to do.
const CHILD: &str = "IDEM_TEST_CHILD";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Task {
    Careful(crate::careful::Task),
    Hybrid(crate::hybrid::Task),
}

pub fn task() -> Option<Task> {
    let task = std::env::var(CHILD).ok()?;
    Some(serde_json::from_str(&task).expect("written by the test"))
}

/// Runs this program once more, as a worker; whether it ended well.
pub async fn run_child(task: &Task) -> bool {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    let task = serde_json::to_string(task).expect("tasks can be written");
    command.args(["--exact", "child", "--nocapture"]).env(CHILD, task);
    let output = tokio::task::spawn_blocking(move || command.output().expect("this program can be run again"));
    output.await.expect("no panic").status.success()
}
