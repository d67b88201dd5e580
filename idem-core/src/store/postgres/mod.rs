//! The store in PostgreSQL, the reference.

mod queries;

use std::any::Any;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, PgPool, Postgres};
use tokio::time::timeout;

use self::queries::PgRows;
use super::lent::{Lent, Savepoints, bound, within};
use super::rows::{self, ClaimAs};
use super::server::{Breakdown, CLOSE_TIMEOUT, MIGRATE_TIMEOUT, Use, guard_pool};
use super::{
    Answer, ClaimRequest, Completion, Engine, FailedTry, FailureWritten, Fenced, Statement, Store, StoreError,
    StoreErrorKind, StoreOptions, StoreTx, Terms, Tx, migrate,
};
use crate::key::{ConsumerName, EventKey};
use crate::machine::{State, Token};

/// The guard's rows in PostgreSQL 13 or later, in the first schema of the connection's `search_path`.
///
/// Connections keep settings for their session, so a pooler in between must pool sessions, not transactions.
///
/// ```no_run
/// use idem_core::store::{PgStore, Store, StoreOptions};
///
/// # async fn run() -> Result<(), idem_core::store::StoreError> {
/// let store = PgStore::connect("postgres://app:secret@localhost/shop", &StoreOptions::default()).await?;
/// store.migrate().await?;
/// # Ok(())
/// # }
/// ```
///
/// # Cancel safety
/// A connection whose call was dropped, timed out or broke off is closed and never used again; the server then rolls its
/// transaction back.
#[derive(Clone, Debug)]
pub struct PgStore {
    /// Claims, completions and the transactions of handlers.
    work: PgPool,
    control: PgPool,
    application: PgPool,
    breakdown: Breakdown,
    options: StoreOptions,
}

impl PgStore {
    /// Opens the database at `url`, which is libpq's `postgres://user:password@host:port/database?…`. The tables are not
    /// touched.
    ///
    /// # Errors
    /// [`StoreErrorKind::Configuration`] if the URL is malformed, the options clash, or the server refuses the password,
    /// the user or the database; [`StoreErrorKind::Unavailable`] if it does not answer within
    /// [`acquire_timeout`](StoreOptions::acquire_timeout). No error shows the password.
    pub async fn connect(url: &str, options: &StoreOptions) -> Result<Self, StoreError> {
        options.check()?;
        let target: PgConnectOptions = url.parse().map_err(malformed)?;
        let target = match target.get_application_name() {
            Some(_) => target,
            None => target.application_name("idem"),
        };
        // Through a pool a refusal would be tried again until the time is over, and the reason be lost.
        let first = within(options.acquire_timeout, "connect to PostgreSQL", async {
            target.connect().await.map_err(|error| refused(&target, error))
        });
        // Only a courtesy to the server, which notices anyway.
        let _ = first.await?.close().await;

        let application = PgPoolOptions::new()
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
    pub fn pool(&self) -> &PgPool {
        &self.application
    }
}

fn work_or_control(options: &StoreOptions, breakdown: &Breakdown, used_for: Use) -> PgPoolOptions {
    let lock_timeout = used_for.lock_timeout(options);
    let idle_timeout = options.idle_transaction_timeout;
    guard_pool(options, breakdown, used_for)
        .after_connect(move |connection, _| Box::pin(prepare(connection, used_for, lock_timeout, idle_timeout)))
}

/// Makes a new connection the guard's.
async fn prepare(
    connection: &mut PgConnection,
    used_for: Use,
    lock_timeout: Duration,
    idle_timeout: Duration,
) -> Result<(), sqlx::Error> {
    let milliseconds = |time: Duration| format!("{}ms", time.as_millis());
    sqlx::query(queries::SETTINGS)
        .bind(milliseconds(lock_timeout))
        .bind(milliseconds(idle_timeout))
        .execute(&mut *connection)
        .await?;
    match used_for {
        Use::Control => {
            sqlx::raw_sql(queries::SETTINGS_OF_CONTROL).execute(&mut *connection).await?;
        }
        Use::Work => {
            // The guard sends its BEGIN and COMMIT as text. For sqlx a transaction is open all the time, so that what a
            // handler begins on its connection is a savepoint, and its commit cannot be the guard's. Forgetting the
            // borrowed transaction is what leaves sqlx's count at one.
            std::mem::forget(connection.begin().await?);
            sqlx::raw_sql(queries::ROLLBACK).execute(&mut *connection).await?;
        }
    }
    Ok(())
}

impl PgStore {
    async fn lend(&self, pool: &PgPool) -> Result<Lent<Postgres>, StoreError> {
        Lent::from(pool).await.map_err(|error| StoreError::from_sqlx("get a connection", error))
    }

    async fn begin_tx(&self) -> Result<PgTx, StoreError> {
        let mut tx = PgTx {
            lent: self.lend(&self.work).await?,
            savepoints: Savepoints::default(),
            breakdown: self.breakdown.clone(),
            call_timeout: self.options.call_timeout,
        };
        tx.send(queries::BEGIN.to_owned(), "begin a transaction").await?;
        Ok(tx)
    }

    /// Hands the result of statements without a transaction on. After a refusal the connection is as good as before; one
    /// that did not answer, or a server that cannot write now, is left.
    fn back<T>(&self, lent: Lent<Postgres>, result: Result<T, StoreError>) -> Result<T, StoreError> {
        if result.as_ref().err().is_none_or(|error| error.kind() != StoreErrorKind::Unavailable) {
            lent.give_back();
        }
        self.breakdown.noted(result)
    }
}

impl Store for PgStore {
    fn engine(&self) -> Engine {
        Engine::Postgres
    }

    fn migrate(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            let mut tx = self.begin_tx().await?;
            let mut tables = PgRows(&mut tx.lent.connection);
            let migrate = migrate::migrate(&mut tables, migrate::POSTGRES);
            match within(MIGRATE_TIMEOUT, "migrate the tables", migrate).await {
                Ok(()) => tx.commit().await,
                Err(error) => {
                    // Its locks would be in others' way until the server notices that the connection is gone.
                    if error.kind() != StoreErrorKind::Unavailable {
                        let _ = tx.rollback().await;
                    }
                    self.breakdown.noted(Err(error))
                }
            }
        }
        .boxed()
    }

    fn claim<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [ClaimRequest],
    ) -> BoxFuture<'a, Result<Vec<Answer>, StoreError>> {
        async move {
            let mut lent = self.lend(&self.work).await?;
            let claim =
                async { rows::claim(&mut PgRows(&mut lent.connection), terms, requests, ClaimAs::Processing).await };
            let result = within(self.options.call_timeout, "claim jobs", claim).await;
            self.back(lent, result)
        }
        .boxed()
    }

    fn renew<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        async move {
            let mut lent = self.lend(&self.control).await?;
            let renew = async { rows::renew(&mut PgRows(&mut lent.connection), terms, held).await };
            let result = within(self.options.call_timeout, "renew leases", renew).await;
            self.back(lent, result)
        }
        .boxed()
    }

    fn complete<'a>(
        &'a self,
        terms: &'a Terms,
        done: &'a [Completion],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        async move {
            let mut lent = self.lend(&self.work).await?;
            let complete = async { rows::complete(&mut PgRows(&mut lent.connection), terms, done).await };
            let result = within(self.options.call_timeout, "complete jobs", complete).await;
            self.back(lent, result)
        }
        .boxed()
    }

    fn fail<'a>(
        &'a self,
        terms: &'a Terms,
        failed: &'a [FailedTry],
    ) -> BoxFuture<'a, Result<Vec<FailureWritten>, StoreError>> {
        async move {
            let mut lent = self.lend(&self.work).await?;
            let fail = async { rows::fail(&mut PgRows(&mut lent.connection), terms, failed).await };
            let result = within(self.options.call_timeout, "mark jobs as failed", fail).await;
            self.back(lent, result)
        }
        .boxed()
    }

    fn release<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        async move {
            let mut lent = self.lend(&self.work).await?;
            let release = async { rows::release(&mut PgRows(&mut lent.connection), terms, held).await };
            let result = within(self.options.call_timeout, "release jobs", release).await;
            self.back(lent, result)
        }
        .boxed()
    }

    fn begin(&self) -> BoxFuture<'_, Result<Tx, StoreError>> {
        async move { Ok(Tx::new(self.begin_tx().await?)) }.boxed()
    }

    fn read<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        keys: &'a [EventKey],
    ) -> BoxFuture<'a, Result<Vec<State>, StoreError>> {
        async move {
            let mut lent = self.lend(&self.work).await?;
            let read = async { rows::read(&mut PgRows(&mut lent.connection), consumer, keys).await };
            let result = within(self.options.call_timeout, "read jobs", read).await;
            self.back(lent, result)
        }
        .boxed()
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

/// An open transaction. Its connection is given back only after a `COMMIT` or `ROLLBACK` that was answered.
struct PgTx {
    lent: Lent<Postgres>,
    savepoints: Savepoints,
    breakdown: Breakdown,
    call_timeout: Duration,
}

impl PgTx {
    /// Sends statements without parameters; several go in one message and end at the first that fails.
    async fn send(&mut self, text: String, what: &'static str) -> Result<(), StoreError> {
        let result = within(self.call_timeout, what, async {
            let sent = sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut *self.lent.connection).await;
            sent.map(|_| ()).map_err(|error| StoreError::from_sqlx(what, error))
        });
        let result = result.await;
        self.breakdown.noted(result)
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

impl StoreTx for PgTx {
    fn engine(&self) -> Engine {
        Engine::Postgres
    }

    fn claim<'a>(
        &'a mut self,
        terms: &'a Terms,
        requests: &'a [ClaimRequest],
    ) -> BoxFuture<'a, Result<Vec<Answer>, StoreError>> {
        async move {
            let claim = async {
                rows::claim(&mut PgRows(&mut self.lent.connection), terms, requests, ClaimAs::Completed).await
            };
            let result = within(self.call_timeout, "claim jobs", claim).await;
            self.breakdown.noted(result)
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
                    PgRows(&mut self.lent.connection).overwrite(terms, key, state, error).await?;
                }
                Ok(())
            };
            let result = within(self.call_timeout, "mark jobs as failed", overwrite).await;
            self.breakdown.noted(result)
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

async fn can_write(connection: &mut PgConnection) -> Result<(), StoreError> {
    let can_write: bool = sqlx::query_scalar(queries::CAN_WRITE)
        .fetch_one(connection)
        .await
        .map_err(|error| StoreError::from_sqlx("ping the server", error))?;
    if can_write {
        Ok(())
    } else {
        Err(StoreError::new(StoreErrorKind::Unavailable, "the server is read-only: a standby, or set so"))
    }
}

fn malformed(error: sqlx::Error) -> StoreError {
    let text = "the store's URL is malformed; expected postgres://user:password@host:port/database";
    StoreError::with_cause(StoreErrorKind::Configuration, text, error)
}

/// Says who was refused where, without the password.
fn refused(target: &PgConnectOptions, error: sqlx::Error) -> StoreError {
    let (user, host, port) = (target.get_username(), target.get_host(), target.get_port());
    let database = target.get_database().unwrap_or(user);
    StoreError::from_sqlx(format!("connect to database {database:?} at {host}:{port} as {user:?}"), error)
}
