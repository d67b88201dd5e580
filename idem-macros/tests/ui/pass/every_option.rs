//! What can be said about conflicts, locks and probes, in every form.

#![deny(warnings)]

use idem_core::store::Tx;
use idem_core::{Handler, Job, OnConflict, Probe, State};
use idem_macros::{Classify, idempotent};

#[derive(serde::Deserialize)]
struct PaymentRequested {
    payment_id: u64,
    account: Account,
}

#[derive(serde::Deserialize)]
struct Account {
    r#type: String,
    id: u64,
}

struct Gateway;

#[derive(Debug, Classify)]
#[classify(transient)]
struct GatewayError;

impl std::fmt::Display for GatewayError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no answer")
    }
}

impl std::error::Error for GatewayError {}

mod probes {
    use super::*;

    pub async fn settled(
        gateway: State<Gateway>,
        event: &PaymentRequested,
        job: &Job,
    ) -> Result<Probe, GatewayError> {
        let _ = (gateway, event.payment_id, job.attempt());
        Ok(Probe::Unknown)
    }

    pub async fn sure(event: &PaymentRequested) -> Probe {
        let _ = event.payment_id;
        Probe::Done
    }
}

#[idempotent(
    key = "payment_id",
    consumer = "payment",
    probe = probes::settled,
    lock = ["account.type", account.id, "header:tenant"],
    on_conflict = "stop",
)]
async fn settle(gateway: State<Gateway>, event: PaymentRequested, job: &Job) -> Result<String, GatewayError> {
    let _ = (gateway, event.account.id, job);
    Ok(event.account.r#type)
}

#[idempotent(key = "payment_id", consumer = "payment", probe = "self::probes::sure", on_conflict = "dead_letter")]
async fn notify(event: PaymentRequested) -> Result<(), GatewayError> {
    drop(event);
    Ok(())
}

#[idempotent(key = "payment_id", consumer = "payment", lock = account.id, on_conflict = "skip")]
async fn book(events: Vec<PaymentRequested>, tx: &mut Tx) -> Result<(), GatewayError> {
    let _ = (events, tx);
    Ok(())
}

/// A probe as an associated function, and everything out of a macro.
struct Probes;

impl Probes {
    async fn probe(event: &PaymentRequested, job: &Job) -> Probe {
        let _ = (event, job);
        Probe::NotDone
    }
}

macro_rules! handler {
    ($name:ident, $lock:literal, $probe:path) => {
        #[idempotent(key = "payment_id", consumer = "payment", lock = $lock, probe = $probe)]
        async fn $name(event: PaymentRequested, job: &Job) -> Result<(), GatewayError> {
            let _ = (event, job);
            Ok(())
        }
    };
}
handler!(from_macro, "account.id", Probes::probe);

#[idempotent(key = "received_at", consumer = "goods-in")]
#[allow(deprecated)]
async fn book_goods(event: Goods) -> Result<(), GatewayError> {
    let _ = event.received_at;
    Ok(())
}

#[derive(serde::Deserialize)]
struct Goods {
    received_at: u64,
}

fn main() {
    let spec = settle::SPEC;
    assert_eq!((spec.probe, spec.lock, spec.on_conflict), (true, true, OnConflict::Stop));
    let spec = notify::SPEC;
    assert_eq!((spec.probe, spec.lock, spec.on_conflict), (true, false, OnConflict::DeadLetter));
    let spec = book::SPEC;
    assert_eq!((spec.probe, spec.lock, spec.on_conflict), (false, true, OnConflict::Skip));
    let _ = (from_macro, book_goods);
}
