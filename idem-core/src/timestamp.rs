//! An instant as the database tells it.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// An instant of the *database's* clock, in microseconds since the Unix epoch.
///
/// Leases and retry times are compared with this and with nothing else, so that the clocks of the workers never decide
/// who holds a job (L4).
///
/// ```
/// use std::time::Duration;
/// use idem_core::Timestamp;
///
/// let claimed = Timestamp::from_micros(1_000_000);
/// let locked_until = claimed.plus(Duration::from_secs(30));
/// assert_eq!(locked_until.since(claimed), Duration::from_secs(30));
/// assert_eq!(claimed.since(locked_until), Duration::ZERO);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    /// The Unix epoch.
    pub const EPOCH: Timestamp = Timestamp(0);

    /// From microseconds since the Unix epoch; negative before it.
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    pub const fn as_micros(self) -> i64 {
        self.0
    }

    /// This instant and `duration` more; the last representable instant if that is too far away.
    pub fn plus(self, duration: Duration) -> Self {
        let micros = i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        Self(self.0.saturating_add(micros))
    }

    /// How long after `earlier` this is; zero if it is not after it.
    pub fn since(self, earlier: Timestamp) -> Duration {
        Duration::from_micros(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        match time.duration_since(UNIX_EPOCH) {
            Ok(after) => Self::EPOCH.plus(after),
            Err(before) => Self(i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |micros| -micros)),
        }
    }
}

impl From<Timestamp> for SystemTime {
    fn from(timestamp: Timestamp) -> Self {
        let distance = Duration::from_micros(timestamp.0.unsigned_abs());
        if timestamp.0 < 0 { UNIX_EPOCH - distance } else { UNIX_EPOCH + distance }
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}", self.0.div_euclid(1_000_000), self.0.rem_euclid(1_000_000))
    }
}
