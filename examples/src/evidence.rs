//! Gathers what a check looks at: the topic, the dead letters, and the effects.

use std::collections::HashSet;

use rdkafka::Message;
use rdkafka::message::{BorrowedMessage, Headers};

use crate::brokers::Brokers;
use crate::example::{Asked, Effects, Example};
use crate::failure::Failure;
use crate::topic;

/// A job's key may have so many characters; a message with a longer one cannot ask for a job.
const MAX_KEY_CHARS: usize = 255;

/// Where a record is.
pub type Position = (i32, i64);

/// One record of the topic.
#[derive(Clone, Debug)]
pub struct Record {
    /// Its partition and offset.
    pub position: Position,
    /// What it asks for; nothing if it cannot be read, or has no usable key.
    pub asked: Option<Asked>,
}

/// Everything that a check looks at.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// The topic, each partition in order.
    pub records: Vec<Record>,
    /// The records that have a dead letter. A crash can leave two letters of one record.
    pub set_aside: HashSet<Position>,
    /// What was done.
    pub effects: Vec<Effects>,
}

/// Reads a topic and its dead letters.
///
/// # Errors
/// A topic cannot be read.
pub fn gather(
    brokers: &Brokers,
    example: &Example,
    topic: &str,
    dead_letters: &str,
    effects: Vec<Effects>,
) -> Result<Evidence, Failure> {
    let mut evidence = Evidence { effects, ..Evidence::default() };
    topic::read(brokers, topic, |message| {
        let asked = message.payload().and_then(example.read).filter(has_usable_key);
        evidence.records.push(Record { position: (message.partition(), message.offset()), asked });
    })?;
    topic::read(brokers, dead_letters, |letter| evidence.set_aside.extend(origin(letter, topic)))?;
    Ok(evidence)
}

fn has_usable_key(asked: &Asked) -> bool {
    !asked.key.is_empty() && asked.key.chars().count() <= MAX_KEY_CHARS
}

/// Which record of `topic` this dead letter is about.
fn origin(letter: &BorrowedMessage<'_>, topic: &str) -> Option<Position> {
    let headers = letter.headers()?;
    let text = |name: &str| {
        let header = headers.iter().filter(|header| header.key == name).last()?;
        std::str::from_utf8(header.value?).ok()
    };
    let here = text("__dlq.errors.topic")? == topic;
    let position = (text("__dlq.errors.partition")?.parse().ok()?, text("__dlq.errors.offset")?.parse().ok()?);
    here.then_some(position)
}
