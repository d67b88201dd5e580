//! Where rejected records go, and what travels with them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use idem_core::{Fingerprint, HandlerFailure, OnConflict, Outcome};
use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer};

use crate::error::{Error, ErrorKind};
use crate::record::Record;

/// Why a record is set aside. Closed: it is a header and a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The handler said that trying again is of no use.
    Terminal,
    /// The attempts are used up.
    Exhausted,
    /// It is not an event.
    Decode,
    /// It has no usable key.
    NoKey,
    /// Its key was used for another payload.
    Mismatch,
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Terminal => "terminal",
            Reason::Exhausted => "exhausted",
            Reason::Decode => "decode",
            Reason::NoKey => "no_key",
            Reason::Mismatch => "mismatch",
        }
    }
}

/// Why and with what a record is set aside.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    pub reason: Reason,
    pub key: Option<String>,
    pub attempts: u32,
    pub error_kind: &'static str,
    /// At most 1 KiB.
    pub error: String,
    pub fingerprint: Option<Fingerprint>,
}

/// The verdict of an outcome that sets its record aside; nothing for all others.
pub(crate) fn verdict(
    outcome: &Outcome,
    on_conflict: OnConflict,
    key: &str,
    fingerprint: Option<Fingerprint>,
) -> Option<Verdict> {
    let (reason, attempts, error_kind, error) = match outcome {
        Outcome::Conflict if on_conflict == OnConflict::DeadLetter => {
            (Reason::Mismatch, 0, "mismatch", "the key was used for a message with another payload".to_owned())
        }
        Outcome::Exhausted { attempts, error } => (
            Reason::Exhausted,
            *attempts,
            "exhausted",
            error.clone().unwrap_or_else(|| "the job failed for good before, or its attempts are used up".to_owned()),
        ),
        Outcome::Failed { attempt, retry_in: None, failure: HandlerFailure { kind, message, .. } } => {
            let reason = match kind.disposition() {
                idem_core::Disposition::Terminal => Reason::Terminal,
                idem_core::Disposition::Transient => Reason::Exhausted,
            };
            (reason, *attempt, kind.as_str(), message.clone())
        }
        _ => return None,
    };
    Some(Verdict { reason, key: Some(key.to_owned()), attempts, error_kind, error, fingerprint })
}

/// Everything a dead letter says besides the record's own headers.
pub(crate) fn headers(
    record: &Record,
    verdict: &Verdict,
    consumer: &str,
    group: &str,
    now: SystemTime,
) -> Vec<(&'static str, String)> {
    let millis = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
    let mut headers = vec![
        ("__dlq.errors.topic", record.topic.to_string()),
        ("__dlq.errors.partition", record.id.partition.to_string()),
        ("__dlq.errors.offset", record.offset.to_string()),
        ("__dlq.errors.group", group.to_owned()),
        ("__dlq.errors.delivery.count", verdict.attempts.max(1).to_string()),
        ("__dlq.errors.message", verdict.error.clone()),
        ("idem-consumer", consumer.to_owned()),
        ("idem-attempt", verdict.attempts.to_string()),
        ("idem-reason", verdict.reason.as_str().to_owned()),
        ("idem-error-kind", verdict.error_kind.to_owned()),
        ("idem-error-message", verdict.error.clone()),
        ("idem-dead-lettered-at", millis.to_string()),
    ];
    headers.extend(verdict.key.clone().map(|key| ("idem-key", key)));
    headers.extend(verdict.fingerprint.map(|fingerprint| ("idem-fingerprint", fingerprint.to_string())));
    headers.extend(record.timestamp.map(|timestamp| ("idem-first-received-at", timestamp.to_string())));
    headers
}

/// Sends dead letters, and says when one is safe.
#[derive(Clone)]
pub(crate) struct DeadLetters {
    producer: FutureProducer,
    group: String,
    /// Partitions of topics that were looked up.
    known: Arc<Mutex<HashMap<String, i32>>>,
}

/// How much of a record a dead letter carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keep {
    Everything,
    /// Without its body, which the topic does not take.
    AllButBody,
    /// Only why it is set aside and where it stands in its own topic.
    Place,
}

impl Keep {
    fn less(self) -> Self {
        match self {
            Keep::Everything => Keep::AllButBody,
            Keep::AllButBody | Keep::Place => Keep::Place,
        }
    }
}

/// How long the client looks for a topic's partitions.
const METADATA_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait between two tries to send.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

impl DeadLetters {
    pub fn new(config: &ClientConfig, group: &str) -> Result<Self, Error> {
        let producer = config.create().map_err(|error| {
            Error::with_cause(ErrorKind::Configuration, "the dead-letter producer could not be made", error)
        })?;
        Ok(Self { producer, group: group.to_owned(), known: Arc::default() })
    }

    /// Sends until the broker has acknowledged. A topic that is missing or forbidden is an outage: the record waits.
    ///
    /// A body that the topic does not take is left out, and its length said; then also headers, key and timestamp. The
    /// record's place in its own topic always travels along, and still finds it.
    ///
    /// # Cancel safety
    /// Dropping it may leave the letter sent: it is sent again with the record's next delivery.
    pub async fn send(
        &self,
        topic: &str,
        consumer: &str,
        record: &Record,
        verdict: &Verdict,
        now: impl Fn() -> SystemTime,
    ) {
        let mut keep = Keep::Everything;
        let mut wait = Duration::from_millis(200);
        loop {
            match self.try_send(topic, consumer, record, verdict, keep, now()).await {
                Ok(()) => return,
                // Refused for what it is: trying the same again is of no use.
                Err(KafkaError::MessageProduction(
                    RDKafkaErrorCode::MessageSizeTooLarge
                    | RDKafkaErrorCode::InvalidRecord
                    | RDKafkaErrorCode::InvalidTimestamp
                    | RDKafkaErrorCode::InvalidMessage
                    | RDKafkaErrorCode::InvalidMessageSize,
                )) if keep != Keep::Place => keep = keep.less(),
                Err(error) => {
                    self.known().remove(topic);
                    tracing::error!(
                    topic,
                    consumerName = consumer,
                    messageId = %record.message_id(),
                    errorMessage = %error,
                    "a dead letter could not be sent, so its record waits; does the topic exist and may we write to it?"
                    );
                }
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    async fn try_send(
        &self,
        topic: &str,
        consumer: &str,
        record: &Record,
        verdict: &Verdict,
        keep: Keep,
        now: SystemTime,
    ) -> Result<(), KafkaError> {
        let partitions = self.partitions(topic).await?;
        let mut all = OwnedHeaders::new();
        for (key, value) in record.headers.0.iter().filter(|_| keep != Keep::Place) {
            all = all.insert(Header { key, value: Some(value) });
        }
        for (key, value) in headers(record, verdict, consumer, &self.group, now) {
            all = all.insert(Header { key, value: Some(&value) });
        }
        let body = record.payload.as_ref().filter(|_| keep == Keep::Everything);
        if let (Some(left_out), None) = (&record.payload, body) {
            all = all.insert(Header { key: "idem-body-omitted", value: Some(&left_out.len().to_string()) });
        }
        let mut letter = FutureRecord::<[u8], [u8]>::to(topic)
            .headers(all)
            // The same number where there is one, so that a key's letters stay in order.
            .partition(record.id.partition.rem_euclid(partitions));
        // Without its own key it still needs one, in case the topic is compacted.
        let place = record.message_id();
        letter.key = if keep == Keep::Place { Some(place.as_bytes()) } else { record.key.as_deref() };
        letter.payload = body.map(|bytes| bytes.as_slice());
        letter.timestamp = record.timestamp.filter(|_| keep != Keep::Place);
        let sent = self.producer.send(letter, Duration::from_secs(30)).await;
        sent.map(drop).map_err(|(error, _)| error)
    }

    /// How many partitions the topic has; an error if it is not there.
    pub async fn partitions(&self, topic: &str) -> Result<i32, KafkaError> {
        if let Some(count) = self.known().get(topic) {
            return Ok(*count);
        }
        let count = self.look_up(topic).await?;
        self.known().insert(topic.to_owned(), count);
        Ok(count)
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, i32>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn look_up(&self, topic: &str) -> Result<i32, KafkaError> {
        let (producer, name) = (self.producer.clone(), topic.to_owned());
        let looked_up = tokio::task::spawn_blocking(move || {
            let metadata = producer.client().fetch_metadata(Some(&name), METADATA_TIMEOUT)?;
            let missing = KafkaError::MetadataFetch(RDKafkaErrorCode::UnknownTopicOrPartition);
            let topic = metadata.topics().first().ok_or_else(|| missing.clone())?;
            match (topic.error(), i32::try_from(topic.partitions().len())) {
                (Some(error), _) => Err(KafkaError::MetadataFetch(error.into())),
                (None, Ok(count)) if count > 0 => Ok(count),
                (None, _) => Err(missing),
            }
        });
        looked_up.await.unwrap_or(Err(KafkaError::Canceled))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assignment::PartitionId;
    use idem_core::{FailureKind, HeaderList};

    #[test]
    fn only_final_outcomes_set_a_record_aside() {
        let failure = |kind| HandlerFailure { kind, message: "no".into(), violated: None };
        let failed = |kind, retry_in| Outcome::Failed { attempt: 3, retry_in, failure: failure(kind) };
        let reason =
            |outcome: &Outcome| verdict(outcome, OnConflict::DeadLetter, "k", None).map(|verdict| verdict.reason);
        let second = Some(Duration::from_secs(1));
        for (outcome, expected) in [
            (Outcome::Completed { attempt: 1, takeover: false, already_done: None, output: None }, None),
            (Outcome::Duplicate(idem_core::DuplicateKind::Producer), None),
            (Outcome::InProgress { wait: Duration::ZERO }, None),
            (Outcome::NotDue { wait: Duration::ZERO }, None),
            (Outcome::LeaseLost, None),
            (failed(FailureKind::Transient, second), None),
            (failed(FailureKind::Transient, None), Some(Reason::Exhausted)),
            (failed(FailureKind::Panicked, None), Some(Reason::Exhausted)),
            (failed(FailureKind::Terminal, None), Some(Reason::Terminal)),
            (Outcome::Exhausted { attempts: 8, error: None }, Some(Reason::Exhausted)),
            (Outcome::Conflict, Some(Reason::Mismatch)),
        ] {
            assert_eq!(reason(&outcome), expected, "{outcome:?}");
        }
        for other in [OnConflict::Skip, OnConflict::Stop] {
            assert!(verdict(&Outcome::Conflict, other, "k", None).is_none(), "{other:?}");
            assert!(verdict(&Outcome::Exhausted { attempts: 8, error: None }, other, "k", None).is_some());
        }
    }

    #[test]
    fn the_origin_travels_with_the_letter() {
        let record = Record {
            id: PartitionId { topic: 0, partition: 3 },
            topic: "orders".into(),
            offset: 42,
            timestamp: Some(5),
            key: None,
            payload: None,
            headers: HeaderList::default(),
        };
        let verdict = verdict(&Outcome::Conflict, OnConflict::DeadLetter, "A-1", None).unwrap();
        let headers = headers(&record, &verdict, "invoice", "group", UNIX_EPOCH + Duration::from_millis(7));
        for expected in [
            ("__dlq.errors.topic", "orders"),
            ("__dlq.errors.partition", "3"),
            ("__dlq.errors.offset", "42"),
            ("__dlq.errors.group", "group"),
            ("idem-key", "A-1"),
            ("idem-reason", "mismatch"),
            ("idem-dead-lettered-at", "7"),
            ("idem-first-received-at", "5"),
        ] {
            assert!(headers.iter().any(|(name, value)| (*name, value.as_str()) == expected), "{expected:?}");
        }
    }
}
