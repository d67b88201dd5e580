//! A connection on loan, and what a transaction on it needs in any engine.

use std::future::Future;
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::{Database, Pool};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::{StoreError, StoreErrorKind, rows};

/// How long a connection that is given back may take to show that it lives; else it is closed, which costs a new one.
const RETURN_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection that is closed when it is dropped, unless its call came to its end: what a call leaves half done must not
/// be the next one's, and the database rolls back when the connection is gone.
pub(super) struct Lent<DB: Database> {
    pub connection: PoolConnection<DB>,
    finished: bool,
}

impl<DB: Database> Lent<DB> {
    pub(super) async fn from(pool: &Pool<DB>) -> Result<Self, sqlx::Error> {
        Ok(Self { connection: pool.acquire().await?, finished: false })
    }

    /// No transaction is open, and no answer is awaited: the connection may be used again.
    pub(super) fn give_back(mut self) {
        self.finished = true;
    }
}

impl<DB: Database> Drop for Lent<DB> {
    fn drop(&mut self) {
        if !self.finished {
            self.connection.close_on_drop();
        } else if let Ok(runtime) = Handle::try_current() {
            // Before the pool takes a connection back it waits for a sign of life, and for ever: where the network swallows
            // it, the connection's place would be gone for good, and after a few of them the store with it.
            drop(runtime.spawn(timeout(RETURN_TIMEOUT, self.connection.return_to_pool())));
        }
    }
}

/// Ends `call` after `limit`; the connection that it used is not to be given back then.
pub(super) async fn within<T>(
    limit: Duration,
    what: &str,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let late = || StoreError::new(StoreErrorKind::Unavailable, format!("{what}: no answer within {limit:?}"));
    timeout(limit, call).await.unwrap_or_else(|_| Err(late()))
}

/// Binds the values of a [`Statement`](super::Statement) to a query of any engine's driver.
macro_rules! bound {
    ($query:expr, $values:expr) => {{
        let mut query = $query;
        for value in $values {
            query = match value {
                $crate::store::Value::Null => query.bind(None::<String>),
                $crate::store::Value::Bool(value) => query.bind(value),
                $crate::store::Value::Int(value) => query.bind(value),
                $crate::store::Value::Float(value) => query.bind(value),
                $crate::store::Value::Text(value) => query.bind(value),
                $crate::store::Value::Bytes(value) => query.bind(value),
            };
        }
        query
    }};
}
pub(super) use bound;

/// The guard's savepoints, which are numbered from the outermost. Their statements are the same in every engine.
#[derive(Debug, Default)]
pub(super) struct Savepoints(usize);

impl Savepoints {
    /// Sets one more.
    pub(super) fn set(&self) -> String {
        format!("SAVEPOINT idem_{}", self.0 + 1)
    }

    /// Undoes everything since the innermost, and removes it.
    pub(super) fn roll_back(&self) -> Result<String, StoreError> {
        let name = self.innermost()?;
        Ok(format!("ROLLBACK TO SAVEPOINT {name}; RELEASE SAVEPOINT {name}"))
    }

    /// Removes the innermost and keeps what was done.
    pub(super) fn release(&self) -> Result<String, StoreError> {
        Ok(format!("RELEASE SAVEPOINT {}", self.innermost()?))
    }

    /// One more is set.
    pub(super) fn is_set(&mut self) {
        self.0 += 1;
    }

    /// The innermost is removed.
    pub(super) fn is_removed(&mut self) {
        self.0 -= 1;
    }

    fn innermost(&self) -> Result<String, StoreError> {
        match self.0 {
            0 => Err(rows::no_savepoint()),
            depth => Ok(format!("idem_{depth}")),
        }
    }
}
