//! Handlers that do as little as a handler can, so that what is measured is the guard.

use idem_core::{Classify, Guard, Guarded, SetupError, idempotent};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;

/// The name under which all of them guard, so that all rows of a table are in one range of its index. Of 23 characters, as in
/// the formula for the size of the index.
pub const CONSUMER: &str = "payment-settlement-0001";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    pub id: String,
    pub account: String,
}

#[derive(Debug, thiserror::Error, Classify)]
pub enum Failed {
    #[error(transparent)]
    #[classify(inner)]
    Database(#[from] sqlx::Error),
}

#[idempotent(key = "id", consumer = "payment-settlement-0001")]
pub async fn lease(_event: Order) -> Result<(), Failed> {
    Ok(())
}

#[idempotent(key = "id", consumer = "payment-settlement-0001")]
pub async fn lease_batch(_events: Vec<Order>) -> Result<(), Failed> {
    Ok(())
}

#[idempotent(key = "id", consumer = "payment-settlement-0001")]
pub async fn lease_result(event: Order) -> Result<String, Failed> {
    Ok(event.account)
}

#[idempotent(key = "id", consumer = "payment-settlement-0001", lock = "account")]
pub async fn lease_lock(_event: Order) -> Result<(), Failed> {
    Ok(())
}

#[idempotent(key = "id", consumer = "payment-settlement-0001")]
pub async fn atomic(event: Order, tx: &mut PgConnection) -> Result<(), Failed> {
    invoice(&event, tx).await
}

#[idempotent(key = "id", consumer = "payment-settlement-0001")]
pub async fn atomic_batch(events: Vec<Order>, tx: &mut PgConnection) -> Result<(), Failed> {
    let ids: Vec<String> = events.into_iter().map(|event| event.id).collect();
    sqlx::query("INSERT INTO invoices (id) SELECT * FROM unnest($1::text[])").bind(ids).execute(tx).await?;
    Ok(())
}

#[idempotent(key = "id", consumer = "payment-settlement-0001")]
pub async fn atomic_result(event: Order, tx: &mut PgConnection) -> Result<String, Failed> {
    invoice(&event, tx).await?;
    Ok(event.account)
}

#[idempotent(key = "id", consumer = "payment-settlement-0001", lock = "account")]
pub async fn atomic_lock(event: Order, tx: &mut PgConnection) -> Result<(), Failed> {
    invoice(&event, tx).await
}

async fn invoice(event: &Order, tx: &mut PgConnection) -> Result<(), Failed> {
    sqlx::query("INSERT INTO invoices (id) VALUES ($1)").bind(&event.id).execute(tx).await?;
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Lease,
    LeaseBatch,
    LeaseResult,
    LeaseLock,
    Atomic,
    AtomicBatch,
    AtomicResult,
    AtomicLock,
}

impl Kind {
    pub fn bind(self, guard: &Guard) -> Result<Guarded, SetupError> {
        match self {
            Kind::Lease => guard.bind(lease),
            Kind::LeaseBatch => guard.bind(lease_batch),
            Kind::LeaseResult => guard.bind(lease_result),
            Kind::LeaseLock => guard.bind(lease_lock),
            Kind::Atomic => guard.bind(atomic),
            Kind::AtomicBatch => guard.bind(atomic_batch),
            Kind::AtomicResult => guard.bind(atomic_result),
            Kind::AtomicLock => guard.bind(atomic_lock),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::Lease => "lease, handler of one message",
            Kind::LeaseBatch => "lease, handler of a batch",
            Kind::LeaseResult => "lease, with a result",
            Kind::LeaseLock => "lease, with a lock",
            Kind::Atomic => "atomic, one INSERT for each message",
            Kind::AtomicBatch => "atomic, one INSERT for the batch",
            Kind::AtomicResult => "atomic, with a result",
            Kind::AtomicLock => "atomic, with a lock",
        }
    }
}
