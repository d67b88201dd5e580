//! What the tests of the runtime share: a broker, a producer, a reader, and waiting for conditions.

#![allow(dead_code, reason = "each test file uses its own part")]

pub mod switchable;

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_core::store::MemoryStore;
use idem_kafka::embedded::Broker;
use idem_kafka::{App, Error, Stats, Summary};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// How long a condition may take before the test fails. Long: it only matters when something is wrong.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Waits until `condition` holds; fails with `what` otherwise.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let holds = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(tokio::time::timeout(DEADLINE, holds).await.is_ok(), "not within {DEADLINE:?}: {what}");
}

/// An event of the tests: what to do is written in it.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Event {
    pub id: String,
    pub amount: i64,
}

/// What handlers did, by key. Counts effects as the outside world would see them.
#[derive(Clone, Default)]
pub struct Effects(Arc<Mutex<HashMap<String, u32>>>);

impl Effects {
    pub fn add(&self, id: &str) {
        *self.0.lock().unwrap().entry(id.to_owned()).or_default() += 1;
    }

    pub fn of(&self, id: &str) -> u32 {
        self.0.lock().unwrap().get(id).copied().unwrap_or_default()
    }

    pub fn keys(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub fn all_once(&self) -> bool {
        self.0.lock().unwrap().values().all(|times| *times == 1)
    }
}

/// A dead letter's headers, by name.
pub type LetterHeaders = HashMap<String, String>;

/// One topic with its dead-letter topic, on a broker of its own.
pub struct Bed {
    pub broker: Broker,
    pub topic: String,
    pub consumer: &'static str,
    pub partitions: i32,
    producer: FutureProducer,
}

impl Bed {
    pub fn new(consumer: &'static str, partitions: i32) -> Self {
        let broker = Broker::start().unwrap();
        let topic = "events".to_owned();
        broker.create_topic(&topic, partitions).unwrap();
        broker.create_topic(&format!("{topic}-{consumer}-dlt"), partitions).unwrap();
        let producer = ClientConfig::new().set("bootstrap.servers", broker.bootstrap()).create().unwrap();
        Self { broker, topic, consumer, partitions, producer }
    }

    /// An application on this broker, with a group of its own and the new group protocol: rebalances take milliseconds.
    pub fn app(&self) -> App {
        App::builder()
            .brokers(self.broker.bootstrap())
            .group("group")
            .commit_interval(Duration::from_millis(20))
            .librdkafka("group.protocol", "consumer")
            .librdkafka("fetch.wait.max.ms", "10")
    }

    pub async fn send(&self, partition: i32, event: &Event) {
        self.send_raw(partition, Some(&serde_json::to_vec(event).unwrap()), &[]).await;
    }

    pub async fn send_raw(&self, partition: i32, payload: Option<&[u8]>, headers: &[(&str, &[u8])]) {
        let mut all = OwnedHeaders::new();
        for (key, value) in headers {
            all = all.insert(Header { key, value: Some(*value) });
        }
        let mut record = FutureRecord::<[u8], [u8]>::to(&self.topic).partition(partition).headers(all);
        record.payload = payload;
        self.producer.send(record, Duration::from_secs(10)).await.unwrap();
    }

    /// The group's committed offset and the end, for each partition.
    pub fn offsets(&self) -> Vec<(i64, i64)> {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", self.broker.bootstrap())
            .set("group.id", "group")
            .create()
            .unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition_range(&self.topic, 0, self.partitions - 1);
        let committed = consumer.committed_offsets(list, Duration::from_secs(5)).unwrap();
        let timeout = Duration::from_secs(5);
        let of = |element: &rdkafka::topic_partition_list::TopicPartitionListElem<'_>| {
            let committed = if let Offset::Offset(offset) = element.offset() { offset } else { -1 };
            (committed, consumer.fetch_watermarks(&self.topic, element.partition(), timeout).unwrap().1)
        };
        committed.elements().iter().map(of).collect()
    }

    pub async fn all_committed(&self) {
        eventually("all offsets are committed", async || {
            self.offsets().iter().all(|(committed, end)| committed == end)
        })
        .await;
    }

    /// The dead letters so far: headers and body.
    pub fn dead_letters(&self) -> Vec<(LetterHeaders, Option<Vec<u8>>)> {
        let topic = format!("{}-{}-dlt", self.topic, self.consumer);
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", self.broker.bootstrap())
            .set("group.id", "reader")
            .set("fetch.wait.max.ms", "10")
            .create()
            .unwrap();
        let mut list = TopicPartitionList::new();
        let mut left = 0;
        for partition in 0..self.partitions {
            list.add_partition_offset(&topic, partition, Offset::Beginning).unwrap();
            left += consumer.fetch_watermarks(&topic, partition, Duration::from_secs(5)).unwrap().1;
        }
        consumer.assign(&list).unwrap();
        let mut letters = Vec::new();
        while left > 0 {
            let Some(Ok(message)) = consumer.poll(Duration::from_secs(5)) else {
                panic!("{left} dead letters are missing")
            };
            let mut headers = HashMap::new();
            for header in message.headers().unwrap().iter() {
                headers.insert(header.key.to_owned(), String::from_utf8(header.value.unwrap().to_vec()).unwrap());
            }
            letters.push((headers, message.payload().map(<[u8]>::to_vec)));
            left -= 1;
        }
        letters
    }
}

/// An application that runs beside the test.
pub struct Running {
    pub stats: Stats,
    shutdown: CancellationToken,
    task: JoinHandle<Result<Summary, Error>>,
}

impl Running {
    pub fn start(app: App) -> Self {
        // `RUST_LOG=debug` shows what it does. Only the first one of a process sets it up.
        let log = tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env());
        log.with_test_writer().try_init().ok();
        let shutdown = CancellationToken::new();
        let app = app.shutdown(shutdown.clone());
        let stats = app.stats();
        Self { stats, shutdown, task: tokio::spawn(app.run()) }
    }

    /// Asks it to end, as SIGTERM does.
    pub async fn stop(self) -> Result<Summary, Error> {
        self.shutdown.cancel();
        self.task.await.unwrap()
    }

    /// Drops it, as a crash does.
    pub async fn crash(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }

    /// Waits until it ends by itself.
    pub async fn ended(self) -> Result<Summary, Error> {
        tokio::time::timeout(DEADLINE, self.task).await.expect("it ends by itself").unwrap()
    }
}

/// A store in memory, to be shared by several applications of one test.
pub fn memory() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::default())
}
