#![deny(deprecated)]

use idem_macros::idempotent;

#[derive(serde::Deserialize)]
struct OrderPaid {
    order_id: String,
    received_at: u64,
    meta: Meta,
}

#[derive(serde::Deserialize)]
struct Meta {
    span_id: String,
}

#[idempotent(
    key = ["order_id", received_at, "meta.span_id", "header:x-trace-id"],
    consumer = "invoice",
    fingerprint = "received_at",
    lock = "received_at"
)]
async fn issue_invoice(_event: OrderPaid) -> Result<(), std::io::Error> {
    Ok(())
}

// The name is right for this one, and its author says so.
#[idempotent(key = "received_at", consumer = "goods-in")]
#[allow(deprecated)]
async fn book_goods(_event: OrderPaid) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
