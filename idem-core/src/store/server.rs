//! Connections to a database server, as far as they are the same whichever server it is.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::pool::PoolOptions;
use sqlx::{Connection, Database};
use tokio::time::{Instant, timeout};

use super::{StoreError, StoreErrorKind, StoreOptions};
use crate::clock::{Clock, SystemClock};

/// Connections that only renewals and the health check use, so that no number of busy handlers can hold them up (L2).
const CONTROL_CONNECTIONS: u32 = 2;
/// How long a renewal waits at most for another transaction's lock.
const CONTROL_LOCK_TIMEOUT: Duration = Duration::from_secs(1);
/// A connection that was idle for longer is tried before it is used.
const TRUSTED_IDLE: Duration = Duration::from_secs(1);
/// How long the tables' migration may take, which another process may be doing.
pub(super) const MIGRATE_TIMEOUT: Duration = Duration::from_secs(120);
/// How long [`Store::close`](super::Store::close) waits for connections that are in use.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// When a connection last broke off. Those that have not been used since are tried first: a server that restarts breaks all
/// of them, and each would cost somebody a failed call.
#[derive(Clone, Debug, Default)]
pub(super) struct Breakdown(Arc<Mutex<Option<Instant>>>);

impl Breakdown {
    /// Hands a result on and remembers if it is one.
    pub(super) fn noted<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        if result.as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Unavailable) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(SystemClock.monotonic());
        }
        result
    }

    fn was_within(&self, time: Duration) -> bool {
        let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.is_some_and(|last| SystemClock.monotonic().saturating_duration_since(last) <= time)
    }
}

/// What a pool of the guard's is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// Claims, completions and the transactions of handlers.
    Work,
    /// Renewals and the health check.
    Control,
}

impl Use {
    pub(super) fn lock_timeout(self, options: &StoreOptions) -> Duration {
        match self {
            Use::Work => options.lock_timeout,
            Use::Control => options.lock_timeout.min(CONTROL_LOCK_TIMEOUT),
        }
    }
}

/// A pool of the guard's, but for what makes a new connection the guard's.
pub(super) fn guard_pool<DB: Database>(
    options: &StoreOptions,
    breakdown: &Breakdown,
    used_for: Use,
) -> PoolOptions<DB> {
    let connections = match used_for {
        Use::Work => options.max_connections,
        Use::Control => CONTROL_CONNECTIONS,
    };
    let breakdown = breakdown.clone();
    // Leaves most of the time for opening another one.
    let sign_of_life = options.acquire_timeout / 4;
    PoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(options.acquire_timeout)
        // It costs every call a round trip; the callback does it only where it is of use.
        .test_before_acquire(false)
        .before_acquire(move |connection: &mut DB::Connection, meta| {
            let doubtful = meta.idle_for > TRUSTED_IDLE || breakdown.was_within(meta.idle_for);
            Box::pin(async move {
                if doubtful {
                    // One that the network lost in silence neither answers nor breaks off.
                    timeout(sign_of_life, connection.ping()).await.map_err(|_| sqlx::Error::PoolTimedOut)??;
                }
                Ok(true)
            })
        })
}
