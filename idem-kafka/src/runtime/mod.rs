//! The consumer's loop: one task over one closed enum of things that can occur.
//!
//! It owns everything that decides (assignment, offsets, dispatch), tells the [driver](driver) what to do with Kafka, and
//! gives batches to [workers](worker). An offset moves only in `decide`, which is called for durable outcomes alone.

mod commit;
mod driver;
mod rebalance;
mod shutdown;
mod worker;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use idem_core::store::{Store, StoreError};
use idem_core::{Clock, Delivery, DuplicateKind, EventKey, Guarded, Mode, Outcome, SystemClock, Undecided};
use rand::Rng;
use rdkafka::error::KafkaResult;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::app::Route;
use crate::assignment::{Assignment, Epoch, PartitionId};
use crate::config::{Config, OnOffsetLost};
use crate::dead_letter::{DeadLetters, Verdict, verdict};
use crate::decode::decode;
use crate::dispatch::{Dispatch, Ticket};
use crate::error::{Error, ErrorKind};
use crate::flow::{BatchSize, in_progress_wait, may_read, probe_wait};
use crate::record::Record;
use crate::stats::{Stats, Summary};
use commit::Commits;
use driver::{Command, Driver, Gate, Memory, Report};
use shutdown::Stage;

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
    /// How often it was told that the job is in progress.
    times: u32,
    /// Its dead letter, on its way.
    letter: Option<AbortHandle>,
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

    // ---------------------------------------------------------------- Kafka

    fn take_report(&mut self, report: Report) {
        match report {
            Report::Assigned(partitions) => self.assigned(partitions),
            Report::Revoked(ids) => self.revoked(ids),
            Report::Lost(ids) => {
                tracing::warn!(partitions = ids.len(), "partitions were lost; nothing of them is committed");
                self.forget(&ids);
            }
            Report::Records(id, records) => self.records(id, records),
            Report::ReachedEnd(id, end) => {
                self.assignment.reach_end(id, end);
                self.unsaid = true;
            }
            Report::Committed(result) => self.committed(result),
            Report::OffsetLost { id, next_offset, reason } => self.offset_lost(id, next_offset, &reason),
            Report::Fatal(reason) => self.fatal(&reason),
        }
    }

    fn assigned(&mut self, partitions: Vec<(PartitionId, Option<i64>, Arc<Gate>)>) {
        self.joined = true;
        for (id, committed, gate) in partitions {
            // Records of an earlier assignment that is still here, for whatever reason, are not this one's.
            self.withdraw(|item| item.record.id == id);
            gate.set_open(self.ending.is_none());
            self.gates.insert(id, gate);
            self.assignment.assign(id, committed);
        }
        tracing::info!(partitions = self.assignment.len(), "partitions assigned");
    }

    /// Stops admitting: what runs may end, and its offsets are committed before the partitions are released.
    fn revoked(&mut self, ids: Vec<PartitionId>) {
        tracing::info!(partitions = ids.len(), "partitions revoked; draining them");
        for id in &ids {
            self.assignment.revoke(*id);
        }
        let gone: HashSet<_> = ids.iter().copied().collect();
        self.withdraw(|item| gone.contains(&item.record.id));
        let until = self.now() + self.config.revoke_timeout;
        self.revocation = Some(Revocation { ids, until, committing: false });
    }

    fn advance_revocation(&mut self) {
        let now = self.now();
        let Some(revocation) = &self.revocation else { return };
        let drained = self.assignment.is_drained(&revocation.ids);
        let late = now >= revocation.until;
        if !drained && !late {
            return;
        }
        let ids: HashSet<_> = revocation.ids.iter().copied().collect();
        let unsaid = self.assignment.to_commit().iter().any(|(id, ..)| ids.contains(id));
        if !revocation.committing {
            if !drained {
                tracing::warn!(
                    "handlers of revoked partitions did not end in time; their work is delivered again elsewhere"
                );
            }
            if let Some(revocation) = &mut self.revocation {
                revocation.committing = true;
                revocation.until = now + REVOKE_COMMIT;
            }
            self.unsaid |= unsaid;
            if unsaid {
                return;
            }
        } else if unsaid && !late {
            return;
        }
        let ids: Vec<_> = ids.into_iter().collect();
        self.revocation = None;
        self.forget(&ids);
        self.tell(Command::Release);
    }

    /// The partitions are not ours any more. What runs for them may end, and counts for nothing here.
    fn forget(&mut self, ids: &[PartitionId]) {
        for id in ids {
            self.assignment.remove(*id);
            self.gates.remove(id);
        }
        let gone: HashSet<_> = ids.iter().copied().collect();
        self.withdraw(|item| gone.contains(&item.record.id));
        self.drop_letters(|item| gone.contains(&item.record.id));
        if let Some(revocation) = &mut self.revocation {
            revocation.ids.retain(|id| !gone.contains(id));
        }
    }

    fn records(&mut self, id: PartitionId, records: Vec<Record>) {
        let count = records.len();
        for record in records {
            self.stats.received();
            let delivered = if self.ending.is_some() { None } else { self.assignment.deliver(id, record.offset) };
            match delivered {
                None => self.release_memory(&record),
                Some((epoch, anew)) => {
                    if anew {
                        tracing::warn!(topic = %record.topic, partition = id.partition, "the topic was created anew");
                        self.withdraw(|item| item.record.id == id && item.epoch != epoch);
                    }
                    self.admit(record, epoch);
                }
            }
        }
        self.idle_since = None;
        // Where the first record of a partition stands is committed before it is decided: a restart must not begin later.
        self.unsaid = true;
        self.set_gate(id);
        // Last: from here on the driver may read the partition again, if its gate says so.
        if let Some(gate) = self.gates.get(&id) {
            gate.seen(count);
        }
        self.wake_driver();
    }

    fn admit(&mut self, record: Record, epoch: Epoch) {
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        let route = &mut self.routes[record.id.topic];
        match decode(&route.guarded, &record) {
            Ok(delivery) => {
                let key = delivery.key().clone();
                route.dispatch.push(&key, ticket);
                let delivery = Some(delivery.with_tag(ticket));
                let record = Arc::new(record);
                self.items.insert(
                    ticket,
                    Item { record, epoch, key: Some(key), delivery, place: Place::Waiting, times: 0, letter: None },
                );
            }
            Err(verdict) => {
                self.stats.rejected();
                let record = Arc::new(record);
                self.items.insert(
                    ticket,
                    Item { record, epoch, key: None, delivery: None, place: Place::Waiting, times: 0, letter: None },
                );
                self.set_aside(ticket, verdict);
            }
        }
    }

    fn committed(&mut self, result: KafkaResult<()>) {
        let now = self.now();
        for (id, epoch, next_offset) in self.commits.answered(result.is_ok(), now) {
            self.assignment.confirm(id, epoch, next_offset);
        }
        match result {
            Ok(()) => self.stats.offset_commits(),
            Err(error) => {
                // Normal in a rebalance. What was refused is committed again, or by the partition's next owner.
                self.stats.offset_commits_refused();
                self.unsaid = true;
                tracing::info!(errorMessage = %error, "an offset commit was refused; committing again");
            }
        }
    }

    fn commit(&mut self) {
        if !self.unsaid || self.driver.is_none() || !self.commits.may_send(self.now()) {
            return;
        }
        self.unsaid = false;
        let offsets = self.assignment.to_commit();
        if !offsets.is_empty() {
            self.commits.sent(offsets.clone());
            self.tell(Command::Commit(offsets));
        }
    }

    fn offset_lost(&mut self, id: PartitionId, next_offset: i64, reason: &str) {
        let (topic, partition) = (Arc::clone(&self.topics[id.topic]), id.partition);
        let goes_on = match self.config.on_offset_lost {
            OnOffsetLost::Stop => {
                let text = format!(
                    "offset {next_offset} of {topic}/{partition}, the next to read, does not exist, so records are lost or the topic was \
                     created anew ({reason}): decide with on_offset_lost = earliest | latest, or reset the group's offset"
                );
                self.failure.get_or_insert(Error::new(ErrorKind::Refused, text));
                return self.begin_ending();
            }
            OnOffsetLost::Earliest => "at the first record that is there",
            OnOffsetLost::Latest => "at the end",
        };
        self.assignment.lose_offset(id);
        tracing::error!(%topic, partition, next_offset, reason, "the next offset does not exist; going on {goes_on}");
    }

    /// The client is dead and says nothing to the group: everything is lost. Another client takes its place.
    fn fatal(&mut self, reason: &str) {
        tracing::error!(reason, "the Kafka client cannot go on; everything is given up and a new client joins");
        let ids = self.assignment.ids();
        self.forget(&ids);
        self.commits.forget(self.now());
        self.revocation = None;
        self.driver = None;
        if self.ending.is_some() {
            return;
        }
        let (config, topics) = (self.config.clone(), Arc::clone(&self.topics));
        let (memory, sender) = (Arc::clone(&self.memory), self.sender.clone());
        self.batches.spawn(async move {
            let mut times = 0;
            loop {
                let share: f64 = rand::rng().random();
                tokio::time::sleep(probe_wait(times, share)).await;
                match Driver::start(&config, Arc::clone(&topics), Arc::clone(&memory), sender.clone()).await {
                    Ok(driver) => return sender.send(Occurrence::Restarted(driver)).unwrap_or_default(),
                    Err(error) => tracing::error!(errorMessage = %error.describe(), "no new Kafka client yet"),
                }
                times += 1;
            }
        });
    }

    fn tell(&self, command: Command) {
        if let Some(driver) = &self.driver {
            driver.tell(command);
        }
    }

    // ---------------------------------------------------------------- handlers

    /// Gives to workers what may run now.
    fn dispatch(&mut self) {
        if self.outage.is_some() || self.ending.is_some() {
            return;
        }
        for route in 0..self.routes.len() {
            while let Some(tickets) = self.take_batch(route) {
                let deliveries = self.begin(route, tickets);
                if deliveries.is_empty() {
                    continue;
                }
                let guarded = self.routes[route].guarded.clone();
                match guarded.spec().mode {
                    Mode::Atomic => self.transactions += 1,
                    Mode::Lease => {
                        self.handlers += deliveries.len();
                        self.routes[route].claiming = true;
                    }
                }
                self.batches.spawn(worker::run(
                    route,
                    guarded,
                    deliveries,
                    self.hard_stop.clone(),
                    self.sender.clone(),
                ));
            }
        }
    }

    fn take_batch(&mut self, route: usize) -> Option<Vec<Ticket>> {
        let state = &mut self.routes[route];
        let ready = state.dispatch.ready();
        let most = match state.guarded.spec().mode {
            Mode::Atomic => {
                let free = self.config.transactions.saturating_sub(self.transactions);
                if free == 0 { 0 } else { state.batch_size.next(ready, free) }
            }
            Mode::Lease if state.claiming => 0,
            Mode::Lease => self.config.concurrency.saturating_sub(self.handlers).min(self.config.batch),
        };
        (ready > 0 && most > 0).then(|| state.dispatch.take(most))
    }

    /// Marks what was taken as running. Records that no longer count are dropped here.
    fn begin(&mut self, route: usize, tickets: Vec<Ticket>) -> Vec<Delivery> {
        let mut deliveries = Vec::with_capacity(tickets.len());
        for ticket in tickets {
            let Some(item) = self.items.get_mut(&ticket) else { continue };
            debug_assert_eq!(item.record.id.topic, route);
            if self.assignment.begin(item.record.id, item.epoch) {
                item.place = Place::Running;
                deliveries.extend(item.delivery.take());
            } else {
                self.finish(ticket);
            }
        }
        deliveries
    }

    fn batch_ended(&mut self, route: usize, messages: usize, elapsed: Duration) {
        self.reap();
        if self.routes[route].guarded.spec().mode == Mode::Atomic {
            self.transactions = self.transactions.saturating_sub(1);
            self.routes[route].batch_size.measured(messages, elapsed);
        }
    }

    /// A batch must always report its end. One that could not, because something panicked that is not a handler, leaves
    /// records that nobody would ever decide: better to end, and begin anew.
    fn reap(&mut self) {
        while let Some(ended) = self.batches.try_join_next() {
            if let Err(error) = ended
                && error.is_panic()
            {
                let text = "a batch ended by a panic outside its handlers";
                self.failure.get_or_insert(Error::with_cause(ErrorKind::Failed, text, error));
                self.begin_ending();
            }
        }
    }

    /// A delivery came back. Only here, and for an acknowledged dead letter, does an offset become free to move.
    fn decided(&mut self, delivery: Delivery, outcome: Outcome) {
        let ticket = delivery.tag();
        let Some(item) = self.items.get_mut(&ticket) else { return };
        let route = item.record.id.topic;
        if self.routes[route].guarded.spec().mode == Mode::Lease {
            self.handlers = self.handlers.saturating_sub(1);
        }
        self.assignment.end(item.record.id, item.epoch);
        item.place = Place::Waiting;
        let current = self.assignment.is_current(item.record.id, item.epoch);
        self.log(&delivery, &outcome);
        self.count(&outcome);
        if !current {
            return self.finish(ticket);
        }
        if let Some(verdict) = verdict(&outcome, delivery.key().as_str(), delivery.fingerprint()) {
            return self.set_aside(ticket, verdict);
        }
        if let Some(item) = self.items.get_mut(&ticket) {
            item.delivery = Some(delivery);
        }
        let share: f64 = rand::rng().random();
        match outcome {
            Outcome::Completed { .. } | Outcome::Duplicate(_) => self.decide(ticket),
            Outcome::Failed { retry_in: Some(wait), .. } | Outcome::NotDue { wait } => self.wait(ticket, wait),
            Outcome::InProgress { wait } => self.wait_gently(ticket, wait, share),
            Outcome::LeaseLost => self.wait_gently(ticket, Duration::ZERO, share),
            Outcome::Undecided(Undecided::Unavailable(error)) => {
                self.routes[route].dispatch.put_back(ticket);
                self.begin_outage(&error);
            }
            Outcome::Undecided(Undecided::Contention(_)) => self.wait(ticket, AFTER_CONTENTION.mul_f64(1.0 + share)),
            Outcome::Undecided(Undecided::Broken(_)) => self.wait(ticket, AFTER_BROKEN),
            Outcome::Undecided(Undecided::Cancelled) => self.finish(ticket),
            // Every outcome that sets a record aside was taken above; one that is not known here stays undecided.
            _ => self.wait(ticket, AFTER_BROKEN),
        }
    }

    fn wait_gently(&mut self, ticket: Ticket, lease_left: Duration, share: f64) {
        let Some(item) = self.items.get_mut(&ticket) else { return };
        item.times += 1;
        let wait = in_progress_wait(lease_left, item.times - 1, share);
        self.wait(ticket, wait);
    }

    /// Holds the record, and with it its key, for a while. Holds no lease and no connection.
    fn wait(&mut self, ticket: Ticket, wait: Duration) {
        if self.ending.is_some() || self.is_revoked(ticket) {
            return self.finish(ticket);
        }
        self.timers.push(Reverse((self.now() + wait, ticket)));
    }

    fn is_revoked(&self, ticket: Ticket) -> bool {
        let (Some(revocation), Some(item)) = (&self.revocation, self.items.get(&ticket)) else { return false };
        revocation.ids.contains(&item.record.id)
    }

    fn wake_waiting(&mut self) {
        let now = self.now();
        while let Some(Reverse((at, ticket))) = self.timers.peek().copied() {
            if at > now {
                break;
            }
            self.timers.pop();
            if let Some(item) = self.items.get(&ticket).filter(|item| item.place == Place::Waiting) {
                self.routes[item.record.id.topic].dispatch.put_back(ticket);
            }
        }
    }

    /// The record's outcome is durable.
    fn decide(&mut self, ticket: Ticket) {
        self.outages_in_a_row = 0;
        if let Some(item) = self.items.get(&ticket) {
            self.assignment.decide(item.record.id, item.epoch, item.record.offset);
            self.unsaid = true;
        }
        self.finish(ticket);
    }

    /// The record leaves memory; the next one of its key may run.
    fn finish(&mut self, ticket: Ticket) {
        let Some(item) = self.items.remove(&ticket) else { return };
        if let Some(key) = &item.key {
            self.routes[item.record.id.topic].dispatch.remove(key, ticket);
        }
        self.release_memory(&item.record);
        self.set_gate(item.record.id);
    }

    /// Drops records that are not running and match.
    fn withdraw(&mut self, matches: impl Fn(&Item) -> bool) {
        let gone: HashSet<Ticket> = self
            .items
            .iter()
            .filter(|(_, item)| item.place == Place::Waiting && matches(item))
            .map(|(ticket, _)| *ticket)
            .collect();
        if gone.is_empty() {
            return;
        }
        for route in &mut self.routes {
            route.dispatch.withdraw(|ticket| gone.contains(&ticket));
        }
        for ticket in gone {
            if let Some(item) = self.items.remove(&ticket) {
                self.release_memory(&item.record);
            }
        }
    }

    fn release_memory(&self, record: &Record) {
        let bytes = record.bytes() as u64;
        let before = self.memory.fetch_sub(bytes, Ordering::Relaxed);
        let limit = self.config.run_ahead_bytes as u64;
        if before >= limit && before - bytes < limit {
            self.wake_driver();
        }
    }

    /// Opens or shuts a partition, as its load allows.
    fn set_gate(&self, id: PartitionId) {
        if let Some(gate) = self.gates.get(&id) {
            let (undecided, span) = self.assignment.load(id);
            let open = may_read(undecided, span, 0, self.config.run_ahead, self.config.run_ahead_bytes);
            if gate.set_open(open && self.ending.is_none()) {
                self.wake_driver();
            }
        }
    }

    fn wake_driver(&self) {
        if let Some(driver) = &self.driver {
            driver.wake();
        }
    }

    // ---------------------------------------------------------------- dead letters

    /// Sends the record to its dead-letter topic. Its offset moves when that is acknowledged, not before.
    fn set_aside(&mut self, ticket: Ticket, verdict: Verdict) {
        let Some(item) = self.items.get_mut(&ticket) else { return };
        if !self.assignment.begin(item.record.id, item.epoch) {
            return self.finish(ticket);
        }
        item.place = Place::SettingAside;
        let route = &self.routes[item.record.id.topic];
        let (topic, consumer) = (route.dead_letter_topic.clone(), route.guarded.spec().consumer);
        let (record, letters, sender) = (Arc::clone(&item.record), self.dead_letters.clone(), self.sender.clone());
        item.letter = Some(self.letters.spawn(async move {
            letters.send(&topic, consumer, &record, &verdict, wall_clock).await;
            sender.send(Occurrence::SetAside(ticket)).ok();
        }));
    }

    fn set_aside_done(&mut self, ticket: Ticket) {
        while self.letters.try_join_next().is_some() {}
        if let Some(item) = self.items.get(&ticket) {
            self.stats.dead_letters();
            self.assignment.end(item.record.id, item.epoch);
            self.decide(ticket);
        }
    }

    // ---------------------------------------------------------------- outage of the store

    /// The store is away: not the messages' fault. Nothing new begins, nothing is counted against anyone; partitions stay
    /// ours, and records wait in the broker once a little is read ahead.
    fn begin_outage(&mut self, error: &StoreError) {
        if self.outage.is_none() {
            self.stats.outages();
            tracing::error!(errorMessage = %describe(error), "the store does not answer; waiting for it");
            self.outage = Some(Outage { since: self.now(), probes: self.outages_in_a_row });
            self.outages_in_a_row = self.outages_in_a_row.saturating_add(1);
            self.probe();
        }
    }

    fn probe(&mut self) {
        let Some(outage) = &mut self.outage else { return };
        let share: f64 = rand::rng().random();
        let wait = probe_wait(outage.probes, share);
        outage.probes += 1;
        let (store, sender) = (Arc::clone(&self.store), self.sender.clone());
        // Ends with the loop at the latest: it only reports.
        tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            let result = store.ping().await;
            sender.send(Occurrence::Probed(result)).ok();
        });
    }

    fn probed(&mut self, result: Result<(), StoreError>) {
        match (result, &self.outage) {
            (Ok(()), Some(outage)) => {
                let seconds = self.now().duration_since(outage.since).as_secs();
                tracing::warn!(seconds, "the store answers again; going on");
                self.outage = None;
            }
            (Err(error), Some(_)) => {
                tracing::debug!(errorMessage = %describe(&error), "the store still does not answer");
                self.probe();
            }
            (_, None) => {}
        }
    }

    // ---------------------------------------------------------------- ending

    fn begin_ending(&mut self) {
        if self.ending.is_some() {
            return;
        }
        let until = self.now() + self.config.drain_timeout;
        tracing::info!(running = self.running(), "ending: nothing new begins, what runs may end");
        self.ending = Some(Stage::Draining { until });
        for gate in self.gates.values() {
            gate.set_open(false);
        }
        self.withdraw(|_| true);
    }

    fn running(&self) -> usize {
        self.items.values().filter(|item| item.place != Place::Waiting).count()
    }

    /// Moves the ending on. Answers, once it is done, whether the deadline cut off work.
    fn advance_ending(&mut self) -> Option<bool> {
        let stage = self.ending?;
        let now = self.now();
        let busy = self.transactions > 0 || self.running() > 0;
        let unsaid = self.driver.is_some() && (self.commits.is_in_flight() || !self.assignment.to_commit().is_empty());
        let next = shutdown::advance(stage, now, busy, unsaid);
        if matches!((stage, next), (Stage::Draining { .. }, Stage::Cut { .. })) {
            tracing::warn!(running = self.running(), "the deadline for ending has come; what still runs is cut off");
            self.hard_stop.cancel();
            self.drop_letters(|_| true);
        }
        if next != stage {
            self.ending = Some(next);
            self.unsaid |= matches!(next, Stage::Committing { .. });
            self.commit();
        }
        match next {
            Stage::Done { cut } => Some(cut),
            _ => None,
        }
    }

    /// Gives up dead letters that are not acknowledged: their records stay uncommitted, and are delivered again.
    fn drop_letters(&mut self, matches: impl Fn(&Item) -> bool) {
        let setting_aside = |item: &Item| item.place == Place::SettingAside && matches(item);
        let gone: Vec<_> =
            self.items.iter().filter(|(_, item)| setting_aside(item)).map(|(ticket, _)| *ticket).collect();
        for ticket in gone {
            if let Some(item) = self.items.get(&ticket) {
                if let Some(letter) = &item.letter {
                    letter.abort();
                }
                self.assignment.end(item.record.id, item.epoch);
            }
            self.finish(ticket);
        }
    }

    /// Leaves the group.
    async fn close(mut self, cut: bool) -> Result<(), Error> {
        // First, so that the partitions are free whatever a handler does.
        if let Some(driver) = self.driver.take() {
            driver.close().await;
        }
        // A handler that blocks its thread cannot be dropped; its process ends with it in the end.
        let all_dropped = async {
            self.batches.shutdown().await;
            self.letters.shutdown().await;
        };
        if tokio::time::timeout(shutdown::AFTER_CUT, all_dropped).await.is_err() {
            tracing::error!("a handler blocks its thread and cannot be dropped");
        }
        match self.failure {
            Some(failure) => Err(failure),
            None if cut => {
                let text =
                    "the deadline for ending came before all handlers had ended; what was cut is delivered again";
                Err(Error::new(ErrorKind::DrainCutShort, text))
            }
            None => Ok(()),
        }
    }

    fn look_for_idleness(&mut self) {
        let Some(span) = self.config.until_idle else { return };
        let idle = self.joined
            && self.revocation.is_none()
            && self.items.is_empty()
            && !self.commits.is_in_flight()
            && self.assignment.is_at_end()
            && self.assignment.to_commit().is_empty();
        let now = self.now();
        match (idle, self.idle_since) {
            (false, _) => self.idle_since = None,
            (true, None) => self.idle_since = Some(now),
            (true, Some(since)) if now >= since + span => self.begin_ending(),
            (true, Some(_)) => {}
        }
    }

    // ---------------------------------------------------------------- seeing it

    fn count(&self, outcome: &Outcome) {
        let stats = &self.stats;
        match outcome {
            Outcome::Completed { takeover, already_done, .. } => {
                stats.completed();
                if *takeover {
                    stats.takeovers();
                }
                if *already_done {
                    stats.already_done();
                }
            }
            Outcome::Duplicate(DuplicateKind::Redelivery) => stats.duplicates_redelivered(),
            Outcome::Duplicate(DuplicateKind::Producer) => stats.duplicates_produced(),
            Outcome::Conflict => stats.conflicts(),
            Outcome::InProgress { .. } => stats.in_progress(),
            Outcome::Failed { retry_in, .. } => {
                stats.failed();
                if retry_in.is_some() {
                    stats.retries();
                }
            }
            Outcome::LeaseLost => stats.lease_lost(),
            _ => {}
        }
    }

    /// Levels: what is normal is quiet.
    fn log(&self, delivery: &Delivery, outcome: &Outcome) {
        let (key, id) = (delivery.key().as_str(), &**delivery.message_id());
        macro_rules! say {
            ($level:ident, $event:literal, $($field:tt)*) => {
                tracing::$level!(event = $event, idempotencyKey = key, messageId = id, $($field)*)
            };
        }
        match outcome {
            Outcome::Completed { attempt, takeover: true, .. } => {
                say!(warn, "idem.takeover", attempt, "completed after a takeover")
            }
            Outcome::Completed { attempt, already_done: true, .. } => {
                say!(
                    error,
                    "idem.constraint_violation",
                    attempt,
                    "the domain says that the effect was there before; completed"
                );
            }
            Outcome::Completed { attempt, .. } => say!(info, "idem.completed", attempt, "completed"),
            Outcome::Duplicate(_) => say!(debug, "idem.duplicate", "duplicate"),
            Outcome::Conflict => say!(error, "idem.fingerprint_mismatch", "the key was used for another payload"),
            Outcome::InProgress { .. } => say!(info, "idem.in_progress", "another worker holds the job"),
            Outcome::NotDue { .. } => say!(debug, "idem.retry_scheduled", "not due yet"),
            Outcome::Failed { attempt, failure, .. } => {
                say!(warn, "idem.failed", attempt, errorKind = failure.kind.as_str(), errorMessage = %failure.message, "a try failed");
            }
            Outcome::Exhausted { attempts, .. } => {
                say!(warn, "idem.failed", attempts, "the job had failed for good before")
            }
            Outcome::LeaseLost => say!(error, "idem.lease_lost", "the job was taken over while its handler ran"),
            Outcome::Undecided(Undecided::Broken(error)) => {
                say!(error, "idem.failed", errorMessage = %describe(error), "the store refuses the guard's own statement; a person must look");
            }
            _ => {}
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
