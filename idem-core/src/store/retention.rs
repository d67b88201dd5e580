//! How long rows are kept: as long as a copy of their message may still arrive.
//!
//! A row that is gone guards nothing: a message that comes after it runs its job again. So what is safe to remove depends on
//! how long the source can deliver a message once more, which only the application knows: the topic's retention, and what
//! its producers and operators replay.

use std::future::Future;
use std::time::Duration;

use super::{Purge, Store, StoreError};
use crate::key::ConsumerName;

/// The shortest time that rows are kept: clocks of producers and brokers differ, and a consumer may lag.
pub const MIN_RETENTION: Duration = Duration::from_secs(3600);
/// Rows of one batch: so few that no claim waits noticeably for it, so many that the work gets done.
const BATCH: u32 = 1_000;
/// The pause after each batch leaves the database most of its time.
const PAUSE: Duration = Duration::from_millis(50);

/// Which rows may go.
///
/// ```
/// use std::time::Duration;
/// use idem_core::store::retention::Retention;
///
/// let day = Duration::from_secs(24 * 3600);
/// let retention = Retention::new(30 * day, 7 * day)?;
/// assert_eq!(retention.keep(), 30 * day);
/// // The topic holds messages longer than their rows would be kept: a replayed one would run again.
/// assert!(Retention::new(5 * day, 7 * day).is_err());
/// # Ok::<(), idem_core::store::retention::RetentionError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retention {
    keep: Duration,
    consumer: Option<ConsumerName>,
    batch: u32,
    pause: Duration,
}

/// The rows would be removed while their messages may still arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RetentionError {
    /// Shorter than messages can come back.
    #[error(
        "rows would be kept for {keep:?}, but messages can be delivered again for {redelivered_within:?}: a copy that comes \
         after its row is gone runs the job again"
    )]
    ShorterThanSource {
        /// How long rows would be kept.
        keep: Duration,
        /// How long the source can deliver a message again.
        redelivered_within: Duration,
    },
    /// Shorter than [`MIN_RETENTION`].
    #[error("rows would be kept for {keep:?}, which is less than {MIN_RETENTION:?}")]
    TooShort {
        /// How long rows would be kept.
        keep: Duration,
    },
}

impl Retention {
    /// Keeps rows for `keep` after their job ended. `redelivered_within` is the longest time after which a copy of a message
    /// can still arrive: the topic's retention, or how far back operators replay. A topic that keeps its records for ever
    /// has no safe retention.
    ///
    /// # Errors
    /// The rows would be removed while their messages may still arrive.
    pub fn new(keep: Duration, redelivered_within: Duration) -> Result<Self, RetentionError> {
        if keep <= redelivered_within {
            return Err(RetentionError::ShorterThanSource { keep, redelivered_within });
        }
        if keep < MIN_RETENTION {
            return Err(RetentionError::TooShort { keep });
        }
        Ok(Self { keep, consumer: None, batch: BATCH, pause: PAUSE })
    }

    /// Only rows of this consumer.
    pub fn consumer(mut self, consumer: ConsumerName) -> Self {
        self.consumer = Some(consumer);
        self
    }

    /// Rows of one batch, at least one. Default 1000.
    pub fn batch(mut self, rows: u32) -> Self {
        self.batch = rows.max(1);
        self
    }

    /// The pause after each batch. Default 50 ms.
    pub fn pause(mut self, pause: Duration) -> Self {
        self.pause = pause;
        self
    }

    /// How long rows are kept.
    pub fn keep(&self) -> Duration {
        self.keep
    }
}

/// What a purge did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Purged {
    /// Rows that were removed.
    pub rows: u64,
    /// Batches that had some.
    pub batches: u64,
}

/// Removes the rows that may go, in small batches with pauses, beside the traffic.
///
/// # Errors
/// As [`Store::purge`]. What was removed before stays removed; a purge that is begun again goes on where this one ended.
///
/// # Cancel safety
/// Dropping the future ends it after some batch: as after an error.
pub async fn purge(store: &dyn Store, retention: &Retention) -> Result<Purged, StoreError> {
    let batch = Purge { consumer: retention.consumer.clone(), older_than: retention.keep, most: retention.batch };
    in_batches(|| store.purge(&batch), retention.batch, retention.pause).await
}

async fn in_batches<F>(mut remove: impl FnMut() -> F, most: u32, pause: Duration) -> Result<Purged, StoreError>
where
    F: Future<Output = Result<u64, StoreError>>,
{
    let mut purged = Purged::default();
    loop {
        let rows = remove().await?;
        purged.rows += rows;
        purged.batches += u64::from(rows > 0);
        // Fewer than asked for: the rest is young, or locked, which the next purge finds.
        if rows < u64::from(most) {
            return Ok(purged);
        }
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreErrorKind;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    #[test]
    fn rows_outlive_their_messages() {
        assert!(Retention::new(8 * DAY, 7 * DAY).is_ok());
        let same = Retention::new(7 * DAY, 7 * DAY).unwrap_err();
        assert!(matches!(same, RetentionError::ShorterThanSource { .. }));
        assert!(same.to_string().contains("runs the job again"));
        let short = Retention::new(MIN_RETENTION - Duration::from_secs(1), Duration::from_secs(1)).unwrap_err();
        assert!(matches!(short, RetentionError::TooShort { .. }));
    }

    #[tokio::test(start_paused = true)]
    async fn batches_are_repeated_until_one_is_not_full() {
        let mut left = vec![3, 10, 10];
        let purged = in_batches(|| std::future::ready(Ok(left.pop().expect("no more than needed"))), 10, PAUSE).await;
        assert_eq!(purged.unwrap(), Purged { rows: 23, batches: 3 });
        let none = in_batches(|| std::future::ready(Ok(0)), 10, PAUSE).await;
        assert_eq!(none.unwrap(), Purged::default());
        let broken = || std::future::ready(Err(StoreError::new(StoreErrorKind::Unavailable, "away")));
        assert!(in_batches(broken, 10, PAUSE).await.is_err());
    }
}
