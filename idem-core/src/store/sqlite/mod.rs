//! The store in one SQLite file, for one machine.

mod queries;

use std::any::Any;
use std::future::Future;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rand::Rng;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{AssertSqlSafe, Connection, Sqlite, SqliteConnection, SqlitePool};
use tokio::time::{sleep, timeout};

use self::queries::SqliteRows;
use super::lent::{Lent, Savepoints, bound, within};
use super::rows::{self, ClaimAs, Rows as _};
use super::{
    Answer, ClaimRequest, Completion, Engine, FailedTry, FailureWritten, Fenced, JobConnection, LockRequest, Operated,
    Purge, Renewal, Returned, Statement, Store, StoreError, StoreErrorKind, StoreOptions, StoreTx, Terms, Tx, locks,
    migrate,
};
use crate::key::{ConsumerName, EventKey, LockName};
use crate::machine::{OperatorAction, State, Token};

/// Connections for renewals, reading and the health check.
const CONTROL_CONNECTIONS: u32 = 2;
/// Connections for the application's own statements.
const APPLICATION_CONNECTIONS: u32 = 4;
/// How often a write that found the file busy is tried again, each after up to [`LONGEST_PAUSE`].
const TRIES: u32 = 4;
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// How long the tables' migration may take, which another process may be doing.
const MIGRATE_TIMEOUT: Duration = Duration::from_secs(120);
/// How long [`Store::close`] waits for connections that are in use.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The guard's rows in one SQLite file on a local disk, shared by any number of processes of one machine.
///
/// The file has one writer at a time, whoever it is: an atomic handler that has begun keeps every other claim, completion
/// and **renewal** waiting until it commits. Keep atomic handlers much shorter than the leases beside them.
///
/// ```
/// use idem_core::store::{SqliteStore, Store, StoreOptions};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// # let folder = std::env::temp_dir().join(format!("idem-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).unwrap();
/// # let url = format!("sqlite:{}/jobs.db", folder.display());
/// let store = SqliteStore::connect(&url, &StoreOptions::default()).await?;
/// store.migrate().await?;
/// # store.close().await;
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok::<(), idem_core::store::StoreError>(())
/// # }).unwrap();
/// ```
///
/// # Crash safety
/// Write-ahead log with `synchronous = FULL`: what was answered is on disk, also after a power failure.
#[derive(Clone, Debug)]
pub struct SqliteStore {
    /// One connection: a second would only wait for the first inside SQLite, which is unfair and polls.
    writer: SqlitePool,
    control: SqlitePool,
    application: SqlitePool,
    options: StoreOptions,
}

impl SqliteStore {
    /// Opens the file that `url` names: `sqlite:relative/path`, `sqlite:///absolute/path` or `sqlite://path`. A missing file
    /// is made; its tables are not touched.
    ///
    /// # Errors
    /// [`StoreErrorKind::Configuration`], naming the path, if it cannot be opened and written, if the URL is malformed or
    /// asks for a database in memory or for reading only, or if the options clash.
    pub async fn connect(url: &str, options: &StoreOptions) -> Result<Self, StoreError> {
        options.check()?;
        let target = target(url, options)?;
        let path = target.get_filename().to_path_buf();
        within(options.call_timeout, "open the SQLite file", try_file(&target)).await.map_err(|error| {
            match error.kind() {
                StoreErrorKind::Contention => error,
                _ => {
                    let text = format!("the SQLite file {path:?} cannot be opened and written");
                    StoreError::with_cause(StoreErrorKind::Configuration, text, error)
                }
            }
        })?;

        let pool = |connections| SqlitePoolOptions::new().max_connections(connections).test_before_acquire(false);
        let guard_pool = |connections| pool(connections).after_connect(|connection, _| Box::pin(prepare(connection)));
        Ok(Self {
            // Whoever waits for the writer waits for a lock; the other half of the time is for other processes.
            writer: guard_pool(1).acquire_timeout(options.lock_timeout / 2).connect_lazy_with(target.clone()),
            control: guard_pool(CONTROL_CONNECTIONS)
                .acquire_timeout(options.acquire_timeout)
                .connect_lazy_with(target.clone()),
            application: pool(APPLICATION_CONNECTIONS)
                .acquire_timeout(options.acquire_timeout)
                .connect_lazy_with(target),
            options: *options,
        })
    }

    /// Connections to the same file for the application's own statements: reading, or making its tables.
    ///
    /// What a handler writes goes through its transaction instead: only that commits together with the guard's row, and a
    /// handler that wrote here would wait for itself.
    pub fn pool(&self) -> &SqlitePool {
        &self.application
    }

    /// Begins a transaction that will write. It takes the write lock, so it may find the file busy.
    async fn begin_on(&self, pool: &SqlitePool) -> Result<SqliteTx, StoreError> {
        let lent = unless_busy(|| Lent::from(pool)).await.map_err(|error| match error {
            sqlx::Error::PoolTimedOut => StoreError::with_cause(
                StoreErrorKind::Contention,
                "wait for the SQLite file's writer, which another transaction of this process is",
                error,
            ),
            error => StoreError::from_sqlx("open the SQLite file", error),
        })?;
        let mut tx = SqliteTx { lent, savepoints: Savepoints::default(), call_timeout: self.options.call_timeout };
        let mut tries = 1;
        while let Err(error) = tx.send(queries::BEGIN.to_owned(), "begin a transaction").await {
            if error.kind() != StoreErrorKind::Contention || tries == TRIES {
                return Err(error);
            }
            pause().await;
            tries += 1;
        }
        Ok(tx)
    }
}

impl SqliteStore {
    /// Does something in a transaction of its own.
    async fn write<T>(
        &self,
        pool: &SqlitePool,
        what: &'static str,
        call: impl AsyncFnOnce(SqliteRows<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        within(self.options.call_timeout, what, async {
            let mut tx = self.begin_on(pool).await?;
            let done = call(SqliteRows(&mut tx.lent.connection)).await?;
            tx.commit().await?;
            Ok(done)
        })
        .await
    }

    /// Reads something, beside whoever writes.
    async fn look<T>(
        &self,
        what: &'static str,
        call: impl AsyncFnOnce(SqliteRows<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        within(self.options.call_timeout, what, async {
            let failed = |error| StoreError::from_sqlx("open the SQLite file", error);
            let mut lent = unless_busy(|| Lent::from(&self.control)).await.map_err(failed)?;
            let found = call(SqliteRows(&mut lent.connection)).await?;
            lent.give_back();
            Ok(found)
        })
        .await
    }
}

/// A `sqlite:` URL as options for the file.
fn target(url: &str, options: &StoreOptions) -> Result<SqliteConnectOptions, StoreError> {
    let configuration = |text: &str| StoreError::new(StoreErrorKind::Configuration, text);
    let rest = url.strip_prefix("sqlite:").map(|rest| rest.trim_start_matches("//"));
    let (path, settings) = match rest.map(|rest| rest.split_once('?').unwrap_or((rest, ""))) {
        Some((path, settings)) if !path.is_empty() => (path, settings),
        _ => return Err(configuration("the store's URL is malformed; expected sqlite:path/to/file")),
    };
    if path == ":memory:" || settings.contains("mode=memory") {
        return Err(configuration(
            "an SQLite database in memory guards nothing beyond one connection; name a file, or use memory: for tests",
        ));
    }
    if settings.contains("mode=ro") || settings.contains("immutable=") {
        return Err(configuration("the guard writes: its SQLite file cannot be opened for reading only"));
    }
    let target: SqliteConnectOptions = url.parse().map_err(|error: sqlx::Error| {
        let text = "the store's URL is malformed; expected sqlite:path/to/file";
        StoreError::with_cause(StoreErrorKind::Configuration, text, error)
    })?;
    Ok(target
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        // In this journal mode anything less lets a power failure take back what was answered.
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        .busy_timeout(options.lock_timeout / 2 / TRIES))
}

/// Whether the file can be opened and written. Opening alone does not write.
async fn try_file(target: &SqliteConnectOptions) -> Result<(), StoreError> {
    let failed = |error| StoreError::from_sqlx("open the SQLite file", error);
    // The first to open a new file switches its journal, for which others that open it are refused without waiting.
    let mut connection = unless_busy(|| SqliteConnection::connect_with(target)).await.map_err(failed)?;
    match connection.begin_with(queries::BEGIN).await.map_err(failed) {
        Ok(transaction) => transaction.rollback().await.map_err(failed)?,
        // Somebody else is writing, so it can be written.
        Err(error) if error.kind() == StoreErrorKind::Contention => {}
        Err(error) => return Err(error),
    }
    connection.close().await.map_err(failed)
}

/// Does it again, a bounded number of times and after a pause that differs between processes, while the file is busy.
async fn unless_busy<T, F>(attempt: impl Fn() -> F) -> Result<T, sqlx::Error>
where
    F: Future<Output = Result<T, sqlx::Error>>,
{
    for _ in 1..TRIES {
        match attempt().await {
            Err(error) if super::error::kind_of(&error) == StoreErrorKind::Contention => {
                pause().await;
            }
            result => return result,
        }
    }
    attempt().await
}

async fn pause() {
    let share: f64 = rand::rng().random();
    sleep(LONGEST_PAUSE.mul_f64(share)).await;
}

/// Makes a new connection the guard's, whose BEGIN and COMMIT are sent as text. For sqlx a transaction is open all the time,
/// so that what a handler begins on its connection is a savepoint, and its commit cannot be the guard's. Forgetting the
/// borrowed transaction is what leaves sqlx's count at one.
async fn prepare(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    std::mem::forget(connection.begin().await?);
    sqlx::raw_sql(queries::ROLLBACK).execute(connection).await?;
    Ok(())
}

impl Store for SqliteStore {
    fn engine(&self) -> Engine {
        Engine::Sqlite
    }

    fn migrate(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            within(MIGRATE_TIMEOUT, "migrate the tables", async {
                let mut tx = self.begin_on(&self.writer).await?;
                migrate::migrate(&mut SqliteRows(&mut tx.lent.connection), migrate::SQLITE, 0).await?;
                tx.commit().await
            })
            .await
        }
        .boxed()
    }

    fn claim<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [ClaimRequest],
    ) -> BoxFuture<'a, Result<Vec<Answer>, StoreError>> {
        self.write(&self.writer, "claim jobs", async move |mut rows| {
            rows::claim(&mut rows, terms, requests, ClaimAs::Processing).await
        })
        .boxed()
    }

    fn renew<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Renewal>, StoreError>> {
        self.write(&self.control, "renew leases", async move |mut rows| rows::renew(&mut rows, terms, held).await)
            .boxed()
    }

    fn complete<'a>(
        &'a self,
        terms: &'a Terms,
        done: &'a [Completion],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        self.write(&self.writer, "complete jobs", async move |mut rows| rows::complete(&mut rows, terms, done).await)
            .boxed()
    }

    fn fail<'a>(
        &'a self,
        terms: &'a Terms,
        failed: &'a [FailedTry],
    ) -> BoxFuture<'a, Result<Vec<FailureWritten>, StoreError>> {
        self.write(&self.writer, "mark jobs as failed", async move |mut rows| {
            rows::fail(&mut rows, terms, failed).await
        })
        .boxed()
    }

    fn release<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        self.write(&self.writer, "release jobs", async move |mut rows| rows::release(&mut rows, terms, held).await)
            .boxed()
    }

    fn begin(&self) -> BoxFuture<'_, Result<Tx, StoreError>> {
        async move {
            let begin = self.begin_on(&self.writer);
            Ok(Tx::new(within(self.options.call_timeout, "begin a transaction", begin).await?))
        }
        .boxed()
    }

    fn lock<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [LockRequest],
    ) -> BoxFuture<'a, Result<Vec<bool>, StoreError>> {
        self.write(&self.writer, "take locks", async move |mut rows| locks::take(&mut rows, terms, requests).await)
            .boxed()
    }

    fn extend_locks<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [LockRequest],
    ) -> BoxFuture<'a, Result<Vec<Renewal>, StoreError>> {
        let extend = async move |mut rows: SqliteRows<'_>| locks::extend(&mut rows, terms, requests).await;
        self.write(&self.control, "extend locks", extend).boxed()
    }

    fn unlock<'a>(&'a self, requests: &'a [LockRequest]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.write(&self.writer, "free locks", async move |mut rows| locks::free(&mut rows, requests).await).boxed()
    }

    fn make_locks<'a>(&'a self, names: &'a [LockName]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.write(&self.writer, "make locks", async move |mut rows| locks::make(&mut rows, names).await).boxed()
    }

    fn read<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        keys: &'a [EventKey],
    ) -> BoxFuture<'a, Result<Vec<State>, StoreError>> {
        self.look("read jobs", async move |mut rows| rows::read(&mut rows, consumer, keys).await).boxed()
    }

    fn result<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        key: &'a EventKey,
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        self.look("read what a job returned", async move |mut rows| rows.result(consumer, key).await).boxed()
    }

    fn count_duplicates<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        counts: &'a [(EventKey, u64)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let count = async move |mut rows: SqliteRows<'_>| rows::count_duplicates(&mut rows, consumer, counts).await;
        self.write(&self.control, "count duplicates", count).boxed()
    }

    fn operate<'a>(
        &'a self,
        terms: &'a Terms,
        key: &'a EventKey,
        action: OperatorAction,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<Operated, StoreError>> {
        let operate = async move |mut rows: SqliteRows<'_>| rows::operate(&mut rows, terms, key, action, reason).await;
        self.write(&self.writer, "change a job for an operator", operate).boxed()
    }

    fn purge<'a>(&'a self, purge: &'a Purge) -> BoxFuture<'a, Result<u64, StoreError>> {
        async move {
            let ended = self.look("find old jobs", async move |mut rows| rows.ended(purge).await).await?;
            self.write(&self.control, "purge jobs", async move |mut rows| rows.purge(purge, &ended).await).await
        }
        .boxed()
    }

    fn check_schema(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        let check = async move |mut rows: SqliteRows<'_>| migrate::check(&mut rows, migrate::SQLITE).await;
        self.look("check the tables", check).boxed()
    }

    fn ping(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            within(self.options.call_timeout, "ping the SQLite file", async {
                match self.begin_on(&self.control).await {
                    Ok(tx) => tx.rollback().await,
                    // Somebody is writing, so it can be written.
                    Err(error) if error.kind() == StoreErrorKind::Contention => Ok(()),
                    Err(error) => Err(error),
                }
            })
            .await
        }
        .boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        async move {
            let closing = async { tokio::join!(self.writer.close(), self.control.close(), self.application.close()) };
            // What is still in use then is closed when it is dropped.
            let _ = timeout(CLOSE_TIMEOUT, closing).await;
        }
        .boxed()
    }
}

impl super::tx::sealed::Sealed for SqliteConnection {}

impl JobConnection for SqliteConnection {
    fn complete<'a>(&'a mut self, terms: &'a Terms, done: &'a Completion) -> BoxFuture<'a, Result<Fenced, StoreError>> {
        async move { rows::complete_once(&mut SqliteRows(self), terms, done).await }.boxed()
    }
}

/// An open transaction. Its connection is given back only after a `COMMIT` or `ROLLBACK` that was answered.
struct SqliteTx {
    lent: Lent<Sqlite>,
    savepoints: Savepoints,
    call_timeout: Duration,
}

impl SqliteTx {
    /// Sends statements without parameters.
    async fn send(&mut self, text: String, what: &'static str) -> Result<(), StoreError> {
        within(self.call_timeout, what, async {
            let sent = sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut *self.lent.connection).await;
            sent.map(|_| ()).map_err(|error| StoreError::from_sqlx(what, error))
        })
        .await
    }

    async fn commit(mut self) -> Result<(), StoreError> {
        self.send(queries::COMMIT.to_owned(), "commit").await?;
        self.lent.give_back();
        Ok(())
    }

    async fn rollback(mut self) -> Result<(), StoreError> {
        self.send(queries::ROLLBACK.to_owned(), "roll back").await?;
        self.lent.give_back();
        Ok(())
    }
}

impl StoreTx for SqliteTx {
    fn engine(&self) -> Engine {
        Engine::Sqlite
    }

    fn claim<'a>(
        &'a mut self,
        terms: &'a Terms,
        requests: &'a [ClaimRequest],
    ) -> BoxFuture<'a, Result<Vec<Answer>, StoreError>> {
        async move {
            let mut rows = SqliteRows(&mut self.lent.connection);
            let claim = rows::claim(&mut rows, terms, requests, ClaimAs::Completed);
            within(self.call_timeout, "claim jobs", claim).await
        }
        .boxed()
    }

    fn overwrite<'a>(
        &'a mut self,
        terms: &'a Terms,
        rows: &'a [(EventKey, State, String)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            let overwrite = async {
                for (key, state, error) in rows {
                    SqliteRows(&mut self.lent.connection).overwrite(terms, key, state, error).await?;
                }
                Ok(())
            };
            within(self.call_timeout, "mark jobs as failed", overwrite).await
        }
        .boxed()
    }

    fn lock<'a>(&'a mut self, names: &'a [LockName]) -> BoxFuture<'a, Result<Vec<bool>, StoreError>> {
        async move {
            let mut rows = SqliteRows(&mut self.lent.connection);
            within(self.call_timeout, "hold locks", locks::hold(&mut rows, names)).await
        }
        .boxed()
    }

    fn keep_results<'a>(
        &'a mut self,
        consumer: &'a ConsumerName,
        results: &'a [(EventKey, Returned)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            let mut rows = SqliteRows(&mut self.lent.connection);
            within(self.call_timeout, "keep what jobs returned", rows.keep_results(consumer, results)).await
        }
        .boxed()
    }

    fn savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            self.send(self.savepoints.set(), "set a savepoint").await?;
            self.savepoints.is_set();
            Ok(())
        }
        .boxed()
    }

    fn rollback_to_savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            self.send(self.savepoints.roll_back()?, "roll back to a savepoint").await?;
            self.savepoints.is_removed();
            Ok(())
        }
        .boxed()
    }

    fn release_savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            self.send(self.savepoints.release()?, "release a savepoint").await?;
            self.savepoints.is_removed();
            Ok(())
        }
        .boxed()
    }

    fn execute(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, sqlx::Error>> {
        async move {
            let query = bound!(sqlx::query(statement.text), statement.values);
            Ok(query.execute(&mut *self.lent.connection).await?.rows_affected())
        }
        .boxed()
    }

    fn connection(&mut self) -> &mut (dyn Any + Send) {
        &mut *self.lent.connection
    }

    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        (*self).commit().boxed()
    }

    fn rollback(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        (*self).rollback().boxed()
    }
}
