//! Names, types and literals come from a `macro_rules`, with invisible groups around them.

#![deny(warnings)]

use idem_core::store::Tx;
use idem_core::{Job, State};
use idem_macros::{Classify, idempotent};

#[derive(serde::Deserialize)]
struct OrderPaid {
    order_id: u64,
    amount: i64,
}

macro_rules! error {
    ($name:ident, $mark:ident) => {
        #[derive(Debug, Classify)]
        #[classify($mark)]
        struct $name;

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("failed")
            }
        }

        impl std::error::Error for $name {}
    };
}
error!(Failed, terminal);

macro_rules! handler {
    ($name:ident, $key:literal, $consumer:literal, $event:ty, $tx:ty, $returned:ty) => {
        #[idempotent(key = [$key, "amount"], consumer = $consumer, attempts = 5, fingerprint = ["amount", $key])]
        async fn $name(event: $event, tx: $tx, job: &Job, gateway: State<u8>) -> $returned {
            let _ = (event.order_id, tx, job, gateway);
            Ok(())
        }
    };
}
handler!(issue_invoice, "order_id", "invoice", OrderPaid, &mut Tx, Result<(), Failed>);

macro_rules! batch {
    ($name:ident $events:ident $field:ident $events_type:ty) => {
        #[idempotent(key = $field, consumer = "invoice")]
        async fn $name($events: $events_type) -> Result<(), Failed> {
            drop($events);
            Ok(())
        }
    };
}
batch!(issue_invoices events order_id Vec<OrderPaid>);

fn main() {
    let _ = (issue_invoice, issue_invoices);
    assert!(<issue_invoices as idem_core::Handler>::SPEC.batch);
}
