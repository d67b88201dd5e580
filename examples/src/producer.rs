//! Producing so that nothing is lost on the way: acknowledged by all replicas, idempotent, every delivery report awaited.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseRecord, DeliveryResult, Producer, ProducerContext, ThreadedProducer};

use crate::brokers::Brokers;
use crate::example::Message;
use crate::failure::{FAILED, Failure};

/// How long the last records may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Counts delivery reports.
#[derive(Default)]
struct Reports {
    delivered: AtomicU64,
    failed: AtomicU64,
    first_error: Mutex<Option<KafkaError>>,
}

impl ClientContext for Reports {}

impl ProducerContext for Reports {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        match result {
            Ok(_) => {
                self.delivered.fetch_add(1, Ordering::Relaxed);
            }
            Err((error, _)) => {
                self.first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| error.clone());
                self.failed.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Produces `messages`, each to its partition or to the one its key belongs to, and waits until all are acknowledged.
/// Answers how many there were.
///
/// # Errors
/// Any of them was not acknowledged.
pub fn produce(
    brokers: &Brokers,
    topic: &str,
    messages: impl IntoIterator<Item = (Message, Option<i32>)>,
) -> Result<u64, Failure> {
    let attempt = format!("messages cannot be produced to {topic}");
    let failed = |error: &KafkaError| Failure::kafka(&attempt, error);
    let producer: ThreadedProducer<Reports> = brokers
        .client()
        .set("acks", "all")
        .set("enable.idempotence", "true")
        .set("linger.ms", "10")
        .set("compression.type", "lz4")
        .create_with_context(Reports::default())
        .map_err(|error| failed(&error))?;
    let mut sent = 0;
    for (message, partition) in messages {
        send(&producer, topic, &message, partition).map_err(|error| failed(&error))?;
        sent += 1;
    }

    let reports = producer.context();
    let begun = Instant::now();
    // Not `flush`, which waits in steps of 100 ms.
    while reports.delivered.load(Ordering::Relaxed) + reports.failed.load(Ordering::Relaxed) < sent {
        if begun.elapsed() > PATIENCE {
            return Err(Failure::new(FAILED, format!("{attempt}: some were not acknowledged within {PATIENCE:?}")));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    match &*reports.first_error.lock().unwrap_or_else(PoisonError::into_inner) {
        None => Ok(sent),
        Some(error) => {
            let lost = reports.failed.load(Ordering::Relaxed);
            Err(Failure::kafka(&format!("{lost} of {sent} messages were not accepted by {topic}"), error))
        }
    }
}

fn send(
    producer: &ThreadedProducer<Reports>,
    topic: &str,
    message: &Message,
    partition: Option<i32>,
) -> Result<(), KafkaError> {
    loop {
        let mut record = BaseRecord::to(topic).key(&message.key).payload(&message.value);
        record.partition = partition;
        match producer.send(record) {
            Ok(()) => return Ok(()),
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err((error, _)) => return Err(error),
        }
    }
}
