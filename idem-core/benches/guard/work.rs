//! Batches through a guarded handler, and how fast they go.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use idem_core::machine::Token;
use idem_core::store::{ClaimRequest, Terms};
use idem_core::{Clock, ConsumerName, Delivery, Guarded, Outcome, SystemClock};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::Failure;
use crate::args::SLICE;
use crate::handlers::{CONSUMER, Order};
use crate::tables::{Table, key};

/// Messages of a batch.
pub const BATCH: u64 = 128;
/// Batches at once, each on its own connection.
const WORKERS: usize = 2;

/// Which messages come.
#[derive(Clone)]
pub enum Source {
    /// Each asks for another job that nobody has asked for.
    Fresh,
    /// Each asks for a job of these once more; they are completed.
    Duplicates(Arc<Done>),
    /// The same, but only the store is asked: nothing is decoded, reported, or counted on a row.
    DuplicatesOfStore(Arc<Done>),
}

/// Jobs that the guard has completed, and how far a walk over them has come.
pub struct Done {
    numbers: Range<u64>,
    next: AtomicU64,
}

impl Done {
    pub fn new(numbers: Range<u64>) -> Arc<Self> {
        Arc::new(Self { numbers, next: AtomicU64::new(0) })
    }

    fn batch(&self) -> Range<u64> {
        let batches = (self.numbers.end - self.numbers.start) / BATCH;
        let first = self.numbers.start + self.next.fetch_add(1, Ordering::Relaxed) % batches * BATCH;
        first..first + BATCH
    }
}

/// One thing to measure.
#[derive(Clone)]
pub struct Variant<'t> {
    pub name: String,
    pub table: &'t Table,
    pub guarded: Guarded,
    pub source: Source,
}

/// What one slice gave.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    pub jobs: u64,
    pub time: Duration,
}

impl Slice {
    pub fn rate(&self) -> f64 {
        self.jobs as f64 / self.time.as_secs_f64()
    }
}

impl Variant<'_> {
    /// Batch after batch, for the time of one slice.
    pub async fn slice(&self) -> Result<Slice, Failure> {
        // So that connections are open and statements are prepared, whatever came before.
        self.in_parallel(async || self.batch().await).await?;
        let clock = SystemClock;
        let begun = clock.monotonic();
        let counts = self.in_parallel(async || {
            let mut jobs = 0;
            while clock.monotonic() - begun < SLICE {
                jobs += self.batch().await?;
            }
            Ok(jobs)
        });
        let jobs = counts.await?.into_iter().sum();
        Ok(Slice { jobs, time: clock.monotonic() - begun })
    }

    async fn in_parallel(&self, work: impl AsyncFn() -> Result<u64, Failure>) -> Result<Vec<u64>, Failure> {
        futures_util::future::try_join_all((0..WORKERS).map(|_| work())).await
    }

    /// One batch; how many jobs were in it.
    pub async fn batch(&self) -> Result<u64, Failure> {
        match &self.source {
            Source::Fresh => run(&self.guarded, self.table.fresh(BATCH), Expected::Completed).await?,
            Source::Duplicates(done) => run(&self.guarded, done.batch(), Expected::Duplicate).await?,
            Source::DuplicatesOfStore(done) => self.ask_store(done.batch()).await?,
        }
        Ok(BATCH)
    }

    async fn ask_store(&self, numbers: Range<u64>) -> Result<(), Failure> {
        let policy = self.guarded.policy();
        let consumer = ConsumerName::new(CONSUMER)?;
        let terms = Terms { consumer, lease: policy.lease, max_attempts: policy.attempts, owner: "bench".into() };
        let requests: Vec<_> = numbers.map(|number| request(&delivery(&self.guarded, number))).collect();
        let answers = self.table.guard.store().claim(&terms, &requests).await?;
        let others = answers.iter().filter(|answer| answer.decision != idem_core::machine::Decision::Duplicate).count();
        if others > 0 { Err(format!("{others} of {BATCH} were no duplicates").into()) } else { Ok(()) }
    }
}

fn request(delivery: &Delivery) -> ClaimRequest {
    ClaimRequest {
        key: delivery.key().clone(),
        token: Token(Uuid::new_v4()),
        payload: delivery.fingerprint(),
        message_id: Arc::clone(delivery.message_id()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    Completed,
    Duplicate,
}

fn delivery(guarded: &Guarded, number: u64) -> Delivery {
    let order = Order { id: key(number), account: format!("account-{number}") };
    let body = serde_json::to_vec(&order).expect("orders can be written");
    let message_id = format!("orders/{}/{number}", number % 12);
    guarded.prepare(Some(Arc::new(body)), &(), message_id.into()).expect("orders have keys")
}

/// Brings messages to their end, all together.
pub async fn run(guarded: &Guarded, numbers: Range<u64>, expected: Expected) -> Result<(), Failure> {
    let count = numbers.end - numbers.start;
    let deliveries = numbers.map(|number| delivery(guarded, number)).collect();
    let as_expected = AtomicU64::new(0);
    let other = std::sync::Mutex::new(None);
    let report = |_: Delivery, outcome: Outcome| match (&outcome, expected) {
        (Outcome::Completed { attempt: 1, .. }, Expected::Completed) | (Outcome::Duplicate(_), Expected::Duplicate) => {
            as_expected.fetch_add(1, Ordering::Relaxed);
        }
        _ => *other.lock().expect("nothing panics while it is held") = Some(outcome),
    };
    guarded.run(deliveries, &CancellationToken::new(), &report).await;
    if as_expected.into_inner() == count {
        return Ok(());
    }
    let other = other.into_inner().expect("nothing panics while it is held");
    Err(format!("of {count} messages not all were {expected:?}; the last other one: {other:?}").into())
}
