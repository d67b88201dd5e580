//! A Kafka broker inside this process, for demonstrations and tests.
//!
//! It is librdkafka's mock cluster: consumer groups, commits and rebalances are real enough for workers of other processes
//! to use it, but nothing is written to disk, a partition keeps 5 MiB or 100 000 batches at most (the oldest are dropped),
//! and transactions are not modelled.

use std::ffi::CString;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::bindings as sys;
use rdkafka::producer::{BaseProducer, Producer};

use crate::error::{Error, ErrorKind};

/// A running broker. Dropping it ends it.
///
/// ```
/// use idem_kafka::embedded::Broker;
///
/// let broker = Broker::start()?;
/// broker.create_topic("orders.paid", 6)?;
/// println!("listening on {}", broker.bootstrap());
/// # Ok::<(), idem_kafka::Error>(())
/// ```
pub struct Broker {
    #[expect(dead_code, reason = "owns the cluster")]
    producer: BaseProducer,
    cluster: *mut sys::rd_kafka_mock_cluster_t,
    bootstrap: String,
}

// SAFETY: the cluster's functions take its own lock, and the pointer lives as long as the producer.
unsafe impl Send for Broker {}
// SAFETY: as above.
unsafe impl Sync for Broker {}

impl Broker {
    /// Starts one broker on a free port of 127.0.0.1, with waits that suit a demonstration: groups form at once, and a member
    /// of the new group protocol that was killed is noticed after two seconds.
    ///
    /// # Errors
    /// The client could not be made.
    pub fn start() -> Result<Self, Error> {
        let producer: BaseProducer = ClientConfig::new()
            .set("test.mock.num.brokers", "1")
            .create()
            .map_err(|error| Error::with_cause(ErrorKind::Failed, "the embedded broker did not start", error))?;
        let bootstrap = producer.client().mock_cluster().map(|cluster| cluster.bootstrap_servers());
        // SAFETY: the producer is alive; the answer is checked.
        let cluster = unsafe { sys::rd_kafka_handle_mock_cluster(producer.client().native_ptr()) };
        let (Some(bootstrap), false) = (bootstrap, cluster.is_null()) else {
            return Err(Error::new(ErrorKind::Failed, "the embedded broker did not start"));
        };
        let broker = Self { producer, cluster, bootstrap };
        // SAFETY: `cluster` is alive as long as `producer`.
        unsafe { sys::rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, 0) };
        broker.group_sessions(Duration::from_secs(2), Duration::from_millis(200));
        Ok(broker)
    }

    /// Where clients connect, as `host:port`.
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Session time-out and heartbeat of members that use the new group protocol.
    pub fn group_sessions(&self, session: Duration, heartbeat: Duration) {
        let millis = |duration: Duration| i32::try_from(duration.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: `cluster` is alive as long as `producer`.
        unsafe {
            sys::rd_kafka_mock_set_group_consumer_session_timeout_ms(self.cluster, millis(session));
            sys::rd_kafka_mock_set_group_consumer_heartbeat_interval_ms(self.cluster, millis(heartbeat));
        }
    }

    /// Creates a topic.
    ///
    /// # Errors
    /// The name has a NUL character, or the cluster refused it.
    pub fn create_topic(&self, name: &str, partitions: i32) -> Result<(), Error> {
        let failed =
            || Error::new(ErrorKind::Failed, format!("the embedded broker could not create the topic {name:?}"));
        let name = CString::new(name).map_err(|_| failed())?;
        // SAFETY: `cluster` is alive as long as `producer`; the name is copied.
        let refused = unsafe { sys::rd_kafka_mock_topic_create(self.cluster, name.as_ptr(), partitions, 1) };
        if refused == sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR { Ok(()) } else { Err(failed()) }
    }

    /// Refuses a topic to everyone, as a broker does that grants no rights on it; and grants it again.
    ///
    /// # Errors
    /// The name has a NUL character.
    pub fn refuse_topic(&self, name: &str, refuse: bool) -> Result<(), Error> {
        let name = CString::new(name)
            .map_err(|_| Error::new(ErrorKind::Failed, format!("{name:?} cannot be the name of a topic")))?;
        let answer = if refuse {
            sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED
        } else {
            sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR
        };
        // SAFETY: `cluster` is alive as long as `producer`; the name is copied.
        unsafe { sys::rd_kafka_mock_topic_set_error(self.cluster, name.as_ptr(), answer) };
        Ok(())
    }

    /// Takes the broker off the network, and brings it back: an outage.
    pub fn set_down(&self, down: bool) {
        const ALL: i32 = -1;
        // SAFETY: `cluster` is alive as long as `producer`.
        unsafe {
            if down {
                sys::rd_kafka_mock_broker_set_down(self.cluster, ALL);
            } else {
                sys::rd_kafka_mock_broker_set_up(self.cluster, ALL);
            }
        }
    }
}

impl std::fmt::Debug for Broker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Broker").field("bootstrap", &self.bootstrap).finish_non_exhaustive()
    }
}
