//! How to reach the brokers, for everything here that is not idem itself.

use std::time::Duration;

use idem_kafka::{PassThrough, Settings};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::RDKafkaErrorCode;

use crate::failure::{Failure, MISUSED, NOT_FOUND};

/// How long a broker may take to answer one question.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Where the brokers are, and how to prove who we are.
#[derive(Clone, Debug)]
pub struct Brokers(ClientConfig);

impl Brokers {
    /// Brokers that ask for nothing, as `host:port,host:port`.
    pub fn at(bootstrap: &str) -> Self {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", bootstrap);
        Self(config)
    }

    /// The brokers that a consumer with these settings would use.
    ///
    /// # Errors
    /// There are none.
    pub fn of(settings: &Settings) -> Result<Self, Failure> {
        let bootstrap = settings.kafka.brokers.as_deref();
        let unset = || Failure::new(MISUSED, "`kafka.brokers` is not set: set IDEM__KAFKA__BROKERS");
        let mut brokers = Self::at(bootstrap.ok_or_else(unset)?);
        for (key, value) in pass_through(settings) {
            // The others are the consumer's own.
            if ["security.", "ssl.", "sasl.", "enable.ssl."].iter().any(|start| key.starts_with(start)) {
                brokers.0.set(key, value);
            }
        }
        Ok(brokers)
    }

    /// Settings of a client to begin with.
    pub fn client(&self) -> ClientConfig {
        self.0.clone()
    }

    /// A client that reads without ever joining a group. `group` is whose offsets it can ask for.
    ///
    /// # Errors
    /// The settings are refused.
    pub fn reader(&self, group: &str) -> Result<BaseConsumer, Failure> {
        self.client()
            .set("group.id", group)
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("enable.partition.eof", "true")
            .set("fetch.wait.max.ms", "20")
            .create()
            .map_err(|error| Failure::kafka("the Kafka client cannot be made", &error))
    }

    /// The partitions of `topic`: none if there is no such topic.
    ///
    /// # Errors
    /// No broker answers.
    pub fn partitions(&self, reader: &BaseConsumer, topic: &str) -> Result<Vec<i32>, Failure> {
        let metadata = reader
            .fetch_metadata(Some(topic), PATIENCE)
            .map_err(|error| Failure::kafka(&format!("the topic {topic} cannot be looked up"), &error))?;
        let topic = metadata.topics().iter().find(|found| found.name() == topic && found.error().is_none());
        Ok(topic.map(|found| found.partitions().iter().map(|partition| partition.id()).collect()).unwrap_or_default())
    }

    /// The partitions of a topic that must be there.
    ///
    /// # Errors
    /// It is not, or no broker answers.
    pub fn partitions_of_existing(&self, reader: &BaseConsumer, topic: &str) -> Result<Vec<i32>, Failure> {
        let partitions = self.partitions(reader, topic)?;
        if partitions.is_empty() {
            let text =
                format!("there is no topic {topic}: make it with `produce --create`, or name another with --topic");
            return Err(Failure::new(NOT_FOUND, text));
        }
        Ok(partitions)
    }

    /// Creates topics that are not there yet.
    ///
    /// # Errors
    /// A broker refuses, or none answers.
    pub async fn create_topics(&self, names: &[&str], partitions: i32) -> Result<(), Failure> {
        let attempt = format!("the topics {} cannot be created", names.join(" and "));
        let admin: AdminClient<DefaultClientContext> =
            self.client().create().map_err(|error| Failure::kafka(&attempt, &error))?;
        // The brokers' own default, since one broker cannot hold three replicas.
        let topics = names.iter().map(|name| NewTopic::new(name, partitions, TopicReplication::Fixed(-1)));
        let topics: Vec<_> = topics.collect();
        let options = AdminOptions::new().request_timeout(Some(PATIENCE)).operation_timeout(Some(PATIENCE));
        let answers = admin.create_topics(&topics, &options).await.map_err(|error| Failure::kafka(&attempt, &error))?;
        for answer in answers {
            match answer {
                Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
                Err((name, code)) => {
                    return Err(Failure::new(
                        crate::failure::FAILED,
                        format!("the topic {name} cannot be created: {code}"),
                    ));
                }
            }
        }
        Ok(())
    }
}

fn pass_through(settings: &Settings) -> Vec<(String, String)> {
    match &settings.kafka.librdkafka {
        None => Vec::new(),
        Some(PassThrough::Table(table)) => table.clone().into_iter().collect(),
        Some(PassThrough::Text(text)) => {
            let pairs = text.split(';').filter_map(|pair| pair.split_once('='));
            pairs.map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned())).collect()
        }
    }
}
