//! The thread that polls the Kafka client: everything that blocks, calls back or must be closed on one thread happens here.
//! It reads, commits and answers rebalances as it is told, and reports what occurs; it decides nothing.

use std::collections::HashMap;
use std::ffi::CString;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use idem_core::{Clock, HeaderList, SystemClock};
use rdkafka::bindings as sys;
use rdkafka::consumer::{BaseConsumer, Consumer, RebalanceProtocol};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use super::rebalance::{Callback, Context, answer_assign, answer_revoke, wake};
use super::{Occurrence, commit};
use crate::assignment::PartitionId;
use crate::config::{Config, OnOffsetLost, Start};
use crate::error::{Error, ErrorKind};
use crate::record::Record;

/// What the thread reports.
#[derive(Debug)]
pub(super) enum Report {
    /// These partitions are ours, each from its committed offset on if it has one.
    Assigned(Vec<(PartitionId, Option<i64>, Arc<Gate>)>),
    /// These partitions are to be drained and released.
    Revoked(Vec<PartitionId>),
    /// These partitions may be somebody else's already: nothing of them counts.
    Lost(Vec<PartitionId>),
    /// Records of one partition, in order.
    Records(PartitionId, Vec<Record>),
    /// There is nothing below this offset left to deliver.
    ReachedEnd(PartitionId, i64),
    /// The broker has answered the commit in flight.
    Committed(KafkaResult<()>),
    /// The offset to read next is not there any more.
    OffsetLost { id: PartitionId, next_offset: i64, reason: String },
    /// The client cannot go on. Everything is lost, without a word to the group.
    Fatal(String),
}

/// What the thread is told.
#[derive(Debug)]
pub(super) enum Command {
    Commit(commit::Offsets),
    /// The revoked partitions are drained, or given up.
    Release,
    /// Leave the group and end.
    Close,
}

/// Lets the thread read one partition, or not. The loop closes it by counting; the thread itself only looks.
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// Records handed over and not yet counted by the loop.
    unseen: AtomicUsize,
    shut: AtomicBool,
}

impl Gate {
    pub fn seen(&self, records: usize) {
        self.unseen.fetch_sub(records, Ordering::AcqRel);
    }

    /// Opens or shuts it; answers whether it was shut and is open now.
    pub fn set_open(&self, open: bool) -> bool {
        self.shut.swap(!open, Ordering::AcqRel) && open
    }
}

/// Bytes of records in memory over all partitions.
pub(super) type Memory = Arc<AtomicU64>;

/// The thread, from the loop's side.
pub(super) struct Driver {
    commands: mpsc::Sender<Command>,
    context: Arc<Context>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Records taken from one partition before the next one's turn.
const PULL: usize = 256;
/// Longest sleep: a lost wake-up costs no more than this.
const IDLE: Duration = Duration::from_millis(50);
/// How long start-up waits for the brokers.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// How long leaving the group may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

impl Driver {
    /// Connects, checks that all `topics` are there, joins the group, and polls from then on.
    ///
    /// # Errors
    /// The client refuses its settings, no broker can be reached or lets us in, or a topic is missing.
    pub async fn start(
        config: &Config,
        topics: Arc<[Arc<str>]>,
        memory: Memory,
        reports: UnboundedSender<Occurrence>,
    ) -> Result<Self, Error> {
        let (commands, orders) = mpsc::channel();
        let (started, starting) = tokio::sync::oneshot::channel();
        let (client, start, on_offset_lost) = (config.consumer(), config.start, config.on_offset_lost);
        let run_ahead_bytes = config.run_ahead_bytes as u64;
        let brokers = config.brokers.clone().unwrap_or_default();
        let thread = std::thread::Builder::new()
            .name("idem-kafka".to_owned())
            .spawn(move || {
                let consumer = match connect(&client, &brokers, &topics) {
                    Ok(consumer) => consumer,
                    // Nobody waits for it any more if the application was dropped meanwhile.
                    Err(error) => return drop(started.send(Err(error))),
                };
                let context = Arc::clone(consumer.context());
                if started.send(Ok(context)).is_err() {
                    return;
                }
                let queues = HashMap::new();
                let poller = Poller {
                    consumer,
                    topics,
                    start,
                    on_offset_lost,
                    memory,
                    run_ahead_bytes,
                    reports,
                    queues,
                    unresolved: None,
                    revoking: None,
                };
                let ended = EndOfThread(poller.reports.clone());
                poller.run(&orders);
                std::mem::forget(ended);
            })
            .map_err(|error| Error::with_cause(ErrorKind::Failed, "the Kafka thread could not be started", error))?;
        let ended = || Error::new(ErrorKind::Failed, "the Kafka thread ended while it started");
        let context = starting.await.map_err(|_| ended())??;
        Ok(Self { commands, context, thread: Some(thread) })
    }

    /// Tells the thread something. It may have ended; then a report has said so.
    pub fn tell(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            self.context.waker.wake();
        }
    }

    pub fn wake(&self) {
        self.context.waker.wake();
    }

    /// Leaves the group and waits for the thread's end.
    pub async fn close(mut self) {
        self.tell(Command::Close);
        if let Some(thread) = self.thread.take() {
            let joined = tokio::task::spawn_blocking(move || thread.join());
            if tokio::time::timeout(CLOSE_TIMEOUT, joined).await.is_err() {
                tracing::warn!("the Kafka client did not close in time; the group will notice by its session timeout");
            }
        }
    }
}

/// Dropped without [`Driver::close`]: the thread ends by itself, without commits.
impl Drop for Driver {
    fn drop(&mut self) {
        self.tell(Command::Close);
    }
}

/// Says so if the thread ends by a panic: the loop must not wait for it.
struct EndOfThread(UnboundedSender<Occurrence>);

impl Drop for EndOfThread {
    fn drop(&mut self) {
        self.0.send(Occurrence::Kafka(Report::Fatal("its thread ended by a panic".to_owned()))).ok();
    }
}

/// A client that has reached a broker and found its topics.
fn connect(client: &ClientConfig, brokers: &str, topics: &[Arc<str>]) -> Result<Arc<BaseConsumer<Context>>, Error> {
    let consumer: BaseConsumer<Context> = client
        .create_with_context(Context::default())
        .map_err(|error| Error::with_cause(ErrorKind::Configuration, "the Kafka client refuses its settings", error))?;
    for topic in topics {
        find_topic(&consumer, brokers, topic)?;
    }
    let names: Vec<&str> = topics.iter().map(|topic| &**topic).collect();
    consumer
        .subscribe(&names)
        .map_err(|error| Error::with_cause(ErrorKind::Configuration, "the topics cannot be subscribed to", error))?;
    Ok(Arc::new(consumer))
}

fn find_topic(consumer: &BaseConsumer<Context>, brokers: &str, topic: &str) -> Result<(), Error> {
    let deadline = SystemClock.monotonic() + START_TIMEOUT;
    loop {
        let asked = consumer.client().fetch_metadata(Some(topic), Duration::from_millis(500));
        if let Some(reason) = consumer.context().refused() {
            return Err(Error::new(ErrorKind::Configuration, format!("the brokers at {brokers} refuse us: {reason}")));
        }
        match asked.as_ref().map(|metadata| metadata.topics().first().and_then(|topic| topic.error())) {
            Ok(None) => return Ok(()),
            Ok(Some(error)) => {
                let code = RDKafkaErrorCode::from(error);
                match code {
                    RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic => {
                        let text =
                            format!("the topic `{topic}` does not exist on {brokers}: create it, or correct its name");
                        return Err(Error::new(ErrorKind::NotFound, text));
                    }
                    RDKafkaErrorCode::TopicAuthorizationFailed => {
                        let text =
                            format!("we may not read the topic `{topic}` on {brokers}: grant Read and Describe on it");
                        return Err(Error::new(ErrorKind::Configuration, text));
                    }
                    RDKafkaErrorCode::InvalidTopic => {
                        let text = format!("`{topic}` cannot be a topic's name");
                        return Err(Error::new(ErrorKind::Configuration, text));
                    }
                    // Leaders are being elected: passes.
                    _ => {}
                }
            }
            Err(_) => {}
        }
        // Serves the error callback, which is where the reason arrives.
        consumer.poll(Duration::ZERO);
        if SystemClock.monotonic() >= deadline {
            let said = consumer.context().last_error().unwrap_or_else(|| "no answer".to_owned());
            let text = format!("no broker at {brokers} could be reached within {} s: {said}", START_TIMEOUT.as_secs());
            return Err(Error::new(ErrorKind::Unreachable, text));
        }
    }
}

struct Poller {
    /// First, so that they are dropped before the client they belong to.
    queues: HashMap<PartitionId, Queue>,
    consumer: Arc<BaseConsumer<Context>>,
    topics: Arc<[Arc<str>]>,
    start: Start,
    on_offset_lost: OnOffsetLost,
    memory: Memory,
    run_ahead_bytes: u64,
    reports: UnboundedSender<Occurrence>,
    /// Partitions that were assigned and whose committed offsets could not be read yet, with the time of the next try.
    unresolved: Option<(TopicPartitionList, Instant)>,
    /// Partitions that the loop is draining.
    revoking: Option<TopicPartitionList>,
}

/// One partition's own queue, split off so that not reading it costs nothing and stops nothing else.
struct Queue {
    queue: *mut sys::rd_kafka_queue_t,
    gate: Arc<Gate>,
    /// Given up to another member: not read any more.
    revoked: bool,
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: got from the client, which is alive: the poller's queues are dropped before it.
        unsafe {
            sys::rd_kafka_queue_cb_event_enable(self.queue, None, ptr::null_mut());
            sys::rd_kafka_queue_destroy(self.queue);
        }
    }
}

/// Whether the thread goes on.
enum Next {
    Go,
    Stop,
}

impl Poller {
    fn run(mut self, orders: &mpsc::Receiver<Command>) {
        self.watch_consumer_queue();
        loop {
            self.serve();
            for callback in self.consumer.context().take() {
                self.rebalance(callback);
            }
            self.resolve_again();
            loop {
                match orders.try_recv() {
                    Ok(command) => {
                        if let Next::Stop = self.obey(command) {
                            return self.close();
                        }
                    }
                    Err(mpsc::TryRecvError::Empty) => break,
                    Err(mpsc::TryRecvError::Disconnected) => return self.close(),
                }
            }
            if let Some((code, text)) = self.consumer.client().fatal_error() {
                self.report(Report::Fatal(format!("{code}: {text}")));
                return self.close();
            }
            if !self.read() {
                self.consumer.context().waker.wait(IDLE);
            }
        }
    }

    /// Callbacks, answers and errors. Records never come this way: each partition has its own queue.
    fn serve(&self) {
        // An answered rebalance or commit ends a poll early, so there may be more behind it.
        for _ in 0..16 {
            match self.consumer.poll(Duration::ZERO) {
                None => {}
                Some(Err(error)) => self.say(&error),
                Some(Ok(message)) => {
                    use rdkafka::Message;
                    tracing::error!(
                        topic = message.topic(),
                        partition = message.partition(),
                        offset = message.offset(),
                        "a record came outside its partition's queue; it stays uncommitted"
                    );
                }
            }
        }
    }

    /// The client recovers from these by itself; people should see them all the same.
    fn say(&self, error: &KafkaError) {
        match error.rdkafka_error_code() {
            Some(
                RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::AllBrokersDown
                | RDKafkaErrorCode::OperationTimedOut,
            ) => tracing::debug!(errorMessage = %error, "kafka connection"),
            _ => tracing::warn!(errorMessage = %error, "kafka"),
        }
    }

    fn rebalance(&mut self, callback: Callback) {
        match callback {
            Callback::Assign(partitions) => self.resolve(partitions),
            Callback::Revoke { partitions, lost } => self.revoke(partitions, lost),
            Callback::Committed(result) => self.report(Report::Committed(result)),
        }
    }

    /// Takes new partitions on, each at its committed offset. The client must not resolve offsets itself: it would skip
    /// records without a word.
    fn resolve(&mut self, partitions: TopicPartitionList) {
        if partitions.count() == 0 {
            return self.take_on(&partitions, Vec::new());
        }
        let answer = self.consumer.committed_offsets(partitions.clone(), Duration::from_secs(5));
        // A single partition's error leaves it without an offset, which must not be taken for "never committed".
        let refused = |committed: TopicPartitionList| {
            let error = committed.elements().iter().find_map(|element| element.error().err());
            error.map_or(Ok(committed), Err)
        };
        let committed = match answer.and_then(refused) {
            Ok(committed) => committed,
            Err(error) => {
                tracing::warn!(errorMessage = %error, "committed offsets could not be read; asking again");
                let again = SystemClock.monotonic() + Duration::from_millis(500);
                self.unresolved = Some((partitions, again));
                return;
            }
        };
        let mut from = TopicPartitionList::with_capacity(committed.count());
        let mut taken = Vec::new();
        for element in committed.elements() {
            let Some(id) = self.id(element.topic(), element.partition()) else { continue };
            let committed = match element.offset() {
                Offset::Offset(offset) => Some(offset),
                _ => None,
            };
            let offset = committed.map_or_else(|| beginning(self.start), Offset::Offset);
            if let Err(error) = from.add_partition_offset(element.topic(), element.partition(), offset) {
                tracing::error!(errorMessage = %error, topic = element.topic(), partition = element.partition(), "assignment");
                continue;
            }
            taken.push((id, committed));
        }
        self.take_on(&from, taken);
    }

    fn resolve_again(&mut self) {
        if let Some((_, at)) = &self.unresolved
            && SystemClock.monotonic() >= *at
            && let Some((partitions, _)) = self.unresolved.take()
        {
            self.resolve(partitions);
        }
    }

    fn take_on(&mut self, from: &TopicPartitionList, taken: Vec<(PartitionId, Option<i64>)>) {
        let mut assigned = Vec::with_capacity(taken.len());
        for (id, committed) in taken {
            let gate = Arc::new(Gate::default());
            if let Some(queue) = self.split(id, &gate) {
                self.queues.insert(id, queue);
                assigned.push((id, committed, gate));
            }
        }
        if let Err(error) = answer_assign(&self.consumer, from) {
            tracing::error!(errorMessage = %error, "the assignment could not be taken on");
        }
        self.report(Report::Assigned(assigned));
    }

    /// Splits a partition's queue off before it is assigned, so that none of its records take the common way.
    fn split(&self, id: PartitionId, gate: &Arc<Gate>) -> Option<Queue> {
        let topic = CString::new(&*self.topics[id.topic]).ok()?;
        let waker = ptr::from_ref(&self.consumer.context().waker).cast_mut().cast();
        // SAFETY: the client is alive, and the context with its waker outlives every queue of it.
        let queue = unsafe {
            let queue =
                sys::rd_kafka_queue_get_partition(self.consumer.client().native_ptr(), topic.as_ptr(), id.partition);
            if queue.is_null() {
                return None;
            }
            sys::rd_kafka_queue_forward(queue, ptr::null_mut());
            sys::rd_kafka_queue_cb_event_enable(queue, Some(wake), waker);
            queue
        };
        Some(Queue { queue, gate: Arc::clone(gate), revoked: false })
    }

    /// Callbacks wake the thread too.
    fn watch_consumer_queue(&self) {
        let waker = ptr::from_ref(&self.consumer.context().waker).cast_mut().cast();
        // SAFETY: as in `split`; the handle is given back, the setting stays with the queue.
        unsafe {
            let queue = sys::rd_kafka_queue_get_consumer(self.consumer.client().native_ptr());
            sys::rd_kafka_queue_cb_event_enable(queue, Some(wake), waker);
            sys::rd_kafka_queue_destroy(queue);
        }
    }

    /// Lost partitions are given up at once. Others when the loop has drained them: until then the client waits, and goes on
    /// sending heartbeats.
    fn revoke(&mut self, partitions: TopicPartitionList, lost: bool) {
        self.unresolved = None;
        let ids: Vec<_> = partitions
            .elements()
            .iter()
            .filter_map(|element| self.id(element.topic(), element.partition()))
            .filter(|id| self.queues.contains_key(id))
            .collect();
        if lost || ids.is_empty() {
            self.give_up(&partitions);
            if !ids.is_empty() {
                self.report(Report::Lost(ids));
            }
            return;
        }
        for id in &ids {
            if let Some(queue) = self.queues.get_mut(id) {
                queue.revoked = true;
            }
        }
        self.revoking = Some(partitions);
        self.report(Report::Revoked(ids));
    }

    fn give_up(&mut self, partitions: &TopicPartitionList) {
        if let Err(error) = answer_revoke(&self.consumer, partitions) {
            tracing::warn!(errorMessage = %error, "partitions could not be given up");
        }
        for element in partitions.elements() {
            if let Some(id) = self.id(element.topic(), element.partition()) {
                self.queues.remove(&id);
            }
        }
    }

    fn obey(&mut self, command: Command) -> Next {
        match command {
            Command::Commit(offsets) => {
                if let Err(error) = commit::send(&self.consumer, &self.topics, &offsets) {
                    self.report(Report::Committed(Err(error)));
                }
            }
            Command::Release => {
                if let Some(partitions) = self.revoking.take() {
                    self.give_up(&partitions);
                }
            }
            Command::Close => return Next::Stop,
        }
        Next::Go
    }

    /// One round over all partitions that may be read; whether there was anything.
    fn read(&mut self) -> bool {
        let mut any = false;
        let ids: Vec<_> = self.queues.keys().copied().collect();
        for id in ids {
            if self.memory.load(Ordering::Relaxed) >= self.run_ahead_bytes {
                break;
            }
            let queue = &self.queues[&id];
            // What was handed over must be counted before more is read, or the bound would be none.
            if queue.revoked || queue.gate.shut.load(Ordering::Acquire) || queue.gate.unseen.load(Ordering::Acquire) > 0
            {
                continue;
            }
            any |= self.read_partition(id);
        }
        any
    }

    /// Takes what is there, up to [`PULL`] records.
    ///
    /// Through the client's callback, not its batch call: that one counts the *end of a partition* as a record read, so
    /// after the next pause (every cooperative rebalance is one) a record would be skipped.
    fn read_partition(&self, id: PartitionId) -> bool {
        let queue = &self.queues[&id];
        let client = self.consumer.client().native_ptr();
        let left = self.run_ahead_bytes.saturating_sub(self.memory.load(Ordering::Relaxed));
        let mut taken = Taken {
            left,
            id,
            topic: &self.topics[id.topic],
            client,
            records: Vec::new(),
            bytes: 0,
            others: Vec::new(),
        };
        // SAFETY: the queue is alive, and `taken` outlives the call that its pointer is given to.
        unsafe {
            sys::rd_kafka_consume_callback_queue(queue.queue, 0, Some(take), ptr::from_mut(&mut taken).cast());
        }
        let Taken { records, bytes, others, .. } = taken;
        let any = !records.is_empty() || !others.is_empty();
        if !records.is_empty() {
            queue.gate.unseen.fetch_add(records.len(), Ordering::AcqRel);
            self.memory.fetch_add(bytes, Ordering::Relaxed);
            self.report(Report::Records(id, records));
        }
        for other in others {
            let lost = matches!(other, Report::OffsetLost { .. });
            self.report(other);
            if lost {
                self.go_on(id);
            }
        }
        any
    }

    /// The offset to read next is gone: goes on where the policy says, if it says so.
    fn go_on(&self, id: PartitionId) {
        let offset = match self.on_offset_lost {
            OnOffsetLost::Stop => return,
            OnOffsetLost::Earliest => Offset::Beginning,
            OnOffsetLost::Latest => Offset::End,
        };
        if let Err(error) = self.assign_again(id, offset) {
            tracing::error!(topic = %self.topics[id.topic], partition = id.partition, errorMessage = %error, "no other offset could be set");
        }
    }

    /// A partition whose offset is gone cannot be told to seek, only to begin anew.
    fn assign_again(&self, id: PartitionId, offset: Offset) -> KafkaResult<()> {
        let topic = &self.topics[id.topic];
        let mut again = TopicPartitionList::new();
        match self.consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => {
                again.add_partition_offset(topic, id.partition, offset)?;
                self.consumer.incremental_unassign(&again)?;
                self.consumer.incremental_assign(&again)
            }
            RebalanceProtocol::Eager | RebalanceProtocol::None => {
                // All or nothing: the others go on where they are.
                for element in self.consumer.position()?.elements() {
                    let this = element.topic() == &**topic && element.partition() == id.partition;
                    let from = if this { offset } else { element.offset() };
                    again.add_partition_offset(element.topic(), element.partition(), from)?;
                }
                self.consumer.assign(&again)
            }
        }
    }

    fn id(&self, topic: &str, partition: i32) -> Option<PartitionId> {
        let topic = self.topics.iter().position(|known| &**known == topic)?;
        Some(PartitionId { topic, partition })
    }

    fn report(&self, report: Report) {
        // The loop has ended if nobody listens; its commands end this thread too.
        self.reports.send(Occurrence::Kafka(report)).ok();
    }

    /// Leaves the group, within bounds, and frees the client on this thread.
    fn close(mut self) {
        let context = Arc::clone(self.consumer.context());
        context.close();
        if let Some(partitions) = self.revoking.take() {
            self.give_up(&partitions);
        }
        self.queues.clear();
        // Closing happens in the client's own drop: a tenth of a second, or five seconds if the brokers hang.
        // The queues' callbacks point into the context: it goes last.
        drop(self);
        drop(context);
    }
}

fn beginning(start: Start) -> Offset {
    match start {
        Start::Earliest => Offset::Beginning,
        Start::Latest => Offset::End,
    }
}

/// What one turn of a partition brings.
struct Taken<'a> {
    /// Bytes that may still be taken.
    left: u64,
    id: PartitionId,
    topic: &'a Arc<str>,
    client: *mut sys::rd_kafka_t,
    records: Vec<Record>,
    bytes: u64,
    others: Vec<Report>,
}

/// Called by the client for each message of a queue, on the polling thread.
unsafe extern "C" fn take(message: *mut sys::rd_kafka_message_t, taken: *mut std::ffi::c_void) {
    // SAFETY: `read_partition` gives its own `Taken`, and nobody else has it meanwhile.
    let taken = unsafe { &mut *taken.cast::<Taken<'_>>() };
    // SAFETY: the message is valid during the call.
    let message = unsafe { Raw::new(message) };
    match message.error() {
        sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR => {
            let record = message.record(taken.id, taken.topic);
            taken.bytes += record.bytes() as u64;
            taken.records.push(record);
            if taken.records.len() >= PULL || taken.bytes >= taken.left {
                // SAFETY: the client is alive; this only ends the turn.
                unsafe { sys::rd_kafka_yield(taken.client) };
            }
        }
        sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR__PARTITION_EOF => {
            taken.others.push(Report::ReachedEnd(taken.id, message.offset()));
        }
        sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR__AUTO_OFFSET_RESET => taken.others.push(Report::OffsetLost {
            id: taken.id,
            next_offset: message.offset(),
            reason: message.text(),
        }),
        error => {
            let code = RDKafkaErrorCode::from(error);
            tracing::warn!(topic = %taken.topic, partition = taken.id.partition, errorMessage = %code, "kafka");
        }
    }
}

/// A message in the client's memory.
struct Raw<'a>(&'a sys::rd_kafka_message_t);

impl<'a> Raw<'a> {
    /// # Safety
    /// `message` is valid for `'a`.
    unsafe fn new(message: *const sys::rd_kafka_message_t) -> Self {
        // SAFETY: as the caller promises.
        Self(unsafe { &*message })
    }

    fn message(&self) -> &sys::rd_kafka_message_t {
        self.0
    }

    fn error(&self) -> sys::rd_kafka_resp_err_t {
        self.message().err
    }

    fn offset(&self) -> i64 {
        self.message().offset
    }

    fn text(&self) -> String {
        // SAFETY: the text lives as long as the message.
        unsafe {
            let text = sys::rd_kafka_message_errstr(self.0);
            if text.is_null() { String::new() } else { std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned() }
        }
    }

    fn record(&self, id: PartitionId, topic: &Arc<str>) -> Record {
        let message = self.message();
        let mut kind = sys::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_NOT_AVAILABLE;
        // SAFETY: the message is valid.
        let timestamp = unsafe { sys::rd_kafka_message_timestamp(self.0, &mut kind) };
        Record {
            id,
            topic: Arc::clone(topic),
            offset: message.offset,
            timestamp: (timestamp >= 0).then_some(timestamp),
            // SAFETY: pointer and length belong together and to the message.
            key: unsafe { bytes(message.key, message.key_len) },
            // SAFETY: as above.
            payload: unsafe { bytes(message.payload, message.len) }.map(Arc::new),
            headers: self.headers(),
        }
    }

    fn headers(&self) -> HeaderList {
        let mut headers = Vec::new();
        // SAFETY: headers, names and values live as long as the message, and are copied.
        unsafe {
            let mut list = ptr::null_mut();
            if sys::rd_kafka_message_headers(self.0, &mut list) == sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR
            {
                for index in 0.. {
                    let (mut name, mut value, mut size) = (ptr::null(), ptr::null(), 0);
                    let got = sys::rd_kafka_header_get_all(list, index, &mut name, &mut value, &mut size);
                    if got != sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
                        break;
                    }
                    let name = std::ffi::CStr::from_ptr(name).to_string_lossy().into_owned();
                    headers.push((name, bytes(value.cast_mut(), size).unwrap_or_default()));
                }
            }
        }
        HeaderList(headers)
    }
}

/// # Safety
/// `start` is null, or the start of `length` readable bytes.
unsafe fn bytes(start: *mut std::ffi::c_void, length: usize) -> Option<Vec<u8>> {
    if start.is_null() {
        return None;
    }
    // SAFETY: as the caller promises.
    Some(unsafe { std::slice::from_raw_parts(start.cast::<u8>(), length) }.to_vec())
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Driver")
    }
}
