//! The only reader of this process's clock.
//!
//! It measures how long something took here. What a lease or a retry time is compared with comes from the database
//! ([`Timestamp`]); only the in-memory store, which has no database, asks this clock for it.

use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::Timestamp;

/// Tells the time to the guard, so that tests can tell it another.
pub trait Clock: Send + Sync + 'static {
    /// A monotonic instant: for measuring, never for deciding between workers.
    fn monotonic(&self) -> Instant;
    /// What the in-memory store uses for a database clock.
    fn timestamp(&self) -> Timestamp;
}

/// The machine's clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "this is the one place that may")]
    fn monotonic(&self) -> Instant {
        Instant::now()
    }

    #[expect(clippy::disallowed_methods, reason = "this is the one place that may")]
    fn timestamp(&self) -> Timestamp {
        SystemTime::now().into()
    }
}

/// A clock that moves when it is told to.
#[derive(Debug)]
pub struct ManualClock {
    start: Instant,
    passed: Mutex<Duration>,
}

impl Default for ManualClock {
    fn default() -> Self {
        Self { start: SystemClock.monotonic(), passed: Mutex::default() }
    }
}

impl ManualClock {
    /// Lets `duration` pass.
    pub fn advance(&self, duration: Duration) {
        *self.passed.lock().expect("a clock's lock is never held across a panic") += duration;
    }

    fn passed(&self) -> Duration {
        *self.passed.lock().expect("a clock's lock is never held across a panic")
    }
}

impl Clock for ManualClock {
    fn monotonic(&self) -> Instant {
        self.start + self.passed()
    }

    fn timestamp(&self) -> Timestamp {
        Timestamp::from_micros(1_000_000_000_000_000).plus(self.passed())
    }
}
