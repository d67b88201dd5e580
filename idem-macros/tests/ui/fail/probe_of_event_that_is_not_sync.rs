use std::cell::Cell;

use idem_core::Probe;
use idem_macros::idempotent;

#[derive(serde::Deserialize)]
struct PaymentRequested {
    payment_id: u64,
    seen: Cell<bool>,
}

async fn settled(event: &PaymentRequested) -> Probe {
    std::future::ready(()).await;
    if event.seen.get() { Probe::Done } else { Probe::NotDone }
}

#[idempotent(key = "payment_id", consumer = "payment", probe = settled)]
async fn settle(_event: PaymentRequested) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
