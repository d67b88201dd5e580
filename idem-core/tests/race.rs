//! Eight processes want the same jobs at once, while some of them are frozen, killed and started again, and leases run out
//! throughout (C2, C3, C5): each job has one effect, and nobody but its last holder is told that it is complete.
//!
//! `IDEM_TEST_RACE_KEYS` is the number of jobs for each engine and mode, `IDEM_TEST_SEED` what the chaos is drawn from.

mod support;

use std::collections::VecDeque;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use idem_core::store::{Engine, StoreOptions, connect};
use idem_core::{Clock, Delivery, Guard, Mode, Outcome, Policy, SystemClock};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, sleep_until};

use crate::support::handlers::{Kind, Order, World, delivery};
use crate::support::subjects::Folder;
use crate::support::{Address, PATIENCE, Place, child as child_with, comes_again, round, seed, setting, task, tell};

const PROCESSES: u64 = 8;
/// Each job is asked for by so many messages, each in another process.
const COPIES: u64 = 5;
/// Short, so that whoever is frozen, stalls or dies loses its jobs.
const LEASE: Duration = Duration::from_millis(600);
/// For how long a handler blocks its process: beyond the lease.
const STALL: Duration = Duration::from_millis(900);
/// A process that is frozen in a transaction must not keep its keys; one whose handler stalls may finish. MariaDB counts
/// whole seconds.
const IDLE_TRANSACTION: Duration = Duration::from_millis(1200);
/// One job in so many has a handler that blocks its process.
const STALLS: u64 = 250;
const BATCH: usize = 32;
/// How far a process runs ahead of its first undecided message.
const AHEAD: usize = 4 * BATCH;

/// For how many milliseconds the chaos freezes a process at most: beyond the lease and the time-out.
fn longest_freeze(engine: Engine) -> u64 {
    if engine == Engine::Mysql { 2400 } else { 1600 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c3_atomic_on_postgres() {
    race(Engine::Postgres, Kind::Atomic).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c5_lease_on_postgres() {
    race(Engine::Postgres, Kind::Lease).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c3_atomic_batches_on_postgres() {
    race(Engine::Postgres, Kind::AtomicBatch).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c5_lease_batches_on_postgres() {
    race(Engine::Postgres, Kind::LeaseBatch).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c3_atomic_on_sqlite() {
    race(Engine::Sqlite, Kind::Atomic).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c5_lease_on_sqlite() {
    race(Engine::Sqlite, Kind::Lease).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c3_atomic_on_mariadb() {
    race(Engine::Mysql, Kind::Atomic).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c5_lease_on_mariadb() {
    race(Engine::Mysql, Kind::Lease).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c3_atomic_batches_on_mariadb() {
    race(Engine::Mysql, Kind::AtomicBatch).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c5_lease_batches_on_mariadb() {
    race(Engine::Mysql, Kind::LeaseBatch).await;
}

// ---- one process

#[derive(Clone, Serialize, Deserialize)]
struct Task {
    address: Address,
    kind: Kind,
    worker: u64,
    keys: u64,
    /// How many of its messages are decided from the beginning on, as a consumer's committed offset.
    progress: PathBuf,
}

/// Not a test of its own: what a process does. It has one thread, so a handler that blocks stops its renewals too.
#[tokio::test]
async fn child() {
    if let Some(task) = task() {
        work(task).await;
    }
}

/// The jobs that a process's messages ask for, in their order. All go the same way, so that they meet.
fn jobs(worker: u64, keys: u64) -> Vec<u64> {
    let asks = |key: &u64| (0..COPIES).any(|copy| (key + copy) % PROCESSES == worker);
    (0..keys).filter(asks).collect()
}

fn order(key: u64) -> Order {
    let stalls = if key % STALLS == STALLS / 2 { STALL.as_millis() as u64 } else { 0 };
    Order { id: key.to_string(), stalls, ..Order::default() }
}

async fn work(Task { address, kind, worker, keys, progress }: Task) {
    let options = StoreOptions::default()
        .max_connections(2)
        .lock_timeout(Duration::from_secs(1))
        .call_timeout(Duration::from_secs(3))
        .idle_transaction_timeout(IDLE_TRANSACTION);
    let store = connect(&address.store, &options).await.expect("the store works");
    let world = World::new(&address.outside, worker).await;
    let (fences, ends) = (world.fences.clone(), World::new(&address.outside, worker).await.outside);
    // Every takeover is a try, and there are many.
    let policy =
        Policy::default().lease(LEASE).attempts(1000).backoff(Duration::from_millis(1), Duration::from_millis(5));
    let guarded = kind.bind(&Guard::new(store).state(world).policy(policy));

    let jobs = jobs(worker, keys);
    let mut next = std::fs::read_to_string(&progress).ok().and_then(|text| text.parse().ok()).unwrap_or(0_usize);
    let mut decided = VecDeque::new();
    let mut first = next;
    let mut waiting: Vec<(Instant, Delivery)> = Vec::new();
    while first < jobs.len() {
        let now = SystemClock.monotonic();
        let (due, later) = waiting.into_iter().partition(|(at, _)| *at <= now);
        waiting = later;
        let due: Vec<(Instant, Delivery)> = due;
        let mut batch: Vec<Delivery> = due.into_iter().map(|(_, delivery)| delivery).collect();
        while batch.len() < BATCH && next < jobs.len() && next < first + AHEAD {
            let message = format!("{worker}/{next}");
            batch.push(delivery(&guarded, &order(jobs[next]), &message).with_tag(next as u64));
            decided.push_back(false);
            next += 1;
        }
        if batch.is_empty() {
            let earliest = waiting.iter().map(|(at, _)| *at).min().expect("something is undecided");
            sleep_until(earliest).await;
            continue;
        }
        let mut told = Vec::new();
        for (delivery, outcome) in round(&guarded, batch).await {
            let what = match outcome {
                Outcome::Completed { .. } => "completed",
                Outcome::LeaseLost => "lost",
                _ => "",
            };
            if !what.is_empty() {
                let key = delivery.key().to_string();
                let fence = fences.lock().expect("nothing panics while it is held").get(&key).copied().unwrap_or(0);
                told.push(format!("('{key}', {fence}, {worker}, '{what}')"));
            }
            match comes_again(&delivery, &outcome) {
                Some(wait) => waiting.push((SystemClock.monotonic() + wait, delivery)),
                None => decided[delivery.tag() as usize - first] = true,
            }
        }
        if !told.is_empty() {
            let rows = told.join(", ");
            ends.run(format!("INSERT INTO ends (job, fence, worker, outcome) VALUES {rows}")).await.expect("it works");
        }
        while decided.front() == Some(&true) {
            decided.pop_front();
            first += 1;
        }
        // In place of the old one at once: half a number would be another.
        let new = progress.with_extension("new");
        std::fs::write(&new, first.to_string()).expect("the folder can be written");
        std::fs::rename(new, &progress).expect("the folder can be written");
    }
}

// ---- all of them

/// A process, which ends with the test.
struct Worker {
    command: Command,
    child: Child,
    output: PathBuf,
    frozen_until: Option<Instant>,
    ended: bool,
}

impl Worker {
    fn start(task: &Task, output: PathBuf) -> Self {
        let mut command = child_with(task);
        let file = File::options().append(true).create(true).open(&output).expect("the folder can be written");
        command.stdout(file.try_clone().expect("a file")).stderr(file);
        let child = command.spawn().expect("this program can be run again");
        Self { command, child, output, frozen_until: None, ended: false }
    }

    fn signal(&self, name: &str) {
        let done = Command::new("sh").arg("-c").arg(format!("kill -{name} {}", self.child.id())).status();
        assert!(done.is_ok_and(|status| status.success()), "the process lives until it is waited for");
    }

    fn freeze(&mut self, time: Duration) {
        self.signal("STOP");
        self.frozen_until = Some(SystemClock.monotonic() + time);
    }

    fn thaw(&mut self) {
        if self.frozen_until.take_if(|until| *until <= SystemClock.monotonic()).is_some() {
            self.signal("CONT");
        }
    }

    fn kill_and_restart(&mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it can be waited for");
        self.child = self.command.spawn().expect("this program can be run again");
        self.frozen_until = None;
    }

    /// Whether it has done all of its work.
    fn has_ended(&mut self) -> bool {
        if self.ended {
            return true;
        }
        let Some(status): Option<ExitStatus> = self.child.try_wait().expect("it can be waited for") else {
            return false;
        };
        let said = || std::fs::read_to_string(&self.output).unwrap_or_default();
        assert!(status.success(), "IDEM_TEST_SEED={}: a worker failed: {}", seed(), said());
        // It may have ended by itself in the moment in which it was to be frozen.
        self.frozen_until = None;
        self.ended = true;
        true
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Also one that is frozen, or it would stay for ever.
        let _ = (self.child.kill(), self.child.wait());
    }
}

async fn race(engine: Engine, kind: Kind) {
    let keys = setting("IDEM_TEST_RACE_KEYS", 1000);
    let place = Place::new(engine).await;
    let folder = Folder::new();
    let mut random = StdRng::seed_from_u64(seed() ^ engine as u64 ^ kind as u64);
    let start = |worker| {
        let progress = folder.0.join(format!("progress-{worker}"));
        let task = Task { address: place.address.clone(), kind, worker, keys, progress };
        Worker::start(&task, folder.0.join(format!("output-{worker}")))
    };
    let mut workers: Vec<_> = (0..PROCESSES).map(start).collect();
    let (mut kills, mut freezes) = (0, 0);
    let began = SystemClock.monotonic();
    let limit = PATIENCE * (2 + u32::try_from(keys / 200).expect("a small number"));
    while !workers.iter_mut().all(Worker::has_ended) {
        assert!(began.elapsed() < limit, "{engine} {kind:?}: the race has no end, IDEM_TEST_SEED={}", seed());
        sleep(Duration::from_millis(random.random_range(30..150))).await;
        workers.iter_mut().for_each(Worker::thaw);
        let worker = &mut workers[random.random_range(0..PROCESSES as usize)];
        if worker.has_ended() || worker.frozen_until.is_some() {
            continue;
        }
        if random.random_ratio(1, 3) {
            worker.kill_and_restart();
            kills += 1;
        } else {
            worker.freeze(Duration::from_millis(random.random_range(50..=longest_freeze(engine))));
            freezes += 1;
        }
    }
    assert!(kills > 0 && freezes > 0, "the race was over too soon");
    drop(workers);

    let what = format!("{engine} {kind:?}, IDEM_TEST_SEED={}", seed());
    let (rows, outside) = (place.rows().await, place.outside().await);
    let expected = i64::try_from(keys).expect("a small number");
    let (effects, table, column) = match kind.mode() {
        Mode::Atomic => (&rows, "invoices", "id"),
        Mode::Lease => (&outside, "charges", "job"),
    };
    assert_eq!(effects.number(&format!("SELECT count(*) FROM {table}")).await, expected, "{what}: effects");
    let distinct = effects.number(&format!("SELECT count(DISTINCT {column}) FROM {table}")).await;
    assert_eq!(distinct, expected, "{what}: jobs with an effect");
    assert_eq!(rows.number("SELECT count(*) FROM processed_jobs").await, expected, "{what}: rows");
    let completed = "SELECT count(*) FROM processed_jobs WHERE status = 'COMPLETED'";
    assert_eq!(rows.number(completed).await, expected, "{what}: COMPLETED rows");

    // A process that was killed may not have written what it was told, so there may be less; never more.
    let twice = "SELECT job FROM ends WHERE outcome = 'completed' GROUP BY job HAVING count(*) > 1";
    assert_eq!(outside.texts(twice).await, [""; 0], "{what}: completed twice");
    let told = outside.number("SELECT count(*) FROM ends WHERE outcome = 'completed'").await;
    assert!(told > 0, "{what}");
    let lost = outside.number("SELECT count(*) FROM ends WHERE outcome = 'lost'").await;
    let calls = outside.number("SELECT count(*) FROM calls").await;
    if kind.mode() == Mode::Lease {
        let shared = "SELECT job FROM calls GROUP BY job, fence HAVING count(*) > 1";
        assert_eq!(outside.texts(shared).await, [""; 0], "{what}: two runs under one fence");
        assert!(calls > expected, "{what}: no job was taken over");
        // The row's fence is its last holder's. Nobody ran after it, and nobody else was told that it is complete.
        for batch in fences(&rows).await.chunks(500) {
            let values: Vec<_> =
                batch.iter().map(|(job, fence)| format!("SELECT '{job}' AS job, {fence} AS fence")).collect();
            let last = values.join(" UNION ALL ");
            let later = format!("SELECT c.job FROM calls c JOIN ({last}) l ON l.job = c.job WHERE c.fence > l.fence");
            assert_eq!(outside.texts(&later).await, [""; 0], "{what}: run after its completion");
            let other = format!(
                "SELECT e.job FROM ends e JOIN ({last}) l ON l.job = e.job WHERE e.outcome = 'completed' AND e.fence <> l.fence"
            );
            assert_eq!(outside.texts(&other).await, [""; 0], "{what}: completed by a former holder");
        }
    }
    let takeovers = rows.number("SELECT coalesce(sum(attempts - 1), 0) FROM processed_jobs").await;
    tell(&format!(
        "race: {engine} {kind:?}: {PROCESSES} processes x {keys} jobs x {COPIES} copies in {:?}, {kills} kills, {freezes} \
         freezes, {takeovers} takeovers, {lost} leases found lost, seed {}",
        began.elapsed(),
        seed()
    ));
}

/// Every job's row: its key and fence.
async fn fences(rows: &support::Sql) -> Vec<(String, i64)> {
    let text = "SELECT concat(idempotency_key, ' ', fence) FROM processed_jobs";
    let split = |text: String| {
        let (key, fence) = text.split_once(' ').expect("a key and a fence");
        (key.to_owned(), fence.parse().expect("a number"))
    };
    rows.texts(text).await.into_iter().map(split).collect()
}
