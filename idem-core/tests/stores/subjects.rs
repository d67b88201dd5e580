//! Stores of their own for each test: a schema in the PostgreSQL that the environment names, a file in a new folder, or memory.

#![allow(dead_code, reason = "each test binary uses some of it")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use idem_core::machine::Token;
#[cfg(feature = "sqlite")]
use idem_core::store::SqliteStore;
use idem_core::store::contract::Subject;
use idem_core::store::{ClaimRequest, MemoryStore, PgStore, Store, StoreOptions, Terms};
use idem_core::{ConsumerName, EventKey, ManualClock};
use sqlx::AssertSqlSafe;
use sqlx::postgres::PgPoolOptions;
use uuid::Uuid;

pub const LEASE: Duration = Duration::from_secs(3600);

/// A store whose rows a person can look at.
pub trait Readable: Subject {
    /// A column of the row of this key, as text.
    fn column<'a>(&'a self, key: &'a str, column: &'a str) -> BoxFuture<'a, Option<String>>;

    /// Sets when rows were made and changed to long ago.
    fn long_ago(&self) -> BoxFuture<'_, ()>;
}

// ---- memory

pub struct MemorySubject {
    store: MemoryStore,
    clock: Arc<ManualClock>,
}

pub async fn memory() -> MemorySubject {
    let clock = Arc::new(ManualClock::default());
    MemorySubject { store: MemoryStore::with_clock(clock.clone()), clock }
}

impl Subject for MemorySubject {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn pass(&self, time: Duration) -> BoxFuture<'_, ()> {
        async move { self.clock.advance(time) }.boxed()
    }

    fn forget<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> BoxFuture<'a, ()> {
        self.store.remove(consumer, key).boxed()
    }
}

// ---- PostgreSQL

/// The address of a PostgreSQL server in which schemas may be made.
pub fn postgres_url() -> String {
    std::env::var("IDEM_TEST_POSTGRES_URL").unwrap_or_else(|_| {
        panic!(
            "IDEM_TEST_POSTGRES_URL is not set: it names the PostgreSQL server for these tests, such as \
             postgres://postgres@127.0.0.1:5432/postgres; scripts/test starts one and sets it"
        )
    })
}

/// A schema that is dropped with it.
pub struct Schema {
    pub name: String,
    pub url: String,
}

impl Schema {
    pub async fn new() -> Self {
        let name = format!("idem_test_{}", Uuid::new_v4().simple());
        run_on(&postgres_url(), format!("CREATE SCHEMA {name}")).await;
        let base = postgres_url();
        // The application's name tells its sessions from other tests'.
        let url = format!("{}&application_name={name}", with_option(&base, "search_path", &name));
        Self { name, url }
    }

    /// The URL with one more setting of the session.
    pub fn url_with(&self, setting: &str, value: &str) -> String {
        with_option(&self.url, setting, value)
    }
}

pub fn with_option(url: &str, setting: &str, value: &str) -> String {
    let separator = if url.contains('?') { '&' } else { '?' };
    format!("{url}{separator}options=-c%20{setting}%3D{value}")
}

/// Runs statements on a connection of their own.
pub async fn run_on(url: &str, text: String) {
    let pool = PgPoolOptions::new().max_connections(1).connect(url).await.expect("PostgreSQL answers");
    sqlx::raw_sql(AssertSqlSafe(text)).execute(&pool).await.expect("the statement works");
    pool.close().await;
}

impl Drop for Schema {
    fn drop(&mut self) {
        let drop_it = format!("SET lock_timeout = '5s'; DROP SCHEMA IF EXISTS {} CASCADE", self.name);
        // A runtime cannot wait for another inside of it, but a thread can.
        let dropping = std::thread::spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
            runtime.block_on(async {
                let pool = PgPoolOptions::new().max_connections(1).connect(&postgres_url()).await?;
                sqlx::raw_sql(AssertSqlSafe(drop_it)).execute(&pool).await
            })
        });
        if let Ok(Err(error)) = dropping.join() {
            eprintln!("schema {} stays behind: {error}", self.name);
        }
    }
}

pub struct PostgresSubject {
    pub store: PgStore,
    pub schema: Schema,
}

pub async fn postgres() -> PostgresSubject {
    postgres_with(&StoreOptions::default(), |schema| schema.url.clone()).await
}

pub async fn postgres_with(options: &StoreOptions, url: impl FnOnce(&Schema) -> String) -> PostgresSubject {
    let schema = Schema::new().await;
    let store = PgStore::connect(&url(&schema), options).await.expect("PostgreSQL answers");
    store.migrate().await.expect("an empty schema can be migrated");
    PostgresSubject { store, schema }
}

impl Subject for PostgresSubject {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn pass(&self, time: Duration) -> BoxFuture<'_, ()> {
        let micros = i64::try_from(time.as_micros()).expect("tests let little time pass");
        async move {
            sqlx::query(
                "UPDATE processed_jobs SET locked_until = locked_until - $1 * interval '1 microsecond',
                                           next_attempt_at = next_attempt_at - $1 * interval '1 microsecond'",
            )
            .bind(micros)
            .execute(self.store.pool())
            .await
            .expect("the tables are there");
        }
        .boxed()
    }

    fn forget<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> BoxFuture<'a, ()> {
        async move {
            sqlx::query("DELETE FROM processed_jobs WHERE consumer_name = $1 AND idempotency_key = $2")
                .bind(consumer.as_str())
                .bind(key.as_str())
                .execute(self.store.pool())
                .await
                .expect("the tables are there");
        }
        .boxed()
    }
}

impl Readable for PostgresSubject {
    fn column<'a>(&'a self, key: &'a str, column: &'a str) -> BoxFuture<'a, Option<String>> {
        async move {
            let text = format!("SELECT {column}::text FROM processed_jobs WHERE idempotency_key = $1");
            let query = sqlx::query_scalar(AssertSqlSafe(text)).bind(key);
            query.fetch_one(self.store.pool()).await.expect("the row is there")
        }
        .boxed()
    }

    fn long_ago(&self) -> BoxFuture<'_, ()> {
        async {
            sqlx::query("UPDATE processed_jobs SET created_at = 'epoch', updated_at = 'epoch'")
                .execute(self.store.pool())
                .await
                .expect("the tables are there");
        }
        .boxed()
    }
}

// ---- SQLite

/// A folder that is removed with it.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Self {
        let path = std::env::temp_dir().join(format!("idem-test-{}", Uuid::new_v4().simple()));
        std::fs::create_dir(&path).expect("the temporary folder can be written");
        Self(path)
    }

    pub fn url(&self) -> String {
        format!("sqlite:{}/jobs.db", self.0.display())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(feature = "sqlite")]
pub struct SqliteSubject {
    pub store: SqliteStore,
    pub folder: Folder,
}

#[cfg(feature = "sqlite")]
pub async fn sqlite() -> SqliteSubject {
    sqlite_with(&StoreOptions::default()).await
}

#[cfg(feature = "sqlite")]
pub async fn sqlite_with(options: &StoreOptions) -> SqliteSubject {
    let folder = Folder::new();
    let store = SqliteStore::connect(&folder.url(), options).await.expect("the file can be made");
    store.migrate().await.expect("an empty file can be migrated");
    SqliteSubject { store, folder }
}

#[cfg(feature = "sqlite")]
impl Subject for SqliteSubject {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn pass(&self, time: Duration) -> BoxFuture<'_, ()> {
        let micros = i64::try_from(time.as_micros()).expect("tests let little time pass");
        async move {
            sqlx::query(
                "UPDATE processed_jobs SET locked_until = locked_until - ?1, next_attempt_at = next_attempt_at - ?1",
            )
            .bind(micros)
            .execute(self.store.pool())
            .await
            .expect("the tables are there");
        }
        .boxed()
    }

    fn forget<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> BoxFuture<'a, ()> {
        async move {
            sqlx::query("DELETE FROM processed_jobs WHERE consumer_name = ?1 AND idempotency_key = ?2")
                .bind(consumer.as_str())
                .bind(key.as_str())
                .execute(self.store.pool())
                .await
                .expect("the tables are there");
        }
        .boxed()
    }
}

#[cfg(feature = "sqlite")]
impl Readable for SqliteSubject {
    fn column<'a>(&'a self, key: &'a str, column: &'a str) -> BoxFuture<'a, Option<String>> {
        async move {
            let text = format!("SELECT CAST({column} AS TEXT) FROM processed_jobs WHERE idempotency_key = ?1");
            let query = sqlx::query_scalar(AssertSqlSafe(text)).bind(key);
            query.fetch_one(self.store.pool()).await.expect("the row is there")
        }
        .boxed()
    }

    fn long_ago(&self) -> BoxFuture<'_, ()> {
        async {
            sqlx::query("UPDATE processed_jobs SET created_at = 0, updated_at = 0")
                .execute(self.store.pool())
                .await
                .expect("the tables are there");
        }
        .boxed()
    }
}

// ---- one job

pub fn key(text: &str) -> EventKey {
    EventKey::from_parts([text]).expect("a key")
}

pub fn terms(consumer: &str) -> Terms {
    Terms {
        consumer: ConsumerName::new(consumer).expect("a name"),
        lease: LEASE,
        max_attempts: 5,
        owner: "tests".into(),
    }
}

pub fn request(text: &str, number: u128) -> ClaimRequest {
    ClaimRequest {
        key: key(text),
        token: Token(Uuid::from_u128(number)),
        payload: None,
        message_id: format!("message {number}").into(),
    }
}
