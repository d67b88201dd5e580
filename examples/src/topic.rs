//! Reading a topic from its first record to its last, without a group: the independent witness of what was asked for.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::BorrowedMessage;
use rdkafka::{Message, Offset, TopicPartitionList};

use crate::brokers::{Brokers, PATIENCE};
use crate::failure::{Failure, UNREACHABLE};

/// No record for so long means that the broker is gone.
const SILENCE: Duration = Duration::from_secs(30);

/// First and end offset of one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The partition.
    pub partition: i32,
    /// The first record's offset.
    pub first: i64,
    /// The offset that the next record will have.
    pub end: i64,
}

impl Span {
    /// Asks the broker.
    ///
    /// # Errors
    /// It does not answer.
    pub fn fetch(reader: &BaseConsumer, topic: &str, partition: i32) -> Result<Self, Failure> {
        let (first, end) = reader
            .fetch_watermarks(topic, partition, PATIENCE)
            .map_err(|error| Failure::kafka(&format!("the end of {topic}/{partition} cannot be read"), &error))?;
        Ok(Self { partition, first, end })
    }

    /// How many offsets lie in it.
    pub fn len(&self) -> u64 {
        u64::try_from(self.end - self.first).unwrap_or(0)
    }

    /// Whether none lies in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Gives every record that is in `topic` now to `each`, in the order of its partition. A topic that is not there has none.
///
/// # Errors
/// The broker does not answer, or falls silent before the end.
pub fn read(brokers: &Brokers, topic: &str, mut each: impl FnMut(&BorrowedMessage<'_>)) -> Result<(), Failure> {
    let attempt = format!("the topic {topic} cannot be read");
    let failed = |error: KafkaError| Failure::kafka(&attempt, &error);
    // A group's name is asked for, and never joined.
    let reader = brokers.reader("idem-examples-reader")?;
    let mut open: HashMap<i32, Span> = HashMap::new();
    let mut assignment = TopicPartitionList::new();
    for partition in brokers.partitions(&reader, topic)? {
        let span = Span::fetch(&reader, topic, partition)?;
        if !span.is_empty() {
            assignment.add_partition_offset(topic, partition, Offset::Offset(span.first)).map_err(failed)?;
            open.insert(partition, span);
        }
    }
    reader.assign(&assignment).map_err(failed)?;

    let mut heard = Instant::now();
    while !open.is_empty() {
        match reader.poll(Duration::from_millis(100)) {
            Some(Ok(record)) => {
                heard = Instant::now();
                let Some(span) = open.get(&record.partition()) else { continue };
                let last = record.offset() + 1 >= span.end;
                if record.offset() < span.end {
                    each(&record);
                }
                if last {
                    open.remove(&record.partition());
                }
            }
            // The last offsets can be a transaction's marks, which are no records.
            Some(Err(KafkaError::PartitionEOF(partition))) => {
                open.remove(&partition);
            }
            // The client tries again by itself.
            Some(Err(_)) | None if heard.elapsed() < SILENCE => {}
            Some(Err(error)) => return Err(failed(error)),
            None => return Err(Failure::new(UNREACHABLE, format!("{attempt}: no record for {SILENCE:?}"))),
        }
    }
    Ok(())
}
