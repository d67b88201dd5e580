//! Stores of their own for each test: a schema in the PostgreSQL or a database in the MariaDB that the environment names, a
//! file in a new folder, or memory.

#![allow(dead_code, reason = "each test binary uses some of it")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use idem_core::machine::Token;
#[cfg(feature = "mysql")]
use idem_core::store::MysqlStore;
#[cfg(feature = "sqlite")]
use idem_core::store::SqliteStore;
use idem_core::store::contract::Subject;
use idem_core::store::{ClaimRequest, MemoryStore, PgStore, Store, StoreOptions, Terms};
use idem_core::{ConsumerName, EventKey, ManualClock};
use sqlx::AssertSqlSafe;
#[cfg(feature = "mysql")]
use sqlx::mysql::MySqlPoolOptions;
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

    fn duplicates<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> BoxFuture<'a, u64> {
        self.store.duplicates(consumer, key).boxed()
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
    dropped_with_it: bool,
}

impl Schema {
    pub async fn new() -> Self {
        let name = format!("idem_test_{}", Uuid::new_v4().simple());
        run_on(&postgres_url(), format!("CREATE SCHEMA {name}")).await;
        let base = postgres_url();
        // The application's name tells its sessions from other tests'.
        let url = format!("{}&application_name={name}", with_option(&base, "search_path", &name));
        Self { name, url, dropped_with_it: true }
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
        if self.dropped_with_it {
            drop_on_postgres(
                &self.name,
                format!("SET lock_timeout = '5s'; DROP SCHEMA IF EXISTS {} CASCADE", self.name),
            );
        }
    }
}

/// A runtime cannot wait for another inside of it, but a thread can.
fn drop_on_postgres(what: &str, statement: String) {
    let dropping = std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
        runtime.block_on(async {
            let pool = PgPoolOptions::new().max_connections(1).connect(&postgres_url()).await?;
            sqlx::raw_sql(AssertSqlSafe(statement)).execute(&pool).await
        })
    });
    if let Ok(Err(error)) = dropping.join() {
        eprintln!("{what} stays behind: {error}");
    }
}

pub struct PostgresSubject {
    pub store: PgStore,
    pub schema: Schema,
    pool: sqlx::PgPool,
}

pub async fn postgres() -> PostgresSubject {
    postgres_with(&StoreOptions::default(), |schema| schema.url.clone()).await
}

pub async fn postgres_partitioned() -> PostgresSubject {
    postgres_with(&StoreOptions::default().partitioned(true), |schema| schema.url.clone()).await
}

/// The user's default isolation is not the guard's business: it names its own.
pub async fn postgres_serializable() -> PostgresSubject {
    let url = |schema: &Schema| schema.url_with("default_transaction_isolation", "serializable");
    postgres_with(&StoreOptions::default(), url).await
}

pub async fn postgres_with(options: &StoreOptions, url: impl FnOnce(&Schema) -> String) -> PostgresSubject {
    let schema = Schema::new().await;
    let store = PgStore::connect(&url(&schema), options).await.expect("PostgreSQL answers");
    store.migrate().await.expect("an empty schema can be migrated");
    let pool = store.pool().clone();
    PostgresSubject { store, schema, pool }
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
                                           next_attempt_at = next_attempt_at - $1 * interval '1 microsecond',
                                           created_at = created_at - $1 * interval '1 microsecond',
                                           updated_at = updated_at - $1 * interval '1 microsecond',
                                           completed_at = completed_at - $1 * interval '1 microsecond'",
            )
            .bind(micros)
            .execute(&self.pool)
            .await
            .expect("the tables are there");
            sqlx::query(
                "UPDATE job_locks SET locked_until = locked_until - $1 * interval '1 microsecond',
                                      updated_at = updated_at - $1 * interval '1 microsecond'",
            )
            .bind(micros)
            .execute(&self.pool)
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
                .execute(&self.pool)
                .await
                .expect("the tables are there");
        }
        .boxed()
    }

    fn duplicates<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> BoxFuture<'a, u64> {
        async move {
            let count: i64 = sqlx::query_scalar(
                "SELECT duplicates FROM processed_jobs WHERE consumer_name = $1 AND idempotency_key = $2",
            )
            .bind(consumer.as_str())
            .bind(key.as_str())
            .fetch_one(&self.pool)
            .await
            .expect("the row is there");
            u64::try_from(count).expect("a count")
        }
        .boxed()
    }
}

// ---- PostgreSQL behind PgBouncer

/// A database that is dropped with it: a pooler passes no schema on.
struct OwnDatabase(String);

impl Drop for OwnDatabase {
    fn drop(&mut self) {
        drop_on_postgres(&self.0, format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.0));
    }
}

pub struct PooledSubject {
    inner: PostgresSubject,
    _database: OwnDatabase,
}

/// The address of a PgBouncer in front of that server, in its mode `transaction`.
fn pgbouncer_url() -> String {
    std::env::var("IDEM_TEST_PGBOUNCER_URL").unwrap_or_else(|_| {
        panic!(
            "IDEM_TEST_PGBOUNCER_URL is not set: it names a PgBouncer that pools transactions in front of \
             IDEM_TEST_POSTGRES_URL; scripts/test starts one and sets it"
        )
    })
}

fn with_database(url: &str, name: &str) -> String {
    let (server, _) = url.rsplit_once('/').expect("the URL names a database");
    format!("{server}/{name}")
}

pub async fn postgres_behind_a_transaction_pooler() -> PooledSubject {
    let name = format!("idem_test_{}", Uuid::new_v4().simple());
    run_on(&postgres_url(), format!("CREATE DATABASE {name}")).await;
    let database = OwnDatabase(name.clone());
    let options = StoreOptions::default().transaction_pooler(true);
    let store = PgStore::connect(&with_database(&pgbouncer_url(), &name), &options).await.expect("PgBouncer answers");
    store.migrate().await.expect("an empty database can be migrated");
    // Past the pooler, for statements that are kept.
    let direct = with_database(postgres_url().split('?').next().expect("a URL"), &name);
    let pool = PgPoolOptions::new().max_connections(2).connect(&direct).await.expect("PostgreSQL answers");
    let schema = Schema { name: "public".to_owned(), url: direct, dropped_with_it: false };
    PooledSubject { inner: PostgresSubject { store, schema, pool }, _database: database }
}

impl Subject for PooledSubject {
    fn store(&self) -> Arc<dyn Store> {
        self.inner.store()
    }

    fn pass(&self, time: Duration) -> BoxFuture<'_, ()> {
        self.inner.pass(time)
    }

    fn forget<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> BoxFuture<'a, ()> {
        self.inner.forget(consumer, key)
    }

    fn duplicates<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> BoxFuture<'a, u64> {
        self.inner.duplicates(consumer, key)
    }
}

// ---- MariaDB

/// The address of a MariaDB server in which databases may be made.
pub fn mariadb_url() -> String {
    std::env::var("IDEM_TEST_MARIADB_URL").unwrap_or_else(|_| {
        panic!(
            "IDEM_TEST_MARIADB_URL is not set: it names the MariaDB server for these tests, such as \
             mysql://root@127.0.0.1:3306/mysql; scripts/test starts one and sets it"
        )
    })
}

/// A database that is dropped with it.
#[cfg(feature = "mysql")]
pub struct Database {
    pub name: String,
    pub url: String,
}

#[cfg(feature = "mysql")]
impl Database {
    pub async fn new() -> Self {
        let name = format!("idem_test_{}", Uuid::new_v4().simple());
        run_on_mariadb(&mariadb_url(), format!("CREATE DATABASE {name} CHARACTER SET latin1")).await;
        let base = mariadb_url();
        let (server, _) = base.split_once('?').unwrap_or((&base, ""));
        let (server, _) = server.rsplit_once('/').expect("the address ends in a database");
        Self { url: format!("{server}/{name}"), name }
    }
}

/// Runs statements on a connection of their own.
#[cfg(feature = "mysql")]
pub async fn run_on_mariadb(url: &str, text: String) {
    let pool = MySqlPoolOptions::new().max_connections(1).connect(url).await.expect("MariaDB answers");
    sqlx::raw_sql(AssertSqlSafe(text)).execute(&pool).await.expect("the statement works");
    pool.close().await;
}

#[cfg(feature = "mysql")]
impl Drop for Database {
    fn drop(&mut self) {
        let drop_it = format!("SET lock_wait_timeout = 5; DROP DATABASE IF EXISTS {}", self.name);
        // A runtime cannot wait for another inside of it, but a thread can.
        let dropping = std::thread::spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
            runtime.block_on(async {
                let pool = MySqlPoolOptions::new().max_connections(1).connect(&mariadb_url()).await?;
                sqlx::raw_sql(AssertSqlSafe(drop_it)).execute(&pool).await
            })
        });
        if let Ok(Err(error)) = dropping.join() {
            eprintln!("database {} stays behind: {error}", self.name);
        }
    }
}

#[cfg(feature = "mysql")]
pub struct MariadbSubject {
    pub store: MysqlStore,
    pub database: Database,
}

#[cfg(feature = "mysql")]
pub async fn mariadb() -> MariadbSubject {
    mariadb_with(&StoreOptions::default(), |database| database.url.clone()).await
}

#[cfg(feature = "mysql")]
pub async fn mariadb_with(options: &StoreOptions, url: impl FnOnce(&Database) -> String) -> MariadbSubject {
    let database = Database::new().await;
    let store = MysqlStore::connect(&url(&database), options).await.expect("MariaDB answers");
    store.migrate().await.expect("an empty database can be migrated");
    MariadbSubject { store, database }
}

#[cfg(feature = "mysql")]
impl Subject for MariadbSubject {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn pass(&self, time: Duration) -> BoxFuture<'_, ()> {
        let micros = i64::try_from(time.as_micros()).expect("tests let little time pass");
        async move {
            // A transaction, since the server's default may be not to commit by itself.
            let mut tx = self.store.pool().begin().await.expect("MariaDB answers");
            sqlx::query(
                "UPDATE processed_jobs SET locked_until = locked_until - INTERVAL ? MICROSECOND,
                                           next_attempt_at = next_attempt_at - INTERVAL ? MICROSECOND,
                                           created_at = created_at - INTERVAL ? MICROSECOND,
                                           updated_at = updated_at - INTERVAL ? MICROSECOND,
                                           completed_at = completed_at - INTERVAL ? MICROSECOND",
            )
            .bind(micros)
            .bind(micros)
            .bind(micros)
            .bind(micros)
            .bind(micros)
            .execute(&mut *tx)
            .await
            .expect("the tables are there");
            let locks = "UPDATE job_locks SET locked_until = locked_until - INTERVAL ? MICROSECOND,
                                              updated_at = updated_at - INTERVAL ? MICROSECOND";
            sqlx::query(locks).bind(micros).bind(micros).execute(&mut *tx).await.expect("the tables are there");
            tx.commit().await.expect("MariaDB answers");
        }
        .boxed()
    }

    fn forget<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> BoxFuture<'a, ()> {
        async move {
            let mut tx = self.store.pool().begin().await.expect("MariaDB answers");
            sqlx::query("DELETE FROM processed_jobs WHERE consumer_name = ? AND idempotency_key = ?")
                .bind(consumer.as_str())
                .bind(key.as_str())
                .execute(&mut *tx)
                .await
                .expect("the tables are there");
            tx.commit().await.expect("MariaDB answers");
        }
        .boxed()
    }

    fn duplicates<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> BoxFuture<'a, u64> {
        async move {
            let statement = "SELECT duplicates FROM processed_jobs WHERE consumer_name = ? AND idempotency_key = ?";
            let count: i64 = sqlx::query_scalar(statement)
                .bind(consumer.as_str())
                .bind(key.as_str())
                .fetch_one(self.store.pool())
                .await
                .expect("the row is there");
            u64::try_from(count).expect("a count")
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
                "UPDATE processed_jobs
                 SET locked_until = locked_until - ?1, next_attempt_at = next_attempt_at - ?1, created_at = created_at - ?1,
                     updated_at = updated_at - ?1, completed_at = completed_at - ?1",
            )
            .bind(micros)
            .execute(self.store.pool())
            .await
            .expect("the tables are there");
            sqlx::query("UPDATE job_locks SET locked_until = locked_until - ?1, updated_at = updated_at - ?1")
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

    fn duplicates<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> BoxFuture<'a, u64> {
        async move {
            let count: i64 = sqlx::query_scalar(
                "SELECT duplicates FROM processed_jobs WHERE consumer_name = ?1 AND idempotency_key = ?2",
            )
            .bind(consumer.as_str())
            .bind(key.as_str())
            .fetch_one(self.store.pool())
            .await
            .expect("the row is there");
            u64::try_from(count).expect("a count")
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
