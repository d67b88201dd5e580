//! Nothing of the standard library is in scope.

#![no_implicit_prelude]
#![deny(warnings)]

#[derive(::serde::Deserialize)]
pub struct OrderPaid {
    order_id: ::std::string::String,
    amount: i64,
}

pub struct Gateway;

#[derive(Debug, ::idem_macros::Classify)]
#[classify(terminal)]
pub enum InvoiceError {
    NoLines,
    #[classify(inner)]
    Io(::std::io::Error),
}

impl ::std::fmt::Display for InvoiceError {
    fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
        f.write_str("no invoice")
    }
}

impl ::std::error::Error for InvoiceError {}

/// Every argument and every kind of parameter.
#[::idem_macros::idempotent(
    key = ["order_id", "header:tenant"],
    consumer = "invoice",
    lease = "2m",
    max_run = "1m 30s",
    attempts = 5,
    backoff = "100ms..1m",
    fingerprint = "amount",
    domain_unique = "uq_invoices_order_id"
)]
pub async fn issue_invoice(
    event: OrderPaid,
    tx: &mut ::idem_core::store::Tx,
    job: &::idem_core::Job,
    gateway: ::idem_core::State<Gateway>,
) -> ::std::result::Result<(), InvoiceError> {
    let _ = (event.order_id, event.amount, tx, job, gateway);
    ::std::result::Result::Err(InvoiceError::NoLines)
}

#[::idem_macros::idempotent(key = order_id, consumer = "invoice")]
pub async fn issue_invoices(
    events: ::std::vec::Vec<OrderPaid>,
    jobs: &[::idem_core::Job],
) -> ::std::result::Result<(), ::std::io::Error> {
    let _ = (events, jobs);
    ::std::result::Result::Ok(())
}

fn main() {
    let _ = (issue_invoice, issue_invoices, InvoiceError::Io);
}
