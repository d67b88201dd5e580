//! What the fault tests share: a guard's database and the world beside it, for each engine; handlers; and how a runtime
//! brings messages to their end.
//!
//! An engine joins in by one line in each `match` on [`Engine`] or [`Sql`], and in [`ENGINES`].

#![allow(dead_code, reason = "each test binary uses some of it")]

#[path = "../stores/subjects.rs"]
pub mod subjects;

pub mod handlers;
pub mod relay;

use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_core::store::{Engine, Store, StoreOptions, connect};
use idem_core::{Delivery, Guarded, Outcome, Undecided};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::sqlite::{SqlitePool, SqlitePoolOptions};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use self::subjects::{Folder, Schema, postgres_url};

/// Every engine that keeps rows beyond a process.
pub const ENGINES: [Engine; 2] = [Engine::Sqlite, Engine::Postgres];

/// Within which anything that must happen happens, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What the handlers write. `invoices` stands for effects in the guard's own database, `charges` for those elsewhere, which
/// honour the downstream key; `calls` counts the runs of handlers in lease mode, and `ends` what workers were told.
///
/// Only `charges` has a unique column: a second effect of an atomic handler must be seen, not refused.
const TABLES: &str = "
    CREATE TABLE invoices (id varchar(100) NOT NULL);
    CREATE TABLE charges (id varchar(100) PRIMARY KEY, job varchar(100) NOT NULL);
    CREATE TABLE calls (job varchar(100) NOT NULL, fence bigint NOT NULL, worker bigint NOT NULL);
    CREATE TABLE ends (job varchar(100) NOT NULL, fence bigint NOT NULL, worker bigint NOT NULL, outcome varchar(20) NOT NULL)";

/// Where a guard's rows are and where the world beside them is. Goes to child processes as it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Address {
    pub store: String,
    pub outside: String,
}

/// Databases of a test's own, removed with it.
pub struct Place {
    pub engine: Engine,
    pub address: Address,
    /// Tells the store's sessions from others, where there are sessions.
    pub sessions: String,
    _kept: Kept,
}

enum Kept {
    Folder { _folder: Folder },
    Schema { _schema: Schema },
}

impl Place {
    /// With tables for the guard and for the handlers.
    pub async fn new(engine: Engine) -> Self {
        let place = match engine {
            Engine::Sqlite => {
                let folder = Folder::new();
                let address =
                    Address { store: folder.url(), outside: format!("sqlite:{}/outside.db", folder.0.display()) };
                Self { engine, address, sessions: String::new(), _kept: Kept::Folder { _folder: folder } }
            }
            Engine::Postgres => {
                let schema = Schema::new().await;
                let sessions = schema.name.clone();
                // Other sessions than the store's, so that those can be looked for.
                let outside = schema.url.replace("application_name=", "application_name=outside_");
                let address = Address { store: schema.url.clone(), outside };
                Self { engine, address, sessions, _kept: Kept::Schema { _schema: schema } }
            }
            other => panic!("{other} keeps nothing beyond a process"),
        };
        place.open().await.close().await;
        place.outside().await.run(TABLES).await.expect("the tables can be made");
        if engine == Engine::Sqlite {
            place.rows().await.run(TABLES).await.expect("the tables can be made");
        }
        place
    }

    /// A store with the guard's tables.
    pub async fn open(&self) -> Arc<dyn Store> {
        let store = connect(&self.address.store, &StoreOptions::default()).await.expect("the store works");
        store.migrate().await.expect("the tables can be made");
        store
    }

    /// The world outside of the guard's database.
    pub async fn outside(&self) -> Sql {
        Sql::open(&self.address.outside).await
    }

    /// The guard's database, by a way of one's own.
    pub async fn rows(&self) -> Sql {
        match self.engine {
            // The store's sessions are counted, so this one must not look like them.
            Engine::Postgres => self.outside().await,
            _ => Sql::open(&self.address.store).await,
        }
    }

    /// Waits until no transaction of the store's is open.
    ///
    /// # Panics
    /// One stays open.
    pub async fn is_at_rest(&self) {
        match self.engine {
            Engine::Postgres => {
                let open = "state LIKE 'idle in transaction%' OR (state = 'active' AND xact_start IS NOT NULL)";
                self.sessions_end(open).await;
            }
            _ => {
                let rows = self.rows().await;
                let free = async {
                    while let Err(error) = rows.run("BEGIN IMMEDIATE; ROLLBACK").await {
                        eprintln!("the writer is not free: {error}");
                        sleep(Duration::from_millis(20)).await;
                    }
                };
                timeout(PATIENCE, free).await.expect("a transaction stays open");
                rows.close().await;
            }
        }
    }

    /// Waits until no session of the store's is as `what` says, where there are sessions.
    ///
    /// # Panics
    /// One stays.
    pub async fn sessions_end(&self, what: &str) {
        if self.engine != Engine::Postgres {
            return;
        }
        let rows = Sql::open(&postgres_url()).await;
        let count =
            format!("SELECT count(*) FROM pg_stat_activity WHERE application_name = '{}' AND ({what})", self.sessions);
        let ending = async {
            while rows.number(&count).await > 0 {
                sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(PATIENCE, ending).await.unwrap_or_else(|_| panic!("a session stays: {what}"));
        rows.close().await;
    }
}

/// Connections to a database, apart from the guard's.
pub enum Sql {
    Sqlite(SqlitePool),
    Postgres(PgPool),
}

impl Sql {
    pub async fn open(url: &str) -> Self {
        match url.split_once(':').map(|(scheme, _)| scheme) {
            Some("sqlite") => {
                let target: sqlx::sqlite::SqliteConnectOptions = url.parse().expect("a URL");
                let target = target
                    .create_if_missing(true)
                    .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
                    // Processes die here, machines do not.
                    .synchronous(sqlx::sqlite::SqliteSynchronous::Off)
                    .busy_timeout(PATIENCE);
                Self::Sqlite(SqlitePoolOptions::new().max_connections(1).connect_lazy_with(target))
            }
            _ => {
                let pool = PgPoolOptions::new().max_connections(4).acquire_timeout(PATIENCE);
                Self::Postgres(pool.connect_lazy(url).expect("a URL"))
            }
        }
    }

    /// Runs statements.
    ///
    /// # Errors
    /// The engine's.
    pub async fn run(&self, text: impl Into<String>) -> Result<(), sqlx::Error> {
        let text = sqlx::raw_sql(AssertSqlSafe(text.into()));
        match self {
            Self::Sqlite(pool) => text.execute(pool).await.map(drop),
            Self::Postgres(pool) => text.execute(pool).await.map(drop),
        }
    }

    /// The one whole number that a query gives, whatever its width.
    pub async fn number(&self, query: &str) -> i64 {
        let number = match self {
            Self::Sqlite(pool) => sqlx::query_scalar(AssertSqlSafe(query.to_owned())).fetch_one(pool).await,
            Self::Postgres(pool) => {
                let wide = format!("SELECT CAST(({query}) AS bigint)");
                sqlx::query_scalar(AssertSqlSafe(wide)).fetch_one(pool).await
            }
        };
        number.unwrap_or_else(|error| panic!("{query}: {error}"))
    }

    /// The texts that a query gives, to show them.
    pub async fn texts(&self, query: &str) -> Vec<String> {
        let texts = match self {
            Self::Sqlite(pool) => sqlx::query_scalar(AssertSqlSafe(query.to_owned())).fetch_all(pool).await,
            Self::Postgres(pool) => sqlx::query_scalar(AssertSqlSafe(query.to_owned())).fetch_all(pool).await,
        };
        texts.unwrap_or_else(|error| panic!("{query}: {error}"))
    }

    /// Has the effect of a downstream key, once.
    ///
    /// # Errors
    /// The engine's.
    pub async fn charge(&self, downstream_key: &str, job: &str) -> Result<(), sqlx::Error> {
        self.run(format!("INSERT INTO charges (id, job) VALUES ('{downstream_key}', '{job}') ON CONFLICT DO NOTHING"))
            .await
    }

    pub async fn close(&self) {
        match self {
            Self::Sqlite(pool) => pool.close().await,
            Self::Postgres(pool) => pool.close().await,
        }
    }
}

// ---- bringing messages to their end

/// Runs deliveries once; answers each with its outcome.
pub async fn round(guarded: &Guarded, deliveries: Vec<Delivery>) -> Vec<(Delivery, Outcome)> {
    let decided = Mutex::new(Vec::new());
    let report = |delivery: Delivery, outcome: Outcome| {
        decided.lock().expect("nothing panics while it is held").push((delivery, outcome));
    };
    guarded.run(deliveries, &CancellationToken::new(), &report).await;
    decided.into_inner().expect("nothing panics while it is held")
}

/// After which wait a delivery comes again, as a runtime does it; nothing if it is at its end.
///
/// # Panics
/// No runtime would bring it to a good end: it is set aside, or a person must look.
pub fn comes_again(delivery: &Delivery, outcome: &Outcome) -> Option<Duration> {
    match outcome {
        Outcome::Completed { .. } | Outcome::Duplicate(_) => None,
        Outcome::InProgress { wait } | Outcome::NotDue { wait } | Outcome::Failed { retry_in: Some(wait), .. } => {
            Some(*wait)
        }
        Outcome::LeaseLost
        | Outcome::Undecided(Undecided::Unavailable(_) | Undecided::Contention(_) | Undecided::Cancelled) => {
            Some(Duration::from_millis(10))
        }
        other => panic!("{}: {other:?}", delivery.key()),
    }
}

/// Runs deliveries until each is at its end; `seen` is told every outcome on the way.
pub async fn drive(what: &str, guarded: &Guarded, mut open: Vec<Delivery>, mut seen: impl FnMut(&Delivery, &Outcome)) {
    let mut last = Vec::new();
    let driving = async {
        while !open.is_empty() {
            let decided = round(guarded, std::mem::take(&mut open)).await;
            last = decided.iter().map(|(_, outcome)| outcome.clone()).collect();
            let mut wait = None;
            for (delivery, outcome) in decided {
                seen(&delivery, &outcome);
                if let Some(this) = comes_again(&delivery, &outcome) {
                    wait = wait.max(Some(this));
                    open.push(delivery);
                }
            }
            sleep(wait.unwrap_or_default()).await;
        }
    };
    if timeout(PATIENCE, driving).await.is_err() {
        panic!("{what}: messages do not come to their end; the last outcomes were {last:?}");
    }
}

// ---- processes

/// Set for a process that is a worker of a test: what it is to do.
const CHILD: &str = "IDEM_TEST_CHILD";

/// This program once more, as a worker: it runs its test `child`, which finds `task` in [`task`].
pub fn child(task: &impl Serialize) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    let task = serde_json::to_string(task).expect("tasks can be written");
    command.args(["--exact", "child", "--nocapture"]).env(CHILD, task);
    command
}

/// What this process is to do, if it is a worker.
pub fn task<T: DeserializeOwned>() -> Option<T> {
    let task = std::env::var(CHILD).ok()?;
    Some(serde_json::from_str(&task).expect("written by the test"))
}

/// A number that the environment may set, as scripts/soak does.
pub fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")),
        Err(_) => default,
    }
}

/// What random faults are drawn from.
pub fn seed() -> u64 {
    setting("IDEM_TEST_SEED", 1)
}

/// Tells what was counted. A passing test's own output is not shown; this is.
pub fn tell(counts: &str) {
    use std::io::Write;
    // Only for people: a closed terminal fails no test.
    let _ = writeln!(std::io::stderr(), "{counts}");
}
