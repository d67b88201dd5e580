//! The crate has another name, and is reached through a module of the user's.

#![deny(warnings)]

mod reexports {
    pub use idem_core as guard;
}

use idem_macros::{Classify, idempotent};

#[derive(serde::Deserialize)]
struct OrderPaid {
    order_id: u64,
}

#[derive(Debug, Classify)]
#[classify(transient, crate = reexports::guard)]
struct Failed;

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("failed")
    }
}

impl std::error::Error for Failed {}

#[idempotent(key = "order_id", consumer = "invoice", crate = crate::reexports::guard)]
async fn issue_invoice(event: OrderPaid) -> Result<(), Failed> {
    let _ = event.order_id;
    Err(Failed)
}

fn main() {
    let _ = issue_invoice;
}
