//! How far a group has come, asked by a client that never joins it.

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{Offset, TopicPartitionList};

use crate::brokers::{Brokers, PATIENCE};
use crate::failure::Failure;
use crate::topic::Span;

/// Asks for one group's committed offsets on one topic.
pub struct GroupOffsets {
    reader: BaseConsumer,
    topic: String,
    spans: Vec<Span>,
}

/// Records that lie behind the group's committed offsets, of all that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Behind the committed offsets.
    pub done: u64,
    /// All of them.
    pub all: u64,
}

impl Committed {
    /// Whether nothing is left.
    pub fn is_complete(&self) -> bool {
        self.done >= self.all
    }
}

impl GroupOffsets {
    /// Asks for the ends of `topic` once: what is produced later does not count.
    ///
    /// # Errors
    /// There is no such topic, or no broker answers.
    pub fn new(brokers: &Brokers, group: &str, topic: &str) -> Result<Self, Failure> {
        let reader = brokers.reader(group)?;
        let partitions = brokers.partitions_of_existing(&reader, topic)?;
        let spans = partitions.into_iter().map(|partition| Span::fetch(&reader, topic, partition));
        let spans = spans.collect::<Result<_, _>>()?;
        Ok(Self { reader, topic: topic.to_owned(), spans })
    }

    /// First and end offsets of all partitions.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Where the group is now.
    ///
    /// # Errors
    /// No broker answers.
    pub fn committed(&self) -> Result<Committed, Failure> {
        let mut asked = TopicPartitionList::new();
        for span in &self.spans {
            asked.add_partition(&self.topic, span.partition);
        }
        let answer = self
            .reader
            .committed_offsets(asked, PATIENCE)
            .map_err(|error| Failure::kafka("the group's committed offsets cannot be read", &error))?;
        let done = |span: &Span| match answer.find_partition(&self.topic, span.partition).map(|found| found.offset()) {
            Some(Offset::Offset(next)) => u64::try_from(next.min(span.end) - span.first).unwrap_or(0),
            _ => 0,
        };
        Ok(Committed { done: self.spans.iter().map(done).sum(), all: self.spans.iter().map(Span::len).sum() })
    }
}
