use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "invoice")]
struct IssueInvoice;

#[idempotent(key = "header:id", consumer = "invoice")]
pub mod issue_invoice {}

fn main() {}
