//! The user's own types have the names of the standard library's.

#![deny(warnings)]
#![allow(dead_code)]

use idem_macros::{Classify, idempotent};

struct Result;
struct Option;
struct Duration;
struct Spec;
struct Handler;
trait Send {}
trait Sync {}
trait Copy {}
trait Clone {}
trait Future {}
mod std {}
mod core {}
mod idem_core {}


#[derive(serde::Deserialize)]
struct OrderPaid {
    order_id: u64,
}

#[derive(Debug, Classify)]
#[classify(terminal)]
struct Failed;

impl ::std::fmt::Display for Failed {
    fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
        f.write_str("failed")
    }
}

impl ::std::error::Error for Failed {}

#[idempotent(key = "order_id", consumer = "invoice", lease = "1s", fingerprint = "order_id")]
async fn issue_invoice(event: OrderPaid) -> ::std::result::Result<(), Failed> {
    let _ = event.order_id;
    Err(Failed)
}

fn main() {
    let _ = issue_invoice;
}
