//! `produce`: fills a topic with orders and duplicates, or with the lines of a file.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use chrono::Utc;
use idem_kafka::Settings;

use crate::brokers::Brokers;
use crate::cli::{PlanOptions, ProduceOptions};
use crate::example::{Example, Message};
use crate::failure::{Failure, MISUSED};
use crate::producer;
use crate::table::grouped;

/// Produces what `options` say to the brokers of the environment.
///
/// # Errors
/// Not every message was acknowledged.
pub async fn produce(example: &Example, options: &ProduceOptions) -> Result<(), Failure> {
    let settings = Settings::from_env()?;
    let brokers = Brokers::of(&settings)?;
    let topic = options.topic.as_deref().unwrap_or(example.topic);
    if let Some(partitions) = options.create {
        let dead_letters = dead_letter_topic(&settings, topic, example.consumer);
        brokers.create_topics(&[topic, &dead_letters], partitions).await?;
    }
    let sent = match &options.file {
        Some(file) => produce_lines(example, &brokers, topic, file)?,
        None => {
            let partitions = brokers.partitions_of_existing(&brokers.reader("idem-examples-reader")?, topic)?;
            produce_plan(example, &brokers, topic, &options.plan, partitions.len() as i32)?
        }
    };
    println!("{} messages produced to {topic}", grouped(sent));
    Ok(())
}

/// Produces orders and duplicates. Answers how many messages that made.
///
/// # Errors
/// Not every message was acknowledged.
pub fn produce_plan(
    example: &Example,
    brokers: &Brokers,
    topic: &str,
    plan: &PlanOptions,
    partitions: i32,
) -> Result<u64, Failure> {
    let planned = plan.shape(partitions).plan(Utc::now());
    let messages = planned.map(|planned| ((example.write)(&planned.order), Some(planned.partition)));
    producer::produce(brokers, topic, messages)
}

/// A line that is no event is produced all the same, without a key: what a consumer makes of it is worth seeing.
fn produce_lines(example: &Example, brokers: &Brokers, topic: &str, file: &Path) -> Result<u64, Failure> {
    let unreadable =
        |error: std::io::Error| Failure::new(MISUSED, format!("the file {} cannot be read: {error}", file.display()));
    let mut messages = Vec::new();
    for line in BufReader::new(File::open(file).map_err(unreadable)?).split(b'\n') {
        let value = line.map_err(unreadable)?;
        if !value.trim_ascii().is_empty() {
            let key = (example.read)(&value).map(|asked| asked.key).unwrap_or_default();
            messages.push((Message { key, value }, None));
        }
    }
    producer::produce(brokers, topic, messages)
}

/// Where a consumer with these settings puts dead letters.
pub fn dead_letter_topic(settings: &Settings, topic: &str, consumer: &str) -> String {
    let template = settings.kafka.dead_letter_topic.as_deref().unwrap_or("{topic}-{consumer}-dlt");
    template.replace("{topic}", topic).replace("{consumer}", consumer)
}
