//! The four kinds of handlers: effect in the guard's transaction or outside, one message or a batch.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_core::store::{Tx, sql};
use idem_core::{Classify, Delivery, Guard, Guarded, Job, Mode, State, idempotent};
use serde::{Deserialize, Serialize};

use super::Sql;

/// What a handler is asked to do.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Order {
    pub id: String,
    /// Its first try fails.
    #[serde(default)]
    pub fails_once: bool,
    /// For so many milliseconds it waits before its effect.
    #[serde(default)]
    pub takes: u64,
    /// For so many milliseconds its first claim blocks its thread, and with it all renewals of its process.
    #[serde(default)]
    pub stalls: u64,
}

/// The world outside the guard's database, as one worker sees it.
pub struct World {
    pub outside: Sql,
    pub worker: u64,
    /// A handler's own statement is under way in the guard's transaction.
    pub in_statement: Arc<AtomicBool>,
    /// The fences under which jobs ran last.
    pub fences: Arc<Mutex<HashMap<String, i64>>>,
}

impl World {
    pub async fn new(outside: &str, worker: u64) -> Self {
        Self { outside: Sql::open(outside).await, worker, in_statement: Arc::default(), fences: Arc::default() }
    }
}

#[derive(Debug, thiserror::Error, Classify)]
pub enum Failed {
    #[error("the first try fails")]
    #[classify(transient)]
    Once,
    #[error(transparent)]
    #[classify(inner)]
    Database(#[from] sqlx::Error),
}

#[idempotent(key = "id", consumer = "atomic")]
pub async fn atomic(event: Order, job: &Job, tx: &mut Tx, world: State<World>) -> Result<(), Failed> {
    invoice(&event, job, tx, &world).await
}

#[idempotent(key = "id", consumer = "atomic-batch")]
pub async fn atomic_batch(events: Vec<Order>, jobs: &[Job], tx: &mut Tx, world: State<World>) -> Result<(), Failed> {
    for (event, job) in events.iter().zip(jobs) {
        invoice(event, job, tx, &world).await?;
    }
    Ok(())
}

#[idempotent(key = "id", consumer = "lease")]
pub async fn lease(event: Order, job: &Job, world: State<World>) -> Result<(), Failed> {
    called(job, &world).await?;
    charge(&event, job, &world).await
}

#[idempotent(key = "id", consumer = "lease-batch")]
pub async fn lease_batch(events: Vec<Order>, jobs: &[Job], world: State<World>) -> Result<(), Failed> {
    for job in jobs {
        called(job, &world).await?;
    }
    for (event, job) in events.iter().zip(jobs) {
        charge(event, job, &world).await?;
    }
    Ok(())
}

async fn invoice(event: &Order, job: &Job, tx: &mut Tx, world: &World) -> Result<(), Failed> {
    trouble(event, job).await;
    world.in_statement.store(true, Ordering::SeqCst);
    tx.execute(sql("INSERT INTO invoices (id) VALUES ($1)").bind(&event.id)).await?;
    world.in_statement.store(false, Ordering::SeqCst);
    if event.fails_once && job.attempt() == 1 { Err(Failed::Once) } else { Ok(()) }
}

async fn called(job: &Job, world: &World) -> Result<(), Failed> {
    world.fences.lock().expect("nothing panics while it is held").insert(job.key().to_string(), job.fence());
    let (key, fence, worker) = (job.key(), job.fence(), world.worker);
    world.outside.run(format!("INSERT INTO calls (job, fence, worker) VALUES ('{key}', {fence}, {worker})")).await?;
    Ok(())
}

async fn charge(event: &Order, job: &Job, world: &World) -> Result<(), Failed> {
    trouble(event, job).await;
    if event.fails_once && job.attempt() == 1 {
        return Err(Failed::Once);
    }
    world.outside.charge(&job.downstream_key("charge"), &event.id).await?;
    Ok(())
}

async fn trouble(event: &Order, job: &Job) {
    if event.takes > 0 {
        tokio::time::sleep(Duration::from_millis(event.takes)).await;
    }
    if event.stalls > 0 && job.fence() == 1 {
        std::thread::sleep(Duration::from_millis(event.stalls));
    }
}

/// A kind of handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Atomic,
    AtomicBatch,
    Lease,
    LeaseBatch,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Atomic, Kind::AtomicBatch, Kind::Lease, Kind::LeaseBatch];

    pub fn mode(self) -> Mode {
        match self {
            Kind::Atomic | Kind::AtomicBatch => Mode::Atomic,
            Kind::Lease | Kind::LeaseBatch => Mode::Lease,
        }
    }

    pub fn is_batch(self) -> bool {
        matches!(self, Kind::AtomicBatch | Kind::LeaseBatch)
    }

    /// Puts the handler behind a guard.
    pub fn bind(self, guard: &Guard) -> Guarded {
        let guarded = match self {
            Kind::Atomic => guard.bind(atomic),
            Kind::AtomicBatch => guard.bind(atomic_batch),
            Kind::Lease => guard.bind(lease),
            Kind::LeaseBatch => guard.bind(lease_batch),
        };
        guarded.expect("the handler has what it takes")
    }
}

/// A message that asks for an order.
pub fn delivery(guarded: &Guarded, order: &Order, message_id: &str) -> Delivery {
    let body = serde_json::to_vec(order).expect("orders can be written");
    guarded.prepare(Some(Arc::new(body)), &(), message_id.into()).expect("orders have keys")
}
