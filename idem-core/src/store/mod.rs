//! Where the rows are: the contract that every store keeps.
//!
//! A store decides nothing. It reads rows, asks [`machine::step`](crate::machine::step), and writes the answer *only if
//! the row is still the one it read*. The unique pair of consumer and key is what lets one of several workers win (S3).

mod error;
pub(crate) mod locks;
mod memory;
mod options;
mod tx;

#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
mod lent;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
mod migrate;
#[cfg(feature = "mysql")]
pub mod mysql;
#[cfg(feature = "postgres")]
pub mod postgres;
pub mod retention;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
mod row_text;
pub(crate) mod rows;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod server;
#[cfg(feature = "sqlite")]
pub mod sqlite;

#[cfg(feature = "test-util")]
pub mod contract;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::Fingerprint;
use crate::key::{ConsumerName, EventKey, LockName};
use crate::machine::{Decision, FailureCause, IllegalStep, OperatorAction, State, Token};
use crate::timestamp::Timestamp;

pub use error::{StoreError, StoreErrorKind, unique_violation};
pub use locks::LockRequest;
pub use memory::MemoryStore;
#[cfg(feature = "mysql")]
pub use mysql::MysqlStore;
pub use options::{StoreOptions, connect};
#[cfg(feature = "postgres")]
pub use postgres::PgStore;
#[cfg(feature = "sqlite")]
pub use sqlite::SqliteStore;
pub use tx::{JobConnection, Statement, StoreTx, Tx, Value, WrongEngine, sql};

/// The engines that idem can keep its rows in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Engine {
    /// PostgreSQL, the reference.
    Postgres,
    /// MariaDB and MySQL.
    Mysql,
    /// SQLite, the embedded default.
    Sqlite,
    /// This process's memory: for documentation, models and tests. Gone when the process is.
    Memory,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Engine::Postgres => "PostgreSQL",
            Engine::Mysql => "MySQL",
            Engine::Sqlite => "SQLite",
            Engine::Memory => "in-memory",
        })
    }
}

/// On whose behalf rows are claimed, and on which terms.
#[derive(Clone, Debug)]
pub struct Terms {
    /// The consumer (K3).
    pub consumer: ConsumerName,
    /// How long a claim holds (L1).
    pub lease: Duration,
    /// How often a job may be tried.
    pub max_attempts: u32,
    /// The instance that claims. Shown to people; never compared.
    pub owner: Arc<str>,
}

/// One message asks for a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRequest {
    /// The job's key.
    pub key: EventKey,
    /// Names this claim: new for each, the same only when a claim is asked again because its reply was lost.
    pub token: Token,
    /// What the message says.
    pub payload: Option<Fingerprint>,
    /// Names the delivery. Kept of the delivery that made the row, so that later ones can be told from it.
    pub message_id: Arc<str>,
}

/// The answer to a [`ClaimRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What to do.
    pub decision: Decision,
    /// The row after the claim. For [`Decision::Run`] always `PROCESSING`, although a transaction's claim stores it as
    /// completed at once.
    pub state: State,
    /// The database's clock when it was decided.
    pub now: Timestamp,
    /// Which delivery made the row; nothing for a row that this claim made.
    pub first_message_id: Option<String>,
    /// The last error of the job, for [`Decision::Exhausted`].
    pub error: Option<String>,
}

/// A holder says that its effect is done. Everything that the row needs is in it, in case the row is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The claim's request.
    pub request: ClaimRequest,
    /// The claim's attempt.
    pub attempt: u32,
    /// The claim's fence.
    pub fence: i64,
    /// What the handler returned.
    pub returned: Returned,
}

/// What a handler returned, as far as its row keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Returned {
    /// The value as JSON; nothing if the handler returned none, or more than
    /// [`MAX_RESULT_BYTES`](crate::MAX_RESULT_BYTES).
    pub value: Option<Arc<[u8]>>,
    /// A digest of the whole value, also of one that is too long to keep.
    pub hash: Option<String>,
}

impl Returned {
    /// Whether there is nothing to keep.
    pub fn is_nothing(&self) -> bool {
        self.value.is_none() && self.hash.is_none()
    }
}

/// A holder says that its try failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedTry {
    /// The job's key.
    pub key: EventKey,
    /// The claim's token.
    pub token: Token,
    /// Whether trying again is of use, and after which wait, counted from the database's clock at the write.
    pub retry: Retry,
    /// The error, for people. At most [`MAX_ERROR_BYTES`](crate::MAX_ERROR_BYTES).
    pub error: String,
}

/// Whether and when a failed job is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// After this wait, if it has tries left.
    After(Duration),
    /// Never.
    Never,
}

impl Retry {
    /// The same for the state machine, which knows instants only.
    pub fn cause(self, now: Timestamp) -> FailureCause {
        match self {
            Retry::After(wait) => FailureCause::Transient { retry_at: now.plus(wait) },
            Retry::Never => FailureCause::Terminal,
        }
    }
}

/// What became of a lease that was to be extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Renewal {
    /// It counts anew from the database's clock.
    Renewed,
    /// The holder no longer has the job.
    LeaseLost,
    /// Another transaction keeps the row locked, so it was not extended, and nobody else can take it over meanwhile. The
    /// lease is what it was.
    Unconfirmed,
}

/// The answer to an operator's action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operated {
    /// The row before.
    pub before: State,
    /// The row now; the same if the action was refused.
    pub after: State,
    /// Why nothing was written.
    pub refused: Option<Refusal>,
}

/// Why an operator's action was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A worker holds the job.
    #[error("a worker holds the job, and its lease is alive")]
    LeaseAlive {
        /// When its lease ends unless it is renewed; the database's clock.
        until: Timestamp,
    },
    /// The action makes no sense in this state.
    #[error(transparent)]
    Illegal(#[from] IllegalStep),
}

/// Which rows a purge removes, see [`Store::purge`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Purge {
    /// Of this consumer; of all if there is none.
    pub consumer: Option<ConsumerName>,
    /// Rows that ended at least this long ago, by the database's clock.
    pub older_than: Duration,
    /// At most so many.
    pub most: u32,
}

/// The answer to a write that is fenced by the claim's token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fenced {
    /// It stands.
    Applied,
    /// The writer no longer holds the job: it must claim neither success nor failure.
    LeaseLost,
}

/// The answer to a [`FailedTry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureWritten {
    /// Whether it stands.
    pub fenced: Fenced,
    /// The row after it: says whether and when the job is tried again.
    pub state: State,
    /// The database's clock.
    pub now: Timestamp,
}

/// Where the rows are.
///
/// # Contract
/// Every store passes the suite in `store/contract.rs`, which compares it with [`machine::step`](crate::machine::step).
///
/// - **Unique.** At most one row for a consumer and key, compared byte by byte; whoever inserts it first has the claim (S3).
/// - **Fenced.** [`complete`](Self::complete), [`fail`](Self::fail), [`renew`](Self::renew) and [`release`](Self::release)
///   change a row only while its token is the holder's; otherwise the answer is [`Fenced::LeaseLost`] and the row stays.
/// - **Durable.** What a method answered is on disk (as far as the engine promises) before it answers, except inside a
///   transaction, where it is with the commit. A worker that dies between two calls leaves the row as the last answer said;
///   one that dies during a call leaves it as before or as after, never in between.
/// - **Database time.** Every instant is read from the database's clock when the decision is taken, after any wait for a lock.
/// - **Batches.** Answers come in the order of the requests. Rows are locked in the order of their keys' bytes, so that
///   batches do not deadlock with each other. A key may occur twice: the second is told that the first is in progress.
/// - **Isolation.** Statements see what was committed before they began (READ COMMITTED); a caller's own isolation default
///   does not change this.
/// - **Bounded.** Every call ends in bounded time, also when the server hangs or another transaction keeps a lock.
///
/// # Errors
/// Every method: [`StoreErrorKind::Unavailable`] if the store did not answer (each row is as before or as after; ask again
/// with the same tokens), [`StoreErrorKind::Contention`] if the engine broke off a deadlock or a wait (rows of the batch
/// that came before it may be as after; ask again likewise), [`StoreErrorKind::Schema`] if the tables are not there, and
/// [`StoreErrorKind::Broken`] if the statement cannot work.
///
/// # Cancel safety
/// Dropping any of these futures leaves no open transaction behind. The row is as before or as after; ask again with the
/// same token.
pub trait Store: Send + Sync + 'static {
    /// Which engine this is.
    fn engine(&self) -> Engine;

    /// Brings the tables to this version. Safe when several processes do it at once; touches nothing but idem's own tables.
    ///
    /// # Errors
    /// As above, and [`StoreErrorKind::Schema`] if the tables are of a newer version: nothing is changed.
    fn migrate(&self) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Asks for the jobs, each on its own: claimed rows are `PROCESSING` and committed when this answers.
    ///
    /// A key that an open transaction has claimed or completed is waited for, as long as the store waits for locks. A row that
    /// another transaction has only locked is not: the answer is [`Decision::InProgress`] with an instant at which to come
    /// back.
    fn claim<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [ClaimRequest],
    ) -> BoxFuture<'a, Result<Vec<Answer>, StoreError>>;

    /// Extends the leases of `held` to `terms.lease` from now. Runs on a connection that no handler can occupy (L2).
    ///
    /// A row that another transaction keeps locked is answered as [`Renewal::Unconfirmed`] after a moment; the others are
    /// extended all the same.
    fn renew<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Renewal>, StoreError>>;

    /// Marks jobs as completed. A row that is gone is written anew as completed.
    fn complete<'a>(
        &'a self,
        terms: &'a Terms,
        done: &'a [Completion],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>>;

    /// Marks tries as failed.
    fn fail<'a>(
        &'a self,
        terms: &'a Terms,
        failed: &'a [FailedTry],
    ) -> BoxFuture<'a, Result<Vec<FailureWritten>, StoreError>>;

    /// Gives back jobs, and the try that their claim counted: those whose handler has not begun, and those whose handler was
    /// dropped because the store was away. The next claim of such a job is a retry.
    fn release<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>>;

    /// Begins the transaction of an atomic handler.
    fn begin(&self) -> BoxFuture<'_, Result<Tx, StoreError>>;

    /// Takes the locks of jobs whose effect is elsewhere, for `terms.lease` from now (L5), before the jobs are claimed with the
    /// same tokens; answers which are held. Waits for nobody: a lock that is held is answered as not taken. Of several
    /// requests for one lock the first may get it. Asked again with the same token, a lock that is held is held anew.
    fn lock<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [LockRequest],
    ) -> BoxFuture<'a, Result<Vec<bool>, StoreError>>;

    /// Extends locks to `terms.lease` from now, on a connection that no handler can occupy. One that is not held any more is
    /// answered as [`Renewal::Unconfirmed`]: it was not extended.
    fn extend_locks<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [LockRequest],
    ) -> BoxFuture<'a, Result<Vec<Renewal>, StoreError>>;

    /// Frees locks that are held under their request's token. Those of others stay.
    fn unlock<'a>(&'a self, requests: &'a [LockRequest]) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Makes sure that the rows of locks are there, before a transaction holds them: made inside of it, they would keep
    /// everybody else waiting.
    fn make_locks<'a>(&'a self, names: &'a [LockName]) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Reads rows as they are; [`State::Absent`] for those that are not there.
    fn read<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        keys: &'a [EventKey],
    ) -> BoxFuture<'a, Result<Vec<State>, StoreError>>;

    /// What the handler of a completed job returned; nothing if the job is not completed, or nothing was kept.
    fn result<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        key: &'a EventKey,
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>>;

    /// Adds to the counts of duplicates on their rows, and notes when. Rows that are gone or locked are left out: the counts
    /// are for people.
    fn count_duplicates<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        counts: &'a [(EventKey, u64)],
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    /// A person intervenes: fenced like a worker's write, and refused while a lease is alive.
    ///
    /// `reason` becomes the row's error if the job is failed by it.
    fn operate<'a>(
        &'a self,
        terms: &'a Terms,
        key: &'a EventKey,
        action: OperatorAction,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<Operated, StoreError>>;

    /// Removes rows that ended long ago: completed ones, and failed ones that are not tried again. Never a job that is
    /// held, waits for its next try or has not begun. One small batch in one transaction; answers how many it was. Rows that
    /// others have locked are left for the next one. When no more of any consumer's are left, rows of locks go that were free
    /// for as long; they are not counted. [`retention`] decides what is safe to remove, and repeats this.
    fn purge<'a>(&'a self, purge: &'a Purge) -> BoxFuture<'a, Result<u64, StoreError>>;

    /// Whether the tables are those of this version and can be relied on. Changes nothing, so that a program whose database
    /// user may not make tables can start.
    ///
    /// # Errors
    /// As above; [`StoreErrorKind::Schema`] with a sentence on what to do.
    fn check_schema(&self) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Whether the store answers and can be written to.
    fn ping(&self) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Closes all connections. Later calls fail.
    fn close(&self) -> BoxFuture<'_, ()>;
}
