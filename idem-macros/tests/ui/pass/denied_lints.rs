//! Every lint that a strict crate may deny, and attributes of the user's own on the function.

#![deny(warnings)]
#![deny(
    missing_debug_implementations,
    missing_docs,
    non_ascii_idents,
    single_use_lifetimes,
    trivial_casts,
    trivial_numeric_casts,
    unreachable_pub,
    unsafe_code,
    unused_extern_crates,
    unused_import_braces,
    unused_lifetimes,
    unused_qualifications,
    unused_results,
    variant_size_differences
)]

use idem_core::store::Tx;
// What is in scope must not make generated paths look too long.
#[allow(unused_imports)]
use idem_core::*;
use idem_macros::{Classify, idempotent};
use serde::Deserialize;

/// An order was paid.
#[derive(Debug, Deserialize)]
pub struct OrderPaid {
    order_id: u64,
}

/// It failed.
#[derive(Debug, Classify)]
#[classify(terminal)]
#[non_exhaustive]
pub enum Failed {
    /// Once.
    #[deprecated]
    Once,
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("failed")
    }
}

impl std::error::Error for Failed {}

/// Issues an invoice.
#[idempotent(key = "order_id", consumer = "invoice")]
pub async fn issue_invoice(event: OrderPaid, tx: &mut Tx) -> Result<(), Failed> {
    let _ = (event.order_id, tx);
    Ok(())
}

/// Lints of the body stay in the user's hands.
#[idempotent(key = "order_id", consumer = "invoice")]
#[expect(unused_variables, reason = "to be written")]
#[allow(dead_code, reason = "to be used")]
#[inline]
#[must_use]
async fn not_written_yet(event: OrderPaid) -> Result<(), Failed> {
    Ok(())
}

/// Absent, with everything that was made for it.
#[idempotent(key = "order_id", consumer = "invoice")]
#[cfg(any())]
async fn not_here(event: Nowhere) -> Nothing {}

/// Replaced.
#[idempotent(key = "order_id", consumer = "invoice")]
#[deprecated]
pub async fn replaced(event: OrderPaid) -> Result<(), Failed> {
    let _ = event.order_id;
    Ok(())
}

fn main() {
    let _ = issue_invoice;
}
