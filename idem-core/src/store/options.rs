//! How a store is opened: by URL, with limits.

use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "mysql")]
use super::mysql::MysqlStore;
#[cfg(feature = "postgres")]
use super::postgres::PgStore;
#[cfg(feature = "sqlite")]
use super::sqlite::SqliteStore;
use super::{MemoryStore, Store, StoreError, StoreErrorKind};

/// Limits of a store's connections. Every call of a store ends within the sum of [`acquire_timeout`](Self::acquire_timeout)
/// and [`call_timeout`](Self::call_timeout), also when the server hangs.
///
/// ```
/// use std::time::Duration;
/// use idem_core::store::StoreOptions;
///
/// let options = StoreOptions::default().max_connections(20).lock_timeout(Duration::from_secs(3));
/// assert_eq!(options.max_connections, 20);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreOptions {
    /// PostgreSQL and MySQL: how many connections claims and handlers share; two more are kept for renewals, which handlers must not
    /// starve. Default 10. An atomic handler occupies one for as long as it runs, so this bounds how many run at once.
    /// SQLite has one writer whatever this says.
    pub max_connections: u32,
    /// How long to wait for a free or a new connection. Default 5 s: longer than a server needs to restart a connection,
    /// short enough to notice an outage.
    pub acquire_timeout: Duration,
    /// How long one call may wait for the server before its connection is given up and closed. Default 15 s: above
    /// `lock_timeout`, so that a server which lives speaks first.
    pub call_timeout: Duration,
    /// How long one statement may wait for another transaction's lock. Default 10 s. It holds for the statements of atomic
    /// handlers too, which can set their own on PostgreSQL with `SET LOCAL lock_timeout`. MySQL counts whole seconds, so
    /// there it is rounded up.
    pub lock_timeout: Duration,
    /// PostgreSQL and MySQL: how long the transaction of an atomic handler may wait for its worker's next statement before the server
    /// rolls it back. Default 15 min: a frozen worker must not keep its keys for ever. Keep it above every handler's
    /// `max_run` (default 5 min), or the server ends a handler's transaction before its own time is up.
    pub idle_transaction_timeout: Duration,
    /// PostgreSQL: whether the table is made in 16 parts, by a hash of the key, when it is made anew. Default no. For tens of
    /// millions of rows: indexes and vacuum stay small. A table that is there stays as it is.
    pub partitioned: bool,
    /// PostgreSQL: whether there is a pooler in between that lends a session for one transaction only, such as PgBouncer in
    /// its mode `transaction`. Default no. Then each call is a transaction of its own, which carries its settings, and no
    /// statement is kept by the server: expect half the rate. Handlers on a `PgConnection` must not keep statements either
    /// (`.persistent(false)`), unless the pooler follows them, as PgBouncer does from 1.21 on with
    /// `max_prepared_statements`; [`Tx::execute`](super::Tx::execute) sees to it.
    pub transaction_pooler: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            max_connections: 10,
            acquire_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(15),
            lock_timeout: Duration::from_secs(10),
            idle_transaction_timeout: Duration::from_secs(900),
            partitioned: false,
            transaction_pooler: false,
        }
    }
}

impl StoreOptions {
    /// Sets how many connections claims and handlers share.
    pub fn max_connections(mut self, max_connections: u32) -> Self {
        self.max_connections = max_connections;
        self
    }

    /// Sets how long to wait for a connection.
    pub fn acquire_timeout(mut self, acquire_timeout: Duration) -> Self {
        self.acquire_timeout = acquire_timeout;
        self
    }

    /// Sets how long one call may wait for the server.
    pub fn call_timeout(mut self, call_timeout: Duration) -> Self {
        self.call_timeout = call_timeout;
        self
    }

    /// Sets how long one statement may wait for a lock.
    pub fn lock_timeout(mut self, lock_timeout: Duration) -> Self {
        self.lock_timeout = lock_timeout;
        self
    }

    /// Sets how long a handler's transaction may be idle.
    pub fn idle_transaction_timeout(mut self, idle_transaction_timeout: Duration) -> Self {
        self.idle_transaction_timeout = idle_transaction_timeout;
        self
    }

    /// Sets whether a new table is made in parts.
    pub fn partitioned(mut self, partitioned: bool) -> Self {
        self.partitioned = partitioned;
        self
    }

    /// Sets whether a pooler lends sessions for one transaction only.
    pub fn transaction_pooler(mut self, transaction_pooler: bool) -> Self {
        self.transaction_pooler = transaction_pooler;
        self
    }

    /// All clashes at once, each naming its settings.
    #[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let mut clashes = Vec::new();
        if self.max_connections == 0 {
            clashes.push("max_connections is 0: nothing could be claimed".to_owned());
        }
        let times = [
            ("acquire_timeout", self.acquire_timeout),
            ("call_timeout", self.call_timeout),
            ("lock_timeout", self.lock_timeout),
            ("idle_transaction_timeout", self.idle_transaction_timeout),
        ];
        for (name, time) in times {
            if time < Duration::from_millis(1) || time > Duration::from_secs(24 * 3600) {
                clashes.push(format!("{name} {time:?} is not between 1ms and a day"));
            }
        }
        if self.lock_timeout >= self.call_timeout {
            clashes.push(format!(
                "lock_timeout {:?} is not below call_timeout {:?}: waits for locks would look like a dead server",
                self.lock_timeout, self.call_timeout
            ));
        }
        if clashes.is_empty() {
            Ok(())
        } else {
            Err(StoreError::new(StoreErrorKind::Configuration, clashes.join("; ")))
        }
    }
}

/// Opens the store that `url` names:
///
/// - `postgres://user:password@host/database` or `postgresql://…`, with the feature `postgres`
/// - `mysql://user:password@host/database` or `mariadb://…`, with the feature `mysql`
/// - `sqlite:path/to/file` or `sqlite://path/to/file`, with the feature `sqlite`; the file is made if it is missing
/// - `memory:`, gone with the process
///
/// The tables are not touched: [`Store::migrate`] makes them.
///
/// ```
/// use idem_core::store::{connect, Engine, StoreOptions};
///
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let store = connect("memory:", &StoreOptions::default()).await?;
/// assert_eq!(store.engine(), Engine::Memory);
/// # Ok::<(), idem_core::store::StoreError>(())
/// # }).unwrap();
/// ```
///
/// # Errors
/// [`StoreErrorKind::Configuration`] if the URL is malformed or its scheme unknown or not compiled in, if the options
/// clash, if the password is refused, or if the database or path cannot be used; [`StoreErrorKind::Unavailable`] if the
/// server does not answer. No error shows the password.
///
/// # Cancel safety
/// Dropping the future leaves nothing behind but perhaps an empty SQLite file.
pub async fn connect(url: &str, options: &StoreOptions) -> Result<Arc<dyn Store>, StoreError> {
    let (scheme, _) = url.split_once(':').ok_or_else(|| unknown(url))?;
    match scheme {
        "memory" => Ok(Arc::new(MemoryStore::default())),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Ok(Arc::new(PgStore::connect(url, options).await?)),
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => Ok(Arc::new(MysqlStore::connect(url, options).await?)),
        #[cfg(feature = "sqlite")]
        "sqlite" => Ok(Arc::new(SqliteStore::connect(url, options).await?)),
        #[cfg(not(feature = "postgres"))]
        "postgres" | "postgresql" => Err(not_compiled_in(scheme, "postgres", options)),
        #[cfg(not(feature = "mysql"))]
        "mysql" | "mariadb" => Err(not_compiled_in(scheme, "mysql", options)),
        #[cfg(not(feature = "sqlite"))]
        "sqlite" => Err(not_compiled_in(scheme, "sqlite", options)),
        _ => Err(unknown(scheme)),
    }
}

/// The text may be a password that was put in the wrong place, so only a short scheme is shown.
fn unknown(scheme: &str) -> StoreError {
    let shown = scheme.len() <= 20 && scheme.chars().all(|c| c.is_ascii_alphanumeric() || c == '+');
    let what = if shown { format!("`{scheme}:` is not") } else { "the store's URL does not begin with".to_owned() };
    let text = format!("{what} a kind of store that idem knows; use postgres://…, mysql://…, sqlite:… or memory:");
    StoreError::new(StoreErrorKind::Configuration, text)
}

#[cfg(not(all(feature = "postgres", feature = "mysql", feature = "sqlite")))]
fn not_compiled_in(scheme: &str, feature: &str, _: &StoreOptions) -> StoreError {
    let text = format!("a `{scheme}:` store needs idem-core's feature `{feature}`, which is not compiled in");
    StoreError::new(StoreErrorKind::Configuration, text)
}
