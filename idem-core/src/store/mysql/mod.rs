//! The store in MariaDB or MySQL.

mod placeholders;
mod queries;

use std::any::Any;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, MySql, MySqlConnection, MySqlPool, Row};
use tokio::runtime::Handle;
use tokio::time::timeout;

use self::placeholders::positional;
use self::queries::{MysqlRows, whole_seconds};
use super::error::{DEADLOCK, number_of};
use super::lent::{Lent, Savepoints, bound, within};
use super::rows::{self, ClaimAs, Rows as _};
use super::server::{Breakdown, CLOSE_TIMEOUT, MIGRATE_TIMEOUT, Use, guard_pool};
use super::{
    Answer, ClaimRequest, Completion, Engine, FailedTry, FailureWritten, Fenced, JobConnection, LockRequest, Operated,
    Purge, Renewal, Returned, Statement, Store, StoreError, StoreErrorKind, StoreOptions, StoreTx, Terms, Tx, locks,
    migrate,
};
use crate::key::{ConsumerName, EventKey, LockName};
use crate::machine::{OperatorAction, State, Token};

/// How often a transaction that has only claimed begins again when the engine has broken it off for another's sake.
const CLAIM_TRIES: u32 = 16;

/// The guard's rows in MariaDB 10.6 or MySQL 8.0.16, or later, in the database that the URL names.
///
/// **Tested** with MariaDB 10.11. Of MySQL 8 nothing is: the statements keep to what both document, but that its optimizer
/// keeps the locking part of the renewal and of the takeover apart, and how its deadlocks fall, is not watched. Galera
/// clusters are not tested either; their commits can be refused, and migrations are kept apart on one node only.
///
/// Where it differs from the other engines:
/// - **DDL commits.** `CREATE`, `ALTER`, `TRUNCATE` and the like in a handler commit its claim and what it has done so far;
///   what it does after is rolled back, and the commit fails with [`StoreErrorKind::Broken`]. Make tables elsewhere.
/// - **A deadlock** rolls back the whole transaction. A handler that hides it finds the commit refused, and nothing kept.
/// - **A statement whose client has gone** runs on, with the locks of its transaction. When a handler is dropped, its session
///   is ended from another one; when its process dies, the server ends it after the statement.
/// - **Sessions** have a `sql_mode` of the guard's, strict, and READ COMMITTED, whatever the server's defaults are. So with a
///   binary log its format must be row-based or mixed.
/// - **Time-outs** count whole seconds: [`lock_timeout`](StoreOptions::lock_timeout) and
///   [`idle_transaction_timeout`](StoreOptions::idle_transaction_timeout) are rounded up. A worker whose machine vanishes
///   keeps the keys of its open transactions until the latter is over.
/// - **Durability** is the server's: `innodb_flush_log_at_trx_commit` and `sync_binlog` have no session value. Where they let
///   a crash take back what was committed, [`connect`](Self::connect) warns, for an offset may be committed on the strength
///   of it.
/// - **Keys** are stored as bytes; for people they are text in most clients, or `CONVERT(idempotency_key USING utf8mb4)`.
///
/// Connections keep settings for their session, so a proxy in between must not share a session between clients.
///
/// ```no_run
/// use idem_core::store::{MysqlStore, Store, StoreOptions};
///
/// # async fn run() -> Result<(), idem_core::store::StoreError> {
/// let store = MysqlStore::connect("mysql://app:secret@localhost/shop", &StoreOptions::default()).await?;
/// store.migrate().await?;
/// # Ok(())
/// # }
/// ```
///
/// # Cancel safety
/// A connection whose call was dropped, timed out or broke off is closed and never used again; the server then rolls its
/// transaction back.
#[derive(Clone, Debug)]
pub struct MysqlStore {
    /// Claims, completions and the transactions of handlers.
    work: MySqlPool,
    control: MySqlPool,
    application: MySqlPool,
    breakdown: Breakdown,
    options: StoreOptions,
}

impl MysqlStore {
    /// Opens the database at `url`, which is `mysql://user:password@host:port/database?…` or `mariadb://…`. The tables are
    /// not touched. Warns (`tracing`) if the server may lose commits in a crash.
    ///
    /// # Errors
    /// [`StoreErrorKind::Configuration`] if the URL is malformed or names no database, the options clash, the server is too
    /// old, or it refuses the password, the user or the database; [`StoreErrorKind::Unavailable`] if it does not answer
    /// within [`acquire_timeout`](StoreOptions::acquire_timeout). No error shows the password.
    pub async fn connect(url: &str, options: &StoreOptions) -> Result<Self, StoreError> {
        options.check()?;
        if Duration::from_secs(whole_seconds(options.lock_timeout)) >= options.call_timeout {
            let text = format!(
                "lock_timeout {:?}, which MySQL rounds up to {} s, is not below call_timeout {:?}: waits for locks would \
                 look like a dead server",
                options.lock_timeout,
                whole_seconds(options.lock_timeout),
                options.call_timeout
            );
            return Err(StoreError::new(StoreErrorKind::Configuration, text));
        }
        let target: MySqlConnectOptions = url.parse().map_err(malformed)?;
        if target.get_database().is_none() {
            let text = "the store's URL names no database; expected mysql://user:password@host:port/database";
            return Err(StoreError::new(StoreErrorKind::Configuration, text));
        }
        // Through another one a character that it lacks would become a question mark, also in a key.
        let target = target.charset("utf8mb4");
        // Through a pool a refusal would be tried again until the time is over, and the reason be lost.
        let first = within(options.acquire_timeout, "connect to MySQL", async {
            let mut connection = target.connect().await.map_err(|error| refused(&target, error))?;
            check_server(&mut connection).await?;
            Ok(connection)
        });
        // Only a courtesy to the server, which notices anyway.
        let _ = first.await?.close().await;

        let application = MySqlPoolOptions::new()
            .max_connections(options.max_connections)
            .acquire_timeout(options.acquire_timeout)
            .connect_lazy_with(target.clone());
        let breakdown = Breakdown::default();
        Ok(Self {
            work: work_or_control(options, &breakdown, Use::Work).connect_lazy_with(target.clone()),
            control: work_or_control(options, &breakdown, Use::Control).connect_lazy_with(target),
            application,
            breakdown,
            options: *options,
        })
    }

    /// Connections to the same database for the application's own statements: reading, or making its tables. They are opened
    /// when they are first used, and apart from the guard's, so that neither can starve the other.
    ///
    /// What a handler writes goes through its transaction instead: only that commits together with the guard's row.
    pub fn pool(&self) -> &MySqlPool {
        &self.application
    }
}

fn work_or_control(options: &StoreOptions, breakdown: &Breakdown, used_for: Use) -> MySqlPoolOptions {
    let lock_timeout = used_for.lock_timeout(options);
    let idle_timeout = options.idle_transaction_timeout;
    guard_pool(options, breakdown, used_for)
        .after_connect(move |connection, _| Box::pin(prepare(connection, used_for, lock_timeout, idle_timeout)))
}

/// Makes a new connection the guard's.
async fn prepare(
    connection: &mut MySqlConnection,
    used_for: Use,
    lock_timeout: Duration,
    idle_timeout: Duration,
) -> Result<(), sqlx::Error> {
    let settings = queries::settings(lock_timeout, idle_timeout);
    sqlx::raw_sql(AssertSqlSafe(settings)).execute(&mut *connection).await?;
    if used_for == Use::Work {
        // The guard sends its BEGIN and COMMIT as text. For sqlx a transaction is open all the time, so that what a
        // handler begins on its connection is a savepoint, and its commit cannot be the guard's. Forgetting the
        // borrowed transaction is what leaves sqlx's count at one.
        std::mem::forget(connection.begin().await?);
        sqlx::raw_sql(queries::ROLLBACK).execute(&mut *connection).await?;
    }
    Ok(())
}

/// Whether the guard can rely on the server.
async fn check_server(connection: &mut MySqlConnection) -> Result<(), StoreError> {
    let failed = |error| StoreError::from_sqlx("ask the server for its version and settings", error);
    let row = sqlx::query(queries::SERVER).fetch_one(connection).await.map_err(failed)?;
    let version: String = row.try_get("version").map_err(failed)?;
    if is_too_old(&version) {
        let text = format!("the server is {version}; needed is MariaDB 10.6 or MySQL 8.0.16, or later");
        return Err(StoreError::new(StoreErrorKind::Configuration, text));
    }
    let log_is_flushed: bool = row.try_get("log_is_flushed").map_err(failed)?;
    let binlog_is_flushed: bool = row.try_get("binlog_is_flushed").map_err(failed)?;
    if !log_is_flushed || !binlog_is_flushed {
        tracing::warn!(
            log_is_flushed,
            binlog_is_flushed,
            "a crash of the server's machine may take back jobs that were answered as completed, whose messages do not come \
             again; set innodb_flush_log_at_trx_commit = 1 and, with a binary log, sync_binlog = 1"
        );
    }
    Ok(())
}

/// Before `SKIP LOCKED`, and constraints that are checked. MariaDB says so in its version: "10.11.6-MariaDB". A version that
/// cannot be read is let through.
fn is_too_old(version: &str) -> bool {
    let numbers = version.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse().ok());
    let needed = if version.to_ascii_lowercase().contains("mariadb") { vec![10, 6] } else { vec![8, 0, 16] };
    let found: Vec<u32> = numbers.take(3).collect();
    !found.is_empty() && found < needed
}

impl MysqlStore {
    async fn lend(&self, pool: &MySqlPool) -> Result<Lent<MySql>, StoreError> {
        Lent::from(pool).await.map_err(|error| StoreError::from_sqlx("get a connection", error))
    }

    async fn begin_tx(&self) -> Result<MysqlTx, StoreError> {
        let mut lent = self.lend(&self.work).await?;
        let begin = begin(&mut lent);
        let begun = within(self.options.call_timeout, "begin a transaction", begin).await;
        let session = Session { id: self.breakdown.noted(begun)?, control: self.control.clone(), is_over: false };
        Ok(MysqlTx {
            lent,
            session,
            savepoints: Savepoints::default(),
            progress: Progress::Begun,
            breakdown: self.breakdown.clone(),
            call_timeout: self.options.call_timeout,
        })
    }

    /// Does what needs no transaction, each statement being its own, on a connection of `pool`.
    async fn on<T>(
        &self,
        pool: &MySqlPool,
        what: &'static str,
        call: impl AsyncFnOnce(MysqlRows<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut lent = self.lend(pool).await?;
        let result = within(self.options.call_timeout, what, call(alone(&mut lent))).await;
        self.back(lent, result)
    }

    /// Hands the result of statements without a transaction on. After a refusal the connection is as good as before; one
    /// that did not answer, or a server that cannot write now, is left.
    fn back<T>(&self, lent: Lent<MySql>, result: Result<T, StoreError>) -> Result<T, StoreError> {
        if result.as_ref().err().is_none_or(|error| error.kind() != StoreErrorKind::Unavailable) {
            lent.give_back();
        }
        self.breakdown.noted(result)
    }
}

impl Store for MysqlStore {
    fn engine(&self) -> Engine {
        Engine::Mysql
    }

    fn migrate(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            let mut lent = self.lend(&self.work).await?;
            let migrate = async {
                let failed = |error| StoreError::from_sqlx("migrate the tables", error);
                sqlx::raw_sql(queries::SETTINGS_OF_MIGRATION).execute(&mut *lent.connection).await.map_err(failed)?;
                migrate::migrate(&mut alone(&mut lent), migrate::MYSQL, 0).await
            };
            let result = within(MIGRATE_TIMEOUT, "migrate the tables", migrate).await;
            // Not given back but closed, and with it the lock is gone that keeps others from migrating.
            self.breakdown.noted(result)
        }
        .boxed()
    }

    fn claim<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [ClaimRequest],
    ) -> BoxFuture<'a, Result<Vec<Answer>, StoreError>> {
        self.on(&self.work, "claim jobs", async move |mut rows| {
            rows::claim(&mut rows, terms, requests, ClaimAs::Processing).await
        })
        .boxed()
    }

    fn renew<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Renewal>, StoreError>> {
        self.on(&self.control, "renew leases", async move |mut rows| rows::renew(&mut rows, terms, held).await).boxed()
    }

    fn complete<'a>(
        &'a self,
        terms: &'a Terms,
        done: &'a [Completion],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        self.on(&self.work, "complete jobs", async move |mut rows| rows::complete(&mut rows, terms, done).await).boxed()
    }

    fn fail<'a>(
        &'a self,
        terms: &'a Terms,
        failed: &'a [FailedTry],
    ) -> BoxFuture<'a, Result<Vec<FailureWritten>, StoreError>> {
        self.on(&self.work, "mark jobs as failed", async move |mut rows| rows::fail(&mut rows, terms, failed).await)
            .boxed()
    }

    fn release<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        self.on(&self.work, "release jobs", async move |mut rows| rows::release(&mut rows, terms, held).await).boxed()
    }

    fn begin(&self) -> BoxFuture<'_, Result<Tx, StoreError>> {
        async move { Ok(Tx::new(self.begin_tx().await?)) }.boxed()
    }

    fn read<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        keys: &'a [EventKey],
    ) -> BoxFuture<'a, Result<Vec<State>, StoreError>> {
        self.on(&self.work, "read jobs", async move |mut rows| rows::read(&mut rows, consumer, keys).await).boxed()
    }

    fn lock<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [LockRequest],
    ) -> BoxFuture<'a, Result<Vec<bool>, StoreError>> {
        self.on(&self.work, "take locks", async move |mut rows| locks::take(&mut rows, terms, requests).await).boxed()
    }

    fn extend_locks<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [LockRequest],
    ) -> BoxFuture<'a, Result<Vec<Renewal>, StoreError>> {
        let extend = async move |mut rows: MysqlRows<'_>| locks::extend(&mut rows, terms, requests).await;
        self.on(&self.control, "extend locks", extend).boxed()
    }

    fn unlock<'a>(&'a self, requests: &'a [LockRequest]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.on(&self.work, "free locks", async move |mut rows| locks::free(&mut rows, requests).await).boxed()
    }

    fn make_locks<'a>(&'a self, names: &'a [LockName]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.on(&self.work, "make locks", async move |mut rows| locks::make(&mut rows, names).await).boxed()
    }

    fn result<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        key: &'a EventKey,
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        self.on(&self.work, "read what a job returned", async move |mut rows| rows.result(consumer, key).await).boxed()
    }

    fn count_duplicates<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        counts: &'a [(EventKey, u64)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let count = async move |mut rows: MysqlRows<'_>| rows::count_duplicates(&mut rows, consumer, counts).await;
        self.on(&self.control, "count duplicates", count).boxed()
    }

    fn operate<'a>(
        &'a self,
        terms: &'a Terms,
        key: &'a EventKey,
        action: OperatorAction,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<Operated, StoreError>> {
        let operate = async move |mut rows: MysqlRows<'_>| rows::operate(&mut rows, terms, key, action, reason).await;
        self.on(&self.work, "change a job for an operator", operate).boxed()
    }

    fn purge<'a>(&'a self, purge: &'a Purge) -> BoxFuture<'a, Result<u64, StoreError>> {
        self.on(&self.control, "purge jobs", async move |mut rows| rows.purge(purge).await).boxed()
    }

    fn check_schema(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        let check = async move |mut rows: MysqlRows<'_>| migrate::check(&mut rows, migrate::MYSQL).await;
        self.on(&self.work, "check the tables", check).boxed()
    }

    fn ping(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            let mut lent = self.lend(&self.control).await?;
            let ping = async { can_write(&mut lent.connection).await };
            let result = within(self.options.call_timeout, "ping the server", ping).await;
            self.back(lent, result)
        }
        .boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        async move {
            let closing = async { tokio::join!(self.work.close(), self.control.close(), self.application.close()) };
            // What is still in use then is closed when it is dropped.
            let _ = timeout(CLOSE_TIMEOUT, closing).await;
        }
        .boxed()
    }
}

/// The rows through a connection on which each statement is a transaction of its own.
fn alone(lent: &mut Lent<MySql>) -> MysqlRows<'_> {
    MysqlRows { connection: &mut lent.connection, alone: true }
}

/// Answers the session's number.
async fn begin(lent: &mut Lent<MySql>) -> Result<u64, StoreError> {
    let failed = |error| StoreError::from_sqlx("begin a transaction", error);
    let answered = sqlx::raw_sql(queries::BEGIN).fetch_all(&mut *lent.connection).await.map_err(failed)?;
    let answer = answered.last().ok_or(sqlx::Error::RowNotFound).and_then(|row| row.try_get(0));
    answer.map_err(failed)
}

/// The session of a transaction, which is ended from another one if the transaction is dropped before its end: MySQL does not
/// notice that a client has gone while a statement runs, and a handler's statement may run for long, with all its locks.
struct Session {
    id: u64,
    control: MySqlPool,
    is_over: bool,
}

impl Drop for Session {
    fn drop(&mut self) {
        let (false, Ok(runtime)) = (self.is_over, Handle::try_current()) else { return };
        let (text, control) = (queries::end_session(self.id), self.control.clone());
        runtime.spawn(async move {
            // Most are gone by now, which is an error, too. What cannot be ended ends with its statement.
            let _ = timeout(CLOSE_TIMEOUT, sqlx::raw_sql(AssertSqlSafe(text)).execute(&control)).await;
        });
    }
}

impl super::tx::sealed::Sealed for MySqlConnection {}

impl JobConnection for MySqlConnection {
    fn complete<'a>(&'a mut self, terms: &'a Terms, done: &'a Completion) -> BoxFuture<'a, Result<Fenced, StoreError>> {
        async move {
            let applied = MysqlRows { connection: self, alone: false }.complete_one(terms, done).await?;
            Ok(if applied { Fenced::Applied } else { Fenced::LeaseLost })
        }
        .boxed()
    }
}

/// An open transaction. Its connection is given back only after a `COMMIT` or `ROLLBACK` that was answered.
struct MysqlTx {
    lent: Lent<MySql>,
    session: Session,
    savepoints: Savepoints,
    progress: Progress,
    breakdown: Breakdown,
    call_timeout: Duration,
}

/// How far a transaction has come, as far as it matters if the engine breaks it off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// Nothing is in it, so it can be begun again.
    Begun,
    /// Something is.
    Under,
    /// The engine has rolled it back to end a deadlock.
    BrokenOff,
}

impl MysqlTx {
    /// Sends statements without parameters; several go in one message and end at the first that fails.
    async fn send(&mut self, text: String, what: &'static str) -> Result<(), StoreError> {
        let result = within(self.call_timeout, what, async {
            let sent = sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut *self.lent.connection).await;
            sent.map(|_| ()).map_err(|error| StoreError::from_sqlx(what, error))
        });
        let result = result.await;
        self.told(result)
    }

    /// Hands a result on and remembers what it means for the transaction.
    fn told<T>(&mut self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        match &result {
            Err(error) if error.number() == Some(DEADLOCK) => self.progress = Progress::BrokenOff,
            Err(error) if error.number() == Some(queries::NO_SUCH_SAVEPOINT) => {
                let text = "the transaction had ended before: a handler ended it (COMMIT, ROLLBACK, or DDL, which commits), \
                            or hid an error with which the engine did";
                return Err(StoreError::new(StoreErrorKind::Broken, text));
            }
            _ => {}
        }
        self.breakdown.noted(result)
    }

    /// Something is about to be in it.
    ///
    /// # Errors
    /// The engine has broken it off: what came after would not be the same transaction's.
    fn is_used(&mut self) -> Result<(), StoreError> {
        if self.progress == Progress::BrokenOff {
            let text = "the engine has rolled the transaction back to end a deadlock";
            return Err(StoreError::new(StoreErrorKind::Contention, text));
        }
        self.progress = Progress::Under;
        Ok(())
    }

    /// Claims, and begins again if the engine breaks it off while nothing else is in the transaction: of several that wait
    /// for one insert which is then rolled back, only one can go on.
    async fn claim(&mut self, terms: &Terms, requests: &[ClaimRequest]) -> Result<Vec<Answer>, StoreError> {
        let was_empty = self.progress == Progress::Begun;
        self.is_used()?;
        let mut tries = 1;
        loop {
            let mut rows = MysqlRows { connection: &mut self.lent.connection, alone: false };
            match rows::claim(&mut rows, terms, requests, ClaimAs::Completed).await {
                Err(error) if error.number() == Some(DEADLOCK) && was_empty && tries < CLAIM_TRIES => {
                    queries::pause().await;
                    begin(&mut self.lent).await?;
                    tries += 1;
                }
                result => return result,
            }
        }
    }

    async fn commit(mut self) -> Result<(), StoreError> {
        self.is_used()?;
        self.send(queries::COMMIT.to_owned(), "commit").await?;
        self.session.is_over = true;
        self.lent.give_back();
        Ok(())
    }

    async fn rollback(mut self) -> Result<(), StoreError> {
        self.send(queries::ROLLBACK.to_owned(), "roll back").await?;
        self.session.is_over = true;
        self.lent.give_back();
        Ok(())
    }
}

impl StoreTx for MysqlTx {
    fn engine(&self) -> Engine {
        Engine::Mysql
    }

    fn claim<'a>(
        &'a mut self,
        terms: &'a Terms,
        requests: &'a [ClaimRequest],
    ) -> BoxFuture<'a, Result<Vec<Answer>, StoreError>> {
        async move {
            let limit = self.call_timeout;
            let result = within(limit, "claim jobs", async { self.claim(terms, requests).await }).await;
            self.told(result)
        }
        .boxed()
    }

    fn overwrite<'a>(
        &'a mut self,
        terms: &'a Terms,
        rows: &'a [(EventKey, State, String)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            self.is_used()?;
            let overwrite = async {
                let mut guard = MysqlRows { connection: &mut self.lent.connection, alone: false };
                for (key, state, error) in rows {
                    guard.overwrite(terms, key, state, error).await?;
                }
                Ok(())
            };
            let result = within(self.call_timeout, "mark jobs as failed", overwrite).await;
            self.told(result)
        }
        .boxed()
    }

    fn lock<'a>(&'a mut self, names: &'a [LockName]) -> BoxFuture<'a, Result<Vec<bool>, StoreError>> {
        async move {
            self.is_used()?;
            let mut rows = MysqlRows { connection: &mut self.lent.connection, alone: false };
            let result = within(self.call_timeout, "hold locks", locks::hold(&mut rows, names)).await;
            self.told(result)
        }
        .boxed()
    }

    fn keep_results<'a>(
        &'a mut self,
        consumer: &'a ConsumerName,
        results: &'a [(EventKey, Returned)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            self.is_used()?;
            let mut rows = MysqlRows { connection: &mut self.lent.connection, alone: false };
            let keep = rows.keep_results(consumer, results);
            let result = within(self.call_timeout, "keep what jobs returned", keep).await;
            self.told(result)
        }
        .boxed()
    }

    fn savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            self.is_used()?;
            self.send(self.savepoints.set(), "set a savepoint").await?;
            self.savepoints.is_set();
            Ok(())
        }
        .boxed()
    }

    fn rollback_to_savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            self.is_used()?;
            self.send(self.savepoints.roll_back()?, "roll back to a savepoint").await?;
            self.savepoints.is_removed();
            Ok(())
        }
        .boxed()
    }

    fn release_savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            self.is_used()?;
            self.send(self.savepoints.release()?, "release a savepoint").await?;
            self.savepoints.is_removed();
            Ok(())
        }
        .boxed()
    }

    fn execute(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, sqlx::Error>> {
        async move {
            if let Err(error) = self.is_used() {
                return Err(sqlx::Error::Protocol(error.to_string()));
            }
            let placed = positional(statement.text, statement.values.len()).map_err(sqlx::Error::InvalidArgument)?;
            let values = placed.values.into_iter().map(|index| statement.values[index].clone());
            let query = bound!(sqlx::query(AssertSqlSafe(placed.text)), values);
            let result = query.execute(&mut *self.lent.connection).await;
            if result.as_ref().is_err_and(|error| error.as_database_error().and_then(number_of) == Some(DEADLOCK)) {
                self.progress = Progress::BrokenOff;
            }
            Ok(result?.rows_affected())
        }
        .boxed()
    }

    fn connection(&mut self) -> &mut (dyn Any + Send) {
        if self.progress == Progress::Begun {
            self.progress = Progress::Under;
        }
        &mut *self.lent.connection
    }

    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        (*self).commit().boxed()
    }

    fn rollback(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        (*self).rollback().boxed()
    }
}

async fn can_write(connection: &mut MySqlConnection) -> Result<(), StoreError> {
    let sent = sqlx::query(queries::CAN_WRITE).execute(connection).await;
    sent.map(|_| ()).map_err(|error| StoreError::from_sqlx("ping the server", error))
}

fn malformed(error: sqlx::Error) -> StoreError {
    let text = "the store's URL is malformed; expected mysql://user:password@host:port/database";
    StoreError::with_cause(StoreErrorKind::Configuration, text, error)
}

/// Says who was refused where, without the password.
fn refused(target: &MySqlConnectOptions, error: sqlx::Error) -> StoreError {
    let (user, host, port) = (target.get_username(), target.get_host(), target.get_port());
    let database = target.get_database().unwrap_or_default();
    StoreError::from_sqlx(format!("connect to database {database:?} at {host}:{port} as {user:?}"), error)
}

#[cfg(test)]
mod tests {
    use super::is_too_old;

    #[test]
    fn versions_that_cannot_do_it_are_told() {
        for version in ["10.5.23-MariaDB", "5.7.44-log", "8.0.15", "10.4.1-mariadb-log"] {
            assert!(is_too_old(version), "{version}");
        }
        for version in
            ["10.6.0-MariaDB", "10.11.19-MariaDB-0+deb12u1", "11.4.2-MariaDB", "8.0.16", "8.4.0", "9.1.0", "?"]
        {
            assert!(!is_too_old(version), "{version}");
        }
    }
}
