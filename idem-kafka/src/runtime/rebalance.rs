//! Client callbacks turned into events. Decides nothing, waits for nothing.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::bindings as sys;
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::types::RDKafkaRespErr;

/// What a callback saw.
#[derive(Debug)]
pub(super) enum Callback {
    /// These partitions are to be added.
    Assign(TopicPartitionList),
    /// These partitions are to be given up; if `lost`, others may have them already.
    Revoke { partitions: TopicPartitionList, lost: bool },
    /// The broker has answered a commit.
    Committed(KafkaResult<()>),
}

/// The client's context: collects what callbacks see, for the thread that polls.
#[derive(Default)]
pub(super) struct Context {
    callbacks: Mutex<VecDeque<Callback>>,
    /// The first refusal by name or password, or by TLS. The client tries again for ever and says so only here.
    refused: Mutex<Option<String>>,
    last_error: Mutex<Option<String>>,
    /// From here on rebalances are answered at once: while it closes, the client waits for the answer.
    closing: AtomicBool,
    pub waker: Waker,
}

impl Context {
    pub fn take(&self) -> VecDeque<Callback> {
        std::mem::take(&mut *locked(&self.callbacks))
    }

    pub fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
    }

    /// Why the broker or its certificate refuses us, if that has happened.
    pub fn refused(&self) -> Option<String> {
        locked(&self.refused).clone()
    }

    pub fn last_error(&self) -> Option<String> {
        locked(&self.last_error).clone()
    }

    fn push(&self, callback: Callback) {
        locked(&self.callbacks).push_back(callback);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        // The client's own warnings repeat every second while a broker is away; what matters comes as errors.
        tracing::debug!(?level, facility, message, "kafka client");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if let Some(RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SSL) = error.rdkafka_error_code() {
            locked(&self.refused).get_or_insert_with(|| reason.to_owned());
        }
        *locked(&self.last_error) = Some(format!("{error}: {reason}"));
        tracing::debug!(errorMessage = %error, reason, "kafka client error");
    }
}

impl ConsumerContext for Context {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, event: RDKafkaRespErr, partitions: &mut TopicPartitionList) {
        let assign = event == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS;
        if self.closing.load(Ordering::SeqCst) {
            if !assign && let Err(error) = answer_revoke(consumer, partitions) {
                tracing::debug!(errorMessage = %error, "revoke while closing");
            }
            return;
        }
        self.push(if assign {
            Callback::Assign(partitions.clone())
        } else {
            Callback::Revoke { partitions: partitions.clone(), lost: consumer.assignment_lost() }
        });
    }

    fn commit_callback(&self, result: KafkaResult<()>, _offsets: &TopicPartitionList) {
        self.push(Callback::Committed(result));
    }
}

/// Tells the client that these partitions are taken on. An empty list is normal, and must be answered too.
pub(super) fn answer_assign(consumer: &BaseConsumer<Context>, partitions: &TopicPartitionList) -> KafkaResult<()> {
    match consumer.rebalance_protocol() {
        RebalanceProtocol::Cooperative => consumer.incremental_assign(partitions),
        RebalanceProtocol::Eager | RebalanceProtocol::None => consumer.assign(partitions),
    }
}

/// Tells the client that these partitions are given up.
pub(super) fn answer_revoke(consumer: &BaseConsumer<Context>, partitions: &TopicPartitionList) -> KafkaResult<()> {
    match consumer.rebalance_protocol() {
        RebalanceProtocol::Cooperative => consumer.incremental_unassign(partitions),
        RebalanceProtocol::Eager | RebalanceProtocol::None => consumer.unassign(),
    }
}

/// Wakes the polling thread: for records, callbacks and commands alike.
#[derive(Default)]
pub(super) struct Waker {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Waker {
    pub fn wake(&self) {
        *locked(&self.woken) = true;
        self.changed.notify_one();
    }

    /// Until woken, at most `longest`.
    pub fn wait(&self, longest: Duration) {
        let woken = locked(&self.woken);
        let waited = self.changed.wait_timeout_while(woken, longest, |woken| !*woken);
        let (mut woken, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *woken = false;
    }
}

/// For the client's queues: `opaque` is the [`Waker`] of a context that outlives the client.
pub(super) unsafe extern "C" fn wake(_client: *mut sys::rd_kafka_t, opaque: *mut std::ffi::c_void) {
    // SAFETY: set together with the callback, from a waker that outlives the queue.
    let waker = unsafe { &*opaque.cast::<Waker>() };
    waker.wake();
}
