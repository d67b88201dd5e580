//! Counts duplicates on their rows without a write for each: counted here, written together.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use crate::key::{ConsumerName, EventKey};
use crate::store::{Store, StoreError};

/// How often what was counted is written.
const EVERY: Duration = Duration::from_secs(1);
/// Most rows whose counts are kept until then. Whoever replays a topic makes a duplicate of every message, and must not write
/// every row once more: beyond this many different keys a second, counts fall short.
const MOST: usize = 1_000;

/// What was counted and is not written yet.
#[derive(Default)]
pub(super) struct Duplicates {
    counts: Mutex<HashMap<ConsumerName, HashMap<EventKey, u64>>>,
    /// Somebody will write soon.
    is_scheduled: AtomicBool,
}

impl Duplicates {
    /// Counts one. Writes within [`EVERY`], by a task of its own, unless this is outside of any runtime.
    pub(super) fn note(self: &Arc<Self>, store: &Arc<dyn Store>, consumer: &ConsumerName, key: &EventKey) {
        if !self.count(consumer, key) || self.is_scheduled.swap(true, Ordering::AcqRel) {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            self.is_scheduled.store(false, Ordering::Release);
            return;
        };
        // Weak: counts keep nothing alive.
        let (counts, store) = (Arc::downgrade(self), Arc::downgrade(store));
        runtime.spawn(write_later(counts, store));
    }

    fn count(&self, consumer: &ConsumerName, key: &EventKey) -> bool {
        let mut counts = self.counts();
        let rows: usize = counts.values().map(HashMap::len).sum();
        if let Some(times) = counts.get_mut(consumer).and_then(|keys| keys.get_mut(key)) {
            *times += 1;
        } else if rows < MOST {
            counts.entry(consumer.clone()).or_default().insert(key.clone(), 1);
        } else {
            return false;
        }
        true
    }

    /// Writes what was counted. What cannot be written is dropped: it must not pile up while the store is away.
    pub(super) async fn flush(&self, store: &Arc<dyn Store>) -> Result<(), StoreError> {
        let counts = std::mem::take(&mut *self.counts());
        for (consumer, keys) in counts {
            let keys: Vec<_> = keys.into_iter().collect();
            store.count_duplicates(&consumer, &keys).await?;
        }
        Ok(())
    }

    fn counts(&self) -> std::sync::MutexGuard<'_, HashMap<ConsumerName, HashMap<EventKey, u64>>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn write_later(counts: Weak<Duplicates>, store: Weak<dyn Store>) {
    tokio::time::sleep(EVERY).await;
    let (Some(counts), Some(store)) = (counts.upgrade(), store.upgrade()) else { return };
    // Before the counts are taken: who counts from now on schedules the next write.
    counts.is_scheduled.store(false, Ordering::Release);
    if let Err(error) = counts.flush(&store).await {
        tracing::debug!(errorMessage = %error, "counts of duplicates could not be written and are dropped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{Decision, Token};
    use crate::store::{ClaimRequest, MemoryStore, Terms};

    fn key(text: &str) -> EventKey {
        EventKey::from_parts([text]).unwrap()
    }

    async fn with_row(text: &str) -> (MemoryStore, ConsumerName) {
        let store = MemoryStore::default();
        let consumer = ConsumerName::new("c").unwrap();
        let terms = Terms { consumer: consumer.clone(), lease: EVERY, max_attempts: 1, owner: "me".into() };
        let token = Token(uuid::Uuid::from_u128(1));
        let request = ClaimRequest { key: key(text), token, payload: None, message_id: "m".into() };
        let answers = store.claim(&terms, &[request]).await.unwrap();
        assert!(matches!(answers[0].decision, Decision::Run(_)));
        (store, consumer)
    }

    #[tokio::test(start_paused = true)]
    async fn counts_are_written_together_and_each_second() {
        let (store, consumer) = with_row("a").await;
        let shared: Arc<dyn Store> = Arc::new(store.clone());
        let counts = Arc::new(Duplicates::default());
        for (second, expected) in [(1, 3), (2, 6)] {
            for _ in 0..3 {
                counts.note(&shared, &consumer, &key("a"));
            }
            assert_eq!(store.duplicates(&consumer, &key("a")).await, expected - 3, "not yet in second {second}");
            tokio::time::sleep(EVERY + Duration::from_millis(1)).await;
            assert_eq!(store.duplicates(&consumer, &key("a")).await, expected);
        }
    }

    #[tokio::test]
    async fn a_flush_writes_at_once_and_only_once() {
        let (store, consumer) = with_row("a").await;
        let shared: Arc<dyn Store> = Arc::new(store.clone());
        let counts = Arc::new(Duplicates::default());
        counts.note(&shared, &consumer, &key("a"));
        for _ in 0..2 {
            counts.flush(&shared).await.unwrap();
            assert_eq!(store.duplicates(&consumer, &key("a")).await, 1);
        }
    }

    #[test]
    fn a_storm_of_different_keys_is_bounded() {
        let counts = Duplicates::default();
        let consumer = ConsumerName::new("c").unwrap();
        for number in 0..3 * MOST {
            assert_eq!(counts.count(&consumer, &key(&number.to_string())), number < MOST);
        }
        assert!(counts.count(&consumer, &key("0")), "a key that is counted goes on being so");
        assert_eq!(counts.counts().values().map(HashMap::len).sum::<usize>(), MOST);
    }
}
