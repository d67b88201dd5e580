//! Typed settings of a consumer, and what they become for the Kafka client.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use rdkafka::ClientConfig;

use crate::error::{Error, ErrorKind};

/// Where a partition begins for which the group has no committed offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Start {
    /// At its first record: nothing is left out.
    #[default]
    Earliest,
    /// At its end: what was produced before is left out.
    Latest,
}

/// What to do when the committed offset of a partition no longer exists, because retention removed records that were never
/// handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnOffsetLost {
    /// End with an error that names the partition: records are lost, and a person should know.
    #[default]
    Stop,
    /// Say so, and go on at the first record that is still there.
    Earliest,
    /// Say so, and go on at the end.
    Latest,
}

/// The settings of one consumer, with their defaults.
#[derive(Clone)]
pub(crate) struct Config {
    pub brokers: Option<String>,
    pub group: Option<String>,
    pub start: Start,
    pub on_offset_lost: OnOffsetLost,
    /// Records in memory per partition that are received and not decided, at most.
    pub run_ahead: usize,
    /// Bytes of records in memory over all partitions, at most (beyond one record).
    pub run_ahead_bytes: usize,
    /// Atomic handlers: records of a partition that run carefully after it was assigned.
    pub careful_records: usize,
    /// Messages in one transaction or claim, at most.
    pub batch: usize,
    /// Atomic batches in flight at once, each on a connection of its own.
    pub transactions: usize,
    /// Lease-mode handlers at once.
    pub concurrency: usize,
    /// How long handlers may go on after the consumer was asked to end.
    pub drain_timeout: Duration,
    /// How long handlers of a revoked partition may go on before the partition is given up.
    pub revoke_timeout: Duration,
    /// Pause between two offset commits.
    pub commit_interval: Duration,
    /// End once nothing was left to do for so long.
    pub until_idle: Option<Duration>,
    /// Topic of dead letters, with `{topic}` and `{consumer}`.
    pub dead_letter_topic: String,
    /// Passed to the Kafka client as they are.
    pub librdkafka: BTreeMap<String, String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            brokers: None,
            group: None,
            start: Start::default(),
            on_offset_lost: OnOffsetLost::default(),
            run_ahead: 2_000,
            run_ahead_bytes: 32 << 20,
            careful_records: 100,
            batch: 128,
            transactions: 4,
            concurrency: 64,
            drain_timeout: Duration::from_secs(25),
            revoke_timeout: Duration::from_secs(10),
            commit_interval: Duration::from_millis(100),
            until_idle: None,
            dead_letter_topic: "{topic}-{consumer}-dlt".to_owned(),
            librdkafka: BTreeMap::new(),
        }
    }
}

/// Settings of the client that idem's guarantees rest on, and what they must be.
const OURS: &[(&str, &str, &str)] = &[
    ("enable.auto.commit", "false", "idem commits an offset only after its outcome is in the database"),
    ("enable.auto.offset.store", "false", "idem commits an offset only after its outcome is in the database"),
    ("auto.offset.reset", "error", "use `start` and `on_offset_lost`, which never skip silently"),
    ("enable.partition.eof", "true", "idem needs the end of a partition to bring lag to zero"),
];

/// Settings that must come by idem's own name, so that there is one place for each.
const BY_NAME: &[(&str, &str)] =
    &[("bootstrap.servers", "brokers"), ("metadata.broker.list", "brokers"), ("group.id", "group")];

impl Config {
    /// Everything that is missing or clashes, one sentence each, naming the settings.
    pub fn clashes(&self) -> Vec<String> {
        let mut clashes = Vec::new();
        for (missing, name, variable) in [
            (is_unset(&self.brokers), "brokers", "IDEM__KAFKA__BROKERS"),
            (is_unset(&self.group), "group", "IDEM__KAFKA__GROUP"),
        ] {
            if missing {
                clashes.push(format!("`kafka.{name}` is not set: set {variable} or call `.{name}(…)`"));
            }
        }
        for (key, value) in &self.librdkafka {
            if let Some((_, must_be, why)) = OURS.iter().find(|(ours, ..)| ours == key)
                && value != must_be
            {
                clashes.push(format!("`kafka.librdkafka` sets {key}={value}, but it must be {must_be}: {why}"));
            }
            if let Some((_, ours)) = BY_NAME.iter().find(|(theirs, _)| theirs == key) {
                clashes.push(format!("`kafka.librdkafka` sets {key}: use `kafka.{ours}` instead"));
            }
        }
        for (name, value) in [
            ("batch", self.batch),
            ("transactions", self.transactions),
            ("concurrency", self.concurrency),
            ("run_ahead", self.run_ahead),
            ("run_ahead_bytes", self.run_ahead_bytes),
        ] {
            if value == 0 {
                clashes.push(format!("`kafka.{name}` is 0: nothing would ever be handled"));
            }
        }
        if self.batch > MAX_BATCH {
            clashes.push(format!(
                "`kafka.batch` is {}, more than {MAX_BATCH}: transactions would hold locks for too long",
                self.batch
            ));
        }
        let max_poll: Option<u64> = self.librdkafka.get("max.poll.interval.ms").and_then(|value| value.parse().ok());
        if let Some(max_poll) = max_poll.map(Duration::from_millis)
            && self.revoke_timeout >= max_poll
        {
            clashes.push(format!(
                "`kafka.revoke_timeout` {:?} is not below `kafka.librdkafka` max.poll.interval.ms={}: the member would be removed while it drains",
                self.revoke_timeout,
                max_poll.as_millis()
            ));
        }
        clashes
    }

    /// The consumer's client settings.
    pub fn consumer(&self) -> ClientConfig {
        let mut config = self.common();
        config.set("group.id", self.group.as_deref().unwrap_or_default());
        // Default 10 s: after a broker's restart the group would stand still for as long.
        config.set("reconnect.backoff.max.ms", "1000");
        config.set("fetch.wait.max.ms", "100");
        config.set("topic.metadata.refresh.interval.ms", "30000");
        // Per partition: librdkafka's default of 64 MiB would be most of the memory with a few partitions.
        config.set("queued.max.messages.kbytes", "4096");
        config.set("queued.min.messages", "5000");
        config.set("fetch.max.bytes", "16777216");
        let new_protocol = self.librdkafka.get("group.protocol").is_some_and(|protocol| protocol == "consumer");
        if !new_protocol {
            config.set("session.timeout.ms", "45000");
            config.set("partition.assignment.strategy", "cooperative-sticky");
        }
        for (key, value) in &self.librdkafka {
            config.set(key, value);
        }
        for (key, value, _) in OURS {
            config.set(*key, *value);
        }
        config
    }

    /// The dead-letter producer's client settings.
    pub fn producer(&self) -> ClientConfig {
        let mut config = self.common();
        for (key, value) in &self.librdkafka {
            if is_connection_setting(key) {
                config.set(key, value);
            }
        }
        config.set("enable.idempotence", "true");
        config.set("acks", "all");
        config.set("message.timeout.ms", "30000");
        // Whatever could be consumed can be set aside: the topic's own limit decides.
        config.set("message.max.bytes", "104857600");
        // Each letter on its own: a topic's limit applies to what is sent together, and would refuse good ones.
        config.set("batch.num.messages", "1");
        config.set("reconnect.backoff.max.ms", "1000");
        config
    }

    fn common(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.brokers.as_deref().unwrap_or_default());
        config.set("client.id", "idem");
        config
    }

    pub fn dead_letter_topic(&self, topic: &str, consumer: &str) -> String {
        self.dead_letter_topic.replace("{topic}", topic).replace("{consumer}", consumer)
    }
}

const MAX_BATCH: usize = 1_000;

fn is_unset(setting: &Option<String>) -> bool {
    setting.as_ref().is_none_or(|text| text.trim().is_empty())
}

fn is_connection_setting(key: &str) -> bool {
    [
        "ssl.",
        "sasl.",
        "security.",
        "socket.",
        "broker.address.",
        "client.",
        "enable.ssl.",
        "enable.sasl.",
        "debug",
        "log",
    ]
    .iter()
    .any(|prefix| key.starts_with(prefix))
}

/// Reads `key=value;key=value`.
pub(crate) fn parse_librdkafka(text: &str) -> Result<BTreeMap<String, String>, Error> {
    let mut settings = BTreeMap::new();
    for pair in text.split(';').map(str::trim).filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').ok_or_else(|| {
            Error::new(
                ErrorKind::Configuration,
                format!("`kafka.librdkafka`: expected key=value;key=value, found {pair:?}"),
            )
        })?;
        settings.insert(key.trim().to_owned(), value.trim().to_owned());
    }
    Ok(settings)
}

/// Passwords and keys stay out of logs and error texts.
impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let librdkafka: BTreeMap<_, _> = self
            .librdkafka
            .iter()
            .map(|(key, value)| (key, if is_secret(key) { "***" } else { value.as_str() }))
            .collect();
        f.debug_struct("Config")
            .field("brokers", &self.brokers)
            .field("group", &self.group)
            .field("start", &self.start)
            .field("librdkafka", &librdkafka)
            .finish_non_exhaustive()
    }
}

fn is_secret(key: &str) -> bool {
    ["password", "secret", "key.pem", "jaas", "token"].iter().any(|word| key.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete() -> Config {
        Config { brokers: Some("127.0.0.1:9092".into()), group: Some("g".into()), ..Config::default() }
    }

    #[test]
    fn a_complete_configuration_has_no_clashes() {
        assert_eq!(complete().clashes(), Vec::<String>::new());
    }

    #[test]
    fn auto_commit_and_whatever_the_guarantees_rest_on_is_refused() {
        for (key, value) in [
            ("enable.auto.commit", "true"),
            ("enable.auto.offset.store", "true"),
            ("auto.offset.reset", "earliest"),
            ("enable.partition.eof", "false"),
            ("group.id", "x"),
            ("bootstrap.servers", "x"),
        ] {
            let mut config = complete();
            config.librdkafka.insert(key.into(), value.into());
            let clashes = config.clashes();
            assert_eq!(clashes.len(), 1, "{key}");
            assert!(clashes[0].contains(key), "{clashes:?}");
        }
    }

    #[test]
    fn all_clashes_come_at_once() {
        let config = Config { batch: 0, concurrency: 0, ..Config::default() };
        assert_eq!(config.clashes().len(), 4);
    }

    #[test]
    fn an_empty_setting_is_not_set() {
        let config = Config { brokers: Some(String::new()), ..complete() };
        assert!(config.clashes()[0].contains("IDEM__KAFKA__BROKERS"));
    }

    #[test]
    fn secrets_are_not_shown() {
        let mut config = complete();
        config.librdkafka = parse_librdkafka("sasl.password=hunter2; sasl.username = me").unwrap();
        let shown = format!("{config:?}");
        assert!(!shown.contains("hunter2") && shown.contains("me"), "{shown}");
    }

    #[test]
    fn a_malformed_pass_through_is_named() {
        assert!(parse_librdkafka("a=1;b").unwrap_err().to_string().contains("\"b\""));
    }
}
