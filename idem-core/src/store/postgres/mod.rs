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
use super::rows::{self, ClaimAs, Rows as _};
use super::server::{Breakdown, CLOSE_TIMEOUT, MIGRATE_TIMEOUT, Use, guard_pool};
use super::{
    Answer, ClaimRequest, Completion, Engine, FailedTry, FailureWritten, Fenced, JobConnection, LockRequest, Operated,
    Purge, Renewal, Returned, Statement, Store, StoreError, StoreErrorKind, StoreOptions, StoreTx, Terms, Tx, locks,
    migrate,
};
use crate::key::{ConsumerName, EventKey, LockName};
use crate::machine::{OperatorAction, State, Token};

/// The guard's rows in PostgreSQL 13 or later, in the first schema of the connection's `search_path`.
///
/// Connections keep settings for their session, so a pooler in between must pool sessions; one that pools transactions, such as
/// PgBouncer in its mode `transaction`, must be said with [`transaction_pooler`](StoreOptions::transaction_pooler).
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
        let target = if options.transaction_pooler {
            // Nor may the driver keep statements, and a pooler need not know this one setting of its.
            target.statement_cache_capacity(0).extra_float_digits(None)
        } else {
            target
        };
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
    let (pool, options) = (guard_pool(options, breakdown, used_for), *options);
    pool.after_connect(move |connection, _| Box::pin(prepare(connection, used_for, options)))
}

/// Makes a new connection the guard's.
async fn prepare(connection: &mut PgConnection, used_for: Use, options: StoreOptions) -> Result<(), sqlx::Error> {
    let milliseconds = |time: Duration| format!("{}ms", time.as_millis());
    if !options.transaction_pooler {
        sqlx::query(queries::SETTINGS)
            .bind(milliseconds(used_for.lock_timeout(&options)))
            .bind(milliseconds(options.idle_transaction_timeout))
            .execute(&mut *connection)
            .await?;
        if used_for == Use::Control {
            sqlx::raw_sql(queries::SETTINGS_OF_CONTROL).execute(&mut *connection).await?;
        }
    }
    if used_for == Use::Work || options.transaction_pooler {
        // The guard sends its BEGIN and COMMIT as text. For sqlx a transaction is open all the time, so that what a handler
        // begins on its connection is a savepoint, and its commit cannot be the guard's. Forgetting the borrowed transaction
        // is what leaves sqlx's count at one.
        std::mem::forget(connection.begin().await?);
        sqlx::raw_sql(queries::ROLLBACK).execute(&mut *connection).await?;
    }
    Ok(())
}

impl PgStore {
    async fn begin_tx(&self, used_for: Use) -> Result<PgTx, StoreError> {
        let pool = if used_for == Use::Work { &self.work } else { &self.control };
        let lent = Lent::from(pool).await.map_err(|error| StoreError::from_sqlx("get a connection", error))?;
        let mut tx = PgTx {
            lent,
            savepoints: Savepoints::default(),
            breakdown: self.breakdown.clone(),
            call_timeout: self.options.call_timeout,
            persistent: !self.options.transaction_pooler,
        };
        let mut begin = queries::BEGIN.to_owned();
        if self.options.transaction_pooler {
            let (lock_timeout, idle_timeout) =
                (used_for.lock_timeout(&self.options), self.options.idle_transaction_timeout);
            let settings = queries::settings_of_transaction(lock_timeout, idle_timeout, used_for == Use::Control);
            begin = format!("{begin}; {settings}");
        }
        tx.send(begin, "begin a transaction").await?;
        Ok(tx)
    }

    /// Does what needs no transaction, each statement being its own. Behind a pooler it needs one, to have one session.
    async fn on<T>(
        &self,
        used_for: Use,
        what: &'static str,
        call: impl AsyncFnOnce(PgRows<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        if self.options.transaction_pooler {
            let mut tx = self.begin_tx(used_for).await?;
            let result = within(self.options.call_timeout, what, call(tx.rows())).await;
            return match self.breakdown.noted(result) {
                Ok(done) => tx.commit().await.map(|()| done),
                Err(error) => {
                    // Its locks would be in others' way until the server notices that the connection is gone.
                    if error.kind() != StoreErrorKind::Unavailable {
                        let _ = tx.rollback().await;
                    }
                    Err(error)
                }
            };
        }
        let pool = if used_for == Use::Work { &self.work } else { &self.control };
        let mut lent = Lent::from(pool).await.map_err(|error| StoreError::from_sqlx("get a connection", error))?;
        let result = within(self.options.call_timeout, what, call(PgRows::new(&mut lent.connection, true))).await;
        // After a refusal the connection is as good as before; one that did not answer, or a server that cannot write now, is
        // left.
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
            let mut tx = self.begin_tx(Use::Work).await?;
            let mut tables = tx.rows();
            let anew = if self.options.partitioned { migrate::PARTITIONED } else { migrate::PLAIN };
            let migrate = migrate::migrate(&mut tables, migrate::POSTGRES, anew);
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
        self.on(Use::Work, "claim jobs", async move |mut rows| {
            rows::claim(&mut rows, terms, requests, ClaimAs::Processing).await
        })
        .boxed()
    }

    fn renew<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Renewal>, StoreError>> {
        self.on(Use::Control, "renew leases", async move |mut rows| rows::renew(&mut rows, terms, held).await).boxed()
    }

    fn complete<'a>(
        &'a self,
        terms: &'a Terms,
        done: &'a [Completion],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        self.on(Use::Work, "complete jobs", async move |mut rows| rows::complete(&mut rows, terms, done).await).boxed()
    }

    fn fail<'a>(
        &'a self,
        terms: &'a Terms,
        failed: &'a [FailedTry],
    ) -> BoxFuture<'a, Result<Vec<FailureWritten>, StoreError>> {
        self.on(Use::Work, "mark jobs as failed", async move |mut rows| rows::fail(&mut rows, terms, failed).await)
            .boxed()
    }

    fn release<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        self.on(Use::Work, "release jobs", async move |mut rows| rows::release(&mut rows, terms, held).await).boxed()
    }

    fn begin(&self) -> BoxFuture<'_, Result<Tx, StoreError>> {
        async move { Ok(Tx::new(self.begin_tx(Use::Work).await?)) }.boxed()
    }

    fn lock<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [LockRequest],
    ) -> BoxFuture<'a, Result<Vec<bool>, StoreError>> {
        self.on(Use::Work, "take locks", async move |mut rows| locks::take(&mut rows, terms, requests).await).boxed()
    }

    fn extend_locks<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [LockRequest],
    ) -> BoxFuture<'a, Result<Vec<Renewal>, StoreError>> {
        let extend = async move |mut rows: PgRows<'_>| locks::extend(&mut rows, terms, requests).await;
        self.on(Use::Control, "extend locks", extend).boxed()
    }

    fn unlock<'a>(&'a self, requests: &'a [LockRequest]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.on(Use::Work, "free locks", async move |mut rows| locks::free(&mut rows, requests).await).boxed()
    }

    fn make_locks<'a>(&'a self, names: &'a [LockName]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.on(Use::Work, "make locks", async move |mut rows| locks::make(&mut rows, names).await).boxed()
    }

    fn read<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        keys: &'a [EventKey],
    ) -> BoxFuture<'a, Result<Vec<State>, StoreError>> {
        self.on(Use::Work, "read jobs", async move |mut rows| rows::read(&mut rows, consumer, keys).await).boxed()
    }

    fn result<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        key: &'a EventKey,
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        self.on(Use::Work, "read what a job returned", async move |mut rows| rows.result(consumer, key).await).boxed()
    }

    fn count_duplicates<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        counts: &'a [(EventKey, u64)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let count = async move |mut rows: PgRows<'_>| rows::count_duplicates(&mut rows, consumer, counts).await;
        self.on(Use::Control, "count duplicates", count).boxed()
    }

    fn operate<'a>(
        &'a self,
        terms: &'a Terms,
        key: &'a EventKey,
        action: OperatorAction,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<Operated, StoreError>> {
        let operate = async move |mut rows: PgRows<'_>| rows::operate(&mut rows, terms, key, action, reason).await;
        self.on(Use::Work, "change a job for an operator", operate).boxed()
    }

    fn purge<'a>(&'a self, purge: &'a Purge) -> BoxFuture<'a, Result<u64, StoreError>> {
        self.on(Use::Control, "purge jobs", async move |mut rows| rows.purge(purge).await).boxed()
    }

    fn check_schema(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        let check = async move |mut rows: PgRows<'_>| migrate::check(&mut rows, migrate::POSTGRES).await;
        self.on(Use::Work, "check the tables", check).boxed()
    }

    fn ping(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        let ping = async move |mut rows: PgRows<'_>| match rows.can_write().await? {
            true => Ok(()),
            false => Err(StoreError::new(StoreErrorKind::Unavailable, "the server is read-only: a standby, or set so")),
        };
        self.on(Use::Control, "ping the server", ping).boxed()
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

impl super::tx::sealed::Sealed for PgConnection {}

impl JobConnection for PgConnection {
    fn complete<'a>(&'a mut self, terms: &'a Terms, done: &'a Completion) -> BoxFuture<'a, Result<Fenced, StoreError>> {
        async move { rows::complete_once(&mut PgRows::new(self, false), terms, done).await }.boxed()
    }
}

/// An open transaction. Its connection is given back only after a `COMMIT` or `ROLLBACK` that was answered.
struct PgTx {
    lent: Lent<Postgres>,
    savepoints: Savepoints,
    breakdown: Breakdown,
    call_timeout: Duration,
    /// See [`PgRows`].
    persistent: bool,
}

impl PgTx {
    fn rows(&mut self) -> PgRows<'_> {
        PgRows::new(&mut self.lent.connection, self.persistent)
    }

    /// Does something to rows inside the transaction.
    async fn on<T>(
        &mut self,
        what: &'static str,
        call: impl AsyncFnOnce(PgRows<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let result = within(self.call_timeout, what, call(self.rows())).await;
        self.breakdown.noted(result)
    }

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
        let claim = async move |mut rows: PgRows<'_>| rows::claim(&mut rows, terms, requests, ClaimAs::Completed).await;
        self.on("claim jobs", claim).boxed()
    }

    fn overwrite<'a>(
        &'a mut self,
        terms: &'a Terms,
        rows: &'a [(EventKey, State, String)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let overwrite = async move |mut guard: PgRows<'_>| {
            for (key, state, error) in rows {
                guard.overwrite(terms, key, state, error).await?;
            }
            Ok(())
        };
        self.on("mark jobs as failed", overwrite).boxed()
    }

    fn lock<'a>(&'a mut self, names: &'a [LockName]) -> BoxFuture<'a, Result<Vec<bool>, StoreError>> {
        self.on("hold locks", async move |mut rows| locks::hold(&mut rows, names).await).boxed()
    }

    fn keep_results<'a>(
        &'a mut self,
        consumer: &'a ConsumerName,
        results: &'a [(EventKey, Returned)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let keep = async move |mut rows: PgRows<'_>| rows.keep_results(consumer, results).await;
        self.on("keep what jobs returned", keep).boxed()
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
            let query = bound!(sqlx::query(statement.text).persistent(self.persistent), statement.values);
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
