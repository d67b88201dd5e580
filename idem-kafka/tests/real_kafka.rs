//! The runtime on Apache Kafka and PostgreSQL: what the in-process broker fakes or lacks.
//!
//! Addresses come from `IDEM_TEST_KAFKA_BROKERS` and `IDEM_TEST_POSTGRES_URL`; `scripts/test` sets both. Every test has a
//! topic, a group and a schema of its own.

mod support;

use std::sync::Arc;
use std::time::Duration;

use idem_core::store::{Store, StoreOptions, connect};
use idem_kafka::prelude::*;
use idem_kafka::{ErrorKind, OnOffsetLost};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaResult;
use rdkafka::producer::{BaseProducer, BaseRecord, FutureProducer, FutureRecord, Producer};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use sqlx::PgConnection;
use support::{Event, Running, eventually};

const TIMEOUT: Duration = Duration::from_secs(20);

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run `scripts/test`, or start servers with `scripts/services up` and `eval \"$(scripts/services env)\"`"))
}

/// The database, with a schema of that name.
fn schema_url(name: &str) -> String {
    let database = variable("IDEM_TEST_POSTGRES_URL");
    let separator = if database.contains('?') { '&' } else { '?' };
    format!("{database}{separator}options=-c%20search_path%3D{name}")
}

/// A topic, a group and a schema of one test.
struct Bed {
    brokers: String,
    name: String,
    partitions: i32,
    pool: sqlx::PgPool,
    store: Arc<dyn Store>,
}

impl Bed {
    async fn new(test: &str, partitions: i32) -> Self {
        let brokers = variable("IDEM_TEST_KAFKA_BROKERS");
        let name = format!("{test}_{}", uuid::Uuid::new_v4().simple());
        let url = schema_url(&name);
        let pool = sqlx::PgPool::connect(&url).await.expect("PostgreSQL answers");
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!(
            "CREATE SCHEMA {name}; CREATE TABLE {name}.effects (id text NOT NULL, number bigint GENERATED ALWAYS AS IDENTITY)"
        )))
        .execute(&pool)
        .await
        .unwrap();
        let store = connect(&url, &StoreOptions::default()).await.unwrap();
        let bed = Self { brokers, name, partitions, pool, store };
        bed.create_topic(&bed.name).await;
        bed.create_topic(&format!("{}-recorded-dlt", bed.name)).await;
        bed
    }

    fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.brokers).set("group.id", &self.name);
        config
    }

    fn admin(&self) -> AdminClient<DefaultClientContext> {
        self.client().create().unwrap()
    }

    async fn create_topic(&self, name: &str) {
        let topic = NewTopic::new(name, self.partitions, TopicReplication::Fixed(1));
        let created = self.admin().create_topics([&topic], &AdminOptions::new().operation_timeout(Some(TIMEOUT))).await;
        created.expect("Kafka answers").pop().unwrap().expect("the topic is new");
    }

    fn app(&self) -> App {
        App::builder().brokers(&self.brokers).group(&self.name).store(self.store.clone()).handle(&self.name, recorded)
    }

    async fn send(&self, numbers: std::ops::Range<u32>) {
        let producer: FutureProducer = self.client().set("linger.ms", "5").create().unwrap();
        let sends = numbers.map(|number| {
            let event = Event { id: format!("job-{number}"), amount: 1 };
            let payload = serde_json::to_vec(&event).unwrap();
            let producer = &producer;
            async move {
                let record = FutureRecord::<[u8], _>::to(&self.name)
                    .payload(&payload)
                    .partition(number as i32 % self.partitions);
                producer.send(record, TIMEOUT).await.unwrap();
            }
        });
        futures_util::future::join_all(sends).await;
    }

    async fn send_one(&self, id: &str) {
        let producer: FutureProducer = self.client().create().unwrap();
        let payload = serde_json::to_vec(&Event { id: id.to_owned(), amount: 1 }).unwrap();
        let record = FutureRecord::<[u8], _>::to(&self.name).payload(&payload).partition(0);
        producer.send(record, TIMEOUT).await.unwrap();
    }

    /// The group's committed offset and the end, for each partition.
    ///
    /// # Errors
    /// The broker cannot say now: the coordinator of a new broker's first group takes a moment to be there.
    fn offsets(&self) -> KafkaResult<Vec<(i64, i64)>> {
        let consumer: BaseConsumer = self.client().create().unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition_range(&self.name, 0, self.partitions - 1);
        let committed = consumer.committed_offsets(list, TIMEOUT)?;
        let of = |element: &rdkafka::topic_partition_list::TopicPartitionListElem<'_>| {
            let committed = if let Offset::Offset(offset) = element.offset() { offset } else { -1 };
            Ok((committed, consumer.fetch_watermarks(&self.name, element.partition(), TIMEOUT)?.1))
        };
        committed.elements().iter().map(of).collect()
    }

    async fn all_committed(&self) {
        eventually("all offsets are committed", async || {
            let offsets = tokio::task::block_in_place(|| self.offsets());
            offsets.is_ok_and(|offsets| offsets.iter().all(|(committed, end)| committed == end))
        })
        .await;
    }

    /// How often each effect is there, as (distinct, all).
    async fn effects(&self) -> (i64, i64) {
        sqlx::query_as("SELECT count(DISTINCT id), count(*) FROM effects").fetch_one(&self.pool).await.unwrap()
    }
}

/// No constraint on its table: a second effect would be seen.
#[idempotent(key = "id", consumer = "recorded")]
async fn recorded(event: Event, tx: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query("INSERT INTO effects (id) VALUES ($1)").bind(&event.id).execute(tx).await?;
    Ok(())
}

/// Members come and go while messages flow; every effect is there once, and every offset is committed.
async fn members_come_and_go(test: &str, settings: &[(&str, &str)]) {
    let bed = Bed::new(test, 6).await;
    let app = || settings.iter().fold(bed.app(), |app, (key, value)| app.librdkafka(*key, *value));
    let mut members = vec![Running::start(app())];
    let mut left = Vec::new();
    for round in 0..6 {
        bed.send(round * 500..(round + 1) * 500).await;
        match round % 3 {
            0 | 1 => members.push(Running::start(app())),
            // In turn by asking and by dropping, as a crash: its session has to run out, so only at the end.
            _ => left.push(members.remove(0).stop().await.unwrap()),
        }
        let before: u64 = members.iter().map(|member| member.stats.snapshot().completed).sum();
        eventually("work goes on", async || {
            members.iter().map(|member| member.stats.snapshot().completed).sum::<u64>() > before
                || bed.effects().await.0 == i64::from((round + 1) * 500)
        })
        .await;
    }
    // Everything twice: duplicates from other offsets.
    bed.send(0..1000).await;
    bed.all_committed().await;
    assert_eq!(bed.effects().await, (3000, 3000), "{left:?}");
    for member in members {
        member.stop().await.unwrap();
    }
    bed.all_committed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn c3_members_come_and_go_in_a_cooperative_group() {
    members_come_and_go("cooperative", &[("heartbeat.interval.ms", "300"), ("session.timeout.ms", "6000")]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn c3_members_come_and_go_in_an_eager_group() {
    let settings =
        [("partition.assignment.strategy", "range"), ("heartbeat.interval.ms", "300"), ("session.timeout.ms", "6000")];
    members_come_and_go("eager", &settings).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn c3_members_come_and_go_with_the_new_protocol() {
    members_come_and_go("kip848", &[("group.protocol", "consumer")]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_transactional_topic_is_reached() {
    let bed = Bed::new("transactional", 1).await;
    let running = Running::start(bed.app().librdkafka("isolation.level", "read_committed"));
    let name = bed.name.clone();
    let producer: BaseProducer = bed.client().set("transactional.id", &name).create().unwrap();
    tokio::task::spawn_blocking(move || {
        producer.init_transactions(TIMEOUT).unwrap();
        for (number, commits) in [(0, true), (1, false), (2, true)] {
            producer.begin_transaction().unwrap();
            for part in 0..5 {
                let event = Event { id: format!("job-{number}-{part}"), amount: 1 };
                let payload = serde_json::to_vec(&event).unwrap();
                producer.send(BaseRecord::<[u8], _>::to(&name).payload(&payload).partition(0)).unwrap();
            }
            if commits {
                producer.commit_transaction(TIMEOUT).unwrap();
            } else {
                // Records that were never sent are not aborted, but gone.
                producer.flush(TIMEOUT).unwrap();
                producer.abort_transaction(TIMEOUT).unwrap();
            }
        }
    })
    .await
    .unwrap();
    eventually("what was committed is handled", async || bed.effects().await.0 == 10).await;
    bed.all_committed().await;
    assert_eq!(bed.offsets().unwrap(), [(18, 18)], "15 records and 3 markers");
    running.stop().await.unwrap();
    assert_eq!(bed.effects().await, (10, 10));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_offset_that_is_gone_is_never_skipped_silently() {
    let bed = Bed::new("gone", 1).await;
    bed.send(0..10).await;
    let running = Running::start(bed.app());
    bed.all_committed().await;
    running.stop().await.unwrap();
    bed.send(10..30).await;
    let mut before = TopicPartitionList::new();
    before.add_partition_offset(&bed.name, 0, Offset::Offset(20)).unwrap();
    bed.admin().delete_records(&before, &AdminOptions::new().operation_timeout(Some(TIMEOUT))).await.unwrap();

    let error = Running::start(bed.app()).ended().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains(&format!("offset 10 of {}/0", bed.name)), "{error}");

    let running = Running::start(bed.app().on_offset_lost(OnOffsetLost::Earliest));
    bed.all_committed().await;
    running.stop().await.unwrap();
    assert_eq!(bed.effects().await, (20, 20), "10 before, 10 after, 10 lost and said");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_created_anew_is_read_from_its_beginning() {
    let bed = Bed::new("anew", 1).await;
    let app = bed.app().librdkafka("topic.metadata.refresh.interval.ms", "1000");
    let running = Running::start(app.on_offset_lost(OnOffsetLost::Earliest));
    bed.send(0..5).await;
    bed.all_committed().await;
    bed.admin().delete_topics(&[&bed.name], &AdminOptions::new().operation_timeout(Some(TIMEOUT))).await.unwrap();
    eventually("the topic can be created again", async || {
        let topic = NewTopic::new(&bed.name, 1, TopicReplication::Fixed(1));
        let created = bed.admin().create_topics([&topic], &AdminOptions::new().operation_timeout(Some(TIMEOUT))).await;
        created.unwrap().pop().unwrap().is_ok()
    })
    .await;
    bed.send(5..8).await;
    eventually("the new life's records are handled", async || bed.effects().await.0 == 8).await;
    bed.all_committed().await;
    running.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_at_start_is_named() {
    let bed = Bed::new("missing", 1).await;
    let app = |topic: &str| {
        App::builder().brokers(&bed.brokers).group(&bed.name).store(bed.store.clone()).handle(topic, recorded)
    };
    let error = app("there-is-no-such-topic").run().await.unwrap_err();
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::NotFound, 3));
    assert!(error.to_string().contains("there-is-no-such-topic"), "{error}");

    let error = app(&bed.name).brokers("127.0.0.1:1").run().await.unwrap_err();
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Unreachable, 6));
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");

    let store = "postgres://nobody@127.0.0.1:1/nothing";
    let error =
        App::builder().brokers(&bed.brokers).group("g").store_url(store).handle(&bed.name, recorded).run().await;
    assert_eq!(error.unwrap_err().exit_code(), 6);
}

/// Ends its process where the event says so, as a bug in native code or the kernel's memory killer would.
#[idempotent(key = "id", consumer = "recorded", attempts = 3, lease = "500ms")]
async fn deadly(event: Event, tx: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query("INSERT INTO effects (id) VALUES ($1)").bind(&event.id).execute(tx).await?;
    if event.id == "deadly" {
        std::process::abort();
    }
    Ok(())
}

const CHILD: &str = "IDEM_TEST_DEADLY_CHILD";

/// Not a test of its own: the process that [`a_message_that_kills_its_process_runs_out_of_attempts`] starts.
#[tokio::test(flavor = "multi_thread")]
async fn deadly_child() {
    let Ok(name) = std::env::var(CHILD) else { return };
    let url = schema_url(&name);
    let store = connect(&url, &StoreOptions::default()).await.unwrap();
    let app = App::builder().brokers(variable("IDEM_TEST_KAFKA_BROKERS")).group(&name).store(store);
    let app = app
        .handle(&name, deadly)
        .careful_records(20)
        // A member that died must not keep its partition for long.
        .librdkafka("session.timeout.ms", "6000")
        .librdkafka("heartbeat.interval.ms", "300")
        .until_idle(Duration::from_secs(1));
    Running::start(app).ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn c2_a_message_that_kills_its_process_runs_out_of_attempts() {
    let bed = Bed::new("deadly", 1).await;
    bed.send(0..70).await;
    bed.send_one("deadly").await;
    bed.send(70..140).await;
    // Two restarts at most to get near it, and one for each of its attempts.
    let mut deaths = 0;
    loop {
        let mut child = tokio::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "deadly_child"]).env(CHILD, &bed.name).kill_on_drop(true);
        child.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        let status = tokio::time::timeout(Duration::from_secs(120), child.status()).await.expect("it ends").unwrap();
        if status.success() {
            break;
        }
        deaths += 1;
        assert!(deaths < 12, "it dies for ever");
    }
    assert!(deaths >= 3, "each of its attempts killed a process, but there were {deaths} deaths");
    assert_eq!(bed.effects().await, (140, 140), "its neighbours took effect once");
    let attempts: Vec<(String, i32, i64)> =
        sqlx::query_as("SELECT status, attempts, count(*) FROM processed_jobs GROUP BY 1, 2 ORDER BY 1, 2")
            .fetch_all(&bed.pool)
            .await
            .unwrap();
    assert_eq!(attempts, [("COMPLETED".to_owned(), 1, 140), ("FAILED".to_owned(), 3, 1)], "no neighbour lost a try");
    bed.all_committed().await;
}
