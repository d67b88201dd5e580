//! The consumer's loop: one task over one closed enum of things that can occur.
//!
//! It owns everything that decides (assignment, offsets, dispatch), tells the [driver](driver) what to do with Kafka, and
//! gives batches to [workers](worker). An offset moves only in `decide`, which is called for durable outcomes alone.

mod commit;
mod driver;
mod ending;
mod handling;
mod letters;
mod outage;
mod rebalance;
mod reports;
mod seeing;
mod shutdown;
mod worker;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use idem_core::store::{Store, StoreError};
use idem_core::{
    AlreadyDone, Clock, Delivery, DuplicateKind, EventKey, Guarded, Mode, OnConflict, Outcome, SystemClock, Undecided,
};
use rand::Rng;
use rdkafka::error::KafkaResult;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::assignment::{Assignment, Epoch, PartitionId};
use crate::careful::{Admission, Careful};
use crate::config::{Config, OnOffsetLost};
use crate::dead_letter::{DeadLetters, Verdict, verdict};
use crate::decode::decode;
use crate::dispatch::{Dispatch, Ticket};
use crate::error::{Error, ErrorKind};
use crate::flow::{BatchSize, in_progress_wait, longest_span, may_read, probe_wait};
use crate::record::Record;
use crate::stats::{Stats, Summary};
use commit::Commits;
use driver::{Command, Driver, Gate, Memory, Report};
use shutdown::Stage;

/// A topic and the guarded handler that takes it.
pub(crate) struct Route {
    pub topic: String,
    pub guarded: Guarded,
}

/// Everything that can occur to the loop, besides the time going by.
#[derive(Debug)]
enum Occurrence {
    /// The driver reports.
    Kafka(Report),
    /// Deliveries are decided, or given back undecided.
    Decided(Vec<(Delivery, Outcome)>),
    /// The store has answered the claims of a lease-mode batch.
    Claimed { route: usize },
    /// A batch has ended; all its deliveries were reported before.
    BatchEnded { route: usize, messages: usize, elapsed: Duration },
    /// A dead letter was acknowledged.
    SetAside(Ticket),
    /// The store was looked at while it was away.
    Probed(Result<(), StoreError>),
    /// A new client has joined the group, after a fatal error of the one before.
    Restarted(Driver),
    /// A signal, or the caller, asks to end.
    AskedToEnd,
}

/// Consumes until asked to end, or until something fails that a person must mend.
pub(crate) async fn run(
    config: Config,
    store: Arc<dyn Store>,
    routes: Vec<Route>,
    shutdown: CancellationToken,
    stats: Stats,
) -> Result<Summary, Error> {
    let (sender, occurrences) = unbounded_channel();
    let topics: Arc<[Arc<str>]> = routes.iter().map(|route| Arc::from(route.topic.as_str())).collect();
    let dead_letters = DeadLetters::new(&config.producer(), config.group.as_deref().unwrap_or_default())?;
    let memory = Memory::default();
    let _listening = shutdown::listen(shutdown, sender.clone())?;
    let driver = Driver::start(&config, Arc::clone(&topics), Arc::clone(&memory), sender.clone()).await?;
    let routes: Vec<_> = routes.into_iter().map(|route| RouteState::new(route, &config)).collect();
    for route in &routes {
        if let Err(error) = dead_letters.partitions(&route.dead_letter_topic).await {
            tracing::warn!(
                topic = %route.dead_letter_topic,
                errorMessage = %error,
                "the dead-letter topic is not there: a record that must be set aside will wait until it is"
            );
        }
    }
    let now = SystemClock.monotonic();
    let the_loop = Loop {
        commits: Commits::new(config.commit_interval, now),
        config,
        store,
        topics,
        routes,
        stats: stats.clone(),
        sender,
        driver: Some(driver),
        memory,
        dead_letters,
        assignment: Assignment::default(),
        gates: HashMap::new(),
        careful: HashMap::new(),
        items: HashMap::new(),
        last_ticket: 0,
        timers: BinaryHeap::new(),
        batches: JoinSet::new(),
        letters: JoinSet::new(),
        transactions: 0,
        handlers: 0,
        unsaid: false,
        revocation: None,
        outage: None,
        outages_in_a_row: 0,
        ending: None,
        failure: None,
        joined: false,
        idle_since: None,
        hard_stop: CancellationToken::new(),
    };
    the_loop.run(occurrences).await?;
    Ok(stats.snapshot())
}

struct RouteState {
    guarded: Guarded,
    dead_letter_topic: String,
    dispatch: Dispatch,
    batch_size: BatchSize,
    /// Lease mode: claims are on their way. What becomes free meanwhile is claimed together afterwards.
    claiming: bool,
}

impl RouteState {
    fn new(Route { topic, guarded }: Route, config: &Config) -> Self {
        let dead_letter_topic = config.dead_letter_topic(&topic, guarded.spec().consumer);
        Self {
            guarded,
            dead_letter_topic,
            dispatch: Dispatch::default(),
            batch_size: BatchSize::new(config.batch),
            claiming: false,
        }
    }
}

struct Loop {
    config: Config,
    store: Arc<dyn Store>,
    topics: Arc<[Arc<str>]>,
    /// By the position of their topic.
    routes: Vec<RouteState>,
    stats: Stats,
    sender: UnboundedSender<Occurrence>,
    /// Nothing while a new client is being made.
    driver: Option<Driver>,
    memory: Memory,
    dead_letters: DeadLetters,
    assignment: Assignment,
    gates: HashMap<PartitionId, Arc<Gate>>,
    /// For partitions of atomic handlers.
    careful: HashMap<PartitionId, Careful>,
    /// Every record in memory.
    items: HashMap<Ticket, Item>,
    last_ticket: Ticket,
    /// Records that wait for their time.
    timers: BinaryHeap<Reverse<(Instant, Ticket)>>,
    batches: JoinSet<()>,
    letters: JoinSet<()>,
    /// Atomic batches running.
    transactions: usize,
    /// Lease-mode handlers running.
    handlers: usize,
    commits: Commits,
    /// There may be offsets that the broker does not have yet.
    unsaid: bool,
    revocation: Option<Revocation>,
    outage: Option<Outage>,
    /// Outages since a delivery was last decided: a store that answers when looked at, and fails when used, must not be
    /// asked ever faster.
    outages_in_a_row: u32,
    ending: Option<Stage>,
    /// Why it ends, if not because it was asked to.
    failure: Option<Error>,
    /// An assignment has come, be it an empty one.
    joined: bool,
    idle_since: Option<Instant>,
    /// Drops all handlers.
    hard_stop: CancellationToken,
}

/// A record in memory.
struct Item {
    record: Arc<Record>,
    epoch: Epoch,
    /// Nothing for a record that has none.
    key: Option<EventKey>,
    /// Here unless it is running.
    delivery: Option<Delivery>,
    place: Place,
    /// It runs carefully, and others wait until it was tried.
    untried: bool,
    /// How often it was told that the job is in progress.
    times: u32,
    /// Its dead letter, on its way.
    letter: Option<AbortHandle>,
}

impl Item {
    fn new(record: Record, epoch: Epoch, key: Option<EventKey>, delivery: Option<Delivery>) -> Self {
        let record = Arc::new(record);
        Self { record, epoch, key, delivery, place: Place::Waiting, untried: false, times: 0, letter: None }
    }

    fn admit(&mut self, admission: Admission) {
        if admission == Admission::Careful {
            self.untried = true;
            self.delivery = self.delivery.take().map(Delivery::with_care);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In its lane, or waiting for its time.
    Waiting,
    /// In a batch.
    Running,
    /// On its way to the dead letters.
    SettingAside,
}

/// Partitions on their way to another member.
struct Revocation {
    ids: Vec<PartitionId>,
    until: Instant,
    committing: bool,
}

/// The store is away.
struct Outage {
    since: Instant,
    probes: u32,
}

/// Longest pause between two looks around, when nothing occurs.
const TICK: Duration = Duration::from_secs(1);
/// How long the commit of revoked partitions may take.
const REVOKE_COMMIT: Duration = Duration::from_secs(3);
/// The pause after the store refused the guard's own statement: a person must look, and then it goes on by itself.
const AFTER_BROKEN: Duration = Duration::from_secs(5);
/// The pause after other transactions were in the way.
const AFTER_CONTENTION: Duration = Duration::from_millis(100);

impl Loop {
    async fn run(mut self, mut occurrences: UnboundedReceiver<Occurrence>) -> Result<(), Error> {
        let mut several = Vec::with_capacity(64);
        loop {
            let wake_at = self.next_wake();
            tokio::select! {
                _ = occurrences.recv_many(&mut several, 64) => {}
                () = tokio::time::sleep_until(wake_at) => {}
            }
            for occurrence in several.drain(..) {
                self.take(occurrence);
            }
            self.reap();
            self.wake_waiting();
            self.dispatch();
            self.advance_revocation();
            self.commit();
            self.look_for_idleness();
            if let Some(cut) = self.advance_ending() {
                return self.close(cut).await;
            }
        }
    }

    fn now(&self) -> Instant {
        SystemClock.monotonic()
    }

    /// When something must be done even if nothing occurs.
    fn next_wake(&self) -> Instant {
        let now = self.now();
        let timer = self.timers.peek().map(|Reverse((at, _))| *at);
        let commit = self.commits.not_before().filter(|_| self.unsaid);
        let revocation = self.revocation.as_ref().map(|revocation| revocation.until);
        let ending = self.ending.and_then(shutdown::deadline);
        let idle = self.idle_since.zip(self.config.until_idle).map(|(since, span)| since + span);
        [timer, commit, revocation, ending, idle].into_iter().flatten().min().unwrap_or(now + TICK).min(now + TICK)
    }

    fn take(&mut self, occurrence: Occurrence) {
        match occurrence {
            Occurrence::Kafka(report) => self.take_report(report),
            Occurrence::Decided(decided) => {
                for (delivery, outcome) in decided {
                    self.decided(delivery, outcome);
                }
            }
            Occurrence::BatchEnded { route, messages, elapsed } => self.batch_ended(route, messages, elapsed),
            Occurrence::Claimed { route } => self.routes[route].claiming = false,
            Occurrence::SetAside(ticket) => self.set_aside_done(ticket),
            Occurrence::Probed(result) => self.probed(result),
            Occurrence::Restarted(driver) => self.driver = Some(driver),
            Occurrence::AskedToEnd => self.begin_ending(),
        }
    }
}

/// For the time that a dead letter names. It decides nothing.
fn wall_clock() -> SystemTime {
    SystemClock.timestamp().into()
}

fn describe(error: &StoreError) -> String {
    use std::error::Error as _;
    error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}
