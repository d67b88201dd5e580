//! The only file that commits offsets.

use std::ptr;
use std::time::Duration;

use rdkafka::bindings as sys;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::{Offset, TopicPartitionList};
use tokio::time::Instant;

use super::rebalance::Context;
use crate::assignment::{Epoch, PartitionId};

/// Offsets on their way to the broker.
pub(super) type Offsets = Vec<(PartitionId, Epoch, i64)>;

/// When to commit: one request at a time, since a broker takes those of one connection strictly in turn.
#[derive(Debug)]
pub(super) struct Commits {
    interval: Duration,
    in_flight: Option<Offsets>,
    not_before: Instant,
}

/// After a refusal, which in a rebalance is normal: long enough for the next assignment to be near.
const AFTER_REFUSAL: Duration = Duration::from_millis(300);

impl Commits {
    pub fn new(interval: Duration, now: Instant) -> Self {
        Self { interval, in_flight: None, not_before: now }
    }

    pub fn is_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Whether a request may be sent now.
    pub fn may_send(&self, now: Instant) -> bool {
        self.in_flight.is_none() && now >= self.not_before
    }

    /// When one may be sent, if none is in flight.
    pub fn not_before(&self) -> Option<Instant> {
        self.in_flight.is_none().then_some(self.not_before)
    }

    pub fn sent(&mut self, offsets: Offsets) {
        self.in_flight = Some(offsets);
    }

    /// The broker has answered: what it confirmed, which is nothing after a refusal.
    pub fn answered(&mut self, accepted: bool, now: Instant) -> Offsets {
        let offsets = self.in_flight.take().unwrap_or_default();
        self.not_before = now + if accepted { self.interval } else { AFTER_REFUSAL };
        if accepted { offsets } else { Offsets::new() }
    }

    /// The client is gone, and its answers with it.
    pub fn forget(&mut self, now: Instant) {
        self.in_flight = None;
        self.not_before = now;
    }
}

/// Sends one request with all of `offsets`; the answer comes through [`Context`].
///
/// The client's own asynchronous commit loses its answer, so the request names the consumer's queue for it.
pub(super) fn send(
    consumer: &BaseConsumer<Context>,
    topics: &[std::sync::Arc<str>],
    offsets: &Offsets,
) -> KafkaResult<()> {
    let mut list = TopicPartitionList::with_capacity(offsets.len());
    for (id, _, next_offset) in offsets {
        list.add_partition_offset(&topics[id.topic], id.partition, Offset::Offset(*next_offset))?;
    }
    let client = consumer.client().native_ptr();
    // SAFETY: the consumer is alive; the list is copied by the call; the queue's handle is given back after it.
    let refused = unsafe {
        let queue = sys::rd_kafka_queue_get_consumer(client);
        let refused = sys::rd_kafka_commit_queue(client, list.ptr(), queue, None, ptr::null_mut());
        sys::rd_kafka_queue_destroy(queue);
        refused
    };
    match refused {
        sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR => Ok(()),
        error => Err(KafkaError::ConsumerCommit(RDKafkaErrorCode::from(error))),
    }
}

#[cfg(test)]
mod tests {
    use idem_core::{Clock, SystemClock};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_request_at_a_time_and_a_refusal_confirms_nothing() {
        let now = SystemClock.monotonic();
        let interval = Duration::from_millis(100);
        let mut commits = Commits::new(interval, now);
        assert!(commits.may_send(now));
        commits.sent(Vec::new());
        assert!(!commits.may_send(now + Duration::from_secs(9)));
        assert!(commits.answered(false, now).is_empty());
        assert!(!commits.may_send(now) && commits.may_send(now + AFTER_REFUSAL));
        commits.sent(Vec::new());
        commits.answered(true, now);
        assert!(!commits.may_send(now) && commits.may_send(now + interval));
    }
}
